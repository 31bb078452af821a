"""GPUs that are not there: one rank of a lesson, alone, on a device of Python alone, over a pretended NCCL.

A lesson is loaded with "pretend" wherever it says "cuda". Tensors of that device have shapes and storages but
no data (FakeTensorMode), those of the host are real. Collectives go nowhere (torch's fake process group), and
a thread works as late as it may. A Rank sees collectives and waits, a Gpu also operators, copies and streams.
Promises is a Gpu that holds what a lesson must not do there; streams.py and nccl_order.py have others.
"""

import os
import sys
import threading
import types
from collections import Counter, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial, partialmethod, wraps
from inspect import signature
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)
INDEX = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
# Operators that take of a tensor its shape alone, or make a view.
SHAPES = {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "_unsafe_view"}
COLLECTIVES = ["all_reduce", "broadcast", "all_gather", "reduce_scatter_tensor", "reduce_scatter_single"]
COLLECTIVES += ["all_gather_into_tensor", "all_gather_single", "all_to_all_single"]
COLLECTIVES += ["send", "recv", "isend", "irecv"]

Launch = namedtuple("Launch", "name group given made peer batch where")
Message = namedtuple("Message", "op tensor peer group tag group_peer", defaults=[None, None, 0, None])


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def on_gpu(tensor):
    return isinstance(tensor, FakeTensor)


class Work:
    """What an asynchronous collective returns. It keeps its tensors until it has been waited for."""

    def __init__(self, rank, launches):
        self.rank = rank
        self.launches = launches

    def wait(self):
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

    def run_next(self):
        super().submit(self.jobs.popleft().run).result()


class Job:
    def __init__(self, executor, function):
        self.executor = executor
        self.function = function
        self.known = executor.rank.known()
        self.ended = False

    def run(self):
        self.executor.rank.learn(self.known)
        self.value = self.function()
        self.known = self.executor.rank.known()
        self.ended = True

    def result(self):
        while not self.ended:
            self.executor.run_next()
        self.executor.rank.learn(self.known)
        return self.value

    def done(self):
        return True


class Rank:
    """A rank of a world whose others are not there. What it does goes to the methods that do nothing here."""

    def launch(self, launch):
        """A collective or a message begins."""

    def wait(self, launch):
        """The current stream waits for it; the host does not."""

    def new_group(self, ranks, backend):
        """What all ranks call for each group, in the same order."""

    def objects(self, name, group, device):
        """An object collective."""

    def known(self):
        """What this thread knows of what has happened, which a job in another thread will learn()."""

    def learn(self, known):
        pass

    def __init__(self, path, rank, size):
        self.path = str(path)
        self.rank = rank
        self.size = size
        self.backends = {}  # {group: backend}
        self.step = 0

    def where(self):
        """The line of the lesson that is being executed."""
        frame = sys._getframe()
        while frame and frame.f_code.co_filename != self.path:
            frame = frame.f_back
        return f"{Path(self.path).name}:{frame.f_lineno} {frame.f_code.co_name}()" if frame else "nowhere"

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
            self.launch(launch)
            original(*args, **kwargs)
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
        first, *second = [tensors_in(value) for value in arguments.values() if tensors_in(value)]
        given = second[0] if second else first
        if "recv" in name or (name == "broadcast" and peer != self.rank):
            given = []
        made = [] if "send" in name else first
        return Launch(name, group, given, made, peer, batch, self.where())

    def batch(self, messages):
        works = []
        for message in messages:
            end = "dst" if message.op.__name__ == "isend" else "src"
            peer = {end: message.peer} if message.group_peer is None else {f"group_{end}": message.group_peer}
            works.append(message.op(message.tensor, group=message.group, batch=messages, **peer))
        return [Work(self, [launch for work in works for launch in work.launches])]

    def all_gather_object(self, objects, own, group=None):
        self.objects("all_gather_object", group, None)
        objects[:] = [own] * len(objects)

    def broadcast_object_list(self, objects, src=None, group=None, device=None):
        self.objects("broadcast_object_list", group, device)
        if objects[0] is None and hasattr(self.lesson, "Pipeline"):  # the shape of its messages
            config = self.config
            shape = config.batch // config.accum, config.context, config.width
            objects[0] = torch.empty(shape, dtype=self.lesson.DTYPES[config.dtype], device="meta")

    def join(self, init, backend, **_):
        init("cpu:fake,pretend:fake", store=FakeStore(), rank=self.rank, world_size=self.size)
        self.backends[dist.group.WORLD] = backend

    def make_group(self, original, ranks, timeout, backend, *more, **options):
        backend = backend or self.backend()
        self.new_group(ranks, backend)
        group = original(ranks, timeout, None, *more, **options)
        self.backends[group] = backend
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
            (dist, "broadcast_object_list"): self.broadcast_object_list,
            (dist, "barrier"): lambda *_, **__: None,
            (distributed_c10d, "_new_group_with_tag"): make_group,
            (torch, "save"): lambda *_: None,
            (torch, "load"): lambda *_, **__: {},
        }

    @contextmanager
    def world(self):
        """Within it, dist and torch.pretend are this rank's."""
        register()
        environment = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, {key: str(x) for key, x in environment.items()}))
            for (where, name), new in self.instead().items():
                stack.enter_context(mock.patch.object(where, name, new, create=where is torch.pretend))
            try:
                yield
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

    def load(self, path):
        module = types.ModuleType(Path(path).stem)
        module.__file__ = str(path)
        exec(compiled(str(path)), vars(module))
        return module

    def run(self, flags):
        """The lesson's train() with these flags."""
        with self.world():
            lesson = self.load_lesson()
            lesson.train(lesson.parse(flags.split()))
        return self

    def load_lesson(self):
        """The lesson, with threads that work late."""
        self.lesson = lesson = self.load(self.path)
        microbatches, parse = lesson.microbatches, lesson.parse

        def begin(config, text, step, *more):
            self.step = step
            return microbatches(config, text, step, *more)

        def parse_and_keep(arguments=None):
            self.config = parse(arguments)
            return self.config

        lesson.microbatches, lesson.parse = begin, parse_and_keep
        lesson.print_step = partial(print_nothing, lesson.print_step)
        if hasattr(lesson, "ThreadPoolExecutor") and not hasattr(lesson, "Server"):
            lesson.ThreadPoolExecutor = partial(LateExecutor, self)
            lesson.wait = lambda jobs: [job.result() for job in jobs]
        return lesson


