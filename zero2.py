"""ZeRO-2: as zero1.py, and a rank keeps the gradients of its shard alone; the others are freed in backward.

Idea
    A rank that steps 1/N of a unit needs 1/N of its gradients. So a unit's gradients live from the first of
    them that backward() computes until they are reduce-scattered (ZeRO, arXiv 1910.02054, sections 5.2 and
    7.2.1). With accumulation every microbatch is reduced, into the same shard: no rank keeps a whole sum.

Holds
    bytes         fp32    bf16    fp64     of P parameters; shards are padded by N-1 elements a unit at most
    parameters    4P      2P      8P
    gradients     4P/N    2P/N    8P/N     + 2 units, one that backward() fills and one in flight (over
                                           gloo 3: what arrives is added up in a buffer), + what belongs to
                                           no unit (embeddings), + 1 parameter's
    AdamW         8P/N    12P/N   16P/N    (in bf16 with the fp32 master weights)

Talks
    compute | forward: units whose weights are here  | backward, last unit first     | norm, step
    network | ... | all-gather unit 3 | unit 4 | ... | reduce-scatter unit 4 | 3 ... | all-gather unit 1 ...
    Backward() waits for a unit to have left before it sends the next: two of them are alive, not more, if the
    units run in the order in which they are defined.

Costs
    As zero1.py: a reduce-scatter and an all-gather are 2P(N-1)/N elements per rank and step on a ring. Each
    further microbatch adds a reduce-scatter of P(N-1)/N; that is the price of not holding the sum.

Run
    torchrun --nproc_per_node=2 zero2.py
    torchrun --nproc_per_node=8 zero2.py --size gpt2-xl --dtype bf16 --batch 64

Expect
    zero2 | 2 ranks gloo/cpu | 0.83 M parameters (P) | fp32 | batch 16 = 8 per rank x 1 x 2 ranks
    step  1/20 | loss 5.5011 | grad norm 6.577 | 773.8 ms | 1.3 k tok/s
    ...
    step 20/20 | loss 3.0858 | grad norm 1.224 | 115.0 ms | 8.9 k tok/s
    held per rank     formula                           measured
      parameters      4P                     3.34 MB     3.34 MB
      gradients       4P/N + 4 units         4.21 MB     4.00 MB
      optimizer       8P/N                   3.34 MB     3.34 MB
    sent per rank and step (ring bytes)
      reduce-scatter  4P(N-1)/N              1.67 MB     1.67 MB
      all-gather      4P(N-1)/N              1.67 MB     1.67 MB
      all-reduce      16(T+1)(N-1)/N         0.00 MB     0.00 MB

Left out
    Parameter groups with options of their own, optimizers that are not elementwise (LAMB, Muon), sparse and
    complex parameters, create_graph=True, a forward that reads a unit's weights outside the unit.
"""

import argparse
import functools
import json
import operator
import os
import sys
import time
import weakref
from collections import Counter, deque
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # torch.optim would load it later, and then it would hold on to our process group
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ==== toy model: the same lines in every lesson ====
SIZES = {"toy": (4, 4, 128, 64, 256), "small": (6, 8, 256, 128, 256), "gpt2": (12, 12, 768, 1024, 50257)}
SIZES |= {"gpt2-xl": (48, 25, 1600, 1024, 50257), "7.5b": (32, 34, 4352, 2048, 50257)}
SHAPE = ("layers", "heads", "width", "context", "vocab")  # text is bytes: the first 256 of the vocabulary
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def flags():
    """The parser of the flags that every lesson has."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error, add = refuse, parser.add_argument
    add("--size", default="toy", choices=SIZES, help=", ".join(SHAPE) + " together")
    for name in SHAPE:
        add("--" + name, type=int, help="in place of the size's")
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--batch", type=int, default=16, help="sequences in the global batch of an optimizer step")
    add("--accum", type=int, default=1, help="microbatches that each rank accumulates per step")
    add("--optim", default="adamw", choices=OPTIMIZERS, help="sgd shows a wrong scale, adamw hides it")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--clip", type=float, default=1.0, help="limit of the global gradient norm (0: none)")
    add("--seed", type=int, default=0, help="seed of weights and batches")
    add("--dtype", default="fp32", choices=DTYPES, help="bf16 keeps fp32 masters")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: cuda if each rank has a GPU")
    add("--data", help="text file or folder, read as bytes (none: the sources of Python's standard library)")
    add("--save", help="file for the full-precision state_dict")
    add("--json", help="file for the ledger")
    add("--trace", help="folder for a Chrome trace per rank (its first step is slow: the ledger looks on)")
    return parser


def refuse(problem):
    """End this rank with exit code 2; rank 0 says in one line what to change."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{os.path.basename(sys.argv[0])}: {problem}", file=sys.stderr)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(2)


