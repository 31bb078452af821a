"""What is special to expert_parallel.py: tokens go to their experts and back, gradients, the balance."""

import math
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from test_all import check_parity
from tests.harness import TINY, apart, holds, load, mutants, on_ranks, said, train, world

EXPERTS = 12


def mixture(weights, x, top_k, capacity_factor=math.inf):
    """(output, balance loss, chosen) of tokens x (T, D) on one device: every expert computes every token."""
    probs = (x @ weights["router.weight"].T).softmax(-1)
    chosen = probs >= probs.sort(descending=True).values[:, top_k - 1 : top_k]
    gates = probs * chosen
    if top_k > 1:
        gates = gates / gates.sum(1, keepdim=True)
    if capacity_factor < math.inf:
        capacity = max(math.ceil(len(x) / EXPERTS * top_k * capacity_factor), 4)
        gates = gates * (chosen.cumsum(0) <= capacity)
    out = 0
    for i in range(EXPERTS):
        up, up_bias, down, down_bias = (w for key, w in weights.items() if f"experts.{i}." in key)
        out = out + gates[:, i : i + 1] * (F.gelu(x @ up.T + up_bias) @ down.T + down_bias)
    share = chosen.double().mean(0) / top_k
    return out, EXPERTS * (share * probs.mean(0)).sum(), chosen


def layer(name, ep, top_k, capacity_factor):
    """On a rank: hold a mixture's output and all its gradients against those on one device."""
    lesson, rank, size = load(name), dist.get_rank(), dist.get_world_size()
    group, _ = dist.new_subgroups(ep)
    same_experts, _ = dist.new_subgroups_by_enumeration([list(range(i, size, ep)) for i in range(ep)])
    torch.manual_seed(0)
    moe = lesson.MoE(6, 24, EXPERTS, top_k, group, capacity_factor).double()
    states = [None] * size
    dist.all_gather_object(states, moe.state_dict())
    weights = {key: tensor.requires_grad_() for state in states for key, tensor in state.items()}
    tokens = torch.randn(size, 20, 6, dtype=torch.float64, requires_grad=True)
    given = torch.randn(size, 20, 6, dtype=torch.float64)
    out, balance, chosen = mixture(weights, tokens.flatten(0, 1), top_k, capacity_factor)
    ((out.view_as(given) * given).sum() / size + balance).backward()
    grads = {key: weight.grad for key, weight in weights.items()}

    x = tokens[rank].detach().requires_grad_()
    own = moe(x[None])[0]
    ((own * given[rank]).sum() + moe.balance_loss).backward()
    norm = lesson.average_gradients(torch.nn.ModuleDict({"moe": moe}), group, same_experts, math.inf)
    assert apart(own.detach(), out.view_as(given)[rank].detach()) < 1e-12, "outputs differ"
    assert apart(x.grad / size, tokens.grad[rank]) < 1e-12, "gradients of tokens differ"
    for key, param in moe.named_parameters():
        assert apart(param.grad, grads[key]) < 1e-12, f"gradients of {key.split('.')[0]} differ"
    assert apart(norm, sum(grad.square().sum() for grad in grads.values()).sqrt()) < 1e-12, "norms differ"
    assert moe.load.tolist() == chosen.sum(0).tolist(), "loads differ"
    idle = [i for i in range(EXPERTS) if not chosen[:, i].any()]
    return idle, (out == 0).double().mean().item(), moe.dropped.item()


def check_layer(name, size=4, ep=4, top_k=2, capacity_factor=math.inf):
    return world(size).run(layer, name, ep, top_k, capacity_factor)[0]


@pytest.mark.parametrize("capacity_factor", [math.inf, 1.0])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("size, ep", [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (4, 1)])
def test_a_mixture_is_that_of_one_device(size, ep, top_k, capacity_factor):
    idle, zeros, dropped = check_layer("expert_parallel", size, ep, top_k, capacity_factor)
    assert (dropped > 0) == (capacity_factor == 1.0 and size > 1) or size == 1
    assert idle or (size, top_k) != (1, 1), "this was to show that an idle expert's gradient is zero"
    assert top_k > 1 or zeros == pytest.approx(dropped), "tokens without a place do not pass unchanged"


def train_single(flags):
    """On a rank: losses and norms of single.py with the same mixtures, computed as on one device."""
    single, lesson = load("single"), load("expert_parallel")
    gpt, losses, norms = single.GPT, [], []

    def forward(block, x):
        q, k, v = block.qkv(block.norm1(x)).unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + block.proj(attended.transpose(1, 2).flatten(2))
        weights, tokens = dict(block.moe.named_parameters()), block.norm2(x).flatten(0, 1)
        return x + mixture(weights, tokens, block.moe.top_k)[0].view_as(x)

    def with_mixtures(config):
        model = gpt(config)
        lesson.mix_experts(model, config, None)
        for block in model.blocks[::2]:
            block.forward = partial(forward, block)
        return model

    single.GPT = with_mixtures
    single.print_step = lambda *args: (losses.append(args[2]), norms.append(args[3]))
    single.train(lesson.parse(flags.split()))
    return losses, norms


