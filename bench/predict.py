"""What each lesson's step takes by its docstring, beside what it takes: docs/results/time.json.

    python bench/predict.py --rounds 3                  (root on Linux: two hosts, 1 Gbit/s between them)
    python bench/predict.py --rounds 3 --hosts 4 --json four.json ddp zero3

Each round runs tools/ledger.py on every lesson once, and measures the machine's constants anew, right after
the lesson's steps: a machine that others share is not the same an hour later. Of the rounds the one with the
middle ratio of predicted to measured counts, whole, so that its parts add up. Lessons of one process run
without a network, with as many replicas or workers as hosts.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from limit import run_to_its_end

from bench import ALL, ROOT

OWN = {"diloco": "--inner-steps 4 --steps 24", "collectives": "--train"}
ALONE = {"single": "", "dp_threads": "--replicas", "dp_async": "--workers"}


def run(lesson, config, folder):
    """What tools/ledger.py --json wrote."""
    out = Path(folder) / "out.json"
    out.unlink(missing_ok=True)
    flags = ["--machine", f"{folder}/machine.json", f"{lesson}.py", "--size", "small", "--steps", "8"]
    flags += [*OWN.get(lesson, "").split(), *config.flags]
    command = ["bench/hosts.sh", str(config.hosts), config.rate, "--"]
    if lesson in ALONE:
        command = [sys.executable]
        flags += [ALONE[lesson], str(config.hosts)] if ALONE[lesson] else []
    (Path(folder) / "machine.json").unlink(missing_ok=True)
    command += ["tools/ledger.py", "--json", str(out), *flags]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    with open(f"{folder}/log", "w") as log:
        code = run_to_its_end(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    if code:
        sys.exit(f"{lesson}: {Path(log.name).read_text()[-2000:]}")
    return json.loads(out.read_text())


def ratio_of(result):
    whole = result["ms"]["sum"]
    return whole["formula"] / whole["measured"]


def row(name, cells):
    return f"{name:<18}" + "".join(f"{cell:>24}" for cell in cells)


def main():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("lessons", nargs="*", default=ALL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--json", default="docs/results/time.json")
    config, config.flags = parser.parse_known_args()
    rounds = {lesson: [] for lesson in config.lessons}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(config.rounds):
            for lesson in config.lessons:
                rounds[lesson].append(run(lesson, config, folder))
                print(lesson, f"{ratio_of(rounds[lesson][-1]):.2f}", file=sys.stderr)
    print(f"{config.hosts} hosts, {config.rate} | torch {torch.__version__} | {config.rounds} rounds")
    print(row("ms of a step", ("computation", "exposed", "idle", "sum", "predicted / measured")))
    made = {}
    for lesson, results in rounds.items():
        results.sort(key=ratio_of)
        made[lesson] = {"ms": results[len(results) // 2]["ms"], "ratios": [*map(ratio_of, results)]}
        parts = made[lesson]["ms"].values()
        cells = [f"{part['formula']:.1f} / {part['measured']:.1f}" for part in parts]
        ratios = made[lesson]["ratios"]
        cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(row(lesson, cells))
    errors = [abs(statistics.median(each["ratios"]) - 1) for each in made.values()]
    print(f"predicted within {statistics.median(errors):.0%} of the measured in the median over lessons")
    (ROOT / config.json).write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
