"""The table in docs/use.md of what one might do to a class of ddp.py, zero1.py, zero2.py, zero3.py, hsdp.py.
Each row ends as the page says: right, as a plain model trained on all ranks' batches; in an error of the
lesson, or in torch's; in a NaN; or unnoticed."""

import copy
import io
import re
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from tests.harness import ROOT, apart, holds, mutants, world
from tests.test_zero import Gate, check_odd, wrap, wrap_only

USE = (ROOT / "docs/use.md").read_text()
LESSONS = ("ddp", "zero1", "zero2", "zero3", "hsdp")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.up(self.norm(x)))


class Asking(Block):
    def forward(self, x):
        return super().forward(x.to(next(self.parameters()).device))


class Unused(Block):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


class Empty(Block):
    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0))
        self.scale = nn.Parameter(torch.ones(()))
        self.up.weight.data = self.up.weight.data.T

    def forward(self, x):
        return super().forward(x) * self.scale + self.empty.sum()


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 6, sparse=True)

    def forward(self, x):
        return x + self.table(torch.tensor([1, 2, 1, 0]))[: len(x)]

    def get_extra_state(self):
        return {"one": 1}

    def set_extra_state(self, state):
        assert state == {"one": 1}


class Recomputed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class Attended(nn.TransformerEncoderLayer):
    """Whose attention uses the weights of its last Linear without calling it."""

    def __init__(self):
        super().__init__(6, 2, 8, dropout=0, batch_first=True)

    def forward(self, x):
        return super().forward(x[:, None])[:, 0]


def model_of(kind=Block):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *(kind() for _ in range(4)), nn.Linear(6, 2)).double()


def batches():
    """Three batches: all of each, and this rank's half of each."""
    data = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return data, data.chunk(2, dim=1)[dist.get_rank()]


def loss_of(model, x):
    return model(x).square().mean()


def backward(model, x):
    loss_of(model, x).backward()


