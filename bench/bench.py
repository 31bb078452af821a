"""How fast a lesson is beside PyTorch's own modules and DeepSpeed: same weights and batches, turn by turn.

    python bench/bench.py zero3                           (on 2 ranks; without a name, every lesson)
    python bench/bench.py zero3 --ranks 4 --size small --batch 16
    python bench/bench.py zero3 --also "--prefetch 0" --also zero2    (with other flags; another lesson)
    python bench/bench.py zero3 --also HEAD~9             (as it was in that commit)
    python bench/bench.py zero3 --hosts 2 --rate 1gbit    (over a link; Linux and root: see bench/hosts.sh)

Lessons come first, then flags: those below, and the lessons' own (--size, --batch, --dtype ...).

All contenders train three steps and must end in equal weights. Then they take turns, --steps (3) steps each;
every round begins with another one. The lesson is its own train(), unmodified, in a thread that waits for its
turns. All get the same batches, which were made before.

ms: the median time of a step. ratio: the lesson's time over this row's in the same round, its median, least
and most; below 1 the lesson was faster. MB: the most that was allocated on a GPU in a step. sent MB: what a
host sent in a step. MFU: 6P + 12Lhs FLOPs a token (PaLM, arXiv 2204.02311, appendix B; no recomputation),
over the GPUs' dense bf16 peak. "compute alone": 1/N of the batch through the whole model, without messages.

COMPILE=1 in the environment: the blocks and the loss of all contenders go through torch.compile.
"""

import argparse
import contextlib
import gc
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [f"{ROOT}/{folder}" for folder in (".", "bench", "tools")]
import peers_data  # noqa: E402
import peers_model  # noqa: E402
from lessons import asked, complete, lessons, path_of, special  # noqa: E402
from peer import alone  # noqa: E402

PEERS = peers_data.PEERS | peers_model.PEERS  # a lesson joins by a row there
ALONE = "compute alone"
# Root mean square over all weights (AdamW makes whole steps of rounding noise in single ones).
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-6, "bf16": 5e-4}
# TFLOPS of dense bf16 products, from the vendor's data sheets; the first that fits
PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200 NVL": 835, "H200": 989, "GH200": 989}
PEAKS |= {"B200": 2250, "A100": 312, "A40": 150, "L40S": 362, "L40": 181, "L4": 121}


# ---- on a rank ----


def load(name, commit=None):
    """A module of a lesson for one contender alone, as its functions are replaced."""
    path = path_of(name)
    with tempfile.NamedTemporaryFile(suffix=".py") as file:
        if commit:
            shown = ["git", "show", f"{commit}:./{path.relative_to(ROOT)}"]
            file.write(subprocess.run(shown, cwd=ROOT, capture_output=True, check=True).stdout)
            file.flush()
        spec = importlib.util.spec_from_file_location(name, file.name if commit else path)
        lesson = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(lesson)
    if os.environ.get("COMPILE"):
        lesson.Block.forward = torch.compile(lesson.Block.forward)
        lesson.mean_loss = torch.compile(lesson.mean_loss)
    return complete(lesson)


class Loaded(BaseException):
    """Ends a lesson once it has loaded its batches."""


def batches_of(name, flags):
    """(device, batches) of a lesson's first step on this rank, as it loads them itself."""
    lesson = load(name)
    microbatches, found = lesson.microbatches, []

    def stop(*arguments):
        found.extend([asked(microbatches, arguments)["device"], list(microbatches(*arguments))])
        raise Loaded

    lesson.microbatches = stop
    with contextlib.redirect_stdout(None), contextlib.suppress(Loaded):
        lesson.train(lesson.parse(flags))
    dist.init_process_group = lambda *_: None  # for the contenders to come: the ranks have met
    return found


class Ours:
    """A lesson's own train(), in a thread that waits for its turns: step() lets it take a step."""

    def __init__(self, name, flags, commit=None):
        self.lesson = load(name, commit)
        self.config = self.lesson.parse(flags)
        self.may_go = threading.Semaphore(0)
        self.has_stopped = threading.Semaphore(0)
        self.error = None
        microbatches, batches = self.lesson.microbatches, []

        def begin(*arguments):
            if not batches:
                batches.extend(microbatches(**asked(microbatches, arguments) | {"step": 1}))
            self.has_stopped.release()
            self.may_go.acquire()
            return iter(batches)

        self.lesson.microbatches = begin
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


