"""Pipeline parallelism: the layers are split over ranks, and microbatches flow through them by a schedule.

Idea
    Rank i holds stage i, its share of the layers. A batch is cut into m microbatches, so that all stages
    work at once, each on another one. Which forward or backward a rank does next is data, a list of actions:
    naive (one microbatch at a time), GPipe (arXiv 1811.06965), 1F1B (PipeDream-flush, arXiv 2006.09503),
    interleaved 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2), ZB-H1 and ZB-H2 (Zero Bubble, arXiv
    2401.10241, section 2). One small loop runs any such list.

Holds
    Rank i: 1/p of the layers, with their gradients and optimizer states (the first also the embedding, the
    last the head, whose weight is the embedding's, so both hold it). Activations of the microbatches in
    flight: at most m in gpipe, min(m, p-i) in 1f1b, p in zb-h1, 2p-1 in zb-h2.

Talks
    4 stages, 1f1b, 6 microbatches: F forward, B backward, . idle ("bubble")
    rank 0 | F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 ...
    rank 1 | .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 ...      every F sends its output (b, T, D) to the next stage,
    rank 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 ...      every B the gradient of its input to the one before
    rank 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 ...
    Sends start as soon as the value exists, receives are posted two ahead, so both hide under compute.
    At the end of a step the two copies of the tied weight all-reduce their gradients.

Costs
    Each rank but the ends sends 2 m b T D elements a step, whatever P is, and v times that interleaved with v
    chunks. The price is idle time, (p-1)/m of the work's in gpipe and 1f1b, (p-1)/(vm) interleaved: as a part
    of all time, which is what a run prints, (p-1)/(m+p-1) and (p-1)/(vm+p-1): as measured, as the schedule
    comes to when it is played with the time that each action took, and in closed form.
    Zero bubble cuts backward in two: B, the gradient of the input, which the stage before waits for, and W,
    the gradients of the weights, which nobody waits for and which fill the gaps.

Run
    torchrun --nproc_per_node=2 pipeline.py --accum 8 --schedule 1f1b
    torchrun --nproc_per_node=8 pipeline.py --size gpt2-xl --dtype bf16 --batch 64 --accum 32 --schedule zb-h1

Expect
    pipeline | 2 ranks gloo/cpu | 0.83 M parameters (P) | fp32 | batch 16 = 2 x 8 microbatches
    step  1/20 | loss 5.5011 | grad norm 6.577 | 1334.2 ms | 0.8 k tok/s
    ...
    step 20/20 | loss 3.0858 | grad norm 1.224 | 159.9 ms | 6.4 k tok/s
    held per rank     formula                           measured
      parameters      4P_i                   1.75 MB     1.75 MB
      gradients       4P_i                   1.75 MB     1.75 MB
      optimizer       8P_i                   3.50 MB     3.50 MB
    sent per rank and step (ring bytes)
      send            32bTD                  0.52 MB     0.52 MB
      all-reduce      4VD+32(N-1)/N          0.13 MB     0.13 MB
    rank  stages          parameters  in flight   activations       bound
    0     0                   0.44 M          2       4.21 MB     4.21 MB
    1     1                   0.43 M          1       2.37 MB     2.37 MB
    idle: measured 21.0%, played with the measured times 16.0%, closed form 11.1%; the last step:
    rank 0  F0ffF1ffffffffB0bbbbbbbbF2ffB1bbbbbbF3fff.B2bbF4ffff..B3bbbbF....B4bbbF6f..B5bbbbF7ffB6bb....B7b
    rank 1  ...F0fB0bbb..F1ffffB1bbbbb....F2ffB2bbbbbbbF3fffB3b......F4fffB4bbbbF5ffB5bbF6B6bbbbbbbF7fB7bb..

Left out
    Data parallelism beside it, a schedule found by search (ZB-V), activations of several shapes, dropout,
    stages made where they belong (here each rank makes the whole model and then empties what it does not
    need), and with zero bubble activation checkpointing and what it does under autocast (no split).
"""

import argparse
import functools
import itertools
import json
import operator
import os
import shutil
import statistics
import sys
import time
import weakref
from collections import Counter, defaultdict, deque, namedtuple
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # torch.optim would load it later, and then it would hold on to our process group
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ==== toy model: the same lines in every lesson ====
SIZES = {"toy": (4, 4, 128, 64, 256), "small": (6, 8, 256, 128, 256), "gpt2": (12, 12, 768, 1024, 50257)}
SIZES |= {"gpt2-xl": (48, 25, 1600, 1024, 50257), "7.5b": (32, 34, 4352, 2048, 50257)}
SHAPE = ("layers", "heads", "width", "context", "vocab")  # text is bytes: the first 256 of the vocabulary
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def flags():
    """The parser of the flags that every lesson has."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error, add = refuse, parser.add_argument
    add("--size", default="toy", choices=SIZES, help=", ".join(SHAPE) + " together")
    for name in SHAPE:
        add("--" + name, type=int, help="in place of the size's")
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--batch", type=int, default=16, help="sequences in the global batch of an optimizer step")
    add("--accum", type=int, default=1, help="microbatches that each rank accumulates per step")
    add("--optim", default="adamw", choices=OPTIMIZERS, help="sgd shows a wrong scale, adamw hides it")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--clip", type=float, default=1.0, help="limit of the global gradient norm (0: none)")
    add("--seed", type=int, default=0, help="seed of weights and batches")
    add("--dtype", default="fp32", choices=DTYPES, help="bf16 keeps fp32 masters")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: cuda if each rank has a GPU")
    add("--data", help="text file or folder, read as bytes (none: the sources of Python's standard library)")
    add("--save", help="file for the full-precision state_dict")
    add("--json", help="file for the ledger")
    add("--trace", help="folder for a Chrome trace per rank (its first step is slow: the ledger looks on)")
    return parser


def refuse(problem):
    """End this rank with exit code 2; rank 0 says in one line what to change."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{os.path.basename(sys.argv[0])}: {problem}", file=sys.stderr)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(2)


