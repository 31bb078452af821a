"""What is special to muon.py: Newton-Schulz on whole, reduced matrices, once a step, by owners that are even."""

import copy
import functools
import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from test_all import EXACT, check_ledger, check_parity
from tests.harness import apart, error_of, holds, load, mutants, on_ranks, world
from tests.test_plan import docstring_of


class PlainMuon:
    """torch.optim.Muon's formula, in the matrices' dtype."""

    def __init__(self, matrices, lr=1e-3, adjust_lr_fn="original"):
        self.momenta = {matrix: torch.zeros_like(matrix) for matrix in matrices}
        self.lr, self.original = lr, adjust_lr_fn == "original"

    @torch.no_grad()
    def step(self):
        for matrix, momentum in self.momenta.items():
            momentum.copy_(0.95 * momentum + 0.05 * matrix.grad)
            x = 0.95 * momentum + 0.05 * matrix.grad
            x = x / max(x.norm().item(), 1e-7)
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            rows, columns = matrix.shape
            scale = max(1, rows / columns) ** 0.5 if self.original else 0.2 * max(rows, columns) ** 0.5
            matrix.copy_((1 - self.lr * 0.1) * matrix - self.lr * scale * x)


def both(muon, adjust, params, lr, fused):
    """An optimizer of a plain GPT: this Muon for its matrices, AdamW for the rest."""
    tokens, positions, *others = params
    adamw = torch.optim.AdamW([tokens, positions, *(p for p in others if p.dim() < 2)], lr=lr, fused=fused)
    muon = muon([p for p in others if p.dim() == 2], lr=lr, adjust_lr_fn=adjust)
    adamw.register_step_post_hook(lambda *_: muon.step())
    return adamw


def run(name, flags, muon=None, adjust=None, bf16=False):
    """On a rank: (losses and norms, weights) of a lesson, with its cast to bf16, or of single.py with a Muon."""
    lesson, noted, saved = load(name), [], {}
    lesson.print_step = lambda config, step, loss, norm, started: noted.extend([loss.item(), norm.item()])
    if bf16:
        newton_schulz = lesson.newton_schulz
        lesson.newton_schulz = lambda matrix: newton_schulz(matrix.bfloat16())
    if muon:
        lesson.OPTIMIZERS = {"adamw": partial(both, muon, adjust)}
    with mock.patch.object(torch, "save", lambda state_dict, file: saved.update(state_dict)):
        lesson.train(lesson.parse([*flags.split(), "--save", "/dev/null"]))
    return noted, {key: weight.clone() for key, weight in saved.items()}


expected = functools.cache(lambda *arguments: world(1).run(run, "single", *arguments)[0])


def check(name, size=3, flags=f"{EXACT} --batch 72 --accum 3", own="", muon=PlainMuon, tolerance=1e-12):
    """Losses, norms and weights are one process's with this Muon; in fp64 with torch's both cast to bf16."""
    adjust = "original" if "original" in own else "match_rms_adamw"
    bf16 = "fp64" in flags and muon is torch.optim.Muon
    noted, weights = world(size).run(run, name, f"{flags} {own}", None, None, bf16)[0]
    plain, plain_weights = expected(flags, muon, adjust)
    assert apart(noted, plain) < tolerance and apart(weights, plain_weights) < tolerance, "numbers differ"


ORIGINAL = "--adjust-lr-fn original"
OWN = ("", "--gather", ORIGINAL, f"{ORIGINAL} --gather")


@pytest.mark.parametrize(
    "size, own", [*itertools.product((1, 3), OWN), *itertools.product((2, 4, 8), OWN[:2])]
)
def test_training_is_that_of_one_process(size, own):
    for accum in 1, 3:
        check("muon", size, f"{EXACT} --batch 72 --accum {accum}", own)
    check("muon", size, own=own, muon=torch.optim.Muon)


