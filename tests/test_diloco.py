"""What is special to diloco.py: N ranks are N replicas trained one after the other, whenever they speak."""

import copy
from functools import cache, partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.checks import EXACT, check_ledger
from tests.gpu import check_gpu
from tests.harness import Lesson, apart, error_of, holds, load, mutants, on_ranks, train, world
from tools.watch import noted

RUN = "torchrun LESSON --inner-steps 1 --outer-lr 1 --outer-momentum 0 --optim sgd --clip inf"
PLAIN = "diloco --inner-steps 1 --outer-lr 1 --outer-momentum 0 --optim sgd --clip inf"
FILM = "--inner-steps 2 --steps 4"
NORMS = "each rank's own"
LEARN = "torchrun LESSON --inner-steps 4 --fragments 2 --delay 1 --steps 8"
NO_INT = "0 -1 1.5 x 1000000000000 99999999999999999999999"
LESSON = Lesson(
    flags="--optim sgd --clip inf",
    own={
        "--inner-steps": ("1", NO_INT),
        "--outer-lr": ("1", "nan -1 x"),
        "--outer-momentum": ("0", "nan -1 2 x"),
        "--fragments": ("1", "0 -1 2 x"),
        "--delay": ("0", "-1 1 x"),
    },
    bad=("--fragments 2",),
    norms=False,  # they are the ranks' own
    gpu=("--inner-steps 4 --steps 8 --fragments 2 --delay 1",),
    waits={
        "": {("copy", "train()"): 1, ("item", "print_step()"): 0},
        "--delay": {("copy", "microbatches()"): 4},
    },
)


FLAGS = f"{EXACT} --optim adamw --batch 72 --accum 3 --steps 10 --lr 0.002"
LOCAL = "--inner-steps 4 --outer-lr 0.7 --outer-momentum 0.9"
AVERAGE = "--outer-lr 1 --outer-momentum 0"
STREAMING = f"{LOCAL} --fragments 2 --delay 1"


def plain(size, flags):
    """N replicas in one process: the losses of its lines, and the mean of the replicas' weights."""
    lesson = load("diloco")
    config = lesson.parse(flags.split())
    device, text = lesson.set_up(config, replicas=size)
    replicas = [lesson.GPT(config).double()]
    replicas += [copy.deepcopy(replicas[0]) for _ in range(size - 1)]
    optimizers = [torch.optim.AdamW(replica.parameters(), config.lr) for replica in replicas]
    outer = torch.nn.utils.parameters_to_vector(replicas[0].parameters()).detach()
    momentum, gradient, losses = torch.zeros_like(outer), torch.zeros_like(outer), [0]
    parts = [part.tolist() for part in torch.arange(len(outer)).tensor_split(config.fragments)]
    mu, travelling = config.outer_momentum, None
    for step in range(1, config.steps + 1):
        for rank, replica in enumerate(replicas):
            for inputs, targets in lesson.microbatches(config, text, step, device, rank, size):
                loss = lesson.mean_loss(replica(inputs), targets) / config.accum
                loss.backward()
                losses[-1] += loss.item() / size
            torch.nn.utils.clip_grad_norm_(replica.parameters(), config.clip)
            optimizers[rank].step()
            replica.zero_grad()
        flats = [torch.nn.utils.parameters_to_vector(each.parameters()).detach() for each in replicas]
        for i, part in enumerate(parts, 1):
            if step % config.inner_steps == i * config.inner_steps // config.fragments % config.inner_steps:
                begun, travelling = step, part
                gradient[part] = outer[part] - sum(flat[part] for flat in flats) / size
            if part is travelling and (step == begun + config.delay or step == config.steps):
                travelling = None
                momentum[part] = mu * momentum[part] + gradient[part]
                outer[part] -= config.outer_lr * (gradient[part] + mu * momentum[part])
                for flat in flats:
                    flat[part] = (flat[part] + outer[part]) / 2 if config.delay else outer[part]
        for replica, flat in zip(replicas, flats):
            torch.nn.utils.vector_to_parameters(flat, replica.parameters())
        if step % config.inner_steps == 0 or step == config.steps:
            losses[-1] /= (step - 1) % config.inner_steps + 1
            losses.append(0)
    torch.nn.utils.vector_to_parameters(sum(flats) / size, replicas[0].parameters())
    return losses[:-1], {name: tensor.clone() for name, tensor in replicas[0].state_dict().items()}


expected = cache(lambda size, flags: world(1).run(plain, size, flags)[0])


def check(name, own=STREAMING, size=2):
    losses, weights = expected(size, f"{FLAGS} {own}")
    result, ours = train(name, size, f"{FLAGS} {own}")
    assert apart(result["losses"], losses) < 1e-12, "losses differ"
    assert apart(ours, weights) < 1e-12, "weights differ"


OWN = [*product([1, 2, 3, 4], [LOCAL, STREAMING, f"{LOCAL} {AVERAGE}"]), (8, STREAMING)]


@pytest.mark.long_table
@pytest.mark.parametrize("size, own", [*OWN, (2, f"{LOCAL} --inner-steps 1")])
def test_ranks_are_replicas_trained_one_after_the_other(size, own):
    check("diloco", own, size)


