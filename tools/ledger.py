"""What a lesson holds and sends, watched from outside, beside the formulas in its docstring.

    torchrun --nproc_per_node=4 tools/ledger.py zero3.py --size small --dtype bf16
    torchrun --nproc_per_node=2 tools/ledger.py ddp.py --steps 3 --json ddp.json --trace traces/
    python tools/ledger.py --ranks 1024 --rank 777 zero3.py --size 7.5b --dtype bf16

Runs the unmodified lesson and watches every operator of its second step, when the optimizer has its states.

held: the most that any rank had alive at once, each line at its own peak. Parameters are the leaves that
require a gradient, gradients their .grad, the optimizer's are in its state, and what a copy or a collective
makes of one of these. (Gradients may exceed a formula by one parameter's, which autograd just computed.)
Activations are what else the step made, in floating point, and holds when a backward begins.
sent: what a rank of a ring sends in the collectives, for tensors of S bytes: 2S(N-1)/N in an all-reduce,
S(N-1)/N in a reduce-scatter, all-gather or all-to-all, S in a send; none for a single number. An all-to-all
that does the work of a reduce-scatter, over gloo, is listed as one.

With --ranks, one of so many ranks is simulated, without the others or data: shapes and bytes are the code's.
--trace writes a Chrome trace of each rank's third step. A formula is a line `name  formula` in the docstring:
P parameters, T in the largest tensor, U in a block, E in no block; L layers, a heads, h width, s context, v
vocabulary; N ranks, k microbatches of b sequences each; w bytes of a weight, m of a shard (fp32 at least), c
of an fp32 copy (bf16: 4, else 0), K of a parameter's optimizer state; f units gathered ahead; g 1 over gloo.
"""

import argparse
import gc
import importlib.util
import json
import math
import os
import re
import sys
import threading
import time
import weakref
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

# {what the operator's name contains: (collective, passes round the ring)}
COLLECTIVES = {"allreduce": ("all-reduce", 2), "reduce_scatter": ("reduce-scatter", 1)}
COLLECTIVES |= {"allgather": ("all-gather", 1), "alltoall": ("all-to-all", 1), "send": ("send", 0)}
HELD = ("parameters", "gradients", "optimizer", "activations")
COPIES = ("aten::add_", "aten::copy_", "aten::_to_copy", "aten::clone")


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def owner_of(tensor):
    """The thread that made its storage. None: the main thread."""
    return getattr(tensor.untyped_storage(), "owner", None)


def noted(function, note):
    """The function, which first calls note() with its arguments."""

    def call(*args, **kwargs):
        note(*args, **kwargs)
        return function(*args, **kwargs)

    return call