# In fp32 to the bit, on one rank: bf16 makes 1e-4 of what N ranks add up in another order.
check_fp32 = partial(check, size=1, flags="--steps 3 --clip inf", muon=torch.optim.Muon, tolerance=1e-7)


def check_newton_schulz(name):
    """It takes the docstring's FLOPs, and is torch's to the bit in bf16."""
    lesson = load(name)
    for shape in (36, 108), (108, 36), (36, 36):
        matrix = torch.randn(shape)
        with FlopCounterMode(display=False) as counter:
            ours = lesson.newton_schulz(matrix.bfloat16())
        assert counter.get_total_flops() == lesson.flops_of(matrix), "other FLOPs"
        theirs = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        assert torch.equal(ours, theirs), "not torch's"


def check_costs(name):
    """Owners are even; --gather sends (1, 1.25] of zero1.py's bytes (2502.16982); half of AdamW's states."""
    lesson, sent = load(name), []
    for size, most in {
        "toy": (1, 1.0045, 1, 1),
        "small": (1, 1, 1.0238, 1.0952),
        "gpt2-xl": (1, 1, 1, 1),
    }.items():
        with torch.device("meta"):
            matrices = lesson.find_matrices(lesson.GPT(lesson.parse(["--size", size])), lesson.Block)
        found = [lesson.assign_owners(matrices, ranks)[1] for ranks in (2, 3, 4, 8)]
        assert found == pytest.approx(most, abs=1e-4), f"owners are less even: {size} {found}"
    for lesson, flags in ("zero1", ""), (name, ""), (name, "--gather"):
        letters, values = docstring_of(lesson, flags)
        sent.append(
            sum(values.values()) - sum(values[key] for key in ("parameters", "gradients", "optimizer"))
        )
    assert sent[1] == sent[0] and 1 < sent[2] / sent[0] <= 1.25, f"other bytes: {sent}"
    assert values["optimizer"] == (8 * letters["P"] - 4 * letters["H"]) / 4, "not half"


