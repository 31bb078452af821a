"""What a class gets, and how it is graded; and the notebook with all answers and with none. They are samples;
with FUZZ set they are whole: thirty hand-ins, and all of the evening's track."""

import contextlib
import csv
import importlib
import io
import json
import os
import random
import subprocess
import sys
from unittest import mock

import pytest

from tests.harness import ROOT, load, said

WHOLE = bool(os.environ.get("FUZZ"))
learn = load("learn")
handout = importlib.import_module("handout")
cells = importlib.import_module("cells")
promises = importlib.import_module("promises")
FORBIDDEN = ("symptoms.json", "trouble", "test_", "learn.py", "exercises.md")
STUB = 'raise NotImplementedError("warmup: F alone; then F and B in turn; cooldown: B alone")'
CHECK_TWICE = """
import sys
sys.path.insert(0, "tools")
import check, promises, shutil
promises.SIZES.update({sizes})
print(check.check("{lesson}", {{"lesson": "{lesson}"}}))
promises.run.cache_clear()
shutil.copy("{root}/{lesson}.py", "work")
print(check.check("{lesson}", {{"lesson": "{lesson}"}}))
"""
OWN = [  # one_f_one_b in several people's words
    """    ahead = min(n_microbatches, n_ranks - rank - 1)
    ops = ["F"] * ahead
    for _ in range(n_microbatches - ahead):
        ops.extend(["F", "B"])
    ops.extend(["B"] * ahead)
    return "".join(ops)""",
    """    todo_f, todo_b, ops = n_microbatches, n_microbatches, ""
    while todo_b:
        in_flight = todo_b - todo_f
        if todo_f and in_flight < n_ranks - rank:
            ops, todo_f = ops + "F", todo_f - 1
        else:
            ops, todo_b = ops + "B", todo_b - 1
    return ops""",
    """    first = max(0, min(n_ranks - 1 - rank, n_microbatches))
    middle = n_microbatches - first
    return f"{'F' * first}{'FB' * middle}{'B' * first}\"""",
    """    forwards = iter("F" * n_microbatches)
    order = [next(forwards, "") for _ in range(n_ranks - 1 - rank)]
    for _ in range(n_microbatches):
        order.append(next(forwards, ""))
        order.append("B")
    return "".join(order)""",
    """    def turn(done_f, done_b):
        if done_b == n_microbatches:
            return ""
        if done_f < n_microbatches and done_f - done_b <= n_ranks - 1 - rank:
            return "F" + turn(done_f + 1, done_b)
        return "B" + turn(done_f, done_b + 1)

    return turn(0, 0)""",
    """    waiting = n_ranks - 1 - rank
    ops = []
    for step in range(n_microbatches + waiting):
        if step < n_microbatches:
            ops.append("F")
        if step >= waiting:
            ops.append("B")
    return "".join(ops)""",
]
BROKEN = [
    '    return "F" * n_microbatches',  # no backward
    '    return "FB" * n_microbatches +',  # cannot be read
    '    return "B" * n_microbatches + "F" * n_microbatches',
    "    return warmup",
    "    raise ValueError",
    f"    {STUB}",
]
LAZY = [  # right losses, but a backward does not run as early as it can
    '    return "F" * n_microbatches + "B" * n_microbatches',
    """    n_warmup = min(n_ranks - rank, n_microbatches)
    return "F" * n_warmup + "FB" * (n_microbatches - n_warmup) + "B" * n_warmup""",
]


def pipeline_with(body):
    """pipeline.py with this body of one_f_one_b."""
    text = learn.emptied(learn.lesson_of("pipeline")[1], "one_f_one_b", "")
    return text.replace("    raise NotImplementedError('')", body)


@pytest.fixture
def quick():
    """Promises on 2 ranks alone, unless all is tried."""
    sizes = {} if WHOLE else {"pipeline": (1, 2), "ddp": (2,), "zero1": (2,)}
    with mock.patch.dict(promises.SIZES, sizes):
        yield


@pytest.mark.parametrize("seed", range(20 if WHOLE else 3))
def test_no_file_of_a_handout_has_another_ones_answer(seed):
    drawn = handout.draw(seed)
    assert len(drawn) == 5 and sum(name.startswith("bug") for name in drawn) == 2
    for name, given in drawn.items():
        assert given["answer"] or name.startswith("bug"), name
        for other in drawn.values():
            assert not any(line in other["text"] for line in given["answer"] if other is not given), name
    assert list(handout.draw(seed)) == list(drawn), "the same seed draws others"


