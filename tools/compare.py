"""One table of finished runs, each compared with single.py's: python tools/compare.py runs ddp zero1 ...

A lesson with its own model or optimizer is compared with its run on one rank, runs/NAME-alone.json.

Ranks add numbers up in another order than single.py, so weights differ by rounding, more with each step. How
much depends on processor, text and dtype, so it is measured: runs/single-split is single.py on the same text,
one sequence at a time. "difference" is the root mean square, over all weights, of what they differ by from
single.py's. A lesson passes if it is at most MARGIN times that of single-split (or WEIGHTS), and its losses
too (or LOSSES). Weights trained on half of each batch differ by 10 times as much in bf16, by 10^5 in fp32.

Reads runs/NAME.json, which tools/ledger.py writes, and runs/NAME.pt, which --save writes; for a run that did
not finish runs/NAME.log, its command and output. MB are 10^6 bytes: measured / predicted by the docstring.
"""

import itertools
import json
import math
import re
import statistics
import sys
from pathlib import Path

import torch
from lessons import special

MARGIN = 4  # most lessons differ by as much as single-split, some by twice as much
LOSSES = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2}  # what losses may always differ by
WEIGHTS = {"fp64": 1e-9, "fp32": 1e-7, "bf16": 2e-4}  # and weights: what rounding each a few times does
COLUMNS = "{:<18}{:>6}{:>12}{:>13}{:>15}{:>15}{:>15}{:>15}{:>15}{:>9}  {}"
TITLES = (
    "lesson",
    "ranks",
    "final loss",
    "difference",
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "sent in a step",
)
ERROR = re.compile(
    r"^(?:\[rank\d+\]: *)?([\w.]*(?:Error|Exception|SystemExit)\b.*|\w+\.py: .+|.*Signal \d+ .*)", re.M
)


def megabytes(rows, key):
    """Measured / expected, of one row or the sum of several."""
    if not rows:
        return "-"
    return " / ".join(f"{sum(row[name] for row in rows) / 1e6:.2f}" for name in (key, "formula"))


def line(name, result, difference, verdict):
    """A row of the table."""
    held = [[result["held"][part]] if part in result["held"] else [] for part in TITLES[4:8]]
    held = [megabytes(rows, "measured") for rows in held]
    sent = megabytes(result["sent"].values(), "wire")
    ms = "-" if result.get("shares_gpu") else f"{statistics.median(result['step_ms']):.1f}"
    loss = f"{float(result['losses'][-1]):.4f}"  # of a run that diverged it is text
    return COLUMNS.format(name, result["world_size"], loss, difference, *held, sent, ms, verdict)


def error_in(output):
    """The line that says why a command ended; of several ranks' the first."""
    others = ("ChildFailedError", "Exception raised from")  # which repeat what another line says
    errors = [line for line in ERROR.findall(output) if not any(other in line for other in others)]
    return (errors or output.split("\n")[-2:-1] or ["ended without a word"])[0][:200]


def unfinished(log):
    """Why a run left no result: the end of its log, and its command."""
    command, *lines = (log.exists() and log.read_text().splitlines()) or ["it did not begin"]
    ours = itertools.takewhile(lambda line: "torch/distributed/elastic" not in line, lines)
    reason = error_in("\n".join([*lines, ""]))
    return "\n    ".join([f"{log.stem:<18}did not finish: {reason}", *list(ours)[-6:], f"alone: {command}"])


def read(folder, name):
    """(what tools/ledger.py wrote, weights) of a run, or None."""
    result, weights = folder / f"{name}.json", folder / f"{name}.pt"
    if result.exists() and weights.exists():
        return json.loads(result.read_text()), torch.load(weights, map_location="cpu")
    return None


