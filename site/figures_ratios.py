"""The ratios of docs/results as a picture: the medians, with the least and the most of the rounds.

python site/figures_ratios.py docs/results/figures.json docs/ratios.svg
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from figures import GREY, STYLE, save

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))
from ratios import COLUMNS, column_of, name_of, rows

if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    plt.rcParams.update(STYLE)
    found = rows(json.loads(source.read_text()))
    figure, axes = plt.subplots(figsize=(13, 0.8 + 0.44 * len(found)))
    for i, column in enumerate(COLUMNS):
        ys, lines = [], []
        for y, places in enumerate(found.values()):
            here = [line for place, (line, _) in places.items() if column_of(place) == column]
            lines += here
            ys += [y + 0.26 * (i - 1)] * len(here)
        errors = [[x.ratio - x.least for x in lines], [x.most - x.ratio for x in lines]]
        axes.barh(ys, [x.ratio for x in lines], 0.24, xerr=errors, ecolor=GREY, label=column)
    axes.axvline(1, color=GREY, linestyle="--")
    axes.set_yticks(range(len(found)), [name_of(*each) for each in found.items()])
    axes.invert_yaxis()
    axes.set(xlabel="time of a step, the lesson's over its peer's (median; least and most of the rounds)")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    save(figure, target)
