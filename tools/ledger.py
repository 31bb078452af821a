"""What a lesson holds and sends, watched from outside, beside the formulas in its docstring.

    torchrun --nproc_per_node=4 tools/ledger.py zero3.py --size small --dtype bf16
    torchrun --nproc_per_node=2 tools/ledger.py ddp.py --steps 3 --json ddp.json --trace traces/
    python tools/ledger.py --ranks 1024 --rank 777 zero3.py --size 7.5b --dtype bf16

Runs the unmodified lesson and watches every operator of its second step, when the optimizer has its states,
of diloco.py from its first line to its second.

held: the most that any rank had alive at once, each line at its own peak. Parameters are the leaves that
require a gradient, gradients their .grad, the optimizer's are in its state, and what a copy or a collective
makes of one of these. (Gradients may exceed a formula by one parameter's, which autograd just computed.)
Activations are what else the step made, in floating point, and holds when a backward begins.
sent: what a rank of a ring sends in the collectives, for tensors of S bytes: 2S(N-1)/N in an all-reduce,
S(N-1)/N in a reduce-scatter, all-gather or all-to-all, and in the mean in a broadcast or reduce, in which one
rank sends nothing on; S in a send; none for a single number. An all-to-all that does the work of a
reduce-scatter is listed as one: all over gloo, and those of equal parts of a docstring that has both. "down"
and "up" are copies by the threads "host" and "upload", between a device and its host, whose memory is what
these make.

touched: bytes that the technique's operators read and write, on the rank with most: all but the toy model's,
autograd's own and those in an optimizer's step(). --lines lists them by line of the lesson. What counts as
read and written stands in tools/watch.py, at touched_by(); formulas, of some lessons, in tools/formulas.py.

ms: what a step takes, from the third on, without the watching (not with --trace): see tools/clock.py; the
machine's constants are kept in --machine F, by default a file in runs/.

With --ranks, one of so many ranks is simulated, without the others or data: shapes and bytes are the code's.
--trace writes a Chrome trace of each rank's third step, --film F what happens in the watched one: see
tools/film.py; of the formulas and their letters tools/letters.py.
"""

import argparse
import importlib.util
import json
import linecache
import math
import os
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial, partialmethod
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from clock import Clock
from film import Film, write
from letters import evaluate, letters_of, parameters_of_stage, read_formulas
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode
from watch import Watch, lines_of_others

NEEDED = ("def parse", "def train", "def print_step", "class GPT")
HELD = ("parameters", "gradients", "optimizer", "activations", "host")


def run(lesson, config, trace=None, watch=None):
    """Run lesson.train(config). Returns (its Watch, {losses, grad_norms, step_ms})."""
    watch = watch or Watch()
    watch.path, watch.others = lesson.__file__, lines_of_others(lesson.__file__)
    watch.reduces = {"reduce-scatter", "all-to-all"} <= read_formulas(lesson, config).keys()
    history = {"losses": [], "grad_norms": [], "step_ms": []}
    loader = "load_microbatches" if hasattr(lesson, "deal") else "microbatches"  # of uneven.py, of all others
    microbatches, print_step = getattr(lesson, loader), lesson.print_step
    begun = set()  # steps, of which the first may be any, in resume.py
    period = getattr(config, "inner_steps", 1)  # of the lines that diloco.py prints
    keep_trace = torch.profiler.tensorboard_trace_handler(trace or ".", f"rank{os.environ.get('RANK', 0)}")
    profiler = torch.profiler.profile(on_trace_ready=keep_trace)

    def begin(config, text, step, *more):
        with watch.lock:
            begun.add(step)
            if len(begun) == 1 + period * (config.steps > period) and not watch.events:
                watch.start()
            elif len(begun) == 2 * period + 1:  # a thread is ahead of end()
                watch.stop()
        if len(begun) == 2 * period + 1 and trace:
            profiler.start()
        config.shares = more[2] if more[1:] else getattr(config, "replicas", 1)
        return microbatches(config, text, step, *more)

    def end(config, step, loss, grad_norm, started):
        ended = len(history["losses"]) + 1
        if ended == 1 + (config.steps > period):
            watch.stop()
            if _get_current_dispatch_mode() is watch:  # else the lesson has one of its own
                _pop_mode()
        if ended == 3 and trace:
            profiler.stop()
        print_step(config, step, loss, grad_norm, started)
        history["losses"].append(loss.item())
        history["grad_norms"].append(grad_norm.item())
        history["step_ms"].append(1e3 * (time.perf_counter() - started))

    def deal(documents, order, cost, ranks):
        shares = own_deal(documents, order, cost, ranks)
        config.costs.append([sum(cost(len(document)) for document in share) for share in shares])
        return shares

    def lay_out(begins, *group, **zigzag):
        layout = own_layout(begins, *group, **zigzag)
        if config.documents:
            config.blocks.append([blocks_of(layout, rank) for rank in range(layout.world_size)])
        return layout

    replaced = {loader: begin, "print_step": end}
    if own_layout := getattr(lesson, "Layout", None):
        config.blocks = []  # of each microbatch: each rank's blocks of scores
        replaced["Layout"] = lay_out
    if own_deal := getattr(lesson, "deal", None):
        config.costs = []  # of each step: FLOPs of each rank's documents
        replaced["deal"] = deal
    watched = mock.patch.object(threading.Thread, "run", lambda thread: watch.run_thread(thread))
    with mock.patch.multiple(lesson, **replaced), watched:
        _push_mode(watch)
        lesson.train(config)
    if not history["losses"]:
        refuse(f"{lesson.__name__} trained no step: a checkpoint in its way has them all?")
    return watch, history


