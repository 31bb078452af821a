"""The first place where a run computes something else than it should: step, phase, what, line, rank.

    python tools/diverge.py zero3.py                          on 2 ranks, beside single.py
    python tools/diverge.py exercises/bug17.py --ranks 3 --accum 2

Every rank notes each microbatch, the weights that a module uses and its output, each loss that backward is
called on, each gradient in backward, the gradients that a norm is taken of and those that an optimizer gets,
the weights after it, the printed loss and norm, the saved weights. What a rank notes is compared, name by
name, with the same rank's of the lesson that a file is a copy of (it has its docstring's first line).
Without such a lesson, or if nothing differs there, with the plain loop's: there, the numbers of all ranks
must be the plain run's, each as often as any other, in any order; so any way to split them fits, and a number
in a wrong place shows only in what is computed from it. Gradients within backward are not compared then.
The line is that of the first operator, since what was still right, with another result than the lesson's.
"""

import argparse
import gc
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from unittest import mock

import ledger
import torch
from promises import FLAGS, ROOT, differ_in, plain_of, run
from torch.optim import optimizer as optim
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from watch import tensors_in

# {collective: which of its arguments is sent}
GIVEN = {"allreduce_": 0, "_allgather_base_": 1, "allgather_": 1, "_reduce_scatter_base_": 1, "send": 0}
GIVEN |= {"reduce_scatter_": 1, "alltoall_base_": 1, "alltoall_": 1, "reduce_": 0}
AHEAD = 300  # operators in which one that is missing is looked for


