"""How long a schedule of pipeline.py, zero_bubble.py or pipeline_v.py leaves its ranks idle.

python tools/bubble.py prints it, as % of the time, for the times of arXiv 2401.10241, table 5."""

from collections import Counter, defaultdict, namedtuple

Action = namedtuple("Action", "op stage microbatch")
NEXT = {"F": 1, "B": -1}  # forward sends to the next stage, backward to the previous one


def schedule_of(lesson, name, n_ranks, k):
    """Each rank's actions, from a lesson's letters such as FFBFBB. Small ones are of a rank's second stage, W
    is of the oldest B, and letters beyond k microbatches count for nothing."""
    schedule = []
    for rank in range(n_ranks):
        second = n_ranks + rank if name == "interleaved" else 2 * n_ranks - 1 - rank
        actions, later, counts = [], [], Counter()
        for op in lesson.order(name, rank, n_ranks, k):
            action = Action(op.upper(), second if op.islower() else rank, counts[op])
            counts[op] += 1
            if op == "W" and later:
                actions.append(later.pop(0)._replace(op="W"))
            elif op != "W" and action.microbatch < k:
                actions.append(action)
                later += [action] * (action.op == "B")
        schedule.append(actions)
    return schedule


def bubble_rate(schedule, t_f, t_b, t_w, t_comm=0.0, open_sends=99):
    """The idle part of the time from first to last action, of the rank for which this takes longest (arXiv
    2401.10241, section 5.3). F takes t_f, B t_b, W t_w, or B t_b + t_w if there is no W; a message t_comm.
    A send ends when it is received; a rank waits for its oldest one when more than open_sends are open."""
    rank_of = {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}
    duration = {"F": t_f, "B": t_b, "W": t_w}
    if all(action.op != "W" for action in schedule[0]):
        duration["B"] += t_w
    arrival = defaultdict(float)  # {action: when what it needs is there; ("got", action): when it begins}
    before = None
    while arrival != before:  # until nothing changes any more
        before = arrival.copy()
        longest = 0
        for rank, actions in enumerate(schedule):
            began, sends = arrival[actions[0]], []
            now = began
            for op, stage, j in actions:
                arrival["got", op, stage, j] = max(now, arrival[op, stage, j])
                now = arrival["got", op, stage, j] + duration[op]
                if op in NEXT:
                    after = stage + NEXT[op]
                    arrival[op, after, j] = now if rank_of.get(after) == rank else now + t_comm
                    sends += [("got", op, after, j)] * (rank_of.get(after, rank) != rank)
                if len(sends) > open_sends:
                    now = max(now, arrival[sends.pop(0)])
            longest = max(longest, now - began)
    return 1 - sum(duration[action.op] for action in schedule[0]) / longest


LESSONS = {"gpipe": "pipeline", "1f1b": "pipeline", "zb-h1": "zero_bubble", "zb-h2": "zero_bubble"}
LESSONS |= {"interleaved": "pipeline_v", "zb-v": "pipeline_v"}
# ranks; microbatches; milliseconds of F, B, W and a message
PAPER = [(8, 24, 18.522, 18.086, 9.337, 0.601), (8, 32, 18.513, 18.086, 9.331, 0.626)]
PAPER += [(8, 64, 18.546, 18.097, 9.321, 0.762)]


def main():
    import ledger
    from lessons import path_of

    print("ranks  microbatches" + "".join(f"{name:>13}" for name in LESSONS))
    for ranks, k, *times in PAPER:
        cells = []
        for name, lesson in LESSONS.items():
            schedule = schedule_of(ledger.load(path_of(lesson)), name, ranks, k)
            halves = 2 if lesson == "pipeline_v" else 1  # a rank's two stages have half of the layers each
            *work, message = times
            cells.append(bubble_rate(schedule, *(each / halves for each in work), message))
        print(f"{ranks:>5}{k:>14}" + "".join(f"{100 * cell:>13.2f}" for cell in cells))


if __name__ == "__main__":
    main()
