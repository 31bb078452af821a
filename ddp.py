"""DDP: each rank has a copy of the model and a part of the batch; all-reduces add up the gradients.

Idea
    The gradient of a sum is the sum of the gradients. So each of N ranks computes the gradients of 1/N of the
    batch. Then an all-reduce adds them up, and every rank has the gradients of the whole batch. All ranks
    start with the same weights and make the same update, so they keep the same weights.

    Backward computes the gradients of the last layers first. So these can travel while it computes those of
    earlier layers. Each message has a fixed cost, so gradients travel together, in buckets. (PyTorch
    Distributed, arXiv 2006.15704, section 3.2)

Timeline (four layers, a bucket for each)
    compute | forward | backward 4 | backward 3 | backward 2 | backward 1 |          | update
    network |         |            | bucket 1   | bucket 2   | bucket 3   | bucket 4 |

Memory (bytes on each of N ranks; P parameters)
    parameters    wP               w = 4 in fp32, 2 in bf16
    parameters    +4P              with --dtype bf16: master weights
    gradients     (4+w/B)P         fp32 in the update; w/B: about a bucket's copy, B = --buckets
    gradients     4P               with --naive
    optimizer     8P               AdamW's two moments

Sent (bytes, by each rank in each step)
    all-reduce    2wP(N-1)/N       in a ring; collectives.py shows why

Run
    torchrun --nproc_per_node=2 ddp.py
    torchrun --nproc_per_node=2 ddp.py --naive
    torchrun --nproc_per_node=2 ddp.py --buckets 1        # one message, after backward
    torchrun --nproc_per_node=8 ddp.py --size gpt2-xl --dtype bf16 --batch 64

Left out
    Sending rank 0's weights to all at the start: here all ranks draw the same ones. Buffers, such as
    BatchNorm's statistics. Parameters that only some ranks use.
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

FLAGS = {"naive": False, "buckets": 5}


def naive(params):
    """After backward. This is all of DDP, if time does not matter."""
    for param in params:
        dist.all_reduce(param.grad)


# It has two costs. While gradients travel, nothing is computed; and each parameter is a message of its own.


class Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self):
        self.params = []
        self.missing = 0  # gradients that backward has yet to compute

    def add(self, param):
        self.params.append(param)
        self.missing += 1

    def numel(self):
        return sum(param.numel() for param in self.params)

    def start_all_reduce(self):
        flat = torch.cat([param.grad.flatten() for param in self.params])
        self.work = dist.all_reduce(flat, async_op=True)  # returns at once, and backward goes on
        for param, part in zip(self.params, flat.split([param.numel() for param in self.params])):
            param.grad = part.view_as(param)  # a view of flat, where the sum will be

    def finish_all_reduce(self):
        self.work.wait()
        self.work = None  # else it would keep flat in memory
        self.missing = len(self.params)  # for the next step


class DDP(nn.Module):
    """Adds up the ranks' gradients, bucket by bucket, while backward computes the next ones."""

    def __init__(self, module, n_buckets):
        super().__init__()
        self.module = module
        self.is_last_backward = True
        params = list(module.parameters())
        limit = sum(param.numel() for param in params) / n_buckets
        self.buckets = [Bucket()]
        for param in reversed(params):  # about the order in which backward reaches them
            if self.buckets[-1].numel() >= limit:
                self.buckets.append(Bucket())
            bucket = self.buckets[-1]
            bucket.add(param)
            # Autograd calls gradient_ready() as soon as it has computed param.grad.
            param.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self.gradient_ready(bucket))
        self.n_sent = 0  # buckets, in this backward

    def forward(self, *inputs):
        return self.module(*inputs)

    def gradient_ready(self, bucket):
        if not self.is_last_backward:
            return
        bucket.missing -= 1
        # Rank 0 must not send bucket 1 while rank 1 sends bucket 2: one would be added to the other. Autograd
        # does not promise that buckets are complete in one order on all ranks. So each waits for its turn.
        while self.n_sent < len(self.buckets) and self.buckets[self.n_sent].missing == 0:
            self.buckets[self.n_sent].start_all_reduce()
            self.n_sent += 1

    def finish_all_reduces(self):
        """To be called after the step's last backward."""
        assert self.n_sent == len(self.buckets), "backward has not reached all parameters"
        for bucket in self.buckets:
            bucket.finish_all_reduce()
        self.n_sent = 0


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = GPT(config).to(device)
    params = list(module.parameters())
    model = module if config.naive else DDP(module, config.buckets)
    optimizer = MasterWeights(params, config.lr)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for i, (inputs, targets) in enumerate(microbatches(config, step, device, rank, world_size), 1):
            # The batch's loss is the mean of all ranks' microbatches: each loss is divided by their number.
            loss = mean_loss(model(inputs), targets) / (config.accum * world_size)
            model.is_last_backward = i == config.accum  # only then gradients travel; before, they add up
            loss.backward()
            total_loss += loss.detach()
        if config.naive:
            naive(params)
        else:
            model.finish_all_reduces()
        norm = squared_norm([param.grad for param in params]).sqrt()
        nn.utils.clip_grads_with_norm_(params, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
        dist.all_reduce(total_loss)
        print_step(config, step, total_loss, norm, started)
    if config.save and rank == 0:
        torch.save(module.state_dict(), config.save)


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
