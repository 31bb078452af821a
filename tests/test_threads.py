"""What is special to dp_threads.py and dp_async.py, the lessons of one process."""

import contextlib
import io
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn as nn

from test_all import check_masters, check_parity
from tests.harness import TINY, apart, load, rejects, train, world

# ---- dp_threads.py: any module, all at once, errors, lifetimes ----


class Odd(nn.Module):
    """Two inputs, a tied and a frozen weight, a buffer that forward changes, a weight that is not used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.last[0].weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_module("none", None)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, y):
        self.calls += 1
        return self.last(self.norm.eval()(self.first(x) * self.frozen) + y)


def gradients_of_odd(name, replicas, rows):
    """On a rank: how far outputs and gradients are from those without replicas; calls, as a buffer says."""
    torch.manual_seed(0)
    module = Odd().double()
    x, y = torch.randn(2, rows, 3).double()
    dp = load(name).DP(module, ["cpu"] * replicas)
    found = []
    for run in (module, lambda both: dp(both)):
        output = run(x, y) if run is module else run((x, y))
        module.zero_grad()
        (output.square().mean() + module.frozen.sum()).backward()
        grads = [param.grad for param in module.parameters()]
        found.append([output.detach(), *(torch.zeros(3) if grad is None else grad for grad in grads)])
    (more,) = torch.autograd.grad(dp((x, y)).square().mean(), [module.first.bias])
    assert module.unused.grad is None and module.frozen.grad is None, "a gradient out of nothing"
    worst = max(apart(one, other) for one, other in zip(*found))
    return max(worst, apart(more, module.first.bias.grad)), module.calls.item()


def check_odd(name, replicas=3, rows=5):
    worst, calls = world(1).run(gradients_of_odd, name, replicas, rows)[0]
    assert worst < 1e-12, "outputs or gradients differ"
    assert calls == 3, "the module's buffer is not the first replica's"


@pytest.mark.parametrize("replicas, rows", [(1, 3), (2, 6), (3, 5), (4, 5)])
def test_any_module_has_its_own_outputs_and_gradients(replicas, rows):
    check_odd("dp_threads", replicas, rows)


class Meeting(nn.Module):
    """Its forward and its backward end when those of three replicas have begun."""

    def __init__(self, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.barrier = threading.Barrier(3, timeout=seconds)

    def forward(self, x):
        self.barrier.wait()
        y = x * self.weight
        y.register_hook(lambda gradient: gradient * (self.barrier.wait() < 3))
        return y


def meet(name, threads, seconds):
    """On a rank: whether three replicas meet."""
    try:
        load(name).DP(Meeting(seconds), ["cpu"] * 3, threads)(torch.ones(6, 3)).sum().backward()
    except threading.BrokenBarrierError:
        return False
    return True


def check_meeting(name):
    assert world(1).run(meet, name, True, 10)[0], "replicas are not at work at once"
    assert not world(1).run(meet, name, False, 0.1)[0], "replicas are at work at once with --no-threads"


def test_replicas_are_at_work_at_once_or_one_after_the_other():
    check_meeting("dp_threads")


class Failing(nn.Module):
    """Fails where a row is negative, in backward where it is 7; notes what has finished."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.finished = []

    def forward(self, x):
        if x[0] < 0:
            raise KeyError("a bad row")
        time.sleep(0.2)
        y = x * self.weight
        if x[0] == 7:
            y.register_hook(lambda _: {}["a bad gradient"])
        self.finished.append(1)
        return y


def fail(name):
    """On a rank: errors that reached the caller, replicas finished by then; the gradient of a step after."""
    module = Failing()
    dp = load(name).DP(module, ["cpu"] * 3)
    errors = []
    for bad in (-1.0, 7.0):
        try:
            dp(torch.tensor([1, bad, 1])).sum().backward()
        except KeyError as error:
            errors.append((str(error), len(module.finished), module.weight.grad))
    dp(torch.ones(3)).sum().backward()
    return errors, module.weight.grad.item()


def check_failing(name):
    errors, gradient = world(1).run(fail, name)[0]
    assert [text for text, _, _ in errors] == ["'a bad row'", "'a bad gradient'"], "another error"
    assert errors[0][1] == 2, "the caller goes on while replicas run"
    assert errors[1][2] is None and gradient == 3, "a gradient of a step that failed"


def test_an_error_in_a_replica_reaches_the_caller_when_none_runs_any_more():
    check_failing("dp_threads")


