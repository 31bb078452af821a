"""What the lessons do on this machine's GPUs, within half an hour: printed, and written to runs/gpu.md.

    ./run.sh gpu
    ./run.sh gpu tensor_parallel zero3     (race these lessons, in place of ddp, zero1, zero2 and zero3)
    COMPILE=1 ./run.sh gpu                 (with blocks and losses compiled, of lessons and of peers)
    ./run.sh gpu --rehearse                (on a CPU, with toy sizes)

First every lesson against single.py, as ./run.sh does it, on as many ranks as GPUs (or NPROC); with one GPU
also on four ranks that share it over NCCL (see docs/one_gpu.md), where times mean nothing. Then gpt2 and
gpt2-xl in bf16 beside their peers: bench/bench.py explains the tables. What fails, or no longer fits into the
time, is a line that says so.
"""

import argparse
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(f"{ROOT}/tools")
from compare import error_in  # noqa: E402
from lessons import lessons  # noqa: E402

SEQUENCES = {"gpt2": 32, "gpt2-xl": 16}  # of a rank; half as many on a GPU of less than 100 GB
STARTED, SECONDS = time.monotonic(), 29 * 60  # the thirtieth minute is for what has to be stopped


def run(command, limit, **environment):
    """(what a command printed within so many seconds, None or why it did not finish)."""
    left = STARTED + SECONDS - time.monotonic()
    if left < 20:
        return "", "skipped: the time is over"
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


def against_single(lessons, ranks):
    """./run.sh's table, and what went wrong."""
    output, problem = run(["./run.sh", *lessons], 720, NPROC=str(ranks), LIMIT="90")
    return f"{output.strip()}\n{f'./run.sh: {problem}' * bool(problem)}".strip()


def race(lesson, size, batch, ranks, rounds):
    """bench.py's table; a warning that it printed before belongs to no table."""
    flags = ["--size", size, "--dtype", "bf16", "--batch", f"{batch}", "--ranks", f"{ranks}"]
    command = [sys.executable, "bench/bench.py", lesson, *flags, "--rounds", f"{rounds}"]
    output, problem = run(command, 400)
    return f"{lesson}: {problem}" if problem else output[output.index(f"{lesson} --") :].strip()


def parts(config, gpus):
    """The page, one part after the other."""
    gpu = torch.cuda.get_device_name(0) if gpus else "GPUs"
    nccl = torch.cuda.nccl.version() if gpus else None
    yield f"{datetime.datetime.now():%Y-%m-%d %H:%M}: {gpus} x {gpu}, {os.cpu_count()} cores,"
    yield f"torch {torch.__version__}, NCCL {nccl}"
    ranks = int(os.environ.get("NPROC") or gpus or 2)
    yield f"\nEvery lesson against single.py, {ranks} ranks:\n\n{against_single(config.lessons, ranks)}"
    if gpus == ranks == 1:
        yield f"\nFour ranks that share the GPU:\n\n{against_single(config.lessons, 4)}"
    roomy = gpus and torch.cuda.get_device_properties(0).total_memory > 100e9
    sizes = {"toy": 4} if config.rehearse else SEQUENCES
    for size, sequences in sizes.items():
        sequences = sequences if roomy or config.rehearse else sequences // 2
        yield f"\n{size}, {sequences} sequences a rank{', compiled' * bool(os.environ.get('COMPILE'))}:"
        for lesson in config.lessons or ("ddp", "zero1", "zero2", "zero3"):
            yield "\n" + race(lesson, size, ranks * sequences, ranks, 2 if config.rehearse else 5)
    yield f"\n{(time.monotonic() - STARTED) / 60:.0f} minutes"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("lessons", nargs="*")
    parser.add_argument("--rehearse", action="store_true")
    config = parser.parse_args()
    if unknown := set(config.lessons) - lessons().keys():
        sys.exit(f"gpu.py: no lesson {', '.join(unknown)}; choose from: {' '.join(lessons())}")
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""} if config.rehearse else {}
    gpus = torch.cuda.device_count()
    if not gpus and not config.rehearse:
        sys.exit("gpu.py: no GPU is visible here; --rehearse does it on the CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    os.makedirs(ROOT / "runs", exist_ok=True)
    with open(ROOT / "runs/gpu.md", "w") as page:
        for part in parts(config, gpus):
            for line in part.splitlines():
                line = "rehearsal on a CPU, no result | " * config.rehearse + line
                print(line.rstrip(), flush=True)
                print(line.rstrip(), file=page, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
