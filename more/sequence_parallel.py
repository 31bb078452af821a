"""Sequence parallelism: tensor parallelism in which the replicated activations are split too, by tokens.

Idea
    In tensor_parallel.py all ranks compute all norms and residuals, and keep their inputs. Here each does so
    for 1/N of the tokens. A column-parallel layer gathers tokens, a row-parallel one reduce-scatters sums.
    Together they send as much as one all-reduce, but backward gathers x once more (arXiv 2205.05198, section
    4.2.2). New beside tensor_parallel.py: start_all_gather, start_reduce_scatter, sum_replicated.

Timeline (backward of an MLP; in forward, nothing can be computed while tokens or sums travel)
    compute |                     | down, gelu | up (x's gradient) | up (gradients of weight, bias) | norm
    network | gather the gradient |            | all-gather of x   | reduce-scatter x's gradient    |

Memory (bytes on each of N ranks)
    P parameters, r = (6L+2)h of them replicated: norms, biases added after a sum
    L layers, a heads, h width, s context, v vocabulary; b sequences in a microbatch
    w bytes of a weight: 4 in fp32, 2 in bf16, 8 in fp64; c bytes of its fp32 master: 4 in bf16, else 0
    K bytes of AdamW's two moments: 8, in fp64 16; of SGD 0
    m bytes of a statistic of a norm, and of each number that the loss needs: 4, in fp64 8
    parameters    (w+c)((P-r)/N+r)
    gradients     w((P-r)/N+r)+3cG/2   MasterWeights copies G at a time: 2^24, or the largest tensor's
    optimizer     K((P-r)/N+r)
    activations   bs(2m+((16L+2)wh+(4L+4+aL+v)m)/N)   all is split but 2 numbers of each token's loss
    In tensor_parallel.py 4L+2 of these 16L+2 are not divided by N: on 8 ranks that is 2.75 times as much.

Sent (bytes, by each rank in each step of k microbatches)
    reduce-scatter    kbs((4L+2)wh+2m)(N-1)/N    forward: 2L+1 sums, backward: 2L+1; each loss's 2 numbers
    all-gather        kbs((6L+3)wh+2m)(N-1)/N    forward: x 2L+1 times, backward: x again, 2L+1 gradients
    all-reduce        2(rw+kbsm)(N-1)/N          gradients of what is replicated; a number of each loss

Run
    torchrun --nproc_per_node=2 more/sequence_parallel.py
    torchrun --nproc_per_node=8 more/sequence_parallel.py --size gpt2-xl --heads 40 --dtype bf16

Left out
    Refused: targets to ignore, such as -100; an embedding's padding_idx or max_norm; autocast, in backward.
    Wrong, and not noticed: a split weight used outside of its layer, as by GPT's head (see ParallelGPT);
    heads that N does not divide; a wrong number of stacked matrices; an optimizer for whole matrices (Muon);
    torch's clip_grad_norm_ and state_dict(), which know only this rank's part; gradients of gradients.
    Also: different batches; a loss not divided by N; equal seeds for dropout; no sum_replicated(), or two.
    Not handled: data parallelism beside it; creating the weights already split, not all of them first;
    outside of the split layers, what does not treat each token alone; lengths that N does not divide.
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
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# A tensor over ranks may be: varying, if each rank has another part of it, as of its gradient; partial, if
# each has a part of a sum; replicated, if all have the same, but use it for different things, so that its
# gradient is partial (and that of a partial tensor is replicated).


def start_all_gather(x):
    """Start to gather all ranks' x (b, s/N, h). Returns a function that waits, and returns (b, s, h)."""
    n_ranks = dist.get_world_size()
    shards = x.new_empty(n_ranks * len(x), *x.shape[1:])  # (Nb, s/N, h)
    work = all_gather(shards, x.contiguous(), async_op=True)

    def wait():
        work.wait()
        return torch.cat(shards.chunk(n_ranks), 1)

    return wait


def start_reduce_scatter(x):
    """Start to add up all ranks' x (b, s, h). Returns a function that waits, and returns (b, s/N, h)."""
    parts = x.chunk(dist.get_world_size(), 1)
    received = x.new_empty(parts[0].shape)
    work = reduce_scatter(received, torch.cat(parts), async_op=True)

    def wait():
        work.wait()
        return received

    return wait


class GatherTokens(torch.autograd.Function):
    """The paper's g: forward gives each rank all tokens of x; backward adds up their gradients."""

    @staticmethod
    def forward(ctx, x):
        return start_all_gather(x)()  # varying -> replicated

    @staticmethod
    def backward(ctx, grad):
        return start_reduce_scatter(grad)()  # partial -> varying


class SumPartials(torch.autograd.Function):
    """The paper's g-bar: forward adds up the ranks' outputs, for each rank's tokens; backward gathers."""

    @staticmethod
    def forward(ctx, x):
        return start_reduce_scatter(x)()  # partial -> varying

    @staticmethod
    def backward(ctx, grad):
        return start_all_gather(grad)()  # varying -> replicated


