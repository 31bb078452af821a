"""Reshard: after each update, new weights go from the trainers' ZeRO-3 shards to tensor-parallel servers.

Idea
    Some ranks train and others serve, as in reinforcement learning, and after each update the servers need
    the new weights. But they hold them in another layout. Each of N trainers holds 1/N of every unit (a
    block, or all that is in no block), as in zero3.py: an interval of the flat vector of its parameters. Each
    of t servers holds 1/t of every matrix of a block, as in tensor_parallel.py: some rows, or some columns.
    For a unit of A (4, 2), split by rows, and B (2, 4), split by columns, with 3 trainers and 2 servers:

    flat vector        A A A A A A A A B B B B B B B B
    held by trainer    0 0 0 0 0 0 1 1 1 1 1 1 2 2 2 2
    held by server     0 0 0 0 1 1 1 1 0 0 1 1 0 0 1 1

    --how rank0, the naive way: the trainers all-gather each unit, rank 0 keeps all of them, and then sends
    each server its slices. It needs memory for the whole model, and while it sends, the others wait.
    --how units: the trainers all-gather one unit at a time and share the sending. This takes memory for one
    unit, but each trainer still receives the whole model, only to send a part of it on.
    --how direct: a server's rows are an interval of the flat vector, and its columns an interval in each row.
    All ranks know this from shapes alone. So each trainer sends each server what both hold, where their
    intervals intersect. Trainers receive nothing, and nothing passes through a rank that does not need it.

Timeline
    a trainer | forward, backward 3, update | send    | forward, backward 4, update | send    | ...
    a server  | loss of batch 3             | receive | loss of batch 4             | receive | ...

Memory (bytes on the trainer that holds most; P parameters, U in a block, E in none)
    parameters    mP/N+w(E+U)                without --how rank0
    parameters    mP/N+wP                    with --how rank0: on rank 0
    gradients     mP/N+wmax(E,U)(1+g+1/N)    g = 1 over gloo, whose reduce-scatter copies a unit's, else 0
    optimizer     KP/N                       K = 8 for AdamW's two moments, 0 for SGD (fp64: w, m = 8, K = 16)
    A weight has w bytes: 4 in fp32, 2 in bf16; in a shard, m = 4. Not counted: messages, and gradients before
    they travel, when autograd adds up the embedding's two (about 3wE) and joins a unit's in one vector (2wU).

Sent (bytes in each step of k microbatches, of b sequences on each trainer)
    reduce-scatter    kwP(N-1)/N         by each trainer; over gloo, where it is an all-reduce, twice that
    all-gather        2kwP(N-1)/N        with --how direct: by each trainer, for a unit's forward and backward
    all-gather        (2k+1)wP(N-1)/N    without --how direct: and again before it is sent
    send              wtD                with --how rank0; a server holds D = (P-r)/t+r, r of them unsplit
    send              wqD                with --how units: by a trainer with q servers, t/N rounded up
    send              wtD/N              with --how direct: by a trainer, on average
    all-reduce        4kwNbsLh(t-1)/t    by each server: L layers, h width, s context

Run
    torchrun --nproc_per_node=4 more/reshard.py --how direct
    torchrun --nproc_per_node=8 more/reshard.py --servers 2 --batch 18 --how rank0

Left out
    Serving while new weights arrive. Servers wait, as they receive into the weights that they use. A second
    copy, swapped in when it is complete, would let them go on, but would take as much memory again.
    With --how units, sending what the next forward gathers anyway, which would save an all-gather.
    Overlap in a step; embeddings that servers split; buffers; what zero3.py and tensor_parallel.py leave out.
    With --how direct, a frozen unit stays unsharded after backward. Ranks with different models may hang.
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
        # (i, n): part i of n of each batch. A server computes the loss of all of it.
        self.share = (self.rank, self.n_trainers) if self.is_trainer else (0, 1)
        self.trainers = dist.new_group(range(self.n_trainers))
        self.servers = dist.new_group(range(self.n_trainers, dist.get_world_size())) if n_servers else None
        root = {name: param for name, param in model.named_parameters() if not name.startswith("blocks.")}
        self.model = Unit("", model, root, split, self)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = Unit(f"blocks.{i}.", block, dict(block.named_parameters()), split, self)
        self.units = [self.model, *model.blocks]
        self.messages = {unit: self.plan(unit) for unit in self.units}
        self.shards = [unit.held for unit in self.units if unit.held.requires_grad]  # for an optimizer

    def plan(self, unit):
        """[(sender, receiver, runs)]: who sends whom which intervals, counted from the sender's first number.
        All ranks walk along this same list, so both ends of a message come to it in the same order, and it
        needs no label."""
        messages = []
        for server, (_, runs) in enumerate(unit.layouts):
            receiver = self.n_trainers + server
            if self.how == "direct":
                for trainer in range(self.n_trainers):
                    both = intersections(trainer * unit.size, (trainer + 1) * unit.size, runs)
                    if both:
                        messages.append((trainer, receiver, both))
            else:
                sender = 0 if self.how == "rank0" else server % self.n_trainers
                messages.append((sender, receiver, runs))
        return messages

    @torch.no_grad()
    def update_servers(self):
        """Give the servers the trainers' weights. All ranks must call it, after each update."""
        if self.how == "rank0":
            self.gather()
        for unit in self.units:
            if self.how == "units":
                unit.flat = unit.unshard()
            self.deliver(unit)
            unit.reshard()

    def gather(self):
        """Unshard all units on rank 0. The other trainers take part, but keep none."""
        for unit in self.units:
            unit.flat = unit.unshard()
            if self.rank != 0:
                unit.reshard()

    def deliver(self, unit):
        """Send each server its slices of a unit."""
        ops = []
        rest = unit.held.data  # on a server: what has not arrived yet
        for sender, receiver, runs in self.messages[unit]:
            if self.rank == sender:
                flat = unit.held if self.how == "direct" else unit.flat
                numbers = take(flat, runs).to(unit.dtype)
                ops.append(dist.P2POp(dist.isend, numbers, receiver))
            elif self.rank == receiver:
                # Messages come in the order of the flat vector: each continues where the last one ended.
                numel = sum(end - first for first, end in runs)
                numbers, rest = rest.tensor_split([numel])
                ops.append(dist.P2POp(dist.irecv, numbers, sender))
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
        self.gather()
        weights = {}
        for unit in self.units:
            if self.rank == 0:
                weights |= zip(unit.names, unit.views(unit.flat).values())
            unit.flat = None  # weights keeps it
        return weights


