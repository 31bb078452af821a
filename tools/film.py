"""A film of a step: what each rank computes, sends, waits for and holds, when, and by which line.

    torchrun --nproc_per_node=4 tools/ledger.py --film zero3.json zero3.py --layers 4

For each lane (a rank, or one of its threads) it writes
spans     [begin, end, line, what]: operators in a row with the same line and what. what: F, B forward and
          backward, "F3" of block 3, "F3.2" in microbatch 2; R forward again, during backward; W gradients of
          weights alone; O the optimizer; L what else the lesson does
messages  [begin, end, line, name, bytes, kind]: from the call until it was seen to be complete; a send or
          receive until the receiver's wait ends. kind: of what is sent, as in held
waits     [begin, end, line, number of the message in this lane, or -1]
held      [time, line, kind, bytes of this kind from now on], without changes of less than 2 % of the most
Times are in 10 microseconds from the step's begin, lines those of the lesson's file. Watching slows it down.
"""

import bisect
import json
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from watch import Watch, tensors_in

# Methods of a process group, and what they are called (torch 2.11 lacks some).
CALLS = """allreduce allgather all_gather_single _allgather_base broadcast reduce reduce_scatter
    reduce_scatter_single _reduce_scatter_base gather scatter barrier alltoall all_to_all_single
    alltoall_base send recv""".split()
NAMES = {"allreduce": "all-reduce", "reducescatter": "reduce-scatter", "allgather": "all-gather"}
NAMES |= {"alltoall": "all-to-all", "broadcast": "broadcast", "reduce": "reduce", "gather": "gather"}
NAMES |= {"scatter": "scatter", "barrier": "barrier", "send": "send", "recv": "receive"}
MAIN = {"device": "device 0", "ThreadPoolExecutor": "server"}  # the main thread, by what the others are
now = time.perf_counter


