"""survive.py: whoever dies and when, the weights are single.py's; and its votes, in every order of events."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness import FORK, ROOT, TEXT, apart, holds, load, mutants, train

SHAPE = f"--layers 2 --heads 2 --width 16 --context 8 --batch 60 --dtype fp64 --lr 0.01 --data {TEXT}"


def check_orders(name, deaths=1):
    """All orders of events, and a sample of those with members that are late as well, or new."""
    path = str((ROOT / name).with_suffix(".py"))
    orders = load("tools/orders")
    orders.try_every_order(path, deaths)
    orders.try_delays(path)


def launched(name, flags, signals=(), code=0):
    """Launch a job, send signals, (kind, worker, when), and hold that it ends, with single.py's weights."""
    _, weights = train("single", 1, SHAPE)
    survive, pids, stores = load(name), {}, []
    survive.print = lambda line, **_: pids.update([map(int, re.findall(r"\d+", line))])
    survive.dist = mock.Mock(wraps=dist, DistNetworkError=dist.DistNetworkError)
    survive.dist.TCPStore = lambda *args, **options: (
        stores.append(dist.TCPStore(*args, **options)) or stores[0]
    )

    def send(kind, worker):
        while kind == signal.SIGSTOP and not (stores and stores[0].check(["1/now"])):
            time.sleep(0.01)  # for one that hangs before all have met the others wait five minutes
        with suppress(ProcessLookupError, KeyError):
            os.kill(pids[worker], kind)

    with TemporaryDirectory() as folder, mock.patch.dict(sys.modules, survive=survive):
        with mock.patch.object(sys, "path", [str(Path(survive.__file__).parent), *sys.path]):
            for kind, worker, when in signals:
                threading.Timer(when, send, (kind, worker)).start()
            ended = survive.launch(survive.parse(f"{SHAPE} --save {folder}/w {flags}".split()))
        assert ended == code, f"exit code {ended}"
        deadline = time.monotonic() + 20  # a busy system takes a while to end them
        while any(map(is_alive, pids.values())):
            assert time.monotonic() < deadline, "a process is left"
            time.sleep(0.01)
        assert code or apart(torch.load(f"{folder}/w"), weights) < 1e-10, "weights differ"


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def name_after_a_failure(name):
    members = load(name).Members(mock.Mock(workers=2, timeout=0.5, min_workers=1, kill=()), dist.HashStore())
    members.store.set("0/members", "[]")
    members.store.append("1/answers", "1 ")  # of a worker that never connects
    members.reform(1)
    return dist.group.WORLD.group_name


def check_name(name):
    """A group that did not form leaves nothing behind: all members, new ones too, name the next one alike."""
    with FORK.Pool(1) as pool:
        assert pool.apply(name_after_a_failure, [name]) == "0", "another name"


def check_out(name):
    """A worker that was out before it woke says so, though nobody tells it, as on macOS, that others left."""
    lesson, store = load(name), dist.HashStore()
    for key, value in {"0/members": "[]", "1/members": "[0, 1]", "2/members": "[0]"}.items():
        store.set(key, value)
    members = lesson.Members(mock.Mock(workers=2, timeout=0.1, min_workers=1, kill=()), store, 1)
    members.epoch = 1

    def wait(timeout=timedelta(0)):
        assert timeout == timedelta(seconds=0.1), "waits for ever for a worker that has gone on"
        raise RuntimeError("Operation timed out!")

    work, destroy = mock.Mock(wait=wait), mock.Mock(side_effect=AssertionError("waits for the old group"))
    instead = {"all_reduce": lambda *_, **__: work, "is_initialized": lambda: True}
    with mock.patch.multiple(lesson.dist, destroy_process_group=destroy, **instead):
        assert not members.attempt(3, lesson.all_reduce, members.timeout, torch.ones(1))
        with pytest.raises(SystemExit, match="worker 1 is out: epoch 2 began without it"):
            members.reform(3)


def check_runs(name):
    launched(name, "--workers 4 --kill 1@3 0@5:vote 3@3:reform --join 8 --timeout 1")
    launched(name, "--workers 5 --kill 2@2:forward 1@2:forward 0@9 --accum 3 --timeout 3")
    launched(name, "--workers 1 --join 18 2 --kill 0@17 --timeout 2")
    launched(name, "--workers 3 --kill 2@2 --min-workers 3", code=2)


FUZZ = os.environ.get("FUZZ", "").split()  # of ./run.sh fuzz


