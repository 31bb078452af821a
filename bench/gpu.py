"""What the lessons do on this machine's GPUs, within half an hour: docs/results/gpu.md and gpu.json.

    ./run.sh gpu
    ./run.sh gpu ddp zero3 --tflops 148    (these lessons alone; a GPU that PEAKS lacks)
    ./run.sh gpu --compile                 (the models' blocks and losses, of lessons and peers, compiled)
    ./run.sh gpu --rehearse                (on a CPU, with toy sizes, into runs/)

Every lesson against single.py, as ./run.sh does it, on as many ranks as GPUs (or NPROC). Gaps in a traced
step of zero3.py: from its first kernel or copy to its last, the share of time in which the stream that
computes ran none, and in which no stream did. Then gpt2 and gpt2-xl in bf16 through MODELS, taking turns with
peers as in bench/bench.py. What fails, or no longer fits into the time, is a row that says so.
MFU: 6P + 12Lhs FLOPs per token (P parameters, L layers, width h, context s; PaLM, arXiv 2204.02311, appendix
B; recomputation does not count) over the GPUs' dense bf16 peak. ratio: the lesson's time over the row's, then
its least and most. peak: what torch allocated on a rank in three steps; formula: what a rank holds when
backward begins, or in the optimizer's step, if more. apart: weights after three steps from the lesson's.

With one GPU there are two tables of lessons: on one rank, and on four that share the GPU over NCCL (see
docs/one_gpu.md), without times, as the ranks' kernels take turns.
"""

import argparse
import datetime
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from bench import ALL, ROOT, Race

sys.path.append(str(ROOT / "tools"))
import ledger
from compare import error_in

MODELS = {"single": [], "ddp": ["torch DDP, defaults"], "zero1": [], "zero2": [], "zero3": ["FSDP2"]}
MODELS |= {"fusion": [], "checkpointing": []}  # and their peers in bench/peers.py
GRADIENTS = {"ddp": "wP", "zero1": "wP", "fusion": "2mP"}  # that are there before a backward
TOYS = {"toy": 4}  # sequences of a rank
# TFLOPS of dense bf16 products, from the vendor's data sheets; the first that fits
PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200 NVL": 835, "H200": 989, "GH200": 989}
PEAKS |= {"B200": 2250, "A100": 312, "A40": 150, "L40S": 362, "L40": 181, "L4": 121}
STARTED, SECONDS = time.monotonic(), 29 * 60  # the thirtieth minute is for what has to be stopped
COLUMNS = ["ranks", "ms", "tokens/s", "MFU %", "ratio", "least", "most", "peak GB", "formula GB", "apart"]


def measure(job):
    """Race a lesson and these peers; rank 0 writes what came out."""
    bench = SimpleNamespace(rounds=job["rounds"], also=[], beside=[], host=False, peer="", slowed=[])
    race = Race(job["lesson"], bench, job["flags"])
    race.peers = {title: race.peers[title] for title in job["peers"]}
    if not job["compare"]:
        race.compare = lambda *_: None
    peaks = {title: race.memory(title)[0] for title in (*race.ours, *race.peers)}
    result = race.run(os.path.dirname(job["out"]))
    config, ranks = race.config, dist.get_world_size()
    config.shares = ranks  # of the batch
    letters = ledger.letters_of(race.lesson, config, ranks, dist.get_backend())
    flops = 6 * letters["P"] + 12 * config.layers * config.width * config.context
    result |= {"peaks": peaks, "formula": peak_of(race.lesson, config, letters), "flops": flops}
    result |= {"tokens": config.batch * config.context}
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(result))
    dist.barrier()


def peak_of(lesson, config, letters):
    """Bytes that a rank holds when a step's only backward begins, or in its step, if that is more."""
    formulas = ledger.read_formulas(lesson, config)
    name, own = lesson.__name__, [formulas["parameters"], formulas["optimizer"]]
    activations = formulas.get("activations", "bs((16L+2)wh+(4L+2+aL+v)m)")  # checkpointing.py, --policy none
    begin = [*own, activations, GRADIENTS.get(name, "0"), "0" if name == "fusion" else "2bsvm"]  # softmax
    step = [*own, formulas["gradients"]]
    return max(sum(ledger.evaluate(each, letters) for each in part) for part in (begin, step))


