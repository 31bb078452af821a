"""What is special to fusion.py: attention in tiles, the loss in chunks, and what they hold and compute."""

import warnings
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from tests.checks import check_ledger, check_parity
from tests.gpu import check_gpu
from tests.harness import Lesson, holds, load, mutants

NAIVE = "--naive"
LEARN = "torchrun LESSON --context 150 --batch 4 --tile 20 --chunks 5; torchrun LESSON --dtype bf16"
RACE = "2 --layers 2 --context 1024 --batch 2"
LESSON = Lesson(
    flags="--context 40",
    variants=("--naive", "--tile 5 --chunks 7"),
    own={"--tile": ("1 5 16 100", "0 -1 x"), "--chunks": ("1 3 1000", "0 -1 x")},
    races=("",),
    gpu=("--naive",),
)
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def qkv(s, dtype=torch.float64, scale=3):
    """Like a block's: views of one tensor, so not contiguous. Scores grow along a row."""
    torch.manual_seed(0)
    whole = scale * torch.randn(2, s, 3, 3, 8, dtype=torch.float64)
    whole[:, :, 1] *= torch.linspace(0.1, 3, s)[None, :, None, None]
    return [each.transpose(1, 2).requires_grad_() for each in whole.to(dtype).unbind(2)]


def plainly(q, k, v):
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf).softmax(-1) @ v


def check_attention(name):
    """Tokens less than a tile, a tile, a last tile that is smaller; scores of thousands; any gradient."""
    lesson = load(name)
    for s, scale in ((1, 3), (4, 3), (5, 3), (6, 3), (23, 3), (23, 30)):
        q, k, v = qkv(s, scale=scale)
        expected, out = plainly(q, k, v), lesson.FlashAttention.apply(q, k, v, 5)
        close(lesson.naive_attention(q, k, v), expected, msg="another naive output")
        close(out, expected, msg="another output")
        for grad in torch.randn_like(out), torch.ones((), dtype=out.dtype).expand_as(out):
            of = partial(torch.autograd.grad, inputs=(q, k, v), grad_outputs=grad, retain_graph=True)
            for letter, own, other in zip("qkv", of(out), of(expected)):
                close(own, other, msg=f"another gradient of {letter}")


