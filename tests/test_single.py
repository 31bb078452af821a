"""What is special to single.py, and what all lessons have from it."""

import itertools
import math
import os
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch

from tests.checks import check_parity
from tests.harness import (
    FORK,
    TINY,
    Lesson,
    holds,
    lessons,
    load,
    mutants,
    on_ranks,
    path_of,
    said,
    train,
    world,
)
from tests.test_zero1 import check_norm

RUN = "python LESSON"
LESSON = Lesson(worlds=(1,))


def shares(single, flags, replicas):
    """The tokens of two steps of a global batch, in the order of its shares."""
    config = single.parse(flags.split())
    _, text = single.set_up(config)
    drawn = []
    for step, rank in itertools.product((1, 2), range(replicas)):
        for inputs, targets in single.microbatches(config, text, step, "cpu", rank, replicas):
            assert torch.equal(inputs[:, 1:], targets[:, :-1]), "targets are not the next tokens"
            drawn.append(inputs)
    return torch.cat(drawn)


@on_ranks(1)
def check_batches(name):
    single = load(name)
    whole = shares(single, "--batch 12", 1)
    assert whole.shape == (24, 64) and not torch.equal(whole[:12], whole[12:]), "steps draw the same"
    for replicas, accum in (2, 1), (3, 2), (4, 3):
        own = shares(single, f"--batch 12 --accum {accum}", replicas)
        assert torch.equal(own, whole), "another global batch"
    assert not torch.equal(shares(single, "--batch 12 --seed 1", 1), whole), "another seed draws the same"


def test_a_folder_is_read_as_one_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two").write_bytes(b"world" * 20)
    (tmp_path / "a").write_bytes(b"hello ")
    (tmp_path / "empty").write_bytes(b"")
    assert world(1).run(read, str(tmp_path))[0] == b"hello " + b"world" * 20


def read(folder):
    single = load("single")
    _, text = single.set_up(single.parse(["--data", folder]))
    return bytes(text.tolist())


@on_ranks(1)
def check_data(name):
    """What is no file, has too few bytes, or has more than memory may, is refused before it is read."""
    lesson = load(name)

    def read_bytes(path):
        raise AssertionError(f"{path.name} is read")

    with TemporaryDirectory() as folder, mock.patch.object(Path, "read_bytes", read_bytes):
        os.mkfifo(f"{folder}/pipe")
        Path(folder, "two").mkdir()
        for file, size in ("few", 64), ("huge", 6e10), ("two/one", 1.5e9), ("two/other", 1.5e9):
            with open(f"{folder}/{file}", "wb") as hole:
                hole.truncate(int(size))
        for path in "/dev/zero", *(f"{folder}/{file}" for file in ("pipe", "few", "huge", "two")):
            config = lesson.parse(["--data", path, "--context", "64"])
            _, lines, code = said(lambda config=config: lesson.set_up(config))
            assert code == 2 and len(lines) == 1 and f"--data {path}: must have more bytes" in lines[0], lines


def test_a_file_of_a_sequence_and_a_byte_is_enough(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 65)
    assert world(1).run(read, str(tmp_path / "text"))[0] == b"x" * 65


