"""DDP: each rank trains a copy of the model on its part of the batch; the ranks average their gradients.

Idea
    Each of N ranks computes the gradients of its 1/N of the batch. If all losses are means over equally many
    tokens, the average of these gradients over all ranks is that of the whole batch. So if all ranks start
    from the same weights and make the same updates, they train as one process would with the whole batch.

    Averaging need not wait for the end of backward. Backward computes the gradients of the last layers first,
    and these can travel, in buckets, while it is busy with earlier layers (arXiv 2006.15704, section 3.2).

Timeline
    compute | forward | backward: layer 4 | layer 3  | layer 2  | layer 1  |          | clip, step
    network |         |                   | bucket 1 | bucket 2 | bucket 3 | bucket 4 |

Memory (bytes on each rank; P parameters)
    parameters    (w+c)P        w = 4 in fp32, 2 in bf16; c = 4 in bf16, for fp32 master weights, else 0
    gradients     wP+3cG/2      in bf16 MasterWeights copies G = 2^24 gradients at a time, or one tensor's
    optimizer     KP            K = 8 for AdamW's two moments, 0 for SGD

Sent (bytes, by each of N ranks in each step)
    all-reduce    2wP(N-1)/N    in a ring (see collectives.py); in the last microbatch only

Run
    torchrun --nproc_per_node=2 ddp.py
    torchrun --nproc_per_node=8 ddp.py --size gpt2-xl --dtype bf16 --batch 64

Left out
    Buffers, such as BatchNorm's statistics, are not averaged: each rank has those of its own batches.
    A parameter without a gradient in a step's last backward is an error.
    Not noticed: a step without a last backward, where nothing is averaged; ranks that load different weights
    or share a seed for dropout, so that masks repeat.
"""

import argparse
import os
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from weakref import proxy

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _unflatten_dense_tensors as unflatten  # views of a flat tensor, of these shapes


def average_gradients(model):
    """All that DDP does in a step, if time does not matter: call it after backward (see --no-overlap)."""
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


# This works, but it has two problems. While gradients travel, nothing is computed. And each parameter is a
# message of its own, although a small message takes almost as long as a larger one. So the class below packs
# gradients into buckets, and sends each bucket as soon as backward has filled it.


