"""Which promise a lesson's file breaks: it runs on 1 to 4 ranks, beside the plain loop and the lesson itself.

What is special to a lesson stands in its tests/test_NAME.py: RUN and PLAIN (see tools/lessons.py), WITH,
flags of all runs, also of the plain loop's, SLACK, how many times the lesson's bytes a file may hold (1.25),
LEARN, further runs, divided by ";", that are compared with the lesson's own (the default is one in bf16; A &&
B: A on 2 ranks, then B on 3, in the same folder), and NORMS, if gradient norms are not the plain loop's.
"""

import faulthandler
import functools
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict, deque
from pathlib import Path

import ledger
import torch
import torch._dynamo  # else every rank's optimizer loads it, in a second
import torch.distributed as dist
import torch.distributed.nn
from lessons import ROOT, path_of, special

ONE_GRADIENT = 75_000  # bytes: of the largest parameter, the embedding, which autograd just computed
HIDDEN, LATE = 0.8, 1.05  # of the products that hide a lesson's messages; times as long as its step
SECONDS = 60  # a run that takes longer hangs
FLAGS = "--layers 3 --heads 12 --width 36 --context 24 --batch 24 --steps 3 --dtype fp64 --lr 0.01 --clip 0.5"
FLAGS = [*FLAGS.split(), "--data", f"{ROOT}/LICENSE"]  # the path may have spaces
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all runs are on the CPU
ACCUM = "--accum 3 --clip 100"  # a norm above which no gradient is
FORK = multiprocessing.get_context("forkserver")  # macOS does not allow fork() in a process that has threads
MODULES = "numpy.ma torch._dynamo torch.distributed.nn torch._subclasses.fake_tensor"
FORK.set_forkserver_preload(MODULES.split())
# {what the operator's name contains: what travels}. An all-to-all may do a reduce-scatter's work.
KINDS = {"allreduce": "all-reduce", "allgather": "all-gather", "alltoall": "reduce-scatter"}
KINDS |= {"reduce_scatter": "reduce-scatter", "send": "message", "recv": "message", "broadcast": "broadcast"}

TRAVELLING = {}  # {work: (its kind, of what is received the channel)}
HIDES = Counter()  # {kind: matrix products during which one travelled}
LOG = []  # in order: ("product", FLOPs), ("sent", channel), ("received", channel)


class Clock(ledger.Watch):
    """A Watch that also notes which matrix products run while something travels, and the order of all.

    A work is kept from its start to the wait for it, as a collective keeps its tensors, and no longer."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = self.flops
        result = super().__torch_dispatch__(function, types, args, kwargs)
        name = function.name()
        if function.namespace == "c10d":
            channel = None
            if "send" in name or "recv_" in name:
                group, peer = dist.ProcessGroup.unbox(args[1]), args[2]
                ends = (group.rank(), peer) if "send" in name else (peer, group.rank())
                channel = group.group_name, *ends
            if self.on and "send" in name:
                LOG.append(("sent", channel))
            kind = next((KINDS[part] for part in KINDS if part in name), "barrier")
            for part in result if isinstance(result, tuple | list) else [result]:
                if isinstance(part, torch.ScriptObject):
                    TRAVELLING[dist.Work.unbox(part)] = kind, channel if self.on and "recv" in name else None
        elif self.on and "mm" in name:
            HIDES.update({kind for kind, _ in TRAVELLING.values()})
            in_main = getattr(self.here, "name", None) is None
            LOG.append(("product", in_main * (self.flops - before)))
        return result


def wait_and_tell(work, *timeout, wait=dist.Work.wait):
    """Work.wait(), which tells Clock."""
    _, channel = TRAVELLING.pop(work, (None, None))
    if channel:
        LOG.append(("received", channel))
    return wait(work, *timeout)


def watched(path, flags):
    """Run a lesson's file: what tools/ledger.py --json writes, and more."""
    lesson = ledger.load(path)
    config = lesson.parse([*FLAGS, *flags])
    watch, history = ledger.run(lesson, config)
    result = ledger.result_of(lesson, config, watch, history)
    result["held"]["all"] = {"measured": result["peak_bytes"]}
    result |= {"formulas": ledger.read_formulas(lesson, config), "has_threads": watch.has_threads}
    result |= {"products": sum(what == "product" for what, _ in LOG), "log": LOG}
    return result | {"hidden": dict(HIDES)}


