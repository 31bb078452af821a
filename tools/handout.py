"""For a class: exercises drawn by a seed, without their answers, and a table of what came back.

python learn.py handout --seed 7 DIR [LESSON ...]    what a student gets, of these lessons or of any
python learn.py grade DIR ...                        a table, CSV, of the folders that students handed in

A handout has no lessons, only what check.py needs to know of them: losses, bytes and weights of their runs.
grade runs what students wrote: see docs/teaching.md before you do.
"""

import ast
import csv
import difflib
import io
import json
import random
import shutil
import sys
import tempfile
import textwrap
import tokenize
from pathlib import Path

import promises
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import learn  # noqa: E402

LESSONS = [name for name, *_ in learn.read_path() if "-" not in name]
FEW = 20  # tokens: shorter answers are alike by themselves
PAUSE = 1800  # seconds without a check or hint are no work
README = """# Exercises

Needs Python 3.11, torch and numpy. Edit the files in work/, then:

    python check.py            what there is to do
    python check.py NAME       is it right?
    python check.py hint NAME  a hint, three times

A file named bug is a whole lesson with a slip in it; in the others some lines are missing, where
NotImplementedError is raised. log.jsonl notes when you check and ask for hints. Hand in this whole folder.
"""


# ---- what a student gets ----


def exercise(lesson, text, task, hints=()):
    """A row of handout.json, with the text of its file and the lines that would give its answer away."""
    lost = set(learn.lesson_of(lesson)[1].splitlines()) - set(text.splitlines())
    lines = {line.split("  #")[0].strip() for line in lost}
    lines = {line for line in lines if len(line) >= 25 and not line.startswith("#")}
    texts = [learn.lesson_of(name)[1] for name in LESSONS]
    answer = {line for line in lines if sum(line in each for each in texts) < len(texts) / 2}
    return {"lesson": lesson, "task": task, "hints": list(hints), "text": text, "answer": answer}


def gives_away(one, other):
    """Whether the file of an exercise has a line of another one's answer, or is of the same lesson."""
    return one["lesson"] == other["lesson"] or any(line in one["text"] for line in other["answer"])


def candidates(lessons):
    """([(name, exercise)] of the blanks, the same of the bugs) of these lessons."""
    notes = learn.read_notes()
    blanks = []
    for name, what, _, hint in learn.read_path():
        lesson, source = learn.lesson_of(name)
        if lesson in lessons:
            text = learn.emptied(source, what, hint)
            blanks.append((name, exercise(lesson, text, "fill in what is missing", notes[name][1])))
    bugs = []
    for lesson, text, *_ in learn.bugs().values():
        if lesson in lessons:
            bugs.append(("bug", exercise(lesson, text, "a slip is somewhere in it")))
    return blanks, bugs


def draw(seed, lessons=()):
    """{name: exercise} of a seed, none of which has another one's answer in its file."""
    dice = random.Random(seed)
    blanks, bugs = candidates(lessons or LESSONS)
    drawn = {}
    for kind in blanks, blanks, bugs, blanks, bugs:
        for name, given in dice.sample(kind, len(kind)):
            alone = not any(gives_away(given, each) or gives_away(each, given) for each in drawn.values())
            if alone:
                drawn[f"bug{len(drawn) + 1}" if name == "bug" else name] = given
                break
    return drawn


def runs_of(lesson):
    """{(file, ranks, flags): what its run did} of all that a check of this lesson's exercises asks."""
    known = {}
    run = promises.run

    def record(path, name, size=1, flags="", **options):
        found = run(path, name, size, flags, **options)
        if path != copy:
            plain = path == promises.plain_of(lesson)[0]
            left_out = {"ranks"} if plain else {"ranks", "weights"}
            known[Path(path).stem, size, flags] = {k: v for k, v in found.items() if k not in left_out}
        return found

    promises.run = record
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copy(promises.original(lesson), folder)
            broken = [each for each, problem in promises.promises(copy, lesson) if problem]
            assert not broken, f"{lesson}.py itself breaks: {broken[0]}"
    finally:
        promises.run = run
    return known


def tools_of(name):
    """The names of a tool and of those that it imports."""
    found = {name}
    for line in (ROOT / f"tools/{name}.py").read_text().splitlines():
        module = line.split()[1] if line.strip().startswith(("import ", "from ")) else None
        if module and (ROOT / f"tools/{module}.py").exists():
            found |= tools_of(module)
    return found


