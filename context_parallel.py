"""Context parallelism: each rank has 1/N of a sequence's tokens, and only attention needs those of others.

Idea
    The activations of a long sequence do not fit on one GPU, so its tokens are split across ranks. Norms and
    MLPs treat each token alone. But a query needs the keys and values of all tokens before it.

    Ring attention (arXiv 2310.01889): a rank computes attention to the keys and values that it has, while it
    sends them to the next rank, and receives others from the rank before. After N turns it has seen all. Each
    turn's output is merged into the output so far, by the sums of their softmaxes (log-sum-exp).
    A causal mask gives later tokens more work. So a sequence is cut into 2N chunks, and rank i has the chunks
    i and 2N-1-i, an early and a late one (zigzag): then all ranks have the same work in each turn.

    Ulysses (arXiv 2309.14509): attention treats each head alone. Before it, an all-to-all trades 1/N of the
    tokens of all heads for all tokens of 1/N of the heads. After it, another one trades back.

Timeline (forward of a ring, on rank 2 of 4; in backward, gradients of keys and values follow a turn later)
    compute | queries x kv of rank 2 | x kv of rank 1 | x kv of rank 0 | x kv of rank 3
    network | kv of rank 1           | kv of rank 0   | kv of rank 3   |

Memory (bytes on each of N ranks, if all share a sequence, as by default; P parameters)
    L layers, a heads, h width, s context, v vocabulary; b sequences in a microbatch
    w bytes of a weight: 4 in fp32, 2 in bf16, 8 in fp64; c bytes of its fp32 master: 4 in bf16, else 0
    K bytes of AdamW's two moments: 8, in fp64 16; of SGD 0
    m bytes of a gradient, of a statistic of a norm, and of each number that the loss needs: 4, in fp64 8
    parameters    (w+c)P
    gradients     2mP       each parameter's, and all in one flat tensor
    optimizer     KP
    activations   s(b((16L+2)wh+(4L+2+aL+v)m)+wh)/N    with --kind ring
    activations   s(b((17L+2)wh+(4L+2+aL+v)m)+wh)/N    with --kind ulysses, which keeps its output twice
    Of each token, a block keeps 16h: inputs and outputs of norms 4, q, k, v 3, attention's output 1, up 4,
    GELU 4; also 4 statistics of norms, and a log-sum-exp of each head. The last norm has 2h and 2 statistics,
    the loss v numbers, and the positions h, once.

Sent (bytes, by each rank in each step of k microbatches)
    send          2wkLbsh(3N-2)min(1,N-1)/N   with --kind ring: kv N-1 times, in backward again; gradients N
    all-to-all    8wkLb(s/N)h(N-1)/N          with --kind ulysses: 4 in forward, 4 in backward
    all-reduce    2mP(N-1)/N                  in a ring of all ranks: each has gradients of its own tokens

Run
    torchrun --nproc_per_node=2 context_parallel.py
    torchrun --nproc_per_node=8 context_parallel.py --size gpt2 --context 65536 --batch 1

Left out
    Masks other than the causal one, documents in a sequence, dropout. The all-reduce of gradients
    does not overlap with backward (see ddp.py). On GPUs, a ring needs kernels that torch has not for heads of
    more than 256 numbers, for fewer key heads than query heads in fp32, and for bf16 before Ampere: an error.
    Not noticed: tokens in another order than `order` says, which makes other scores.
"""

import argparse
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # first: if torch.optim imports it later, the process group is never freed
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

aten = torch.ops.aten  # has the kernels of F.scaled_dot_product_attention, which hides their log-sum-exp
plain_attention = F.scaled_dot_product_attention  # which train() replaces


def shard_sequence(x, dim, order="zigzag", group=None):
    """This rank's tokens of x: two of 2N chunks along dim, in ring_attention()'s order, or "contiguous"."""
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    if x.shape[dim] % (2 * world_size):
        raise ValueError(f"{x.shape[dim]} tokens: must be a multiple of 2 x {world_size} ranks")
    chunks = x.chunk(2 * world_size, dim)
    own = {"zigzag": (chunks[rank], chunks[-1 - rank]), "contiguous": chunks[2 * rank : 2 * rank + 2]}
    return torch.cat(own[order], dim)


# If neither memory nor time mattered, each rank would all-gather k and v, and compute attention of its own
# queries to all of them. The problem is that k and v of all tokens may not fit, and that nothing is computed
# while they travel. A ring has those of two ranks at a time, and computes with one while the other arrives.


