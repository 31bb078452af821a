"""The plain training loop on one device, which every other lesson distributes.

Idea
    Draw a batch, add up the gradients of its microbatches, clip them, let the optimizer step. The other
    lessons draw the same batches and print the same losses; they only divide the work. In bf16 the optimizer
    steps fp32 copies of the weights, the masters, and rounds them: a bf16 number has 8 significant bits, so
    most updates of a bf16 weight would round to nothing (ZeRO, arXiv 1910.02054, section 3.1).

Timeline
    None: | forward | backward | forward | backward | ... | clip | step |

Memory (bytes; the letters mean the same in all lessons, in formulas and in shapes)
    parameters    (w+c)P      weights, and in bf16 their masters
    gradients     wP+3cG/2    in bf16 also copies of G at a time, in bf16 and fp32
    optimizer     KP          moments
    N ranks, i one of them; k microbatches of a rank in a step; b sequences in one; s tokens in a sequence;
    L blocks; a heads; h width; v vocabulary; P parameters; U those of a block or unit; E those in none;
    w bytes of a weight: fp32 4, bf16 2, fp64 8; m bytes of a number that the optimizer sees: max(w, 4);
    c bytes of the fp32 master of a bf16 weight: 4, else 0; K bytes of a weight's moments: AdamW 2m, SGD 0;
    G numbers stepped at a time: 2^24, or a larger tensor; g 1 over gloo, for its receive buffer, else 0;
    Q FLOPs of a token, 6P+12Lhs, a third of them in forward (PaLM, arXiv 2204.02311, appendix B); n (N-1)/N;
    A bytes that travel in a message's latency, Y in the whole model's forward of a microbatch.

Sent
    Nothing: there is one rank.

Run
    python single.py
    python single.py --size gpt2 --dtype bf16 --batch 64 --accum 8 --data my_text/

Left out
    Learning-rate schedules, dropout, evaluation, resuming.
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later (torch.optim does), its defaults would keep the group to the end
import torch.nn as nn
import torch.nn.functional as F


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
    """Scale the gradients to a global norm of at most max_norm. Returns the norm before, an fp64 scalar.

    torch.nn.utils.clip_grad_norm_, but with sums in fp64: that rounds to the gradients' dtype.
    """
    params = list(params)
    grads = [param.grad for param in params]
    norms = torch._foreach_norm(grads, dtype=torch.float64)
    norm = torch.stack(norms).norm()
    nn.utils.clip_grads_with_norm_(params, max_norm, norm.to(grads[0]))
    return norm


def train(config):
    """Train with these flags."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        refuse("runs in one process: start it without torchrun, or start ddp.py")
    device, text = set_up(config)
    model = GPT(config)
    model.to(device, DTYPES[config.dtype])
    optimizer_class = OPTIMIZERS[config.optim]
    if config.dtype == "bf16":
        optimizer_class = partial(MasterWeights, optimizer_class)
    optimizer = optimizer_class(model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        batches = microbatches(config, text, step, device)
        for inputs, targets in batches:
            # Gradients add up over microbatches and each loss is a mean: divide to get the batch's mean.
            microloss = mean_loss(model(inputs), targets) / config.accum
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
    """The flags, from the command line if no arguments are given."""
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


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
