"""Runs survive.py's votes without processes, in every order of events: who goes on, who dies, who is late?

    python tests/orders.py [--naive]

The code that runs is the lesson's own: the launcher's lead() and hear_all(), a worker's Member, train() and
all_reduce(). They pause at their start and where they wait: for votes, for an answer, in the all-reduce. From
each state that can occur in one of CASES, all that can happen next is tried: somebody goes on; a worker dies;
an all-reduce fails, as a member is dead or has left; a timeout passes. In WALKS, which are larger, orders are
drawn at random.

Gradients may be added up only if they are of one step and of the same weights, and of each part of the batch
once. A worker may update its weights only with such a sum, of its next step. The job must end: after all
steps, with the weights saved, or with an error if no worker is left. Else the order of events is printed.

What this cannot find: errors that need more workers, deaths, delays or steps than a case has; what happens
inside an all-reduce or between two pauses; wrong numbers.
"""

import ast
import contextlib
import random
import re
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

Case = namedtuple("Case", "workers steps deaths delays")
CASES = [Case(2, 2, 2, 0), Case(2, 2, 1, 1), Case(3, 1, 1, 1), Case(3, 1, 3, 0), Case(3, 2, 2, 0)]
WALKS = [Case(4, 3, 3, 1), Case(3, 3, 2, 2), Case(5, 2, 4, 1)]
LAUNCHER = -1
PROTOCOL = ("naive", "hear_all", "lead", "Member", "train", "all_reduce")


class Pauses(ast.NodeTransformer):
    """Makes generators of functions, which yield what they wait for."""

    def visit_Call(self, node):
        self.generic_visit(node)
        call, name = ast.unparse(node), ast.unparse(node.func)
        if name in ("hear_all", "ask", "all_reduce"):
            call = f"(yield from {call})"
        elif name in ("join_world", "wait", "saver.join", "self.pipe.recv", "dist.all_reduce"):
            given = ", ".join(map(ast.unparse, node.args)) or name.split(".")[0]
            call = f"(yield ('{name}', {given}))"
        return ast.parse(call, mode="eval").body


class Anything:
    """A module, function or object that does nothing."""

    def __getattr__(self, name):
        return self

    def __call__(self, *arguments, **options):
        return self


class Worker:
    """For the launcher a process and its pipe; for train() and Member a process group, and an optimizer."""

    def __init__(self, number):
        self.number, self.is_alive, self.exitcode = number, True, -9
        self.votes, self.answers = [], []  # on their way
        self.members, self.place, self.left = [], None, None  # place: (group, number of sums so far)
        self.parts, self.sum, self.weights = [], None, ()  # of the batch; of a step; the steps that count

    def __repr__(self):
        return f"{self.number}"

    def kill(self):
        self.is_alive = False

    def send(self, answer):  # by the launcher
        if not self.is_alive:
            raise BrokenPipeError
        self.answers.append(answer)

    def recv(self):
        if not self.votes:
            raise EOFError
        return self.votes.pop(0)

    def join(self, backend, init_method, timeout, size, rank, group):
        assert size == len(self.members) and self.members[rank] == self.number, "another rank"
        self.place = group, 0

    def leave(self):
        self.place, self.left = None, self.place and self.place[0]

    def step(self):
        assert self.sum == len(self.weights) + 1, f"step {self.sum} counts after {len(self.weights)} steps"
        self.weights += (self.sum,)


def protocol(path):
    """A file's protocol, its functions generators, as {name: what}. "here" returns the worker that runs."""
    here = lambda: names["here"]()  # noqa: E731
    dist, model = Anything(), Anything()
    dist.PrefixStore = lambda name, store: name
    dist.is_initialized = lambda: here().place is not None
    dist.init_process_group = lambda *arguments: here().join(*arguments)
    dist.destroy_process_group = lambda: here().leave()
    dist.get_rank = lambda: here().members.index(here().number)
    dist.get_world_size = lambda: len(here().members)
    model.to, model.parameters, model.zero_grad = lambda device: model, list, lambda: here().parts.clear()
    nothing = "squared_norm join_world timedelta print print_step nn os time".split()
    names = dict.fromkeys(nothing, Anything()) | {"suppress": contextlib.suppress, "sys": sys, "dist": dist}
    names |= {"GPT": lambda config: model, "MasterWeights": lambda params, lr: here()}
    names["microbatches"] = lambda config, step, device, *part: here().parts.append((step, *part)) or []
    names["torch"] = SimpleNamespace(save=lambda *_: names["saved"].append(here().weights))
    tree = ast.parse(Path(path).read_text())
    tree.body = [Pauses().visit(node) for node in tree.body if getattr(node, "name", None) in PROTOCOL]
    exec(compile(ast.fix_missing_locations(tree), path, "exec"), names)
    return names


