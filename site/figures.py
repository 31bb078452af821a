"""README's pictures as SVG, readable on light and on dark.

    python site/figures.py memory runs/ddp.json runs/zero1.json docs/memory.svg
    python site/figures.py schedule pipeline 1f1b 4 8 docs/pipeline-1f1b.svg

memory: what a rank held, of the JSON that ./run.sh or tools/ledger.py writes; a line at the formula's value.
schedule: what each of 4 ranks does with 8 microbatches, if a forward, a B and a W take equally long.
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = str(ROOT / "tools"), str(ROOT)
import ledger  # noqa: E402
from bubble import NEXT, schedule_of  # noqa: E402
from lessons import path_of  # noqa: E402

COLORS = {"parameters": "#4c8bf5", "gradients": "#e8833a", "optimizer": "#3aa675"}
PHASES = dict(zip("FBW", COLORS.values()))
LEFT, WIDTH, ROW = 90, 700, 28


def box(x, y, width, height, color):
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{color}" stroke="#fff"/>'


def text(x, y, words, how=""):
    return f'<text x="{x:.1f}" y="{y}"{how}>{words}</text>'


def svg(title, rows, legend):
    """A picture of rows {label: shapes at y = 0}, below them a legend {what: color}."""
    shapes = [text(LEFT, 16, title)]
    for y, (label, own) in enumerate(rows.items(), 1):
        shapes += [f'<g transform="translate({LEFT} {y * ROW})">', text(-8, 15, label, ' text-anchor="end"')]
        shapes += [*own, "</g>"]
    y = (len(rows) + 1) * ROW + 4
    for place, (what, color) in enumerate(legend.items()):
        x = LEFT + 180 * place
        shapes += [box(x, y, 12, 12, color), text(x + 18, y + 11, what)]
    size = f'viewBox="0 0 {LEFT + WIDTH + 80} {y + 20}" role="img" aria-label="{title}"'
    font = 'font-family="sans-serif" font-size="13" fill="#808890"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    return "\n".join([head, *shapes, "</svg>\n"])


def memory(*paths):
    """A bar for each run."""
    runs = [json.loads(Path(path).read_text()) for path in paths]
    sums = [sum(run["held"][part]["measured"] for part in COLORS) for run in runs]
    rows = {}
    for run, whole in zip(runs, sums):
        begin, shapes, scale = 0, [], WIDTH / max(sums)
        for part, color in COLORS.items():
            width = scale * run["held"][part]["measured"]
            shapes.append(box(begin, 0, width, 20, color))
            begin += width
        x = scale * sum(run["held"][part]["formula"] for part in COLORS)
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="-3" y2="23" stroke="#808890" stroke-width="2"/>')
        rows[run["lesson"]] = [*shapes, text(max(begin, x) + 8, 15, f"{whole / 1e6:.2f} MB")]
    ranks = max(run["world_size"] for run in runs)
    return svg(f"What a rank holds on {ranks} ranks (line: by the formula)", rows, COLORS)


def starts(schedule, next_stage, length):
    """[[(when it begins, action)] of each rank] if messages take no time. length: {op: how long it takes}."""
    last_stage = max(action.stage for row in schedule for action in row)
    finished = {}  # {action: when}
    rows = [[] for _ in schedule]
    while any(len(row) < len(actions) for row, actions in zip(rows, schedule)):
        for row, actions in zip(rows, schedule):
            for action in actions[len(row) :]:
                op, stage, k = action
                source = stage - next_stage.get(op, math.inf)  # the stage whose result this waits for
                arrived = finished.get((op, source, k)) if 0 <= source <= last_stage else 0
                if arrived is None:
                    break
                row.append((max(arrived, finished[row[-1][1]] if row else 0), action))
                finished[action] = row[-1][0] + length[op]
    return rows


def schedule(name, which, ranks, microbatches):
    """A row for each rank."""
    actions = schedule_of(ledger.load(path_of(name)), which, int(ranks), int(microbatches))
    split = any(action.op == "W" for action in actions[0])
    chunks = len({action.stage for action in actions[0]})
    length = {"F": 1 / chunks, "B": (1 if split else 2) / chunks, "W": 1 / chunks}
    begun = starts(actions, NEXT, length)
    scale = WIDTH / max(row[-1][0] + length[row[-1][1].op] for row in begun)
    rows = {}
    for rank, row in enumerate(begun):
        rows[f"rank {rank}"] = shapes = []
        for begin, (op, _, k) in row:
            x, width = scale * begin, scale * length[op]
            shapes.append(box(x, 0, width, 24, PHASES[op]))
            shapes.append(text(x + width / 2, 16, k, ' text-anchor="middle" fill="#fff"'))
    words = ("forward", "backward of inputs", "of weights") if split else ("forward", "backward")
    title = f"{which}: {ranks} ranks, {microbatches} microbatches"
    return svg(title, rows, dict(zip(words, PHASES.values())))


if __name__ == "__main__":
    kind, *given, target = sys.argv[1:]
    Path(target).write_text({"memory": memory, "schedule": schedule}[kind](*given))
