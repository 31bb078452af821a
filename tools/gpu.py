"""What the lessons do on this machine's GPUs, within half an hour: docs/results/gpu.md and gpu.json.

    ./run.sh gpu
    ./run.sh gpu ddp zero3 --tflops 148    (these lessons alone; a GPU that PEAKS lacks)
    ./run.sh gpu --rehearse                (on a CPU, with toy sizes, into runs/)

Every lesson against single.py, as ./run.sh does it, on as many ranks as there are GPUs (or NPROC). Then gpt2
and gpt2-xl in bf16 through MODELS, each taking turns with its peers as in tools/bench.py; single.py and
checkpointing.py on one rank. And the gaps in a traced step of zero3.py: from its first kernel or copy to its
last, the share of time in which the stream that computes ran none, and in which no stream ran any. What fails
is a row that says why; what no longer fits into the time is a row that says so.

MFU: 6P + 12Lhs FLOPs per token (P parameters, L layers, width h, context s; PaLM, arXiv 2204.02311, appendix
B; nothing off for causality, nothing for recomputation) over the dense bf16 peak of the GPUs. ratio: the
lesson's time over the row's, median, least, greatest. peak: the most that torch had allocated on any rank in
three steps, activations included. formula: what the docstring says of parameters, gradients and optimizer,
and of activations if it does.
"""

import argparse
import datetime
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import ledger
import torch
import torch.distributed as dist
from bench import ROOT, Race

MODELS = {"single": [], "ddp": ["torch DDP, defaults"], "zero1": [], "zero2": [], "zero3": ["FSDP2"]}
MODELS |= {"fusion": [], "checkpointing": []}  # and their peers in tools/peers.py
ON_ONE_RANK = ("single", "checkpointing")
SIZES = {"gpt2": (8, 180), "gpt2-xl": (4, 360)}  # sequences of a rank, seconds for a lesson
TOYS = {"toy": (4, 180)}
# TFLOPS of dense bf16 products, from the vendor's data sheets; the first name that fits counts
PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "GH200": 989, "B200": 2250}
PEAKS |= {"A100": 312, "A40": 150, "L40S": 362, "L4": 121, "RTX 4090": 165, "RTX 3090": 71}
SECONDS = 29 * 60  # the thirtieth minute is for what has to be stopped
COLUMNS = ("ranks", "ms", "tokens/s", "MFU %", "ratio", "least", "most", "peak GB", "formula GB")
TABLE = "Every lesson against single.py"  # the title that run.sh prints
ERROR = re.compile(r"^(?:\[rank\d+\]: *)?([\w.]*(?:Error|Exception|SystemExit)\b.*|\w+\.py: .+)", re.M)


# ---- on a rank ----


def measure(job):
    """Race a lesson and these peers; rank 0 writes what came out."""
    bench = SimpleNamespace(rounds=job["rounds"], also=[], beside=[])
    race = Race(job["lesson"], bench, job["flags"])
    race.peers = {title: race.peers[title] for title in job["peers"]}
    if not job["compare"]:
        race.compare = lambda *_: None
    peaks = {title: race.memory(title)[0] for title in (*race.ours, *race.peers)}
    result = race.run(os.path.dirname(job["out"]))
    config, ranks = race.config, dist.get_world_size()
    config.shares = 1 if job["lesson"] in ON_ONE_RANK else ranks
    letters = ledger.letters_of(race.lesson, config, ranks, dist.get_backend())
    formulas = ledger.read_formulas(race.lesson, config)
    held = [ledger.evaluate(formulas[name], letters) for name in ledger.HELD if name in formulas]
    flops = 6 * letters["P"] + 12 * config.layers * config.width * config.context
    result |= {"peaks": peaks, "formula": sum(held), "flops": flops, "tokens": config.batch * config.context}
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(result))
    dist.barrier()


# ---- around the ranks ----


def error_in(output):
    """The line that says why a command ended; of several ranks' the first."""
    errors = [line for line in ERROR.findall(output) if "ChildFailedError" not in line]
    lines = [line for line in output.splitlines() if line.strip()]
    return (errors[:1] or lines[-1:] or ["ended without a word"])[0][:200]


