"""A track as a notebook: one function a cell, written into its file and checked. python learn.py notebook

In the notebook a cell that begins with %%fill NAME FUNCTION is the function of exercises/NAME.py; without
FUNCTION it is the exercise's one line. The first cell says so to IPython: see load_ipython_extension()."""

import ast
import json
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import learn  # noqa: E402

FIRST = """import os, sys
os.chdir({root!r})
sys.path.insert(0, "tools")
%load_ext cells"""
WORDS = """# Distributed training: {names}

Each exercise is a lesson in which something is missing. Run the first cell. Then, for each exercise: read its
file, write the function in its cell, run the cell, which puts it into the file, and run the check. What is
missing raises NotImplementedError until you write it. Hints: `!python learn.py hint NAME`, three times."""


def cell(kind, text):
    """A cell of a notebook (nbformat 4)."""
    lines = text.splitlines(keepends=True)
    more = {} if kind == "markdown" else {"outputs": [], "execution_count": None}
    return {"cell_type": kind, "metadata": {}, "source": lines} | more


def functions_in(source, what):
    """[(name, first line, last line)], from 0, of the functions or methods that an exercise leaves out."""
    found = []
    for first, last, _ in learn.bodies_of(source, what.split()):
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.FunctionDef)
                and node.body[-1].end_lineno == last
                and node.lineno <= first
            ):
                found.append((node.name, node.lineno - 1, last))
    return found


def row_of(name):
    return next(row for row in learn.read_path() if row[0] == name)


def cells_of(name):
    """The cells of an exercise."""
    _, what, minutes, hint = row_of(name)
    _, source = learn.lesson_of(name)
    text = learn.emptied(source, what, hint)
    idea = ast.get_docstring(ast.parse(source)).split("\n\nTimeline")[0]
    title, _, idea = idea.partition("\n")
    idea = textwrap.dedent(idea.strip().removeprefix("Idea\n"))
    words = f"## {name}\n\n{title}\n\n{idea}\n\n"
    words += f"To do ({minutes} minutes, a guess): {hint}. It is in exercises/{name}.py:"
    yield cell("markdown", words)
    yield cell("code", f'print(open("exercises/{name}.py").read())')
    functions = functions_in(text, what)
    lines = text.splitlines()
    for function, first, last in functions:
        stub = textwrap.dedent("\n".join(lines[first:last]))
        yield cell("code", f"%%fill {name} {function}\n{stub}")
    if not functions:
        yield cell("code", f"%%fill {name}\nraise NotImplementedError({hint!r})")
    yield cell("code", f"!{{sys.executable}} learn.py check {name}")


def write(names, path):
    """Write the notebook, and the files of exercises that are not there yet."""
    if path.exists():
        learn.refuse(f"{path}: is there already; move it away to have a new one")
    cells = [cell("markdown", WORDS.format(names=", ".join(names)))]
    cells.append(cell("code", FIRST.format(root=str(ROOT))))
    for name in names:
        cells += cells_of(name)
    notebook = {"cells": cells, "metadata": {"language_info": {"name": "python"}}}
    learn.EXERCISES.mkdir(exist_ok=True)
    for name in names:
        file = learn.EXERCISES / f"{name}.py"
        if not file.exists():
            _, what, _, hint = row_of(name)
            file.write_text(learn.emptied(learn.lesson_of(name)[1], what, hint))
    path.write_text(json.dumps(notebook | {"nbformat": 4, "nbformat_minor": 4}, indent=1))
    print(f"{path}: open it with Jupyter, in an environment that has torch")


def fill(line, text):
    """Put a cell's function, or line, into the file of its exercise."""
    name, *function = line.split()
    _, what, _, hint = row_of(name)
    path = learn.EXERCISES / f"{name}.py"
    lines = path.read_text().splitlines()
    ast.parse(text)  # a mistake is told here, of the cell
    if function:
        functions = functions_in("\n".join(lines), what)
        first, last = next(place for known, *place in functions if known == function[0])
    else:
        before = learn.emptied(learn.lesson_of(name)[1], what, hint).splitlines()
        first = next(i for i, line in enumerate(before) if "NotImplementedError(" in line)
        last = len(lines) - (len(before) - first - 1)
    indentation = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    lines[first:last] = textwrap.indent(text.strip("\n"), indentation).splitlines()
    path.write_text("\n".join(lines) + "\n")
    print(f"written to exercises/{name}.py, lines {first + 1} to {first + len(text.strip().splitlines())}")


def load_ipython_extension(ipython):
    ipython.register_magic_function(fill, "cell")