def test_a_handout_checks_without_lessons(tmp_path, quick):
    folder = tmp_path / "given"
    lesson, answer = "single", "microloss = mean_loss(model(inputs), targets) / config.accum"
    if WHOLE:
        lesson, answer = "ddp", "self.flat_grad /= dist.get_world_size()"
    with mock.patch.object(handout, "draw", lambda *_: {lesson: handout.candidates([lesson])[0][0][1]}):
        said(lambda: handout.write([str(folder), lesson], 1))
    assert said(lambda: handout.write([str(folder)], 1))[2] == 2, "a handout is not overwritten"
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert not [name for name in names if any(word in name for word in FORBIDDEN)], names
    assert not [name for name in names if not name.endswith(".pt") and answer in (folder / name).read_text()]

    def run(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout

    assert f"work/{lesson}.py" in run("check.py")
    assert [len(run("check.py", "hint", lesson).splitlines()) for _ in range(2)] == [1, 2]
    out = run("-c", CHECK_TWICE.format(sizes=promises.SIZES, lesson=lesson, root=ROOT))  # as quick() has them
    assert "NotImplementedError" in out and out.index("Not yet\nFalse") < out.index("Done\nTrue"), out
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [entry["what"] for entry in log] == ["hint", "hint", "check", "check"]
    assert "it runs" in log[2]["promise"] and log[3]["promise"] == "" and log[2]["hash"] != log[3]["hash"]


def hand_in(folder, body, minutes):
    """A student's folder, whose log has two attempts and a hint."""
    (folder / "work").mkdir(parents=True)
    (folder / "handout.json").write_text(json.dumps({"exercises": {"pipeline": {"lesson": "pipeline"}}}))
    (folder / "work/pipeline.py").write_text(pipeline_with(body))
    log = [("check", 0, "a"), ("hint", 60 * minutes, "a"), ("check", 60 * minutes + 7200, "b")]
    with open(folder / "log.jsonl", "w") as file:
        for what, time, digest in log:
            print(json.dumps({"time": time, "name": "pipeline", "what": what, "hash": digest}), file=file)
        print("no line of a log", file=file)


def test_hand_ins_are_graded_each_where_it_belongs(tmp_path, quick):
    _, source = learn.lesson_of("pipeline")
    right = learn.answer_in(source, "one_f_one_b", source)
    dice = random.Random()
    own, broken = (OWN, BROKEN) if WHOLE else (dice.sample(OWN, 1), [BROKEN[1], dice.choice(BROKEN)])
    hand_ins = {f"own{i}": body for i, body in enumerate(own)}
    hand_ins |= {f"copy{i}": body.replace("\n", "  # mine\n", 1) for i, body in enumerate(own)}
    hand_ins |= {f"lesson{i}": right for i in range(6 if WHOLE else 1)}
    hand_ins |= {f"broken{i}": body for i, body in enumerate(broken)}
    hand_ins |= {f"lazy{i}": LAZY[i % 2] for i in range(6 if WHOLE else 0)}
    for i, (name, body) in enumerate(hand_ins.items()):
        hand_in(tmp_path / name, body, i)
    out = said(lambda: handout.grade([str(tmp_path / name) for name in [*hand_ins, "nothing"]]))[0]
    rows = {row["student"]: row for row in csv.DictReader(io.StringIO(out))}
    assert list(rows) == list(hand_ins)
    for i, (name, row) in enumerate(rows.items()):
        assert (row["attempts"], row["hints"], row["minutes"]) == ("2", "1", str(i)), row
        assert row["done"] == str(int(name[:3] in ("own", "cop", "les"))), row
        assert bool(row["breaks"]) == (row["done"] == "0"), row
        if name.startswith("copy"):
            assert row["like-other"] == "1.00" and row["other"] == name.replace("copy", "own"), row
        if name.startswith("lesson"):
            assert row["like-lesson"] == "1.00", row
        if name.startswith("own"):
            assert float(row["like-lesson"]) < 0.8 and row["other"] == name.replace("own", "copy"), row
    assert rows["broken0" if not WHOLE else "broken1"]["breaks"] == "it can be read"


def answer_of(name, function):
    """The lesson's text for a cell."""
    _, source = learn.lesson_of(name)
    what = next(row[1] for row in learn.read_path() if row[0] == name)
    if function:
        first, last = next(place for known, *place in cells.functions_in(source, what) if known == function)
    else:
        first, last, _ = learn.missing_in(source, what)[0]
    return "\n".join(source.splitlines()[first:last])


@pytest.mark.parametrize("answers", [True, False])
def test_a_notebook_with_all_answers_is_done_and_with_stubs_is_not(answers, tmp_path, quick):
    learn.EXERCISES = cells.learn.EXERCISES = tmp_path
    learn.PROGRESS = tmp_path / "progress.json"
    names = learn.on_track("evening")
    names = names if WHOLE else [random.choice(names)]
    said(lambda: cells.write(names, tmp_path / "evening.ipynb"))
    checked = []
    for cell in json.loads((tmp_path / "evening.ipynb").read_text())["cells"]:
        line, _, text = "".join(cell["source"]).partition("\n")
        words = line.split()
        if words[0] == "%%fill":
            text = cells.textwrap.dedent(answer_of(words[1], "".join(words[2:]))) if answers else text
            with contextlib.redirect_stdout(io.StringIO()):
                cells.fill(" ".join(words[1:]), text)
        if "check" in words:
            out, _, code = said(lambda name=words[-1]: learn.check(name))
            assert code == (not answers) and ("Done" in out) == answers, out
            assert answers or "NotImplementedError" in out
            checked.append(words[-1])
    assert checked == names
