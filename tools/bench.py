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
that the lesson was faster. Then each contender runs three steps in processes of its own: "live" is the most
bytes that tensors took at once in the third step (on a GPU, that were allocated), "process" what the process
took.

With --hosts the bytes are counted that each host really sent, and no step can take less than the floor: the
longer of compute alone (1/N of the batch through the whole model, and no word to anybody) and bytes / rate.

dp_threads and dp_async are one process, so they and their contenders are run as commands, each once a
round, for --steps (20) steps. A run's time is the median of its steps, so its start is left out. Fresh loss
is that of the saved weights on batches that no run has seen.
"""

import argparse
import datetime
import gc
import importlib
import json
import math
import os
import re
import resource
import shlex
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

ALONE = "compute alone"  # 1/N of the batch, the whole model, no word to anybody
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 1e-2}  # of weights after 3 steps
WHOLE = ("pipeline", "tensor_parallel", "checkpointing")  # their ranks all work on all of the batch
LESSONS = ("dp_threads", "dp_async", "ddp", "zero1", "zero2", "zero3", *WHOLE)


# ---- on a rank ----


def finish():
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # between timed stretches, never within a step
    dist.barrier()


def bytes_sent():
    """By this host's link so far, headers and all."""
    link = os.environ.get("GLOO_SOCKET_IFNAME")
    lines = Path("/proc/self/net/dev").read_text().splitlines() if link else []
    return next((int(line.split()[9]) for line in lines if line.strip().startswith(f"{link}:")), 0)


def timed(entry, batches, config):
    """(ms, bytes sent) of a step, over --steps steps on this rank."""
    finish()
    before, start = bytes_sent(), time.perf_counter()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if batches[0][0].is_cuda else []
    for event in events[:1]:
        event.record()
    for _ in range(config.steps):
        entry.step(batches, config)
    for event in events[1:]:
        event.record()
    finish()
    ms = events[0].elapsed_time(events[1]) if events else 1e3 * (time.perf_counter() - start)
    return ms / config.steps, (bytes_sent() - before) / config.steps


class Race:
    """The contenders of one lesson on this rank."""

    def __init__(self, lesson, bench, flags):
        from contenders import contenders  # slow to load, and needed on ranks alone

        self.config = lesson.parse(flags)
        self.device, text = lesson.set_up(self.config)
        torch.set_num_threads(1)
        also = {f"{lesson.__name__}.py {more}": more for more in bench.also}
        also = {title: lesson.parse([*flags, *shlex.split(more)]) for title, more in also.items()}
        for config in also.values():
            lesson.set_up(config)
        self.builders = contenders(lesson, self.config, self.device, also)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        batches = lambda *share: list(lesson.microbatches(self.config, text, 1, self.device, *share))  # noqa: E731
        if self.config.batch % (ranks * self.config.accum):
            sys.exit(f"--batch {self.config.batch}: must be a multiple of {ranks} ranks x --accum")
        self.share = batches(rank, ranks)
        self.batches = batches() if lesson.__name__ in WHOLE else self.share
        kernel = getattr(lesson, "KERNELS", {}).get(getattr(self.config, "attention", None))
        self.kernel = lambda: sdpa_kernel(kernel) if kernel else nullcontext()

    def step(self, title, entry):
        entry.step(self.share if title == ALONE else self.batches, self.config)

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
            apart = max(((a - b.to(a.device)).abs().max().item() for a, b in pairs), default=0)
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
        with self.kernel():
            for turn in range(rounds):
                for title in titles[turn % len(titles) :] + titles[: turn % len(titles)]:
                    batches = self.share if title == ALONE else self.batches
                    numbers = torch.tensor(timed(entries[title], batches, self.config), dtype=torch.double)
                    numbers = numbers.to(self.device)
                    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)  # the slowest rank, and the busiest
                    rows[title]["times"].append(numbers[0].item())
                    rows[title]["sent"].append(numbers[1].item())
        missing = [title for title, build in self.builders.items() if not build]
        return {"apart": apart, "rows": rows, "missing": missing}

    def memory(self, title):
        """[live, process]: bytes of one contender in three steps, the most of any rank."""
        entry = self.builders[title]()
        for _ in range(3):
            self.step(title, entry)
        process = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        live = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        if live is None:  # once more, as the profiler sees only what is born under its eyes
            del entry
            gc.collect()
            with tempfile.NamedTemporaryFile(suffix=".json") as trace:
                with torch.profiler.profile(profile_memory=True) as profiler:
                    entry = self.builders[title]()
                    for _ in range(2):  # torch's DDP builds its buckets anew in the second
                        self.step(title, entry)
                    with torch.profiler.record_function("third step"):
                        self.step(title, entry)
                profiler.export_chrome_trace(trace.name)
                live = peak_of(json.loads(Path(trace.name).read_text())["traceEvents"])
        numbers = torch.tensor([live, process], dtype=torch.double, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()


def peak_of(events):
    """The most bytes alive in the third step, from all allocations since the profiler began."""
    step = next(event for event in events if event["name"] == "third step" and event["ph"] == "X")
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    alive = peak = 0
    for at, change in changes:
        alive += change
        if step["ts"] <= at <= step["ts"] + step["dur"]:
            peak = max(peak, alive)
    return peak


def main_of_rank(bench, flags):
    name = bench.lessons[0]
    race = Race(importlib.import_module(name), bench, flags)
    with race.kernel():
        result = race.memory(bench.alone) if bench.alone else race.run(bench.rounds)
    if dist.get_rank() == 0:
        Path(bench.out).write_text(json.dumps(result))
    dist.destroy_process_group()


# ---- around the ranks ----


def launch(name, bench, flags, *more):
    """What rank 0 of a fresh set of processes wrote."""
    start = launcher(bench.ranks)
    if bench.hosts > 1 and "--alone" not in more:
        start = [str(ROOT / "tools" / "hosts.sh"), str(bench.hosts), bench.rate, "--"]
    also = [f"--also={text}" for text in bench.also]
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        own = [f"--rounds={bench.rounds}", *also, "--out", out, *more]
        environment = {**os.environ, "PYTHON": sys.executable, "KINETO_LOG_LEVEL": "99"}
        done = subprocess.run([*start, os.path.abspath(__file__), name, *own, *flags], env=environment)
        if done.returncode:
            sys.exit(f"tools/bench.py: {name} ended with exit code {done.returncode}")
        return json.loads(Path(out).read_text())


def bytes_per_second(rate):
    """Of a rate in tc's words: 1gbit, 100mbit."""
    number, unit = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate).groups()
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
    heading = f"{'':<36}{'ms/step':>9}{'ratio':>8}{'least':>8}{'most':>8}"
    heading += f"{'live MB':>10}{'process':>9}" if bench.memory else ""
    print(heading + (f"{'sent MB':>10}{'floor':>9}{'/floor':>8}" if bench.hosts > 1 else ""))
    for title, row in table.items():
        line = f"  {title:<34}{row['ms']:>9.1f}{row['ratio']:>8.3f}{row['least']:>8.3f}{row['most']:>8.3f}"
        if bench.memory:
            line += f"{row['live_bytes'] / 1e6:>10.2f}{row['process_bytes'] / 1e6:>9.0f}"
        if bench.hosts > 1:
            line += f"{row['sent'] / 1e6:>10.2f}{row['floor_ms']:>9.1f}{row['ms'] / row['floor_ms']:>8.2f}"
        print(line)
    for title in result["missing"]:
        print(f"  {title:<34} not installed")
    print(flush=True)


