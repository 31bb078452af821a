"""Expert parallelism: each token is computed by a few of many MLPs, and these are spread over the ranks.

Idea
    A mixture of experts has X MLPs where a block had one. A router, a small linear layer, gives each token a
    probability for every expert, and sends it to the t most probable. Their outputs are added up, weighted by
    gates: their probabilities, for t > 1 divided by the sum of the t (arXiv 1701.06538). So a layer has X
    times the parameters of an MLP, but computes only t times as much.

    The experts are spread over a group of e ranks (--ep), X/e on each. An all-to-all takes tokens to the
    ranks of their experts, and another one brings the outputs back (GShard, arXiv 2006.16668).

    A rank whose experts are popular makes the others wait. So a loss pushes the router towards equal loads
    (Switch, arXiv 2101.03961), counted over the tokens of all ranks (arXiv 2501.11873). --bias-rate moves a
    bias of each expert towards them, which changes the choice, but not the gates (arXiv 2408.15664).

Timeline (what rank 0 has. Of 2 ranks, 0 has tokens 0, 1, 2 and experts A, B; 1 has 3, 4, 5 and C, D)
    1 by token              0B 0C 1A 1B 2D 2A         0B: token 0, for expert B; all-gather of counts
    2 by expert             1A 2A 0B 1B 0C 2D         all-to-all: 0C and 2D go to rank 1
    3 by rank, by expert    1A 2A 0B 1B | 3A 4B 5B    the last three have come from rank 1
    4 by expert, by rank    1A 2A 3A | 0B 1B 4B 5B    A computes, then B
    The outputs go back: order 3, all-to-all, order 2; then they are weighted and added up by token.
    Backward does all this in reverse.

Memory (bytes; U parameters in an expert, D in all else; M = (L+1)//2 mixtures in L layers)
    w bytes of a weight: 4 in fp32, 2 in bf16, 8 in fp64; c bytes of its fp32 master: 4 in bf16, else 0
    K bytes of AdamW's two moments: 8, in fp64 16; of SGD 0; m bytes of a gradient: 4, in fp64 8
    parameters    (w+c)(D+MXU/e)
    gradients     (m+cmin(1,k-1)/2)(D+MXU/e)    in bf16, with k > 1 microbatches, 2 bytes more for each
    optimizer     K(D+MXU/e)

Sent (bytes, by each of N ranks in each step of k microbatches, each of b sequences of s tokens on all ranks)
    all-to-all    4wkM(tbsh/N)(e-1)/e           4: 2 in forward, 2 in backward; h width; on average, if no
                                                choice is dropped
    all-gather    8kMX(N-1)                     how many tokens of each rank chose each expert
    all-reduce    2m(D(N-1)+MXU(N-e)/e)/N       gradients; experts' among the N/e ranks that have the same

Run
    torchrun --nproc_per_node=2 more/expert_parallel.py
    torchrun --nproc_per_node=8 more/expert_parallel.py --size gpt2 --experts 64 --dtype bf16
    To compare runs on different numbers of ranks, use --dtype fp64: where two experts' scores are equal up to
    rounding, rounding decides which of them a token goes to, and from there on the runs differ.

Left out
    The router's z-loss and noise. Experts compute one after the other, not in a grouped product. All-to-alls
    and all-reduces do not overlap with computation. The host waits for the counts in each mixture and
    microbatch, as the sizes of messages depend on them; programs that must not wait use fixed shapes.
    Activation checkpointing would send a mixture's messages once more. --save in bf16 rounds the biases, too.
    Not noticed: ranks with other seeds or numbers of tokens; a wrapper around an MoE, such as DDP, which
    gives rank 0's experts to all ranks; torch's clip_grad_norm_, whose norm differs from rank to rank.
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
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

# Letters in comments say how a tensor differs over ranks (the notation of spmd_types): V it varies; P it is
# a summand, and the sum over ranks is meant; R it is the same on all, but its gradients are P, summands; I it
# is the same, and so is its gradient.


class MoE(nn.Module):
    """Mixture of `experts` MLPs, spread over a group. x (..., h) -> (..., h), of one shape on all ranks.

    After forward: .balance_loss, to be added to the loss (its mean over ranks is 1 if all are equally busy;
    2101.03961, 2.2); .load (X,), how many tokens of all ranks of the world chose each expert; .dropped, the
    share of choices beyond an expert's capacity. After backward: call average_gradients() below.
    It chooses by probability plus .bias (X,), a buffer, which train() updates.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        top_k: int,
        group: dist.ProcessGroup | None = None,
        capacity_factor: float = math.inf,
    ):
        super().__init__()
        if experts % dist.get_world_size(group) or top_k > experts:
            raise ValueError(f"{experts} experts: must be a multiple of the group's ranks, at least top_k")
        self.top_k = top_k
        self.group = group
        self.capacity_factor = capacity_factor
        self.router = nn.Linear(width, experts, bias=False)  # R
        self.register_buffer("bias", torch.zeros(experts))  # R
        self.experts = nn.ModuleDict()  # this rank's: V over the group, R over ranks that have the same
        for i in range(experts):
            # Every rank draws the weights of all, so that they do not depend on the world size.
            mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            if i * dist.get_world_size(group) // experts == dist.get_rank(group):
                self.experts[str(i)] = mlp

    def forward(self, x):
        tokens = x.flatten(0, -2)  # (bs/N, h), V
        probs = self.router(tokens).softmax(-1, dtype=self.bias.dtype)  # (bs/N, X), V; in bf16 runs fp32
        _, chosen = (probs + self.bias).topk(self.top_k)  # (bs/N, t), V
        gates = probs.gather(-1, chosen)  # without the bias
        if self.top_k > 1:  # a lone gate must stay the probability, or the router gets no gradient
            gates = gates / gates.sum(-1, keepdim=True)
        chosen = chosen.flatten()  # order 1: choice j of token i is at i * t + j
        self.load, counts = self.all_gather_counts(chosen)  # R
        kept = self.cut_to_capacity(counts)  # R
        self.dropped = 1 - kept.sum() / counts.sum()
        # Only probs has a gradient. It lowers most what a token gives to the experts that most tokens chose.
        share = self.load.to(probs) / counts.sum()
        self.balance_loss = share @ probs.mean(0) * len(share)  # V

        rank = dist.get_rank()
        by_expert = chosen.argsort(stable=True)  # order 2, in choices' numbers; earlier tokens first
        parts = by_expert.split(counts[rank].tolist())
        choices = torch.cat([part[:places] for part, places in zip(parts, kept[rank])])
        token_ids = choices // self.top_k
        outputs = self.run_experts(tokens[token_ids], kept)  # V
        outputs = outputs * gates.flatten()[choices, None].to(x.dtype)
        mixed = torch.zeros_like(tokens).index_add_(0, token_ids, outputs)
        return mixed.view_as(x)  # V

    def all_gather_counts(self, chosen):
        """How many tokens chose each expert (X,), and of each rank (N, X). For the latter the host waits."""
        own_counts = F.one_hot(chosen, self.router.out_features).sum(0)  # V; bincount() would wait, too
        counts = own_counts.new_empty(dist.get_world_size(), len(own_counts))
        dist.all_gather(list(counts), own_counts)  # of the world: balance and capacity are over all tokens
        return counts.sum(0), counts.cpu()

    def cut_to_capacity(self, counts):
        """Cut counts (N, X) to the capacity. Lower ranks come first, and in forward() earlier tokens, so that
        the same tokens are dropped for every N."""
        mean = counts.sum() / counts.shape[1]
        capacity = (self.capacity_factor * mean).ceil().clamp(min=4)  # 4: DeepSpeed's default min_capacity
        taken = counts.cumsum(0) - counts  # by tokens of earlier ranks
        left = (capacity - taken).clamp(min=0)
        return left.minimum(counts).long()

    def run_experts(self, rows, kept):
        """Send rows (order 2) to their experts' ranks, run the experts, return outputs in the same order."""
        ranks = dist.get_process_group_ranks(self.group)
        group_rank = dist.get_rank(self.group)
        counts = kept[ranks].unflatten(1, (len(ranks), -1))  # (from rank, to rank, its expert)
        sent = counts[group_rank].sum(1).tolist()
        arriving = counts[:, group_rank]  # (from rank, this rank's expert)
        received = arriving.sum(1).tolist()
        rows = AllToAll.apply(rows, sent, received, self.group)  # order 3, V -> V
        pieces = list(rows.split(arriving.flatten().tolist()))
        for i, expert in enumerate(self.experts.values()):
            own = slice(i, None, len(self.experts))  # of the pieces: one from each rank
            output = expert(torch.cat(pieces[own]))  # order 4; run even if empty: .grad must not be None
            pieces[own] = output.split(arriving[:, i].tolist())
        return AllToAll.apply(torch.cat(pieces), received, sent, self.group)  # order 3 -> order 2


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


