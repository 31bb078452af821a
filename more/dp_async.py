"""Asynchronous data parallelism: a parameter server, and workers that need not wait for one another.

Idea
    A server has the weights. Each of N workers pulls a copy of them, computes the gradient of its share of a
    batch, pushes it to the server, and begins again. Who waits for whom is a choice (--mode):

    bsp (bulk synchronous parallel): all wait for all. The mean of N pushes, one of each worker, makes one
    update, as in ddp.py. One slow worker makes all of them slow.
    asp (asynchronous): no worker waits for another. Each push makes an update of its own. If others came
    since its pull, it is stale: the gradient of older weights than those that it updates (Dean et al., NIPS
    2012, 4.1).
    ssp (stale synchronous): a worker may begin a task if it is at most S pushes (--staleness) ahead of the
    slowest (Ho et al., NIPS 2013, section 2). So no push is too stale: at most (N-1)(2S+1) updates come
    between a pull and its push. At the pull each of the N-1 others is at most S pushes behind this worker;
    and until its push each gets at most S+1 ahead of it, as it begins its last task at most S ahead.

    Here the server and the workers are threads of one process.

Timeline (asp)
    the server | sends                       | update | sends                | update |      | update |
    worker 0   | pull | forward and backward | push   | pull | forward and backward | push |
    worker 1   | pull | forward and backward, but more slowly                       | push   | pull ...

Memory (bytes; P parameters)
                  server    a worker
    parameters    mP        wP          w = 4 in fp32, 2 in bf16; m = 4, as the server's are fp32 in bf16, too
    gradients     mP        wP
    optimizer     KP        0           K = 8 for AdamW's two moments, 0 for SGD (in fp64 w = m = 8, K = 16)

Sent (bytes to and from the server, in N pushes: one printed line)
    send    2NwP    in each push the gradients, and before it the weights that were pulled

Run
    python more/dp_async.py --mode asp --workers 4 --slow 4
    python more/dp_async.py --mode ssp --staleness 2 --workers 8 --size gpt2 --dtype bf16 --batch 64

Left out
    Servers in other processes, each with a shard of the weights; compressed pushes.
    If a worker fails, the run ends with its error. Downpour (Dean et al.) goes on without it.
    Each worker has its own buffers, such as BatchNorm's statistics: the server's never change.
    Not noticed: a worker that hangs. In bsp and ssp the others wait for it, for ever.
    asp and ssp make N times as many updates as bsp. The learning rate is not adapted to that.
"""

import argparse
import copy
import math
import os
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F


class Server:
    """Has the weights, and updates them. If time did not matter, bsp would be this loop:

        for shares in batches:
            for replica, share in zip(replicas, shares):
                pull(replica)                     # copy the weights into it
                loss(replica, share).backward()
                push(replica)                     # add its gradients / N to those of the weights
            optimizer.step()
            optimizer.zero_grad()

    This has two problems. Workers take turns. So here each has a thread, which calls take(), pull() and
    push(), while the server's thread calls serve(). (They compute at the same time, as torch lets go of
    Python's lock meanwhile.) And even then an update waits for the slowest worker. So here may_go_on()
    decides who waits: in bsp all do, in asp nobody, in ssp whoever is too far ahead.

    tasks: an iterable of tuples, each of which is done by one worker. max_norm: for clipping."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        tasks,
        workers: int,
        mode: str,
        staleness: int = 0,
        max_norm: float = math.inf,
    ):
        self.module = module
        self.optimizer = optimizer
        self.most_ahead = {"bsp": 0, "ssp": staleness, "asp": math.inf}[mode]  # pushes
        self.max_norm = max_norm
        self.pushes_per_update = workers if mode == "bsp" else 1
        # Threads read and change what follows only while they hold this lock, and wake the others when they
        # have changed it. While one waits for a condition, it lets go of the lock.
        self.condition = threading.Condition()
        self.tasks = deque(tasks)  # those that nobody has begun
        self.busy = set()  # workers that have begun a task whose push has not been applied
        self.clocks = [0] * workers  # the pushes of each
        self.inbox = deque()  # pushes that wait for serve()
        self.version = 0  # the number of updates
        self.ages = Counter()  # {updates between a pull and its push: pushes}
        self.error = None
        if len(self.tasks) % self.pushes_per_update:
            raise ValueError("in bsp the tasks must be a multiple of the workers, or the last are never used")

    def may_go_on(self, worker):
        """The rule: a worker that begins a task is at most so many pushes ahead of the slowest."""
        return self.clocks[worker] <= min(self.clocks) + self.most_ahead

    # What a worker calls, for each task.

    def take(self, worker):
        """Wait until the worker may go on. Returns its task, or None if no task is left."""
        with self.condition:
            if worker in self.busy:
                raise RuntimeError("a task ended without a push(): each must push once")
            self.condition.wait_for(lambda: not self.tasks or self.may_go_on(worker))
            if not self.tasks:
                return None
            self.busy.add(worker)
            return self.tasks.popleft()

    @torch.no_grad()
    def pull(self, replica):
        """Copy the weights into a worker's replica of the module. Returns their version."""
        # With the lock: an update meanwhile would leave the replica with some old and some new weights.
        with self.condition:
            for copied, param in zip(replica.parameters(), self.module.parameters()):
                copied.copy_(param)
            return self.version

    def push(self, worker, replica, version, loss):
        """Hand in the replica's gradients, of weights of this version, and wait until the server has them."""
        with self.condition:
            self.inbox.append((worker, replica, version, loss))
            self.condition.notify_all()
            # The server reads the gradients where they are, so the next backward must not change them yet.
            self.condition.wait_for(lambda: worker not in self.busy)
        replica.zero_grad()

    # What the server's thread does.

    def serve(self, pushes):
        """Apply so many pushes. Returns the mean of their losses and the gradient norm of the last update."""
        losses = []
        for _ in range(pushes):
            with self.condition:
                self.condition.wait_for(lambda: self.inbox or self.has_ended())
                if self.has_ended():
                    raise self.error or RuntimeError("serve() waits for more pushes than there are tasks")
                worker, replica, version, loss = self.inbox.popleft()
                losses.append(loss)
                self.ages[self.version - version] += 1
                self.clocks[worker] += 1
                self.busy.remove(worker)
                norm = self.apply(replica)
                self.condition.notify_all()
        return torch.tensor(losses, dtype=torch.float64).mean(), norm

    def apply(self, replica):
        """Add a push to the gradients. With the last one of an update, make it. Returns the gradient norm."""
        for param, copied in zip(self.module.parameters(), replica.parameters()):
            if copied.grad is not None:
                gradient = copied.grad.to(param.device, copy=True)
                param.grad = gradient.to(param.dtype) if param.grad is None else param.grad.add_(gradient)
        if sum(self.clocks) % self.pushes_per_update:
            return None  # more pushes belong to this update
        for param in self.module.parameters():
            if param.grad is not None:
                param.grad /= self.pushes_per_update
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.max_norm)
        self.optimizer.step()
        self.module.zero_grad()
        self.version += 1
        return norm

    def has_ended(self):
        return self.error or not (self.inbox or self.busy or self.tasks)

    def close(self, error=None):
        """Let all workers end, and serve() raise the error."""
        with self.condition:
            self.error = error
            self.tasks.clear()
            self.busy.clear()
            self.condition.notify_all()


