"""Reshard: after each update, new weights go from the trainers' ZeRO-3 shards to tensor-parallel servers.

Idea
    Some ranks train and others serve, as in reinforcement learning, and after each update the servers need
    the new weights. But they hold them in another layout. Each trainer holds 1/N of every unit, as in
    zero3.py: an interval of the flat vector of the unit's parameters. Each server holds 1/t of every matrix
    of a block, as in tensor_parallel.py: some of its rows, or of its columns. For a unit of two matrices,
    A (4, 2), of which servers hold rows, and B (2, 4), of which they hold columns, 3 trainers and 2 servers:

    flat vector        A A A A A A A A B B B B B B B B
    held by trainer    0 0 0 0 0 0 1 1 1 1 1 1 2 2 2 2
    held by server     0 0 0 0 1 1 1 1 0 0 1 1 0 0 1 1

    --how rank0, the naive way: rank 0 gathers all units, then sends each server its slices. It needs memory
    for the whole model, and while it sends all of that alone, the others wait.
    --how units: the trainers gather unit after unit, and share the sending. This takes memory for one unit,
    but each trainer still receives the whole model, only to send a part of it on.
    --how direct: rows are an interval of the flat vector, and columns an interval in each row. All ranks know
    this from shapes alone. So each trainer sends each server what both of them hold, the intersections of
    their intervals. Trainers receive nothing, and no number travels twice.

Timeline
    a trainer | forward, backward 3, update |         | forward, backward 4, update |         | ...
    a server  | loss of batch 3             | reshard | loss of batch 4             | reshard | ...

Memory (bytes on the trainer that holds most; N trainers, t servers; P parameters, U in a block, E in none)
    parameters    mP/N+w(E+U)                without --how rank0
    parameters    mP/N+wP                    with --how rank0: on rank 0
    gradients     mP/N+wmax(E,U)(1+g+1/N)    g = 1 over gloo, whose reduce-scatter copies a unit's, else 0
    optimizer     KP/N                       K = 8 for AdamW's two moments, 0 for SGD (fp64: w, m = 8, K = 16)
    w = 4 in fp32, 2 in bf16; m = 4. A trainer also holds the messages of the unit that it sends. A server
    holds wD, where D = (P-r)/t+r: all servers have the r parameters that are not split (see SPLIT).

Sent (bytes, by the rank that sends most, in each step of k microbatches of b sequences on each trainer)
    reduce-scatter    kwP(N-1)/N         among the trainers; over gloo, where it is an all-reduce, twice that
    all-gather        2kwP(N-1)/N        with --how direct: before each unit's forward and backward
    all-gather        (2k+1)wP(N-1)/N    without --how direct: and once before it is sent
    send              wtD                with --how rank0
    send              wqD                with --how units: a trainer sends to q servers, t/N rounded up
    send              wtD/N              with --how direct, in the mean
    all-reduce        4kwNbsLh(t-1)/t    among the servers: L layers, h width, s context

Run
    torchrun --nproc_per_node=4 reshard.py --how direct
    torchrun --nproc_per_node=8 reshard.py --servers 2 --batch 18 --how rank0

Left out
    Serving while new weights arrive. Servers wait, as they receive into the weights that they use: only with
    a second copy, to be swapped when it is complete, could they go on with the old weights.
    Sending, in --how units, what the next forward gathers anyway: it would save an all-gather. Overlap in a
    step; embeddings that servers split; buffers; what zero3.py and tensor_parallel.py leave out.
    A frozen unit stays unsharded from backward to its next forward. Not noticed: ranks with different models.
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Resharding:
    """A model on N trainers, the first ranks, and t servers. how: "rank0", "units" or "direct".

    Call self.model in place of the model. split: see SPLIT."""

    def __init__(self, model: nn.Module, split: dict, n_servers: int, how="units"):
        self.how = how
        self.rank = dist.get_rank()
        self.n_servers = n_servers
        self.n_trainers = dist.get_world_size() - n_servers
        self.is_trainer = self.rank < self.n_trainers
        self.share = (self.rank, self.n_trainers) if self.is_trainer else (0, 1)  # of the batch
        self.trainers = dist.new_group(range(self.n_trainers))
        self.servers = dist.new_group(range(self.n_trainers, dist.get_world_size())) if n_servers else None
        # All ranks start from rank 0's weights. (With NCCL, messages must not be a group's first operation,
        # unless all of its ranks have some.)
        for param in model.parameters():
            dist.broadcast(param.detach(), 0)
        in_blocks = set(model.blocks.parameters())
        root = {name: param for name, param in model.named_parameters() if param not in in_blocks}
        self.model = Unit("", model, root, split, self)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = Unit(f"blocks.{i}.", block, dict(block.named_parameters()), split, self)
        self.units = [self.model, *model.blocks]
        self.shards = [unit.held for unit in self.units if unit.held.requires_grad]  # for an optimizer

    @torch.no_grad()
    def update_servers(self):
        """All ranks call it after each update. They walk unit by unit, server by server, trainer by trainer:
        both ends of a message come to it at the same point of this walk, so that it needs no header."""
        flats = self.gather() if self.how == "rank0" else []
        for i, unit in enumerate(self.units):
            if self.how == "direct":
                self.deliver(unit, unit.held.to(unit.dtype), self.rank * unit.size)
            else:
                unit.flat = flats[i] if flats else unit.unshard()
                self.deliver(unit, unit.flat, 0)
                unit.reshard()

    def gather(self):
        flats = []  # of all units, on rank 0
        for unit in self.units:
            flat = unit.unshard()
            flats.append(flat if self.rank == 0 else None)
        return flats

    def plan(self, unit):
        """[(sender, receiver, runs)]: who sends whom which numbers of a unit, in order."""
        messages = []
        for server, (_, runs) in enumerate(unit.layouts):
            receiver = self.n_trainers + server
            if self.how == "direct":
                for trainer in range(self.n_trainers):
                    start = trainer * unit.size
                    both = intersections(start, start + unit.size, runs)
                    messages.append((trainer, receiver, both))
            else:
                sender = 0 if self.how == "rank0" else server % self.n_trainers
                messages.append((sender, receiver, runs))
        return [message for message in messages if message[-1]]

    def deliver(self, unit, flat, start):
        """Send each server its slices of a unit. flat: this trainer's numbers of it, from `start` on."""
        ops = []
        received = 0
        for sender, receiver, runs in unit.plan:
            if self.rank == sender:
                message = take(flat, runs, start)
                ops.append(dist.P2POp(dist.isend, message, receiver))
            elif self.rank == receiver:
                # Trainers' intervals ascend, as a slice's numbers do: the next message continues at its end.
                numel = sum(last - first for first, last in runs)
                end = received + numel
                message = unit.held.data[received:end]
                ops.append(dist.P2POp(dist.irecv, message, sender))
                received = end
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float):
        """Scale the trainers' gradients to a global norm of at most max_norm. Returns the norm before."""
        grads = [shard.grad for shard in self.shards]
        squares = torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).square().sum()
        dist.all_reduce(squares, group=self.trainers)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(self.shards, max_norm, norm.to(grads[0]))
        return norm

    @torch.no_grad()
    def full_state_dict(self):
        """The plain model's state_dict on rank 0, else {}. All ranks must call it."""
        weights = {}
        for unit, flat in zip(self.units, self.gather()):
            if flat is not None:
                weights |= zip(unit.names, unit.views(flat).values())
        return weights


