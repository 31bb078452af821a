"""Noise scale: how large a batch should be, from gradients that the ranks of ddp.py have anyway.

Idea
    A batch's gradient is the true gradient G, of all data, plus noise, whose mean is 0. S is the variance of
    one sequence's gradient, summed over all parameters; for the mean over B sequences it is S/B. So a batch's
    squared norm is |G|^2 + S/B on average. If S/B is far larger than |G|^2, a step with twice the batch is
    worth nearly two steps; if far smaller, hardly more than one. Both are equal at B = S/|G|^2, the noise
    scale: beyond it, more ranks save little time. (Empirical Model of Large-Batch Training, arXiv
    1812.06162, 2.2)

    Two batch sizes give two equations for |G|^2 and S. Each rank of ddp.py has the gradient of its own part
    of the batch, before the all-reduce, and that of the whole batch, after it. (Appendix A.1 there)

Timeline
    compute | forward | backward | own norm |            | norm of the sum, update
    network |         |          |          | all-reduce |

Memory (bytes on each of N ranks; P parameters)
    parameters    wP            w = 4 in fp32, 2 in bf16
    parameters    +4P           with --dtype bf16: master weights
    gradients     4P            bf16 ones become fp32 in the update
    optimizer     8P            AdamW's two moments
    With --naive one sequence's gradients come on top, wP, before the update.

Sent (bytes, by each rank in each step)
    all-reduce    2wP(N-1)/N    as in ddp.py; the squared norm is one number more

Run
    torchrun --nproc_per_node=4 more/noise_scale.py --steps 100
    torchrun --nproc_per_node=4 more/noise_scale.py --steps 100 --naive
    torchrun --nproc_per_node=8 more/noise_scale.py --size gpt2-xl --dtype bf16 --batch 64 --steps 200

Left out
    Buckets and overlap (ddp.py): each bucket's norm could be taken as it leaves. The exact noise scale, which
    needs the Hessian. One rank compares nothing, except with --naive.
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


def naive(model, inputs, targets):
    """The sum of the squared norms of each sequence's own gradient: B gradients are compared, not N."""
    squares = 0
    for one, target in zip(inputs.split(1), targets.split(1)):
        loss = mean_loss(model(one), target)
        squares += squared_norm(torch.autograd.grad(loss, list(model.parameters())))
    return squares


# More gradients make a more exact estimate. But each sequence has a forward and a backward of its own, in
# addition to the batch's.


def signal_and_noise(small, big, small_batch, big_batch):
    """Unbiased estimates of |G|^2 and S, from mean squared norms of gradients of two sizes of batch. On
    average small = |G|^2 + S / small_batch and big = |G|^2 + S / big_batch."""
    noise = (small - big) / (1 / small_batch - 1 / big_batch)  # the first minus the second, solved for S
    return big - noise / big_batch, noise


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(device)
    params = list(model.parameters())
    optimizer = MasterWeights(params, config.lr)
    small_batch = 1 if config.naive else config.batch // world_size
    mean_signal = mean_noise = 0
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = small = 0
        for inputs, targets in microbatches(config, step, device, rank, world_size):
            # The batch's loss is the mean of all ranks' microbatches: each loss is divided by their number.
            loss = mean_loss(model(inputs), targets) / (config.accum * world_size)
            loss.backward()
            total_loss += loss.detach()
            if config.naive:
                small += naive(model, inputs, targets) / config.batch
        if not config.naive:
            # The loss was divided by world_size: this rank's mean gradient is world_size times param.grad.
            own = world_size**2 * squared_norm([param.grad for param in params])
            small = own / world_size  # its all-reduce makes it the mean over ranks
        for param in params:
            dist.all_reduce(param.grad)
        dist.all_reduce(small)
        big = squared_norm([param.grad for param in params])
        signal, noise = signal_and_noise(small, big, small_batch, config.batch)
        # One step's estimates are far off: average both over about 20 steps before dividing. (Both
        # begin at 0, which cancels.)
        mean_signal += 0.05 * (signal - mean_signal)
        mean_noise += 0.05 * (noise - mean_noise)
        norm = big.sqrt()
        nn.utils.clip_grads_with_norm_(params, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
        dist.all_reduce(total_loss)
        print_step(config, step, total_loss, norm, started)
    if rank == 0 and small_batch < config.batch:
        scale = (mean_noise / mean_signal).item()
        print(f"noise scale {scale:.1f} sequences of {config.context} tokens; the batch has {config.batch}")
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


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
