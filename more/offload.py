"""Offload: as zero2.py, but the optimizer is on the host, in CPU memory; with --params the weights, too.

Idea
    A GPU has little memory; its host, the machine around it, has more, behind a slow link. An optimizer uses
    its states once in a step, so they can be on the host. As in zero2.py each rank gets 1/N of the reduced
    gradients. It copies them down to its host, whose CPU updates the same 1/N of the weights, its shard. The
    new weights are copied up and all-gathered (ZeRO-Offload, arXiv 2101.06840, section 4).

    With --params the weights live on the host, too. As in zero3.py a block is unsharded (gathered whole)
    before it is used, and freed after its forward and after its backward; but here the shards come from the
    hosts (ZeRO-Infinity, arXiv 2104.07857). Parameters travel in units: one for each block, and one, the
    root, for all others.

Timeline (of two units; rows are threads; in a column the reduce-scatter comes first, then "down", then main)
    upload |            | reduce-scatter 2 | reduce-scatter 1 |          | 1 up     | 2 up      |
      host |            | 2 down           | 1 down           | update 1 | update 2 |           |
      main | backward 2 | backward 1       | norm             |          |          | forward 1 | forward 2
    The upload thread also launches collectives. With --params units also come up in forward and in backward.

Memory (bytes on each of N ranks' devices, "host" on its host; P parameters, U in a block, E in the root)
    parameters    wP                     w = 4 in fp32, 2 in bf16
    parameters    w(E+2U)                with --params: the root and two blocks
    gradients     w max(2E, E+3U)        the root's, as sent and as received; or before, while these wait, a
    block's, as sent and as received, and the next block's
    host          (K+2m+2w)P/N           m = 4; K = 8 for AdamW's two moments, 0 for SGD
    The host has fp32 weights and sums of gradients (m each), and what is copied up and down (w each). In fp64
    w and m are 8, K is 16.

Sent (bytes, by each rank in each step of k microbatches; "down" to its host, "up" from it)
    down          kwP/N
    up            wP/N
    up            kw(2P-E-2U)/N          instead, with --params: P in forward, P-E-2U in backward, because
    the root and the last two blocks stay on the device for it
    all-to-all    kwP(N-1)/N
    all-gather    wP(N-1)/N
    all-gather    kw(2P-E-2U)(N-1)/N     instead, with --params
    An all-to-all, after which each rank adds up what it has received, does the work of a reduce-scatter.
    (gloo's own reduce-scatter sends twice as much.)

Run
    torchrun --nproc_per_node=2 more/offload.py --params --device cpu --link-gbps 0.1
    OMP_NUM_THREADS=8 torchrun --nproc_per_node=8 more/offload.py --size gpt2-xl --dtype bf16 --batch 64
    Without a GPU the device is the CPU, too, and --link-gbps makes the copies as slow as over a link. With
    GPUs set OMP_NUM_THREADS to cores / GPUs: without it, torchrun gives each update one core.

Left out
    Updates that are delayed by a step (section 5.2 of the first paper), disks. What fails: see Offload.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _unflatten_dense_tensors as unflatten  # views of a flat tensor, of these shapes

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


class Offload(nn.Module):
    """Wraps a module, in which each submodule of unit_class is a unit. Without overlap, a step would be

        loss.backward()
        for unit in units:
            reduce_scatter(received, unit.flat_grad)
            unit.shard.grad = received.to("cpu") / N  # down
        optimizer.step()  # on the CPU, where the shards are
        for unit in units:
            unit.own_param.copy_(unit.shard)  # up
            all_gather(unit.flat_param, unit.own_param)

    The problem is that the device waits: for the link, for the CPU, and for the link again. So here two
    threads work beside it. The host's thread takes gradients down while backward goes on, and then updates
    one unit after another. The uploader's thread brings up the next unit, once it is updated, while the
    device computes with this one.

    device: where the module computes. new_optimizer(params) returns an optimizer, which must be elementwise;
    each unit in `units` has its own, unit.optimizer. With offload_params a unit that is not in use is on the
    host alone. gbps: the speed of a slower link, if one is to be simulated (else torch.inf).

    Change learning rates just before step(): after it, updates still run. All ranks must call forward
    together and use units in the same order, or they hang, or mix up gradients.
    Errors: a parameter that is frozen, not used, or in two units; a unit that is called twice in a forward,
    or returns anything but one tensor; a module with units alone, or without any.
    Not noticed:
    - collectives of your own between a forward and its step() may start in another order on other ranks, and
      hang;
    - an update between a forward and its backward, which then uses new weights;
    - an optimizer that is not elementwise, such as Shampoo; a unit of several dtypes gets the widest;
    - loading, moving or casting the module after wrapping is undone by the next forward;
    - its state_dict() and parameters() have old or empty weights, and no gradients;
    - a block's weights that are used outside of its forward may be old or empty;
    - gradients that are NaN or infinite spoil all weights, as step() updates anyway;
    - buffers, such as BatchNorm's statistics, are neither averaged nor moved to the device;
    - with offload_params, activation checkpointing brings units up again, which stay until the next step."""

    def __init__(self, module: nn.Module, unit_class: type, device, new_optimizer, offload_params, gbps):
        super().__init__()
        self.module = module
        self.offload_params = offload_params
        self.device = device
        self.in_backward = None  # the unit that backward has come to
        self.reducing = None  # the job that takes the latest unit's gradients to the host
        self.host = Worker("host", device, gbps)  # copies gradients down, and updates shards
        self.uploader = Worker("upload", device, gbps)  # copies weights up, and launches collectives
        blocks = [submodule for submodule in module.modules() if isinstance(submodule, unit_class)]
        in_blocks = {param for block in blocks for param in block.parameters()}
        self.units = []
        for submodule in (module, *blocks):
            others = in_blocks if submodule is module else ()  # the root has what is in no block
            params = [param for param in submodule.parameters() if param not in others]
            unit = Unit(params, device, new_optimizer, self.host, self.uploader)
            self.units.append(unit)
            # Forward ends with the last two blocks on the device, where backward begins: they stay.
            unit.reshard_after_forward = offload_params and submodule in blocks[:-2]
            submodule.register_forward_pre_hook(partial(self._unshard, unit, 1), prepend=True)
            if submodule in blocks:
                submodule.register_forward_hook(partial(self._post_forward, unit))

    def forward(self, *args, **kwargs):
        if self.in_backward:
            raise RuntimeError("a backward failed")
        return self.module(*args, **kwargs)

    def _unshard(self, unit, direction, *_):
        # Wait for a unit, then start to bring up the one that forward (direction 1) or backward (-1) needs
        # next. Not earlier: on a GPU, wait_for_unshard() waits for all that the uploader has started.
        unit.unshard()
        unit.wait_for_unshard()
        i = self.units.index(unit) + direction
        if 0 <= i < len(self.units):
            self.units[i].unshard()

    def _post_forward(self, unit, submodule, args, output):
        if not torch.is_tensor(output):
            raise TypeError("a unit must return one tensor, whose hook brings the unit up for backward")
        if unit.reshard_after_forward:
            unit.reshard()
        if output.requires_grad:
            output.register_hook(partial(self._pre_backward, unit))

    def _pre_backward(self, unit, *_):
        # Backward comes to a unit when it has left the one before it, which has all its gradients then.
        if self.in_backward:
            self._post_backward(self.in_backward)
        else:  # autograd calls _end_backward when this whole backward is done
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self.in_backward = unit
        self._unshard(unit, -1)

    def _end_backward(self):
        for unit in self.in_backward, self.units[0]:
            self._post_backward(unit)
        self.in_backward = None

    def _post_backward(self, unit):
        if any(param.grad is None for param in unit.params):
            raise RuntimeError("a backward must give every parameter a gradient, and use each unit once")
        if self.offload_params:
            unit.reshard()
        # Its gradients travel while backward computes those of the next unit, and then backward waits for
        # them: else those of all units would pile up on the device if the link is slow.
        if self.reducing:
            self.reducing.result()
        unit.start_reduce_scatter()
        self.reducing = unit.reduce_job

    def step(self, max_norm):
        """Start an update with gradients clipped to a global norm of max_norm. Returns the norm before."""
        if not all(unit.reduce_job for unit in self.units):
            raise RuntimeError("before step() a backward must use every unit")
        # Clipping needs the norm of all gradients, so no unit is updated before all have come down.
        square = sum(unit.reduce_job.result() for unit in self.units)
        norm = torch.full((), square, dtype=torch.float64, device=self.device)
        dist.all_reduce(norm)
        norm.sqrt_()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1).item()
        # The host updates one unit after another. The next forward waits for each one when it needs it.
        for unit in self.units:
            unit.update_job = self.host.submit(unit.update, scale)
            unit.reduce_job = None
            unit.upload_job = None  # the weights on the device are out of date
        return norm

    def full_state_dict(self):
        """The plain module's state_dict, on the CPU. All ranks must call it, and not before a backward.

        In bf16 its weights are rounded: to go on exactly, save each unit's shard and optimizer, too."""
        for unit in self.units:
            unit.unshard()
            unit.wait_for_unshard()
            weights = unflatten(unit.flat_param.to("cpu", copy=True), unit.params)
            unit.reshard()
            # Until the next forward the module's parameters are these copies.
            for param, weight in zip(unit.params, weights):
                param.data = weight
        return nn.Module.state_dict(self.module)


