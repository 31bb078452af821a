"""Peers of the lessons that split a model or its work: PyTorch's DTensor, rings, pipelines and checkpoints.

PEERS: {lesson: {title: build}}, where build(lesson, config, device) returns a Peer.
"""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from peer import AllReduced, Peer, clip_and_step, new_model, squared_norm
from peers_data import half_policy
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as context
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten  # has the kernels of scaled_dot_product_attention, which hides their log-sum-exp


class DTensors(Peer):
    """torch's tensor parallelism, with a loss on split logits; sequence: with norms and sums by tokens."""

    def __init__(self, sequence, lesson, config, device):
        model = new_model(lesson, config, device)
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.sequence = sequence
        for block in model.blocks:
            for param in block.qkv.parameters():
                param.data = self.by_rank(param.data, 3, self.mesh.size())
        parallelize_module(model, self.mesh, self.plan(model))
        by_kind = {}
        for param in model.parameters():
            by_kind.setdefault(type(param), []).append(param)
        self.optimizers = [torch.optim.AdamW(p, lr=config.lr, fused=True) for p in by_kind.values()]
        self.by_kind = by_kind.values()
        super().__init__(lesson, config, model, self.loss, None)

    def plan(self, model):
        """The same layers as the lesson's: {name: how torch splits it}."""
        between = Shard(1) if self.sequence else Replicate()
        plan = {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}
        norms = ["norm"]
        for i, block in enumerate(model.blocks):
            block.heads //= self.mesh.size()
            for name in (f"blocks.{i}.qkv", f"blocks.{i}.up"):
                plan[name] = ColwiseParallel(input_layouts=between)
            for name in (f"blocks.{i}.proj", f"blocks.{i}.down"):
                plan[name] = RowwiseParallel(output_layouts=between)
            norms += [f"blocks.{i}.norm1", f"blocks.{i}.norm2"]
        if self.sequence:
            plan |= {name: SequenceParallel(use_local_output=True) for name in norms}
        return plan

    @staticmethod
    def by_rank(weight, outer, inner):
        """Rows of query, key and value side by side for each rank: (3, N, ...) -> (N, 3, ...), or back."""
        return weight.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2).clone()

    def loss(self, inputs, targets):
        model = self.model
        positions = model.positions.weight[: inputs.shape[1]]
        if self.sequence:
            positions = positions.chunk(self.mesh.size())[self.mesh.get_local_rank()]
        x = model.tokens(inputs) + positions
        for block in model.blocks:
            x = block(x)
        x = DTensor.from_local(model.norm(x), self.mesh, [Shard(1) if self.sequence else Replicate()])
        logits = nn.functional.linear(x.redistribute(placements=[Replicate()]), model.tokens.weight)
        return self.lesson.mean_loss(logits, targets)

    def step(self, batches):
        with loss_parallel():
            for batch in batches:
                (self.loss(*batch) / len(batches)).backward()
        if self.sequence:  # each rank has the gradient of its own tokens' positions
            dist.all_reduce(self.model.positions.weight.grad)
        norm = sum(map(squared_norm, self.by_kind)).sqrt()
        clip_and_step(self.optimizers, norm, self.config.clip)

    def weights(self):
        tensors = super().weights()
        size = self.mesh.size()
        return {name: self.by_rank(x, size, 3) if ".qkv." in name else x for name, x in tensors.items()}


def attend(q, k, v, is_causal):
    """(output, log-sum-exp of each query's scores) by torch's kernel for this device. 0.0: no dropout."""
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)
    return out, lse[..., : q.shape[2]]  # it is padded to a multiple of 32


def attend_backward(grad_out, query, key, value, out, logsumexp, is_causal):
    qkv = query, key, value
    if not query.is_cuda:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad_out, *qkv, out, logsumexp, 0.0, is_causal)
    lse = nn.functional.pad(logsumexp, (0, -query.shape[2] % 32), value=math.inf)  # as the kernel pads it
    needed = True, True, True, False  # gradients: that of the mask is not
    backward = aten._scaled_dot_product_efficient_attention_backward
    return backward(grad_out, *qkv, None, out, lse, None, None, 0.0, needed, is_causal)[:3]


