"""What is special to parallel_3d.py: every mesh trains alike, who sends what along which axis, and when."""

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.checks import check_ledger, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import TINY, Lesson, error_of, holds, load, mutants, on_ranks, world
from tools.watch import noted

FILM = "--layers 2 --tp 2 --pp 2 --accum 2"
LESSON = Lesson(
    flags="--vocab 257",
    own={"--tp": ("1 2", "0 -1 5 x"), "--pp": ("1 2", "0 -1 5 x"), "--zero": ("0 1", "-1 2")},
    bad=("--tp 3", "--heads 9", "--layers 1"),
    races=("",),
    gpu=("--zero 1", "--tp 1 --pp 2", "--tp 1 --pp 1"),
    orders=[
        *((size, "--layers 8") for size in (2, 3, 8)),
        *((4, f"--layers 8 --tp {tp} --pp {pp} --zero 1") for tp, pp in ((2, 1), (1, 2), (1, 4))),
        *((8, f"--layers 8 --tp {tp} --pp {pp} --zero 1") for tp, pp in ((2, 4), (2, 2))),
    ],
)


# ranks, tp, pp, zero; test_all.py has smaller worlds
MESHES = ["4 1 4 0", "4 4 1 0", "4 1 1 0", "8 2 2 0", "8 4 2 0", "8 2 4 0", "4 2 2 1", "4 1 1 1", "8 2 2 1"]
SHAPE = "--layers 9 --heads 8 --width 24 --vocab 257 --batch 16 --steps 2"


def check_mesh(name, size=8, tp=2, pp=2, zero=0, flags="--accum 2"):
    check_parity(name, size, f"{SHAPE} {flags}", f"--tp {tp} --pp {pp} --zero {zero}")


@pytest.mark.long_table
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_as_single_py_and_its_bytes_are_the_formulas(mesh):
    size, tp, pp, zero = map(int, mesh.split())
    check_mesh("parallel_3d", size, tp, pp, zero)
    if size > tp * pp or not zero:  # shards are of several replicas
        check_ledger("parallel_3d", size, f"--layers 5 --tp {tp} --pp {pp} --zero {zero} --accum 3")


@on_ranks(3)
def check_rare(name):
    """Large losses in 16 bits are torch's, no rank's tokens are errors, missing gradients do no harm; to clip
    twice is an error."""
    lesson, rank = load(name), dist.get_rank()
    mesh = lesson.Mesh(np.arange(3).reshape(1, 1, 3))
    torch.manual_seed(0)
    logits, targets = 1000 * torch.randn(2, 5, 13).bfloat16(), torch.randint(13, (2, 5))
    loss = lesson.parallel_loss(mesh, logits[..., rank::3], targets)
    assert abs(loss / lesson.mean_loss(logits, targets) - 1) < 1e-5, "not torch's loss"
    for token in rank - 3, rank + 15:
        look_up = partial(lesson.vocab_parallel, torch.nn.Embedding(5, 4), mesh, torch.tensor([token]))
        assert "out of range" in error_of(look_up), f"something is found for token {token}"
    config = lesson.parse(f"{TINY} --tp 1 --pp 1 --layers 1 --steps 1".split())
    lesson.Bucket.update = lambda bucket: None
    parallels, init = [], lesson.Parallel3D.__init__
    lesson.Parallel3D.__init__ = noted(init, lambda parallel, *_: parallels.append(parallel))
    lesson.train(config)
    said = error_of(partial(parallels[0].clip_grad_norm_, 1.0))
    assert "update() between two clip_grad_norm_()" in said, f"clipped twice: {said}"
    lesson = load(name)
    lesson.Block.forward = lambda block, x: x + block.down(block.up(block.norm2(x)))
    config = lesson.parse(f"{TINY} --tp 1 --pp 3 --accum 3 --dtype bf16".split())
    assert error_of(partial(lesson.train, config)) == "nothing", "gradients are missed"


@on_ranks(2)
def check_overlap(name):
    """The first backward launches nothing; in the last one each layer's gradients leave before the next."""
    lesson, log = load(name), []
    lesson.Bucket.start_sum = noted(lesson.Bucket.start_sum, lambda _: log.append("launch"))
    lesson.Bucket.finish_sum = noted(lesson.Bucket.finish_sum, lambda _: log.append("finish"))
    note = lambda layer, _: log.extend(["backward"] * isinstance(layer, lesson.Block))  # noqa: E731
    hook = torch.nn.modules.module.register_module_full_backward_pre_hook(note)
    lesson.train(lesson.parse(f"{TINY} {SHAPE} --tp 1 --pp 1 --steps 1 --accum 2".split()))
    hook.remove()
    first, last = log[:9], log[9:]
    assert first == ["backward"] * 9, "gradients leave before they are whole"
    assert last.index("finish") == len(last) - last.count("finish"), "a wait before the last backward"
    while_computing = last[: len(last) - last[::-1].index("backward")]
    assert while_computing.count("launch") >= 2 * 8, "gradients wait for the end of backward"


