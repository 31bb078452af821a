"""What is special to collectives.py: the library's results, bytes on the wire."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.checks import check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import Lesson, error_of, holds, load, mutants, on_ranks, said, world

ALGORITHMS = "tree_broadcast recursive_doubling_all_reduce halving_doubling_all_reduce pairwise_all_to_all"
RING_FLAGS = "--batch 120 --context 8 --megabytes 1e-3"


def compare(lesson, config):
    lesson.compare(config)


def first(algorithm, lesson, config):
    """An algorithm that is the first to use its group."""
    lesson.set_up(config, replicas=1)
    getattr(lesson, algorithm)(torch.zeros(config.batch))


MAINS = [None, compare, *(partial(first, algorithm) for algorithm in ALGORITHMS.split())]
LESSON = Lesson(
    own={"--megabytes": ("0.1 1", "-1 nan x")},
    races=("",),
    orders=[(size, RING_FLAGS, main) for size in (3, 4, 6) for main in MAINS],
)


ALL_REDUCES = (
    "naive_all_reduce",
    "ring_all_reduce",
    "recursive_doubling_all_reduce",
    "halving_doubling_all_reduce",
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
CASES = [(length, torch.float32) for length in (0, 1, 2, 5, 1003)] + [(12, dtype) for dtype in DTYPES]


@on_ranks(3)
def check_equal(name, cases=CASES[-5:-4]):
    """Each algorithm is the library's, for these (length, dtype)."""
    lesson = load(name)
    rank, size = dist.get_rank(), dist.get_world_size()

    def rows_of(x):
        rows = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(rows, x)
        return torch.stack(rows)

    for length, dtype in cases:
        generator = torch.Generator().manual_seed(100 * rank + length)
        x = torch.randint(-20, 20, (length,), generator=generator).to(dtype)  # whose sums are exact
        inexact = torch.randn(length, generator=generator)
        rows = rows_of(x)
        total = rows.sum(0, dtype=dtype)
        found = {each: (x.clone(), total) for each in ALL_REDUCES}
        for each, (own, _) in found.items():
            getattr(lesson, each)(own)
            own = inexact.clone()
            getattr(lesson, each)(own)
            assert (rows_of(own) == own).all(), f"{each}: ranks have other bits"
        for src in range(size):
            found[src] = x.clone(), rows[src]
            lesson.tree_broadcast(found[src][0], src)
        shard = lesson.ring_reduce_scatter(x)
        found["ring_reduce_scatter"] = shard, total.tensor_split(size)[rank]
        found["ring_all_gather"] = lesson.ring_all_gather(x), rows.flatten()
        pieces = torch.cat([row.tensor_split(size)[rank] for row in rows])
        found["pairwise_all_to_all"] = lesson.pairwise_all_to_all(x), pieces
        for each, (own, expected) in found.items():
            assert torch.equal(own, expected), f"{each} of {length} {dtype}: not the library's"


@pytest.mark.parametrize("size", range(1, 7))
def test_every_algorithm_equals_the_librarys(size):
    check_equal("collectives", CASES, size=size)


@on_ranks(2)
def check_dimensions(name):
    """A matrix, of which an all-to-all would return other numbers, is an error."""
    lesson = load(name)
    for each in "ring_all_reduce", "ring_reduce_scatter", "pairwise_all_to_all":
        error = error_of(lambda each=each: getattr(lesson, each)(torch.zeros(4, 4)))
        assert "must have one dimension" in error, f"{each} of a matrix: {error}"


@on_ranks(4)
def check_bytes(name, numel=1200):
    """What all ranks send in each algorithm, as tools/watch.py counts it: the formula's bytes."""
    lesson, size = load(name), dist.get_world_size()
    power = 2 ** (size.bit_length() - 1)
    others = ("tree_broadcast", "ring_reduce_scatter", "ring_all_gather", "pairwise_all_to_all")
    shares = dict.fromkeys(others, size - 1) | dict.fromkeys(ALL_REDUCES, 2 * (size - 1))
    shares["recursive_doubling_all_reduce"] = power * (power.bit_length() - 1) + 2 * (size - power)
    for each, share in shares.items():
        with load("tools/watch").Watch() as watch:
            getattr(lesson, each)(torch.zeros(numel // size if each == "ring_all_gather" else numel))
        everyone = [None] * size
        dist.all_gather_object(everyone, watch.sent["send", "wire"])
        assert sum(everyone) == 4 * numel * share, f"{each} sent {everyone}, in all not the formula's bytes"


def printed(name, function, flags):  # as if each exchange took a second, and nothing else any time
    lesson = load(name)
    lesson.exchange = mock.Mock(wraps=lesson.exchange)
    lesson.time = mock.Mock(perf_counter=lambda: lesson.exchange.call_count)
    return said(lambda: getattr(lesson, function)(lesson.parse(flags.split())))[0].splitlines()


def check_table(name):
    lines, others = world(2).run(printed, name, "compare", "--megabytes 0.01")
    assert not others, "another rank prints"
    assert [int(line.split()[0]) for line in lines[1:]] == [4, 32, 256, 2048], f"other sizes: {lines}"
    for each, ms in zip((*ALL_REDUCES, "all_reduce"), (0, 2000, 1000, 2000, 0)):  # each by so many exchanges
        assert all(f" | {each} {ms}.00 ms" in line for line in lines[1:]), f"not {ms} ms for {each}: {lines}"


sent_by = [partial(check_bytes, size=size) for size in (2, 3, 4, 6)]
CHECKS = *sent_by, check_table, check_dimensions
test_each_promise_is_kept = holds("collectives", *CHECKS)
MUTANTS = [
    ("partial = chunks[rank - i - 1]", "partial = chunks[rank - i]", check_equal, "ring_all_reduce"),
    ("x.clone()", "x", check_equal, "ring_all_gather"),
    ("for i in range(len(chunks) - 1):", "for i in range(len(chunks) - 2):", check_equal, "ring_all_reduce"),
    ("        x += received\n    for", "        x = received\n    for", check_equal, "naive_all_reduce"),
    ("        reached *= 2", "        reached *= 3", partial(check_equal, size=4), "of 12"),
    ("out[rank - i]", "out[rank - i - 1]", check_equal, "pairwise"),
    ("exchange(given, partner, received", "exchange(x, partner, x.clone()", check_bytes, "halving"),
    ("1e3 / 5", "1e3 / 6", check_table, "not 2000 ms"),
    ("if x.dim() > 1:", "if False:", check_dimensions, "of a matrix"),
    ("recursive_doubling_all_reduce(loss)", "pass", check_parity, "losses differ"),
    ("flat_grad /= dist.get_world_size()", "pass", check_parity, "norms differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "collectives")
GPU_MUTANTS = [
    ("collectives", "        work.wait()\n", "        pass\n", check_gpu, "uses what a collective still"),
    (
        "collectives",
        "    for work in dist.batch_isend_irecv(ops):",
        "    for op in ops:\n        op.op(op.tensor, op.peer).wait()\n    for work in []:",
        check_order,
        "ranks wait for one another",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
