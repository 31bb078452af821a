"""DataParallel: one process holds a replica of the model per device and runs them in threads.

Idea
    In every step each of N replicas fetches the newest weights and its share of the batch from the first
    device and computes, all at once; the first device gathers their outputs and has the loss of the whole
    batch; the replicas fetch that loss's gradients, and what their backward returns is summed up on the first.
    So the script stays that of one device (torch.nn.DataParallel; PyTorch Distributed, arXiv 2006.15704,
    section 2.2).

Holds
    Every device, from forward to the end of backward: parameters 4P, gradients 4P bytes (in bf16 2P, 2P) and
    the activations of its share. Device 0 always, and beside that: AdamW 8P (12P), and while they are used the
    outputs of the whole batch, their loss and its gradients; with accumulation also the sum of the gradients.

Talks
    device 0 | 1 inputs  | forward | 3 outputs | loss | 4 loss    | backward | 5 gradients | clip,
             |     |     |         |     ^     |      |     |     |          |     ^       | step
    device r | 2 weights | forward |     |     |      | gradients | backward |     |       |
    Copies between device 0 and each other, one of the five after the other. (If the inputs have gradients,
    these come back in a sixth.)

Costs
    Through device 0, in each of k microbatches of b sequences of T, if the outputs are V numbers each:
    inputs 8bT(N-1)/N, weights 4P(N-1), outputs and their gradients 4bTV(N-1)/N each, gradients 4P(N-1) bytes.
    It grows with N, where a rank of ddp.py sends 8P(N-1)/N a step. One Python: its lock (GIL) lets one thread
    at a time launch operators; and while device 0 gathers, sums, clips and steps, the others idle.

Run
    python dp_threads.py --replicas 4
    python dp_threads.py --replicas 8 --size gpt2 --dtype bf16 --batch 64

Expect
    dp_threads | 4 replicas threads/cpu | 0.83 M parameters (P) | fp32 | batch 16 = 4 per replica x 1 x 4 replicas
    step  1/20 | loss 5.5011 | grad norm 6.577 | 817.5 ms | 1.3 k tok/s
    ...
    step 20/20 | loss 3.0858 | grad norm 1.224 | 120.4 ms | 8.5 k tok/s
    held per device   formula                           measured
      parameters      4P                     3.34 MB     3.34 MB
      gradients       4P                     3.34 MB     3.34 MB
      optimizer       8P                     6.67 MB     6.67 MB
      outputs         4bTV(N+1)/N            1.31 MB     1.31 MB
    through device 0 per step
      scatter inputs  8BT(N-1)/N             0.01 MB     0.01 MB
      replicate       4P(N-1)               10.01 MB    10.01 MB
      gather outputs  4BTV(N-1)/N            0.79 MB     0.79 MB
      scatter grads   4BTV(N-1)/N            0.79 MB     0.79 MB
      reduce grads    4P(N-1)               10.01 MB    10.01 MB
    alive at once: device 0 21.85 MB, each other 13.07 MB at most

Left out
    Weights sent as one flat message, sums in a tree in place of a star around device 0, double backward,
    saved-tensor hooks of the caller, pickling or copying a DP (copy dp.module), dropout that can be repeated
    (replicas on one device draw from one generator, in any order).
"""  # noqa: E501

import argparse
import functools
import json
import math
import operator
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # torch.optim would load it later, and then it would hold on to our process group
import torch.nn as nn
import torch.nn.functional as F
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
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


def is_tensor(x):
    return isinstance(x, torch.Tensor)


def scatter(leaves, count):
    """At most `count` shares of the leaves: tensors are split along dim 0, all else goes to everyone."""
    rows = {len(x) for x in leaves if is_tensor(x) and x.dim()}
    if len(rows) != 1 or rows == {0}:
        raise ValueError(f"inputs need tensors of one length in dim 0, which is split; not {sorted(rows)}")
    count = len(torch.empty(rows.pop(), device="meta").chunk(count))

    def split(x):
        if not is_tensor(x) or not x.dim():
            return [x] * count
        return [piece.detach().requires_grad_(x.requires_grad) for piece in x.chunk(count)]

    return list(zip(*map(split, leaves)))