def set_up(config):
    """Join (once) the world that torchrun describes, or a world of one. Returns the device and the text."""
    gpus, device = torch.cuda.device_count() * (config.device != "cpu"), torch.device("cpu")
    gpu_each = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if gpu_each or (gpus and config.device == "cuda"):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if gpu_each else "gloo", timeout=timedelta(minutes=10), **alone)
    for name, value in zip(SHAPE, SIZES[config.size]):
        setattr(config, name, value if getattr(config, name) is None else getattr(config, name))
    root = Path(config.data or os.path.dirname(os.__file__))
    files = [root] if root.is_file() else sorted(root.rglob("*") if config.data else root.glob("*.py"))
    files = [np.memmap(f, np.uint8, "r") for f in files if f.is_file() and f.stat().st_size]
    text = files[0] if len(files) == 1 else np.concatenate([*files, np.empty(0, np.uint8)])
    problems = [None] * dist.get_world_size()  # of all ranks: a file may be missing on one host only
    dist.all_gather_object(problems, next(find_problems(config, device, len(text)), None))
    if any(problems):
        refuse(next(filter(None, problems)))
    torch.manual_seed(config.seed)
    return device, text


def find_problems(config, device, text_bytes):
    """Yield what stands in the way of training, each in one line."""
    for name, value in vars(config).items():  # counts start at 1, other numbers at 0
        least = {"seed": 0, "prefetch": 0, "staleness": 0, "vocab": 256}.get(
            name, 1 if type(value) is int else 0
        )
        if type(value) in (int, float) and not least <= value < 2**63:
            yield f"--{name.replace('_', '-')} {value}: must be {least} or more, and below 2^63"
    if config.device == "cuda" != device.type:
        yield "--device cuda: no GPU is visible here; use --device cpu"
    if config.width % config.heads:
        yield f"--width {config.width}: must be a multiple of --heads {config.heads}"
    if config.data and not os.path.exists(config.data):
        yield f"--data {config.data}: no such file or folder"
    if text_bytes <= config.context:
        yield f"--data {config.data}: {text_bytes} bytes there, too few for --context {config.context}"
    for path in filter(None, (config.save, config.json, config.trace)):
        writable = os.access(os.path.join(Path(path).parent, "."), os.W_OK)
        wrong_kind = os.path.isfile(path) if path == config.trace else os.path.isdir(path) or path[-1] == "/"
        if dist.get_rank() == 0 and (wrong_kind or not writable):
            yield f"{path}: cannot be written; its parent folder must exist, and --trace alone is a folder"


def microbatches(config, text, step, device, rank=0, ranks=1):
    """This rank's (inputs, targets) of a step's global batch, int64 (batch / ranks / accum, T) each."""
    generator = np.random.default_rng((config.seed, step))
    starts = generator.integers(len(text) - config.context, size=config.batch)
    for own in starts.reshape(ranks, config.accum, -1)[rank]:
        tokens = torch.from_numpy(np.stack([text[i : i + config.context + 1] for i in own])).to(device).long()
        yield tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    """Pre-norm transformer block with H heads, (B, T, D) -> (B, T, D)."""

    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (B, T, 3, H, D/H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D/H) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def mean_loss(logits, targets):
    """Mean cross-entropy, fp32 at least, of logits (B, T, V) and targets (B, T)."""
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten())


