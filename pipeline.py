"""Pipeline parallelism: each rank has some of the layers, and microbatches flow through the ranks.

Idea
    The layers are split into stages, one for each rank. In forward a rank sends its output to the next rank,
    in backward the gradient of its input to the previous rank. With one microbatch, only one rank works at a
    time. So the batch is cut into k microbatches (--accum), and ranks work on different ones.

    A schedule is the order of a rank's forwards and backwards. From its forward to its backward a microbatch
    is in flight: its activations are kept. The bubble is the part of a step in which a rank is idle.
    Schedule    in flight on rank i of N    bubble, if stages take equally long and messages no time
       naive    1                           (N-1)/N          one microbatch after the other
       gpipe    k                           (N-1)/(N-1+k)    all F, then all B (arXiv 1811.06965)
       1f1b     min(k,N-i)                  (N-1)/(N-1+k)    N-i F, then B and F in turn (arXiv 2006.09503)

Timeline (1f1b, N = 4, k = 6; F3 is the forward of microbatch 3, B3 its backward)
    rank 0 | F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
    rank 1 | .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .
    rank 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .
    rank 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .
    The bubble: rank 3 waits N-1 = 3 turns for F0, works for 2k = 12, and 3 turns later B5 is back on rank 0.
    So the step has 18 turns, and each rank, which works in 12, is idle in 2(N-1) = 6: 6/18 = 3/(3+6).
    It is the same share if B takes longer than F. In flight: rank 0 starts N, then one for each that is back.

Memory (bytes on a rank; R parameters in its stage; activations: of the microbatches in flight)
    parameters    wR        w = 4 in fp32, 2 in bf16
    parameters    +4R       with --dtype bf16: master weights
    gradients     4R        bf16 ones become fp32 in the update
    optimizer     8R        AdamW's two moments

Sent (bytes, by a rank in each step; microbatches of b sequences of s tokens, width h, vocabulary v)
    send          min(2,N-1)kwbsh    outputs and gradients; the first and last rank send one of them
    all-reduce    min(1,N-1)wvh      between those two: gradients of the embedding, which is also the head

Run
    torchrun --nproc_per_node=2 pipeline.py --accum 8    # the default, 1, makes all naive
    torchrun --nproc_per_node=8 pipeline.py --size gpt2-xl --dtype bf16 --batch 64 --accum 32

Left out
    Receiving a message before it is needed: here the receiver waits while it travels. Microbatches with
    different numbers of tokens: here each counts the same.
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

FLAGS = {"schedule": ("1f1b", "gpipe", "naive")}


def naive(stage, batch, message):
    """One microbatch after the other. message: an empty tensor like those that ranks send."""
    for inputs, targets in batch:
        x = inputs if stage.is_first else receive(message, stage.previous).requires_grad_()  # for x.grad
        output = stage(x, targets)
        if not stage.is_last:
            dist.send(output.detach(), stage.next)

        output.backward(None if stage.is_last else receive(message, stage.next))  # the last output is a loss
        if not stage.is_first:
            dist.send(x.grad, stage.previous)


def receive(message, sender, group=None):
    buffer = torch.empty_like(message)
    dist.recv(buffer, sender, group)
    return buffer


# Only one rank works at a time; the others wait in receive(). But a rank that has sent an output need not
# wait for its gradient: it can run the next forward. So forward (F) and backward (B) become separate steps.
def order(schedule, rank, world_size, k):
    """A rank's forwards and backwards, such as FFBFBB."""
    in_flight = {"1f1b": min(k, world_size - rank), "gpipe": k, "naive": 1}[schedule]
    return "F" * in_flight + "BF" * (k - in_flight) + "B" * in_flight


def pipelined(stage, batch, message, ops, groups):
    """The two halves of naive(), in the order of ops. A rank goes on while what it sends travels."""
    in_flight, sends = [], []
    for op in ops:
        if op == "F":
            inputs, targets = next(batch)
            x = inputs if stage.is_first else receive(message, stage.previous, groups["F"]).requires_grad_()
            output = stage(x, targets)
            if not stage.is_last:
                sends.append(dist.isend(output.detach(), stage.next, groups["F"]))
            in_flight.append((x, output))
        else:
            x, output = in_flight.pop(0)
            output.backward(None if stage.is_last else receive(message, stage.next, groups["B"]))
            if not stage.is_first:
                sends.append(dist.isend(x.grad, stage.previous, groups["B"]))
        if len(sends) > 1:  # not the newest: the neighbour may be sending, too, and both would wait
            sends.pop(0).wait()
    for send in sends:
        send.wait()


class Stage(nn.Module):
    """A rank's part of the model: some blocks. The first also has the embedding, and the last the head."""

    def __init__(self, config, rank, world_size):
        super().__init__()
        self.model = GPT(config)
        self.n_microbatches = config.accum
        self.previous, self.next = rank - 1, rank + 1
        self.is_first, self.is_last = rank == 0, rank == world_size - 1
        ranks_of = {"tokens": [0, world_size - 1], "positions": [0], "norm": [world_size - 1]}
        ranks_of |= {f"blocks.{i}": [i * world_size // config.layers] for i in range(config.layers)}
        for name, ranks in ranks_of.items():
            if rank not in ranks:
                self.model.set_submodule(name, nn.Identity())  # it has no weights, and returns its input

    def forward(self, x, targets):  # x: tokens, or the previous rank's output. Returns its own, or the loss
        if self.is_first:
            x = self.model.embed(x)
        for block in self.model.blocks:
            x = block(x)
        if self.is_last:
            x = mean_loss(self.model.head(x), targets) / self.n_microbatches
            self.total_loss += x.detach()  # of the step
        return x


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > config.layers:
        sys.exit(f"--layers {config.layers}: fewer than the {world_size} ranks")
    stage = Stage(config, rank, world_size).to(device)
    optimizer = MasterWeights(stage.parameters(), config.lr)
    message = next(stage.parameters()).new_empty(config.batch // config.accum, config.context, config.width)
    # With NCCL a send ends when it is received, and the messages of a group keep their order. With one group,
    # in the timeline above, rank 0 would queue send F4, receive B1, and rank 1 send B1, receive F4: each send
    # would wait for the other.
    groups = {"F": dist.new_group(), "B": dist.new_group()}
    tied_group = dist.new_group(sorted({0, world_size - 1}))
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        batch = microbatches(config, step, device)  # the first rank uses the inputs, the last the targets
        stage.total_loss = torch.zeros((), dtype=torch.float64, device=device)
        if config.schedule == "naive":
            naive(stage, batch, message)
        else:
            pipelined(stage, batch, message, order(config.schedule, rank, world_size, config.accum), groups)
        dist.all_reduce(stage.total_loss)
        if stage.is_first or stage.is_last:  # both hold this weight: sum its gradients
            dist.all_reduce(stage.model.tokens.weight.grad, group=tied_group)
        # Two ranks have tokens.weight, but in the norm it counts once.
        named = stage.model.named_parameters()
        squares = squared_norm([param.grad for name, param in named if rank == 0 or name != "tokens.weight"])
        dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(stage.parameters(), config.clip, norm)
        optimizer.step()
        print_step(config, step, stage.total_loss, norm, started)
    if config.save:
        stages = [None] * world_size if rank == 0 else None
        dist.gather_object(stage.model.cpu().state_dict(), stages)
        if rank == 0:
            torch.save({name: weight for weights in stages for name, weight in weights.items()}, config.save)


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
