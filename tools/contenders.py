"""Who takes part in tools/bench.py: a lesson as its own train() builds it, and its peers."""

import functools
import importlib.util
import itertools
import logging
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from bench import ALONE
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ddp

# {schedule of pipeline.py: that of torch.distributed.pipelining}
SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}


class Contender:
    """A model of its own and one way to train it.

    weights(): its state_dict, with the help of all ranks.
    """

    def __init__(self, model, wrapped, optimizer, weights=None, clip=None):
        self.model, self.wrapped, self.optimizer = model, wrapped, optimizer
        self.weights = weights or model.state_dict
        self.clip = clip or (
            lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf"))
        )

    def step(self, batches, config):
        for i, batch in enumerate(batches, start=1):
            wait = i == len(batches) or not hasattr(self.wrapped, "no_sync")
            with nullcontext() if wait else self.wrapped.no_sync():
                (self.wrapped(*batch) / len(batches)).backward()
        self.clip(config.clip)
        self.optimizer.step()
        self.model.zero_grad()


class DeepSpeed(Contender):
    """Its engine clips and steps by itself. In stage 3 no parameter stays whole, as in zero3.py.

    tuned: with buckets of a fifth of the model, as ddp.py's, in place of 5e8 elements.
    """

    def __init__(self, stage, overlap, tuned, lesson, config, device):
        self.stage, self.model = stage, new_model(lesson, config, device)
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        import deepspeed

        zero = {"stage": stage, "overlap_comm": overlap, "contiguous_gradients": True}
        zero |= {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
        if tuned:
            elements = sum(p.numel() for p in self.model.parameters()) // 10 * 2  # which must be even
            zero |= {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=lesson.OPTIMIZERS[config.optim](self.model.parameters(), lr=config.lr, fused=True),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": config.batch // dist.get_world_size() // config.accum,
                "gradient_accumulation_steps": config.accum,
                "gradient_clipping": config.clip,
                "bf16": {"enabled": config.dtype == "bf16"},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": zero,
            },
        )
        self.gathered = lambda: deepspeed.zero.GatheredParameters(list(self.model.parameters()))

    def step(self, batches, config):
        for batch in batches:
            self.engine.backward(self.engine(*batch))
            self.engine.step()

    def weights(self):
        with self.gathered() if self.stage == 3 else nullcontext():
            return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


class Pipelined(Contender):
    """pipeline.py's own, or a schedule of torch.distributed.pipelining on the same stages."""

    def __init__(self, lesson, config, device, peer=None):
        self.peer = peer
        self.model = new_model(lesson, config, device)
        layers = [lesson.Embed(self.model), *self.model.blocks, lesson.Head(self.model)]
        n_stages, rank = dist.get_world_size() * config.chunks, dist.get_rank()
        ends = lesson.split_layers(lesson.layer_costs(layers, None, "params"), n_stages)
        schedule = lesson.build_schedule(config.schedule, dist.get_world_size(), config.accum, config.chunks)
        self.pipe = lesson.Pipeline(layers, ends, lesson.mean_loss, schedule)
        self.pipe.device = device
        params, options = self.pipe.parameters(), {"lr": config.lr, "fused": True}
        self.optimizer = lesson.Optimizer(params, lesson.OPTIMIZERS[config.optim], **options)
        self.weights = lambda: self.pipe.gather(self.optimizer.state_dict_of(self.model)) or {}
        if peer:
            stages = [
                pipelining.PipelineStage(stage, int(number), n_stages, device)
                for number, stage in self.pipe.stages.items()
            ]
            stages = stages if config.chunks > 1 else stages[0]
            self.runner = getattr(pipelining, peer)(stages, config.accum, loss_fn=lesson.mean_loss)
            self.first, self.last = rank == 0, rank == dist.get_world_size() - 1

    def step(self, batches, config):
        inputs, targets = zip(*batches)
        if self.peer:
            whole = (torch.cat(inputs),) if self.first else ()
            self.runner.step(*whole, **({"target": torch.cat(targets), "losses": []} if self.last else {}))
            for param, tie in self.pipe.tied:
                dist.all_reduce(param.grad, group=tie)
        else:
            self.pipe.step(inputs, targets)
        self.pipe.clip_grad_norm_(config.clip)
        self.optimizer.step()
        self.model.zero_grad()


