"""What each exercise is about: promises of single lessons, beside those of all in tools/promises.py.

A check is called on each rank with a lesson's file as a module. What it asserts is said to the learner, so a
message names numbers: what is, and what should be. Only more is wrong; a better solution passes.
"""

import itertools
import math
import threading
import weakref
from collections import Counter
from functools import partial
from types import SimpleNamespace

import ledger
import torch
import torch.distributed as dist
import torch.nn as nn
from bubble import bubble_rate
from torch.utils.flop_counter import FlopCounterMode
from watch import Watch


def on_rank(check, path, flags):
    """What tools/promises.py's run() calls on each rank."""
    torch.manual_seed(0)
    check(ledger.load(path))
    return {}


# ---- schedules ----


def in_flight(actions):
    """The most forwards whose backward, W if there is one, has not been."""
    end = "W" if any(action.op == "W" for action in actions) else "B"
    return max(itertools.accumulate((action.op == "F") - (action.op == end) for action in actions))


def stands_still(schedule):
    """Whether a rank waits for ever: an action needs one that never comes, as it comes later on its rank."""
    todo = [list(actions) for actions in schedule]
    everything = {tuple(action) for actions in schedule for action in actions}
    done = set()
    while any(todo):
        before = len(done)
        for actions in todo:
            while actions:
                op, stage, j = actions[0]
                needs = {"F": {("F", stage - 1, j)}, "B": {("F", stage, j), ("B", stage + 1, j)}}
                if not needs.get(op, {("B", stage, j)}) & everything <= done:
                    break
                done.add(tuple(actions.pop(0)))
        if len(done) == before:
            return True
    return False


# Of rank i of n, with k microbatches: how many are in flight, and the idle turns if F, B and W take one each.
IN_FLIGHT = {
    "naive": lambda n, i, k: 1,
    "gpipe": lambda n, i, k: k,
    "1f1b": lambda n, i, k: min(k, n - i),
    "interleaved": lambda n, i, k: min(2 * k, 3 * n - 2 * i - 1) if n > 1 else 1,
    "zb-h1": lambda n, i, k: min(k, n),
    "zb-h2": lambda n, i, k: min(k, 2 * n - 1),
    "zb-v": lambda n, i, k: min(2 * k, k + i + 1, 2 * n),
}
IDLE = {
    "naive": lambda n, k: 3 * k * (n - 1),
    "gpipe": lambda n, k: 3 * (n - 1),
    "1f1b": lambda n, k: 3 * (n - 1),
    "interleaved": lambda n, k: 1.5 * (n - 1),
    "zb-h1": lambda n, k: n - 1,
    "zb-h2": lambda n, k: 0,
    "zb-v": lambda n, k: 0,
}


def check_schedule(name, lesson):
    """Every action comes once; no rank keeps more microbatches than it must, or is idle longer."""
    splits_backward = name.startswith("zb")
    for n, k in itertools.product(range(1, 9), range(1, 9)):
        if name == "interleaved" and k % n:
            continue
        where = f"{name} on {n} ranks, {k} microbatches"
        try:
            schedule = lesson.build_schedule(name, n, k)
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__} {error}") from error
        for i, actions in enumerate(schedule):
            stages = {i, 2 * n - 1 - i} if name == "zb-v" else {i, n + i} if name == "interleaved" else {i}
            stages = {0} if n == 1 and name == "interleaved" else stages
            wanted = set(itertools.product("FBW" if splits_backward else "FB", stages, range(k)))
            assert wanted == {tuple(action) for action in actions}, f"{where}: rank {i} lacks an action"
            assert len(wanted) == len(actions), f"{where}: rank {i} repeats an action"
            most = IN_FLIGHT[name](n, i, k)
            found = in_flight(actions)
            assert found <= most, f"{where}: rank {i} has {found} in flight, which should be {most}"
        assert not stands_still(schedule), f"{where}: a rank waits for ever"
        if k < 2 * n and splits_backward:
            continue  # too few microbatches to fill all turns
        least = IDLE[name](n, k)
        found = bubble_rate(schedule, 1, 1, 1)
        # Stages of half the size take half a turn, but zb-v's have as many turns, and no idle ones.
        least /= least + 3 * k
        assert found < least + 1e-9, f"{where}: idle for {found:.1%} of the step, which should be {least:.1%}"


