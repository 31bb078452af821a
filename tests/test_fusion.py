"""What is special to fusion.py."""

import math
from functools import partial

import pytest
import torch

from tests.checks import check_parity, optimizers_made
from tests.gpu import check_gpu
from tests.harness import TINY, Lesson, error_of, holds, load, mutants, world

LEARN = "torchrun LESSON --context 300 --batch 8"
LESSON = Lesson(
    worlds=(1, 2),
    flags="--context 48",
    own={"--plain": ("attention loss optimizer", "all")},
    races=("",),
    gpu=("--plain attention loss optimizer",),
)


SIZES = (1, 5, 127, 128, 129, 300)  # tokens: less than a tile, a whole one, a partial last one
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def numbers(*shape, scale=1.0):
    return (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()


def check_softmax(name):
    lesson = load(name)
    for size in SIZES:
        x = numbers(3, size, scale=300).detach()
        for softmax in lesson.three_pass_softmax, lesson.two_pass_softmax:
            close(softmax(x), x.softmax(-1), msg="another softmax")


def check_attention(name):
    lesson = load(name)
    torch.manual_seed(0)
    for size in SIZES:
        q, k, v = (numbers(2, 3, size, 8, scale=2) for _ in range(3))
        grad = torch.randn(2, 3, size, 8, dtype=torch.float64)
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        plain = (q @ k.mT / math.sqrt(8)).masked_fill(later, -math.inf).softmax(-1) @ v
        out = lesson.flash_attention(q, k, v)
        close(out, plain, msg="another output")
        close(lesson.plain_attention(q, k, v), plain, msg="another plain output")
        expected = torch.autograd.grad(plain, (q, k, v), grad)
        for name, one, other in zip("qkv", torch.autograd.grad(out, (q, k, v), grad), expected):
            close(one, other, msg=f"another gradient of {name}")


def check_refused(name):
    """Fewer key heads, no heads, and gradients of gradients."""
    lesson = load(name)
    q = numbers(1, 2, 8, 4)
    assert "must have one shape" in error_of(lambda: lesson.flash_attention(q, q[:, :1], q[:, :1])), "shapes"
    assert "must have one shape" in error_of(partial(lesson.flash_attention, q[0], q[0], q[0])), "no heads"
    losses = {"attention": lesson.flash_attention(q, q, q).sum()}
    losses["loss"] = lesson.linear_cross_entropy(q[0, 0], q[0, 1], torch.zeros(8, dtype=torch.long))
    for part, loss in losses.items():
        said = error_of(partial(torch.autograd.grad, loss, q, create_graph=True))
        assert "no gradients of gradients" in said, f"gradients of gradients of {part}"
    ignored = torch.tensor([-100] + [0] * 7)
    assert "out of bounds" in error_of(lambda: lesson.linear_cross_entropy(q[0, 0], q[0, 1], ignored)), "-100"


def check_loss(name):
    lesson = load(name)
    lesson.CHUNK = 64
    for size in (1, 64, 150):
        x, weight, targets = numbers(size, 16), numbers(77, 16, scale=60), torch.randint(77, (size,))
        expected = torch.nn.functional.cross_entropy(x @ weight.T, targets)
        loss = lesson.linear_cross_entropy(x, weight, targets)
        close(loss, expected, msg="another loss")
        grads = torch.autograd.grad(3 * loss, (x, weight))
        for one, other in zip(grads, torch.autograd.grad(3 * expected, (x, weight))):
            close(one, other, msg="another gradient")


def peak_of(call, *args):
    """(the most bytes alive at once of what a call made, what it returns)."""
    with load("tools/watch").Watch() as watch:
        before = sum(size for _, size in watch.events)
        result = call(*args)
    return watch.held()["all"] - before, result


def check_memory(name):
    """Attention's tiles take as much for 2048 tokens as for 1024; logits are those of 1024 of 4096 tokens."""
    lesson = load(name)
    tiles = []
    for s in 1024, 2048:
        q, k, v = (torch.randn(1, 1, s, 64, requires_grad=True) for _ in range(3))
        peak, out = peak_of(lesson.flash_attention, q, k, v)
        tiles.append(peak - 4 * (64 * s + s))
    assert tiles[0] == tiles[1] < 4 * 6 * 128**2, f"attention's tiles take {tiles}"
    peak, _ = peak_of(lambda: out.sum().backward())
    assert peak == 4 * (4 * 64 * s + s) + 8, f"attention's gradients take {peak}"
    x, weight, targets = torch.randn(4096, 16), torch.randn(4999, 16), torch.randint(4999, (4096,))
    peak, _ = peak_of(lesson.linear_cross_entropy, x, weight, targets)
    formula = 4 * (1024 * 4999 + 4096 * 16 + 2 * 4999 * 16 + 2 * 1024 + 1)
    assert peak == formula, f"the loss takes {peak}, not {formula}"


@pytest.mark.parametrize("part", ["attention", "loss", "optimizer", "attention loss optimizer"])
def test_so_is_training_with_any_part_plain(part):
    check_parity("fusion", 2, "--accum 3", f"--plain {part}")
    made, _ = world(2).run(optimizers_made, "fusion", f"{TINY} --plain {part}")
    kernels = {"foreach": False} if "optimizer" in part else {"fused": True}
    assert made == [{"lr": 1e-3, **kernels}], "another optimizer"


CHECKS = check_softmax, check_attention, check_loss, check_memory
test_a_fused_part_is_the_plain_one_in_less_memory = holds("fusion", check_refused, *CHECKS)
MUTANTS = [
    ("if not q.shape == k.shape == v.shape or", "if", check_refused, "shapes"),
    (" or q.dim() != 4", "", check_refused, "no heads"),
    ('not torch.is_grad_enabled(), "create_graph=True: att', 'True, "', check_refused, "of attention"),
    ('not torch.is_grad_enabled(), "create_graph=True: the', 'True, "', check_refused, "of loss"),
    ("weighted * correction + exps", "weighted + exps", check_attention, "another output"),
    ("total = total * correction +", "total = total +", check_softmax, "another softmax"),
    (".triu(1)", ".triu(2)", check_attention, "another output"),
    ("(tiles(k, v)[: i + 1])", "(tiles(k, v)[: i or 1])", check_attention, "another output"),
    ("largest + total.log()", "largest + total.log2()", check_attention, "another gradient of q"),
    ("(grad_i @ v_j.mT - delta_i)", "(grad_i @ v_j.mT)", check_attention, "another gradient of q"),
    ("-torch.ones_like(of_target)", "torch.zeros_like(of_target)", check_loss, "another gradient"),
    ("grad_weight * grad, None", "grad_weight, None", check_loss, "another gradient"),
    ("logits -= logits.amax(-1, keepdim=True)\n", "pass\n", check_loss, "another loss"),
    ("CHUNK = 1024", "CHUNK = 4096", check_memory, "the loss takes"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "fusion")
GPU_MUTANTS = [
    ("fusion", "x = model.norm(x)", "x = model.norm(x.cpu())", check_gpu, "of the host"),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
