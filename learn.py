"""Something to do: fill in, find the bug, predict, catch. Made from the lessons and from the tests' mutants.

    python learn.py                 the path: what is done, what comes next, minutes each
    python learn.py fill zero1      writes exercises/zero1.py: the bodies of some functions are missing
    python learn.py check zero1     are they right? promises in order, up to the first that breaks
    python learn.py show zero1      the lesson's own lines for what is still missing
    python learn.py bug 17          writes exercises/bug17.py: a line is wrong, and only the symptom is told
    python learn.py catch 5         writes exercises/catch5.py: an assertion that a lesson keeps, mutants not
    python learn.py predict zero3   asks for the bytes held and sent; tools/ledger.py's measurement judges

A file that exists is written again with --again alone. Progress: exercises/.progress.json.
"""

import argparse
import ast
import difflib
import json
import random
import re
import sys
import tempfile
import textwrap
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
import diverge
import ledger
from letters import spelled
from promises import ROOT, SIZES, SYMPTOMS, find_mutants, plain_of, promises, run

EXERCISES = ROOT / "exercises"
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
zero1                 | Unit.start_reduce_scatter Unit.finish_reduce_scatter | 20 | each needs 1/N of it
zero1-gather          | Unit.start_all_gather Unit.wait_all_gather | 15 | the others lack this rank's 1/N
zero1-units           | find_units | 15 | a unit for each block; the rest is the root's
zero2                 | Unit.collect Unit.finish_reduce_scatter | 25 | gradients live until they are sent
zero3                 | Unit.unshard Unit.wait_for_unshard Unit.reshard | 30 | a storage is filled and freed
zero3-prefetch        | ZeRO3._unshard | 10 | the next unit travels while this one computes
zero3-unit            | Unit | 60 | all of it: ZeRO3 shows which method is called when
hsdp                  | Unit.start_all_reduce Unit.finish_all_reduce | 20 | replicas' sums hide in backward
muon                  | newton_schulz | 20 | five steps, of the smaller of two squares
diloco                | DiLoCo.start_all_reduce DiLoCo.finish_all_reduce | 15 | a rank's move is a gradient
offload               | Unit.finish_reduce_scatter Unit.update | 30 | wait, sum, copy, add; scale, step, round
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
CATCH = '''"""An assertion that {lesson}.py keeps, and that three hidden mutants of it break."""


def check(run, plain):
    """run(2, "--accum 3") is what 2 ranks did with these flags: {{"losses": [...], "grad_norms": [...],
    "weights": {{...}}, "held": {{name: {{"formula", "measured"}}}}, "sent": {{name: {{"formula", "wire"}}}}}}
    or {{"error": ...}}; plain("--accum 3") is the plain loop's. Held: up to 10 % above the formula."""
    assert "error" not in run(1)
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
    return lesson, (ROOT / f"{lesson}.py").read_text()


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
    """[(lesson, source, symptom)] of the mutants of which something shows, in the path's order."""
    symptoms = json.loads(SYMPTOMS.read_text())
    order = [name for name, *_ in read_path()]
    found = []
    for key, (lesson, old, new) in find_mutants().items():
        if symptoms.get(key):
            _, source = lesson_of(lesson)
            text = re.sub(r" +$", "", source.replace(old, new), flags=re.M)  # else they tell the line
            found.append((lesson, text, symptoms[key]))
    return sorted(found, key=lambda bug: order.index(bug[0]))


def hidden_mutants(number):
    """(lesson, sources of three of its mutants); catches have numbers, in the order of lessons."""
    sources = {}
    for lesson, source, _ in bugs():
        sources.setdefault(lesson, []).append(source)
    enough = [lesson for lesson in sources if len(sources[lesson]) >= 3 and lesson != "single"]
    if not 1 <= number <= len(enough):
        refuse(f"catch {number}: must be from 1 to {len(enough)}")
    lesson = enough[number - 1]
    return lesson, random.Random(number).sample(sources[lesson], 3)


def made(name):
    """(lesson, the text of an exercise's file, what to say of it)."""
    for exercise, what, minutes, hint in read_path():
        if name == exercise:
            lesson, source = lesson_of(name)
            named = what if what.replace(".", "").replace(" ", "").isidentifier() else "one line"
            return lesson, emptied(source, what, hint), f"{minutes} minutes, {named}: {hint}."
    kind, number = name[:3], name[3:]
    if name.startswith("catch"):
        kind, number = name[:5], name[5:]
    if kind not in ("bug", "catch") or not number.isdecimal():
        refuse(f"{name}: no such exercise; python learn.py shows them")
    if kind == "catch":
        lesson, _ = hidden_mutants(int(number))
        return (
            lesson,
            CATCH.format(lesson=lesson),
            f"Write check(): {lesson}.py passes, three mutants fail.",
        )
    known = bugs()
    if not 1 <= int(number) <= len(known):
        refuse(f"bug {number}: must be from 1 to {len(known)}")
    lesson, source, symptom = known[int(number) - 1]
    return lesson, source, "\n".join([f"{lesson}.py, in which one line is wrong. What shows:", *symptom])


def write(name, again):
    """Write an exercise's file."""
    _, text, words = made(name)
    path = EXERCISES / f"{name}.py"
    if path.exists() and not again:
        refuse(f"exercises/{name}.py: exists; --again writes it anew")
    EXERCISES.mkdir(exist_ok=True)
    path.write_text(text)
    say(f"{words}\nEdit exercises/{name}.py, then: python learn.py check {name}")
    if not name.startswith("catch"):
        run_it = f"python -m torch.distributed.run --nproc_per_node=2 exercises/{name}.py --steps 3"
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
    path = EXERCISES / ".progress.json"
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        sys.exit(f"learn.py: {path} is damaged: mend or delete it")


def add_attempt(name, done):
    """Note an attempt; the file is replaced as a whole. Returns how many there were."""
    progress = read_progress()
    entry = progress.setdefault(name, {"attempts": 0, "done": False})
    entry["attempts"] += 1
    entry["done"] |= done
    EXERCISES.mkdir(exist_ok=True)
    draft = EXERCISES / ".progress.new"
    draft.write_text(json.dumps(progress))
    draft.replace(EXERCISES / ".progress.json")
    return entry["attempts"]


def check(name):
    """Say which promises an exercise's file keeps, up to the first that it breaks."""
    lesson, before, _ = made(name)
    path = EXERCISES / f"{name}.py"
    if not path.exists():
        refuse(f"exercises/{name}.py: not there yet; fill, bug or catch writes it")
    promised = catch_promises if name.startswith("catch") else promises
    problem = None
    for promise, problem in promised(str(path), lesson):
        print(f"{'no: ' if problem else 'yes:'} {promise}")
        if problem:
            say(f"     {problem}")
            break
    diff = difflib.ndiff(before.splitlines(), path.read_text().splitlines())
    changed = sum(line[0] in "+-" for line in diff)
    attempts = add_attempt(name, not problem)
    print(f"{'Not yet' if problem else 'Done'}: attempt {attempts}, {changed} lines taken or added.")
    if problem and name.startswith("bug") and attempts >= 2:
        say(hint(str(path), lesson, promise, attempts))
    if name.startswith("bug") and not problem:
        _, source = lesson_of(lesson)
        right = set(source.splitlines()) - set(before.splitlines())
        print(f"In {lesson}.py:", *right or ["(a line more)"], sep="\n")
    sys.exit(1 if problem else 0)


def hint(path, lesson, promise, attempts):
    """The phase in which a bug shows first, by tools/diverge.py; after three attempts its function, too."""
    ranks = int(re.match(r"\d+|", promise)[0] or 2)
    first, _ = diverge.diverge(path, lesson, ranks, "--accum 3" * ("microbatches" in promise))
    if not first or "step" not in first:
        return "Hint: numbers do not tell where it is; what does the broken promise depend on?"
    function = diverge.function_of(first) if attempts >= 3 else ""
    return f"Hint: the first number that differs is of step {first['step']}, {first['phase']}" + (
        f". Look at {function}, or at what it calls or is called by." if function else "."
    )


def catch_promises(path, _):
    """Yield, as promises() does, whether a check holds on a lesson, and fails on each of its mutants."""
    checker = ledger.load(path)
    lesson, mutants = hidden_mutants(int(Path(path).stem.removeprefix("catch")))
    _, source = lesson_of(lesson)
    with tempfile.TemporaryDirectory() as folder:
        for i, text in enumerate([source, *mutants]):
            file = Path(folder, f"{lesson}-{i}.py")
            file.write_text(text)
            failed = None
            try:
                checker.check(partial(run, str(file), lesson), partial(run, *plain_of(lesson), 1))
            except Exception as error:
                line = traceback.extract_tb(error.__traceback__)[-1]
                failed = f"{type(error).__name__} {error} in line {line.lineno}: {line.line}"
            if i == 0:
                yield f"it holds on {lesson}.py", failed
            else:
                caught = failed and failed.startswith("AssertionError")
                yield f"it fails on mutant {i}", None if caught else failed or "it holds there, too"


def ask(question, letters):
    """The value of an answer: a number, or a formula in these letters, such as wP(N-1)/N."""
    while True:
        answer = input(f"{question}: ")
        if re.fullmatch(r"[\w.,+*/() -]{1,80}", answer) and "**" not in answer:
            with suppress(SyntaxError, TypeError, NameError, ZeroDivisionError):
                return ledger.evaluate(answer, letters)
        say(f"  cannot read {answer!r}: a number of bytes, such as 560640, or a formula, such as 8P/N")


def predict(lesson):
    """Ask for bytes held and sent, at a shape that changes daily. What is measured is right, within 1 %."""
    if lesson not in [name for name, *_ in read_path()]:
        refuse(f"predict {lesson}: no such lesson")
    dice = random.Random(f"{lesson} {time.strftime('%x')}")
    size = dice.choice(SIZES.get(lesson, (2, 4)))
    shape = f"--width {dice.choice((24, 48, 96))} --layers {dice.choice((2, 4, 6))}"
    found = run(str(ROOT / f"{lesson}.py"), lesson, size, shape)
    letters = found["letters"]
    say(
        f"How many bytes does {lesson}.py hold, and send in a step, with {shape}, on {size} rank(s)? In fp64."
    )
    say("A number, or a formula in " + " ".join(f"{key}={letters[key]:g}" for key in sorted(letters)))
    right = True
    for part, column in (("held", "measured"), ("sent", "wire")):
        for name in sorted(found["formulas"].keys() & found[part].keys()):
            formula = found["formulas"][name]
            row = found[part][name]  # gradients may exceed the formula by a parameter's, just computed
            answer = ask(f"{name}, {part}", letters)
            close = any(abs(answer - row[key]) <= 0.01 * row[key] for key in (column, "formula"))
            term = re.sub(r"\b[A-Za-z]\b", lambda match: f"{letters[match[0]]:g}", spelled(formula))
            say("  right" if close else f"  no: {row[column]:.0f} were measured; {formula}\n  {term}")
            right &= close
    add_attempt(f"predict {lesson}", right)


def list_path():
    """Print the path."""
    progress = read_progress()
    print("Exercises, from easy to hard: python learn.py fill NAME, then check NAME")
    for name, _, minutes, hint in read_path():
        done = progress.get(name, {}).get("done", False)
        print(f"{'done' if done else '    '} {name:<22}{minutes:>3} min  {hint}"[:100])
    found = sum(name.startswith("bug") and entry["done"] for name, entry in progress.items())
    known = [lesson for lesson, _, _ in bugs()]
    print(f"Bugs: {found} of {len(known)} found. python learn.py bug N, then check bugN. N from")
    first = {lesson: known.index(lesson) + 1 for lesson in known}
    say(", ".join(f"{number} {lesson}" for lesson, number in first.items()))


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.error = refuse
    commands = ("path", "fill", "bug", "catch", "check", "show", "predict")
    parser.add_argument("command", nargs="?", default="path", choices=commands)
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    name = Path(given.name).stem
    if given.command == "path":
        list_path()
    elif not name:
        refuse(f"{given.command}: needs a name or a number; python learn.py lists them")
    elif given.command == "fill":
        write(name, given.again)
    elif given.command in ("bug", "catch"):
        write(given.command + name.removeprefix(given.command), given.again)
    else:
        {"check": check, "show": show, "predict": predict}[given.command](name)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, EOFError):
        sys.exit("\nlearn.py: stopped; progress is kept")
