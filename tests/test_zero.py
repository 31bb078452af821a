"""What is special to zero1.py, zero2.py and zero3.py."""

import copy
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from test_all import check_masters, check_parity
from tests.harness import apart, holds, load, mutants, on_ranks

STAGES = ("zero1", "zero2", "zero3")


def wrap(name, model, unit_class, **options):
    """(lesson, model wrapped by its class)."""
    lesson = load(name)
    wrapper = next(getattr(lesson, each) for each in ("ZeRO1", "ZeRO2", "ZeRO3") if hasattr(lesson, each))
    return lesson, wrapper(model, unit_class, **options)


# ---- any module ----


class Part(nn.Module):
    """A unit of odd sizes, whose output has more than tensors."""

    sometimes = False

    def __init__(self, width=7):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)

    def forward(self, x):
        x = x + torch.tanh(self.inner(self.norm(x))) * self.frozen
        return {"x": x * self.gain if self.sometimes else x, "note": "text"}


class Odd(nn.Module):
    """Units with a tied weight, one of them used twice; a recurrent root; weights used sometimes or never."""

    forwards = 0

    def __init__(self, how=lambda part, x: part(x)):
        super().__init__()
        self.how = how
        self.enter = nn.LSTM(5, 7, batch_first=True)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.parts[2].inner.weight = self.parts[0].inner.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        self.forwards += torch.is_grad_enabled()
        self.parts[0].sometimes = self.forwards == 2
        x, _ = self.enter(x)
        for i in (0, 1, 2, 1):
            x = self.how(self.parts[i], x)["x"]
        return x * self.scale


