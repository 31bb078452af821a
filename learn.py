"""Something to do: fill in, find the bug, predict, catch. Made from the lessons and from the tests' mutants.

    python learn.py                 what comes next, on the shortest of three tracks that is not done
    python learn.py path week       a track: evening, week or all; each exercise with what it needs first
    python learn.py start           ten lines on rank, collective and NCCL, and five questions: ten minutes
    python learn.py fill zero1      writes exercises/zero1.py: the bodies of some functions are missing
    python learn.py check zero1     are they right? promises in order, up to the first that breaks
    python learn.py hint zero1      three times: which tensor, and when; which call; the shape of the code
    python learn.py show zero1      the lesson's own lines for what is still missing
    python learn.py compare zero1   after Done: your lines beside the lesson's, and what torch does there
    python learn.py bug             writes exercises/bug-NAME.py: a slip in a lesson of which you have done an
                                    exercise, and only what shows is told; bug NAME: that one
    python learn.py catch 5         writes exercises/catch-5.py: which is the cheapest run that shows a slip?
    python learn.py predict zero3   what grows, stays, falls, or breaks? Asked anew each time; a run judges
    python learn.py notebook        writes exercises/evening.ipynb: the evening's track, a function a cell
    python learn.py handout --seed 7 DIR    for a class (docs/teaching.md); grade DIR/* writes a table

A file that exists is written again with --again alone, and its old text is kept in exercises/old. Progress
is kept in your home folder, in .local/state/rankzero.json. Exercises are of the lessons as committed.
"""

import argparse
import ast
import importlib.util
import json
import os
import random
import re
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
import sources  # its neighbours load torch, so each of them is imported where it is needed
from sources import ROOT, find_bugs, original

