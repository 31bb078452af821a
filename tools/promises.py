"""Which promise a lesson's file breaks: it runs on 1 to 4 ranks, beside single.py and the lesson as it is.

python tools/promises.py zero3.py     what a file keeps, up to the first promise that it breaks
python tools/promises.py              what shows of each of tests/bugs.py, in docs/symptoms.json
"""

import ast
import faulthandler
import functools
import gc
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path

import ledger
import orders
import points
import torch
import torch._dynamo  # else every rank's optimizer loads it, in a second
import torch.distributed as dist
import torch.distributed.nn
from sources import ROOT, find_bugs, original

SYMPTOMS = ROOT / "docs" / "symptoms.json"
THREADS = {"dp_threads": "--replicas", "dp_async": "--workers"}  # whose ranks are threads of one process
SIZES = {"single": (1,), "fusion": (1, 2), "checkpointing": (1, 2)}
LAST = {"hsdp": 4}  # ranks of the run with several microbatches, if not 2: its copies are of 2 ranks
# How much more than the lesson a file may hold: where memory is the point, little; of gradients also one
# parameter's, which was just computed. A lesson that is about something else leaves room for temporaries.
FRUGAL = (
    "zero1 zero2 zero3 hsdp offload tensor_parallel sequence_parallel context_parallel expert_zero reshard"
)
FRUGAL = {*FRUGAL.split(), *"pipeline zero_bubble pipeline_v parallel_3d checkpointing zero_r".split()}
ONE_GRADIENT = 75_000  # bytes: of the largest parameter, the embedding
HIDDEN = 0.8  # of the matrix products that hide a lesson's messages
SHAPE = "--layers 3 --heads 12 --width 36 --context 24 --batch 24"
FLAGS = f"{SHAPE} --steps 3 --dtype fp64 --lr 0.01 --clip 0.5 --device cpu".split()
FLAGS += ["--data", f"{ROOT}/LICENSE"]  # the path may have spaces
DEATHS = "--workers 4 --steps 12 --kill 1@3 0@6 --join 9 --accum 3 --timeout 2"  # of survive.py
FORK = multiprocessing.get_context("forkserver")  # macOS does not allow fork() in a process that has threads
FORK.set_forkserver_preload(
    ["numpy.ma", "torch._dynamo", "torch.distributed.nn", "torch._subclasses.fake_tensor"]
)
# {what the operator's name contains: what travels}. Over gloo an all-to-all does a reduce-scatter's work.
KINDS = {"allreduce": "all-reduce", "allgather": "all-gather", "alltoall": "reduce-scatter or all-to-all"}
KINDS |= {"reduce_scatter": KINDS["alltoall"], "send": "message", "recv": "message", "broadcast": "broadcast"}
COLLECTIVES = (
    "all_reduce all_gather all_gather_into_tensor all_gather_single all_to_all_single broadcast reduce"
)
COLLECTIVES = [*COLLECTIVES.split(), "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"]
SECONDS = 40  # a run that takes longer hangs


TRAVELLING = {}  # {work: its kind}, on a rank
HIDES = Counter()  # {kind: matrix products during which one travelled}, on a rank


class Clock(ledger.Watch):
    """A Watch that also counts the matrix products during which something travels, by the kind of what does.

    A work is kept from its start to the wait for it, as a collective keeps its tensors, and no longer."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if function.namespace == "c10d":
            kinds = [KINDS[part] for part in KINDS if part in function.name()]
            for part in result if isinstance(result, tuple | list) else [result]:
                if isinstance(part, torch.ScriptObject):
                    TRAVELLING[dist.Work.unbox(part)] = kinds[0] if kinds else "barrier"
        return result

    def see(self, function, given, made, args):
        super().see(function, given, made, args)
        if self.on and "mm" in function.name():
            HIDES.update(set(TRAVELLING.values()))


def tell_clock(wait):
    """Work.wait(), which tells Clock."""

    def wait_and_tell(work, *timeout):
        TRAVELLING.pop(work, None)
        return wait(work, *timeout)

    return wait_and_tell


class Handle:
    """A collective's Work, which it lets go of after the wait. Over gloo a Work keeps what it has received,
    as long as somebody keeps the Work; nobody need know this to do an exercise."""

    def __init__(self, work):
        self.work = work

    def wait(self, *timeout):
        work, self.work = self.work, None
        return work is None or work.wait(*timeout)


def handled(collective):
    """A collective that returns a Handle."""

    def call(*args, **kwargs):
        work = collective(*args, **kwargs)
        return Handle(work) if isinstance(work, dist.Work) else work

    return call


def watched(path, flags):
    """On a rank: run a lesson's file. What tools/ledger.py --json writes, and more."""
    letters = {}
    evaluate = ledger.evaluate
    ledger.evaluate = lambda formula, values: letters.update(values) or evaluate(formula, values)
    lesson = ledger.load(path)
    config = lesson.parse([*FLAGS, *flags])
    served = []  # losses of reshard.py's servers, of which step 1's is of weights that all had from the start
    if hasattr(lesson, "print_served"):
        lesson.print_served = lambda config, losses: served.append(losses.item() / max(config.servers, 1))
    result = ledger.result_of(lesson, config, *ledger.run(lesson, config))
    result["served"] = served
    result["hidden"] = dict(HIDES)
    result["formulas"] = ledger.read_formulas(lesson, config)
    result["letters"] = letters
    return result


