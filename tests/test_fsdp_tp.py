"""What is special to fsdp_tp.py: its mesh, and what travels in rows and columns when."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.checks import EXACT, check_ledger, check_masters, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import TEXT, Lesson, apart, error_of, holds, load, mutants, on_ranks, train
from tests.test_zero1 import METHODS, SITUATIONS, check_situation, noting

NAIVE = "--naive"
RACE = "4"
LESSON = Lesson(
    variants=("--naive", "--tp 1"),
    own={"--tp": ("1 2", "-1 5 x")},
    bad=("--tp 3",),
    slack=lambda root, block, size, flags: (2 * root + block, 0),
    races=("", "--tp 1"),
    gpu=("--naive", "--tp 4"),
)
SHAPE = f"--layers 3 --heads 12 --width 36 --context 16 --vocab 257 --batch 72 --data {TEXT}"
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (1, 4), (3, 1), (1, 3)]


@pytest.mark.long_table
@pytest.mark.parametrize("d, t", MESHES)
def test_every_mesh_trains_as_single_py_and_its_bytes_are_the_formulas(d, t):
    flags = "--vocab 257 --batch 72 --accum 3"
    check_parity("fsdp_tp", d * t, flags, f"--tp {t}")
    check_parity("fsdp_tp", d * t, flags, f"--tp {t} --naive")
    check_ledger("fsdp_tp", d * t, f"--accum 3 --tp {t}", f"{SHAPE} --steps 2")
    check_ledger("fsdp_tp", d * t, f"--accum 2 --tp {t} --naive --dtype bf16", f"{SHAPE} --steps 2")


def test_in_rows_of_one_it_is_zero3_py():
    flags = f"{EXACT} --accum 3"
    ours, theirs = train("fsdp_tp", 4, f"{flags} --tp 1"), train("zero3", 4, flags)
    assert apart(ours[1], theirs[1]) <= 1e-12, "other weights than zero3.py's"


@on_ranks(8)
def check_mesh(name):
    """A row's ranks are neighbours, and have the same batch; a column's are as far apart as a row is long."""
    lesson, batches = load(name), []
    draw = lesson.microbatches
    lesson.microbatches = lambda *given: [batches.append(batch) or batch for batch in draw(*given)]
    lesson.train(lesson.parse(f"{SHAPE} --tp 4 --steps 1".split()))
    row, column = (dist.get_process_group_ranks(lesson.MESH[axis]) for axis in ("row", "column"))
    rank, everyone = dist.get_rank(), [None] * dist.get_world_size()
    assert row == [*range(rank // 4 * 4, rank // 4 * 4 + 4)], f"no neighbours: {row}"
    assert column == [rank % 4, rank % 4 + 4], f"another column: {column}"
    dist.all_gather_object(everyone, batches[0][0].tolist())
    alike = [other for other in range(8) if everyone[other] == everyone[rank]]
    assert alike == row, f"ranks with the same batch: {alike}"


@on_ranks(4)
def check_parts(name):
    """A rank has q, k and v of its heads; all parts of a row are the whole."""
    lesson, rank, size = load(name), dist.get_rank(), dist.get_world_size()
    lesson.MESH["row"] = dist.group.WORLD
    said = error_of(lambda: lesson.column_parallel(torch.ones(2, 3), torch.ones(4, 3)))
    assert said == "nothing", f"no evaluation: {said}"
    qkv = torch.arange(3.0 * size * 2 * 5).view(3, size, 2, 5)  # two rows for each rank
    part = lesson.own_part(qkv.view(-1, 5), 0, 3)
    assert torch.equal(part, qkv[:, rank].flatten(0, 1)), "another part"
    assert torch.equal(lesson.whole_of(part, 0, 3), qkv.view(-1, 5)), "not the whole"
    proj = torch.arange(7.0 * size * 2).view(7, -1)
    part = lesson.own_part(proj, 1, 1)
    assert torch.equal(part, proj[:, 2 * rank :][:, :2]), "another part"
    assert torch.equal(lesson.whole_of(part.contiguous(), 1, 1), proj), "not the whole"


TIMELINE = """gather 0 gather 1 gathered 0 gather 2 gathered 1 sum sum free 1 gather 3 gathered 2 sum sum
    gathered 3 sum sum | sum sum reduce 3 free 3 gather 1 sum sum reduced 3 reduce 2 free 2 gathered 1 sum sum
    reduced 2 reduce 1 free 1 reduced 1 reduce 0 free 0 | reduced 0"""


@on_ranks(4)
def check_timeline(name):
    """In the column weights and gradients travel while a block computes, and while its row adds up."""
    lesson, log, units = load(name), [], []
    init, backward, all_reduce = lesson.Unit.__init__, torch.Tensor.backward, dist.all_reduce

    def begin(unit, *given):
        init(unit, *given)
        for method, word in METHODS.items():
            setattr(unit, method, noting(log, f"{word} {len(units)}", unit, getattr(unit, method)))
        unit.reducing = unit.gathering = None
        units.append(unit)

    def summed(x, *given, **options):
        if x.dim() == 3:
            assert options == {"group": lesson.MESH["row"]}, "activations are added up elsewhere"
            log.append("sum")
        return all_reduce(x, *given, **options)

    def split(loss):
        log.append("|")
        backward(loss)
        log.append("|")

    def start(config, step, *given):
        log.clear()
        return draw(config, step, *given)

    draw, lesson.microbatches, lesson.Unit.__init__ = lesson.microbatches, start, begin
    with mock.patch.object(dist, "all_reduce", summed), mock.patch.object(torch.Tensor, "backward", split):
        lesson.train(lesson.parse(f"{SHAPE} --steps 2".split()))
    assert " ".join(log) == " ".join(TIMELINE.split()), f"another order: {' '.join(log)}"


situations = [  # all but that of which "Left out" says it
    partial(check_situation, which=which, size=size)
    for which, (build, _) in SITUATIONS.items()
    for size in (2, 3)
    if "block" not in build
]
test_blocks_train_as_in_the_plain_loop = holds("fsdp_tp", *situations)
CHECKS = [partial(check_parts, size=size) for size in (1, 2, 3, 4)]
test_each_promise_is_kept = holds("fsdp_tp", *CHECKS, check_mesh, check_timeline)
parity = partial(check_parity, size=4)
naive = partial(check_parity, size=4, own_flags="--naive")
norm = partial(check_parity, size=4, flags="--accum 3 --clip inf")
unclipped = partial(norm, own_flags="--naive")
stale = partial(check_situation, which="evaluation between backward and update")
ledger = partial(check_ledger, size=4)
MUTANTS = [
    # The norm counts what is replicated t times, or once too often; or not all of a rank's are told apart.
    ("max(n_split - len(own) * dist.get_rank(group), 0)", "len(own)", norm, "norms differ"),
    ("max(n_split - len(own) * dist.get_rank(group), 0)", "max(n_split, 0)", norm, "norms differ"),
    ("sorted(params, key=lambda param: param.cut is None)", "params", norm, "norms differ"),
    ('dist.all_reduce(squares, group=MESH["row"])', "pass", norm, "norms differ"),
    ("dist.all_reduce(squares, group=group)", "dist.all_reduce(squares)", norm, "norms differ"),
    ("dist.all_reduce(squares, group=group)", 'dist.all_reduce(squares, group=MESH["column"])', unclipped,
     "norms differ"),
    # What is gathered in a row is not one matrix.
    ('"alone" if config.naive else "column"', '"alone" if config.naive else "row"', parity, "differ"),
    ("[param.grad for param in self.params]",
     "[param.grad if param.cut else add_up(param.grad) for param in self.params]", parity,
     "differ"),
    # A row has one batch; the loss is divided by the number of columns' ranks alone.
    ("device, rank, replicas)", "device, dist.get_rank(), world_size)", check_mesh, "with the same batch"),
    ("/ (config.accum * replicas)", "/ (config.accum * world_size)", parity, "losses differ"),
    ('dist.all_reduce(total_loss, group=MESH["column"])', "dist.all_reduce(total_loss)", parity,
     "losses differ"),
    ('("row", mesh), ("column", mesh.T)', '("row", mesh.T), ("column", mesh)', check_mesh, "no neighbours"),
    ('dist.all_reduce(shard.grad, group=MESH["column"])', "pass", naive, "differ"),
    ("x.register_hook(add_up)", "pass", parity, "differ"),
    ('"qkv.weight": (0, 3)', '"qkv.weight": (0, 1)', parity, "losses differ"),
    (".select(dim + 1, ", ".select(dim + 1, -1 - ", check_parts, "another part"),
    ("for part in parts], dim + 1)", "for part in parts], dim)", check_parts, "not the whole"),
    ("self.down.weight)) + self.down.bias", "self.down.weight, self.down.bias))", parity, "differ"),
    ("self.gather(kept[0], direction=-1)", "self.gather(kept[0])", check_timeline, "another order"),
    ("[i::direction][:2]", "[i::direction][:1]", check_timeline, "another order"),
    ("if unit not in self.units[-2:]:", "if True:", ledger, "all-gather: sent +"),
    ("wide(own.dtype)", "own.dtype", check_masters, "moved by"),
    ("            unit.free()\n        self.gather(self.root)",
     "            pass\n        self.gather(self.root)", stale, "weights differ"),
    ("    if x.requires_grad:", "    if True:", check_parts, "no evaluation: RuntimeError"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "fsdp_tp")
GPU_MUTANTS = [
    ("            self.reducing.wait()\n", "", check_gpu, "what a collective still"),
    ("            self.gathering.wait()\n", "", check_gpu, "what a collective still"),
    ('dist.all_reduce(squares, group=MESH["row"])',
     'dist.get_rank() and dist.all_reduce(squares, group=MESH["row"])', check_order, "ranks "),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "fsdp_tp")
