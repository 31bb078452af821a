"""Zero bubble: as pipeline.py, with backward in two halves, one of which fills the idle time.

Idea
    Backward computes two things: B, the gradient of a stage's input, which the stage before waits for, and
    W, the gradients of its weights, which nobody waits for. 1F1B does both at once. Here W comes later, when
    a rank would be idle (Zero Bubble, arXiv 2401.10241, section 2). In ZB-H1 each rank holds N microbatches,
    from F to W. In ZB-H2 rank i runs 2(N-i)-1 forwards, F, before its first B, then never idles.

Timeline (zb-h1, 4 ranks; F sends its output a row down, B a gradient up; a column is a turn; . is idle)
    rank 0 | F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5
    rank 1 | .  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5
    rank 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5
    rank 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5

Memory (bytes; R the largest rank's parameters, at least (P+vh)/N if N > 1; other letters: docs/formulas.md)
    parameters    (w+c)R      w a weight: fp32 4, bf16 2, fp64 8; c its fp32 master: bf16 4, else 0
    gradients     wR+3cG/2    copies of G at a time, in bf16 and fp32: see MasterWeights
    optimizer     KR          K the moments: AdamW 8, in fp64 16; SGD 0
    In flight: 1f1b min(k,N-i), zb-h1 min(k,N), zb-h2 min(k,2N-1); from B to W two factors a linear layer.

Sent (bytes that the busiest rank sends in a step of k microbatches)
    send          min(2,N-1)kwbsh              F: its output, to the next stage; B: its input's gradient, back
    all-reduce    min(1,N-1)wvh                the gradients of the embedding, which is the head's weight too

Run
    torchrun --nproc_per_node=2 zero_bubble.py --accum 8
    torchrun --nproc_per_node=8 zero_bubble.py --size gpt2-xl --dtype bf16 --batch 64 --accum 32

Left out
    Schedules found by search, pipeline_v.py's, steps that do not wait for the norm, W of all but nn.Linear.
"""

import argparse
import os
import sys
import time
from collections import defaultdict, deque, namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # first: if torch.optim imports it later, the process group is never freed
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge

Action = namedtuple("Action", "op stage microbatch")
MAX_SENT = 4  # sends that have not been waited for
NEXT = {"F": 1, "B": -1}  # forward's output goes to the next stage, backward's gradient to the one before


def build_schedule(name, n_ranks, n_microbatches, n_chunks=1):
    """Each rank's Actions, in order. name: 1f1b, zb-h1, zb-h2 (n_chunks: as in pipeline.py, unused)."""
    depth = 2 if name == "zb-h2" else 1
    first_w = depth * (n_ranks - 1)  # W begins in the same round on all ranks
    schedule = []
    for rank in range(n_ranks):
        begins = {"F": 0, "B": first_w - depth * rank}
        if name != "1f1b":
            begins["W"] = first_w
        actions = []
        for turn in range(n_microbatches + first_w):
            for op, begin in begins.items():
                if 0 <= turn - begin < n_microbatches:
                    actions.append(Action(op, rank, turn - begin))
        schedule.append(actions)
    return schedule


def bubble_rate(schedule, t_f, t_b, t_w, t_comm=0.0):
    """Idle part of the time of the rank that takes longest, first action to last. For site/book.py, tests."""
    duration = {"F": t_f, "B": t_b, "W": t_w}
    if schedule[0][-1].op == "B":  # 1f1b, where B does W, too
        duration["B"] += t_w
    arrival = defaultdict(float)  # {action: when what it needs is there}
    before = None
    while arrival != before:  # until nothing changes any more
        before = arrival.copy()
        longest = 0
        for actions in schedule:
            began = now = arrival[actions[0]]
            for op, stage, j in actions:
                now = max(now, arrival[op, stage, j]) + duration[op]
                if op in NEXT:
                    arrival[op, stage + NEXT[op], j] = now + t_comm
            longest = max(longest, now - began)
    return 1 - sum(duration[action.op] for action in schedule[0]) / longest