def ring_attention(q, k, v, *, is_causal=False, group=None, order="zigzag"):
    """Attention of q (b, a, s/N, h/a) to all ranks' k and v (b, a_kv, s/N, h/a), where a_kv divides a."""
    if order == "zigzag" and q.shape[2] % 2:
        raise ValueError(f"{q.shape[2]} tokens: zigzag needs an even number, as shard_sequence() gives")
    return RingAttention.apply(q, k, v, group, order, is_causal)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group, order, is_causal):
        wide = torch.promote_types(q.dtype, torch.float32)  # blocks are merged in fp32 at least
        out = torch.zeros_like(q, dtype=wide)
        lse = torch.full_like(out[..., :1], -math.inf)  # log-sum-exp of the scores so far
        own_kv = torch.stack((k, v))
        ctx.layout = q.shape[2], group, order, is_causal
        for hops, kv in enumerate(rotate(own_kv, group)):
            if seen := visible(hops, *ctx.layout):
                queries, keys = seen
                block, block_lse = attend(q[:, :, queries], *kv[..., keys, :], is_causal and hops == 0)
                merge(out[:, :, queries], lse[:, :, queries], block, block_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        _, group, _, is_causal = ctx.layout
        own_kv = torch.stack((k, v))
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        received = torch.zeros_like(own_kv)  # others' part of the gradient of the kv in use, a hop later
        works = []
        for hops, kv in enumerate(rotate(own_kv, group)):
            grad_kv = torch.zeros_like(kv)  # in kv's dtype, in which it is sent on
            if seen := visible(hops, *ctx.layout):
                queries, keys = seen
                of_queries = [x[:, :, queries] for x in (grad, out, lse, q)]
                block_q, *block_kv = attend_backward(*of_queries, *kv[..., keys, :], is_causal and hops == 0)
                grad_q[:, :, queries] += block_q
                grad_kv[..., keys, :] += torch.stack(block_kv)
            for work in works:
                work.wait()
            grad_kv += received
            received, works = send_to_next(grad_kv, group)
        for work in works:
            work.wait()
        return grad_q.to(q.dtype), *received, None, None, None


def visible(hops, length, group, order, is_causal):
    """Which of this rank's queries see which keys of the rank `hops` before, cyclically: slices or None."""
    everything = slice(None), slice(None)
    if hops == 0 or not is_causal:  # own chunks ascend: for them the kernel's causal mask is right
        return everything
    theirs_are_earlier = hops <= dist.get_rank(group)  # else it wraps round to a higher rank
    if order == "contiguous":
        return everything if theirs_are_earlier else None
    half = length // 2
    if theirs_are_earlier:  # their early chunk precedes both of ours, their late one follows both
        return slice(None), slice(half)
    return slice(half, None), slice(None)  # both of theirs lie between our early and our late chunk


def rotate(kv, group):
    """Yield this rank's k and v, then those of rank - 1 and so on, receiving the next while one is in use."""
    for _ in range(dist.get_world_size(group) - 1):
        next_kv, works = send_to_next(kv, group)
        yield kv
        for work in works:
            work.wait()
        kv = next_kv
    yield kv


def send_to_next(tensor, group):
    """Start sending to the next rank. Returns the buffer being received, and works to wait for before use."""
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return tensor, []
    received = torch.empty_like(tensor)
    ops = [
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % world_size),
        dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % world_size),
    ]
    return received, dist.batch_isend_irecv(ops)


def attend(q, k, v, is_causal):
    """A block's output, and log-sum-exp of scores (b, a, s/N, 1), by the kernel for this device and dtype."""
    if not q.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    elif q.dtype == torch.float32:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)
        lse = lse[..., : q.shape[2]]  # it is padded to a multiple of 32
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    return out, lse.unsqueeze(-1)


def attend_backward(grad, out, lse, q, k, v, is_causal):
    """Gradients of q, k, v of one block, given out and lse of all keys (arXiv 2307.08691, 3.1)."""
    lse = lse.squeeze(-1).contiguous()
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal
        )
    if q.dtype == torch.float32:
        lse = F.pad(lse, (0, -q.shape[2] % 32), value=math.inf)  # as the kernel pads it
        needed = True, True, True, False  # gradients: that of a bias is not
        return aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, None, None, 0.0, needed, is_causal
        )[:3]
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, None, None
    )


def merge(out, lse, block, block_lse):
    """Merge in a block's output, weighted by its share of the softmax's denominator so far."""
    block_share = torch.sigmoid(block_lse - lse)  # exp(block_lse) / (exp(lse) + exp(block_lse)), no overflow
    out.lerp_(block.to(out.dtype), block_share)
    lse.copy_(torch.logaddexp(lse, block_lse))


