"""HSDP: zero3.py inside a host, replicated across hosts: slow links carry an all-reduce of the shards alone.

Idea
    The model is sharded over F neighbours, say a host's ranks, as in zero3.py; the N/F hosts are replicas.
    In a step's last backward, once a unit's gradients are reduce-scattered, ranks with the same shard in all
    hosts all-reduce it, while earlier units compute (hybrid sharding: FSDP, arXiv 2304.11277, 3.2.2; MiCS,
    arXiv 2205.00119). Nothing else leaves a host. As in zero3.py, freeing a unit's weights empties a storage
    and keeps its tensors: the views that autograd saved are valid again once the storage is refilled.

Timeline (with --prefetch 1; the root, which is in no unit, is gathered first and reduced last)
    compute | forward 1 | forward 2 | forward 3 | backward 3 | backward 2                 | backward 1
    in host | gather 2  | gather 3  |           |            | reduce-scatter 3, gather 1 | reduce-scatter 2
    between |           |           |           |            |                            | all-reduce 3

Memory (bytes; P parameters, U in the largest unit, E in none; F ranks share a copy)
    parameters    mP/F + w(E+(1+f)U)           w a weight: fp32 4, bf16 2, fp64 8; m max(w, 4); f --prefetch
    gradients     (m+c/2)P/F + w(E+(2+g)U)     g 1 over gloo (its receive buffer), else 0; c in bf16 4, else 0
    optimizer     KP/F                         K the moments: AdamW 8, in fp64 16; SGD 0
    Whole weights: the root's E, U of the unit in use, fU of those gathered ahead.
    Whole gradients: the root's E, U of the unit in backward, U of one on its way, gU in its receive buffer.

Sent (bytes that a rank of a ring sends in a step)
    reduce-scatter    kwP(F-1)/F               over gloo an all-to-all of the same bytes, then one local sum
    all-gather        kw(2P-E-(1+f)U)(F-1)/F   the root and the last 1+f units stay whole for their backward
    all-reduce        2w(P/F)(N-F)/N           between hosts, in the last microbatch; of a host 2wP(N-F)/N
    Over a host's link ddp.py sends 2wP(N-1)/N, zero3.py nearly 3kwP(N-1)/N (in rings of neighbours).

Run
    torchrun --nproc_per_node=4 hsdp.py
    torchrun --nproc_per_node=8 hsdp.py --shard 4 --size gpt2-xl --dtype bf16 --batch 64

Left out
    Parameters that only some ranks use, or that are moved, cast or replaced once wrapped, synced buffers.
    Nested units, optimizers that are not elementwise, shards of what is frozen, prefetch in order of use,
    outputs in containers that pytree does not know, units that only a step's earlier backwards use.
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
import torch.distributed.nn  # imported later (torch.optim does), its defaults would keep the group to the end
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.utils._pytree import tree_leaves

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class HSDP(nn.Module):
    """Shards a copy of a module over each `shard` neighbouring ranks (2304.11277, 3.2.2).

    Each submodule of `unit_class` (a class or several) is a unit; all other parameters, and those that units
    share, are one more, the root. All leave the module: model.parameters() are this rank's shards (fp32 for
    bf16), for any elementwise torch optimizer. Parameters that differ in an attribute `kind` share none.
    prefetch: units gathered ahead. reshard_after_forward: False keeps units whole for their backward. device:
    of shards and units (None: where the parameters are).
    All ranks start with rank 0's weights. After a backward every .grad is the ranks' mean; if syncing is
    False, as it may be in all of a step's backwards but the last, that of the ranks that share this copy."""

    def __init__(self, module, unit_class, shard, prefetch=1, reshard_after_forward=True, device=None):
        super().__init__()
        self.module = module
        self.group, _ = dist.new_subgroups(shard)  # neighbours, which share a copy
        holders = [range(i, dist.get_world_size(), shard) for i in range(shard)]  # of each shard
        replica_group, _ = dist.new_subgroups_by_enumeration(holders)
        self.syncing = True
        self.prefetch = prefetch
        self.units = []
        for (submodule, kind, _), params in find_units(module, unit_class):
            unit = Unit(module, params, device, self.group, replica_group)
            unit.reshard_after_forward = reshard_after_forward and submodule is not module
            unit.shard.kind = kind
            submodule.register_forward_pre_hook(partial(self._pre_forward, unit), prepend=True)
            submodule.register_forward_hook(partial(self._post_forward, unit))
            unit.hook = partial(self._gradient_ready, unit)
            for weight in unit.weights:
                weight.register_post_accumulate_grad_hook(proxy(unit.hook))  # a strong one is never freed
            self.units.append(unit)
        for unit in self.units[-1 - prefetch :]:
            unit.reshard_after_forward = False  # backward begins with these
        module.to(device=device)
        for tensor in module.state_dict().values():  # buffers, frozen parameters
            dist.broadcast(tensor, 0)
        self.reducing = self.units[0]  # the unit whose reduce-scatter was the last to start
        module.register_forward_pre_hook(self._begin_forward, prepend=True)
        self.shards = nn.ParameterList(unit.shard for unit in self.units)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def _begin_forward(self, *_):
        for unit in self.units:
            unit.reshard()  # some may be whole and stale, after a forward without backward

    def _unshard_from(self, unit, direction):
        """All-gather a unit, and prefetch the next ones in this direction (1 or -1)."""
        i = self.units.index(unit)
        for each in self.units[i::direction][: 1 + self.prefetch]:
            each.unshard()
        unit.wait_for_unshard()

    def _pre_forward(self, unit, *_):
        if not unit.in_backward:  # in it, activation checkpointing recomputes
            self._unshard_from(unit, 1)

    def _post_forward(self, unit, submodule, args, output):
        if unit.in_backward:
            return
        if unit.reshard_after_forward or not torch.is_grad_enabled():
            unit.reshard()
        for x in tree_leaves(output):
            if getattr(x, "requires_grad", False):
                x.register_hook(partial(self._pre_backward, unit))

    def _pre_backward(self, unit, *_):
        unit.in_backward = True
        self._unshard_from(unit, -1)

    def _gradient_ready(self, unit, weight):
        if weight not in unit.pending:
            raise RuntimeError("a gradient came twice: a backward before this one has failed")
        unit.collect(weight)
        if len(unit.pending) == len(unit.weights):  # the unit's first gradient in this backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        unit.pending.remove(weight)
        if not unit.pending:
            unit.reshard()  # all gradients are here: nothing in backward reads a weight any more
            self.reducing.finish_reduce(self.syncing)  # one unit's gradients travel at a time
            self.reducing = unit
            unit.start_reduce()

    def _end_backward(self):
        """Reduce what is left. Weights without a gradient count as zero."""
        for unit in self.units:
            if unit.unreduced:
                unit.reshard()
                unit.start_reduce()
            unit.finish_reduce(self.syncing)
            unit.finish_all_reduce()

    def clip_grad_norm_(self, max_norm):
        """Scale the gradients to a global norm of at most max_norm. Returns the norm before."""
        grads = [shard.grad for shard in self.shards if shard.grad is not None]
        squares = torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).square().sum()
        dist.all_reduce(squares, group=self.group)  # not across: replicas have the same
        norm = squares.sqrt()
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1).to(grads[0]))
        return norm

    def full_state_dict(self):
        """The plain module's state_dict on rank 0's CPU; {} elsewhere. All ranks must call it."""
        state_dict = {}
        for unit in self.units:
            unit.reshard()  # it may be whole and stale
            unit.unshard()
            unit.wait_for_unshard()
            if dist.get_rank() == 0:
                for name, tensor in self.module.state_dict().items():  # what is whole now
                    state_dict[name] = tensor.to("cpu", copy=True)
            unit.reshard()
        return state_dict


