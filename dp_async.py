"""Asynchronous data parallelism: a parameter server, and workers that need not wait for each other.

Idea
    Each worker pulls the weights from the server, computes the gradient of its share of a batch and pushes
    it, again and again (Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.1). In `asp`
    the server applies a push when it comes: no worker waits, but by then others may have changed the weights
    since the pull; their number is the push's staleness. In `ssp` a worker may begin K pushes ahead of the
    slowest (Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS
    2013, section 2). In `bsp` all wait for all and one update has the mean of N pushes, as on one device.

Holds
    Server: parameters 4P, AdamW 8P and the gradient that is being applied 4P (in bf16 2P, 12P, 2P).
    Worker: parameters 4P, gradients 4P (2P, 2P).

Talks
    worker 0 | pull | forward, backward | push | pull | forward, backward | push | ...
    worker 1 | pull | forward, backward, but slowly      | push | pull | ...
    The server serves one at a time: a pull copies the weights out, a push clips its gradient and steps.
    In bsp a worker begins when all have pushed; in ssp when no other is more than K pushes behind.

Costs
    Through the server, per global batch: N pulls and N pushes of 4P bytes each. In asp and ssp N updates,
    each from 1/N of the batch, where bsp makes one: the fair comparison is single.py with --batch B/N and
    N times the --steps.

Run
    python dp_async.py --mode asp --workers 4 --slow 0=4
    python dp_async.py --mode ssp --staleness 2 --workers 8 --size gpt2 --dtype bf16 --batch 64

Expect
    dp_async | 4 workers threads/cpu | 0.83 M parameters (P) | fp32 | batch 16 = 4 per worker x 1 x 4 workers
    step  1/20 | loss 5.5011 | grad norm 6.705 | 554.2 ms | 1.8 k tok/s
    ...
    step 20/20 | loss 2.9764 | grad norm 1.348 | 100.8 ms | 10.2 k tok/s
    held by each      formula                           measured
      parameters      4P                     3.34 MB     3.34 MB
      gradients       4P                     3.34 MB     3.34 MB
      optimizer       8P                     6.67 MB     6.67 MB
    through the server per step
      pull            4NP                   13.35 MB    13.35 MB
      push            4NP                   13.35 MB    13.35 MB
    alive at once: server 13.61 MB, each other 12.81 MB at most
    pushes: 80 sent, 80 applied in 80 updates
    327.8 sequences/s; the workers waited for 7.3% of their time
    staleness: updates between pull and push
        0      6 #############
        1     23 #################################################
        2     28 ############################################################
        3     17 ####################################
        4      1 ##
       11      2 ####
       13      2 ####
       15      1 ##

Left out
    A server in a process of its own, shards of the weights on several servers, compressed pushes, several
    shares between pull and push, learning rates that shrink with staleness. Buffers: each worker keeps its
    own, --save has those of the start.
"""

import argparse
import copy
import functools
import json
import math
import operator
import os
import re
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # torch.optim would load it later, and then it would hold on to our process group
import torch.nn as nn
import torch.nn.functional as F
from torch._C._profiler import _ExperimentalConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

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
    """A torch optimizer on fp32 masters of the bf16 parameters, and on the other parameters themselves."""

    def __init__(self, params, optimizer_class, **options):
        params = [p for p in params if p.requires_grad]
        self.masters = {p: p.detach().float() if p.dtype == torch.bfloat16 else p for p in params}
        self.groups = []
        for i in range(0, len(params), 16):  # so that 16 gradients at most are copied to fp32 at a time
            group = params[i : i + 16]
            self.groups.append((group, optimizer_class([self.masters[p] for p in group], **options)))

    @torch.no_grad()
    def step(self):
        for params, optimizer in self.groups:
            copied = [p for p in params if p is not self.masters[p] and p.grad is not None]
            for p in copied:
                self.masters[p].grad = p.grad.float()
            optimizer.step()
            for p in copied:
                p.copy_(self.masters[p])
                self.masters[p].grad = None

    def tensors(self):
        """What it holds beyond the model: masters, moments, step counts."""
        masters = [master for p, master in self.masters.items() if p is not master]
        return masters + tree_leaves([optimizer.state for _, optimizer in self.groups])

    def state_dict_of(self, model):
        """The model's, with masters in place of the parameters that have them."""
        tensors = model.state_dict(keep_vars=True)
        return {name: self.masters.get(tensor, tensor).detach() for name, tensor in tensors.items()}


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


# ==== ledger of threads: the same lines in dp_threads.py and dp_async.py ====
HERE = threading.local()  # .device: whose thread this is; .exchange: what it is fetching from another device


