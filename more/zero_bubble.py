"""Zero bubble: as pipeline.py, but backward has two halves, one of which fills the idle time.

Idea
    Backward computes two things: B, the gradient of a stage's input, for which the stage before waits, and W,
    the gradients of its weights, for which nobody waits. 1F1B does both at once. Here W comes some rounds
    after B, so that it is left for the end of a step, when a rank would wait for Bs (Zero Bubble, arXiv
    2401.10241, section 2). New beside pipeline.py: zero_bubble, deferred_linear, _weight_gradients. The rest
    is that lesson's. On N ranks, if F (a forward), B and W take a turn each, and k >= 2N-1 microbatches:

                   in flight            idle
      zb-h1        N, from F to W       N-1 turns in a step (1F1B: 3(N-1)): to begin, and to wait for Bs
      zb-h2        2N-1                 N-1 turns, too: to begin, and at the end, to wait for other ranks
                                        before the update, which section 4 avoids

Timeline (zb-h1 on 4 ranks; F3 is the forward of microbatch 3, B3 and W3 its backward; . is idle)
    rank 0 | F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5
    rank 1 | .  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5
    rank 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5
    rank 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5

Memory (bytes; R parameters on the rank that has most; activations: "in flight" above)
    parameters    (w+c)R        w = 4 in fp32, 2 in bf16, 8 in fp64; c = 4 in bf16, for master weights, else 0
    gradients     wR+3cG/2      in bf16, MasterWeights copies G gradients at a time, in 2 + 4 bytes
    optimizer     KR            K = 8 for Adam's two moments (in fp64 16), 0 for SGD
    From B to W a microbatch keeps two tensors for each linear layer: its input, and its output's gradient.

Sent (bytes, by the busiest rank in each step; microbatches of b sequences of s tokens, width h, vocabulary v)
    send          min(2,N-1)kwbsh             to the next rank outputs, to the one before gradients
    all-reduce    min(1,N-1)wvh               gradients of the embedding, which the head uses as its weight

Run
    torchrun --nproc_per_node=2 more/zero_bubble.py --accum 8
    torchrun --nproc_per_node=8 more/zero_bubble.py --size gpt2-xl --dtype bf16 --batch 64 --accum 32

Left out
    Refused: messages of several tensors or shapes; gradients that add up over several step(); other
    numbers of microbatches than the schedule has; a step() after one that failed.
    Not noticed: a linear layer's input that is changed in place; hooks on its weight, which never run, such
    as ddp.py's; a weight that is computed (old weight_norm); targets to ignore; torch's clip_grad_norm_.
    Not handled: what pipeline.py does not; W of layers other than nn.Linear, for which B computes all.
"""

import argparse
import os
import sys
import time
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge

Action = namedtuple("Action", "op stage microbatch")  # op: F, B or W
NEXT = {"F": 1, "B": -1}  # forward sends to the next stage, backward to the one before
MAX_SENT = 4  # messages that a rank may keep until they arrive; any small number


def zero_bubble(rank, n_ranks, n_microbatches, depth):
    """ZB-H1 if depth is 1; ZB-H2 if it is 2, with twice as many forwards before the first backward."""
    first_b = depth * (n_ranks - 1 - rank)
    # On all ranks the round of rank 0's first B. Any later, and more microbatches would be in flight; any
    # earlier, and no W would be left to fill a rank's end.
    first_w = depth * (n_ranks - 1)
    ops = ""
    for i in range(first_w + n_microbatches):  # rounds: F alone, F B, F B W, B W, W alone
        if i < n_microbatches:
            ops += "F"
        if first_b <= i < first_b + n_microbatches:
            ops += "B"
        if first_w <= i:
            ops += "W"
    return ops


def build_schedule(name, n_ranks, n_microbatches):
    """Each rank's Actions, in order. Here a stage is a rank. name: zb-h1, zb-h2."""
    depth = {"zb-h1": 1, "zb-h2": 2}[name]
    schedule = []
    for rank in range(n_ranks):
        ops = zero_bubble(rank, n_ranks, n_microbatches, depth)
        schedule.append([Action(op, rank, ops[:i].count(op)) for i, op in enumerate(ops)])
    return schedule


def split_layers(layers, n_stages):
    """Where each stage ends, so that all have a layer or more and about the same number of parameters."""
    sizes = [sum(param.numel() for param in layer.parameters()) for layer in layers]
    ends = []
    for end in range(1, len(layers)):
        middle = sum(sizes[:end]) + sizes[end] / 2  # of the next layer
        share = sum(sizes) * (len(ends) + 1) / n_stages
        if middle > share or len(layers) - end < n_stages - len(ends):
            ends.append(end)
    return [*ends, len(layers)]


