"""Every lesson as on GPUs, without one: its streams on a simulated GPU, and the order that NCCL needs."""

import gc
import os
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from tests import nccl_order
from tests.harness import FORK, TINY, crew, load, path_of, run_of, spec

# How often the host waits for the GPU in a step of k microbatches: {(why, where): times}.
WAITS = {("copy", "microbatches()"): 1, ("item", "print_step()"): 2}


def begin():
    gc.freeze()
    import tests.pretend  # noqa: F401 before any backward


@cache
def pool():
    return ProcessPoolExecutor(1, FORK, initializer=begin)


def together(function, name, rows=((),)):
    """function(path of a lesson or mutant, *row) for all rows, in one process: operators are known then."""
    path = str(path_of(name.removesuffix(".py")))
    for future in [pool().submit(function, path, *row) for row in rows]:
        future.result()


def on_gpu(path, size=2, rank=1, accum=3, flags="--dtype bf16", main=None):
    """A rank keeps what pretend.py and streams.py hold."""
    from tests.streams import Streams  # which gives this process a device that others must not have

    name = Path(path).stem
    flags = flags if run_of(name)[0] else crew(name, size, flags)[1]
    with tempfile.TemporaryDirectory() as folder:
        own = spec(name).flags if "--layers" in spec(name).flags else ""  # a pipeline has more stages than 2
        flags = f"{TINY} --width 96 --vocab 264 --layers 2 {own} --steps 2 --accum {accum} {flags}"
        # Autograd has a thread for the first simulated GPU, but none for the others of dp_threads.py.
        with torch.autograd.set_multithreading_enabled(not run_of(name)[0] or "--naive" not in flags):
            gpu = Streams(path, rank, size).run(flags.replace("FOLDER", folder), main)
    expected = dict(WAITS)
    for which, times in spec(name).waits.items():
        if {*which.split()} <= {*flags.split()}:
            expected |= times
    expected = Counter({key: times_of(times, accum) for key, times in expected.items()})
    both = ("item", "train_share()") in expected  # workers may be on their way to the next step: count both
    waits = Counter()
    for (step, thread, why, where), times in gpu.waits.items():
        key = why, where.split()[1]
        if not thread.startswith(("up", "host")) and (step == 1 or (step == 0 and both and key in expected)):
            waits[key] += times
    expected += expected if both else {}
    assert waits == expected or main, f"the host waits {waits}, not {expected}"


def times_of(times, accum):
    """3, or "3k": three times in each microbatch."""
    return int(times[:-1] or 1) * accum if isinstance(times, str) else times


def check_gpus(name):
    """On one rank and several, in bf16 and fp32, and with flags of its own."""
    lesson = spec(name)
    size = 1 if run_of(name)[0] else 4
    rows = [(1, 0, 1, "--dtype bf16"), (size, 0, 3, ""), (size // 2 or 1, size // 4, 3, "--dtype bf16")]
    own = lesson.variants if lesson.gpu is None else lesson.gpu
    together(on_gpu, name, rows + [(size, 0, 3, flags) for flags in own])


def in_order(path, size=4, flags="", main=None):
    """All ranks get through a run."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        text.write_bytes(b"a" * 300)  # the same tokens on all ranks, so that all experts are as busy
        shape = f"--data {text} --layers 2 --heads 24 --width 48 --context 48 --vocab 264 --batch 24"
        nccl_order.replay(path, size, f"{shape} --steps 2 {flags}".replace("FOLDER", folder), main)


def orders_of(name):
    """(ranks, flags) of a lesson's runs, and the function if it is not train()."""
    lesson = spec(name)
    own = lesson.variants if lesson.gpu is None else lesson.gpu
    return lesson.orders or [(2, ""), (3, ""), (8, ""), *((4, flags) for flags in own)]


def set_up_with(path, gpus, ranks, rank, hostid):
    """What a rank of so many on a host with so many GPUs chooses: (GPU or None, backend, NCCL_HOSTID)."""
    lesson = load(path)
    env = {"RANK": 8 + rank, "WORLD_SIZE": 16, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    cuda = mock.patch.multiple(torch.cuda, device_count=lambda: gpus, set_device=mock.Mock())
    with cuda, mock.patch.object(dist, "init_process_group"), mock.patch.dict(os.environ):
        os.environ.pop("NCCL_HOSTID", None)
        os.environ.update({key: str(value) for key, value in env.items()})
        os.environ.update({"NCCL_HOSTID": hostid} if hostid else {})
        assert lesson.join_world().type == ("cuda" if gpus else "cpu"), "another kind of device"
        assert not gpus or torch.cuda.set_device.called, "no GPU is set"
        chosen = torch.cuda.set_device.call_args[0][0] if gpus else None
        return chosen, *dist.init_process_group.call_args[0], os.environ.get("NCCL_HOSTID")


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
            assert device == (rank % gpus if gpus else None), f"{where}: another GPU"
            assert backend == ("nccl" if gpus else "gloo"), f"{where}: another backend"
            expected = given or (str(8 + rank) if 0 < gpus < ranks else None)
            assert hostid == expected, f"{where}: another host"


check_gpu = partial(together, on_gpu)
check_order = partial(together, in_order, rows=[(4,)])
