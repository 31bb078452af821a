"""What is special to collectives.py: the library's results, bytes on the wire, gradient noise."""

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness import TINY, apart, holds, load, mutants, on_ranks, said, world

ALL_REDUCES = (
    "naive_all_reduce",
    "ring_all_reduce",
    "recursive_doubling_all_reduce",
    "halving_doubling_all_reduce",
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
CASES = [(length, torch.float32) for length in (0, 1, 2, 5, 1003)] + [(12, dtype) for dtype in DTYPES]


@on_ranks(3)
def check_equal(name, cases=CASES[-5:-4], members=None):
    """Each algorithm is the library's, for these (length, dtype), in a group of these ranks."""
    lesson = load(name)
    group = dist.new_group(members)
    if members and dist.get_rank() not in members:
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def rows_of(x):
        rows = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(rows, x, group=group)
        return torch.stack(rows)

    for length, dtype in cases:
        generator = torch.Generator().manual_seed(100 * rank + length)
        x = torch.randint(-20, 20, (length,), generator=generator).to(dtype)  # whose sums are exact
        inexact = torch.randn(length, generator=generator)
        rows = rows_of(x)
        total = rows.sum(0, dtype=dtype)
        found = {each: (x.clone(), total) for each in ALL_REDUCES}
        for each, (own, _) in found.items():
            getattr(lesson, each)(own, group=group)
            own = inexact.clone()
            getattr(lesson, each)(own, group=group)
            assert (rows_of(own) == own).all(), f"{each}: ranks have other bits"
        for src in range(size):
            found[src] = x.clone(), rows[src]
            lesson.tree_broadcast(found[src][0], src, group=group)
        shard = lesson.ring_reduce_scatter(x, group=group)
        found["ring_reduce_scatter"] = shard, total.tensor_split(size)[rank]
        found["ring_all_gather"] = lesson.ring_all_gather(x, group=group), rows.flatten()
        pieces = torch.cat([row.tensor_split(size)[rank] for row in rows])
        found["pairwise_all_to_all"] = lesson.pairwise_all_to_all(x, group=group), pieces
        for each, (own, expected) in found.items():
            assert torch.equal(own, expected), f"{each} of {length} {dtype}: not the library's"


@pytest.mark.parametrize("size, members", [*enumerate([None] * 7), (5, [1, 3, 4])][1:])
def test_every_algorithm_equals_the_librarys(size, members):
    check_equal("collectives", CASES, members, size=size)


@on_ranks(4)
def check_bytes(name, numel=1200):
    """What all ranks send in each algorithm, as tools/watch.py counts it: the formula's bytes."""
    lesson, size = load(name), dist.get_world_size()
    power = 2 ** (size.bit_length() - 1)
    others = ("tree_broadcast", "ring_reduce_scatter", "ring_all_gather", "pairwise_all_to_all")
    shares = dict.fromkeys(others, size - 1) | dict.fromkeys(ALL_REDUCES, 2 * (size - 1))
    shares["recursive_doubling_all_reduce"] = power * (power.bit_length() - 1) + 2 * (size - power)
    for each, share in shares.items():
        with load("tools/watch").Watch() as watch:
            getattr(lesson, each)(torch.zeros(numel // size if each == "ring_all_gather" else numel))
        everyone = [None] * size
        dist.all_gather_object(everyone, watch.sent["send", "wire"])
        assert sum(everyone) == 4 * numel * share, f"{each} sent {everyone}, in all not the formula's bytes"


def printed(name, function, flags):  # as if each exchange took a second, and nothing else any time
    lesson = load(name)
    lesson.exchange = mock.Mock(wraps=lesson.exchange)
    lesson.time = mock.Mock(perf_counter=lambda: lesson.exchange.call_count)
    return said(lambda: getattr(lesson, function)(lesson.parse(flags.split())))[0].splitlines()


def check_table(name):
    lines, others = world(2).run(printed, name, "compare", "--megabytes 0.01")
    assert not others, "another rank prints"
    assert [int(line.split()[0]) for line in lines[1:]] == [4, 32, 256, 2048], f"other sizes: {lines}"
    for each, ms in zip((*ALL_REDUCES, "all_reduce"), (0, 2000, 1000, 2000, 0)):  # each by so many exchanges
        assert all(f" | {each} {ms}.00 ms" in line for line in lines[1:]), f"not {ms} ms for {each}: {lines}"


def check_noise(name):
    """Over all batches of 2 x 2 of 3 samples of a linear model, the estimates' mean is the truth."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets, weight = (torch.randn(3, n, generator=generator).double() for n in (4, 1, 4))
    gradients = 2 * (inputs @ weight[0] - targets[:, 0])[:, None] * inputs  # of the squared errors
    estimates, estimate = [], load(name).gradient_noise
    for batch in itertools.product(range(3), repeat=4):
        means = gradients[list(batch)].view(2, 2, 4).mean(1)
        estimates.append(estimate(means.square().sum(), means.mean(0).square().sum(), 2, 4))
    trace, square = torch.stack(estimates).mean(0)
    assert apart(trace, torch.cov(gradients.T, correction=0).trace()) < 1e-12, "the trace has a bias"
    assert apart(square, gradients.mean(0).square().sum()) < 1e-12, "the square has a bias"


def own_noise(name, flags):
    """On a rank: what --noise-scale must print at learning rate 0, from the gradients of two ranks."""
    lesson, lines, noise = load(name), [], 0
    config = lesson.parse(flags.split())
    device, text = lesson.set_up(config)
    model = lesson.GPT(config).double()
    for step in (1, 2, 3):
        grads = []
        for rank in (0, 1):
            inputs, targets = map(torch.cat, zip(*lesson.microbatches(config, text, step, device, rank, 2)))
            loss = lesson.mean_loss(model(inputs), targets)
            grads.append(torch.cat([x.flatten() for x in torch.autograd.grad(loss, model.parameters())]))
        squares, mean = torch.stack(grads).square().sum(), sum(grads) / 2
        noise = 0.95 * noise + lesson.gradient_noise(squares, mean.square().sum(), 2, config.batch)
        lines.append(f"noise scale {noise[0] / noise[1]:.1f} sequences")
    return lines


def check_noise_scale(name):
    flags = f"{TINY} --noise-scale --dtype fp64 --accum 3 --lr 0 --clip 0.1"
    lines, others = world(2).run(printed, name, "train", flags)
    assert not others, "another rank prints"
    expected = world(2).run(own_noise, name, flags)[0]
    assert lines[1::2] == expected, f"says {lines[1::2]}, but it is {expected}"


def test_the_model_of_a_link_is_fitted_and_crosses_where_the_paper_says():
    links, rows, alpha, beta = load("bench/links"), [], 2e-4, 1e-9
    paths = ("recursive_doubling", 2, 2), ("halving_doubling", 4, 1.5), ("ring_all_reduce", 6, 1.5)  # 4 ranks
    for size, (name, rounds, path) in itertools.product((4, 2**19, 2**21), paths):
        seconds = rounds * alpha + path * size * beta
        rows.append(links.Row(name, rounds, path, path, 1.5, size, seconds))
    assert links.fit(rows) == pytest.approx((alpha, beta)) and rows[-1].model == pytest.approx(seconds)
    predicted, first, then = links.crossover(rows, "halving_doubling", alpha, beta)
    assert predicted == pytest.approx(2 * alpha / (beta * (2 - 2 * 3 / 4)))
    assert (first, then) == (2**19, 2**21)
    assert links.crossover(rows, "ring_all_reduce", alpha, beta)[0] == pytest.approx(2 * predicted)


sent_by = [partial(check_bytes, size=size) for size in (2, 3, 4, 6)]
CHECKS = *sent_by, check_table, check_noise, check_noise_scale
test_each_promise_is_kept = holds("collectives", *CHECKS)
MUTANTS = [
    ("partial = chunks[rank - i - 1]", "partial = chunks[rank - i]", check_equal, "ring_all_reduce"),
    ("x.clone()", "x", check_equal, "ring_all_gather"),
    ("for i in range(len(chunks) - 1):", "for i in range(len(chunks) - 2):", check_equal, "ring_all_reduce"),
    ("        x += received\n    for", "        x = received\n    for", check_equal, "naive_all_reduce"),
    ("        reached *= 2", "        reached *= 3", partial(check_equal, size=4), "of 12"),
    ("out[rank - i]", "out[rank - i - 1]", check_equal, "pairwise"),
    ("exchange(given, partner, received", "exchange(x, partner, x.clone()", check_bytes, "halving"),
    ("* (sum_of_squares - n *", "* (sum_of_squares -", check_noise, "the trace has a bias"),
    ("- trace / samples", "", check_noise, "the square has a bias"),
    ("1e3 / 5", "1e3 / 6", check_table, "not 2000 ms"),
    ("ring_all_reduce(sums)", "pass", check_noise_scale, "but it is"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "collectives")
