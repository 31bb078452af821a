"""The peers of each lesson: the same model, batches and optimizer, trained by PyTorch's modules or DeepSpeed.

peers_of("zero3") is {title: build}. build(lesson, config, device) is a Peer, whose step(batches) is an
optimizer step, and whose weights() are the plain model's state_dict.
"""

import importlib.util
import itertools
from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
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

ALONE = "compute alone"  # 1/N of the batch through the whole model, and no word to anybody


def new_model(lesson, config, device, dtype=None):
    torch.manual_seed(config.seed)
    return lesson.GPT(config).to(device, lesson.DTYPES[dtype or config.dtype])


class Peer:
    """A model and one way to train it."""

    def __init__(self, lesson, config, model, wrapped, optimizer):
        self.lesson, self.config = lesson, config
        self.model, self.wrapped, self.optimizer = model, wrapped, optimizer

    def step(self, batches):
        for i, (inputs, targets) in enumerate(batches, start=1):
            last = i == len(batches) or not hasattr(self.wrapped, "no_sync")
            with nullcontext() if last else self.wrapped.no_sync():
                loss = self.lesson.mean_loss(self.wrapped(inputs), targets)
                (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or float("inf"))
        self.optimizer.step()
        self.model.zero_grad()

    def weights(self):
        """With the help of all ranks."""
        tensors = self.model.state_dict().items()
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors}


def plain(wrap, lesson, config, device):
    """The model as wrap() has it, and an optimizer that knows nothing of ranks, in bf16 with masters."""
    model = new_model(lesson, config, device)
    optimizer_class = lesson.OPTIMIZERS[config.optim]
    if config.dtype == "bf16":
        masters = importlib.import_module("ddp").MasterWeights
        optimizer = masters(optimizer_class, model.parameters(), lr=config.lr, fused=True)
    else:
        optimizer = optimizer_class(model.parameters(), lr=config.lr, fused=True)
    return Peer(lesson, config, model, wrap(model), optimizer)


class AllReduced(Peer):
    """The library's all-reduce of all gradients, in one tensor, after backward."""

    def __init__(self, lesson, config, device):
        vars(self).update(vars(plain(lambda model: model, lesson, config, device)))

    def loss(self, inputs, targets):
        return self.lesson.mean_loss(self.model(inputs), targets)

    def step(self, batches):
        for batch in batches:
            (self.loss(*batch) / len(batches)).backward()
        grads = [param.grad for param in self.model.parameters()]
        flat_grad = nn.utils.parameters_to_vector(grads)
        dist.all_reduce(flat_grad)
        nn.utils.vector_to_parameters(flat_grad.div_(dist.get_world_size()), grads)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or float("inf"))
        self.optimizer.step()
        self.model.zero_grad()


def ddp(options, lesson, config, device):
    """torch's DistributedDataParallel; fifths: with buckets of a fifth of the model, as ddp.py's."""
    options = dict(options)
    if options.pop("fifths", False):
        size = sum(p.nbytes for p in new_model(lesson, config, "meta").parameters())
        options["bucket_cap_mb"] = min(size / 5 / 2**20, 25)
    return plain(partial(DistributedDataParallel, **options), lesson, config, device)


def ddp_with_zero(options, lesson, config, device):
    peer = ddp(options, lesson, config, device)
    optimizer_class = lesson.OPTIMIZERS[config.optim]
    params = peer.model.parameters()
    peer.optimizer = ZeroRedundancyOptimizer(params, optimizer_class, lr=config.lr, fused=True)
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
        ring = context._templated_ring_attention
        out, lse = ring(dist.group.WORLD, 2, lesson.attend, q, k, v, is_causal=True)
        ctx.lesson = lesson
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        def attend_backward(grad_out, query, key, value, out, logsumexp, is_causal):
            return ctx.lesson.attend_backward(grad_out, out, logsumexp, query, key, value, is_causal)

        ring = context._templated_ring_attention_backward
        saved = ctx.saved_tensors
        return None, *ring(dist.group.WORLD, 2, attend_backward, grad, "grad_out", *saved, is_causal=True)


class OtherAttention(AllReduced):
    """The lesson with another attention, here torch's ring, of tokens in this order."""

    order = "zigzag"

    def __init__(self, lesson, config, device):
        super().__init__(lesson, config, device)
        self.own = partial(lesson.shard_sequence, order=self.order)

    def attention(self, q, k, v, is_causal):
        return TorchRing.apply(self.lesson, q, k, v)

    def loss(self, inputs, targets):
        weights = dict(self.model.named_parameters())
        weights["positions.weight"] = self.own(weights["positions.weight"], 0)
        with mock.patch.object(nn.functional, "scaled_dot_product_attention", self.attention):
            logits = torch.func.functional_call(self.model, weights, self.own(inputs, 1))
        return self.lesson.mean_loss(logits, self.own(targets, 1))


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


def peers_of(name):
    """{title: build}; build is None where a package is missing."""
    views = {"fifths": True, "gradient_as_bucket_view": True}
    peers = {ALONE: partial(plain, lambda model: model)}
    if name in ("collectives", "fusion"):
        peers["one all-reduce by the library"] = AllReduced
    if name == "ddp":
        peers["torch DDP, defaults"] = partial(ddp, {})
        peers["torch DDP, buckets of P/5"] = partial(ddp, {"fifths": True})
        peers["torch DDP, buckets of P/5, views"] = partial(ddp, views)
    if name in ("zero1", "resume"):
        peers["DDP + ZeroRedundancyOptimizer"] = partial(ddp_with_zero, {})
        peers["DDP + ZeroRedundancyOptimizer, P/5, views"] = partial(ddp_with_zero, views)
    if name == "zero3":
        peers["FSDP2"] = partial(fsdp2, True, False)
        peers["FSDP2, explicit prefetch"] = partial(fsdp2, True, True)
        peers["FSDP2, no reshard"] = partial(fsdp2, False, False)
    if name == "offload":
        on_host = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        peers["FSDP2, CPUOffloadPolicy"] = partial(fsdp2, True, True, offload_policy=on_host)
    if name in ("tensor_parallel", "sequence_parallel"):
        peers["torch parallelize_module"] = partial(DTensors, name == "sequence_parallel")
    if name == "context_parallel":
        peers["torch's ring attention"] = OtherAttention
    if name == "checkpointing":
        peers["torch.utils.checkpoint"] = checkpointed
    import peers_deepspeed  # which need this module
    import peers_pipeline

    return peers | peers_pipeline.peers_of(name) | peers_deepspeed.peers_of(name)
