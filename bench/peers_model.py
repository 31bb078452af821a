"""Peers of the lessons that split a model or its work: PyTorch's DTensor, rings, pipelines and checkpoints.

PEERS: {lesson: {title: build}}, where build(lesson, config, device) returns a Peer.
"""

import itertools
import math
from functools import partial
from unittest import mock

import numpy as np
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
        optimizer_class = lesson.OPTIMIZERS[config.optim]
        self.optimizers = [optimizer_class(p, lr=config.lr, fused=True) for p in by_kind.values()]
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


class TorchRing(torch.autograd.Function):
    """Ring attention by torch's own loops, with load balancing, around the lesson's kernels."""

    @staticmethod
    def forward(ctx, lesson, q, k, v):
        def attend(q, k, v, is_causal):
            out, lse = lesson.attend(q, k, v, None, is_causal)
            return out, lse.squeeze(-1)

        ring = context._templated_ring_attention
        out, lse = ring(dist.group.WORLD, 2, attend, q, k, v, is_causal=True)
        ctx.lesson = lesson
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        def attend_backward(grad_out, query, key, value, out, logsumexp, is_causal):
            lse = logsumexp.unsqueeze(-1)
            return ctx.lesson.attend_backward(grad_out, out, lse, query, key, value, None, is_causal)

        ring = context._templated_ring_attention_backward
        saved = ctx.saved_tensors
        return None, *ring(dist.group.WORLD, 2, attend_backward, grad, "grad_out", *saved, is_causal=True)


class Ring(AllReduced):
    """The lesson with torch's ring attention; method: how its keys and values travel."""

    def __init__(self, method, lesson, config, device):
        super().__init__(lesson, config, device)
        assert not config.documents, "the peers' rows are of one document: run without --documents"
        self.method = method
        self.own = lesson.Layout(torch.zeros(1, config.context, dtype=torch.bool), zigzag=True).shard

    def attention(self, q, k, v, is_causal):
        return TorchRing.apply(self.lesson, q, k, v)

    def loss(self, inputs, targets):
        weights = dict(self.model.named_parameters())
        weights["positions.weight"] = self.own(weights["positions.weight"], 0)
        with mock.patch.object(nn.functional, "scaled_dot_product_attention", self.attention):
            logits = torch.func.functional_call(self.model, weights, self.own(inputs, 1))
        return self.lesson.mean_loss(logits, self.own(targets, 1))

    def step(self, batches):
        context.set_rotate_method(self.method)  # of all rings in this process
        context._cp_options.convert_to_f32 = self.config.dtype != "fp64"  # blocks, to be merged
        super().step(batches)


