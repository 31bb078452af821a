"""Collectives: what an all-reduce does, and how to build one from sends and receives alone.

Idea
    Each of N ranks has a tensor x. An all-reduce makes x the sum on all ranks. Two other collectives are its
    halves: a reduce-scatter cuts the sum into N chunks, of which each rank gets one, and an all-gather gives
    all ranks all chunks. In ddp.py and in zero1.py to zero3.py gradients and weights travel by these three.

    A message of S bytes takes about alpha + beta S seconds: a latency, and a time for each byte. So two
    numbers count: the rounds of messages, one after the other, and the bytes that a rank sends. A ring sends
    few bytes in many rounds, which is best for a large x. Doubling takes lg N rounds (lg: base 2), which is
    best for a small one (Thakur, Rabenseifner and Gropp 2005).

Timeline (ring_all_reduce on three ranks: the chunk that a rank sends to its right neighbor in each round)
    rank 0: reduce-scatter | 2 | 1 | all-gather | 0 | 2 |
    rank 1: reduce-scatter | 0 | 2 | all-gather | 1 | 0 |
    rank 2: reduce-scatter | 1 | 0 | all-gather | 2 | 1 |
    Between the two halves rank r has the sum of chunk r.

Memory (bytes on each of N ranks, with --train; P parameters)
    parameters    (w+c)P                 w = 4 in fp32, 2 in bf16; c = 4 in bf16, for fp32 masters, else 0
    gradients     2mP+min(1,N-1)mP/N     m = 4 (8 in fp64): each .grad, a flat copy of all, and, if there are
                                         other ranks, a chunk that comes from one
    optimizer     KP                     K = 8 for AdamW's two moments, 0 for SGD

Sent (bytes, by each of N ranks; an x of S bytes)
                                         rounds    bytes
    naive_all_reduce                     2(N-1)    rank 0: S(N-1), the others: S
    ring_all_reduce                      2(N-1)    2S(N-1)/N
    recursive_doubling_all_reduce        lg N      S lg N
    halving_doubling_all_reduce          2 lg N    2S(N-1)/N
    ring_reduce_scatter                  N-1       S(N-1)/N
    ring_all_gather                      N-1       S(N-1)/N, where S is what a rank has in the end
    pairwise_all_to_all                  N-1       S(N-1)/N
    tree_broadcast                       lg N      S(N-1)/N in the mean of all ranks
    If N is not a power of two, lg N is rounded up for the tree, and down for doubling and halving, which take
    two more rounds of S bytes.

    send          2mP(N-1)/N             in each step of --train: gradients, by ring_all_reduce

Run
    torchrun --nproc_per_node=4 collectives.py
    torchrun --nproc_per_node=8 collectives.py --train --size gpt2-xl --dtype bf16 --batch 64
    Without --train it prints how long each all-reduce takes, from 4 bytes to --megabytes. On one machine the
    naive one may win: the ranks share one memory, so what counts is all that they send together, and no
    algorithm here sends less than its 2(N-1)S. With a link of 1 Gbit/s for each of 4 ranks (bench/hosts.sh
    4 1gbit -- collectives.py, on Linux, as root) the naive one took 405 ms for 8 MiB, the ring 111 ms.

Left out
    Algorithms that know which ranks share a node, several rings side by side, sums in the network: NCCL has
    them. Here a chunk arrives completely before it is added; gloo adds one part while the next travels.
    Groups: all ranks of the world take part.
    Not noticed: ranks whose x differ in length or dtype. They get wrong sums, or gloo ends the process.
    An x that is not contiguous is an error of torch.
"""

import argparse
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F


def naive_all_reduce(x):
    """All that an all-reduce does, if time does not matter: rank 0 adds up, and sends all others the sum."""
    if dist.get_rank() > 0:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    received = torch.empty_like(x)
    others = range(1, dist.get_world_size())
    for other in others:
        dist.recv(received, other)
        x += received
    for other in others:
        dist.send(x, other)


