"""PyTorch's own modules as peers: what bench/peers.py lists. Each is built of (lesson, config, device)."""

import itertools
import math
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from peer import AllReduced, Peer, new_model, plain
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as context
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def ddp(options, lesson, config, device):
    """torch's DistributedDataParallel; fifths: with buckets of a fifth of the model, as ddp.py's."""
    options = dict(options)
    if options.pop("fifths", False):
        size = sum(p.nbytes for p in new_model(lesson, config, "meta").parameters())
        options["bucket_cap_mb"] = min(size / 5 / 2**20, 25)
    return plain(partial(DistributedDataParallel, **options), lesson, config, device)


class Uneven(Peer):
    """uneven.py's rows, masks and agreed microbatches in torch's DDP, whose division by N the loss undoes."""

    def step(self, batches):
        ranks = dist.get_world_size() if hasattr(self.wrapped, "no_sync") else 1  # 1: alone
        tokens = sum(targets.count_nonzero() for _, targets, _ in batches)
        most = torch.full_like(tokens, len(batches))
        if ranks > 1:
            dist.all_reduce(tokens)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        empty = torch.zeros(3, 1, 1, dtype=torch.int64, device=tokens.device)
        batches = [*batches, *[empty] * (most.item() - len(batches))]
        for i, batch in enumerate(batches, start=1):
            inputs, targets, positions = batch
            last = i == len(batches) or ranks == 1
            with nullcontext() if last else self.wrapped.no_sync():
                loss = self.lesson.sum_of_losses(self.wrapped(inputs, positions), targets)
                (loss * ranks / tokens).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.model.zero_grad()


def uneven(options, lesson, config, device):
    """options: those of torch's DDP, or None to compute alone."""

    def wrap(model):
        rows = lesson.OverDocuments(model)
        return rows if options is None else DistributedDataParallel(rows, **options)

    peer = plain(wrap, lesson, config, device)
    return Uneven(lesson, config, peer.model, peer.wrapped, peer.optimizer)


def ddp_with_zero(options, lesson, config, device):
    peer = ddp(options, lesson, config, device)
    optimizer_class = lesson.OPTIMIZERS[config.optim]
    params = peer.model.parameters()
    peer.optimizer = ZeroRedundancyOptimizer(params, optimizer_class, lr=config.lr, fused=True)
    return peer


def ddp_with_muon(options, lesson, config, device):
    """torch.optim.Muon of all matrices on all ranks, and the lesson's optimizer of the rest."""
    peer = ddp(options, lesson, config, device)
    matrices = lesson.find_matrices(peer.model, lesson.Block)
    rest = [param for param in peer.model.parameters() if param not in matrices]
    muon = torch.optim.Muon(matrices, lr=config.lr, adjust_lr_fn="match_rms_adamw")
    peer.optimizer = lesson.OPTIMIZERS[config.optim](rest, lr=config.lr, fused=True)
    peer.optimizer.register_step_post_hook(lambda *_: muon.step())
    return peer


def local_sgd(lesson, config, device):
    """torch's average of all weights every inner_steps steps: diloco.py without outer momentum."""
    peer = plain(lambda model: model, lesson, config, device)
    averager = PeriodicModelAverager(period=config.inner_steps, warmup_steps=config.inner_steps - 1)
    peer.optimizer = PostLocalSGDOptimizer(peer.optimizer, averager)
    return peer


def fsdp2(reshard, prefetch, lesson, config, device, **policy):
    """Units as in zero3.py; what is in none stays whole, as there. In bf16 with fp32 shards."""
    half = config.dtype == "bf16"
    model = new_model(lesson, config, device, "fp32" if half else None)
    policy |= {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)} if half else {}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **policy)
    fully_shard(model, **policy)
    if prefetch:
        for block, after in itertools.pairwise(model.blocks):
            block.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([block])
    optimizer = lesson.OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
    return Peer(lesson, config, model, model, optimizer)


