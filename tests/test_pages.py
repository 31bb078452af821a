"""README.md and docs/use.md: each command and each snippet on them runs, and what they count is so."""

import functools
import json
import re
import shlex
import subprocess
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.run import parse_args

from tests.harness import ROOT, TEXT, apart, load, on_ranks, train, world
from tests.test_flags import run_command

README = (ROOT / "README.md").read_text()
USE = (ROOT / "docs/use.md").read_text()
LESSONS = re.search(r"LESSONS=\(([^)]*)\)", (ROOT / "run.sh").read_text())[1].split()
TINY = f"--size toy --layers 2 --width 16 --heads 2 --context 8 --steps 2 --device cpu --data {TEXT}"


# ---- commands ----


def commands_of(page):
    """The command lines in a page's blocks of code and in its text, without their comments."""
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.M | re.S)
    text = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines() + re.findall(r"`([^`\n]+)`", text)
    command = r"(?:\$ )?((?:\w+=(?:\"[^\"]*\"|\S+) )*(?:\./run\.sh|python|torchrun|diff)(?: .*)?)$"
    found = [re.match(command, re.sub(r" +#.*", "", line)) for line in lines]
    return sorted({match[1] for match in found if match})


def of(page, program):
    return [line for line in commands_of(page) if program in line]


def split(torchrun):
    """(the script that a torchrun line starts, its arguments); torchrun's own must be good."""
    words = shlex.split(torchrun.replace("LESSON.py", "ddp.py"))
    options = parse_args(words[words.index("torchrun") + 1 :])
    return options.training_script, options.training_script_args


@pytest.mark.parametrize("line", of(README, "torchrun") + of(USE, "torchrun"))
def test_a_torchrun_line_runs_on_two_ranks_when_its_model_is_tiny(line):
    script, flags = split(line)
    watched = script == "tools/ledger.py"
    if watched:
        script, *flags = flags
    load(script.removesuffix(".py")).parse(flags)  # as they stand on the page
    result, weights = train(script.removesuffix(".py"), 2, f"{' '.join(flags)} {TINY}", watched)
    assert len(result["losses"]) == 2 and weights


@functools.cache
def printed(line):
    _, script, *arguments = line.split()
    out, lines, code = world(1).run(run_command, script, " ".join(arguments))[0]
    assert code == 0 and not lines, f"{line}: {lines}"
    return out


@pytest.mark.parametrize("line", of(README, "python ") + of(USE, "python "))
def test_a_python_line_runs(line):
    _, script, *arguments = line.split()
    if script == "bench/bench.py":
        load("bench/bench").parse(arguments)  # what it does is timed, not tested
    elif script == "tools/ledger.py":  # simulates a rank: test_ledger.py does
        lesson = next(word for word in arguments if word.endswith(".py"))
        load(lesson.removesuffix(".py")).parse(arguments[arguments.index(lesson) + 1 :])
    else:
        assert printed(line).count("\n") > 3


