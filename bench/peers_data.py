"""Peers of the lessons that shard data and states: PyTorch's DDP, ZeRO and FSDP2, and DeepSpeed.

PEERS: {lesson: {title: build}}, where build(lesson, config, device) returns a Peer; build is None if its
package is not installed.
"""

import importlib.util
import io
import itertools
import logging
import warnings
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from peer import AllReduced, Peer, new_model, plain
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def ddp(tuned, lesson, config, device):
    """torch's DistributedDataParallel; tuned: gradients are views of buckets of a fifth of the model."""
    options = {}
    if tuned:
        size = sum(p.nbytes for p in new_model(lesson, config, "meta").parameters())
        options = {"bucket_cap_mb": min(size / 5 / 2**20, 25), "gradient_as_bucket_view": True}
    return plain(partial(DistributedDataParallel, **options), lesson, config, device)


def ddp_with_zero(tuned, lesson, config, device):
    peer = ddp(tuned, lesson, config, device)
    params = peer.model.parameters()
    peer.optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=config.lr, fused=True)
    return peer


def ddp_with_muon(lesson, config, device):
    """torch.optim.Muon of all matrices on all ranks, and the lesson's optimizer of the rest."""
    peer = ddp(True, lesson, config, device)
    matrices = {param for param in peer.model.blocks.parameters() if param.dim() == 2}
    rest = [param for param in peer.model.parameters() if param not in matrices]
    muon = torch.optim.Muon(list(matrices), lr=config.lr, adjust_lr_fn="match_rms_adamw")
    peer.optimizer = torch.optim.AdamW(rest, lr=config.lr, fused=True)
    peer.optimizer.register_step_post_hook(lambda *_: muon.step())
    return peer


def half_policy(config):
    """In bf16 FSDP2 has fp32 shards, of which it makes bf16 weights."""
    half = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    return {"mp_policy": half} if config.dtype == "bf16" else {}


def fsdp2(prefetch, lesson, config, device, **policy):
    """A unit for each block, and one for the rest, which stays unsharded between forward and backward."""
    policy |= half_policy(config)
    model = new_model(lesson, config, device, "fp32" if config.dtype == "bf16" else None)
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    if prefetch:
        for block, after in itertools.pairwise(model.blocks):
            block.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
    return Peer(lesson, config, model, model, optimizer)


def hsdp(lesson, config, device):
    """FSDP2 on a mesh (copies, ranks of a copy); copies all-reduce in the last microbatch alone."""
    config.shard = config.shard or dist.get_world_size() // (1 if dist.get_world_size() % 2 else 2)
    shape = dist.get_world_size() // config.shard, config.shard
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "ranks"))
    peer = fsdp2(True, lesson, config, device, mesh=mesh)

    @contextmanager
    def no_sync():
        peer.model.set_requires_all_reduce(False)
        yield
        peer.model.set_requires_all_reduce(True)

    peer.model.no_sync = no_sync
    return peer


class DeepSpeed(Peer):
    """Its engine clips and steps by itself. In stage 3 no parameter stays unsharded.

    overlap: with buckets of a fifth of the model, in place of 5e8 elements. offload: kinds of states.
    """

    def __init__(self, stage, overlap, lesson, config, device, offload=()):
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        with redirect_stdout(io.StringIO()):  # which says that an operator was built
            import deepspeed

            deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        model = new_model(lesson, config, device)
        zero = {"stage": stage, "overlap_comm": overlap, "contiguous_gradients": True}
        zero |= {f"offload_{kind}": {"device": "cpu"} for kind in offload}
        if stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
            zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = 0
        if overlap:
            elements = sum(p.numel() for p in model.parameters()) // 10 * 2  # which must be even
            zero |= {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
        with mock.patch.object(nn.functional, "linear", nn.functional.linear):  # which it replaces for all
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
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
            self.linear = nn.functional.linear
        super().__init__(lesson, config, model, engine, optimizer)
        self.gather = deepspeed.zero.GatheredParameters if stage == 3 else lambda _: nullcontext()

    def step(self, batches):
        with mock.patch.object(nn.functional, "linear", self.linear):
            for inputs, targets in batches:
                self.wrapped.backward(self.lesson.mean_loss(self.wrapped(inputs), targets))
                self.wrapped.step()

    def weights(self):
        with self.gather(list(self.model.parameters())):
            return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


def deepspeed(*arguments, **options):
    return partial(DeepSpeed, *arguments, **options) if importlib.util.find_spec("deepspeed") else None


ON_HOST = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
ZERO = {
    "DDP + ZeroRedundancyOptimizer": partial(ddp_with_zero, False),
    "DDP + ZeroRedundancyOptimizer, P/5, views": partial(ddp_with_zero, True),
}
PEERS = {
    "collectives": {"one all-reduce by the library": AllReduced},
    "ddp": {"torch DDP": partial(ddp, False), "torch DDP, buckets of P/5, views": partial(ddp, True)},
    "zero1": dict(ZERO),
    "zero2": {},
    "zero3": {"FSDP2": partial(fsdp2, False), "FSDP2, explicit prefetch": partial(fsdp2, True)},
    "hsdp": {"FSDP2, hybrid, explicit prefetch": hsdp},
    "muon": {"torch DDP, Muon on every rank": ddp_with_muon},
    "offload": {
        "FSDP2, CPUOffloadPolicy": partial(fsdp2, True, offload_policy=ON_HOST),
        "DeepSpeed 2, optimizer offloaded": deepspeed(2, True, offload=["optimizer"]),
        "DeepSpeed 3, all offloaded": deepspeed(3, True, offload=["optimizer", "param"]),
    },
}
for stage in 1, 2, 3:
    PEERS[f"zero{stage}"] |= {
        f"DeepSpeed {stage}": deepspeed(stage, False),
        f"DeepSpeed {stage}, overlap, buckets of P/5": deepspeed(stage, True),
    }