class GPT(nn.Module):
    """Logits (B, T, V) of inputs (B, T), or with targets their mean loss. The head is the embedding."""

    def __init__(self, config):
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, config.width) for n in (config.vocab, config.context))
        self.blocks = nn.ModuleList(Block(config.heads, config.width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for matrix in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, inputs, targets=None):
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # (B, T, V)
        return logits if targets is None else mean_loss(logits, targets)


# ==== end of the toy model ====


class Optimizer:
    """A torch optimizer on fp32 masters of the bf16 parameters, and on the other parameters themselves."""

    def __init__(self, params, optimizer_class, **options):
        params = [p for p in params if p.requires_grad]
        self.masters = {p: p.detach().float() if p.dtype == torch.bfloat16 else p for p in params}
        self.groups = []
        for i in range(0, len(params), 16):  # so that 16 gradients at most are copied to fp32 at a time
            group = params[i : i + 16]
            self.groups.append((group, optimizer_class([self.masters[p] for p in group], **options)))

    @torch.no_grad()
    def step(self):
        for params, optimizer in self.groups:
            copied = [p for p in params if p is not self.masters[p] and p.grad is not None]
            for p in copied:
                self.masters[p].grad = p.grad.float()
            optimizer.step()
            for p in copied:
                p.copy_(self.masters[p])
                self.masters[p].grad = None

    def tensors(self):
        """What it holds beyond the model: masters, moments, step counts."""
        masters = [master for p, master in self.masters.items() if p is not master]
        return masters + tree_leaves([optimizer.state for _, optimizer in self.groups])

    def state_dict_of(self, model):
        """The model's, with masters in place of the parameters that have them."""
        tensors = model.state_dict(keep_vars=True)
        return {name: self.masters.get(tensor, tensor).detach() for name, tensor in tensors.items()}


# op: "F" forward; "B" backward, or where there is a "W" its half to the input; "W" its half to the weights.
Action = namedtuple("Action", "op stage microbatch")


def naive(rank, p, m, v):
    for k in range(m):
        yield from (Action("F", rank, k), Action("B", rank, k))


def gpipe(rank, p, m, v):
    yield from (Action("F", rank, k) for k in range(m))
    yield from (Action("B", rank, k) for k in range(m))


def one_forward_one_backward(forward, backward, warmup):
    """Warmup forwards, then a backward and a forward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forward))
    yield from forward[:warmup]
    for k, action in enumerate(backward):
        yield action
        yield from forward[warmup + k : warmup + k + 1]


def plain_1f1b(rank, p, m, v):
    # p - rank forwards, counting that of the first steady pair (papers that warm up with one less do not).
    forward, backward = ([Action(op, rank, k) for k in range(m)] for op in "FB")
    return one_forward_one_backward(forward, backward, p - rank)


def interleaved(rank, p, m, v):
    """Rank i has the v stages i, p + i, 2p + i ...; p microbatches go through one of them, then the next."""
    if m % p or v < 2:
        raise ValueError(
            f"interleaved needs 2 or more chunks (not {v}), and microbatches a multiple of {p} (not {m})"
        )
    order = [(k // p % v, k // (p * v) * p + k % p) for k in range(m * v)]  # (chunk, microbatch)
    forward = [Action("F", chunk * p + rank, k) for chunk, k in order]
    backward = [Action("B", (v - 1 - chunk) * p + rank, k) for chunk, k in order]
    return one_forward_one_backward(forward, backward, 2 * (p - rank - 1) + (v - 1) * p + 1)


def zero_bubble(rank, m, warmup, waiting):
    """1F1B with more forwards first; after a B comes a W if more than `waiting` B have none."""
    done = 0
    for action in one_forward_one_backward(
        [Action("F", rank, k) for k in range(m)], [Action("B", rank, k) for k in range(m)], warmup
    ):
        yield action
        if action.op == "B" and action.microbatch + 1 - done > waiting:
            yield Action("W", rank, done)
            done += 1
    yield from (Action("W", rank, k) for k in range(done, m))


SCHEDULES = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": plain_1f1b,
    "interleaved": interleaved,
    "zb-h1": lambda rank, p, m, v: zero_bubble(rank, m, p - rank, rank),
    "zb-h2": lambda rank, p, m, v: zero_bubble(rank, m, 2 * (p - rank) - 1, 2 * rank),
}


def build_schedule(name, n_stages, n_microbatches, n_chunks=1):
    """[the list of Actions of each of n_stages ranks]. Raises ValueError if there is no such schedule.

    Stages count from 0 to n_stages * n_chunks - 1; stage s belongs to rank s % n_stages.
    """
    if name not in SCHEDULES:
        raise ValueError(f"no schedule {name}; there are {', '.join(SCHEDULES)}")
    if n_chunks > 1 and name != "interleaved":
        raise ValueError(f"{name} has one stage per rank: n_chunks must be 1, not {n_chunks}")
    return [list(SCHEDULES[name](rank, n_stages, n_microbatches, n_chunks)) for rank in range(n_stages)]


def needs(action, last_stage):
    """The actions whose results this one takes."""
    op, stage, k = action
    if op == "F":
        return [Action("F", stage - 1, k)] if stage > 0 else []
    if op == "B":
        return [Action("F", stage, k)] + ([Action("B", stage + 1, k)] if stage < last_stage else [])
    return [Action("B", stage, k)]


def play(schedule, duration, latency=0.0):
    """[[(action, start, end) ...] of each rank] if each starts when its rank is free and its needs have come.

    duration(action): how long it takes. latency: from the end of an action to its use on another rank.
    """
    p, last = len(schedule), max(action.stage for actions in schedule for action in actions)
    ended, played, todo = {}, [[] for _ in schedule], [deque(actions) for actions in schedule]
    while any(todo):
        stuck = True
        for rank, actions in enumerate(todo):
            while actions and all(need in ended for need in needs(actions[0], last)):
                action = actions.popleft()
                times = [ended[need] + latency * (need.stage % p != rank) for need in needs(action, last)]
                start = max([0.0, *times, *(end for _, _, end in played[rank][-1:])])
                ended[action] = start + duration(action)
                played[rank].append((action, start, ended[action]))
                stuck = False
        if stuck:
            raise ValueError(f"no rank can go on: {[actions[0] for actions in todo if actions]}")
    return played


def idle_rate(played):
    """The part of the ranks' time, from a rank's first action to its last at the longest, with no action."""
    cost = max(actions[-1][2] - actions[0][1] for actions in played)
    busy = sum(end - start for actions in played for _, start, end in actions)
    return 1 - busy / len(played) / cost


def bubble_rate(schedule, t_f, t_b, t_w, t_comm=0.0):
    """(cost - ideal) / cost of a schedule, played by dependencies alone (arXiv 2401.10241, section 5.3).

    t_f, t_b, t_w: a rank's times for one microbatch, forward and the halves of backward, which chunks share;
    a B without a W takes both. t_comm: latency between ranks. cost: of the rank with the longest span from
    its first action to its last; ideal: microbatches * (t_f + t_b + t_w).
    """
    stages = {action.stage for actions in schedule for action in actions}
    split = any(action.op == "W" for actions in schedule for action in actions)
    times = {"F": t_f, "B": t_b if split else t_b + t_w, "W": t_w}
    chunks = len(stages) // len(schedule)
    return idle_rate(play(schedule, lambda action: times[action.op] / chunks, t_comm))


class DeferredLinear(torch.autograd.Function):
    """F.linear whose backward gives the gradient of x and puts off those of weight and bias."""

    @staticmethod
    def forward(ctx, put_off, x, weight, bias=None):
        ctx.put_off, ctx.params = put_off, (weight, bias)
        ctx.save_for_backward(x)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        rows, x = gradient.flatten(0, -2), ctx.saved_tensors[0].flatten(0, -2)
        ctx.put_off(ctx.params, lambda: (rows.t() @ x, None if ctx.params[1] is None else rows.sum(0)))
        return None, gradient @ ctx.params[0] if ctx.needs_input_grad[1] else None, None, None


class SplitBackward(TorchFunctionMode):
    """Backward of what is computed within it leaves out the gradients of linear layers' weights.

    weights() adds them later. The gradient of a layer's input x needs the weight, that of the weight needs x,
    and both need that of the output. Nothing needs the weight's, so it can wait, with x and the output's
    gradient. What is no linear layer's own weight (norms, embeddings, a weight that was itself computed)
    gets its gradient in backward: it costs little, or on stage 0 nobody waits. (arXiv 2401.10241, section 2)
    """

    def __init__(self):
        super().__init__()
        self.later = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        replaced = self._linear if function is F.linear else function
        return replaced(*args, **(kwargs or {}))

    def _linear(self, input, weight, bias=None):
        params = [p for p in (weight, bias) if p is not None]
        own = weight.requires_grad and all(p.is_leaf for p in params) and torch.is_grad_enabled()
        if not own or input.dim() < 2 or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        return DeferredLinear.apply(self._put_off, input, weight, bias)

    def _put_off(self, params, recipe):
        self.later.append((params, recipe))

    @torch.no_grad()
    def weights(self):
        while self.later:
            params, recipe = self.later.pop()
            for param, gradient in zip(params, recipe()):
                if param is not None and param.requires_grad:
                    param.grad = gradient if param.grad is None else param.grad.add_(gradient)


def split_layers(costs, count):
    """Ends of `count` stages of consecutive layers, the largest cost as low as can be: 3 1 1 1 -> [1, 4]."""
    total = [0, *itertools.accumulate(costs)]
    if count > len(costs):
        raise ValueError(f"{len(costs)} layers are too few for {count} stages")

    best = {0: (0, ())}  # {end: (largest cost, ends) of the first `end` layers}, in no stage, one, two ...
    for stages in range(1, count + 1):
        best = {
            end: min(
                (max(cost, total[end] - total[cut]), (*ends, end))
                for cut, (cost, ends) in best.items()
                if cut < end
            )
            for end in range(stages, len(costs) - count + stages + 1)
        }
    return list(best[len(costs)][1])


class Pipeline(nn.Module):
    """Runs a schedule of forwards and backwards of a model that is split over the ranks of `group`.

    layers: modules, each called with what the last one returned (the first with a step's input), the same on
    all ranks; they must return one tensor, of the same shape for every microbatch of every step, change no
    input in place, and work on meta tensors. ends: where each stage ends, as from split_layers().
    loss_function(output, target) is a mean. schedule: as from build_schedule(). A parameter in layers of
    several ranks is tied: its copies get the sum of their gradients (0, where none has any). Rank 0's weights
    and buffers win, and the storages of what a rank does not need are emptied. Pipelines side by side, each
    of a `group` of its own, are made at the same time, by all ranks of the world.

    step(inputs, targets), of lists of as many microbatches as the schedule has, the same on all ranks, leaves
    in .grad the gradients of the mean of their losses and returns that mean; then clip_grad_norm_() and the
    optimizer follow.
    """

    AHEAD = 2  # receives posted before they are needed, per sender

    def __init__(self, layers, ends, loss_function, schedule, group=None):
        super().__init__()
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.members = dist.get_process_group_ranks(group or dist.group.WORLD)  # their ranks in the world
        self.schedule, self.actions, self.last = schedule, schedule[self.rank], len(ends) - 1
        self.loss_function, self.splits = loss_function, any(action.op == "W" for action in schedule[0])
        self.microbatches = 1 + max(action.microbatch for action in schedule[0])
        stages = [nn.Sequential(*layers[start:end]) for start, end in zip([0, *ends], ends)]
        self.stages = nn.ModuleDict({str(s): stages[s] for s in range(self.rank, len(ends), self.ranks)})
        self._share_out(stages)
        self.all_stages = stages  # of the others' stages the shapes are left
        self._plan_messages()
        self._make_groups()
        self._open_lanes()
        self.shapes, self.times, self.observer = None, [], None

    def _share_out(self, stages):
        """Rank 0's weights for all; then empty what this rank does not need, and find what several have."""
        owners = {}
        for s, stage in enumerate(stages):
            for tensor in (*stage.parameters(), *stage.buffers()):
                owners.setdefault(tensor, []).append(s % self.ranks)
        self.norm_params, self.ties, self.sizes, needed = [], {}, [0] * self.ranks, set()
        for tensor, ranks in owners.items():
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, group_src=0, group=self.group)
            tensor.detach().copy_(whole)
            if self.rank in ranks:
                needed.add(tensor.untyped_storage().data_ptr())
            ranks = sorted(set(ranks))
            for rank in ranks:
                self.sizes[rank] += tensor.numel()
            if isinstance(tensor, nn.Parameter) and len(ranks) > 1:
                self.ties[tensor] = ranks
            if ranks[0] == self.rank:
                self.norm_params.append(tensor)  # a tied one counts on one rank only
        for tensor in owners:  # some may share a storage
            if tensor.untyped_storage().data_ptr() not in needed:
                tensor.untyped_storage().resize_(0)

    def receiver(self, action):
        """The rank that the result of an action goes to, or None."""
        stage = {"F": action.stage + 1, "B": action.stage - 1}.get(action.op, -1)
        return stage % self.ranks if 0 <= stage <= self.last else None

    def _plan_messages(self):
        """From everybody's schedule: what comes here and in which order, and what each message proves.

        Whoever sends a result has received what it was made from, so that need not be kept any longer.
        """
        self.incoming, self.proves = defaultdict(list), {}  # {sender: actions}, {action: actions}
        for sender, actions in enumerate(self.schedule):
            taken = []  # what the sender took from this rank since its last message to it
            for action in actions:
                taken += [n for n in needs(action, self.last) if n.stage % self.ranks == self.rank != sender]
                if self.receiver(action) == self.rank != sender:
                    self.incoming[sender].append(action)
                    self.proves[action], taken = taken, []
        self.place = {action: i for actions in self.incoming.values() for i, action in enumerate(actions)}

    def _make_groups(self):
        """Of those that share a parameter, and a lane of each sender and receiver.

        On NCCL the operations of a group run in the order of their calls, so a receive that was posted ahead
        would hold up a send behind it: hence the lanes. All ranks of the world must make each group.
        """
        sent = [(a.stage % self.ranks, self.receiver(a)) for actions in self.schedule for a in actions]
        pairs = {(a, b) for a, b in sent if b not in (a, None)}
        named = lambda kind, ranks: (kind, *(self.members[rank] for rank in ranks))  # noqa: E731
        wanted = {named("lane", pair) for pair in pairs} | {named("tie", r) for r in self.ties.values()}
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, wanted)  # there may be other pipelines
        groups = {name: dist.new_group(name[1:]) for name in sorted(set().union(*everyone))}
        self.lanes = {pair: groups[named("lane", pair)] for pair in sorted(pairs)}
        mine = {tensor: ranks for tensor, ranks in self.ties.items() if self.rank in ranks}
        self.tied = [(tensor, groups[named("tie", ranks)]) for tensor, ranks in mine.items()]

    def _open_lanes(self):
        """Send a number through each: the first call connects, and waits until both ends are there.

        In one order of the lanes on all ranks it cannot wait for ever, in the midst of a schedule it could.
        """
        token = torch.zeros(1, device=next((p.device for p in self.parameters()), None))
        for (sender, receiver), lane in self.lanes.items():
            if self.rank == sender:
                dist.send(token, self.members[receiver], group=lane)
            elif self.rank == receiver:
                dist.recv(token, self.members[sender], group=lane)

    def _find_shapes(self, x):
        """{stage: (shape, dtype) of its output}, by forwards on meta tensors, which change nothing."""
        self.shapes, x = {}, torch.empty_like(x, device="meta")
        for s, stage in enumerate(self.all_stages[:-1]):
            tensors = itertools.chain(stage.named_parameters(), stage.named_buffers())
            shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
            with torch.no_grad():
                x = torch.func.functional_call(stage, shapes, (x,))
            self.shapes[s] = x.shape, x.dtype

    def _post(self, sender, count):
        """Post the receives of the first `count` messages from a sender."""
        while self.posted[sender] < min(count, len(self.incoming[sender])):
            action = self.incoming[sender][self.posted[sender]]
            shape, dtype = self.shapes[action.stage - (action.op == "B")]
            buffer = torch.empty(shape, dtype=dtype, device=self.device)
            self.arriving[action] = self._start(dist.irecv, buffer, sender, self.rank), buffer
            self.posted[sender] += 1

    def _fetch(self, action):
        """The result of another stage's action."""
        if action in self.local:
            return self.local.pop(action)
        sender = action.stage % self.ranks
        self._post(sender, self.place[action] + 1 + self.AHEAD)
        work, buffer = self.arriving.pop(action)
        work.wait()
        for taken in self.proves[action]:  # they have arrived, so their buffers can go
            self.leaving.pop(taken)[0].wait()
        return buffer

    def _send(self, action, tensor):
        receiver = self.receiver(action)
        if receiver == self.rank:
            self.local[action] = tensor
        else:
            tensor = tensor.contiguous()
            self.leaving[action] = self._start(dist.isend, tensor, self.rank, receiver), tensor

    def _start(self, transfer, tensor, sender, receiver):
        other = self.members[receiver if sender == self.rank else sender]
        return transfer(tensor, other, group=self.lanes[sender, receiver])

    def _forward(self, action, x=None):
        stage, k = action.stage, action.microbatch
        x = self.inputs[k] if stage == 0 else x.requires_grad_()
        split = SplitBackward() if self.splits else nullcontext()
        watch = saved_tensors_hooks(self.observer.save, lambda x: x) if self.observer else nullcontext()
        with split, watch:
            y = self.stages[str(stage)](x)
            if stage == self.last:
                # Gradients add up over microbatches and we want their mean; each is a mean already.
                y = self.loss_function(y, self.targets[k]) / self.microbatches
                self.loss += y.detach()
            else:
                shape, dtype = self.shapes[stage]
                if y.shape != shape:
                    raise ValueError(f"stage {stage} returns {tuple(y.shape)}, not {tuple(shape)} as before")
                y = y.to(dtype)  # autocast, which does not act on meta tensors, may have made it another
        # Backward begins at the edge; the value itself may go when it has arrived.
        seed = torch.ones_like(y) if stage == self.last else None
        self.alive[stage, k] = x, get_gradient_edge(y) if y.requires_grad else None, seed, split
        return None if stage == self.last else y.detach()

    def _backward(self, action, gradient=None):
        x, edge, seed, split = self.alive.pop(action[1:])
        if edge is not None:  # it is, where all so far is frozen
            torch.autograd.backward(edge, seed if gradient is None else gradient)
        if self.splits:
            self.waiting[action[1:]] = split
        if action.stage == 0:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad  # the stage before waits for it

    def _weights(self, action):
        self.waiting.pop(action[1:]).weights()

    def step(self, inputs, targets):
        """Run the schedule on lists of microbatches. Returns their mean loss, on every rank."""
        if not len(inputs) == len(targets) == self.microbatches:
            raise ValueError(f"the schedule is of {self.microbatches} microbatches, not {len(inputs)}")
        if not torch.is_grad_enabled():
            raise RuntimeError("step() runs backward, too, so it cannot stand in no_grad()")
        self.inputs, self.targets, self.device = inputs, targets, inputs[0].device
        if self.shapes is None:
            self._find_shapes(inputs[0])
        self.posted = Counter()  # {sender: how many receives}
        self.arriving, self.leaving = {}, {}  # {action: (work, buffer)} of what others and what we send
        self.local = {}  # {action: result} for another stage of this rank
        self.alive = {}  # {(stage, microbatch): what its backward needs}
        self.waiting, self.times = {}, []  # {(stage, microbatch): its SplitBackward between B and W}
        self.loss = torch.zeros((), dtype=torch.double, device=self.device)
        for sender in self.incoming:
            self._post(sender, self.AHEAD)
        run = {"F": self._forward, "B": self._backward, "W": self._weights}
        for action in self.actions:
            taken = [self._fetch(n) for n in needs(action, self.last) if n.stage != action.stage]
            start = self._now()
            result = run[action.op](action, *taken)
            if result is not None:
                self._send(action, result)
            self.times.append((action, start, self._now()))
            if self.observer:
                self.observer.done(action)
        for work, _ in self.leaving.values():
            work.wait()
        self.leaving = {}
        for param, tie in self.tied:
            if param.requires_grad:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad, group=tie)
        dist.all_reduce(self.loss, group=self.group)
        return self.loss

    def _now(self):
        """A point in time, of the device."""
        if self.device.type == "cpu":
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, times):
        """[(action, start, end) ...] of a step as numbers, those of a CPU by the clock on the wall."""
        if self.device.type == "cpu":
            return times
        first = times[0][1]
        return [(a, first.elapsed_time(s) / 1e3, first.elapsed_time(e) / 1e3) for a, s, e in times]

    def gather(self, state_dict):
        """The whole state_dict on rank 0 (elsewhere None), each tensor from the lowest rank that has it."""
        own = {name: x.cpu() for name, x in state_dict.items() if x.untyped_storage().nbytes()}
        everyone = [None] * self.ranks if self.rank == 0 else None
        dist.gather_object(own, everyone, group_dst=0, group=self.group)
        return everyone and functools.reduce(operator.or_, everyone[::-1])

    def clip_grad_norm_(self, max_norm):
        """Scale the gradients to a global norm of at most max_norm (0: any). Returns the norm before."""
        total = torch.zeros((), dtype=torch.double, device=self.device)
        for p in self.norm_params:
            if p.grad is not None:
                wide = torch.promote_types(p.dtype, torch.float32)
                total += torch.linalg.vector_norm(p.grad, dtype=wide).double().square()
        dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        if max_norm:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1)
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.mul_(scale)
        return norm