# This works, but rank 0 receives N-1 tensors, one after the other, and then sends N-1, while the others wait:
# with twice as many ranks it takes twice as long. In a ring all ranks send in every round: x is cut into
# chunks, and the sum of each chunk travels from rank to rank, each of which adds its part. With doubling,
# pairs of ranks add up all of x, then pairs of pairs, and so on.


def exchange(given, to, received, source):
    """Send to rank `to` and receive from rank `source` at the same time. Rank N is rank 0, -1 is N-1.

    None for a tensor: do the other one alone."""
    ops = []
    for op, x, peer in (dist.irecv, received, source), (dist.isend, given, to):
        if x is not None:
            if x.dim() > 1:
                raise ValueError("x must have one dimension: pass x.flatten()")
            peer %= dist.get_world_size()
            ops.append(dist.P2POp(op, x, peer))
    # Both start before either is waited for. A send may last until its receiver is there, so if all ranks of
    # a ring waited for their sends first, none would ever receive.
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def ring_all_reduce(x):
    """Make x the sum of all ranks' x. All get the same bits, as each chunk is added up in one order."""
    chunks = x.tensor_split(dist.get_world_size())  # views of x
    reduce_chunks(chunks)
    gather_chunks(chunks)


def ring_reduce_scatter(x):
    """Return chunk `rank` of the sum of all ranks' x, cut by tensor_split."""
    return reduce_chunks(x.clone().tensor_split(dist.get_world_size()))


def ring_all_gather(shard):
    """Return all ranks' shards, which are equally long, in the order of the ranks."""
    out = shard.repeat(dist.get_world_size())  # the others' shards overwrite all but one
    gather_chunks(out.tensor_split(dist.get_world_size()))
    return out


def reduce_chunks(chunks):
    """Make chunk `rank` the sum of all ranks' chunks of this number, and return it. Overwrites the others."""
    rank = dist.get_rank()
    buffer = torch.empty_like(chunks[0])  # no chunk is longer
    # The sum of chunk r starts on rank r+1 and travels to the right, once round the ring, to rank r. In each
    # round a rank adds its own part to the sum that comes from the left. In the next it sends this sum on
    # (see the timeline).
    for i in range(1, len(chunks)):
        partial = chunks[rank - i - 1]  # indices below 0 count from the end: they go round the ring
        received = buffer[: len(partial)]
        exchange(chunks[rank - i], rank + 1, received, rank - 1)
        partial += received
    return chunks[rank]


def gather_chunks(chunks):
    """Copy chunk `rank` of each rank to all others. What comes in one round is sent on in the next."""
    rank = dist.get_rank()
    for i in range(len(chunks) - 1):
        exchange(chunks[rank - i], rank + 1, chunks[rank - i - 1], rank - 1)


@contextmanager
def folded(x):
    """Yield this rank's partners, one for each round: the ranks whose number differs from its own in one bit.

    This takes a power of two of ranks. Ranks beyond it are folded into the first ones: they hand over their x
    before, have no partners, and get the sum after (of 6 ranks, 4 is folded into 0, and 5 into 1)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # `other` differs in the highest bit of N (of 6 ranks: 0 and 4, 1 and 5; 2 and 3 have no other).
    *partners, other = [rank ^ 2**i for i in range(world_size.bit_length())]
    # With NCCL all ranks must take part in the first batch_isend_irecv, so this is no dist.send.
    if other < rank:  # this rank is folded into the other
        exchange(x, other, None, None)
        yield []
        exchange(None, None, x, other)
    elif other < world_size:  # the other is folded into this one
        received = torch.empty_like(x)
        exchange(None, None, received, other)
        x += received
        yield partners
        exchange(x, other, None, None)
    else:
        yield partners


def recursive_doubling_all_reduce(x):
    """Make x the sum of all ranks' x. With each round it is a sum over twice as many ranks."""
    received = torch.empty_like(x)
    with folded(x) as partners:
        for partner in partners:
            exchange(x, partner, received, partner)
            x += received


