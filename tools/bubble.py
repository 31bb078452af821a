"""How long a schedule of pipeline.py, zero_bubble.py or pipeline_v.py leaves its ranks idle."""

from collections import defaultdict, namedtuple
from itertools import count

Action = namedtuple("Action", "op stage microbatch")
NEXT = {"F": 1, "B": -1}  # forward sends to the next stage, backward to the previous one


def schedule_of(lesson, name, n_ranks, k):
    """Each rank's actions: a lesson's own, or those of pipeline.py's strings."""
    if hasattr(lesson, "build_schedule"):
        return lesson.build_schedule(name, n_ranks, k)
    schedule = []
    for rank in range(n_ranks):
        numbers = {"F": count(), "B": count()}
        schedule.append([Action(op, rank, next(numbers[op])) for op in lesson.order(name, rank, n_ranks, k)])
    return schedule


def bubble_rate(schedule, t_f, t_b, t_w, t_comm=0.0):
    """The idle part of the time from first to last action, of the rank for which this takes longest (arXiv
    2401.10241, section 5.3). F takes t_f, B t_b, W t_w, or B t_b + t_w if there is no W; a message t_comm."""
    rank_of = {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}
    duration = {"F": t_f, "B": t_b, "W": t_w}
    if all(action.op != "W" for action in schedule[0]):
        duration["B"] += t_w
    arrival = defaultdict(float)  # {action: when what it needs is there}
    before = None
    while arrival != before:  # until nothing changes any more
        before = arrival.copy()
        longest = 0
        for rank, actions in enumerate(schedule):
            began = now = arrival[actions[0]]
            for op, stage, j in actions:
                now = max(now, arrival[op, stage, j]) + duration[op]
                if op in NEXT:
                    after = stage + NEXT[op]
                    arrival[op, after, j] = now if rank_of.get(after) == rank else now + t_comm
            longest = max(longest, now - began)
    return 1 - sum(duration[action.op] for action in schedule[0]) / longest