def print_nothing(print_step, *args):
    with mock.patch("builtins.print"):
        print_step(*args)


@cache
def register():
    backend_registration._setup_privateuseone_for_python_backend("pretend")


@cache
def compiled(path):
    return compile(Path(path).read_text().replace("cuda", "pretend"), path, "exec")


class Stream:
    """torch.cuda.Stream"""

    def __init__(self, gpu, device, name="side stream"):
        self.gpu = gpu
        self.device = torch.device(device)
        self.name = name

    def wait_stream(self, other):
        self.gpu.follow(self, other)


class Fakes(FakeTensorMode):
    """Whether it is in a kernel, where all tensors are of the device meta, each thread knows for itself."""

    here = threading.local()
    in_kernel_invocation = property(
        lambda self: getattr(self.here, "inside", False),
        lambda self, inside: setattr(self.here, "inside", inside),
    )


class Gpu(TorchDispatchMode, Rank):
    """A Rank with a GPU."""

    def operator(self, function, given, made):
        """Reads what is given; made: new or changed. On stream(), or the host if no tensor is on the GPU."""

    def copy(self, given, made, waits):
        """Between host and GPU; waits: the host, until it is done."""

    def host_waits(self, why):
        """For all that has been launched on stream()."""

    def follow(self, stream, other):
        """A stream waits for all that has been launched on another."""

    def record(self, tensor, stream):
        """tensor.record_stream(stream)"""

    def resize(self, storage, size):
        """storage.resize_(size)"""

    def __init__(self, path, rank, size):
        TorchDispatchMode.__init__(self)
        Rank.__init__(self, path, rank, size)
        self.fake = Fakes(allow_non_fake_inputs=True)
        self.lock = threading.RLock()
        self.here = threading.local()
        self.default_streams = {}
        self.current_device = None

    # ---- operators ----

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.prim.device.default:
            return args[0].fake_device
        given = tensors_in((args, kwargs))
        pinned = kwargs.pop("pin_memory", False)
        to_gpu = torch.device(kwargs.get("device") or "cpu").type == "pretend"
        with self.lock:
            if not to_gpu and not any(map(on_gpu, given)):
                result = function(*args, **kwargs)
            elif function is aten._local_scalar_dense.default:
                self.host_waits("item")
                return 1.0 if given[0].is_floating_point() else 1
            else:
                result = self.on_gpu(function, args, kwargs)
            if function.namespace != "c10d":  # seen as launch()
                self.note(function, args, kwargs, given, tensors_in(result), pinned)
        return result

    def on_gpu(self, function, args, kwargs):
        waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags)
        if function in INDEX:  # only by a mask is the result's shape in the data
            waits = any(tensor.dtype == torch.bool for tensor in tensors_in(args[1]))
        assert not waits, f"{self.where()}: the host waits for {function}"
        if function is aten.copy_.default and not on_gpu(args[0]):
            return args[0]
        if function is aten._to_copy.default and not on_gpu(args[0]):
            kwargs = {"dtype": kwargs.get("dtype") or args[0].dtype, "device": kwargs["device"]}
            function, args = torch.empty, (args[0].shape,)
        with self.fake:
            result = function(*args, **kwargs)
        return tree_map_only(FakeTensor, self.real_if_on_host, result)

    def real_if_on_host(self, tensor):
        if tensor.fake_device.type == "pretend":
            return tensor
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def note(self, function, args, kwargs, given, results, pinned):
        """Tell operator() or copy() what the function has read and written."""
        storages = {tensor.untyped_storage() for tensor in given}
        made = [tensor for tensor in results if tensor.untyped_storage() not in storages]
        for tensor in made if pinned else ():
            tensor.untyped_storage().pinned = True
        values = dict(zip((argument.name for argument in function._schema.arguments), args)) | kwargs
        for argument in function._schema.arguments:
            if argument.alias_info and argument.alias_info.is_write:
                made += tensors_in(values.get(argument.name))
        if function.is_view or function._schema.name.split("::")[1] in SHAPES:
            given = []
        if function in COPIES and on_gpu(made[0]) != on_gpu(given[-1]):
            host = given[-1] if on_gpu(made[0]) else made[0]
            pinned = hasattr(host.untyped_storage(), "pinned")
            self.copy(given, made, not (pinned and values.get("non_blocking")))
        else:
            self.operator(function, given, made)

    # ---- streams ----

    def stream(self, device="pretend:0"):
        streams = getattr(self.here, "streams", {})
        device = torch.device(device or "pretend:0")
        default = self.default_streams.setdefault(device, Stream(self, device, "compute"))
        return streams.get(device, default)

    def set_stream(self, stream):
        if stream:
            self.here.streams = {**getattr(self.here, "streams", {}), stream.device: stream}

    @contextmanager
    def on_stream(self, stream):
        before = getattr(self.here, "streams", {})
        self.set_stream(stream)
        yield
        self.here.streams = before

    def set_device(self, device):
        self.current_device = device

    def resize_storage(self, original, storage, size):
        self.resize(storage, size)
        return original(storage, size)

    def become(self, old, new):
        """Module.to() of a parameter, which stays the same object."""
        old.__class__ = new.__class__
        vars(old).update(vars(new))
        torch._C._swap_tensor_impl(old, new)

    def instead(self):
        instead = {
            "device_count": lambda: 8,
            "default_generators": (),
            "Stream": partial(Stream, self),
            "stream": self.on_stream,
            "set_stream": self.set_stream,
            "current_stream": self.stream,
            "set_device": self.set_device,
            "synchronize": lambda device: self.host_waits("synchronize"),
            "max_memory_allocated": lambda device: 0,
            "reset_peak_memory_stats": lambda device: None,
            "device": nullcontext,
        }
        thread_run = threading.Thread.run
        resize = torch.UntypedStorage.resize_
        return (
            Rank.instead(self)
            | {(torch.pretend, name): new for name, new in instead.items()}
            | {
                (threading.Thread, "run"): lambda thread: (_push_mode(self), thread_run(thread)),
                (torch.UntypedStorage, "resize_"): lambda *args: self.resize_storage(resize, *args),
                (torch.Tensor, "record_stream"): lambda tensor, stream: self.record(tensor, stream),
                (torch.utils, "swap_tensors"): self.become,
                (torch.__future__, "get_swap_module_params_on_conversion"): lambda: True,
            }
        )

    @contextmanager
    def world(self):
        with super().world(), self:
            yield

    def load_lesson(self):
        """As it is, but for what tensors without data cannot do."""
        lesson = super().load_lesson()
        if hasattr(lesson, "MoE"):
            lesson.MoE.count = partialmethod(even_counts, lesson.MoE.count)
        if hasattr(lesson, "Lane"):  # weights that move between host and GPU
            lesson.GPT = partial(born_on_gpu, lesson.GPT)
        return lesson