def lifetimes(name):
    """On a rank: replicas alive before and after a backward whose loss is kept; those of no_grad."""
    lesson = load(name)
    alive = weakref.WeakSet()

    class Noted(nn.Linear):
        def forward(self, x):
            alive.add(self)
            return super().forward(x)

    dp = lesson.DP(Noted(2, 2), ["cpu"] * 3)
    loss = dp(torch.ones(6, 2)).sum()
    before = len(alive)
    loss.backward()
    after = len(alive)
    with torch.no_grad():
        kept = dp(torch.ones(6, 2))
    return before, after, len(alive), kept.requires_grad


def check_lifetimes(name):
    assert world(1).run(lifetimes, name)[0] == (3, 0, 0, False), "replicas outlive their backward"


def test_replicas_end_with_their_backward():
    check_lifetimes("dp_threads")


def check_bytes(name):
    """What crosses between threads is the formula, to the byte, and nothing is read but in an exchange."""
    for size, flags in ((1, ""), (4, "--accum 3"), (2, "--dtype bf16")):
        result, _ = train(name, size, f"{TINY} --batch 36 {flags}")
        assert "foreign read" not in result["sent"], "a storage of another thread is read"
        row = result["sent"]["send"]
        assert row["wire"] == row["formula"], f"{row['wire'] - row['formula']:+.0f} bytes from the formula"


@pytest.mark.parametrize("name", ["dp_threads", "dp_async"])
def test_what_crosses_between_threads_is_the_formula_to_the_byte(name):
    check_bytes(name)


# ---- dp_async.py: pushes, staleness, who waits for whom, failures ----


def serve(lesson, workers, mode, function, steps, staleness=0):
    """A server of one weight, which begins at 0, after all tasks are done; the loss is the step's number."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    tasks = product(range(1, steps + 1), range(workers))
    server = lesson.Server(module, optimizer, tasks, workers, mode, staleness)
    with ThreadPoolExecutor(workers) as threads, server:
        for worker in range(workers):
            threads.submit(lesson.work, server, worker, "cpu", function)
        server.serve(steps * workers)
    return server


def push_one(server, worker, replica, step=0, share=0, nap=0):
    """A task: a gradient of -1."""
    version = server.pull(replica)
    time.sleep(nap)
    replica.weight.grad = torch.full((1, 1), -1.0)
    server.push(worker, replica, version, float(step))


def push_a_lot(name):
    """On a rank: by mode, the weight after all pushes, updates, and pushes whose age is known."""
    found = {}
    for mode in ("bsp", "asp", "ssp"):
        server = serve(load(name), 6, mode, push_one, 100, staleness=1)
        found[mode] = (server.module.weight.item(), server.version, sum(server.ages.values()))
    return found


def check_no_push_lost(name):
    found = world(1).run(push_a_lot, name, timeout=60)[0]
    assert found["bsp"] == (100, 100, 600), "bsp: not the mean of all pushes"
    assert found["asp"] == found["ssp"] == (600, 600, 600), "pushes are lost"


def test_no_push_is_lost():
    check_no_push_lost("dp_async")


def race(name, mode, staleness, seed):
    """On a rank: of 4 workers of random speed, the furthest that one began ahead, and the oldest push."""
    naps = np.random.default_rng(seed).exponential(0.001, (30, 4)) * [1, 1, 1, 6]
    ahead = []

    def task(server, worker, replica, step, share):
        with server.turn:
            ahead.append(server.clocks[worker] - min(server.clocks.values()))
        push_one(server, worker, replica, nap=naps[step - 1, worker])

    server = serve(load(name), 4, mode, task, 30, staleness)
    return max(ahead), max(server.ages)


def check_bound(name):
    for seed, bound in enumerate((0, 1, 3)):
        ahead, oldest = world(1).run(race, name, "ssp", bound, seed)[0]
        assert ahead <= bound, f"a worker began {ahead} pushes ahead, not {bound}"
        assert oldest <= 3 * (2 * bound + 1), f"a push was {oldest} updates old"
        assert ahead >= min(bound, 1), "nobody was ever ahead"
    assert world(1).run(race, name, "bsp", 2, 0)[0] == (0, 0), "bsp has stale pushes"


def test_ssp_never_exceeds_its_bound():
    check_bound("dp_async")


def ages(name):
    """On a rank: the age of the push of a worker that pulls before the pushes of two others."""
    pulled = threading.Event()

    def task(server, worker, replica, step, share):
        if share:
            pulled.wait(10)
            return push_one(server, worker, replica)
        version = server.pull(replica)
        pulled.set()
        while server.version < 2:
            time.sleep(0.01)
        replica.weight.grad = torch.ones(1, 1)
        server.push(worker, replica, version, 0.0)

    return dict(serve(load(name), 3, "asp", task, 1).ages)


def check_ages(name):
    assert world(1).run(ages, name)[0].get(2) == 1, "not the updates between pull and push"


def test_a_pushs_staleness_is_the_updates_since_its_pull():
    check_ages("dp_async")


def straggle(name, mode):
    """On a rank: pushes of the others before worker 0's first, which waits until they can do no more."""
    others = []

    def task(server, worker, replica, step, share):
        if worker == 0 and 0 not in others:
            last = -1
            while last != len(others):
                last = len(others)
                time.sleep(0.3)
            others.append(0)
        push_one(server, worker, replica)
        others.append(worker)

    serve(load(name), 3, mode, task, 8, staleness=2)
    return others.index(0)


