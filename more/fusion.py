"""Fusion: attention and the loss tile by tile, so that the full scores and logits are never in memory.

Idea
    Attention makes a score for each pair of tokens, s x s per head, and the loss makes v logits for each
    token. With long contexts, or many tokens in the vocabulary, no other activations are as large. But they
    need not be kept: a tile of scores is computed, used, and dropped before the next one.

    Flash attention (arXiv 2205.14135; backward as in 2307.08691, section 3.1): a softmax divides by a sum
    over its whole row, and a tile has only a part of the row. So each row of queries keeps, of its tiles so
    far, the largest score, the sum of exp(score - largest), and the sum of exp(score - largest) * value. When
    a tile has a larger score, both sums are multiplied by exp(old largest - new) (online softmax, arXiv
    1805.02867). At the row's end, the sum of values is divided by the other one: the output. Backward
    recomputes the tiles, from q, k and one number for each row: the logarithm of the sum of exp(score).

    Fused loss: a chunk of tokens gets its logits, its loss and, at once, its backward, which ends at the last
    block's output. When all chunks are done, backward goes on from there.

Timeline (attention's tiles in order; those with only later keys are skipped. Below: a microbatch)
                | keys 1 | keys 2 | keys 3 |
      queries 1 | 1      |        |        |
      queries 2 | 2      | 3      |        |
      queries 3 | 4      | 5      | 6      |

    | forward of the blocks | logits, loss, backward of chunk 1 | of chunk 2 | ... | backward of the blocks |

Memory (bytes on each of N ranks; P parameters, L blocks, a heads, h width, v vocabulary, b sequences of s)
    parameters     wP        w = 4 in fp32, 2 in bf16
    parameters     +4P       with --dtype bf16: master weights
    gradients      4P        fp32 in the update
    optimizer      8P        AdamW's two moments
    activations    bs(L(16wh+16+4a)+2wh+(wh+8+4v)/C)    C = --chunks
    activations    bs(L(16wh+16+aws)+2wh+8+4v)          with --naive
    Activations are what is saved when a backward begins, here a chunk's. checkpointing.py explains 16wh + 16.
    In place of s scores per head (aws) a token keeps one number (4a). The logits (4v), the last norm's output
    (wh) and statistics (8) are a chunk's, 1/C; 2wh is the last block's output and its gradient (naive: the
    norm's). While attention computes, tiles come on top, and in backward fp32 gradients of q, k and v.

Sent (bytes, by each rank in each step)
    all-reduce     2wP(N-1)/N

Run
    python more/fusion.py --context 512 --batch 2 --tile 128
    python more/fusion.py --context 512 --batch 2 --naive
    torchrun --nproc_per_node=8 more/fusion.py --size gpt2 --dtype bf16 --batch 64 --tile 256

Left out
    A kernel for GPUs, which keeps a tile in the chip's own memory. Here each operator reads and writes it, so
    this saves memory, but little traffic. torch has kernels: F.scaled_dot_product_attention (single.py's) and
    F.linear_cross_entropy (2.13). Masks other than the causal one, dropout, fewer key heads than query heads.
"""

import argparse
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # not used, but if torch imports it later, processes may crash at exit
import torch.nn as nn
import torch.nn.functional as F

FLAGS = {"naive": False, "tile": 32, "chunks": 8}


def scores_of(q, k, is_diagonal=True):  # of each query and key; -inf where the key is later than the query
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if not is_diagonal:  # all keys are earlier
        return scores
    return scores + torch.full_like(scores, -torch.inf).triu(1)


def naive_attention(q, k, v):  # (b, heads, s, h / heads) each
    return scores_of(q, k).softmax(-1) @ v


def naive_backward(model, inputs, targets, divisor):
    loss = mean_loss(model(inputs), targets) / divisor
    loss.backward()
    return loss.detach()


# Autograd keeps all scores of all blocks until backward reaches them, and all logits. At a context of 1024
# each block of gpt2 keeps 12 x 1024 scores for a token, as many as all its other numbers, 16 x 768. At twice
# the context a token has twice the scores.


