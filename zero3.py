"""ZeRO-3, or FSDP: as zero2.py, but each rank also holds only 1/N of the weights, and gathers what it uses.

Idea
    Before its forward a unit is unsharded: an all-gather gives all ranks its weights. After its forward it
    is resharded: all but this rank's 1/N is freed. The same happens around its backward, after which its
    gradients are reduce-scattered as in zero2.py. While a unit computes, the weights of the next one travel:
    they are prefetched (ZeRO, arXiv 1910.02054, sections 5.3 and 7.2.2; FSDP, arXiv 2304.11277, section 3).

    Parameters travel in units: one for each transformer block, and one, the root, for all others. Each rank
    owns 1/N of every unit, its shard.

Timeline (of three blocks, with --prefetch 1; the root and what waits at the ends are not drawn)
    compute | forward 1 | forward 2 | forward 3 | backward 3 | backward 2                 | backward 1
    network | gather 2  | gather 3  |           |            | reduce-scatter 3, gather 1 | reduce-scatter 2

Memory (bytes on each of N ranks; P parameters, U in a block, E in the root)
    parameters    mP/N + w(E+(1+f)U)      w = 4 in fp32, 2 in bf16; m = 4; f = --prefetch
    gradients     mP/N + w(E+(2+g)U)      g = 1 over gloo, for a receive buffer of a unit, else 0
    optimizer     KP/N                    K = 8 for AdamW's two moments, 0 for SGD (fp64: w, m = 8, K = 16)
    Weights are unsharded in the root, in the unit that computes, and in f units on their way; gradients in
    the root, in the unit in backward, and in one unit on its way.

Sent (bytes, by each rank in each step of k microbatches)
    reduce-scatter    kwP(N-1)/N                in a ring
    all-gather        kw(2P-E-(1+f)U)(N-1)/N    the root and the last 1+f units are kept for their backward

Run
    torchrun --nproc_per_node=2 zero3.py
    torchrun --nproc_per_node=8 zero3.py --size gpt2-xl --dtype bf16 --batch 64

Left out
    Buffers, such as BatchNorm's statistics, are not averaged. A parameter that is not used is an error.
    All ranks must call forward together and use units in the same order, or they hang, or mix up gradients.
    Not noticed: an optimizer that is not elementwise, such as Shampoo (for Muon see muon.py); a parameter
    that is added or unfrozen after wrapping, which is not trained; torch's own clip_grad_norm_ and
    GradScaler, which look at 1/N of the gradients; an update before a step's last backward.
    While a weight is sharded, it is NaN: use it in its unit's forward only. If the loss uses a tensor that a
    unit has made but not returned, or only inside of a dataclass, backward reads freed memory: return it.
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from weakref import proxy

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _unflatten_dense_tensors as unflatten  # views of a flat tensor, of these shapes
from torch.utils._pytree import tree_leaves

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ZeRO3(nn.Module):
    """Wraps a module, in which each submodule of unit_class is a unit. Without overlap, its forward would be

        all_gather(unit.flat_param, unit.shard)
        for param, view in zip(unit.params, unit.param_views):
            param.data = view
        output = submodule(input)
        unit.flat_param = None  # free the unsharded weights

    This has two problems. While weights travel, nothing is computed. So here the next `prefetch` units are on
    their way while one computes. And nothing is freed, because autograd keeps parameters, or views of them,
    for backward. So here the memory that these share is freed, while they stay: they are valid again as soon
    as that memory has been filled again, before the unit's backward.

    parameters() are this rank's shards, for an elementwise optimizer that is made after wrapping.
    device: where shards and unsharded units are. (A module on the CPU moves there unit by unit.)"""

    def __init__(
        self, module: nn.Module, unit_class: type, prefetch=1, reshard_after_forward=True, device=None
    ):
        super().__init__()
        self.module = module
        self.prefetch = prefetch
        self.has_optimizer = False  # until somebody asks for parameters()
        self.waiting = set()  # during backward: the parameters that do not have their gradient yet
        self.reducing = []  # the units whose gradients are travelling
        # Hooks: a unit calls _pre_forward and _post_forward, and its output _pre_backward; autograd calls
        # _gradient_ready when a parameter has its gradient. (Through a proxy, or hooks would keep the model.)
        self.units = []
        for submodule, params in find_units(module, unit_class):
            unit = Unit(params, device)
            self.units.append(unit)
            unit.reshard_after_forward = reshard_after_forward and submodule is not module
            submodule.register_forward_pre_hook(partial(self._pre_forward, unit), prepend=True)
            submodule.register_forward_hook(partial(self._post_forward, unit))
            unit.hook = partial(self._gradient_ready, unit)
            for param in params:
                param.register_post_accumulate_grad_hook(proxy(unit.hook))
        for unit in self.units[-1 - prefetch :]:
            unit.reshard_after_forward = False  # backward begins with these
        module.register_forward_pre_hook(self._begin_forward, prepend=True)  # runs first
        # All ranks start from rank 0's buffers and frozen weights. (Unit has done the same for the others.)
        frozen = [param for param in module.parameters() if not param.requires_grad]
        for tensor in (*frozen, *module.buffers()):
            tensor.data = tensor.data.to(device)
            dist.broadcast(tensor.detach(), 0)
        self._protect()

    def parameters(self, recurse=True):
        self.has_optimizer = True
        return (unit.shard for unit in self.units)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def _begin_forward(self, *_):
        self._check()
        # A forward that no backward has followed leaves units unsharded, maybe with weights out of date.
        for unit in self.units:
            unit.reshard()

    def _unshard(self, unit, direction):
        # Gather a unit, and those that forward (direction 1) or backward (-1) needs next.
        i = self.units.index(unit)
        for each in self.units[i::direction][: 1 + self.prefetch]:
            each.unshard()
        unit.wait_for_unshard()

    def _pre_forward(self, unit, *_):
        if not unit.in_backward:  # else activation checkpointing runs its forward again, and it is here
            self._unshard(unit, 1)

    def _post_forward(self, unit, submodule, args, output):
        if unit.in_backward:
            return
        if unit.reshard_after_forward or not torch.is_grad_enabled():
            unit.reshard()
        tensors = [x for x in tree_leaves(output) if getattr(x, "requires_grad", False)]
        if torch.is_grad_enabled() and not tensors:
            raise RuntimeError("a unit must return a tensor that requires a gradient, or a tree of such")
        for tensor in tensors:
            tensor.register_hook(partial(self._pre_backward, unit))

    def _pre_backward(self, unit, *_):
        # Backward has reached this unit's output, so it is done with units that have all their gradients:
        # free them. (Not before: the gradient of a unit's input may need its weights.)
        for each in self.units:
            if self.waiting and self.waiting.isdisjoint(each.params):
                each.reshard()
        unit.in_backward = True
        self._unshard(unit, -1)

    def _gradient_ready(self, unit, param):
        if not self.waiting:  # this is the first gradient of this backward
            for each in self.units:
                self.waiting.update(each.params)
            # Autograd calls _end_backward when this whole backward is done.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        unit.collect(param)
        self.waiting.remove(param)
        if self.waiting.isdisjoint(unit.params):
            self._post_backward(unit)

    def _post_backward(self, unit):
        # A unit has all its gradients. They travel while backward computes those of the next unit. One unit's
        # at a time, so that one receive buffer is enough.
        if self.reducing:
            self.reducing.pop(0).finish_reduce_scatter()
        unit.start_reduce_scatter()
        self.reducing.append(unit)

    def _end_backward(self):
        self._check()
        while self.reducing:
            self.reducing.pop(0).finish_reduce_scatter()
        for unit in self.units:
            unit.reshard()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float):
        """Scale the gradients to a global norm of at most max_norm. Returns the norm before."""
        if self.units[0].shard.grad is None:
            raise RuntimeError("clip after a step's last backward")
        # In pieces: a CPU makes an fp64 copy of each, which its cache holds if the piece is small.
        grads = [piece for unit in self.units for piece in unit.shard.grad.split(2**20)]
        squares = torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).square().sum()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1).to(grads[0]))
        return norm

    def full_state_dict(self):
        """The plain module's state_dict on rank 0, weights on the CPU; else {}. All ranks must call it."""
        weights = {}
        for unit in self.units:
            unit.reshard()  # it may be out of date
            unit.unshard()
            unit.wait_for_unshard()
            for name, param in nn.Module.named_parameters(self.module, remove_duplicate=False):
                if param in unit.grad_views and dist.get_rank() == 0:
                    weights[name] = param.detach().to("cpu", copy=True)
            unit.reshard()
        state_dict = nn.Module.state_dict(self.module)  # which has the buffers, and frozen weights, too
        return {name: weights.get(name, value) for name, value in state_dict.items() if weights}

    # A reader may skip to Unit: this turns mistakes that would go unnoticed into errors.

    def _check(self):
        if torch.is_grad_enabled() and not self.has_optimizer:
            raise RuntimeError("make the optimizer after wrapping, of the wrapper's parameters()")
        if self.waiting:
            raise RuntimeError("a backward failed, or left a parameter without a gradient: all must get one")
        if not all(unit.shard.requires_grad for unit in self.units):
            raise RuntimeError("freeze the module's parameters before you wrap it, not the shards")

    def _protect(self):
        for submodule in self.modules():
            for name in ("named_parameters", "load_state_dict", "requires_grad_", "_apply", "__reduce_ex__"):
                setattr(submodule, name, refuse_use.__get__(submodule))
        self.module.state_dict = refuse_use


