"""What is special to muon.py: Newton-Schulz of entire, reduced matrices, on one rank each, once a step."""

from collections import Counter
from functools import cache, partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

from tests.checks import EXACT, check_ledger, check_masters, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import Lesson, apart, error_of, holds, load, mutants, on_ranks, world
from tools.watch import noted

PLAIN = "muon"
NAIVE = "--naive"
FILM = "--layers 2"
LESSON = Lesson(variants=("--naive",))
ADAMW = torch.optim.AdamW


def both(params, lr, fused):
    """single.py's optimizer, with torch's Muon for the blocks' matrices, and AdamW for the rest."""
    tokens, positions, *others = params
    adamw = ADAMW([tokens, positions, *(p for p in others if p.dim() < 2)], lr=lr, fused=fused)
    matrices = [p for p in others if p.dim() == 2]
    muon = torch.optim.Muon(matrices, lr, adjust_lr_fn="match_rms_adamw")
    adamw.register_step_post_hook(lambda *_: muon.step())
    return adamw


def run(name, flags, optimizer=ADAMW):
    """On a rank: losses, norms and weights of a lesson, in fp64 with Newton-Schulz in bf16, as torch's."""
    lesson, seen = load(name), []
    lesson.print_step = lambda config, step, loss, norm, started: seen.extend([loss, norm])
    if hasattr(lesson, "newton_schulz") and "fp64" in flags:
        lesson.newton_schulz = lambda matrix, original=lesson.newton_schulz: original(matrix.bfloat16())
    save = mock.patch.object(torch, "save", lambda state_dict, file: seen.extend(state_dict.values()))
    with save, mock.patch("torch.optim.AdamW", optimizer):
        lesson.train(lesson.parse([*flags.split(), "--save", "/dev/null"]))
    return torch.cat([tensor.detach().double().flatten() for tensor in seen])


expected = cache(lambda flags: world(1).run(run, "single", flags, both)[0])


def check(name, size=3, flags=f"{EXACT} --accum 3", tolerance=1e-12):
    """Losses, norms and weights are one process's, with torch's Muon."""
    assert apart(world(size).run(run, name, flags)[0], expected(flags)) < tolerance, "numbers differ"


# In fp32 to the bit, on one rank: bf16 makes 1e-4 of what N ranks add up in another order.
check_fp32 = partial(check, size=1, flags="--steps 3 --clip inf", tolerance=1e-7)
test_training_is_that_of_torchs_muon_in_one_process = holds("muon", check, partial(check, size=1), check_fp32)


def check_costs(name):
    """Owners are even. Newton-Schulz costs what training on 4h tokens does."""
    lesson = load(name)
    params = list(lesson.GPT(lesson.parse(["--size", "small"])).parameters())
    found = []
    for ranks in (2, 3, 4, 8):
        owned = Counter()
        for param, owner in lesson.assign_owners(params, ranks).items():
            owned[owner] += param.numel()
        found.append(max(owned.values()) * ranks / owned.total())
    assert max(found) < 1.09, f"owners are less even: {found}"
    shapes = [(108, 36), (36, 36), (144, 36), (36, 144)]
    with FlopCounterMode(display=False) as counter:
        for shape in shapes:
            lesson.newton_schulz(torch.randn(shape))
    flops = sum(5 * 2 * min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes)
    assert counter.get_total_flops() == flops, "other FLOPs"
    assert round(flops / (6 * 12 * 36**2) / 36, 1) == 3.9, "another number of tokens"


TIMELINE = """backward 3 backward 2 backward 1 backward 3 reduce 3 backward 2 reduce 2 backward 1 reduce 1
    update broadcast 3 broadcast 2 broadcast 1"""