def run(command, limit=360, ranks=1, **environment):
    """(what a command printed within so many seconds, None or why it did not finish). ranks: by torchrun."""
    left = STARTED + SECONDS - time.monotonic()
    if left < 20:
        return "", "skipped: the time is over"
    if command[0].endswith(".py"):
        launcher = ["-m", "torch.distributed.run", "--local-addr=127.0.0.1", f"--nproc_per_node={ranks}"]
        command = [sys.executable, *(launcher if ranks > 1 else []), *command]
    with tempfile.TemporaryFile("w+") as log:
        options = {"cwd": ROOT, "env": os.environ | environment, "start_new_session": True}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **options)
        try:
            code, problem = process.wait(min(limit, left)), None
        except subprocess.TimeoutExpired:
            code, problem = 0, "stopped: it took too long"
        finally:
            stop(process)
        log.seek(0)
        output = log.read()
    return output, error_in(output) if code else problem


def stop(process):
    """End a command, and all that it started, if it is still there. torchrun gives its ranks 30 seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(40)


def against_single(config, ranks):
    """The lines of ./run.sh's table."""
    output, problem = run(["./run.sh", *config.lessons], 720, NPROC=str(ranks), LIMIT="90")
    return [*filter(None, output.splitlines()), *([f"./run.sh: {problem}"] if problem else [])]


def flags_of(config, size, ranks):
    return ["--size", size, "--dtype", "bf16", "--steps", "3", "--batch", str(ranks * config.sizes[size])]


def rows_of(config, size, lesson, peers):
    """[row] of a lesson of this size and of these peers. If they fail together, the lesson runs alone."""
    ranks = 1 if lesson in ("single", "checkpointing") else config.ranks  # these two send nothing
    with tempfile.TemporaryDirectory() as folder:
        job = {"lesson": lesson, "peers": peers, "rounds": config.rounds, "out": f"{folder}/out.json"}
        job |= {"flags": flags_of(config, size, ranks), "compare": bool(peers) and size != "gpt2-xl"}
        _, problem = run([__file__, "--job", json.dumps(job)], ranks=ranks)
        if not problem:
            result = json.loads(Path(job["out"]).read_text())
            return [row_of(title, result, ranks, config.tflops) for title in result["rows"]]
    alone = rows_of(config, size, lesson, []) if peers else []
    return alone + [{"title": title, "failed": problem} for title in peers or [f"{lesson}.py"]]


