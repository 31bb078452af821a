"""tools/ledger.py: what it counts, what it reads in docstrings, and that a simulation is the real thing."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import FORK, TEXT, holds, load, mutants, on_ranks, said, train, world

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


def check_touched(name):
    """An operator reads and writes what its schema says; on a CPU, also a wider copy of a large tensor."""
    watch = load(name)
    x, y, large = torch.ones(1000), torch.ones(1000), torch.ones(2**20 + 1)
    for call, expected, what in (
        (lambda: x + y, 12_000, "two are read, one is made"),
        (lambda: x.add_(y), 12_000, "two are read, one is written"),
        (lambda: torch.mul(x, 2, out=y), 8_000, "what out= names is not read"),
        (lambda: x.copy_(y), 8_000, "a copy"),
        (lambda: x.zero_(), 4_000, "what is overwritten is not read"),
        (lambda: x[:].copy_(x[:]), 0, "a copy onto itself"),
        (lambda: (x.view(10, 100).mT, torch.empty_like(x)), 0, "views and fresh memory"),
        (lambda: torch._foreach_norm([x, y], dtype=torch.float64), 8_000, "copies that the cache holds"),
        (lambda: torch._foreach_norm([large], dtype=torch.float64), 20 * large.numel(), "a wider copy"),
        (lambda: torch._foreach_norm([large]), 4 * large.numel(), "no wider copy"),
    ):
        with Seen(watch.touched_by) as seen:
            call()
        assert seen.bytes == expected, f"{what}: {seen.bytes} bytes, not {expected}"
    for options, copies in ({"dtype": torch.float64}, True), ({}, False):
        with torch.profiler.profile(acc_events=True) as inside:
            torch._foreach_norm([large], **options)
        casts = "aten::_to_copy" in {event.name for event in inside.events()}
        assert casts == copies, f"_foreach_norm({options}) does not copy as the meter thinks"


class Seen(TorchDispatchMode):
    """Counts what operators touch."""

    def __init__(self, touched_by):
        super().__init__()
        self.touched_by = touched_by
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.bytes += self.touched_by(function, args, kwargs or {}, result)
        return result


@on_ranks(2)
def check_clock(name):
    """Rank 0 waits, idle, until rank 1 takes part in an all-reduce, and sends; rank 1 never waits."""
    lesson, late = mock.Mock(), 0.1 * dist.get_rank()
    clock = load(name).Clock(lesson)
    for _ in range(4):
        time.sleep(late)
        dist.all_reduce(torch.ones(2))
        time.sleep(late)
        (dist.send if late else dist.recv)(torch.ones(2), 1 - dist.get_rank())
        lesson.print_step()
    ms = clock.measured(1)
    assert 0.3 < ms["idle"] / ms["sum"] < 0.7 and ms["sum"] >= 200, f"idle for another time: {ms}"


def simulated(lesson_name, ranks, rank, flags, backend):
    ledger, lesson = load("tools/ledger"), load(lesson_name)
    return ledger.simulate(lesson, lesson.parse(flags.split()), ranks, rank, backend)


def simulate(*arguments):
    """What the simulation of a rank finds, in a process of its own."""
    with ProcessPoolExecutor(1, FORK) as process:
        return process.submit(simulated, *arguments).result()


@pytest.mark.long_table
@pytest.mark.parametrize("lesson", ["ddp", "zero1", "zero2", "zero3", "hsdp", "pipeline"])
def test_a_simulated_rank_holds_and_sends_what_a_real_one_does(lesson):
    flags = f"{EVEN} --dtype bf16"
    real, _ = train(lesson, 4, flags, watched=True)
    result = simulate(lesson, 4, 2, flags, "gloo")  # of stages it holds most, and sums no tied gradient
    assert result["held"] == real["held"]
    parts = ["send"] if lesson == "pipeline" else [*real["sent"]]
    assert [result["sent"][part] for part in parts] == [real["sent"][part] for part in parts]


@pytest.mark.long_table
@pytest.mark.parametrize("lesson, published", [("zero2", 16.6), ("zero3", 1.88)])  # GB, arXiv 1910.02054
def test_zeros_figure_1_comes_out_of_the_code(lesson, published):
    result = simulate(lesson, 64, 5, "--size 7.5b --dtype bf16 --steps 2 --batch 64 --device cpu", "nccl")
    held = sum(row["measured"] for row in result["held"].values()) / 1e9
    # In flight: the root and two units of gradients, in zero3.py of weights, too; a parameter's gradient.
    unit, root, largest = 2 * 0.2273, 2 * 0.2276, 2 * 0.2187
    flying = {"zero2": root + 2 * unit, "zero3": 2 * (root + 2 * unit)}[lesson]
    assert published - 0.1 < held < published + flying + largest + 0.5


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
    assert list(written) == [*keys.split(), "not counted", "touched", "lines", "flops", "peak_bytes"]
    assert written["not counted"] == {} and "not counted" not in out
    assert written["lesson"] == "zero3" and written["world_size"] == 2 and len(written["losses"]) == 3
    row = written["held"]["parameters"]
    numbers = f"{row['formula'] / 1e6:.2f} MB {row['measured'] / 1e6:.2f} MB"
    assert f" parameters mP/N + w(E+(1+f)U) {numbers}" in re.sub(r" +", " ", out)
    assert set(written["sent"]["all-gather"]) == {"formula", "calls", "payload", "wire"}
    assert len(list((tmp_path / "traces").glob("rank*.json"))) == 2
    assert "gloo" in next((tmp_path / "traces").glob("rank0*.json")).read_text()
    command = f"--json {tmp_path}/out.json --machine {tmp_path}/c.json ddp.py {EVEN} --steps 4"
    world(2).run(run_main, command)
    written = json.loads((tmp_path / "out.json").read_text())
    kept = [*json.loads((tmp_path / "c.json").read_text()).values()]
    assert [written["machine"]] == kept and kept[0]["beta"] > 0 and written["ms"]["sum"]["measured"] > 0
    predicted, known = load("tools/clock").predicted, {"C": 1, "M": 1, "beta": 1, "gamma": 0.5}
    ms = [*predicted({"compute": 4, "exposed": 1, "idle": 0.5}, 3, 2, known).values()]
    assert ms == [7000, 1000, 2000, 10000] and predicted({"compute": 4}, 3, 2, known)["exposed"] == 3000


@pytest.mark.parametrize("arguments, problem", [
    ("plan.py", "plan.py: is watched by def parse, def train, def print_step, class GPT, as ddp.py has them"),
    ("nosuch.py", "nosuch.py: no such lesson"),
    ("--json single.py single.py", "--json single.py: must be a file in a folder"),
    ("--json - single.py", "--json -: must be a file in a folder"),
    ("--json /dev/full single.py --steps 2", "/dev/full: No space left on device"),
    ("--film film.json --ranks 4 single.py", "--ranks 4: not with --trace and --film"),
    ("--trace traces single.py --steps 2", "--trace traces: it is of the third line"),
])  # fmt: skip
def test_what_it_cannot_do_ends_in_one_line(arguments, problem, tmp_path):
    arguments = arguments.replace("traces", f"{tmp_path}/traces")
    problem = problem.replace("traces", f"{tmp_path}/traces")
    ((_, lines, code),) = world(1).run(run_main, arguments)
    assert len(lines) == 1 and lines[0].startswith(f"ledger.py: {problem}") and code == 2, lines


def run_on_a_shared_gpu(arguments):
    gpu = {"device_count": lambda: 1, "max_memory_allocated": lambda device: 5}
    nccl, share = mock.patch.object(dist, "get_backend", lambda: "nccl"), {"LOCAL_WORLD_SIZE": "2"}
    with mock.patch.multiple(torch.cuda, **gpu), nccl, mock.patch.dict(os.environ, share):
        return run_main(arguments)


def test_no_time_is_taken_where_ranks_share_a_gpu(tmp_path):
    """And the device is the lesson's, also of ranks that hold nothing on it: all must go on to the same."""
    command = f"--json {tmp_path}/out.json ddp.py {EVEN} --device cpu --steps 3"
    assert world(1).run(run_on_a_shared_gpu, command)[0][2] == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["device"], written["shares_gpu"], written["peak_bytes"]) == ("cuda", True, 5)
    assert "ms" not in written and "machine" not in written


