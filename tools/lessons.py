"""The lessons, in README's order: its table is the one list of them."""

import inspect
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| \[`[^`]*`\]\(((?:more/)?(\w+)\.py)\) \| (.+) \|$", re.M)


def lessons():
    """{name: its path relative to the checkout}."""
    return {name: path for path, name, _ in ROW.findall((ROOT / "README.md").read_text())}


def path_of(name):
    """The file of a lesson, or of another name that is a path without its .py."""
    return ROOT / lessons().get(name, f"{name}.py")


def special(name, constant, default=""):
    """What tests/test_NAME.py sets a constant to, in one line, or the default.

    RUN (torchrun LESSON): its command, of N ranks. PLAIN (single): what it equals on one rank.
    BEFORE: a command that runs before. NAIVE: the flags of its naive version, which equals it. OTHER: flags,
    after those of RUN, with which it trains otherwise, by design. FILM: those with which step 2 is filmed.
    RACE: in bench/page.py, its ranks, then flags; "alone" between them if its ranks do different things or
    leave files. AGAINST: the flags of what it races there, in place of NAIVE.
    WITH, SLACK, LEARN and NORMS are for learn.py: see tools/promises.py."""
    tests = ROOT / "tests" / f"test_{name}.py"
    line = tests.exists() and re.search(rf'^{constant} = "(.*)"$', tests.read_text(), re.M)
    return line[1] if line else default


def complete(lesson):
    """The module of a lesson, with what tools ask for: parse(arguments)."""
    if {"FLAGS", "read_flags"} <= vars(lesson).keys():
        lesson.parse = lambda arguments=None: lesson.read_flags(lesson.FLAGS, arguments)
    return lesson


def asked(microbatches, arguments):
    """{name: value} of a call of a lesson's microbatches()."""
    bound = inspect.signature(microbatches).bind(*arguments)
    bound.apply_defaults()
    return bound.arguments
