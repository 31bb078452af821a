"""What is special to sequence_parallel.py: products, the order of its backward, published numbers."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.checks import check_parity
from tests.gpu import check_gpu
from tests.harness import Lesson, apart, holds, load, mutants, on_ranks
from tests.test_tensor_parallel import check_loss, check_model, own

FILM = "--layers 2"
NAIVE = "--naive"
WITH = "--vocab 264 --context 48"
LESSON = Lesson(
    flags="--vocab 264 --context 12 --batch 9",
    variants=("--naive",),
    bad=("--heads 9", "--vocab 257", "--context 15"),
    races=("",),
)


@on_ranks(3)
def check_products(name):
    """Output and gradients of an MLP of odd sizes, whose input is also used beside it."""
    lesson, size = load(name), dist.get_world_size()
    torch.manual_seed(0)
    x, up, down = torch.randn(2, 12, 7), torch.randn(3 * size, 7), torch.randn(11, 3 * size)
    x, up, down = (each.double().requires_grad_() for each in (x, up, down))
    expected = F.linear(F.gelu(F.linear(x, up)), down)
    direction = torch.randn_like(expected)
    (x.sum() + (expected * direction).sum()).backward()
    for what, product in ("naive", lesson.naive_column_parallel), ("overlapped", lesson.ColumnParallel.apply):
        own_x, own_up, own_down = own(x, 1), own(up, 0), own(down, 1)
        output = lesson.SumScatter.apply(F.linear(F.gelu(product(own_x, own_up)), own_down))
        (own_x.sum() + (output * own(direction, 1).detach()).sum()).backward()
        assert apart(output.detach(), own(expected, 1).detach()) < 1e-12, f"{what}: not the output"
        assert apart(own_x.grad, own(x.grad, 1).detach()) < 1e-12, f"{what}: not the gradient of x"
        assert apart(own_up.grad, own(up.grad, 0).detach()) < 1e-12, f"{what}: not the gradient of up"
        assert apart(own_down.grad, own(down.grad, 1).detach()) < 1e-12, f"{what}: not the gradient of down"


ORDER = "start gather, matmul, start scatter, end gather, matmul, end scatter"


@on_ranks(2)
def check_order(name):
    """What starts, is computed and is waited for in the backward of a column-parallel product."""
    lesson, log = load(name), []
    y = lesson.ColumnParallel.apply(torch.randn(2, 4, 8, requires_grad=True), torch.randn(3, 8))

    def recorded(what, collective):
        def call(*args, async_op):
            log.append(f"start {what}")
            work = collective(*args, async_op=True)
            return mock.Mock(wait=lambda: (log.append(f"end {what}"), work.wait()))

        return call

    lesson.all_gather = recorded("gather", lesson.all_gather)
    lesson.reduce_scatter = recorded("scatter", lesson.reduce_scatter)
    matmul = torch.Tensor.__matmul__
    noted = lambda *two: (log.append("matmul"), matmul(*two))[1]  # noqa: E731
    with mock.patch.object(torch.Tensor, "__matmul__", noted):
        y.sum().backward()
    assert ", ".join(log) == ORDER, f"another order: {log}"


@pytest.mark.parametrize("t", [1, 2, 8])
def test_a_layer_keeps_and_sends_what_the_papers_say(t):
    # 2205.05198, table 2, in 16 bits, less dropout's masks, and scores, which are never stored here; plus the
    # 4 statistics of norms. Beside tensor parallelism's 8bsh(t-1)/t elements (1909.08053), two inputs
    # are gathered once more.
    ledger, lesson = load("tools/ledger"), load("sequence_parallel")
    expected = {
        "reduce-scatter": 24 * (t - 1) / t,
        "all-gather": 36 * (t - 1) / t,
        "activations": (34 - 2) / t,
    }
    letters = {"b": 4, "s": 1024, "h": 4096, "v": 51200, "a": 0, "w": 2, "k": 3, "N": t}
    formulas = ledger.read_formulas(lesson, lesson.parse([]))
    for what, times in expected.items():
        one, two = (ledger.evaluate(formulas[what], letters | {"L": layers}) for layers in (1, 2))
        statistics = 4 * 1024 * 16 / t * (what == "activations")
        assert two - one - statistics == 4 * 1024 * 4096 * times, f"other {what}"


naive = partial(check_model, flags="--naive")
CHECKS = [partial(check, size=n) for check in (check_products, check_model, naive) for n in (1, 2, 3, 4)]
test_each_promise_is_kept = holds("sequence_parallel", *CHECKS, check_loss, check_order)
MUTANTS = [
    ("            dist.all_reduce(param.grad)", "            pass", check_parity, "differ"),
    ("parts.transpose(0, 1).flatten(1, 2)", "parts.flatten(0, 1).view(len(parts[0]), -1, parts.shape[-1])",
     check_products, "not the output"),
    ("        return gather(grad)\n", "        return grad.repeat(1, dist.get_world_size(), 1)\n",
     check_products, "not the gradient of"),
    ("        return sum_scatter(grad)\n",
     "        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()]\n",
     check_products, "naive: not the gradient of x"),
    (".chunk(dist.get_world_size())[dist.get_rank()]\n        return",
     "[: tokens.shape[1] // dist.get_world_size()]\n        return", check_model, "not the"),
    ("gathering, all_x = start_gather(x)", "gathering, all_x = start_gather(x); gathering.wait()",
     check_order, "another order"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "sequence_parallel")
GPU_MUTANTS = [
    ("        gathering.wait()\n", "", check_gpu, "what a collective still"),
    ("        reducing.wait()\n", "", check_gpu, "what a collective still"),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "sequence_parallel")
