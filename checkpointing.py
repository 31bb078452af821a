"""Activation checkpointing: forward keeps each block's input only, and backward computes the rest again.

Idea
    Backward needs the activations that forward computed, and these often take more memory than the weights. A
    checkpoint keeps the input of a block and drops what the block computes. Just before backward needs these
    values, the block's forward runs again. Backward takes about twice as long as forward, so this costs about
    a third more time (arXiv 1604.06174).

    Selective recomputation also keeps the outputs of matrix products and of fused attention. Only what is
    fast is recomputed: norms, GELU, and attention if it is not fused (after arXiv 2205.05198, section 5).

Timeline (of the last two blocks)
    compute | forward 3 | forward 4 | loss | recompute 4 | backward 4 | recompute 3 | backward 3 | ...

Memory (bytes on each rank; w of a weight: 4 in fp32, 2 in bf16; m = 4; in fp64 both are 8)
    activations    bs((16L+2)wh+(4L+2+aL+v)m)    with --policy none, when backward begins
    activations    bs((L+2)wh+(2+v)m)            with --policy full; in backward 15wbsh more, of a block
    activations    bs((10L+2)wh+(2+aL+v)m)       with --policy selective; in backward 7wbsh more
    There are L layers, a heads, h width, s context, v vocabulary, and b sequences in a microbatch.
    Of each token, backward needs 16h numbers of a block: inputs and outputs of norms 4, q, k, v 3, attention
    1, up 4, GELU 4; also 4 statistics of norms, and a log-sum-exp of each head. The last norm has 2h and 2
    statistics, the loss v numbers.
    Selective keeps 10h: input 1, q, k, v 3, attention 1, proj 1, up 4. It recomputes 7h: norms 3, GELU 4.
    parameters     (w+c)P      P parameters; c = 4 in bf16, for fp32 copies (see MasterWeights), else 0
    gradients      wP+3cG/2    in bf16 G gradients at a time are copied, in 2 + 4 bytes: 2^24, or one tensor's
    optimizer      KP          K = 8 for AdamW's two moments (fp64: 16), 0 for SGD

Sent (bytes, by each rank in each step)
    Nothing. On several ranks, all train on the same batch, as the ranks of a tensor-parallel group do.

Run
    python checkpointing.py --policy selective
    python checkpointing.py --size gpt2 --dtype bf16 --batch 64 --accum 8

Left out
    Refused: changing in place an argument, or a tensor that backward needs; fewer tensors
    the second time, or other shapes or dtypes, as when autocast ends before backward.
    Wrong, and not noticed: other values the second time, because of other random generators (numpy's, your
    own), or because tensors that are no arguments (parameters, those in a partial) change before backward;
    side effects, which happen twice (BatchNorm's statistics), or once, if they come after the last result
    that backward needs. Not handled: keyword arguments (use a partial).
    In nested checkpoints the inner input is not dropped.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Operators too slow to run twice. (Not bmm: attention without a fused kernel computes its scores with it.)
aten = torch.ops.aten
EXPENSIVE = {aten.mm, aten.addmm, aten._scaled_dot_product_flash_attention}
EXPENSIVE |= {aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_efficient_attention}
EXPENSIVE |= {aten._scaled_dot_product_cudnn_attention}


class NaiveCheckpoint(torch.autograd.Function):
    """Full recomputation in its simplest form: y = NaiveCheckpoint.apply(x, block)."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)  # autograd does not look into the forward of a Function: it saves nothing more

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        y.backward(grad)  # this also adds up the gradients of the function's parameters
        return x.grad, None


# This has six problems:
# - A backward runs inside another one: torch.autograd.grad() does not find the function's parameters, and
#   hooks that wait for the end of backward, as DDP's do, run once in each block.
# - If x needs no gradient, the parameters get none.
# - The function must take and return a single tensor.
# - Dropout draws other random numbers the second time.
# - Everything is computed again, even what is slow and small.
# - So is the end of the function, though backward needs none of its results.
#
# So below, autograd builds the function's graph as usual. Hooks replace only the tensors that it saves there.


