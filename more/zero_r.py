"""ZeRO-R: activation checkpointing; each block's input is split across ranks that all have the same input.

Idea
    In checkpointing.py a rank keeps the input of each block, and recomputes the rest. Tensor-parallel ranks,
    which share the work of each layer, all have the same inputs. So each keeps 1/N of it, on the device or on
    the host, and before the block is recomputed an all-gather restores the whole. While a block is recomputed
    and runs backward, the previous block's input is gathered. (ZeRO's P_a and P_a+cpu, arXiv 1910.02054,
    section 6.1) Here ranks stand in for tensor-parallel ones: all do the same, on the same batch.

Timeline (the last two of 4 blocks)
    compute | forward 3 | forward 4 | loss |          | recompute 4, backward 4 | recompute 3, backward 3
    network |           |           |      | gather 4 | gather 3                | gather 2

Memory (bytes on each of N ranks; P parameters, L blocks, h width, v vocabulary, b sequences of s)
    parameters     wP        w = 4 in fp32, 2 in bf16
    parameters     +4P       with --dtype bf16: master weights
    gradients      4P        also in bf16: the update makes fp32 copies of them
    optimizer      8P        AdamW's two moments
    activations    bs((L/N+2)wh+4(2+v))    1/N of the blocks' inputs; then the last norm and the loss, as
                                           in checkpointing.py. Offloaded, the inputs are on the host
    activations    bs((L+2)wh+4(2+v))      with --policy full: the whole inputs

Sent (bytes, by each rank in each step of k microbatches)
    all-gather     kLwbsh(N-1)/N           without --policy full

Run
    torchrun --nproc_per_node=2 more/zero_r.py
    torchrun --nproc_per_node=2 more/zero_r.py --policy full         # naive: whole inputs on each rank
    torchrun --nproc_per_node=8 more/zero_r.py --size gpt2-xl --dtype bf16 --policy offload

Left out
    Copies to and from the host beside the computation (more/offload.py has a stream for them). ZeRO-R's
    constant-size buffers and defragmentation (sections 6.2 and 6.3).
"""

import argparse
import os
import sys
import time
from contextlib import suppress
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # not used, but if torch imports it later, processes may crash at exit
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

FLAGS = {"policy": ("partitioned", "offload", "full")}
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


class Whole:
    """Keeps all of a block's input, as checkpointing.py does."""

    def __init__(self, x):
        self.x = x.detach().requires_grad_(x.requires_grad)

    def get(self):
        return self.x


class Shard:
    """Keeps this rank's 1/N of a block's input, as all ranks have the same."""

    latest = None  # the newest: each links to that of the block before

    def __init__(self, x, on_host):
        self.shape, self.requires_grad, self.device = x.shape, x.requires_grad, x.device
        size = -(-x.numel() // dist.get_world_size())  # rounded up
        own = x.detach().flatten()[dist.get_rank() * size :][:size]
        self.shard = F.pad(own, (0, size - len(own)))  # always a copy: a view would keep all of x
        if on_host:
            shard = torch.empty(size, dtype=x.dtype, pin_memory=x.is_cuda)
            self.shard = shard.copy_(self.shard, non_blocking=True)
        self.gathering = None
        self.previous = Shard.latest
        Shard.latest = self

    def start_gather(self):
        if not self.gathering:
            own = self.shard.to(self.device, non_blocking=True)
            self.flat = own.new_empty(len(own) * dist.get_world_size())
            self.gathering = all_gather(self.flat, own, async_op=True)

    def get(self):
        self.start_gather()  # unless the next block has started it
        self.gathering.wait()
        if self.previous:
            self.previous.start_gather()  # it travels while this block is recomputed and runs backward
        Shard.latest = self.previous = None  # the next forward begins anew
        x = self.flat[: self.shape.numel()].view(self.shape)
        self.flat = self.gathering = None
        return x.requires_grad_(self.requires_grad)


def checkpoint(function, x, keep):
    """Returns function(x). Autograd records it, but saves a number in place of each tensor."""
    if not torch.is_grad_enabled():
        return function(x)
    kept = keep(x)
    random_states = get_random_states()
    recomputed = []  # the tensors; None while they are not needed yet, or not any more

    def pack(tensor):  # called in forward with what autograd would save; what it returns is saved
        recomputed.append(None)
        return len(recomputed) - 1

    def unpack(index):  # called in backward with what has been saved
        if recomputed[index] is None:
            recomputed[:] = recompute(function, [kept.get()], random_states, len(recomputed))
        tensor, recomputed[index] = recomputed[index], None  # so that it is freed after use
        return tensor

    with saved_tensors_hooks(pack, unpack):
        return function(x)


def recompute(function, args, random_states, n):
    """Runs the function until autograd has saved n tensors, in the same order as before. Returns these."""
    saved = []

    def keep(tensor):
        saved.append(tensor.detach())  # without the graph of this run
        if len(saved) == n:
            raise AllSaved  # stop: all is saved, and the block's output is not needed
        return tensor.detach()

    states_now = get_random_states()
    set_random_states(random_states)
    with suppress(AllSaved), torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*args)
    set_random_states(states_now)
    return saved


class AllSaved(Exception):
    """Ends recompute()."""


def get_random_states():  # dropout's masks depend on them
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def set_random_states(states):
    torch.set_rng_state(states[0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


def train(config):
    device = join_world()
    keep = Whole if config.policy == "full" else partial(Shard, on_host=config.policy == "offload")

    class CheckpointedBlock(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, keep)

    model = GPT(config, CheckpointedBlock).to(device)
    params = list(model.parameters())
    optimizer = MasterWeights(params, config.lr)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for inputs, targets in microbatches(config, step, device):  # the same on all ranks
            loss = mean_loss(model(inputs), targets) / config.accum
            loss.backward()
            total_loss += loss.detach()
        norm = squared_norm([param.grad for param in params]).sqrt()
        nn.utils.clip_grads_with_norm_(params, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
        print_step(config, step, total_loss, norm, started)
    if config.save and dist.get_rank() == 0:
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