def be_rank(path, rank, size, flags, folder):
    """In a process of its own: run a file as this rank, and write what was seen to folder/RANK.seen."""
    gc.freeze()  # tools/watch.py looks through all objects; these were imported
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.chdir(folder)  # where no checkpoint is, nor other files of the learner's
    faulthandler.register(signal.SIGUSR1, open(folder / f"{rank}.stack", "w"))  # noqa: SIM115
    said = sys.stdout = sys.stderr = open(folder / f"{rank}.said", "w+")  # noqa: SIM115
    torch.set_num_threads(1)
    ledger.Watch = Clock
    dist.Work.wait = wait_and_tell
    try:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        dist.init_process_group = lambda *_: None  # in the lesson's join_world()
        result = watched(path, [*flags.split(), "--save", f"{folder}/weights"])
        said.seek(0)
        printed = re.findall(r"(?:loss|scale) +(-?[\d.]+|nan|inf)", said.read())
        result["printed"] = list(map(float, printed))
    except BaseException as error:
        words = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
        if isinstance(error, SystemExit):  # a refusal, whose reason was printed
            said.seek(0)
            words = said.read().strip().rpartition("\n")[2] if error.code == 2 else "it ended itself"
        lines = [getattr(error, "lineno", "?")]
        for frame in traceback.extract_tb(error.__traceback__):
            lines += [frame.lineno] if frame.filename == path else []
        result = {"error": f"line {lines[-1]}: {words}"}
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
def run(path, command, size=1, flags=""):
    """What a file did on so many ranks, with its weights; or {"error": why it did not}. Cached by path.

    command: as RUN in tests/test_NAME.py. "ranks" has what was seen on each rank, the rest is rank 0's."""
    launcher, _, own = command.partition(" LESSON")
    flags = f"{flags} {own}"
    if launcher == "python":
        flags, size = re.sub(r"\bN\b", str(size), flags), 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = [(path, rank, size, flags, folder) for rank in range(size)]
        ranks = [FORK.Process(target=be_rank, args=each, daemon=True) for each in given]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + SECONDS
        results, running = {}, True
        while running:
            time.sleep(0.02)  # this is asked before files are read: who has ended has written its own
            running = time.monotonic() < deadline and any(process.is_alive() for process in ranks)
            for rank in range(size):
                if rank not in results and (folder / f"{rank}.seen").exists():
                    results[rank] = torch.load(folder / f"{rank}.seen")
                    if "error" in results[rank]:  # the others may wait for it for ever
                        deadline = min(deadline, time.monotonic() + 2)
        alive = [rank for rank in range(size) if ranks[rank].is_alive()]
        hangs = [where_is(path, rank, ranks[rank], folder) for rank in alive]
        errors = [f"rank {rank}, {each['error']}" for rank, each in results.items() if "error" in each]
        errors.sort(key=lambda error: "peer" in error or "onnect" in error)  # of ranks that another one left
        errors += [f"it hangs: {'; '.join(hangs)}"] * bool(hangs)
        if errors or len(results) < size:
            return {"error": (errors or ["the process of a rank died"])[0]}
        ranks = [results[rank] for rank in range(size)]
        ranks[0]["length"] = length_of(rank["log"] for rank in ranks)
        return ranks[0] | {"ranks": ranks, "weights": torch.load(folder / "weights")}


@functools.cache
def run_alone(path, commands):
    """{"weights"} of a file that starts its own workers, or of the last of commands in turn, or {"error"}."""
    with tempfile.TemporaryDirectory() as folder:
        for ranks, command in enumerate(commands.split(" && "), 2):
            program, flags = command.split(" LESSON")
            torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
            launch = [sys.executable, *torchrun * (program == "torchrun"), path]
            command = [*launch, *FLAGS, *flags.split(), "--save", f"{folder}/weights"]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=2 * SECONDS, cwd=folder)
            except subprocess.SubprocessError as error:  # another exit code, or too late
                told = re.findall(r"\w+Error: .*", (error.stderr or b"").decode())
                return {"error": told[0] if told else f"{error}".replace(f"{command}", "it")}
        return {"weights": torch.load(f"{folder}/weights")}


def promises(path, lesson):
    """Yield (a promise, how a lesson's file breaks it or None), easy ones first; stop at one."""
    command = special(lesson, "RUN", "torchrun LESSON")
    plain, _, plain_flags = special(lesson, "PLAIN", "single").partition(" ")
    own = str(path_of(lesson))
    has_ranks = re.search(r"torchrun|\bN\b", command)
    shared = special(lesson, "WITH")
    runs = [(1, ""), (2, ""), (3, ""), (2, ACCUM), (4, "")] if has_ranks else [(1, ""), (1, ACCUM)]
    for size, flags in runs:
        where = f"{size} rank{'s' * (size > 1)}{', 3 microbatches' * bool(flags)}"
        given = f"{shared} {flags}"
        expected = run(str(path_of(plain)), f"python LESSON {plain_flags}", 1, given)
        found = run(path, command, size, given)
        yield f"{where}: it runs", found.get("error")
        if special(lesson, "NORMS"):
            expected = expected | {"grad_norms": found["grad_norms"]}
        yield f"{where}: losses and gradient norms are the plain loop's", first_wrong(found, expected)
        yield f"{where}: weights are the plain loop's", differ_in(found["weights"], expected["weights"])
        if (size, flags) in runs[-2:]:
            expected = run(own, command, size, given)
            yield from beside(where, lesson, found, expected, 1e-9)
    more = special(lesson, "LEARN")
    for each in (more or f"{command} --dtype bf16").split("; "):
        where = f"with{each.partition(' LESSON')[2]}"
        alone = more and (each.startswith("python") or " && " in each)
        runs = [run_alone(file, each) if alone else run(file, each, size, shared) for file in (path, own)]
        yield f"{where}: it ends well", runs[0].get("error")
        if alone:
            yield f"{where}: weights are the lesson's", differ_in(*(each["weights"] for each in runs))
        else:
            yield from beside(where, lesson, *runs, 0.02 if "bf16" in each else 1e-8)