class Recorder(TorchDispatchMode):
    """Notes what a lesson computes: its quantities, by name, and its operators, each with its line."""

    def __init__(self, lesson):
        super().__init__()
        self.lesson = lesson
        self.here = threading.local()
        self.here.step = 1
        self.step = 0
        self.updating = 0  # optimizers that are in their step()
        self.counts = Counter()
        self.quantities = {}  # (thread, step, phase, name, which): (time, operators until then, place, value)
        self.operators = defaultdict(list)  # {thread: [(operator and its result, place, time)]}
        self.made = {}  # where forward made a node of autograd's graph

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split(".")[0]
        sends = function.namespace == "c10d"
        if getattr(self.here, "quiet", False) or function.namespace == "prim":
            return function(*args, **(kwargs or {}))
        if name in ("aten::_foreach_norm", "aten::linalg_vector_norm") and not self.updating:
            self.note_gradients(tensors_in(args))
        shown = tensors_in(args[GIVEN[name[6:]]]) if sends and name[6:] in GIVEN else []
        values = [print_of(tensor) for tensor in shown]  # before they are on their way
        result = function(*args, **(kwargs or {}))
        if not sends:
            known = not function.is_view and "empty" not in name  # else it may be memory never written
            values = [print_of(each) if known else str(each.shape) for each in tensors_in(result)]
        self.operators[thread_name()].append((f"{name} {values}", self.place(), time.monotonic()))
        return result

    def place(self):
        """(function, line) in the lesson, innermost; of an operator of backward that of its forward."""
        frame = sys._getframe(2)
        node = torch._C._current_autograd_node()
        engine = False
        while frame:
            code = frame.f_code
            if code.co_filename == self.lesson.__file__:
                place = code.co_qualname.replace(".<locals>", "").replace(".<listcomp>", ""), frame.f_lineno
                if engine and node:
                    return self.made.get((thread_name(), node._sequence_nr()), place)
                if not node:
                    self.made[thread_name(), torch._C._autograd._get_sequence_nr() - 1] = place
                return place
            engine |= code.co_name == "_engine_run_backward"
            frame = frame.f_back
        return "", 0

    def note(self, phase, name, tensor):
        if not isinstance(tensor, torch.Tensor) or not tensor.numel() or tensor.device.type == "meta":
            return
        self.here.quiet = True
        step = getattr(self.here, "step", self.step)
        key = (thread_name(), step, phase, name)
        self.counts[key] += 1
        value = tensor.detach().to("cpu", torch.float64, copy=True)
        seen = len(self.operators[thread_name()])
        self.quantities[*key, self.counts[key]] = time.monotonic(), seen, self.place(), value
        self.here.quiet = False

    def note_gradients(self, tensors):
        leaves = [param for gpt in self.models for param in named_parameters(gpt).values()]
        leaves += [param for optimizer in self.optimizers for param in params_of(optimizer)]
        known = {}
        for i, param in enumerate(leaves):
            if param.grad is not None:
                where = param.grad.data_ptr(), param.grad.numel()
                known.setdefault(where, getattr(param, "plain", f"part {i}"))
        for tensor in tensors:
            if (tensor.data_ptr(), tensor.numel()) in known:
                self.note("gradients", known[tensor.data_ptr(), tensor.numel()], tensor)

    def find_modules(self):
        """Name the modules and parameters of each GPT that there is, and watch their gradients."""
        things = gc.get_objects()
        self.optimizers = [each for each in things if issubclass(type(each), torch.optim.Optimizer)]
        models = [each for each in things if issubclass(type(each), self.lesson.GPT)]
        self.models = [each for each in models if "_modules" in vars(each)]  # else another thread makes it
        for gpt in self.models:
            self.name_parts(gpt)

    def name_parts(self, gpt):
        for name, param in named_parameters(gpt).items():
            if param.requires_grad and not hasattr(param, "plain"):
                param.register_hook(partial(self.note, "backward", name))
            param.plain = name
        for name, module in gpt.named_modules():
            module.plain = name or "GPT"  # which copies have, too

    def making(self, init):
        def make(gpt, *args, **kwargs):
            init(gpt, *args, **kwargs)
            self.name_parts(gpt)  # now: a lesson may take it apart

        return make

    def load(self, load, config, text, step, *more):
        self.step = self.here.step = step
        self.find_modules()
        batches = list(load(config, text, step, *more))
        for batch in batches:
            for name, part in zip(("inputs", "targets"), batch):
                self.note("forward", name, part)
        return batches

    def after_module(self, module, args, output):
        if torch._C._current_graph_task_id() != -1:
            return  # checkpointing's second forward
        name = getattr(module, "plain", type(module).__name__)
        for own, param in module._parameters.items():
            self.note("weights", f"{name}.{own}", param)
        self.note("forward", name, output)
        if getattr(output, "requires_grad", False):
            output.register_hook(partial(self.note, "backward", f"output of {name}"))

    def before_backward(self, backward, tensors, gradients=None, *args, **kwargs):
        for tensor in tensors_in([tensors]):
            if tensor.numel() == 1:
                self.note("loss", "loss", tensor)
        return backward(tensors, gradients, *args, **kwargs)

    def around_update(self, change, phase, optimizer, args, kwargs):
        self.updating += change
        for i, param in enumerate(params_of(optimizer)):
            self.note(phase, getattr(param, "plain", f"part {i}"), param if change < 0 else param.grad)

    def print_step(self, config, step, loss, grad_norm, started):
        self.here.step = step  # another thread may be ahead
        self.note("loss", "printed loss", loss)
        self.note("clip", "printed norm", grad_norm)
        self.here.step += 1

    def watching(self, run):
        def run_watched(thread):
            _push_mode(self)
            run(thread)
            _pop_mode()

        return run_watched


def named_parameters(module):
    return dict(torch.nn.Module.named_parameters(module))  # as ZeRO-3 refuses its own


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def thread_name():
    return threading.current_thread().name


def print_of(tensor):
    """What tells a tensor from others, rounded."""
    if tensor.device.type == "meta" or not tensor.numel():
        return str(tensor.shape)
    flat = tensor.detach().flatten().double()
    return f"{flat.norm():.7g} {flat @ some_numbers(len(flat)):.6g}"


