"""docs/exercises.md and the tracks, and what learn.py makes of them: hints, comparisons, questions."""

import ast
import functools
import importlib
import json
import pkgutil
import random
import re
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.harness import ROOT, load, said

learn = load("learn")
NOTES = learn.read_notes()
TORCH = Path(torch.__file__).parent.parent
EXERCISES = [name for name, *_ in learn.read_path()]


@pytest.fixture
def folder(tmp_path):
    learn.EXERCISES = tmp_path
    learn.PROGRESS = tmp_path / "progress.json"
    return tmp_path


def answered(call, *answers):
    """What a call prints that gets these answers to what it asks."""
    given = iter(answers)
    with mock.patch("builtins.input", lambda question: (print(question), next(given))[1]):
        return said(call)[0]


# ---- the page ----


def test_every_exercise_has_three_hints_the_last_with_code_and_five_lines():
    assert list(NOTES) == EXERCISES
    for name, (_, hints, lines) in NOTES.items():
        assert len(hints) == 3 and len(lines) == 5, f"{name}: {len(hints)} hints, {len(lines)} lines"
        assert ["```" in hint for hint in hints] == [False, False, True], name
        assert "..." in hints[2] or name == "zero3-unit", f"{name}: the third hint leaves nothing open"


def test_no_hint_has_a_line_of_the_answer():
    for name, what, *_ in learn.read_path():
        _, source = learn.lesson_of(name)
        own = set(learn.emptied(source, what, "").splitlines())
        answer = {line.strip() for line in source.splitlines() if line not in own and len(line.strip()) > 40}
        answer = {line for line in answer if not line.endswith(":")}  # a loop may be told
        told = {line.strip() for hint in NOTES[name][1] for line in hint.splitlines()}
        assert not answer & told, f"{name}: {answer & told}"


@functools.cache
def text_of(path):
    return path.read_text() if path.is_file() else ""


def problem_of(quote, source):
    """Why a line that is quoted in backticks is not where it should be, or None."""
    path, _, text = quote.partition(": ")
    if quote.startswith("megatron/"):
        return None if path.endswith(".py") and text else "has no path or no line"
    if quote.startswith("torch/"):
        return None if text and text in text_of(TORCH / path) else "is not in torch"
    if quote in source:
        return None
    if quote.startswith("torch."):
        with warnings.catch_warnings(action="ignore"), suppress(AttributeError, ImportError):
            pkgutil.resolve_name(quote)
            return None
        return "is no name of torch"
    return "is not in the lesson"


def test_every_line_that_a_comparison_quotes_exists():
    page = re.search(r"in torch (\d+\.\d+)", learn.NOTES.read_text())[1]
    for name, (_, _, lines) in NOTES.items():
        _, source = learn.lesson_of(name)
        for quote in re.findall("`([^`]+)`", "\n".join(lines)):
            if not quote.startswith("torch") or torch.__version__.startswith(page):
                problem = problem_of(quote, source)
                assert not problem, f"{name}: {quote} {problem}"
    for wrong in "torch/nn/functional.py: def nothing", "torch.nn.Nothing", "nothing = 1", "megatron/core":
        assert problem_of(wrong, "something = 1"), wrong


# ---- the tracks ----


@pytest.mark.parametrize("track", [*learn.TRACKS, "all"])
def test_what_an_exercise_needs_comes_before_it(track):
    seen = {"nothing"}
    for name in learn.on_track(track):
        assert set(NOTES[name][0].split(", ")) <= seen, f"{track}: {name} comes before {NOTES[name][0]}"
        seen.add(name)
    assert seen - {"nothing"} <= set(EXERCISES)


