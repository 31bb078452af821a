"""What is special to pipeline.py; and what zero_bubble.py and pipeline_v.py share with it: schedules."""

import inspect
import itertools
import re
from collections import Counter, deque
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from formulas import evaluate

from tests import gpu
from tests.checks import EXACT, check_ledger, check_parity
from tests.gpu import check_gpu
from tests.harness import Lesson, holds, load, mutants, on_ranks

SMALL = "--layers 8 --batch 16 --heads 1 --width 8 --context 8"


def orders(schedules):
    """(ranks, flags) of runs of these schedules by NCCL's rules."""
    rows = [*itertools.product((2, 4), schedules, (4, 8)), *itertools.product((3,), schedules[:3], (1, 4))]
    return [(size, f"{SMALL} --schedule {schedule} --accum {k}") for size, schedule, k in rows]


NAIVE = "--schedule naive"
WITH = "--layers 4 --accum 4"
LEARN = "torchrun LESSON --dtype bf16; torchrun LESSON --schedule gpipe; torchrun LESSON --accum 2"
RACE = "2 --accum 8 --batch 16"
LESSON = Lesson(
    worlds=(1, 2, 3),  # which TINY's three layers are enough for
    flags="--layers 5",
    variants=("--schedule gpipe", "--schedule naive"),
    own={"--schedule": ("1f1b gpipe naive", "zb-h1 1F1B")},
    bad=("--layers 2",),
    races=("--schedule gpipe", "--schedule 1f1b"),
    orders=[*orders(("1f1b", "gpipe", "naive")), (8, f"{SMALL} --accum 16")],
)


# ---- schedules, of which zero_bubble.py's and pipeline_v.py's tests ask the same ----

SCHEDULES = {"pipeline": ("naive", "gpipe", "1f1b"), "zero_bubble": ("zb-h1", "zb-h2", "1f1b")}
PUBLISHED = [  # arXiv 2401.10241, 8 stages: microbatches, T_F, T_B, T_W, T_comm of table 9, rates of table 5
    (24, 18.522, 18.086, 9.337, 0.601, {"1f1b": "0.2431", "zb-h1": "0.1585", "zb-h2": "0.1083"}),
    (32, 18.513, 18.086, 9.331, 0.626, {"1f1b": "0.1985", "zb-h1": "0.1242", "zb-h2": "0.0837"}),
    (64, 18.546, 18.097, 9.321, 0.762, {"1f1b": "0.1240", "zb-h1": "0.0674", "zb-h2": "0.0444"}),
]


def schedule_of(*arguments):
    return load("tools/bubble").schedule_of(*arguments)


def play(schedule):
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


def check_bubbles(name):
    """Rates are the published ones to every digit, and the closed forms, for a lesson or for a bubble.py."""
    of_tool = Path(name).stem == "bubble"
    bubble_rate = load(name if of_tool else "tools/bubble").bubble_rate
    lessons = {load(each): SCHEDULES[Path(each).stem] for each in (SCHEDULES if of_tool else [name])}
    lesson_of = {schedule_name: lesson for lesson, names in lessons.items() for schedule_name in names}
    for m, t_f, t_b, t_w, t_comm, rates in PUBLISHED:
        for schedule_name, rate in rates.items():
            if schedule_name in lesson_of:
                lesson = lesson_of[schedule_name]
                limit = re.search(r"len\(sends\) > (\d)", inspect.getsource(lesson.pipelined))
                schedule = schedule_of(lesson, schedule_name, 8, m)
                found = f"{bubble_rate(schedule, t_f, t_b, t_w, t_comm, int(limit[1])):.4f}"
                assert found == rate, f"{schedule_name}: not the published rate, but {found}"
    for schedule_name, p, rounds, t_w in itertools.product(lesson_of, (2, 4), (2, 3), (0.5, 1)):
        t_f, t_b, m = 1, 1, rounds * p
        ideal = m * (t_f + t_b + t_w)
        idle = {"naive": (p - 1) * ideal}
        idle |= {"zb-h1": (p - 1) * (t_f + t_b - t_w), "zb-h2": (p - 1) * (t_f + t_b - 2 * t_w)}
        expected = idle.get(schedule_name, (p - 1) * (t_f + t_b + t_w))
        rate = bubble_rate(schedule_of(lesson_of[schedule_name], schedule_name, p, m), t_f, t_b, t_w)
        assert abs(rate - expected / (ideal + expected)) < 1e-9, f"{schedule_name}: not the closed form"


DIAGRAMS = [("pipeline", "1f1b", 0, 6), ("zero_bubble", "zb-h1", 0, 6), ("zero_bubble", "zb-h2", 4, 7)]


