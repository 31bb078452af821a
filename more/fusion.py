"""Fusion: attention and loss in tiles, so that their largest tensors never exist, and a fused optimizer.

Idea
    Attention makes s x s scores for each head, and the loss v logits for each token. With long contexts no
    other activations are as large, and each of these numbers is needed for a moment only. So here a tile of
    them is computed, used and dropped before the next one.

    The difficulty is the softmax, which needs the maximum and the sum of a whole row. The online softmax
    (arXiv 1805.02867) keeps the maximum and the sum of the tiles so far. When a tile has a larger maximum, it
    corrects the sum. Flash attention (arXiv 2205.14135) corrects its output, too, and computes the scores
    again in backward. The fused loss takes a chunk of tokens at a time: it computes their logits and, from
    these at once, the gradients of its input and of the head.

    All this is made of torch's operators, which read and write memory: less is held, but not less moved. A
    kernel for a GPU also keeps a tile in the chip's own memory, which is faster. The fused optimizer is such
    a kernel, torch's own: it reads and writes each number once.

Timeline (nothing overlaps)
    | forward and loss | backward | all-reduce | clip, step |

Memory (bytes on each of N ranks; w of a weight: 4 in fp32, 2 in bf16; m = 4; in fp64 both are 8)
    activations   Lbs(16wh+(4+a)m) + bs(wh+2m) + w(bsh+hv)    of blocks, the last norm, the loss
    There are L layers, a heads, h width, s context, v vocabulary, and b sequences in a microbatch.
    Of each token, backward needs 16h numbers of a block: inputs and outputs of norms 4, q, k, v 3, attention
    1, up 4, GELU 4; also 4 statistics of norms, and a log-sum-exp of each head. The last norm has its input
    and 2 statistics. In place of logits the loss holds two gradients: its input's and the head's.
    While the loss is computed, it also has a chunk of logits, in w + m bytes, and the head's gradient in m.
    --plain attention adds (2m+w+1)Labs^2: scores and their exp() in m, weights in w, a mask.
    parameters    (w+c)P    P parameters; c = 4 in bf16, for fp32 masters, else 0
    gradients     2mP       each parameter's, and all in one flat tensor
    optimizer     KP        K = 8 for AdamW's two moments (fp64: 16), 0 for SGD

Sent (bytes, by each of N ranks in each step)
    all-reduce    2mP(N-1)/N    in a ring

Run
    torchrun --nproc_per_node=2 more/fusion.py
    torchrun --nproc_per_node=8 more/fusion.py --size gpt2 --dtype bf16 --batch 64
    torchrun --nproc_per_node=2 more/fusion.py --plain attention loss    (these are then not fused)

Left out
    Kernels in CUDA or triton, dropout, other masks than the causal one.
    Errors: q, k and v of several shapes, as with fewer key heads; gradients of gradients; targets to ignore,
    such as -100, which torch's gather() refuses (on a GPU this ends the process).
    The loss is a mean over all tokens, padding too.
    Under no_grad() the loss computes its gradients, too; under autocast backward has other dtypes.
"""

import argparse
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

TILE = 128  # queries, keys, or numbers of a row
CHUNK = 1024  # tokens whose logits are held at once


def plain_attention(q, k, v):
    """Causal attention of q, k, v (b, a, s, h/a), with all scores at once."""
    weights = three_pass_softmax(scores(q, k))  # (b, a, s, s)
    return weights.to(v) @ v


def scores(q, k, diagonal=True):
    """Scaled scores of queries and keys. On the diagonal (the same tokens) -inf where the key is later."""
    tile = q @ k.mT
    tile = tile.to(wide(q))
    tile *= q.shape[-1] ** -0.5
    if not diagonal:
        return tile
    later = torch.ones_like(tile, dtype=torch.bool).triu(1)
    return tile.masked_fill(later, -math.inf)


def three_pass_softmax(x):
    """Softmax over the last dim: a pass over x for the maximum, one for the sum, one for the results."""
    largest = x.amax(-1, keepdim=True)
    weights = (x - largest).exp()
    return weights / weights.sum(-1, keepdim=True)


