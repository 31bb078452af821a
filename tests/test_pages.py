"""README.md and docs/: each command runs, or names files and flags that exist; links lead somewhere."""

import functools
import re
import shlex
import subprocess

import pytest
from torch.distributed.run import parse_args

from tests.harness import ROOT, TEXT, lessons, load, train, world
from tests.test_tools import run_command

README = (ROOT / "README.md").read_text()
USE = (ROOT / "docs/use.md").read_text()
LESSONS = list(lessons())
YOURS = {"my_text.txt": TEXT, "model.pt": "/dev/null"}  # files of whoever types it
TINY = f"--size toy --layers 2 --width 16 --heads 2 --context 8 --steps 2 --data {TEXT}"


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
    return options.training_script, [YOURS.get(word, word) for word in options.training_script_args]


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
        assert set(arguments) <= {*LESSONS}  # what it does is timed, not tested
    elif script.removesuffix(".py") in LESSONS:
        load(script.removesuffix(".py")).parse(arguments)
    else:
        assert printed(line).count("\n") > 3


@pytest.mark.parametrize("line", of(README, "diff "))
def test_a_diff_is_of_lessons(line):
    assert all((ROOT / path).is_file() for path in line.split()[1:]) and len(line.split()) == 3


# A python3 that has all packages, and writes down what it is to run.
FAKE = """#!/bin/sh
case "$*" in
-c*) exit ;;
esac
echo "$@" >>"$LOG"
"""
STARTS = {"test": "-m pytest", "site": "site/book.py", "gpu": "bench/gpu.py", "lint": "tools/form.py"}


@pytest.mark.parametrize("line", of(README, "./run.sh") + of(USE, "./run.sh"))
def test_a_run_sh_line_starts_what_it_names(line, tmp_path):
    (tmp_path / "run.sh").write_bytes((ROOT / "run.sh").read_bytes())
    (tmp_path / "run.sh").chmod(0o755)
    for folder in "tools", "bin":
        (tmp_path / folder).mkdir()
    (tmp_path / "tools/run.py").touch()
    (tmp_path / "bin/python3").write_text(FAKE)
    (tmp_path / "bin/python3").chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "LOG": f"{tmp_path}/log"}
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if line == "./run.sh setup":
        assert "python3 has all that the lessons need" in done.stdout
        return
    started = (tmp_path / "log").read_text().splitlines()[-1]
    words = line.partition("./run.sh")[2].split()
    if words and words[0] in STARTS:
        assert STARTS[words[0]] in started and all(name in started for name in words[1:]), started
    else:
        assert started.split() == ["tools/run.py", *words] and set(words) <= {*LESSONS}, started


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


PAGES = sorted(path.relative_to(ROOT) for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", [str(page) for page in PAGES])
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", (ROOT / page).read_text()):
        there = (ROOT / page).parent / target
        assert re.match("https?:", target) or there.exists(), f"{page}: {target}"


def test_python_on_use_md_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", USE, re.M | re.S)
    for code in snippets:
        exec(code, {})
    assert snippets


def test_readmes_first_table_is_that_of_a_whole_run():
    run = (ROOT / "docs/results/run.md").read_text()
    rows = re.findall(r"^((?:single|ddp|zero\d)(?: --\w+(?: 0)?)?) {3,}(.*)", README, re.M)
    assert len(rows) == 8
    for name, numbers in rows:
        lesson, _, naive = name.partition(" ")
        pattern = rf"^{lesson}  .*\n  {naive} .*" if naive else rf"^{lesson}  .*"
        line = re.search(pattern, run, re.M)[0].splitlines()[-1]
        _, _, loss, _, weights, gradients, optimizer, _, sent, *_ = re.split(r" {2,}", line.strip())
        held = [cell.split(" / ")[0] for cell in (weights, gradients, optimizer, sent)]
        assert numbers.split() == [loss, *held], name


def test_readmes_second_table_is_speed_mds():
    speed = (ROOT / "docs/results/speed.md").read_text()
    rows = re.findall(r"^\| `(?:more/)?(\w+)\.py` \| (?:.+?) \| (.* → .*) \|$", README, re.M)
    assert len(rows) == 10
    for name, cells in rows:
        printed = re.findall(r"([\d.]+) -> ([\d.]+)", re.search(rf"^{name}  .*->.*", speed, re.M)[0])
        rounded = [" → ".join(f"{float(number):.0f}" for number in pair) for pair in printed]
        assert cells.split(" | ") == rounded, name


def test_each_figure_has_its_command_which_can_run_again():
    figures = load("bench/figures")
    for page in figures.PAGES:
        text = (ROOT / f"docs/results/{page}.md").read_text()
        blocks = len(re.findall("^```$", text, re.M)) // 2 - ("\n```\nexport " in text)
        assert len(figures.FIGURE.findall(text)) == blocks > 0, f"{page}.md: a block without its command"
    new = figures.again(figures.FIGURE.search("`echo 7 | cat` | then\n\n```\n6\n```"), "abc")
    assert re.fullmatch(r"`echo 7 \| cat` \| 20.*, abc, .* minutes\n\n```\n7\n```", new), new
