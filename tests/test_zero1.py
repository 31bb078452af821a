"""What zero1.py, zero2.py and zero3.py promise of blocks in any use, and when what travels."""

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.checks import check_ledger, check_masters, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import Lesson, apart, holds, load, mutants, on_ranks

NAIVE = "--naive"


def slack(root, block, size, flags):
    """Gradients: what is received, or not yet, of other units when most is there."""
    return 2 * root + 2 * block, 0


LESSON = Lesson(variants=("--naive",), slack=slack, races=("",))
STAGES = "zero1 zero2 zero3"


class Part(nn.Module):
    """A block of odd sizes, with an embedding of its own."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(4, 7)
        self.up = nn.Linear(7, 5)
        self.down = nn.Linear(5, 7, bias=False)

    def forward(self, x):
        x = x + self.places(torch.arange(x.shape[1]))
        return x + self.down(torch.tanh(self.up(x)))


class Inner(Part):
    """It recomputes a part of itself."""

    def forward(self, x):
        x = x + self.places(torch.arange(x.shape[1]))
        return x + checkpoint(lambda x: self.down(torch.tanh(self.up(x))), x, use_reentrant=True)


def call(block, x):
    return block(x)


class Model(nn.Module):
    def __init__(self, block=Part, order=(0, 1, 2), how=call):
        super().__init__()
        torch.manual_seed(0)
        self.order, self.how = order, how
        self.tokens = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.fails = False
        self.double()

    def forward(self, tokens):
        x = self.tokens(tokens)
        for i in self.order:
            x = self.how(self.blocks[i], x)
            assert not self.fails
        return F.linear(x, self.tokens.weight)


again = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)
SITUATIONS = {  # (how the model is built, what a step does)
    "plain": ({}, "f b u"),
    "accumulation": ({}, "f b f b u"),
    "evaluation between backward and update": ({}, "f b e u"),
    "evaluation between forward and backward": ({}, "f e b u e"),
    "evaluation after update": ({}, "f b u e"),
    "two forwards, one backward": ({}, "f f b u"),
    "a forward without a backward": ({}, "f b u d"),
    "an exception in forward": ({}, "x f b u"),
    "a block used twice": ({"order": (0, 1, 1, 2)}, "f b f b u"),
    "another order": ({"order": (2, 0, 1)}, "f b u"),
    "checkpointed": ({"how": again}, "f b f b u"),
    "checkpointed, reentrant": ({"how": reentrant}, "f b f b u"),
    "checkpointed, twice": ({"how": again, "order": (1, 0, 1, 2)}, "f e b f b u"),
    "checkpointed, reentrant, twice": ({"how": reentrant, "order": (1, 0, 1, 2)}, "f e b u"),
    "checkpointed, two forwards": ({"how": reentrant}, "f f b u"),
    "a checkpoint in a block": ({"block": Inner}, "f b u"),
}


def train(model, batches, acts, last, finish, update):
    """Train as `acts` say: forward, backward, evaluate, update, drop, fail. Returns what evaluations give."""
    evaluated = []
    for step in range(3):
        loss = None
        for i, act in enumerate(acts.split()):
            tokens = batches[step, i]
            if act in "fd":
                own = model(tokens).log_softmax(-1)[..., 0].sum() / 99
                loss = own if loss is None else loss + own
            elif act == "e":
                with torch.no_grad():
                    evaluated.append(model(tokens).square().sum().item())
            elif act == "b":
                last("b" not in acts.split()[i + 1 :])
                loss.backward()
                loss = None
            elif act == "x":
                inner = getattr(model, "module", model)
                inner.fails = True
                with pytest.raises(AssertionError):
                    model(tokens)
                inner.fails = False
            else:
                finish()
                update()
            loss = None if act == "d" else loss
    return evaluated


def wrap(name, model, **options):
    """A model in a lesson's class; in hsdp.py's there are two nodes."""
    lesson, stem = load(name), Path(name).stem
    if stem in ("zero3", "hsdp", "fsdp_tp"):
        options = {"device": torch.device("cpu")} | options
    if stem == "zero3":
        options = {"prefetch": 1} | options
    if stem == "hsdp":
        nodes = torch.arange(dist.get_world_size()).view(2, -1)
        options["groups"] = [dist.new_subgroups_by_enumeration(each.tolist())[0] for each in (nodes, nodes.T)]
    if stem == "fsdp_tp":  # in rows of one
        options["group"] = dist.group.WORLD
        for param in model.parameters():
            param.cut = None
    wrapped = getattr(lesson, CLASSES[stem])(model, model.blocks, **options)
    if stem == "fsdp_tp":  # which has a list
        wrapped.shards = wrapped.shards.copy
    return wrapped


CLASSES = {"zero1": "ZeRO1", "zero2": "ZeRO2", "zero3": "ZeRO3", "hsdp": "HSDP", "offload": "Offload"}
CLASSES["fsdp_tp"] = "ZeRO3"


@on_ranks(2)
def check_situation(name, which, **options):
    """The plain loop's weights on all ranks' batches, and evaluations."""
    build, acts = SITUATIONS[which]
    shape = 3, 9, dist.get_world_size(), 3, 4
    everyone = torch.randint(11, shape, generator=torch.Generator().manual_seed(1))
    model = Model(**build)
    plain = Model(**build)
    sgd = torch.optim.SGD(plain.parameters(), 0.02)

    def step():
        sgd.step()
        sgd.zero_grad()

    expected = train(plain, everyone.flatten(2, 3), acts, lambda is_last: None, lambda: None, step)
    zero = wrap(name, model, **options)
    optimizer = torch.optim.SGD(zero.shards(), 0.02)

    def last(is_last):
        zero.finish_reduce_scatters()  # of an earlier backward, as is_last_backward says of hsdp.py's
        zero.is_last_backward = is_last

    def finish():
        zero.finish_reduce_scatters()
        for unit in zero.units if hasattr(zero.root, "finish_all_reduce") else ():
            unit.finish_all_reduce()

    def update():
        optimizer.step()
        optimizer.zero_grad(set_to_none=Path(name).stem != "offload")
        if hasattr(zero, "start_gathers"):
            zero.start_gathers()

    own = train(zero, everyone[:, :, dist.get_rank()], acts, last, finish, update)
    weights = zero.full_state_dict()
    worst = apart(weights, plain.state_dict())
    assert worst < 1e-12, f"{which}: weights differ by {worst:.1e}"
    own = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(own)
    assert not len(own) or apart(own, expected) < 1e-10, f"{which}: evaluations differ"


situations = [partial(check_situation, which=which) for which in SITUATIONS]
test_blocks_train_as_in_the_plain_loop = holds(STAGES.split(), *situations)
ahead = [partial(check_situation, which=which, prefetch=f) for which, f in product(SITUATIONS, (0, 2))]
test_blocks_train_with_other_prefetching = holds("zero3", *ahead)


def logged(name, log):
    """A model of a root and three blocks; what computes and what starts and ends on the network is logged."""
    model = Model()
    for i, block in enumerate(model.blocks, 1):
        block.register_forward_hook(lambda *_, i=i: log.append(f"forward {i}"))
        block.register_full_backward_pre_hook(lambda *_, i=i: log.append(f"backward {i}"))
    zero = wrap(name, model)
    for (i, unit), (method, word) in product(enumerate(zero.units), METHODS.items()):
        if hasattr(unit, method):
            setattr(unit, method, noting(log, f"{word} {i}", unit, getattr(unit, method)))
    return zero


METHODS = {"start_gather": "gather", "finish_gather": "gathered", "free": "free"}
METHODS |= {"start_reduce_scatter": "reduce", "finish_reduce_scatter": "reduced"}


def noting(log, event, unit, method):
    """The method, which notes that it did something."""

    def state():
        return unit.gathering, unit.reducing, id(unit.flat), getattr(unit, "summing", None)

    def noted():
        before = state()
        method()
        if state() != before:
            log.append(event)

    return noted


TIMELINES = {  # of a second step; the root is 0
    "zero1": """gather 0 gather 1 gather 2 gather 3 gathered 0 gathered 1 forward 1 gathered 2 forward 2
        gathered 3 forward 3 backward 3 reduce 3 backward 2 reduced 3 reduce 2 backward 1 reduced 2 reduce 1
        reduced 1 reduce 0 reduced 0""",
    "zero3": """gather 0 gather 1 gathered 0 gather 2 gathered 1 forward 1 free 1 gather 3 gathered 2
        forward 2 gathered 3 forward 3 backward 3 reduce 3 free 3 backward 2 gather 1 reduced 3 reduce 2
        free 2 backward 1 gathered 1 reduced 2 reduce 1 free 1 reduced 1 reduce 0 free 0 reduced 0""",
}
TIMELINES["zero2"] = TIMELINES["offload"] = TIMELINES["zero1"]


@on_ranks(2)
def check_timeline(name):
    log = []
    zero = logged(name, log)
    optimizer = torch.optim.SGD(zero.shards(), lr=0.1)
    for _ in range(2):
        log.clear()
        if hasattr(zero, "start_gathers"):
            zero.start_gathers()
        zero(torch.ones(2, 4, dtype=int)).sum().backward()
        zero.finish_reduce_scatters()
        optimizer.step()
        optimizer.zero_grad(set_to_none=Path(name).stem != "offload")
    expected = TIMELINES[Path(name).stem]
    assert " ".join(log) == " ".join(expected.split()), f"another order: {', '.join(log)}"


test_collectives_travel_while_other_units_compute = holds(STAGES.split(), check_timeline)

GATHERS = {"plain": 5, "checkpointed": 5, "checkpointed, reentrant": 5}  # block 1 is gathered twice


@on_ranks(2)
def check_gathers(name):
    """A recomputed block is neither freed in between nor gathered once more."""
    lesson = load(name)
    for which, expected in GATHERS.items():
        calls, all_gather = [], lesson.all_gather
        lesson.all_gather = lambda *both, call=all_gather, calls=calls, **how: (
            calls.append(1),
            call(*both, **how),
        )[1]
        model = Model(**SITUATIONS[which][0])
        zero = lesson.ZeRO3(model, model.blocks, 1, torch.device("cpu"))
        zero(torch.ones(2, 4, dtype=int)).sum().backward()
        lesson.all_gather = all_gather
        assert len(calls) == expected, f"{which}: {len(calls)} all-gathers"


@on_ranks(2)
def check_abandoned(name):
    """A gather of which nobody uses what arrives has ended before its memory is given away."""
    model = Model()
    zero = load(name).ZeRO3(model, model.blocks, 1, torch.device("cpu"))
    zero.units[1].start_gather()
    zero.units[1].free()
    assert zero.units[1].gathering is None, "freed while it is gathered"


test_a_recomputed_block_is_gathered_once = holds("zero3", check_gathers, check_abandoned)

twice = partial(check_situation, which="checkpointed, reentrant, twice")
stale = partial(check_situation, which="evaluation between backward and update")
plain = partial(check_situation, which="plain")
naive = partial(check_parity, own_flags="--naive")
SQUARES = "squared_norm([shard.grad for shard in model.shards()])"
IN_TURN = """            self.finish_reduce_scatters()
            unit.start_reduce_scatter()