def check_outputs(lesson):
    """On the first of 2 ranks, an output that has been sent is not kept for backward."""
    name = "1f1b"
    schedule = lesson.build_schedule(name, 2, 4)
    layers = [nn.Linear(6, 6) for _ in range(2)]
    pipe = lesson.Pipeline(layers, [1, 2], nn.functional.mse_loss, schedule, torch.empty(3, 6, device="meta"))
    outputs = []
    pipe.stages[0].register_forward_hook(lambda _, inputs, output: outputs.append(weakref.ref(output)))
    kept = []
    backward = pipe._backward

    def note(*action):
        kept.append(sum(output() is not None for output in outputs))
        backward(*action)

    pipe._backward = note
    pipe.step(*torch.randn(2, 4, 3, 6))
    assert dist.get_rank() == 1 or not max(kept), f"{max(kept)} outputs are kept, which should be 0"


def check_later(lesson):
    """B leaves the gradient of a linear layer's weight to W."""
    layers = [nn.Linear(6, 6) for _ in range(2)]
    schedule = lesson.build_schedule("zb-h1", 1, 2)
    pipe = lesson.Pipeline(layers, [2], nn.functional.mse_loss, schedule, torch.empty(3, 6, device="meta"))
    backward = pipe._backward

    def note(*action):
        before = [0 if layer.weight.grad is None else layer.weight.grad.clone() for layer in layers]
        with FlopCounterMode(display=False) as counter:
            backward(*action)
        for layer, grad in zip(layers, before):
            same = layer.weight.grad is None or torch.equal(layer.weight.grad, 0 * layer.weight + grad)
            assert same, "a weight has its gradient after B, which should be None until W"
        flops = counter.get_total_flops()
        assert flops <= 2 * 2 * 3 * 6 * 6, f"B computes {flops} FLOPs, which should be {2 * 2 * 3 * 6 * 6}"

    pipe._backward = note
    pipe.step(*torch.randn(2, 2, 3, 6))


# ---- data parallelism ----


def check_small_norms(lesson):
    """Gradients whose norm is below max_norm are left alone; zero gradients are no NaN."""
    for size in (0.3, 0.0):
        param = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        param.grad = torch.full_like(param, size / 2)
        norm = lesson.clip_grad_norm_([param, nn.Parameter(torch.zeros(2))], 1.0)
        times = param.grad.norm().item()
        assert abs(float(norm) - size) < 1e-9, f"the norm is {float(norm):.6g}, which should be {size}"
        assert abs(times - size) < 1e-9, (
            f"gradients of norm {size}, below max_norm 1, have norm {times:.6g} after clipping"
        )


