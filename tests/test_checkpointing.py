"""What is special to checkpointing.py."""

import weakref
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint as torchs

from tests import test_zero1
from tests.checks import check_ledger, check_parity
from tests.harness import TINY, Lesson, error_of, holds, load, mutants, on_ranks, world

NAIVE = "--policy naive"
RACE = "2 --batch 32"
AGAINST = "--policy none"
LESSON = Lesson(
    variants=("--policy selective", "--policy naive", "--policy none"),
    own={"--policy": ("full selective naive none", "offload")},
    races=("", "--policy selective"),
)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x, scale=1.0, mask=None):
        x = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.3)
        x = F.scaled_dot_product_attention(x, x, x) * (torch.rand(x.shape[-1]) + 0.5)
        x = F.dropout(x, 0.2) * scale
        return {"x": x if mask is None else x.masked_fill(mask, 0), "note": "text"}


def gradients_of(call):
    """Gradients when layers are called by call(layer, x, ...), and random numbers drawn after that."""
    torch.manual_seed(dist.get_rank() // 2)
    layers = nn.ModuleList(Dropping() for _ in range(3))
    start = torch.randn(3, 1, 5, 12, requires_grad=True)
    x = call(layers[0], start, 2.0, torch.arange(5).view(5, 1) == 2)["x"]
    x = call(lambda x: call(layers[2], call(layers[1], x)["x"]), x)["x"]  # nested
    frozen = call(lambda x: x * layers[0].down.bias, torch.ones(12))  # whose input needs no gradient
    x, other = call(lambda x, y: (x.sin() * y, x.cos().tanh()), x + frozen, x)
    torch.autograd.grad(x.sum(), start, retain_graph=True)  # asks for some of what was saved
    x.sum().backward(retain_graph=True)
    (x * other).sum().backward()
    return [start.grad, *(param.grad for param in layers.parameters()), torch.rand(4)]


def plainly(function, *args):
    return function(*args)


@on_ranks(1)
def check_gradients(name):
    """They are those of no checkpoint at all, and so are later random numbers."""
    expected, own = gradients_of(plainly), []
    failed = error_of(lambda: own.extend(gradients_of(load(name).checkpoint)))
    assert failed == "nothing", f"backward fails: {failed}"
    assert all(map(torch.equal, own, expected)), "gradients differ"


def inner(x):
    """It needs a backward of its own."""
    y = (x.exp() * x).sin()
    return y * torch.autograd.grad(y.sum(), x, create_graph=True)[0].tanh()


@on_ranks(1)
def check_backward_inside(name):
    """A function may call autograd, and a gradient may have a gradient."""

    def gradients(call):
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        y = call(inner, x)
        first = torch.autograd.grad(y.sum(), x, create_graph=True)
        return *first, *torch.autograd.grad(first[0].square().sum(), x)

    own = []
    failed = error_of(lambda: own.extend(gradients(load(name).checkpoint)))
    assert failed == "nothing", f"backward fails: {failed}"
    assert all(map(torch.equal, own, gradients(plainly))), "gradients of gradients differ"


@on_ranks(1)
def check_ends(name):
    """A checkpoint ends with its graph, or with its exception; in an evaluation there is none."""
    lesson, made = load(name), []
    recompute = lesson.recompute

    def recompute_noted(*args):
        tensors = recompute(*args)
        made.extend(map(weakref.ref, tensors))
        return tensors

    def fails(x):
        x.exp().sin()
        raise KeyError

    def check(function, act):
        function = partial(function)
        alive = weakref.ref(function)
        act(function)
        del function
        assert alive() is None, "a checkpoint outlives its graph"
        assert all(each() is None for each in made), "what was recomputed outlives its graph"

    lesson.recompute, checkpoint = recompute_noted, lesson.checkpoint
    x = torch.ones(4, requires_grad=True)
    check(lambda x: x.sin().exp().tanh(), lambda function: checkpoint(function, x).sum().backward())
    assert len(made) == 3, f"recomputed {len(made)} tensors in place of 3"
    check(lambda x: x.sin().exp().tanh(), lambda function: checkpoint(function, x))
    check(fails, lambda function: error_of(lambda: checkpoint(function, x)))
    assert (x * x).grad_fn._saved_self is x, "after an exception tensors are still replaced"
    with torch.no_grad():
        assert not checkpoint(torch.sin, x).requires_grad, "a graph in no_grad()"
    with torch.inference_mode():
        failed = error_of(partial(checkpoint, torch.add, *torch.ones(2, 4)))
        assert failed == "nothing", f"in inference_mode() {failed}"


@on_ranks(1)
def check_changed(name):
    """An argument that is changed in place, in the function or after it, is refused."""
    checkpoint = load(name).checkpoint

    def adds(h):
        h += h.exp()
        return h.sin().cos()

    x = torch.linspace(0, 1, 6, requires_grad=True)
    h = x * 1
    y = checkpoint(lambda x, h: x * h.tanh(), x, h)
    h += y
    for loss in h.sum(), checkpoint(adds, x * 1).sum():
        failed = error_of(loss.backward)
        assert "argument was changed in place" in failed, failed


@on_ranks(1)
def check_generators(name):
    """Masks drawn on a GPU are the same both times, and later ones are others."""
    lesson, gpu = load(name), torch.Generator()
    generator = {"get_rng_state": gpu.get_state, "set_rng_state": gpu.set_state, "is_available": lambda: True}
    with mock.patch.multiple(torch.cuda, **generator):
        x = torch.ones(1000, requires_grad=True)
        y = lesson.checkpoint(lambda x: (x * torch.rand(1000, generator=gpu)).square(), x)
        later = torch.rand(4, generator=gpu.clone_state())
        y.sum().backward()
    assert torch.allclose(x.grad, 2 * y), "masks on a GPU differ"
    assert torch.equal(later, torch.rand(4, generator=gpu)), "later masks on a GPU differ"


@on_ranks(1)
def check_naive(name):
    """A block by NaiveCheckpoint has plain gradients."""
    lesson = load(name)
    block = lesson.Block(lesson.parse(TINY.split()))
    found = []
    for forward in lesson.Block.forward, lesson.NaiveCheckpoint.apply:
        x = torch.linspace(-1, 1, 4 * 36).view(1, 4, 36).requires_grad_()
        forward(block, x).square().sum().backward()
        found.append([x.grad, *(param.grad for param in block.parameters())])
        block.zero_grad()
    assert all(map(torch.equal, *found)), "naive: gradients differ"


def run_of(name, policy, checkpoint=None):
    """On a rank: a step's (bytes of all at the peak, FLOPs, gradients, bytes of each recomputation)."""
    lesson, ledger = load(name), load("tools/ledger")
    lesson.checkpoint = checkpoint or lesson.checkpoint
    masters, recompute, squared_norm = lesson.MasterWeights, lesson.recompute, lesson.squared_norm
    weights, made, gradients = set(), [], []

    def with_masters(params, lr):
        weights.update(param.data_ptr() for param in params)
        return masters(params, lr)

    def recompute_noted(function, args, *more):
        tensors = recompute(function, args, *more)
        given = {arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)} | weights
        storages = {storage.data_ptr(): storage for storage in map(torch.Tensor.untyped_storage, tensors)}
        made.append(sum(each.nbytes() for where, each in storages.items() if where not in given))
        return tensors

    def norm_noted(grads):
        gradients.extend(grad.clone() for grad in grads)
        return squared_norm(grads)

    lesson.MasterWeights, lesson.recompute, lesson.squared_norm = with_masters, recompute_noted, norm_noted
    watch, _ = ledger.run(lesson, lesson.parse(f"{TINY} --steps 1 --batch 24 --policy {policy}".split()))
    return watch.held()["all"], watch.flops, gradients, made