def tensor_parallel(lesson, config, device):
    torch.manual_seed(config.seed)
    model = lesson.ParallelGPT(config).to(device, lesson.DTYPES[config.dtype])
    wrapped = lesson.TensorParallel(model, lesson.PLAN, config.sequence_parallel, config.overlap)
    optimizer = lesson.Optimizer(
        model.parameters(), lesson.OPTIMIZERS[config.optim], lr=config.lr, fused=True
    )
    weights = lambda: wrapped.gather(optimizer.state_dict_of(model))  # noqa: E731
    return Contender(model, wrapped, optimizer, weights, wrapped.clip_grad_norm_)


class OfDTensors(nn.Module):
    """The lesson's GPT, split by torch's parallelize_module, with a loss on split logits."""

    def __init__(self, gpt, mesh, sequence):
        super().__init__()
        self.gpt, self.mesh, self.sequence = gpt, mesh, sequence
        between = Shard(1) if sequence else Replicate()
        enter = {"input_layouts": between} if sequence else {}
        plan = {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}
        for i, block in enumerate(gpt.blocks):
            block.heads //= mesh.size()
            plan |= {f"blocks.{i}.{name}": ColwiseParallel(**enter) for name in ("qkv", "up")}
            leave = {"output_layouts": between}
            plan |= {f"blocks.{i}.{name}": RowwiseParallel(**leave) for name in ("proj", "down")}
            if sequence:
                plan |= {
                    f"blocks.{i}.{name}": SequenceParallel(use_local_output=True)
                    for name in ("norm1", "norm2")
                }
        if sequence:
            plan["norm"] = SequenceParallel(use_local_output=True)
        parallelize_module(gpt, mesh, plan)

    def forward(self, inputs, targets):
        positions = self.gpt.positions.weight[: inputs.shape[1]]
        if self.sequence:
            positions = positions.chunk(self.mesh.size())[self.mesh.get_local_rank()]
        x = self.gpt.tokens(inputs) + positions
        for block in self.gpt.blocks:
            x = block(x)
        x = DTensor.from_local(self.gpt.norm(x), self.mesh, [Shard(1) if self.sequence else Replicate()])
        logits = torch.nn.functional.linear(x.redistribute(placements=[Replicate()]), self.gpt.tokens.weight)
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        return nn.functional.cross_entropy(logits, targets.flatten())


class OnDTensors(Contender):
    """Its loss and backward stand within loss_parallel()."""

    def step(self, batches, config):
        with loss_parallel():
            for batch in batches:
                (self.wrapped(*batch) / len(batches)).backward()
        if self.wrapped.sequence:  # of a plain parameter, each rank has heard of its own tokens
            dist.all_reduce(self.model.positions.weight.grad)
        self.clip(config.clip)
        self.optimizer.step()
        self.model.zero_grad()


def by_rank(weight, ranks, back=False):
    """Rows of query, key and value as ranks need them, side by side: (3, N, ...) -> (N, 3, ...)."""
    parts = (ranks, 3) if back else (3, ranks)
    return weight.unflatten(0, (*parts, -1)).transpose(0, 1).flatten(0, 2)


