"""Survive: a rank dies, and the others redo the step without it.

Idea
    Replicas as in ddp.py, in workers of a launcher that holds their store. A step is proposed, computed, and
    committed when all members of an epoch have the summed gradient and have voted; then each takes it. If one
    dies or hangs it is aborted, before a weight has changed. The others sign up for the next epoch, of which
    the first list proposed holds, and redo the step, its batch divided anew: losses and weights are
    single.py's. The store's compare-and-set decides each question once (two-phase commit, Gray 1978).

Timeline (v: votes in the store)
    worker 0, 1 | compute 3 | all-reduce v step | compute 4 | all-reduce: abort | answer, connect | compute 4
    worker 2    | compute 3 | all-reduce v step | compute 4 | dies

Memory (bytes; P parameters, N members)
    parameters    (w+c)P      w a weight: fp32 4, bf16 2, fp64 8; c its fp32 master: bf16 4, else 0
    gradients     (w+c)P
    optimizer     KP          K the moments: AdamW 8, in fp64 16; SGD 0

Sent (bytes that a rank of a ring sends in a step)
    all-reduce    2wP(N-1)/N    beside it, when an epoch begins, its first member sends all the state

Run
    python survive.py --workers 4 --kill 1@5 2@9:vote --join 12
    python survive.py --workers 4 --size small --steps 200    and kill -9, -STOP or -CONT what it names
    torchrun --nproc_per_node=8 survive.py                    plain data parallelism: a death ends the job

Left out
    Overlap, buckets (ddp.py); shards, which would need copies; launchers on several hosts. NCCL among the
    workers: it raises no error for a death. Nor does gloo on macOS: each death costs --timeout there.
"""

import argparse
import copy
import json
import multiprocessing.connection
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # first: if torch.optim imports it later, the process group is never freed
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _unflatten_dense_tensors as unflatten


class Members:
    """The workers that take steps together, in epochs, as agreed on through a store that outlives them all.
    Keys begin with an epoch's number: a worker that hung, was left out, and wakes, disturbs nobody. Without a
    store nobody votes. config: see parse()."""

    def __init__(self, config, store=None, worker=0):
        self.config = config
        self.store = store
        self.worker = worker  # its number, for good; its rank may change
        self.timeout = timedelta(seconds=config.timeout if store else 0)  # 0: none
        self.members = list(range(config.workers))  # of the epoch, those first that were there first
        self.epoch = 0
        self.state = [1]  # the step and what reform() was given, of a newcomer None

    def attempt(self, step, communicate, *arguments):
        """Whether communicate(*arguments) has ended well on all members."""
        if self.store is None:
            communicate(*arguments)
            return True
        key = f"{self.epoch}/{step}"
        try:
            self.store.set(f"{self.epoch}/now", str(step))
            self.reach(step)
            communicate(*arguments)
            votes = self.store.add(f"{key}/votes", 1)
            self.reach(step, ":vote")
            if votes == len(self.members):
                self.store.compare_set(key, "", "committed")  # "": if nothing is decided yet
            self.store.wait([key], self.timeout)
        except RuntimeError:  # a member is dead, or hangs
            self.store.compare_set(key, "", "aborted")
        return self.store.get(key) == b"committed"

    def reform(self, step, *parts):
        """Begin epochs until the members of one are connected."""
        started, before = time.perf_counter(), self.members
        self.state = [step, *(part.state_dict() for part in parts)]
        while not (self.agree(step) and self.attempt(0, self.connect)):  # a step before all others
            if self.worker not in self.members:
                sys.exit(f"survive.py: worker {self.worker} is out: epoch {self.epoch} began without it")
        if self.epoch > 1 and dist.get_rank() == 0:
            took = time.perf_counter() - started
            print(f"epoch {self.epoch} | {before} -> {self.members} in {took:.2f} s | step {step} again")

    def agree(self, step):
        """Answer for the next epoch, and propose those who have. Returns whether this worker is a member."""
        epoch, members, _ = look(self.store)
        if epoch > self.epoch and self.worker not in members:
            # It hung, and the others went on. Say so first: on macOS the old group could not be destroyed.
            self.epoch, self.members = epoch, members
            return False
        if dist.is_initialized():
            dist.destroy_process_group()  # or a member that was waiting for this one would go on waiting
        dist.distributed_c10d._world.group_count = 0  # part of a group's name; not so if it failed to form
        self.epoch += 1
        self.store.append(f"{self.epoch}/answers", f"{self.worker} ")
        self.reach(step, ":reform")
        deadline = time.monotonic() + (2 * self.config.timeout if self.epoch > 1 else 300)
        while True:
            answers = set(map(int, self.store.get(f"{self.epoch}/answers").split()))
            order = dict.fromkeys([*self.members, *sorted(answers)])  # newcomers last
            dead = {worker for worker in order if self.store.check([f"dead/{worker}"])}
            if answers | dead >= set(self.members) or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        proposal = [worker for worker in order if worker in answers - dead]
        if self.state:  # a newcomer waits for the others' list
            self.store.compare_set(f"{self.epoch}/members", "", json.dumps(proposal))
        self.members = json.loads(self.store.get(f"{self.epoch}/members"))
        return self.worker in self.members

    def connect(self):
        """Make the epoch's process group, and hand the first member's state to newcomers."""
        store = dist.PrefixStore(f"{self.epoch}/group", self.store)
        rank = self.members.index(self.worker)
        os.environ["RANK"] = str(rank)  # so that refuse() speaks on the first one
        if len(self.members) < self.config.min_workers:
            refuse(f"--min-workers {self.config.min_workers}: only workers {self.members} are left")
        dist.init_process_group("gloo", None, self.timeout, len(self.members), rank, store)
        states = [self.state]
        dist.broadcast_object_list(states)
        self.state = self.state or states[0]

    def enter(self, step):
        """A newcomer's way in, from this step on: answer for the next epoch, then abort the present step."""
        while True:
            time.sleep(0.001)
            self.state = None
            self.epoch, self.members, now = look(self.store)
            if self.worker in self.members or now >= step:  # in an epoch that did not form, or it is time
                self.store.append(f"{self.epoch + 1}/answers", f"{self.worker} ")
                aborted = self.store.compare_set(f"{self.epoch}/{now}", "", "aborted") == b"aborted"
                if aborted and self.agree(now) and self.attempt(0, self.connect):
                    return

    def reach(self, step, phase=""):  # for --kill
        if self.store and f"{self.worker}@{step}{phase}" in self.config.kill:
            signal.raise_signal(signal.SIGKILL)


