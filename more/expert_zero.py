"""ZeRO-3 with experts: dense weights are sharded over all ranks, experts over the ranks that have the same.

Idea
    As in expert_parallel.py, every other block has X experts in place of its MLP, and a group of e ranks
    (--ep) shares them: each rank computes X/e of them, for the tokens of its group. As in zero3.py, a rank
    keeps a shard of its weights, and gathers what it is about to use. As only N/e ranks use an expert, there
    are two layouts (MoE Parallel Folding, arXiv 2504.14960). With N = 8, e = 4, and X = 8 experts, A to H:

    Rank                  0       1       2       3       4       5       6       7
    its dense weights     1/8     1/8     1/8     1/8     1/8     1/8     1/8     1/8
    its experts, sharded  1/2 AB  1/2 CD  1/2 EF  1/2 GH  1/2 AB  1/2 CD  1/2 EF  1/2 GH

    Dense weights (all but experts') are gathered from all 8 ranks, AB from ranks 0 and 4. Tokens travel
    within ranks 0-3, and within 4-7. With --ep 1 each rank has all experts; with --ep N none is sharded.

Timeline (of a block without experts and one with, forward; backward is the same, from the other end)
    computing | block               | attention, router |                    | experts |
    N ranks   | gather next block   | gather the block after that
    N/e ranks | gather its experts  |                   |                    |         |
    e ranks   |                     |                   | all-to-all: tokens |         | all-to-all: outputs

Memory (bytes on each of N ranks; U parameters in an expert)
    M blocks have X experts. Of D other parameters E are in the root, V in such a block, W in any other one.
    parameters    m(D+MXU)/N + w(E+V+XU/e+W)    w = 4 in fp32, 2 in bf16; m = 4
    gradients     m(D+MXU)/N + w(E+2(V+XU/e)+max(W,E))
    optimizer     K(D+MXU)/N    K = 8 for AdamW's two moments, 0 for SGD (fp64: w, m = 8, K = 16)
    Unsharded: the root, a block with its experts, and its neighbour. Gradients, at most: the root's, a
    block's and its experts' twice (sent and received), and the next block's, or a flat copy of the root's.

Sent (bytes, by each rank in each step of k microbatches, of b sequences of s tokens over all ranks)
    all-gather        kw(2D-E)(N-1)/N+2kwM(XU/e)(N-e)/N+8kMX(N-1)    dense weights, experts, counts
    reduce-scatter    kwD(N-1)/N+kwM(XU/e)(N-e)/N                    dense gradients, experts'
    all-to-all        4wkM(tbsh/N)(e-1)/e    on average; t experts of a token, h width

Run
    torchrun --nproc_per_node=4 more/expert_zero.py --ep 2    (in --dtype fp64 each N gives the same)

Left out
    An expert's capacity. Building a model that no device holds unsharded. Not noticed, beside what zero3.py
    lists: a weight in several units, which is NaN in all but one; initial weights that differ between ranks.
    Errors: frozen weights; a root without weights of its own; a unit that returns a tuple.
"""

import argparse
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _unflatten_dense_tensors as unflatten  # views of a flat tensor, of these shapes

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


