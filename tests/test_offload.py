"""What is special to offload.py."""

import threading
import time
import types
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from test_all import check_ledger, check_masters, check_parity, check_refusal
from tests.harness import TINY, apart, error_of, holds, load, mutants, on_ranks, train, world

SLOW = "--link-gbps 0.05"  # a block's shard takes longer than its computation
UNITS = 6


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_with_params_on_the_host_numbers_are_single_pys_and_bytes_the_formulas(size):
    check_parity("offload", size, "--accum 3", f"--params {SLOW}")
    for flags in "--accum 1", "--accum 3", "--accum 3 --dtype bf16":
        check_ledger("offload", size, f"{flags} --params")


WITH_PARAMS = partial(check_ledger, size=2, flags="--accum 3 --params")


def check_gradients(name, size=2, flags=""):
    result, weights = train(name, size, f"{TINY} --batch 36 --link-gbps 0.01 {flags}", watched=True)
    row = result["held"]["gradients"]
    more = row["measured"] - row["formula"]
    assert abs(more) <= 64 * len(weights), f"gradients: {more:+.0f} bytes from the formula"


@pytest.mark.parametrize("flags", ["", "--params", "--accum 3"])
def test_gradients_wait_for_the_link(flags):
    check_gradients("offload", 2, flags)


def test_a_model_that_is_too_large_is_refused_and_trains_with_params():
    flags = "--layers 12 --dtype fp64 --steps 3 --batch 12"
    without, _ = train("zero2", 2, f"{TINY} {flags}", watched=True)
    assert without["peak_bytes"] > 7e6
    check_refusal("offload", f"--device-mb 7 {flags}")
    plain, weights = train("single", 1, f"{TINY} {flags}")
    result, own = train("offload", 2, f"{TINY} {flags} --params --device-mb 7")
    assert apart(result["losses"], plain["losses"]) < 1e-10 and apart(own, weights) < 1e-9


@on_ranks(1)
def check_played(name):
    lesson = load(name)
    on_host = torch.ones(1000)
    with lesson.PlayedDevice(0.02) as device:
        x = torch.ones(1000) * 2  # 8 kB, of which half is freed
        assert sum(storage.nbytes() for storage in device.storages) == 4000, "what is freed counts"
        for read in (lambda: x + on_host, lambda: x.add_(on_host), on_host.sum, on_host.clone):
            with pytest.raises(AssertionError, match="reads the host's memory"):
                read()
        more = torch.empty(4000)
        with pytest.raises(SystemExit):
            more = [more, torch.empty(10)]


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


@on_ranks(2)
def check_missing(name):  # gradients, of a step and of its second microbatch; what a norm is that is nan
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    how = torch.device("cpu"), False, torch.inf, partial(torch.optim.SGD, lr=0.1)
    offload = load(name).Offload(model, model[1:], *how)
    x = torch.full((2, 2), torch.nan)
    model(x).sum().backward()
    assert offload.step(1.0).isnan()
    assert offload.full_state_dict()["2.bias"].isnan().all(), "a step is not clipped"
    said = [error_of(lambda: offload.step(1.0))]
    for needed in True, False:
        model[2].bias.requires_grad_(needed)
        model(x).sum().backward()
    said.append(error_of(lambda: offload.step(1.0)))
    assert "unit 0" in said[0] and "unit 2" in said[1], f"units without gradient: {said}"


def test_a_link_copies_at_its_rate():
    lane = load("offload").Lane("up", torch.device("cpu"), 0.1)
    x, y = torch.ones(2, 250_000)
    started = time.perf_counter()
    lane.submit(lane.copy, x, y).result()  # 10^6 bytes
    assert 0.08 <= time.perf_counter() - started < 0.3


def events(name, flags):  # [(what, unit, "starts" or "ends")] from the first step() on; unit 0 is the root
    lesson = load(name)
    log = []

    def noted(function, what, pause=0.0):
        def call(self, *args):
            here = args[0] if what == "fetch" else self.offload.units.index(self)
            this = "backward" if what == "fetch" and args[1] == -1 else what
            log.append((this, here, "starts"))
            result = function(self, *args)
            log.append((this, here, "ends"))
            time.sleep(pause)
            return result

        return call

    lesson.Offload._fetch = noted(lesson.Offload._fetch, "fetch", pause=0.005)  # a computation
    host_step = lesson.Unit.step
    lesson.Unit.step = noted(lambda *args: (time.sleep(0.03), host_step(*args)), "step")  # longer than a copy
    for what in "bring", "land":
        setattr(lesson.Unit, what, noted(getattr(lesson.Unit, what), what))
    lesson.train(lesson.parse(flags.split()))
    return log[log.index(("step", 0, "starts")) :]


