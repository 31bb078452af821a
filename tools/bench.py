"""Lessons beside PyTorch's own modules and DeepSpeed: same weights, batches and threads, turn by turn.

    python tools/bench.py                                 (every lesson, 2 ranks, size small)
    python tools/bench.py ddp zero3 --ranks 2 --size small --batch 8
    python tools/bench.py zero3 --hosts 2 --rate 1gbit    (Linux and root: see tools/hosts.sh)
    python tools/bench.py zero3 --also="--prefetch 0" --also=--keep    (what each idea buys)
    python tools/bench.py ddp --ranks 1                   (its own cost, beside the plain loop)
    python tools/bench.py pipeline --accum 8 --schedule interleaved --chunks 2
    python tools/bench.py tensor_parallel --sequence-parallel
    python tools/bench.py checkpointing --ranks 1 --policy selective
    python tools/bench.py dp_threads                      (threads beside processes)
    python tools/bench.py dp_async --ranks 4 --also="--mode asp" --slow 0=4

Lessons come first, then flags: those below, and the lessons' own (--size, --batch, --dtype, --device ...).

First three steps of each contender, which must end in equal weights. Then rounds: in each, every contender
runs --steps (3) steps, and each round starts with another one. A line shows the median time of a step, and
the ratio of the lesson's time to it: its median, least and greatest over the rounds. A ratio below 1 means
that the lesson was faster. Then each contender runs in processes of its own: "live" is the most bytes that it
had allocated after any operator of its third step, "process" the most that the process took. All contenders'
models are there at the same time, so choose a size of which so many fit.

With --hosts the bytes are counted that each host really sent, and the floor is what a step can hardly be
shorter than: the longer of compute alone (1/N of the batch through the whole model and its optimizer, and no
word to anybody) and bytes / rate.

dp_threads and dp_async are one process, so they and their contenders are run as commands, each once a
round, for --steps (20) steps. A run's time is the median of its steps, so its start is left out. Fresh loss
is that of the saved weights on batches that no run has seen.
"""

import argparse
import ctypes
import datetime
import functools
import gc
import importlib
import itertools
import json
import math
import os
import re
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.attention import sdpa_kernel
from torch.nn.parallel import data_parallel
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

ALONE = "compute alone"  # 1/N of the batch, the whole model, no word to anybody
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 1e-2}  # of weights after 3 steps
WHOLE = ("pipeline", "tensor_parallel", "checkpointing")  # their ranks all work on all of the batch
LESSONS = ("dp_threads", "dp_async", "ddp", "zero1", "zero2", "zero3", *WHOLE)


# ---- on a rank ----


def finish(device):
    """Wait for all that was begun, on all streams, by all ranks: between timed stretches, never in a step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def bytes_sent():
    """By this host's link so far, headers and all."""
    link = os.environ.get("GLOO_SOCKET_IFNAME")
    lines = Path("/proc/self/net/dev").read_text().splitlines() if link else []
    return next((int(line.split()[9]) for line in lines if line.strip().startswith(f"{link}:")), 0)


def timed(step, times, device):
    """(ms, bytes sent) of a step, of so many on this rank.

    By the clock on the wall, as CUDA's events on one stream would leave out what other streams still send.
    """
    finish(device)
    before, start = bytes_sent(), time.perf_counter()
    for _ in range(times):
        step()
    finish(device)
    return 1e3 * (time.perf_counter() - start) / times, (bytes_sent() - before) / times