class FlashAttention(torch.autograd.Function):
    """naive_attention(), tile by tile. q_i is tile i of the queries, k_j tile j of the keys."""

    @staticmethod
    def forward(ctx, q, k, v, tile):
        out = torch.empty_like(q)  # laid out like q, so that attention() need not copy it
        lse = torch.empty_like(q[..., :1], dtype=wide(q.dtype))  # of each row: log(sum(exp(scores)))
        rows, columns = tiles(tile, q, out, lse), tiles(tile, k, v)
        for i, (q_i, out_i, lse_i) in enumerate(rows):
            largest = torch.full_like(lse_i, -torch.inf)
            exp_sum = weighted = 0
            for j, (k_j, v_j) in enumerate(columns[: i + 1]):  # later keys are masked
                scores = scores_of(q_i, k_j, i == j)
                larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
                exps = (scores - larger).exp()
                correction = (largest - larger).exp()  # exp(score - largest) becomes exp(score - larger)
                exp_sum = exp_sum * correction + exps.sum(-1, keepdim=True)
                weighted = weighted * correction + exps.to(v.dtype) @ v_j
                largest = larger
            out_i.copy_(weighted / exp_sum)
            lse_i.copy_(largest + exp_sum.log())
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tile = tile
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.zeros_like(q, dtype=lse.dtype) for _ in range(3))
        # out = weights @ v, where weights are the softmax of the scores. So the weights' gradient is
        # g = grad @ v.mT, and the scores' is weights * (g - delta), delta being a row's sum of weights * g:
        # that is grad times the sum of weights * v, which is out. So it needs no tile.
        delta = (grad * out).sum(-1, keepdim=True, dtype=lse.dtype)
        rows, columns = tiles(ctx.tile, q, lse, grad, delta, grad_q), tiles(ctx.tile, k, v, grad_k, grad_v)
        for i, (q_i, lse_i, grad_i, delta_i, grad_q_i) in enumerate(rows):
            for j, (k_j, v_j, grad_k_j, grad_v_j) in enumerate(columns[: i + 1]):
                weights = (scores_of(q_i, k_j, i == j) - lse_i).exp()  # final: lse is of the whole row
                grad_v_j += weights.to(q.dtype).mT @ grad_i
                grad_scores = weights * (grad_i @ v_j.mT - delta_i) * q.shape[-1] ** -0.5  # of q @ k.mT
                grad_scores = grad_scores.to(q.dtype)
                grad_q_i += grad_scores @ k_j
                grad_k_j += grad_scores.mT @ q_i
        return grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype), None


def tiles(size, *tensors):  # [(the first tile of each tensor), (the second of each), ...], along the tokens
    return list(zip(*(tensor.split(size, 2) for tensor in tensors)))


def chunked_backward(model, inputs, targets, divisor, n_chunks):
    """naive_backward(), but the head, the loss and their backward run for a chunk of tokens at a time."""
    x = model.embed(inputs)
    for block in model.blocks:
        x = block(x)
    x = x.flatten(0, 1)  # (tokens, h)
    grad_x = torch.empty_like(x)
    total_loss = 0
    for x_i, grad_i, targets_i in zip(*(each.chunk(n_chunks) for each in (x, grad_x, targets.flatten()))):
        x_i = x_i.detach().requires_grad_()  # a leaf: the chunk's backward ends here
        loss_sum = F.cross_entropy(model.head(x_i).to(wide(x.dtype)), targets_i, reduction="sum")
        loss = loss_sum / (len(x) * divisor)
        loss.backward()  # frees what the chunk has saved
        grad_i.copy_(x_i.grad)
        total_loss += loss.detach()
    x.backward(grad_x)
    return total_loss


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if config.tile < 1 or config.chunks < 1:
        sys.exit(f"--tile {config.tile}, --chunks {config.chunks}: must be at least 1")
    model = GPT(config, TiledBlock).to(device)  # see the end of this file
    params = list(model.parameters())
    optimizer = MasterWeights(params, config.lr)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for inputs, targets in microbatches(config, step, device, rank, world_size):
            # The batch's loss is the mean of all ranks' microbatches: each loss is divided by their number.
            divisor = config.accum * world_size
            if config.naive:
                total_loss += naive_backward(model, inputs, targets, divisor)
            else:
                total_loss += chunked_backward(model, inputs, targets, divisor, config.chunks)
        for param in params:
            dist.all_reduce(param.grad)
        norm = squared_norm([param.grad for param in params]).sqrt()
        nn.utils.clip_grads_with_norm_(params, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
        dist.all_reduce(total_loss)
        print_step(config, step, total_loss, norm, started)
    if config.save and rank == 0:
        torch.save(model.state_dict(), config.save)


class MasterWeights:
    """AdamW on fp32 copies of bf16 weights: bf16 alone would round small updates away."""

    def __init__(self, params, lr):
        self.params = list(params)
        # For fp32 weights, to() makes no copy: these are the weights themselves.
        self.masters = [param.detach().to(wide(param.dtype)) for param in self.params]
        self.adamw = torch.optim.AdamW(self.masters, lr, fused=True)

    @torch.no_grad()
    def step(self):
        for param, master in zip(self.params, self.masters):
            master.grad = param.grad.to(master.dtype)
            param.grad = None
        self.adamw.step()
        self.adamw.zero_grad()
        torch._foreach_copy_(self.params, self.masters)


# ==== toy model: the same lines in every lesson ====
SHAPE = "layers heads width context vocab".split()
SIZES = {
    "toy": (8, 8, 64, 64, 256),
    "small": (6, 8, 256, 128, 256),
    "gpt2": (12, 12, 768, 1024, 50304),
    "gpt2-xl": (48, 25, 1600, 1024, 50304),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def read_flags(own, arguments=None):
    """The flags of all lessons, and its own: {name: default}. A tuple lists choices, the default first."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--size", default="toy", choices=SIZES)
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=int, help="overrides --size")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="bf16: with an optimizer in fp32")
    parser.add_argument("--data", default=np.ma.core.__file__, help="any file: a byte is a token")
    parser.add_argument("--steps", default=20, type=int)
    parser.add_argument("--batch", default=16, type=int, help="sequences in a step, on all ranks together")
    parser.add_argument("--accum", default=1, type=int, help="microbatches in a step, on each rank")
    parser.add_argument("--lr", default=1e-3, type=float)
    parser.add_argument("--clip", default=1.0, type=float, help="the largest norm of the gradient")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--save", default="", help="a file for the trained weights")
    for name, default in own.items():
        if isinstance(default, tuple):
            parser.add_argument(f"--{name}", default=default[0], choices=default)
        elif default is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", default=default, type=type(default))
    config = parser.parse_args(arguments)
    for name, value in zip(SHAPE, SIZES[config.size]):
        if getattr(config, name) is None:
            setattr(config, name, value)
    if config.width % config.heads:
        parser.error(f"--width {config.width}: must be a multiple of --heads {config.heads}")
    if not os.path.isfile(config.data) or os.path.getsize(config.data) <= config.context:
        parser.error(f"--data {config.data}: no such file, or no more bytes than --context")
    if not os.path.isdir(os.path.dirname(config.save) or "."):
        parser.error(f"--save {config.save}: no such folder")
    return config


def join_world():
    """Meet the other ranks: over NCCL if there are GPUs, else over gloo. Returns this rank's device."""
    if "RANK" not in os.environ:  # not started by torchrun: the only rank
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(int(os.getenv("LOCAL_RANK", 0)) % gpus)
        if int(os.getenv("LOCAL_WORLD_SIZE", 1)) > gpus:  # to share one, each must seem a host of its own
            os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])
    dist.init_process_group("nccl" if gpus else "gloo")
    return torch.device("cuda" if gpus else "cpu")