class Clock:
    """Runs commands until its time is over, each within a limit; both in seconds."""

    def __init__(self, seconds):
        self.started = time.monotonic()
        self.seconds = seconds

    def passed(self):
        return time.monotonic() - self.started

    def run(self, command, limit, ranks=1, **environment):
        """(what the command printed, None or why it did not finish). On several ranks by torchrun."""
        left = self.seconds - self.passed()
        if left < 20:
            return "", "skipped: the time is over"
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        if command[0].endswith(".py"):
            command = [sys.executable, *launcher, *command]
        with tempfile.TemporaryFile("w+") as log:
            options = {"cwd": ROOT, "env": os.environ | environment, "start_new_session": True}
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **options)
            try:
                process.wait(min(limit, left))
            except subprocess.TimeoutExpired:
                pass
            finally:
                problem = stop(process)
            log.seek(0)
            output = log.read()
        return output, problem or (error_in(output) if process.returncode else None)


def stop(process):
    """Take down a command that is still there. torchrun gives its ranks 30 seconds."""
    if process.poll() is not None:
        return None
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "stopped: took too long"


def against_single(clock, config):
    """The lines of ./run.sh's table; a lesson that did not finish has the reason in its line."""
    output, problem = clock.run(["./run.sh", *config.lessons], 720, NPROC=str(config.ranks), LIMIT="90")
    said = {}
    _, *parts = re.split(r"\033\[1m(.*?)(?:[,:].*)?\033\[0m", output)
    for title, text in zip(parts[::2], parts[1::2]):
        said[title] = said.get(title, "") + text
    names = [title for title in said if title.isidentifier() and title != "single"]
    table = said.get(TABLE) or clock.run(["tools/compare.py", "runs", *names], 60)[0]  # if run.sh was stopped
    lines = []
    for line in filter(str.strip, table.splitlines()):
        reason = f": {error_in(said[line.split()[0]])}" if line.endswith("did not finish") else ""
        lines.append(line + reason)
    return lines if TABLE in said else [*lines, f"./run.sh: {problem}"]


def rows_of(clock, config, size, lesson):
    """[row] of a lesson of this size and of its peers. If they fail together, the lesson runs alone."""
    sequences, limit = config.sizes[size]
    ranks = 1 if lesson in ON_ONE_RANK else config.ranks
    flags = ["--size", size, "--dtype", "bf16", "--steps", "3", "--batch", str(ranks * sequences)]
    rows = []
    for peers in (MODELS[lesson], []) if MODELS[lesson] else ([],):
        with tempfile.TemporaryDirectory() as folder:
            job = {"lesson": lesson, "peers": peers, "flags": flags, "rounds": config.rounds}
            job |= {"compare": bool(peers) and size == next(iter(config.sizes)), "out": f"{folder}/out.json"}
            _, problem = clock.run([__file__, "--job", json.dumps(job)], limit, ranks)
            if not problem:
                result = json.loads(Path(job["out"]).read_text())
                return [row_of(title, result, ranks, config.peak) for title in result["rows"]] + rows
        rows += [{"title": title, "failed": problem} for title in peers or [f"{lesson}.py"]]
    return rows[::-1]


