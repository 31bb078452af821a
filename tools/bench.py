"""A lesson beside PyTorch's own module: same weights, same batches, same threads, turn by turn in one run.

python tools/bench.py --ranks 2 --size small
python tools/bench.py --hosts 2 --rate 1gbit --size small    (Linux, root: see tools/hosts.sh)
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ddp as lesson  # noqa: E402

MIB = 2**20


class Contender:
    """One way to train: a model of its own, its wrapper, its optimizer."""

    def __init__(self, name, config, device, wrap):
        self.name, self.config, self.device = name, config, device
        torch.manual_seed(config.seed)
        self.model = lesson.GPT(config).to(device, lesson.DTYPES[config.dtype])
        self.wrapped = wrap(self.model)
        kind = lesson.OPTIMIZERS[config.optim]
        self.optimizer = lesson.Optimizer(self.model.parameters(), kind, lr=config.lr, fused=True)
        self.times = []

    def step(self, batches):
        for i, (inputs, targets) in enumerate(batches):
            last = i == len(batches) - 1
            with nullcontext() if last or not hasattr(self.wrapped, "no_sync") else self.wrapped.no_sync():
                (self.wrapped(inputs, targets) / len(batches)).backward()
        if isinstance(self.wrapped, lesson.DDP):
            self.wrapped.clip_grad_norm_(self.config.clip)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def time(self, batches, steps):
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(batches)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        self.times.append(1e3 * (time.perf_counter() - start) / steps)


def main(config):
    device, text = lesson.set_up(config)
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = 0
    probe = lesson.GPT(config)
    our_mb = lesson.DDP(probe).buckets and min(
        max(sum(p.nbytes for p in probe.parameters()) / 8 / MIB, 1), 25
    )
    peers = [("compute alone", lambda m: m), ("ours", lambda m: lesson.DDP(m))]
    for mb in config.try_mb:
        peers.append((f"ours {mb:g}", lambda m, mb=mb: lesson.DDP(m, mb)))
    peers += [
        ("torch DDP", DistributedDataParallel),
        (f"torch DDP {our_mb:.1f}", lambda m: DistributedDataParallel(m, bucket_cap_mb=our_mb)),
        (
            f"torch DDP {our_mb:.1f} view",
            lambda m: DistributedDataParallel(m, bucket_cap_mb=our_mb, gradient_as_bucket_view=True),
        ),
    ]
    contenders = [Contender(name, config, device, wrap) for name, wrap in peers]
    batches = list(lesson.microbatches(config, text, 1, device, rank, ranks))
    for c in contenders:
        for _ in range(3):
            c.step(batches)
    ref = contenders[1].model
    for c in contenders[1:]:
        d = max((a - b).abs().max().item() for a, b in zip(ref.parameters(), c.model.parameters()))
        if rank == 0:
            print(c.name, "max weight difference", d)
    for r in range(config.rounds):
        order = contenders if r % 2 == 0 else contenders[::-1]
        for c in order:
            c.time(batches, config.steps)
    if rank == 0:
        base = {c.name: c for c in contenders}
        ours = base["ours"].times
        for c in contenders:
            ratios = [a / b for a, b in zip(ours, c.times)]
            print(
                f"{c.name:<24}{statistics.median(c.times):9.1f} ms   ours/this {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = lesson.flags()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--try-mb", type=float, nargs="*", default=[])
    main(parser.parse_args())
