"""What is special to pipeline_v.py."""

import itertools
import re
import types
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import schedules

from tests import gpu
from tests.checks import check_ledger, check_parity
from tests.harness import Lesson, error_of, holds, load, mutants, on_ranks
from tests.test_pipeline import SMALL, in_flight, play
from tests.test_zero_bubble import check_held, check_layers, make_pipe
from tools.watch import noted

ORDERS = ((2, 4), (2, 8), (4, 4), (4, 8), (3, 1), (3, 4), (8, 16))  # on 8 many sends at once
LESSON = Lesson(
    bad=("--layers 1",),
    # In torch 2.11's schedules of a V the last rank sends to itself, which gloo cannot.
    races=("--accum 4 --layers 4 --batch 16",) if torch.__version__ >= "2.13" else (),
    orders=[
        (size, f"{SMALL} --accum {k}")
        for size, k in ((2, 4), (2, 8), (4, 4), (4, 8), (3, 1), (3, 4), (8, 16))
    ],
)


def check_schedules(name):
    lesson = load(name)
    for p, m in itertools.product(range(1, 6), range(1, 13)):
        schedule = lesson.build_schedule("zb-v", p, m)
        for i, actions in enumerate(schedule):
            stages = {action.stage for action in actions}
            assert stages == {i, 2 * p - 1 - i}, f"stages {stages} on rank {i}: the loss is on the wrong rank"
            begun = Counter()
            for op, stage, k in actions:  # so that the n-th message of a group is the n-th that is needed
                assert k == begun[op, stage] < m, "microbatches out of their order"
                begun[op, stage] += 1
                assert begun["W", stage] <= begun["B", stage], "W before its B"
            assert begun == Counter({key: m for key in itertools.product("FBW", stages)}), "not all actions"
            most = min(2 * m, m + i + 1, 2 * p)
            assert in_flight(actions) == most, f"{in_flight(actions)} in flight, not {most}"
        play(schedule)


def torchs_order(lesson, p, m):
    """What ScheduleZBVZeroBubble lets each rank do, as the lesson's Actions."""
    ops = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    order = []
    for rank in range(p):
        own = types.SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m, rank=rank)
        actions = filter(None, schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(own, rank))
        order.append([lesson.Action(ops[kind.name], stage, j) for stage, kind, j, _ in actions])
    return order


def check_order(name):
    """torch's order, but for another W; in short steps torch's idles longer."""
    lesson = load(name)
    for p, m in itertools.product((2, 4, 8), (4, 6, 8, 12, 16, 24, 32)):
        both = lesson.build_schedule("zb-v", p, m), torchs_order(lesson, p, m)
        ours, theirs = ([[a for a in row if a.op in "FB"] for row in each] for each in both)
        assert ours == theirs or m < 2 * p - 1, "not torch's order"
        ours, theirs = (load("tools/bubble").bubble_rate(schedule, 1, 1.1, 0.7, 0.1) for schedule in both)
        assert ours < theirs + 1e-9 * (m >= 2 * p - 1), "idles as long as torch's"
        assert [*map(in_flight, both[0])] == [*map(in_flight, both[1])], "holds other numbers than torch's"


def check_bubbles(name):
    """A rank is never idle between its first action and its last; all the step long it is for p - 1 turns."""
    of_tool = Path(name).stem == "bubble"
    bubble_rate = load(name if of_tool else "tools/bubble").bubble_rate
    lesson = load("pipeline_v" if of_tool else name)
    for p, more in itertools.product((2, 4, 8, 16, 32), (-1, 0, 1, 8)):
        schedule = lesson.build_schedule("zb-v", p, 2 * p + more)
        rate = bubble_rate(schedule, 1, 1, 1)
        assert abs(rate) < 1e-9, f"zb-v: idle for {rate:.4f} of the time"
        turns = max(map(len, play(schedule))) - 6 * (2 * p + more) if p < 16 else p - 1
        assert turns == p - 1, f"idle for {turns} turns of the step"
    assert bubble_rate(lesson.build_schedule("zb-v", 1, 4), 1, 1, 1, 9) == 0, "the turn is a message"


