"""Lessons beside PyTorch's own modules and DeepSpeed: same weights, batches and threads, turn by turn.

    python bench/bench.py                                 (every lesson, 2 ranks, size small)
    python bench/bench.py ddp zero3 --ranks 2 --size small --batch 8
    python bench/bench.py zero3 --hosts 2 --rate 1gbit    (Linux and root: see bench/hosts.sh)
    python bench/bench.py zero3 --also "--prefetch 0" --also=--no-reshard    (what each idea buys)
    python bench/bench.py zero1 --beside ddp              (one lesson beside another)
    python bench/bench.py --host --dtype bf16             (host time)

Lessons come first, then flags: those below, and the lessons' own (--size, --batch, --dtype, --device ...).

First all train three steps and must end in equal weights. Then rounds, each begun by another one: each runs
--steps (3) steps. The lesson is its own train(), unmodified, in a thread that waits for its turns. All get
the same batches, made once, and peers add up the ranks' losses at a step's end where the lesson does. A line
shows the median time of a step, and the ratio of the lesson's time to it: median, least and greatest over the
rounds; below 1 the lesson was faster. Then each runs in processes of its own: "live" is the most bytes
allocated after any operator of its third step, "process" the most that the process took.

--twice: then once more, slowed: MKL's products as on any processor (SSE2), by which those in fp32 took 2.4
times as long on that of docs/results; without comparing weights again, and with the fastest peers alone.
--peer FSDP2: only peers whose title has this; --peer none: no peer.

COMPILE=1 in the environment: the blocks and the loss of all go through torch.compile. SLEEP=12: blocks sleep
for 12 ms in forward and 24 in backward in place of computing, so that sending need not share the cores.

With --hosts the bytes are counted that each host really sent, and the floor is what a step can hardly be
shorter than: the longer of compute alone (1/N of the batch, nothing sent) and bytes / rate. With --host times
are the process's on its cores, of a tiny model; single.py runs beside it, and in bf16 the lesson in fp32.
"""

import argparse
import contextlib
import ctypes
import datetime
import gc
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import resource
import shlex
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from limit import run_to_its_end
from ratios import ALONE, kind_of
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
OWN_FLAGS = {"expert_parallel": ["--balance=0"]}  # as peers do
OWN_FLAGS |= {"diloco": ["--outer-lr=1", "--outer-momentum=0", "--inner-steps=3"]}
OWN_FLAGS |= {"dp_threads": ["--replicas=1"], "dp_async": ["--workers=1"]}  # ranks are processes here
UNSPLIT = "pipeline zero_bubble pipeline_v tensor_parallel sequence_parallel context_parallel expert_parallel"
UNSPLIT = f"{UNSPLIT} expert_zero parallel_3d checkpointing zero_r".split()  # for all ranks the same batch
SPLIT = "collectives ddp uneven zero1 zero2 zero3 hsdp muon diloco offload fusion resume survive"
LESSONS = (*SPLIT.split(), *UNSPLIT)
ALL = ("single", "dp_threads", "dp_async", *LESSONS)  # the first three with --host alone
SLOWED = {"MKL_CBWR": "COMPATIBLE"}
# Root mean square over all weights (AdamW makes whole steps of rounding noise in single ones).
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-6, "bf16": 5e-4}


# ---- on a rank ----


