"""Every promise of the lessons, and for each promise edits that must break it (the mutants, at the end).

A lesson is a row of LESSONS. The checks take the path of a lesson's file, so that they serve for mutants too.
Ranks are processes that live on from test to test: world(4).run(function, ...) calls it on each of four.
"""

import ast
import contextlib
import copy
import dataclasses
import functools
import gc
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

ROOT = Path(__file__).resolve().parent
FORK = multiprocessing.get_context("forkserver")  # new processes, which have loaded all this already
FORK.set_forkserver_preload(["torch", "torch.distributed", "test_all"])
TEXT = str(ROOT / "LICENSE")
# 36: neither 8 nor 16 divides it; 12: up to 4 ranks can share the heads
TINY = f"--layers 2 --heads 12 --width 36 --context 16 --steps 3 --data {TEXT}"
TINY_BUCKETS = " --bucket-mb 0.02"  # so that the tiny model has several


@dataclasses.dataclass
class Lesson:
    """What the tests need to know of a lesson.

    flags: of its own, to make TINY interesting. bad_flags: of its own, to be refused. bad_on_ranks: such as
    two ranks must refuse.
    sent: {collective: bytes given to it} in a step, from weights, bytes of a number, ranks, microbatches.
    slack: for each part that is held, what may be measured beyond the formula, in bytes, from the same.
    threads: the flag for their number, if a lesson is one process. keys, held: more of its --json.
    """

    name: str
    worlds: tuple = (1, 2, 3, 4)
    flags: str = ""
    bad_flags: tuple = ()
    bad_on_ranks: tuple = ("--batch 7",)
    max_lines: int = 560
    sent: object = lambda weights, width, ranks, accum: {}
    slack: object = lambda weights, width, ranks: {}
    threads: str = ""
    keys: tuple = ()
    held: tuple = ()

    @property
    def path(self):
        return str(ROOT / f"{self.name}.py")


def unit_sizes(weights, ranks):
    """Elements of the units of a GPT, padded: what is in no block, then each block."""
    sizes = {}
    for name, tensor in weights.items():
        block = int(name.split(".")[1]) if name.startswith("blocks.") else -1
        sizes[block] = sizes.get(block, 0) + tensor.numel()
    return [-(-sizes[block] // ranks) * ranks for block in sorted(sizes)]


def zero_sent(stage, weights, width, ranks, accum):
    """Bytes given to collectives, as the papers have it: 2P, 2P and 3P less what is gathered once."""
    rest, *blocks = unit_sizes(weights, ranks)
    whole = rest + sum(blocks)
    gathered = whole if stage < 3 else accum * (2 * whole - rest - sum(blocks[-2:]))
    reduced = whole if stage == 1 else accum * whole
    flags = {"all-reduce": 8 * (len(weights) + 1)}
    return {"reduce-scatter": width * reduced, "all-gather": width * gathered} | flags


def zero_slack(weights, width, ranks):
    """Padding; in zero2.py and zero3.py also gradients on their way into a unit, and a share out of it."""
    padding = 4 * width * ranks * len(unit_sizes(weights, ranks)) + 8 * len(weights)
    own = 2 * width * max(tensor.numel() for tensor in weights.values())
    share = width * max(unit_sizes(weights, ranks)) // ranks
    return {"parameters": padding, "gradients": padding + own + 2 * share, "optimizer": padding}


def threads_sent(weights, width, ranks, accum):
    """Bytes through device 0 for 36 sequences of 16 bytes, when 256 numbers for each byte come back."""
    whole = accum * width * (ranks - 1) * sum(p.numel() for p in weights.values())
    tokens = 36 * 16 * (ranks - 1) // ranks
    outputs = {name: width * 256 * tokens for name in ("gather outputs", "scatter grads")}
    return {"scatter inputs": 8 * tokens, "replicate": whole, "reduce grads": whole} | outputs


def async_sent(weights, width, ranks, accum):
    each = width * ranks * sum(p.numel() for p in weights.values())
    return {"pull": each, "push": each}


def pipeline_sent(weights, width, ranks, accum):
    """Bytes that the busiest rank sends to its neighbours and gives to all-reduces: tied weight, two sums."""
    neighbours = min(ranks - 1, 2)
    tied = weights["tokens.weight"].numel() if ranks > 1 else 0
    return {
        "send": neighbours * 36 * 16 * weights["norm.bias"].numel() * width,
        "all-reduce": width * tied + 16,
    }


def tensor_sent(weights, width, ranks, accum):
    """Bytes given to all-reduces: 4 a layer, embedding, head, three numbers of each token's loss, a norm."""
    tokens = 36 * 16 * width
    layers = sum(name.endswith("proj.weight") for name in weights)
    return {"all-reduce": (4 * layers + 2) * tokens * weights["norm.bias"].numel() + 3 * tokens + 8}


LESSONS = [
    Lesson("single", worlds=(1,)),
    Lesson(
        "dp_threads",
        threads="--replicas",
        bad_flags=("--replicas 0", "--replicas 3", "--replicas 16 --accum 2"),
        sent=threads_sent,
        keys=("peak_bytes_of_devices",),
        held=("outputs",),
        max_lines=800,
    ),
    Lesson(
        "dp_async",
        threads="--workers",
        bad_flags=(
            *("--workers 0", "--workers 3", "--mode any", "--staleness -1"),
            *("--slow 2=4", "--slow 1", "--slow 0=0.5", "--slow 0=x", "--slow 01=0", "--slow 0=99999999"),
        ),
        sent=async_sent,
        keys=(
            *("peak_bytes_of_devices", "mode", "pushes", "updates", "staleness", "most_ahead"),
            *("waited", "sequences_per_s", "failed"),
        ),
        max_lines=830,
    ),
    Lesson(
        "ddp",
        flags=TINY_BUCKETS,
        bad_flags=("--bucket-mb -1", "--bucket-mb nan"),
        sent=lambda weights, width, *_: {"all-reduce": width * sum(p.numel() + 1 for p in weights.values())},
    ),
    Lesson("zero1", sent=lambda *model: zero_sent(1, *model), slack=zero_slack, max_lines=630),
    Lesson("zero2", sent=lambda *model: zero_sent(2, *model), slack=zero_slack, max_lines=650),
    Lesson(
        "zero3",
        bad_flags=("--prefetch -1", "--unit head"),
        sent=lambda *model: zero_sent(3, *model),
        slack=zero_slack,
        max_lines=740,
    ),
    Lesson(
        "pipeline",
        bad_flags=(
            *("--schedule interleaved", "--chunks 2", "--chunks 0", "--schedule any"),
            *("--layers 1 --schedule interleaved --chunks 4", "--balance size"),
        ),
        sent=pipeline_sent,
        keys=("schedule", "ranks", "latency_ms", "idle", "op_ms", "timeline"),
        max_lines=1085,
    ),
    Lesson(
        "tensor_parallel",
        bad_on_ranks=("--width 40 --heads 5", "--sequence-parallel --context 15", "--batch 7 --accum 2"),
        sent=tensor_sent,
        held=("activations",),
        max_lines=890,
    ),
    Lesson(
        "checkpointing",
        bad_flags=(
            *("--every 0", "--policy some", "--attention some", "--batch 7 --accum 2"),
            "--policy offload --folder {tmp}/no/such/folder",
            "--policy offload --layers 1 --width 16 --heads 1 --batch 9000000000",  # 37 TB
        ),
        bad_on_ranks=("--batch 7 --accum 2",),
        keys=("policy", "every", "attention", "context", "forward_backward_ms", "flops"),
        held=("activations",),
        max_lines=905,
    ),
]
SINGLE, THREADS, ASYNC, DDP = (
    str(ROOT / f"{name}.py") for name in ("single", "dp_threads", "dp_async", "ddp")
)
RANKED = [lesson for lesson in LESSONS[1:] if not lesson.threads]
every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
every_parallel_lesson = pytest.mark.parametrize("lesson", LESSONS[1:], ids=lambda lesson: lesson.name)
every_lesson_of_ranks = pytest.mark.parametrize("lesson", RANKED, ids=lambda lesson: lesson.name)


# ---- worlds of processes ----


class RankFailed(Exception):
    """A function raised on a rank, or did not come back in time."""


def serve(rank, size, store, pipe):
    """A rank: runs what comes through the pipe until None comes."""
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
    )
    groups, new_group = [], dist.new_group

    def new_group_and_note(*args, **options):
        groups.append(new_group(*args, **options))
        return groups[-1]

    dist.new_group = new_group_and_note
    for function, arguments in iter(pipe.recv, None):
        while groups:  # each has a thread that wakes 100 times a second
            group = groups.pop()
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        gc.collect()
        gc.freeze()  # modules of former tests pile up, and would be searched again and again
        try:
            with redirect_stdout(io.StringIO()):
                answer = function(*arguments)
            pipe.send((True, answer))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class World:
    """`size` ranks, each a process with its process group over gloo."""

    def __init__(self, size):
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = FORK.Pipe()
            arguments = (rank, size, f"{self.folder.name}/store", theirs)
            process = FORK.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, *arguments, timeout=60):
        """[function(*arguments) of rank 0, of rank 1, ...]. A failure on any rank ends this world."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers, deadline = [None] * len(self.pipes), time.monotonic() + timeout
        waiting = dict(zip(self.pipes, range(len(self.pipes))))
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0, deadline - time.monotonic()))
            for pipe in ready:
                try:
                    good, answer = pipe.recv()
                except (EOFError, ConnectionError):
                    good, answer = False, "the process died"
                if not good:
                    self.kill()
                    raise RankFailed(f"rank {waiting[pipe]} of {len(self.pipes)}:\n{answer}")
                answers[waiting.pop(pipe)] = answer
            if not ready:
                self.kill()
                raise RankFailed(f"rank {sorted(waiting.values())} did not come back in {timeout} s")
        return answers

    def kill(self):
        for process in self.processes:
            process.kill()
        self.folder.cleanup()
        WORLDS.pop(len(self.processes), None)


WORLDS = {}


def world(size):
    """The world of this size, the same one from test to test."""
    if size not in WORLDS:
        WORLDS[size] = World(size)
    return WORLDS[size]


@pytest.fixture(scope="session", autouse=True)
def close_worlds():
    yield
    for each in list(WORLDS.values()):
        for pipe in each.pipes:
            pipe.send(None)
        for process in each.processes:
            process.join(5)
        each.folder.cleanup()


@functools.cache
def compiled(path):
    return compile(Path(path).read_text(), str(path), "exec")


def load(path):
    """A fresh module of a lesson's file."""
    module = types.ModuleType(Path(path).stem)
    module.__file__ = str(path)
    exec(compiled(path), vars(module))
    return module


def train(path, flags, save=None):
    """On a rank: what lesson.train() returns."""
    lesson = load(path)
    return lesson.train(lesson.parse(flags.split() + (["--save", save] if save else [])))


@functools.cache
def run(path, size, flags):
    """(result of rank 0, saved weights) of a lesson in a world of this size."""
    threads = next((each.threads for each in LESSONS if each.name == Path(path).stem), "")
    if threads:
        size, flags = 1, f"{flags} {threads} {size}"
    with tempfile.TemporaryDirectory() as folder:
        result = world(size).run(train, path, flags, f"{folder}/weights.pt")[0]
        return result, torch.load(f"{folder}/weights.pt")


def apart(one, other):
    """The largest difference between two lists of numbers, or two dicts of tensors."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return np.max([(one[key].double() - other[key].double()).abs().max().item() for key in one])
    return float(np.max(np.abs(np.subtract(one, other))))


# ---- the house ----


BLOCKS = [
    ("# ==== toy model: the same lines in every lesson ====\n", "# ==== end of the toy model ====\n", 150),
    ("# ==== ledger: the same lines in every lesson ====\n", "# ==== end of the ledger ====\n", 125),
]


def block(path, start, end):
    text = Path(path).read_text()
    assert text.count(start) == text.count(end) == 1
    return text[text.index(start) : text.index(end) + len(end)]


@pytest.mark.parametrize("start, end, lines", BLOCKS)
@every_lesson
def test_toy_model_and_ledger_are_single_pys_to_the_letter(lesson, start, end, lines):
    assert block(lesson.path, start, end) == block(SINGLE, start, end)
    assert len(block(lesson.path, start, end).splitlines()) <= lines


ALLOWED_IMPORTS = {*sys.stdlib_module_names, "torch", "numpy"}
PEERS = r"DistributedDataParallel|DataParallel|fully_shard|FullyShardedDataParallel|ZeroRedundancyOptimizer"
PEERS += r"|torch\.distributed\.(fsdp|pipelining|tensor|optim|checkpoint)|torch\.utils\.checkpoint"
PEERS += r"|torch\.nn\.parallel"


@every_lesson
def test_a_lesson_stands_alone_and_borrows_no_peer(lesson):
    tree = ast.parse(Path(lesson.path).read_text())
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names = [node.module] if isinstance(node, ast.ImportFrom) else names
        for name in names:
            assert name.split(".")[0] in ALLOWED_IMPORTS, f"imports {name}"
        used = " ".join(
            [*names, ast.unparse(node) if isinstance(node, ast.Attribute) else getattr(node, "id", "")]
        )
        assert not re.search(PEERS, used), f"line {node.lineno} uses a peer: {used}"


@every_lesson
def test_a_lesson_is_short_and_its_docstring_has_all_headings_in_order(lesson):
    text = Path(lesson.path).read_text()
    assert len(text.splitlines()) <= lesson.max_lines
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 40, f"{node.name} is longer than 40 lines"
    headings = re.findall(r"^([A-Z][a-z ]+)$", ast.get_docstring(tree), re.M)
    assert headings == ["Idea", "Holds", "Talks", "Costs", "Run", "Expect", "Left out"]
    assert "torch.cuda.synchronize" not in text


# ---- the same numbers everywhere ----


def check_parity(path, flags, size, accum, optim):
    """fp64, three steps, clipping on: losses and norms within 1e-10 of single.py's, weights within 1e-9."""
    common = f"{TINY} --batch 36 --dtype fp64 --clip 0.5 --lr 0.01 --accum {accum} --optim {optim}"
    plain, weights = run(SINGLE, 1, common)
    result, own = run(path, size, common + flags)
    assert min(plain["grad_norms"]) > 0.5, "nothing was clipped"
    assert apart(result["losses"], plain["losses"]) <= 1e-10
    assert apart(result["grad_norms"], plain["grad_norms"]) <= 1e-10
    assert apart(own, weights) <= 1e-9


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@every_parallel_lesson
def test_losses_norms_and_weights_are_single_pys(lesson, size, accum, optim):
    if size not in lesson.worlds:
        pytest.skip(f"{lesson.name} does not run on {size} ranks")
    check_parity(lesson.path, lesson.flags, size, accum, optim)


@every_parallel_lesson
def test_nothing_is_clipped_without_a_limit(lesson):
    common = f"{TINY} --batch 12 --dtype fp64 --optim sgd --clip 0"
    assert apart(run(lesson.path, 2, common + lesson.flags)[1], run(SINGLE, 1, common)[1]) <= 1e-9


@pytest.mark.parametrize("flags", ["--bucket-mb 0", "--no-overlap", "--no-overlap --bucket-mb 0"])
def test_ddp_comes_to_the_same_weights_with_each_idea_turned_off(flags):
    common = f"{TINY} --batch 36 --dtype fp64 --lr 0.01 --accum 3"
    _, weights = run(SINGLE, 1, common)
    assert apart(run(DDP, 3, f"{common} {flags}")[1], weights) <= 1e-9


@every_parallel_lesson
def test_fp32_losses_are_single_pys_to_the_last_printed_digit(lesson):
    common = f"{TINY} --batch 12 --steps 8"
    plain, _ = run(SINGLE, 1, common)
    result, _ = run(lesson.path, lesson.worlds[-1], common + lesson.flags)
    assert [f"{loss:.4f}" for loss in result["losses"]] == [f"{loss:.4f}" for loss in plain["losses"]]


def check_masters(path, lesson):
    """A master moves by steps that a bf16 weight is too coarse for; the model uses the rounded master."""
    common = f"{TINY} --batch 12 --dtype bf16"
    _, weights = run(path, lesson.worlds[-1], common + " --lr 1e-5" + lesson.flags)
    _, before = run(path, lesson.worlds[-1], common + " --lr 0" + lesson.flags)
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    moved = (weights["blocks.0.up.weight"] - before["blocks.0.up.weight"]).abs()
    assert 1e-5 < moved.median() < 4e-5  # about three steps of 1e-5 each, where bf16 is 1e-4 coarse
    exact = run(path, lesson.worlds[-1], f"{TINY} --batch 12 --lr 0.01{lesson.flags}")[0]
    rounded = run(path, lesson.worlds[-1], f"{common} --lr 0.01{lesson.flags}")[0]
    assert apart(exact["losses"], rounded["losses"]) < 0.05
    module, p = load(path), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    if hasattr(module, "Unit"):  # its own test is that of modules with unused parameters
        return
    optimizer = module.Optimizer([p], torch.optim.SGD, lr=0.1)
    for gradient in (torch.ones_like(p), None):  # a step without a gradient must not use the last one again
        p.grad = gradient
        optimizer.step()
        assert optimizer.masters[p].grad is None and optimizer.masters[p].tolist() == pytest.approx([0.9] * 3)


@every_lesson
def test_bf16_steps_fp32_masters(lesson):
    check_masters(lesson.path, lesson)


def test_the_loss_starts_at_chance_and_falls():
    result, _ = run(SINGLE, 1, "--width 64 --steps 20 --batch 8")
    assert abs(result["losses"][0] - math.log(256)) < 0.2
    assert result["losses"][-1] < 4.2


@pytest.mark.parametrize(
    "size, millions",
    [("toy", 0.83), ("small", 4.84), ("gpt2", 124.44), ("gpt2-xl", 1557.61), ("7.5b", 7502.37)],
)
def test_sizes_have_their_published_parameter_counts(size, millions):
    lesson = load(SINGLE)
    config = lesson.parse([])
    for name, value in zip(lesson.SHAPE, lesson.SIZES[size]):
        setattr(config, name, value)
    with torch.device("meta"):
        count = sum(p.numel() for p in lesson.GPT(config).parameters())
    h, v, s, L = config.width, config.vocab, config.context, config.layers
    assert count == h * v + s * h + L * (12 * h * h + 13 * h) + 2 * h
    assert round(count / 1e6, 2) == millions
    assert config.width % config.heads == 0


def test_every_world_draws_the_same_global_batch():
    lesson, text = load(SINGLE), np.arange(1000).astype(np.uint8)
    config = lesson.parse(["--batch", "12", "--context", "8", "--accum", "2"])
    whole = torch.cat([x for x, _ in lesson.microbatches(config, text, 5, "cpu")])
    for ranks in (2, 3):
        parts = [x for r in range(ranks) for x, _ in lesson.microbatches(config, text, 5, "cpu", r, ranks)]
        assert torch.equal(torch.cat(parts), whole)
    inputs, targets = next(lesson.microbatches(config, text, 5, "cpu"))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    other = next(lesson.microbatches(config, text, 6, "cpu"))[0]
    assert not torch.equal(inputs, other)


# ---- any module: frozen, tied, unused, nested, odd sizes, two dtypes ----


class Odd(nn.Module):
    """`which` says which branch a call uses; `never` is used by none."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.branches = nn.ModuleDict(
            {"a": nn.Linear(7, 7), "b": nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 7))}
        )
        self.frozen, self.never = nn.Linear(7, 7), nn.Linear(7, 2)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.branches["a"].weight
        self.last = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.randn(7))
        self.double()
        self.last.float()
        self.frozen.requires_grad_(False)

    def forward(self, x, which):
        x = torch.tanh(self.first(x)) + self.offset
        x = self.tied(self.frozen(self.branches[which](x)))
        return (self.last(x.float()).double() * self.scale).square().mean()


# the branch that a rank takes in a microbatch, for each step: unused here, everywhere, or only in the last
USES = [
    lambda rank, micro: "ab"[rank % 2],
    lambda rank, micro: "a",
    lambda rank, micro: "b" if rank == 0 and micro == 0 else "a",
    lambda rank, micro: "b",
]


def train_odd(path, overlap, bucket_mb):
    """On a rank: the largest difference between a distributed run and the same run in one process."""
    lesson, rank, ranks = load(path), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)  # every rank starts from other weights and buffers
    ours = Odd()
    ddp = lesson.DDP(ours, bucket_mb=bucket_mb, overlap=overlap)
    torch.manual_seed(100)
    oracle = Odd()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.3) for m in (ours, oracle)]
    worst = 0.0
    for step, use in enumerate(USES):
        x = torch.randn(ranks, 2, 4, 5, dtype=torch.double, generator=torch.Generator().manual_seed(step))
        for micro in range(2):
            with ddp.no_sync() if micro == 0 else nullcontext():
                (ddp(x[rank, micro], use(rank, micro)) / 2).backward()
            for r in range(ranks):
                (oracle(x[r, micro], use(r, micro)) / 2 / ranks).backward()
        ddp.wait_for_gradients()
        for (name, p), q in zip(ours.named_parameters(), oracle.parameters()):
            assert (p.grad is None) == (q.grad is None), (
                f"step {step}: .grad of {name} is {p.grad}, not {q.grad}"
            )
            worst = max(worst, 0 if q.grad is None else (p.grad - q.grad).abs().max().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = zip(ours.state_dict().values(), oracle.state_dict().values())
        worst = max(worst, *((p - q).abs().max().item() for p, q in state))
    return worst


def check_odd(path, size=3, overlap=True, bucket_mb=0.0002):
    assert max(world(size).run(train_odd, path, overlap, bucket_mb, timeout=20)) < 1e-6


@pytest.mark.parametrize(
    "size, overlap, bucket_mb", [(2, True, 0), (3, True, 0.0002), (4, False, 25), (4, True, None)]
)
def test_ddp_serves_any_module_from_any_start(size, overlap, bucket_mb):
    check_odd(DDP, size, overlap, bucket_mb)


def raised(function):
    """The message of the error that a function raises."""
    try:
        function()
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return "no error"


def misuse(path):
    """On a rank: what DDP says to each of several mistakes."""
    lesson, rank, says = load(path), dist.get_rank(), {}
    ddp, x = lesson.DDP(nn.Linear(3, 1)), torch.ones(2, 3)
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        ddp(x).sum().backward()
        ddp(x).sum().backward()
    ddp(x).sum().backward()
    says["no_sync"] = raised(ddp(x).sum().backward)
    with ddp.no_sync():
        says["no_sync too late"] = raised(ddp(x).sum().backward)
    ddp.wait_for_gradients()
    frozen = nn.Linear(3, 1).requires_grad_(False)
    says["no parameter"] = raised(lambda: lesson.DDP(frozen))
    different = [
        nn.Linear(3 + rank, 1),
        nn.Linear(3, 1).to([torch.float, torch.double][rank]),
        nn.Linear(3, 1),
    ]
    different[2].bias.requires_grad_(rank == 0)
    different.append(nn.Linear(3, 1))
    different[3].register_buffer("extra", torch.ones(2 + rank))
    for i, module in enumerate(different):
        says[f"differ {i}"] = raised(lambda module=module: lesson.DDP(module))
    return says


def check_misuse(path):
    for says in world(2).run(misuse, path):
        for mistake, message in says.items():
            assert mistake.split()[0] in message, (mistake, message)


def test_ddp_says_what_was_done_wrong():
    check_misuse(DDP)


def layouts(path):
    """On a rank: weights after two fused steps of a channels-last convolution, wrapped and not."""
    lesson, wrapped = load(path), []
    for wrap in (lesson.DDP, lambda module: module):
        torch.manual_seed(0)
        model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        model.register_buffer("column", torch.full((4, 4), float(dist.get_rank()))[:, 0])
        both = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            both(torch.randn(2, 2, 5, 5)).square().mean().backward()
            if both is not model:
                both.wait_for_gradients()
            optimizer.step()
            optimizer.zero_grad()
        wrapped.append(model)
    assert wrapped[0].column.tolist() == [0] * 4
    return apart(dict(wrapped[0].named_parameters()), dict(wrapped[1].named_parameters()))


def check_layouts(path):
    assert max(world(2).run(layouts, path)) < 1e-6


def test_ddp_keeps_each_tensors_memory_layout():
    check_layouts(DDP)


def bucket_sizes(path, count):
    """On a rank: MiB of the buckets of so many 1 MiB matrices; the norm that bf16 gradients have."""
    lesson = load(path)
    module = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(count))
    sizes = [bucket.gradients.nbytes / 2**20 for bucket in lesson.DDP(module).buckets]
    one = lesson.DDP(nn.Linear(3, 1, bias=False).bfloat16())
    one(torch.tensor([[1.0, 3.0, 9.0]]).bfloat16()).sum().backward()
    return sizes, one.clip_grad_norm_(0).item()


def check_buckets(path):
    """They double up to a fifth of all gradients, and to 25 MiB at most; norms are not rounded to bf16."""
    assert world(1).run(bucket_sizes, path, 20)[0] == (
        [1, 2, 4, 4, 4, 4, 1],
        pytest.approx(91**0.5, rel=1e-6),
    )
    assert max(world(1).run(bucket_sizes, path, 150)[0][0]) == 25


def test_ddp_chooses_buckets_from_the_models_size():
    check_buckets(DDP)


def against_torch(path):
    """On a rank: three steps, a peer's too, on the same weights and batches; how far apart they end."""
    lesson, rank, ranks = load(path), dist.get_rank(), dist.get_world_size()
    config = lesson.parse((TINY + " --batch 12 --dtype fp64").split())
    device, text = lesson.set_up(config)
    ours = lesson.GPT(config).double()
    theirs = copy.deepcopy(ours)
    wrapped = lesson.DDP(ours, bucket_mb=0.02), nn.parallel.DistributedDataParallel(theirs)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, theirs)]
    for step in range(3):
        inputs, targets = next(lesson.microbatches(config, text, step, device, rank, ranks))
        for ddp, optimizer in zip(wrapped, optimizers):
            ddp(inputs, targets).backward()
            if ddp is wrapped[0]:
                ddp.wait_for_gradients()
            optimizer.step()
            optimizer.zero_grad()
    return apart(ours.state_dict(), theirs.state_dict())


def test_ddp_ends_in_the_weights_of_torchs_own_ddp():
    assert max(world(2).run(against_torch, DDP)) < 1e-12


# ---- threads: replicas of a device each, and workers of a parameter server ----


class Branchy(nn.Module):
    """For DP: tied, frozen and unused parameters, two dtypes, a buffer, and outputs of every kind."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.tied, self.never, self.single = (
            nn.Linear(5, 5, bias=False),
            nn.Linear(5, 2),
            nn.Linear(5, 3).float(),
        )
        self.tied.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))
        self.double()
        self.single.float()
        self.frozen.requires_grad_(False)

    def forward(self, x, scale, *, extra, missing=None):
        assert missing is None and scale == 3
        self.calls += 1
        y = self.tied(torch.tanh(self.frozen(self.first(x)))) * scale
        if x[0, 0] > 0:  # the first row of a share: one replica uses these, another does not
            y = y + self.second(x) + extra["row"]
        return {
            "y": y,
            "z": (self.single(x.float()), y.square().mean()),
            "best": y.argmax(-1),
            "name": "branchy",
        }


def whole_outputs(module, shares):
    """What DP should return: the module's outputs for the shares, one after another."""
    parts = [module(x, 3, extra={"row": row}) for x, row in shares]
    cat = lambda pick: torch.cat([pick(part) for part in parts])  # noqa: E731
    numbers = torch.stack([part["z"][1] for part in parts])
    return cat(lambda p: p["y"]), cat(lambda p: p["z"][0]), numbers, cat(lambda p: p["best"])


def serve_branchy(path, replicas, rows):
    """On a rank: the largest difference of outputs and of gradients, of parameters and inputs."""
    lesson = load(path)
    torch.manual_seed(0)
    plain = Branchy()
    module = copy.deepcopy(plain)
    dp = lesson.DP(module, ["cpu"] * replicas)
    before, after = nn.Linear(5, 5).double(), nn.Linear(5, 1).double()
    worst = []
    for step in range(3):
        x, row = torch.randn(2, rows, 5).double()
        losses, grads = [], []
        for run in (dp, None):
            h, r = before(x), row * before.bias
            with torch.no_grad():
                h[:, 0] = -1
                h[0, 0] = 1
            if run:
                answer = run(h, 3, extra={"row": r})
                y, (z, number), best = answer["y"], answer["z"], answer["best"]
                assert answer["name"] == "branchy" and not best.requires_grad
            else:
                shares = zip(h.chunk(replicas), r.chunk(replicas))
                y, z, number, best = whole_outputs(plain, shares)
            loss = after(y).square().mean() + (z.square().sum() if step else 0) + number.sum()
            loss.backward()
            both = [*before.parameters(), *after.parameters(), *(module if run else plain).parameters()]
            losses.append(torch.cat([y.flatten(), z.flatten(), number, best.flatten(), loss[None]]))
            grads.append([p.grad for p in both])
            for p in both:
                p.grad = None
        worst.append((losses[0] - losses[1]).abs().max().item())
        for mine, theirs in zip(*grads):
            assert (mine is None) == (theirs is None)
            worst.append(0 if mine is None else (mine - theirs).abs().max().item())
    with torch.no_grad():
        dp(x, 3, extra={"row": row})
    assert not len(dp.replicas) and module.calls == 4, (
        "a replica outlives its backward, or a buffer its change"
    )
    return max(worst)


def check_branchy(path, replicas=2, rows=5):
    assert world(1).run(serve_branchy, path, replicas, rows, timeout=20)[0] < 2e-6  # one layer is fp32


@pytest.mark.parametrize("replicas, rows", [(1, 3), (2, 5), (3, 9), (4, 2)])
def test_dp_threads_serves_any_module(replicas, rows):
    check_branchy(THREADS, replicas, rows)


class Meeting(nn.Module):
    """Its forward and its backward end only when those of all replicas have begun."""

    def __init__(self, replicas, modes):
        super().__init__()
        self.weight, self.modes = nn.Parameter(torch.ones(3)), modes
        self.forwards, self.backwards = (threading.Barrier(replicas, timeout=5) for _ in range(2))

    def __deepcopy__(self, memo):
        raise AssertionError("a replica is no deep copy")

    def forward(self, x):
        self.forwards.wait()
        mixed = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        self.modes.append((torch.is_grad_enabled(), mixed))
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda gradient: (self.backwards.wait(), None)[1])
        return y


