"""The exercises of learn: each can be done, no lazy answer passes, every slip shows; what learn.py says."""

import ast
import functools
import importlib
import os
import random
import re
import subprocess
import sys
import textwrap
from unittest import mock

import pytest

from tests.harness import ROOT, load, said
from tests.lazy import HONEST, LAZY

learn = load("learn")  # it puts tools/ on the path
learn.missing_in = functools.cache(learn.missing_in)
promises = importlib.import_module("promises")
lessons = importlib.import_module("lessons")
EXERCISES, SLIPS = learn.read_table()


@pytest.fixture
def folder(tmp_path):
    with mock.patch.object(learn, "EXERCISES", tmp_path):
        yield tmp_path


def answered(name, piece, text):
    """A lesson's source with an answer, or with this text for a piece of the lesson's own."""
    _, source, _, exercise = learn.made(name)
    lines = source.splitlines()
    missing = learn.missing_in(source, exercise.missing)
    own = ["\n".join(lines[first:last]) for first, last, _ in missing]
    assert not piece or sum(part.count(piece) for part in own) == 1, f"{name}: {piece}"
    parts = re.split(r"^ *---$\n", text, flags=re.M)
    for i, (first, last, indentation) in reversed(list(enumerate(missing))):
        part = textwrap.indent(textwrap.dedent(parts[min(i, len(parts) - 1)]).strip(), " " * indentation)
        part = own[i].replace(piece, text) if piece else part
        if part.strip() != "...":
            lines[first:last] = part.splitlines()
    assert piece or len(parts) == len(missing), name
    return "\n".join(lines) + "\n"


def drawn(rows, number):
    """All in ./run.sh fuzz, else so many; without those that take a minute."""
    rows = list(rows)
    if os.environ.get("FUZZ"):
        return rows
    return random.sample([row for row in rows if "survive" not in str(row)], number)


def first_broken(folder, name, text):
    path = folder / f"{name}-{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    return promises.symptom_of(str(path), name.partition("-")[0]).splitlines()[-1]


# ---- the table, and the answers ----


def test_the_table_is_complete_and_fits_the_lessons():
    having = {name.partition("-")[0] for name in EXERCISES}  # a lesson may have none
    assert having <= set(lessons.lessons())
    in_order = [name for name in lessons.lessons() if name in having]
    assert list(SLIPS) == [f"{name}-bug{number}" for name in in_order for number in (1, 2)]
    for name in EXERCISES:
        assert sum(row[0] == name for row in LAZY) == 2 and name in {row[0] for row in HONEST}, name
    for name, piece, text in [*(row[:3] for row in LAZY), *HONEST]:
        compile(answered(name, piece, text), name, "exec")
    for name in EXERCISES | SLIPS:
        compile(learn.made(name)[2], name, "exec")


def texts_of(tree):
    lines = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return [line.value for line in lines if isinstance(line, ast.Constant)]


def test_a_slip_is_an_edit_of_code():
    for name, slip in SLIPS.items():
        _, source, text, _ = learn.made(name)
        assert source.count(slip.right) == 1, f"{name} fits {source.count(slip.right)} times"
        right, wrong = ast.parse(source), ast.parse(text)
        assert ast.dump(right) != ast.dump(wrong), f"{name} changes no code"
        assert texts_of(right) == texts_of(wrong), f"{name} changes a docstring"
        for line in (slip.right + "\n" + slip.wrong).strip("\n").split("\n"):
            assert line.strip() and "  #" not in line and not line.strip().startswith("#"), f"{name}: {line}"


def test_no_answer_at_all_is_too_lazy(folder):
    for name in drawn(EXERCISES, 1):
        found = first_broken(folder, name, learn.made(name)[2])
        assert f"NotImplementedError: {EXERCISES[name].task}" in found, f"{name}: {found}"


def test_no_lazy_answer_passes(folder):
    for name, piece, text, reason in drawn(LAZY, 3):
        found = first_broken(folder, name, answered(name, piece, text))
        assert found.startswith("no: ") and reason in found, f"{name}, for {reason!r}: {found}"


