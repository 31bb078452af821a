"""Survive: a rank dies, and the others repeat the step without it.

Idea
    Workers are DDP replicas, started by a launcher that hosts a key-value store. In each step they sum their
    gradients, and each votes in the store once it has the sum: a death may leave some with it and others
    without. When all have voted, the step is committed, and all update their weights. If one dies or hangs
    before it votes, the step is aborted before any weight has changed. The others form the next generation,
    split the batch anew and repeat the step: losses and weights are single.py's, up to rounding.

    The store's compare-and-set writes a key only if it is unset, so each question has one answer: is this
    step committed or aborted? Who belongs to the next generation? (The first list that anyone proposes.
    Two-phase commit: Gray 1978.)

Timeline (v: votes in the store)
    worker 0, 1 | compute 3 | all-reduce v update | compute 4 | all-reduce: abort | agree, connect | compute 4
    worker 2    | compute 3 | all-reduce v update | compute 4 | dies

Memory (bytes; P parameters, N members)
    parameters    (w+c)P      w = 4 in fp32, 2 in bf16; c = 4 in bf16, for fp32 master weights, else 0
    gradients     (w+c)P
    optimizer     KP          K = 8 for AdamW's two moments, 0 for SGD

Sent (bytes that a rank of a ring sends in a step)
    all-reduce    2wP(N-1)/N

    A newcomer is sent the weights and moments of the first member, pickled. For that time the first member
    holds up to twice their bytes extra, and the newcomer up to four times.

Run
    python more/survive.py --workers 4 --kill 1@5 2@9 --join 12
    python more/survive.py --workers 4 --size small --steps 200  # then send -9 or -STOP to a PID it prints
    torchrun --nproc_per_node=8 more/survive.py               plain data parallelism: a death ends the job

Left out
    Overlap and buckets (ddp.py); shards, which would need copies; launchers on several nodes. NCCL among the
    workers: it does not reliably report a death. Nor does gloo on macOS: each death costs --timeout there.

    Telling slow from hung. The others wait for a worker that hangs: up to two timeouts in a step, one in the
    all-reduce and one for its vote, then two until it signs up. Then they go on without it. If all sign up,
    one was slow, and the timeout doubles; after seven times the job ends with what failed. A worker that
    hangs while it saves, or that alone has the weights, is waited for without limit: kill it.

    A second to save. If the first member dies while it saves, the job ends, and the weights are lost.

    Not noticed: --data that changes; data iterators, dropout, buffers and schedules, which a repeated step
    would use twice and a newcomer would lack; what regroup() is not given; updates in what attempt() calls;
    gradients after zero_grad(), which are no views of flat_grad; a collective outside attempt(), which may
    hang.

    The launcher's death ends the job. Its store, as torchrun's, is open to the network: whoever can reach it
    can write to it.
"""

import argparse
import copy
import json
import multiprocessing.connection
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _unflatten_dense_tensors as unflatten