class Race:
    """The contenders of one lesson on this rank. ours: {title: (lesson, flags)}; peers: {title: build}."""

    def __init__(self, name, options, flags):
        """options.also: flags, lessons or commits that also run."""
        self.rounds = getattr(options, "rounds", 0)
        self.lesson = load(name)
        self.config = self.lesson.parse(flags)
        self.device, self.batches = batches_of(name, flags)
        torch.set_num_threads(1)
        share = self.config.batch // dist.get_world_size() // self.config.accum
        self.part = [tuple(tensor[:share] for tensor in batch) for batch in self.batches]
        self.ours = {f"{name}.py": (name, flags, None)}
        for words in options.also:
            first, *more = words
            other, commit = first.removesuffix(".py"), None
            if first.startswith("-"):
                other, more = name, words
            elif other not in lessons():
                other, commit = name, first
            title = " ".join([f"{other}.py", *["of", commit] * bool(commit), *more])
            self.ours[title] = other, [*flags, *more], commit
        self.peers = PEERS.get(name, {})
        if not hasattr(self.config, "experts"):  # which get the tokens of all ranks
            self.peers = {ALONE: alone} | self.peers

    def build(self, title, steps, *more):
        if title in self.ours:
            name, own, commit = self.ours[title]
            return Ours(name, [*own, "--steps", str(steps), *more], commit)
        return self.peers[title](self.lesson, self.config, self.device)

    def step(self, title, entry):
        entry.step(self.part if title == ALONE else self.batches)

    def weights(self, title, folder):
        """After three steps; of a lesson, on rank 0."""
        entry = self.build(title, 3, "--save", f"{folder}/weights.pt")
        for _ in range(3):
            self.step(title, entry)
        if title not in self.ours:
            return entry.weights()
        dist.barrier()
        return torch.load(f"{folder}/weights.pt", map_location=self.device) if dist.get_rank() == 0 else {}

    def compare(self, titles, folder):
        """End all if weights differ after three steps. Returns the largest root mean square difference."""
        if special(self.lesson.__name__, "OTHER"):  # it, or its naive version, trains otherwise
            return math.nan
        expected, worst = self.weights(titles[0], folder), 0.0
        for title in titles[1:]:
            if title == ALONE and dist.get_world_size() > 1:
                continue
            weights = self.weights(title, folder)
            pieces = [(x.double() - weights[name].double()).flatten() for name, x in expected.items()]
            apart = torch.cat(pieces).square().mean().sqrt().item() if pieces else 0.0
            # Muon's products are rounded to bf16, whatever --dtype is.
            if not apart < TOLERANCE["bf16" if hasattr(self.lesson, "Muon") else self.config.dtype]:
                hint = "; or rounding chose another expert: try --seed" * hasattr(self.config, "experts")
                sys.exit(f"{title} ended {apart:.1e} from the lesson: its time would mean nothing{hint}")
            worst = max(worst, apart)
        return worst

    def enter(self, title):
        """(a contender that has taken three steps, the most bytes that it had on a GPU in the third)."""
        gc.collect()
        on_gpu = self.device.type == "cuda"
        before = torch.cuda.memory_allocated(self.device) if on_gpu else 0
        entry = self.build(title, 10**6)
        for _ in range(2):
            self.step(title, entry)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.step(title, entry)
        return entry, torch.cuda.max_memory_allocated(self.device) - before if on_gpu else 0

    def run(self, folder):
        """{apart, tokens, flops, rows: {title: {bytes, times and bytes sent of the rounds}}, missing}."""
        titles = [*self.ours, *(title for title, build in self.peers.items() if build)]
        apart = self.compare(titles, folder)
        entries, rows = {}, {}
        for title in titles:
            entries[title], peak = self.enter(title)
            peak = torch.tensor(peak, dtype=torch.double, device=self.device)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
            rows[title] = {"bytes": peak.item(), "times": [], "sent": []}
        for turn in range(self.rounds):
            for title in titles[turn % len(titles) :] + titles[: turn % len(titles)]:
                finish(self.device)
                before, started = bytes_sent(), time.perf_counter()
                for _ in range(self.config.steps):
                    self.step(title, entries[title])
                finish(self.device)
                numbers = [1e3 * (time.perf_counter() - started), bytes_sent() - before]
                numbers = torch.tensor(numbers, dtype=torch.double, device=self.device) / self.config.steps
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX)  # the slowest rank, and the busiest
                rows[title]["times"].append(numbers[0].item())
                rows[title]["sent"].append(numbers[1].item())
        config, missing = self.config, [title for title, build in self.peers.items() if not build]
        with torch.device("meta"):
            n_params = sum(param.numel() for param in self.lesson.GPT(config).parameters())
        flops = 6 * n_params + 12 * config.layers * config.width * config.context
        tokens = config.batch * config.context
        return {"apart": apart, "rows": rows, "missing": missing, "tokens": tokens, "flops": tokens * flops}


def main_of_rank(options):
    result = Race(options.lessons[0], options, options.flags).run(os.path.dirname(options.out))
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # peers leave groups and threads behind, which would now and then abort the usual end


# ---- around the ranks ----


