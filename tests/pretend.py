"""GPUs that are not there: a lesson on a device of Python alone, over a simulated NCCL.
It is loaded with "pretend" wherever it says "cuda". Tensors of that device have shapes and storages but no
data (FakeTensorMode), those of the host are real. A Gpu sees operators, copies and streams, counts how often
the host waits, and holds what a lesson must not do there; streams.py has the rest."""

import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial, partialmethod

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._device import device_decorator
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_map_only

from tests.alone import Rank, tensors_in

backend_registration._setup_privateuseone_for_python_backend("pretend")  # before any backward
torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # torch asks, in whatever test comes later
torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor() of a GPU is seen as a copy
aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)
INDEX = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
# Operators that take of a tensor its shape alone, or make a view.
SHAPES = {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "_unsafe_view"}


def on_gpu(tensor):
    return isinstance(tensor, FakeTensor)


def on_host(tensor):
    """Whether it is, and is neither a number nor a mere shape."""
    return not on_gpu(tensor) and tensor.dim() > 0 and not tensor.is_meta


class Stream:
    """torch.cuda.Stream"""

    def __init__(self, gpu, device="pretend:0"):
        self.gpu = gpu
        self.device = torch.device(device)

    def wait_stream(self, other):
        self.gpu.follow(self, other)


class Fake(FakeTensorMode):
    """Whether it is in a kernel, where all tensors are on the device meta, each thread knows for itself."""

    here = threading.local()
    in_kernel_invocation = property(
        lambda self: getattr(self.here, "inside", False),
        lambda self, inside: setattr(self.here, "inside", inside),
    )


