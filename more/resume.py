"""Resume: sharded checkpoints, which N ranks save while training goes on and M ranks load.

Idea
    The optimizer is sharded, as in zero1.py: each rank has 1/N of the masters (the weights in fp32) and of
    Adam's two moments, and writes them to a file of its own. When all have confirmed, rank 0 publishes the
    files with a manifest of their checksums. Until then they do not count, so a run may be killed at any
    moment. Each of M ranks reads what its part needs, whoever wrote it (ByteCheckpoint, arXiv 2407.20143).

    Training waits for a copy in memory, not for the disk (CheckFreq, FAST 2021). Batches follow from --seed
    and the step, and there is no dropout, so there is no position or random state to save. Save every
    sqrt(2 x seconds that a save costs x seconds between failures) seconds (Young, 1974).

Timeline
    training | step 9 | step 10 | copy | step 11 | step 12 | step 13
      saving |        |         |      | rank-0.bin, fsync | confirm | rename

Memory (bytes; P parameters; w of a weight; m of a master or moment: 4, in fp64 8; c: 4 in bf16, else 0)
    parameters    wP          all weights
    gradients     2wP+cP/N    each parameter's; a copy in one tensor; in bf16 the shard's in fp32
    optimizer     3mP/N       the shard's masters and two moments; as much on the host to save; on disk 3mP

Sent (bytes that a rank of a ring sends in a step; a save sends a few numbers)
    all-reduce    2wP(N-1)/N
    all-gather    wP(N-1)/N

Run
    torchrun --nproc_per_node=4 more/resume.py --checkpoint checkpoints --every 5    # then on 2
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    (else restarted ranks find the dead ones' addresses, and
                                                   torchrun must restart all of them once more)
    torchrun --standalone --nproc_per_node=8 --max-restarts=3 more/resume.py --size gpt2-xl --checkpoint xl

Left out
    ZeRO-1's reduce-scatter. Buffers, schedules and random states. The steps after the last multiple of
    --every are in no checkpoint. Another --batch is refused. Not noticed: another --lr, --clip, --accum or
    --data, with which training goes on; parameters in another order. If nodes do not share the folder, its
    checkpoints lack other nodes' files, and no run can load them. Two jobs in one folder spoil each other's
    saves. Links in it are followed. A power cut may take a folder that was made shortly before.
"""

import argparse
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


def save(folder, flags, keep, group, step, state):
    """Save a matrix; `state` is this rank's 1/N of its columns. All ranks call it. Rank 0 returns whether it
    succeeded, the others True."""
    draft = folder / f"draft-{step:08}"
    path = draft / f"rank-{dist.get_rank()}.bin"
    try:
        answer = checksum(state, dist.get_rank() * state.shape[1])
        draft.mkdir(exist_ok=True)
        path.write_bytes(state)
        sync(path)
    except OSError as problem:
        answer = problem
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer, group=group)
    return dist.get_rank() > 0 or publish(folder, step, draft, flags, answers, keep)


def publish(folder, step, draft, flags, answers, keep):
    """If all ranks have written their files, rename the draft: step-* appears whole or not at all."""
    target = folder / f"step-{step:08}"
    try:
        for answer in answers:
            if isinstance(answer, OSError):
                raise answer
        path = draft / "manifest.txt"
        path.write_text("\n".join([target.name, *flags, *map(str, answers)]))
        # All bytes and names must be on the disk, else a power cut may keep the new name and lose them.
        sync(path)
        sync(draft)
        draft.rename(target)
        sync(folder)
        for old in listed(folder, "step")[:-keep]:
            shutil.rmtree(old.rename(draft))  # killed here: half a draft, never half a step-*
    except OSError as problem:
        say(f"step {step}: {problem}")
        shutil.rmtree(draft, ignore_errors=True)
    return target.is_dir()


def listed(folder, kind):
    """The steps or drafts in a folder, oldest first. Files with other names are neither read nor removed."""
    return sorted(folder.glob(f"{kind}-{8 * '[0-9]'}"))


