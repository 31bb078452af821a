"""Asynchronous data parallelism: a parameter server, and workers that need not wait for one another.

Idea
    A server has the weights. Each of N workers pulls a copy of them, computes the gradient of its share of a
    batch, pushes it to the server, and begins again. Who waits for whom is a choice (--mode):

    bsp (bulk synchronous parallel): all wait for all. The mean of N pushes, one of each worker, makes one
    update, as in ddp.py. One slow worker makes all of them slow.
    asp (asynchronous): nobody waits. Each push makes an update of its own. If others came since its pull, it
    is stale: it is the gradient of older weights than those that it updates (Dean et al., NIPS 2012, 4.1).
    ssp (stale synchronous): a worker may be ahead of the slowest by S pushes (--staleness), but begins no
    task if it is further ahead. So no push is too stale (Ho et al., NIPS 2013, section 2).

    Here all are threads of one process, and the N pushes of a step's N shares need not come in order.

Timeline (asp)
    the server | pulls                       | update | pull                 | update |      | update |
    worker 0   | pull | forward and backward | push   | pull | forward and backward | push |
    worker 1   | pull | forward and backward, but more slowly                       | push   | pull ...

Memory (bytes; P parameters of w bytes each: w = 4 in fp32, 2 in bf16, 8 in fp64)
                  server       a worker
    parameters    (w+c)P       wP          c = 4 in bf16, for fp32 masters, else 0
    gradients     wP+3cG/2     wP          in bf16 MasterWeights copies G = 2^24 at a time, or one tensor's
    optimizer     KP           0           K = 8 for AdamW's two moments (fp64: 16), 0 for SGD

Sent (bytes through the server for N pushes, which one line of the output is about)
    send    2NwP    for each push the weights that were pulled and the gradients
    In ssp at most (N-1)(2S+1) updates come between a pull and its push: each of the N-1 others may be S
    pushes behind this worker at the pull, and may get S+1 ahead before it has to wait.

Run
    python dp_async.py --mode asp --workers 4 --slow 4
    python dp_async.py --mode ssp --staleness 2 --workers 8 --size gpt2 --dtype bf16 --batch 64

Left out
    Servers in other processes, each with a shard of the weights; compressed pushes.
    A worker that fails is left out, and another does its task; in bsp the run ends with its error.
    Each worker has its own buffers, such as BatchNorm's statistics: the server's never change.
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
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # first: if torch.optim imports it later, the process group is never freed
import torch.nn as nn
import torch.nn.functional as F


class Server:
    """Has the weights, and updates them. If time did not matter, bsp would be this loop:

        for shares in batches:
            for replica, share in zip(replicas, shares):
                pull(replica)
                loss(replica, share).backward()
            for param, *copies in zip(module.parameters(), *(each.parameters() for each in replicas)):
                param.grad = sum(copied.grad for copied in copies) / N
            optimizer.step()

    This has two problems. Workers take turns. So here each has a thread, which calls take(), pull() and
    push(), while the server's thread calls serve(). And even then an update waits for the slowest worker. So
    here may_go_on() decides who waits: in bsp all do, in asp nobody, in ssp whoever is too far ahead.

    tasks: an iterable of tuples, each of which is done by one worker. max_norm: for clipping."""

    def __init__(self, module, optimizer, tasks, workers, mode, staleness=0, max_norm=math.inf):
        self.module = module
        self.optimizer = optimizer
        self.mode = mode
        self.most_ahead = {"bsp": 0, "ssp": staleness, "asp": math.inf}[mode]  # pushes
        self.max_norm = max_norm
        self.pushes_per_update = workers if mode == "bsp" else 1
        # Threads read and change what follows only while they hold this lock, and wake the others when they
        # have changed it. While one waits for a condition, it lets go of the lock.
        self.condition = threading.Condition()
        self.tasks = deque(tasks)  # those that nobody has begun
        self.doing = {}  # {worker: the task that it has begun and not pushed}
        self.clocks = dict.fromkeys(range(workers), 0)  # {worker that has not failed: its pushes}
        self.inbox = deque()  # pushes that wait for serve()
        self.version = 0  # the number of updates
        self.ages = Counter()  # {staleness, in updates: pushes}
        self.error = None

    def may_go_on(self, worker):
        """The rule: a worker that begins a task is at most so many pushes ahead of the slowest."""
        return self.clocks[worker] <= min(self.clocks.values()) + self.most_ahead

    # What a worker calls, for each task.

    def take(self, worker):
        """Wait until the worker may go on. Returns its task, or None if all have been done."""
        with self.condition:
            # Without a task it waits for those that others do: if one fails, its task comes back.
            self.condition.wait_for(lambda: self.may_go_on(worker) if self.tasks else not self.doing)
            if self.tasks:
                self.doing[worker] = self.tasks.popleft()
            return self.doing.get(worker)

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
            self.condition.wait_for(lambda: worker not in self.doing)
        replica.zero_grad()

    # What the server's thread does.

    def serve(self, pushes):
        """Apply so many pushes. Returns the mean of their losses and the gradient norm of the last update."""
        losses = []
        for _ in range(pushes):
            with self.condition:
                self.condition.wait_for(lambda: self.error or self.inbox)
                if self.error:
                    raise self.error
                worker, replica, version, loss = self.inbox.popleft()
                losses.append(loss)
                self.ages[self.version - version] += 1
                self.clocks[worker] += 1
                del self.doing[worker]
                norm = self.apply(worker, replica)
                self.condition.notify_all()
        return torch.tensor(losses, dtype=torch.float64).mean(), norm

    def apply(self, worker, replica):
        """Add a push to the gradients. With the last one of an update, make it. Returns the gradient norm."""
        for param, copied in zip(self.module.parameters(), replica.parameters()):
            if copied.grad is not None:
                gradient = copied.grad.to(param.device, copy=True)
                param.grad = gradient if param.grad is None else param.grad.add_(gradient)
        # In bsp a worker that is ahead has pushed before others. The last one to push is ahead of nobody.
        if self.mode == "bsp" and not self.may_go_on(worker):
            return None
        grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        norm = torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).norm() / self.pushes_per_update
        # Clipping and the mean over pushes in one factor.
        scale = (self.max_norm / (norm + 1e-6)).clamp(max=1) / self.pushes_per_update
        torch._foreach_mul_(grads, scale.to(param))
        self.optimizer.step()
        self.module.zero_grad()
        self.version += 1
        return norm

    # A reader may skip to work(): this is for workers that fail, and for updates that do.

    def lose(self, worker, error):
        """A worker failed: another does its task. In bsp, or if none is left, the run ends with its error."""
        with self.condition:
            del self.clocks[worker]  # or those ahead of it would wait for ever
            if worker in self.doing:
                self.tasks.appendleft(self.doing.pop(worker))
            if self.mode == "bsp" or not self.clocks:
                self.stop(error)
            print(f"worker {worker} failed: {error!r}", file=sys.stderr)
            self.condition.notify_all()

    def stop(self, error):
        """Let the workers end, and serve() raise the error."""
        with self.condition:
            self.error = error
            self.tasks.clear()
            self.doing.clear()
            self.condition.notify_all()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.stop(error)  # or the workers would wait for a server that is gone


def work(server, worker, device, function, *arguments):
    """A worker's thread: function(server, worker, replica, *task, *arguments) for one task after another."""
    # On GPUs autograd has one thread for each device, in which the backwards of workers that share a device
    # would take turns. With this a worker's backwards stay in its own thread.
    torch.autograd.set_multithreading_enabled(False)
    try:
        replica = copy.deepcopy(server.module).to(device)
        while task := server.take(worker):
            function(server, worker, replica, *task, *arguments)
    except BaseException as error:
        server.lose(worker, error)