def check_neighbours(lesson):
    """In a ring a rank sends to the next one alone, S/N bytes in each of N - 1 rounds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = Counter()
    exchange = lesson.exchange

    def note(given, to, received, source):
        peers[to % size] += 1
        exchange(given, to, received, source)

    lesson.exchange = note
    for all_of in lesson.ring_all_gather, lesson.ring_reduce_scatter:
        peers.clear()
        all_of(torch.ones(3 * size))
        others = [peer for peer in peers if peer != (rank + 1) % size]
        assert not others, f"rank {rank} sends to rank {others[0]}, which should be {(rank + 1) % size}"
        assert peers.total() <= size - 1, f"{peers.total()} rounds, which should be {size - 1}"


def check_meeting(lesson):
    """Calls for several devices run at the same time."""
    dp = lesson.DP(nn.Linear(2, 2), ["cpu"] * 3)
    barrier = threading.Barrier(3, timeout=3)
    try:
        found = dp.parallel_apply(lambda i: (barrier.wait(), i)[1], range(3))
    except threading.BrokenBarrierError:
        found = "one after another"
    assert found == [0, 1, 2], f"three devices' calls run, or come back, {found}, which should be at once"


def check_modes(lesson):
    """Who may go on in bsp, ssp and asp."""
    for mode, most in (("bsp", 0), ("ssp", 2), ("asp", math.inf)):
        server = SimpleNamespace(clocks=[5, 3, 4, 6], most_ahead=most)
        found = [bool(lesson.Server.may_go_on(server, worker)) for worker in range(4)]
        right = [clock - 3 <= most for clock in server.clocks]
        assert found == right, (
            f"{mode}, {most} ahead, of workers that have pushed 5, 3, 4 and 6 times: {found}, "
            f"which should be {right}"
        )


def check_buckets(lesson):
    """Buckets of these parameters, and their number."""
    params = [nn.Parameter(torch.zeros(size)) for size in (100, 30, 30, 30, 50, 10)]
    params[1:1] = [nn.Parameter(torch.zeros(10, dtype=torch.float64))]
    names = {param: i for i, param in enumerate(params)}
    for numbers, right in (60, [[6, 5], [4, 3], [2], [1], [0]]), (1e9, [[6, 5, 4, 3, 2], [1], [0]]):
        buckets = lesson.fill_buckets(params, numbers * 4 / 2**20)
        found = [[names[param] for param in bucket] for bucket in buckets]
        assert found == right, f"{len(found)} buckets of parameters {found}, which should be {right}"


class Sum(nn.Module):
    """Two layers; if turned, their gradients come in another order."""

    def __init__(self, turned=False):
        super().__init__()
        self.turned = turned
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        outputs = {}
        for i in (1, 0) if self.turned else (0, 1):
            outputs[i] = self.layers[i](x)
        return outputs[0] + outputs[1] ** 2


def averaged(lesson, module, **options):
    """({name: gradient} after a backward of DDP, what it should be)."""
    inputs = torch.randn(dist.get_world_size(), 2, 3, dtype=torch.float64)
    model = lesson.DDP(module, **options)
    model(inputs[dist.get_rank()]).square().sum().backward()
    found = [param.grad.clone() for param in module.parameters()]
    module.zero_grad()
    plain = Sum()
    plain.load_state_dict(module.state_dict())
    plain(inputs[dist.get_rank()]).square().sum().backward()
    expected = [param.grad for param in plain.parameters()]
    for grad in expected:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return found, expected


def check_mean(lesson):
    """After backward, and before clipping, each .grad is the ranks' mean."""
    found, expected = averaged(lesson, Sum())
    for own, right in zip(found, expected):
        ratio = (own.norm() / right.norm()).item()
        assert torch.allclose(own, right), f".grad is not the mean, but of {ratio:.3f} times its norm"


def check_order(lesson):
    """Buckets start in the same order on all ranks."""
    found, expected = averaged(lesson, Sum(turned=dist.get_rank() == 1), bucket_cap_mb=1e-9)
    for i, (own, right) in enumerate(zip(found, expected)):
        assert torch.allclose(own, right), f"layer {i}'s gradient is added to another layer's"


def check_agreement(lesson):
    """Ranks that have 1, 3 and 2 microbatches come to the same numbers."""
    rank = dist.get_rank()
    number = (1, 3, 2)[rank]
    targets = torch.tensor([[1, 2, 0, 0]])
    batches = [(targets, targets, targets)] * number
    n_tokens, n_microbatches = lesson.agree(batches, "cpu")
    assert int(n_tokens) == 12, f"{int(n_tokens)} tokens, which should be 12"
    found = int(n_microbatches), len(batches)
    assert found == (3, 3), f"{found[0]} microbatches, of which rank {rank} has {found[1]}: both should be 3"