class ShardedExperts(Peer):
    """FSDP2 around the lesson's mixtures and all-to-alls: experts are sharded over the ranks that have the
    same ones, all else over all ranks. Each rank computes its part of the rows."""

    def __init__(self, lesson, config, device):
        ranks = dist.get_world_size()
        ep = config.ep or math.gcd(ranks, config.experts, 2)  # the lesson's default
        model = new_model(lesson, config, "cpu", "fp32" if config.dtype == "bf16" else None)
        mesh = init_device_mesh(device.type, (ranks // ep, ep), mesh_dim_names=("same", "ep"))
        self.ep_group = mesh["ep"].get_group()
        self.mixtures = lesson.replace_mlps(model, config, self.ep_group)
        for param in model.to(device).parameters():
            param.data = param.data.to(model.tokens.weight.dtype)  # of mixtures, too
        super().__init__(lesson, config, model, model, None)
        everyone = init_device_mesh(device.type, (ranks,))
        units = []
        for block in model.blocks:
            units.append([block, *([block.moe.experts] if hasattr(block, "moe") else [])])
            for experts in units[-1][1:]:
                fully_shard(experts, mesh=mesh["same"], **half_policy(config))
                # These ranks' sum is one over the tokens of all. By sums, as torch would else ask gloo for
                # PREMUL_SUM; but over a group of one rank torch 2.13 divides sums twice, and fp64 always.
                experts.set_gradient_divide_factor(ranks)
                experts.set_force_sum_reduction_for_comms(ranks > ep)
            fully_shard(block, mesh=everyone, **half_policy(config))
        fully_shard(model, mesh=everyone, **half_policy(config))
        for before, after in itertools.pairwise(units):
            before[0].set_modules_to_forward_prefetch(after)
            after[0].set_modules_to_backward_prefetch(before)
        params = list(model.parameters())
        self.dense = [param for param in params if param.device_mesh == everyone]
        self.experts = [param for param in params if param.device_mesh != everyone]
        optimizer = partial(lesson.OPTIMIZERS[config.optim], lr=config.lr, fused=True)
        self.optimizers = [optimizer(self.dense), optimizer(self.experts)]

    def step(self, batches):
        size, rank = dist.get_world_size(), dist.get_rank()
        for batch in batches:
            inputs, targets = (part.chunk(size)[rank] for part in batch)
            loss = self.lesson.mean_loss(self.model(inputs), targets)
            loss = loss + self.config.balance * sum(moe.balance_loss for moe in self.mixtures)
            (loss / len(batches)).backward()
        experts = squared_norm(self.experts)
        dist.all_reduce(experts, group=self.ep_group)
        clip_and_step(self.optimizers, (squared_norm(self.dense) + experts).sqrt(), self.config.clip)

    def weights(self):
        states = [None] * dist.get_world_size(self.ep_group)
        dist.all_gather_object(states, super().weights(), self.ep_group)
        return {name: x for state in states for name, x in state.items()}


SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "zb-v": "ScheduleZBVZeroBubble"}


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
        self.tied_group = dist.new_group(sorted({0, size - 1}))
        self.runner = getattr(pipelining, SCHEDULES[config.schedule])(
            pipelining.PipelineStage(ToLogits(stage), rank, size, device),
            config.accum,
            loss_fn=lesson.mean_loss,
        )

    def step(self, batches):
        inputs, targets = (torch.cat(part) for part in zip(*batches))
        given = {"target": targets, "losses": []} if self.wrapped.is_last else {}
        self.runner.step(*((inputs,) if self.wrapped.is_first else ()), **given)
        params = dict(self.model.named_parameters())
        tied = params.get("tokens.weight")
        if tied is not None:
            dist.all_reduce(tied.grad, group=self.tied_group)
        squares = squared_norm(
            [each for each in params.values() if self.wrapped.is_first or each is not tied]
        )
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(params.values(), self.config.clip, squares.sqrt())
        self.optimizer.step()

    def weights(self):
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, super().weights())
        return {name: x for state in states for name, x in state.items()}


class Pipelined(Peer):
    """torch's schedule of the same name on the stages of pipeline_v.py; the rest is the lesson's."""

    def __init__(self, lesson, config, device):
        model = new_model(lesson, config, device)
        head = nn.Linear(config.width, config.vocab, bias=False, device="meta")
        head.weight = model.tokens.weight
        layers = [model.tokens, lesson.AddPositions(model.positions), *model.blocks, model.norm, head]
        schedule = lesson.build_schedule(config.schedule, dist.get_world_size(), config.accum)
        n_stages = 1 + max(action.stage for actions in schedule for action in actions)
        ends = lesson.split_layers(layers, n_stages)
        shape = config.batch // config.accum, config.context, config.width
        message = torch.empty(shape, dtype=lesson.DTYPES[config.dtype], device="meta")
        pipe = lesson.Pipeline(layers, ends, lesson.mean_loss, schedule, message)
        pipe.loss = torch.zeros((), dtype=torch.float64, device=device)
        stages = [
            pipelining.PipelineStage(module, stage, n_stages, device)
            for stage, module in zip(sorted({action.stage for action in pipe.actions}), pipe.stages)
        ]
        for layer in pipe.modules():
            vars(layer).pop("forward", None)  # the lesson's, whose backward leaves out the weights
        self.lesson, self.config = lesson, config
        make = getattr(pipelining, SCHEDULES[config.schedule])
        self.has_loss = stages[-1].is_last
        self.runner = make(stages, config.accum, loss_fn=self.share, scale_grads=False)
        optimizer = lesson.OPTIMIZERS[config.optim](pipe.parameters(), lr=config.lr, fused=True)
        super().__init__(lesson, config, model, pipe, optimizer)

    def share(self, output, target):
        """Of the mean of all microbatches. (scale_grads divides what two stages of a rank share twice.)"""
        return self.lesson.mean_loss(output, target) / self.config.accum

    def step(self, batches):
        inputs, targets = zip(*batches)
        given = (torch.cat(inputs),) if dist.get_rank() == 0 else ()
        self.runner.step(*given, **({"target": torch.cat(targets), "losses": []} if self.has_loss else {}))
        self.wrapped.clip_grad_norm_(self.config.clip)
        self.optimizer.step()
        self.wrapped.zero_grad()

    def weights(self):
        self.wrapped.unsplit()
        return super().weights()


