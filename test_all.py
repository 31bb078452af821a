"""The promises that every lesson keeps. What is special to one, and its mutants, is in tests/test_NAME.py."""

import ast
import itertools
import os
import random
import re
import sys

import pytest

from tests import gpu
from tests.checks import (
    check_ledger,
    check_masters,
    check_parity,
    check_peers,
    check_refusal,
    end_of,
    optimizers_made,
    oracle,
    steps_of,
)
from tests.harness import TINY, apart, holds, lessons, path_of, plain_of, run_of, spec, train, world

# Flag: good values; odd ones, which every lesson refuses.
FLAGS = {
    "--layers": ("1 2 3 5", "1.5 x"), "--heads": ("1 2 4 12", "1.5 x"),
    "--width": ("12 24 48", "1.5 x"), "--context": ("4 12 24", "1.5 x 1000000000"),
    "--vocab": ("256 257 300", "1.5 x"), "--steps": ("1 2", "1.5 x"),
    "--batch": ("4 8 12 24", "1.5 x"), "--accum": ("1 2 3 4", "1.5 x"),
    "--lr": ("0 0.001 0.01", "x"), "--clip": ("0.1 1 inf", "x"), "--seed": ("0 7", "1.5 x"),
    "--dtype": ("fp64 fp64 fp32", "fp16"),
    "--data": ("LICENSE README.md", "nowhere /dev/null"), "--save": ("{tmp}/x.pt", "/no/such/x.pt"),
}  # fmt: skip
BAD_FLAGS = ("--batch 7 --accum 2", "--size huge", "--no-such-flag")
NAMES = list(lessons())
every_lesson = pytest.mark.parametrize("name", NAMES)


def cells(*rows):
    """For every lesson (name, size, flags) of these rows, with its largest world for one that it has not."""
    every = {}
    for name, (size, flags) in itertools.product(NAMES, rows):
        lesson = spec(name)
        every[name, min(size, lesson.worlds[-1]), f"{flags} {lesson.flags}".strip()] = None
    return pytest.mark.parametrize("name, size, flags", every)


@pytest.mark.long_table
@cells(*((n, "--accum 3") for n in (1, 3, 4)), (2, ""), (2, "--accum 3 --clip inf"))
def test_losses_norms_and_weights_are_single_pys(name, size, flags):
    check_parity(name, size, flags)


@pytest.mark.long_table
@pytest.mark.parametrize("name", NAMES[1:])
def test_with_its_defaults_on_8_ranks_a_lesson_is_single_py_to_the_last_printed_digit(name):
    flags = "--steps 2"
    plain, _ = oracle(name, flags)
    own, _ = train(name, 8, flags)
    for key, digits in (("losses", 4), ("grad_norms", 3))[: 1 + spec(name).norms]:
        assert apart(own[key], plain[key]) < 0.5 * 10**-digits, f"{key} differ"


@every_lesson
def test_bf16_weights_have_fp32_masters(name):
    check_masters(name, min(2, spec(name).worlds[-1]))


@every_lesson
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_optimizers_step_all_their_tensors_in_one_kernel(name, dtype):
    made = world(spec(name).worlds[0]).run(optimizers_made, name, f"{TINY} --lr 0.5 --dtype {dtype}")[0]
    assert made and all(each == {"lr": 0.5, "fused": True} for each in made)


RACES = [f"{name} {flags}".strip() for name in NAMES for flags in spec(name).races]
test_training_ends_in_the_weights_of_its_peers = pytest.mark.long_table(holds(RACES, check_peers))


@pytest.mark.long_table
@cells((2, "--dtype bf16"), (2, ""), *((n, "--accum 3") for n in (1, 2, 4)))
def test_bytes_held_and_sent_are_the_docstrings_formulas(name, size, flags):
    check_ledger(name, size, flags)


VARIANTS = [(name, spec(name).worlds[-1], flags) for name in NAMES for flags in spec(name).variants]


@pytest.mark.long_table
@pytest.mark.parametrize("name, size, flags", VARIANTS)
def test_numbers_are_the_same_and_bytes_the_formulas_with_flags_of_its_own(name, size, flags):
    check_parity(name, min(3, size), f"--accum 3 {spec(name).flags}".strip(), flags)
    check_ledger(name, size, f"--accum 3 {flags}")


@pytest.mark.long_table
@every_lesson
def test_a_lesson_runs_on_gpus(name):
    gpu.check_gpus(name)


@pytest.mark.long_table
@pytest.mark.parametrize("name", [name for name in NAMES if not run_of(name)[0]])
def test_ranks_meet_in_the_order_that_nccl_needs(name):
    gpu.together(gpu.in_order, name, gpu.orders_of(name))


def test_ranks_that_share_a_gpu_meet_over_nccl():
    gpu.check_shared("single")


