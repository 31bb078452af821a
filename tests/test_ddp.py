"""What is special to ddp.py: the buckets, and when they leave."""

from functools import partial

import torch
import torch.nn as nn

from tests.checks import check_ledger
from tests.gpu import check_gpu, check_order
from tests.harness import Lesson, holds, load, mutants, on_ranks

LESSON = Lesson(
    variants=("--no-overlap", "--bucket-cap-mb 0.02"),
    own={"--bucket-cap-mb": ("0 0.02 1", "-1 nan x")},
    bad=("--batch 7",),
    races=("",),
)


@on_ranks(2)
def check_events(name, order, expected):
    """Gradients that land and buckets that leave, in the last backward of a second step."""
    layers = [nn.Linear(4, 4, bias=False) for _ in order]
    module = nn.ModuleList(layers)
    module.forward = nn.Sequential(*(layers[i] for i in order)).forward
    ddp = load(name).DDP(module, bucket_cap_mb=0)
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
        ddp.clip_grad_norm_(1.0)
        views = {param: view for bucket in ddp.buckets for param, view in bucket.grad_views.items()}
        assert all(param.grad is views[param] for param in number), "gradients are not views of buckets"
        ddp.zero_grad()
    assert ", ".join(log) == expected, f"another order: {', '.join(log)}"


ORDERS = [  # of layers; a bucket leaves when it is full and those before it have left
    ((0, 1, 2, 3), "left 3, landed 3, left 2, landed 2, left 1, landed 1, left 0, landed 0, end"),
    ((3, 2, 1, 0), "landed 0, landed 1, landed 2, left 3, left 2, left 1, left 0, landed 3, end"),
]
check_orders = [partial(check_events, order=order, expected=expected) for order, expected in ORDERS]

MIB = 2**18  # elements
BUCKETS = [  # parameters' elements, MiB, parameters of each bucket
    ([MIB // 4] * 40, None, [8, 8, 8, 8, 8], "fifths"),
    ([MIB * 25 // 2] * 20, None, [2] * 10, "25"),
    ([MIB // 2] * 8, 2, [4, 4], "2"),
]


@on_ranks(1)
def check_buckets(name):
    for numels, cap, expected, size in BUCKETS:
        frozen = nn.Parameter(torch.empty(1), requires_grad=False)
        model = nn.ParameterList([frozen, *(nn.Parameter(torch.empty(numel)) for numel in numels)])
        buckets = [bucket.params for bucket in load(name).DDP(model, cap).buckets]
        sizes = [len(params) for params in buckets]
        assert sizes == expected, f"not {size} MiB: {sizes}"
        assert buckets[0][0] is model[-1] and buckets[-1][-1] is model[1], "not as gradients land"


test_each_promise_is_kept = holds("ddp", *check_orders, check_buckets)
MUTANTS = [
    ("while self.waiting and not self.waiting[0].pending:\n            self.waiting.popleft().start",
     "if not bucket.pending:\n            self.waiting.remove(bucket)\n            bucket.start",
     check_orders[1], "another order"),
    ("in reversed(params)", "in params", check_buckets, "not as gradients land"),
    ("/ 5 / 2**20", "/ 4 / 2**20", check_buckets, "not fifths"),
    ("        param.grad = view", "        pass", check_orders[1], "not views of buckets"),
    ("master.grad = None", "pass", partial(check_ledger, size=2, flags="--dtype bf16"), "gradients: +"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "ddp")
GPU_MUTANTS = [
    (
        "ddp pipeline",
        "torch.cuda.set_device(device if gpus else -1)",
        "pass",
        check_gpu,
        "over NCCL before torch.cuda.set_device",
    ),
    ("ddp", "all_reduce(self.flat_grad,", "all_reduce(self.flat_grad.cpu(),", check_gpu, "of the host"),
    ("ddp", "        self.work.wait()\n", "", check_gpu, "uses what a collective still"),
    (
        "ddp",
        "dist.all_reduce(loss)",
        "if rank == 0:\n            dist.all_reduce(loss)",
        check_order,
        "ranks do not meet",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