# What servers split of a block: {parameter: (dimension, number of stacked matrices)}. A layer is split by its
# outputs (dimension 0), with its bias, or by its inputs (1). All servers have all other parameters.
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
            stride = param.shape[dim + 1 :].numel()  # from one index of this dimension to the next
            # There is a run in each of the stacked matrices, or if dim is 1, in each row.
            for i in range(start, start + param.numel(), size * stride):
                runs.append((i + first * stride, i + end * stride))
        else:
            runs.append((start, start + param.numel()))
        shapes[name] = torch.Size(shape)
        start += param.numel()
    return shapes, runs


def intersections(low, high, runs):
    """The parts of the runs that lie in the interval [low, high), counted from low."""
    parts = [(max(low, first), min(high, end)) for first, end in runs]
    return [(first - low, end - low) for first, end in parts if first < end]


def take(flat, runs):
    """The numbers in these runs, one run after the other."""
    return torch.cat([flat[first:end] for first, end in runs])


class Unit(nn.Module):
    """Parameters that travel together. A server holds its runs of their flat vector, a trainer 1/N of it, as
    in zero3.py without prefetch: the unit is unsharded in its forward and in its backward, not in between."""

    def __init__(self, prefix, module, params, split, resharding):
        super().__init__()
        self.module = module
        self.resharding = resharding
        self.names = [prefix + name for name in params]
        self.shapes = {name: param.shape for name, param in params.items()}
        self.flat = None  # while the unit is unsharded: the flat vector, on a server its slices
        flat = torch.cat([param.detach().flatten() for param in params.values()])
        # All ranks start from rank 0's weights. (Over NCCL, all must also take part in the first operation.)
        dist.broadcast(flat, 0)
        self.dtype = flat.dtype
        n_trainers = resharding.n_trainers
        n_servers = resharding.n_servers
        self.size = -(-len(flat) // n_trainers)  # of a shard
        self.layouts = [layout_of(params, split, server, n_servers) for server in range(n_servers)]
        if resharding.is_trainer:
            shard = F.pad(flat, (0, -len(flat) % n_trainers)).chunk(n_trainers)[resharding.rank]
            held = shard.to(torch.promote_types(flat.dtype, torch.float32), copy=True)
        else:
            self.shapes, runs = self.layouts[resharding.rank - n_trainers]
            held = take(flat, runs)
        trained = {param.requires_grad for param in params.values()}
        assert len(trained) == 1, "freeze all parameters of a unit, or none"
        self.held = nn.Parameter(held, resharding.is_trainer and trained.pop())
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
        if not self.resharding.is_trainer:
            return self.held.data  # a server computes with its slices
        flat = self.held.new_empty(self.size * self.resharding.n_trainers, dtype=self.dtype)
        own = flat.data.split(self.size)[self.resharding.rank]
        own.copy_(self.held.data)
        all_gather(flat, own, group=self.resharding.trainers)
        return flat

    def reshard(self):
        if self.resharding.is_trainer and self.flat is not None:
            self.flat.untyped_storage().resize_(0)  # free it, as gloo may still hold the tensor
        self.flat = None


class Unshard(torch.autograd.Function):  # backward is called when a unit has all its gradients
    @staticmethod
    def forward(ctx, shard, unit):
        ctx.unit = unit
        return unit.unshard()

    @staticmethod
    def backward(ctx, grad):
        unit = ctx.unit
        unit.reshard()
        received = grad.new_empty(unit.size)
        reduce_scatter(received, grad, group=unit.resharding.trainers)
        grad.untyped_storage().resize_(0)  # this, too
        return received.to(unit.held.dtype).div_(unit.resharding.n_trainers), None  # the average


def serve_slices(resharding):
    """Give a server's blocks the forward of tensor_parallel.py, without its backward."""

    def row_parallel(layer, x):
        y = F.linear(x, layer.weight)
        dist.all_reduce(y, group=resharding.servers)
        return y + layer.bias

    for unit in resharding.model.module.blocks:
        unit.module.heads //= resharding.n_servers
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
    resharding = Resharding(model, SPLIT, config.servers, config.how)
    if resharding.is_trainer:
        optimizer = OPTIMIZERS[config.optim](resharding.shards, lr=config.lr, fused=True)
    else:
        serve_slices(resharding)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        numbers = torch.zeros(3, dtype=torch.float64, device=device)
        servers_loss, trainers_loss, grad_norm = numbers  # views; the all-reduce makes them sums over ranks
        own_loss = trainers_loss if resharding.is_trainer else servers_loss
        for inputs, targets in microbatches(config, text, step, device, *resharding.share):
            # Each loss is a mean, and gradients add up over microbatches: divide to get the batch's mean.
            microloss = mean_loss(resharding.model(inputs), targets) / config.accum
            if resharding.is_trainer:
                microloss.backward()
            own_loss += microloss.detach()
        if resharding.is_trainer:
            grad_norm += resharding.clip_grad_norm_(config.clip)
            optimizer.step()
            optimizer.zero_grad()
        resharding.update_servers()
        dist.all_reduce(numbers)
        print_step(config, step, trainers_loss / n_trainers, grad_norm / n_trainers, started)
        print_served(config, servers_loss)
    if config.save:
        state_dict = resharding.full_state_dict()
        if resharding.rank == 0:
            save_weights(state_dict, config.save)


def print_served(config, losses):  # of all servers, added up
    total = losses.item()
    if config.servers and not dist.get_rank():
        print(f"    servers  | loss {total / config.servers:.4f}")


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--servers", type=int, help="ranks that serve (default: half of all); the others train")
    own.add_argument("--how", choices="rank0 units direct".split(), default="units", help="see Idea")
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
