"""The form of the house: lines beside what they may be. `./run.sh lint` runs it; ends with 1 if one is red.

Red: a lesson above 400 lines, all above 22,000 (what lessons share is counted once; 250 more for each lesson
beyond thirty), a line above 110 columns, a lesson that lacks one of its places, a mutant or slip that quotes
a comment, a docstring or a blank line. All else is a goal.

python tools/form.py copy writes what lessons share, as single.py has it, into all of them."""

import ast
import importlib
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lessons import ROOT, lessons, path_of

LESSON_LINES, ALL_LINES, COLUMNS = 400, 22_000, 110
FOLDERS = {  # lines that people keep, and how many are meant to suffice
    "lessons": ("more/*.py", 9_600),
    "tests": ("tests/*.py test_all.py", 5_000),
    "tools": ("tools/*.py", 1_500),
    "bench": ("bench/*", 1_400),
    "site": ("site/*", 1_400),
    "learn.py": ("learn.py", 500),
    "docs": ("docs/*.md", 1_800),
}
# What lessons share; a test holds that it is the same
SHARED = r'# ==== toy model.*?\{ms:\.1f\} ms"\)\n', r"class MasterWeights:.*?self\.masters\)\n"
SHARED = [re.compile(pattern, re.S) for pattern in SHARED]
KEPT = re.compile(r"\.(py|sh|js|css|html|md|toml|yml|txt)$|^\.ci/run$")


def tracked(*patterns):
    """The files that git knows, and those that it does not know yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return [ROOT / name for name in sorted(set(names)) if KEPT.search(name) and (ROOT / name).exists()]


def lines_of(path):
    return path.read_text().count("\n")


def copy_shared():
    own = (ROOT / "single.py").read_text()
    for path in lessons().values():
        text = source = (ROOT / path).read_text()
        for pattern in SHARED:
            text = pattern.sub(lambda _, pattern=pattern: pattern.search(own)[0], text)
        if text != source:
            (ROOT / path).write_text(text)
            print(path)


def missing_places():
    """Yield which of its places a lesson lacks: its file, README's row, tests/test_NAME.py, its exercise."""
    known = lessons()
    for name, path in known.items():
        if not (ROOT / path).exists():
            yield f"{path}: README's table has it, but there is no such file"
        tests = ROOT / "tests" / f"test_{name}.py"
        if not tests.exists() or "LESSON = Lesson(" not in tests.read_text():
            yield f"{path}: tests/test_{name}.py: has no LESSON = Lesson(...), which says how it is tested"
    for path in tracked("*.py", "more/*.py"):
        name = path.relative_to(ROOT).as_posix()
        is_lesson = "\ndef train(config" in path.read_text() and path.parent in (ROOT, ROOT / "more")
        if is_lesson and name not in known.values():
            yield f"{name}: README.md: its table has no row for it"
    for path in tracked("tests/test_*.py"):
        name = path.stem.removeprefix("test_")
        if "LESSON = Lesson(" in path.read_text() and name not in known:
            yield f"tests/{path.name}: README.md: its table has no row for {name}"
    for name in re.findall(r"^## (\w+)", (ROOT / "docs/exercises.md").read_text(), re.M):
        if name not in known:
            yield f"docs/exercises.md: {name}: README's table has no such lesson"


def words_in(source):
    """The places of all characters of comments and docstrings."""
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    places = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            places.update(
                range(begins[token.start[0] - 1] + token.start[1], begins[token.end[0] - 1] + token.end[1])
            )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            first = node.body[0]
            places.update(range(begins[first.lineno - 1], begins[first.end_lineno]))
    return places


def wordy_edits():
    """Yield the mutants of the tests, and the slips of the exercises, that are no edits of code alone."""
    sys.path.insert(0, str(ROOT))
    for path in tracked("tests/test_*.py"):
        importlib.import_module(f"tests.{path.stem}")
    from tests import harness

    _, slips = importlib.import_module("learn").read_table()
    edits = harness.EDITS + [(name.rpartition("-bug")[0], slip.right) for name, slip in slips.items()]
    places = {}
    for name, old in edits:
        source = path_of(name).read_text()
        where = places.setdefault(name, words_in(source))
        begin = source.find(old)
        quoted = any(begin + i in where for i, character in enumerate(old) if not character.isspace())
        if quoted or "\n\n" in old:
            yield f"{name}: an edit quotes a comment, a docstring or a blank line: {old!r}"


def main():
    red, copies = list(missing_places()), 0
    print(f"{'lines':<24}{'are':>8}{'goal':>8}")
    for name, path in lessons().items():
        source = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        lines = source.count("\n")
        print(f"  {name:<22}{lines:>8}{LESSON_LINES:>8}")
        copies += sum(part.count("\n") for each in SHARED for part in each.findall(source)) * (
            name != "single"
        )
        if lines > LESSON_LINES:
            red.append(f"{path}: {lines} lines, at most {LESSON_LINES}")
    of_lessons = [ROOT / path for path in lessons().values()]
    for name, (patterns, goal) in FOLDERS.items():
        files = of_lessons if name == "lessons" else tracked(*patterns.split())
        print(f"{name:<24}{sum(map(lines_of, filter(Path.exists, files))):>8,}{goal:>8,}")
    all_lines, limit = sum(map(lines_of, tracked())), ALL_LINES + 250 * max(0, len(lessons()) - 30)
    print(f"{'all':<24}{all_lines:>8,}")
    print(f"{'but copies':<24}{all_lines - copies:>8,}{limit:>8,}")
    if all_lines - copies > limit:
        red.append(f"all: {all_lines - copies} lines without copies, at most {limit}: delete something")
    for path in tracked():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > COLUMNS and path.suffix in (".py", ".sh"):
                red.append(f"{path.relative_to(ROOT)}:{number}: {len(line)} columns, at most {COLUMNS}")
    red += wordy_edits()
    print("\n".join(["", *red]) if red else "\nAll is well.")
    return bool(red)


if __name__ == "__main__":
    sys.exit(copy_shared() if sys.argv[1:] == ["copy"] else main())
