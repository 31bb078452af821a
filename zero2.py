"""ZeRO-2: as zero1.py, but each rank also holds only 1/N of the gradients: backward frees the rest.

Idea
    As in zero1.py a rank updates 1/N of the weights, and the next forward gathers all of them. For this it
    needs only 1/N of the gradients. So as soon as backward has all gradients of a unit, they are
    reduce-scattered, and the unsharded ones are freed (ZeRO, arXiv 1910.02054, sections 5.2 and 7.2.1). This
    happens in every microbatch, where zero1.py adds up unsharded gradients, and sends them in the last one.

    Parameters travel in units: one for each transformer block, and one, the root, for all others. Each rank
    owns 1/N of every unit, its shard.

Timeline (of two units)
    compute |          | forward 1 | forward 2 | backward 2 | backward 1       |                  | clip, step
    network | gather 1 | gather 2  |           |            | reduce-scatter 2 | reduce-scatter 1 |

Memory (bytes on each of N ranks; P parameters, U in a block, E in the root)
    parameters    wP + cP/N               w = 4 in fp32, 2 in bf16; c = 4 in bf16, for fp32 copies, else 0
    gradients     mP/N + w(E+(2+g)U)      m = 4; g = 1 over gloo, for a receive buffer of a unit, else 0
    optimizer     KP/N                    K = 8 for AdamW's two moments, 0 for SGD (fp64: w, m = 8, K = 16)
    Gradients are unsharded in the root, in the unit in backward, and in one unit on its way.

Sent (bytes, by each rank in each step of k microbatches)
    reduce-scatter    kwP(N-1)/N          in a ring
    all-gather        wP(N-1)/N           once: weights change once a step

Run
    torchrun --nproc_per_node=2 zero2.py
    torchrun --nproc_per_node=8 zero2.py --size gpt2-xl --dtype bf16 --batch 64

Left out
    Buffers, such as BatchNorm's statistics, are not averaged. A parameter that is not used is an error.
    All ranks must call forward together and use units in the same order, or they hang, or mix up gradients.
    Not noticed: an optimizer that is not elementwise, such as Shampoo (for Muon see muon.py); a parameter
    that is added or unfrozen after wrapping, which is not trained; torch's own clip_grad_norm_ and
    GradScaler, which look at 1/N of the gradients; an update before a step's last backward.
    A submodule that is called alone after an update has old weights.
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

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ZeRO2(nn.Module):
    """Wraps a module, in which each submodule of unit_class is a unit. Without overlap, a backward would be

        loss.backward()
        for unit in units:
            reduce_scatter(received, unit.flat_grad)  # each rank gets the sum of its own part
            unit.shard.grad += received / N
            unit.flat_grad = None  # free the unsharded gradients

    The problem is that all unsharded gradients would be there at the end of loss.backward(), and this peak
    has to fit into memory. So here the gradients of a unit are sent and freed while backward goes on.

    parameters() are this rank's shards, for an elementwise optimizer that is made after wrapping.
    If a step has several backwards, set is_last_backward to False for all but the last: it saves gathers."""

    def __init__(self, module: nn.Module, unit_class: type):
        super().__init__()
        self.module = module
        self.is_last_backward = True
        self.accumulating = False  # between the backwards of a step: there are no new weights then
        self.has_optimizer = False  # until somebody asks for parameters()
        self.waiting = set()  # during backward: the parameters that do not have their gradient yet
        self.reducing = []  # the units whose gradients are travelling
        # All ranks start from rank 0's weights and buffers.
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        # Hooks: the model's forward starts all gathers, a unit's waits for its own, and autograd calls
        # _gradient_ready when a parameter has its gradient. (Through a proxy, or hooks would keep the model.)
        self.units = []
        for submodule, params in find_units(module, unit_class):
            unit = Unit(params)
            self.units.append(unit)
            submodule.register_forward_pre_hook(unit.wait_all_gather, prepend=True)
            unit.hook = partial(self._gradient_ready, unit)
            for param in params:
                param.register_post_accumulate_grad_hook(proxy(unit.hook))
        module.register_forward_pre_hook(self._pre_forward, prepend=True)  # runs first
        self._protect()

    def parameters(self, recurse=True):
        self.has_optimizer = True
        return (unit.shard for unit in self.units)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def _pre_forward(self, *_):
        self._check()
        # The new weights start to travel, all at once. (Not earlier: this class does not see the update.)
        if not self.accumulating:
            for unit in self.units:
                unit.start_all_gather()

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
        self.accumulating = not self.is_last_backward

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float):
        """Scale the gradients to a global norm of at most max_norm. Returns the norm before."""
        if self.units[0].shard.grad is None or not self.is_last_backward:
            raise RuntimeError("clip after a step's last backward, which must have is_last_backward = True")
        # In pieces: a CPU makes an fp64 copy of each, which its cache holds if the piece is small.
        grads = [piece for unit in self.units for piece in unit.shard.grad.split(2**20)]
        squares = torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).square().sum()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1).to(grads[0]))
        return norm

    def full_state_dict(self):
        """The plain module's state_dict. All ranks must call it."""
        for unit in self.units:
            unit.start_all_gather()
            unit.wait_all_gather()
        return nn.Module.state_dict(self.module)

    # A reader may skip to Unit: this turns mistakes that would go unnoticed into errors.

    def _check(self):
        if torch.is_grad_enabled() and not self.has_optimizer:
            raise RuntimeError("make the optimizer after wrapping, of the wrapper's parameters()")
        if self.waiting:
            raise RuntimeError("a backward failed, or left a parameter without a gradient: all must get one")
        if not all(unit.shard.requires_grad for unit in self.units):
            raise RuntimeError("freeze the module's parameters before you wrap it, not the shards")
        if any(unit.gather_work for unit in self.units):
            raise RuntimeError("the last forward failed, or used the weights of a unit without calling it")

    def _protect(self):
        for submodule in self.modules():
            for name in ("named_parameters", "load_state_dict", "requires_grad_", "_apply", "__reduce_ex__"):
                setattr(submodule, name, refuse_use.__get__(submodule))
        self.module.state_dict = refuse_use