def checkpoint(function: Callable, *args, keep=()):
    """function(*args). What it computes for backward is dropped, and computed again there.

    Random numbers are the same both times, if they are drawn from torch's default generators.
    keep: ATen operators whose outputs are kept, such as EXPENSIVE, which lists no convolutions.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    call = Checkpoint(function, args, keep)
    result = call.run(call.pack, args)
    del call.outputs[call.outputs_needed :]  # recomputing stops before it would ask for the rest
    return result


class Checkpoint:
    """A call of checkpoint(): what forward keeps, and how backward gets the rest.

    Autograd gives pack() each tensor that it would save for backward, and saves a number in its place. When
    backward asks unpack() for one, the function runs again and saves the same tensors in the same order.
    """

    def __init__(self, function, args, keep):
        self.function = function
        self.args = args
        self.versions = versions_of(self.args)
        self.keep = keep
        self.outputs = []  # of the operators in keep
        self.outputs_needed = 0
        self.random_states = get_random_states()
        self.dropped = []  # (shape, dtype) by number
        self.recomputed = {}  # (tensor, its version) by number, until backward has asked for it

    def run(self, pack, args):
        """Call the function with args. pack() is given what autograd would save for backward."""
        mode = KeepOutputs(self.keep, self.outputs) if self.keep else nullcontext()
        with saved_tensors_hooks(pack, self.unpack), mode:
            return self.function(*args)

    def pack(self, tensor):
        self.dropped.append((tensor.shape, tensor.dtype))
        self.outputs_needed = len(self.outputs)
        return len(self.dropped) - 1

    def unpack(self, number):
        # The first tensor that backward asks for brings all of them; each is free once it has been used.
        # None: from pack_again(), so this backward runs inside of the function.
        assert number is not None, "torch.autograd.grad() inside of a checkpointed function: call it outside"
        if number not in self.recomputed:
            self.recompute()
        tensor, version = self.recomputed.pop(number)
        assert tensor._version == version, "a tensor that backward needs was changed in place"
        return tensor

    def recompute(self):
        """Run the function as in forward, until it has computed what backward needs.

        This run's graph is thrown away: only what it would save is taken.
        """
        assert versions_of(self.args) == self.versions, "a checkpoint's argument was changed in place"
        self.recomputed = {}
        before = get_random_states()
        set_random_states(self.random_states)
        with suppress(StopRecomputation), torch.enable_grad():
            self.run(self.pack_again, self.args)
        set_random_states(before)
        assert len(self.recomputed) == len(self.dropped), "the recomputation saved fewer tensors"

    def pack_again(self, tensor):
        number = len(self.recomputed)
        assert (tensor.shape, tensor.dtype) == self.dropped[number], "recomputed with another shape or dtype"
        # Without detach() this would be a reference cycle: the checkpoint has the tensor, its graph has these
        # hooks, which have the checkpoint.
        self.recomputed[number] = tensor.detach(), tensor._version
        if len(self.recomputed) == len(self.dropped):
            raise StopRecomputation


class StopRecomputation(BaseException):
    """Ends the function. As a BaseException, it also passes an `except Exception` in the function."""


class KeepOutputs(TorchDispatchMode):
    """In forward, keeps what these operators return; when recomputing, returns that without calling them."""

    def __init__(self, operators, outputs):
        super().__init__()
        self.operators = operators
        self.outputs = outputs  # (operator, output, its version, random states after it if it draws)
        self.number = 0  # of outputs so far, in this run

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket not in self.operators:
            return operator(*args, **(kwargs or {}))
        self.number += 1
        if self.number > len(self.outputs):  # not kept yet: this is forward
            output = operator(*args, **(kwargs or {}))
            # With this guard, detach() counts changes in place together with output, as outside of a mode.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                kept = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
            after = get_random_states() if torch.Tag.nondeterministic_seeded in operator.tags else ()
            self.outputs.append((operator, kept, versions_of(kept), after))
            return output
        recorded, kept, versions, after = self.outputs[self.number - 1]
        assert operator is recorded, f"the recomputation called {operator} in place of {recorded}"
        assert versions_of(kept) == versions, f"the output of {operator} was changed in place"
        set_random_states(after)
        return tree_map_only(torch.Tensor, torch.Tensor.detach, kept)


def versions_of(values):
    """How often each tensor in these values has been changed in place."""
    return [leaf._version for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def get_random_states():
    """The states of torch's default random generators, the CPU's and the GPUs'."""
    return [generator.get_state() for generator in (torch.default_generator, *torch.cuda.default_generators)]


