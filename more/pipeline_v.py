"""A pipeline in the shape of a V: like zero_bubble.py, but each rank has two stages, one down and one up.

Idea
    Of N ranks, rank i has the stages i and 2N-1-i: one on the way down the ranks, one on the way up again. So
    the last rank has two stages in a row, and rank 0 has the first and the last one, with the loss: it can
    begin with backward when its first microbatch comes up. F is a forward; B is the gradient of a stage's
    input, W those of its weights, for which no other rank waits. If all take equally long, and k >= 2N-1, no
    rank is idle from its first F to its last W. (ZB-V: arXiv 2401.10241, section 6.) A microbatch is in
    flight, from F to W, once in each stage of a rank: 2N need as much memory as N in zero_bubble.py, whose
    stages are twice as large.
    An older schedule goes down twice: rank i has the stages i and N+i, and the last rank sends to rank 0.
    (Interleaved 1F1B: arXiv 2104.04473, section 2.2.) There B and W are one. Any k (--accum) runs; the table
    holds for multiples of N (interleaved), from 2N-1 on (zb-v), and equal times of F, B and W:
    Schedule         in flight on rank i    idle part of a step
       gpipe         2k                     (N-1)/(N-1+k)     the same as with one stage per rank
       interleaved   min(2k,3N-1-2i)        (N-1)/(N-1+2k)    a turn takes half as long
       zb-v          2N                     (N-1)/(N-1+6k)    before a rank's first F, and after its last W

Timeline (zb-v, N = 3, k = 5; F0, B0, W0 are of the stage on the way down, f0, b0, w0 of that on the way up)
    rank 0 | F0 F1 F2 F3 F4 f0 b0 w0 f1 b1 w1 f2 b2 w2 B0 W0 f3 b3 w3 B1 W1 f4 b4 w4 B2 W2 B3 W3 B4 W4 .  .
    rank 1 | .  F0 F1 F2 f0 F3 f1 b0 w0 f2 b1 w1 F4 B0 W0 f3 b2 w2 B1 W1 f4 b3 w3 B2 b4 B3 W2 B4 w4 W3 W4 .
    rank 2 | .  .  F0 f0 F1 f1 F2 f2 b0 w0 F3 B0 W0 f3 b1 w1 F4 B1 W1 f4 b2 w2 B2 b3 B3 b4 B4 W2 w3 W3 w4 W4

Memory (bytes on a rank; R parameters in its stages; activations: of the microbatches in flight)
    parameters    wR        w = 4 in fp32, 2 in bf16
    parameters    +4R       with --dtype bf16: master weights
    gradients     4R        bf16 ones become fp32 in the update
    optimizer     8R        AdamW's two moments

Sent (bytes, by a rank in each step; microbatches of b sequences of s tokens, width h, vocabulary v)
    send          min(4,2N-2)kwbsh             both stages' outputs and gradients; at the ends 2
    send          min(4,N+1)min(1,N-1)kwbsh    with --schedule interleaved: at the ends 3
    all-reduce    0                            rank 0 alone has the embedding, which is also the head
    all-reduce    min(1,N-1)wvh                with --schedule interleaved: ranks 0 and N-1, for the head

Run
    torchrun --nproc_per_node=2 more/pipeline_v.py --accum 8    # without --accum: one microbatch
    torchrun --nproc_per_node=8 more/pipeline_v.py --size gpt2-xl --dtype bf16 --batch 64 --accum 32

Left out
    V-shaped schedules that hold fewer microbatches (arXiv 2405.15362). DualPipe, which computes a forward and
    a backward at the same time (arXiv 2412.19437). W of the head, norms, biases and embeddings: B has them.
"""

import argparse
import os
import sys
import time
from collections import Counter

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # not used, but if torch imports it later, processes may crash at exit
import torch.nn as nn
import torch.nn.functional as F

FLAGS = {"schedule": ("zb-v", "interleaved", "gpipe")}


