"""What bench/predict.py wrote, as a figure: two bars a lesson.

python site/figures_time.py docs/results/time.json docs/time.svg
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from figures import COLORS, STYLE, save

PARTS = {"computation": COLORS["forward"], "exposed": COLORS["network"], "idle": "#c8c8c8"}


def main(source, target):
    plt.rcParams |= STYLE
    lessons = json.loads(Path(source).read_text())
    figure, axes = plt.subplots(figsize=(8, 9))
    for i, lesson in enumerate(lessons.values()):
        for key, y, alpha in ("formula", i - 0.2, 0.55), ("measured", i + 0.2, 1):
            left = 0
            for part, color in PARTS.items():
                ms = lesson["ms"][part][key]
                axes.barh(y, ms, 0.36, left, color=color, alpha=alpha)
                left += ms
    axes.set_yticks(range(len(lessons)), lessons)
    axes.invert_yaxis()
    axes.set(xlabel="ms of a step", title="Above, pale: by the docstring's formulas; below: measured")
    patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color in PARTS.values()]
    axes.legend(patches, PARTS, loc="upper right")
    save(figure, Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
