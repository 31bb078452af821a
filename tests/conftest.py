"""--lesson zero3 runs what concerns zero3.py alone; at the end, a line for each promise that broke."""

import os
import re
from pathlib import Path

import pytest

from test_all import NAMES
from tests.harness import ROOT

os.chdir(ROOT)  # paths in the tests' flags are relative
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests run on the CPU, where there are GPUs, too


def pytest_addoption(parser):
    parser.addoption("--lesson", choices=NAMES, help="only what concerns this lesson")


def concerns(item, lesson):
    """A test is of the lessons in its parameters; if there are none, of all in its file's docstring."""
    parameters = re.findall(r"\w+", item.nodeid.partition("[")[2])
    return lesson in (set(parameters).intersection(NAMES) or re.findall(r"(\w+)\.py", item.module.__doc__))


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: not re.search("survive|learn|gpu", item.nodeid))  # long ones begin first
    if lesson := config.getoption("--lesson"):
        items[:] = [item for item in items if concerns(item, lesson)]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.stats.get("failed", []) + terminalreporter.stats.get("error", []):
        test, _, parameters = report.nodeid.partition("[")
        path, _, name = test.partition("::")
        promise = name.removeprefix("test_").replace("_", " ")
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message.splitlines()[0] if crash else "did not run"
        where = f"{Path(path).stem} {parameters.removesuffix(']')}".strip()
        terminalreporter.write_line(f"BROKEN {where}: {promise}: {reason}"[:300])