class Race:
    """The contenders of one lesson on this rank."""

    def __init__(self, lesson, bench, flags):
        from contenders import contenders  # slow to load, and needed on ranks alone

        self.config = lesson.parse(flags)
        self.device, text = lesson.set_up(self.config)
        torch.set_num_threads(1)
        also = {f"{lesson.__name__}.py {more}": more for more in bench.also}
        self.configs = {title: lesson.parse([*flags, *shlex.split(more)]) for title, more in also.items()}
        for config in self.configs.values():
            lesson.set_up(config)
        self.builders = contenders(lesson, self.config, self.device, self.configs)
        whole, share = lesson.__name__ in WHOLE, (dist.get_rank(), dist.get_world_size())
        self.batches = {}
        for title in self.builders:
            share_of = () if whole and title != ALONE else share
            config = self.configs.setdefault(title, self.config)
            self.batches[title] = list(lesson.microbatches(config, text, 1, self.device, *share_of))
        self.kernels = getattr(lesson, "KERNELS", {})

    def step(self, title, entry):
        config = self.configs[title]
        kernel = self.kernels.get(getattr(config, "attention", None))
        with sdpa_kernel(kernel) if kernel else nullcontext():
            entry.step(self.batches[title], config)

    def compare(self, entries):
        """End all if some weights differ after three steps. Returns the largest difference."""
        for title, entry in entries.items():
            for _ in range(3):
                self.step(title, entry)
        (_, first), *others = entries.items()
        expected, worst = {key: tensor.clone() for key, tensor in first.weights().items()}, 0.0
        for title, entry in others:
            weights = entry.weights()  # with the help of all ranks
            pairs = ((expected[key].double(), weights[key].double()) for key in expected)
            each = [(a - b.to(a.device)).abs().max().cpu() for a, b in pairs]
            apart = torch.stack(each).max().item() if each else 0  # nan, if any is
            if title == ALONE and dist.get_world_size() > 1:
                continue
            if not apart < TOLERANCE[self.config.dtype]:
                sys.exit(f"{title} ended {apart:.1e} from the lesson: its time would mean nothing")
            worst = max(worst, apart)
        return worst

    def run(self, rounds):
        """{apart, rows: {title: times and bytes of the rounds}}."""
        entries = {title: build() for title, build in self.builders.items() if build}
        apart, titles = self.compare(entries), list(entries)
        rows = {title: {"times": [], "sent": []} for title in titles}
        for turn in range(rounds):
            for title in titles[turn % len(titles) :] + titles[: turn % len(titles)]:
                step = functools.partial(self.step, title, entries[title])
                numbers = torch.tensor(timed(step, self.config.steps, self.device), dtype=torch.double)
                numbers = numbers.to(self.device)
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX)  # the slowest rank, and the busiest
                rows[title]["times"].append(numbers[0].item())
                rows[title]["sent"].append(numbers[1].item())
        missing = [title for title, build in self.builders.items() if not build]
        return {"apart": apart, "rows": rows, "missing": missing}

    def memory(self, title):
        """[live, process]: bytes of one contender in three steps, the most of any rank."""
        entry = self.builders[title]()
        for i in range(3):
            if self.device.type == "cuda" and i == 2:
                torch.cuda.reset_peak_memory_stats()
            self.step(title, entry)
        process = (1 if sys.platform == "darwin" else 1024) * resource.getrusage(
            resource.RUSAGE_SELF
        ).ru_maxrss
        live = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        if live is None:  # once more, as what else a first time loads and allocates is there then
            with HeapPeak():
                self.step(title, entry)
            del entry
            gc.collect()
            before, entry = heap(), self.builders[title]()
            for _ in range(2):  # torch's DDP builds its buckets anew in the second
                self.step(title, entry)
            with HeapPeak() as meter:
                self.step(title, entry)
            live = meter.peak - before
        numbers = torch.tensor([live, process], dtype=torch.double, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()


class HeapInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]


