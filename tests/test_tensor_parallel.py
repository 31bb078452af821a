"""What is special to tensor_parallel.py: products, loss and model beside whole ones, and backward's order."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.checks import check_parity
from tests.gpu import check_gpu
from tests.harness import TINY, Lesson, apart, error_of, holds, load, mutants, on_ranks

WITH = "--vocab 264"
LEARN = "torchrun LESSON --lr 10 --steps 2"
NAIVE = "--naive"
LESSON = Lesson(
    flags="--vocab 264 --batch 9",
    variants=("--naive",),
    bad=("--heads 9", "--vocab 257"),
    races=("",),
)


def own(x, dim):
    """This rank's 1/N of a tensor along a dim, as a leaf."""
    return x.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone().requires_grad_()


@on_ranks(3)
def check_products(name):
    """Output and gradients of an MLP of odd sizes, whose input is also used beside it."""
    lesson, size = load(name), dist.get_world_size()
    torch.manual_seed(0)
    x, up, down = torch.randn(2, 5, 7), torch.randn(3 * size, 7), torch.randn(11, 3 * size)
    x, up, down = (each.double().requires_grad_() for each in (x, up, down))
    expected = x.sum() + F.linear(F.gelu(F.linear(x, up)), down)
    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    for what, product in ("naive", lesson.naive_column_parallel), ("overlapped", lesson.ColumnParallel.apply):
        own_x, own_up, own_down = x.detach().clone().requires_grad_(), own(up, 0), own(down, 1)
        output = own_x.sum() + lesson.add_up(F.linear(F.gelu(product(own_x, own_up)), own_down))
        (output * direction).sum().backward()
        assert apart(output.detach(), expected.detach()) < 1e-12, f"{what}: not the output"
        assert apart(own_x.grad, x.grad) < 1e-12, f"{what}: not the gradient of x"
        assert apart(own_up.grad, own(up.grad, 0).detach()) < 1e-12, f"{what}: not the gradient of up"
        assert apart(own_down.grad, own(down.grad, 1).detach()) < 1e-12, f"{what}: not the gradient of down"


@on_ranks(3)
def check_loss(name):
    """Loss and gradients are F.cross_entropy's, also where some logits are -inf, or all of a rank's."""
    lesson, size = load(name), dist.get_world_size()
    torch.manual_seed(0)
    targets = torch.randint(13 * size, (2, 5))
    edges = torch.arange(13 * size).view(size, 13)[:, [0, -1]]  # of all parts
    targets.view(-1)[: 2 * size] = edges.flatten()
    is_target = F.one_hot(targets, 13 * size).bool()
    plain = 9 * torch.randn(2, 5, 13 * size, dtype=torch.float64)
    banned = plain.masked_fill((torch.rand_like(plain) < 0.4) & ~is_target, -torch.inf)
    whole_parts = plain.unflatten(-1, (size, 13)).clone()
    whole_parts[~is_target.unflatten(-1, (size, 13)).any(-1)] = -torch.inf  # all but the targets' ranks'
    for what, logits in ("plain", plain), ("banned", banned), ("whole parts", whole_parts.flatten(-2)):
        logits = logits.clone().requires_grad_()
        own_logits = own(logits, -1)
        expected = lesson.mean_loss(logits, targets)
        expected.backward()
        loss = lesson.parallel_loss(own_logits, targets)
        loss.backward()
        assert apart([loss.item()], [expected.item()]) < 1e-12, f"{what}: not the loss"
        assert apart(own_logits.grad, own(logits.grad, -1).detach()) < 1e-12, f"{what}: not the gradient"
    loss = lesson.parallel_loss(own(plain.masked_fill(is_target, -torch.inf), -1), targets)
    assert loss == torch.inf, "a loss of banned targets is not infinite"
    loss = lesson.parallel_loss(own((1000 * plain).bfloat16(), -1), targets)
    assert loss.dtype == torch.float32, "a loss of bf16 logits is not fp32"
    exact = lesson.mean_loss((1000 * plain).bfloat16(), targets)
    assert abs(loss / exact - 1) < 1e-5, "the loss overflows"


def called(block, x):
    return block(x)


