"""What is special to offload.py."""

import copy
import threading
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from tests.checks import check_ledger, check_masters, check_parity
from tests.gpu import check_gpu
from tests.harness import TINY, Lesson, apart, error_of, holds, load, mutants, on_ranks, train
from tools.watch import noted

LESSON = Lesson(
    own={"--link-gbps": ("1 inf", "0 -1 nan")},
    bad=("--link-gbps 0",),
    slack=lambda root, block, size, flags: ((root + 2 * block) * ("--link" not in flags), 0),  # a slow link
    races=("",),
    gpu=("--params",),
    waits={"": {("item", "step()"): 1}},
)


@pytest.mark.long_table
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_with_params_on_the_host_numbers_are_single_pys_and_bytes_the_formulas(size):
    check_parity("offload", size, "--accum 3", "--params --link-gbps 0.05")  # slower than a block
    for flags in "--accum 1", "--accum 3", "--accum 3 --dtype bf16":
        check_ledger("offload", size, f"{flags} --params")


def test_a_model_that_is_too_large_fits_a_device_with_params():
    flags = f"{TINY} --layers 12 --width 12 --context 4 --dtype fp64 --batch 4"
    peaks = {}
    for lesson, own in ("zero2", ""), ("offload", ""), ("offload", "--params"):
        peaks[lesson, own] = train(lesson, 2, f"{flags} {own}", watched=True)[0]["peak_bytes"]
    zero2, offload, with_params = peaks.values()
    assert zero2 > 6e5 and offload > 3.5e5 > with_params, f"other peaks: {peaks}"


@on_ranks(1)
def check_saved_midway(name):  # the weights after two steps, with and without a look at them after the first
    lesson = load(name)
    config = lesson.parse(f"{TINY} --params".split())
    device, text = lesson.set_up(config)
    ends = []
    for look in False, True:
        torch.manual_seed(0)
        model = lesson.GPT(config)
        new_optimizer = partial(torch.optim.SGD, lr=0.1)
        offload = lesson.Offload(model, lesson.Block, device, new_optimizer, True, 1.0)
        for step in 1, 2:
            for inputs, targets in lesson.microbatches(config, text, step, device):
                lesson.mean_loss(offload(inputs), targets).backward()
            offload.step(1.0)
            if look and step == 1:
                offload.full_state_dict()
                whole = [unit for unit in offload.units if unit.flat_param.untyped_storage().nbytes()]
                assert not whole, "units are on the device after full_state_dict()"
        ends.append(offload.full_state_dict())
    assert apart(*ends) == 0, "training went on with other weights"


class Layer(nn.Linear):
    """A unit."""


def small(name, n_layers, offload_params=False):  # a model, its Offload, a function that returns a loss
    model = nn.Sequential(nn.Linear(2, 2), *(Layer(2, 2, bias=i != 1) for i in range(1, n_layers)))
    how = torch.device("cpu"), partial(torch.optim.SGD, lr=0.1), offload_params, torch.inf
    offload = load(name).Offload(model, Layer, *how)
    return model, offload, lambda x=1.0: offload(torch.full((2, 2), x)).sum()


@on_ranks(2)
def check_missing(name):  # gradients, of a step and of its second microbatch; what a norm is that is nan
    model, offload, loss = small(name, 3)
    loss(torch.nan).backward()
    assert offload.step(1.0).isnan()
    assert offload.full_state_dict()["2.bias"].isnan().all(), "a step is not clipped"
    said = error_of(lambda: offload.step(1.0))
    assert "use every unit" in said, f"units without gradient: {said}"
    loss().backward()
    model[2].bias.requires_grad_(False)
    said = error_of(lambda: loss().backward())
    assert "give every parameter" in said, f"goes on with a part of a unit's gradients: {said}"
    said = error_of(loss)
    assert "a backward failed" in said, f"goes on after a backward that failed: {said}"


class Pair(nn.Linear):
    """A unit that returns no tensor."""

    def forward(self, x):
        return {"y": super().forward(x)}


