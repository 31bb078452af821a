"""docs/films: a step of each lesson still does, in the same order, by the same lines, what its film shows."""

import json
import re
from itertools import zip_longest

import pytest
import torch.distributed as dist

from tests.harness import ROOT, TEXT, load, world

FILMS = sorted((ROOT / "docs/films").glob("*.json"))


def film_here(name, flags):
    """On a rank: {lane: {spans, messages, waits: [(text of the line, what)]}}."""
    lesson, ledger = load(name), load("tools/ledger")
    film = load("tools/film").Film(lesson)
    ledger.run(lesson, lesson.parse(flags.split()), None, film)
    return {name: done(lane, film.text) for name, lane in film.lanes(dist.get_rank()).items()}


def done(lane, lines):
    row_of = lambda span: (lines[span[2]].strip(), span[3])  # noqa: E731
    return {what: [*map(row_of, lane[what])] for what in ("spans", "messages", "waits")}


@pytest.mark.parametrize("path", FILMS, ids=lambda path: path.stem)
def test_a_step_does_what_its_film_shows(path):
    assert path.stat().st_size <= 60_000, "a film of more than 60 kB"
    film, found = json.loads(path.read_text()), {}
    lines = [text for _, text in film["lines"]]
    kept = {name: done(lane, lines) for name, lane in film["lanes"].items()}
    flags = f"{film['flags']} --context 16 --data {TEXT}"
    for lanes in world(film["ranks"]).run(film_here, film["lesson"], flags):
        found |= lanes
    assert found.keys() == kept.keys()
    for name, lane in kept.items():
        for what, rows in lane.items():
            pairs = zip_longest(rows, found[name][what])
            if not re.fullmatch(r"rank \d", name):  # a thread, which meets others as it likes
                pairs = [(set(rows), set(found[name][what]))]
            for row, own in pairs:
                assert row == own, f"{name}: other {what} than filmed: ./run.sh films {path.stem}"