# What servers split: {parameter: (dimension, number of stacked matrices)}. A column-parallel layer is split
# by its outputs, with its bias; a row-parallel one by its inputs. All servers have all other parameters.
SPLIT = {"qkv.weight": (0, 3), "qkv.bias": (0, 3), "proj.weight": (1, 1)}
SPLIT |= {"up.weight": (0, 1), "up.bias": (0, 1), "down.weight": (1, 1)}


def layout_of(params, split, server, n_servers):
    """({name: shape}, runs) of a server's slices of {name: parameter}. The runs are what it holds of the flat
    vector of all these parameters: intervals [first, end), in ascending order."""
    shapes = {}
    runs = []
    start = 0  # of a parameter in the flat vector
    for name, param in params.items():
        shape = list(param.shape)
        if name in split:
            dim, stacked = split[name]
            size = shape[dim] // stacked
            first = server * size // n_servers
            end = (server + 1) * size // n_servers
            shape[dim] = stacked * (end - first)
            after = param.shape[dim + 1 :].numel()
            for i in range(0, param.numel() // after, size):  # stacked matrices, or if dim is 1, rows
                runs.append((start + (i + first) * after, start + (i + end) * after))
        else:
            runs.append((start, start + param.numel()))
        shapes[name] = torch.Size(shape)
        start += param.numel()
    return shapes, runs


def intersections(start, end, runs):
    """The parts of the runs that lie in the interval [start, end)."""
    parts = []
    for first, last in runs:
        if max(start, first) < min(end, last):
            parts.append((max(start, first), min(end, last)))
    return parts


def take(flat, runs, start):
    """The numbers in these runs, one run after the other. flat: the vector's numbers from `start` on."""
    return torch.cat([flat[first - start : end - start] for first, end in runs])


class Unit(nn.Module):
    """What a rank holds of a module: of the flat vector of its parameters a trainer 1/N, a server its runs.
    On a trainer a unit of zero3.py, without prefetch: unsharded in forward and backward, not in between."""

    def __init__(self, prefix, module, params, split, ranks):
        super().__init__()
        self.module = module
        self.ranks = ranks
        self.names = [prefix + name for name in params]
        self.shapes = {name: param.shape for name, param in params.items()}
        self.flat = None  # all numbers, while it is unsharded
        flat = torch.cat([param.detach().flatten() for param in params.values()])
        self.dtype = flat.dtype
        self.size = -(-len(flat) // ranks.n_trainers)  # of a shard
        self.layouts = []  # of each server
        for server in range(ranks.n_servers):
            self.layouts.append(layout_of(params, split, server, ranks.n_servers))
        self.plan = ranks.plan(self)
        if ranks.is_trainer:
            padded = F.pad(flat, (0, -len(flat) % ranks.n_trainers))
            shard = padded.chunk(ranks.n_trainers)[ranks.rank]
            held = shard.to(torch.promote_types(flat.dtype, torch.float32), copy=True)
        else:
            self.shapes, runs = self.layouts[ranks.rank - ranks.n_trainers]
            held = take(flat, runs, 0)
        trained = {param.requires_grad for param in params.values()}
        assert len(trained) == 1, "freeze all parameters of a unit, or none"
        self.held = nn.Parameter(held, ranks.is_trainer and trained.pop())
        for param in params.values():
            param.data = param.new_empty(0)  # frees it

    def views(self, flat):
        """{name: parameter or slice}, as views of a flat vector, which may be padded."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = flat.split([*sizes, len(flat) - sum(sizes)])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts)}

    def forward(self, *args):
        self.flat = Unshard.apply(self.held, self)
        # Autograd keeps what pack() returns in place of a weight, and in backward calls unpack() for it.
        with saved_tensors_hooks(self.pack, self.unpack):
            output = functional_call(self.module, self.views(self.flat), args)
        self.reshard()
        return output

    def pack(self, tensor):
        is_weight = tensor.untyped_storage() is self.flat.untyped_storage()
        return (tensor.shape, tensor.stride(), tensor.storage_offset()) if is_weight else tensor

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        if self.flat is None:  # this is the first weight that this backward needs
            self.flat = self.unshard()
        return self.flat.as_strided(*packed)

    def unshard(self):
        if not self.ranks.is_trainer:
            return self.held.data  # a server computes with its slices
        flat = self.held.new_empty(self.size * self.ranks.n_trainers, dtype=self.dtype)
        own = flat.data.chunk(self.ranks.n_trainers)[self.ranks.rank]
        own.copy_(self.held.data)
        all_gather(flat, own, group=self.ranks.trainers)
        return flat

    def reshard(self):
        if self.ranks.is_trainer and self.flat is not None:
            self.flat.untyped_storage().resize_(0)  # free it, as gloo may still hold the tensor
        self.flat = None


class Unshard(torch.autograd.Function):  # backward is called when a unit has all its gradients
    @staticmethod
    def forward(ctx, shard, unit):
        ctx.unit = unit
        return unit.unshard()

    @staticmethod
    def backward(ctx, grad):
        ctx.unit.reshard()
        received = grad.new_empty(ctx.unit.size)
        reduce_scatter(received, grad, group=ctx.unit.ranks.trainers)
        grad.untyped_storage().resize_(0)  # this, too
        return received.to(ctx.unit.held.dtype).div_(ctx.unit.ranks.n_trainers), None  # their average


def serve_slices(ranks):
    """Make the forward of a GPT that is split by SPLIT tensor_parallel.py's. (There is no backward here.)"""

    def row_parallel(layer, x):
        y = F.linear(x, layer.weight)
        dist.all_reduce(y, group=ranks.servers)
        return y + layer.bias

    for unit in ranks.model.module.blocks:
        unit.module.heads //= ranks.n_servers
        for layer in unit.module.proj, unit.module.down:
            layer.forward = partial(row_parallel, layer)


def choose_servers(config, world_size):
    if config.servers is None:
        config.servers = world_size // 2
    if config.servers >= world_size or config.heads % max(config.servers, 1):
        refuse(f"--servers {config.servers}: must be less than the {world_size} ranks, and divide --heads")
    return world_size - config.servers


def train(config):
    n_trainers = choose_servers(config, int(os.getenv("WORLD_SIZE") or 1))
    device, text = set_up(config, f" | servers {config.servers} | how {config.how}", n_trainers)
    model = GPT(config).to(device, DTYPES[config.dtype])
    ranks = Resharding(model, SPLIT, config.servers, config.how)
    if ranks.is_trainer:
        optimizer = OPTIMIZERS[config.optim](ranks.shards, lr=config.lr, fused=True)
    else:
        serve_slices(ranks)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        # The servers' loss, the trainers' loss, and the gradients' norm: each rank adds to some of them.
        numbers = torch.zeros(3, dtype=torch.float64, device=device)
        for inputs, targets in microbatches(config, text, step, device, *ranks.share):
            # Each loss is a mean, and gradients add up over microbatches: divide to get the batch's mean.
            microloss = mean_loss(ranks.model(inputs), targets) / config.accum
            if ranks.is_trainer:
                microloss.backward()
            numbers[int(ranks.is_trainer)] += microloss.detach()
        if ranks.is_trainer:
            numbers[2] = ranks.clip_grad_norm_(config.clip)
            optimizer.step()
            optimizer.zero_grad()
        ranks.update_servers()
        dist.all_reduce(numbers)
        _, loss, grad_norm = numbers / n_trainers
        print_step(config, step, loss, grad_norm, started)
        print_served(config, numbers[0])
    if config.save:
        state_dict = ranks.full_state_dict()
        if ranks.rank == 0:
            save_weights(state_dict, config.save)


def print_served(config, losses):  # of all servers, added up
    total = losses.item()
    if config.servers and not dist.get_rank():
        print(f"    servers  | loss {total / config.servers:.4f}")


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--servers", type=int, help="ranks that serve (default: half of all); the others train")
    own.add_argument("--how", choices="rank0 units direct".split(), default="units", help="see Resharding")
    return read_flags(arguments, own, servers=(1, 1_048_576))


# ==== toy model: the same lines in every lesson ====
SHAPE = "layers heads width context vocab".split()
SIZES = {"toy": "8 8 64 64 256", "small": "6 8 256 128 256", "gpt2": "12 12 768 1024 50304",
         "gpt2-xl": "48 25 1600 1024 50304", "7.5b": "32 34 4352 2048 50304"}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
CHOICES = {"size": SIZES, "optim": OPTIMIZERS, "dtype": DTYPES, "device": "auto cpu cuda".split()}
DEFAULTS = {"size": "toy", "optim": "adamw", "dtype": "fp32", "device": "auto", "data": np.ma.core.__file__,
            "steps": 20, "batch": 16, "accum": 1, "lr": 1e-3, "clip": 1.0, "seed": 0, "save": ""}  # fmt: skip
HELP = "--batch: of all ranks; --accum: microbatches of a rank; --clip inf: any norm; --data: file or folder"


def read_flags(arguments, *own, **limits):  # own: other parsers. limits: {name: (least, most)}
    parser = argparse.ArgumentParser(parents=own, epilog=f"{HELP}; defaults: {DEFAULTS}, and --size's shape")
    parser.error = refuse
    for name, default in (DEFAULTS | dict.fromkeys(SHAPE, 0)).items():  # 0: that of --size
        parser.add_argument(f"--{name}", default=default, type=type(default), choices=CHOICES.get(name))
    parser.set_defaults(**dict(zip(SHAPE, SIZES[parser.parse_args(arguments).size].split())))
    config = parser.parse_args(arguments)
    limits |= {"lr": (0, 1e9), "clip": (1e-9, torch.inf), "seed": (0, 1e18), "vocab": (256, 1_048_576)}
    for name, value in vars(config).items():
        least, most = limits.get(name, (1, 1_048_576))
        if type(value) in (int, float) and not least <= value <= most:
            refuse(f"--{name.replace('_', '-')} {value}: must be from {least} to {most}")
    return config


def refuse(problem):  # in a line on rank 0, for which the others wait, else torchrun may end it first
    if os.getenv("RANK", "") in "0":  # or it is not set
        sys.stderr.write(f"{Path(__file__).name}: {problem}\n")
    else:
        time.sleep(5)
    raise SystemExit(2)


def set_up(config, choices="", replicas=None):  # check, and join the world; returns device and text
    replicas = replicas or int(os.getenv("WORLD_SIZE") or 1)
    if config.batch % (replicas * config.accum):
        refuse(f"--batch {config.batch}: must be a multiple of replicas x --accum, {replicas * config.accum}")
    if config.width % config.heads:
        refuse(f"--width {config.width}: must be a multiple of --heads {config.heads}")
    gpus = torch.cuda.device_count() * (config.device != "cpu")
    if config.device == "cuda" and not gpus:
        refuse("--device cuda: no GPU is visible here; use --device cpu")
    try:  # a file is missing, or a variable of the environment
        files = sorted(filter(Path.is_file, Path(config.data).rglob("*"))) or [Path(config.data)]
        if not config.context < sum(map(os.path.getsize, files)) <= 2e9:
            refuse(f"--data {config.data}: must have more bytes than --context {config.context}, at most 2e9")
        text = bytearray().join(map(Path.read_bytes, files))
        open(config.save or "/dev/null", "ab").close()
        device = torch.device(f"cuda:{int(os.getenv('LOCAL_RANK', 0)) % gpus}" if gpus else "cpu")
        torch.cuda.set_device(device if gpus else -1)  # -1: none
        if not dist.is_initialized():
            if 0 < gpus < int(os.getenv("LOCAL_WORLD_SIZE", 1)):  # ranks share a GPU
                os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])  # NCCL refuses it on one host
            alone = () if {"RANK", "WORLD_SIZE"} & set(os.environ) else (None, None, 1, 0, dist.HashStore())
            dist.init_process_group("nccl" if gpus else "gloo", *alone)
    except (OSError, ValueError) as error:
        refuse(f"{error}; check --data {config.data} and --save {config.save}, or start it with torchrun")
    if not dist.get_rank():
        world = f"{dist.get_world_size()} ranks {dist.get_backend()}/{device.type}"
        batch = f"{config.batch} = {replicas} x {config.accum} x {config.batch // replicas // config.accum}"
        print(f"{Path(__file__).stem} | {world} | {config.size} {config.dtype} | batch {batch}{choices}")
    torch.manual_seed(config.seed)
    return device, torch.frombuffer(text, dtype=torch.uint8)