def test_a_finished_checkpoint_leaves_nothing_to_watch(tmp_path):
    command = f"resume.py {EVEN} --every 1 --checkpoint {tmp_path}/c"
    assert world(1).run(run_main, command)[0][2] == 0
    ((_, lines, code),) = world(1).run(run_main, command)
    assert code == 2 and "trained no step" in lines[-1], lines


def test_two_steps_after_a_checkpoint_are_too_few_for_times(tmp_path):
    command = f"--json {tmp_path}/out.json resume.py {EVEN} --every 2 --checkpoint {tmp_path}/c"
    assert world(1).run(run_main, command)[0][2] == 0
    assert world(1).run(run_main, f"{command} --steps 4")[0][2] == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["losses"]) == 2 and "ms" not in written


def test_one_step_is_not_taken_for_all(tmp_path):
    """Optimizers have no states before their first step's end, which is said; a simulation takes two."""
    ((out, _, code),) = world(1).run(run_main, f"single.py {EVEN.replace('--steps 2', '--steps 1')}")
    assert code == 0 and "not counted: 1 later step, in which an optimizer has states" in out
    flags = "--width 16 --layers 1 --context 8 --inner-steps 3 --batch 4 --device cpu"
    written = simulate("diloco", 4, 0, flags + " --steps 6", "gloo")
    assert written["held"]["optimizer"]["measured"] > 0 and written["sent"]["all-reduce"]["calls"] > 0


