"""Tensor parallelism: each layer's matrices are split over the ranks, which all work on the same batch.

Idea
    An MLP is Z = f(X A) B. Split A by columns and B by rows: rank r computes f(X A_r) B_r alone, and the sum
    over ranks is Z. So a column-parallel layer, then a row-parallel one, then one all-reduce. Attention
    splits in the same way, by heads (Megatron-LM, arXiv 1909.08053, section 3). Between two such pairs every
    rank does the same; --sequence-parallel splits that too, by tokens (arXiv 2205.05198, section 4.2).

Holds
    S/N + R of the P = S + R parameters, where R counts norms, row-parallel biases and positions; so too of
    gradients and optimizer states. Of a layer's activations bTD(4 + 12/N) elements, as inputs of norms and of
    column-parallel layers are whole, or bTD 16/N with --sequence-parallel. (b sequences in a microbatch, B in
    a step, of T tokens; width D.) No rank has (b, T, V): logits, softmax and gradient stay split.

Talks
    forward   norm | qkv attention proj | all-reduce | norm | up gelu down | all-reduce
    backward  a column-parallel layer has the gradient of its input first, and while an all-reduce sums that
              over the ranks, computes the gradients of its weight and bias:
              compute | ... down  gelu  up: of x | up: of weights | norm  proj  attention  qkv: of x | ...
              network |                          | all-reduce     |                                  | ...
    with --sequence-parallel each all-reduce is its two halves, a reduce-scatter here and an all-gather there;
    a column-parallel layer keeps its shard of x, and gathers it again while it computes the gradient of x.

Costs
    4 all-reduces of bTD elements a layer and microbatch, 8bTD(N-1)/N on a ring, two of which nothing hides,
    so N should be no more than the GPUs of a host. --sequence-parallel sends the same and the second
    gathering, 10bTD(N-1)/N, of which 4 are hidden. Query, key and value are one layer here, or each of the
    three would sum up a gradient of its own. Embedding and head, split by the vocabulary, add 2 all-reduces,
    the loss 3bT numbers. (A rank looks up the tokens whose rows it has; the sum over ranks is the embedding.)

Run
    torchrun --nproc_per_node=2 tensor_parallel.py
    torchrun --nproc_per_node=8 tensor_parallel.py --size gpt2-xl --heads 32 --dtype bf16 --sequence-parallel

Expect
    tensor_parallel | 2 ranks gloo/cpu | 0.83 M parameters (P) | fp32 | batch 16 = 16 x 1 microbatches
    step  1/20 | loss 5.5011 | grad norm 6.577 | 3114.9 ms | 0.3 k tok/s
    ...
    step 20/20 | loss 3.0858 | grad norm 1.224 | 151.9 ms | 6.7 k tok/s
    held per rank     formula                           measured
      parameters      4(S/N+R)               1.69 MB     1.69 MB
      gradients       4(S/N+R)               1.69 MB     1.69 MB
      optimizer       8(S/N+R)               3.38 MB     3.38 MB
      activations     4bTD(4L+2+12L/N)      22.65 MB    22.65 MB
    sent per rank and step (ring bytes)
      all-reduce      8(4L+2)BTD(N-1)/N      9.45 MB     9.45 MB

Left out
    Data parallelism beside it, hiding the forward's collectives (by halves of the batch), weights made in
    shards rather than split from a whole model, and dropout: where tensors are split, each rank needs a
    seed of its own, and where every rank does the same, all need the same one.
"""

import argparse
import functools
import json
import operator
import os
import re
import sys
import time
import weakref
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # torch.optim would load it later, and then it would hold on to our process group
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