@cache
def some_numbers(length):
    return torch.arange(1, length + 1, dtype=torch.float64).cos()


def record(path, flags):
    """On a rank: run a lesson's file; what it computed."""
    lesson = ledger.load(path)
    config = lesson.parse([*FLAGS, "--batch=12", *flags])
    recorder = Recorder(lesson)
    loader = "load_microbatches" if hasattr(lesson, "deal") else "microbatches"
    with ExitStack() as stack:
        for where, name, instead in (
            (lesson, loader, partial(recorder.load, getattr(lesson, loader))),
            (lesson, "print_step", recorder.print_step),
            (lesson.GPT, "__init__", recorder.making(lesson.GPT.__init__)),
            (torch.autograd, "backward", partial(recorder.before_backward, torch.autograd.backward)),
            (threading.Thread, "run", recorder.watching(threading.Thread.run)),
        ):
            stack.enter_context(mock.patch.object(where, name, instead))
        stack.callback(torch.nn.modules.module.register_module_forward_hook(recorder.after_module).remove)
        before = partial(recorder.around_update, 1, "clip")
        after = partial(recorder.around_update, -1, "optimizer")
        stack.callback(optim.register_optimizer_step_pre_hook(before).remove)
        stack.callback(optim.register_optimizer_step_post_hook(after).remove)
        stack.enter_context(recorder)
        lesson.train(config)
    return {"quantities": recorder.quantities, "operators": dict(recorder.operators)}


def first_difference(found, right, tolerance):
    """The first quantity, and operator, that is not the same rank's of the lesson as it is; or None."""
    differences, operators = [], []
    for rank, (own, other) in enumerate(zip(found, right)):
        key, since, right_since = first_on_rank(own["quantities"], other["quantities"], tolerance)
        if key:
            when, seen, place, value = own["quantities"][key]
            _, right_seen, _, expected = other["quantities"][key]
            what = *origin(key, other["quantities"]), key[4], rank, place
            differences.append((when, *what, *how_far(value, expected, len(found))))
            lists = own["operators"].get(key[0], []), other["operators"].get(key[0], [])
            operator = other_operator(lists[0][since:seen], lists[1][right_since:right_seen])
            operators.append(operator or other_operator(lists[0][:seen], lists[1][:right_seen]))
    if not differences:
        return None
    names = "when step phase name microbatch rank place size ratio".split()
    first = dict(zip(names, min(differences, key=lambda each: each[0])))
    first["operator"] = min(filter(None, operators), default=None)
    if first["phase"] == "reduction" and re.search(r"\._?(backward|weight_gradients)$", function_of(first)):
        first["phase"] = "backward"
    return first


def first_on_rank(own, right, tolerance):
    """(key of the first quantity that differs or None, how many operators both had when all was right)."""
    until = defaultdict(dict)  # {thread: {phase: these numbers}}
    for key, (_, seen, _, value) in own.items():
        thread, _, phase, name, _ = key
        _, right_seen, _, expected = right.get(key, (0, 0, 0, value))
        if not is_close(value, expected, tolerance):
            phases = until[thread]
            if phase == "weights":  # those that forward finds wrong were so since the update
                phases = {each: phases.get(each, (0, 0)) for each in ("backward", "gradients", "clip")}
            return key, *max(phases.values(), default=(0, 0))
        if key in right and name not in ("inputs", "targets") and not name.startswith("printed"):
            until[thread][phase] = seen, right_seen
    return None, 0, 0


def origin(key, quantities):
    """(step, phase, name) in which a quantity became what it is."""
    _, step, phase, name, _ = key
    noted = {each[1:4] for each in quantities}
    if phase == "gradients":
        summed = name.startswith("part") or (step, "backward", name) in noted
        phase = "reduction" if summed else "backward"
    elif phase == "weights":  # which forward uses
        step, phase = max(step - 1, 1), "forward" if step == 1 else "optimizer"
    return step, phase, name


