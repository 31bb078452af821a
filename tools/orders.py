"""Every order of events of survive.py's protocol, without processes: who goes on, dies, is told dead, when.

    python tools/orders.py [FILE] [DEATHS]

Three members of an epoch take two steps. Their code is the class Members of FILE, made to pause before it
answers, waits or decides; the store is a dict. From each state all that may happen next is tried, with up to
DEATHS (2). Held: an epoch has one list of members; a step counts once, and only if all of the list have
computed it; nobody who lives is left out; somebody takes both steps. Else the order of events is printed.
"""

import ast
import json
import random
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

WORLD = SimpleNamespace(_world=SimpleNamespace())


class Pauses(ast.NodeTransformer):
    """Makes generators of Members' methods."""

    def visit_Call(self, node):
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if name in ("communicate", "self.attempt", "self.agree", "dist.broadcast_object_list"):
            return ast.YieldFrom(node)
        if name == "self.store.get" and "/members" in ast.unparse(node):  # for which a newcomer waits
            there = ast.Compare(node.args[0], [ast.In()], [node.func.value])
            pause = ast.IfExp(there, ast.Constant(None), ast.Yield(node.args[0]))
            return ast.BoolOp(ast.Or(), [pause, node])
        if re.match(r"self.store.(append|compare_set|wait|set\(key)|time.sleep", ast.unparse(node)):
            ask = {"self.store.wait": node.args[0], "time.sleep": ast.Constant("sleep")}.get(name)
            return ast.BoolOp(ast.Or(), [ast.Yield(ask), node])
        return node


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
        self[key] = self.setdefault(key, "") + text

    def check(self, keys):
        return keys[0] in self

    def wait(self, keys, timeout):
        if keys[0] not in self:
            raise RuntimeError("nobody came")

    def compare_set(self, key, expected, value):
        return self.setdefault(key, value).encode()


class Trial:
    """An order of events, so far."""

    def __init__(self, module, deaths, delays, newcomer=None):
        self.module, self.deaths, self.delays = module, deaths, delays
        self.first = [worker for worker in range(3) if worker != newcomer]
        self.store = Store({"0/members": "[]", "1/members": str(self.first), "1/now": "1"})
        self.handed = {}  # {epoch: the first member's state}
        self.taken, self.met, self.unburied, self.clocks = {}, {}, [], [0, 0, 0]
        self.members, self.threads, self.asks, self.events = [], [], {}, []
        config = SimpleNamespace(workers=3, timeout=1, min_workers=1, kill=())
        for worker in range(3):
            self.members.append(module["Members"](config, self.store, worker))
            self.members[worker].epoch, self.members[worker].computed = 1, None
            self.members[worker].members = self.first
            self.threads.append(self.work(self.members[worker]))
            self.go(worker)

    def work(self, member):
        if member.worker not in self.first:
            yield from member.enter(1)
            assert member.state, "a newcomer gets no state"
        for step in range(member.state[0], 3):
            while not (yield from member.attempt(step, self.meet, step)):
                yield from member.reform(step)
            epoch, workers = self.taken.setdefault(step, (member.epoch, set()))
            assert epoch == member.epoch and member.worker not in workers, "a step counts twice"
            assert json.loads(self.store[f"{epoch}/members"]) == member.members, (
                "an epoch has two lists of members"
            )
            assert member.computed == (epoch, step), "a step counts that not all have computed"
            workers.add(member.worker)

    def meet(self, step):
        """A collective, which may fail on some and not on others if a member is dead or has left."""
        place = self.members[self.now].epoch, step
        self.met.setdefault(place, set()).add(self.now)
        if (yield place):
            raise RuntimeError
        self.members[self.now].computed = place

    def hand_over(self, states):
        member = self.members[self.now]
        if member.worker == member.members[0]:
            self.handed[member.epoch] = states[0]
        yield from self.meet(0)
        states[0] = self.handed[member.epoch]

    def choices(self):
        """[(worker, what may happen to it next)]."""
        found = [(worker, "is told dead") for worker in self.unburied]
        if all(self.members[worker].state is None for worker in self.asks):
            return found  # the launcher ends newcomers that are left alone
        for worker, ask in self.asks.items():
            key = ask[0] if isinstance(ask, list) else ask
            goes = key in (None, "sleep") or key in self.store
            if isinstance(ask, tuple):
                others = [self.members[other] for other in self.members[worker].members]
                goes = self.met[ask] == {other.worker for other in others}
                gone = [other.worker not in self.asks or other.epoch > ask[0] for other in others]
                found += [(worker, "fails")] * any(gone)
            found += [(worker, "goes on")] * goes + [(worker, "dies")] * (self.deaths > 0)
            is_late = ask == "sleep" or isinstance(ask, (list, tuple))
            found += [(worker, "is late")] * (self.delays > 0 and is_late and (ask == "sleep" or not goes))
        return found

    def go(self, worker, what="goes on"):
        """Let it happen."""
        assert self.members[worker].epoch < 9, "epochs begin without end"
        self.events.append(f"{worker} {what}")
        self.now = worker
        clock = SimpleNamespace(monotonic=lambda: self.clocks[worker], sleep=bool, perf_counter=int)
        calls = ("is_initialized", "PrefixStore", "init_process_group", "get_rank")
        group = SimpleNamespace(**dict.fromkeys(calls, lambda *_: 0), distributed_c10d=WORLD)
        group.broadcast_object_list = self.hand_over
        self.module |= {"time": clock, "dist": group, "print": id}
        if what == "is told dead":
            self.unburied.remove(worker)
            return self.module["bury"](self.store, worker)
        self.deaths -= what == "dies"
        self.delays -= what == "is late"
        self.clocks[worker] += 9 * (what == "is late")
        try:
            if what != "dies":
                fails = what != "goes on" and isinstance(self.asks[worker], tuple)
                self.asks[worker] = self.threads[worker].send(fails or None)
                return None
        except StopIteration:
            pass
        except SystemExit:
            assert sum(self.clocks), "a living member is left out"
        del self.asks[worker]
        return self.unburied.append(worker)

    def state(self):
        """All that the future depends on."""
        frames = []
        for worker in self.asks:
            thread = self.threads[worker]
            frames.append(self.members[worker].computed)
            while thread:
                known = [x for x in thread.gi_frame.f_locals.values() if isinstance(x, (int, str, list, set))]
                frames.append((worker, thread.gi_frame.f_lasti, known))
                thread = thread.gi_yieldfrom
        members = [(member.epoch, member.members) for member in self.members]
        counts = self.deaths, self.delays, self.clocks
        return str(
            (
                self.store,
                self.asks,
                frames,
                members,
                self.unburied,
                self.taken,
                self.met,
                counts,
            )
        )

    def end(self):
        waiting = [worker for worker in self.asks if self.members[worker].state]
        assert not waiting, "members wait for ever"
        assert len(self.taken) == 2, "a step is lost"


