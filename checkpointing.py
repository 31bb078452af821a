"""Activation checkpointing: keep a block's input alone, and compute the rest again when backward needs it.

Idea
    Backward needs what forward computed: 16 tensors of (B, T, D) in each transformer block. A checkpoint
    keeps the first, drops the rest, and runs the block's forward again in backward (arXiv 1604.06174).
    Selective recomputation keeps what is expensive and small, the outputs of matrix products, and computes
    again what is cheap and large: scores, softmax, GELU, norms (arXiv 2205.05198, section 5). A checkpoint
    that several ranks hold alike may be split over them, or go to the host (arXiv 1910.02054, section 6.1).

Holds
    Activations at their peak, in elements; L blocks, b sequences of T tokens, width D, u = bTD:
    none         16 L u                          with --attention math also bHTT scores a block
    full         L u, and 15 u of one block      the peak is in the backward of the last block
    selective    10 L u, and 7 u of one block    kept: the input, q, k, v, attended, its projection, up (4)
    partitioned  L u/N, and 16 u of one block
    offload      16 u of one block, and one or two u on their way; L u on the host
    Parameters, gradients and optimizer states are whole on every rank, as in single.py.

Talks
    The ranks do the same work on the same batch, as those of a tensor-parallel group do between its layers.
    Only partitioned communicates: an all-gather of u before a block is computed again.
    compute | ... forward 4 | loss | again 4 | backward 4 | again 3 | backward 3 | ...
    copies  | out 3 | out 4 |      in 4, in 3            | in 2                 | ...    (offload)

Costs
    full computes the forward a second time, but for the last matrix product of each block, which no gradient
    needs. selective computes nothing again that takes long. offload moves L u to the host and back in each
    microbatch; partitioned sends L u(N-1)/N elements.

Run
    python checkpointing.py --policy selective
    torchrun --nproc_per_node=8 checkpointing.py --size gpt2-xl --dtype bf16 --policy partitioned

Expect
    checkpointing | 1 rank gloo/cpu | 0.83 M parameters (P) | fp32 | batch 16 = 16 x 1 microbatches
    step  1/20 | loss 5.5011 | grad norm 6.577 | 212.4 ms | 4.8 k tok/s
    ...
    step 20/20 | loss 3.0858 | grad norm 1.224 | 245.1 ms | 4.2 k tok/s
    forward and backward: 311.0 ms, without checkpoints 287.4 (+8.2%); 5.50 GFLOP (+0.0%)
    held per rank     formula                           measured
      parameters      4P                     3.34 MB     3.34 MB
      gradients       4P                     3.34 MB     3.34 MB
      optimizer       8P                     6.67 MB     6.67 MB
      activations     4bTD(10L+7)           24.72 MB    24.72 MB

Left out
    Choosing what to keep by measured cost (a knapsack), CUDA graphs, a function that calls backward() itself,
    other devices' random states than those of the arguments, and what else than autocast a `with` around the
    call sets (sdpa_kernel, say: put it around backward() as well).
"""

import argparse
import functools
import json
import operator
import os
import statistics
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # torch.optim would load it later, and then it would hold on to our process group
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

# ==== toy model: the same lines in every lesson ====
SIZES = {"toy": (4, 4, 128, 64, 256), "small": (6, 8, 256, 128, 256), "gpt2": (12, 12, 768, 1024, 50257)}
SIZES |= {"gpt2-xl": (48, 25, 1600, 1024, 50257), "7.5b": (32, 34, 4352, 2048, 50257)}
SHAPE = ("layers", "heads", "width", "context", "vocab")  # text is bytes: the first 256 of the vocabulary
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def flags():
    """The parser of the flags that every lesson has."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error, add = refuse, parser.add_argument
    add("--size", default="toy", choices=SIZES, help=", ".join(SHAPE) + " together")
    for name in SHAPE:
        add("--" + name, type=int, help="in place of the size's")
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--batch", type=int, default=16, help="sequences in the global batch of an optimizer step")
    add("--accum", type=int, default=1, help="microbatches that each rank accumulates per step")
    add("--optim", default="adamw", choices=OPTIMIZERS, help="sgd shows a wrong scale, adamw hides it")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--clip", type=float, default=1.0, help="limit of the global gradient norm (0: none)")
    add("--seed", type=int, default=0, help="seed of weights and batches")
    add("--dtype", default="fp32", choices=DTYPES, help="bf16 keeps fp32 masters")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: cuda if each rank has a GPU")
    add("--data", help="text file or folder, read as bytes (none: the sources of Python's standard library)")
    add("--save", help="file for the full-precision state_dict")
    add("--json", help="file for the ledger")
    add("--trace", help="folder for a Chrome trace per rank (its first step is slow: the ledger looks on)")
    return parser


def refuse(problem):
    """End this rank with exit code 2; rank 0 says in one line what to change."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{os.path.basename(sys.argv[0])}: {problem}", file=sys.stderr)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(2)


