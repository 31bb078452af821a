"""ZeRO-3 with experts: dense weights are sharded over all ranks, experts over ranks with the same ones.

Idea
    In expert_parallel.py, groups of e ranks (--ep) split the X experts of a block, and tokens travel to them.
    All other weights are called dense. In zero3.py, each rank keeps a part of every weight, the shard, and
    gathers weights just before they are used. Here are both. Of N ranks only N/e have the same experts,
    so there are two kinds of groups (arXiv 2504.14960). With N = 8, e = 4, and experts A to H:

    Rank              0      1      2      3      4      5      6      7
    Shard of dense    1/8    1/8    1/8    1/8    1/8    1/8    1/8    1/8      gathered from all ranks
    Shard of experts  1/2AB  1/2CD  1/2EF  1/2GH  1/2AB  1/2CD  1/2EF  1/2GH    AB from ranks 0 and 4

    ZeRO-3 is one autograd function, Gather: an all-gather of weights in forward, a reduce-scatter of their
    gradients in backward. (As in SimpleFSDP, arXiv 2411.00284.) Due to note(), autograd keeps no weights.

Timeline (a block's forward; backward is in reverse order: gather again, compute, reduce-scatter)
      compute |              | attention |                | router |            | experts |
      network | gather dense |           | gather experts |        | all-to-all |         | all-to-all

Memory (bytes on each of N ranks; M blocks have X experts of U parameters; D dense: E outside, V in a block)
    parameters    4(D+MXU)/N+w(E+V+XU/e)         the shards, and what is gathered (w = 4 in fp32, 2 in bf16)
    gradients     4(D+MXU)/N+w(E+XU(2/e+1/N))    shards; the head's, until the embedding's; experts': 2 copies
    optimizer     8(D+MXU)/N                     AdamW's two moments

Sent (bytes, by each rank in each step of k microbatches, each of b sequences of s tokens on all ranks)
    all-gather        2kw(D(N-1)+MXU(N-e)/e)/N+8kMX(e-1)    weights, twice; counts of tokens per expert
    reduce-scatter    kw(D(N-1)+MXU(N-e)/e)/N
    all-to-all        4wkM(tbsh/N)(e-1)/e                   on average; t experts of a token, h width

Run (naive: --ep 1, each rank gathers all experts, for few tokens. If --ep is N, experts are not sharded)
    torchrun --nproc_per_node=4 more/expert_zero.py --ep 2

Left out
    zero3.py's overlap. Checkpoints in a block. The balance loss, and what expert_parallel.py leaves out.
"""

import argparse
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # not used, but if torch imports it later, processes may crash at exit
import torch.nn as nn
import torch.nn.functional as F

FLAGS = {"experts": 8, "top-k": 2, "ep": 0}
# Before torch 2.13 these had other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Unit(nn.Module):
    """A module whose weights are here only while they are used. Each rank of a group keeps 1/n, the shard."""

    def __init__(self, module, part, device, group):
        super().__init__()
        self.module, self.group = module, group
        # All weights in this part of the module, but those that inner units have taken, which are empty now.
        params = {name: p for name, p in module.named_parameters() if name.startswith(part) and p.numel()}
        self.shapes = {name: param.shape for name, param in params.items()}
        self.sizes = [param.numel() for param in params.values()]
        own = self.flatten(list(params.values())).chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.dtype = own.dtype
        self.shard = own.to(device, wide(self.dtype), copy=True).requires_grad_()  # the optimizer updates it
        self.flat = None  # all weights, while they are here
        for param in params.values():
            param.data = param.new_empty(0)

    def flatten(self, tensors):
        padding = tensors[0].new_zeros(-sum(self.sizes) % dist.get_world_size(self.group))  # for equal shards
        return torch.cat([*(tensor.detach().flatten() for tensor in tensors), padding])

    def forward(self, x):
        weights = dict(zip(self.shapes, Gather.apply(self.shard, self)))
        output = torch.func.functional_call(self.module, weights, x)  # with these in place of its own
        self.flat = None  # frees them, at return
        return output

    def gather(self):
        self.flat = self.shard.new_empty(len(self.shard) * dist.get_world_size(self.group), dtype=self.dtype)
        self.flat.untyped_storage().unit = self  # note() finds it through any view
        own = self.flat.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        own.copy_(self.shard.detach())
        all_gather(self.flat, own, group=self.group)


class Gather(torch.autograd.Function):
    """Forward turns a unit's shards into its weights, backward their gradients into those of the shards."""

    @staticmethod
    def forward(ctx, shard, unit):
        ctx.unit = unit
        unit.gather()
        parts = unit.flat[: sum(unit.sizes)].split(unit.sizes)
        return tuple(part.view(shape) for part, shape in zip(parts, unit.shapes.values()))

    @staticmethod
    def backward(ctx, *gradients):
        unit = ctx.unit
        unit.flat = None
        received = torch.empty_like(unit.shard, dtype=unit.dtype)
        reduce_scatter(received, unit.flatten(gradients), group=unit.group)  # in one order on all ranks
        return received.to(unit.shard.dtype), None


