"""Worlds of ranks that live on from test to test, runs of lessons in them, and mutants that must be rejected.
world(4).run(function, ...) calls a function on each of four processes. train(name, 4, flags) runs a lesson
there; watched, by tools/ledger.py. A check is a function of a lesson's name, or path, that asserts a promise;
mutants() holds that it fails, for a given reason, on an edited copy of the lesson."""

import functools
import gc
import importlib
import io
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections import namedtuple
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
TEXT = "LICENSE"  # relative to the checkout, whose own path may have spaces
# 12: ranks 1 to 4 can share the heads, and no unit's size is a multiple of 8
TINY = f"--layers 3 --heads 12 --width 36 --context 16 --steps 3 --batch 12 --data {TEXT}"
FORK = multiprocessing.get_context("forkserver")
QUIET = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
NO_NAMESPACES = subprocess.call("unshare --net ip link && tc -V", shell=True, **QUIET)  # or no root
# The fork server lacks pytest's path.
sys.path += [f"{ROOT}/{part}" for part in ("more", "tools", "bench", "site")]
import promises  # noqa: E402, F401 which preloads less: the last who asks for that is heard
from lessons import complete, lessons, path_of, special  # noqa: E402, F401

MODULES = "promises numpy.ma torch._dynamo torch.distributed.nn tests.harness test_all"
FORK.set_forkserver_preload(MODULES.split())

# What tests must know of a lesson: LESSON, at the top of tests/test_NAME.py. Beside it stand, in a line each,
# RUN, PLAIN, BEFORE and FILM, which tools/lessons.py explains.
FIELDS = {
    "worlds": (1, 2, 3, 4),  # its numbers of ranks
    "flags": "",  # a shape that all of its worlds can split
    "variants": (),  # flags of its own that change no number
    "own": {},  # {flag: (values that change no number, odd ones)}
    "bad": (),  # flags that it must refuse
    "norms": True,  # whether it prints single.py's
    "slack": None,  # (root, block, ranks, flags) -> elements of gradients that may be missing, or too many
    "races": (),  # flags with which it ends in the weights of its peers
    "uncounted": (),  # what it sends by a formula that is a mean
    "gpu": None,  # flags for the simulated GPU, beside none; else the variants
    "waits": {},  # {flags: {(why, where): how often the host waits in a step}}
    "orders": None,  # (ranks, flags, perhaps a function) of runs by NCCL's rules; else the usual ones
}
Lesson = namedtuple("Lesson", FIELDS, defaults=FIELDS.values())


@functools.cache
def spec(name):
    """The LESSON of tests/test_NAME.py, for a lesson's name or a mutant's path."""
    return importlib.import_module(f"tests.test_{Path(name).stem}").LESSON


def run_of(name):
    """(whether its ranks are threads of one process, its own flags in the runs that single.py equals)."""
    program, _, flags = special(Path(name).stem, "RUN", "torchrun LESSON").partition(" LESSON")
    return program == "python", "" if special(Path(name).stem, "BEFORE") else flags.strip()


def plain_of(name):
    """(the lesson whose run on one rank this lesson's is to equal, its flags)."""
    plain, _, flags = special(Path(name).stem, "PLAIN", "single").partition(" ")
    return plain, flags


def begin(rank, size, store):
    """Make a process a rank."""
    gc.freeze()  # all that the fork has brought: collections of each rank would copy its pages
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    dist.init_process_group = lambda *_: None  # a lesson's ranks have met


def meet():
    """Wait until all ranks are here."""
    store = dist.distributed_c10d._get_default_store()
    MET.append(f"met {len(MET)}")
    store.add(MET[-1], 1)
    while store.add(MET[-1], 0) < dist.get_world_size():
        time.sleep(0.001)


MET = []


def call(function, arguments, options):
    """On a rank: call a function, of a check the one that asserts."""
    gc.collect()
    gc.freeze()  # what is left of former tests is not this one's
    with redirect_stdout(io.StringIO()):
        answer = getattr(function, "__wrapped__", function)(*arguments, **options)
    meet()  # a rank that was refused must not take away a group that others still connect to
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:  # gloo's threads of each would go on polling
            dist.destroy_process_group(group)
    return answer


