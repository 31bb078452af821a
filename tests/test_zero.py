"""What ddp.py, zero1.py, zero2.py and zero3.py promise of any module: sharding, overlap, memory."""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from test_all import check_freed, check_ledger, check_masters, check_parity
from tests.harness import apart, error_of, holds, load, mutants, on_ranks

STAGES = ("zero1", "zero2", "zero3")


def wrap(name, model, unit_class, **options):
    """(lesson, model wrapped by its class)."""
    lesson, stem = load(name), Path(name).stem
    if stem == "single":
        model.clip_grad_norm_ = lambda max_norm: lesson.clip_grad_norm_(model.parameters(), max_norm)
        return lesson, model
    wrapper = next(each for key, each in vars(lesson).items() if key.lower() == stem)
    if stem == "hsdp":  # two copies of two ranks, else of one
        options = {"shard": 1 + (dist.get_world_size() == 4)} | options
    return lesson, wrapper(model, *([] if stem == "ddp" else [unit_class]), **options)


class Part(nn.Module):
    """A unit of odd sizes, whose output has more than tensors."""

    sometimes = False

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(7))
        self.norm = nn.LayerNorm(7)
        self.inner = nn.Linear(7, 7)
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x):
        x = x + torch.tanh(self.inner(self.norm(x))) * self.frozen
        return {"x": x * self.gain if self.sometimes else x, "note": "text"}


class Odd(nn.Module):
    """Units with a tied weight, one used twice, before a recurrent root; weights used sometimes or never."""

    forwards = 0

    def __init__(self, how=lambda part, x: part(x)):
        super().__init__()
        self.how = how
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.enter = nn.LSTM(5, 7, batch_first=True)
        self.parts[2].inner.weight = self.parts[0].inner.weight
        self.unused = Part()
        self.unused.inner = None
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        self.forwards += torch.is_grad_enabled()
        self.parts[0].sometimes = self.forwards == 6
        x, _ = self.enter(x)
        for i in (0, 1, 2, 1):
            x = self.how(self.parts[i], x)["x"]
        return x * self.scale


def marked(model):
    """A copy, in which matrices are of another kind than vectors."""
    model = copy.deepcopy(model)
    for param in model.parameters():
        param.kind = param.dim() > 1
    return model


def optimizer_of(model):
    """SGD of a wrapped or a plain model, in which only matrices decay."""
    groups = [{"params": [], "weight_decay": 0}, {"params": [], "weight_decay": 0.1}]
    for param in model.parameters():
        groups[bool(param.kind)]["params"].append(param)
    return torch.optim.SGD(groups, lr=0.1)


def train(model, steps):
    """Train a wrapped or a plain model; skip a step in three ways before each two; clip in the first."""
    optimizer = optimizer_of(model)
    clip = getattr(model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, [*model.parameters()]))
    for i, step in enumerate(steps):
        for syncing, clips, done in (0, 0, 0), (1, 0, 0), (1, 1, 0), (i, 1 - i, 1), (1, 0, 1):
            for x, is_last in zip(step, (False, True)):
                model.syncing = syncing or (is_last and not hasattr(model, "no_sync"))
                (getattr(model, "module", model)(x).square().mean() / 2).backward()
                with torch.no_grad():
                    model(x)
            if clips:
                clip(0.3)
            if done:
                optimizer.step()
            optimizer.zero_grad(set_to_none=not done)


@on_ranks(3)
def check_odd(name, how=None, **options):
    """An Odd ends in the weights of the plain one, which trains on all ranks' batches."""
    torch.manual_seed(0)
    steps = torch.randn(2, 2, 12, 4, 5, dtype=torch.float64)
    model = (Odd(how) if how else Odd()).double()
    plain, model = marked(model), marked(model)
    train(plain, steps)
    for tensor in model.state_dict().values():
        tensor.add_(dist.get_rank())  # all ranks must start with rank 0's
    lesson, wrapped = wrap(name, model, Part, **options)
    train(wrapped, steps.chunk(dist.get_world_size(), dim=2)[dist.get_rank()])
    state = getattr(wrapped, "full_state_dict", model.state_dict)()
    if dist.get_rank() and hasattr(lesson, "ShardedWeight"):
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
    block.gain = nn.Parameter(torch.ones((), dtype=torch.float64))  # one of another dtype
    check_losses(name, nn.Sequential(nn.Conv2d(3, 3, 3), block, copy.deepcopy(block)), Residual, 3, 8, 8)


