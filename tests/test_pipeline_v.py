"""What is special to pipeline_v.py: two stages on a rank, and their schedules, beside torch's."""

import itertools
import re
import types
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from formulas import evaluate
from torch.distributed.pipelining import schedules

from tests import gpu
from tests.checks import EXACT, check_ledger, check_parity
from tests.gpu import check_gpu
from tests.harness import Lesson, holds, load, mutants, on_ranks
from tests.test_pipeline import SMALL, check_sends, check_stages, in_flight, play, schedule_of
from tests.test_zero_bubble import check_evaluation, check_freed

NAIVE = "--schedule gpipe"
WITH = "--layers 4 --accum 4"
LEARN = "torchrun LESSON --dtype bf16; torchrun LESSON --schedule interleaved; torchrun LESSON --accum 2"
ALL = "zb-v", "interleaved", "gpipe"
RACE = "2 --accum 8 --batch 16"
LESSON = Lesson(
    worlds=(1, 2, 3),  # which TINY's three layers are enough for
    flags="--layers 5",
    variants=("--schedule interleaved", "--schedule gpipe"),
    own={"--schedule": (" ".join(ALL), "1f1b ZB-V")},
    bad=("--layers 2",),
    # In torch 2.11's schedules of a V the last rank sends to itself, which gloo cannot.
    races=("--layers 4 --accum 4 --batch 16", "--layers 4 --accum 4 --batch 16 --schedule interleaved")
    if torch.__version__ >= "2.13"
    else (),
    orders=[
        (size, f"{SMALL} --schedule {schedule} --accum {k}")
        for schedule in ALL
        for size, k in ((2, 4), (2, 8), (3, 1), (3, 4), (4, 4), (4, 8), (8, 16))
    ],
)


def check_schedules(name):
    """Every F, B and W comes once; as many are in flight, and for as long is a rank idle, as is said."""
    lesson = load(name)
    rows = re.findall(r"^ +(gpipe|interleaved|zb-v) +(\S+) +(\S+)", lesson.__doc__, re.M)
    assert sorted(row[0] for row in rows) == sorted(ALL), "not a row for each schedule"
    for (which, flying, idle), n, k in itertools.product(rows, range(1, 7), range(1, 13)):
        schedule = schedule_of(lesson, which, n, k)
        for rank, actions in enumerate(schedule):
            stages = rank, n + rank if which == "interleaved" else 2 * n - 1 - rank
            wanted = itertools.product("FBW" if which == "zb-v" else "FB", stages, range(k))
            assert Counter(map(tuple, actions)) == Counter(wanted), f"{which}: not every F, B and W once"
        turns = max(map(len, play(schedule)))
        for rank, actions in enumerate(schedule):
            most = evaluate(flying, {"N": n, "k": k, "i": rank})
            if (k >= 2 * n - 1) if which == "zb-v" else (k % n == 0):
                assert in_flight(actions) == most, f"{which}: {in_flight(actions)} in flight, not {most}"
        if which == "zb-v" and k >= 2 * n - 1:
            rate = 1 - 6 * k / turns
        elif which != "zb-v" and k % n == 0:
            rate = load("tools/bubble").bubble_rate(schedule, 1, 1, 1)
        else:
            continue
        assert abs(rate - evaluate(idle, {"N": n, "k": k})) < 1e-9, f"{which}: idle for {rate:.3f}"


def check_bubbles(name):
    """Interleaved has half of 1F1B's bubble, whatever F, B and W take. With zb-v no rank is idle between its
    first F and its last W if they take equally long. A turn is no message."""
    lesson, bubble_rate = load("pipeline_v" if "bubble" in name else name), load("tools/bubble").bubble_rate
    bubble_rate = load(name).bubble_rate if "bubble" in name else bubble_rate
    for p, rounds, (t_f, t_b, t_w) in itertools.product((2, 4, 8), (1, 3), ((1, 1, 1), (3, 5, 2))):
        idle = (p - 1) / (2 * rounds * p)  # of the time that a rank works: arXiv 2104.04473, section 2.2
        rate = bubble_rate(schedule_of(lesson, "interleaved", p, rounds * p), t_f, t_b, t_w)
        assert abs(rate - idle / (1 + idle)) < 1e-9, "interleaved: not the published bubble"
    for p, more in itertools.product((2, 4, 8, 16, 32), (-1, 0, 1, 8)):
        rate = bubble_rate(schedule_of(lesson, "zb-v", p, 2 * p + more), 1, 1, 1)
        assert abs(rate) < 1e-9, f"zb-v: idle for {rate:.4f} of the time"
    assert bubble_rate(schedule_of(lesson, "zb-v", 1, 4), 1, 1, 1, 9) == 0, "the turn is a message"


KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
TORCHS = {"zb-v": schedules.ScheduleZBVZeroBubble, "interleaved": schedules.ScheduleInterleaved1F1B}


def torchs_order(which, p, m):
    """What torch's schedule lets each rank do, as tools/bubble.py's actions."""
    order = []
    for rank in range(p):
        own = types.SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m, rank=rank)
        own.n_local_stages, own.microbatches_per_round = 2, p
        actions = filter(None, TORCHS[which]._calculate_single_rank_operations(own, rank))
        make = load("tools/bubble").Action
        order.append([make(KINDS[kind.name], stage, j) for stage, kind, j, _ in actions])
    return order


def check_order(name):
    """torch's order, but for the place of a W; in short steps torch's zb-v idles longer."""
    lesson, bubble_rate = load(name), load("tools/bubble").bubble_rate
    for p, rounds in itertools.product((2, 4, 8), (1, 2, 4)):
        ours = schedule_of(lesson, "interleaved", p, rounds * p)
        assert [*map(list, ours)] == torchs_order("interleaved", p, rounds * p), "not torch's order"
    for p, m in itertools.product((2, 4, 8), (4, 6, 8, 12, 16, 24, 32)):
        both = schedule_of(lesson, "zb-v", p, m), torchs_order("zb-v", p, m)
        ours, theirs = ([[a for a in row if a.op in "FB"] for row in each] for each in both)
        assert ours == theirs or m < 2 * p - 1, "not torch's order"
        ours, theirs = (bubble_rate(schedule, 1, 1.1, 0.7, 0.1) for schedule in both)
        assert ours < theirs + 1e-9 * (m >= 2 * p - 1), "idles as long as torch's"
        ours, theirs = (max(map(in_flight, schedule)) for schedule in both)
        assert ours <= theirs, f"{ours} in flight, torch has {theirs}"


@on_ranks(3)
def check_steps(name):
    """What runs is the schedule that other checks measure, in short steps, too."""
    bubble = load("tools/bubble")
    for which, k in itertools.product(ALL, (1, 2, 6)):
        lesson, ran = load(name), []
        forward, weight_gradient = lesson.Stage.forward, lesson.SplitLinear.weight_gradient

        def run_forward(stage, x, targets, forward=forward, ran=ran):
            ran.append(("F", stage.number))
            for layer in stage.linears[:1]:
                layer.number = stage.number
            output = forward(stage, x, targets)
            output.register_hook(lambda _: ran.append(("B", stage.number)))
            return output

        def run_w(layer, weight_gradient=weight_gradient, ran=ran):
            ran.extend(("W", layer.number) for _ in range(hasattr(layer, "number")))
            weight_gradient(layer)

        lesson.Stage.forward, lesson.SplitLinear.weight_gradient = run_forward, run_w
        lesson.print_step = lambda *_: None
        flags = f"{EXACT} --layers 6 --steps 1 --schedule {which} --accum {k}"
        lesson.train(lesson.parse(flags.split()))
        own = bubble.schedule_of(lesson, which, dist.get_world_size(), k)[dist.get_rank()]
        assert ran == [(action.op, action.stage) for action in own], f"{which}: other steps run"


@on_ranks(4)
def check_held(name):
    """Activations in a step's peak are those of the stages in flight."""
    lesson, ledger = load(name), load("tools/ledger")
    rank, size, held = dist.get_rank(), dist.get_world_size(), {}
    for which in ALL:
        flags = f"{EXACT} --layers 8 --steps 2 --schedule {which} --accum 12"
        watch, _ = ledger.run(lesson, lesson.parse(flags.split()))
        held[which] = watch.held()["activations"]
    for which, most in (("zb-v", 2 * size), ("interleaved", 3 * size - 1 - 2 * rank)):
        found = 24 * held[which] / held["gpipe"]
        is_end = rank in (0, size - 1)  # with the head and the loss, which are more than a block
        assert is_end or abs(found - most) < 0.4, f"{which}: {found:.2f} stages' activations, not {most}"


@pytest.mark.long_table
@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("size, accum", [(4, 6), (4, 1), (8, 3)])
def test_every_schedule_comes_to_single_pys_numbers_and_sends_what_it_says(size, accum, schedule):
    flags = f"--accum {accum} --layers 8"  # on 8 ranks half of the stages have no block
    check_parity("pipeline_v", size, flags, f"--schedule {schedule}")
    check_ledger("pipeline_v", size, f"{flags} --schedule {schedule}")


