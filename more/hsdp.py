"""HSDP, hybrid sharding: ZeRO-3 inside each node; the nodes are replicas, and all-reduce gradients.

Idea
    In zero3.py each rank keeps 1/N of the weights, and gathers each block's twice in each microbatch, even
    over slow links between nodes. Here the F ranks of a node split the weights: each keeps 1/F, its shard,
    which is more. The nodes are replicas, as the ranks of ddp.py are: once per step an all-reduce sums each
    shard's gradient over them, 1/F of what a rank sums in ddp.py. (FSDP, arXiv 2304.11277, section 3.2.2)

Timeline (three blocks, of which 2 and 3 stay for backward; gathers of the root, all else, and 1 came before)
    compute | forward 1 | forward 2 | forward 3 | backward 3 | backward 2                 | backward 1 ...
    in node | gather 2  | gather 3  |           |            | reduce-scatter 3, gather 1 | reduce-scatter 2
    between |           |           |           |            |                            | all-reduce 3

Memory (bytes on each of N ranks, F = --shard in a node; P parameters, U in a block, E outside of all blocks)
    parameters    4P/F+w(E+2U)             the shards, and what is gathered (w = 4 in fp32, 2 in bf16)
    gradients     4P/F+w(E+U+max(E,U))     shards; the head's, until the embedding's; a unit's; a sent copy
    optimizer     8P/F                     AdamW's two moments

Sent (bytes, by each rank in each step of k = --accum microbatches)
    reduce-scatter    kwP(F-1)/F                inside the node
    all-gather        kw(2P-E-2U)(F-1)/F        inside the node
    all-reduce        8(P/F)(N-F)/N             between nodes, once per step, in fp32

Run
    torchrun --nproc_per_node=4 more/hsdp.py          # by default, the ranks play two nodes
    torchrun --nproc_per_node=4 more/hsdp.py --naive  # nothing is computed while gradients cross nodes
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST more/hsdp.py --shard 8

Left out
    Parameters that are frozen, unused or shared. A block used twice, in two reentrant checkpoints.
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

FLAGS = {"naive": False, "shard": 0}
# Before torch 2.13 these had other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
UNIT_OF = {}  # {memory of gathered weights: its unit}; a view has the same storage


class Unit:
    """Parameters that travel together: a block's, or those outside of all blocks, the root."""

    def __init__(self, params, device, groups):
        self.node, self.replicas = groups  # see train()
        self.params = params
        self.missing = len(params)  # gradients that backward has yet to compute
        self.sizes = [param.numel() for param in params]
        self.dtype = params[0].dtype
        own = self.flatten(params).chunk(dist.get_world_size(self.node))[dist.get_rank(self.node)]
        self.shard = nn.Parameter(own.to(device, wide(self.dtype), copy=True))  # what the optimizer updates
        self.flat = None  # all weights, while they are here
        self.gathering = self.reducing = self.summing = None  # what is on its way
        self.nan = torch.tensor(torch.nan, dtype=self.dtype, device=device)
        self.free()  # drops the parameters' own memory

    def flatten(self, tensors):
        padding = tensors[0].new_zeros(-sum(self.sizes) % dist.get_world_size(self.node))  # for equal shards
        return torch.cat([*(tensor.detach().flatten() for tensor in tensors), padding])

    def start_reduce_scatter(self):
        gradients = self.flatten([param.grad for param in self.params])
        for param in self.params:
            param.grad = None
        self.received = torch.empty_like(self.shard, dtype=self.dtype)
        self.reducing = reduce_scatter(self.received, gradients, group=self.node, async_op=True)

    def finish_reduce_scatter(self):
        if self.reducing:
            self.reducing.wait()
            gradient = self.received.to(self.shard.dtype)
            self.shard.grad = gradient if self.shard.grad is None else self.shard.grad + gradient
            self.reducing = self.received = None

    def start_all_reduce(self):
        assert not self.summing, "a block's gradients came twice in one backward"
        self.summing = dist.all_reduce(self.shard.grad, group=self.replicas, async_op=True)

    def finish_all_reduce(self):
        self.summing.wait()
        self.summing = None

    def start_gather(self):
        if self.flat is None:
            numel = len(self.shard) * dist.get_world_size(self.node)
            self.flat = torch.empty(numel, dtype=self.dtype, device=self.shard.device)
            UNIT_OF[self.flat.untyped_storage()] = self
            own = self.flat.chunk(dist.get_world_size(self.node))[dist.get_rank(self.node)]
            own.copy_(self.shard.detach())
            self.gathering = all_gather(self.flat, own, group=self.node, async_op=True)

    def finish_gather(self):
        if self.gathering:
            self.gathering.wait()
            self.gathering = None
            for param, part in zip(self.params, self.flat[: sum(self.sizes)].split(self.sizes)):
                param.data = part.view(param.shape)

    def free(self):
        self.finish_gather()
        if self.flat is not None:
            del UNIT_OF[self.flat.untyped_storage()]
            self.flat = None
        for param in self.params:
            param.data = self.nan.expand(param.shape)  # one number; if it were used, the loss would be NaN


def naive(units):
    """All-reduce after the last backward: nothing is computed while gradients cross nodes."""
    for unit in units:
        unit.start_all_reduce()