@pytest.mark.parametrize("line", of(README, "diff "))
def test_a_diff_is_as_long_as_README_says(line):
    least, most = map(int, re.search(r"are (\d+) to (\d+) lines\s+long", README).groups())
    changed = re.findall(
        "^[<>]", subprocess.run(line.split(), cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout, re.M
    )
    assert least <= len(changed) <= most, f"{line}: {len(changed)} lines"


# A python3 that has all packages, writes down what it is to run, and makes what a lesson would save.
FAKE = """#!/bin/sh
case "$*" in
-c*) exit ;;
tools/compare.py*) cat >/dev/null ;;
esac
echo "$@" >>"$LOG"
while [ $# -gt 1 ]; do
    [ "$1" != --save ] || touch "$2"
    shift
done
"""
STARTS = {"test": "-m pytest", "site": "site/book.py", "gpu": "bench/gpu.py", "lint": "tools/form.py"}


@pytest.mark.parametrize("line", of(README, "./run.sh") + of(USE, "./run.sh"))
def test_a_run_sh_line_starts_what_it_names(line, tmp_path):
    (tmp_path / "run.sh").write_bytes((ROOT / "run.sh").read_bytes())
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/compare.py").touch()
    (tmp_path / "bin").mkdir()
    for name, text in ("python3", FAKE), ("nvidia-smi", "#!/bin/sh\n"):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "LOG": f"{tmp_path}/log"}
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if line == "./run.sh setup":
        assert "python3 has all that the lessons need" in done.stdout
        return
    started = (tmp_path / "log").read_text().splitlines()
    variables, _, arguments = line.partition("./run.sh")
    first, *others = arguments.split() or LESSONS
    if first in STARTS:
        assert STARTS[first] in started[-1] and all(name in started[-1] for name in others), started
        return
    given = dict(re.findall(r'(\w+)="?(.*?)"? (?=\w+=|$)', variables))
    for lesson in [first, *others]:
        own = [words for words in started if f"tools/ledger.py {lesson}.py" in words]
        assert own and all(given.get("FLAGS", "--steps 10") in words for words in own), f"{lesson}: {own}"
        ranks = re.search(r"--nproc_per_node=(\d+)", own[-1])
        assert not ranks or lesson == "resume" or ranks[1] == given.get("NPROC", "4"), own


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_commands_on_other_pages_name_files_and_flags_that_exist(page):
    for line in commands_of((ROOT / "docs" / page).read_text()):
        if "torchrun" in line:
            script, flags = split(line)
            if script == "tools/ledger.py":
                script, *flags = flags
            load(script.removesuffix(".py")).parse(flags)
        elif line.startswith("python "):
            assert (ROOT / line.split()[1].replace("LESSON", "ddp")).is_file(), line


# ---- what is counted ----


def test_lessons_stand_in_the_table_in_reading_order():
    assert re.findall(r"^\| \[`(\w+)\.py`\]\(\1\.py\) \| [^|]*\.(?: \|)$", README, re.M) == LESSONS


def test_the_first_table_is_that_of_a_whole_run():
    run = (ROOT / "docs/results/run.md").read_text()
    for name in ("single", "ddp", "zero1", "zero2", "zero3"):
        cells = re.split(r" {2,}", re.search(rf"^{name}  .*", run, re.M)[0])
        measured = [cells[2]] + [cell.split(" / ")[0] for cell in (*cells[4:7], cells[8])]
        assert re.search(rf"^{name} .*", README, re.M)[0].split() == [name, *measured]


def test_there_are_as_many_exercises_as_README_says():
    out = printed("python learn.py path all")
    assert f"- **Do** {len(re.findall(' min  ', out))} exercises" in README
    assert int(re.search(r"bugs +\d+ of (\d+) found", out)[1]) > 60, "not more than sixty bugs"


def test_the_measured_numbers_on_README_stand_in_the_results():
    plan = (ROOT / "docs/results/plan.md").read_text()
    rows = json.loads((ROOT / "docs/results/gpu.json").read_text())["models"]
    gpt2, xl = ({row["title"]: row["ratio"] for row in rows[size]} for size in ("gpt2", "gpt2-xl"))
    assert f"nothing travels: {gpt2['torch DDP, defaults']:.2f}\n" in README
    assert f"(Over plain FSDP2 on the H200: {gpt2['FSDP2']:.2f}, gpt2-xl {xl['FSDP2']:.2f}.)" in README
    ideal, took = map(int, re.search(r"on one H200 \((\d+) ms, where `zero3.py` took (\d+)", README).groups())
    row = r"\| {}, \d+ sequences \| zero3.py \| ([\d.]+) ms, \d+% \| ([\d.]+) ms, \d+ % \| -(\d+)% \|"
    predicted, measured, short = re.search(row.format("gpt2-xl"), plan).groups()
    assert [round(float(predicted)), round(float(measured))] == [ideal, took]
    assert f"{short} to {re.search(row.format('gpt2'), plan)[3]} % short\n" in README
    job = load("plan").parse("--size gpt2-xl --micro-batch 16 --gpu h200 --gpus 1".split())
    assert round(load("plan").row(job, "ZeRO-3")["ms"]["sum"]) == ideal