def set_up(config):
    """Join (once) the world that torchrun describes, or a world of one. Returns the device and the text."""
    gpus, device = torch.cuda.device_count() * (config.device != "cpu"), torch.device("cpu")
    gpu_each = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if gpu_each or (gpus and config.device == "cuda"):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if gpu_each else "gloo", timeout=timedelta(minutes=10), **alone)
    for name, value in zip(SHAPE, SIZES[config.size]):
        setattr(config, name, value if getattr(config, name) is None else getattr(config, name))
    root = Path(config.data or os.path.dirname(os.__file__))
    files = [root] if root.is_file() else sorted(root.rglob("*") if config.data else root.glob("*.py"))
    files = [np.memmap(f, np.uint8, "r") for f in files if f.is_file() and f.stat().st_size]
    text = files[0] if len(files) == 1 else np.concatenate([*files, np.empty(0, np.uint8)])
    problems = [None] * dist.get_world_size()  # of all ranks: a file may be missing on one host only
    dist.all_gather_object(problems, next(find_problems(config, device, len(text)), None))
    if any(problems):
        refuse(next(filter(None, problems)))
    torch.manual_seed(config.seed)
    return device, text


def find_problems(config, device, text_bytes):
    """Yield what stands in the way of training, each in one line."""
    for name, value in vars(config).items():  # counts start at 1, other numbers at 0
        least = {"seed": 0, "prefetch": 0, "staleness": 0, "vocab": 256}.get(
            name, 1 if type(value) is int else 0
        )
        if type(value) in (int, float) and not least <= value < 2**63:
            yield f"--{name.replace('_', '-')} {value}: must be {least} or more, and below 2^63"
    if config.device == "cuda" != device.type:
        yield "--device cuda: no GPU is visible here; use --device cpu"
    if config.width % config.heads:
        yield f"--width {config.width}: must be a multiple of --heads {config.heads}"
    if config.data and not os.path.exists(config.data):
        yield f"--data {config.data}: no such file or folder"
    if text_bytes <= config.context:
        yield f"--data {config.data}: {text_bytes} bytes there, too few for --context {config.context}"
    for path in filter(None, (config.save, config.json, config.trace)):
        writable = os.access(os.path.join(Path(path).parent, "."), os.W_OK)
        wrong_kind = os.path.isfile(path) if path == config.trace else os.path.isdir(path) or path[-1] == "/"
        if dist.get_rank() == 0 and (wrong_kind or not writable):
            yield f"{path}: cannot be written; its parent folder must exist, and --trace alone is a folder"


def microbatches(config, text, step, device, rank=0, ranks=1):
    """This rank's (inputs, targets) of a step's global batch, int64 (batch / ranks / accum, T) each."""
    generator = np.random.default_rng((config.seed, step))
    starts = generator.integers(len(text) - config.context, size=config.batch)
    for own in starts.reshape(ranks, config.accum, -1)[rank]:
        tokens = torch.from_numpy(np.stack([text[i : i + config.context + 1] for i in own])).to(device).long()
        yield tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    """Pre-norm transformer block with H heads, (B, T, D) -> (B, T, D)."""

    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (B, T, 3, H, D/H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D/H) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def mean_loss(logits, targets):
    """Mean cross-entropy, fp32 at least, of logits (B, T, V) and targets (B, T)."""
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten())


