"""FSDP and tensor parallelism: ZeRO-3 along one axis of a mesh of ranks, split layers along the other.

Idea
    N ranks form a mesh of d rows of t (N = 4: rows 0 1 and 2 3, columns 0 2 and 1 3). The ranks of a row,
    in one node, split each block's matrices, as in tensor_parallel.py, and have the same part of the batch.
    The ranks of a column have the same 1/t of each block, and shard it as in zero3.py. LayerNorms, embeddings
    and biases of proj and down are not split: equal in a row, their gradients count once in the norm. All
    ranks start both groups' collectives in one order, or they could deadlock. (Llama 3, 2407.21783, 3.3.2)

Timeline (the MLP of block 2 of 3, forward and backward; attention has the same sums; 2, 3 stay for backward)
      compute   | up, down |     | forward 3 | ... | down, up |     | norm ... | backward 1
      in row    |          | sum |           | ... |          | sum |          |
      in column | gather 3       |           | ... | reduce-scatter 3, gather 1 | reduce-scatter 2

Memory (bytes on each rank; P parameters in its column, U of them in a block, E outside; F = d ranks)
    parameters    4P/F+w(E+2U)             the shards, and what is gathered (w = 4 in fp32, 2 in bf16)
    gradients     4P/F+w(E+U+max(E,U))     shards; the head's, until the embedding's; a unit's; a sent copy
    optimizer     8P/F                     AdamW's two moments (--naive: F = 1)

Sent (bytes, by each rank in each step of k = --accum microbatches of b x s tokens; h = --width)
    reduce-scatter    kwP(F-1)/F                      in the column
    all-gather        kw(2P-E-2U)(F-1)/F              in the column; the root and the last two blocks stay
    all-reduce        8kLwbsh(t-1)/t                  in the row: 4 in each of L blocks
    all-reduce        +8P(d-1)/d                      with --naive: in the column, gradients

Run
    torchrun --nproc_per_node=8 more/fsdp_tp.py --tp 2    # --naive: nothing is sharded in a column

Left out
    What zero3.py leaves out. Activation checkpoints in a block. A split vocabulary, overlapped sums.
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

FLAGS = {"tp": 0, "naive": False}
# Before torch 2.13 these had other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
UNIT_OF = {}  # {memory of gathered weights: its unit}; a view has the same storage
MESH = {}  # this rank's groups, see train()
# What is split in a row: (its dimension, how many matrices are stacked along that).
SPLIT = {"qkv.weight": (0, 3), "qkv.bias": (0, 3), "proj.weight": (1, 1)}
SPLIT |= {"up.weight": (0, 1), "up.bias": (0, 1), "down.weight": (1, 1)}


def add_up(x):
    """x becomes the sum of all x in a row. Its gradient passes unchanged, equal in the row."""
    dist.all_reduce(x.detach(), group=MESH["row"])  # the same memory, but hidden from autograd
    return x


def column_parallel(x, weight):  # weight (out/t, in): x (b, s, in) -> (b, s, out/t)
    if x.requires_grad:  # not under no_grad()
        x.register_hook(add_up)  # each rank has its weights' part of x's gradient: sums these
    return F.linear(x, weight)


def own_part(whole, dim, stacked):  # 1/t of q, of k and of v, if stacked: those of its heads
    rank, size = dist.get_rank(MESH["row"]), dist.get_world_size(MESH["row"])
    return whole.unflatten(dim, (stacked, size, -1)).select(dim + 1, rank).flatten(dim, dim + 1)


def whole_of(part, dim, stacked):  # the inverse of own_part()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(MESH["row"]))]
    dist.all_gather(parts, part, group=MESH["row"])
    return torch.stack([part.unflatten(dim, (stacked, -1)) for part in parts], dim + 1).flatten(dim, dim + 2)


class Unit:  # parameters that travel together: a block's, or those outside of all blocks, the root
    def __init__(self, params, device, group):
        self.group = group  # the ranks that share them
        self.params = params = sorted(params, key=lambda param: param.cut is None)  # split ones first
        own = self.flatten(params).chunk(dist.get_world_size(group))[dist.get_rank(group)]  # its 1/d
        n_split = sum(param.numel() for param in params if param.cut)
        self.n_split = max(n_split - len(own) * dist.get_rank(group), 0)  # the shard begins with these
        self.shard = nn.Parameter(own.to(device, wide(own.dtype), copy=True))  # what the optimizer updates
        self.flat = self.gathering = self.reducing = None  # all weights, while here; what is on its way
        self.nan = torch.tensor(torch.nan, dtype=own.dtype, device=device)
        self.free()  # drops the parameters' own memory

    def flatten(self, tensors):
        padding = -sum(map(torch.numel, tensors)) % dist.get_world_size(self.group)  # for equal shards
        return torch.cat([*(tensor.detach().flatten() for tensor in tensors), tensors[0].new_zeros(padding)])

    def start_reduce_scatter(self):
        gradients = self.flatten([param.grad for param in self.params])
        for param in self.params:
            param.grad = None
        self.received = self.nan.new_empty(len(self.shard))
        self.reducing = reduce_scatter(self.received, gradients, group=self.group, async_op=True)

    def finish_reduce_scatter(self):
        if self.reducing:
            self.reducing.wait()
            gradient = self.received.to(self.shard.dtype)
            self.shard.grad = gradient if self.shard.grad is None else self.shard.grad + gradient
            self.reducing = self.received = None

    def start_gather(self):
        if self.flat is None:
            self.flat = self.nan.new_empty(len(self.shard) * dist.get_world_size(self.group))
            UNIT_OF[self.flat.untyped_storage()] = self
            own = self.flat.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
            own.copy_(self.shard.detach())
            self.gathering = all_gather(self.flat, own, group=self.group, async_op=True)

    def finish_gather(self):
        if self.gathering:
            self.gathering.wait()
            self.gathering = None
            nn.utils.vector_to_parameters(self.flat, self.params)  # they become views of it

    def free(self):
        self.finish_gather()
        if self.flat is not None:
            del UNIT_OF[self.flat.untyped_storage()]
            self.flat = None
        for param in self.params:
            param.data = self.nan.expand(param.shape)  # one number; if it were used, the loss would be NaN


class ZeRO3(nn.Module):  # gathers each block just before its forward and its backward, and frees it after
    def __init__(self, module, blocks, device, group):
        super().__init__()
        self.module = module
        in_blocks = {param for block in blocks for param in block.parameters()}
        self.root = Unit([param for param in module.parameters() if param not in in_blocks], device, group)
        self.units = [self.root, *(Unit(list(block.parameters()), device, group) for block in blocks)]
        for unit, block in zip(self.units[1:], blocks):
            block.register_forward_pre_hook(lambda *_, unit=unit: self.gather(unit))
            if unit not in self.units[-2:]:  # backward begins with these
                block.register_forward_hook(lambda *_, unit=unit: unit.free())
        self.shards = [unit.shard for unit in self.units]
        for unit in self.units:
            for param in unit.params:  # autograd calls gradient_ready() once it has computed param.grad
                param.register_post_accumulate_grad_hook(lambda _, unit=unit: self.gradient_ready(unit))

    def forward(self, *inputs):
        for unit in self.units:  # an evaluation may have left some, from before an update
            unit.free()
        self.gather(self.root)
        # Autograd saves weights, and free() would free nothing. Here it saves notes of them: see zero3.py.
        with torch.autograd.graph.saved_tensors_hooks(self.note, self.restore):
            return self.module(*inputs)

    def gather(self, unit, direction=1):  # waits for its weights; those of the next one start to travel
        i = self.units.index(unit)
        for each in self.units[i::direction][:2]:
            each.start_gather()
        unit.finish_gather()

    def note(self, tensor):  # what autograd saves in place of a tensor
        unit = UNIT_OF.get(tensor.untyped_storage())
        if unit is None:  # not a weight but an activation
            return tensor.detach(), tensor._version  # with hooks, autograd itself checks no versions
        return unit, tensor.size(), tensor.stride(), tensor.storage_offset()

    def restore(self, kept):
        if isinstance(kept[0], Unit):
            self.gather(kept[0], direction=-1)  # this is backward
            return kept[0].flat.as_strided(*kept[1:])
        tensor, version = kept
        assert tensor._version == version, "modified in place, but backward needs the original"
        return tensor

    def gradient_ready(self, unit):
        if all(param.grad is not None for param in unit.params):
            # Finish the previous unit's, which travelled meanwhile: that frees them before more are copied.
            self.finish_reduce_scatters()
            unit.start_reduce_scatter()
            unit.free()

    def finish_reduce_scatters(self):
        for unit in self.units:
            unit.finish_reduce_scatter()

    def full_state_dict(self):
        weights = {}
        for unit in self.units:
            unit.free()  # it may still have weights from before an update
            unit.start_gather()
            unit.finish_gather()
            for param in unit.params:
                weights[param] = (whole_of(param.data, *param.cut) if param.cut else param.data.clone()).cpu()
            unit.free()
        return {name: weights[param] for name, param in self.module.named_parameters()}


def train(config):
    device = join_world()
    world_size = dist.get_world_size()
    config.tp = config.tp or (1 if world_size % 2 or config.heads % 2 else 2)
    if config.tp < 1 or world_size % config.tp or config.heads % config.tp:
        sys.exit(f"--tp {config.tp}: must divide the {world_size} ranks and --heads {config.heads}")
    mesh = torch.arange(world_size).view(-1, config.tp)  # rows of neighbours
    for name, ranks in ("row", mesh), ("column", mesh.T), ("alone", mesh.view(-1, 1)):
        MESH[name], _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    group = MESH["alone" if config.naive else "column"]  # the ranks that share a unit
    rank, replicas = dist.get_rank(MESH["column"]), dist.get_world_size(MESH["column"])
    config.heads //= config.tp  # of each block, on this rank
    model = GPT(config, ParallelBlock)  # on the host: the device may be too small for all of it
    for name, param in model.named_parameters():
        param.cut = SPLIT.get(".".join(name.split(".")[-2:]))  # None: replicated
        if param.cut:
            param.data = own_part(param.data, *param.cut)
    model = ZeRO3(model, model.blocks, device, group)
    optimizer = torch.optim.AdamW(model.shards, config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for inputs, targets in microbatches(config, step, device, rank, replicas):
            # The batch's loss is the mean of all replicas' microbatches: each is divided by their number.
            loss = mean_loss(model(inputs), targets) / (config.accum * replicas)
            loss.backward()
            total_loss += loss.detach()
        model.finish_reduce_scatters()
        if config.naive:  # each rank has all of its column, and nothing is computed while gradients travel
            for shard in model.shards:
                dist.all_reduce(shard.grad, group=MESH["column"])
        squares = squared_norm([unit.shard.grad[: unit.n_split] for unit in model.units])
        dist.all_reduce(squares, group=MESH["row"])  # its ranks have different parts
        squares += squared_norm([unit.shard.grad[unit.n_split :] for unit in model.units])  # equal in a row
        dist.all_reduce(squares, group=group)  # its ranks have different shards
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(model.shards, config.clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total_loss, group=MESH["column"])
        print_step(config, step, total_loss, norm, started)
    if config.save:
        state_dict = model.full_state_dict()
        if dist.get_rank() == 0:
            torch.save(state_dict, config.save)


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
    def forward(self, x):  # (b, s, h) -> (b, s, h)
        qkv = column_parallel(self.norm1(x), self.qkv.weight) + self.qkv.bias  # (b, s, 3h/t)
        x = x + add_up(F.linear(self.attention(qkv), self.proj.weight)) + self.proj.bias  # once, not t times
        up = column_parallel(self.norm2(x), self.up.weight) + self.up.bias  # (b, s, 4h/t)
        return x + add_up(F.linear(F.gelu(up), self.down.weight)) + self.down.bias


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
