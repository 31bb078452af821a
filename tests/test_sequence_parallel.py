"""What is special to sequence_parallel.py: layers, a whole net, and what its backward starts and awaits."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from tests.gpu import check_gpu
from tests.harness import Lesson, apart, error_of, holds, load, mutants, on_ranks

FILM = "--layers 2"
LESSON = Lesson(
    flags="--vocab 257 --context 12 --batch 9",
    bad=("--heads 9", "--context 15"),
    races=("",),
)


def own(x, dim, parts=1):
    """This rank's 1/N of each of the parts of a tensor along a dim."""
    length, size = x.shape[dim] // parts, dist.get_world_size()
    first, end = (rank * length // size for rank in (dist.get_rank(), dist.get_rank() + 1))
    return torch.cat([part.narrow(dim, first, end - first) for part in x.chunk(parts, dim)], dim)


@on_ranks(3)
def check_layers(name):
    """Outputs and gradients are those of torch's layers."""
    lesson = load(name)
    torch.manual_seed(0)
    model = nn.ModuleDict({"column": nn.Linear(12, 25), "three": nn.Linear(12, 39, bias=False)})
    model.update({"row": nn.Linear(25, 12), "tokens": nn.Embedding(13, 12)})
    plain = copy.deepcopy(model.double())
    plan = {"three": (lesson.column_parallel, 0, 3), "row": (lesson.row_parallel, 1, 1)}
    plan |= {"column": (lesson.column_parallel, 0, 1), "tokens": (lesson.vocab_parallel, 0, 1)}
    parallel = lesson.SequenceParallel(model, plan)
    tokens = torch.randint(13, (2, 12))
    theirs = dict(plain, loss=lambda x: F.cross_entropy(x.transpose(1, 2), tokens, reduction="none"))
    ours = dict(model, loss=lambda x: lesson.parallel_cross_entropy(x, tokens, 13))
    up, down = torch.randn(25, 12).double(), torch.randn(12, 25).double()
    theirs["naive"] = lambda x: F.gelu(x @ up.T) @ down.T
    ours["naive"] = lambda x: lesson.naive_mlp(x, own(up, 0), own(down, 1))
    loss = lesson.parallel_cross_entropy(own(torch.full((2, 12, 13), 100.0).bfloat16(), -1), tokens, 13)
    assert loss.dtype == torch.float32, "a loss of bf16 logits is not fp32"
    assert apart(loss, torch.full_like(loss, 13).log()) < 1e-4, "the loss overflows"
    whole = torch.randn(2, 12, 25, dtype=torch.float64)
    outside = partial(own, dim=1)
    features = partial(own, dim=-1)
    for what, x, enter, leave in (
        ("column", whole[..., :12], outside, features),
        ("three", whole[..., :12], outside, partial(own, dim=-1, parts=3)),
        ("row", whole, features, outside),
        ("tokens", tokens, torch.clone, outside),
        ("loss", whole[..., :13] * 9, features, outside),
        ("naive", whole[..., :12], outside, outside),
    ):
        given, own_given = (each.clone().requires_grad_(what != "tokens") for each in (x, enter(x)))
        expected = theirs[what](given)
        result = ours[what](own_given)
        direction = torch.randn_like(expected)
        (expected * direction).sum().backward()
        (result * leave(direction)).sum().backward()
        assert apart(result.detach(), leave(expected.detach())) < 1e-12, f"{what}: not torch's output"
        if given.requires_grad:
            assert apart(own_given.grad, enter(given.grad)) < 1e-12, f"{what}: not torch's gradient"
    loss_of = partial(lesson.parallel_cross_entropy, own(whole[..., :13], -1), vocab=13)
    for token in (-100, -1, 13):
        odd = torch.where(tokens == tokens[0, 0], token, tokens)  # in some places only
        for call in (model["tokens"], loss_of):
            failed = error_of(partial(call, odd))
            assert "is not in the vocabulary" in failed, f"token {token} of 13: {failed}"
    parallel.sum_replicated()
    for param in (*model.parameters(), *plain.parameters()):
        param.data = param.grad
    assert apart(parallel.full_state_dict(), plain.state_dict()) < 1e-12, "not torch's gradients"


class Net(nn.ModuleDict):
    """A tied head, a layer without a bias, frozen parameters."""

    def __init__(self):
        super().__init__({"tokens": nn.Embedding(13, 8), "norm": nn.LayerNorm(8), "up": nn.Linear(8, 23)})
        self.update({"gate": nn.Linear(8, 23, bias=False), "down": nn.Linear(23, 8)})
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.tokens.weight
        self.gate.weight.requires_grad_(False)
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        y = self.norm(x)
        return self.head(x + self.down(F.gelu(self.up(y)) * self.gate(y)))


def plan_of(lesson, columns):
    plan = {"tokens": (lesson.vocab_parallel, 0, 1), "down": (lesson.row_parallel, 1, 1)}
    return plan | dict.fromkeys(columns, (lesson.column_parallel, 0, 1))


@on_ranks(3)
def check_net(name):
    """A split Net is the plain one after three steps, and ranks have the same of what all have."""
    lesson = load(name)
    torch.manual_seed(0)
    plain = Net().double()
    model = copy.deepcopy(plain)
    for param in model.parameters():
        param.data += dist.get_rank()  # all ranks must start with rank 0's
    parallel = lesson.SequenceParallel(model, plan_of(lesson, ["up", "g*", "head"]))
    optimizer = torch.optim.AdamW([*plain.parameters(), *model.parameters()], lr=0.1)
    for batch in torch.randint(13, (3, 4, 13)):
        F.cross_entropy(plain(batch[:, :-1]).transpose(1, 2), batch[:, 1:]).backward()
        losses = lesson.parallel_cross_entropy(model(batch[:, :-1]), batch[:, 1:], 13)
        (losses.sum() / batch[:, 1:].numel()).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        parallel.sum_replicated()
        assert apart([parallel.clip_grad_norm_(0.3)], [norm]) < 1e-12, "norms differ"
        optimizer.step()
        optimizer.zero_grad()
    assert model.head.weight is model.tokens.weight, "untied"
    assert apart(parallel.full_state_dict(), plain.state_dict()) < 1e-12, "weights differ"
    weights = [None] * dist.get_world_size()
    dist.all_gather_object(weights, model.norm.weight.tolist())
    assert all(weight == weights[0] for weight in weights), "ranks differ in what all of them have"


ORDER = "start gather, matmul, start scatter, end gather, matmul, end scatter"


@on_ranks(2)
def check_order(name):
    """What starts, is computed and is waited for in the backward of a column-parallel layer."""
    lesson = load(name)
    model = nn.Sequential(nn.Linear(8, 8))
    lesson.SequenceParallel(model, {"0": (lesson.column_parallel, 0, 1)})
    y = model(torch.randn(2, 4, 8, requires_grad=True))
    log = []

    def recorded(name, collective):
        def call(*args, async_op=False):
            log.append(f"start {name}")
            work = collective(*args, async_op=True)
            return mock.Mock(wait=lambda: (log.append(f"end {name}"), work.wait()))

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
    # 2205.05198, table 2, in 16 bits, less dropout's masks, and less scores, which are never stored here.
    # Beside tensor parallelism's 8bsh(t-1)/t elements (1909.08053), two inputs are gathered once more.
    ledger, lesson = load("tools/ledger"), load("sequence_parallel")
    expected = {
        "reduce-scatter": 24 * (t - 1) / t,
        "all-gather": 36 * (t - 1) / t,
        "activations": (34 - 2) / t,
    }
    letters = {"b": 4, "s": 1024, "h": 4096, "v": 51200, "a": 0, "w": 2, "m": 0, "k": 3, "N": t}
    formulas = ledger.read_formulas(lesson, lesson.parse([]))
    for what, times in expected.items():
        one, two = (ledger.evaluate(formulas[what], letters | {"L": layers}) for layers in (1, 2))
        assert two - one == 4 * 1024 * 4096 * times, f"other {what}"


CHECKS = [partial(check, size=size) for check in (check_layers, check_net) for size in (1, 2, 3, 4)]
test_each_promise_is_kept = holds("sequence_parallel", *CHECKS, check_order)
MUTANTS = [
    ("F.linear(x, linear.weight)", "F.linear(x, linear.weight, linear.bias)", check_layers, "row: not"),
    ("own_logit * is_here", "own_logit", check_layers, "the loss overflows"),
    ("(indices >= first)", "(indices > first)", check_layers, "the loss overflows"),
    ("found * is_here", "found * ~is_here", check_layers, "tokens: not torch's output"),
    ("(indices >= 0) & (indices < vocab)", "indices < vocab", check_layers, "token -100 of 13: nothing"),
    ("(indices >= 0) & (indices < vocab)", "indices >= 0", check_layers, "token 13 of 13: nothing"),
    ("dist.all_reduce(largest, dist.ReduceOp.MAX)", "largest.zero_()", check_layers, "the loss overflows"),
    (".to(torch.promote_types(logits.dtype, torch.float32))", "", check_layers, "is not fp32"),
    ("dist.broadcast(tensor.detach(), 0)", "pass", check_net, "norms differ"),
    ("rank, world_size = dist.get_rank(),", "rank, world_size = 0,", check_net, "norms differ"),
    ("or dist.get_rank() == 0:", "or True:", check_net, "norms differ"),
    ("dist.all_reduce(squares)", "pass", check_net, "norms differ"),
    ("start_reduce_scatter(grad)()", "grad.chunk(dist.get_world_size(), 1)[0]",
     check_layers, "naive: not torch's gradient"),
    ("dist.all_reduce(param.grad)", "pass", check_net, "norms differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "sequence_parallel")
GPU_MUTANTS = [
    ("sequence_parallel", "= x.new_empty(n_ranks", "= torch.empty(n_ranks", check_gpu, "of the host"),
    ("sequence_parallel", "x.new_empty(parts[0].shape)", "torch.empty_like(x)", check_gpu, "numbers"),
    (
        "sequence_parallel",
        "work.wait()\n        return torch.cat",
        "return torch.cat",
        check_gpu,
        "uses what a collective still",
    ),
    (
        "sequence_parallel",
        "work.wait()\n        return received",
        "return received",
        check_gpu,
        "uses what a collective still",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
