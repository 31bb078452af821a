"""Context parallelism: each rank has 1/N of every row's tokens, and only attention needs those of others.

Idea
    The activations of a long row do not fit on one GPU, so ranks share its tokens. Norms and MLPs treat each
    alone, but a query needs keys and values (kv) of all before it (with --documents, in its own document).
    Gather (Llama 3, arXiv 2407.21783, section 3.3.2): the ranks all-gather kv, and each computes attention of
    its own queries. Backward gathers kv again, so that each layer keeps only 1/N of them.
    Ring (arXiv 2310.01889) needs less memory, and hides messages: kv go round from rank to rank. A rank
    computes with some while others arrive, and after N-1 hops it has seen all.
    Ulysses (arXiv 2309.14509) sends less. Attention treats each head alone, so an all-to-all trades 1/N of
    the tokens of all heads for all tokens of 1/N of the heads. After attention another one trades back.

    A causal mask gives later tokens more work. So a row is cut into 2N chunks, and rank i has chunks i and
    2N-1-i, an early and a late one (zigzag): then all ranks have the same work, in each hop of a ring, too.

Timeline (forward on rank 2 of 4; in a ring's backward, gradients follow their kv a hop later)
    Gather  | all-gather of kv       | queries x kv of ranks 0, 1, 2, 3
    Ring    | queries x kv of rank 2 | x kv of rank 1 | x kv of rank 0 | x kv of rank 3
            | kv of rank 1 arrive    | kv of rank 0   | kv of rank 3   |
    Ulysses | all-to-all of q and kv | 1/4 of the heads, all tokens    | all-to-all of the output

Memory (bytes on each of N ranks; P parameters)
    L layers, a heads, h width, s tokens in a row, v in the vocabulary; b rows in a microbatch
    w bytes of a weight: 4 in fp32, 2 in bf16, 8 in fp64; c bytes of its fp32 master: 4 in bf16, else 0
    m bytes of a gradient, a statistic of a norm, a log-sum-exp, and a logit in the loss: 4, in fp64 8
    parameters    (w+c)P
    gradients     2mP    with the copy that is all-reduced
    optimizer     KP    K = 8 for AdamW's two moments, in fp64 16; for SGD 0
    activations   bs((16L+2)wh+(4L+2+aL+v)m)/N    without --kind ulysses; mostly the 16wbsh/N of each layer
    activations   bs((17L+2)wh+(4L+2+aL+v)m)/N    with --kind ulysses, which keeps its output twice
    While a layer computes, gather has 2wbsh of kv, a ring 4wbsh/N; in backward, with gradients, twice that.

Sent (bytes, by each rank in each step of k microbatches)
    all-gather        4wkLbsh(N-1)/N               with --kind gather: kv in forward, again in backward
    reduce-scatter    2wkLbsh(N-1)/N               with --kind gather: gradients of kv
    send              2wkLbsh(3N-2)min(1,N-1)/N    with --kind ring: kv N-1 times, twice; gradients N times
    all-to-all        8wkLb(s/N)h(N-1)/N           with --kind ulysses: 4 in forward, 4 in backward
    all-reduce        2mP(N-1)/N                   each rank has gradients of its own tokens

Run
    torchrun --nproc_per_node=2 more/context_parallel.py
    torchrun --nproc_per_node=8 more/context_parallel.py --size gpt2 --context 65536 --batch 1 --kind ring

Left out
    Attention that is not causal; positions that start anew in each document. A ring sends on what nobody
    needs: if no document is longer than a chunk, a rank needs only the chunk before each of its own.
    Errors on GPUs: fp64; fewer heads in k than in q; a head's width, or a masked chunk, no multiple of 8.
    Not noticed: rotary angles not sharded like the tokens; targets shifted after sharding; targets to ignore.
"""

import argparse
import math
import os
import sys
import time
from copy import copy
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

aten = torch.ops.aten  # has the kernels of F.scaled_dot_product_attention, which hides their log-sum-exp
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