@on_ranks(2)
def check_losses(name, model, unit_class, *shape):
    """They are those in torch's own DDP, without clipping, and with eval() between steps."""
    losses = []
    peer = nn.parallel.DistributedDataParallel(marked(model), broadcast_buffers=False)
    for wrapped in peer, wrap(name, marked(model), unit_class)[1]:
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
    _, wrapped = wrap(name, nn.Linear(len(gradient), 1, bias=False), nn.Bilinear)
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
        log.append(f"{'early' if zero.units[i].all_gather_work else 'forward'} {i}")

    for i in 1, 2, 3:
        model[i - 1].register_forward_pre_hook(partial(begins, i))
        model[i - 1].register_full_backward_pre_hook(lambda *_, i=i: log.append(f"backward {i}"))
    _, zero = wrap(name, model, nn.Linear)
    assert not [*model.parameters()], "an optimizer could take them by mistake"
    for (i, unit), (method, word) in product(enumerate(zero.units), METHODS.items()):
        if hasattr(unit, method):
            setattr(unit, method, noting(log, f"{word} {i}", unit, getattr(unit, method)))
    return zero


@on_ranks(2)
def check_timeline(name):
    """What does so in a second step, in order."""
    log = []
    zero = logged(name, log)
    full = [unit for unit in zero.units if unit.flat_grad.untyped_storage().nbytes()]
    assert not full or "zero1" in name, "gradients are held before there are any"
    optimizer = torch.optim.SGD(zero.parameters(), lr=0.1)
    for context in getattr(zero, "no_sync", nullcontext), nullcontext:
        log.clear()
        with context():
            zero(torch.randn(2, 4)).sum().backward()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
    expected = TIMELINES[Path(name).stem.replace("zero1", "zero2")]
    assert " ".join(log) == " ".join(expected.split()), f"another order: {', '.join(log)}"


def noting(log, event, unit, method):
    """The method, which notes that it did something: a collective has started or ended, storage was freed."""

    def state():
        return (unit.all_gather_work, unit.reduce_work, unit.flat_param.untyped_storage().nbytes())

    def noted(*args):
        before = state()
        method(*args)
        if state() != before:
            log.append(event)

    return noted


METHODS = {"unshard": "gather", "wait_for_unshard": "gathered", "reshard": "free"}
METHODS |= {"start_reduce": "reduce", "finish_reduce": "reduced"}
TIMELINES = {  # the root is 0; the docstrings draw the same
    "zero2": """gather 0 gather 1 gather 2 gather 3 forward 1 forward 2 forward 3 backward 3 reduce 3
        backward 2 reduced 3 reduce 2 backward 1 reduced 2 reduce 1 reduced 1 reduce 0 reduced 0""",
    "zero3": """gather 0 gather 1 gathered 0 gather 2 gathered 1 forward 1 free 1 gather 3 gathered 2
        forward 2 gathered 3 forward 3 backward 3 free 3 reduce 3 backward 2 gather 1 free 2 reduced 3
        reduce 2 backward 1 gathered 1 free 1 reduced 2 reduce 1 free 0 reduced 1 reduce 0 reduced 0""",
}


@on_ranks(2)
def check_gathering(name):
    """Beside rank 0 one unit is whole at a time while full_state_dict() works; one is fetched ahead."""
    assert load(name).parse([]).prefetch == 1
    _, zero = wrap(name, nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))), nn.Linear)
    with load("tools/ledger").Watch() as watch:
        zero.full_state_dict()
    shards = sum(shard.nbytes for shard in zero.parameters())
    assert dist.get_rank() == 0 or watch.held()["parameters"] - shards == 4 * 72
    said = error_of(lambda: nn.functional.linear(torch.ones(8), zero.module[0].weight))
    assert "must be Tensor, not ShardedWeight" in said, f"not named: {said}"


@on_ranks(1)
def check_failed(name):
    """Gradients that a failed backward has left are not taken for another's."""
    _, model = wrap(name, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential)
    x = torch.ones(2, requires_grad=True)
    fails = x.register_hook(lambda _: 1 / 0)
    error_of(model(x).sum().backward)
    fails.remove()
    said = error_of(model(x).sum().backward)
    assert "a gradient came twice" in said, f"an old gradient was taken: {said}"