def check_straggler(name):
    assert world(1).run(straggle, name, "bsp")[0] == 2, "bsp does not wait for all"
    assert world(1).run(straggle, name, "ssp")[0] == 6, "ssp: not K + 1 pushes each"
    assert world(1).run(straggle, name, "asp")[0] == 23, "asp waits for a straggler"


def test_who_waits_for_a_straggler():
    check_straggler("dp_async")


def lose(name, mode, doomed):
    """On a rank: the tasks done and what was said when workers fail at their second task; or the error."""
    done = []
    tries = []

    def task(server, worker, replica, step, share):
        tries.append(worker)
        if worker in doomed and tries.count(worker) == 2:
            time.sleep(0.3)  # until the others have nothing else to do
            raise ValueError(f"worker {worker} is out of order")
        push_one(server, worker, replica)
        done.append((step, share))

    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            server = serve(load(name), 3, mode, task, 8)
        except ValueError as error:
            return str(error), len(done), said.getvalue()
    return sorted(done), server.version, said.getvalue()


def check_losing(name):
    everything = list(product(range(1, 9), range(3)))
    for mode in ("asp", "ssp"):
        done, updates, said = world(1).run(lose, name, mode, (1,), timeout=20)[0]
        assert done == everything and updates == 24, f"{mode}: tasks of a failed worker are not done"
        assert said.startswith("worker 1 failed: ValueError"), f"{mode}: says {said!r}"
    error, done, _ = world(1).run(lose, name, "bsp", (1,), timeout=20)[0]
    assert error == "worker 1 is out of order" and done <= 5, "bsp does not end with the error"
    error, _, said = world(1).run(lose, name, "asp", (0, 1, 2), timeout=20)[0]
    assert "out of order" in error and said.count("failed") == 3, "no worker is left, and no error raised"


def test_a_failed_workers_task_goes_to_another_but_ends_bsp():
    check_losing("dp_async")


def break_server(name):
    """On a rank: the error of an optimizer that fails."""
    lesson = load(name)
    lesson.Server.apply = lambda *_: {}["no such update"]
    try:
        serve(lesson, 3, "asp", push_one, 5)
    except KeyError as error:
        return str(error)


def check_broken(name):
    assert world(1).run(break_server, name, timeout=20)[0] == "'no such update'"


def test_an_error_in_the_server_ends_the_workers():
    check_broken("dp_async")


def naps(name, flags):
    """On a rank: (seconds that workers' tasks were slowed by, what was printed at the end)."""
    lesson = load(name)
    slept = []

    class Time:
        perf_counter = time.perf_counter

        def sleep(seconds):
            slept.append(seconds)

    lesson.time = Time
    with contextlib.redirect_stdout(io.StringIO()) as out:
        lesson.train(lesson.parse(f"{TINY} {flags}".split()))
    return slept, out.getvalue().splitlines()[-1]


def check_slow(name):
    slept, last = world(1).run(naps, name, "--workers 2 --slow 1=3 --mode bsp")[0]
    assert sum(seconds > 0 for seconds in slept) == 3 and len(slept) == 6, "not one worker is slow"
    assert last == "staleness of the pushes: {0: 6}", f"says {last}"


def test_a_slow_worker_is_slow_and_the_staleness_is_told():
    check_slow("dp_async")