class Mesh3D(Peer):
    """parallelize_module, fully_shard and Schedule1F1B on one DeviceMesh, on the lesson's stages."""

    def __init__(self, lesson, config, device):
        self.lesson, self.config = lesson, config
        size = dist.get_world_size()
        tp = config.tp or math.gcd(2, size)
        pp = config.pp or math.gcd(2, size // tp)
        shape = pp, size // tp // pp, tp
        self.own = lesson.Mesh(np.arange(size).reshape(shape))
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
        self.model = new_model(lesson, config, device)
        self.stage = lesson.stage_of(self.model, self.own)
        if self.own.is_last:
            del self.stage[-1].forward  # the lesson's, of a split vocabulary
        plan = {name: RowwiseParallel() for name in ("proj", "down")}
        plan |= {name: ColwiseParallel() for name in ("qkv", "up")}
        for block in self.model.blocks:
            block.heads //= tp
            if block in list(self.stage):
                for param in block.qkv.parameters():
                    param.data = DTensors.by_rank(param.data, 3, tp)
                parallelize_module(block, mesh["tp"], plan)
                fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(self.stage, mesh=mesh["dp"], reshard_after_forward=False)
        by_mesh = {}
        for param in self.stage.parameters():
            by_mesh.setdefault(param.device_mesh.ndim, []).append(param)
        optimizer_class = lesson.OPTIMIZERS[config.optim]
        self.optimizers = [optimizer_class(p, lr=config.lr, fused=True) for p in by_mesh.values()]
        self.tied = self.stage[0 if self.own.is_first else -1].weight
        counted = [[p for p in each if self.own.is_first or p is not self.tied] for each in by_mesh.values()]
        self.counted = list(filter(None, counted))  # in the norm
        group = mesh["pp"].get_group()
        stage = pipelining.PipelineStage(self.stage, self.own.pp_rank, pp, device, group=group)
        self.runner = pipelining.Schedule1F1B(stage, config.accum, loss_fn=lesson.mean_loss)

    def step(self, batches):
        own = self.own
        inputs, targets = (torch.cat(part) for part in zip(*batches))
        given = {"target": targets, "losses": []} if own.is_last else {}
        self.runner.step(*((inputs,) if own.is_first else ()), **given)
        if own.tie_group:
            dist.all_reduce(self.tied.grad.to_local(), group=own.tie_group)
        squares = sum(map(squared_norm, self.counted))
        dist.all_reduce(squares, group=own.output_group)
        clip_and_step(self.optimizers, squares.sqrt(), self.config.clip)

    def weights(self):
        tensors = {}
        for name, param in self.model.named_parameters():
            if isinstance(param, DTensor):
                tensor = param.full_tensor().detach()
                tensors[name] = DTensors.by_rank(tensor, self.own.tp, 3) if ".qkv." in name else tensor
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
    "context_parallel": {
        "torch's ring, allgather": partial(Ring, "allgather"),
        "torch's ring, alltoall": partial(Ring, "alltoall"),
    },
    "expert_zero": {"FSDP2, two meshes, explicit prefetch": ShardedExperts},
    "checkpointing": {"torch.utils.checkpoint": checkpointed},
    "fusion": {"one all-reduce by the library": AllReduced},
    "pipeline": {"torch pipelining": Staged},
    "zero_bubble": {},
    "pipeline_v": {"torch pipelining": Pipelined},
    "parallel_3d": {"torch, all three composed": Mesh3D},
}
