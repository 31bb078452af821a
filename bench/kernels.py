"""What each part of fusion.py reads, writes, holds, computes and takes, beside three other ways to do it.

    python bench/kernels.py
    python bench/kernels.py --tokens 8192 --device cuda

Attention (1 sequence, 8 heads of 64) and the loss (GPT-2's vocabulary, width 256) forward and backward, a
softmax of --tokens rows and columns, a step of AdamW over 100 tensors of 250 x 200. First all must agree with
the plain operators; then they take turns, and ms is the median of --rounds.

moved: what all operators read and wrote, as tools/watch.py counts it: as if each tensor went to memory (what
a kernel keeps within itself does not count). peak: the most that was alive at once of what they made. Neither
can be seen inside torch.compile.
GFLOP: of matrix products that torch.utils.flop_counter knows.
"""

import argparse
import statistics
import sys
import time
import weakref
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
from watch import tensors_in, touched_by  # noqa: E402

import fusion  # noqa: E402


class Moved(TorchDispatchMode):
    """Bytes that operators read and wrote, and the most alive at once of what they made."""

    def __enter__(self):
        self.moved = self.peak = 0
        self.storages = weakref.WeakSet()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = tensors_in((args, kwargs))
        made = tensors_in(result)
        self.moved += touched_by(function, args, kwargs or {}, result)
        self.storages |= {x.untyped_storage() for x in made} - {x.untyped_storage() for x in given}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
        return result


def forward_and_backward(function, *inputs):
    """The result and the gradients of its sum."""
    result = function(*inputs)
    return result, *torch.autograd.grad(result.sum(), [x for x in inputs if x.requires_grad])


def plain_loss(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight), targets)


def new_optimizer(device, **options):
    torch.manual_seed(0)
    params = [torch.randn(250, 200, device=device, requires_grad=True) for _ in range(100)]
    for param in params:
        param.grad = param.detach().sin()
    return torch.optim.AdamW(params, **options)


def step(optimizer, call):
    call()
    return [param.detach() for param in optimizer.param_groups[0]["params"]]


def ways_of(tokens, device):
    """{part: {way: function without arguments}}."""
    torch.manual_seed(0)
    qkv = [torch.randn(1, 8, tokens, 64, device=device, requires_grad=True) for _ in range(3)]
    x = torch.randn(tokens, 256, device=device, requires_grad=True)
    weight = torch.randn(50257, 256, device=device, requires_grad=True)
    targets = torch.randint(50257, (tokens,), device=device)
    rows = torch.randn(tokens, tokens, device=device)
    attention = {
        "plain operators": fusion.plain_attention,
        "fusion.py": fusion.flash_attention,
        "scaled_dot_product_attention": partial(F.scaled_dot_product_attention, is_causal=True),
        "torch.compile of plain": torch.compile(fusion.plain_attention),
    }
    loss = {"plain operators": plain_loss, "fusion.py": fusion.linear_cross_entropy}
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        chunks = torch.nn.LinearCrossEntropyOptions()
        loss["F.linear_cross_entropy"] = partial(F.linear_cross_entropy, options=chunks)
    loss["torch.compile of plain"] = torch.compile(plain_loss)
    softmax = {
        "plain operators, three passes": fusion.three_pass_softmax,
        "fusion.py, two passes": fusion.two_pass_softmax,
        "torch.softmax": partial(torch.softmax, dim=-1),
        "torch.compile of three passes": torch.compile(fusion.three_pass_softmax),
    }
    optimizers = {
        "plain loop": new_optimizer(device, foreach=False),
        "foreach": new_optimizer(device, foreach=True),
        "fused, as in fusion.py": new_optimizer(device, fused=True),
        "torch.compile of plain loop": new_optimizer(device, foreach=False),
    }
    calls = {way: optimizer.step for way, optimizer in optimizers.items()}
    calls["torch.compile of plain loop"] = torch.compile(optimizers["torch.compile of plain loop"].step)
    return {
        "attention": {way: partial(forward_and_backward, f, *qkv) for way, f in attention.items()},
        "loss": {way: partial(forward_and_backward, f, x, weight, targets) for way, f in loss.items()},
        "softmax": {way: partial(f, rows) for way, f in softmax.items()},
        "optimizer": {way: partial(step, each, calls[way]) for way, each in optimizers.items()},
    }


def finish(device):
    if device == "cuda":
        torch.cuda.synchronize()


def measure(part, ways, rounds, device):
    """Print the table of a part."""
    expected = tree_leaves(next(iter(ways.values()))())
    for way in list(ways)[1:]:
        for one, other in zip(tree_leaves(ways[way]()), expected):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=f"{part}: {way} differs")
    times = {way: [] for way in ways}
    for turn in range(rounds):
        for way in [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]:
            started = time.perf_counter()
            ways[way]()
            finish(device)
            times[way].append(1e3 * (time.perf_counter() - started))
    print(f"{part:<32}{'moved MB':>10}{'peak MB':>10}{'GFLOP':>8}{'ms':>9}{'ratio':>7}")
    first = statistics.median(times[next(iter(ways))])
    for way, function in ways.items():
        ms = statistics.median(times[way])
        seen = f"{'-':>10}{'-':>10}{'-':>8}"
        if "compile" not in way:
            with FlopCounterMode(display=False) as flops, Moved() as moved:
                function()
            gflop = f"{flops.get_total_flops() / 1e9:.1f}" if flops.get_total_flops() else "-"
            seen = f"{moved.moved / 1e6:>10.1f}{moved.peak / 1e6:>10.1f}{gflop:>8}"
        print(f"  {way:<30}{seen}{ms:>9.1f}{ms / first:>7.2f}")


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    config = parser.parse_args()
    torch.set_num_threads(1)
    print(f"kernels | {config.tokens} tokens | {config.device} | torch {torch.__version__}")
    for part, ways in ways_of(config.tokens, config.device).items():
        measure(part, ways, config.rounds, config.device)


if __name__ == "__main__":
    main()