# torch 2.13 has new names for these two, and warns of the old.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
nccl_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TensorGroup:
    """The ranks that split layers among them, and what they send each other.

    Each start_...() launches a collective and returns a function that waits for its result (on NCCL the
    stream waits, not the host).
    """

    def __init__(self, sequence_parallel=False, overlap=True, group=None):
        self.sequence_parallel, self.overlap, self.group = sequence_parallel, overlap, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def start_all_reduce(self, x):
        """The sum over ranks, in place of x."""
        work = dist.all_reduce(x, group=self.group, async_op=True)

        def wait():
            work.wait()
            return x

        return wait

    def start_all_gather(self, x, dim=1):
        """The ranks' x one after the other: along the sequence (B, T/N, D) -> (B, T, D)."""
        pieces = x.new_empty(self.ranks, *x.shape)
        work = all_gather(pieces.flatten(0, 1), x.contiguous(), group=self.group, async_op=True)

        def wait():
            work.wait()
            return pieces.movedim(0, dim).flatten(dim, dim + 1)

        return wait

    def start_reduce_scatter(self, x):
        """This rank's tokens of the sum over ranks: (B, T, D), partial -> (B, T/N, D)."""
        pieces = x.unflatten(1, (self.ranks, -1)).movedim(1, 0).contiguous()  # (N, B, T/N, D)
        on_gloo = dist.get_backend(self.group) == "gloo"
        received = torch.empty_like(pieces if on_gloo else pieces[0])
        if on_gloo:  # its own is an all-reduce and a slice: to sum up an all-to-all sends half of that
            work = dist.all_to_all_single(received, pieces, group=self.group, async_op=True)
        else:
            work = nccl_reduce_scatter(received, pieces, group=self.group, async_op=True)

        def wait():
            work.wait()
            return received.sum(0) if on_gloo else received

        return wait

    def start_sum(self, partial):
        """Start to sum partial results over ranks: for the whole, or for this rank's tokens of it."""
        return (self.start_reduce_scatter if self.sequence_parallel else self.start_all_reduce)(partial)


class Pair(torch.autograd.Function):
    """A function forward, and another for the gradient backward.

    All ranks compute the same loss, and each calls backward(). Yet gradients are not N times too large: of a
    tensor that all ranks have alike, each rank's gradient is the whole one; of a partial sum or of a shard,
    its own. Wherever forward changes from one kind to the other, backward changes back: it is its transpose.
    """

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.take_back, y = backward, forward(x)
        if y is x:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return ctx.take_back(gradient), None, None


def copy(x, tp):
    """Identity forward, all-reduce backward: a whole x enters a split region (Megatron's f)."""
    return Pair.apply(x, lambda x: x.view_as(x), lambda gradient: tp.start_all_reduce(gradient.clone())())


def reduce(x, tp):
    """All-reduce forward, identity backward: partial sums leave a split region (Megatron's g).

    In place: a matrix product, whose output x is, needs it no more.
    """
    return Pair.apply(x, lambda x: tp.start_all_reduce(x)(), lambda gradient: gradient)


def gather_sequence(x, tp):
    """All-gather forward, reduce-scatter backward: (B, T/N, D) -> (B, T, D) enters a split region."""
    return Pair.apply(x, lambda x: tp.start_all_gather(x)(), lambda g: tp.start_reduce_scatter(g)())


def scatter_sequence(x, tp):
    """Reduce-scatter forward, all-gather backward: (B, T, D), partial -> (B, T/N, D) leaves one."""
    return Pair.apply(x, lambda x: tp.start_reduce_scatter(x)(), lambda g: tp.start_all_gather(g)())


def split_features(x, tp):
    """Split forward, all-gather backward: (..., D), alike on all ranks -> (..., D/N)."""
    last = x.dim() - 1
    return Pair.apply(
        x, lambda x: x.chunk(tp.ranks, last)[tp.rank].clone(), lambda g: tp.start_all_gather(g, last)()
    )


def gather_features(x, tp):
    """All-gather forward, split backward: (..., D/N) -> (..., D), alike on all ranks."""
    last = x.dim() - 1
    return Pair.apply(x, lambda x: tp.start_all_gather(x, last)(), lambda g: g.chunk(tp.ranks, last)[tp.rank])


class OverlappedLinear(torch.autograd.Function):
    """copy() or gather_sequence(), then F.linear, whose collectives run while backward computes."""

    @staticmethod
    def forward(ctx, x, weight, bias, tp):
        ctx.tp = tp
        # With sequence_parallel x is a shard, and what is gathered from it may go.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return F.linear(tp.start_all_gather(x)() if tp.sequence_parallel else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # (B, T, F/N)
        (x, weight), tp = ctx.saved_tensors, ctx.tp
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        gather = tp.start_all_gather(x) if tp.sequence_parallel and of_weight else lambda: x
        sum_over_ranks = tp.start_sum(gradient @ weight) if of_x else lambda: None
        rows, x = gradient.flatten(0, -2), gather()
        del gather  # which holds what has come, in pieces
        weight_gradient = rows.t() @ x.flatten(0, -2) if of_weight else None
        bias_gradient = rows.sum(0) if of_bias else None
        return sum_over_ranks(), weight_gradient, bias_gradient, None


