"""What a lesson holds and sends, watched from outside, beside the formulas in its docstring.

    torchrun --nproc_per_node=4 tools/ledger.py zero3.py --size small --dtype bf16
    torchrun --nproc_per_node=2 tools/ledger.py --json ddp.json --trace traces/ ddp.py --steps 3

Runs the unmodified lesson and watches every operator of its second step, when the optimizer has its states,
of more/diloco.py as many steps as there are from one exchange to the next.

held: the most that any rank had alive at once, each line at its own peak. Parameters are the leaves that
require a gradient, gradients their .grad, the optimizer's are in its state, and what a copy or a collective
makes of one of these. (Gradients may exceed a formula by one parameter's, which autograd just computed.)
Activations are what else the step made, in floating point, and holds when a backward begins.
sent: what a rank of a ring sends in the collectives, for tensors of S bytes: 2S(N-1)/N in an all-reduce,
S(N-1)/N in a reduce-scatter, all-gather or all-to-all, and in the mean in a broadcast or reduce, in which one
rank sends nothing on; S in a send; none for a single number. "down" and "up" are copies between a device and
its host, in whose memory is what a lesson makes with device="cpu", and what is made from that alone.

--trace F writes a Chrome trace of each rank's third step to a folder, --film F what happens in the watched
step (see tools/film.py), --json F the numbers.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from film import Film, write
from formulas import blocks_of, evaluate, read_formulas
from lessons import asked, complete
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode
from watch import Watch

NEEDED = ("def read_flags", "def train", "def print_step", "class GPT")
HELD = ("parameters", "gradients", "optimizer", "activations", "host")


def run(lesson, config, trace=None, watch=None):
    """Run lesson.train(config). Returns (its Watch, {losses, grad_norms, step_ms})."""
    watch = watch or Watch()
    formulas = read_formulas(lesson, config).keys()
    watch.has_host = "host" in formulas
    history = {"losses": [], "grad_norms": [], "step_ms": []}
    microbatches, print_step = lesson.microbatches, lesson.print_step
    begun = set()  # steps, of which the first may be any, in more/resume.py
    period = getattr(config, "inner_steps", 0) or 1  # from one of more/diloco.py's messages to the next
    keep_trace = torch.profiler.tensorboard_trace_handler(trace or ".", f"rank{os.environ.get('RANK', 0)}")
    profiler = torch.profiler.profile(on_trace_ready=keep_trace)

    def begin(*arguments):
        given = asked(microbatches, arguments)
        with watch.lock:
            begun.add(given["step"])
            if len(begun) == 1 + period * (config.steps > period) and not watch.events:
                watch.start()
            elif len(begun) == 2 * period + 1:  # a thread is ahead of end()
                watch.stop()
        if len(begun) == 3 and trace:
            profiler.start()
        config.shares = given["replicas"] if given["replicas"] > 1 else getattr(config, "replicas", 1)
        return microbatches(*arguments)

    def end(config, step, loss, grad_norm, started):
        ended = len(history["losses"]) + 1
        if ended == period * (1 + (config.steps > period)):
            watch.stop()
            if _get_current_dispatch_mode() is watch:  # else the lesson has one of its own
                _pop_mode()
        if ended == 3 and trace:
            profiler.stop()
        print_step(config, step, loss, grad_norm, started)
        history["losses"].append(loss.item())
        history["grad_norms"].append(grad_norm.item())
        history["step_ms"].append(1e3 * (time.perf_counter() - started))

    watched = mock.patch.object(threading.Thread, "run", lambda thread: watch.run_thread(thread))
    with mock.patch.multiple(lesson, microbatches=begin, print_step=end), watched:
        _push_mode(watch)
        lesson.train(config)
    if not history["losses"]:
        refuse(f"{lesson.__name__} trained no step: a checkpoint in its way has them all?")
    return watch, history


def result_of(lesson, config, watch, history):
    """What --json writes: the most of any rank, with the formulas' values."""
    ranks, backend = dist.get_world_size(), dist.get_backend()
    device = "cuda" if backend == "nccl" else "cpu"  # of the lesson, whose leaves may be on the host
    everyone = [None] * ranks
    ranks = getattr(config, "replicas", 0) or getattr(config, "workers", 0) or ranks
    own = watch.held(), watch.sent, watch.elements, watch.flops, watch.unknown
    dist.all_gather_object(everyone, own)
    held, sent, elements, unknown, flops = Counter(), Counter(), Counter(), Counter(), 0
    for rank_held, rank_sent, rank_elements, rank_flops, rank_unknown in everyone:
        unknown |= rank_unknown
        flops = max(flops, rank_flops)
        held |= rank_held
        sent |= rank_sent
        elements |= rank_elements
    letters = letters_of(lesson, config, ranks)
    letters["R"] = elements[lesson.DTYPES[config.dtype]]
    if hasattr(config, "pp"):
        letters["R"] = max(parameters_of_stage(config, letters, stage) for stage in range(config.pp))
    result = {"lesson": lesson.__name__, "world_size": ranks, "backend": backend, "device": device}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    result |= {"shares_gpu": device == "cuda" and local > torch.cuda.device_count()}
    result |= {"dtype": config.dtype, "n_params": letters["P"], **history, "held": {}, "sent": {}}
    if len(history["losses"]) == 1:
        unknown["later step, in which an optimizer has states"] += 1
    result |= {"not counted": unknown, "flops": flops}
    formulas = dict.fromkeys(("parameters", "gradients", "optimizer"), "0") | read_formulas(lesson, config)
    times = 2 if config.dtype == "fp64" else 1  # docstrings speak of fp32 and bf16: fp64 takes twice fp32's
    letters["w"] //= times
    for name, formula in formulas.items():
        row = {"formula": times * evaluate(formula, letters)}
        if name in HELD:
            result["held"][name] = row | {"measured": held[name]}
        else:
            result["sent"][name] = row | {"calls": 0, "payload": 0, "wire": 0}
    for (name, what), number in sent.items():
        result["sent"].setdefault(name, {"formula": 0})[what] = number
    result["peak_bytes"] = torch.cuda.max_memory_allocated(device) if device == "cuda" else held["all"]
    return result