def gather(pieces, device):
    """One tensor on the device: the pieces one after another along dim 0, numbers () as rows."""
    rows = [x.detach().reshape(x.shape or (1,)) for x in pieces]
    if len({(x.shape[1:], x.dtype) for x in rows}) > 1:
        raise ValueError(
            f"outputs of replicas must differ in dim 0 only, not {[tuple(x.shape) for x in pieces]}"
        )
    whole = rows[0].new_empty(sum(map(len, rows)), *rows[0].shape[1:], device=device)
    for part, piece in zip(whole.split([len(x) for x in rows]), rows):
        part.copy_(piece, non_blocking=True)
    return whole


def reduce(copies, device):
    """The sum of the copies' .grad on the device; None if no copy has one."""
    total = None
    for each in copies:
        if each.grad is not None:
            gradient = each.grad.to(device, non_blocking=True)
            # No division: the loss was already one mean over the whole batch.
            total = gradient if total is None else total.add_(gradient)
    return total


def copy_modules(module, copies):
    """The tree of modules once more, with copies[t] for each parameter or buffer t, and all else shared."""
    twin = module.__new__(type(module))
    twin.__dict__ = module.__dict__.copy()
    twin._parameters = {name: copies.get(p, p) for name, p in module._parameters.items()}
    twin._buffers = {name: copies.get(b, b) for name, b in module._buffers.items()}
    children = module._modules.items()
    twin._modules = {
        name: child if child is None else copy_modules(child, copies) for name, child in children
    }
    return twin


class Replica:
    """What one device does in one call of DP: a forward and its backward, both in that device's thread."""

    def __init__(self, number, device):
        self.number, self.device, self.name, self.copies = number, device, f"device {number}", {}

    def _fetch(self, tensor):
        """A leaf on this device with the tensor's values: a copy, or on the first device a view."""
        leaf = tensor.detach().to(self.device, copy=self.number > 0, non_blocking=True)
        return leaf.requires_grad_(tensor.requires_grad)

    def forward(self, module, inputs, spec):
        """The leaves of the module's outputs for a share of the inputs."""
        with exchange("scatter inputs"):
            self.inputs = [self._fetch(x) if is_tensor(x) else x for x in inputs]
        with exchange("replicate"):
            self.copies = {t: self._fetch(t) for t in (*module.parameters(), *module.buffers())}
        args, kwargs = tree_unflatten(self.inputs, spec)
        outputs, self.spec = tree_flatten(copy_modules(module, self.copies)(*args, **kwargs))
        # Enough to start backward at; the values may go when they have been gathered.
        self.shapes = [x.shape for x in outputs if is_tensor(x)]
        self.roots = [x.requires_grad and get_gradient_edge(x) for x in outputs if is_tensor(x)]
        return outputs

    def backward(self, gradients):
        """From the gradients of its outputs, or None, to the .grad of copies and inputs."""
        with exchange("scatter grads"):
            gradients = [x if x is None else self._fetch(x) for x in gradients]
        pairs = [pair for pair in zip(self.roots, gradients) if pair[0] and pair[1] is not None]
        self.roots = None
        if pairs:
            torch.autograd.backward(*zip(*pairs))


class Call:
    """One call of DP: the five exchanges between the first device and the others."""

    def __init__(self, dp, *inputs):
        self.dp, self.learning = dp, torch.is_grad_enabled()
        self.inputs, self.spec = tree_flatten(inputs)
        self.learned = [i for i, x in enumerate(self.inputs) if is_tensor(x) and x.requires_grad]
        self.params = [p for p in dp.module.parameters() if p.requires_grad]

    def forward(self):
        """The tensors among the outputs, whole, on the first device."""
        shares = scatter(self.inputs, len(self.dp.devices))
        self.replicas = [Replica(r, self.dp.devices[r]) for r in range(len(shares))]
        self.dp.replicas.update(self.replicas)
        tasks = [(r.forward, self.dp.module, share, self.spec) for r, share in zip(self.replicas, shares)]
        outputs = self.dp.in_threads(tasks, self.learning)
        if len({str(replica.spec) for replica in self.replicas}) > 1:
            raise ValueError(
                f"outputs of replicas must have one structure, not {[r.spec for r in self.replicas]}"
            )
        outputs = zip(*outputs)  # of each output, what every replica has
        with exchange("gather outputs"):
            self.outputs = [gather(x, self.dp.devices[0]) if is_tensor(x[0]) else x[0] for x in outputs]
        return tuple(filter(is_tensor, self.outputs))

    def constant(self, i):
        """Whether the i-th tensor among the outputs has no gradient."""
        return not any(replica.roots[i] for replica in self.replicas)

    def backward(self, gradients):
        """Gradients of the inputs and parameters that learn, from those of the outputs; each may be None."""
        replicas, self.replicas = self.replicas, None
        if replicas is None:
            raise RuntimeError("backward() went through this call of DP before, and freed what it needs")
        shares = [[] for _ in replicas]
        for i, gradient in enumerate(gradients):
            shapes = [replica.shapes[i] for replica in replicas]
            rows = [math.prod(shape[:1]) for shape in shapes]
            pieces = [None] * len(rows) if gradient is None else gradient.split(rows)
            for share, piece, shape in zip(shares, pieces, shapes):
                share.append(piece if piece is None else piece.reshape(shape))
        self.dp.in_threads([(r.backward, share) for r, share in zip(replicas, shares)], True)
        first, answers = self.dp.devices[0], []
        with exchange("gather input grads"):
            for i in self.learned:
                pieces = [replica.inputs[i] for replica in replicas]
                used = any(x.grad is not None for x in pieces)
                pieces = [torch.zeros_like(x) if x.grad is None else x.grad for x in pieces]
                answers.append(gather(pieces, first) if used else None)
        with exchange("reduce grads"):
            answers += [reduce([replica.copies[p] for replica in replicas], first) for p in self.params]
        return answers