class Unit:
    """Parameters that travel together:

    flat_param: all of them, on the device; has memory only while the unit is unsharded
    own_param: this rank's 1/N of flat_param, a view
    host_param: this 1/N on the host, in the same dtype; what is copied up
    shard: this 1/N on the host, in fp32 (or fp64), for the optimizer
    """

    def __init__(self, params, device, new_optimizer, host, uploader):
        self.n_shards = dist.get_world_size()
        self.host = host
        self.uploader = uploader
        self.params = params
        if not all(param.numel() and param.requires_grad for param in params):
            raise ValueError("a parameter is frozen, or is in two units, or is wrapped already")
        flat = torch.cat([param.detach().flatten() for param in params]).to(device)
        self.padding = flat.new_zeros(-len(flat) % self.n_shards)  # to equal parts
        self.flat_param = torch.cat([flat, self.padding])
        dist.broadcast(self.flat_param, 0)
        self.param_views = unflatten(self.flat_param, params)
        self.own_param = self.flat_param.chunk(self.n_shards)[dist.get_rank()]
        # (tools/ledger.py counts what this thread makes as the host's.)
        self.update_job = host.submit(self.make_shard, new_optimizer)
        self.update_job.result()
        self.reduce_job = None
        self.reshard()

    def make_shard(self, new_optimizer):  # in the host's thread
        pinned = self.own_param.is_cuda  # memory that the GPU can reach without the CPU
        self.host_param = torch.empty_like(self.own_param, device="cpu", pin_memory=pinned)
        self.host_grad = torch.empty_like(self.host_param, pin_memory=pinned)
        self.host_param.copy_(self.own_param)
        dtype = torch.promote_types(self.host_param.dtype, torch.float32)
        self.shard = nn.Parameter(self.host_param.to(dtype, copy=True))
        self.shard.grad = torch.zeros_like(self.shard)
        self.optimizer = new_optimizer([self.shard])

    def unshard(self):
        """Start to upload and all-gather the weights, unless they are here or on their way."""
        if not self.upload_job:
            self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
            # The weights that autograd has saved share this storage, but not its version counter: autograd
            # does not object when upload() fills it again.
            for param, view in zip(self.params, self.param_views):
                param.data = view
            self.upload_job = self.uploader.submit(self.upload)

    def upload(self):  # in the uploader's thread
        self.update_job.result()
        self.uploader.copy(self.own_param, self.host_param)
        all_gather(self.flat_param, self.own_param)

    def wait_for_unshard(self):
        self.upload_job.result()
        if self.uploader.stream:  # the thread has launched the all-gather, but the GPU may still be at it
            torch.cuda.current_stream().wait_stream(self.uploader.stream)

    def reshard(self):
        """Free the weights. The parameters are empty then, so that using them is an error."""
        self.upload_job = None
        self.flat_param.untyped_storage().resize_(0)
        for param in self.params:
            param.data = self.flat_param[:0]

    def start_reduce_scatter(self):
        flat_grad = torch.cat([param.grad.flatten() for param in self.params] + [self.padding])
        for param in self.params:
            param.grad = None
        received = torch.empty_like(flat_grad)
        # In forward and backward only the uploader's thread launches collectives, so that all ranks launch
        # them in the same order.
        launch = partial(dist.all_to_all_single, received, flat_grad, async_op=True)
        launch_job = self.uploader.submit(launch)  # its result is the collective's handle
        self.reduce_job = self.host.submit(self.finish_reduce_scatter, launch_job, flat_grad, received)

    def finish_reduce_scatter(self, launch_job, flat_grad, received):  # in the host's thread
        launch_job.result().wait()
        own_grad = flat_grad[: len(self.own_param)]  # the sum overwrites what has been sent
        torch.sum(received.view(self.n_shards, -1), 0, out=own_grad)
        self.host.copy(self.host_grad, own_grad)
        for tensor in flat_grad, received:
            tensor.untyped_storage().resize_(0)  # free it now: a thread may hold the tensor for a while
        self.shard.grad.add_(self.host_grad, alpha=1 / self.n_shards)  # the ranks' average
        return self.shard.grad.norm().item() ** 2  # step() uses that of the last microbatch

    def update(self, scale):  # in the host's thread
        self.shard.grad *= scale
        self.optimizer.step()
        self.shard.grad.zero_()
        self.host_param.copy_(self.shard.data)