@contextmanager
def exchange(name):
    """Within it this thread may fetch from other devices. A ledger and a trace call that `name`."""
    HERE.exchange = name
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        HERE.exchange = None


class ThreadLedger(Ledger):
    """The ledger of devices in one process, a thread each; threads of a CPU play devices by the same rules.

    A storage is on the device whose thread made it. An operator that reads a storage of another device has
    fetched it, and does so in exchange() only, or the program would not run on real devices.
    """

    profile = functools.partial(
        torch.profiler.profile, experimental_config=_ExperimentalConfig(profile_all_threads=True)
    )
    # Threads enter it too, and nothing here resizes a storage, which a Ledger is on the watch for.
    __enter__, __exit__ = TorchDispatchMode.__enter__, TorchDispatchMode.__exit__

    def __init__(self, lesson, config, device, model, gradients, optimizer, threads):
        """gradients(): those that this thread may look at, as none of another can be freed meanwhile."""
        self.lock, self.freed, self.names = threading.Lock(), deque(), WeakIdKeyDictionary()
        self.optimizer = optimizer
        super().__init__(lesson, config, device, model, gradients, threads)

    def watch(self, name, tensors, count=True):
        """Count their storages as `name` for as long as they live, new ones on the device of this thread."""
        with self.lock:
            while self.freed:
                self._count(-1, *self.freed.popleft())
            for storage in {t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)}:
                if storage not in self.names:
                    device = getattr(HERE, "device", self.first_device)
                    self.names[storage] = ["other", device, storage.nbytes()]
                    self._count(1, *self.names[storage])
                    # It may be freed at any time and in any thread, so that only leaves a note.
                    weakref.finalize(storage, self.freed.append, self.names[storage]).atexit = False
                if self.names[storage][0] == "other":
                    self._count(-1, *self.names[storage])
                    self.names[storage][0] = name
                    self._count(1, *self.names[storage])

    def _count(self, sign, name, device, size):
        for part in (name,) if name == "optimizer" else (name, "the rest"):
            self.alive[part, device] += sign * size
            self.seen[part, device] = max(self.seen[part, device], self.alive[part, device])
            self.seen[part, "measured"] = max(self.seen[part, "measured"], self.alive[part, device])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        device, name = getattr(HERE, "device", self.first_device), getattr(HERE, "exchange", None)
        if device == self.first_device:
            self.watch("optimizer", self.optimizer.tensors())
        result = super().__torch_dispatch__(function, types, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        own = {x.untyped_storage() for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        with self.lock:
            for x in tensors:  # those that come back are views, or were written; the others were read
                storage = x.untyped_storage()
                if storage not in own and self.names.get(storage, (0, device))[1] != device:
                    sizes = {(name, "payload"): x.nbytes, (name, "wire"): x.nbytes}
                    self.seen.update({(name, "calls"): 1} | sizes)
        return result

    def close(self, state_dict, held, sent):
        """As a Ledger does; and the most that is alive at once on each device.

        The optimizer's states are born at the end of the step that was watched, but count all along.
        """
        devices = {device for name, device in self.alive}
        peaks = {device: self.seen["the rest", device] + self.seen["optimizer", device] for device in devices}
        self.result["peak_bytes_of_devices"] = dict(sorted(peaks.items()))
        self.seen["peak_bytes"] = max(peaks.values())
        assert not self.seen[None, "calls"], "an operator read a storage of another device outside exchange()"
        super().close(state_dict, held, sent)
        first = peaks.pop(self.first_device)
        others = f", each other {max(peaks.values()) / 1e6:.2f} MB at most" if peaks else ""
        self.say(f"alive at once: {self.first_device} {first / 1e6:.2f} MB{others}")
        return self.result


# ==== end of the ledger of threads ====


@contextmanager
def on(device):
    """Within it this thread works for another device."""
    before, HERE.device = getattr(HERE, "device", None), device
    try:
        yield
    finally:
        HERE.device = before


class Stopped(Exception):
    """Another worker failed, and this one cannot go on without it."""


class Server:
    """Holds the weights, hands them out and applies gradients, one worker at a time.

    module: on the server's device. optimizer: of its parameters; step() is called with their .grad set.
    mode: "bsp" waits for a push of each worker and applies their mean; "asp" applies each push at once; "ssp"
    too, but no worker begins more than `staleness` pushes ahead of the slowest. max_norm: each update's
    gradient is clipped to this global norm (0: not). A push after a pull at version v that is applied to
    version u has staleness u - v: at most (N-1)(2K+1) in ssp, as each of the others may be K + 1 pushes
    ahead when it is applied, and was K behind at worst when it was pulled.
    """

    def __init__(self, module, optimizer, workers, mode="asp", staleness=0, max_norm=0.0):
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.optimizer, self.max_norm, self.mode = optimizer, max_norm, mode
        self.ahead = {"bsp": 0, "asp": math.inf, "ssp": staleness}[mode]
        self.pushes_per_update = workers if mode == "bsp" else 1
        self.turn = threading.Condition()  # held by the one who pulls or pushes; told of every change
        self.clocks = dict.fromkeys(range(workers), 0)  # pushes of each worker that is still at work
        self.pulled, self.version, self.waiting, self.applied, self.stopped = {}, 0, 0, 0, False
        self.staleness, self.lead = Counter(), 0
        self.since, self.waited = 0.0, 0.0  # seconds that workers waited since then
        device = self.params[0].device  # its work is not to queue behind that of a worker on its device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def _turn_of(self, worker, ahead):
        """Wait until no other worker is being served, nor more than `ahead` pushes behind this one."""
        start = time.perf_counter()
        with self.turn:
            lead = lambda: self.clocks[worker] - min(self.clocks.values())  # noqa: E731
            self.turn.wait_for(lambda: self.stopped or lead() <= ahead)
            if self.stopped:
                raise Stopped
            self.waited += time.perf_counter() - max(start, self.since)
            self.lead = max(self.lead, lead())
            workers_stream = self.stream and torch.cuda.current_stream()
            with torch.cuda.stream(self.stream):  # of None: nothing
                if self.stream:
                    self.stream.wait_stream(workers_stream)
                yield
            if self.stream:
                workers_stream.wait_stream(self.stream)
            self.turn.notify_all()

    def admit(self, worker):
        """Wait until the worker may begin; then take a task: not before, as who waits here may need it."""
        with self._turn_of(worker, self.ahead):
            pass

    @torch.no_grad()
    def pull(self, worker, copies):
        """Copy the weights that learn into a worker's."""
        with self._turn_of(worker, self.ahead), exchange("pull"):
            for own, param in zip(copies, self.params):
                own.copy_(param, non_blocking=True)
            self.pulled[worker] = self.version

    @torch.no_grad()
    def push(self, worker, gradients, then=lambda norm: None):
        """Apply the gradients (None: unused) of what the worker pulled last; in its turn call then(norm).

        norm: of the update's gradient before clipping; None while the update waits for other pushes. After an
        error in here nobody is served any more: an update may be half done.
        """
        with self._turn_of(worker, math.inf), on("server"), self._fatal():
            with exchange("push"):
                for param, gradient in zip(self.params, gradients):
                    if gradient is not None:
                        # each is divided here, on its way: the update wants the mean of the pushes
                        share = gradient.to(param.device, non_blocking=True) / self.pushes_per_update
                        param.grad = share if param.grad is None else param.grad.add_(share)
            self.staleness[self.version - self.pulled[worker]] += 1
            self.clocks[worker] += 1
            self.waiting, norm = self.waiting + 1, None
            if self.waiting == self.pushes_per_update:
                norm = nn.utils.clip_grad_norm_(self.params, self.max_norm or math.inf)
                self.optimizer.step()
                for param in self.params:
                    param.grad = None
                self.version, self.applied = self.version + 1, self.applied + self.waiting
                self.waiting = 0
            then(norm)

    @contextmanager
    def _fatal(self):
        try:
            yield
        except BaseException:
            self.stopped = True
            self.turn.notify_all()
            raise

    def leave(self, worker, error=None):
        """The worker takes no further part. In bsp an error stops the others: they cannot do without it."""
        with self.turn:
            del self.clocks[worker]
            self.stopped = self.stopped or (error is not None and self.mode == "bsp")
            self.turn.notify_all()


class Worker:
    """A replica of the server's module: pull(), then forward and backward by the caller, then push().

    slow: a straggler takes so many times as long from pull to push (but for the first time, which is no
    measure: libraries warm up).
    """

    def __init__(self, number, server, module, device, slow=1.0):
        self.number, self.server, self.device, self.slow, self.sent = number, server, device, slow, 0
        self.name = f"worker {number}"
        self.module = copy.deepcopy(module).to(device)
        self.params = [p for p in self.module.parameters() if p.requires_grad]

    def pull(self):
        self.server.pull(self.number, self.params)
        self.start = time.perf_counter()

    def push(self, then=lambda norm: None):
        if self.sent:
            time.sleep((self.slow - 1) * (time.perf_counter() - self.start))
        self.sent += 1
        self.server.push(self.number, [p.grad for p in self.params], then)
        self.module.zero_grad()


class Tasks:
    """The N shares of each step's batch, each to be done once: share r by worker r, if `shared` by anyone."""

    def __init__(self, steps, workers, shared):
        self.shared, self.taken, self.change = shared, set(), threading.Condition()
        self.open = deque((step, share) for step in range(1, steps + 1) for share in range(workers))

    def _first(self, worker):
        return next((task for task in self.open if self.shared or task[1] == worker), None)

    def take(self, worker):
        """The next (step, share), or None when there will be no more for this worker."""
        with self.change:
            self.change.wait_for(lambda: self._first(worker) or not self.taken)
            task = self._first(worker)
            if task:
                self.open.remove(task)
                self.taken.add(task)
            return task

    def give_back(self, task, done):
        """What is not done is open again, for another worker."""
        with self.change:
            self.taken.remove(task)
            if not done:
                self.open.appendleft(task)
            self.change.notify_all()


def work(worker, tasks, function):
    """In the worker's thread: function(worker, step, share) for one task after another. Returns its error."""
    HERE.device, server, task = worker.name, worker.server, None
    try:
        with torch.cuda.device(worker.device) if worker.device.type == "cuda" else nullcontext():
            torch.autograd.set_multithreading_enabled(False)  # backward in this thread: the ledger knows it
            server.admit(worker.number)
            while task := tasks.take(worker.number):
                function(worker, *task)
                tasks.give_back(task, done=True)
                task = None
                server.admit(worker.number)
    except BaseException as error:
        if task:
            error.add_note(f"in {worker.name}, step {task[0]}, share {task[1]}")
            tasks.give_back(task, done=False)
        server.leave(worker.number, error)
        if not server.stopped:
            print(f"{worker.name} failed, the others go on:", file=sys.stderr)
            traceback.print_exception(error)
        return error
    server.leave(worker.number)
    return None


def run_workers(workers, function, steps):
    """function(worker, step, share) once for each step and share 0 to N-1, in a thread for each worker.

    In bsp a worker has the share of its number, otherwise whoever is free takes the next one, and that of a
    worker that fails goes to another. Returns {number: error} of those that failed; raises RuntimeError if
    there was no going on without them: in bsp, or when all failed.
    """
    mode, cores = workers[0].server.mode, max(1, torch.get_num_threads() // len(workers))
    tasks = Tasks(steps, len(workers), shared=mode != "bsp")
    with ThreadPoolExecutor(len(workers), "worker", lambda: torch.set_num_threads(cores)) as threads:
        try:
            errors = dict(enumerate(threads.map(lambda worker: work(worker, tasks, function), workers)))
        except BaseException:  # Ctrl-C: no more tasks
            tasks.open.clear()
            raise
    failed = {n: error for n, error in errors.items() if error and not isinstance(error, Stopped)}
    if tasks.open:
        n, error = next(iter(failed.items()))
        why = "bsp needs all workers" if mode == "bsp" else "no worker is left"
        why = "an update may be half done" if mode != "bsp" and workers[0].server.stopped else why
        raise RuntimeError(f"worker {n} failed, and {why}: {error!r}") from error
    return failed


class ServerLedger(ThreadLedger):
    one, first_device = "worker", "server"
    held, sent = "held by each", "through the server per step"

    def __init__(self, server, *arguments):
        self.server, self.landed, self.count, self.watched = server, [], 0, 0
        super().__init__(*arguments)

    def land(self, step, loss, norm):
        """A push. N of them are a line: a batch in size, though its shares may be of several steps."""
        N, self.count = self.config.workers, self.count + 1
        self.landed.append((loss, norm))
        if len(self.landed) == N:
            losses, norms = zip(*self.landed)
            norms = torch.stack([norm for norm in norms if norm is not None])
            self.log(self.count // N, torch.tensor(losses, dtype=torch.double).mean(), norms.mean())
            self.landed.clear()
        if step == 1:
            self.watched += 1
            if self.watched == N:  # from here on none is slowed by the ledger
                self.server.since, self.server.waited, self.before = time.perf_counter(), 0.0, self.count

    def add_outcome(self, workers, failed):
        """To the result: pushes, how stale they were, how fast they came after those of the first step."""
        server, pushes = self.server, self.count - self.before
        seconds = time.perf_counter() - server.since
        self.result |= {
            "mode": server.mode,
            "pushes": {"sent": sum(worker.sent for worker in workers), "applied": server.applied},
            "updates": server.version,
            "staleness": dict(sorted(server.staleness.items())),
            "most_ahead": server.lead,
            "waited": server.waited / seconds / len(workers),
            "sequences_per_s": self.config.batch / len(workers) * pushes / seconds,
            "failed": {number: repr(error) for number, error in failed.items()},
        }

    def close(self, state_dict, held, sent):
        result, bound = super().close(state_dict, held, sent), ""
        pushes, counts = result["pushes"], result["staleness"]
        self.say(f"pushes: {pushes['sent']} sent, {pushes['applied']} applied in {result['updates']} updates")
        speed = f"{result['sequences_per_s']:.1f} sequences/s"
        if self.count > self.before:
            self.say(f"{speed}; the workers waited for {result['waited']:.1%} of their time")
        if result["mode"] == "ssp":
            bound = f", at most {(self.config.workers - 1) * (2 * self.config.staleness + 1)}"
        self.say(f"staleness: updates between pull and push{bound}")
        for staleness, count in counts.items():
            self.say(f"  {staleness:>3}{count:>7} {'#' * round(60 * count / max(counts.values()))}")
        return result


def parse(arguments=None):
    """The flags, from the command line if no arguments are given."""
    parser = flags()
    parser.add_argument("--mode", default="bsp", choices=("bsp", "asp", "ssp"), help="who waits for whom")
    parser.add_argument("--workers", type=int, default=2, help="replicas that compute, a thread each")
    parser.add_argument("--staleness", type=int, default=2, help="ssp: pushes that a worker may begin ahead")
    parser.add_argument("--slow", action="append", default=[], help="R=F: worker R takes F times as long")
    return parser.parse_args(arguments)


def formulas(config, P):
    """What the server or a worker holds and the server sends and gets in a step: {name: (formula, bytes)}."""
    w, N = DTYPES[config.dtype].itemsize, config.workers
    s = 2 * max(w, 4) * (config.optim == "adamw") + 4 * (w == 2)  # two moments, a master
    held = {"parameters": (f"{w}P", w * P), "gradients": (f"{w}P", w * P), "optimizer": (f"{s}P", s * P)}
    return held, {name: (f"{w}NP", w * N * P) for name in ("pull", "push")}


def slowness(config):
    """How many times as long each worker takes, as --slow has it."""
    N = config.workers
    slow = [1.0] * N
    for each in config.slow:
        match = re.fullmatch(r"(\d+)=(\d+\.?\d*)", each)
        number, times = match.groups() if match else (N, 0)
        if not (int(number) < N and 1 <= float(times) <= 1000):
            refuse(f"--slow {each}: must be R=F, a worker R of 0 to {N - 1} and F from 1 to 1000")
        slow[int(number)] = float(times)
    return slow


def train(config):
    """Train as the flags say. Returns what --json writes."""
    device, text = set_up(config)
    N, gpus = config.workers, torch.cuda.device_count() if device.type == "cuda" else 0
    if dist.get_world_size() > 1:
        refuse("this is one process: start it without torchrun, with --workers")
    if config.batch % (N * config.accum):
        refuse(f"--batch {config.batch}: must be a multiple of {N} --workers x --accum {config.accum}")
    slow = slowness(config)
    model = GPT(config).to(device, DTYPES[config.dtype])
    optimizer = Optimizer(model.parameters(), OPTIMIZERS[config.optim], lr=config.lr, fused=True)
    server = Server(model, optimizer, N, config.mode, config.staleness, config.clip)
    devices = [torch.device("cuda", r % gpus) if gpus else device for r in range(N)]
    workers = [Worker(r, server, model, devices[r], slow[r]) for r in range(N)]
    owners = {"server": server} | {worker.name: worker for worker in workers}
    gradients = lambda: [p.grad for p in owners[HERE.device].params]  # noqa: E731
    ledger = ServerLedger(server, "dp_async", config, device, model, gradients, optimizer, N)
    for worker in workers:
        with on(worker.name):
            ledger.watch("parameters", worker.params)

    def train_share(worker, step, share):
        with ledger if step == 1 else nullcontext():
            loss = 0
            worker.pull()
            for batch in microbatches(config, text, step, worker.device, share, N):
                # Gradients add up over microbatches and we want their mean; each is a mean already.
                microloss = worker.module(*batch) / config.accum
                microloss.backward()
                loss += microloss.detach()
            loss = loss.item()  # wait for the device here, not while others wait for the server
            worker.push(lambda norm: ledger.land(step, loss, norm))

    failed = run_workers(workers, train_share, config.steps)
    ledger.watch("optimizer", optimizer.tensors())
    ledger.add_outcome(workers, failed)
    return ledger.close(optimizer.state_dict_of(model), *formulas(config, ledger.result["n_params"]))


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
