"""Muon on N ranks: each matrix has an owner, the one rank that updates it.

Idea
    In ddp.py every rank makes the same update. AdamW's is cheap, but Muon's is not. For each matrix of the
    blocks it takes the momentum and sets its singular values to about 1, so that rare directions move as far
    as frequent ones: that is the update (Muon is Scalable for LLM Training, arXiv 2502.16982, section 2). So
    ranks should share this work. AdamW updates each number by itself, so zero1.py can give each rank any 1/N
    of the numbers. Muon needs entire matrices.

    So each matrix has an owner. A reduce adds up its gradient, as an all-reduce does, but only the owner gets
    the sum. Only the owner keeps the momentum and computes the update. Then a broadcast sends the new weights
    from the owner to all other ranks. Embeddings, norms and biases have owners, too, which update them with
    AdamW. Each rank owns about 1/N of the weights, or one matrix that is larger.

Timeline (two matrices, one owned by each rank; updates wait for the norm of all gradients)
    rank 0  | forward | backward 2 | backward 1 |          | update 1 |
    rank 1  | forward | backward 2 | backward 1 |          | update 2 |
    network |         |            | reduce 2   | reduce 1 |          | broadcast 1, 2

Memory (bytes on each of N ranks; P parameters; X: the most that a rank owns; with --naive, P)
    parameters    wP              w = 4 in fp32, 2 in bf16
    parameters    +4X             with --dtype bf16: master weights
    gradients     max(wP,4X)      all as computed; then the owned ones in fp32
    optimizer     4Y              a momentum for Muon, two moments for AdamW: Y: X, with AdamW's counted twice

Sent (bytes, by each rank in each step; the mean over ranks, as owners send more or less)
    reduce        wP(N-1)/N       without --naive
    broadcast     wP(N-1)/N       without --naive
    all-reduce    2wP(N-1)/N      with --naive

Run
    torchrun --nproc_per_node=2 more/muon.py
    torchrun --nproc_per_node=2 more/muon.py --naive
    torchrun --nproc_per_node=8 more/muon.py --size gpt2-xl --dtype bf16 --batch 64

Left out
    Sending new weights during the next forward, as zero1.py does. The paper's own way (section 2.3): cutting
    matrices, too, and gathering them for the update. Buckets. Parameters that one backward does not reach.
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

FLAGS = {"naive": False}


def newton_schulz(X):
    """Keeps the singular vectors of X, and brings its singular values to 0.7 to 1.2 (not very small ones)."""
    if X.shape[0] > X.shape[1]:
        return newton_schulz(X.mT).mT  # so that X @ X.mT, below, is the smaller of the two products
    a, b, c = 3.4445, -4.7750, 2.0315
    X = X / X.norm().clamp(min=1e-7)  # now no singular value is above 1
    # Each singular value s becomes a s + b s^3 + c s^5. After five iterations it is near 1.
    for _ in range(5):
        A = X @ X.mT
        B = torch.addmm(A, A, A, beta=b, alpha=c)  # b * A + c * A @ A
        X = torch.addmm(X, B, X, beta=a)  # a * X + B @ X
    return X


class Muon(torch.optim.Optimizer):
    """The optimizer, on one rank; it sends nothing."""

    def __init__(self, matrices, lr):
        super().__init__([{"params": matrices}], {"lr": lr})
        for matrix in matrices:
            self.state[matrix]["momentum"] = torch.zeros_like(matrix)

    def step(self):
        lr, weight_decay, beta = self.param_groups[0]["lr"], 0.1, 0.95
        for matrix, state in self.state.items():
            momentum = state["momentum"].lerp_(matrix.grad, 1 - beta)
            update = matrix.grad.lerp(momentum, beta)  # Nesterov's: it looks a step ahead
            # bf16 is exact enough here, and faster. (fp64 is for tests.)
            update = newton_schulz(update if update.dtype == torch.float64 else update.bfloat16())
            matrix.mul_(1 - lr * weight_decay)
            # The update's root mean square is about max(shape) ** -0.5, AdamW's 0.2: so one lr serves both.
            matrix.add_(update, alpha=-lr * 0.2 * max(matrix.shape) ** 0.5)


def naive(params):
    """After backward. Every rank then updates all parameters, so no weights are sent."""
    for param in params:
        dist.all_reduce(param.grad)


# This has three costs. While gradients travel, nothing is computed. Each rank holds all momenta. And each
# rank computes all Newton-Schulz iterations, per step as much work as training on about 4 * width tokens.


def assign_owners(params, world_size):
    """{parameter: rank}: the largest first, each to the rank that owns the least so far."""
    owners = {}
    owned = [0] * world_size
    for param in sorted(params, key=torch.numel, reverse=True):
        owners[param] = owned.index(min(owned))
        owned[owners[param]] += param.numel()
    return owners


class Owners:
    """Reduces each gradient to its owner during backward; after the update, broadcasts the new weights."""

    def __init__(self, params):
        self.owners = assign_owners(params, dist.get_world_size())
        self.own = [param for param, owner in self.owners.items() if owner == dist.get_rank()]
        self.is_last_backward = True
        self.reducing = {}  # {parameter whose gradient is on its way: its work handle}
        for param in params:
            # Autograd calls gradient_ready() as soon as it has computed param.grad.
            param.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, param):
        # All ranks must start the reduces in the same order. Autograd does not promise one, but keeps one, as
        # a single thread goes through the same graph on each rank.
        if self.is_last_backward:
            self.reducing[param] = dist.reduce(param.grad, self.owners[param], async_op=True)

    def finish_reduces(self):
        """To be called after the step's last backward."""
        assert len(self.reducing) == len(self.owners), "backward has not reached all parameters"
        for param, owner in self.owners.items():
            self.reducing.pop(param).wait()
            if owner != dist.get_rank():
                param.grad = None  # only a part of the sum, of no use here

    def broadcast_all(self):
        """To be called after the update. Starts all of them, then waits for them."""
        works = []
        for param, owner in self.owners.items():
            works.append(dist.broadcast(param.detach(), owner, async_op=True))
        for work in works:
            work.wait()


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(device)
    params = list(model.parameters())
    matrices = {param for param in model.blocks.parameters() if param.dim() == 2}
    owners = Owners(params)
    own = params if config.naive else owners.own
    optimizer = MuonAndAdamW(own, matrices, config.lr)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for i, (inputs, targets) in enumerate(microbatches(config, step, device, rank, world_size), 1):
            # The batch's loss is the mean of all ranks' microbatches: each loss is divided by their number.
            loss = mean_loss(model(inputs), targets) / (config.accum * world_size)
            # Gradients travel only in the last backward; until then they add up here.
            owners.is_last_backward = i == config.accum and not config.naive
            loss.backward()
            total_loss += loss.detach()
        if config.naive:
            naive(params)
        else:
            owners.finish_reduces()
        squares = squared_norm([param.grad for param in own])
        if not config.naive:
            dist.all_reduce(squares)  # each rank has the gradients that it owns
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(own, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
        dist.all_reduce(total_loss)
        if not config.naive:
            owners.broadcast_all()
        print_step(config, step, total_loss, norm, started)
    if config.save and rank == 0:
        torch.save(model.state_dict(), config.save)


class MuonAndAdamW:
    """Muon and AdamW on fp32 copies of bf16 weights: bf16 alone would round small updates away."""

    def __init__(self, params, matrices, lr):
        self.params = list(params)
        # For fp32 weights, to() makes no copy: these are the weights themselves.
        self.masters = [param.detach().to(wide(param.dtype)) for param in self.params]
        both = list(zip(self.params, self.masters))
        self.muon = Muon([master for param, master in both if param in matrices], lr)
        others = [master for param, master in both if param not in matrices]
        self.adamw = torch.optim.AdamW([{"params": others}], lr, fused=True)  # a group, as it may be empty

    @torch.no_grad()
    def step(self):
        for param, master in zip(self.params, self.masters):
            master.grad = param.grad.to(master.dtype)
            param.grad = None
        self.muon.step()
        self.adamw.step()
        self.muon.zero_grad()
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


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
