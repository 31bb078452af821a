"""What is special to collectives.py: the sums, the rounds of its timeline, the costs that it prints."""

import re
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from tests.checks import check_ledger, check_masters, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import TINY, Lesson, apart, error_of, holds, load, mutants, on_ranks, said, world

NAIVE = "--naive"
RACE = "4"
LESSON = Lesson(variants=("--naive",), races=("",))


@on_ranks(3)
def check_sums(name):
    """Sums are the library's, and all ranks have the same bits."""
    lesson, rank = load(name), dist.get_rank()
    for all_reduce in lesson.naive_all_reduce, lesson.ring_all_reduce:
        for shape, dtype in ((2,), torch.float64), ((5, 7), torch.float32), ((1003,), torch.bfloat16):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
            expected = x.double()
            dist.all_reduce(expected)
            all_reduce(x)
            everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, x)
            for other in everyone:
                worst = apart(other, expected)
                assert worst < 16 * torch.finfo(dtype).eps, f"{all_reduce.__name__}: not the sum"
                assert torch.equal(x, other), "ranks have other bits"


@pytest.mark.parametrize("size", range(1, 7))
def test_sums_are_the_librarys(size):
    check_sums("collectives", size=size)


@on_ranks(2)
def check_contiguous(name):
    """A tensor without a flat view is an error: a copy's sum would be lost."""
    error = error_of(lambda: load(name).ring_all_reduce(torch.ones(4, 6).t()))
    assert "view size" in error, f"its sum is lost: {error}"


@on_ranks(4)
def check_timeline(name):
    """Rounds on rank 3 of 4 are those of the docstring."""
    lesson, rows = load(name), []
    x = (dist.get_rank() + 1) * torch.tensor([1, 10, 100, 1000])
    exchange, states = lesson.exchange, []

    def watched(send, receive):
        row = [send[1].storage_offset(), send[1].item()]
        states.append(x.tolist())
        exchange(send, receive)
        rows.append([*row, receive[1].item()])

    lesson.exchange = watched
    lesson.ring_all_reduce(x)
    states.append(x.tolist())
    if dist.get_rank() == 3:
        row = r"^    \d +\| chunk (\d): (\d+) +\| chunk (\d): (\d+) +\| (\d+), (\d+), (\d+), (\d+)"
        written = [list(map(int, each)) for each in re.findall(row, lesson.__doc__, re.M)]
        arrived = [[a == b for a, b in zip(*both)].index(False) for both in pairwise(states)]
        found = [[*row[:2], at, row[2], *state] for row, at, state in zip(rows, arrived, states[1:])]
        assert found == written, f"other rounds: {found}"


def printed(name):
    lesson = load(name)
    return said(lambda: lesson.train(lesson.parse(f"{TINY} --steps 1".split())))[0].splitlines()


def check_costs(name):
    """What is counted is what the formulas say."""
    for size in 1, 2, 3, 4:
        lines, *others = world(size).run(printed, name)
        assert not any(others), "another rank prints"
        for line, sent in zip(lines, (3360 * (size - 1), 2 * 3360 * (size - 1) // size)):
            own = str({"rounds": 2 * (size - 1), "bytes": sent})
            assert f": {own} counted, {own} by formula" in line, f"not {own}: {line}"


test_each_promise_is_kept = holds("collectives", check_contiguous, check_timeline, check_costs)
naive = partial(check_parity, own_flags="--naive")
check_naive_bytes = partial(check_ledger, flags="--naive")
MUTANTS = [
    ("passing[i + 1] += received", "passing[i + 1].copy_(received)", check_sums, "ring_all_reduce: not"),
    ("range(N - 1, 2 * (N - 1))", "range(N - 1, 2 * N - 3)", check_sums, "ring_all_reduce: not"),
    ("chunks[(rank - i) % N]", "chunks[(rank + i) % N]", check_timeline, "other rounds"),
    ("range(1, 2 * N)]", "range(2 * N)]", check_timeline, "other rounds"),
    ("            x += received", "            x = x + received", check_sums, "naive_all_reduce: not"),
    ("x.view(-1)", "x.reshape(-1)", check_contiguous, "its sum is lost"),
    (" if op == dist.isend)", ")", check_costs, "not {'rounds'"),
    ('counted["rounds"] += 1', 'counted["rounds"] += len(messages)', check_costs, "not {'rounds'"),
    ("counted.update(rounds=0, bytes=0)", "pass", check_costs, "not {'rounds'"),
    ("if config.naive else", "if not config.naive else", check_naive_bytes, "send: sent"),
    ("        naive_all_reduce(total_loss)", "        pass", check_parity, "losses differ"),
    ("/ (config.accum * world_size)", "/ config.accum", check_parity, "differ"),
    ("            all_reduce(param.grad)", "            all_reduce(param.grad.clone())", naive, "differ"),
    ("detach().to(wide(param.dtype))", "detach()", check_masters, "moved by"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "collectives")
ONE_BY_ONE = "for op, x, peer in messages:\n        op(x, peer).wait()\n    for work in []:"
GPU_MUTANTS = [
    ("        work.wait()\n", "        pass\n", check_gpu, "uses what a collective still"),
    ("for work in dist.batch_isend_irecv([dist.P2POp(*message) for message in messages]):", ONE_BY_ONE,
     check_order, "ranks wait for one another"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "collectives")
