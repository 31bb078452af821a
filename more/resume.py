"""Resume: each rank saves its part of a checkpoint; any number of ranks can load it and train on.

Idea
    As in zero1.py, each of N ranks updates 1/N of the weights, and holds Adam's moments only of those. Each
    writes this part to its own file, at the same time; nothing is gathered. A checkpoint is a table, with a
    column for each single weight and three rows: the weight in fp32, and Adam's two moments. A file has 1/N
    of the columns. On M ranks, each copies what it needs from all files. (ByteCheckpoint, arXiv 2407.20143)

    Training pauses only to copy the part in memory (and until the last save is done); a thread then writes
    the copy (CheckFreq, FAST 2021).
    When all have written, rank 0 renames the folder. So whenever a rank is killed, there is a complete
    checkpoint, the newest or the one before, once there has been one. Checksums detect damaged files.

Timeline (--every 10)
    training | step 9 | step 10 | copy | step 11    | step 12             | step 13 |
      saving |                         | write file | wait for all others | rename  |

Memory (bytes on each of N ranks; P parameters; a save copies 12P/N, three fp32 rows)
    parameters    wP         w = 4 in fp32, 2 in bf16
    parameters    +4P/N      with --dtype bf16: fp32 shards
    gradients     2wP        all, and once more in one piece, as sent; gloo copies that, NCCL does not
    optimizer     8P/N       AdamW's two moments

Sent (bytes, by each rank in each step; for a save only checksums)
    reduce-scatter    wP(N-1)/N
    all-gather        wP(N-1)/N

Run
    torchrun --nproc_per_node=4 more/resume.py --checkpoint runs/saved
    torchrun --nproc_per_node=2 more/resume.py --checkpoint runs/saved --steps 40    # goes on, on 2 ranks
    torchrun --nproc_per_node=2 more/resume.py --checkpoint runs/naive --naive

Left out
    The overlap of zero1.py. Random states: batches follow from --seed and the step. Continuing when a save
    fails. Power cuts: they may damage what has just been written (os.fsync).
"""

import argparse
import json
import os
import shutil
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # not used, but if torch imports it later, processes may crash at exit
import torch.nn as nn
import torch.nn.functional as F

FLAGS = {"naive": False, "checkpoint": "", "every": 10}
# Before torch 2.13 these had other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Unit:
    """All parameters, of which this rank updates 1/N, as in zero1.py. Here all are sent in one message."""

    def __init__(self, params):
        self.params = params
        self.sizes = [param.numel() for param in params]
        self.dtype = params[0].dtype
        self.flat = self.flatten(params)  # all weights, in one piece; the parameters become views of it
        for param, part in zip(params, self.flat[: sum(self.sizes)].split(self.sizes)):
            param.data = part.view(param.shape)
        self.own = self.flat.chunk(dist.get_world_size())[dist.get_rank()]  # this rank's 1/N, also a view
        self.shard = nn.Parameter(self.own.to(wide(self.dtype)))  # what AdamW updates: own, or in bf16 a copy

    def flatten(self, tensors):
        padding = tensors[0].new_zeros(-sum(self.sizes) % dist.get_world_size())  # so that shards are equal
        return torch.cat([*(tensor.detach().flatten() for tensor in tensors), padding])

    def reduce_scatter(self):
        gradients = self.flatten([param.grad for param in self.params])
        for param in self.params:
            param.grad = None
        received = torch.empty_like(self.shard, dtype=self.dtype)
        reduce_scatter(received, gradients)
        self.shard.grad = received.to(self.shard.dtype)

    def gather(self):
        self.own.copy_(self.shard.detach())  # fp32 to bf16; in fp32 they are the same memory
        all_gather(self.flat, self.own)


class NaiveCheckpoint:
    """All gather the whole table, row by row. Rank 0 writes it to one file, while the others wait."""

    def __init__(self, config):
        self.path = Path(config.checkpoint) / "all.pt"

    def start_save(self, step, rows):
        table = []
        for row in rows:
            full = row.new_empty(len(row) * dist.get_world_size())
            all_gather(full, row)
            if dist.get_rank() == 0:
                table.append(full.cpu())
        if dist.get_rank() == 0:
            torch.save((step, table), self.path)  # the others wait for it in the next reduce-scatter

    def load(self, rows):
        """Fill this rank's rows. Returns the checkpoint's step, or 0 if there is none."""
        if not self.path.exists():
            return 0
        step, table = torch.load(self.path)
        for row, full in zip(rows, table):
            own = full[dist.get_rank() * len(row) :][: len(row)]
            row[: len(own)] = own  # the table may end earlier: the rest is padding
        return step


# One rank writes what N could write, and its host needs the memory for all of it. And if rank 0 is killed
# while it writes, there is no checkpoint at all: the old one is overwritten, the new one not complete.


