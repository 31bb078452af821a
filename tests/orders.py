"""Runs survive.py's protocol without processes, in all orders of events or a sample: who dies, who is late?

    python tests/orders.py [FILE] [--deaths N] [--walks N] [--all]

The code that runs is FILE's own: its class Members, and judge(), which the launcher calls when a worker ends.
Both pause wherever they wait, and before each write that changes the store, which is a dict here. From each
state that can occur in one of CASES, all that can happen next is tried: somebody goes on; a worker dies; a
collective fails, as a member has left; a worker that waits is late, so that its timeout passes. Each case has
its number of deaths and delays. Cases with too many states are sampled by random walks; --all searches one.

A generation must have one list of members. A step must count once, and only if all of them have computed it.
Nobody who lives may be dropped, unless somebody was late. A newcomer must receive its state. The job must
end: well, after all steps and a save, or with an error if nobody who has the weights lives; and from every
state this end must be within reach. Else the order of events is printed.

What this cannot find: errors that need more workers, deaths, delays or steps than a case has; what happens
inside a collective or between two pauses; workers that hang for ever; wrong numbers.
"""

import argparse
import ast
import datetime
import functools
import json
import random
import re
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

# Workers below `first` start the job. Members, if any, have formed generation 1; else nothing has begun.
Case = namedtuple("Case", "first members newcomers deaths delays steps")
CASES = [
    Case(first=1, members=[], newcomers=[1], deaths=2, delays=1, steps=1),
    Case(first=2, members=[0, 1], newcomers=[2], deaths=0, delays=1, steps=1),
    Case(first=3, members=[0, 1, 2], newcomers=[], deaths=2, delays=0, steps=2),
    Case(first=1, members=[0, 2], newcomers=[1], deaths=1, delays=0, steps=1),  # 2 was a newcomer, too
    Case(first=2, members=[0, 1], newcomers=[2], deaths=1, delays=0, steps=1),
    Case(first=1, members=[0], newcomers=[1], deaths=2, delays=2, steps=2),
    Case(first=3, members=[0, 1, 2], newcomers=[], deaths=1, delays=1, steps=1),
]
LONG = [Case(first=2, members=[0, 1], newcomers=[2], deaths=1, delays=1, steps=1)]
WALKS = [
    Case(first=2, members=[0, 1], newcomers=[2], deaths=2, delays=2, steps=2),
    Case(first=1, members=[0, 2], newcomers=[1, 3], deaths=2, delays=1, steps=2),
    Case(first=2, members=[], newcomers=[2], deaths=2, delays=1, steps=2),
]
LAUNCHER = -1


class Pauses(ast.NodeTransformer):
    """Makes generators of functions, which yield what they wait for."""

    def visit_Call(self, node):
        self.generic_visit(node)
        call, name = ast.unparse(node), ast.unparse(node.func)
        arguments = ", ".join(map(ast.unparse, node.args))
        first = arguments.partition(",")[0]
        store, _, method = name.rpartition(".")
        if re.fullmatch(r"communicate|self\.(attempt|sign_up|propose|begin)|dist\.(init|send|recv).*", name):
            return parsed(f"(yield from {call})")
        if name == "time.sleep":
            return parsed("(yield ('sleep',))")
        if method == "wait":
            ask = "wait" if len(node.args) == 1 else "wait a while"
            return parsed(f"[(yield ('{ask}', {ast.unparse(node.args[0])})), {call}][1]")
        if method == "get" and first == "key":
            return parsed(f"[key in {store} or (yield ('wait', [key])), {call}][1]")
        if not store.endswith("store"):
            return node  # a list's append
        if method in ("append", "compare_set") or (method == "set" and re.match("key|f'has", first)):
            return parsed(f"[{store}.knows({arguments}) or (yield ('go',)), {call}][1]")
        return node


def parsed(expression):
    return ast.parse(expression, mode="eval").body


