"""What is special to single.py, and what all lessons have from it."""

import itertools
import math
import re
from functools import partial

import torch

from tests.checks import check_parity
from tests.gpu import check_gpu, check_shared
from tests.harness import Lesson, holds, lessons, load, mutants, on_ranks, path_of, said, train

RUN = "python LESSON"
LESSON = Lesson(worlds=(1,))


def shares(single, flags, replicas):
    """The tokens of two steps of a global batch, in the order of its shares."""
    config = single.parse(flags.split())
    drawn = []
    for step, rank in itertools.product((1, 2), range(replicas)):
        for inputs, targets in single.microbatches(config, step, "cpu", rank, replicas):
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


@on_ranks(1)
def check_text(name, folder):
    """A file of a sequence and a byte is enough, one of a sequence is not."""
    lesson = load(name)
    for size in 64, 65:
        path = f"{folder}/text"
        with open(path, "wb") as file:
            file.write(b"x" * size)
        _, lines, code = said(lambda path=path: lesson.parse(["--data", path]))
        assert (code == 0) == (size == 65), f"{size} bytes: {lines}"
    assert torch.equal(shares(lesson, f"--data {path}", 1), torch.full((32, 64), ord("x")))


def test_the_shortest_text(tmp_path):
    check_text("single", tmp_path)


@on_ranks(1)
def check_norm(name):
    """It is exact of 20 million elements, and of bf16."""
    lesson = load(name)
    grad = torch.rand(2 * 10**7)
    exact = sum(part.double().square().sum() for part in grad.split(2**20))
    assert abs(lesson.squared_norm([grad]) / exact - 1) < 1e-7, "the norm is rounded"
    both = [torch.tensor([3.0, 0.25]).bfloat16(), torch.tensor([4.0]).bfloat16()]
    assert lesson.squared_norm(both) == 25.0625, "the norm is rounded"


@on_ranks(1)
def check_master_steps(name):
    """Steps are those of fp32 weights, rounded; in fp32 nothing is copied."""
    lesson = load(name)
    grads = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    params = [torch.nn.Parameter(torch.linspace(0.1, 1, 5).bfloat16()) for _ in range(2)]
    wide = [torch.nn.Parameter(param.detach().float()) for param in params]
    optimizers = [lesson.MasterWeights(params, 1e-3), torch.optim.AdamW(wide, lr=1e-3)]
    for step in grads:
        for each, optimizer in zip((params, wide), optimizers):
            for param, grad in zip(each, step):
                param.grad = grad.bfloat16().to(param.dtype)
            optimizer.step()
    for param, each in zip(params, wide):
        assert torch.equal(param, each.bfloat16()), "not the fp32 steps, rounded"
        assert param.grad is None, "gradients are left"
    own = lesson.MasterWeights(wide, 1e-3).masters
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(own, wide)), "fp32 weights have copies"


def test_master_weights_are_the_same_lines_in_every_lesson():
    sources = [path_of(name).read_text() for name in lessons()]
    texts = re.findall(r"^class MasterWeights:.*?^\n\n", "\n".join(sources), re.S | re.M)
    assert len(texts) >= 2 and len(set(texts)) == 1


def test_the_loss_starts_at_chance_and_falls():
    result, _ = train("single", 1, "")
    assert abs(result["losses"][0] - math.log(256)) < 0.1 and result["losses"][-1] < 4


test_each_promise_is_kept = holds("single", check_batches, check_norm, check_master_steps)
MUTANTS = [
    ("(config.seed, step)", "(config.seed, 0)", check_batches, "steps draw the same"),
    ("(config.seed, step)", "(0, step)", check_batches, "another seed"),
    ("config.accum, b, 1))[rank]", "config.accum, b, 1))[0]", check_batches, "another global batch"),
    ("tokens[..., 1:]", "tokens[..., :-1]", check_batches, "targets are not"),
    ("grads, dtype=torch.float64", "grads", check_norm, "the norm is"),
    ("torch._foreach_copy_(", "zip(", check_master_steps, "not the fp32 steps"),
    ("            param.grad = None\n", "", check_master_steps, "gradients are left"),
    (".to(wide(param.dtype)) for", ".double() for", check_master_steps, "fp32 weights have copies"),
    ("/ config.accum\n", "\n", check_parity, "differ"),
    ("+= loss.detach()", "+= loss.detach() / 2", check_parity, "losses differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "single")
alone_on_gpu = partial(check_gpu, rows=[(1, 0)])
GPU_MUTANTS = [
    ('        torch.cuda.set_device(int(os.getenv("LOCAL_RANK", 0)) % gpus)\n', "", check_shared,
     "no GPU is set"),
    ('            os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])', "            pass", check_shared,
     "another host"),
    ('.setdefault("NCCL_HOSTID", os.environ["RANK"])', '["NCCL_HOSTID"] = os.environ["RANK"]', check_shared,
     "another host"),
    ("1)) > gpus:", "1)) >= gpus:", check_shared, "1 GPUs, 1 ranks: another host"),
    ('init_process_group("nccl" if gpus else "gloo")', 'init_process_group("gloo")', check_shared,
     "another backend"),
    ("loss, norm = loss.item(), norm.item()", "loss, norm = loss.item(), norm.item() + 0 * loss.item()",
     alone_on_gpu, "the host waits"),
]  # fmt: skip
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "single")
