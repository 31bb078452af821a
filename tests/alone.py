"""One rank of a lesson, alone: a world whose other ranks are not there.
Collectives go nowhere, in torch's fake process group, and a thread works as late as it may. What the lesson
asks for goes to launch(), wait() and objects(), which streams.py and nccl_order.py have, each its own."""

import os
import sys
from collections import deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import timedelta
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from watch import tensors_in

from tests.harness import load

COLLECTIVES = ["all_reduce", "broadcast", "all_gather", "reduce_scatter_tensor", "reduce_scatter_single"]
COLLECTIVES += ["reduce", "all_gather_into_tensor", "all_gather_single", "all_to_all_single"]
COLLECTIVES += ["send", "recv", "isend", "irecv"]

Launch = namedtuple("Launch", "name group given made peer batch options where")
Message = namedtuple("Message", "op tensor peer group group_peer", defaults=(None, None, None))


class Work:
    """What an asynchronous collective returns. It keeps its tensors until it has been waited for."""

    def __init__(self, rank, launches):
        self.rank = rank
        self.launches = launches

    def wait(self, timeout=timedelta(0)):
        assert not timeout, "with a timeout the host waits for NCCL"
        for launch in self.launches:
            self.rank.wait(launch)
        self.launches = []


class LateExecutor(ThreadPoolExecutor):
    """A thread that works when somebody waits for it: who forgets to will notice."""

    def __init__(self, rank, *args):
        super().__init__(*args)
        self.rank = rank
        self.jobs = deque()

    def submit(self, function, *args):
        self.jobs.append(Job(self, partial(function, *args)))
        return self.jobs[-1]


class Job:
    def __init__(self, executor, function):
        self.executor = executor
        self.function = function
        self.known = executor.rank.known()

    def run(self):
        self.executor.rank.learn(self.known)
        self.value = self.function()
        self.known = self.executor.rank.known()

    def result(self):
        while self in self.executor.jobs:
            ThreadPoolExecutor.submit(self.executor, self.executor.jobs.popleft().run).result()
        self.executor.rank.learn(self.known)
        return self.value

    def done(self):
        return True


class Rank:
    """A rank of a world whose others are not there."""

    device = "cuda"

    def known(self, *_):
        """What this thread knows to have happened, for learn() of one that it starts, or waits for."""

    learn = known

    def __init__(self, path, rank, size):
        self.path = str(path)
        self.name = Path(path).name
        self.rank = rank
        self.size = size
        self.backends = {}  # {group: backend}
        self.step = 0

    def where(self):
        """The line of the lesson that is being executed."""
        frame = sys._getframe()
        while frame and frame.f_code.co_filename != self.path:
            frame = frame.f_back
        return f"{self.name}:{frame.f_lineno} {frame.f_code.co_name}()" if frame else "nowhere"

    def backend(self, group=None):
        return self.backends.get(group or dist.group.WORLD, "nccl")

    def collective(self, name):
        """A function of dist that is noted, and goes nowhere."""
        original = getattr(dist, name)
        parameters = signature(original)

        @wraps(original)
        def call(*args, batch=None, **kwargs):
            arguments = parameters.bind(*args, **kwargs).arguments
            launch = self.launch_of(name, batch, **arguments)
            few, many = sorted(sum(map(torch.numel, side)) for side in (launch.given, launch.made))
            fits = many == few * launch.group.size() or not ("gather" in name or "scatter" in name)
            assert fits, f"{launch.where}: {name} between {few} and {many} numbers"
            self.launch(launch)
            work = Work(self, [launch])
            if arguments.get("async_op") or name in ("isend", "irecv"):
                return work
            return work.wait()

        return call

    def launch_of(self, name, batch, group=None, **arguments):
        group = group or dist.group.WORLD
        peer = arguments.get("dst", arguments.get("src"))
        if peer is None:
            there = arguments.get("group_dst", arguments.get("group_src"))
            peer = None if there is None else dist.get_global_rank(group, there)
        made, *given = [tensors_in(value) for value in arguments.values() if tensors_in(value)]
        given = given[0] if given else made
        if "recv" in name or (name == "broadcast" and peer != self.rank):
            given = []
        if "send" in name:
            made = []
        options = {key: x for key, x in arguments.items() if key != "async_op" and not tensors_in(x)}
        return Launch(name, group, given, made, peer, batch, options, self.where())

    def batch(self, messages):
        launches = []
        for op, tensor, peer, group, group_peer in messages:
            end = "dst" if op.__name__ == "isend" else "src"
            where = {end: peer} if group_peer is None else {f"group_{end}": group_peer}
            launches += op(tensor, group=group, batch=messages, **where).launches
        return [Work(self, launches)]

    def all_gather_object(self, objects, own, group=None):
        self.objects("all_gather_object", group, None)
        objects[:] = [own] * len(objects)

    def gather_object(self, own, objects=None, dst=0, group=None):
        self.objects("gather_object", group, None)
        if objects:
            objects[:] = [own] * len(objects)

    def broadcast_object_list(self, objects, src=None, group=None, device=None):
        self.objects("broadcast_object_list", group, device)

    def join(self, init, backend, **_):
        if dist.is_initialized():  # by another lesson in this world
            return
        init(f"cpu:fake,{self.device}:fake", store=FakeStore(), rank=self.rank, world_size=self.size)
        self.backends[dist.group.WORLD] = backend

    def make_group(self, original, ranks, timeout, backend, *more, **options):
        group = original(ranks, timeout, None, *more, **options)
        self.backends[group] = backend or self.backend()
        return group

    def instead(self):
        """{(where, name): what stands there in this world}"""
        instead = {(dist, name): self.collective(name) for name in COLLECTIVES if hasattr(dist, name)}
        make_group = partial(self.make_group, distributed_c10d._new_group_with_tag)
        return instead | {
            (dist, "init_process_group"): partial(self.join, dist.init_process_group),
            (dist, "get_backend"): self.backend,
            (dist, "batch_isend_irecv"): self.batch,
            (dist, "P2POp"): Message,
            (dist, "all_gather_object"): self.all_gather_object,
            (dist, "gather_object"): self.gather_object,
            (dist, "broadcast_object_list"): self.broadcast_object_list,
            (dist, "barrier"): lambda group=None, **_: self.objects("barrier", group, None),
            (distributed_c10d, "_new_group_with_tag"): make_group,
            (torch, "save"): lambda *_: None,
            (torch, "load"): lambda *_, **__: {},
        }

    @contextmanager
    def world(self):
        """Within it, dist is this rank's."""
        environment = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, {key: str(x) for key, x in environment.items()}))
            for (where, name), new in self.instead().items():
                stack.enter_context(mock.patch.object(where, name, new, create=True))
            stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
            yield

    def load_lesson(self):
        """The lesson, with threads that work late, and steps that are counted and not printed."""
        self.lesson = lesson = load(self.path, self.device)
        lesson.print_step = partial(self.print_step, lesson.print_step)
        if hasattr(lesson, "ThreadPoolExecutor") and not hasattr(lesson, "Server"):
            lesson.ThreadPoolExecutor = partial(LateExecutor, self)
            lesson.wait = lambda jobs: [job.result() for job in jobs]
        return lesson

    def print_step(self, print_step, *args):
        print_step(*args)
        self.step += 1

    def run(self, flags, main=None):
        """The lesson's train(), or main(lesson, config), with these flags."""
        with self.world(), redirect_stdout(None):
            lesson = self.load_lesson()
            self.config = lesson.parse(flags.split())
            main(lesson, self.config) if main else lesson.train(self.config)
        return self
