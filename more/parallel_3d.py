"""3D parallelism: data, pipeline and tensor parallelism on one mesh of ranks, each in its own groups.

Idea
    There are d replicas of the model, each of which has a part of the batch (ddp.py). A replica has p stages,
    each with some of the blocks (pipeline.py). A stage has t ranks, each with 1/t of every large matrix
    (tensor_parallel.py). New is which ranks sum what. Tensor parallelism sends most, four sums per block, so
    its t ranks are neighbours, in one node. (Megatron-LM, arXiv 2104.04473, section 3)

Timeline (8 ranks, d = p = t = 2; replica 0 is ranks 0 to 3: stage 0 is 0, 1, stage 1 is 2, 3; who sums what)
    1 tensor    | 0+1 2+3 4+5 6+7 | in forwards, F: outputs of matrices; in backwards, B: gradients of inputs
      F, B      | 0-2 1-3 4-6 5-7 | sent: a stage's output to the next one, its gradient back
    2 data      | 0+4 1+5 2+6 3+7 | gradients of all parameters, after the last B
    3 tie       | 0+2 1+3 4+6 5+7 | gradients of the embedding, which is also the last stage's head
    4 tensor, F | as above        | squares of gradients, for the norm; over F alone if t ranks hold the same
    5 F, data   | as above        | losses, for printing

Memory (bytes; R parameters on the rank with most; activations as in pipeline.py, in part 1/t)
    parameters    wR        w = 4 in fp32, 2 in bf16
    parameters    +4R       with --dtype bf16: master weights
    gradients     (4+w)R    fp32 in the update; w: the copy that is sent
    optimizer     8R        AdamW's two moments

Sent (bytes in a step of k microbatches of b sequences of s tokens; in each row, the rank that sends most)
    tensor      2kbs((4L+1)wh+12)(t-1)/t    L blocks in a stage: 4 each; the head 1; the loss 3 per token
    tensor      2kbs((4L+2)wh+12)(t-1)/t    with --pp 1: the embedding 1, on the same rank; h is the width
    pipeline    min(2,p-1)kwbsh             outputs and gradients
    tie         min(1,p-1)wvh/t             1/t of the embedding of the vocabulary, v
    data        2wR(d-1)/d

Run
    torchrun --nproc_per_node=8 more/parallel_3d.py --accum 4    # or --tp 1 --pp 4; or --naive: no 1F1B

Left out
    Computing while sums travel (tensor_parallel.py, ddp.py). ZeRO among the replicas (zero1.py).
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

FLAGS = {"naive": False, "tp": 0, "pp": 0}


def add_up(x, group):  # x becomes the sum of the group's x; its gradient is the sum's, which all ranks have
    dist.all_reduce(x.detach(), group=group)  # the same memory, but hidden from autograd
    return x


def column_parallel(x, weight, group):  # weight (out/t, in): x (b, s, in), used only here -> (b, s, out/t)
    if x.requires_grad:  # not under no_grad()
        x.register_hook(lambda grad: add_up(grad, group))  # in backward: sums the ranks' gradients of x
    return F.linear(x, weight)


def parallel_loss(logits, targets, group):  # (b, s, v/t): mean of log(sum(exp(logits))) - logits[target]
    logits = logits.to(wide(logits.dtype)).flatten(0, 1)
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    logits = logits - largest[:, None]  # so that no exp() overflows; the loss is the same
    index, is_here = own_index(targets.flatten(), logits.shape[1], group)
    target = torch.where(is_here, logits[torch.arange(len(logits), device=logits.device), index], 0)
    exp_sum, target = add_up(torch.stack([logits.exp().sum(-1), target]), group)
    return (exp_sum.log() - target).mean()


def own_index(token, size, group):  # (index in this rank's part of the vocabulary, or 0; if it is there)
    index = token - size * dist.get_rank(group)
    is_here = (index >= 0) & (index < size)
    return torch.where(is_here, index, 0), is_here


def split_of(name):  # (the dimension that is split, the number of matrices stacked along it), or None
    split = {"tokens.weight": (0, 1), "qkv.weight": (0, 3), "qkv.bias": (0, 3), "proj.weight": (1, 1)}
    split |= {"up.weight": (0, 1), "up.bias": (0, 1), "down.weight": (1, 1)}
    return split.get(".".join(name.split(".")[-2:]))


def own_part(whole, dim, stacked, group):  # 1/t of q, of k and of v, if stacked: those of its heads
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    return torch.cat([matrix.chunk(world_size, dim)[rank] for matrix in whole.chunk(stacked, dim)], dim)


def whole_of(part, dim, stacked, group):  # the inverse of own_part()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group)
    return torch.cat([each.chunk(stacked, dim)[i] for i in range(stacked) for each in parts], dim)


def receive(message, sender, group=None):
    buffer = torch.empty_like(message)
    dist.recv(buffer, sender, group)
    return buffer


def pipelined(stage, batch, message, ops, groups):  # a rank goes on while what it sends travels
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
        if len(sends) > 1:  # wait() frees what was sent; with 0 in place of 1, neighbours wait for each other
            sends.pop(0).wait()
    for send in sends:
        send.wait()


def all_reduce_gradients(params, group):  # in one message, after the last backward
    flat = torch.cat([param.grad.flatten() for param in params])
    dist.all_reduce(flat, group=group)
    for param, part in zip(params, flat.split([param.numel() for param in params])):
        param.grad = part.view_as(param)  # a view of flat, where the sum is


def new_group(ranks, dim, name):  # the ranks that differ from this one along this dimension alone
    rows = ranks.movedim(dim, -1).flatten(0, -2)  # a row for each group; all ranks make all of them
    return dist.new_subgroups_by_enumeration(rows.tolist(), group_desc=name)[0]


def train(config):
    device = join_world()
    check(config, dist.get_world_size())
    ranks = torch.arange(dist.get_world_size()).view(config.dp, config.pp, config.tp)  # replica, stage, part
    groups = {"data": new_group(ranks, 0, "data"), "tensor": new_group(ranks, 2, "tensor")}
    groups |= {op: new_group(ranks, 1, "pipeline") for op in "FB"}  # two: see pipeline.py
    groups["tie"] = new_group(ranks[:, sorted({0, config.pp - 1})], 1, "tie")  # the first and the last stage
    stage = Stage(config, groups).to(device)  # see the end of this file
    params = list(stage.parameters())
    named = [each for each in stage.named_parameters() if stage.is_first or each[0] != "tokens.weight"]
    split = [param for name, param in named if split_of(name)]
    replicated = [param for name, param in named if not split_of(name)]
    optimizer = MasterWeights(params, config.lr)
    message = params[0].new_empty(config.batch // stage.n_microbatches, config.context, config.width)
    # --naive is FBFBFB, one microbatch after the other: one stage works at a time, and a rank is idle for
    # (p-1)/p of a step. In 1F1B, such as FFBFBB, stages work on different ones, and idle for (p-1)/(p-1+k).
    in_flight = 1 if config.naive else min(config.accum, config.pp - dist.get_rank(groups["F"]))
    ops = "F" * in_flight + "BF" * (config.accum - in_flight) + "B" * in_flight
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        batch = microbatches(config, step, device, dist.get_rank(groups["data"]), config.dp)
        stage.total_loss = torch.zeros((), dtype=torch.float64, device=device)
        pipelined(stage, batch, message, ops, groups)
        all_reduce_gradients(params, groups["data"])
        if stage.is_first or stage.is_last:  # both hold this weight: sum its gradients
            dist.all_reduce(stage.tokens.weight.grad, group=groups["tie"])
        squares = squared_norm([param.grad for param in replicated])  # equal on t ranks: they count once
        squares = squares + add_up(squared_norm([param.grad for param in split]), groups["tensor"])
        norm = add_up(squares, groups["F"]).sqrt()  # not over data: replicas have the same gradients now
        nn.utils.clip_grads_with_norm_(params, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
        total_loss = add_up(add_up(stage.total_loss, groups["F"]), groups["data"])
        print_step(config, step, total_loss, norm, started)
    if config.save:
        state = stage.state_dict()
        state |= {key: whole_of(state[key], *split_of(key), stage.group) for key in filter(split_of, state)}
        state = {key: weight.cpu() for key, weight in state.items()}
        stages = [None] * config.pp if stage.is_first else None
        dist.gather_object(state, stages, group=groups["F"], group_dst=0)
        if dist.get_rank() == 0:
            torch.save({key: weight for state in stages for key, weight in state.items()}, config.save)


def check(config, world_size):
    config.tp = config.tp or (1 if world_size % 2 else 2)
    config.pp = config.pp or (world_size // config.tp if world_size // config.tp % 2 else 2)
    config.dp = world_size // config.tp // config.pp
    if min(config.tp, config.pp) < 1 or config.dp * config.pp * config.tp != world_size:
        sys.exit(f"--tp {config.tp} x --pp {config.pp}: must divide the {world_size} ranks")
    if config.heads % config.tp or config.vocab % config.tp or config.vocab < 256:  # a byte is a token
        sys.exit(f"--tp {config.tp}: must divide --heads {config.heads} and --vocab {config.vocab} >= 256")
    if config.pp > config.layers:
        sys.exit(f"--layers {config.layers}: fewer than --pp {config.pp}, the stages")


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


class ParallelBlock(Block):
    def __init__(self, config, group):
        super().__init__(config)
        self.group = group
        self.heads //= dist.get_world_size(group)

    def forward(self, x):  # (b, s, h) -> (b, s, h)
        qkv = column_parallel(self.norm1(x), self.qkv.weight, self.group) + self.qkv.bias  # (b, s, 3h/t)
        x = x + add_up(F.linear(self.attention(qkv), self.proj.weight), self.group) + self.proj.bias  # once
        up = column_parallel(self.norm2(x), self.up.weight, self.group) + self.up.bias  # (b, s, 4h/t)
        return x + add_up(F.linear(F.gelu(up), self.down.weight), self.group) + self.down.bias


class Stage(GPT):  # a rank's part of some blocks; of the first stage the embedding, too, of the last the head
    def __init__(self, config, groups):
        super().__init__(config, lambda config: ParallelBlock(config, groups["tensor"]))
        self.group = groups["tensor"]
        for name, param in self.named_parameters():
            if split_of(name):
                param.data = own_part(param.data, *split_of(name), self.group)
        rank, stage, n_stages = dist.get_rank(), dist.get_rank(groups["F"]), config.pp
        self.previous, self.next = rank - config.tp, rank + config.tp
        self.is_first, self.is_last = stage == 0, stage == n_stages - 1
        self.n_microbatches = config.accum * config.dp  # of the whole batch
        stages_of = {"tokens": [0, n_stages - 1], "positions": [0], "norm": [n_stages - 1]}
        stages_of |= {f"blocks.{i}": [i * n_stages // config.layers] for i in range(config.layers)}
        for name, stages in stages_of.items():
            if stage not in stages:
                self.set_submodule(name, nn.Identity())  # it has no weights, and returns its input

    def forward(self, x, targets):  # x: tokens, or the previous stage's output. Returns its own, or the loss
        if self.is_first:
            row, is_here = own_index(x, len(self.tokens.weight), self.group)
            found = torch.where(is_here[..., None], self.tokens(row), 0)  # one rank has it, the others zeros
            x = add_up(found, self.group) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        if self.is_last:
            logits = column_parallel(self.norm(x), self.tokens.weight, self.group)  # (b, s, v/t)
            x = parallel_loss(logits, targets, self.group) / self.n_microbatches
            self.total_loss += x.detach()  # of the step
        return x


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