def load(name):
    """A module of a lesson for one contender alone, as its functions are replaced."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    lesson = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lesson)
    if os.environ.get("SLEEP"):
        lesson.Block.forward = sleep_instead
    if os.environ.get("COMPILE"):  # of lessons and peers alike, without a line in either
        lesson.Block.forward = torch.compile(lesson.Block.forward)
        lesson.mean_loss = torch.compile(lesson.mean_loss)
    return lesson


class Sleep(torch.autograd.Function):
    """What a block takes, without its work; its gradients are small multiples of its parameters."""

    @staticmethod
    def forward(ctx, x, *params):
        ctx.params = params
        time.sleep(float(os.environ["SLEEP"]) / 1e3)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * float(os.environ["SLEEP"]) / 1e3)
        return grad, *(1e-3 * param for param in ctx.params)


def sleep_instead(block, x):
    parts = block.modules()  # whose parameters() a wrapped module refuses
    return Sleep.apply(x, *(param for part in parts for param in part._parameters.values()))


def loader_of(lesson):
    """The name of its function that loads a step's batches: in uneven.py not the toy model's."""
    return "load_microbatches" if hasattr(lesson, "load_microbatches") else "microbatches"


class Ours:
    """A lesson's own train(), in a thread that waits for its turns: step() lets it take a step."""

    def __init__(self, name, flags):
        self.lesson = load(name)
        self.config = self.lesson.parse(flags)
        self.may_go = threading.Semaphore(0)
        self.has_stopped = threading.Semaphore(0)
        self.error = None
        loader = loader_of(self.lesson)
        microbatches, made = getattr(self.lesson, loader), {}

        def begin(config, text, step, *more):
            self.has_stopped.release()
            self.may_go.acquire()
            if more not in made:
                made[more] = list(microbatches(config, text, 1, *more))
            return list(made[more]) if documents else iter(made[more])

        documents = loader == "load_microbatches"
        setattr(self.lesson, loader, begin)
        self.lesson.print_step = lambda *_: None
        threading.Thread(target=self.train, daemon=True).start()
        self.step()  # builds all, up to its first turn

    def train(self):
        self.may_go.acquire()
        try:
            with contextlib.redirect_stdout(None):
                self.lesson.train(self.config)
        except BaseException as error:
            self.error = error
        self.has_stopped.release()

    def step(self, batches=None):
        self.may_go.release()
        self.has_stopped.acquire()
        if self.error:
            raise self.error


def finish(device):
    """Wait for all that was begun, on all streams, by all ranks: between timed stretches, never in a step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def bytes_sent():
    """By this host's link so far, headers and all."""
    link = os.environ.get("GLOO_SOCKET_IFNAME")
    lines = Path("/proc/self/net/dev").read_text().splitlines() if link else []
    return next((int(line.split()[9]) for line in lines if line.strip().startswith(f"{link}:")), 0)


