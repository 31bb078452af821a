"""One table of finished runs, each held against single.py's: python tools/compare.py runs ddp zero1 ...

A lesson passes if each loss and each weight is single.py's within TOLERANCE: rounding may differ, no more.
Reads runs/NAME.json and runs/NAME.pt, as --json and --save write them.
"""

import json
import statistics
import sys
from pathlib import Path

import torch

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2}  # of losses and of weights
COLUMNS = "{:<18}{:>6}{:>12}{:>14}{:>12}{:>11}{:>11}{:>13}{:>10}  {}"


def megabytes(size):
    return f"{size / 1e6:.2f} MB"


def row(name, result, difference, verdict):
    held = [megabytes(result["held"].get(part, {"measured": 0})["measured"]) for part in PARTS]
    sent = megabytes(sum(kind["wire"] for kind in result["sent"].values()))
    ms = f"{statistics.median(result['step_ms']):.1f}" if result["step_ms"] else "-"
    return COLUMNS.format(
        name, result["world_size"], f"{result['losses'][-1]:.4f}", difference, *held, sent, ms, verdict
    )


PARTS = ("parameters", "gradients", "optimizer")


def compare(folder, name, plain, weights):
    """(line of the table, whether the lesson agrees with single.py)."""
    if not (folder / f"{name}.json").exists() or not (folder / f"{name}.pt").exists():
        return f"{name:<18}did not finish", False
    result = json.loads((folder / f"{name}.json").read_text())
    own = torch.load(folder / f"{name}.pt")
    tolerance = TOLERANCE[result["dtype"]]
    same_losses = len(result["losses"]) == len(plain["losses"]) and all(
        abs(a - b) <= tolerance for a, b in zip(result["losses"], plain["losses"])
    )
    if own.keys() != weights.keys():
        return row(name, result, "other names", "FAILED"), False
    difference = max(
        (own[key].cpu().double() - weights[key].cpu().double()).abs().max().item() for key in own
    )
    verdict = "same" if difference <= tolerance else "FAILED: weights differ"
    if not same_losses:
        verdict = "FAILED: losses differ"
    return row(name, result, f"{difference:.1e}", verdict), verdict == "same"


def main(folder, names):
    plain = json.loads((folder / "single.json").read_text())
    weights = torch.load(folder / "single.pt")
    print(COLUMNS.format("", "", "", "max |change|", "", "held", "", "sent", "", "").rstrip())
    titles = ("lesson", "ranks", "final loss", "from single", *PARTS, "per step", "ms/step", "verdict")
    print(COLUMNS.format(*titles))
    print(row("single", plain, "-", "the plain loop"))
    compared = [compare(folder, name, plain, weights) for name in names]
    for line, _ in compared:
        print(line)
    passed = sum(good for _, good in compared)
    print(f"\n{passed} passed, {len(compared) - passed} failed")
    return passed != len(compared)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