"""
MUTANTS = [
    (STAGES, SQUARES, "squared_norm([model.shards()[0].grad])", check_parity, "differ"),
    (STAGES, "        dist.all_reduce(squares)", "        pass", check_parity, "differ"),
    (STAGES, "        dist.all_reduce(total_loss)", "        pass", check_parity, "losses differ"),
    (STAGES, "/ (config.accum * world_size)", "/ world_size", check_parity, "losses differ"),
    (STAGES, "/ (config.accum * world_size)", "/ config.accum", check_parity, "losses differ"),
    (STAGES, "        optimizer.zero_grad()\n", "", check_parity, "losses differ"),
    (STAGES, "else self.shard.grad + gradient", "else gradient", twice, "weights differ"),
    (STAGES, "wide(self.dtype)", "self.dtype", check_masters, "moved by"),
    ("zero1", "if not self.is_last_backward:", "if False:", check_ledger, "reduce-scatter: sent +"),
    ("zero1", "= i == config.accum", "= i == 1", check_parity, "differ"),
    ("zero1 zero2", "unit.finish_gather())\n", "None)\n", check_timeline, "another order"),
    (STAGES, IN_TURN, "".join(IN_TURN.splitlines(True)[::-1]), check_timeline, "another order"),
    (STAGES, IN_TURN, IN_TURN.splitlines(True)[1], check_timeline, "another order"),
    ("zero1 zero2", "            param.grad = None\n", "            pass\n", naive, "differ"),
    ("zero1 zero2", "self.own.copy_(self.shard.detach())", "pass", check_masters, "moved by"),
    ("zero3", "own.copy_(self.shard.detach())", "pass", plain, "weights differ"),
    ("zero3", "            unit.free()\n        self.direction", "            pass\n        self.direction",
     stale, "differ"),
    ("zero3", "            unit.free()\n            unit.start_gather()", "            unit.start_gather()",
     stale, "differ"),
    ("zero3", "if self.direction == 1 and unit not in", "if unit not in", check_gathers, "all-gathers"),
    ("zero3", "self.units[-1 - self.prefetch :]", "self.units[-1:]", check_ledger, "all-gather: sent +"),
    ("zero3", "[: 1 + self.prefetch]", "[: 2 + self.prefetch]", check_ledger, "parameters: +"),
    ("zero3", "[i :: self.direction]", "[i:]", check_timeline, "another order"),
    ("zero3", "            unit.start_reduce_scatter()\n            unit.free()\n",
     "            unit.start_reduce_scatter()\n", check_ledger, "parameters: +"),
    ("zero3", "        self.finish_gather()\n        if self.flat", "        if self.flat", check_abandoned,
     "freed while"),
    ("zero3", "            param.data = self.nan.expand(param.shape)", "            pass", check_ledger,
     "parameters: +"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS)
GPU_MUTANTS = [
    (STAGES, "            self.reducing.wait()\n", "", check_gpu, "what a collective still"),
    (STAGES, "            self.gathering.wait()\n", "", check_gpu, "what a collective still"),
    (STAGES, SQUARES, f"{SQUARES.replace('.grad', '.grad.cpu()')}.to(device)", check_gpu, "the host waits"),
    (STAGES, "        dist.all_reduce(squares)", "        rank == 0 and dist.all_reduce(squares)",
     check_order, "ranks do not meet"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