def test_no_file_of_the_evening_has_a_later_ones_answer():
    texts = {name: learn.made(name)[1] for name in learn.on_track("evening")}
    for i, name in enumerate(texts):
        _, source = learn.lesson_of(name)
        answer = set(source.splitlines()) - set(texts[name].splitlines())
        answer = {line.split("  #")[0].strip() for line in answer}
        for earlier in list(texts)[:i]:
            found = [line for line in answer if len(line) > 20 and line in texts[earlier]]
            assert not found, f"exercises/{earlier}.py has {found[0]}, of {name}"


def test_the_path_needs_no_torch():
    code = "import runpy, sys; runpy.run_path('learn.py', run_name='__main__')"
    code += "; assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    assert "Next: python learn.py fill" in shown.stdout


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
        with mock.patch.object(sys, "prefix", str(folder / ".venv")):  # it is that Python that lacks torch
            assert said(learn.run)[2] == 2


def test_a_module_that_an_answer_lacks_is_not_taken_for_torch():
    missing = mock.patch.object(learn, "main", side_effect=ModuleNotFoundError(name="einops"))
    with missing, pytest.raises(ModuleNotFoundError):
        learn.run()


def test_a_bug_says_how_to_see_it(folder):
    for name, wanted in (
        ("zero1-e837", "--dtype bf16"),
        ("zero2-7cf0", "--accum 3"),
        ("single-3bc2", "python "),
    ):
        out, *_ = said(lambda name=name: learn.write(f"bug-{name}", False))
        command = re.sub(r"\s+", " ", out.partition("To see")[2])
        ranks, accum = (
            int((re.search(f"{name} ?=?(\\d)", command) or "11")[1]) for name in ("node", "accum")
        )
        assert wanted in command and "--batch 12" in command and 12 % (ranks * accum) == 0, out


def test_next_is_the_shortest_track_that_is_not_done():
    progress = {}
    order = []
    while learn.next_on_path(progress)[1]:
        order.append(learn.next_on_path(progress)[1])
        progress[order[-1]] = {"done": True}
    evening, week = learn.on_track("evening"), learn.on_track("week")
    assert order[:4] == evening and sorted(order) == sorted(EXERCISES)
    assert [name for name in order if name in week and name not in evening] == order[4 : len(week)]


def test_a_course_has_the_exercises_that_there_are_and_adds_up_minutes():
    minutes = {name: int(minutes) for name, _, minutes, _ in learn.read_path()}
    rows = re.findall(r"^\| \d (.*) \|$", (ROOT / "docs/teaching.md").read_text(), re.M)
    assert len(rows) == 6
    for row in rows:
        *cells, total = row.split(" | ")
        assert sum(map(int, re.findall(r" (\d+)(?=[,;]| \||$)", " | ".join(cells), re.M))) == int(total), row
        for name, number in re.findall(r"([\w-]+) (\d+)(?:, |$)", cells[2]):
            assert minutes[name] == int(number), f"{name}: {number}"
        assert set(re.findall(r"([\w-]+) \d+(?:, |$)", cells[2])), row


# ---- one exercise ----


def test_hints_come_one_by_one_and_then_show(folder):
    _, hints, _ = NOTES["zero1"]
    for given in (1, 2, 3, 4):
        out = " ".join(said(lambda: learn.give_hint("zero1"))[0].split())
        begins = [" ".join(hint.partition("```")[0].split())[:30] in out for hint in hints]
        assert begins == [number < given for number in range(3)], (given, out)
        assert ("learn.py show zero1" in out) == (given >= 3)
    assert learn.read_progress()["zero1"] == {"attempts": 0, "done": False, "hints": 4}
    assert said(lambda: learn.give_hint("zero9"))[2] == 2