def other_operator(own, right):
    """(when, is it missing, place, the lesson's place) of the first operator that is not the lesson's."""
    none = "", ("", 0), float("inf")
    for i, pair in enumerate(zip_longest(own, right, fillvalue=none)):
        (what, place, when), (expected, right_place, _) = pair
        if what != expected:
            coming, right_coming = ({each[0] for each in ops[i : i + AHEAD]} for ops in (own, right))
            is_missing = expected not in coming and (not what or what in right_coming)
            return when, is_missing, place, right_place
    return None


def is_close(value, expected, tolerance):
    if value.shape != expected.shape:
        return False
    return bool((value - expected).abs().max() <= tolerance * max(expected.abs().max(), 1e-3))


def how_far(value, expected, ranks):
    """(the largest difference, the ratio in words if it is one number)."""
    if value.shape != expected.shape:
        return float("nan"), f"its shape is {tuple(value.shape)}, not {tuple(expected.shape)}"
    large = expected.abs() > 1e-3 * expected.abs().max()
    size = (value - expected).abs().max().item()
    ratio = (value[large] / expected[large]).median().item() if large.any() else float("nan")
    if not is_close(value, ratio * expected, 1e-6) or abs(ratio - 1) < 1e-6:
        return size, ""
    known = {0.5: "half of it", 2: "twice as much", 0: "zero", -1: "of the other sign"}
    known |= {ranks: "N times as much", 1 / ranks: "1/N of it"}
    known |= {ranks**0.5: "√N times as much", ranks**-0.5: "1/√N of it"}
    named = [f", {words}" for number, words in known.items() if abs(number - ratio) < 1e-6]
    return size, f"{ratio:.6g} times the right value{', '.join(dict.fromkeys(named))}"


def gathered(ranks):
    """{(step, phase, name): [(rank, place, value)]} of what can be compared with a plain run."""
    rows = defaultdict(list)
    for rank, seen in enumerate(ranks):
        for (_, step, phase, name, _), (_, _, place, value) in seen["quantities"].items():
            if phase in ("forward", "gradients") or name.startswith("printed"):
                name = re.sub("^part .*", "other parameters", name)
                rows[step, phase, name].append((rank, place, value.flatten()))
    return rows


def beside_plain(found, plain, tolerance):
    """(the first quantity whose numbers are not the plain run's, or None; how many are; what has no like)."""
    own, right = gathered(found), gathered(plain)
    for rows, other in ((own, set(right)), (right, set(own))):  # shards have no names: all in one
        for step, phase, name in [*rows]:
            if phase == "gradients" and (step, phase, name) not in other:
                rows[step, phase, "other parameters"] += rows.pop((step, phase, name))
    same, left_out = 0, []
    for (step, phase, name), rows in right.items():
        values = torch.cat([value for *_, value in own.get((step, phase, name), [(0, 0, torch.empty(0))])])
        expected = torch.cat([value for *_, value in rows])
        if phase == "gradients":  # without padding, and weights that no token uses
            values, expected = (each[each.abs() > 1e-12] for each in (values, expected))
        times, rest = divmod(len(values), len(expected))
        if rest or not times:
            left_out.append(name)
            continue
        expected = expected.sort()[0]
        if not is_close(values.sort()[0], expected.repeat_interleave(times), tolerance):
            rank, place, _ = max(own[step, phase, name], key=lambda row: distance(row[2], expected))
            size, ratio = how_far(values.sort()[0], expected.repeat_interleave(times), len(found))
            phase = "reduction" if phase == "gradients" else phase
            where = {"step": step, "microbatch": 0, "phase": phase, "name": name, "rank": rank}
            return where | {"place": place, "size": size, "ratio": ratio, "operator": None}, same, left_out
        same += 1
    return None, same, left_out


