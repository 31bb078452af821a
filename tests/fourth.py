"""What hsdp.py, muon.py and expert_zero.py, in the fourth edition's form, promise of any module."""

import copy
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.harness import apart, error_of, load, on_ranks


def wrap(name, model, unit_class, **options):
    """(lesson, model wrapped by its class, whose parameters() somebody has asked for)."""
    lesson, wrapper = wrap_only(name, model, unit_class, **options)
    shards_of(wrapper)
    return lesson, wrapper


def shards_of(wrapper):
    """What optimizers are given."""
    if hasattr(wrapper, "matrix_units"):  # muon.py's
        return wrapper.shards
    return [*wrapper.parameters()]


def wrap_only(name, model, unit_class, **options):
    lesson, stem = load(name), Path(name).stem
    classes = {key.lower(): each for key, each in vars(lesson).items()}
    wrapper = classes["zeromuon" if stem == "muon" else stem]
    if stem == "hsdp":  # two copies of two ranks, else of one
        options = {"shard_size": 1 + (dist.get_world_size() == 4)} | options
    return lesson, wrapper(model, unit_class, **options)


class Part(nn.Module):
    """A unit of odd sizes, whose output has more than tensors."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(7))
        self.norm = nn.LayerNorm(7)
        self.inner = nn.Linear(7, 7)
        self.inner.weight.data = self.inner.weight.data.T  # not contiguous
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x):
        x = x + torch.tanh(self.inner(self.norm(x))) * self.frozen
        return {"x": x * self.gain, "note": "text"}


class Odd(nn.Module):
    """Units with a tied weight, one used twice, before a recurrent root."""

    def __init__(self, how=lambda part, x: part(x)):
        super().__init__()
        self.how = how
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.enter = nn.LSTM(5, 7, batch_first=True)
        self.parts[2].inner.weight = self.parts[0].inner.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        x, _ = self.enter(x)
        for i in (0, 1, 2, 1):
            x = self.how(self.parts[i], x)["x"]
        return x * self.scale


def optimizer_of(model):
    return torch.optim.SGD(shards_of(model), lr=0.1, weight_decay=0.1)


# (Which of two backwards are a step's last one, whether it clips, whether it updates.)
STEPS = [((0, 0), 0, 0), ((1, 1), 0, 0), ((0, 1), 1, 0), ((0, 0), 0, 0), ((0, 1), 1, 1), ((1, 1), 0, 1)]


def train(model, steps):
    """Train a wrapped or a plain model as STEPS say, with an evaluation after each backward."""
    optimizer = optimizer_of(model)
    clip = getattr(model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, [*model.parameters()]))
    for step in steps:
        for lasts, clips, updates in STEPS:
            for x, is_last in zip(step, lasts):
                model.is_last_backward = bool(is_last)
                (getattr(model, "module", model)(x).square().mean() / 2).backward()
                with torch.no_grad():
                    model(x)
            if clips:
                clip(0.3)
            if updates:
                optimizer.step()
            optimizer.zero_grad(set_to_none=not updates)


@on_ranks(3)
def check_odd(name, how=None, **options):
    """An Odd ends in the weights of the plain one, which trains on all ranks' batches."""
    torch.manual_seed(0)
    steps = torch.randn(2, 2, 12, 4, 5, dtype=torch.float64)
    model = (Odd(how) if how else Odd()).double()
    plain, model = copy.deepcopy(model), copy.deepcopy(model)
    train(plain, steps)
    for tensor in model.state_dict().values():
        tensor.add_(dist.get_rank())  # all ranks must start with rank 0's
    _, wrapped = wrap(name, model, Part, **options)
    train(wrapped, steps.chunk(dist.get_world_size(), dim=2)[dist.get_rank()])
    state = wrapped.full_state_dict() if hasattr(wrapped, "full_state_dict") else model.state_dict()
    if dist.get_rank() and hasattr(wrapped, "prefetch"):
        assert state == {}, "a rank other than 0 has weights"
    else:
        assert apart(state, plain.state_dict()) < 1e-12, "weights differ"