def train(model, data, optimizer=None, backward=backward, between=lambda model: None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for x in data:
        backward(model, x)
        between(model)
        optimizer.step()
        optimizer.zero_grad()


def trained(kind=Block, before=lambda model: None, **how):
    """A plain model after its training."""
    model = model_of(kind)
    before(model)
    train(model, batches()[0], **how)
    return model


def options(name):
    return {"shard_size": 2} if name.removesuffix(".py").endswith("hsdp") else {}


def wrapped(name, kind=Block, before=lambda model: None, unit_class=None):
    model = model_of(kind)
    before(model)
    return wrap(name, model, unit_class or kind, **options(name))[1]


def compare(one, other):
    difference = apart(one, other)
    return "NaN" if difference != difference else "right" if difference < 1e-9 else "not noticed"


def same(wrapper, plain):
    """How a wrapper's weights compare; None on a rank that has none of them."""
    state = getattr(wrapper, "full_state_dict", wrapper.module.state_dict)()
    expected = plain.state_dict()
    assert not state or state.keys() == expected.keys(), "other names"
    tensors = [name for name in state if torch.is_tensor(state[name])]
    return compare(*({name: each[name] for name in tensors} for each in (state, expected))) if state else None


def case(name, unit_class=None, kind=Block, before=lambda model: None, **how):
    """Train both alike."""
    wrapper = wrapped(name, kind, before, unit_class)
    train(wrapper, batches()[1], **how)
    return same(wrapper, trained(kind, before, **how))


def after(name, change):
    """Change a wrapper, and train it."""
    wrapper = wrapped(name)
    wrapper = change(wrapper) or wrapper
    train(wrapper, batches()[1])
    return same(wrapper, trained())


# ---- wrapping ----


def twice(name, outer=None, inner=None):
    """Two wrappers of a module, or one around the other."""
    model = model_of()
    first = wrap(inner or name, model, Block, **options(inner or name))[1]
    second = wrap(outer or name, first if outer or inner else model, Block, **options(outer or name))[1]
    train(second, batches()[1])
    return "not noticed"


def shared(name):
    part = model_of()
    both = [
        wrap(name, nn.Sequential(part, nn.Linear(2, 2).double()), Block, **options(name))[1] for _ in range(2)
    ]
    for wrapper in both:
        train(wrapper, batches()[1])
    return "not noticed"


def doubled(param):
    param.grad *= 2


def hooked(model, when):
    block = model[1]
    if when == "weight":
        block.up.weight.register_hook(lambda grad: 2 * grad)
    elif when == "accumulated":
        block.up.weight.register_post_accumulate_grad_hook(doubled)
    else:
        block.register_forward_pre_hook(lambda module, args: args[0] + module.up.weight.sum())
        block.register_full_backward_pre_hook(lambda module, grads: (2 * grads[0],))


def hooked_later(name, when):
    wrapper, plain = wrapped(name), model_of()
    for model in wrapper.module, plain:
        if when == "forward":
            model[1].register_forward_hook(lambda module, args, out: out * module.up.weight.sum())
        else:
            model[1].register_full_backward_pre_hook(lambda block, grads: (grads[0] * block.up.weight.sum(),))
    train(wrapper, batches()[1])
    train(plain, batches()[0])
    return same(wrapper, plain)


def all_frozen(name):
    wrapped(name, before=lambda model: model.requires_grad_(False))
    return "not noticed"


# ---- after wrapping ----


def freeze(wrapper, how):
    if how == "shards":
        for param in wrapper.parameters():
            param.requires_grad = False
    elif how == "attribute":
        wrapper.module[1].up.weight.requires_grad = False
    else:
        (wrapper if how == "all" else wrapper.module[1]).requires_grad_(False)


def cast(wrapper):
    wrapper.module[1].float()


def replaced(wrapper):
    wrapper.module[1].up = nn.Linear(6, 6).double()


def trained_late(name, change, before=lambda model: None):
    """Parameters are unfrozen, or there, once the model is wrapped."""
    wrapper, plain = wrapped(name, before=before), model_of()
    change(wrapper.module)
    change(plain)
    train(wrapper, batches()[1])
    train(plain, batches()[0])
    return same(wrapper, plain)


def frozen(model):
    model[1].up.weight.requires_grad = False


def unfrozen(model):
    model[1].up.weight.requires_grad = True


def longer(model):
    torch.manual_seed(1)
    model.append(nn.Linear(2, 2).double())


def loaded(wrapper):
    wrapper.module[1].load_state_dict(model_of()[1].state_dict())


def saved(name, what):
    wrapper = wrapped(name)
    train(wrapper, batches()[1])
    part = {"wrapper": wrapper, "module": wrapper.module, "part": wrapper.module[1]}[what]
    plain = trained()[1] if what == "part" else trained()
    states = part.state_dict(), plain.state_dict()
    return compare(*(torch.cat([x.flatten() for x in state.values()]).detach() for state in states))


def pickled(wrapper):
    torch.save(wrapper.module, io.BytesIO())
    torch.save(wrapper, io.BytesIO())


def averaged(wrapper):
    torch.optim.swa_utils.AveragedModel(wrapper)


# ---- training ----


def optimizer_before(name):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _, wrapper = wrap_only(name, model, Block, **options(name))
    train(wrapper, batches()[1], optimizer)
    return same(wrapper, trained())


def optimizer_of(name, module_of):
    _, wrapper = wrap_only(name, model_of(), Block, **options(name))
    train(wrapper, batches()[1], torch.optim.SGD(module_of(wrapper).parameters(), 0.1))
    return same(wrapper, trained())


def clip_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def clip_norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_early(name):
    wrapped(name).clip_grad_norm_(1.0)
    return "not noticed"


def penalty(name):
    plain, model = model_of(), model_of()
    losses = []
    for each in plain, model:
        params = list(each.parameters())
        losses.append(
            lambda m, x, params=params: (loss_of(m, x) + sum(p.square().sum() for p in params)).backward()
        )
    wrapper = wrap(name, model, Block, **options(name))[1]
    train(plain, batches()[0], backward=losses[0])
    train(wrapper, batches()[1], backward=losses[1])
    return same(wrapper, plain)


def gates(name):
    torch.manual_seed(0)
    plain = nn.Sequential(*(Gate() for _ in range(4))).double()
    wrapper = wrap(name, copy.deepcopy(plain), Gate, **options(name))[1]
    for model, data in zip((plain, wrapper), batches()):
        train(model, data[..., :5])
    return same(wrapper, plain)


def sparse(name):
    wrapper, plain = wrapped(name, Sparse), model_of(Sparse)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for x in batches()[0]:
        (sum(loss_of(plain, half) for half in x.chunk(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(wrapper, batches()[1])
    return same(wrapper, plain)


def graph(model, x):
    loss_of(model, x).backward(create_graph=True)


def retained(model, x):
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


def twice_used(model, x):
    (loss_of(model, x) + loss_of(model, -x)).backward()


def failing(name):
    wrapper = wrapped(name)
    wrapper.module[1].register_forward_hook(
        lambda module, args, out: out.register_hook(lambda grad: 1 / 0) and None
    )
    for _ in range(2):
        try:
            backward(wrapper, batches()[1][0])
        except ZeroDivisionError:
            continue
    return "not noticed"


def outputs(name, of):
    """What a trained wrapper, or a part of it, computes."""
    wrapper = wrapped(name)
    train(wrapper, batches()[1])
    x = batches()[0][0]
    if of == "inference":
        with torch.inference_mode():
            computed = wrapper(x)
    else:
        return compare(wrapper.module[1](x).detach(), trained()[1](x).detach())
    return compare(computed.detach(), trained()(x).detach())


def compiled(name, what):
    """In backward, too; not by inductor, which needs a compiler."""
    torch._dynamo.reset()
    model = model_of()
    if what == "forward":
        model[1].forward = torch.compile(model[1].forward, backend="aot_eager")
    elif what == "block":
        model[1].compile(backend="aot_eager")
    wrapper = wrap(name, model, Block, **options(name))[1]
    if what == "wrapper":
        wrapper.compile(backend="aot_eager")
    train(wrapper, batches()[1])
    return same(wrapper, trained())


def weight_grads(model, x):
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss_of(model, x), params)):
        param.grad = grad


def input_grads(model, x):
    """A gradient penalty, of samples, so that a half batch has half of it."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    grad.square().sum(1).mean().backward()


def clip(model):
    """By its method, or as torch does it, after what noise or a projection does to gradients."""
    for param in model.parameters():
        param.grad = param.grad * 3
    if hasattr(model, "clip_grad_norm_"):
        model.clip_grad_norm_(0.01)
    else:
        clip_norm(model)


def kept(name):
    """A gradient that is kept while the next ones are computed."""
    wrapper, plain = wrapped(name), model_of()
    found = []
    for model, data in zip((plain, wrapper), batches()):
        backward(model, data[0])
        grads = [param.grad for param in model.parameters()]
        model.zero_grad()
        backward(model, data[1])
        found.append(sum(grad.square().sum() for grad in grads))
    total = found[1]
    if name != "ddp":
        dist.all_reduce(total)
    return compare(found[0], total)


@torch.no_grad()
def updated(param):
    param -= 0.1 * param.grad


def in_backward(name):
    """An optimizer that updates each parameter as soon as it has its gradient."""
    wrapper, plain = wrapped(name), model_of()
    for model in wrapper, plain:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(updated)
    for model, data in zip((plain, wrapper), batches()):
        for x in data:
            backward(model, x)
            model.zero_grad()
    return same(wrapper, plain)


def tied_data(model):
    model[2].up.weight.data = model[1].up.weight.data


def assigned(name):
    wrapper, plain = wrapped(name), model_of()
    for model in wrapper.module, plain:
        model[1].up.weight.data = torch.eye(6).double()
    train(wrapper, batches()[1])
    train(plain, batches()[0])
    return same(wrapper, plain)


class Bounded(Sparse):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 6, max_norm=0.1)

    def forward(self, x):
        return x + self.table((x[:, 0] > 0).long())


def update_between(name):
    wrapper = wrapped(name)
    optimizer = torch.optim.SGD(wrapper.parameters(), 0.1)
    train(wrapper, batches()[1], optimizer)
    backward(wrapper, batches()[1][0])
    loss = loss_of(wrapper, batches()[1][1])
    optimizer.step()
    loss.backward()
    return "not noticed"


def update_early(name):
    wrapper = wrapped(name)
    optimizer = torch.optim.SGD(wrapper.parameters(), 0.1)
    for wrapper.is_last_backward in False, False, True:
        train(wrapper, batches()[1][:1], optimizer)
    wrapper.is_last_backward = True
    plain = model_of()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        train(plain, batches()[0][:1], optimizer)
    return same(wrapper, plain)


def zeroed_between(name):
    wrapper = wrapped(name)
    optimizer = torch.optim.SGD(wrapper.parameters(), 0.1)
    for x in batches()[1]:
        for wrapper.is_last_backward in False, True:
            optimizer.zero_grad(set_to_none=False)
            backward(wrapper, x)
        optimizer.step()
        optimizer.zero_grad()
    return same(wrapper, trained())


def scaled(name):
    """An overflow in one of the gradients of one rank, where they are averaged in those of all."""
    wrapper = wrapped(name)
    optimizer = torch.optim.SGD(wrapper.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    if name == "ddp" or dist.get_rank() == 0:
        overflow = next(iter(wrapper.parameters()))
    for i, x in enumerate(batches()[1]):
        scaler.scale(loss_of(wrapper, x)).backward()
        if i == 0 and (name == "ddp" or dist.get_rank() == 0):
            overflow.grad.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    plain = model_of()
    train(plain, batches()[0][1:])
    return same(wrapper, plain)


# Rows of the table in docs/use.md, each with what it means. A case returns whether all went right.
CASES = {
    "wrap a module twice, a wrapper, or a part that another wrapper has": [
        twice, lambda name: twice(name, outer=name), partial(twice, outer="ddp"), shared,
        partial(twice, inner="zero1"), partial(twice, inner="ddp")],
    "wrap a module whose parameters are all frozen": [all_frozen],
    "weights that are transposed, empty or a single number": [partial(case, kind=Empty)],
    "sparse gradients; a module with extra state": [sparse],
    "`register_hook` of a weight; hooks of a module": [
        partial(case, before=partial(hooked, when=when)) for when in ("weight", "module")],
    "a weight's `register_post_accumulate_grad_hook` before wrapping": [
        partial(case, before=partial(hooked, when="accumulated"))],
    "a hook after a unit's forward or before its backward that uses its weights": [
        partial(hooked_later, when="forward"), partial(hooked_later, when="backward")],
    "freeze parameters after wrapping": [
        partial(after, change=partial(freeze, how=how)) for how in ("shards", "attribute", "all", "part")],
    "replace a parameter after wrapping": [partial(after, change=replaced)],
    "unfreeze or add a parameter after wrapping": [
        partial(trained_late, change=unfrozen, before=frozen), partial(trained_late, change=longer)],
    "cast or move after wrapping": [partial(after, change=cast)],
    "load weights after wrapping": [partial(after, change=loaded)],
    "save `state_dict()` of the wrapper or the module": [
        partial(saved, what="wrapper"), partial(saved, what="module")],
    "save `state_dict()` of a part of the module": [partial(saved, what="part")],
    "copy or pickle a wrapper, as for a moving average": [
        partial(after, change=change) for change in (copy.deepcopy, pickled, averaged)],
    "make the optimizer before wrapping": [optimizer_before],
    "make the optimizer of `module.parameters()`": [
        partial(optimizer_of, module_of=lambda wrapper: wrapper.module)],
    "make the optimizer of a container's `parameters()`": [
        partial(optimizer_of, module_of=lambda wrapper: nn.ModuleList([wrapper]))],
    "torch's `clip_grad_value_`": [partial(case, between=clip_value)],
    "torch's `clip_grad_norm_`": [partial(case, between=clip_norm)],
    "clip before a backward": [clip_early],
    "`GradScaler`": [scaled],
    "an L2 penalty over all weights": [penalty],
    "use a unit's weights without calling it": [partial(case, kind=Attended, unit_class=nn.Linear)],
    "a parameter that a step does not use": [partial(case, kind=Unused)],
    "`w.detach()` beside `w` in a unit": [gates],
    "`next(self.parameters()).device` in a forward": [partial(case, kind=Asking)],
    "two forwards before a backward; two backwards of one graph; reentrant checkpoints": [
        partial(case, backward=twice_used), partial(case, backward=retained), partial(case, kind=Recomputed)],
    "`backward(create_graph=True)`": [partial(case, backward=graph)],
    "go on after a backward that failed": [failing],
    "`torch.compile` of a unit's forward before wrapping": [partial(compiled, what="forward")],
    "`torch.compile` of the wrapper; `block.compile()`": [
        partial(compiled, what="wrapper"), partial(compiled, what="block")],
    "`torch.inference_mode()`": [partial(outputs, of="inference")],
    "`torch.autograd.grad` for gradients of inputs": [partial(case, backward=input_grads)],
    "`torch.autograd.grad` for gradients of weights": [partial(case, backward=weight_grads)],
    "change or replace `.grad` before clipping": [partial(case, between=clip)],
    "keep a `.grad` beyond `zero_grad()`": [kept],
    "an optimizer in backward, by hooks after wrapping": [in_backward],
    "tie weights through `.data` before wrapping": [partial(case, before=tied_data)],
    "assign `weight.data` after wrapping": [assigned],
    "`nn.Embedding(max_norm=...)`": [partial(case, kind=Bounded)],
    "call a part of the module after an update": [partial(outputs, of="part")],
    "update between a forward and its backward": [update_between],
    "update after a backward that is not the step's last": [update_early],
    "`zero_grad(set_to_none=False)` between the backwards of a step": [zeroed_between],
}  # fmt: skip


def outcome(function, name):
    """On a rank: right, NaN, not noticed, error, torch's error, or None, if this rank cannot tell."""
    try:
        return function(name)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        is_own = Path(where.filename).stem in LESSONS and where.line.startswith("raise")
        return f"{'error' if is_own else 'error of torch'}: {error}"


def outcomes(name, rows):
    """On a rank: {row: the set of outcomes of its cases}"""
    return {row: {outcome(function, name) for function in CASES[row]} for row in rows}


def read_table():
    """{row: {lesson: what the page says}}"""
    table = {}
    for row, *cells in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", USE, re.M):
        if row in CASES:
            table[row] = dict(zip(("ddp", "zero1", "zero3"), cells))
            table[row] |= {"zero2": table[row]["zero1"], "hsdp": table[row]["zero3"]}
            for lesson, cell in table[row].items():  # "zero1: right; zero2: error"
                own = dict(re.findall(r"(\w+)\.py: ([^;]+)", cell))
                table[row][lesson] = own.get(lesson, cell)
    return table


def check_rows(name, rows=tuple(CASES)):
    """Each row ends as the page says. (name: a lesson, or a mutant's path.)"""
    table, lesson = read_table(), re.search(r"(\w+?)(\.py)?$", name)[1]
    ranks = world(2).run(outcomes, name, rows)
    for row in rows:
        seen = set().union(*(rank[row] for rank in ranks)) - {None}
        said = re.split(r"[:,(]", table[row][lesson])[0].strip()
        newer = re.search(r"\(from torch (\S+) on: (.*?)\)", table[row][lesson])
        said = newer[2] if newer and torch.__version__ >= newer[1] else said
        assert {re.split(": ", each)[0] for each in seen} == {said}, f"{row}: {said}? It is {seen}"


def test_the_page_and_the_cases_have_the_same_rows():
    assert list(read_table()) == list(CASES)


test_each_row_ends_as_the_page_says = pytest.mark.long_table(holds(LESSONS, check_rows))


def row(start):
    """A check of the row that begins so."""
    return partial(check_rows, rows=tuple(each for each in CASES if each.startswith(start)))


ZEROS, SHARDED = "zero1 zero2 zero3 hsdp", "zero3 hsdp"
MUTANTS = [
    ("ddp", "any(param._post_accumulate_grad_hooks for param in self.params)", "False",
     row("wrap a module twice"), "a part that another wrapper has: error?"),
    (ZEROS, "if param._post_accumulate_grad_hooks:", "if False:", row("a weight's"), "wrapping: error?"),
    ("ddp", "[param for _, param in module.named_parameters()", "[param for param in module.parameters()",
     row("wrap a module twice"), "error? It is"),
    ("ddp", "if not self.params or ", "if ", row("wrap a module whose"), "all frozen: error? It is"),
    ("ddp zero1 zero2 zero3 hsdp", "param.grad.to_dense()", "param.grad", row("sparse"), "right?"),
    (ZEROS, "if not all(unit.shard.requires_grad for unit in self.units):", "if 0:", row("freeze"), "error?"),
    (ZEROS, ', "__reduce_ex__")', ")", row("copy or pickle"), "moving average: error?"),
    ("ddp", "__reduce_ex__(self", "reduce(self", row("copy or pickle"), "moving average: error?"),
    ("ddp", "{param for param in self.module.parameters() if param.requires_grad} != set(self.params)",
     "False", row("unfreeze"), "add a parameter after wrapping: error?"),
    (ZEROS, "is_grad_enabled() and not self.has_optimizer:", "is_grad_enabled() and 0:",
     row("make the optimizer before"), "before wrapping: error?"),
    (SHARDED, "{name: weights.get(name, value) for name, value in state_dict.items() if weights}", "weights",
     row("sparse"), "state: right?"),
    (SHARDED, "remove_duplicate=False", "", partial(check_odd, size=2), "weights differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS)
