"""Run the commands of docs/results again, and put what they print in its place: ./run.sh figures [PAGE ...]

A figure: a line with its `command` | date, commit, machine; an empty line; and, between ```, what it printed.
Pages of GPUs and of other machines are not among them. As root on Linux, on a quiet machine; 45 minutes.
"""

import datetime
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = "run", "speed", "memory", "pipeline", "checkpointing", "survive", "resume"
FIGURE = re.compile(r"^`([^`\n]+)` \| .*\n\n```\n[^`]*^```$", re.M)


def printed(command):
    """What a command of the shell prints, of this Python's environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"figures.py: exit code {done.returncode}: {command}")
    return done.stdout.strip("\n")


def again(figure, commit):
    """The text of a figure, with what its command prints now."""
    print(figure[1], flush=True)
    started = time.monotonic()
    output = printed(figure[1])
    took = f"{(time.monotonic() - started) / 60:.1f} minutes"
    cpu = re.search("model name.*: (.*)|$", printed("cat /proc/cpuinfo || true"))[1] or platform.machine()
    machine = f"{cpu}, {os.cpu_count()} cores, torch {torch.__version__}"
    return f"`{figure[1]}` | {datetime.date.today()}, {commit}, {machine}, {took}\n\n```\n{output}\n```"


def main():
    commit = printed("git describe --always --dirty")  # before pages change
    for page in sys.argv[1:] or PAGES:
        path = ROOT / f"docs/results/{page}.md"
        path.write_text(FIGURE.sub(lambda figure: again(figure, commit), path.read_text()))


if __name__ == "__main__":
    main()