def recompute(part, x):
    with set_checkpoint_early_stop(False):  # so that hooks after forward run, too
        return checkpoint(part, x, use_reentrant=False)


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x) * self.gain


def check_adopted(name):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0, batch_first=True)
    check_losses(name, nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), type(layer), 5, 16)
    block = Residual(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1))
    block.gain = nn.Parameter(torch.ones(()))
    check_losses(name, nn.Sequential(nn.Conv2d(3, 3, 3), block, copy.deepcopy(block)), Residual, 3, 8, 8)


@on_ranks(2)
def check_losses(name, model, unit_class, *shape):
    """They are those in torch's own DDP, without clipping, and with eval() between steps."""
    losses = []
    peer = nn.parallel.DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False)
    for wrapped in peer, wrap(name, copy.deepcopy(model), unit_class)[1]:
        optimizer = optimizer_of(wrapped)
        torch.manual_seed(dist.get_rank())
        for training in (True, True, False, True):
            with torch.set_grad_enabled(training):
                loss = wrapped.train(training)(torch.randn(4, *shape)).square().mean()
            losses.append(loss.item())
            if training:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert apart(losses[:4], losses[4:]) < 1e-6, f"losses differ: {losses}"


@on_ranks(1)
def check_norm(name):
    """It is exact of 20 million elements, and half of it is half."""
    gradient = torch.rand(2 * 10**7)
    exact = sum(part.double().square().sum() for part in gradient.split(2**20)).sqrt()
    _, wrapped = wrap(name, nn.Linear(len(gradient), 1, bias=False), nn.Linear)
    wrapped(gradient).backward()  # the input is the gradient
    norm = wrapped.clip_grad_norm_(exact / 2)
    clipped = next(wrapped.parameters()).grad.double().square().sum().sqrt()
    assert abs(norm / exact - 1) < 1e-6, f"the norm is {norm / exact} of what it should be"
    assert abs(clipped / exact - 0.5) < 1e-6, f"what is clipped is not half, but {clipped / exact}"


def logged(name, log):
    """A root and three units, wrapped; what computes and what starts and ends on the network is logged."""
    model = nn.ModuleList([*(nn.Linear(4, 4) for _ in range(3)), nn.LayerNorm(4)])  # the root's own is last
    model.forward = nn.Sequential(model[3], *model[:3]).forward

    def begins(i, *_):  # "early": a hook that the module had before sees weights that are still on their way
        log.append(f"{'early' if zero.units[i].gather_work else 'forward'} {i}")

    for i in 1, 2, 3:
        model[i - 1].register_forward_pre_hook(partial(begins, i))
        model[i - 1].register_full_backward_pre_hook(lambda *_, i=i: log.append(f"backward {i}"))
    _, zero = wrap(name, model, nn.Linear)
    for (i, unit), (method, word) in product(enumerate(zero.units), METHODS.items()):
        if hasattr(unit, method):
            setattr(unit, method, noting(log, f"{word} {i}", unit, getattr(unit, method)))
    return zero


def noting(log, event, unit, method):
    """The method, which notes that it did something: a collective has started or ended, storage was freed."""

    def state():
        return unit.gather_work, unit.flat_param.untyped_storage().nbytes()

    def noted(*args):
        before = state()
        method(*args)
        if state() != before or event.startswith("reduce"):
            log.append(event)

    return noted


METHODS = {"start_all_gather": "gather", "unshard": "gather", "wait_for_unshard": "gathered"}
METHODS |= {"reshard": "free", "start_reduce_scatter": "reduce", "finish_reduce_scatter": "reduced"}
TIMELINE = """gather 0 gather 1 gathered 0 gather 2 gathered 1 forward 1 free 1 gather 3 gathered 2
    forward 2 gathered 3 forward 3 backward 3 reduce 3 backward 2 free 3 gather 1 reduced 3 reduce 2
    backward 1 free 2 gathered 1 reduced 2 reduce 1 reduced 1 reduce 0 reduced 0 free 0 free 1"""