@on_ranks(3)
def check_module(name, gather=False):
    """Any module ends in the weights of the plain one, which has all batches; an evaluation sees a step."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0, batch_first=True
    )  # uses its matrices from outside
    plain = nn.TransformerEncoder(layer, 3, nn.LayerNorm(8), enable_nested_tensor=False).double()
    plain.layers[1].linear2.weight.requires_grad_(False)
    lesson, model = load(name), copy.deepcopy(plain)
    for tensor in model.state_dict().values():
        tensor.add_(dist.get_rank())  # all ranks must start with rank 0's
    zero = lesson.ZeROMuon(model, nn.TransformerEncoderLayer, gather)
    params = [param for param in plain.parameters() if param.requires_grad]
    muons = PlainMuon([p for p in params if p.dim() == 2]), lesson.Muon(zero.units[1:])
    rests = [p for p in params if p.dim() < 2], [zero.units[0].shard]
    for x in torch.randn(3, 6, 5, 8, dtype=torch.float64):
        for each, muon, rest, own in zip((plain, zero), muons, rests, (x, x.chunk(3)[dist.get_rank()])):
            for each.syncing in False, True, True:
                (each(own) ** 3).mean().backward()
            muon.step()
            torch.optim.SGD(rest, lr=0.1).step()
            with torch.no_grad():
                evaluated = each(own)
            each.zero_grad()
            assert torch.equal(evaluated, each(own)), "evaluated before the step"
    assert apart(zero.full_state_dict(), plain.state_dict()) < 1e-12, "weights differ"
    zero(own).sum().backward()
    loss = zero(own).sum()
    zero.zero_grad()
    assert "zero_grad() after" in error_of(loss.backward), "old weights are taken"


TIMELINE = """unshard 0 unshard 1 unshard 2 unshard 3 wait 1 wait 0 forward 1 wait 2 forward 2 wait 3 forward 3 forward 4
    backward 4 backward 3 start 3 backward 2 start 2 backward 1 start 1 finish 0 start 0 finish 3 finish 2 finish 1"""


@on_ranks(2)
def check_timeline(name):
    """What computes and what starts and ends on the network, in order: 0 is the rest, 1 in layers 1 and 4."""
    log, lesson = [], load(name)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[3].weight = model[0].weight
    for i, layer in enumerate(model, 1):
        layer.register_forward_pre_hook(lambda *_, i=i: log.append(f"forward {i}"))
        layer.register_full_backward_pre_hook(lambda *_, i=i: log.append(f"backward {i}"))
    for method in "unshard", "wait_for_unshard", "start_reduce", "finish_reduce":

        def call(unit, *args, word=method.split("_")[0], method=getattr(lesson.Unit, method)):
            log.append(f"{word} {zero.units.index(unit)}")
            method(unit, *args)

        setattr(lesson.Unit, method, call)
    zero = lesson.ZeROMuon(model, nn.Linear)
    zero(torch.randn(2, 4)).sum().backward()
    assert " ".join(dict.fromkeys(log)) == " ".join(TIMELINE.split()), f"another order: {', '.join(log)}"


CHECKS = [check_fp32, check_newton_schulz, check_costs, check_timeline, check_module]
test_each_promise_is_kept = holds("muon", *CHECKS, partial(check_module, gather=True))
check_original = partial(check, own=ORIGINAL)
check_bf16 = partial(check_ledger, flags="--dtype bf16")
SEND = "self.all_gather_works = self.start(dist.broadcast, self.flat_param)"
REDUCE, BACK = "self.reduce_works = self.start(", "loss += microloss.detach()"
EARLY = (
    "[v.copy_(newton_schulz(v)) for v in self.grad_views.values() if v.dim() == 2 and self.owner is not None]"
)
MUTANTS = [
    (REDUCE, f"{EARLY}\n        {REDUCE}", check, "numbers differ"),
    (BACK, f"{BACK}; muon.step()", check, "numbers differ"),
    ("newton_schulz(matrix.T).T", "newton_schulz(matrix.T)", check, "numbers differ"),
    ("if matrix.shape[0] > matrix.shape[1]", "if False", check_newton_schulz, "other FLOPs"),
    ("max(1, rows / columns)", "max(1, columns / rows)", check_original, "numbers differ"),
    ("0.2 * max(", "0.2 * min(", check, "numbers differ"),
    (SEND, "pass", check, "numbers differ"),
    ("([rest.shard], lr", "(model.shards, lr", check_ledger, "optimizer: +"),
    ('shard.grad.lerp(momentum, group["momentum"])', "momentum", check, "numbers differ"),
    ('1 - group["lr"] * group["weight_decay"]', "1", check, "numbers differ"),
    ("else update.bfloat16()", "else update", check_fp32, "numbers differ"),
    ("reverse=True", "reverse=False", check_costs, "less even"),
    ("if self.zero.syncing:", "if True:", check_ledger, "reduce: sent +"),
    ("1 / self.world_size", "1", check_parity, "differ"),
    ("dist.all_reduce(squares)", "pass", check_parity, "differ"),
    ("part.dtype, torch.float32", "part.dtype, part.dtype", check_bf16, "parameters: -"),
    ("dist.broadcast(tensor, 0)", "pass", check_module, "weights differ"),
    ("self.flat_grad.zero_()\n\n", "pass\n\n", check_module, "weights differ"),
    (
        "self.shard.grad is None or not torch.is_grad_enabled()",
        "self.shard.grad is None",
        check_module,
        "before",
    ),
    ("if not self.fresh:", "if False:", check_module, "old weights"),
    ("module if param in homes else submodule", "submodule", check_timeline, "another order"),
    ("if len(self.weights) == 1:", "if False:", check_timeline, "another order"),
]
test_a_mutant_is_rejected = mutants(MUTANTS, "muon")
