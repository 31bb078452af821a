"""How long a step takes and what it waits for: as a docstring's formulas predict it, and measured.

Predicted: computation is `compute` FLOPs / C, `optimizer` bytes / M, and gamma for each byte that travels
beside it; exposed is `exposed` bytes x beta; idle is `idle` x `compute` / C. In formulas A is alpha / beta, Y
what travels while a microbatch's forward runs. The constants are measured, on all ranks at once, so that they
share what they share in a step:
C      FLOP/s of the lesson's model, not split, at most 8 layers of it, with its microbatch: forward, backward
M      bytes of moments that clipping and AdamW pass in a second
alpha  seconds of a message: of all-reduce, all-gather and all-to-all of N numbers the middle one, by rounds
beta   seconds of a byte, of the same with 4 MiB (on GPUs 256)
gamma  seconds that computation loses for each byte that travels beside it: threads and kernels that send use
       cores, too
They are kept in a file; without it they are measured again.

Measured: how long the main thread stood in Work.wait(): idle until all ranks of the collective, or both ends
of a message, had started it, then exposed. All else is computation. The median over steps, the mean over
ranks. (Clocks of one machine agree, those of several may not. Over NCCL the host does not wait, so all is
computation there.)
"""

import copy
import json
import socket
import statistics
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

CALLS = ["allreduce", "allgather", "all_gather_single", "_allgather_base", "broadcast", "reduce"]
CALLS += ["reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "gather", "scatter", "barrier"]
CALLS += ["alltoall", "all_to_all_single", "alltoall_base", "send", "recv"]
RUNS = Path(__file__).resolve().parent.parent / "runs"
PARTS = ("computation", "exposed", "idle", "sum")


class Clock:
    """Notes when this process starts a collective, when its main thread waits for one, when a step ends."""

    def __init__(self, lesson, machine=None):
        self.machine = machine  # a file
        self.starts = {}  # {(group, ranks of a message, its number there): seconds}
        self.waits = []  # (key, begin, end)
        self.ends = []  # of lines printed
        self.numbers = Counter()
        self.works = {}  # {id: (key, the work, whose id is then no other's)}
        self.patches = ExitStack()
        self.replace(dist.Work, "wait", self.timing(dist.Work.wait))
        self.replace(lesson, "print_step", self.ending(lesson.print_step))
        for name in CALLS:
            if hasattr(dist.ProcessGroup, name):  # torch 2.11 lacks some
                self.replace(dist.ProcessGroup, name, self.noting(name, getattr(dist.ProcessGroup, name)))

    def replace(self, where, name, by):
        self.patches.enter_context(mock.patch.object(where, name, by))

    def ending(self, print_step):
        def end(*arguments):
            print_step(*arguments)
            self.ends.append(time.perf_counter())

        return end

    def noting(self, name, call):
        def start(group, *args, **kwargs):
            where = group.group_name, None
            if name in ("send", "recv"):
                ends = group.rank(), args[1]
                where = group.group_name, ends if name == "send" else ends[::-1]
            self.numbers[where] += 1
            key = (*where, self.numbers[where])
            self.starts[key] = time.perf_counter()
            work = call(group, *args, **kwargs)
            if work is not None:
                self.works[id(work)] = key, work
            return work

        return start

    def timing(self, wait):
        def timed(work, *args, **kwargs):
            begin = time.perf_counter()
            done = wait(work, *args, **kwargs)
            key, _ = self.works.pop(id(work), (None, None))  # None: waited for before
            if threading.current_thread() is threading.main_thread():
                self.waits.append((key, begin, time.perf_counter()))
            return done

        return timed

    def measured(self, steps):
        """{part: ms of a step}, from the third line on. steps: for which a line is printed. It is the end."""
        self.patches.close()
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.starts)
        ready = {}  # when the last one had started it
        for starts in everyone:
            for key, begin in starts.items():
                ready[key] = max(begin, ready.get(key, begin))
        rows = []
        for start, stop in zip(self.ends[1:], self.ends[2:]):
            idle = exposed = 0
            for key, begin, end in self.waits:
                if start <= begin < stop:
                    both = min(max(ready.get(key, begin), begin), end)
                    idle += both - begin
                    exposed += end - both
            rows.append((stop - start - idle - exposed, exposed, idle, stop - start))
        own = [1e3 / steps * statistics.median(column) for column in zip(*rows)]
        dist.all_gather_object(everyone, own)
        return dict(zip(PARTS, map(statistics.mean, zip(*everyone))))

    def compare(self, lesson, config, result, letters, formulas, evaluate):
        """For tools/ledger.py's result: what the parts take by the formulas, and measured; the constants."""
        steps = getattr(config, "inner_steps", 1)  # of diloco.py's lines, and of its formulas
        measured = self.measured(steps)
        device = torch.device(result["device"])
        machine = machine_of(lesson, config, round(letters["b"]), device, self.machine)
        letters = letters | letters_of_time(config, letters, machine)
        values = {name: evaluate(formula, letters) for name, formula in formulas.items()}
        sent = sum(row["formula"] for row in result["sent"].values())
        optimizer = result["held"].get("optimizer", {"formula": 0})["formula"]
        expected = predicted(values, sent, optimizer * steps, machine)
        rows = {part: {"formula": expected[part] / steps, "measured": measured[part]} for part in PARTS}
        return {"ms": rows, "machine": machine}


