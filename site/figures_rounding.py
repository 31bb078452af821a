"""What bench/rounding.py wrote, as a figure: how far runs are from single.py, by the step, in each dtype.

python site/figures_rounding.py docs/results/rounding.json docs/rounding.svg
"""

import json
import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from figures import GREY, STYLE, save

BROKEN = ("#e8833a", "#d24a4a", "#8e6fd8")  # the other runs are correct, and grey
ROWS = {"loss": "loss: difference", "weights": "weights: difference,\nrelative to their length"}


def main(source, target):
    plt.rcParams |= STYLE
    result = json.loads(Path(source).read_text())
    runs = {name: run for name, run in result["runs"].items() if any(run["fp32"]["weights"])}  # not its own
    dtypes = list(next(iter(runs.values())))
    broken = [name for name in runs if not name.startswith("single") and ".py" not in name]
    figure, panes = plt.subplots(len(ROWS), len(dtypes), figsize=(10, 6), sharex=True)
    for row, what in enumerate(ROWS):
        for pane, dtype in zip(panes[row], dtypes):
            for name, run in runs.items():
                color = BROKEN[broken.index(name)] if name in broken else GREY
                label = f"broken: {name}" if name in broken else None
                wide = 1.8 if name in broken else 0.8
                values = [value or math.nan for value in run[dtype][what]]  # 0 has no place on a log scale
                pane.plot(result["steps"], values, color=color, linewidth=wide, label=label)
            pane.set(xscale="log", yscale="log", title=dtype if row == 0 else "")
        panes[row][0].set_ylabel(ROWS[what])
    panes[-1][1].set_xlabel("step")
    panes[0][0].plot(
        [], [], color=GREY, label="correct: ddp.py, zero3.py, tensor_parallel.py on 2 and 4 ranks"
    )
    handles, labels = panes[0][0].get_legend_handles_labels()
    figure.suptitle(" \n ")  # room for the legend
    figure.legend(handles, labels, loc="upper center", ncols=2)
    save(figure, Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
