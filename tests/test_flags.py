"""What plan.py and the tools refuse: exit code 2 and one line that names what to change."""

import os
import runpy
from unittest import mock

import pytest

from tests.harness import said, world

HUGE = 10**15
BAD = {  # {command: {arguments: what the line names}}
    "plan.py": {
        "": "--size", "--params -7b": "--params", "--params 7q": "--params", "--params nan": "--params",
        "--params inf": "--params", "--size toy --layers 0": "--layers", "--size toy --heads 5": "--h",
        "--layers 2": "--heads --hidden --seq --vocab", "--params 1b --gpus 0": "--gpus 0: must be 1 or more",
        "--params 1b --gpu-gb nan": "--gpu-gb", "--params 1b": "--size", "7b": "7b",
        "--size toy --cp 3": "--cp 3", "--size toy --json /no/file": "/no/file", "--gpu x": "--gpu",
        "--size toy --shard 3": "--shard 3", "--params 1b --tflops 0": "--tflops 0", "--json /": "--size",
        "--size toy --top-k 3": "--top-k 3", "--top-k 0": "--top-k 0", "--size toy --accum .3": ".3",
        f"--size toy --gpus {HUGE}": "at most 10^6", f"--params 7b --gpus {10**6 + 1}": "--gpus",
        f"--size toy --micro-batch {HUGE}": "at most 10^6", f"--params {HUGE}b": "at most 10^15",
        "--size toy --gpu-gb inf": "--gpu-gb", "--size toy --experts 4 --top-k 5": "--top-k 5",
        "--size toy --experts 4 --mixtures 9": "--mixtures 9", "--params 7.5mb": "7.5mb", "--params 7bb": "b",
        "--size gpt2 --params 175b": "--params 175000000000", "--size 7.5b --params 1b": "--params",
        "--size toy --gpus-per-node 5": "--gpus-per-node 5", "--size toy --tflops 1e-300": "--tflops 1e-300",
        "--size toy --hbm-gbps 1e-310": "--hbm-gbps", "--size toy --peak-tflops 100": "--peak-tflops 100.0",
        "--size toy --experts 2 --expert-params 1m": "--expert-params 1000000", "--size toy --json /": "/",
    }, "tools/ledger.py": {
        "": "lesson", "no/such.py": "no/such.py", "README.md": "README.md: no such lesson",
        "tools/watch.py": "tools/watch.py: is watched by", "--ranks x zero3.py": "--ranks",
        "--ranks 2 offload.py": "--ranks 2", "--ranks 2 resume.py": "--ranks 2",
        "--ranks -1 zero3.py": "--ranks -1", "--ranks 0 zero3.py": "--ranks 0",
        f"--ranks {HUGE} zero3.py": "--ranks", "--ranks 2 --rank 2 zero3.py": "--rank 2",
        "--ranks 2 --rank -1 zero3.py": "--rank -1", "--rank 7 zero3.py": "--rank 7",
        "--json /no/x.json zero3.py": "--json /no/x.json", "--machine tests zero3.py": "--machine tests",
        "--trace LICENSE zero3.py": "--trace LICENSE", "--ranks 2 --trace x zero3.py": "--ranks 2: not with",
    }, "bench/bench.py": {
        "nope": "nope", "--rounds 0": "--rounds", "ddp --hosts 100": "--hosts", "ddp --rate 0bit": "--rate",
        "ddp --json /no/x.json": "--json /no/x.json", "ddp --batch x": "--batch", "ddp --also '": "--also",
        "ddp --also=--prefetch=1": "--prefetch", "pipeline --batch 4 --accum 4": "--batch 4",
        "context_parallel --batch 1": "--batch 1", "tensor_parallel --batch 3": "--batch 3",
    }, "tools/compare.py": {"/no/such ddp": "/no/such", "README.md": "README.md"}, "bench/gpu.py": {
        "--rehearse --tflops x": "--tflops", "--rehearse --tflops nan": "--tflops nan",
        "--rehearse --tflops -1": "--tflops -1", "--rehearse ddp nope": "nope",
    },
}  # fmt: skip


def run_command(path, arguments):
    """On a rank: what a command prints, its lines on stderr, its exit code."""
    with mock.patch("sys.argv", [path, *arguments.split()]), mock.patch.dict("os.environ"):
        del os.environ["RANK"]
        return said(lambda: runpy.run_path(path, run_name="__main__"))


@pytest.mark.parametrize("path, arguments, named", [(p, *row) for p in BAD for row in BAD[p].items()])
def test_bad_input_ends_in_one_line_and_exit_code_2(path, arguments, named):
    out, lines, code = world(1).run(run_command, path, arguments)[0]
    assert (out, code, len(lines)) == ("", 2, 1), (out[:80], code, lines)
    assert named in lines[0], f"does not name {named}: {lines}"