def even_counts(moe, count, chosen):
    """MoE.count(), as if all experts were equally busy."""
    counts = count(moe, chosen)
    counts[:] = chosen.numel() // counts.shape[1]
    return counts


def born_on_gpu(model, config):
    with torch.device("pretend:0"):
        return model(config)


class Promises(Gpu):
    """What a lesson must not do on GPUs."""

    def __init__(self, *args):
        super().__init__(*args)
        self.waits = Counter()

    def operator(self, function, given, made):
        places = {on_gpu(tensor) for tensor in (*given, *made) if tensor.dim() > 0 and not tensor.is_meta}
        assert len(places) < 2 or function in INDEX, f"{self.where()}: a tensor of the host in {function}"

    def copy(self, given, made, waits):
        if waits:
            self.host_waits("copy")

    def host_waits(self, why):
        self.waits[self.step, threading.current_thread().name, why, self.where()] += 1

    def launch(self, launch):
        host = not all(map(on_gpu, launch.given + launch.made))
        assert not (host and self.backend(launch.group) == "nccl"), (
            f"{launch.where}: a tensor of the host over NCCL"
        )

    def objects(self, name, group, device):
        ready = self.backend(group) != "nccl" or self.current_device or device
        assert ready, f"{self.where()}: {name} over NCCL before torch.cuda.set_device"
