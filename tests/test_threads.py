"""What is special to dp_threads.py and dp_async.py, the lessons of one process."""

import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import product
from unittest import mock

import torch
import torch.nn as nn

from test_all import check_ledger, check_masters, check_parity
from tests.harness import TINY, apart, error_of, holds, load, mutants, on_ranks, said, world


class Odd(nn.Module):
    """Tied, frozen, unused and rarely used weights, a buffer that forward changes, a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.last[0].weight = self.first.weight
        self.recurrent = nn.LSTM(3, 3, batch_first=True)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.rare = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = self.first(x[:, 0]) * self.frozen + self.recurrent(x)[0][:, -1]
        if (x > 9).any():
            y = y + self.rare * (x[:, 0] > 9)
        return self.last(y)


@on_ranks(1)
def check_odd(name, replicas=4, rows=5):
    """Outputs and gradients are those without replicas."""
    torch.manual_seed(0)
    module = Odd().double()
    x = torch.randn(rows, 2, 3).double()
    x[-1] = 10  # in the last replica's share
    dp = load(name).DP(module, ["cpu"] * replicas)
    learned = [*module.first.parameters(), module.last[0].bias, *module.recurrent.parameters(), module.rare]
    expected = [module(x).detach(), *torch.autograd.grad(module(x).square().mean(), learned)]
    output = dp(x)
    output.square().mean().backward()
    assert module.unused.grad is None and module.frozen.grad is None, "a gradient out of nothing"
    assert module.rare.grad is not None, "a gradient is lost"
    found = [output.detach(), *(param.grad for param in learned)]
    worst = max(apart(one, other) for one, other in zip(found, expected))
    assert worst < 1e-12, "outputs or gradients differ"
    assert module.calls == 3, "the module's buffer is not the first replica's"


def meet(barrier, met, *_):
    met.add(threading.current_thread())
    barrier.wait()


@on_ranks(1)
def check_meeting(name, patience=60):
    """A forward or backward begins when those of all replicas, each in its thread, are about to."""
    lesson = load(name)
    in_turn = partial(partial, lesson.forward_in_turn)
    for wrap, number, wrong in (lesson.DP, 3, "not at work at once"), (in_turn, 1, "at work at once"):
        module, met = nn.Linear(3, 1), set()
        wait = partial(meet, threading.Barrier(number, timeout=patience), met)
        module.register_forward_pre_hook(wait)
        module.register_full_backward_pre_hook(wait)
        dp = wrap(module, ["cpu"] * 3)
        error = error_of(lambda dp=dp: dp(torch.ones(6, 3)).sum().backward())
        assert (error, len(met)) == ("nothing", number), f"replicas are {wrong}"


@on_ranks(1)
def check_flag(name):
    """With --no-threads there are none."""
    lesson = load(name)
    lesson.DP = None
    error = error_of(lambda: lesson.train(lesson.parse(f"{TINY} --no-threads".split())))
    assert error == "nothing", f"there are threads: {error}"


class Rows(nn.Linear):
    """Its output has more rows than its input, by a factor that depends on the share."""

    def forward(self, x):
        return super().forward(x).repeat(len(x), 1)


@on_ranks(1)
def check_rows(name):
    """Each replica's output gets its own gradient, however many rows it has."""
    module, x = Rows(1, 1, bias=False), torch.tensor([[1.0], [2.0], [3.0]])
    output = load(name).DP(module, ["cpu"] * 2)(x)
    assert output.shape == (5, 1)
    error = error_of(lambda: (output[:, 0] * torch.tensor([1.0, 10, 100, 1000, 10000])).sum().backward())
    assert (error, module.weight.grad) == ("nothing", 32121), (
        "a replica gets the gradient of another's output"
    )


@on_ranks(1)
def check_evaluation(name):
    """In no_grad() replicas keep nothing for a backward, and afterwards they do."""
    module, learns = nn.Linear(2, 2), []
    module.register_forward_hook(lambda _, inputs, output: learns.append(output.requires_grad))
    dp = load(name).DP(module, ["cpu"] * 2)
    for switch in torch.no_grad, torch.inference_mode:
        with switch():
            error = error_of(lambda: dp(torch.ones(4, 2)))
        assert error == "nothing", f"replicas build graphs where the caller does not: {error}"
    dp(torch.ones(4, 2)).sum().backward()
    assert learns == [False] * 4 + [True] * 2, "replicas build graphs where the caller does not"


@on_ranks(1)
def check_guards(name):
    """What would be computed wrongly is an error that says what to do."""
    lesson, x, both = load(name), torch.ones(4, 2), nn.Linear(2, 2)
    both.forward = lambda x: (x, x)
    dp = lesson.DP(nn.Linear(2, 2), ["cpu"] * 2)
    twice = dp(x).sum()
    twice.backward(retain_graph=True)
    cases = {
        "must take one tensor": lambda: dp((x, x)),
        "and return one": lambda: lesson.DP(both, ["cpu"] * 2)(x),
        "gives its input no gradient": lambda: dp(x.clone().requires_grad_()),
        "one backward": twice.backward,
        "no create_graph": lambda: dp(x).sum().backward(create_graph=True),
    }
    for words, call in cases.items():
        error = error_of(call)
        assert words in error, f"should say {words!r}: {error}"


