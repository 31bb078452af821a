"""Something to do: fill in what is missing in a lesson, or find a slip in it. Runs judge what you wrote.

    python learn.py                 what comes next, on the shortest of three tracks that is not done
    python learn.py path week       a track: evening, week or all
    python learn.py fill zero1      writes exercises/zero1.py: the bodies of some functions are missing
    python learn.py check zero1     are they right? promises in order, up to the first that breaks
    python learn.py hint zero1      three times: which tensor, and when; which call; the shape of the code
    python learn.py show zero1      the lesson's own lines for what is missing
    python learn.py bug             writes exercises/zero1-bug1.py or the like: a slip in a lesson of which an
                                    exercise is done, and only what shows is told; bug zero1: in that lesson

To begin anew, delete the file in exercises/. What is done stands in exercises/progress.json. Exercises are of
the lessons as they are: play with a copy.
"""

import argparse
import ast
import functools
import importlib.util
import json
import os
import random
import re
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
from lessons import ROOT, path_of, special  # tools/promises.py loads torch: where it is needed

EXERCISES = ROOT / "exercises"
TRACKS = "evening", "week", "all"  # each has the one before
DOTS = ast.Constant(...)
# missing: functions, or a class, or the line with this piece
Exercise = namedtuple("Exercise", "name missing track minutes task hints")
Slip = namedtuple("Slip", "right wrong why how")  # the lesson's text, what a person wrote; how one finds it


def refuse(problem):
    """End with exit code 2, and say in one line what to change."""
    print(f"learn.py: {problem}", file=sys.stderr)
    sys.exit(2)


def say(text):
    """Print text in lines of at most 100 columns."""
    for line in text.splitlines():
        print(textwrap.fill(line, 100, subsequent_indent="     ", break_long_words=False))


@functools.cache
def read_table():
    """({name: Exercise}, {name: Slip}) of docs/exercises.md, from easy to hard."""
    exercises, slips = {}, {}
    for section in re.split("^## ", (ROOT / "docs/exercises.md").read_text(), flags=re.M)[1:]:
        ((head, *hints),) = re.findall(r"^(.*)\n1\. (.*)\n2\. (.*)$", section, re.M)
        name, missing, track, minutes, task = (cell.strip() for cell in head.split("|"))
        exercises[name] = Exercise(name, missing, track or "all", int(minutes), task, hints)
        lesson = name.partition("-")[0]
        edits = re.findall(r"((?:^    [-+].*\n)+)(.*) To find it: (.*)$", section, re.M)
        for number, (edit, why, how) in enumerate(edits, 1):
            sides = (re.findall(rf"^    [{sign}](.*\n)", edit, re.M) for sign in "-+")
            right, wrong = map("".join, sides)
            if wrong:  # else whole lines are left out
                right, wrong = right[:-1], wrong[:-1]
            slips[f"{lesson}-bug{number}"] = Slip(right, wrong, why, how)
    return exercises, slips


def missing_in(source, what):
    """[(first line, last line, indentation)], from 0, of what an exercise leaves out: bodies, or one line."""
    bodies = []
    for node in ast.parse(source).body:
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            name = getattr(function, "name", "")
            if isinstance(function, ast.FunctionDef) and {node.name, f"{node.name}.{name}"} & {*what.split()}:
                body = function.body[1:] if ast.get_docstring(function) else function.body
                bodies.append((body[0].lineno - 1, body[-1].end_lineno, body[0].col_offset))
    if bodies:
        return bodies
    lines = source.splitlines()
    number = next(i for i, line in enumerate(lines) if what in line)
    return [(number, number + 1, len(lines[number]) - len(lines[number].lstrip()))]


def shape_of(lines):
    """Code with ... in place of most that it computes."""
    tree = ast.parse(textwrap.dedent("\n".join(lines)))
    for node in ast.walk(tree):
        for field in ("test", "iter", "value") if isinstance(node, ast.stmt) else ():
            value = getattr(node, field, None)
            if isinstance(value, ast.Call) and isinstance(node, ast.Expr):
                value.args, value.keywords = [DOTS] * bool(value.args), []
            elif value:
                setattr(node, field, DOTS)
        for item in getattr(node, "items", ()) if isinstance(node, ast.With) else ():
            item.context_expr = DOTS
    return ast.unparse(tree)