def blocks_of(layout, rank):
    """How many blocks of scores a rank of context_parallel.py computes; half of each on the diagonal."""
    blocks = 0
    for i in layout.chunks[rank]:
        blocks += sum(map(bool, layout.sees[i])) - 1 / 2  # a chunk sees itself
    return blocks


def result_of(lesson, config, watch, history, clock=None):
    """What --json writes: the most of any rank, with the formulas' values."""
    ranks, backend = dist.get_world_size(), dist.get_backend()
    device = "cuda" if backend == "nccl" else "cpu"  # of the lesson, whose leaves may be on the host
    everyone = [None] * ranks
    ranks = getattr(config, "replicas", 0) or getattr(config, "workers", 0) or ranks
    own = watch.held(), watch.sent, watch.elements, watch.flops, watch.unknown, watch.touched.total()
    dist.all_gather_object(everyone, own)
    held, sent, elements, unknown, computed, touched = Counter(), Counter(), Counter(), Counter(), 0, 0
    for rank_held, rank_sent, rank_elements, flops, rank_unknown, rank_touched in everyone:
        touched = max(touched, rank_touched)
        unknown |= rank_unknown
        computed = max(computed, flops)
        held |= rank_held
        sent |= rank_sent
        elements |= rank_elements
    letters = letters_of(lesson, config, ranks, backend)
    letters["R"] = elements[lesson.DTYPES[config.dtype]]
    if hasattr(config, "tp"):
        letters["R"] = max(parameters_of_stage(config, letters, stage) for stage in range(config.pp))
    letters["G"] = min(letters["G"], letters["R"])  # a process may have replicas
    result = {"lesson": lesson.__name__, "world_size": ranks, "backend": backend, "device": device}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    result |= {"shares_gpu": device == "cuda" and local > torch.cuda.device_count()}
    result |= {"dtype": config.dtype, "n_params": letters["P"], **history, "held": {}, "sent": {}}
    if len(history["losses"]) == 1:
        unknown["later step, in which an optimizer has states"] += 1
    result["not counted"] = unknown
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
    of_time = read_formulas(lesson, config, True)
    result |= {"touched": {}, "lines": dict(watch.touched.most_common())}  # lines: of this rank
    result["flops"] = {"formula": evaluate(of_time.get("compute", "0"), letters), "measured": computed}
    if "touched" in of_time:
        result["touched"]["touched"] = {"formula": evaluate(of_time["touched"], letters), "measured": touched}
    result["peak_bytes"] = torch.cuda.max_memory_allocated(device) if device == "cuda" else held["all"]
    # Ranks that share a GPU take turns, and every time is that of the turns.
    if clock and len(history["losses"]) > 2 and not result["shares_gpu"]:
        result |= clock.compare(lesson, config, result, letters, of_time, evaluate)
    return result


def show(result, formulas):
    for part, column in (("held", "measured"), ("sent", "wire"), ("touched", "measured")):
        if result[part]:
            print(f"{part:<18}{'formula':<28}{'expected':>12}{'measured':>12}")
        for name, row in result[part].items():
            expected, measured = f"{row['formula'] / 1e6:.2f} MB", f"{row[column] / 1e6:.2f} MB"
            print(f"  {name:<16}{formulas.get(name, '-'):<28}{expected:>12}{measured:>12}")
    flops = result["flops"]
    print(
        f"{'FLOPs':<18}{formulas.get('compute', '-'):<28}{flops['formula']:>12.3e}{flops['measured']:>12.3e}"
    )
    if result["not counted"]:
        print("not counted:", ", ".join(f"{number} {what}" for what, number in result["not counted"].items()))
    if "ms" in result:
        print("ms of a step")
        for part, row in result["ms"].items():
            formula = formulas.get(part, "-")
            print(f"  {part:<16}{formula:<28}{row['formula']:>9.1f} ms{row['measured']:>9.1f} ms")


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
            (dist, "broadcast_object_list", lambda *_, **__: None),
            (dist, "all_gather_object", lambda all, own: all.__setitem__(slice(None), [own] * ranks)),
            (torch.Tensor, "item", lambda _: math.nan),
            (torch.utils, "swap_tensors", lambda old, new: setattr(old, "data", new.data)),  # in Module.to()
        ):
            stack.enter_context(mock.patch.object(where, name, instead))
        if hasattr(lesson, "MoE"):
            even = partialmethod(even_counts, lesson.MoE.all_gather_counts)
            stack.enter_context(mock.patch.object(lesson.MoE, "all_gather_counts", even))
        if layout := getattr(lesson, "Layout", None):  # whose tables the host reads
            one_document = partial(torch.zeros, dtype=torch.bool)
            lay_out = with_data(lambda begins, **zigzag: layout(one_document(begins.shape), **zigzag))
            stack.enter_context(mock.patch.object(lesson, "Layout", lay_out))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return result_of(lesson, config, *run(lesson, config))