def fresh_loss(weights, flags):
    """On a rank: the loss of saved weights on batches that no run has seen."""
    single = load("single")
    config = single.parse(flags.split())
    device, text = single.set_up(config)
    model = single.GPT(config)
    model.load_state_dict(weights)
    with torch.no_grad():
        batches = [next(iter(single.microbatches(config, text, 10**6 + i, device))) for i in range(8)]
        return sum(single.mean_loss(model(inputs), targets).item() for inputs, targets in batches) / 8


def test_stale_updates_learn_as_well_on_fresh_text():
    flags = f"{TINY} --steps 15 --lr 0.003"
    losses = {}
    for mode in ("bsp", "asp", "ssp"):
        _, weights = train("dp_async", 3, f"{flags} --mode {mode}")
        losses[mode] = world(1).run(fresh_loss, weights, flags)[0]
    assert max(losses["asp"], losses["ssp"]) < losses["bsp"] + 0.1, losses


def check_asp_of_one(name):
    flags = f"{TINY} --batch 36 --clip 0.5 --lr 0.01 --dtype fp64 --accum 3"
    plain, weights = train("single", 1, flags)
    result, own = train(name, 1, f"{flags} --mode asp")
    assert apart(result["losses"], plain["losses"]) < 1e-10 and apart(own, weights) < 1e-9, "losses differ"


def test_asp_with_one_worker_is_single_py():
    check_asp_of_one("dp_async")


# ---- mutants ----

THREADS_MUTANTS = [
    ("leaf = leaf.to(device, copy=True)", "pass", check_bytes, "another thread is read"),
    ("[None, *devices[1:]]", "devices", check_bytes, "bytes from the formula"),
    ("{name: new[member] for name, member in members}", "dict(members)", check_odd, ""),
    ('("_parameters", "_buffers", "_modules")', '("_parameters", "_modules")', check_odd, "buffer"),
    ("total.add_(gradient)", "pass", check_parity, "losses differ"),
    ("if param.grad is not None:", "if True:", check_odd, ""),
    ("wait(futures)", "pass", check_failing, "while replicas run"),
    ("        if not threads:  #", "        if False:  #", check_meeting, "with --no-threads"),
    ("        if not threads:  #", "        if True:  #", check_meeting, "not at work at once"),
    ("ctx.call = None", "pass", check_lifetimes, "outlive"),
    ("targets) / config.accum", "targets)", check_parity, "losses differ"),
    ("param.copy_(master)", "pass", check_masters, "bf16 weights moved by 0.06"),
]  # fmt: skip
ASYNC_MUTANTS = [
    ('"bsp": 0', '"bsp": 1', check_straggler, "bsp does not wait"),
    ('"ssp": self.staleness', '"ssp": self.staleness + 1', check_bound, "pushes ahead"),
    ('"asp": math.inf', '"asp": 5', check_straggler, "asp waits"),
    ("ages[self.version - version]", "ages[self.version - version + 1]", check_bound, ""),
    ("return self.version", "return 0", check_ages, ""),
    ("self.tasks.appendleft(self.doing.pop(worker))", "self.doing.pop(worker)", check_losing, ""),
    ("del self.clocks[worker]", "pass", check_losing, ""),
    ('if self.mode == "bsp" or not self.clocks:', "if not self.clocks:", check_losing, ""),
    ('if self.mode == "bsp" or not self.clocks:', 'if self.mode == "bsp":', check_losing, ""),
    ("self.stop(error)  # or", "pass  # or", check_broken, ""),
    ("own.copy_(param)", "pass", check_parity, "losses differ"),
    ("        replica.zero_grad()", "        pass", check_parity, "losses differ"),
    ("clamp(max=1) / self.pushes_per_update", "clamp(max=1)", check_parity, "losses differ"),
    ("self.max_norm = max_norm or math.inf", "self.max_norm = math.inf", check_asp_of_one, "losses differ"),
    ("(times - 1)", "times", check_slow, "not one worker"),
    ("copied.grad.to(param.device, copy=True)", "copied.grad", check_bytes, "another thread is read"),
]  # fmt: skip
MUTANTS = [("dp_threads", *mutant) for mutant in THREADS_MUTANTS]
MUTANTS += [("dp_async", *mutant) for mutant in ASYNC_MUTANTS]


@pytest.mark.parametrize("name, old, new, check, reason", MUTANTS)
def test_a_mutant_is_rejected(name, old, new, check, reason, tmp_path):
    rejects(check, reason, name, old, new, tmp_path)
