"""What is special to expert_zero.py: two layouts on the same ranks, their bytes, divisor, norm and order."""

import copy
import itertools
from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from tests.checks import check_ledger, check_parity
from tests.gpu import in_order, together
from tests.harness import (
    TINY,
    Lesson,
    apart,
    error_of,
    holds,
    load,
    mutants,
    on_ranks,
    train,
    train_here,
    world,
)

RUN = "torchrun LESSON --dtype fp64"
PLAIN = "expert_zero --dtype fp64 --ep 1"
FILM = "--layers 2"
LESSON = Lesson(
    flags="--experts 12",
    own={
        "--experts": ("4 8", "0 -1 x"),
        "--top-k": ("1 2", "0 -1 99"),
        "--ep": ("1 2", "0 -1 5"),
        "--balance": ("0 0.1", "nan -1 x"),
        "--bias-rate": ("0 0.005", "nan -1 x"),
    },
    bad=("--ep 3", "--top-k 9"),
    slack=lambda root, block, size, flags: ((2 * root + 2 * block) / size, 0),  # all that is sent at the end
    races=("--ep 1",) if torch.__version__ >= "2.13" else (),  # 2.11's FSDP2 takes no ModuleDict
    uncounted=("all-to-all",),
    gpu=("--ep 1", "--ep 4 --top-k 1 --bias-rate 0.005"),
    waits={"": {("copy", "all_gather_counts()"): "k"}},
    orders=[
        *((size, "--experts 24") for size in (2, 3, 8)),
        (4, "--experts 24 --ep 1"),
        (4, "--experts 24 --ep 4 --top-k 1 --bias-rate 0.005"),
    ],
)


MESHES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)]
FLAGS = "--experts 8 --batch 48"


@pytest.mark.long_table
@pytest.mark.parametrize("size, ep", MESHES)
def test_every_mesh_trains_as_one_rank(size, ep):
    every = "", "--accum 3 --balance 0 --bias-rate 0.005", "--accum 3 --balance 0.3 --top-k 1"
    for flags in every if size < 8 else every[ep % 3 :][:1]:  # 8 ranks take long
        check_parity("expert_zero", size, f"{FLAGS} {flags}", f"--ep {ep}")


@pytest.mark.long_table
@pytest.mark.parametrize("size, ep", [(4, 2), (8, 4), (4, 4)])
def test_bytes_on_every_mesh_are_the_formulas(size, ep):
    job = f"{TINY} {FLAGS} --steps 2"
    check_ledger("expert_zero", size, f"--accum 3 --ep {ep}", job)
    check_ledger("expert_zero", size, f"--accum 2 --dtype bf16 --ep {ep}", job)
    check_ledger("expert_zero", size, f"--layers 1 --ep {ep}", job)