HOWS = called, partial(checkpoint, use_reentrant=False), partial(checkpoint, use_reentrant=True)


@on_ranks(3)
def check_model(name, flags=""):
    """Logits and gradients are GPT's: between evaluations, and with a checkpoint around each block."""
    lesson, rank = load(name), dist.get_rank()
    config = lesson.parse(f"{TINY} --vocab 264 --dtype fp64 {flags}".split())
    plain, model = lesson.GPT(config), lesson.ParallelGPT(config)
    inputs, targets = torch.randint(264, (2, 2, 12), generator=torch.Generator().manual_seed(0))
    expected = lesson.mean_loss(plain(inputs), targets)
    expected.backward()
    for how in HOWS:
        x = model.embed(inputs)
        for block in model.blocks:
            x = how(block, x)
        lesson.parallel_loss(model.head(x), targets).backward()
        with torch.no_grad():
            said = error_of(lambda: model(inputs))
            assert said == "nothing", f"no evaluation: {said}"
            assert apart(model(inputs), own(plain(inputs), -1).detach()) < 1e-12, "not the logits"
            assert apart([lesson.parallel_loss(model(inputs), targets)], [expected]) < 1e-12, "not the loss"
        mine, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
        assert mine.keys() == theirs.keys()
        for key, param in mine.items():
            split, grad = lesson.split_of(key), theirs[key].grad
            if not split and hasattr(lesson, "SumScatter"):  # of a rank's own tokens
                dist.all_reduce(param.grad)
            same = lesson.own_part(grad, *split) if split else grad
            assert apart(param.grad, same) < 1e-12, f"not the gradient of {key}"
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, param.grad.tolist())
            assert split or everyone[rank] == everyone[0], f"ranks have different gradients of {key}"
            param.grad = None
    rows = torch.arange(264).view(dist.get_world_size(), -1)
    model.tokens.weight.data[0] = torch.inf  # of the first token of each part, which is not looked up
    assert model.embed(rows[:, 1:13]).isfinite().all(), "another token's row leaks"


@on_ranks(3)
def check_parts(name):
    """A rank has q, k and v of its heads; all parts together are the whole."""
    lesson, rank, size = load(name), dist.get_rank(), dist.get_world_size()
    qkv = torch.arange(3.0 * size * 2 * 5).view(3, size, 2, 5)  # two rows for each rank
    part = lesson.own_part(qkv.view(-1, 5), 0, 3)
    assert torch.equal(part, qkv[:, rank].flatten(0, 1)), "another part"
    assert torch.equal(lesson.whole_of(part, 0, 3), qkv.view(-1, 5)), "not the whole"
    proj = torch.arange(7.0 * size * 2).view(7, -1)
    part = lesson.own_part(proj, 1, 1)
    assert torch.equal(part, proj[:, 2 * rank :][:, :2]) and part.is_contiguous(), "another part"
    assert torch.equal(lesson.whole_of(part, 1, 1), proj), "not the whole"


@on_ranks(2)
def check_order(name):
    """The gradient of x is sent before that of the weight is computed, and awaited after it."""
    lesson, log = load(name), []
    y = lesson.ColumnParallel.apply(torch.randn(2, 4, 8, requires_grad=True), torch.randn(3, 8))
    all_reduce, matmul = dist.all_reduce, torch.Tensor.__matmul__

    def recorded(x, async_op=False):
        log.append("start sum")
        work = all_reduce(x, async_op=True)
        waited = mock.Mock(wait=lambda: (log.append("end sum"), work.wait()))
        return waited if async_op else waited.wait()

    noted = lambda *two: (log.append("matmul"), matmul(*two))[1]  # noqa: E731
    with (
        mock.patch.object(dist, "all_reduce", recorded),
        mock.patch.object(torch.Tensor, "__matmul__", noted),
    ):
        y.sum().backward()
    assert ", ".join(log) == "matmul, start sum, matmul, end sum", f"another order: {log}"


