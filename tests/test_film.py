"""docs/films: a step of each lesson still does, in the same order, by the same lines, what its film shows."""

import json
import re

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
    return {
        what: [(lines[row[2]].strip(), row[3]) for row in lane[what]]
        for what in ("spans", "messages", "waits")
    }


@pytest.mark.parametrize("path", FILMS, ids=lambda path: path.stem)
def test_a_step_does_what_its_film_shows(path):
    film = json.loads(path.read_text())
    lines = [text for _, text in film["lines"]]
    kept = {name: done(lane, lines) for name, lane in film["lanes"].items()}
    found = {}
    for lanes in world(film["ranks"]).run(
        film_here, film["lesson"], f"{film['flags']} --context 16 --data {TEXT}"
    ):
        found |= lanes
    assert found.keys() == kept.keys()
    for name, lane in kept.items():
        for what, rows in lane.items():
            if not re.fullmatch(
                r"rank \d", name
            ):  # a thread, which meets others and the step's end as it likes
                assert set(rows) == set(found[name][what]), (
                    f"{name}: other {what}: ./run.sh films {path.stem}"
                )
                continue
            for row in zip(rows, found[name][what]):
                assert row[0] == row[1], f"{name}: other {what} than filmed: ./run.sh films {path.stem}"
            assert len(rows) == len(found[name][what]), (
                f"{name}: more or fewer {what}: ./run.sh films {path.stem}"
            )
    assert path.stat().st_size <= 60_000, "a film of more than 60 kB"
