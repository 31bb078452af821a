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

import pytest
import torch

from tests import conftest
from tests.harness import NO_NAMESPACES, ROOT

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
    for path in ("run.sh", "README.md", "tools/compare.py", "tools/lessons.py"):
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


@pytest.mark.parametrize("gpus, nproc, shared", [(1, 4, True), (1, 0, False), (4, 4, False), (0, 4, False)])
def test_run_sh_takes_what_is_quickest_where_ranks_share_a_gpu(gpus, nproc, shared, tmp_path):
    copy_run_sh(tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name in ("pip", "installed"):
        (tmp_path / ".venv" / name).touch()
    smi = "#!/bin/sh\n" + "".join(f"echo 'GPU {i}: H100'\n" for i in range(gpus))
    for place, text in (".venv/bin/python", FAKE), ("bin/nvidia-smi", smi):
        (tmp_path / place).write_text(text)
        (tmp_path / place).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "VERSION": "3.12.1",
        "LACKS": "",
        "NPROC": str(nproc or ""),
    }
    env |= {"LOG": str(tmp_path / "log"), "REAL": sys.executable, "BEGIN": BEGIN}
    subprocess.run(["bash", "./run.sh", "zero3"], cwd=tmp_path, env=env, capture_output=True, timeout=60)
    (first, *_) = [line for line in (tmp_path / "log").read_text().splitlines() if "single.py" in line]
    assert f"--batch {4 * (nproc or gpus)} " in first and first.endswith(" over Simple") == shared, first


NEWER = r"mapfile|readarray|declare -[An]|local -n|\[ -v |\{\w+(,,|\^\^|@)|&>>|\|&|wait -n|coproc"
GNU = r"\b(timeout|realpath|nproc|readlink|seq|stat|tac|setsid|sed -[ir]|grep -P|date -d|cp -t)\b"


def test_run_sh_asks_for_no_bash_4_and_no_gnu_tools():
    for number, line in enumerate((ROOT / "run.sh").read_text().splitlines(), 1):
        code = line.partition("# ")[0]
        found = re.search(f"{NEWER}|{GNU}", code)
        assert not found, f"run.sh:{number}: {found[0]}"


# A Python whose lessons have made their files when ddp.py does $THEN.
LESSONS = """#!/bin/sh
case "$*" in
-c*) exit ;;
*compare.py*) exec "$REAL" "$@" ;;
esac
all=$*
while [ $# -gt 1 ]; do
    case "$1" in
    --json | --film) cp made.json "$2" ;;
    --save) cp made.pt "$2" ;;
    esac
    shift
done
case "$all" in *ddp.py*) eval "$THEN" ;; esac
"""


