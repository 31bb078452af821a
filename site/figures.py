"""Figures from the JSON that tools/ledger.py and bench/bench.py write, as SVG, readable on light and on dark.

    python site/figures.py memory runs/*.json docs/memory.svg
    python site/figures.py activations runs/*.json docs/activations.svg
    python site/figures.py timeline traces/rank0.*.json docs/overlap-offload.svg
    python site/figures.py schedule zero_bubble.py zb-h1 4 8 docs/pipeline-zb-h1.svg
    python site/figures.py link ddp.json zero1.json zero3.json docs/link.svg

memory: what a rank holds, by lesson and number of ranks; bars are runs, ticks are formulas, lines simulated
ranks (whose losses are NaN). activations: the same of activations, a bar per file. timeline: what computes
and what travels in a traced step. schedule: what each of so many ranks does with so many microbatches, if a
forward, a B and a W take equally long. link: how busy the link is in a step, as bench/link.py wrote it.
"""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt

COLORS = {"forward": "#4c8bf5", "backward": "#e8833a", "step": "#3aa675", "network": "#8e6fd8"}
PARTS = {"parameters": "#4c8bf5", "gradients": "#e8833a", "optimizer": "#3aa675"}
GREY = "#808890"  # text and lines, on any background
STYLE = {f"{part}.color": GREY for part in ("text", "xtick", "ytick")}
STYLE |= {"axes.edgecolor": GREY, "axes.labelcolor": GREY, "legend.frameon": False}
STYLE |= {"legend.labelcolor": GREY, "svg.fonttype": "none", "svg.hashsalt": "0"}


def save(figure, target):
    figure.tight_layout()
    figure.savefig(target, transparent=True, metadata={"Date": None})
    if target.suffix == ".svg":  # of its six decimals two are enough, of a path's one
        text = re.sub(r"(\d\.\d\d)\d+", r"\1", target.read_text())
        shorter = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\d\.\d)\d", r"\1", path[0]), text)
        target.write_text(shorter)


def total(result, column="measured"):
    return sum(result["held"][part][column] for part in PARTS)


def memory(results, target):
    """Bytes held per rank by the number of ranks."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
    runs = [result for result in results if not math.isnan(result["losses"][0])]
    lessons = sorted({result["lesson"] for result in results})
    wide = 0.8 / len(lessons)
    for run in runs:
        x = run["world_size"] + (lessons.index(run["lesson"]) - (len(lessons) - 1) / 2) * wide
        bottom = 0
        for part, color in PARTS.items():
            size = run["held"][part]["measured"] / 1e6
            left.bar(x, size, 0.85 * wide, bottom, color=color)
            bottom += size
        left.plot([x - wide / 2, x + wide / 2], [total(run, "formula") / 1e6] * 2, color=GREY)
        left.annotate(
            run["lesson"], (x, bottom), (0, 3), textcoords="offset points", rotation=90, ha="center"
        )
    millions = max(run["n_params"] for run in runs) / 1e6
    left.set(
        title=f"measured, {millions:.2f} M parameters, {runs[0]['dtype']} (line: formula)", xlabel="ranks"
    )
    left.set(ylabel="held per rank, MB", xticks=sorted({run["world_size"] for run in runs}))
    left.margins(y=0.25)
    left.legend([plt.Rectangle((0, 0), 1, 1, color=color) for color in PARTS.values()], PARTS)
    for lesson in lessons:
        far = [result for result in results if result["lesson"] == lesson and result not in runs]
        far.sort(key=lambda result: result["world_size"])
        sizes = [total(result) / 1e9 for result in far]
        right.plot([result["world_size"] for result in far], sizes, marker="o", markersize=3, label=lesson)
    right.set(title="simulated, 7.5 G parameters, bf16", xlabel="ranks", ylabel="held per rank, GB")
    right.set(xscale="log", yscale="log")
    right.legend()
    save(figure, target)


def activations(results, target):
    """A bar for each file: activations measured, with a tick at the formula."""
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.4 * len(results)))
    rows = [result["held"]["activations"] for result in results]
    axes.barh(
        [result["name"] for result in results], [row["measured"] / 1e6 for row in rows], color="#4c8bf5"
    )
    for y, row in enumerate(rows):
        axes.plot([row["formula"] / 1e6] * 2, [y - 0.45, y + 0.45], color=GREY)
    axes.invert_yaxis()
    axes.set(xlabel="activations of a rank when a backward begins, MB (line: formula)")
    save(figure, target)


def lanes(rows, title, target, legend):
    """Rows {label: [(start, length, color, text)]} of bars in time. legend: {what: color}."""
    figure, axes = plt.subplots(figsize=(10, 0.9 + 0.42 * len(rows)))
    for y, bars in enumerate(rows.values()):
        for start, length, color, text in bars:
            axes.barh(y, length, 0.8, start, color=color, edgecolor="white", linewidth=0.3 if text else 0)
            if text:
                axes.text(start + length / 2, y, text, ha="center", va="center", fontsize=8, color="white")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set(title=title)
    colors = [plt.Rectangle((0, 0), 1, 1, color=color) for color in legend.values()]
    axes.legend(colors, legend, ncols=len(legend), loc="upper center", bbox_to_anchor=(0.5, -0.22))
    save(figure, target)


def timeline(traces, target):
    """What computes and what travels in a rank's Chrome trace, in ms."""
    rows = {"compute": [], "network": []}
    events = [event for event in traces[0]["traceEvents"] if event.get("ph") == "X" and "ts" in event]
    events.sort(key=lambda event: event["ts"])
    begin = events[0]["ts"]
    turns = [event["ts"] for event in events if "Backward0" in event["name"]]
    for event in events:
        start, length, name = (event["ts"] - begin) / 1e3, event["dur"] / 1e3, event["name"]
        if name.startswith("gloo:"):
            rows["network"].append((start, length, COLORS["network"], ""))
        elif event["cat"] == "cpu_op" and not name.startswith("c10d"):
            done = rows["compute"][-1] if rows["compute"] else (0, 0)
            if start >= done[0] + done[1]:  # else it is a part of that one
                phase = "forward" if event["ts"] < turns[0] else "backward"
                phase = "step" if event["ts"] > turns[-1] else phase
                rows["compute"].append((start, length, COLORS[phase], ""))
    ms = (events[-1]["ts"] - begin) / 1e3
    lanes(rows, f"{target.stem}: a step of {ms:.0f} ms", target, COLORS)


