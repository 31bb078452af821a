"""DiLoCo: each rank trains a replica alone for H steps; then the ranks average how far they have moved.

Idea
    In ddp.py all ranks average their gradients in every step, so they need fast links. Here N ranks may be
    far apart: each trains a copy of the model with an optimizer of its own, on its part of each batch, and
    the ranks exchange something only once in H steps (--inner-steps). All start from the same weights, which
    are called the outer weights. After H steps each rank has moved to other ones. The outer weights minus
    the rank's own are its outer gradient. It is averaged over all ranks, and a second optimizer, SGD with
    Nesterov momentum, updates the outer weights by it. All ranks go on from there (DiLoCo, arXiv 2311.08105).
    With --outer-lr 1 --outer-momentum 0 that is the mean of the ranks' weights (local SGD, arXiv 1805.09767).

    While the outer gradient travels, nothing is computed. So --fragments cuts weights into parts, which are
    exchanged in turn, and --delay lets training go on while a part travels (Streaming DiLoCo, 2501.18512).

    Losses differ from single.py's, as each optimizer sees 1/N of a batch and has moments of its own. With
    --inner-steps 1 --outer-lr 1 --outer-momentum 0 --optim sgd --clip inf this is ddp.py, and they are equal.

Timeline (above: one fragment; below: two, A and B, with --delay)
    compute | H steps                 |          | H steps                 |          | H steps
    network |                         | exchange |                         | exchange |

    compute | H/2 steps  | H/2 steps  | H/2 steps  | H/2 steps  | H/2 steps ...
    network |            | A          | B          | A          | B

Memory (bytes on each rank; P parameters; numbers for fp32 and bf16: in fp64 w = m = o = 8 and K = 16)
    parameters    (w+c+m)P      w = 4 in fp32, 2 in bf16; c = 4 in bf16, for fp32 weights, else 0; m = 4 for
                                the outer weights
    gradients     mP            inner or outer ones; a fragment's outer ones on top if there is a --delay
    optimizer     (K+o)P        K = 8 for AdamW's two moments, 0 for SGD; o = 4 for the outer momentum, or 0

Sent (bytes, by each of N ranks, in H steps)
    all-reduce    2mP(N-1)/N    in a ring (see collectives.py); ddp.py sends 2wP(N-1)/N in each step

Run
    torchrun --nproc_per_node=2 more/diloco.py
    torchrun --nproc_per_node=8 more/diloco.py --size gpt2-xl --dtype bf16 --batch 64 --inner-steps 50
    It prints a line for each H steps, with means over these steps and over all ranks. The norm is the mean of
    the norms of the ranks' own gradients.

Left out
    Replicas of several GPUs (zero3.py inside each, this between them); outer weights and momentum that are
    sharded, or on the host; exchanges in 4 bits; ranks that join, leave, or take fewer steps.
    Buffers, such as BatchNorm's statistics, are not averaged: each rank keeps those of its own batches.
    The outer weights and their momentum are not saved: whoever goes on from saved weights starts anew.
    Not noticed: bf16 parameters, in which small updates are lost (keep them in fp32, and cast them for the
    forward, as train() does); weights that are loaded after DiLoCo is made (the next exchange mixes them with
    the old ones); a step() for each microbatch, which makes H smaller; the end of training without average(),
    where ranks have different weights.
    A rank that calls step() less often than the others lets them wait, until torch's timeout ends the job.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _unflatten_dense_tensors as unflatten  # (flat, tensors): views of flat, shaped alike


class DiLoCo:
    """Exchanges a module's parameters. In one piece, this would do once in inner_steps:

        outer.grad = outer - inner        # where all started, minus where this rank is
        dist.all_reduce(outer.grad)
        outer.grad /= dist.get_world_size()
        outer_optimizer.step()            # the same on all ranks
        inner.copy_(outer)                # all ranks go on from here

    The problem is that nothing is computed while the outer gradient travels, which may take minutes over a
    slow link. So here the parameters are cut into fragments. Each starts to travel once in inner_steps, at a
    step of its own, and its outer update is made `delay` steps later.

    Call step() after each optimizer.step(), average() at the end. All ranks start from rank 0's weights."""

    def __init__(
        self,
        module: nn.Module,
        inner_steps: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
    ):
        self.module = module
        self.interval = inner_steps // fragments  # steps from one fragment's start to the next one's
        self.delay = delay
        self._check_arguments(inner_steps, fragments)
        params = list(module.parameters())
        flat_param = torch.cat([param.detach().flatten() for param in params])
        dist.broadcast(flat_param, 0)
        # The parameters become views of one flat tensor, so that a fragment is one message.
        for param, view in zip(params, unflatten(flat_param, params)):
            param.data = view
        self.addresses = [param.data_ptr() for param in params]
        self.inner = flat_param.tensor_split(fragments)  # views: what this rank trains
        self.outer = [nn.Parameter(fragment.clone()) for fragment in self.inner]  # the same on all ranks
        self.optimizer = torch.optim.SGD(self.outer, outer_lr, outer_momentum, nesterov=outer_momentum > 0)
        self.steps = 0
        self.reduce_work = None  # while a fragment travels

    def step(self):
        """Count a step of the inner optimizer, and start or finish a fragment's exchange if it is time to."""
        self._check_addresses()
        self.steps += 1
        steps_since_start = self.steps % self.interval
        if steps_since_start == 0:
            turn = self.steps // self.interval - 1
            self.start_all_reduce(turn % len(self.outer))
        if self.reduce_work and steps_since_start == self.delay:
            self.finish_all_reduce()

    @torch.no_grad()
    def start_all_reduce(self, i):
        self.fragment = i
        # An optimizer subtracts a gradient. With lr 1 and no momentum: outer - (outer - inner) = inner.
        self.outer[i].grad = self.outer[i] - self.inner[i]
        self.reduce_work = dist.all_reduce(self.outer[i].grad, async_op=True)

    @torch.no_grad()
    def finish_all_reduce(self):
        self.reduce_work.wait()
        self.reduce_work = None
        outer = self.outer[self.fragment]
        outer.grad /= dist.get_world_size()
        # This updates one fragment: the others have no gradient, and an optimizer leaves them alone.
        self.optimizer.step()
        outer.grad = None
        # During a delay this rank has trained the fragment further, and would lose that. So it goes on from
        # halfway between its own weights and the outer ones (the paper's choice). From now on
        # ranks differ, until average().
        self.inner[self.fragment].lerp_(outer, 0.5 if self.delay else 1)

    @torch.no_grad()
    def average(self):
        """Give all ranks the mean of their weights, which may differ since the last exchange."""
        if self.reduce_work:
            self.finish_all_reduce()
        for fragment in self.inner:
            dist.all_reduce(fragment)
            fragment /= dist.get_world_size()

    # A reader may skip to train(): this turns mistakes that would go unnoticed into errors.

    def _check_arguments(self, inner_steps, fragments):
        if inner_steps % fragments or not 0 <= self.delay < self.interval:
            raise ValueError("inner_steps must be a multiple of fragments, delay less than the quotient")
        if len({param.dtype for param in self.module.parameters()}) != 1:
            raise ValueError("the module's parameters must be of one dtype, and at least one")

    def _check_addresses(self):
        if [param.data_ptr() for param in self.module.parameters()] != self.addresses:
            raise RuntimeError("move, cast, add and replace parameters before you make a DiLoCo, not after")