def look(store):
    """(the last epoch, its members, the step that they attempt)."""
    epoch = 0  # which has no members
    while store.check([f"{epoch + 1}/members"]):
        epoch += 1
    members = json.loads(store.get(f"{epoch}/members"))
    return epoch, members, store.add(f"{epoch}/now", 0)


def flatten_grads(module):  # makes all gradients views of one vector, to which backward then adds
    params = list(module.parameters())
    flat_grad = params[0].detach().new_zeros(sum(param.numel() for param in params))
    for param, view in zip(params, unflatten(flat_grad, params)):
        param.grad = view
    return flat_grad


def backward(config, model, batches):
    """Add the gradient of this rank's part of the batch. Returns the part's share of the mean loss."""
    loss = torch.zeros((), dtype=torch.float64, device=model.norm.weight.device)
    for batch in batches:
        inputs, targets = (part.tensor_split(dist.get_world_size())[dist.get_rank()] for part in batch)
        if len(inputs):  # (b, s), where b may differ among ranks
            # Each loss is a mean: weigh it by its sequences, so that their sum is the batch's mean.
            microloss = mean_loss(model(inputs), targets) * len(inputs) / config.batch
            microloss.backward()
            loss += microloss.detach()
    return loss


def all_reduce(timeout, *tensors):
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True).wait(timeout)


