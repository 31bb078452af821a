"""What is special to zero_bubble.py: B and W apart, and its schedules, beside pipeline.py's."""

import itertools
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from formulas import evaluate

from tests import gpu
from tests.checks import EXACT, check_ledger, check_parity
from tests.gpu import check_gpu
from tests.harness import Lesson, apart, error_of, holds, load, mutants, on_ranks
from tests.test_pipeline import SMALL, check_bubbles, check_sends, in_flight, orders, play, re, schedule_of

NAIVE = "--schedule 1f1b"
WITH = "--layers 4 --accum 4"
LEARN = "torchrun LESSON --dtype bf16; torchrun LESSON --schedule zb-h2"
RACE = "2 --accum 8 --batch 16"
LESSON = Lesson(
    worlds=(1, 2, 3),  # which TINY's three layers are enough for
    flags="--layers 5",
    variants=("--schedule zb-h2", "--schedule 1f1b"),
    own={"--schedule": ("zb-h1 zb-h2 1f1b", "gpipe ZB-H1")},
    bad=("--layers 2",),
    orders=[*orders(("zb-h1", "zb-h2", "1f1b")), (8, f"{SMALL} --accum 16 --schedule zb-h2")],
)


def check_schedules(name):
    """Every F, B and W comes once, in order; as many are in flight, and a rank as long idle, as is said."""
    lesson, bubble_rate = load(name), load("tools/bubble").bubble_rate
    rows = re.findall(r"^ +(1f1b|zb-h.) +(\S+) +(\S+)", lesson.__doc__, re.M)
    assert sorted(row[0] for row in rows) == sorted(lesson.FLAGS["schedule"]), "not a row for each schedule"
    for (which, flying, idle), size, k in itertools.product(rows, range(1, 6), range(1, 13)):
        for rank in range(size):
            counts = Counter(lesson.order(which, rank, size, k))
            assert counts == dict.fromkeys("FB" if which == "1f1b" else "FBW", k), f"{which}: not all once"
        schedule = schedule_of(lesson, which, size, k)
        play(schedule)
        for rank, actions in enumerate(schedule):
            most = evaluate(flying, {"N": size, "k": k, "i": rank})
            assert in_flight(actions) == most, f"{which}: {in_flight(actions)} in flight, not {most}"
        for t_w in (0.5, 1) if k >= 2 * size - 1 else ():
            expected = evaluate(idle, {"N": size, "F": 1, "B": 1, "W": t_w})
            rate = bubble_rate(schedule, 1, 1, t_w)
            assert abs(rate - expected / (expected + k * (2 + t_w))) < 1e-9, f"{which}: idle for {rate:.3f}"


def check_split(name):
    """B gives all gradients but the weight's, W this one, one microbatch after the other."""
    linear, inputs = (
        nn.Linear(5, 7).double(),
        torch.randn(3, 2, 4, 5, dtype=torch.float64, requires_grad=True),
    )
    split, plain, others = load(name).SplitLinear(linear), [], [inputs, linear.bias]
    for x in inputs.unbind():
        linear(x).sin().sum().backward()
        plain.append(linear.weight.grad)
        linear.weight.grad = None
    expected = [each.grad for each in others]
    inputs.grad = linear.bias.grad = None
    outputs = [split(x) for x in inputs.unbind()]
    for output in outputs:
        output.sin().sum().backward()
        assert split.weight.grad is None, "W comes with B"
    assert all(apart(each.grad, grad) < 1e-12 for each, grad in zip(others, expected)), "B is not right"
    for i in range(3):
        split.weight_gradient()
        assert apart(split.weight.grad, sum(plain[: i + 1])) < 1e-12, "not the oldest's gradient"


@on_ranks(3)
def check_held(name):
    """Activations in a step's peak are those of the microbatches in flight."""
    lesson, ledger = load(name), load("tools/ledger")
    rank, size, held = dist.get_rank(), dist.get_world_size(), {}
    for which in ("1f1b", "zb-h1", "zb-h2"):
        flags = f"{EXACT} --layers 6 --steps 2 --schedule {which} --accum 9"
        watch, _ = ledger.run(lesson, lesson.parse(flags.split()))
        held[which] = watch.held()["activations"] / held.get("1f1b", 1)
    for which, most in (("zb-h1", size), ("zb-h2", 2 * size - 1)):
        found = held[which] * (size - rank)
        less = 0.25 if rank == size - 1 else 0.05  # the head and the loss keep nothing from B to W
        assert most - less * most < found < most + 0.05, (
            f"{which}: {found:.2f} microbatches' activations, not {most}"
        )