@on_ranks(2)
def check_timeline(name):
    """A gradient travels while backward computes the next one, in a step's last backward alone."""
    log, model = [], nn.Sequential(*(nn.Linear(i, i + 1, bias=False) for i in (1, 2, 3)))
    owners = load(name).Owners(list(model.parameters()))
    for i, layer in enumerate(model, 1):
        layer.register_full_backward_pre_hook(lambda *_, i=i: log.append(f"backward {i}"))
    calls = {}
    for word in "reduce", "broadcast":
        note = lambda tensor, *_, word=word, **__: log.append(f"{word} {tensor.shape[1]}")  # noqa: E731
        calls[word] = noted(getattr(dist, word), note)
    with mock.patch.multiple(dist, **calls):
        for owners.is_last_backward in False, True:
            model(torch.ones(2, 1)).sum().backward()
        owners.finish_reduces()
        log.append("update")
        owners.broadcast_all()
    assert " ".join(log) == " ".join(TIMELINE.split()), f"another order: {', '.join(log)}"
    own = [i for i, layer in enumerate(model, 1) if layer.weight.grad is not None]
    assert own == ([1, 2] if dist.get_rank() else [3]), f"gradients are left of {own}"


@on_ranks(2)
def check_unreached(name):
    """A parameter that backward does not reach is an error, and no silent difference between ranks."""
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    owners = load(name).Owners(list(layers.parameters()))
    layers[0](torch.ones(2)).sum().backward()
    assert "backward has not reached" in error_of(owners.finish_reduces), "passes in silence"


test_each_promise_is_kept = holds("muon", check_costs, check_timeline, check_unreached)
naive = partial(check_parity, own_flags="--naive")
MUTANTS = [
    ("newton_schulz(X.mT).mT", "newton_schulz(X.mT).reshape(X.shape)", check, "numbers differ"),
    ("if X.shape[0] > X.shape[1]", "if False", check_costs, "other FLOPs"),
    ("0.2 * max(matrix.shape)", "0.2 * min(matrix.shape)", check, "numbers differ"),
    ("matrix.grad.lerp(momentum, beta)", "momentum", check, "numbers differ"),
    ("1 - lr * weight_decay", "1", check, "numbers differ"),
    ("else update.bfloat16()", "else update", check_fp32, "numbers differ"),
    ("{param for param in model.blocks.p", "{param for param in model.p", check, "numbers differ"),
    ("both if param not in matrices]", "both]", check_ledger, "optimizer: +"),
    ("reverse=True", "reverse=False", check_costs, "less even"),
    ("owned.index(min(owned))", "len(owners) % world_size", check_costs, "less even"),
    ("        if self.is_last_backward:", "        if True:", check_timeline, "another order"),
    ("= i == config.accum and", "= i == 1 and", check_parity, "differ"),
    ("dist.reduce(param.grad, ", "dist.reduce(param.grad.clone(), ", check_parity, "differ"),
    ("dist.broadcast(param.detach(), ", "dist.broadcast(param.detach().clone(), ", check_parity, "differ"),
    ("                param.grad = None", "                pass", check_parity, "differ"),
    ("len(self.reducing) == len(self.owners), ", "True, ", check_unreached, "in silence"),
    ("        dist.all_reduce(param.grad)", "        pass", naive, "differ"),
    ("own = params if config.naive else owners.own", "own = owners.own", naive, "differ"),
    ("            dist.all_reduce(squares)", "            pass", check_parity, "differ"),
    ("/ (config.accum * world_size)", "/ config.accum", check_parity, "losses differ"),
    ("        dist.all_reduce(total_loss)", "        pass", check_parity, "losses differ"),
    ("        self.muon.zero_grad()\n", "", check_ledger, "gradients: +"),
    ("detach().to(wide(param.dtype))", "detach()", check_masters, "moved by"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "muon")
GPU_MUTANTS = [
    ("            self.reducing.pop(param).wait()", "            self.reducing.pop(param)", check_gpu,
     "what a collective still"),
    ("            work.wait()", "            pass", check_gpu, "what a collective still"),
    ("config.clip, norm)", "config.clip, norm + 0 * norm.item())", check_gpu, "the host waits"),
    ("param.detach(), owner", "param.detach(), dist.get_rank()", check_order, "ranks do not meet"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "muon")
