"""What is special to offload.py: what is copied to the host and back, while the device computes."""

from functools import partial

import torch

from tests.checks import check_ledger, check_masters, check_parity
from tests.gpu import check_gpu, check_order, on_gpu, together
from tests.harness import Lesson, holds, mutants
from tests.test_zero1 import check_timeline, situations

NAIVE = "--naive"
GRADIENTS, NORM = ("copy", "finish_reduce_scatter()"), ("copy", "train()")
LESSON = Lesson(
    variants=("--naive",),
    slack=lambda root, block, size, flags: (2 * root + block, root + block),
    races=("",),
    waits={"": {GRADIENTS: "3k", NORM: 2}},  # three units; the norm goes up, and its sum comes down
)


def overlap(lesson, config):
    """On a simulated GPU: what was launched, and neither copies nor forward wait for."""
    gpu = torch.pretend.current_stream.__self__
    compute, copy, forward = gpu.stream(), gpu.copy, lesson.Block.forward
    links, down, up = set(), [], []

    def noted_copy(given, made, waits):
        copy(given, made, waits)
        if "finish_reduce_scatter" in gpu.where():
            links.add(gpu.stream())
            down.append(gpu.clocks[compute][compute] - gpu.clocks[gpu.stream()][compute])

    def noted_forward(block, x):
        up.append(sum(gpu.clocks[link][link] - gpu.clocks[compute][link] for link in links))
        return forward(block, x)

    gpu.copy, lesson.Block.forward = noted_copy, noted_forward
    lesson.train(config)
    assert all(down[-3:-1]), f"gradients that go down wait for backward: {down}"
    assert up[-2], f"forward waits for all weights that come up: {up}"


check_overlap = partial(together, on_gpu, rows=[(2, 1, 1, "--dtype bf16", overlap)])
CHECKS = check_timeline, check_overlap, *situations
test_each_promise_is_kept = holds("offload", *CHECKS)
naive = partial(check_parity, own_flags="--naive")
GRADS = "squared_norm([shard.grad for shard in model.shards()])"
IN_TURN = """            self.finish_reduce_scatters()
            unit.start_reduce_scatter()
"""
MUTANTS = [
    (GRADS, "squared_norm([model.shards()[0].grad])", check_parity, "differ"),
    ("        dist.all_reduce(squares)", "        pass", check_parity, "differ"),
    ("        dist.all_reduce(total_loss)", "        pass", check_parity, "losses differ"),
    ("/ (config.accum * world_size)", "/ config.accum", check_parity, "losses differ"),
    ("self.shard.grad += self.staging", "self.shard.grad.copy_(self.staging)", check_parity, "differ"),
    ("            param.grad = None\n", "            pass\n", naive, "differ"),
    ("self.staging.copy_(self.shard.detach())", "pass", check_parity, "losses differ"),
    ("self.own.copy_(self.staging, non_blocking=True)", "pass", check_parity, "losses differ"),
    ('"cpu", wide(self.dtype), copy=True', "wide(self.dtype)", check_ledger, "optimizer: +"),
    ("wide(self.dtype), copy", "self.dtype, copy", check_masters, "moved by"),
    ("unit.finish_gather())\n", "None)\n", check_timeline, "another order"),
    (IN_TURN, "".join(IN_TURN.splitlines(True)[::-1]), check_timeline, "another order"),
    (IN_TURN, IN_TURN.splitlines(True)[1], check_timeline, "another order"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "offload")
ON_LINK = "with torch.cuda.stream(self.link):\n"
DOWN = f"            {ON_LINK}                self.reducing"
UP = f"        {ON_LINK}            self.own"
UNFINISHED = "what another stream has not finished"
GPU_MUTANTS = [
    ("                self.reducing.wait()", "                pass", check_gpu, UNFINISHED),
    ("            self.gathering.wait()\n", "", check_gpu, UNFINISHED),
    (DOWN, DOWN.replace(ON_LINK, "if True:\n"), check_overlap, "wait for backward"),
    (UP, UP.replace(ON_LINK, "if True:\n"), check_overlap, "forward waits"),
    ("non_blocking=True", "non_blocking=False", check_gpu, "the host waits"),
    ("pin_memory=self.own.is_cuda", "pin_memory=False", check_gpu, "the host waits"),
    ("self.staging.copy_(self.received)", "self.staging.copy_(self.received, non_blocking=True)", check_gpu,
     UNFINISHED),
    ("        dist.all_reduce(squares)", "        rank == 0 and dist.all_reduce(squares)", check_order,
     "ranks do not meet"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "offload")
