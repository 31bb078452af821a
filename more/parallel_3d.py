"""3D parallelism: data, tensor and pipeline parallelism on one mesh of ranks, and which group adds up what.

Idea
    N = p x d x t ranks: p pipeline stages (pipeline.py), d replicas of each stage, which have their own parts
    of the batch (ddp.py), and t ranks that split the layers of a replica (tensor_parallel.py). These t send
    most, 4 sums for each block and microbatch, so they are neighbours, on one node. A stage sends one output,
    or gradient, for all its blocks, so stages may be far apart (Megatron-LM, arXiv 2104.04473, section 3).
    The three techniques are those of their own lessons, in short. New here: Mesh, with a group for each axis,
    and the order in which these groups add up.

Timeline (a step of 2 x 2 x 2 ranks; which ranks add up what)
    stage 0 | replica 0: ranks 0 1 | replica 1: ranks 2 3
    stage 1 | replica 0: ranks 4 5 | replica 1: ranks 6 7
    1. In 1F1B order, layers' outputs and their inputs' gradients: 0 + 1; messages go between 0 and 4
    2. While the last backward runs: gradients 0 + 2, layer after layer
    3. The loss: all ranks
    4. The embedding's gradient, which is also the head's: 0 + 4, then 0 + 2
    5. The squares of the gradients' norm: all ranks
    6. The update; with --zero 1, 0 and 2 each update a half of the weights and gather the other

Memory (bytes; R parameters on the rank that has most; activations are of 1/p of the blocks, p microbatches)
    w bytes of a weight: 4 in fp32, 2 in bf16, 8 in fp64; c bytes of its fp32 master: 4 in bf16, else 0
    K bytes of AdamW's two moments: 8, in fp64 16; of SGD 0
    parameters    (w+c)R
    gradients     (w+c)R               in bf16 also the masters' gradients
    optimizer     KR
    parameters    (w+c/d)R             with --zero 1 (if d > 1): each master on one replica
    gradients     (w+gw+(w+c)/d)R      with --zero 1: all, a copy over gloo (g = 1, else 0), 1/d of the sums
    optimizer     KR/d                 with --zero 1

Sent (bytes, by the rank that sends most, in each step of k microbatches, along each axis; // rounds down)
    tensor        2kbs((4L+1+1//p)wh+3m)(t-1)/t   4 sums a block; head, loss; embedding if p = 1
    pipeline      min(2,p-1)kwbsh                 outputs to the next stage, gradients to the one before
    tie           min(1,p-1)wh((v+t-1)//t)        the embedding's gradient, of v/t tokens, rounded up
    data          2wR(d-1)/d                      all-reduce, or reduce-scatter (more on gloo) and all-gather
    L blocks of the last stage, h width, v vocabulary; b sequences of s tokens; m = 4, in fp64 8

Run
    torchrun --nproc_per_node=8 more/parallel_3d.py
    torchrun --nproc_per_node=8 more/parallel_3d.py --zero 1 --size gpt2-xl --heads 20 --dtype bf16

Left out
    Refused: a second clip_grad_norm_() without update(); frozen parameters; targets to ignore, such as -100.
    Not noticed: ranks of a replica with other batches (as of a DistributedSampler), or that draw other
    models; another number of microbatches or tokens on one; a step without clip_grad_norm_(), which ends
    the sums, or without each bucket's update(); two forward_backward() in a step; torch's clip_grad_norm_.
    Not handled: dropout, sequence parallelism, other schedules, ZeRO-2 and 3; other models: see the lessons.
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

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Mesh:
    """This rank's place in ranks (p, d, t), and its groups: each of ranks that differ along one axis alone.
    In 2 x 2 x 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], rank 5 has stage 1, replica 0 and part 1: its tensor
    group is 4 5, its data group 5 7, its pipeline group 1 5."""

    def __init__(self, ranks):
        self.pp, self.dp, self.tp = ranks.shape
        self.pp_rank, self.dp_rank, self.tp_rank = np.argwhere(ranks == dist.get_rank())[0].tolist()
        self.is_first = self.pp_rank == 0
        self.is_last = self.pp_rank == self.pp - 1
        # Two groups, as NCCL runs a group's messages in order. Neighbours send each other an output and a
        # gradient at the same time: in one group, both could wait for the other to receive first.
        self.output_group = self.group(ranks, 0, "pipeline")
        self.gradient_group = self.group(ranks, 0, "pipeline")
        self.dp_group = self.group(ranks, 1, "data")
        self.tp_group = self.group(ranks, 2, "tensor")
        # The first and the last stage have the same embedding.
        self.tie_group = self.group(ranks[[0, -1]], 0, "tie") if self.pp > 1 else None

    def group(self, ranks, axis, name):
        lines = np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis])
        group, _ = dist.new_subgroups_by_enumeration(lines.tolist(), group_desc=name)  # all ranks create all
        return group

    def tp_sum(self, x):
        """The sum of the tensor group's x. Autograd sees a copy of x, and passes the gradient on."""
        total = x.clone()
        dist.all_reduce(total.detach(), group=self.tp_group)
        return total


