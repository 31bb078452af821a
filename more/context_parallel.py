"""Context parallelism: each rank has 1/N of each sequence; only attention needs the other ranks' tokens.

Idea
    The activations of a long sequence do not fit on one GPU. So N ranks share its tokens. Norms and MLPs
    handle each token alone. But in attention a query needs the keys and values (kv) of all earlier tokens.
    Gather, the simplest way: an all-gather of kv, then attention. (Llama 3, arXiv 2407.21783, section 3.3.2)
    Ring: kv circulate from rank to rank. A rank computes with the kv it has while the next arrive, and merges
    each part of the softmax into the result so far: see merge(). In backward kv circulate again, and their
    gradients one hop behind, until these are back at their owner. (arXiv 2310.01889, section 3)
    Zigzag, a ring with equal work: rank i has chunks i and 2N-1-i of 2N, an early and a late one (as in
    Llama 3). With rank j's kv: if j < i, both of i's chunks see j's early one only; if j > i, i's late one
    sees both of j's. So after the first round each computes half of the scores, and needs no mask.
    Ulysses: attention handles each head alone. So an all-to-all trades 1/N of the tokens of all heads for all
    tokens of 1/N of the heads; after attention another one trades back. (arXiv 2309.14509, section 3.1)

Timeline (zigzag's forward on rank 2 of 4, with chunks 2 and 5: queries' chunks x keys' chunks)
    compute | 2, 5 x 2, 5   | 2, 5 x 1      | 2, 5 x 0      | 5 x 3, 4
    network | kv of 1 and 6 | kv of 0 and 7 | kv of 3 and 4 |

Memory (bytes on each of N ranks; P parameters, L layers, a heads, h width, v vocabulary; b sequences of s)
    parameters     wP        w = 4 in fp32, 2 in bf16
    parameters     +4P       with --dtype bf16: master weights
    gradients      4P        also in bf16: the update makes fp32 copies of them
    optimizer      8P        AdamW's two moments
    activations    bs((16L+2)wh+4(4L+2+aL+v))/N                 as in checkpointing.py, of 1/N of the tokens
    activations    bs((16L+2)wh+4(4L+2+aL+v))/N+Lws(2bh+s/N)    with --kind gather: all kv, and the masks
    activations    bs((17L+2)wh+4(4L+2+aL+v))/N                 with --kind ulysses: attention's output twice

Sent (bytes, by each rank in each step of k microbatches)
    send              2wkLbsh(3N-2)min(1,N-1)/N    with --kind zigzag: kv N-1 times, twice; gradients N times
    send              2wkLbsh(3N-2)min(1,N-1)/N    with --kind ring: as much; nothing on one rank
    all-gather        2wkLbsh(N-1)/N               with --kind gather: kv
    reduce-scatter    2wkLbsh(N-1)/N               with --kind gather: their gradients
    all-to-all        8wkLb(s/N)h(N-1)/N           with --kind ulysses: q, k, v, output; their gradients
    all-reduce        2wP(N-1)/N                   the weights' gradients, each rank's of its own tokens

Run
    torchrun --nproc_per_node=2 more/context_parallel.py    # add --kind gather, ring or ulysses

Left out
    Fast kernels (fusion.py): a ring's scores are not counted here. Several documents in one sequence.
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

FLAGS = {"kind": ("zigzag", "ring", "gather", "ulysses")}
# Before torch 2.13 these had other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gather(torch.autograd.Function):  # (s/N, ...) on each rank -> (s, ...) on all
    @staticmethod
    def forward(ctx, own):
        whole = own.new_empty(dist.get_world_size() * len(own), *own.shape[1:])
        all_gather(whole, own.contiguous())
        return whole

    @staticmethod
    def backward(ctx, grad):  # all ranks used these tokens, so their gradients add up
        own = grad.new_empty(len(grad) // dist.get_world_size(), *grad.shape[1:])
        reduce_scatter(own, grad.contiguous())
        return own


def gather_attention(q, k, v):  # (b, heads, s/N, d) each; d = h / heads
    k, v = Gather.apply(torch.stack([k, v]).movedim(3, 0)).movedim(0, 3)  # (b, heads, s, d) each
    mask = q.new_ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool).tril(dist.get_rank() * q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, mask)


# This keeps kv of all tokens for backward, computes scores that the mask hides, and waits while kv travel.
def visible(kind, rank, other, length):
    """Which of this rank's queries see which of the other rank's keys? Both have `length` tokens."""
    early, late, both = slice(length // 2), slice(length // 2, None), slice(None)
    if kind == "ring":  # rank i has chunk i of N: rank 0 sees only its own kv, and waits for the others
        return both, both if other <= rank else slice(0)
    if other > rank:  # zigzag
        return late, both
    return both, both if other == rank else early


def start_hop(tensor):
    """Send to the next rank, receive from the one before, both while this rank computes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
    return received, dist.batch_isend_irecv([send, receive])


def finish_hop(received, works):
    for work in works:
        work.wait()
    return received


def scores_of(q, k, is_causal):
    scores = q @ k.mT
    if is_causal:  # these keys are this rank's own: each query sees none after it
        scores += scores.new_full(scores.shape[-2:], -torch.inf).triu(1)
    return scores


