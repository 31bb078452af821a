"""What is special to context_parallel.py: attention over all ranks' tokens, who computes what, and when."""

from collections import Counter
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from test_all import check_ledger, check_parity
from tests.harness import ROOT, TINY, apart, holds, load, mutants, on_ranks, said
from tests.streams import Streams

LONG = "--context 48 --heads 8 --width 24"  # for 8 ranks too
RING = {"kind": "ring", "order": "zigzag", "heads": (6, 2, 2), "is_causal": True}
WAYS = [("ring", "zigzag"), ("ring", "contiguous"), ("ulysses", "contiguous")]


@on_ranks(3)
def check_attention(name, scale=1, dtype=torch.float64, limit=1e-12, **how):
    """Output and gradients of q, k, v are those on one device."""
    kind, order, heads, is_causal = (RING | how).values()
    lesson, size = load(name), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = [scale * torch.randn(2, number, 12 * size, 5, generator=generator) for number in heads]
    whole = [x.to(dtype).double() for x in whole]
    with pytest.raises(ValueError, match="tokens: must be a multiple of 2 x"):
        lesson.shard_sequence(whole[0][:, :, 1:], 2)
    whole = [x.requires_grad_() for x in whole]
    out = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=is_causal, enable_gqa=True)
    given = torch.randn(out.shape, generator=generator).to(dtype).double()
    expected = [out, *torch.autograd.grad(out, whole, given)]
    own = [lesson.shard_sequence(x.detach().to(dtype), 2, order).requires_grad_() for x in whole]
    run = lesson.ring_attention if kind == "ring" else lesson.ulysses_attention
    if kind == "ulysses":
        with pytest.raises(ValueError, match="needs order='contiguous', here and in shard_sequence"):
            run(*own, is_causal=True)
    elif order == "zigzag":
        with pytest.raises(ValueError, match="zigzag needs an even number"):
            run(*(x[:, :, 1:] for x in own))
    run = partial(run, order=order)
    with pytest.raises(TypeError, match="positional"):
        run(*own, torch.ones(4, 4))  # a mask is not ignored
    if kind == "ulysses" and size > 1:
        with pytest.raises(ValueError, match="1 key heads: must be a multiple of the ranks"):
            lesson.ulysses_attention(*(x[:, :1] for x in own))  # with no mask any order is right
    out = run(*own, is_causal=True) if is_causal else run(*own)  # as torch's function
    grads = torch.autograd.grad(out, own, lesson.shard_sequence(given.to(dtype), 2, order))
    assert all(x.dtype == dtype for x in (out, *grads)), "another dtype"
    expected = [lesson.shard_sequence(x.detach(), 2, order) for x in expected]
    for what, x, y in zip(("output", "dQ", "dK", "dV"), (out, *grads), expected):
        difference = apart(x.detach(), y) / y.abs().max().item()
        assert difference < limit, f"{what} differs by {difference:.1e}"


@pytest.mark.parametrize("kind, order", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_is_that_of_one_device(size, is_causal, kind, order):
    heads = (6, 2, 2) if kind == "ring" else (4 * size, 2 * size, 2 * size)
    check_attention("context_parallel", size=size, kind=kind, order=order, heads=heads, is_causal=is_causal)


@pytest.mark.parametrize("kind, order", WAYS)
@pytest.mark.parametrize("size, cp", [(1, 1), (2, 2), (4, 4), (8, 8), (4, 2), (4, 1)])
def test_training_is_single_pys_and_bytes_are_the_formulas(size, cp, kind, order):
    own = f"--cp {cp} --kind {kind} --order {order}"
    check_parity("context_parallel", size, f"--accum 1 {LONG} --batch 4 --steps 2", own)
    if size == cp:
        check_ledger("context_parallel", size, f"--accum 3 {LONG} {own}")


def check_rounding(name):
    """Exponentials of large scores do not overflow; bf16 is summed in fp32. Measured: a fifth and a third
    of these limits, for seeds 0 to 19."""
    rounding = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16)}
    largest = 3400  # score, so its error is 3400 roundings, and so is the relative error of its exponential
    check_attention(name, 20, torch.float32, limit=8 * largest * rounding[torch.float32], size=4)
    check_attention(name, 1, torch.bfloat16, limit=8 * rounding[torch.bfloat16], size=8)


def work_of(name, size, order):
    """Products of queries and keys, of a chunk with a chunk 1: [each rank's] for each step of a ring."""
    lesson, x = load(name), torch.zeros(2)
    steps = [[0] * size for _ in range(size)]
    for i, rank in product(range(size), repeat=2):
        with mock.patch.object(dist, "get_rank", lambda *_, rank=rank: rank):
            if seen := lesson.visible(i, 2, None, order, True):
                steps[i][rank] = len(x[seen[0]]) * len(x[seen[1]]) / (2 if i == 0 else 1)
    return steps


def check_balance(name):
    for size in (2, 4, 8):
        zigzag, contiguous = (work_of(name, size, order) for order in ("zigzag", "contiguous"))
        assert all(len(set(work)) == 1 for work in zigzag), "ranks have different work"
        for steps in (zigzag, contiguous):
            assert sum(map(sum, steps)) == 2 * size**2, "not half of all products"
        slowest = [sum(map(max, steps)) for steps in (contiguous, zigzag)]
        assert slowest[0] / slowest[1] == (2 * size - 1) / size, "not the efficiency P / (2P - 1)"


