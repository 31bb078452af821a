"""README's two commands with other Pythons, torches, instruction sets, threads and texts.

    python bench/machines.py             all rows (needs uv, which brings Pythons: pip install uv)
    python bench/machines.py avx2        one

Each row is run in a clone of this checkout's last commit, with a .venv of its own, and printed as a row of
docs/results/machines.md. Each value is in some row, not each pair of values. "lessons" are the verdicts that
./run.sh counts, "tests" those of ./run.sh test, with all mutants. Exit code 1 if anything failed. Logs are in
runs/machines/.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Name: (Python, torch, settings, FLAGS)
ROWS = {
    "as it is": ("3.11", "2.13.0", "", ""),
    "sse": (
        "3.11",
        "2.13.0",
        "ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41",
        "",
    ),
    "avx2": (
        "3.12",
        "2.11.0",
        "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2",
        "--data docs",
    ),
    "avx512": (
        "3.13",
        "2.15.0",
        "ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE",
        "--dtype bf16 --data tests",
    ),
}


def call(command, log, folder, **settings):
    """(what a command prints, its exit code, minutes)."""
    started = time.monotonic()
    env = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"} | settings
    done = subprocess.run(command, cwd=folder, env=env, stdout=-1, stderr=subprocess.STDOUT, text=True)
    log.write_text(done.stdout)
    return done.stdout, done.returncode, (time.monotonic() - started) / 60


def counts(output):
    """The last "23 passed, 1 failed" that a command printed."""
    found = re.findall(r"\d+ (?:passed|failed|skipped)[^\n]*", output) or ["did not finish"]
    return re.sub(r" in .*|\. MB .*", "", found[-1])


def run(name, folder):
    """(a row of the table, whether all is well)."""
    python, torch, settings, flags = ROWS[name]
    logs = ROOT / "runs/machines"
    logs.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    requirements = Path(folder, "requirements.txt")
    requirements.write_text(re.sub("torch==.*", f"torch=={torch}", requirements.read_text()))
    subprocess.run(["uv", "venv", "-q", "--seed", "--python", python, ".venv"], cwd=folder, check=True)
    install = ["uv", "pip", "install", "-q", "--python", ".venv/bin/python", "-r", "requirements-dev.txt"]
    subprocess.run(install, cwd=folder, check=True)
    env = dict(setting.split("=") for setting in settings.split())
    log = str(logs / name.replace(" ", "-"))
    lessons, code, minutes = call(["./run.sh"], Path(f"{log}.txt"), folder, **env, FLAGS=flags)
    tests, tests_code, tests_minutes = call(
        ["./run.sh", "test", "--mutants", "all"], Path(f"{log}-test.txt"), folder, **env
    )
    cells = (name, python, torch, f"{settings} {flags}".strip(), f"{counts(lessons)} ({minutes:.1f} min)")
    return f"| {' | '.join(cells)} | {counts(tests)} ({tests_minutes:.1f} min) |", not code and not tests_code


def main(names):
    if unknown := set(names) - set(ROWS):
        sys.exit(f"machines.py: no row {', '.join(unknown)}; choose from: {', '.join(ROWS)}")
    if not shutil.which("uv"):
        sys.exit("machines.py: there is no uv, which makes the environments: pip install uv")
    print("| | Python | torch | settings, FLAGS | lessons | tests |\n|---|---|---|---|---|---|", flush=True)
    well = []
    for name in names or ROWS:
        with tempfile.TemporaryDirectory() as folder:
            row, good = run(name, f"{folder}/rankzero")
            print(row, flush=True)
            well.append(good)
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
