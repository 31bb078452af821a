"""Expert parallelism: a block has many MLPs, spread over the ranks, and each token is sent to a few of them.

Idea
    A mixture of experts has X MLPs where a block had one. A router, a small linear layer, gives each token a
    probability for each expert. Only the t most probable process it. Their outputs are summed, each times its
    gate: the t probabilities, if t > 1 scaled to sum to 1. So a block has X times an MLP's parameters, but
    computes only t times as much. (arXiv 1701.06538, section 2)

    As in ddp.py, each rank has a part of the batch. But the experts are spread over groups of e ranks (--ep),
    X/e on each. An all-to-all takes tokens to the ranks of their experts, and another one brings the outputs
    back. (GShard, arXiv 2006.16668, section 3)

    A rank whose experts are popular makes the others wait. So a balance loss is added, which pushes
    the router towards equal loads (Switch, arXiv 2101.03961, 2.2), counted over all ranks (arXiv 2501.11873).

Timeline (forward on rank 0 of 2. It has tokens 0, 1, 2 and experts A, B; rank 1 has tokens 3, 4, 5 and C, D)
    1 choose        0B 0C 1A 1B 2D 2A         0B: token 0 goes to expert B. All-gather of counts
    2 sort          1A 2A 0B 1B | 0C 2D       by expert, so by rank: the last two are rank 1's
    3 all-to-all    1A 2A 0B 1B | 3A 4B 5B    the last three have come from rank 1
    4 compute       1A 2A 3A | 0B 1B 4B 5B    A computes its three, B its four
    Outputs go the same way back: order of line 3, all-to-all, order of line 2. They are summed by token.

Memory (bytes on each of N ranks; an expert has U parameters, M blocks have X each; D all else)
    parameters    w(D+MXU/e)        w = 4 in fp32, 2 in bf16
    parameters    +4(D+MXU/e)       with --dtype bf16: master weights
    gradients     4(D+MXU/e)        fp32 in the update
    optimizer     8(D+MXU/e)        AdamW's two moments. (e = 1 for the naive version)

Sent (bytes, by each rank in each step of k microbatches, each of b sequences of s tokens on all ranks)
    all-to-all    4wkM(tbsh/N)(e-1)/e           on average; 2 in forward, 2 in backward; h width
    all-gather    8kMX(N-1)                     how many tokens of each rank chose each expert, in 8 bytes
    all-reduce    2w(D(N-1)+MXU(N-e)/e)/N       gradients; an expert's among the N/e ranks that have it

Run
    torchrun --nproc_per_node=2 more/expert_parallel.py    # add --naive: all experts on each rank
    torchrun --nproc_per_node=8 more/expert_parallel.py --size gpt2 --experts 64 --dtype bf16

Left out
    A capacity, beyond which an expert's tokens are dropped; balancing by a bias (arXiv 2408.15664).
    Overlap, as in ddp.py. Without --dtype fp64, runs on other numbers of ranks may drift apart: where two
    experts are about equally probable, rounding decides which one gets the token.
"""

import argparse
import math
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # not used, but if torch imports it later, processes may crash at exit
import torch.nn as nn
import torch.nn.functional as F

FLAGS = {"naive": False, "experts": 8, "top-k": 2, "ep": 0, "balance": 0.01}


def naive(experts, tokens, gates, chosen):
    """Each rank has all experts, and each of them computes the rank's tokens that chose it."""
    mixed = torch.zeros_like(tokens)
    for i, expert in enumerate(experts):
        row, place = torch.where(chosen == i)  # the host waits for their number
        mixed.index_add_(0, row, expert(tokens[row]) * gates[row, place, None])
    return mixed


# It has two costs. Each rank holds all experts, most of the model, and the gradients of all of them travel.
# And an expert gets few tokens at a time, so a GPU is not busy. Below, an expert gets those of e ranks.