class HSDP(nn.Module):
    """ZeRO3 in each node. Nodes all-reduce the gradients of their shards during the last backward."""

    def __init__(self, module, blocks, device, groups):
        super().__init__()
        self.module = module
        in_blocks = {param for block in blocks for param in block.parameters()}
        self.root = Unit([param for param in module.parameters() if param not in in_blocks], device, groups)
        self.units = [self.root, *(Unit(list(block.parameters()), device, groups) for block in blocks)]
        for unit, block in zip(self.units[1:], blocks):
            block.register_forward_pre_hook(lambda *_, unit=unit: self.gather(unit))
            block.register_forward_hook(lambda block, x, output, unit=unit: self.end_forward(unit, output))
        for unit in self.units:
            for param in unit.params:
                # Autograd calls gradient_ready() as soon as it has computed param.grad.
                param.register_post_accumulate_grad_hook(lambda _, unit=unit: self.gradient_ready(unit))

    def forward(self, *inputs):
        # If the last forward had no backward, some weights are still here, perhaps from before an update.
        for unit in self.units:
            unit.free()
        self.direction = 1
        self.gather(self.root)
        # Autograd saves weights, and free() would free nothing. Here it saves notes of them: see zero3.py.
        with torch.autograd.graph.saved_tensors_hooks(self.note, self.restore):
            output = self.module(*inputs)
        self.direction = -1
        return output

    def shards(self):
        return [unit.shard for unit in self.units]

    def gather(self, unit):
        """Wait for a unit's weights; those of the next one in this direction start to travel."""
        i = self.units.index(unit)
        for each in self.units[i :: self.direction][:2]:
            each.start_gather()
        unit.finish_gather()

    def end_forward(self, unit, output):
        # Backward begins with the last units: keep them. In backward keep all: checkpoints run forward in it.
        if self.direction == 1 and unit not in self.units[-2:]:
            unit.free()
        if output.requires_grad:
            # When backward comes to this block. (restore() gathers, too, but not in a checkpoint's backward.)
            output.register_hook(lambda grad: self.gather(unit))

    def note(self, tensor):
        """What autograd saves in place of a tensor."""
        unit = UNIT_OF.get(tensor.untyped_storage())
        if unit is None:  # not a weight but an activation
            return tensor.detach(), tensor._version  # with hooks, autograd itself checks no versions
        return unit, tensor.size(), tensor.stride(), tensor.storage_offset()

    def restore(self, kept):
        if isinstance(kept[0], Unit):
            self.gather(kept[0])
            return kept[0].flat.as_strided(*kept[1:])
        tensor, version = kept
        assert tensor._version == version, "modified in place, but backward needs the original"
        return tensor

    def gradient_ready(self, unit):
        unit.missing -= 1
        # Collectives of all ranks must come in one order. They do: a block's backward needs the next one's.
        if unit.missing == 0:
            unit.missing = len(unit.params)
            # Finish the previous unit's, which travelled meanwhile: that frees them before more are copied.
            self.finish_reduce_scatters()
            unit.start_reduce_scatter()
            unit.free()

    def finish_reduce_scatters(self):
        """Called after each backward, too, for the root's: else the next backward would all-reduce them."""
        for unit in self.units:
            if unit.reducing:
                unit.finish_reduce_scatter()
                if self.is_last_backward:
                    unit.start_all_reduce()

    def full_state_dict(self):
        """The module's state dict, gathered anew. All ranks must call it."""
        weights = {}
        for unit in self.units:
            unit.free()
            unit.start_gather()
            unit.finish_gather()
            weights |= {param: param.detach().cpu() for param in unit.params}
            unit.free()
        return {name: weights[param] for name, param in self.module.named_parameters(remove_duplicate=False)}


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config.shard = config.shard or world_size // (1 if world_size % 2 else 2)  # by default two nodes
    if config.shard < 1 or world_size % config.shard:
        sys.exit(f"--shard {config.shard}: the number of ranks, {world_size}, must be a multiple of it")
    nodes = torch.arange(world_size).view(-1, config.shard)  # a row is a node
    node, _ = dist.new_subgroups_by_enumeration(nodes.tolist())  # the ranks of this rank's node
    replicas, _ = dist.new_subgroups_by_enumeration(nodes.T.tolist())  # those that have the same shard
    model = GPT(config)  # on the host: the device may be too small for all of it
    model = HSDP(model, model.blocks, device, (node, replicas))
    optimizer = torch.optim.AdamW(model.shards(), config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for i, (inputs, targets) in enumerate(microbatches(config, step, device, rank, world_size), 1):
            # The batch's loss is the mean of all ranks' microbatches: each loss is divided by their number.
            loss = mean_loss(model(inputs), targets) / (config.accum * world_size)
            model.is_last_backward = i == config.accum and not config.naive
            loss.backward()
            model.finish_reduce_scatters()
            total_loss += loss.detach()
        if config.naive:
            naive(model.units)
        for unit in model.units:
            unit.finish_all_reduce()
        squares = squared_norm([shard.grad for shard in model.shards()])
        dist.all_reduce(squares, group=node)  # its ranks have different parts; nodes have the same
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(model.shards(), config.clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total_loss)
        print_step(config, step, total_loss, norm, started)
    if config.save:
        state_dict = model.full_state_dict()
        if rank == 0:
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


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
