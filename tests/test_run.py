"""run.sh on machines that lack something, with lessons that fail, and told to end; bench/hosts.sh."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests import conftest
from tests.harness import NO_NAMESPACES, ROOT, TINY, apart, load, train

# A python3 of some version that lacks some module; its venv has pip, whose install brings all.
FAKE = """#!/bin/sh
echo "$@${NCCL_PROTO:+ over $NCCL_PROTO}" >>"$LOG"
case "$*" in
-V) echo "Python $VERSION" ;;
"-m venv --clear .venv") rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python && touch .venv/pip ;;
"-m pip"*) touch .venv/installed ;;
-c*) exec "$REAL" -c "$BEGIN" "$0" "$2" ;;
esac
"""
BEGIN = """import importlib.metadata, os, sys
_, path, code = sys.argv
sys.version_info = tuple(map(int, os.environ["VERSION"].split(".")))
in_venv = path.startswith(".venv")
if in_venv and not os.path.exists(".venv/pip"):
    sys.modules["pip"] = None
if os.environ["LACKS"]:
    sys.modules[os.environ["LACKS"]] = None
if in_venv and os.path.exists(".venv/installed"):
    importlib.metadata.version = str
else:
    importlib.metadata.version = {}.__getitem__
exec(code)
"""


def copy_run_sh(folder):
    """A checkout with nothing but run.sh and what it runs itself."""
    for path in ("run.sh", "README.md", *(f"tools/{name}.py" for name in ("run", "compare", "lessons"))):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)


@pytest.mark.parametrize("version, lacks, venv, code, told", [
    ("3.10.4", "", None, 2, "run.sh: needs Python 3.11 or later, but python3 is: Python 3.10.4"),
    ("3.12.1", "ensurepip", None, 2, "run.sh: python3 has no venv: apt install python3-venv"),
    ("3.12.1", "", None, 0, "-m pip install --quiet --requirement requirements-dev.txt"),
    ("3.12.1", "", "no pip", 0, "-m venv --clear .venv"),
])  # fmt: skip
def test_run_sh_sets_up_or_says_in_one_line_what_is_missing(version, lacks, venv, code, told, tmp_path):
    copy_run_sh(tmp_path)
    folder = tmp_path / "a path with spaces"
    for place in ["python3", *(["../.venv/bin/python"] if venv else [])]:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(FAKE)
        (folder / place).chmod(0o755)
    (folder / "python").symlink_to("python3")
    env = {"PATH": f"{folder}:/usr/bin:/bin", "VERSION": version, "LACKS": lacks}
    env |= {"LOG": str(tmp_path / "log"), "REAL": sys.executable, "BEGIN": BEGIN}
    command = ["bash", "./run.sh", "lint"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    lines = (tmp_path / "log").read_text().splitlines() + done.stderr.splitlines()
    assert told in lines and done.returncode == code, (lines, done)
    assert code == 0 or len(done.stderr.splitlines()) == 1


NEWER = r"mapfile|readarray|declare -[An]|local -n|\[ -v |\{\w+(,,|\^\^|@)|&>>|\|&|wait -n|coproc"
GNU = r"\b(timeout|realpath|nproc|readlink|seq|stat|tac|setsid|sed -[ir]|grep -P|date -d|cp -t)\b"


def test_run_sh_asks_for_no_bash_4_and_no_gnu_tools():
    for number, line in enumerate((ROOT / "run.sh").read_text().splitlines(), 1):
        code = line.partition("# ")[0]
        found = re.search(f"{NEWER}|{GNU}", code)
        assert not found, f"run.sh:{number}: {found[0]}"


# In place of tools/ledger.py: a lesson's run has made its files, when $THEN, of Python, is done by ddp.py.
LEDGER = """import os, shutil, sys
words = sys.argv
for flag, made in ("--json", "made.json"), ("--save", "made.pt"):
    shutil.copy(made, words[words.index(flag) + 1])
print(" ".join(words), os.environ.get("RANK"), os.environ.get("NCCL_PROTO"), flush=True)
if "ddp.py" in words:
    exec(os.environ.get("THEN", ""))