def set_up(config):
    """Join (once) the world that torchrun describes, or a world of one. Returns the device and the text."""
    gpus, device = torch.cuda.device_count() * (config.device != "cpu"), torch.device("cpu")
    gpu_each = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if gpu_each or (gpus and config.device == "cuda"):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if gpu_each else "gloo", timeout=timedelta(minutes=10), **alone)
    for name, value in zip(SHAPE, SIZES[config.size]):
        setattr(config, name, value if getattr(config, name) is None else getattr(config, name))
    root = Path(config.data or os.path.dirname(os.__file__))
    files = [root] if root.is_file() else sorted(root.rglob("*") if config.data else root.glob("*.py"))
    files = [np.memmap(f, np.uint8, "r") for f in files if f.is_file() and f.stat().st_size]
    text = files[0] if len(files) == 1 else np.concatenate([*files, np.empty(0, np.uint8)])
    problems = [None] * dist.get_world_size()  # of all ranks: a file may be missing on one host only
    dist.all_gather_object(problems, next(find_problems(config, device, len(text)), None))
    if any(problems):
        refuse(next(filter(None, problems)))
    torch.manual_seed(config.seed)
    return device, text


def find_problems(config, device, text_bytes):
    """Yield what stands in the way of training, each in one line."""
    for name, value in vars(config).items():  # counts start at 1, other numbers at 0
        least = {"seed": 0, "prefetch": 0, "staleness": 0, "vocab": 256}.get(
            name, 1 if type(value) is int else 0
        )
        if type(value) in (int, float) and not least <= value < 2**63:
            yield f"--{name.replace('_', '-')} {value}: must be {least} or more, and below 2^63"
    if config.device == "cuda" != device.type:
        yield "--device cuda: no GPU is visible here; use --device cpu"
    if config.width % config.heads:
        yield f"--width {config.width}: must be a multiple of --heads {config.heads}"
    if config.data and not os.path.exists(config.data):
        yield f"--data {config.data}: no such file or folder"
    if text_bytes <= config.context:
        yield f"--data {config.data}: {text_bytes} bytes there, too few for --context {config.context}"
    for path in filter(None, (config.save, config.json, config.trace)):
        writable = os.access(os.path.join(Path(path).parent, "."), os.W_OK)
        wrong_kind = os.path.isfile(path) if path == config.trace else os.path.isdir(path) or path[-1] == "/"
        if dist.get_rank() == 0 and (wrong_kind or not writable):
            yield f"{path}: cannot be written; its parent folder must exist, and --trace alone is a folder"


def microbatches(config, text, step, device, rank=0, ranks=1):
    """This rank's (inputs, targets) of a step's global batch, int64 (batch / ranks / accum, T) each."""
    generator = np.random.default_rng((config.seed, step))
    starts = generator.integers(len(text) - config.context, size=config.batch)
    for own in starts.reshape(ranks, config.accum, -1)[rank]:
        tokens = torch.from_numpy(np.stack([text[i : i + config.context + 1] for i in own])).to(device).long()
        yield tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    """Pre-norm transformer block with H heads, (B, T, D) -> (B, T, D)."""

    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (B, T, 3, H, D/H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D/H) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def mean_loss(logits, targets):
    """Mean cross-entropy, fp32 at least, of logits (B, T, V) and targets (B, T)."""
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten())