def load(folder, flags, group, state, numel):
    """Fill this rank's state, a part of numel columns, from the newest checkpoint. Returns its step, or 0."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [max(listed(folder, "step"), default=None)]
    dist.broadcast_object_list(found, group=group)  # what rank 0 sees
    newest = found[0]
    if not newest:
        return 0
    path = newest / "manifest.txt"
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError as problem:
        raise ValueError(f"{problem}; remove {newest} to use an older one") from problem
    for line, ours in zip(lines, [newest.name, *flags]):
        if line != ours:
            raise ValueError(f"{path} has {line!r}, not {ours!r}; remove {newest}, or use its flags")
    checksums = lines[1 + len(flags) :] or ["none"]  # of the files of the ranks that saved
    n_columns = -(-numel // len(checksums))  # of each file, rounded up: the last one ends in zeros
    for i, expected in enumerate(checksums):
        path = newest / f"rank-{i}.bin"
        total = torch.tensor(read(path, i * n_columns, n_columns, state))
        # Each column was read on exactly one rank, or is padding, whose zeros add nothing.
        dist.all_reduce(total, group=group)
        if f"{total}" != expected:
            raise ValueError(f"{path} is not as manifest.txt says; remove {newest} to use an older one")
    return int(newest.name.removeprefix("step-"))


def read(path, start, n_columns, state):
    """Copy the columns that are in this file and in this rank's state. Returns their checksum."""
    own_start = dist.get_rank() * state.shape[1]
    first = max(start, own_start)
    end = max(first, min(start + n_columns, own_start + state.shape[1]))
    try:
        saved = np.memmap(path, f"f{state.itemsize}", "c", shape=(len(state), n_columns))
    except (OSError, ValueError):
        return 0  # missing or too short, so that the checksum will be wrong
    part = saved[:, first - start : end - start]
    state[:, first - own_start : end - own_start] = torch.from_numpy(part)  # "c": it must be writable
    return checksum(part, first)


def checksum(part, start):
    """Sum, mod 2^64, of all 32-bit words, each times an odd number that no other place of the matrix has.
    Unlike CRCs, checksums of a file's parts, which different ranks read, add up to the file's."""
    words = part.view("i4")  # of 64 bits two flipped signs would add up to 2^64
    column = np.arange(words.shape[1]) + start * part.itemsize // 4
    of_row = 3 ** (25 * np.arange(len(words)))
    return int(np.einsum("i,ij,j->", of_row, words, 2 * column + 1))


def sync(path):
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def say(text):
    if dist.get_rank() == 0:
        print(f"{Path(__file__).name}: --checkpoint: {text}", file=sys.stderr)


class ShardedOptimizer:
    """Parameters are parts of one vector, of which this rank updates 1/N. `state` (3, P/N): its masters and
    Adam's moments, as rows of one tensor, so that a save is one copy. (SGD leaves the moments 0.)"""

    def __init__(self, params: list[nn.Parameter], optimizer_class: type[torch.optim.Optimizer], **options):
        self.params = params
        self.numel = sum(map(torch.numel, params))
        self.padding = params[0].new_zeros(-self.numel % dist.get_world_size())
        self.flat_param = parameters_to_vector([*params, self.padding]).detach()
        vector_to_parameters(self.flat_param, params)
        self.weights = self.flat_param.chunk(dist.get_world_size())[dist.get_rank()]
        self.state = self.weights.repeat(3, 1).to(torch.promote_types(self.weights.dtype, torch.float32))
        self.state[1:] = 0
        self.shard = nn.Parameter(self.state[0])
        self.optimizer = optimizer_class([self.shard], **options)
        self.steps = torch.zeros((), device=self.weights.device)
        # As torch's Adam names them. It would make moments of its own at the first step if there were none.
        state = {"step": self.steps, "exp_avg": self.state[1], "exp_avg_sq": self.state[2]}
        self.optimizer.state[self.shard] = state

    def step(self, max_norm):
        """Clip the gradients' norm to max_norm, then update. Returns the norm before clipping."""
        flat_grad = parameters_to_vector([*(param.grad for param in self.params), self.padding])
        dist.all_reduce(flat_grad)
        # In pieces: a CPU makes an fp64 copy of each, which its cache holds if the piece is small.
        norm = torch.stack(torch._foreach_norm(flat_grad.split(2**20), dtype=torch.float64)).norm()
        self.shard.grad = flat_grad.chunk(dist.get_world_size())[dist.get_rank()].to(self.shard)
        nn.utils.clip_grads_with_norm_(self.shard, max_norm, norm.to(self.shard))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.unshard()
        if len(self.optimizer.state[self.shard]) > 3:
            raise ValueError("no checkpoint has this optimizer's state: take AdamW, or SGD without momentum")
        return norm

    def unshard(self):
        self.weights.copy_(self.state[0])
        all_gather(self.flat_param, self.weights)


