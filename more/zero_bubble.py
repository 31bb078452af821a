"""Zero bubble: pipeline.py, but backward is split in two, and one part fills a rank's idle time.

Idea
    Backward computes two things: B, the gradient of a stage's input, for which the previous rank waits; and
    W, the gradients of its weights, for which no other rank waits. A linear layer's output is xA' (A' is A
    transposed). If its gradient is g, that of x is gA (B), and that of A is g'x (W). So W can come later, if
    the layer keeps x and g. Here it comes when the rank would be idle. (Zero Bubble Pipeline Parallelism,
    arXiv 2401.10241, section 2.) A microbatch is in flight from its forward, F, to its W.
    Schedule    in flight on rank i of N    idle time of a rank (F, B, W: their times; k >= 2N-1)
       1f1b     min(k,N-i)                  (N-1)(F+B+W)     pipeline.py's: there B and W are one
       zb-h1    min(k,N)                    (N-1)(F+B-W)     k microbatches (--accum)
       zb-h2    min(k,2N-1)                 (N-1)(F+B-2W)    but here (N-1)F: see Left out

Timeline (N = 4; F3 is the forward of microbatch 3, B3 and W3 its backward; first zb-h1, k = 6)
    rank 0 | F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5
    rank 1 | .  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5
    rank 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5
    rank 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5
    Rank 0 is idle for N-1 = 3 turns; with 1f1b, where B takes two turns, for 9. Then zb-h2, k = 7, with more
    forwards before the first B. Ranks are idle only before their first F, and after their last W:
    rank 0 | F0 F1 F2 F3 F4 F5 F6 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6
    rank 1 | .  F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 B3 W1 B4 W2 B5 W3 B6 W4 W5 W6
    rank 2 | .  .  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 W0 B5 W1 B6 W2 W3 W4 W5 W6
    rank 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 W0 W1 W2 W3 W4 W5 W6

Memory (bytes on a rank; R parameters in its stage; activations: of those in flight, less from B to W)
    parameters    wR        w = 4 in fp32, 2 in bf16
    parameters    +4R       with --dtype bf16: master weights
    gradients     4R        bf16 ones become fp32 in the update
    optimizer     8R        AdamW's two moments

Sent (bytes, by a rank in each step; microbatches of b sequences of s tokens, width h, vocabulary v)
    send          min(2,N-1)kwbsh    outputs and gradients; the first and last rank send one of them
    all-reduce    min(1,N-1)wvh      between first and last rank: gradients of the embedding, also the head's

Run
    torchrun --nproc_per_node=2 more/zero_bubble.py --accum 8    # without --accum: one microbatch
    torchrun --nproc_per_node=8 more/zero_bubble.py --size gpt2-xl --dtype bf16 --batch 64 --accum 32

Left out
    W of the head, norms, biases and embeddings: B computes these gradients. The paper's update (section 4),
    for which no rank waits for others. Here all wait, for the norm of all gradients, so zb-h2
    gains (N-1)(B-W) at most: nothing, if these are equal. Schedules found by a search (section 3).
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

FLAGS = {"schedule": ("zb-h1", "zb-h2", "1f1b")}


def receive(message, sender, group=None):
    buffer = torch.empty_like(message)
    dist.recv(buffer, sender, group)
    return buffer


def order(schedule, rank, world_size, k):
    """A rank's forwards, and the two parts of its backwards, such as FFBFBWBWW."""
    if schedule == "1f1b":  # naive, as in pipeline.py: B computes the weights' gradients, too
        in_flight = min(k, world_size - rank)
        return "F" * in_flight + "BF" * (k - in_flight) + "B" * in_flight
    # A rank has a gap before its first B, and gaps between its last Bs, as it waits for the next rank's B. W
    # fills gaps, as nobody waits for it. In rounds: F alone, then F B, F B W, B W, and W alone. The first B
    # comes after one forward, and one more for each rank that follows; in zb-h2 two more. All ranks
    # begin with W in the round of rank 0's first B: a round later, one more microbatch would be in flight; a
    # round earlier, fewer Ws would be left for the last gaps.
    depth = {"zb-h1": 1, "zb-h2": 2}[schedule]
    first = {"F": 0, "B": depth * (world_size - 1 - rank), "W": depth * (world_size - 1)}
    ops = ""
    for i in range(first["W"] + k):
        ops += "".join(op for op in "FBW" if first[op] <= i < first[op] + k)
    return ops


def pipelined(stage, batch, message, ops, groups):
    """A stage's operations. It goes on while what it sends travels. message: one like those it receives."""
    in_flight, sends = [], []
    for op in ops:
        if op == "F":
            inputs, targets = next(batch)
            x = inputs if stage.is_first else receive(message, stage.previous, groups["F"]).requires_grad_()
            output = stage(x, targets)
            if not stage.is_last:
                sends.append(dist.isend(output.detach(), stage.next, groups["F"]))
            in_flight.append((x, output))
        elif op == "B":
            x, output = in_flight.pop(0)
            output.backward(None if stage.is_last else receive(message, stage.next, groups["B"]))
            if not stage.is_first:
                sends.append(dist.isend(x.grad, stage.previous, groups["B"]))
            del x, output  # else SplitLinear's hooks would hold the layers' inputs, even after W
        else:
            for layer in stage.linears:
                layer.weight_gradient()
        if len(sends) > 2:  # wait() frees what was sent. With 1, zb-h2's ranks wait; with 0, they hang
            sends.pop(0).wait()
    for send in sends:
        send.wait()


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
        self.weight.backward(grad.flatten(0, 1).T @ x.flatten(0, 1))  # of a leaf: adds this to its .grad


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
        self.linears = []
        for name, layer in list(self.model.named_modules()):
            if isinstance(layer, nn.Linear) and config.schedule != "1f1b":
                self.linears.append(SplitLinear(layer))
                self.model.set_submodule(name, self.linears[-1])

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
