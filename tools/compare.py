"""One table of finished runs, each held against single.py's: python tools/compare.py runs ddp zero1 ...

A lesson with a model of its own is held against its run on one rank, runs/NAME-alone.json.

A lesson passes if each loss and each weight is single.py's within TOLERANCE: rounding may differ, no more.
Reads runs/NAME.json, as tools/ledger.py writes it, and runs/NAME.pt, as --save does. MB are 10^6 bytes,
measured / by the formula in the lesson's docstring.
"""

import json
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


def read(folder, name):
    """(what tools/ledger.py wrote, weights) of a run."""
    weights = torch.load(folder / f"{name}.pt", map_location="cpu")
    return json.loads((folder / f"{name}.json").read_text()), weights


def compare(folder, name, plain, weights):
    """(line of the table, whether the lesson agrees with single.py)."""
    if not (folder / f"{name}.json").exists() or not (folder / f"{name}.pt").exists():
        return f"{name:<18}did not finish", False
    result, own = read(folder, name)
    tolerance = TOLERANCE[result["dtype"]]
    if own.keys() != weights.keys():
        return line(name, result, "other names", "FAILED"), False
    difference = max((own[key].double() - weights[key].double()).abs().max().item() for key in own)
    verdict = "same" if difference <= tolerance else "FAILED: weights differ"
    pairs = list(zip(reversed(result["losses"]), reversed(plain["losses"])))  # resume.py has the last ones
    if not pairs or any(not abs(a - b) <= tolerance for a, b in pairs):
        verdict = "FAILED: losses differ"
    return line(name, result, f"{difference:.1e}", verdict), verdict == "same"


def refuse(problem):
    print(f"compare.py: {problem}", file=sys.stderr)
    sys.exit(2)


def main(folder, names):
    if not (folder / "single.json").exists() or not (folder / "single.pt").exists():
        refuse(f"{folder}/single.json and single.pt: missing; name the folder into which single.py finished")
    plain, weights = read(folder, "single")
    print(COLUMNS.format(*TITLES, "ms/step", "verdict"))
    print(line("single", plain, "-", "the plain loop"))
    passed = 0
    for name in names:
        oracle = plain, weights
        if (folder / f"{name}-alone.pt").exists():
            oracle = read(folder, f"{name}-alone")
            print(line(name, oracle[0], "-", "on one rank"))
        row, good = compare(folder, name, *oracle)
        print(row)
        passed += good
    print(f"\n{passed} passed, {len(names) - passed} failed. MB held and sent by a rank: measured / formula")
    return passed != len(names)


if __name__ == "__main__":
    folder, *names = sys.argv[1:] or ["runs"]
    sys.exit(main(Path(folder), names))
