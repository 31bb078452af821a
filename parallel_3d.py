"""3D parallelism: data, tensor and pipeline parallelism on one mesh of ranks, and which group adds up what.

Idea
    N = p x d x t ranks: p pipeline stages (pipeline.py), d replicas of each stage, which have their own parts
    of the batch (ddp.py), and t ranks that split the layers of a replica (tensor_parallel.py). These t send
    most, so they are neighbours, on one node. Pipeline stages send least, so they are farthest apart
    (Megatron-LM, arXiv 2104.04473, section 3).

    The three techniques are those of their own lessons, in short. New here are the mesh and its groups; the
    order of collectives, which must be the same on all ranks of a group; and the embedding, which the first
    and the last stage share, so that its gradient is a sum of both's.

Timeline (a step of 2 x 2 x 2 ranks)
    stage 0 | replica 0: ranks 0 1 | replica 1: ranks 2 3
    stage 1 | replica 0: ranks 4 5 | replica 1: ranks 6 7
    Microbatches in 1F1B order: tensor parallel sums between ranks 0 and 1, messages between 0 and 4. In the
    last backward: gradients between 0 and 2, layer by layer. Then the loss, of all ranks; the embedding's
    gradient, between 0 and 4, then 0 and 2; the norm, of all; the update; with --zero 1 the weights, 0 and 2.

Memory (bytes; R parameters on the rank that has most, about P/t/p)
    w bytes of a weight: 4 in fp32, 2 in bf16, 8 in fp64; c bytes of its fp32 master: 4 in bf16, else 0
    K bytes of AdamW's two moments: 8, in fp64 16; of SGD 0; g = 1 over gloo, for a receive buffer, else 0
    parameters    (w+c)R
    gradients     (w+c)R                 in bf16 also the masters'
    optimizer     KR
    parameters    (w+c/d)R               with --zero 1 (if d > 1): each master on one replica
    gradients     (w+gw+(w+c)/d)R        with --zero 1: gradients, receive buffer, the shard's, its master's
    optimizer     KR/d                   with --zero 1

Sent (bytes, by the rank that sends most, in each step of k microbatches, along each axis; // rounds down)
    tensor        2kbs((4((L+p-1)//p)+1+1//p)wh+m+8)(t-1)/t   4 a block; head; if p = 1 embedding; loss: m + 8
    pipeline      min(2,p-1)kwbsh                             to the next stage outputs, back gradients
    tie           min(1,p-1)wh((v+t-1)//t)                    all-reduce of the embedding's gradient, if p > 1
    data          2wR(d-1)/d                                  all-reduce, or reduce-scatter and all-gather
    L layers, h width, v vocabulary; b sequences of s tokens in a microbatch; m = 4, in fp64 8

Run
    torchrun --nproc_per_node=8 parallel_3d.py
    torchrun --nproc_per_node=8 parallel_3d.py --zero 1 --size gpt2-xl --heads 20 --dtype bf16

Left out
    Sequence parallelism, schedules other than 1F1B, ZeRO-2 and 3. To lift a technique, take its own lesson.
"""

import argparse
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # first: if torch.optim imports it later, the process group is never freed
import torch.nn as nn
import torch.nn.functional as F

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
identity = torch.detach


class Mesh:
    """This rank's place in ranks (p, d, t), and its groups: each varies one of the three coordinates."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.pp, self.dp, self.tp = ranks.shape
        places = np.argwhere(ranks == dist.get_rank())
        self.pp_rank, self.dp_rank, self.tp_rank = places[0].tolist()
        self.is_first = self.pp_rank == 0
        self.is_last = self.pp_rank == self.pp - 1
        self.output_group = self.group(ranks, 0, "pipeline")
        self.gradient_group = self.group(ranks, 0, "pipeline")  # on NCCL one group could deadlock
        self.dp_group = self.group(ranks, 1, "data")
        self.tp_group = self.group(ranks, 2, "tensor")
        self.tie_group = None
        if self.pp > 1:  # the first and the last stage have the same embedding
            self.tie_group = self.group(ranks[[0, -1]], 0, "tie")

    def group(self, ranks, axis, name):
        lines = np.moveaxis(ranks, axis, -1)
        lines = lines.reshape(-1, lines.shape[-1]).tolist()
        group, _ = dist.new_subgroups_by_enumeration(lines, group_desc=name)  # all ranks create all groups
        return group

    def tp_sum(self, x):
        total = x.clone()
        dist.all_reduce(total, group=self.tp_group)
        return total


class Conjugate(torch.autograd.Function):
    """x -> forward(x), and its gradient -> backward(gradient), such as Megatron-LM's conjugate f and g."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.gradient_function = backward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.gradient_function(gradient), None, None