def test_honest_answers_pass(folder):
    for name, piece, text in drawn(HONEST, 1):
        found = first_broken(folder, name, answered(name, piece, text))
        assert found == "it keeps all promises", f"{name}: {found}"


def test_every_slip_shows(folder):
    for name in drawn(SLIPS, 2):
        found = first_broken(folder, name, learn.made(name)[2])
        assert found.startswith("no: "), f"{name}: {found}"


def test_a_run_that_hangs_is_told_where(folder):
    text = learn.made("zero1")[1].replace(
        "dist.all_reduce(squares)", "dist.get_rank() or dist.all_reduce(squares)"
    )
    with mock.patch.object(promises, "SECONDS", 8):
        assert "it hangs: rank 0 waits in all_reduce(), line" in first_broken(folder, "zero1", text)


# ---- what a learner sees ----


def test_an_exercise_from_path_to_done(folder):
    name = "single"
    assert f"Next: python learn.py fill {name}" in said(lambda: learn.list_path(""))[0]
    learn.write(name)
    assert "exists; delete it" in said(lambda: learn.write(name))[1][0]
    (folder / f"{name}.py").write_bytes(b"x = '\xe9'")  # no UTF-8
    out, _, code = said(lambda: learn.check(name))
    assert code == 1 and "SyntaxError" in out and "Not yet. Next: python learn.py hint" in out, out
    for given in (1, 2, 3):
        out, *_ = said(lambda: learn.give_hint(name))
        assert [out.count(f"{number}. ") for number in (1, 2, 3)] == [
            number <= given for number in (1, 2, 3)
        ], out
    promises.run.cache_clear()
    (folder / f"{name}.py").write_text(learn.made(name)[1])
    out, *_ = said(lambda: learn.check(name))
    assert "Done.\nThe lesson's own lines: python learn.py show" in out and learn.read_progress() == {
        name: "done"
    }, out
    out, *_ = said(lambda: learn.list_path("all"))
    assert f"done {name} " in out and "Next: python learn.py fill collectives-real" in out, out


def test_a_bug_is_of_a_lesson_that_is_done(folder):
    assert "no slip is left" in said(lambda: learn.new_bug(""))[1][0]
    assert learn.new_bug("ddp").startswith("ddp-bug")
    learn.note("single", "done")
    name = learn.new_bug("")
    with mock.patch.object(promises, "symptom_of", lambda path, lesson: f"no:  of {lesson}"):
        assert "no:  of single" in said(lambda: learn.write(name))[0] and name.startswith("single-bug")
    assert SLIPS[name].right in said(lambda: learn.show(name))[0]


@pytest.mark.parametrize("text", ["[1]", "{", "3"])
def test_a_damaged_progress_file_is_one_line(folder, text):
    (folder / "progress.json").write_text(text)
    _, errors, code = said(lambda: learn.list_path(""))
    assert code == 2 and len(errors) == 1 and "mend or delete it" in errors[0]


def test_the_path_needs_no_torch_and_its_next_exercise_is_of_the_shortest_track(folder):
    code = "import learn, sys; learn.list_path(''); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)
    order = []
    while found := re.search(r"Next: python learn.py fill ([\w-]+)", said(lambda: learn.list_path(""))[0]):
        order.append(found[1])
        learn.note(found[1], "done")
    evening, week = learn.on_track("evening"), learn.on_track("week")
    assert order[: len(evening)] == evening and set(order[: len(week)]) == set(week)
    assert sorted(order) == sorted(EXERCISES)


def test_without_torch_the_python_of_venv_goes_on(folder):
    missing = mock.patch.object(learn, "main", side_effect=ModuleNotFoundError(name="torch"))
    with missing, mock.patch.object(learn, "ROOT", folder), mock.patch.object(learn.os, "execv") as start:
        _, (problem,), code = said(learn.run)
        assert code == 2 and "torch is missing: ./run.sh" in problem and not start.called
        python = folder / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.touch()
        learn.run()
        assert start.call_args[0][1] == [python, *sys.argv], "not with the same words"