def order(schedule, rank, world_size, k):
    """A rank's operations: F and B of its first stage, f and b of its second, W of the oldest B or b."""
    if schedule == "gpipe":  # naive: all of a stage, then all of the next one; B computes W, too
        return "F" * k + "f" * k + "b" * k + "B" * k
    # This keeps all microbatches in flight, and microbatch 0 waits on the last rank until all others come.
    # Meanwhile the first ranks are idle. It should come up while they still have Fs.
    if schedule == "interleaved":  # N microbatches through one stage, then through the other; B computes W
        rounds = -(-k // world_size)
        forwards = ("F" * world_size + "f" * world_size) * rounds
        backwards = ("b" * world_size + "B" * world_size) * rounds
        ahead = world_size + 2 * (world_size - 1 - rank)  # until the first gradient comes up
        ops = forwards[:ahead]
        for i, backward in enumerate(backwards):
            ops += forwards[ahead + i : ahead + i + 1] + backward  # at the end there is no forward left
        return ops
    below = world_size - 1 - rank  # ranks that a microbatch passes on the way down, and again on the way up
    ops = "F" * (2 * below + 1)  # rank 1 above: F0 F1 F2, until microbatch 0 comes up
    ops += "fF" * rank  # f0 F3, until it is on rank 0, and its gradient comes down
    ops += "fbW" * (below + 1)  # f1 b0 w0 f2 b1 w1, until the gradient comes up
    ops += "FBWfbW" * (k - world_size)  # F4 B0 W0 f3 b2 w2 B1 W1 f4 b3 w3: there is no F5
    ops += "Bb" * rank  # B2 b4: others wait for these, so W comes later
    return ops + "BW" * (below + 1) + "W" * (2 * rank)  # B3 W2 B4 w4 W3 W4


def pipelined(stages, batch, links, ops):
    """Both stages' operations. A rank goes on computing while what it sends travels."""
    counts, waiting, in_flight = Counter(), [], {}
    for op in ops:
        stage, j = stages[int(op.islower())], counts[op]
        counts[op] += 1
        if op in "Ff" and j < len(batch):  # order() may have letters for more microbatches than there are
            inputs, targets = batch[j]
            x = inputs if stage.is_first else links["F", stage.previous].receive().requires_grad_()
            output = stage(x, targets)
            if not stage.is_last:
                links["F", stage.number].start_send(output.detach())
            in_flight[stage, j] = x, output
        elif op in "Bb" and j < len(batch):
            x, output = in_flight.pop((stage, j))
            output.backward(None if stage.is_last else links["B", stage.next].receive())
            if not stage.is_first:
                links["B", stage.number].start_send(x.grad)
            waiting.append(stage)
            del x, output  # else SplitLinear's hooks would hold the layers' inputs, even after W
        elif op == "W" and waiting:
            for layer in waiting.pop(0).linears:
                layer.weight_gradient()
    for link in links.values():
        link.finish_send()


class Link:
    """From a stage to the next one, for outputs (F), or to the previous one, for gradients (B)."""

    def __init__(self, sender, receiver, message):  # message: one like those that it carries
        self.sender, self.receiver, self.message = sender, receiver, message
        self.here, self.sends = [], []  # between two stages of a rank nothing is sent
        # With NCCL a send ends when it is received, and the messages of a group keep their order. In a group
        # that links share, a send could wait behind a receive that needs it.
        self.group = dist.new_group(sorted({sender, receiver}))

    def start_send(self, tensor):
        if self.sender == self.receiver:
            self.here.append(tensor)
            return
        self.finish_send()  # the previous one. If it were this one, ranks would wait for each other
        self.sends.append(dist.isend(tensor, self.receiver, self.group))

    def finish_send(self):
        while self.sends:
            self.sends.pop().wait()  # frees what was sent

    def receive(self):
        if self.sender == self.receiver:
            return self.here.pop(0)
        buffer = torch.empty_like(self.message)
        dist.recv(buffer, self.sender, self.group)
        return buffer


class SplitLinear(nn.Module):
    """A linear layer whose backward leaves out the weight's gradient, and keeps its two factors for W."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.factors = []  # of each microbatch from B to W: the layer's input, and its output's gradient

    def forward(self, x):
        output = F.linear(x, self.weight.detach(), self.bias)  # so B computes no gradient of the weight
        if output.requires_grad:  # not under no_grad()
            output.register_hook(lambda grad: self.factors.append((x.detach(), grad)))
        return output

    def weight_gradient(self):
        x, grad = self.factors.pop(0)  # of the oldest microbatch
        self.weight.backward(grad.flatten(0, 1).T @ x.flatten(0, 1))  # adds it to weight.grad


class Stage(nn.Module):
    """One of a rank's two parts of the model. The first also has the embedding, and the last the head."""

    def __init__(self, config, number, n_stages):
        super().__init__()
        self.model = GPT(config)
        self.n_microbatches = config.accum
        self.previous, self.number, self.next = number - 1, number, number + 1
        self.is_first, self.is_last = number == 0, number == n_stages - 1
        stages_of = {"tokens": [0, n_stages - 1], "positions": [0], "norm": [n_stages - 1]}
        # Each stage has about as many blocks. If there are fewer blocks than stages, the last ones have none.
        stages_of |= {f"blocks.{i}": [min(i, i * n_stages // config.layers)] for i in range(config.layers)}
        for name, stages in stages_of.items():
            if number not in stages:
                self.model.set_submodule(name, nn.Identity())  # it has no weights, and returns its input
        self.linears = []
        for name, layer in list(self.model.named_modules()):
            if isinstance(layer, nn.Linear) and config.schedule == "zb-v":
                self.linears.append(SplitLinear(layer))
                self.model.set_submodule(name, self.linears[-1])

    def forward(self, x, targets):  # x: tokens, or the previous stage's output. Returns its own, or the loss
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
    down = list(range(world_size))
    ranks = down + (down if config.schedule == "interleaved" else down[::-1])  # the rank of each stage
    numbers = [number for number in range(len(ranks)) if ranks[number] == rank]
    stages = nn.ModuleList(Stage(config, number, len(ranks)) for number in numbers).to(device)
    if stages[0].is_first and stages[1].is_last:
        stages[1].model.tokens = stages[0].model.tokens  # the head is the embedding
    optimizer = MasterWeights(stages.parameters(), config.lr)
    message = next(stages.parameters()).new_empty(config.batch // config.accum, config.context, config.width)
    links = {}
    for stage in range(len(ranks) - 1):
        links["F", stage] = Link(ranks[stage], ranks[stage + 1], message)
        links["B", stage + 1] = Link(ranks[stage + 1], ranks[stage], message)
    tied_ranks = sorted({ranks[0], ranks[-1]})  # in a V only rank 0
    tied_group = dist.new_group(tied_ranks)
    ops = order(config.schedule, rank, world_size, config.accum)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        batch = list(microbatches(config, step, device))  # the first stage uses inputs, the last one targets
        stages[1].total_loss = torch.zeros((), dtype=torch.float64, device=device)
        pipelined(stages, batch, links, ops)
        dist.all_reduce(stages[1].total_loss)
        if rank in tied_ranks:  # if there are two, both hold this weight: sum its gradients
            tokens = stages[0 if rank == 0 else 1].model.tokens
            dist.all_reduce(tokens.weight.grad, group=tied_group)
        named = stages.named_parameters()  # tokens.weight counts in the norm once
        squares = squared_norm([param.grad for name, param in named if rank == 0 or "tokens" not in name])
        dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(stages.parameters(), config.clip, norm)
        optimizer.step()
        print_step(config, step, stages[1].total_loss, norm, started)
    if config.save:
        parts = [None] * world_size if rank == 0 else None
        dist.gather_object(stages[0].model.cpu().state_dict() | stages[1].model.cpu().state_dict(), parts)
        if rank == 0:
            torch.save({name: weight for weights in parts for name, weight in weights.items()}, config.save)


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
