"""The exercises of learn: each can be done, by doing it alone; what it tells of a bug is what runs show."""

import importlib
import json
import os
import random
import re
import textwrap
from pathlib import Path
from unittest import mock

import pytest

from tests.bugs import BUGS
from tests.harness import load, said
from tests.lazy import HONEST, LAZY

load("learn")  # it puts tools/ on the path
promises = importlib.import_module("promises")
HANGS = ("dist.all_reduce(squares)", "dist.get_rank() or dist.all_reduce(squares)")
ANSWER = """RANKS, FLAGS = {}
def check(found, right):
    {}
"""
FIRST = "assert round(found['{0}'][-1] - right['{0}'][-1], 6) == 0"


def broken(learn, path, lesson, text):
    """The first promise that this text of a lesson breaks, and how."""
    path.write_text(text)
    return next(((promise, how) for promise, how in promises.promises(str(path), lesson) if how), ("", ""))


def check_exercises(learn, folder):
    path = learn.read_path()
    if not os.environ.get("FUZZ"):  # survive.py's promises take a minute: all orders of messages
        path = random.sample([row for row in path if not row[0].startswith("survive")], len(path) // 15)
    for name, what, _, hint in path:
        lesson, text, _ = learn.made(name)
        promise, how = broken(learn, folder / f"{name}.py", lesson, text)
        assert f"NotImplementedError: {hint}" in how, f"{name}, without {what}: {promise}: {how}"
    lessons = {name.split("-")[0] for name, *_ in path}
    with mock.patch.dict(promises.SIZES, dict.fromkeys(lessons - {"single"}, (2,))):
        for lesson in lessons:
            assert not any(how for _, how in promises.promises(f"{learn.ROOT}/{lesson}.py", lesson)), lesson


def answered(learn, name, text):
    """(lesson, its source with an answer in the places of what the exercise leaves out)."""
    lesson, source = learn.lesson_of(name)
    what = next(row[1] for row in learn.read_path() if row[0] == name)
    missing = learn.missing_in(source, what)
    parts = [textwrap.dedent(part).strip() for part in re.split("^ *---$", text, flags=re.M)]
    lines = source.splitlines()
    for (first, last, indentation), part in reversed(list(zip(missing, parts, strict=True))):
        if part != "...":
            lines[first:last] = textwrap.indent(part, " " * indentation).splitlines()
    return lesson, "\n".join(lines) + "\n"


def drawn(rows):
    """All in ./run.sh fuzz; half, without those that take a minute, in ./run.sh test learn; else two."""
    kept = [row for row in rows if not row[0].startswith("survive") or os.environ.get("FUZZ")]
    number = len(kept) if os.environ.get("FUZZ") else len(kept) // 2 if os.environ["MUTANTS"] == "all" else 2
    return sorted(random.sample(kept, number), key=lambda row: row[0])  # a lesson's own runs are cached


def check_table(learn, folder):
    """Each exercise has a lazy answer and two honest ones; each answer fits its exercise."""
    names = [name for name, *_ in learn.read_path()]
    lazy, honest = ([row[0] for row in rows] for rows in (LAZY, HONEST))
    assert {name for name in names if name not in lazy or honest.count(name) < 2} == set()
    for name, *_, text in (*LAZY, *HONEST):
        compile(answered(learn, name, text)[1], name, "exec")


def check_lazy(learn, folder):
    for i, (name, reason, text) in enumerate(drawn(LAZY)):
        lesson, source = answered(learn, name, text)
        promise, how = broken(learn, folder / f"{name}-{i}.py", lesson, source)
        assert reason in f"{promise}: {how}", f"{name}, for {reason!r}: {promise}: {how}"


def check_honest(learn, folder):
    for i, (name, text) in enumerate(drawn(HONEST)):
        lesson, source = answered(learn, name, text)
        # Of several numbers of ranks one will do.
        sizes = {lesson: (min(2, promises.SIZES.get(lesson, (2,))[-1]),)}
        with mock.patch.dict(promises.SIZES, sizes):
            promise, how = broken(learn, folder / f"{name}-{i}.py", lesson, source)
        assert not how, f"{name}, an honest answer: {promise}: {how}"


def check_bugs(learn, folder):
    """All fit, show, and are told by no mark in their text; of two, what is told is what runs show."""
    known = learn.bugs()
    assert len(known) == len(BUGS) >= 60, "a bug of which nothing shows, or two with one name"
    for name, (lesson, text, *_) in known.items():
        _, source = learn.lesson_of(lesson)
        old = next(row[1] for key, row in learn.find_bugs().items() if key == name)
        assert source.count(old) == 1, f"{name}: {lesson}.py has {source.count(old)} times: {old}"
        marks = re.compile(r"^\s*pass\b|\bif (False|True|0):| or True|[^\S\n]+$|; |  #\w", re.M)
        assert len(marks.findall(text)) <= len(marks.findall(source)), f"{name} is known by its look"
    calm = [name for name in known if "hangs" not in known[name][2][-1] and known[name][0] != "survive"]
    for name in random.sample(calm, 2):
        lesson, text, symptom, *_ = known[name]
        promise, how = broken(learn, folder / f"{name}.py", lesson, text)
        assert promise in symptom[-1], (symptom, promise, how)  # numbers may be of memory never written


def check_cheats(learn, folder):
    _, single = learn.lesson_of("single")
    alone = single.replace("if world_size > 1:", "if False:")
    promise, _ = broken(learn, folder / "cheat.py", "zero2", alone)
    assert "bytes" in promise, promise
    _, zero1 = learn.lesson_of("zero1")
    with mock.patch.dict(promises.run.__wrapped__.__globals__, SECONDS=6):
        _, how = broken(learn, folder / "hang.py", "zero1", zero1.replace(*HANGS))
    assert how.startswith("it hangs: rank 0 waits in all_reduce(), line"), how


def check_files(learn, folder):
    key = next(iter(learn.bugs()))
    name = f"bug-{key}"
    learn.write(name, False)
    (folder / f"{name}.py").write_text("1 / 0")
    assert "exists" in said(lambda: learn.write(name, False))[1][0]
    out, _, code = said(lambda: learn.check(name))
    assert code == 1 and "division by zero" in out and "attempt 1" in out, out
    promises.run.cache_clear()
    (folder / f"{name}.py").write_bytes(b"x = '\xe9'")
    assert "SyntaxError" in said(lambda: learn.check(name))[0], "a file that is no UTF-8"
    assert json.loads(learn.PROGRESS.read_text()) == {name: {"attempts": 2, "done": False}}
    learn.write(name, True)
    assert (folder / "old" / f"{name}-0.py").read_bytes() == b"x = '\xe9'", "work is lost"
    assert "NotImplementedError" not in said(lambda: learn.show("ddp"))[0]
    assert "no lesson is done" in said(learn.new_bug)[1][0]
    learn.PROGRESS.write_text(json.dumps({"zero1-units": {"attempts": 1, "done": True}}))
    assert learn.bugs()[learn.new_bug()][0] == "zero1"


def check_committed(learn, folder):
    """A lesson that the learner has edited is taken as committed, and one line says so."""
    sources = load("tools/sources")
    git = mock.Mock(return_value=mock.Mock(returncode=0, stdout=b"as committed"))
    with mock.patch.object(sources.subprocess, "run", git):
        assert sources.original("ddp") == f"{learn.ROOT}/ddp.py", "tools take files as they are"
        sources.original.cache_clear()
        sources.AS_COMMITTED = True
        _, errors, _ = said(lambda: folder.joinpath("path").write_text(sources.original("ddp")))
    assert errors == ["ddp.py has been edited: its committed text is used."]
    assert Path((folder / "path").read_text()).read_text() == "as committed"


def check_hints(learn, folder):
    _, source = learn.lesson_of("ddp")
    path = folder / "bug0.py"
    path.write_text(source.replace("1 / dist.get_world_size()", "1"))
    for attempts, known in {2: False, 3: True}.items():
        words = learn.hint(str(path), "ddp", "2 ranks: gradient norms are the plain loop's", attempts)
        assert "step 1, reduction" in words and ("Bucket.collect" in words) == known, words


def check_catches(learn, folder):
    """A slip is shown by the cheapest run, and by one thing that it changes."""
    rows = learn.catches()
    assert len(rows) >= 20
    number = next(i for i, row in enumerate(rows, 1) if row[0] == "zero1" and row[-1] == 2)
    name = f"catch-{number}"
    learn.write(name, False)
    path = folder / f"{name}.py"
    cases = {  # (ranks and flags, check): what is said
        ("(1, '')", "pass"): "it holds there, too",
        ("(2, '')", FIRST.format("grad_norms")): None,
        ("(3, '')", FIRST.format("grad_norms")): "it costs 3; one of 2 does",
        ("(2, '')", FIRST.format("losses") + "; " + FIRST.format("grad_norms")): "at grad_norms, losses",
        ("(2, '')", "assert not found['losses']"): "AssertionError",
    }
    for (how, check), expected in cases.items():
        path.write_text(ANSWER.format(how, check))
        found = next((how for _, how in learn.catch_promises(str(path), "") if how), None)
        assert found == expected or (expected and found.startswith(expected)), (how, check, found)


def check_trouble(learn, folder):
    trouble = load("tools/trouble")
    known = json.loads(trouble.SEEN.read_text())
    assert trouble.page(known) == trouble.PAGE.read_text(), "docs/trouble.md is old: python tools/trouble.py"
    for symptom in ("norm 1", "loss 2"):
        shown = [key for key, seen in known.items() if symptom in seen.values() and "zero" in key]
        key = random.Random(len(known)).choice(shown)
        lesson, old, new = trouble.find_mutants()[key]
        file = folder / f"{symptom}.py"  # its runs are cached by its path
        file.write_text((learn.ROOT / f"{lesson}.py").read_text().replace(old, new))
        seen = trouble.observe(str(file), lesson)
        assert seen == known[key], f"{key}: docs/trouble.json says otherwise"


CHECKS = check_table, check_lazy, check_honest, check_exercises, check_bugs, check_cheats, check_files
CHECKS += check_committed, check_hints, check_catches, check_trouble


@pytest.mark.parametrize("check", CHECKS)
def test_learning(check, tmp_path):
    learn = load("learn")
    learn.EXERCISES = tmp_path
    learn.PROGRESS = tmp_path / "progress.json"
    check(learn, tmp_path)
