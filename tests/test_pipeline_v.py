"""What is special to pipeline_v.py."""

import itertools
import re
import types
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import schedules

from test_all import check_ledger, check_parity
from tests.harness import holds, load, mutants, on_ranks
from tests.test_pipeline import check_guards, check_held, check_layers, in_flight, play
from tools.watch import noted

TORCHS = {"zb-v": schedules.ScheduleZBVZeroBubble, "dualpipe-v": schedules.ScheduleDualPipeV}
OPS = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}


def check_schedules(name):
    lesson = load(name)
    for schedule_name, p, m in itertools.product(TORCHS, range(1, 6), range(1, 13)):
        schedule = lesson.build_schedule(schedule_name, p, m)
        for i, actions in enumerate(schedule):
            stages = {action.stage for action in actions}
            assert stages == {i, 2 * p - 1 - i}, f"stages {stages} on rank {i}: the loss is on the wrong rank"
            begun = Counter()
            for op, stage, k in actions:  # so that the n-th message of a group is the n-th that is needed
                assert k == begun[op, stage] < m, "microbatches out of their order"
                begun[op, stage] += 1
                assert begun["W", stage] <= begun["B", stage], "W before its B"
            assert begun == Counter({key: m for key in itertools.product("FBW", stages)}), "not all actions"
            most = min(2 * m, m + i + 1, 2 * p + (schedule_name == "dualpipe-v"))
            assert in_flight(actions) == most, f"{schedule_name}: {in_flight(actions)} in flight, not {most}"
        play(lesson, schedule)


def torchs(lesson, schedule_name, p, m):
    """Each rank's Actions in torch's schedule; a whole backward is a B and a W."""
    rows = []
    for rank in range(p):
        own = types.SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m, rank=rank)
        actions = filter(None, TORCHS[schedule_name]._calculate_single_rank_operations(own, rank))
        parts = itertools.chain(*(action.sub_actions or [action] for action in actions))
        rows.append([lesson.Action(op, stage, k) for stage, kind, k, _ in parts for op in OPS[kind.name]])
    return rows


def check_order(name):
    """torch's order, but in zb-v for another W; torch refuses (dualpipe-v) or idles longer in short steps."""
    lesson, cases = load(name), itertools.product(TORCHS, (2, 4, 8), (4, 6, 8, 12, 16, 24, 32))
    for schedule_name, p, m in (case for case in cases if case[0] == "zb-v" or case[2] >= 2 * case[1]):
        both = lesson.build_schedule(schedule_name, p, m), torchs(lesson, schedule_name, p, m)
        compared = "FB" if schedule_name == "zb-v" else "FBW"
        ours, theirs = ([[a for a in row if a.op in compared] for row in each] for each in both)
        assert ours == theirs or m < 2 * p - 1, f"{schedule_name}: not torch's order"
        ours, theirs = (load("tools/bubble").bubble_rate(schedule, 1, 1.1, 0.7, 0.1) for schedule in both)
        assert ours < theirs + 1e-9 * (m >= 2 * p - 1), f"{schedule_name}: idles as long as torch's"
        assert [*map(in_flight, both[0])] == [*map(in_flight, both[1])], "holds other numbers than torch's"


def idle_of_pairs(lesson, schedule, duration):
    """Idle time of the rank that waits longest if an F and the other stage's B and W after it are one."""
    there, before = defaultdict(float), None
    while there != before:
        before, idle = there.copy(), 0
        for actions in schedule:
            began, now, todo = there[actions[0]], 0, list(actions)
            while todo:
                ops, stages = "".join(a.op for a in todo[:3]), [a.stage for a in todo[:3]]
                group = [todo.pop(0) for _ in range(3 if ops == "FBW" and stages[0] != stages[1] else 1)]
                messages = [action for action in group if action.op != "W"]
                now = max([now, *(there[a] for a in messages)]) + sum(duration[a.op] for a in group)
                there.update({lesson.Action(op, s + lesson.NEXT[op], k): now for op, s, k in messages})
            idle = max(idle, now - began - sum(duration[action.op] for action in actions))
    return idle


