"""Expert parallelism: each token is computed by a few of many MLPs, and these are spread over the ranks.

Idea
    A mixture of experts has X MLPs where a block had one. A router, a small linear layer, gives each token a
    probability for every expert, and sends it to the t most probable. Their outputs are added up, weighted by
    gates, which are these probabilities (arXiv 1701.06538). So a layer has X times the parameters of an MLP,
    but computes only t times as much.

    The experts are spread over a group of e ranks (--ep), X/e on each. An all-to-all takes tokens to the
    ranks of their experts, and another one brings the outputs back (GShard, arXiv 2006.16668).

    A rank whose experts are popular makes the others wait. So a loss pushes the router towards equal loads
    (Switch, arXiv 2101.03961), counted over the tokens of all ranks (arXiv 2501.11873). With --balance bias,
    a bias for each expert does so instead. It changes the choice, but not the gates (arXiv 2408.15664).

Timeline (rank 0 of 2 has tokens 0-2 and experts A, B; rank 1 has 3-5 and C, D; 0C: token 0 for C; of rank 0)
    1 by token              0B 0C 1A 1B 2D 2A         all-gather of counts
    2 by expert             1A 2A 0B 1B | 0C 2D       all-to-all: 0C and 2D go to rank 1
    3 by rank, by expert    1A 2A 0B 1B | 3A 4B 5B
    4 by expert, by rank    1A 2A 3A | 0B 1B 4B 5B    A and B compute
    5 outputs go back       order 3; all-to-all; order 2; weighted and added up by token; backward: reversed

Memory (bytes; U parameters in an expert, D outside of them; M = (L+1)//2 mixtures in L layers)
    w bytes of a weight: 4 in fp32, 2 in bf16, 8 in fp64; c bytes of its fp32 master: 4 in bf16, else 0
    K bytes of AdamW's two moments: 8, in fp64 16; of SGD 0; m bytes of a gradient: 4, in fp64 8
    parameters    (w+c)(D+MXU/e)
    gradients     (m+cmin(1,k-1)/2)(D+MXU/e)    in bf16, with k > 1 microbatches, bf16 ones beside them
    optimizer     K(D+MXU/e)

Sent (bytes, by each of N ranks in each step of k microbatches, each of b sequences of s tokens on all ranks)
    all-to-all    4wkM(tbsh/N)(e-1)/e           on average, without a --capacity-factor; h width
    all-gather    8kMX(N-1)                     how many tokens of each rank chose each expert
    all-reduce    2m(D(N-1)+MXU(N-e)/e)/N       gradients; experts' among the N/e ranks that have the same

Run
    torchrun --nproc_per_node=2 expert_parallel.py
    torchrun --nproc_per_node=8 expert_parallel.py --size gpt2 --experts 64 --dtype bf16 --capacity-factor 2
    To compare runs on different numbers of ranks, use --dtype fp64: where two experts' scores are equal up to
    rounding, rounding decides which of them a token goes to, and from there on the runs differ.

Left out
    The router's z-loss and noise. Experts compute one after the other, not in a grouped product. All-to-alls
    and all-reduces do not overlap with computation. The host waits for the counts in each mixture and
    microbatch, as the sizes of messages depend on them; programs that must not wait use fixed shapes.
    Not noticed: ranks with other numbers of tokens; a wrapper around an MoE, such as DDP, which gives the
    experts of rank 0 to all ranks.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # first: if torch.optim imports it later, the process group is never freed
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call


class MoE(nn.Module):
    """Mixture of `experts` MLPs, spread over a group. x (..., h) -> (..., h), the same shape on all ranks.

    Sets load (X,), how many tokens of all ranks chose each expert; dropped, the share of choices beyond an
    expert's capacity; and balance_loss, whose mean over ranks is 1 if all are equally busy (2101.03961, 2.2).
    It chooses by probability plus bias (X,), a buffer to be kept in fp32, which train() updates.
    """

    def __init__(self, width, hidden, experts, top_k, group=None, capacity_factor=math.inf):
        super().__init__()
        if experts % dist.get_world_size(group) or top_k > experts:
            raise ValueError(f"{experts} experts: must be a multiple of the group's ranks, at least top_k")
        self.top_k = top_k
        self.group = group
        self.capacity_factor = capacity_factor
        self.router = nn.Linear(width, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts))
        self.experts = nn.ModuleDict()  # this rank's
        for i in range(experts):
            # Every rank draws the weights of all, so that they do not depend on the world size.
            mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            if i * dist.get_world_size(group) // experts == dist.get_rank(group):
                self.experts[str(i)] = mlp

    def forward(self, x):
        tokens = x.flatten(0, -2)  # (bs/N, h)
        wide = torch.promote_types(x.dtype, torch.float32)
        probs = self.router(tokens).softmax(-1, dtype=wide)  # (bs/N, X)
        _, chosen = (probs + self.bias).topk(self.top_k)  # (bs/N, t)
        gates = probs.gather(-1, chosen)  # without the bias
        if self.top_k > 1:  # a lone gate must stay the probability, or the router gets no gradient
            gates = gates / gates.sum(-1, keepdim=True)
        chosen = chosen.flatten()  # order 1: choice j of token i is at i * t + j
        counts = self.all_gather_counts(chosen)
        kept = self.cut_to_capacity(counts)
        total = counts.sum()
        self.dropped = 1 - kept.sum() / total
        share = self.load.to(probs) / total
        even = 1 / len(share)
        self.balance_loss = share @ probs.mean(0) / even

        rank = dist.get_rank()
        by_expert = chosen.argsort(stable=True)  # order 2: indices of choices
        parts = by_expert.split(counts[rank].tolist())
        choices = torch.cat([part[:places] for part, places in zip(parts, kept[rank])])
        token_ids = choices // self.top_k
        outputs = self.run_experts(tokens[token_ids], kept)
        gates = gates.flatten().to(x.dtype)
        outputs = outputs * gates[choices, None]
        mixed = torch.zeros_like(tokens).index_add_(0, token_ids, outputs)
        return mixed.view_as(x)

    def all_gather_counts(self, chosen):
        """How many tokens of each rank chose each expert: (N, X), on the host, which waits for it."""
        own_counts = chosen.new_zeros(self.router.out_features)
        own_counts.scatter_add_(0, chosen, torch.ones_like(chosen))  # for bincount() the host would wait
        counts = own_counts.new_empty(dist.get_world_size(), len(own_counts))
        dist.all_gather(list(counts), own_counts)  # of the world: balance and capacity are over all tokens
        self.load = counts.sum(0)
        return counts.cpu()

    def cut_to_capacity(self, counts):
        """Cut counts (N, X) to the capacity: lower ranks, and in forward() earlier tokens, come first."""
        mean = counts.sum() / counts.shape[1]
        capacity = (self.capacity_factor * mean).ceil().clamp(min=4)  # 4: DeepSpeed's default min_capacity
        taken = counts.cumsum(0) - counts  # by tokens of earlier ranks
        left = (capacity - taken).clamp(min=0)
        return left.minimum(counts).long()

    def run_experts(self, rows, kept):
        """Send rows (order 2) to their experts' ranks, run the experts, return outputs in the same order."""
        ranks = dist.get_process_group_ranks(self.group)
        group_rank = dist.get_rank(self.group)
        counts = kept[ranks]
        counts = counts.unflatten(1, (len(ranks), -1))  # (from rank, to rank, expert there)
        expert_counts = counts[:, group_rank]  # (from rank, this rank's expert)
        sent = counts[group_rank].sum(1).tolist()
        received = expert_counts.sum(1).tolist()
        rows = AllToAll.apply(rows, sent, received, self.group)  # order 3
        pieces = list(rows.split(expert_counts.flatten().tolist()))
        for i, expert in enumerate(self.experts.values()):
            own = slice(i, None, len(self.experts))  # of the pieces: one from each rank
            output = expert(torch.cat(pieces[own]))  # order 4; run even if empty: .grad must not be None
            pieces[own] = output.split(expert_counts[:, i].tolist())
        outputs = torch.cat(pieces)  # order 3
        return AllToAll.apply(outputs, received, sent, self.group)


