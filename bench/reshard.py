"""What it takes to update the servers: each --how of reshard.py, beside DTensor's ways, turn by turn.

    torchrun --nproc_per_node=4 bench/reshard.py --servers 2 --size small
    PYTHON=python3 bench/hosts.sh 4 1gbit -- bench/reshard.py --servers 2 --size small    (Linux and root)

Peers keep each parameter as a DTensor that the trainers split by rows:
- full_tensor(): all trainers gather it, then trainer i sends slices to the servers i, i + N, ...
- redistribute(): the trainers split it as the servers do (with as many trainers as servers), then trainer i
  sends its part to server i.

First all must give the servers the same slices. Then each updates --turns times; ms is the median over turns
of the slowest rank's time. out and in: what the interface of the busiest host (of this one, on loopback)
really sent and received in a turn, headers and all, in MB; formula: what the busiest rank sends to servers
and to other trainers.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import reshard as lesson

HOWS = ("rank0", "units", "direct")


class Peer:
    """Parameters as DTensors of the trainers, and on servers buffers for their slices, one by one."""

    def __init__(self, config, ranks, device, full):
        self.ranks, self.full = ranks, full
        torch.manual_seed(config.seed)
        mesh = DeviceMesh.from_group(ranks.trainers, device.type) if ranks.is_trainer else None
        self.params = []  # (DTensor on trainers, buffer on servers, dimension)
        server = ranks.rank - ranks.n_trainers
        for name, param in lesson.GPT(config).to(device, lesson.DTYPES[config.dtype]).named_parameters():
            dim, stacked = lesson.SPLIT.get(name.split(".", 2)[-1], (param.dim(), 1))
            weight = param.detach()
            if stacked > 1:  # q, k and v in a dimension of their own
                weight, dim = weight.unflatten(0, (stacked, -1)), 1
            dim = None if dim >= weight.dim() else dim
            if ranks.is_trainer:
                weight = distribute_tensor(weight, mesh, [Shard(0)])
            else:
                weight = torch.empty_like(self.slice(weight, dim, server))
            self.params.append((weight, dim))

    def slice(self, weight, dim, server):
        if dim is None:
            return weight
        first, end = (i * weight.shape[dim] // self.ranks.n_servers for i in (server, server + 1))
        return weight.narrow(dim, first, end - first).contiguous()

    def update_servers(self):
        ranks = self.ranks
        for weight, dim in self.params:
            ops = []
            if ranks.is_trainer:
                if self.full:
                    whole = weight.full_tensor()
                    for server in range(ranks.rank, ranks.n_servers, ranks.n_trainers):
                        message = self.slice(whole, dim, server)
                        ops.append(dist.P2POp(dist.isend, message, ranks.n_trainers + server))
                else:
                    placement = Replicate() if dim is None else Shard(dim)
                    own = weight.redistribute(placements=[placement]).to_local().contiguous()
                    ops.append(dist.P2POp(dist.isend, own, ranks.n_trainers + ranks.rank))
            else:
                server = ranks.rank - ranks.n_trainers
                ops.append(dist.P2POp(dist.irecv, weight, server % ranks.n_trainers))
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()

    def slices(self):
        return [weight for weight, _ in self.params]


class Ours:
    def __init__(self, config, device, how):
        torch.manual_seed(config.seed)
        model = lesson.GPT(config).to(device, lesson.DTYPES[config.dtype])
        names = [name for name, _ in model.named_parameters()]
        self.ranks = lesson.Resharding(model, lesson.SPLIT, config.servers, how)
        self.update_servers = self.ranks.update_servers
        self.names = names

    def slices(self):
        found = {}
        for unit in self.ranks.units:
            found |= zip(unit.names, unit.views(unit.held.data).values())
        return [found[name] for name in self.names]


def bytes_moved():
    """(sent, received) by this host's interface so far."""
    link = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.strip().partition(":")
        if name == link:
            return int(numbers.split()[8]), int(numbers.split()[0])
    return 0, 0