@on_ranks(2)
def check_late(name):
    """zero_grad() may also set .grad to zero, or follow an evaluation; between forward and backward not."""
    torch.manual_seed(0)
    _, model = wrap(name, nn.Sequential(nn.Linear(3, 2)).bfloat16(), nn.Linear)
    x = torch.ones(3, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    grads = []
    for _ in range(2):
        model(x).sum().backward()
        grads.append([param.grad.clone() for param in model.parameters()])
        optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(*pair) for pair in zip(*grads)), "a gradient set to zero is there again"
    model(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        evaluated = model(x)
    loss = model(x).sum()
    optimizer.zero_grad()
    said = error_of(loss.backward)
    assert torch.equal(evaluated, model(x)), "evaluated before the step"
    assert ("zero_grad() between" in said) == (Path(name).stem in ("zero1", "zero2")), f"old weights: {said}"


odd = [partial(check_odd, **options) for options in ({"size": 1}, {}, {"size": 2, "how": recompute})]
test_each_promise_is_kept = holds(("ddp", *STAGES), *odd, check_norm, check_adopted, check_failed, check_late)
test_any_module_trains_in_buckets = holds("ddp", *(partial(check_odd, bucket_cap_mb=x) for x in (0, 0.001)))
test_collectives_travel_while_other_units_compute = holds(STAGES, check_timeline)
test_zero3_has_one_unit_whole_or_two = holds("zero3", check_gathering)
MUTANTS = [
    ("ddp zero1 zero2 zero3", "weight not in unit.pending", "False", check_failed, "an old gradient"),
    ("zero1 zero2", " and not self.fresh", " and False", check_late, "old weights"),
    ("zero1 zero2", "stepped or not torch.is_grad_enabled()", "stepped", check_late, "before the step"),
    ("zero1", "elif not self.unreduced", "elif False", check_late, "there again"),
    ("ddp zero1", "dist.broadcast(tensor, group_src=0, group=group)", "pass", check_odd, "weights differ"),
    ("zero1 zero2 zero3", "1 / self.world_size", "1", check_parity, "norms differ"),
    ("ddp", "div_(self.world_size)", "div_(1)", check_parity, "norms differ"),
    ("ddp", "div_(self.world_size)", "div_(self.world_size**2)", check_parity, "differ"),
    ("zero1 zero2 zero3", "flat.dtype, torch.float32", "flat.dtype, flat.dtype", check_masters, "moved by"),
    ("ddp", "view.copy_(weight.grad)", "view.add_(weight.grad)", check_parity, "losses differ"),
    ("ddp", "view.zero_()", "pass", check_odd, "weights differ"),
    ("ddp zero1", "self._end_backward()  #", "pass  #", check_odd, "weights differ"),
    ("zero1 zero2", "self.version != self.shard._version", "False", check_odd, "weights differ"),
    ("zero1 zero2", "if self.fresh:", "if self.version != self.shard._version:", check_parity, "losses diff"),
    ("zero1 zero2 zero3", 'getattr(param, "kind", None)', "None", check_odd, "weights differ"),
    ("zero1 zero2 zero3", "unit[0][0] is not module", "True", check_timeline, "another order"),
    ("ddp zero1", "if not self.syncing:", "if False:", check_ledger, "sent +"),
    ("ddp zero1 zero2 zero3", "_norm(grads, dtype=torch.float64)", "_norm(grads)", check_norm, "the norm is"),
    ("ddp pipeline", "torch._foreach_copy_(params", "zip(params", check_masters, "bf16 weights moved by"),
    ("zero1", "if param.requires_grad:", "if True:", check_odd, "weights differ"),
    ("zero2", "dist.all_reduce(squares, group=self.group)", "pass", check_parity, "losses differ"),
    ("zero2", "if self.shard.grad is None:", "if True:", check_parity, "losses differ"),
    ("zero2", "self.flat_grad.zero_()", "pass", check_odd, "weights differ"),
    ("zero3", "dist.broadcast(self.flat_param, group_src=0, group=group)", "pass", check_odd, "differ"),
    ("zero3", "= ShardedWeight()", "= None", check_gathering, "not named"),
    ("zero3", "unit.reshard()  # it", "pass  # it", check_odd, "weights differ"),
    ("zero2", "weight.grad = None\n", "pass\n", check_ledger, "gradients: +"),
    ("zero2", "self.flat_grad.untyped_storage().resize_(0)  # f", "pass  #", check_ledger, "gradients: +"),
    ("zero3", "unit.reshard_after_forward = False  #", "pass  #", check_ledger, "all-gather: sent +"),
    ("zero3", "[: 1 + self.prefetch]", "[: 2 + self.prefetch]", check_ledger, "parameters: +"),
    ("zero3", "unit.reshard()  # all", "pass  # all", check_ledger, "parameters: +"),
    ("zero3", "self.units[i::direction]", "self.units[i:]", check_timeline, "another order"),
    ("zero1 zero2 zero3", "self.reducing.finish_reduce()", "pass", check_timeline, "another order"),
    ("zero1 zero2", "unit.wait_for_unshard, prepend=True", "unit.wait_for_unshard", check_timeline, "early"),
    ("ddp zero1 zero2 zero3 hsdp", "proxy(unit.hook)", "unit.hook", check_freed, "bytes are left"),
    ("muon", "proxy(self.hook)", "self.hook", check_freed, "bytes are left"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS)