def meet(path, threads=True):
    """On a rank: the modes that the replicas saw, when all must be at work at once."""
    lesson, modes = load(path), []
    dp = lesson.DP(Meeting(3 if threads else 1, modes), ["cpu"] * 3, threads)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = dp(torch.ones(6, 3))
    outputs.sum().backward()
    with torch.no_grad():
        dp(torch.ones(6, 3))
    return modes, dp.module.weight.grad.tolist()


class Sequence(nn.Module):
    """Notes the largest number of replicas that were in it at once."""

    def __init__(self):
        super().__init__()
        self.inside, self.most = [], []

    def forward(self, x):
        self.inside.append(1)
        time.sleep(0.05)
        self.most.append(len(self.inside))
        self.inside.pop()
        return x


def one_after_the_other(path):
    module = Sequence()
    load(path).DP(module, ["cpu"] * 3, threads=False)(torch.ones(6))
    return max(module.most)


def check_meeting(path):
    assert world(1).run(one_after_the_other, path)[0] == 1
    modes, gradient = world(1).run(meet, path, timeout=20)[0]
    assert modes == [(True, True)] * 3 + [(False, False)] * 3 and gradient == [6] * 3


def test_dp_threads_runs_all_replicas_at_once_in_the_callers_modes():
    check_meeting(THREADS)
    assert world(1).run(meet, THREADS, False)[0][1] == [6] * 3


class Hollow(nn.Linear):
    def __len__(self):
        return 0


class Uneven(nn.Module):
    """Outputs of which one replica's has no gradient, an input that is not used, one that is a number."""

    def __init__(self):
        super().__init__()
        self.weight, self.hollow, self.places = nn.Parameter(torch.ones(2)), Hollow(2, 2), []
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        self.register_module("none", None)

    def forward(self, x, unused, number):
        self.places.append(self.hollow.weight.data_ptr())
        y = x * self.weight if x[0, 0] > 0 else x + 0
        return y, (x * number).sum() + self.norm(x).sum(), {"shape": (len(x), x.requires_grad)}


def serve_uneven(path):
    lesson, module = load(path), Uneven()
    x, unused = torch.tensor([[1.0, 2.0], [3.0, 4.0], [-5.0, 6.0]]), torch.ones(3, requires_grad=True)
    number = torch.tensor(2.0, requires_grad=True)
    y, sums, more = lesson.DP(module, ["cpu", "cpu"])(x, unused, number)
    assert more == {"shape": (2, False)} and sums.shape == (2,)
    (gradient,) = torch.autograd.grad((y * y).sum(), module.weight, retain_graph=False, create_graph=True)
    assert gradient.tolist() == [2 * (1 + 9), 2 * (4 + 16)] and len(set(module.places)) == 2
    double = raised(gradient.sum().backward)
    y, sums, _ = lesson.DP(module, ["cpu", "cpu"])(x, unused, number)
    (y.sum() + sums.sum()).backward()
    assert unused.grad is None and module.norm.parametrizations.weight.original1.grad is not None
    lesson.DP(nn.ReLU(), ["cpu"])(x)
    buffer = nn.Identity()
    buffer.register_buffer("far", torch.ones(2, device="meta"))
    shapes = raised(lambda: lesson.DP(Growing(), ["cpu", "cpu"])(x))
    kinds = raised(lambda: lesson.DP(Growing(), ["cpu", "cpu"])(x.double()))
    return number.grad.item(), [double, raised(lambda: lesson.DP(buffer, ["cpu"])), shapes, kinds]


class Growing(nn.Module):
    """Returns what cannot be put together."""

    def forward(self, x):
        return torch.ones(1, len(x)) if x.dtype == torch.float else [x] * len(x)


def check_uneven(path):
    number, says = world(1).run(serve_uneven, path)[0]
    assert number == 1 + 2 + 3 + 4 - 5 + 6
    for words, text in zip(
        ("once_differentiable", "must be on cpu", "dim 0 only", "one structure"), says, strict=True
    ):
        assert words in text, says


def test_dp_threads_serves_replicas_that_differ():
    check_uneven(THREADS)


class Failing(nn.Module):
    """Fails where the first number of an input is negative, and notes who has finished."""

    def __init__(self):
        super().__init__()
        self.weight, self.finished = nn.Parameter(torch.ones(())), []

    def forward(self, x):
        if x[0, 0] < 0:
            raise KeyError("a bad row")
        time.sleep(x[0, 1].item() / 10)
        y = x * self.weight
        if x[0, 0] == 7:
            y.register_hook(lambda gradient: {}["a bad gradient"])
        self.finished.append(1)
        return y


def fail(path):
    """On a rank: texts of the errors that reach the caller, and the gradient of a step after them."""
    lesson = load(path)
    dp, texts = lesson.DP(Failing(), ["cpu"] * 3), []
    for bad in (-1.0, 7.0):
        x = torch.ones(3, 2)
        x[1], x[2, 1] = bad, 5
        try:
            dp(x).sum().backward()
        except KeyError as error:
            texts.append("".join(traceback.format_exception(error)))
        if bad < 0:
            assert len(dp.module.finished) == 2, "the caller goes on while replicas still run"
        assert dp.module.weight.grad is None
    loss = dp(torch.ones(3, 2)).sum()
    loss.backward(retain_graph=True)
    mistakes = [
        raised(loss.backward),
        raised(lambda: dp(torch.ones(3, 2), torch.ones(2, 2))),
        raised(lambda: dp(3)),
        raised(lambda: lesson.DP(nn.Linear(2, 2), ["meta", "meta"])),
    ]
    return texts, dp.module.weight.grad.item(), mistakes


def check_failing(path):
    texts, gradient, mistakes = world(1).run(fail, path, timeout=20)[0]
    assert len(texts) == 2 and "a bad row" in texts[0] and "a bad gradient" in texts[1]
    for text in texts:
        assert "in replica 1 of 3, on cpu" in text and "test_all.py" in text, text
    assert "in forward" in texts[0] and gradient == 6
    for mistake, words in zip(
        mistakes, ("before", "one length", "one length", "must be on meta"), strict=True
    ):
        assert words in mistake, mistakes


def test_an_error_in_a_replica_reaches_the_caller_with_its_traceback():
    check_failing(THREADS)


def check_device_0(path):
    """What only the first device holds, and that nothing is left of replicas in another step."""
    flags = f"{TINY} --batch 12 --steps 1 --vocab 512"
    result, weights = run(path, 3, flags)
    first, *others = (result["peak_bytes_of_devices"][f"device {r}"] for r in range(3))
    optimizer = 8 * sum(p.numel() for p in weights.values())
    outputs = 12 * 16 * 512 * 4
    assert max(others) - min(others) < 1000 and first > others[0] + optimizer + outputs / 3
    assert first < others[0] + optimizer + 4 * outputs
    assert result["peak_bytes"] == first


def test_dp_threads_shows_what_the_first_device_holds_more():
    check_device_0(THREADS)


def alone_with_server(lesson, workers, mode, staleness=0, lr=1.0):
    """A server of one weight, which begins at 0, and workers whose every gradient is -1."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    server = lesson.Server(module, optimizer, workers, mode, staleness)
    return server, [lesson.Worker(r, server, module, torch.device("cpu")) for r in range(workers)]


def push_a_lot(path, mode):
    """On a rank: the weight after 8 workers' pushes, all in a hurry, and the counts of the server."""
    lesson = load(path)
    server, workers = alone_with_server(lesson, 8, mode, 1)
    sys.setswitchinterval(1e-6)

    def task(worker, step, share):
        worker.pull()
        worker.params[0].grad = torch.full((1, 1), -1.0)
        worker.push()

    try:
        lesson.run_workers(workers, task, 300)
    finally:
        sys.setswitchinterval(0.005)
    counts = server.version, server.applied, sum(worker.sent for worker in workers)
    return server.params[0].item(), *counts, sum(server.staleness.values())


def check_no_push_lost(path):
    for mode in ("asp", "ssp"):
        assert world(1).run(push_a_lot, path, mode, timeout=15)[0] == (2400,) * 5
    assert world(1).run(push_a_lot, path, "bsp", timeout=30)[0] == (300, 300, 2400, 2400, 2400)


def test_no_push_is_lost_when_many_come_at_once():
    check_no_push_lost(ASYNC)


def staleness_of(path):
    """On a rank: the staleness of pushes in a known order, and what the server's weight was at each pull."""
    lesson = load(path)
    server, (a, b, c) = alone_with_server(lesson, 3, "asp")
    seen = []
    for worker, event in (
        (a, "pull"),
        (b, "pull"),
        (b, "push"),
        (b, "pull"),
        (c, "pull"),
        (b, "push"),
        (a, "push"),
    ):
        if event == "pull":
            worker.pull()
            seen.append(worker.params[0].item())
        else:
            worker.params[0].grad = torch.full((1, 1), -1.0)
            worker.push()
    return dict(server.staleness), seen


def check_staleness(path):
    assert world(1).run(staleness_of, path)[0] == ({0: 2, 2: 1}, [0, 0, 1, 1])


def test_staleness_counts_the_updates_between_pull_and_push():
    check_staleness(ASYNC)


def race(path, mode, staleness, seed):
    """On a rank: of 4 workers of random speed, the most pushes that one was ahead of another at its pull, the
    most updates between a pull and its push, and the same two as the server has them."""
    lesson, chance = load(path), np.random.default_rng(seed)
    server, workers = alone_with_server(lesson, 4, mode, staleness)
    pushes, updates, lead, stale, lock = [0] * 4, 0, 0, 0, threading.Lock()
    naps = chance.exponential(0.001, (40, 4)) * [1, 1, 1, 6]

    def task(worker, step, share):
        nonlocal updates, lead, stale
        worker.pull()
        with lock:
            at_pull, own = updates, pushes[worker.number]
            if mode != "asp" and step < 30:  # at the end some may be gone
                lead = max(lead, own - min(pushes))
        time.sleep(naps[step - 1, worker.number])
        worker.params[0].grad = torch.full((1, 1), -1.0)

        def landed(norm):
            nonlocal updates, stale
            with lock:
                stale = max(stale, updates - at_pull)
                updates += 1
                pushes[worker.number] += 1

        worker.push(landed)

    lesson.run_workers(workers, task, 40)
    return lead, stale, server.lead, max(server.staleness)


def check_bound(path, seeds=(0,)):
    for seed in seeds:
        for K in (0, 1, 3):
            lead, stale, said_lead, said_stale = world(1).run(race, path, "ssp", K, seed, timeout=20)[0]
            assert said_lead <= K and lead <= K, (
                f"a worker began {max(said_lead, lead)} pushes ahead, not {K}"
            )
            assert max(stale, said_stale) <= 3 * (2 * K + 1), f"a push was {stale} updates stale"
            assert said_lead >= min(K, 1), "nobody was ever ahead"
    assert world(1).run(race, path, "asp", 0, 0, timeout=20)[0][3] > 3, "without a bound it would be exceeded"


def test_ssp_never_exceeds_its_bound():
    check_bound(ASYNC, range(4))


def straggle(path, mode, staleness):
    """On a rank: pushes of the others before the first of worker 0, which waits until they can do no more."""
    lesson = load(path)
    _, workers = alone_with_server(lesson, 3, mode, staleness)
    counts, before = [0] * 3, None

    def task(worker, step, share):
        nonlocal before
        worker.pull()
        if worker.number == 0 and before is None:
            last = None
            while last != counts[1:]:
                last = counts[1:]
                time.sleep(0.3)
            before = last
        worker.params[0].grad = torch.full((1, 1), -1.0)
        worker.push()
        counts[worker.number] += 1

    lesson.run_workers(workers, task, 10)
    return before, sum(counts)


def check_straggler(path):
    assert world(1).run(straggle, path, "bsp", 0, timeout=8)[0] == ([1, 1], 30)
    assert world(1).run(straggle, path, "ssp", 2, timeout=8)[0] == ([3, 3], 30)
    before, total = world(1).run(straggle, path, "asp", 0, timeout=20)[0]
    assert sum(before) == 29 and total == 30, "asp waited for a straggler"


def test_who_waits_for_a_straggler():
    check_straggler(ASYNC)


def lose(path, mode, doomed, at=4):
    """On a rank: when workers fail at a step, what run_workers() returns or raises; which shares are done."""
    lesson, done = load(path), []
    server, workers = alone_with_server(lesson, 3, mode, 1)

    def task(worker, step, share):
        worker.pull()
        time.sleep(0.001)
        if worker.number in doomed and step >= at:
            time.sleep(0.5)  # until the others have nothing to do
            raise ValueError("boom")
        worker.params[0].grad = torch.full((1, 1), -1.0)
        worker.push()
        done.append((step, share))

    try:
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            failed = lesson.run_workers(workers, task, 10)
    except RuntimeError as error:
        return str(error), repr(error.__cause__), "".join(traceback.format_exception(error)), server.version
    return {n: repr(error) for n, error in failed.items()}, sorted(done), errors.getvalue(), server.applied


def check_losing(path):
    everything = [(step, share) for step in range(1, 11) for share in range(3)]
    for mode in ("asp", "ssp"):
        failed, done, text, applied = world(1).run(lose, path, mode, (1,), timeout=8)[0]
        assert failed == {1: "ValueError('boom')"} and done == everything and applied == 30
        assert "worker 1 failed, the others go on" in text and "in task" in text, text
    message, cause, text, updates = world(1).run(lose, path, "bsp", (1,), timeout=20)[0]
    assert "worker 1 failed" in message and cause == "ValueError('boom')" and updates == 3
    assert "in worker 1, step 4, share 1" in text and "in task" in text, text
    message = world(1).run(lose, path, "asp", (0, 1, 2), timeout=20)[0][0]
    assert "no worker is left" in message
    world(1).run(lose, path, "bsp", (2,), 10, timeout=20)  # others are done by then


def test_a_failing_worker_stops_bsp_but_not_asp():
    check_losing(ASYNC)


def test_dp_async_counts_what_landed():
    result, _ = run(ASYNC, 3, f"{TINY} --batch 12 --steps 6 --mode asp")
    assert result["pushes"] == {"sent": 18, "applied": 18} and result["updates"] == 18
    assert sum(result["staleness"].values()) == 18 and len(result["losses"]) == 6
    assert result["sequences_per_s"] > 0
    result, _ = run(ASYNC, 3, f"{TINY} --batch 12 --steps 6")
    assert result["staleness"] == {0: 18} and result["updates"] == 6 and result["failed"] == {}


def test_asp_with_one_worker_is_single_py():
    result, weights = run(ASYNC, 1, f"{TINY} --batch 4 --steps 6 --mode asp --dtype fp64")
    plain, expected = run(SINGLE, 1, f"{TINY} --batch 4 --steps 6 --dtype fp64")
    assert apart(weights, expected) <= 1e-12 and apart(result["losses"], plain["losses"]) <= 1e-12


def be_slow(path):
    """On a rank: seconds that its pushes take, when a gradient takes 0.1 s. The first is not slowed."""
    lesson, seconds = load(path), []
    server, _ = alone_with_server(lesson, 1, "asp")
    worker = lesson.Worker(0, server, nn.Linear(1, 1, bias=False), torch.device("cpu"), 3.0)
    for _ in range(2):
        worker.pull()
        time.sleep(0.1)
        start = time.perf_counter()
        worker.push()
        seconds.append(time.perf_counter() - start)
    return seconds


def check_slow(path):
    first, second = world(1).run(be_slow, path)[0]
    assert first < 0.1 and 0.2 <= second < 0.3


def test_a_straggler_takes_as_many_times_as_long():
    check_slow(ASYNC)


def end_together(path, staleness):
    """On a rank: short runs of many workers, which must all find out that nothing is left to do."""
    lesson = load(path)

    def task(worker, step, share):
        worker.pull()
        time.sleep(1e-4 * worker.number)
        worker.params[0].grad = torch.full((1, 1), -1.0)
        worker.push()
        if (worker.number, step) == (2, 1):
            time.sleep(1e-3)

    for steps in [1, 2, 3] * 15:
        server, workers = alone_with_server(lesson, 6, "ssp", staleness)
        lesson.run_workers(workers, task, steps)
        assert server.applied == 6 * steps
    return server.lead


def check_end(path):
    assert world(1).run(end_together, path, 0, timeout=20)[0] == 0
    assert world(1).run(end_together, path, 1, timeout=20)[0] <= 1


def test_ssp_ends_whoever_gets_the_last_share():
    check_end(ASYNC)


def unusual(path):
    """On a rank: how far one worker's asp ends from plain AdamW, with frozen, tied and unused parameters."""
    lesson = load(path)
    torch.manual_seed(0)
    module = Odd()
    oracle = copy.deepcopy(module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.3) for m in (module, oracle)]
    server = lesson.Server(module, optimizers[0], 1)
    worker = lesson.Worker(0, server, module, torch.device("cpu"))
    for which in "abba":
        x = torch.randn(4, 5).double()
        worker.pull()
        worker.module(x, which).backward()
        worker.push()
        oracle(x, which).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    return apart(module.state_dict(), oracle.state_dict())


def check_unusual(path):
    assert world(1).run(unusual, path)[0] < 1e-6


def test_dp_async_serves_any_module():
    check_unusual(ASYNC)


def break_server(path, where):
    """On a rank: what run_workers() says when an update fails in the server, or a worker is told to exit."""
    lesson, count = load(path), []
    server, workers = alone_with_server(lesson, 3, "asp")

    def task(worker, step, share):
        worker.pull()
        worker.params[0].grad = torch.full((1, 1), -1.0)
        count.append(1)
        if where == "exit" and worker.number == 1:
            raise SystemExit(3)
        worker.push(lambda norm: {}[0] if where == "then" and len(count) > 6 else None)

    step = server.optimizer.step
    if where == "step":
        server.optimizer.step = lambda: step() if len(count) < 6 else {}[0]
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return {
                n: repr(error) for n, error in lesson.run_workers(workers, task, 5).items()
            }, server.applied
        except RuntimeError as error:
            return str(error), server.applied


def check_broken(path):
    for where in ("step", "then"):
        assert "half done" in world(1).run(break_server, path, where, timeout=10)[0][0]
    assert world(1).run(break_server, path, "exit", timeout=10)[0] == ({1: "SystemExit(3)"}, 15)


def test_an_error_in_the_server_ends_the_run():
    check_broken(ASYNC)


def test_all_of_dp_asyncs_figures_are_of_the_run():
    result, _ = run(ASYNC, 3, f"{TINY} --batch 12 --steps 40 --mode asp")
    assert 0.4 < result["sequences_per_s"] / (12 * 39 / sum(result["step_ms"]) * 1e3) < 2
    assert 0 < result["waited"] < 1


BLOCK_OF_THREADS = ("# ==== ledger of threads: the same lines", "# ==== end of the ledger of threads ====\n")


def test_the_lessons_of_threads_have_the_same_ledger():
    assert block(THREADS, *BLOCK_OF_THREADS) == block(ASYNC, *BLOCK_OF_THREADS)


def peek(path):
    """On a rank: a ledger of threads sees a storage of another device read outside of an exchange."""
    lesson = load(path)
    config = lesson.parse(TINY.split())
    lesson.set_up(config)
    empty, model = types.SimpleNamespace(tensors=list), nn.Linear(2, 2)
    ledger = lesson.ReplicaLedger("test", config, torch.device("cpu"), model, list, empty, 2)
    with ledger:
        x = torch.ones(1000)
        lesson.HERE.device = "device 1"
        with lesson.exchange("scatter inputs"):
            y = x.clone()
        assert ledger.seen["scatter inputs", "payload"] == 4000 and not ledger.seen[None, "calls"]
        z = y + 1
        y.add_(x)
        del z
        lesson.HERE.device = "device 0"
    held = [ledger.seen["the rest", f"device {r}"] for r in (0, 1)]
    assert held == [4000 + 24, 8000], held
    return raised_by_close(ledger)


def raised_by_close(ledger):
    try:
        ledger.close({}, {}, {})
    except AssertionError as error:
        return str(error)
    return "no error"


def test_the_ledger_of_threads_knows_whose_memory_is_read():
    assert "outside exchange()" in world(1).run(peek, THREADS)[0]


# ---- the ZeRO lessons: any module, memory, overlap ----

ZERO = [lesson for lesson in LESSONS if lesson.name.startswith("zero")]
every_zero = pytest.mark.parametrize("lesson", ZERO, ids=lambda lesson: lesson.name)


def zero_class(lesson):
    return getattr(lesson, "ZeRO" + lesson.__name__[4])


