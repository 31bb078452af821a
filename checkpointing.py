"""Activation checkpointing: forward drops what backward will need, and backward computes it again.

Idea
    Forward saves activations for backward. They often take more memory than the weights. But of a function
    called through checkpoint() only the arguments are kept; when backward needs the rest, the function runs
    again.

    naive, full: each block is a checkpoint. Backward takes twice as long as forward, so one more forward
    makes a step a third longer. (arXiv 1604.06174) In full, the last linear layer is not run again: 2/9.
    selective: linear layers take most of that time, but their backward needs only their inputs. So a
    checkpoint is something cheap (a norm, attention, GELU) and the linear layer that gets its output. This
    is recomputed, not saved, and the linear layer does not run again. (after arXiv 2205.05198, section 5)

Timeline (full, the last two of 4 blocks)
    compute | forward 3 | forward 4 | loss | recompute 4 | backward 4 | recompute 3 | backward 3 | ...

Memory (bytes on each of N ranks; P parameters, L blocks, a heads, h width, v vocabulary, b sequences of s)
    parameters     wP        w = 4 in fp32, 2 in bf16
    parameters     +4P       with --dtype bf16: master weights
    gradients      (4+w)P    w: a copy, which is sent; in bf16 it becomes fp32 after that
    optimizer      8P        AdamW's two moments
    activations    bs(L(16wh+4(4+a))+2wh+4(2+v))    with --policy none
    activations    bs(9Lwh+2wh+4(2+v))              with --policy selective; in backward 4wbsh more
    activations    bs(Lwh+2wh+4(2+v))               with --policy full; in backward 15wbsh more
    Activations are what is saved when backward begins. For each token a block saves 16 vectors of width h:
    norms' inputs and outputs 4; q, k, v 3; attention's output 1; GELU's input and output, of 4h, 8. It also
    saves 4 statistics of norms, and 1 of attention per head. Selective: norms' inputs 2; q, k, v 3; GELU's
    input 4. The last norm saves 2 vectors and 2 statistics, the loss v numbers.

Sent (bytes, by each rank in each step)
    all-reduce     2wP(N-1)/N

Run
    python checkpointing.py --policy selective
    torchrun --nproc_per_node=8 checkpointing.py --size gpt2-xl --dtype bf16 --batch 64

Left out
    Functions that compute something else the second time, for example because autocast is no longer active,
    or a weight was changed in place. Arguments kept in parts or on the host (more/zero_r.py).
"""

import argparse
import os
import sys
import time
from contextlib import suppress

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # not used, but if torch imports it later, processes may crash at exit
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

FLAGS = {"policy": ("full", "selective", "naive", "none")}


class NaiveCheckpoint(torch.autograd.Function):
    """A block's forward that saves its input only. Backward runs it again, and goes backward through that."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        return Block.forward(block, x)  # not block(x), which is a checkpoint; here autograd saves nothing

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()  # a leaf: the backward below ends with it
        with torch.enable_grad():
            output = Block.forward(ctx.block, x)
        output.backward(gradient)  # and the block's parameters get their gradients
        return None, x.grad


# But the whole block runs again, although backward does not need the output of its last linear layer, a third
# of the work. Dropout would draw other masks the second time. And for autograd this is a function of x alone:
# if x needs no gradient, the parameters get none, and torch.autograd.grad() never finds theirs.


def checkpoint(function, *args):
    """Returns function(*args). Autograd records it, but saves a number in place of each tensor."""
    if not torch.is_grad_enabled():
        return function(*args)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    versions = [tensor._version for tensor in tensors]  # each change in place adds 1
    random_states = get_random_states()
    recomputed = []  # the tensors; None: not computed yet, or used already

    def pack(tensor):  # called in forward with what autograd would save; what it returns is saved
        recomputed.append(None)
        return len(recomputed) - 1

    def unpack(index):  # called in backward with what has been saved
        if recomputed[index] is None:
            now = [tensor._version for tensor in tensors]
            assert versions == now, "an argument was changed in place"
            recomputed[:] = recompute(function, args, random_states, len(recomputed))
        tensor, recomputed[index] = recomputed[index], None  # so that it is freed after use
        return tensor

    with saved_tensors_hooks(pack, unpack):
        return function(*args)


def recompute(function, args, random_states, n):
    """Runs the function until autograd has saved n tensors, in the same order as before. Returns these."""
    saved = []

    def keep(tensor):
        saved.append(tensor.detach())  # without the graph of this run
        if len(saved) == n:
            raise AllSaved  # a linear layer saves its inputs before it runs: so the last one does not run
        return tensor.detach()

    states_now = get_random_states()
    set_random_states(random_states)
    with suppress(AllSaved), torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*args)
    set_random_states(states_now)
    return saved


class AllSaved(Exception):
    """Ends recompute()."""


def get_random_states():  # dropout's masks depend on them
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def set_random_states(states):
    torch.set_rng_state(states[0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


def full(block, x):
    return checkpoint(Block.forward, block, x)


def selective(block, x):
    """Block.forward(), cut after each linear layer. Adding to x saves nothing."""
    qkv = checkpoint(lambda x: block.qkv(block.norm1(x)), x)
    x = x + checkpoint(lambda qkv: block.proj(block.attention(qkv)), qkv)
    up = checkpoint(lambda x: block.up(block.norm2(x)), x)
    return x + checkpoint(lambda up: block.down(F.gelu(up)), up)


def all_reduce(grads):  # in one message
    flat = nn.utils.parameters_to_vector(grads)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat, grads)  # they become views of flat


def train(config):
    device = join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    forwards = {"full": full, "selective": selective, "naive": NaiveCheckpoint.apply, "none": Block.forward}

    class CheckpointedBlock(Block):
        def forward(self, x):
            return forwards[config.policy](self, x)

    model = GPT(config, CheckpointedBlock).to(device)
    params = list(model.parameters())
    optimizer = MasterWeights(params, config.lr)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        total_loss = 0
        for inputs, targets in microbatches(config, step, device, rank, world_size):
            # The batch's loss is the mean of all ranks' microbatches: each loss is divided by their number.
            loss = mean_loss(model(inputs), targets) / (config.accum * world_size)
            loss.backward()
            total_loss += loss.detach()
        all_reduce([param.grad for param in params])
        norm = squared_norm([param.grad for param in params]).sqrt()
        nn.utils.clip_grads_with_norm_(params, config.clip, norm)
        optimizer.step()  # which sets the gradients to None, too
        dist.all_reduce(total_loss)
        print_step(config, step, total_loss, norm, started)
    if config.save and rank == 0:
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
