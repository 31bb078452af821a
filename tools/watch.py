"""Follows every storage until it is freed, through every operator of every thread of a process, and counts
what collectives are given. What tools/ledger.py counts as held and sent stands in its docstring.
"""

import gc
import threading
import time
import weakref
from collections import Counter
from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

# {what the operator's name contains: (collective, passes round the ring)}
COLLECTIVES = {"allreduce": ("all-reduce", 2), "reduce_scatter": ("reduce-scatter", 1)}
COLLECTIVES |= {"allgather": ("all-gather", 1), "alltoall": ("all-to-all", 1), "send": ("send", 0)}
COLLECTIVES |= {"broadcast": ("broadcast", 1), "reduce_": ("reduce", 1)}
AXES = ("tensor", "pipeline", "tie", "data")  # groups of a mesh, of which all bytes are counted together
# Attention's passes over s x s scores: FLOPs of a number of q for each key. (On a GPU torch counts them.)
ATTENTION = {"aten::_scaled_dot_product_flash_attention_for_cpu": 4}
ATTENTION |= {"aten::_scaled_dot_product_flash_attention_for_cpu_backward": 8}
COPIES = ("aten::add_", "aten::copy_", "aten::_to_copy", "aten::clone")


def tensors_in(tree):
    """The tensors in lists, tuples and dicts. (pytree's way takes a third of a watched step.)"""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [tensor for part in tree for tensor in tensors_in(part)]


def owner_of(tensor):
    """The thread that made its storage, or "host". None: the main thread."""
    return getattr(tensor.untyped_storage(), "owner", None)


def flops_of(function, args, kwargs, result):
    name = function.name().split(".")[0]
    if name in ATTENTION:
        query, keys = args[:2] if name.endswith("cpu") else args[1:3]
        return ATTENTION[name] * query.numel() * keys.shape[-2]
    packet = function.overloadpacket
    count = flop_registry.get(torch.ops.aten.addmm if packet == torch.ops.aten.addmm_ else packet)
    return count(*args, **kwargs, out_val=result) if count else 0


def noted(function, note):
    """The function, which first calls note() with its arguments."""

    def call(*args, **kwargs):
        note(*args, **kwargs)
        return function(*args, **kwargs)

    return call


