"""ZeRO-1 for Muon: as zero1.py, but a matrix is not cut into parts: one rank, its owner, updates all of it.

Idea
    AdamW updates each number by itself, so in zero1.py a rank can update 1/N of any tensor. Muon cannot: it
    orthogonalizes a matrix's momentum, so that rare directions move as much as frequent ones. This makes all
    singular values nearly 1, but for the smallest, and needs the entire matrix (arXiv 2502.16982). So each
    matrix of a transformer block has an owner. A reduce sums the gradients of all ranks on the owner. Only
    the owner has the momentum and updates the matrix. Then a broadcast sends the new matrix to all ranks.
    Each rank owns about as many numbers as the others.

    AdamW updates all other parameters, the root: embeddings, norms and biases. They become one flat tensor,
    which is cut into N parts, one for each rank. The matrices and these parts are called units: tensors that
    one rank owns. (If each part is reduced to its owner, this is a reduce-scatter. If each is broadcast from
    its owner, this is an all-gather. So the root is treated as in zero1.py.)

Timeline (of the root and two matrices; bcast: broadcast)
    compute |               | forward 1 | forward 2 | backward 2 | backward 1 |                | clip, step
    network | bcast root, 1 | bcast 2   |           |            | reduce 2   | reduce 1, root |

Memory (bytes on each of N ranks; P parameters, H of them in matrices; a rank owns at most X of the H)
    parameters    wP + c(X+(P-H)/N)       w = 4 in fp32, 2 in bf16; c = 4 in bf16, for fp32 copies, else 0
    gradients     wP + m(X+(P-H)/N)       m = 4, for averages of what the rank owns
    optimizer     mX + K(P-H)/N           K = 8 for AdamW's two moments, 0 for SGD (fp64: w, m = 8, K = 16)
    Muon has one moment, AdamW two. X is H/N, or more if matrices cannot be dealt out evenly.

Sent (bytes, by each rank in each step; the mean over ranks)
    reduce        wP(N-1)/N               in the last microbatch only
    broadcast     wP(N-1)/N

Run
    torchrun --nproc_per_node=2 more/muon.py
    torchrun --nproc_per_node=8 more/muon.py --size gpt2-xl --dtype bf16 --batch 64

Left out
    The paper's own way (section 2.3), in which matrices are cut, gathered, and orthogonalized by all ranks.
    Choosing: Muon gets every 2-D parameter of a block; query, key and value are one matrix.
    Ranks must start with the same buffers and frozen weights; of all others the owner's count.
    A parameter that is not used is an error; so are parameters(), load_state_dict() or to() of the wrapper.
    All ranks must call forward together and use matrices in the same order, or they hang or mix up gradients.
    Not noticed:
    - an optimizer of anything but `shards`, such as one made before wrapping, trains nothing;
    - an optimizer of the root that is not elementwise; an update or clipping before a step's last backward;
    - a second last backward replaces the gradients of the first; zero_grad() between the backwards of a step
      keeps what they have added up;
    - a unit_class without matrices; wrapping twice; loading, moving or casting the module in the wrapper;
    - a parameter that is added or unfrozen after wrapping is not trained; freezing a shard has no effect;
    - root parameters of several dtypes get the widest; buffers, such as BatchNorm's, are not averaged;
    - torch's own clip_grad_norm_ and GradScaler look at what this rank owns;
    - gradients of backward(create_graph=True) are lost;
    - a matrix that is used outside of its submodule's forward, or a submodule, or the module, that is called
      alone after an update, may be old;
    - each evaluation sends the weights again.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from weakref import proxy

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before set_up(), or it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F


def newton_schulz(X):
    """A matrix with X's singular vectors, and singular values near 1 (0.7 to 1.2), but for X's smallest."""
    if X.shape[0] > X.shape[1]:
        return newton_schulz(X.mT).mT  # X @ X.mT is then the smaller one of two squares
    a, b, c = 3.4445, -4.7750, 2.0315
    X = X / X.norm().clamp(min=1e-7)
    # Each singular value s becomes a s + b s^3 + c s^5. After five times it is near 1.
    for _ in range(5):
        A = X @ X.mT
        B = torch.addmm(A, A, A, beta=b, alpha=c)  # b * A + c * A @ A
        X = torch.addmm(X, B, X, beta=a)  # a * X + B @ X
    return X


class Muon(torch.optim.Optimizer):
    """Updates the matrices that this rank owns, and sends nothing."""

    def __init__(self, matrices, lr):
        super().__init__([{"params": matrices}], {"lr": lr})
        for matrix in matrices:
            self.state[matrix]["momentum"] = torch.zeros_like(matrix)

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        lr, weight_decay, beta = group["lr"], 0.1, 0.95
        for matrix in group["params"]:
            momentum = self.state[matrix]["momentum"].lerp_(matrix.grad, 1 - beta)
            update = matrix.grad.lerp(momentum, beta)  # Nesterov's: it looks a step ahead
            update = newton_schulz(update if update.dtype == torch.float64 else update.bfloat16())
            matrix.mul_(1 - lr * weight_decay)
            # Its numbers are about max(shape) ** -0.5 large, those of AdamW's update 0.2: one lr serves both.
            matrix.add_(update, alpha=-lr * 0.2 * max(matrix.shape) ** 0.5)


class ZeROMuon(nn.Module):
    """Wraps a module, in which Muon updates the matrices of all submodules of unit_class. Without overlap, a
    step would be

        loss.backward()
        for matrix in matrices:
            reduce(matrix.grad, owner[matrix])  # the owner gets the sum of all ranks' gradients
            if owner[matrix] == rank:
                muon_update(matrix)
            broadcast(matrix, owner[matrix])  # all ranks get the new matrix

    This has two problems. Nothing is computed while messages travel. And while an owner computes an update,
    all other ranks wait for the new matrix. So here a matrix's reduce starts as soon as backward has its
    gradient, and backward goes on meanwhile. Then all ranks update at the same time, each its own matrices.
    The broadcasts start with the next forward, in which each submodule waits only for its own matrices.

    shards: this rank's part of the root, for an elementwise optimizer; then its matrices, for Muon.
    To accumulate gradients over several backwards, set is_last_backward to False for all but the last one."""

    def __init__(self, module: nn.Module, unit_class: type):
        super().__init__()
        self.module = module
        self.is_last_backward = True
        self.accumulating = False  # between the backwards of a step: there are no new weights then
        self.n_waiting = 0  # during backward: parameters that do not have their gradient yet
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.root_units, self.matrix_units = make_units(module, unit_class, self.params)
        self.units = [*self.root_units, *self.matrix_units.values()]
        self.shards = [unit.shard for unit in self.units if unit.is_own]
        # Autograd calls _gradient_ready when a parameter has its gradient. (It keeps what it calls alive, and
        # so the model, forever: it gets a proxy, which keeps nothing.)
        self.hook = self._gradient_ready
        for param in self.params:
            param.register_post_accumulate_grad_hook(proxy(self.hook))

    def forward(self, *args, **kwargs):
        self._check()
        # The new weights start to travel, all at once, and each submodule's forward waits for its own. (Not
        # earlier: this class does not see the update.)
        if not self.accumulating:
            self._start_broadcasts()
        return self.module(*args, **kwargs)

    def _start_broadcasts(self):
        for unit in self.units:
            if unit.is_own:
                unit.param.copy_(unit.shard.data)  # for bf16
        for unit in self.units:
            unit.start_broadcast()

    def _gradient_ready(self, param):
        if not self.n_waiting:  # this is the first gradient of this backward
            self.n_waiting = len(self.params)
            # Autograd calls _end_backward when this whole backward is done.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self.n_waiting -= 1
        # A matrix's gradient travels while backward computes the next ones.
        if self.is_last_backward and param in self.matrix_units:
            self.matrix_units[param].start_reduce()

    def _end_backward(self):
        self._check()
        if self.is_last_backward:
            # The root gets its last gradient at the end, from the embedding: only now can these start.
            for unit in self.root_units:
                unit.start_reduce()
            for unit in self.units:
                unit.reduce_work.wait()
            for unit in self.units:
                unit.finish_reduce()
        self.accumulating = not self.is_last_backward

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float):
        """Scale the gradients to a global norm of at most max_norm. Returns the norm before."""
        # In pieces: a CPU makes an fp64 copy of each, which its cache holds if the piece is small.
        grads = [piece for shard in self.shards for piece in shard.grad.flatten().split(2**20)]
        squares = torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).square().sum()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(self.shards, max_norm, norm.to(grads[0]))
        return norm

    def full_state_dict(self):
        """The plain module's state_dict. All ranks must call it."""
        self._start_broadcasts()
        for unit in self.units:
            unit.wait_broadcast()
        return self.module.state_dict()

    # A reader may skip to Unit: this turns mistakes that would go unnoticed into errors.

    def _check(self):
        if self.n_waiting:
            raise RuntimeError("a backward failed, or left a parameter without a gradient: all must get one")

    def _refuse(self, *args, **kwargs):
        raise RuntimeError("use shards and full_state_dict(); load, freeze, move or cast before you wrap")

    named_parameters = state_dict = load_state_dict = _apply = _refuse


