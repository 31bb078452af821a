"""What is special to hsdp.py: copies of neighbours, and who sends what to other copies, and when."""

import os
import re
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from tests import fourth as zero
from tests.checks import EXACT, check_ledger, check_parity
from tests.fourth import check_odd, wrap
from tests.harness import TINY, Lesson, apart, error_of, holds, load, mutants, on_ranks, train
from tools.watch import noted

FILM = "--shard 2"
LESSON = Lesson(
    variants=("--shard 1", "--prefetch 0", "--prefetch 7"),
    own={"--shard": ("1 2", "0 -1 5 x"), "--prefetch": ("0 1 7", "-1 8 x")},
    bad=("--shard 3",),
    slack=lambda root, block, size, flags: (root + 2 * block, 0),  # of one rank's copy with --shard 1
    races=("", "--shard 1"),
    gpu=("--shard 2", "--shard 1", "--shard 2 --prefetch 0"),
)


EIGHT = f"{TINY} --steps 2 --batch 48"


@pytest.mark.long_table
@pytest.mark.parametrize("size, shard", [(4, 2), (8, 4), (8, 2)])
def test_every_mesh_trains_as_single_py_and_its_bytes_are_the_formulas(size, shard):
    check_parity("hsdp", size, "--batch 48 --accum 3", f"--shard {shard}")
    check_ledger("hsdp", size, f"--accum 3 --shard {shard}", EIGHT)
    check_ledger("hsdp", size, f"--accum 2 --shard {shard} --dtype bf16 --prefetch 0", EIGHT)


def test_with_copies_of_one_rank_it_is_ddp_py_and_with_one_copy_zero3_py():
    flags = f"{EXACT} --accum 3"
    for shard, other, most in (1, "ddp", 1e-12), (4, "zero3", 1e-12):
        ours, theirs = train("hsdp", 4, f"{flags} --shard {shard}"), train(other, 4, flags)
        assert apart(ours[1], theirs[1]) <= most, f"other weights than {other}.py's"
        assert apart(ours[0]["grad_norms"], theirs[0]["grad_norms"]) <= most, f"other norms than {other}.py's"


@pytest.mark.parametrize("sizes", [(8, 4, 4), (8, 8, 4), (4, 4, 2), (6, 2, 2), (5, 5, 5), (2, 2, 2)])
def test_a_copy_is_a_host_or_half_of_the_only_one(sizes):
    config, (size, host, shard) = SimpleNamespace(shard=None), sizes
    with mock.patch.dict(os.environ, {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(host)}):
        load("hsdp").choose_shard(config)
    assert config.shard == shard


@on_ranks(8)
def check_groups(name):
    """A copy's ranks are neighbours; a shard's are as far apart as a copy is large."""
    _, model = wrap(name, nn.Linear(2, 2), nn.Linear, shard_size=4)
    unit, rank = model.units[0], dist.get_rank()
    copy, others = map(dist.get_process_group_ranks, (unit.group, unit.replica_group))
    assert copy == [*range(rank // 4 * 4, rank // 4 * 4 + 4)], f"no neighbours: {copy}"
    assert others == [rank % 4, rank % 4 + 4], f"other shards: {others}"
    assert "ValueError" in error_of(lambda: load(name).HSDP(nn.Linear(2, 2), nn.Linear, 3)), "3 of 8 ranks"


@on_ranks(4)
def check_replicas(name):
    """In bf16, all copies have the same weights after each of three steps, of two microbatches each."""
    torch.manual_seed(0)
    _, model = wrap(name, nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).bfloat16(), nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        for model.is_last_backward in (False, True):
            model(torch.randn(2, 5).bfloat16()).square().sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mine = nn.utils.parameters_to_vector(model.parameters()).detach()
        everyone = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(everyone, mine)
        for one, other in zip(everyone[:2], everyone[2:]):
            assert torch.equal(one, other), f"a stale replica after step {step + 1}"
    kept = [unit for unit in model.units if unit.total is not None or unit.all_reduce_work]
    assert not kept, "bf16 copies are kept, or what holds them over NCCL"


@on_ranks(4)
def check_timeline(name):
    """Copies hear of one another in the last backward alone, while earlier units compute."""
    log = []
    hsdp = zero.logged(name, log)

    def note(tensor, group, async_op=False):
        assert async_op, "waited for at once"
        log.append("all-reduce")

    with mock.patch.object(dist, "all_reduce", noted(dist.all_reduce, note)):
        for hsdp.is_last_backward in (False, True):
            early = list(log)
            log.clear()
            hsdp(torch.randn(2, 4)).sum().backward()
    assert " ".join(early).split() == zero.TIMELINE.split(), f"another order: {', '.join(early)}"
    expected = re.sub(r"(reduced \d)", r"\1 all-reduce", zero.TIMELINE)
    assert " ".join(log).split() == expected.split(), f"another order: {', '.join(log)}"


four = partial(check_odd, size=4)
odd = [four, partial(four, shard_size=1), partial(four, shard_size=4), partial(four, how=zero.recompute)]
odd += [partial(four, prefetch=0)]
same = [zero.check_norm, zero.check_adopted, zero.check_failed, zero.check_late, zero.check_gathering]
same += [zero.check_freed_in_time]
test_each_promise_is_kept = holds("hsdp", *odd, *same, check_groups, check_replicas, check_timeline)
ledger_16 = partial(check_ledger, flags="--dtype bf16")
parity, one_step = (partial(check_parity, size=4, flags=f"--accum 3 --steps {n}") for n in (3, 1))
ACROSS = "        if self.is_last_backward:\n            unit.start"
MUTANTS = [
    (ACROSS, ACROSS.replace("self.is_last_backward", "True"), check_timeline, "another order"),
    ("device, self.group, replica_group", "device, replica_group, self.group", check_groups, "no neighbours"),
    ("range(i, dist.get_world_size(), shard_size)", "range(i * 2, i * 2 + 2)", check_groups, "other shards"),
    ("dist.get_world_size(self.replica_group)", "1", parity, "norms differ"),
    ("1 / self.n_shards, out", "1, out", parity, "norms differ"),
    ("out=self.shard.grad", "out=self.total", check_replicas, "a stale replica"),
    ("                unit.finish_all_reduce()", "                pass", check_replicas, "a stale replica"),
    ("model.is_last_backward = i == config.accum", "model.is_last_backward = True", check_ledger, "sent +"),
    ("dist.all_reduce(squares, group=self.group)", "dist.all_reduce(squares)", one_step, "norms differ"),
    ("self.flat_param, 0)", "self.flat_param, group_src=0, group=group)", four, "weights differ"),
    ("self.is_last_backward = True", "self.is_last_backward = False", zero.check_adopted, "losses differ"),
    ("            dist.broadcast(tensor.detach(), 0)", "            pass", four, "weights differ"),
    ("self.shard.grad.to(self.own_param.dtype)", "self.shard.grad", ledger_16, "all-reduce: sent +"),
    ("self.total = self.all_reduce_work = None", "self.total = None", check_replicas, "are kept"),
    ("self.total = self.all_reduce_work = None", "pass", check_replicas, "are kept"),
    ("self.replica_group, async_op=True", "self.replica_group", check_timeline, "waited for at once"),
    ("grad_views and dist.get_rank() ", "grad_views and dist.get_rank(self.group) ", four, "other than 0"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "hsdp")
