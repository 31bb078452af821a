"""What is special to pipeline.py and zero_bubble.py."""

import copy
import itertools
import re
import weakref
from collections import Counter, deque
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
from tools.watch import Watch, noted

SMALL = "--layers 8 --batch 16 --heads 1 --width 8 --context 8"


def orders(schedules):
    """(ranks, flags) of runs of these schedules by NCCL's rules."""
    rows = [*itertools.product((2, 4), schedules, (4, 8)), *itertools.product((3,), schedules[:3], (1, 4))]
    return [(size, f"{SMALL} --schedule {schedule} --accum {k}") for size, schedule, k in rows]


LESSON = Lesson(
    own={"--schedule": ("naive gpipe 1f1b interleaved", "zb-h1")},
    bad=("--schedule interleaved", "--accum 6 --layers 9 --schedule interleaved"),
    races=("--schedule gpipe", "--schedule 1f1b", "--schedule interleaved --accum 4 --batch 16"),
    gpu=("--schedule naive", "--schedule gpipe"),
    orders=orders(("naive", "gpipe", "1f1b", "interleaved")),
)


SCHEDULES = {"pipeline": ("naive", "gpipe", "1f1b", "interleaved"), "zero_bubble": ("zb-h1", "zb-h2")}
V = {"pipeline_v": ("zb-v",)}  # of which most is in test_pipeline_v.py


PUBLISHED = [  # arXiv 2401.10241, 8 stages: microbatches, T_F, T_B, T_W, T_comm of table 9, rates of table 5
    (24, 18.522, 18.086, 9.337, 0.601, {"1f1b": "0.2431", "zb-h1": "0.1585", "zb-h2": "0.1083"}),
    (32, 18.513, 18.086, 9.331, 0.626, {"1f1b": "0.1985", "zb-h1": "0.1242", "zb-h2": "0.0837"}),
    (64, 18.546, 18.097, 9.321, 0.762, {"1f1b": "0.1240", "zb-h1": "0.0674", "zb-h2": "0.0444"}),
]


def play(lesson, schedule):
    """[what each rank does in each unit of time], if each action takes one."""
    last = max(action.stage for actions in schedule for action in actions)
    rows = [[] for _ in schedule]
    todo = [deque(actions) for actions in schedule]
    done = set()
    while any(todo):
        begun = []
        for row, actions in zip(rows, todo):
            op, stage, k = actions[0] if actions else (None, 0, 0)
            needs = {"F": [("F", stage - 1, k)], "B": [("F", stage, k), ("B", stage + 1, k)]}
            needs = needs.get(op, [("B", stage, k)])
            ready = all(need in done or not 0 <= need[1] <= last for need in needs)
            row.append(actions.popleft() if actions and ready else None)
            begun.append(row[-1])
        assert any(begun), "no rank can go on"
        done.update(filter(None, begun))
    return rows


def in_flight(actions):
    """The most forwards whose backward, W if there is one, has not been."""
    end = "W" if any(action.op == "W" for action in actions) else "B"
    return max(itertools.accumulate((action.op == "F") - (action.op == end) for action in actions))


def check_schedules(name):
    lesson = load(name)
    for schedule_name, p, m in itertools.product(SCHEDULES[Path(name).stem], range(1, 6), range(1, 13)):
        if schedule_name == "interleaved" and m % p:
            continue
        chunks = 2 if schedule_name == "interleaved" and p > 1 else 1
        schedule = lesson.build_schedule(schedule_name, p, m)
        ops = "FBW" if schedule_name.startswith("zb") else "FB"
        wanted = Counter(itertools.product(ops, range(p * chunks), range(m)))
        assert Counter(map(tuple, itertools.chain(*schedule))) == wanted, "not every action once"
        play(lesson, schedule)
        for i, actions in enumerate(schedule):
            most = {"naive": 1, "gpipe": m, "1f1b": min(m, p - i)}
            most |= {"interleaved": min(chunks * m, (chunks + 1) * p - 2 * i - 1), "zb-h1": min(m, p)}
            most["zb-h2"] = min(m, 2 * p - 1)
            assert {action.stage % p for action in actions} == {i}, "another rank's stage"
            found = in_flight(actions)
            assert found == most[schedule_name], f"{schedule_name}: {found} in flight"
            for op, step in (("F", 1), ("B", -1)):  # messages come in the order in which they are needed
                sent = [a[1:] for a in actions if a.op == op and 0 <= a.stage + step < p * chunks]
                needed = [a for a in schedule[(i + step) % p] if a.op == op]
                needed = [(a.stage - step, a.microbatch) for a in needed if 0 <= a.stage - step < p * chunks]
                assert sent == needed, "messages come in another order than they are needed"