def check_16_bits(name):
    """Sums are in fp32: many tiles are about as exact as all scores at once."""
    lesson = load(name)
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = qkv(128, dtype, scale=1)
        expected = plainly(*(each.double() for each in (q, k, v)))
        grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
        errors = []
        for out in lesson.naive_attention(q, k, v), lesson.FlashAttention.apply(q, k, v, 4):
            own = [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
            errors.append([(x.double() - y.double()).norm() for x, y in zip(own, [expected, *grads])])
        for what, naive, tiled in zip(("output", "q", "k", "v"), *errors):
            assert tiled < 1.5 * naive, f"{dtype}, {what}: an error of {tiled:.2g}, all at once {naive:.2g}"


def check_in_graphs(name):
    """In torch's checkpoints, and compiled without a break, a block has the same output and gradients."""
    lesson = load(name)
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while it compiles
    torch.manual_seed(0)
    block = lesson.TiledBlock(lesson.parse("--width 24 --heads 3 --tile 5".split())).double()
    x = torch.randn(2, 13, 24, dtype=torch.float64, requires_grad=True)
    ways = {"alone": block, "compiled": torch.compile(block, backend="eager", fullgraph=True)}
    ways |= {f"reentrant {way}": partial(checkpoint, block, use_reentrant=way) for way in (True, False)}
    expected = None
    for way, call in ways.items():
        block.zero_grad()
        x.grad = None
        call(x).square().sum().backward()
        own = [x.grad, *(param.grad for param in block.parameters())]
        expected = expected or own
        for one, other in zip(own, expected):
            close(one, other, msg=f"{way}: another gradient")


def watched(call, *args):
    """((the most bytes that a call had made and held, its largest tensor's), FLOPs, what it returns)."""
    with load("tools/watch").Watch() as watch:
        before = len(watch.events)
        result = call(*args)
    start = sum(size for _, size in watch.events[:before])
    largest = max(size for _, size in watch.events[before:])
    return (watch.held()["all"] - start, largest), watch.flops, result


def check_attention_costs(name):
    """Tiles take as much for 256 tokens as for 128: what grows is one row. FLOPs are 4ssh, 3.5 times that
    with backward (2307.08691, section 4.1), of which tiles with later keys only are skipped."""
    lesson, bytes_of_tiles = load(name), []
    for n in (4, 8):  # tiles
        s, row = 32 * n, 8 * 2 * 3 * 32 * n  # bytes of a number for each query
        q, k, v = qkv(s)
        (peak, _), flops, out = watched(lesson.FlashAttention.apply, q, k, v, 32)
        bytes_of_tiles.append(peak - row * (8 + 1))
        all_flops = 2 * 4 * s * s * 24
        assert flops == all_flops * (n + 1) / (2 * n), f"{flops} FLOPs of {all_flops}"
        _, flops, _ = watched(out.sum().backward)
        assert flops == 2.5 * all_flops * (n + 1) / (2 * n), f"backward: {flops} FLOPs of {all_flops}"
    assert bytes_of_tiles[0] == bytes_of_tiles[1] < 8 * 6 * 6 * 32**2, f"tiles take {bytes_of_tiles} bytes"


def check_loss_costs(name):
    """The largest tensor has tokens x v / C numbers, not tokens x v, and nothing is computed twice."""
    lesson, flops = load(name), []
    config = lesson.parse("--layers 1 --context 48 --vocab 5000 --chunks 4".split())
    model = lesson.GPT(config, lesson.TiledBlock)
    tokens = torch.randint(5000, (8, 48))
    for backward, own, n in (lesson.naive_backward, (), 1), (lesson.chunked_backward, (4,), 4):
        (_, largest), own_flops, _ = watched(backward, model, tokens, tokens, 1, *own)
        assert largest == 4 * 8 * 48 * 5000 / n, f"in {n} chunks the largest tensor has {largest} bytes"
        flops.append(own_flops)
    assert flops[0] == flops[1], f"{flops[1]} FLOPs, all at once {flops[0]}"


CHECKS = check_attention, check_16_bits, check_in_graphs, check_attention_costs, check_loss_costs
test_each_promise_is_kept = holds("fusion", *CHECKS)
naive = partial(check_parity, own_flags="--naive")
alone = partial(check_ledger, size=1)
MUTANTS = [
    (".triu(1)", ".triu(2)", check_attention, "another naive output"),
    ("weighted * correction + exps", "weighted + exps", check_attention, "another output"),
    ("exp_sum * correction + exps", "exp_sum + exps", check_attention, "another output"),
    ("torch.maximum(largest, scores.amax(-1, keepdim=True))", "scores.amax(-1, keepdim=True)",
     check_attention, "another output"),
    ("scores = scores_of(q_i, k_j, i == j)", "scores = scores_of(q_i, k_j, True)", check_attention,
     "another output"),
    ("lse_i.copy_(largest + exp_sum.log())", "lse_i.copy_(exp_sum.log())", check_attention,
     "another gradient"),
    ("(grad_i @ v_j.mT - delta_i)", "(grad_i @ v_j.mT)", check_attention, "another gradient of q"),
    ("grad_k_j += grad", "grad_k_j[:] = grad", check_attention, "another gradient of k"),
    ("dtype=wide(q.dtype))", "dtype=q.dtype)", check_16_bits, "an error of"),
    ("torch.zeros_like(q, dtype=lse.dtype)", "torch.zeros_like(q)", check_16_bits, "an error of"),
    ("(k_j, v_j) in enumerate(columns[: i + 1])", "(k_j, v_j) in enumerate(columns)", check_attention,
     "another output"),
    ("grad_v_j) in enumerate(columns[: i + 1])", "grad_v_j) in enumerate(columns)", check_attention,
     "another gradient of q"),
    ("torch.empty_like(q)", "q.new_empty(q.shape)", alone, "activations: +"),
    ("ctx.tile = tile", "ctx.tile, ctx.exps = tile, exps", check_ledger, "activations: +"),
    ("each.chunk(n_chunks)", "each.chunk(1)", check_loss_costs, "in 4 chunks the largest tensor"),
    ("/ (len(x) * divisor)", "/ len(x)", check_parity, "losses differ"),
    ("/ (len(x) * divisor)", "* n_chunks / (len(x) * divisor)", check_parity, "losses differ"),
    ("mean_loss(model(inputs), targets) / divisor", "mean_loss(model(inputs), targets)", naive,
     "losses differ"),
    ("    x.backward(grad_x)\n", "    x.backward(grad_x / n_chunks)\n", check_parity, "differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "fusion")
GPU_MUTANTS = [
    ("total_loss += loss.detach()", "total_loss += loss.detach().cpu().to(x.device)", check_gpu,
     "the host waits"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "fusion")