class Race:  # the contenders of one lesson on this rank
    def __init__(self, name, bench, flags):
        from peers import peers_of  # slow to load, and needed on ranks alone

        self.bench = bench
        self.lesson = load(name)
        own = [*flags, *OWN_FLAGS.get(name, [])]
        self.config = self.lesson.parse(own)
        with contextlib.redirect_stdout(None):
            self.device, text = self.lesson.set_up(self.config, replicas=1 if name in UNSPLIT else None)
        torch.set_num_threads(1)
        share = (0, 1) if name in UNSPLIT else (dist.get_rank(), dist.get_world_size())
        if name == "uneven":
            text = self.lesson.cut_documents(text, self.config.context)
        load_batches = getattr(self.lesson, loader_of(self.lesson))
        self.batches = list(load_batches(self.config, text, 1, self.device, *share))
        part = self.config.batch // dist.get_world_size() // self.config.accum
        self.part = self.batches
        if name != "uneven":  # whose documents are dealt already
            self.part = [(inputs[:part], targets[:part]) for inputs, targets in self.batches]
        self.alone = ALONE
        self.adds_losses = "dist.all_reduce(loss)" in inspect.getsource(self.lesson)
        self.ours = {f"{name}.py": (name, own)}
        self.ours |= {f"{name}.py {shlex.join(more)}": (name, [*own, *more]) for more in bench.also}
        if name not in (
            "expert_parallel",
            "muon",
            "diloco",
            "uneven",
        ):  # other models
            self.ours |= {f"{other}.py": (other, flags) for other in bench.beside}
        peers = peers_of(name)
        self.peers = {title: build for title, build in peers.items() if title == ALONE or bench.peer in title}
        if len(self.peers) == 1 < len(peers) and bench.peer != "none":
            sys.exit(f"--peer {bench.peer}: must be none, or in one of: {'; '.join(set(peers) - {ALONE})}")
        if bench.slowed:
            self.peers = {title: build for title, build in self.peers.items() if title in bench.slowed}

    def build(self, title, steps, *more):
        if title in self.ours:
            name, own = self.ours[title]
            return Ours(name, [*own, "--steps", str(steps), *more])
        return self.peers[title](self.lesson, self.config, self.device)

    def step(self, title, entry):
        entry.step(self.part if title == self.alone else self.batches)
        if self.adds_losses and title != self.alone and title not in self.ours:
            dist.all_reduce(torch.zeros((), device=self.device))

    def weights(self, title, folder):
        """After three steps."""
        entry = self.build(title, 3, "--save", f"{folder}/weights.pt")
        for _ in range(3):
            entry.step(self.batches)
        if title not in self.ours:
            return entry.weights()
        dist.barrier()
        return torch.load(f"{folder}/weights.pt", map_location=self.device) if dist.get_rank() == 0 else {}

    def compare(self, titles, folder):
        """End all if weights differ after three steps. Returns the largest root mean square difference."""
        expected = self.weights(titles[0], folder)
        worst = 0.0
        for title in titles[1:]:
            if title == self.alone and dist.get_world_size() > 1:
                continue
            weights = self.weights(title, folder)
            if not expected:
                continue
            pieces = [(expected[name].double() - weights[name].double()).flatten() for name in expected]
            apart = torch.cat(pieces).square().mean().sqrt().item()
            if not apart < TOLERANCE["bf16" if hasattr(self.lesson, "Muon") else self.config.dtype]:
                hint = "; or rounding chose another expert: try --seed" * hasattr(self.lesson, "MoE")
                sys.exit(f"{title} ended {apart:.1e} from the lesson: its time would mean nothing{hint}")
            worst = max(worst, apart)
        return worst

    def run(self, folder):
        """{apart, rows: {title: times and bytes of the rounds}, missing}."""
        titles = [*self.ours, *(title for title, build in self.peers.items() if build)]
        apart = 0.0 if self.bench.slowed else self.compare(titles, folder)
        entries = {title: self.build(title, 10**5) for title in titles}
        rows = {title: {"times": [], "sent": []} for title in titles}
        clock = time.process_time if self.bench.host else time.perf_counter
        for turn in range(-1, self.bench.rounds):  # the first to warm up
            for title in titles[turn % len(titles) :] + titles[: turn % len(titles)]:
                finish(self.device)
                before, started = bytes_sent(), clock()
                for _ in range(self.config.steps):
                    self.step(title, entries[title])
                finish(self.device)
                numbers = [1e3 * (clock() - started), bytes_sent() - before]
                numbers = torch.tensor(numbers, dtype=torch.double, device=self.device) / self.config.steps
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX)  # the slowest rank, and the busiest
                if turn >= 0:
                    rows[title]["times"].append(numbers[0].item())
                    rows[title]["sent"].append(numbers[1].item())
        missing = [title for title, build in self.peers.items() if not build]
        return {"apart": apart, "rows": rows, "missing": missing}

    def memory(self, title):
        """[live, process]: bytes of one contender in its third step, the most of any rank."""
        self.three_steps(title, contextlib.nullcontext())  # what a first time loads stays allocated
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self.three_steps(title, contextlib.nullcontext())
            live = torch.cuda.max_memory_allocated(self.device) - before
        else:
            before, meter = heap(), HeapPeak()
            self.three_steps(title, meter)
            live = meter.peak - before
        unit = 1 if sys.platform == "darwin" else 1024
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        numbers = torch.tensor([live, process], dtype=torch.double, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()

    def three_steps(self, title, meter):
        """Three steps, the third under the meter."""
        if title not in self.ours:
            peer = self.build(title, 3)
            for step in (1, 2, 3):
                with meter if step == 3 else contextlib.nullcontext():
                    peer.step(self.batches)
            return
        name, own = self.ours[title]
        lesson = load(name)
        loader = loader_of(lesson)
        microbatches = getattr(lesson, loader)

        def begin(config, text, step, *more):
            if step == 3:
                meter.__enter__()
            return microbatches(config, text, step, *more)

        def end(config, step, *_):
            if step == 3:
                meter.__exit__(None, None, None)

        setattr(lesson, loader, begin)
        lesson.print_step = end
        with contextlib.redirect_stdout(None):
            lesson.train(lesson.parse([*own, "--steps", "3"]))


class HeapInfo(ctypes.Structure):  # glibc's struct mallinfo2
    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]