class Detached(nn.Linear):
    """Its input's gradient needs its weight after the weight has its own."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.detach()) + super().forward(x.detach()).sin()


@on_ranks(1)
def check_guards(name):
    """What cannot be handled is an error that says what it is."""
    lesson = load(name)
    how = torch.device("cpu"), partial(torch.optim.SGD, lr=0.1), True, torch.inf
    frozen, shared = (nn.Sequential(nn.Linear(2, 2), Layer(2, 2), Layer(2, 2)) for _ in range(2))
    frozen[1].bias.requires_grad_(False)
    shared[1].bias = shared[2].bias
    pair = lesson.Offload(nn.Sequential(nn.Linear(2, 2), Pair(2, 2)), Pair, *how)
    cases = {
        "is frozen": lambda: lesson.Offload(frozen, Layer, *how),
        "in two units": lambda: lesson.Offload(shared, Layer, *how),
        "one tensor": lambda: pair(torch.ones(2, 2)),
    }
    for words, call in cases.items():
        error = error_of(call)
        assert words in error, f"should say {words!r}: {error}"


@on_ranks(1)
def check_detached(name):
    """With --params a unit's weights are there until the gradient of its input has been computed."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), *(Detached(2, 2) for _ in range(4)))
    plain = copy.deepcopy(module)
    lesson = load(name)
    freed = lesson.Unit.reshard

    def reshard(unit):  # in place of freed memory, which may end the process, its numbers are wrong
        values = unit.flat_param.clone()
        freed(unit)
        unit.flat_param.untyped_storage().resize_(values.nbytes)
        unit.flat_param.copy_(values * 0)
        for param, view in zip(unit.params, unit.param_views):
            param.data = view

    lesson.Unit.reshard = reshard
    new_optimizer = partial(torch.optim.SGD, lr=0.1)
    offload = lesson.Offload(module, Detached, torch.device("cpu"), new_optimizer, True, torch.inf)
    offload(torch.ones(2, 2)).sum().backward()
    plain(torch.ones(2, 2)).sum().backward()
    norm = torch.stack([param.grad.norm() for param in plain.parameters()]).norm()
    assert apart(offload.step(100.0), norm) < 1e-6, "a unit is freed too early"


def test_a_link_copies_at_its_rate():
    worker = load("offload").Worker("upload", torch.device("cpu"), 0.1)
    x, y = torch.ones(2, 250_000)
    started = time.perf_counter()
    worker.submit(worker.copy, x, y).result()  # 10^6 bytes
    assert time.perf_counter() - started >= 0.08


@on_ranks(2)
def check_overlap(name):
    """With --params a block comes while the one before computes, and its gradients leave meanwhile."""
    model, offload, loss = small(name, 6, offload_params=True)
    begun = [threading.Event() for _ in offload.units]

    def finish(i, original, *args):  # not before the next unit's backward computes
        assert i < 2 or begun[i - 1].wait(5), "backward waits for the link"
        return original(*args)

    def begins(unit, direction, *_):
        assert unit.upload_job, f"uploaded too late in {direction}"

    for i, unit in enumerate(offload.units):
        unit.finish_reduce_scatter = partial(finish, i, unit.finish_reduce_scatter)
        if i > 0:
            model[i].register_forward_pre_hook(partial(begins, unit, "forward"), prepend=True)
            model[i].register_full_backward_pre_hook(partial(begins, unit, "backward"), prepend=True)
            model[i].weight.register_hook(lambda _, event=begun[i]: event.set())
    loss().backward()
    offload.step(1.0)


@on_ranks(2)
def check_step(name):
    """The host updates a unit while the one before comes up; a unit comes when it has been updated."""
    model, offload, loss = small(name, 4)
    loss().backward()
    begun = [threading.Event() for _ in offload.units]

    def update(i, original, scale):  # the last one takes long
        begun[i].set()
        time.sleep(0.5 * (i == 3))
        original(scale)

    def upload(i, unit, original):  # not before the next unit's update begins
        assert begun[min(i + 1, 3)].wait(5), "an update waits for the link"
        original()
        assert unit.update_job.done(), "a unit came before its update"

    def computes(unit, *_):
        assert unit.upload_job.done(), "computed with weights of before"

    for i, unit in enumerate(offload.units):
        unit.update = partial(update, i, unit.update)
        unit.upload = partial(upload, i, unit, unit.upload)
        model[i].register_forward_pre_hook(partial(computes, unit))
    offload.step(1.0)
    loss()