@pytest.mark.parametrize("neighbour", ["common", "film"])
def test_a_script_finds_its_neighbour(neighbour, tmp_path):
    (tmp_path / f"{neighbour}.py").write_text("WHOSE = 'mine'")
    (tmp_path / "own.py").write_text(f"import {neighbour}")
    own = f"import ledger; print(ledger.load({str(tmp_path / 'own.py')!r}).{neighbour}.WHOSE)"
    done = subprocess.run([sys.executable, "-c", own], cwd="tools", capture_output=True, text=True)
    assert done.stdout == "mine\n", done.stderr


@pytest.mark.parametrize("damaged", ["", '{"half', '{"a": {"C": 1}}', "[]"])
def test_constants_that_are_damaged_are_measured_again(damaged, tmp_path):
    (tmp_path / "c.json").write_text(damaged)
    ((_, _, code),) = world(1).run(run_main, f"--machine {tmp_path}/c.json single.py {EVEN} --steps 3")
    (kept,) = json.loads((tmp_path / "c.json").read_text()).values()
    assert code == 0 and set(kept) == {"C", "M", "alpha", "beta", "gamma"}


@on_ranks(2)
def check_constants(path):
    """All ranks measure the machine, or none, even if rank 1 has another batch, as in reshard.py."""
    clock, lesson, measured = load("tools/clock"), load("ddp"), []
    constants = dict.fromkeys(("C", "M", "alpha", "beta", "gamma"), 1.0)
    with mock.patch.object(clock, "measure", lambda *_: measured.append(1) or constants):
        for batch in (4, 8 - 4 * dist.get_rank()):
            clock.machine_of(lesson, lesson.parse([]), batch, torch.device("cpu"), path)
    assert len(measured) == 2, f"measured {len(measured)} times, not for 4 and for 8"