class AllToAll(torch.autograd.Function):
    """Send rank i the next sent[i] rows, and receive received[i] from it. Backward: the other way round."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.back = received, sent, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows, received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous(), *ctx.back), None, None, None


def replace_mlps(model, config, group):
    """Replace the MLP of every other block by a mixture. Returns the mixtures."""
    mixtures = []
    for block in model.blocks[::2]:
        hidden, width = block.up.weight.shape
        del block.up, block.down
        block.up = block.down = torch.zeros_like  # an MLP that adds nothing
        block.moe = MoE(width, hidden, config.experts, config.top_k, group, config.capacity_factor)
        block.register_forward_hook(add_mixture)
        mixtures.append(block.moe)
    return mixtures


def add_mixture(block, inputs, x):
    """Called with a block's output; what it returns takes its place."""
    return x + block.moe(block.norm2(x))


def train(config):
    """Train with these flags. In bf16 `weights` are casts, whose graph each backward can use again."""
    device, text, ep_group, expert_dp_group = set_up_groups(config)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtype = DTYPES[config.dtype]
    model = GPT(config)
    mixtures = replace_mlps(model, config, ep_group)
    model.to(device, torch.promote_types(dtype, torch.float32))
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        batches = microbatches(config, text, step, device)  # all ranks': capacity is filled in their order
        weights = {name: param.to(dtype) for name, param in model.named_parameters()}
        loss = loads = 0
        for batch in batches:
            inputs, targets = (part.chunk(world_size)[rank] for part in batch)
            microloss = mean_loss(functional_call(model, weights, inputs), targets)
            loss += microloss.detach() / config.accum
            total = microloss + config.loss_weight * sum(moe.balance_loss for moe in mixtures)
            (total / config.accum).backward()
            loads += torch.stack([moe.load for moe in mixtures])  # (M, X)
        grad_norm = average_gradients(model, ep_group, expert_dp_group, config.clip)
        optimizer.step()
        for moe, load in zip(mixtures, loads):
            moe.bias += config.bias_rate * (load.double().mean() - load).sign()
        model.zero_grad()
        dist.all_reduce(loss)
        print_step(config, step, loss / world_size, grad_norm, started)
    if rank == 0:
        print_loads(mixtures, loads)  # of the last step
    if config.save:
        save(model.to("cpu", dtype), config.save)