def set_random_states(states):
    for generator, state in zip((torch.default_generator, *torch.cuda.default_generators), states):
        generator.set_state(state)


@torch.no_grad()
def clip_grad_norm_(params, max_norm):
    """torch.nn.utils.clip_grad_norm_, but it returns the norm in fp64: torch's has the gradients' dtype."""
    params = list(params)
    norm = torch.stack(torch._foreach_norm([p.grad for p in params], dtype=torch.float64)).norm()
    nn.utils.clip_grads_with_norm_(params, max_norm, norm.to(params[0]))
    return norm


def train(config):
    device, text = set_up(config, f" | policy {config.policy} | every {config.every}", replicas=1)
    model = GPT(config).to(device, DTYPES[config.dtype])
    if config.policy != "none":
        for block in model.blocks[:: config.every]:
            keep = EXPENSIVE if config.policy == "selective" else ()
            block.forward = partial(checkpoint, block.forward, keep=keep)
    optimizer_class = OPTIMIZERS[config.optim]
    if config.dtype == "bf16":
        optimizer_class = partial(MasterWeights, optimizer_class)
    optimizer = optimizer_class(model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        for inputs, targets in microbatches(config, text, step, device):
            # Gradients add up over microbatches and each loss is a mean: divide to get the batch's mean.
            microloss = mean_loss(model(inputs), targets) / config.accum
            microloss.backward()
            loss += microloss.detach()
        grad_norm = clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        model.zero_grad()
        print_step(config, step, loss, grad_norm, started)
    if config.save and dist.get_rank() == 0:
        save_weights(model.state_dict(), config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--policy", default="full", choices=["none", "full", "selective"])
    own.add_argument("--every", type=int, default=1, choices=range(1, 9), help="2: every second block")
    return read_flags(arguments, own)


class MasterWeights:  # updates fp32 copies of bf16 parameters, 64 MiB at a time (arXiv 1910.02054, 3.1)
    def __init__(self, optimizer_class, params, **options):
        self.groups = []
        for group in torch._utils._take_tensors(params, 2**25):  # bytes of bf16, twice that in fp32
            master = nn.Parameter(nn.utils.parameters_to_vector(group).float())
            self.groups.append((group, master, optimizer_class([master], **options)))

    @torch.no_grad()
    def step(self):
        for params, master, optimizer in self.groups:
            grads = [param.grad for param in params]
            master.grad = nn.utils.parameters_to_vector(grads).float()
            optimizer.step()
            master.grad = None
            parts = torch._utils._unflatten_dense_tensors(master, params)
            torch._foreach_copy_(params, parts)


# ==== toy model: the same lines in every lesson ====
SHAPE = "layers heads width context vocab".split()
SIZES = {"toy": "8 8 64 64 256", "small": "6 8 256 128 256", "gpt2": "12 12 768 1024 50304",
         "gpt2-xl": "48 25 1600 1024 50304", "7.5b": "32 34 4352 2048 50304"}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
CHOICES = {"size": SIZES, "optim": OPTIMIZERS, "dtype": DTYPES, "device": "auto cpu cuda".split()}
DEFAULTS = {"size": "toy", "optim": "adamw", "dtype": "fp32", "device": "auto", "data": np.ma.core.__file__,
            "steps": 20, "batch": 16, "accum": 1, "lr": 1e-3, "clip": 1.0, "seed": 0, "save": ""}  # fmt: skip
HELP = "--batch: of all ranks; --accum: microbatches of a rank; --clip inf: any norm; --data: file or folder"


def read_flags(arguments, *own, **limits):  # own: other parsers. limits: {name: (least, most)}
    parser = argparse.ArgumentParser(parents=own, epilog=f"{HELP}; defaults: {DEFAULTS}, and --size's shape")
    parser.error = refuse
    for name, default in (DEFAULTS | dict.fromkeys(SHAPE, 0)).items():  # 0: that of --size
        parser.add_argument(f"--{name}", default=default, type=type(default), choices=CHOICES.get(name))
    parser.set_defaults(**dict(zip(SHAPE, SIZES[parser.parse_args(arguments).size].split())))
    config = parser.parse_args(arguments)
    limits |= {"lr": (0, 1e9), "clip": (1e-9, torch.inf), "seed": (0, 1e18), "vocab": (256, 1_048_576)}
    for name, value in vars(config).items():
        least, most = limits.get(name, (1, 1_048_576))
        if type(value) in (int, float) and not least <= value <= most:
            refuse(f"--{name.replace('_', '-')} {value}: must be from {least} to {most}")
    return config


def refuse(problem):  # in a line on rank 0, for which the others wait, else torchrun may end it first
    if os.getenv("RANK", "") in "0":  # or it is not set
        sys.stderr.write(f"{Path(__file__).name}: {problem}\n")
    else:
        time.sleep(5)
    raise SystemExit(2)


def set_up(config, choices="", replicas=None):  # check, and join the world; returns device and text
    replicas = replicas or int(os.getenv("WORLD_SIZE") or 1)
    if config.batch % (replicas * config.accum):
        refuse(f"--batch {config.batch}: must be a multiple of replicas x --accum, {replicas * config.accum}")
    if config.width % config.heads:
        refuse(f"--width {config.width}: must be a multiple of --heads {config.heads}")
    gpus = torch.cuda.device_count() * (config.device != "cpu")
    if config.device == "cuda" and not gpus:
        refuse("--device cuda: no GPU is visible here; use --device cpu")
    try:  # a file is missing, or a variable of the environment
        files = sorted(filter(Path.is_file, Path(config.data).rglob("*"))) or [Path(config.data)]
        if not config.context < sum(map(os.path.getsize, files)) <= 2e9:
            refuse(f"--data {config.data}: must have more bytes than --context {config.context}, at most 2e9")
        text = bytearray().join(map(Path.read_bytes, files))
        open(config.save or "/dev/null", "ab").close()
        device = torch.device(f"cuda:{int(os.getenv('LOCAL_RANK', 0)) % gpus}" if gpus else "cpu")
        torch.cuda.set_device(device if gpus else -1)  # -1: none
        if not dist.is_initialized():
            if 0 < gpus < int(os.getenv("LOCAL_WORLD_SIZE", 1)):  # ranks share a GPU
                os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])  # NCCL refuses it on one host
            alone = () if {"RANK", "WORLD_SIZE"} & set(os.environ) else (None, None, 1, 0, dist.HashStore())
            dist.init_process_group("nccl" if gpus else "gloo", *alone)
    except (OSError, ValueError) as error:
        refuse(f"{error}; check --data {config.data} and --save {config.save}, or start it with torchrun")
    if not dist.get_rank():
        world = f"{dist.get_world_size()} ranks {dist.get_backend()}/{device.type}"
        batch = f"{config.batch} = {replicas} x {config.accum} x {config.batch // replicas // config.accum}"
        print(f"{Path(__file__).stem} | {world} | {config.size} {config.dtype} | batch {batch}{choices}")
    torch.manual_seed(config.seed)
    return device, torch.frombuffer(text, dtype=torch.uint8)


