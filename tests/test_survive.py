"""survive.py: whoever dies and when, the weights are single.py's; and its votes, in every order of events."""

import copy
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness import (
    FORK,
    TEXT,
    Lesson,
    apart,
    error_of,
    holds,
    load,
    mutants,
    on_ranks,
    path_of,
    said,
    train,
)

LEARN = "python LESSON --workers 4 --steps 12 --kill 1@3 0@6 --join 9 --accum 3 --timeout 2"
NO_INT = "0 -1 1.5 x 1000000000000 99999999999999999999999"
NOBODY = ("--kill 1", "--kill 2@3", "--kill 1@0", "--kill 1@21", "--join 0", "--join -3", "--join 21")
LESSON = Lesson(
    own={"--timeout": ("1 10", "0 nan x"), "--min-workers": ("1 2", NO_INT)},
    bad=("--kill 1@3", "--join 4", *(f"{flags} --workers 2" for flags in NOBODY)),
)


SHAPE = f"--layers 2 --heads 2 --width 16 --context 8 --batch 60 --dtype fp64 --lr 0.01 --data {TEXT}"
# Where a worker may die, besides the place of --kill: before this line, of which step.
PLACES = {
    ":vote": ('            if self.store.add(f"{key}/votes", 1)', "{step}"),
    ":decide": ('                self.store.compare_set(key, "", "committed")', "{step}"),
    ":answer": ('            self.store.compare_set(f"{self.generation}/members"', "{step}"),
    ":connect": ("        if not self.snapshot:\n", "{self.snapshot and self.snapshot[0]}"),
}


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


def check_orders(name, deaths=1, cases=4):
    """All orders of events in some cases, and a sample in others."""
    path = str(path_of(name.removesuffix(".py")))
    orders = load("tests/orders")
    orders.try_every_order(path, deaths, orders.CASES[:cases])
    orders.try_walks(path, 400)


def launched(name, flags, signals=(), code=0, edits=None, timeout=None):
    """Launch a job, send signals, (kind, worker, when), and check that it ends, with single.py's weights.
    edits: {a line of the lesson: what this job has in its place}. timeout: if it is less than 1."""
    asked = f"{SHAPE} {flags}"
    steps = re.search(r"--steps \d+", asked)
    _, weights = train("single", 1, f"{SHAPE} {steps[0] if steps else ''}".strip())
    pids, stores, timers = {}, [], []

    def host(*args, **options):
        stores.append(dist.TCPStore(*args, **options))
        return stores[0]

    def send(kind, worker):
        while kind == signal.SIGSTOP and not (stores and stores[0].check(["1/now"])):
            time.sleep(0.01)  # for one that hangs before all have met the others wait five minutes
        with suppress(ProcessLookupError, KeyError):
            os.kill(pids[worker], kind)
        if kind == signal.SIGSTOP:  # nobody hurries a worker that saves: let it go on some time
            send_later(signal.SIGCONT, worker, 8)

    def send_later(kind, worker, when):
        timers.append(threading.Timer(when, send, (kind, worker)))
        timers[-1].daemon = True
        timers[-1].start()

    with TemporaryDirectory() as folder, limit(60):
        survive = load(edited(name, folder, edits))
        survive.print = lambda line, **_: pids.update([map(int, re.findall(r"\d+", line))])
        survive.dist = mock.Mock(wraps=dist, DistNetworkError=dist.DistNetworkError, TCPStore=host)
        search = [folder, *sys.path]
        with mock.patch.dict(sys.modules, survive=survive), mock.patch.object(sys, "path", search):
            for each in signals:
                send_later(*each)
            config = survive.parse(f"{asked} --save {folder}/w".split())
            config.timeout = timeout or config.timeout
            *_, ended = said(lambda: survive.launch(config))
            for timer in timers:
                timer.cancel()
        assert ended == code, f"exit code {ended}"
        while any(map(is_alive, pids.values())):  # a busy system takes a while to end them
            time.sleep(0.01)
        assert code or weights_differ(f"{folder}/w", weights) < 1e-10, "weights differ"
        return Path(folder, "log").read_text() if Path(folder, "log").exists() else ""


def edited(name, folder, edits):
    """The path of a copy of a lesson or mutant, named survive.py, that has these edits."""
    source = path_of(name.removesuffix(".py")).read_text()
    for old, new in (edits or {}).items():
        assert source.count(old) == 1, f"{source.count(old)} times: {old}"
        source = source.replace(old, new.replace("FOLDER", repr(folder)))
    Path(folder, "survive.py").write_text(source)
    return f"{folder}/survive.py"


