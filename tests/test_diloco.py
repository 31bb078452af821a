"""What is special to diloco.py: N ranks are N replicas trained one after the other, whenever they speak."""

import copy
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist

from tests.checks import EXACT, check_ledger, check_parity
from tests.gpu import check_gpu
from tests.harness import Lesson, apart, holds, load, mutants, on_ranks, train, world

RUN = "torchrun LESSON --inner-steps 0"
OTHER = "--inner-steps 2"
FILM = "--inner-steps 2 --steps 4"
LEARN = "torchrun LESSON --inner-steps 4 --steps 8"
RACE = "2 --steps 5"
AGAINST = "--inner-steps 0"
LESSON = Lesson(
    own={
        "--inner-steps": ("0", "1.5 x"),
        "--outer-lr": ("1", "x"),
        "--outer-momentum": ("0", "x"),
    },
    gpu=("--inner-steps 2",),
)
FLAGS = f"{EXACT} --batch 72 --accum 3 --steps 10 --lr 0.002"
LOCAL = "--inner-steps 4"
AVERAGE = f"{LOCAL} --outer-lr 1 --outer-momentum 0"


def plain(size, flags):
    """N replicas in one process: the losses of its lines, and the weights that all have at the end."""
    lesson = load("diloco")
    config = lesson.parse(flags.split())
    replicas = [lesson.GPT(config)]
    replicas += [copy.deepcopy(replicas[0]) for _ in range(size - 1)]
    optimizers = [torch.optim.AdamW(replica.parameters(), config.lr) for replica in replicas]
    outer = torch.nn.utils.parameters_to_vector(replicas[0].parameters()).detach()
    momentum, losses = torch.zeros_like(outer), []
    for step in range(1, config.steps + 1):
        losses.append(0)
        for rank, replica in enumerate(replicas):
            for inputs, targets in lesson.microbatches(config, step, "cpu", rank, size):
                loss = lesson.mean_loss(replica(inputs), targets) / config.accum
                loss.backward()
                losses[-1] += loss.item() / size
            torch.nn.utils.clip_grad_norm_(replica.parameters(), config.clip)
            optimizers[rank].step()
            replica.zero_grad()
        if step % config.inner_steps == 0 or step == config.steps:
            flats = [torch.nn.utils.parameters_to_vector(each.parameters()).detach() for each in replicas]
            gradient = outer - sum(flats) / size
            momentum = config.outer_momentum * momentum + gradient
            outer = outer - config.outer_lr * (gradient + config.outer_momentum * momentum)
            for replica in replicas:
                torch.nn.utils.vector_to_parameters(outer.clone(), replica.parameters())
    return losses, {name: tensor.clone() for name, tensor in replicas[0].state_dict().items()}


expected = cache(lambda size, flags: world(1).run(plain, size, flags)[0])


def check(name, own=LOCAL, size=2):
    losses, weights = expected(size, f"{FLAGS} {own}")
    result, ours = train(name, size, f"{FLAGS} {own}")
    assert apart(result["losses"], losses) < 1e-10, "losses differ"
    assert apart(ours, weights) < 1e-10, "weights differ"


@pytest.mark.long_table
@pytest.mark.parametrize("own", [LOCAL, AVERAGE, f"{LOCAL} --inner-steps 1", f"{LOCAL} --inner-steps 20"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_are_replicas_trained_one_after_the_other(size, own):
    check("diloco", own, size)


@on_ranks(2)
def check_small_moves(name):
    """In bf16 ranks exchange fp32 weights, so moves that bf16 rounds away count."""
    lesson = load(name)
    layer = torch.nn.Linear(4, 4).bfloat16()
    torch.nn.init.ones_(layer.weight)
    inner = lesson.MasterWeights(layer.parameters(), 0.1)
    diloco = lesson.DiLoCo(inner, 1.0, 0.0)
    inner.masters[0].fill_(1 + (1 + dist.get_rank()) / 1024)
    diloco.exchange()
    assert apart(inner.masters[0], torch.full((4, 4), 1 + 1.5 / 1024)) < 1e-6, "other master weights"
    inner.masters[0].add_(2**-6 * dist.get_rank())
    diloco.exchange()
    assert apart(layer.weight, inner.masters[0].bfloat16()) == 0, "weights are not the rounded masters"


check_bytes = partial(check_ledger, flags=f"{OTHER} --steps 6 --dtype bf16 --accum 3", size=4)
check_plain = partial(check_ledger, flags=f"{OTHER} --steps 6 --accum 1", size=4)
test_each_promise_is_kept = holds("diloco", check_small_moves, check_bytes, check_plain)
check_average = partial(check, own=AVERAGE)
MUTANTS = [
    ("outer - param\n", "param - outer\n", check, "losses differ"),
    ("            average(outer.grad)\n", "", check, "losses differ"),
    ("nesterov=momentum > 0", "nesterov=False", check, "losses differ"),
    ("self.sgd.zero_grad()", "pass", check_plain, "gradients: +"),
    ("lr, momentum, nesterov", "lr, 0.9, nesterov", check_average, "losses differ"),
    ("        torch._foreach_copy_(self.inner.params, self.outer)\n", "", check_small_moves,
     "rounded masters"),
    ("        torch._foreach_copy_(self.inner.masters, self.outer)\n", "", check_small_moves, "other master"),
    (" or step == config.steps", "", check, "weights differ"),
    ("            naive(params)", "            pass", check_parity, "differ"),
    ("    tensor /= dist.get_world_size()\n", "", check_parity, "differ"),
    ("        average(total_loss)", "        pass", check_parity, "losses differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "diloco")
on_gpus = partial(check_gpu, rows=[(2, 1, 3, f"--dtype bf16 {OTHER}")])
GPU_MUTANTS = [
    ("self.sgd.step()", "self.sgd.step(); outer.sum().item()", on_gpus, "the host waits"),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "diloco")