class Gate(nn.Module):
    """Backward needs its weight for the gradient of its input after the weight's own gradient is there."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5))

    def forward(self, x):
        return torch.tanh(x * self.weight.detach()) * self.weight


def test_a_bias_is_not_rounded_to_bf16():
    flags = f"{TINY} {FLAGS} --balance 0 --bias-rate 0.005"
    _, weights = train("expert_zero", 4, f"{flags} --dtype bf16")
    bias = weights["blocks.0.moe.bias"]
    assert bias.any() and apart(bias / 0.005, (bias / 0.005).round()) < 1e-12


@on_ranks(4)
def check_layouts(name):
    """Who has which shard, of how many; in each collective the ranks that have a part of what it moves."""
    lesson, numel = load(name), Counter()
    all_gather, all_to_all = lesson.all_gather, dist.all_to_all_single

    def noted(kind, call, out, given, *splits, group=None, **options):
        ranks = tuple(dist.get_process_group_ranks(group))
        numel[kind if not splits else "tokens", ranks] += max(out.numel(), given.numel())
        return call(out, given, *splits, group=group, **options)

    zeros, init = [], lesson.ExpertZeRO.__init__
    lesson.ExpertZeRO.__init__ = lambda zero, *args: (zeros.append(zero), init(zero, *args))[1]
    lesson.all_gather = partial(noted, "gather", all_gather)
    with mock.patch.object(dist, "all_to_all_single", partial(noted, "reduce", all_to_all)):
        lesson.train(lesson.parse(f"{TINY} --steps 1 --experts 8 --ep 2".split()))
    rank, world = dist.get_rank(), (0, 1, 2, 3)
    same, ours = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
    units = zeros[0].units
    experts = [unit for unit in units if unit.group]
    assert len(units) == 6 and [units.index(unit) for unit in experts] == [2, 5], "other units"
    dense = sum(len(unit.flat_param) for unit in units if not unit.group)
    ffn = sum(len(unit.flat_param) for unit in experts)
    root = len(units[0].flat_param)
    own = {tuple(dist.get_process_group_ranks(unit.group)) for unit in experts}
    assert own == {same}, f"experts are sharded over {own}"
    assert all(len(unit.shard) * (2 if unit.group else 4) == len(unit.flat_param) for unit in units)
    tokens = numel.pop(("tokens", ours), 0)
    expected = {("gather", world): 2 * dense - root, ("gather", same): 2 * ffn}
    expected |= {("reduce", world): dense, ("reduce", same): ffn}
    assert dict(numel) == expected and tokens, f"other groups or bytes: {dict(numel)}, not {expected}"


FORWARD = """gather 0 gather 1 gather 2 gather 3 tokens tokens free 2 free 1 gather 4 gather 5 free 3 tokens
    tokens free 5 free 4"""
BACKWARD = """gather 4 gather 5 gather 3 tokens tokens free 4 reduce 4 free 5 reduce 5 gather 1 gather 2
    reduced 5 reduced 4 free 3 reduce 3 tokens tokens reduced 3 free 0 reduce 0 free 1 reduce 1 free 2
    reduce 2 reduced 2 reduced 1 reduced 0"""


@on_ranks(2)
def check_timeline(name, ep=1):
    """What starts and ends on the network, in order, in a second step. Of six units 2 and 5 are experts'."""
    lesson, log = load(name), []
    all_to_all = dist.all_to_all_single
    seconds = itertools.count()

    def noting(event, unit, number, method):
        def noted(*args):
            full = unit.flat_param.untyped_storage().nbytes() > 0
            method(*args)
            if event.startswith("reduce") or full != (unit.flat_param.untyped_storage().nbytes() > 0):
                log.append(f"{event} {number}")

        return noted

    def init(zero, *args, init=lesson.ExpertZeRO.__init__):
        init(zero, *args)
        for number, unit in enumerate(zero.units):
            for method, event in METHODS.items():
                setattr(unit, method, noting(event, unit, number, getattr(unit, method)))

    def note(out, given, *splits, **options):
        if splits:
            log.append("tokens")
        return all_to_all(out, given, *splits, **options)

    def print_step(*args):
        if next(seconds) == 0:
            log.clear()

    lesson.ExpertZeRO.__init__, lesson.print_step = init, print_step
    with mock.patch.object(dist, "all_to_all_single", note):
        lesson.train(lesson.parse(f"{TINY} --steps 2 --experts 8 --ep {ep}".split()))
    assert " ".join(log).split() == f"{FORWARD} {BACKWARD}".split(), f"another order: {' '.join(log)}"


METHODS = {"unshard": "gather", "reshard": "free"}
METHODS |= {"start_reduce_scatter": "reduce", "finish_reduce_scatter": "reduced"}


class Part(nn.Module):
    """A unit of odd sizes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.inner = nn.Linear(7, 7)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + torch.tanh(self.inner(self.norm(x))) * self.gain


class Net(nn.Module):
    """Units, one of them used twice, within a root whose head is its entry."""

    def __init__(self, how=lambda part, x: part(x)):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.enter = nn.Linear(7, 7, bias=False)
        self.leave = nn.Linear(7, 7)
        self.leave.weight = self.enter.weight
        self.how = how

    def forward(self, x):
        x = self.enter(x)
        for i in (0, 1, 2, 1):
            x = self.how(self.parts[i], x)
        return self.leave(x)


def recompute(part, x):
    return checkpoint(part, x, use_reentrant=False)


def shard(name, module, unit_class=Part):
    lesson = load(name)
    return lesson.ExpertZeRO(module, unit_class, dist.new_subgroups(1)[0], None)


@on_ranks(3)
def check_module(name, how=Net.__init__.__defaults__[0]):
    """Any module trains as on one rank: accumulation, evaluation in between, zero_grad() of both kinds."""
    torch.manual_seed(0)
    data = torch.randn(3, 2, 6, 7, dtype=torch.float64)
    plain = Net(how).double()
    module = copy.deepcopy(plain)
    zero = shard(name, module)
    for model, rows in ((plain, slice(None)), (module, slice(dist.get_rank(), None, 3))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        for step in range(3):
            for x in data[step]:
                (model(x[rows]).square().mean() / 2).backward()
                with torch.no_grad():
                    model(x[rows])
            if model is plain:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            else:
                zero.clip_grad_norm_(0.3)
            optimizer.step()
            model.zero_grad(set_to_none=step > 0)
    state = zero.full_state_dict()
    assert dist.get_rank() == 0 or state == {}, "a rank other than 0 has weights"
    if dist.get_rank() == 0:
        assert apart(state, plain.state_dict()) < 1e-12, "weights differ"


@on_ranks(1)
def check_freed_in_time(name):
    """A unit's weights are there as long as backward needs them."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), *(Gate() for _ in range(4)))
    module = copy.deepcopy(plain)
    zero = shard(name, module, Gate)
    zero.parameters()
    for each in (plain, module):
        each(torch.ones(3, 5)).square().sum().backward()
    expected = torch.cat([param.grad.flatten() for param in plain.parameters()])
    own = torch.cat([unit.shard.grad for unit in zero.units])
    assert apart(expected, own) < 1e-6, "freed too early: other gradients"


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