class MoE(nn.Module):
    """A mixture of experts in place of an MLP: (..., h) -> (..., h)."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.top_k
        self.is_naive = config.naive
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleDict()
        for i in range(config.experts):
            up = nn.Linear(config.width, 4 * config.width)
            down = nn.Linear(4 * config.width, config.width)
            self.experts[str(i)] = nn.Sequential(up, nn.GELU(), down)

    def keep_own_experts(self, group):
        self.group = group
        n_own = len(self.experts) // dist.get_world_size(group)
        for i in range(len(self.experts)):
            if i // n_own != dist.get_rank(group):
                del self.experts[str(i)]

    def forward(self, x):
        tokens = x.flatten(0, -2)  # (n, h)
        probs = self.router(tokens).softmax(-1, dtype=wide(x.dtype))  # (n, X)
        gates, chosen = probs.topk(self.top_k)  # (n, t)
        if self.top_k > 1:  # a single gate would become 1: no gradient of the model's loss for the router
            gates = gates / gates.sum(-1, keepdim=True)
        gates = gates.to(x.dtype)
        load, counts = self.all_gather_counts(chosen)
        self.balance_loss = self.balance(probs, load)
        if self.is_naive:
            return naive(self.experts.values(), tokens, gates, chosen).view_as(x)
        by_expert = chosen.flatten().argsort()  # line 2; choice c is of token c // t
        token = by_expert // self.top_k
        outputs = self.run_experts(tokens[token], counts)
        outputs = outputs * gates.flatten()[by_expert, None]
        return torch.zeros_like(tokens).index_add_(0, token, outputs).view_as(x)

    def all_gather_counts(self, chosen):
        """How many tokens chose each expert, (X,); and of each rank, (N, X), for the sizes of messages."""
        own_counts = F.one_hot(chosen.flatten(), self.router.out_features).sum(0)
        counts = own_counts.new_empty(dist.get_world_size(), len(own_counts))
        dist.all_gather(list(counts), own_counts)
        return counts.sum(0), counts.cpu()  # here the host waits

    def balance(self, probs, load):  # 1 if all experts have equally many tokens; at most X/t
        share = load.to(probs.dtype) / load.sum().clamp(min=1)  # a constant; 1: there may be no token at all
        # The gradient lowers the probabilities of the experts with many tokens, and raises the others.
        return len(share) * share @ probs.sum(0) / max(len(probs), 1)

    def run_experts(self, rows, counts):
        """Sends rows, in order 2, to their experts' ranks, and returns the experts' outputs in that order."""
        rank, ep = dist.get_rank(self.group), dist.get_world_size(self.group)
        counts = counts[dist.get_process_group_ranks(self.group)]  # of this group's tokens
        counts = counts.view(ep, ep, -1)  # (from rank, to rank, which of its experts)
        to_ranks = counts[rank].sum(1).tolist()
        arriving = counts[:, rank]  # (from rank, own expert)
        from_ranks = arriving.sum(1).tolist()
        rows = AllToAll.apply(rows, to_ranks, from_ranks, self.group)  # order 3
        pieces = list(rows.split(arriving.flatten().tolist()))  # one for each rank and own expert
        for i, expert in enumerate(self.experts.values()):
            own = slice(i, None, len(self.experts))  # one piece from each rank
            output = expert(torch.cat(pieces[own]))  # order 4; run even if empty: it must have a gradient
            pieces[own] = output.split(arriving[:, i].tolist())
        return AllToAll.apply(torch.cat(pieces), from_ranks, to_ranks, self.group)


class AllToAll(torch.autograd.Function):
    """Sends the first sent[0] rows to rank 0, the next sent[1] to rank 1; gets received[0] from rank 0 ..."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.backward_args = received, sent, group  # gradients go the other way
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows, received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous(), *ctx.backward_args), None, None, None


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check(config, world_size)
    ranks = torch.arange(world_size).view(-1, config.ep)  # a row has all experts, a column the same ones
    ep_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    replicas, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    model = GPT(config, MoEBlock)  # with all experts, so that any number of ranks has the same weights
    mixtures = [block.moe for block in model.blocks]
    for moe in mixtures:
        moe.keep_own_experts(ep_group)
    model.to(device)
    experts = [param for moe in mixtures for param in moe.experts.parameters()]
    dense = [param for name, param in model.named_parameters() if ".experts." not in name]
    params = dense + experts
    optimizer = MasterWeights(params, config.lr)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for microbatch in microbatches(config, step, device):  # of all ranks: it is split below
            inputs, targets = (part.chunk(world_size)[rank] for part in microbatch)
            loss = mean_loss(model(inputs), targets)
            balance_loss = sum(moe.balance_loss for moe in mixtures)
            loss = (loss + config.balance * balance_loss) / (config.accum * world_size)
            loss.backward()
            total_loss += loss.detach()  # what is printed has the balance loss in it
        for param in dense:
            dist.all_reduce(param.grad)
        # All-to-alls have brought the gradients of all tokens of a group. Those of other groups are missing.
        for param in experts:
            dist.all_reduce(param.grad, group=replicas)
        squares = squared_norm([param.grad for param in experts])
        dist.all_reduce(squares, group=ep_group)  # its ranks have different experts; groups have the same
        norm = (squared_norm([param.grad for param in dense]) + squares).sqrt()
        nn.utils.clip_grads_with_norm_(params, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
        dist.all_reduce(total_loss)
        print_step(config, step, total_loss, norm, started)
    if config.save:
        states = [None] * world_size if rank == 0 else None
        dist.gather_object(model.cpu().state_dict(), states)  # each has its own experts, by their numbers
        if rank == 0:
            torch.save({name: weight for state in states for name, weight in state.items()}, config.save)


def check(config, world_size):
    most = math.gcd(world_size, config.experts)
    config.ep = 1 if config.naive else config.ep or most  # 0: as many as can be
    if config.ep < 1 or most % config.ep:
        sys.exit(f"--ep {config.ep}: must divide the {world_size} ranks and --experts {config.experts}")
    if not 1 <= config.top_k <= config.experts:
        sys.exit(f"--top-k {config.top_k}: must be from 1 to --experts {config.experts}")
    if config.batch % (config.accum * world_size):
        sys.exit(f"--batch {config.batch}: must be a multiple of --accum x {world_size} ranks")


class MasterWeights:
    """AdamW on fp32 copies of bf16 weights: bf16 alone would round small updates away."""

    def __init__(self, params, lr):
        self.params = list(params)
        # For fp32 weights, to() makes no copy: these are the weights themselves.
        self.masters = [param.detach().to(wide(param.dtype)) for param in self.params]
        self.adamw = torch.optim.AdamW(self.masters, lr, fused=True)

    @torch.no_grad()
    def step(self):
        for param, master in zip(self.params, self.masters):
            master.grad = param.grad.to(master.dtype)
            param.grad = None
        self.adamw.step()
        self.adamw.zero_grad()
        torch._foreach_copy_(self.params, self.masters)


# ==== toy model: the same lines in every lesson ====
SHAPE = "layers heads width context vocab".split()
SIZES = {
    "toy": (8, 8, 64, 64, 256),
    "small": (6, 8, 256, 128, 256),
    "gpt2": (12, 12, 768, 1024, 50304),
    "gpt2-xl": (48, 25, 1600, 1024, 50304),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def read_flags(own, arguments=None):
    """The flags of all lessons, and its own: {name: default}. A tuple lists choices, the default first."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--size", default="toy", choices=SIZES)
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=int, help="overrides --size")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="bf16: with an optimizer in fp32")
    parser.add_argument("--data", default=np.ma.core.__file__, help="any file: a byte is a token")
    parser.add_argument("--steps", default=20, type=int)
    parser.add_argument("--batch", default=16, type=int, help="sequences in a step, on all ranks together")
    parser.add_argument("--accum", default=1, type=int, help="microbatches in a step, on each rank")
    parser.add_argument("--lr", default=1e-3, type=float)
    parser.add_argument("--clip", default=1.0, type=float, help="the largest norm of the gradient")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--save", default="", help="a file for the trained weights")
    for name, default in own.items():
        if isinstance(default, tuple):
            parser.add_argument(f"--{name}", default=default[0], choices=default)
        elif default is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", default=default, type=type(default))
    config = parser.parse_args(arguments)
    for name, value in zip(SHAPE, SIZES[config.size]):
        if getattr(config, name) is None:
            setattr(config, name, value)
    if config.width % config.heads:
        parser.error(f"--width {config.width}: must be a multiple of --heads {config.heads}")
    if not os.path.isfile(config.data) or os.path.getsize(config.data) <= config.context:
        parser.error(f"--data {config.data}: no such file, or no more bytes than --context")
    if not os.path.isdir(os.path.dirname(config.save) or "."):
        parser.error(f"--save {config.save}: no such folder")
    return config


def join_world():
    """Meet the other ranks: over NCCL if there are GPUs, else over gloo. Returns this rank's device."""
    if "RANK" not in os.environ:  # not started by torchrun: the only rank
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(int(os.getenv("LOCAL_RANK", 0)) % gpus)
        if int(os.getenv("LOCAL_WORLD_SIZE", 1)) > gpus:  # to share one, each must seem a host of its own
            os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])
    dist.init_process_group("nccl" if gpus else "gloo")
    return torch.device("cuda" if gpus else "cpu")


