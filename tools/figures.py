"""Figures from the --json of runs, as SVG, readable on light and on dark.

    python tools/figures.py pipeline runs/pipeline.json docs/pipeline-1f1b.svg
    python tools/figures.py checkpointing runs/*.json docs/checkpointing.svg
    python tools/figures.py memory runs/*.json docs/memory.svg
    python tools/figures.py ratios bench.json [MORE.json ...] docs/ratios.svg
    python tools/figures.py overlap traces/zero3-rank0*.json docs/overlap-zero3.svg

pipeline: what each rank did when, in the last step. checkpointing: the activations at their peak by sequence
length, and what they cost in time. memory: what a rank of each lesson holds, by the number of ranks; bars are
runs, ticks are formulas, lines those of tools/simulate.py (runs without losses). ratios: the lessons'
time over their peers', from files of tools/bench.py. overlap: what computes and what travels in the last step
of a trace.
"""

import json
import sys
from pathlib import Path

COLORS = {"F": "#4c8bf5", "B": "#e8833a", "W": "#3aa675"}  # forward, backward (of the input), of the weights
PARTS = {"parameters": "#4c8bf5", "gradients": "#e8833a", "optimizer": "#3aa675"}
WIDTH, ROW, LEFT, TOP = 960, 34, 104, 30
GREY = "#808890"  # text and lines, on any background


def lanes(title, rows, legend):
    """SVG of rows [(label, [(start, stop, color, opacity, text)])] in seconds, and a legend {text: color}."""
    bars = [bar for _, row in rows for bar in row]
    begin, end = min(bar[0] for bar in bars), max(bar[1] for bar in bars)
    scale = (WIDTH - LEFT - 8) / (end - begin)
    height = TOP + ROW * len(rows) + 26
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="{LEFT}" y="18" fill="{GREY}" font-size="14">{title}</text>',
    ]
    for i, (label, row) in enumerate(rows):
        y = TOP + ROW * i
        lines.append(f'<text x="8" y="{y + 21}" fill="{GREY}">{label}</text>')
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y + 29}" y2="{y + 29}" stroke="{GREY}" opacity=".4"/>'
        )
        for start, stop, color, opacity, text in row:
            x, width = LEFT + (start - begin) * scale, (stop - start) * scale
            lines.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{max(width - 0.7, 0.5):.1f}" height="24" rx="2" '
                f'fill="{color}" opacity="{opacity:.2f}"/>'
            )
            if width > 14 and text:
                middle = f'x="{x + width / 2:.1f}" y="{y + 19}" text-anchor="middle"'
                lines.append(f'<text {middle} fill="white">{text}</text>')
    x, y = LEFT, height - 18
    for name, color in legend.items():
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{x + 17}" y="{y + 10}" fill="{GREY}">{name}</text>')
        x += 30 + 7 * len(name)
    return "\n".join([*lines, "</svg>"]) + "\n"