class Layout:
    """Which rank has which tokens, and which keys a query sees: those before it, in its own document.

    If neither memory nor time mattered, each rank would all-gather k and v of all tokens, in their order, and
    compute attention of its own queries by its rows of the whole mask:

        mask = (places[own, None] >= places) & (documents[own, None] == documents)  # (s/N, s)
        out = F.scaled_dot_product_attention(q, k, v, mask)

    But half of this mask or more is False. So here it is cut into blocks, and hidden ones are skipped.
    begins (b, s), or (1, s): whether a token is a document's first. It must be the same on all ranks."""

    def __init__(self, begins: torch.Tensor, group=None, zigzag=True):
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        n_chunks = 2 * self.world_size
        self.chunks = []  # of each rank
        for i in range(self.world_size):
            if zigzag:
                self.chunks.append([i, n_chunks - 1 - i])
            else:
                self.chunks.append([2 * i, 2 * i + 1])
        numbers = begins.cumsum(1)  # of each token's document in its row
        self.documents = numbers.unflatten(1, (n_chunks, -1))  # (b, 2N, tokens of a chunk)
        self.length = self.documents.shape[2]
        self.slots = []  # where the first, second, ... of a rank's chunks is among its tokens
        for n in range(n_chunks):
            self.slots.append(slice(n * self.length, (n + 1) * self.length))
        first = self.documents[..., :1]
        last = self.documents[..., -1:]
        # Chunk i sees some of chunk j, itself or an earlier one, if in any row a document of j goes on in i.
        # It sees all of j if in all rows both are in one document.
        sees_some = (first <= last.mT).any(0)  # [i, j]; not ==, as a chunk with several documents sees itself
        sees_all = (last == first.mT).all(0)
        sees = sees_some.int() + sees_all  # 0: nothing, 1: some, 2: all
        self.sees = sees.tril().cpu().tolist()  # the host waits for it

    def shard(self, x, dim):
        """This rank's tokens, of all tokens along dim."""
        chunks = x.split(self.length, dim)
        own = [chunks[i] for i in self.chunks[self.rank]]
        return torch.cat(own, dim)

    def blocks(self, rank, q):
        """Yield (queries, keys, mask, is_causal) of the blocks that this rank sees of that rank's tokens."""
        mine = self.chunks[self.rank]
        theirs = self.chunks[rank]
        if rank == self.rank and self.sees[mine[-1]][mine[0]] == 2 and mine == sorted(mine):
            yield slice(None), slice(None), None, True  # one document, in its order: one block is faster
            return
        for i, queries in zip(mine, self.slots):
            for j, keys in zip(theirs, self.slots):
                if self.sees[i][j]:
                    yield queries, keys, self.mask(i, j, q), i == j

    def mask(self, i, j, q):
        """Added to scores: 0 where chunk i sees chunk j, -1e30 elsewhere. None if it sees all of it."""
        if self.sees[i][j] == 2:
            return None
        is_same = self.documents[:, i, :, None] == self.documents[:, j, None]
        # Not -inf: if a query sees nothing of a block, its softmax there must not be NaN, but have no weight.
        mask = torch.where(is_same, 0.0, -1e30).to(q.dtype)
        return mask.unsqueeze(1).expand(*q.shape[:2], -1, -1)