# ==== ledger: the same lines in every lesson ====
# {operator: (what it does, passes round the ring)}; gloo has its reduce-scatter from an all-to-all.
RING = {"allreduce": ("all-reduce", 2), "reduce_scatter": ("reduce-scatter", 1), "send": ("send", 0)}
RING |= {"alltoall": ("reduce-scatter", 1), "allgather": ("all-gather", 1), "broadcast": ("broadcast", 0)}


class Ledger(TorchDispatchMode):
    """Prints the run. While on, it sees every operator: bytes alive, by name, and given to collectives."""

    one, held, sent = "rank", "held per rank", "sent per rank and step (ring bytes)"
    profile, data_parallel = torch.profiler.profile, True

    def __init__(self, lesson, config, device, model, gradients=None, threads=0):
        super().__init__()
        params = list(model.parameters())  # once: to walk the modules at every operator is slow
        self.gradients = gradients or (lambda: [p.grad for p in params])
        self.config, self.clock = config, time.perf_counter()
        self.known, self.alive, self.seen = {}, Counter(), Counter()
        ranks, backend = (threads, "threads") if threads else (dist.get_world_size(), dist.get_backend())
        P = sum(p.numel() for p in params)
        self.result = {"lesson": lesson, "world_size": ranks, "backend": backend, "device": device.type}
        self.result |= {"dtype": config.dtype, "n_params": P, "losses": [], "grad_norms": [], "step_ms": []}
        self.say = print if dist.get_rank() == 0 else lambda line: None
        who = f"{ranks} {self.one}{'s'[: ranks - 1]}"
        share = f"{config.batch // ranks // config.accum} per {self.one} x {config.accum} x {who}"
        share = (
            share if self.data_parallel else f"{config.batch // config.accum} x {config.accum} microbatches"
        )
        size = f"{P / 1e6:.2f} M parameters (P) | {config.dtype} | batch {config.batch} = {share}"
        self.say(f"{lesson} | {who} {backend}/{device.type} | {size}")
        self.watch("parameters", [*params, *model.buffers()])
        if config.trace:
            keep = torch.profiler.tensorboard_trace_handler(config.trace, f"{lesson}-rank{dist.get_rank()}")
            self.profiler = self.profile(on_trace_ready=keep)
            self.profiler.start()

    def watch(self, name, tensors, count=True):
        """Count the storages of these tensors as `name` for as long as they live."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), name)
        if count:
            self.seen |= self.alive | Counter(peak_bytes=self.alive.total())

    def _note(self, storage, name="other"):
        key, size = id(storage), storage.nbytes()
        if key not in self.known:
            self.known[key] = "other", 0, weakref.ref(storage, lambda _: self._forget(key))
        old, before, life = self.known[key]
        name = name if old == "other" else old
        if (name, size) != (old, before):
            self.alive[old, "measured"] -= before
            self.alive[name, "measured"] += size
            self.known[key] = name, size, life

    def _forget(self, key):
        name, size, _ = self.known.pop(key)
        self.alive[name, "measured"] -= size

    def __enter__(self):
        resize = torch.UntypedStorage.resize_  # no operator, so it is seen in this way

        def resize_and_note(storage, size):
            resize(storage, size)
            self._note(storage)

        torch.UntypedStorage.resize_ = resize_and_note
        return super().__enter__()

    def __exit__(self, *error):
        del torch.UntypedStorage.resize_
        super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.watch("gradients", self.gradients(), count=False)
        self.watch("other", tree_leaves((args, result)))
        kind = next((kind for kind in RING if function.namespace == "c10d" and kind in function.name()), None)
        if kind:
            name, passes = RING[kind]
            ranks = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject)).size()
            payload = max(sum(getattr(x, "nbytes", 0) for x in tree_leaves(arg)) for arg in args[:2])
            wire = payload * passes * (ranks - 1) / ranks if passes else payload
            self.seen.update({(name, "calls"): 1, (name, "payload"): payload, (name, "wire"): wire})
        return result

    def log(self, step, loss, grad_norm):
        """Print a step. Each .item() waits for the device: once a step, at its end."""
        self.result["losses"].append(loss.item())
        self.result["grad_norms"].append(grad_norm.item())
        ms, self.clock = 1e3 * (time.perf_counter() - self.clock), time.perf_counter()
        self.result["step_ms"] += [ms] if step > 1 else []  # the first is measured, not timed
        speed = f"{ms:.1f} ms | {self.config.batch * self.config.context / ms:.1f} k tok/s"
        at = f"step {step:>{len(str(self.config.steps))}}/{self.config.steps}"
        self.say(f"{at} | loss {loss:.4f} | grad norm {grad_norm:.3f} | {speed}")

    def close(self, state_dict, held, sent):
        """Print the most that a rank held and sent, beside {name: (formula, bytes)}; write the files."""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.seen)
        seen = functools.reduce(operator.or_, everyone)  # the larger of each two counts
        gpu = self.result["device"] == "cuda"
        self.result["peak_bytes"] = torch.cuda.max_memory_allocated() if gpu else seen["peak_bytes"]
        heading = f"{self.held:<18}{'formula':<18}{'':>12}{'measured':>12}"
        for part, rows, title in ("held", held, heading), ("sent", sent, self.sent):
            self.result[part], keys = {}, ("measured",) if rows is held else ("calls", "payload", "wire")
            if rows:
                self.say(title)
            for name, (formula, size) in rows.items():
                row = {key: round(seen[name, key]) for key in keys}
                self.result[part][name] = row | {"formula": size}
                self.say(f"  {name:<16}{formula:<18}{size / 1e6:>9.2f} MB{row[keys[-1]] / 1e6:>9.2f} MB")
        if self.config.trace:
            self.profiler.stop()
        if self.config.json and dist.get_rank() == 0:
            Path(self.config.json).write_text(json.dumps(self.result))
        if self.config.save and dist.get_rank() == 0:
            state_dict = {name: tensor.cpu() for name, tensor in state_dict.items()}
            torch.save(state_dict, self.config.save + ".tmp")
            os.replace(self.config.save + ".tmp", self.config.save)  # whole or not at all
        return self.result


# ==== end of the ledger ====


class Embed(nn.Module):
    """The first layer: tokens (b, T) -> (b, T, D)."""

    def __init__(self, gpt):
        super().__init__()
        self.tokens, self.positions = gpt.tokens, gpt.positions

    def forward(self, inputs):
        return self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]


class Head(nn.Module):
    """The last layer: (b, T, D) -> logits (b, T, V). Its weight is the embedding's."""

    def __init__(self, gpt):
        super().__init__()
        self.norm, self.tokens = gpt.norm, gpt.tokens

    def forward(self, x):
        return F.linear(self.norm(x), self.tokens.weight)


