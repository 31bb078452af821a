"""Offload: ZeRO-2 with the optimizer on the host; with --params ZeRO-3, with the weights there, too.

Idea
    An optimizer reads its states once a step: the host's memory, behind a slow link, is enough. Gradients are
    reduced; a rank's 1/N goes to the host, whose CPU steps it; new weights come back and are all-gathered
    (ZeRO-Offload, arXiv 2101.06840, 4). With --params it also holds the blocks not in use (2104.07857).

Timeline (a row is a thread; with --params blocks go up one ahead, in forward and in backward)
      main | forward 1 | forward 2 | backward 2 | backward 1    | norm        |        |        | forward 1
    upload |           |           |            | reduce 2      | reduce 1    |        | 1 up   | 2 up
      host |           |           |            |   2 down, add | 1 down, add | step 1 | step 2 |

Memory (bytes of a rank's device, and of its host; U in a block, E in none; other letters: docs/formulas.md)
    parameters    wP                     w a weight: fp32 4, bf16 2, fp64 8
    parameters    w(E+2U)                with --params: the root (all else), the block in use, the next one
    gradients     wmax(2E,E+2U,3U)       one unit's, as sent and as received, and the next one's
    host          (K+2m+w+c/2)P/N        moments; masters and .grad; a microbatch's gradients; in bf16 weights

Sent (bytes that a rank copies down to its host and up from it, and sends to other ranks, in a step)
    down          kwP/N
    up            wP/N
    up            kw(2P-E-2U)/N          instead, with --params: the last two blocks stay for backward
    all-to-all    kwP(N-1)/N             and a local sum: so bf16 is rounded once
    all-gather    wP(N-1)/N
    all-gather    kw(2P-E-2U)(N-1)/N     instead, with --params

Run
    torchrun --nproc_per_node=8 offload.py --size gpt2-xl --dtype bf16 --batch 64
    torchrun --nproc_per_node=2 offload.py --params --device cpu --device-mb 20 --link-gbps 10

Left out
    What zero2.py leaves out; delayed updates (5.2), disks, recomputation. Weights that are frozen,
    that a step does not use, or that two blocks share are an error.
"""

import argparse
import contextlib
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
import torch.distributed.nn  # first: if torch.optim imports it later, the process group is never freed
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until torch 2.13


class Offload:
    """Wraps a module on the CPU, alike on all ranks. Each of `blocks` is a unit, the rest one, the root."""

    def __init__(self, module, blocks, device, offload_params, link_gbps, new_optimizer):
        self.module = module
        self.device = device
        self.offload_params = offload_params
        self.new_optimizer = new_optimizer
        self.host = Worker("host", device, link_gbps)  # copies gradients down, and steps
        self.uploader = Worker("upload", device, link_gbps)  # and launches collectives, in one order
        self.reduce_job = None  # of the unit in flight
        if self.host.stream:  # torchrun leaves a rank one CPU thread; the number is each thread's own
            self.host.submit(torch.set_num_threads, os.cpu_count() // torch.cuda.device_count() or 1)
        in_blocks = set(blocks.parameters())  # the root, unit 0, has the others
        self.units = []
        for i, submodule in enumerate([module, *blocks]):
            weights = [weight for weight in submodule.parameters() if i or weight not in in_blocks]
            self.units.append(Unit(self, weights))
            submodule.register_forward_pre_hook(partial(self._unshard_from, i, 1))
            if i > 0:
                submodule.register_full_backward_pre_hook(partial(self._unshard_from, i, -1))
            if offload_params and 0 < i < len(blocks) - 1:  # backward begins with the last two
                submodule.register_forward_hook(self.units[i].reshard)

    def _unshard_from(self, i, direction, *_):
        """Wait for a unit's weights, and prefetch those of the next one in this direction (1 or -1)."""
        self.units[i].unshard()
        self.units[i].upload_job.result()
        if self.uploader.stream:  # the GPU may not have done yet what the job launched
            torch.cuda.current_stream().wait_stream(self.uploader.stream)
        for unit in self.units[i::direction][1:2]:  # last: the main stream must not wait for this copy, too
            unit.unshard()

    def step(self, max_norm):
        """Start to step, with gradients clipped to a norm of max_norm. Returns the norm before."""
        square = 0
        for i, unit in enumerate(self.units):
            if not unit.reduce_job:
                raise RuntimeError(f"unit {i} (0: the root) has weights without gradient: all must have one")
            square += unit.reduce_job.result()  # of all, before any is stepped: clipping needs their norm
        norm = torch.full((), square, dtype=torch.float64, device=self.device)
        dist.all_reduce(norm)  # the uploader, idle now, launches no other one meanwhile
        norm.sqrt_()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1).item()
        for unit in self.units:
            unit.step_job = self.host.submit(unit.step, scale)
            unit.reduce_job = unit.upload_job = None  # the weights on the device are stale
        return norm

    def full_state_dict(self):
        """The plain module's; its weights are on the CPU until the next forward. All ranks must call it."""
        for i, unit in enumerate(self.units):
            self._unshard_from(i, 1)
            vector_to_parameters(unit.flat_param.clone().cpu(), unit.weights)
            unit.reshard()
        return self.module.state_dict()