def column_parallel(linear, mesh, x):  # (b, s, h) -> (b, s, out/t); x's gradient is partial, and summed
    return F.linear(Conjugate.apply(x, identity, mesh.tp_sum), linear.weight, linear.bias)


def row_parallel(linear, mesh, x):  # (b, s, in/t) -> (b, s, h); the bias after the sum, once
    return Conjugate.apply(F.linear(x, linear.weight), mesh.tp_sum, identity) + linear.bias


def vocab_parallel(embedding, mesh, tokens):  # (b, s) -> (b, s, h); token % t is the rank with it
    here = tokens % mesh.tp == mesh.tp_rank
    found = F.embedding(tokens // mesh.tp * here, embedding.weight)
    found *= here.unsqueeze(-1)
    return Conjugate.apply(found, mesh.tp_sum, identity)


def parallel_loss(mesh, logits, targets):
    """Mean cross-entropy, in fp64, of this rank's logits (b, s, v/t) and targets (b, s)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.unsqueeze(-1)
    here = targets % mesh.tp == mesh.tp_rank
    found = logits.gather(-1, targets // mesh.tp * here)
    found *= here
    of_target = Conjugate.apply(found, mesh.tp_sum, identity)
    shift = of_target.detach()  # saves an all-reduce of the maximum; the total is e^loss: hence fp64
    total = logits.logsumexp(-1, True) - shift
    total = Conjugate.apply(total.double().exp(), mesh.tp_sum, identity)
    return (total.log() + shift - of_target).mean()


SPLITS = {  # (forward, dim of the weight that is split)
    "tokens": (vocab_parallel, 0),
    "qkv": (column_parallel, 0),
    "proj": (row_parallel, 1),
    "up": (column_parallel, 0),
    "down": (row_parallel, 1),
}


def split_tensors(model, mesh):
    """Keep every t-th token, every t-th run of h/t features (one of q, of k, of v). Sets param.part."""
    run = model.tokens.embedding_dim // mesh.tp
    for block in model.blocks:
        block.heads //= mesh.tp
    for name, layer in model.named_modules():
        name = name.split(".")[-1]
        if name in SPLITS:
            forward, dim = SPLITS[name]
            layer.forward = partial(forward, layer, mesh)
            for param in layer.parameters():
                if dim < param.dim():  # a row-parallel layer's bias stays whole
                    places = np.arange(param.shape[dim])
                    if name != "tokens":
                        places //= run
                    indices = np.flatnonzero(places % mesh.tp == mesh.tp_rank)
                    part = (..., indices) if dim else indices
                    param.part = param.shape, part  # the whole's shape, and the part's place
                    param.data = param.detach()[part]


def stage_of(model, mesh):
    """This rank's layers. The head is the embedding, which first and last stage both hold."""
    sizes = [(len(model.blocks) + stage) // mesh.pp for stage in range(mesh.pp)]
    start = sum(sizes[: mesh.pp_rank])
    layers = list(model.blocks[start : start + sizes[mesh.pp_rank]])
    if mesh.is_first:
        model.positions.forward = partial(add_positions, model.positions)
        layers = [model.tokens, model.positions, *layers]
    if mesh.is_last:
        head = nn.Linear(1, 1, bias=False)  # of any size
        head.weight = model.tokens.weight
        head.forward = partial(column_parallel, head, mesh)
        layers += [model.norm, head]
    return nn.Sequential(*layers)


def add_positions(positions, x):  # (b, s, h) -> (b, s, h)
    return x + positions.weight[: x.shape[1]]


class Bucket:
    """A layer's split, or whole, params: views of flat_param. `shard`: what this rank steps, all or 1/d."""

    def __init__(self, params, mesh, zero):
        self.mesh = mesh
        self.n_shards = mesh.dp if zero else 1
        self.n_params = len(params)
        flat = nn.utils.parameters_to_vector(params).detach()
        self.flat_param = F.pad(flat, (0, -len(flat) % self.n_shards))
        self.flat_grad = torch.zeros_like(self.flat_param)
        for param in params:
            param.grad = torch.empty_like(param)
            param.register_post_accumulate_grad_hook(self.gradient_ready)
        nn.utils.vector_to_parameters(self.flat_param, params)
        nn.utils.vector_to_parameters(self.flat_grad, [param.grad for param in params])
        wide = torch.promote_types(flat.dtype, torch.float32)
        self.shard = nn.Parameter(self.shard_of(self.flat_param).to(wide))  # of bf16 a copy, else a view
        counted = hasattr(params[0], "part") or mesh.tp_rank == 0
        self.in_norm = counted and (zero or mesh.dp_rank == 0)  # by one of its holders

    def shard_of(self, flat):
        return flat.chunk(self.n_shards)[self.mesh.dp_rank % self.n_shards]

    def gradient_ready(self, _):
        self.pending -= 1
        if self.pending == 0:
            self.launch()

    def launch(self):
        options = {"group": self.mesh.dp_group, "async_op": True}
        self.grad = self.flat_grad
        if self.n_shards == 1:
            self.work = dist.all_reduce(self.grad, **options)
        else:  # gloo's reduce-scatter is an all-reduce, which sends twice as much
            gloo = dist.get_backend() == "gloo"
            collective = dist.all_to_all_single if gloo else reduce_scatter
            self.grad = torch.empty_like(self.flat_grad if gloo else self.shard_of(self.flat_grad))
            self.work = collective(self.grad, self.flat_grad, **options)

    def finish(self):
        if self.pending > 0:  # tied, or a parameter without gradient, which counts as 0
            self.launch()
        self.work.wait()
        if len(self.grad) > len(self.shard):  # all-to-all's, to be added up
            self.grad = self.grad.view(self.n_shards, -1).sum(0)
        self.grad /= self.mesh.dp
        self.shard.grad = self.grad.to(self.shard.dtype)

    @torch.no_grad()
    def update(self):
        part = self.shard_of(self.flat_param)
        part.copy_(self.shard)  # in fp32 the same memory
        self.shard.grad = None
        if self.n_shards > 1:
            all_gather(self.flat_param, part, group=self.mesh.dp_group)
        self.flat_grad.zero_()


class Parallel3D:
    """This rank's part of a model, which all ranks initialised alike. For a step see train()."""

    def __init__(self, model, mesh, zero, device, dtype):
        self.mesh = mesh
        self.width = model.tokens.embedding_dim
        split_tensors(model, mesh)
        self.stage = stage_of(model, mesh).to(device, dtype)
        here = set(self.stage.parameters())
        self.params = {name: param for name, param in model.named_parameters() if param in here}
        groups = {}
        for name, param in self.stage.named_parameters():
            layer = name.split(".")[0]
            groups.setdefault((layer, hasattr(param, "part")), []).append(param)
        self.buckets = [Bucket(params, mesh, zero) for params in groups.values()]
        self.shards = [bucket.shard for bucket in self.buckets]
        self.tied = mesh.tie_group and self.buckets[0 if mesh.is_first else -1]
        if self.tied:
            self.tied.in_norm &= mesh.is_first

    def forward_backward(self, batches):
        """1F1B over this replica's microbatches (inputs, targets). Returns the mean loss of all replicas."""
        mesh = self.mesh
        self.loss = self.shards[0].new_zeros((), dtype=torch.float64)
        self.sends = []
        in_flight = []
        warmup = mesh.pp - 1 - mesh.pp_rank
        last_turn = len(batches) + warmup - 1
        for turn in range(last_turn + 1):
            if turn < len(batches):
                in_flight.append(self._forward(*batches[turn], len(batches)))
            for bucket in self.buckets:  # the last backward launches all but the tied one: see finish()
                bucket.pending = (bucket.n_params + (bucket is self.tied)) if turn == last_turn else 0
            if turn >= warmup:
                self._backward(*in_flight.pop(0))
            while len(self.sends) > (4 if turn < last_turn else 0):
                self.sends.pop(0).wait()  # frees the tensor; in warmup a rank may wait here
        dist.all_reduce(self.loss)  # 0 but on the last stage's ranks, of which t are equal
        return self.loss / (mesh.dp * mesh.tp)

    def _forward(self, inputs, targets, n_microbatches):
        mesh = self.mesh
        x = inputs
        if not mesh.is_first:
            x = self.buckets[0].flat_param.new_empty(*inputs.shape, self.width)
            dist.recv(x, group=mesh.output_group, group_src=mesh.pp_rank - 1)
            x.requires_grad_()
        y = self.stage(x)
        if mesh.is_last:
            y = parallel_loss(mesh, y, targets) / n_microbatches  # as gradients add up
            self.loss += y.detach()
        else:
            self.sends.append(dist.isend(y.detach(), group=mesh.output_group, group_dst=mesh.pp_rank + 1))
        return x, y

    def _backward(self, x, y):
        mesh = self.mesh
        gradient = None
        if not mesh.is_last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, group=mesh.gradient_group, group_src=mesh.pp_rank + 1)
        y.backward(gradient)
        if not mesh.is_first:
            self.sends.append(dist.isend(x.grad, group=mesh.gradient_group, group_dst=mesh.pp_rank - 1))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Finish the gradients' sums, clip the shards' gradients to max_norm. Returns the norm before."""
        if self.tied:  # sum both copies' gradients, then, in finish(), those of all replicas
            dist.all_reduce(self.tied.flat_grad, group=self.mesh.tie_group)
        squares = torch.zeros_like(self.loss)
        for bucket in self.buckets:
            bucket.finish()
            if bucket.in_norm:
                squares += bucket.shard.grad.square().sum(dtype=torch.float64)
        dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(self.shards, max_norm, norm)
        return norm

    def full_state_dict(self):
        """The plain model's state_dict, on every rank's host."""
        parts = {}
        for name, param in self.params.items():
            parts[name] = param.data.clone().cpu(), getattr(param, "part", (param.shape, ...))
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, parts, group=dist.new_group(backend="gloo"))
        whole = {}
        for state in states:
            for name, (tensor, (shape, part)) in state.items():
                whole.setdefault(name, tensor.new_empty(shape))[part] = tensor
        return whole


def train(config):
    device, text, mesh = set_up_mesh(config)
    parallel = Parallel3D(GPT(config), mesh, config.zero, device, DTYPES[config.dtype])
    optimizer = OPTIMIZERS[config.optim](parallel.shards, lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        batches = microbatches(config, text, step, device, mesh.dp_rank, mesh.dp)
        loss = parallel.forward_backward(list(batches))
        grad_norm = parallel.clip_grad_norm_(config.clip)
        optimizer.step()
        for bucket in parallel.buckets:
            bucket.update()
        print_step(config, step, loss, grad_norm, started)
    if config.save:
        state_dict = parallel.full_state_dict()
        if dist.get_rank() == 0:
            save_weights(state_dict, config.save)


def set_up_mesh(config):
    """Check the flags and join. Returns the device, the text and the mesh."""
    world_size = int(os.getenv("WORLD_SIZE") or 1)
    config.tp = config.tp or math.gcd(2, world_size)
    config.pp = config.pp or math.gcd(2, world_size // config.tp)
    if world_size % (config.tp * config.pp):
        refuse(f"--tp {config.tp} x --pp {config.pp}: must divide the {world_size} ranks")
    if config.heads % config.tp:
        refuse(f"--heads {config.heads}: must be a multiple of --tp {config.tp}")
    if config.layers < config.pp:
        refuse(f"--layers {config.layers}: must be at least --pp {config.pp}")
    config.dp = world_size // (config.tp * config.pp)
    ranks = np.arange(world_size).reshape(config.pp, config.dp, config.tp)
    choices = f" | zero {config.zero} | stages x replicas x parts:\n{ranks}"
    device, text = set_up(config, choices, config.dp)
    return device, text, Mesh(ranks)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--tp", type=int, help="ranks that split each layer (default: 2 if the world is even)")
    own.add_argument("--pp", type=int, help="stages (default: 2 if ranks / --tp is even)")
    own.add_argument("--zero", type=int, default=0, help="1: shard optimizer states")
    DEFAULTS["accum"] = 4  # by default
    return read_flags(arguments, own, zero=(0, 1))


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