def be_rank(path, rank, size, flags, folder, watch):
    """In a process of its own: run a file as this rank, and write what watch() saw to folder/RANK.seen."""
    gc.freeze()  # tools/watch.py looks through all objects; these were imported
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    faulthandler.register(signal.SIGUSR1, open(folder / f"{rank}.stack", "w"))  # noqa: SIM115
    sys.stdout = sys.stderr = open(folder / f"{rank}.said", "w+")  # noqa: SIM115
    torch.set_num_threads(1)
    ledger.Watch = Clock
    dist.Work.wait = tell_clock(dist.Work.wait)
    for name in filter(dist.__dict__.get, COLLECTIVES):
        setattr(dist, name, handled(getattr(dist, name)))
    try:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        result = watch(path, [*flags.split(), "--save", f"{folder}/weights"])
    except BaseException as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
        if isinstance(error, SystemExit):  # a refusal, whose reason was printed
            sys.stdout.seek(0)
            said = sys.stdout.read().strip().rpartition("\n")[2] if error.code == 2 else "it ended itself"
        lines = [getattr(error, "lineno", "?")]
        for frame in traceback.extract_tb(error.__traceback__):
            lines += [frame.lineno] if frame.filename == path else []
        result = {"error": f"line {lines[-1]}: {said}"}
    torch.save(result, folder / f"draft.{rank}")
    (folder / f"draft.{rank}").rename(folder / f"{rank}.seen")
    os._exit(0)


def where_is(path, rank, process, folder):
    """Where a rank stands that does not end. Ends it."""
    os.kill(process.pid, signal.SIGUSR1)  # it writes its stack, the innermost call first
    time.sleep(0.3)
    process.kill()
    stack = re.findall(r'File "(.*)", line (\d+) in (\w+)', (folder / f"{rank}.stack").read_text())
    calls = [name for file, _, name in stack if "distributed" in file and name != "wrapper"]
    lines = [line for file, line, _ in stack if file == path]
    return f"rank {rank} {f'waits in {calls[0]}()' if calls else 'computes'}, line {(lines or ['?'])[0]}"


@functools.cache
def run(path, lesson, size=1, flags="", watch=watched):
    """What a file did on so many ranks, with its weights; or {"error": why it did not}. Cached by path.

    watch(path, flags): what is seen on a rank, a dict. "ranks" has those of all, the rest is rank 0's."""
    flags = "--inner-steps 2 --fragments 2 --steps 5 " * (lesson == "diloco") + flags
    flags = "--how direct " * (lesson == "reshard") + flags
    if lesson in THREADS:
        flags += f" {THREADS[lesson]} {size}"
        size = 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = []
        for rank in range(size):
            arguments = (path, rank, size, flags, folder, watch)
            ranks.append(FORK.Process(target=be_rank, args=arguments, daemon=True))
            ranks[rank].start()
        deadline = time.monotonic() + SECONDS
        results = {}
        running = True
        while running:
            time.sleep(0.02)
            # Asked before the files are read: who has ended has written its own.
            running = time.monotonic() < deadline and any(process.is_alive() for process in ranks)
            for rank in range(size):
                file = folder / f"{rank}.seen"
                if rank not in results and file.exists():
                    results[rank] = torch.load(file)
                    if "error" in results[rank]:  # the others may wait for it for ever
                        deadline = min(deadline, time.monotonic() + 2)
        hangs = []
        for rank, process in enumerate(ranks):
            if process.is_alive():
                hangs.append(where_is(path, rank, process, folder))
            elif rank not in results:
                results[rank] = {"error": "its process died"}
        errors = [f"rank {rank}, {each['error']}" for rank, each in results.items() if "error" in each]
        errors.sort(key=lambda error: "peer" in error or "onnect" in error)  # of ranks that another one left
        if errors or hangs:
            return {"error": errors[0] if errors else f"it hangs: {'; '.join(hangs)}"}
        result = results[0] | {"ranks": [results[rank] for rank in range(size)]}
        if (folder / "weights").exists():
            result["weights"] = torch.load(folder / "weights")
        return result


