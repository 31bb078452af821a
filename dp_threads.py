"""DataParallel: one process trains on several devices, with a replica of the model and a thread for each.

Idea
    Device 0 has the model. In each forward it sends every other device a share of the batch and a copy of the
    weights. All devices compute their shares at the same time, and device 0 gathers the outputs and computes
    the loss of the batch. In backward each device computes the gradients of its replica, and device 0 adds
    them up. A script for one device needs one more line, which wraps its model (torch.nn.DataParallel;
    PyTorch Distributed, arXiv 2006.15704, section 2.2).

    Device 0 is the bottleneck. Everything passes through it, in each microbatch anew, and it alone computes
    the loss and updates the weights while the others wait. ddp.py, with a process for each device, has
    neither problem.

Timeline (1 and 3 go from device 0 to the others, 2 and 4 come back)
    device 0 | 1 inputs, | forward | 2 outputs | loss | 3 gradients | backward | 4 gradients | clip, update
    device i |   weights | forward |           |      |  of outputs | backward |  of weights |

Memory (bytes; N devices; P parameters of w bytes each: w = 4 in fp32, 2 in bf16, 8 in fp64)
                  device 0                      others    ranks of ddp.py
    parameters    (w+c)P                        wP        (w+c)P      c = 4 in bf16, for fp32 masters, else 0
    gradients     wP+max(min(1,k-1)wP,3cG/2)    wP        wP+3cG/2
    optimizer     KP                            0         KP          K = 8 for Adam (fp64: 16), 0 for SGD
    With k > 1 microbatches, device 0 has the gradients of one beside the sum over those before. In bf16
    MasterWeights makes temporary copies of gradients, of G = 2^24 (or a larger tensor's) at a time.

Sent (bytes through device 0 in a step)
    send    k(N-1)(2wP+2wbsv+8bs)    with each of the N-1 others, in each microbatch
    2wP is for weights and their gradients. A microbatch has b sequences of s tokens for each device: 8bs is
    for them, 2wbsv for their outputs (v for each token) and the outputs' gradients. Device 0 must hold all
    outputs, Nwbsv. A rank of ddp.py sends 2wP(N-1)/N in a step: less than 2wP, however large N and k are.

Run
    python dp_threads.py --replicas 4
    python dp_threads.py --replicas 8 --size gpt2 --dtype bf16 --batch 64

Left out
    Errors here: inputs or outputs other than one tensor, an input that requires a gradient, a second backward
    through the same output, create_graph=True, parametrized modules (weight_norm).
    Not handled: autocast and saved-tensor hooks around DP do not reach the threads (enter them in the
    module's forward). What a forward changes in a replica is lost, except buffers that the first replica
    changes in place. Tensors that are neither parameters nor buffers stay where they are.
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
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F


def forward_in_turn(module, devices, inputs):
    """All that is needed if time does not matter (--no-threads). Returns the batch's output on devices[0]."""
    outputs = []
    for device, share in zip(devices, inputs.chunk(len(devices))):
        weights = {name: param.to(device) for name, param in module.named_parameters()}
        output = torch.func.functional_call(module, weights, share.to(device))
        outputs.append(output.to(devices[0]))
    return torch.cat(outputs)


# Backward needs no code: autograd copies the gradient of each copy of a weight back, and adds them up.
#
# The problem is that devices take turns: each waits until Python has gone through the forward of the one
# before, and on CPUs autograd runs the backwards one after another, too. So the class below has a thread for
# each device. Threads cannot put different weights into one module at the same time, so each has a module of
# its own, the replica. For a thread to run its backward, each replica must also have an autograd graph of its
# own, which ends at its copies of the weights. So their gradients no longer reach the module by themselves:
# RunBackwards brings them back and adds them up.
#
# One problem stays: device 0 has most of the work, as Memory and Sent show. ddp.py solves it.


