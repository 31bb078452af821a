"""What is special to zero_bubble.py; and what pipeline_v.py shares with it: its class Pipeline."""

import copy
import itertools
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from tests.checks import check_ledger, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import Lesson, apart, holds, load, mutants, on_ranks
from tests.test_pipeline import check_bubbles, in_flight, orders, play
from tools.watch import Watch, noted

LESSON = Lesson(
    own={"--schedule": ("zb-h1 zb-h2", "1f1b")},
    variants=("--schedule zb-h2",),
    orders=orders(("zb-h1", "zb-h2")),
)
WHICH = {"zero_bubble": ("zb-h1", "zb-h2"), "pipeline_v": ("zb-v",)}


def check_schedules(name):
    lesson = load(name)
    for schedule_name, p, m in itertools.product(WHICH["zero_bubble"], range(1, 6), range(1, 13)):
        schedule = lesson.build_schedule(schedule_name, p, m)
        wanted = Counter(itertools.product("FBW", range(p), range(m)))
        assert Counter(map(tuple, itertools.chain(*schedule))) == wanted, "not every action once"
        play(schedule)
        for i, actions in enumerate(schedule):
            assert {action.stage for action in actions} == {i}, "another rank's stage"
            most = min(m, p) if schedule_name == "zb-h1" else min(m, 2 * p - 1)
            assert in_flight(actions) == most, f"{schedule_name}: {in_flight(actions)} in flight"
            for op in "FBW":  # so messages come in the order in which they are needed
                assert [a.microbatch for a in actions if a.op == op] == [*range(m)], "another order"


class Twice(nn.Linear):
    """A layer with a module that other layers have, too (as Llama's have their rotary embedding)."""

    def __init__(self, shared):
        super().__init__(6, 6)
        self.shared = shared
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        y = x + torch.tanh(self.frozen(super().forward(x))) * self.shared(x)
        return y.t().contiguous().t()  # messages are contiguous, whatever a stage returns


