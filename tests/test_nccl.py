"""Every lesson as on GPUs, without one: its streams on a simulated GPU, and the order that NCCL needs."""

import gc
import os
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from test_all import LESSONS
from tests import nccl_order
from tests.harness import FORK, ROOT, TINY, holds, load, mutants
from tests.streams import Streams
from tests.test_pipeline import SCHEDULES, V

SCHEDULES = SCHEDULES | V
# Flags of its own that each lesson is run with, beside none.
OWN = {lesson.name: lesson.variants for lesson in LESSONS} | {
    "dp_threads": ("--no-threads",),
    "dp_async": ("--mode asp", "--mode ssp"),
    "uneven": ("--order balanced", "--pack"),
    "hsdp": ("--shard 2", "--shard 1", "--shard 2 --prefetch 0"),
    "diloco": ("--inner-steps 4 --steps 8 --fragments 2 --delay 1",),
    "offload": ("--params",),
    "context_parallel": ("--kind ring", "--kind ulysses", "--documents"),
    "expert_parallel": ("--ep 1", "--capacity-factor 1 --top-k 1 --bias-rate 0.005"),
    "expert_zero": ("--ep 1", "--ep 4 --top-k 1 --bias-rate 0.005"),
    "pipeline": ("--schedule naive", "--schedule gpipe"),
    "zero_bubble": ("--schedule zb-h2",),
    "pipeline_v": (),
    "parallel_3d": ("--zero 1", "--tp 1 --pp 2", "--tp 1 --pp 1"),
    "fusion": ("--plain attention loss optimizer",),
    "resume": ("--checkpoint FOLDER/RANK --every 1",),
}
ALGORITHMS = "tree_broadcast recursive_doubling_all_reduce halving_doubling_all_reduce pairwise_all_to_all"
ALONE = ("single", "dp_threads", "dp_async")
# How often the host waits for the GPU in a step of k microbatches: {(why, where): times}.
WAITS = {("copy", "microbatches()"): 1, ("item", "print_step()"): 2}
NAMED = {
    "dp_async": {("copy", "microbatches()"): 2, ("item", "train_share()"): 2, ("item", "print_step()"): 1},
    "expert_parallel": {("copy", "all_gather_counts()"): "k"},
    "expert_zero": {("copy", "all_gather_counts()"): "k"},
    "context_parallel --documents": {("copy", "__init__()"): "k"},
    "diloco": {("copy", "train()"): 1, ("item", "print_step()"): 0},
    "diloco --delay": {("copy", "microbatches()"): 4},
    "uneven": {("copy", "microbatches()"): 0, ("copy", "load_microbatches()"): 1, ("item", "agree()"): 1},
    "offload": {("item", "step()"): 1},
    "resume --checkpoint": {("copy", "train()"): 1},
    "reshard": {("item", "print_served()"): 1},
}


@cache
def pool():
    return ProcessPoolExecutor(1, FORK, initializer=gc.freeze)


def together(function, name, rows=((),)):
    """function(path of a lesson or mutant, *row) for all rows, in one process: operators are known then."""
    path = str((ROOT / name).with_suffix(".py"))
    for future in [pool().submit(function, path, *row) for row in rows]:
        future.result()


def on_gpu(path, size=2, rank=1, accum=3, flags="--dtype bf16", main=None):
    """A rank keeps what pretend.py and streams.py hold."""
    name = Path(path).stem
    with tempfile.TemporaryDirectory() as folder:
        save = "" if name == "offload" else f"--save {folder}/weights.pt"
        flags = f"--inner-steps 1 {flags}" if name == "diloco" else flags
        flags = f"{TINY} --width 96 --vocab 264 --layers 2 --steps 2 --accum {accum} {save} {flags}"
        # Autograd has a thread for the first simulated GPU, but none for the others of dp_threads.py.
        with torch.autograd.set_multithreading_enabled("--no-threads" not in flags):
            gpu = Streams(path, rank, size).run(flags.replace("FOLDER", folder), main)
    expected = dict(WAITS)
    for which, times in NAMED.items():
        if {name, *flags.split()}.issuperset(which.split()) and which.startswith(name):
            expected |= times
    expected = Counter({key: accum if times == "k" else times for key, times in expected.items()})
    both = name == "dp_async"  # its workers may be on their way to the next step: count both
    waits = Counter()
    for (step, thread, why, where), times in gpu.waits.items():
        key = why, where.split()[1]
        if not thread.startswith(("up", "host")) and (step == 1 or (step == 0 and both and key in expected)):
            waits[key] += times
    expected += expected if both else {}
    assert waits == expected or main, f"the host waits {waits}, not {expected}"


