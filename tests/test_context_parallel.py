"""What is special to context_parallel.py: attention over all ranks' tokens, who computes what, and when."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.checks import check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import TINY, Lesson, apart, holds, load, mutants, on_ranks, train

NAIVE = "--kind gather"
FILM = "--layers 2"
LEARN = "torchrun LESSON --lr 10 --steps 2; torchrun LESSON --kind gather; torchrun LESSON --kind ring"
KINDS = ("zigzag", "ring", "gather", "ulysses")
RACE = "4 --layers 2 --context 1024 --batch 2"
LESSON = Lesson(
    flags="--context 24",
    variants=("--kind ring", "--kind gather", "--kind ulysses"),
    own={"--kind": (" ".join(KINDS), "all")},
    bad=("--context 15", "--heads 9 --kind ulysses"),
    races=("",),
)
ROUNDING = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@on_ranks(3)
def check_attention(name, kind="zigzag", dtype=torch.float64, scale=1, limit=1e-12):
    """Attention's output, and its gradient, are those of the same tokens on one device."""
    lesson, size = load(name), dist.get_world_size()
    flags = f"--context {4 * size} --heads {2 * size} --width {10 * size} --layers 1 --kind {kind}"
    config = lesson.parse(flags.split())
    model, block = lesson.ContextGPT(config), lesson.Block(config)
    torch.manual_seed(0)
    qkv = (scale * torch.randn(2, config.context, 3 * config.width)).to(dtype).double().requires_grad_()
    direction = torch.randn(2, config.context, config.width).to(dtype)
    expected = block.attention(qkv)
    expected.backward(direction.double())
    own = qkv.detach()[:, model.own].to(dtype).requires_grad_()
    out = model.blocks[0].attention(own)
    out.backward(direction[:, model.own])
    for what, x, whole in ("output", out, expected), ("gradient", own.grad, qkv.grad):
        assert x.dtype == dtype, "another dtype"
        difference = apart(x.detach(), whole.detach()[:, model.own]) / whole.abs().max().item()
        assert difference < limit, f"{what} differs by {difference:.1e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_attention_is_that_of_one_device(size, kind):
    check_attention("context_parallel", kind, size=size)


def check_rounding(name):
    """Exponentials of large scores do not overflow; in 16 bits sums are those of fp32."""
    for kind in KINDS[:2]:
        largest = (
            3400  # score, so its error is 3400 roundings, and so is the relative error of its exponential
        )
        check_attention(name, kind, torch.float32, 20, 8 * largest * ROUNDING[torch.float32], size=4)
        for dtype in torch.bfloat16, torch.float16:
            check_attention(name, kind, dtype, 20, 8 * ROUNDING[dtype], size=8)


def shown(lesson, kind, rank, size, length):
    """[which queries see which keys of rank's tokens, of each hop] as visible() says."""
    hops = []
    for hop in range(size):
        sees = torch.zeros(length, length, dtype=torch.bool)
        queries, keys = lesson.visible(kind, rank, (rank - hop) % size, length)
        sees[queries, keys] = True
        hops.append(sees if hop else sees.tril())
    return hops


def check_visible(name):
    """What is computed is what a causal mask shows; in zigzag it is equally much on all ranks."""
    lesson, length = load(name), 4
    for size in (1, 2, 3, 4, 8):
        tokens = torch.arange(size * length).view(2 * size, -1)
        for kind in KINDS[:2]:
            owns = [
                (tokens[[i, -1 - i]] if kind == "zigzag" else tokens[2 * i : 2 * i + 2]) for i in range(size)
            ]
            work = []
            for rank in range(size):
                hops = shown(lesson, kind, rank, size, length)
                for hop, sees in enumerate(hops):
                    keys = owns[(rank - hop) % size].flatten()
                    assert torch.equal(sees, owns[rank].view(-1, 1) >= keys), "not what the mask shows"
                work.append([sees.sum().item() for sees in hops])
            if kind == "zigzag":
                assert all(each == work[0] for each in work), f"ranks have different work: {work}"
            else:
                assert [sum(each[1:]) for each in work] == [i * length**2 for i in range(size)]


@on_ranks(3)
def check_overlap(name):
    """kv come while a rank computes with others, and so do gradients."""
    lesson, log = load(name), []

    def noted(what, function):
        return lambda *args, **options: (log.append(what), function(*args, **options))[1]

    def finish_hop(received, works, finish_hop=lesson.finish_hop):
        log.extend(["wait"] * (len(works) > 0))
        return finish_hop(received, works)

    lesson.start_hop, lesson.finish_hop = noted("send", lesson.start_hop), finish_hop
    lesson.scores_of = noted("scores", lesson.scores_of)
    q = torch.ones(1, 1, 4, 2, requires_grad=True)
    lesson.Ring.apply(q, q, q, "zigzag").sum().backward()
    expected = "send scores wait send scores wait scores "
    expected += "send scores send wait send scores wait send wait scores wait send wait"  # kv, gradients
    assert " ".join(log) == expected, f"another order: {' '.join(log)}"


def check_messages(name, size=4):
    """Keys and values of a layer travel in one message, and so do their gradients."""
    calls = {}
    for kind in KINDS:
        result, _ = train(name, size, f"{TINY} --accum 3 --kind {kind}", watched=True)
        calls |= {
            (kind, part): row["calls"] / 9 for part, row in result["sent"].items() if part != "all-reduce"
        }
    expected = {(kind, "send"): 3 * size - 2 for kind in KINDS[:2]} | {("ulysses", "all-to-all"): 4}
    expected |= {("gather", "all-gather"): 1, ("gather", "reduce-scatter"): 1}
    assert calls == expected, f"other messages: {calls}"