class DP(nn.Module):
    """Wraps a module on devices[0]. Its forward, and the backward from its output, use all devices.

    The module takes one tensor (rows, ...) and returns one. Each device gets a share of the rows."""

    def __init__(self, module: nn.Module, devices: list[torch.device]):
        super().__init__()
        self.module = module
        self.devices = devices
        # On GPUs autograd has a thread for each device. That of device 0 will wait in RunBackwards, so the
        # replicas' backwards must not need it: with this they stay in the threads that call them.
        begin = torch.autograd.set_multithreading_enabled, [False]
        self.threads = [ThreadPoolExecutor(1, f"device {i}", *begin) for i in range(len(devices))]

    def forward(self, inputs):
        check_tensors(inputs)
        assert not inputs.requires_grad, "DP gives its input no gradient: detach() it, or wrap its layers"
        # Few rows make fewer shares than there are devices. Then the last devices have nothing to do.
        shares = inputs.chunk(len(self.devices))
        # None: on device 0 the replica uses the module's own tensors.
        devices = [None, *self.devices[1:]]
        replicas, outputs = zip(*self.parallel_apply(self._forward_on, devices, shares))
        check_tensors(*outputs)
        # Gather. The output is that of the whole batch, as if device 0 had computed it (but for BatchNorm).
        output = torch.cat([send(output, self.devices[0]) for output in outputs])
        return RunBackwards.apply((self, replicas, outputs), output, *self.module.parameters())

    def parallel_apply(self, function, *arguments):
        """[function(*its arguments) for each device], all at the same time, each in the device's thread."""
        futures = []
        for thread, *given in zip(self.threads, *arguments):
            # A thread does not know whether its caller is in no_grad(), so it is told.
            thread.submit(torch.set_grad_enabled, torch.is_grad_enabled())
            futures.append(thread.submit(function, *given))
        # If one fails, the others must end before the caller gets the error: it may try again.
        wait(futures)
        return [future.result() for future in futures]

    def _forward_on(self, device, share):
        """A turn of the loop above: replicate, scatter, apply."""
        replica = replicate(self.module, device)
        return replica, replica(send(share, device))


class RunBackwards(torch.autograd.Function):
    """Connects the gathered output to the module's parameters: its backward is that of all replicas."""

    @staticmethod
    def forward(ctx, call, output, *params):
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.call and not torch.is_grad_enabled(), "DP: one backward for a forward, no create_graph"
        dp, replicas, outputs = ctx.call
        ctx.call = None  # otherwise the replicas would live as long as the loss
        gradients = gradient.split(list(map(len, outputs)))
        dp.parallel_apply(run_backward, outputs, gradients)
        return None, None, *sum_gradients(replicas)


def run_backward(output, gradient):
    output.backward(send(gradient, output.device))


def replicate(module, device):
    """A copy of the module. Its tensors are copies on the device, or, if it is None, share memory."""
    copies = {None: None}  # a module's member may be None, such as a bias
    for tensor in (*module.parameters(), *module.buffers()):
        copies[tensor] = send(tensor, device).requires_grad_(tensor.requires_grad)
    for submodule in module.modules():
        copies[submodule] = copy.copy(submodule)
    # So far a copy has the members of its original. Now it gets their copies; a member that belongs to
    # several modules, such as a tied weight, has one copy for all of them.
    for submodule in module.modules():
        state = vars(copies[submodule])
        for register in ("_parameters", "_buffers", "_modules"):
            state[register] = {name: copies[member] for name, member in state[register].items()}
    return copies[module]


def send(tensor, device):
    """A copy on the device, or, if it is None, the tensor's own memory; autograd does not connect the two."""
    # On a CPU all devices are the same one. A copy is made even so, as among GPUs.
    return tensor.detach().to(device=device, copy=device is not None)


def sum_gradients(replicas):
    """The sums of the replicas' gradients. They are not divided: the loss is one mean over the batch."""
    params, *others = [list(replica.parameters()) for replica in replicas]
    for other in others:
        for param, copied in zip(params, other):
            if copied.grad is not None:  # it is None if this replica's share did not use the parameter
                gradient = send(copied.grad, param.device)
                param.grad = gradient if param.grad is None else param.grad.add_(gradient)
    return [param.grad for param in params]


def clip_grad_norm_(params, max_norm):
    """Scale the gradients to a global norm of at most max_norm. Returns the norm before."""
    grads = [param.grad for param in params if param.grad is not None]
    norms = torch._foreach_norm(grads, dtype=torch.float64)
    norm = torch.stack(norms).norm()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    torch._foreach_mul_(grads, factor.to(grads[0]))
    return norm


# A reader may stop here: this and the two assertions above refuse what DP would compute wrongly.


def check_tensors(*tensors):
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError("DP's module must take one tensor (rows, ...) and return one: wrap it so")


def train(config):
    if int(os.getenv("WORLD_SIZE") or 1) > 1:
        refuse("runs in one process: start it without torchrun, with --replicas")
    device, text = set_up(config, f" | no-threads {config.no_threads}", config.replicas)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    devices = [torch.device(device.type, i % gpus) for i in range(config.replicas)]
    # Without GPUs, each device is a part of the cores.
    torch.set_num_threads(torch.get_num_threads() // config.replicas or 1)
    model = GPT(config).to(device, DTYPES[config.dtype])
    dp = partial(forward_in_turn, model, devices) if config.no_threads else DP(model, devices)
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
        save_weights(model.state_dict(), config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--replicas", type=int, default=2, help="one for each device")
    own.add_argument("--no-threads", action="store_true", help="run one replica after the other")
    return read_flags(arguments, own, replicas=(1, 16))


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