PROGRESS = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "rankzero.json")
SYMPTOMS = ROOT / "docs" / "symptoms.json"
NOTES = ROOT / "docs" / "exercises.md"  # hints and comparisons
EXERCISES = ROOT / "exercises"
TRACKS = {  # "all" is the third
    "evening": "single ddp zero1 pipeline",
    "week": """single single-clip collectives ddp ddp-buckets ddp-overlap zero1 zero1-gather zero2 zero3
        tensor_parallel context_parallel pipeline pipeline-actions checkpointing""",
}
# Of tools/trouble.py's runs.
COSTS = {"1 rank": 1, "2 ranks": 2, "3 ranks": 3, "4 ranks": 4, "3 microbatches": 6, "bf16": 2}
# name: a lesson, or a part of it | missing: bodies, or the line with this piece | minutes | hint
PATH = """
single                | / config.accum | 5 | a microbatch's loss: gradients add up, and a mean is wanted
single-clip           | clip_grad_norm_ | 10 | one norm of all; scale by max_norm / (norm + 1e-6), at most 1
collectives           | reduce_chunks | 20 | N - 1 times: send a chunk on, add the one that comes
collectives-gather    | gather_chunks | 10 | N - 1 times: pass on the chunk that came last
dp_threads            | DP.parallel_apply | 10 | a thread for each device; results in the devices' order
dp_threads-sum        | sum_gradients | 15 | all replicas' gradients, added up on the first device
dp_async              | Server.may_go_on | 10 | bsp waits for all, asp for nobody, ssp for the slowest worker
ddp                   | 1 / dist.get_world_size() | 5 | all-reduce adds up; a mean is wanted
ddp-buckets           | fill_buckets | 15 | last parameters first; a bucket ends at its cap
ddp-overlap           | DDP._gradient_ready Bucket.start_all_reduce Bucket.finish_all_reduce | 30 | overlap
uneven                | sum_of_losses(model(inputs, positions), targets) / n_tokens | 5 | one division for all
uneven-agree          | agree | 20 | two all-reduces; whoever has fewer microbatches adds empty ones
zero1                 | Unit.start_reduce_scatter Unit.finish_reduce_scatter | 20 | each needs its 1/N, summed
zero1-gather          | Unit.start_all_gather Unit.wait_all_gather | 15 | the others lack this rank's 1/N
zero1-units           | find_units | 15 | a unit for each block; the rest is the root's
zero2                 | Unit.collect Unit.finish_reduce_scatter | 25 | gradients live until they are sent
zero3                 | Unit.unshard Unit.wait_for_unshard Unit.reshard | 30 | a storage is filled and freed
zero3-prefetch        | ZeRO3._unshard | 10 | the next unit travels while this one computes
zero3-unit            | Unit | 60 | all of it: ZeRO3 shows which method is called when
hsdp                  | Unit.start_all_reduce Unit.finish_all_reduce | 20 | replicas' sums hide in backward
muon                  | newton_schulz | 20 | smaller square; a, b, c = 3.4445, -4.7750, 2.0315
diloco                | DiLoCo.start_all_reduce DiLoCo.finish_all_reduce | 15 | a rank's move is a gradient
offload               | Unit.finish_reduce_scatter Unit.update | 30 | sum by out=, copy, add; scale, step
tensor_parallel       | ColumnParallelLinear.backward | 20 | the all-reduce hides behind the weight's gradient
tensor_parallel-loss  | parallel_cross_entropy | 25 | no rank has all logits of a token
sequence_parallel     | SumPartials | 20 | an all-reduce is a reduce-scatter and an all-gather
context_parallel      | merge | 15 | two softmaxes over parts of the keys become one
context_parallel-keys | Layout.blocks | 20 | which keys does rank i see? its chunks by that rank's
context_parallel-gather | gather reduce_scatter | 15 | all ranks' kv at once; gradients go home, summed
expert_parallel       | MoE.run_experts | 40 | orders 2 to 5 of the docstring
expert_zero           | alpha=1 / dist.get_world_size() | 10 | how many ranks' tokens are in a group's sum
pipeline              | one_f_one_b | 15 | warmup: F alone; then F and B in turn; cooldown: B alone
pipeline-actions      | Pipeline._forward Pipeline._backward | 30 | receive, compute, send
zero_bubble           | deferred_linear Pipeline._weight_gradients | 25 | keep W's two factors for later
zero_bubble-schedule  | zero_bubble | 25 | W where a rank would wait
pipeline_v            | zb_v | 30 | the docstring's rows, phase by phase: F, f F, f b W, ...
parallel_3d           | Mesh.group | 15 | ranks that differ in one coordinate
checkpointing         | Checkpoint.recompute | 20 | forward again, with the random numbers of the first time
zero_r                | Partitioned.partition Partitioned.start_all_gather | 30 | 1/N of a block's input stays
fusion                | FlashAttention.forward | 40 | tile by tile, with a running maximum and sum
resume                | ShardedOptimizer.step | 25 | each rank updates its 1/N
reshard               | intersections | 10 | what lies of each run in [low, high), counted from low
reshard-walk          | Resharding.plan Resharding.deliver | 30 | all ranks come to all messages in one order
survive               | Members.sign_up Members.propose | 30 | who is next: wait for all who are not dead
survive-share         | len(inputs) / config.batch | 5 | a mean over few sequences counts less
"""
CATCH = '''"""{lesson}.py with a slip. In place of

{old}
a person wrote

{new}
Which is the cheapest run that shows it, and where? A run costs its ranks, times its microbatches."""

RANKS = 4  # 1, 2, 3 or 4
FLAGS = "--accum 3"  # or "", or "--dtype bf16"


def check(found, right):
    """found, right: what such a run of the file with the slip did, and of the lesson: {{"losses": [...],
    "grad_norms": [...], "weights": {{...}}, "held": {{name: {{"measured"}}}}, "sent": {{name: {{"wire"}}}}}}
    or {{"error": ...}}. Assert something of one of these, that one which the slip changes."""
    assert found["losses"] == right["losses"]
'''


def refuse(problem):
    """End with exit code 2, and say in one line what to change."""
    print(f"learn.py: {problem}", file=sys.stderr)
    sys.exit(2)


def say(text):
    """Print text in lines of at most 100 columns."""
    for line in text.splitlines():
        print(textwrap.fill(line, 100, subsequent_indent="     ", break_long_words=False))


def read_path():
    """[name, what is missing, minutes, hint] of each exercise, from easy to hard."""
    rows = []
    for line in PATH.strip().splitlines():
        rows.append([cell.strip() for cell in line.split("|")])
    return rows


def lesson_of(name):
    """The lesson of an exercise, and its source."""
    lesson = name.split("-")[0]
    return lesson, Path(original(lesson)).read_text()


# ---- what an exercise is made from ----


