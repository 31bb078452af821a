"""Figures from the --json of a run, as SVG: python tools/figures.py runs/pipeline.json docs/pipeline-1f1b.svg

So far the timeline of pipeline.py: what each rank did when, in the last step. Readable on light and on dark.
"""

import json
import sys
from pathlib import Path

COLORS = {"F": "#4c8bf5", "B": "#e8833a", "W": "#3aa675"}  # forward, backward (of the input), of the weights
WIDTH, ROW, LEFT, TOP = 960, 34, 64, 30
GREY = "#808890"  # text and lines, on any background


def timeline(result):
    """SVG of the actions that `result` has for each rank: (op, stage, microbatch), start, end in seconds."""
    rows = result["timeline"]
    begin, end = min(row[0][1] for row in rows), max(row[-1][2] for row in rows)
    scale = (WIDTH - LEFT - 8) / (end - begin)
    height = TOP + ROW * len(rows) + 26
    idle = f"{result['idle']['measured']:.1%} idle" if "idle" in result else ""
    title = f"{result.get('schedule', '')}: {idle}, {1e3 * (end - begin):.0f} ms"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="{LEFT}" y="18" fill="{GREY}" font-size="14">{title}</text>',
    ]
    chunks = 1 + max(action[1] for row in rows for action, *_ in row) // len(rows)
    for rank, row in enumerate(rows):
        y = TOP + ROW * rank
        lines.append(f'<text x="8" y="{y + 21}" fill="{GREY}">rank {rank}</text>')
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y + 29}" y2="{y + 29}" stroke="{GREY}" opacity=".4"/>'
        )
        for (op, stage, microbatch), start, stop in row:
            x, width = LEFT + (start - begin) * scale, (stop - start) * scale
            opacity = 1 - 0.45 * (stage // len(rows)) / chunks
            lines.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{max(width - 1, 0.5):.1f}" height="24" rx="2" '
                f'fill="{COLORS[op]}" opacity="{opacity:.2f}"/>'
            )
            if width > 14:
                middle = f'x="{x + width / 2:.1f}" y="{y + 19}" text-anchor="middle"'
                lines.append(f'<text {middle} fill="white">{microbatch}</text>')
    names = {
        "F": "forward",
        "B": "backward" if not has(rows, "W") else "backward to the input",
        "W": "to the weights",
    }
    x = LEFT
    for op in (op for op in "FBW" if has(rows, op)):
        y = height - 18
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLORS[op]}"/>')
        lines.append(f'<text x="{x + 17}" y="{y + 10}" fill="{GREY}">{names[op]}</text>')
        x += 30 + 7 * len(names[op])
    return "\n".join([*lines, "</svg>"]) + "\n"


def has(rows, op):
    return any(action[0] == op for row in rows for action, *_ in row)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(timeline(json.loads(source.read_text())))
