"""ZeRO-R: activation checkpointing, with each block's input split across the ranks, on the GPU or the host.

Idea
    Backward needs the activations that forward computed, and these often take more memory than the weights. A
    checkpoint keeps the input of a block and drops what the block computes. Just before backward needs these
    values, the block's forward runs again. Backward takes about twice as long as forward, so this costs about
    a third more time (arXiv 1604.06174).

    Tensor-parallel ranks, which share the work of each layer, have the same inputs. So each keeps 1/N of an
    input, on the GPU or the host, and backward all-gathers it (ZeRO's P_a and P_a+cpu, 1910.02054, 6.1).

Timeline (of the last two blocks)
    compute | forward 3 | forward 4 | loss |          | recompute 4 | backward 4 | recompute 3 | ...
    network |           |           |      | gather 4 | gather 3    |            | gather 2    | ...

Memory (bytes on each rank; w of a weight: 4 in fp32, 2 in bf16; m = 4; in fp64 both are 8)
    activations    bs((L/N+2)wh+(2+v)m)    on N ranks; of each token 1/N of L blocks' inputs, h each
    There are L layers, h width, s context, v vocabulary, and b sequences in a microbatch.
    Of each token, backward needs 16h numbers of a block: inputs and outputs of norms 4, q, k, v 3, attention
    1, up 4, GELU 4; also 4 statistics of norms, and a log-sum-exp of each head. The last norm has 2h and 2
    statistics, the loss v numbers.
    So in backward 17wbsh come on top, and a block's statistics: the 16h, and the next block's input.
    parameters     (w+c)P      P parameters; c = 4 in bf16, for fp32 copies (see MasterWeights), else 0
    gradients      wP+3cG/2    in bf16 G gradients at a time are copied, in 2 + 4 bytes: 2^24, or one tensor's
    optimizer      KP          K = 8 for AdamW's two moments (fp64: 16), 0 for SGD

Sent (bytes, by each rank in each step)
    all-gather     kwbshL(N-1)/N    in a ring; k microbatches; offload: also kwbshL/N to the host, and back

Run
    torchrun --nproc_per_node=2 more/zero_r.py
    torchrun --nproc_per_node=8 more/zero_r.py --size gpt2 --dtype bf16 --policy offload

Left out
    ZeRO-R's buffers of constant size, and its defragmentation (6.2, 6.3).
    All ranks must run the same forwards and backwards, or they hang, or mix up inputs.
    Refused: changing in place an argument but the first, or a tensor that backward needs; fewer tensors
    the second time, or other shapes or dtypes, as when autocast ends before backward.
    Wrong, and not noticed: other values the second time, because of other random generators (numpy's, your
    own), or because tensors that are no arguments (parameters, those in a partial) change before backward;
    side effects, which happen twice (BatchNorm's statistics), or once, if they come after the last result
    that backward needs. Not handled: keyword arguments (use a partial).
    In nested checkpoints the inner input is not dropped.
"""

import argparse
import os
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


class NaiveCheckpoint(torch.autograd.Function):
    """Full recomputation in its simplest form: y = NaiveCheckpoint.apply(x, block)."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)  # autograd does not look into the forward of a Function: it saves nothing more

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        y.backward(grad)  # this also adds up the gradients of the function's parameters
        return x.grad, None


# This has six problems:
# - A backward runs inside another one: torch.autograd.grad() does not find the function's parameters, and
#   hooks that wait for the end of backward, as DDP's do, run once in each block.
# - If x needs no gradient, the parameters get none.
# - The function must take and return a single tensor.
# - Dropout draws other random numbers the second time.
# - Everything is computed again, even what is slow and small.
# - So is the end of the function, though backward needs none of its results.
#
# So below, autograd builds the function's graph as usual. Hooks replace only the tensors that it saves there.
# (The fifth problem stays.) The ranks all have the same x, so each keeps 1/N of it. So that backward need not
# wait, the all-gather of a block's x starts when the recomputation of the block after it does.


def checkpoint(function: Callable, *args, store: "Partitioned"):
    """function(*args). What it computes for backward is dropped, and computed again there.

    Random numbers are the same both times, if they are drawn from torch's default generators.
    store keeps the first argument, which is the same on all ranks; the others are kept whole.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    call = Checkpoint(function, args, store)
    return call.run(call.pack, args)