def print_loads(mixtures, loads):
    """Print mixtures' loads (M, X), MaxVio = max / mean - 1 (arXiv 2408.15664), last microbatch's drops."""
    for moe, load in zip(mixtures, loads.tolist()):
        max_vio = max(load) / np.mean(load) - 1
        print(f"tokens per expert {load} | MaxVio {max_vio:.2f} | dropped {moe.dropped:.1%}")


def average_gradients(model, ep_group, expert_dp_group, max_norm):
    """Make each .grad the mean over ranks, which have equally many tokens, and clip it. Returns the norm."""
    squares = {"experts": 0, "others": 0}
    for name, param in model.named_parameters():
        kind = "others"
        replicas = None  # the world
        if ".experts." in name:
            kind = "experts"
            replicas = expert_dp_group
        if dist.get_world_size(replicas) > 1:
            dist.all_reduce(param.grad, group=replicas)
        param.grad /= dist.get_world_size()  # experts', too: they are sums over the tokens of all ranks
        squares[kind] += param.grad.square().sum()
    dist.all_reduce(squares["experts"], group=ep_group)
    norm = sum(squares.values()).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def save(model, path):
    """Write the state_dict of a model with all experts: rank 0's, with those of the others."""
    states = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(model.state_dict(), states, group=dist.new_group(backend="gloo"))
    if states:
        for state in states[1:]:
            states[0].update(state)
        save_weights(states[0], path)


