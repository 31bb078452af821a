"""What is special to parallel_3d.py: every mesh trains alike; which group adds up what, and when."""

import ast
import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.checks import check_ledger, check_parity
from tests.gpu import check_gpu, check_order, in_order, together
from tests.harness import TINY, Lesson, error_of, holds, load, mutants, on_ranks, path_of

NAIVE = "--naive"
FILM = "--layers 2 --tp 2 --pp 2 --accum 2"
RACE = "8 --batch 32 --context 64 --accum 4"
LESSON = Lesson(
    variants=("--naive",),
    own={"--tp": ("1 2", "-1 5 x"), "--pp": ("1 2", "-1 5 x")},
    bad=("--tp 3", "--heads 9", "--vocab 254", "--layers 1"),
    races=("", "--tp 1 --pp 2", "--tp 1 --pp 1"),
    gpu=("--naive", "--tp 1 --pp 2", "--tp 1 --pp 1"),
    orders=[
        *((size, "--layers 8 --accum 4") for size in (2, 3, 8)),
        *((4, f"--layers 8 --accum 3 --tp {tp} --pp {pp}") for tp, pp in ((2, 1), (1, 2), (1, 1), (4, 1))),
        *((4, f"--layers 8 --tp 1 --pp 4 --accum 8 {flags}") for flags in ("", "--naive")),
        *((8, f"--layers 8 --accum 4 --tp {tp} --pp {pp}") for tp, pp in ((2, 4), (1, 4), (4, 1))),
    ],
)


# ranks, tp, pp; test_all.py has the defaults on 1 to 8
MESHES = [(2, 1, 1), (2, 1, 2), (4, 4, 1), (4, 2, 1), (4, 1, 4), (4, 1, 2), (8, 4, 1), (8, 2, 4), (8, 1, 4)]
SHAPE = "--layers 9 --heads 8 --width 24 --vocab 264 --batch 16 --steps 2"


def check_mesh(name, size=8, tp=2, pp=2, flags="--accum 2", own=""):
    check_parity(name, size, f"{SHAPE} {flags}", f"--tp {tp} --pp {pp} {own}")


@pytest.mark.long_table
@pytest.mark.parametrize("size, tp, pp", [*MESHES, (8, 2, 2)])
def test_every_mesh_trains_as_single_py_and_its_bytes_are_the_formulas(size, tp, pp):
    check_mesh("parallel_3d", size, tp, pp)
    if pp > 1:
        check_mesh("parallel_3d", size, tp, pp, own="--naive")
    for flags in "--accum 3", "--accum 2 --dtype bf16":
        check_ledger("parallel_3d", size, f"--layers 5 --batch 48 --heads 12 --tp {tp} --pp {pp} {flags}")


def test_bytes_and_parameters_are_the_papers():
    # arXiv 2104.04473: equation 2, section 3, for a GPT of 175 G; 8 ranks a matrix, 12 stages of 8 blocks
    ledger, formulas, lesson = load("tools/ledger"), load("tools/formulas"), load("parallel_3d")
    L, h, V, s, b = 96, 12288, 51200, 2048, 1
    params = 12 * L * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * L * h))
    assert formulas.parameters(L, h, V, s) == round(params) + 2 * h  # and the last norm
    letters = dict(zip("LhvsbkwtpdR", (8, h, V, s, b, 1, 2, 8, 12, 8, params / 96)))
    texts = ledger.read_formulas(lesson, lesson.parse("--tp 8 --pp 12".split()))
    for what, more, numbers in (
        ("tensor", {"L": 9}, 8 * b * s * h * 7 / 8),  # for a block
        ("pipeline", {"k": 2}, 2 * b * s * h),  # for a microbatch: an output, and a gradient
        ("data", {"d": 1}, -2 * 7 / 8 * params / 96),
    ):
        one, two = (ledger.evaluate(texts[what], letters | each) for each in ({}, more))
        assert two - one == pytest.approx(2 * numbers), f"other {what}"