class Unit:  # its weights: on the device a flat vector, on the host this rank's 1/N, with its optimizer
    def __init__(self, offload, weights):
        self.offload = offload
        self.weights = weights
        if any(weight._post_accumulate_grad_hooks for weight in weights):
            raise ValueError("a weight is in two units, or is wrapped already")
        size = sum(map(torch.numel, weights))
        self.padding = -size % dist.get_world_size()
        self.flat_param = weights[0].new_empty(size + self.padding, device=offload.device)
        self.part = self.flat_param.chunk(dist.get_world_size())[dist.get_rank()]  # this rank's
        self.step_job = offload.host.submit(self.init_host_state)
        self.step_job.result()  # before the first forward replaces the weights it reads
        self.reduce_job = None  # its result: the square of the norm of gradients
        self.reshard()
        self.hook = self.start_reduce
        for weight in weights:
            weight.register_post_accumulate_grad_hook(weakref.proxy(self.hook))  # a strong one is never freed

    def init_host_state(self):  # in the host's thread, whose tensors SimulatedDevice does not count
        flat = F.pad(parameters_to_vector(self.weights).detach(), (0, self.padding))
        part = flat.view(-1, len(self.part))[dist.get_rank()]
        pinned = self.part.is_cuda
        self.shard = torch.empty_like(part, pin_memory=pinned).copy_(part)  # to upload
        self.host_grad = torch.empty_like(part, pin_memory=pinned)  # of a microbatch
        wide = torch.promote_types(part.dtype, torch.float32)
        self.master = nn.Parameter(self.shard.to(wide))  # in bf16 a copy, else the memory of shard itself
        self.master.grad = torch.zeros_like(self.master)
        self.optimizer = self.offload.new_optimizer([self.master])

    def unshard(self):
        """Start to upload and all-gather the weights, if they are not here or on their way."""
        if not self.upload_job:
            self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
            vector_to_parameters(self.flat_param, self.weights)  # makes each .data a view of flat_param
            self.upload_job = self.offload.uploader.submit(self.upload)

    def upload(self):  # in the uploader's thread
        self.step_job.result()
        self.offload.uploader.copy(self.part, self.shard)
        all_gather(self.flat_param, self.part)

    def reshard(self, *_):
        self.upload_job = None
        self.flat_param.untyped_storage().resize_(0)  # autograd saved views of it: valid once refilled

    def start_reduce(self, _):
        self.reduce_job = None
        if any(weight.grad is None for weight in self.weights):
            return  # some are still to come
        offload = self.offload
        if offload.reduce_job:
            offload.reduce_job.result()  # one unit in flight: over a slow link gradients would pile up
        if offload.offload_params:
            self.reshard()
        padding = self.flat_param.new_zeros(self.padding)
        flat_grad = parameters_to_vector([*(weight.grad for weight in self.weights), padding])
        for weight in self.weights:
            weight.grad = None
        received = torch.empty_like(flat_grad)
        start = partial(dist.all_to_all_single, received, flat_grad, async_op=True)  # N rows, to be summed
        start_job = offload.uploader.submit(start)
        job = offload.host.submit(self.finish_reduce, flat_grad, received, start_job)
        self.reduce_job = offload.reduce_job = job

    def finish_reduce(self, flat_grad, received, start_job):  # in the host's thread
        start_job.result().wait()
        total = flat_grad[: len(self.part)]  # the sum overwrites what was sent
        torch.sum(received.view(-1, len(total)), 0, out=total)
        self.offload.host.copy(self.host_grad, total)
        for tensor in flat_grad, received:  # whose last use, the copy, has ended
            tensor.untyped_storage().resize_(0)  # freed, though a thread may still hold the tensor
        self.master.grad.add_(self.host_grad, alpha=1 / dist.get_world_size())  # the ranks' mean
        return self.master.grad.norm().item() ** 2  # of the sum so far; step() uses the last one

    def step(self, scale):  # in the host's thread
        self.master.grad *= scale
        self.optimizer.step()
        self.master.grad.zero_()
        self.shard.copy_(self.master.data)


