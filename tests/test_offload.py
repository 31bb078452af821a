"""What is special to offload.py."""

import threading
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from test_all import check_ledger, check_masters, check_parity, check_refusal
from tests.harness import TINY, apart, error_of, holds, load, mutants, on_ranks, train
from tools.watch import noted


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_with_params_on_the_host_numbers_are_single_pys_and_bytes_the_formulas(size):
    check_parity("offload", size, "--accum 3", "--params --link-gbps 0.05")  # slower than a block
    for flags in "--accum 1", "--accum 3", "--accum 3 --dtype bf16":
        check_ledger("offload", size, f"{flags} --params")


def test_a_model_that_is_too_large_is_refused_and_trains_with_params():
    flags = "--layers 12 --width 12 --context 4 --dtype fp64 --batch 4"
    assert train("zero2", 2, f"{TINY} {flags}", watched=True)[0]["peak_bytes"] > 6e5
    check_refusal("offload", f"--device-mb 0.35 {flags}")
    check_parity("offload", 2, flags, "--params --device-mb 0.35")


@on_ranks(1)
def check_simulated(name):
    with load(name).SimulatedDevice(0.02) as device:
        x = torch.ones(1000) * 2  # 8 kB, of which half is freed
        assert sum(storage.nbytes() for storage in device.storages) == 4000, "what is freed counts"
        more = torch.empty(4000)
        with pytest.raises(SystemExit):
            more = [x, more, torch.empty(10)]


@on_ranks(1)
def check_saved_midway(name):  # the weights after two steps, with and without a look at them after the first
    lesson = load(name)
    config = lesson.parse(f"{TINY} --params".split())
    device, text = lesson.set_up(config)
    ends = []
    for look in False, True:
        torch.manual_seed(0)
        model = lesson.GPT(config)
        offload = lesson.Offload(model, model.blocks, device, True, 1.0, partial(torch.optim.SGD, lr=0.1))
        for step in 1, 2:
            for inputs, targets in lesson.microbatches(config, text, step, device):
                lesson.mean_loss(model(inputs), targets).backward()
            offload.step(1.0)
            if look and step == 1:
                offload.full_state_dict()
                whole = [unit for unit in offload.units if unit.flat_param.untyped_storage().nbytes()]
                assert not whole, "units are on the device after full_state_dict()"
        ends.append(offload.full_state_dict())
    assert apart(*ends) == 0, "training went on with other weights"


def small(name, n_layers, offload_params=False):  # a model, its Offload, a function that returns a loss
    model = nn.Sequential(*(nn.Linear(2, 2, bias=i != 1) for i in range(n_layers)))
    how = torch.device("cpu"), offload_params, torch.inf, partial(torch.optim.SGD, lr=0.1)
    return model, load(name).Offload(model, model[1:], *how), lambda x=1.0: model(torch.full((2, 2), x)).sum()


@on_ranks(2)
def check_missing(name):  # gradients, of a step and of its second microbatch; what a norm is that is nan
    model, offload, loss = small(name, 3)
    loss(torch.nan).backward()
    assert offload.step(1.0).isnan()
    assert offload.full_state_dict()["2.bias"].isnan().all(), "a step is not clipped"
    said = [error_of(lambda: offload.step(1.0))]
    for needed in True, False:
        model[2].bias.requires_grad_(needed)
        loss().backward()
    said.append(error_of(lambda: offload.step(1.0)))
    assert "unit 0" in said[0] and "unit 2" in said[1], f"units without gradient: {said}"


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

    def finish(i, original, *args):  # not before the next unit's backward begins
        assert i < 2 or begun[i - 1].wait(5), "backward waits for the link"
        return original(*args)

    def begins(unit, direction, *_):
        assert unit.upload_job, f"uploaded too late in {direction}"

    for i, unit in enumerate(offload.units):
        unit.finish_reduce = partial(finish, i, unit.finish_reduce)
        if i > 0:
            model[i].register_forward_pre_hook(partial(begins, unit, "forward"), prepend=True)
            model[i].register_full_backward_pre_hook(partial(begins, unit, "backward"), prepend=True)
            model[i].register_full_backward_pre_hook(lambda *_, event=begun[i]: event.set())
    loss().backward()
    offload.step(1.0)


@on_ranks(2)
def check_step(name):
    """The host steps a unit while the one before comes up; a unit comes when it has been stepped."""
    model, offload, loss = small(name, 4)
    loss().backward()
    begun = [threading.Event() for _ in offload.units]

    def step(i, original, scale):  # the last one takes long
        begun[i].set()
        time.sleep(0.5 * (i == 3))
        original(scale)

    def upload(i, unit, original):  # not before the next unit's step begins
        assert begun[min(i + 1, 3)].wait(5), "a step waits for the link"
        original()
        assert unit.step_job.done(), "a unit came before its step"

    def computes(unit, *_):
        assert unit.upload_job.done(), "computed with weights of before"

    for i, unit in enumerate(offload.units):
        unit.step = partial(step, i, unit.step)
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
CHECKS = check_simulated, check_saved_midway, check_missing, check_overlap, check_step, check_one_order
test_each_promise_is_kept = holds("offload", *CHECKS, *slow)
WITH_PARAMS = partial(check_ledger, size=2, flags="--accum 3 --params")
READY = "        self.step_job.result()\n        self.offload.up"
OLD = "unit.reduce_job = unit.upload_job = None"
MUTANTS = [
    ("        self.units[i].upload_job.result()\n", "", check_step, "weights of before"),
    (READY, "        self.offload.up", check_step, "before its step"),
    (OLD, f"{OLD}\n            unit.unshard()\n            unit.upload_job.result()", check_step, "the link"),
    (OLD, "unit.reduce_job = None", check_parity, "losses differ"),
    ("self.shard.copy_(self.master.data)", "pass", check_masters, "bf16 weights moved"),
    ("grad = torch.empty_like(part, pin_memory=pinned)", "grad = self.shard", check_parity, "losses differ"),
    ("[i::direction][1:2]", "[i::direction][1:1]", check_overlap, "too late in forward"),
    ("[i::direction]", "[i:]", check_overlap, "too late in backward"),
    ("offload.reduce_job = job", "offload.reduce_job = job\n        job.result()", check_overlap, "the link"),
    ("    offload.reduce_job.result()", "    offload.reduce_job.done()", slow[0], "gradients: +"),
    ("        if offload.offload_params:\n            self.reshard()\n", "", WITH_PARAMS, "parameters: +"),
    ("offload.uploader.submit(start)", "offload.host.submit(start)", check_one_order, "launched by"),
    ("            unit.reshard()\n", "", check_saved_midway, "on the device after"),
    ("(max_norm / (norm + 1e-6)).clamp(max=1)", "torch.tensor(1)", check_missing, "not clipped"),
    (OLD, "unit.upload_job = None", check_missing, "units without"),
    ("        self.reduce_job = None\n        if any", "        if any", check_missing, "units without"),
    ("0 < i < len(blocks) - 1", "i > 0", WITH_PARAMS, "up: sent +"),
    ("unit.reduce_job.result()", "unit.reduce_job.result() * len(-unit.shard)", check_ledger, "is read"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "offload")