def row_of(title, result, ranks, peak):
    """Of a lesson or a peer. peak: FLOPs per second of a GPU, or None."""
    times = result["rows"][title]["times"]
    first = next(iter(result["rows"].values()))["times"]
    ratios = [ours / theirs for ours, theirs in zip(first, times)]
    row = {"title": title, "ranks": ranks, "ms": statistics.median(times)}
    row["tokens/s"] = 1e3 * result["tokens"] / row["ms"]
    row["MFU %"] = peak and 100 * row["tokens/s"] * result["flops"] / ranks / peak
    row |= {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    row["peak GB"] = result["peaks"][title] / 1e9
    row["formula GB"] = result["formula"] / 1e9 if title.endswith(".py") else None
    return row | {"apart": result["apart"]}


def traced(clock, config):
    """gaps() of the third step of zero3.py on rank 0, at the first of the sizes."""
    size, (sequences, limit) = next(iter(config.sizes.items()))
    with tempfile.TemporaryDirectory() as folder:
        command = ["tools/ledger.py", "--trace", folder, "zero3.py", "--size", size, "--dtype", "bf16"]
        command += ["--steps", "3", "--batch", str(config.ranks * sequences)]
        _, problem = clock.run(command, limit, config.ranks)
        if problem:
            return {"failed": problem}
        kinds = ["cpu_op"] if config.rehearse else ["kernel", "gpu_memcpy", "gpu_memset"]
        (trace,) = Path(folder).glob("rank0*.json")
        return gaps(json.loads(trace.read_text())["traceEvents"], kinds)


def gaps(events, kinds):
    """How long a step took, in ms, and the shares of it in which the computing stream, and all, did nothing."""
    streams, spans = {}, []
    for event in events:
        if event.get("cat") in kinds:
            spans.append((event["ts"], event["ts"] + event["dur"]))
            if "nccl" not in event["name"].lower():
                streams.setdefault((event["pid"], event["tid"]), []).append(spans[-1])
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    busy = max(map(length, streams.values()))
    return {"ms": whole / 1e3, "compute": 1 - busy / whole, "all": 1 - length(spans) / whole}


def length(spans):
    """Of the union of (start, end)."""
    total, until = 0, float("-inf")
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def lines_of(made):
    """What gpu.md says."""
    yield from (
        "# The lessons on GPUs",
        "",
        f"{made['date']}, {made['minutes']:.0f} minutes. {made['machine']}",
    )
    yield from ("", f"tools/gpu.py says what the columns mean. MFU: of {made['peak']} FLOP/s a GPU.", "")
    yield from (f"## {TABLE}", "", "```", *made["lessons"], "```", "")
    for size, rows in made["models"].items():
        yield from (f"## {size}, bf16, {made['sequences'][size]} sequences a rank", "", "```")
        yield f"{'':<22}" + "".join(f"{name:>12}" for name in COLUMNS)
        for row in rows:
            numbers = [row[name] for name in COLUMNS if name in row]
            cells = [f"{'-':>12}" if number is None else f"{number:>12.4g}" for number in numbers]
            yield f"{row['title']:<22}" + ("".join(cells) or f"  {row['failed']}")
        for row in (row for row in rows if row.get("apart") is not None and not row["title"].endswith(".py")):
            yield f"{row['title']}: weights after 3 steps at most {row['apart']:.1e} from the lesson's"
        yield from ("```", "")
    yield from ("## Gaps in a step of zero3.py", "")
    yield made["gaps"].get("failed") or (
        f"A traced step took {made['gaps']['ms']:.1f} ms; the stream that computes ran nothing for "
        f"{made['gaps']['compute']:.1%} of it, no stream ran anything for {made['gaps']['all']:.1%}."
    )


def write(made, config):
    lines = [line.rstrip() for line in lines_of(made)]
    if config.rehearse:
        lines = [f"rehearsal on a CPU, no result | {line}" for line in lines]
    folder = ROOT / ("runs" if config.rehearse else "docs/results")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.md").write_text("\n".join(lines) + "\n")
    (folder / "gpu.json").write_text(json.dumps(made, indent=None if config.rehearse else 1))
    return lines


def refuse(problem):
    print(f"gpu.py: {problem}", file=sys.stderr)
    sys.exit(2)


def parse():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("lessons", nargs="*")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--tflops", type=float)
    parser.add_argument("--job", type=json.loads)
    config = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""} if config.rehearse else {}
    gpus = torch.cuda.device_count()
    if not gpus and not config.rehearse and not config.job:
        refuse("no GPU is visible here; --rehearse does it on the CPU")
    config.gpu = torch.cuda.get_device_name(0) if gpus else "no GPU"
    known = [tflops for name, tflops in PEAKS.items() if name in config.gpu]
    known += [0.1] if config.rehearse else []  # to have a number
    config.peak = 1e12 * (config.tflops or next(iter(known), 0)) or None
    config.ranks = int(os.environ.get("NPROC") or gpus or 2)
    config.sizes, config.rounds = (TOYS, 2) if config.rehearse else (SIZES, 5)
    return config


def main(config):
    clock = Clock(SECONDS)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.device_count() else None
    made = {"rehearsal": config.rehearse, "date": datetime.datetime.now().isoformat(" ", "minutes")}
    made["machine"] = f"{torch.cuda.device_count()} x {config.gpu}, {os.cpu_count()} cores, "
    made["machine"] += f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
    made |= {"peak": config.peak, "sequences": {size: own for size, (own, _) in config.sizes.items()}}
    made |= {"lessons": against_single(clock, config), "models": {}, "gaps": traced(clock, config)}
    for size in config.sizes:
        made["models"][size] = []
        for lesson in [name for name in MODELS if not config.lessons or name in config.lessons]:
            made["models"][size] += rows_of(clock, config, size, lesson)
            made["minutes"] = clock.passed() / 60
            write(made, config)
    print("\n".join(write(made, config)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    config = parse()
    if not config.job:
        sys.exit(main(config))
    try:
        measure(config.job)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for threads and other ranks
    os._exit(0)