def pipeline(result):
    """SVG of the actions that `result` has for each rank: (op, stage, microbatch), start, end in seconds."""
    rows = result["timeline"]
    begin, end = min(row[0][1] for row in rows), max(row[-1][2] for row in rows)
    title = f"{result['schedule']}: {result['idle']['measured']:.1%} idle, {1e3 * (end - begin):.0f} ms"
    chunks = 1 + max(action[1] for row in rows for action, *_ in row) // len(rows)
    drawn = []
    for rank, row in enumerate(rows):
        bars = []
        for (op, stage, microbatch), start, stop in row:
            opacity = 1 - 0.45 * (stage // len(rows)) / chunks
            bars.append((start, stop, COLORS[op], opacity, microbatch))
        drawn.append((f"rank {rank}", bars))
    ops = {action[0] for row in rows for action, *_ in row}
    names = {
        "F": "forward",
        "B": "backward to the input" if "W" in ops else "backward",
        "W": "to the weights",
    }
    return lanes(title, drawn, {names[op]: COLORS[op] for op in "FBW" if op in ops})


TRAVEL = {"all_gather": ("all-gather", "#8e6fd8"), "all_to_all": ("reduce-scatter", "#d8568c")}
TRAVEL |= {"reduce_scatter": ("reduce-scatter", "#d8568c"), "all_reduce": ("all-reduce", "#d8568c")}


def overlap(trace, name):
    """SVG of the last step in a Chrome trace of a rank over gloo: what computes, what travels."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "ts" in e]
    ends = [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e) for e in events]
    losses = sorted(start for start, _, e in ends if e["name"] == "NllLossBackward0")
    updates = sorted(stop for _, stop, e in ends if e["name"].startswith("Optimizer.step"))
    each = len(updates) // len(losses)
    begin, end = updates[-each - 1], updates[-1]
    main = next(e["tid"] for e in events if e["name"] == "NllLossBackward0")
    compute, travel, turn = [], {}, losses[-1]
    first_update = min(s for s, _, e in ends if e["name"].startswith("Optimizer.step") and s > turn)
    for start, stop, event in sorted(ends, key=lambda entry: entry[0]):
        if not begin <= start < end:
            continue
        kind = event["name"].removeprefix("gloo:")
        if event["name"].startswith("gloo:") and kind in TRAVEL:
            travel.setdefault(TRAVEL[kind], []).append((start, stop, TRAVEL[kind][1], 0.75, ""))
        elif event["tid"] == main and event["cat"] == "cpu_op" and not event["name"].startswith("c10d"):
            color = COLORS["F" if start < turn else "B" if start < first_update else "W"]
            if not compute or start >= compute[-1][1]:  # those within another are its parts
                compute.append((start, stop, color, 1, ""))
    legend = {"forward": COLORS["F"], "backward": COLORS["B"], "step": COLORS["W"]}
    title = f"{name}: a step of {1e3 * (end - begin):.0f} ms"
    return lanes(
        title, [("compute", compute), *((kind, row) for (kind, _), row in sorted(travel.items()))], legend
    )


def pyplot():
    import matplotlib.pyplot as plt  # slow to load, and not needed for lanes

    plt.rcParams |= {f"{part}.color": GREY for part in ("text", "xtick", "ytick")}
    plt.rcParams |= {"axes.edgecolor": GREY, "axes.labelcolor": GREY}
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "0"}
    return plt


def save(figure, target):
    figure.tight_layout()
    figure.savefig(target, transparent=True, metadata={"Date": None})


def checkpointing(results, target):
    """Draw two rows, without and with stored scores: bytes by sequence length, and time by bytes."""
    kinds = {"auto": "flash attention", "math": "math attention, which stores its scores"}
    figure, rows = pyplot().subplots(2, 2, figsize=(10, 7.5))
    policies = [p for p in ("none", "full", "selective", "offload") if p in {r["policy"] for r in results}]
    lengths = sorted({r["context"] for r in results})
    for (kind, title), (left, right) in zip(kinds.items(), rows):
        for policy in policies:
            runs = [r for r in results if (r["attention"], r["policy"]) == (kind, policy)]
            runs.sort(key=lambda r: r["context"])
            sizes = [r["held"]["activations"]["measured"] / 1e6 for r in runs]
            left.plot([r["context"] for r in runs], sizes, marker="o", label=policy)
            times = runs[-1]["forward_backward_ms"]
            at = (sizes[-1], times["policy"] / times["none"])
            right.plot([at[0]], [at[1]], marker="o", linestyle="")
            right.annotate(policy, at, (6, 4), textcoords="offset points")
        left.set(title=title, xlabel="sequence length", ylabel="activations at their peak, MB")
        left.set(xscale="log", yscale="log")
        left.set_xticks(lengths, lengths, minor=False)
        left.minorticks_off()
        left.legend(frameon=False, labelcolor=GREY)
        right.set(title=f"sequence length {lengths[-1]}", xlabel="activations at their peak, MB")
        right.set(ylabel="time, none = 1")
        right.margins(0.25)
    save(figure, target)


def memory(results, target):
    """Draw bytes held per rank by the number of ranks: bars of runs, ticks of formulas, simulated lines."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(10, 4.2))
    lessons = sorted({r["lesson"] for r in results})
    runs = [r for r in results if r["losses"]]
    for i, lesson in enumerate(lessons):
        for r in (r for r in runs if r["lesson"] == lesson):
            x, bottom = r["world_size"] + (i - (len(lessons) - 1) / 2) * 0.8 / len(lessons), 0
            for part, color in PARTS.items():
                size = r["held"][part]["measured"] / 1e6
                left.bar(x, size, 0.7 / len(lessons), bottom, color=color)
                bottom += size
            formula = sum(r["held"][part]["formula"] for part in PARTS) / 1e6
            left.plot([x - 0.35 / len(lessons), x + 0.35 / len(lessons)], [formula] * 2, color=GREY)
            left.annotate(lesson, (x, bottom), (0, 3), textcoords="offset points", rotation=90, ha="center")
        far = sorted(
            (r for r in results if r["lesson"] == lesson and not r["losses"]), key=lambda r: r["world_size"]
        )
        total = [sum(r["held"][part]["measured"] for part in PARTS) / 1e9 for r in far]
        right.plot([r["world_size"] for r in far], total, marker="o", markersize=3, label=lesson)
    millions = {r["n_params"] / 1e6 for r in runs}
    left.set(title=f"measured, {max(millions):.2f} M parameters, fp32 (line: formula)", xlabel="ranks")
    left.set(ylabel="held per rank, MB", xticks=sorted({r["world_size"] for r in runs}))
    left.margins(y=0.25)
    left.legend(
        [left.bar(1, 0, color=color) for color in PARTS.values()], PARTS, frameon=False, labelcolor=GREY
    )
    billions = {r["n_params"] / 1e9 for r in results if not r["losses"]}
    right.set(title=f"simulated, {max(billions):.1f} G parameters, bf16", xlabel="ranks")
    right.set(ylabel="held per rank, GB", xscale="log", yscale="log")
    right.legend(frameon=False, labelcolor=GREY)
    save(figure, target)


def ratios(benches, target):
    """Draw the median ratio of each lesson to each of its peers, with its least and most over the rounds."""
    rows, dull = [], {"--size", "--batch", "--accum", "--schedule", "--chunks"}  # peers' names tell the rest
    for bench in benches:
        words = bench.get("flags", [])
        how = [f" {word}" for before, word in zip(["", *words], words) if not {before, word} & dull]
        where = f"{bench['hosts']} hosts, {bench['rate']}" if bench["hosts"] > 1 else "one host"
        for lesson, table in bench["lessons"].items():
            peers = {t: row for t, row in table.items() if ".py" not in t and t != "compute alone"}
            ours = f"{lesson}.py{''.join(how)}"
            rows += [(where, f"{ours} / {title}", row) for title, row in peers.items()]
    labels, places = list(dict.fromkeys(r[1] for r in rows)), list(dict.fromkeys(r[0] for r in rows))
    figure, axes = pyplot().subplots(figsize=(10, 0.8 + 0.34 * len(labels)))
    for i, place in enumerate(places):
        own = [(labels.index(label), row) for where, label, row in rows if where == place]
        ys = [y + (i - (len(places) - 1) / 2) * 0.36 for y, _ in own]
        spans = [
            [row["ratio"] - row["least"] for _, row in own],
            [row["most"] - row["ratio"] for _, row in own],
        ]
        axes.barh(ys, [row["ratio"] for _, row in own], 0.34, xerr=spans, ecolor=GREY, label=place)
    axes.axvline(1, color=GREY, linestyle="--")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(xlabel="time of a step, the lesson's over its peer's (median; least and most of the rounds)")
    axes.legend(frameon=False, labelcolor=GREY, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, target)


def main(kind, *paths):
    *sources, target = map(Path, paths)
    results = [json.loads(source.read_text()) for source in sources]
    if kind == "pipeline":
        target.write_text(pipeline(results[0]))
    elif kind == "overlap":
        target.write_text(overlap(results[0], sources[0].name.split("-rank")[0] + ".py"))
    else:
        {"checkpointing": checkpointing, "memory": memory, "ratios": ratios}[kind](results, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
