"""What is special to uneven.py: one mean for all tokens, documents that do not see each other, equal work."""

import re
import sys
import tempfile
from functools import cache, partial
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.checks import check_ledger
from tests.harness import Lesson, apart, holds, load, mutants, on_ranks, train

PLAIN = "uneven"
LESSON = Lesson(
    variants=("--order balanced", "--pack", "--order balanced --pack"),
    own={"--order": ("drawn balanced", "longest")},
    bad=("--batch 7",),
    gpu=("--order balanced", "--pack"),
    waits={
        "": {("copy", "microbatches()"): 0, ("copy", "load_microbatches()"): 1, ("item", "agree()"): 1},
    },
)


CONTEXT = 40
FOLDER = tempfile.TemporaryDirectory()
TEXT = Path(FOLDER.name, "text")  # most paragraphs are short, some are cut, and some have a single byte
RANDOM = np.random.default_rng(0)
LENGTHS = np.minimum(1 + 8 * RANDOM.pareto(1, 300), 3 * CONTEXT + 1).astype(int)
PARAGRAPHS = [RANDOM.integers(97, 123, length, dtype=np.uint8).tobytes() for length in LENGTHS]
TEXT.write_bytes(b"\n \n".join(PARAGRAPHS))
FLAGS = f"--layers 2 --heads 2 --width 12 --context {CONTEXT} --steps 3 --batch 36 --clip 0.5 --lr 0.01"
FLAGS += f" --dtype fp64 --data {TEXT}"


@cache
def plain(flags):
    """({losses, grad_norms}, weights) of one process that runs one document at a time and divides once."""
    lesson, documents = load("uneven"), []
    config = lesson.parse(flags.split())
    for paragraph in PARAGRAPHS:
        pieces = re.findall(rb"(?s).{2,%d}" % CONTEXT, paragraph)
        documents += [torch.tensor(list(piece)) for piece in pieces]
    torch.manual_seed(config.seed)
    model = lesson.GPT(config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    found = {"losses": [], "grad_norms": []}
    for step in range(1, config.steps + 1):
        chosen = np.random.default_rng((config.seed, step)).integers(len(documents), size=config.batch)
        n_tokens = sum(len(documents[i]) - 1 for i in chosen)
        total = 0
        for i in chosen:
            inputs, targets = documents[i][:-1], documents[i][1:]
            loss = F.cross_entropy(model(inputs[None])[0], targets, reduction="sum") / n_tokens
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        model.zero_grad()
        found["losses"].append(total)
        found["grad_norms"].append(norm.item())
    return found, model.state_dict()


def check_mean(name, size=2, flags="--accum 3"):
    """Losses, gradient norms and weights are those of a loop over documents, one at a time."""
    expected, weights = plain(f"{FLAGS} {flags}".replace("--order balanced", "").replace("--pack", ""))
    result, own = train(name, size, f"{FLAGS} {flags}")
    assert apart(result["losses"], expected["losses"]) < 1e-10, "losses differ"
    assert apart(result["grad_norms"], expected["grad_norms"]) < 1e-10, "gradient norms differ"
    assert apart(own, weights) < 1e-9, "weights differ"


WAYS = [f"--accum {k} --order {order}{pack}" for k, order, pack in product(
    (1, 3), ("drawn", "balanced"), ("", " --pack"))]  # fmt: skip
CHECKS = [partial(check_mean, size=size, flags=flags) for size, flags in product((1, 2, 3, 4), WAYS)]
CHECKS.append(partial(check_mean, size=8, flags="--accum 3 --batch 24 --order balanced --pack"))


@on_ranks(3)
def check_meetings(name, flags="--accum 3 --order balanced"):
    """All ranks compute as many microbatches and ask for the same all-reduces, in one order. (In place of a
    hang, whoever would wait is named: before each of these all ranks say what they are about to do.)"""
    lesson, all_reduce, sum_of_losses = load(name), dist.all_reduce, load(name).sum_of_losses
    numbers = []

    def meet(does, where=None):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (does, where))
        hosts = "; ".join(f"rank {rank} {does}" for rank, (does, _) in enumerate(everyone))
        assert len(set(everyone)) == 1, f"it hangs: {hosts}"
        return everyone

    def noted_all_reduce(tensor, *args, **options):
        meet(f"waits in {sys._getframe(1).f_code.co_name}()", tensor.shape)
        return all_reduce(tensor, *args, **options)

    def noted_losses(logits, targets):
        meet("computes a microbatch")
        numbers.append(targets.any().item())
        return sum_of_losses(logits, targets)

    lesson.sum_of_losses = noted_losses
    with mock.patch.object(dist, "all_reduce", noted_all_reduce):
        lesson.train(lesson.parse(f"{FLAGS} {flags}".split()))
        meet("has ended")
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, numbers)
    assert any(len(set(step)) > 1 for step in zip(*everyone)), "no rank had an empty microbatch"


@on_ranks(2)
def check_agreement(name):
    """A rank without a document gets as many empty microbatches as the other one has full ones."""
    lesson, rank = load(name), dist.get_rank()
    batches = [] if rank else [[torch.tensor([[1, 2]])] * 3, [torch.tensor([[3, 0]])] * 3]
    assert lesson.agree(batches, "cpu") == (3, 2), "another number of tokens or microbatches"
    inputs, targets, positions = batches[-1]
    assert inputs.shape == targets.shape == positions.shape == (1, 2 - rank), "no empty microbatch"
    assert targets.any() == (rank == 0), "an empty microbatch has targets"


