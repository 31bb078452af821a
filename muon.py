"""ZeRO for Muon: as zero1.py, for an optimizer that needs whole matrices: each has an owner, who steps it.

Idea
    Muon orthogonalizes the momentum of each hidden matrix by Newton-Schulz steps: half a matrix is no use. So
    each matrix has an owner: gradients are reduced to it, it steps, and sends the new matrix to all. All else
    goes zero1.py's way, with --optim. With --gather the matrices do, too: a rank has the momentum of 1/N of
    each, and updates are all-gathered first (Distributed Muon, arXiv 2502.16982, section 2.3).

Timeline (a reduce-scatter is a reduce of each part to its rank: here parts are unequal)
    compute |              | forward 1   | forward 2 | backward 2 | backward 1 |                     | step
    network | send rest, 1 | broadcast 2 |           |            | reduce 2   | reduce 1, the rest  |

Memory (bytes; P parameters, H of them in matrices, of which the rank with most owns O; N ranks)
    parameters    wP + c(O+(P-H)/N)     w a weight: fp32 4, bf16 2, fp64 8; c an fp32 copy: bf16 4
    gradients     wP + m(O+(P-H)/N)     m a number that the optimizer sees: max(w, 4)
    optimizer     mO + K(P-H)/N         K the moments: AdamW 2m, SGD 0
    With --gather O is H/N, else a little more. AdamW would take 2m of a matrix's element, Muon takes m.

Sent (bytes that a rank sends in a step, in the mean: in a chain the last of N ranks sends nothing on)
    reduce        wP(N-1)/N             together what zero1.py sends
    broadcast     wP(N-1)/N             without --gather
    broadcast     (wP+qH)(N-1)/N        with --gather, q a number in Newton-Schulz: bf16 2, with fp64 8
    40% of a step's FLOPs are Newton-Schulz's, without --gather 8%.

Run
    torchrun --nproc_per_node=2 muon.py
    torchrun --nproc_per_node=8 muon.py --size gpt2-xl --dtype bf16 --batch 64

Left out
    What zero1.py leaves out; process groups, zero_grad(set_to_none=False), a step after a backward that fails
    or was not `syncing`. Convolutions; query, key and value each for itself. All parts sent in one call. With
    --gather: matrices that few ranks share, so that not all orthogonalize each; all-gathers ahead.
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
import torch.distributed.nn  # first: if torch.optim imports it later, the process group is never freed
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _unflatten_dense_tensors as unflatten


def newton_schulz(matrix):
    """A matrix with the same singular vectors, and all singular values near 1 (between 0.7 and 1.2)."""
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T).T  # xx' is then the smaller square
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):  # x <- ax + (bxx' + c(xx')(xx'))x
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, gram, x, beta=3.4445)
    return x


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for the matrices of these units, of which this rank has its shards.

    Newton-Schulz computes in bf16, as there, but in fp64 if the shards are. All ranks must call step()."""

    def __init__(self, units, lr=1e-3, weight_decay=0.1, momentum=0.95, adjust_lr_fn="original"):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([unit.shard for unit in units], defaults)
        self.units = units
        self.adjust_lr_fn = adjust_lr_fn
        for unit in units:
            self.state[unit.shard]["momentum_buffer"] = torch.zeros_like(unit.shard)

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        for unit in self.units:
            shard = unit.shard
            momentum = self.state[shard]["momentum_buffer"].lerp_(shard.grad, 1 - group["momentum"])
            update = shard.grad.lerp(momentum, group["momentum"])  # Nesterov's
            matrix = unit.whole(update if update.dtype == torch.float64 else update.bfloat16())
            if matrix is None:  # another rank owns it
                continue
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            direction = unit.part_of(newton_schulz(matrix).flatten())
            shard.add_(direction, alpha=-group["lr"] * self.scale(*matrix.shape))

    def scale(self, rows, columns):
        """match_rms_adamw: updates are as large as AdamW's, and one lr serves both (2502.16982, 2.2)."""
        if self.adjust_lr_fn == "original":
            return max(1, rows / columns) ** 0.5
        return 0.2 * max(rows, columns) ** 0.5


