"""DeepSpeed's peers of the lessons, which bench/peers.py lists, where it is installed."""

import io
import logging
import warnings
from contextlib import nullcontext, redirect_stdout
from functools import partial

import torch.distributed as dist
from peer import AllReduced, Peer, new_model
from peers_torch import OtherAttention
from torch import nn


def quiet_deepspeed():
    """The package, in the process group that is there."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with redirect_stdout(io.StringIO()):  # which says that an operator was built
        import deepspeed

        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return deepspeed


class DeepSpeed(Peer):
    """Its engine clips and steps by itself. In stage 3 no parameter stays whole, as in zero3.py.

    fifths: with buckets of a fifth of the model, in place of 5e8 elements. offload: kinds of states.
    """

    def __init__(self, stage, overlap, fifths, lesson, config, device, offload=()):
        model = new_model(lesson, config, device)
        deepspeed = quiet_deepspeed()
        zero = {"stage": stage, "overlap_comm": overlap, "contiguous_gradients": True}
        zero |= {f"offload_{kind}": {"device": "cpu"} for kind in offload}
        if stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
            zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = 0
        if fifths:
            elements = sum(p.numel() for p in model.parameters()) // 10 * 2  # which must be even
            zero |= {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
        optimizer = lesson.OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
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
        super().__init__(lesson, config, model, engine, optimizer)
        self.gather = deepspeed.zero.GatheredParameters if stage == 3 else lambda _: nullcontext()

    def step(self, batches):
        for inputs, targets in batches:
            self.wrapped.backward(self.lesson.mean_loss(self.wrapped(inputs), targets))
            self.wrapped.step()

    def weights(self):
        with self.gather(list(self.model.parameters())):
            return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


class Ulysses(OtherAttention):
    """DeepSpeed's DistributedAttention, which takes (b, s, a, h/a)."""

    def __init__(self, lesson, config, device):
        super().__init__(None, lesson, config, device)
        quiet_deepspeed()
        from deepspeed.sequence.layer import DistributedAttention

        self.plain = nn.functional.scaled_dot_product_attention
        self.layer = DistributedAttention(self.local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def local(self, *qkv):
        return self.plain(*(x.transpose(1, 2) for x in qkv), is_causal=True).transpose(1, 2)

    def attention(self, *qkv, is_causal):
        return self.layer(*(x.transpose(1, 2) for x in qkv), 0).transpose(1, 2)


class Mixtures(AllReduced):
    """The lesson's model with DeepSpeed's MoE around the same router and experts; without a balance loss.

    alone: with the lesson's own mixtures, where each rank has all experts.
    """

    def __init__(self, alone, lesson, config, device):
        assert not config.balance, "DeepSpeed's balance loss is another one: run with --balance 0"
        self.lesson, self.config = lesson, config
        size = dist.get_world_size()
        with_all, with_same = dist.group.WORLD, dist.new_subgroups(1)[0]
        self.ep_group, self.expert_dp_group = (with_same, with_all) if alone else (with_all, with_same)
        self.model = new_model(lesson, config, device)
        mixtures = lesson.replace_mlps(self.model, config, self.ep_group)
        self.model.to(device)
        for moe in [] if alone else mixtures:
            deepspeed = quiet_deepspeed()
            how = {"ep_size": size, "k": config.top_k, "drop_tokens": False, "use_rts": False}
            how["top2_2nd_expert_sampling"] = False
            with redirect_stdout(None):
                layer = deepspeed.moe.layer.MoE(config.width, nn.Identity(), config.experts, **how)
                layer.set_deepspeed_parallelism()
            layer.deepspeed_moe.gate.wg = moe.router
            layer.deepspeed_moe.experts.deepspeed_experts = nn.ModuleList(moe.experts.values())
            vars(moe)["layer"] = layer  # no submodule: names stay the lesson's
            moe.forward = partial(self.first, layer)
        optimizer_class = lesson.OPTIMIZERS[config.optim]
        self.optimizer = optimizer_class(self.model.parameters(), lr=config.lr, fused=True)

    @staticmethod
    def first(layer, x):
        return layer(x)[0]

    def step(self, batches):
        size, rank = dist.get_world_size(), dist.get_rank()
        for inputs, targets in batches:
            if len(inputs) == self.config.batch // self.config.accum:  # all ranks'
                inputs, targets = inputs.chunk(size)[rank], targets.chunk(size)[rank]
            loss = self.lesson.mean_loss(self.model(inputs), targets) / len(batches)
            loss.backward()
        max_norm = self.config.clip or float("inf")
        self.lesson.average_gradients(self.model, self.ep_group, self.expert_dp_group, max_norm)
        self.optimizer.step()
        self.model.zero_grad()

    def weights(self):
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, self.model.state_dict())
        return {name: x for state in states for name, x in state.items()}