class ExpertZeRO:
    """Shards a module, which is called as before. Each submodule of unit_class is a unit, and so are the
    Experts in it, with another group. Without overlap, all would be as in zero3.py but for three lines:

        all_gather(unit.flat_param, unit.shard, group=unit.group)  # all ranks, or those with these experts
        reduce_scatter(unit.shard.grad, unit.flat_grad, group=unit.group)
        unit.shard.grad /= world_size  # whatever the group

    The difficulty is the order. If one rank starts an all-gather before an all-to-all, and another one after
    it, each may wait for the other for ever. So no rank lets tokens decide what it does: it gathers experts
    before their block, and so before the all-to-all, and runs them even without tokens."""

    def __init__(self, module: nn.Module, unit_class: type, ep_group, expert_dp_group):
        self.module = module
        self.ep_group = ep_group  # the ranks that share experts; expert_dp_group: those that have the same
        self.units = []  # in the order in which their forwards begin: the root, a block, its experts ...
        self.reducing = []  # the units whose gradients are travelling
        self.has_optimizer = False  # until somebody asks for parameters()
        taken = set()
        for submodule in reversed([*module.modules()]):  # experts before their block, the root last
            if submodule is module or isinstance(submodule, (unit_class, Experts)):
                params = [param for param in submodule.parameters() if param not in taken]
                taken.update(params)
                group = expert_dp_group if isinstance(submodule, Experts) else None  # the world
                unit = Unit(params, group)
                self.units.insert(0, unit)
                submodule.register_forward_pre_hook(partial(self._pre_forward, unit))
                submodule.register_forward_hook(partial(self._post_forward, unit))
        module.parameters = self.parameters

    def parameters(self):  # this rank's shards, for an elementwise optimizer
        self.has_optimizer = True
        return iter([unit.shard for unit in self.units])

    def _unshard(self, unit, order):
        i = order.index(unit)
        ahead = 1 if unit.group else 2  # while a block computes, the next one and its experts travel
        for each in order[i : i + 1 + ahead]:
            each.unshard()
        unit.wait_for_unshard()

    def _pre_forward(self, unit, *_):
        if unit is self.units[0]:  # the root: a forward begins
            if unit.in_backward:
                raise RuntimeError("a backward failed: build the model and its optimizer anew")
            for each in self.units:  # left by a forward without a backward, maybe with weights out of date
                each.reshard()
            self.backward_order = []
        if not unit.in_backward:  # else activation checkpointing runs its forward again, and it is here
            self._unshard(unit, self.units)

    def _post_forward(self, unit, submodule, args, output):
        if unit.in_backward:
            return
        self.backward_order.insert(0, unit)  # a block ends after its experts, so backward begins with it
        if unit is not self.units[0]:
            unit.reshard()
        if torch.is_grad_enabled():
            output.register_hook(partial(self._pre_backward, unit))

    def _pre_backward(self, unit, *_):
        if unit is self.units[0]:  # a backward begins; autograd calls _end_backward when all of it is done
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._reduce()
        unit.in_backward = True
        self._unshard(unit, self.backward_order)

    def _reduce(self):
        # Backward has reached another unit, so it is done with those that have all their gradients: a block
        # and its experts. They travel during the next block, and have arrived before its own are sent.
        ready = [unit for unit in self.units if all(param.grad is not None for param in unit.params)]
        while ready and self.reducing:
            self.reducing.pop().finish_reduce_scatter()
        for unit in ready:
            unit.reshard()
            unit.start_reduce_scatter()
        self.reducing += ready

    def _end_backward(self):
        self._reduce()
        while self.reducing:
            self.reducing.pop().finish_reduce_scatter()
        if any(unit.in_backward for unit in self.units):
            raise RuntimeError("a parameter has no gradient: each step must use all of them")
        if not self.has_optimizer:
            raise RuntimeError("make the optimizer after wrapping, of the module's parameters()")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float):
        """Scale the gradients to a global norm of at most max_norm. Returns the norm before."""
        grads = [unit.shard.grad for unit in self.units]
        squares = torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).square().sum()
        dist.all_reduce(squares)  # over all ranks, also for experts: no number is in the shards of two ranks
        norm = squares.sqrt()
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1).to(grads[0]))
        return norm

    def full_state_dict(self):
        """On rank 0 the state_dict of the module with all experts, on the CPU; else {}. All ranks call it."""
        weights = {}
        for unit in self.units:
            unit.reshard()
            unit.unshard()
            unit.wait_for_unshard()
            own = {}
            for name, tensor in self.module.state_dict(keep_vars=True).items():
                if tensor in {*unit.params, *self.module.buffers()}:
                    own[name] = tensor.detach().cpu()
            everyone = [None] * dist.get_world_size(self.ep_group)  # who have other experts
            dist.all_gather_object(everyone, own, self.ep_group)
            unit.reshard()
            for theirs in everyone if dist.get_rank() == 0 else []:
                weights |= theirs
        return weights