"""


def hear():
    """What starts in the background, or under nohup, ignores these."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path):
    """A function that starts run.sh in a checkout with such a ledger."""
    copy_run_sh(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tools/ledger.py").write_text(LEDGER)
    made = {"dtype": "fp32", "losses": [4.0], "world_size": 2, "held": {}, "sent": {}, "step_ms": [1.0]}
    (tmp_path / "made.json").write_text(json.dumps(made))
    torch.save({"w": torch.ones(2)}, tmp_path / "made.pt")
    env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:/usr/bin:/bin", "NPROC": "2"}

    def start(*arguments, shell="bash", **more):
        command = [shell, "./run.sh", *arguments]
        options = {"stdout": -1, "stderr": -1, "text": True, "start_new_session": True, "preexec_fn": hear}
        return subprocess.Popen(command, cwd=tmp_path, env=env | more, **options)

    return start


def test_a_run_that_fails_has_failed_and_the_others_have_not(start, tmp_path):
    (tmp_path / "tests/test_zero1.py").write_text('NAIVE = "--naive"\n')
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/zero3.pt").touch()
    (tmp_path / "runs/machine.json").touch()
    run = start("zero1", "ddp", THEN="sys.exit(7 * (os.environ['RANK'] == '1'))")
    output, errors = run.communicate(timeout=120)
    table = output.splitlines()
    assert [row.split()[-1] for row in table if re.match("zero1|  --naive", row)] == ["same"] * 2, (
        output + errors
    )
    assert any(re.match("ddp +did not finish: exit code 7", row) for row in table), table
    assert run.returncode == 1
    left = {path.name for path in (tmp_path / "runs").iterdir()}
    assert {"machine.json", "zero1.pt", "zero1-naive.json"} <= left and not {"zero3.pt", "ddp.pt"} & left, (
        left
    )
    log = (tmp_path / "runs/zero1-naive.log").read_text()
    assert log.startswith("torchrun --nproc_per_node=2 tools/ledger.py ") and " --naive --save " in log
    assert " 0 None\n" in log and " 1 None\n" in log


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number, to_all", [("TERM", False), ("INT", True), ("HUP", True)])
def test_what_it_started_ends_with_it(number, to_all, start, tmp_path):
    sleeps = "import time; open(f'pid{os.environ[\"RANK\"]}', 'w').write(f'{os.getpid()} '); time.sleep(60)"
    run = start("ddp", "zero1", THEN=sleeps)
    pids = [tmp_path / f"pid{rank}" for rank in range(2)]
    while not all(pid.exists() and pid.read_text().endswith(" ") for pid in pids):
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    send, number = os.killpg if to_all else os.kill, getattr(signal, f"SIG{number}")
    send(run.pid, number)
    output, errors = run.communicate(timeout=30)
    assert run.returncode, output + errors
    deadline = time.monotonic() + 20
    while (left := [pid for pid in pids if is_alive(int(pid.read_text()))]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, "ranks outlive the run"
    assert not (tmp_path / "runs/zero1.log").exists()


@pytest.mark.parametrize("arguments, settings, told", [
    ("ddp", {"NPROC": "1.5"}, "NPROC='1.5': must be a number of ranks"),
    ("ddp", {"NPROC": " 2"}, "NPROC=' 2': must be a number of ranks"),
    ("zero4", {}, "no lesson 'zero4'; README's table has: single "),
])  # fmt: skip
def test_run_sh_refuses_in_one_line(arguments, settings, told, start):
    run = start(*arguments.split(), **settings)
    lines = run.communicate(timeout=60)[1].splitlines()
    assert len(lines) == 1 and told in lines[0] and run.returncode, lines


def test_ranks_that_share_a_gpu_take_what_is_quickest(monkeypatch):
    tool = load("tools/run")
    for gpus, ranks, expected in (1, "4", "Simple"), (4, "4", None), (0, "4", None):
        with (
            mock.patch.dict(os.environ, NPROC=ranks),
            mock.patch("torch.cuda.device_count", return_value=gpus),
        ):
            tool.lessons = dict
            assert (tool.prepare(), os.environ.get("NCCL_PROTO")) == (int(ranks), expected)


def test_run_sh_runs_by_sh_and_finds_no_other_checkout(start, tmp_path):
    assert start("--help", shell="sh").communicate(timeout=60)[0].startswith("./run.sh  ")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/run.sh").symlink_to(tmp_path / "run.sh")
    done = subprocess.run(["other/run.sh", "ddp"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "is no checkout" in done.stderr


def test_paths_are_found_from_another_folder(tmp_path):
    done = subprocess.run([ROOT / "run.sh", "no_such_lesson"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "no lesson 'no_such_lesson'" in done.stderr and os.listdir(tmp_path) == []


class Item:
    def __init__(self, is_row, **params):
        self.get_closest_marker = {"long_table": is_row}.get
        self.callspec = SimpleNamespace(params=params)


def test_the_whole_suite_draws_a_twelfth_of_the_mutants_and_a_fourth_of_the_rows(monkeypatch):
    monkeypatch.setenv("MUTANTS", "")  # and back
    promises, rows = [Item(False) for _ in range(5)], [Item(True, name=i) for i in range(8)]
    edits = [Item(False, old=i, new=i) for i in range(60)]
    drawn = [conftest.draw([*promises, *rows, *edits], seed) for seed in "778"]
    assert all(len(items) == 5 + 2 + 5 and items[:5] == promises for items in drawn)
    fourths = [rows[first::4] for first in range(4)]
    assert all(items[5:7] in fourths for items in drawn), "not every fourth row"
    assert drawn[0] == drawn[1] != drawn[2], "the same seed, the same mutants"
    source = pytest.Config.ArgsSource
    for args, keyword, lesson, given, pattern in (
        (source.TESTPATHS, "", None, None, r"\d+"),
        (source.TESTPATHS, "", None, "7", "7"),
        (source.TESTPATHS, "zero3", None, None, "all"),
        (source.TESTPATHS, "", "zero3", None, "all"),
        (source.ARGS, "", None, None, "all"),
    ):
        option = SimpleNamespace(keyword=keyword, lesson=lesson, mutants=given)
        config = SimpleNamespace(args_source=args, option=option)
        conftest.pytest_configure(config)
        assert re.fullmatch(pattern, option.mutants), (args, keyword, lesson, given)


@pytest.mark.parametrize("arguments", ["2 -1gbit -- x", "2 fast -- x", "2 0bit -- x", "0 1gbit -- x"])
def test_hosts_are_refused_in_a_line(arguments):
    done = subprocess.run(["bench/hosts.sh", *arguments.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and re.fullmatch("usage: bench/hosts.sh HOSTS RATE .*\n", done.stderr), done


@pytest.mark.skipif(NO_NAMESPACES, reason="needs Linux, root, ip and tc")
@pytest.mark.parametrize("name, twice", [("INT", True), ("TERM", False), ("HUP", True)])
def test_hosts_leave_nothing_behind(name, twice, tmp_path):
    """Nor does whoever starts them, however it is told to end."""
    agent = tmp_path / "python"
    agent.write_text(f"#!/bin/sh\ntouch {tmp_path}/began\nexec sleep 100\n")
    agent.chmod(0o755)
    begin = "import sys; from bench import run_to_its_end; run_to_its_end(sys.argv[1:])"
    hosts = ["bench/hosts.sh", "2", "1gbit", "--", "ddp.py"]
    env = os.environ | {"PYTHON": str(agent), "PYTHONPATH": str(ROOT / "bench")}
    options = {"cwd": ROOT, "env": env, "stderr": subprocess.DEVNULL, "start_new_session": True}
    options["preexec_fn"] = hear
    run = subprocess.Popen([sys.executable, "-c", begin, *hosts], **options)
    while not (tmp_path / "began").exists():
        assert run.poll() is None
        time.sleep(0.05)
    (number,) = [pid for pid, words in processes_of(run.pid) if "bench/hosts.sh" in words.split()[:2]]
    for _ in range(1 + twice):
        os.killpg(run.pid, getattr(signal, f"SIG{name}"))
        time.sleep(0.4)
    run.wait(60)
    deadline = time.monotonic() + 60
    while (left := processes_of(run.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left and f"rz{number}" not in subprocess.getoutput("ip netns list; ip -br link"), left


@pytest.mark.skipif(NO_NAMESPACES, reason="needs Linux, root, ip and tc")
def test_two_hosts_print_single_pys_losses():
    """As docs/cluster.md starts them by hand, in network namespaces."""
    command, flags = ["bench/hosts.sh", "2", "1gbit", "--", "zero3.py"], f"{TINY} --dtype fp64".split()
    options = {"cwd": ROOT, "env": os.environ | {"PYTHON": sys.executable}, "timeout": 200}
    job = subprocess.run([*command, *flags], capture_output=True, text=True, **options)
    losses = [float(loss) for loss in re.findall(r"^step .*? loss ([\d.]+)", job.stdout, re.M)]
    alone, _ = train("single", 1, " ".join(flags))
    assert len(losses) == 3 and apart(losses, alone["losses"]) < 6e-5, job.stdout + job.stderr


def processes_of(group):
    """[(number, command line)] of a process group."""
    rows = [line.split(maxsplit=2) for line in subprocess.getoutput("ps -eo pgid=,pid=,args=").splitlines()]
    return [(pid, words) for number, pid, words in rows if int(number) == group]