class GPT(nn.Module):
    """Logits (B, T, V) of inputs (B, T), or with targets their mean loss. The head is the embedding."""

    def __init__(self, config):
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, config.width) for n in (config.vocab, config.context))
        self.blocks = nn.ModuleList(Block(config.heads, config.width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for matrix in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, inputs, targets=None):
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # (B, T, V)
        return logits if targets is None else mean_loss(logits, targets)


# ==== end of the toy model ====


class Optimizer:
    """A torch optimizer on this rank's shard of each unit's weights; in fp32 on masters, if they are bf16."""

    def __init__(self, zero, optimizer_class, **options):
        self.zero, self.groups = zero, []
        for unit in zero.units:
            pieces = {p: unit.master[where] for p, where in unit.pieces.items()}
            optimizer = optimizer_class(list(pieces.values()), **options) if pieces else None
            self.groups.append((unit, pieces, optimizer))

    @torch.no_grad()
    def step(self):
        """Step each unit, in the order of forward, and send its weights while the next is stepped."""
        self.zero.wait_for_weights()
        for unit, pieces, optimizer in self.groups:
            if unit.gradient_shard is None:
                raise RuntimeError("step() needs backward() and clip_grad_norm_() before it")
            gradient = unit.gradient_shard.to(unit.master.dtype)
            unit.gradient_shard = None
            for p, piece in pieces.items():
                piece.grad = None if p in self.zero.unused else gradient[unit.pieces[p]]
            if optimizer:
                optimizer.step()
            for piece in pieces.values():
                piece.grad = None
            unit.shard.copy_(unit.master)
            unit.arrival = all_gather(unit.weights, unit.shard, group=self.zero.group, async_op=True)
        self.zero.used = set()

    def tensors(self):
        """What it holds beyond the model: masters, moments, step counts."""
        masters = [unit.master for unit in self.zero.units if unit.master is not unit.shard]
        return masters + tree_leaves([optimizer.state for *_, optimizer in self.groups if optimizer])

    def state_dict_of(self, model):
        """The model's, with masters in place of the parameters that have them: on rank 0, empty on others."""
        whole, rank = {}, dist.get_rank(self.zero.group)
        for unit in self.zero.units:  # a unit at a time, so that others hold no more than one
            flat = unit.master.new_empty(len(unit.weights))
            all_gather(flat, unit.master, group=self.zero.group)
            if rank == 0:
                whole |= {p: view.to("cpu", copy=True) for p, view in unit.views_of(flat).items()}
        tensors = model.state_dict(keep_vars=True).items() if rank == 0 else ()
        return {name: whole.get(tensor, tensor).detach() for name, tensor in tensors}


# torch 2.13 has new names for these two, and warns of the old.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
nccl_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reduce_scatter(shard, flat, group):
    """Start to add up the ranks' `flat`: (function that waits for this rank's 1/N in `shard`, its buffer)."""
    if dist.get_backend(group) != "gloo":
        return nccl_reduce_scatter(shard, flat, group=group, async_op=True).wait, None
    # gloo's own is an all-reduce and a slice, twice the bytes. To sum what all-to-all brings is faster there.
    received = torch.empty_like(flat)
    work = dist.all_to_all_single(received, flat, group=group, async_op=True)

    def wait():
        work.wait()
        torch.sum(received.view(-1, len(shard)), dim=0, out=shard)
        received.untyped_storage().resize_(0)  # gloo's thread may hold on to the tensor for a while

    return wait, received


class Unit:
    """Parameters of one dtype as views of flat weights, their gradients in backward() as views of another."""

    def __init__(self, params, rank, ranks):
        self.params, self.waiting_for, self.arrival = params, set(params), None
        share = -(-sum(p.numel() for p in params) // ranks)  # rounded up: the last shards may be padded
        self.layout, self.pieces, start = [], {}, 0
        for p in params:
            # A view has its parameter's order of dims (channels last, say), as fused optimizers rely on it.
            self.layout.append((p, p.shape, torch.empty_like(p, device="meta").stride(), start))
            first, last = max(start - rank * share, 0), min(start + p.numel() - rank * share, share)
            if first < last:
                self.pieces[p] = slice(first, last)  # where it lies in this rank's shard
            start += p.numel()
        self.weights = torch.zeros(ranks * share, dtype=params[0].dtype, device=params[0].device)
        for p, view in self.views_of(self.weights).items():
            p.data = view.copy_(p.detach())
        self.shard = self.weights.chunk(ranks)[rank]
        self.master = self.shard.float() if self.shard.dtype == torch.bfloat16 else self.shard
        self.gradients = self.gradient_shard = None

    def allocate_gradients(self):
        self.gradients = torch.empty_like(self.weights)
        self.gradients[sum(p.numel() for p in self.params) :] = 0  # the padding
        self.views = self.views_of(self.gradients)

    def views_of(self, flat):
        """{parameter: its part of a flat tensor}."""
        return {p: flat.as_strided(shape, stride, start) for p, shape, stride, start in self.layout}

    def wait_for_weights(self, *_):
        if self.arrival:
            self.arrival.wait()
            self.arrival = None


def find_units(module, is_unit):
    """Yield (submodule, parameters of one dtype that it alone uses); first the module with all others."""
    unit_of = {}  # {module: the unit that it is in}
    for m in module.modules():  # outer ones first: no unit within a unit
        if m is not module and m not in unit_of and is_unit(m):
            unit_of |= {part: module if part in unit_of else m for part in m.modules()}
    users, params_of = {}, {module: []}
    for m in module.modules():
        for p in m.parameters(recurse=False):
            users.setdefault(p, set()).add(unit_of.get(m, module))
    for p, (first, *others) in users.items():  # tied weights of two units are the module's
        params_of.setdefault(module if others else first, []).append(p)
    for m, params in params_of.items():
        for dtype in dict.fromkeys(p.dtype for p in params if p.requires_grad):
            yield m, [p for p in params if p.dtype == dtype and p.requires_grad]


class ZeRO2(nn.Module):
    """Gives each rank of `group` the mean gradients of its 1/N of `module`, and no others (section 5.2).

    Wrap before making the Optimizer: all ranks get rank 0's parameters and buffers. In a step any number of
    backward() calls, then clip_grad_norm_(), with no other collective on `group` from the first to there,
    and then Optimizer.step(). After backward() every .grad is None. Raises ValueError if the ranks' models
    differ.

    is_unit: of a submodule, whether its gradients and weights travel together, and are used in its forward()
    alone; what belongs to none, or to two (tied weights), makes a unit of its own. overlap: go on with
    backward() while a unit's gradients are in flight.
    """

    def __init__(self, module, is_unit=lambda submodule: False, overlap=True, group=None):
        super().__init__()
        self.module, self.overlap, self.group, self.in_flight = module, overlap, group, None
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        tensors = [*module.parameters(), *module.buffers()]
        shapes, everyone = [(t.shape, t.dtype, t.requires_grad) for t in tensors], [None] * self.ranks
        dist.all_gather_object(everyone, shapes, group)
        if any(other != shapes for other in everyone):
            raise ValueError("the ranks' models differ in the shape, dtype or requires_grad of some tensor")
        for tensor in tensors:
            whole = tensor.detach().contiguous()  # gloo would write over the gaps of another layout
            dist.broadcast(whole, group_src=0, group=group)
            tensor.detach().copy_(whole)
        self.units = []
        for submodule, params in find_units(module, is_unit):
            unit = Unit(params, self.rank, self.ranks)
            # before the hooks of others, which may read weights
            submodule.register_forward_pre_hook(unit.wait_for_weights, prepend=True)
            self.units.append(unit)
        if not self.units:
            raise ValueError("no parameter requires a gradient")
        self.to_launch, self.used, self.unused = deque(), set(), set()
        self.unit_of = {p: unit for unit in self.units for p in unit.params}
        for p in self.unit_of:
            p.register_post_accumulate_grad_hook(self._collect)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def wait_for_weights(self):
        """Until then weights may be those before the step, if read other than by forward()."""
        for unit in self.units:
            unit.wait_for_weights()

    def gradients(self):
        """All of them that are alive, in units or shards of units."""
        tensors = [g for unit in self.units for g in (unit.gradients, unit.gradient_shard)]
        return [*tensors, *(p.grad for p in self.unit_of), *(self.in_flight or ())]

    def _collect(self, param):
        """Hook, when backward() is done with a parameter: move its gradient into its unit's."""
        if not self.to_launch:  # the first of this backward()
            self.to_launch = deque(self.units[::-1])  # about the order of backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
            self._finish_reduce_scatter()  # the last unit of the backward() before may be the first of this
        unit = self.unit_of[param]
        if unit.gradients is None:
            unit.allocate_gradients()
        # Ranks will be summed and their mean is wanted, so each share is divided: here, on its only move.
        torch.div(param.grad, self.ranks, out=unit.views[param])
        param.grad = None
        unit.waiting_for.remove(param)
        self.used.add(param)
        while self.to_launch and not self.to_launch[0].waiting_for:
            self._launch()

    def _launch(self):
        """Start the next reduce-scatter: the same on every rank, or they would add up different units."""
        unit = self.to_launch.popleft()
        if unit.gradients is None:
            unit.allocate_gradients()
        for param in unit.waiting_for:  # unused on this rank, but perhaps not on all
            unit.views[param].zero_()
        unit.waiting_for = set(unit.params)
        self._finish_reduce_scatter()
        shard = unit.gradients.new_empty(len(unit.shard))
        wait, buffer = reduce_scatter(shard, unit.gradients, self.group)
        self.in_flight = (unit, wait, shard, buffer)
        if not self.overlap:
            self._finish_reduce_scatter()

    def _finish_reduce_scatter(self):
        """Free the gradients that were sent last, and keep this rank's shard of their sum."""
        if self.in_flight:
            unit, wait, shard, _ = self.in_flight
            wait()
            unit.gradient_shard = shard if unit.gradient_shard is None else unit.gradient_shard.add_(shard)
            unit.gradients.untyped_storage().resize_(0)  # not del: see reduce_scatter()
            self.in_flight = unit.gradients = unit.views = None

    def _end_of_backward(self):
        while self.to_launch:
            self._launch()

    def clip_grad_norm_(self, max_norm):
        """Wait for this rank's gradients; scale them to a global norm of at most max_norm (0: any).

        Returns the norm before.
        """
        self._finish_reduce_scatter()
        squares = []
        for unit in self.units:
            wide = torch.promote_types(unit.gradient_shard.dtype, torch.float32)
            squares.append(torch.linalg.vector_norm(unit.gradient_shard, dtype=wide).double().square())
        # Each element is in one shard, and each parameter in one unit. With their sum go flags: who was used?
        used = [p in self.used for p in self.unit_of]
        flags = torch.ones(len(used), dtype=torch.float64, device=squares[0].device)
        for i, here in enumerate(used):
            if not here:  # set one by one, as a copy of the list would make the host wait for the device
                flags[i] = 0
        total = torch.cat([torch.stack(squares).sum().view(1), flags])
        dist.all_reduce(total, group=self.group)
        # What no rank used gets no gradient, as on one device. (A look at a flag makes the host wait.)
        somewhere = zip(self.unit_of, used, total[1:])
        self.unused = {p for p, here, flag in somewhere if not here and not flag > 0}
        norm = total[0].sqrt()
        for unit in self.units:
            if max_norm:  # always, as `if scale < 1` would make the host wait for the device
                unit.gradient_shard.mul_((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm


# ==== ledger: the same lines in every lesson ====
# {operator: (what it does, passes round the ring)}; gloo has its reduce-scatter from an all-to-all.
RING = {"allreduce": ("all-reduce", 2), "reduce_scatter": ("reduce-scatter", 1), "send": ("send", 0)}
RING |= {"alltoall": ("reduce-scatter", 1), "allgather": ("all-gather", 1), "broadcast": ("broadcast", 0)}


class Ledger(TorchDispatchMode):
    """Prints the run. While on, it sees every operator: bytes alive, by name, and given to collectives."""

    one, held, sent = "rank", "held per rank", "sent per rank and step (ring bytes)"
    profile, data_parallel = torch.profiler.profile, True

    def __init__(self, lesson, config, device, model, gradients=None, threads=0):
        super().__init__()
        params = list(model.parameters())  # once: to walk the modules at every operator is slow
        self.gradients = gradients or (lambda: [p.grad for p in params])
        self.config, self.clock = config, time.perf_counter()
        self.known, self.alive, self.seen = {}, Counter(), Counter()
        ranks, backend = (threads, "threads") if threads else (dist.get_world_size(), dist.get_backend())
        P = sum(p.numel() for p in params)
        self.result = {"lesson": lesson, "world_size": ranks, "backend": backend, "device": device.type}
        self.result |= {"dtype": config.dtype, "n_params": P, "losses": [], "grad_norms": [], "step_ms": []}
        self.say = print if dist.get_rank() == 0 else lambda line: None
        who = f"{ranks} {self.one}{'s'[: ranks - 1]}"
        share = f"{config.batch // ranks // config.accum} per {self.one} x {config.accum} x {who}"
        share = (
            share if self.data_parallel else f"{config.batch // config.accum} x {config.accum} microbatches"
        )
        size = f"{P / 1e6:.2f} M parameters (P) | {config.dtype} | batch {config.batch} = {share}"
        self.say(f"{lesson} | {who} {backend}/{device.type} | {size}")
        self.watch("parameters", [*params, *model.buffers()])
        if config.trace:
            keep = torch.profiler.tensorboard_trace_handler(config.trace, f"{lesson}-rank{dist.get_rank()}")
            self.profiler = self.profile(on_trace_ready=keep)
            self.profiler.start()

    def watch(self, name, tensors, count=True):
        """Count the storages of these tensors as `name` for as long as they live."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), name)
        if count:
            self.seen |= self.alive | Counter(peak_bytes=self.alive.total())

    def _note(self, storage, name="other"):
        key, size = id(storage), storage.nbytes()
        if key not in self.known:
            self.known[key] = "other", 0, weakref.ref(storage, lambda _: self._forget(key))
        old, before, life = self.known[key]
        name = name if old == "other" else old
        if (name, size) != (old, before):
            self.alive[old, "measured"] -= before
            self.alive[name, "measured"] += size
            self.known[key] = name, size, life

    def _forget(self, key):
        name, size, _ = self.known.pop(key)
        self.alive[name, "measured"] -= size

    def __enter__(self):
        resize = torch.UntypedStorage.resize_  # no operator, so it is seen in this way

        def resize_and_note(storage, size):
            resize(storage, size)
            self._note(storage)

        torch.UntypedStorage.resize_ = resize_and_note
        return super().__enter__()

    def __exit__(self, *error):
        del torch.UntypedStorage.resize_
        super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.watch("gradients", self.gradients(), count=False)
        self.watch("other", tree_leaves((args, result)))
        kind = next((kind for kind in RING if function.namespace == "c10d" and kind in function.name()), None)
        if kind:
            name, passes = RING[kind]
            ranks = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject)).size()
            payload = max(sum(getattr(x, "nbytes", 0) for x in tree_leaves(arg)) for arg in args[:2])
            wire = payload * passes * (ranks - 1) / ranks if passes else payload
            self.seen.update({(name, "calls"): 1, (name, "payload"): payload, (name, "wire"): wire})
        return result

    def log(self, step, loss, grad_norm):
        """Print a step. Each .item() waits for the device: once a step, at its end."""
        self.result["losses"].append(loss.item())
        self.result["grad_norms"].append(grad_norm.item())
        ms, self.clock = 1e3 * (time.perf_counter() - self.clock), time.perf_counter()
        self.result["step_ms"] += [ms] if step > 1 else []  # the first is measured, not timed
        speed = f"{ms:.1f} ms | {self.config.batch * self.config.context / ms:.1f} k tok/s"
        at = f"step {step:>{len(str(self.config.steps))}}/{self.config.steps}"
        self.say(f"{at} | loss {loss:.4f} | grad norm {grad_norm:.3f} | {speed}")

    def close(self, state_dict, held, sent):
        """Print the most that a rank held and sent, beside {name: (formula, bytes)}; write the files."""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.seen)
        seen = functools.reduce(operator.or_, everyone)  # the larger of each two counts
        gpu = self.result["device"] == "cuda"
        self.result["peak_bytes"] = torch.cuda.max_memory_allocated() if gpu else seen["peak_bytes"]
        heading = f"{self.held:<18}{'formula':<18}{'':>12}{'measured':>12}"
        for part, rows, title in ("held", held, heading), ("sent", sent, self.sent):
            self.result[part], keys = {}, ("measured",) if rows is held else ("calls", "payload", "wire")
            if rows:
                self.say(title)
            for name, (formula, size) in rows.items():
                row = {key: round(seen[name, key]) for key in keys}
                self.result[part][name] = row | {"formula": size}
                self.say(f"  {name:<16}{formula:<18}{size / 1e6:>9.2f} MB{row[keys[-1]] / 1e6:>9.2f} MB")
        if self.config.trace:
            self.profiler.stop()
        if self.config.json and dist.get_rank() == 0:
            Path(self.config.json).write_text(json.dumps(self.result))
        if self.config.save and dist.get_rank() == 0:
            state_dict = {name: tensor.cpu() for name, tensor in state_dict.items()}
            torch.save(state_dict, self.config.save + ".tmp")
            os.replace(self.config.save + ".tmp", self.config.save)  # whole or not at all
        return self.result


# ==== end of the ledger ====


UNITS = {"block": (Block,), "layer": (nn.Linear, nn.LayerNorm)}


def parse(arguments=None):
    """The flags, from the command line if no arguments are given."""
    parser = flags()
    parser.add_argument("--unit", default="block", choices=UNITS, help="what is sent at once")
    parser.add_argument(
        "--overlap", default=True, action=argparse.BooleanOptionalAction, help="go on with backward meanwhile"
    )
    return parser.parse_args(arguments)


def formulas(zero, config):
    """What a rank should hold and send: two of {name: (formula, bytes)}."""
    params, ranks, w = list(zero.module.parameters()), zero.ranks, DTYPES[config.dtype].itemsize
    P, T = sum(p.numel() for p in params), len(params)
    s = 2 * max(w, 4) * (config.optim == "adamw") + 4 * (w == 2)  # two moments, a master
    sizes = [len(unit.weights) for unit in zero.units]  # with the padding
    alive = 2 + (dist.get_backend() == "gloo")
    held = {"parameters": (f"{w}P", w * P)}
    rest, *blocks = sizes
    alive_elements = sum(sizes) // ranks + rest + alive * max(blocks)
    held["gradients"] = (f"{w}P/N + {alive + 1} units", w * alive_elements)
    held["optimizer"] = (f"{s}P/N", round(s * P / ranks))
    wire, times = w * sum(sizes) * (ranks - 1) / ranks, f" x {config.accum}" * (config.accum > 1)
    sent = {"reduce-scatter": (f"{w}P(N-1)/N{times}", round(wire * config.accum))}
    sent["all-gather"] = (f"{w}P(N-1)/N", round(wire))
    sent["all-reduce"] = ("16(T+1)(N-1)/N", round(16 * (T + 1) * (ranks - 1) / ranks))
    return held, sent


def train(config):
    """Train as the flags say. Returns what --json writes."""
    device, text = set_up(config)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if config.batch % (ranks * config.accum):
        refuse(f"--batch {config.batch}: must be a multiple of {ranks} ranks x --accum {config.accum}")
    model = GPT(config).to(device, DTYPES[config.dtype])
    zero = ZeRO2(model, lambda submodule: isinstance(submodule, UNITS[config.unit]), config.overlap)
    optimizer = Optimizer(zero, OPTIMIZERS[config.optim], lr=config.lr, fused=True)
    ledger = Ledger("zero2", config, device, model, zero.gradients)
    for step in range(1, config.steps + 1):
        with ledger if step == 1 else nullcontext():
            loss = 0
            for batch in microbatches(config, text, step, device, rank, ranks):
                # Gradients add up over microbatches and we want their mean; each is a mean already.
                microloss = zero(*batch) / config.accum
                microloss.backward()
                loss += microloss.detach()
            grad_norm = zero.clip_grad_norm_(config.clip)
            optimizer.step()
        dist.all_reduce(loss)
        ledger.log(step, loss / ranks, grad_norm)
    ledger.watch("optimizer", optimizer.tensors())
    return ledger.close(optimizer.state_dict_of(model) if config.save else {}, *formulas(zero, config))


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