class Unit:
    """Parameters that a group gathers and reduces together: views of flat_param, which has memory only while
    they are unsharded. shard is this rank's part, which the optimizer updates (in bf16 an fp32 copy)."""

    def __init__(self, params, group):
        self.params = params
        self.group = group
        self.n_shards = dist.get_world_size(group)
        flat = torch.cat([param.detach().flatten() for param in params])
        self.flat_param = F.pad(flat, (0, -len(flat) % self.n_shards))  # to equal parts
        self.own_param = self.flat_param.chunk(self.n_shards)[dist.get_rank(group)]
        shard_dtype = torch.promote_types(flat.dtype, torch.float32)
        self.shard = nn.Parameter(self.own_param.to(shard_dtype, copy=True))
        self.nan = flat.new_tensor(torch.nan)
        self.gather_work = None
        self.reshard()

    def unshard(self):
        storage = self.flat_param.untyped_storage()
        if storage.nbytes() == 0:  # else it is here, or on its way
            storage.resize_(self.flat_param.nbytes)
            self.own_param.copy_(self.shard.data)
            self.gather_work = all_gather(self.flat_param, self.own_param, group=self.group, async_op=True)

    def wait_for_unshard(self):
        if self.gather_work:
            self.gather_work.wait()
            self.gather_work = None
            # Autograd has kept the parameters, or views of flat_param, for backward. Both are right again.
            for param, view in zip(self.params, unflatten(self.flat_param, self.params)):
                param.data = view

    def reshard(self):
        """Free the weights. A NaN takes the place of all numbers of a parameter, so that misuse shows."""
        self.in_backward = False
        self.wait_for_unshard()
        self.flat_param.untyped_storage().resize_(0)
        for param in self.params:
            param.data = self.nan.expand(param.shape)

    def start_reduce_scatter(self):
        self.flat_grad = torch.zeros_like(self.flat_param)  # zeros: for the padding
        for param, view in zip(self.params, unflatten(self.flat_grad, self.params)):
            view.copy_(param.grad)
            param.grad = None
        # Each rank gets its part from all others: a reduce-scatter, of which gloo's own sends twice as much.
        self.received = torch.empty_like(self.flat_grad)
        self.reduce_work = dist.all_to_all_single(
            self.received, self.flat_grad, group=self.group, async_op=True
        )

    def finish_reduce_scatter(self):
        self.reduce_work.wait()
        self.flat_grad.untyped_storage().resize_(0)
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        # Divide by all N ranks, also if the group has N/e. A rank's gradients of experts are sums over the
        # tokens of e ranks. Added up over the group, they are over those of all N, as dense gradients are.
        # To divide by N/e would make them e times too large.
        for gradient in self.received.chunk(self.n_shards):
            self.shard.grad.add_(gradient, alpha=1 / dist.get_world_size())
        self.received.untyped_storage().resize_(0)  # free it, as gloo may still hold the tensor


class MoE(nn.Module):  # expert_parallel.py's, without a capacity
    def __init__(self, width, hidden, experts, top_k, group=None):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts, dtype=torch.float64))  # moves choices
        self.experts = Experts()  # this rank's
        self.experts.group = group
        for i in range(experts):
            # Every rank draws the weights of all, so that they do not depend on the world size.
            up = nn.Linear(width, hidden)
            down = nn.Linear(hidden, width)
            if i * dist.get_world_size(group) // experts == dist.get_rank(group):
                self.experts[str(i)] = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x):
        tokens = x.flatten(0, -2)  # (bs/N, h)
        probs = self.router(tokens).softmax(-1, dtype=self.bias.dtype)  # (bs/N, X)
        _, chosen = (probs + self.bias).topk(self.top_k)  # (bs/N, t)
        gates = probs.gather(-1, chosen)  # without the bias
        if self.top_k > 1:  # a lone gate must stay the probability, or the router gets no gradient
            gates = gates / gates.sum(-1, keepdim=True)
        chosen = chosen.flatten()  # choice j of token i is at i * t + j
        self.load, counts = self.all_gather_counts(chosen)
        share = self.load.to(probs) / counts.sum()  # a constant: only probs has a gradient
        self.balance_loss = share @ probs.mean(0) * len(share)
        by_expert = chosen.argsort(stable=True)  # numbers of choices
        token_ids = by_expert // self.top_k
        outputs = self.experts(tokens[token_ids], counts)
        outputs = outputs * gates.flatten()[by_expert, None].to(x.dtype)
        mixed = torch.zeros_like(tokens).index_add_(0, token_ids, outputs)
        return mixed.view_as(x)

    def all_gather_counts(self, chosen):
        """How many tokens chose each expert (X,), and by rank (N, X). For the latter the host waits."""
        own_counts = F.one_hot(chosen, self.router.out_features).sum(0)
        counts = own_counts.new_empty(dist.get_world_size(), len(own_counts))
        dist.all_gather(list(counts), own_counts)
        return counts.sum(0), counts.cpu()