def drop_and_change(lesson, config):
    """A checkpoint is dropped, and its input changed in place, while it is on its way to the host."""
    device, _ = lesson.set_up(config)
    x, store = torch.ones(96, device=device), lesson.Partitioned(device, offload=True)
    for _ in range(2):
        y = lesson.checkpoint(torch.sin, x, store=store)
        x += y


@pytest.mark.long_table
@pytest.mark.parametrize("name", OWN)
def test_a_lesson_runs_on_gpus(name):
    size = 1 if name in ALONE else 4
    rows = [(1, 0, 1, "--dtype bf16"), (size, 0, 3, ""), (size // 2 or 1, size // 4, 3, "--dtype bf16")]
    together(on_gpu, name, rows + [(size, 0, 3, flags) for flags in OWN[name]])


def in_order(path, size=4, flags="", main=None):
    """All ranks get through a run."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        text.write_bytes(b"a" * 300)  # the same tokens on all ranks, so that all experts are as busy
        shape = f"--data {text} --layers 2 --heads 24 --width 48 --context 48 --vocab 264 --batch 24"
        nccl_order.replay(path, size, f"{shape} --steps 2 {flags}".replace("FOLDER", folder), main)


def compare(lesson, config):
    lesson.compare(config)


def first(algorithm, lesson, config):
    """An algorithm that is the first to use its group."""
    lesson.set_up(config, replicas=1)
    getattr(lesson, algorithm)(torch.zeros(config.batch))


def orders(name):
    """(ranks, flags) of a lesson's runs, and the function if it is not train()."""
    if name == "collectives":
        mains = [None, compare, *(partial(first, algorithm) for algorithm in ALGORITHMS.split())]
        flags = "--batch 120 --context 8 --megabytes 1e-3"
        return [(size, flags, main) for size in (3, 4, 6) for main in mains]
    if name in SCHEDULES:
        small = "--layers 8 --batch 16 --heads 1 --width 8 --context 8"
        rows = [*product((2, 4), SCHEDULES[name], (4, 8)), *product((3,), SCHEDULES[name][:3], (1, 4))]
        rows += product((8,), SCHEDULES[name] if name == "pipeline_v" else (), (16,))  # many sends at once
        small += " --schedule {}" if name != "pipeline_v" else ""  # which has only one
        return [(size, f"{small.format(schedule)} --accum {k}") for size, schedule, k in rows]
    many = "--experts 24"
    flags = {"expert_parallel": many, "expert_zero": many, "parallel_3d": "--layers 8"}.get(name, "")
    own = [(4, own) for own in OWN[name]]
    if name == "parallel_3d":
        meshes = [(4, 2, 1), (4, 1, 2), (4, 1, 4), (8, 2, 4), (8, 2, 2)]
        own = [(size, f"--tp {tp} --pp {pp} --zero 1") for size, tp, pp in meshes]
    return [(size, f"{flags} {own}") for size, own in [*((size, "") for size in (2, 3, 8)), *own]]


@pytest.mark.long_table
@pytest.mark.parametrize("name", [name for name in OWN if name not in ALONE])
def test_ranks_meet_in_the_order_that_nccl_needs(name):
    together(in_order, name, orders(name))


def set_up_with(path, gpus, ranks, rank, hostid):
    """What a rank of so many on a host with so many GPUs sets up: (device, backend, NCCL_HOSTID)."""
    lesson = load(path)
    env = {"RANK": 8 + rank, "WORLD_SIZE": 16, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    cuda = mock.patch.multiple(torch.cuda, device_count=lambda: gpus, set_device=mock.Mock())
    world = {"is_initialized": lambda: False, "get_rank": lambda: 1, "init_process_group": mock.Mock()}
    with cuda, mock.patch.multiple(dist, **world), mock.patch.dict(os.environ):
        os.environ.pop("NCCL_HOSTID", None)
        os.environ.update({key: str(value) for key, value in env.items()})
        os.environ.update({"NCCL_HOSTID": hostid} if hostid else {})
        device, _ = lesson.set_up(lesson.parse(["--batch", "64"]))
        return str(device), *dist.init_process_group.call_args[0], os.environ.get("NCCL_HOSTID")


def check_shared(path):
    """With fewer GPUs than ranks on a host NCCL takes each rank for a host, unless the user knows better."""
    for gpus, ranks, given in (
        (0, 4, None),
        (1, 1, None),
        (1, 4, None),
        (2, 4, None),
        (4, 4, None),
        (1, 2, "a"),
    ):
        for rank in range(ranks):
            device, backend, hostid = set_up_with(path, gpus, ranks, rank, given)
            where = f"{gpus} GPUs, {ranks} ranks"
            assert device == (f"cuda:{rank % gpus}" if gpus else "cpu"), f"{where}: another device"
            assert backend == ("nccl" if gpus else "gloo"), f"{where}: another backend"
            expected = given or (str(8 + rank) if 0 < gpus < ranks else None)
            assert hostid == expected, f"{where}: another host"


@pytest.mark.parametrize("name", OWN)
def test_ranks_that_share_a_gpu_meet_over_nccl(name):
    check_shared(name)


SHARED = [
    ('os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])', "pass", check_shared, "another host"),
    ('.setdefault("NCCL_HOSTID", os.environ["RANK"])', '["NCCL_HOSTID"] = os.environ["RANK"]',
     check_shared, "another host"),
    ("if 0 < gpus < int", "if gpus < int", check_shared, "0 GPUs, 4 ranks: another host"),
    ("if 0 < gpus < int", "if 0 < gpus <= int", check_shared, "1 GPUs, 1 ranks: another host"),
    ('"nccl" if gpus else "gloo"', '"gloo"', check_shared, "another backend"),
]  # fmt: skip
test_a_mutant_is_rejected_where_ranks_share_a_gpu = mutants(SHARED, "zero3")


def check_order(path):
    flags = "--kind ring" if Path(path).stem == "context_parallel" else ""
    together(in_order, path, [(4, flags)])


check_gpu = partial(together, on_gpu)
check_offload = partial(together, on_gpu, rows=[(2, 1, 3, "--policy offload")])
check_dropped = partial(together, on_gpu, rows=[(2, 1, 3, "--dtype bf16", drop_and_change)])
SET_DEVICE = "torch.cuda.set_device(device if gpus else -1)"
HOST, WAITS_IN, NO_DEVICE = "of the host", "the host waits", "over NCCL before torch.cuda.set_device"
USES, FREES = "uses what a collective still", "empties what a collective still uses"
TAKES, LATE = "takes memory that another stream still uses", "uses what another stream has not finished"
LAUNCHES = "launches a collective on what another stream has not finished"
FREE_FIRST = "self.flat_grad.untyped_storage().resize_(0)\n        self.reduce_work.wait()"
ON_GPU = [
    ("ddp pipeline", SET_DEVICE, "pass", NO_DEVICE),
    ("ddp", "all_reduce(self.flat_grad,", "all_reduce(self.flat_grad.cpu(),", HOST),
    (
        "zero1",
        "self.own_param.copy_(self.shard.data)",
        "self.own_param.copy_(self.shard.data.cpu())",
        WAITS_IN,
    ),
    ("zero2", "mul(param.grad.to_dense(), 1", "mul(param.grad, param.grad.sum().item()", WAITS_IN),
    ("zero3", "[-self.n_shards :].zero_()", ".any().item()", WAITS_IN),
    ("tensor_parallel", "all_reduce(grad_x,", "all_reduce(grad_x.cpu(),", HOST),
    ("sequence_parallel", "= x.new_empty(n_ranks", "= torch.empty(n_ranks", HOST),
    ("sequence_parallel", "x.new_empty(parts[0].shape)", "torch.empty_like(x)", "numbers"),
    ("fusion", "x = model.norm(x)", "x = model.norm(x.cpu())", HOST),
    ("ddp", "        self.work.wait()\n", "", USES),
    ("zero1 zero2 zero3", "self.gather_work.wait()", "pass", USES),
    ("diloco zero1", "self.reduce_work.wait()", "pass", USES),
    ("zero2 zero3", "self.reduce_work.wait()", "pass", FREES),
    ("zero2 zero3", "self.reduce_work.wait()", FREE_FIRST, FREES),
    ("muon", "self.broadcast_work.wait()", "pass", USES),
    ("muon", "unit.reduce_work.wait()", "pass", USES),
    ("tensor_parallel zero_r", "        work.wait()\n", "", USES),
    ("sequence_parallel", "work.wait()\n        return torch.cat", "return torch.cat", USES),
    ("sequence_parallel", "work.wait()\n        return received", "return received", USES),
    ("offload", "torch.cuda.current_stream().wait_stream(self.uploader.stream)", "pass", USES),
    ("offload", "self.stream.wait_stream(torch.cuda.current_stream())", "pass", LATE),
    ("offload", "launch_job.result().wait()", "launch_job.result()", USES),
    ("pipeline zero_bubble pipeline_v", "        work.wait()\n        return", "        return", USES),
    ("parallel_3d", "        self.work.wait()\n", "", USES),
    ("collectives", "        work.wait()\n", "        pass\n", USES),
]
OFFLOADED = [
    ("part.record_stream(self.stream)", "pass", check_offload, TAKES),
    ("part.record_stream(self.stream)", "pass", check_dropped, TAKES),
    ("F.pad(own, (0, size - len(own)))", "own", check_dropped, LATE),
    ("self.stream.wait_stream(torch.cuda.current_stream(self.device))", "pass", check_offload, LATE),
    ("            work = all_gather(flat", "        work = all_gather(flat", check_offload, LAUNCHES),
]
MEET, WAIT = "ranks do not meet", "ranks wait for one another"
OTHER_GROUP = "self.groups['FB'.replace(op, '')]"
ONE_GROUP = "dict.fromkeys('FB', [dist.new_group()] * 2)"
ALONE_IN = "if rank == 0:\n            dist.all_reduce(loss)"
UNBATCHED = """    for op in ops:
        op.op(op.tensor, op.peer).wait()
    for work in []:"""
ORDER = [
    ("ddp", "dist.all_reduce(loss)", ALONE_IN, MEET),
    ("zero1", "all_reduce(squares)", "all_reduce(squares[None][: dist.get_rank()])", MEET),
    ("muon", "broadcast(self.param, self.owner", "broadcast(self.param, dist.get_rank()", MEET),
    ("zero3", "broadcast(self.flat_param, 0", "broadcast(self.flat_param, dist.get_rank()", MEET),
    ("expert_parallel", "rows, received, sent,", "rows, received[::-1], sent,", MEET),
    ("parallel_3d", "ranks, axis, -1)", "ranks, axis, -1)[:: -1 if dist.get_rank() else 1]", MEET),
    ("pipeline pipeline_v", '{op: [dist.new_group(), dist.new_group()] for op in "FB"}', ONE_GROUP, WAIT),
    ("pipeline_v", "[dist.new_group(), dist.new_group()]", "[dist.new_group()] * 2", WAIT),
    ("zero_bubble", '{op: dist.new_group() for op in "FB"}', 'dict.fromkeys("FB", dist.new_group())', WAIT),
    ("pipeline zero_bubble", "self.ahead = 1\n", "self.ahead = 4\n", WAIT),
    ("zero_bubble", "self.world_size, self.groups[op]", f"self.world_size, {OTHER_GROUP}", WAIT),
    (
        "context_parallel",
        "after = (layout.rank + 1)",
        "after = (layout.rank + 1 - 2 * (layout.rank == 0))",
        WAIT,
    ),
    (
        "reshard",
        "self.units:\n            if self.how",
        "self.units[self.rank == 0 :]:\n            if self.how",
        MEET,
    ),
    ("collectives", "    for work in dist.batch_isend_irecv(ops):", UNBATCHED, WAIT),
]
test_a_checkpoint_may_be_dropped_and_its_input_changed = holds("zero_r", check_dropped)
test_a_mutant_is_rejected_on_gpus = mutants([(*row[:3], check_gpu, row[3]) for row in ON_GPU])
test_a_mutant_of_offloading_is_rejected_on_gpus = mutants(OFFLOADED, "zero_r")
test_a_mutant_is_rejected_by_nccls_rules = mutants([(*row[:3], check_order, row[3]) for row in ORDER])
