"""The plain training loop on one device, which every other lesson distributes.

Idea
    Draw a batch, add up the gradients of its microbatches, clip them, let the optimizer step. The other
    lessons draw the same batches and print the same losses; they only divide the work. In bf16 the optimizer
    steps fp32 masters of the weights and rounds them back (ZeRO, arXiv 1910.02054, section 3.1).

Holds
    P parameters in   fp32   bf16                      fp64
    parameters        4P     2P                        8P    bytes
    gradients         4P     2P                        8P
    AdamW             8P     12P (master, 2 moments)   16P

Talks
    To nobody: forward, backward, forward, backward, ..., clip, step.

Costs
    All of the memory and all of the time, which the other lessons divide by N.

Run
    python single.py
    python single.py --size gpt2 --dtype bf16 --batch 64 --accum 8 --data my_text/

Expect
    single | 1 rank gloo/cpu | 0.83 M parameters (P) | fp32 | batch 16 = 16 per rank x 1 x 1 rank
    step  1/20 | loss 5.5011 | grad norm 6.577 | 333.7 ms | 3.1 k tok/s
    ...
    step 20/20 | loss 3.0858 | grad norm 1.224 | 131.4 ms | 7.8 k tok/s
    held per rank     formula                           measured
      parameters      4P                     3.34 MB     3.34 MB
      gradients       4P                     3.34 MB     3.34 MB
      optimizer       8P                     6.67 MB     6.67 MB

Left out
    A learning-rate schedule, dropout, evaluation, resuming.
"""

import argparse
import functools
import json
import math
import operator
import os
import sys
import time
import weakref
from collections import Counter
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


def parse(arguments=None):
    """The flags, from the command line if no arguments are given."""
    return flags().parse_args(arguments)


def train(config):
    """Train as the flags say. Returns what --json writes."""
    device, text = set_up(config)
    if dist.get_world_size() > 1:
        refuse("this is the loop of one process: start it without torchrun, or start ddp.py")
    if config.batch % config.accum:
        refuse(f"--batch {config.batch}: must be a multiple of --accum {config.accum}")
    model = GPT(config).to(device, DTYPES[config.dtype])
    optimizer = Optimizer(model.parameters(), OPTIMIZERS[config.optim], lr=config.lr, fused=True)
    ledger = Ledger("single", config, device, model)
    for step in range(1, config.steps + 1):
        with ledger if step == 1 else nullcontext():
            loss = 0
            for batch in microbatches(config, text, step, device):
                # Gradients add up over microbatches and we want their mean; each is a mean already.
                microloss = model(*batch) / config.accum
                microloss.backward()
                loss += microloss.detach()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
            optimizer.step()
            model.zero_grad()
        ledger.log(step, loss, grad_norm)
    ledger.watch("optimizer", optimizer.tensors())
    P, w = ledger.result["n_params"], DTYPES[config.dtype].itemsize
    s = 2 * max(w, 4) * (config.optim == "adamw") + 4 * (w == 2)  # two moments, a master
    held = {"parameters": (f"{w}P", w * P), "gradients": (f"{w}P", w * P), "optimizer": (f"{s}P", s * P)}
    return ledger.close(optimizer.state_dict_of(model), held, {})


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
