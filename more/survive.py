"""Survive: a rank dies, and the others redo the step without it.

Idea
    Workers train as in ddp.py, but a launcher starts them, and it goes on when one of them dies. If that
    happens in an all-reduce, some of the others may have the sum, and some not. So nobody updates its weights
    yet. Each worker sends the launcher a vote: whether it has the sum. If all have voted yes, the step
    counts, and all update. Otherwise the survivors form a new group, divide the batch among themselves, and
    redo the step. So losses and weights are single.py's, whoever dies, and whenever. (Two-phase commit:
    Gray, Notes on Data Base Operating Systems, 1978)

    A worker that has not voted six --timeouts after the last vote is killed, and counts as dead.

Timeline (from step 3 on; v: all vote, and the launcher answers)
    worker 0, 1 | all-reduce | v | update | compute 4 | all-reduce fails | v, new group | compute 4 ...
       worker 2 | all-reduce | v | update | dies

Memory (bytes on each of N workers; P parameters)
    parameters    wP              w = 4 in fp32, 2 in bf16
    parameters    +4P             with --dtype bf16: master weights
    gradients     4P              bf16 ones become fp32 in the update
    optimizer     8P              AdamW's two moments

Sent (bytes, by each worker in each step)
    all-reduce    2wP(N-1)/N      in a ring; collectives.py shows why

Run
    python more/survive.py --workers 4 --kill 1@3,0@6     # worker 1 dies in step 3, and worker 0 in step 6
    python more/survive.py --workers 4 --steps 200        # kill -9 or kill -STOP a worker meanwhile
    python more/survive.py --workers 4 --naive            # wrong if, at a death, only some have the sum
    torchrun --nproc_per_node=8 more/survive.py           # no votes: a death ends the job

Left out
    Newcomers (a survivor would send them weights and moments). Several machines. NCCL may wait for the dead
    forever. If the launcher dies, or the worker that is saving, the job ends.
"""

import argparse
import multiprocessing
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # not used, but if torch imports it later, processes may crash at exit
import torch.nn as nn
import torch.nn.functional as F

FLAGS = {"naive": False, "workers": 0, "timeout": 10.0, "kill": ""}


def naive(vote):
    """Whether a worker updates its weights: if it has the sum. (Its vote is "yes", or what failed.)"""
    return vote == "yes"


# Under torchrun this is enough: a death ends the job. But suppose the others go on: worker 1 has the sum, and
# worker 2 dies before it sends the last part of it to worker 0. Worker 1 updates, and does the next step,
# while worker 0 does this one again. Then they add up gradients of different weights, unnoticed.
# So they vote, and the launcher decides. Why is this safe? Who knows what, and when:
#                            a worker                          the launcher
#     after the all-reduce   whether it has the sum            nothing
#     after its vote         nothing new: so it waits          some of the votes
#     when all have voted    nothing new                       whether all have the sum: so it decides
#     after the answer       whether the step counts           that every survivor will learn it
# When all have the sum, each can update, even if others die. The dead stay dead: who hangs is killed first.


def hear_all(workers, timeout):
    """{worker: its vote, or None if it is dead}. workers: {worker: (process, pipe)}."""
    votes = {}
    while len(votes) < len(workers):
        silent = [worker for worker in workers if worker not in votes]
        # Before the first vote all may take as long as they need. Then the others should vote soon: a worker
        # waits at most one timeout in an all-reduce, and gloo at most five for a connection.
        patience = 6 * timeout if any(votes.values()) else None
        ready = wait([workers[worker][1] for worker in silent], patience)
        for worker in silent:
            process, pipe = workers[worker]
            if not ready:
                process.kill()  # it hangs; it must not wake up and go on. Now its pipe ends, too
            elif pipe in ready:
                votes[worker] = None
                with suppress(EOFError, ConnectionError):  # the pipe ends when the worker does
                    votes[worker] = pipe.recv()
    return votes