@pytest.mark.parametrize("t", [1, 2, 8])
def test_a_layer_keeps_and_sends_what_the_papers_say(t):
    # 2205.05198, table 2, in 16 bits, less dropout's masks, and scores, which are never stored here; plus the
    # 4 statistics of norms. 1909.08053: 8bsh(t-1)/t elements are sent.
    ledger, lesson = load("tools/ledger"), load("tensor_parallel")
    expected = {"all-reduce": 2 * 3 * 8 * (t - 1) / t, "activations": 10 + 24 / t - 2}
    letters = {"b": 4, "s": 1024, "h": 4096, "v": 51200, "a": 0, "w": 2, "k": 3, "N": t}
    formulas = ledger.read_formulas(lesson, lesson.parse([]))
    for what, times in expected.items():
        one, two = (ledger.evaluate(formulas[what], letters | {"L": layers}) for layers in (1, 2))
        statistics = 4 * 1024 * 16 * (what == "activations")
        assert two - one - statistics == 4 * 1024 * 4096 * times, f"other {what}"


PROMISES = check_products, check_loss, check_parts, check_model, partial(check_model, flags="--naive")
CHECKS = [partial(check, size=size) for check in PROMISES for size in (1, 2, 3, 4)]
test_each_promise_is_kept = holds("tensor_parallel", *CHECKS, check_order)
naive_model = partial(check_model, flags="--naive")
FOUND = "logits[torch.arange(len(logits), device=logits.device), index]"
MUTANTS = [
    ("dist.all_reduce(x.detach())", "pass", check_products, "naive: not the output"),
    ("    x = x.view_as(x)", "    pass", check_products, "naive: not the gradient of x"),
    ("x.register_hook(add_up)", "pass", check_products, "naive: not the gradient of x"),
    ("    if x.requires_grad:", "    if True:", naive_model, "no evaluation: RuntimeError"),
    ("work = dist.all_reduce(grad_x, async_op=True)", "work = dist.barrier(async_op=True)", check_products,
     "overlapped: not the gradient of x"),
    ("dist.all_reduce(grad_x, async_op=True)", "dist.all_reduce(grad_x, async_op=True); work.wait()",
     check_order, "another order"),
    (f"torch.where(is_here, {FOUND}, 0)", f"{FOUND} * is_here", check_loss, "banned: not the loss"),
    (f"torch.where(is_here, {FOUND}, 0)", FOUND, check_loss, "plain: not the loss"),
    ("    dist.all_reduce(largest, dist.ReduceOp.MAX)\n", "", check_loss, "plain: not the loss"),
    ("logits - largest[:, None]", "logits", check_loss, "the loss overflows"),
    ("logits.detach().amax(-1)", "logits.amax(-1)", check_loss, "plain: not the gradient"),
    ("logits.to(wide(logits.dtype)).flatten", "logits.flatten", check_loss, "is not fp32"),
    ("(index >= 0)", "(index > 0)", check_loss, "not the loss"),
    ("(index < size)", "(index < size - 1)", check_loss, "not the loss"),
    ("torch.where(is_here[..., None], self.tokens(row), 0)", "self.tokens(row) * is_here[..., None]",
     check_model, "another token's row leaks"),
    ('"qkv.weight": (0, 3)', '"qkv.weight": (0, 1)', check_parity, "losses differ"),
    ("in whole.chunk(stacked, dim)", "in whole.chunk(1, dim)", check_parts, "another part"),
    ("for i in range(stacked) for each in parts", "for each in parts for i in range(stacked)", check_parts,
     "not the whole"),
    ("self.heads //= dist.get_world_size()", "pass", check_model, "not the logits"),
    ("self.proj.weight)) + self.proj.bias", "self.proj.weight, self.proj.bias))", check_model,
     "not the logits"),
    ("squares + add_up(squared_norm([param.grad for param in split]))",
     "add_up(squares + squared_norm([param.grad for param in split]))", check_parity, "differ"),
    ("add_up(squared_norm([param.grad for param in split]))", "squared_norm([param.grad for param in split])",
     check_parity, "differ"),
    ("/ config.accum\n", "\n", check_parity, "differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "tensor_parallel")
GPU_MUTANTS = [
    ("all_reduce(grad_x,", "all_reduce(grad_x.cpu(),", check_gpu, "of the host"),
    ("        work.wait()\n", "", check_gpu, "uses what a collective still"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "tensor_parallel")