def check_bubbles(name):
    """Rates are the published ones to every digit, and the closed forms, for a lesson or for a bubble.py."""
    of_tool = Path(name).stem == "bubble"
    bubble_rate = load(name if of_tool else "tools/bubble").bubble_rate
    lessons = {load(each): SCHEDULES[Path(each).stem] for each in (SCHEDULES if of_tool else [name])}
    lesson_of = {schedule_name: lesson for lesson, names in lessons.items() for schedule_name in names}
    for m, t_f, t_b, t_w, t_comm, rates in PUBLISHED:
        for schedule_name, rate in rates.items():
            if schedule_name in lesson_of:
                schedule = lesson_of[schedule_name].build_schedule(schedule_name, 8, m)
                found = f"{bubble_rate(schedule, t_f, t_b, t_w, t_comm):.4f}"
                assert found == rate, f"{schedule_name}: not the published rate, but {found}"
    for schedule_name, p, rounds, t_w in itertools.product(lesson_of, (2, 4), (2, 3), (0.5, 1)):
        t_f, t_b, m = 1, 1, rounds * p
        ideal = m * (t_f + t_b + t_w)
        idle = {"naive": (p - 1) * ideal, "interleaved": (p - 1) * (t_f + t_b + t_w) / 2}
        idle |= {"zb-h1": (p - 1) * (t_f + t_b - t_w), "zb-h2": (p - 1) * (t_f + t_b - 2 * t_w)}
        expected = idle.get(schedule_name, (p - 1) * (t_f + t_b + t_w))
        rate = bubble_rate(lesson_of[schedule_name].build_schedule(schedule_name, p, m), t_f, t_b, t_w)
        assert abs(rate - expected / (ideal + expected)) < 1e-9, f"{schedule_name}: not the closed form"


@pytest.mark.parametrize("name, schedule", [("pipeline", "1f1b"), ("zero_bubble", "zb-h1")])
def test_the_docstrings_diagram_is_the_schedule(name, schedule):
    lesson = load(name)
    drawn = re.findall(r"rank (\d) \| (.*)", lesson.__doc__)
    for rank, row in enumerate(play(lesson, lesson.build_schedule(schedule, 4, 6))):
        line = "".join(f"{action.op}{action.microbatch} " if action else ".  " for action in row)
        assert drawn[rank][1].rstrip(". ") == line.rstrip(". ")


def test_stages_have_about_equal_shares():
    lesson = load("pipeline")
    layers = [*(nn.Linear(size, 1, bias=False) for size in (5, 1, 1, 1, 1, 1, 5)), nn.GELU()]
    for n_stages, ends in ((1, [8]), (2, [4, 8]), (3, [1, 6, 8]), (5, [1, 2, 5, 6, 8]), (8, [*range(1, 9)])):
        assert lesson.split_layers(layers, n_stages) == ends


@pytest.mark.long_table
@pytest.mark.parametrize("name, schedule", [(name, each) for name in SCHEDULES for each in SCHEDULES[name]])
def test_every_schedule_comes_to_single_pys_numbers_and_sends_what_it_says(name, schedule):
    check_parity(name, 3, "--accum 6 --layers 5", f"--schedule {schedule}")
    check_ledger(name, 3, f"--accum 6 --layers 5 --schedule {schedule}")


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
    cases = [("1f1b", [2, 6], 0), ("interleaved", [1, 2, 4, 6], 0), ("zb-h2", [2, 6], 0)]
    cases += [("1f1b", [3, 6], 3)]  # all of the first stage is frozen
    cases += [("zb-v", [1, 2, 4, 6], 0), ("zb-v", [1, 2, 4, 6], 1)]
    for schedule, ends, frozen in cases:
        if schedule in (SCHEDULES | V)[Path(name).stem]:
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
    most = 5 if schedule_name not in V["pipeline_v"] else 13
    assert max(left) == most, f"{max(left)} messages kept at once, not {most}"


