"""survive.py: whoever dies and when, the weights are single.py's; and its votes, in every order of events."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch

from tests.checks import check_masters, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import TEXT, Lesson, apart, holds, load, mutants, path_of, said, train

LEARN = "python LESSON --workers 4 --steps 12 --kill 1@3,0@6 --accum 3 --timeout 3"
NAIVE = "--naive"
LESSON = Lesson(variants=("--naive",), own={"--timeout": ("1 10", "x"), "--workers": ("0", "1.5 x")})
SHAPE = f"--layers 2 --heads 2 --width 16 --context 8 --batch 60 --dtype fp64 --lr 0.01 --data {TEXT}"
FUZZ = os.environ.get("FUZZ", "").split()  # of ./run.sh fuzz
orders = load("tests/orders")
BEGIN = "        model.zero_grad()"
PLACES = {  # where a worker may die, besides the place of --kill: before these lines
    ":sum": "            dist.all_reduce(tensor)",  # one of many
    ":vote": "        self.pipe.send(vote)",
    ":answer": "        if not counts:",
    ":group": '            dist.init_process_group("gloo", None',
}


def first(line, condition, then):
    """An edit by which a worker does this before a line."""
    indent = line[: len(line) - len(line.lstrip())]
    worker = f"{indent}me = os.getenv('LOCAL_RANK') + '@' + os.getenv('STEP', '0')\n"
    return {line: f"{worker}{indent}if {condition}: {then}\n{line}"}


def deadly(kills):
    """Edits by which workers die in other places than by --kill: {"0@5:vote", ...}."""
    edits = first(BEGIN, "True", "os.environ['STEP'] = str(step)")
    for place, line in PLACES.items():
        those = {kill.removesuffix(place) for kill in kills if kill.endswith(place)}
        rarely = " and os.urandom(1)[0] < 9" * (place == ":sum")
        edits |= first(line, f"me in {those}{rarely}", "os.kill(os.getpid(), 9)")
    return edits


@contextmanager
def limit(seconds):
    """Fail if this takes longer."""

    def fail(*_):
        raise AssertionError(f"hangs: has not ended after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_alive(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def launched(name, flags, edits=None, signals=(), ends=(0,), seconds=60):
    """A job ends with one of these exit codes or words, with single.py's weights, and leaves no process.
    Returns the launcher's lines. edits: {lines of the lesson: what this job has in their place}.
    signals: [(kind, worker, when)]."""
    steps = re.search(r"--steps \d+", flags)
    _, weights = train("single", 1, f"{SHAPE} {steps[0] if steps else ''}".strip())
    source = path_of(name.removesuffix(".py")).read_text()
    for old, new in (edits or {}).items():
        assert source.count(old) == 1, f"{source.count(old)} times: {old}"
        source = source.replace(old, new)
    lines = []

    def pids():
        found = re.findall(r"worker (\d+) is process (\d+)", " ".join(lines))
        return {int(worker): int(pid) for worker, pid in found}

    def send(kind, worker):
        with suppress(ProcessLookupError, KeyError):
            os.kill(pids()[worker], kind)

    timers = [threading.Timer(when, send, (kind, worker)) for kind, worker, when in signals]
    # Nobody kills a worker that stops while it saves: let it go on some time.
    timers += [threading.Timer(8, send, (signal.SIGCONT, worker)) for _, worker, _ in signals]
    with TemporaryDirectory() as folder, limit(seconds), mock.patch.dict(os.environ):
        Path(folder, "survive.py").write_text(source)
        survive = load(f"{folder}/survive.py")
        survive.print = lambda line, **_: lines.append(line)
        search = [folder, *sys.path]
        with mock.patch.dict(sys.modules, survive=survive), mock.patch.object(sys, "path", search):
            config = survive.parse(f"{SHAPE} {flags} --save {folder}/w".split())
            for timer in timers:
                timer.start()
            *_, ended = said(lambda: sys.exit(survive.launch(config)))
            for timer in timers:
                timer.cancel()
        assert ended in ends or any(str(end) in str(ended) for end in ends if end), f"it ends with {ended}"
        while any(map(is_alive, pids().values())):
            time.sleep(0.01)
        if ended == 0:
            assert apart(torch.load(f"{folder}/w"), weights) < 1e-10, "weights differ"
    return lines


def check_orders(name, cases=orders.CASES):
    """No order of events breaks a promise: see tests/orders.py."""
    orders.try_all(str(path_of(name.removesuffix(".py"))), 50, cases=cases)


def check_runs(name):
    edits = deadly({"0@5:vote", "2@7:answer", "1@7:sum"})
    launched(name, "--workers 5 --kill 4@5 --accum 3 --timeout 3", edits)
    launched(name, "--workers 4 --kill 1@3,2@3 --timeout 3", deadly({"0@3:group"}))
    launched(name, "--workers 1 --steps 3")
    launched(name, "--workers 2 --steps 0", seconds=20)


def check_early(name):
    """A worker that ends before it is ready, or ends well, but too early, ends alone."""
    launched(name, "--workers 3 --steps 3", first("    train(config, Member(", "me[0] == '1'", "os._exit(0)"))


def check_hang(name):
    """A worker that hangs is killed, in a step and after its last vote."""
    stop = f"os.kill(os.getpid(), {signal.SIGSTOP:d})"
    edits = first(BEGIN, "me[0] == '1' and step == 2", stop)
    end = "    dist.destroy_process_group()\n\n\nclass"
    edits |= first(end, "me[0] == '2'", stop)
    launched(name, "--workers 3 --steps 3 --timeout 0.5", edits, seconds=12)


def check_long(name):
    """Who computes for long is not killed, as long as the others do so, too."""
    launched(name, "--workers 2 --steps 1 --timeout 0.4", first(BEGIN, "True", "time.sleep(3)"))


def check_connecting(name):
    """Who waits for a connection that nobody will make is not killed."""
    for _ in range(3):  # whether there is one depends on which of two workers connects to the other
        lines = launched(name, "--workers 6 --steps 2 --timeout 0.5 --kill 0@1")
        assert lines[-1] == "workers [1, 2, 3, 4, 5] do step 1", f"a healthy one is killed: {lines[-1]}"


def check_neighbours(name):
    """A death is heard of at once, also by those who wait for somebody who has left."""
    launched(name, "--workers 5 --steps 3 --kill 2@2,4@3 --timeout 60", seconds=12)


def check_error(name):
    """What fails though nobody dies ends the job, and is told."""
    edits = {"            dist.all_reduce(tensor)": "            raise RuntimeError('no device eth9')"}
    launched(name, "--workers 2", edits, ends=("no device eth9",), seconds=9)


def check_ends(name):
    """If the one that saves dies, or all do, the job ends with an error."""
    edits = first("        torch.save(model", "True", "os._exit(7)")
    launched(name, "--workers 3 --steps 2", edits, ends=(7,))
    launched(name, "--workers 2 --kill 0@1,1@1", ends=("fails",), seconds=20)


def test_without_votes_workers_add_up_gradients_of_different_weights():
    with pytest.raises(AssertionError, match=r"different weights .* 0 is late|different weights .* dies"):
        orders.try_all("more/survive.py", naive=True)


@pytest.mark.parametrize("seed", FUZZ[:1] or ["a new one"])
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
        kills, signals = [], []
        for worker in victims:
            if draw.random() < 0.5:
                kills.append(f"{worker}@{draw.randint(1, 20)}{draw.choice(('', *PLACES))}")
            else:
                signals.append((draw.choice(kinds), worker, draw.uniform(0.02, 0.4)))
        own = ",".join(kill for kill in kills if ":" not in kill)
        flags = f"--workers {workers} --timeout 1 {f'--kill {own}' if own else ''}"
        try:  # a signal may come while the worker saves
            launched("survive", flags, deadly(kills), signals, ends=(0, -9, -15) if signals else (0,))
        except Exception as error:
            pytest.fail(f"seed {seed}, {deaths} deaths: survive.py {flags}, {kills}, {signals}: {error}")


def test_workers_end_with_their_launcher():
    command = [sys.executable, str(path_of("survive")), *SHAPE.split(), "--workers", "3", "--steps", "100000"]
    with limit(60), subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while b"step  1/" not in process.stdout.readline():
            pass
        process.kill()
        process.stdout.read()  # until no process is left that could write


@pytest.mark.skipif(not FUZZ, reason="minutes, of ./run.sh fuzz")
def test_two_deaths_and_a_delay_at_any_moment_leave_no_member_behind():
    cases = [orders.Case(*case) for case in ((3, 1, 2, 1), (3, 2, 1, 1), (3, 1, 1, 2), (4, 1, 2, 0))]
    orders.try_all("more/survive.py", 20_000, cases=cases)


CHECKS = [check_orders, check_runs, check_early, check_hang, check_long, check_connecting, check_neighbours]
test_each_promise_is_kept = holds("survive", *CHECKS, check_error, check_ends)
FAILS = "        if not workers or failures > 2 * config.workers"
MUTANTS = [
    ("naive(vote) if self.naive else counts", "naive(vote)", check_orders, "different weights"),
    ('all(vote == "yes" for', 'any(vote == "yes" for', check_orders, "counts after 1 steps"),
    ("if ask(vote):", "if ask(vote) + 1 and vote == 'yes':", check_orders, "different weights"),
    ("if ask(vote):", "if ask(vote) or True:", check_orders, "counts after"),
    ("        model.zero_grad()", "        pass", check_orders, "not each part of the batch once"),
    ("range(dist.get_rank(), n_parts, dist.get_world_size())", "[dist.get_rank()]", check_orders, "not each"),
    ("max(config.workers, dist.get_world_size())", "dist.get_world_size()", check_orders, "not each part"),
    ("members.index(self.worker)", "self.worker", check_orders, "Error"),
    (" if votes[worker] is not None}", "}", check_orders, "ends too early"),
    ("with suppress(ConnectionError)", "with suppress(KeyError)", check_orders, "BrokenPipeError"),
    ("with suppress(EOFError, ConnectionError)", "with suppress(KeyError)", check_orders, "EOFError"),
    ("workers[min(workers)]", "workers[max(workers)]", check_orders, "are saved"),
    (" or not failures", "", check_runs, "hangs"),
    (FAILS, "        if True", check_orders, "ends too early"),
    (FAILS, "        if not workers", check_error, "hangs"),
    ('f"group {number}"', '"group"', check_orders, "ends too early"),
    ('LAZY_INIT"] = "1"', 'LAZY_INIT"] = "0"', check_runs, "ends with"),
    ("            other_end.close()", "            pass", check_neighbours, "hangs"),
    ("                process.kill()", "                pass", check_hang, "hangs"),
    ("in workers.values():\n            process.kill()", "in ():\n            pass", check_hang, "hangs"),
    ("6 * timeout if any(votes.values()) else None", "6 * timeout", check_long, "fails"),
    ("6 * timeout", "2 * timeout", check_connecting, "a healthy one is killed"),
    ("\n        dist.destroy_process_group()", "\n        pass", check_neighbours, "hangs"),
    ("return saver.exitcode", "return 0", check_ends, "ends with 0"),
    ("/ (config.accum * n_parts)", "/ (config.accum * dist.get_world_size())", check_runs, "weights differ"),
    ("/ (config.accum * n_parts)", "/ n_parts", check_parity, "differ"),
    ("detach().to(wide(param.dtype))", "detach()", check_masters, "moved by"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "survive")
GPU_MUTANTS = [
    ("        if ask(vote):", "        if ask(vote) and total_loss.item() < 9:", check_gpu, "the host waits"),
    ("            dist.all_reduce(tensor)", "            dist.get_rank() or dist.all_reduce(tensor)",
     check_order, "ranks wait for one another"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "survive")
