"""What is special to checkpointing.py and zero_r.py."""

import weakref
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint as torchs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.harness import TINY, Lesson, error_of, holds, load, mutants, on_ranks, world

LESSON = Lesson(
    worlds=(1, 2),
    variants=("--policy none", "--policy selective"),
    own={"--policy": ("none full selective", "offload"), "--every": ("1 2", "0 -1 9 x")},
    races=("--every 2", "--policy selective"),
)


KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "unfused": SDPBackend.MATH}


def ways(lesson):
    if hasattr(lesson, "Partitioned"):
        pair, _ = dist.new_subgroups(min(2, dist.get_world_size()))
        store = lesson.Partitioned(torch.device("cpu"), group=pair)
        return {"partitioned": partial(lesson.checkpoint, store=store)}
    keeps = {"full": (), "selective": lesson.EXPENSIVE, "random": lesson.EXPENSIVE | {torch.ops.aten.rand}}
    return {policy: partial(lesson.checkpoint, keep=keep) for policy, keep in keeps.items()}


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
    x, other = call(lambda x: (x.sin(), x.cos().tanh()), x + frozen)
    torch.autograd.grad(x.sum(), start, retain_graph=True)  # asks for some of what was saved
    x.sum().backward(retain_graph=True)
    (x * other).sum().backward()
    return [start.grad, *(param.grad for param in layers.parameters()), torch.rand(4)]


@on_ranks(4)
def check_gradients(name):
    """All ways end in the gradients of no checkpoint at all."""
    expected = gradients_of(lambda layer, *args: layer(*args))
    for way, call in ways(load(name)).items():
        assert all(map(torch.equal, gradients_of(call), expected)), f"gradients differ with {way}"
        with torch.no_grad():
            assert not call(Dropping(), torch.ones(1, 1, 5, 12))["x"].requires_grad, "a graph in no_grad()"
        with torch.inference_mode():
            failed = error_of(partial(call, torch.add, *torch.ones(2, 4)))
            assert failed == "nothing", f"in inference_mode() {failed}"
        function = partial(lambda x: (x.sin(), x.exp().tanh()))
        alive = weakref.ref(function)
        call(function, torch.ones(4, requires_grad=True))[0].sum().backward()
        del function
        assert alive() is None, "a checkpoint outlives its graph"


@on_ranks(2)
def check_changed(name):
    """An argument that is changed in place after the call is refused, unless the checkpoint has a copy."""
    for way, call in ways(load(name)).items():
        for odd in ("first", "second", "listed"):
            x = torch.linspace(0, 1, 6, requires_grad=True)  # no padding, which copies
            h = x * 1
            if odd == "first":
                y = call(lambda h: (h * 1).tanh(), h)
            elif odd == "second":
                y = call(lambda x, h: x * h.tanh(), x, h)
            else:
                y = call(lambda x, listed: x * listed[0].tanh(), x, [h])
            h += y
            failed = error_of(h.sum().backward)
            if odd == "first" and way == "partitioned":
                right = failed == "nothing" and torch.allclose(x.grad, 2 - x.detach().tanh().square())
                assert right, f"the copy of the first argument has changed, too: {failed}"
            else:
                assert "argument was changed in place" in failed, f"{way}, {odd}: {failed}"


@on_ranks(1)
def check_naive(name):
    """The simplest form has plain gradients, of a block without random numbers."""
    lesson = load(name)
    layer, x = nn.Linear(6, 6), torch.randn(3, 6, requires_grad=True)
    layer(x).tanh().square().sum().backward()
    expected = [x.grad, layer.weight.grad, layer.bias.grad]
    x.grad, layer.weight.grad, layer.bias.grad = None, None, None
    lesson.NaiveCheckpoint.apply(x, lambda x: layer(x).tanh()).square().sum().backward()
    assert all(map(torch.equal, [x.grad, layer.weight.grad, layer.bias.grad], expected)), "naive: differs"


def run_of(name, flags, kernel="flash", checkpoint=None):
    """On a rank: one step: (bytes of activations, bytes of all at the peak, gradients, FLOPs)."""
    lesson, ledger = load(name), load("tools/ledger")
    lesson.checkpoint = checkpoint or lesson.checkpoint
    models, gpt = [], lesson.GPT
    lesson.GPT = lambda config: models.append(gpt(config)) or models[0]
    gpt.zero_grad = lambda model: None
    config = lesson.parse(f"{TINY} --steps 1 --batch 6 --optim sgd --clip inf {flags}".split())
    with sdpa_kernel(KERNELS[kernel]), FlopCounterMode(display=False) as counter:
        watch, _ = ledger.run(lesson, config)
    held = watch.held()
    gradients = [param.grad for param in models[0].parameters()]
    return held["activations"], held["all"], gradients, counter.get_total_flops()


def torchs_own(function, *args, keep):
    """torch's checkpoint(), called as the lesson's."""
    more = {}
    if keep:
        operators = [getattr(packet, name) for packet in keep for name in packet.overloads()]
        more["context_fn"] = partial(torchs.create_selective_checkpoint_contexts, operators)
    return torchs.checkpoint(function, *args, use_reentrant=False, **more)


def check_beside_torch(name):
    for policy in ("full", "selective"):
        ours = world(1).run(run_of, name, f"--policy {policy}")[0]
        theirs = world(1).run(run_of, name, f"--policy {policy}", "flash", torchs_own)[0]
        assert all(map(torch.equal, ours[2], theirs[2])), f"{policy}: not torch's gradients"
        assert ours[1] <= theirs[1], f"{policy}: {ours[1]} bytes at the peak, torch's {theirs[1]}"
        assert ours[3] == theirs[3], f"{policy}: {ours[3]} FLOPs, torch's {theirs[3]}"


