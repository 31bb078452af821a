"""Asynchronous data parallelism: a parameter server, and workers that need not wait for one another.

Idea
    A server holds the weights. Each of N workers pulls a copy of them, computes the gradient of its part of a
    batch, pushes that to the server, and begins again. Who waits for whom is a choice (--mode):

    bsp (bulk-synchronous): all wait for all. The N pushes of a step, summed, make one update, as in ddp.py.
    One slow worker makes all of them slow.
    asp (asynchronous): nobody waits for another worker's gradient. Each push, of 1/N of a batch, makes an
    update. If others came after its pull, its gradient is stale: of older weights than those that it updates.
    (Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.1)
    ssp (stale-synchronous): a worker pulls only if it has made at most S more pushes than the slowest.
    (Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013)

    naive: the updates of bsp, but workers take turns. All are threads of one process. (S: --staleness)

Timeline (asp; worker 0 is slower)
      server | sends |                      | update | sends |                      | update | update |
    worker 1 | pull  | forward and backward | push   | pull  | forward and backward | push   |
    worker 0 | pull  | forward and backward                                         |        | push

Memory (bytes; P parameters; w = 4 in fp32, 2 in bf16)
    parameters    4P      on the server; wP on each worker
    gradients     4P      on the server; wP on each worker
    optimizer     8P      AdamW's two moments, on the server

Sent (bytes to and from the server, for N pulls and N pushes)
    send          2NwP    weights to the workers, gradients to the server

Run
    python more/dp_async.py --workers 4 --mode asp --slow 4
    python more/dp_async.py --workers 4 --mode ssp --slow 4
    python more/dp_async.py --workers 4 --mode naive

Left out
    Servers in other processes, each with a part of the weights. In asp, a learning rate for N times as many
    updates, and more pushes for fast workers: here all make as many, so the slowest ends last.
"""

import argparse
import copy
import math
import os
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # not used, but if torch imports it later, processes may crash at exit
import torch.nn as nn
import torch.nn.functional as F

FLAGS = {"mode": ("bsp", "asp", "ssp", "naive"), "workers": 2, "staleness": 2, "slow": 1.0}