def microbatches(config, step, device, rank=0, replicas=1):
    """A rank's --accum pairs (inputs, targets), each (b, s). The batch is the same on any number of ranks."""
    b, rest = divmod(config.batch, replicas * config.accum)
    if rest:
        sys.exit(f"--batch {config.batch}: must be a multiple of its microbatches, {replicas * config.accum}")
    text = np.memmap(config.data, np.uint8, "r")
    random = np.random.default_rng((config.seed, step))
    starts = random.integers(len(text) - config.context, size=(replicas, config.accum, b, 1))[rank]
    tokens = torch.from_numpy(text[starts + np.arange(config.context + 1)]).to(device).long()
    return zip(tokens[..., :-1], tokens[..., 1:])


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x):  # (b, s, h) -> (b, s, h)
        x = x + self.proj(self.attention(self.qkv(self.norm1(x))))
        return x + self.mlp(self.norm2(x))

    def attention(self, qkv):  # (b, s, 3h) -> (b, s, h)
        qkv = qkv.unflatten(-1, (3, self.heads, -1))
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))  # (b, heads, s, h / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).flatten(2)

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self, config, block=Block):
        super().__init__()
        torch.manual_seed(config.seed)  # so that all ranks start from the same weights
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)
        self.to(DTYPES[config.dtype])

    def forward(self, tokens):  # (b, s) -> logits (b, s, v)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def embed(self, tokens):  # (b, s) -> (b, s, h)
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]

    def head(self, x):  # (b, s, h) -> (b, s, v); reuses the embedding's weight
        return F.linear(self.norm(x), self.tokens.weight)


def wide(dtype):  # fp32 for bf16, else the same
    return torch.promote_types(dtype, torch.float32)


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).to(wide(logits.dtype)), targets.flatten())


def squared_norm(grads):  # of all gradients; ranks can add up squares; in fp64, as bf16 would round them
    return torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).square().sum()


def print_step(config, step, loss, norm, started):
    loss, norm = loss.item(), norm.item()  # here, once a step, the host waits for the device
    if dist.get_rank() == 0:
        ms = 1e3 * (time.perf_counter() - started)
        print(f"step {step:2}/{config.steps} | loss {loss:.4f} | grad norm {norm:.3f} | {ms:.1f} ms")


# ==== end of the toy model ====


class MoEBlock(Block):
    def __init__(self, config):
        super().__init__(config)
        del self.up, self.down
        self.moe = MoE(config)

    def mlp(self, x):
        return self.moe(x)


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