class GPT(nn.Module):
    """Logits (B, T, V) of inputs (B, T), or with targets their mean loss. The head is the embedding."""

    def __init__(self, config):
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, config.width) for n in (config.vocab, config.context))
        self.blocks = nn.ModuleList(Block(config.heads, config.width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for matrix in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, inputs, targets=None):
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # (B, T, V)
        return logits if targets is None else mean_loss(logits, targets)


# ==== end of the toy model ====


class Optimizer:
    """A torch optimizer on fp32 masters of the bf16 parameters, and on the other parameters themselves."""

    def __init__(self, params, optimizer_class, **options):
        params = [p for p in params if p.requires_grad]
        self.masters = {p: p.detach().float() if p.dtype == torch.bfloat16 else p for p in params}
        self.groups = []
        for i in range(0, len(params), 16):  # so that 16 gradients at most are copied to fp32 at a time
            group = params[i : i + 16]
            self.groups.append((group, optimizer_class([self.masters[p] for p in group], **options)))

    @torch.no_grad()
    def step(self):
        for params, optimizer in self.groups:
            copied = [p for p in params if p is not self.masters[p] and p.grad is not None]
            for p in copied:
                self.masters[p].grad = p.grad.float()
            optimizer.step()
            for p in copied:
                p.copy_(self.masters[p])
                self.masters[p].grad = None

    def tensors(self):
        """What it holds beyond the model: masters, moments, step counts."""
        masters = [master for p, master in self.masters.items() if p is not master]
        return masters + tree_leaves([optimizer.state for _, optimizer in self.groups])

    def state_dict_of(self, model):
        """The model's, with masters in place of the parameters that have them."""
        tensors = model.state_dict(keep_vars=True)
        return {name: self.masters.get(tensor, tensor).detach() for name, tensor in tensors.items()}


class Surroundings:
    """The random state and autocast of this moment, to come back to."""

    def __init__(self, tensors):
        self.devices = {x.device for x in tensors if isinstance(x, torch.Tensor) and x.is_cuda}
        self.random = self._random()
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self.autocast = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds]

    def _random(self):
        return torch.get_rng_state(), {device: torch.cuda.get_rng_state(device) for device in self.devices}

    def set_random(self, random=None):
        on_cpu, on_cuda = random or self.random
        torch.set_rng_state(on_cpu)
        for device, state in on_cuda.items():
            torch.cuda.set_rng_state(state, device)

    def __enter__(self):
        self.before, self.stack = self._random(), ExitStack()
        self.set_random()
        for kind, dtype, enabled in self.autocast:
            self.stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))

    def __exit__(self, *error):
        self.stack.close()
        self.set_random(self.before)


class Inputs(torch.autograd.Function):
    """Saves tensors for a backward that never comes, so that hooks decide where they stay.

    They come back through the same hooks when its node is asked for .saved_tensors.
    """

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("nothing depends on the anchor")


class EnoughComputed(BaseException):
    """All that backward needs is there, so take() ends the forward here. (No `except Exception` stops it.)"""


