"""Collectives: what an all-reduce is made of, from send and receive alone.

Idea
    A ring cuts x into N chunks; in each round a rank passes one to its right neighbor: few bytes, but many
    rounds. Doubling takes only lg N rounds (lg: base 2), which is faster for a small x (Thakur et al. 2005).
    In all functions x is flat and contiguous, of one dtype and length on all ranks, and has S bytes.

Timeline (ring_all_reduce: the chunk that a rank sends in each round of its two halves)
    rank 0: reduce-scatter | 2 | 1 | all-gather | 0 | 2 |
    rank 1: reduce-scatter | 0 | 2 | all-gather | 1 | 0 |
    rank 2: reduce-scatter | 1 | 0 | all-gather | 2 | 1 |

Memory (bytes: w a weight, c its fp32 master in bf16, K its moments; all letters: docs/formulas.md)
    parameters    (w+c)P
    gradients     2mP+min(1,N-1)mP/N     each parameter's, all in a flat tensor; if N > 1 a chunk received
    optimizer     KP

Sent (bytes that a rank sends in a step with --train; the others' stand with each function)
    send          2mP(N-1)/N

Run
    torchrun --nproc_per_node=4 collectives.py    (bench/links.py: every collective, alpha, beta, bandwidth)
    torchrun --nproc_per_node=8 collectives.py --train --noise-scale --size gpt2-xl --dtype bf16 --batch 64

Left out
    Rings that know hosts, several rings at once, sums in the network.
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
import torch.distributed.nn  # first: if torch.optim imports it later, the process group is never freed
import torch.nn as nn
import torch.nn.functional as F


def exchange(given, to, received, source, group):
    """Send and receive at once: if all ranks of a ring sent first, none would receive. None: not that one."""
    ops = []
    for op, x, peer in (dist.irecv, received, source), (dist.isend, given, to):
        if x is not None:
            peer %= dist.get_world_size(group)
            ops.append(dist.P2POp(op, x, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def tree_broadcast(x, src=0, group=None):
    """Copy rank src's x to all. lg N rounds of S bytes, from all ranks that have it."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    place = (rank - src) % world_size
    reached = 1
    while reached < world_size:
        if place < min(reached, world_size - reached):
            dist.send(x, group_dst=(rank + reached) % world_size, group=group)
        elif reached <= place < 2 * reached:
            dist.recv(x, group_src=(rank - reached) % world_size, group=group)
        reached *= 2


def ring_reduce_scatter(x, group=None, out=None):
    """Return chunk `rank` of the sum of all ranks' x, cut by tensor_split. N-1 rounds, S(N-1)/N bytes."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if out is None:
        out = x.clone()  # else out is x, which partial sums may overwrite
    chunks = out.tensor_split(world_size)
    buffer = torch.empty_like(chunks[0])
    for i in range(1, world_size):
        partial = chunks[rank - i - 1]  # indices below 0 go round the ring
        received = buffer[: len(partial)]
        exchange(chunks[rank - i], rank + 1, received, rank - 1, group)
        partial += received
    return chunks[rank]


def ring_all_gather(shard, group=None, out=None):
    """Return all ranks' shards, equally long, in order. N-1 rounds, S(N-1)/N bytes of the whole S."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if out is None:
        out = shard.repeat(world_size)  # else shard is a chunk of out
    chunks = out.tensor_split(world_size)
    for i in range(world_size - 1):
        exchange(chunks[rank - i], rank + 1, chunks[rank - i - 1], rank - 1, group)
    return out


def ring_all_reduce(x, group=None):
    """Make x the sum of all ranks' x, in the same bits everywhere, as each chunk is summed on one rank."""
    ring_all_gather(ring_reduce_scatter(x, group, out=x), group, out=x)


def recursive_doubling_all_reduce(x, group=None):
    """Make x the sum, with partners whose ranks differ in one bit. lg N rounds of S bytes."""
    received = torch.empty_like(x)
    with folded(x, group) as partners:
        for partner in partners:
            exchange(x, partner, received, partner, group)
            x += received


def halving_doubling_all_reduce(x, group=None):
    """Rabenseifner's: partners halve what they sum, and then go back. 2 lg N rounds, 2S(N-1)/N bytes."""
    kept = x
    halves = []
    with folded(x, group) as partners:
        for partner in partners:
            low, high = kept.tensor_split(2)
            kept, given = (low, high) if dist.get_rank(group) < partner else (high, low)
            received = torch.empty_like(kept)
            exchange(given, partner, received, partner, group)
            kept += received
            halves.append((kept, given, partner))
        for kept, given, partner in reversed(halves):
            exchange(kept, partner, given, partner, group)