class Attention(torch.autograd.Function):
    """Attention of this rank's queries to all ranks' keys and values, which bring() yields rank by rank. In
    backward take_back() is given their gradients in the same order, and returns those of k and v."""

    @staticmethod
    def forward(ctx, q, k, v, layout, bring, take_back):
        if q.shape[2] != layout.length * len(layout.chunks[layout.rank]):
            raise ValueError(f"{q.shape[2]} tokens are not this rank's: give what layout.shard() returns")
        wide = torch.promote_types(q.dtype, torch.float32)  # blocks are merged in fp32 at least
        out = torch.zeros_like(q, dtype=wide)
        lse = torch.full_like(out[..., :1], -math.inf)  # log-sum-exp of the scores so far
        q = q.contiguous()  # kernels are faster then
        own_kv = torch.stack([k, v])
        for rank, kv in bring(own_kv, layout):
            for queries, keys, mask, is_causal in layout.blocks(rank, q):
                k, v = kv[..., keys, :]
                block, block_lse = attend(q[:, :, queries], k, v, mask, is_causal)
                merge(out[:, :, queries], lse[:, :, queries], block, block_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own_kv, out, lse)
        ctx.how = layout, bring, take_back
        return out

    @staticmethod
    def backward(ctx, grad):
        q, own_kv, out, lse = ctx.saved_tensors
        layout, bring, take_back = ctx.how
        grad_q = torch.zeros_like(q, dtype=lse.dtype)

        def grads_of_kv():
            for rank, kv in bring(own_kv, layout):
                grad_kv = torch.zeros_like(kv)  # in kv's dtype, in which it travels (in bf16 each hop rounds)
                grad_k, grad_v = grad_kv
                for queries, keys, mask, is_causal in layout.blocks(rank, q):
                    of_queries = [x[:, :, queries] for x in (grad, out, lse, q)]
                    k, v = kv[..., keys, :]
                    block_q, block_k, block_v = attend_backward(*of_queries, k, v, mask, is_causal)
                    grad_q[:, :, queries] += block_q
                    grad_k[:, :, keys] += block_k
                    grad_v[:, :, keys] += block_v
                yield grad_kv

        grad_k, grad_v = take_back(grads_of_kv(), layout)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def merge(out, lse, block, block_lse):
    """Merge in a block's output, weighted by its share of the softmax's denominator so far."""
    block_share = torch.sigmoid(block_lse - lse)  # exp(block_lse) / (exp(lse) + exp(block_lse)), no overflow
    out.lerp_(block.to(out.dtype), block_share)
    lse.copy_(torch.logaddexp(lse, block_lse))


def gather_attention(q, k, v, layout):
    """Attention of this rank's q (b, a, s/N, h/a) to all ranks' k and v (b, a_kv, s/N, h/a)."""
    return Attention.apply(q, k, v, layout, gather, reduce_scatter)


def gather(kv, layout):
    shards = kv.new_empty(layout.world_size, *kv.shape)
    all_gather(shards, kv[None], group=layout.group)
    return enumerate(shards)


def reduce_scatter(grads, layout):
    # An all-to-all and a sum do the same, and gloo's own reduce-scatter sends twice as much.
    parts = torch.stack(list(grads))  # part i goes to rank i
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=layout.group)
    return received.sum(0)


# Gathering, the first way, has two problems. While keys and values travel, nothing is computed. And those of
# all tokens must fit while a layer computes. The second way uses those of one rank while others arrive.
def ring_attention(q, k, v, layout):
    """Like gather_attention()."""
    return Attention.apply(q, k, v, layout, rotate, rotate_grads)


def rotate(kv, layout):
    """Yield (rank, its k and v): those of this rank, of the one before it, and so on round the ring."""
    for hops in range(layout.world_size - 1):
        receive = send_to_next(kv, layout)
        yield layout.rank - hops, kv  # below 0: counted from the last rank
        kv = receive()
    yield layout.rank + 1 - layout.world_size, kv


def rotate_grads(grads, layout):
    """Gradients follow their keys and values a hop later. Each rank adds its part; N hops bring them home."""
    receive = None
    for grad_kv in grads:
        if receive:
            grad_kv += receive()
        receive = send_to_next(grad_kv, layout)
    return receive()


def send_to_next(tensor, layout):
    """Start sending to the next rank. Returns a function that waits for what the rank before has sent."""
    if layout.world_size == 1:
        return lambda: tensor
    received = torch.empty_like(tensor)
    before = (layout.rank - 1) % layout.world_size
    after = (layout.rank + 1) % layout.world_size
    ops = [
        dist.P2POp(dist.irecv, received, group=layout.group, group_peer=before),
        dist.P2POp(dist.isend, tensor, group=layout.group, group_peer=after),
    ]
    works = dist.batch_isend_irecv(ops)

    def receive():
        for work in works:
            work.wait()
        return received

    return receive


# A ring sends about as much as gathering. The third way sends 4/(3N) of it, but a rank must have a head.
def ulysses_attention(q, k, v, layout):
    """Like gather_attention(); N must divide a_kv. It is faster without zigzag."""
    q, k, v = [AllToAll.apply(x, 1, 2, layout) for x in (q, k, v)]  # (b, a/N, s, h/a)
    # Now this rank has all chunks, in the order of the ranks, and needs no others: it is a ring of one.
    alone = copy(layout)
    alone.rank = 0
    alone.world_size = 1
    alone.chunks = [[*np.ravel(layout.chunks)]]
    out = ring_attention(q, k, v, alone)
    return AllToAll.apply(out, 2, 1, layout)  # (b, a, s/N, h/a)