class DDP(nn.Module):
    """Wraps a module, to which each rank gives its part of the batch. Backward averages .grad over all ranks.

    To accumulate gradients over the backwards of a step, set is_last_backward to False for all but the last
    one, which averages them. bucket_cap_mb: MiB of gradients in a bucket (None: 25, or a fifth of all)."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float | None = None):
        super().__init__()
        self.module = module
        self.is_last_backward = True
        self.waiting = deque()  # during a last backward: the buckets that have not been sent yet
        # All ranks start from rank 0's weights and buffers.
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self.params = [param for _, param in module.named_parameters() if param.requires_grad]
        if not self.params or any(param._post_accumulate_grad_hooks for param in self.params):
            raise ValueError("all parameters are frozen, or one is wrapped already: build the module anew")
        self.buckets = [Bucket(params) for params in fill_buckets(self.params, bucket_cap_mb)]
        # Autograd calls _gradient_ready as soon as a parameter has its gradient. (Through a proxy, as a hook
        # that referred to the model itself would keep it in memory for ever.)
        for bucket in self.buckets:
            bucket.hook = partial(self._gradient_ready, bucket)
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(proxy(bucket.hook))

    def forward(self, *args, **kwargs):
        self._check()
        return self.module(*args, **kwargs)

    def _gradient_ready(self, bucket, param):
        bucket.collect(param, self.is_last_backward)
        if not self.is_last_backward:
            return
        if not self.waiting:  # this is the first gradient of this backward
            self.waiting.extend(self.buckets)
            # Autograd calls _end_backward when this whole backward is done.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        bucket.pending.remove(param)
        # All ranks must send their buckets in the same order, which autograd does not promise: the n-th
        # all-reduce of a rank is added to the n-th of the others. So a full bucket waits for those before it.
        while self.waiting and not self.waiting[0].pending:
            self.waiting.popleft().start_all_reduce()

    def _end_backward(self):
        self._check()
        for bucket in self.buckets:
            bucket.finish_all_reduce()

    def clip_grad_norm_(self, max_norm: float):
        """Scale the gradients to a global norm of at most max_norm. Returns the norm before."""
        grads = [param.grad for param in self.params if param.grad is not None]
        norm = torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).norm()
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1).to(grads[0]))
        return norm

    # A reader may skip to Bucket: this turns mistakes that would go unnoticed into errors.

    def _check(self):
        if self.waiting:
            raise RuntimeError("a backward failed, or left a parameter without a gradient: all must get one")
        if {param for param in self.module.parameters() if param.requires_grad} != set(self.params):
            raise RuntimeError("add, replace and freeze parameters before you wrap the module, not after")

    def __reduce_ex__(self, protocol):
        raise RuntimeError("a DDP cannot be copied or pickled: copy or save the module in it")


class Bucket:
    """Parameters whose gradients travel together: each .grad is a view of flat_grad."""

    def __init__(self, params):
        self.params = params
        self.pending = set(params)  # those that the last backward has not reached yet
        self.flat_grad = params[0].new_zeros(sum(map(torch.numel, params)))
        self.grad_views = dict(zip(params, unflatten(self.flat_grad, params)))

    def collect(self, param, is_last):
        """Move a gradient into flat_grad. Later backwards of the step add to it there."""
        view = self.grad_views[param]
        grad = param.grad.to_dense()
        if is_last:  # divide by N in the same pass, so that the ranks' sum is their average
            torch.mul(grad, 1 / dist.get_world_size(), out=view)
        else:
            view.copy_(grad)  # nothing is copied if view is .grad already: zero_grad() has not been called
        param.grad = view

    def start_all_reduce(self):
        self.work = dist.all_reduce(self.flat_grad, async_op=True)

    def finish_all_reduce(self):
        self.work.wait()
        self.pending.update(self.params)


def fill_buckets(params, cap_mb):
    """Lists of parameters of one dtype, the last ones first. A list ends when it has reached cap_mb MiB."""
    if cap_mb is None:
        cap_mb = min(sum(param.nbytes for param in params) / 5 / 2**20, 25)
    buckets = [[]]
    for param in reversed(params):
        bucket = buckets[-1]
        is_full = sum(each.nbytes for each in bucket) >= cap_mb * 2**20
        if bucket and (is_full or param.dtype != bucket[0].dtype):
            buckets.append([])
        buckets[-1].append(param)
    return buckets


def train(config):
    device, text = set_up(config, f" | bucket cap {config.bucket_cap_mb} | no-overlap {config.no_overlap}")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(device, DTYPES[config.dtype])
    model = DDP(model, config.bucket_cap_mb)
    optimizer_class = OPTIMIZERS[config.optim]
    if config.dtype == "bf16":
        optimizer_class = partial(MasterWeights, optimizer_class)
    optimizer = optimizer_class(model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        for i, (inputs, targets) in enumerate(microbatches(config, text, step, device, rank, world_size), 1):
            model.is_last_backward = i == config.accum and not config.no_overlap
            # Each loss is a mean, and gradients add up over microbatches: divide to get the batch's mean.
            microloss = mean_loss(model(inputs), targets) / config.accum
            microloss.backward()
            loss += microloss.detach()
        if config.no_overlap:
            average_gradients(model)
        grad_norm = model.clip_grad_norm_(config.clip)
        optimizer.step()
        model.zero_grad()
        dist.all_reduce(loss)
        print_step(config, step, loss / world_size, grad_norm, started)
    if config.save and rank == 0:
        save_weights(model.module.state_dict(), config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--bucket-cap-mb", type=float, help="MiB of gradients in an all-reduce")
    own.add_argument("--no-overlap", action="store_true", help="average the gradients after backward")
    return read_flags(arguments, own, bucket_cap_mb=(0, 1e9))


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


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
