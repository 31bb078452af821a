"""The figures on README and in docs/results: what commands printed, with date, commit and machine.

    ./run.sh figures                     runs all commands, in 75 minutes on 2 quiet cores
    ./run.sh figures zero touched-1      those of a page, or one
    ./run.sh figures --list              minutes that each took, what it needs, and whether it is stale
    ./run.sh figures --pages             runs nothing: fills the pages from docs/results/figures.json

A page is its sentences, and blocks between two comments. What stands between them is written here:

    <!-- figures: NAME -->
    <!-- end -->

bench/figures.txt has the command of each block. docs/results/figures.json keeps what it printed, and a hash
of the code that was measured: the Python files that the command names, and those in the last column of its
row; of a lesson what stands above its toy model. Comments and docstrings do not count, nor does tools/, which
has tests that count the same. A block is stale if that code has changed since, or if it was typed in by hand,
as all were until 2026-11-27. A row whose command needs what this machine lacks (root, deepspeed, gpu) is
skipped, and its block stays as it is.
"""

import ast
import datetime
import hashlib
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tokenize
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import ratios

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs/results"
JSON = RESULTS / "figures.json"
BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end -->)", re.S)
TOY = "\n# ==== toy model"


class Row(NamedTuple):
    page: str
    name: str
    needs: str
    of: str  # files that are measured, besides those in the command
    command: str  # for bash, in the checkout


def rows_of(table):
    """The rows of bench/figures.txt: a line of columns, then the command in lines that are indented."""
    rows = []
    for head, command in re.findall(r"^(\w.*)\n((?: +.+\n)+)", table, re.M):
        columns = [column.strip() for column in f"{head}|||".split("|")][:4]
        columns[3] = columns[3].replace("LESSONS", " ".join(ratios.LESSONS))
        rows.append(Row(*columns, re.sub(r"\n *", " ", command).strip()))
    return rows


ROWS = rows_of((ROOT / "bench/figures.txt").read_text())


# ---- pages ----


def block(result):
    """The Markdown of a result: how it was made, then what was printed."""
    machine = [result["processor"], f"{result['cores']} cores", f"torch {result['torch']}"]
    machine.append(result["rounds"] and f"{result['rounds']} rounds")
    machine, command = ", ".join(filter(None, machine)), f"`{result['command']}`"
    if result["hash"]:
        head = f"{command} | {result['date']}, {result['commit']}, {machine} | code {result['hash']}"
    else:
        typed = f"typed in by hand in {result['commit']}"
        head = f"{result['date']}, {machine}, {typed} | to be made anew by {command}"
    return f"{head}\n\n{shown(result['text'])}\n"


def shown(text):
    """As code, if it is not a table of Markdown."""
    return text if re.search(r"^\|-", text, re.M) else f"```\n{text}\n```"


def five_rows(results):
    """README's table: some columns of some lessons of the table that ./run.sh prints."""
    lines = ["             loss    MB held per rank:                        MB sent"]
    lines += ["                       weights    gradients    optimizer     per step"]
    for name in ("single", "ddp", "zero1", "zero2", "zero3"):
        cells = re.split(r" {2,}", re.search(rf"^{name}  .*", results["run"]["text"], re.M)[0])
        loss, *held, sent = [cells[2], *(cell.split(" / ")[0] for cell in (*cells[4:7], cells[8]))]
        lines.append(f"{name:<10}{loss:>7}" + "".join(f"{cell:>13}" for cell in (*held, sent)))
    return "\n".join(lines)


# Blocks that are made of other blocks' results.
VIEWS = {"run-five": five_rows, "slower": ratios.slower, "all-ratios": ratios.all_ratios}


def fill(text, results):
    """A page with its blocks as they are in `results`."""

    def filled(match):
        begin, name, end = match.groups()
        if name in VIEWS:
            return f"{begin}{shown(VIEWS[name](results))}\n{end}"
        return begin + block(results[name]) + end if name in results else match[0]

    return BLOCK.sub(filled, text)


def pages():
    return [ROOT / "README.md", *sorted(RESULTS.glob("*.md"))]


def read():
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def fill_pages(results):
    for page in pages():
        text = page.read_text()
        if text != fill(text, results):
            page.write_text(fill(text, results))


# ---- code ----