def bodies_of(source, names):
    """[(first line, last line, indentation)], from 0, of the bodies of functions, and of all of a class."""
    bodies = []
    for node in ast.parse(source).body:
        functions = [node]
        if isinstance(node, ast.ClassDef):
            functions = [child for child in node.body if isinstance(child, ast.FunctionDef)]
        for function in functions:
            name = getattr(function, "name", "")
            if function is not node and node.name not in names:
                name = f"{node.name}.{name}"
            elif function is not node:
                name = node.name
            if name in names:
                body = function.body[1:] if ast.get_docstring(function) else function.body
                bodies.append((body[0].lineno - 1, body[-1].end_lineno, body[0].col_offset))
    return bodies


def missing_in(source, what):
    """[(first line, last line, indentation)] of what an exercise leaves out."""
    bodies = bodies_of(source, what.split())
    if bodies:
        return bodies
    lines = source.splitlines()
    number = next(i for i, line in enumerate(lines) if what in line)
    return [(number, number + 1, len(lines[number]) - len(lines[number].lstrip()))]


def emptied(source, what, hint):
    """A lesson's source without these bodies, or this line."""
    lines = source.splitlines()
    for first, last, indentation in reversed(missing_in(source, what)):
        lines[first:last] = [f"{' ' * indentation}raise NotImplementedError({hint!r})"]
    return "\n".join(lines) + "\n"


def bugs():
    """{name: (lesson, source, symptom, why, how one finds it)} of the bugs of which something shows."""
    symptoms = json.loads(SYMPTOMS.read_text())
    found = {}
    for name, (lesson, old, new, why, how) in find_bugs().items():
        if symptoms.get(name):
            _, source = lesson_of(lesson)
            found[name] = lesson, source.replace(old, new), symptoms[name], why, how
    return found


def new_bug():
    """The name of a bug that the learner has not had, of a lesson of which an exercise is done."""
    progress = read_progress()
    lessons = {name.split("-")[0] for name, entry in progress.items() if entry["done"]}
    had = [*progress, *(path.stem for path in EXERCISES.glob("bug-*.py"))]
    left = [name for name, (lesson, *_) in bugs().items() if lesson in lessons and f"bug-{name}" not in had]
    if not left:
        refuse("bug: no lesson is done of which a bug is left; python learn.py fill NAME comes first")
    return random.choice(left)


def catches():
    """[(lesson, right text, wrong text, cost of the cheapest run that shows it)], of the tests' mutants."""
    from promises import find_mutants

    seen = json.loads((ROOT / "docs" / "trouble.json").read_text())
    bugs = {old for _, old, *_ in find_bugs().values()}
    found = []
    for key, (lesson, old, new) in sorted(find_mutants().items()):
        shown = [name for name, what in seen.get(key, {}).items() if what and what != "hang"]
        is_slip = old not in bugs and not re.search(r"\bpass\b|True|False", new)
        if is_slip and shown and len(shown) < len(seen[key]) and lesson != "survive":
            found.append((lesson, old, new, min(map(COSTS.get, shown))))
    return found


def made(name):
    """(lesson, the text of an exercise's file, what to say of it)."""
    for exercise, what, minutes, hint in read_path():
        if name == exercise:
            lesson, source = lesson_of(name)
            is_named = what.replace(".", "").replace(" ", "").isidentifier()
            named = " and ".join(what.split()) if is_named else "one line"
            return lesson, emptied(source, what, hint), f"{minutes} minutes (a guess), {named}: {hint}."
    kind, _, key = name.partition("-")
    if kind == "catch" and key.isdecimal() and 1 <= int(key) <= len(catches()):
        lesson, *texts, _ = catches()[int(key) - 1]
        old, new = (textwrap.indent(text.strip("\n"), "    ") + "\n" for text in texts)
        return (
            lesson,
            CATCH.format(lesson=lesson, old=old, new=new),
            f"Which run shows a slip in {lesson}.py?",
        )
    if kind != "bug" or key not in bugs():
        refuse(f"{name}: no such exercise; python learn.py shows them, catch has 1 to {len(catches())}")
    lesson, source, symptom, *_ = bugs()[key]
    return lesson, source, "\n".join([f"{lesson}.py, with a slip. What shows:", *symptom])