def microbatches(config, text, step, device, rank=0, replicas=1):  # (inputs, targets), int64 (b, s)
    windows = text.unfold(0, config.context + 1, 1)  # every (s + 1) bytes in a row, a view
    starts = np.random.default_rng((config.seed, step)).integers(len(windows), size=config.batch)
    tokens = windows[starts.reshape(replicas, config.accum, -1)[rank]].to(device, non_blocking=True).long()
    return zip(tokens[..., :-1], tokens[..., 1:])


class Block(nn.Module):  # pre-norm, with a heads: (b, s, h) -> (b, s, h)
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (b, s, 3, a, h/a)
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # (b, a, s, h/a) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):  # tokens (b, s) -> logits (b, s, v); the head is the embedding
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.heads, config.width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def mean_loss(logits, targets):  # mean cross-entropy, in fp32 or fp64
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())


def print_step(config, step, loss, grad_norm, started):  # each .item() waits for the device: once a step
    line = f"step {step:>2}/{config.steps} | loss {loss.item():.4f} | grad norm {grad_norm.item():.3f}"
    ms = 1e3 * (time.perf_counter() - started)
    if not dist.get_rank():
        print(f"{line} | {ms:.1f} ms | {config.batch * config.context / ms:.1f} k tok/s")


def save_weights(state_dict, path):  # at the end, on rank 0
    try:
        torch.save(state_dict, path)
    except (OSError, RuntimeError):
        refuse(f"--save {path}: cannot be written; is the disk full?")


# ==== end of the toy model ====


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