@on_ranks(2)
def check_gathering(name):
    """While full_state_dict() works one unit at a time is unsharded; of the others there is a NaN each."""
    assert load(name).parse([]).prefetch == 1
    _, zero = wrap(name, nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))), nn.Linear)
    with load("tools/ledger").Watch() as watch:
        zero.full_state_dict()
    shards = sum(shard.nbytes for shard in zero.parameters())
    held = watch.held()["parameters"] - shards
    assert dist.get_rank() == 0 or held == 4 * (72 + 9), f"other units are here, too: {held}"
    weight = zero.module[0].weight
    assert weight.shape == (8, 8) and weight.isnan().all(), "a sharded weight looks like a real one"


class Chain(nn.Sequential):
    """Linear layers; backward fails before it reaches the first one if `fails`, which may be left out."""

    fails = skips = False

    def forward(self, x):
        x = self[0](x) if not self.skips else x
        if self.fails:
            x.register_hook(lambda _: 1 / 0)
        return self[1](x)


def chain(name, **options):
    return wrap(name, Chain(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear, **options)[1]


@on_ranks(1)
def check_failed(name):
    """A backward that failed, or left out a parameter, is not gone on with."""
    for how in "fails", "skips":
        model = chain(name)
        setattr(model.module, how, True)
        error_of(lambda model=model: model(torch.ones(2)).sum().backward())
        setattr(model.module, how, False)
        said = error_of(lambda model=model: model(torch.ones(2)).sum().backward())
        assert "a backward failed, or left a parameter" in said, f"goes on after {how}: {said}"


@on_ranks(2)
def check_late(name):
    """An evaluation after an update sees it; zero_grad() may come between forward and backward."""
    torch.manual_seed(0)
    _, model = wrap(name, nn.Sequential(nn.Linear(3, 2)).bfloat16(), nn.Linear)
    x = torch.ones(3, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(shards_of(model), lr=0.1, fused=True)
    grads = []
    for set_to_none in False, False, True:
        loss = model(x).sum()
        optimizer.zero_grad(set_to_none)
        loss.backward()
        grads.append([shard.grad.clone() for shard in shards_of(model)])
        if not set_to_none:
            optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(*pair) for pair in zip(*grads[:2])), "a gradient set to zero is there again"
    assert all(torch.equal(*pair) for pair in zip(*grads[1:])), (
        "zero_grad() before backward changes gradients"
    )
    optimizer.step()
    with torch.no_grad():
        evaluated = model(x)
    assert torch.equal(evaluated, model(x)), "evaluated before the step"


class Returns(nn.Linear):
    """A unit whose output needs its weights no more, or is detached."""

    def forward(self, x):
        return {"detached": super().forward(x).detach()} if self.bias is None else super().forward(x)


class Gate(nn.Module):
    """Backward needs its weight for the gradient of its input after the weight's own gradient is there."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5))

    def forward(self, x):
        return torch.tanh(x * self.weight.detach()) * self.weight


@on_ranks(2)
def check_freed_in_time(name):
    """A unit's weights are there as long as backward needs them, and a unit that returns none is refused."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Gate() for _ in range(4)))
    model = copy.deepcopy(plain)
    _, zero = wrap(name, model, Gate, **({"shard_size": 2} if "hsdp" in name else {}))
    for each in plain, zero:
        each(torch.ones(3, 5)).square().sum().backward()
    expected = [param.grad for param in plain.parameters()]
    own = [unit.shard.grad for unit in zero.units]
    for grad, shard in zip(expected, own):
        grad = nn.functional.pad(grad, (0, 1)).chunk(2)[dist.get_rank()]
        assert apart(grad.tolist(), shard.tolist()) < 1e-6, "freed too early: other gradients"
    _, zero = wrap(name, nn.Sequential(nn.Linear(2, 2), Returns(2, 2, bias=False)), Returns)
    said = error_of(lambda: zero(torch.ones(2)))
    assert "a unit must return a tensor that requires" in said, f"not refused: {said}"
