"""One rank of many, without the others: what does a lesson hold and send on 1024 ranks?

    python tools/simulate.py --ranks 1024 --rank 777 zero3.py --size 7.5b --dtype bf16
    python tools/simulate.py --ranks 32 pipeline.py --size 7.5b --accum 64 --schedule zb-h1 --json rank0.json

Runs the lesson's own train() as that rank and prints the lesson's own ledger. The process group pretends to
send (PyTorch's `fake` backend), and tensors have shapes but no data (its FakeTensorMode), so a model of any
size needs neither memory nor hardware. Shapes and bytes are the code's. Losses and times mean nothing.

The lesson's flags follow its name. Unless given, --steps is 1, and --batch a sequence per microbatch and rank
(per microbatch, where all ranks work on the same batch). What is held and sent is this rank's; a real run
prints the most of any rank, and the formulas give that. Operators are the CPU's: on a GPU, LayerNorm and
attention may keep other statistics for backward.
"""

import argparse
import functools
import importlib.util
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist


def refuse(problem):
    """End with exit code 2 and one line that says what to change."""
    print(f"{os.path.basename(sys.argv[0])}: {problem}", file=sys.stderr)
    sys.exit(2)


try:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError as error:
    refuse(f"torch {torch.__version__} has no fake tensors or process group where they were in 2.13: {error}")


def own_for_all(answers, answer, group=None):
    """In place of all_gather_object(): what this rank says, all say."""
    answers[:] = [answer] * len(answers)


def as_rank_0(function):
    """function, with this rank taken for rank 0, the one that prints and writes."""

    @functools.wraps(function)
    def wrapped(*args, **options):
        with mock.patch.object(dist, "get_rank", lambda group=None: 0):
            return function(*args, **options)

    return wrapped


PRETEND = {  # {(where, name): what stands in its place during the run}
    (dist, "all_gather_object"): own_for_all,
    # Text has a shape, too, and no data.
    (torch, "from_numpy"): lambda array: torch.empty(array.shape, dtype=getattr(torch, array.dtype.name)),
    # Module.to() does this with tensors that have data.
    (torch.utils, "swap_tensors"): lambda param, moved: setattr(param, "data", moved.data),
    # Without data all storages have the address 0; pipeline.py tells them apart by it.
    (torch.UntypedStorage, "data_ptr"): lambda storage: storage._cdata,
    (os, "posix_fallocate"): lambda *_: None,  # checkpointing.py's file for what it offloads stays empty
}


def load(path):
    """The module of a lesson of ranks."""
    if not os.path.isfile(path) or not path.endswith(".py"):
        refuse(f"{path}: no such lesson")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    lesson = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lesson)
    if not hasattr(lesson, "Ledger"):
        refuse(f"{path}: not a lesson")
    if hasattr(lesson, "ThreadLedger"):
        refuse(f"{path}: its devices are threads of one process, not ranks; run it as it is")
    return lesson


def parse(lesson, ranks, flags):
    """The lesson's flags, with the defaults of a simulation."""
    ledgers = [c for c in vars(lesson).values() if isinstance(c, type) and issubclass(c, lesson.Ledger)]
    share = ranks if all(ledger.data_parallel for ledger in ledgers) else 1
    batch = share * max(lesson.parse(flags).accum, 1)
    config = lesson.parse(["--steps", "1", "--batch", str(batch), *flags])
    for name in ("save", "trace"):
        if getattr(config, name):
            refuse(f"--{name} {getattr(config, name)}: a simulation has no data to write")
    if config.device == "cuda":
        refuse("--device cuda: a simulation uses no device; leave it out")
    if getattr(config, "balance", "") == "time":
        refuse("--balance time: a simulation has no times")
    config.device = "cpu"
    return config


def listen(lesson, rank):
    """Have the lesson print as this rank, and only what does not depend on data, time and other ranks."""
    ledger = lesson.Ledger
    ledger.held, ledger.sent = f"held by rank {rank}", f"sent by rank {rank} in a step (ring bytes)"
    ledger.log = lambda self, step, loss, grad_norm: None
    ledger.__init__, ledger.close = as_rank_0(ledger.__init__), as_rank_0(ledger.close)
    lesson.set_up, seen = as_rank_0(lesson.set_up), ledger.__torch_dispatch__

    def dispatch(self, function, types, args=(), kwargs=None):
        # To read a fake tensor's .device is an operator, at moments when real tensors have none.
        quiet = function.namespace == "prim"
        return function(*args, **(kwargs or {})) if quiet else seen(self, function, types, args, kwargs)

    ledger.__torch_dispatch__ = dispatch
    if hasattr(lesson, "PipelineLedger"):
        listen_to_pipeline(lesson)
    if hasattr(lesson, "Offloaded"):  # it would copy on a thread, but there is nothing to copy
        lesson.Offloaded._move = lambda self, ticket, x, out: lambda: None


def listen_to_pipeline(lesson):
    """In place of a timeline of all ranks: the activations of this one, with the bound of its schedule."""

    def add_outcome(self, pipe, config, history):
        count, most = lesson.in_flight(pipe.actions), lesson.in_flight(pipe.actions, self.of_stage)
        self.activations = {"activations": (f"{count} in flight", most)}

    def close(self, state_dict, held, sent):
        return lesson.Ledger.close(self, state_dict, held | self.activations, sent)

    lesson.PipelineLedger.add_outcome, lesson.PipelineLedger.close = add_outcome, close


def simulate(path, ranks, rank, flags, backend="nccl"):
    """Print the ledger of one rank of a lesson. Returns what the lesson's --json writes.

    path: the lesson's file. flags: a list of its flags. backend: "nccl", or "gloo", over which the lessons
    reduce-scatter by an all-to-all. Bad input ends the process with exit code 2 and a line on stderr.
    """
    lesson = load(path)
    config = parse(lesson, ranks, flags)
    listen(lesson, rank)
    with ExitStack() as stack:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())  # refuse() may have
        for (where, name), instead in PRETEND.items():
            stack.enter_context(mock.patch.object(where, name, instead, create=True))
        stack.enter_context(mock.patch.object(dist, "get_backend", lambda group=None: backend))
        stack.enter_context(FakeTensorMode())
        return lesson.train(config)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = refuse
    parser.add_argument("--ranks", type=int, required=True, help="how many there are")
    parser.add_argument("--rank", type=int, default=0, help="the one to be (default: 0)")
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"), help="(default: nccl)")
    parser.add_argument("lesson", help="its file")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the lesson's own")
    given, start = parser.parse_args(arguments), time.perf_counter()
    if given.ranks < 1:
        refuse(f"--ranks {given.ranks}: must be 1 or more")
    if not 0 <= given.rank < given.ranks:
        refuse(f"--rank {given.rank}: must be from 0 to {given.ranks - 1}, one of the --ranks")
    simulate(given.lesson, given.ranks, given.rank, given.flags, given.backend)
    took = f"rank {given.rank} of {given.ranks}, simulated in {time.perf_counter() - start:.1f} s"
    print(f"{took}: shapes and bytes are the code's, losses and times mean nothing")


if __name__ == "__main__":
    main()
