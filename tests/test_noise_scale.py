"""What is special to noise_scale.py: its estimates, beside made-up gradients and beside the plain model's."""

from functools import partial

import torch

from tests.checks import check_masters, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import TINY, Lesson, apart, holds, load, mutants, on_ranks

NAIVE = "--naive"
LESSON = Lesson(variants=("--naive",))


@on_ranks(1)
def check_estimates(name):
    """Of gradients whose signal and noise are known they have no bias."""
    estimate, chance = load(name).signal_and_noise, torch.Generator().manual_seed(0)
    true, deviation = torch.randn(8, generator=chance, dtype=torch.float64), 3.0
    draws = true + deviation * torch.randn(40_000, 12, 8, generator=chance, dtype=torch.float64)
    big = draws.mean(1).square().sum(-1)
    expected = true.square().sum(), 8 * deviation**2
    for b in 1, 3:
        small = draws[:, :b].mean(1).square().sum(-1)
        for estimates, value, what in zip(estimate(small, big, b, 12), expected, ("signal", "noise")):
            off = (estimates.mean() - value) / (estimates.std() / len(estimates) ** 0.5)
            assert off.abs() < 4, f"the {what} is {estimates.mean() / value:.3f} of what it is"


@on_ranks(2)
def check_norms(name, own_flags=""):
    """Norms are those of the plain model's gradients of a rank's part, or a sequence, and of the batch."""
    lesson, given = load(name), []
    estimate = lesson.signal_and_noise
    lesson.signal_and_noise = lambda *both: (given.append(both), estimate(*both))[1]
    config = lesson.parse(f"{TINY} --dtype fp64 --lr 0 --steps 1 --accum 3 {own_flags}".split())
    lesson.train(config)
    model = lesson.GPT(config)
    parts = [
        [torch.cat(each) for each in zip(*lesson.microbatches(config, 1, "cpu", i, 2))] for i in range(2)
    ]
    b = 1 if own_flags else config.batch // 2

    def square(inputs, targets):
        model.zero_grad()
        lesson.mean_loss(model(inputs), targets).backward()
        return sum(param.grad.square().sum() for param in model.parameters())

    pieces = [zip(inputs.split(b), targets.split(b)) for inputs, targets in parts]
    small = [square(*piece) for each in pieces for piece in each]
    big = square(*(torch.cat(each) for each in zip(*parts)))
    expected = [sum(small) / len(small), big, b, config.batch]
    assert apart([float(x) for x in given[0]], [float(x) for x in expected]) < 1e-10, "other norms"


check_norms_of_sequences = partial(check_norms, own_flags="--naive")
test_each_promise_is_kept = holds("noise_scale", check_estimates, check_norms, check_norms_of_sequences)
MUTANTS = [
    ("big - noise / big_batch", "big", check_estimates, "the signal is"),
    ("(1 / small_batch - 1 / big_batch)", "(1 / small_batch)", check_estimates, "the signal is"),
    ("world_size**2 * ", "world_size * ", check_norms, "other norms"),
    ("        dist.all_reduce(small)\n", "", check_norms, "other norms"),
    ("own / world_size", "own", check_norms, "other norms"),
    ("inputs, targets) / config.batch", "inputs, targets)", check_norms_of_sequences, "other norms"),
    ("config.batch // world_size", "config.batch", check_norms, "other norms"),
    ("            dist.all_reduce(param.grad)", "            pass", check_parity, "differ"),
    ("        dist.all_reduce(total_loss)", "        pass", check_parity, "losses differ"),
    ("detach().to(wide(param.dtype))", "detach()", check_masters, "moved by"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "noise_scale")
GPU_MUTANTS = [
    ("0.05 * (signal - mean_signal)", "0.05 * (signal.item() - mean_signal)", check_gpu, "the host waits"),
    ("        dist.all_reduce(small)", "        rank == 0 and dist.all_reduce(small)", check_order, "ranks"),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "noise_scale")
