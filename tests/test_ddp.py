"""What is special to ddp.py."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from test_all import check_ledger, check_masters, check_parity
from tests.harness import apart, holds, load, mutants, on_ranks
from tests.test_zero import Late, Odd, Wide, batches, train_plain


@on_ranks(3)
def check_odd(name, late=False, **options):
    """The weights of an Odd are train_plain()'s after the same steps."""
    torch.manual_seed(0)
    model = Odd().double()
    expected = train_plain(copy.deepcopy(model))
    for tensor in model.state_dict().values():
        tensor.add_(dist.get_rank())  # all ranks must start with rank 0's
    lesson = load(name)
    ddp = lesson.DDP(model, **options)
    if late:
        lesson.dist = mock.Mock(wraps=dist)
        lesson.dist.all_reduce = late_all_reduce
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for first, last in batches(dist.get_rank(), dist.get_world_size()):
        with ddp.no_sync():
            (ddp(first).square().mean() / 2).backward()
        (ddp(last).square().mean() / 2).backward()
        ddp.clip_grad_norm_(0.3)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert apart(model.state_dict(), expected) < 1e-12, "weights differ"


def late_all_reduce(tensor, group=None, async_op=False):
    """An all-reduce whose result is there when it has been waited for, and not before."""
    result = tensor.clone()
    work = dist.all_reduce(result, group=group, async_op=True)
    tensor.fill_(torch.nan)
    return Late(work, tensor, result)


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}, {"bucket_cap_mb": 0.001}, {"overlap": False}])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_module_trains_from_rank_0s_weights(size, options):
    check_odd("ddp", size=size, **options)


@pytest.mark.parametrize("flags", ["--no-overlap", "--bucket-cap-mb 0", "--bucket-cap-mb 0.02"])
def test_each_idea_can_be_turned_off(flags):
    check_parity("ddp", 3, "--accum 3", flags)
    check_ledger("ddp", 2, f"--accum 3 {flags}")


@on_ranks(2)
def check_gradients(name):
    """Gradients are those of torch's, and of the plain way of the docstring; where they are."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)).double()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    ddp = load(name).DDP(models[0], bucket_cap_mb=0.0001)
    for wrapped in (ddp, nn.parallel.DistributedDataParallel(models[1]), models[2]):
        wrapped(x).square().mean().backward()
    ddp.clip_grad_norm_(torch.inf)
    for param in models[2].parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    found = [{name: param.grad for name, param in model.named_parameters()} for model in models]
    storages = {param.grad.untyped_storage().data_ptr() for param in models[0].parameters()}
    flat = {bucket.flat_grad.untyped_storage().data_ptr() for bucket in ddp.buckets}
    assert apart(found[0], found[1]) < 1e-12, "not the gradients of torch's DistributedDataParallel"
    assert apart(found[0], found[2]) < 1e-12, "not the gradients of an all-reduce after backward"
    assert storages == flat and len(flat) > 1, "gradients are not views of buckets"


# ---- buckets, and when they leave ----


class Backwards(nn.Module):
    """Layers that run in the reverse order of their definition, so that gradients land in it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@on_ranks(2)
def check_events(name, model_class, options, expected):
    """Gradients that land and buckets that leave, in the last backward of a second step."""
    lesson = load(name)
    ddp = lesson.DDP(model_class(), bucket_cap_mb=0, **options)
    log = []
    number = {param: i for i, param in enumerate(ddp.module.parameters())}
    for param, i in number.items():
        param.register_post_accumulate_grad_hook(lambda _, i=i: log.append(f"landed {i}"))
    launch = ddp._launch

    def noted():
        log.append(f"left {number[ddp.to_launch[0].params[0]]}")
        launch()

    ddp._launch = noted
    for _ in range(2):
        with ddp.no_sync():
            ddp(torch.ones(2, 4)).sum().backward()
        log.clear()
        ddp(torch.ones(2, 4)).sum().backward()
        log.append("end")
        ddp.clip_grad_norm_(1.0)
        ddp.zero_grad()
    assert ", ".join(log) == expected, f"another order: {', '.join(log)}"