@on_ranks(3)
def check_same(name):
    """All ranks start with rank 0's weights; after an exchange each has the same, to the bit."""
    lesson, model = load(name), torch.nn.Linear(5, 5)  # 30 weights
    with torch.no_grad():
        model.weight.fill_(dist.get_rank())
    diloco = lesson.DiLoCo(model, 2)
    assert not model.weight.any(), "not rank 0's weights"
    for _ in range(2):
        for weights in diloco.inner:
            weights.add_(torch.randn(30, generator=torch.Generator().manual_seed(dist.get_rank())))
        diloco.step()
    parts = [torch.empty(30) for _ in range(3)]
    dist.all_gather(parts, diloco.inner[0])
    assert parts[0].any() and parts[0].equal(parts[1]) and parts[0].equal(parts[2]), "ranks differ"
    model.extra = torch.nn.Parameter(torch.ones(1))
    assert "move, cast, add" in error_of(diloco.step), "a new parameter is not noticed"
    del model.extra
    model.weight.data = model.weight.clone()
    assert "move, cast, add" in error_of(diloco.step), "moved parameters are not noticed"
    assert "of one dtype" in error_of(partial(lesson.DiLoCo, torch.nn.ReLU(), 4)), "no parameters"
    model.weight.data = model.weight.double()
    assert "of one dtype" in error_of(partial(lesson.DiLoCo, model, 4)), "several dtypes"
    model.float()
    for odd in {"fragments": 3}, {"delay": 4}, {"delay": -1}:
        assert "of fragments" in error_of(partial(lesson.DiLoCo, model, 4, **odd)), odd


TIMELINE = """step step start 0 step finish step start 1 step finish step start 0 step finish step start 1
    step finish step start 0 finish"""


@on_ranks(2)
def check_timeline(name):
    """A fragment travels, all in one message, while the next steps are computed; no other message is sent."""
    log, numbers, lesson = [], [], load(name)
    for word in "start", "finish":
        note = lambda diloco, *i, word=word: log.append(" ".join([word, *map(str, i)]))  # noqa: E731
        method = f"{word}_all_reduce"
        setattr(lesson.DiLoCo, method, noted(getattr(lesson.DiLoCo, method), note))
    lesson.inner_step = noted(lesson.inner_step, lambda *_: log.append("step"))
    config = lesson.parse(f"{FLAGS} {STREAMING}".split())
    count = noted(dist.all_reduce, lambda tensor, **_: numbers.append(tensor.numel()))
    with mock.patch.object(dist, "all_reduce", count):
        lesson.train(config)
    assert " ".join(log) == " ".join(TIMELINE.split()), f"another order: {', '.join(log)}"
    params = sum(param.numel() for param in lesson.GPT(config).parameters())
    assert set(numbers) == {2, params // 2}, f"other messages: {numbers}"


check_bf16 = partial(check_ledger, flags=f"--dtype bf16 {LOCAL} --fragments 2 --steps 9")
check_plain, check_turns = (partial(check, own=own) for own in (LOCAL, f"{LOCAL} {AVERAGE} --fragments 2"))
test_each_promise_is_kept = holds("diloco", check_same, check_timeline, check_bf16)
MUTANTS = [
    ("self.outer[i] - self.inner[i]", "self.inner[i] - self.outer[i]", check_plain, "losses differ"),
    ("outer = self.outer[self.fragment]\n        outer.grad /= dist.get_world_size()",
     "outer = self.outer[self.fragment]", check_plain, "losses differ"),
    ("nesterov=outer_momentum > 0", "", check_plain, "losses differ"),
    ("        diloco.step()", "        diloco.step(); optimizer.state.clear()", check_plain, "losses differ"),
    ("% len(self.outer)", "% max(1, len(self.outer) - 1)", check, "losses differ"),
    ("0.5 if self.delay else 1", "1", check, "losses differ"),
    ("steps_since_start == self.delay", "steps_since_start == 0", check_timeline, "another order"),
    ("self.steps % self.interval", "(self.steps + 1) % self.interval", check_plain, "losses differ"),
    ("        outer.grad = None", "        pass", check_bf16, "gradients: +"),
    ("    diloco.average()\n    if", "    if", check_plain, "weights differ"),
    ("        if self.reduce_work:", "        if False:", check, "weights differ"),
    ("dist.broadcast(flat_param, 0)", "pass", check_same, "not rank 0's"),
    ("        self._check_addresses()", "        pass", check_same, "a new parameter"),
    (".parameters()}) != 1", ".parameters()}) > 1", check_same, "no parameters"),
    (".parameters()}) != 1", ".parameters()}) < 1", check_same, "several dtypes"),
    ("outer_lr, outer_momentum, nest", "outer_lr, 0.9, nest", check_turns, "losses differ"),
    ("optimizer.zero_grad()", "pass", check_plain, "losses differ"),
    ("torch.promote_types(DTYPES[config.dtype], torch.float32)", "DTYPES[config.dtype]",
     check_bf16, "parameters: -"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "diloco")
GPU_MUTANTS = [
    ("diloco", "self.reduce_work.wait()", "pass", check_gpu, "uses what a collective still"),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