@pytest.mark.parametrize("name, schedule, first, k", DIAGRAMS)
def test_the_docstrings_diagram_is_the_schedule(name, schedule, first, k):
    lesson = load(name)
    drawn = re.findall(r"rank \d \| (.*)", lesson.__doc__)[first : first + 4]
    for drawn_row, row in zip(drawn, play(schedule_of(lesson, schedule, 4, k)), strict=True):
        line = "".join(f"{action.op}{action.microbatch} " if action else ".  " for action in row)
        assert drawn_row.rstrip(". ") == line.rstrip(". ")


# ---- pipeline.py ----


def check_schedules(name):
    """All microbatches go forward and backward; as many are in flight, and for as long is a rank idle, as the
    docstring says."""
    lesson = load(name)
    rows = re.findall(r"^ +(naive|gpipe|1f1b) +(\S+) +(\S+)", lesson.__doc__, re.M)
    assert sorted(row[0] for row in rows) == sorted(lesson.FLAGS["schedule"]), "not a row for each schedule"
    for (which, flying, bubble), size, k in itertools.product(rows, range(1, 7), range(1, 13)):
        ranks = [lesson.order(which, rank, size, k) for rank in range(size)]
        assert all(Counter(ops) == {"F": k, "B": k} for ops in ranks), f"{which}: not every F and B once"
        schedule = schedule_of(lesson, which, size, k)
        turns = {len(row) for row in play(schedule)}
        idle = 1 - 2 * k / max(turns)
        letters = {"N": size, "k": k}
        assert abs(idle - evaluate(bubble, letters)) < 1e-9, f"{which}: idle for {idle:.3f} of the step"
        for rank, actions in enumerate(schedule):
            most = evaluate(flying, letters | {"i": rank})
            assert in_flight(actions) == most, f"{which}: {in_flight(actions)} in flight, not {most}"