class Worker:
    """A thread that does one job after another, on a GPU in a stream of its own."""

    def __init__(self, name, device, gbps):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # The thread begins with set_stream(), which does nothing if there is none.
        self.thread = ThreadPoolExecutor(1, name, torch.cuda.set_stream, (self.stream,))
        self.gbps = gbps

    def submit(self, job, *args):
        if self.stream:  # the GPU must first do what it has been told so far: the job uses its results
            self.stream.wait_stream(torch.cuda.current_stream())
        return self.thread.submit(job, *args)

    def copy(self, target, source):
        """For jobs: a copy between device and host, which takes as long as over a link of this speed."""
        ends = time.perf_counter() + 8e-9 * source.nbytes / self.gbps
        target.copy_(source)
        time.sleep(max(0, ends - time.perf_counter()))


def train(config):
    device, text = set_up(config, f" | params {config.params} | link {config.link_gbps:g} Gbit/s")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(DTYPES[config.dtype])
    new_optimizer = partial(OPTIMIZERS[config.optim], lr=config.lr, fused=True)  # fused: one pass over memory
    model = Offload(model, Block, device, new_optimizer, config.params, config.link_gbps)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        for inputs, targets in microbatches(config, text, step, device, rank, world_size):
            # Each loss is a mean, and gradients add up over microbatches: divide to get the batch's mean.
            microloss = mean_loss(model(inputs), targets) / config.accum
            microloss.backward()
            loss += microloss.detach()
        grad_norm = model.step(config.clip)
        dist.all_reduce(loss)
        print_step(config, step, loss / world_size, grad_norm, started)
    if config.save:
        state_dict = model.full_state_dict()
        if rank == 0:
            save_weights(state_dict, config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--params", action="store_true", help="the host keeps the weights, too")
    own.add_argument("--link-gbps", type=float, default=torch.inf, help="10^9 bits a second, each way")
    return read_flags(arguments, own, link_gbps=(1e-9, torch.inf))


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