@on_ranks(2)
def train_layers(name, schedule_name, ends, frozen):
    """A Pipeline of any layers ends in the weights of the plain loop."""
    torch.manual_seed(0)
    shared = nn.BatchNorm1d(6, affine=False)
    tied = nn.Linear(6, 6, bias=False)
    layers = [tied, Twice(shared), Twice(shared), nn.Linear(6, 6), Twice(shared), tied]
    layers[1].idle = layers[3]  # a tied layer, of which one rank has no gradient
    layers = nn.ModuleList(layers).double()
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    shared.eval()
    plain = copy.deepcopy(layers)
    with torch.no_grad():
        for param in layers.parameters():
            param.add_(dist.get_rank())  # all ranks must start with rank 0's
    lesson = load(name)
    schedule = lesson.build_schedule(schedule_name, dist.get_world_size(), 4)
    message = torch.empty(3, 6, dtype=torch.float64, device="meta")
    pipe = lesson.Pipeline(list(layers), ends, F.mse_loss, schedule, message)
    freed = [param for param in layers.parameters() if param.untyped_storage().nbytes() == 0]
    assert freed, "a rank holds what others need"
    optimizer = torch.optim.SGD([*pipe.parameters(), *plain.parameters()], lr=0.1, momentum=0.9)
    for _ in range(3):
        inputs, targets = torch.randn(2, 4, 3, 6, dtype=torch.float64)
        loss = F.mse_loss(nn.Sequential(*plain)(inputs.flatten(0, 1)), targets.flatten(0, 1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert abs(pipe.step(inputs, targets).item() - loss.item()) < 1e-12, "losses differ"
        assert abs(pipe.clip_grad_norm_(0.1) - norm) < 1e-12, "gradient norms differ"
        optimizer.step()
        optimizer.zero_grad()
    pipe.unsplit()
    assert apart(layers.state_dict(), plain.state_dict()) < 1e-9, "weights differ"


def check_layers(name):
    cases = {
        "zero_bubble": [("zb-h2", [2, 6], 0), ("zb-h1", [3, 6], 3)]
    }  # 3: all of the first stage is frozen
    cases["pipeline_v"] = [("zb-v", [1, 2, 4, 6], 0), ("zb-v", [1, 2, 4, 6], 1)]
    for schedule, ends, frozen in cases[Path(name).stem]:
        train_layers(name, schedule, ends, frozen)


@on_ranks(3)
def check_held_by(name, schedule_name, m=9):
    """What a rank holds is its microbatches in flight; messages are posted ahead, and not without end."""
    torch.manual_seed(0)
    lesson = load(name)
    size = dist.get_world_size()
    layers = [nn.Sequential(nn.Linear(4, 512), nn.GELU(), nn.Linear(512, 4)) for _ in range(2 * size)]
    schedule = lesson.build_schedule(schedule_name, size, m)
    n_stages = 1 + max(action.stage for actions in schedule for action in actions)
    message = torch.empty(8, 4, device="meta")
    pipe = lesson.Pipeline(layers, lesson.split_layers(layers, n_stages), F.mse_loss, schedule, message)
    pipe.step(*torch.randn(2, m, 8, 4))
    pipe.zero_grad()
    inputs, outputs = weakref.WeakSet(), weakref.WeakSet()

    def note(module, args, output):
        inputs.add(args[0])
        assert len(inputs) <= in_flight(pipe.actions), f"{len(inputs)} inputs are kept"
        assert not outputs or pipe.rank == size - 1, "outputs are kept for backward"
        outputs.add(output)

    next(each for each in pipe.modules() if isinstance(each, nn.Sequential)).register_forward_hook(note)
    posted, left = [0], [0]
    irecv = noted(dist.irecv, lambda *_: posted.append(1 + len(pipe.posted)))
    isend = noted(dist.isend, lambda *_: left.append(1 + len(pipe.sent)))
    with Watch() as watch, mock.patch.multiple(dist, irecv=irecv, isend=isend):
        pipe.step(*torch.randn(2, m, 8, 4))
    unit = 2 * 512 * 8 * 4 * 2 * size / n_stages  # of a stage: what GELU is given and returns
    held, expected = watch.held()["activations"] / unit, in_flight(pipe.actions)
    assert expected * 0.9 < held < expected * 1.1 + 0.7, f"{schedule_name}: {held:.1f} held, not {expected}"
    assert max(posted) == 2, f"{max(posted)} receives posted at once, not 2"
    most = 13 if schedule_name == "zb-v" else 5
    assert max(left) == most, f"{max(left)} messages kept at once, not {most}"


def check_held(name):
    for schedule in WHICH[Path(name).stem]:
        check_held_by(name, schedule)


@pytest.mark.long_table
@pytest.mark.parametrize("schedule", WHICH["zero_bubble"])
def test_both_schedules_come_to_single_pys_numbers_and_send_what_it_says(schedule):
    check_parity("zero_bubble", 3, "--accum 6 --layers 5", f"--schedule {schedule}")
    check_ledger("zero_bubble", 3, f"--accum 6 --layers 5 --schedule {schedule}")


def make_pipe(name, more_stages=0):
    """A Pipeline whose schedule is for 4 microbatches, on 2 ranks."""
    lesson = load(name)
    schedule = lesson.build_schedule(WHICH[Path(name).stem][-1], 2, 4)
    n_stages = 1 + max(action.stage for actions in schedule for action in actions) + more_stages
    layers = [nn.Linear(6, 6) for _ in range(n_stages)]
    message = torch.empty(3, 6, device="meta")
    return lesson.Pipeline(layers, [*range(1, n_stages + 1)], F.mse_loss, schedule, message)


test_each_promise_is_kept = holds("zero_bubble", check_schedules, check_bubbles, check_layers, check_held)
check_zb = partial(check_parity, size=3, flags="--accum 6 --layers 5", own_flags="--schedule zb-h2")
MUTANTS = [
    (" / len(self.targets)", "", check_parity, "losses differ"),
    ("        dist.all_reduce(self.loss)\n", "", check_parity, "losses differ"),
    ("dist.all_reduce(param.grad, group=group)", "pass", check_parity, "losses differ"),
    ("zeros_like(param)", "ones_like(param)", check_layers, "differ"),
    (" and self.rank == min(self.ranks_of[param])", "", check_parity, "losses differ"),
    ("dist.all_reduce(squares)", "pass", check_parity, "losses differ"),
    ("dist.broadcast(param.data, min(ranks))", "pass", check_parity, "weights diff"),
    ("dist.broadcast(param.data, 0)", "pass", check_layers, "differ"),
    ("param.data = param.new_empty(0)", "pass", check_layers, "others need"),
    ("output = get_gradient_edge(output.", "(output.", check_held, "outputs are kept"),
    ("in_flight.pop((stage, j))", "in_flight[stage, j]", check_held, "inputs are kept"),
    ("self.ahead = 1", "pass", check_held, "1 receives posted"),
    ("if len(self.sent) > MAX_SENT", "if False", check_held, "messages kept"),
    ("self.ahead = 1", "self.ahead = MAX_SENT", check_held, "5 receives posted"),
    ("if first_w <= i:", "if ops[-1] == 'B':", check_schedules, "in flight"),
    ('"zb-h2": 2', '"zb-h2": 3', check_bubbles, "not the published rate"),
    ("layer.weight.detach()", "layer.weight", check_zb, "losses differ"),
    (".addmm_(grad", ".addmm_(-grad", check_zb, "losses differ"),
]
test_a_mutant_is_rejected = mutants(MUTANTS, "zero_bubble")
GPU_MUTANTS = [
    (
        '{op: dist.new_group() for op in "FB"}',
        'dict.fromkeys("FB", dist.new_group())',
        check_order,
        "ranks wait for one another",
    ),
    (
        "self.world_size, self.groups[op]",
        "self.world_size, self.groups['FB'.replace(op, '')]",
        check_order,
        "ranks wait for one another",
    ),
    ("self.ahead = 1\n", "self.ahead = 4\n", check_order, "ranks wait for one another"),
    ("        work.wait()\n        return", "        return", check_gpu, "uses what a collective still"),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "zero_bubble")
