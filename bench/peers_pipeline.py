"""torch.distributed.pipelining as a peer, alone and on a mesh, which bench/peers.py lists."""

import math

import numpy as np
import torch
import torch.distributed as dist
from peer import Peer, new_model
from peers_torch import DTensors
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
SCHEDULES |= {"zb-v": "ScheduleZBVZeroBubble"}


class Pipelined(Peer):
    """torch's schedule of the same name on the lesson's stages; the rest is the lesson's."""

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
        several = config.schedule in ("interleaved", "zb-v")
        self.has_loss = stages[-1].is_last
        self.runner = make(
            stages if several else stages[0], config.accum, loss_fn=self.share, scale_grads=False
        )
        optimizer = lesson.OPTIMIZERS[config.optim](pipe.parameters(), lr=config.lr, fused=True)
        super().__init__(lesson, config, model, pipe, optimizer)

    def share(self, output, target):
        """Of the mean of all microbatches. (scale_grads divides what two stages of a rank share twice.)"""
        return self.lesson.mean_loss(output, target) / self.config.accum

    def step(self, batches):
        inputs, targets = zip(*batches)
        given = (torch.cat(inputs),) if dist.get_rank() == 0 else ()
        self.runner.step(*given, **({"target": torch.cat(targets), "losses": []} if self.has_loss else {}))
        for param, group in getattr(self.wrapped, "ties", {}).items():  # pipeline_v.py has none
            dist.all_reduce(param.grad, group=group)
        self.wrapped.clip_grad_norm_(self.config.clip or float("inf"))
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
        self.own = lesson.Mesh(np.arange(size).reshape(pp, size // tp // pp, tp))
        mesh = init_device_mesh(device.type, (pp, size // tp // pp, tp), mesh_dim_names=("pp", "dp", "tp"))
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
        self.by_mesh = {}  # one kernel takes tensors of one mesh
        for param in self.stage.parameters():
            self.by_mesh.setdefault(param.device_mesh.ndim, []).append(param)
        optimizer_class = lesson.OPTIMIZERS[config.optim]
        self.optimizers = [optimizer_class(p, lr=config.lr, fused=True) for p in self.by_mesh.values()]
        self.tied = self.stage[0 if self.own.is_first else -1].weight
        group = mesh["pp"].get_group()
        stage = pipelining.PipelineStage(self.stage, self.own.pp_rank, pp, device, group=group)
        self.runner = pipelining.Schedule1F1B(stage, config.accum, loss_fn=lesson.mean_loss)

    def step(self, batches):
        own = self.own
        inputs, targets = (torch.cat([x.chunk(own.dp)[own.dp_rank] for x in part]) for part in zip(*batches))
        given = {"target": targets, "losses": []} if own.is_last else {}
        self.runner.step(*((inputs,) if own.is_first else ()), **given)
        if own.tie_group:
            dist.all_reduce(self.tied.grad.to_local(), group=own.tie_group)
        squares = 0
        for params in self.by_mesh.values():
            grads = [p.grad for p in params if own.is_first or p is not self.tied]
            squares += nn.utils.get_total_norm(grads).full_tensor().square()
        dist.all_reduce(squares, group=own.output_group)
        for params in self.by_mesh.values():
            nn.utils.clip_grads_with_norm_(params, self.config.clip or float("inf"), squares.sqrt())
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def weights(self):
        tensors = {}
        for name, param in self.model.named_parameters():
            if isinstance(param, DTensor):
                tensor = param.full_tensor().detach()
                tensors[name] = DTensors.by_rank(tensor, self.own.tp, 3) if ".qkv." in name else tensor
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, tensors)
        return {name: tensor for state in states for name, tensor in state.items()}
