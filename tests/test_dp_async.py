"""What is special to dp_async.py: who waits for whom, how old a push may be; a failure ends the run."""

import threading
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn as nn

from tests.checks import check_ledger, check_parity
from tests.harness import TINY, Lesson, error_of, holds, load, mutants, on_ranks, said, world
from tools.watch import noted

RUN = "python LESSON --workers N"
NAIVE = "--mode naive"
RACE = "2 alone --workers 2 --steps 9"
LESSON = Lesson(
    variants=("--mode naive",),
    slack=lambda root, block, size, flags: (0, root),  # a gradient that has come, and what it is cast to
    own={"--staleness": ("0 3", "-1 x"), "--slow": ("1 1.5", "0.5 x nan inf")},
    bad=("--workers 0", "--mode any"),
    gpu=("--mode asp", "--mode ssp"),
    waits={"": {("copy", "microbatches()"): 2, ("item", "train_share()"): 2, ("item", "print_step()"): 1}},
)


def straggle(name, mode, staleness=2):
    """On a rank: how many pushes of three workers come before the first of worker 0, and the oldest push."""
    lesson = load(name)
    module = nn.Linear(1, 1, bias=False)
    server = lesson.Server(module, SimpleNamespace(mode=mode, workers=3, staleness=staleness, clip=1, lr=1))
    pushes, pulled, may_push = [], threading.Event(), threading.Event()

    def train_share(server, worker, replica, step, config):
        first = worker == 0 and step == 1
        assert worker == 0 or pulled.wait(60)  # worker 0 pulls the first weights
        server.wait_turn(worker)
        version = server.pull(replica)
        replica.weight.grad = torch.ones(1, 1)
        if first:
            pulled.set()
            may_push.wait(60)
        pushes.append(worker)
        server.push(worker, replica, version, torch.zeros(()))

    lesson.train_share = train_share
    config = SimpleNamespace(dtype="fp32")
    tasks = lesson.concurrent(range(1, 9), range(3))
    threads = [threading.Thread(target=lesson.work, args=(server, own, "cpu", config)) for own in tasks]
    threads.append(threading.Thread(target=lambda: [server.serve_push() for _ in range(24)]))
    for thread in threads:
        thread.start()
    while len(server.condition._waiters) < 3 and len(pushes) < 16:  # the others and the server wait
        threading.Event().wait(0.001)
    may_push.set()
    for thread in threads:
        thread.join(60)
    assert len(pushes) == sum(server.ages.values()) == 24, "pushes are lost"
    return pushes.index(0), max(server.ages)


def check_straggler(name):
    assert world(1).run(straggle, name, "bsp")[0] == (2, 0), "bsp does not wait for all, or has stale pushes"
    for staleness in 0, 1, 3:
        others, oldest = world(1).run(straggle, name, "ssp", staleness)[0]
        assert others == 2 * (staleness + 1), "ssp: not S + 1 pushes each"
        assert oldest <= 2 * (2 * staleness + 1), f"a push was {oldest} updates old"
    others, oldest = world(1).run(straggle, name, "asp")[0]
    assert (others, oldest) == (16, 16), f"asp waits for a straggler: {others} others, {oldest} old"


@on_ranks(1)
def check_failure(name):
    """A worker's error ends the run, while others wait for it."""
    lesson = load(name)
    microbatches = lesson.microbatches

    def fail(config, step, device, worker, workers):
        assert worker != 1 or step < 2, "out of order"
        return microbatches(config, step, device, worker, workers)

    lesson.microbatches = fail
    for mode in "bsp", "asp", "ssp", "naive":
        flags = f"{TINY} --workers 3 --mode {mode}".split()
        error = error_of(lambda flags=flags: lesson.train(lesson.parse(flags)))
        assert "out of order" in error, f"{mode}: a worker fails, and {error}"
    lesson.microbatches = microbatches
    lesson.Server.update = lambda server: {}["no such update"]
    error = error_of(lambda: lesson.train(lesson.parse(f"{TINY} --workers 3".split())))
    assert error == "KeyError: 'no such update'", f"an update fails, and {error}"


@on_ranks(1)
def check_slow(name):
    lesson = load(name)
    with mock.patch("time.sleep") as sleep:
        out, _, _ = said(lambda: lesson.train(lesson.parse(f"{TINY} --workers 2 --slow 3".split())))
    slept = [call.args[0] > 0 for call in sleep.mock_calls]
    assert slept == [True] * 3, "not one worker is slow"
    assert out.endswith("push: {0: 6}\n"), f"says something else: {out}"


@on_ranks(1)
def check_turns(name):
    """Naive: one thread. Else a thread for each worker."""
    lesson = load(name)
    for mode, expected in ("naive", 1), ("bsp", 3):
        seen, share = set(), lesson.train_share
        lesson.train_share = noted(share, lambda *_, seen=seen: seen.add(threading.get_ident()))
        lesson.train(lesson.parse(f"{TINY} --workers 3 --mode {mode}".split()))
        assert len(seen) == expected, f"{mode}: {len(seen)} threads"
        lesson.train_share = share


test_each_promise_is_kept = holds("dp_async", check_straggler, check_failure, check_slow, check_turns)


@pytest.mark.parametrize("mode", ["asp", "ssp"])
def test_losses_fall_without_waiting(mode):
    losses = world(1).run(losses_of, f"{TINY} --workers 3 --mode {mode} --steps 8 --lr 0.003")[0]
    assert losses[-1] < losses[0] - 0.3


def losses_of(flags):
    lesson, losses = load("dp_async"), []
    lesson.print_step = lambda config, step, loss, norm, started: losses.append(loss.item())
    lesson.train(lesson.parse(flags.split()))
    return losses


check_hangs = partial(check_failure, timeout=8)
MUTANTS = [
    (".get(config.mode, 0)", ".get(config.mode, 1)", check_straggler, "bsp does not wait"),
    ('"ssp": config.staleness', '"ssp": config.staleness + 1', check_straggler, "not S + 1 pushes"),
    ('"asp": math.inf', '"asp": 5', check_straggler, "asp waits"),
    ("ages[self.version - version]", "ages[self.version - version + 1]", check_straggler, "stale pushes"),
    ("return self.version", "return 0", check_straggler, "stale pushes"),
    ("step, config)\n    except BaseException as error:\n        server.fail(error)",
     "step, config)\n    except BaseException:\n        pass", check_hangs, "did not come back"),
    ("is_true() or self.error)", "is_true())", check_hangs, "did not come back"),
    ("            server.fail(error)\n            raise", "            raise", check_hangs,
     "did not come back"),
    ("copied.copy_(param)", "pass", check_parity, "differ"),
    ("        replica.zero_grad()", "        pass", check_parity, "differ"),
    ("* server.pushes_per_update)", "* 1)", check_parity, "differ"),
    ("        self.optimizer.zero_grad()\n", "", check_parity, "differ"),
    ("if worker == 0:", "if True:", check_slow, "not one worker"),
    ("copied.grad.to(param.device, copy=True)", "copied.grad", check_ledger, "another thread is read"),
    ('naive if config.mode == "naive" else concurrent', "concurrent", check_turns, "naive: 3 threads"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "dp_async")