class Node(torch.autograd.Function):
    """A Call as a node of the caller's graph."""

    @staticmethod
    def forward(ctx, call, *learned):
        ctx.call, outputs = call, call.forward()
        ctx.mark_non_differentiable(*(x for i, x in enumerate(outputs) if call.constant(i)))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, *ctx.call.backward(gradients)


def start_thread(device, cores):
    HERE.device = device
    torch.set_num_threads(cores)


class DP(nn.Module):
    """Computes `module` by replicas of it on several devices, each with a share of the batch and a thread.

    module: with its tensors on devices[0]. Its forward must find parameters by their registered names and not
    change its inputs. What it assigns to attributes is lost; buffers that it changes in place keep what the
    first replica did. devices: one per replica; several may be the same. threads: False runs the replicas one
    after the other.

    Called with tensors (B, ...), which are split along dim 0, and anything else, which goes to all. Returns
    what the module does, with tensors (B, ...) whole on devices[0] and numbers () as (N,), one per replica;
    other outputs are the first replica's. Where one loss is wanted, compute it from what comes back: a mean
    of the replicas' means is not that of the batch if their shares differ. An error in a replica is raised
    here, when no replica runs any more. (torch.nn.DataParallel; arXiv 2006.15704, section 2.2)
    """

    def __init__(self, module, devices, threads=True):
        super().__init__()
        self.module, self.parallel = module, threads
        self.devices = [torch.empty(0, device=device).device for device in devices]
        elsewhere = {t.device for t in (*module.parameters(), *module.buffers())} - {self.devices[0]}
        if elsewhere:
            raise ValueError(f"the module must be on {self.devices[0]}, not on {sorted(map(str, elsewhere))}")
        cores = max(1, torch.get_num_threads() // len(devices)) if threads else torch.get_num_threads()
        names = [f"device {r}" for r in range(len(devices))]
        self.threads = [ThreadPoolExecutor(1, name, start_thread, (name, cores)) for name in names]
        self.replicas = weakref.WeakSet()  # those that have not yet been through backward

    def forward(self, *args, **kwargs):
        call = Call(self, args, kwargs)
        tensors = iter(Node.apply(call, *(call.inputs[i] for i in call.learned), *call.params))
        outputs = [next(tensors) if is_tensor(x) else x for x in call.outputs]
        call.inputs = call.outputs = None  # the graph holds the call until backward, but not these
        return tree_unflatten(outputs, call.replicas[0].spec)

    def gradients(self):
        """The .grad of this thread's replicas; in the caller's thread of all of them, and of the module."""
        device = getattr(HERE, "device", None)
        copies = (replica.copies.values() for replica in self.replicas if device in (None, replica.name))
        return [t.grad for t in chain(() if device else self.module.parameters(), *copies)]

    def in_threads(self, tasks, learning):
        """[function(*arguments) for each task], each in the thread of the replica that has this number."""
        kind, modes = self.devices[0].type, _get_current_dispatch_mode_stack()
        mixed = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}

        def run(stream, function, *arguments):
            with ExitStack() as stack:  # a thread starts without the modes and streams of its caller
                for mode in modes:
                    stack.enter_context(mode)
                stack.enter_context(torch.cuda.stream(stream))  # of None: nothing
                stack.enter_context(torch.autocast(kind, **mixed))
                stack.enter_context(torch.set_grad_enabled(learning))
                # All of its backward in this thread: the device's own one may be waiting for it.
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                return function(*arguments)

        futures = []
        for thread, device, task in zip(self.threads, self.devices, tasks):
            stream = torch.cuda.current_stream(device) if kind == "cuda" else None
            futures.append(thread.submit(run, stream, *task))
            if not self.parallel:
                wait(futures)
        try:
            for r, future in enumerate(futures):
                if future.exception():  # waits for each: none still runs when the caller hears of an error
                    future.exception().add_note(
                        f"in replica {r} of {len(self.devices)}, on {self.devices[r]}"
                    )
            return [future.result() for future in futures]
        finally:
            del futures  # or an error would hold them, and they it, with all that its replicas had


