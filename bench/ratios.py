"""All ratios that bench/bench.py has printed into the blocks of docs/results, as two tables and a picture.

A ratio is a lesson's time over that of its peer's fastest setting, in one place: one host; the same, slowed;
hosts with a link between them. PyTorch and DeepSpeed have rows of their own, and so has a peer that keeps all
weights where the lesson lets them go. After a ratio stands (step - compute alone) / step of the lesson. Bold:
the lesson was slower in all rounds.
"""

import re
from pathlib import Path
from typing import NamedTuple

RUN_SH = Path(__file__).resolve().parent.parent / "run.sh"
LESSONS = re.search(r"LESSONS=\(([^)]*)\)", RUN_SH.read_text())[1].split()  # in reading order
ALONE = "compute alone"
HEAD = re.compile(r"^(\w+)((?: --.*?)?) \| (\d+) ranks, (.*) \| (\d+) rounds \| torch ")
LINE = re.compile(r"^  (\S.*?) {2,}(\d+\.\d+) +(\d+\.\d+) +(\d+\.\d+) +(\d+\.\d+)")
USUAL = r" --(?:size small|batch 8|steps \d+|rounds \d+)(?= |$)"


class Line(NamedTuple):
    peer: str
    ms: float
    ratio: float
    least: float
    most: float


def tables(results):
    """((lesson, flags, ranks), place, lines) of each table."""
    for result in results.values():
        head = None
        for text in [*result["text"].split("\n"), ""]:
            if found := HEAD.match(text):
                lesson, flags, ranks, place, _ = found.groups()
                head, lines = (lesson, re.sub(USUAL, "", flags).strip(), int(ranks)), []
            elif head and (found := LINE.match(text)):
                lines.append(Line(found[1], *map(float, found.groups()[1:])))
            elif head and not text.strip():
                yield head, place, lines
                head = None


def kind_of(peer):
    """What a row is of: the library's own, or of PyTorch's with another job or with our reduce-scatter."""
    return next((words for words in ("DeepSpeed", "no reshard", "all-to-all") if words in peer), "")


def rows(results):
    """{(lesson, flags, ranks, kind of peer): {place: (its fastest Line, the part beyond compute alone)}}."""
    found = {}
    for head, place, lines in tables(results):
        if "host time" in place or "sleep" in place:
            continue
        own = lines[0].ms
        alone = [line.ms for line in lines if line.peer == ALONE]
        beyond = (own - alone[0]) / own if alone else None
        peers = [line for line in lines if line.peer != ALONE and not re.match(r"\w+\.py\b", line.peer)]
        for kind in dict.fromkeys(kind_of(line.peer) for line in peers):
            fastest = min((line for line in peers if kind_of(line.peer) == kind), key=lambda line: line.ms)
            found.setdefault((*head, kind), {})[place] = (fastest, beyond)
    return dict(sorted(found.items(), key=lambda row: LESSONS.index(row[0][0])))


COLUMNS = ["one host", "one host, slowed", "hosts, 1 Gbit/s each"]


def column_of(place):
    return place if place in COLUMNS else COLUMNS[2]


def name_of(key, places):
    """Of a row: lesson, ranks if not two, and flags; and the peer's fastest setting in the first place."""
    lesson, flags, ranks, _ = key
    own = f"{lesson}.py" + {1: ", 1 rank", 2: ""}.get(ranks, f", {ranks} ranks") + f", {flags}" * bool(flags)
    return f"{own} / {next(iter(places.values()))[0].peer}"


def cell(place, line, beyond, name):
    part = "" if beyond is None else f", {100 * beyond:.0f} %"
    rate = "" if place in COLUMNS or "1gbit" in place else " at " + place.split(", ")[1]
    other = "" if name.endswith(f" / {line.peer}") else f": {line.peer}"
    ratio = f"{line.ratio:.2f} ({line.least:.2f} to {line.most:.2f})"
    return (f"**{ratio}**" if line.least > 1 else ratio) + f"{part}{rate}{other}"


def table(found):
    head = ["lesson / its peer", *COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for key, places in found.items():
        name = name_of(key, places)
        cells = {column_of(place): cell(place, *entry, name) for place, entry in places.items()}
        lines.append(f"| {' | '.join([name, *(cells.get(column, '') for column in COLUMNS)])} |")
    return "\n".join(lines)


def slower(results):
    """The rows with a median above 1, in any place."""
    found = rows(results)
    above = {key: at for key, at in found.items() if any(line.ratio > 1.004 for line, _ in at.values())}
    return table(above)


def all_ratios(results):
    return table(rows(results))