def check_held(name):
    for schedule in (SCHEDULES | V)[Path(name).stem]:
        check_held_by(name, schedule)


def make_pipe(name, more_stages=0):
    """A Pipeline whose schedule is for 4 microbatches, on 2 ranks."""
    lesson = load(name)
    schedule = lesson.build_schedule((SCHEDULES | V)[Path(name).stem][-1], 2, 4)
    n_stages = 1 + max(action.stage for actions in schedule for action in actions) + more_stages
    layers = [nn.Linear(6, 6) for _ in range(n_stages)]
    message = torch.empty(3, 6, device="meta")
    return lesson.Pipeline(layers, [*range(1, n_stages + 1)], F.mse_loss, schedule, message)


test_each_promise_is_kept = holds(SCHEDULES, check_schedules, check_bubbles, check_layers, check_held)
full = partial(check_parity, size=3, flags="--accum 3 --layers 2", own_flags="--schedule interleaved")
test_a_stage_may_have_one_layer = holds("pipeline", full)
check_zb = partial(check_parity, size=3, flags="--accum 6 --layers 5", own_flags="--schedule zb-h2")
MUTANTS = [
    ("pipeline", "min(n_ranks - 1 - rank, n", "min(n_ranks - rank, n", check_schedules, "1f1b: 2 in flight"),
    ("pipeline", "(n_chunks - 1) * n_ranks", "n_chunks - 1", check_schedules, "no rank can go on"),
    ("pipeline", "reversed(stages)", "stages", check_schedules, "no rank can go on"),
    ("tools/bubble", "else now + t_comm", "else now", check_bubbles, "1f1b: not the published rate"),
    ("tools/bubble", "now - began)", "now)", check_bubbles, "zb-h2: not the closed form"),
    ("tools/bubble", 'duration["B"] += t_w', "pass", check_bubbles, "1f1b: not the published rate"),
    ("pipeline", " / len(self.targets)", "", check_parity, "losses differ"),
    ("pipeline", "        dist.all_reduce(self.loss)\n", "", check_parity, "losses differ"),
    ("pipeline", "dist.all_reduce(param.grad, group=group)", "pass", check_parity, "losses differ"),
    ("pipeline", "zeros_like(param)", "ones_like(param)", check_layers, "differ"),
    ("pipeline", " and self.rank == min(self.ranks_of[param])", "", check_parity, "losses differ"),
    ("pipeline", "dist.all_reduce(squares)", "pass", check_parity, "losses differ"),
    ("pipeline", "dist.broadcast(param.data, min(ranks))", "pass", check_parity, "weights diff"),
    ("pipeline", "dist.broadcast(param.data, 0)", "pass", check_layers, "differ"),
    ("pipeline", "param.data = param.new_empty(0)", "pass", check_layers, "others need"),
    ("pipeline", "output = get_gradient_edge(output.", "(output.", check_held, "outputs are kept"),
    ("pipeline", "in_flight.pop((stage, j))", "in_flight[stage, j]", check_held, "inputs are kept"),
    ("pipeline", "self.ahead = 1", "pass", check_held, "1 receives posted"),
    ("zero_bubble", "self.ahead = 1", "self.ahead = MAX_SENT", check_held, "5 receives posted"),
    ("pipeline", "if len(self.sent) > MAX_SENT", "if False", check_held, "messages kept"),
    ("zero_bubble", "if first_w <= i:", "if ops[-1] == 'B':", check_schedules, "in flight"),
    ("zero_bubble", '"zb-h2": 2', '"zb-h2": 3', check_bubbles, "not the published rate"),
    ("zero_bubble", "layer.weight.detach()", "layer.weight", check_zb, "losses differ"),
    ("zero_bubble", ".addmm_(grad", ".addmm_(-grad", check_zb, "losses differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS)
GPU_MUTANTS = [
    (
        "pipeline zero_bubble pipeline_v",
        "        work.wait()\n        return",
        "        return",
        check_gpu,
        "uses what a collective still",
    ),
    (
        "pipeline pipeline_v",
        '{op: [dist.new_group(), dist.new_group()] for op in "FB"}',
        "dict.fromkeys('FB', [dist.new_group()] * 2)",
        check_order,
        "ranks wait for one another",
    ),
    (
        "pipeline zero_bubble",
        "self.ahead = 1\n",
        "self.ahead = 4\n",
        check_order,
        "ranks wait for one another",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
