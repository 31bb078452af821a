"""What is special to zero_r.py: what a rank keeps, and when a block's input travels."""

from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from tests.checks import check_parity
from tests.gpu import on_gpu, together
from tests.harness import Lesson, apart, error_of, holds, load, mutants, on_ranks
from tools.watch import noted

SLACK = "1.05"
NAIVE = "--policy full"
RACE = "4 --batch 64 --width 128 --heads 4"
LESSON = Lesson(variants=("--policy offload", "--policy full"))


@on_ranks(3)
def check_gradients(name):
    """They are those without a checkpoint, with dropout, and whatever the shape and layout of the input."""
    lesson = load(name)
    torch.manual_seed(0)
    layer = nn.Linear(7, 7)
    x = torch.randn(7, 5).t()  # not contiguous; 3 ranks do not divide 35
    found = []
    keeps = [lesson.Whole, *(partial(lesson.Shard, on_host=on_host) for on_host in (False, True)), None]
    for keep in keeps:
        torch.manual_seed(1)
        own = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = own
        for _ in range(3):
            function = lambda x: F.dropout(torch.tanh(layer(x))).sin()  # noqa: E731
            y = lesson.checkpoint(function, y, keep) if keep else function(y)
        after = torch.rand(3)
        y.square().sum().backward()
        found.append([y.detach(), after, own.grad, layer.weight.grad])
        layer.zero_grad()
    for each in found[:-1]:
        assert all(apart(*both) < 1e-6 for both in zip(each, found[-1])), "gradients differ"
    with torch.no_grad():
        assert not lesson.checkpoint(layer, x, keeps[1]).requires_grad, "a graph in no_grad()"


@on_ranks(3)
def check_events(name, on_host=False):
    """Each input is gathered while the block after it runs again; of each a rank keeps a third."""
    lesson, events, kept = load(name), [], []
    gather = lesson.all_gather

    def keep(x):
        kept.append(lesson.Shard(x, on_host))
        assert kept[-1].shard.untyped_storage().nbytes() == 4 * -(-7 // dist.get_world_size()), "not 1/N"
        return kept[-1]

    def counted(flat, own, async_op):
        number = next(i for i, each in enumerate(kept) if each.shard is own or torch.equal(each.shard, own))
        events.append(f"fetch {number}")
        work = gather(flat, own, async_op=True)
        return mock.Mock(wait=lambda: (events.append(f"wait {number}"), work.wait()))

    lesson.all_gather = counted
    for _ in range(2):  # the second forward begins a new chain
        events.clear()
        kept.clear()
        x = torch.linspace(1, 2, 7, requires_grad=True)
        for number in range(3):
            square = noted(torch.square, lambda _, number=number: events.append(f"forward {number}"))
            x = lesson.checkpoint(square, x, keep)
        x.sum().backward()
        order = "fetch 2, wait 2, fetch 1, forward 2, wait 1, fetch 0, forward 1, wait 0, forward 0"
        assert ", ".join(events[3:]) == order, f"another order: {events}"
        assert all(each.flat is None for each in kept), "whole inputs are kept"


@on_ranks(2)
def check_changed(name):
    """The input may be changed in place after the call, as what is kept is a copy."""
    lesson = load(name)
    x = torch.linspace(0, 1, 6, requires_grad=True)
    h = x * 1
    y = lesson.checkpoint(lambda h: (h * 1).tanh(), h, partial(lesson.Shard, on_host=False))
    h += y
    failed = error_of(h.sum().backward)
    expected = 2 - x.detach().tanh().square()
    assert failed == "nothing" and torch.allclose(x.grad, expected), f"changed: {failed}"


CHECKS = check_gradients, check_events, partial(check_events, on_host=True), check_changed
test_each_promise_is_kept = holds("zero_r", *CHECKS)
MUTANTS = [
    ("    set_random_states(random_states)\n", "", check_gradients, "gradients differ"),
    ("        if not self.gathering:\n", "        if True:\n", check_events, "another order"),
    ("        if self.previous:\n", "        if False:\n", check_events, "another order"),
    ("Shard.latest = self.previous = None", "self.previous = None", check_events, "another order"),
    ("F.pad(own, (0, size - len(own)))", "own", check_changed, "changed"),
    ("F.pad(own, (0, size - len(own)))", "F.pad(own, (0, size))[:size]", check_events, "not 1/N"),
    ("dist.get_rank() * size :]", "0:]", check_parity, "differ"),
    ("self.flat = self.gathering = None", "self.gathering = None", check_events, "are kept"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "zero_r")
check_offload = partial(together, on_gpu, rows=[(2, 1, 3, "--policy offload")])
GPU_MUTANTS = [
    ("        self.gathering.wait()\n", "", check_offload, "what a collective still"),
    ("own = self.shard.to(self.device, non_blocking=True)", "own = self.shard.to(self.device)", check_offload,
     "the host waits"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "zero_r")