class Checkpoint:
    """One call of checkpoint(): what forward keeps, and the way back to what it dropped.

    Autograd hands each tensor that it would save for backward to drop(), which returns a number in its place,
    and asks for it with restore(). The first such question runs the function again, in the surroundings of
    its first run; the same tensors come in the same order and stay until each has been asked for.
    """

    watch = staticmethod(lambda tensor: None)  # told of each tensor that is kept; for the ledger

    def __init__(self, function, args, kwargs, keep, hooks):
        self.function, self.keep = function, keep
        leaves, self.structure = tree_flatten((args, kwargs))
        tensors = tensors_in(leaves)
        self.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.learns = [leaf.requires_grad if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        self.surroundings = Surroundings(tensors)
        # A node that holds the inputs as autograd would: hooks of checkpoints around this one see them too.
        with saved_tensors_hooks(*hooks) if hooks else nullcontext():
            self.inputs = Inputs.apply(
                torch.empty(0, requires_grad=True), *map(without_graph, tensors)
            ).grad_fn
        self.saved, self.here, self.lock = [], {}, threading.RLock()
        self.outputs, self.outputs_needed = [], 0

    def drop(self, tensor):
        self.saved.append(describe(tensor))
        self.outputs_needed = len(self.outputs)  # what comes after the last saved tensor is not needed again
        return len(self.saved) - 1

    def restore(self, number):
        with self.lock:  # a CPU's and a GPU's backward may be threads of one graph
            if number not in self.here:
                self._compute_again()
            tensor, version = self.here.pop(number)
        if tensor._version != version:
            raise RuntimeError("computed again, a tensor that backward needs was changed in place")
        return tensor

    def arguments(self):
        """As the function got them, on a graph of their own."""
        tensors, leaves = iter(self.inputs.saved_tensors), list(self.others)
        for i, learns in enumerate(self.learns):
            if learns is not None:
                leaves[i] = next(tensors).detach().requires_grad_(learns)
        return tree_unflatten(leaves, self.structure)

    def _compute_again(self):
        self.here, count = {}, 0

        def take(tensor):
            nonlocal count
            if describe(tensor) != self.saved[count]:
                raise RuntimeError(f"computed again, {describe(tensor)} came in place of {self.saved[count]}")
            tensor = tensor.detach()
            self.here[count], count = (tensor, tensor._version), count + 1
            self.watch(tensor)
            if count == len(self.saved):
                raise EnoughComputed

        args, kwargs = self.arguments()
        replay = Replay(self) if self.keep else nullcontext()
        with torch.enable_grad(), self.surroundings, saved_tensors_hooks(take, lambda _: None), replay:
            try:
                self.function(*args, **kwargs)
                raise RuntimeError(f"computed again, it saved {count} tensors, not {len(self.saved)}")
            except EnoughComputed:
                pass

    def forget_outputs(self):
        """Those that nothing needs again."""
        del self.outputs[self.outputs_needed :]
        for leaf in tensors_in([result for _, result, *_ in self.outputs]):
            self.watch(leaf)


def checkpoint(function, *args, keep=(), hooks=None, **kwargs):
    """function(*args, **kwargs), which forgets what it computed, and does so again in backward.

    The arguments may be nested, and need not be tensors. The function runs twice, side effects and all; it
    may draw from torch's default random generators, but must save tensors of the same shapes for backward
    each time, or RuntimeError, and its parameters must not change in between. keep: ATen operators whose
    outputs are kept, such as EXPENSIVE, and must not change either (RuntimeError). hooks: (put, get) of its
    argument tensors, which nobody may change in place: what put(tensor) returns is kept, and get() makes a
    tensor of it again.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    once = Checkpoint(function, args, kwargs, keep, hooks)
    with saved_tensors_hooks(once.drop, once.restore), Record(once) if keep else nullcontext():
        result = function(*args, **kwargs)
    once.forget_outputs()
    return result


def describe(tensor):
    return tuple(tensor.shape), tensor.dtype, tensor.device


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def versions(tree):
    """How often each tensor has been changed in place."""
    return [tensor._version for tensor in tensors_in(tree)]


class Record(TorchDispatchMode):
    """Keeps the outputs of some operators for Replay, and the random state after those that are random."""

    def __init__(self, checkpoint):
        super().__init__()
        self.checkpoint, self.storages = checkpoint, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for i, argument in enumerate(function._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written = tensors_in(value) if argument.alias_info and argument.alias_info.is_write else ()
            if any(tensor.untyped_storage()._cdata in self.storages for tensor in written):
                raise RuntimeError(f"{function} changes in place what the checkpoint keeps")
        result = function(*args, **kwargs)
        if function in self.checkpoint.keep:
            self.storages |= {tensor.untyped_storage()._cdata for tensor in tensors_in(result)}
            random = torch.Tag.nondeterministic_seeded in function.tags
            after = Surroundings(tree_leaves(result)) if random else None
            # Without this a detach() below autograd counts changes in place anew.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                kept = tree_map(without_graph, result)
            self.checkpoint.outputs.append((function, kept, versions(kept), after))
        return result


class Replay(TorchDispatchMode):
    """Gives out what Record has kept, in its order, in place of computing it."""

    def __init__(self, checkpoint):
        super().__init__()
        self.outputs = iter(checkpoint.outputs)
        self.keep = checkpoint.keep

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function not in self.keep:
            return function(*args, **(kwargs or {}))
        recorded, result, before, after = next(self.outputs, (None,) * 4)
        if recorded is not function:
            raise RuntimeError(f"computed again, it called {function} in place of {recorded}")
        if versions(result) != before:
            raise RuntimeError(f"what the checkpoint keeps of {function} was changed in place")
        if after:
            after.set_random()
        return tree_map(without_graph, result)


def without_graph(leaf):
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


# What takes long to compute and little to keep. Not bmm, of which the scores in math attention come.
EXPENSIVE = {
    getattr(torch.ops.aten, name).default
    for name in (
        *("mm", "addmm", "convolution", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"),
        "_scaled_dot_product_cudnn_attention",
    )
}

# torch 2.13 has a new name for it, and warns of the old.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Partitioned:
    """Hooks for tensors that all ranks of `group` hold alike: each keeps 1/N (P_a of arXiv 1910.02054).

    All ranks must compute again in the same order, as each time they gather.
    """

    def __init__(self, group=None):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def put(self, x):
        share = -(-x.numel() // self.ranks)
        own = x.new_zeros(share)  # the last one may be padded
        piece = x.detach().flatten()[self.rank * share : (self.rank + 1) * share]
        own[: len(piece)] = piece
        Checkpoint.watch(own)
        return own, torch.empty_like(x, device="meta")  # its shape and strides

    def get(self, kept):
        own, like = kept
        whole = own.new_empty(self.ranks * len(own))
        all_gather(whole, own, group=self.group)
        x = whole[: like.numel()].view(like.shape)
        x = x if like.is_contiguous() else torch.empty_like(like, device=x.device).copy_(x)
        Checkpoint.watch(x)
        return x


class Ticket:
    """What stands in place of a tensor that Offloaded has moved."""

    def __init__(self, host, start, x, before):
        self.host, self.place, self.coming = host, slice(start, start + x.nbytes), None
        self.like = torch.empty_like(x, device="meta"), x.device
        self.before = weakref.ref(before) if before else lambda: None

    def __del__(self):
        self.host.tickets -= 1


class Offloaded:
    """Hooks that move tensors to the host and fetch them one ahead (P_a+cpu of arXiv 1910.02054).

    On a GPU copies go to pinned memory, on a stream of their own; on a CPU to a file, on a thread of its own.
    capacity: the most bytes there at a time. Room is used again when all is back, so schedules that always
    keep some checkpoint are not for this. OSError if the folder has no room for that.
    """

    def __init__(self, device, capacity, folder=None):
        self.tickets, self.top, self.last, self.stream = 0, 0, None, None
        if device.type == "cuda":
            self.memory = torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
            self.stream = torch.cuda.Stream(device)
        else:
            with tempfile.TemporaryFile(dir=folder) as file:  # it has no name, and goes with its last user
                reserve = getattr(os, "posix_fallocate", lambda file, _, size: os.truncate(file, size))
                reserve(file.fileno(), 0, capacity)
                self.memory = torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(capacity,)))
            self.thread = ThreadPoolExecutor(1)

    def _move(self, ticket, x, out):
        """Copy x to its place or back, beside the computation, in line. Returns a function that waits."""

        def move():
            room = self.memory[ticket.place].view(x.dtype).view(x.shape)
            (room if out else x).copy_(x if out else room, non_blocking=True)

        if self.stream is None:
            return self.thread.submit(move).result
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            move()
            done = self.stream.record_event()
        x.record_stream(self.stream)  # its memory is not for others before this is done
        return lambda: torch.cuda.current_stream().wait_event(done)

    def put(self, x):
        last = self.last and self.last()
        if last:  # so that no more than one is on its way out when the next one starts
            last.wait()
        if self.tickets == 0:
            self.top = 0
        start, self.top = self.top, self.top + -(-x.nbytes // 64) * 64
        if self.top > len(self.memory):
            raise RuntimeError(f"{self.top} bytes to be kept on the host, but room for {len(self.memory)}")
        self.tickets += 1
        ticket = Ticket(self, start, x, last)
        ticket.wait, self.last = self._move(ticket, x.detach(), out=True), weakref.ref(ticket)
        return ticket

    def _fetch(self, ticket):
        if ticket.coming is None:
            like, device = ticket.like
            x = torch.empty_like(like, device=device)
            ticket.coming = x, self._move(ticket, x, out=False)
            Checkpoint.watch(x)

    def get(self, ticket):
        self._fetch(ticket)
        before = ticket.before()
        if before:
            self._fetch(before)
        (x, wait), ticket.coming = ticket.coming, None
        wait()
        return x


class CheckpointedGPT(GPT):
    """A GPT that checkpoints each so many-th block (0: none)."""

    every, options = 0, {}

    def forward(self, inputs, targets=None):
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for i, block in enumerate(self.blocks):
            chosen = self.every and i % self.every == 0
            x = checkpoint(block, x, **self.options) if chosen else block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return logits if targets is None else mean_loss(logits, targets)


# ==== ledger: the same lines in every lesson ====
# {operator: (what it does, passes round the ring)}; gloo has its reduce-scatter from an all-to-all.
RING = {"allreduce": ("all-reduce", 2), "reduce_scatter": ("reduce-scatter", 1), "send": ("send", 0)}
RING |= {"alltoall": ("reduce-scatter", 1), "allgather": ("all-gather", 1), "broadcast": ("broadcast", 0)}


class Ledger(TorchDispatchMode):
    """Prints the run. While on, it sees every operator: bytes alive, by name, and given to collectives."""

    one, held, sent = "rank", "held per rank", "sent per rank and step (ring bytes)"
    profile, data_parallel = torch.profiler.profile, True

    def __init__(self, lesson, config, device, model, gradients=None, threads=0):
        super().__init__()
        params = list(model.parameters())  # once: to walk the modules at every operator is slow
        self.gradients = gradients or (lambda: [p.grad for p in params])
        self.config, self.clock = config, time.perf_counter()
        self.known, self.alive, self.seen = {}, Counter(), Counter()
        ranks, backend = (threads, "threads") if threads else (dist.get_world_size(), dist.get_backend())
        P = sum(p.numel() for p in params)
        self.result = {"lesson": lesson, "world_size": ranks, "backend": backend, "device": device.type}
        self.result |= {"dtype": config.dtype, "n_params": P, "losses": [], "grad_norms": [], "step_ms": []}
        self.say = print if dist.get_rank() == 0 else lambda line: None
        who = f"{ranks} {self.one}{'s'[: ranks - 1]}"
        share = f"{config.batch // ranks // config.accum} per {self.one} x {config.accum} x {who}"
        share = (
            share if self.data_parallel else f"{config.batch // config.accum} x {config.accum} microbatches"
        )
        size = f"{P / 1e6:.2f} M parameters (P) | {config.dtype} | batch {config.batch} = {share}"
        self.say(f"{lesson} | {who} {backend}/{device.type} | {size}")
        self.watch("parameters", [*params, *model.buffers()])
        if config.trace:
            keep = torch.profiler.tensorboard_trace_handler(config.trace, f"{lesson}-rank{dist.get_rank()}")
            self.profiler = self.profile(on_trace_ready=keep)
            self.profiler.start()

    def watch(self, name, tensors, count=True):
        """Count the storages of these tensors as `name` for as long as they live."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), name)
        if count:
            self.seen |= self.alive | Counter(peak_bytes=self.alive.total())

    def _note(self, storage, name="other"):
        key, size = id(storage), storage.nbytes()
        if key not in self.known:
            self.known[key] = "other", 0, weakref.ref(storage, lambda _: self._forget(key))
        old, before, life = self.known[key]
        name = name if old == "other" else old
        if (name, size) != (old, before):
            self.alive[old, "measured"] -= before
            self.alive[name, "measured"] += size
            self.known[key] = name, size, life

    def _forget(self, key):
        name, size, _ = self.known.pop(key)
        self.alive[name, "measured"] -= size

    def __enter__(self):
        resize = torch.UntypedStorage.resize_  # no operator, so it is seen in this way

        def resize_and_note(storage, size):
            resize(storage, size)
            self._note(storage)

        torch.UntypedStorage.resize_ = resize_and_note
        return super().__enter__()

    def __exit__(self, *error):
        del torch.UntypedStorage.resize_
        super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.watch("gradients", self.gradients(), count=False)
        self.watch("other", tree_leaves((args, result)))
        kind = next((kind for kind in RING if function.namespace == "c10d" and kind in function.name()), None)
        if kind:
            name, passes = RING[kind]
            ranks = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject)).size()
            payload = max(sum(getattr(x, "nbytes", 0) for x in tree_leaves(arg)) for arg in args[:2])
            wire = payload * passes * (ranks - 1) / ranks if passes else payload
            self.seen.update({(name, "calls"): 1, (name, "payload"): payload, (name, "wire"): wire})
        return result

    def log(self, step, loss, grad_norm):
        """Print a step. Each .item() waits for the device: once a step, at its end."""
        self.result["losses"].append(loss.item())
        self.result["grad_norms"].append(grad_norm.item())
        ms, self.clock = 1e3 * (time.perf_counter() - self.clock), time.perf_counter()
        self.result["step_ms"] += [ms] if step > 1 else []  # the first is measured, not timed
        speed = f"{ms:.1f} ms | {self.config.batch * self.config.context / ms:.1f} k tok/s"
        at = f"step {step:>{len(str(self.config.steps))}}/{self.config.steps}"
        self.say(f"{at} | loss {loss:.4f} | grad norm {grad_norm:.3f} | {speed}")

    def close(self, state_dict, held, sent):
        """Print the most that a rank held and sent, beside {name: (formula, bytes)}; write the files."""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.seen)
        seen = functools.reduce(operator.or_, everyone)  # the larger of each two counts
        gpu = self.result["device"] == "cuda"
        self.result["peak_bytes"] = torch.cuda.max_memory_allocated() if gpu else seen["peak_bytes"]
        heading = f"{self.held:<18}{'formula':<18}{'':>12}{'measured':>12}"
        for part, rows, title in ("held", held, heading), ("sent", sent, self.sent):
            self.result[part], keys = {}, ("measured",) if rows is held else ("calls", "payload", "wire")
            if rows:
                self.say(title)
            for name, (formula, size) in rows.items():
                row = {key: round(seen[name, key]) for key in keys}
                self.result[part][name] = row | {"formula": size}
                self.say(f"  {name:<16}{formula:<18}{size / 1e6:>9.2f} MB{row[keys[-1]] / 1e6:>9.2f} MB")
        if self.config.trace:
            self.profiler.stop()
        if self.config.json and dist.get_rank() == 0:
            Path(self.config.json).write_text(json.dumps(self.result))
        if self.config.save and dist.get_rank() == 0:
            state_dict = {name: tensor.cpu() for name, tensor in state_dict.items()}
            torch.save(state_dict, self.config.save + ".tmp")
            os.replace(self.config.save + ".tmp", self.config.save)  # whole or not at all
        return self.result


