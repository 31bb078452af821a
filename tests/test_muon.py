"""What is special to muon.py: Newton-Schulz of whole, reduced matrices, once a step, by even owners."""

import copy
from collections import Counter
from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from tests.checks import EXACT, check_ledger, check_masters
from tests.fourth import check_failed, check_late
from tests.gpu import check_gpu, check_order
from tests.harness import Lesson, apart, holds, load, mutants, on_ranks, world
from tools.watch import noted

PLAIN = "muon"
FILM = "--layers 2"
LESSON = Lesson()


def plain_step(momenta, lr=1e-3):
    """Muon's formula, in the dtype of the matrices, the keys of momenta."""
    for matrix, momentum in momenta.items():
        momentum.copy_(0.95 * momentum + 0.05 * matrix.grad)
        x = 0.95 * momentum + 0.05 * matrix.grad
        x = x / max(x.norm().item(), 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        matrix.data = (1 - lr * 0.1) * matrix.data - lr * 0.2 * max(x.shape) ** 0.5 * x


ADAMW = torch.optim.AdamW


def both(torchs, params, lr, fused):
    """An optimizer of a plain GPT: torch's Muon or plain_step() for its matrices, AdamW for the rest."""
    tokens, positions, *others = params
    adamw = ADAMW([tokens, positions, *(p for p in others if p.dim() < 2)], lr=lr, fused=fused)
    momenta = {p: torch.zeros_like(p.data) for p in others if p.dim() == 2}
    theirs = torch.optim.Muon(momenta, lr, adjust_lr_fn="match_rms_adamw")
    adamw.register_step_post_hook(lambda *_: theirs.step() if torchs else plain_step(momenta, lr))
    return adamw


def run(name, flags, optimizer=None, bf16=False):
    """On a rank: losses, norms and weights of a lesson, with a cast to bf16, or with another optimizer."""
    lesson, noted = load(name), []
    lesson.print_step = lambda config, step, loss, norm, started: noted.extend([loss, norm])
    if bf16:
        lesson.newton_schulz = lambda matrix, original=lesson.newton_schulz: original(matrix.bfloat16())
    with (
        mock.patch("torch.optim.AdamW", optimizer or ADAMW),
        mock.patch.object(torch, "save", lambda state_dict, file: noted.extend(state_dict.values())),
    ):
        lesson.train(lesson.parse([*flags.split(), "--save", "/dev/null"]))
    return torch.cat([tensor.detach().double().flatten() for tensor in noted])


expected = cache(lambda flags, *how: world(1).run(run, "single", flags, partial(both, *how))[0])


def check(name, size=3, torchs=False, flags=f"{EXACT} --batch 72 --accum 3", tolerance=1e-12):
    """Losses, norms and weights are one process's; with torch's Muon in fp64 both cast to bf16."""
    numbers = world(size).run(run, name, flags, None, torchs and "fp64" in flags)[0]
    assert apart(numbers, expected(flags, torchs)) < tolerance, "numbers differ"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_training_is_that_of_one_process(size):
    check("muon", size, flags=f"{EXACT} --batch 24")
    check("muon", size)
    check("muon", size, True)


def check_costs(name):
    """Owners are even, and Newton-Schulz takes as many FLOPs as tools/formulas.py says."""
    lesson = load(name)
    matrices = lesson.find_matrices(lesson.GPT(lesson.parse(["--size", "small"])), lesson.Block)
    found = []
    for ranks in (2, 3, 4, 8):
        flops = Counter()
        for matrix, owner in lesson.assign_owners(matrices, ranks).items():
            p, q = sorted(matrix.shape)
            flops[owner] += 5 * 2 * p * p * (2 * q + p)
        found.append(max(flops.values()) * ranks / flops.total())
    assert found == pytest.approx((1, 1, 43 / 42, 46 / 42)), f"owners are less even: {found}"
    with FlopCounterMode(display=False) as counter:
        lesson.newton_schulz(torch.randn(108, 36))
    assert counter.get_total_flops() == 5 * 2 * 36 * 36 * (2 * 108 + 36), "other FLOPs"


@on_ranks(3)
def check_module(name):
    """A module that uses its layers' weights ends in those of the plain one; an evaluation sees a step."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, dropout=0, batch_first=True)
    plain = torch.nn.TransformerEncoder(layer, 3, torch.nn.LayerNorm(8), enable_nested_tensor=False).double()
    lesson, model = load(name), copy.deepcopy(plain)
    zero = lesson.ZeROMuon(model, torch.nn.TransformerEncoderLayer)
    momenta = {param: torch.zeros_like(param.data) for param in plain.parameters() if param.dim() == 2}
    root, *matrices = zero.shards
    steps = partial(plain_step, momenta), lesson.Muon(matrices, 1e-3).step
    rests = [param for param in plain.parameters() if param.dim() < 2], [root]
    for x in torch.randn(3, 6, 5, 8, dtype=torch.float64):
        for each, step, rest, own in zip((plain, zero), steps, rests, (x, x.chunk(3)[dist.get_rank()])):
            for each.is_last_backward in False, False, True:
                (each(own) ** 3).mean().backward()
            with torch.no_grad():
                step()
                torch.optim.SGD(rest, lr=0.1).step()
                evaluated = each(own)
            plain.zero_grad()
            assert torch.equal(evaluated, each(own)), "evaluated before the step"
    assert apart(zero.full_state_dict(), plain.state_dict()) < 1e-12, "weights differ"


TIMELINE = """send 0 send 1 send 2 send 3 wait 1 wait 0 forward 1 wait 2 forward 2 wait 3 forward 3 forward 4
    backward 4 backward 3 reduce 3 backward 2 reduce 2 backward 1 reduce 1 reduce 0
    finish 0 finish 1 finish 2 finish 3"""  # 0 is the root, 1 the matrix of layers 1 and 4
WORDS = {
    "start_broadcast": "send",
    "wait_broadcast": "wait",
    "start_reduce": "reduce",
    "finish_reduce": "finish",
}


@on_ranks(2)
def check_timeline(name):
    """What computes and what starts and ends on the network, in order."""
    log, lesson = [], load(name)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    model[3].weight = model[0].weight
    for i, layer in enumerate(model, 1):
        layer.register_forward_pre_hook(lambda *_, i=i: log.append(f"forward {i}"))
        layer.register_full_backward_pre_hook(lambda *_, i=i: log.append(f"backward {i}"))
    for name, word in WORDS.items():  # two ranks, so units 0 and 1 are the root's
        note = lambda unit, *_, word=word: log.append(f"{word} {max(1, zero.units.index(unit)) - 1}")  # noqa
        setattr(lesson.Unit, name, noted(getattr(lesson.Unit, name), note))
    zero = lesson.ZeROMuon(model, torch.nn.Linear)
    zero(torch.randn(2, 4)).sum().backward()
    assert " ".join(dict.fromkeys(log)) == " ".join(TIMELINE.split()), f"another order: {', '.join(log)}"


# In fp32 to the bit, on one rank: bf16 makes 1e-4 of what N ranks add up in another order.
check_fp32 = partial(check, size=1, torchs=True, flags="--steps 3 --clip inf", tolerance=1e-7)
CHECKS = [check_fp32, check_costs, check_timeline, check_module]
CHECKS += [check_failed, check_late]
test_each_promise_is_kept = holds("muon", *CHECKS)
MUTANTS = [
    ("= self.grad.to(", "= (newton_schulz(self.grad) if self.grad.dim() == 2 else self.grad).to(", check,
     "numbers differ"),
    ("/ dist.get_world_size()", "/ 1", check, "numbers differ"),
    ("        muon.step()\n", "        muon.step()\n        muon.step()\n", check, "numbers differ"),
    ("newton_schulz(X.mT).mT", "newton_schulz(X.mT).reshape(X.shape)", check, "numbers differ"),
    ("if X.shape[0] > X.shape[1]", "if False", check_costs, "other FLOPs"),
    ("0.2 * max(matrix.shape)", "0.2 * min(matrix.shape)", check, "numbers differ"),
    ("dist.broadcast(self.param, ", "dist.broadcast(self.param.clone(), ", check, "numbers differ"),
    ("([root], lr=", "(model.shards, lr=", check_ledger, "optimizer: +"),
    ("matrix.grad.lerp(momentum, beta)", "momentum", check, "numbers differ"),
    ("1 - lr * weight_decay", "1", check, "numbers differ"),
    ("else update.bfloat16()", "else update", check_fp32, "numbers differ"),
    ("reverse=True", "reverse=False", check_costs, "less even"),
    ("if self.is_last_backward and param", "if param", check_ledger, "reduce: sent +"),
    ("if not self.accumulating:", "if True:", check_ledger, "broadcast: sent +"),
    ("self.accumulating = not self.is_last_backward", "self.accumulating = True", check, "numbers differ"),
    ("param.dtype, torch.float32", "param.dtype, param.dtype", check_masters, "moved by"),
    ("unit.param.copy_(unit.shard.data)", "pass", check_masters, "moved by"),
    ("        self.grad.zero_()\n", "", check_module, "weights differ"),
    ("module if param in users else submodule", "submodule", check_timeline, "another order"),
    ("self.matrix_units[param].start_reduce()", "self.root_units.append(self.matrix_units[param])",
     check_timeline, "another order"),
    ("        if self.n_waiting:\n", "        if False:\n", check_failed, "goes on after"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "muon")
GPU_MUTANTS = [
    ("muon", "self.broadcast_work.wait()", "pass", check_gpu, "uses what a collective still"),
    ("muon", "unit.reduce_work.wait()", "pass", check_gpu, "uses what a collective still"),
    (
        "muon",
        "broadcast(self.param, self.owner",
        "broadcast(self.param, dist.get_rank()",
        check_order,
        "ranks do not meet",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