def column_parallel(x, weight, bias, tp):
    """x, whole or with sequence_parallel this rank's tokens -> (B, T, F/N), this rank's features."""
    if tp.overlap and not torch.is_autocast_enabled(x.device.type):  # which knows F.linear alone
        return OverlappedLinear.apply(x, weight, bias, tp)
    return F.linear(gather_sequence(x, tp) if tp.sequence_parallel else copy(x, tp), weight, bias)


def leave(partial, tp):
    """(B, T, D), partial: summed over ranks -> whole, or with sequence_parallel this rank's tokens."""
    return scatter_sequence(partial, tp) if tp.sequence_parallel else reduce(partial, tp)


class Split(nn.Module):
    """A layer of which this rank has 1/N. layout: {name of a split parameter: (dim, parts, whole size)}."""

    def __init__(self, tp):
        super().__init__()
        self.tp, self.layout = tp, {}

    def keep(self, name, param, dim, parts=1, pad=False):
        """Make this rank's 1/N of each of `parts` parts of a parameter, along a dim, its own parameter."""
        if param is None:
            return self.register_parameter(name, None)
        size, ranks = param.shape[dim], self.tp.ranks
        if size % (parts * ranks) and not pad:
            raise ValueError(f"{name} has {size} features in {parts} parts, not a multiple of {ranks} ranks")
        padding = param.new_zeros(-size % ranks if pad else 0, *param.shape[1:])
        whole = torch.cat([param.detach(), padding])
        own = whole.unflatten(dim, (parts, ranks, -1)).select(dim + 1, self.tp.rank)
        own = own.flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)
        self.layout[name] = dim, parts, size
        return self.register_parameter(name, nn.Parameter(own, param.requires_grad))

    def join(self, name, shard):
        """On rank 0 the whole of which keep() took this rank's shard, on the CPU; else None."""
        dim, parts, size = self.layout[name]
        shards = [torch.empty_like(shard) for _ in range(self.tp.ranks)] if self.tp.rank == 0 else None
        dist.gather(shard, shards, group_dst=0, group=self.tp.group)
        if shards:
            whole = torch.stack([shard.unflatten(dim, (parts, -1)) for shard in shards], dim + 1)
            return whole.flatten(dim, dim + 2).narrow(dim, 0, size).cpu()
        return None


class ColumnParallelLinear(Split):
    """A linear layer with 1/N of its output features (arXiv 1909.08053, section 3).

    parts: matrices side by side in the layer (3: query, key and value), each of which is split.
    gather_output: return (B, T, F), of all ranks, in place of (B, T, F/N).
    """

    def __init__(self, linear, tp, parts=1, gather_output=False):
        super().__init__(tp)
        if gather_output and parts > 1:
            raise ValueError("gather_output would mix up the parts of a layer of several")
        self.gather_output = gather_output
        self.keep("weight", linear.weight, 0, parts)
        self.keep("bias", linear.bias, 0, parts)

    def forward(self, x):
        y = column_parallel(x, self.weight, self.bias, self.tp)
        return gather_features(y, self.tp) if self.gather_output else y