class MasterWeights:  # updates fp32 copies of bf16 parameters, 64 MiB at a time (arXiv 1910.02054, 3.1)
    def __init__(self, optimizer_class, params, **options):
        self.groups = []
        for group in torch._utils._take_tensors(params, 2**25):  # bytes of bf16, twice that in fp32
            master = nn.Parameter(nn.utils.parameters_to_vector(group).float())
            self.groups.append((group, master, optimizer_class([master], **options)))

    @torch.no_grad()
    def step(self):
        for params, master, optimizer in self.groups:
            grads = [param.grad for param in params]
            master.grad = nn.utils.parameters_to_vector(grads).float()
            optimizer.step()
            master.grad = None
            parts = torch._utils._unflatten_dense_tensors(master, params)
            torch._foreach_copy_(params, parts)


def train_share(server, worker, replica, step, share, config, text, times):
    """A task: push the gradient of a share of a step's batch, in `times` as much time as it takes."""
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
    time.sleep((times - 1) * (time.perf_counter() - started))
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
    devices = [torch.device(device.type, i % gpus) for i in range(config.workers)]
    model = GPT(config).to(device, DTYPES[config.dtype])
    optimizer_class = OPTIMIZERS[config.optim]
    if config.dtype == "bf16":
        optimizer_class = partial(MasterWeights, optimizer_class)
    optimizer = optimizer_class(model.parameters(), lr=config.lr, fused=True)
    tasks = product(range(1, config.steps + 1), range(config.workers))
    server = Server(model, optimizer, tasks, config.workers, config.mode, config.staleness, config.clip)
    with ThreadPoolExecutor(config.workers) as threads, server:
        for worker, device in enumerate(devices):
            times = 1 if worker else config.slow
            threads.submit(work, server, worker, device, train_share, config, text, times)
        # This is the server's thread. In asp and ssp the pushes of a printed step are any N.
        for step in range(1, config.steps + 1):
            started = time.perf_counter()
            print_step(config, step, *server.serve(config.workers), started)
    print(f"staleness of the pushes: {dict(sorted(server.ages.items()))}")
    if config.save:
        save_weights(model.state_dict(), config.save)


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