class Checkpoint:
    """Each rank writes its part to a file, in a thread, and reads what it needs from all files."""

    def __init__(self, config):
        self.folder = Path(config.checkpoint)
        # These fix the columns, the batches and the rounding. So does --data, but its file may be moved.
        self.flags = {name: getattr(config, name) for name in [*SHAPE, "dtype", "batch", "seed"]}
        self.group = dist.new_group(backend="gloo")  # the thread's: a group needs one order on all ranks
        self.thread = ThreadPoolExecutor(1)
        self.saving = None

    def start_save(self, step, rows):
        self.finish_save()  # the one before
        copied = torch.stack(rows).cpu().numpy()  # the next step changes the rows
        self.saving = self.thread.submit(self.write, step, copied)

    def finish_save(self):
        if self.saving:
            self.saving.result()  # raises the thread's error, if any

    def write(self, step, table):
        draft = self.folder / f"draft-{step:08}"
        draft.mkdir(exist_ok=True)
        np.save(draft / f"rank-{dist.get_rank()}.npy", table)
        checksums = [None] * dist.get_world_size()
        dist.all_gather_object(checksums, zlib.crc32(table), self.group)  # waits until all have written
        if dist.get_rank() == 0:
            (draft / "manifest.json").write_text(json.dumps({"flags": self.flags, "checksums": checksums}))
            draft.rename(self.folder / f"step-{step:08}")  # now it counts: a step-* is always complete
            for old in sorted(self.folder.glob("step-*"))[:-2]:
                shutil.rmtree(old.rename(draft))  # renamed first: half of it must not count as a step-*

    def load(self, rows):
        """Fill this rank's rows. Returns the checkpoint's step, or 0 if there is none."""
        if dist.get_rank() == 0:
            for draft in self.folder.glob("draft-*"):
                shutil.rmtree(draft)  # left by a run that was killed
        found = [max(self.folder.glob("step-*"), default=None)]
        dist.broadcast_object_list(found, group=self.group)  # rank 0's, so that all load the same
        newest = found[0]
        if newest is None:
            return 0
        manifest = json.loads((newest / "manifest.json").read_text())
        if manifest["flags"] != self.flags:
            sys.exit(f"--checkpoint {newest}: was saved with other flags: {manifest['flags']}")
        for i, checksum in enumerate(manifest["checksums"]):
            self.read(newest / f"rank-{i}.npy", i, checksum, rows)
        return int(newest.name.removeprefix("step-"))

    def read(self, path, i, checksum, rows):
        """Copy the columns that the i-th file and this rank have in common. Of 12 columns, saved by 2 ranks
        and loaded by 3, rank 1 needs 4 to 7: the last two of file 0, and the first two of file 1."""
        table = np.load(path, mmap_mode="c")  # c: torch wants to be able to write, but the file stays
        in_file, in_rank = table.shape[1], len(rows[0])
        file_start, rank_start = i * in_file, dist.get_rank() * in_rank
        start = max(file_start, rank_start)
        end = min(file_start + in_file, rank_start + in_rank)
        if start >= end:
            return
        if zlib.crc32(table) != checksum:
            sys.exit(f"--checkpoint {path}: is damaged; delete its folder to resume from the one before")
        for row, saved in zip(rows, table):
            part = saved[start - file_start : end - file_start]
            row[start - rank_start : end - rank_start] = torch.from_numpy(part)


def make_state(optimizer, shard):
    """AdamW's state, which it would create in its first step; here before, so that it can be loaded."""
    adam = {"exp_avg": torch.zeros_like(shard), "exp_avg_sq": torch.zeros_like(shard)}
    optimizer.state[shard] = adam | {"step": torch.zeros((), device=shard.device)}
    return optimizer.state[shard]


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if config.every < 1 or os.path.isfile(config.checkpoint):
        sys.exit("--every must be at least 1, and --checkpoint a folder")
    model = GPT(config).to(device)
    unit = Unit(list(model.parameters()))
    optimizer = torch.optim.AdamW([unit.shard], config.lr, fused=True)
    adam = make_state(optimizer, unit.shard)
    rows = [unit.shard.detach(), adam["exp_avg"], adam["exp_avg_sq"]]
    saved_step = 0
    if config.checkpoint:
        os.makedirs(config.checkpoint, exist_ok=True)
        checkpoint = NaiveCheckpoint(config) if config.naive else Checkpoint(config)
        saved_step = checkpoint.load(rows)
        adam["step"].fill_(saved_step)
        unit.gather()
    for step in range(saved_step + 1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for inputs, targets in microbatches(config, step, device, rank, world_size):
            # The batch's loss is the mean of all ranks' microbatches: each loss is divided by their number.
            loss = mean_loss(model(inputs), targets) / (config.accum * world_size)
            loss.backward()
            total_loss += loss.detach()
        unit.reduce_scatter()
        squares = squared_norm([unit.shard.grad])
        dist.all_reduce(squares)  # each rank has a different part of the gradients
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_([unit.shard], config.clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total_loss)
        unit.gather()
        if config.checkpoint and step % config.every == 0:
            checkpoint.start_save(step, rows)
        print_step(config, step, total_loss, norm, started)
    if config.checkpoint and not config.naive:
        checkpoint.finish_save()
    if config.save and rank == 0:
        torch.save(model.state_dict(), config.save)


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
