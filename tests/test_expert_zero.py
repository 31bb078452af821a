"""What is special to expert_zero.py: two kinds of groups on the same ranks, and blocks in any use."""

import tempfile
from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests import test_zero1
from tests.checks import check_ledger, check_masters, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import TINY, Lesson, apart, error_of, holds, load, mutants, on_ranks

RUN = "torchrun LESSON --dtype fp64"
PLAIN = "expert_parallel --dtype fp64 --naive --balance 0"
NAIVE = "--ep 1"
FILM = "--layers 2"
RACE = "4 --layers 2"
LESSON = Lesson(
    flags="--experts 12",
    variants=("--ep 1",),
    own={"--experts": ("4 8", "0 -1 x"), "--top-k": ("1 2", "0 -1 99"), "--ep": ("1 2", "-1 5")},
    bad=("--ep 3", "--top-k 9"),
    slack=lambda root, block, size, flags: (2 * root + 2 * block, 0),
    races=("--ep 1",),  # over a group of one rank, FSDP2 divides twice
    uncounted=("all-to-all",),
    gpu=("--ep 1", "--ep 4 --top-k 1"),
    waits={"": {("copy", "all_gather_counts()"): "2k"}},
    orders=[*((size, "--experts 24") for size in (2, 3, 8)), (4, "--ep 1"), (4, "--ep 4 --top-k 1")],
)
EIGHT = "--experts 8 --batch 48"


@pytest.mark.long_table
@pytest.mark.parametrize("size, ep", [(4, 2), (4, 4), (8, 2), (8, 4)])
def test_every_mesh_trains_as_one_rank_and_its_bytes_are_the_formulas(size, ep):
    check_parity("expert_zero", size, f"{EIGHT} --accum 3", f"--ep {ep}")
    check_ledger("expert_zero", size, f"--accum 3 --ep {ep}", f"{TINY} {EIGHT} --steps 2")
    check_ledger("expert_zero", size, f"--accum 2 --dtype bf16 --ep {ep}", f"{TINY} {EIGHT} --steps 2")


TIMELINE = """gather root gather dense 1 gather experts 1 tokens tokens gather dense 2 gather experts 2 tokens
    tokens gather root tokens gather experts 2 tokens gather dense 2 reduce experts 2 reduce dense 2 tokens
    gather experts 1 tokens gather dense 1 reduce experts 1 reduce dense 1 reduce root"""
UNITS = "experts 1, dense 1, experts 2, dense 2, root".split(", ")  # as they are built