class Film(Watch):
    """A Watch that also notes times and lines."""

    settles = 0

    def __init__(self, lesson):
        super().__init__()
        self.path = lesson.__file__
        text = Path(self.path).read_text().split("\n")
        marks = [i for i, line in enumerate(text, 1) if line.startswith("# ====")]
        self.toy = range(marks[0], marks[1] if marks[1:] else len(text))
        self.layers = 0
        self.spans = defaultdict(list)  # {thread: [begin, end, line, what]}
        self.messages = []
        self.counts = Counter()  # of messages between two ranks
        self.waits = []  # (thread, begin, end, line, number of its message)
        self.moments = {}  # {number of an event: (time, line)}
        self.works = {}  # {id: (number, work)}
        self.forwards = Counter()
        self.graph = defaultdict(list)  # {thread: [(first sequence number, what)]} of backward's nodes
        self.before_start = ExitStack()
        for name, by in ("__init__", self.counting), ("forward", self.naming):
            patch = mock.patch.object(lesson.Block, name, by(getattr(lesson.Block, name)))
            self.before_start.enter_context(patch)

    # ---- blocks and microbatches ----

    def counting(self, init):
        def count(block, *args, **kwargs):
            init(block, *args, **kwargs)
            self.layers += 1
            block.place = self.layers

        return count

    def naming(self, forward):
        """Block.forward(), which notes its block and microbatch, and its nodes in the graph."""

        def call(block, *args, **kwargs):
            if not self.on:
                return forward(block, *args, **kwargs)
            again = torch._C._current_graph_task_id() != -1
            name = f"{block.place}"
            self.forwards[name, self.thread] += not again
            if self.forwards[name, self.thread] > 1:
                name += f".{self.forwards[name, self.thread]}"
            self.here.unit = "FR"[again] + name
            graph = self.graph[self.thread]
            graph.append((torch._C._autograd._get_sequence_nr(), "B" + name))
            try:
                return forward(block, *args, **kwargs)
            finally:
                self.here.unit = None
                graph.append((torch._C._autograd._get_sequence_nr(), "B"))

        return call

    def backward_of(self, node):
        """Of a node of autograd's graph, by the order in which forward made them; else of the one before."""
        graph = self.graph[self.thread]
        place = bisect.bisect(graph, (node._sequence_nr(), "~")) - 1 if node else -1
        is_known = 0 <= place < len(graph) - 1
        if is_known or not getattr(self.here, "backward", "").startswith("B"):
            self.here.backward = graph[place][1] if is_known else "B"
        return self.here.backward

    @property
    def thread(self):
        return getattr(self.here, "name", None)

    def look(self):
        """(line, what): where this thread stands, and what an operator that it calls there does."""
        engine = optimizer = False
        inner = outer = None
        frame = sys._getframe(2)
        while frame and not outer:
            code = frame.f_code
            if code.co_filename == self.path:
                inner = inner or (code.co_name, frame.f_lineno)
                if frame.f_lineno not in self.toy:
                    outer = code.co_name, frame.f_lineno, code.co_qualname
            elif not inner:
                engine |= code.co_name == "_engine_run_backward"
                optimizer |= "/torch/optim/" in code.co_filename
            frame = frame.f_back
        name, line, where = outer or (*(inner or ("", 0)), "")
        # Before Python 3.12 a comprehension has a frame of its own.
        name = where.removesuffix(f".<locals>.{name}").rpartition(".")[2] if name[:1] == "<" else name
        if optimizer or (name == "step" and not where.startswith("Pipeline")):
            return line, "O"
        if getattr(self.here, "unit", None):
            return line, self.here.unit
        if torch._C._current_graph_task_id() != -1 and (engine or name == "backward"):
            return line, self.backward_of(torch._C._current_autograd_node())
        if name.startswith("_weight"):
            return line, "W"
        of_model = inner and inner[1] in self.toy and inner[0] not in ("microbatches", "print_step")
        return line, "F" if of_model else "L"

    # ---- what happens ----

    def start(self):
        super().start()
        wait_for_others()
        for name in CALLS:
            if hasattr(dist.ProcessGroup, name):
                call = self.noting(name, getattr(dist.ProcessGroup, name))
                self.patches.enter_context(mock.patch.object(dist.ProcessGroup, name, call))
        wait = self.timing(dist.Work.wait)
        self.patches.enter_context(mock.patch.object(dist.Work, "wait", wait))
        self.polling = threading.Thread(target=self.poll, name="poll", daemon=True)
        self.begin = now()
        self.polling.start()

    def stop(self):
        super().stop()
        self.end = now()
        self.before_start.close()

    def poll(self):
        while self.on is not False:
            for number, work in list(self.works.values()):
                if self.messages[number]["end"] is None and work.is_completed():
                    self.messages[number]["end"] = now()
            time.sleep(5e-4)

    def noting(self, name, call):
        plain = name.replace("_", "")
        name = next(NAMES[key] for key in NAMES if key in plain)

        def start(group, *args, **kwargs):
            line, _ = self.look()
            tensors = tensors_in((args, kwargs))
            message = {"name": name, "line": line, "thread": self.thread, "begin": now(), "end": None}
            where = group.rank(), None
            if name in ("send", "receive"):
                where = (group.rank(), args[1])[:: 1 if name == "send" else -1]
                peer = dist.get_global_rank(group, args[1])
                message["name"] += f" {'to' if name == 'send' else 'from'} {peer}"
            self.counts[group.group_name, where] += 1
            message["key"] = group.group_name, where, self.counts[group.group_name, where]
            message["bytes"] = max((tensor.nbytes for tensor in tensors), default=0)
            with self.lock:
                message["storage"] = self.note(tensors[0]) if tensors else None
            self.here.last = None
            work = call(group, *args, **kwargs)
            with self.lock:
                self.messages.append(message)
                if work is not None:
                    self.works[id(work)] = len(self.messages) - 1, work
            return work

        return start

    def timing(self, wait):
        def timed(work, *args, **kwargs):
            line, _ = self.look()
            begin = now()
            done = wait(work, *args, **kwargs)
            number, _ = self.works.pop(id(work), (None, None))
            if number is not None:
                self.messages[number]["end"] = self.messages[number]["end"] or now()
                self.waits.append((self.thread, begin, now(), line, number))
            self.here.last = None
            return done

        return timed

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.on or function.namespace in ("prim", "c10d"):
            return super().__torch_dispatch__(function, types, args, kwargs)
        line, what = self.look()
        begin = now()
        result = super().__torch_dispatch__(function, types, args, kwargs)
        last = getattr(self.here, "last", None)
        if last and (last[2:] == [line, what] or self.is_repeated(last, line, what)):
            last[1] = now()
            return result
        if not last or last[3] != "L":
            self.here.loop = set()  # of lines that come one after the other
        self.here.loop.add(line)
        self.here.last = [begin, now(), line, what]
        self.spans[self.thread].append(self.here.last)
        return result

    def is_repeated(self, last, line, what):
        """Whether a loop comes round again, or a hook, for one more of a block's weights."""
        if what == last[3] == "L" and line in self.here.loop:
            return True
        if what != "L" or torch._C._current_graph_task_id() == -1:
            return False
        unit = getattr(self.here, "backward", None)
        if unit != getattr(self.here, "hooks_of", None):
            self.here.hooks_of, self.here.hooks = unit, set()
        is_seen = line in self.here.hooks
        self.here.hooks.add(line)
        return is_seen and last[3][0] == "B"

    def resize(self, key, size):
        if self.on is False:  # what is freed later
            return
        count = len(self.events)
        super().resize(key, size)
        if self.on and len(self.events) > count:
            self.moments[count] = now(), self.look()[0]

    # ---- what is written ----

    def held_by(self, kinds):
        """{thread: [[time, line, kind, bytes of this kind from then on]]}."""
        alive, found = Counter(), defaultdict(list)
        for number, (storage, size) in enumerate(self.events):
            if storage != "backward":
                kind = kinds[storage] or "activations"
                owner = self.owners[storage]
                alive[owner, kind] += size
                moment, line = self.moments.get(number, (0, 0))  # else it was there before
                found[owner].append([moment, line, kind, alive[owner, kind]])
        return {owner: list(thinned(changes)) for owner, changes in found.items()}

    def lanes(self, rank):
        """{name of a lane: what it does}, times as they are."""
        kinds = self.all_kinds()
        held = self.held_by(kinds)
        found = {}
        for thread in sorted({*self.spans, *held}, key=lambda name: name or ""):
            lane = {"spans": self.spans[thread], "messages": [], "waits": [], "held": held.get(thread, [])}
            numbers = {}
            for number, message in enumerate(self.messages):
                if message["thread"] == thread:
                    numbers[number] = len(numbers)
                    kind = kinds[message["storage"]] if message["storage"] is not None else "other"
                    row = [message[what] for what in ("begin", "end", "line", "name", "bytes")]
                    row[1] = row[1] or self.end
                    lane["messages"].append([*row, kind or "activations", message["key"]])
            for where, *wait, number in self.waits:
                if where == thread:
                    lane["waits"].append([*wait, numbers.get(number, -1)])  # -1: another thread's message
            found[self.name_of(thread, rank)] = lane
        return found

    def name_of(self, thread, rank):
        """A lane's name: of a rank and its thread, or of a thread that is a device or a worker itself."""
        kinds = {name.split("-")[0].split(" ")[0] for name in self.spans if name}
        main = next((MAIN[kind] for kind in kinds if kind in MAIN), None)
        if thread and main:
            return re.sub(r"^ThreadPoolExecutor-\d+_", "worker ", re.sub(r"^(device \d+)_0$", r"\1", thread))
        return main or f"rank {rank}" + (f" {thread.removesuffix('_0')}" if thread else "")