def heap():
    """Bytes that malloc has given out and not got back, from and to whichever thread; nan if not on glibc."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return math.nan
    mallinfo.restype = HeapInfo
    info = mallinfo()
    return info.field4 + info.field7  # large pieces, and the others


class HeapPeak(TorchDispatchMode):
    """The most that heap() is after an operator."""

    peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.peak = max(self.peak, heap())
        return result


def main_of_rank(bench, flags):
    name = bench.lessons[0]
    race = Race(importlib.import_module(name), bench, flags)
    result = race.memory(bench.alone) if bench.alone else race.run(bench.rounds)
    if dist.get_rank() == 0:
        Path(bench.out).write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # peers leave groups and threads behind, which would now and then abort the usual end


# ---- around the ranks ----


def launcher(ranks):
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]


def call(command, **options):
    """Its exit code. If this process is told to end, the other one ends first, and what it started."""
    process = subprocess.Popen(command, **options)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def launch(name, bench, flags, *more):
    """What rank 0 of a fresh set of processes wrote."""
    start = launcher(bench.ranks)
    if bench.hosts > 1 and "--alone" not in more:
        start = [str(ROOT / "tools" / "hosts.sh"), str(bench.hosts), bench.rate, "--"]
    also = [f"--also={text}" for text in bench.also]
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        own = [f"--ranks={bench.ranks}", f"--rounds={bench.rounds}", *also, "--out", out, *more]
        environment = {**os.environ, "PYTHON": sys.executable, "KINETO_LOG_LEVEL": "99"}
        code = call([*start, os.path.abspath(__file__), name, *own, *flags], env=environment)
        if code:
            sys.exit(f"bench.py: {name} ended with exit code {code}")
        return json.loads(Path(out).read_text())


def bytes_per_second(rate):
    """Of a rate in tc's words: 1gbit, 100mbit. ValueError if it is none."""
    words = re.fullmatch(r"(\d+\.?\d*)([kmg]?)bit", rate)
    if not words:
        raise ValueError(f"--rate {rate}: must be like 1gbit or 100mbit")
    number, unit = words.groups()
    return float(number) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[unit] / 8


def table_of(name, bench, flags):
    """{title: numbers} of a lesson and its contenders, printed."""
    result = launch(name, bench, flags)
    first, table = result["rows"][f"{name}.py"]["times"], {}
    alone = statistics.median(result["rows"][ALONE]["times"])
    for title, row in result["rows"].items():
        ratios = [a / b for a, b in zip(first, row["times"])]
        table[title] = {"ms": statistics.median(row["times"]), "ratio": statistics.median(ratios)}
        table[title] |= {"least": min(ratios), "most": max(ratios)}
        if bench.hosts > 1:
            sent = statistics.median(row["sent"])
            floor = max(alone, 1e3 * sent / bytes_per_second(bench.rate))
            table[title] |= {"sent": sent, "floor_ms": floor}
        if bench.memory:
            live, process = launch(name, bench, flags, "--alone", title)
            table[title] |= {"live_bytes": live, "process_bytes": process}
    show(name, bench, flags, result, table)
    return table


def show(name, bench, flags, result, table):
    where = f"{bench.hosts} hosts, {bench.rate}" if bench.hosts > 1 else f"{bench.ranks} ranks, one host"
    print(f"{name} {' '.join(flags)} | {where} | {bench.rounds} rounds | torch {torch.__version__}")
    print(f"after 3 steps weights differ by {result['apart']:.1e} at most")
    wide = max(map(len, [*table, *result["missing"]]))
    heading = f"  {'':<{wide}}{'ms/step':>9}{'ratio':>8}{'least':>8}{'most':>8}"
    heading += f"{'live MB':>10}{'process':>9}" if bench.memory else ""
    print(heading + (f"{'sent MB':>10}{'floor':>9}{'/floor':>8}" if bench.hosts > 1 else ""))
    for title, row in table.items():
        line = (
            f"  {title:<{wide}}{row['ms']:>9.1f}{row['ratio']:>8.3f}{row['least']:>8.3f}{row['most']:>8.3f}"
        )
        if bench.memory:
            line += f"{row['live_bytes'] / 1e6:>10.2f}{row['process_bytes'] / 1e6:>9.0f}"
        if bench.hosts > 1:
            line += f"{row['sent'] / 1e6:>10.2f}{row['floor_ms']:>9.1f}{row['ms'] / row['floor_ms']:>8.2f}"
        print(line)
    for title in result["missing"]:
        print(f"  {title:<{wide}} not installed")
    print(flush=True)


# ---- lessons of one process ----

THREADS = {"dp_threads": "--replicas", "dp_async": "--workers"}
FRESH = range(10**6, 10**6 + 8)  # steps whose batches no run has seen