def deferred_linear(later, layer, x):
    """A linear layer without W in its backward: autograd is not told of the weight. A hook gets the output's
    gradient and adds what W needs to later[-1], the list of the B that runs. (The bias is left to B.)"""
    output = F.linear(x, layer.weight.detach(), layer.bias)
    if layer.weight.requires_grad:
        output.requires_grad_()  # even if neither x nor the bias needs a gradient
        output.register_hook(lambda grad: later[-1].append((layer.weight, grad, x.detach())))
    return output


class Pipeline(nn.Module):
    """Runs a schedule on layers split over all ranks. One microbatch after the other, a rank would do this:

        x = microbatch if is_first else receive(rank - 1).requires_grad_()
        output = layers(x)
        if is_last:
            loss_function(output, target).backward()
        else:
            send(output, rank + 1)
            output.backward(receive(rank + 1))
        if not is_first:
            send(x.grad, rank - 1)

    The problem is that all other ranks wait meanwhile. So here forward and backward are two methods, which a
    rank calls in the order of its schedule, and it starts to receive a message before it needs it.

    layers: modules, each called with the output of the one before. ends: where each stage ends.
    loss_function(output, target): a mean. message: a tensor like those that stages send; it may be on the
    device meta. parameters() are those of this rank, for its optimizer."""

    def __init__(
        self,
        layers: list[nn.Module],
        ends: list[int],
        loss_function: Callable,
        schedule: list,
        message: torch.Tensor,
    ):
        super().__init__()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.loss_function = loss_function
        self.actions = schedule[self.rank]
        self.message = message
        self.last_stage = len(ends) - 1
        stages = [nn.Sequential(*layers[start:end]) for start, end in zip([0, *ends], ends)]
        self.stages = nn.ModuleList(stages[self.rank :: self.world_size])
        self._share_parameters(stages)
        self.later = deque()  # for each microbatch between B and W [(weight, output's gradient, input)]
        for layer in self.modules():
            if type(layer) is nn.Linear:
                layer.forward = partial(deferred_linear, self.later, layer)
        # For NCCL, as pipeline.py explains: a group for each direction, and no early receives in step 1.
        self.groups = {op: dist.new_group() for op in "FB"}
        self.ahead = 0  # receives posted early
        self.posted = deque()  # (work, buffer) of each receive
        self.sent = deque()  # the work of each send
        self.in_flight = None  # during a step {(stage, microbatch): what its backward needs}

    def _share_parameters(self, stages):
        """Start from rank 0's parameters, and keep those of this rank's stages."""
        self.ranks_of = defaultdict(set)  # {parameter: the ranks whose stages have it}
        for stage, module in enumerate(stages):
            for param in module.parameters():
                self.ranks_of[param].add(stage % self.world_size)
        # A parameter of several ranks is a tie, such as an embedding that is also the head. Each of its ranks
        # computes a part of its gradient, and an all-reduce among them adds up the parts.
        self.ties = {}
        self.shapes = {}  # of the parameters that are not here
        for param, ranks in self.ranks_of.items():
            dist.broadcast(param.data, 0)
            if len(ranks) > 1:
                self.ties[param] = dist.new_group(ranks)  # all ranks must call it
            if self.rank not in ranks:
                self.ties.pop(param, None)
                self.shapes[param] = param.shape
                param.data = param.new_empty(0)  # frees it

    def step(self, inputs, targets):
        """Forward and backward of a batch, as lists of microbatches, the same on all ranks. (The first
        uses the inputs, the last the targets.) Returns the batch's mean loss, on every rank."""
        self._check_step(inputs, targets)
        self.inputs, self.targets = inputs, targets
        self.loss = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
        self.in_flight = {}
        self.to_post = deque(filter(self._needs_message, self.actions))
        for op, stage, j in self.actions:
            run = {"F": self._forward, "B": self._backward, "W": self._weight_gradients}[op]
            run(stage, j)
        while self.sent:
            self.sent.popleft().wait()
        for param in self.parameters():
            if param.requires_grad and param.grad is None:  # no microbatch has used it here
                param.grad = torch.zeros_like(param)
        for param, group in self.ties.items():
            if param.requires_grad:
                dist.all_reduce(param.grad, group=group)
        dist.all_reduce(self.loss)
        self.ahead = 1
        self.in_flight = None
        return self.loss

    def _forward(self, stage, j):
        x = self.inputs[j] if stage == 0 else self._receive().requires_grad_()
        output = self.stages[stage // self.world_size](x)
        if stage == self.last_stage:
            output = self.loss_function(output, self.targets[j]) / len(self.targets)  # as gradients add up
            self.loss += output.detach()
        else:
            self._send("F", stage + 1, output.detach())
            # Backward needs the place of the output in the graph, not its numbers: do not keep them.
            output = get_gradient_edge(output.requires_grad_())  # requires_grad_(): for frozen layers
        self.in_flight[stage, j] = x, output

    def _backward(self, stage, j):
        self.later.append([])  # for the hooks of deferred_linear
        x, output = self.in_flight.pop((stage, j))
        gradient = None if stage == self.last_stage else self._receive()
        torch.autograd.backward(output, gradient)
        if stage > 0:
            self._send("B", stage - 1, x.grad)

    def _weight_gradients(self, stage, j):
        for weight, grad, x in self.later.popleft():  # of the oldest microbatch, which is j
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.addmm_(grad.flatten(0, -2).t(), x.flatten(0, -2))

    def _needs_message(self, action):
        return action.op in NEXT and 0 <= action.stage - NEXT[action.op] <= self.last_stage

    def _receive(self):
        """Wait for the message that this action needs. Start to receive the next one, too."""
        while self.to_post and len(self.posted) <= self.ahead:
            op, stage, _ = self.to_post.popleft()
            sender = (stage - NEXT[op]) % self.world_size
            buffer = torch.empty_like(self.message, device=self.loss.device)
            # No tags: both ends follow the same order.
            work = dist.irecv(buffer, sender, self.groups[op])
            self.posted.append((work, buffer))
        work, buffer = self.posted.popleft()
        work.wait()
        return buffer

    def _send(self, op, stage, tensor):
        self._check_message(tensor)
        self.sent.append(dist.isend(tensor.contiguous(), stage % self.world_size, self.groups[op]))
        if len(self.sent) > MAX_SENT:
            self.sent.popleft().wait()  # frees the tensor; a rank too far ahead waits here

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Scale the gradients to a global norm of at most max_norm. Returns the norm before."""
        grads = [self.loss.new_zeros((), dtype=self.message.dtype)]  # in case a rank has no gradient to count
        for param in self.parameters():
            if param.grad is not None and self.rank == min(self.ranks_of[param]):  # a tie counts once
                grads.append(param.grad)
        norms = torch._foreach_norm(grads, dtype=torch.float64)
        squares = torch.stack(norms).square().sum()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm.to(grads[0]))
        return norm

    def unsplit(self):
        """Give all ranks all layers, to save or to evaluate them. All ranks must call it."""
        for param, ranks in self.ranks_of.items():
            if param in self.shapes:
                param.data = param.new_empty(self.shapes[param])
            dist.broadcast(param.data, min(ranks))

    # A reader may skip to train(): the rest of the class refuses what would hang, or go wrong silently.

    def _check_step(self, inputs, targets):
        own = {action.stage for action in self.actions}
        k = 1 + self.actions[-1].microbatch
        assert own == set(range(self.rank, self.last_stage + 1, self.world_size)), (
            "the schedule is for other ranks, or other stages than ends"
        )
        assert len(inputs) == len(targets) == k, f"{len(inputs)} microbatches, but the schedule has {k}"
        assert self.in_flight is None, "a step() failed, and its messages may still come: restart all ranks"
        assert all(param.grad is None for param in self.parameters()), "call zero_grad() before step()"

    def _check_message(self, tensor):
        expected = self.message
        assert tensor.shape == expected.shape, f"a message of {tensor.shape}, not {expected.shape}"
        assert tensor.dtype == expected.dtype, f"a message in {tensor.dtype}, not {expected.dtype}"


class AddPositions(nn.Sequential):  # holds the embedding of positions: (b, s, h) -> (b, s, h)
    def forward(self, x):
        return x + self[0].weight[: x.shape[1]]


def train(config):
    world_size = int(os.getenv("WORLD_SIZE") or 1)
    schedule = build_schedule(config.schedule, world_size, config.accum)
    n_stages = len(schedule)
    if n_stages > config.layers + 4:  # tokens, positions, norm, head
        refuse(f"--layers {config.layers}: too few for {n_stages} stages of --schedule {config.schedule}")
    device, text = set_up(config, f" | schedule {config.schedule}", replicas=1)
    model = GPT(config).to(device, DTYPES[config.dtype])
    head = nn.Linear(config.width, config.vocab, bias=False, device="meta")  # its weight is replaced at once
    head.weight = model.tokens.weight
    layers = [model.tokens, AddPositions(model.positions), *model.blocks, model.norm, head]
    shape = config.batch // config.accum, config.context, config.width
    message = torch.empty(shape, dtype=DTYPES[config.dtype], device="meta")
    pipe = Pipeline(layers, split_layers(layers, n_stages), mean_loss, schedule, message)
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
    own.add_argument("--schedule", default="zb-h1", choices=("zb-h1", "zb-h2"))
    DEFAULTS["accum"] = 4  # the default of --accum
    return read_flags(arguments, own)


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
