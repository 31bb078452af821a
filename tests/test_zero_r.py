"""What is special to zero_r.py."""

import weakref
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn

from tests.gpu import on_gpu, together
from tests.harness import Lesson, error_of, holds, load, mutants, on_ranks
from tests.test_checkpointing import Dropping, gradients_of, plainly

SLACK = "1.05"
LESSON = Lesson(variants=("--policy offload",), own={"--policy": ("partitioned offload", "full")})


@on_ranks(4)
def check_gradients(name):
    """They are those of no checkpoint at all, and so are later random numbers."""
    lesson = load(name)
    pair, _ = dist.new_subgroups(2)
    call = partial(lesson.checkpoint, store=lesson.Partitioned(torch.device("cpu"), group=pair))
    assert all(map(torch.equal, gradients_of(call), gradients_of(plainly))), "gradients differ"
    with torch.no_grad():
        assert not call(Dropping(), torch.ones(1, 1, 5, 12))["x"].requires_grad, "a graph in no_grad()"
    with torch.inference_mode():
        failed = error_of(partial(call, torch.add, *torch.ones(2, 4)))
        assert failed == "nothing", f"in inference_mode() {failed}"
    function = partial(lambda x: (x.sin(), x.exp().tanh()))
    alive = weakref.ref(function)
    call(function, torch.ones(4, requires_grad=True))[0].sum().backward()
    del function
    assert alive() is None, "a checkpoint outlives its graph"


@on_ranks(2)
def check_changed(name):
    """The first argument may be changed in place after the call, as its copy is kept; others are refused."""
    lesson = load(name)
    call = partial(lesson.checkpoint, store=lesson.Partitioned(torch.device("cpu")))
    for odd in ("first", "second", "listed"):
        x = torch.linspace(0, 1, 6, requires_grad=True)  # no padding, which copies
        h = x * 1
        if odd == "first":
            y = call(lambda h: (h * 1).tanh(), h)
        elif odd == "second":
            y = call(lambda x, h: x * h.tanh(), x, h)
        else:
            y = call(lambda x, listed: x * listed[0].tanh(), x, [h])
        h += y
        failed = error_of(h.sum().backward)
        if odd == "first":
            right = failed == "nothing" and torch.allclose(x.grad, 2 - x.detach().tanh().square())
            assert right, f"the copy of the first argument has changed, too: {failed}"
        else:
            assert "argument was changed in place" in failed, f"{odd}: {failed}"


@on_ranks(1)
def check_naive(name):
    """The simplest form has plain gradients, of a block without random numbers."""
    lesson = load(name)
    layer, x = nn.Linear(6, 6), torch.randn(3, 6, requires_grad=True)
    layer(x).tanh().square().sum().backward()
    expected = [x.grad, layer.weight.grad, layer.bias.grad]
    x.grad, layer.weight.grad, layer.bias.grad = None, None, None
    lesson.NaiveCheckpoint.apply(x, lambda x: layer(x).tanh()).square().sum().backward()
    assert all(map(torch.equal, [x.grad, layer.weight.grad, layer.bias.grad], expected)), "naive: differs"


