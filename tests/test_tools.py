"""tools/ledger.py, what it counts and reads in docstrings; tools/compare.py's verdicts; what tools refuse."""

import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from tests.harness import ROOT, TEXT, TINY, holds, load, mutants, on_ranks, said, world

# Sizes that four ranks divide evenly.
EVEN = f"--layers 3 --heads 4 --width 32 --context 16 --steps 2 --batch 8 --accum 2 --data {TEXT}"


def check_formulas(name):
    """A formula's value is that of the same in Python, with the multiplications written out."""
    ledger = load(name)
    letters = {"P": 100, "N": 4, "w": 2, "k": 3, "E": 7, "U": 11, "f": 1, "m": 4, "g": 1}
    for formula, value in {
        "max(w(P/N+E+(2+g)U), mP/N)": 2 * (100 / 4 + 7 + 3 * 11),
        "kw(2P-E-(1+f)U)(N-1)/N": 3 * 2 * (200 - 7 - 22) * 3 / 4,
        "10P12": 12000,
        "(N+1)(N-1)": 15,
    }.items():
        assert ledger.evaluate(formula, letters) == value, f"{formula} has another value"


@on_ranks(2)
def check_watch(name):
    """What a Watch sees of tensors that come and go."""
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    freed = torch.ones(500)
    with load(name).Watch() as watch:
        torch.ones(3, 4).mm(torch.ones(4, 5, requires_grad=True)).sum().backward()
        weight.exp().sum().backward()  # which keeps exp's 1000 and the sum, and makes a gradient of 1000
        travelling = torch.zeros(2, 1000)
        travelling[0].copy_(weight.grad)
        received = torch.empty(2, 1000)
        dist.all_to_all_single(received, travelling)  # a gradient, as what is copied from one is
        weight.grad = None
        travelling.untyped_storage().resize_(0)
        dist.all_reduce(received[0])
        dist.all_reduce(received[0, :1])  # a single number
        wide = weight.detach().double()  # a parameter, as a cast of one is
        freed.untyped_storage().resize_(0)
        del wide, received
        watch.run_thread(threading.Thread())
        assert torch._C._len_torch_dispatch_stack() == 1, "a thread that has ended is still watched"
    held, sent = watch.held(), watch.sent
    assert held["parameters"] == 4000 + 8000, "parameters and what they are cast to"
    assert held["optimizer"] == 8000 + 4, "two moments and a count"
    assert watch.flops == 2 * 3 * 4 * 5 * 2, "a product and its weight's gradient"
    assert held["gradients"] == 4000 + 8000 + 8000, "gradients and what they are copied and sent to"
    assert sent["all-to-all", "wire"] == 8000 / 2, "an all-to-all sends (N-1)/N"
    assert sent["all-reduce", "calls"] == 1, "single numbers are not counted"
    assert sent["all-reduce", "wire"] == 4000, "an all-reduce sends twice that"
    assert held["activations"] == 4000 + 4, "activations are what is alive when a backward begins"
    other = held["all"] - held["parameters"] - held["optimizer"] - held["gradients"]
    assert -4000 - 8000 - 2004 <= other <= 6000, f"{other} other bytes"


@on_ranks(2)
def check_unknown(name):
    """What is sent or held without being counted is named."""
    weights = torch.nn.Linear(3, 3)
    weights.bias.requires_grad_(False)
    rank, four = dist.get_rank(), [torch.empty(4), torch.empty(4)]
    has_lists = torch.__version__ >= "2.13"  # 2.11's gloo has no all-to-all of lists
    with load(name).Watch() as watch:
        _functional_collectives.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum()
        dist.gather(torch.ones(4), None if rank else four)
        dist.scatter(four[0], None if rank else [torch.ones(4), torch.ones(4)])
        if has_lists:
            dist.all_to_all([torch.empty(4), torch.empty(4)], [torch.ones(4), torch.ones(4)])
        dist.all_reduce(torch.ones(4))
    named = " ".join(watch.unknown)
    assert "_c10d_functional::all_reduce" in named, "a functional collective goes without a word"
    assert "gather_" in named and "scatter_" in named, "gather and scatter go without a word"
    assert watch.unknown["bytes of frozen parameters"] == 12, "frozen parameters go without a word"
    assert watch.unknown["optimizer that is not torch.optim's"] == 1, "an optimizer goes without a word"
    assert watch.sent["all-to-all", "wire"] == 16 * has_lists, "an all-to-all of lists"
    assert len(watch.unknown) == 5 and watch.sent["all-reduce", "wire"] == 16, f"{watch.unknown} {watch.sent}"