class Twice(nn.Module):
    """Units that run twice, share weights, are frozen, recomputed, of a convolution, return a tuple."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.pair, self.tied = Pair(), nn.Linear(12, 12)
        self.tied.weight = self.b.weight
        self.outer = nn.Sequential(nn.Linear(12, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 12)))
        self.gain = nn.Parameter(torch.ones(()))
        self.double()
        self.c.requires_grad_(False)
        self.a.register_forward_pre_hook(lambda a, x: (x[0] * a.weight.detach().sum(),))

    def forward(self, x, which):
        x = self.conv(x.view(-1, 1, 3, 3)).flatten(1)
        x = torch.tanh(self.a(self.b(self.a(x)))) * (self.gain if which == "a" else 2)
        with set_checkpoint_early_stop(False):
            x = checkpoint(self.outer, x, use_reentrant=False)
        y, z = self.pair(self.c(x))
        return self.tied(y + z).square().mean()


class Whole(Odd):
    """Without units."""


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(12, 12, bias=False), nn.Linear(12, 12)

    def forward(self, x):
        return self.left(x), self.right(x)


def units_of(model):
    """A predicate, for Odd with what all ranks call alike, for Twice with nested ones, for Whole none."""
    if isinstance(model, Whole):
        return lambda module: False
    odd, twice = ["first", "frozen", "last", "tied"], ["conv", "a", "b", "c", "pair", "tied", "outer"]
    names = odd if isinstance(model, Odd) else twice
    chosen = [getattr(model, name) for name in names]
    chosen += [] if isinstance(model, Odd) else [model.outer[1]]
    return lambda module: any(module is one for one in chosen)


def late(collective):
    """It starts when it is waited for, so that no wait can be left out."""

    def start(*tensors, async_op=False, **options):
        work = types.SimpleNamespace(wait=lambda: collective(*tensors, **options))
        return work if async_op else work.wait()

    return start


def train_zero(path, model_class, slow=False):
    """On a rank: the largest difference between a distributed run and the same run in one process."""
    lesson, rank, ranks = load(path), dist.get_rank(), dist.get_world_size()
    if slow:
        lesson.all_gather = late(lesson.all_gather)
    torch.manual_seed(100 + rank)  # every rank starts from other weights and buffers
    ours = model_class()
    zero = zero_class(lesson)(ours, units_of(ours))
    torch.manual_seed(100)
    oracle = model_class()
    options = {"lr": 0.02, "weight_decay": 0.3}
    optimizer = lesson.Optimizer(zero, torch.optim.AdamW, **options)
    theirs = torch.optim.AdamW(oracle.parameters(), **options)
    differences, width = [], 9 if model_class is Twice else 5
    for step, use in enumerate(USES):
        x = torch.randn(ranks, 2, 4, width, dtype=torch.double, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            differences.append((zero(x[0, 0], "a") - oracle(x[0, 0], "a")).abs().item())
        losses = (zero(x[rank, micro], use(rank, micro)) / 2 for micro in range(2))
        if step:  # all forwards before the first backward: one for both, one for each, the last first
            both = list(losses)
            losses = [None, [sum(both)], both, both[::-1]][step]
        for i, loss in enumerate(losses):
            with zero.no_sync() if i == 0 and step != 1 and hasattr(zero, "no_sync") else nullcontext():
                loss.backward()
        for micro in range(2):
            for r in range(ranks):
                (oracle(x[r, micro], use(r, micro)) / 2 / ranks).backward()
        norm = nn.utils.clip_grad_norm_(oracle.parameters(), 0.05)
        differences.append((zero.clip_grad_norm_(0.05) - norm).abs().item())
        zero(x[0, 0], "a")  # a forward without backward must not keep weights from before the step
        optimizer.step()
        theirs.step()
        theirs.zero_grad()
        state, expected = optimizer.state_dict_of(ours), oracle.state_dict()
        differences.append(apart(state, expected) if rank == 0 else 0)
    return np.max(differences), len(zero.units)


def train_zero_slowly(path, model_class):
    all_to_all = dist.all_to_all_single
    dist.all_to_all_single = late(all_to_all)
    try:
        return train_zero(path, model_class, slow=True)
    finally:
        dist.all_to_all_single = all_to_all


def check_zero(path, model_class=Odd, size=3, train=train_zero):
    answers = world(size).run(train, path, model_class, timeout=20)
    assert np.max([worst for worst, _ in answers]) < 1e-6 and answers[0][1] >= 2, answers


@pytest.mark.parametrize("model_class", [Odd, Twice, Whole])
@pytest.mark.parametrize("size", [1, 2, 4])
@every_zero
def test_zero_serves_any_module_from_any_start(lesson, size, model_class):
    if model_class is Twice and size == 4:
        size = 3
    check_zero(lesson.path, model_class, size)


@every_zero
def test_zero_waits_for_every_collective(lesson):
    for model_class in (Odd, Twice):
        check_zero(lesson.path, model_class, 2, train_zero_slowly)


def check_prefetch_flags(path, flags):
    common = f"{TINY} --layers 5 --batch 12 --dtype fp64 --lr 0.01 --accum 2"
    result, weights = run(path, 3, f"{common} {flags}")
    assert apart(weights, run(SINGLE, 1, common)[1]) <= 1e-9
    for part, slack in zero_slack(weights, 8, 3).items():
        assert abs(result["held"][part]["measured"] - result["held"][part]["formula"]) <= slack
    assert all(row["wire"] == row["formula"] for row in result["sent"].values())


@pytest.mark.parametrize("flags", ["--prefetch 0", "--prefetch 2", "--keep", "--keep --prefetch 2"])
def test_zero3_comes_to_the_same_weights_whatever_is_prefetched_or_kept(flags):
    check_prefetch_flags(ZERO[2].path, flags)


@every_zero
def test_zero_comes_to_the_same_weights_with_smaller_units(lesson):
    common = f"{TINY} --batch 12 --dtype fp64 --lr 0.01 --accum 2"
    result, weights = run(lesson.path, 3, f"{common} --unit layer")
    assert apart(weights, run(SINGLE, 1, common)[1]) <= 1e-9
    assert all(row["wire"] == row["formula"] for row in result["sent"].values())
    block, _ = run(lesson.path, 3, common)
    if lesson.name != "zero1":
        assert result["held"]["gradients"]["measured"] < block["held"]["gradients"]["measured"]


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_zero_comes_to_the_same_weights_without_overlap(name):
    common = f"{TINY} --batch 12 --dtype fp64 --lr 0.01 --accum 2"
    _, weights = run(str(ROOT / f"{name}.py"), 3, f"{common} --no-overlap")
    assert apart(weights, run(SINGLE, 1, common)[1]) <= 1e-9


def zero_events(path, prefetch=None):
    """On a rank: in order, what a second step does, and the most units whose weights were whole at once."""
    lesson, events, whole = load(path), [], [0]
    config = lesson.parse((TINY + " --layers 5 --batch 12").split())
    device, text = lesson.set_up(config)
    model = lesson.GPT(config)
    options = {} if prefetch is None else {"prefetch": prefetch}
    zero = zero_class(lesson)(model, lambda module: isinstance(module, lesson.Block), **options)
    optimizer = lesson.Optimizer(zero, torch.optim.SGD, lr=0.1)
    numbers = {unit.weights.data_ptr() or id(unit): i for i, unit in enumerate(zero.units)}
    of_flat = {id(unit.weights): i for i, unit in enumerate(zero.units)}
    of_size = lambda flat: next((i for i, u in enumerate(zero.units) if u.gradients is flat), None)  # noqa: E731
    gather, scatter, step = lesson.all_gather, lesson.reduce_scatter, torch.optim.SGD.step

    def recorded_gather(flat, shard, **options):
        events.append(("gather", of_flat.get(id(flat))))
        whole[0] = max(whole[0], sum(unit.weights.untyped_storage().nbytes() > 0 for unit in zero.units))
        return gather(flat, shard, **options)

    def recorded_scatter(shard, flat, group):
        events.append(("reduce", of_size(flat)))
        return scatter(shard, flat, group)

    def recorded_step(self, *args):
        events.append(("step", None))
        return step(self, *args)

    for i, block in enumerate(model.blocks, start=1):
        block.register_forward_pre_hook(lambda *_, i=i: events.append(("forward", i)))
        block.register_forward_hook(lambda *_, i=i: events.append(("forward end", i)))
        block.down.weight.register_post_accumulate_grad_hook(lambda p, i=i: events.append(("backward", i)))
        block.norm1.weight.register_post_accumulate_grad_hook(
            lambda p, i=i: events.append(("backward end", i))
        )
    lesson.all_gather, lesson.reduce_scatter, torch.optim.SGD.step = (
        recorded_gather,
        recorded_scatter,
        recorded_step,
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    try:
        for _ in range(2):
            del events[:]
            for inputs, targets in lesson.microbatches(config, text, 1, device, rank, ranks):
                zero(inputs, targets).backward()
            events.append(("end of backward", None))
            zero.clip_grad_norm_(1.0)
            optimizer.step()
    finally:
        torch.optim.SGD.step = step
    return events, whole[0], len(numbers)


def check_zero_overlap(path):
    """Reduced while backward computes; in zero1 and zero2 sent while later units are stepped."""
    for events, _, units in world(2).run(zero_events, path):
        assert units == 6
        at = {event: i for i, event in enumerate(events)}
        for i in (3, 4, 5):
            assert at["reduce", i] < at["backward end", i - 1], "reduced late"
        assert at["reduce", 1] < at["end of backward", None]
        if "zero3" not in path:
            steps = [i for i, event in enumerate(events) if event[0] == "step"]
            gathers = [i for i, event in enumerate(events) if event[0] == "gather"]
            assert len(gathers) == units and gathers[0] < steps[1] and gathers[-2] < steps[-1]
            assert events[gathers[0]] == ("gather", 0) and events[gathers[-1]] == ("gather", 5)


def check_prefetch(path, prefetch=1):
    """The next gather starts before this unit computes, and no more units are whole than were asked for."""
    for events, whole, _ in world(2).run(zero_events, path, prefetch):
        at = {}
        for i, event in enumerate(events):
            at.setdefault(event, []).append(i)
        assert whole <= 1 + 1 + prefetch, "more units whole than 1 + prefetch, and what belongs to none"
        for i in range(1, 6):
            gathers, ahead = at["gather", i], max(i - prefetch, 1)
            assert gathers[0] < at["forward", ahead][0], "gathered late in forward"
            assert len(gathers) == (1 if i >= 5 - prefetch else 2), (
                "the last stay, the others are gathered twice"
            )
            if i < 5 - prefetch:
                assert gathers[1] < at["backward", min(i + prefetch, 5)][0], "gathered late in backward"
            if i + prefetch < 5:
                assert gathers[1] > at["backward end", i + prefetch + 1][0], "gathered early in backward"


@every_zero
def test_zero_communicates_while_it_computes(lesson):
    check_zero_overlap(lesson.path)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_zero3_gathers_as_many_units_ahead_as_asked(prefetch):
    check_prefetch(ZERO[2].path, prefetch)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def zero_against_torch(path):
    """On a rank: how far apart three steps of a lesson and of its peer end, from the same weights."""
    from torch.distributed.fsdp import fully_shard  # slow to load, and needed here alone
    from torch.distributed.optim import ZeroRedundancyOptimizer

    lesson, rank, ranks = load(path), dist.get_rank(), dist.get_world_size()
    config = lesson.parse((TINY + " --batch 12 --dtype fp64").split())
    device, text = lesson.set_up(config)
    ours = lesson.GPT(config).double()
    theirs = copy.deepcopy(ours)
    zero = zero_class(lesson)(ours, lambda module: isinstance(module, lesson.Block))
    optimizer = lesson.Optimizer(zero, torch.optim.AdamW, lr=0.01)
    if lesson.__name__ == "zero3":
        for block in theirs.blocks:
            fully_shard(block)
        peer = fully_shard(theirs)
        other = torch.optim.AdamW(peer.parameters(), lr=0.01)
    else:
        peer = nn.parallel.DistributedDataParallel(theirs)
        other = ZeroRedundancyOptimizer(theirs.parameters(), torch.optim.AdamW, lr=0.01)
    for step in range(3):
        inputs, targets = next(lesson.microbatches(config, text, step, device, rank, ranks))
        zero(inputs, targets).backward()
        norm = zero.clip_grad_norm_(0.5)
        optimizer.step()
        peer(inputs, targets).backward()
        assert abs(norm - whole(nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))) < 1e-10
        other.step()
        other.zero_grad()
    expected = {name: whole(tensor) for name, tensor in theirs.state_dict().items()}
    state = optimizer.state_dict_of(ours)
    return apart(state, expected) if rank == 0 else 0


@every_zero
def test_zero_ends_in_the_weights_of_torchs_own(lesson):
    assert max(world(2).run(zero_against_torch, lesson.path)) < 1e-9


def zero_misuse(path):
    """On a rank: what a ZeRO class says to each of several mistakes."""
    lesson, rank, says, x = load(path), dist.get_rank(), {}, torch.ones(2, 3)
    wrap = zero_class(lesson)
    says["no parameter"] = raised(lambda: wrap(nn.Linear(3, 1).requires_grad_(False)))
    says["differ"] = raised(lambda: wrap(nn.Linear(3 + rank, 1)))
    zero = wrap(nn.Linear(3, 1))
    if lesson.__name__ != "zero1":
        optimizer = lesson.Optimizer(zero, torch.optim.SGD, lr=0.1)
        says["step() needs backward()"] = raised(optimizer.step)
    if lesson.__name__ == "zero3":
        opaque = nn.Linear(3, 1)
        opaque.register_forward_hook(lambda module, x, y: types.SimpleNamespace(y=y))
        says["no way to look inside"] = raised(lambda: wrap(opaque)(x))
    if lesson.__name__ == "zero1":
        optimizer = lesson.Optimizer(zero, torch.optim.SGD, lr=0.1)
        zero(x).sum().backward()
        says["no_sync"] = raised(zero(x).sum().backward)
        says["step() needs clip_grad_norm_()"] = raised(optimizer.step)
        zero.clip_grad_norm_(0)
    return says


def check_zero_misuse(path):
    for says in world(2).run(zero_misuse, path):
        for mistake, message in says.items():
            assert mistake in message, (mistake, message)


@every_zero
def test_zero_says_what_was_done_wrong(lesson):
    check_zero_misuse(lesson.path)


# ---- pipeline.py: schedules, the split backward, messages ----

PIPELINE = str(ROOT / "pipeline.py")
CHUNKED = {"interleaved": " --chunks 2"}


def check_schedule(lesson, name, p, m, v):
    """Every action once, on its rank, after what it needs; no more in flight than the schedule promises."""
    schedule = lesson.build_schedule(name, p, m, v)
    ops = "FBW" if name.startswith("zb") else "FB"
    everything = {(op, stage, k) for op in ops for stage in range(p * v) for k in range(m)}
    assert sorted(map(tuple, itertools.chain(*schedule))) == sorted(everything)
    assert all(action.stage % p == rank for rank, actions in enumerate(schedule) for action in actions)
    assert raised(lambda: lesson.play(schedule, lambda action: 1.0)) == "no error"
    for i, actions in enumerate(schedule):
        most = {
            "naive": 1,
            "gpipe": m,
            "1f1b": min(m, p - i),
            "interleaved": min(m * v, 2 * (p - i - 1) + (v - 1) * p + 1),
            "zb-h1": min(m, p),
            "zb-h2": min(m, 2 * p - 1),
        }[name]
        assert lesson.in_flight(actions) <= most
        if name in ("naive", "gpipe", "1f1b"):
            assert lesson.in_flight(actions) == most


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    name=st.sampled_from(["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"]),
    p=st.integers(1, 16),
    m=st.integers(1, 64),
    v=st.integers(2, 4),
)
def test_schedules_are_complete_and_hold_no_more_than_they_promise(name, p, m, v):
    v = v if name == "interleaved" else 1
    m = -(-m // p) * p if name == "interleaved" else m
    check_schedule(load(PIPELINE), name, p, m, v)


def check_schedules(path):
    for p, m in (4, 12), (8, 24), (3, 3):
        for name in ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"):
            check_schedule(load(path), name, p, m, 2 if name == "interleaved" else 1)


PUBLISHED = [  # of 8 stages (arXiv 2401.10241)
    (24, 18.522, 18.086, 9.337, 0.601, {"1f1b": "0.2431", "zb-h1": "0.1585", "zb-h2": "0.1083"}),
    (32, 18.513, 18.086, 9.331, 0.626, {"1f1b": "0.1985", "zb-h1": "0.1242", "zb-h2": "0.0837"}),
    (64, 18.546, 18.097, 9.321, 0.762, {"1f1b": "0.1240", "zb-h1": "0.0674", "zb-h2": "0.0444"}),
]


def check_published(path):
    lesson = load(path)
    for m, t_f, t_b, t_w, t_comm, rates in PUBLISHED:
        for name, rate in rates.items():
            schedule = lesson.build_schedule(name, 8, m)
            assert f"{lesson.bubble_rate(schedule, t_f, t_b, t_w, t_comm):.4f}" == rate


def test_bubble_rates_are_the_published_ones_to_every_digit():
    check_published(PIPELINE)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(p=st.integers(1, 8), rounds=st.integers(2, 4), v=st.integers(2, 3), t=st.floats(0.5, 2))
def test_bubbles_have_their_closed_forms(p, rounds, v, t):
    lesson, m = load(PIPELINE), rounds * p
    for name in ("naive", "gpipe", "1f1b", "interleaved"):
        chunks = v if name == "interleaved" else 1
        schedule = lesson.build_schedule(name, p, m, chunks)
        expected = lesson.closed_form(name, p, m, chunks, 1.0, t, t / 2)
        assert lesson.bubble_rate(schedule, 1.0, t, t / 2) == pytest.approx(expected, abs=1e-9)
    idle = {"naive": m * (p - 1), "gpipe": p - 1, "1f1b": p - 1, "interleaved": (p - 1) / v}
    for name, units in idle.items():  # of a microbatch's 1 + 1 + 1 on a rank: (p-1)/m of the ideal, and so on
        assert lesson.closed_form(name, p, m, v, 1, 1, 1) == pytest.approx(units / (units + m))
    for name, units in {"zb-h1": (p - 1) / 3, "zb-h2": 0}.items():
        schedule = lesson.build_schedule(name, p, m)
        assert lesson.bubble_rate(schedule, 1, 1, 1) == pytest.approx(units / (units + m), abs=1e-9)
        assert lesson.closed_form(name, p, m, 1, 1, 1, 1) == pytest.approx(units / (units + m))


def test_the_docstrings_diagram_is_the_schedule():
    lesson = load(PIPELINE)
    for rank, played in enumerate(lesson.play(lesson.build_schedule("1f1b", 4, 6), lambda action: 1)):
        cells = {int(start): f"{action.op}{action.microbatch}" for action, start, _ in played}
        assert f"rank {rank} | " + " ".join(f"{cells.get(i, '.'):<2}" for i in range(11)) in lesson.__doc__


def test_a_schedule_that_cannot_be_says_so():
    lesson = load(PIPELINE)
    assert "multiple of 3" in raised(lambda: lesson.build_schedule("interleaved", 3, 4, 2))
    assert "2 or more chunks" in raised(lambda: lesson.build_schedule("interleaved", 3, 3))
    assert "must be 1" in raised(lambda: lesson.build_schedule("1f1b", 3, 3, 2))
    F, B = (lesson.Action(op, 0, 0) for op in "FB")
    assert "no rank can go on" in raised(lambda: lesson.play([[B, F]], lambda action: 1))


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_layers_are_split_as_evenly_as_can_be(costs, data):
    count = data.draw(st.integers(1, len(costs)))
    ends = load(PIPELINE).split_layers(costs, count)
    worst = lambda ends: max(sum(costs[a:b]) for a, b in zip([0, *ends], ends))  # noqa: E731
    options = itertools.combinations(range(1, len(costs)), count - 1)
    assert ends[-1] == len(costs) and [0, *ends] == sorted({0, *ends})
    assert worst(ends) == min(worst([*option, len(costs)]) for option in options)


def check_pipeline(path, schedule, size, accum):
    """As check_parity; and exactly the activations of the microbatches in flight."""
    common = f"{TINY} --layers 6 --batch 36 --dtype fp64 --clip 0.5 --lr 0.01 --accum {accum}"
    plain, weights = run(SINGLE, 1, common)
    result, own = run(path, size, f"{common} --schedule {schedule}{CHUNKED.get(schedule, '')}")
    assert apart(result["losses"], plain["losses"]) <= 1e-10
    assert apart(result["grad_norms"], plain["grad_norms"]) <= 1e-10
    assert apart(own, weights) <= 1e-9
    for row in result["ranks"]:
        assert row["activations"] <= row["bound"] * 1.001
        assert schedule.startswith("zb") or row["activations"] >= row["bound"] * 0.999
    assert all(row["wire"] == row["formula"] for row in result["sent"].values())


@pytest.mark.parametrize("size, accum", [(1, 4), (2, 1), (2, 6), (3, 4), (3, 6), (4, 4)])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_every_schedule_comes_to_single_pys_numbers(schedule, size, accum):
    if schedule == "interleaved" and accum % size:
        pytest.skip("needs a multiple")
    check_pipeline(PIPELINE, schedule, size, accum)


class Layers(nn.Module):
    """What a split backward meets: the three functions in all forms, and parameters used otherwise."""

    def __init__(self):
        super().__init__()
        self.embed, self.padded = nn.Embedding(9, 6), nn.Embedding(9, 6, padding_idx=0)
        self.linear, self.norm, self.bare = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6, bias=False)
        self.frozen, self.plain = (
            nn.Linear(6, 6).requires_grad_(False),
            nn.LayerNorm(6, elementwise_affine=False),
        )
        self.gain, self.fixed = nn.Parameter(torch.ones(6)), nn.Linear(6, 6)
        self.direct = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.partly = nn.Linear(6, 6)
        self.fixed.weight.requires_grad_(False)
        self.partly.bias.requires_grad_(False)
        self.norm.bias.requires_grad_(False)
        self.double()

    def forward(self, tokens, x):
        x = self.norm(self.linear(x) + self.embed(tokens) + self.padded(tokens)) * self.gain
        x = self.direct(self.partly(self.fixed(self.plain(self.frozen(self.bare(F.gelu(x)))))))
        x = F.linear(bias=self.gain, weight=self.linear.weight * 2, input=x)
        q = x.unflatten(-1, (2, 3)).transpose(1, 2)
        x = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return F.linear(self.norm(x), self.embed.weight).logsumexp(-1).mean() + self.linear(x[0, 0]).sum()


def check_split(path):
    lesson = load(path)
    torch.manual_seed(0)
    module, tokens = Layers(), torch.randint(9, (2, 5))
    x = torch.randn(2, 5, 6, dtype=torch.double, requires_grad=True)
    module(tokens, x).backward()
    expected, of_x = {name: p.grad for name, p in module.named_parameters()}, x.grad
    module.zero_grad()
    x.grad = None
    split = lesson.SplitBackward()
    with split:
        loss = module(tokens, x)
    loss.backward()
    assert (x.grad - of_x).abs().max() < 1e-12
    assert module.bare.weight.grad is None and module.norm.weight.grad is not None
    split.weights()
    for name, p in module.named_parameters():
        assert (p.grad is None) == (expected[name] is None), name
        assert p.grad is None or (p.grad - expected[name]).abs().max() < 1e-12, name
    assert not split.later


def test_a_backward_in_two_halves_is_a_backward():
    check_split(PIPELINE)


class Nothing(nn.Module):
    """A layer that changes the dtype between its neighbours, and has a parameter that nothing uses."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.unused = dtype, nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x.to(self.dtype)


class Biased(nn.Linear):
    def __init__(self, bias):
        super().__init__(6, 6)
        self.bias = bias


def own_layers(seed):
    """Layers that are no GPT's: the first frozen, batch norms, a computed weight, a tied bias."""
    torch.manual_seed(seed)
    bias = nn.Parameter(torch.randn(6))
    table = torch.randn(12, dtype=torch.double)
    layers = [nn.Linear(5, 6).requires_grad_(False), Nothing(torch.double), nn.BatchNorm1d(6), Biased(bias)]
    layers += [nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh(), Biased(bias)]
    layers += [nn.BatchNorm1d(6), Nothing(torch.float32), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)]
    layers[2].register_buffer("first", table[:6])  # two buffers of one storage
    layers[-1].register_buffer("second", table[6:])
    return [layer if i in (0, 9, 10, 11) else layer.double() for i, layer in enumerate(layers)]