def layer_costs(layers, inputs, by):
    """What split_layers() balances: parameters, or seconds of a forward as rank 0 measures it."""
    if by == "params":
        return [sum(p.numel() for p in layer.parameters()) for layer in layers]
    costs, x = [], inputs
    with torch.no_grad():
        for layer in layers:
            times = []
            for _ in range(4):
                finish = torch.cuda.current_stream().synchronize if x.is_cuda else lambda: None
                finish()
                start = time.perf_counter()
                y = layer(x)
                finish()
                times.append(time.perf_counter() - start)
            costs.append(min(times))
            x = y
    dist.broadcast_object_list(costs, group_src=0, device=inputs.device)
    return costs


def in_flight(actions, sizes=None):
    """The most microbatches between forward and the end of backward; with sizes, the sum of sizes[stage]."""
    end = "W" if any(action.op == "W" for action in actions) else "B"
    size = lambda action: sizes[action.stage] if sizes else 1  # noqa: E731
    return max(itertools.accumulate(size(a) * ((a.op == "F") - (a.op == end)) for a in actions))


def closed_form(name, p, m, v, t_f, t_b, t_w):
    """The literature's idle part of all time, for equal stages."""
    ideal = m * (t_f + t_b + t_w)
    idle = {
        "naive": (p - 1) * ideal,
        "interleaved": (p - 1) * (t_f + t_b + t_w) / v,
        "zb-h1": (p - 1) * (t_f + t_b - t_w),
        "zb-h2": (p - 1) * max(t_f + t_b - 2 * t_w, 0),
    }.get(name, (p - 1) * (t_f + t_b + t_w))
    return idle / (ideal + idle)


