"""docs/films: a step of each lesson still does, in the same order, by the same lines, what its film shows."""

import json
import re
from itertools import zip_longest

import pytest
import torch.distributed as dist

from tests.harness import ROOT, TEXT, load, world

KINDS = "parameters", "optimizer"
FILMS = sorted((ROOT / "docs/films").glob("*.json"))


def film_here(name, flags):
    """On a rank: {lane: {spans, messages, waits: [(text of the line, what)], at its end: bytes}}."""
    lesson, ledger = load(name), load("tools/ledger")
    film = load("tools/film").Film(lesson)
    ledger.run(lesson, lesson.parse(flags.split()), None, film)
    lanes, most = film.lanes(dist.get_rank()), film.held()
    for kind in ("gradients", *KINDS):
        shown = [row[3] for lane in lanes.values() for row in lane["held"] if row[2] == kind]
        assert max(shown, default=0) >= 0.95 * most[kind], f"less {kind} than tools/ledger.py measures"
    return {name: done(lane, film.text) for name, lane in lanes.items()}


def done(lane, lines):
    rows = {key: [(lines[row[2]].strip(), row[3]) for row in lane[key]] for key in lane if key != "held"}
    return rows | {"held": {kind: size for _, _, kind, size in lane["held"] if kind in KINDS}}  # at its end


@pytest.mark.long_table
@pytest.mark.parametrize("path", FILMS, ids=lambda path: path.stem)
def test_a_step_does_what_its_film_shows(path):
    assert path.stat().st_size <= 64_000, "a film of more than 64 kB"
    film, found = json.loads(path.read_text()), {}
    kept = {name: done(lane, [text for _, text in film["lines"]]) for name, lane in film["lanes"].items()}
    flags = f"{film['flags']} --context 16 --data {TEXT}"
    for lanes in world(film["ranks"]).run(film_here, film["lesson"], flags):
        found |= lanes
    assert found.keys() == kept.keys()
    lines = {line.strip() for line in (ROOT / f"{path.stem}.py").read_text().splitlines()}
    for name, lane in kept.items():
        held, own = lane.pop("held"), found[name].pop("held")
        again = f"than filmed: ./run.sh films {path.stem}"
        # What a thread does in a step beside forward, backward and update, is by chance.
        if not re.fullmatch(r"rank \d", name):
            computed = [
                {(text, what[0]) for text, what in spans if what[0] in "FBO"}
                for spans in (lane["spans"], found[name]["spans"])
            ]
            assert computed[0] == computed[1], f"{name}: other lines {again}"
            of_film = {text for rows in lane.values() for text, _ in rows}
            assert of_film <= lines, f"{name}: other lines {again}"
            continue
        assert held == pytest.approx(own, rel=0.05, abs=2e5), f"{name}: holds {own}"
        for what, rows in lane.items():
            for row, own in zip_longest(rows, found[name][what]):
                assert row == own, f"{name}: other {what} {again}"