class Unit:
    """A tensor that one rank owns: a matrix, or 1/N of the root. Autograd adds up its gradients in grad.

    On its owner it has a shard, which an optimizer updates: in bf16 an fp32 copy, else the same memory."""

    def __init__(self, submodule, param, grad, owner):
        self.param = param
        self.grad = grad
        self.owner = owner
        self.is_own = owner == dist.get_rank()
        if self.is_own:
            self.shard = nn.Parameter(param.to(torch.promote_types(param.dtype, torch.float32)))
        submodule.register_forward_pre_hook(self.wait_broadcast, prepend=True)

    def start_broadcast(self):
        self.broadcast_work = dist.broadcast(self.param, self.owner, async_op=True)

    def wait_broadcast(self, *_):
        self.broadcast_work.wait()

    def start_reduce(self):
        self.reduce_work = dist.reduce(self.grad, self.owner, async_op=True)

    def finish_reduce(self):
        if self.is_own:
            self.shard.grad = self.grad.to(self.shard.dtype) / dist.get_world_size()  # the ranks' average
        self.grad.zero_()


def make_units(module, unit_class, params):
    """([the root's unit of each rank], {matrix: its unit})"""
    matrices = find_matrices(module, unit_class)
    for param in params:
        param.grad = torch.zeros_like(param)
    # The root's parameters, and its gradients, become views of a flat tensor, of which each rank owns a part.
    n_ranks = dist.get_world_size()
    root = [param for param in params if param not in matrices]
    param_parts = flatten(root).tensor_split(n_ranks)
    grad_parts = flatten([param.grad for param in root]).tensor_split(n_ranks)
    root_parts = enumerate(zip(param_parts, grad_parts))
    root_units = [Unit(module, *parts, owner) for owner, parts in root_parts]
    matrix_units = {}
    owners = assign_owners(matrices, n_ranks)
    for matrix, submodule in matrices.items():
        matrix_units[matrix] = Unit(submodule, matrix.data, matrix.grad, owners[matrix])
    return root_units, matrix_units