def weights_differ(path, weights):
    try:
        return apart(torch.load(path), weights)
    except Exception as error:
        raise AssertionError(f"weights differ: {error}") from None


def deadly(kills):
    """Edits by which workers die, as by --kill, at other places: {"0@5:vote", ...}."""
    found = {}
    for place, (line, step) in PLACES.items():
        if those := {kill.removesuffix(place) for kill in kills if kill.endswith(place)}:
            indent = line[: len(line) - len(line.lstrip())]
            death = f'{indent}f"{{self.worker}}@{step}" in {those} and os.kill(os.getpid(), 9)\n'
            found[line] = death + line
    return found


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def members_of(name, store=None, worker=0, **options):
    """A lesson, and Members of it, without processes."""
    options = {"workers": 2, "timeout": 0.1, "min_workers": 1, "kill": (), "steps": 20} | options
    lesson, store = load(name), store or dist.HashStore()
    for first in range(options["workers"]):
        store.set(f"has_weights/{first}", "")
    return lesson, lesson.Members(SimpleNamespace(**options), store, worker)


def name_after_a_failure(name):
    _, members = members_of(name, timeout=0.5)
    members.store.append("1/answers", "1 ")  # of a worker that never connects
    members.regroup(1)
    return dist.group.WORLD.group_name


def check_name(name):
    """A group that did not form leaves nothing behind: all members, new ones too, name the next one alike."""
    with FORK.Pool(1) as pool, limit(60):
        assert pool.apply(name_after_a_failure, [name]) == "0", "another name"


def check_out(name):
    """A worker that was out before it woke says so."""
    lesson, members = members_of(name, worker=1)
    members.generation, members.members, members.timeout = 1, [0, 1], timedelta(seconds=0.1)
    for key, value in {"1/members": "[0, 1]", "2/members": "[0]", "2/answers": "0 "}.items():
        members.store.set(key, value)
    with simulated(lesson):
        assert not members.attempt(3, mock.Mock(side_effect=RuntimeError("timed out")))
        *_, ended = said(lambda: members.regroup(3))
    assert ended == "survive.py: worker 1 is out of generation 2", f"ends with {ended}"


@contextmanager
def simulated(lesson, **instead):
    """Members of one worker without a process group, and with a clock that goes on when they sleep."""
    clock = SimpleNamespace(now=0, perf_counter=float)
    clock.monotonic = lambda: clock.now

    def sleep(seconds):
        clock.now += seconds
        assert clock.now < 100, "waits for ever"

    clock.sleep = sleep
    group = {"init_process_group": mock.Mock(), "get_rank": lambda: 0, "is_initialized": lambda: False}
    group |= {"send_object_list": mock.Mock(), "PrefixStore": mock.Mock()} | instead
    group, time = mock.patch.multiple(lesson.dist, **group), mock.patch.object(lesson, "time", clock)
    with group, time, mock.patch.dict(os.environ), limit(20):
        yield clock


def check_timeouts(name):
    """Whoever waits for a worker that hangs waits for --timeout, and twice that for its answer. If the same
    members fail again, they wait longer."""
    lesson, members = members_of(name, mock.Mock(wraps=dist.HashStore()), workers=1)
    with simulated(lesson) as clock:
        members.regroup(1)
        assert members.attempt(1, lambda: None)
        limits = [call.args[2] for call in lesson.dist.init_process_group.mock_calls]
        limits += [call.args[1] for call in members.store.wait.mock_calls]
        assert set(limits) == {timedelta(seconds=0.1)}, f"waits for {max(limits)}"
        members.members, members.generation = [0, 1], 2
        members.store.set("2/answers", "0 ")
        assert members.propose() == [0] and clock.now < 0.3, "waits longer for an answer"
        for seconds in 0.1, 0.2, 0.4:
            members.regroup(1)
            assert members.timeout == timedelta(seconds=seconds), f"a slow worker has {members.timeout}"


def check_state(name):
    """The state is sent to newcomers, and only when there are some."""
    lesson, members = members_of(name, workers=1)
    with simulated(lesson):
        for step in 1, 2:
            members.regroup(step)
        assert not lesson.dist.send_object_list.called, "the state is sent to members who have it"
        members.store.append("3/answers", "1 ")
        members.store.set("3/0/votes", "1")  # the newcomer's
        members.regroup(3)
        assert lesson.dist.send_object_list.mock_calls == [mock.call([[3]], 1)], "a newcomer gets no state"