class Store(dict):
    """As a torch.distributed store, of text."""

    def get(self, key):
        return self[key].encode()

    def set(self, key, value):
        self[key] = value

    def add(self, key, number):
        self[key] = str(int(self.setdefault(key, "0")) + number)
        return int(self[key])

    def append(self, key, text):
        self[key] = " ".join(sorted({*self.setdefault(key, "").split(), *text.split()}))

    def check(self, keys):
        return keys[0] in self

    def wait(self, keys, timeout=None):
        if not all(key in self for key in keys):
            raise RuntimeError("nobody came")

    def compare_set(self, key, expected, value):
        if not key.endswith("/members") and value != "committed":
            value = "aborted"  # why does not matter
        return self.setdefault(key, value).encode()

    def knows(self, key, *values):
        """Whether to write this would change nothing."""
        return key in self and (len(values) > 1 or values[0].strip() in self[key].split())  # > 1: compare_set


class Trial:
    """An order of events, so far."""

    def __init__(self, module, case):
        self.module, self.case = module, case
        self.deaths, self.delays = case.deaths, case.delays
        self.store = Store()
        if case.members:
            self.store |= {"1/members": str(case.members), "1/0": "committed", "1/now": "1"}
        self.sent = {}  # {(generation, newcomer): the first member's state}
        self.taken = {}  # {step: (generation, who has taken it)}
        self.met = {}  # {(generation, step): who has come to its collective}
        self.computed = {}  # {worker: the last collective that it has been through}
        self.able = {*range(case.first), *case.members}  # those who have the weights
        self.store |= {f"has_weights/{worker}": "" for worker in self.able}
        self.ended, self.over, self.late = [], None, False
        self.members, self.threads, self.asks, self.events = {}, {}, {}, []
        clock = SimpleNamespace(monotonic=lambda: 1e9 * self.late, perf_counter=int)
        group = SimpleNamespace(**dict.fromkeys(("is_initialized", "PrefixStore"), lambda *_: 0))
        group.distributed_c10d = SimpleNamespace(_world=SimpleNamespace())
        group.get_rank = lambda: self.members[self.now].members.index(self.now)
        group.init_process_group = lambda *_: self.meet(0)
        group.send_object_list, group.recv_object_list = self.send, self.receive
        module |= {"time": clock, "dist": group, "print": id, "refuse": sys.exit}
        self.config = SimpleNamespace(workers=case.first, timeout=1, min_workers=1, kill=())
        for worker in sorted({*range(case.first), *case.members, *case.newcomers}):
            member = self.members[worker] = module["Members"](self.config, self.store, worker)
            if worker in case.members:
                member.generation, member.members = 1, case.members
                member.timeout = datetime.timedelta(seconds=1)
            self.threads[worker] = self.work(member)
        self.running = set(self.members)  # as the launcher knows
        self.threads[LAUNCHER] = self.launch()
        for worker in self.threads:
            self.asks[worker] = ("go",)
            self.go(worker)

    def work(self, member):
        if member.worker in self.case.newcomers:
            yield from member.enter(1)
            assert member.snapshot, "a newcomer gets no state"
            self.able.add(member.worker)
        elif not self.case.members:
            yield from member.regroup(1)
        step = member.snapshot[0]
        while step <= self.case.steps:
            if not (yield from member.attempt(step, self.meet, step)):
                yield from member.regroup(step)
                continue
            generation, workers = self.taken.setdefault(step, (member.generation, set()))
            right = generation == member.generation and member.worker not in workers
            assert right, "a step counts twice"
            listed = json.loads(self.store[f"{generation}/members"])
            assert listed == member.members, "a generation has two lists of members"
            place = generation, step
            assert self.computed.get(member.worker) == place, "a step counts that not all have computed"
            workers.add(member.worker)
            step += 1
        if member.members[0] == member.worker:
            yield ("go",)
            self.store.set("saved", "")

    def launch(self):
        while True:
            worker = yield ("end",)
            self.running.remove(worker)
            pauses = self.module["judge"](self.config, self.store, worker, 1, sorted(self.running))
            yield from pauses or ()

    def meet(self, step, who=None):
        """A collective, which may fail on some and not on others if a member is dead or has left."""
        worker = self.members[self.now]
        place = worker.generation, step
        self.met.setdefault(place, set()).add(self.now)
        if (yield ("meet", place, who or worker.members)):
            raise RuntimeError
        self.computed[self.now] = place

    def send(self, states, peer):
        sender, newcomer = self.now, self.members[self.now].members[peer]
        self.sent[self.members[sender].generation, newcomer] = states[0]
        yield from self.meet(f"to {newcomer}", [sender, newcomer])

    def receive(self, states, peer):
        newcomer = self.members[self.now]
        yield from self.meet(f"to {self.now}", [newcomer.members[peer], self.now])
        assert (newcomer.generation, self.now) in self.sent, "a newcomer gets no state"
        states[0] = self.sent[newcomer.generation, self.now]

    def choices(self):
        """[(worker, what may happen to it next)]."""
        idle = self.asks.get(LAUNCHER) == ("end",)
        found = [(LAUNCHER, worker) for worker in self.ended if idle]
        if self.over is not None or (idle and not found and not self.with_state()):
            return []
        for worker, (ask, *what) in self.asks.items():
            goes, fails, late = ask in ("go", "sleep"), False, False
            if ask in ("wait", "wait a while"):
                goes = all(key in self.store for key in what[0])
                late = ask == "wait a while" and not goes
            elif ask == "meet":
                place, others = what
                goes = self.met[place] == {*others}
                fails = any(o not in self.asks or self.members[o].generation > place[0] for o in others)
                late = not goes
            elif ask == "sleep":
                late = self.members[worker].snapshot is not None
            found += [(worker, "goes on")] * goes + [(worker, "fails")] * fails
            found += [(worker, "is late")] * (late and self.delays > 0)
            found += [(worker, "dies")] * (self.deaths > 0 and worker != LAUNCHER)
        return found

    def with_state(self):
        return [worker for worker in self.asks if worker != LAUNCHER and self.members[worker].snapshot]

    def go(self, worker, what="goes on"):
        """Let it happen. To the launcher, `what` is the worker of whose end it hears."""
        self.events.append((worker, what))
        self.now, self.late = worker, what == "is late"
        told = None
        if worker == LAUNCHER and what != "goes on":
            self.ended.remove(what)
            told = what
        elif self.asks[worker][0] == "meet":
            told = what != "goes on"
        self.deaths -= what == "dies"
        self.delays -= self.late
        try:
            if what != "dies":
                self.asks[worker] = self.threads[worker].send(told)
                is_early = worker == LAUNCHER or self.members[worker].generation < 9
                assert is_early, "generations begin without end"
                return
        except StopIteration:
            pass
        except SystemExit as end:
            if worker == LAUNCHER:
                self.end(end.code)
            elif self.delays == self.case.delays:
                raise AssertionError("a living member is left out") from None
        del self.asks[worker]
        if worker != LAUNCHER:
            self.ended = sorted([*self.ended, worker])

    def state(self):
        """All that the future depends on. Generations count from the oldest in which somebody is."""
        if self.over is not None:
            return hash((self.over, str(self.taken)))
        oldest = min([self.members[w].generation for w in self.asks if w != LAUNCHER], default=0)
        found = [self.deaths, self.delays, *self.ended]
        for worker in self.asks:
            if worker != LAUNCHER:
                m = self.members[worker]
                found += [m.generation - oldest, str(m.members), str(m.snapshot)]
            thread = self.threads[worker]
            while thread:
                found += [worker, thread.gi_frame.f_lasti]
                for name, value in thread.gi_frame.f_locals.items():
                    if name == "key":
                        found.append(shifted(value, oldest))
                    elif isinstance(value, (int, str, list, set, dict)):
                        found.append(str(value - oldest if name == "generation" else value))
                thread = thread.gi_yieldfrom
        store = [(shifted(key, oldest), value) for key, value in self.store.items()]
        found.append(frozenset([item for item in store if item[0]]))
        found += [(step, g - oldest, *workers) for step, (g, workers) in sorted(self.taken.items())]
        found.append(frozenset([(g - oldest, s, *who) for (g, s), who in self.met.items() if g >= oldest]))
        found.append(frozenset([(w, g - oldest, s) for w, (g, s) in self.computed.items() if g >= oldest]))
        sent = sorted(self.sent.items())
        found += [(g - oldest, newcomer, str(state)) for (g, newcomer), state in sent if g >= oldest]
        return hash(tuple(found))

    def end(self, code):
        self.over = code
        listed = self.module["look"](self.store)[1] or range(self.case.first)
        assert code == 0 or not self.able.intersection(self.asks, listed), "the job ends too early"
        is_done = len(self.taken) == self.case.steps and "saved" in self.store
        assert code != 0 or is_done, "a step is lost"