@pytest.mark.parametrize("seed", FUZZ[:1] or ["0", "a new one"])
def test_random_deaths_leave_single_pys_weights(seed):
    """Eight deaths, in ./run.sh fuzz a hundred."""
    if seed == "a new one":
        seed = str(random.randrange(10**6))
    draw, deaths = random.Random(seed), 0
    kinds = (*3 * [signal.SIGKILL], *2 * [signal.SIGTERM], signal.SIGSTOP)
    while deaths < (100 if FUZZ else 8):
        workers = draw.randint(2, 5)
        victims = draw.sample(range(workers), draw.randint(1, workers - 1))
        deaths += len(victims)
        joins = [str(draw.randint(2, 19)) for _ in range(draw.choice((0, 0, 1, 2)))]
        flags, signals = ["--join", *joins, "--kill"], []
        for worker in victims:
            if draw.random() < 0.5:
                step, where = draw.randint(1, 20), draw.choice(("", ":forward", ":vote", ":reform"))
                flags.append(f"{worker}@{step}{where}")
            else:
                signals.append((draw.choice(kinds), worker, draw.uniform(0.02, 0.4)))
        flags = f"--workers {workers} --timeout 1 {' '.join(flags)}"
        try:
            launched("survive", flags, signals)
        except Exception as error:
            pytest.fail(f"seed {seed}, {deaths} deaths: survive.py {flags}, {signals}: {error}")


def begin(flags):
    command = [sys.executable, str(ROOT / "survive.py"), *SHAPE.split(), *flags.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    pids = re.findall(r"worker (\d+) is process (\d+)", read_to("step  *1/", process))
    return process, {int(worker): int(pid) for worker, pid in pids}


def read_to(pattern, process):
    told = ""
    while not re.search(pattern, told):
        line = process.stdout.readline()
        assert line, f"ended without {pattern!r}: {told}"
        told += line
    return told


def test_one_that_hangs_is_out_and_when_it_wakes_it_disturbs_nobody(tmp_path):
    slow = "--steps 150 --lr 1e-4"  # with 0.01 rounding alone grows to 5e-8 in 150 steps
    process, pids = begin(f"--workers 3 --timeout 1 {slow} --save {tmp_path}/w")
    os.kill(pids[1], signal.SIGSTOP)
    read_to(r"epoch 2 \| \[0, 1, 2\] -> \[0, 2\] in .* again", process)
    os.kill(pids[1], signal.SIGCONT)
    told, _ = process.communicate(timeout=100)
    told = told.partition("worker 1 is out: epoch 2 began without it")[2]
    assert "step 150/150" in told and "epoch 3" not in told
    _, weights = train("single", 1, f"{SHAPE} {slow}")
    assert process.returncode == 0 and apart(torch.load(tmp_path / "w"), weights) < 1e-9


def test_workers_end_with_their_launcher():
    process, _ = begin("--workers 3 --steps 100000")
    process.kill()
    told, _ = process.communicate(timeout=10)  # until the pipe is closed: no process is left that could write
    assert "the launcher is gone" in told


@pytest.mark.skipif(not FUZZ, reason="20 s, of ./run.sh fuzz")
def test_two_deaths_at_any_moment_leave_no_member_behind():
    check_orders("survive", deaths=2)


test_each_promise_is_kept = holds("survive", check_orders, check_name, check_out, check_runs)
ABORT = '            self.store.compare_set(key, "", "aborted")\n'
MUTANTS = [
    ("if answers | dead >= set(self.members)", "if answers", check_orders, "a living member is left"),
    ("[worker for worker in order", "[worker for worker in sorted(order)", check_orders, "no state"),
    (ABORT, ABORT.replace("compare_set(key, \"\", ", "set(key, "), check_orders, "for ever"),
    (ABORT, f"{ABORT}            return False\n", check_orders, "for ever"),
    ('key = f"{self.epoch}/{step}"', 'key = f"{step}"', check_orders, "without end"),
    ("if votes == len(self.members)", "if votes > 1", check_orders, "not all have computed"),
    ('        store.compare_set(f"{epoch}/{step}", "", "aborted")', "        pass", check_orders, "for ever"),
    ("flat_grad.zero_()", "step == members.state[0] > 1 or flat_grad.zero_()", check_runs, "weights differ"),
    ("else:\n            members.r", "else:\n            optimizer.step()\n            members.r",
     check_runs, "weights differ"),
    ("* len(inputs) / config.batch", "/ dist.get_world_size() / config.accum", check_runs, "weights differ"),
    ("zip((masters, optimizer), states)", "zip((masters,), states)", check_runs, "weights differ"),
    ("async_op=True).wait(timeout)", "async_op=True).wait()", check_out, "waits for ever"),
    ("if epoch > self.epoch and self.worker not in members:", "if False:", check_out, "waits for the old"),
    ("_world.group_count = 0", "_world.group_count", check_name, "another name"),
    ("len(self.members) < self.config.min_workers", "False", check_runs, "exit code 0"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "survive")