class Unit:
    """Parameters of a module as one flat vector. `shard`, an nn.Parameter, is this rank's 1/F of it.

    While a unit is not whole, a ShardedWeight stands for each weight.
    In the module buffers replace them, which state_dict() has and no optimizer takes: `weights`, views of
    flat_param. .data gives each a version counter of its own: else an all-gather between a forward and its
    backward would be an error. Gradients move into views of flat_grad."""

    def __init__(self, module, params, device, group, replica_group):
        self.group = group
        self.replica_group = replica_group
        self.world_size = dist.get_world_size(group)
        flat = nn.utils.parameters_to_vector(params).detach().to(device=device)
        self.flat_param = F.pad(flat, (0, -len(flat) % self.world_size))
        dist.broadcast(self.flat_param, 0)
        self.flat_grad = torch.zeros_like(self.flat_param)
        self.part = self.flat_param.chunk(self.world_size)[dist.get_rank(group)]  # this rank's
        self.shard = nn.Parameter(self.part.to(torch.promote_types(flat.dtype, torch.float32), copy=True))
        self.weights = [view.data.requires_grad_() for view in unflatten(self.flat_param, params)]
        self.grad_views = dict(zip(self.weights, unflatten(self.flat_grad, params)))
        self.flat_grad.untyped_storage().resize_(0)  # last: no view can be made of an empty one
        weight_of = dict(zip(params, self.weights))
        self.slots = []  # (submodule, name, weight)
        for submodule in module.modules():
            for name, param in list(submodule._parameters.items()):
                if param in weight_of:
                    delattr(submodule, name)
                    submodule.register_buffer(name, weight_of[param])
                    self.slots.append((submodule, name, weight_of[param]))
        self.pending = set(self.weights)  # gradients not ready yet
        self.all_gather_work = self.reduce_work = self.all_reduce_work = None
        self.unreduced = False  # whether flat_grad has gradients still to be reduced
        self.reshard()

    @torch.no_grad()
    def unshard(self):
        """Start to all-gather the weights, if they are not here or on their way."""
        storage = self.flat_param.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.flat_param.nbytes)
            self.part.copy_(self.shard)
            self.all_gather_work = all_gather(self.flat_param, self.part, group=self.group, async_op=True)

    def wait_for_unshard(self):
        if self.all_gather_work:
            self.all_gather_work.wait()
            self.all_gather_work = None
            for submodule, name, weight in self.slots:
                del vars(submodule)[name]
                submodule._buffers[name] = weight

    def reshard(self):
        """Free the weights, and end their unit's backward."""
        self.in_backward = False
        self.wait_for_unshard()
        if self.flat_param.untyped_storage().nbytes() > 0:
            self.flat_param.untyped_storage().resize_(0)
            for submodule, name, _ in self.slots:
                del submodule._buffers[name]
                vars(submodule)[name] = ShardedWeight()  # not by setattr, which an nn.LSTM overrides

    def collect(self, weight):
        """Move a weight's gradient into flat_grad."""
        if self.flat_grad.untyped_storage().nbytes() == 0:
            self.flat_grad.untyped_storage().resize_(self.flat_grad.nbytes)
            self.flat_grad.zero_()
        self.unreduced = True
        self.grad_views[weight].add_(weight.grad)
        weight.grad = None

    def start_reduce(self):
        """Start to reduce-scatter flat_grad. (gloo's sends twice as much: there all-to-all, then a sum.)"""
        self.unreduced = False
        gloo = dist.get_backend(self.group) == "gloo"
        collective = dist.all_to_all_single if gloo else reduce_scatter
        self.received = torch.empty_like(self.flat_grad if gloo else self.part)
        self.reduce_work = collective(self.received, self.flat_grad, group=self.group, async_op=True)

    def finish_reduce(self, syncing):
        """If a reduce is in flight, wait, take the ranks' mean, and if syncing start its all-reduce."""
        if self.reduce_work:
            self.reduce_work.wait()
            self.reduce_work = None
            self.pending = set(self.weights)
            if self.shard.grad is None:
                self.shard.grad = torch.zeros_like(self.shard)
            for gradient in self.received.view(-1, len(self.part)):
                self.shard.grad.add_(gradient, alpha=1 / self.world_size)  # the ranks' mean
            self.flat_grad.untyped_storage().resize_(0)  # freed
            self.received.untyped_storage().resize_(0)  # gloo's thread may hold the tensor a little longer
            if syncing:
                self.total = self.shard.grad.to(self.part.dtype)  # in bf16 a copy, else the same memory
                self.all_reduce_work = dist.all_reduce(self.total, group=self.replica_group, async_op=True)

    def finish_all_reduce(self):
        """If an all-reduce is in flight, wait for it, and take the replicas' mean."""
        if self.all_reduce_work:
            self.all_reduce_work.wait()
            # What an earlier backward left is the same in all replicas, and so is its mean.
            torch.div(self.total, dist.get_world_size(self.replica_group), out=self.shard.grad)
            self.all_reduce_work = self.total = None


