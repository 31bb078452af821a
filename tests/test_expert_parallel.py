"""What is special to expert_parallel.py: tokens go to their experts and back, gradients, the balance."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.checks import EXACT, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import TINY, Lesson, apart, holds, load, mutants, on_ranks, world

RUN = "torchrun LESSON --dtype fp64"
PLAIN = "expert_parallel --dtype fp64 --naive"
NAIVE = "--naive"
FILM = "--layers 2"
RACE = "4 --layers 2"
LESSON = Lesson(
    flags="--experts 12",
    variants=("--naive", "--ep 1"),
    own={
        "--experts": ("4 8", "0 -1 x"),
        "--top-k": ("1 2", "0 -1 99"),
        "--ep": ("1 2", "-1 5"),
        "--balance": ("0 0.1", "x"),
    },
    bad=("--ep 3", "--top-k 9"),
    uncounted=("all-to-all",),  # it depends on the tokens, which check_rows_sent() counts
    gpu=("--ep 1", "--top-k 1"),  # not --naive: there shapes depend on numbers
    waits={"": {("copy", "all_gather_counts()"): "2k"}},  # in each of two mixtures
    orders=[(2, "--naive"), (3, "--experts 24"), (4, "--ep 2 --top-k 1"), (4, "--ep 1"), (8, "")],
)
WIDTH, EXPERTS = 6, 12


def mixture(moe, x):
    """(output, balance loss) of tokens x (n, h) on one device: every expert computes every token."""
    probs = (x @ moe.router.weight.T).softmax(-1)
    chosen = probs >= probs.sort(descending=True).values[:, moe.top_k - 1 : moe.top_k]
    gates = probs * chosen
    if moe.top_k > 1:
        gates = gates / gates.sum(1, keepdim=True)
    out = sum(gates[:, i, None] * expert(x) for i, expert in enumerate(moe.experts.values()))
    return out, EXPERTS / moe.top_k * (chosen.double().mean(0) * probs.mean(0)).sum()


def groups(size, ep):
    ranks = torch.arange(size).view(-1, ep)
    return [dist.new_subgroups_by_enumeration(rows.tolist())[0] for rows in (ranks, ranks.T)]


@on_ranks(4)
def check_layer(name, ep=4, top_k=2, is_naive=False):
    """A mixture's output and all its gradients are those on one device."""
    lesson, rank, size = load(name), dist.get_rank(), dist.get_world_size()
    ep_group, replicas = groups(size, ep)
    torch.manual_seed(0)
    moe = lesson.MoE(SimpleNamespace(width=WIDTH, experts=EXPERTS, top_k=top_k, naive=is_naive)).double()
    plain = copy.deepcopy(moe)
    moe.keep_own_experts(ep_group)
    assert len(list(moe.parameters())) == 1 + 4 * EXPERTS // ep, "not 1/e of the experts"
    tokens = torch.randn(size, 20, WIDTH, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(size, 20, WIDTH, dtype=torch.float64)
    expected, balance = mixture(plain, tokens.flatten(0, 1))
    ((expected.view_as(direction) * direction).sum() + balance).backward()
    x = tokens[rank].detach().requires_grad_()
    out = moe(x[None])[0]
    ((out * direction[rank]).sum() + moe.balance_loss / size).backward()
    assert apart(out.detach(), expected.view_as(direction)[rank].detach()) < 1e-12, "outputs differ"
    assert apart(x.grad, tokens.grad[rank]) < 1e-12, "gradients of tokens differ"
    grads = {key: param.grad for key, param in plain.named_parameters()}
    for key, param in moe.named_parameters():
        dist.all_reduce(param.grad, group=replicas if "experts" in key else None)
        assert apart(param.grad, grads[key]) < 1e-12, f"gradients of {key.split('.')[0]} differ"


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("size, ep", [(1, 1), (3, 3), (4, 2), (4, 1)])
def test_a_mixture_is_that_of_one_device(size, ep, top_k):
    check_layer("expert_parallel", ep, top_k, size=size)
    if ep == 1:
        check_layer("expert_parallel", ep, top_k, is_naive=True, size=size)


@on_ranks(2)
def check_empty(name):
    """Without a token on one rank, or on any, all is 0; nothing is NaN."""
    for lengths in (0, 0), (0, 3), (3, 0):
        for is_naive in False, True:
            lesson, rank = load(name), dist.get_rank()
            config = SimpleNamespace(width=WIDTH, experts=EXPERTS, top_k=2, naive=is_naive)
            moe = lesson.MoE(config)
            moe.keep_own_experts(groups(2, 1 if is_naive else 2)[0])
            x = torch.randn(1, lengths[rank], WIDTH, requires_grad=True)
            loss = moe(x).sum() + moe.balance_loss
            loss.backward()
            grads = [param.grad for param in moe.parameters()]
            assert all(grad is not None for grad in grads), "there is no gradient"
            flat = torch.cat([loss[None], *(grad.flatten() for grad in grads)])
            assert flat.isfinite().all(), "not finite"
            assert sum(lengths) or not flat.any(), "not 0"


@on_ranks(2)
def check_checkpoints(name, reentrant=False):
    """A checkpoint around each block changes no gradient. (A reentrant one loses the balance loss's.)"""
    found = []
    for is_checkpointed in False, True:
        lesson = load(name)
        config = lesson.parse(f"{TINY} --dtype fp64 --experts {EXPERTS} --layers 2".split())
        model = lesson.GPT(config, lesson.MoEBlock)
        for block in model.blocks:
            block.moe.keep_own_experts(groups(2, 2)[0])
            if is_checkpointed:
                block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
        tokens = torch.arange(32).view(2, 16) + 100 * dist.get_rank()
        balance = lambda: sum(block.moe.balance_loss for block in model.blocks)  # noqa: B023, E731
        loss = model(tokens).square().mean()
        (loss if reentrant else loss + balance()).backward()
        found.append([param.grad for key, param in model.named_parameters()])
    assert all(apart(*both) < 1e-12 for both in zip(*found)), "gradients differ"


@on_ranks(3)
def check_rows_sent(name):
    """Bytes that all-to-alls send to others in a step, by the ledger and by the counts."""
    flags = f"{TINY} --dtype fp64 --accum 2 --experts {EXPERTS} --batch 24"
    lesson, noted, rank = load(name), [], dist.get_rank()

    def note(moe, rows, counts, run_experts=lesson.MoE.run_experts):
        table = counts.unflatten(1, (dist.get_world_size(), -1)).sum(-1)  # (from, to)
        others = table[rank].sum() + table[:, rank].sum() - 2 * table[rank, rank]
        noted.append(2 * rows[0].nbytes * others.item())  # forward and backward
        return run_experts(moe, rows, counts)

    lesson.MoE.run_experts = note
    watch, _ = load("tools/ledger").run(lesson, lesson.parse(flags.split()))
    assert 0 < watch.sent["all-to-all", "wire"] == pytest.approx(sum(noted[6:12]), rel=1e-12)  # step 2


@pytest.mark.parametrize(
    "size, ep, flags", [(4, 2, ""), (4, 2, "--accum 3"), (8, 4, "--top-k 1 --balance 0.3")]
)
def test_every_number_of_groups_trains_as_the_naive_version_on_one_rank(size, ep, flags):
    check_parity("expert_parallel", size, f"--experts 16 --batch 48 {flags}", f"--ep {ep}")


@on_ranks(1)
def check_single(name):
    """Losses and norms are those of single.py's loop around the same model."""
    flags, found = f"{EXACT} --accum 2", []
    single, lesson = load("single"), load(name)

    def model_of(config):
        vars(config).update(experts=EXPERTS, top_k=2, naive=True)
        return lesson.GPT(config, lesson.MoEBlock)

    single.GPT = model_of
    for each, own in (single, ""), (lesson, f"--experts {EXPERTS} --balance 0"):
        each.print_step = lambda *args: found.extend(args[2:4])
        each.train(each.parse(f"{flags} {own}".split()))
    assert apart(found[:6], found[6:]) < 1e-10, "losses or norms differ"


def loads(name, flags):
    """On a rank: the most tokens of an expert, over the mean, in the last mixture of a run."""
    lesson, seen = load(name), []
    balance = lesson.MoE.balance
    lesson.MoE.balance = lambda moe, probs, load: (seen.append(load), balance(moe, probs, load))[1]
    lesson.train(lesson.parse(flags.split()))
    return (seen[-1].max() / seen[-1].double().mean()).item() - 1


@pytest.mark.long_table
def test_balance_makes_loads_more_even():
    flags = f"{TINY} --lr 0.003 --steps 60 --batch 24"
    even, uneven = (world(1).run(loads, "expert_parallel", f"{flags} --balance {each}")[0] for each in (1, 0))
    assert even < 0.6 * uneven, f"the largest load is {even:.2f} above the mean, {uneven:.2f} without balance"


reentrant = partial(check_checkpoints, reentrant=True)


@on_ranks(2)
def check_layout(name):
    """A gradient may have any strides; gloo looks at the memory alone."""
    rows, grad = torch.ones(4, 3, requires_grad=True), torch.arange(12.0).view(3, 4).T
    load(name).AllToAll.apply(rows, [2, 2], [2, 2], None).backward(grad)
    assert torch.equal(rows.grad, grad.chunk(2)[dist.get_rank()].repeat(2, 1)), "other gradients"


CHECKS = check_layout, check_empty, check_checkpoints, reentrant, check_rows_sent, check_single
test_each_promise_is_kept = holds("expert_parallel", *CHECKS)
on_pairs = partial(check_parity, size=4, flags="--experts 12", own_flags="--ep 2")
naive = partial(check_layer, ep=1, is_naive=True)
one_chosen = partial(check_layer, top_k=1)
MUTANTS = [
    ("* gates[row, place, None]", "* gates[row, 0, None]", naive, "outputs differ"),
    ("        mixed.index_add_(0, row,", "        mixed.index_copy_(0, row,", naive, "outputs differ"),
    ("if self.top_k > 1:", "if True:", one_chosen, "differ"),
    ("if self.top_k > 1:", "if self.top_k > 2:", check_layer, "outputs differ"),
    ("if i // n_own != dist", "if False and dist", check_layer, "not 1/e"),
    ("by_expert // self.top_k", "by_expert % len(tokens)", check_layer, "outputs differ"),
    ("gates.flatten()[by_expert, None]", "gates.flatten()[:, None]", check_layer, "outputs differ"),
    ("load.sum().clamp(min=1)", "load.sum()", check_empty, "not finite"),
    ("max(len(probs), 1)", "len(probs)", check_empty, "not finite"),
    ("return counts.sum(0),", "return own_counts,", check_layer,
     "gradients of"),
    ("AllToAll.apply(rows, to_ranks", "AllToAll.apply(rows.detach(), to_ranks", check_layer,
     "gradients of tokens"),
    ("output = expert(torch.cat(pieces[own]))",
     "output = torch.cat(pieces[own]); output = expert(output) if len(output) else output", check_empty,
     "no gradient"),
    ("pieces[own] = output.split", "pieces[own] = output.flip(0).split", check_layer, "outputs differ"),
    ("enumerate(self.experts.values())", "enumerate([*self.experts.values()][::-1])", check_layer, "outputs"),
    ("dist.all_reduce(param.grad, group=replicas)", "dist.all_reduce(param.grad, group=ep_group)", on_pairs,
     "differ"),
    ("            dist.all_reduce(param.grad)\n", "            pass\n", on_pairs, "differ"),
    ("dist.all_reduce(squares, group=ep_group)", "dist.all_reduce(squares)", on_pairs, "differ"),
    ("(config.accum * world_size)\n", "config.accum\n", on_pairs, "differ"),
    ("loss = (loss + config", "loss = (loss * 2 + config", check_single, "differ"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "expert_parallel")
GPU_MUTANTS = [
    ("config.clip, norm)", "config.clip, norm + 0 * norm.item())", check_gpu, "the host waits"),
    ("rows, received, sent,", "rows, received[::-1], sent,", check_order, "ranks do not meet"),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "expert_parallel")