def split_layers(layers, n_stages):
    """Where each stage ends: near its equal share of the parameters (of memory, not time); none is empty."""
    sizes = [sum(param.numel() for param in layer.parameters()) for layer in layers]
    ends = []
    for end in range(1, len(layers)):
        middle = sum(sizes[:end]) + sizes[end] / 2  # the middle of the next layer
        share = sum(sizes) * (len(ends) + 1) / n_stages
        if middle > share or len(layers) - end < n_stages - len(ends):
            ends.append(end)
    return [*ends, len(layers)]


def deferred_linear(later, layer, x):
    """A linear layer whose backward leaves out W, and appends its two factors to later[-1]."""
    output = F.linear(x, layer.weight.detach(), layer.bias).requires_grad_()  # if all is frozen
    output.register_hook(lambda grad: later[-1].append((layer.weight, grad, x.detach())))
    return output


class Pipeline(nn.Module):
    """Runs a schedule over layers that are split over all ranks, which all start with rank 0's weights.
    layers: modules, each called with the output of the one before: between stages one tensor, of one shape.
    ends: where stages end. loss_function(output, target): a mean. parameters() are this rank's."""

    def __init__(self, layers, ends, loss_function, schedule):
        super().__init__()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.loss_function = loss_function
        self.actions = schedule[self.rank]
        self.last_stage = len(ends) - 1
        self.stages = nn.ModuleList()
        self.ranks_of = defaultdict(set)  # {parameter: the ranks that need it}
        for stage, (start, end) in enumerate(zip([0, *ends], ends)):
            rank = stage % self.world_size
            module = nn.Sequential(*layers[start:end])
            if rank == self.rank:
                self.stages.append(module)
            for param in module.parameters():
                self.ranks_of[param].add(rank)
        self.later = deque()  # what microbatches keep from B to W: [(weight, output's gradient, input)]
        for layer in self.modules():
            if type(layer) is nn.Linear and layer.weight.requires_grad:
                layer.forward = partial(deferred_linear, self.later, layer)
        self.ties = {}  # {parameter: the group that adds up its gradients}
        for param, ranks in self.ranks_of.items():
            dist.broadcast(param.data, 0)
            if len(ranks) > 1:
                self.ties[param] = dist.new_group(ranks)  # all ranks must call it
            if self.rank not in ranks:
                param.untyped_storage().resize_(0)
        self.groups = {op: dist.new_group() for op in "FB"}  # on NCCL an F never queues behind a B
        self.like = [None]  # a meta tensor, of the shape of all messages
        self.posted = deque()  # (work, buffer)
        self.sent = deque()
        self.ahead = 0  # receives posted early; none in step 1: at a pair's first, on NCCL, both ranks wait

    def step(self, inputs, targets):
        """Forward and backward of a batch, lists of microbatches. Returns its mean loss, on every rank."""
        self.loss = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
        origin = {"F": 0, "B": self.last_stage, "W": self.rank}  # where nothing is received
        self.to_post = deque(action for action in self.actions if action.stage != origin[action.op])
        in_flight = {}  # {(stage, microbatch): (input, loss or edge)}; an edge keeps no output
        for op, stage, j in self.actions:
            if op == "F":
                x = inputs[j] if stage == 0 else self._receive().requires_grad_()
                output = self.stages[stage // self.world_size](x)
                if stage == self.last_stage:
                    output = self.loss_function(output, targets[j]) / len(targets)  # as gradients add up
                    self.loss += output.detach()
                else:
                    self._send("F", stage + 1, output.detach())
                    output = get_gradient_edge(output.requires_grad_())  # requires_grad_(): for frozen layers
                in_flight[stage, j] = x, output
            elif op == "B":
                self.later.append([])  # which backward fills
                x, output = in_flight.pop((stage, j))
                gradient = None if stage == self.last_stage else self._receive()
                torch.autograd.backward(output, gradient)
                del output, gradient  # else the graph's hooks hold x during the next forward
                if self.actions[-1].op == "B":  # 1f1b: the stage before waits for W, too
                    self._weight_gradients()
                if stage > 0:
                    self._send("B", stage - 1, x.grad)
            else:
                self._weight_gradients()
        self._finish()
        self.ahead = 1  # a receive on NCCL is a kernel that spins: more could keep compute from the GPU
        return self.loss

    def _weight_gradients(self):  # W of the oldest microbatch
        for weight, grad, x in self.later.popleft():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.addmm_(grad.flatten(0, -2).t(), x.flatten(0, -2))

    def _finish(self):
        while self.sent:
            self.sent.popleft().wait()
        for param, ranks in self.ranks_of.items():
            if self.rank in ranks and param.requires_grad:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                if param in self.ties:
                    dist.all_reduce(param.grad, group=self.ties[param])
        dist.all_reduce(self.loss)

    def _receive(self):  # no tags: both ends walk the same order, so the n-th send meets the n-th receive
        if self.like[0] is None:
            dist.broadcast_object_list(self.like, 0, device=self.loss.device)
        while self.to_post and len(self.posted) <= self.ahead:
            op, stage, _ = self.to_post.popleft()
            buffer = torch.empty_like(self.like[0], device=self.loss.device)
            sender = (stage - NEXT[op]) % self.world_size
            self.posted.append((dist.irecv(buffer, sender, self.groups[op]), buffer))
        work, buffer = self.posted.popleft()
        work.wait()
        return buffer

    def _send(self, op, stage, tensor):
        if self.like[0] is None:  # rank 0's first output, for which the others wait above
            self.like[0] = tensor.contiguous().to("meta")
            dist.broadcast_object_list(self.like, 0, device=self.loss.device)
        if tensor.shape != self.like[0].shape:
            raise ValueError(f"a message of {tensor.shape}: must be {self.like[0].shape}, as before")
        self.sent.append(dist.isend(tensor.contiguous(), stage % self.world_size, self.groups[op]))
        if len(self.sent) > MAX_SENT:
            self.sent.popleft().wait()  # frees the tensor; a rank too far ahead waits here

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Scale the gradients to a global norm of at most max_norm. Returns the norm before."""
        squares = torch.zeros_like(self.loss)
        for param, ranks in self.ranks_of.items():
            if param.grad is not None and self.rank == min(ranks):  # a tied one counts once
                squares += param.grad.square().sum(dtype=torch.float64)
        dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def unsplit(self):
        """Give all ranks all layers."""
        for param, ranks in self.ranks_of.items():
            param.untyped_storage().resize_(param.nbytes)
            dist.broadcast(param.data, min(ranks))


class AddPositions(nn.Sequential):  # holds the embedding of positions: (b, s, h) -> (b, s, h)
    def forward(self, x):
        return x + self[0].weight[: x.shape[1]]


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
    n_stages = int(os.environ.get("WORLD_SIZE", 1))
    if n_stages > config.layers + 4:
        refuse(f"--layers {config.layers}: too few for {n_stages} ranks")
    schedule = build_schedule(config.schedule, n_stages, config.accum)
    device, text = set_up(config, f" | schedule {config.schedule}", replicas=1)
    model = GPT(config).to(device, DTYPES[config.dtype])
    head = nn.Linear(config.width, config.vocab, bias=False, device="meta")
    head.weight = model.tokens.weight
    layers = [model.tokens, AddPositions(model.positions), *model.blocks, model.norm, head]
    pipe = Pipeline(layers, split_layers(layers, n_stages), mean_loss, schedule)
    optimizer_class = OPTIMIZERS[config.optim]
    if config.dtype == "bf16":
        optimizer_class = partial(MasterWeights, optimizer_class)
    optimizer = optimizer_class(pipe.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        inputs, targets = zip(*microbatches(config, text, step, device))
        loss = pipe.step(inputs, targets)
        grad_norm = pipe.clip_grad_norm_(config.clip)
        optimizer.step()
        pipe.zero_grad()
        print_step(config, step, loss, grad_norm, started)
    if config.save:
        pipe.unsplit()
        if pipe.rank == 0:
            save_weights(model.state_dict(), config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--schedule", default="zb-h1", choices=("1f1b", "zb-h1", "zb-h2"))
    DEFAULTS["accum"] = 4  # by default
    return read_flags(arguments, own)


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


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