def own_stages(path, schedule, ends):
    """On a rank: how far losses, norms, weights and buffers are from the plain loop's in three steps."""
    lesson, rank, ranks = load(path), dist.get_rank(), dist.get_world_size()
    plain = own_layers(0)
    names = {
        id(p): f"{i}.{n}"
        for i, layer in enumerate(plain)
        for n, p in layer.state_dict(keep_vars=True).items()
    }
    plan = lesson.build_schedule(schedule, ranks, 4, len(ends) // ranks)
    layers = own_layers(rank)
    model = nn.Sequential(*layers)
    pipe = lesson.Pipeline(layers, ends, F.mse_loss, plan)
    whole = nn.Sequential(*plain)
    optimizers = [torch.optim.SGD(list(m.parameters()), lr=0.1) for m in (whole, pipe)]
    answers = []
    for _ in range(3):
        inputs, targets = torch.randn(4, 8, 5), torch.randn(4, 8, 1)
        dist.broadcast(inputs, 0)
        dist.broadcast(targets, 0)
        loss = sum(F.mse_loss(whole(x), y) / 4 for x, y in zip(inputs, targets))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.3)
        answers.append(abs(pipe.step([*inputs], [*targets]).item() - loss.item()))
        answers.append(abs(pipe.clip_grad_norm_(0.3).item() - norm.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = pipe.gather({n: x.detach() for n, x in model.state_dict(keep_vars=True).items()})
    assert len(names) > 20 and "of 4 microbatches" in raised(lambda: pipe.step([*inputs[:3]], [*targets[:3]]))
    return max(*answers, apart(found, whole.state_dict()) if rank == 0 else 0)


def check_stages(path):
    for schedule, ends in (
        ("gpipe", [3, 12]),
        ("1f1b", [2, 12]),
        ("zb-h1", [4, 12]),
        ("interleaved", [1, 4, 8, 12]),
    ):
        assert max(world(2).run(own_stages, path, schedule, ends, timeout=30)) < 1e-5, schedule
    assert max(world(3).run(own_stages, path, "zb-h2", [4, 8, 12], timeout=30)) < 1e-5


def test_a_pipeline_serves_any_layers_from_any_start():
    check_stages(PIPELINE)


class Turn(nn.Module):
    """(b, 4) -> (b, 4), by way of something else: what it returns is not contiguous, or has no gradient."""

    def __init__(self, detach):
        super().__init__()
        self.detach = detach

    def forward(self, x):
        return x.detach() if self.detach else x.reshape(4, -1).t().sin()


def beside_plain(path, schedule="1f1b", group=None, autocast=False, detach=False, later=False):
    """On a rank: how far loss, norm and gradients are from the plain loop's, over the largest gradient.

    later: a layer is frozen until the pipeline has been made.
    """
    lesson, rank, ranks = load(path), dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(3 + dist.get_rank() // 2 * (group is not None))
    layers = [nn.Linear(4, 4), Turn(False), nn.Linear(4, 4), Turn(detach), nn.Linear(4, 4)]
    layers = layers if autocast else [layer.double() for layer in layers]
    plain, (inputs, targets) = copy.deepcopy(nn.Sequential(*layers)), torch.randn(2, 4, 4, 4)
    inputs, targets = (x if autocast else x.double() for x in (inputs, targets))
    layers[2].requires_grad_(not later)
    plan = lesson.build_schedule(schedule, ranks, 4)
    pipe = lesson.Pipeline(layers, [2, 5], F.mse_loss, plan, group)
    layers[2].requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = pipe.step([*inputs], [*targets])
        expected = sum(F.mse_loss(plain(x), y) / 4 for x, y in zip(inputs, targets))
        expected.backward()
    answers = [abs(loss.item() - expected.item())]
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    answers.append(abs(pipe.clip_grad_norm_(0).item() - norm.item()))
    for stage, start in enumerate([0, 2]):
        own = pipe.stages[str(stage)].named_parameters() if stage == rank else ()
        for name, p in own:
            index, _, name = name.partition(".")
            pair = p, plain[start + int(index)].get_parameter(name)
            ours, theirs = (torch.zeros_like(p) if p.grad is None else p.grad for p in pair)
            answers.append((ours - theirs).abs().max().item())
    return max(answers) / norm.item()


def beside_each_other(path):
    """On a rank of four: two pipelines of two."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return beside_plain(path, group=groups[dist.get_rank() // 2])


def outputs_alive(path):
    """The most outputs of a stage that live after an action; what is said of no_grad() and other shapes."""
    lesson, alive, counts = load(path), [], []
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[0].register_forward_hook(lambda module, args, y: alive.append(weakref.ref(y)))
    pipe = lesson.Pipeline(layers, [1, 2], F.mse_loss, lesson.build_schedule("interleaved", 1, 4, 2))
    done = lambda action: counts.append(sum(y() is not None for y in alive))  # noqa: E731
    batches = [list(torch.randn(4, 3, 4)) for _ in range(2)]
    pipe.step(*batches)
    alive.clear()
    pipe.observer = types.SimpleNamespace(save=lambda x: x, done=done)
    pipe.step(*batches)
    pipe.observer = None
    shorter = [[x[:2] for x in batch] for batch in batches]
    with torch.no_grad():
        says = raised(lambda: pipe.step(*batches))
    return max(counts), says, raised(lambda: pipe.step(*shorter))


def check_uses(path):
    assert max(world(4).run(beside_each_other, path, timeout=10)) < 1e-12, "in groups of two"
    assert max(world(2).run(beside_plain, path, "1f1b", None, False, True, timeout=10)) < 1e-12, "no gradient"
    assert max(world(2).run(beside_plain, path, "1f1b", None, False, False, True)) < 1e-12, "unfrozen"
    for schedule in ("1f1b", "zb-h1"):
        assert max(world(2).run(beside_plain, path, schedule, None, True, timeout=20)) < 0.02, "autocast"
    most, no_grad, shorter = world(1).run(outputs_alive, path)[0]
    assert most <= 1, "outputs that have left are kept until backward"
    assert "no_grad()" in no_grad and "not (3, 4) as before" in shorter


def test_a_pipeline_serves_groups_autocast_and_layers_without_a_gradient():
    check_uses(PIPELINE)


def messages(path, schedule):
    """On a rank: its sends and receives in their order, with the forwards and backwards between them."""
    lesson, events = load(path), []
    config = lesson.parse(f"{TINY} --batch 12 --accum 6".split())
    device, text = lesson.set_up(config)
    model = lesson.GPT(config)
    layers = [lesson.Embed(model), *model.blocks, lesson.Head(model)]
    ranks = dist.get_world_size()
    pipe = lesson.Pipeline(layers, [2, 4], lesson.mean_loss, lesson.build_schedule(schedule, ranks, 6))
    isend, irecv = dist.isend, dist.irecv

    class Late:  # what has been received is there after wait() and not before
        def __init__(self, work, tensor, target):
            self.work, self.tensor, self.target = work, tensor, target

        def wait(self):
            events.append("wait")
            self.work.wait()
            self.target.copy_(self.tensor)

    lanes = {"send": set(), "receive": set()}

    def recorded_irecv(tensor, other, group):
        events.append("receive")
        lanes["receive"].add(group)
        arriving = torch.empty_like(tensor)
        return Late(irecv(arriving, other, group=group), arriving, tensor.fill_(torch.nan))

    def recorded_isend(tensor, other, group):
        events.append("send")
        lanes["send"].add(group)
        return isend(tensor, other, group=group)

    kept = []

    def done(action):
        events.append(action.op)
        kept.append(len(pipe.leaving))

    pipe.observer = types.SimpleNamespace(save=lambda x: x, done=done)
    dist.isend, dist.irecv = recorded_isend, recorded_irecv
    try:
        batches = list(zip(*lesson.microbatches(config, text, 1, device)))
        loss = pipe.step(*batches)
    finally:
        dist.isend, dist.irecv = isend, irecv
    assert not lanes["send"] & lanes["receive"], "on NCCL a receive would hold up the sends behind it"
    assert not pipe.leaving, "step() ends before its messages have left"
    return events, loss.item(), max(kept)


def check_messages(path):
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        answers = world(2).run(messages, path, schedule, timeout=20)
        for rank, (events, loss, held) in enumerate(answers):
            assert math.isfinite(loss) and events.count("send") == events.count("receive") == 6
            assert events[:2] == ["receive"] * 2, "receives are posted before anything is computed"
            first = events.index("B" if rank == 0 else "F")
            assert events[:first].count("receive") >= 3, "the next receives are posted ahead"
            assert events[:first].count("receive") <= 4, "but not all, each of them has a buffer"
            assert schedule == "gpipe" or held <= 3, "buffers of messages that have arrived are kept"


def test_receives_are_posted_ahead_and_buffers_are_freed():
    check_messages(PIPELINE)


def against_torchs_pipeline(path, name, peer, chunks):
    """On a rank: how far three steps end from torch.distributed.pipelining's, on this rank's parameters."""
    from torch.distributed import pipelining  # slow to load, and needed here alone

    lesson, rank, ranks = load(path), dist.get_rank(), dist.get_world_size()
    config = lesson.parse(f"{TINY} --layers 4 --batch 8 --accum 4 --dtype fp64".split())
    device, text = lesson.set_up(config)
    pipes, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = lesson.GPT(config).double()
        layers = [lesson.Embed(model), *model.blocks, lesson.Head(model)]
        ends = lesson.split_layers([1] * 6, ranks * chunks)
        pipes.append(
            lesson.Pipeline(layers, ends, lesson.mean_loss, lesson.build_schedule(name, ranks, 4, chunks))
        )
        optimizers.append(torch.optim.AdamW(pipes[-1].parameters(), lr=0.01))
    stages = [
        pipelining.PipelineStage(stage, int(s), ranks * chunks, device)
        for s, stage in pipes[1].stages.items()
    ]
    runner = getattr(pipelining, peer)(stages if chunks > 1 else stages[0], 4, loss_fn=lesson.mean_loss)
    for step in range(3):
        inputs, targets = zip(*lesson.microbatches(config, text, step, device))
        pipes[0].step(inputs, targets)
        last = {"target": torch.cat(targets), "losses": []} if rank == ranks - 1 else {}
        runner.step(*((torch.cat(inputs),) if rank == 0 else ()), **last)
        for param, tie in pipes[1].tied:
            dist.all_reduce(param.grad, group=tie)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(pipes[0].parameters(), pipes[1].parameters())
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(
    "name, peer, chunks",
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("1f1b", "Schedule1F1B", 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
    ],
)
def test_pipeline_ends_in_the_weights_of_torchs_own(name, peer, chunks):
    assert max(world(2).run(against_torchs_pipeline, PIPELINE, name, peer, chunks)) < 1e-9


def test_pipeline_draws_what_it_did_and_says_how_long_it_idled():
    result, _ = run(
        PIPELINE, 2, f"{TINY} --layers 4 --width 128 --heads 4 --batch 16 --accum 8 --steps 6 --balance time"
    )
    assert [len(row) for row in result["timeline"]] == [16, 16]
    assert result["idle"]["formula"] > 0 and 0 < result["idle"]["measured"] < 1
    lesson = load(PIPELINE)
    lines = list(
        lesson.draw([[(("F", 0, 0), 0.0, 1.0), (("B", 0, 0), 3.0, 5.0)], [(("F", 1, 0), 1.0, 2.0)]], 20)
    )
    assert lines == ["rank 0  F0ff........B0bbbbbb", "rank 1  ....F0ff............"]


# ---- tensor_parallel.py ----

TENSOR = str(ROOT / "tensor_parallel.py")
WAYS = ["", " --no-overlap", " --sequence-parallel", " --sequence-parallel --no-overlap"]


def check_tensor(path, flags, size, accum=1, optim="adamw"):
    """As check_parity(), with a sequence that three ranks can split and a vocabulary that they cannot."""
    common = f"{TINY} --context 12 --vocab 259 --batch 6 --dtype fp64 --clip 0.5 --lr 0.01"
    common += f" --accum {accum} --optim {optim}"
    plain, weights = run(SINGLE, 1, common)
    result, own = run(path, size, common + flags)
    assert apart(result["losses"], plain["losses"]) <= 1e-10
    assert apart(result["grad_norms"], plain["grad_norms"]) <= 1e-10
    assert apart(own, weights) <= 1e-9


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("flags", WAYS[1:])
def test_tensor_parallel_comes_to_single_pys_numbers_in_every_way(flags, size):
    check_tensor(TENSOR, flags, size, accum=3, optim="sgd")


class Net(nn.Module):
    """A residual MLP on (B, T, 12), as the lesson's but no GPT: frozen, without a bias, with a buffer.

    A gain learns where features are split: there it enters through `enter`.
    """

    enter = staticmethod(lambda gain: gain)

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)
        self.gate, self.out = nn.Linear(12, 24, bias=False), nn.Linear(12, 12, bias=False)
        self.gate.weight.requires_grad_(False)
        self.norm.bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.rand(()))
        self.register_buffer("scale", torch.rand(12))

    def forward(self, x):
        y = self.norm(x) * self.scale
        return x + self.out(self.down(self.enter(self.gain) * F.gelu(self.up(y)) * self.gate(y)))


def serve_net(path, sequence_parallel, overlap, pairs=False):
    """On a rank: how far outputs, norms, gradients, weights are from the plain net\'s in three steps."""
    lesson, group = load(path), None
    torch.manual_seed(dist.get_rank())  # rank 0's weights must win
    if pairs:
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    nets = [Net().double()]
    nets.append(copy.deepcopy(nets[0]))
    for tensor in (*nets[0].parameters(), *nets[0].buffers()):
        dist.broadcast(tensor.detach(), group_src=0, group=group)
    torch.manual_seed(5)
    x, direction = torch.randn(2, 3, 2 * ranks, 12, dtype=torch.double)  # (3, T, 12) each
    own = slice(2 * rank, 2 * rank + 2) if sequence_parallel else slice(None)
    plan = {
        "up|gate": lesson.ColumnParallelLinear,
        "down": lesson.RowParallelLinear,
        "out": lambda linear, tp: linear if sequence_parallel else whole_row(lesson, linear, tp),
    }
    tensor = lesson.TensorParallel(nets[1], plan, sequence_parallel, overlap, group)
    if not sequence_parallel:
        nets[1].enter = lambda gain: lesson.copy(gain, tensor.tp)
    answers, inputs = [], [x.clone().requires_grad_(), x[:, own].clone().requires_grad_()]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    for limit in (1.0, 1e3, 0):
        outputs = nets[0](inputs[0]), tensor(inputs[1])
        (outputs[0] * direction).sum().backward()
        (outputs[1] * direction[:, own]).sum().backward()
        norm = nn.utils.clip_grad_norm_(nets[0].parameters(), limit or math.inf)
        norms = norm, tensor.clip_grad_norm_(limit)
        answers += [(outputs[0][:, own] - outputs[1]).abs().max().item(), (norms[0] - norms[1]).abs().item()]
        answers.append((inputs[0].grad[:, own] - inputs[1].grad).abs().max().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        inputs[0].grad = inputs[1].grad = None
    whole = tensor.gather(nets[1].state_dict())
    answers.append(apart(whole, nets[0].state_dict()) if rank == 0 else 0)
    theirs = {p.untyped_storage().data_ptr() for p in nets[1].state_dict().values()}
    assert all(t.untyped_storage().data_ptr() not in theirs for t in whole.values()), (
        "the next step changes it"
    )
    return max(answers)


def whole_row(lesson, linear, tp):
    """A row-parallel layer that takes an input that is not split."""
    return lesson.RowParallelLinear(linear, tp, split_input=True)


def check_net(path, size=3):
    if size == 4:
        assert max(world(4).run(serve_net, path, True, True, True, timeout=30)) < 1e-12, "in groups of two"
    for sequence_parallel in (False, True):
        for overlap in (False, True):
            assert max(world(size).run(serve_net, path, sequence_parallel, overlap, timeout=30)) < 1e-12


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_tensor_parallel_serves_any_module(size):
    check_net(TENSOR, size)


def serve_autocast_net(path, sequence_parallel):
    """On a rank: how far gradients under autocast are from the plain net's, over the largest; and dtypes."""
    lesson, rank, ranks = load(path), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    plain, split = (nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2))
    split.load_state_dict(plain.state_dict())
    plan = {"0": lesson.ColumnParallelLinear, "2": lesson.RowParallelLinear}
    tensor, x = lesson.TensorParallel(split, plan, sequence_parallel), torch.randn(3, 2 * ranks, 8)
    own = x[:, 2 * rank : 2 * rank + 2] if sequence_parallel else x
    with torch.autocast("cpu", torch.bfloat16):
        outputs = plain(x), tensor(own)
    for y in outputs:
        y.float().square().sum().backward()
    tensor.clip_grad_norm_(0)
    shards = {f"{i}.{name}": p.grad for i in (0, 2) for name, p in split[i].named_parameters()}
    whole = tensor.gather(shards)
    errors = [
        (whole[name] - p.grad).abs().max() / p.grad.abs().max()
        for name, p in plain.named_parameters()
        if whole
    ]
    return max(errors, default=torch.zeros(())).item(), [y.dtype for y in outputs]


def check_autocast_net(path):
    for sequence_parallel in (False, True):
        for error, dtypes in world(2).run(serve_autocast_net, path, sequence_parallel, timeout=20):
            assert error < 0.05 and dtypes[0] == dtypes[1] == torch.bfloat16


def test_tensor_parallel_serves_autocast():
    check_autocast_net(TENSOR)


def serve_layers(path, vocab, sequence_parallel):
    """On a rank: how far each layer, forward and backward, is from the whole module's."""
    lesson, rank, ranks = load(path), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    answers, tp = [], lesson.TensorGroup(sequence_parallel)
    tokens = torch.randint(vocab, (3, 2 * ranks))
    own = slice(2 * rank, 2 * rank + 2) if sequence_parallel else slice(None)
    embedding, head = nn.Embedding(vocab, 12).double(), nn.Linear(12, 12 * ranks).double()
    parts = nn.Linear(12, 3 * 2 * ranks).double()
    copies = [copy.deepcopy(module) for module in (embedding, head, parts)]
    split = (
        lesson.VocabParallelEmbedding(copies[0], tp),
        lesson.ColumnParallelLinear(copies[1], tp, gather_output=True),
    )
    split += (lesson.ColumnParallelLinear(copies[2], tp, parts=3),)
    x = embedding(tokens)
    logits = F.linear(x, embedding.weight)
    losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)
    y = split[0](tokens)
    own_logits = split[0].logits(y)
    own_losses = lesson.vocab_parallel_cross_entropy(own_logits, tokens, vocab, tp)
    answers += [(x[:, own] - y).abs().max(), (losses - own_losses).abs().max()]
    assert own_logits.shape[-1] == -(-vocab // ranks), "a rank has no more than its logits"
    coarse = lesson.vocab_parallel_cross_entropy(own_logits.detach().bfloat16(), tokens, vocab, tp)
    assert coarse.dtype == torch.float32, "a loss of bf16 logits"
    gathered = head(x.detach())
    answers.append((gathered - split[1](y.detach())).abs().max())
    q, k, v = parts(x.detach()).chunk(3, -1)
    mine = torch.cat([each.chunk(ranks, -1)[rank] for each in (q, k, v)], -1)
    answers.append((mine - split[2](y.detach())).abs().max())
    weights = torch.randn_like(losses)
    ((losses * weights).sum() + gathered.square().sum() + q.sum() + 2 * k.sum() + 3 * v.sum()).backward()
    ours = (own_losses * weights).sum() + split[1](y.detach()).square().sum()
    for i, part in enumerate(split[2](y.detach()).chunk(3, -1), start=1):
        ours = ours + i * part.sum()
    ours.backward()
    for full, layer in zip((embedding, head, parts), split):
        for name, param in full.named_parameters():
            whole = layer.join(name, layer._parameters[name].grad)
            if rank == 0:
                answers.append((whole - param.grad).abs().max())
    return max(answers).item()


def check_layers(path, size=3):
    for vocab in (size * 5, size * 5 + 1, 9):
        for sequence_parallel in (False, True):
            assert max(world(size).run(serve_layers, path, vocab, sequence_parallel, timeout=30)) < 1e-12


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_split_layer_is_the_whole_layer(size):
    check_layers(TENSOR, size)


def serve_pairs(path):
    """On a rank: for each pair, <forward(x), y> less <x, backward(y)>, summed over ranks."""
    lesson, rank, ranks = load(path), dist.get_rank(), dist.get_world_size()
    tp = lesson.TensorGroup()
    shapes = {  # of x and of what comes out; those alike on all ranks count once
        "copy": ((2, 4, 6), "alike", (2, 4, 6), "own"),
        "reduce": ((2, 4, 6), "own", (2, 4, 6), "alike"),
        "gather_sequence": ((2, 4, 6), "own", (2, 4 * ranks, 6), "own"),
        "scatter_sequence": ((2, 4 * ranks, 6), "own", (2, 4, 6), "own"),
        "split_features": ((2, 4, 6 * ranks), "alike", (2, 4, 6), "own"),
        "gather_features": ((2, 4, 6), "own", (2, 4, 6 * ranks), "alike"),
    }
    answers = {}
    for name, (before, kind, after, kind_after) in shapes.items():
        torch.manual_seed(0 if kind == "alike" else rank)
        x = torch.randn(before, dtype=torch.double, requires_grad=True)
        torch.manual_seed(7 if kind_after == "alike" else 8 + rank)
        direction = torch.randn(after, dtype=torch.double)
        z = getattr(lesson, name)(x * 1, tp)
        assert z.shape == direction.shape
        (z * direction).sum().backward()
        sides = torch.stack([(z * direction).sum().detach(), (x * x.grad).sum().detach()])
        shares = torch.tensor([ranks if kind_after == "alike" else 1, ranks if kind == "alike" else 1])
        dist.all_reduce(sides := sides / shares)
        answers[name] = (sides[0] - sides[1]).abs().item()
    x = torch.ones(2, 2, requires_grad=True)
    y = x * 1  # whose gradient is also that of something else
    (lesson.copy(y, tp) + y).sum().backward()
    answers["shared"] = (x.grad - ranks - 1).abs().max().item()
    return answers


def check_pairs(path, size=3):
    for answers in world(size).run(serve_pairs, path, timeout=30):
        assert max(answers.values()) < 1e-12, answers


def test_pairs_of_functions_are_conjugate():
    check_pairs(TENSOR)


def tensor_misuse(path):
    """On a rank: what is said of plans that cannot be."""
    lesson, answers = load(path), []
    tied = nn.ModuleDict({"a": nn.Embedding(8, 4), "b": nn.Linear(4, 8), "c": nn.Linear(6, 4)})
    tied["b"].weight = tied["a"].weight
    tied["e"], tied["f"] = nn.Embedding(8, 4, padding_idx=0), lesson.Block(3, 6)
    column = lesson.ColumnParallelLinear
    for plan in (
        {"c": functools.partial(column, parts=3)},
        {"c": functools.partial(column, parts=3, gather_output=True)},
        {"c": lesson.RowParallelLinear, "d": column},
        {"a": lesson.VocabParallelEmbedding},
        {"a": lesson.VocabParallelEmbedding, "b": column},
        {"e": lesson.VocabParallelEmbedding},
        {"f": lesson.split_heads},
    ):
        answers.append(raised(lambda plan=plan: lesson.TensorParallel(copy.deepcopy(tied), plan)))
    return answers


def check_tensor_misuse(path):
    for answers in world(2).run(tensor_misuse, path, timeout=20):
        words = (
            "not a multiple",
            "mix up",
            "no module",
            "tied",
            "tied",
            "padding_idx",
            "heads",
        )
        assert all(word in text for word, text in zip(words, answers)), answers


def test_tensor_parallel_says_which_plan_cannot_be():
    check_tensor_misuse(TENSOR)


def tensor_events(path, sequence_parallel):
    """On a rank, in a backward: when collectives start, what is computed, when results are waited for."""
    lesson, events = load(path), []
    tp = lesson.TensorGroup(sequence_parallel)
    layer = lesson.ColumnParallelLinear(nn.Linear(8, 8), tp)
    y = layer(torch.randn(2, 4, 8, requires_grad=True))
    all_gather = lesson.all_gather

    class Late:  # nothing is there before wait()
        def __init__(self, work, output):
            self.work, self.output = work, output
            work.wait()
            self.kept = output.clone()
            output.fill_(torch.nan)

        def wait(self):
            events.append("wait")
            self.output.copy_(self.kept)

    def recorded(collective, name):
        def start(*args, **options):
            events.append(name)
            return Late(collective(*args, **options), args[0])

        return start

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket is torch.ops.aten.mm:
                events.append("matmul")
            return function(*args, **(kwargs or {}))

    names = {"all_reduce": "sum", "all_to_all_single": "sum"}
    plain = {name: getattr(dist, name) for name in names}
    lesson.all_gather = recorded(all_gather, "gather")
    for name, event in names.items():
        setattr(dist, name, recorded(plain[name], event))
    try:
        with Watch():
            y.sum().backward()
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
    assert layer.weight.grad.isfinite().all()
    return events


def check_tensor_overlap(path):
    for sequence_parallel in (False, True):
        for events in world(2).run(tensor_events, path, sequence_parallel, timeout=20):
            expected = ["matmul", "sum", "matmul", "wait"]
            if sequence_parallel:
                expected = ["gather", "matmul", "sum", "wait", "matmul", "wait"]
            assert events == expected, "collectives run under the matrix products of backward"


def test_a_column_parallel_layer_communicates_while_it_computes():
    check_tensor_overlap(TENSOR)


def tensor_ledgers(path, size):
    for flags in WAYS:
        for dtype in ("fp32", "fp64")[: 2 if size == 2 else 1]:
            flags_of_run = (
                f"{TINY} --context 12 --vocab 259 --batch 6 --accum 2 --steps 1 --dtype {dtype}{flags}"
            )
            yield run(path, size, flags_of_run)[0], "sequence" in flags, "no-overlap" not in flags, dtype


def check_tensor_ledger(path, size):
    """Activations: of 12 + 4 tensors a layer, what each way splits (arXiv 2205.05198, table 2)."""
    for result, sequence, overlap, dtype in tensor_ledgers(path, size):
        w, (L, D, tokens) = {"fp32": 4, "fp64": 8}[dtype], (2, 36, 3 * 12)
        sent, held = result["sent"], result["held"]
        inputs = 2 * L + 1  # of norms, and as many of column-parallel layers
        norms = inputs / size if sequence else inputs
        columns = inputs / size if sequence and overlap else inputs
        elements = D * (norms + columns + 12 * L / size)  # qkv 3, attended 1, up 4, gelu 4
        elements += 2 * norms + L * 12 / size + -(-259 // size)  # statistics, scores, softmax of the loss
        assert (
            held["activations"]["measured"] == held["activations"]["formula"] == round(w * tokens * elements)
        )
        moved, loss = w * 2 * tokens * D * 2 * inputs, 3 * w * 2 * tokens
        expected = {"all-reduce": moved + loss + 8}
        if sequence:
            replicated = L * 6 * D + 2 * D + 12 * D
            again = moved // 2 if overlap else 0
            expected = {
                "reduce-scatter": moved,
                "all-gather": moved + again,
                "all-reduce": w * replicated + loss + 8,
            }
        assert {kind: row["payload"] for kind, row in sent.items()} == expected
        for kind, row in sent.items():
            ring = (2 if kind == "all-reduce" else 1) * (size - 1) / size
            assert row["wire"] == row["formula"] == round(row["payload"] * ring)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_activations_and_bytes_of_tensor_parallel_are_the_formulas_exactly(size):
    check_tensor_ledger(TENSOR, size)


def replicas(path, flags):
    """On a rank: the parameters that all ranks have, after some steps."""
    lesson, kept = load(path), []

    class Kept(lesson.TensorParallel):
        def __init__(self, *args):
            super().__init__(*args)
            kept.append(self)

    lesson.TensorParallel = Kept
    lesson.train(lesson.parse(f"{TINY} --context 12 --batch 6 --lr 0.01{flags}".split()))
    return [p.detach().clone() for p in kept[0].replicated]


@pytest.mark.parametrize("flags", WAYS)
def test_what_all_ranks_have_stays_equal_to_the_bit(flags):
    first, *others = world(3).run(replicas, TENSOR, flags)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other))


def against_dtensor(path, sequence_parallel):
    """On a rank: how far three steps end from those of DTensor's parallelize_module."""
    sys.path.insert(0, str(ROOT / "tools"))
    import contenders  # its peer is the one that is timed

    lesson = load(path)
    flags = (
        f"{TINY} --batch 4 --dtype fp64 --lr 0.01 --vocab 257" + " --sequence-parallel" * sequence_parallel
    )
    config = lesson.parse(flags.split())
    device, text = lesson.set_up(config)
    entries = [make(lesson, config, device) for make in (contenders.tensor_parallel, contenders.dtensor)]
    for step in range(3):
        batches = list(lesson.microbatches(config, text, step, device))
        for entry in entries:
            entry.step(batches, config)
    ours, theirs = (entry.weights() for entry in entries)
    return apart(ours, theirs) if dist.get_rank() == 0 else 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ends_in_the_weights_of_torchs_own(sequence_parallel):
    assert max(world(2).run(against_dtensor, TENSOR, sequence_parallel)) < 1e-9


def whole_logits(path):
    """On a rank: without targets ParallelGPT returns what GPT does."""
    lesson = load(path)
    config = lesson.parse(f"{TINY} --vocab 259".split())
    lesson.set_up(config)
    torch.manual_seed(0)
    model = lesson.ParallelGPT(config).double()
    torch.manual_seed(0)
    plain = lesson.GPT(config).double()
    tokens = torch.randint(259, (2, 9))  # fewer than the context
    return (lesson.TensorParallel(model, lesson.PLAN)(tokens) - plain(tokens)).abs().max().item()


def test_without_targets_all_ranks_get_all_logits():
    assert max(world(2).run(whole_logits, TENSOR)) < 1e-12


# ---- checkpointing.py ----

CHECKPOINTING = str(ROOT / "checkpointing.py")
POLICIES = ["none", "full", "selective", "partitioned", "offload"]


def check_policy(path, flags, size, accum=3):
    common = f"{TINY} --layers 3 --vocab 259 --context 13 --batch 6 --dtype fp64 --clip 0.5 --lr 0.01"
    common += f" --accum {accum}"
    plain, weights = run(SINGLE, 1, common)
    result, own = run(path, size, common + flags)
    assert apart(result["losses"], plain["losses"]) <= 1e-10
    assert apart(result["grad_norms"], plain["grad_norms"]) <= 1e-10
    assert apart(own, weights) <= 1e-9


@pytest.mark.parametrize("attention", ["auto", "math"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("policy, size", [*((policy, 1) for policy in POLICIES), ("partitioned", 3)])
def test_every_policy_comes_to_single_pys_numbers(policy, every, attention, size):
    check_policy(CHECKPOINTING, f" --policy {policy} --every {every} --attention {attention}", size)


class Dropping(nn.Module):
    """Residual layers with dropout, a normalization that counts nothing, and random numbers from rand()."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(12, 24), nn.Linear(24, 12), nn.LayerNorm(12)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, scale=1.0, mask=None, *, deep=False):
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        x = x * (torch.rand(x.shape[-1]) + 0.5)
        x = F.dropout(x, 0.2) * scale
        x = x if mask is None else x.masked_fill(mask["where"][0], 0)
        return (x, {"sum": x.sum(-1), "text": "kept"}) if deep else x


def ways(lesson):
    """{name: options of checkpoint()}: of each policy, and with random numbers kept."""
    partitioned, host = lesson.Partitioned(), lesson.Offloaded(torch.device("cpu"), 10**6)
    return {
        "full": {},
        "selective": {"keep": lesson.EXPENSIVE},
        "random": {"keep": lesson.EXPENSIVE | {torch.ops.aten.rand.default}},
        "partitioned": {"hooks": (partitioned.put, partitioned.get)},
        "offload": {"hooks": (host.put, host.get)},
    }


def gradients_of(layers, call, x):
    """Gradients of x and all parameters when the layers are called by call(layer, x, ...)."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    mask = {"where": [torch.arange(5).view(5, 1) == 2]}
    y = call(layers[0], x, 2.0, mask)
    y = call(lambda z: call(layers[2], call(layers[1], z)), y)  # nested
    y, more = call(layers[3], y, deep=True)
    frozen = call(layers[4], torch.ones(5, 12))  # no argument needs a gradient, but its weights do
    assert more["text"] == "kept"
    ((y * frozen).sum() + more["sum"].square().sum()).backward()
    after = torch.rand(4)  # backward must leave the random state as it was
    params = [p for layer in layers for p in layer.parameters()]
    found = [x.grad, *(p.grad for p in params), after]
    for p in params:
        p.grad = None
    return found


def bitwise(path):
    """On a rank: which ways end in other gradients than no checkpoint at all, with dropout on, in fp32."""
    lesson, wrong = load(path), []
    torch.manual_seed(1)
    layers, x = [Dropping() for _ in range(5)], torch.randn(3, 5, 12)
    for dtype in (None, torch.bfloat16):
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            expected = gradients_of(layers, lambda layer, *args, **kwargs: layer(*args, **kwargs), x)
        for name, options in ways(lesson).items():

            def call(layer, *args, options=options, **kwargs):
                with nullcontext() if dtype is None else torch.autocast("cpu", dtype):  # noqa: B023
                    return lesson.checkpoint(layer, *args, **options, **kwargs)

            found = gradients_of(layers, call, x)
            wrong += [name] if not all(map(torch.equal, found, expected)) else []
    with torch.autocast("cpu", torch.bfloat16):
        y = lesson.checkpoint(layers[0], x)
    y.sum().backward()
    assert not torch.is_autocast_enabled("cpu"), "backward leaves autocast on"
    with torch.no_grad():
        hooks = (lambda x: pytest.fail("there is no backward to keep it for"), None)
        assert lesson.checkpoint(layers[0], x, hooks=hooks).grad_fn is None
    return wrong


def check_bitwise(path, size=1):
    for wrong in world(size).run(bitwise, path, timeout=30):
        assert wrong == [], f"gradients differ with {wrong}"


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_are_equal_to_the_bit_with_dropout_on(size):
    check_bitwise(CHECKPOINTING, size)


def misrecompute(path):
    """On a rank: what is said of functions that change between forward and the second time."""
    lesson, says = load(path), []
    weight = torch.randn(4, 4, requires_grad=True)
    state = {"changed": False}

    def another_shape(x):
        return ((x[:2] if state["changed"] else x) @ weight).tanh().sum()

    def fewer(x):
        y = (x @ weight).tanh()
        return (y if state["changed"] else y.sin()).sum()

    def another_operator(x):
        y = torch.addmm(weight[0], x, weight) if state["changed"] else x @ weight
        return (y @ weight).sin().cos().sum()

    def in_place(x):
        y = (x @ weight).sigmoid()
        y.mul_(2 if state["changed"] else 1)
        return (y * 1).sin().sum()

    def kept_in_place(x):
        return (x @ weight).mul_(2).sin().sum()

    def another_dtype(x):
        y = x.double() if state["changed"] else x.float()
        return y.tanh().sum()

    def catching(x):
        try:
            return (x @ weight).tanh().sum()
        except Exception:
            return x.sum()

    def kept_in_a_list(x):
        y = x @ weight
        torch._foreach_mul_([y], 2.0)
        return y.sin().sum()

    def kept_as_out(x):
        y = x @ weight.detach()
        with torch.no_grad():
            torch.mul(y, 2, out=y)
        return (y * weight).sin().sum()

    plain = torch.randn(4, 4, requires_grad=True)
    lesson.checkpoint(catching, plain).backward()
    y, more = lesson.checkpoint(lambda x: (x @ weight, (x @ weight).sin()), plain, keep=lesson.EXPENSIVE)
    y.mul_(2)
    assert "was changed in place" in raised((y.sum() + more.sum()).backward)
    y, more = lesson.checkpoint(lambda x: (h := x @ weight, h.sin()), plain, keep=lesson.EXPENSIVE)
    y.mul_(2)
    assert "was changed in place" in raised((y.sum() + more.sum()).backward)
    for function in kept_in_a_list, kept_as_out:
        assert "in place what the" in raised(
            lambda f=function: lesson.checkpoint(f, plain, keep=lesson.EXPENSIVE)
        )
    says.append(raised(lambda: lesson.checkpoint(kept_in_place, plain, keep=lesson.EXPENSIVE)))
    says.append(raised(lesson.checkpoint(in_place, plain).backward))
    for function, keep in ((another_shape, ()), (fewer, ()), (another_operator, lesson.EXPENSIVE)):
        state["changed"] = False
        loss = lesson.checkpoint(function, torch.randn(4, 4, requires_grad=True), keep=keep)
        state["changed"] = True
        says.append(raised(loss.backward))
    state["changed"] = False
    loss = lesson.checkpoint(another_dtype, torch.randn(4, 4, requires_grad=True))
    state["changed"] = True
    assert "came in place of" in raised(loss.backward)
    host = lesson.Offloaded(torch.device("cpu"), 100)
    says.append(raised(lambda: lesson.checkpoint(torch.tanh, torch.randn(40), hooks=(host.put, host.get))))
    return says


def check_misrecompute(path):
    kept, changed, *says = world(1).run(misrecompute, path)[0]
    assert "changes in place what the checkpoint keeps" in kept and "changed in place" in changed, (
        kept,
        changed,
    )
    assert "came in place of" in says[0] and "saved 3 tensors, not 4" in says[1], says
    assert "in place of aten.mm" in says[2] and "room for 100" in says[3], says


def test_a_function_that_changes_is_found_out():
    check_misrecompute(CHECKPOINTING)


def partitioned_in_pairs(path):
    """On a rank of four: a gradient with a transposed input that two ranks share, and what it should be."""
    lesson, rank = load(path), dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    hooks = lesson.Partitioned(groups[rank // 2])
    torch.manual_seed(rank // 2)
    x, weight = torch.randn(5, 3).t().requires_grad_(), torch.randn(15, requires_grad=True)
    function = lambda x: (x.t().view(-1).sin() * weight).sin().sum()  # noqa: E731
    lesson.checkpoint(function, x, hooks=(hooks.put, hooks.get)).backward()
    found = weight.grad
    weight.grad = None
    function(x).backward()
    return torch.equal(found, weight.grad)


def on_the_way_out(path):
    """On a rank: when copies to the host start, and when they are waited for."""
    lesson, events = load(path), []
    host = lesson.Offloaded(torch.device("cpu"), 10**4)

    def move(ticket, x, out):
        events.append(("start", ticket.place.start))
        return lambda: events.append(("wait", ticket.place.start))

    host._move = move
    kept = [host.put(torch.ones(16)) for _ in range(3)]
    return events if len(kept) == 3 else None


def check_hooks(path):
    assert all(world(4).run(partitioned_in_pairs, path, timeout=20)), "in groups of two, transposed"
    events = world(1).run(on_the_way_out, path)[0]
    assert events == [("start", 0), ("wait", 0), ("start", 64), ("wait", 64), ("start", 128)]


def test_partitioned_serves_groups_and_offloaded_one_copy_at_a_time():
    check_hooks(CHECKPOINTING)


def twice(path):
    """On a rank: gradients when a graph is kept and gone through again, in part and whole."""
    lesson, answers = load(path), []
    for name, options in ways(lesson).items():
        torch.manual_seed(2)
        layer, x = Dropping(), torch.randn(5, 12, requires_grad=True)
        torch.manual_seed(4)
        y = lesson.checkpoint(layer, x, **options)
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        torch.manual_seed(4)
        (expected,) = torch.autograd.grad(layer(x).sum(), x)
        answers += [name] if not torch.equal(x.grad, 2 * expected) else []
    return answers


def check_twice(path):
    assert world(1).run(twice, path)[0] == []


def test_a_graph_can_be_gone_through_again():
    check_twice(CHECKPOINTING)


def check_activations(path, size):
    """To the byte: 16 tensors a block, what each policy keeps of them, and what it computes again."""
    combinations = [*itertools.product(POLICIES, ("auto", "math"), (1, 2), ("fp32",))]
    combinations += [(policy, "auto", 1, "fp64") for policy in POLICIES]
    if size != 2:  # where only what is partitioned differs
        combinations = [("partitioned", "auto", every, "fp32") for every in (1, 2)]
    for policy, attention, every, dtype in combinations:
        w = {"fp32": 4, "fp64": 8}[dtype]
        flags = f"{TINY} --layers 3 --context 12 --vocab 259 --batch 6 --accum 2 --steps 1 --dtype {dtype}"
        flags += f" --policy {policy} --attention {attention} --every {every}"
        result, _ = run(path, size, flags)
        tokens, u = 3 * 12, 3 * 12 * 36
        norms, rows = 4 * tokens, tokens * 12
        scores = rows * 12 if attention == "math" else rows
        block = 16 * u + norms + scores
        kept = {"none": block, "full": u, "partitioned": -(-u // size), "offload": 0}.get(policy)
        again = {"none": 0, "full": block - u, "partitioned": block, "offload": block + u}.get(policy)
        if policy == "selective":  # input, qkv, proj, up; and attention's output, if it is one operator
            kept = 9 * u if attention == "math" else 10 * u + rows
            again = norms + (11 * u + scores if attention == "math" else 7 * u)
        chosen = [policy != "none" and i % every == 0 for i in range(3)]
        blocks = [kept if each else block for each in chosen]
        most = sum(blocks) + 2 * u + 2 * tokens + 259 * tokens + 1
        most = max([most, *(sum(blocks[: i + 1]) + again for i in (1, 2) if chosen[i])])
        assert (
            result["held"]["activations"]["measured"] == w * most == result["held"]["activations"]["formula"]
        ), flags
        if policy == "partitioned":
            row, whole = result["sent"]["all-gather"], 2 * sum(chosen) * kept * size * w
            assert row["payload"] == whole and row["wire"] == row["formula"] == whole * (size - 1) // size
        flops = result["flops"]
        assert (flops["policy"] > flops["none"]) == (
            policy in ("full", "partitioned", "offload") or (policy, attention) == ("selective", "math")
        )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_activations_of_each_policy_are_the_formulas_exactly(size):
    check_activations(CHECKPOINTING, size)


def flops_again(path):
    lesson = load(path)
    flags = f"{TINY} --steps 1 --layers 4 --batch 6"
    return [
        lesson.train(lesson.parse(f"{flags} {more}".split()))["flops"]
        for more in ("", "--attention math --policy selective")
    ]


def test_full_checkpoints_compute_the_forward_again_but_for_the_last_product():
    full, selective = world(1).run(flops_again, CHECKPOINTING)[0]
    tokens, D, T = 6 * 16, 36, 16
    assert full["policy"] - full["none"] == 4 * 2 * tokens * (8 * D * D + 2 * T * D)
    assert (
        selective["policy"] - selective["none"] == 4 * 2 * tokens * 2 * T * D
    )  # scores, and what they weigh


def beside_torchs(path):
    """On a rank: ours and torch.utils.checkpoint's gradients, and the most bytes alive with each."""
    sys.path.insert(0, str(ROOT / "tools"))
    import contenders

    lesson, answers = load(path), {}
    for policy in ("full", "selective"):
        config = lesson.parse(f"{TINY} --layers 6 --context 32 --batch 8 --policy {policy}".split())
        device, text = lesson.set_up(config)
        batches = list(lesson.microbatches(config, text, 1, device))
        for entry in (
            contenders.checkpointed(lesson, config, device),
            contenders.torch_checkpointed(lesson, config, device),
        ):
            ledger = lesson.Ledger("", config, device, entry.model)
            with ledger:
                entry.wrapped(*batches[0]).backward()
            gradients = [p.grad for p in entry.model.parameters()]
            answers.setdefault(policy, []).append((ledger.seen["peak_bytes"], gradients))
    return answers


def check_beside_torchs(path):
    for policy, (ours, theirs) in world(1).run(beside_torchs, path, timeout=60)[0].items():
        assert all(map(torch.equal, ours[1], theirs[1])), policy
        assert ours[0] <= theirs[0], f"{policy}: {ours[0]} bytes at the peak, torch's {theirs[0]}"


def test_gradients_are_torchs_and_peak_bytes_no_more():
    check_beside_torchs(CHECKPOINTING)


def copies(path):
    """On a rank: when offloaded tensors leave and come back, beside what is computed."""
    lesson, events = load(path), []
    host = lesson.Offloaded(torch.device("cpu"), 10**6)

    move = host._move

    def late(ticket, x, out):  # what comes back is not there before wait()
        events.append("out" if out else "in")
        if out:
            return move(ticket, x, out)
        arriving = torch.empty_like(x)
        arrived = move(ticket, arriving, out)
        x.fill_(torch.nan)

        def wait():
            events.append("wait")
            arrived()
            x.copy_(arriving)

        return wait

    host._move = late

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            events.append("compute")
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            assert ctx.saved_tensors[0].isfinite().all()
            return gradient * 2

    x = torch.ones(4, requires_grad=True)
    for _ in range(3):
        x = lesson.checkpoint(Layer.apply, x, hooks=(host.put, host.get))
    forward = len(events)
    x.sum().backward()
    assert host.tickets == 0, "what nobody can ask for keeps its room"
    return events[:forward], events[forward:]


def check_copies(path):
    forward, backward = world(1).run(copies, path)[0]
    assert forward == ["out", "compute"] * 3
    assert backward == ["in", "in", "wait", "compute", "in", "wait", "compute", "wait", "compute"], backward


def test_offloaded_tensors_come_back_one_block_ahead():
    check_copies(CHECKPOINTING)


def checkpoints_of_tensor_parallel(path):
    """On a rank: how far tensor_parallel.py's model with partitioned checkpoints is from it without any."""
    lesson, tensor = load(path), load(TENSOR)
    config = tensor.parse(f"{TINY} --batch 4".split())
    device, text = tensor.set_up(config)
    hooks, gradients = lesson.Partitioned(), []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = tensor.ParallelGPT(config).double()
        parallel = tensor.TensorParallel(model, tensor.PLAN)
        if checkpointed:
            for block in model.blocks:
                plain = block.forward
                block.forward = functools.partial(lesson.checkpoint, plain, hooks=(hooks.put, hooks.get))
        parallel(*next(tensor.microbatches(config, text, 1, device))).backward()
        gradients.append([p.grad for p in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*gradients))


def test_tensor_parallel_ranks_can_split_their_checkpoints():
    assert max(world(2).run(checkpoints_of_tensor_parallel, CHECKPOINTING)) < 1e-12


# ---- the ledger ----


def check_wire(lesson, path, size=3):
    """Payload and ring bytes are the formula's exactly, whatever the accumulation."""
    for accum in (1, 3):
        result, weights = run(path, size, f"{TINY} --batch 36 --steps 1 --accum {accum}{lesson.flags}")
        expected = lesson.sent(weights, 4, size, accum)
        assert {kind: row["payload"] for kind, row in result["sent"].items()} == expected
        for kind, row in result["sent"].items():
            if lesson.name == "pipeline":  # the tied weight's group is of two ranks
                assert row["wire"] == row["formula"]
                continue
            passes = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}.get(kind)
            wire = row["payload"] * (passes * (size - 1) / size if passes else 1)
            assert row["wire"] == round(wire) == row["formula"]


@every_lesson
def test_bytes_sent_are_the_formulas_exactly(lesson):
    for size in lesson.worlds:
        check_wire(lesson, lesson.path, size)


def check_held(lesson, path, size=4):
    """To the byte, but for 4 a tensor (the optimizer's step counts, ddp's flags) and the lesson's slack.

    A model of many layers, or two units would be most of it.
    """
    widths = {"": 4, " --dtype bf16": 2, " --dtype fp64": 8, " --optim sgd": 4, " --accum 3": 4}
    for flags, width in list(widths.items())[: {1: 2, 4: None}.get(size, 1)]:
        exact = lesson.threads or lesson.name in ("pipeline", "tensor_parallel", "checkpointing")
        shape = TINY if exact else TINY.replace("--layers 2", "--layers 8")
        result, weights = run(path, size, f"{shape} --batch 12 --steps 1{flags}{lesson.flags}")
        assert set(result["held"]) == {"parameters", "gradients", "optimizer", *lesson.held}
        slack = lesson.slack(weights, width, size)
        for name, row in result["held"].items():
            more = row["measured"] - row["formula"]
            least = -slack[name] if name == "gradients" and slack else 0
            assert least <= more <= slack.get(name, 8 * len(weights)), (flags, name, row)


@every_lesson
def test_bytes_held_are_the_formulas(lesson):
    for size in lesson.worlds:
        check_held(lesson, lesson.path, size)


def check_one_gradient(path):
    """With sgd and few tokens the peak is the parameters, one flat gradient and little else."""
    for accum in (1, 2):
        flags = f"--layers 2 --width 128 --context 4 --batch 2 --accum {accum} --steps 1 --optim sgd"
        result, _ = run(path, 1, f"{flags} --bucket-mb 25 --data {TEXT}")
        assert result["peak_bytes"] < 4 * result["n_params"] * 2.5
        assert result["held"]["gradients"]["measured"] < 4 * result["n_params"] * 1.01


def test_ddp_never_holds_a_second_flat_gradient():
    check_one_gradient(DDP)


def live_bytes():
    """On a rank: what a ledger saw of tensors whose lives are known: one is freed, one's storage resized."""
    model = nn.Linear(100, 50, bias=False)
    ledger = load(SINGLE).Ledger("test", load(SINGLE).parse([]), torch.device("cpu"), model)
    with ledger:
        first, second = torch.zeros(1000), torch.zeros(3000)
        del first
        third = torch.zeros(500)
        second.untyped_storage().resize_(0)
        fourth = torch.zeros(2500)
    peak = ledger.seen["peak_bytes"]
    del second, third, fourth
    with ledger:
        model(torch.ones(10, 100)).sum().backward()
        torch.zeros(1)
    return peak, ledger.seen["parameters", "measured"], ledger.seen["gradients", "measured"]


def test_the_ledger_counts_what_is_alive_not_what_was():
    peak, parameters, gradients = world(1).run(live_bytes)[0]
    assert parameters == gradients == 4 * 5000
    assert peak == parameters + 4 * (1000 + 3000)


def slow_all_reduce(path):
    """On a rank: the gradient after wait_for_gradients(), when all-reduces take their time."""
    lesson = load(path)
    ddp = lesson.DDP(nn.Linear(1, 1, bias=False))
    all_reduce = dist.all_reduce

    class Late:
        def __init__(self, tensor, group):
            self.tensor, self.group = tensor, group

        def wait(self):
            all_reduce(self.tensor, group=self.group)

    dist.all_reduce = lambda tensor, group, async_op: Late(tensor, group)
    try:
        ddp(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
        ddp.wait_for_gradients()
    finally:
        dist.all_reduce = all_reduce
    return ddp.module.weight.grad.item()


def check_wait(path):
    assert world(3).run(slow_all_reduce, path) == [1, 1, 1]


def test_ddp_waits_for_every_all_reduce():
    check_wait(DDP)


def order_of_events(path, bucket_mb):
    """On a rank: "launch" of an all-reduce, "gradient" when a parameter has its own, "end" of backward()."""
    lesson, events = load(path), []
    config = lesson.parse((TINY + " --batch 12").split())
    device, text = lesson.set_up(config)
    model = lesson.GPT(config)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: events.append("gradient"))
    ddp = lesson.DDP(model, bucket_mb=bucket_mb)
    all_reduce, works = dist.all_reduce, []

    def recorded(tensor, **options):
        events.append("launch")
        work = all_reduce(tensor, **options)
        works.append(work)
        return work

    dist.all_reduce = recorded
    try:
        for inputs, targets in lesson.microbatches(
            config, text, 1, device, dist.get_rank(), dist.get_world_size()
        ):
            ddp(inputs, targets).backward()
        events.append("end")
        ddp.wait_for_gradients()
    finally:
        dist.all_reduce = all_reduce
    return events, all(work is not None and hasattr(work, "is_completed") for work in works)


def check_overlap(path):
    for events, asynchronous in world(2).run(order_of_events, path, 0.02):
        assert asynchronous, "an all-reduce was waited for where it was launched"
        gradients = [i for i, event in enumerate(events) if event == "gradient"]
        launches = [i for i, event in enumerate(events) if event == "launch"]
        assert len(launches) > 3
        assert launches[0] < gradients[len(gradients) // 4], "the first all-reduce started late"
        assert events.index("end") > launches[-1], "an all-reduce waited for the end of backward"


def test_ddp_launches_while_backward_still_computes():
    check_overlap(DDP)


def test_first_bucket_is_small_and_buckets_double():
    lesson = load(DDP)
    params = [torch.zeros(2**16, requires_grad=True) for _ in range(200)]  # 0.25 MiB each
    sizes = [len(bucket.params) / 4 for bucket in lesson.fill_buckets(params, 25)]
    assert sizes == [1, 2, 4, 8, 16, 19]
    assert [len(bucket.params) for bucket in lesson.fill_buckets(params, 0)] == [1] * 200


# ---- the command line ----

KEYS = {"lesson", "world_size", "backend", "device", "dtype", "n_params", "losses", "grad_norms", "step_ms"}
KEYS |= {"held", "sent", "peak_bytes"}


def torchrun(size, *command, **options):
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={size}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*launcher, *command], cwd=ROOT, env=environment, text=True, **options)


def on_ranks(size, path, flags, folder):
    """Ranks as torchrun starts them, but forked from a process that has loaded torch: started, one a rank.

    What a rank writes is in folder/RANK.out and folder/RANK.err.
    """
    processes = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for rank in range(size):
        environment = {**world, "RANK": rank, "LOCAL_RANK": rank} if size > 1 else {}
        arguments = (path, flags, f"{folder}/{rank}", {name: str(v) for name, v in environment.items()})
        processes.append(FORK.Process(target=command_line, args=arguments, daemon=True))
        processes[-1].start()
    return processes


def exit_codes(processes, timeout=60):
    """Those of all processes, which must end by themselves."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert None not in codes, f"after {timeout} s exit codes are {codes}"
    return codes


def command_line(path, flags, files, environment):
    """In a process of its own: what `python lesson.py flags` does, with its output in files."""
    for end, descriptor in ("out", 1), ("err", 2):
        os.dup2(os.open(f"{files}.{end}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    os.environ.update(environment)
    sys.argv = [path, *flags]
    runpy.run_path(path, run_name="__main__")


def check_output(lesson, size, out, folder):
    """The lines of a run of 3 steps, and its files in the folder."""
    who = f"{size} {lesson.threads.strip('-')} threads" if lesson.threads else f"{size} ranks gloo"
    who = "1 rank gloo" if size == 1 else who
    assert out.startswith(f"{lesson.name} | {who}/cpu | ")
    line = r"^step [1-3]/3 \| loss \d\.\d{4} \| grad norm [\d.]+ \| [\d.]+ ms \| [\d.]+ k tok/s$"
    assert len(re.findall(line, out, re.M)) == 3
    result = json.loads((folder / "out.json").read_text())
    assert set(result) == {*KEYS, *lesson.keys}
    assert len(result["losses"]) == 3 and len(result["step_ms"]) == 2
    assert "tokens.weight" in torch.load(folder / "out.pt")
    traces = len(list((folder / "trace").glob(f"{lesson.name}-rank*.json")))
    assert traces == (1 if lesson.threads else size)
    assert not list(folder.glob("*.tmp"))


@every_lesson
def test_the_command_line_prints_and_writes_all_it_says(lesson, tmp_path):
    size = lesson.worlds[-1]
    threads = f" {lesson.threads} {size}" if lesson.threads else ""
    files = f"--json {tmp_path}/out.json --save {tmp_path}/out.pt --trace {tmp_path}/trace"
    flags = f"{TINY} --batch 12 {files}{lesson.flags}{threads}".split()
    processes = on_ranks(1 if threads else size, lesson.path, flags, tmp_path)
    assert not any(exit_codes(processes)), (tmp_path / "0.err").read_text()
    check_output(lesson, size, (tmp_path / "0.out").read_text(), tmp_path)
    assert all(file.stat().st_size == 0 for file in tmp_path.glob("[1-9].out"))


def test_the_command_of_the_readme(tmp_path):
    files = f"--json {tmp_path}/out.json --save {tmp_path}/out.pt --trace {tmp_path}/trace"
    process = torchrun(2, "ddp.py", *f"{TINY} --batch 12 {files}".split(), stdout=-1, stderr=-1)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    check_output(LESSONS[3], 2, out, tmp_path)


BAD = [
    "--size huge",
    "--batch 0",
    "--batch -4",
    "--batch 7 --accum 2",
    "--steps 0",
    "--steps many",
    "--accum 0",
    "--heads 5",
    "--width 0",
    "--vocab 100",
    "--lr -1",
    "--lr nan",
    "--clip -1",
    "--seed -1",
    "--seed 99999999999999999999",
    "--lr inf",
    "--dtype fp8",
    "--device cuda",
    "--data {tmp}/no/such/file",
    f"--data {TEXT} --context 100000",
    "--data {tmp}",
    "--save {tmp}/no/such/file",
    "--save {tmp}",
    "--save {tmp}/new/",
    f"--trace {TEXT}",
    "--json {tmp}/no/such/file",
    "--trace {tmp}/no/such/traces/",
    "--no-such-flag",
]


def leave(path, flags, files):
    """In a process of its own: a whole run, and then the process group's workers must be gone.

    One that is left may want the interpreter while that shuts down, which aborts the process now and then.
    """
    command_line(path, flags, files, {})
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    sys.exit(any("gloo_runloop" in name for name in threads))


def check_exit(path, tmp_path):
    arguments = (path, f"{TINY} --batch 4".split(), f"{tmp_path}/0")
    process = FORK.Process(target=leave, args=arguments)
    process.start()
    assert exit_codes([process]) == [0], "the process group outlives destroy_process_group()"


@every_lesson
def test_no_thread_of_the_process_group_is_left_at_the_end(lesson, tmp_path):
    check_exit(lesson.path, tmp_path)


def refuse_all(path, rows, file):
    """In a process of its own: [exit code, what was written on stderr] for each row of flags."""
    answers = []
    for row in rows:
        sys.argv, errors, code = [path, *row], io.StringIO(), 0
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(errors):
                runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = traceback.format_exc()
        answers.append((code, errors.getvalue()))
        if dist.is_initialized():
            dist.destroy_process_group()
        if code != 2:
            break
    Path(file).write_text(json.dumps(answers))


def check_line(path, flags, lines):
    """One line that names the lesson and a flag or its value."""
    assert len(lines) == 1 and lines[0].startswith(f"{Path(path).name}: "), f"{flags}: {lines}"
    names = [word for word in flags if word.startswith("-") and not word[1:2].isdigit()]
    named = any(name in lines[0] for name in names) or flags[1] in lines[0]
    assert named, f"{flags}: {lines[0]} does not name it"


def check_refusals(lesson, path, rows, tmp_path):
    rows = [row.format(tmp=tmp_path).split() for row in rows]
    given = [[*([] if "--data" in row else ["--data", TEXT]), *row] for row in rows]
    file = tmp_path / "answers"
    process = FORK.Process(target=refuse_all, args=(path, given, str(file)), daemon=True)
    process.start()
    assert exit_codes([process]) == [0]
    for row, (code, errors) in zip(rows, json.loads(file.read_text())):
        assert code == 2, f"{row}: exit code {code}, {errors}"
        check_line(path, row, errors.splitlines())
    assert len(json.loads(file.read_text())) == len(rows)


def check_rank_refusals(lesson, path, tmp_path):
    """Exit code 2 on both of two ranks, and one line, from rank 0."""
    for row in lesson.bad_on_ranks:
        codes = exit_codes(on_ranks(2, path, ["--data", TEXT, *row.split()], tmp_path))
        first, second = [(tmp_path / f"{rank}.err").read_text().splitlines() for rank in range(2)]
        assert codes == [2, 2] and second == [], f"{row}: exit codes {codes}, {first}, {second}"
        check_line(path, row.split(), first)


@every_lesson
def test_bad_input_ends_in_one_line_and_exit_code_2(lesson, tmp_path):
    check_refusals(lesson, lesson.path, [*BAD, *lesson.bad_flags], tmp_path)


@every_lesson_of_ranks
def test_bad_input_on_several_ranks_is_one_line_from_rank_0(lesson, tmp_path):
    check_rank_refusals(lesson, lesson.path, tmp_path)


@pytest.mark.parametrize("name", ["single", "dp_threads", "dp_async"])
def test_a_lesson_of_one_process_refuses_a_world_of_several(name, tmp_path):
    assert exit_codes(on_ranks(2, str(ROOT / f"{name}.py"), [], tmp_path)) == [2, 2]
    assert re.fullmatch(f"{name}.py: this is .* without torchrun.*\n", (tmp_path / "0.err").read_text())
    assert (tmp_path / "1.err").read_text() == ""


# the ranks of checkpointing.py talk in one policy only
ENDLESS = ["--steps", "100000", "--layers", "1", "--width", "36", "--heads", "3", "--batch", "12"]


@every_lesson_of_ranks
def test_no_rank_waits_for_a_dead_one(lesson, tmp_path):
    flags = ["--policy", "partitioned"] if lesson.name == "checkpointing" else []
    processes = on_ranks(3, lesson.path, [*ENDLESS, *flags], tmp_path)
    deadline, out = time.monotonic() + 60, tmp_path / "0.out"
    while not (out.exists() and "step      3/" in out.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    started = "step      3/" in out.read_text()
    processes[1].kill()
    first, killed, last = exit_codes(processes)
    assert started and killed == -signal.SIGKILL and first and last


def test_a_killed_rank_ends_the_job_and_is_named():
    mark = f"MINIDIST_TEST={os.getpid()}-{time.monotonic()}"
    os.environ.update([mark.split("=")])
    process = torchrun(3, "ddp.py", *ENDLESS, stdout=-1, stderr=subprocess.STDOUT)
    for line in process.stdout:
        if re.match(r"step +3/", line):
            break
    ranks = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_text().split("\0")
        except OSError:
            continue
        if mark in environment and "RANK=1" in environment:
            ranks[int(folder.name)] = 1
    assert len(ranks) == 1
    os.kill(next(iter(ranks)), signal.SIGKILL)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert re.search(r"rank\s*: 1 ", rest) and "Signal 9 (SIGKILL)" in rest


# ---- the table of run.sh ----


@pytest.mark.parametrize("spoil", [None, "losses", "weights", "missing"])
def test_the_table_fails_a_lesson_that_differs_by_name(spoil, tmp_path, capsys):
    result, weights = run(SINGLE, 1, f"{TINY} --batch 12")
    for name in ("single", "ddp"):
        own, tensors = copy.deepcopy(result), {key: tensor.clone() for key, tensor in weights.items()}
        if name == "ddp" and spoil == "losses":
            own["losses"][1] += 2e-4
        if name == "ddp" and spoil == "weights":
            tensors["norm.bias"][3] += 2e-4
        if name == "single" or spoil != "missing":
            (tmp_path / f"{name}.json").write_text(json.dumps(own))
            torch.save(tensors, tmp_path / f"{name}.pt")
    failed = load(ROOT / "tools" / "compare.py").main(tmp_path, ["ddp"])
    lines = capsys.readouterr().out.splitlines()
    assert failed == (spoil is not None)
    assert lines[-1] == ("0 passed, 1 failed" if spoil else "1 passed, 0 failed")
    verdict = {
        None: "same",
        "losses": "losses differ",
        "weights": "weights differ",
        "missing": "did not finish",
    }
    assert lines[3].startswith("ddp ") and lines[3].endswith(verdict[spoil])


ON_A_HOST = """
import json, sys, test_all
for lesson in test_all.RANKED:
    flags = f"{test_all.TINY} --batch 12 --dtype fp64{lesson.flags}"
    result = test_all.train(lesson.path, flags)
    if test_all.dist.get_rank() == 0:
        print("LOSSES", json.dumps([lesson.name, result["losses"]]), flush=True)
"""


def test_every_lesson_runs_over_two_hosts(tmp_path):
    """Each rank in a network namespace of its own, with an address of its own, over limited links."""
    tools = shutil.which("ip") and shutil.which("tc")
    if os.getuid() or not tools:
        pytest.skip("network namespaces need root and iproute2")
    script = tmp_path / "script.py"
    script.write_text(ON_A_HOST)
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = [str(ROOT / "tools" / "hosts.sh"), "2", "1gbit", "--", str(script)]
    process = subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True)
    out, errors = process.communicate(timeout=240)
    if "Operation not permitted" in errors:
        pytest.skip("this machine allows no network namespaces")
    assert process.returncode == 0, errors
    losses = dict(json.loads(line) for line in re.findall(r"^LOSSES (.*)$", out, re.M))
    assert list(losses) == [lesson.name for lesson in RANKED]
    for name, own in losses.items():
        plain, _ = run(SINGLE, 1, f"{TINY} --batch 12 --dtype fp64")
        assert apart(own, plain["losses"]) <= 1e-10, name
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert f"md{process.pid}-" not in left, "namespaces are left behind"


def test_hosts_sh_says_how_to_call_it():
    tool = str(ROOT / "tools" / "hosts.sh")
    done = subprocess.run([tool, "2"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: tools/hosts.sh HOSTS RATE")
    for words in (["two", "1gbit", "--", "ddp.py"], ["2", "1gbit", "--ranks-per-host", "2"]):
        done = subprocess.run([tool, *words], capture_output=True, text=True)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_run_sh_says_which_lessons_there_are():
    done = subprocess.run(["./run.sh", "nonsense"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "nonsense" in done.stderr and "ddp" in done.stderr


# ---- plan.py ----

PLAN = str(ROOT / "plan.py")
LLAMA = "--layers 32 --hidden 4096 --heads 32 --vocab 128256 --seq 2048"
GPT3 = "--layers 96 --hidden 12288 --heads 96 --vocab 51200 --seq 2048"
SEVENTY = "--layers 80 --hidden 8192 --heads 64 --vocab 128256 --seq 4096"


def job_of(plan, flags, **values):
    return plan.changed(plan.parse(flags.split()), **values)


def digits(text):
    """The numbers of a line of text, as they are printed."""
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", text)


def test_plan_borrows_nothing_and_has_short_functions():
    tree = ast.parse(Path(PLAN).read_text())
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names = [node.module] if isinstance(node, ast.ImportFrom) else names
        assert all(name.split(".")[0] in sys.stdlib_module_names for name in names), names
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 40, f"{node.name} is longer than 40 lines"
    headings = re.findall(r"^([A-Z][a-z ]+)$", ast.get_docstring(tree), re.M)
    assert headings == ["Idea", "Holds", "Talks", "Run", "Expect", "Left out"]


def check_figure_1(path):
    """Figure 1 of ZeRO (arXiv 1910.02054), by the function and by the table that a user sees."""
    plan = load(path)
    figures = [sum(plan.states(stage, 7_500_000_000, 64).values()) for stage in range(4)]
    assert [f"{size / 1e9:.3g}" for size in figures] == ["120", "31.4", "16.6", "1.88"]
    assert figures[0] == 16 * 7.5e9 and figures[3] == 16 * 7.5e9 / 64
    command = [sys.executable, path, "--params", "7.5b", "--gpus", "64", "--gpu-gb", "32"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = {line.split()[0]: line.split()[5:8] for line in lines}
    assert rows["DP"] == ["120", "29.5", "no"]
    assert rows["ZeRO-1"] == ["31.4", "29.5", "yes"]
    assert rows["ZeRO-2"] == ["16.6", "29.5", "yes"]
    assert rows["ZeRO-3"] == ["1.88", "44.3", "yes"]
    assert lines[-1].startswith("Take ZeRO-2: ")
    assert all(
        line in ast.get_docstring(ast.parse(Path(path).read_text())) for line in map(str.rstrip, lines)
    )


def test_plan_shows_figure_1_and_its_docstring_the_output():
    check_figure_1(PLAN)


def check_counts(path):
    """The closed form, beside the true counts of the toy GPT; in parts, beside how the lessons split it."""
    plan, lesson = load(path), load(SINGLE)
    assert plan.SIZES == lesson.SIZES
    for size in lesson.SIZES:
        config = lesson.parse([])
        for name, value in zip(lesson.SHAPE, lesson.SIZES[size]):
            setattr(config, name, value)
        with torch.device("meta"):
            model = lesson.GPT(config)
        shape = plan.Shape(*lesson.SIZES[size])
        assert plan.whole_model(shape) == sum(p.numel() for p in model.parameters())
        assert job_of(plan, f"--size {size}").params == plan.whole_model(shape)
        assert (shape.hidden, shape.seq) == (config.width, config.context)
        for t in (t for t in (1, 2, 4) if shape.heads % t == 0):  # row-parallel biases, norms, positions
            whole = [
                p for name, p in model.named_parameters() if re.search("norm|position|(proj|down).bias", name)
            ]
            count = sum(p.numel() for p in model.parameters()) - shape.vocab * shape.hidden
            split = (count - sum(p.numel() for p in whole)) // t + -(-shape.vocab // t) * shape.hidden
            own = plan.parameters(shape.layers, shape.hidden, shape.vocab, shape.seq, t)
            assert own == split + sum(p.numel() for p in whole)
        for p in range(2, shape.layers + 1):  # together the stages have all, and the tied weight twice
            job = job_of(plan, f"--size {size}")
            assert (
                sum(plan.replica(job, 1, p, i)[0] for i in range(p))
                == job.params + shape.vocab * shape.hidden
            )


def test_plans_counts_are_the_toy_gpts():
    check_counts(PLAN)


def check_whole_model(path):
    """Published figures of whole models, in GiB, to every digit."""
    plan, GiB = load(path), 2**30
    shape = job_of(plan, LLAMA).shape
    fp32 = plan.states(0, plan.parameters(32, 4096, 128256, 1024), 1, "fp32")
    assert fp32["parameters"] / GiB == 25.979034423828125
    assert plan.activations(shape, 1, ends=(True, False)) / GiB == 28.5078125
    # The same width, but of gated MLPs and grouped heads (13 h^2 a layer), with a head of its own; no norms,
    # and of the optimizer only the two moments, which are what fp32 has.
    matrices = 2 * 4096 * 128256 + 32 * 13 * 4096**2
    mixed, moments = (plan.states(0, matrices, 1, precision) for precision in ("mixed", "fp32"))
    assert [f"{mixed[name] / GiB:.3f}" for name in ("parameters", "gradients")] == ["14.957", "14.957"]
    assert f"{moments['optimizer'] / GiB:.3f}" == "59.828"
    assert mixed["optimizer"] - moments["optimizer"] == 4 * matrices  # the fp32 weights


def test_plan_comes_to_published_figures_of_whole_models():
    check_whole_model(PLAN)


def check_layer(path):
    """Table 2 of arXiv 2205.05198, whose numbers are 16 bits, and what it says of GPT-3."""
    plan = load(path)
    shape, b, t = job_of(plan, GPT3).shape, 3, 8
    _, a, h, s, _ = shape
    sbh, scores = s * b * h, 5 * a * s / h
    assert scores == 80
    expected = {
        ("none", 1, False): sbh * (34 + scores),
        ("none", t, False): sbh * (10 + 24 / t + scores / t),
        ("none", t, True): sbh / t * (34 + scores),
        ("selective", t, False): sbh * (10 + 24 / t),
        ("selective", t, True): 34 * sbh / t,
        ("full", t, False): 2 * sbh,
        ("full", t, True): 2 * sbh / t,
    }
    for how, size in expected.items():
        assert plan.layer_activations(shape, b, *how) == size, how
        flash = ("selective" if how[0] == "none" else how[0], *how[1:])
        size = expected.get(flash, 34 * sbh)
        assert plan.layer_activations(shape, b, *how, flash=True) == size, how
    fp32 = plan.layer_activations(shape, b, "none", t, True, 4)
    assert fp32 == sbh / t * (2 * 34 - 2 + scores * 9 / 5)  # masks stay a byte, of 2 and of 5 parts one
    saved = 1 - plan.layer_activations(shape, b, "selective") / plan.layer_activations(shape, b)
    assert f"{saved:.0%}" == "70%"
    # Section 4.3, of all 96 layers with sequence parallelism: the embedding's mask, last norm, head, logits.
    whole = 96 * sbh / t * (34 + scores) + sbh / t + 4 * sbh / t * (1 + shape.vocab / h)
    assert plan.activations(shape, b, "none", t, True) == whole
    # A layer that is computed again is whole for a moment, more than what the head has.
    again = plan.activations(shape, b, "full", t, True) - 96 * 2 * sbh / t - sbh / t
    assert again == sbh / t * (34 + scores) - 2 * sbh / t > 4 * sbh / t * (1 + shape.vocab / h)
    # In fp32 the norm's and the head's inputs take twice that, the logits as much.
    wide, kept = (what(shape, b, "none", t, True, 4) for what in (plan.activations, plan.layer_activations))
    assert wide == 96 * kept + sbh / t * (1 + 8 + 4 * shape.vocab / h)
    assert plan.activations(shape, b, in_flight=5, ends=(False, False)) == 5 * 96 * sbh * (34 + scores)


def test_plans_activations_are_those_of_table_2():
    check_layer(PLAN)


def check_plan_wire(path):
    """Elements per step in P(N-1)/N; 8 bsh a layer of tensor parallelism; bsh each way over each boundary."""
    plan, P, N = load(path), 640, 64
    for k in (1, 4):
        elements = [plan.wire(stage, P, N, k, width) / width for stage in range(4) for width in (2, 4)]
        assert elements == [x * P * (N - 1) / N for x in (2, 2, 2, 2, 1 + k, 1 + k, 3 * k, 3 * k)]
    job = job_of(plan, "--size gpt2 --micro-batch 2 --accum 3 --gpus 16")
    layers, _, h, s, v = job.shape
    bsh = 2 * s * h
    for recompute, sequence, times in ("none", False, 8), ("selective", True, 10), ("full", False, 12):
        moved = plan.tensor_wire(job.shape, 2, recompute, 4, sequence, 2, 3)
        assert moved == 2 * times * 3 * layers * bsh * 3 / 4
    sent = [plan.replica(job, 1, 4, stage)[2] for stage in range(4)]  # 12 microbatches
    assert sent == [2 * 12 * bsh + 2 * v * h, 2 * 24 * bsh, 2 * 24 * bsh, 2 * 12 * bsh + 2 * v * h]
    split = plan.changed(job, sequence_parallel=True)  # what crosses a boundary is split as well
    for tensor, asked in (2, job), (2, split):
        own = job.shape._replace(layers=layers // 4)
        inside = plan.tensor_wire(own, 2, "none", tensor, asked.sequence_parallel, 2, 24)
        crossing = 2 * 2 * 24 * bsh / (2 if asked.sequence_parallel else 1)
        assert plan.replica(asked, tensor, 4, 1)[2] == inside + crossing
    found = plan.row(job, 1, 2, 4)
    params, _, within = plan.replica(job, 2, 4, 0)
    assert found["bytes"]["sent_per_step"] == within + plan.wire(1, params, 2, 24)
    assert found["data"] == 2 and found["idle"] == 3 / (24 + 3)
    assert plan.row(job, 3)["bytes"]["sent_per_step"] == plan.wire(3, job.params, 16, 3)


def test_plan_sends_what_the_papers_say():
    check_plan_wire(PLAN)


def stages_of_all(plan, job, found):
    """(most held, most sent) by any stage."""
    held, sent, data = [], [], found["data"]
    for stage in range(found["pipeline"]):
        params, kept, within = plan.replica(job, found["tensor"], found["pipeline"], stage)
        held.append(sum(plan.states(1, params, data, job.precision).values()) + kept)
        sent.append(within + plan.wire(1, params, data, width=plan.BYTES[job.precision][0]))
    return max(held), max(sent)


def check_stages_of_plan(path, flags="--layers 14 --hidden 24 --heads 12 --vocab 16 --seq 64 --gpus 96"):
    """Every legal t x p x d, each with the stage that holds most and the one that sends most."""
    plan = load(path)
    job = job_of(plan, flags)
    meshes = plan.meshes(job)
    for found in meshes:
        most = found["bytes"]
        assert (most["sum"], most["sent_per_step"]) == stages_of_all(plan, job, found), found
    inside = min(job.gpus, job.gpus_per_node)
    legal = {
        (t, p, job.gpus // (t * p))
        for t in range(1, inside + 1)
        for p in range(1, job.shape.layers + 1)
        if job.shape.heads % t == inside % t == job.gpus % (t * p) == 0
        and t * p > 1
        and not (job.sequence_parallel and job.shape.seq % t)
    }
    assert {(found["tensor"], found["pipeline"], found["data"]) for found in meshes} == legal


SHAPES = st.builds(
    lambda layers, heads, head, seq, vocab: (
        f"--layers {layers} --heads {heads} --hidden {heads * head} --seq {8 * seq} --vocab {vocab}"
    ),
    *(st.integers(1, most) for most in (40, 8, 64, 64, 9999)),
)
HOW = st.builds(
    lambda *flags: " ".join(flags),
    st.sampled_from(["--precision mixed", "--precision fp32"]),
    st.sampled_from(["--recompute none", "--recompute selective", "--recompute full"]),
    st.sampled_from(["", "--sequence-parallel"]),
    st.sampled_from(["", "--attention math"]),
    st.integers(1, 4).map("--micro-batch {}".format),
    st.integers(1, 4).map("--accum {}".format),
)
often = hypothesis.settings(max_examples=100, deadline=None)


@often
@hypothesis.given(shape=SHAPES, how=HOW, gpus=st.integers(1, 64))
def test_a_plans_rows_are_of_the_legal_meshes_and_their_fullest_stages(shape, how, gpus):
    check_stages_of_plan(PLAN, f"{shape} {how} --gpus {gpus}")


def check_order(path, flags="--params 7.5b", gpus=64, more=3):
    """More ranks hold no more each, and a later stage of ZeRO no more than an earlier one."""
    plan = load(path)
    sums = [
        [r["bytes"]["sum"] for r in plan.replicas(job_of(plan, f"{flags} --gpus {n}"))]
        for n in (gpus, gpus + more)
    ]
    assert all(later <= earlier for later, earlier in zip(sums[1], sums[0]))
    assert all(row == sorted(row, reverse=True) for row in sums)


MODELS = st.one_of(st.integers(1, 10**13).map("--params {}".format), st.tuples(SHAPES, HOW).map(" ".join))


@often
@hypothesis.given(flags=MODELS, gpus=st.integers(1, 5000), more=st.integers(0, 5000))
def test_more_ranks_or_a_later_stage_never_need_more_memory(flags, gpus, more):
    check_order(PLAN, flags, gpus, more)


@often
@hypothesis.given(
    flags=MODELS,
    gpus=st.integers(1, 500),
    gb=st.floats(0.001, 1000),
    more=st.sampled_from(["gpus", "gb", "params"]),
    times=st.integers(1, 5),
)
def test_what_fits_goes_on_fitting_with_more_gpus_more_memory_or_fewer_parameters(
    flags, gpus, gb, more, times
):
    plan = load(PLAN)
    job = job_of(plan, f"{flags} --gpus {gpus} --gpu-gb {gb}")
    better = {
        "gpus": {"gpus": gpus * times},
        "gb": {"gpu_gb": gb * times},
        "params": {"params": -(-job.params // times)},
    }[more]
    before, after = (plan.replicas(each) for each in (job, plan.changed(job, **better)))
    for one, other in zip(before, after):
        assert other["fits"] or not one["fits"]
        assert one["fits"] == (one["bytes"]["sum"] <= gb * 1e9)


def check_largest(path, flags="--params 1m", gpus=64, gb=32.0):
    """The largest model and batch fit; one more, or 1 % more, does not."""
    plan = load(path)
    job = job_of(plan, f"{flags} --gpus {gpus} --gpu-gb {gb}")
    rows = plan.replicas(job) + plan.meshes(job)[:8]
    for found in rows:
        fits = lambda job: plan.row(job, found["zero"], found["tensor"], found["pipeline"])["fits"]  # noqa: B023, E731
        most = plan.largest_of(job, found)
        if not job.shape:
            at = lambda params: plan.changed(job, params=params)  # noqa: E731
            assert fits(at(most["params"])) and not fits(at(most["params"] + 1))
            assert not fits(at(math.ceil(1.01 * most["params"])))
            continue
        at = lambda batch: plan.changed(job, micro_batch=batch)  # noqa: E731
        assert (most["micro_batch"] > 0) >= found["fits"]
        assert most["micro_batch"] == 0 or fits(at(most["micro_batch"]))
        assert not fits(at(most["micro_batch"] + 1))
        layers = most["layers"]
        assert not fits(plan.deeper(job, max(layers + 1, found["pipeline"])))
        if layers:
            assert layers >= found["pipeline"] and fits(plan.deeper(job, layers))
            assert most["params"] == plan.whole_model(job.shape._replace(layers=layers))


@often
@hypothesis.given(flags=MODELS, gpus=st.integers(1, 64), gb=st.floats(0.001, 100))
def test_the_largest_model_and_batch_fit_and_more_does_not(flags, gpus, gb):
    check_largest(PLAN, flags, gpus, gb)


ADVICE = [  # the rule, in its order
    ("--params 7.5b --gpus 64 --gpu-gb 120", "Take DP: 120 GB fit"),
    ("--params 7.5b --gpus 64 --gpu-gb 119", "Take ZeRO-2: 16.6 GB fit where DP needs 120 GB"),
    ("--params 7.5b --gpus 64 --gpu-gb 32 --accum 2", "Take ZeRO-1: 31.4 GB fit where DP needs 120 GB"),
    ("--params 7.5b --gpus 64 --gpu-gb 31 --accum 2", "Take ZeRO-2: 16.6 GB fit where ZeRO-1 needs 31.4 GB"),
    ("--params 7.5b --gpus 64 --gpu-gb 16", "Take ZeRO-3: 1.88 GB fit where ZeRO-2 needs 16.6 GB"),
    ("--params 7.5b --gpus 64 --gpu-gb 1.87", "Nothing fits: ZeRO-3 needs 1.88 GB. 65 GPUs would do."),
    (f"{SEVENTY} --gpus 64", "Take ZeRO-3 --recompute full: 24.0 GB fit where ZeRO-2 needs 153 GB"),
    (f"{SEVENTY} --gpus 64 --recompute all", "Take ZeRO-3 --recompute full: 24.0 GB fit"),
    (f"{SEVENTY} --gpus 64 --attention math", "Take ZeRO-3 --recompute full: 28.2 GB fit where ZeRO-2 needs"),
    ("--size gpt2 --micro-batch 64 --gpu-gb 24", "Take DP --micro-batch 32 --accum 2: 19.0 GB fit, and"),
    (
        f"{SEVENTY} --gpus 640 --gpu-gb 11.7 --attention math",
        "Take t4 x p32 x d5 --recompute full: 11.7 GB fit",
    ),
    (f"{SEVENTY} --gpus 640 --gpu-gb 9", "Take t4 x p20 x d8 --recompute full --sequence-parallel: 7.84 GB"),
    (
        f"{SEVENTY} --gpus 8 --micro-batch 4",
        "Nothing fits: ZeRO-3 needs 139 GB even with --recompute full. 15 GPUs would do.",
    ),
    (f"{SEVENTY} --gpus 8 --gpu-gb 7.6", "Nothing fits: one sequence's activations take 7.64 GB"),
]


def check_advice(path):
    """The simplest that fits, the flags that it needs to; else from how many GPUs on it would."""
    plan = load(path)
    for flags, expected in ADVICE:
        job = plan.parse(flags.split())
        policies = plan.RECOMPUTE if job.recompute == "all" else [job.recompute]
        best, why = plan.advise([plan.changed(job, recompute=policy) for policy in policies])
        assert why.startswith(expected), (flags, why)
        assert why.count("\n") == 0 and why.endswith(".")
        if not best:
            assert why.startswith("Nothing fits")
            enough = re.search(r"(\d+) GPUs would", why)
            lightest = f"{flags} --micro-batch 1" + " --recompute full" * bool(job.shape)
            fits = lambda gpus: plan.row(job_of(plan, f"{lightest} --gpus {gpus}"), 3)["fits"]  # noqa: B023, E731
            assert not enough or (fits(int(enough[1])) and not fits(int(enough[1]) - 1))
            continue
        changes = re.match(r"Take [^-]*(?:ZeRO-\d)?((?: --[^:]*)?):", why)[1]
        again = job_of(plan, flags.replace("--recompute all", "") + changes)
        assert best in plan.replicas(again) + plan.meshes(again) and best["fits"]
        assert again.micro_batch * again.accum == job.micro_batch * job.accum


def test_plan_recommends_the_simplest_that_fits():
    check_advice(PLAN)


TINY_GPT = "--layers {} --heads 4 --{} 32 --{} 16 --vocab 256"


def lesson_run(name, size, flags, layers=3):
    shape = TINY_GPT.format(layers, "width", "context")
    return run(
        str(ROOT / f"{name}.py"), size, f"{shape} --batch 12 --steps 1 --data {ROOT / 'LICENSE'} {flags}"
    )[0]


def formula(result, *names):
    """Bytes held or sent, by the lesson's own formulas."""
    return sum((result["held"] | result["sent"])[name]["formula"] for name in names)


def check_beside_zero(path):
    """What zero1.py to zero3.py say of themselves, less the units that are whole for a moment."""
    plan, k, N = load(path), 3, 2
    job = job_of(plan, TINY_GPT.format(3, "hidden", "seq") + f" --gpus {N} --accum {k} --precision fp32")
    block = plan.parameters(1, 32, 256, 16, first=False, last=False)
    rest = job.params - 3 * block
    for dtype, width, precision in ("fp32", 4, "fp32"), ("bf16", 2, "mixed"):
        job = plan.changed(job, precision=precision)
        for stage, name in enumerate(("ddp", "zero1", "zero2", "zero3")):
            result, held = lesson_run(name, N, f"--accum {k} --dtype {dtype}"), plan.row(job, stage)["bytes"]
            whole = {"parameters": rest + 2 * block if stage == 3 else 0}
            whole["gradients"] = rest + 3 * block if stage > 1 else 0  # over gloo three, else two
            for part in ("parameters", "gradients", "optimizer"):
                assert formula(result, part) == held[part] + width * whole.get(part, 0), (name, part)
            if stage == 0:
                flags = 2 * width * (2 + 12 * 3 + 2) * (N - 1) // N  # whether each tensor was used
                assert formula(result, "all-reduce") == held["sent_per_step"] + flags
                continue
            once = k * width * (rest + 2 * block) * (N - 1) // N if stage == 3 else 0
            assert formula(result, "reduce-scatter", "all-gather") == held["sent_per_step"] - once, name


def test_plan_says_what_the_zero_lessons_say():
    check_beside_zero(PLAN)


def check_beside_tensor(path):
    """What tensor_parallel.py holds, and what a layer more adds to what it keeps and sends."""
    plan, N, k, w = load(path), 2, 2, 4
    layer = job_of(plan, TINY_GPT.format(1, "hidden", "seq")).shape
    b, tokens = 6, 6 * 16
    for sequence, kinds in (False, ["all-reduce"]), (True, ["reduce-scatter", "all-gather"]):
        flags = f"--accum {k}{' --sequence-parallel' * sequence}"
        few, more = (lesson_run("tensor_parallel", N, flags, layers) for layers in (2, 3))
        assert formula(more, "parameters") == w * plan.parameters(3, 32, 256, 16, N)
        added = sum(formula(more, kind) - formula(few, kind) for kind in kinds)
        assert added == plan.tensor_wire(layer, b, "none", N, sequence, w, k)
        kept = plan.layer_activations(layer, b, "selective", N, sequence, w)
        kept -= 2 * tokens * 32 // (N if sequence else 1)  # no dropout, so no masks
        statistics = 4 * w * tokens // (N if sequence else 1) + w * tokens * 4 // N  # of norms, of scores
        assert formula(more, "activations") - formula(few, "activations") == kept + statistics


def test_plan_says_what_tensor_parallel_says():
    check_beside_tensor(PLAN)


def check_beside_pipeline(path):
    """Messages, tied weight and microbatches in flight of pipeline.py; a checkpoint of checkpointing.py."""
    plan, lesson, p, w = load(path), load(PIPELINE), 3, 4
    job = job_of(plan, TINY_GPT.format(3, "hidden", "seq") + f" --gpus {p} --precision fp32 --micro-batch 4")
    result = lesson_run("pipeline", p, f"--schedule 1f1b --accum {p}")
    sent = [plan.replica(job, 1, p, stage)[2] for stage in range(p)]
    assert formula(result, "send") == sent[1]
    tied = formula(result, "all-reduce") - round(32 * (p - 1) / p)  # less the sums of loss and norm
    assert tied == w * 256 * 32 == sent[0] - sent[1] // 2
    for stage, actions in enumerate(lesson.build_schedule("1f1b", p, p, 1)):
        alive, own = lesson.in_flight(actions), job.shape._replace(layers=1)
        ends = stage == 0, stage == p - 1
        kept = plan.activations(own, 4, width=w, flash=True, in_flight=alive, ends=ends)
        assert plan.replica(job, 1, p, stage)[1] == kept
    few, more = (lesson_run("checkpointing", 1, "--policy full", layers) for layers in (2, 3))
    layer = plan.layer_activations(job.shape, 12, "full", width=w)
    assert formula(more, "activations") - formula(few, "activations") == layer


def test_plan_says_what_pipeline_and_checkpointing_say():
    check_beside_pipeline(PLAN)


BAD_PLANS = [  # what is wrong, and what the line must name
    ("", "--params"),
    ("--params 0", "--params"),
    ("--params -7b", "--params"),
    ("--params nan", "--params"),
    ("--params inf", "--params"),
    ("--params 1e400", "--params"),
    ("--params 2e15", "--params"),
    ("--params 7q", "--params"),
    ("--params b", "--params"),
    ("--params 0.1", "--params"),
    ("--size huge", "--size"),
    ("--size toy --params 70b", "--params"),
    ("--size toy --layers 0", "--layers"),
    ("--size toy --heads 5", "--heads"),
    ("--size toy --hidden 130", "--hidden"),
    ("--layers 2", "--heads --hidden --seq --vocab"),
    ("--params 1b --layers 2 --heads 2 --hidden 4 --vocab 256", "--seq"),
    ("--params 1b --gpus 0", "--gpus 0: must be 1 or more"),
    ("--params 1b --gpus -8", "--gpus -8: must be 1 or more"),
    ("--params 1b --gpus 1.5", "--gpus"),
    ("--params 1b --gpus 99999999999999999999", "--gpus"),
    ("--params 1b --gpus-per-node 0", "--gpus-per-node"),
    ("--params 1b --gpu-gb 0", "--gpu-gb"),
    ("--params 1b --gpu-gb -80", "--gpu-gb"),
    ("--params 1b --gpu-gb nan", "--gpu-gb"),
    ("--params 1b --gpu-gb inf", "--gpu-gb"),
    ("--params 1b --gpu-gb 80gb", "--gpu-gb"),
    ("--size toy --micro-batch 0", "--micro-batch"),
    ("--size toy --accum 0", "--accum"),
    ("--size toy --seq -1", "--seq"),
    ("--params 1b --precision fp8", "--precision"),
    ("--params 1b --recompute some", "--recompute"),
    ("--params 1b --recompute full", "--recompute"),
    ("--params 1b --sequence-parallel", "--sequence-parallel"),
    ("--params 1b --attention math", "--attention"),
    ("--params 1b --json /no/such/folder/file", "--json /no/such/folder/file"),
    ("--params 1b --json {tmp}", "--json"),
    ("--params 1b --no-such-flag", "--no-such-flag"),
    ("7b", "7b"),
]


def check_plan_refusals(path, tmp_path):
    for row, named in BAD_PLANS:
        command = [sys.executable, path, *row.format(tmp=tmp_path).split()]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == "", (row, done)
        lines = done.stderr.splitlines()
        assert len(lines) == 1 and lines[0].startswith(f"{Path(path).name}: "), (row, lines)
        assert named in lines[0], (row, lines)


def test_a_bad_plan_ends_in_one_line_and_exit_code_2(tmp_path):
    check_plan_refusals(PLAN, tmp_path)


def check_json(path, tmp_path):
    """--json has what the table shows, in bytes; '-' prints it and nothing else."""
    xl = "--size gpt2-xl --heads 32 --gpus 16 --micro-batch 2"
    flags = f"{xl} --recompute all --largest --json {tmp_path}/plan".split()
    printed = subprocess.run(
        [sys.executable, path, *flags], capture_output=True, text=True, check=True
    ).stdout
    flags[-1] = "-"
    alone = subprocess.run([sys.executable, path, *flags], capture_output=True, text=True, check=True).stdout
    written = json.loads((tmp_path / "plan").read_text())
    assert alone.startswith("{") and alone.endswith("}\n"), "more than JSON"
    assert json.loads(alone) == written | {"json": "-"}
    rows = [{key: value for key, value in row.items() if key != "largest"} for row in written["rows"]]
    assert written["why"] == printed.splitlines()[-1] and written["take"] in rows
    shown = [line.split() for line in printed.splitlines() if re.match(r"DP|ZeRO-|t\d+ x", line)]
    of = {" ".join((row["strategy"], row["recompute"])): row for row in written["rows"]}
    policies = iter(["none"] * 4 + ["selective"] * 4 + ["full"] * 4)
    assert len(of) == len(written["rows"]) == 3 * (4 + 13) and len(shown) > 12
    for words in (words for words in shown if words[1] != "x"):
        found = of[f"{words[0]} {next(policies)}"]
        sizes = found["bytes"]
        assert sizes["sum"] == sum(
            sizes[name] for name in ("parameters", "gradients", "optimizer", "activations")
        )
        assert [float(word) for word in words[1:7]] == [
            pytest.approx(size / 1e9, rel=6e-3) for size in sizes.values()
        ]
        assert words[7] == ("yes" if found["fits"] else "no")
        most = found["largest"]
        assert words[-2:] == [str(most["micro_batch"]), str(most["layers"])]


def test_plans_json_is_its_table_in_bytes(tmp_path):
    check_json(PLAN, tmp_path)


def test_without_a_shape_activations_are_a_dash_and_not_counted():
    plan = load(PLAN)
    for found in plan.replicas(job_of(plan, "--params 1b")):
        assert found["bytes"]["activations"] is None and list(plan.cells(found))[4] == "-"


def test_with_a_shape_params_say_how_many_there_are():
    plan = load(PLAN)
    one, two = (job_of(plan, f"--size 7.5b --gpus 8{flags}") for flags in ("", " --params 15b"))
    assert two.params == 15 * 10**9 and two.shape == one.shape
    for few, many in zip(plan.meshes(one), plan.meshes(two)):
        times = many["bytes"]["parameters"] / few["bytes"]["parameters"]
        assert times == pytest.approx(two.params / one.params)
        assert many["bytes"]["activations"] == few["bytes"]["activations"]


def test_plans_docstring_says_how_much_is_whole_for_a_moment():
    plan = load(PLAN)
    _, _, h, s, v = shape = plan.Shape(*plan.SIZES["7.5b"])
    block = plan.parameters(1, h, v, s, first=False, last=False)
    more = 2 * (
        2 * block + plan.whole_model(shape._replace(layers=0))
    )  # bytes in bf16, as zero2.py with NCCL
    assert f"at --size 7.5b {more / 1e9:.1f} GB of gradients" in plan.__doc__


README = ROOT / "README.md"


def test_the_readme_shows_what_plan_prints():
    text, plan = README.read_text(), load(PLAN)
    shown = re.findall(r"^\$ python plan.py (.*)\n((?:.+\n)+?)```$", text, re.M)
    assert len(shown) == 2
    for flags, lines in shown:
        done = subprocess.run(
            [sys.executable, PLAN, *flags.split()], capture_output=True, text=True, check=True
        )
        assert done.stdout == lines
    for gpus in (8, 64, 512):
        job = job_of(plan, f"{SEVENTY} --recompute full --gpus {gpus}")
        cells = [gpus, *(plan.giga(found["bytes"]["sum"]) for found in plan.replicas(job))]
        mesh = [found for found in plan.cheapest(plan.meshes(job)) if found["tensor"] == 8]
        cells += [f"{plan.giga(found['bytes']['sum'])} ({found['strategy']})" for found in mesh] or [
            "none fits"
        ]
        best, why = plan.advise([job])
        cells.append(why.split(":")[0] if best else why.split(". ")[1].rstrip("."))
        assert f"| {' | '.join(map(str, cells))} |\n" in text


# In MUTANTS: ("plan", promise, old, new); in CHECKS: lambda lesson, path, tmp_path: ...
PLAN_CHECKS = {
    "figure 1": lambda path, tmp_path: check_figure_1(path),
    "counts": lambda path, tmp_path: check_counts(path),
    "whole model": lambda path, tmp_path: check_whole_model(path),
    "table 2": lambda path, tmp_path: check_layer(path),
    "plan wire": lambda path, tmp_path: check_plan_wire(path),
    "plan stages": lambda path, tmp_path: [
        check_stages_of_plan(path),
        check_stages_of_plan(path, "--layers 4 --heads 4 --hidden 24 --seq 512 --vocab 50000 --gpus 8"),
    ],
    "order": lambda path, tmp_path: check_order(path),
    "largest": lambda path, tmp_path: [
        check_largest(path),
        check_largest(path, "--size small --gpus 8", 8, 1.0),
    ],
    "advice": lambda path, tmp_path: check_advice(path),
    "plan refusals": lambda path, tmp_path: check_plan_refusals(path, tmp_path),
    "plan json": lambda path, tmp_path: check_json(path, tmp_path),
    "beside tensor": lambda path, tmp_path: check_beside_tensor(path),
    "beside pipeline": lambda path, tmp_path: check_beside_pipeline(path),
    "beside zero": lambda path, tmp_path: check_beside_zero(path),
}
PLAN_MUTANTS = [
    ("plan", "figure 1", "(2, 2, 12)", "(2, 2, 8)"),
    ("plan", "figure 1", "size / 1e9:#.3g", "size / 2**30:#.3g"),
    ("plan", "figure 1", " * (ranks - 1) // ranks", ""),
    (
        "plan",
        "order",
        '("optimizer", "gradients", "parameters")[:stage]',
        '("optimizer", "gradients")[stage:]',
    ),
    ("plan", "counts", "+ 7 * hidden) // tensor + 6 * hidden", "+ 9 * hidden) // tensor + 4 * hidden"),
    ("plan", "counts", "(first or last)", "first"),
    ("plan", "counts", "(shape.layers + stage) // pipeline", "shape.layers // pipeline"),
    ("plan", "whole model", "ends[0] * numbers", "ends[0] * width * numbers"),
    ("plan", "table 2", 'recompute == "none" and', 'recompute != "full" and'),
    ("plan", "table 2", "peak = max(whole - kept, ends[1] * head)", "peak = ends[1] * head"),
    ("plan", "table 2", "(tensor if sequence_parallel else 1)\n    stored", "tensor\n    stored"),
    ("plan", "plan wire", "1 + microbatches, 3 * microbatches", "2 * microbatches, 3 * microbatches"),
    ("plan", "plan wire", '4 * (recompute == "full")', "0"),
    ("plan", "plan wire", "ends.count(False)", "2"),
    ("plan", "plan stages", "{0, 1, -layers % pipeline, pipeline - 1}", "{0, 1, pipeline - 1}"),
    ("plan", "plan stages", "-layers % pipeline, pipeline - 1}", "-layers % pipeline}"),
    ("plan", "plan stages", "min(job.gpus, job.gpus_per_node)", "job.gpus"),
    ("plan", "largest", "while high - low > 1:", "while high - low > 2:"),
    ("plan", "advice", 'row["strategy"] != "DP", ', ""),
    ("plan", "advice", 'accum": asked.accum * times', 'accum": asked.accum'),
    ("plan", "advice", "-(-asked.params // share)", "asked.params // share"),
    ("plan", "plan refusals", "except OSError as error:", "except KeyError as error:"),
    ("plan", "plan refusals", "(ValueError, OverflowError)", "ValueError"),
    ("plan", "plan refusals", "if value is None else value for", "if not value else value for"),
    ("plan", "plan json", 'if job.json != "-":', "if True:"),
    ("plan", "beside tensor", "times = 8 + 2 * sequence_parallel", "times = 8"),
    ("plan", "beside pipeline", "min(microbatches, pipeline - stage)", "microbatches"),
    ("plan", "beside zero", "-(-params // ranks)", "2 * params // ranks"),
    ("plan", "table 2", "and not flash", ""),
    (
        "plan",
        "table 2",
        "return width * numbers // (tensor if sequence_parallel else 1)",
        "return width * numbers",
    ),
    ("plan", "table 2", "(2 * width + 1) * batch", "5 * batch"),
    ("plan", "table 2", "4 * batch * shape.seq * -", "2 * width * batch * shape.seq * -"),
    ("plan", "plan wire", "shape.hidden // (tensor if job.sequence_parallel else 1)", "shape.hidden"),
    ("plan", "beside pipeline", 'job.attention == "flash"', "False"),
]


@pytest.mark.parametrize("name, promise, old, new", PLAN_MUTANTS)
def test_plan_mutant_is_rejected(name, promise, old, new, tmp_path):
    text = Path(PLAN).read_text()
    assert text.count(old) == 1, f"{text.count(old)} places to edit"
    mutant = tmp_path / "mutant" / f"{name}.py"
    mutant.parent.mkdir()
    mutant.write_text(text.replace(old, new))
    with pytest.raises(AssertionError):
        PLAN_CHECKS[promise](str(mutant), tmp_path)


# ---- tools/simulate.py ----

SIMULATE = str(ROOT / "tools" / "simulate.py")


def simulated(path, name, ranks, rank, flags, *backend):
    """What simulate() of the tool at `path` returns for a rank of a lesson."""
    with redirect_stdout(io.StringIO()):
        return load(path).simulate(str(ROOT / f"{name}.py"), ranks, rank, flags.split(), *backend)


SIMULATIONS = [
    (lesson.name, ranks, lesson.flags) for lesson in LESSONS[1:] if not lesson.threads for ranks in (2, 4)
]
SIMULATIONS += [
    ("ddp", 2, " --accum 3 --bucket-mb 0"),
    ("zero1", 2, " --accum 3 --dtype bf16"),
    ("zero3", 2, " --accum 3 --dtype bf16 --prefetch 0"),
    ("pipeline", 2, " --schedule zb-h2 --accum 6"),
    ("tensor_parallel", 2, " --sequence-parallel --accum 3"),
    ("checkpointing", 2, " --policy partitioned"),
    ("checkpointing", 2, " --policy offload"),
]


def check_simulation(path, name, ranks, flags):
    """The most that any simulated rank holds and sends is to the byte what a real run prints."""
    flags = f"{TINY} --batch 36{flags}"
    real = run(str(ROOT / f"{name}.py"), ranks, flags)[0]
    once = f"{flags} --steps 1"  # no step but the first is looked at
    looked_at = range(ranks) if name == "pipeline" else {0, ranks - 1}  # elsewhere all are alike
    ones = [simulated(path, name, ranks, rank, once, "gloo") for rank in looked_at]
    for row in real.get("ranks", ()):  # of pipeline.py, whose activations stand elsewhere
        own = ones[row["stages"][0] % ranks]["held"].pop("activations")
        assert own == {"measured": row["activations"], "formula": row["bound"]}
    for part in "held", "sent":
        assert all(one[part].keys() == real[part].keys() for one in ones)
        for row, figures in real[part].items():
            assert figures == {key: max(one[part][row][key] for one in ones) for key in figures}, row
    assert {one["n_params"] for one in ones} == {real["n_params"]}


@pytest.mark.parametrize("name, ranks, flags", SIMULATIONS)
def test_a_simulation_holds_and_sends_what_a_real_run_does_to_the_byte(name, ranks, flags):
    check_simulation(SIMULATE, name, ranks, flags)


def test_a_thousand_layers_are_split_too():
    layers = [5] + 1024 * [1] + [5]
    ends = load(PIPELINE).split_layers(layers, 1024)
    stages = [layers[start:end] for start, end in zip([0, *ends], ends)]
    assert len(stages) == 1024 and all(stages) and list(itertools.chain(*stages)) == layers
    assert max(sum(stage) for stage in stages) == 5  # the embedding's, and no other's is larger


# As many parameters as 7.5b (7.51e9) in 8 layers: more of them are more operators, and more tensors that the
# ledger looks through at each operator.
LAYERS, WIDTH, CONTEXT, VOCAB = 8, 8576, 2048, 50257
SHAPE_7_5B = f"--size 7.5b --layers {LAYERS} --width {WIDTH} --heads 32 --dtype bf16"
FIGURE_1 = {"ddp": "120", "zero1": "31.4", "zero2": "16.6", "zero3": "1.88"}  # GB, arXiv 1910.02054


def check_simulated_figure_1(path, name):
    """Figure 1 of ZeRO: bytes that a rank of 64 holds, but for what the lesson's docstring has in flight.

    That is: zero3.py has two blocks and what is in none whole, beside their shards. zero2.py and zero3.py
    fill the gradients of a block and of what is in none, which have no shard yet; another block's are being
    sent, and have one; one parameter's (the largest of a block, or the embedding's) is on its way into these.
    """
    N, w = 64, 2
    block, rest = 12 * WIDTH**2 + 13 * WIDTH, (VOCAB + CONTEXT + 2) * WIDTH
    P = LAYERS * block + rest
    filled = w * ((block + rest) * (1 - 1 / N) + block)
    in_flight = {
        "zero2": filled + w * 4 * WIDTH**2,
        "zero3": filled + w * VOCAB * WIDTH + w * (2 * block + rest),
    }
    per_parameter = {"ddp": 16, "zero1": 4 + 12 / N, "zero2": 2 + 14 / N, "zero3": 16 / N}
    result = simulated(path, name, N, 5, SHAPE_7_5B)
    held = sum(row["measured"] for row in result["held"].values()) - in_flight.get(name, 0)
    assert result["n_params"] == P
    assert held == pytest.approx(per_parameter[name] * P, rel=1e-6)  # it rounds shards up
    assert f"{held / P * 7.5:.3g}" == FIGURE_1[name]


@pytest.mark.parametrize("name", FIGURE_1)
def test_zeros_figure_1_comes_out_of_the_code(name):
    check_simulated_figure_1(SIMULATE, name)


def printed(path, arguments):
    """(exit code or what was raised, lines on stdout, lines on stderr) of a command."""
    code, out, err = None, io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, [path]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            load(path).main(arguments.format(root=ROOT).split())
    except SystemExit as end:
        code = end.code
    except Exception as error:
        code = repr(error)
    finally:
        sys.argv = before
    return code, out.getvalue().splitlines(), err.getvalue().splitlines()


def check_prints(path):
    """A header, the ledger and what it was; no losses, on whichever rank; --batch made to fit."""
    ledger = [r"held by rank 3 ", "  parameters ", "  gradients ", "  optimizer "]
    sent = [r"sent by rank 3 in a step", "  all-gather ", "  reduce-scatter ", "  all-reduce "]
    last = (
        r"rank 3 of 5, simulated in \d+\.\d s: shapes and bytes are the code's, losses and times mean nothing"
    )
    first = r"zero3 \| 5 ranks nccl/cpu \| .* \| batch 15 = 1 per rank x 3 x 5 ranks"
    code, lines, errors = printed(path, "--ranks 5 --rank 3 {root}/zero3.py --layers 1 --accum 3")
    assert (code, errors) == (None, [])
    for pattern, line in zip([first, *ledger, *sent, last], lines, strict=True):
        assert re.match(pattern, line), line
    _, lines, _ = printed(path, "--ranks 2 --rank 1 {root}/pipeline.py --accum 4")
    assert [line.split()[:4] for line in lines if "activations" in line] == [
        ["activations", "1", "in", "flight"]
    ]
    for flags, batch in ("", "batch 3 = 1 x 3"), (" --batch 6", "batch 6 = 2 x 3"):
        _, lines, _ = printed(path, "--ranks 4 {root}/tensor_parallel.py --layers 1 --accum 3" + flags)
        assert lines[0].endswith(f"| {batch} microbatches")


def test_any_rank_prints_its_ledger_and_no_losses():
    check_prints(SIMULATE)


BAD_SIMULATIONS = [  # (command, what the line must name)
    ("{root}/ddp.py", "--ranks"),
    ("--ranks 0 {root}/ddp.py", "--ranks 0"),
    ("--ranks two {root}/ddp.py", "--ranks"),
    ("--ranks 4 --rank 4 {root}/ddp.py", "--rank 4"),
    ("--ranks 4 --rank -1 {root}/ddp.py", "--rank -1"),
    ("--ranks 4 --backend mpi {root}/ddp.py", "--backend"),
    ("--ranks 4 --backen=gloo {root}/ddp.py", "--backen=gloo"),
    ("--ranks 4", "lesson"),
    ("--ranks 4 {root}/no_such.py", "no_such.py: no such lesson"),
    ("--ranks 4 {root}/README.md", "README.md: no such lesson"),
    ("--ranks 4 {root}/tools/compare.py", "compare.py: not a lesson"),
    ("--ranks 1 {root}/dp_threads.py", "threads"),
    ("--ranks 1 {root}/dp_async.py", "threads"),
    ("--ranks 2 {root}/single.py", "one process"),
    ("--ranks 4 {root}/zero3.py --save /no/such/file", "--save /no/such/file"),
    ("--ranks 4 {root}/zero3.py --trace /no/such/folder", "--trace /no/such/folder"),
    ("--ranks 4 {root}/zero3.py --device cuda", "--device cuda"),
    ("--ranks 4 {root}/zero3.py --size huge", "--size"),
    ("--ranks 4 {root}/zero3.py --batch 6", "--batch 6"),
    ("--ranks 4 {root}/zero3.py --accum -4", "--accum -4"),
    ("--ranks 4 --rank 3 {root}/zero3.py --json /no/such/file", "/no/such/file"),
    ("--ranks 7 {root}/pipeline.py", "--layers 4"),
    ("--ranks 4 {root}/pipeline.py --balance time", "--balance time"),
    ("--ranks 3 {root}/tensor_parallel.py", "--heads 4"),
]


def check_bad_simulations(path):
    for command, name in BAD_SIMULATIONS:
        code, _, errors = printed(path, command)
        assert code == 2 and len(errors) == 1, f"{command}: {code}, {errors}"
        assert errors[0].startswith(f"{Path(path).name}: ") and name in errors[0], errors


def test_bad_input_of_a_simulation_ends_in_one_line_and_exit_code_2():
    check_bad_simulations(SIMULATE)


def test_a_torch_without_fake_process_groups_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    with pytest.raises(SystemExit) as end:
        load(SIMULATE)
    assert end.value.code == 2
    assert re.search(r"torch [\d.]+\S* has no fake .*fake_pg\b.*\n\Z", capsys.readouterr().err)


def check_nothing_moves(path):
    """What is offloaded takes no room on the disk, and no thread copies it."""

    def fail(*_):
        raise AssertionError("a simulation uses the machine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        patch.setattr(threading.Thread, "start", fail)
        simulated(path, "checkpointing", 2, 0, f"{TINY} --policy offload")


def test_a_simulation_uses_neither_disk_nor_threads():
    check_nothing_moves(SIMULATE)


SIMULATION_CHECKS = {
    "ddp": lambda path: check_simulation(path, "ddp", 2, TINY_BUCKETS),
    "zero2": lambda path: check_simulation(path, "zero2", 2, ""),
    "pipeline": lambda path: check_simulation(path, "pipeline", 2, ""),
    "figure 1": lambda path: check_simulated_figure_1(path, "zero2"),
    "prints": check_prints,
    "refusals": check_bad_simulations,
    "nothing moves": check_nothing_moves,
}
SIMULATION_MUTANTS = [  # (promise, old, new)
    ("ddp", 'quiet = function.namespace == "prim"', "quiet = False"),
    ("pipeline", "storage._cdata", "0"),
    ("zero2", "lambda group=None: backend", 'lambda group=None: "nccl"'),
    ("pipeline", "store=FakeStore(), rank=rank,", "store=FakeStore(), rank=0,"),
    ("prints", '"--batch", str(batch), *flags]', '*flags, "--batch", str(batch)]'),
    ("pipeline", "lesson.in_flight(pipe.actions, self.of_stage)", "lesson.in_flight(pipe.actions)"),
    ("figure 1", 'backend="nccl"', 'backend="gloo"'),
    ("prints", "ledger.__init__, ledger.close = as_rank_0(ledger.__init__),", "ledger.close ="),
    ("prints", "share = ranks if", "share = 1 if"),
    ("prints", "ledger.data_parallel for", "True for"),
    ("prints", "answers[:] = [answer] * len(answers)", "answers[0] = answer"),
    ("refusals", "lesson.set_up, seen = as_rank_0(lesson.set_up),", "seen ="),
    ("refusals", "0 <= given.rank < given.ranks", "given.rank <= given.ranks"),
    ("refusals", 'hasattr(lesson, "ThreadLedger")', "False"),
    ("refusals", "allow_abbrev=False", "allow_abbrev=True"),
    (
        "prints",
        '{"activations": (f"{count} in flight", most)}',
        '{"activations": (f"{most} in flight", most)}',
    ),
    ("refusals", 'hasattr(lesson, "Ledger")', "True"),
    ("refusals", '("save", "trace")', '("trace",)'),
    ("refusals", 'config.device == "cuda"', "False"),
    ("refusals", "max(lesson.parse(flags).accum, 1)", "lesson.parse(flags).accum"),
    ("refusals", 'getattr(config, "balance", "") == "time"', "False"),
    ("nothing moves", 'hasattr(lesson, "Offloaded")', "False"),
    ("nothing moves", '(os, "posix_fallocate")', '(os, "another")'),
]


@pytest.mark.parametrize("promise, old, new", SIMULATION_MUTANTS)
def test_a_mutant_of_the_simulation_is_rejected(promise, old, new, tmp_path):
    text = Path(SIMULATE).read_text()
    assert text.count(old) == 1, f"{text.count(old)} places to edit"
    mutant = tmp_path / "simulate.py"
    mutant.write_text(text.replace(old, new))
    with pytest.raises(AssertionError):
        SIMULATION_CHECKS[promise](str(mutant))


# ---- the other tools ----


def test_a_timeline_has_a_bar_for_every_action():
    figures = load(ROOT / "tools" / "figures.py")
    rows = [
        [(("F", 0, 0), 0.0, 1.0), (("B", 0, 0), 3.0, 5.0)],
        [(("F", 1, 0), 1.0, 2.0), (("B", 1, 0), 2.0, 3.0)],
    ]
    svg = figures.pipeline({"timeline": rows, "schedule": "1f1b", "idle": {"measured": 0.4}})
    assert "1f1b: 40.0% idle, 5000 ms" in svg and "rank 1" in svg
    bars = re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)" height="24"', svg)
    widths = [float(width) for _, width in bars]
    assert len(widths) == 4 and widths[1] > 1.9 * widths[0] and float(bars[2][0]) > float(bars[0][0])


def test_an_overlap_is_drawn_from_the_last_step_of_a_trace(tmp_path):
    """What computes is on its own lane, each operator once; what travels on that of its collective."""
    flags = f"{TINY} --batch 12 --trace {tmp_path}"
    world(2).run(train, str(ROOT / "zero2.py"), flags)
    trace = json.loads(next(tmp_path.glob("zero2-rank0*.json")).read_text())
    svg = load(ROOT / "tools" / "figures.py").overlap(trace, "zero2.py")
    lanes = re.split(r"<text x=.8.*?>(.*?)</text>", svg)[1:]
    lanes = dict(zip(lanes[::2], lanes[1::2]))
    assert list(lanes) == ["compute", "all-gather", "all-reduce", "reduce-scatter"]
    units = 2 + 1  # two blocks, and what is in none
    gathered, reduced = (lanes[kind].count('height="24"') for kind in ("all-gather", "reduce-scatter"))
    assert reduced == units
    # step() launches gathers as its last act, so a thread may begin with one before or after the step's end.
    assert abs(gathered - units) <= 1
    starts = [
        float(x)
        for x in re.findall(r'<rect x="([\d.]+)" y="\d+" width="[\d.]+" height="24"', lanes["compute"])
    ]
    assert starts == sorted(starts) and len(starts) > 100


def test_figures_of_runs_name_what_they_show(tmp_path):
    figures = load(ROOT / "tools" / "figures.py")
    runs = [run(str(ROOT / f"{name}.py"), 2, f"{TINY} --batch 12 --steps 1")[0] for name in ("ddp", "zero2")]
    figures.memory([*runs, *({**result, "losses": []} for result in runs)], tmp_path / "memory.svg")
    row = {"ms": 2.0, "ratio": 0.5, "least": 0.4, "most": 0.7}
    bench = {
        "hosts": 2,
        "rate": "1gbit",
        "flags": ["--size", "toy", "--accum", "2", "--policy", "full"],
        "lessons": {"ddp": {"ddp.py": row, "compute alone": row, "peer": row}},
    }
    figures.ratios([bench], tmp_path / "ratios.svg")
    assert all(word in (tmp_path / "memory.svg").read_text() for word in ("ddp", "zero2", "parameters"))
    text = (tmp_path / "ratios.svg").read_text()
    assert "ddp.py --policy full / peer" in text and "2 hosts, 1gbit" in text and "compute alone" not in text


def test_a_step_on_paper_lasts_as_long_as_what_it_waits_for():
    scaling = load(ROOT / "tools" / "scaling.py")
    parts = (0, 0), (60, 6)  # nothing in forward; 60 bytes in 6 messages in backward
    assert scaling.predict(0.3, parts, ranks=4, rate=1e9, latency=0) == pytest.approx(0.3)  # it hides
    assert scaling.predict(0.3, parts, ranks=4, rate=100, latency=0) == pytest.approx(0.1 + 0.6)
    assert scaling.predict(0.3, parts, ranks=4, rate=100, latency=0.1) == pytest.approx(
        0.1 + 0.6 + 6 * 3 * 0.1
    )
    flags = scaling.flags_of({"flags": ["--size", "toy", "--batch=12", "--dtype", "bf16"], "ranks": 3}, 8)
    config = load(DDP).parse(flags)
    assert (config.size, config.batch, config.dtype) == ("toy", 32, "bf16")
    forward, backward = scaling.traffic("zero3", 4, f"{TINY} --batch 4".split())
    again, _ = scaling.traffic("zero2", 4, f"{TINY} --batch 4".split())
    assert forward == again and backward[0] > forward[0]


BENCH = str(ROOT / "tools" / "bench.py")
BAD_BENCHES = [  # (command, what the line must name)
    ("nothing", "nothing"),
    ("ddp --rate fast", "--rate fast"),
    ("ddp --rate .gbit", "--rate .gbit"),
    ("--rounds 0", "--rounds"),
    ("ddp --rounds many", "--rounds"),
    ("ddp --ranks 0", "--ranks"),
    ("ddp --hosts 2 --ranks 4", "--ranks 4"),
    ("--ranks 2 ddp", "ddp"),
    ("ddp --size huge", "--size"),
    ("ddp --prefetch 2", "--prefetch"),
    ("ddp zero3 --batch 7", "--batch 7"),
    ("dp_threads --batch 8 --accum 3", "--batch 8"),
    ("ddp --also=--accum=3", "--batch 8"),
    ("ddp --json /no/such/folder/file", "--json /no/such/folder/file"),
]


def check_bad_benches(path):
    bench = load(path)
    for command, name in BAD_BENCHES:
        errors, before = io.StringIO(), sys.argv
        sys.argv = [path]
        try:
            with redirect_stderr(errors), pytest.raises(SystemExit) as end:
                bench.parse(command.split())
        except BaseException as error:
            raise AssertionError(command) from error
        finally:
            sys.argv = before
        lines = errors.getvalue().splitlines()
        assert end.value.code == 2 and len(lines) == 1, (command, lines)
        assert lines[0].startswith("bench.py: ") and name in lines[0], lines


def check_flags_of_bench(path):
    """What is given wins over the defaults, however it is written; a rate in tc's words is bytes a second."""
    bench = load(path)
    made, flags = bench.parse(["zero1", "dp_async", "--size=toy", "--batch", "4", "--json", "out.json"])
    lesson = load(ROOT / "zero1.py")
    config = lesson.parse(flags["zero1"])
    assert (config.size, config.batch, config.steps, made.ranks) == ("toy", 4, 3, 2)
    assert lesson.parse(bench.parse(["zero1"])[1]["zero1"]).size == "small"
    assert load(ASYNC).parse(flags["dp_async"]).steps == 20
    rates = {"1gbit": 125e6, "100mbit": 12.5e6, "2.5kbit": 312.5, "8bit": 1}
    assert {rate: bench.bytes_per_second(rate) for rate in rates} == rates
    fewer = bench.commands("dp_async", made, [*flags["dp_async"], "--seed", "2", "--slow", "0=2"])
    (alone,) = (command[2:] for title, command in fewer.items() if "single" in title)
    config = load(SINGLE).parse(alone)
    assert (config.seed, config.batch, config.steps, config.size) == (2, 2, 40, "toy")


def check_table(path):
    """Ratios are ours over theirs, round by round; no step is shorter than computing or sending takes."""
    bench = load(path)
    rows = {"ddp.py": ([2.0, 4.0, 3.0], 1e6), "peer": ([4.0, 5.0, 3.0], 1e6), bench.ALONE: ([1.0, 1, 1], 0)}
    rows = {title: {"times": times, "sent": [sent] * 3} for title, (times, sent) in rows.items()}
    bench.launch = lambda *_: {"rows": rows, "missing": ["other"], "apart": 0.0}
    made, flags = bench.parse(["ddp", "--hosts", "2", "--rate", "4gbit", "--no-memory"])
    with redirect_stdout(io.StringIO()) as out:
        table = bench.table_of("ddp", made, flags["ddp"])
    assert [table["peer"][key] for key in ("ms", "ratio", "least", "most")] == [4.0, 0.8, 0.5, 1.0]
    assert [row["floor_ms"] for row in table.values()] == [2.0, 2.0, 1.0]
    assert re.search(r"other +not installed", out.getvalue())


def memory_of_steps(path):
    """On a rank: live MB of a contender that keeps 8, and in its steps takes 160, 120 and 80 for a while."""
    bench, sizes = load(path), []
    kept = torch.ones(10**7)  # before the contender

    def build():
        sizes[:] = [160, 120, 80, 0]
        return types.SimpleNamespace(own=torch.ones(2 * 10**6))

    def step(title, entry):
        torch.ones(sizes.pop(0) * 10**6 // 4).sum()
        torch.ones(1)

    race = types.SimpleNamespace(builders={"x": build}, step=step, device=torch.device("cpu"))
    return bench.Race.memory(race, "x")[0] / 1e6 if len(kept) else 0


def check_memory(path):
    """What a contender keeps counts, and what its third step takes; not what was there before."""
    live = world(1).run(memory_of_steps, path)[0]
    assert math.isnan(live) or 88 <= live < 92, live


def check_equal_weights(path):
    """Contenders whose weights differ, or are not numbers, are not timed."""
    bench, plain = load(path), {"w": torch.zeros(3)}
    race = types.SimpleNamespace(step=lambda *_: None, config=types.SimpleNamespace(dtype="fp32"))
    for off, ends in (5e-6, False), (2e-5, True), (math.nan, True):
        both = {"w": torch.tensor([0, off, 0])}
        entries = {"ddp.py": plain, "peer": both}
        entries = {title: types.SimpleNamespace(weights=lambda w=w: w) for title, w in entries.items()}
        with pytest.raises(SystemExit, match="peer ended") if ends else nullcontext():
            assert bench.Race.compare(race, entries) == pytest.approx(off)


def check_bench_end(path):
    """Whoever ends the tool ends what it has started."""
    code = f"import sys; sys.argv = ['bench.py']; sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
    code += f"import runpy, signal; call = runpy.run_path({path!r})['call']\n"
    code += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
    code += "call([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=-1, text=True)
    started = int(process.stdout.readline())
    process.terminate()
    try:
        code = process.wait(10)
    except subprocess.TimeoutExpired:
        code = "it did not end"
    try:
        os.kill(started, signal.SIGKILL)
        left = True
    except ProcessLookupError:
        left = False
    process.kill()
    process.communicate()
    assert (code, left) == (143, False)


BENCH_CHECKS = {
    "refusals": check_bad_benches,
    "flags": check_flags_of_bench,
    "table": check_table,
    "memory": check_memory,
    "weights": check_equal_weights,
    "end": check_bench_end,
}
BENCH_MUTANTS = [  # (promise, old, new)
    ("table", "ratios = [a / b for a, b in zip(first, row", "ratios = [b / a for a, b in zip(first, row"),
    ("table", "max(alone, 1e3 * sent", "min(alone, 1e3 * sent"),
    ("memory", "meter.peak - before", "meter.peak"),
    ("memory", "max(self.peak, heap())", "heap()"),
    ("memory", "for _ in range(2):  # torch's", "for _ in range(0):  # torch's"),
    ("memory", "info.field4 + info.field7", "info.field7"),
    ("weights", "if not apart < TOLERANCE[self.config.dtype]:", "if False:"),
    ("weights", "torch.stack(each).max().item()", "max(x.item() for x in [torch.zeros(()), *each])"),
    ("end", "        process.terminate()\n", "        pass\n"),
    ("flags", '"": 1, "k": 1e3', '"": 1, "k": 1024'),
    ("flags", "value != default[name]]", "value != default[name] and name != 'seed']"),
    ("refusals", "if config.batch % (bench.ranks * config.accum):", "if config.batch % config.accum:"),
    ("refusals", 'for more in "", *bench.also:', 'for more in [""]:'),
    ("refusals", "if bench.ranks and bench.hosts > 1:", "if False:"),
]


@pytest.mark.parametrize("promise", BENCH_CHECKS)
def test_bench_keeps_its_promises(promise):
    BENCH_CHECKS[promise](BENCH)


@pytest.mark.parametrize("promise, old, new", BENCH_MUTANTS)
def test_a_mutant_of_bench_is_rejected(promise, old, new, tmp_path):
    text = Path(BENCH).read_text().replace("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})")
    assert text.count(old) == 1, f"{text.count(old)} places to edit"
    mutant = tmp_path / "bench.py"
    mutant.write_text(text.replace(old, new))
    with pytest.raises((AssertionError, ZeroDivisionError, pytest.fail.Exception)):
        BENCH_CHECKS[promise](str(mutant))


# ---- mutants: an edit to a copy of a lesson, and the promise that it must be seen to break ----


def parity(lesson, path, tmp_path):
    for accum, optim in (1, "sgd"), (3, "sgd"), (3, "adamw"):
        check_parity(path, lesson.flags, min(3, lesson.worlds[-1]), accum, optim)


def accumulation(lesson, path, tmp_path):
    """single.py is the oracle of the others; what holds for it alone: microbatches change nothing."""
    for optim in ("sgd", "adamw"):
        common = f"{TINY} --batch 12 --dtype fp64 --clip 0 --optim {optim}"
        assert apart(run(path, 1, common)[1], run(SINGLE, 1, common)[1]) <= 1e-12
        assert apart(run(path, 1, f"{common} --accum 4")[1], run(SINGLE, 1, common)[1]) <= 1e-9


CHECKS = {
    "parity": parity,
    "accumulation": accumulation,
    "masters": lambda lesson, path, tmp_path: check_masters(path, lesson),
    "misuse": lambda lesson, path, tmp_path: check_misuse(path),
    "layouts": lambda lesson, path, tmp_path: check_layouts(path),
    "buckets": lambda lesson, path, tmp_path: check_buckets(path),
    "wait": lambda lesson, path, tmp_path: check_wait(path),
    "any start": lambda lesson, path, tmp_path: check_odd(path),
    "any module": lambda lesson, path, tmp_path: check_odd(path),
    "wire": lambda lesson, path, tmp_path: check_wire(lesson, path),
    "one gradient": lambda lesson, path, tmp_path: check_one_gradient(path),
    "overlap": lambda lesson, path, tmp_path: check_overlap(path),
    "exit": lambda lesson, path, tmp_path: check_exit(path, tmp_path),
    "branchy": lambda lesson, path, tmp_path: check_branchy(path),
    "meeting": lambda lesson, path, tmp_path: check_meeting(path),
    "failing": lambda lesson, path, tmp_path: check_failing(path),
    "uneven": lambda lesson, path, tmp_path: check_uneven(path),
    "device 0": lambda lesson, path, tmp_path: check_device_0(path),
    "no push lost": lambda lesson, path, tmp_path: check_no_push_lost(path),
    "staleness": lambda lesson, path, tmp_path: check_staleness(path),
    "bound": lambda lesson, path, tmp_path: check_bound(path),
    "slow": lambda lesson, path, tmp_path: check_slow(path),
    "end": lambda lesson, path, tmp_path: check_end(path),
    "unusual": lambda lesson, path, tmp_path: check_unusual(path),
    "broken": lambda lesson, path, tmp_path: check_broken(path),
    "straggler": lambda lesson, path, tmp_path: check_straggler(path),
    "losing": lambda lesson, path, tmp_path: check_losing(path),
    "published": lambda lesson, path, tmp_path: check_published(path),
    "schedules": lambda lesson, path, tmp_path: check_schedules(path),
    "split": lambda lesson, path, tmp_path: check_split(path),
    "messages": lambda lesson, path, tmp_path: check_messages(path),
    "stages": lambda lesson, path, tmp_path: check_stages(path),
    "uses": lambda lesson, path, tmp_path: check_uses(path),
    "autocast": lambda lesson, path, tmp_path: check_autocast_net(path),
    "sequence": lambda lesson, path, tmp_path: check_tensor(path, " --sequence-parallel", 3),
    "net": lambda lesson, path, tmp_path: check_net(path),
    "groups": lambda lesson, path, tmp_path: check_net(path, 4),
    "policy": lambda lesson, path, tmp_path: [check_policy(path, f" --policy {p}", 2) for p in POLICIES],
    "bitwise": lambda lesson, path, tmp_path: check_bitwise(path, 2),
    "changes": lambda lesson, path, tmp_path: check_misrecompute(path),
    "hooks": lambda lesson, path, tmp_path: check_hooks(path),
    "again": lambda lesson, path, tmp_path: check_twice(path),
    "activations": lambda lesson, path, tmp_path: check_activations(path, 2),
    "peak": lambda lesson, path, tmp_path: check_beside_torchs(path),
    "copies": lambda lesson, path, tmp_path: check_copies(path),
    "layers": lambda lesson, path, tmp_path: check_layers(path),
    "pairs": lambda lesson, path, tmp_path: check_pairs(path),
    "tensor misuse": lambda lesson, path, tmp_path: check_tensor_misuse(path),
    "tensor overlap": lambda lesson, path, tmp_path: check_tensor_overlap(path),
    "tensor ledger": lambda lesson, path, tmp_path: check_tensor_ledger(path, 2),
    "tensor refusals": lambda lesson, path, tmp_path: check_rank_refusals(lesson, path, tmp_path),
    "1f1b": lambda lesson, path, tmp_path: check_pipeline(path, "1f1b", 3, 4),
    "chunks": lambda lesson, path, tmp_path: check_pipeline(path, "interleaved", 1, 4),
    "zb-h2": lambda lesson, path, tmp_path: check_pipeline(path, "zb-h2", 3, 4),
    "zero": lambda lesson, path, tmp_path: check_zero(path),
    "whole": lambda lesson, path, tmp_path: check_zero(path, Whole, 2),
    "twice": lambda lesson, path, tmp_path: check_zero(path, Twice, 2),
    "zero wait": lambda lesson, path, tmp_path: [
        check_zero(path, m, 2, train_zero_slowly) for m in (Odd, Twice)
    ],
    "held": lambda lesson, path, tmp_path: check_held(lesson, path),
    "zero overlap": lambda lesson, path, tmp_path: check_zero_overlap(path),
    "flags": lambda lesson, path, tmp_path: check_prefetch_flags(path, "--prefetch 0"),
    "prefetch": lambda lesson, path, tmp_path: check_prefetch(path),
    "zero misuse": lambda lesson, path, tmp_path: check_zero_misuse(path),
    "refusals": lambda lesson, path, tmp_path: check_refusals(
        lesson, path, [*BAD, *lesson.bad_flags], tmp_path
    ),
}

DIVIDE = "\n        torch.div(gradient, self.ranks, out=param.grad)\n"
LAUNCH_WHEN_FULL = "while self.overlap and self.to_launch and not self.to_launch[0].waiting_for:"
MUTANTS = [
    # (lesson, promise, the text edited, into what): what a tired author might write
    ("single", "accumulation", "microloss = model(*batch) / config.accum", "microloss = model(*batch)"),
    (
        "single",
        "accumulation",
        "reshape(ranks, config.accum, -1)[rank]",
        "reshape(ranks, config.accum, -1)[rank][:1]",
    ),
    ("single", "accumulation", "            model.zero_grad()\n", ""),
    ("single", "masters", "p.detach().float() if p.dtype == torch.bfloat16 else p", "p"),
    ("single", "masters", "                p.copy_(self.masters[p])\n", ""),
    ("single", "refusals", 'problem}", file=sys.stderr)', 'problem}\\nStopping.", file=sys.stderr)'),
    ("single", "refusals", "if any(problems):", "if False:"),
    ("ddp", "exit", "import torch.distributed.nn", "#"),
    ("ddp", "parity", DIVIDE, DIVIDE.replace("self.ranks", "1")),
    ("ddp", "parity", DIVIDE, DIVIDE.replace("self.ranks", "2")),
    ("ddp", "parity", "microloss = ddp(*batch) / config.accum", "microloss = ddp(*batch)"),
    ("ddp", "parity", "text, step, device, rank, ranks)", "text, step, device, 0, ranks)"),
    ("ddp", "parity", "ledger.log(step, loss / ranks, grad_norm)", "ledger.log(step, loss, grad_norm)"),
    ("ddp", "parity", "        dist.all_reduce(loss)\n", ""),
    ("ddp", "one gradient", "param.grad.copy_(gradient)", "param.grad = gradient"),
    (
        "ddp",
        "parity",
        "norm = torch.linalg.vector_norm(torch.stack(norms))",
        "norm = torch.stack(norms).sum()",
    ),
    ("ddp", "parity", "bucket.gradients.mul_(scale)", "bucket.flat.mul_(scale).add_(1e-6)"),
    ("ddp", "parity", "vector_norm(bucket.gradients, dtype", "vector_norm(bucket.flat, dtype"),
    ("ddp", "wait", "            bucket.work.wait()\n", ""),
    ("ddp", "any start", "[*module.parameters(), *module.buffers()]", "[*module.parameters()]"),
    ("ddp", "any start", "[*module.parameters(), *module.buffers()]", "[*module.buffers()]"),
    ("ddp", "any start", "group_src=0", "group_src=self.ranks - 1"),
    ("ddp", "any module", "bucket.views[param].zero_()\n", "pass\n"),
    ("ddp", "any module", "                bucket.flag[param].zero_()\n", ""),
    ("ddp", "any module", "if bucket.flag[param] > 0 else None", "if False else None"),
    ("ddp", "any module", "param.grad = bucket.views[param] if bucket.flag[param] > 0 else None", "pass"),
    ("ddp", "any module", " " * 8 + DIVIDE[1:], " " * 16 + "pass\n"),
    ("ddp", "any module", "if p.requires_grad][::-1]", "][::-1]"),
    (
        "ddp",
        "any module",
        "filling.setdefault((p.dtype, p.device), [])",
        "filling.setdefault(params[0].dtype, [])",
    ),
    (
        "ddp",
        "any module",
        LAUNCH_WHEN_FULL,
        "while self.overlap and self.to_launch and not bucket.waiting_for:",
    ),
    ("ddp", "any module", "= set(bucket.params), []\n", "= set(), []\n"),
    ("ddp", "misuse", "        if any(other != shapes for other in everyone):", "        if False:"),
    ("ddp", "misuse", "t.requires_grad) for t", "True) for t"),
    ("ddp", "misuse", "self.syncing = before", "self.syncing = True"),
    (
        "ddp",
        "misuse",
        "if param not in bucket.waiting_for:",
        "if self.syncing and param not in bucket.waiting_for:",
    ),
    ("ddp", "layouts", "piece.as_strided(p.shape, stride)", "piece.view(p.shape)"),
    ("ddp", "layouts", "tensor.detach().contiguous()", "tensor.detach()"),
    ("ddp", "buckets", "/ 5 / 2**20, 25)", "/ 5 / 2**20, 250)"),
    ("ddp", "buckets", "/ 5 / 2**20, 25)", "/ 4 / 2**20, 25)"),
    (
        "ddp",
        "buckets",
        "wide = torch.promote_types(bucket.flat.dtype, torch.float32)",
        "wide = bucket.flat.dtype",
    ),
    ("ddp", "buckets", "limit = min(2 * limit, bucket_mb)", "limit = bucket_mb"),
    ("ddp", "masters", "                self.masters[p].grad = None\n", ""),
    ("ddp", "masters", " and p.grad is not None]", "]"),
    ("ddp", "wire", "= self.syncing, False", "= self.syncing, True"),
    ("ddp", "wire", "dist.all_reduce(bucket.flat,", "dist.all_reduce(bucket.flat.double(),"),
    ("ddp", "one gradient", "dist.all_reduce(bucket.flat,", "dist.all_reduce(bucket.flat.clone(),"),
    (
        "ddp",
        "one gradient",
        "\n        gradient, param.grad = param.grad, bucket.views[param]",
        "\n        gradient = param.grad",
    ),
    ("ddp", "overlap", LAUNCH_WHEN_FULL, "while False:"),
    ("ddp", "overlap", "async_op=True", "async_op=False"),
    ("ddp", "overlap", "if p.requires_grad][::-1]", "if p.requires_grad]"),
    ("ddp", "refusals", "if config.batch % (ranks * config.accum):", "if False:"),
]
MUTANTS += [
    ("dp_threads", "parity", "total.add_(gradient)", "total"),
    ("dp_threads", "parity", "total.add_(gradient)", "total.add_(gradient, alpha=0.5)"),
    (
        "dp_threads",
        "parity",
        "mean_loss(dp(inputs), targets) / config.accum",
        "mean_loss(dp(inputs), targets)",
    ),
    (
        "dp_threads",
        "parity",
        "zip(whole.split([len(x) for x in rows]), rows)",
        "zip([whole[: len(rows[0])]], rows)",
    ),
    ("dp_threads", "held", "copy=self.number > 0", "copy=True"),
    ("dp_threads", "wire", "copies.get(p, p) for name", "p for name"),
    ("dp_threads", "wire", "copy=self.number > 0", "copy=False"),
    ("dp_threads", "held", "call.inputs = call.outputs = None", "pass"),
    ("dp_threads", "branchy", "replicas, self.replicas = self.replicas, None", "replicas = self.replicas"),
    (
        "dp_threads",
        "branchy",
        "return leaf.requires_grad_(tensor.requires_grad)",
        "return leaf.requires_grad_(leaf.is_floating_point())",
    ),
    ("dp_threads", "branchy", "copies.get(b, b) for name", "b.clone() for name"),
    (
        "dp_threads",
        "branchy",
        "torch.zeros_like(x) if x.grad is None",
        "torch.ones_like(x) if x.grad is None",
    ),
    ("dp_threads", "branchy", "piece.detach().requires_grad_(x.requires_grad)", "piece.detach()"),
    ("dp_threads", "branchy", "ctx.mark_non_differentiable(", "set("),
    ("dp_threads", "meeting", "            if not self.parallel:\n", "            if True:\n"),
    ("dp_threads", "meeting", "torch.autocast(kind, **mixed)", "nullcontext()"),
    ("dp_threads", "meeting", "torch.set_grad_enabled(learning)", "nullcontext()"),
    (
        "dp_threads",
        "failing",
        "                if future.exception():  # waits",
        "                if r and future.done() and future.exception():  # waits",
    ),
    ("dp_threads", "failing", "if future.exception():  # waits", "if False:  # waits"),
    ("dp_threads", "failing", "        if replicas is None:", "        if False:"),
    ("dp_threads", "failing", "if len(rows) != 1 or rows == {0}:", "if False:"),
    ("dp_threads", "meeting", "torch.get_autocast_dtype(kind)", "torch.float16"),
    ("dp_threads", "meeting", "            if not self.parallel:\n", "            if False:\n"),
    ("dp_threads", "uneven", "not any(replica.roots", "not all(replica.roots"),
    ("dp_threads", "uneven", "    @once_differentiable\n", ""),
    ("dp_threads", "uneven", "if not is_tensor(x) or not x.dim():", "if not is_tensor(x):"),
    ("dp_threads", "uneven", "gather(pieces, first) if used else None", "gather(pieces, first)"),
    ("dp_threads", "uneven", "is_tensor(x[0]) else x[0] for", "is_tensor(x[0]) else x[-1] for"),
    ("dp_threads", "uneven", "(*module.parameters(), *module.buffers())} - {", "module.parameters()} - {"),
    ("dp_threads", "uneven", "child if child is None else copy_modules", "child and copy_modules"),
    ("dp_threads", "uneven", "if len({(x.shape[1:], x.dtype) for x in rows}) > 1:", "if False:"),
    ("dp_threads", "refusals", "if config.batch % (N * config.accum):", "if False:"),
    ("dp_threads", "exit", "import torch.distributed.nn", "#"),
    ("dp_async", "parity", " / self.pushes_per_update", ""),
    ("dp_async", "parity", "self.max_norm or math.inf", "math.inf"),
    ("dp_async", "parity", "                    param.grad = None\n", "                    pass\n"),
    ("dp_async", "parity", "device, share, N)", "device, 0, N)"),
    ("dp_async", "parity", "worker.module(*batch) / config.accum", "worker.module(*batch)"),
    ("dp_async", "parity", "        self.module.zero_grad()\n", ""),
    ("dp_async", "parity", "                own.copy_(param, non_blocking=True)\n", "                pass\n"),
    ("dp_async", "parity", '{"bsp": 0,', '{"bsp": 1,'),
    (
        "dp_async",
        "no push lost",
        "                yield\n            if self.stream:\n",
        "                self.turn.release()\n                yield\n                self.turn.acquire()\n"
        "            if self.stream:\n",
    ),
    ("dp_async", "staleness", "self.version - self.pulled[worker]", "self.version - self.pulled[worker] - 1"),
    (
        "dp_async",
        "staleness",
        "self.pulled[worker] = self.version",
        "self.pulled.setdefault(worker, self.version)",
    ),
    ("dp_async", "bound", "lead() <= ahead", "lead() <= ahead + 1"),
    ("dp_async", "straggler", '"ssp": staleness}', '"ssp": staleness - 1}'),
    ("dp_async", "straggler", '"asp": math.inf', '"asp": 5'),
    (
        "dp_async",
        "straggler",
        "wait_stream(self.stream)\n            self.turn.notify_all()\n",
        "wait_stream(self.stream)\n",
    ),
    ("dp_async", "losing", "                self.open.appendleft(task)\n", "                pass\n"),
    ("dp_async", "losing", "            del self.clocks[worker]\n", ""),
    ("dp_async", "losing", "self.stopped = self.stopped or", "self.stopped = False and"),
    ("dp_async", "losing", "    if tasks.open:\n", "    if False:\n"),
    ("dp_async", "losing", "isinstance(error, Stopped)", "isinstance(error, int)"),
    ("dp_async", "slow", "(self.slow - 1) * (", "self.slow * ("),
    ("dp_async", "slow", "        if self.sent:\n", "        if True:\n"),
    ("dp_async", "end", "                server.admit(worker.number)\n", ""),
    ("dp_async", "unusual", "if gradient is not None:", "if True:"),
    (
        "dp_async",
        "unusual",
        "[p for p in module.parameters() if p.requires_grad]",
        "list(module.parameters())",
    ),
    ("dp_async", "broken", 'on("server"), self._fatal():', 'on("server"):'),
    ("dp_async", "broken", "except BaseException as error:", "except Exception as error:"),
    ("dp_async", "bound", "self.lead = max(self.lead, lead())", "pass"),
    ("dp_async", "losing", "first(worker) or not self.taken", "first(worker) or True"),
    ("dp_async", "refusals", "if config.batch % (N * config.accum):", "if False:"),
    ("dp_async", "exit", "import torch.distributed.nn", "#"),
]
MUTANTS += [
    (
        "pipeline",
        "schedules",
        "zero_bubble(rank, m, p - rank, rank)",
        "zero_bubble(rank, m, p - rank, rank + 1)",
    ),
    ("pipeline", "schedules", "2 * (p - rank) - 1", "2 * (p - rank)"),
    ("pipeline", "published", "p - rank)\n", "p - rank + 1)\n"),
    ("pipeline", "published", "latency * (need.stage % p != rank)", "latency"),
    ("pipeline", "1f1b", "self.targets[k]) / self.microbatches", "self.targets[k])"),
    ("pipeline", "1f1b", "            dist.all_reduce(param.grad, group=tie)\n", "            pass\n"),
    ("pipeline", "1f1b", "if ranks[0] == self.rank:", "if self.rank in ranks:"),
    ("pipeline", "1f1b", "        dist.all_reduce(total, group=self.group)\n", ""),
    ("pipeline", "1f1b", "        dist.all_reduce(self.loss, group=self.group)\n", ""),
    ("pipeline", "1f1b", "everyone[::-1]", "everyone[:1]"),
    ("pipeline", "1f1b", "self.alive.pop(action[1:])", "self.alive[action[1:]]"),
    (
        "pipeline",
        "1f1b",
        "else x.grad  # the stage before",
        "else 2 * x.grad  # the stage before",
    ),
    ("pipeline", "1f1b", "                tensor.untyped_storage().resize_(0)\n", "                pass\n"),
    ("pipeline", "messages", "        work.wait()\n        for taken", "        for taken"),
    ("pipeline", "messages", "            self._post(sender, self.AHEAD)\n", "            pass\n"),
    ("pipeline", "messages", "self.place[action] + 1 + self.AHEAD", "self.place[action] + 1"),
    ("pipeline", "messages", "            self.leaving.pop(taken)[0].wait()\n", "            pass\n"),
    ("pipeline", "schedules", "(v - 1 - chunk) * p + rank", "chunk * p + rank"),
    ("pipeline", "chunks", "            self.local[action] = tensor\n", "            pass\n"),
    (
        "pipeline",
        "split",
        "gradient @ ctx.params[0] if ctx.needs_input_grad[1] else None",
        "gradient.neg() @ ctx.params[0] if ctx.needs_input_grad[1] else None",
    ),
    ("pipeline", "split", "else rows.sum(0)))", "else rows.mean(0)))"),
    ("pipeline", "split", "own = weight.requires_grad and all(p.is_leaf for p in params) and", "own ="),
    ("pipeline", "split", "all(p.is_leaf for p in params) and", ""),
    ("pipeline", "stages", "            dist.broadcast(whole, group_src=0, group=self.group)\n", ""),
    (
        "pipeline",
        "stages",
        "for tensor in (*stage.parameters(), *stage.buffers()):",
        "for tensor in stage.parameters():",
    ),
    (
        "pipeline",
        "stages",
        "if isinstance(tensor, nn.Parameter) and len(ranks) > 1:",
        "if isinstance(tensor, nn.Parameter) and len(ranks) > 1 and tensor.dim() > 1:",
    ),
    ("pipeline", "stages", "if y.requires_grad else None, seed", ", seed"),
    (
        "pipeline",
        "stages",
        "if tensor.untyped_storage().data_ptr() not in needed:",
        "if self.rank not in owners[tensor]:",
    ),
    ("pipeline", "stages", 'device="meta") for name', 'device="cpu") for name'),
    ("pipeline", "stages", "if not len(inputs) == len(targets) == self.microbatches:", "if False:"),
    (
        "pipeline",
        "messages",
        'groups[named("lane", pair)]',
        'groups[named("lane", sorted(pair))]',
    ),
    ("pipeline", "uses", "*(self.members[rank] for rank in ranks)", "*ranks"),
    ("pipeline", "uses", "set().union(*everyone)", "wanted"),
    ("pipeline", "uses", "y = y.to(dtype)", "pass"),
    ("pipeline", "uses", "if y.shape != shape:", "if False:"),
    ("pipeline", "uses", "get_gradient_edge(y) if", "y if"),
    ("pipeline", "uses", "tensor = tensor.contiguous()", "tensor = tensor"),
    ("pipeline", "uses", " or torch.is_autocast_enabled(input.device.type)", ""),
    ("pipeline", "uses", "torch.zeros_like(x) if x.grad is None else x.grad", "x.grad"),
    ("pipeline", "uses", "if not torch.is_grad_enabled():", "if False:"),
    ("pipeline", "uses", "if ranks[0] == self.rank:", "if ranks[0] == self.rank and tensor.requires_grad:"),
    ("tensor_parallel", "autocast", "overlap and not torch.is_autocast_enabled(x.device.type):", "overlap:"),
    ("tensor_parallel", "autocast", "self.bias.to(y.dtype)", "self.bias"),
    ("tensor_parallel", "net", "tensor.cpu().clone()}", "tensor}"),
    (
        "pipeline",
        "messages",
        "        for work, _ in self.leaving.values():\n            work.wait()\n        self.leaving = {}\n",
        "",
    ),
    ("pipeline", "split", "if param is not None and param.requires_grad:", "if param is not None:"),
    (
        "pipeline",
        "split",
        "param.grad = gradient if param.grad is None else param.grad.add_(gradient)",
        "param.grad = gradient",
    ),
    ("pipeline", "zb-h2", "        self.waiting.pop(action[1:]).weights()\n", "        pass\n"),
    ("pipeline", "zb-h2", "self.waiting[action[1:]] = split", "split.weights()"),
    ("pipeline", "refusals", "if config.batch % config.accum:", "if False:"),
    ("pipeline", "exit", "import torch.distributed.nn", "#"),
    ("tensor_parallel", "layers", "own = tokens - self.tp.rank * len(self.weight)", "own = tokens"),
    (
        "tensor_parallel",
        "layers",
        "        return leave(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp)",
        "        return leave(found, self.tp)",
    ),
    (
        "tensor_parallel",
        "layers",
        "        dist.all_reduce(largest, dist.ReduceOp.MAX, group=tp.group)\n",
        "",
    ),
    ("tensor_parallel", "layers", "if first + share > vocab:", "if False:"),
    ("tensor_parallel", "layers", "squeeze(-1).masked_fill(elsewhere, 0)", "squeeze(-1)"),
    ("tensor_parallel", "layers", "-gradient.masked_fill(elsewhere, 0)", "-gradient"),
    ("tensor_parallel", "layers", "gather_features(y, self.tp) if self.gather_output else y", "y"),
    (
        "tensor_parallel",
        "layers",
        "unflatten(dim, (parts, ranks, -1)).select(dim + 1, self.tp.rank)",
        "unflatten(dim, (ranks, parts, -1)).select(dim, self.tp.rank)",
    ),
    ("tensor_parallel", "layers", ".narrow(dim, 0, size)", ""),
    ("tensor_parallel", "net", "            dist.broadcast(whole, group_src=0, group=group)\n", ""),
    (
        "tensor_parallel",
        "net",
        "F.linear(x, self.weight), self.tp)\n",
        "F.linear(x, self.weight, self.bias), self.tp)\n        return y\n",
    ),
    ("tensor_parallel", "net", "split_features(x, self.tp) if self.split_input else x", "x"),
    ("tensor_parallel", "net", "if of_weight else None", ""),
    ("tensor_parallel", "net", "            self._sum_replicated()\n", "            pass\n"),
    ("tensor_parallel", "net", "param.requires_grad))", "True))"),
    ("tensor_parallel", "parity", "        dist.all_reduce(squares[1], group=self.tp.group)\n", ""),
    ("tensor_parallel", "parity", "dist.all_reduce(squares[1], group", "dist.all_reduce(squares, group"),
    (
        "tensor_parallel",
        "parity",
        "microloss = parallel(*batch) / config.accum",
        "microloss = parallel(*batch)",
    ),
    (
        "tensor_parallel",
        "parity",
        "self.start_reduce_scatter if self.sequence_parallel else self.start_all_reduce",
        "self.start_reduce_scatter if self.sequence_parallel else (lambda x: lambda: x)",
    ),
    (
        "tensor_parallel",
        "sequence",
        "positions = positions.chunk(tp.ranks)[tp.rank]",
        "positions = positions.chunk(tp.ranks)[0]",
    ),
    (
        "tensor_parallel",
        "sequence",
        "pieces.movedim(0, dim).flatten(dim, dim + 1)",
        "pieces.flip(0).movedim(0, dim).flatten(dim, dim + 1)",
    ),
    ("tensor_parallel", "sequence", "received.sum(0) if on_gloo else received", "received[0]"),
    ("tensor_parallel", "pairs", "tp.start_all_reduce(gradient.clone())()", "gradient"),
    (
        "tensor_parallel",
        "pairs",
        "lambda x: tp.start_all_reduce(x)(), lambda gradient: gradient",
        "lambda x: tp.start_all_reduce(x)(), lambda gradient: tp.start_all_reduce(gradient.clone())()",
    ),
    (
        "tensor_parallel",
        "pairs",
        "lambda g: g.chunk(tp.ranks, last)[tp.rank]",
        "lambda g: g.chunk(tp.ranks, last)[0]",
    ),
    ("tensor_parallel", "tensor misuse", "if size % (parts * ranks) and not pad:", "if False:"),
    ("tensor_parallel", "tensor misuse", "if any(owners[before[name]] > 1 and", "if any(False and"),
    ("tensor_parallel", "tensor misuse", "            if not names:", "            if False:"),
    (
        "tensor_parallel",
        "tensor overlap",
        "sum_over_ranks = tp.start_sum(gradient @ weight) if of_x else lambda: None",
        "summed = tp.start_sum(gradient @ weight)()\n        sum_over_ranks = lambda: summed",
    ),
    (
        "tensor_parallel",
        "tensor overlap",
        "            work.wait()\n            return x\n",
        "            return x\n",
    ),
    ("tensor_parallel", "held", "before = dict(", "self.before = before = dict("),
    (
        "tensor_parallel",
        "tensor ledger",
        "ctx.save_for_backward(x if",
        "x = tp.start_all_gather(x)() if tp.sequence_parallel else x\n        ctx.save_for_backward(x if",
    ),
    ("tensor_parallel", "tensor ledger", "if tp.overlap and", "if"),
    ("tensor_parallel", "tensor refusals", "if config.heads % ranks:", "if False:"),
    (
        "tensor_parallel",
        "tensor refusals",
        "if config.sequence_parallel and config.context % ranks:",
        "if False:",
    ),
    ("tensor_parallel", "tensor refusals", "if config.batch % config.accum:", "if False:"),
    (
        "tensor_parallel",
        "groups",
        "self.sequence_parallel, self.overlap, self.group = sequence_parallel, overlap, group",
        "self.sequence_parallel, self.overlap, self.group = sequence_parallel, overlap, None",
    ),
    (
        "tensor_parallel",
        "groups",
        "group_src=0, group=group)\n            tensor.det",
        "src=0)\n            tensor.det",
    ),
    ("tensor_parallel", "net", "(max_norm / (norm + 1e-6)).clamp(max=1)", "max_norm / (norm + 1e-6)"),
    (
        "tensor_parallel",
        "layers",
        "wide = logits.to(torch.promote_types(logits.dtype, torch.float32))",
        "wide = logits * 1",
    ),
    (
        "tensor_parallel",
        "pairs",
        "tp.start_all_reduce(gradient.clone())()",
        "tp.start_all_reduce(gradient)()",
    ),
    (
        "tensor_parallel",
        "net",
        "for p in self.replicated if p.grad is not None]",
        "for p in self.replicated]",
    ),
    ("tensor_parallel", "tensor misuse", "if block.heads % tp.ranks:", "if False:"),
    ("tensor_parallel", "tensor misuse", "if options != (None, None, False, False):", "if False:"),
    ("tensor_parallel", "exit", "import torch.distributed.nn", "#"),
]
MUTANTS += [
    ("checkpointing", "bitwise", "        self.set_random()\n", "        pass\n"),
    ("checkpointing", "bitwise", "        self.set_random(self.before)\n", "        pass\n"),
    ("checkpointing", "bitwise", "            after.set_random()\n", "            pass\n"),
    (
        "checkpointing",
        "bitwise",
        "torch.autocast(kind, dtype, enabled,",
        "torch.autocast(kind, dtype, False,",
    ),
    ("checkpointing", "bitwise", "with torch.enable_grad(), self", "with self"),
    ("checkpointing", "bitwise", "    if not torch.is_grad_enabled():", "    if False:"),
    ("checkpointing", "bitwise", ".requires_grad_(learns)", ".requires_grad_(True)"),
    (
        "checkpointing",
        "bitwise",
        "x = whole[: like.numel()]",
        "x = whole.view(self.ranks, -1).flip(0).flatten()[: like.numel()]",
    ),
    ("checkpointing", "bitwise", "start, self.top = self.top, self.top +", "start, self.top = 0, 0 +"),
    ("checkpointing", "changes", "if describe(tensor) != self.saved[count]:", "if False:"),
    (
        "checkpointing",
        "changes",
        '                raise RuntimeError(f"computed again, it saved',
        '                str(f"computed again, it saved',
    ),
    ("checkpointing", "changes", "if recorded is not function:", "if False:"),
    ("checkpointing", "changes", "if tensor._version != version:", "if False:"),
    ("checkpointing", "changes", "for tensor in written):", "for tensor in ()):"),
    (
        "checkpointing",
        "changes",
        "written = tensors_in(value)",
        "written = tensors_in([value][:1 - (type(value) is list)])",
    ),
    ("checkpointing", "changes", "else kwargs.get(argument.name)", "else None"),
    ("checkpointing", "changes", "if versions(result) != before:", "if False:"),
    ("checkpointing", "changes", "DispatchKey.ADInplaceOrView, False)", "DispatchKey.ADInplaceOrView, True)"),
    ("checkpointing", "hooks", "all_gather(whole, own, group=self.group)", "all_gather(whole, own)"),
    ("checkpointing", "hooks", "x = x if like.is_contiguous() else", "x = x if True else"),
    ("checkpointing", "hooks", "            last.wait()\n", "            pass\n"),
    ("checkpointing", "changes", "tuple(tensor.shape), tensor.dtype, ", "tuple(tensor.shape), "),
    ("checkpointing", "changes", "class EnoughComputed(BaseException)", "class EnoughComputed(Exception)"),
    ("checkpointing", "changes", "if self.top > len(self.memory):", "if False:"),
    (
        "checkpointing",
        "peak",
        "            tensor, version = self.here.pop(number)",
        "            tensor, version = self.here[number]",
    ),
    (
        "checkpointing",
        "activations",
        "chosen = self.every and i % self.every == 0\n            x = check",
        "chosen = self.every and i and i % self.every == 0\n            x = check",
    ),
    (
        "checkpointing",
        "activations",
        "    once.forget_outputs()\n",
        "    once.outputs_needed = len(once.outputs)\n    once.forget_outputs()\n",
    ),
    ("checkpointing", "activations", "                raise EnoughComputed\n", "                pass\n"),
    ("checkpointing", "activations", "if function not in self.keep:", "if True:"),
    (
        "checkpointing",
        "activations",
        "piece = x.detach().flatten()",
        "piece = (x.detach() + 0).flatten(); Checkpoint.kept = [*getattr(Checkpoint, 'kept', []), x]",
    ),
    ("checkpointing", "copies", "            self._fetch(before)\n", "            pass\n"),
    ("checkpointing", "copies", "        wait()\n        return x\n", "        return x\n"),
    ("checkpointing", "copies", "        self.host.tickets -= 1", "        pass"),
    ("checkpointing", "policy", "microloss = model(*batch) / config.accum", "microloss = model(*batch)"),
    ("checkpointing", "policy", "[self.rank * share : (self.rank + 1) * share]", "[:share]"),
    ("checkpointing", "activations", "    once.forget_outputs()\n", ""),
    ("checkpointing", "refusals", "if config.batch % config.accum:", "if False:"),
    ("checkpointing", "exit", "import torch.distributed.nn", "#"),
]
SHARDED = [  # the same edit in zero1.py, zero2.py and zero3.py
    ("parity", "microloss = zero(*batch) / config.accum", "microloss = zero(*batch)"),
    ("parity", "ledger.log(step, loss / ranks, grad_norm)", "ledger.log(step, loss, grad_norm)"),
    ("parity", "        dist.all_reduce(total, group=self.group)\n", ""),
    ("parity", "norm = total[0].sqrt()", "norm = torch.stack(squares).sum().sqrt()"),
    ("parity", "received.view(-1, len(shard)), dim=0", "received.view(len(shard), -1), dim=1"),
    ("parity", "unit.gradient_shard.mul_((max_norm / (norm + 1e-6)).clamp(max=1))", "pass"),
    (
        "zero",
        "share = -(-sum(p.numel() for p in params) // ranks)",
        "share = sum(p.numel() for p in params) // ranks",
    ),
    ("zero", "None if p in self.zero.unused else gradient", "gradient"),
    ("zero", "if not here and not flag > 0}", "if not here}"),
    ("zero", "[*module.parameters(), *module.buffers()]", "[*module.parameters()]"),
    ("zero", "group_src=0", "group_src=self.ranks - 1"),
    ("zero", "unit.views[param].zero_()", "pass"),
    ("zero wait", "        work.wait()\n", ""),
    ("zero wait", "            self.arrival.wait()\n", ""),
    ("masters", "            unit.shard.copy_(unit.master)\n", ""),
    ("masters", "self.shard.float() if", "self.shard if"),
    ("zero misuse", "        if any(other != shapes for other in everyone):", "        if False:"),
    ("refusals", "if config.batch % (ranks * config.accum):", "if False:"),
    ("exit", "import torch.distributed.nn", "#"),
]
MUTANTS += [(name, *edit) for edit in SHARDED for name in ("zero1", "zero2", "zero3")]
LATER = [  # in zero2.py and zero3.py
    (
        "held",
        "        received.untyped_storage().resize_(0)",
        '        globals().setdefault("KEPT", []).append(shares)',
    ),
    (
        "held",
        "            unit.gradients.untyped_storage().resize_(0)",
        '            globals().setdefault("KEPT", []).append(unit.gradients)',
    ),
    ("held", "        param.grad = None\n", ""),
    ("parity", "            unit.gradient_shard = None\n", ""),
    ("whole", "            self._finish_reduce_scatter()  # the last", "            # the last"),
    ("parity", "else unit.gradient_shard.add_(shard)", "else shard"),
    ("parity", "param.grad, self.ranks, out", "param.grad, 1, out"),
    ("zero wait", "            wait()\n", ""),
    ("zero", "self.gradients[sum(p.numel() for p in self.params) :] = 0", "self.gradients[:] = torch.nan"),
]
MUTANTS += [(name, *edit) for edit in LATER for name in ("zero2", "zero3")]
MUTANTS += [
    ("zero1", "parity", DIVIDE, DIVIDE.replace("self.ranks", "1")),
    ("zero1", "zero", " " * 8 + DIVIDE[1:], " " * 16 + "pass\n"),
    ("zero1", "zero wait", "            unit.wait_for_gradients()\n", ""),
    (
        "zero1",
        "zero wait",
        "submodule.register_forward_pre_hook(unit.wait_for_weights, prepend=True)",
        "submodule.eval()",
    ),
    ("zero1", "wire", "= self.syncing, False", "= self.syncing, True"),
    ("zero1", "zero misuse", "if param not in unit.waiting_for:", "if False:"),
    ("zero1", "zero overlap", "while self.overlap and", "while False and"),
    ("zero1", "parity", "unit.master[where] for", "unit.master[where].clone() for"),
    ("zero2", "zero overlap", "while self.to_launch and not self.to_launch[0].waiting_for:", "while False:"),
    ("zero3", "prefetch", "[len(self.called) :][: self.prefetch]", "[len(self.called) :]"),
    ("zero3", "prefetch", "[len(self.called) :][: self.prefetch]", "[:0]"),
    ("zero3", "prefetch", "*to_come[:-1][::-1][: self.prefetch]", ""),
    ("zero3", "prefetch", "(self.module, *self.expected[-1 - self.prefetch :])", "(self.module,)"),
    ("zero3", "held", "        self.weights.untyped_storage().resize_(0)", "        pass"),
    ("zero3", "held", "self.weights.chunk(ranks)[rank].clone()", "self.weights.clone().chunk(ranks)[rank]"),
    ("zero3", "zero", "            unit.reshard()  # a forward", "            # a forward"),
    ("zero3", "twice", "if submodule not in (self.module, *to_come):", "if submodule is not self.module:"),
    ("zero3", "zero misuse", "if not isinstance(leaf, (torch.Tensor", "if not isinstance(leaf, (object"),
    ("zero3", "twice", "prepend=True", "prepend=False"),
    ("zero2", "zero wait", "prepend=True", "prepend=False"),
    ("zero1", "zero wait", "prepend=True", "prepend=False"),
    ("zero3", "twice", "        if self.in_backward:\n            return\n", ""),
    ("zero3", "twice", "(p.dtype, p.requires_grad) for p in params", "p.dtype for p in params"),
    ("zero3", "twice", "module if others else first", "first"),
    ("zero3", "flags", '"prefetch": 0, ', ""),
]


@pytest.mark.parametrize("name, promise, old, new", MUTANTS)
def test_mutant_is_rejected(name, promise, old, new, tmp_path, tmp_path_factory):
    lesson = next(lesson for lesson in LESSONS if lesson.name == name)
    text = Path(lesson.path).read_text()
    assert text.count(old) == 1, f"{text.count(old)} places to edit"
    mutant = tmp_path_factory.mktemp("mutant") / f"{name}.py"
    mutant.write_text(text.replace(old, new))
    with pytest.raises((AssertionError, RankFailed, AttributeError, UserWarning)):
        CHECKS[promise](lesson, str(mutant), tmp_path)
