"""What is special to pipeline_v.py: torch's order, published bubbles, and what each rank holds."""

import itertools
import re
from collections import Counter, defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torchs

from test_all import check_ledger, check_parity
from tests.harness import holds, load, mutants
from tests.test_pipeline import check_held, check_layers, in_flight, play

THEIRS = {"zb-v": torchs.ScheduleZBVZeroBubble, "dualpipe-v": torchs.ScheduleDualPipeV}
OPS = {torchs._ComputationType.BACKWARD_WEIGHT: "W", torchs._ComputationType.FULL_BACKWARD: "BW"}
OPS |= {torchs._ComputationType.FORWARD: "F", torchs._ComputationType.BACKWARD_INPUT: "B"}


def torchs_order(name, p, m, rank):
    """[(op, stage, microbatch)], pairs one after the other, a whole backward as B and W."""
    job = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
    actions = THEIRS[name]._calculate_single_rank_operations(job, rank)
    order = []
    for action in filter(None, actions):
        for each in action.sub_actions or [action]:
            order += [(op, each.stage_index, each.microbatch_index) for op in OPS[each.computation_type]]
    return order


def without_w(actions, schedule_name):
    """In zb-v each W without its stage: torch takes one stage's first at the end, here it is the oldest."""
    return ["W" if action[0] == "W" and schedule_name == "zb-v" else tuple(action) for action in actions]


def check_order(name):
    """torch's order; every action once; messages come as they are needed; no more in flight than is said."""
    lesson = load(name)
    for schedule_name, p, m in itertools.product(THEIRS, (1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 15, 16, 32)):
        schedule = lesson.build_schedule(schedule_name, p, m)
        wanted = Counter(itertools.product("FBW", range(2 * p), range(m)))
        assert Counter(map(tuple, itertools.chain(*schedule))) == wanted, "not every action once"
        play(lesson, schedule)
        sent, needed = defaultdict(list), defaultdict(list)
        for rank, actions in enumerate(schedule):
            assert {min(stage, 2 * p - 1 - stage) for _, stage, _ in actions} == {rank}, "another rank's"
            most = 2 * p + (schedule_name == "dualpipe-v")
            found = in_flight(actions)
            assert found == most or (found < most and m < 2 * p), f"{schedule_name}: {found} in flight"
            for op, stage, j in actions:
                if op in lesson.NEXT:
                    sent[rank, op, stage + lesson.NEXT[op] < p].append((stage + lesson.NEXT[op], j))
                    needed[rank, op, stage < p].append((stage, j))
            if m >= 2 * p or schedule_name == "zb-v":  # torch's DualPipeV refuses fewer
                theirs = torchs_order(schedule_name, p, m, rank)
                ours, theirs = (without_w(each, schedule_name) for each in (actions, theirs))
                assert ours == theirs, f"{schedule_name}: not torch's order"
        for (rank, op, down), messages in sent.items():
            to = rank + (1 if (op == "F") == down else -1)
            arrive = [need for need in needed[to, op, down] if need in set(messages)]
            messages = [message for message in messages if message in set(arrive)]
            assert messages == arrive, "messages come in another order than they are needed"


def idle(lesson, schedule_name, p, m, t_f, t_b, t_w):
    rate = lesson.bubble_rate(lesson.build_schedule(schedule_name, p, m), t_f, t_b, t_w)
    work = 2 * m * (t_f + t_b + t_w)
    return work * rate / (1 - rate)


def paired(schedule):
    """Idle time if an F, and B and W of the other stage right after it, are one action."""
    arrival, before = defaultdict(int), None
    while arrival != before:
        before, longest = arrival.copy(), 0
        for actions in schedule:
            began = now = arrival[tuple(actions[0])]
            rest = list(map(tuple, actions))
            while rest:
                pair = (
                    "".join(op for op, _, _ in rest[:3]) == "FBW" and rest[0][1] != rest[1][1] == rest[2][1]
                )
                group, rest = (rest[:3], rest[3:]) if pair else (rest[:1], rest[1:])
                now = max(now, *(arrival[action] for action in group)) + len(group)
                for op, stage, j in group:
                    arrival[op, stage + {"F": 1, "B": -1, "W": 0}[op], j] = now if op != "W" else 0
            longest = max(longest, now - began)
    return longest - len(schedule[0])