@on_ranks(2)
def check_checkpoints(name):
    """A checkpoint around each block, reentrant or not, changes no gradient; an evaluation sees the same."""
    for kind in KINDS:
        found = []
        for reentrant in None, False, True:
            lesson = load(name)
            config = lesson.parse(f"{TINY} --dtype fp64 --kind {kind}".split())
            model = lesson.ContextGPT(config)
            for block in model.blocks if reentrant is not None else ():
                block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
            tokens = torch.arange(32).view(2, 16)
            logits = model(tokens)
            logits.square().mean().backward()
            with torch.no_grad():
                assert torch.equal(model(tokens), logits), f"{kind}: an evaluation has other logits"
            found.append({key: param.grad for key, param in model.named_parameters()})
        assert all(apart(each, found[0]) < 1e-12 for each in found), f"{kind}: gradients differ"


def test_ulysses_sends_what_the_paper_says():
    # 2309.14509, section 3.2: in a layer's forward 4sh/N elements for large N, 3 for q, k, v and 1 back.
    ledger, lesson = load("tools/ledger"), load("context_parallel")
    formula = ledger.read_formulas(lesson, lesson.parse("--kind ulysses".split()))["all-to-all"]
    letters = {"b": 1, "s": 65536, "h": 4096, "w": 2, "k": 1, "L": 1, "N": 64}
    elements = ledger.evaluate(formula, letters) / letters["w"]  # in forward and backward
    assert elements / 2 == pytest.approx(4 * 65536 * 4096 / 64, rel=1 / 64)


CHECKS = check_rounding, check_visible, check_overlap, check_messages, check_checkpoints
test_each_promise_is_kept = holds("context_parallel", *CHECKS)
ring = partial(check_attention, kind="ring")
gather = partial(check_attention, kind="gather")
ulysses = partial(check_attention, kind="ulysses")
KV_TRAVEL = "else (kv, [])\n            queries, keys = visible(kind"
GRADS_TRAVEL = "else (grad_kv, [])\n"
MUTANTS = [
    ("out.mul_((lse - new_lse).exp())", "out.mul_(0.5)", check_attention, "output differs"),
    ("lse.copy_(new_lse)", "lse.copy_(lse)", check_attention, "output differs"),
    ("torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))",
     "(lse.exp() + scores.exp().sum(-1, keepdim=True)).log()", check_rounding, "output differs"),
    ("q.to(wide(q.dtype))", "q", check_rounding, "differs"),
    ("if is_causal:", "if False:", check_attention, "output differs"),
    ("scores_of(own_q, block_k, is_causal=hop == 0)", "scores_of(own_q, block_k, is_causal=False)",
     check_attention, "gradient differs"),
    (".sub_(own_mean)", "", check_attention, "gradient differs"),
    ("grad_kv = finish_hop(*travelling_grads)", "grad_kv = 0 * finish_hop(*travelling_grads)",
     check_attention, "gradient differs"),
    ("rank else early", "rank else late", check_visible, "not what the mask shows"),
    ("return late, both", "return both, early", check_visible, "not what the mask shows"),
    ("both if other <= rank else slice(0)", "both", check_visible, "not what the mask shows"),
    ("both if other <= rank else slice(0)", "both", ring, "differs"),
    ("chunks[[rank, -1 - rank]] if", "chunks[2 * rank : 2 * rank + 2] if", check_attention, "output differs"),
    (KV_TRAVEL, KV_TRAVEL.replace("[])\n", "[])\n            travelling = finish_hop(*travelling), []\n"),
     check_overlap, "another order"),
    (GRADS_TRAVEL, f"{GRADS_TRAVEL}            travelling_grads = finish_hop(*travelling_grads), []\n",
     check_overlap, "another order"),
    (".tril(dist.get_rank() * q.shape[2])", ".tril()", gather, "output differs"),
    ("reduce_scatter(own, grad.contiguous())", "own.copy_(grad[: len(own)])", gather, "gradient differs"),
    ("        all_gather(whole, own.contiguous())\n", 2 * "        all_gather(whole, own.contiguous())\n",
     check_messages, "other messages"),
    ("received.unbind(), join", "received.unbind()[::-1], join", ulysses, "output differs"),
    ("(3, dist.get_world_size(), -1)), 3, 1)", "(dist.get_world_size(), 3, -1)), 2, 1)", ulysses,
     "output differs"),
    ("Ring.apply(q, k, v, self.kind)", 'Ring.apply(q, k, v, self.kind if q.requires_grad else "ring")',
     check_checkpoints, "an evaluation has other logits"),
    ("positions.weight[self.own]", "positions.weight[: len(self.own)]", check_parity, "losses differ"),
    ("targets[:, model.own]", "targets[:, : len(model.own)]", check_parity, "losses differ"),
    ("(config.accum * world_size)\n", "config.accum\n", check_parity, "losses differ"),
    ("            dist.all_reduce(param.grad)\n", "            pass\n", check_parity, "differ"),
    ("        dist.all_reduce(total_loss)\n", "", check_parity, "losses differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "context_parallel")
GPU_MUTANTS = [
    ("        work.wait()\n", "        pass\n", check_gpu, "what a collective still"),
    ("config.clip, norm)", "config.clip, norm + 0 * norm.item())", check_gpu, "the host waits"),
    ("tensor, (rank + 1) % world_size", "tensor, (rank + 1 - 2 * (rank == 0)) % world_size", check_order,
     "ranks wait for one another"),
    ("        dist.all_reduce(total_loss)", "        rank == 0 and dist.all_reduce(total_loss)", check_order,
     "ranks wait for one another"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "context_parallel")