class ShardedWeight:
    """Stands in a module where a weight was. Torch's errors show its name."""


def find_units(module, unit_class):
    """[((submodule, kind, dtype), its parameters)]; `module`, first, gets those in no unit or in several."""
    homes = {}
    for submodule in module.modules():
        if isinstance(submodule, unit_class):
            for param in submodule.parameters():
                homes[param] = module if param in homes else submodule
    units = {}
    for param in module.parameters():
        if param.requires_grad:
            key = homes.get(param, module), getattr(param, "kind", None), param.dtype
            units.setdefault(key, []).append(param)
    return sorted(units.items(), key=lambda unit: unit[0][0] is not module)


def train(config):
    choose_shard(config)
    device, text = set_up(config, f" | shard {config.shard} | prefetch {config.prefetch}")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(DTYPES[config.dtype])
    model = HSDP(model, Block, config.shard, config.prefetch, device=device)
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        for i, (inputs, targets) in enumerate(microbatches(config, text, step, device, rank, world_size), 1):
            # Gradients add up over microbatches and each loss is a mean: divide to get the batch's mean.
            microloss = mean_loss(model(inputs), targets) / config.accum
            model.syncing = i == config.accum
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


def choose_shard(config):
    """Without --shard, the ranks of a host; of a single host half of them, so that both groups show."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if host == world_size >= 4 and host % 2 == 0:
        host //= 2
    config.shard = config.shard or host
    if world_size % config.shard:
        refuse(f"--shard {config.shard}: must divide the {world_size} ranks")


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--shard", type=int, help="ranks that share a copy (default: a host's, or half)")
    own.add_argument("--prefetch", type=int, default=1, help="units gathered ahead")
    return read_flags(arguments, own, prefetch=(0, 7))


# ==== toy model: the same lines in every lesson ====
SHAPE = "layers heads width context vocab".split()
SIZES = {"toy": "8 8 64 64 256", "small": "6 8 256 128 256", "gpt2": "12 12 768 1024 50304"}
SIZES |= {"gpt2-xl": "48 25 1600 1024 50304", "7.5b": "32 34 4352 2048 50304"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
CHOICES = {"size": SIZES, "optim": OPTIMIZERS, "dtype": DTYPES, "device": ("auto", "cpu", "cuda")}
DEFAULTS = {"size": "toy", "optim": "adamw", "dtype": "fp32", "device": "auto", "data": np.ma.core.__file__}
DEFAULTS |= {"steps": 20, "batch": 16, "accum": 1, "lr": 1e-3, "clip": 1.0, "seed": 0, "save": ""}
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
        files = sorted(filter(Path.is_file, Path(config.data).rglob("*"))) or [Path(config.data)]
        text = bytearray().join(map(Path.read_bytes, files))
        if len(text) <= config.context:
            refuse(f"--data {config.data}: must have more bytes than --context {config.context}")
        open(config.save or os.devnull, "ab").close()
    except OSError as error:
        refuse(f"--data {config.data} or --save {config.save}: {error}")
    device = torch.device(f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % gpus}" if gpus else "cpu")
    torch.cuda.set_device(device if gpus else -1)  # -1: none
    if not dist.is_initialized():
        if 0 < gpus < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):  # ranks share a GPU
            os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])  # NCCL refuses it on one host
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if gpus else "gloo", **alone)
    if dist.get_rank() == 0:
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
    if dist.get_rank() == 0:
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