class Watch(TorchDispatchMode):
    """From start() to stop() follows every storage until it is freed, and counts what is sent.

    A storage is its thread's that made it, the thread "device 0" and all that lessons do not start being one.
    """

    on = False

    def __init__(self):
        super().__init__()
        self.here = threading.local()
        self.lock = threading.RLock()
        self.alive = {}  # id of a storage: (its number, bytes, weak reference)
        self.owners = []  # of each number the thread that made it
        self.events = []  # (number, bytes that it grew by)
        self.kinds = {}  # number: kind
        self.same = []  # of each number another one of the same kind, or itself
        self.sent = Counter()
        self.patches = ExitStack()
        self.thread_run = threading.Thread.run

    def note(self, tensor, kind=None):
        """The number of a tensor's storage."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.alive:
            self.alive[key] = (len(self.same), 0, weakref.ref(storage, lambda _: self.forget(key)))
            self.same.append(len(self.same))
            self.owners.append(owner_of(tensor))
            kind = kind or (None if tensor.is_floating_point() else "other")
        self.resize(key, storage.nbytes())
        number, _, _ = self.alive[key]
        if kind:
            self.kinds.setdefault(number, kind)
        return number

    def resize(self, key, size):
        number, before, reference = self.alive.get(key, (None, size, None))
        if size != before:
            self.events.append((number, size - before))
            self.alive[key] = (number, size, reference)

    def forget(self, key):
        with self.lock:
            self.resize(key, 0)
            del self.alive[key]

    def run_thread(self, thread):
        """In place of Thread.run(): the same, watched."""
        self.here.name = None if thread.name.startswith("device 0") else thread.name
        _push_mode(self)
        self.thread_run(thread)

    def start(self):
        gc.collect()
        self.leaves = []
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                self.note(thing)
                if thing.is_leaf and thing.requires_grad:
                    self.leaves.append(thing)
            elif issubclass(type(thing), torch.optim.Optimizer):
                for tensor in tensors_in(list(thing.state.values())):
                    self.note(tensor, "optimizer")
        for leaf in self.leaves:
            self.note(leaf, "parameters")
        self.before = len(self.same)
        for where, name, note in (  # which are no operators
            (torch.UntypedStorage, "resize_", lambda storage, size: self.resize(id(storage), size)),
            (torch.autograd, "backward", lambda *_, **__: self.events.append(("backward", 0))),
            (torch.autograd, "grad", lambda *_, **__: self.events.append(("backward", 0))),
        ):
            self.patches.enter_context(mock.patch.object(where, name, noted(getattr(where, name), note)))
        self.on = True

    def stop(self):
        self.on = False
        self.patches.close()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace != "prim":  # a question about a fake tensor
            with self.lock:
                self.see(function, tensors_in((args, kwargs)), tensors_in(result), args)
        return result

    def see(self, function, given, made, args):
        here = getattr(self.here, "name", None)
        if here:
            known = {tensor.untyped_storage() for tensor in given}
            for storage in {tensor.untyped_storage() for tensor in made} - known:
                storage.owner = here
        if not self.on:
            return
        for leaf in self.leaves:
            if owner_of(leaf) == here and leaf.grad is not None:  # nobody frees it meanwhile
                self.note(leaf.grad, "gradients")
        numbers = [self.note(tensor) for tensor in (*given, *made)]
        name = function.name().split(".")[0]
        if function.namespace == "c10d":
            self.count(name, args)
        elif not function.is_view and any(owner_of(tensor) != here for tensor in given):
            self.add("send" if name in COPIES[1:] else "foreign read", given[-1].nbytes)
        if function.namespace == "c10d" or name in COPIES:
            for number in numbers:
                self.same[self.root(number)] = self.root(numbers[0])

    def add(self, name, payload, rings=1):
        self.sent.update({(name, "calls"): 1, (name, "payload"): payload, (name, "wire"): payload * rings})

    def count(self, operator, args):
        """Count a collective, unless it is of a single number."""
        given, other = tensors_in(args[0]), tensors_in(args[1])
        payload = max(sum(tensor.nbytes for tensor in tensors) for tensors in (given, other))
        name, passes = next((COLLECTIVES[key] for key in COLLECTIVES if key in operator), ("", 0))
        if name and max(tensor.numel() for tensor in given) > 1:
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            self.add(name, payload, passes * (group.size() - 1) / group.size() if passes else 1)

    def root(self, number):
        while self.same[number] != number:
            number = self.same[number]
        return number

    def held(self):
        """{kind: the most bytes alive at once}, of "all" too."""
        kinds = {}
        for number, kind in self.kinds.items():
            kinds.setdefault(self.root(number), kind)
        alive, most = Counter(), Counter()
        for number, size in self.events:
            if number == "backward":
                most["activations"] = max(most["activations"], alive[None, None])
                continue
            old = "other" if number < self.before else None
            for kind in (self.kinds.get(number) or kinds.get(self.root(number), old), "all"):
                where = (kind, self.owners[number])
                alive[where] += size
                most[kind] = max(most[kind], alive[where])
        return most


def read_formulas(lesson, config):
    """{what is held or sent: formula}. A line that says `with --policy full` is for that choice alone."""
    formulas = {}
    for name, formula, more in re.findall(r"^    ([a-z-]+)  +(\S+(?: \S+)*)(.*)", lesson.__doc__, re.M):
        choice = re.search(r"with --(\w+) (\w+)", more)
        if not choice or getattr(config, choice[1]) == choice[2]:
            formulas[name] = formula
    return formulas


def evaluate(formula, letters):
    """The value of a formula such as 2wP(N-1)/N, in which neighbours are multiplied."""
    words = re.findall(r"max|min|[A-Za-z]|\d+|\S", formula)
    text = ""
    for word, after in zip(words, [*words[1:], ""]):
        is_factor = word not in ("max", "min") and (word.isalnum() or word == ")")
        text += word + "*" * (is_factor and (after.isalnum() or after == "("))
    return eval(text, {"max": max, "min": min}, letters)


def letters_of(lesson, config, ranks, backend):
    """{letter: its value}."""
    with torch.device("meta"):
        model = lesson.GPT(config)
    sizes = [param.numel() for param in model.parameters()]
    block = sum(param.numel() for param in model.blocks[0].parameters())
    letters = {"P": sum(sizes), "T": max(sizes), "U": block, "E": sum(sizes) - config.layers * block}
    letters |= zip("Lahsv", (getattr(config, name) for name in lesson.SHAPE))
    letters |= {"N": ranks, "k": config.accum, "b": config.batch / config.replicas / config.accum}
    width = lesson.DTYPES[config.dtype].itemsize
    letters |= {"w": width, "m": max(width, 4), "c": 4 * (width == 2), "g": int(backend == "gloo")}
    letters["K"] = 2 * letters["m"] * (config.optim == "adamw")
    ahead = config.layers if getattr(config, "no_reshard", False) else getattr(config, "prefetch", 0)
    letters["f"] = min(ahead, config.layers - 1)
    return letters


def run(lesson, config, trace=None):
    """Run lesson.train(config). Returns (its Watch, {losses, grad_norms, step_ms})."""
    watch = Watch()
    history = {"losses": [], "grad_norms": [], "step_ms": []}
    microbatches, print_step = lesson.microbatches, lesson.print_step
    keep_trace = torch.profiler.tensorboard_trace_handler(trace or ".", f"rank{os.environ.get('RANK', 0)}")
    profiler = torch.profiler.profile(on_trace_ready=keep_trace)

    def begin(config, text, step, *more):
        with watch.lock:
            if step == min(2, config.steps) and not watch.events:
                watch.start()
        if step == 3 and trace:
            profiler.start()
        config.replicas = more[2] if more[1:] else getattr(config, "replicas", 1)
        return microbatches(config, text, step, *more)

    def end(config, step, loss, grad_norm, started):
        if step == min(2, config.steps):
            watch.stop()
            _pop_mode()
        if step == 3 and trace:
            profiler.stop()
        print_step(config, step, loss, grad_norm, started)
        history["losses"].append(loss.item())
        history["grad_norms"].append(grad_norm.item())
        history["step_ms"].append(1e3 * (time.perf_counter() - started))

    watched = mock.patch.object(threading.Thread, "run", lambda thread: watch.run_thread(thread))
    with mock.patch.multiple(lesson, microbatches=begin, print_step=end), watched:
        _push_mode(watch)
        lesson.train(config)
    return watch, history


def result_of(lesson, config, watch, history):
    """What --json writes: the most of any rank, with the formulas' values."""
    ranks, backend, device = dist.get_world_size(), dist.get_backend(), watch.leaves[0].device.type
    everyone = [None] * ranks
    ranks = getattr(config, "replicas", 0) or getattr(config, "workers", 0) or ranks
    dist.all_gather_object(everyone, (watch.held(), watch.sent))
    held, sent = Counter(), Counter()
    for rank_held, rank_sent in everyone:
        held |= rank_held
        sent |= rank_sent
    letters = letters_of(lesson, config, ranks, backend)
    result = {"lesson": lesson.__name__, "world_size": ranks, "backend": backend, "device": device}
    result |= {"dtype": config.dtype, "n_params": letters["P"], **history, "held": {}, "sent": {}}
    formulas = read_formulas(lesson, config)
    for name, formula in formulas.items():
        row = {"formula": evaluate(formula, letters)}
        if name in HELD:
            result["held"][name] = row | {"measured": held[name]}
        else:
            result["sent"][name] = row | {"calls": 0, "payload": 0, "wire": 0}
    for (name, what), number in sent.items():
        if name == "all-to-all" and name not in formulas:
            name = "reduce-scatter"
        result["sent"].setdefault(name, {"formula": 0})[what] = number
    result["peak_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else held["all"]
    return result


def show(result, formulas):
    for part, column in (("held", "measured"), ("sent", "wire")):
        if result[part]:
            print(f"{part:<18}{'formula':<28}{'expected':>12}{'measured':>12}")
        for name, row in result[part].items():
            expected, measured = f"{row['formula'] / 1e6:.2f} MB", f"{row[column] / 1e6:.2f} MB"
            print(f"  {name:<16}{formulas.get(name, '-'):<28}{expected:>12}{measured:>12}")


def simulate(lesson, config, ranks, rank, backend="nccl"):
    """result_of() one of many ranks: the process group only pretends to send, and tensors have no data."""
    with_data = unset_fake_temporarily()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"WORLD_SIZE": str(ranks)}))
        for where, name, instead in (
            (lesson, "set_up", with_data(lesson.set_up)),
            (lesson, "microbatches", with_data(lesson.microbatches)),
            (lesson, "print_step", lambda *_: None),
            (dist, "get_backend", lambda *_: backend),
            (dist, "all_gather_object", lambda all, own: all.__setitem__(slice(None), [own] * ranks)),
            (torch.Tensor, "item", lambda _: math.nan),
            (torch.utils, "swap_tensors", lambda old, new: setattr(old, "data", new.data)),  # in Module.to()
        ):
            stack.enter_context(mock.patch.object(where, name, instead))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return result_of(lesson, config, *run(lesson, config))


def refuse(problem):
    """End with exit code 2; rank 0 says in one line what to change."""
    if os.environ.get("RANK", "0") == "0":
        print(f"ledger.py: {problem}", file=sys.stderr)
    sys.exit(2)


def load(path):
    """A lesson's file as a module."""
    if not os.path.isfile(path):
        refuse(f"{path}: no such lesson")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    lesson = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lesson)
    return lesson


def main():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--json")
    parser.add_argument("--trace")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("lesson")
    given, flags = parser.parse_known_args()
    lesson = load(given.lesson)
    if given.ranks:
        config = lesson.parse(["--steps", "2", "--device", "cpu", "--batch", str(given.ranks), *flags])
        print(f"{given.lesson} | rank {given.rank} of {given.ranks}, simulated")
        result = simulate(lesson, config, given.ranks, given.rank)
    else:
        config = lesson.parse(flags)
        result = result_of(lesson, config, *run(lesson, config, given.trace))
    if given.ranks or dist.get_rank() == 0:
        show(result, read_formulas(lesson, config))
        if given.json:
            Path(given.json).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