class Gpu(TorchDispatchMode, Rank):
    """A Rank with a GPU, and what a lesson must not do there."""

    device = "pretend"

    def __init__(self, path, rank, size):
        TorchDispatchMode.__init__(self)
        Rank.__init__(self, path, rank, size)
        self.fake = Fake(allow_non_fake_inputs=True)
        self.lock = threading.RLock()
        self.here = threading.local()
        self.default_streams = {}
        self.current_device = None
        self.broken = []
        self.waits = Counter()  # {(step, thread, why, where): how often the host waits for the GPU}

    def hold(self, kept, rule):
        """If not, fail at the end: autograd's C++ loses what a hook raises on such a device."""
        if not kept:
            self.broken.append(rule)

    def host_waits(self, why):
        self.waits[self.step, threading.current_thread().name, why, self.where()] += 1

    def launch(self, launch):
        self.objects(launch.name, launch.group, None)
        host = any(map(on_host, (*launch.given, *launch.made))) and self.backend(launch.group) == "nccl"
        self.hold(not host, f"{launch.where}: a tensor of the host over NCCL")

    def objects(self, name, group, device):
        ready = self.backend(group) != "nccl" or self.current_device is not None or device
        self.hold(ready, f"{self.where()}: {name} over NCCL before torch.cuda.set_device")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.prim.device.default:
            return args[0].fake_device
        given = tensors_in((args, kwargs))
        pinned = kwargs.pop("pin_memory", False)
        if pinned:
            kwargs["device"] = "cpu"
        to_gpu = torch.device(kwargs.get("device") or "cpu").type == "pretend"
        with self.lock:
            if not to_gpu and not any(map(on_gpu, given)):
                result = function(*args, **kwargs)
            elif function is aten._local_scalar_dense.default:
                self.host_waits("item")
                return 0
            else:
                if any(map(on_host, given)) and any(map(on_gpu, given)) and function not in (*COPIES, *INDEX):
                    self.hold(False, f"{self.where()}: a tensor of the host in {function}")
                result = self.on_gpu(function, args, kwargs)
            self.note(function, args, kwargs, given, tensors_in(result), pinned)
        return result

    def on_gpu(self, function, args, kwargs):
        waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags)
        if function in INDEX:  # it waits for the shape only of what a mask chooses
            waits = any(tensor.dtype == torch.bool for tensor in tensors_in(args[1]))
        self.hold(not waits, f"{self.where()}: the host waits for {function}")
        if function is aten.copy_.default and not on_gpu(args[0]):
            return args[0]
        if function is aten._to_copy.default and not on_gpu(args[0]):
            kwargs = {"dtype": kwargs.get("dtype") or args[0].dtype, "device": kwargs["device"]}
            function, args = torch.empty, (args[0].shape,)
        if function is aten._fused_sgd_.default:  # it has no fake kernel, and changes its arguments alone
            return None
        with self.fake:
            result = function(*args, **kwargs)
        return tree_map_only(FakeTensor, self.real_if_on_host, result)

    def real_if_on_host(self, tensor):
        if tensor.fake_device.type == "pretend":
            return tensor
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def note(self, function, args, kwargs, given, results, pinned):
        """Tell operator(), or copy() between host and GPU, what the function reads, and makes or changes."""
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

    def stream(self, device="pretend:0"):
        streams = getattr(self.here, "streams", {})
        device = torch.device(device or "pretend:0")
        return streams.get(device, self.default_streams.setdefault(device, Stream(self, device)))

    def set_stream(self, stream):
        if stream:
            self.here.streams = {**getattr(self.here, "streams", {}), stream.device: stream}

    @contextmanager
    def on_stream(self, stream):
        before = getattr(self.here, "streams", {})
        self.set_stream(stream)
        yield
        self.here.streams = before

    def run_thread(self, run, thread):
        # Autograd has a thread for the first simulated GPU, but none for the others of dp_threads.py.
        torch.autograd.set_multithreading_enabled(not thread.name.startswith("device"))
        _push_mode(self)
        run(thread)
        _pop_mode()

    def become(self, old, new):
        """Module.to() of a parameter, which stays the same object."""
        old.__class__ = new.__class__
        vars(old).update(vars(new))
        torch._C._swap_tensor_impl(old, new)

    def instead(self):
        gpu = {
            "device_count": lambda: 8,
            "default_generators": (),
            "get_rng_state": lambda: None,
            "set_rng_state": lambda state: None,
            "Stream": partial(Stream, self),
            "stream": self.on_stream,
            "set_stream": self.set_stream,
            "current_stream": self.stream,
            "set_device": partial(setattr, self, "current_device"),
            "synchronize": lambda device: self.host_waits("synchronize"),
            "max_memory_allocated": lambda device: 9,
            "memory_allocated": lambda device: 4,
            "reset_peak_memory_stats": lambda device: None,
            "device": nullcontext,
        }
        thread_run = threading.Thread.run
        resize = torch.UntypedStorage.resize_
        instead = Rank.instead(self) | {(torch.pretend, name): new for name, new in gpu.items()}
        return instead | {
            (threading.Thread, "run"): lambda thread: self.run_thread(thread_run, thread),
            (torch.UntypedStorage, "resize_"): lambda *both: self.resize(*both) or resize(*both),
            (torch.Tensor, "record_stream"): lambda tensor, stream: self.record(tensor, stream),
            (torch.nn.functional, "scaled_dot_product_attention"): attention,
            (torch.utils, "swap_tensors"): self.become,
            (torch.__future__, "get_swap_module_params_on_conversion"): lambda: True,
        }

    @contextmanager
    def world(self):
        """Within it, torch.pretend is this rank's, too."""
        try:
            with super().world(), self:
                yield
        finally:
            assert not self.broken, self.broken[0]

    def load_lesson(self):
        """As it is, but for what tensors without data cannot do."""
        lesson = super().load_lesson()
        if hasattr(lesson, "MoE"):
            lesson.MoE.all_gather_counts = partialmethod(even_counts, lesson.MoE.all_gather_counts)
        if {"ZeRO3", "HSDP"} & vars(lesson).keys():  # param.data moves to a GPU
            lesson.GPT.__init__ = device_decorator(torch.device("pretend:0"), lesson.GPT.__init__)
        return lesson


def attention(q, k, v, attn_mask=None, is_causal=False, **_):
    """A GPU's kernel, and not what torch has for devices that have none."""
    if attn_mask is not None:  # a mask is added to the scores of each head
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
        attn_mask = attn_mask.expand(-1, q.shape[1], -1, -1)
    return aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, 0.0, is_causal)[0]


def even_counts(moe, all_gather_counts, chosen):
    """MoE.all_gather_counts(), as if all experts were equally busy."""
    found = all_gather_counts(moe, chosen)
    counts = found[-1] if isinstance(found, tuple) else found
    counts[:] = chosen.numel() // counts.shape[1]
    return found