class Members:
    """The workers that train together, in generations that they agree on through a store that outlives them.
    Keys begin with the generation's number: a worker that wakes up after being dropped writes to keys that
    nobody reads any more. Without a store there is one generation, and nobody votes. config: see parse()."""

    def __init__(self, config, store=None, worker: int = 0):
        self.config = config
        self.store = store
        self.worker = worker  # its number, for good; its rank may change
        self.timeout = timedelta(seconds=150)  # a long one for generation 1, until all have started
        self.generation = 0
        self.members = list(range(config.workers))  # of this generation, newcomers last
        self.snapshot = [1]  # the step, then what regroup() was given; None: a newcomer waits for it
        self.attempted = 0, 0  # the last attempt's generation and step

    def attempt(self, step, communicate, *arguments):
        """Whether communicate(*arguments) has succeeded on all members. If not, call regroup() next. It must
        change nothing that a second attempt needs."""
        if not self.store:
            communicate(*arguments)
            return True
        if (self.generation, step) <= self.attempted:
            raise ValueError(f"step {step}: attempt each step once, in order, and regroup() after a failure")
        self.attempted = self.generation, step
        key = f"{self.generation}/{step}"
        try:
            self.store.set(f"{self.generation}/now", f"{step}")
            if f"{self.worker}@{step}" in self.config.kill:
                os._exit(1)  # as if killed
            communicate(*arguments)
            if self.store.add(f"{key}/votes", 1) == len(self.members):
                self.store.compare_set(key, "", "committed")  # "": unless it is decided already
            self.store.wait([key], self.timeout)
        except RuntimeError as error:  # a member is dead, or hangs; or it fails for another reason
            self.store.compare_set(key, "", f"worker {self.worker}: {error}")
        self.decision = self.store.get(key)
        return self.decision == b"committed"

    def regroup(self, step, *parts):
        """Begin generations until the members of one are connected; also the start, with generation 1.
        parts: all whose state_dict() a newcomer needs."""
        started = time.perf_counter()
        before = self.members
        self.snapshot = [step, *(part.state_dict() for part in parts)]
        while True:
            self.sign_up()
            self.store.compare_set(f"{self.generation}/members", "", str(self.propose()))
            if self.begin():
                break
            if self.worker not in self.members:
                sys.exit(f"survive.py: worker {self.worker} is out of generation {self.generation}")
        if self.generation > 1 and dist.get_rank() == 0:
            print(
                f"generation {self.generation} | {before} -> {self.members}"
                f" in {time.perf_counter() - started:.2f} s | step {step} again"
            )

    def enter(self, first_step):
        """A newcomer's way in, from this step on."""
        while True:
            time.sleep(0.01)
            self.snapshot = None  # also if it came, but the generation did not form
            self.generation, self.members, step = look(self.store)
            # If it is on the list of a generation that did not form, others wait for it, whatever the step.
            if step >= first_step or self.worker in self.members:
                self.sign_up()
                # Then abort the first step that is not committed: the list that follows has this newcomer.
                old = self.generation - 1
                while self.store.compare_set(f"{old}/{step}", "", "a newcomer") == b"committed":
                    step += 1
                if self.begin():
                    return self.store.set(f"has_weights/{self.worker}", "")

    def sign_up(self):
        """Leave this generation's group, and ask for a place in the next generation."""
        self.generation += 1
        if dist.is_initialized():
            dist.destroy_process_group()  # so that members who wait in its collectives fail, too
        self.store.append(f"{self.generation}/answers", f"{self.worker} ")

    def propose(self):
        """Wait until every living member has signed up, or twice the timeout (the last to notice a failure is
        at most a timeout behind the first). Returns who has."""
        deadline = time.monotonic() + 2 * self.timeout.total_seconds()
        while True:
            answers = set(map(int, self.store.get(f"{self.generation}/answers").split()))
            order = dict.fromkeys([*self.members, *answers])  # newcomers last
            dead = {worker for worker in order if self.store.check([f"dead/{worker}"])}
            if answers | dead >= set(self.members) or time.monotonic() > deadline:
                return [worker for worker in order if worker in answers - dead]
            time.sleep(0.01)

    def begin(self):
        """Wait for the generation's list, and connect its members. Returns whether it has begun."""
        key = f"{self.generation}/members"
        members = json.loads(self.store.get(key))
        if members == self.members and self.generation > 1:  # nobody has died: somebody is slow
            self.timeout *= 2
        else:
            self.timeout = timedelta(seconds=self.config.timeout)
        self.members = members
        return self.worker in members and self.attempt(0, self.connect)  # voted on as a step, number 0

    def connect(self):
        """Make the generation's process group, and send the first member's snapshot to newcomers."""
        if len(self.members) < self.config.min_workers:
            refuse(f"--min-workers {self.config.min_workers}: only workers {self.members} are left")
        if self.timeout.total_seconds() > 99 * self.config.timeout:  # it has doubled seven times
            refuse(f"no worker has died, yet every attempt fails: {self.decision.decode()}")
        # The group's name, the same on all, has this number, which a failed init raises on some of them only.
        dist.distributed_c10d._world.group_count = 0
        rank = self.members.index(self.worker)
        store = dist.PrefixStore(f"{self.generation}/group", self.store)
        dist.init_process_group("gloo", None, self.timeout, len(self.members), rank, store)
        if not self.snapshot:
            received = [None]
            dist.recv_object_list(received, 0)
            self.snapshot = received[0]
        elif rank == 0:
            for peer, member in enumerate(self.members):
                if not self.store.check([f"has_weights/{member}"]):
                    dist.send_object_list([self.snapshot], peer)


def look(store):
    """(the last generation, its members, the step that they attempt)."""
    generation = 0
    while store.check([f"{generation + 1}/members"]):
        generation += 1
    members = json.loads(store.get(f"{generation}/members")) if generation else []
    return generation, members, store.add(f"{generation}/now", 0)  # to add 0 is to read


def flatten_grads(module):  # makes all gradients views of one vector, to which backward then adds
    params = list(module.parameters())
    flat_grad = nn.utils.parameters_to_vector(params).detach().zero_()
    for param, view in zip(params, unflatten(flat_grad, params)):
        param.grad = view
    return flat_grad


def backward(config, model, batches):
    """Add the gradient of this rank's part of the batch. Returns what the part adds to the mean loss."""
    loss = torch.zeros((), dtype=torch.float64, device=model.norm.weight.device)
    for batch in batches:
        inputs, targets = (part.tensor_split(dist.get_world_size())[dist.get_rank()] for part in batch)
        if len(inputs):  # (b, s), where b may differ among ranks
            # Each loss is a mean: weigh it by its sequences, so that their sum is the batch's mean.
            microloss = mean_loss(model(inputs), targets) * len(inputs) / config.batch
            microloss.backward()
            loss += microloss.detach()
    return loss