class Experts(nn.ModuleDict):
    """This rank's. Send rows (ordered by expert) to their experts' ranks, run own experts, return outputs."""

    def forward(self, rows, counts):
        ranks = dist.get_process_group_ranks(self.group)
        group_rank = dist.get_rank(self.group)
        counts = counts[ranks].unflatten(1, (len(ranks), -1))  # (from rank, to rank, its expert)
        sent = counts[group_rank].sum(1).tolist()
        arriving = counts[:, group_rank]  # (from rank, this rank's expert)
        received = arriving.sum(1).tolist()
        rows = AllToAll.apply(rows, sent, received, self.group)  # by rank that they come from, then by expert
        pieces = list(rows.split(arriving.flatten().tolist()))  # rank 0's for each expert, rank 1's ...
        for i, expert in enumerate(self.values()):
            own = slice(i, None, len(self))  # one piece from each rank
            output = expert(torch.cat(pieces[own]))  # run even if empty: .grad must not be None
            pieces[own] = output.split(arriving[:, i].tolist())
        return AllToAll.apply(torch.cat(pieces), received, sent, self.group)


class AllToAll(torch.autograd.Function):
    """Send rank i the next sent[i] rows, and receive received[i] from it. Backward: the other way round."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.back = received, sent, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows, received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous(), *ctx.back), None, None, None


def replace_mlps(model, config, group):
    for block in model.blocks[::2]:
        hidden, width = block.up.weight.shape
        block.moe = MoE(width, hidden, config.experts, config.top_k, group)
        del block.up, block.down
        block.up = block.down = torch.zeros_like  # adds nothing; the hook runs before ExpertZeRO's
        block.register_forward_hook(lambda block, inputs, x: x + block.moe(block.norm2(x)))
    return [block.moe for block in model.blocks[::2]]


def train(config):
    device, text, ep_group, expert_dp_group = set_up_groups(config)
    model = GPT(config)
    mixtures = replace_mlps(model, config, ep_group)
    model.to(device)
    for param in model.parameters():
        param.data = param.data.to(DTYPES[config.dtype])  # but not buffers: biases move by small steps
    zero = ExpertZeRO(model, Block, ep_group, expert_dp_group)
    optimizer = OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = loads = 0
        for batch in microbatches(config, text, step, device):  # of all ranks, each of which takes its part
            inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
            microloss = mean_loss(model(inputs), targets)
            loss += microloss.detach() / config.accum
            total = microloss + config.balance * sum(moe.balance_loss for moe in mixtures)
            (total / config.accum).backward()
            loads += torch.stack([moe.load for moe in mixtures])  # (M, X)
        grad_norm = zero.clip_grad_norm_(config.clip)
        optimizer.step()
        for moe, load in zip(mixtures, loads):
            moe.bias += config.bias_rate * (load.double().mean() - load).sign()
            moe.balance_loss = None  # else the loss's graph, whose hooks have units, is never freed
        model.zero_grad()
        dist.all_reduce(loss)
        print_step(config, step, loss / dist.get_world_size(), grad_norm, started)
    if config.save and (state_dict := zero.full_state_dict()):
        save_weights(state_dict, config.save)


def set_up_groups(config):
    world_size = int(os.getenv("WORLD_SIZE") or 1)
    largest_ep = math.gcd(world_size, config.experts)
    config.ep = config.ep or math.gcd(largest_ep, 2)
    if largest_ep % config.ep:
        refuse(f"--ep {config.ep}: must divide the {world_size} ranks and --experts {config.experts}")
    if config.top_k > config.experts:
        refuse(f"--top-k {config.top_k}: must be at most --experts {config.experts}")
    device, text = set_up(config, f" | {config.experts} experts, top {config.top_k} | ep {config.ep}")
    ranks = np.arange(world_size).reshape(-1, config.ep)  # a row has all experts, a column the same
    expert_dp_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    ep_group, _ = dist.new_subgroups(config.ep)
    return device, text, ep_group, expert_dp_group


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    add = own.add_argument
    add("--experts", type=int, default=8, help="in every other block")
    add("--top-k", type=int, default=2, help="experts of a token")
    add("--ep", type=int, help="ranks among which experts are split (default: 2, if possible)")
    add("--balance", type=float, default=0.01, help="weight of the load-balance loss")
    add("--bias-rate", type=float, default=0, help="by which biases move, such as 0.005")
    return read_flags(arguments, own, balance=(0, 1e9), bias_rate=(0, 1e9))


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
