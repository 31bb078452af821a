"""Something to do: fill in what is missing in a lesson, or find a slip in it. Runs judge what you wrote.

    python learn.py                 what comes next, on the shortest of three tracks that is not done
    python learn.py path week       a track: evening, week or all
    python learn.py fill zero1      writes exercises/zero1.py: the bodies of some functions are missing
    python learn.py check zero1     are they right? promises in order, up to the first that breaks
    python learn.py hint zero1      three times: which tensor, and when; which call; the shape of the code
    python learn.py show zero1      the lesson's own lines for what is missing
    python learn.py bug             writes exercises/zero1-bug1.py or the like: a slip in a lesson of which an
                                    exercise is done, and only what shows is told; bug zero1: in that lesson

A file that exists is written again with --again alone, and its old text is kept in exercises/old. Progress
is kept in your home folder, in .local/state/rankzero.json. Exercises are of the lessons as committed.
"""

import argparse
import ast
import functools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
from lessons import ROOT, path_of, special  # tools/promises.py loads torch: where it is needed

PROGRESS = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "rankzero.json")
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
        lesson = section.split()[0]
        for head, *hints in re.findall(r"^### (.*)\n1\. (.*)\n2\. (.*)$", section, re.M):
            name, missing, track, minutes, task = (cell.strip() for cell in head.split("|"))
            exercises[name] = Exercise(name, missing, track or "all", int(minutes), task, hints)
        edits = re.findall(r"((?:^    [-+].*\n)+)(.*) To find it: (.*)$", section, re.M)
        for number, (edit, why, how) in enumerate(edits, 1):
            sides = (re.findall(rf"^    [{sign}](.*\n)", edit, re.M) for sign in "-+")
            right, wrong = map("".join, sides)
            if wrong:  # else whole lines are left out
                right, wrong = right[:-1], wrong[:-1]
            slips[f"{lesson}-bug{number}"] = Slip(right, wrong, why, how)
    return exercises, slips


@functools.cache
def committed(lesson):
    """The path of a lesson's file; if it has been edited, of what is committed."""
    path = path_of(lesson)
    shown = subprocess.run(["git", "show", f"HEAD:./{path.relative_to(ROOT)}"], capture_output=True, cwd=ROOT)
    if shown.returncode or shown.stdout == path.read_bytes():
        return path
    print(f"{path.name} has been edited: its committed text is used.", file=sys.stderr)
    copy = Path(tempfile.mkdtemp(), path.name)
    copy.write_bytes(shown.stdout)
    return copy


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
    source = committed(lesson).read_text()
    if slip := slips.get(name):
        return lesson, source, source.replace(slip.right, slip.wrong), slip
    lines = source.splitlines()
    for first, last, indentation in reversed(missing_in(source, exercises[name].missing)):
        lines[first:last] = [f"{' ' * indentation}raise NotImplementedError({exercises[name].task!r})"]
    return lesson, source, "\n".join(lines) + "\n", exercises[name]


def new_bug(lesson):
    """The name of a slip that the learner has not had, in this lesson, or in one of which some is done."""
    exercises, slips = read_table()
    progress = read_progress()
    done = {name.partition("-")[0] for name in exercises if is_done(name, progress)}
    left = [name for name in slips if name.partition("-")[0] in ({lesson} if lesson else done)]
    left = [name for name in left if not is_done(name, progress) and not (EXERCISES / f"{name}.py").exists()]
    if not left:
        refuse(f"bug {lesson}: no slip is left; python learn.py fill NAME, of another lesson, comes first")
    return random.choice(left)


def write(name, again):
    """Write an exercise's file, and say what to do."""
    lesson, _, text, what = made(name)
    path = EXERCISES / f"{name}.py"
    if path.exists() and not again:
        refuse(f"exercises/{name}.py: exists; --again writes it anew, and keeps a copy")
    old = EXERCISES / "old"
    old.mkdir(parents=True, exist_ok=True)
    if path.exists():
        kept = path.rename(old / f"{name}-{len(list(old.glob(f'{name}-*')))}.py")
        print(f"What you had is in exercises/old/{kept.name}")
    path.write_text(text)
    if isinstance(what, Slip):
        import promises

        promises.path_of = committed
        print(f"{lesson}.py, with a slip. What shows, after some seconds:", flush=True)
        say(promises.symptom_of(str(path), lesson))
    else:
        named = " and ".join(what.missing.split()) if re.fullmatch(r"[\w. ]+", what.missing) else "one line"
        say(f"{what.minutes} minutes (a guess), {named}: {what.task}.")
    command = special(lesson, "RUN", "torchrun LESSON").replace("LESSON", f"exercises/{name}.py")
    command = command.replace("torchrun", "python -m torch.distributed.run --nproc_per_node=2")
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
    """{name: {"attempts", "done" and, of exercises, "hints"}}."""
    try:
        progress = json.loads(PROGRESS.read_text()) if PROGRESS.exists() else {}
        if all(isinstance(entry["done"], bool) for entry in progress.values()):
            return progress
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        pass
    return refuse(f"{PROGRESS} cannot be read: mend or delete it")