@on_ranks(8)
def check_groups(name, ep=4):
    """What travels when, and among which ranks."""
    lesson, units, log, numel = load(name), [], [], Counter()

    def init(unit, *arguments, init=lesson.Unit.__init__):
        init(unit, *arguments)
        units.append(unit)

    def before(call, word, unit_of):
        return lambda *given: (log.append(f"{word} {UNITS[units.index(unit_of(*given))]}"), call(*given))[1]

    def noted(word, call, out, given, group):
        numel[word, *dist.get_process_group_ranks(group)] += max(out.numel(), given.numel())
        return call(out, given, group=group)

    def tokens(*given, call=dist.all_to_all_single, group, **options):
        log.append("tokens")
        assert dist.get_process_group_ranks(group) == ours, "tokens travel among others"
        return call(*given, group=group, **options)

    rank = dist.get_rank()
    first = rank // ep * ep
    ours, same, world = [*range(first, first + ep)], [*range(rank % ep, 8, ep)], [*range(8)]
    lesson.all_gather = partial(noted, "gather", lesson.all_gather)
    lesson.reduce_scatter = partial(noted, "reduce", lesson.reduce_scatter)
    lesson.Unit.__init__ = init
    lesson.Unit.gather = before(lesson.Unit.gather, "gather", lambda unit: unit)
    lesson.Gather.backward = staticmethod(before(lesson.Gather.backward, "reduce", lambda ctx, *_: ctx.unit))
    with mock.patch.object(dist, "all_to_all_single", tokens):
        lesson.train(lesson.parse(f"{TINY} --layers 2 --batch 8 --experts 8 --ep {ep} --steps 1".split()))
    assert " ".join(log) == " ".join(TIMELINE.split()), f"another order: {' '.join(log)}"
    dense = sum(8 * len(unit.shard) for unit in [*units[1::2], units[-1]])
    experts = sum(8 // ep * len(unit.shard) for unit in units[:-1:2])
    expected = {("gather", *world): 2 * dense, ("gather", *same): 2 * experts}
    expected |= {("reduce", *world): dense, ("reduce", *same): experts}
    assert numel == expected, f"other groups or numbers: {numel}, not {expected}"
    own = 8 // ep * (8 * 36**2 + 5 * 36)
    assert 0 <= experts - 2 * own < 2 * 8, f"{experts} numbers of experts, not {2 * own}"


@on_ranks(2)
def check_checkpoints(name, **options):
    """A checkpoint around each block changes no number, and weights are there as briefly."""
    found = []
    for is_checkpointed in False, True:
        lesson = load(name)
        forward = lesson.Unit.forward

        def again(unit, x, lesson=lesson, forward=forward):
            is_block = isinstance(unit.module, lesson.MoEBlock)
            return checkpoint(forward, unit, x, **options) if is_block else forward(unit, x)

        lesson.Unit.forward = again if is_checkpointed else forward
        config = lesson.parse(f"{TINY} --accum 2 --experts 12 --layers 4".split())
        ledger = load("tools/ledger")
        found.append(ledger.result_of(lesson, config, *ledger.run(lesson, config)))
        held = found[-1]["held"]["parameters"]
        assert abs(held["measured"] - held["formula"]) < 4 * 500, f"parameters: other bytes: {held}"
    plain, own = found
    for key in "losses", "grad_norms":
        assert apart(plain[key], own[key]) < 1e-6, f"{key} differ"
    counts = 2 * 4 * 8 * 12  # bytes that a recomputation gathers once more: k M X numbers
    more = own["sent"]["all-gather"]["wire"] - plain["sent"]["all-gather"]["wire"]
    assert more == counts, f"{more - counts:+.0f} bytes of weights are gathered"
    assert own["held"]["parameters"] == plain["held"]["parameters"], "more is unsharded"


class Nested:
    """A model of test_zero1.py's in units, used as ZeRO3 there."""

    def __init__(self, name, model):
        self.lesson, self.module, world = load(name), model, dist.group.WORLD
        for i, block in enumerate(model.blocks):
            model.blocks[i] = self.lesson.Unit(block, "", torch.device("cpu"), world)
        self.root = self.lesson.Unit(model, "", torch.device("cpu"), world)
        self.units = [self.root, *model.blocks]

    def __call__(self, tokens):
        with torch.autograd.graph.saved_tensors_hooks(self.lesson.note, self.lesson.restore):
            return self.root(tokens)

    def shards(self):
        return [unit.shard for unit in self.units]

    def finish_reduce_scatters(self):
        pass

    def full_state_dict(self):
        weights = {}
        for i, unit in enumerate(self.units):
            gathered = zip(unit.shapes, self.lesson.Gather.apply(unit.shard, unit))
            weights |= {f"blocks.{i - 1}.{key}" if i else key: each.detach() for key, each in gathered}
        return weights | {key: each for key, each in weights.items() if "." not in key}


@on_ranks(2)
def check_use(name, which):
    with mock.patch.object(test_zero1, "wrap", Nested):
        test_zero1.check_situation.__wrapped__(name, which)


def check_idle(name):
    """All tokens are the same, so one expert gets all, and most ranks' experts none."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"a" * 100)
        file.flush()
        flags = f"--context 1 --experts 4 --top-k 1 --data {file.name}"
        said = error_of(partial(check_parity, name, 4, flags, "--ep 2"))
    assert said == "nothing", f"it does not end well: {said}"


USES = [
    partial(check_use, which=which) for which in test_zero1.SITUATIONS if which != "a checkpoint in a block"
]
CHECKPOINTS = [partial(check_checkpoints, use_reentrant=each) for each in (False, True)]
padded = partial(check_parity, size=8, flags=f"{EIGHT} --clip 9 --vocab 257", own_flags="--ep 2")
test_each_promise_is_kept = holds("expert_zero", check_groups, check_idle, padded, *CHECKPOINTS, *USES)
parity = partial(check_parity, size=4, flags=f"{EIGHT} --accum 3", own_flags="--ep 2")
SQUARES = "squared_norm([shard.grad for shard in shards])"
MUTANTS = [
    ('"experts", device, replicas)', '"experts", device, ep_group)', check_groups, "other groups"),
    ('Unit(block, "", device, dist.group.WORLD)', 'Unit(block, "", device, replicas)', parity, "differ"),
    ("            param.data = param.new_empty(0)\n", "            pass\n", check_ledger, "parameters: +"),
    ("(config.accum * world_size)", "(config.accum * world_size // config.ep)", parity, "losses differ"),
    ("dist.all_reduce(squares)", "dist.all_reduce(squares, group=ep_group)", parity, "differ"),
    (SQUARES, SQUARES.replace("in shards", "in shards[::2]"), parity, "differ"),
    ("        dist.all_reduce(total_loss)", "        pass", parity, "losses differ"),
    ("        optimizer.zero_grad()\n", "", parity, "differ"),
    ("own.copy_(self.shard.detach())", "own.zero_()", parity, "differ"),
    ("padding = tensors[0].new_zeros(", "padding = tensors[0].new_ones(", padded, "differ"),
    ("        output = torch.func", "        return torch.func", check_ledger, "parameters: +"),
    ("        unit.flat = None\n        received", "        received", check_ledger, "parameters: +"),
    ("    if unit is None:", "    if True:", check_ledger, "parameters: +"),
    ("        if kept[0].flat is None:\n", "        if True:\n", check_ledger, "parameters: +"),
    ("wide(self.dtype), copy=True", "self.dtype, copy=True", check_masters, "moved by"),
    ("output = expert(torch.cat(pieces[own]))",
     "output = torch.cat(pieces[own]); output = expert(output) if len(output) else output", check_idle,
     "does not end well"),
    ("pieces[own] = output.split", "pieces[own] = output.flip(0).split", parity, "differ"),
    ('.replace("module.", "")', "", parity, "other names"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "expert_zero")
GPU_MUTANTS = [
    (SQUARES, f"{SQUARES.replace('.grad', '.grad.cpu()')}.to(device)", check_gpu, "the host waits"),
    ("rows, received, sent,", "rows, received[::-1], sent,", check_order, "ranks do not meet"),
    ("        dist.all_reduce(squares)", "        rank == 0 and dist.all_reduce(squares)", check_order,
     "ranks do not meet"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "expert_zero")