@functools.cache
def shifted(key, oldest):
    """A key of the store with its generation counted from the oldest; None if that is an older one."""
    generation, _, rest = key.partition("/")
    if not generation.isdigit():
        return key
    return (int(generation) - oldest, rest) if int(generation) >= oldest else None


def protocol(path):
    """The names of a file's protocol, its functions generators."""
    tree = ast.parse(Path(path).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in ("Members", "look", "judge")]
    tree.body = [node if node.name == "look" else Pauses().visit(node) for node in tree.body]
    module = {"timedelta": datetime.timedelta, "sys": sys, "json": json, "os": SimpleNamespace(environ={})}
    exec(compile(ast.fix_missing_locations(tree), path, "exec"), module)
    return module


def events(link):
    """The choices of a path, a linked list of (what came before, choice)."""
    found = []
    while link:
        link, choice = link
        found.append(choice)
    return found[::-1]


def told(choices):
    name = {LAUNCHER: "the launcher"}
    return ", ".join(f"{name.get(worker, worker)} {what}" for worker, what in choices)


def search(path, case):
    """The number of states that there are. Raises AssertionError, with the events, if a promise is broken."""
    module = protocol(path)
    seen, before, todo = {}, {}, [(None, None)]  # {state: how to get there}, {state: the states before it}
    ends = []
    while todo:
        link, last = todo.pop()
        trial = Trial(module, case)
        try:
            for choice in events(link):
                trial.go(*choice)
            while True:
                state = trial.state()
                before.setdefault(state, []).append(last)
                if state in seen:
                    break
                seen[state] = link
                choices = trial.choices()
                if not choices:
                    assert trial.over is not None, "members wait for ever"
                    ends.append(state)
                    break
                todo += [((link, choice), state) for choice in choices[1:]]
                link, last = (link, choices[0]), state
                trial.go(*choices[0])
        except AssertionError as error:
            raise AssertionError(f"{error}: {told(trial.events)}") from None
        except Exception as error:  # the protocol's own
            kind = type(error).__name__
            raise AssertionError(f"{kind}: {error}: {told(trial.events)}") from error
    can_end = set()
    while ends:
        state = ends.pop()
        if state not in can_end:
            can_end.add(state)
            ends += before.get(state, ())
    for state, link in seen.items():
        assert state in can_end, f"members wait for ever: {told(events(link))}"
    return len(seen)