def refuse_use(*args, **kwargs):
    raise RuntimeError("use parameters() and full_state_dict(); load, freeze, move, copy before you wrap")


class Unit:
    """Parameters that travel together, as views of flat_param, which has memory only while the unit is
    unsharded. Their gradients gather in flat_grad, which has memory from the first until it has been sent.
    shard, which the optimizer updates, is a copy of this rank's 1/N of flat_param (in bf16 an fp32 copy)."""

    def __init__(self, params, device):
        self.n_shards = dist.get_world_size()
        self.params = params
        if len({param.dtype for param in params}) > 1:
            raise ValueError("the parameters of a unit must be of one dtype")
        flat = torch.cat([param.detach().flatten() for param in params]).to(device)
        self.flat_param = F.pad(flat, (0, -len(flat) % self.n_shards))  # to equal parts
        dist.broadcast(self.flat_param, 0)
        self.param_views = unflatten(self.flat_param, params)
        self.flat_grad = torch.zeros_like(self.flat_param)
        self.grad_views = dict(zip(params, unflatten(self.flat_grad, params)))
        self.flat_grad.untyped_storage().resize_(0)  # only now: no view can be made of an empty storage
        self.own_param = self.flat_param.chunk(self.n_shards)[dist.get_rank()]
        shard_dtype = torch.promote_types(flat.dtype, torch.float32)
        self.shard = nn.Parameter(self.own_param.to(shard_dtype, copy=True))
        self.nan = flat.new_tensor(torch.nan)
        self.gather_work = None
        self.reshard()

    def unshard(self):
        """Start to all-gather the weights, unless they are here or on their way."""
        if self.flat_param.untyped_storage().nbytes() == 0:
            self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
            self.own_param.copy_(self.shard.data)
            self.gather_work = all_gather(self.flat_param, self.own_param, async_op=True)

    def wait_for_unshard(self):
        if self.gather_work:
            self.gather_work.wait()
            self.gather_work = None
            # Autograd has kept the parameters themselves, or views of flat_param: both are right again.
            for param, view in zip(self.params, self.param_views):
                param.data = view

    def reshard(self):
        """Free the weights. A NaN takes the place of all numbers of a parameter, so that misuse shows."""
        self.in_backward = False
        self.wait_for_unshard()
        self.flat_param.untyped_storage().resize_(0)
        for param in self.params:
            param.data = self.nan.expand(param.shape)

    def collect(self, param):
        """Move a gradient into flat_grad, divided by N, so that the ranks' sum is their average."""
        storage = self.flat_grad.untyped_storage()
        if storage.nbytes() == 0:  # this is the first gradient in this backward
            storage.resize_(self.flat_grad.nbytes)
            self.flat_grad[-self.n_shards :].zero_()  # the padding, at most
        torch.mul(param.grad.to_dense(), 1 / self.n_shards, out=self.grad_views[param])
        param.grad = None

    def start_reduce_scatter(self):
        """Exchange flat_grad for `received`, rows that add up to this rank's 1/N of the ranks' average."""
        rows = self.flat_grad.view(self.n_shards, -1)
        # gloo's reduce-scatter is an all-reduce inside. Sending each rank its row is half of that.
        is_gloo = dist.get_backend() == "gloo"
        exchange = dist.all_to_all_single if is_gloo else reduce_scatter
        self.received = torch.empty_like(rows if is_gloo else rows[:1])
        self.reduce_work = exchange(self.received, rows, async_op=True)

    def finish_reduce_scatter(self):
        self.reduce_work.wait()
        self.flat_grad.untyped_storage().resize_(0)
        gradient = self.received.sum(0, dtype=self.shard.dtype)
        if self.shard.grad is not None:
            gradient += self.shard.grad
        self.shard.grad = gradient
        self.received.untyped_storage().resize_(0)  # free it, as gloo may still hold the tensor