@on_ranks(3)
def check_overlap(name):
    """A block of keys comes while another is computed with, and so do its gradients."""
    lesson, log = load(name), []
    send, attend, attend_backward = lesson.send_to_next, lesson.attend, lesson.attend_backward

    def send_to_next(tensor, group):
        log.append("send")
        received, works = send(tensor, group)
        return received, [mock.Mock(wait=lambda: log.append("wait") or [work.wait() for work in works])]

    lesson.send_to_next = send_to_next
    lesson.attend = lambda *args: log.append("block") or attend(*args)
    lesson.attend_backward = lambda *args: log.append("block") or attend_backward(*args)
    q = torch.ones(1, 1, 4, 2, requires_grad=True)
    out = lesson.ring_attention(q, q, q)
    log.append("|")
    out.sum().backward()
    expected = "send block wait send block wait block | "
    expected += "send block send wait send block wait send wait block wait send wait"  # k and v, gradients
    assert " ".join(log) == expected, f"another order: {log}"


class Kernels(Streams):
    """Counts calls of attention's kernels, and holds what CUDA's ask for but meta tensors do not show."""

    def on_gpu(self, function, args, kwargs):
        name = function._schema.name.removeprefix("aten::_scaled_dot_product_")
        if "attention" in name:
            given = dict(zip((argument.name for argument in function._schema.arguments), args)) | kwargs
            self.calls[name, given.get("is_causal", False)] += 1
            q, k, lse = given["query"], given["key"], given.get("logsumexp")
            length, width = q.shape[2:]
            assert q.stride(3) == k.stride(3) == 1 and width % 8 == 0 and q.shape[1] == k.shape[1]
            assert length == k.shape[2] or not given.get("is_causal"), "a causal mask that is not square"
            if lse is not None:
                assert lse.is_contiguous() and lse.dtype == torch.float32, "a log-sum-exp of another form"
                assert given["out"].dtype == given.get("grad_out", given.get("grad_out_")).dtype == q.dtype
                asked = -(-length // 32) * 32 if "efficient" in name else length
                assert lse.shape[2] == asked, f"a log-sum-exp of {lse.shape[2]} rows, not {asked}"
        return super().on_gpu(function, args, kwargs)


def check_gpu(name):
    """Blocks go through CUDA's kernels for each dtype; no message is read, or overwritten, too early."""
    kernels = {"fp32": "efficient_attention", "bf16": "flash_attention"}
    for dtype, order, (rank, size) in product(kernels, ("zigzag", "contiguous"), ((0, 1), (1, 2), (1, 4))):
        gpu = Kernels(ROOT / f"{name.removesuffix('.py')}.py", rank, size)
        gpu.calls = Counter()
        gpu.run(f"{TINY} --steps 1 --layers 1 --width 96 --dtype {dtype} --order {order}")
        expected = Counter()
        for kernel in kernels[dtype], f"{kernels[dtype]}_backward":
            expected[kernel, True] = 1
            expected[kernel, False] = size - 1 if order == "zigzag" else rank
        assert gpu.calls == expected, f"other kernels in {dtype}: {gpu.calls}"


@pytest.mark.parametrize("flags", ["--dtype fp64", "--width 36"])
def test_a_ring_that_gpus_cannot_run_is_refused(flags):
    gpu = Streams(ROOT / "context_parallel.py", 0, 2)
    _, (line,), code = said(lambda: gpu.run(f"{TINY} --width 96 {flags}"))
    assert code == 2 and line.startswith(f"context_parallel.py: {flags}: ")


check_ulysses = partial(check_attention, size=2, kind="ulysses", order="contiguous", heads=(8, 4, 4))
check_open = partial(check_attention, is_causal=False)
check_mesh = partial(check_parity, size=4, flags=f"--accum 3 {LONG}", own_flags="--cp 2")
test_each_promise_is_kept = holds("context_parallel", check_rounding, check_balance, check_overlap, check_gpu)
MUTANTS = [
    ("out.lerp_(block.to(out.dtype), block_share)", "out.add_(block)", check_attention, "output differs"),
    ("torch.sigmoid(block_lse - lse)", "1 / (1 + lse.exp() / block_lse.exp())", check_rounding, "differs"),
    ("lse.copy_(torch.logaddexp(lse, block_lse))", "lse.copy_(block_lse)", check_attention, "output differs"),
    ("            grad_kv += received\n", "", check_attention, "dK differs"),
    ("slice(None), slice(half)", "everything", check_balance, "different work"),
    ("return everything if theirs_are_earlier else None", "return everything", check_balance, "half of all"),
    ('.weight"], 0)', '.weight"], 0).flip(0)', check_mesh, "losses differ"),
    ("shard(targets, 1)", "shard(targets, 1).roll(1, 1)", check_mesh, "losses differ"),
    ("received.unbind(), join", "received.unbind()[::-1], join", check_ulysses, "output differs"),
    ("flat_grad /= dist.get_world_size()", "flat_grad /= 2", check_mesh, "differ"),
    ("== 0 or not is_causal:", "== 0:", check_open, "output differs"),
    ("is_causal = ctx.layout", "_ = ctx.layout\n        is_causal = True", check_open, "dQ differs"),
    ("if not q.is_cuda:\n        out", "if True:\n        out", check_gpu, "other kernels"),
    ("q, k, v, None, True, 0.0, is_causal", "q, k, v, None, True, 0.0", check_gpu, "other kernels"),
    ("(0, -q.shape[2] % 32)", "(0, 0)", check_gpu, "rows, not 32"),
    ("lse.squeeze(-1).contiguous()", "lse.squeeze(-1)", check_gpu, "of another form"),
    ("work.wait()\n        kv =", "work\n        kv =", check_gpu, "what a collective still writes"),
    ("dist.get_rank() // config.cp", "dist.get_rank() % config.cp", check_mesh, "losses differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "context_parallel")