def check_error(name):
    """What fails though nobody dies is no death: the job ends, and says why."""
    lesson, members = members_of(name, workers=1)
    fail = mock.Mock(side_effect=RuntimeError("no device eth9"))
    with simulated(lesson, init_process_group=fail):
        _, errors, code = said(lambda: members.regroup(1))
    assert code == 2 and "no device eth9" in errors[0], f"exit code {code}: {errors}"
    assert fail.call_count < 10, f"fails {fail.call_count} times"


def check_newcomer(name):
    """A newcomer that waits asks for news a hundred times a second at most."""
    lesson, members = members_of(name, worker=2)
    lesson.time = SimpleNamespace(sleep=mock.Mock(side_effect=InterruptedError))
    with suppress(InterruptedError):
        members.enter(5)
    assert lesson.time.sleep.call_args.args[0] >= 0.01, "a newcomer polls too often"


@on_ranks(1)
def check_bf16(name):
    """A newcomer goes on from the weights that it was sent, in bf16, too."""
    lesson, losses, states = load(name), [], []
    config = lesson.parse(f"{SHAPE} --dtype bf16 --steps 6".split())
    lesson.print_step = lambda config, step, loss, norm, started: losses.append(loss.item())
    members = lesson.Members(config)
    # At step 4, as if a member had died: the state is what a newcomer would be sent.

    def attempt(step, communicate, *arguments):
        communicate(*arguments)
        return step != 4 or bool(states)

    def regroup(step, *parts):
        states.extend(copy.deepcopy([step, *(part.state_dict() for part in parts)]))

    members.attempt, members.regroup = attempt, regroup
    lesson.train(config, members)
    members = lesson.Members(config)
    members.snapshot = states
    lesson.train(config, members)
    assert apart(losses[6:], losses[3:6]) < 1e-6, "a newcomer computes with other weights"


BACKWARD = "        loss = backward("


def before(condition, line):
    """Edits by which a worker does this before it computes a step."""
    return {BACKWARD: f"        if {condition}:\n            {line}\n{BACKWARD}"}


# In step 3, worker 0 waits for a newcomer to sign up: however fast steps are, that one is there in time.
SIGNED = 'members.store.check(["2/answers"])'
WAIT_FOR_NEWCOMER = before("step == 3 and members.generation == 1", f"while not {SIGNED}: time.sleep(0.01)")


def check_runs(name):
    launched(name, "--workers 4 --kill 1@3 --join 8 --timeout 1", edits=deadly({"0@5:vote", "3@3:answer"}))
    launched(name, "--workers 5 --kill 2@2 1@2 0@9 --accum 3 --timeout 3")
    launched(name, "--workers 1 --join 18 2 --kill 0@17 --timeout 2", edits=WAIT_FOR_NEWCOMER)


def check_min_workers(name):
    launched(name, "--workers 4 --kill 1@2 3@4 --min-workers 3", code=2)


def check_slow(name):
    """A step for which some must wait for one to three timeouts succeeds, once these have doubled."""
    edits = before("members.worker == 1", "time.sleep(1.6)")
    launched(name, "--workers 3 --steps 1 --timeout 1", edits=edits)


SAVE = "        torch.save(state_dict, path)"
LOG = '        open(FOLDER + "/log", "a").write("saved ")\n'


def check_slow_save(name):
    """Saving may take longer than three timeouts: the job waits for it, and nobody else saves."""
    edits = {SAVE: f"{LOG}        time.sleep(1.5 + dist.get_rank())\n{SAVE}"}
    log = launched(name, "--workers 3 --steps 2", edits=edits, timeout=0.4)
    assert log == "saved ", f"saved: {log.count('saved')} times"


TRAIN = "    train(config, members)\n"
ALONE = "survive.py: nobody who has the weights is left"


def check_death_in_save(name):
    """If the one that saves dies, the job ends with an error."""
    edits = {SAVE: f"        os._exit(1)\n{SAVE}"}
    launched(name, "--workers 3 --steps 2", code=ALONE, edits=edits)


