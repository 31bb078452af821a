"""Offload: as zero2.py, with the optimizer in the host's memory; with --params, as zero3.py, the weights too.

Idea
    An optimizer reads its states once a step: slower memory will do. A block's gradients leave for the host
    once they are reduced, the host steps this rank's shard, and new weights come back (ZeRO-Offload, arXiv
    2101.06840, section 4). With --params a block is on the device only while in use, uploaded one ahead.

Memory (bytes of a rank's device, and its host; P parameters, U in a block, E in none; N ranks)
    parameters    wP                     w a weight: fp32 4, bf16 2, fp64 8
    parameters    w(E+2U)                with --params
    gradients     wmax(2E,E+2U,3U)       two copies, to send and to receive, and those of the next unit
    host          (K+2m+w+c/2)P/N        K moments, AdamW 2m; m max(w, 4); c 4 in bf16, with masters, else 0

Communication (two threads wait for copies; the host's steps wait for the norm, as clipping needs it)
    compute | forward 1 | forward 2 | backward 2 | backward 1 |        |        |        | forward 1
       link |           |           |            | 2 down     | 1 down |        | 1 up   | 2 up
       host |           |           |            |      add 2 |  add 1 | step 1 | step 2 |

Costs (bytes that a rank sends over its link down and up, and in a ring, in a step of k microbatches)
    down          kwP/N
    up            wP/N
    up            kw(2P-E-2U)/N          with --params: the last two units stay for their backward
    all-to-all    kwP(N-1)/N             and a sum, which is a reduce-scatter
    all-gather    wP(N-1)/N
    all-gather    kw(2P-E-2U)(N-1)/N     with --params

Run
    torchrun --nproc_per_node=8 offload.py --size gpt2-xl --dtype bf16 --batch 64
    torchrun --nproc_per_node=2 offload.py --params --device cpu --device-mb 20 --link-gbps 10

Left out
    As zero2.py; delayed updates (5.2), disks, recomputation, buffers; weights frozen, unused or in two units.
"""

import argparse
import math
import os
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # else torch.optim loads it later, and its default arguments keep the group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it


class Offload:
    """Of a module on the CPU, equal on all ranks, each of `blocks` is a unit; all else is one, the root."""

    def __init__(self, module, blocks, device, params, gbps, new_optimizer):
        self.module = module
        self.device = device
        self.new_optimizer = new_optimizer
        self.params = params
        self.down = Lane("down", device, gbps)
        self.up = Lane("up", device, gbps)
        if self.down.stream:  # nothing hides the host's step, for which torchrun gives it one thread
            self.down.submit(torch.set_num_threads, os.cpu_count() // torch.cuda.device_count() or 1)
        in_blocks = set(blocks.parameters())
        self.units = []
        for i, submodule in enumerate([module, *blocks]):
            weights = [weight for weight in submodule.parameters() if i or weight not in in_blocks]
            self.units.append(Unit(self, weights))
            submodule.register_forward_pre_hook(partial(self._fetch, i, 1))
            if i > 0:
                submodule.register_full_backward_pre_hook(partial(self._fetch, i, -1))
            if params and 0 < i < len(blocks) - 1:  # backward begins with the last two
                submodule.register_forward_hook(self.units[i].drop)
        self.sent = self.units[0].stepped

    def _fetch(self, i, direction, *_):  # direction: 1, or -1 in backward
        unit, *later = self.units[i::direction]
        unit.fetch()
        unit.fetched.result()
        if self.up.stream:
            torch.cuda.current_stream().wait_stream(self.up.stream)
        for other in later[:1]:
            other.fetch()

    def step(self, max_norm):
        """Step with gradients clipped to a norm of max_norm at most. Returns the norm of before."""
        square = 0
        for i, unit in enumerate(self.units):
            if not unit.landed:
                raise RuntimeError(f"unit {i} (0: the root) has weights without gradient: all must have one")
            square += unit.landed.result()
        norm = torch.full((), square, dtype=torch.float64, device=self.device)
        dist.all_reduce(norm)
        norm.sqrt_()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1).item()
        for unit in self.units:
            unit.stepped = self.down.submit(unit.step, scale)
            unit.landed = unit.fetched = None  # these weights are old
        return norm

    def full_state_dict(self):
        """The plain module's; its weights are on the CPU until the next forward. All ranks must call it."""
        for i, unit in enumerate(self.units):
            self._fetch(i, 1)
            vector_to_parameters(unit.flat_param.clone().cpu(), unit.weights)
            unit.drop()
        return self.module.state_dict()