def check_sums(lesson):
    """A second backward adds to what the first has left, also if both were said to be a step's last."""
    model = lesson.ZeRO1(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear)
    shards = list(model.parameters())
    inputs = torch.randn(2, 3)
    model(inputs).sum().backward()
    before = [shard.grad.clone() for shard in shards]
    model(inputs).sum().backward()
    for shard, once in zip(shards, before):
        times = (shard.grad.norm() / once.norm()).item()
        assert abs(times - 2) < 1e-5, f"two equal backwards leave {times:.3f} gradients, which should be 2"


def check_units(lesson):
    """What several units share is the root's, which comes first."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    module[2].weight = module[1].weight
    module[2].bias.requires_grad_(False)
    names = {param: name for name, param in module.named_parameters()}
    found = []
    for submodule, params in lesson.find_units(module, nn.Linear):
        found.append((type(submodule).__name__, sorted(names[param] for param in params)))
    right = [("Sequential", ["1.weight", "3.bias", "3.weight"])]
    right += [("Linear", ["0.bias", "0.weight"]), ("Linear", ["1.bias"])]
    assert found == right, f"units {found}, which should be {right}"


# ---- mathematics ----


def check_newton_schulz(lesson):
    for shape in ((108, 36), (36, 108)):
        with FlopCounterMode(display=False) as counter:
            lesson.newton_schulz(torch.randn(shape))
        own, right = counter.get_total_flops(), 5 * 2 * 36 * 36 * (2 * 108 + 36)
        assert own <= right, f"{own} FLOPs for a matrix of {shape}, which should be {right}"
    zero = lesson.newton_schulz(torch.zeros(3, 2))
    assert not zero.any(), f"a matrix of zeros becomes {zero[0, 0].item()}, which should be 0"


def check_large_logits(lesson):
    size = dist.get_world_size()
    logits = torch.randn(2, 3, 8 * size, dtype=torch.float64) * 1000
    targets = torch.randint(8 * size, (2, 3))
    own = logits.chunk(size, -1)[dist.get_rank()].contiguous().requires_grad_()
    found = lesson.parallel_cross_entropy(own, targets, 8 * size)
    right = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 3)
    assert torch.allclose(found, right), (
        f"logits near 1000: a loss is {found.flatten()[0].item():.6g}, not {right[0, 0].item():.6g}"
    )


def check_merge(lesson):
    for size in (1, 900):
        scores = torch.randn(2, 1, 3, 8, dtype=torch.float64) * size
        values = torch.randn(2, 1, 8, 4, dtype=torch.float64)
        out = torch.zeros(2, 1, 3, 4, dtype=torch.float64)
        lse = torch.full((2, 1, 3, 1), -math.inf, dtype=torch.float64)
        for part, value in zip(scores.split(3, -1), values.split(3, 2)):
            lesson.merge(out, lse, part.softmax(-1) @ value, part.logsumexp(-1, keepdim=True))
        wrong = (out - scores.softmax(-1) @ values).abs().max().item()
        assert wrong < 1e-9, f"scores near {size}: out is wrong by {wrong:.3g}"
        wrong = (lse - scores.logsumexp(-1, keepdim=True)).abs().max().item()
        assert wrong < 1e-9, f"scores near {size}: lse is wrong by {wrong:.3g}"


def check_dropout(lesson):
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    found = []
    for function in layer, partial(lesson.checkpoint, layer):
        torch.manual_seed(1)
        loss = function(x).square().sum()
        torch.rand(3)  # drawn between forward and backward
        (grad,) = torch.autograd.grad(loss, x)
        found.append((grad, torch.rand(())))
    (plain, after), (recomputed, then) = found
    assert torch.allclose(plain, recomputed), (
        f"with dropout a gradient is {(recomputed.norm() / plain.norm()).item():.3f} times as long"
    )
    assert after == then, "backward draws from the random numbers of what follows"


def check_tiles(lesson):
    """More tokens than a tile: the numbers, and the memory."""
    for s in (1, 128, 300):
        q, k, v = (torch.randn(1, 2, s, 8, dtype=torch.float64) * 3 for _ in range(3))
        later = torch.ones(s, s, dtype=torch.bool).triu(1)
        right = (q @ k.mT / math.sqrt(8)).masked_fill(later, -math.inf).softmax(-1) @ v
        wrong = (lesson.flash_attention(q, k, v) - right).abs().max().item()
        assert wrong < 1e-9, f"{s} tokens: the output is wrong by {wrong:.3g}"
    peaks = []
    for s in (1024, 2048):
        q, k, v = (torch.randn(1, 1, s, 64) for _ in range(3))
        with torch.no_grad(), Watch() as watch:
            before = sum(size for _, size in watch.events)
            lesson.flash_attention(q, k, v)
        peaks.append(watch.held()["all"] - before - 4 * (64 * s + s))
    assert peaks[1] <= 2.5 * peaks[0], (
        f"tiles take {peaks[0]} bytes of 1024 tokens and {peaks[1]} of 2048, which should be twice as many"
    )


def check_intersections(lesson):
    """Runs are cut to an interval, and counted from where it begins."""
    runs = [(0, 4), (4, 6), (9, 12)]
    cases = {(2, 5): [(0, 2), (2, 3)], (6, 9): [], (0, 20): runs, (11, 12): [(0, 1)]}
    for (low, high), right in cases.items():
        found = [tuple(part) for part in lesson.intersections(low, high, runs)]
        assert found == right, f"[{low}, {high}) and {runs}: {found}, which should be {right}"


POINTS = {  # {lesson: [(promise, ranks, check)]}
    "single": [("gradients below max_norm stay as they are", 1, check_small_norms)],
    "collectives": [("each rank sends to the next one of its ring", 4, check_neighbours)],
    "dp_threads": [("all devices compute at the same time", 1, check_meeting)],
    "dp_async": [("who waits in bsp, ssp and asp", 1, check_modes)],
    "ddp": [
        ("a bucket ends at its cap, and is of one dtype", 1, check_buckets),
        ("after backward, and before clipping, .grad is the ranks' mean", 2, check_mean),
        ("buckets start in one order on all ranks", 2, check_order),
    ],
    "uneven": [("ranks agree on tokens and microbatches", 3, check_agreement)],
    "zero1": [
        ("units: a shared parameter is the root's", 1, check_units),
        ("gradients of several backwards add up", 2, check_sums),
    ],
    "muon": [("the smaller of two squares; nothing from nothing", 1, check_newton_schulz)],
    "tensor_parallel": [("no exp() overflows", 2, check_large_logits)],
    "context_parallel": [("two softmaxes become one, without overflow", 1, check_merge)],
    "checkpointing": [("random numbers are those of the first time", 1, check_dropout)],
    "fusion": [("more tokens than a tile", 1, check_tiles)],
    "reshard": [("intervals that have nothing in common", 1, check_intersections)],
    "pipeline": [("an output that has been sent is freed", 2, check_outputs)],
    "zero_bubble": [("B leaves the weights' gradients to W", 1, check_later)],
}
SCHEDULES = {"pipeline": {}, "zero_bubble": {}, "pipeline_v": {}}  # {lesson: {promise: check}}
for lesson, names in zip(SCHEDULES, ("1f1b naive gpipe interleaved", "zb-h1 zb-h2", "zb-v")):
    for name in names.split():
        promise = f"{name}: microbatches in flight, and idle time"
        SCHEDULES[lesson][promise] = partial(check_schedule, name)

# {lesson: [(name, ranks, flags, by how much numbers may differ from the lesson's)]}
VARIANTS = {
    lesson: [("in bf16", 2, "--dtype bf16", 0.02)] for lesson in ("zero1", "zero2", "zero3", "resume")
}
VARIANTS["hsdp"] = [("in bf16", 4, "--dtype bf16", 0.02)]
VARIANTS["diloco"] = [("with a delay", 2, "--inner-steps 4 --delay 1 --steps 8", 1e-9)]
VARIANTS["reshard"] = [(f"--how {how}", 4, f"--how {how}", 1e-9) for how in ("rank0", "units")]
VARIANTS["context_parallel"] = [("documents", 2, "--documents --kind ring", 1e-9)]