def microbatches(config, text, step, device, rank=0, replicas=1):  # (inputs, targets), int64 (b, s)
    windows = text.unfold(0, config.context + 1, 1)  # every (s + 1) bytes in a row, a view
    starts = np.random.default_rng((config.seed, step)).integers(len(windows), size=config.batch)
    tokens = windows[starts.reshape(replicas, config.accum, -1)[rank]].to(device, non_blocking=True).long()
    return zip(tokens[..., :-1], tokens[..., 1:])


class Block(nn.Module):  # pre-norm, with a heads: (b, s, h) -> (b, s, h)
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (b, s, 3, a, h/a)
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # (b, a, s, h/a) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):  # tokens (b, s) -> logits (b, s, v); the head is the embedding
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.heads, config.width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def mean_loss(logits, targets):  # mean cross-entropy, in fp32 or fp64
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())


def print_step(config, step, loss, grad_norm, started):  # each .item() waits for the device: once a step
    line = f"step {step:>2}/{config.steps} | loss {loss.item():.4f} | grad norm {grad_norm.item():.3f}"
    ms = 1e3 * (time.perf_counter() - started)
    if not dist.get_rank():
        print(f"{line} | {ms:.1f} ms | {config.batch * config.context / ms:.1f} k tok/s")


def save_weights(state_dict, path):  # at the end, on rank 0
    try:
        torch.save(state_dict, path)
    except (OSError, RuntimeError):
        refuse(f"--save {path}: cannot be written; is the disk full?")


# ==== end of the toy model ====


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
