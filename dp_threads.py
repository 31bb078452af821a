"""DataParallel: one process has a replica of the model on each device and runs each in a thread.

Idea
    Device 0 sends its weights and a share of the batch to each other device. All compute at once; device 0
    gathers the outputs and has the loss of the whole batch. In backward it sums the replicas' gradients. So
    the script stays that of one device (torch.nn.DataParallel; arXiv 2006.15704, section 2.2).

Timeline (1, 2 and 4 from device 0 to the others; 3 and 5 back)
    device 0 | 1 weights, | forward | 3 outputs | loss | 4 gradients | backward | 5 gradients  | clip, step
    device i |   2 inputs | forward |           |      |  of outputs | backward |  of replicas |

Memory (bytes; N replicas, of k microbatches each; the other letters: docs/formulas.md)
                  device 0                      others    ranks of ddp.py
    parameters    (w+c)P                        wP        (w+c)P       w a weight, c its fp32 master in bf16
    gradients     wP+max(min(1,k-1)wP,3cG/2)    wP        wP+3cG/2     sum; and a microbatch's (k > 1) or G's
    optimizer     KP                            0         KP           K the moments

Sent (bytes through device 0 in a step, where each rank of ddp.py sends 2wP(N-1)/N)
    send    k(N-1)(2wP+2wbsv+8bs)    weights, gradients; outputs (v the vocabulary), their gradients; inputs
    This grows with N and k, ddp.py's with neither. Device 0 also holds all outputs, Nwbsv, and their loss.

Run
    python dp_threads.py --replicas 4
    python dp_threads.py --replicas 8 --size gpt2 --dtype bf16 --batch 64

Left out
    Nests of inputs and outputs, gradients of inputs, uneven outputs, autocast, saved-tensor hooks, nn.LSTM.
"""

import argparse
import copy
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later (torch.optim does), its defaults would keep the group to the end
import torch.nn as nn
import torch.nn.functional as F


class DP(nn.Module):
    """Runs a replica of the module on each device: a tensor (b, ...), or a tuple -> output on devices[0]."""

    def __init__(self, module, devices, threads=True):
        super().__init__()
        self.module = module
        self.devices = devices
        begin = torch.autograd.set_multithreading_enabled, [False]  # a backward stays in its caller's thread
        self.threads = [ThreadPoolExecutor(1, f"device {i}", *begin) for i in range(len(devices))]
        if not threads:  # one replica after the other
            self.threads = self.threads[:1] * len(devices)

    def forward(self, inputs):
        replicas = replicate(self.module, self.devices, self.threads)
        shares = scatter(inputs, self.devices, self.threads)
        outputs = parallel_apply(replicas, shares, self.threads)
        output = gather(outputs, self.devices[0])
        return RunBackwards.apply((self, replicas, outputs), output, *self.module.parameters())


def replicate(module, devices, threads):
    """A replica of the module on each device. The first shares the module's tensors."""
    arguments = [(module, device) for device in [None, *devices[1:]]]
    return parallel_apply([replica_on] * len(devices), arguments, threads)


def replica_on(module, device):
    """A copy of the tree of modules, with parameters and buffers copied to the device (None: shared)."""
    new = {None: None}  # a member may be None, such as a bias
    for tensor in (*module.parameters(), *module.buffers()):
        leaf = tensor.detach()
        if device is not None:
            leaf = leaf.to(device, copy=True)
        new[tensor] = leaf.requires_grad_(tensor.requires_grad)
    for submodule in module.modules():
        new[submodule] = copy.copy(submodule)
    for submodule in module.modules():
        for register in ("_parameters", "_buffers", "_modules"):
            members = vars(submodule)[register].items()
            vars(new[submodule])[register] = {name: new[member] for name, member in members}
    return new[module]


def scatter(inputs, devices, threads):
    """On each device its share of a tensor, or of each tensor in a tuple: [(share, ...), ...]."""
    if not isinstance(inputs, tuple):
        inputs = (inputs,)
    pieces = [tensor.chunk(len(devices)) for tensor in inputs]
    arguments = zip(devices, *pieces)
    return parallel_apply([copies_on] * len(devices), arguments, threads)


def copies_on(device, *tensors):
    return [tensor.detach().to(device, copy=True) for tensor in tensors]


def parallel_apply(functions, arguments, threads):
    """[function(*its arguments) for each device], all at once, each in the thread of its device."""
    futures = []
    for thread, function, given in zip(threads, functions, arguments):
        futures.append(thread.submit(function, *given))
    wait(futures)  # no replica may still run when the caller hears of an error
    return [future.result() for future in futures]


def gather(outputs, device):
    """The replicas' outputs (b/N, ...) as one tensor (b, ...) on the device."""
    return torch.cat(copies_on(device, *outputs))


def sum_gradients(replicas):
    """The sums of the replicas' gradients. They are not divided: the loss is one mean over the batch."""
    totals = [param.grad for param in replicas[0].parameters()]
    for replica in replicas[1:]:
        for total, param in zip(totals, replica.parameters()):
            if param.grad is not None:
                gradient = param.grad.to(total.device, copy=True)
                total.add_(gradient)
    return totals


class RunBackwards(torch.autograd.Function):
    """Returns output; backward runs the replicas' backwards, and gives the module's parameters their sums."""

    @staticmethod
    def forward(ctx, call, output, *params):
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx, gradient):
        dp, replicas, outputs = ctx.call
        ctx.call = None  # else the replicas would live as long as the loss
        backwards = [output.backward for output in outputs]
        gradients = scatter(gradient, dp.devices, dp.threads)
        parallel_apply(backwards, gradients, dp.threads)
        return None, None, *sum_gradients(replicas)


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


@torch.no_grad()
def clip_grad_norm_(params, max_norm):
    """torch.nn.utils.clip_grad_norm_ with sums in fp64: torch rounds its own to the gradients' dtype."""
    params = list(params)
    squares = 0
    for param in params:
        squares += param.grad.square().sum(dtype=torch.float64)
    norm = squares.sqrt()
    nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


def train(config):
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        refuse("runs in one process: start it without torchrun, with --replicas")
    device, text = set_up(config, f" | no-threads {config.no_threads}", config.replicas)
    torch.set_num_threads(torch.get_num_threads() // config.replicas or 1)  # they share the cores
    gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    devices = [torch.device(device.type, i % gpus) for i in range(config.replicas)]
    model = GPT(config).to(device, DTYPES[config.dtype])
    dp = DP(model, devices, not config.no_threads)
    optimizer_class = OPTIMIZERS[config.optim]
    if config.dtype == "bf16":
        optimizer_class = partial(MasterWeights, optimizer_class)
    optimizer = optimizer_class(model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        for inputs, targets in microbatches(config, text, step, device):
            # Gradients add up over microbatches and each loss is a mean: divide to get the batch's mean.
            microloss = mean_loss(dp(inputs), targets) / config.accum
            microloss.backward()
            loss += microloss.detach()
        grad_norm = clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        model.zero_grad()
        print_step(config, step, loss, grad_norm, started)
    if config.save:
        state_dict = model.state_dict()
        save_weights(state_dict, config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--replicas", type=int, default=2, help="one for each device")
    own.add_argument("--no-threads", action="store_true", help="run one replica after the other")
    return read_flags(arguments, own, replicas=(1, 16))


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