def wait_for_others():
    """All ranks begin together. (Under a dispatch mode a barrier of gloo may wait for ever for a lock.)"""
    store, ranks = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    number = store.add("film", 1)
    while store.add("film", 0) < -(-number // ranks) * ranks:
        time.sleep(1e-3)


def thinned(changes):
    """Without changes of less than 2 % of the most that is held, but with the last of each kind."""
    most = max(size for *_, size in changes)
    last = {kind: place for place, (_, _, kind, _) in enumerate(changes)}
    shown = {}
    for place, change in enumerate(changes):
        _, _, kind, size = change
        if kind not in shown or last[kind] == place or abs(shown[kind] - size) > most / 50:
            shown[kind] = size
            yield change


def write(path, film, lesson, flags):
    """Write the film of all ranks, on rank 0."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (film.begin, film.end, film.lanes(dist.get_rank())))
    origin = min(begin for begin, _, _ in everyone)
    lanes = {name: lane for *_, own in everyone for name, lane in own.items()}
    received = {row[6]: row[1] for lane in lanes.values() for row in lane["messages"] if "from" in row[3]}
    for lane in lanes.values():
        for row in lane["messages"]:
            key = row.pop()
            if " to " in row[3]:  # a send, whose end only its receiver sees
                row[1] = received.get(key, row[1])
        for what, rows in lane.items():
            for row in rows:
                for place in range(1 if what == "held" else 2):
                    row[place] = max(0, round(1e5 * (row[place] - origin)))
    result = {"lesson": lesson.__name__, "flags": " ".join(flags), "ranks": dist.get_world_size()}
    result["length"] = round(1e5 * (max(end for _, end, _ in everyone) - origin))
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(result | {"lanes": lanes}, separators=(",", ":")) + "\n")