class Unit:  # weights: on the device a flat vector, on the host 1/N; keep, land, step run there, in `down`
    def __init__(self, offload, weights):
        self.offload = offload
        self.weights = weights
        size = sum(map(torch.numel, weights))
        self.padding = -size % dist.get_world_size()
        self.flat_param = torch.empty(size + self.padding, dtype=weights[0].dtype, device=offload.device)
        self.own = self.flat_param.chunk(dist.get_world_size())[dist.get_rank()]  # this rank's part
        self.stepped = offload.down.submit(self.keep)
        self.stepped.result()
        self.drop()
        self.landed = None  # where the square of its gradients' norm will be
        for weight in weights:
            weight.register_post_accumulate_grad_hook(self.collect)

    def keep(self):
        flat = F.pad(parameters_to_vector(self.weights).data, (0, self.padding))
        own = flat.view(-1, len(self.own))[dist.get_rank()]
        pinned = self.own.is_cuda
        self.shard = torch.empty_like(own, pin_memory=pinned).copy_(own)
        self.landing = torch.empty_like(own, pin_memory=pinned)
        wide = torch.promote_types(flat.dtype, torch.float32)
        self.master = nn.Parameter(self.shard.to(wide))
        self.master.grad = torch.zeros_like(self.master)
        self.optimizer = self.offload.new_optimizer([self.master])

    def fetch(self):
        if not self.fetched:  # nor on the way
            self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
            vector_to_parameters(self.flat_param, self.weights)  # which are now parts of it
            self.fetched = self.offload.up.submit(self.bring)

    def bring(self):  # in the thread `up`
        self.stepped.result()
        self.offload.up.copy(self.own, self.shard)
        all_gather(self.flat_param, self.own)

    def drop(self, *_):
        self.fetched = None
        self.flat_param.untyped_storage().resize_(0)

    def collect(self, _):
        if any(weight.grad is None for weight in self.weights):
            self.landed = None
            return  # and wait for the other gradients
        offload = self.offload
        offload.sent.result()  # one unit's gradients at a time are on their way
        if offload.params:
            self.drop()
        flat = parameters_to_vector([weight.grad for weight in self.weights])
        for weight in self.weights:
            weight.grad = None
        if self.padding:
            flat = F.pad(flat, (0, self.padding))
        received = torch.empty_like(flat)
        start = partial(dist.all_to_all_single, received, flat, async_op=True)  # with a sum a reduce-scatter
        work = offload.up.submit(start)  # whose collectives have one order, the same on all ranks
        self.landed = offload.sent = offload.down.submit(self.land, flat, received, work)

    def land(self, flat, received, work):
        work.result().wait()
        total = flat[: len(self.own)]  # needs no more memory
        torch.sum(received.view(-1, len(total)), 0, out=total)
        self.offload.down.copy(self.landing, total)
        for tensor in flat, received:
            tensor.untyped_storage().resize_(0)  # a thread may hold the tensor a little longer
        self.master.grad += self.landing
        return self.master.grad.norm().item() ** 2  # so far

    def step(self, scale):
        self.master.grad *= scale
        self.optimizer.step()
        self.master.grad.zero_()
        self.shard.copy_(self.master.data)  # in bf16; else they are the same memory


class Lane:  # a thread, and on a GPU a stream, for a job at a time; it copies 10^9 gbps bits a second at most
    def __init__(self, name, device, gbps):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, name, torch.cuda.set_stream, (self.stream,))  # None: no change
        self.gbps = gbps

    def submit(self, job, *args):
        if self.stream:  # the job may use what has been computed so far
            self.stream.wait_stream(torch.cuda.current_stream())
        return self.thread.submit(job, *args)

    def copy(self, target, source):  # and wait for it
        ends = time.perf_counter() + 8e-9 * source.nbytes / self.gbps
        target.copy_(source)
        time.sleep(max(0, ends - time.perf_counter()))


class PlayedDevice(TorchDispatchMode):  # by a CPU: it holds what this thread makes, and reads no other floats
    def __init__(self, megabytes):
        super().__init__()
        self.megabytes = megabytes
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(args)):
            known = tensor.untyped_storage() in self.storages
            assert known or not tensor.is_floating_point(), f"{function} reads the host's memory"
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            self.storages.add(tensor.untyped_storage())
        if sum(map(torch.UntypedStorage.nbytes, self.storages)) > 1e6 * self.megabytes:
            refuse(f"--device-mb {self.megabytes:g}: the device is full; add --params, or raise --accum")
        return result


def train(config):
    if config.device_mb < math.inf:
        if config.device == "cuda":
            refuse("--device cuda --device-mb: only a CPU plays a device")
        config.device = "cpu"
    device, text = set_up(config, f" | params {config.params} | link {config.link_gbps:g} Gbit/s")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model = GPT(config).to(DTYPES[config.dtype])
    with PlayedDevice(config.device_mb) if device.type == "cpu" else torch.cuda.device(device):
        new_optimizer = partial(OPTIMIZERS[config.optim], lr=config.lr, fused=True)
        offload = Offload(model, model.blocks, device, config.params, config.link_gbps, new_optimizer)
        for step in range(1, config.steps + 1):
            started = time.perf_counter()
            loss = 0
            for inputs, targets in microbatches(config, text, step, device, rank, world_size):
                microloss = mean_loss(model(inputs), targets) / config.accum / world_size
                microloss.backward()  # gradients add up over microbatches and ranks: hence the divisions
                loss += microloss.detach()
            grad_norm = offload.step(config.clip)
            dist.all_reduce(loss)
            print_step(config, step, loss, grad_norm, started)
    if config.save:
        state_dict = offload.full_state_dict()
        if rank == 0:
            torch.save(state_dict, config.save)