class Forwards(Backwards):
    def forward(self, x):
        return nn.Sequential(*self.layers)(x)


LATER = {"overlap": False}
ORDERS = [  # a bucket leaves when it is full and those before it have left
    (Forwards, {}, "left 3, landed 3, left 2, landed 2, left 1, landed 1, left 0, landed 0, end"),
    (Backwards, {}, "landed 0, landed 1, landed 2, left 3, left 2, left 1, left 0, landed 3, end"),
    (Forwards, LATER, "landed 3, landed 2, landed 1, landed 0, end, left 3, left 2, left 1, left 0"),
]


def check_order(name):
    for case in ORDERS:
        check_events(name, *case)


@on_ranks(1)
def check_buckets(name):
    mib = 2**18  # elements
    sizes = [len(bucket) for bucket in buckets_of(name, [mib // 4] * 40, None)]
    assert sizes == [4, 8, 8, 8, 8, 4], f"not 1 MiB and then fifths: {sizes}"
    sizes = [len(bucket) for bucket in buckets_of(name, [mib * 25 // 2] * 20, None)]
    assert sizes == [1] + [2] * 9 + [1], f"not 1 MiB and then 25: {sizes}"
    buckets = buckets_of(name, [mib // 2] * 8, 2)
    assert buckets == [[7, 6], [5, 4, 3, 2], [1, 0]], f"not 1 MiB and then 2: {buckets}"


def buckets_of(name, numels, cap):
    """The parameters of each bucket, for parameters of so many elements."""
    model = nn.ParameterList([nn.Parameter(torch.empty(numel)) for numel in numels])
    number = {param: i for i, param in enumerate(model)}
    return [[number[param] for param in bucket.params] for bucket in load(name).DDP(model, cap).buckets]


@on_ranks(1)
def check_misuse_and_norm(name):
    gradient = torch.rand(10_000_000)
    exact = sum(part.double().square().sum() for part in gradient.split(2**20)).sqrt()
    ddp = load(name).DDP(Wide(10_000_000))
    ddp(gradient).backward()
    norm = ddp.clip_grad_norm_(1.0)
    assert abs(norm / exact - 1) < 1e-6, f"the norm is {norm / exact:.7f} of what it should be"
    ddp(gradient).backward()
    with pytest.raises(AssertionError, match="all backwards of a step but the last belong in no_sync"):
        ddp(gradient).backward()


check_late = partial(check_odd, size=2, late=True)
check_bf16 = partial(check_ledger, size=2, flags="--dtype bf16")
test_each_promise_is_kept = holds(
    "ddp", check_late, check_gradients, check_order, check_buckets, check_misuse_and_norm
)
MUTANTS = [
    ("all_reduce(bucket.flat_grad, ", "all_reduce(bucket.flat_grad[:0], ", check_parity, "losses differ"),
    ("squares.sqrt() / self.world_size", "squares.sqrt()", check_parity, "losses differ"),
    ("view.copy_(param.grad)", "view.add_(param.grad)", check_parity, "losses differ"),
    ("view.zero_()", "pass", check_odd, "weights differ"),
    ("dist.broadcast(tensor, group_src=0, group=group)", "pass", check_odd, "weights differ"),
    ("        if self.syncing:\n", "        if True:\n", check_parity, "belong in no_sync()"),
    ("bucket.work.wait()", "pass", check_late, "weights differ"),
    ("not self.to_launch[0].pending", "not bucket.pending", check_order, "another order"),
    ("while self.overlap and", "while", check_order, "another order"),
    ("params[::-1]", "params", check_buckets, "not 1 MiB"),
    ("if buckets else min(cap_mb, 1)", "", check_buckets, "not 1 MiB"),
    ("/ 5 / 2**20", "/ 4 / 2**20", check_buckets, "fifths"),
    ("        param.grad = view", "        pass", check_gradients, ""),
    ("square().sum(dtype=torch.float64)", "norm().double().square()", check_misuse_and_norm, "the norm is"),
    ("torch._foreach_copy_(params", "zip(params", check_masters, "bf16 weights moved by"),
    ("master.grad = None", "pass", check_bf16, "gradients: +"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "ddp")