def ulysses_attention(q, k, v, *, is_causal=False, group=None, order="zigzag"):
    """Like ring_attention(), but N must divide a_kv, and causal attention needs order "contiguous"."""
    if is_causal and order != "contiguous":
        raise ValueError("Ulysses needs order='contiguous', here and in shard_sequence()")
    if k.shape[1] % dist.get_world_size(group):
        raise ValueError(f"{k.shape[1]} key heads: must be a multiple of the ranks")
    q, k, v = (AllToAll.apply(x, 1, 2, group) for x in (q, k, v))  # (b, a/N, s, h/a)
    out = plain_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return AllToAll.apply(out, 2, 1, group)  # (b, a, s/N, h/a)


class AllToAll(torch.autograd.Function):
    """Send part i of x along dim `split` to rank i, join arrivals along dim `join`. Backward: the reverse."""

    @staticmethod
    def forward(ctx, x, split, join, group):
        ctx.back = join, split, group
        parts = torch.stack(x.chunk(dist.get_world_size(group), split))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.back), None, None, None


def train(config):
    """Train with these flags. In bf16 the model has the fp32 masters; `weights` are their casts."""
    device, text, group = set_up_groups(config)
    world_size = dist.get_world_size()
    replica = dist.get_rank() // config.cp
    dtype = DTYPES[config.dtype]
    shard = partial(shard_sequence, order=config.order, group=group)
    attention = ring_attention if config.kind == "ring" else ulysses_attention
    attention = partial(attention, order=config.order, group=group)
    model = GPT(config).to(device, torch.promote_types(dtype, torch.float32))
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        batches = microbatches(config, text, step, device, replica, config.dp)
        weights = {name: param.to(dtype) for name, param in model.named_parameters()}
        weights["positions.weight"] = shard(weights["positions.weight"], 0)  # GPT reads the first s/N rows
        loss = 0
        for inputs, targets in batches:
            with mock.patch.object(F, "scaled_dot_product_attention", attention):  # Block stays as it is
                microloss = mean_loss(functional_call(model, weights, shard(inputs, 1)), shard(targets, 1))
            microloss /= config.accum  # as gradients of microbatches add up
            microloss.backward()
            loss += microloss.detach()
        grad_norm = average_gradients(model, config.clip)
        optimizer.step()
        model.zero_grad()
        dist.all_reduce(loss)
        print_step(config, step, loss / world_size, grad_norm, started)
    if config.save and dist.get_rank() == 0:
        save_weights(model.to(dtype).state_dict(), config.save)


def average_gradients(model, max_norm):
    """Make each .grad the mean over ranks (equal numbers of tokens), and clip. Returns the unclipped norm."""
    grads = [param.grad for param in model.parameters()]
    flat_grad = nn.utils.parameters_to_vector(grads)
    dist.all_reduce(flat_grad)
    flat_grad /= dist.get_world_size()
    nn.utils.vector_to_parameters(flat_grad, grads)  # each .grad is now a view of flat_grad
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def set_up_groups(config):
    """Check the flags and join. Returns the device, the text, and the ranks that share a sequence."""
    world_size = int(os.getenv("WORLD_SIZE") or 1)
    config.cp = config.cp or world_size
    if world_size % config.cp:
        refuse(f"--cp {config.cp}: must divide the {world_size} ranks")
    if config.kind == "ulysses":
        if config.order == "zigzag":
            refuse("--order zigzag: needs --kind ring")
        if config.heads % config.cp:
            refuse(f"--heads {config.heads}: must be a multiple of --cp {config.cp}")
        config.order = "contiguous"
    config.order = config.order or "zigzag"
    if config.context % (2 * config.cp):
        refuse(f"--context {config.context}: must be a multiple of 2 x --cp {config.cp}")
    config.dp = world_size // config.cp
    device, text = set_up(config, f" | cp {config.cp} | {config.kind} {config.order}", config.dp)
    if config.kind == "ring" and device.type == "cuda":
        if config.dtype == "fp64":
            refuse("--dtype fp64: a ring on GPUs takes fp32 or bf16; use --device cpu or --kind ulysses")
        if config.width % (8 * config.heads):
            refuse(f"--width {config.width}: a ring on GPUs needs a multiple of 8 x --heads {config.heads}")
    return device, text, dist.new_subgroups(config.cp)[0]


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--cp", type=int, help="ranks that share a sequence (none: all)")
    own.add_argument("--kind", default="ring", choices=("ring", "ulysses"))
    own.add_argument("--order", choices=("zigzag", "contiguous"), help="of chunks, in a ring (none: zigzag)")
    return read_flags(arguments, own)


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