class World:
    """`size` ranks, each a process, in one process group over gloo."""

    def __init__(self, size):
        self.folder = tempfile.TemporaryDirectory()
        store = f"{self.folder.name}/store"
        self.ranks = [ProcessPoolExecutor(1, FORK, begin, (rank, size, store)) for rank in range(size)]

    def run(self, function, *arguments, timeout=200, **options):
        """[function(*arguments) of rank 0, of rank 1, ...]. A failure on any rank ends this world."""
        try:
            answers = [rank.submit(call, function, arguments, options) for rank in self.ranks]
            ended, late = wait(answers, timeout, FIRST_EXCEPTION)
            for rank, answer in enumerate(answers):
                error = answer.exception() if answer in ended else None
                if error:
                    kind = AssertionError if isinstance(error, AssertionError) else RuntimeError
                    raise kind(f"rank {rank} of {len(answers)}: {str(error) or error.__cause__}") from error
            assert not late, f"{len(late)} of {len(answers)} ranks did not come back in {timeout} s"
        except BaseException:
            del WORLDS[len(self.ranks)]
            for rank in self.ranks:
                for process in list(rank._processes.values()):
                    process.kill()
            self.folder.cleanup()
            raise
        return [answer.result() for answer in answers]


WORLDS = {}


def world(size):
    """The world of this size, the same from test to test."""
    if size not in WORLDS:
        WORLDS[size] = World(size)
    return WORLDS[size]


@functools.cache
def compiled(path, device):
    return compile(Path(path).read_text().replace("cuda", device), path, "exec")


def load(name, device="cuda"):
    """A fresh module of a lesson, tool or mutant: "zero3", "tools/ledger", or a path; with another device."""
    path = str(path_of(str(name).removesuffix(".py")))
    module = types.ModuleType(Path(path).stem)
    module.__file__ = path
    exec(compiled(path, device), vars(module))
    return complete(module)


def train_here(name, flags, watched):
    """On a rank: what tools/ledger.py finds of a run, or, if nobody watches, its losses and norms."""
    lesson = load(name)
    config = lesson.parse(flags.split())
    if watched:
        ledger = load("tools/ledger")
        return ledger.result_of(lesson, config, *ledger.run(lesson, config))
    steps = []
    lesson.print_step = lambda config, step, loss, norm, started: steps.append((loss.item(), norm.item()))
    lesson.train(config)
    assert dist.get_rank() == 0 or not sys.stdout.getvalue(), "another rank prints"
    return {"losses": [loss for loss, _ in steps], "grad_norms": [norm for _, norm in steps]}


def crew(name, size, flags):
    """(ranks, flags) for a run of this size, which a lesson of one process has as threads."""
    is_alone, own = run_of(name)
    own = " ".join(str(size) if word == "N" else word for word in own.split())
    return 1 if is_alone else size, f"{own} {flags}".strip()


@functools.cache
def train(name, size, flags, watched=False):
    """(what --json writes, or losses and norms alone; the saved weights) of a run in a world of this size."""
    ranks, flags = crew(name, size, flags)
    with tempfile.TemporaryDirectory() as folder:
        save = f"{folder}/weights.pt"
        result = world(ranks).run(train_here, name, f"{flags} --save {save}", watched)[0]
        return result, torch.load(save)


def apart(one, other):
    """The largest difference between two numbers, lists of numbers, or dicts of tensors."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), f"other names: {one.keys() ^ other.keys()}"
        other = torch.cat([other[key].flatten().double() for key in one])
        one = torch.cat([one[key].flatten().double() for key in one])
    one, other = torch.as_tensor(one, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64)
    return (one - other).abs().max().item()


def said(call):
    """(what a call prints, its lines on stderr, its exit code)."""
    code, out, errors = 0, io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            call()
        except SystemExit as end:
            code = end.code
    return out.getvalue(), errors.getvalue().splitlines(), code


def error_of(call):
    """What a call raises, or "nothing"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def on_ranks(size):
    """Make a check of a function of a lesson's name that asserts on each of so many ranks."""

    def decorate(function):
        @functools.wraps(function)
        def check(*arguments, size=size, **options):
            return world(size).run(check, *arguments, **options)

        return check

    return decorate


def holds(names, *checks):
    """A test that holds that a lesson, or several, pass these checks."""

    @pytest.mark.parametrize("name", [names] if isinstance(names, str) else names)
    @pytest.mark.parametrize("check", checks)
    def test(check, name):
        check(name)

    return test


EDITS = []  # (name, old) of all mutants, for ./run.sh lint


def mutants(rows, names=None):
    """A test that a check fails, with a message that has this reason, when a lesson's `old` is `new`.
    rows: (lessons, old, new, check, reason), without lessons if all rows are of these names."""
    rows = [(names, *row) for row in rows] if names else rows
    each_alone = [(name, *row[1:]) for row in rows for name in row[0].split()]
    EDITS.extend((name, old) for name, old, *_ in each_alone)

    @pytest.mark.parametrize("name, old, new, check, reason", each_alone)
    def test(name, old, new, check, reason, tmp_path):
        source = path_of(name).read_text()
        assert source.count(old) == 1, f"{name}.py has {source.count(old)} times: {old}"
        mutant = tmp_path / f"{Path(name).name}.py"
        mutant.write_text(source.replace(old, new))
        with pytest.raises(AssertionError, match=re.escape(reason)):
            check(str(mutant))

    return test