def try_every_order(path, deaths=2, cases=CASES):
    """The number of states that there are in all cases, with at most so many deaths."""
    return sum(search(path, case._replace(deaths=min(case.deaths, deaths))) for case in cases)


def try_walks(path, times=2000):
    """Orders drawn at random, in cases that have too many states."""
    module, draw = protocol(path), random.Random(0)
    for turn in range(times):
        trial = Trial(module, WALKS[turn % len(WALKS)])
        while choices := trial.choices():
            assert len(trial.events) < 10_000, "members wait for ever"
            trial.go(*draw.choice(choices))
        assert trial.over is not None, "members wait for ever"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", default="more/survive.py")
    parser.add_argument("--deaths", type=int, default=2)
    parser.add_argument("--walks", type=int, default=2000)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    if not Path(options.file).is_file() or "class Members" not in Path(options.file).read_text():
        parser.error(f"{options.file}: must be a file that has survive.py's class Members")
    states, begun = 0, time.perf_counter()
    try:
        for case in CASES + LONG * options.all:
            started = time.perf_counter()
            found = try_every_order(options.file, options.deaths, [case])
            states += found
            print(f"{found:>7} states | {time.perf_counter() - started:.1f} s | {case}", flush=True)
        try_walks(options.file, options.walks)
    except AssertionError as error:
        sys.exit(f"{options.file}: {error}")
    took = time.perf_counter() - begun
    print(f"{options.file}: {states} states and {options.walks} walks in {took:.1f} s: all as promised")


if __name__ == "__main__":
    main()