def plain_of(lesson):
    """(path, lesson) of the plain loop: single.py; of another model or optimizer the lesson as it is."""
    name = lesson if lesson in ("expert_parallel", "muon", "diloco", "uneven") else "single"
    name = "expert_parallel" if lesson == "expert_zero" else name
    return original(name), name


def promises(path, lesson):
    """Yield (a promise, how a lesson's file breaks it or None), easy ones first; stop at one."""
    sizes = SIZES.get(lesson, (1, 2, 3, 4))
    for name, point in points.SCHEDULES.get(lesson, {}).items():  # first: a wrong one may hang
        yield name, broken_point(path, lesson, 1, point)
    last = LAST.get(lesson, min(2, sizes[-1])), "--accum 3"
    for size, flags in [*((size, "") for size in sizes), last]:
        where = f"{size} rank{'s' * (size > 1)}{', 3 microbatches' * bool(flags)}"
        expected = run(*plain_of(lesson), size if lesson == "diloco" else 1, flags)
        found = run(path, lesson, size, flags)
        yield f"{where}: it runs", found.get("error")
        yield f"{where}: losses and gradient norms are the plain loop's", first_wrong(found, expected)
        if lesson == "reshard" and size > 1:
            served = first_wrong({"losses": found["served"]}, {"losses": expected["losses"]})
            yield f"{where}: the servers' losses are the plain loop's", served
        yield f"{where}: weights are the plain loop's", differ_in(found["weights"], expected["weights"])
    for name, size, point in points.POINTS.get(lesson, ()):
        yield name, broken_point(path, lesson, size, point)
    for name, size, flags, tolerance in points.VARIANTS.get(lesson, ()):
        found, expected = (run(each, lesson, size, flags) for each in (path, original(lesson)))
        yield (
            f"{name}: losses and gradient norms are the lesson's",
            found.get("error") or first_wrong(found, expected, tolerance),
        )
    if lesson == "survive":
        yield from survives(path, run(*plain_of(lesson), 1, "--accum 3 --steps 12")["weights"])
    yield from costs(where, lesson, run(path, lesson, *last), run(original(lesson), lesson, *last))


def broken_point(path, lesson, size, point):
    """How a file breaks one of tools/points.py's promises."""
    problem = run(path, lesson, size, watch=functools.partial(points.on_rank, point)).get("error")
    return problem and problem.rpartition("AssertionError: ")[2]


def costs(where, lesson, found, expected):
    """The promises of what a run sends, holds and computes, beside the lesson's own. Only more is wrong."""
    for part, column in (("sent", "wire"), ("held", "measured")):
        for name in sorted(expected[part].keys() | found[part].keys()):
            own, right = (result[part].get(name, {}).get(column, 0) for result in (found, expected))
            formula = expected["formulas"].get(name, "0")
            problem = f"{own:.0f}, which should be {right:.0f}, for it is {formula}"
            most = 1.1 * right + 1000  # a few numbers are no message
            if part == "held":
                most = (1.1 if lesson in FRUGAL else 1.5) * right + ONE_GRADIENT * (name == "gradients")
            yield f"{where}: bytes {part}, {name}", problem if own > most else None
    own, right = (result["flops"]["measured"] for result in (found, expected))
    problem = f"{own:.4g} FLOPs, which should be {right:.4g}"
    yield f"{where}: no matrix product is computed twice", problem if own > 1.02 * right else None
    kinds = {} if lesson in THREADS or lesson == "offload" else expected["hidden"]  # whose threads take turns
    for kind, right in sorted(kinds.items()):
        own = found["hidden"].get(kind, 0)
        problem = f"{own} matrix products while one travels, of {right}"
        yield f"{where}: computation hides each {kind}", problem if own < HIDDEN * right else None