def naive_mlp(x, up, down):
    """All of it, if time and memory do not matter: x (b, s/N, h), up (4h/N, h) and down (h, 4h/N) vary."""
    x = GatherTokens.apply(x)  # (b, s, h)
    hidden = F.gelu(x @ up.T)  # (b, s, 4h/N): some of the features, but with their final values
    return SumPartials.apply(hidden @ down.T)


# Why is the first matrix split by its output features, and the second by its input features? GELU needs
# final values. If the first product were a sum of parts too, the ranks would have to add it up before GELU.
# So a column-parallel layer is followed by a row-parallel one, and each such pair needs a single sum.
#
# The problem is backward, which waits for GatherTokens' message and keeps all of x. The class below does
# GatherTokens and the product in one: it keeps this rank's tokens, and computes while messages travel.


class ColumnParallelLinear(torch.autograd.Function):
    """A linear layer with 1/N of its output features: x (b, s/N, h) -> (b, s, out/N)."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(start_all_gather(x)(), weight, bias)

    @staticmethod
    def backward(ctx, grad):  # (b, s, out/N)
        x, weight = ctx.saved_tensors
        # All tokens of x travel while this rank computes the gradient of x, a partial sum. That travels while
        # this rank computes the gradient of its weight, which needs all tokens of x.
        wait_for_x = start_all_gather(x)
        wait_for_grad_x = start_reduce_scatter(grad @ weight)
        all_x = wait_for_x()
        grad = grad.flatten(0, -2)
        grad_weight = grad.T @ all_x.flatten(0, -2)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return wait_for_grad_x(), grad_weight, grad_bias


def column_parallel(linear, x):
    """The forward of a linear layer that is split by output features: x (..., h) -> (..., out/N)."""
    return ColumnParallelLinear.apply(x, linear.weight, linear.bias)


def row_parallel(linear, x):
    """The forward of a linear layer that is split by input features: x (..., in/N) -> (..., h)."""
    y = SumPartials.apply(F.linear(x, linear.weight))
    # The bias is added after the sum, which would contain it N times otherwise.
    return y if linear.bias is None else y + linear.bias


def vocab_parallel(embedding, tokens):
    """The forward of an embedding that is split by its rows, for tokens (b, s)."""
    row, is_here = find_own(tokens, embedding.num_embeddings)  # which still is v
    found = F.embedding(row, embedding.weight)
    # One rank has a token's row, the others add zeros to it.
    return SumPartials.apply(found * is_here.unsqueeze(-1))


def parallel_cross_entropy(logits, targets, vocab):
    """Losses (b, s/N), in fp32 or fp64, of logits (b, s, v/N) and targets (b, s); vocab is v.

    A loss is log(sum(exp(logits))) - logits[target]. No rank has all logits of a token, but all it takes is
    the sum, to which each rank adds its part, and the target's logit, which one of the ranks has."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own_lse = logits.logsumexp(-1)
    # No exp() overflows relative to the largest of the ranks' log-sum-exps, which cancels out in the loss.
    largest = own_lse.detach().clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    own_sum = (own_lse - largest).exp()
    column, is_here = find_own(targets, vocab)
    own_logit = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1) - largest
    # Both sums travel in one message.
    partials = torch.stack([own_sum, own_logit * is_here], -1)  # (b, s, 2)
    total, target_logit = SumPartials.apply(partials).unbind(-1)
    return total.log() - target_logit


def find_own(indices, vocab):
    """(Each index within this rank's part of the vocabulary, or 0 if it is elsewhere; whether it is here)."""
    first, end = own_range(vocab)
    is_here = (indices >= first) & (indices < end)
    check_indices(indices, vocab)
    return (indices - first) * is_here, is_here


