"""What is special to uneven.py: one mean over all tokens; packed documents are as if each were alone."""

from functools import partial

import pytest
import torch

from tests.checks import EXACT, check_ledger, check_masters, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import Lesson, apart, holds, load, mutants, on_ranks, train

PLAIN = "uneven"
OTHER = "--naive"
LEARN = "torchrun LESSON --pack"
RACE = "2"
AGAINST = "--naive"
LESSON = Lesson(gpu=("--pack", "--naive"))


@on_ranks(1)
def check_mean(name):
    """The parts add up to the mean over all tokens that count; a microbatch without any adds 0."""
    lesson, chance = load(name), torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, 7, 11, generator=chance, dtype=torch.float64).requires_grad_()
    targets = torch.randint(11, (5, 3, 7), generator=chance)
    targets[0, :, 3:] = targets[1, 1:] = targets[4] = lesson.PADDING
    n_tokens = targets.ne(lesson.PADDING).sum()
    loss = sum(lesson.part_of_mean(*pair, n_tokens) for pair in zip(logits, targets))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 2), targets.flatten())
    assert apart(loss.detach(), expected.detach()) < 1e-12, "another mean"
    loss.backward()
    assert logits.grad.isfinite().all() and not logits.grad[4].any(), "padding has gradients"


@on_ranks(1)
def check_ends(name):
    """A document ends with its newline, which counts; what comes after it does not."""
    lesson = load(name)
    n, p = lesson.NEWLINE, lesson.PADDING
    rows = torch.tensor([[1, 2, n, 3, n], [n, 1, 2, 3, 4], [1, 2, 3, 4, n], [1, 2, 3, 4, 5]])
    expected = [[1, 2, n, p, p], [n, p, p, p, p], [1, 2, 3, 4, n], [1, 2, 3, 4, 5]]
    assert lesson.one_document(rows).tolist() == expected, "another end"


@on_ranks(1)
def check_packed(name):
    """Logits of a row of documents are those of each document alone."""
    lesson = load(name)
    config = lesson.parse("--dtype fp64 --layers 2 --context 12".split())
    packed, plain = lesson.GPT(config), lesson.GPT(config)
    packed = lesson.PackedGPT(config, lesson.PackedBlock)
    n = lesson.NEWLINE
    row = torch.tensor([[7, 8, n, 9, n, n, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, n]])
    alone = [plain(part).squeeze(0) for part in row[:1].split([3, 2, 1, 6], 1)]
    expected = torch.stack([torch.cat(alone), plain(row[1:]).squeeze(0)])
    assert apart(packed(row).detach(), expected.detach()) < 1e-12, "a document sees another"


def check_pack(name, size=4, more=""):
    """As on one rank; and naive, too, as all rows have equally many tokens."""
    plain, weights = train("uneven", 1, f"{EXACT} --pack")
    result, own = train(name, size, f"{EXACT} --pack --accum 3 {more}".strip())
    assert apart(result["losses"], plain["losses"]) < 1e-10, "losses differ"
    assert apart(own, weights) < 1e-9, "weights differ"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_packed_documents_train_as_on_one_rank(size):
    check_pack("uneven", size)
    check_pack("uneven", size, "--naive")


def test_a_mean_of_means_is_another_loss():
    right, naive = (train("uneven", 2, f"{EXACT} --accum 3 {flags}".strip())[0] for flags in ("", "--naive"))
    assert apart(right["losses"], naive["losses"]) > 1e-3


check_bytes = partial(check_ledger, flags="--pack --dtype bf16")
test_each_promise_is_kept = holds("uneven", check_mean, check_ends, check_packed, check_bytes)
MUTANTS = [
    ('reduction="sum") / n_tokens', 'reduction="mean")', check_mean, "another mean"),
    ("        dist.all_reduce(n_tokens)\n", "", check_parity, "differ"),
    ("            dist.all_reduce(param.grad)", "            pass", check_parity, "differ"),
    ("        dist.all_reduce(total_loss)", "        pass", check_parity, "losses differ"),
    ("    return is_end.cumsum(1) - is_end", "    return is_end.cumsum(1)", check_ends, "another end"),
    (".tril()", "", check_packed, "a document sees another"),
    ("    return is_end.cumsum(1) - is_end", "    return is_end.cumsum(1)", check_packed, "sees another"),
    ("self.positions(self.places)", "self.positions.weight[: tokens.shape[1]]", check_packed, "sees another"),
    ("q, k, v, self.is_visible", "q, k, v, is_causal=True", check_packed, "a document sees another"),
    ("detach().to(wide(param.dtype))", "detach()", check_masters, "moved by"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "uneven")
GPU_MUTANTS = [
    ("/ n_tokens\n", "/ n_tokens.item()\n", check_gpu, "the host waits"),
    ("dist.all_reduce(n_tokens)", "rank == 0 and dist.all_reduce(n_tokens)", check_order, "ranks"),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "uneven")