def train(config):
    outer = f"outer lr {config.outer_lr} | outer momentum {config.outer_momentum}"
    turns = f"inner steps {config.inner_steps} | fragments {config.fragments} | delay {config.delay}"
    device, text = set_up(config, f" | {outer} | {turns}")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # In bf16 small updates would be lost, so fp32 weights are trained and exchanged.
    model = GPT(config).to(device, torch.promote_types(DTYPES[config.dtype], torch.float32))
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    outer_options = config.outer_lr, config.outer_momentum
    diloco = DiLoCo(model, config.inner_steps, *outer_options, config.fragments, config.delay)
    steps = range(1, config.steps + 1)
    for first in range(0, config.steps, config.inner_steps):
        started = time.perf_counter()
        sums = 0
        line = steps[first : first + config.inner_steps]  # the steps of a printed line
        for step in line:
            batches = microbatches(config, text, step, device, rank, world_size)
            sums += inner_step(config, model, optimizer, batches)
            if step == line[-1]:
                dist.all_reduce(sums)  # first: queued after a fragment, it would wait for it
            diloco.step()
        loss, grad_norm = (sums / world_size / len(line)).cpu()  # waits for the device
        now = time.perf_counter()
        print_step(config, step, loss, grad_norm, now - (now - started) / len(line))
    diloco.average()
    if config.save and rank == 0:
        save_weights(model.to(DTYPES[config.dtype]).state_dict(), config.save)


def inner_step(config, model, optimizer, batches):
    """A step of this rank alone. Returns its loss and the norm of its gradient before clipping, (2,)."""
    # A cast keeps nothing for backward, so the backward of each microbatch may go through the same ones.
    weights = {name: param.to(DTYPES[config.dtype]) for name, param in model.named_parameters()}
    loss = 0
    for inputs, targets in batches:
        # Each loss is a mean, and gradients add up over microbatches: divide to get the batch's mean.
        microloss = mean_loss(torch.func.functional_call(model, weights, inputs), targets) / config.accum
        microloss.backward()
        loss += microloss.detach()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([loss, grad_norm])


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    add = own.add_argument
    add("--inner-steps", type=int, default=5, help="steps of a rank alone, from an exchange to the next")
    add("--outer-lr", type=float, default=0.7)
    add("--outer-momentum", type=float, default=0.9, help="Nesterov's; 0, with --outer-lr 1: local SGD")
    add("--fragments", type=int, default=1, help="parts of the weights, exchanged in turn")
    add("--delay", type=int, default=0, help="steps that are computed while a fragment travels")
    config = read_flags(arguments, own, outer_lr=(0, 1e9), outer_momentum=(0, 1), delay=(0, 1_048_576))
    if config.inner_steps % config.fragments or config.delay >= config.inner_steps // config.fragments:
        refuse("--fragments must divide --inner-steps, and --delay must be less than the quotient")
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
    train(parse())
    dist.destroy_process_group()