def add_to(name, what, done=False):
    """Count an attempt or a hint; the file is replaced as a whole. Returns how many there were."""
    progress = read_progress()
    entry = progress.setdefault(name, {"attempts": 0, "done": False})
    entry[what] = entry.get(what, 0) + 1
    entry["done"] |= done
    PROGRESS.parent.mkdir(parents=True, exist_ok=True)
    draft = PROGRESS.with_suffix(".new")
    draft.write_text(json.dumps(progress))
    draft.replace(PROGRESS)
    return entry[what]


def check(name):
    """Say which promises an exercise's file keeps, up to the first that it breaks."""
    lesson, _, _, what = made(name)
    path = EXERCISES / f"{name}.py"
    if not path.exists():
        refuse(f"exercises/{name}.py: not there yet; fill or bug writes it")
    read_progress()  # or say now that it is damaged
    import promises

    promises.path_of = committed
    print(f"Ten seconds, or some more; a run that hangs is stopped after {promises.SECONDS}.", flush=True)
    for promise, problem in promises.promises(str(path), lesson):
        print(f"{'no: ' if problem else 'yes:'} {promise}", flush=True)
        if problem:
            say(f"     {problem}")
            break
    attempts = add_to(name, "attempts", not problem)
    print(f"{'Not yet' if problem else 'Done'}: attempt {attempts}.")
    if problem:
        print(f"Next: python learn.py hint {name}")
        sys.exit(1)
    if isinstance(what, Slip):
        show(name)
        say(f"{what.why} To find it: {what.how}\nNext: python learn.py bug")
        return
    for track in TRACKS:
        if name in on_track(track) and all(is_done(each, read_progress()) for each in on_track(track)):
            print(f"The track '{track}' is done.")
    print(f"Next: python learn.py show {name} has the lesson's own lines; python learn.py, what comes then")


def give_hint(name):
    """Print the next of an exercise's three hints, and those before; of a slip, how one finds it."""
    _, source, _, what = made(name)
    given = add_to(name, "hints")
    hints = [what.how] if isinstance(what, Slip) else what.hints
    for number, text in enumerate(hints[:given], 1):
        say(f"{number}. {text}")
    if len(hints) == 2 and given > 2:
        print("3. Its shape:")
        for first, last, _ in missing_in(source, what.missing):
            lines = source.splitlines()[first:last]
            print(textwrap.indent(shape_of(lines), "       "), end="\n\n")
    print(f"Next: python learn.py hint {name}, or, for the lesson's own lines, show {name}")


def on_track(track):
    """The exercises of a track."""
    exercises, _ = read_table()
    return [each.name for each in exercises.values() if TRACKS.index(each.track) <= TRACKS.index(track)]


def is_done(name, progress):
    return progress.get(name, {}).get("done", False)


def next_on_path(progress):
    """(the shortest track that is not done, its next exercise or None)."""
    left = [(track, name) for track in TRACKS for name in on_track(track) if not is_done(name, progress)]
    return left[0] if left else ("all", None)


def list_path(track):
    """Print a track, what comes next, and how far one is on each track."""
    progress = read_progress()
    current, upcoming = next_on_path(progress)
    track = track or current
    if track not in TRACKS:
        refuse(f"path {track}: must be one of {', '.join(TRACKS)}")
    exercises, slips = read_table()
    print(f"The track '{track}'. Minutes are guesses, without reading. Progress is in {PROGRESS}.\n")
    for name in on_track(track):
        state = "done" if is_done(name, progress) else "next" if name == upcoming else ""
        print(f"{state:<5}{name:<24}{exercises[name].minutes:>3} min   {exercises[name].task}")
    print()
    for each in TRACKS:
        names = on_track(each)
        done = sum(is_done(name, progress) for name in names)
        print(
            f"{each:<8}{done:>3} of {len(names)} done, {sum(exercises[name].minutes for name in names)} min"
        )
    found = sum(is_done(name, progress) for name in slips)
    print(f"bugs   {found:>4} of {len(slips)} found: python learn.py bug")
    if upcoming:
        print(f"\nNext: python learn.py fill {upcoming}; then read exercises/{upcoming}.py from the top")


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.error = refuse
    commands = {"path": list_path, "check": check, "hint": give_hint, "show": show}
    parser.add_argument("command", nargs="?", default="path", choices=(*commands, "fill", "bug"))
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--again", action="store_true")
    given = parser.parse_intermixed_args()
    name = Path(given.name).stem
    if given.command == "bug":
        write(name if "-bug" in name else new_bug(name), given.again)
    elif not name and given.command != "path":
        refuse(f"{given.command}: needs a name; python learn.py lists them")
    elif given.command == "fill":
        write(name, given.again)
    else:
        commands[given.command](name)


def run():
    """main(), by the Python of .venv if this one has no torch."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nlearn.py: stopped; progress is kept")
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "numpy"):
            raise
        python = ROOT / ".venv" / "bin" / "python"
        if Path(sys.prefix) == ROOT / ".venv" or not python.exists():
            refuse(f"{missing.name} is missing: ./run.sh setup installs it once, in .venv")
        os.execv(python, [python, *sys.argv])


if __name__ == "__main__":
    run()
