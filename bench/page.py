"""What each idea buys, and how fast each lesson is beside its peers: docs/results/speed.md.

    python bench/page.py                (half an hour; Linux and root, for the link: see bench/hosts.sh)
    python bench/page.py ddp zero3      (only these; flags as bench/bench.py has them)

A lesson's naive version -> the real one. MB held: the most that a rank has at any moment of a step; MB sent:
by a rank in a step; both as tools/ledger.py counts them. ms: the median time of a step; in brackets the real
version's over the naive one's in the same round, the median. Then the peers: the lesson's time over the
peer's, median (least to most), the slowest first.
"""

import json
import os
import shutil
import statistics
import sys
from argparse import Namespace

import bench  # which finds the tools

# isort: split
import run
from lessons import path_of, special

LINE = "{:<18}{:>5}  {:<17}{:>16}{:>16}{:>22}{:>22}"


def counted(name, ranks, flags):
    """(bytes held at one moment, bytes sent, ms) of a step, as tools/ledger.py has them."""
    shutil.rmtree("runs/page", ignore_errors=True)
    words = ["--json", "runs/page.json", str(path_of(name).relative_to(bench.ROOT)), *flags]
    if not run.run("page", "tools/ledger.py", words, ranks):
        sys.exit(f"page.py: {name} failed: see runs/page.log")
    with open("runs/page.json") as file:
        result = json.load(file)
    sent = sum(row["wire"] for way, row in result["sent"].items() if way not in ("down", "up"))
    sent /= getattr(bench.load(name).parse(flags), "inner_steps", 0) or 1  # from one exchange to the next
    return result["peak_bytes"], sent, statistics.fmean(result["step_ms"][2:] or [0])


def ratios(times, other):
    """[the lesson's time over another contender's, in each round], in order."""
    first = next(iter(times.values()))
    return sorted(own / its for own, its in zip(first, times[other]))


def rows_of(name, options):
    """(the row of what the idea buys, or None; [(ratio on one host, row) of each peer])."""
    ranks, *more = special(name, "RACE", "2").split()
    ranks, naive = int(ranks), special(name, "AGAINST") or special(name, "NAIVE")
    is_alone = more[:1] == ["alone"]  # bench.py cannot time it
    flags = [*options.flags, *more[is_alone:]]
    here = vars(options) | {"ranks": ranks, "flags": flags, "also": [naive.split()] * bool(naive)}
    found = []
    for hosts in [] if is_alone or not naive else [1, 2][:ranks]:
        rows = bench.launch(name, Namespace(**here | {"hosts": hosts}))["rows"]
        found.append({title: row["times"] for title, row in rows.items()})
    row = None
    if naive:
        launched = special(name, "RUN", "torchrun").startswith("torchrun")
        versions = naive.split(), []
        both = [counted(name, ranks if launched else None, [*flags, *version]) for version in versions]
        cells = [f"{one / 1e6:.1f} -> {other / 1e6:.1f}" for one, other in list(zip(*both))[:2]]
        for times in found:
            real, other = map(statistics.median, list(times.values())[:2])
            ratio = statistics.median(ratios(times, list(times)[1]))
            cells.append(f"{other:.0f} -> {real:.0f} ({ratio:.2f})")
        if not found:
            cells.append(f"{both[0][2]:.0f} -> {both[1][2]:.0f}")
        row = LINE.format(name, ranks if launched else 1, naive, *cells, *["-"] * (4 - len(cells)))
    peers = []
    for title in [title for title in (found or [{}])[0] if ".py" not in title and title != bench.ALONE]:
        each = [ratios(times, title) for times in found]
        cells = [f"{statistics.median(own):.2f} ({own[0]:.2f} to {own[-1]:.2f})" for own in each]
        peers.append(
            (-statistics.median(each[0]), f"{name:<18}{title:<50}" + "".join(f"{c:>22}" for c in cells))
        )
    return row, peers


def main(options):
    os.makedirs("runs", exist_ok=True)
    peers = []
    link = options.rate
    print(
        LINE.format("lesson", "ranks", "naive", "MB held", "MB sent", "ms, one host", f"ms, {link}"),
        flush=True,
    )
    for name in options.lessons:
        try:
            row, found = rows_of(name, options)
        except SystemExit as error:  # the others can go on
            row, found = f"{name:<18}{error}", []
        peers += found
        if row:
            print(row, flush=True)
    print(f"\n{'lesson':<18}{'peer':<50}{'one host':>22}{link:>22}")
    print(*(row for _, row in sorted(peers)), sep="\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(bench.ROOT)
    given = sys.argv[1:]
    names = [] if given and not given[0].startswith("-") else list(bench.lessons())
    main(bench.parse([*names, *given]))
