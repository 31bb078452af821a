"""Collectives: an all-reduce made of sends and receives, naive and in a ring.

Idea
    Five things to know before any other lesson:
    1. torchrun starts N copies of this program, the ranks. Each finds in its environment RANK, its number
       from 0 to N-1, and WORLD_SIZE, which is N.
    2. dist.init_process_group() connects the ranks through gloo, for CPUs, or NCCL, for GPUs.
    3. Rank 0 calls dist.send(x, 1), rank 1 calls dist.recv(y, 0): y becomes a copy of x. Then both return.
    4. dist.isend() and dist.irecv() return a `work` at once. After work.wait() the tensor may be used again.
       dist.batch_isend_irecv() starts several of these, each described by a dist.P2POp, together. (With NCCL
       it is the GPU that waits, not the program.)
    5. In a collective all ranks of a group take part. A group is some of the ranks, or, as here, all.

    Each rank has a tensor x. An all-reduce makes x the sum of all ranks' x. In the naive way, rank 0 receives
    every x, adds them up, and sends the sum to all. In a ring, each rank sends to the next one, and the last
    to rank 0. x is cut into N chunks. For each chunk a partial sum travels around the ring, and each rank
    adds its own numbers. N partial sums travel at the same time, each starting at a different rank. After N-1
    rounds each rank has the complete sum of one chunk: up to here it is a reduce-scatter. In N-1 more rounds
    the sums travel on until all ranks have all: an all-gather. (Patarasuk and Yuan 2009; on its costs,
    Thakur, Rabenseifner and Gropp 2005)

Timeline (the ring on rank 3, the last of 4. Rank r has r+1 times 1, 10, 100, 1000 at the start)
    round | sends to rank 0 | gets from rank 2 | x after it
    0     |                 |                  | 4, 40, 400, 4000
    1     | chunk 2: 400    | chunk 1: 30      | 4, 70, 400, 4000        70 = 40 + 30
    2     | chunk 1: 70     | chunk 0: 5       | 9, 70, 400, 4000        9 = 4 + 5, and 5 = 2 + 3
    3     | chunk 0: 9      | chunk 3: 6000    | 9, 70, 400, 10000       chunk 3 is complete: reduce-scatter
    4     | chunk 3: 10000  | chunk 2: 1000    | 9, 70, 1000, 10000
    5     | chunk 2: 1000   | chunk 1: 100     | 9, 100, 1000, 10000
    6     | chunk 1: 100    | chunk 0: 10      | 10, 100, 1000, 10000    all are complete: all-gather

Memory (bytes on each of N ranks; P parameters)
    parameters    wP        w = 4 in fp32, 2 in bf16
    parameters    +4P       with --dtype bf16: master weights
    gradients     4P        also in bf16; plus what is received, a chunk (naive: a tensor)
    optimizer     8P        AdamW's two moments

Sent (bytes, by a rank in each step, for all gradients)
    send    2wP(N-1)/N    without --naive: of each tensor 1/N in each of 2(N-1) rounds
    send    wP(N-1)       with --naive: rank 0, which sends the sums to all others; the others send wP each

Run
    torchrun --nproc_per_node=4 collectives.py    # and with --naive

Left out
    Algorithms with fewer rounds, for small tensors, such as trees; one ring for all tensors (ddp.py's
    buckets); several rings at the same time. In bf16 each partial sum is rounded.
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
counted = {"rounds": 0, "bytes": 0}  # the rounds that this rank took, the bytes that it sent


def exchange(*messages):
    """A round: start all messages, each (dist.isend or dist.irecv, tensor, other rank), and wait for all."""
    for work in dist.batch_isend_irecv([dist.P2POp(*message) for message in messages]):
        work.wait()
    counted["rounds"] += 1
    counted["bytes"] += sum(tensor.nbytes for op, tensor, _ in messages if op == dist.isend)


def naive_all_reduce(x):
    others = range(1, dist.get_world_size())
    if dist.get_rank() == 0:
        received = torch.empty_like(x)
        for other in others:
            exchange((dist.irecv, received, other))
            x += received
        for other in others:
            exchange((dist.isend, x, other))
    else:
        exchange((dist.isend, x, 0))
        exchange((dist.irecv, x, 0))


# Rank 0 receives N-1 whole x, and then sends N-1. A ring takes as many rounds, but in each a rank sends only
# a chunk, 1/N of x: less than twice the bytes of x in all, however many ranks there are.


def ring_all_reduce(x):
    rank, N = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % N, (rank + 1) % N
    chunks = x.view(-1).tensor_split(N)  # views of x
    # On rank 3 of 4 these are chunks 2, 1, 0, 3, 2, 1, 0; on rank 2, to its left, chunks 1, 0, 3, 2, 1, 0, 3.
    passing = [chunks[(rank - i) % N] for i in range(1, 2 * N)]
    # The left neighbour's passing[i] is this rank's passing[i + 1]. So a round sends passing[i], and gets
    # passing[i + 1]. Both start together: if each rank first waited for its send to end, none might receive.
    for i in range(N - 1):  # reduce-scatter
        received = torch.empty_like(passing[i + 1])
        exchange((dist.isend, passing[i], right), (dist.irecv, received, left))
        passing[i + 1] += received
    for i in range(N - 1, 2 * (N - 1)):  # all-gather: what comes is complete, and takes its place in x
        exchange((dist.isend, passing[i], right), (dist.irecv, passing[i + 1], left))


def print_costs(device):
    """What rank 0 does in an all-reduce of S bytes: counted, and by formula."""
    x = torch.zeros(840, device=device)  # divisible by 2 to 8, so that chunks are equal
    N, S = dist.get_world_size(), x.nbytes
    for all_reduce, sent in (naive_all_reduce, S * (N - 1)), (ring_all_reduce, 2 * S * (N - 1) // N):
        counted.update(rounds=0, bytes=0)
        all_reduce(x)
        formula = {"rounds": 2 * (N - 1), "bytes": sent}
        if dist.get_rank() == 0:
            print(f"{all_reduce.__name__} of {S} bytes, on rank 0: {counted} counted, {formula} by formula")


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print_costs(device)  # before training
    all_reduce = naive_all_reduce if config.naive else ring_all_reduce
    model = GPT(config).to(device)
    params = list(model.parameters())
    optimizer = MasterWeights(params, config.lr)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for inputs, targets in microbatches(config, step, device, rank, world_size):
            # The batch's loss is the mean of all ranks' microbatches: each loss is divided by their number.
            loss = mean_loss(model(inputs), targets) / (config.accum * world_size)
            loss.backward()
            total_loss += loss.detach()
        for param in params:
            all_reduce(param.grad)
        naive_all_reduce(total_loss)  # one number: the ring would send empty chunks
        norm = squared_norm([param.grad for param in params]).sqrt()
        nn.utils.clip_grads_with_norm_(params, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
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


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
