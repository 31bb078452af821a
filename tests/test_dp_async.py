"""What is special to dp_async.py."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import product
from unittest import mock

import torch
import torch.nn as nn

from tests.checks import check_ledger, check_parity
from tests.harness import TINY, Lesson, error_of, holds, load, mutants, on_ranks, said, world

RUN = "python LESSON --workers N"
LESSON = Lesson(
    own={"--staleness": ("0 3", "-1 17 x"), "--slow": ("1 2.5", "0=4 0.5 x nan inf")},
    bad=("--workers 0", "--mode any"),
    gpu=("--mode asp", "--mode ssp"),
    waits={"": {("copy", "microbatches()"): 2, ("item", "train_share()"): 2, ("item", "print_step()"): 1}},
)


def serve(lesson, workers, mode, function, steps, staleness=0, more=0):
    """A server of one weight, which begins at 0, when all tasks are done, or it has waited for more."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    tasks = product(range(1, steps + 1), range(workers))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    server = lesson.Server(module, optimizer, tasks, workers, mode, staleness)
    with ThreadPoolExecutor(workers) as threads, closing(server):
        for worker in range(workers):
            threads.submit(lesson.work, server, worker, "cpu", torch.float32, function)
        server.serve(steps * workers + more)
    return server


def push_one(server, worker, replica, step=0, share=0, meanwhile=bool):
    """A task: a gradient of -1. Between pull and push meanwhile() is called."""
    version = server.pull(replica)
    meanwhile()
    replica.weight.grad = torch.full((1, 1), -1.0)
    server.push(worker, replica, version, 0.0)


def wait_for(server, others):
    """Wait until so many threads, of workers or the server's, wait for one another: nothing will change."""
    while len(server.condition._waiters) < others:
        time.sleep(0.001)


def straggle(name, mode, staleness=2):
    """On a rank: others' pushes before the first of worker 0, which waits until they stop; the oldest."""
    pushes, pulled = [], threading.Event()

    def hold_up(server):
        pulled.set()
        while len(server.condition._waiters) < 3 and len(pushes) < 23:  # the others wait, or have ended
            time.sleep(0.001)
        pushes.append(0)

    def task(server, worker, replica, step, share):
        late = worker == 0 and 0 not in pushes
        assert worker == 0 or pulled.wait(200)  # worker 0 pulls the first weights
        push_one(server, worker, replica, meanwhile=lambda: late and hold_up(server))
        pushes.append(worker)

    server = serve(load(name), 3, mode, task, 8, staleness)
    found = server.module.weight.item(), server.version, sum(server.ages.values())
    assert mode == "bsp" or found == (24, 24, 24), f"pushes are lost: {found}"
    return pushes.index(0), max(server.ages)


def check_straggler(name):
    assert world(1).run(straggle, name, "bsp")[0] == (2, 0), "bsp does not wait for all, or has stale pushes"
    for staleness in 0, 1, 3:
        others, oldest = world(1).run(straggle, name, "ssp", staleness)[0]
        assert others == 2 * (staleness + 1), "ssp: not S + 1 pushes each"
        assert oldest <= 2 * (2 * staleness + 1), f"a push was {oldest} updates old"
    others, oldest = world(1).run(straggle, name, "asp")[0]
    assert (others, oldest) == (23, 23), f"asp waits for a straggler: {others} others, {oldest} old"


@on_ranks(1)
def check_ends(name):
    """Whatever fails, or cannot go on, ends the run with an error that says so."""
    lesson = load(name)

    def fail(server, worker, replica, step, share):
        if worker == 1:
            begun.set()
            wait_for(server, 1 if mode == "asp" else 3)  # the server; and the other workers
            raise ValueError(f"worker {worker} is out of order")
        assert begun.wait(200)
        push_one(server, worker, replica)

    def forget(server, worker, replica, step, share):
        server.pull(replica)

    for mode in "bsp", "asp", "ssp":
        begun = threading.Event()
        error = error_of(lambda mode=mode: serve(lesson, 3, mode, fail, 5))
        assert "is out of order" in error, f"{mode}: a worker fails, and {error}"
        error = error_of(lambda mode=mode: serve(lesson, 3, mode, forget, 5))
        assert "must push once" in error, f"{mode}: a task pushes nothing, and {error}"
        error = error_of(lambda mode=mode: serve(lesson, 3, mode, push_one, 5, more=1))
        assert "more pushes than there are tasks" in error, f"{mode}: a push too many, and {error}"
    module = nn.Linear(1, 1, bias=False)
    error = error_of(lambda: lesson.Server(module, None, range(7), 3, "bsp"))
    assert "a multiple of the workers" in error, f"tasks that bsp cannot use: {error}"
    with closing(lesson.Server(module, None, [()], 1, "asp")) as server:
        assert server.take(0) == (), "an empty task is lost"
    with closing(lesson.Server(module, None, [], 2, "ssp")) as server:
        server.clocks = [9, 1]
        assert server.take(0) is None, "a task out of nothing"


@on_ranks(1)
def check_broken(name):
    """An update fails, and the workers end."""
    lesson = load(name)
    lesson.Server.apply = lambda *_: {}["no such update"]
    assert error_of(lambda: serve(lesson, 3, "asp", push_one, 5)) == "KeyError: 'no such update'"


@on_ranks(1)
def check_slow(name):
    lesson = load(name)
    lesson.time = mock.Mock(perf_counter=time.perf_counter)
    out, _, _ = said(lambda: lesson.train(lesson.parse(f"{TINY} --workers 2 --slow 3".split())))
    slept = [call.args[0] > 0 for call in lesson.time.sleep.mock_calls]
    assert (sum(slept), len(slept)) == (3, 6), "not one worker is slow"
    assert " | bsp 2 | slow 3\n" in out and out.endswith("push: {0: 6}\n"), f"says something else: {out}"


test_each_promise_is_kept = holds("dp_async", check_straggler, check_ends, check_broken, check_slow)
check_hangs = partial(check_ends, timeout=5)
MUTANTS = [
    ('"bsp": 0', '"bsp": 1', check_straggler, "bsp does not wait"),
    ('"ssp": staleness', '"ssp": staleness + 1', check_straggler, "not S + 1 pushes"),
    ('"asp": math.inf', '"asp": 5', check_straggler, "asp waits"),
    ("ages[self.version - version]", "ages[self.version - version + 1]", check_straggler, "stale pushes"),
    ("return self.version", "return 0", check_straggler, "stale pushes"),
    ("        server.close(error)", "        pass", check_hangs, "did not come back"),
    ("if worker in self.busy:", "if False:", check_hangs, "did not come back"),
    ("self.inbox or self.has_ended()", "self.inbox", check_hangs, "did not come back"),
    ("if len(self.tasks) % self.pushes_per_update:", "if False:", check_ends, "that bsp cannot use"),
    ("            self.busy.clear()", "            pass", partial(check_broken, timeout=5), "come back"),
    ("copied.copy_(param)", "pass", check_parity, "losses differ"),
    ("        replica.zero_grad()", "        pass", check_parity, "losses differ"),
    ("param.grad /= self.pushes_per_update", "pass", check_parity, "norms differ"),
    ("not self.tasks or self.may_go_on(worker)", "self.may_go_on(worker)",
     check_hangs, "did not come back"),
    ("self.max_norm = max_norm", "self.max_norm = math.inf", check_parity, "losses differ"),
    ("(slowdown - 1)", "slowdown", check_slow, "not one worker"),
    ("copied.grad.to(param.device, copy=True)", "copied.grad", check_ledger, "another thread is read"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "dp_async")