def all_reduce(*tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)


@torch.no_grad()
def update(model, masters, optimizer, max_norm):  # returns the gradient's norm before clipping
    for weight, master in zip(model.parameters(), masters.parameters()):
        master.grad = weight.grad.to(master.dtype)
    grad_norm = nn.utils.clip_grad_norm_(masters.parameters(), max_norm)
    optimizer.step()
    torch._foreach_copy_(list(model.parameters()), list(masters.parameters()))
    return grad_norm


def train(config, members=None):
    """As one of launch()'s workers, which these members are; or under torchrun."""
    members = members or Members(config)
    device, text = set_up(config, f" | timeout {config.timeout:g}")
    masters = GPT(config).to(device, DTYPES[config.dtype])
    if config.dtype == "bf16":
        masters.float()  # which the optimizer updates (arXiv 1910.02054, 3.1)
    optimizer = OPTIMIZERS[config.optim](masters.parameters(), lr=config.lr, fused=True)
    step, *states = members.snapshot
    for part, state in zip((masters, optimizer), states):  # a newcomer's
        part.load_state_dict(state)
    members.snapshot = states = None
    model = copy.deepcopy(masters).bfloat16() if config.dtype == "bf16" else masters
    flat_grad = flatten_grads(model)
    while step <= config.steps:
        started = time.perf_counter()
        flat_grad.zero_()  # what an aborted attempt has left
        loss = backward(config, model, microbatches(config, text, step, device))
        if members.attempt(step, all_reduce, flat_grad, loss):
            grad_norm = update(model, masters, optimizer, config.clip)
            print_step(config, step, loss, grad_norm, started)
            step += 1
        else:
            members.regroup(step, masters, optimizer)
    if config.save and dist.get_rank() == 0:
        save_weights(model.state_dict(), config.save)


def work(config, worker, port):  # in a process of its own
    os.environ |= {"LOCAL_RANK": str(worker), "WORLD_SIZE": str(config.workers)}
    store = dist.TCPStore("127.0.0.1", port)
    store.set_timeout(timedelta(days=1000))
    members = Members(config, store, worker)
    if worker < config.workers:
        members.regroup(1)
    else:
        members.enter(config.join[worker - config.workers])
    train(config, members)
    if dist.get_rank() == 0:  # which has saved the weights
        store.set("saved", "")


def launch(config):
    """Start the workers, host their store, and tell it of deaths. Ends with the job's exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONUNBUFFERED"] = "1"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.nn"])  # or each would take seconds
    running = {}  # {process.sentinel, which tells of its end: (worker, process)}
    try:
        for worker in reversed(config.everyone):  # newcomers first, to be there in time
            if worker < config.workers:
                store.set(f"has_weights/{worker}", "")
            process = context.Process(target=work, args=(config, worker, store.port))
            process.start()
            running[process.sentinel] = worker, process
            print(f"survive | worker {worker} is process {process.pid}", flush=True)
        while True:
            for sentinel in multiprocessing.connection.wait(list(running)):
                worker, process = running.pop(sentinel)
                judge(config, store, worker, process.exitcode, [other for other, _ in running.values()])
    finally:
        for _, process in running.values():
            process.kill()


def judge(config, store, worker, code, others):
    """When a worker has ended, end the job, or let nobody wait any longer for its answer or its vote."""
    if store.check(["saved"]):
        sys.exit(0)
    if code == 2 and worker < config.workers:  # refused: see refuse()
        sys.exit(code)
    store.set(f"dead/{worker}", "")
    generation, members, step = look(store)
    if worker in members:
        store.compare_set(f"{generation}/{step}", "", f"worker {worker} has ended")
    left = set(members or others).intersection(others)  # before generation 1 there are no members
    if not any(store.check([f"has_weights/{other}"]) for other in left):
        sys.exit("survive.py: nobody who has the weights is left")


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    add = own.add_argument
    add("--workers", type=int, default=0, help="to start, without torchrun")
    add("--min-workers", type=int, default=1, help="with fewer the job ends")
    add("--timeout", type=float, default=10, help="seconds to wait for a worker that hangs")
    add("--kill", nargs="*", default=[], help="R@S: worker R dies in step S")
    add("--join", nargs="*", default=[], type=int, help="steps at which newcomers enter")
    config = read_flags(arguments, own, workers=(0, 64))
    steps = range(1, config.steps + 1) if config.workers else ()
    config.everyone = range(config.workers + len(config.join))
    deaths = {f"{worker}@{step}" for worker in config.everyone for step in steps}
    if not deaths.issuperset(config.kill) or not set(steps).issuperset(config.join):
        refuse("--kill R@S, --join S: must be workers and steps that there are, and need --workers")
    return config


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
    if config.workers and "RANK" not in os.environ:
        launch(config)
    train(config)
    dist.destroy_process_group()
