"""What is special to single.py, and what all lessons have from it."""

import itertools
import math
import re

import torch

from test_all import check_parity
from tests.harness import ROOT, holds, load, mutants, on_ranks, train, world
from tests.test_zero import check_norm


def shares(single, flags, replicas):
    """The tokens of two steps of a global batch, in the order of its shares."""
    config = single.parse(flags.split())
    _, text = single.set_up(config)
    drawn = []
    for step, rank in itertools.product((1, 2), range(replicas)):
        for inputs, targets in single.microbatches(config, text, step, "cpu", rank, replicas):
            assert torch.equal(inputs[:, 1:], targets[:, :-1]), "targets are not the next tokens"
            drawn.append(inputs)
    return torch.cat(drawn)


@on_ranks(1)
def check_batches(name):
    single = load(name)
    whole = shares(single, "--batch 12", 1)
    assert whole.shape == (24, 64) and not torch.equal(whole[:12], whole[12:]), "steps draw the same"
    for replicas, accum in (2, 1), (3, 2), (4, 3):
        own = shares(single, f"--batch 12 --accum {accum}", replicas)
        assert torch.equal(own, whole), "another global batch"
    assert not torch.equal(shares(single, "--batch 12 --seed 1", 1), whole), "another seed draws the same"


def test_a_folder_is_read_as_one_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two").write_bytes(b"world" * 20)
    (tmp_path / "a").write_bytes(b"hello ")
    (tmp_path / "empty").write_bytes(b"")
    assert world(1).run(read, str(tmp_path))[0] == b"hello " + b"world" * 20


def read(folder):
    single = load("single")
    _, text = single.set_up(single.parse(["--data", folder]))
    return bytes(text.tolist())


@on_ranks(1)
def check_master_steps(name):
    """A group has 2^24 elements at most, or one parameter; steps are those of fp32 weights, rounded."""
    lesson = load(name)
    sizes = (2**23, 2**23, 5, 2**24 + 1, 7)
    params = [torch.nn.Parameter(torch.empty(size, dtype=torch.bfloat16)) for size in sizes]
    own = lesson.MasterWeights(torch.optim.SGD, params, lr=1)
    groups = [master.numel() for _, master, _ in own.groups]
    assert groups == [2**24, 5, 2**24 + 1, 7], f"other groups: {groups}"
    grads = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    params = [torch.nn.Parameter(torch.linspace(0.1, 1, 5).bfloat16()) for _ in range(2)]
    wide = [torch.nn.Parameter(param.detach().float()) for param in params]
    optimizers = [lesson.MasterWeights(torch.optim.AdamW, params, lr=1e-3), torch.optim.AdamW(wide, lr=1e-3)]
    for step in grads:
        for each, optimizer in zip((params, wide), optimizers):
            for param, grad in zip(each, step):
                param.grad = grad.bfloat16().to(param.dtype)
            optimizer.step()
    for param, each in zip(params, wide):
        assert torch.equal(param, each.bfloat16()), "not the fp32 steps, rounded"


def test_master_weights_are_the_same_lines_in_every_lesson():
    sources = [path.read_text() for path in ROOT.glob("*.py")]
    texts = re.findall(r"^class MasterWeights:.*?^\n\n", "\n".join(sources), re.S | re.M)
    assert len(texts) == 11 and len(set(texts)) == 1


def test_the_loss_starts_at_chance_and_falls():
    result, _ = train("single", 1, "")
    assert abs(result["losses"][0] - math.log(256)) < 0.1 and result["losses"][-1] < 4


test_master_weights_step_in_fp32_in_groups_and_round = holds(("single", "ddp"), check_master_steps)
test_batches_and_norms_are_right = holds("single", check_batches, check_norm)
MUTANTS = [
    ("single", "(config.seed, step)", "(config.seed, 0)", check_batches, "steps draw the same"),
    ("single", "(config.seed, step)", "(0, step)", check_batches, "another seed"),
    ("single", "config.accum, -1)[rank]", "config.accum, -1)[0]", check_batches, "another global batch"),
    ("single", "tokens[..., 1:]", "tokens[..., :-1]", check_batches, "targets are not"),
    ("single", "grads, dtype=torch.float64", "grads", check_norm, "the norm is"),
    ("single", "(max_norm / ", "(2 * max_norm / ", check_norm, "what is clipped"),
    ("single", "torch._foreach_copy_(", "zip(", check_master_steps, "not the fp32 steps"),
    ("single", "params, 2**25", "params, 1", check_master_steps, "other groups"),
    ("ddp", "microloss.detach()", "microloss.detach() / 2", check_parity, "losses differ"),
    ("ddp", "/ config.accum\n", "\n", check_parity, "losses differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS)