def check_idle(name, size=4, flags=f"{TINY} --experts 16 --ep 2 --top-k 1 --batch 4 --steps 1"):
    """A step ends although some experts have no tokens on one of their ranks."""
    said = error_of(partial(world(size).run, train_here, name, flags, False))
    assert said == "nothing", f"does not end: {said}"


@on_ranks(2)
def check_recompute(name):
    """Activation checkpointing gathers nothing twice."""
    numbers = []
    for how in (Net.__init__.__defaults__[0], recompute):
        lesson, model = load(name), Net(how)
        lesson.ExpertZeRO(model, Part, None, None).parameters()
        with mock.patch.object(lesson, "all_gather", mock.Mock(wraps=lesson.all_gather)) as all_gather:
            model(torch.ones(2, 7)).sum().backward()
            numbers.append(all_gather.call_count)
    assert numbers[0] == numbers[1], f"{numbers} all-gathers without and with recomputation"


parity = partial(check_parity, size=4, flags=f"{FLAGS} --accum 3", own_flags="--ep 2")
sharp = partial(check_parity, size=4, flags=f"{FLAGS} --accum 3 --steps 1", own_flags="--ep 2")
whole = partial(check_parity, size=2, flags=f"{FLAGS} --accum 3 --steps 1", own_flags="--ep 2")
BIASED = "--experts 8 --accum 6 --batch 12 --balance 0 --bias-rate 0.005"
biased = partial(check_parity, flags=BIASED, own_flags="--ep 2")
order = partial(together, in_order, rows=[(4, "--experts 24 --ep 2")])
CHECKS = [check_layouts, check_timeline, partial(check_timeline, ep=2), check_module]
CHECKS += [partial(check_module, how=recompute), check_freed_in_time, check_idle, check_recompute, order]
test_each_promise_is_kept = holds("expert_zero", *CHECKS)
DIVISOR = "alpha=1 / dist.get_world_size()"
ONE_RANK = "alpha=1 / (dist.get_world_size() if self.n_shards > 1 else 1)"
SHARDS = "for unit in self.units]\n        squares"
AHEAD = "ahead = 1 if unit.group else 2"
MUTANTS = [
    (DIVISOR, "alpha=dist.get_world_size(self.group) / dist.get_world_size() ** 2", sharp, "norms differ"),
    (DIVISOR, "alpha=1 / self.n_shards", sharp, "norms differ"),
    (DIVISOR, ONE_RANK, whole, "norms differ"),
    ("dist.all_reduce(squares)", "dist.all_reduce(squares, group=self.ep_group)", sharp, "norms differ"),
    (SHARDS, "for unit in self.units if not unit.group]\n        squares", sharp, "norms differ"),
    (AHEAD, "ahead = 2 * (dist.get_rank() != 1)", order, "ranks do not meet"),
    (AHEAD, "ahead = 1", check_timeline, "another order"),
    (AHEAD, "ahead = 2", check_timeline, "another order"),
    ("self.flat_grad, group=self.group,", "self.flat_grad,", check_layouts, "other groups or bytes"),
    ("group = expert_dp_group if", "group = ep_group if", check_layouts, "experts are sharded over"),
    ("iter([unit.shard for unit in self.units])", "(unit.shard for unit in self.units if not unit.group)",
     parity, "losses differ"),
    ("output = expert(", "output = (expert if arriving[:, i].any() else nn.Identity())(",
     check_idle, "has no gradient"),
    ("self.backward_order.insert(0, unit)", "self.backward_order.insert(unit.group is None, unit)",
     check_timeline, "another order"),
    ("                each.reshard()\n", "                pass\n", check_module, "weights differ"),
    ("while ready and self.reducing:", "while self.reducing:", check_timeline, "another order"),
    ("for theirs in everyone if", "for theirs in everyone[:1] if", parity, "other names"),
    ("        if not unit.in_backward:", "        if True:", check_recompute, "all-gathers"),
    ("torch.zeros_like(self.flat_param)", "torch.ones_like(self.flat_param)",
     check_module, "weights differ"),
    ("loads += torch.stack", "loads = torch.stack", biased, "differ"),
    ("torch.zeros(experts, dtype=torch.float64)", "torch.zeros(experts, dtype=torch.bfloat16)",
     biased, "differ"),
    (" if dist.get_rank() == 0 else []", "", check_module, "a rank other than 0 has weights"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "expert_zero")