class Watch(TorchDispatchMode):
    """From start() to stop() follows every storage until it is freed, and counts what is sent.

    A storage is its thread's that made it, the thread "device 0" and all that lessons do not start being one.
    With has_host it is the host's if it was made with device="cpu", or from what is the host's.
    """

    on = None  # before start(); False after stop()
    settles = 0.002  # seconds after a wait, in which the thread of gloo that woke us lets go of its tensors
    has_host = False  # whether a lesson's host and device are told apart, also where both are the CPU

    def __init__(self):
        super().__init__()
        self.here = threading.local()
        self.lock = threading.RLock()
        self.alive = {}  # id of a storage: (its number, bytes, weak reference)
        self.owners = []  # of each number the thread that made it
        self.events = []  # (number, bytes that it grew by)
        self.lent = []  # weak references to what collectives were given
        self.gradients = set()  # ids of storages that were a leaf's .grad
        self.has_threads = False  # of the lesson's own, or those of its libraries
        self.kinds = {}  # number: kind
        self.same = []  # of each number another one of the same kind, or itself
        self.sent = Counter()
        self.unknown = Counter()  # what this cannot count
        self.elements = Counter()  # of parameters, by dtype
        self.flops = 0  # of matrix products and attention, of the main thread
        self.patches = ExitStack()
        self.thread_run = threading.Thread.run

    def note(self, tensor, kind=None):
        """The number of a tensor's storage."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.alive:
            self.alive[key] = (len(self.same), 0, weakref.ref(storage, lambda _: self.forget(key)))
            self.same.append(len(self.same))
            self.owners.append(owner_of(tensor))
            kind = kind or (None if tensor.is_floating_point() else "other")
        self.resize(key, storage.nbytes())
        number, _, _ = self.alive[key]
        if kind:
            self.kinds.setdefault(number, kind)
        return number

    def resize(self, key, size):
        number, before, reference = self.alive.get(key, (None, size, None))
        if size != before:
            self.events.append((number, size - before))
            self.alive[key] = (number, size, reference)

    def forget(self, key):
        with self.lock:
            self.resize(key, 0)
            self.gradients.discard(key)
            del self.alive[key]

    def run_thread(self, thread):
        """In place of Thread.run(): the same, watched."""
        self.has_threads = True
        self.here.name = None if thread.name.startswith("device 0") else thread.name
        _push_mode(self)
        try:
            self.thread_run(thread)
        finally:
            _pop_mode()  # else a thread that ends with the process lets go of it too late, and aborts

    def __enter__(self):
        super().__enter__()
        self.start()
        return self

    def __exit__(self, *error):
        self.stop()
        super().__exit__(*error)

    def start(self):
        gc.collect()
        self.leaves, optimizers = [], 0
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                self.note(thing)
                if thing.is_leaf and thing.requires_grad:
                    self.leaves.append(thing)
                elif isinstance(thing, torch.nn.Parameter):
                    self.unknown["bytes of frozen parameters"] += thing.nbytes
            elif issubclass(type(thing), torch.optim.Optimizer):
                optimizers += 1
                self.leaves += [param for group in thing.param_groups for param in group["params"]]
                for tensor in tensors_in(list(thing.state.values())):
                    self.note(tensor, "optimizer")
        if self.leaves and not optimizers:  # a rank that only serves needs none
            self.unknown["optimizer that is not torch.optim's"] += 1
        for leaf in {id(leaf): leaf for leaf in self.leaves}.values():  # also masters of other parameters
            self.note(leaf, "parameters")
        for leaf in {(leaf.untyped_storage(), leaf.storage_offset()): leaf for leaf in self.leaves}.values():
            self.elements[leaf.dtype] += leaf.numel() * (leaf.untyped_storage().nbytes() > 0)
        self.before = len(self.same)
        for where, name, note in (  # which are no operators
            (torch.UntypedStorage, "resize_", lambda storage, size: self.resize(id(storage), size)),
            (torch.autograd, "backward", lambda *_, **__: self.begin_backward()),
            (torch.autograd, "grad", lambda *_, **__: self.begin_backward()),
        ):
            self.patches.enter_context(mock.patch.object(where, name, noted(getattr(where, name), note)))
        wait = dist.Work.wait
        settled = lambda work, *timeout: (wait(work, *timeout), time.sleep(self.settles))[0]  # noqa: E731
        self.patches.enter_context(mock.patch.object(dist.Work, "wait", settled))
        self.on = True

    def stop(self):
        self.on = False
        self.patches.close()

    def lend(self, function, args):
        """The arguments of a collective; if the caller waits for it, other tensors with the same storage.

        A thread of gloo, when it has woken the caller, still has these tensors, until it goes on to its next
        message: microseconds, or milliseconds on a busy machine. Nobody else has them, so they tell when."""
        names = [argument.name for argument in function._schema.arguments]
        if dict(zip(names, args)).get("async_op", True):
            return args
        args = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
        self.lent += [weakref.ref(tensor) for tensor in tensors_in(args)]
        return args

    def begin_backward(self):
        """Wait until no thread has what the lesson sent and let go of; at most 0.1 s, as tools keep some."""
        deadline = time.monotonic() + 0.1
        while time.monotonic() < deadline and any(reference() is not None for reference in self.lent):
            time.sleep(0.001)
        self.lent.clear()
        self.events.append(("backward", 0))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.on and function.namespace == "c10d":
            args = self.lend(function, args)
        result = function(*args, **(kwargs or {}))
        unseen = self.on is False or not (self.on or self.has_host or getattr(self.here, "name", None))
        if not unseen and function.namespace != "prim":  # a question about a fake tensor
            with self.lock:
                self.see(function, tensors_in((args, kwargs)), tensors_in(result), args, kwargs or {})
                if self.on and not getattr(self.here, "name", None):
                    self.flops += flops_of(function, args, kwargs or {}, result)
        return result

    def see(self, function, given, made, args, kwargs):
        here = maker = getattr(self.here, "name", None)
        if self.has_host and given:
            asked = (
                kwargs.get("device") if torch._C._current_graph_task_id() == -1 else None
            )  # not by autograd
            of_host = asked.type == "cpu" if asked else all(owner_of(tensor) == "host" for tensor in given)
            maker = "host" if of_host else None
        if maker:
            known = {tensor.untyped_storage() for tensor in given}
            for storage in {tensor.untyped_storage() for tensor in made} - known:
                storage.owner = maker
        if not self.on:
            return
        is_alone = not self.has_threads
        for leaf in self.leaves:
            grad = leaf.grad if is_alone or owner_of(leaf) == here else None  # nobody frees it meanwhile
            if grad is not None and id(grad.untyped_storage()) not in self.gradients:
                self.note(grad, "gradients")
                self.gradients.add(id(grad.untyped_storage()))
        numbers = [self.note(tensor) for tensor in (*given, *made)]
        name = function.name().split(".")[0]
        if function.namespace == "c10d":
            self.count(name, args)
        elif function.namespace in ("_c10d_functional", "_dtensor", "symm_mem") and "_tensor" not in name:
            self.unknown[name] += 1
        copies = name in COPIES[1:]
        travels = copies and self.has_host and owner_of(given[-1]) != owner_of(made[-1])
        if travels and made[-1].numel() > 1:
            link = "down" if owner_of(made[-1]) == "host" else "up"
            self.add(link, made[-1].nbytes)
            if link == "down":  # which only gradients do
                self.kinds.setdefault(numbers[len(given) - 1], "gradients")
        # But the text, whose bytes are everyone's, and, if it is no copy, what was made of it.
        read = [each for each in given if each.is_floating_point() or (copies and each.dtype != torch.uint8)]
        foreign = not function.is_view and any(owner_of(tensor) != here for tensor in read)
        if foreign and not self.has_host:
            sent = (made if copies else given)[-1]  # a cast is made before it travels
            self.add("send" if copies else "foreign read", sent.nbytes)
        # What is added to a parameter is an update, not a copy. With out=, a result goes where it belongs.
        updates = name == "aten::add_" and self.kinds.get(numbers[0]) == "parameters"
        joins = (name in COPIES and not updates) or function._overloadname.endswith("out")
        if function.namespace == "c10d" or (joins and not travels):
            for number in numbers:
                self.same[self.root(number)] = self.root(numbers[0])

    def add(self, name, payload, rings=1):
        self.sent.update({(name, "calls"): 1, (name, "payload"): payload, (name, "wire"): payload * rings})

    def count(self, operator, args):
        """Count a collective, unless it is of a single number."""
        given, other = tensors_in(args[0]), tensors_in(args[1])
        payload = max(sum(tensor.nbytes for tensor in tensors) for tensors in (given, other))
        name, passes = next((COLLECTIVES[key] for key in COLLECTIVES if key in operator), ("", 0))
        if not name and "recv" not in operator and "barrier" not in operator:
            self.unknown[operator] += 1
        if name == "all-to-all":
            given = given + other  # a rank may receive nothing
        if name and max(tensor.numel() for tensor in given) > 1:
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            share = passes * (group.size() - 1) / group.size() if passes else 1
            uneven = name == "all-to-all" and "base" in operator and args[4]  # how many rows go to each rank
            if uneven:
                payload = other[0].nbytes
                share = 1 - uneven[group.rank()] / max(sum(uneven), 1)
            axis = group.group_desc if group.group_desc in AXES else name
            self.add(axis, payload, share)

    def root(self, number):
        while self.same[number] != number:
            number = self.same[number]
        return number

    def all_kinds(self):
        """The kind of each storage, once all is seen; None: what else the step made."""
        of_roots, found = {}, []
        for number, kind in self.kinds.items():
            of_roots.setdefault(self.root(number), kind)
        for number in range(len(self.same)):
            old = "other" if number < self.before else None
            found.append(self.kinds.get(number) or of_roots.get(self.root(number), old))
        return found

    def held(self):
        """{kind: the most bytes alive at once}, of "all" too."""
        kinds = self.all_kinds()
        alive, most = Counter(), Counter()
        for number, size in self.events:
            if number == "backward":
                most["activations"] = max(most["activations"], alive[None, None])
                continue
            owner = self.owners[number]
            for kind in ["host"] if owner == "host" else [kinds[number], "all"]:
                where = (kind, owner)
                alive[where] += size
                most[kind] = max(most[kind], alive[where])
        return most