def note(tensor):
    """What autograd saves in place of a tensor: for a weight, its unit and place, so that it can be freed."""
    unit = getattr(tensor.untyped_storage(), "unit", None)
    if unit is None:  # not a weight but an activation
        return tensor.detach(), tensor._version  # with hooks, autograd itself checks no versions
    return unit, tensor.size(), tensor.stride(), tensor.storage_offset()


def restore(kept):
    if isinstance(kept[0], Unit):
        if kept[0].flat is None:
            kept[0].gather()
        return kept[0].flat.as_strided(*kept[1:])
    assert kept[0]._version == kept[1], "modified in place, but backward needs the original"
    return kept[0]


class MoE(nn.Module):
    """A mixture of experts in place of an MLP: (..., h) -> (..., h)."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.top_k
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
        if self.top_k > 1:  # a single gate would become 1: no gradient for the router
            gates = gates / gates.sum(-1, keepdim=True)
        by_expert = chosen.flatten().argsort()  # choices, by expert; choice c is of token c // t
        token = by_expert // self.top_k
        outputs = self.run_experts(tokens[token], self.all_gather_counts(chosen))
        outputs = outputs * gates.to(x.dtype).flatten()[by_expert, None]
        return torch.zeros_like(tokens).index_add_(0, token, outputs).view_as(x)

    def all_gather_counts(self, chosen):  # how many tokens of each rank chose each expert, (e, X)
        own_counts = F.one_hot(chosen.flatten(), self.router.out_features).sum(0)
        counts = own_counts.new_empty(dist.get_world_size(self.group), len(own_counts))
        dist.all_gather(list(counts), own_counts, group=self.group)
        return counts.cpu()  # here the host waits

    def run_experts(self, rows, counts):
        """Sends rows, sorted by expert, to their experts' ranks, and returns the outputs in that order."""
        rank, ep = dist.get_rank(self.group), dist.get_world_size(self.group)
        counts = counts.view(ep, ep, -1)  # (from rank, to rank, which of its experts)
        to_ranks = counts[rank].sum(1).tolist()
        arriving = counts[:, rank]  # (from rank, own expert)
        from_ranks = arriving.sum(1).tolist()
        rows = AllToAll.apply(rows, to_ranks, from_ranks, self.group)  # now by rank, then by expert
        pieces = list(rows.split(arriving.flatten().tolist()))  # one for each rank and own expert
        for i, expert in enumerate(self.experts.values()):
            own = slice(i, None, len(self.experts))  # one piece from each rank
            output = expert(torch.cat(pieces[own]))  # even if empty: all backwards must gather alike
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
    config.ep = config.ep or (1 if world_size % 2 or config.experts % 2 else 2)
    if config.ep < 1 or world_size % config.ep or config.experts % config.ep:
        sys.exit(f"--ep {config.ep}: must divide the {world_size} ranks and --experts {config.experts}")
    if not 1 <= config.top_k <= config.experts:
        sys.exit(f"--top-k {config.top_k}: must be from 1 to --experts {config.experts}")
    ranks = torch.arange(world_size).view(-1, config.ep)  # a row has all experts, a column the same ones
    ep_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    replicas, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    model = GPT(config, MoEBlock)  # whole, on the host, so that any number of ranks starts alike
    for i, block in enumerate(model.blocks):  # units take what is left by those in them
        block.moe.keep_own_experts(ep_group)
        block.moe = Unit(block.moe, "experts", device, replicas)
        model.blocks[i] = Unit(block, "", device, dist.group.WORLD)
    model = Unit(model, "", device, dist.group.WORLD)
    units = {path: unit for path, unit in model.named_modules() if isinstance(unit, Unit)}
    shards = [unit.shard for unit in units.values()]
    optimizer = torch.optim.AdamW(shards, config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for inputs, targets in microbatches(config, step, device, rank, world_size):
            # An expert's gradient, too, sums over all N ranks: e by all-to-all, N/e by reduce-scatter.
            with torch.autograd.graph.saved_tensors_hooks(note, restore):
                loss = mean_loss(model(inputs), targets) / (config.accum * world_size)
            loss.backward()
            total_loss += loss.detach()
        squares = squared_norm([shard.grad for shard in shards])
        dist.all_reduce(squares)  # each rank has a different part of the gradients
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(shards, config.clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total_loss)
        print_step(config, step, total_loss, norm, started)
    if config.save:
        own = {}  # dense weights, and this rank's experts, by their numbers
        for path, unit in units.items():
            for name, weight in zip(unit.shapes, Gather.apply(unit.shard, unit)):
                own[f"{path}.{name}".replace("module.", "").lstrip(".")] = weight.detach().cpu().clone()
            unit.flat = None
        states = [None] * world_size if rank == 0 else None
        dist.gather_object(own, states)
        if rank == 0:
            torch.save({name: weight for state in states for name, weight in state.items()}, config.save)


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
