"""What survive.py promises, measured: from a SIGKILL to the next step, beside a restart; what its votes cost.

    python bench/deaths.py [--rounds 7] [more flags of both lessons, such as --size small]

A worker of 4 is killed, by turns of survive.py and of resume.py under torchrun --max-restarts, which saves
every step. Then, without deaths, steps of survive.py --workers 2 beside those of ddp.py with one bucket and
--no-overlap. Each number is the median of the rounds, and (least to most).
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]


def begin(command, flags):
    """A job that runs, its output a pipe. Ranks have a thread each."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*map(str, command), *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def wait_for(job, pattern):
    """The first line from now on that begins so."""
    for line in job.stdout:
        if found := re.match(pattern, line):
            return found
    raise SystemExit(f"deaths.py: {job.args} ended before it printed {pattern}")


def child_of(job, file):
    """The newest of a job's processes that run this file."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return max(int(pid) for pid, parent, command in rows if int(parent) == job.pid and file in command)


def time_to_go_on(name, flags):
    """Seconds from a worker's SIGKILL to the next step that counts."""
    with tempfile.TemporaryDirectory() as folder:
        if name == "survive":
            job = begin([sys.executable, "survive.py", "--workers", 4, "--steps", 100000], flags)
            pid = int(wait_for(job, r".* worker 2 is process (\d+)")[1])
            again = "generation 2"
        else:
            saves = ["--checkpoint", folder, "--every", 1, "--steps", 100000]
            job = begin([*TORCHRUN, "--nproc_per_node=4", "--max-restarts=1", "resume.py", *saves], flags)
            again = "resume"
        wait_for(job, "step 10/")
        os.kill(pid if name == "survive" else child_of(job, "resume.py"), signal.SIGKILL)
        killed = time.perf_counter()
        wait_for(job, again)
        wait_for(job, "step")
        took = time.perf_counter() - killed
        job.send_signal(signal.SIGINT)
        job.communicate()
        return took


def ms_per_step(name, flags):
    """The median of steps 4 to 15, with 2 ranks."""
    if name == "survive":
        job = begin([sys.executable, "survive.py", "--workers", 2, "--steps", 15], flags)
    else:
        one_bucket = ["--no-overlap", "--bucket-cap-mb", 1000, "--steps", 15]
        job = begin([*TORCHRUN, "--nproc_per_node=2", "ddp.py", *one_bucket], flags)
    times = re.findall(r"([\d.]+) ms", job.communicate()[0])
    return statistics.median(map(float, times[3:]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    own, flags = parser.parse_known_args()
    for unit, measure, other in ("s", time_to_go_on, "resume"), ("ms", ms_per_step, "ddp"):
        found = {"survive": [], other: []}
        for turn in range(own.rounds):
            for name in sorted(found, reverse=turn % 2):
                found[name].append(measure(name, flags))
        for name, times in found.items():
            print(
                f"{name:<8} {statistics.median(times):.2f} {unit} ({min(times):.2f} to {max(times):.2f})",
                flush=True,
            )
        ratios = [one / two for one, two in zip(*found.values())]
        print(
            f"survive / {other}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
