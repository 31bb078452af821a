"""What is special to dp_threads.py."""

import threading
import weakref
from functools import partial

import torch
import torch.nn as nn

from tests.checks import check_ledger, check_masters, check_parity
from tests.harness import TINY, Lesson, apart, error_of, holds, load, mutants, on_ranks

RUN = "python LESSON --replicas N"
LESSON = Lesson(bad=("--replicas 0", "--replicas 17"), gpu=("--no-threads",))


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


odd = [partial(check_odd, replicas=n, rows=rows) for n, rows in ((1, 3), (2, 6), (3, 5), (4, 5), (4, 2))]
check_in_turn = partial(check_parity, own_flags="--no-threads")
checks = (
    check_meeting,
    check_failing,
    check_lifetimes,
    check_rows,
    check_evaluation,
    check_in_turn,
)
test_each_promise_is_kept = holds("dp_threads", *odd, *checks, check_flag)
check_threads = partial(check_meeting, patience=0.1)
MUTANTS = [
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
    ("torch._foreach_copy_(params", "zip(params", check_masters, "bf16 weights moved by"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "dp_threads")