def commands(name, bench, flags):
    """{name: command} of what is run in turn: the lesson, other flags of it, other lessons."""
    script = lambda name: [sys.executable, str(ROOT / f"{name}.py")]  # noqa: E731
    alone = [*script(name), THREADS[name], str(bench.ranks), *flags]
    entries = {f"{name}.py": alone}
    entries |= {f"{name}.py {more}": [*alone, *shlex.split(more)] for more in bench.also}
    if name == "dp_threads":
        entries["dp_threads.py --no-threads"] = [*alone, "--no-threads"]
        entries["ddp.py"] = [*launcher(bench.ranks), str(ROOT / "ddp.py"), *flags]
        entries["single.py"] = [*script("single"), *flags]
        if torch.cuda.device_count() > 1:
            entries["torch DataParallel"] = [sys.executable, __file__, "--data-parallel", *flags]
    else:  # as many updates as asp makes, each from as many sequences, and none of them stale
        parser = importlib.import_module("single").flags()
        config, _ = parser.parse_known_args(flags)
        default = vars(parser.parse_args([]))
        plain = [f"--{name}={value}" for name, value in vars(config).items() if value != default[name]]
        fewer = ["--batch", str(config.batch // bench.ranks), "--steps", str(config.steps * bench.ranks)]
        entries["single.py " + " ".join(fewer)] = [*script("single"), *plain, *fewer]
    return entries


def fresh_loss(weights, flags):
    """Mean loss of saved weights on batches of steps that were not trained on."""
    lesson = importlib.import_module("single")
    parser = lesson.flags()
    config, _ = parser.parse_known_args(flags)
    device, text = lesson.set_up(config)
    model = lesson.GPT(config).to(device)
    model.load_state_dict(weights)
    with torch.no_grad():
        batches = [next(lesson.microbatches(config, text, step, device)) for step in FRESH]
        return statistics.mean(model(*batch).item() for batch in batches)


def train_with_data_parallel(flags):
    """single.py, its model's outputs computed by torch's DataParallel on all GPUs."""
    single = importlib.import_module("single")

    class Parallel(single.GPT):
        def forward(self, inputs, targets=None):
            if hasattr(self, "_former_parameters"):  # a replica
                return super().forward(inputs)
            logits = data_parallel(self, inputs)
            return logits if targets is None else single.mean_loss(logits, targets)

    single.GPT = Parallel
    single.train(single.parse(flags))


def run_of_command(command, flags):
    """(result, weights, loss on fresh batches) of a whole run."""
    with tempfile.TemporaryDirectory() as folder:
        files = ["--json", f"{folder}/out.json", "--save", f"{folder}/out.pt"]
        if code := call([*command, *files], cwd=ROOT, stdout=subprocess.DEVNULL):
            sys.exit(f"bench.py: exit code {code} of {shlex.join(command)}")
        weights = torch.load(f"{folder}/out.pt")
        return json.loads(Path(f"{folder}/out.json").read_text()), weights, fresh_loss(weights, flags)


def main_of_commands(name, bench, flags):
    """The table of a lesson that is one process. The weights are compared first, but for asp and ssp."""
    entries, runs, first = commands(name, bench, flags), {}, None
    for turn in range(bench.rounds):
        for i in range(len(entries)):
            title = list(entries)[(turn + i) % len(entries)]
            result, weights, loss = run_of_command(entries[title], flags)
            first = first or weights
            apart = max((weights[key].double() - first[key].double()).abs().max().item() for key in weights)
            if name == "dp_threads" and not apart < 10 * TOLERANCE[result["dtype"]]:
                sys.exit(f"{title} ended {apart:.1e} from the first: its time would mean nothing")
            ms, speed = statistics.median(result["step_ms"]), result.get("sequences_per_s", math.nan)
            runs.setdefault(title, []).append((ms, speed, loss))
    print(f"{name} {' '.join(flags)} | {bench.rounds} rounds | torch {torch.__version__}")
    if name == "dp_threads":
        print("in all runs all weights were equal at the end")
    print(f"{'':<38}{'ms/step':>9}{'ratio':>8}{'least':>8}{'most':>8}{'sequences/s':>13}{'fresh loss':>12}")
    table = {}
    for title in entries:
        ratios = [a[0] / b[0] for a, b in zip(runs[f"{name}.py"], runs[title])]
        ms, speed, loss = map(statistics.median, zip(*runs[title]))
        row = {"ms": ms, "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        table[title] = row | {"sequences_per_s": None if math.isnan(speed) else speed, "fresh_loss": loss}
        numbers = f"{ms:>9.1f}{row['ratio']:>8.3f}{row['least']:>8.3f}{row['most']:>8.3f}"
        print(f"  {title:<36}{numbers}{speed:>13.1f}{loss:>12.4f}".replace("nan", "   "))
    print(flush=True)
    return table


def parse(words):
    """(what is for this tool, {lesson: its flags}) of the command line."""
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.error = refuse
    parser.add_argument("--ranks", type=int, help="processes on one host (default: 2)")
    parser.add_argument("--hosts", type=int, default=1, help="hosts of one rank each, in network namespaces")
    parser.add_argument("--rate", default="1gbit", help="of each host's link: 1gbit, 100mbit ...")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--also", action="append", default=[], help="the lesson once more, with these flags")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="times alone")
    parser.add_argument("--json", help="file for the tables, and when and where they were made")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    bench, flags = parser.parse_known_args(words[count:])
    bench.lessons = [word.removesuffix(".py") for word in words[:count]] or list(LESSONS)
    unknown = [name for name in bench.lessons if name not in LESSONS]
    if unknown:
        refuse(f"{unknown[0]}: must be one of {', '.join(LESSONS)}")
    if bench.ranks and bench.hosts > 1:
        refuse(f"--ranks {bench.ranks}: each of the --hosts {bench.hosts} has one; leave it out")
    bench.ranks = bench.hosts if bench.hosts > 1 else 2 if bench.ranks is None else bench.ranks
    if bench.rounds < 1 or bench.ranks < 1 or bench.hosts < 1:
        refuse("--rounds, --ranks and --hosts: must be 1 or more")
    try:
        bytes_per_second(bench.rate)
    except ValueError as error:
        refuse(error)
    if bench.json and not Path(bench.json).resolve().parent.is_dir():
        refuse(f"--json {bench.json}: its folder does not exist")
    bench.flags = with_defaults(flags, size="small", batch="8")
    return bench, {name: flags_of(name, bench) for name in bench.lessons}


def with_defaults(flags, **defaults):
    given = {word.split("=")[0] for word in flags}
    more = [[f"--{name}", value] for name, value in defaults.items() if f"--{name}" not in given]
    return [*itertools.chain(*more), *flags]


def flags_of(name, bench):
    """The flags of a lesson, which must be able to run on them."""
    lesson = importlib.import_module(name)
    flags = with_defaults(bench.flags, steps="20" if name in THREADS else "3")
    for more in "", *bench.also:
        config = lesson.parse([*flags, *shlex.split(more)])
        if config.batch % (bench.ranks * config.accum):
            refuse(
                f"--batch {config.batch}: must be a multiple of {bench.ranks} ranks x --accum {config.accum}"
            )
    return flags


def refuse(problem):
    print(f"bench.py: {problem}", file=sys.stderr)
    sys.exit(2)


def main(bench, flags_of_lessons):
    start = datetime.datetime.now().isoformat(" ", "minutes")
    made = {"date": start, "torch": torch.__version__, "command": shlex.join(sys.argv), "flags": bench.flags}
    made |= {"machine": f"{os.cpu_count()} cores, {torch.cuda.device_count()} GPUs", "lessons": {}}
    made |= {"ranks": bench.ranks, "hosts": bench.hosts, "rate": bench.rate if bench.hosts > 1 else None}
    for name, flags in flags_of_lessons.items():
        table = main_of_commands if name in THREADS else table_of
        made["lessons"][name] = table(name, bench, flags)
        if bench.json:
            Path(bench.json).write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that call() takes down what it started
    if "--data-parallel" in sys.argv:
        train_with_data_parallel([word for word in sys.argv[1:] if word != "--data-parallel"])
    else:
        bench, flags = parse(sys.argv[1:])
        if "RANK" in os.environ:
            main_of_rank(bench, flags[bench.lessons[0]])
        else:
            main(bench, flags)