def statements(source):
    """Python's lines without comments, docstrings and blank lines; of a lesson those above the toy model."""
    source = source.partition(TOY)[0]
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def files(row):
    """Names of the Python files that a row measures."""
    words = sorted({*re.findall(r"[\w/]+", f"{row.command} {row.of}")})
    names = [f"{word}.py" for word in words if not word.startswith("tools/")]
    return [name for name in names if (ROOT / name).is_file()]


def hash_of(row):
    code = "\n".join(statements((ROOT / name).read_text()) for name in files(row))
    return hashlib.sha256(code.encode()).hexdigest()[:8]


def stale(row, result):
    """Why a row should be run again, or an empty string."""
    if not result["hash"]:
        return "typed in"
    if result["command"] != row.command:
        return "its command has changed"
    since = f"its code has changed: git diff {result['commit'].split()[0]} -- {' '.join(files(row))}"
    return since if result["hash"] != hash_of(row) else ""


# ---- commands ----


def lacks(row):
    """What a row needs and this machine does not have."""
    there = {
        "root": os.geteuid() == 0 and shutil.which("tc"),
        "deepspeed": importlib.util.find_spec("deepspeed"),
        "gpu": shutil.which("nvidia-smi"),
    }
    return [need for need in row.needs.split() if not there[need]]


def printed_by(command):
    """What a command prints, in this checkout and with this Python; None if it fails."""
    env = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHON": sys.executable}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    bash = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(bash, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        print(f"{done.stdout}{done.stderr}exit code {done.returncode}: {command}", file=sys.stderr)
        return None
    return done.stdout.strip("\n")


def git(*words):
    done = subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=-3, text=True)
    return done.stdout.strip()


def commit_of(row):
    changed = git("status", "--porcelain", "--", *files(row))
    return (git("rev-parse", "--short", "HEAD") or "no commit") + " and changes" * bool(changed)


def processor():
    cpus = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^model name\s*: (.+)", cpus, re.M)
    return found[1] if found else platform.processor()


def measure(row):
    """A row's new result, or None if its command failed."""
    commit, code, started = commit_of(row), hash_of(row), time.monotonic()
    text = printed_by(row.command)
    if text is None:
        return None
    rounds = re.search(r"--rounds (\d+)", row.command)
    result = {"command": row.command, "date": str(datetime.date.today()), "commit": commit}
    result |= {"processor": processor(), "cores": os.cpu_count(), "torch": version("torch")}
    result |= {"rounds": int(rounds[1]) if rounds else 0, "minutes": (time.monotonic() - started) / 60}
    return result | {"hash": code, "text": text}


def chosen(words):
    """The rows of these pages or with these names; all without any."""
    names = {re.sub(r".*/|\.md$", "", word) for word in words}
    if "README" in names:
        names.add("run")
    known = {"README", *(row.name for row in ROWS), *(row.page for row in ROWS)}
    if names - known:
        print(f"pages.py: {min(names - known)}: must be a page or a block; see --list", file=sys.stderr)
        sys.exit(2)
    return [row for row in ROWS if not names or names & {row.name, row.page}]


def show(rows, results, only_stale):
    for row in rows:
        result = results.get(row.name)
        why = stale(row, result) if result else "has never run"
        minutes = f"{result['minutes']:.1f}" if result and result["minutes"] else "?"
        if only_stale and why:
            print(f"stale: {row.page}: {row.name}: {why}")
        elif not only_stale:
            print(f"{row.page:<18}{row.name:<20}{minutes:>6} min  {row.needs:<15}{why}".rstrip())


def main(words):
    flags = {word for word in words if word.startswith("--")}
    if flags - {"--list", "--pages", "--stale"}:
        print(f"pages.py: {min(flags)}: must be --list, --pages or --stale", file=sys.stderr)
        return 2
    rows, results = chosen([word for word in words if word not in flags]), read()
    if flags & {"--list", "--stale"}:
        show(rows, results, "--stale" in flags)
        return 0
    failed, timed = 0, False
    for row in () if flags else rows:
        if missing := lacks(row):
            print(f"{row.page}: {row.name}: skipped, needs {', '.join(missing)}", flush=True)
            continue
        print(f"{row.page}: {row.name}: {row.command}", flush=True)
        if result := measure(row):
            results = read() | {row.name: result}
            JSON.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            results = read()  # by name, as a later run has them
            fill_pages(results)
            timed |= "bench/bench.py" in row.command
        else:
            failed += 1
    fill_pages(results)
    if (
        timed
        and printed_by("python site/figures_ratios.py docs/results/figures.json docs/ratios.svg") is None
    ):
        failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