def run_main(arguments):
    """On a rank: what the command prints, its lines on stderr, its exit code."""
    ledger = load("tools/ledger")
    sys.argv = ["ledger.py", *arguments.split()]
    with mock.patch.object(dist, "destroy_process_group"):
        return said(ledger.main)


def test_the_command_prints_a_table_and_writes_json_and_traces(tmp_path):
    flags = EVEN.replace("--steps 2", "--steps 3")
    command = f"--json {tmp_path}/out.json --trace {tmp_path}/traces zero3.py {flags}"
    (out, _, code), _ = world(2).run(run_main, command)
    assert code == 0
    written = json.loads((tmp_path / "out.json").read_text())
    keys = "lesson world_size backend device shares_gpu dtype n_params losses grad_norms step_ms held sent"
    assert list(written) == [*keys.split(), "not counted", "flops", "peak_bytes"]
    assert written["not counted"] == {} and "not counted" not in out
    assert written["lesson"] == "zero3" and written["world_size"] == 2 and len(written["losses"]) == 3
    row = written["held"]["parameters"]
    numbers = f"{row['formula'] / 1e6:.2f} MB {row['measured'] / 1e6:.2f} MB"
    assert f" parameters 4P/N+w(E+(1+f)U) {numbers}" in re.sub(r" +", " ", out)
    assert set(written["sent"]["all-gather"]) == {"formula", "calls", "payload", "wire"}
    assert len(list((tmp_path / "traces").glob("rank*.json"))) == 2
    assert "gloo" in next((tmp_path / "traces").glob("rank0*.json")).read_text()


def test_json_has_no_nan(tmp_path):
    command = f"--json {tmp_path}/out.json single.py {EVEN} --steps 3 --lr 1e9"
    assert world(1).run(run_main, command)[0][2] == 0
    written = (tmp_path / "out.json").read_text()
    assert json.loads(written, parse_constant=pytest.fail)["losses"][-1] == "nan"


def test_a_run_that_diverged_is_a_row(tmp_path):
    made = {"dtype": "fp32", "losses": ["nan"], "world_size": 1, "held": {}, "sent": {}, "step_ms": [1.0]}
    for name in "single", "ddp":
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
        torch.save({"w": torch.ones(2)}, tmp_path / f"{name}.pt")
    assert "losses differ" in said(lambda: load("tools/compare").main(tmp_path, ["ddp"]))[0]


def test_a_finished_checkpoint_leaves_nothing_to_watch(tmp_path):
    command = f"more/resume.py {EVEN} --every 1 --checkpoint {tmp_path}/c"
    assert world(1).run(run_main, command)[0][2] == 0
    ((_, lines, code),) = world(1).run(run_main, command)
    assert code == 2 and "trained no step" in lines[-1], lines


def test_one_step_is_not_taken_for_all():
    """Optimizers have no states before their first step's end, which is said."""
    ((out, _, code),) = world(1).run(run_main, f"single.py {EVEN.replace('--steps 2', '--steps 1')}")
    assert code == 0 and "not counted: 1 later step, in which an optimizer has states" in out


@pytest.mark.parametrize("neighbour", ["common", "film"])
def test_a_script_finds_its_neighbour(neighbour, tmp_path):
    (tmp_path / f"{neighbour}.py").write_text("WHOSE = 'mine'")
    (tmp_path / "own.py").write_text(f"import {neighbour}")
    own = f"import ledger; print(ledger.load({str(tmp_path / 'own.py')!r}).{neighbour}.WHOSE)"
    done = subprocess.run([sys.executable, "-c", own], cwd="tools", capture_output=True, text=True)
    assert done.stdout == "mine\n", done.stderr