def letters_of_time(config, letters, machine):
    """What the formulas of time have beside the others' letters."""
    P, N, beta = letters["P"], letters["N"], machine["beta"]
    more = {"n": (N - 1) / N, "A": machine["alpha"] / beta if beta else 0}
    forward = letters["Q"] * letters["b"] * letters["s"] / 3 / machine["C"]
    more["Y"] = forward / beta if beta else 0
    cap = getattr(config, "bucket_cap_mb", None)
    cap = min(letters["w"] * P / 5, 25 * 2**20) if cap is None else cap * 2**20
    more["B"] = max(cap, letters["w"] * config.vocab * config.width)  # the embedding is in the last one
    return more


def predicted(values, sent, optimizer, machine):
    """{part: ms}, from the values of a docstring's formulas. sent, optimizer: all bytes of these."""
    compute = values["compute"] / machine["C"]
    exposed = values.get("exposed", sent)
    beside = machine["gamma"] * max(0, sent - exposed)
    seconds = [compute + optimizer / machine["M"] + beside]
    seconds += [exposed * machine["beta"], values.get("idle", 0) * compute]
    return dict(zip(PARTS, [1e3 * part for part in (*seconds, sum(seconds))]))


def machine_of(lesson, config, batch, device, path=None):
    """The constants, from a file, by default one of this host and backend, or measured and added to it."""
    path = Path(path or RUNS / f"machine-{socket.gethostname()}-{dist.get_backend()}.json")
    shape = [getattr(config, name) for name in lesson.SHAPE]
    key = f"{shape} {config.dtype} {batch} {dist.get_world_size()} {torch.get_num_threads()} {device.type}"
    # Of rank 0: reshard.py's servers have another batch, and all ranks measure, or none.
    key, known = from_rank_0((key, constants_in(path)))
    if key not in known:
        known[key] = from_rank_0(measure(lesson, config, batch, device))
        if dist.get_rank() == 0:
            with suppress(OSError):  # where nothing can be kept they are measured again
                path.parent.mkdir(exist_ok=True)
                path.with_suffix(".new").write_text(json.dumps(known, indent=1))
                path.with_suffix(".new").replace(path)
    return known[key]


def constants_in(path):
    """{machine: constants}: those in a file that are whole."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        known = json.loads(path.read_text())
        return {
            key: found for key, found in known.items() if set(found) == {"C", "M", "alpha", "beta", "gamma"}
        }
    return {}


def from_rank_0(value):
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def measure(lesson, config, batch, device):
    """The constants."""
    config = copy.copy(config)
    config.layers = min(config.layers, 8)
    model = lesson.GPT(config).to(device, lesson.DTYPES[config.dtype])
    tokens = torch.randint(256, (batch, config.context), device=device)

    def compute():
        lesson.mean_loss(model(tokens), tokens).backward()

    seconds = median_of(compute)
    masters = []
    for param in model.parameters():
        masters.append(torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32)))
        masters[-1].grad = torch.ones_like(masters[-1])
    optimizer = torch.optim.AdamW(masters, fused=True)

    def update():
        clip(masters)
        optimizer.step()

    params = sum(master.numel() for master in masters)
    flops = 6 * params + 12 * config.layers * config.width * config.context
    found = {"C": flops * tokens.numel() / seconds, "alpha": 0, "beta": 0, "gamma": 0}
    found["M"] = 2 * masters[0].itemsize * params / median_of(update)
    if dist.get_world_size() > 1:
        found["alpha"], found["beta"] = link(device)
        most = 2**25 if device.type == "cpu" else 2**30
        found["gamma"] = slowed(compute, min(most, seconds / found["beta"] / 2), device)
    return found


def clip(params):
    """As the lessons do, with sums in fp64."""
    norms = torch._foreach_norm([param.grad for param in params], dtype=torch.float64)
    torch.nn.utils.clip_grads_with_norm_(params, 1.0, torch.stack(norms).norm().to(params[0]))


def median_of(function, begin_with=None, rounds=5):
    """Seconds that a function takes when all ranks begin it at once, after what they begin with."""
    times = []
    for _ in range(rounds + 2):  # two for warming up
        dist.barrier()
        if begin_with:
            begin_with()
        begin = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def link(device):
    """(alpha, beta)."""
    ranks = dist.get_world_size()
    alphas, betas = [], []
    for name, rounds in ("all-reduce", 2 * (ranks - 1)), ("all-gather", ranks - 1), ("all-to-all", ranks - 1):
        numel = 2 ** (20 if device.type == "cpu" else 26) // ranks * ranks
        alpha = median_of(collective(name, torch.zeros(ranks, device=device))) / rounds
        beta = median_of(collective(name, torch.zeros(numel, device=device))) / rounds - alpha
        alphas.append(alpha)
        betas.append(max(beta, 1e-15) / (4 * numel / ranks))
    return statistics.median(alphas), statistics.median(betas)


def collective(name, x):
    """A function that runs it; of an all-gather x is the result."""
    shard, other = x.chunk(dist.get_world_size())[0].clone(), torch.empty_like(x)
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    if name == "all-reduce":
        return lambda: dist.all_reduce(x)
    if name == "all-gather":
        return lambda: all_gather(x, shard)
    return lambda: dist.all_to_all_single(other, x)


def slowed(compute, nbytes, device):
    """gamma, from an all-reduce of this many bytes, as a ring sends them, beside the computation."""
    ranks, nbytes = dist.get_world_size(), from_rank_0(nbytes)
    x = torch.zeros(int(nbytes / 4 / 2 * ranks / (ranks - 1)), device=device)
    works = []
    alone = median_of(compute)
    beside = median_of(compute, lambda: works.append(dist.all_reduce(x, async_op=True)))
    for work in works:
        work.wait()
    return max(0, beside - alone) / nbytes
