"""Rounding or a bug? How far correct and broken lessons move away from single.py, step by step.

    python bench/rounding.py     runs what docs/results/rounding.json lacks, and prints tables of all

Each run is compared with single.py in its own dtype. "single.py, two halves" is single.py with --accum 2, so
it shows what another order of the same sums does on one rank. The lessons in MUTANTS are broken: each runs
on 2 ranks with one line replaced.
"""

import datetime
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, f"{ROOT}/tools")
import ledger  # noqa: E402
import promises  # noqa: E402

RESULT = ROOT / "docs/results/rounding.json"
FLAGS = "--layers 4 --heads 4 --width 64 --context 32 --batch 8 --steps 100 --device cpu"
FIRST = "single.py, again"
DTYPES = ("fp64", "fp32", "bf16")
LESSONS = ("ddp", "zero3", "tensor_parallel")
MUTANTS = {  # what is wrong: (lesson, old, new)
    "ddp, sum instead of mean": ("ddp", "1 / dist.get_world_size()", "1"),
    "zero3, norm of own shards": ("zero3", "        dist.all_reduce(squares)\n", ""),
    "tensor_parallel, some counted twice": ("tensor_parallel", "or dist.get_rank() == 0:", "or True:"),
}
NOTED = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100)  # steps
SHOWN = (1, 10, 50, 100)  # steps that have a column


def record(folder, path, flags):
    """On a rank: run a lesson's file in each dtype; {dtype: {what: its distance at each noted step}}."""
    found = {}
    for dtype in DTYPES:
        lesson = ledger.load(path)
        config = lesson.parse([*flags, "--dtype", dtype])
        rows = found[dtype] = {"loss": [], "norm": [], "weights": []}
        with mock.patch.object(lesson, "print_step", partial(note_step, rows, [], f"{folder}/{dtype}")):
            lesson.train(config)
    return found


def note_step(rows, numbers, file, config, step, loss, grad_norm, started):
    """Stands in place of a lesson's print_step. The first run, single.py's, leaves its weights in files."""
    numbers.append((loss.item(), grad_norm.item()))
    if step not in NOTED:
        return
    weights = weights_of(sys._getframe(1).f_locals)  # train()'s variables
    if dist.get_rank() > 0:
        return
    if not Path(f"{file}-{step}").exists():
        torch.save((numbers, weights), f"{file}-{step}")
    right_numbers, right = torch.load(f"{file}-{step}")
    since = max([each for each in NOTED if each < step], default=0)
    pairs = list(zip(numbers, right_numbers, strict=True))[since:]
    rows["loss"].append(max(abs(own[0] - other[0]) for own, other in pairs))
    rows["norm"].append(max(abs(own[1] / other[1] - 1) for own, other in pairs))
    squares = sum((weights[name].double() - right[name].double()).square().sum() for name in right)
    length = sum(right[name].double().square().sum() for name in right)
    rows["weights"].append((squares / length).sqrt().item())


def weights_of(names):
    """The plain model's weights, of the variables of a lesson's train(). All ranks must call it."""
    model = names.get("parallel", names["model"])
    if hasattr(model, "full_state_dict"):
        return model.full_state_dict()
    return getattr(model, "module", model).state_dict()


def run_all():
    """What all runs found. Written to RESULT after each; those that are there already do not run again."""
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": {}}
    result |= {"date": str(datetime.date.today()), "torch": torch.__version__, "cores": os.cpu_count()}
    result |= {"flags": FLAGS, "steps": NOTED}
    promises.SECONDS = 3600
    with tempfile.TemporaryDirectory() as folder:
        for name, (path, lesson, ranks, flags) in files(folder).items():
            if name not in result["runs"] or name == FIRST:
                found = promises.run(str(path), lesson, ranks, f"{FLAGS} {flags}", partial(record, folder))
                assert "error" not in found, found["error"]
                result["runs"][name] = {dtype: found[dtype] for dtype in DTYPES}
                text = json.dumps(result)
                RESULT.write_text(json.dumps(json.loads(text, parse_float=rounded), indent=0) + "\n")
                print(name, file=sys.stderr, flush=True)


def files(folder):
    """{name: (file, lesson, ranks, flags)} of the runs, the first one single.py's, with which all compare."""
    runs = {FIRST: (ROOT / "single.py", "single", 1, "")}
    runs["single.py, two halves"] = ROOT / "single.py", "single", 1, "--accum 2"
    for name, (lesson, old, new) in MUTANTS.items():
        source = (ROOT / f"{lesson}.py").read_text()
        assert source.count(old) == 1, f"{lesson}.py has another number of these: {old}"
        Path(folder, f"{lesson}.py").write_text(source.replace(old, new))
        runs[name] = f"{folder}/{lesson}.py", lesson, 2, ""
    for lesson in LESSONS:
        for ranks in (2, 4):
            runs[f"{lesson}.py, {ranks} ranks"] = ROOT / f"{lesson}.py", lesson, ranks, ""
    return runs


def rounded(text):
    return float(f"{float(text):.3g}")


def table(result):
    """The lines of the tables: of each dtype the runs, with their distances at the steps SHOWN."""
    cores = f"gloo, {result['cores']} cores"
    yield f"{result['date']}, torch {result['torch']}, {cores}, flags `{result['flags']}`."
    at = [result["steps"].index(step) for step in SHOWN]
    for dtype in DTYPES:
        heads = [f"loss {step}" for step in SHOWN] + [f"weights {step}" for step in SHOWN] + ["norm 1"]
        yield f"\n### In {dtype}\n"
        yield f"| | {' | '.join(heads)} |"
        yield "|---|" + "---|" * len(heads)
        for name, found in result["runs"].items():
            loss, weights, norm = (found[dtype][what] for what in ("loss", "weights", "norm"))
            numbers = [*(max(loss[: i + 1]) for i in at), *(weights[i] for i in at), norm[0]]
            broken = "broken: " * (name in MUTANTS)
            yield f"| {broken}{name} | {' | '.join(f'{number:.1e}' for number in numbers)} |"


def main():
    run_all()
    print("\n".join(table(json.loads(RESULT.read_text()))))


if __name__ == "__main__":
    main()
