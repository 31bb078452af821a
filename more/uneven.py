"""DDP for documents of different lengths: one mean for all tokens, and equal work for all ranks.

Idea
    In ddp.py all sequences are equally long. Documents are not, and four things change:

    1. The mean. If each microbatch divides by its own tokens, the mean of these means is not the batch's:
           wrong    loss = sum_of_losses / tokens_of_this_microbatch / microbatches / ranks
                    a token in a microbatch of 10 weighs 100 times as much as one in a microbatch of 1000
           right    loss = sum_of_losses / tokens_of_all_microbatches_of_all_ranks
       So the ranks add up their tokens before the first backward, and gradients are summed, not averaged.
    2. The number of microbatches. Balanced or packed (3, 4), ranks need different numbers. If each microbatch
       communicates, as in zero2.py and zero3.py, a rank with fewer leaves the others waiting, as the n-th
       all-reduce of a rank meets the n-th of the others. So all agree on the most that any rank has, and fill
       up with empty ones, whose gradients are zeros. (Here, where only the last communicates, a few suffice.)
    3. Balance (--order balanced). All ranks wait for the slowest. A document of s tokens takes 6Ps + 6Lhs^2
       FLOPs (P parameters in matrices; L layers of width h). Longest first, each goes to the rank that has
       the least to compute so far (LPT: Graham, 1969).
    4. Packing (--pack). Rows of a microbatch are padded to its longest. With several documents in a row there
       is less padding (arXiv 2107.02027). Tokens see their own document alone, whose positions start at 0.

Timeline (rank 0 has 3 microbatches, rank 1 has 2)
    rank 0 | agree | forward, backward | forward, backward | forward, backward: buckets leave | clip, step
    rank 1 | agree | forward, backward | forward, backward | empty: buckets leave, wait       | clip, step

Memory (bytes on each rank; P parameters)
    parameters    (w+c)P        w = 4 in fp32, 2 in bf16; c = 4 in bf16, for fp32 master weights, else 0
    gradients     wP+3cG/2      in bf16 MasterWeights copies G = 2^24 gradients at a time, or one tensor's
    optimizer     KP            K = 8 for AdamW's two moments, 0 for SGD

Sent (bytes, by each of N ranks in each step)
    all-reduce    2wP(N-1)/N    in a ring (see collectives.py); in the last microbatch only
    Also three numbers: the step's tokens, its microbatches (for which the host waits), and its loss.

Run
    torchrun --nproc_per_node=2 more/uneven.py
    torchrun --nproc_per_node=8 more/uneven.py --size gpt2-xl --dtype bf16 --batch 64 --order balanced --pack

Left out
    Kernels that skip what the mask hides: here attention computes all s x s scores of a row, hidden or not.
    FlexAttention skips blocks of them, and varlen kernels take documents end to end, without rows or padding.
    Microbatches that hold equally many tokens, not rows. The pieces of a long document do not see each other.
    The printed tok/s counts each document as --context tokens. What ddp.py leaves out is left out here, too.
    Not noticed: byte 0 in a document, as it is padding; two last backwards without zero_grad() between them,
    where the gradients of the first count N times; attention that is called by another name or recomputed by
    a checkpoint, which gets no mask; other threads, which get it.
"""

import argparse
import os
import re
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from unittest import mock
from weakref import proxy

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _unflatten_dense_tensors as unflatten  # views of a flat tensor, of these shapes


def agree(batches, device):
    """(tokens of all ranks, microbatches of each) in a step. Adds the empty ones that this rank lacks."""
    n_tokens = torch.zeros((), dtype=torch.int64, device=device)
    for _, targets, _ in batches:
        n_tokens += targets.count_nonzero()  # 0 is padding
    most = torch.full_like(n_tokens, len(batches))
    dist.all_reduce(n_tokens)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    n_microbatches = most.item()
    # Without these a rank would never reach the last one, in which the others wait for its gradients.
    batches += [n_tokens.new_zeros(3, 1, 1)] * (n_microbatches - len(batches))
    return n_tokens, n_microbatches


def sum_of_losses(logits, targets):
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.flatten(0, 1).to(wide)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=0)  # 0 is padding


def deal(documents, order, cost, world_size):
    """The documents of each rank. All ranks have drawn the same ones, and deal them alike."""
    if order == "drawn":
        return [documents[rank::world_size] for rank in range(world_size)]
    shares = [[] for _ in range(world_size)]
    costs = [0] * world_size
    for document in sorted(documents, key=len, reverse=True):
        rank = costs.index(min(costs))
        shares[rank].append(document)
        costs[rank] += cost(len(document))
    return shares


def flops(config, n_tokens):
    """Of a document's forward and backward, if attention skips hidden scores (here it computes them, too)."""
    params = 12 * config.layers * config.width**2 + config.vocab * config.width  # of matrices
    return 6 * params * n_tokens + 6 * config.layers * config.width * n_tokens**2