# All scores are too many to hold. A tile of a row has neither the row's maximum nor its sum: add_tile() does
# without.


def two_pass_softmax(x):
    """The same, in which one pass finds the maximum and the sum (arXiv 1805.02867, algorithm 3).

    It is not used below. (A row becomes NaN if its first tile is all -inf; causal rows have none.)"""
    largest = torch.full_like(x[..., :1], -math.inf)
    total = 0
    for tile in x.split(TILE, -1):
        largest, total, _, _ = add_tile(largest, total, tile)
    return (x - largest).exp() / total


def add_tile(largest, total, tile):
    """Add a tile to the maxima and the sums of exp(x - maximum) of its rows.

    Returns the new maxima and sums, the factor that corrects older sums, and the tile's exp(x - maximum)."""
    larger = torch.maximum(largest, tile.amax(-1, keepdim=True))
    # An older exp(x - largest), times this, is exp(x - larger).
    correction = (largest - larger).exp()
    exps = (tile - larger).exp()
    total = total * correction + exps.sum(-1, keepdim=True)
    return larger, total, correction, exps


class FlashAttention(torch.autograd.Function):
    """As plain_attention(). Backward computes the scores again (FlashAttention-2, arXiv 2307.08691, 3.1)."""

    @staticmethod
    def forward(ctx, q, k, v):
        if not q.shape == k.shape == v.shape or q.dim() != 4:
            raise ValueError("q, k and v must have one shape, (batch, heads, tokens, head's width)")
        out = torch.empty_like(q)
        lse = torch.empty_like(q[..., :1], dtype=wide(q))  # log-sum-exp of each row's scores
        for i, (q_i, out_i, lse_i) in enumerate(tiles(q, out, lse)):
            largest = torch.full_like(lse_i, -math.inf)
            total = 0
            weighted = 0
            for j, (k_j, v_j) in enumerate(tiles(k, v)[: i + 1]):  # later keys are masked
                tile = scores(q_i, k_j, i == j)
                largest, total, correction, exps = add_tile(largest, total, tile)
                weighted = weighted * correction + exps.to(v) @ v_j
            out_i.copy_(weighted / total)
            lse_i.copy_(largest + total.log())
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        assert not torch.is_grad_enabled(), "create_graph=True: attention has no gradients of gradients"
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=wide(q))
        dk = torch.zeros_like(dq)
        dv = torch.zeros_like(dq)
        # out = weights @ v, so the gradients are:
        #     of the weights: g = grad @ v.mT
        #     of the scores: weights * (g - delta), by softmax's backward
        # delta = (weights * g).sum(-1) is also (grad * out).sum(-1), in the paper D.
        delta = (grad.to(dq) * out).sum(-1, keepdim=True)
        for i, (q_i, lse_i, grad_i, delta_i, dq_i) in enumerate(tiles(q, lse, grad, delta, dq)):
            for j, (k_j, v_j, dk_j, dv_j) in enumerate(tiles(k, v, dk, dv)[: i + 1]):
                tile = scores(q_i, k_j, i == j)
                weights = (tile - lse_i).exp()  # normalized, as exp(lse) is exp(largest) * total
                dv_j += weights.to(q).mT @ grad_i
                grad_scores = weights * (grad_i @ v_j.mT - delta_i)
                grad_scores *= q.shape[-1] ** -0.5
                grad_scores = grad_scores.to(q)
                dq_i += grad_scores @ k_j
                dk_j += grad_scores.mT @ q_i
        return tuple(x.to(q) for x in (dq, dk, dv))


flash_attention = FlashAttention.apply


def tiles(*tensors):
    """[(first tile of each), (second tile of each), ...], along dim 2, the tokens."""
    splits = [x.split(TILE, 2) for x in tensors]
    return list(zip(*splits))


def wide(x):
    """Its dtype, but fp32 at least, in which softmax and sums are exact enough."""
    return torch.promote_types(x.dtype, torch.float32)


class LinearCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of x (bs, h), weight (v, h) and targets (bs,), which plainly would be

        logits = x @ weight.T  # (bs, v)
        loss = F.cross_entropy(logits, targets)

    Here forward also computes the gradients, and so needs the logits of a chunk of tokens only once."""

    @staticmethod
    def forward(ctx, x, weight, targets):
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight, dtype=wide(x))
        loss = 0
        targets = targets.unsqueeze(1)
        chunks = zip(x.split(CHUNK), grad_x.split(CHUNK), targets.split(CHUNK))
        for x_i, grad_i, targets_i in chunks:
            logits = x_i @ weight.T
            logits = logits.to(wide(x))
            logits -= logits.amax(-1, keepdim=True)
            of_target = logits.gather(1, targets_i)
            logits.exp_()
            total = logits.sum(-1, keepdim=True)
            loss += (total.log() - of_target).sum()
            logits /= total  # now probabilities
            logits.scatter_add_(1, targets_i, -torch.ones_like(of_target))  # 1 less for the target
            logits /= len(x)  # now gradients
            logits = logits.to(x)
            grad_i.copy_(logits @ weight)
            grad_weight += logits.T @ x_i
            del logits  # before the next chunk's
        grad_weight = grad_weight.to(x)
        ctx.save_for_backward(grad_x, grad_weight)
        return loss / len(x)

    @staticmethod
    def backward(ctx, grad):
        assert not torch.is_grad_enabled(), "create_graph=True: the loss has no gradients of gradients"
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad, grad_weight * grad, None


linear_cross_entropy = LinearCrossEntropy.apply


def loss_of(model, plain, inputs, targets):
    """mean_loss(model(inputs), targets), whose parts are fused unless they are in `plain`."""
    attention = flash_attention
    if "attention" in plain:
        attention = plain_attention
    x = model.tokens(inputs)
    x = x + model.positions.weight[: x.shape[1]]
    for block in model.blocks:
        qkv = block.qkv(block.norm1(x)).unflatten(-1, (3, block.heads, -1))  # (b, s, 3, a, h/a)
        attended = attention(*qkv.permute(2, 0, 3, 1, 4))
        x = x + block.proj(attended.transpose(1, 2).flatten(2))
        x = x + block.down(F.gelu(block.up(block.norm2(x))))
    x = model.norm(x)
    if "loss" in plain:
        return mean_loss(F.linear(x, model.tokens.weight), targets)
    return linear_cross_entropy(x.flatten(0, 1), model.tokens.weight, targets.flatten())


def train(config):
    device, text = set_up(config, f" | plain: {' '.join(config.plain) or 'nothing'}")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    dtype = DTYPES[config.dtype]
    model = GPT(config).to(device, torch.promote_types(dtype, torch.float32))
    model.forward = partial(loss_of, model, config.plain)
    kernels = {"foreach": False} if "optimizer" in config.plain else {"fused": True}
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, **kernels)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        batches = microbatches(config, text, step, device, rank, world_size)
        # In bf16 the parameters are fp32 masters. functional_call() is model(*batch), but with these casts,
        # new in each step. All backwards go through them to the masters: casts save nothing, so they may.
        weights = {name: param.to(dtype) for name, param in model.named_parameters()}
        loss = 0
        for batch in batches:
            # Gradients add up over microbatches and ranks: divide to get the batch's mean.
            microloss = functional_call(model, weights, batch) / config.accum / world_size
            microloss.backward()
            loss += microloss.detach()
        grads = [param.grad for param in model.parameters()]
        flat_grad = nn.utils.parameters_to_vector(grads)
        dist.all_reduce(flat_grad)  # all at once, when backward has ended; ddp.py does better
        nn.utils.vector_to_parameters(flat_grad, grads)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        model.zero_grad()
        dist.all_reduce(loss)
        print_step(config, step, loss, grad_norm, started)
    if config.save and rank == 0:
        save_weights(model.to(dtype).state_dict(), config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--plain", nargs="+", default=[], choices=("attention", "loss", "optimizer"))
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