def row_of(title, result, ranks, tflops):
    """Of a lesson or a peer. tflops: of a GPU, or None."""
    ours, theirs = next(iter(result["rows"].values()))["times"], result["rows"][title]["times"]
    ratios = [own / other for own, other in zip(ours, theirs)]
    row = {"title": title, "ranks": ranks, "ms": statistics.median(theirs)}
    row["tokens/s"] = 1e3 * result["tokens"] / row["ms"]
    row["MFU %"] = tflops and row["tokens/s"] * result["flops"] / ranks / tflops / 1e10
    row |= {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    row |= {"peak GB": result["peaks"][title] / 1e9, "formula GB": None, "apart": result["apart"]}
    return row | ({"formula GB": result["formula"] / 1e9, "apart": None} if title.endswith(".py") else {})


def traced(config, size):
    """gaps() of the third step of zero3.py on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--trace", folder, "zero3.py", *flags_of(config, size, config.ranks)]
        _, problem = run(["tools/ledger.py", *flags], ranks=config.ranks)
        if problem:
            return {"failed": problem}
        kinds = ["cpu_op"] if config.rehearse else ["kernel", "gpu_memcpy", "gpu_memset"]
        (trace,) = Path(folder).glob("rank0*.json")
        return gaps(json.loads(trace.read_text())["traceEvents"], kinds)


def gaps(events, kinds):
    """A step's ms, and the shares of it in which the stream that computes, and all streams, ran nothing."""
    streams, spans = {}, []
    for event in events:
        if event.get("cat") in kinds:
            spans.append((event["ts"], event["ts"] + event["dur"]))
            if "nccl" not in event["name"].lower():
                streams.setdefault((event["pid"], event["tid"]), []).append(spans[-1])
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    compute = max(map(length, streams.values()))
    return {"ms": whole / 1e3, "compute": 1 - compute / whole, "all": 1 - length(spans) / whole}


def length(spans):
    """Of the union of (start, end)."""
    total, until = 0, float("-inf")
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def lines_of(made):
    """What gpu.md says, some lines together."""
    yield f"# The lessons on GPUs\n\n{made['date']}, {made['minutes']:.0f} minutes: {made['machine']}"
    yield f"\nMFU: of {made['peak']} TFLOPS a GPU\n\n## Every lesson against single.py\n\n```"
    yield from made["lessons"]
    for size, rows in made["models"].items():
        compiled = ", blocks and loss compiled" * made["compiled"]
        yield f"```\n\n## {size}, bf16, {made['sequences'][size]} sequences a rank{compiled}\n\n```"
        yield f"{'':<20}" + "".join(f"{name:>11}" for name in COLUMNS)
        for row in rows:
            cells = ["-" if row[name] is None else f"{row[name]:.4g}" for name in COLUMNS if name in row]
            yield f"{row['title']:<20}" + "".join(f"{cell:>11}" for cell in cells) + row.get("failed", "")
    yield "```\n\n## Gaps in a step of zero3.py\n"
    text = "In {ms:.1f} ms the stream that computes ran nothing for {compute:.1%}, all streams for {all:.1%}."
    yield made["gaps"].get("failed") or text.format(**made["gaps"])


def write(made, folder):
    made["minutes"] = (time.monotonic() - STARTED) / 60
    mark = "rehearsal on a CPU, no result | " if made["rehearsal"] else ""
    text = "".join(f"{mark}{line}".rstrip() + "\n" for line in "\n".join(lines_of(made)).splitlines())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.md").write_text(text)
    (folder / "gpu.json").write_text(json.dumps(made, indent=None if mark else 1))
    return text


def refuse(problem):
    print(f"gpu.py: {problem}", file=sys.stderr)
    sys.exit(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.error = refuse
    parser.add_argument("lessons", nargs="*")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--tflops", type=float, help="of a GPU")
    parser.add_argument("--compile", action="store_true")
    config = parser.parse_args()
    for name in config.lessons:
        if name not in ALL[1:]:
            refuse(f"{name}: must be one of {', '.join(ALL[1:])}")
    if config.tflops is not None and not 0 < config.tflops < math.inf:
        refuse(f"--tflops {config.tflops}: must be more than 0, and finite")
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""} if config.rehearse else {}
    gpus = torch.cuda.device_count()
    if not gpus and not config.rehearse:
        refuse("no GPU is visible here; --rehearse does it on the CPU")
    gpu, nccl = (torch.cuda.get_device_name(0), torch.cuda.nccl.version()) if gpus else ("GPUs", None)
    peaks = [tflops for name, tflops in PEAKS.items() if re.search(rf"\b{name}\b", gpu)]
    config.tflops = config.tflops or next(iter(peaks), 0.1 if config.rehearse else None)  # or any number
    config.ranks = int(os.environ.get("NPROC") or gpus or 2)
    roomy = gpus and torch.cuda.get_device_properties(0).total_memory > 100e9
    sizes = {"gpt2": 32, "gpt2-xl": 16 if roomy else 8}
    config.sizes, config.rounds = (TOYS, 2) if config.rehearse else (sizes, 5)
    os.environ |= {"COMPILE": "1"} if config.compile else {}
    folder = ROOT / ("runs" if config.rehearse else "docs/results")
    made = {"rehearsal": config.rehearse, "date": datetime.datetime.now().isoformat(" ", "minutes")}
    made["machine"] = f"{gpus} x {gpu}, {os.cpu_count()} cores, torch {torch.__version__}, NCCL {nccl}"
    made |= {"peak": config.tflops, "sequences": config.sizes, "compiled": config.compile, "models": {}}
    made["lessons"] = against_single(config, config.ranks)
    if gpus == config.ranks == 1:
        made["lessons"] += ["", "Four ranks that share the GPU:", "", *against_single(config, 4)]
    made["gaps"] = traced(config, next(iter(config.sizes)))
    for size in config.sizes:
        made["models"][size] = []
        for lesson in [name for name in MODELS if name in (config.lessons or MODELS)]:
            made["models"][size] += rows_of(config, size, lesson, MODELS[lesson])
            write(made, folder)
    print(write(made, folder), end="")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1:2] != ["--job"]:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
        sys.exit(main())
    try:
        measure(json.loads(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for threads and other ranks
    os._exit(0)