class Trial:
    """An order of events, so far."""

    def __init__(self, names, case, naive=False):
        self.case, self.deaths, self.delays = case, case.deaths, case.delays
        self.events, self.over, self.saved = [], False, []
        self.met = {}  # {(group, number of sums before): {worker: (its parts of the batch, its weights)}}
        self.workers = {number: Worker(number) for number in range(case.workers)}
        names |= {"here": lambda: self.workers[self.now], "saved": self.saved}
        config = SimpleNamespace(**case._asdict(), naive=naive, timeout=1, kill="", save="w", lr=0, clip=0)
        self.threads = {LAUNCHER: names["lead"](config, {n: (w, w) for n, w in self.workers.items()})}
        for number, worker in self.workers.items():
            pipe = SimpleNamespace(send=worker.votes.append)
            self.threads[number] = names["train"](config, names["Member"](config, number, pipe, 0).ask)
        self.asks = {}  # {who: what it waits for}
        for who, thread in self.threads.items():
            self.go_on(who, thread.send, None)

    def choices(self):
        """[(who, what may happen to it next)]."""
        found = []
        for who, (ask, given, *timeout) in self.asks.items():
            worker, late, fails = self.workers.get(who), False, False
            if ask == "wait":
                goes = any(other.votes or not other.is_alive for other in given)
                late = not goes and timeout[0] is not None
            elif ask == "saver.join":
                goes = not given.is_alive
            elif ask == "self.pipe.recv":
                goes = bool(worker.answers)
            elif ask == "join_world":
                goes = True
            else:
                others = [self.workers[number] for number in worker.members]
                goes = len(self.met[worker.place]) == len(others)
                late = not goes
                fails = any(not other.is_alive or worker.place[0] == other.left for other in others)
            found += [(who, "goes on")] * goes + [(who, "fails")] * fails
            found += [(who, "is late")] * (late and self.delays > 0)
            found += [(who, "dies")] * (who != LAUNCHER and self.deaths > 0)
        return found

    def go(self, who, what):
        """Let it happen."""
        self.events.append((who, what))
        self.deaths -= what == "dies"
        self.delays -= what == "is late"
        ask, given, *_ = self.asks.pop(who)
        worker, send, answer = self.workers.get(who), self.threads[who].send, None
        if what == "dies":
            worker.kill()
            return
        if ask == "wait":
            answer = [other for other in given if other.votes or not other.is_alive]
        elif ask == "self.pipe.recv":
            answer = worker.answers.pop(0)
            worker.members = worker.members if answer[0] else answer[-1]
        elif ask == "dist.all_reduce" and what == "goes on":
            self.add_up(worker)
        elif ask == "dist.all_reduce":
            send, answer = self.threads[who].throw, RuntimeError("no sum")
        self.go_on(who, send, answer)

    def go_on(self, who, send, answer):
        self.now = who
        try:
            self.asks[who] = send(answer)
            if self.asks[who][0] == "dist.all_reduce":
                worker = self.workers[who]
                self.met.setdefault(worker.place, {})[who] = tuple(worker.parts), worker.weights
        except (StopIteration, SystemExit) as end:
            self.end(who, end)
        self.asks = {who: self.asks[who] for who in self.asks if who < 0 or self.workers[who].is_alive}

    def end(self, who, end):
        if who != LAUNCHER:
            self.workers[who].is_alive, self.workers[who].exitcode = False, 0
            return
        self.over = True
        is_saved = tuple(range(1, self.case.steps + 1)) in self.saved
        is_bad = isinstance(end, SystemExit)
        assert not is_bad or not any(worker.is_alive for worker in self.workers.values()), "ends too early"
        assert is_bad or end.value or is_saved, f"weights of steps {self.saved} are saved"

    def add_up(self, worker):
        """It gets the sum of all that have met."""
        parts, weights = zip(*self.met[worker.place].values())
        parts = sorted(sum(parts, ()))
        worker.place, worker.sum = (worker.place[0], worker.place[1] + 1), parts[0][0]
        once = [(worker.sum, part, self.case.workers) for part in range(self.case.workers)]
        assert len(set(weights)) == 1, f"gradients of different weights are added up: {weights}"
        assert parts == once, f"not each part of the batch once: {parts}"

    def state(self):
        """All that the future depends on, as text."""
        found = [self.deaths, self.delays, [sorted(met.items()) for met in list(self.met.values())[-2:]]]
        for worker in self.workers.values():
            found += vars(worker).values() if worker.is_alive else (worker.votes, worker.exitcode)
        for who, thread in self.threads.items():
            while thread and who in self.asks:
                given = thread.gi_frame.f_locals.values()
                given = [sorted(value.items()) if isinstance(value, dict) else value for value in given]
                found += [who, thread.gi_frame.f_lasti, given]
                thread = thread.gi_yieldfrom
        return re.sub("0x[0-9a-f]+", "", str(found))  # addresses

    def run(self, choose):
        """Go on as choose(choices) says, to the end or until it says None. If it fails, with all events."""
        try:
            choice = True
            while choice and not self.over:
                choices = self.choices()
                assert choices, "all wait for ever"
                if choice := choose(choices):
                    self.go(*choice)
        except Exception as error:
            order = ", ".join(f"{'launcher' if who == LAUNCHER else who} {what}" for who, what in self.events)
            raise AssertionError(f"{type(error).__name__}: {error}: {order}") from error


def search(names, case, naive=False):
    """The number of states that there are."""
    seen, todo = set(), [[]]

    def choose(choices):
        if path:
            return path.pop()
        state = hash(trial.state())
        if state in seen:
            return None
        seen.add(state)
        todo.extend([*trial.events, other] for other in choices[1:])
        return choices[0]

    while todo:
        path = todo.pop()[::-1]
        trial = Trial(names, case, naive)
        trial.run(choose)
    return len(seen)


def try_all(path, walks=300, naive=False, cases=CASES):
    """Every order in these cases, and so many in WALKS. The number of states."""
    names, draw = protocol(path), random.Random(0)
    states = sum(search(names, case, naive) for case in cases)
    for walk in range(walks):
        Trial(names, WALKS[walk % len(WALKS)], naive).run(draw.choice)
    return states


if __name__ == "__main__":
    started = time.perf_counter()
    states = try_all("more/survive.py", 2000, "--naive" in sys.argv)
    print(f"{states} states and 2000 walks in {time.perf_counter() - started:.1f} s: all as promised")
