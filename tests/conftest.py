"""--lesson zero3 runs what concerns zero3.py alone; at the end, a line for each promise that broke.
The whole suite keeps all promises, on every fourth row of the long tables (of lessons, ranks and flags), and
tries a twelfth of the mutants, which test the tests: drawn anew each time, or those of --mutants SEED. With
--mutants all, or where a part of the suite is named, all run."""

import os
import random
import re
from pathlib import Path

import pytest

import tests.pretend  # noqa: F401 in pytest's own processes, before any backward; ranks must not have it
from tests.harness import ROOT, lessons

NAMES = list(lessons())

os.chdir(ROOT)  # paths in the tests' flags are relative
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests run on the CPU, where there are GPUs, too


def pytest_addoption(parser):
    parser.addoption("--lesson", choices=NAMES, help="only what concerns this lesson")
    parser.addoption("--mutants", metavar="SEED|all", help="all, or what was drawn with this seed")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # xdist's workers inherit what is drawn here
        whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
        whole = whole and not config.option.keyword and not config.option.lesson
        drawn = str(random.randrange(10**6)) if whole else "all"
        os.environ["MUTANTS"] = config.option.mutants or drawn
    config.option.mutants = os.environ["MUTANTS"]


def is_mutant(item):
    return hasattr(item, "callspec") and {"old", "new"} <= item.callspec.params.keys()


def draw(items, seed):
    """The items, in their order, with a twelfth of their mutants, and every fourth row of the long tables."""
    chosen = random.Random(seed)
    mutants = [item for item in items if is_mutant(item)]
    drawn = chosen.sample(mutants, -(-len(mutants) // 12))
    first = chosen.randrange(4)
    rows = [item for item in items if not is_mutant(item) and item.get_closest_marker("long_table")]
    others = {*mutants, *rows}.difference(drawn, rows[first::4])
    return [item for item in items if item not in others]


def concerns(item, lesson):
    """A test is of the lessons in its parameters; if there are none, of its file's."""
    parameters = re.findall(r"\w+", item.nodeid.partition("[")[2])
    return lesson in (set(parameters).intersection(NAMES) or [item.path.stem.removeprefix("test_")])


def pytest_collection_modifyitems(config, items):
    long = "survive|learn|gpu"
    items.sort(key=lambda item: not re.search(long, item.nodeid))  # these begin first
    if lesson := config.getoption("--lesson"):
        items[:] = [item for item in items if concerns(item, lesson)]
    if config.option.mutants != "all":
        items[:] = draw(items, config.option.mutants)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    if config.option.mutants != "all":
        terminalreporter.write_line(
            f"Drawn: mutants and rows of long tables; the same again: --mutants {config.option.mutants}"
        )
    for report in terminalreporter.stats.get("failed", []) + terminalreporter.stats.get("error", []):
        test, _, parameters = report.nodeid.partition("[")
        path, _, name = test.partition("::")
        promise = name.removeprefix("test_").replace("_", " ")
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message.splitlines()[0] if crash else "did not run"
        where = f"{Path(path).stem} {parameters.removesuffix(']')}".strip()
        terminalreporter.write_line(f"BROKEN {where}: {promise}: {reason}"[:300])
