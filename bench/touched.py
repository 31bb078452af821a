"""Bytes a parameter that a technique reads and writes beside model and optimizer: ours, and PyTorch's.

    torchrun --nproc_per_node=2 bench/touched.py
    torchrun --nproc_per_node=2 bench/touched.py --dtype bf16 --batch 16

Every operator of a fourth step is counted as tools/watch.py counts it. What those of a plain loop do, without
clipping and without fp32 masters, is subtracted, and the optimizer's fused kernel is left out: so a peer in
C++ is counted as a lesson is. What a collective does inside is not seen.
"""

import contextlib
import importlib
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
from peer import Peer, new_model  # noqa: E402
from peers_torch import ddp, fsdp2  # noqa: E402
from watch import touched_by  # noqa: E402

OURS = {"ddp": "DDP", "zero1": "ZeRO1", "zero2": "ZeRO2", "zero3": "ZeRO3"}
VIEWS = {"gradient_as_bucket_view": True}


class Touched(TorchDispatchMode):
    """Bytes that operators touch, by their names."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = str(function).removeprefix("aten.").removesuffix(".default")
        if not name.startswith("_fused_"):
            self.bytes[name] += touched_by(function, args, kwargs, result)
        return result


class Unclipped(Peer):
    """The plain loop."""

    def step(self, batches):
        for inputs, targets in batches:
            self.lesson.mean_loss(self.wrapped(inputs), targets).backward()
        self.optimizer.step()
        self.model.zero_grad()


class Lesson(Peer):
    """A lesson's class in the loop of its train()."""

    def step(self, batches):
        for inputs, targets in batches:
            self.lesson.mean_loss(self.wrapped(inputs), targets).backward()
        self.wrapped.clip_grad_norm_(self.config.clip)
        self.optimizer.step()
        self.wrapped.zero_grad()


def ours(name, lesson, config, device):
    model = new_model(lesson, config, device)
    units = [] if name == "ddp" else [lesson.Block]
    wrapped = getattr(lesson, OURS[name])(model, *units)
    optimizer_class = lesson.OPTIMIZERS[config.optim]
    masters = [] if units or config.dtype != "bf16" else [optimizer_class]
    new_optimizer = lesson.MasterWeights if masters else optimizer_class
    optimizer = new_optimizer(*masters, wrapped.parameters(), lr=config.lr, fused=True)
    return Lesson(lesson, config, model, wrapped, optimizer)


def build(title, name, flags):
    """The technique of this title, and its batches; `name` is the lesson whose model it trains."""
    lesson = importlib.import_module(name)
    config = lesson.parse(flags)
    with contextlib.redirect_stdout(None):
        device, text = lesson.set_up(config)
    if title == "plain loop":
        model = new_model(lesson, config, device)
        optimizer = lesson.OPTIMIZERS[config.optim](model.parameters(), lr=config.lr, fused=True)
        peer = Unclipped(lesson, config, model, model, optimizer)
    elif title == "FSDP2":
        peer = fsdp2(True, True, lesson, config, device)
    elif title.startswith("torch"):
        peer = ddp({"fifths": True} | (VIEWS if "views" in title else {}), lesson, config, device)
    else:
        peer = ours(name, lesson, config, device)
    batches = lesson.microbatches(config, text, 1, device, dist.get_rank(), dist.get_world_size())
    return peer, list(batches)


def count(title, name, flags):
    """({operator: bytes in the fourth step}, number of parameters)"""
    peer, batches = build(title, name, flags)
    numbers = sum(param.numel() for param in peer.lesson.GPT(peer.config).parameters())
    for _ in range(3):
        peer.step(batches)
    with Touched() as touched:
        peer.step(batches)
    return touched.bytes, numbers


def main():
    flags = ["--size", "small", "--batch", "8", *sys.argv[1:]]
    of_plain, numbers = count("plain loop", "ddp", flags)
    rows = [("torch DDP", "ddp"), ("torch DDP, views", "ddp"), ("FSDP2", "zero3")]
    rows = [rows[0], rows[1], *((f"{name}.py", name) for name in OURS), rows[2]]
    if dist.get_rank() == 0:
        ranks = f"{dist.get_world_size()} ranks {dist.get_backend()}"
        print(f"touched {' '.join(flags)} | {ranks} | torch {torch.__version__}")
        print("\n| bytes a parameter | all | by pass |\n|---|---|---|")
    for title, name in rows:
        found, _ = count(title, name, flags)
        more = {each: (found[each] - of_plain[each]) / numbers for each in found | of_plain}
        passes = sorted(((size, each) for each, size in more.items() if abs(size) >= 0.05), reverse=True)
        listed = ", ".join(f"{each} {size:.1f}" for size, each in passes)
        if dist.get_rank() == 0:
            print(f"| {title} | {sum(more.values()):.1f} | {listed} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
