"""What zero1.py, zero2.py and zero3.py have on the network and in memory, and when."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from test_all import check_ledger, check_parity
from tests.harness import holds, load, mutants, on_ranks
from tests.test_zero import STAGES, check_odd, wrap


def check_late(name):
    check_odd(name, None, True, size=2)


@pytest.mark.parametrize("flags", ["--prefetch 0", "--prefetch 2", "--prefetch 7", "--no-reshard"])
def test_zero3_comes_to_the_same_weights_and_bytes_however_far_it_gathers_ahead(flags):
    check_parity("zero3", 3, "--accum 3", flags)
    check_ledger("zero3", 4, f"--accum 3 {flags}")


# ---- what is where, and when ----


class Chain(nn.Module):
    """Three units, the root before and behind them. Notes when which part computes."""

    def __init__(self, log):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        for i, part in enumerate(self.parts, start=1):
            part.register_forward_pre_hook(lambda *_, i=i: log.append(f"forward {i}"))
            part.register_full_backward_pre_hook(lambda *_, i=i: log.append(f"backward {i}"))

    def forward(self, x):
        x = self.enter(x)
        for part in self.parts:
            x = part(x)
        return x


@on_ranks(2)
def check_timeline(name, timeline=None, **options):
    """What computes and what starts and ends on the network in a second step, in order."""
    log = []
    _, zero = wrap(name, Chain(log), nn.Sequential, **options)
    optimizer = torch.optim.SGD(zero.parameters(), lr=0.1)
    for i, unit in enumerate(zero.units):
        for method, word in (
            ("unshard", "gather"), ("wait_for_unshard", "gathered"),
            ("start_reduce", "reduce"), ("finish_reduce", "reduced"), ("reshard", "free"),
        ):  # fmt: skip
            if hasattr(unit, method):
                setattr(unit, method, noting(log, f"{word} {i}", unit, getattr(unit, method)))
    for _ in range(2):
        log.clear()
        zero(torch.randn(2, 4)).sum().backward()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
    expected = TIMELINES[timeline or Path(name).stem].replace("\n", " ")
    assert log == re.split(r",\s+", expected.strip()), f"another order: {', '.join(log)}"


def noting(log, event, unit, method):
    """The method, which notes that it did something: a collective has started or ended, storage was freed."""

    def state():
        return (unit.all_gather_work, unit.reduce_work, unit.flat_param.untyped_storage().nbytes())

    def noted(*args):
        before = state()
        method(*args)
        if state() != before:
            log.append(event)

    return noted


TIMELINES = {  # the root is 0; the docstrings draw the same
    "zero2": """
        gather 0, gather 1, gather 2, gather 3, forward 1, forward 2, forward 3,
        backward 3, reduce 3, backward 2, reduced 3, reduce 2, backward 1, reduced 2, reduce 1,
        reduced 1, reduce 0, reduced 0""",
    "zero3": """
        gather 0, gather 1, gathered 0, gather 2, gathered 1, forward 1, free 1, gather 3, gathered 2,
        forward 2, gathered 3, forward 3, backward 3, free 3, reduce 3, backward 2, gather 1, free 2,
        reduced 3, reduce 2, backward 1, gathered 1, free 1, reduced 2, reduce 1, free 0,
        reduced 1, reduce 0, reduced 0""",
    "zero3 on demand": """
        gather 0, gathered 0, gather 1, gathered 1, forward 1, free 1, gather 2, gathered 2,
        forward 2, free 2, gather 3, gathered 3, forward 3, backward 3, free 3, reduce 3,
        backward 2, gather 2, gathered 2, free 2, reduced 3, reduce 2, backward 1, gather 1, gathered 1,
        free 1, reduced 2, reduce 1, free 0, reduced 1, reduce 0, reduced 0""",
}
TIMELINES["zero1"] = TIMELINES["zero2"]


def test_zero3_prefetches_one_unit_unless_told_otherwise():
    assert load("zero3").parse([]).prefetch == 1
    check_timeline("zero3", "zero3 on demand", prefetch=0)


@on_ranks(2)
def check_gathering(name):
    """Beside rank 0 one unit is whole at a time while full_state_dict() works."""
    ledger = load("tools/ledger")
    _, zero = wrap(name, nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))), nn.Linear)
    with ledger.Watch() as watch:
        zero.full_state_dict()
    shards = sum(shard.nbytes for shard in zero.parameters())
    assert dist.get_rank() == 0 or watch.held()["parameters"] - shards == 4 * 72


test_one_unit_is_whole_while_zero3_gathers_a_state_dict = holds("zero3", check_gathering)
test_every_collective_is_waited_for = holds(STAGES, check_late)
test_collectives_travel_while_other_units_compute = holds(STAGES, check_timeline)
check_bf16 = partial(check_ledger, size=2, flags="--dtype bf16")
MUTANTS = [
    ("zero1", "unit.flat_grad.untyped_storage().resize_(0)", "pass", check_bf16, "gradients: +"),
    ("zero2", "weight.grad = None", "pass", check_ledger, "gradients: +"),
    ("zero2", "self.flat_grad.untyped_storage().resize_(0)  #", "pass  #", check_ledger, "gradients: +"),
    ("zero3", "unit.reshard_after_forward = False  #", "pass  #", check_ledger, "all-gather: sent +"),
    ("zero3", "[: 1 + self.prefetch]", "[: 2 + self.prefetch]", check_ledger, "parameters: +"),
    ("zero3", "unit.reshard()\n            self._reduce", "self._reduce", check_ledger, "parameters: +"),
    ("zero3", "self.units[i::direction]", "self.units[i:]", check_timeline, "another order"),
]  # fmt: skip
for name in STAGES:
    for work in "all_gather", "reduce":
        MUTANTS.append((name, f"self.{work}_work.wait()", "pass", check_late, "weights differ"))
    MUTANTS.append((name, "self.reducing.finish_reduce()", "pass", check_timeline, "another order"))
test_a_mutant_is_rejected = mutants(MUTANTS)
