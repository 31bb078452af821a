"""What is special to muon.py: Newton-Schulz of whole, reduced matrices, once a step, by even owners."""

import copy
from functools import cache, partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from test_all import EXACT, check_ledger, check_masters
from tests.harness import apart, error_of, holds, load, mutants, on_ranks, world
from tools.watch import noted


def plain_step(momenta, lr=1e-3, adjust_lr_fn="original"):
    """Muon's formula, in the dtype of the matrices, the keys of momenta."""
    for matrix, momentum in momenta.items():
        momentum.copy_(0.95 * momentum + 0.05 * matrix.grad)
        x = 0.95 * momentum + 0.05 * matrix.grad
        x = x / max(x.norm().item(), 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        scale = {"match_rms_adamw": 0.04 * max(x.shape), "original": max(1, x.shape[0] / x.shape[1])}
        matrix.data = (1 - lr * 0.1) * matrix.data - lr * scale[adjust_lr_fn] ** 0.5 * x


def both(torchs, adjust, params, lr, fused):
    """An optimizer of a plain GPT: torch's Muon or plain_step() for its matrices, AdamW for the rest."""
    tokens, positions, *others = params
    adamw = torch.optim.AdamW([tokens, positions, *(p for p in others if p.dim() < 2)], lr=lr, fused=fused)
    momenta = {p: torch.zeros_like(p.data) for p in others if p.dim() == 2}
    theirs = torch.optim.Muon(momenta, lr, adjust_lr_fn=adjust)
    adamw.register_step_post_hook(lambda *_: theirs.step() if torchs else plain_step(momenta, lr, adjust))
    return adamw


def run(name, flags, optimizer=None, bf16=False):
    """On a rank: losses, norms and weights of a lesson, with a cast to bf16, or with another optimizer."""
    lesson, noted = load(name), []
    lesson.print_step = lambda config, step, loss, norm, started: noted.extend([loss, norm])
    if bf16:
        lesson.newton_schulz = lambda matrix, original=lesson.newton_schulz: original(matrix.bfloat16())
    lesson.OPTIMIZERS = {"adamw": optimizer or torch.optim.AdamW}
    with mock.patch.object(torch, "save", lambda state_dict, file: noted.extend(state_dict.values())):
        lesson.train(lesson.parse([*flags.split(), "--save", "/dev/null"]))
    return torch.cat([tensor.detach().double().flatten() for tensor in noted])


expected = cache(lambda flags, *how: world(1).run(run, "single", flags, partial(both, *how))[0])


def check(name, size=3, own="", torchs=False, flags=f"{EXACT} --batch 72 --accum 3", tolerance=1e-12):
    """Losses, norms and weights are one process's; with torch's Muon in fp64 both cast to bf16."""
    numbers = world(size).run(run, name, f"{flags} {own}", None, torchs and "fp64" in flags)[0]
    adjust = "original" if "original" in own else "match_rms_adamw"
    assert apart(numbers, expected(flags, torchs, adjust)) < tolerance, "numbers differ"


WAYS = ["", "--gather", "--gather --adjust-lr-fn original"]


@pytest.mark.parametrize("size, own", [*product([1, 2, 3, 4], WAYS), (8, "")])
def test_training_is_that_of_one_process(size, own):
    check("muon", size, own, flags=f"{EXACT} --batch 24")
    check("muon", size, own)
    check("muon", size, own, True)


def check_costs(name):
    """Owners are even, and Newton-Schulz takes the docstring's FLOPs."""
    lesson = load(name)
    matrices = lesson.find_matrices(lesson.GPT(lesson.parse(["--size", "small"])), lesson.Block)
    found = [lesson.assign_owners(matrices, ranks)[1] for ranks in (2, 3, 4, 8)]
    assert found == pytest.approx((1, 1, 43 / 42, 46 / 42)), f"owners are less even: {found}"
    with FlopCounterMode(display=False) as counter:
        lesson.newton_schulz(torch.randn(108, 36))
    assert counter.get_total_flops() == 5 * 2 * 36 * 36 * (2 * 108 + 36), "other FLOPs"


@on_ranks(3)
def check_module(name, gather=False):
    """A module that uses its layers' weights ends in those of the plain one; an evaluation sees a step."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, dropout=0, batch_first=True)
    plain = torch.nn.TransformerEncoder(layer, 3, torch.nn.LayerNorm(8), enable_nested_tensor=False).double()
    lesson, model = load(name), copy.deepcopy(plain)
    for tensor in model.state_dict().values():
        tensor.add_(dist.get_rank())  # all ranks must start with rank 0's
    zero = lesson.ZeROMuon(model, torch.nn.TransformerEncoderLayer, gather)
    momenta = {param: torch.zeros_like(param.data) for param in plain.parameters() if param.dim() == 2}
    steps = partial(plain_step, momenta), lesson.Muon(zero.units[1:]).step
    rests = [param for param in plain.parameters() if param.dim() < 2], [zero.units[0].shard]
    for x in torch.randn(3, 6, 5, 8, dtype=torch.float64):
        for each, step, rest, own in zip((plain, zero), steps, rests, (x, x.chunk(3)[dist.get_rank()])):
            for each.syncing in False, True, True:
                (each(own) ** 3).mean().backward()
            with torch.no_grad():
                step()
                torch.optim.SGD(rest, lr=0.1).step()
                evaluated = each(own)
            each.zero_grad()
            assert torch.equal(evaluated, each(own)), "evaluated before the step"
    assert apart(zero.full_state_dict(), plain.state_dict()) < 1e-12, "weights differ"
    zero(own).sum().backward()
    loss = zero(own).sum()
    zero.zero_grad()
    assert "zero_grad() after" in error_of(loss.backward), "old weights are taken"


TIMELINE = """unshard 0 unshard 1 unshard 2 unshard 3 wait 1 wait 0 forward 1 wait 2 forward 2 wait 3
    forward 3 forward 4 backward 4 backward 3 start 3 backward 2 start 2 backward 1 start 1 finish 0 start 0
    finish 3 finish 2 finish 1"""  # 0 is the rest, 1 the matrix of layers 1 and 4


@on_ranks(2)
def check_timeline(name):
    """What computes and what starts and ends on the network, in order."""
    log, lesson = [], load(name)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    model[3].weight = model[0].weight
    for i, layer in enumerate(model, 1):
        layer.register_forward_pre_hook(lambda *_, i=i: log.append(f"forward {i}"))
        layer.register_full_backward_pre_hook(lambda *_, i=i: log.append(f"backward {i}"))
    for name in "unshard", "wait_for_unshard", "start_reduce", "finish_reduce":
        note = lambda unit, *_, word=name.split("_")[0]: log.append(f"{word} {zero.units.index(unit)}")  # noqa
        setattr(lesson.Unit, name, noted(getattr(lesson.Unit, name), note))
    zero = lesson.ZeROMuon(model, torch.nn.Linear)
    zero(torch.randn(2, 4)).sum().backward()
    assert " ".join(dict.fromkeys(log)) == " ".join(TIMELINE.split()), f"another order: {', '.join(log)}"


# In fp32 to the bit, on one rank: bf16 makes 1e-4 of what N ranks add up in another order.
check_fp32 = partial(check, size=1, torchs=True, flags="--steps 3 --clip inf", tolerance=1e-7)
CHECKS = [check_fp32, check_costs, check_timeline, check_module]
test_each_promise_is_kept = holds("muon", *CHECKS, partial(check_module, gather=True))
check_original = partial(check, own="--adjust-lr-fn original")
MUTANTS = [
    ("add_(weight.grad", "add_(newton_schulz(weight.grad) if self.owner else weight.grad", check, "numbers"),
    ("loss += microloss.detach()", "loss += microloss.detach(); muon.step()", check, "numbers differ"),
    ("newton_schulz(matrix.T).T", "newton_schulz(matrix.T)", check, "numbers differ"),
    ("if matrix.shape[0] > matrix.shape[1]", "if False", check_costs, "other FLOPs"),
    ("max(1, rows / columns)", "max(1, columns / rows)", check_original, "numbers differ"),
    ("self.all_gather_works = self.start(dist.broadcast, self.flat_param)", "pass", check, "numbers differ"),
    ("([rest.shard], lr", "(model.parameters(), lr", check_ledger, "optimizer: +"),
    ('shard.grad.lerp(momentum, group["momentum"])', "momentum", check, "numbers differ"),
    ('1 - group["lr"] * group["weight_decay"]', "1", check, "numbers differ"),
    ("else update.bfloat16()", "else update", check_fp32, "numbers differ"),
    ("reverse=True", "reverse=False", check_costs, "less even"),
    ("if self.zero.syncing:", "if True:", check_ledger, "reduce: sent +"),
    ("part.dtype, torch.float32", "part.dtype, part.dtype", check_masters, "moved by"),
    ("self.part_of(self.flat_param).copy_(self.shard.data)", "pass", check_masters, "moved by"),
    ("dist.broadcast(tensor, 0)", "pass", check_module, "weights differ"),
    (" or not torch.is_grad_enabled()", "", check_module, "evaluated before"),
    ("if not self.fresh:", "if False:", check_module, "old weights"),
    ("module if param in homes else submodule", "submodule", check_timeline, "another order"),
    ("if len(self.weights) == 1:", "if False:", check_timeline, "another order"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "muon")
