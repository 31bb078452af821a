"""./run.sh gpu, rehearsed; tools/ledger.py and bench/bench.py on a simulated GPU."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.harness import ROOT, TEXT, TINY, load, world
from tests.streams import Streams


def test_ledger_and_bench_keep_a_lessons_promises_on_a_gpu(name="zero2"):
    gpu, flags, tensor = Streams(ROOT / f"{name}.py", 1, 2), [*TINY.split(), "--steps=2"], torch.tensor
    peers = SimpleNamespace(ALONE="", peers_of=lambda _: {})
    made = []

    def as_operators(x, device="cpu", **more):
        made.append(x)
        return tensor(x, **more).to(device)

    seen = patch("torch.tensor", as_operators)
    with gpu.world(), seen, patch("contextlib.redirect_stdout"), patch.dict(sys.modules, peers=peers):
        ledger, bench = load("tools/ledger", gpu.device), load("bench/bench", gpu.device)
        lesson, bench.load = gpu.load_lesson(), lambda name: gpu.load_lesson()
        config = lesson.parse(flags)
        assert ledger.result_of(lesson, config, *ledger.run(lesson, config))["device"] == "pretend"
        own = SimpleNamespace(rounds=1, also=[], beside=[], host=False, peer="", slowed=[])
        race = bench.Race(name, own, flags)
        assert race.memory(f"{name}.py") and made[-1][0] == 9 - 4, "what was there before belongs to others"
        assert race.run("")["rows"]
        assert race.adds_losses
        with pytest.raises(SystemExit):
            bench.Ours(name, [*flags, "--batch=5"])  # and nobody waits for it


def test_a_rehearsal_writes_every_part_and_says_what_it_is_in_every_line(tmp_path):
    copy = shutil.copytree(ROOT, tmp_path / "x", ignore=shutil.ignore_patterns(".*", "docs", "runs", "tests"))
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    command = ["env", "NPROC=1", f"PATH={path}", "./run.sh", "gpu", "--rehearse", "zero3"]
    lines = subprocess.run(command, cwd=copy, stdout=-1, text=True, check=True).stdout.splitlines()
    assert lines and all(line.startswith("rehearsal on a CPU, no result |") for line in lines)
    made = json.loads((copy / "runs/gpu.json").read_text())
    assert made["rehearsal"] and all(
        any(word in row for row in made["lessons"]) for word in ("split", "zero3")
    )
    assert [row.split()[-1] for row in made["lessons"] if row.startswith("zero3")] == ["same"]
    ours, peer = made["models"]["toy"]
    assert [ours["title"], peer["title"]] == ["zero3.py", "FSDP2"] and 0 <= peer["apart"] < 0.01
    assert ours["MFU %"] == pytest.approx(ours["tokens/s"] * (6 * 420480 + 12 * 8 * 64 * 64) / 1e9)
    assert ours["formula GB"] < ours["peak GB"] < 3 * ours["formula GB"] and 0 < made["gaps"]["compute"] < 1


def peak_here(name, flags):
    """On a rank: (bytes of all tensors at a step's peak, what bench/gpu.py's formula has)."""
    lesson, ledger, tool = load(name), load("tools/ledger"), load("bench/gpu")
    config = lesson.parse(flags.split())
    result = ledger.result_of(lesson, config, *ledger.run(lesson, config))
    return result["peak_bytes"], tool.peak_of(lesson, config, ledger.letters_of(lesson, config, 1, "nccl"))


@pytest.mark.long_table
@pytest.mark.parametrize("name", ["single", "ddp", "zero1", "zero2", "zero3"])
def test_the_formula_of_a_peak_is_what_tensors_take(name):
    flags = f"--size small --dtype bf16 --steps 2 --batch 12 --data {TEXT}"
    ((measured, formula),) = world(1).run(peak_here, name, flags)
    assert measured == pytest.approx(formula, rel=0.005)


def test_what_fails_is_a_row_and_time_is_counted_once():
    tool, failure = load("bench/gpu"), "import torch; raise torch.OutOfMemoryError('no room')"
    assert tool.run([sys.executable, "-c", failure], 60)[1] == "torch.OutOfMemoryError: no room"
    assert tool.run(["sleep", "60"], 0.1)[1] == "stopped: it took too long"
    assert "Signal 9" in tool.error_in("x.ChildFailedError:\n traceback : Signal 9 (SIGKILL)\n====\n")
    with patch.object(tool, "run", lambda *_, **__: ("", "no room")):
        rows = tool.rows_of(SimpleNamespace(ranks=2, sizes={"toy": 4}, rounds=2), "toy", "ddp", ["DDP"])
    assert rows == [{"title": title, "failed": "no room"} for title in ("ddp.py", "DDP")]
    spans = [(0, 4, 7, "matmul"), (1, 2, 7, "add"), (3, 5, 20, "ncclDevKernel"), (9, 1, 7, "add")]
    events = [{"cat": "kernel", "ts": t, "dur": d, "pid": 0, "tid": s, "name": n} for t, d, s, n in spans]
    assert [*tool.gaps([{"cat": "cpu_op"}, *events], ["kernel"]).values()] == pytest.approx([0.01, 0.5, 0.1])