def test_on_one_rank_it_is_single_py_with_mixtures():
    flags = f"{TINY} --dtype fp64 --accum 2 --experts {EXPERTS} --lr 0.01 --clip 0.5 --balance 0"
    losses, norms = world(1).run(train_single, flags)[0]
    own, _ = train("expert_parallel", 1, flags)
    assert max(apart(own["losses"], losses), apart(own["grad_norms"], norms)) < 1e-10


@pytest.mark.parametrize("flags", ["", "--capacity-factor 1.25 --experts 16 --top-k 1", "--balance 0.1"])
@pytest.mark.parametrize("size, ep", [(4, 2), (4, 1), (8, 8), (8, 4)])
def test_training_is_that_of_one_rank(size, ep, flags):
    check_parity("expert_parallel", size, f"--accum 1 --batch 8 --steps 2 {flags}", f"--ep {ep}")


@on_ranks(3)
def check_rows_sent(name):
    """Bytes that all-to-alls send to others in a step, by the ledger and by the counts."""
    flags = f"{TINY} --dtype fp64 --accum 2 --experts {EXPERTS} --capacity-factor 1.5 --batch 24"
    lesson, ledger = load(name), load("tools/ledger")
    noted, dispatch, rank = [], lesson.MoE.dispatch, dist.get_rank()

    def note(moe, rows, counts):
        table = counts.unflatten(1, (dist.get_world_size(), -1)).sum(-1)  # (from, to)
        others = table[rank].sum() + table[:, rank].sum() - 2 * table[rank, rank]
        noted.append(2 * rows[0].nbytes * others.item())  # forward and backward
        return dispatch(moe, rows, counts)

    lesson.MoE.dispatch = note
    watch, _ = ledger.run(lesson, lesson.parse(flags.split()))
    rows = sum(noted[4:8])  # two mixtures, two microbatches: step 2
    assert watch.sent["all-to-all", "wire"] == pytest.approx(rows, rel=1e-12) and rows > 0


def printed(flags):
    """On a rank: what a run prints at its end of the first mixture: (tokens of each expert, % dropped)."""
    lesson = load("expert_parallel")
    out, _, _ = said(lambda: lesson.train(lesson.parse(flags.split())))
    load_of, dropped = re.search(r"tokens per expert \[(.*)\] \| dropped (.*)%", out).groups()
    return [int(x) for x in load_of.split(",")], float(dropped)


def test_the_balance_loss_spreads_the_tokens_and_fewer_are_dropped():
    flags = f"{TINY} --steps 40 --lr 0.003 --capacity-factor 1 --balance"
    (even, few), (uneven, many) = (world(1).run(printed, f"{flags} {weight}")[0] for weight in (1, 0))
    assert max(even) < 0.6 * max(uneven) and few < 0.6 * many
    over = sum(max(0, tokens - 48) for tokens in uneven)  # 12 x 16 tokens, 2 of 8 experts: 48 places each
    assert many == pytest.approx(100 * over / sum(uneven), abs=0.05)


rows_sent = (partial(check_rows_sent, size=size) for size in (2, 3, 4))
test_the_all_to_alls_send_the_rows_that_are_routed_to_other_ranks = holds("expert_parallel", *rows_sent)
on_pairs = partial(check_layer, ep=2)
with_drops = partial(check_layer, top_k=1, capacity_factor=1.0)
GROUP = "same_experts if is_expert else None"
LOCAL_SHARE = "counts[dist.get_rank()].to(probs) / counts[0].sum()"
MUTANTS = [
    ("AllToAll.apply(rows, sent", "AllToAll.apply(rows.detach(), sent", check_layer, "gradients of tokens"),
    (GROUP, "None", check_layer, "gradients of experts differ"),
    (GROUP, "group if is_expert else None", on_pairs, "gradients of experts differ"),
    ("squares[1], group=group", "squares[1]", on_pairs, "norms differ"),
    ("if self.top_k > 1:", "if self.top_k > 2:", check_layer, "outputs differ"),
    ("if self.top_k > 1:", "if True:", partial(check_layer, top_k=1), "outputs differ"),
    ("self.load.to(probs) / total", LOCAL_SHARE, check_layer, "gradients of"),
    ("part[:places]", "part[len(part) - places :]", with_drops, "differ"),
    ("taken = counts.cumsum(0) - counts", "taken = 0 * counts", with_drops, "differ"),
    ("outputs[own] = output.split", "outputs[own] = output.flip(0).split", check_layer, "outputs differ"),
    ("torch.cat(pieces[own])", "torch.cat(pieces[own][::-1])", check_layer, "outputs differ"),
]
test_a_mutant_is_rejected = mutants(MUTANTS, "expert_parallel")