def lead(config, workers):
    """Let a step count if all have voted yes. Returns the exit code of the worker that saves the weights."""
    step, failures = 1, 0
    while step <= config.steps or not failures:
        votes = hear_all(workers, config.timeout)  # the first are "ready", no "yes": so the first group forms
        counts = all(vote == "yes" for vote in votes.values())
        if counts:
            step += 1
        else:
            workers = {worker: workers[worker] for worker in workers if votes[worker] is not None}
            print(f"workers {[*workers]} do step {step}", flush=True)
            failures += 1
        if not workers or failures > 2 * config.workers:  # more than deaths alone explain
            sys.exit(f"step {step} fails: {votes}")
        for _, pipe in workers.values():
            with suppress(ConnectionError):  # it has died since its vote
                pipe.send((counts, failures, [*workers]))
    saver, _ = workers[min(workers)]  # rank 0 of the last group
    saver.join()
    return saver.exitcode


def launch(config):
    """Start the workers, and lead them."""
    if not config.timeout > 0:
        sys.exit("--timeout: must be more than 0")
    microbatches(config, 1, "cpu", 0, config.workers)  # ends here if they cannot share the batch
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # In this store the members of a group find each other. It outlives them.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.nn"])  # seconds, once
    workers = {}
    try:
        for worker in range(config.workers):
            pipe, other_end = context.Pipe()
            process = context.Process(target=work, args=(config, worker, other_end, store.port))
            process.start()
            other_end.close()  # now only the worker has it
            workers[worker] = process, pipe
            print(f"worker {worker} is process {process.pid}", flush=True)
        return lead(config, workers)
    finally:
        for process, _ in workers.values():
            process.kill()


def work(config, worker, pipe, port):
    """What a worker's process does."""
    os.environ["LOCAL_RANK"] = str(worker)  # which chooses its GPU
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # connect in the first all-reduce, which may fail, not before
    train(config, Member(config, worker, pipe, port).ask)
    dist.destroy_process_group()


class Member:
    """A worker's side of the pipe, and its group."""

    def __init__(self, config, worker, pipe, port):
        self.naive = config.naive
        self.worker = worker
        self.pipe = pipe
        self.store = dist.TCPStore("127.0.0.1", port)
        self.timeout = timedelta(seconds=config.timeout)

    def ask(self, vote):
        """Send the vote, and wait for the answer: whether the step counts. If not, join a new group."""
        self.pipe.send(vote)
        counts, number, members = self.pipe.recv()
        if not counts:
            if dist.is_initialized():
                dist.destroy_process_group()
            store = dist.PrefixStore(f"group {number}", self.store)
            rank = members.index(self.worker)
            dist.init_process_group("gloo", None, self.timeout, len(members), rank, store)
        return naive(vote) if self.naive else counts


def train(config, ask=naive):
    device = join_world()  # a launched worker is alone in its world, until ask() returns
    ask("ready")
    n_parts = max(config.workers, dist.get_world_size())  # of a batch, also when fewer ranks are left
    model = GPT(config).to(device)
    params = list(model.parameters())
    optimizer = MasterWeights(params, config.lr)
    step = 1
    while step <= config.steps:
        started = time.perf_counter()
        model.zero_grad()  # drops what a failed attempt has left
        total_loss = 0
        for part in range(dist.get_rank(), n_parts, dist.get_world_size()):
            for inputs, targets in microbatches(config, step, device, part, n_parts):
                # The batch's loss is the mean of all parts' microbatches: each is divided by their number.
                loss = mean_loss(model(inputs), targets) / (config.accum * n_parts)
                loss.backward()
                total_loss += loss.detach()
        if f"{os.getenv('LOCAL_RANK')}@{step}" in config.kill.split(","):
            os._exit(1)  # as by kill -9
        vote = all_reduce([total_loss, *(param.grad for param in params)], survives=ask is not naive)
        if ask(vote):
            norm = squared_norm([param.grad for param in params]).sqrt()
            nn.utils.clip_grads_with_norm_(params, config.clip, norm)
            optimizer.step()  # which sets the gradients to None, too
            print_step(config, step, total_loss, norm, started)
            step += 1
    if config.save and dist.get_rank() == 0:
        torch.save(model.state_dict(), config.save)


def all_reduce(tensors, survives):  # returns this worker's vote
    try:
        for tensor in tensors:
            dist.all_reduce(tensor)
        return "yes"
    except RuntimeError as error:  # a member is dead, or hangs
        if not survives:
            raise
        dist.destroy_process_group()  # closes its connections: who waits for this one fails, too
        return str(error)


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
    config = read_flags(FLAGS)
    if config.workers > 0 and "RANK" not in os.environ:
        sys.exit(launch(config))
    train(config)
    dist.destroy_process_group()