def parse(arguments=None):
    """The flags, from the command line if no arguments are given."""
    parser = flags()
    parser.add_argument(
        "--replicas", type=int, help="of the model, a thread each (none: one per GPU, else 2)"
    )
    parser.add_argument(
        "--threads",
        default=True,
        action=argparse.BooleanOptionalAction,
        help="--no-threads: one replica after the other",
    )
    return parser.parse_args(arguments)


class ReplicaLedger(ThreadLedger):
    one, first_device = "replica", "device 0"
    held, sent = "held per device", "through device 0 per step"

    def watch(self, name, tensors, count=True):
        new = {"replicate": "parameters", "gather outputs": "outputs"}.get(
            getattr(HERE, "exchange", None), name
        )
        super().watch(new if name == "other" else name, tensors)


def formulas(config, P, N):
    """What a device holds, and what goes through device 0 in a step: {name: (formula, bytes)}, twice."""
    w = DTYPES[config.dtype].itemsize
    s = 2 * max(w, 4) * (config.optim == "adamw") + 4 * (w == 2)  # two moments, a master
    g, k = w * (1 + (config.accum > 1)), config.accum  # a microbatch's gradients beside the step's
    held = {"parameters": (f"{w}P", w * P), "gradients": (f"{g}P", g * P), "optimizer": (f"{s}P", s * P)}
    tokens = config.batch * config.context // k
    held["outputs"] = (f"{w}bTV(N+1)/N", w * tokens * config.vocab * (N + 1) // N)
    inputs = config.batch * config.context * (N - 1) // N
    each, count = w * P * (N - 1) * k, f"{w}{'k' * (k > 1)}P(N-1)"
    sent = {"scatter inputs": ("8BT(N-1)/N", 8 * inputs), "replicate": (count, each)}
    sent |= {
        name: (f"{w}BTV(N-1)/N", w * inputs * config.vocab) for name in ("gather outputs", "scatter grads")
    }
    return held, sent | {"reduce grads": (count, each)}


def train(config):
    """Train as the flags say. Returns what --json writes."""
    device, text = set_up(config)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    N = config.replicas = config.replicas or gpus or 2
    if dist.get_world_size() > 1:
        refuse("this is one process: start it without torchrun, with --replicas")
    if config.batch % (N * config.accum):
        refuse(f"--batch {config.batch}: must be a multiple of {N} --replicas x --accum {config.accum}")
    model = GPT(config).to(device, DTYPES[config.dtype])
    dp = DP(model, [torch.device("cuda", r % gpus) if gpus else device for r in range(N)], config.threads)
    optimizer = Optimizer(model.parameters(), OPTIMIZERS[config.optim], lr=config.lr, fused=True)
    ledger = ReplicaLedger("dp_threads", config, device, model, dp.gradients, optimizer, N)
    for step in range(1, config.steps + 1):
        with ledger if step == 1 else nullcontext():
            loss = 0
            for inputs, targets in microbatches(config, text, step, device):
                # Gradients add up over microbatches and we want their mean; each is a mean already.
                microloss = mean_loss(dp(inputs), targets) / config.accum
                microloss.backward()
                loss += microloss.detach()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
            optimizer.step()
            model.zero_grad()
        ledger.log(step, loss, grad_norm)
    ledger.watch("optimizer", optimizer.tensors())
    return ledger.close(optimizer.state_dict_of(model), *formulas(config, ledger.result["n_params"], N))


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