def average_gradients(model, ep_group, expert_dp_group, max_norm):
    """Make each .grad the mean over ranks, which have equally many tokens, and clip it. Returns the norm."""
    squares = [0, 0]  # of others' gradients, of experts'
    for name, param in model.named_parameters():
        is_expert = ".experts." in name
        replicas = expert_dp_group if is_expert else None  # None: the world
        dist.all_reduce(param.grad, group=replicas)  # P -> I over these
        # Experts', too, are sums over the tokens of all ranks: all-to-alls brought those of the group.
        param.grad /= dist.get_world_size()
        squares[is_expert] += param.grad.square().sum()
    dist.all_reduce(squares[True], group=ep_group)  # P -> I over ranks that have other experts
    norm = sum(squares).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def replace_mlps(model, config, group):
    """Replace the MLP of every other block by a mixture. Returns the mixtures."""
    mixtures = []
    for block in model.blocks[::2]:
        hidden, width = block.up.weight.shape
        block.moe = MoE(width, hidden, config.experts, config.top_k, group, config.capacity_factor)
        # Block is the same in every lesson: silence its MLP, and add the mixture to its output in a hook.
        del block.up, block.down
        block.up = block.down = torch.zeros_like
        block.register_forward_hook(lambda block, inputs, x: x + block.moe(block.norm2(x)))
        mixtures.append(block.moe)
    return mixtures