def test_ranks_with_other_batches_measure_the_machine_together(tmp_path):
    check_constants(f"{tmp_path}/c.json")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_where_finds_ranks_behind_a_wrapper_and_in_a_pod():
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    rank = dict(zip(names, ["1", "0", "2", "here", "7"]))
    waits = [sys.executable, "-c", "input()"]
    has_child = [sys.executable, "-c", f"import subprocess; subprocess.run({waits}); input()"]
    agent = [
        sys.executable,
        "-c",
        f"import subprocess; subprocess.run(['timeout', '60', *{has_child}], env={rank})",
    ]
    pod = {"RANK": "0", "WORLD_SIZE": "1", "PATH": os.environ["PATH"]}
    agent = [*agent[:2], agent[2].replace("{'RANK'", f"{{'PATH': {os.environ['PATH']!r}, 'RANK'")]
    with subprocess.Popen(agent, env=pod, stdin=-1) as job:
        found, deadline = {}, time.monotonic() + 20
        while not found and time.monotonic() < deadline:
            found = load("tools/where").jobs_here().get("here:7", {})
        children = subprocess.getoutput(f"ps -o args= -p {found[1][0]}") if found else ""
        job.kill()
    assert list(found) == [1] and found[1][1] == 2 and "subprocess" in children


test_formulas_are_read_and_evaluated = holds("tools/letters", check_formulas)
test_a_wait_for_a_late_rank_is_idle = holds("tools/clock", check_clock)
test_a_storage_counts_from_birth_to_death_by_what_it_holds = holds("tools/watch", check_watch)
test_bytes_touched_are_those_of_the_schemas = holds("tools/watch", check_touched)
test_what_is_not_counted_is_named = holds("tools/watch", check_unknown)
MUTANTS = [
    ("watch", '("_c10d_functional", ', '("nothing", ', check_unknown, "a functional collective"),
    ("watch", '"recv" not in operator', '"r" not in operator', check_unknown, "gather and scatter"),
    ("watch", "passes * (group.size() - 1)", "passes * group.size()", check_watch, "sends (N-1)/N"),
    ("watch", "tensor in given) > 1", "tensor in given) > 0", check_watch, "single numbers"),
    ("watch", '"aten::_to_copy", ', "", check_watch, "cast to"),
    ("watch", '"aten::copy_", ', "", check_watch, "copied and sent"),
    ("watch", 'self.note(grad, "gradients")', "pass", check_watch, "gradients"),
    ("watch", 'self.note(tensor, "optimizer")', "pass", check_watch, "two moments"),
    ("watch", "max(most[kind], alive[where])", "alive[where]", check_watch, "cast to"),
    ("watch", '"other" if number < self.before', "None if number < self.before", check_watch, "activations"),
    ("watch", 'max(most["activations"], alive[None, None])', "0", check_watch, "activations"),
    ("watch", "_pop_mode()", "pass", check_watch, "is still watched"),
    ("watch", "flop_registry.get(", "{}.get(", check_watch, "a product"),
    ("watch", 'argument.name == "out" or ', "", check_touched, "what out= names"),
    ("watch", "place_of(read[0]) == place_of(written[0])", "False", check_touched, "a copy onto itself"),
    ("watch", "function.is_view or UN", "UN", check_touched, "a copy onto itself: 8000"),
    ("watch", "touched += 2 * tensor", "touched += 0 * tensor", check_touched, "a wider copy"),
    (
        "watch",
        "if narrow and tensor.numel() * width > CACHED",
        "if narrow",
        check_touched,
        "that the cache holds",
    ),
    ("clock", "max(begin, ready.get(key, begin))", "ready.get(key, begin)", check_clock, "another time"),
    ("clock", "ends[::-1]", "ends", check_clock, "another time"),
    ("letters", '"*" * (is_factor', '"+" * (is_factor', check_formulas, "another value"),
]
test_a_mutant_is_rejected = mutants([(f"tools/{name}", *row) for name, *row in MUTANTS])