def work(server, worker, device, dtype, function, *arguments):
    """A worker's thread: function(server, worker, replica, *task, *arguments) for one task after another."""
    # On GPUs autograd has one thread for each device, in which the backwards of workers that share a device
    # would take turns. With this a worker's backwards stay in its own thread.
    torch.autograd.set_multithreading_enabled(False)
    try:
        replica = copy.deepcopy(server.module).to(device, dtype)
        while (task := server.take(worker)) is not None:
            function(server, worker, replica, *task, *arguments)
    except BaseException as error:
        server.close(error)  # or all would wait for this worker


def train_share(server, worker, replica, step, share, config, text, slowdown):
    """A task: push the gradient of a share of a step's batch, in `slowdown` times the time that it takes."""
    batches = microbatches(config, text, step, replica.norm.weight.device, share, config.workers)
    version = server.pull(replica)
    started = time.perf_counter()
    loss = 0
    for inputs, targets in batches:
        # Gradients add up over microbatches and each loss is a mean: divide to get the share's mean.
        microloss = mean_loss(replica(inputs), targets) / config.accum
        microloss.backward()
        loss += microloss.detach()
    loss = loss.item()  # waits for the device
    time.sleep((slowdown - 1) * (time.perf_counter() - started))
    server.push(worker, replica, version, loss)


def train(config):
    if int(os.getenv("WORLD_SIZE") or 1) > 1:
        refuse("runs in one process: start it without torchrun, with --workers")
    device, text = set_up(
        config, f" | {config.mode} {config.staleness} | slow {config.slow:g}", config.workers
    )
    # Without GPUs, each worker has a part of the cores.
    torch.set_num_threads(torch.get_num_threads() // config.workers or 1)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    # In bf16 small updates would be lost, so the server's weights are in fp32.
    dtype = DTYPES[config.dtype]
    model = GPT(config).to(device, torch.promote_types(dtype, torch.float32))
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    tasks = product(range(1, config.steps + 1), range(config.workers))
    server = Server(model, optimizer, tasks, config.workers, config.mode, config.staleness, config.clip)
    # At the end of this block the server is closed: the workers end, and the pool waits for their threads.
    with ThreadPoolExecutor(config.workers) as threads, closing(server):
        for worker in range(config.workers):
            device = torch.device(device.type, worker % gpus)
            slowdown = 1 if worker else config.slow
            threads.submit(work, server, worker, device, dtype, train_share, config, text, slowdown)
        # This is the server's thread. In asp and ssp the pushes of a printed step are any N.
        for step in range(1, config.steps + 1):
            started = time.perf_counter()
            print_step(config, step, *server.serve(config.workers), started)
    print(f"updates between a pull and its push: {dict(sorted(server.ages.items()))}")
    if config.save:
        save_weights(model.to(dtype).state_dict(), config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    add = own.add_argument
    add("--workers", type=int, default=2, help="one for each device")
    add("--mode", default="bsp", choices=("bsp", "asp", "ssp"), help="who waits for whom")
    add("--staleness", type=int, default=2, help="S: pushes ahead of the slowest, in ssp")
    add("--slow", type=float, default=1.0, help="worker 0 takes as many times as long")
    return read_flags(arguments, own, workers=(1, 16), staleness=(0, 16), slow=(1, 1000))


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
