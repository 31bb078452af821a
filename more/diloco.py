"""DiLoCo: each rank trains a replica alone for H steps; then the ranks average how far they have moved.

Idea
    In ddp.py ranks exchange gradients in each step, so they need fast links. Here they talk only once every H
    steps (--inner-steps), so they may be far apart. All start from the same weights, the outer weights. Each
    rank trains its replica on its own part of each batch, with its own optimizer. After H steps the outer
    weights minus the rank's are its outer gradient: old minus new, as an optimizer subtracts gradients. An
    all-reduce averages these, and a second optimizer, SGD with Nesterov momentum, updates the outer weights,
    the same on all ranks. (DiLoCo, arXiv 2311.08105, algorithm 1; with outer lr 1 and no momentum it averages
    the weights, as local SGD does, arXiv 1805.09767)

    Unlike ddp.py's, its losses differ from single.py's, but for --inner-steps 0.

Timeline (H = 3)
    compute | step | step | step |            | outer update | step | step | step |            | ...
    network |      |      |      | all-reduce |              |      |      |      | all-reduce | ...

Memory (bytes on each of N ranks; P parameters)
    parameters    wP            w = 4 in fp32, 2 in bf16
    parameters    +4P           with --dtype bf16: master weights
    parameters    +4P           without --inner-steps 0: outer weights
    gradients     4P            fp32 copies for AdamW; later the outer ones, in their place
    optimizer     12P           AdamW's two moments, and the outer momentum
    optimizer     8P            with --inner-steps 0

Sent (bytes, by each rank)
    all-reduce    8P(N-1)/N     every H steps; and in every step the loss, only to be printed
    all-reduce    2wP(N-1)/N    with --inner-steps 0: every step

Run
    torchrun --nproc_per_node=2 more/diloco.py
    torchrun --nproc_per_node=2 more/diloco.py --inner-steps 0        # naive: ddp.py
    torchrun --nproc_per_node=8 more/diloco.py --size gpt2-xl --dtype bf16 --steps 500 --inner-steps 100

Left out
    Exchanging parts of the weights in turn, while training goes on (Streaming DiLoCo, arXiv 2501.18512).
    Outer weights on the host. Ranks that leave, come, or are slower.
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

FLAGS = {"inner-steps": 5, "outer-lr": 0.7, "outer-momentum": 0.9}


def average(tensor):
    tensor /= dist.get_world_size()
    dist.all_reduce(tensor)


def naive(params):
    """After the step's last backward: then all ranks make the same update. All wait for it in every step."""
    for param in params:
        average(param.grad)


class DiLoCo:
    """Averages over the ranks how far each has moved, and lets all go on from the same weights."""

    def __init__(self, inner, lr, momentum):
        self.inner = inner  # a rank's own optimizer, and its weights (in bf16 the master weights)
        self.outer = [param.clone() for param in inner.masters]  # from which all ranks start a round
        self.sgd = torch.optim.SGD(self.outer, lr, momentum, nesterov=momentum > 0, fused=True)

    @torch.no_grad()
    def exchange(self):
        for outer, param in zip(self.outer, self.inner.masters):
            # With lr 1 and no momentum, step() would set outer to the mean of the ranks' params.
            outer.grad = outer - param
            average(outer.grad)
        self.sgd.step()
        self.sgd.zero_grad()
        torch._foreach_copy_(self.inner.masters, self.outer)
        torch._foreach_copy_(self.inner.params, self.outer)


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(device)
    params = list(model.parameters())
    optimizer = MasterWeights(params, config.lr)
    if config.inner_steps:
        diloco = DiLoCo(optimizer, config.outer_lr, config.outer_momentum)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for inputs, targets in microbatches(config, step, device, rank, world_size):
            loss = mean_loss(model(inputs), targets) / config.accum  # adds up to this rank's mean
            loss.backward()
            total_loss += loss.detach()
        if not config.inner_steps:
            naive(params)
        norm = squared_norm([param.grad for param in params]).sqrt()
        nn.utils.clip_grads_with_norm_(params, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
        # AdamW's moments stay, different on each rank. Exchange after the last step, too: ranks end equal.
        if config.inner_steps and (step % config.inner_steps == 0 or step == config.steps):
            diloco.exchange()
        average(total_loss)  # only to be printed; over slow links, each rank would print its own
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


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