def own_range(size):
    """(first, end) of this rank's part of range(size): 1/N of it, or nearly so if N does not divide size."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return rank * size // world_size, (rank + 1) * size // world_size


# {pattern of layers' names: (forward, dimension along which the weight is split, number of stacked matrices)}
# GPT's head is no layer: it uses the weight of `tokens`. See ParallelGPT, at the end of this file.
PLAN = {
    "tokens": (vocab_parallel, 0, 1),
    "positions": (vocab_parallel, 0, 1),  # by rows: a rank has those of its tokens; its forward is not used
    "blocks.*.qkv": (column_parallel, 0, 3),  # q, k, v
    "blocks.*.proj": (row_parallel, 1, 1),
    "blocks.*.up": (column_parallel, 0, 1),
    "blocks.*.down": (row_parallel, 1, 1),
}


class SequenceParallel:
    """Splits the layers of a module that a plan such as PLAN names, in place.

    The caller must divide by N the sizes in a forward() that depend on a split, such as the number of heads;
    nothing checks this. All ranks get the same batch; between split layers x is (b, s/N, h). In a step, call
    backward() of each microbatch's loss, the mean over this rank's tokens divided by N; then
    sum_replicated(), once; then clip_grad_norm_()."""

    def __init__(self, module: nn.Module, plan: dict[str, tuple]):
        self.module = module
        self.split = {}  # parameter: (dim, this rank's indices along it, unsharded shape)
        # All ranks start from rank 0's weights.
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        planned = {}  # layer: the pattern that names it
        for pattern, (forward, dim, stacked) in plan.items():
            for name, layer in module.named_modules():
                if fnmatch(name, pattern):
                    check_layer(name, layer)
                    planned[layer] = pattern
                    layer.forward = partial(forward, layer)
                    for param in layer.parameters():
                        if dim < param.dim():  # else it is a row-parallel layer's bias, which is replicated
                            self.split[param] = (dim, own_indices(param, dim, stacked), param.shape)
        # A plan may name two layers that share a weight, such as an embedding and a head. It is in self.split
        # once, and is split only here, so that the second layer finds it unsharded above.
        for param, (dim, indices, _) in self.split.items():
            param.data = param.data.index_select(dim, indices)
        check_plan(module, plan, planned, self.split)

    def sum_replicated(self):
        """Add up the gradients of replicated parameters, to which each rank's tokens have contributed."""
        for param in self.module.parameters():
            if param.grad is not None and param not in self.split:
                dist.all_reduce(param.grad)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float):
        """Scale the gradients to a global norm of at most max_norm. Returns the norm before, in fp64."""
        params = [param for param in self.module.parameters() if param.grad is not None]
        norms = torch._foreach_norm([param.grad for param in params], dtype=torch.float64)
        squares = torch.zeros_like(norms[0])
        for param, norm in zip(params, norms):
            # All ranks have the same gradients of replicated parameters, so only rank 0 counts them.
            if param in self.split or dist.get_rank() == 0:
                squares += norm.square()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(params, max_norm, norm.to(params[0]))
        return norm

    def full_state_dict(self):
        """The unsharded module's state_dict. All ranks must call it."""
        state_dict = self.module.state_dict()
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if param in self.split:
                dim, indices, shape = self.split[param]
                # Each rank fills in its part of zeros; the sum of these is the unsharded weight.
                state_dict[name] = param.new_zeros(shape).index_copy_(dim, indices, param.data)
                dist.all_reduce(state_dict[name])
        return state_dict


def own_indices(param, dim, stacked):
    """The indices, along dim, of this rank's part of each of the matrices that a parameter stacks.

    A rank needs q, k and v of its heads. The first 1/N of all three stacked would be q alone, or mostly."""
    indices = torch.arange(param.shape[dim], device=param.device).view(stacked, -1)
    first, end = own_range(indices.shape[1])
    return indices[:, first:end].flatten()


# A reader may skip the next three functions: they refuse what would silently train wrongly.


def check_indices(indices, vocab):
    # No rank has an index outside of the vocabulary, such as that of an ignored target, so its loss would be
    # wrong. On a GPU this assertion ends the program, without making the host wait in each step.
    in_vocab = (indices >= 0) & (indices < vocab)
    torch._assert_async(in_vocab.all(), "a token or target is not in the vocabulary: replace those to ignore")


def check_layer(name, layer):
    # An Embedding shows its options as name=value.
    plain = type(layer) is nn.Linear or (type(layer) is nn.Embedding and "=" not in layer.extra_repr())
    if not plain or "forward" in vars(layer):
        raise TypeError(f"{name} is split already, or neither a Linear nor a plain Embedding: do not plan it")


def check_plan(module, plan, planned, split):
    for pattern in plan:
        if pattern not in planned.values():
            raise ValueError(f"no layer is split by {pattern}: mend the plan")
    for name, param in module.named_parameters():
        # Without q, k and v in the plan, for instance, attention would be among a rank's own tokens.
        if param.dim() > 1 and param not in split:
            raise ValueError(f"{name} would see s/N tokens: plan its layer")


def train(config):
    world_size = int(os.getenv("WORLD_SIZE") or 1)
    if config.heads % world_size or config.context % world_size:
        refuse(f"--heads and --context: must be multiples of the {world_size} ranks")
    device, text = set_up(config, replicas=1)  # all ranks train on the same batch
    model = ParallelGPT(config).to(device, DTYPES[config.dtype])
    parallel = SequenceParallel(model, PLAN)
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
            microloss = losses.mean() / world_size / config.accum
            microloss.backward()
            loss += microloss.detach()
        dist.all_reduce(loss)  # of which each rank has its tokens' part
        parallel.sum_replicated()
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


class MasterWeights:  # updates fp32 copies of bf16 parameters, 64 MiB at a time (arXiv 1910.02054, 3.1)
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


class ParallelGPT(GPT):
    """GPT with another head: F.linear would not add up its input's gradients. Logits are (b, s, v/N)."""

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight  # of this rank's tokens
        for block in self.blocks:
            x = block(x)
        return ColumnParallelLinear.apply(self.norm(x), self.tokens.weight, None)


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