@on_ranks(2)
def check_one_order(name):
    """In forward and backward one thread launches all collectives, so that all ranks have the same order."""
    lesson, threads = load(name), set()
    note = lambda *_, **__: threads.add(threading.current_thread().name)  # noqa: E731
    lesson.all_gather = noted(lesson.all_gather, note)
    with mock.patch.object(dist, "all_to_all_single", noted(dist.all_to_all_single, note)):
        lesson.train(lesson.parse(TINY.split()))
    assert threads == {"upload_0"}, f"launched by {threads}"


slow = [partial(check_ledger, size=2, flags=f"--link-gbps 0.01 {x}") for x in ("", "--params", "--accum 3")]
CHECKS = (
    check_saved_midway,
    check_guards,
    check_detached,
    check_missing,
    check_overlap,
    check_step,
    check_one_order,
)
test_each_promise_is_kept = holds("offload", *CHECKS, *slow)
WITH_PARAMS = partial(check_ledger, size=2, flags="--accum 3 --params")
READY = "        self.update_job.result()\n        self.uploader.copy"
OLD = "            unit.reduce_job = None\n            unit.upload_job = None"
GONE = f"{OLD}\n            "
SAVED = ", unit.params)\n            unit.reshard()"
MUTANTS = [
    ("        self.upload_job.result()\n", "", check_step, "weights of before"),
    (READY, "        self.uploader.copy", check_step, "before its update"),
    (OLD, f"{GONE}unit.unshard(), unit.wait_for_unshard()", check_step, "the link"),
    (OLD, "            unit.reduce_job = None", check_parity, "losses differ"),
    ("self.host_param.copy_(self.shard.data)", "pass", check_masters, "bf16 weights moved"),
    ("torch.empty_like(self.host_param, pin_memory=pinned)", "self.host_param",
     partial(check_parity, own_flags="--params"), "losses differ"),
    ("if 0 <= i < len(self.units):", "if False:", check_overlap, "too late in forward"),
    ("index(unit) + direction", "index(unit) + 1", check_overlap, "too late in backward"),
    ("self.reducing = unit.reduce_job", "unit.reduce_job.result()", check_overlap, "the link"),
    ("self.reducing.result()", "self.reducing.done()", slow[0], "gradients: +"),
    ("        if self.offload_params:\n            unit.reshard()\n", "", WITH_PARAMS, "parameters: +"),
    ("self.uploader.submit(launch)", "self.host.submit(launch)", check_one_order, "launched by"),
    (SAVED, ", unit.params)", check_saved_midway, "on the device after"),
    ("(max_norm / (norm + 1e-6)).clamp(max=1)", "torch.tensor(1)", check_missing, "not clipped"),
    ("            unit.reduce_job = None\n", "", check_missing, "units without"),
    ("param.grad is None for", "False for", check_missing, "a part of a unit's"),
    ("        if self.in_backward:\n            raise", "        if False:\n            raise", check_missing,
     "after a backward that failed"),
    ("blocks[:-2]", "blocks", WITH_PARAMS, "up: sent +"),
    ("unit.reduce_job.result() for", "unit.reduce_job.result() * len(-unit.shard) for", check_ledger,
     "is read"),
    ("        self._unshard(unit, -1)\n", "        self._unshard(unit, -1)\n        unit.reshard()\n",
     check_detached, "is freed too early"),
    ("param.numel() and", "", check_guards, "in two units"),
    ("and param.requires_grad for", "for", check_guards, "is frozen"),
    ("not torch.is_tensor(output)", "False", check_guards, "one tensor"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "offload")
GPU_MUTANTS = [
    (
        "offload",
        "torch.cuda.current_stream().wait_stream(self.uploader.stream)",
        "pass",
        check_gpu,
        "uses what a collective still",
    ),
    (
        "offload",
        "self.stream.wait_stream(torch.cuda.current_stream())",
        "pass",
        check_gpu,
        "uses what another stream has not finished",
    ),
    (
        "offload",
        "launch_job.result().wait()",
        "launch_job.result()",
        check_gpu,
        "uses what a collective still",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
