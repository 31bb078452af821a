"""The order that NCCL needs, and gloo forgives: what each rank asks for is recorded, then replayed together.
In a group all ranks ask for the same in the same order. A communicator is made at its first use, while the
hosts of all its ranks wait for one another: an unbatched message has one for its two ranks, all else the
group's. What it does comes one after the other, each after all that was computed before it was asked for; it
ends when all ranks are there, a message when its receiver is. In one hardware queue nothing overtakes what
cannot start yet."""

from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.alone import Rank


class Recorder(Rank):
    """A rank on a CPU, over what says that it is NCCL. Others give what it gives, or zeros."""

    def __init__(self, *args):
        super().__init__(*args)
        self.events = []  # its host makes a group, asks, awaits what it asked for, or waits for all
        self.made = 0  # groups
        self.groups = {}  # {group: its number}
        self.asked = {}  # {id of a launch: its event}

    def note(self, does, **more):
        more = {"messages": [], "parts": {}, "batch": None} | more
        self.events.append(SimpleNamespace(does=does, where=self.where(), **more))
        return self.events[-1]

    def ask(self, group, looks, ranks=None, **more):
        """For what looks so on all ranks."""
        ranks = frozenset(ranks or dist.get_process_group_ranks(group or dist.group.WORLD))
        nccl = self.backend(group) == "nccl"
        return self.note("asks", stream=(self.groups.get(group, 0), ranks), nccl=nccl, looks=looks, **more)

    def join(self, init, backend, **_):
        super().join(init, "nccl")

    def make_group(self, original, ranks, timeout, backend, *more, **options):
        self.made += 1
        stream = f"group {self.made}", frozenset(range(self.size))
        self.note("makes", looks=f"a group of {ranks} over {backend or 'nccl'}", stream=stream)
        group = super().make_group(original, ranks, timeout, backend, *more, **options)
        self.groups[group] = self.made
        return group

    def objects(self, name, group, device):
        self.note("awaits", ask=self.ask(group, name))
        self.note("waits")

    def launch(self, launch):
        tensor, *_ = launch.given + launch.made
        looks = f"{launch.name} of {tensor.numel()} {tensor.dtype}"
        last = self.events[-1] if self.events else None
        if "send" in launch.name or "recv" in launch.name:
            ends = (self.rank, launch.peer) if "send" in launch.name else (launch.peer, self.rank)
            if launch.batch is None:
                event = self.ask(launch.group, looks, ends)
            elif getattr(last, "batch", None) is launch.batch:
                event = last
            else:
                event = self.ask(launch.group, "messages", batch=launch.batch)
            event.messages.append((ends, f"{tensor.numel()} {tensor.dtype}"))
        elif launch.name == "all_to_all_single":
            event = self.ask(launch.group, f"{launch.name} of {tensor.dtype}")
            parts = [launch.options.get(name) for name in ("input_split_sizes", "output_split_sizes")]
            event.parts = dict(zip(sorted(event.stream[1]), zip(*parts))) if all(parts) else {}
        else:
            event = self.ask(launch.group, f"{looks} {launch.options}")
        self.asked[id(launch)] = event
        if launch.name not in ("all_reduce", "reduce", "broadcast"):
            alike = "gather" in launch.name or "scatter" in launch.name
            self.receive(launch.given if alike else [], launch.made)

    @torch.no_grad()
    def receive(self, given, made):
        """What all others send is what this rank does; of messages and all-to-alls zeros."""
        for tensor in made:
            tensor.zero_()
            if given and given[0].numel():
                values = given[0].flatten().repeat(-(-tensor.numel() // given[0].numel()))
                tensor.copy_(values[: tensor.numel()].view_as(tensor))

    def wait(self, launch):
        self.note("awaits", ask=self.asked.pop(id(launch)))

    def read(self, read):
        return lambda tensor: (self.note("waits"), read(tensor))[1]

    def instead(self):
        reads = {(torch.Tensor, name): self.read(getattr(torch.Tensor, name)) for name in ("item", "tolist")}
        return super().instead() | reads


class Replay:
    """All ranks' events by NCCL's rules. Fails where ranks do not meet, or wait for one another."""

    def __init__(self, events, one_queue=False):
        self.events = [deque(each) for each in events]  # of each rank
        self.one_queue = one_queue
        self.streams = [defaultdict(deque) for _ in events]  # {stream: operations that have not ended}
        self.queues = [deque() for _ in events]  # operations that have not started
        self.computed = [SimpleNamespace(ended=True) for _ in events]  # the latest computation
        self.operations = {}  # {id of an event: operation}
        self.there = defaultdict(dict)  # {what ranks meet for: {rank: (how it looks there, event)}}
        self.counts = Counter()
        self.moved = True
        while self.moved:
            self.moved = False
            for rank in range(len(events)):
                self.host(rank)
                self.gpu(rank)
        hosts = {rank: each[0].where if each else "its end" for rank, each in enumerate(self.events)}
        stays = any(self.events) or any(any(streams.values()) for streams in self.streams)
        assert not stays, f"ranks wait for one another: {hosts}"

    def meet(self, key, rank, looks, event):
        for other, (its, before) in self.there[key].items():
            fits = not looks or event.parts.get(other, ()) == before.parts.get(rank, ())[::-1]
            there = f"on rank {other} {before.where} {its, before.parts}"
            assert looks == its and fits, f"ranks do not meet: {event.where} {looks, event.parts}, {there}"
        self.there[key][rank] = looks, event
        return self.there[key].keys()

    def host(self, rank):
        while self.events[rank] and getattr(self, self.events[rank][0].does)(rank, self.events[rank][0]):
            self.events[rank].popleft()
            self.moved = True

    def makes(self, rank, event):
        return self.meet(event.stream, rank, event.looks, event) >= event.stream[1]

    def asks(self, rank, event):
        if not event.nccl:
            self.add(rank, id(event), event, [])
        elif self.meet(event.stream, rank, None, event) < event.stream[1]:
            return False
        else:
            self.compute(rank)
            self.add(rank, event.stream, event, [self.computed[rank]])
        return True

    def awaits(self, rank, event):
        operation = self.operations[id(event.ask)]
        if event.ask.nccl:
            self.compute(rank, operation)
        return event.ask.nccl or operation.ended

    def waits(self, rank, event):
        return self.computed[rank].ended

    def compute(self, rank, *needs):
        self.computed[rank] = self.add(rank, "computed", None, needs)

    def add(self, rank, stream, event, needs):
        operation = SimpleNamespace(event=event, needs=needs, meets=[], started=False, ended=False)
        for ends, looks in event.messages or [(event.stream[1], event.looks)] if event else ():
            self.counts[rank, event.stream, ends] += 1
            key = event.stream, ends, self.counts[rank, event.stream, ends]
            operation.meets.append((key, frozenset(ends), looks))
        self.operations[id(event)] = operation
        self.streams[rank][stream].append(operation)
        if not event or event.nccl:
            self.queues[rank].append(operation)
        return operation

    def gpu(self, rank):
        for operations in self.streams[rank].values():
            while operations and self.ends(rank, operations[0]):
                operations.popleft().ended = self.moved = True

    def ends(self, rank, operation):
        event, queue = operation.event, self.queues[rank]
        if not operation.started:
            late = self.one_queue and (not event or event.nccl) and queue[0] is not operation
            if late or not all(need.ended for need in operation.needs):
                return False
            operation.started = self.moved = True
            if not event or event.nccl:
                queue.remove(operation)
            for key, _, looks in operation.meets:
                self.meet(key, rank, looks, event)
        return all(self.there[key].keys() >= ranks for key, ranks, _ in operation.meets)


def replay(path, size, flags, main=None):
    """Hold that all ranks of a lesson get through a run, with one hardware queue or many. RANK: its own."""
    events = []
    for rank in range(size):
        recorder = Recorder(path, rank, size)
        events.append(recorder.run(flags.replace("RANK", str(rank)), main).events)
    Replay(events)
    Replay(events, one_queue=True)
