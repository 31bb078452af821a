"""Where ranks that hang stand: of each its line, the collective that it waits in, and who is missing.

    python tools/where.py              (on the host of the ranks, while they hang)

Needs py-spy (requirements-dev.txt), on Linux as root or on one's own processes where ptrace is allowed.
"""

import json
import linecache
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path


def jobs_here():
    """{job: {rank: (pid, world size)}} of processes that torchrun has started."""
    found = defaultdict(dict)
    ranks = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or it has ended
            parent = re.search(r"PPid:\s+(\d+)", (folder / "status").read_text())[1]
            # Not what only starts a Python, such as timeout or numactl.
            if "python" in Path(os.readlink(folder / "exe")).name:
                ranks[folder.name] = parent, rank_of(folder)
    # Where torchrun has started ranks, what has no LOCAL_RANK is none, but a pod's first process.
    by_torchrun = any(rank[2] for _, rank in ranks.values())
    for pid, (parent, rank) in ranks.items():
        number, size, local_rank, *job = rank
        is_rank = number.isdigit() and size.isdigit() and (local_rank or not by_torchrun)
        if is_rank and rank != ranks.get(parent, (None, None))[1]:  # else a rank's own child
            found[":".join(job)][int(number)] = int(pid), int(size)
    return found


def rank_of(folder):
    """[RANK, WORLD_SIZE, ...] of a process; "" for what it lacks."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    environment = dict(word.split("=", 1) for word in words if "=" in word)
    return [environment.get(name, "") for name in names]


def stack_of(pid):
    """The main thread's frames, the innermost first; [] if it runs no Python yet, or has just ended."""
    dump = subprocess.run(["py-spy", "dump", "--json", "--pid", str(pid)], capture_output=True, text=True)
    if dump.returncode:
        print(f"process {pid}: py-spy: {dump.stderr.strip()}", file=sys.stderr)
    threads = json.loads(dump.stdout or "[]")
    return next((each["frames"] for each in threads if each["thread_name"] == "MainThread"), [])


def stand(frames):
    """(the innermost line that is no library's, and its callers'; what it waits in; the line's text)."""
    if not frames:
        return "", "is not in Python", ""
    own = [frame for frame in frames if not re.search("/site-packages/|/lib/python|^<", frame["filename"])]
    callers = [f" from {frame['line']}" for frame in own[1:4] if frame["name"] != "<module>"]
    own = own[0] if own else frames[-1]
    text = linecache.getline(own["filename"], own["line"]).strip()
    calls = [frame["name"] for frame in frames if "torch/distributed" in frame["filename"]]
    calls = [name for name in calls if name not in ("wrapper", "<module>")]
    if not calls and ".wait(" in text:  # of a Work, which is no Python
        calls = ["wait"]
    does = f"waits in {calls[0]}()" if calls else "computes"
    return f"{Path(own['filename']).name}:{own['line']}{''.join(callers)}", does, text


def report(pids):
    """Print a line for each rank, and what is odd. pids: {rank: (pid, world size)}."""
    at = defaultdict(list)
    for rank, (pid, _) in sorted(pids.items()):
        line, does, text = stand(stack_of(pid))
        print(f"rank {rank} (process {pid}) {does}, {line}: {text}")
        at[line, does].append(rank)
    size = max(size for _, size in pids.values())
    missing = sorted(set(range(size)) - pids.keys())
    if missing:
        print(f"missing: rank {', '.join(map(str, missing))} of {size}: ended, or on another host")
    (line, _), most = max(at.items(), key=lambda item: len(item[1]))
    if len(pids) / 2 < len(most) < len(pids):
        odd = sorted(pids.keys() - set(most))
        print(f"most are at {line}; not there: rank {', '.join(map(str, odd))}")


def main():
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if not shutil.which("py-spy"):
        sys.exit("where.py: needs py-spy: pip install -r requirements-dev.txt")
    jobs = jobs_here()
    if not jobs:
        sys.exit("where.py: no process here has RANK and WORLD_SIZE: start it on the host of the ranks")
    for job, pids in jobs.items():
        if len(jobs) > 1:
            print(f"job {job}")
        report(pids)


if __name__ == "__main__":
    main()