class RowParallelLinear(Split):
    """A linear layer with 1/N of its input features; all ranks have its bias.

    split_input: take (B, T, F), alike on all ranks, in place of (B, T, F/N).
    """

    def __init__(self, linear, tp, split_input=False):
        super().__init__(tp)
        self.split_input, self.bias = split_input, linear.bias
        self.keep("weight", linear.weight, 1)

    def forward(self, x):
        x = split_features(x, self.tp) if self.split_input else x
        y = leave(F.linear(x, self.weight), self.tp)
        # Its bias once, after the sum, or it would be added N times.
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabParallelEmbedding(Split):
    """An embedding with 1/N of the vocabulary, rounded up: the last rows may be padding. Also a tied head."""

    def __init__(self, embedding, tp):
        super().__init__(tp)
        options = embedding.padding_idx, embedding.max_norm, embedding.scale_grad_by_freq, embedding.sparse
        if options != (None, None, False, False):
            raise ValueError("an embedding with padding_idx, max_norm, scale_grad_by_freq or sparse set")
        self.keep("weight", embedding.weight, 0, pad=True)

    def forward(self, tokens):  # (B, T) -> (B, T, D), or (B, T/N, D)
        own = tokens - self.tp.rank * len(self.weight)
        elsewhere = (own < 0) | (own >= len(self.weight))
        found = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return leave(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp)

    def logits(self, x):
        """This rank's, (B, T, V/N) with padding, of a head that has the same weight."""
        return column_parallel(x, self.weight, None, self.tp)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """See vocab_parallel_cross_entropy()."""

    @staticmethod
    def forward(ctx, logits, targets, vocab, tp):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        share, first = logits.shape[-1], tp.rank * logits.shape[-1]
        if first + share > vocab:  # padding is no word
            padding = torch.arange(share, device=wide.device) >= vocab - first
            wide = wide.masked_fill(padding, -torch.inf)
        largest = wide.amax(-1)  # (B, T)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=tp.group)
        shifted = wide - largest.unsqueeze(-1)
        own = targets - first
        elsewhere = (own < 0) | (own >= share)
        own = own.masked_fill(elsewhere, 0).unsqueeze(-1)
        of_target = shifted.gather(-1, own).squeeze(-1).masked_fill(elsewhere, 0)
        softmax = shifted.exp_()
        total, of_target = tp.start_all_reduce(torch.stack([softmax.sum(-1), of_target]))()
        softmax /= total.unsqueeze(-1)
        ctx.save_for_backward(softmax, own, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - of_target

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # (B, T)
        softmax, own, elsewhere = ctx.saved_tensors
        of_logits = softmax * gradient.unsqueeze(-1)
        of_logits.scatter_add_(-1, own, -gradient.masked_fill(elsewhere, 0).unsqueeze(-1))
        return of_logits.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits, targets, vocab, tp):
    """Cross-entropy (B, T), in fp32 at least, of this rank's logits (B, T, V/N) and targets (B, T).

    No rank sees another's logits: largest ones, sums of exponentials and the targets' logits are reduced. All
    targets count; there is no ignore_index.
    """
    return VocabParallelCrossEntropy.apply(logits, targets, vocab, tp)


class ParallelGPT(GPT):
    """A GPT that knows of the ranks in two places: its tokens may be a share, and its logits are one."""

    def forward(self, inputs, targets=None):
        tp, positions = self.tokens.tp, self.positions.weight[: inputs.shape[1]]
        if tp.sequence_parallel:
            positions = positions.chunk(tp.ranks)[tp.rank]
        x = self.tokens(inputs) + positions
        for block in self.blocks:
            x = block(x)
        logits, vocab = self.tokens.logits(self.norm(x)), self.tokens.layout["weight"][-1]
        if targets is None:
            return gather_features(logits, tp)[..., :vocab]
        return vocab_parallel_cross_entropy(logits, targets, vocab, tp).mean()


def split_heads(block, tp):
    """Of a block's H attention heads, this rank has H/N."""
    if block.heads % tp.ranks:
        raise ValueError(f"{block.heads} attention heads, not a multiple of {tp.ranks} ranks")
    block.heads //= tp.ranks
    return block


PLAN = {  # {pattern of names: what takes a module and the group, and returns what stands in its place}
    r"tokens": VocabParallelEmbedding,
    r"blocks\.\d+": split_heads,
    r"blocks\.\d+\.qkv": functools.partial(ColumnParallelLinear, parts=3),
    r"blocks\.\d+\.(proj|down)": RowParallelLinear,
    r"blocks\.\d+\.up": ColumnParallelLinear,
}