class Mesh2D(Peer):
    """parallelize_module in rows and fully_shard in columns of a DeviceMesh; what the lesson does not split,
    torch does not, either."""

    def __init__(self, lesson, config, device):
        model = new_model(lesson, config, device, "fp32" if config.dtype == "bf16" else None)
        self.tp = config.tp or math.gcd(2, dist.get_world_size())
        mesh = init_device_mesh(device.type, (dist.get_world_size() // self.tp, self.tp), mesh_dim_names="dt")
        plan = {"qkv": ColwiseParallel(), "up": ColwiseParallel()}
        plan |= {"proj": RowwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            block.heads //= self.tp
            for param in block.qkv.parameters():
                param.data = DTensors.by_rank(param.data, 3, self.tp)
            parallelize_module(block, mesh["t"], plan)
            fully_shard(block, mesh=mesh["d"], **half_policy(config))
        fully_shard(model, mesh=mesh["d"], **half_policy(config))
        for block, after in itertools.pairwise(model.blocks):
            block.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([block])
        by_mesh = {}
        for param in model.parameters():
            by_mesh.setdefault(param.device_mesh.ndim, []).append(param)
        self.by_mesh = by_mesh.values()
        make = partial(torch.optim.AdamW, lr=config.lr, fused=True)
        self.optimizers = list(map(make, self.by_mesh))
        super().__init__(lesson, config, model, model, None)

    def step(self, batches):
        for inputs, targets in batches:
            (self.lesson.mean_loss(self.model(inputs), targets) / len(batches)).backward()
        clip_and_step(self.optimizers, sum(map(squared_norm, self.by_mesh)).sqrt(), self.config.clip)

    def weights(self):
        tensors = super().weights().items()
        return {name: DTensors.by_rank(x, self.tp, 3) if ".qkv." in name else x for name, x in tensors}


class TorchRing(torch.autograd.Function):
    """Ring attention by torch's own loops and kernels, with load balancing."""

    @staticmethod
    def forward(ctx, q, k, v):
        ring = context._templated_ring_attention
        out, lse = ring(dist.group.WORLD, 2, attend, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        ring = context._templated_ring_attention_backward
        saved = ctx.saved_tensors
        return ring(dist.group.WORLD, 2, attend_backward, grad, "grad_out", *saved, is_causal=True)

    @classmethod
    def attention(cls, heads, qkv):  # in place of a block's
        q, k, v = (each.transpose(1, 2) for each in qkv.unflatten(-1, (3, heads, -1)).unbind(2))
        return cls.apply(q, k, v).transpose(1, 2).flatten(2)


class Ring(AllReduced):
    """The lesson with torch's ring attention; method: how its keys and values travel."""

    def __init__(self, method, lesson, config, device):
        zigzag = SimpleNamespace(**vars(config) | {"kind": "zigzag"})  # torch's has its order of tokens
        super().__init__(SimpleNamespace(**vars(lesson) | {"GPT": lesson.ContextGPT}), zigzag, device)
        for block in self.model.blocks:
            block.attention = partial(TorchRing.attention, block.heads)
        self.method = method

    def loss(self, inputs, targets):
        return self.lesson.mean_loss(self.model(inputs), targets[:, self.model.own])

    def step(self, batches):
        context.set_rotate_method(self.method)  # of all rings in this process
        context._cp_options.convert_to_f32 = self.config.dtype != "fp64"  # blocks, to be merged
        super().step(batches)


class ShardedExperts(Peer):
    """FSDP2 around the lesson's blocks and all-to-alls: experts are sharded over the ranks that have the same
    ones, all else over all ranks."""

    def __init__(self, lesson, config, device):
        ranks = dist.get_world_size()
        ep = config.ep or math.gcd(ranks, config.experts, 2)  # the lesson's default
        mesh = init_device_mesh(device.type, (ranks // ep, ep), mesh_dim_names=("same", "ep"))
        everyone = init_device_mesh(device.type, (ranks,))
        self.ep_group = mesh["ep"].get_group()
        model = lesson.GPT(config, lesson.MoEBlock)
        for block in model.blocks:
            block.moe.keep_own_experts(self.ep_group)
        model.to(device, lesson.DTYPES["fp32" if config.dtype == "bf16" else config.dtype])
        super().__init__(lesson, config, model, model, None)
        units = []
        for block in model.blocks:
            experts, *others = block.moe.experts.values()
            fully_shard([experts, *others], mesh=mesh["same"], **half_policy(config))
            # These ranks' sum is one over the tokens of all. By sums, as torch would else ask gloo for
            # PREMUL_SUM; but over a group of one rank torch 2.13 divides sums twice, and fp64 always.
            experts.set_gradient_divide_factor(ranks)
            experts.set_force_sum_reduction_for_comms(ranks > ep)
            units.append([fully_shard(block, mesh=everyone, **half_policy(config)), experts])
        fully_shard(model, mesh=everyone, **half_policy(config))
        for before, after in itertools.pairwise(units):
            before[0].set_modules_to_forward_prefetch(after)
            after[0].set_modules_to_backward_prefetch(before)
        params = list(model.parameters())
        self.dense = [param for param in params if param.device_mesh == everyone]
        self.experts = [param for param in params if param.device_mesh != everyone]
        optimizer = partial(torch.optim.AdamW, lr=config.lr, fused=True)
        self.optimizers = [optimizer(self.dense), optimizer(self.experts)]

    def step(self, batches):
        for inputs, targets in batches:
            (self.lesson.mean_loss(self.model(inputs), targets) / len(batches)).backward()
        experts = squared_norm(self.experts)
        dist.all_reduce(experts, group=self.ep_group)
        clip_and_step(self.optimizers, (squared_norm(self.dense) + experts).sqrt(), self.config.clip)

    def weights(self):
        states = [None] * dist.get_world_size(self.ep_group)
        dist.all_gather_object(states, super().weights(), self.ep_group)
        return {name: x for state in states for name, x in state.items()}


SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "zb-v": "ScheduleZBVZeroBubble"}
SCHEDULES["interleaved"] = "ScheduleInterleaved1F1B"


class ToLogits(nn.Module):
    """A Stage of pipeline.py, but for the loss, which torch's schedules compute."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x):
        model = self.stage.model
        if self.stage.is_first:
            x = model.embed(x)
        for block in model.blocks:
            x = block(x)
        return model.head(x) if self.stage.is_last else x


class Staged(Peer):
    """torch's schedule of the same name on the stages of pipeline.py; the rest is the lesson's."""

    def __init__(self, lesson, config, device):
        rank, size = dist.get_rank(), dist.get_world_size()
        stage = lesson.Stage(config, rank, size).to(device)
        super().__init__(
            lesson, config, stage.model, stage, lesson.MasterWeights(stage.parameters(), config.lr)
        )
        self.is_first, self.is_last = stage.is_first, stage.is_last
        self.tied_group = dist.new_group(sorted({0, size - 1}))
        self.runner = getattr(pipelining, SCHEDULES[config.schedule])(
            pipelining.PipelineStage(ToLogits(stage), rank, size, device),
            config.accum,
            loss_fn=lesson.mean_loss,
        )

    def step(self, batches):
        inputs, targets = (torch.cat(part) for part in zip(*batches))
        given = {"target": targets, "losses": []} if self.is_last else {}
        self.runner.step(*((inputs,) if self.is_first else ()), **given)
        params = dict(self.model.named_parameters())
        tied = params.get("tokens.weight")
        if tied is not None:
            dist.all_reduce(tied.grad, group=self.tied_group)
        squares = squared_norm([each for each in params.values() if self.is_first or each is not tied])
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(params.values(), self.config.clip, squares.sqrt())
        self.optimizer.step()

    def weights(self):
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, super().weights())
        return {name: x for state in states for name, x in state.items()}


class TwoStaged(Staged):
    """torch's schedule of the same name on the stages of pipeline_v.py; the rest is the lesson's."""

    def __init__(self, lesson, config, device):
        rank, size = dist.get_rank(), dist.get_world_size()
        is_v = config.schedule != "interleaved"
        numbers = rank, 2 * size - 1 - rank if is_v else size + rank
        one = SimpleNamespace(**vars(config) | {"schedule": "gpipe"})  # torch itself parts W from B
        stages = [lesson.Stage(one, number, 2 * size).to(device) for number in numbers]
        self.is_first, self.is_last = stages[0].is_first, stages[1].is_last
        if self.is_first and self.is_last:
            stages[1].model.tokens = stages[0].model.tokens
        model = lesson.GPT(config)
        for name in ("tokens", "positions", "norm", *(f"blocks.{i}" for i in range(config.layers))):
            parts = [stage.model.get_submodule(name) for stage in stages]
            own = [part for part in parts if not isinstance(part, nn.Identity)]
            model.set_submodule(name, own[0] if own else nn.Identity())
        optimizer = lesson.MasterWeights(model.parameters(), config.lr)
        Peer.__init__(self, lesson, config, model, model, optimizer)
        self.tied_group = dist.new_group([0] if is_v else sorted({0, size - 1}))
        modules = [
            pipelining.PipelineStage(ToLogits(stage), number, 2 * size, device)
            for stage, number in zip(stages, numbers)
        ]
        # scale_grads would divide what two stages of a rank share twice.
        self.runner = getattr(pipelining, SCHEDULES[config.schedule])(
            modules, config.accum, loss_fn=self.share, scale_grads=False
        )

    def share(self, output, target):
        """Of the mean of all microbatches."""
        return self.lesson.mean_loss(output, target) / self.config.accum


class Mesh3D(Peer):
    """parallelize_module, fully_shard and Schedule1F1B on one DeviceMesh, on stages as the lesson's."""

    def __init__(self, lesson, config, device):
        lesson.check(config, dist.get_world_size())
        dp, pp, tp = config.dp, config.pp, config.tp
        mesh = init_device_mesh(device.type, (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))
        self.pipeline, place = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
        ends = torch.arange(dp * pp * tp).view(dp, pp, tp)[:, sorted({0, pp - 1})]
        self.tied_group = lesson.new_group(ends, 1, "tie")
        model = new_model(lesson, config, device)
        stages_of = {"tokens": {0, pp - 1}, "positions": {0}, "norm": {pp - 1}}
        stages_of |= {f"blocks.{i}": {i * pp // config.layers} for i in range(config.layers)}
        for name, stages in stages_of.items():
            if place not in stages:
                model.set_submodule(name, nn.Identity())
        stage = nn.Module()
        stage.model, stage.is_first, stage.is_last = model, place == 0, place == pp - 1
        module = ToLogits(stage)
        super().__init__(lesson, config, model, stage, None)
        plan = {name: RowwiseParallel() for name in ("proj", "down")}
        plan |= {name: ColwiseParallel() for name in ("qkv", "up")}
        for block in model.blocks:
            if isinstance(block, lesson.Block):
                block.heads //= tp
                for param in block.qkv.parameters():
                    param.data = DTensors.by_rank(param.data, 3, tp)
                parallelize_module(block, mesh["tp"], plan)
                fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        named, by_mesh = dict(model.named_parameters()), {}
        for param in named.values():
            by_mesh.setdefault(param.device_mesh.ndim, []).append(param)
        self.optimizers = [torch.optim.AdamW(p, lr=config.lr, fused=True) for p in by_mesh.values()]
        self.tied = named.get("tokens.weight")
        counted = [[p for p in each if stage.is_first or p is not self.tied] for each in by_mesh.values()]
        self.counted = list(filter(None, counted))  # in the norm
        runs = pipelining.PipelineStage(module, place, pp, device, group=self.pipeline)
        self.runner = pipelining.Schedule1F1B(runs, config.accum, loss_fn=lesson.mean_loss)

    def step(self, batches):
        inputs, targets = (torch.cat(part) for part in zip(*batches))
        given = {"target": targets, "losses": []} if self.wrapped.is_last else {}
        self.runner.step(*((inputs,) if self.wrapped.is_first else ()), **given)
        if self.tied is not None:
            dist.all_reduce(self.tied.grad.to_local(), group=self.tied_group)
        squares = sum(map(squared_norm, self.counted))
        dist.all_reduce(squares, group=self.pipeline)
        clip_and_step(self.optimizers, squares.sqrt(), self.config.clip)

    def weights(self):
        tensors = {}
        for name, param in self.model.named_parameters():
            tensor = param.full_tensor().detach()
            tensors[name] = DTensors.by_rank(tensor, self.config.tp, 3) if ".qkv." in name else tensor
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, tensors)
        return {name: tensor for state in states for name, tensor in state.items()}


def checkpointed(lesson, config, device):
    """torch.utils.checkpoint in place of the lesson's, and one all-reduce of all gradients."""
    peer = AllReduced(lesson, config, device)
    lesson.checkpoint = partial(checkpoint, use_reentrant=False)
    for block in peer.model.blocks:
        if config.policy == "selective":
            block.forward = partial(lesson.selective, block)
        elif config.policy != "none":
            block.forward = partial(lesson.checkpoint, block.forward)
    return peer


PEERS = {
    "tensor_parallel": {"torch parallelize_module": partial(DTensors, False)},
    "sequence_parallel": {"torch parallelize_module": partial(DTensors, True)},
    "fsdp_tp": {"parallelize_module, fully_shard, explicit prefetch": Mesh2D},
    "context_parallel": {
        "torch's ring, allgather": partial(Ring, "allgather"),
        "torch's ring, alltoall": partial(Ring, "alltoall"),
    },
    "expert_zero": {"FSDP2, two meshes, explicit prefetch": ShardedExperts},
    "checkpointing": {"torch.utils.checkpoint": checkpointed},
    "fusion": {"one all-reduce by the library": AllReduced},
    "pipeline": {"torch pipelining": Staged},
    "zero_bubble": {},
    "pipeline_v": {"torch pipelining": TwoStaged},
    "parallel_3d": {"torch, all three composed": Mesh3D},
}