class Failing(nn.Linear):
    """Fails in forward where x is negative, in backward where it is 7; where it is 4 somebody must wait."""

    def forward(self, x):
        if x < 0:
            raise KeyError("forward")
        if x == 4:
            self.waited_for.wait()
        self.finished.append(1)
        y = super().forward(x)
        if x == 7:
            y.register_hook(lambda _: {}["backward"])
        return y


@on_ranks(1)
def check_failing(name):
    """An error reaches the caller when the other replicas have finished, and there is no gradient."""
    lesson, module = load(name), Failing(1, 1)
    module.finished, module.waited_for = [], threading.Event()
    lesson.wait = lambda futures, wait=lesson.wait: module.waited_for.set() or wait(futures)
    dp = lesson.DP(module, ["cpu"] * 3)
    for bad, where, finished in (-1.0, "forward", 2), (7.0, "backward", 5):
        x = torch.tensor([[1], [bad], [4]])
        error = error_of(lambda x=x: dp(x).sum().backward())
        found = error, len(module.finished)
        assert found == (f"KeyError: '{where}'", finished), "the caller goes on while replicas run"
    assert module.weight.grad is None


@on_ranks(1)
def check_lifetimes(name):
    """Replicas are freed in backward, though the loss is kept."""
    alive = weakref.WeakSet()
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda replica, *_: alive.add(replica))
    dp = load(name).DP(module, ["cpu"] * 3)
    loss = dp(torch.ones(6, 2)).sum()
    assert (len(alive), loss.backward(), len(alive)) == (3, None, 0), "replicas outlive their backward"


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


odd = [partial(check_odd, replicas=n, rows=rows) for n, rows in ((1, 3), (2, 6), (3, 5), (4, 5), (4, 2))]
check_in_turn = partial(check_parity, own_flags="--no-threads")
checks = (
    check_meeting,
    check_failing,
    check_lifetimes,
    check_rows,
    check_evaluation,
    check_guards,
    check_in_turn,
)
test_dp_threads_keeps_its_promises = holds("dp_threads", *odd, *checks, check_flag)
test_dp_async_keeps_its_promises = holds("dp_async", check_straggler, check_ends, check_broken, check_slow)
check_threads = partial(check_meeting, patience=0.1)
THREADS_MUTANTS = [
    ("inputs.chunk(len(devices))", "inputs.flip(0).chunk(len(devices))", check_in_turn, "losses differ"),
    ("if config.no_threads", "if False", check_flag, "there are threads"),
    ("copy=device is not None", "copy=False", check_ledger, "another thread is read"),
    ("[None, *self.devices[1:]]", "self.devices", check_ledger, "parameters: +"),
    ("{name: copies[member] for name, member in state[register].items()}", "dict(state[register])",
     check_odd, "gradients differ"),
    ('("_parameters", "_buffers", "_modules")', '("_parameters", "_modules")', check_odd, "buffer"),
    ("param.grad.add_(gradient)", "param.grad", check_parity, "losses differ"),
    ("gradient if param.grad is None", "None if param.grad is None", check_odd, "a gradient is lost"),
    ("wait(futures)", "pass", check_failing, "while replicas run"),
    ("zip(self.threads, *arguments)", "zip(self.threads[:1] * 9, *arguments)", check_threads, "not at work"),
    ("ctx.call = None", "pass", check_lifetimes, "outlive"),
    ("gradient.split(list(map(len, outputs)))", "gradient.chunk(len(outputs))", check_rows, "another's"),
    ("thread.submit(torch.set_grad_enabled, torch.is_grad_enabled())", "pass", check_evaluation, "graphs"),
    ("check_tensors(inputs)", "pass", check_guards, "must take one tensor"),
    ("check_tensors(*outputs)", "pass", check_guards, "and return one"),
    ("assert not inputs.requires_grad", "assert True", check_guards, "its input no gradient"),
    ("assert ctx.call and", "assert", check_guards, "one backward"),
    ("and not torch.is_grad_enabled()", "and True", check_guards, "no create_graph"),
    ("torch._foreach_copy_(params", "zip(params", check_masters, "bf16 weights moved by"),
]  # fmt: skip
check_hangs = partial(check_ends, timeout=5)
ASYNC_MUTANTS = [
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
test_a_mutant_of_dp_threads_is_rejected = mutants(THREADS_MUTANTS, "dp_threads")
test_a_mutant_of_dp_async_is_rejected = mutants(ASYNC_MUTANTS, "dp_async")
