"""DataParallel: one process trains on several devices, each with a replica of the model and a thread.

Idea
    The model is on device 0. For each microbatch it sends every other device a share of the inputs (scatter)
    and the weights (replicate). All devices run forward at the same time, each in a thread (parallel_apply).
    Device 0 collects the outputs (gather) and computes the loss. Then it sends each device the gradient of
    its outputs, all devices run backward at the same time, and device 0 adds up the gradients of the weights.
    (As torch.nn.DataParallel does: PyTorch Distributed, arXiv 2006.15704, section 2.2)
    So each microbatch takes five transfers, all to or from device 0, and meanwhile no device computes. ddp.py
    has a process for each device, and no device is special.

Timeline (a microbatch; -> is from device 0 to all others, <- back; d: gradients)
    device 0 |                    | forward |            | loss |              | backward |
    transfer | inputs, weights -> |         | outputs <- |      | d outputs -> |          | d weights <-
    device i |                    | forward |            |      |              | backward |

Memory (bytes on device 0, and on each other device; P parameters)
    parameters    wP        others wP; w = 4 in fp32, 2 in bf16
    parameters    +4P       with --dtype bf16: master weights
    gradients     4P        others wP; bf16 ones become fp32 in the update
    optimizer     8P        others 0; AdamW's two moments
    Device 0 also holds the outputs of all devices, their gradients, and the loss.

Sent (bytes in each step, to and from device 0; k microbatches of b sequences on each of N devices)
    send    k(N-1)(2wP+2wbsv+8bs)    without --naive, which copies as much, but on CPUs nothing
    2wP: weights, their gradients; 2wbsv: outputs (s tokens, v logits each), their gradients; 8bs: inputs
    A rank of ddp.py sends less than 2wP in a step, and receives as much, however large k is.

Run
    python dp_threads.py --replicas 4    # and with --naive

Left out
    Models with several inputs or outputs, or with buffers that forward changes (BatchNorm's statistics).
"""

import argparse
import copy
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # not used, but if torch imports it later, processes may crash at exit
import torch.nn as nn
import torch.nn.functional as F

FLAGS = {"naive": False, "replicas": 2}


def naive(module, devices, inputs):
    """One device after another. Returns the output for all inputs, on device 0."""
    outputs = []
    for device, share in zip(devices, inputs.tensor_split(len(devices))):
        weights = {name: param.to(device) for name, param in module.named_parameters()}
        output = torch.func.functional_call(module, weights, share.to(device))  # with these weights
        outputs.append(output.to(devices[0]))
    return torch.cat(outputs)


# Backward needs no code here: autograd takes the gradients back to the weights of device 0, and adds them up.
# But devices take turns: each forward begins when the one before it has ended. So below each device has its
# own thread, and its own module, the replica, as threads cannot give one module different weights.


class DP:
    """A module on devices[0], and its replicas on the others."""

    def __init__(self, module, devices):
        self.devices = devices
        self.threads = [ThreadPoolExecutor(1, f"device {i}") for i in range(len(devices))]
        self.replicas = [module]  # device 0 uses the module itself
        self.copies = []  # pairs: a weight of the module, its copy in a replica
        for thread, device in zip(self.threads[1:], devices[1:]):
            replica = thread.submit(copy.deepcopy, module).result()  # in the thread that will use it
            self.replicas.append(thread.submit(replica.to, device).result())
            self.copies.extend(zip(module.parameters(), replica.parameters()))

    def parallel_apply(self, function, *arguments):
        """Call function for each device, at the same time. arguments: lists, with an element for each."""
        futures = [thread.submit(function, *own) for thread, *own in zip(self.threads, *arguments)]
        return [future.result() for future in futures]

    def forward(self, inputs):
        """Returns all outputs, on device 0: a leaf, where loss.backward() ends, and backward() goes on."""
        shares = self.parallel_apply(send, inputs.tensor_split(len(self.devices)), self.devices)  # scatter
        for param, copied in self.copies:  # replicate (once a step would do; DataParallel does it here, too)
            copied.data.copy_(param.data)
        self.outputs = self.parallel_apply(lambda replica, share: replica(share), self.replicas, shares)
        return torch.cat([send(output, self.devices[0]) for output in self.outputs]).requires_grad_()

    def backward(self, gradient):
        """The rest of the loss's backward, from the gradient of what forward() returned."""
        gradients = self.parallel_apply(send, gradient.tensor_split(len(self.devices)), self.devices)
        self.parallel_apply(torch.Tensor.backward, self.outputs, gradients)
        for param, copied in self.copies:
            param.grad += send(copied.grad, self.devices[0])
            copied.grad = None
        del self.outputs


def send(tensor, device):
    """A copy on the device. Without GPUs all are the CPU: copied anyway, so that it costs what it would."""
    return tensor.detach().to(device, copy=True)