class ZeROMuon(nn.Module):
    """Shards the work of Muon, and of another optimizer for the rest, on a module over all ranks.

    `units[1:]`, for Muon, are the matrices (2-D) in submodules of `unit_class` (a class or several); units[0]
    is all else, with a `shard` for any elementwise torch optimizer, which must not take module.parameters().
    After a backward with `syncing`, as a step's last must be, every shard's .grad is the ranks' mean."""

    def __init__(self, module, unit_class, gather=False):
        super().__init__()
        self.module = module
        self.syncing = True
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, 0)
        homes = find_matrices(module, unit_class)
        if not homes or any(param._post_accumulate_grad_hooks for param in module.parameters()):
            raise ValueError(f"there is no matrix in a {unit_class}, or the module is wrapped already")
        rest = [param for param in module.parameters() if param.requires_grad and param not in homes]
        owners, self.imbalance = assign_owners(homes, dist.get_world_size())
        self.units = [Unit(self, module, rest)]
        for matrix, home in homes.items():
            self.units.append(Unit(self, home, [matrix], None if gather else owners[matrix]))
        module.register_forward_pre_hook(self._begin_forward, prepend=True)
        self._protect()

    def parameters(self, recurse=True):
        return iter([unit.shard for unit in self.units])

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def _begin_forward(self, *_):
        for unit in self.units:
            unit.unshard()

    def clip_grad_norm_(self, max_norm):
        """Scale the gradients to a global norm of at most max_norm. Returns the norm before."""
        grads = [unit.shard.grad for unit in self.units]
        if any(grad is None for grad in grads):
            raise RuntimeError("clip after backward, in which all parameters must get a gradient")
        squares = torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).square().sum()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1).to(grads[0]))
        return norm

    @torch.no_grad()
    def full_state_dict(self):
        """The plain module's state_dict. All ranks must call it."""
        for unit in self.units:
            unit.unshard()
            unit.wait_for_unshard()
        return nn.Module.state_dict(self.module)

    # A reader may skip to Unit: this turns mistakes that would go unnoticed into errors.

    def _protect(self):
        for submodule in self.modules():
            for name in ("named_parameters", "load_state_dict", "requires_grad_", "_apply", "__reduce_ex__"):
                setattr(submodule, name, refuse_use.__get__(submodule))
        self.module.state_dict = refuse_use


def refuse_use(*args, **kwargs):
    raise RuntimeError("use parameters() and full_state_dict(); load, freeze, move, copy before you wrap")


class Unit:
    """Parameters of a module as one flat vector. `shard`, an nn.Parameter, is this rank's part: 1/N, or, if
    there is an owner, all or nothing; fp32 for bf16. Parameters become views of flat_param, through .data: an
    all-gather between a forward and its backward is then no error. Gradients move into views of flat_grad."""

    def __init__(self, zero, module, params, owner=None):
        self.zero = zero
        self.weights = params
        self.owner = owner
        self.world_size = dist.get_world_size()
        self.flat_param = torch.cat([param.detach().flatten() for param in params])
        self.flat_grad = torch.zeros_like(self.flat_param)
        self.cuts = self.world_size  # equal parts, or only the owner's is not empty
        if owner is not None:
            self.cuts = [0] * owner + [len(self.flat_param)] * (self.world_size - 1 - owner)
        part = self.part_of(self.flat_param)
        self.shard = nn.Parameter(part.to(torch.promote_types(part.dtype, torch.float32)))
        self.hook = self.gradient_ready
        for weight, view in zip(params, unflatten(self.flat_param, params)):
            weight.data = view
            weight.register_post_accumulate_grad_hook(proxy(self.hook))  # a strong one is never freed
        self.grad_views = dict(zip(params, unflatten(self.flat_grad, params)))
        self.all_gather_works = []
        self.reduce_works = []
        self.unreduced = False  # whether flat_grad has gradients still to be reduced
        module.register_forward_pre_hook(self.wait_for_unshard, prepend=True)

    def part_of(self, flat):
        return flat.tensor_split(self.cuts)[dist.get_rank()]

    def start(self, collective, flat):
        """Start to broadcast each part from its rank, or to reduce it to its rank."""
        parts = enumerate(flat.tensor_split(self.cuts))
        return [collective(part, rank, async_op=True) for rank, part in parts if len(part)]

    def unshard(self):
        """Start to all-gather the weights, if a step may have changed the shards, and for no_grad()."""
        self.fresh = self.shard.grad is None or not torch.is_grad_enabled()
        if self.fresh:
            self.part_of(self.flat_param).copy_(self.shard.data)  # in fp32 the same memory
            self.all_gather_works = self.start(dist.broadcast, self.flat_param)

    def wait_for_unshard(self, *_):
        for work in self.all_gather_works:
            work.wait()

    def gradient_ready(self, weight):
        """Move a weight's gradient into flat_grad. In a step's last backward, start to reduce a matrix's."""
        if self.shard.grad is None:
            if not self.fresh:
                raise RuntimeError("zero_grad() after forward: call it between step() and forward")
            self.flat_grad.zero_()
            self.shard.grad = torch.zeros_like(self.shard)
        self.grad_views[weight].add_(weight.grad, alpha=1 / self.world_size)  # the ranks' sum is a mean
        weight.grad = None
        self.unreduced = True
        if self.zero.syncing:
            if len(self.weights) == 1:  # the others' last gradient comes at the end
                self.start_reduce()
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_reduce)  # after backward

    def start_reduce(self):
        self.unreduced = False
        self.reduce_works = self.start(dist.reduce, self.flat_grad)

    def finish_reduce(self):
        """Wait for the reduces, if there are any, and take the ranks' mean."""
        if self.unreduced:
            self.start_reduce()
        for work in self.reduce_works:
            work.wait()
        if self.reduce_works:
            self.reduce_works = []
            self.shard.grad.add_(self.part_of(self.flat_grad))
            self.flat_grad.zero_()

    def whole(self, update):
        """A matrix of which this rank has its part. None if that is empty."""
        if self.owner is None:
            flat_update = update.new_empty(len(self.flat_param))
            self.part_of(flat_update).copy_(update)
            for work in self.start(dist.broadcast, flat_update):
                work.wait()
            update = flat_update
        return update.view(self.weights[0].shape) if len(update) else None


