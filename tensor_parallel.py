"""Tensor parallelism: each layer's matrices are split over the ranks, which all work on the same batch.

Idea
    An MLP is GELU(xA)B. Split A by columns, B by rows: rank i computes GELU(xA_i)B_i; forward all-reduces the
    sum, backward x's gradient, so each rank has all gradients of what is replicated (norms). Attention is
    split by heads, embedding and logits by vocabulary (Megatron-LM, arXiv 1909.08053, section 3).

Timeline (backward of an MLP; in forward nothing hides the all-reduce after a row-parallel layer)
    compute | down, gelu, up (x's gradient) | up (weight's, bias's gradients)  | norm, proj, attention, ...
    network |                               | all-reduce                       |

Memory (bytes: w a weight, c its master, if bf16, K its moments; all letters: docs/formulas.md)
    parameters    (w+c)(P+(6L+2+s)h(N-1))/N                replicated: 6h a block, norm 2h, positions sh
    gradients     w(P+(6L+2+s)h(N-1))/N+3cG/2              of G at a time in bf16 and fp32: see MasterWeights
    optimizer     K(P+(6L+2+s)h(N-1))/N
    activations   bs((4L+2)wh+(4L+6)m+(12Lwh+m(aL+v))/N)
    Whole, of a token: each norm's input, output, mean and 1/std; 4 numbers of the loss. Split: q, k, v, the
    outputs of attention, up and GELU (12h in a block), each head's log-sum-exp, logits. m: 4, in fp64 8.

Sent (bytes that a rank of a ring sends in a step of k microbatches)
    all-reduce    2kbs((4L+2)wh+3m)(N-1)/N   4 a block; embedding, head; 3 numbers of a loss

Run
    torchrun --nproc_per_node=2 tensor_parallel.py
    torchrun --nproc_per_node=8 tensor_parallel.py --size gpt2-xl --heads 40 --dtype bf16

Left out
    Data parallelism, creating weights already split, dropout, ignored or odd targets, padding_idx, autocast.
"""

import argparse
import os
import sys
import time
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later (torch.optim does), its defaults would keep the group to the end
import torch.nn as nn
import torch.nn.functional as F


