"""Which operation comes after which, on a simulated GPU: what a wait that gloo forgives hides.
Each stream, each group's network and each thread of the host has a clock: how many operations of every other
one have ended before its next begins. Each storage has its readers and writers, and when they did it. Streams
fails where two that need an order have none, and says the rule and both lines."""

import threading
import weakref
from collections import Counter, defaultdict
from types import SimpleNamespace

from tests.pretend import COPIES, Gpu, on_gpu


class Streams(Gpu):
    """A Gpu, and an order between all that need one."""

    def __init__(self, *args):
        super().__init__(*args)
        self.clocks = defaultdict(Counter)  # {who: {who else: its operations that came before}}
        # A storage's uses: reads and writes, {who: (their number, line)}; the stream that is its home, whose
        # memory it has (None: the host's); recorded streams, which its memory waits for.
        self.uses = {}  # {id of a storage: its uses, weak reference}
        self.freed = defaultdict(list)  # {stream: uses of memory that its next tensor may take}
        self.ends = {}  # {id of a launch that nobody has waited for: (it, what is known at its end)}

    def host(self):
        name = threading.current_thread().name
        return "host" if name.startswith(("MainThread", "Dummy")) else name

    def known(self):
        return self.clocks[self.host()].copy()

    def learn(self, known):
        self.clocks[self.host()] |= known

    def operator(self, function, given, made):
        streams = dict.fromkeys(self.stream(tensor.device) for tensor in (*made, *given) if on_gpu(tensor))
        first, *others = streams or [self.host()]
        for other in others if function in COPIES else ():  # another GPU: each waits for the other
            self.follow(first, other)
        self.do(first, given, made)
        for other in others if function in COPIES else ():
            self.follow(other, first)

    def copy(self, given, made, waits):
        tensors = [tensor for tensor in (*made, *given) if on_gpu(tensor)]
        self.do(self.stream(tensors[0].device), given, made)
        if waits:
            self.host_waits("copy")

    def host_waits(self, why):
        super().host_waits(why)
        self.learn(self.clocks[self.stream()])

    def launch(self, launch):
        super().launch(launch)
        alone = launch.name in ("send", "recv", "isend", "irecv") and launch.batch is None
        network = launch.group, launch.peer if alone else None
        self.clocks[network] |= self.clocks[self.side(launch)]
        self.do(network, launch.given, launch.made)
        self.ends[id(launch)] = launch, self.clocks[network].copy()

    def wait(self, launch):
        _, known = self.ends.pop(id(launch))
        self.clocks[self.side(launch)] |= known

    def side(self, launch):
        """Who waits for a collective of this group."""
        return self.stream() if self.backend(launch.group) == "nccl" else self.host()

    def follow(self, stream, other):
        self.clocks[stream] |= self.clocks[other]

    def record(self, tensor, stream):
        self.uses_of(tensor.untyped_storage(), tensor.device).recorded.add(stream)

    def resize(self, storage, size):
        uses = self.uses_of(storage)
        if not size:
            clock = self.clocks[self.stream()] | self.clocks[self.host()]
            for who, (number, line) in (uses.reads | uses.writes).items():
                late = clock[who] < number and isinstance(who, tuple)
                self.hold(not late, f"empties what a collective still uses: {self.where()} after {line}")
            self.forget(id(storage))
        elif not storage.nbytes():
            self.forget(id(storage))
            self.uses_of(storage)

    def do(self, who, reads, writes):
        """The next operation of somebody."""
        clock = self.clocks[who]
        clock |= self.clocks[self.host()]
        clock[who] += 1
        line = self.where()
        for tensor in writes:
            uses = self.uses_of(tensor.untyped_storage(), tensor.device)
            self.check(who, line, uses.reads, "reads")
            self.check(who, line, uses.writes, "writes")
            uses.writes[who] = clock[who], line
        for tensor in reads:
            uses = self.uses_of(tensor.untyped_storage(), tensor.device)
            self.check(who, line, uses.writes, "writes")
            uses.reads[who] = clock[who], line

    def check(self, who, line, others, verb):
        for other, (number, before) in others.items():
            rule = "uses what another stream has not finished"
            if isinstance(other, tuple):
                rule = f"uses what a collective still {verb}"
            elif isinstance(who, tuple):
                rule = "launches a collective on what another stream has not finished"
            self.hold(self.clocks[who][other] >= number, f"{rule}: {line} after {before}")

    def uses_of(self, storage, device="pretend:0"):
        """If it is new, its memory may be what a tensor of the same stream has left."""
        key = id(storage)
        if key not in self.uses:
            home = None if storage.device.type == "cpu" else self.stream(device)
            uses = SimpleNamespace(home=home, reads={}, writes={}, recorded=set())
            self.uses[key] = uses, weakref.ref(storage, lambda _: self.forget(key))
            clock = self.clocks[home] | self.clocks[self.host()]
            for uses in self.freed.pop(home, ()):
                for who, (number, line) in (uses.reads | uses.writes).items():
                    late = clock[who] < number and who not in uses.recorded
                    rule = "takes memory that another stream still uses"
                    self.hold(not late, f"{rule}: {self.where()} after {line}")
        return self.uses[key][0]

    def forget(self, key):
        uses, _ = self.uses.pop(key, (None, None))
        if uses and uses.home:
            self.freed[uses.home].append(uses)