def check_stages(name):
    """Each layer is on one rank, about as many on each; a rank has no other weights."""
    lesson = load(name)
    for layers, size in ((1, 1), (8, 1), (8, 2), (8, 3), (5, 4), (8, 8)):
        config = lesson.read_flags(lesson.FLAGS, f"--layers {layers} --heads 1 --width 4".split())
        whole = {key: weight.shape for key, weight in lesson.GPT(config).state_dict().items()}
        own = [lesson.Stage(config, rank, size).model.state_dict() for rank in range(size)]
        ends = {"tokens": {0, size - 1}, "positions": {0}, "norm": {size - 1}}
        for key, shape in whole.items():
            ranks = {rank for rank, weights in enumerate(own) if key in weights}
            layer = key.split(".")[0]
            expected = ends[layer] if layer in ends else {int(key.split(".")[1]) * size // layers}
            assert ranks == expected, f"{key} is on ranks {ranks}, not {expected}"
            assert all(own[rank][key].shape == shape for rank in ranks), "another shape"
        blocks = [len({key.split(".")[1] for key in weights if "blocks" in key}) for weights in own]
        assert max(blocks) - min(blocks) < 2, f"{blocks} blocks"


@on_ranks(3)
def check_held(name):
    """Activations in a step's peak are those of the microbatches in flight."""
    lesson, ledger = load(name), load("tools/ledger")
    rank, size, held = dist.get_rank(), dist.get_world_size(), {}
    for which, flags in itertools.product(("naive", "gpipe", "1f1b"), ("--accum 6 --batch 12",)):
        config = lesson.parse(f"{EXACT} --layers 6 --steps 2 --schedule {which} {flags}".split())
        watch, _ = ledger.run(lesson, config)
        held[which] = watch.held()["activations"]
    for which, most in (("gpipe", 6), ("1f1b", size - rank)):
        found = held[which] / held["naive"]
        assert abs(found - most) < 0.1 * most, f"{which}: {found:.2f} microbatches' activations, not {most}"


class Pending:
    """What isend() returns, among others that nobody has waited for, which gloo would give up."""

    def __init__(self, work, others):
        self.work, self.others = work, others
        others.add(self)

    def wait(self):
        self.work.wait()
        self.others.remove(self)


@on_ranks(3)
def check_sends(name, schedule="gpipe", limit=3):
    """What has been sent is let go of, and all of it has been when a step ends."""
    lesson, most, left, isend = load(name), 0, set(), dist.isend

    def send(*arguments):
        nonlocal most
        pending = Pending(isend(*arguments), left)
        most = max(most, len(left))
        return pending

    lesson.print_step = lambda *_: None
    with mock.patch.object(dist, "isend", send):
        lesson.train(lesson.parse(f"{EXACT} --accum 12 --steps 1 --schedule {schedule}".split()))
    assert most <= limit, f"{most} messages are kept"
    assert not left, f"{len(left)} messages nobody has waited for"


@pytest.mark.long_table
@pytest.mark.parametrize("schedule", SCHEDULES["pipeline"])
@pytest.mark.parametrize("size, accum", [(4, 1), (4, 6), (8, 3)])
def test_every_schedule_comes_to_single_pys_numbers_and_sends_what_it_says(size, accum, schedule):
    flags = f"--accum {accum} --layers {size + 1}"
    check_parity("pipeline", size, flags, f"--schedule {schedule}")
    check_ledger("pipeline", size, f"{flags} --schedule {schedule}")


def test_a_weight_has_its_own_name_and_the_whole_models_value():
    lesson = load("pipeline")
    config = lesson.read_flags(lesson.FLAGS, ["--layers", "3"])
    whole = lesson.GPT(config).state_dict()
    for rank in range(3):
        for key, weight in lesson.Stage(config, rank, 3).model.state_dict().items():
            assert torch.equal(weight, whole[key])


test_each_promise_is_kept = holds(
    "pipeline", check_schedules, check_bubbles, check_stages, check_held, check_sends
)
parity = partial(check_parity, size=3)
naive = partial(parity, own_flags="--schedule naive")
MUTANTS = [
    ("min(k, world_size - rank)", "min(k, world_size - rank + 1)", check_schedules, "1f1b: 2 in flight"),
    ("min(k, world_size - rank)", "min(k, max(1, world_size - rank - 1))", check_schedules, "1f1b: idle"),
    ("min(k, world_size - rank)", "min(k, max(1, world_size - rank - 1))", check_bubbles, "not the publish"),
    ("min(k, world_size - rank)", "world_size - rank", check_schedules, "not every F and B"),
    ('"BF" * (k - in_flight)', '"FB" * (k - in_flight)', check_schedules, "naive: 2 in flight"),
    ('"gpipe": k', '"gpipe": min(k, 8)', check_schedules, "gpipe: 8 in flight"),
    ("i * world_size //", "(config.layers - 1 - i) * world_size //", check_stages, "is on ranks"),
    ("if rank not in ranks:", "if rank not in ranks and ranks != [0]:", check_stages, "is on ranks"),
    ("in_flight.pop(0)", "in_flight.pop()", parity, "differ"),
    ("min(k, world_size - rank)", "k", check_held, "microbatches' activations, not"),
    ("if len(sends) > 1:", "if False:", check_sends, "messages are kept"),
    ("    for send in sends:\n        send.wait()\n", "", check_sends, "nobody has waited for"),
    (" / self.n_microbatches", "", parity, "losses differ"),
    ("self.total_loss += x", "self.total_loss = x", parity, "losses differ"),
    ("        dist.all_reduce(stage.total_loss)\n", "", parity, "losses differ"),
    ("dist.send(x.grad,", "dist.send(x.grad * 2,", naive, "differ"),
    ("dist.all_reduce(stage.model.tokens.weight.grad, group=tied_group)", "pass", parity, "differ"),
    (' if rank == 0 or name != "tokens.weight"]', "]", parity, "differ"),
    ("        dist.all_reduce(squares)\n", "", parity, "differ"),
    ("for weights in stages for", "for weights in stages[:1] for", parity, "other names"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "pipeline")
TOOL_MUTANTS = [
    ("now if rank_of.get(after) == rank else now + t_comm", "now", check_bubbles, "not the published rate"),
    ("now - began)", "now)", check_bubbles, "zb-h2: not the closed form"),
    ('duration["B"] += t_w', "pass", check_bubbles, "1f1b: not the published rate"),
]
test_a_mutant_of_the_tool_is_rejected = mutants(TOOL_MUTANTS, "tools/bubble")
four = partial(gpu.together, gpu.in_order, rows=[(4, f"{SMALL} --accum 8")])
GPU_MUTANTS = [
    # a send behind a receive that needs it
    ('{"F": dist.new_group(), "B": dist.new_group()}', 'dict.fromkeys("FB", dist.new_group())', four,
     "ranks wait for one another"),
    # an output in the gradients' group
    ('stage.next, groups["F"]))', 'stage.next, groups["B"]))', four, "ranks wait for one another"),
    # all ranks must make a group, those outside it, too
    ("tied_group = dist.new_group(", "tied_group = 0 < rank < world_size - 1 or dist.new_group(", four,
     "ranks wait for one another"),
    ("dist.recv(buffer", "dist.irecv(buffer", check_gpu, "what a collective still"),
    ("self.total_loss += x.detach()", "self.total_loss += x.item()", check_gpu, "the host waits"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "pipeline")