def dtensor(lesson, config, device):
    model, ranks = new_model(lesson, config, device), dist.get_world_size()
    for block in model.blocks:
        for param in block.qkv.parameters():
            param.data = by_rank(param.data, ranks).clone()
    mesh = init_device_mesh(device.type, (ranks,))
    wrapped = OfDTensors(model, mesh, config.sequence_parallel)
    options = {"lr": config.lr, "fused": True}
    of_dtensors = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizers = [lesson.OPTIMIZERS[config.optim](params, **options) for params in (of_dtensors, plain)]

    def step():
        for optimizer in optimizers:
            optimizer.step()

    def weights():
        tensors = whole(model.state_dict()).items()
        return {key: by_rank(x, ranks, back=True) if ".qkv." in key else x for key, x in tensors}

    def clip(limit):
        squares = torch.zeros((), dtype=torch.double, device=device)
        for params in (of_dtensors, plain):
            norm = nn.utils.get_total_norm([p.grad for p in params])
            squares += getattr(norm, "full_tensor", lambda norm=norm: norm)().double().square()
        scale = (limit / (squares.sqrt() + 1e-6)).clamp(max=1) if limit else 1
        for p in model.parameters():
            p.grad.mul_(scale)

    return OnDTensors(model, wrapped, SimpleNamespace(step=step), weights, clip)


def with_optimizer(lesson, config, model, wrapped):
    params, options = model.parameters(), {"lr": config.lr, "fused": True}
    optimizer = lesson.Optimizer(params, lesson.OPTIMIZERS[config.optim], **options)
    return Contender(model, wrapped, optimizer, lambda: optimizer.state_dict_of(model))


def checkpointed(lesson, config, device):
    torch.manual_seed(config.seed)
    model = lesson.CheckpointedGPT(config).to(device, lesson.DTYPES[config.dtype])
    lesson.apply_policy(model, config, device)
    return with_optimizer(lesson, config, model, model)


class TorchCheckpointed(nn.Module):
    """The lesson's GPT whose blocks stand in torch.utils.checkpoint."""

    def __init__(self, gpt, lesson, config):
        super().__init__()
        self.gpt, self.mean_loss, self.every = gpt, lesson.mean_loss, config.every
        self.options = {}
        if config.policy == "selective":

            def policy(context, function, *args, **kwargs):
                keep = function in lesson.EXPENSIVE
                return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

            self.options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)

    def forward(self, inputs, targets):
        x = self.gpt.tokens(inputs) + self.gpt.positions.weight[: inputs.shape[1]]
        for i, block in enumerate(self.gpt.blocks):
            chosen = i % self.every == 0
            x = checkpoint(block, x, use_reentrant=False, **self.options) if chosen else block(x)
        logits = nn.functional.linear(self.gpt.norm(x), self.gpt.tokens.weight)
        return self.mean_loss(logits, targets)


def torch_checkpointed(lesson, config, device):
    model = new_model(lesson, config, device)
    return with_optimizer(lesson, config, model, TorchCheckpointed(model, lesson, config))


def fsdp2(reshard, prefetch, lesson, config, device):
    """Units as in zero3.py, and what is in none stays whole, as there. In bf16 with fp32 masters."""
    torch.manual_seed(config.seed)
    model = lesson.GPT(config).to(device, lesson.DTYPES["fp32" if config.dtype == "bf16" else config.dtype])
    mixed = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}
    policy = mixed if config.dtype == "bf16" else {}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **policy)
    fully_shard(model, **policy)
    if prefetch:
        for block, after in itertools.pairwise(model.blocks):
            block.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([block])
    optimizer = lesson.OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    return Contender(model, model, optimizer, lambda: whole(model.state_dict()))


def whole(state_dict):
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state_dict.items()}


def new_model(lesson, config, device):
    torch.manual_seed(config.seed)
    return lesson.GPT(config).to(device, lesson.DTYPES[config.dtype])


def plain(wrap, lesson, config, device):
    """The lesson's model, with an optimizer that knows nothing of ranks."""
    model = new_model(lesson, config, device)
    return with_optimizer(ddp, config, model, wrap(model))


def ddp_with_zero(options, lesson, config, device):
    model = new_model(lesson, config, device)
    optimizer_class = lesson.OPTIMIZERS[config.optim]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=config.lr, fused=True)
    return Contender(model, DistributedDataParallel(model, **options), optimizer)


