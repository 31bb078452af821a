"""One table of finished runs, each held against single.py's: python tools/compare.py runs ddp zero1 ...

With - in place of names it reads these from its input, where ./run.sh says the name of each run as it ends.
A lesson with a model or an optimizer of its own is held against its run on one rank, runs/NAME-alone.json.

A lesson passes if each loss and each weight is single.py's within TOLERANCE: rounding may differ, no more.
Reads runs/NAME.json, as tools/ledger.py writes it, and runs/NAME.pt, as --save does; of a run that has not
finished runs/NAME.log, its command and what it printed. MB are 10^6 bytes,
measured / by the formula in the lesson's docstring.
"""

import itertools
import json
import re
import statistics
import sys
from pathlib import Path

import torch

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2}  # of losses and of weights
COLUMNS = "{:<18}{:>6}{:>12}{:>13}{:>15}{:>15}{:>15}{:>15}{:>15}{:>9}  {}"
TITLES = (
    "lesson",
    "ranks",
    "final loss",
    "max |change|",
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
    held = [[result["held"][part]] if part in result["held"] else [] for part in TITLES[4:8]]
    held = [megabytes(rows, "measured") for rows in held]
    sent = megabytes(result["sent"].values(), "wire")
    ms = f"{statistics.median(result['step_ms']):.1f}"
    loss = f"{result['losses'][-1]:.4f}"
    return COLUMNS.format(name, result["world_size"], loss, difference, *held, sent, ms, verdict)


def error_in(output):
    """The line that says why a command ended; of several ranks' the first."""
    errors = [line for line in ERROR.findall(output) if "ChildFailedError" not in line]
    return (errors or output.split("\n")[-2:-1] or ["ended without a word"])[0][:200]


def unfinished(log):
    """Why a run left no result: the end of its log, and its command."""
    command, *lines = log.read_text().splitlines() if log.exists() else ["it did not begin"]
    ours = itertools.takewhile(lambda line: "torch/distributed/elastic" not in line, lines)
    reason = error_in("\n".join([*lines, ""]))
    return "\n    ".join([f"{log.stem:<18}did not finish: {reason}", *list(ours)[-6:], f"alone: {command}"])


def read(folder, name):
    """(what tools/ledger.py wrote, weights) of a run, or None."""
    result, weights = folder / f"{name}.json", folder / f"{name}.pt"
    if result.exists() and weights.exists():
        return json.loads(result.read_text()), torch.load(weights, map_location="cpu")
    return None


def compare(folder, name, plain, weights):
    """(its row of the table, whether the lesson agrees with single.py)."""
    run = read(folder, name)
    if not run:
        return unfinished(folder / f"{name}.log"), False
    result, own = run
    in_bf16 = name == "muon" and result["dtype"] == "fp32"  # Newton-Schulz, which magnifies rounding
    tolerance = TOLERANCE["bf16" if in_bf16 else result["dtype"]]
    if own.keys() != weights.keys():
        return line(name, result, "other names", "FAILED"), False
    difference = max((own[key].double() - weights[key].double()).abs().max().item() for key in own)
    verdict = "same" if difference <= tolerance else "FAILED: weights differ"
    pairs = list(zip(reversed(result["losses"]), reversed(plain["losses"])))  # resume.py has the last ones
    if not pairs or any(not abs(a - b) <= tolerance for a, b in pairs):
        verdict = "FAILED: losses differ"
    return line(name, result, f"{difference:.1e}", verdict), verdict == "same"


def main(folder, names):
    single = read(folder, "single")
    if not single:
        print(f"compare.py: {folder}: no single.json and single.pt to compare with", file=sys.stderr)
        if (folder / "single.log").exists():
            print(unfinished(folder / "single.log"))
        return 2
    print(COLUMNS.format(*TITLES, "ms/step", "verdict"))
    print(line("single", single[0], "-", "the plain loop"), flush=True)
    verdicts = []
    for name in names:
        alone = read(folder, f"{name}-alone")
        if alone:
            print(line(name, alone[0], "-", "on one rank"))
        row, good = compare(folder, name, *(alone or single))
        print(row, flush=True)
        verdicts.append(good)
    failed = verdicts.count(False)
    print(
        f"\n{len(verdicts) - failed} passed, {failed} failed. MB held and sent by a rank: measured / formula"
    )
    return failed > 0


if __name__ == "__main__":
    folder, *names = sys.argv[1:] or ["runs"]
    if names == ["-"]:
        next(sys.stdin, "")  # single.py has ended
        names = map(str.strip, sys.stdin)
    sys.exit(main(Path(folder), names))