def check_refused(name):
    """A newcomer that is refused is out, says so, and the others go on."""
    new = "config.data, sys.stderr = '/nowhere', open(FOLDER + '/log', 'a')"
    edits = {TRAIN: f"    if worker == 2:\n        {new}\n{TRAIN}"} | WAIT_FOR_NEWCOMER
    told = launched(name, "--workers 2 --join 2 --timeout 2", edits=edits)
    assert "--data /nowhere" in told and "No such file" in told, f"says: {told}"


def check_again(name):
    """A step that is attempted again in its generation is an error: its votes have been counted."""
    for problem in None, RuntimeError:
        lesson, members = members_of(name, workers=1)
        attempt = partial(members.attempt, 1, mock.Mock(side_effect=problem))
        with simulated(lesson):
            members.regroup(1)
            assert attempt() == (problem is None)
            end = error_of(attempt)
        assert "step 1: attempt each step once" in end, f"a step again: {end}"


def check_early_end(name):
    """A worker that ends too early, even with exit code 0, ends alone."""
    edits = before("step == 2 and members.worker == 1", "os._exit(0)")
    launched(name, "--workers 3 --steps 4 --timeout 2", edits=edits)


def check_nobody(name):
    """If nobody is left that has the weights, the job ends, though newcomers wait."""
    launched(name, "--workers 1 --join 5 --kill 0@1", code=ALONE)
    deaths = deadly({f"0@{step}:connect" for step in range(2, 21)})  # before it has sent its state
    launched(name, "--workers 1 --join 2", code=ALONE, edits=deaths | WAIT_FOR_NEWCOMER)


FUZZ = os.environ.get("FUZZ", "").split()  # of ./run.sh fuzz


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
        joins = [str(draw.randint(2, 19)) for _ in range(draw.choice((0, 0, 1, 2)))]
        kills, signals = [], []
        for worker in victims:
            if draw.random() < 0.5:
                kills.append(f"{worker}@{draw.randint(1, 20)}{draw.choice(('', *PLACES))}")
            else:
                signals.append((draw.choice(kinds), worker, draw.uniform(0.02, 0.4)))
        own = " ".join(kill for kill in kills if ":" not in kill)
        flags = f"--workers {workers} --timeout 1 --join {' '.join(joins)} --kill {own}"
        try:
            launched("survive", flags, signals, edits=deadly(kills))
        except Exception as error:
            pytest.fail(f"seed {seed}, {deaths} deaths: survive.py {flags}, {kills}, {signals}: {error}")


