"""What is special to dp_threads.py: threads that work at the same time, shares of any size, devices."""

import threading
import weakref
from functools import partial
from unittest import mock

import torch
import torch.nn as nn

from tests.checks import check_ledger, check_masters, check_parity
from tests.gpu import on_gpu, together
from tests.harness import TINY, Lesson, apart, error_of, holds, load, mutants, on_ranks

RUN = "python LESSON --replicas N"
NAIVE = "--naive"
RACE = "1 --replicas 2"
LESSON = Lesson(variants=("--naive",), bad=("--replicas 0",))


@on_ranks(1)
def check_shares(name):
    """Outputs and gradients are those of one device, however few the rows are."""
    lesson = load(name)
    for replicas, rows in (1, 3), (2, 6), (3, 5), (4, 6), (4, 2):
        torch.manual_seed(0)
        module, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double(), torch.randn(rows, 3)
        x, params, devices = x.double(), list(module.parameters()), ["cpu"] * replicas
        expected = [module(x).detach(), *torch.autograd.grad(module(x).square().mean(), params)]
        dp = lesson.DP(module, devices)
        for forward in partial(lesson.naive, module, devices), dp.forward, dp.forward:
            output = forward(x)
            output.square().mean().backward()
            if output.is_leaf:
                dp.backward(output.grad)
            found = [output.detach(), *(param.grad for param in params)]
            worst = max(apart(*both) for both in zip(found, expected))
            assert worst < 1e-12, f"{rows} rows on {replicas}: outputs or gradients differ"
            module.zero_grad()


def meet(barrier, met, *_):
    met.add(threading.current_thread().name)
    barrier.wait()


@on_ranks(1)
def check_meeting(name, patience=60):
    """A forward or backward begins when those of all devices, each in its thread, are about to."""
    dp, met = load(name).DP(nn.Linear(3, 1), ["cpu"] * 3), set()
    wait = partial(meet, threading.Barrier(3, timeout=patience), met)
    for replica in dp.replicas:
        replica.register_forward_pre_hook(wait)
        replica.register_full_backward_pre_hook(wait)
    assert error_of(lambda: dp.forward(torch.ones(6, 3))) == "nothing", "forwards are not at the same time"
    error = error_of(lambda: dp.backward(torch.ones(6, 1)))
    assert error == "nothing", f"backwards are not at the same time: {error}"
    assert met == {"device 0_0", "device 1_0", "device 2_0"}


@on_ranks(1)
def check_naive(name):
    """Without threads there are none."""
    lesson = load(name)
    lesson.DP = None
    error = error_of(lambda: lesson.train(lesson.parse(f"{TINY} --naive".split())))
    assert error == "nothing", f"there are threads: {error}"


@on_ranks(1)
def check_devices(name):
    """Replicas take turns on the GPUs that there are."""
    lesson = load(name)
    lesson.join_world = lambda: torch.device("cuda")
    lesson.GPT = mock.MagicMock()
    lesson.DP = mock.Mock(side_effect=InterruptedError)
    with mock.patch("torch.cuda.device_count", lambda: 2):
        error_of(lambda: lesson.train(lesson.parse(["--replicas", "5"])))
    _, devices = lesson.DP.call_args[0]
    assert [device.index for device in devices] == [0, 1, 0, 1, 0], f"other devices: {devices}"


@on_ranks(1)
def check_lifetimes(name):
    """A replica's output, in a language model the largest tensor, is freed in backward."""
    module, alive = nn.Linear(2, 2), []
    module.register_forward_hook(lambda module, inputs, output: alive.append(weakref.ref(output)))
    dp = load(name).DP(module, ["cpu"] * 3)
    output = dp.forward(torch.ones(6, 2))
    dp.backward(torch.ones_like(output))
    assert [each() for each in alive] == [None] * 3, "outputs outlive their backward"


CHECKS = check_shares, check_meeting, check_naive, check_devices, check_lifetimes
test_each_promise_is_kept = holds("dp_threads", *CHECKS)
check_threads = partial(check_meeting, patience=0.1)
naive = partial(check_parity, own_flags="--naive")
MUTANTS = [
    ("device, copy=True)", "device)", check_ledger, "another thread is read"),
    ("thread.submit(copy.deepcopy, module).result()", "copy.deepcopy(module)", check_ledger, "parameters: +"),
    ("            copied.data.copy_(param.data)", "            pass", check_parity, "differ"),
    ("param.grad += send(", "param.grad = send(", check_shares, "gradients differ"),
    ("            copied.grad = None\n", "", check_parity, "differ"),
    ("gradient.tensor_split(", "gradient.flip(0).tensor_split(", check_shares, "gradients differ"),
    ("inputs.tensor_split(len(devices))", "inputs.flip(0).tensor_split(len(devices))", naive, "differ"),
    ("zip(self.threads, *arguments)", "zip(self.threads[:1] * 9, *arguments)", check_threads, "forwards"),
    ("self.parallel_apply(torch.Tensor.backward, self.outputs, gradients)",
     "list(map(torch.Tensor.backward, self.outputs, gradients))", check_threads, "backwards"),
    ("dp = None if config.naive else DP", "dp = DP", check_naive, "there are threads"),
    ("i % gpus", "0", check_devices, "other devices"),
    ("        del self.outputs\n", "", check_lifetimes, "outlive"),
    ("/ config.accum", "", check_parity, "differ"),
    ("detach().to(wide(param.dtype))", "detach()", check_masters, "moved by"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "dp_threads")
check_gpu = partial(together, on_gpu, rows=[(1, 0, 3, "--dtype bf16")])
GPU_MUTANTS = [
    ("config.clip, norm)", "config.clip, norm + 0 * norm.item())", check_gpu,
     "the host waits"),
]  # fmt: skip
test_a_mutant_is_rejected_by_a_gpus_rules = mutants(GPU_MUTANTS, "dp_threads")