class TensorParallel(nn.Module):
    """Splits layers of `module`, in place, over the ranks of `group`, by a plan such as PLAN.

    All ranks get rank 0's weights and buffers, then keep their share; make the optimizer afterwards. After
    the last backward() of a step clip_grad_norm_() must follow, once: it completes the gradients. What else
    learns between a column- and a row-parallel layer enters by copy(weight, tp). With sequence_parallel it
    enters as it is, and what is not split must work on this rank's tokens, (B, T/N, D), as in ParallelGPT.
    Raises ValueError for what N does not divide, a pattern that fits no name, and a split parameter that is
    tied to another; the module is then spoilt.
    """

    def __init__(self, module, plan, sequence_parallel=False, overlap=True, group=None):
        super().__init__()
        self.module, self.tp = module, TensorGroup(sequence_parallel, overlap, group)
        for tensor in (*module.parameters(), *module.buffers()):
            # A copy, as gloo's thread may hold on to what it sent for a while.
            whole = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(whole, group_src=0, group=group)
            tensor.detach().copy_(whole)
        before = dict(module.named_parameters(remove_duplicate=False))
        for pattern, style in plan.items():
            names = [name for name, _ in module.named_modules() if re.fullmatch(pattern, name)]
            if not names:
                raise ValueError(f"no module's name is {pattern}")
            for name in names:
                module.set_submodule(name, style(module.get_submodule(name), self.tp))
        owners, after = Counter(before.values()), dict(module.named_parameters(remove_duplicate=False))
        if any(owners[before[name]] > 1 and after[name] is not before[name] for name in before):
            raise ValueError("a parameter that is to be split is tied to another layer's")
        layers = [submodule for submodule in module.modules() if isinstance(submodule, Split)]
        self.split = {layer.get_parameter(name) for layer in layers for name in layer.layout}
        self.replicated = [p for p in module.parameters() if p not in self.split]

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def _sum_replicated(self):
        """Each rank has heard of its own tokens: add up the gradients of what all ranks have."""
        learning = [p for p in self.replicated if p.grad is not None]
        if learning:
            flat = torch.cat([p.grad.flatten() for p in learning])  # in the widest of their dtypes
            dist.all_reduce(flat, group=self.tp.group)
            for p, gradient in zip(learning, flat.split([p.numel() for p in learning])):
                p.grad.copy_(gradient.view_as(p))

    def clip_grad_norm_(self, max_norm):
        """Complete the gradients, and scale them to a global norm of at most max_norm (0: any).

        Returns the norm before: of each rank's shards, and of what all have once.
        """
        if self.tp.sequence_parallel:
            self._sum_replicated()
        squares = torch.zeros(2, dtype=torch.double, device=next(self.parameters()).device)
        learning = [p for p in self.parameters() if p.grad is not None]
        for p in learning:
            wide = torch.promote_types(p.dtype, torch.float32)
            squares[int(p in self.split)] += torch.linalg.vector_norm(p.grad, dtype=wide).double().square()
        dist.all_reduce(squares[1], group=self.tp.group)
        norm = squares.sum().sqrt()
        if max_norm:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1)
            for p in learning:
                p.grad.mul_(scale)
        return norm

    def gather(self, state_dict):
        """On rank 0 (elsewhere empty) the whole module's state_dict, from module.state_dict() or the like."""
        whole = {}
        for name, tensor in state_dict.items():
            path, _, name_there = name.rpartition(".")
            owner = self.module.get_submodule(path)
            if name_there in getattr(owner, "layout", ()):
                tensor = owner.join(name_there, tensor)
            whole |= {name: tensor.cpu().clone()} if self.tp.rank == 0 else {}
        return whole


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


class TensorLedger(Ledger):
    """Also counts what forward saves for backward."""

    data_parallel = False

    def save(self, tensor):
        if tensor.is_floating_point():
            self.watch("activations", [tensor])
        return tensor

    def __enter__(self):
        self.hooks = saved_tensors_hooks(self.save, lambda tensor: tensor)
        self.hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.hooks.__exit__(*error)


def parse(arguments=None):
    """The flags, from the command line if no arguments are given."""
    parser = flags()
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="split the sequence between the layers"
    )
    parser.add_argument(
        "--overlap", default=True, action=argparse.BooleanOptionalAction, help="with backward"
    )
    return parser.parse_args(arguments)