@contextmanager
def begun(flags, seconds=60):
    """A job that takes steps: (its process, {worker: its process's number})."""
    command = [sys.executable, str(path_of("survive")), *SHAPE.split(), *flags.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        with limit(seconds):
            pids = re.findall(r"worker (\d+) is process (\d+)", read_to("step  *1/", process))
            yield process, {int(worker): int(pid) for worker, pid in pids}
    finally:
        process.kill()


def read_to(pattern, process):
    told = ""
    while not re.search(pattern, told):
        line = process.stdout.readline()
        assert line, f"ended without {pattern!r}: {told}"
        told += line
    return told


def test_one_that_hangs_is_out_and_when_it_wakes_it_disturbs_nobody(tmp_path):
    slow = "--steps 150 --lr 1e-4"  # with 0.01 rounding alone grows to 5e-8 in 150 steps
    with begun(f"--workers 3 --timeout 1 {slow} --save {tmp_path}/w", 200) as (process, pids):
        os.kill(pids[1], signal.SIGSTOP)
        read_to(r"generation 2 \| \[0, 1, 2\] -> \[0, 2\] in .* again", process)
        os.kill(pids[1], signal.SIGCONT)
        told, _ = process.communicate()
    told = told.partition("worker 1 is out of generation 2")[2]
    assert "step 150/150" in told and "generation 3" not in told
    _, weights = train("single", 1, f"{SHAPE} {slow}")
    assert process.returncode == 0 and apart(torch.load(tmp_path / "w"), weights) < 1e-9


def test_workers_end_with_their_launcher():
    with begun("--workers 3 --steps 100000") as (process, _):
        process.kill()
        told, _ = process.communicate()  # until the pipe is closed: no process is left that could write
    assert "DistNetworkError" in told


@pytest.mark.skipif(not FUZZ, reason="minutes, of ./run.sh fuzz")
def test_two_deaths_and_two_delays_at_any_moment_leave_no_member_behind():
    orders = load("tests/orders")
    orders.try_every_order("more/survive.py", cases=orders.CASES + orders.LONG)
    orders.try_walks("more/survive.py", 20_000)


CHECKS = [check_orders, check_name, check_out, check_timeouts, check_state, check_error, check_newcomer]
CHECKS += [check_bf16, check_runs, check_min_workers, check_slow, check_slow_save, check_death_in_save]
CHECKS += [check_refused, check_again, check_early_end, check_nobody]
test_each_promise_is_kept = holds("survive", *CHECKS)
ABORT = '            self.store.compare_set(key, "", f"worker {self.worker}: {error}")\n'
DEAD = '        store.compare_set(f"{generation}/{step}", "", f"worker {worker} has ended")'
LEFT = 'any(store.check([f"has_weights/{other}"]) for other in left)'
LIST = 'self.store.compare_set(f"{self.generation}/members", "", str(self.propose()))'
STATE = 'if not self.store.check([f"has_weights/{member}"])'
MUTANTS = [
    ("if answers | dead >= set(self.members)", "if answers", check_orders, "a living member is left"),
    ("[worker for worker in order", "[worker for worker in sorted(order)", check_orders, "no state"),
    (ABORT, ABORT.replace("compare_set(key, \"\", ", "set(key, "), check_orders, "counts twice"),
    (ABORT, f"{ABORT}            return False\n", check_orders, "counts twice"),
    ('key = f"{self.generation}/{step}"', 'key = f"{step}"', check_orders, "for ever"),
    ("1) == len(self.members)", "1) > 1", check_orders, "for ever"),
    (DEAD, "        pass", check_orders, "for ever"),
    ("while self.store.compare_set(", "while 0 and self.store.compare_set(",
     check_runs, "nobody who has the weights"),
    ("                old = self", f"                {LIST}\n                old = self",
     check_orders, "no state"),
    ("time.sleep(0.01)\n            self.snapshot = None", "time.sleep(0.01)", check_orders, "for ever"),
    (LEFT, "left", check_orders, "for ever"),
    ("set(members or others)", "set(members)", check_orders, "the job ends too early"),
    ("<= self.attempted", "< self.attempted", check_again, "a step again: nothing"),
    ("members)\n    if dist.get_rank() == 0:", "members)\n    if True:", check_slow_save, "weights differ"),
    ("if config.save and dist.get_rank() == 0", "if config.save", check_slow_save, "saved: 3 times"),
    ("        flat_grad.z", "        members.snapshot or flat_grad.z", check_runs, "weights differ"),
    ("else:\n            members.r", "else:\n            optimizer.step()\n            members.r",
     check_runs, "weights differ"),
    ("* len(inputs) / config.batch", "/ dist.get_world_size() / config.accum", check_runs, "weights differ"),
    ("zip((masters, optimizer), states)", "zip((masters,), states)", check_runs, "weights differ"),
    ("copy.deepcopy(masters)", "GPT(config)", check_bf16, "other weights"),
    ("            if self.worker not in self.members:\n                sys.exit(",
     "            if False:\n                sys.exit(", check_out, "ends with 0"),
    ("_world.group_count = 0", "_world.group_count", check_name, "another name"),
    ("< self.config.min_workers", "< self.config.min_workers * (self.generation < 3)",
     check_min_workers, "exit code 0"),
    ("timedelta(seconds=self.config.timeout)", "timedelta(seconds=self.config.timeout + 6)",
     check_timeouts, "waits for 0:00:06"),
    ("+ 2 * self.timeout.total_seconds()", "+ 60", check_timeouts, "waits longer"),
    ("wait([key], self.timeout)", "wait([key], 2 * self.timeout)", check_timeouts, "waits for 0:00:00.2"),
    ("or time.monotonic() > deadline", "", check_timeouts, "for ever"),
    ("self.timeout *= 2", "pass", check_timeouts, "a slow worker has 0:00:00.1"),
    ("total_seconds() > 99 *", "total_seconds() > 9e9 *", check_error, "fails 34 times"),
    (STATE, "if False", check_state, "a newcomer gets no state"),
    (STATE, "if True", check_state, "members who have it"),
    ("time.sleep(0.01)\n            self", "time.sleep(1e-3)\n            self", check_newcomer, "too often"),
    ("code == 2 and worker < config.workers", "code == 2", check_refused, "exit code 2"),
    ('if store.check(["saved"]):', "if code == 0:", check_early_end, "weights differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "survive")