def train(config, members=None):
    """As one of launch()'s workers, which these members are; or under torchrun."""
    members = members or Members(config)
    device, text = set_up(config, f" | timeout {config.timeout:g}")
    masters = GPT(config).to(device, DTYPES[config.dtype])
    if config.dtype == "bf16":
        masters.float()  # what the optimizer steps (arXiv 1910.02054, 3.1)
    optimizer = OPTIMIZERS[config.optim](masters.parameters(), lr=config.lr, fused=True)
    step, *states = members.state
    for part, state in zip((masters, optimizer), states):
        part.load_state_dict(state)
    model = copy.deepcopy(masters).bfloat16() if config.dtype == "bf16" else masters
    flat_grad = flatten_grads(model)
    while step <= config.steps:
        started = time.perf_counter()
        members.reach(step, ":forward")
        flat_grad.zero_()  # what an aborted attempt has left
        loss = backward(config, model, microbatches(config, text, step, device))
        if members.attempt(step, all_reduce, members.timeout, flat_grad, loss):
            grad_norm = take_step(model, masters, optimizer, config.clip)
            print_step(config, step, loss, grad_norm, started)
            step += 1
        else:
            members.reform(step, masters, optimizer)
    while not members.attempt(step, save, config, model):
        members.reform(step, masters, optimizer)


@torch.no_grad()
def take_step(model, masters, optimizer, max_norm):  # returns the gradient's norm before clipping
    for weight, master in zip(model.parameters(), masters.parameters()):
        master.grad = weight.grad.to(master.dtype)
    grad_norm = nn.utils.clip_grad_norm_(masters.parameters(), max_norm)
    optimizer.step()
    torch._foreach_copy_(list(model.parameters()), list(masters.parameters()))
    return grad_norm


def save(config, model):
    if config.save and dist.get_rank() == 0:
        save_weights(model.state_dict(), config.save)


def work(config, worker, port):  # in a process of its own
    os.environ |= {"LOCAL_RANK": str(worker), "WORLD_SIZE": str(config.workers)}
    try:
        members = Members(config, dist.TCPStore("localhost", port), worker)
        if worker < config.workers:
            members.reform(1)
        else:
            members.enter(config.join[worker - config.workers])
        train(config, members)
    except dist.DistNetworkError:
        sys.exit(f"survive.py: worker {worker} ends, as the launcher is gone")


def launch(config):
    """Start the workers, hold their store, and tell it of deaths. Returns the exit code."""
    os.environ |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1"}
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store.set("0/members", "[]")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.nn"])  # or each would take seconds
    running = {}  # {what tells of its end: (worker, process)}
    for worker in reversed(range(config.workers + len(config.join))):  # newcomers first, to be there in time
        process = context.Process(target=work, args=(config, worker, store.port), daemon=True)
        process.start()
        running[process.sentinel] = worker, process
        print(f"survive | worker {worker} is process {process.pid}", flush=True)
    try:
        while True:
            for sentinel in multiprocessing.connection.wait(list(running)):
                worker, process = running.pop(sentinel)
                if process.exitcode in (0, 2):  # the job has ended well, or was refused: see refuse()
                    return process.exitcode
                members = bury(store, worker)
                if not any(worker in (members or [worker]) for worker, _ in running.values()):
                    sys.exit("survive.py: nobody who has the weights is left")
    finally:
        for _, process in running.values():
            process.join(1)
            process.kill()  # if it hangs


def bury(store, worker):
    """Let nobody wait any longer for a dead worker's answer or vote. Returns the epoch's members."""
    store.set(f"dead/{worker}", "")
    epoch, members, step = look(store)
    if worker in members:
        store.compare_set(f"{epoch}/{step}", "", "aborted")
    return members


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--workers", type=int, default=0, help="to start, without torchrun")
    own.add_argument("--min-workers", type=int, default=1, help="with fewer the job ends")
    own.add_argument("--timeout", type=float, default=10, help="seconds to wait for a worker that hangs")
    own.add_argument("--kill", nargs="*", default=[], help="R@S[:PHASE]: worker R dies at step S")
    own.add_argument("--join", nargs="*", default=[], type=int, help="steps at which newcomers enter")
    config = read_flags(arguments, own, workers=(0, 64))
    if (config.kill or config.join) and not config.workers:
        refuse("--kill, --join: only with --workers, which are to die or to be joined")
    for kill in config.kill:
        if not re.fullmatch(r"\d+@\d+(:forward|:vote|:reform)?", kill):
            refuse(f"--kill {kill}: must be R@S (in the all-reduce), R@S:forward, R@S:vote or R@S:reform")
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
    if config.workers and "RANK" not in os.environ:
        sys.exit(launch(config))
    train(config)
    dist.destroy_process_group()