def distance(value, among):
    """How far the numbers of a tensor are, at most, from the nearest in a sorted one."""
    right = torch.searchsorted(among, value).clamp(max=len(among) - 1)
    nearest = torch.minimum((value - among[right]).abs(), (value - among[(right - 1).clamp(min=0)]).abs())
    return nearest.max()


def diverge(path, lesson, ranks=2, flags=""):
    """(the first difference or None, what was compared, in words) of a file; lesson: that it is a copy of."""
    found = run(path, lesson, ranks, flags, record)
    said = []
    if "error" in found:
        return {"phase": "none", "error": found["error"]}, "nothing"
    if lesson and Path(path).resolve() != ROOT / f"{lesson}.py":
        right = run(f"{ROOT}/{lesson}.py", lesson, ranks, flags, record)
        tolerance = 1e-6 if "--dtype" in flags else 1e-9
        first = first_difference(found["ranks"], right["ranks"], tolerance)
        said = [f"{sum(len(rank['quantities']) for rank in right['ranks'])} quantities with {lesson}.py's"]
        if not first and differ_in(found["weights"], right["weights"]):
            first = {"phase": "save"}
        if first or "--dtype" in flags:
            return first, said[0]
    source, plain_lesson = plain_of(lesson)
    plain = run(source, plain_lesson, ranks if lesson == "diloco" else 1, flags, record)
    first, same, left_out = beside_plain(found["ranks"], plain["ranks"], 1e-9)
    said += [f"{same} quantities with those of {Path(source).name} on one rank"]
    if left_out:
        said += [f"not compared with these: {', '.join(dict.fromkeys(left_out))}"]
    wrong = None if first else differ_in(found["weights"], plain["weights"])
    return ({"phase": "save", "name": wrong} if wrong else first), "; ".join(said)


def describe(first, compared, path, lesson):
    """Yield lines that say what diverge() found."""

    def line(place, file):
        lines = ["it has nothing here", *Path(file).read_text().splitlines()]
        text = lines[place[1]].strip()
        return f"{Path(file).name}, line {place[1]}, {place[0]}: {text}"

    yield f"compared: {compared}"
    if not first or "step" not in first:
        yield "nothing differs" if not first else first.get("error") or "only the saved weights differ"
        return
    where = f"step {first['step']}, {first['phase']}, {first['name']}"
    if first["microbatch"]:
        where += f", number {first['microbatch']} of the step"
    yield f"the first that differs: {where}, on rank {first['rank']}"
    yield f"  by {first['size']:.2g}{first['ratio'] and '; '}{first['ratio']}"
    yield f"  noted at {line(first['place'], path)}"
    if first["operator"]:
        _, is_missing, place, right_place = first["operator"]
        missing = " (one is missing)" * is_missing
        yield f"the first operator that is not the lesson's{missing}: {line(place, path)}"
        yield f"  where the lesson has {line(right_place, ROOT / f'{lesson}.py')}"


def lesson_of(path):
    """The lesson that a file is a copy of: the one with its docstring's first line. None: of none."""
    first = Path(path).read_text().partition("\n")[0]
    copied = (file.stem for file in ROOT.glob("*.py") if file.read_text().partition("\n")[0] == first)
    return next(copied, None)


def function_of(first):
    """The function in which the first other operator is, or that of the quantity."""
    if not first.get("operator"):
        return first.get("place", ("",))[0]
    _, is_missing, place, right_place = first["operator"]
    return (right_place if is_missing else place)[0]


def main():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("lesson")
    given, flags = parser.parse_known_args()
    if not Path(given.lesson).is_file():
        parser.error(f"{given.lesson}: no such file")
    lesson = lesson_of(given.lesson)
    path = str(Path(given.lesson).resolve())
    first, compared = diverge(path, lesson, given.ranks, " ".join(flags))
    print(*describe(first, compared, path, lesson), sep="\n")
    sys.exit(bool(first))


if __name__ == "__main__":
    main()
