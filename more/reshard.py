"""Reshard: some ranks train, others serve; after each update new weights go from one layout to the other.

Idea
    Some ranks train a model; others, the servers, use it, as in reinforcement learning (here they compute the
    same loss, as a check). After each update they need the new weights. But each of N trainers holds 1/N of
    one flat vector of all weights (zero3.py has a vector for each block), and each of t servers 1/t of each
    block's matrices, rows or columns, as in tensor_parallel.py. Say, servers split A (4, 2) by rows, and B
    (2, 4) by columns:
        place in the flat vector        0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
        matrix                          A  A  A  A  A  A  A  A  B  B  B  B  B  B  B  B
        which of 3 trainers holds it    0  0  0  0  0  0  1  1  1  1  1  1  2  2  2  2
        which of 2 servers needs it     0  0  0  0  1  1  1  1  0  0  1  1  0  0  1  1
    So trainer 1 sends 8 and 9 to server 0, and 6, 7, 10 and 11 to server 1. All this follows from shapes
    alone: it is planned once. (Cross-mesh resharding, arXiv 2211.05322; HybridFlow, arXiv 2409.19256)

Timeline
    trainers | forward 3, backward 3, update | send    | forward 4, backward 4, update | send    | ...
     servers | loss of batch 3               | receive | loss of batch 4               | receive | ...

Memory (bytes on each of N trainers; P parameters; its plan comes on top: 8 for each weight that it sends)
    parameters    4P/N+wP     the shard; all weights, for a microbatch (w = 4 in fp32, 2 in bf16)
    gradients     4P/N+2wP    the shard's; all, and all once more in one piece, to be sent
    optimizer     8P/N        AdamW's two moments

Sent (bytes, by each trainer in each step of k = --accum microbatches of b sequences)
    reduce-scatter    kwP(N-1)/N
    all-gather        kwP(N-1)/N
    all-gather        (k+1)wP(N-1)/N      with --naive
    send              wtD/N               on average; a server needs D = (P-r)/t+r weights
    send              wtD                 with --naive: trainer 0 sends all
    all-reduce        4kwNbsLh(t-1)/t     by each server, for the whole batch: L layers, h width, s context
    Servers do not split r = (6L+2+s+v)h weights: norms, biases of proj and down, embeddings (v tokens).

Run
    torchrun --nproc_per_node=4 more/reshard.py    # half of the ranks serve; add --naive
    torchrun --nproc_per_node=8 more/reshard.py --servers 2 --batch 18

Left out
    Generating text. Serving while new weights arrive (in a second copy). A smaller plan, of intervals.
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

FLAGS = {"naive": False, "servers": 0}
# Before torch 2.13 these had other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Trainer:
    """Holds a shard, 1/N of all weights. All weights are here only during a microbatch."""

    def __init__(self, params, group):
        self.params = params
        self.group = group  # all trainers: ranks 0 to N-1
        self.sizes = [param.numel() for param in params]
        self.dtype = params[0].dtype
        own = self.flatten(params).chunk(dist.get_world_size(group))[dist.get_rank()]  # this rank's 1/N
        self.shard = nn.Parameter(own.to(wide(self.dtype), copy=True))  # what the optimizer updates
        self.shard.grad = torch.zeros_like(self.shard)
        self.free()  # drops the parameters' own memory

    def flatten(self, tensors):
        padding = tensors[0].new_zeros(-sum(self.sizes) % dist.get_world_size(self.group))  # for equal shards
        return torch.cat([*(tensor.detach().flatten() for tensor in tensors), padding])

    def gather(self):
        flat = self.shard.new_empty(len(self.shard) * dist.get_world_size(self.group), dtype=self.dtype)
        own = flat.chunk(dist.get_world_size(self.group))[dist.get_rank()]
        own.copy_(self.shard.detach())
        all_gather(flat, own, group=self.group)
        nn.utils.vector_to_parameters(flat, self.params)  # they become views of it

    def free(self):
        for param in self.params:
            param.grad = None
            param.data = param.new_full((), torch.nan).expand(param.shape)  # so the loss is NaN if it is used

    def reduce_scatter(self):
        gradients = self.flatten([param.grad for param in self.params])
        self.free()
        received = torch.empty_like(self.shard, dtype=self.dtype)
        reduce_scatter(received, gradients, group=self.group)
        self.shard.grad += received


class Server:
    """Holds its parts of all parameters, one after the other in one piece."""

    def __init__(self, model, server, config):
        for name, param in model.named_parameters():
            param.data = part_of(name, param.data, server, config)
        self.flat = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(self.flat, model.parameters())  # they become views of it


# What servers split: (dimension, number of matrices stacked along it). See split_of() in tensor_parallel.py.
SPLIT = {"qkv.weight": (0, 3), "qkv.bias": (0, 3), "proj.weight": (1, 1)}
SPLIT |= {"up.weight": (0, 1), "up.bias": (0, 1), "down.weight": (1, 1)}


def part_of(name, whole, server, config):  # what a server needs of a parameter
    dim, stacked = SPLIT.get(".".join(name.split(".")[-2:]), (0, 0))
    if not stacked:
        return whole
    return torch.cat([matrix.chunk(config.servers, dim)[server] for matrix in whole.chunk(stacked, dim)], dim)


def naive(holder, shapes, config):
    """Trainer 0 gathers all weights, and sends each server its parts. holder: a Trainer or a Server."""
    if isinstance(holder, Server):
        dist.recv(holder.flat, 0)
        return
    holder.gather()
    if dist.get_rank() == 0:
        for server in range(config.servers):
            parts = [part_of(name, param.data, server, config) for name, param in zip(shapes, holder.params)]
            dist.send(torch.cat([part.flatten() for part in parts]), config.trainers + server)
    holder.free()


# All weights are gathered once more. Then all that servers need leaves trainer 0, while the others wait.


def intersection(trainer, server, shapes, config):
    """Places in the trainer's shard of what the server needs, in the server's order."""
    sizes = [shape.numel() for shape in shapes.values()]
    places = torch.arange(sum(sizes))  # in the flat vector; cut as weights are, they say which a server needs
    named = zip(shapes.items(), places.split(sizes))
    parts = [part_of(name, part.view(shape), server, config) for (name, shape), part in named]
    needed = torch.cat([part.flatten() for part in parts])
    held = places.chunk(config.trainers)[trainer]
    return needed[(needed >= held[0]) & (needed <= held[-1])] - held[0]


def direct(holder, plan, config):
    """Each trainer sends each server what it needs of its shard. plan: on a trainer, places for each server;
    on a server, how many weights come from each trainer."""
    if isinstance(holder, Server):
        # Places ascend in a server's vector, too: trainer 1's piece comes right after trainer 0's, and so on.
        op, peers = dist.irecv, range(config.trainers)
        pieces = holder.flat.split(plan)
    else:
        op, peers = dist.isend, range(config.trainers, dist.get_world_size())
        pieces = [holder.shard.detach()[places].to(holder.dtype) for places in plan]
    ops = [dist.P2POp(op, piece, peer) for piece, peer in zip(pieces, peers) if len(piece)]
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config.servers = config.servers or world_size // 2
    config.trainers = world_size - config.servers
    if not 0 <= config.servers < world_size or config.heads % max(config.servers, 1):
        sys.exit(f"--servers {config.servers}: must divide --heads {config.heads}, and leave a trainer")
    is_trainer = rank < config.trainers
    trainers = dist.new_group(range(config.trainers))
    config.group = dist.new_group(range(config.trainers, world_size)) if config.servers else None
    model = GPT(config, Block if is_trainer else ServedBlock).to(device)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    if is_trainer:
        holder = Trainer(list(model.parameters()), trainers)
        optimizer = torch.optim.AdamW([holder.shard], config.lr, fused=True)
        plan = [intersection(rank, server, shapes, config).to(device) for server in range(config.servers)]
    else:
        server = rank - config.trainers
        holder = Server(model.requires_grad_(False), server, config)
        plan = [len(intersection(trainer, server, shapes, config)) for trainer in range(config.trainers)]
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        numbers = torch.zeros(3, dtype=torch.float64, device=device)
        total_loss, served_loss, squares = numbers  # views
        if is_trainer:
            for inputs, targets in microbatches(config, step, device, rank, config.trainers):
                holder.gather()
                # The batch's loss is the mean of all its microbatches: each loss is divided by their number.
                loss = mean_loss(model(inputs), targets) / (config.accum * config.trainers)
                loss.backward()
                holder.reduce_scatter()
                total_loss += loss.detach()
            squares += squared_norm([holder.shard.grad])
        else:
            for trainer in range(config.trainers):  # the whole batch: with the right weights, the same loss
                for inputs, targets in microbatches(config, step, device, trainer, config.trainers):
                    served_loss += mean_loss(model(inputs), targets) / (config.accum * config.trainers)
        dist.all_reduce(numbers)  # from here on each is the sum over all ranks
        norm = squares.sqrt()
        if is_trainer:
            nn.utils.clip_grads_with_norm_([holder.shard], config.clip, norm)
            optimizer.step()
            holder.shard.grad.zero_()
        if config.naive:
            naive(holder, shapes, config)
        else:
            direct(holder, plan, config)
        print_step(config, step, total_loss, norm, started)
        if rank == 0 and config.servers:
            print(f"        servers | loss {served_loss.item() / config.servers:.4f}")
    if config.save and is_trainer:
        holder.gather()
        if rank == 0:
            torch.save(model.state_dict(), config.save)


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


class ServedBlock(Block):
    """The forward of tensor_parallel.py, with a server's parts."""

    def __init__(self, config):
        super().__init__(config)
        self.heads //= config.servers
        self.group = config.group

    def forward(self, x):  # (b, s, h) -> (b, s, h)
        x = x + self.row_parallel(self.proj, self.attention(self.qkv(self.norm1(x))))
        return x + self.row_parallel(self.down, F.gelu(self.up(self.norm2(x))))

    def row_parallel(self, layer, x):  # (b, s, in/t) -> (b, s, out)
        y = F.linear(x, layer.weight)
        dist.all_reduce(y, group=self.group)
        return y + layer.bias


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
