"""What is special to ddp.py: the buckets, and when they leave."""

from functools import partial

import torch
import torch.nn as nn

from tests.checks import check_masters, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import Lesson, error_of, holds, load, mutants, on_ranks

NAIVE = "--naive"


def slack(root, block, size, flags):
    """Gradients: the first buckets leave before others have theirs."""
    return root + 3 * block, 0


LESSON = Lesson(
    variants=("--naive", "--buckets 1", "--buckets 100"),
    own={"--buckets": ("1 5 100", "x")},
    slack=slack,
    races=("",),
)


@on_ranks(2)
def check_events(name, order, expected):
    """Gradients that land and buckets that leave, in the last backward of a second step."""
    layers = [nn.Linear(4, 4, bias=False) for _ in order]
    module = nn.ModuleList(layers)
    module.forward = nn.Sequential(*(layers[i] for i in order)).forward
    ddp = load(name).DDP(module, n_buckets=99)
    log = []
    number = {param: i for i, param in enumerate(ddp.module.parameters())}
    for param, i in number.items():
        param.register_post_accumulate_grad_hook(lambda _, i=i: log.append(f"landed {i}"))
    for bucket in ddp.buckets:
        left = f"left {number[bucket.params[0]]}"
        bucket.start_all_reduce = lambda left=left, start=bucket.start_all_reduce: (log.append(left), start())
    for _ in range(2):
        for ddp.is_last_backward in False, True:
            log.clear()
            ddp(torch.ones(2, 4)).sum().backward()
        log.append("end")
        ddp.finish_all_reduces()
        ddp.zero_grad()
    assert ", ".join(log) == expected, f"another order: {', '.join(log)}"


ORDERS = [  # of layers; a bucket leaves when it is full and those before it have left
    ((0, 1, 2, 3), "left 3, landed 3, left 2, landed 2, left 1, landed 1, left 0, landed 0, end"),
    ((3, 2, 1, 0), "landed 0, landed 1, landed 2, left 3, left 2, left 1, left 0, landed 3, end"),
]
check_orders = [partial(check_events, order=order, expected=expected) for order, expected in ORDERS]


@on_ranks(1)
def check_buckets(name):
    """They are about equal, and hold the last parameters first."""
    for n_buckets, expected in (1, [10]), (5, [2] * 5), (99, [1] * 10):
        model = nn.ParameterList(nn.Parameter(torch.empty(8)) for _ in range(10))
        buckets = [bucket.params for bucket in load(name).DDP(model, n_buckets).buckets]
        sizes = [len(params) for params in buckets]
        assert sizes == expected, f"{n_buckets} buckets of {sizes} parameters"
        assert buckets[0][0] is model[-1] and buckets[-1][-1] is model[0], "not as gradients land"


@on_ranks(2)
def check_unreached(name):
    """A parameter that backward does not reach is an error, and no silent difference between ranks."""
    ddp = load(name).DDP(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), 5)
    ddp.module[0](torch.ones(2)).sum().backward()
    assert "backward has not reached" in error_of(ddp.finish_all_reduces), "passes in silence"


test_each_promise_is_kept = holds("ddp", *check_orders, check_buckets, check_unreached)
naive = partial(check_parity, own_flags="--naive")
LEAVES = """        while self.n_sent < len(self.buckets) and self.buckets[self.n_sent].missing == 0:
            self.buckets[self.n_sent].start_all_reduce()
"""
MUTANTS = [
    (LEAVES, "        if bucket.missing == 0:\n            bucket.start_all_reduce()\n", check_orders[1],
     "another order"),
    ("in reversed(params)", "in params", check_buckets, "not as gradients land"),
    ("numel() >= limit", "numel() > limit", check_buckets, "parameters"),
    ("        if not self.is_last_backward:\n", "        if False:\n", check_parity, "differ"),
    ("= i == config.accum", "= i == 1", check_parity, "differ"),
    ("self.n_sent == len(self.buckets), ", "True, ", check_unreached, "in silence"),
    ("            param.grad = part.view_as(param)", "            pass", check_parity, "differ"),
    ("        dist.all_reduce(param.grad)", "        pass", naive, "differ"),
    ("/ (config.accum * world_size)", "/ config.accum", check_parity, "differ"),
    ("        dist.all_reduce(total_loss)", "        pass", check_parity, "losses differ"),
    ("detach().to(wide(param.dtype))", "detach()", check_masters, "moved by"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "ddp")
GPU_MUTANTS = [
    ("config.clip, norm)", "config.clip, norm + 0 * norm.item())", check_gpu, "the host waits"),
    ("        self.work.wait()\n", "", check_gpu, "what a collective still"),
    (
        "        dist.all_reduce(total_loss)",
        "        rank == 0 and dist.all_reduce(total_loss)",
        check_order,
        "ranks do not meet",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "ddp")