def find_matrices(module, unit_class):
    """{matrix: the submodule whose forward needs it}, `module` for those that several have."""
    homes = {}
    for submodule in module.modules():
        if isinstance(submodule, unit_class):
            for param in submodule.parameters():
                if param.requires_grad and param.dim() == 2:
                    homes[param] = module if param in homes else submodule
    return homes


def assign_owners(matrices, world_size):
    """({matrix: rank}, the most FLOPs of a rank / the mean). The largest first, to the rank with fewest."""
    owners = {}
    flops = [0] * world_size
    for matrix in sorted(matrices, key=flops_of, reverse=True):
        owners[matrix] = flops.index(min(flops))
        flops[owners[matrix]] += flops_of(matrix)
    return owners, max(flops) * world_size / sum(flops)


def flops_of(matrix):
    p, q = sorted(matrix.shape)
    return 5 * 2 * p * p * (2 * q + p)


def train(config):
    device, text = set_up(config, f" | {config.adjust_lr_fn}{' gather' * config.gather}")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(config).to(device, DTYPES[config.dtype])
    model = ZeROMuon(model, Block, config.gather)
    if rank == 0:
        print(f"Newton-Schulz by owners: the most loaded rank has {model.imbalance:.2f} of the mean")
    rest, *matrices = model.units
    optimizer = OPTIMIZERS[config.optim]([rest.shard], lr=config.lr, fused=True)
    muon = Muon(matrices, lr=config.lr, adjust_lr_fn=config.adjust_lr_fn)
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = 0
        for i, (inputs, targets) in enumerate(microbatches(config, text, step, device, rank, world_size), 1):
            # Gradients add up over microbatches and each loss is a mean: divide to get the batch's mean.
            microloss = mean_loss(model(inputs), targets) / config.accum
            model.syncing = i == config.accum
            microloss.backward()
            loss += microloss.detach()
        grad_norm = model.clip_grad_norm_(config.clip)
        optimizer.step()
        muon.step()
        model.zero_grad()
        dist.all_reduce(loss)
        print_step(config, step, loss / world_size, grad_norm, started)
    if config.save:
        state_dict = model.full_state_dict()
        if rank == 0:
            save_weights(state_dict, config.save)


def parse(arguments=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--gather", action="store_true", help="matrices sharded, their updates all-gathered")
    own.add_argument("--adjust-lr-fn", default="match_rms_adamw", choices=["match_rms_adamw", "original"])
    return read_flags(arguments, own)


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
    if os.getenv("RANK", "") in "0":
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