def resume(config, sharded):
    """Load the newest checkpoint. Returns save()'s arguments but the last two, and a buffer for its state."""
    flags = ["format 4"]
    for name in (*SHAPE, "dtype", "optim", "seed", "batch"):
        flags.append(f"{name} {getattr(config, name)}")
    group = dist.new_group(backend="gloo")  # for the thread that saves
    try:
        steps = load(config.checkpoint, flags, group, sharded.state, sharded.numel)
    except (OSError, ValueError) as problem:
        refuse(f"--checkpoint {config.checkpoint}: {problem}")
    if steps >= config.steps:
        say(f"has step {steps} already; raise --steps to go on")
    for draft in listed(config.checkpoint, "draft"):
        shutil.rmtree(draft, ignore_errors=True)  # a killed run left it
    sharded.steps.fill_(steps)
    sharded.unshard()
    snapshot = torch.empty_like(sharded.state, device="cpu", pin_memory=sharded.state.is_cuda)
    return (config.checkpoint, flags, config.keep, group), snapshot


def train(config):
    """Train with these flags, from the newest checkpoint on."""
    device, text = set_up(config, f" | checkpoint {config.checkpoint} | every {config.every}")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(device, DTYPES[config.dtype])
    sharded = ShardedOptimizer(list(model.parameters()), OPTIMIZERS[config.optim], lr=config.lr, fused=True)
    thread = ThreadPoolExecutor(1)
    saving = thread.submit(bool, True)  # as if a save had succeeded
    if config.checkpoint:
        how, snapshot = resume(config, sharded)
    for step in range(int(sharded.steps) + 1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        for inputs, targets in microbatches(config, text, step, device, rank, world_size):
            microloss = mean_loss(model(inputs), targets) / config.accum / world_size
            microloss.backward()  # gradients add up over microbatches and ranks: hence the divisions
            loss += microloss.detach()
        grad_norm = sharded.step(config.clip)
        model.zero_grad()
        dist.all_reduce(loss)
        if config.checkpoint and step % config.every == 0:
            if not saving.done():
                say(f"step {step} waits for the save before it; raise --every")
            saving.result()  # which still reads the snapshot
            saving = thread.submit(save, *how, step, snapshot.copy_(sharded.state).numpy())
        if config.no_overlap:
            saving.result()
        print_step(config, step, loss, grad_norm, started)
    if config.save and rank == 0:
        save_weights(model.state_dict(), config.save)
    if not saving.result():
        refuse(f"--checkpoint {config.checkpoint}: the last save failed; make room, and run it again")


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    add = own.add_argument
    add("--checkpoint", type=Path, help="folder for checkpoints; training goes on from the newest")
    add("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    add("--keep", type=int, default=2, help="checkpoints to keep")
    add("--no-overlap", action="store_true", help="training waits until a checkpoint is written")
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