@on_ranks(1)
def check_probe(name):
    """A token of a document changes the logits of this document from there on, and no others in its row."""
    lesson = load(name)
    config = lesson.parse(f"{FLAGS} --pack".split())
    model = lesson.OverDocuments(lesson.GPT(config).double())
    documents = [lesson.columns_of(bytes(range(97, 97 + length))) for length in (9, 7, 12, 2, 5, 9)]
    (row,) = lesson.pack(documents, CONTEXT)
    ids = [number for number, document in enumerate(row) for _ in document]
    inputs, _, positions = torch.cat(row).T.unsqueeze(1)
    with torch.no_grad():
        logits = model(inputs, positions)[0]
        alone = torch.cat([model.model(document[None, :, 0])[0] for document in row])
        leaks = 0
        for i, number in enumerate(ids):
            changed = inputs.clone()
            changed[0, i] += 1
            differ = (model(changed, positions)[0] - logits).abs().amax(1) > 0
            expected = [other == number and j >= i for j, other in enumerate(ids)]
            leaks += (differ != torch.tensor(expected)).sum().item()
    assert leaks == 0, f"{leaks} logits of other documents change"
    assert apart(logits, alone) < 1e-12, "not the logits of the document alone"


def check_work(name):
    """Dealt by cost, ranks compute equally long. Packed, rows are full, but not longer than --context."""
    lesson = load(name)
    config = lesson.parse(FLAGS.split())
    lengths = [min(int(length), CONTEXT) for length in LENGTHS if length > 1][:64]
    documents = [range(length) for length in lengths]
    cost = partial(lesson.flops, config)
    params = sum(param.numel() for param in lesson.GPT(config).parameters())
    by_formula = 6 * params * 20 + 6 * config.layers * config.width * 20**2
    assert 0.8 < cost(20) / by_formula < 1, f"{cost(20)} FLOPs, not {by_formula}"
    for order, most in (("drawn", 9), ("balanced", 0.01)):
        shares = lesson.deal(documents, order, cost, 4)
        assert sorted(len(each) for share in shares for each in share) == sorted(lengths), (
            "documents are lost or double"
        )
        costs = [sum(cost(len(document)) for document in share) for share in shares]
        idle = max(costs) / np.mean(costs) - 1
        assert idle < most, f"{order}: ranks are idle for {idle:.0%}"
    rows = lesson.pack(documents, CONTEXT)
    assert sorted(len(each) for row in rows for each in row) == sorted(lengths), (
        "documents are lost or double"
    )
    assert max(sum(map(len, row)) for row in rows) <= CONTEXT, "a row is too long"
    assert len(rows) <= 1.1 * sum(lengths) / CONTEXT + 1, f"{len(rows)} rows are not full"


test_each_promise_is_kept = holds("uneven", *CHECKS, check_meetings, check_agreement, check_probe, check_work)
ALONE = partial(check_mean, size=1)
BALANCED = partial(check_mean, flags="--accum 3 --order balanced")
MUTANTS = [
    ("    dist.all_reduce(n_tokens)", "    n_tokens *= dist.get_world_size()", check_mean, "losses differ"),
    ("targets) / n_tokens", "targets) / targets.count_nonzero().clamp(min=1) / n_microbatches / world_size",
     check_mean, "losses differ"),
    ("targets) / n_tokens", "targets) / targets.count_nonzero().clamp(min=1) / n_microbatches",
     ALONE, "losses differ"),
    ("targets) / n_tokens", "targets) / targets.count_nonzero().clamp(min=1)", ALONE, "losses differ"),
    ("        self.work.wait()", "        self.work.wait()\n        self.flat_grad /= dist.get_world_size()",
     check_mean, "losses differ"),
    ("batches += [n_tokens.new_zeros(3, 1, 1)] * (n_microbatches - len(batches))", "pass",
     check_meetings, "it hangs: rank 0 waits in train(); rank 1 waits in train(); rank 2 computes"),
    ("            microloss.backward()", "            if inputs.any():\n                microloss.backward()",
     check_meetings, "it hangs: rank 0 waits in train(); rank 1 waits in train(); rank 2 waits in start_all"),
    ("    dist.all_reduce(most, op=dist.ReduceOp.MAX)", "    pass", check_meetings, "it hangs: rank 0"),
    ("n_tokens.new_zeros(3, 1, 1)", "n_tokens.new_ones(3, 1, 1)", check_agreement, "has targets"),
    ("n_tokens += targets.count_nonzero()", "n_tokens += targets.numel()", check_agreement, "another number"),
    ("self.model.positions(positions)", "self.model.positions.weight[: tokens.shape[1]]",
     check_probe, "not the logits of the document alone"),
    ("document[:, :, None] == document", "document[:, :, None] >= document", check_probe, "logits of other"),
    ("ignore_index=0", "ignore_index=-1", check_mean, "losses differ"),
    (".{2,%d}", ".{3,%d}", check_mean, "losses differ"),
    ("costs[rank] += cost(len(document))", "costs[rank] += 1", check_work, "balanced: ranks are idle"),
    ("map(len, row)) + len(document) <= most", "map(len, row)) <= most", check_work, "a row is too long"),
    ("master.grad = None", "pass", partial(check_ledger, size=2, flags="--dtype bf16"), "gradients: +"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "uneven")
