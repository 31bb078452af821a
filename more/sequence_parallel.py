"""Sequence parallelism: tensor parallelism that also splits norms and residual sums, by tokens.

Idea
    In tensor_parallel.py all ranks compute the same norms and residual sums, and keep the norms' inputs. Here
    each rank does so for its own 1/N of each sequence. A column-parallel matrix (each rank has 1/N of its
    outputs) needs all tokens, so an all-gather comes before it; after a row-parallel one (1/N of the inputs),
    a reduce-scatter gives each rank the sum for its own tokens. These two send as much as the all-reduce that
    they replace. Backward needs the gathered input again, for the weight's gradient. No rank keeps it: it is
    gathered once more. (arXiv 2205.05198, section 4.2.2)

Timeline (backward of an MLP)
    compute |                  | down, gelu | up: gradient of x | up: gradient of weight        | norm, ...
    network | gather: gradient |            | gather: x         | reduce-scatter: gradient of x |

Memory (bytes on each of N ranks; P parameters, of which r = (6L+2+s)h are replicated)
    parameters     w((P-r)/N+r)        w = 4 in fp32, 2 in bf16
    parameters     +4((P-r)/N+r)       with --dtype bf16: master weights
    gradients      4((P-r)/N+r)        in bf16, too: the update makes fp32 copies
    optimizer      8((P-r)/N+r)        AdamW's two moments
    activations    bs(8+((16L+2)wh+4(4L+2+aL+v))/N)
    activations    bs(8+(2L+1)wh+((14L+1)wh+4(4L+2+aL+v))/N)     with --naive
    L layers, a heads, h width, s context, v vocabulary; b sequences in a microbatch. All is split but the
    loss's sums. tensor_parallel.py does not split 4L+2 of the 16L+2: on 8 ranks it keeps 2.75 times as much.

Sent (bytes, by each rank in each step of k microbatches)
    reduce-scatter    k(4L+2)wbsh(N-1)/N    2 per block in forward, 2 in backward; embedding, head
    all-gather        k(6L+3)wbsh(N-1)/N    as many, and in backward the inputs once more
    all-gather        k(4L+2)wbsh(N-1)/N    with --naive
    all-reduce        2(wr+12kbs)(N-1)/N    gradients of what is replicated; the loss: 3 numbers per token

Run
    torchrun --nproc_per_node=2 more/sequence_parallel.py    # --naive: inputs stay, nothing overlaps
    torchrun --nproc_per_node=8 more/sequence_parallel.py --size gpt2-xl --heads 40 --dtype bf16

Left out
    What tensor_parallel.py leaves out. Dropout, which needs different random numbers on each rank.
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

FLAGS = {"naive": False}
# Before torch 2.13 these had other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def add_up(x):
    """x becomes the sum of all ranks' x. In backward its gradient is the sum's, which all ranks have."""
    dist.all_reduce(x.detach())  # the same memory, but hidden from autograd
    return x


def start_gather(x):  # (b, s/N, h) of each rank -> (N, b, s/N, h), when work.wait() returns
    parts = x.new_empty(dist.get_world_size(), *x.shape)
    return all_gather(parts.flatten(0, 1), x.contiguous(), async_op=True), parts


def join(parts):  # (N, b, s/N, h) -> (b, s, h)
    return parts.transpose(0, 1).flatten(1, 2)


def start_reduce_scatter(x):  # (b, s, h), a part of a sum -> the sum for the rank's own tokens, (b, s/N, h)
    parts = x.unflatten(1, (dist.get_world_size(), -1)).transpose(0, 1).flatten(0, 1)  # (N b, s/N, h)
    own = x.new_empty(len(x), x.shape[1] // dist.get_world_size(), x.shape[2])
    return reduce_scatter(own, parts, async_op=True), own


def gather(x):
    work, parts = start_gather(x)
    work.wait()
    return join(parts)


def sum_scatter(x):
    work, own = start_reduce_scatter(x)
    work.wait()
    return own


class Gather(torch.autograd.Function):  # (b, s/N, h) -> (b, s, h)
    @staticmethod
    def forward(ctx, x):
        return gather(x)

    @staticmethod
    def backward(ctx, grad):  # every rank used each token, so its gradient is the sum of the ranks'
        return sum_scatter(grad)


class SumScatter(torch.autograd.Function):  # (b, s, h) -> (b, s/N, h)
    @staticmethod
    def forward(ctx, x):
        return sum_scatter(x)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad)


def naive_column_parallel(x, weight):  # weight (out/N, in): x (b, s/N, in) -> (b, s, out/N)
    return F.linear(Gather.apply(x), weight)


# An MLP is SumScatter.apply(F.linear(F.gelu(naive_column_parallel(x, up)), down)), and down's bias after it.
# But autograd keeps the gathered x, and nothing is computed while messages travel.
class ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)  # x: the rank's own tokens
        return F.linear(gather(x), weight)

    @staticmethod
    def backward(ctx, grad):  # (b, s, out/N)
        x, weight = ctx.saved_tensors
        gathering, all_x = start_gather(x)  # travels while the gradient of x is computed
        reducing, grad_x = start_reduce_scatter(grad @ weight)
        gathering.wait()
        grad_weight = grad.flatten(0, 1).T @ join(all_x).flatten(0, 1)
        reducing.wait()
        return grad_x, grad_weight


def parallel_loss(logits, targets):  # logits (b, s, v/N): mean of log(sum(exp(logits))) - logits[target]
    logits = logits.to(wide(logits.dtype)).flatten(0, 1)
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest[:, None]  # so that no exp() overflows; the loss is the same
    index, is_here = own_index(targets.flatten(), logits.shape[1])
    target = torch.where(is_here, logits[torch.arange(len(logits), device=logits.device), index], 0)
    exp_sum, target = add_up(torch.stack([logits.exp().sum(-1), target]))
    return (exp_sum.log() - target).mean()


def own_index(token, size):  # (index in this rank's part of the vocabulary, or 0; whether it is there)
    index = token - size * dist.get_rank()
    is_here = (index >= 0) & (index < size)
    return torch.where(is_here, index, 0), is_here


# nn.Linear keeps A transposed, so A's columns are dimension 0. q, k and v are stacked in one matrix.
def split_of(name):  # (the dimension that is split, the number of matrices stacked along it), or None
    split = {"tokens.weight": (0, 1), "qkv.weight": (0, 3), "qkv.bias": (0, 3), "proj.weight": (1, 1)}
    split |= {"up.weight": (0, 1), "up.bias": (0, 1), "down.weight": (1, 1)}
    return split.get(".".join(name.split(".")[-2:]))


def own_part(whole, dim, stacked):  # 1/N of q, of k and of v, if stacked: those of its heads
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return torch.cat([matrix.chunk(world_size, dim)[rank] for matrix in whole.chunk(stacked, dim)], dim)


def whole_of(part, dim, stacked):  # the inverse of own_part()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat([each.chunk(stacked, dim)[i] for i in range(stacked) for each in parts], dim)


def train(config):
    device = join_world()
    world_size = dist.get_world_size()
    if config.vocab < 256:  # or a token might be in no rank's part, which nobody would notice
        sys.exit(f"--vocab {config.vocab}: must be at least 256, as a byte is a token")
    if config.heads % world_size or config.vocab % world_size:
        sys.exit(f"{world_size} ranks: must divide --heads {config.heads} and --vocab {config.vocab}")
    if config.context % world_size:
        sys.exit(f"--context {config.context}: must be a multiple of the {world_size} ranks")
    model = ParallelGPT(config).to(device)  # see the end of this file
    params = list(model.parameters())
    split = [param for name, param in model.named_parameters() if split_of(name)]
    replicated = [param for name, param in model.named_parameters() if not split_of(name)]
    optimizer = MasterWeights(params, config.lr)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for inputs, targets in microbatches(config, step, device):  # the same on all ranks
            loss = parallel_loss(model(inputs), targets) / config.accum
            loss.backward()
            total_loss += loss.detach()
        for param in replicated:  # each rank has the gradients of its own tokens
            dist.all_reduce(param.grad)
        squares = squared_norm([param.grad for param in replicated])  # equal on all ranks: they count once
        norm = (squares + add_up(squared_norm([param.grad for param in split]))).sqrt()
        nn.utils.clip_grads_with_norm_(params, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
        print_step(config, step, total_loss, norm, started)
    if config.save:
        weights = model.state_dict()
        weights |= {name: whole_of(weights[name], *split_of(name)) for name in filter(split_of, weights)}
        if dist.get_rank() == 0:
            torch.save(weights, config.save)


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


class ParallelBlock(Block):
    def __init__(self, config):
        super().__init__(config)
        self.heads //= dist.get_world_size()
        self.column_parallel = naive_column_parallel if config.naive else ColumnParallel.apply

    def forward(self, x):  # (b, s/N, h) -> (b, s/N, h)
        qkv = self.column_parallel(self.norm1(x), self.qkv.weight) + self.qkv.bias  # (b, s, 3h/N)
        x = x + SumScatter.apply(F.linear(self.attention(qkv), self.proj.weight)) + self.proj.bias
        up = self.column_parallel(self.norm2(x), self.up.weight) + self.up.bias  # (b, s, 4h/N)
        return x + SumScatter.apply(F.linear(F.gelu(up), self.down.weight)) + self.down.bias


class ParallelGPT(GPT):
    def __init__(self, config):
        super().__init__(config, ParallelBlock)
        self.column_parallel = naive_column_parallel if config.naive else ColumnParallel.apply
        for name, param in self.named_parameters():
            if split_of(name):
                param.data = own_part(param.data, *split_of(name))

    def embed(self, tokens):  # (b, s) -> (b, s/N, h)
        row, is_here = own_index(tokens, len(self.tokens.weight))
        found = torch.where(is_here[..., None], self.tokens(row), 0)  # one rank has it, the others zeros
        own_positions = self.positions.weight[: tokens.shape[1]].chunk(dist.get_world_size())[dist.get_rank()]
        return SumScatter.apply(found) + own_positions

    def head(self, x):  # (b, s/N, h) -> (b, s, v/N)
        return self.column_parallel(self.norm(x), self.tokens.weight)


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
