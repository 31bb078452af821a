"""bench/bench.py on a simulated GPU, and ./run.sh gpu, rehearsed."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.harness import ROOT, TINY, load


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")  # torch.distributed.optim has it
def test_bench_and_ledger_keep_a_lessons_promises_on_a_gpu(name="zero2"):
    from tests.streams import Streams  # which gives this process a device that others must not have

    gpu, flags, tensor = Streams(ROOT / f"{name}.py", 1, 2), [*TINY.split(), "--steps=2"], torch.tensor

    load("bench/bench")  # whose imports are to see no simulated GPU

    def as_operators(x, device="cpu", **more):
        return tensor(x, **more).to(device)

    with gpu.world(), patch("torch.tensor", as_operators), patch("contextlib.redirect_stdout"):
        ledger, bench = load("tools/ledger", gpu.device), load("bench/bench", gpu.device)
        lesson, bench.load = gpu.load_lesson(), lambda *_: gpu.load_lesson()
        config = lesson.parse(flags)
        assert ledger.result_of(lesson, config, *ledger.run(lesson, config))["device"] == "pretend"
        race = bench.Race(name, SimpleNamespace(rounds=1, also=[]), flags)
        race.peers = {}
        assert race.enter(f"{name}.py")[1] == 9 - 4, "what was there before belongs to others"
        (row,) = race.run("")["rows"].values()
        assert len(row["times"]) == 1
        with pytest.raises(SystemExit):
            bench.Ours(name, [*flags, "--batch=5"])  # and nobody waits for it


def test_a_rehearsal_writes_every_part_and_says_what_it_is_in_every_line(tmp_path):
    copy = shutil.copytree(ROOT, tmp_path / "x", ignore=shutil.ignore_patterns(".*", "docs", "runs", "tests"))
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    command = ["env", "NPROC=1", f"PATH={path}", "./run.sh", "gpu", "--rehearse", "zero3"]
    output = subprocess.run(command, cwd=copy, stdout=-1, text=True, check=True).stdout
    assert (copy / "runs/gpu.md").read_text() == output
    mark = "rehearsal on a CPU, no result |"
    assert all(line.startswith(mark) for line in output.splitlines())
    rows = [line.removeprefix(mark).split() for line in output.splitlines()]
    assert ["same" in row for row in rows if row[:1] == ["zero3"]].count(True) == 1
    titles = [row[0] for row in rows[rows.index(["toy,", "4", "sequences", "a", "rank:"]) :] if row]
    assert {"zero3", "zero3.py", "compute", "FSDP2"} <= set(titles)


def test_what_fails_is_a_line_and_what_hangs_is_ended():
    tool, failure = load("bench/gpu"), "import torch; raise torch.OutOfMemoryError('no room')"
    assert tool.run([sys.executable, "-c", failure], 60)[1] == "torch.OutOfMemoryError: no room"
    assert tool.run(["sleep", "60"], 0.1)[1] == "stopped: it took too long"
    assert "Signal 9" in tool.error_in("x.ChildFailedError:\n traceback : Signal 9 (SIGKILL)\n====\n")
    with patch.object(tool, "run", lambda *_, **__: ("", "no room")):
        assert tool.race("ddp", "toy", 8, 2, 1) == "ddp: no room"