def microbatches(config, step, device, rank=0, replicas=1):
    """A rank's --accum pairs (inputs, targets), each (b, s). The batch is the same on any number of ranks."""
    b, rest = divmod(config.batch, replicas * config.accum)
    if rest:
        sys.exit(f"--batch {config.batch}: must be a multiple of its microbatches, {replicas * config.accum}")
    text = np.memmap(config.data, np.uint8, "r")
    random = np.random.default_rng((config.seed, step))
    starts = random.integers(len(text) - config.context, size=(replicas, config.accum, b, 1))[rank]
    tokens = torch.from_numpy(text[starts + np.arange(config.context + 1)]).to(device).long()
    return zip(tokens[..., :-1], tokens[..., 1:])


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x):  # (b, s, h) -> (b, s, h)
        x = x + self.proj(self.attention(self.qkv(self.norm1(x))))
        return x + self.mlp(self.norm2(x))

    def attention(self, qkv):  # (b, s, 3h) -> (b, s, h)
        qkv = qkv.unflatten(-1, (3, self.heads, -1))
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))  # (b, heads, s, h / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).flatten(2)

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self, config, block=Block):
        super().__init__()
        torch.manual_seed(config.seed)  # so that all ranks start from the same weights
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)
        self.to(DTYPES[config.dtype])

    def forward(self, tokens):  # (b, s) -> logits (b, s, v)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def embed(self, tokens):  # (b, s) -> (b, s, h)
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]

    def head(self, x):  # (b, s, h) -> (b, s, v); reuses the embedding's weight
        return F.linear(self.norm(x), self.tokens.weight)


def wide(dtype):  # fp32 for bf16, else the same
    return torch.promote_types(dtype, torch.float32)


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).to(wide(logits.dtype)), targets.flatten())


def squared_norm(grads):  # of all gradients; ranks can add up squares; in fp64, as bf16 would round them
    return torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).square().sum()


def print_step(config, step, loss, norm, started):
    loss, norm = loss.item(), norm.item()  # here, once a step, the host waits for the device
    if dist.get_rank() == 0:
        ms = 1e3 * (time.perf_counter() - started)
        print(f"step {step:2}/{config.steps} | loss {loss:.4f} | grad norm {norm:.3f} | {ms:.1f} ms")


# ==== end of the toy model ====


class TiledBlock(Block):
    def __init__(self, config):
        super().__init__(config)
        self.naive, self.tile = config.naive, config.tile

    def attention(self, qkv):  # (b, s, 3h) -> (b, s, h)
        qkv = qkv.unflatten(-1, (3, self.heads, -1))
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))  # (b, heads, s, h / heads)
        attended = naive_attention(q, k, v) if self.naive else FlashAttention.apply(q, k, v, self.tile)
        return attended.transpose(1, 2).flatten(2)


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
