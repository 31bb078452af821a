"""./run.sh and ./run.sh test with other Pythons, torches, instruction sets, threads and texts.

    python bench/machines.py             all rows (needs uv, which brings Pythons: pip install uv)
    python bench/machines.py avx2        one

Each row runs in a clone of this checkout's last commit, with a .venv of its own, and is printed as a row of
docs/results/machines.md. Each value is in some row, not each pair of values. Exit code 1 if anything failed.
Logs are in runs/machines/.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SSE = "ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41"
AVX2 = "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2"
AVX512 = "ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE"
ROWS = {  # name: (Python, torch, settings, FLAGS)
    "as it is": ("3.11", "2.13.0", "", ""),
    "sse": ("3.11", "2.13.0", SSE, ""),
    "avx2": ("3.12", "2.11.0", AVX2, "--data docs"),
    "avx512": ("3.13", "2.15.0", AVX512, "--dtype bf16 --data tests"),
}


def call(command, log, folder, settings):
    """(the last "23 passed, 1 failed" that a command prints, whether it ended well)."""
    env = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"} | settings
    done = subprocess.run(command, cwd=folder, env=env, stdout=-1, stderr=subprocess.STDOUT, text=True)
    log.write_text(done.stdout)
    found = re.findall(r"\d+ (?:passed|failed|skipped)[^\n]*", done.stdout) or ["did not finish"]
    return re.sub(r" in .*|\. MB .*", "", found[-1]), not done.returncode


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
    log = name.replace(" ", "-")
    lessons, well = call(["./run.sh"], logs / f"{log}.txt", folder, env | {"FLAGS": flags})
    tests, also_well = call(["./run.sh", "test"], logs / f"{log}-test.txt", folder, env)
    cells = (name, python, torch, f"{settings} {flags}".strip(), lessons, tests)
    return f"| {' | '.join(cells)} |", well and also_well


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