def heap():
    """Bytes that malloc has given out and not got back, in all threads; nan without glibc 2.33 or later."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if not mallinfo:
        return math.nan
    mallinfo.restype = HeapInfo
    info = mallinfo()
    return info.field4 + info.field7  # large pieces, and the others


class HeapPeak(TorchDispatchMode):  # the most that heap() is after an operator
    peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.peak = max(self.peak, heap())
        return result


def main_of_rank(bench):
    race = Race(bench.lessons[0], bench, bench.flags)
    result = race.memory(bench.alone) if bench.alone else race.run(os.path.dirname(bench.out))
    if dist.get_rank() == 0:
        Path(bench.out).write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # peers leave groups and threads behind, which would now and then abort the usual end


# ---- around the ranks ----


def launch(name, bench, *more):
    """What rank 0 of a fresh set of processes wrote."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"--rounds={bench.rounds}", "--out", f"{folder}/out.json", *more]
        own += [f"--also={shlex.join(more)}" for more in bench.also]
        own += ["--host"] * bench.host + [f"--beside={other}" for other in bench.beside]
        own += [f"--peer={bench.peer}"] + [f"--slowed={title}" for title in bench.slowed]
        env = {**os.environ, **(SLOWED if bench.slowed else {})}
        env |= {"PYTHON": sys.executable, "KINETO_LOG_LEVEL": "99"}
        command = [os.path.abspath(__file__), name, *own, *bench.flags]
        if bench.hosts > 1 and "--alone" not in more:
            start = [f"{ROOT}/bench/hosts.sh", f"{bench.hosts}", bench.rate]
            start += ["--ranks-per-host", f"{bench.ranks // bench.hosts}", "--"]
            if code := run_to_its_end([*start, *command], env=env):
                sys.exit(f"bench.py: {name} ended with exit code {code}")
        else:
            from torch.distributed.run import main as torchrun  # here, as ranks need not load it

            with mock.patch.dict(os.environ, env):
                torchrun(["--local-addr=127.0.0.1", f"--nproc_per_node={bench.ranks}", *command])
        return json.loads(Path(f"{folder}/out.json").read_text())


def bytes_per_second(rate):
    """Of a rate in tc's words: 1gbit, 100mbit."""
    words = re.fullmatch(r"(\d+\.?\d*)([kmg]?)bit", rate)
    if not words or not float(words[1]):
        refuse(f"--rate {rate}: must be like 1gbit or 100mbit")
    number, unit = words.groups()
    return float(number) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[unit] / 8


def table_of(name, bench):
    """{title: numbers} of a lesson and its peers, printed."""
    result = launch(name, bench)
    first = result["rows"][f"{name}.py"]["times"]
    alone = statistics.median(result["rows"]["compute alone"]["times"])
    table = {}
    for title, row in result["rows"].items():
        ratios = [ours / theirs for ours, theirs in zip(first, row["times"])]
        numbers = {"ms": statistics.median(row["times"]), "ratio": statistics.median(ratios)}
        numbers |= {"least": min(ratios), "most": max(ratios)}
        if bench.memory and not bench.slowed:
            live, process = launch(name, bench, "--alone", title)
            numbers |= {"live MB": live / 1e6, "process MB": process / 1e6}
        if bench.hosts > 1:
            sent = statistics.median(row["sent"])
            floor = max(alone, 1e3 * sent / bytes_per_second(bench.rate))
            numbers |= {"sent MB": sent / 1e6, "floor": floor, "/floor": numbers["ms"] / floor}
        table[title] = numbers
    show(name, bench, result, table)
    return table


def show(name, bench, result, table):
    hosts = f"{bench.hosts} hosts, {bench.rate}" if bench.hosts > 1 else "one host"
    where = f"{bench.ranks} ranks, {hosts}" + ", slowed" * bool(bench.slowed) + ", host time" * bench.host
    where += ", blocks sleep" * bool(os.environ.get("SLEEP"))
    print(f"{name} {' '.join(bench.flags)} | {where} | {bench.rounds} rounds | torch {torch.__version__}")
    if not bench.slowed:
        print(f"after 3 steps weights differ by {result['apart']:.1e} (root mean square)")
    wide = max(map(len, [*table, *result["missing"]]))
    print(f"  {'':<{wide}}" + "".join(f"{column:>11}" for column in table[f"{name}.py"]))
    for title, numbers in table.items():
        cells = [f"{x:>11.{3 if key in ('ratio', 'least', 'most') else 2}f}" for key, x in numbers.items()]
        print(f"  {title:<{wide}}" + "".join(cells))
    for title in result["missing"]:
        print(f"  {title:<{wide}} not installed")
    print(flush=True)