def set_up_groups(config):
    """Check the flags and join. Returns device, text, the ranks that share experts, and those with ours."""
    world_size = int(os.getenv("WORLD_SIZE") or 1)
    largest_ep = math.gcd(world_size, config.experts)
    config.ep = config.ep or largest_ep
    config.bias_rate = 0.005 if config.balance == "bias" else 0  # the paper's 0.001 is for longer runs
    config.loss_weight = 0 if config.bias_rate else config.balance
    if largest_ep % config.ep:
        refuse(f"--ep {config.ep}: must divide the {world_size} ranks and --experts {config.experts}")
    if config.top_k > config.experts:
        refuse(f"--top-k {config.top_k}: must be at most --experts {config.experts}")
    device, text = set_up(config, f" | {config.experts} experts, top {config.top_k} | ep {config.ep}")
    ranks = np.arange(world_size).reshape(-1, config.ep)  # a row has all experts, a column the same
    expert_dp_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    ep_group, _ = dist.new_subgroups(config.ep)
    return device, text, ep_group, expert_dp_group


def bias_or_weight(text):
    """A value of --balance."""
    if text == "bias":
        return text
    return float(text)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--experts", type=int, default=8, help="in every other block")
    own.add_argument("--top-k", type=int, default=2, help="experts of a token")
    own.add_argument(
        "--ep",
        type=int,
        help="ranks that share the experts (default: the most that divides ranks and experts)",
    )
    own.add_argument(
        "--capacity-factor",
        type=float,
        default=math.inf,
        help="an expert's places over the mean tokens of an expert; at least 4 places (inf: any)",
    )
    own.add_argument(
        "--balance", type=bias_or_weight, default=0.01, help="weight of the load-balance loss, or bias"
    )
    return read_flags(arguments, own, capacity_factor=(0, math.inf), balance=(0, 1e9))


# ==== toy model: the same lines in every lesson ====
SHAPE = "layers heads width context vocab".split()
SIZES = {"toy": "8 8 64 64 256", "small": "6 8 256 128 256", "gpt2": "12 12 768 1024 50304",
         "gpt2-xl": "48 25 1600 1024 50304", "7.5b": "32 34 4352 2048 50304"}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
CHOICES = {"size": SIZES, "optim": OPTIMIZERS, "dtype": DTYPES, "device": "auto cpu cuda".split()}
DEFAULTS = {"size": "toy", "optim": "adamw", "dtype": "fp32", "device": "auto", "data": np.ma.core.__file__,
            "steps": 20, "batch": 16, "accum": 1, "lr": 1e-3, "clip": 1.0, "seed": 0, "save": ""}  # fmt: skip
HELP = "--batch: of all ranks; --accum: microbatches of a rank; --clip inf: any norm; --data: file or folder"


def read_flags(arguments, *own, **limits):  # own: other parsers. limits: {name: (least, most)}
    parser = argparse.ArgumentParser(parents=own, epilog=f"{HELP}; defaults: {DEFAULTS}, and --size's shape")
    parser.error = refuse
    for name, default in (DEFAULTS | dict.fromkeys(SHAPE, 0)).items():  # 0: that of --size
        parser.add_argument(f"--{name}", default=default, type=type(default), choices=CHOICES.get(name))
    parser.set_defaults(**dict(zip(SHAPE, SIZES[parser.parse_args(arguments).size].split())))
    config = parser.parse_args(arguments)
    limits |= {"lr": (0, 1e9), "clip": (1e-9, torch.inf), "seed": (0, 1e18), "vocab": (256, 1_048_576)}
    for name, value in vars(config).items():
        least, most = limits.get(name, (1, 1_048_576))
        if type(value) in (int, float) and not least <= value <= most:
            refuse(f"--{name.replace('_', '-')} {value}: must be from {least} to {most}")
    return config


