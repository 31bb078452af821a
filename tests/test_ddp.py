"""What is special to ddp.py: the buckets, and when they leave."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn as nn

from test_all import check_ledger
from tests.harness import holds, load, mutants, on_ranks


@on_ranks(2)
def check_events(name, order, last, expected):
    """Gradients that land and units that leave, in the last backward of a second step."""
    layers = [nn.Linear(4, 4, bias=False) for _ in order]
    module = nn.ModuleList(layers)
    module.forward = nn.Sequential(*(layers[i] for i in order)).forward
    ddp = load(name).DDP(module, bucket_cap_mb=0)
    log = []
    number = {param: i for i, param in enumerate(ddp.module.parameters())}
    for param, i in number.items():
        param.register_post_accumulate_grad_hook(lambda _, i=i: log.append(f"landed {i}"))
    for unit in ddp.units:
        left = f"left {number[unit.weights[0]]}"
        unit.start_reduce = lambda left=left, start=unit.start_reduce: (log.append(left), start())
    for _ in range(2):
        with ddp.no_sync():
            ddp(torch.ones(2, 4)).sum().backward()
        log.clear()
        with nullcontext() if last else ddp.no_sync():
            ddp(torch.ones(2, 4)).sum().backward()
        log.append("end")
        ddp.clip_grad_norm_(1.0)
        views = {param: view for unit in ddp.units for param, view in unit.grad_views.items()}
        assert all(param.grad is views[param] for param in number), "gradients are not views of units"
        ddp.zero_grad()
    assert ", ".join(log) == expected, f"another order: {', '.join(log)}"


ORDERS = [  # of layers; a unit leaves when it is full and those before it have left, or at the clip
    ((0, 1, 2, 3), True, "left 3, landed 3, left 2, landed 2, left 1, landed 1, left 0, landed 0, end"),
    ((3, 2, 1, 0), True, "landed 0, landed 1, landed 2, left 3, left 2, left 1, left 0, landed 3, end"),
    ((0, 1, 2, 3), False, "landed 3, landed 2, landed 1, landed 0, end, left 3, left 2, left 1, left 0"),
]
check_orders = [partial(check_events, order=o, last=last, expected=e) for o, last, e in ORDERS]

MIB = 2**18  # elements
BUCKETS = [  # parameters' elements, MiB, parameters of each bucket
    ([MIB // 4] * 40, None, [4, 8, 8, 8, 8, 4], "fifths"),
    ([MIB * 25 // 2] * 20, None, [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1], "25"),
    ([MIB // 2] * 8, 2, [2, 4, 2], "2"),
]


@on_ranks(1)
def check_buckets(name):
    for numels, cap, expected, then in BUCKETS:
        model = nn.ParameterList([nn.Parameter(torch.empty(numel)) for numel in numels])
        buckets = [unit.weights for unit in load(name).DDP(model, cap).units]
        sizes = [len(params) for params in buckets]
        assert sizes == expected, f"not 1 MiB and then {then}: {sizes}"
        assert buckets[0][0] is model[-1] and buckets[-1][-1] is model[0], "not as gradients land"


test_each_promise_is_kept = holds("ddp", *check_orders, check_buckets)
MUTANTS = [
    ("            if unit.pending:\n                break\n", "", check_orders[1], "another order"),
    ("requires_grad][::-1]", "requires_grad]", check_buckets, "not as gradients land"),
    ("if len(buckets) > 1 else min(cap_mb, 1)", "", check_buckets, "not 1 MiB"),
    ("/ 5 / 2**20", "/ 4 / 2**20", check_buckets, "fifths"),
    ("        weight.grad = view", "        pass", check_orders[1], "not views of units"),
    ("master.grad = None", "pass", partial(check_ledger, size=2, flags="--dtype bf16"), "gradients: +"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "ddp")