class Worker:  # a thread, and on a GPU a stream, that does one job after another
    def __init__(self, name, device, link_gbps):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, name, torch.cuda.set_stream, (self.stream,))  # None: no change
        self.link_gbps = link_gbps

    def submit(self, job, *args):
        if self.stream:  # the job may use what has been computed so far
            self.stream.wait_stream(torch.cuda.current_stream())
        return self.thread.submit(job, *args)

    def copy(self, target, source):  # in a job; slowed to link_gbps gigabits a second
        ends = time.perf_counter() + 8e-9 * source.nbytes / self.link_gbps
        target.copy_(source)
        time.sleep(max(0, ends - time.perf_counter()))


class SimulatedDevice(TorchDispatchMode):  # played by a CPU: counts the storages that this thread uses
    def __init__(self, megabytes):
        super().__init__()
        self.megabytes = megabytes
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = filter(torch.is_tensor, tree_leaves(result))
        self.storages.update(map(torch.Tensor.untyped_storage, tensors))
        if sum(map(torch.UntypedStorage.nbytes, self.storages)) > 1e6 * self.megabytes:
            refuse(f"--device-mb {self.megabytes:g}: the device is full; add --params, or raise --accum")
        return result


def train(config):
    simulated = config.device_mb < math.inf
    if simulated:
        if config.device == "cuda":
            refuse("--device cuda --device-mb: only a CPU plays a device")
        config.device = "cpu"
    device, text = set_up(config, f" | params {config.params} | link {config.link_gbps:g} Gbit/s")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(DTYPES[config.dtype])  # on the host
    with SimulatedDevice(config.device_mb) if simulated else contextlib.nullcontext():
        new_optimizer = partial(OPTIMIZERS[config.optim], lr=config.lr, fused=True)
        offload = Offload(model, model.blocks, device, config.params, config.link_gbps, new_optimizer)
        for step in range(1, config.steps + 1):
            started = time.perf_counter()
            loss = 0
            for inputs, targets in microbatches(config, text, step, device, rank, world_size):
                # Gradients add up over microbatches and each loss is a mean: divide to get the batch's mean.
                microloss = mean_loss(model(inputs), targets) / config.accum
                microloss.backward()
                loss += microloss.detach()
            grad_norm = offload.step(config.clip)
            dist.all_reduce(loss)
            print_step(config, step, loss / world_size, grad_norm, started)
    if config.save:
        state_dict = offload.full_state_dict()
        if rank == 0:
            save_weights(state_dict, config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--params", action="store_true", help="the host keeps the weights, too")
    own.add_argument("--device-mb", type=float, default=math.inf, help="10^6 bytes; a CPU plays the device")
    own.add_argument("--link-gbps", type=float, default=math.inf, help="10^9 bits a second, each way")
    return read_flags(arguments, own, device_mb=(0, math.inf), link_gbps=(1e-9, math.inf))


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
    train(parse())
    dist.destroy_process_group()