def hear():
    """What starts in the background, or under nohup, ignores these, and bash cannot trap what it ignores."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path):
    """A function that starts run.sh in a checkout with such a Python."""
    copy_run_sh(tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(LESSONS)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    made = {"dtype": "fp32", "losses": [4.0], "world_size": 2, "held": {}, "sent": {}, "step_ms": [1.0]}
    (tmp_path / "made.json").write_text(json.dumps(made))
    torch.save({"w": torch.ones(2)}, tmp_path / "made.pt")
    env = {"PATH": "/usr/bin:/bin", "REAL": sys.executable, "PYTHONPATH": "", "HOME": str(tmp_path)}

    def start(*arguments, shell="bash", **more):
        command = [shell, "./run.sh", *arguments]
        options = {"stdout": -1, "stderr": -1, "text": True, "start_new_session": True, "preexec_fn": hear}
        return subprocess.Popen(command, cwd=tmp_path, env=env | more, **options)

    return start


def code_of(run):
    run.communicate(timeout=60)
    return run.returncode


def test_a_lesson_that_fails_once_its_files_are_there_has_failed(start):
    run = start("zero1", "ddp", THEN="exit 7")
    table = run.communicate(timeout=60)[0].splitlines()
    assert [row.split()[-1] for row in table if row.startswith("zero1")] == ["same"], table
    assert any(re.match("ddp +did not finish: exit code 7", row) for row in table) and run.returncode == 1, (
        table
    )


def test_run_sh_deletes_nothing_but_a_former_tables_files(start, tmp_path):
    for path in ("c/step-000100", "hosts2.json", "machine-here.json", "zero3.pt"):
        (tmp_path / "runs" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / path).touch()
    assert code_of(start("ddp")) == 0
    left = {str(path.relative_to(tmp_path / "runs")) for path in (tmp_path / "runs").rglob("*.*")}
    assert {"hosts2.json", "machine-here.json", "ddp.pt"} <= left and "zero3.pt" not in left
    assert (tmp_path / "runs/c/step-000100").exists() and not (tmp_path / "runs/pid").exists()


@pytest.mark.parametrize("number, to_all", [("TERM", False), ("INT", True), ("HUP", True)])
def test_one_run_at_a_time_and_its_commands_end_with_it(number, to_all, start, tmp_path):
    first = start("ddp", "zero1", THEN="echo $$ >pid; exec sleep 60")
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    second = start("zero1")
    assert "writes to runs/" in second.communicate(timeout=60)[1] and second.returncode == 2
    send, number = os.killpg if to_all else os.kill, getattr(signal, f"SIG{number}")
    send(first.pid, number)
    output, errors = first.communicate(timeout=30)
    assert first.returncode and "Traceback" not in output + errors
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not (tmp_path / "runs/zero1.log").exists()
    assert code_of(start("zero1")) == 0


@pytest.mark.parametrize("arguments, settings, told", [
    ("ddp", {"NPROC": "1.5"}, "NPROC='1.5': must be a number of ranks"),
    ("ddp", {"NPROC": " 2"}, "NPROC=' 2': must be a number of ranks"),
    ("ddp", {"FLAGS": "--steps 3 --save own.pt"}, "--save is run.sh's own"),
    ("ddp zero1", {}, "no lesson 'ddp zero1'"),
    ("test zero4", {}, "no lesson 'zero4'; choose from: single "),
])  # fmt: skip
def test_run_sh_refuses_in_one_line(arguments, settings, told, start):
    run = start(*(arguments.split() if "test" in arguments else [arguments]), **settings)
    lines = run.communicate(timeout=60)[1].splitlines()
    assert len(lines) == 1 and told in lines[0] and run.returncode == 2, lines


def test_run_sh_runs_by_sh_and_finds_no_other_checkout(start, tmp_path):
    assert start("--help", shell="sh").communicate(timeout=60)[0].startswith("./run.sh  ")
    for folder in ("other", "named"):
        (tmp_path / folder / "runs").mkdir(parents=True)
    (tmp_path / "other/run.sh").symlink_to(tmp_path / "run.sh")
    options = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run(["other/run.sh", "ddp"], **options)
    assert (
        done.returncode == 2 and "is no checkout" in done.stderr and os.listdir(tmp_path / "other/runs") == []
    )
    (tmp_path / "named/co").mkdir()
    shutil.copy(ROOT / "run.sh", tmp_path / "named/co")
    (tmp_path / "co").mkdir()
    shutil.copy(ROOT / "run.sh", tmp_path / "co")
    done = subprocess.run(
        ["bash", "co/run.sh"], **options, env=os.environ | {"CDPATH": str(tmp_path / "named")}
    )
    assert f"{tmp_path}/co is no checkout" in done.stderr


def test_paths_are_found_from_another_folder(tmp_path):
    done = subprocess.run([ROOT / "run.sh", "no_such_lesson"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "no lesson 'no_such_lesson'" in done.stderr and os.listdir(tmp_path) == []


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
    begin = "import sys; from limit import run_to_its_end; run_to_its_end(sys.argv[1:])"
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


def processes_of(group):
    """[(number, command line)] of a process group."""
    rows = [line.split(maxsplit=2) for line in subprocess.getoutput("ps -eo pgid=,pid=,args=").splitlines()]
    return [(pid, words) for number, pid, words in rows if int(number) == group]