def batches(rank=None, size=1):
    """Two steps of two microbatches: the whole of each, or a rank's share."""
    x = torch.randn(2, 2, 6, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x if rank is None else x.chunk(size, dim=2)[rank]


def train_plain(model):
    """The weights after two steps of all of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in batches():
        for x in step:
            (model(x).square().mean() / 2).backward()
        for param in model.parameters():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)  # what has no gradient counts as zero
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.state_dict()


@on_ranks(3)
def check_odd(name, how=None, late=False):
    """full_state_dict() of a sharded Odd after train_plain()'s steps is what that ends in."""
    torch.manual_seed(0)
    model = (Odd(how) if how else Odd()).double()
    expected = train_plain(copy.deepcopy(model))
    for tensor in model.state_dict().values():
        tensor.add_(dist.get_rank())  # all ranks must start with rank 0's
    lesson, zero = wrap(name, model, Part)
    if late:
        make_late(lesson)
    optimizer = torch.optim.SGD(zero.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in batches(dist.get_rank(), dist.get_world_size()):
        for i, x in enumerate(step):
            zero.syncing = i == 1
            (zero(x).square().mean() / 2).backward()
            with torch.no_grad():
                zero(x)
        zero.clip_grad_norm_(0.3)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    state = zero.full_state_dict()
    if dist.get_rank() and hasattr(lesson, "ShardedWeight"):
        assert state == {}, "a rank other than 0 has weights"
    else:
        assert apart(state, expected) < 1e-12, "weights differ"


class Late:
    """The work of a collective whose result is there when it has been waited for, and not before."""

    def __init__(self, work, output, result):
        self.work, self.output, self.result = work, output, result

    def wait(self):
        self.work.wait()
        self.output.copy_(self.result)


def make_late(lesson):
    """Let the lesson's collectives bring their results at the last moment."""

    def late(collective):
        def call(output, given, group=None, async_op=False):
            result = torch.empty_like(output)
            work = collective(result, given.clone(), group=group, async_op=True)
            output.fill_(torch.nan)
            late_work = Late(work, output, result)
            return late_work if async_op else late_work.wait()

        return call

    lesson.all_gather = late(lesson.all_gather)
    lesson.dist = mock.Mock(wraps=dist)
    lesson.dist.all_to_all_single = late(dist.all_to_all_single)


def recompute(part, x):
    with set_checkpoint_early_stop(False):  # so that hooks after forward run, too
        return checkpoint(part, x, use_reentrant=False)


def check_recompute(name):
    check_odd(name, recompute, size=2)


@on_ranks(2)
def check_against_torch(name):
    """Weights are those of torch's own after three steps."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    for param in model.parameters():
        dist.broadcast(param.detach(), 0)
    peer = copy.deepcopy(model)
    lesson, zero = wrap(name, model, nn.Linear)
    optimizer = torch.optim.AdamW(zero.parameters(), lr=0.1)
    if hasattr(lesson, "ShardedWeight"):
        for layer in peer:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        wrapped = fully_shard(peer)
        peer_optimizer = torch.optim.AdamW(peer.parameters(), lr=0.1)
    else:
        wrapped = nn.parallel.DistributedDataParallel(peer)
        peer_optimizer = ZeroRedundancyOptimizer(peer.parameters(), torch.optim.AdamW, lr=0.1)
    for x in torch.randn(3, 4, 5, dtype=torch.float64):
        zero(x).square().mean().backward()
        zero.clip_grad_norm_(0.1)
        optimizer.step()
        wrapped(x).square().mean().backward()
        nn.utils.clip_grad_norm_(peer.parameters(), 0.1)
        peer_optimizer.step()
        peer_optimizer.zero_grad()
    expected = {key: getattr(x, "full_tensor", lambda x=x: x)() for key, x in peer.state_dict().items()}
    state = zero.full_state_dict()
    assert not state or apart(state, expected) < 1e-6  # torch adds 1e-6 to the norm, too, but by tensor


# ---- what is refused, and exact ----


@on_ranks(1)
def check_misuse(name):
    said = []
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    _, zero = wrap(name, model, nn.Linear)
    x = torch.ones(2, 4)
    for wrong in (
        lambda: torch.optim.SGD(model.parameters(), lr=1),
        lambda: nn.functional.linear(x, model[0].weight),
        lambda: [zero(x).sum().backward() for _ in range(2)],
        lambda: [zero.clip_grad_norm_(1.0) for _ in range(2)],
    ):
        try:
            said.append(f"nothing: {wrong()}")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    wrong_optimizer, freed_weight, two_backwards, two_clips = said
    assert wrong_optimizer == "ValueError: optimizer got an empty parameter list"
    if Path(name).stem == "zero1":
        assert two_backwards.endswith("syncing must be False in all backwards of a step but the last")
    else:
        assert two_clips == "AssertionError: a unit got no gradient in this step"
    if Path(name).stem == "zero3":
        assert "must be Tensor, not ShardedWeight" in freed_weight


class Wide(nn.Module):
    """A parameter whose gradient is the input."""

    def __init__(self, numel):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x):
        return (self.weight * x).sum()


@on_ranks(1)
def check_norm(name):
    numel = 2 * 10**7
    gradient = torch.rand(numel)
    exact = sum(part.double().square().sum() for part in gradient.split(2**20)).sqrt()
    _, zero = wrap(name, Wide(numel), nn.Linear)
    zero(gradient).backward()
    norm = zero.clip_grad_norm_(exact / 2)
    clipped = zero.units[0].shard.grad.double().square().sum().sqrt()
    assert abs(norm / exact - 1) < 1e-6 and abs(clipped / exact - 0.5) < 1e-6, f"norms off: {norm}, {clipped}"


odd = [partial(check_odd, size=size) for size in (1, 2, 3)]
test_any_module_trains_from_rank_0s_weights_with_torchs_optimizers_and_schedulers = holds(STAGES, *odd)
test_activation_checkpointing_around_a_unit_works = holds(STAGES, check_recompute)
test_the_norm_of_20_million_elements_is_exact = holds(STAGES, check_norm)
test_zero_ends_in_the_weights_of_torchs_own = holds(STAGES, check_against_torch)
test_wrong_use_is_said_in_one_line = holds(STAGES, check_misuse)
# ---- mutants ----

MUTANTS = [
    ("zero1", "dist.broadcast(tensor, group_src=0, group=group)", "pass", check_odd, "weights differ"),
    ("zero1", "if param.requires_grad:", "if True:", check_odd, "weights differ"),
    ("zero1", "syncing = i == config.accum", "syncing = True", check_parity, "syncing must be False"),
    ("zero1", "self.flat_grad.zero_()", "pass", check_parity, "losses differ"),
    ("zero1", "flat.dtype, torch.float32", "flat.dtype, flat.dtype", check_masters, "bf16 weights moved by"),
    ("zero2", "dist.all_reduce(squares, group=self.group)", "pass", check_parity, "losses differ"),
    ("zero2", "squares.sqrt() / self.world_size", "squares.sqrt()", check_parity, "losses differ"),
    ("zero2", "self.grad_shard + shard", "shard", check_parity, "losses differ"),
    ("zero2", "self.flat_grad.zero_()", "pass", check_odd, "weights differ"),
    ("zero2", "flat.dtype, torch.float32", "flat.dtype, flat.dtype", check_masters, "bf16 weights moved by"),
    ("zero3", "self.own.copy_(self.shard)", "pass", check_parity, "losses differ"),
    ("zero3", "dist.broadcast(self.flat_param, group_src=0, group=group)", "pass", check_odd, "differ"),
    ("zero3", "= ShardedWeight()", "= None", check_misuse, "must be Tensor, not ShardedWeight"),
    ("zero3", "flat.dtype, torch.float32", "flat.dtype, flat.dtype", check_masters, "bf16 weights moved by"),
    ("zero3", "grad.square().sum().double()", "grad.norm().double().square()", check_norm, "norms off"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS)
