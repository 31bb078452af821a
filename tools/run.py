"""Run lessons, each on real text, and compare it with single.py in one table: ./run.sh [LESSON ...]

NPROC=2 FLAGS="--size small --data text" LIMIT=90 ./run.sh: ranks (default: the GPUs, or 4), flags of all
lessons, seconds after which a run is ended (default: none). A run is of tools/ledger.py, which watches the
lesson; its numbers go to runs/NAME.json, its weights to runs/NAME.pt, what it prints to runs/NAME.log.

Ranks are processes as torchrun starts them, with RANK, WORLD_SIZE and so on in the environment, but forked
from one process that has imported torch: that takes a tenth of a second, and not the six of torchrun.
"""

import contextlib
import ctypes
import multiprocessing
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch._dynamo", "torch.distributed.nn", "numpy.ma"])
ROOT = Path(__file__).resolve().parent.parent
GRACE = 2  # seconds that the others have when a rank has failed


def be_rank(script, arguments, log, environment):
    """In a process of its own: run a script as this rank."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in 1, 2:
        os.dup2(output, stream)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ |= environment
    if host := environment.get("NETNS"):  # a network of its own
        with open(f"/var/run/netns/{host}") as network:
            ctypes.CDLL(None).setns(network.fileno(), 0)
    sys.argv = [script, *arguments]
    import runpy

    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(name, script, arguments, ranks=None, limit=None):
    """Whether a script ended well, on so many ranks, or as one process (None)."""
    log = ROOT / f"runs/{name}.log"
    launcher = f"torchrun --nproc_per_node={ranks}" if ranks else "python"
    log.write_text(f"{launcher} {script} {shlex.join(arguments)}\n")
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    world |= {"LOCAL_WORLD_SIZE": str(ranks)}
    environments = [world | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(ranks or 0)]
    if hosts := os.environ.get("NETNS"):  # bench/hosts.sh has made one for each rank
        for environment in environments:
            environment |= {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
            environment["NETNS"] = f"{hosts}-{environment['RANK']}"
    environments = environments or [{}]
    given = [(str(ROOT / script), arguments, str(log), environment) for environment in environments]
    processes = [FORK.Process(target=be_rank, args=each) for each in given]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + (limit or 1e9)
        while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
            if any(process.exitcode for process in processes):  # the others may wait for it for ever
                deadline = min(deadline, time.monotonic() + GRACE)
    finally:
        for process in processes:
            if process.pid and process.exitcode is None:
                process.kill()
                process.join()
    codes = [process.exitcode for process in processes]
    if any(codes):
        log.open("a").write(f"exit code {next(filter(None, codes))}\n")
        for end in "json", "pt":  # a command that failed has no result
            (ROOT / f"runs/{name}.{end}").unlink(missing_ok=True)
    return not any(codes)


class Runner:
    """Runs lessons, by what their tests say of them: see tools/lessons.py."""

    def __init__(self, ranks, flags, limit):
        self.ranks, self.limit = ranks, limit
        self.flags = ["--batch", f"{4 * ranks}", "--steps", "10", *flags]  # the same batches for all

    def watched(self, name, ranks, lesson, *more):
        results = [
            "--json",
            f"runs/{name}.json",
            str(lesson),
            *self.flags,
            *more,
            "--save",
            f"runs/{name}.pt",
        ]
        return run(name, "tools/ledger.py", results, ranks, self.limit)

    def plain(self, name, lesson, *more):
        """What lessons are compared with, and the same with one sequence at a time."""
        flags = [*self.flags, *more]
        batch = max(place for place, flag in enumerate(flags) if flag == "--batch")
        if self.watched(name, None, lesson, *more) and "fp64" not in flags:  # which rounds too little
            self.watched(
                f"{name.removesuffix('-alone')}-split", None, lesson, *more, "--accum", flags[batch + 1]
            )

    def lesson(self, name):
        path = path_of(name).relative_to(ROOT)
        plain, *plain_flags = special(name, "PLAIN", "single").split()
        launcher, *own = special(name, "RUN", "torchrun LESSON").replace(" LESSON", "").split()
        own = [str(self.ranks) if word == "N" else word for word in own]
        before, naive, other = (special(name, each).split() for each in ("BEFORE", "NAIVE", "OTHER"))
        if plain != "single":
            self.plain(f"{name}-alone", path_of(plain).relative_to(ROOT), *plain_flags)
        if before:
            run(f"{name}-before", path, [*self.flags, *before[2:]], limit=self.limit)
        ranks = self.ranks if launcher == "torchrun" else None
        self.watched(name, ranks, path, *own)
        if naive:
            self.watched(f"{name}-naive", ranks, path, *own, *naive)
        if other:
            self.watched(f"{name}-other", ranks, path, *own, *other)


def prepare():
    """The number of ranks."""
    import torch

    gpus = torch.cuda.device_count()
    ranks = os.environ.get("NPROC") or str(gpus or 4)
    if not ranks.isdecimal() or ranks == "0":
        sys.exit(f"run.sh: NPROC='{ranks}': must be a number of ranks")
    if 0 < gpus < int(ranks):  # they take turns on a GPU: see docs/one_gpu.md
        os.environ |= {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"} | os.environ
    if sys.platform == "darwin":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)
    os.makedirs("runs", exist_ok=True)
    for name in lessons():
        for end in "", "-alone", "-split", "-naive", "-other", "-before":
            for kind in "json", "pt", "log":
                Path(f"runs/{name}{end}.{kind}").unlink(missing_ok=True)
    shutil.rmtree("runs/begun", ignore_errors=True)
    return int(ranks)


def main(names):
    names = [name.removesuffix(".py") for name in names] or list(lessons())
    if unknown := [name for name in names if name not in lessons()]:
        sys.exit(f"run.sh: no lesson '{unknown[0]}'; README's table has: {' '.join(lessons())}")
    for number in signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, lambda *_: sys.exit(1))
    limit = os.environ.get("LIMIT")
    runner = Runner(prepare(), shlex.split(os.environ.get("FLAGS", "")), limit and float(limit))
    runner.plain("single", "single.py")

    def ended():
        for name in names:
            if name != "single":
                runner.lesson(name)
                yield name

    with contextlib.suppress(KeyboardInterrupt):
        return compare.main(Path("runs"), ended())
    return 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tools"))
    import compare
    from lessons import lessons, path_of, special

    sys.exit(main(sys.argv[1:]))