def check_kept(name):
    """Numbers kept of 3 blocks and the loss, from what each block keeps."""
    tokens, width, heads, context, vocab = 6 * 16, 36, 12, 16, 256
    u = tokens * width
    after = 2 * u + 2 * tokens + vocab * tokens
    flash = 16 * u + 4 * tokens + heads * tokens
    unfused = 16 * u + 4 * tokens + heads * tokens * context
    for kernel, flags, kept in (
        ("flash", "--policy full --every 2", 2 * u + flash),
        ("unfused", "--policy none", 3 * unfused),
        ("unfused", "--policy selective", 27 * u),
    ):
        activations, *_ = world(1).run(run_of, name, flags, kernel)[0]
        more = activations - 4 * (kept + after)
        assert 0 <= more <= 16, f"{kernel} {flags}: {more:+} bytes from what should be kept"


@on_ranks(3)
def check_events(name, offload=False):
    """What is fetched, waited for and computed in a backward."""
    lesson = load(name)
    store = lesson.Partitioned(torch.device("cpu"), offload)
    start, events, shards = store.start_all_gather, [], []

    def square(x, number):
        events.append(f"forward {number}")
        return x.square()

    def noted_fetch(shard, *more):
        number = next(i for i in range(3) if shards[i] is shard)
        events.append(f"fetch {number}")
        x, work = start(shard, *more)
        return x, mock.Mock(wait=lambda: (events.append(f"wait {number}"), work.wait()))

    store.start_all_gather = noted_fetch
    x = torch.ones(7, requires_grad=True)
    for number in range(3):
        x = lesson.checkpoint(square, x, number, store=store)
        shards.append(store.last().start_all_gather.args[0])
        assert shards[-1].untyped_storage().nbytes() == 4 * -(-7 // dist.get_world_size()), "not 1/N"
    x.sum().backward()
    assert store.last() is None, "a checkpoint outlives its backward"
    order = "fetch 2, wait 2, fetch 1, forward 2, wait 1, fetch 0, forward 1, wait 0, forward 0"
    assert ", ".join(events[3:]) == order, f"another order: {events}"
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    store = lesson.Partitioned(torch.device("cpu"), offload)
    lesson.checkpoint(torch.sin, x.t(), store=store).sum().backward()  # not contiguous
    assert torch.equal(x.grad, x.detach().cos()), "transposed: another gradient"
    store = lesson.Partitioned(torch.device("meta"), offload)
    with mock.patch.object(torch.Tensor, "copy_"):  # of a tensor without data; of a GPU's see test_nccl.py
        kept_on = store.partition(torch.ones(4, device="meta"))[0].device.type
    assert kept_on == ("cpu" if offload else "meta"), f"not on the host, but on {kept_on}"


offloaded = partial(check_events, offload=True)
test_each_promise_is_kept = holds(("checkpointing", "zero_r"), check_gradients, check_changed, check_naive)
test_policies_keep_and_recompute_what_they_say = holds("checkpointing", check_beside_torch, check_kept)
test_checkpoints_are_elsewhere = holds("zero_r", check_events, offloaded)
MUTANTS = [
    ("        set_random_states(self.random_states)\n", "", check_gradients, "gradients differ"),
    ("        set_random_states(before)\n", "", check_gradients, "gradients differ"),
    ("        set_random_states(after)\n", "", check_gradients, "gradients differ"),
    ("tion), torch.enable_grad()", "tion)", check_gradients, "fewer tensors"),
    ("self.recomputed = {}\n        before", "before", check_gradients, "saved fewer tensors"),
    ("del call.outputs[call.outputs_needed :]", "pass", check_kept, "bytes from"),
    ("            raise StopRecomputation", "            pass", check_beside_torch, "FLOPs"),
    ("] = tensor.detach(),", "] = tensor,", check_gradients, "outlives its graph"),
    ("self.recomputed.pop(number)", "self.recomputed[number]", check_beside_torch, "bytes at the peak"),
    ("{aten.mm, aten.addmm", "{aten.mm, aten.bmm, aten.addmm", check_kept, "unfused"),
    ("model.blocks[:: config.every]", "model.blocks", check_kept, "every 2"),
]  # fmt: skip
test_a_mutant_of_checkpointing_is_rejected = mutants(MUTANTS, "checkpointing")
MUTANTS = [
    ("self.gathering or self.start", "self.start", check_events, "another order"),
    ("self.previous.gathering = self.previous", "self.previous", check_events, "another order"),
    ("store.last = weakref.ref(self)", "store.last = lambda: self", check_events, "outlives"),
    ("F.pad(own, (0, size - len(own)))", "own", check_changed, "has changed, too"),
    ("F.pad(own, (0, size - len(own)))", "F.pad(own, (0, size))[:size]", check_events, "not 1/N"),
    ('device="cpu", pin', "device=self.device, pin", offloaded, "not on the host"),
    ("dist.get_rank(self.group) * size", "0", check_gradients, "gradients differ"),
    (".requires_grad_(requires_grad)", ".requires_grad_()", check_gradients, "gradients differ"),
]  # fmt: skip
test_a_mutant_of_zero_r_is_rejected = mutants(MUTANTS, "zero_r")
MUTANTS = [
    ("assert versions_of(self.args) ==", "assert True or", check_changed, ": nothing"),
    ("in tree_leaves(values) if", "in values if", check_changed, "listed: nothing"),
    ("if not torch.is_grad_enabled()", "if False", check_gradients, "in inference_mode() RuntimeError"),
    ("y.backward(grad)", "y.backward(grad.sign())", check_naive, "naive: differs"),
]  # fmt: skip
test_a_mutant_of_both_is_rejected = mutants(MUTANTS, "checkpointing zero_r")