def measure(ways, turns):
    """{title: (ms of the slowest rank, most bytes out of a host, most bytes into a host)}, medians."""
    rows = {title: [] for title in ways}
    for turn in range(-1, turns):  # the first to warm up
        titles = [*ways]
        for title in titles[turn % len(titles) :] + titles[: turn % len(titles)]:
            dist.barrier()
            sent, received = bytes_moved()
            dist.barrier()
            started = time.perf_counter()
            ways[title].update_servers()
            ms = 1e3 * (time.perf_counter() - started)
            dist.barrier()
            after = bytes_moved()
            numbers = torch.tensor([ms, after[0] - sent, after[1] - received], dtype=torch.double)
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
            if turn >= 0:
                rows[title].append(numbers.tolist())
    return {title: [statistics.median(column) for column in zip(*row)] for title, row in rows.items()}


def formulas(ranks, config):
    """{how: (bytes out of the busiest rank, bytes into it)} of reshard.py's docstring, and its gathers."""
    with torch.device("meta"):
        sizes = {name: param for name, param in lesson.GPT(config).named_parameters()}
    split = [param.numel() for name, param in sizes.items() if is_split(name, param)]
    params, width = sum(param.numel() for param in sizes.values()), lesson.DTYPES[config.dtype].itemsize
    own = params - sum(split) + sum(split) / ranks.n_servers  # D
    gathered = params * (ranks.n_trainers - 1) / ranks.n_trainers
    most = -(-ranks.n_servers // ranks.n_trainers)
    out = {"rank0": ranks.n_servers * own + gathered, "units": most * own + gathered}
    out["direct"] = ranks.n_servers * own / ranks.n_trainers
    into = {"rank0": max(own, gathered), "units": max(own, gathered), "direct": own}
    return {how: (width * out[how], width * into[how]) for how in HOWS}


def is_split(name, param):
    dim, _ = lesson.SPLIT.get(name.split(".", 2)[-1], (param.dim(), 1))
    return dim < param.dim()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9)
    bench, flags = parser.parse_known_args()
    config = lesson.parse(flags)
    n_trainers = lesson.choose_servers(config, int(os.environ["WORLD_SIZE"]))
    device, _ = lesson.set_up(config, f" | servers {config.servers}", n_trainers)
    torch.set_num_threads(1)
    ways = {f"reshard.py --how {how}": Ours(config, device, how) for how in HOWS}
    ranks = ways["reshard.py --how units"].ranks
    ways["DTensor full_tensor(), slices"] = Peer(config, ranks, device, True)
    if n_trainers == config.servers:
        ways["DTensor redistribute()"] = Peer(config, ranks, device, False)
    expected = None
    for title, way in ways.items():
        for tensor in () if ranks.is_trainer else way.slices():
            tensor.fill_(torch.nan)
        way.update_servers()
        if not ranks.is_trainer:
            flat = torch.cat([tensor.flatten() for tensor in way.slices()])
            expected = flat if expected is None else expected
            assert torch.equal(flat, expected), f"{title}: other slices"
    rows = measure(ways, bench.turns)
    if dist.get_rank() == 0:
        by_formula = formulas(ranks, config)
        best = min(ms for title, (ms, *_) in rows.items() if "DTensor" in title)
        print(f"{'':<34}{'ms':>9}{'ratio':>8}{'out MB':>10}{'formula':>9}{'in MB':>10}{'formula':>9}")
        for title, (ms, out, into) in rows.items():
            expect = by_formula.get(title.split()[-1], (0, 0))
            parts = "".join(
                f"{x / 1e6:>10.2f}{f'{y / 1e6:.2f}' if y else '-':>9}" for x, y in zip((out, into), expect)
            )
            print(f"{title:<34}{ms:>9.1f}{ms / best:>8.2f}{parts}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
