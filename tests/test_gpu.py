"""./run.sh gpu, rehearsed; tools/ledger.py and tools/bench.py on a pretended GPU."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.harness import ROOT, TINY, load
from tests.streams import Streams


def check_tools(name, path):
    """What they do around a lesson on a rank keeps its promises, and a lesson that cannot begin ends them."""
    gpu, flags = Streams(path, 1, 2), [*TINY.split(), "--steps=2"]
    peers = SimpleNamespace(ALONE="", peers_of=lambda name: {})
    quiet = mock.patch("contextlib.redirect_stdout", lambda _: contextlib.nullcontext())
    with gpu.world(), quiet, mock.patch.dict(sys.modules, peers=peers):
        ledger, bench = gpu.load(ROOT / "tools/ledger.py"), gpu.load(ROOT / "tools/bench.py")
        lesson = gpu.load_lesson()
        config = lesson.parse(flags)
        assert ledger.result_of(lesson, config, *ledger.run(lesson, config))["device"] == "pretend"
        bench.load = lambda name: gpu.load_lesson()
        race = bench.Race(name, SimpleNamespace(rounds=1, also=[], beside=[]), flags)
        race.memory(f"{name}.py")
        assert len(race.run("")["rows"][f"{name}.py"]["times"]) == 1
        with pytest.raises(SystemExit):
            bench.Ours(name, [*flags, "--batch=5"])


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_ledger_and_bench_keep_a_lessons_promises_on_a_gpu(name):
    torch._C._set_only_lift_cpu_tensors(True)  # else the pretended device does not see torch.tensor()
    try:
        check_tools(name, ROOT / f"{name}.py")
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def test_a_rehearsal_writes_every_part_and_says_what_it_is_in_every_line(tmp_path):
    shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".*", "docs", "runs", "tests"))
    environment = os.environ | {
        "NPROC": "1",
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
    }
    subprocess.run(
        ["./run.sh", "gpu", "--rehearse", "zero3"], cwd=tmp_path / "copy", env=environment, check=True
    )
    lines = (tmp_path / "copy/runs/gpu.md").read_text().splitlines()
    assert all(line.startswith("rehearsal on a CPU, no result |") for line in lines)
    made = json.loads((tmp_path / "copy/runs/gpu.json").read_text())
    assert made["rehearsal"] and made["lessons"][2].startswith("zero3") and "same" in made["lessons"][2]
    ours, peer = made["models"]["toy"]
    assert (ours["title"], peer["title"]) == ("zero3.py", "FSDP2") and 0 <= peer["apart"] < 0.01 < peer[
        "ratio"
    ]
    assert ours["MFU %"] == pytest.approx(ours["tokens/s"] * (6 * 420480 + 12 * 8 * 64 * 64) / 1e9)
    assert ours["formula GB"] < ours["peak GB"] < 3 * ours["formula GB"] and 0 < made["gaps"]["compute"] < 1


def test_what_fails_is_a_row_and_time_is_counted_once():
    tool, failure = load("tools/gpu"), "import torch; raise torch.OutOfMemoryError('no room')"
    assert tool.run([sys.executable, "-c", failure], 60)[1] == "torch.OutOfMemoryError: no room"
    assert tool.run(["sleep", "60"], 0.1)[1] == "stopped: it took too long"
    with mock.patch.object(tool, "run", lambda *_: ("", "no room")):
        rows = tool.rows_of(SimpleNamespace(ranks=2, sizes={"toy": 4}, rounds=2), "toy", "ddp", ["DDP"])
    assert rows == [{"title": title, "failed": "no room"} for title in ("ddp.py", "DDP")]
    spans = [(0, 4, 7, "matmul"), (1, 2, 7, "add"), (3, 5, 20, "ncclDevKernel"), (9, 1, 7, "add")]
    events = [{"cat": "kernel", "ts": t, "dur": d, "pid": 0, "tid": s, "name": n} for t, d, s, n in spans]
    assert tool.gaps([{"cat": "cpu_op"}, *events], ["kernel"]) == pytest.approx(
        {"ms": 0.01, "compute": 0.5, "all": 0.1}
    )