class HostTensor(torch.Tensor):
    """A tensor with data, also in a simulation. What is computed of it alone has data, too."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        for fake in args:
            if isinstance(fake, FakeTensor):
                fakes = (fake.new_empty(each.shape) if isinstance(each, cls) else each for each in args)
                return function(*fakes, **(kwargs or {}))
        with unset_fake_temporarily():
            return super().__torch_function__(function, types, args, kwargs)


def even_counts(moe, all_gather_counts, chosen):
    """MoE.all_gather_counts() as if all experts were equally busy; the host needs the numbers."""
    load, counts = all_gather_counts(moe, chosen)
    even = chosen.numel() // counts.shape[1]
    with unset_fake_temporarily():
        return load, torch.full(counts.shape, even).as_subclass(HostTensor)


def refuse(problem):
    """End with exit code 2; rank 0 says in one line what to change."""
    if os.environ.get("RANK", "0") == "0":
        print(f"ledger.py: {problem}", file=sys.stderr)
    sys.exit(2)


def find_problems(given):
    """Yield what is wrong with this tool's own flags, each in one line."""
    path, ranks = Path(given.lesson), given.ranks
    if path.suffix != ".py" or not path.is_file():
        yield f"{path}: no such lesson"
    elif missing := [name for name in NEEDED if f"{name}(" not in path.read_text()]:
        yield f"{path}: is watched by {', '.join(NEEDED)}, as ddp.py has them; there is no {missing[0]}"
    if ranks is not None and not 1 <= ranks <= 10**5:
        yield f"--ranks {ranks}: must be 1 or more, and at most 10^5"
    if not 0 <= given.rank < (ranks or 1):
        yield f"--rank {given.rank}: must be 0 or more, and less than --ranks"
    for flag, path in ("json", given.json), ("machine", given.machine), ("film", given.film):
        if path and (os.path.isdir(path) or not can_write(Path(path).parent) or path.endswith((".py", "-"))):
            yield f"--{flag} {path}: must be a file in a folder that can be written, and no script"
    if ranks and (given.trace or given.film):
        yield f"--ranks {ranks}: not with --trace and --film, as nothing takes time"
    if given.trace:
        with suppress(OSError):
            os.makedirs(given.trace, exist_ok=True)
        if not can_write(given.trace):
            yield f"--trace {given.trace}: must be a folder that can be written"


def keep(path, text):
    try:
        Path(path).write_text(text)
    except OSError as error:
        refuse(f"{path}: {error.strerror}")


def can_write(folder):
    return os.path.isdir(folder) and os.access(folder, os.W_OK)


def load(path):
    """A script's file as a module, which may import its neighbours."""
    folder = Path(path).resolve().parent
    sys.path.insert(0, str(folder))
    names = {file.stem for file in folder.glob("*.py")}
    hidden = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    lesson = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lesson)
    sys.modules |= hidden  # this tool's own modules of these names
    return lesson


def main():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--json")
    parser.add_argument("--trace")
    parser.add_argument("--film")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--machine")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("lesson")
    given, flags = parser.parse_known_args()
    for problem in find_problems(given):
        refuse(problem)
    lesson = load(given.lesson)
    needs_values = {"Offload", "ShardedOptimizer", "deal"} & vars(lesson).keys()
    if given.ranks and (needs_values or "--documents" in flags):
        refuse(f"--ranks {given.ranks}: {given.lesson} needs values, or threads of its own")
    if given.ranks:
        config = lesson.parse(["--steps", "2", "--device", "cpu", "--batch", str(given.ranks), *flags])
        config.steps = max(config.steps, 2 * getattr(config, "inner_steps", 1))
        print(f"{given.lesson} | rank {given.rank} of {given.ranks}, simulated")
        result = simulate(lesson, config, given.ranks, given.rank)
    else:
        config = lesson.parse(flags)
        lines = config.steps // getattr(config, "inner_steps", 1)
        if given.trace and lines < 3:
            refuse(f"--trace {given.trace}: it is of the third line that is printed: needs more --steps")
        is_known = "compute" in read_formulas(lesson, config, True)
        clock = Clock(lesson, given.machine) if is_known and not given.trace else None
        film = Film(lesson) if given.film else None
        result = result_of(lesson, config, *run(lesson, config, given.trace, film), clock)
        if film:
            write(given.film, film, lesson, flags)
    if given.ranks or dist.get_rank() == 0:
        show(result, read_formulas(lesson, config) | read_formulas(lesson, config, True))
        for line, size in result["lines"].items() if given.lines else ():
            print(f"  {size / 1e6:>10.2f} MB{line:>5}: {linecache.getline(given.lesson, line).strip()}")
        if given.json:
            keep(given.json, json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