def differences(run, plain):
    """(largest difference of a loss, root mean square difference of all weights)."""
    (result, weights), (plain_result, plain_weights) = run, plain
    pairs = zip(reversed(result["losses"]), reversed(plain_result["losses"]))  # resume.py has the last ones
    losses = torch.tensor([abs(float(own) - float(other)) for own, other in pairs] or [math.nan])
    pieces = [(weights[key].double() - plain_weights[key].double()).flatten() for key in weights]
    return losses.max().item(), torch.cat(pieces).square().mean().sqrt().item()


def compare(run, plain, split):
    """(difference, verdict) of a run beside the plain one, and beside what splitting its batches does."""
    shapes, plain_shapes = ({key: weight.shape for key, weight in of[1].items()} for of in (run, plain))
    if shapes != plain_shapes:
        return math.nan, "FAILED: other names or shapes of weights"
    losses, weights = differences(run, plain)
    losses_split, weights_split = differences(split, plain) if split else (0, 0)
    dtype = run[0]["dtype"]
    if not losses <= max(MARGIN * losses_split, LOSSES[dtype]):
        return weights, "FAILED: losses differ"
    if not weights <= max(MARGIN * weights_split, WEIGHTS[dtype]):
        return weights, "FAILED: weights differ"
    return weights, "same"


def rows_of(folder, name, single, split):
    """Yield the rows of a lesson: (row, True if it passed, False if it failed, None if it cannot tell)."""
    plain = read(folder, f"{name}-alone") or single
    run = read(folder, name)
    if plain is not single:
        split = read(folder, f"{name}-split")
        yield line(name, plain[0], "-", f"on one rank{note(plain, single)}"), None
    if plain is not single and split:
        yield row_of_split(name, plain, split), None
    if not run:
        yield unfinished(folder / f"{name}.log"), False
        return
    difference, verdict = compare(run, plain, split)
    passed = verdict == "same"
    if "fp64" in special(name, "RUN") and run[0]["dtype"] != "fp64":
        verdict, passed = "not compared: rounding may change which experts are chosen", None
    yield line(name, run[0], f"{difference:.1e}", verdict + note(run, single)), passed
    for kind, expected in ("naive", "same"), ("other", "trains otherwise, by design"):
        if flags := special(name, kind.upper()):
            run = read(folder, f"{name}-{kind}")
            if not run:
                yield unfinished(folder / f"{name}-{kind}.log"), False
                continue
            difference, verdict = compare(run, plain, split)
            if kind == "other":
                verdict = "FAILED: does not differ" if verdict == "same" else expected
            passed = verdict == expected
            if kind == "other" and not passed and run[0]["dtype"] == "bf16":
                verdict, passed = "not compared: bf16 rounds as much as this differs", None
            yield line(f"  {flags}", run[0], f"{difference:.1e}", verdict), passed


def row_of_split(name, plain, split):
    difference = differences(split, plain)[1]
    return line(f"{name}, split", split[0], f"{difference:.1e}", "what rounding alone does")


def note(run, single):
    dtype = run[0]["dtype"]
    return "" if dtype == single[0]["dtype"] else f", in {dtype}"


def main(folder, names):
    single, split = read(folder, "single"), read(folder, "single-split")
    if not single:
        print(f"compare.py: {folder}: no single.json and single.pt to compare with", file=sys.stderr)
        if (folder / "single.log").exists():
            print(unfinished(folder / "single.log"))
        return 2
    print(COLUMNS.format(*TITLES, "ms/step", "verdict"))
    print(line("single", single[0], "-", "the plain loop"))
    if split:
        print(row_of_split("single", single, split))
    verdicts = []
    for name in names:
        for row, passed in rows_of(folder, name, single, split):
            print(row, flush=True)
            verdicts.append(passed)
    counts = f"{verdicts.count(True)} passed, {verdicts.count(False)} failed. " if verdicts else ""
    print(f"\n{counts}MB held and sent by a rank: measured / formula")
    return False in verdicts


if __name__ == "__main__":
    folder, *names = sys.argv[1:] or ["runs"]
    sys.exit(main(Path(folder), names))