class ColumnParallelLinear(torch.autograd.Function):
    """x (b, s, h), whole -> (b, s, out/N); backward all-reduces x's gradient (the paper's f)."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # (b, s, out/N)
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight  # (b, s, h), partial
        work = dist.all_reduce(grad_x, async_op=True)  # while this rank computes grad_weight
        grad = grad.flatten(0, -2)
        grad_weight = grad.T @ x.flatten(0, -2)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        work.wait()
        return grad_x, grad_weight, grad_bias


class SumPartials(torch.autograd.Function):
    """All-reduce forward, in place, identity backward: x (b, s, h), partial -> (b, s, h) (the paper's g)."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def column_parallel(linear, x):
    """A linear layer with 1/N of its output features: x (b, s, h), whole -> (b, s, out/N)."""
    return ColumnParallelLinear.apply(x, linear.weight, linear.bias)


def row_parallel(linear, x):
    """A linear layer with 1/N of its input features: x (b, s, in/N) -> (b, s, h)."""
    y = SumPartials.apply(F.linear(x, linear.weight))
    return y if linear.bias is None else y + linear.bias  # after the sum, else it would count N times


def vocab_parallel(embedding, tokens):
    """An embedding with about 1/N of its rows (Megatron-LM pads): tokens (b, s) -> (b, s, h)."""
    vocab = embedding.num_embeddings
    row = tokens - dist.get_rank() * vocab // dist.get_world_size()  # in this rank's weight
    elsewhere = (row < 0) | (row >= len(embedding.weight))
    elsewhere &= (tokens >= 0) & (tokens < vocab)  # a token beyond the vocabulary must still fail
    found = F.embedding(row.masked_fill(elsewhere, 0), embedding.weight)
    return SumPartials.apply(found.masked_fill(elsewhere.unsqueeze(-1), 0))


def parallel_cross_entropy(logits, targets, vocab):
    """Losses (b, s), in fp32 or fp64; logits (b, s, v/N), targets (b, s), `vocab` the whole v."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = logits.logsumexp(-1)  # of this rank's v/N
    shift = lse.detach().clone()
    dist.all_reduce(shift, dist.ReduceOp.MAX)  # the largest of all ranks: exp() is at most 1
    column = targets - dist.get_rank() * vocab // dist.get_world_size()
    inside = (column >= 0) & (column < logits.shape[-1])
    of_target = logits.gather(-1, (column * inside).unsqueeze(-1)).squeeze(-1) - shift
    sums = torch.stack([(lse - shift).exp(), of_target * inside], -1)  # (b, s, 2), partial
    total, of_target = SumPartials.apply(sums).unbind(-1)
    return total.log() - of_target


PLAN = {  # pattern of names: (forward, the weight's split dim, how many matrices it stacks: q, k, v)
    "tokens": (vocab_parallel, 0, 1),
    "blocks.*.qkv": (column_parallel, 0, 3),
    "blocks.*.proj": (row_parallel, 1, 1),
    "blocks.*.up": (column_parallel, 0, 1),
    "blocks.*.down": (row_parallel, 1, 1),
}


class TensorParallel:
    """Splits the layers of a plan such as PLAN, in place. All ranks start with rank 0's weights.
    The caller divides sizes in forward(), such as heads, by N. A step:
    backward() of the same microbatches on all ranks; clip_grad_norm_(); optimizer.step().
    """

    def __init__(self, module, plan):
        self.module = module
        self.split = {}  # parameter: (dim, this rank's indices along it, whole shape)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, 0)
        for pattern, (forward, dim, parts) in plan.items():
            for name, layer in module.named_modules():
                if fnmatch(name, pattern):
                    if type(layer) not in (nn.Linear, nn.Embedding):
                        raise TypeError(f"{name} is neither Linear nor Embedding: leave it out of the plan")
                    layer.forward = partial(forward, layer)
                    for param in layer.parameters():
                        if dim < param.dim():  # a row-parallel layer's bias stays whole
                            indices = torch.arange(param.shape[dim], device=param.device).view(parts, -1)
                            start, end = (r * indices.shape[1] // world_size for r in (rank, rank + 1))
                            part = indices[:, start:end].flatten()  # 1/N of each matrix
                            self.split[param] = (dim, part, param.shape)
        for param, (dim, indices, _) in self.split.items():  # once, even if tied
            param.data = param.detach().index_select(dim, indices)
        for name, layer in module.named_modules():
            for param in layer.parameters(recurse=False):
                if param in self.split and not isinstance(layer.forward, partial):
                    raise ValueError(f"{name} is tied to a planned layer: plan it, too")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Scale the gradients to a global norm of max_norm at most. Returns the norm before, in fp64."""
        params = [param for param in self.module.parameters() if param.grad is not None]
        squares = params[0].new_zeros((), dtype=torch.float64)
        for param in params:
            if param in self.split or dist.get_rank() == 0:  # replicated ones count once
                squares += param.grad.square().sum(dtype=torch.float64)
        dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(params, max_norm, norm.to(params[0]))
        return norm

    def full_state_dict(self):
        """The plain module's state_dict. All ranks must call it."""
        state_dict = self.module.state_dict()
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if param in self.split:
                dim, indices, shape = self.split[param]
                state_dict[name] = param.new_zeros(shape).index_copy_(dim, indices, param.detach())
                dist.all_reduce(state_dict[name])  # each rank's part and zeros
        return state_dict


class MasterWeights:  # steps fp32 copies of bf16 parameters, 64 MiB of them at a time (arXiv 1910.02054, 3.1)
    def __init__(self, optimizer_class, params, **options):
        self.groups = []
        for group in torch._utils._take_tensors(params, 2**25):  # bytes of bf16, twice that in fp32
            master = nn.Parameter(nn.utils.parameters_to_vector(group).float())
            self.groups.append((group, master, optimizer_class([master], **options)))

    @torch.no_grad()
    def step(self):
        for params, master, optimizer in self.groups:
            grads = [param.grad for param in params]
            master.grad = nn.utils.parameters_to_vector(grads).float()
            optimizer.step()
            master.grad = None
            parts = torch._utils._unflatten_dense_tensors(master, params)
            torch._foreach_copy_(params, parts)


def train(config):
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if config.heads % world_size:
        refuse(f"--heads {config.heads}: must be a multiple of the {world_size} ranks")
    device, text = set_up(config, replicas=1)
    model = ParallelGPT(config).to(device, DTYPES[config.dtype])
    parallel = TensorParallel(model, PLAN)
    for block in model.blocks:
        block.heads //= world_size
    optimizer_class = OPTIMIZERS[config.optim]
    if config.dtype == "bf16":
        optimizer_class = partial(MasterWeights, optimizer_class)
    optimizer = optimizer_class(model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        for inputs, targets in microbatches(config, text, step, device):
            # Gradients add up over microbatches and each loss is a mean: divide to get the batch's mean.
            losses = parallel_cross_entropy(model(inputs), targets, config.vocab)
            microloss = losses.mean() / config.accum
            microloss.backward()
            loss += microloss.detach()
        grad_norm = parallel.clip_grad_norm_(config.clip)
        optimizer.step()
        model.zero_grad()
        print_step(config, step, loss, grad_norm, started)
    if config.save:
        state_dict = parallel.full_state_dict()
        if dist.get_rank() == 0:
            save_weights(state_dict, config.save)


def parse(arguments=None):
    return read_flags(arguments)


# ==== toy model: the same lines in every lesson ====
SHAPE = "layers heads width context vocab".split()
SIZES = {"toy": "8 8 64 64 256", "small": "6 8 256 128 256", "gpt2": "12 12 768 1024 50304"}
SIZES |= {"gpt2-xl": "48 25 1600 1024 50304", "7.5b": "32 34 4352 2048 50304"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
CHOICES = {"size": SIZES, "optim": OPTIMIZERS, "dtype": DTYPES, "device": ("auto", "cpu", "cuda")}
DEFAULTS = {"size": "toy", "optim": "adamw", "dtype": "fp32", "device": "auto", "data": np.ma.core.__file__}
DEFAULTS |= {"steps": 20, "batch": 16, "accum": 1, "lr": 1e-3, "clip": 1.0, "seed": 0, "save": ""}
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
    if os.environ.get("RANK", "0") == "0":
        print(f"{Path(__file__).name}: {problem}", file=sys.stderr)
    else:
        time.sleep(5)
    sys.exit(2)


def set_up(config, choices="", replicas=None):  # check, and join the world; returns device and text
    replicas = replicas or int(os.environ.get("WORLD_SIZE", 1))
    if config.batch % (replicas * config.accum):
        refuse(f"--batch {config.batch}: must be a multiple of replicas x --accum, {replicas * config.accum}")
    if config.width % config.heads:
        refuse(f"--width {config.width}: must be a multiple of --heads {config.heads}")
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if config.device == "cuda" and not gpus:
        refuse("--device cuda: no GPU is visible here; use --device cpu")
    try:
        files = sorted(filter(Path.is_file, Path(config.data).rglob("*"))) or [Path(config.data)]
        text = bytearray().join(map(Path.read_bytes, files))
        if len(text) <= config.context:
            refuse(f"--data {config.data}: must have more bytes than --context {config.context}")
        open(config.save or os.devnull, "ab").close()
    except OSError as error:
        refuse(f"--data {config.data} or --save {config.save}: {error}")
    device = torch.device(f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % gpus}" if gpus else "cpu")
    torch.cuda.set_device(device if gpus else -1)  # -1: none
    if not dist.is_initialized():
        if 0 < gpus < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):  # ranks share a GPU
            os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])  # NCCL refuses it on one host
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if gpus else "gloo", **alone)
    if dist.get_rank() == 0:
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
    if dist.get_rank() == 0:
        print(f"{line} | {ms:.1f} ms | {config.batch * config.context / ms:.1f} k tok/s")


def save_weights(state_dict, path):  # at the end, on rank 0
    try:
        torch.save(state_dict, path)
    except (OSError, RuntimeError):
        refuse(f"--save {path}: cannot be written; is the disk full?")


# ==== end of the toy model ====


class ParallelGPT(GPT):
    """A GPT whose head, this rank's part of the embedding, gives logits (b, s, v/N) of tokens (b, s)."""

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return ColumnParallelLinear.apply(self.norm(x), self.tokens.weight, None)


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