torchs_own = partial(torchs.checkpoint, use_reentrant=False)
POLICIES = "none", "naive", "full", "selective"
LAYERS, TOKENS, HEADS, CONTEXT, WIDTH = 3, 24 * 16, 12, 16, 36  # of run_of()


def check_work(name):
    """What each policy computes again, and that none changes a gradient."""
    peaks, flops, gradients, made = zip(*(world(1).run(run_of, name, policy)[0] for policy in POLICIES))
    attention = 4 * CONTEXT * WIDTH
    for policy, own, theirs, vectors in zip(POLICIES, flops, gradients, (0, 24, 16, 0)):
        again = LAYERS * TOKENS * (vectors * WIDTH**2 + attention * (policy != "none"))
        assert own - flops[0] == again, f"{policy}: {own - flops[0]} FLOPs again, not {again}"
        assert all(map(torch.equal, theirs, gradients[0])), f"{policy}: gradients differ"
    unit = 4 * TOKENS * WIDTH
    assert set(made[2]) == {15 * unit + 4 * (4 + HEADS) * TOKENS}, f"full: recomputes {made[2]} bytes"
    assert max(made[3]) == 4 * unit, f"selective: recomputes {max(made[3])} bytes"
    assert peaks[2] < peaks[3] < peaks[0], f"bytes at the peak: {peaks}"