def made(name):
    """(lesson, its source, the text of an exercise's file, its Exercise or Slip)."""
    exercises, slips = read_table()
    if name not in exercises | slips:
        refuse(f"{name}: no such exercise; python learn.py path all shows them")
    lesson = name.partition("-")[0]
    source = path_of(lesson).read_text()
    if slip := slips.get(name):
        return lesson, source, source.replace(slip.right, slip.wrong), slip
    lines = source.splitlines()
    for first, last, indentation in reversed(missing_in(source, exercises[name].missing)):
        lines[first:last] = [f"{' ' * indentation}raise NotImplementedError({exercises[name].task!r})"]
    return lesson, source, "\n".join(lines) + "\n", exercises[name]


def new_bug(lesson):
    """The name of a slip that the learner has not had, in this lesson, or in one of which some is done."""
    exercises, slips = read_table()
    done = {name for name, state in read_progress().items() if state == "done"}
    known = {lesson} if lesson else {name.partition("-")[0] for name in done & exercises.keys()}
    left = [name for name in slips if name.partition("-")[0] in known and name not in done]
    left = [name for name in left if not (EXERCISES / f"{name}.py").exists()]
    if not left:
        refuse(f"bug {lesson}: no slip is left; python learn.py fill NAME, of another lesson, comes first")
    return random.choice(left)


def write(name):
    """Write an exercise's file, and say what to do."""
    lesson, _, text, what = made(name)
    path = EXERCISES / f"{name}.py"
    if isinstance(what, Slip):
        import promises  # which needs torch, so run() may begin again: before the file is written
    if path.exists():
        refuse(f"exercises/{name}.py: exists; delete it to begin anew")
    EXERCISES.mkdir(exist_ok=True)
    path.write_text(text)
    if isinstance(what, Slip):
        print(f"{lesson}.py, with a slip. What shows, after some seconds:", flush=True)
        say(promises.symptom_of(str(path), lesson))
    else:
        named = " and ".join(what.missing.split()) if re.fullmatch(r"[\w. ]+", what.missing) else "one line"
        say(f"{what.minutes} minutes (a guess), {named}: {what.task}.")
        if name.endswith("-real"):
            say(f"The naive version ({special(lesson, 'NAIVE')}) is above. Yours holds, sends or waits less.")
    command = special(lesson, "RUN", "torchrun LESSON").replace("LESSON", f"exercises/{name}.py")
    command = command.replace("torchrun", "python -m torch.distributed.run --nproc_per_node=2")
    if not importlib.util.find_spec("torch"):
        command = f".venv/bin/{command}"
    say(f"Edit exercises/{name}.py, then: python learn.py check {name}")
    print(f"To see what it prints: {re.sub(r' N$', ' 2', command)} --steps 3")


def show(name):
    """Print the lesson's lines for what is missing, or wrong."""
    lesson, source, _, what = made(name)
    if isinstance(what, Slip):
        print(f"In {lesson}.py:\n{textwrap.indent(what.right, '    ')}")
        return
    say(f"{what.task}. From {lesson}.py:")
    for first, last, _ in missing_in(source, what.missing):
        print()
        for number in range(first, last):
            print(f"{number + 1:>4} {source.splitlines()[number]}")


def read_progress():
    """{name: how many hints were given, or "done"}."""
    path = EXERCISES / "progress.json"
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except (OSError, ValueError, TypeError):
        return refuse(f"{path} cannot be read: mend or delete it")


def note(name, what):
    text = json.dumps(read_progress() | {name: what})
    EXERCISES.mkdir(exist_ok=True)
    (EXERCISES / "progress.json").write_text(text)