def refuse_use(*args, **kwargs):
    raise RuntimeError("use parameters() and full_state_dict(); load, freeze, move, copy before you wrap")


class Unit:
    """Parameters that travel together, as views of flat_param. Their gradients gather in flat_grad, which has
    memory only from the first gradient in a backward until it has been sent.

    shard, which the optimizer updates, is this rank's 1/N of flat_param (in bf16 an fp32 copy of it)."""

    def __init__(self, params):
        self.n_shards = dist.get_world_size()
        self.params = params
        if len({param.dtype for param in params}) > 1:
            raise ValueError("the parameters of a unit must be of one dtype")
        flat = torch.cat([param.detach().flatten() for param in params])
        self.flat_param = F.pad(flat, (0, -len(flat) % self.n_shards))  # to equal parts
        for param, view in zip(params, unflatten(self.flat_param, params)):
            param.data = view
        self.flat_grad = torch.zeros_like(self.flat_param)
        self.grad_views = dict(zip(params, unflatten(self.flat_grad, params)))
        self.flat_grad.untyped_storage().resize_(0)  # only now: no view can be made of an empty storage
        self.own_param = self.flat_param.chunk(self.n_shards)[dist.get_rank()]
        shard_dtype = torch.promote_types(flat.dtype, torch.float32)
        self.shard = nn.Parameter(self.own_param.to(shard_dtype))  # in fp32 the same memory
        self.gather_work = None

    def start_all_gather(self):
        self.own_param.copy_(self.shard.data)  # for bf16
        self.gather_work = all_gather(self.flat_param, self.own_param, async_op=True)

    def wait_all_gather(self, *_):
        if self.gather_work:
            self.gather_work.wait()
            self.gather_work = None

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
    device, text = set_up(config)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(device, DTYPES[config.dtype])
    model = ZeRO2(model, Block)
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        for i, (inputs, targets) in enumerate(microbatches(config, text, step, device, rank, world_size), 1):
            model.is_last_backward = i == config.accum
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
    return read_flags(arguments)


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