@on_ranks(3)
def check_events(name, offload=False):
    """What is fetched, waited for and computed in a backward."""
    lesson = load(name)
    store = lesson.Partitioned(torch.device("cpu"), offload)
    start, events, shards = store.start_all_gather, [], []

    def square(x, number):
        events.append(f"forward {number}")
        return x.square()

    def noted_fetch(shard, *more):
        number = next(i for i in range(3) if shards[i] is shard)
        events.append(f"fetch {number}")
        x, work = start(shard, *more)
        return x, mock.Mock(wait=lambda: (events.append(f"wait {number}"), work.wait()))

    store.start_all_gather = noted_fetch
    x = torch.ones(7, requires_grad=True)
    for number in range(3):
        x = lesson.checkpoint(square, x, number, store=store)
        shards.append(store.last().start_all_gather.args[0])
        assert shards[-1].untyped_storage().nbytes() == 4 * -(-7 // dist.get_world_size()), "not 1/N"
    x.sum().backward()
    assert store.last() is None, "a checkpoint outlives its backward"
    order = "fetch 2, wait 2, fetch 1, forward 2, wait 1, fetch 0, forward 1, wait 0, forward 0"
    assert ", ".join(events[3:]) == order, f"another order: {events}"
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    store = lesson.Partitioned(torch.device("cpu"), offload)
    lesson.checkpoint(torch.sin, x.t(), store=store).sum().backward()  # not contiguous
    assert torch.equal(x.grad, x.detach().cos()), "transposed: another gradient"
    store = lesson.Partitioned(torch.device("meta"), offload)
    with mock.patch.object(torch.Tensor, "copy_"):  # of a tensor without data; of a GPU's see test_nccl.py
        kept_on = store.partition(torch.ones(4, device="meta"))[0].device.type
    assert kept_on == ("cpu" if offload else "meta"), f"not on the host, but on {kept_on}"


def drop_and_change(lesson, config):
    """A checkpoint is dropped, and its input changed in place, while it is on its way to the host."""
    device, _ = lesson.set_up(config)
    x, store = torch.ones(96, device=device), lesson.Partitioned(device, offload=True)
    for _ in range(2):
        y = lesson.checkpoint(torch.sin, x, store=store)
        x += y


offloaded = partial(check_events, offload=True)
CHECKS = check_gradients, check_changed, check_naive, check_events, offloaded
test_each_promise_is_kept = holds("zero_r", *CHECKS)
MUTANTS = [
    ("        set_random_states(self.random_states)\n", "", check_gradients, "gradients differ"),
    ("        set_random_states(before)\n", "", check_gradients, "gradients differ"),
    ("] = tensor.detach(),", "] = tensor,", check_gradients, "outlives its graph"),
    ("self.gathering or self.start", "self.start", check_events, "another order"),
    ("self.previous.gathering = self.previous", "self.previous", check_events, "another order"),
    ("store.last = weakref.ref(self)", "store.last = lambda: self", check_events, "outlives"),
    ("F.pad(own, (0, size - len(own)))", "own", check_changed, "has changed, too"),
    ("F.pad(own, (0, size - len(own)))", "F.pad(own, (0, size))[:size]", check_events, "not 1/N"),
    ('device="cpu", pin', "device=self.device, pin", offloaded, "not on the host"),
    ("dist.get_rank(self.group) * size", "0", check_gradients, "gradients differ"),
    (".requires_grad_(requires_grad)", ".requires_grad_()", check_gradients, "gradients differ"),
    ("assert versions_of(self.args) ==", "assert True or", check_changed, ": nothing"),
    ("in tree_leaves(values) if", "in values if", check_changed, "listed: nothing"),
    ("if not torch.is_grad_enabled()", "if False", check_gradients, "in inference_mode() RuntimeError"),
    ("y.backward(grad)", "y.backward(grad.sign())", check_naive, "naive: differs"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "zero_r")
check_offload = partial(together, on_gpu, rows=[(2, 1, 3, "--policy offload")])
check_dropped = partial(together, on_gpu, rows=[(2, 1, 3, "--dtype bf16", drop_and_change)])
test_a_checkpoint_may_be_dropped_and_its_input_changed = holds("zero_r", check_dropped)
GPU_MUTANTS = [
    (
        "zero_r",
        "part.record_stream(self.stream)",
        "pass",
        check_offload,
        "takes memory that another stream still uses",
    ),
    (
        "zero_r",
        "part.record_stream(self.stream)",
        "pass",
        check_dropped,
        "takes memory that another stream still uses",
    ),
    (
        "zero_r",
        "F.pad(own, (0, size - len(own)))",
        "own",
        check_dropped,
        "uses what another stream has not finished",
    ),
    (
        "zero_r",
        "self.stream.wait_stream(torch.cuda.current_stream(self.device))",
        "pass",
        check_offload,
        "uses what another stream has not finished",
    ),
    (
        "zero_r",
        "            work = all_gather(flat",
        "        work = all_gather(flat",
        check_offload,
        "launches a collective on what another stream has not finished",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