@pytest.mark.parametrize("name", ["ddp", "zero1", "sequence_parallel"])
def test_compare_shows_both_and_five_lines_after_done(folder, name):
    assert "has said Done" in said(lambda: learn.compare(name))[1][0]
    lesson, source = learn.lesson_of(name)
    (folder / f"{name}.py").write_text(source.replace("self.", "self . ") + "# elsewhere\n")
    learn.add_attempt(name, True)
    out = said(lambda: learn.compare(name))[0]
    own, right = out.split(f"---- {lesson}.py\n")
    assert "self . " in own or name == "sequence_parallel", own
    assert ("# elsewhere" in own) == (name == "ddp"), "what stands elsewhere is no part of a function"
    what = next(row[1] for row in learn.read_path() if row[0] == name)
    first, last, _ = learn.missing_in(source, what)[0]
    assert "\n".join(source.splitlines()[first:last]) in right
    assert right.count("\n- ") == 5


# ---- questions ----


def test_start_asks_what_the_site_asks():
    start = load("tools/start")
    asked = start.questions()
    assert [name for name, *_ in asked] == ["single", "ddp", "zero1", "zero2", "zero3"]
    assert len(start.WORDS.strip().splitlines()) == 10
    evaluate = importlib.import_module("letters").evaluate
    rights = [evaluate(formula, start.letters_of_film(name)) / 1e6 for name, formula, *_ in asked]
    out = answered(start.ask_all, "1000", f"{rights[0]:.2f} MB", "what?", *map(str, rights[1:4]), "skip")
    assert out.count("Right: ") == 4 and "Too much" in out and "A number of MB" in out, out


def test_what_grows_is_what_a_run_says(folder):
    foresee = importlib.import_module("foresee")
    ddp = (ROOT / "ddp.py").read_text()
    with mock.patch.object(
        foresee, "draw_change", lambda *_: ("SGD", (1, ""), (1, "--optim sgd --width 72"))
    ):
        out = answered(lambda: print(foresee.ask_change("ddp", random)), "what", "-", "=", "-", "=", "+")
        assert "one of + = -" in out and out.endswith("False\n"), out
        assert out.count("  right") == 2 and out.count("try again") == 2 and out.count("  no: +") == 1, out
        assert "to 0, 0.00 times" in out, out
    mutant = ("param.grad = view\n", "param.grad = view * 2\n")
    assert ddp.count(mutant[0]) == 1
    with mock.patch.object(foresee, "draw_mutant", lambda *_: mutant):
        out = answered(lambda: print(foresee.ask_mutant("ddp", random)), "1", "2")
    assert "+        param.grad = view * 2" in out and out.endswith("True\n"), out
    assert said(lambda: learn.predict("zero9", 1))[2] == 2


def test_questions_are_drawn_anew():
    foresee = importlib.import_module("foresee")
    drawn = {foresee.draw_change("zero3", random.Random(seed))[0] for seed in range(99)}
    assert drawn >= set(foresee.CHANGES)
    assert len({foresee.draw_mutant("zero3", random.Random(seed)) for seed in range(5)}) > 1
    assert len({foresee.kind_of(promise) for promise in ("1 rank: it runs", "2 ranks: weights are")}) == 2


# ---- the notebook ----


def test_a_notebook_has_a_cell_for_each_missing_function(folder):
    cells = importlib.import_module("cells")
    cells.learn.EXERCISES = folder
    said(lambda: cells.write(["ddp", "zero1"], folder / "some.ipynb"))
    notebook = json.loads((folder / "some.ipynb").read_text())
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    fills = [source.split("\n", 1) for source in sources if source.startswith("%%fill")]
    assert [line for line, _ in fills] == [
        "%%fill ddp", "%%fill zero1 start_reduce_scatter", "%%fill zero1 finish_reduce_scatter",
    ]  # fmt: skip
    assert all(isinstance(ast.parse(text), ast.Module) for _, text in fills)
    for line, text in fills:
        before = (folder / f"{line.split()[1]}.py").read_text()
        said(lambda line=line, text=text: cells.fill(line.removeprefix("%%fill "), text))
        assert (folder / f"{line.split()[1]}.py").read_text() == before, (
            "a stub in its own place changes nothing"
        )
    assert said(lambda: cells.write(["ddp"], folder / "some.ipynb"))[2] == 2
