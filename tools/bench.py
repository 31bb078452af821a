"""ddp.py beside PyTorch's own DistributedDataParallel: same weights, batches, threads, turn by turn.

    python tools/bench.py --ranks 2 --size small
    python tools/bench.py --hosts 2 --rate 1gbit --size small      (Linux and root: see tools/hosts.sh)
    python tools/bench.py --ranks 1 --size small                   (ddp.py's own cost, beside the plain loop)

First a few steps of each, which must end in equal weights. Then rounds: in each, every contender runs --steps
steps, and each round starts with another one. A line shows the median time of a step, and the ratio of
ddp.py's time to it: its median, least and greatest over the rounds.

Other flags are the lessons': --size, --batch, --accum, --dtype, --device, --clip ...
"""

import functools
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ddp as lesson  # noqa: E402  (found through the line above)


class Contender:
    """A model of its own and one way to train it."""

    def __init__(self, name, config, device, wrap):
        self.name, self.config, self.times = name, config, []
        torch.manual_seed(config.seed)
        self.model = lesson.GPT(config).to(device, lesson.DTYPES[config.dtype])
        self.wrapped = wrap(self.model)
        optimizer = lesson.OPTIMIZERS[config.optim]
        self.optimizer = lesson.Optimizer(self.model.parameters(), optimizer, lr=config.lr, fused=True)

    def step(self, batches):
        for i, batch in enumerate(batches, start=1):
            last = i == len(batches) or self.wrapped is self.model
            with nullcontext() if last else self.wrapped.no_sync():
                (self.wrapped(*batch) / len(batches)).backward()
        if isinstance(self.wrapped, lesson.DDP):
            self.wrapped.clip_grad_norm_(self.config.clip)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or float("inf"))
        self.optimizer.step()
        self.model.zero_grad()

    def time(self, batches):
        """ms of a step on the slowest rank, over --steps steps."""
        finish()
        start = time.perf_counter()
        for _ in range(self.config.steps):
            self.step(batches)
        finish()
        self.times.append(1e3 * (time.perf_counter() - start) / self.config.steps)


def finish():
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # between timed stretches, never within a step
    dist.barrier()


def contenders(config, device):
    """ddp.py; the same without communication; torch's DDP as it comes, and with the buckets of ddp.py."""
    wrap = functools.partial(lesson.DDP, bucket_mb=config.bucket_mb, overlap=config.overlap)
    ours = Contender("ddp.py", config, device, wrap)
    largest = max(bucket.flat.nbytes for bucket in ours.wrapped.buckets) / 2**20
    same = {"bucket_cap_mb": largest}
    yield ours
    yield Contender("compute alone", config, device, lambda model: model)
    yield Contender("torch DDP, defaults", config, device, DistributedDataParallel)
    name = f"torch DDP, {largest:.1f} MB buckets"
    yield Contender(name, config, device, lambda model: DistributedDataParallel(model, **same))
    views = same | {"gradient_as_bucket_view": True}
    yield Contender(name + ", views", config, device, lambda model: DistributedDataParallel(model, **views))


def main(config):
    device, text = lesson.set_up(config)
    torch.set_num_threads(1)
    say = print if dist.get_rank() == 0 else lambda line: None
    batches = list(lesson.microbatches(config, text, 1, device, dist.get_rank(), dist.get_world_size()))
    entries = list(contenders(config, device))
    ours = entries[0]
    for entry in entries:
        for _ in range(3):
            entry.step(batches)
    for entry in entries:
        pairs = zip(ours.model.parameters(), entry.model.parameters())
        apart = max((a.double() - b.double()).abs().max().item() for a, b in pairs)
        alone = entry.wrapped is entry.model and dist.get_world_size() > 1
        if not alone and not apart < 1e-5:
            sys.exit(
                f"{entry.name} ended {apart:.1e} away from ddp.py's weights: its time would mean nothing"
            )
    say("after 3 steps all weights are equal within 1e-5 (compute alone, which averages nothing, aside)")
    for turn in range(config.rounds):
        for i in range(len(entries)):
            entries[(turn + i) % len(entries)].time(batches)
    say(f"{'torch ' + torch.__version__:<40}{'ms/step':>10}{'ddp.py / this':>16}{'least':>8}{'most':>7}")
    table = {}
    for entry in entries:
        ratios = [a / b for a, b in zip(ours.times, entry.times)]
        table[entry.name] = {"ms": statistics.median(entry.times), "ratio": statistics.median(ratios)}
        numbers = f"{statistics.median(entry.times):>10.1f}{statistics.median(ratios):>16.3f}"
        say(f"  {entry.name:<38}{numbers}{min(ratios):>8.3f}{max(ratios):>7.3f}")
    if config.json and dist.get_rank() == 0:
        Path(config.json).write_text(json.dumps(table))
    dist.destroy_process_group()


def parse():
    parser = lesson.flags()
    parser.add_argument("--bucket-mb", type=float, help="of ddp.py")
    parser.add_argument(
        "--overlap", default=True, action=lesson.argparse.BooleanOptionalAction, help="of ddp.py"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (on one host)")
    parser.add_argument("--hosts", type=int, default=1, help="hosts of one rank each, in network namespaces")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, in tc's words")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.set_defaults(steps=3)
    return parser.parse_args()


if __name__ == "__main__":
    config = parse()
    if "RANK" in os.environ:
        main(config)
    else:  # start again, on all ranks
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={config.ranks}"]
        if config.hosts > 1:
            launcher = [str(ROOT / "tools" / "hosts.sh"), str(config.hosts), config.rate, "--"]
            os.environ["PYTHON"] = sys.executable
        os.execv(launcher[0], [*launcher, os.path.abspath(__file__), *sys.argv[1:]])