@on_ranks(4)
def check_messages(name):
    """A microbatch turns without a message, and the tie needs none. One of several ranks is refused."""
    lesson, sent = load(name), Counter()

    def note(tensor, peer, group):
        assert peer != dist.get_rank(), "a rank sends to itself"
        sent[peer] += 1

    lesson.dist = types.SimpleNamespace(**vars(dist) | {"isend": noted(dist.isend, note)})
    layers, schedule = [nn.Linear(4, 4) for _ in range(7)], lesson.build_schedule("zb-v", 4, 5)
    message = torch.empty(8, 4, device="meta")
    make = partial(lesson.Pipeline, ends=[*range(1, 9)], loss_function=F.mse_loss, schedule=schedule)
    pipe = make([*layers, layers[0]], message=message)
    pipe.step(*torch.randn(2, 5, 8, 4))
    assert sent == {peer: 10 for peer in range(4) if abs(peer - pipe.rank) == 1}, "other messages"
    fresh = [nn.Linear(4, 4) for _ in range(7)]
    said = error_of(lambda: make([*fresh, fresh[1]], message=message))
    assert "a weight in stages of several ranks" in said, f"a tie of two ranks: {said}"


@on_ranks(2)
def check_sums(name):
    """The gradients of several step() add up."""
    pipe, batch = make_pipe(name), torch.randn(2, 4, 3, 6)
    pipe.step(*batch)
    once = [param.grad.clone() for param in pipe.parameters()]
    pipe.step(*batch)
    for param, grad in zip(pipe.parameters(), once, strict=True):
        assert torch.allclose(param.grad, 2 * grad), "gradients do not add up"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_losses_norms_and_weights_are_single_pys_and_it_sends_what_it_says(size):
    flags = "--accum 6 --layers 6"  # on 8 ranks fewer layers than stages
    check_parity("pipeline_v", size, flags)
    check_ledger("pipeline_v", size, flags)


def test_the_docstrings_diagram_is_the_schedule():
    lesson = load("pipeline_v")
    drawn = re.findall(r"rank \d \| (.*)", lesson.__doc__)
    for line, row in zip(drawn, play(lesson.build_schedule("zb-v", 4, 8)), strict=True):
        words = [f"{a[0] if a[1] < 4 else a[0].lower()}{a[2]}" if a else "." for a in row]
        assert line.split() == [*words[:16], "..", *words[-14:]]


ALL = check_schedules, check_order, check_bubbles, check_messages, check_sums
ALL += check_layers, check_held
test_each_promise_is_kept = holds("pipeline_v", *ALL)
MUTANTS = [
    ('"F" * (2 * below + 1)', '"F" * (2 * below + 2)', check_schedules, "3 in flight, not 2"),
    ('"F" * (2 * below + 1)', '"F" * (2 * below + (rank > 0)) + "fF" * (rank == 0)',
     check_bubbles, "zb-v: idle for"),
    ("2 * n_ranks - 1 - rank), ops", "n_ranks + rank), ops", check_schedules, "wrong rank"),
    ('if op in "Bb"', 'if op in "Ff"', check_schedules, "W before its B"),
    ("(n_microbatches - n_r", "(max(n_microbatches, 2 * n_ranks - 1) - n_r", check_order, "idles"),
    ("assert rank == self._rank_of(stage),", "assert True,", check_messages, "a tie of two ranks"),
    ("if receiver == self.rank:", "if 0:", check_messages, "to itself"),
    ("        self.turned = {}", "        self.zero_grad()\n        self.turned = {}",
     check_sums, "gradients do not add up"),
    ("self.turned[op, stage] = tensor", "self.turned[op, stage] = tensor * 2", check_parity, "losses differ"),
    ("self.later.popleft()", "self.later[0]", check_parity, "losses differ"),
    ("self.ahead = 1", "self.ahead = 2", check_held, "3 receives posted"),
    (" > MAX_SENT * self.world_size", " > MAX_SENT", check_held, "messages kept at once"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "pipeline_v")
TURN = ("tools/bubble", "now if rank_of.get(after) == rank else now + t_comm", "now + t_comm")
test_a_turn_takes_no_message = mutants([(*TURN, check_bubbles, "the turn is a message")])
GPU_MUTANTS = [
    (
        "pipeline_v",
        "[dist.new_group(), dist.new_group()]",
        "[dist.new_group()] * 2",
        gpu.check_order,
        "ranks wait for one another",
    ),
    (
        "pipeline_v",
        '{op: [dist.new_group(), dist.new_group()] for op in "FB"}',
        "dict.fromkeys('FB', [dist.new_group()] * 2)",
        gpu.check_order,
        "ranks wait for one another",
    ),
    (
        "pipeline_v",
        "        work.wait()\n        return",
        "        return",
        gpu.check_gpu,
        "uses what a collective still",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