@contextmanager
def folded(x, group):
    """Yield partners in the largest power of two. Ranks beyond it hand in x before, and get the sum after."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    *partners, other = [rank ^ 2**i for i in range(world_size.bit_length())]  # one for each bit
    if other < rank:  # this rank is beyond
        exchange(x, other, None, None, group)
        yield []
        exchange(None, None, x, other, group)
    elif other < world_size:  # the other is
        received = torch.empty_like(x)
        exchange(None, None, received, other, group)
        x += received
        yield partners
        exchange(x, other, None, None, group)
    else:
        yield partners


def pairwise_all_to_all(x, group=None):
    """Return chunk `rank` of each rank's x, in order. N-1 rounds with other partners, S(N-1)/N bytes."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = x.tensor_split(world_size)
    out = chunks[rank].repeat(world_size, 1)
    for i in range(1, world_size):
        to = (rank + i) % world_size
        exchange(chunks[to], to, out[rank - i], rank - i, group)
    return out.flatten()


def compare(config):
    """Print the ms of each all-reduce, and of the library's, for 4 bytes, 32 bytes and so on."""
    device, _ = set_up(config, replicas=1)
    all_reduces = ring_all_reduce, recursive_doubling_all_reduce, halving_doubling_all_reduce, dist.all_reduce
    x = torch.zeros(1, device=device)
    while x.nbytes <= config.megabytes * 1e6:
        line = f"{x.nbytes:>9} bytes"
        for all_reduce in all_reduces:
            all_reduce(x)
            float(x[0])  # waits for the device, and all ranks
            started = time.perf_counter()
            for _ in range(5):
                all_reduce(x)
            float(x[0])
            line += f" | {all_reduce.__name__} {1e3 / 5 * (time.perf_counter() - started):.2f} ms"
        if dist.get_rank() == 0:
            print(line)
        x = x.repeat(8)


def gradient_noise(sum_of_squares, square_of_mean, n, samples):
    """Estimate a sample's variance and the square of the true gradient from n gradients (1812.06162, A.1)."""
    trace = samples / n * (sum_of_squares - n * square_of_mean) / (n - 1)
    return torch.stack([trace, square_of_mean - trace / samples])


def train(config):
    """Train with these flags. In bf16 the model has fp32 masters, and `weights` are casts of them."""
    device, text = set_up(config)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(device, torch.promote_types(DTYPES[config.dtype], torch.float32))
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    noise = 0
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        batches = microbatches(config, text, step, device, rank, world_size)
        weights = {name: param.to(DTYPES[config.dtype]) for name, param in model.named_parameters()}
        loss = 0
        for inputs, targets in batches:
            # Gradients add up over microbatches and each loss is a mean: divide to get the batch's mean.
            microloss = mean_loss(torch.func.functional_call(model, weights, inputs), targets) / config.accum
            microloss.backward()
            loss += microloss.detach()
        grads = [param.grad for param in model.parameters()]
        flat_grad = nn.utils.parameters_to_vector(grads)
        sums = torch.stack([loss, nn.utils.get_total_norm(grads) ** 2])
        ring_all_reduce(sums)
        ring_all_reduce(flat_grad)
        nn.utils.vector_to_parameters(flat_grad.div_(world_size), grads)  # the mean over ranks
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        noise = 0.95 * noise + gradient_noise(sums[1], grad_norm**2, world_size, config.batch)
        if config.noise_scale and rank == 0:
            print(f"noise scale {(noise[0] / noise[1]).item():.1f} sequences")  # for which the host waits
        optimizer.step()
        model.zero_grad()
        print_step(config, step, sums[0] / world_size, grad_norm, started)
    if config.save and rank == 0:
        save_weights(model.to(DTYPES[config.dtype]).state_dict(), config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--train", action="store_true", help="train with ring_all_reduce")
    own.add_argument("--noise-scale", action="store_true", help="train, print the gradient noise scale")
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
    if os.getenv("RANK", "") in "0":
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
    (train if config.train or config.noise_scale else compare)(config)
    dist.destroy_process_group()