def flatten(tensors):
    """Make these tensors views of a flat one, and return it."""
    flat = nn.utils.parameters_to_vector(tensors).detach()
    nn.utils.vector_to_parameters(flat, tensors)
    return flat


def find_matrices(module, unit_class):
    """{matrix: the submodule that waits for it}: if several submodules share it, the whole module does."""
    users = {}
    for submodule in module.modules():
        if isinstance(submodule, unit_class):
            for param in submodule.parameters():
                if param.requires_grad and param.dim() == 2:
                    users[param] = module if param in users else submodule
    return users


def assign_owners(matrices, world_size):
    """{matrix: rank}: the largest first, each to the rank that owns the least so far."""
    owners = {}
    owned = [0] * world_size
    for matrix in sorted(matrices, key=torch.numel, reverse=True):
        owners[matrix] = owned.index(min(owned))
        owned[owners[matrix]] += matrix.numel()
    return owners


def train(config):
    device, text = set_up(config)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(device, DTYPES[config.dtype])
    model = ZeROMuon(model, Block)
    root, *matrices = model.shards
    muon = Muon(matrices, lr=config.lr)
    optimizer = OPTIMIZERS[config.optim]([root], lr=config.lr, fused=True)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        for i, (inputs, targets) in enumerate(microbatches(config, text, step, device, rank, world_size), 1):
            model.is_last_backward = i == config.accum
            # Each loss is a mean, and gradients add up over microbatches: divide to get the batch's mean.
            microloss = mean_loss(model(inputs), targets) / config.accum
            microloss.backward()
            loss += microloss.detach()
        grad_norm = model.clip_grad_norm_(config.clip)
        optimizer.step()
        muon.step()
        optimizer.zero_grad()
        muon.zero_grad()
        dist.all_reduce(loss)
        print_step(config, step, loss / world_size, grad_norm, started)
    if config.save:
        state_dict = model.full_state_dict()
        if rank == 0:
            save_weights(state_dict, config.save)


def parse(arguments=None):
    return read_flags(arguments)


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