def train(config):
    device = join_world()
    if dist.get_world_size() > 1:
        sys.exit("dp_threads.py is one process: start it with python, and with --replicas")
    if config.replicas < 1:
        sys.exit(f"--replicas {config.replicas}: must be at least 1")
    gpus = torch.cuda.device_count()
    devices = [torch.device("cuda", i % gpus) if gpus else device for i in range(config.replicas)]
    model = GPT(config).to(devices[0])
    params = list(model.parameters())
    dp = None if config.naive else DP(model, devices)
    optimizer = MasterWeights(params, config.lr)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for inputs, targets in microbatches(config, step, device):
            output = naive(model, devices, inputs) if config.naive else dp.forward(inputs)
            # The batch's loss is the mean of its microbatches' losses: each is divided by their number.
            loss = mean_loss(output, targets) / config.accum
            loss.backward()
            if not config.naive:
                dp.backward(output.grad)
            total_loss += loss.detach()
            del output, loss  # else device 0 would keep the outputs during the next forward
        norm = squared_norm([param.grad for param in params]).sqrt()
        nn.utils.clip_grads_with_norm_(params, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
        print_step(config, step, total_loss, norm, started)
    if config.save:
        torch.save(model.state_dict(), config.save)


class MasterWeights:
    """AdamW on fp32 copies of bf16 weights: bf16 alone would round small updates away."""

    def __init__(self, params, lr):
        self.params = list(params)
        # For fp32 weights, to() makes no copy: these are the weights themselves.
        self.masters = [param.detach().to(wide(param.dtype)) for param in self.params]
        self.adamw = torch.optim.AdamW(self.masters, lr, fused=True)

    @torch.no_grad()
    def step(self):
        for param, master in zip(self.params, self.masters):
            master.grad = param.grad.to(master.dtype)
            param.grad = None
        self.adamw.step()
        self.adamw.zero_grad()
        torch._foreach_copy_(self.params, self.masters)


# ==== toy model: the same lines in every lesson ====
SHAPE = "layers heads width context vocab".split()
SIZES = {
    "toy": (8, 8, 64, 64, 256),
    "small": (6, 8, 256, 128, 256),
    "gpt2": (12, 12, 768, 1024, 50304),
    "gpt2-xl": (48, 25, 1600, 1024, 50304),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def read_flags(own, arguments=None):
    """The flags of all lessons, and its own: {name: default}. A tuple lists choices, the default first."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--size", default="toy", choices=SIZES)
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=int, help="overrides --size")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="bf16: with an optimizer in fp32")
    parser.add_argument("--data", default=np.ma.core.__file__, help="any file: a byte is a token")
    parser.add_argument("--steps", default=20, type=int)
    parser.add_argument("--batch", default=16, type=int, help="sequences in a step, on all ranks together")
    parser.add_argument("--accum", default=1, type=int, help="microbatches in a step, on each rank")
    parser.add_argument("--lr", default=1e-3, type=float)
    parser.add_argument("--clip", default=1.0, type=float, help="the largest norm of the gradient")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--save", default="", help="a file for the trained weights")
    for name, default in own.items():
        if isinstance(default, tuple):
            parser.add_argument(f"--{name}", default=default[0], choices=default)
        elif default is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", default=default, type=type(default))
    config = parser.parse_args(arguments)
    for name, value in zip(SHAPE, SIZES[config.size]):
        if getattr(config, name) is None:
            setattr(config, name, value)
    if config.width % config.heads:
        parser.error(f"--width {config.width}: must be a multiple of --heads {config.heads}")
    if not os.path.isfile(config.data) or os.path.getsize(config.data) <= config.context:
        parser.error(f"--data {config.data}: no such file, or no more bytes than --context")
    if not os.path.isdir(os.path.dirname(config.save) or "."):
        parser.error(f"--save {config.save}: no such folder")
    return config


def join_world():
    """Meet the other ranks: over NCCL if there are GPUs, else over gloo. Returns this rank's device."""
    if "RANK" not in os.environ:  # not started by torchrun: the only rank
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(int(os.getenv("LOCAL_RANK", 0)) % gpus)
        if int(os.getenv("LOCAL_WORLD_SIZE", 1)) > gpus:  # to share one, each must seem a host of its own
            os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])
    dist.init_process_group("nccl" if gpus else "gloo")
    return torch.device("cuda" if gpus else "cpu")


def microbatches(config, step, device, rank=0, replicas=1):
    """A rank's --accum pairs (inputs, targets), each (b, s). The batch is the same on any number of ranks."""
    b, rest = divmod(config.batch, replicas * config.accum)
    if rest:
        sys.exit(f"--batch {config.batch}: must be a multiple of its microbatches, {replicas * config.accum}")
    text = np.memmap(config.data, np.uint8, "r")
    random = np.random.default_rng((config.seed, step))
    starts = random.integers(len(text) - config.context, size=(replicas, config.accum, b, 1))[rank]
    tokens = torch.from_numpy(text[starts + np.arange(config.context + 1)]).to(device).long()
    return zip(tokens[..., :-1], tokens[..., 1:])


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x):  # (b, s, h) -> (b, s, h)
        x = x + self.proj(self.attention(self.qkv(self.norm1(x))))
        return x + self.mlp(self.norm2(x))

    def attention(self, qkv):  # (b, s, 3h) -> (b, s, h)
        qkv = qkv.unflatten(-1, (3, self.heads, -1))
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))  # (b, heads, s, h / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).flatten(2)

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self, config, block=Block):
        super().__init__()
        torch.manual_seed(config.seed)  # so that all ranks start from the same weights
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)
        self.to(DTYPES[config.dtype])

    def forward(self, tokens):  # (b, s) -> logits (b, s, v)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def embed(self, tokens):  # (b, s) -> (b, s, h)
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]

    def head(self, x):  # (b, s, h) -> (b, s, v); reuses the embedding's weight
        return F.linear(self.norm(x), self.tokens.weight)


def wide(dtype):  # fp32 for bf16, else the same
    return torch.promote_types(dtype, torch.float32)


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).to(wide(logits.dtype)), targets.flatten())


def squared_norm(grads):  # of all gradients; ranks can add up squares; in fp64, as bf16 would round them
    return torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).square().sum()


def print_step(config, step, loss, norm, started):
    loss, norm = loss.item(), norm.item()  # here, once a step, the host waits for the device
    if dist.get_rank() == 0:
        ms = 1e3 * (time.perf_counter() - started)
        print(f"step {step:2}/{config.steps} | loss {loss:.4f} | grad norm {norm:.3f} | {ms:.1f} ms")


if __name__ == "__main__":
    train(read_flags(FLAGS))
    dist.destroy_process_group()