def check_beside_torch(name):
    """torch's own checkpoint in place of the lesson's computes and holds the same."""
    for policy in ("full", "selective"):
        peak, flops, gradients, _ = world(1).run(run_of, name, policy)[0]
        theirs = world(1).run(run_of, name, policy, torchs_own)[0]
        assert all(map(torch.equal, gradients, theirs[2])), f"{policy}: not torch's gradients"
        assert peak <= theirs[0], f"{policy}: {peak} bytes at the peak, torch's {theirs[0]}"
        assert flops == theirs[1], f"{policy}: {flops} FLOPs, torch's {theirs[1]}"


class Inner(test_zero1.Part):
    """A block of which a part is a checkpoint."""

    def forward(self, x):
        x = x + self.places(torch.arange(x.shape[1]))
        return x + self.call(lambda x: self.down(torch.tanh(self.up(x))), x)


@on_ranks(2)
def check_among_hooks(name):
    """Blocks of zero1.py, zero2.py and zero3.py may be checkpoints, or have some inside."""
    checkpoint = load(name).checkpoint
    inside = type("Inside", (Inner,), {"call": staticmethod(checkpoint)})
    ways = {"around a block": {"how": checkpoint}, "in a block": {"block": inside}}
    ways |= {"around a block and in it": {"how": checkpoint, "block": inside}}
    ways |= {"around a block used twice": {"how": checkpoint, "order": (0, 1, 1, 2)}}
    situations = {way: (build, "f e b f b u") for way, build in ways.items()}
    for which in situations:
        with mock.patch.dict(test_zero1.SITUATIONS, situations):
            for stage in test_zero1.STAGES.split():
                test_zero1.check_situation.__wrapped__(stage, which)


test_each_promise_is_kept = holds(
    "checkpointing", check_gradients, check_backward_inside, check_ends, check_changed, check_generators,
    check_naive, check_work, check_beside_torch, check_among_hooks,
)  # fmt: skip
check_parity_of_naive = partial(check_parity, own_flags="--policy naive")
kept = {policy: partial(check_ledger, flags=f"--policy {policy}") for policy in POLICIES}
MUTANTS = [
    ("    set_random_states(random_states)\n", "", check_gradients, "gradients differ"),
    ("    set_random_states(states_now)\n", "", check_gradients, "gradients differ"),
    ("    torch.set_rng_state(states[0])\n", "", check_gradients, "gradients differ"),
    ("AllSaved), torch.enable_grad(), ", "AllSaved), ", check_gradients, "backward fails"),
    ("torch.cuda.set_rng_state(states[1])", "pass", check_generators, "masks on a GPU differ"),
    ("        return tensor.detach()", "        return None", check_backward_inside, "backward fails"),
    ("saved.append(tensor.detach())", "saved.append(tensor)", check_ends, "what was recomputed outlives"),
    ("    if not torch.is_grad_enabled():", "    if False:", check_ends, "in inference_mode()"),
    ("assert versions ==", "assert True or versions ==", check_changed, "nothing"),
    ("output.backward(gradient)", "output.backward(gradient.sign())", check_naive, "naive: gradients differ"),
    ("        if recomputed[index] is None:", "        if True:", check_work, "full: "),
    ("            raise AllSaved", "            pass", check_work, "full: "),
    ("checkpoint(lambda x: block.qkv(block.norm1(x)), x)", "checkpoint(block.qkv, block.norm1(x))",
     kept["selective"], "activations"),
    ("(lambda qkv: block.proj(block.attention(qkv)), qkv)", "(block.proj, block.attention(qkv))",
     kept["selective"], "activations"),
    ("checkpoint(lambda up: block.down(F.gelu(up)), up)", "block.down(F.gelu(up))", kept["selective"],
     "activations"),
    ('"full": full', '"full": Block.forward', kept["full"], "activations"),
    ("        return None, x.grad", "        return None, x.grad / 2", check_parity_of_naive, "differ"),
    ("= recomputed[index], None", "= recomputed[index], recomputed[index]", check_beside_torch,
     "bytes at the peak"),
    ("    dist.all_reduce(flat)\n", "", check_parity, "losses differ"),
    ("(config.accum * world_size)", "config.accum", check_parity, "losses differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "checkpointing")