def draw(played, width):
    """Lines of text, one per rank: what it did when, in a row of so many letters. F3fff is forward 3."""
    begin = min(actions[0][1] for actions in played)
    scale = width / (max(actions[-1][2] for actions in played) - begin)
    for rank, actions in enumerate(played):
        row = ["."] * width
        for action, start, end in actions:
            a, b = (round((at - begin) * scale) for at in (start, end))
            op, _, microbatch = action
            text = f"{op}{microbatch}".ljust(b - a, op.lower())
            row[a:b] = text[: b - a]
        yield f"rank {rank:<3}{''.join(row[:width])}"


def latency(steps):
    """Median seconds from the end of an action to the start of one on another rank that waited for it.

    steps: of each, what play() returns, measured.
    """
    waits = [0.0]
    for played in steps:
        ended = {Action(*action): end for actions in played for action, _, end in actions}
        last = max(action.stage for action in ended)
        for actions in played:
            for (_, _, free), (action, start, _) in itertools.pairwise(actions):
                action = Action(*action)
                others = [ended[n] for n in needs(action, last) if n.stage != action.stage]
                waits += [start - end for end in others if end > free]
    return max(statistics.median(waits), 0.0)


def replay(schedule, played, delay):
    """The idle rate that play() finds with the durations of a measured step."""
    times = {Action(*action): end - start for actions in played for action, start, end in actions}
    return idle_rate(play(schedule, times.get, delay))