@pytest.mark.long_table
@every_lesson
def test_bad_input_ends_in_a_line_that_says_what_to_change(name):
    lesson = spec(name)
    table = FLAGS | lesson.own
    odd = [f"{flag} {value}".format(tmp="/") for flag, (_, bad) in table.items() for value in bad.split()]
    for flags in (*odd, *BAD_FLAGS, *lesson.bad):
        check_refusal(name, flags, lesson.worlds[-1])


def draw(chance, folder):
    """A lesson, a number of ranks, the flags of all lessons, and its own. In half of all draws one is odd."""
    name = chance.choice(NAMES)
    own = spec(name).own
    flags = {flag: chance.choice(good.split()) for flag, (good, _) in FLAGS.items() if chance.random() < 0.6}
    flags |= {"--layers": chance.choice("123"), "--width": "24", "--steps": "2"} | flags
    theirs = {flag: chance.choice(good.split()) for flag, (good, _) in own.items() if chance.random() < 0.5}
    if chance.random() < 0.5:
        flag, (_, bad) = chance.choice([*FLAGS.items(), *own.items(), *own.items()])
        (theirs if flag in own else flags)[flag] = chance.choice(bad.split())
    both = [" ".join(f"{k} {v}" for k, v in each.items()).format(tmp=folder) for each in (flags, theirs)]
    return name, chance.choice(spec(name).worlds), *both


def test_random_flags_end_in_single_pys_numbers_or_are_refused(tmp_path):
    seed, runs = os.environ.get("FUZZ", "0 80").split()
    chance, trained = random.Random(seed), 0
    for i in range(int(runs)):
        folder = tmp_path / str(i)
        folder.mkdir()
        name, size, flags, own = draw(chance, folder)
        is_alone, run_flags = run_of(name)
        plain, plain_flags = plain_of(name)
        try:
            steps = steps_of(name, size, f"{flags} {'' if is_alone else run_flags} {own}")
            if steps:
                more = own if plain != "single" else ""
                expected = steps_of(plain, 1, f"{flags} {more} {plain_flags}")
                if not spec(name).norms:
                    steps, expected = ([loss for loss, _ in each] for each in (steps, expected))
                assert apart(steps, expected) < (1e-9 if "fp64" in flags else 1e-2)
                trained += 1
        except Exception as error:
            pytest.fail(f"seed {seed}, run {i}: {name}.py on {size} ranks: {flags} {own}: {error}")
    print(f"seed {seed}: {runs} runs, {trained} trained as single.py, the others were refused")


@pytest.mark.parametrize("name", [name for name in NAMES if run_of(name)[0]])
def test_a_lesson_of_one_process_refuses_a_world_of_several(name):
    for code, lines, _ in world(2).run(end_of, name, TINY):
        assert code and (not lines or "start it with" in lines[0] or "without torchrun" in lines[0])


PEERS = r"DistributedDataParallel|DataParallel|fully_shard|FullyShardedDataParallel|ZeroRedundancyOptimizer"
PEERS += r"|distributed\.(fsdp|pipelining|tensor|optim|checkpoint)|utils\.checkpoint|nn\.parallel"
ENDS = r'^# ==== end of the toy model ====$|^        print\(f"step {step:2}[^\n]*$'
TOY = re.compile(rf"^# ==== toy model.*?(?:{ENDS})", re.S | re.M)
HEADINGS = ["Idea", "Timeline", "Memory", "Sent", "Run", "Left out"]


@every_lesson
def test_the_toy_block_is_single_pys_to_the_letter(name):
    own, models = (TOY.findall(path_of(each).read_text()) for each in (name, "single"))
    assert own == models and len(own) == 1


@every_lesson
def test_a_lesson_stands_alone_and_borrows_no_peer(name):
    tree = ast.parse(path_of(name).read_text())
    code = "\n".join(map(ast.unparse, tree.body[1:]))  # without comments and the module's docstring
    for name in re.findall(r"^ *(?:import|from) (\w+)", code, re.M):
        assert name in {*sys.stdlib_module_names, "torch", "numpy"}, f"imports {name}"
    used = re.search(PEERS, code)
    assert not used, f"uses a peer: {used}"


@every_lesson
def test_a_lesson_has_its_headings_and_the_technique_first(name):
    source = path_of(name).read_text()
    docstring = ast.get_docstring(ast.parse(source))
    assert re.findall(r"^([A-Z][a-z ]+?)(?: \(.*\))?$", docstring, re.M) == HEADINGS
    assert docstring.count("\n") < 60
    first = re.search(r"^(class|def) ", source, re.M).start()
    assert first <= source.index("\ndef train(") + 1 < source.index("# ==== toy model")
    assert "synchronize()" not in source and "barrier" not in source
    assert re.search(r"\n    \(?train.*\)\n    dist\.destroy_process_group\(\)\n\Z", source)