# ==== end of the ledger ====


def count_flash(q, k, v, *rest, **options):
    """For FlopCounterMode, which knows the other kernels of attention. As if each token attended to all."""
    return sdpa_flop_count(q, k, v)


def count_flash_backward(gradient, q, k, v, *rest, **options):
    return sdpa_backward_flop_count(gradient, q, k, v)


FLASH_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: count_flash,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: count_flash_backward,
}


class ActivationLedger(Ledger):
    """Also counts what is kept for backward, and what is computed again."""

    data_parallel = False

    def save(self, tensor):
        if tensor.is_floating_point():
            self.watch("activations", [tensor])
        return tensor

    def __enter__(self):
        Checkpoint.watch, self.hooks = self.save, saved_tensors_hooks(self.save, lambda tensor: tensor)
        self.hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.hooks.__exit__(*error)
        Checkpoint.watch = staticmethod(lambda tensor: None)

    def add_costs(self, model, batch):
        """Time and FLOPs of forward and backward, with the checkpoints and without, in turns."""
        chosen, times, flops = model.every, defaultdict(list), {}
        finish = torch.cuda.current_stream().synchronize if batch[0].is_cuda else lambda: None
        for counter in (FlopCounterMode(display=False, custom_mapping=FLASH_ON_CPU), *4 * [nullcontext()]):
            for name, model.every in ("none", 0), ("policy", chosen):
                finish()
                start = time.perf_counter()
                with counter:
                    model(*batch).backward()
                finish()
                times[name].append(1e3 * (time.perf_counter() - start))
                if len(times[name]) == 1:  # that one counted
                    flops[name] = counter.get_total_flops()
                model.zero_grad()
        times = {name: statistics.median(ms[1:]) for name, ms in times.items()}
        self.result |= {"forward_backward_ms": times, "flops": flops}
        more = times["policy"] / times["none"] - 1, flops["policy"] / flops["none"] - 1
        speed = f"{times['policy']:.1f} ms, without checkpoints {times['none']:.1f} ({more[0]:+.1%})"
        self.say(f"forward and backward: {speed}; {flops['policy'] / 1e9:.2f} GFLOP ({more[1]:+.1%})")


