"""What all peers share: a model, its optimizer, and a step.

A peer trains a lesson's model on the same batches, by other means. step(batches) is an optimizer step, and
weights() the plain model's state_dict.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


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
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.model.zero_grad()

    def weights(self):
        """With the help of all ranks."""
        tensors = self.model.state_dict().items()
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors}


class MasterWeights:
    """An optimizer's steps on fp32 copies of bf16 weights."""

    def __init__(self, optimizer_class, params, **options):
        self.params = list(params)
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizer = optimizer_class(self.masters, **options)

    @torch.no_grad()
    def step(self):
        for param, master in zip(self.params, self.masters):
            master.grad = param.grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_(self.params, self.masters)


def plain(wrap, lesson, config, device):
    """The model as wrap() returns it, and an optimizer of all weights; in bf16 with fp32 masters."""
    model = new_model(lesson, config, device)
    optimizer = torch.optim.AdamW
    if config.dtype == "bf16":
        optimizer = MasterWeights(optimizer, model.parameters(), lr=config.lr, fused=True)
    else:
        optimizer = optimizer(model.parameters(), lr=config.lr, fused=True)
    return Peer(lesson, config, model, wrap(model), optimizer)


def alone(lesson, config, device):
    """The whole model, and no message to anybody."""
    return plain(lambda model: model, lesson, config, device)


class AllReduced(Peer):
    """One all-reduce of all gradients, in one tensor, after backward."""

    def __init__(self, lesson, config, device):
        vars(self).update(vars(alone(lesson, config, device)))

    def loss(self, inputs, targets):
        return self.lesson.mean_loss(self.model(inputs), targets)

    def step(self, batches):
        for batch in batches:
            (self.loss(*batch) / len(batches)).backward()
        grads = [param.grad for param in self.model.parameters()]
        flat_grad = nn.utils.parameters_to_vector(grads)
        dist.all_reduce(flat_grad)
        nn.utils.vector_to_parameters(flat_grad.div_(dist.get_world_size()), grads)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.model.zero_grad()


def squared_norm(params):
    norm = nn.utils.get_total_norm([param.grad for param in params])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()


def clip_and_step(optimizers, norm, max_norm):  # one for each kind and mesh, as a kernel takes one alone
    for optimizer in optimizers:
        nn.utils.clip_grads_with_norm_(optimizer.param_groups[0]["params"], max_norm, norm)
        optimizer.step()
        optimizer.zero_grad()