def train(config):
    """Train. In bf16 `weights` are casts, which save nothing for backward: one graph serves all batches."""
    device, text, ep_group, expert_dp_group = set_up_groups(config)
    dtype = DTYPES[config.dtype]
    model = GPT(config)
    mixtures = replace_mlps(model, config, ep_group)
    model.to(device, torch.promote_types(dtype, torch.float32))
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        batches = microbatches(config, text, step, device)  # of all ranks: capacity is over their tokens
        weights = {name: param.to(dtype) for name, param in model.named_parameters()}
        loss = loads = 0
        for batch in batches:
            inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)  # V
            microloss = mean_loss(functional_call(model, weights, inputs), targets)  # V
            loss += microloss.detach() / config.accum
            total = microloss + config.balance * sum(moe.balance_loss for moe in mixtures)
            (total / config.accum).backward()
            loads += torch.stack([moe.load for moe in mixtures])  # (M, X), R
        grad_norm = average_gradients(model, ep_group, expert_dp_group, config.clip)
        optimizer.step()
        for moe, load in zip(mixtures, loads):
            moe.bias += config.bias_rate * (load.double().mean() - load).sign()
        model.zero_grad()
        dist.all_reduce(loss)  # P -> I
        print_step(config, step, loss / dist.get_world_size(), grad_norm, started)
    print_loads(mixtures, loads)
    if config.save:
        save(model.to("cpu", dtype), config.save)


def print_loads(mixtures, loads):
    """Print mixtures' loads (M, X), MaxVio = max / mean - 1 (arXiv 2408.15664), last microbatch's drops."""
    for moe, load in zip(mixtures, loads.tolist()):
        line = f"tokens per expert {load} | MaxVio {max(load) / np.mean(load) - 1:.2f}"
        if dist.get_rank() == 0:
            print(f"{line} | dropped {moe.dropped:.1%}")


def save(model, path):
    """Write the state_dict of a model with all experts: rank 0's, with those of the others."""
    states = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(model.state_dict(), states, group=dist.new_group(backend="gloo"))
    if states:
        for state in states[1:]:
            states[0].update(state)
        save_weights(states[0], path)


def set_up_groups(config):
    """Check the flags and join. Returns device, text, the ranks among which experts are split, and those that
    have the same experts as this one."""
    world_size = int(os.getenv("WORLD_SIZE") or 1)
    largest_ep = math.gcd(world_size, config.experts)
    config.ep = config.ep or largest_ep
    if largest_ep % config.ep:
        refuse(f"--ep {config.ep}: must divide the {world_size} ranks and --experts {config.experts}")
    if config.top_k > config.experts:
        refuse(f"--top-k {config.top_k}: must be at most --experts {config.experts}")
    device, text = set_up(config, f" | {config.experts} experts, top {config.top_k} | ep {config.ep}")
    ranks = np.arange(world_size).reshape(-1, config.ep)  # a row has all experts, a column the same
    expert_dp_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    ep_group, _ = dist.new_subgroups(config.ep)
    return device, text, ep_group, expert_dp_group


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    add = own.add_argument
    add("--experts", type=int, default=8, help="in every other block")
    add("--top-k", type=int, default=2, help="experts of a token")
    add("--ep", type=int, help="ranks among which experts are split (default: as many as can be)")
    add(
        "--capacity-factor",
        type=float,
        default=math.inf,
        help="most tokens of an expert over the mean; at least 4 tokens (inf: any)",
    )
    add("--balance", type=float, default=0.01, help="weight of the load-balance loss")
    add(
        "--bias-rate",
        type=float,
        default=0,
        help="by which biases move; 0.005 suits short runs, 0.001 long ones",
    )
    return read_flags(arguments, own, capacity_factor=(0, math.inf), balance=(0, 1e9), bias_rate=(0, 1e9))


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