POLICIES = ("none", "full", "selective", "partitioned", "offload")
KERNELS = {"auto": None, "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}


def parse(arguments=None):
    """The flags, from the command line if no arguments are given."""
    parser = flags()
    parser.add_argument("--policy", default="full", choices=POLICIES, help="what becomes of activations")
    parser.add_argument("--every", type=int, default=1, help="checkpoint each so many-th block")
    parser.add_argument("--attention", default="auto", choices=KERNELS, help="math keeps scores (B, H, T, T)")
    parser.add_argument(
        "--folder", help="for what is offloaded from a CPU (none: the system's temporary one)"
    )
    return parser.parse_args(arguments)


def apply_policy(model, config, device):
    """Set up the model's checkpoints as the flags say."""
    model.every = 0 if config.policy == "none" else config.every
    if config.policy == "selective":
        model.options = {"keep": EXPENSIVE}
    elif config.policy == "partitioned":
        hooks = Partitioned()
        model.options = {"hooks": (hooks.put, hooks.get)}
    elif config.policy == "offload":
        each = config.batch // config.accum * config.context * config.width * DTYPES[config.dtype].itemsize
        room, problem = -(-config.layers // config.every) * (each + 63), None
        try:
            hooks = Offloaded(device, room, config.folder)
            model.options = {"hooks": (hooks.put, hooks.get)}
        except (OSError, RuntimeError) as error:
            where = f"--policy offload --folder {config.folder}"
            problem = f"{where}: {room / 1e6:.1f} MB of activations cannot go there: {error}"
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if any(problems):
            refuse(next(filter(None, problems)))


def kept_and_again(config, w, wide, statistic):
    """Bytes that a block with a checkpoint keeps, that it computes again, and that one without keeps."""
    tokens = config.batch // config.accum * config.context
    u = w * tokens * config.width
    norms = 4 * statistic * tokens  # a mean and a deviation for each token, twice
    if config.attention == "math":  # it keeps copies of q, k and v, and the softmax of the scores
        attention = 3 * u * wide // w + wide * tokens * config.heads * config.context
        selected, cheap = 9 * u, 8 * u + attention + norms  # qkv, proj, up | norms, attended, sum, GELU
    else:
        attention = 3 * u + wide * tokens * config.heads  # q, k, v, a logarithm for each row of scores
        selected, cheap = 7 * u + attention, 7 * u + norms
    whole = 13 * u + attention + norms
    N = dist.get_world_size()
    return {
        "none": (whole, 0, whole),
        "full": (u, whole - u, whole),
        "selective": (selected, cheap, whole),
        "partitioned": (-(-u // w // N) * w, whole, whole),
        "offload": (0, whole, whole),
    }[config.policy]


def formulas(config, device, P):
    """What a rank holds at the most and sends in a step: {name: (formula, bytes)}, twice."""
    w, N, L = DTYPES[config.dtype].itemsize, dist.get_world_size(), config.layers
    wide = max(w, 4)
    s = 2 * wide * (config.optim == "adamw") + 4 * (w == 2)  # two moments, a master
    held = {"parameters": (f"{w}P", w * P), "gradients": (f"{w}P", w * P), "optimizer": (f"{s}P", s * P)}
    statistic = wide if device.type == "cuda" else w
    kept, again, whole = kept_and_again(config, w, wide, statistic)
    tokens = config.batch // config.accum * config.context
    u = w * tokens * config.width
    last = 2 * u + 2 * statistic * tokens + wide * tokens * config.vocab + wide  # norm, head, loss
    chosen = [config.policy != "none" and i % config.every == 0 for i in range(L)]
    blocks = [kept if each else whole for each in chosen]
    most = sum(blocks) + last
    for i in (i for i in range(L) if chosen[i]):  # backward is at block i, whose checkpoint is still there
        ahead = u if config.policy == "offload" and any(chosen[:i]) else 0
        most = max(most, sum(blocks[: i + 1]) + again + ahead)
    pattern = {
        "none": "(16L+2)",
        "full": "(L+15)",
        "selective": "(10L+7)",
        "partitioned": "(L/N+16)",
        "offload": "17",
    }
    plain = config.every == 1 and config.attention != "math"
    name = pattern[config.policy] if plain else f"{most / u:.2f} x "
    held["activations"] = f"{w}bTD{name}" if plain else f"{name}{w}bTD", round(most)
    wire = config.accum * sum(chosen) * kept * (N - 1)
    gathered = {"all-gather": (f"{w}LBTD(N-1)/N", wire)}
    return held, gathered if config.policy == "partitioned" else {}


def train(config):
    """Train as the flags say. Returns what --json writes."""
    device, text = set_up(config)
    if config.batch % config.accum:
        refuse(f"--batch {config.batch}: must be a multiple of --accum {config.accum}")
    model = CheckpointedGPT(config).to(device, DTYPES[config.dtype])
    apply_policy(model, config, device)
    optimizer = Optimizer(model.parameters(), OPTIMIZERS[config.optim], lr=config.lr, fused=True)
    ledger = ActivationLedger("checkpointing", config, device, model)
    ledger.result |= {name: getattr(config, name) for name in ("policy", "every", "attention", "context")}
    kernel = KERNELS[config.attention]
    with sdpa_kernel(kernel) if kernel else nullcontext():
        for step in range(1, config.steps + 1):
            with ledger if step == 1 else nullcontext():
                loss = 0
                for batch in microbatches(config, text, step, device):
                    # Gradients add up over microbatches and we want their mean; each is a mean already.
                    microloss = model(*batch) / config.accum
                    microloss.backward()
                    loss += microloss.detach()
                grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or float("inf"))
                optimizer.step()
                model.zero_grad()
            ledger.log(step, loss, grad_norm)
        ledger.watch("optimizer", optimizer.tensors())
        ledger.add_costs(model, batch)
    return ledger.close(optimizer.state_dict_of(model), *formulas(config, device, ledger.result["n_params"]))


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