def check_verdicts(path):
    """What tools/compare.py says of weights that differ as rounding has them, and of others."""
    compare, draw = load(path), torch.Generator().manual_seed(0)
    plain = torch.randn(1000, generator=draw, dtype=torch.float64)

    def run(apart, losses=(5.0, 4.0), dtype="fp32", name="w"):
        weights = {name: plain + apart * torch.randn(1000, generator=draw)}
        return {"dtype": dtype, "losses": [*losses]}, weights

    single, split = run(0), run(1e-5)
    loss = {"fp64": 1e-8, "fp32": 2e-4, "bf16": 3e-2}
    for dtype, share in itertools.product(compare.WEIGHTS, (0.7, 2)):
        verdict = compare.compare(run(share * compare.WEIGHTS[dtype], dtype=dtype), single, None)[1]
        assert verdict == ("same" if share < 1 else "FAILED: weights differ"), f"without a split run: {dtype}"
        verdict = compare.compare(run(0, (5.0, 4 + loss[dtype]), dtype), single, None)[1]
        assert verdict == "FAILED: losses differ", f"a loss of {dtype}"
    verdicts = [compare.compare(run(apart), single, split)[1] for apart in (3e-5, 6e-5)]
    assert verdicts == ["same", "FAILED: weights differ"], "beside a split run"
    assert compare.compare(run(0, (5.0, 4.0003)), single, run(0, (5.0, 4.0001)))[1] == "same", "a split loss"
    assert compare.compare(run(0, (4.0,)), single, None)[1] == "same", "resume.py has the last losses only"
    assert compare.compare(run(0, ()), single, None)[1] == "FAILED: losses differ", "no losses"
    assert compare.compare(run(float("nan")), single, split)[1] == "FAILED: weights differ", "nan"
    assert "other names" in compare.compare(run(0, name="v"), single, None)[1]
    part = run(0)[0], {"w": plain[:1]}
    assert "shapes" in compare.compare(part, single, None)[1], "a part of a weight"


def check_reasons(path):
    reason_of = {
        "Exception raised from throwTimeoutError at socket.cpp:1\nDistNetworkError: no host vm": "no host vm",
        "x.ChildFailedError:\nTraceback\n[rank1]: ValueError: 7\nKeyError: 8": "ValueError: 7",
        "exit code 1\n": "exit code 1",
        "": "ended without a word",
    }
    for output, reason in reason_of.items():
        assert load(path).error_in(output).endswith(reason), f"another reason than {reason}"


BAD = {  # {command: {arguments: what the line names}}
    "tools/ledger.py": {
        "": "lesson", "no/such.py": "no/such.py", "README.md": "README.md: no such lesson",
        "tools/watch.py": "tools/watch.py: is watched by", "--json /no/x.json zero3.py": "--json /no/x.json",
        "--trace LICENSE zero3.py": "--trace LICENSE", "--film tests zero3.py": "--film tests",
    },
    "bench/bench.py": {
        "nope": "nope", "--rounds 0": "--rounds", "ddp --batch x": "--batch", "ddp --also nope": "--also",
    },
    "tools/compare.py": {"/no/such ddp": "/no/such", "README.md": "README.md"},
}  # fmt: skip


@on_ranks(2)
def check_commit(name):
    """A lesson races with what it was in a commit, and both end in the same weights."""
    race = load("bench/bench").Race(name, SimpleNamespace(also=[["HEAD", "--buckets", "1"]]), TINY.split())
    titles = [*race.ours]
    assert titles == [f"{name}.py", f"{name}.py of HEAD --buckets 1"]
    with tempfile.TemporaryDirectory() as folder:
        assert race.compare(titles, folder) < 1e-6


test_a_lesson_races_with_a_commit = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")(
    holds("ddp", check_commit)
)