def parse(arguments=None):
    """The flags, from the command line if no arguments are given."""
    own = argparse.ArgumentParser(add_help=False)
    add = own.add_argument
    add("--params", action="store_true", help="the host keeps the weights, too")
    add("--device-mb", type=float, default=math.inf, help="10^6 bytes of a device that a CPU plays")
    add("--link-gbps", type=float, default=math.inf, help="10^9 bits a second, each way")
    return read_flags(arguments, own, device_mb=(0, math.inf), link_gbps=(1e-9, math.inf))


# ==== toy model: the same lines in every lesson ====
SHAPE = ("layers", "heads", "width", "context", "vocab")
SIZES = {"toy": "8 8 64 64 256", "small": "6 8 256 128 256", "gpt2": "12 12 768 1024 50257"}
SIZES |= {"gpt2-xl": "48 25 1600 1024 50257", "7.5b": "32 34 4352 2048 50257"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
CHOICES = {"size": SIZES, "optim": OPTIMIZERS, "dtype": DTYPES, "device": ("auto", "cpu", "cuda")}
NUMBERS = {"steps": 20, "batch": 16, "accum": 1, "lr": 1e-3, "clip": 1.0, "seed": 0}
HELP = "--batch: sequences of a step, on all ranks; --accum: microbatches of a rank; --clip inf: any norm"


def read_flags(arguments, *own, **limits):  # own: other parsers. limits: {name: (least, most)}
    parser = argparse.ArgumentParser(parents=own, epilog=HELP)
    parser.error = refuse
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name}", default=next(iter(choices)), choices=choices)
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", default=default, type=type(default), help=f"default: {default}")
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=int, help="overrides --size")
    parser.add_argument("--data", default=argparse.__file__, help="text file or folder, read as bytes")
    parser.add_argument("--save", help="file for the state_dict")
    parser.set_defaults(**dict(zip(SHAPE, SIZES[parser.parse_args(arguments).size].split())))
    config = parser.parse_args(arguments)
    limits |= {"lr": (0, 1e9), "clip": (1e-9, torch.inf), "seed": (0, 1e18)}
    for name, value in vars(config).items():
        least, most = limits.get(name, (1, 1_048_576))
        if type(value) in (int, float) and not least <= value <= most:
            refuse(f"--{name.replace('_', '-')} {value}: must be from {least} to {most}")
    return config


def refuse(problem):  # in a line on rank 0, for which the others wait, else torchrun may end it first
    if os.environ.get("RANK", "0") == "0":
        print(f"{Path(__file__).name}: {problem}", file=sys.stderr)
    else:
        time.sleep(5)
    sys.exit(2)


def set_up(config, choices="", replicas=None):  # check, and join the world; returns device and text
    replicas = replicas or int(os.environ.get("WORLD_SIZE", 1))
    if config.batch % (replicas * config.accum):
        refuse(f"--batch {config.batch}: must be a multiple of replicas x --accum, {replicas * config.accum}")
    if config.width % config.heads:
        refuse(f"--width {config.width}: must be a multiple of --heads {config.heads}")
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if config.device == "cuda" and not gpus:
        refuse("--device cuda: no GPU is visible here; use --device cpu")
    try:
        files = sorted(path for path in Path(config.data).rglob("*") if path.is_file()) or [Path(config.data)]
        text = bytearray().join(path.read_bytes() for path in files)
        if len(text) <= config.context:
            refuse(f"--data {config.data}: must have more bytes than --context {config.context}")
        if config.vocab < 256 and max(text) >= config.vocab:
            refuse(f"--vocab {config.vocab}: must be more than {max(text)}, the text's largest byte")
        if config.save:
            open(config.save, "ab").close()
    except OSError as error:
        refuse(f"--data {config.data} or --save {config.save}: {error}")
    device = torch.device(f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % gpus}" if gpus else "cpu")
    torch.cuda.set_device(device if gpus else -1)  # -1: none
    if not dist.is_initialized():
        backend = "nccl" if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)) else "gloo"
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **alone)
    if dist.get_rank() == 0:
        world = f"{dist.get_world_size()} ranks {dist.get_backend()}/{device.type}"
        batch = f"{config.batch} = {replicas} x {config.accum} x {config.batch // replicas // config.accum}"
        print(f"{Path(__file__).stem} | {world} | {config.size} {config.dtype} | batch {batch}{choices}")
    torch.manual_seed(config.seed)
    return device, torch.frombuffer(text, dtype=torch.uint8)


def microbatches(config, text, step, device, rank=0, replicas=1):  # (inputs, targets), int64 (b, s)
    windows = text.unfold(0, config.context + 1, 1)  # every (s + 1) bytes in a row, a view
    starts = np.random.default_rng((config.seed, step)).integers(len(windows), size=config.batch)
    tokens = windows[starts.reshape(replicas, config.accum, -1)[rank]].long().to(device)
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
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (b, a, s, h/a) each
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
        for matrix in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

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
    if dist.get_rank() == 0:
        print(f"{line} | {ms:.1f} ms | {config.batch * config.context / ms:.1f} k tok/s")


# ==== end of the toy model ====


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
