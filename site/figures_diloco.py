"""Figures of diloco.py, as site/figures.py's.

    python site/figures_diloco.py waits ddp.json plain.json streaming.json docs/diloco.svg
    python site/figures_diloco.py losses ddp.txt H1.txt H100.txt docs/diloco-loss.svg

waits: what rank 0 computes and what travels, as bench/waits.py --json wrote it, for as long as the shortest
run. losses: what the runs printed, by the step.
"""

import json
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from figures import COLORS, STYLE, lanes, save


def waits(paths, target):
    runs = {path.stem: json.loads(path.read_text()) for path in paths}
    seconds = min(run["seconds"] for run in runs.values())
    legend = {"computes": COLORS["forward"], "network": COLORS["network"]}
    rows = {}
    for name, run in runs.items():
        for part, color in legend.items():
            shown = [(begin, min(length, seconds - begin)) for begin, length in run[part] if begin < seconds]
            rows[f"{name} {part}"] = [(*bar, color, "") for bar in shown]
    lanes(rows, "What rank 0 computes and sends, by the second", target, legend)


def losses(paths, target):
    figure, axes = plt.subplots(figsize=(8, 3.6))
    for path in paths:
        printed = re.findall(r"step +(\d+)/\d+ \| loss (\S+)", path.read_text())
        axes.plot([int(step) for step, _ in printed], [float(loss) for _, loss in printed], label=path.stem)
    axes.set(xlabel="step", ylabel="loss", ylim=(1, 4))
    axes.legend()
    save(figure, target)


def main(kind, *paths):
    plt.rcParams |= STYLE
    *sources, target = map(Path, paths)
    {"waits": waits, "losses": losses}[kind](sources, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