def beside(where, lesson, found, expected, tolerance):
    """The promises of what a run computes, sends and holds, beside the lesson's own. Only more is wrong."""
    problem = first_wrong(found, expected, tolerance)
    if not problem and len(found["printed"]) == len(expected["printed"]):  # also of ranks that only serve
        pairs, most = zip(found["printed"], expected["printed"]), 5 * tolerance + 2e-4
        problem = next((f"{own}, not {right}" for own, right in pairs if not abs(own - right) < most), None)
    yield f"{where}: losses, and all that it prints, are the lesson's", problem
    if "all-to-all" in found["sent"] and "all-to-all" not in expected["sent"]:  # as a reduce-scatter
        rows = found["sent"].copy()
        pair = rows.pop("all-to-all"), rows.get("reduce-scatter", {})
        rows["reduce-scatter"] = {key: sum(row.get(key, 0) for row in pair) for key in ("wire", "calls")}
        found = found | {"sent": rows}
    slack = float(special(lesson, "SLACK", "1.25"))
    limits = {"bytes sent": (1.1, 1000), "messages sent": (1.5, 2), "bytes held": (slack, 0)}  # times, plus
    for (what, (times, more)), column in zip(limits.items(), ("wire", "calls", "measured")):
        part = what.split()[1]
        for name in sorted(expected[part].keys() | found[part].keys()):
            own, right = (result[part].get(name, {}).get(column, 0) for result in (found, expected))
            most = max(times * right + more, (1.1 * right + ONE_GRADIENT) * (name == "gradients"))
            formula = expected["formulas"].get(name)
            problem = f"{own:.0f}, which should be {right:.0f}"
            problem += f" (the formula of its bytes: {formula})" * bool(formula)
            yield f"{where}: {what}, {name}", problem if own > most else None
    measures = (
        ("no matrix product is computed twice", 1.02, "flops", "FLOPs"),
        ("matrix products are few", 1.5, "products", "matrix products"),
        ("no rank waits longer for messages", LATE, "length", "times as long as a rank computes"),
    )
    for promise, most, key, unit in measures[: 2 if found["has_threads"] else 4]:  # threads take turns
        own, right = (sum(rank.get(key, 0) for rank in result["ranks"]) for result in (found, expected))
        problem = f"{own:.4g} {unit}, which should be {right:.4g}"
        yield f"{where}: {promise}", problem if own > most * right else None
    for kind, right in sorted(expected["hidden"].items()) if not found["has_threads"] else ():
        own = found["hidden"].get(kind, 0)
        problem = f"{own} matrix products while one travels, of {right}"
        yield f"{where}: computation hides each {kind}", problem if own < HIDDEN * right else None


def length_of(logs):
    """How long a step takes if messages take no time, but only products, and all ranks' take 1 in all."""
    logs = list(map(deque, logs))
    work = [sum(value for what, value in log if what == "product") for log in logs]
    clocks = [0] * len(logs)
    sent = defaultdict(deque)  # {channel: when each message was sent}
    moved = True
    while moved:
        moved = False
        for rank, log in enumerate(logs):
            while log and (log[0][0] != "received" or sent[log[0][1]]):
                moved = True
                what, value = log.popleft()
                if what == "product":
                    clocks[rank] += value / (work[rank] or 1)
                elif what == "sent":
                    sent[value].append(clocks[rank])
                else:
                    clocks[rank] = max(clocks[rank], sent[value].popleft())
    return max(clocks)


def first_wrong(found, expected, tolerance=None):
    """The first loss or gradient norm that differs, of the earliest step, in a sentence."""
    for step in range(len(expected["losses"])):
        for key, word in ("losses", "loss"), ("grad_norms", "gradient norm"):
            own, right = found[key][step], expected[key][step]
            if not abs(own - right) <= (tolerance * abs(right) if tolerance else 1e-9):
                problem = f"{own:.12g}, {own / right:.9f} times the right one, {right:.12g}"
                return f"the {word} of step {step + 1} is {problem}"
    return None


def differ_in(found, expected):
    """The first of two state_dicts' weights that differ, in words."""
    for name, right in expected.items():
        same = name in found and found[name].shape == right.shape
        if not same or not (found[name] - right).abs().max() < 1e-9:
            return f"{name} differs"
    return None


def symptom_of(path, lesson):
    """The first promise that a file breaks."""
    broken = (f"no:  {promise}: {problem}" for promise, problem in promises(path, lesson) if problem)
    return next(broken, "it keeps all promises")