def write(name, again):
    """Write an exercise's file."""
    lesson, text, words = made(name)
    path = EXERCISES / f"{name}.py"
    if path.exists() and not again:
        refuse(f"exercises/{name}.py: exists; --again writes it anew, and keeps a copy")
    EXERCISES.mkdir(exist_ok=True)
    if path.exists():
        old = EXERCISES / "old"
        old.mkdir(exist_ok=True)
        kept = path.rename(old / f"{name}-{len(list(old.glob(f'{name}-*')))}.py")
        print(f"What you had is in {kept.relative_to(EXERCISES.parent)}")
    path.write_text(text)
    say(f"{words}\nEdit exercises/{name}.py, then: python learn.py check {name}")
    if not name.startswith("catch"):
        alone = lesson in ("single", "dp_threads", "dp_async", "survive")  # start their own workers, if any
        shown = words.splitlines()[-1] if name.startswith("bug") else ""  # the promise that it breaks
        ranks = re.search(r"(\d+) rank|$", shown)[1] or 2
        python = "python" if importlib.util.find_spec("torch") else ".venv/bin/python"
        command = python if alone else f"{python} -m torch.distributed.run --nproc_per_node={ranks}"
        flags = " --batch 12" * bool(shown) + " --dtype bf16" * ("bf16" in shown)
        flags += " --train" * (lesson == "collectives") + " --accum 3" * ("microbatches" in shown)
        run_it = f"{command} exercises/{name}.py --steps 3{flags}"
        say(f"To see what it prints, which check does not show: {run_it}")


def show(name):
    """Print the lesson's lines for what is missing."""
    for exercise, what, minutes, hint in read_path():
        if name == exercise:
            lesson, source = lesson_of(name)
            say(f"You miss {minutes} minutes of thinking about: {hint}. From {lesson}.py:")
            for first, last, _ in missing_in(source, what):
                print()
                for number in range(first, last):
                    print(f"{number + 1:>4} {source.splitlines()[number]}")
            return
    refuse(f"show {name}: no exercise of the path")


# ---- whether it is right ----


def read_progress():
    try:
        return json.loads(PROGRESS.read_text()) if PROGRESS.exists() else {}
    except (OSError, ValueError):
        sys.exit(f"learn.py: {PROGRESS} cannot be read: mend or delete it")


def add_attempt(name, done):
    """Note an attempt. Returns how many there were."""
    return add_to(name, "attempts", done)


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
    from promises import SECONDS, promises

    lesson, *_ = made(name)
    path = EXERCISES / f"{name}.py"
    if not path.exists():
        refuse(f"exercises/{name}.py: not there yet; fill, bug or catch writes it")
    promised = catch_promises if name.startswith("catch") else promises
    problem = None
    print(f"Ten seconds on two idle cores, or more; a run that hangs is stopped after {SECONDS}.", flush=True)
    for promise, problem in promised(str(path), lesson):
        print(f"{'no: ' if problem else 'yes:'} {promise}")
        if problem:
            say(f"     {problem}")
            break
    attempts = add_attempt(name, not problem)
    print(f"{'Not yet' if problem else 'Done'}: attempt {attempts}.")
    if name in on_track("all"):
        then = f"hint {name}" if problem else f"compare {name}, then python learn.py"
        print(f"Next: python learn.py {then}")
    for track in TRACKS:
        if name in on_track(track) and all(is_done(each, read_progress()) for each in on_track(track)):
            print(f"The track '{track}' is done.")
    if problem and name.startswith("bug") and attempts >= 2:
        say(hint(str(path), lesson, promise, attempts))
    if name.startswith("bug") and not problem:
        *_, why, how = bugs()[name.partition("-")[2]]
        _, right, *_ = find_bugs()[name.partition("-")[2]]
        print(f"In {lesson}.py:\n{textwrap.indent(right.strip(chr(10)), '    ')}")
        say(f"{why} How one finds it: {how}\nNext: python learn.py bug")
    sys.exit(1 if problem else 0)


def hint(path, lesson, promise, attempts):
    """The phase in which a bug shows first, by tools/diverge.py; after three attempts its function, too."""
    import diverge

    ranks = int(re.match(r"\d+|", promise)[0] or 2)
    first, _ = diverge.diverge(path, lesson, ranks, "--accum 3" * ("microbatches" in promise))
    if not first or "step" not in first:
        return "Hint: numbers do not tell where it is; what does the broken promise depend on?"
    function = diverge.function_of(first) if attempts >= 3 else ""
    return f"Hint: the first number that differs is of step {first['step']}, {first['phase']}" + (
        f". Look at {function}, or at what it calls or is called by." if function else "."
    )