def refuse(problem):  # in a line on rank 0, for which the others wait, else torchrun may end it first
    if os.getenv("RANK", "") in "0":  # or it is not set
        sys.stderr.write(f"{Path(__file__).name}: {problem}\n")
    else:
        time.sleep(5)
    raise SystemExit(2)


def set_up(config, choices="", replicas=None):  # check, and join the world; returns device and text
    replicas = replicas or int(os.getenv("WORLD_SIZE") or 1)
    if config.batch % (replicas * config.accum):
        refuse(f"--batch {config.batch}: must be a multiple of replicas x --accum, {replicas * config.accum}")
    if config.width % config.heads:
        refuse(f"--width {config.width}: must be a multiple of --heads {config.heads}")
    gpus = torch.cuda.device_count() * (config.device != "cpu")
    if config.device == "cuda" and not gpus:
        refuse("--device cuda: no GPU is visible here; use --device cpu")
    try:  # a file is missing, or a variable of the environment
        files = sorted(filter(Path.is_file, Path(config.data).rglob("*"))) or [Path(config.data)]
        if not config.context < sum(map(os.path.getsize, files)) <= 2e9:
            refuse(f"--data {config.data}: must have more bytes than --context {config.context}, at most 2e9")
        text = bytearray().join(map(Path.read_bytes, files))
        open(config.save or "/dev/null", "ab").close()
        device = torch.device(f"cuda:{int(os.getenv('LOCAL_RANK', 0)) % gpus}" if gpus else "cpu")
        torch.cuda.set_device(device if gpus else -1)  # -1: none
        if not dist.is_initialized():
            if 0 < gpus < int(os.getenv("LOCAL_WORLD_SIZE", 1)):  # ranks share a GPU
                os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])  # NCCL refuses it on one host
            alone = () if {"RANK", "WORLD_SIZE"} & set(os.environ) else (None, None, 1, 0, dist.HashStore())
            dist.init_process_group("nccl" if gpus else "gloo", *alone)
    except (OSError, ValueError) as error:
        refuse(f"{error}; check --data {config.data} and --save {config.save}, or start it with torchrun")
    if not dist.get_rank():
        world = f"{dist.get_world_size()} ranks {dist.get_backend()}/{device.type}"
        batch = f"{config.batch} = {replicas} x {config.accum} x {config.batch // replicas // config.accum}"
        print(f"{Path(__file__).stem} | {world} | {config.size} {config.dtype} | batch {batch}{choices}")
    torch.manual_seed(config.seed)
    return device, torch.frombuffer(text, dtype=torch.uint8)


def microbatches(config, text, step, device, rank=0, replicas=1):  # (inputs, targets), int64 (b, s)
    windows = text.unfold(0, config.context + 1, 1)  # every (s + 1) bytes in a row, a view
    starts = np.random.default_rng((config.seed, step)).integers(len(windows), size=config.batch)
    tokens = windows[starts.reshape(replicas, config.accum, -1)[rank]].to(device, non_blocking=True).long()
    return zip(tokens[..., :-1], tokens[..., 1:])


class Block(nn.Module):  # pre-norm, with a heads: (b, s, h) -> (b, s, h)
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (b, s, 3, a, h/a)
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # (b, a, s, h/a) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):  # tokens (b, s) -> logits (b, s, v); the head is the embedding
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.heads, config.width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def mean_loss(logits, targets):  # mean cross-entropy, in fp32 or fp64
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())


def print_step(config, step, loss, grad_norm, started):  # each .item() waits for the device: once a step
    line = f"step {step:>2}/{config.steps} | loss {loss.item():.4f} | grad norm {grad_norm.item():.3f}"
    ms = 1e3 * (time.perf_counter() - started)
    if not dist.get_rank():
        print(f"{line} | {ms:.1f} ms | {config.batch * config.context / ms:.1f} k tok/s")


def save_weights(state_dict, path):  # at the end, on rank 0
    try:
        torch.save(state_dict, path)
    except (OSError, RuntimeError):
        refuse(f"--save {path}: cannot be written; is the disk full?")


# ==== end of the toy model ====


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
