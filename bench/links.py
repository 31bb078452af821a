"""What each collective of collectives.py takes and sends, beside the library's, and what a link's model says.

    torchrun --nproc_per_node=4 bench/links.py
    PYTHON=python3 bench/hosts.sh 4 1gbit -- bench/links.py --megabytes 20 --json links.json

S bytes, from 4 to --megabytes; those of a reduce-scatter, all-gather or all-to-all are a multiple of N
numbers. All take turns; ms is the median over turns, of the slowest rank. bus: what a rank has to send at
least, over the time, as nccl-tests counts it: 2S(N-1)/N of an all-reduce, S(N-1)/N of its halves and of an
all-to-all, S of a broadcast. sent: what the interface really sent for a rank in the mean, headers and all
(Linux), beside what the algorithm should send.

model: a round takes alpha seconds and each byte beta (Thakur, Rabenseifner and Gropp 2005), fitted to all
times of collectives.py with least squares of the relative errors. Recursive doubling is faster than the other
two up to where their models cross.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import collectives as ours

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch 2.11
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Row:
    """A collective of so many bytes; rounds, path and share of the library's are None.

    Over nbytes: path is what is sent in the rounds, one after the other, share what a rank sends in the mean.
    """

    name: str
    rounds: int | None
    path: float | None
    share: float | None
    bus: float
    nbytes: int
    seconds: float = 0
    sent: float = 0
    model: float | None = None


def collectives_of(numel, device):
    """{row: function} for x of so many numbers, and each time the library's after ours."""
    world_size = dist.get_world_size()
    x = torch.zeros(numel, device=device)
    whole = torch.zeros(-(-numel // world_size) * world_size, device=device)
    shard = whole.chunk(world_size)[0].clone()
    other = whole.clone()
    bits = world_size.bit_length() - 1
    beyond = world_size - 2**bits
    fold = 2 * (beyond > 0)
    tree = (world_size - 1).bit_length()
    hops = world_size - 1
    ring = hops / world_size
    doubled = (2**bits * bits + 2 * beyond) / world_size
    halved = 2 * (1 - 2**-bits) + fold
    table = (
        ("tree_broadcast", tree, tree, ring, 1, x, partial(ours.tree_broadcast, x)),
        ("broadcast", None, None, None, 1, x, partial(dist.broadcast, x, 0)),
        ("ring_reduce_scatter", hops, ring, ring, ring, whole, partial(ours.ring_reduce_scatter, whole)),
        ("reduce_scatter", None, None, None, ring, whole, partial(reduce_scatter, shard, whole)),
        ("ring_all_gather", hops, ring, ring, ring, whole, partial(ours.ring_all_gather, shard)),
        ("all_gather", None, None, None, ring, whole, partial(all_gather, whole, shard)),
        ("pairwise_all_to_all", hops, ring, ring, ring, whole, partial(ours.pairwise_all_to_all, whole)),
        ("all_to_all", None, None, None, ring, whole, partial(dist.all_to_all_single, other, whole)),
        ("ring_all_reduce", 2 * hops, 2 * ring, 2 * ring, 2 * ring, x, partial(ours.ring_all_reduce, x)),
        ("recursive_doubling", bits + fold, bits + fold, doubled, 2 * ring, x,
         partial(ours.recursive_doubling_all_reduce, x)),
        ("halving_doubling", 2 * bits + fold, halved, 2 * ring, 2 * ring, x,
         partial(ours.halving_doubling_all_reduce, x)),
        ("all_reduce", None, None, None, 2 * ring, x, partial(dist.all_reduce, x)),
    )  # fmt: skip
    return [(Row(*fields, x.nbytes), function) for *fields, x, function in table]


def bytes_sent():
    """By this host's interface so far, for each of its ranks."""
    link = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    counter = Path(f"/sys/class/net/{link}/statistics/tx_bytes")
    return int(counter.read_text()) / int(os.environ["LOCAL_WORLD_SIZE"]) if counter.exists() else 0


def meet(device):
    """Wait until all ranks are here and have done all that was begun."""
    one = torch.zeros(1, device=device)
    dist.all_reduce(one)
    one.item()


def measure(functions, turns, device):
    """[(seconds, bytes sent)] of each function: medians over turns, of the slowest and of the mean rank."""
    times, sent = np.zeros((2, turns, len(functions)))
    for turn in range(-1, turns):  # the first to warm up, which the last overwrites
        for i, function in enumerate(functions):
            meet(device)
            before = bytes_sent()
            meet(device)
            started = time.perf_counter()
            function()
            torch.zeros(1, device=device).item()  # waits for the device
            times[turn, i] = time.perf_counter() - started
            meet(device)
            sent[turn, i] = bytes_sent() - before
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (times, sent))
    times = np.max([times for times, _ in everyone], axis=0)
    sent = np.mean([sent for _, sent in everyone], axis=0)
    return list(zip(np.median(times, axis=0), np.median(sent, axis=0)))


def fit(rows):
    """(alpha, beta) in seconds and seconds per byte, whose relative errors have the least squares."""
    known = [row for row in rows if row.rounds is not None]
    costs = [[row.rounds / row.seconds, row.path * row.nbytes / row.seconds] for row in known]
    alpha, beta = np.linalg.lstsq(np.array(costs), np.ones(len(known)), rcond=None)[0]
    for row in known:
        row.model = row.rounds * alpha + row.path * row.nbytes * beta
    return alpha, beta


def crossover(rows, other, alpha, beta):
    """Bytes up to which recursive doubling is faster: by the model, and the measured sizes around that."""
    pairs = [[row for row in rows if row.name == name] for name in ("recursive_doubling", other)]
    doubling, another = pairs[0][0], pairs[1][0]
    saved = doubling.path - another.path
    predicted = alpha * (another.rounds - doubling.rounds) / (beta * saved) if saved > 0 else np.inf
    slower = [one.nbytes for one, two in zip(*pairs) if one.seconds > two.seconds]
    faster = [one.nbytes for one, two in zip(*pairs) if one.seconds <= two.seconds]
    first = max(faster, default=0)
    return predicted, first, min((size for size in slower if size > first), default=np.inf)


def report(rows, ranks):
    """The lines of the table, with what the model says."""
    alpha, beta = fit(rows)
    yield f"{'S bytes':>10}  {'collective':<20}{'ms':>9}{'model':>9}{'bus GB/s':>10}{'sent MB':>18}"
    for row in rows:
        model = f"{1e3 * row.model:.2f}" if row.rounds is not None else ""
        share = f" / {row.share * row.nbytes / 1e6:.3f}" if row.rounds is not None else ""
        speed = row.bus * row.nbytes / row.seconds / 1e9
        line = f"{row.nbytes:>10}  {row.name:<20}{1e3 * row.seconds:>9.2f}{model:>9}{speed:>10.3f}"
        yield f"{line}{row.sent / 1e6:>10.3f}{share}"
    off = [max(row.model / row.seconds, row.seconds / row.model) for row in rows if row.model]
    speed = 1e-9 / beta if beta else 0
    yield f"alpha {1e6 * alpha:.0f} us, 1 / beta {speed:.2f} GB/s ({ranks} ranks)"
    if off:
        yield f"model and time differ by a factor of {statistics.median(off):.2f} in the median"
    for other in ("halving_doubling", "ring_all_reduce"):
        predicted, first, then = crossover(rows, other, alpha, beta)
        yield (
            f"recursive_doubling is faster than {other} up to {predicted:.0f} bytes by the model, "
            f"measured: from {first} to {then}"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=20, help="the largest size")
    parser.add_argument("--turns", type=int, default=9, help="of each collective")
    parser.add_argument("--json", help="file for the table")
    config = parser.parse_args()
    backend = "nccl" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local}" if backend == "nccl" else "cpu")
    torch.cuda.set_device(device if backend == "nccl" else -1)  # -1: none
    dist.init_process_group(backend)
    torch.set_num_threads(1)
    most = max(int(config.megabytes * 250_000), 1)
    sizes = [8**i for i in range(20) if 8**i < most] + [most]
    rows = []
    for numel in sizes:
        entries = collectives_of(numel, device)
        for (row, _), numbers in zip(entries, measure([f for _, f in entries], config.turns, device)):
            row.seconds, row.sent = numbers
            rows.append(row)
    if dist.get_rank() == 0:
        for line in report(rows, dist.get_world_size()):
            print(line)
        if config.json:
            Path(config.json).write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