def code_of(name, function):
    """A function of a lesson, without its docstring and the groups that it is given."""
    body = ast.parse(path_of(name.removesuffix(".py")).read_text()).body
    tree = next(node for node in body if getattr(node, "name", "") == function)
    tree.body = tree.body[bool(ast.get_docstring(tree)) :]
    return re.sub(r", (group=)?group\b", "", ast.unparse(tree).replace("(group)", "()"))


def check_pieces(name):
    """Pieces are those of their own lessons, whose tests are also theirs, but for the group."""
    for lesson, functions in (
        ("pipeline", "receive pipelined"),
        ("tensor_parallel", "add_up parallel_loss own_index split_of own_part whole_of"),
    ):
        for function in functions.split():
            assert code_of(name, function) == code_of(lesson, function), f"another {function}()"


def trained(name, flags, **replaced):
    """A run of a lesson on this rank, with other functions: {name: function(the lesson's own, ...)}."""
    lesson = load(name)
    for key, function in replaced.items():
        setattr(lesson, key, partial(function, getattr(lesson, key)))
    lesson.train(lesson.parse(f"{TINY} {flags}".split()))


@on_ranks(8)
def check_groups(name):
    """Ranks of a group differ in one coordinate alone, tensor-parallel ones being neighbours."""
    for flags, expected in (
        ("--tp 2 --pp 2", {"data": [1, 5], "tensor": [4, 5], "F": [5, 7], "B": [5, 7], "tie": [5, 7]}),
        ("--tp 2 --pp 4", {"data": [5], "tensor": [4, 5], "F": [1, 3, 5, 7], "B": [1, 3, 5, 7], "tie": None}),
    ):
        given = []
        build = lambda own, config, groups: (given.append(groups), own(config, groups))[1]  # noqa: B023, E731
        trained(name, f"--layers 4 --steps 1 --batch 48 {flags}", Stage=build)
        found = {key: group and dist.get_process_group_ranks(group) for key, group in given[0].items()}
        assert dist.get_rank() != 5 or found == expected, f"{flags}: other groups: {found}"


@on_ranks(8)
def check_timeline(name):
    """Which groups add up what, in a step."""
    log, all_reduce = [], dist.all_reduce

    def noted(x, *args, **options):
        group = options.get("group") or args[-1]
        log.append(group.group_desc)
        return all_reduce(x, *args, **options)

    def pipelined(own, *args):
        log.append("begin")
        own(*args)
        log.append("end")

    with mock.patch.object(dist, "all_reduce", noted):
        trained(name, "--steps 2 --accum 2 --batch 48", pipelined=pipelined)
    steps = " ".join(log).split("begin ")
    during, after = steps[2].split(" end ")
    assert {*during.split()} == {"tensor"}, f"other sums in F and B: {during}"
    assert after == "data tie tensor pipeline pipeline data", f"another order of sums: {after}"


@on_ranks(4)
def check_schedule(name):
    """A stage's forwards and backwards are those of pipeline.py, naive and 1F1B."""
    order, given = load("pipeline").order, []
    for flags, schedule in ("", "1f1b"), ("--naive", "naive"):
        note = lambda own, *args: (given.append(args[3]), own(*args))  # noqa: E731
        trained(name, f"--layers 4 --steps 1 --tp 1 --pp 4 --accum 6 {flags}", pipelined=note)
        expected = order(schedule, dist.get_rank(), 4, 6)
        assert given.pop() == expected, f"not {schedule}, {expected}"


@on_ranks(2)
def check_evaluation(name, flags=""):
    """Under no_grad() forwards alone have the loss of training, and leave nothing behind."""
    found = []

    def both(own, stage, batch, message, ops, groups):
        batch = list(batch)
        with torch.no_grad():
            said = error_of(lambda: own(stage, iter(batch), message, "F" * len(batch), groups))
        assert said == "nothing", f"no evaluation: {said}"
        assert all(param.grad is None for param in stage.parameters()), "gradients of an evaluation"
        found.append(stage.total_loss.item())
        stage.total_loss.zero_()
        own(stage, iter(batch), message, ops, groups)
        found.append(stage.total_loss.item())

    trained(name, f"--accum 3 --dtype fp64 {flags}", pipelined=both)
    assert found[::2] == pytest.approx(found[1::2], rel=1e-12), "another loss"