# ---- lessons of one process ----

THREADS = {"dp_threads": "--replicas", "dp_async": "--workers"}
FRESH = range(10**6, 10**6 + 8)  # steps whose batches no run has seen


def launcher(ranks):
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]


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
            entries["torch DataParallel"] = [
                sys.executable,
                os.path.abspath(__file__),
                "--data-parallel",
                *flags,
            ]
    else:  # as many updates as asp makes, each from as many sequences, and none of them stale
        config, known = importlib.import_module("single").flags().parse_known_args(flags)
        plain = [flag for flag in flags if flag not in known]
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
        subprocess.run([*command, *files], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
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


def parse():
    """(what is for this tool, what is for the lesson)."""
    words = sys.argv[1:]
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (on one host)")
    parser.add_argument("--hosts", type=int, default=1, help="hosts of one rank each, in network namespaces")
    parser.add_argument("--rate", default="1gbit", help="of each host's link: 1gbit, 100mbit ...")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--also", action="append", default=[], help="the lesson once more, with these flags")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="times alone")
    parser.add_argument("--json", help="file for the tables, and when and where they were made")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--data-parallel", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    bench, flags = parser.parse_known_args(words[count:])
    bench.lessons = [word.removesuffix(".py") for word in words[:count]] or list(LESSONS)
    unknown = [name for name in bench.lessons if name not in LESSONS]
    if unknown:
        parser.error(f"{unknown[0]}: must be one of {', '.join(LESSONS)}")
    if bench.rounds < 1 or bench.ranks < 1 or bench.hosts < 1:
        parser.error("--rounds, --ranks and --hosts: must be 1 or more")
    if not re.fullmatch(r"[\d.]+[kmg]?bit", bench.rate):
        parser.error(f"--rate {bench.rate}: must be like 1gbit or 100mbit")
    for flag, value in {"--size": "small", "--batch": "8"}.items():
        flags += [] if flag in flags else [flag, value]
    bench.ranks = bench.hosts if bench.hosts > 1 else bench.ranks
    return bench, flags


def main(bench, flags):
    start = datetime.datetime.now().isoformat(" ", "minutes")
    made = {"date": start, "torch": torch.__version__, "command": shlex.join(sys.argv), "lessons": {}}
    made |= {"machine": f"{os.cpu_count()} cores, {torch.cuda.device_count()} GPUs"}
    made |= {"ranks": bench.ranks, "hosts": bench.hosts, "rate": bench.rate if bench.hosts > 1 else None}
    for name in bench.lessons:
        steps = [] if "--steps" in flags else ["--steps", "20" if name in THREADS else "3"]
        if name in THREADS:
            made["lessons"][name] = main_of_commands(name, bench, [*flags, *steps])
        else:
            made["lessons"][name] = table_of(name, bench, [*flags, *steps])
        if bench.json:
            Path(bench.json).write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bench, flags = parse()
    if "RANK" in os.environ:
        main_of_rank(bench, flags)
    elif bench.data_parallel:
        train_with_data_parallel(flags)
    else:
        main(bench, flags)