def run_command(path, arguments):
    """On a rank: what a command prints, its lines on stderr, its exit code."""
    with mock.patch("sys.argv", [path, *arguments.split()]), mock.patch.dict("os.environ"):
        del os.environ["RANK"]
        return said(lambda: runpy.run_path(path, run_name="__main__"))


@pytest.mark.parametrize("path, arguments, named", [(p, *row) for p in BAD for row in BAD[p].items()])
def test_bad_input_ends_in_one_line_and_exit_code_2(path, arguments, named):
    out, lines, code = world(1).run(run_command, path, arguments)[0]
    assert (out, code) == ("", 2), (out[:80], code, lines)  # a lesson's own flags are refused with its usage
    assert (len(lines) == 1 or lines[0].startswith("usage: ")) and named in lines[-1], f"{named}: {lines}"


test_formulas_are_read_and_evaluated = holds("tools/formulas", check_formulas)
test_a_storage_counts_from_birth_to_death_by_what_it_holds = holds("tools/watch", check_watch)
test_what_is_not_counted_is_named = holds("tools/watch", check_unknown)
test_verdicts_are_right = holds("tools/compare", check_verdicts, check_reasons)
MUTANTS = [
    ("tools/watch", '("_c10d_functional", ', '("nothing", ', check_unknown, "a functional collective"),
    ("tools/watch", '"recv" not in operator', '"r" not in operator', check_unknown, "gather and scatter"),
    ("tools/watch", "passes * (group.size() - 1)", "passes * group.size()", check_watch, "sends (N-1)/N"),
    ("tools/watch", "tensor in given) > 1", "tensor in given) > 0", check_watch, "single numbers"),
    ("tools/watch", '"aten::_to_copy", ', "", check_watch, "cast to"),
    ("tools/watch", '"aten::copy_", ', "", check_watch, "copied and sent"),
    ("tools/watch", 'self.note(grad, "gradients")', "pass", check_watch, "gradients"),
    ("tools/watch", 'self.note(tensor, "optimizer")', "pass", check_watch, "two moments"),
    ("tools/watch", "max(most[kind], alive[where])", "alive[where]", check_watch, "cast to"),
    ("tools/watch", '"other" if number < self.before', "None if number < 0", check_watch, "activations"),
    ("tools/watch", 'max(most["activations"], alive[None, None])', "0", check_watch, "activations"),
    ("tools/watch", "_pop_mode()", "pass", check_watch, "is still watched"),
    ("tools/watch", "flop_registry.get(", "{}.get(", check_watch, "a product"),
    ("tools/formulas", '"*" * (is_factor', '"+" * (is_factor', check_formulas, "another value"),
    ("tools/compare", "losses_split, LOSSES[dtype]", "losses_split, 1", check_verdicts, "a loss of"),
    ("tools/compare", "MARGIN * losses_split, LOSSES", "0, LOSSES", check_verdicts, "a split loss"),
    ("tools/compare", "MARGIN * weights_split, WEIGHTS", "0, WEIGHTS", check_verdicts, "beside a split run"),
    ("tools/compare", "MARGIN = 4", "MARGIN = 40", check_verdicts, "beside a split run"),
    ("tools/compare", ".square().mean().sqrt()", ".mean().abs()", check_verdicts, "without a split run"),
    ("tools/compare", "not weights <=", "weights >", check_verdicts, "nan"),
    ("tools/compare", " or [math.nan]", " or [0]", check_verdicts, "no losses"),
    ("tools/compare", "zip(reversed(result[\"losses\"]), reversed(plain_result[\"losses\"]))",
     "zip(result[\"losses\"], plain_result[\"losses\"])", check_verdicts, "the last losses only"),
    ("tools/compare", "weight.shape for key", "key for key", check_verdicts, "a part of a weight"),
    ("tools/compare", '"Exception raised from"', '"nothing"', check_reasons, "no host vm"),
    ("tools/compare", '"ChildFailedError"', '"nothing"', check_reasons, "ValueError: 7"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS)
