"""tools/diverge.py finds nothing in unbroken lessons, and in broken ones the phase and the function."""

import functools
import tempfile
from pathlib import Path

import torch

from tests.harness import ROOT, holds, load, mutants, world

FLAGS = ["--layers", "2", "--batch", "4", "--context", "8", "--steps", "2"]
LESSONS = ("ddp", "zero3", "tensor_parallel", "pipeline")
BROKEN = {  # (lesson, old, new): (phase, function)
    ("tensor_parallel", "found * is_here", "found * ~is_here"): ("forward", "vocab_parallel"),
    ("tensor_parallel", "own_logit * is_here", "own_logit"): ("loss", "parallel_cross_entropy"),
    ("tensor_parallel", "grad_x = grad @ weight", "grad_x = 2 * grad @ weight"): (
        "backward",
        "ColumnParallelLinear.backward",
    ),
    ("ddp", "1 / dist.get_world_size()", "1"): ("reduction", "Bucket.collect"),
    ("ddp", "torch._foreach_mul_(grads, ", "_ = (grads, "): ("clip", "DDP.clip_grad_norm_"),
    ("zero3", "1 / self.n_shards", "1"): ("reduction", "Unit.collect"),
    ("pipeline", "dist.all_reduce(param.grad, group=group)", "pass"): ("reduction", "Pipeline.step"),
    ("pipeline", "dist.all_reduce(squares)", "pass"): ("clip", "Pipeline.clip_grad_norm_"),
    ("ddp", "lr=config.lr", "lr=2 * config.lr"): ("optimizer", "train"),
}


def record_here(path, flags):
    """On a rank: what tools/diverge.py notes of a lesson, with its weights."""
    with tempfile.TemporaryDirectory() as folder:
        return load("tools/diverge").record(path, [*FLAGS, *flags, "--save", f"{folder}/weights"])


@functools.cache
def recorded(path, size=2):
    return world(size).run(record_here, path, [])


def check_unbroken(name):
    """Beside single.py nothing differs, and outputs, gradients, losses and norms are compared."""
    diverge = load(name)
    for lesson in LESSONS:
        found = recorded(f"{ROOT}/{lesson}.py")
        first, same, _ = diverge.beside_plain(found, recorded(f"{ROOT}/single.py", 1), 1e-9)
        assert first is None, f"{lesson}: {first['phase']} of {first['name']} differs"
        assert same >= 2 * (2 * 9 + 3), f"{lesson}: {same} quantities are compared"


def check_broken(name):
    """Of a mutant the first difference has the phase and the function of what is broken."""
    diverge = load(name)
    with tempfile.TemporaryDirectory() as folder:
        for i, ((lesson, old, new), right) in enumerate(BROKEN.items()):
            source = (ROOT / f"{lesson}.py").read_text()
            assert source.count(old) == 1, f"{lesson}.py has {source.count(old)} times: {old}"
            path = Path(folder, f"{lesson}-{i}.py")
            path.write_text(source.replace(old, new))
            assert diverge.lesson_of(path) == lesson
            broken, unbroken = recorded(str(path)), recorded(f"{ROOT}/{lesson}.py")
            assert diverge.first_difference(unbroken, unbroken, 1e-9) is None
            first = diverge.first_difference(broken, unbroken, 1e-9)
            assert first, f"{lesson}, {new}: nothing differs"
            said = first["phase"], diverge.function_of(first)
            assert said == right, f"{lesson}, {new}: said {said}, which is {right}"
            # Beside single.py alone it is not overlooked, either.
            plain, *_ = diverge.beside_plain(broken, recorded(f"{ROOT}/single.py", 1), 1e-9)
            assert plain, f"{lesson}, {new}: overlooked beside single.py"


def check_ratio(name):
    """A factor is named."""
    right = torch.arange(1.0, 9).double()
    for factor, words in {
        0.5: "half",
        3: "N times",
        1 / 3: "1/N",
        3**0.5: "√N times",
        -1: "other sign",
    }.items():
        size, ratio = load(name).how_far(factor * right, right, 3)
        assert words in ratio and abs(size - abs(factor - 1) * 8) < 1e-9, ratio
    assert not load(name).how_far(right + 1, right, 3)[1], "it is no factor"


ROWS = [
    ("if not is_close(value, expected, tolerance):", "if False:", check_broken, "nothing differs"),
    ('phase = "reduction" if summed', 'phase = "clip" if summed', check_broken, "ddp, 1: said ('clip'"),
    ("is_missing = expected not in coming and", "is_missing = False and", check_broken,
     "ddp, _ = (grads, : said"),
    ("expected.repeat_interleave(times), tolerance)", "expected.repeat_interleave(times) + 1, tolerance)",
     check_unbroken, "ddp: forward of"),
    ("ranks**0.5:", "ranks**0.6:", check_ratio, "1.73205 times"),
]  # fmt: skip
test_it_finds_what_differs = holds("tools/diverge", check_unbroken, check_broken, check_ratio)
test_it_needs_each_part = mutants(ROWS, "tools/diverge")