def halving_doubling_all_reduce(x):
    """Make x the sum of all ranks' x, by halving (a reduce-scatter), then doubling (an all-gather)."""
    kept = x
    halves = []
    with folded(x) as partners:
        # Both partners have the same part of x to add up. Each keeps one half of it, gives the other half
        # away, and receives what the partner has in the half that it keeps.
        for partner in partners:
            low, high = kept.tensor_split(2)
            kept, given = (low, high) if dist.get_rank() < partner else (high, low)
            received = torch.empty_like(kept)
            exchange(given, partner, received, partner)
            kept += received
            halves.append((kept, given, partner))
        # Now each has a chunk of the sum. In reverse order the same partners send each other what they have.
        for kept, given, partner in reversed(halves):
            exchange(kept, partner, given, partner)


def tree_broadcast(x, src=0):
    """Copy rank src's x to all. In each round every rank that has it sends it to one that does not."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = (rank - src) % world_size  # as if src were rank 0
    reached = 1  # the places below this have x
    while reached < world_size:
        if place < reached and place + reached < world_size:
            dist.send(x, (rank + reached) % world_size)
        elif reached <= place < 2 * reached:
            dist.recv(x, (rank - reached) % world_size)
        reached *= 2


def pairwise_all_to_all(x):
    """Return chunk `rank` of each rank's x, in the order of the ranks. Each round has other partners."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)
    out = chunks[rank].repeat(world_size, 1)  # the others' chunks overwrite all rows but one
    for i in range(1, world_size):
        to = (rank + i) % world_size
        exchange(chunks[to], to, out[rank - i], rank - i)
    return out.flatten()


def compare(config):
    """Print how many ms each all-reduce takes, and the library's, for 4 bytes, 32 bytes and so on."""
    device, _ = set_up(config, replicas=1)  # no batch is divided here
    doubling = recursive_doubling_all_reduce, halving_doubling_all_reduce
    all_reduces = naive_all_reduce, ring_all_reduce, *doubling, dist.all_reduce
    x = torch.zeros(1, device=device)
    while x.nbytes <= config.megabytes * 1e6:
        line = f"{x.nbytes:>9} bytes"
        for all_reduce in all_reduces:
            # The first call opens connections. float() waits for the device, which has waited for all ranks.
            all_reduce(x)
            float(x[0])
            started = time.perf_counter()
            for _ in range(5):
                all_reduce(x)
            float(x[0])
            line += f" | {all_reduce.__name__} {1e3 / 5 * (time.perf_counter() - started):.2f} ms"
        if dist.get_rank() == 0:
            print(line)
        x = x.repeat(8)


def average_gradients(grads):
    """Make the gradients their mean over all ranks: they travel as one message, as large ones are faster."""
    flat_grad = nn.utils.parameters_to_vector(grads)
    ring_all_reduce(flat_grad)
    flat_grad /= dist.get_world_size()
    nn.utils.vector_to_parameters(flat_grad, grads)  # each becomes a view of flat_grad


def train(config):
    device, text = set_up(config)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # In bf16 small updates would be lost: the optimizer updates fp32 weights, which a step casts to bf16.
    model = GPT(config).to(device, torch.promote_types(DTYPES[config.dtype], torch.float32))
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        batches = microbatches(config, text, step, device, rank, world_size)
        weights = {name: param.to(DTYPES[config.dtype]) for name, param in model.named_parameters()}
        loss = 0
        for inputs, targets in batches:
            # Each loss is a mean, and gradients add up over microbatches: divide to get the batch's mean.
            microloss = mean_loss(torch.func.functional_call(model, weights, inputs), targets) / config.accum
            microloss.backward()
            loss += microloss.detach()
        grads = [param.grad for param in model.parameters()]
        average_gradients(grads)
        recursive_doubling_all_reduce(loss)  # a small one, in few rounds
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        model.zero_grad()
        print_step(config, step, loss / world_size, grad_norm, started)
    if config.save and rank == 0:
        save_weights(model.to(DTYPES[config.dtype]).state_dict(), config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--train", action="store_true", help="train with ring_all_reduce")
    own.add_argument("--megabytes", type=float, default=20, help="the largest size without --train")
    return read_flags(arguments, own, megabytes=(0, 1e6))


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
    config = parse()
    (train if config.train else compare)(config)
    dist.destroy_process_group()