def fastest(table):
    """Compute alone, and the fastest peer of each kind."""
    of_kind = {ALONE: ALONE}
    for title in sorted(table, key=lambda title: table[title]["ms"]):
        if title != ALONE and ".py" not in title:
            of_kind.setdefault(kind_of(title), title)
    return list(of_kind.values())


def refuse(problem):
    print(f"bench.py: {problem}", file=sys.stderr)
    sys.exit(2)


def parse(words):
    """What is for this tool; its flags are the lessons'."""
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--ranks", type=int, help="processes on a host (default: 2; with --hosts 1)")
    parser.add_argument("--hosts", type=int, default=1, help="hosts, in network namespaces")
    parser.add_argument("--rate", default="1gbit", help="of each host's link: 1gbit, 100mbit ...")
    parser.add_argument("--host", action="store_true", help="host time, of 48 layers of width 8 on one rank")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--also", action="append", default=[], type=shlex.split, help="flags, once more")
    parser.add_argument("--beside", action="append", default=[], choices=ALL, help="another lesson")
    parser.add_argument("--peer", default="", help="only peers whose title has these words")
    parser.add_argument("--twice", action="store_true", help="then slowed")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="times alone")
    parser.add_argument("--json", help="file for the tables, and when and where they were made")
    parser.add_argument("--slowed", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    bench, flags = parser.parse_known_args(words[count:])
    lessons = ALL if bench.host else LESSONS
    bench.lessons = [word.removesuffix(".py") for word in words[:count]] or list(lessons)
    for name in bench.lessons:
        if name not in lessons:
            refuse(f"{name}: must be one of {', '.join(lessons)}")
    bench.ranks = bench.hosts * ((2 if bench.hosts == 1 else 1) if bench.ranks is None else bench.ranks)
    if min(bench.rounds, bench.ranks, bench.hosts) < 1 or bench.hosts > 99:
        refuse("--rounds, --ranks and --hosts: must be 1 or more, and at most 99 hosts")
    if bench.json and (os.path.isdir(bench.json) or not os.path.isdir(os.path.dirname(bench.json) or ".")):
        refuse(f"--json {bench.json}: must be a file in a folder that exists")
    bytes_per_second(bench.rate)
    given = {word.split("=")[0] for word in flags}
    defaults = {"--size": "small", "--batch": "8", "--steps": "3"}
    if bench.host:
        bench.ranks, bench.memory, bench.beside = 1, False, ["single"]
        bench.also = [["--dtype", "fp32"]] if "bf16" in " ".join(flags) else []
        defaults |= {"--layers": "48", "--heads": "2", "--width": "8", "--context": "8"}
        defaults |= {"--batch": "1", "--accum": "1"}
    defaults = {flag: value for flag, value in defaults.items() if flag not in given}
    bench.flags = [*itertools.chain(*defaults.items()), *flags]
    return bench


def main(bench):
    for name, more in itertools.product(bench.lessons, [[], *bench.also]):
        config = load(name).parse([*bench.flags, *OWN_FLAGS.get(name, []), *more])  # which refuses bad flags
        parts = bench.ranks * config.accum
        if config.batch % parts:  # "compute alone" would compute nothing of the rest
            refuse(f"--batch {config.batch}: must be a multiple of ranks x --accum, {parts}")
    made = {"date": datetime.datetime.now().isoformat(" ", "minutes"), "torch": torch.__version__}
    made |= {"command": shlex.join(sys.argv), "flags": bench.flags, "lessons": {}, "slowed": {}}
    made |= {"machine": f"{os.cpu_count()} cores, {torch.cuda.device_count()} GPUs"}
    made |= {"hosts": bench.hosts, "ranks": bench.ranks, "rate": bench.rate}
    for part in ["lessons", "slowed"][: 1 + bench.twice]:
        for name in bench.lessons:
            bench.slowed = fastest(made["lessons"][name]) if part == "slowed" else []
            made[part][name] = table_of(name, bench)
            if bench.json:
                Path(bench.json).write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run = main_of_rank if "RANK" in os.environ else main
    run(parse(sys.argv[1:]))