ODD_VARIABLES = [
    ({"WORLD_SIZE": "2"}, "RANK"),
    ({"WORLD_SIZE": ""}, "RANK"),
    ({"WORLD_SIZE": "2", "RANK": ""}, "RANK"),
    ({"RANK": "0"}, "WORLD_SIZE"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
]


def end_with(name, variables):
    """In a process that is no rank: (lines on stderr, exit code) of a lesson, with such an environment."""
    lesson = load(name)
    with mock.patch.dict(os.environ, variables), mock.patch("time.sleep"):
        try:
            return said(lambda: lesson.train(lesson.parse(TINY.split())))[1:]
        except Exception as error:
            return [f"{type(error).__name__}: {error}"], "a traceback"


def check_variables(name):
    """A lesson that is told that it is one rank of several, but not all of it, does not train alone."""
    with ProcessPoolExecutor(1, FORK) as process:
        for variables, missing in ODD_VARIABLES:
            lines, code = process.submit(end_with, name, variables).result()
            assert code == 2 and len(lines) == 1, f"{variables}: not refused, but {code}: {lines}"
            assert f"{missing} expected" in lines[0] or "without torchrun" in lines[0], (
                f"{variables}: {lines}"
            )


@on_ranks(1)
def check_master_steps(name):
    """A group has 2^24 elements at most, or one parameter; steps are those of fp32 weights, rounded."""
    lesson = load(name)
    sizes = (2**23, 2**23, 5, 2**24 + 1, 7)
    params = [torch.nn.Parameter(torch.empty(size, dtype=torch.bfloat16)) for size in sizes]
    own = lesson.MasterWeights(torch.optim.SGD, params, lr=1)
    groups = [master.numel() for _, master, _ in own.groups]
    assert groups == [2**24, 5, 2**24 + 1, 7], f"other groups: {groups}"
    grads = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    params = [torch.nn.Parameter(torch.linspace(0.1, 1, 5).bfloat16()) for _ in range(2)]
    wide = [torch.nn.Parameter(param.detach().float()) for param in params]
    optimizers = [lesson.MasterWeights(torch.optim.AdamW, params, lr=1e-3), torch.optim.AdamW(wide, lr=1e-3)]
    for step in grads:
        for each, optimizer in zip((params, wide), optimizers):
            for param, grad in zip(each, step):
                param.grad = grad.bfloat16().to(param.dtype)
            optimizer.step()
    for param, each in zip(params, wide):
        assert torch.equal(param, each.bfloat16()), "not the fp32 steps, rounded"


def test_master_weights_are_the_same_lines_in_every_lesson():
    sources = [path_of(name).read_text() for name in lessons()]
    texts = re.findall(r"^class MasterWeights:.*?^\n\n", "\n".join(sources), re.S | re.M)
    assert len(texts) == 11 and len(set(texts)) == 1


def test_the_loss_starts_at_chance_and_falls():
    result, _ = train("single", 1, "")
    assert abs(result["losses"][0] - math.log(256)) < 0.1 and result["losses"][-1] < 4


test_master_weights_step_in_fp32_in_groups_and_round = holds(("single", "ddp"), check_master_steps)
test_batches_and_norms_are_right = holds("single", check_batches, check_norm)
test_what_is_no_text_is_not_read = holds("single", check_data)
test_torchruns_variables_are_all_there_or_none_is = holds(list(lessons()), check_variables)
MUTANTS = [
    ("single", "(config.seed, step)", "(config.seed, 0)", check_batches, "steps draw the same"),
    ("single", "(config.seed, step)", "(0, step)", check_batches, "another seed"),
    ("single", "config.accum, -1)[rank]", "config.accum, -1)[0]", check_batches, "another global batch"),
    ("single", "tokens[..., 1:]", "tokens[..., :-1]", check_batches, "targets are not"),
    ("single", "grads, dtype=torch.float64", "grads", check_norm, "the norm is"),
    ("single", "(max_norm / ", "(2 * max_norm / ", check_norm, "what is clipped"),
    ("single", "torch._foreach_copy_(", "zip(", check_master_steps, "not the fp32 steps"),
    ("single", "params, 2**25", "params, 1", check_master_steps, "other groups"),
    ("single", "if not config.context < sum", "if not config.context <= sum", check_data, "few is read"),
    ("single", " <= 2e9", "", check_data, "huge is read"),
    ("single", "sum(map(os.path", "max(map(os.path", check_data, "one is read"),
    ("ddp", '{"RANK", "WORLD_SIZE"} &', '{"RANK"} &', check_variables, "not refused"),
    ("ddp", '{"RANK", "WORLD_SIZE"} &', '{"WORLD_SIZE"} &', check_variables, "not refused"),
    ("ddp", '"WORLD_SIZE") or 1)', '"WORLD_SIZE", 1))', check_variables, "not refused"),
    ("ddp", "(OSError, ValueError)", "OSError", check_variables, "not refused, but a traceback"),
    ("ddp", 'os.getenv("RANK", "") in "0"', 'os.getenv("RANK", "0") == "0"', check_variables, "not refused"),
    ("ddp", "microloss.detach()", "microloss.detach() / 2", check_parity, "losses differ"),
    ("ddp", "/ config.accum\n", "\n", check_parity, "losses differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS)