class OneOf(dict):
    """What a run did, which notes what is asked of it."""

    def __getitem__(self, key):
        self.asked = {*getattr(self, "asked", ()), key}
        return super().__getitem__(key)


def catch_promises(path, _):
    """Yield, as promises() does, whether a learner's check shows a slip, and by the cheapest run."""
    import ledger
    from promises import run

    answer = ledger.load(path)
    number = int(Path(path).stem.partition("-")[2])
    lesson, old, new, least = catches()[number - 1]
    _, source = lesson_of(lesson)
    cost = answer.RANKS * int(re.findall(r"--accum[ =](\d+)|$", answer.FLAGS)[0] or 1)
    asked = set()
    with tempfile.TemporaryDirectory() as folder:
        right = OneOf(run(original(lesson), lesson, answer.RANKS, answer.FLAGS))
        for promise, text in (
            (f"it holds on {lesson}.py", source),
            ("it shows the slip", source.replace(old, new)),
        ):
            file = Path(folder, f"{lesson}-{len(asked)}.py")
            file.write_text(text)
            found = OneOf(run(str(file), lesson, answer.RANKS, answer.FLAGS))
            failed = None
            try:
                answer.check(found, right)
            except Exception as error:
                line = traceback.extract_tb(error.__traceback__)[-1]
                failed = f"{type(error).__name__} {error} in line {line.lineno}: {line.line}"
            asked |= getattr(found, "asked", set())
            if text == source:
                yield promise, failed
            else:
                shown = "error" in found or (failed and failed.startswith("AssertionError"))
                yield promise, None if shown else failed or "it holds there, too"
    yield "it looks at one thing", f"at {', '.join(sorted(asked))}" if len(asked) > 1 else None
    yield "no cheaper run shows it", f"it costs {cost}; one of {least} does" if cost > least else None


# ---- where one stands ----


def read_notes():
    """{exercise: (what it needs first, three hints, five lines to compare)}, of docs/exercises.md."""
    notes = {}
    for section in re.split(r"^## ", NOTES.read_text(), flags=re.M)[1:]:
        name, needs, body = section.split("\n", 2)
        needs = needs.removeprefix("after: ")
        hints = re.findall(r"^\d\. (.*?)\n(?=\d\. |- )", body, re.M | re.S)
        notes[name] = needs, hints, re.findall(r"^- (.*)", body, re.M)
    return notes


def on_track(track):
    """The exercises of a track."""
    names = [name for name, *_ in read_path()]
    return TRACKS[track].split() if track in TRACKS else names


def is_done(name, progress):
    return progress.get(name, {}).get("done", False)


def next_on_path(progress):
    """(the shortest track that is not done, its next exercise or None)."""
    for track in (*TRACKS, "all"):
        for name in on_track(track):
            if not is_done(name, progress):
                return track, name
    return "all", None


def list_path(track):
    """Print a track, what comes next, and how far one is on each track."""
    progress = read_progress()
    current, upcoming = next_on_path(progress)
    track = track or current
    if track not in (*TRACKS, "all"):
        refuse(f"path {track}: must be one of {', '.join(TRACKS)}, all")
    notes = read_notes()
    minutes = {name: int(minutes) for name, _, minutes, _ in read_path()}
    print(f"The track '{track}'. Minutes are guesses, without reading. Progress is in {PROGRESS}.")
    print(f"\n{'needs first':>43}")
    for name in on_track(track):
        state = "done" if is_done(name, progress) else "next" if name == upcoming else ""
        print(f"{state:<5}{name:<24}{minutes[name]:>3} min{'':5}{notes[name][0]}")
    print()
    for each in (*TRACKS, "all"):
        names = on_track(each)
        done = sum(is_done(name, progress) for name in names)
        print(f"{each:<8}{done:>3} of {len(names)} done, {sum(map(minutes.get, names))} min in all")
    shown = sum(map(bool, json.loads(SYMPTOMS.read_text()).values()))
    found = sum(name.startswith("bug") and entry["done"] for name, entry in progress.items())
    print(f"bugs   {found:>4} of {shown} found: python learn.py bug; others: catch 1, predict zero3")
    print()
    if not any(entry["done"] for entry in progress.values()):
        print("New here? Ten minutes of questions, if you like: python learn.py start")
    if upcoming:
        print(f"Next: python learn.py fill {upcoming}; then read exercises/{upcoming}.py from the top")