def orders(name, flags):
    for log in world(2).run(events, name, f"{TINY} --layers 5 --batch 4 --steps 2 {SLOW} {flags}"):
        last = {event: i for i, event in enumerate(log)}
        first = {event: len(log) - 1 - i for i, event in enumerate(reversed(log))}
        yield first, last


def check_overlap(name):
    """With --params a block comes while the one before computes, and its gradients leave meanwhile."""
    for first, last in orders(name, "--params"):
        for i in range(2, UNITS):
            assert first["bring", i, "starts"] < first["fetch", i, "starts"], "fetched too late in forward"
        for i in range(1, UNITS - 2):
            assert last["bring", i, "starts"] < last["backward", i, "starts"], "fetched too late in backward"
        for i in range(2, UNITS):
            assert first["backward", i - 1, "ends"] < first["land", i, "ends"], "backward waits for the link"
            assert first["land", i, "ends"] < first["land", i - 1, "starts"], "two gradients on their way"


def check_step(name):
    """The host steps a unit while the one before comes up; a unit comes when it has been stepped."""
    for first, _ in orders(name, ""):
        for i in range(UNITS):
            assert first["step", i, "ends"] < first["bring", i, "ends"], "a unit came before its step"
            assert first["bring", i, "ends"] < first["fetch", i, "ends"], "computed with weights of before"
        for i in range(1, UNITS):
            assert first["step", i, "starts"] < first["bring", i - 1, "ends"], "a step waits for the link"


@on_ranks(2)
def check_one_order(name):
    """In forward and backward one thread launches all collectives, so that all ranks have the same order."""
    lesson, threads = load(name), set()

    def noted(collective):
        return lambda *args, **more: threads.add(threading.current_thread().name) or collective(*args, **more)

    lesson.all_gather = noted(lesson.all_gather)
    lesson.dist = types.SimpleNamespace(**vars(dist) | {"all_to_all_single": noted(dist.all_to_all_single)})
    lesson.train(lesson.parse(TINY.split()))
    assert threads == {"up_0"}, f"launched by {threads}"


test_what_is_on_the_device = holds("offload", check_played, check_saved_midway, check_missing)
test_link_host_and_device_work_at_once = holds("offload", check_overlap, check_step)
test_all_ranks_launch_collectives_in_one_order = holds("offload", check_one_order)
BUFFER = "self.landing = torch.empty_like(own, pin_memory=pinned)"
WAIT = "        self.stepped.result()\n        self.offload.up"
MUTANTS = [
    ("        unit.fetched.result()\n", "", check_step, "weights of before"),  # a copy not waited for
    (WAIT, "        self.offload.up", check_step, "before its step"),
    ("unit.landed = unit.fetched = None", "unit.landed = None", check_parity, "losses differ"),
    ("self.shard.copy_(self.master.data)", "pass", check_masters, "bf16 weights moved"),
    (BUFFER, "self.landing = self.shard", check_parity, "losses differ"),  # a buffer used too early
    ("            other.fetch()\n", "            pass\n", check_overlap, "too late in forward"),
    ("[i::direction]", "[i:]", check_overlap, "too late in backward"),
    ("        offload.sent.result()", "        offload.sent.done()", check_gradients, "gradients: +"),
    ("        if offload.params:\n            self.drop()\n", "", WITH_PARAMS, "parameters: +"),
    ("offload.up.submit(start)", "offload.down.submit(start)", check_one_order, "launched by"),
    ("            unit.drop()\n", "", check_saved_midway, "on the device after"),
    ("(max_norm / (norm + 1e-6)).clamp(max=1)", "torch.tensor(1)", check_missing, "not clipped"),
    ("unit.landed = unit.fetched = None", "unit.fetched = None", check_missing, "units without"),
    ("            self.landed = None\n", "", check_missing, "units without"),
    ("0 < i < len(blocks) - 1", "i > 0", WITH_PARAMS, "up: sent +"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "offload")