def check_bubbles(name):
    """ZB-V's is 0, DualPipeV's the published one (arXiv 2412.19437, table 2; of 2p stages, B with its W)."""
    of_tool = Path(name).stem == "bubble"
    bubble_rate = load(name if of_tool else "tools/bubble").bubble_rate
    lesson = load("pipeline_v" if of_tool else name)
    for p, more in itertools.product((4, 8, 16, 32), (0, 1, 8)):
        rate = bubble_rate(lesson.build_schedule("zb-v", p, 2 * p + more), 1, 1, 1)
        assert abs(rate) < 1e-9, f"zb-v: idle for {rate:.4f} of the time"
    for p, m in itertools.product((1, 2, 4, 8), (16, 17, 32)):
        schedule = lesson.build_schedule("dualpipe-v", p, m)
        rate = bubble_rate(schedule, 1, 1, 1)
        assert abs(rate - (p - 1) / (6 * m + p - 1)) < 1e-9, f"dualpipe-v: idle for {rate:.4f} of the time"
        for f, b, w in ((1, 1, 1), (1, 1.25, 0.75), (2, 2, 1), (1, 1, 0.5)):
            published = (2 * p / 2 - 1) * ((f + b + w) + (b + w) - 3 * w)
            found = idle_of_pairs(lesson, schedule, {"F": f, "B": b, "W": w})
            assert found == published or (found < published and w < f), f"{found} idle, not {published}"
    assert bubble_rate(lesson.build_schedule("zb-v", 1, 4), 1, 1, 1, 9) == 0, "the turn is a message"


@on_ranks(4)
def check_messages(name):
    """A microbatch turns without a message, and the tie needs none."""
    lesson, sent = load(name), Counter()

    def note(tensor, peer, group):
        assert peer != dist.get_rank(), "a rank sends to itself"
        sent[peer] += 1

    lesson.dist = types.SimpleNamespace(**vars(dist) | {"isend": noted(dist.isend, note)})
    for times, schedule_name in enumerate(TORCHS, 1):
        layers, schedule = [nn.Linear(4, 4) for _ in range(7)], lesson.build_schedule(schedule_name, 4, 5)
        message = torch.empty(8, 4, device="meta")
        pipe = lesson.Pipeline([*layers, layers[0]], [*range(1, 9)], F.mse_loss, schedule, message)
        pipe.step(*torch.randn(2, 5, 8, 4))
        assert sent == {peer: 10 * times for peer in range(4) if abs(peer - pipe.rank) == 1}, "other messages"
        assert not pipe.ties, "a tie needs a message"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("schedule", TORCHS)
def test_losses_norms_and_weights_are_single_pys_and_it_sends_what_it_says(schedule, size):
    flags = "--accum 6 --layers 6"  # on 8 ranks fewer layers than stages
    check_parity("pipeline_v", size, flags, f"--schedule {schedule}")
    check_ledger("pipeline_v", size, f"{flags} --schedule {schedule}")


def test_the_docstrings_diagram_is_the_schedule():
    lesson = load("pipeline_v")
    drawn = re.findall(r"rank \d \| (.*)", lesson.__doc__)
    for line, row in zip(drawn, play(lesson, lesson.build_schedule("zb-v", 4, 8)), strict=True):
        words = [f"{a[0] if a[1] < 4 else a[0].lower()}{a[2]}" if a else "." for a in row[:30]]
        assert line.split() == words


ALL = check_schedules, check_order, check_bubbles, check_messages, check_layers, check_held, check_guards
test_each_promise_is_kept = holds("pipeline_v", *ALL)
WARMUP = '(2 * below + 1, "F0"),\n            (rank, "F1 F0"),'
SHORTER = '(2 * below + (rank > 0), "F0"), (max(rank, 1), "F1 F0"),'  # on rank 0
MUTANTS = [
    ("2 * below + 1, ", "2 * below + 2, ", check_schedules, "zb-v: 3 in flight, not 2"),
    (WARMUP, SHORTER, check_bubbles, "zb-v: idle for"),
    ('(2 * below, "F0")', '(2 * below + 1, "F0")', check_schedules, "dualpipe-v: 4 in flight, not 3"),
    ("stages = rank, 2 * n_ranks - 1 - rank", "stages = rank, n_ranks + rank", check_schedules, "wrong rank"),
    ('if what[0] == "B"', 'if what[0] == "F"', check_schedules, "W before its B"),
    ("(n_microbatches - n_ranks,", "(max(n_microbatches, 2 * n_ranks - 1) - n_ranks,", check_order, "idles"),
    ("if self._rank_of(stage) == self.rank:\n            self.t", "if 0:\n            self.t", check_messages,
     "to itself"),
    ("own == {self.rank,", "own or {self.rank,", check_guards, "a schedule of other stages"),
    ("self.in_flight is None,", "True,", check_guards, "a step after one that failed"),
    ("self.turned[op] = tensor", "self.turned[op] = tensor * 2", check_parity, "losses differ"),
    ("self.later.popleft()", "self.later[0]", check_parity, "losses differ"),
    ("self.ahead = 1", "self.ahead = 2", check_held, "3 receives posted"),
    (" > MAX_SENT * self.world_size", " > MAX_SENT", check_held, "messages kept at once"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "pipeline_v")
TURN = ("tools/bubble", "now if rank_of.get(after) == rank else now + t_comm", "now + t_comm")
test_a_turn_takes_no_message = mutants([(*TURN, check_bubbles, "the turn is a message")])
