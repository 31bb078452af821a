"""What is special to hsdp.py: its groups, and who sends what to the other nodes, and when."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.checks import EXACT, check_ledger, check_masters, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import TINY, Lesson, apart, holds, load, mutants, on_ranks, train
from tests.test_zero1 import SITUATIONS, TIMELINES, check_situation, logged, noting, reentrant

NAIVE = "--naive"
FILM = "--shard 2"
RACE = "4 --accum 2"
LESSON = Lesson(
    variants=("--naive", "--shard 1"),
    own={"--shard": ("1", "-1 5 x")},
    bad=("--shard 3",),
    slack=lambda root, block, size, flags: (2 * root + block, 0),
    races=("", "--shard 1"),
    gpu=("--naive", "--shard 1"),
)
EIGHT = f"{TINY} --steps 2 --batch 48"


@pytest.mark.long_table
@pytest.mark.parametrize("size, shard", [(4, 2), (8, 4), (8, 2)])
def test_every_mesh_trains_as_single_py_and_its_bytes_are_the_formulas(size, shard):
    check_parity("hsdp", size, "--batch 48 --accum 3", f"--shard {shard}")
    check_ledger("hsdp", size, f"--accum 3 --shard {shard}", EIGHT)
    check_ledger("hsdp", size, f"--accum 2 --shard {shard} --dtype bf16", EIGHT)


def test_with_nodes_of_one_rank_it_is_ddp_py_and_with_one_node_zero3_py():
    flags = f"{EXACT} --accum 3"
    for shard, other in (1, "ddp"), (4, "zero3"):
        ours, theirs = train("hsdp", 4, f"{flags} --shard {shard}"), train(other, 4, flags)
        assert apart(ours[1], theirs[1]) <= 1e-12, f"other weights than {other}.py's"


@on_ranks(8)
def check_groups(name):
    """A node's ranks are neighbours; those of a shard are as far apart as a node is large."""
    found, lesson = [], load(name)
    build = lesson.HSDP.__init__
    lesson.HSDP.__init__ = lambda self, *rest: (found.extend(rest[-1]), build(self, *rest))[1]
    lesson.train(lesson.parse(f"{EIGHT} --shard 4 --steps 1".split()))
    node, replicas = map(dist.get_process_group_ranks, found)
    rank = dist.get_rank()
    assert node == [*range(rank // 4 * 4, rank // 4 * 4 + 4)], f"no neighbours: {node}"
    assert replicas == [rank % 4, rank % 4 + 4], f"other shards: {replicas}"


situations = [
    partial(check_situation, which=which, size=size)
    for which, (build, acts) in SITUATIONS.items()
    for size in (2, 4)
    if build.get("how") is not reentrant or ("order" not in build and "f f" not in acts)
]
test_blocks_train_as_in_the_plain_loop = holds("hsdp", *situations)


@on_ranks(4)
def check_timeline(name):
    """Nodes hear of one another in the last backward alone, while other blocks compute."""
    log = []
    hsdp = logged(name, log)
    for i, unit in enumerate(hsdp.units):
        unit.start_all_reduce = noting(log, f"sum {i}", unit, unit.start_all_reduce)
    logs = []
    for hsdp.is_last_backward in False, True:
        log.clear()
        hsdp(torch.ones(2, 4, dtype=int)).sum().backward()
        hsdp.finish_reduce_scatters()
        logs.append(" ".join(log))
    expected = " ".join(TIMELINES["zero3"].split())
    assert logs[0] == expected, f"another order: {logs[0]}"
    for i in range(4):
        expected = expected.replace(f"reduced {i}", f"reduced {i} sum {i}")
    assert logs[1] == expected, f"another order: {logs[1]}"


test_each_promise_is_kept = holds("hsdp", check_groups, check_timeline)
parity = partial(check_parity, size=4)
naive = partial(check_parity, size=4, own_flags="--naive")
LAST = "                if self.is_last_backward:"
SQUARES = "dist.all_reduce(squares, group=node)"
MUTANTS = [
    (LAST, LAST.replace("self.is_last_backward", "True"), parity, "came twice"),
    ("(nodes.tolist())", "(nodes.view(config.shard, -1).T.tolist())", check_groups, "no neighbours"),
    ("(nodes.T.tolist())", "(nodes.view(config.shard, -1).tolist())", check_groups, "other shards"),
    (SQUARES, "dist.all_reduce(squares)", parity, "differ"),
    (SQUARES, "pass", parity, "differ"),
    ("all_reduce(total_loss)", "all_reduce(total_loss, group=node)", parity, "losses differ"),
    ("/ (config.accum * world_size)", "/ (config.accum * config.shard)", parity, "losses differ"),
    ("config.accum and not config.naive", "config.accum", naive, "came twice"),
    ("self.shard.grad, group=self.replicas", "self.shard.grad, group=self.node", parity, "differ"),
    ("gradients, group=self.node", "gradients, group=self.replicas", parity, "differ"),
    ("wide(self.dtype)", "self.dtype", check_masters, "moved by"),
    ("            model.finish_reduce_scatters()\n", "", parity, "differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "hsdp")
GPU_MUTANTS = [
    ("        self.summing.wait()\n", "", check_gpu, "what a collective still"),
    ("            self.reducing.wait()\n", "", check_gpu, "what a collective still"),
    ("        dist.all_reduce(total_loss)", "        rank == 0 and dist.all_reduce(total_loss)", check_order,
     "ranks wait for one another"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "hsdp")