def formulas(config, parallel):
    """What a rank holds at the most and sends in a step: {name: (formula, bytes)}, twice."""
    w, N, L = DTYPES[config.dtype].itemsize, parallel.tp.ranks, config.layers
    split, R = (sum(p.numel() for p in params) for params in (parallel.split, parallel.replicated))
    wide = max(w, 4)
    s = 2 * wide * (config.optim == "adamw") + 4 * (w == 2)  # two moments, a master
    per_element = {"parameters": w, "gradients": w, "optimizer": s}
    held = {name: (f"{size}(S/N+R)", size * (split + R)) for name, size in per_element.items()}
    tokens = config.batch * config.context
    ways, ring = 2 * L + 1, (N - 1) / N  # into split regions, and out of them
    loss, moved = 3 * wide * tokens, 2 * ways * w * tokens * config.width
    # Tensors of (b, T, D) that are kept: 12 of each block are split, others only with --sequence-parallel.
    if not config.sequence_parallel:
        whole, formula = 2 * ways, f"{w}bTD(4L+2+12L/N)"
        sent = {"all-reduce": (f"{2 * w}(4L+2)BTD(N-1)/N", 2 * ring * (moved + loss + 8))}
    else:
        again = moved // 2 if config.overlap else 0  # gathered once more, or kept since forward
        whole, formula = (0, f"{w}bTD(16L+2)/N") if again else (ways, f"{w}bTD(2L+1+(14L+1)/N)")
        sent = {
            "reduce-scatter": (f"{w}(4L+2)BTD(N-1)/N", ring * moved),
            "all-gather": (f"{w}({'6L+3' if again else '4L+2'})BTD(N-1)/N", ring * (moved + again)),
            "all-reduce": (f"{2 * w}(R+3BT)(N-1)/N", 2 * ring * (w * R + loss + 8)),
        }
    b_tokens = tokens // config.accum
    statistic = wide if next(parallel.parameters()).is_cuda else w  # a token's mean, its deviation
    of_norms = 2 * ways * statistic * b_tokens // (N if config.sequence_parallel else 1)
    scores = L * config.heads // N * wide * b_tokens  # logarithms of the softmax's sums
    softmax = wide * b_tokens * -(-config.vocab // N)
    tensors = whole + (12 * L + 2 * ways - whole) / N
    kept = w * b_tokens * config.width * tensors + of_norms + scores + softmax
    held["activations"] = formula, round(kept)
    return held, {name: (formula, round(wire)) for name, (formula, wire) in sent.items()}


def train(config):
    """Train as the flags say. Returns what --json writes."""
    device, text = set_up(config)
    ranks = dist.get_world_size()
    if config.batch % config.accum:
        refuse(f"--batch {config.batch}: must be a multiple of --accum {config.accum}")
    if config.heads % ranks:
        refuse(f"--heads {config.heads}: must be a multiple of the {ranks} ranks, which share them out")
    if config.sequence_parallel and config.context % ranks:
        refuse(f"--context {config.context}: must be a multiple of the {ranks} ranks for --sequence-parallel")
    model = ParallelGPT(config).to(device, DTYPES[config.dtype])
    ledger = TensorLedger("tensor_parallel", config, device, model, lambda: [p.grad for p in params])
    parallel = TensorParallel(model, PLAN, config.sequence_parallel, config.overlap)
    params = list(model.parameters())
    ledger.seen.clear()  # the whole model, which was there to be split
    ledger.watch("parameters", params)
    optimizer = Optimizer(params, OPTIMIZERS[config.optim], lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        with ledger if step == 1 else nullcontext():
            loss = 0
            for batch in microbatches(config, text, step, device):
                # Gradients add up over microbatches and we want their mean; each is a mean already.
                microloss = parallel(*batch) / config.accum
                microloss.backward()
                loss += microloss.detach()
            grad_norm = parallel.clip_grad_norm_(config.clip)
            optimizer.step()
            model.zero_grad()
        ledger.log(step, loss, grad_norm)
    ledger.watch("optimizer", optimizer.tensors())
    whole = parallel.gather(optimizer.state_dict_of(model)) if config.save else None
    return ledger.close(whole, *formulas(config, parallel))


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