def run_to_its_end(command, **options):
    """The exit code of a command, which ends before this process does, if that is told to end."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    process = subprocess.Popen(command, **options)
    try:
        return process.wait()
    finally:
        process.terminate()
        try:
            process.wait(40)  # torchrun needs up to 30 seconds to end its ranks
        except subprocess.TimeoutExpired:
            process.kill()


def launch(name, options):
    """What rank 0 of a fresh set of processes wrote."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"--rounds={options.rounds}", "--out", f"{folder}/out.json"]
        own += [f"--also={shlex.join(words)}" for words in options.also]
        if options.hosts > 1:
            start = [f"{ROOT}/bench/hosts.sh", f"{options.hosts}", options.rate]
            start += ["--ranks-per-host", f"{options.ranks // options.hosts}", "--"]
        else:
            start = [sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1"]
            start += [f"--nproc_per_node={options.ranks}"]
        environment = {"PYTHON": sys.executable, "KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [*start, os.path.abspath(__file__), name, *own, *options.flags]
        if code := run_to_its_end(command, env=os.environ | environment):
            sys.exit(f"bench.py: {name} ended with exit code {code}")
        return json.loads(Path(f"{folder}/out.json").read_text())


def show(name, options, result):
    """Print the table of a lesson and its peers."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    peak = next((tflops for name, tflops in PEAKS.items() if re.search(rf"\b{name}\b", gpu)), None)
    ours = result["rows"][f"{name}.py"]["times"]
    table = {}
    for title, row in result["rows"].items():
        ms = statistics.median(row["times"])
        ratios = [own / other for own, other in zip(ours, row["times"])]
        cells = {"ms": f"{ms:.2f}", "ratio": f"{statistics.median(ratios):.3f}"}
        cells |= {"least": f"{min(ratios):.3f}", "most": f"{max(ratios):.3f}"}
        if gpu:
            cells["MB"] = f"{row['bytes'] / 1e6:.2f}"
        if options.hosts > 1:
            cells["sent MB"] = f"{statistics.median(row['sent']) / 1e6:.2f}"
        cells["tokens/s"] = f"{1e3 * result['tokens'] / ms:.0f}"
        if peak:
            cells["MFU %"] = f"{result['flops'] / ms / options.ranks / peak / 1e7:.1f}"
        table[title] = cells
    hosts = f"{options.hosts} hosts, {options.rate}" if options.hosts > 1 else "one host"
    where = f"{options.ranks} ranks, {hosts} | {options.rounds} rounds | torch {torch.__version__}"
    print(f"{name} {' '.join(options.flags)} | {where}{f', {gpu}' * bool(gpu)}")
    print(f"after 3 steps weights differ by {result['apart']:.1e} (root mean square)")
    wide = max(map(len, [*table, *result["missing"]]))
    print(f"  {'':<{wide}}" + "".join(f"{column:>10}" for column in table[f"{name}.py"]))
    for title, cells in table.items():
        print(f"  {title:<{wide}}" + "".join(f"{cell:>10}" for cell in cells.values()))
    for title in result["missing"]:
        print(f"  {title:<{wide}} not installed")
    print(flush=True)


def refuse(problem):
    print(f"bench.py: {problem}", file=sys.stderr)
    sys.exit(2)


def parse(words):
    """What is for this tool; its flags are the lessons'."""
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--ranks", type=int, help="on all hosts together (default: 2, or one on each host)")
    parser.add_argument("--hosts", type=int, default=1, help="in network namespaces")
    parser.add_argument("--rate", default="1gbit", help="of each host's link: 1gbit, 100mbit ...")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--also", action="append", default=[], type=shlex.split, metavar="FLAGS")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args(words[count:])
    known = lessons()
    options.lessons = [word.removesuffix(".py") for word in words[:count]]
    options.lessons = options.lessons or [name for name in known if name in PEERS]
    for name in options.lessons:
        if name not in known:
            refuse(f"{name}: no such lesson; choose from: {', '.join(known)}")
    for first, *_ in options.also:
        is_known = first.startswith("-") or first.removesuffix(".py") in known
        git = ["git", "rev-parse", "--verify", "--quiet", f"{first}^{{commit}}"]
        if not is_known and subprocess.run(git, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            refuse(f"--also {first}: must be flags, a lesson or a commit")
    options.ranks = max(2, options.hosts) if options.ranks is None else options.ranks
    if min(options.rounds, options.ranks, options.hosts) < 1 or options.ranks % options.hosts:
        refuse("--rounds, --ranks and --hosts: must be 1 or more, --ranks a multiple of --hosts")
    given = {word.split("=")[0] for word in flags}
    defaults = {"--size": "small", "--batch": "8", "--steps": "3"}.items()
    options.flags = [*itertools.chain(*(each for each in defaults if each[0] not in given)), *flags]
    return options


def main(options):
    for name in options.lessons:
        config = load(name).parse(options.flags)  # which refuses bad flags
        if config.batch % (options.ranks * config.accum):  # "compute alone" would compute less than 1/N
            refuse(f"--batch {config.batch}: must be a multiple of ranks x --accum")
    for name in options.lessons:
        show(name, options, launch(name, options))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    (main_of_rank if "RANK" in os.environ else main)(parse(sys.argv[1:]))