CHECKS = check_pieces, check_groups, check_timeline, check_schedule
evaluations = check_evaluation, partial(check_evaluation, size=4)
few_microbatches = partial(check_mesh, size=4, tp=1, pp=4, flags="--accum 1")  # fewer than stages
test_each_promise_is_kept = holds("parallel_3d", *CHECKS, *evaluations, few_microbatches)
norm = partial(check_mesh, flags="--accum 2 --steps 1")
SPLIT = "squared_norm([param.grad for param in split])"
MUTANTS = [
    # what several ranks hold, in the norm
    (f"squares + add_up({SPLIT}, ", f"add_up(squares + {SPLIT}, ", norm, "norms differ"),
    ('stage.is_first or each[0] != "tokens.weight"', "True", norm, "norms differ"),
    (f"add_up({SPLIT}, groups[\"tensor\"])", SPLIT, norm, "norms differ"),
    ('add_up(squares, groups["F"])', "squares", norm, "norms differ"),
    ('add_up(squares, groups["F"])', 'add_up(add_up(squares, groups["F"]), groups["data"])', norm, "norms"),
    # gradients: over the wrong group, of norms once more, of the head or the input of a matrix alone
    ('(params, groups["data"])', '(params, groups["tensor"])', norm, "norms differ"),
    ('(params, groups["data"])', '(params, groups["data"]); all_reduce_gradients(replicated, stage.group)',
     norm, "norms differ"),
    ('dist.all_reduce(stage.tokens.weight.grad, group=groups["tie"])', "pass", norm, "norms differ"),
    ("x.register_hook(lambda grad: add_up(grad, group))", "pass", norm, "norms differ"),
    ("        param.grad = part.view_as(param)", "        pass", norm, "norms differ"),
    # losses, and the batch
    ('add_up(add_up(stage.total_loss, groups["F"]), groups["data"])',
     'add_up(add_up(stage.total_loss, groups["F"]), stage.group)', norm, "losses differ"),
    ('dist.get_rank(groups["data"]), config.dp)', "0, config.dp)", norm, "losses differ"),
    (" / self.n_microbatches", "", norm, "losses differ"),
    # the model
    ("i * n_stages // config.layers]", "(config.layers - 1 - i) * n_stages // config.layers]", norm,
     "differ"),
    ("self.proj.weight), self.group) + self.proj.bias", "self.proj.weight, self.proj.bias), self.group)",
     check_mesh, "differ"),
    ("index = token - size * dist.get_rank(group)", "index = token - size * dist.get_rank()", norm, "differ"),
    ("if x.requires_grad:", "if True:", check_evaluation, "no evaluation: RuntimeError"),
    ("for state in stages for", "for state in stages[:1] for", check_mesh, "other names"),
    # the mesh, and the schedule
    ("new_group(ranks, 0, ", "new_group(ranks, 2, ", check_groups, "other groups"),
    ("1 if config.naive else min", "min", check_schedule, "not naive"),
    ("min(config.accum, config.pp - dist", "min(config.accum, config.pp + 1 - dist", check_schedule,
     "not 1f1b"),
    ("sends.pop(0).wait()", "pass", check_pieces, "another pipelined()"),
    ('"qkv.weight": (0, 3)', '"qkv.weight": (0, 1)', check_pieces, "another split_of()"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "parallel_3d")
four = partial(together, in_order, rows=[(4, "--layers 8 --tp 1 --pp 4 --accum 8")])
GPU_MUTANTS = [
    ("config.clip, norm)", "config.clip, norm + 0 * norm.item())", check_gpu, "the host waits"),
    ("rows.tolist()", "rows.tolist()[:: -1 if dist.get_rank() else 1]", check_order, "ranks do not meet"),
    # a send behind a receive that needs it
    ('{op: new_group(ranks, 1, "pipeline") for op in "FB"}',
     'dict.fromkeys("FB", new_group(ranks, 1, "pipeline"))', four, "ranks wait for one another"),
    ("if stage.is_first or stage.is_last:", "if stage.is_first:", four, "ranks wait for one another"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "parallel_3d")