class Checkpoint:
    """A call of checkpoint(): what forward keeps, and how backward gets the rest.

    Autograd gives pack() each tensor that it would save for backward, and saves a number in its place. When
    backward asks unpack() for one, the function runs again and saves the same tensors in the same order.
    """

    def __init__(self, function, args, store):
        self.function = function
        x, *self.args = args
        self.versions = versions_of(self.args)
        kept = store.partition(x)
        self.start_all_gather = partial(store.start_all_gather, *kept)
        self.gathering = None  # or (x, work), when its all-gather is under way
        self.previous = store.last()  # the checkpoint that backward needs next
        store.last = weakref.ref(self)  # weak: it must end with its graph
        self.random_states = get_random_states()
        self.dropped = []  # (shape, dtype) by number
        self.recomputed = {}  # (tensor, its version) by number, until backward has asked for it

    def run(self, pack, args):
        """Call the function with args. pack() is given what autograd would save for backward."""
        with saved_tensors_hooks(pack, self.unpack):
            return self.function(*args)

    def pack(self, tensor):
        self.dropped.append((tensor.shape, tensor.dtype))
        return len(self.dropped) - 1

    def unpack(self, number):
        # The first tensor that backward asks for brings all of them; each is free once it has been used.
        # None: from pack_again(), so this backward runs inside of the function.
        assert number is not None, "torch.autograd.grad() inside of a checkpointed function: call it outside"
        if number not in self.recomputed:
            self.recompute()
        tensor, version = self.recomputed.pop(number)
        assert tensor._version == version, "a tensor that backward needs was changed in place"
        return tensor

    def recompute(self):
        """Run the function as in forward, until it has computed what backward needs.

        This run's graph is thrown away: only what it would save is taken.
        """
        assert versions_of(self.args) == self.versions, "a checkpoint's argument was changed in place"
        x, work = self.gathering or self.start_all_gather()
        self.gathering = None
        work.wait()
        # The previous block's input travels while this block recomputes and runs its backward.
        if self.previous:
            self.previous.gathering = self.previous.start_all_gather()
        self.recomputed = {}
        before = get_random_states()
        set_random_states(self.random_states)
        with suppress(StopRecomputation), torch.enable_grad():
            self.run(self.pack_again, (x, *self.args))
        set_random_states(before)
        assert len(self.recomputed) == len(self.dropped), "the recomputation saved fewer tensors"

    def pack_again(self, tensor):
        # It returns nothing, as nobody goes back through this run's graph.
        number = len(self.recomputed)
        assert (tensor.shape, tensor.dtype) == self.dropped[number], "recomputed with another shape or dtype"
        # Without detach() this would be a reference cycle: the checkpoint has the tensor, its graph has these
        # hooks, which have the checkpoint.
        self.recomputed[number] = tensor.detach(), tensor._version
        if len(self.recomputed) == len(self.dropped):
            raise StopRecomputation


class StopRecomputation(BaseException):
    """Ends the function. As a BaseException, it also passes an `except Exception` in the function."""


class Partitioned:
    """Each rank of a group keeps 1/N of a tensor, with offload on the host. All ranks' tensors must be equal,
    which is not checked: beside data parallelism, give it the tensor-parallel group."""

    def __init__(self, device: torch.device, offload: bool = False, group: dist.ProcessGroup | None = None):
        self.device = device
        self.offload = offload
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.last = lambda: None  # the latest checkpoint, or None

    def partition(self, x):
        """Copy this rank's 1/N of x. Returns what start_all_gather() needs."""
        size = -(-x.numel() // self.world_size)
        own = x.detach().flatten()[dist.get_rank(self.group) * size :][:size]
        # F.pad copies, always: a view would keep all of x, which may also change on its way to the host.
        shard = part = F.pad(own, (0, size - len(own)))
        if self.offload:
            shard = torch.empty_like(part, device="cpu", pin_memory=self.stream is not None)
            with self.side_stream():
                shard.copy_(part, non_blocking=True)
            if self.stream:
                part.record_stream(self.stream)  # so its memory is not reused before it has been copied
        return shard, x.shape, x.requires_grad

    def start_all_gather(self, shard, shape, requires_grad):
        """Returns x, and the work to wait for before x is read."""
        flat = torch.empty(self.world_size * len(shard), dtype=shard.dtype, device=self.device)
        # The gather waits for the copy from the host. The computation waits for neither.
        with self.side_stream():
            part = shard.to(self.device, non_blocking=True)
            work = all_gather(flat, part, group=self.group, async_op=True)
        return flat[: shape.numel()].view(shape).requires_grad_(requires_grad), work

    def side_stream(self):
        """A context for work beside the computation, but after what has been launched so far."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)  # None changes nothing


def versions_of(values):
    """How often each tensor in these values has been changed in place."""
    return [leaf._version for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def get_random_states():
    """The states of torch's default random generators, the CPU's and the GPUs'."""
    return [generator.get_state() for generator in (torch.default_generator, *torch.cuda.default_generators)]


def set_random_states(states):
    for generator, state in zip((torch.default_generator, *torch.cuda.default_generators), states):
        generator.set_state(state)


@torch.no_grad()
def clip_grad_norm_(params, max_norm):
    """torch.nn.utils.clip_grad_norm_, but it returns the norm in fp64: torch's has the gradients' dtype."""
    params = list(params)
    norm = torch.stack(torch._foreach_norm([p.grad for p in params], dtype=torch.float64)).norm()
    nn.utils.clip_grads_with_norm_(params, max_norm, norm.to(params[0]))
    return norm


def train(config):
    # In place of tensor parallelism all ranks compute the same, so no gradient is sent.
    device, text = set_up(config, f" | policy {config.policy}", replicas=1)
    model = GPT(config).to(device, DTYPES[config.dtype])
    store = Partitioned(device, offload=config.policy == "offload")
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, store=store)
    optimizer_class = OPTIMIZERS[config.optim]
    if config.dtype == "bf16":
        optimizer_class = partial(MasterWeights, optimizer_class)
    optimizer = optimizer_class(model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        for inputs, targets in microbatches(config, text, step, device):
            # Gradients add up over microbatches and each loss is a mean: divide to get the batch's mean.
            microloss = mean_loss(model(inputs), targets) / config.accum
            microloss.backward()
            loss += microloss.detach()
        grad_norm = clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        model.zero_grad()
        print_step(config, step, loss, grad_norm, started)
    if config.save and dist.get_rank() == 0:
        save_weights(model.state_dict(), config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--policy", default="partitioned", choices=["partitioned", "offload"])
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