def test_every_letter_of_a_formula_is_explained():
    letters, page = load("tools/letters"), (ROOT / "docs/formulas.md").read_text()
    for name in LESSONS:
        lesson = load(name)
        formulas = letters.read_formulas(lesson, lesson.parse([])).values()
        used = set(re.findall(r"[A-Za-z]", re.sub("max|min", "", " ".join(formulas))))
        rows = re.findall(rf"^\| ([A-Za-z, ]+) \|(?!.*meaning)|^\| `{name}\.py` \|(.*)", page, re.M)
        known = set(re.findall(r"\b[A-Za-z]\b", " ".join(map(" ".join, rows))))
        assert used <= known, f"{name}: {used - known}"


# ---- snippets ----


SNIPPETS = re.findall(r"^```python\n(.*?)^```$", USE, re.M | re.S)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.up(self.norm(x)))


def start(rank=0, world_size=1):
    """What a snippet finds: a model, loss function and batches, of which this rank has its part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Block(), Block(), nn.Linear(6, 3)).double()
    data = torch.randn(3, 2, 6, 7, dtype=torch.float64)  # batches, microbatches, samples
    share = data.chunk(world_size, dim=2)[rank]
    batches = [[(x[:, :4], x[:, 4:]) for x in batch] for batch in share]
    there = {"torch": torch, "dist": dist, "F": F, "Block": Block, "lr": 0.01, "decay": 0.1}
    there["weights"] = {name: weight + rank for name, weight in model.state_dict().items()}
    return there | {"model": model, "batches": batches, "loss_function": F.mse_loss}


def plainly(max_norm=1.0, decay=None, before="", average=None):
    """The weights after these batches, by one process; with `average`, their moving average."""
    there = start()
    exec(before, there)
    model, params = there["model"], list(there["model"].parameters())
    averages = [param.detach().clone() for param in params]
    groups = [{"params": params}]
    if decay:
        groups = [{"params": [p for p in params if (p.dim() > 1) is kind]} for kind in (False, True)]
        groups[0]["weight_decay"] = 0
        groups[1]["weight_decay"] = decay
    optimizer = torch.optim.AdamW(groups, lr=0.01 if decay else 1e-3)
    for batch in there["batches"]:
        for inputs, targets in batch:
            (F.mse_loss(model(inputs), targets) / len(batch)).backward()
        nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if average:
            optimizer.param_groups[0]["lr"] /= 2
            torch._foreach_lerp_(averages, params, average)
    return dict(zip(model.state_dict(), averages)) if average else model.state_dict()


def snippet(heading, number=0):
    part = USE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", part, re.M | re.S)[number]


def wrapped(code, kind):
    """A snippet with another class in the place of ZeRO3."""
    call = re.search(rf"`{kind}\((.*?)\)`", USE)[1].replace("shard_size=8", "shard_size=2")
    code = code.replace("from zero3 import ZeRO3", f"from {kind.lower()} import {kind}")
    return code.replace("ZeRO3(model, Block)", f"{kind}({call})")


@on_ranks(2)
def check_loop(kind, copied):
    """copied: it does not import the class, but has the lines of the file that belong together."""
    there = start(dist.get_rank(), 2)
    code = snippet("DDP") if kind == "DDP" else wrapped(snippet("The training loop"), kind)
    if copied:
        exec((ROOT / f"{kind.lower()}.py").read_text().partition("\ndef train(")[0], there)
        code = code.partition("\n")[2]
    exec(code, there)
    assert dist.get_rank() or apart(there["state_dict"], plainly()) < 1e-9, f"{kind} has other weights"


@on_ranks(2)
def check_before(kind):
    """The loop, of a model that is loaded, frozen, tied, hooked and compiled."""
    there = start(dist.get_rank(), 2)
    before = snippet("Before you wrap")
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        torch._dynamo.reset()
        exec(before, there)
        exec(snippet("DDP") if kind == "DDP" else wrapped(snippet("The training loop"), kind), there)
        expected = plainly(before=before)
    assert dist.get_rank() or apart(there["state_dict"], expected) < 1e-9, f"{kind} has other weights"
    assert apart(plainly(), expected) > 1e-4


@on_ranks(2)
def check_average(kind, folder):
    there = start(dist.get_rank(), 2) | {"folder": folder}
    exec(wrapped(snippet("A schedule, and a moving average of the weights"), kind), there)
    expected = plainly(float("inf"), average=0.1)
    saved = expected if dist.get_rank() else torch.load(f"{folder}/average.pt")
    assert apart(saved, expected) < 1e-9, f"{kind} has another average"
    after = there["zero"].full_state_dict()
    assert dist.get_rank() or apart(after, expected) > 1e-4, "the average is still there"


@on_ranks(2)
def check_diloco():
    there = start(dist.get_rank(), 2)
    before = {name: weight.clone() for name, weight in there["model"].state_dict().items()}
    exec(snippet("DiLoCo"), there)
    after = there["model"].state_dict()
    both = [None, None]
    dist.all_gather_object(both, after)
    assert apart(*both) == 0 and apart(before, after) > 1e-4


@on_ranks(2)
def check_decay(kind):
    there = start(dist.get_rank(), 2)
    exec(wrapped(snippet("Weight decay of matrices only"), kind), there)
    expected = plainly(max_norm=float("inf"), decay=0.1)
    assert dist.get_rank() or apart(there["state_dict"], expected) < 1e-9, f"{kind} decays something else"
    assert apart(plainly(float("inf")), expected) > 1e-4


@on_ranks(2)
def check_evaluation_and_checkpoints(kind, folder):
    there = start(dist.get_rank(), 2) | {"folder": folder}
    loop = wrapped(snippet("The training loop"), kind)
    batches = there["batches"]
    there["batches"] = batches[:2]
    exec(loop, there)
    there["inputs"], there["targets"] = batches[0][0]
    exec(snippet("Evaluation"), there)
    exec(snippet("Checkpoints"), there)
    trained = there["model"]  # on rank 0 what was saved
    there |= start(dist.get_rank(), 2) | {"batches": batches[2:]}
    model = there["model"]
    if dist.get_rank() == 0:
        plain = start()
        model.load_state_dict(torch.load(f"{folder}/model.pt"))
        loss = F.mse_loss(model(plain["batches"][0][0][0]), plain["batches"][0][0][1])
        assert abs(loss - there["loss"]) < 1e-12, "the loss of one rank's part"
        there["model"] = start()["model"]
    exec(wrapped(snippet("Checkpoints", 1), kind), there)
    exec(loop[loop.index("for microbatches") :], there)
    assert dist.get_rank() or apart(there["state_dict"], plainly()) < 1e-9, f"{kind} goes on otherwise"
    del trained


ZEROS = ["ZeRO1", "ZeRO2", "ZeRO3", "HSDP"]


def test_the_parts_to_copy_are_named():
    for name in ("ddp", "zero1", "zero2", "zero3", "hsdp"):
        parts = re.findall(r"^(?:class|def) (\w+)", (ROOT / f"{name}.py").read_text(), re.M)
        parts = set(parts[: parts.index("train")]) - {"refuse_use", "average_gradients"}
        named = set(re.findall(r"`(\w+)`", USE.partition("## The training loop")[0]))
        assert parts <= named, f"{name}.py: {parts - named} is not named"


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("kind", ["DDP", *ZEROS])
def test_the_training_loop_gives_the_plain_loops_weights(kind, copied):
    check_loop(kind, copied)


def test_diloco_ends_with_the_same_weights_on_all_ranks():
    check_diloco()


@pytest.mark.parametrize("kind", ["DDP", *ZEROS])
def test_what_is_done_before_wrapping_is_as_in_a_plain_loop(kind):
    check_before(kind)


@pytest.mark.parametrize("kind", ZEROS)
def test_a_moving_average_is_that_of_a_plain_loop(kind, tmp_path):
    check_average(kind, str(tmp_path))


@pytest.mark.parametrize("kind", ["ZeRO1", "ZeRO3"])
def test_weight_decay_of_matrices_is_that_of_parameter_groups(kind):
    check_decay(kind)


@pytest.mark.parametrize("kind", ["ZeRO1", "ZeRO3"])
def test_training_goes_on_after_evaluation_and_a_checkpoint(kind):
    with tempfile.TemporaryDirectory() as folder:
        check_evaluation_and_checkpoints(kind, folder)


def test_all_snippets_of_use_md_are_run_above():
    assert len(SNIPPETS) == 9 and json.dumps(SNIPPETS).count("import ZeRO3") == 3