class AllToAll(ReduceScatter):
    """The lessons' reduce-scatter over gloo, whose own is an all-reduce inside."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and not async_op
        add = torch.mean if op == dist.ReduceOp.AVG else torch.sum
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        add(received.view(dist.get_world_size(group), -1), dim=0, out=output_tensor)


def fsdp2_as_ours(lesson, config, device):
    peer = fsdp2(True, True, lesson, config, device)
    for unit in (*peer.model.blocks, peer.model):
        unit.set_custom_reduce_scatter(AllToAll())
    return peer


def hsdp(prefetch, lesson, config, device):
    """FSDP2 on a mesh (copies, ranks of a copy), whose copies all-reduce in the last microbatch alone."""
    lesson.choose_shard(config)
    shape = dist.get_world_size() // config.shard, config.shard
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "ranks"))
    peer = fsdp2(True, prefetch, lesson, config, device, mesh=mesh)

    @contextmanager
    def no_sync():
        peer.model.set_requires_all_reduce(False)
        yield
        peer.model.set_requires_all_reduce(True)

    peer.model.no_sync = no_sync
    return peer


class Experts(Peer):
    """The lesson's mixtures and all-to-alls, on `ep` ranks; each rank computes its chunk of the rows."""

    def __init__(self, ep, lesson, config, device):
        half = config.dtype == "bf16"
        model = new_model(lesson, config, "cpu", "fp32" if half else None)
        self.mesh = init_device_mesh(
            device.type, (dist.get_world_size() // ep, ep), mesh_dim_names=("same", "ep")
        )
        self.ep_group = self.mesh["ep"].get_group()
        self.mixtures = lesson.replace_mlps(model, config, self.ep_group)
        for param in model.to(device).parameters():
            param.data = param.data.to(model.tokens.weight.dtype)  # of mixtures, too
        self.optimizer_class = partial(lesson.OPTIMIZERS[config.optim], lr=config.lr, fused=True)
        super().__init__(lesson, config, model, model, None)

    def step(self, batches):
        size, rank = dist.get_world_size(), dist.get_rank()
        for batch in batches:
            if len(batch[0]) == self.config.batch // self.config.accum:  # all ranks'
                batch = [part.chunk(size)[rank] for part in batch]
            loss = self.lesson.mean_loss(self.model(batch[0]), batch[1])
            loss = loss + self.config.balance * sum(moe.balance_loss for moe in self.mixtures)
            (loss / len(batches)).backward()
        self.update()
        self.model.zero_grad()


class ExpertsAlone(Experts):
    """All experts on each rank, and no word to anybody: it counts as if all ranks had its own tokens."""

    def __init__(self, lesson, config, device):
        super().__init__(1, lesson, config, device)
        self.optimizer = self.optimizer_class(self.model.parameters())
        for moe in self.mixtures:
            moe.all_gather_counts = partial(self.count, config.experts)

    @staticmethod
    def count(experts, chosen):
        counts = nn.functional.one_hot(chosen, experts).sum(0).repeat(dist.get_world_size(), 1)
        return counts.sum(0), counts.cpu()

    def update(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()


class ShardedExperts(Experts):
    """FSDP2: experts on the mesh of the ranks that have the same, within blocks on the mesh of all."""

    def __init__(self, prefetch, lesson, config, device):
        ep = config.ep or math.gcd(dist.get_world_size(), config.experts, 2)  # the lesson's default
        super().__init__(ep, lesson, config, device)
        ranks = dist.get_world_size()
        everyone = init_device_mesh(device.type, (ranks,))
        policy = {}
        if config.dtype == "bf16":
            policy["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        for block in self.model.blocks:
            for moe in self.mixtures_of(block):
                fully_shard(moe.experts, mesh=self.mesh["same"], **policy)
                # These ranks' sum is one over the tokens of all. By sums, as torch would else ask gloo for
                # PREMUL_SUM; but over a group of one rank torch 2.13 divides sums twice, and fp64 always.
                moe.experts.set_gradient_divide_factor(ranks)
                moe.experts.set_force_sum_reduction_for_comms(ranks > ep)
            fully_shard(block, mesh=everyone, **policy)
        fully_shard(self.model, mesh=everyone, **policy)
        units = [[block, *(moe.experts for moe in self.mixtures_of(block))] for block in self.model.blocks]
        for before, after in itertools.pairwise(units) if prefetch else ():
            before[0].set_modules_to_forward_prefetch(after)
            after[0].set_modules_to_backward_prefetch(before)
        params = list(self.model.parameters())
        self.dense = [param for param in params if param.device_mesh == everyone]
        self.experts = [param for param in params if param.device_mesh != everyone]
        self.optimizers = [self.optimizer_class(each) for each in (self.dense, self.experts)]

    def mixtures_of(self, block):
        return [block.moe] if hasattr(block, "moe") else []

    def update(self):
        norms = [nn.utils.get_total_norm([p.grad for p in each]) for each in (self.dense, self.experts)]
        dense, experts = (norm.full_tensor().square() for norm in norms)
        dist.all_reduce(experts, group=self.ep_group)
        for each in self.dense, self.experts:
            nn.utils.clip_grads_with_norm_(each, self.config.clip, (dense + experts).sqrt())
        for optimizer in self.optimizers:
            optimizer.step()

    def weights(self):
        states = [None] * dist.get_world_size(self.ep_group)
        dist.all_gather_object(states, super().weights(), self.ep_group)
        return {name: x for state in states for name, x in state.items()}


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
        self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()

    def clip(self):
        squares = 0
        for optimizer in self.optimizers:
            norm = nn.utils.get_total_norm([p.grad for p in optimizer.param_groups[0]["params"]])
            squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
        scale = ((self.config.clip or float("inf")) / (squares.sqrt() + 1e-6)).clamp(max=1)
        for param in self.model.parameters():
            param.grad.mul_(scale)

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


class OtherAttention(AllReduced):
    """The lesson with another attention, here torch's ring; method: how its keys and values travel."""

    def __init__(self, method, lesson, config, device):
        super().__init__(lesson, config, device)
        assert not config.documents, "the peers' rows are of one document: run without --documents"
        self.method = method
        one_document = torch.zeros(1, config.context, dtype=torch.bool)
        self.own = lesson.Layout(one_document, zigzag=method is not None).shard

    def attention(self, q, k, v, is_causal):
        return TorchRing.apply(self.lesson, q, k, v)

    def loss(self, inputs, targets):
        weights = dict(self.model.named_parameters())
        weights["positions.weight"] = self.own(weights["positions.weight"], 0)
        with mock.patch.object(nn.functional, "scaled_dot_product_attention", self.attention):
            logits = torch.func.functional_call(self.model, weights, self.own(inputs, 1))
        return self.lesson.mean_loss(logits, self.own(targets, 1))

    def step(self, batches):
        if self.method:
            context.set_rotate_method(self.method)  # of all rings in this process
            context._cp_options.convert_to_f32 = self.config.dtype != "fp64"  # blocks, to be merged
        super().step(batches)


def checkpointed(lesson, config, device):
    """torch.utils.checkpoint around the lesson's blocks, which keeps the same operators' outputs."""
    peer = plain(lambda model: model, lesson, config, device)
    options = {}
    if config.policy == "selective":

        def policy(context, operator, *args, **kwargs):
            keep = operator.overloadpacket in lesson.EXPENSIVE
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    if config.policy != "none":
        for block in peer.model.blocks[:: config.every]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return peer