class Server:
    """Holds and updates the weights. Workers call wait_turn(), pull(), push(); train() calls serve_push()."""

    def __init__(self, module, config):
        self.module = module
        self.clip = config.clip
        self.optimizer = torch.optim.AdamW(module.parameters(), config.lr, fused=True)
        is_synchronous = config.mode in ("bsp", "naive")
        self.pushes_per_update = config.workers if is_synchronous else 1
        # Who waits for whom: how many pushes a worker may be ahead of the slowest when it pulls.
        self.most_ahead = {"asp": math.inf, "ssp": config.staleness}.get(config.mode, 0)
        self.clocks = [0] * config.workers  # each worker's pushes that have been served
        self.version = 0  # updates so far
        self.norm = None  # of the gradient of the last update
        self.ages = Counter()  # {updates between a pull and its push: how often}
        self.inbox = []  # pushes that wait for serve_push()
        self.error = None
        # A lock, for weights and clocks. wait_for() gives it back, and checks again when another thread
        # notifies this one.
        self.condition = threading.Condition()

    def wait_for(self, is_true):
        self.condition.wait_for(lambda: is_true() or self.error)
        if self.error:  # a thread has failed: end all, or they would wait forever
            raise self.error

    def wait_turn(self, worker):
        """Wait until the worker is at most most_ahead pushes ahead of the slowest."""
        with self.condition:
            self.wait_for(lambda: self.clocks[worker] <= min(self.clocks) + self.most_ahead)

    @torch.no_grad()
    def pull(self, replica):
        """Copy the weights into the replica. Returns their version."""
        with self.condition:
            for copied, param in zip(replica.parameters(), self.module.parameters()):
                copied.copy_(param)
            return self.version

    def push(self, worker, replica, version, loss):
        """Hand in the gradients of this version, and wait until the server has read them."""
        with self.condition:
            pushes = self.clocks[worker]
            self.inbox.append((worker, replica, version, loss))
            self.condition.notify_all()
            self.wait_for(lambda: self.clocks[worker] > pushes)
        replica.zero_grad()

    def serve_push(self):
        """Add a push to the gradients; after pushes_per_update, update. Returns the push's loss."""
        with self.condition:
            self.wait_for(lambda: self.inbox)
            worker, replica, version, loss = self.inbox.pop(0)
            self.ages[self.version - version] += 1
            for copied, param in zip(replica.parameters(), self.module.parameters()):
                gradient = copied.grad.to(param.device, copy=True).to(param.dtype)
                param.grad = gradient if param.grad is None else param.grad.add_(gradient)
            self.clocks[worker] += 1
            if sum(self.clocks) % self.pushes_per_update == 0:
                self.update()
            self.condition.notify_all()
        return loss

    def update(self):
        params = list(self.module.parameters())
        self.norm = squared_norm([param.grad for param in params]).sqrt()
        nn.utils.clip_grads_with_norm_(params, self.clip, self.norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1

    def fail(self, error):
        with self.condition:
            self.error = error
            self.condition.notify_all()


def train_share(server, worker, replica, step, config):
    """What a worker does: pull, forward and backward of its part of the step's batch, push."""
    server.wait_turn(worker)
    batches = microbatches(config, step, replica.norm.weight.device, worker, config.workers)
    version = server.pull(replica)
    started = time.perf_counter()
    total_loss = 0
    for inputs, targets in batches:
        # An update sums its pushes, and is to be the mean of their microbatches: divide by their number.
        loss = mean_loss(replica(inputs), targets) / (config.accum * server.pushes_per_update)
        loss.backward()
        total_loss += loss.detach()
    total_loss = total_loss.item()  # waits for the device
    if worker == 0:
        time.sleep((config.slow - 1) * (time.perf_counter() - started))
    server.push(worker, replica, version, total_loss)


def naive(steps, workers):
    """What each thread does, as (step, worker): here one thread, in which workers take turns."""
    return [[(step, worker) for step in steps for worker in workers]]


def concurrent(steps, workers):
    """A thread for each worker. They compute at the same time, as torch releases Python's lock (GIL)."""
    return [[(step, worker) for step in steps] for worker in workers]


def work(server, tasks, device, config):
    # On GPUs autograd runs all backwards of a device in one thread, so workers that share a GPU would take
    # turns. With this, a backward stays in its worker's thread.
    torch.autograd.set_multithreading_enabled(False)
    try:
        replica = copy.deepcopy(server.module).to(device, DTYPES[config.dtype])
        for step, worker in tasks:
            train_share(server, worker, replica, step, config)
    except BaseException as error:
        server.fail(error)


def train(config):
    device = join_world()
    if dist.get_world_size() > 1:
        sys.exit("dp_async.py is one process: start it with python, and with --workers")
    if config.workers < 1 or config.staleness < 0 or not 1 <= config.slow < math.inf:
        sys.exit("--workers must be at least 1, --staleness at least 0, --slow at least 1")
    gpus = torch.cuda.device_count()
    devices = [torch.device("cuda", i % gpus) if gpus else device for i in range(config.workers)]
    model = GPT(config).to(devices[0], wide(DTYPES[config.dtype]))  # bf16 would round small updates away
    server = Server(model, config)
    steps = range(1, config.steps + 1)
    divide = naive if config.mode == "naive" else concurrent
    shares = divide(steps, range(config.workers))
    torch.set_num_threads(torch.get_num_threads() // len(shares) or 1)  # they share the cores
    with ThreadPoolExecutor(config.workers) as threads:
        for device, tasks in zip(devices, shares):
            threads.submit(work, server, tasks, device, config)
        try:
            for step in steps:
                started = time.perf_counter()
                pushes = [server.serve_push() for _ in range(config.workers)]  # in asp and ssp any N
                total_loss = sum(pushes) * server.pushes_per_update / config.workers  # the mean of N pushes
                print_step(config, step, torch.tensor(total_loss, dtype=torch.float64), server.norm, started)
        except BaseException as error:
            server.fail(error)
            raise
    print(f"updates between a pull and its push: {dict(sorted(server.ages.items()))}")
    if config.save:
        torch.save(model.to(DTYPES[config.dtype]).state_dict(), config.save)


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
