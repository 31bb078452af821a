"""The exercises of learn: each can be done, by doing it alone; what it tells of a bug is what runs show."""

import json
import os
import random
from unittest import mock

import pytest

from tests.harness import load, said

HANGS = ("dist.all_reduce(squares)", "dist.get_rank() or dist.all_reduce(squares)")
PARITY = "assert round(run(2)['losses'][-1] - plain()['losses'][-1], 6) == 0"


def broken(learn, path, lesson, text):
    """The first promise that this text of a lesson breaks, and how."""
    path.write_text(text)
    return next(((promise, how) for promise, how in learn.promises(str(path), lesson) if how), ("", ""))


def check_exercises(learn, folder):
    path = learn.read_path()
    if not os.environ.get("FUZZ"):  # survive.py's promises take a minute: all orders of messages
        path = random.sample([row for row in path if not row[0].startswith("survive")], len(path) // 10)
    for name, what, _, hint in path:
        lesson, text, _ = learn.made(name)
        promise, how = broken(learn, folder / f"{name}.py", lesson, text)
        assert f"NotImplementedError: {hint}" in how, f"{name}, without {what}: {promise}: {how}"
    lessons = {name.split("-")[0] for name, *_ in path}
    with mock.patch.dict(learn.SIZES, dict.fromkeys(lessons - {"single"}, (2,))):
        for lesson in lessons:
            assert not any(how for _, how in learn.promises(f"{learn.ROOT}/{lesson}.py", lesson)), lesson


def check_bugs(learn, folder):
    known = [bug for bug in learn.bugs() if "it hangs" not in bug[-1][-1]]  # check_cheats() has one that does
    assert len(known) >= 60
    for number in random.Random(len(known)).sample(range(len(known)), 2):
        lesson, text, symptom = known[number]
        promise, how = broken(learn, folder / f"bug{number}.py", lesson, text)
        assert promise in symptom[-1], (symptom, promise, how)  # numbers may be of memory never written


def check_cheats(learn, folder):
    _, single = learn.lesson_of("single")
    alone = single.replace("if world_size > 1:", "if False:")
    promise, _ = broken(learn, folder / "cheat.py", "zero1", alone)
    assert "bytes" in promise, promise
    _, zero1 = learn.lesson_of("zero1")
    with mock.patch.dict(learn.run.__wrapped__.__globals__, SECONDS=6):
        _, how = broken(learn, folder / "hang.py", "zero1", zero1.replace(*HANGS))
    assert how.startswith("it hangs: rank 0 waits in all_reduce(), line"), how


def check_files(learn, folder):
    learn.write("bug1", False)
    (folder / "bug1.py").write_text("1 / 0")
    assert "exists" in said(lambda: learn.write("bug1", False))[1][0]
    out, _, code = said(lambda: learn.check("bug1"))
    assert code == 1 and "division by zero" in out and "attempt 1" in out, out
    assert json.loads((folder / ".progress.json").read_text()) == {"bug1": {"attempts": 1, "done": False}}
    assert "NotImplementedError" not in said(lambda: learn.show("ddp"))[0]


def check_hints(learn, folder):
    _, source = learn.lesson_of("ddp")
    path = folder / "bug0.py"
    path.write_text(source.replace("1 / dist.get_world_size()", "1"))
    for attempts, known in {2: False, 3: True}.items():
        words = learn.hint(str(path), "ddp", "2 ranks: gradient norms are the plain loop's", attempts)
        assert "step 1, reduction" in words and ("Bucket.collect" in words) == known, words


def check_answers(learn, folder):
    answers = iter(["abc(", "wP", *["1"] * 9])
    with mock.patch("builtins.input", lambda _: next(answers)):
        out = said(lambda: learn.predict("zero3"))[0]
    assert "cannot read 'abc('" in out
    right = [line.split()[1] for line in out.splitlines() if line.startswith("  no:")]
    with mock.patch("builtins.input", lambda _: right.pop(0)):
        assert said(lambda: learn.predict("zero3"))[0].count("right") == 5, out
    learn.write("catch1", False)
    checks = {"pass": "it holds there, too", PARITY: None}
    for check, expected in checks.items():
        (folder / "catch1.py").write_text(f"def check(run, plain):\n    {check}\n")
        found = [how for _, how in learn.catch_promises(str(folder / "catch1.py"), "")]
        assert found[0] is None and expected in (found[1], None), (check, found)


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


CHECKS = (check_exercises, check_bugs, check_cheats, check_files, check_hints, check_answers, check_trouble)


@pytest.mark.parametrize("check", CHECKS)
def test_learning(check, tmp_path):
    learn = load("learn")
    learn.EXERCISES = tmp_path
    check(learn, tmp_path)