def check(name):
    """Say which promises an exercise's file keeps, up to the first that it breaks."""
    lesson, _, _, what = made(name)
    path = EXERCISES / f"{name}.py"
    if not path.exists():
        refuse(f"exercises/{name}.py: not there yet; fill or bug writes it")
    read_progress()  # or say now that it is damaged
    import promises

    print("Ten seconds to two minutes.", flush=True)
    where, kept = "", 0
    for promise, problem in promises.promises(str(path), lesson):
        if not promise.startswith(f"{where}:"):
            if kept:
                print(f"yes: {where}, {kept} promises", flush=True)
            where, kept = promise.partition(":")[0], 0
        if problem:
            print(f"no:  {promise}")
            say(f"     {problem}")
            print(f"Not yet. Next: python learn.py hint {name}")
            sys.exit(1)
        kept += 1
    print(f"yes: {where}, {kept} promises")
    note(name, "done")
    print("Done.")
    if isinstance(what, Slip):
        show(name)
        say(f"{what.why} To find it: {what.how}\nNext: python learn.py bug")
    else:
        print(f"The lesson's own lines: python learn.py show {name}\nNext: python learn.py")


def give_hint(name):
    """Print one more of an exercise's three hints, and those before; of a slip, how one finds it."""
    _, source, _, what = made(name)
    if isinstance(what, Slip):
        hints = [what.how]
    else:
        bodies = [source.splitlines()[first:last] for first, last, _ in missing_in(source, what.missing)]
        shapes = "\n\n".join(map(shape_of, bodies))
        hints = [*what.hints, "Its shape:\n" + textwrap.indent(shapes, "       ")]
    given = read_progress().get(name, 0)
    if given != "done":
        note(name, given := given + 1)
    for number, text in enumerate(hints if given == "done" else hints[:given], 1):
        say(f"{number}. {text}")
    more = f"hint {name}, or " * (given != "done" and given < len(hints))
    print(f"Next: python learn.py {more}show {name}, which has the lesson's own lines")


def on_track(track):
    """The exercises of a track."""
    exercises, _ = read_table()
    return [each.name for each in exercises.values() if TRACKS.index(each.track) <= TRACKS.index(track)]


def list_path(track):
    """Print a track, by default the shortest that is not done, and what comes next on it."""
    (exercises, slips), progress = read_table(), read_progress()
    left = {each: [name for name in on_track(each) if progress.get(name) != "done"] for each in TRACKS}
    track = track or next((each for each in TRACKS if left[each]), "all")
    if track not in TRACKS:
        refuse(f"path {track}: must be one of {', '.join(TRACKS)}")
    upcoming = next(iter(left[track]), None)
    print(f"The track '{track}'. Minutes are guesses, without reading.\n")
    for name in on_track(track):
        state = "next" if name == upcoming else "" if name in left[track] else "done"
        print(f"{state:<5}{name:<24}{exercises[name].minutes:>3} min   {exercises[name].task}")
    print()
    for each in TRACKS:
        names = on_track(each)
        minutes = sum(exercises[name].minutes for name in names)
        print(f"{each:<8}{len(names) - len(left[each]):>3} of {len(names)} done, {minutes} min")
    found = sum(progress.get(name) == "done" for name in slips)
    print(f"bugs   {found:>4} of {len(slips)} found: python learn.py bug")
    if upcoming:
        print(f"\nNext: python learn.py fill {upcoming}; then read exercises/{upcoming}.py from the top")


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.error = refuse
    commands = {"path": list_path, "check": check, "hint": give_hint, "show": show}
    parser.add_argument("command", nargs="?", default="path", choices=(*commands, "fill", "bug"))
    parser.add_argument("name", nargs="?", default="")
    given = parser.parse_args()
    name = Path(given.name).stem
    if given.command == "bug":
        write(name if "-bug" in name else new_bug(name))
    elif not name and given.command != "path":
        refuse(f"{given.command}: needs a name; python learn.py lists them")
    elif given.command == "fill":
        write(name)
    else:
        commands[given.command](name)


def run():
    """main(), by the Python of .venv if this one has no torch."""
    try:
        main()
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "numpy"):
            raise
        python = ROOT / ".venv" / "bin" / "python"
        if Path(sys.prefix) == ROOT / ".venv" or not python.exists():
            refuse(f"{missing.name} is missing: ./run.sh setup installs it once, in .venv")
        os.execv(python, [python, *sys.argv])


if __name__ == "__main__":
    run()
