"""The peers of each lesson: the same model, batches and optimizer, trained by PyTorch's modules or DeepSpeed.

A lesson joins by a row of PEERS: {title: build}, where build(lesson, config, device) is a Peer, and None if
its package is missing.
"""

import importlib.util
from functools import partial

import torch
from peer import ALONE, AllReduced, plain
from peers_deepspeed import DeepSpeed, Mixtures, Ulysses
from peers_pipeline import Mesh3D, Pipelined
from peers_torch import (
    DTensors,
    ExpertsAlone,
    OtherAttention,
    ShardedExperts,
    checkpointed,
    ddp,
    ddp_with_muon,
    ddp_with_zero,
    fsdp2,
    fsdp2_as_ours,
    hsdp,
    local_sgd,
    uneven,
)
from torch.distributed.fsdp import CPUOffloadPolicy

FIFTHS, VIEWS = {"fifths": True}, {"fifths": True, "gradient_as_bucket_view": True}
ON_HOST = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
DEEPSPEED = importlib.util.find_spec("deepspeed")


def deepspeed(build, *arguments, **options):
    return partial(build, *arguments, **options) if DEEPSPEED else None


PEERS = {
    "collectives": {"one all-reduce by the library": AllReduced},
    "fusion": {"one all-reduce by the library": AllReduced},
    "ddp": {
        "torch DDP, defaults": partial(ddp, {}),
        "torch DDP, buckets of P/5": partial(ddp, FIFTHS),
        "torch DDP, buckets of P/5, views": partial(ddp, VIEWS),
    },
    "uneven": {
        ALONE: partial(uneven, None),
        "torch DDP, loss * N / tokens": partial(uneven, {}),
        "torch DDP, loss * N / tokens, views": partial(uneven, {"gradient_as_bucket_view": True}),
    },
    "resume": {
        "DDP + ZeroRedundancyOptimizer": partial(ddp_with_zero, {}),
        "DDP + ZeroRedundancyOptimizer, P/5, views": partial(ddp_with_zero, VIEWS),
    },
    "zero3": {
        "FSDP2": partial(fsdp2, True, False),
        "FSDP2, explicit prefetch": partial(fsdp2, True, True),
        "FSDP2, no reshard": partial(fsdp2, False, False),
        "FSDP2, explicit prefetch, all-to-all": fsdp2_as_ours,
    },
    "hsdp": {
        "FSDP2, hybrid": partial(hsdp, False),
        "FSDP2, hybrid, explicit prefetch": partial(hsdp, True),
    },
    "muon": {
        "torch DDP, Muon on every rank": partial(ddp_with_muon, {}),
        "torch DDP, Muon on every rank, P/5, views": partial(ddp_with_muon, VIEWS),
    },
    "diloco": {"torch PostLocalSGDOptimizer": local_sgd},
    "survive": {"torch DDP, one bucket": partial(ddp, {"bucket_cap_mb": 10**5})},
    "offload": {
        "FSDP2, CPUOffloadPolicy": partial(fsdp2, True, True, offload_policy=ON_HOST),
        "DeepSpeed 2, optimizer offloaded": deepspeed(DeepSpeed, 2, True, True, offload=["optimizer"]),
        "DeepSpeed 3, all offloaded": deepspeed(DeepSpeed, 3, True, True, offload=["optimizer", "param"]),
    },
    "tensor_parallel": {"torch parallelize_module": partial(DTensors, False)},
    "sequence_parallel": {"torch parallelize_module": partial(DTensors, True)},
    "context_parallel": {
        "torch's ring, allgather": partial(OtherAttention, "allgather"),
        "torch's ring, alltoall": partial(OtherAttention, "alltoall"),
        "DeepSpeed Ulysses": deepspeed(Ulysses),
    },
    "expert_parallel": {"DeepSpeed MoE": deepspeed(Mixtures, False), ALONE: partial(Mixtures, True)},
    "expert_zero": {
        ALONE: ExpertsAlone,
        "FSDP2, two meshes": partial(ShardedExperts, False),
        "FSDP2, two meshes, explicit prefetch": partial(ShardedExperts, True),
    },
    "pipeline": {"torch pipelining": Pipelined},
    "pipeline_v": {"torch pipelining": Pipelined},
    "parallel_3d": {"torch, all three composed": Mesh3D},
    "checkpointing": {"torch.utils.checkpoint": checkpointed},
}
PEERS["zero1"] = dict(PEERS["resume"])
for stage in 1, 2, 3:
    PEERS.setdefault(f"zero{stage}", {}).update(
        {
            f"DeepSpeed {stage}": deepspeed(DeepSpeed, stage, True, False),
            f"DeepSpeed {stage}, no overlap": deepspeed(DeepSpeed, stage, False, False),
            f"DeepSpeed {stage}, buckets of P/5": deepspeed(DeepSpeed, stage, True, True),
        }
    )


def peers_of(name):
    """{title: build}, first the whole model alone on a part of the batch."""
    return {ALONE: partial(plain, lambda model: model)} | PEERS.get(name, {})