class PipelineLedger(Ledger):
    """Also counts what forward saves for backward, as it sees a Pipeline at work, and draws what all did."""

    data_parallel, kept = False, 0

    def save(self, tensor):
        """Called with what a forward saves for its backward."""
        if tensor.is_floating_point():
            self.watch("activations", [tensor])
        return tensor

    def done(self, action):
        """Called after each action."""
        before, self.kept = self.kept, self.alive["activations", "measured"]
        if action.op == "F":
            self.of_stage.setdefault(action.stage, self.kept - before)

    def add_outcome(self, pipe, config, history):
        """To the result: what every rank held, how long each action took, and when in the last step."""
        bound = in_flight(pipe.actions, self.of_stage)
        mine = {"stages": [int(s) for s in pipe.stages], "parameters": pipe.sizes[pipe.rank]}
        mine |= {"in_flight": in_flight(pipe.actions), "activations": self.seen["activations", "measured"]}
        everyone = [None] * pipe.ranks
        history = [[(tuple(action), *times) for action, *times in step] for step in history]
        dist.all_gather_object(everyone, (mine | {"bound": bound}, history))
        ranks, histories = zip(*everyone)
        times = defaultdict(list)  # of each stage's op in all steps
        for action, start, end in itertools.chain(*itertools.chain(*histories)):
            times[action[:2]].append(end - start)
        median = {key: statistics.median(values) for key, values in times.items()}
        t_f, t_b, t_w = (sum(t for (op, _), t in median.items() if op == name) / pipe.ranks for name in "FBW")
        m, v = pipe.microbatches, (pipe.last + 1) // pipe.ranks
        steps = list(zip(*histories))
        # Ranks of GPUs have no common clock.
        delay = latency(steps) if self.result["device"] == "cpu" else 0.0
        self.result |= {
            "schedule": config.schedule,
            "ranks": ranks,
            "latency_ms": 1e3 * delay,
            "idle": {
                "measured": statistics.median(map(idle_rate, steps)),
                "played": statistics.median(replay(pipe.schedule, played, delay) for played in steps),
                "formula": closed_form(config.schedule, pipe.ranks, m, v, t_f, t_b, t_w),
            },
            "op_ms": {f"{op}{stage}": 1e3 * t for (op, stage), t in sorted(median.items())},
            "timeline": [steps[-1] for steps in histories],
        }

    def close(self, state_dict, held, sent):
        result, width = super().close(state_dict, held, sent), shutil.get_terminal_size((100, 24)).columns - 9
        self.say(
            f"{'rank':<6}{'stages':<14}{'parameters':>12}{'in flight':>11}{'activations':>14}{'bound':>12}"
        )
        for rank, row in enumerate(result["ranks"]):
            stages = ", ".join(map(str, row["stages"]))
            sizes = f"{row['activations'] / 1e6:>11.2f} MB{row['bound'] / 1e6:>9.2f} MB"
            self.say(f"{rank:<6}{stages:<14}{row['parameters'] / 1e6:>10.2f} M{row['in_flight']:>11}{sizes}")
        idle = result["idle"]
        played = f"played with the measured times {idle['played']:.1%}, closed form {idle['formula']:.1%}"
        clock = "" if result["device"] == "cpu" else ", each rank from its own start"
        self.say(f"idle: measured {idle['measured']:.1%}, {played}; the last step{clock}:")
        for line in draw(result["timeline"], width):
            self.say(line)
        return result