def link(results, target):
    """The link's busy share by the ms of a step, a panel for each lesson; behind it, what the host does."""
    figure, panels = plt.subplots(len(results), sharex=True, sharey=True, figsize=(10, 5.5))
    for axes, result in zip(panels, results):
        turns = [0, *(share * result["ms"] for share in result["backward"]), result["ms"]]
        for phase, begin, end in zip(COLORS, turns, turns[1:]):
            axes.axvspan(begin, end, color=COLORS[phase], alpha=0.3, linewidth=0, label=phase)
        count = len(result["shares"])
        edges = [i * result["ms"] / count for i in range(count + 1)]
        axes.stairs(result["shares"], edges, fill=True, color=COLORS["network"], label="network")
        title = f"{result['lesson']}: {result['ms']:.0f} ms, {result['MB']:.1f} MB"
        axes.set(title=f"{title} sent, link busy {result['busy']:.0%}", ylabel=f"of {result['rate']}")
    axes.set(xlabel="ms of a step", ylim=(0, 1.2))
    axes.legend(ncols=len(COLORS), loc="upper center", bbox_to_anchor=(0.5, -0.5))
    save(figure, target)


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


def schedule(lesson, name, n_ranks, n_microbatches, target):
    """When each rank does what, if a forward, a B and a W take equally long and messages no time."""
    actions = lesson.build_schedule(name, n_ranks, n_microbatches)
    split = any(action.op == "W" for action in actions[0])
    chunks = len({action.stage for action in actions[0]})
    length = {"F": 1 / chunks, "B": (1 if split else 2) / chunks, "W": 1 / chunks}
    colors = dict(zip("FBW", COLORS.values()))
    rows = {}
    for rank, begun in enumerate(starts(actions, lesson.NEXT, length)):
        rows[f"rank {rank}"] = [(begin, length[op], colors[op], str(k)) for begin, (op, _, k) in begun]
    phases = ("forward", "backward of inputs", "of weights") if split else ("forward", "backward")
    legend = dict(zip(phases, COLORS.values()))
    lanes(rows, f"{name}: {n_ranks} ranks, {n_microbatches} microbatches", target, legend)


def main(kind, *paths):
    target = Path(paths[-1])
    plt.rcParams |= STYLE
    if kind == "schedule":
        spec = importlib.util.spec_from_file_location("lesson", paths[0])
        lesson = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(lesson)
        schedule(lesson, paths[1], int(paths[2]), int(paths[3]), target)
        return
    results = []
    for path in paths[:-1]:
        results.append(json.loads(Path(path).read_text()))
        results[-1]["name"] = Path(path).stem
    drawings = {"memory": memory, "activations": activations, "timeline": timeline, "link": link}
    drawings[kind](results, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