def test_the_docstrings_diagram_is_the_schedule():
    lesson = load("pipeline_v")
    drawn = re.findall(r"rank \d \| (.*)", lesson.__doc__)
    for line, row in zip(drawn, play(schedule_of(lesson, "zb-v", 3, 5)), strict=True):
        words = [f"{a.op if a.stage < 3 else a.op.lower()}{a.microbatch}" if a else "." for a in row]
        assert line.split() == words


sends = partial(check_sends, schedule="zb-v", limit=4)
freed = partial(check_freed, expected=16)
CHECKS = check_schedules, check_bubbles, check_order, check_steps, check_held, check_stages, sends, freed
CHECKS += (check_evaluation,)
test_each_promise_is_kept = holds("pipeline_v", *CHECKS)
parity = partial(check_parity, size=3, flags="--accum 6 --layers 5")
ring = partial(parity, own_flags="--schedule interleaved")
MUTANTS = [
    ('"F" * (2 * below + 1)', '"F" * (2 * below + 2)', check_schedules, "zb-v: 3 in flight, not 2"),
    ('"F" * (2 * below + 1)', '"F" * (2 * below + (rank > 0)) + "fF" * (not rank)', check_bubbles, "idle"),
    ('"fbW" * (below + 1)', '"fb" * (below + 1)', check_schedules, "not every F, B and W"),
    ('"FBWfbW" * (k - world_size)', '"FBfbWW" * (k - world_size)', check_schedules, "in flight, not"),
    ('ops += "Bb" * rank', 'ops += "BWbW" * rank', check_bubbles, "zb-v: idle"),
    ("ahead = world_size + 2 *", "ahead = world_size + 1 + 2 *", check_schedules, "interleaved: 3 in flight"),
    ("ahead = world_size + 2 *", "ahead = world_size +", check_order, "not torch's order"),
    ('("F" * world_size + "f" * world_size)', '("Ff" * world_size)', check_bubbles, "not the published"),
    ('"b" * world_size + "B"', '"B" * world_size + "b"', check_schedules, "no rank can go on"),
    ("-(-k // world_size)", "k // world_size", check_schedules, "interleaved: not every F, B and W"),
    ('return "F" * k + "f" * k', 'return "Ff" * k', check_schedules, "gpipe: idle for"),
    ("waiting.pop(0)", "waiting.pop()", check_steps, "zb-v: other steps run"),
    ("stages[1].model.tokens = stages[0].model.tokens", "pass", parity, "differ"),
    ("self.here.append(tensor)", "self.here.append(tensor * 2)", parity, "differ"),
    ("self.here.pop(0)", "self.here.pop()", partial(parity, own_flags=NAIVE), "differ"),
    ('config.schedule == "zb-v"', "False", check_steps, "zb-v: other steps run"),
    ("            return\n        self.finish_send()", "            return", sends, "messages are kept"),
    ("        link.finish_send()\n", "        pass\n", sends, "nobody has waited for"),
    ("            del x, output", "            pass", freed, "inputs are kept"),
    ("dist.all_reduce(tokens.weight.grad, group=tied_group)", "pass", ring, "differ"),
    (' if rank == 0 or "tokens" not in name]', "]", ring, "differ"),
    ("        dist.all_reduce(stages[1].total_loss)\n", "", ring, "losses differ"),
    (" | stages[1].model.cpu().state_dict()", "", parity, "other names"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "pipeline_v")
TURN = ("tools/bubble", "now if rank_of.get(after) == rank else now + t_comm", "now + t_comm")
test_a_turn_takes_no_message = mutants([(*TURN, check_bubbles, "the turn is a message")])
four = partial(gpu.together, gpu.in_order, rows=[(4, f"{SMALL} --accum 8")])
two = partial(gpu.together, gpu.in_order, rows=[(2, f"{SMALL} --accum 8 --schedule interleaved")])
GPU_MUTANTS = [
    # a send behind a receive that needs it
    ("dist.new_group(sorted({sender, receiver}))", "dist.group.WORLD", four, "ranks wait for one another"),
    ("dist.new_group(sorted({sender, receiver}))", "dist.group.WORLD", two, "ranks wait for one another"),
    # a send that its own rank waits for
    ("self.sends.append(dist.isend(tensor, self.receiver, self.group))",
     "dist.isend(tensor, self.receiver, self.group).wait()", four, "ranks wait for one another"),
    ("dist.recv(buffer", "dist.irecv(buffer", check_gpu, "what a collective still"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "pipeline_v")