def letters_of(lesson, config, ranks):
    """{letter: its value}: those that most lessons share, then those of what a lesson has.

    P parameters, U in a block, E in no block; L layers, a heads, h width, s context, v vocabulary; N ranks, k
    microbatches of b sequences; w bytes of a weight; r parameters that tensor-parallel ranks all have. A
    docstring says what its others are."""
    with torch.device("meta"):
        model = lesson.GPT(config)
    sizes = [param.numel() for param in model.parameters()]
    block = sum(param.numel() for param in model.blocks[0].parameters())
    letters = {"P": sum(sizes), "U": block, "E": sum(sizes) - config.layers * block}
    letters |= zip("Lahsv", (getattr(config, name) for name in lesson.SHAPE))
    letters |= {"N": ranks, "k": config.accum, "b": config.batch / config.shares / config.accum}
    letters["w"] = lesson.DTYPES[config.dtype].itemsize
    letters["r"] = (6 * config.layers + 2 + config.context) * config.width
    if hasattr(config, "buckets"):
        letters["B"] = config.buckets
    if hasattr(config, "chunks"):
        letters["C"] = config.chunks
    if hasattr(config, "prefetch"):
        letters["f"] = min(config.prefetch, config.layers - 1)
    if hasattr(config, "shard"):
        letters["F"] = config.shard
    if hasattr(config, "tp") and not hasattr(config, "pp"):  # units are of what a rank's column has
        t, lacks = config.tp, (block - 6 * config.width) * (config.tp - 1) // config.tp
        letters |= {"t": t, "d": ranks // t, "F": 1 if config.naive else ranks // t}
        letters |= {"P": letters["P"] - config.layers * lacks, "U": block - lacks}
    if hasattr(config, "pp"):
        letters |= {"t": config.tp, "p": config.pp, "d": config.dp, "L": -(-config.layers // config.pp)}
    if hasattr(config, "experts"):
        letters |= {"X": config.experts, "e": config.ep, "t": config.top_k, "M": config.layers}
        letters["b"] = config.batch / config.accum  # of all ranks
        letters["U"] = 8 * config.width**2 + 5 * config.width
        letters["D"] = letters["P"] + letters["M"] * (config.experts * config.width - letters["U"])
        letters["V"] = block - letters["U"] + config.experts * config.width
    if hasattr(config, "servers"):  # without any, nothing is sent to one
        trainers, servers = ranks - config.servers, max(config.servers, 1)
        letters["r"] += config.vocab * config.width  # the token embedding
        slices = letters["r"] + (letters["P"] - letters["r"]) / servers
        letters |= {"N": trainers, "t": servers}
        letters["D"] = slices * (config.servers > 0)
    if hasattr(lesson, "assign_owners"):
        owned, states = Counter(), Counter()
        matrices = {param for param in model.blocks.parameters() if param.dim() == 2}
        for param, owner in lesson.assign_owners(model.parameters(), 1 if config.naive else ranks).items():
            owned[owner] += param.numel()
            states[owner] += param.numel() * (1 if param in matrices else 2)
        letters |= {"X": max(owned.values()), "Y": max(states.values())}
    return letters


def parameters_of_stage(config, letters, stage):
    """Of a stage's rank with most, of a mesh: positions, norms and row-parallel biases are whole."""
    h, blocks = config.width, blocks_of(stage, config.pp, config.layers)
    first, last = stage == 0, stage == config.pp - 1
    ends = first * config.context * h + (first or last) * -(-config.vocab // config.tp) * h + last * 2 * h
    return blocks * ((12 * h * h + 7 * h) // config.tp + 6 * h) + ends


def show(result, formulas):
    for part, column in (("held", "measured"), ("sent", "wire")):
        if result[part]:
            print(f"{part:<18}{'formula':<28}{'expected':>12}{'measured':>12}")
        for name, row in result[part].items():
            expected, measured = f"{row['formula'] / 1e6:.2f} MB", f"{row[column] / 1e6:.2f} MB"
            print(f"  {name:<16}{formulas.get(name, '-'):<28}{expected:>12}{measured:>12}")
    if result["not counted"]:
        print("not counted:", ", ".join(f"{number} {what}" for what, number in result["not counted"].items()))


def refuse(problem):
    """End with exit code 2; rank 0 says in one line what to change."""
    if os.environ.get("RANK", "0") == "0":
        print(f"ledger.py: {problem}", file=sys.stderr)
    sys.exit(2)


def find_problems(given):
    """Yield what is wrong with this tool's own flags, each in one line."""
    path = Path(given.lesson)
    if path.suffix != ".py" or not path.is_file():
        yield f"{path}: no such lesson"
    elif missing := [name for name in NEEDED if f"{name}(" not in path.read_text()]:
        yield f"{path}: is watched by {', '.join(NEEDED)}, as ddp.py has them; there is no {missing[0]}"
    for flag, path in ("json", given.json), ("film", given.film):
        if path and (os.path.isdir(path) or not can_write(Path(path).parent) or path.endswith((".py", "-"))):
            yield f"--{flag} {path}: must be a file in a folder that can be written, and no script"
    if given.trace:
        with suppress(OSError):
            os.makedirs(given.trace, exist_ok=True)
        if not can_write(given.trace):
            yield f"--trace {given.trace}: must be a folder that can be written"


def can_write(folder):
    return os.path.isdir(folder) and os.access(folder, os.W_OK)


def without_nan(tree):
    """What json can say: numbers that are none, or infinite, as text."""
    if isinstance(tree, dict):
        return {key: without_nan(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [without_nan(value) for value in tree]
    return str(tree) if isinstance(tree, float) and not math.isfinite(tree) else tree


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
    return complete(lesson)


def main():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--json")
    parser.add_argument("--trace")
    parser.add_argument("--film")
    parser.add_argument("lesson")
    given, flags = parser.parse_known_args()
    for problem in find_problems(given):
        refuse(problem)
    lesson = load(given.lesson)
    config = lesson.parse(flags)
    if given.trace and config.steps < 3:
        refuse(f"--trace {given.trace}: it is of the third step: needs more --steps")
    film = Film(lesson) if given.film else None
    result = result_of(lesson, config, *run(lesson, config, given.trace, film))
    if film:
        write(given.film, film, lesson, flags)
    if dist.get_rank() == 0:
        show(result, read_formulas(lesson, config))
        if given.json:
            try:
                Path(given.json).write_text(json.dumps(without_nan(result), allow_nan=False))
            except OSError as error:
                refuse(f"{given.json}: {error.strerror}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