def write(names, seed):
    """Write a handout to a folder: names is [folder, lessons ...]."""
    folder, lessons = Path(names[0]), [Path(name).stem for name in names[1:]]
    if seed is None:
        learn.refuse("handout: needs --seed S, a number: the same seed draws the same exercises")
    if folder.exists():
        learn.refuse(f"handout {folder}: is there already; take a new name")
    for lesson in set(lessons) - set(LESSONS):
        learn.refuse(f"handout: {lesson}: no such lesson")
    drawn = draw(seed, lessons)
    known = {}
    for given in drawn.values():
        known |= runs_of(given["lesson"])
    (folder / "work").mkdir(parents=True)
    (folder / "tools").mkdir()
    for tool in tools_of("promises"):
        shutil.copy(ROOT / f"tools/{tool}.py", folder / "tools")
    shutil.copy(ROOT / "tools/hand_in.py", folder / "check.py")
    shutil.copy(ROOT / "LICENSE", folder)
    torch.save(known, folder / "runs.pt")
    for name, given in drawn.items():
        (folder / f"work/{name}.py").write_text(given.pop("text"))
        del given["answer"]
    (folder / "handout.json").write_text(json.dumps({"seed": seed, "lessons": lessons, "exercises": drawn}))
    (folder / "README.md").write_text(README)
    print(f"{folder}: {', '.join(drawn)}. Give each student a copy.")


# ---- what came back ----


def verdict(text, lesson, known):
    """The first promise that a text of a lesson breaks, or nothing. known: what others' texts broke."""
    try:
        code = ast.dump(ast.parse(text)), lesson  # copies run once, whatever their comments say
    except (SyntaxError, ValueError):
        return "it can be read"
    if code not in known:
        known[code] = first_broken(text, lesson)
    return known[code]


def first_broken(text, lesson):
    """The first promise that a text of a lesson breaks, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{lesson}.py")
        path.write_text(text)
        return next((promise for promise, problem in promises.promises(str(path), lesson) if problem), "")


def bare(text):
    """A text as Python without comments and empty lines, if it can be read; names are kept."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(textwrap.dedent(text)).readline))
    except (tokenize.TokenError, SyntaxError):
        return text.split()
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    return [token.string for token in tokens if token.type in kinds]


def alike(one, other):
    """How alike two answers are, from 0 to 1, as lists of tokens."""
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()


def log_of(folder):
    """{exercise: {"attempts", "hints", "minutes"}} of a folder's log, without lines that it cannot read."""
    found = {}
    last = None
    for line in (folder / "log.jsonl").read_text().splitlines() if (folder / "log.jsonl").exists() else []:
        try:
            entry = json.loads(line)
            name, time = entry["name"], float(entry["time"])
            row = found.setdefault(name, {"hashes": set(), "hints": 0, "seconds": 0})
            row["hashes"] |= {entry["hash"]} if entry["what"] == "check" else set()
            row["hints"] += entry["what"] == "hint"
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if last is not None and 0 <= time - last <= PAUSE:
            row["seconds"] += time - last
        last = time
    return found


def answers_of(folders):
    """{(folder, exercise): (exercise's row, text, tokens of the answer)} of all that was handed in."""
    what_of = {name: what for name, what, *_ in learn.read_path()}
    found = {}
    for folder in folders:
        for name, given in json.loads((folder / "handout.json").read_text())["exercises"].items():
            path = folder / f"work/{name}.py"
            text = path.read_text(errors="replace") if path.exists() else ""
            tokens = []
            if name in what_of:
                given["lesson"], source = learn.lesson_of(name)
                try:
                    tokens = bare(learn.answer_in(text, what_of[name], source))
                except SyntaxError:
                    tokens = bare(text)
            found[folder, name] = given, text, tokens
    return found


def grade(names, _=None):
    """Print a table: student and exercise, whether it is done, how it came to be, what it resembles."""
    folders = [Path(name) for name in names if Path(name, "handout.json").exists()]
    if not folders:
        learn.refuse("grade: none of these folders has a handout.json")
    answers = answers_of(folders)
    what_of = {name: what for name, what, *_ in learn.read_path()}
    known = {}
    out = csv.writer(sys.stdout)
    out.writerow("student exercise done breaks attempts hints minutes like-lesson like-other other".split())
    for (folder, name), (given, text, tokens) in answers.items():
        broken = verdict(text, given["lesson"], known)
        log = log_of(folder).get(name, {"hashes": (), "hints": 0, "seconds": 0})
        like = ["", "", ""]
        if len(tokens) >= FEW:
            _, source = learn.lesson_of(name)
            right = bare(learn.answer_in(source, what_of[name], source))
            others = [
                (alike(tokens, each), other.name)
                for (other, task), (_, _, each) in answers.items()
                if task == name and other != folder
            ]
            like = [f"{alike(tokens, right):.2f}", *(max(others, default=("", "")))]
        minutes = round(log["seconds"] / 60)
        row = [folder.name, name, int(not broken), broken, len(log["hashes"]), log["hints"], minutes]
        out.writerow([*row, *(f"{each:.2f}" if isinstance(each, float) else each for each in like)])