def column_parallel(linear, mesh, x):
    """x (b, s, h), the same on all t ranks -> (b, s, out/t), other features on each."""
    x = x.view_as(x)
    x.register_hook(mesh.tp_sum)  # each rank has a part of the gradient of x, that of its features
    return F.linear(x, linear.weight, linear.bias)


def row_parallel(linear, mesh, x):
    """x (b, s, in/t) -> (b, s, h), the same on all t ranks. The bias is added after the sum, once."""
    return mesh.tp_sum(F.linear(x, linear.weight)) + linear.bias


def vocab_parallel(embedding, mesh, tokens):
    is_here = tokens % mesh.tp == mesh.tp_rank  # dealt out, so that t need not divide the vocabulary
    found = F.embedding(tokens // mesh.tp * is_here, embedding.weight)
    found = found * is_here.unsqueeze(-1)  # 0 on ranks that do not have the token
    return mesh.tp_sum(found)


def parallel_loss(mesh, logits, targets):
    """Mean cross-entropy, in fp32 or fp64, of this rank's logits (b, s, v/t) and targets (b, s)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own_lse = logits.logsumexp(-1)
    # All logits are taken relative to the largest of the ranks' log-sum-exps, so that no exp() overflows.
    largest = own_lse.detach().clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.tp_group)
    own_sum = (own_lse - largest).exp()
    is_here = targets % mesh.tp == mesh.tp_rank
    column = targets // mesh.tp * is_here
    own_logit = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1) - largest
    partials = torch.stack([own_sum, own_logit * is_here])
    total, target_logit = mesh.tp_sum(partials)
    return (total.log() - target_logit).mean()


SPLITS = {  # layer: (forward, the weight's dimension that is split)
    "tokens": (vocab_parallel, 0),
    "qkv": (column_parallel, 0),
    "proj": (row_parallel, 1),
    "up": (column_parallel, 0),
    "down": (row_parallel, 1),
}


def split_tensors(model, mesh):
    """Keep this rank's part of each layer: every t-th token, every t-th run of h/t features, so that down's
    inputs are up's outputs. For t = 2, qkv has runs q0 q1 k0 k1 v0 v1; rank 0 keeps q0 k0 v0, its heads'."""
    for block in model.blocks:
        block.heads //= mesh.tp
    for name, layer in model.named_modules():
        name = name.split(".")[-1]
        if name in SPLITS:
            forward, dim = SPLITS[name]
            layer.forward = partial(forward, layer, mesh)
            run = 1 if name == "tokens" else model.tokens.embedding_dim // mesh.tp
            for param in layer.parameters():
                if param.dim() > dim:  # a row-parallel layer's bias is not split: all have it
                    runs = np.arange(param.shape[dim]) // run
                    own = np.flatnonzero(runs % mesh.tp == mesh.tp_rank)
                    param.part = (..., own) if dim else own  # of the unsplit parameter
                    param.data = param.detach()[param.part]


def stage_of(model, mesh):
    """This rank's layers. The head is the embedding, which first and last stage both hold."""
    n = len(model.blocks)
    start = n * mesh.pp_rank // mesh.pp
    end = n * (mesh.pp_rank + 1) // mesh.pp
    layers = list(model.blocks[start:end])
    if mesh.is_first:
        positions = model.positions
        positions.forward = lambda x: x + positions.weight
        layers = [model.tokens, positions, *layers]
    if mesh.is_last:
        head = nn.Linear(1, 1, bias=False)  # its weight is replaced at once
        head.weight = model.tokens.weight
        head.forward = partial(column_parallel, head, mesh)
        layers += [model.norm, head]
    return nn.Sequential(*layers)


class Bucket:
    """A layer's split parameters, or its unsplit ones, as views of flat_param. They are two buckets, because
    the norm counts them in two ways. The optimizer gets shard: all of flat_param or, with --zero 1, 1/d."""

    def __init__(self, params, mesh, zero, is_tied):
        self.mesh = mesh
        self.n_shards = mesh.dp if zero else 1
        self.is_tied = is_tied
        self.n_params = len(params)
        flat = nn.utils.parameters_to_vector(params).detach()
        self.flat_param = F.pad(flat, (0, -len(flat) % self.n_shards))
        self.flat_grad = torch.zeros_like(self.flat_param)
        for param in params:
            param.grad = torch.empty_like(param)
            param.register_post_accumulate_grad_hook(self._gradient_ready)
        # Each parameter and gradient becomes a view.
        nn.utils.vector_to_parameters(self.flat_param, params)
        nn.utils.vector_to_parameters(self.flat_grad, [param.grad for param in params])
        wide = torch.promote_types(flat.dtype, torch.float32)
        self.shard = nn.Parameter(self.own_part(self.flat_param).to(wide))  # of bf16 a copy, else a view
        # So many ranks have this same shard. Each adds its square, divided by their number, to the norm's.
        self.n_copies = mesh.dp // self.n_shards * (1 + is_tied)
        if not hasattr(params[0], "part"):
            self.n_copies *= mesh.tp

    def own_part(self, flat):
        return flat.chunk(self.n_shards)[self.mesh.dp_rank % self.n_shards]  # n_shards is 1 or d

    def _gradient_ready(self, _):
        self.pending -= 1
        if self.pending == 0:
            self.start_sum()

    def start_sum(self):
        options = {"group": self.mesh.dp_group, "async_op": True}
        self.grad = self.flat_grad
        if self.n_shards == 1:
            self.work = dist.all_reduce(self.grad, **options)
        else:
            self.grad = self.flat_grad.new_empty(len(self.shard))
            self.work = reduce_scatter(self.grad, self.flat_grad, **options)

    def finish_sum(self):
        assert self.shard.grad is None, "call each bucket's update() between two clip_grad_norm_()"
        if self.is_tied:  # first add up the gradients of the two stages, then those of the replicas
            dist.all_reduce(self.flat_grad, group=self.mesh.tie_group)
        if self.pending:  # is_tied, or a parameter got no gradient, so its hook did not run
            self.start_sum()
        self.work.wait()
        self.grad /= self.mesh.dp
        self.shard.grad = self.grad.to(self.shard)

    @torch.no_grad()
    def update(self):
        own_part = self.own_part(self.flat_param)
        own_part.copy_(self.shard)  # in fp32 the same memory
        self.shard.grad = None
        if self.n_shards > 1:
            all_gather(self.flat_param, own_part, group=self.mesh.dp_group)
        self.flat_grad.zero_()


class Parallel3D:
    """This rank's part of a model, of which all ranks have drawn the same weights. For a step see train()."""

    def __init__(self, model, mesh, zero, device, dtype):
        self.mesh = mesh
        self.width = model.tokens.embedding_dim
        self.shapes = {name: param.shape for name, param in model.named_parameters()}
        split_tensors(model, mesh)
        self.stage = stage_of(model, mesh).to(device, dtype)
        here = set(self.stage.parameters())
        self.params = {}
        groups = {}
        for name, param in model.named_parameters():
            if param in here:
                self.params[name] = param
                layer = name.rsplit(".", 2)[0]  # such as blocks.3
                groups.setdefault((layer, hasattr(param, "part")), []).append(param)
        tied = model.tokens.weight if mesh.pp > 1 else None
        self.buckets = [Bucket(params, mesh, zero, params[0] is tied) for params in groups.values()]
        self.shards = [bucket.shard for bucket in self.buckets]

    def forward_backward(self, batches):
        """1F1B over a replica's microbatches (inputs, targets), the same on its p x t ranks. Returns the mean
        loss of all replicas."""
        mesh = self.mesh
        self.loss = self.shards[0].new_zeros((), dtype=torch.float64)
        self.sent = {}  # {group: the work of its latest send}
        self.in_flight = []
        for bucket in self.buckets:
            # A sum starts with the last of these gradients. One more for a tied bucket: see finish_sum().
            bucket.pending = bucket.n_params * len(batches) + bucket.is_tied
        # Until the first gradient can come back, run forwards alone, to fill the stages after this one.
        n_warmup = mesh.pp - 1 - mesh.pp_rank
        for i, batch in enumerate(batches):
            self._forward(*batch, len(batches))
            if i >= n_warmup:
                self._backward()
        while self.in_flight:
            self._backward()
        for work in self.sent.values():
            work.wait()
        dist.all_reduce(self.loss)  # only ranks of the last stage have one, t of them the same
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
            self._send(y.detach(), mesh.output_group, mesh.pp_rank + 1)
        self.in_flight.append((x, y))

    def _backward(self):
        mesh = self.mesh
        x, y = self.in_flight.pop(0)
        gradient = None
        if not mesh.is_last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, group=mesh.gradient_group, group_src=mesh.pp_rank + 1)
        y.backward(gradient)
        if not mesh.is_first:
            self._send(x.grad, mesh.gradient_group, mesh.pp_rank - 1)

    def _send(self, tensor, group, stage):
        if group in self.sent:  # in 1F1B it should have arrived; to wait frees its tensor
            self.sent[group].wait()
        self.sent[group] = dist.isend(tensor, group=group, group_dst=stage)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Finish the gradients' sums, clip the shards' gradients to max_norm. Returns the norm before."""
        for bucket in self.buckets:
            bucket.finish_sum()
        grads = [shard.grad for shard in self.shards]
        norms = torch._foreach_norm(grads, dtype=torch.float64)
        squares = self.loss.new_zeros(())
        for norm, bucket in zip(norms, self.buckets):
            squares += norm.square() / bucket.n_copies
        dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(self.shards, max_norm, norm.to(grads[0]))
        return norm

    def full_state_dict(self):
        """The plain model's state_dict. All ranks must call it."""
        state_dict = {}
        for name, shape in self.shapes.items():
            # Each rank fills its part, if it has one, into a tensor of -inf. The maximum is the whole.
            full = state_dict[name] = self.buckets[0].flat_param.new_full(shape, -torch.inf)
            if name in self.params:
                param = self.params[name]
                full[getattr(param, "part", ...)] = param.detach()
            dist.all_reduce(full, dist.ReduceOp.MAX)
        return state_dict


def train(config):
    world_size = int(os.getenv("WORLD_SIZE") or 1)
    config.tp = config.tp or 2 - world_size % 2
    config.pp = config.pp or 2 - world_size // config.tp % 2
    if world_size % (config.tp * config.pp):
        refuse(f"--tp {config.tp} x --pp {config.pp}: must divide the {world_size} ranks")
    if config.heads % config.tp or config.layers < config.pp:
        refuse(f"--heads must be a multiple of --tp {config.tp}, --layers at least --pp {config.pp}")
    ranks = np.arange(world_size).reshape(config.pp, -1, config.tp)
    config.dp = ranks.shape[1]
    device, text = set_up(config, f" | zero {config.zero} | stages x replicas x parts:\n{ranks}", config.dp)
    mesh = Mesh(ranks)
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