def find_units(module, unit_class):
    """[(submodule, its parameters)]: first the root, which also has what several units share."""
    owner = {}
    for submodule in module.modules():
        if isinstance(submodule, unit_class):
            for param in submodule.parameters():
                owner[param] = module if param in owner else submodule  # in several units: the root's
    units = {module: []}
    for param in module.parameters():
        if param._post_accumulate_grad_hooks:
            raise ValueError("the module, or a part of it, is wrapped already: build it anew")
        if param.requires_grad:
            units.setdefault(owner.get(param, module), []).append(param)
    found = [(submodule, params) for submodule, params in units.items() if params]
    if not owner or not found:
        raise ValueError(f"the module has no {unit_class} with parameters, or all parameters are frozen")
    return found


def train(config):
    device, text = set_up(config, f" | prefetch {config.prefetch} | no-reshard {config.no_reshard}")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(DTYPES[config.dtype])
    model = ZeRO3(model, Block, config.prefetch, not config.no_reshard, device)
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        for inputs, targets in microbatches(config, text, step, device, rank, world_size):
            # Each loss is a mean, and gradients add up over microbatches: divide to get the batch's mean.
            microloss = mean_loss(model(inputs), targets) / config.accum
            microloss.backward()
            loss += microloss.detach()
        grad_norm = model.clip_grad_norm_(config.clip)
        optimizer.step()
        model.zero_grad()
        dist.all_reduce(loss)
        print_step(config, step, loss / world_size, grad_norm, started)
    if config.save:
        state_dict = model.full_state_dict()
        if rank == 0:
            save_weights(state_dict, config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--prefetch", type=int, default=1, help="units gathered ahead")
    own.add_argument("--no-reshard", action="store_true", help="units stay unsharded until backward")
    return read_flags(arguments, own, prefetch=(0, 7))


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