class AllToAll(torch.autograd.Function):
    """Send part i of x along dim `split` to rank i, join arrivals along dim `join`. Backward: the reverse."""

    @staticmethod
    def forward(ctx, x, split, join, layout):
        ctx.back = join, split, layout
        parts = torch.stack(x.chunk(layout.world_size, split))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=layout.group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.back), None, None, None


KINDS = {
    "gather": gather_attention,
    "ring": ring_attention,
    "ulysses": ulysses_attention,
}


# A reader may skip the next two functions, which call the kernels for CPUs and for GPUs. 0.0: no dropout.
def attend(q, k, v, mask, is_causal):
    """A block's output, and the log-sum-exp of each query's scores (b, a, s/2N, 1)."""
    if q.is_cuda:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, is_causal)
        lse = lse[..., : q.shape[2]]  # it is padded to a multiple of 32
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask)
    return out, lse.unsqueeze(-1)


def attend_backward(grad, out, lse, q, k, v, mask, is_causal):
    """A block's part of the gradients of q, k, v. As out and lse are those of all keys, exp(score - lse) is a
    key's weight in the whole softmax, and these parts just add up (arXiv 2307.08691, section 3.1)."""
    lse = lse.squeeze(-1)
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask
        )
    lse = F.pad(lse, (0, -q.shape[2] % 32), value=math.inf)  # as the kernel pads it
    needed = True, True, True, False  # gradients: that of the mask is not
    grads = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, mask, out, lse, None, None, 0.0, needed, is_causal
    )
    return grads[:3]


def train(config):
    """Train with these flags. In bf16 the model has the fp32 masters, and runs with their casts."""
    device, text = check_and_set_up(config)
    world_size = dist.get_world_size()
    dtype = DTYPES[config.dtype]
    model = GPT(config).to(device, torch.promote_types(dtype, torch.float32))
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        batches = microbatches(config, text, step, device)  # all ranks' rows are the same
        weights = {name: param.to(dtype) for name, param in model.named_parameters()}
        loss = 0
        for inputs, targets in batches:
            microloss = loss_of(model, weights, inputs, targets, config) / config.accum
            microloss.backward()
            loss += microloss.detach()
        # Each loss is the mean over this rank's tokens. All ranks have equally many.
        grads = [param.grad for param in model.parameters()]
        flat_grad = nn.utils.parameters_to_vector(grads)
        dist.all_reduce(flat_grad)
        flat_grad /= world_size
        nn.utils.vector_to_parameters(flat_grad, grads)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        model.zero_grad()
        dist.all_reduce(loss)
        print_step(config, step, loss / world_size, grad_norm, started)
    if config.save and not dist.get_rank():
        save_weights(model.to(dtype).state_dict(), config.save)


def loss_of(model, weights, inputs, targets, config):
    """The mean loss of this rank's tokens of whole rows (b, s)."""
    begins = torch.zeros(1, config.context, dtype=torch.bool)  # each row is one document
    if config.documents:
        begins = inputs == ord("\n")
    layout = Layout(begins, zigzag=config.kind != "ulysses")

    def attention(q, k, v, is_causal):  # in place of torch's, so that Block stays as it is
        return KINDS[config.kind](q, k, v, layout)

    # GPT adds the first s/N rows of positions.weight: let them be those of this rank's tokens.
    positions = layout.shard(weights["positions.weight"], 0)
    weights = weights | {"positions.weight": positions}
    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        logits = functional_call(model, weights, layout.shard(inputs, 1))
    return mean_loss(logits, layout.shard(targets, 1))


def check_and_set_up(config):
    world_size = int(os.getenv("WORLD_SIZE") or 1)
    if config.context % (2 * world_size):
        refuse(f"--context {config.context}: must be a multiple of 2 x {world_size} ranks")
    if config.kind == "ulysses" and config.heads % world_size:
        refuse(f"--heads {config.heads}: must be a multiple of the {world_size} ranks")
    return set_up(config, f" | {config.kind} | documents {config.documents}", replicas=1)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--kind", choices=KINDS, default="gather", help="how queries meet keys")
    own.add_argument("--documents", action="store_true", help="each newline begins a document")
    return read_flags(arguments, own)


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