def merge(out, lse, scores, v):
    """Extend the softmax in out and lse, in place, by these keys. (At first lse is -inf, out 0.)"""
    new_lse = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
    out.mul_((lse - new_lse).exp())  # its share of the new denominator
    out.add_(scores.sub_(new_lse).exp_() @ v)
    lse.copy_(new_lse)


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, kind):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        kv, scaled_q = torch.stack([k, v]), q.to(wide(q.dtype)) / q.shape[-1] ** 0.5
        out = torch.zeros_like(scaled_q)
        lse = torch.full_like(out[..., :1], -torch.inf)  # log of the sum of exp(score), of all keys so far
        for hop in range(world_size):
            travelling = start_hop(kv) if hop < world_size - 1 else (kv, [])
            queries, keys = visible(kind, rank, (rank - hop) % world_size, q.shape[2])
            block_k, block_v = kv[..., keys, :].to(out.dtype)
            scores = scores_of(scaled_q[:, :, queries], block_k, is_causal=hop == 0)
            merge(out[:, :, queries], lse[:, :, queries], scores, block_v)
            kv = finish_hop(*travelling)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kind = kind
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        rank, world_size = dist.get_rank(), dist.get_world_size()
        kv, q, grad = torch.stack([k, v]), q.to(lse.dtype) / q.shape[-1] ** 0.5, grad.to(lse.dtype)
        mean = (grad * out).sum(-1, keepdim=True)  # the weighted mean of grad @ v.mT, as out = weights @ v
        grad_q, travelling_grads = torch.zeros_like(q), (torch.zeros_like(kv), [])
        for hop in range(world_size):
            travelling = start_hop(kv) if hop < world_size - 1 else (kv, [])
            queries, keys = visible(ctx.kind, rank, (rank - hop) % world_size, q.shape[2])
            own_q, own_grad, own_mean, own_lse = (each[:, :, queries] for each in (q, grad, mean, lse))
            block_k, block_v = kv[..., keys, :].to(q.dtype)
            # As lse is of all keys, weights are those of the whole softmax, and the blocks' parts add up.
            weights = scores_of(own_q, block_k, is_causal=hop == 0).sub_(own_lse).exp_()
            grad_scores = (own_grad @ block_v.mT).sub_(own_mean).mul_(weights)  # softmax's backward
            grad_q[:, :, queries] += grad_scores @ block_k / q.shape[-1] ** 0.5
            grad_kv = finish_hop(*travelling_grads)  # of these kv, with what other ranks have added
            grad_kv[..., keys, :] += torch.stack([grad_scores.mT @ own_q, weights.mT @ own_grad])
            travelling_grads = start_hop(grad_kv) if world_size > 1 else (grad_kv, [])
            kv = finish_hop(*travelling)
        return grad_q.to(out.dtype), *finish_hop(*travelling_grads), None  # the last are those of its own kv


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, split, join):  # part i along `split` goes to rank i; `join`: of what arrives
        ctx.split, ctx.join = split, join
        parts = torch.stack(x.chunk(dist.get_world_size(), split))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.join, ctx.split), None, None


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if config.context % (2 * world_size):
        sys.exit(f"--context {config.context}: must be a multiple of 2 x {world_size} ranks")
    if config.kind == "ulysses" and config.heads % world_size:
        sys.exit(f"--heads {config.heads}: must be a multiple of {world_size} ranks")
    model = ContextGPT(config).to(device)  # see the end of this file
    params = list(model.parameters())
    optimizer = MasterWeights(params, config.lr)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for inputs, targets in microbatches(config, step, device):  # the same on all ranks
            # The batch's loss is the mean of all tokens'. This rank has 1/N of them.
            loss = mean_loss(model(inputs), targets[:, model.own]) / (config.accum * world_size)
            loss.backward()
            total_loss += loss.detach()
        for param in params:
            dist.all_reduce(param.grad)
        norm = squared_norm([param.grad for param in params]).sqrt()
        nn.utils.clip_grads_with_norm_(params, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
        dist.all_reduce(total_loss)
        print_step(config, step, total_loss, norm, started)
    if config.save and rank == 0:
        torch.save(model.state_dict(), config.save)


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


class ContextBlock(Block):
    def __init__(self, config):
        super().__init__(config)
        self.kind = config.kind
        self.heads //= dist.get_world_size() if self.kind == "ulysses" else 1

    def attention(self, qkv):  # (b, s/N, 3h) -> (b, s/N, h)
        if self.kind == "ulysses":
            qkv = AllToAll.apply(qkv.unflatten(-1, (3, dist.get_world_size(), -1)), 3, 1)  # (b, s, 3, 1, h/N)
            return AllToAll.apply(super().attention(qkv.flatten(2)), 1, 2)
        qkv = qkv.unflatten(-1, (3, self.heads, -1))
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))  # (b, heads, s/N, h / heads)
        attended = gather_attention(q, k, v) if self.kind == "gather" else Ring.apply(q, k, v, self.kind)
        return attended.transpose(1, 2).flatten(2)


class ContextGPT(GPT):
    def __init__(self, config):
        super().__init__(config, ContextBlock)
        rank, chunks = dist.get_rank(), torch.arange(config.context).view(2 * dist.get_world_size(), -1)
        own = chunks[[rank, -1 - rank]] if config.kind == "zigzag" else chunks[2 * rank : 2 * rank + 2]
        self.register_buffer("own", own.flatten(), persistent=False)  # the positions of its tokens

    def embed(self, tokens):  # (b, s) -> (b, s/N, h)
        return self.tokens(tokens[:, self.own]) + self.positions.weight[self.own]


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