def give_hint(name):
    """Print the next of an exercise's three hints, and what has been given before."""
    notes = read_notes()
    if name not in notes:
        refuse(f"hint {name}: no exercise of the path; a bug's hints come with check")
    given = add_to(name, "hints")
    _, hints, _ = notes[name]
    for number, text in enumerate(hints[:given], 1):
        words, _, code = text.partition("```")
        say(f"{number}. {words.strip()}")
        print(textwrap.indent(code.strip("`\n"), "       "), end="\n" * bool(code))
    if given >= len(hints):
        print(f"That is all. The lesson's own lines: python learn.py show {name}")


def compare(name):
    """Print what the learner wrote, what the lesson has, and what there is to say of it."""
    notes = read_notes()
    if name not in notes or not is_done(name, read_progress()):
        refuse(f"compare {name}: after python learn.py check {name} has said Done")
    _, what, _, _ = next(row for row in read_path() if row[0] == name)
    lesson, source = lesson_of(name)
    own = (EXERCISES / f"{name}.py").read_text()
    for title, text in (f"exercises/{name}.py", own), (f"{lesson}.py", source):
        print(f"---- {title}\n{answer_in(text, what, source)}\n")
    for line in notes[name][2]:
        say(f"- {line}")


def answer_in(text, what, source):
    """The lines of a text that stand where the lesson's source has what an exercise leaves out."""
    lines = text.splitlines()
    bodies = bodies_of(text, what.split())
    if bodies:
        return "\n\n".join("\n".join(lines[first:last]) for first, last, _ in bodies)
    kept = set(emptied(source, what, "").splitlines())
    return "\n".join(line for line in lines if line not in kept)


def predict(name, seed):
    """Ask two questions on a lesson, or on one of those that are done."""
    import foresee

    done = [each for each in on_track("all") if is_done(each, read_progress())]
    name = name or random.choice(done or ["ddp"])
    if name not in on_track("all"):
        refuse(f"predict {name}: no such lesson")
    lesson, _ = lesson_of(name)
    right = foresee.ask(lesson, random.Random(seed))
    add_to(f"predict {lesson}", "attempts", right)


def main():
    sources.AS_COMMITTED = True
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.error = refuse
    ours = {"path": list_path, "check": check, "hint": give_hint, "show": show, "compare": compare}
    others = ("fill", "bug", "catch", "start", "predict", "notebook", "handout", "grade")
    parser.add_argument("command", nargs="?", default="path", choices=(*ours, *others))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seed", type=int)
    given = parser.parse_intermixed_args()
    name = Path(given.names[0]).stem if given.names else ""
    if given.command == "path":
        list_path(name)
    elif given.command == "start":
        import start

        start.ask_all()
    elif given.command == "predict":
        predict(name, given.seed)
    elif given.command == "notebook":
        import cells

        cells.write(on_track(name or "evening"), EXERCISES / f"{name or 'evening'}.ipynb")
    elif given.command == "bug" and not name:
        write(f"bug-{new_bug()}", given.again)
    elif not name:
        refuse(f"{given.command}: needs a name or a number; python learn.py lists them")
    elif given.command in ("handout", "grade"):
        import handout

        {"handout": handout.write, "grade": handout.grade}[given.command](given.names, given.seed)
    elif given.command == "fill":
        write(name, given.again)
    elif given.command in ("bug", "catch"):
        write(f"{given.command}-{name.removeprefix(f'{given.command}-')}", given.again)
    else:
        ours[given.command](name)


def run():
    """main(), by the Python of .venv if this one has no torch."""
    try:
        main()
    except (KeyboardInterrupt, EOFError):
        sys.exit("\nlearn.py: stopped; progress is kept")
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "numpy"):
            raise
        venv = ROOT / ".venv"
        if Path(sys.prefix) == venv or not (venv / "bin" / "python").exists():
            refuse(f"{missing.name} is missing: ./run.sh setup installs it once, in .venv")
        os.execv(venv / "bin" / "python", [venv / "bin" / "python", *sys.argv])


if __name__ == "__main__":
    run()
