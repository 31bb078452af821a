"""Questions whose answers stand nowhere, and that runs judge: python learn.py predict LESSON.

What each rank holds and sends is measured twice, with something changed in between: what grows, stays, falls?
And a line is changed: which promise breaks first? Both are drawn anew each time."""

import difflib
import json
import re
import tempfile
from pathlib import Path

from promises import FLAGS, ROOT, SIZES, find_mutants, promises, run
from sources import find_bugs, original

CHANGES = {  # flags of the second run
    "the width is doubled": "--width 72",
    "there are twice as many layers": "--layers 6",
    "the batch is doubled": "--batch 48",
    "the context is doubled": "--context 48",
    "a step has 3 microbatches in place of 1, of the same batch": "--accum 3",
    "fp32 takes the place of fp64": "--dtype fp32",
    "SGD takes the place of AdamW": "--optim sgd",
}
ANSWERS = {"+": "grows", "=": "stays", "-": "falls"}
KINDS = {  # {a kind of promise: what such a promise says}
    "it runs to its end": r": it runs$",
    "losses and gradient norms are right": r"loss|norm",
    "weights are right": r"weights",
    "it sends no more": r"bytes sent",
    "it holds no more": r"bytes held",
    "it computes nothing twice": r"twice",
    "communication hides behind computation": r"hides",
    "something else, or nothing": r"",
}


def choose(question, choices):
    """The answer, one of these."""
    while True:
        answer = input(question).strip()
        if answer in choices:
            return answer
        print(f"  one of {' '.join(choices)}, please")


def twice(question, choices, right):
    """Ask, and after a wrong answer once more. Returns whether an answer was right."""
    for attempt in (1, 2):
        if choose(question, choices) == right:
            print("  right")
            return True
        if attempt == 1:
            print("  no. Think of what one rank does, and try again")
    print(f"  no: {right}")
    return False


def measured(found):
    """{"held, weights": bytes, ...} of a run; what is 0 is left out."""
    rows = {}
    for part, column in (("held", "measured"), ("sent", "wire")):
        rows |= {f"{part}, {name}": row[column] for name, row in found[part].items() if row.get(column)}
    return rows


def draw_change(lesson, dice):
    """(what is changed, (ranks, flags) before, (ranks, flags) after)."""
    sizes = SIZES.get(lesson, (2, 4))
    changes = {words: ((sizes[-1], ""), (sizes[-1], flags)) for words, flags in CHANGES.items()}
    if len(sizes) > 1:
        words = f"there are {sizes[-1]} ranks in place of {sizes[0]}"
        changes[words] = ((sizes[0], ""), (sizes[-1], ""))
    words = dice.choice(list(changes))
    return words, *changes[words]


def ask_change(lesson, dice):
    """What grows, stays, falls? Returns whether all answers were right."""
    words, before, after = draw_change(lesson, dice)
    path = original(lesson)
    rows = [measured(run(path, lesson, *each)) for each in (before, after)]
    shape = " ".join(FLAGS[: FLAGS.index("--device")])
    print(f"{lesson}.py on {before[0]} rank(s), with {shape}.\nNow {words}.")
    print("What does that do to the bytes of a rank, in a step? + grows, - falls, = stays (within 3 %)")
    right = True
    for name, number in sorted(rows[0].items()):
        ratio = rows[1].get(name, 0) / number
        answer = "=" if abs(ratio - 1) < 0.03 else "+-"[ratio < 1]
        right &= twice(f"{name}? ", ANSWERS, answer)
        print(f"  it {ANSWERS[answer]}: from {number:.0f} to {number * ratio:.0f}, {ratio:.2f} times")
    return right


def kind_of(promise):
    """The number of a promise's kind, as a string."""
    return str(1 + next(i for i, pattern in enumerate(KINDS.values()) if re.search(pattern, promise)))


def draw_mutant(lesson, dice):
    """(old, new) of a mutant of which something shows, and that does not hang."""
    seen = json.loads((ROOT / "docs/trouble.json").read_text())
    source = Path(original(lesson)).read_text()
    bugs = {old for _, old, *_ in find_bugs().values()}  # exercises of their own
    found = []
    for key, (name, old, new) in find_mutants().items():
        shown = seen.get(key, {}).values()
        is_whole = name == lesson and source.count(old) == 1 and old not in bugs
        if is_whole and any(shown) and "hang" not in shown:
            found.append((old, new))
    return dice.choice(found) if found else None


def ask_mutant(lesson, dice):
    """Which promise breaks first? Returns whether the answer was right."""
    mutant = draw_mutant(lesson, dice)
    if not mutant:
        return True
    source = Path(original(lesson)).read_text()
    broken = source.replace(*mutant)
    print(f"\nIn {lesson}.py:")
    for line in difflib.unified_diff(source.splitlines(), broken.splitlines(), n=2, lineterm=""):
        if line[:3] not in ("---", "+++", "@@ "):
            print(f"    {line}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{lesson}.py")
        path.write_text(broken)
        broken = ((promise, how) for promise, how in promises(str(path), lesson) if how)
        first, how = next(broken, ("nothing", "all promises are kept"))
    print("check asks in this order, of 1 rank first. What breaks first?")
    for number, kind in enumerate(KINDS, 1):
        print(f"  {number} {kind}")
    right = twice("> ", [str(number) for number in range(1, len(KINDS) + 1)], kind_of(first))
    print(f"  {first}: {how}")
    return right


def ask(lesson, dice):
    """Both questions. Returns whether all answers were right."""
    print("Runs first, questions then: up to half a minute.", flush=True)
    right = ask_change(lesson, dice)
    return ask_mutant(lesson, dice) and right