def parse(arguments=None):
    """The flags, from the command line if no arguments are given."""
    parser = flags()
    parser.add_argument("--schedule", default="1f1b", choices=SCHEDULES, help="who does what when")
    parser.add_argument("--chunks", type=int, default=1, help="stages per rank (interleaved: 2 or more)")
    parser.add_argument("--balance", default="params", choices=("params", "time"), help="of the stages")
    parser.set_defaults(accum=4)  # here it is the number of microbatches
    return parser.parse_args(arguments)


def formulas(config, pipe):
    """What a rank holds and sends in a step at the most: {name: (formula, bytes)}, twice."""
    w, N, P = DTYPES[config.dtype].itemsize, pipe.ranks, max(pipe.sizes)
    s = 2 * max(w, 4) * (config.optim == "adamw") + 4 * (w == 2)  # two moments, a master
    held = {
        "parameters": (f"{w}P_i", w * P),
        "gradients": (f"{w}P_i", w * P),
        "optimizer": (f"{s}P_i", s * P),
    }
    messages = [
        sum(pipe.receiver(action) not in (None, rank) for action in actions)
        for rank, actions in enumerate(pipe.schedule)
    ]
    size = w * max(messages) * config.batch // config.accum * config.context * config.width
    tied = w * config.vocab * config.width * (N > 1)
    sums = (f"{w}VD+32(N-1)/N", round(tied + 32 * (N - 1) / N))
    return held, {"send": (f"{w * max(messages)}bTD", size), "all-reduce": sums}


def train(config):
    """Train as the flags say. Returns what --json writes."""
    device, text = set_up(config)
    ranks, n_stages = dist.get_world_size(), dist.get_world_size() * config.chunks
    if config.batch % config.accum:
        refuse(f"--batch {config.batch}: must be a multiple of --accum {config.accum}, the microbatches")
    if n_stages > config.layers + 2:
        refuse(f"--layers {config.layers}: too few, with embedding and head, for {n_stages} stages")
    try:
        schedule = build_schedule(config.schedule, ranks, config.accum, config.chunks)
    except ValueError as error:
        refuse(f"--schedule {config.schedule} --chunks {config.chunks} --accum {config.accum}: {error}")
    model = GPT(config).to(device, DTYPES[config.dtype])
    layers = [Embed(model), *model.blocks, Head(model)]
    inputs, _ = next(microbatches(config, text, 1, device))
    ends = split_layers(layer_costs(layers, inputs, config.balance), n_stages)
    pipe = Pipeline(layers, ends, mean_loss, schedule)
    optimizer = Optimizer(pipe.parameters(), OPTIMIZERS[config.optim], lr=config.lr, fused=True)
    own = list(pipe.parameters())
    ledger = PipelineLedger("pipeline", config, device, model, lambda: [p.grad for p in own])
    history = deque(maxlen=20)
    ledger.of_stage = {}  # bytes that a microbatch's forward keeps for its backward
    for step in range(1, config.steps + 1):
        with ledger if step == 1 else nullcontext():
            pipe.observer = ledger if step == 1 else None
            loss = pipe.step(*zip(*microbatches(config, text, step, device)))
            grad_norm = pipe.clip_grad_norm_(config.clip)
            optimizer.step()
            model.zero_grad()
        if step > 1 or config.steps == 1:  # the first is measured, not timed
            history.append(pipe.times)
        ledger.log(step, loss, grad_norm)
    ledger.watch("optimizer", optimizer.tensors())
    ledger.add_outcome(pipe, config, [pipe.seconds(times) for times in history])
    whole = pipe.gather(optimizer.state_dict_of(model)) if config.save else None
    return ledger.close(whole, *formulas(config, pipe))


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