def pack(documents, most):
    """Rows of one document, or of several if these have at most `most` tokens together. Longest first."""
    rows = []
    for document in sorted(documents, key=len, reverse=True):
        for row in rows:
            if sum(map(len, row)) + len(document) <= most:
                row.append(document)
                break
        else:
            rows.append([document])
    return rows


class OverDocuments(nn.Module):
    """The toy model for rows of documents: each begins where a position is 0, and sees only itself."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, positions):
        # The number of each token's document in its row. Each token of padding is a document of its own.
        document = (positions == 0).cumsum(1)
        # A token sees those of its own document that are not later than it: (b, 1, s, s).
        is_visible = (document[:, :, None] == document[:, None]).tril()[:, None]
        plain_attention = F.scaled_dot_product_attention

        def attention(q, k, v, is_causal):  # is_visible is causal already
            return plain_attention(q, k, v, is_visible)

        x = self.model.tokens(tokens) + self.model.positions(positions)
        # Block, which is the same in all lessons, takes no mask. In a model of your own, hand it down.
        with mock.patch.object(F, "scaled_dot_product_attention", attention):
            for block in self.model.blocks:
                x = block(x)
        return F.linear(self.model.norm(x), self.model.tokens.weight)


def cut_documents(text, most):
    """The paragraphs of a text, as documents of 2 to `most` bytes: longer ones are cut."""
    documents = []
    for paragraph in re.split(rb"\n\s*\n|\0+", text.numpy().tobytes()):  # byte 0 is padding
        documents += re.findall(rb"(?s).{2,%d}" % most, paragraph)
    return documents


def columns_of(document):
    """Input, target and position of each token, (s, 3). Of s + 1 bytes the last is a target only."""
    text = torch.tensor(list(document))
    return torch.stack([text[:-1], text[1:], torch.arange(len(text) - 1)], dim=1)


def load_microbatches(config, documents, step, device, rank, world_size):
    """This rank's microbatches: inputs, targets, positions, int64 (b, s) each. Zeros are padding."""
    chosen = np.random.default_rng((config.seed, step)).integers(len(documents), size=config.batch)
    drawn = [columns_of(documents[i]) for i in chosen]
    share = deal(drawn, config.order, partial(flops, config), world_size)[rank]
    rows = [torch.cat(row) for row in pack(share, config.context if config.pack else 0)]  # 0: nothing fits
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device, non_blocking=True)
    # b rows each: --accum microbatches, if documents are dealt as drawn and not packed.
    b = config.batch // world_size // config.accum
    batches = []
    for first in range(0, len(rows), b):
        longest = max(map(len, rows[first : first + b]))
        batches.append(padded[first : first + b, :longest].unbind(-1))
    return batches


# DDP, Bucket and fill_buckets are ddp.py's, but collect() does not divide by the number of ranks.


class DDP(nn.Module):
    """Wraps a module, to which each rank gives its part of the batch. Backward sums .grad over all ranks.

    To accumulate gradients over the backwards of a step, set is_last_backward to False for all but the last
    one, which sums them. bucket_cap_mb: MiB of gradients in a bucket (None: 25, or a fifth of all)."""

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
        bucket.collect(param)
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

    def collect(self, param):
        """Move a gradient into flat_grad. Later backwards of the step add to it there."""
        view = self.grad_views[param]
        grad = param.grad.to_dense()
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
    device, text = set_up(config, f" | order {config.order} | pack {config.pack}")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    documents = cut_documents(text, config.context)
    if not documents:
        refuse(f"--data {config.data}: must have a paragraph of 2 bytes or more")
    model = OverDocuments(GPT(config)).to(device, DTYPES[config.dtype])
    model = DDP(model)
    optimizer_class = OPTIMIZERS[config.optim]
    if config.dtype == "bf16":
        optimizer_class = partial(MasterWeights, optimizer_class)
    optimizer = optimizer_class(model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        batches = load_microbatches(config, documents, step, device, rank, world_size)
        n_tokens, n_microbatches = agree(batches, device)
        for i, (inputs, targets, positions) in enumerate(batches, 1):
            model.is_last_backward = i == n_microbatches
            # Gradients add up over microbatches and ranks, so that this is the only division.
            microloss = sum_of_losses(model(inputs, positions), targets) / n_tokens
            microloss.backward()
            loss += microloss.detach()
        grad_norm = model.clip_grad_norm_(config.clip)
        optimizer.step()
        model.zero_grad()
        dist.all_reduce(loss)
        print_step(config, step, loss, grad_norm, started)
    if config.save and rank == 0:
        save_weights(model.module.model.state_dict(), config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--order", choices=["drawn", "balanced"], default="drawn", help="documents to ranks")
    own.add_argument("--pack", action="store_true", help="several documents in a row")
    return read_flags(arguments, own, context=(2, 1_048_576))


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