@on_ranks(1)
def check_freed(name, expected=12):
    """After its W nothing of a microbatch is left."""
    lesson, kept, most = load(name), [], 0
    forward = lesson.SplitLinear.forward

    def note(layer, x):
        nonlocal most
        kept.append(weakref.ref(x))
        most = max(most, sum(ref() is not None for ref in kept))
        return forward(layer, x)

    lesson.SplitLinear.forward, lesson.print_step = note, lambda *_: None
    lesson.train(lesson.parse(f"{EXACT} --accum 3 --steps 1".split()))
    assert most == expected, f"{most} layers' inputs are kept, not {expected}"


@pytest.mark.long_table
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "1f1b"])
@pytest.mark.parametrize("size, accum", [(3, 6), (4, 1)])
def test_every_schedule_comes_to_single_pys_numbers_and_sends_what_it_says(size, accum, schedule):
    flags = f"--accum {accum} --layers 5"
    check_parity("zero_bubble", size, flags, f"--schedule {schedule}")
    check_ledger("zero_bubble", size, f"{flags} --schedule {schedule}")


sends = partial(check_sends, schedule="zb-h2", limit=4)


def check_evaluation(name):
    split = load(name).SplitLinear(nn.Linear(5, 7))
    with torch.no_grad():
        assert error_of(lambda: split(torch.ones(2, 5))) == "nothing", "no evaluation"


CHECKS = check_evaluation, check_schedules, check_bubbles, check_split, check_held, check_freed, sends
test_each_promise_is_kept = holds("zero_bubble", *CHECKS)
parity = partial(check_parity, size=3)
MUTANTS = [
    ("if output.requires_grad:", "if True:", check_evaluation, "no evaluation"),
    ("min(k, world_size - rank)", "min(k, world_size - rank + 1)", check_schedules, "1f1b: 2 in flight"),
    ('"zb-h2": 2', '"zb-h2": 3', check_schedules, "zb-h2: 4 in flight"),
    ('"zb-h2": 2', '"zb-h2": 1', check_bubbles, "zb-h2: not the published rate"),
    ('"W": depth * (world_size - 1)}', '"W": depth * (world_size - 1 - rank)}', check_schedules, "in flight"),
    ('"W": depth * (world_size - 1)}', '"W": depth * world_size}', check_schedules, "zb-h1: 2 in flight"),
    ('"B": depth * (world_size - 1 - rank)', '"B": depth * (world_size - 1)', check_bubbles, "published"),
    ("<= i < first[op] + k)", "<= i <= first[op] + k)", check_schedules, "not all once"),
    ("self.weight.detach()", "self.weight", check_split, "W comes with B"),
    ("self.weight.detach()", "self.weight", parity, "differ"),
    ("self.factors.pop(0)", "self.factors.pop()", check_split, "not the oldest's"),
    ("self.factors.pop(0)", "self.factors[0]", check_held, "microbatches' activations, not"),
    ("            del x, output", "            pass", check_freed, "inputs are kept"),
    ("self.weight.backward(grad", "self.weight.backward(2 * grad", parity, "differ"),
    ('config.schedule != "1f1b"', 'config.schedule == "zb-h2"', check_held, "activations, not 3"),
    ("in_flight.pop(0)", "in_flight.pop()", parity, "differ"),
    ("if len(sends) > 2:", "if False:", sends, "messages are kept"),
    ("if len(sends) > 2:", "if len(sends) > 1:", check_bubbles, "zb-h2: not the published rate"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "zero_bubble")
four = partial(gpu.together, gpu.in_order, rows=[(4, f"{SMALL} --accum 8")])
GPU_MUTANTS = [
    # a send behind a receive that needs it
    ('{"F": dist.new_group(), "B": dist.new_group()}', 'dict.fromkeys("FB", dist.new_group())', four,
     "ranks wait for one another"),
    ("self.weight.backward(grad.", "self.weight.backward(grad.cpu().", check_gpu, "of the host"),
    ("dist.recv(buffer", "dist.irecv(buffer", check_gpu, "what a collective still"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "zero_bubble")