def check_bubbles(name):
    """ZB-V has none if F = B = W (2401.10241, section 6); DualPipeV's is the published one (2412.19437)."""
    lesson = load(name)
    for p, more in itertools.product((1, 2, 4, 8, 16, 32), (0, 3)):
        m = 2 * p + more
        assert abs(idle(lesson, "zb-v", p, m, 1, 1, 1)) < 1e-6, f"zb-v on {p} ranks is idle"
        assert abs(idle(lesson, "dualpipe-v", p, m, 1, 1, 1) - (p - 1)) < 1e-6, "dualpipe-v: another bubble"
        if 1 < p < 16:
            published = (p - 1) * (3 + 2 - 3 * 1)  # (PP/2 - 1)(F&B + B - 3W) for PP = 2p stages
            found = paired(lesson.build_schedule("dualpipe-v", p, m))
            assert found == published, f"dualpipe-v in pairs: {found}, not the published bubble"
    latency = lesson.bubble_rate(lesson.build_schedule("zb-v", 2, 1), 1, 1, 1, t_comm=1)
    assert abs(latency - 8 / 14) < 1e-9, "a message on the turn takes time, or another does not"


def test_the_docstrings_diagram_is_the_schedule():
    lesson = load("pipeline_v")
    drawn = re.findall(r"rank (\d) \| (.*)", lesson.__doc__)
    for rank, row in enumerate(play(lesson, lesson.build_schedule("zb-v", 4, 4))):
        ops = [action and (action.op if action.stage < 4 else action.op.lower()) for action in row]
        line = "".join(f"{op}{action.microbatch} " if op else ".  " for op, action in zip(ops, row))
        assert drawn[rank][1].rstrip(". ") == line.rstrip(". ")


@pytest.mark.parametrize("schedule", THEIRS)
@pytest.mark.parametrize("size", [1, 4, 8])
def test_both_schedules_come_to_single_pys_numbers_and_send_what_they_say(size, schedule):
    check_parity("pipeline_v", size, "--accum 12 --layers 6", f"--schedule {schedule}")
    check_ledger("pipeline_v", size, f"--accum 12 --layers 6 --schedule {schedule}")


test_each_promise_is_kept = holds("pipeline_v", check_order, check_bubbles, check_layers, check_held)
check_turn = partial(check_parity, size=2, flags="--accum 6")
WARMUP = '(2 * below + 1, "F0"),\n            (rank, "F1 F0"),\n            (below + 1, "F1 B1 W"),'
SHORT = """*(
                [(2 * below, "F0"), (1, "F1 B1 W F0"), (below, "F1 B1 W")] if below and not rank
                else [(2 * below + 1, "F0"), (rank, "F1 F0"), (below + 1, "F1 B1 W")]
            ),"""  # of rank 0 by one F
MUTANTS = [
    ('(rank, "B0 B1"),', '(rank, "B1 B0"),', check_order, "zb-v: not torch's order"),
    ("(2 * below + 1,", "(2 * below + 2,", check_order, "zb-v: 3 in flight"),
    (WARMUP, SHORT, check_bubbles, "ranks is idle"),
    ("later.popleft()\n", "later.pop()\n", check_order, "dualpipe-v: not torch's order"),
    ("targets[j]", "targets[-1 - j]", check_turn, "losses differ"),
    ("        dist.all_reduce(self.loss)\n", "", check_layers, "losses differ"),
    ("now if turns else now + t_comm", "now + t_comm", check_bubbles, "on the turn"),
    ("- 2 * n_ranks, 0) + rank + 1", "- 2 * n_ranks, 0) + rank", check_order, "not every action once"),
    ("self.turned[op].append(tensor)", "self.turned[op].append(0 * tensor)", check_turn, "differ"),
    ("> MAX_SENT * self.world_size", "> MAX_SENT**9", check_held, "messages kept at once"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "pipeline_v")