@on_ranks(4)
def check_schedule(name):
    """Of four stages: forwards and backwards of six microbatches, in order; what was sent is freed."""
    lesson, words, isend, kept, most = load(name), [], dist.isend, [], []
    for word, method in ("F", "_forward"), ("B", "_backward"):
        note = lambda *_, word=word: words.append(word)  # noqa: E731
        setattr(lesson.Parallel3D, method, noted(getattr(lesson.Parallel3D, method), note))

    def counted(*args, **options):
        work = isend(*args, **options)
        kept.append(work)
        most.append(len(kept))
        return mock.Mock(wait=lambda: (work.wait(), kept.remove(work)))

    with mock.patch.object(dist, "isend", counted):
        lesson.train(lesson.parse(f"{TINY} --layers 4 --steps 1 --tp 1 --pp 4 --accum 6".split()))
    warmup = 3 - dist.get_rank()
    assert "".join(words) == "F" * warmup + "FB" * (6 - warmup) + "B" * warmup, f"not 1F1B: {words}"
    assert max(most) == (2 if dist.get_rank() in (1, 2) else 1), f"{max(most)} messages are kept"
    assert not kept, "messages are not waited for"


def groups_of(shape):
    """On a rank: the ranks of its pipeline, data, tensor and tie groups."""
    mesh = load("parallel_3d").Mesh(np.arange(8).reshape(shape))
    groups = mesh.output_group, mesh.dp_group, mesh.tp_group, mesh.tie_group
    return [group and dist.get_process_group_ranks(group) for group in groups]


def test_tensor_ranks_are_neighbours_and_stages_farthest_apart():
    assert world(8).run(groups_of, (2, 2, 2))[5] == [[1, 5], [5, 7], [4, 5], [1, 5]]
    ties = [groups[3] for groups in world(8).run(groups_of, (4, 1, 2))]
    assert ties == [[0, 6], [1, 7], None, None, None, None, [0, 6], [1, 7]]


few_microbatches = partial(check_mesh, size=4, tp=1, pp=4, flags="--accum 1")  # fewer than stages
test_each_promise_is_kept = holds("parallel_3d", check_overlap, check_rare, check_schedule, few_microbatches)
norm = partial(check_mesh, flags="--accum 2 --steps 1")
MUTANTS = [
    ("dist.all_reduce(self.flat_grad, group=self.mesh.tie_group)", "pass", norm, "norms differ"),
    (" * (1 + is_tied)", "", norm, "norms differ"),
    ("self.n_copies = mesh.dp // self.n_shards", "self.n_copies = 1", norm, "norms differ"),
    ("self.n_copies *= mesh.tp", "pass", norm, "norms differ"),
    ("mesh.dp // self.n_shards *", "mesh.dp *", partial(norm, zero=1), "norms differ"),
    (" + bucket.is_tied", "", partial(norm, zero=1), "norms differ"),
    ("assert self.shard.grad is None", "assert True", check_rare, "clipped twice"),
    ("/ (mesh.dp * mesh.tp)", "/ mesh.dp", norm, "losses differ"),
    ("warmup = mesh.pp - 1", "warmup = mesh.pp - 2 + mesh.is_last", check_schedule, "not 1F1B"),
    ("self.sent[group].wait()", "pass", check_schedule, "messages are kept"),
    ("mesh.dp_rank, mesh.dp)", "0, mesh.dp)", norm, "losses differ"),
    ("/ n_microbatches", "", norm, "losses differ"),
    ("self.grad /= self.mesh.dp", "pass", norm, "norms differ"),
    ("x.register_hook(mesh.tp_sum)", "pass", norm, "norms differ"),
    ("self.mesh.dp_rank % self.n_shards", "0", partial(check_mesh, zero=1), "differ"),
    ("dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.tp_group)", "largest.zero_()", check_rare,
     "not torch's loss"),
    (".to(torch.promote_types(logits.dtype, torch.float32))", "", check_rare, "not torch's loss"),
    ("if self.pending:", "if False:", check_rare, "gradients are missed"),
    ("n_params * len(batches)", "n_params", check_overlap, "before they are whole"),
    ("self.flat_grad.zero_()", "pass", check_mesh, "differ"),
    ("n * (mesh.pp_rank + 1) //", "start + n //", partial(check_mesh, pp=4), "differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "parallel_3d")
GPU_MUTANTS = [
    ("parallel_3d", "        self.work.wait()\n", "", check_gpu, "uses what a collective still"),
    (
        "parallel_3d",
        "ranks, axis, -1)",
        "ranks, axis, -1)[:: -1 if dist.get_rank() else 1]",
        check_order,
        "ranks do not meet",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