def protocol(path):
    """The names of a file's protocol, its members' methods generators."""
    tree = ast.parse(Path(path).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in ("Members", "look", "bury")]
    Pauses().visit(tree.body[0])
    module = {
        "timedelta": lambda seconds: seconds,
        "sys": sys,
        "os": SimpleNamespace(environ={}),
        "json": json,
    }
    exec(compile(ast.fix_missing_locations(tree), path, "exec"), module)
    return module


def try_every_order(path, deaths=2):
    """The number of states that there are. Raises AssertionError, with the events, if a promise is broken."""
    module = protocol(path)
    seen, todo = set(), [()]
    while todo:
        past = todo.pop()
        trial = Trial(module, deaths, 0)
        try:
            for choice in past:
                trial.go(*choice)
            while (state := trial.state()) not in seen:
                seen.add(state)
                choices = trial.choices()
                if not choices:
                    trial.end()
                    break
                todo += [(*past, choice) for choice in choices[1:]]
                past = (*past, choices[0])
                trial.go(*choices[0])
        except AssertionError as error:
            raise AssertionError(f"{error}: {', '.join(trial.events)}") from None
    return len(seen)


def try_delays(path, times=2000):
    """Orders drawn at random: members may be late as well, and then be left out; or one is a newcomer."""
    module, draw = protocol(path), random.Random(0)
    for turn in range(times):
        trial = Trial(module, 1, 0, newcomer=draw.choice((0, 2))) if turn % 2 else Trial(module, 1, 1)
        while choices := trial.choices():
            assert len(trial.events) < 10_000, "members wait for ever"
            trial.go(*draw.choice(choices))
        trial.end()


if __name__ == "__main__":
    path, deaths = [*sys.argv[1:], *("survive.py", "2")[len(sys.argv) - 1 :]]
    started = time.perf_counter()
    try:
        print(
            f"{path} | up to {deaths} deaths | {try_every_order(path, int(deaths))} states, all as promised",
            end="",
        )
    except AssertionError as error:
        sys.exit(f"{path}: {error}")
    print(f" | {time.perf_counter() - started:.1f} s")