def survives(path, weights):
    """The promises of survive.py alone."""
    problem = None
    try:
        orders.try_every_order(path, 1, orders.CASES[:4])
        orders.try_walks(path)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    yield "with a death at any moment: nobody waits for ever, no step counts twice or by halves", problem
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, path, *FLAGS, *DEATHS.split(), "--save", f"{folder}/weights"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
        problem = f"exit code {ended.returncode}" if ended.returncode else None
        yield "workers die, a newcomer enters: the job ends well", problem
        problem = differ_in(torch.load(f"{folder}/weights"), weights)
        yield "workers die, a newcomer enters: weights are the plain loop's", problem


def first_wrong(found, expected, tolerance=None):
    """The first loss or gradient norm that differs, of the earliest step, in a sentence."""
    words = {"losses": "loss", "grad_norms": "gradient norm", "served": "servers' loss"}
    for step in range(len(expected["losses"])):
        for key in filter(expected.get, words):
            own, right = found[key][step], expected[key][step]
            if not abs(own - right) < (tolerance * abs(right) if tolerance else 1e-9):
                ratio = own / right
                times = (
                    f"{ratio:.3f} times the right one" if abs(ratio - 1) > 5e-4 else f"off by {ratio - 1:.1e}"
                )
                return f"the {words[key]} of step {step + 1} is {times} ({own:.12g}, not {right:.12g})"
    return None


def differ_in(found, expected, tolerance=1e-9):
    """The first of two state_dicts' weights that differ, in a sentence."""
    for name, right in expected.items():
        own = found.get(name)
        if own is None or own.shape != right.shape:
            return f"{name} differs"
        if not (own.double() - right.double()).abs().max() < tolerance:
            return f"{name} differs"
    return None


def find_mutants():
    """{key: (lesson, old, new)} of the lessons' mutants, the rows of calls of mutants() in the tests."""
    found = {}
    for file in sorted((ROOT / "tests").glob("test_*.py")):
        tables = {}  # {name: the list that it is at this line}
        for node in ast.parse(file.read_text()).body:
            if not isinstance(node, ast.Assign):
                continue
            tables[getattr(node.targets[0], "id", "")] = getattr(node.value, "elts", [])
            if getattr(getattr(node.value, "func", None), "id", "") == "mutants":
                table, *names = node.value.args
                for row in tables.get(getattr(table, "id", ""), []):
                    texts = [getattr(part, "value", None) for part in (*names, *getattr(row, "elts", []))]
                    lessons, old, new, *_ = (*texts, None, None, None)
                    for lesson in (lessons or "").split() if old and new else []:
                        key = f"{lesson} {zlib.crc32(f'{old} {new}'.encode()):08x}"
                        found[key] = lesson, old, new
    return found


def symptom_of(path, lesson):
    """The last promises that a file keeps, and the first that it breaks; nothing if it keeps all."""
    kept = []
    for promise, problem in promises(path, lesson):
        if problem:
            return [*(f"yes: {each}" for each in kept[-2:]), f"no:  {promise}: {problem}"]
        kept.append(promise)
    return []


def observe_new(file, observe, mutants):
    """{key: observe(path, lesson)} of edits of lessons, kept in a file: only those that it lacks run."""
    known = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for key, (lesson, old, new, *_) in mutants.items():
            source = (ROOT / f"{lesson}.py").read_text()
            if key in known or source.count(old) != 1 or "def train(config" not in source:
                continue
            path = Path(folder, f"{key.replace(' ', '-')}.py")
            path.write_text(source.replace(old, new))
            known[key] = observe(str(path), lesson)
            print(key, known[key], flush=True)
            ordered = {key: known[key] for key in mutants if key in known}
            file.write_text(json.dumps(ordered, indent=0) + "\n")
    return known


def main():
    if not sys.argv[1:]:
        observe_new(SYMPTOMS, symptom_of, find_bugs())
    broken = 0
    for path in map(Path.resolve, map(Path, sys.argv[1:])):
        lesson = path.stem.split("-")[0]
        if not path.is_file() or not (ROOT / f"{lesson}.py").is_file():
            sys.exit(f"promises.py: {path}: must be a file that is named LESSON.py or LESSON-....py")
        lines = symptom_of(str(path), lesson)
        broken |= bool(lines)
        print("\n".join(lines or [f"{path.name} keeps all promises"]))
    return broken


if __name__ == "__main__":
    sys.exit(main())