def ours(lesson, config, device):
    """The lesson, put together as in its own train()."""
    whole = {"pipeline": Pipelined, "tensor_parallel": tensor_parallel, "checkpointing": checkpointed}
    if lesson.__name__ in whole:
        return whole[lesson.__name__](lesson, config, device)
    zero3 = lesson.__name__ == "zero3"  # whose model is whole on the CPU alone
    model = new_model(lesson, config, "cpu" if zero3 else device)
    is_unit = lambda submodule: isinstance(submodule, lesson.UNITS[config.unit])  # noqa: E731
    wrap = {
        "ddp": lambda: lesson.DDP(model, config.bucket_mb, config.overlap),
        "zero1": lambda: lesson.ZeRO1(model, is_unit, config.overlap),
        "zero2": lambda: lesson.ZeRO2(model, is_unit, config.overlap),
        "zero3": lambda: lesson.ZeRO3(model, is_unit, config.prefetch, config.keep, device),
    }
    wrapped = wrap[lesson.__name__]()
    over = model.parameters() if lesson.__name__ == "ddp" else wrapped
    optimizer = lesson.Optimizer(over, lesson.OPTIMIZERS[config.optim], lr=config.lr, fused=True)
    weights = lambda: optimizer.state_dict_of(model)  # noqa: E731
    return Contender(model, wrapped, optimizer, weights, wrapped.clip_grad_norm_)


def contenders(lesson, config, device, also):
    """{title: function that builds it}, the lesson first; None for what is not installed.

    also: {title: other flags of the lesson}.
    """
    name, of = lesson.__name__, (lesson, config, device)
    entries = {f"{name}.py": lambda: ours(*of)}
    entries |= {title: lambda other=other: ours(lesson, other, device) for title, other in also.items()}
    entries[ALONE] = lambda: plain(lambda model: model, *of)
    no_masters = ", no masters" * (config.dtype == "bf16")  # so they do less work than the lessons
    with torch.device("meta"):
        size = sum(p.nbytes for p in lesson.GPT(config).to(lesson.DTYPES[config.dtype]).parameters())
    cap = getattr(config, "bucket_mb", None)
    same = {"bucket_cap_mb": min(size / 5 / 2**20, 25) if cap is None else cap}  # ddp.py's
    buckets = f", {same['bucket_cap_mb']:.1f} MiB buckets"
    if name in ("ddp", "zero1"):
        entries["torch DDP, defaults"] = lambda: plain(DistributedDataParallel, *of)
    if name == "ddp":
        for title, options in ("", same), (", views", same | {"gradient_as_bucket_view": True}):
            wrap = functools.partial(DistributedDataParallel, **options)
            entries[f"torch DDP{buckets}{title}"] = functools.partial(plain, wrap, *of)
    if name == "zero1":
        for title, options in ("", {}), (buckets, same | {"gradient_as_bucket_view": True}):
            title = f"DDP + ZeroRedundancyOptimizer{title}{no_masters}"
            entries[title] = functools.partial(ddp_with_zero, options, *of)
    if name == "zero3":
        for title, how in ("", (True, False)), (", prefetch", (True, True)), (", no reshard", (False, False)):
            entries[f"torch FSDP2{title}"] = functools.partial(fsdp2, *how, *of)
    if name.startswith("zero"):
        stage, installed = int(name[-1]), importlib.util.find_spec("deepspeed")
        for title, how in (
            ("", (True, False)),
            (", no overlap", (False, False)),
            (", P/5 buckets", (True, True)),
        ):
            build = functools.partial(DeepSpeed, stage, *how, *of)
            entries[f"DeepSpeed stage {stage}{title}"] = build if installed else None
    if name == "tensor_parallel":
        entries[f"torch parallelize_module{no_masters}"] = lambda: dtensor(*of)
    if name == "pipeline" and config.schedule in SCHEDULES:
        peer = SCHEDULES[config.schedule]
        entries[f"torch {peer}"] = lambda: Pipelined(*of, peer)
    if name == "checkpointing" and config.policy in ("full", "selective"):
        entries[f"torch.utils.checkpoint, {config.policy}"] = lambda: torch_checkpointed(*of)
    return entries
