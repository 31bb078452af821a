"""How wrong other means are than uneven.py's, in the first step: its loss, its gradient's norm and direction.

    torchrun --nproc_per_node=4 bench/means.py --context 512 --batch 64 --accum 2

Flags are uneven.py's. "off" is the norm of the difference from the right gradient, over the right one's norm.
ranks: each divides by its own tokens, and gradients are averaged. microbatches: each divides by its own
tokens, the mean of a rank's is averaged over ranks. Join: torch's DDP within torch's Join, where a rank whose
documents have ended takes part with zeros; each microbatch's mean, averaged over the ranks and the most
microbatches of any. The last line is of all --steps: how much longer than the mean of ranks the slowest
computes, by FLOPs of documents; then, for rows of one document and for packed ones, how many microbatches
all take, and what part of the rows is padding.
"""

import argparse
import importlib
import statistics
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def summed(lesson, rows, batches, divide):
    """[loss, gradients ...] summed over ranks; divide(targets): by what a microbatch's sum is divided."""
    loss = 0
    for batch in batches:
        inputs, targets, positions = batch
        microloss = lesson.sum_of_losses(rows(inputs, positions), targets) / divide(targets)
        microloss.backward()
        loss += microloss.detach()
    found = [loss, *(param.grad for param in rows.parameters())]
    for tensor in found:
        dist.all_reduce(tensor)
    rows.zero_grad()
    return found


def joined(lesson, rows, batches, most):
    """The same by DDP and Join, of a rank with most microbatches, which sees all of them."""
    ddp = DistributedDataParallel(rows)
    found = [torch.zeros(()), *(torch.zeros_like(param) for param in rows.parameters())]
    with Join([ddp]):
        for batch in batches:
            inputs, targets, positions = batch
            loss = lesson.sum_of_losses(ddp(inputs, positions), targets) / targets.count_nonzero()
            loss.backward()
            found[0] += loss.detach() / dist.get_world_size() / most
            for total, param in zip(found[1:], rows.parameters()):
                total += param.grad / most
            rows.zero_grad()
    dist.all_reduce(found[0])  # DDP has averaged the rest
    return found


def work(lesson, config, documents, ranks):
    """How even the ranks' work is, and how full their rows, as a line."""
    deal, idle = lesson.deal, []

    def noted(documents, order, cost, ranks):
        shares = deal(documents, order, cost, ranks)
        costs = [sum(cost(len(document)) for document in share) for share in shares]
        idle.append(max(costs) / statistics.mean(costs) - 1)
        return shares

    rows = []
    with mock.patch.object(lesson, "deal", noted):
        for pack in (False, True):
            own = argparse.Namespace(**vars(config) | {"pack": pack})
            slots = tokens = most = 0
            for step in range(1, config.steps + 1):
                numbers = []
                for rank in range(ranks):
                    batches = lesson.load_microbatches(own, documents, step, "cpu", rank, ranks)
                    numbers.append(len(batches))
                    slots += sum(targets.numel() for _, targets, _ in batches)
                    tokens += sum(targets.count_nonzero().item() for _, targets, _ in batches)
                most += max(numbers) / config.steps
            rows.append(f"{most:.2f} microbatches, {1 - tokens / slots:.0%} padding")
    found = f"slowest over mean {statistics.mean(idle):+.1%}, at most {max(idle):+.1%}"
    return f"{found} | {rows[0]} | packed: {rows[1]}"


def norm_of(tensors):
    return torch.stack([tensor.double().norm() for tensor in tensors]).norm().item()


def main():
    lesson = importlib.import_module("uneven")
    config = lesson.parse()
    device, text = lesson.set_up(config, f" | order {config.order} | pack {config.pack}")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    documents = lesson.cut_documents(text, config.context)
    batches = lesson.load_microbatches(config, documents, 1, device, rank, ranks)
    rows = lesson.OverDocuments(lesson.GPT(config)).to(device, lesson.DTYPES[config.dtype])
    numbers = [None] * ranks
    dist.all_gather_object(
        numbers, (len(batches), sum(targets.count_nonzero().item() for _, targets, _ in batches))
    )
    microbatches, tokens = zip(*numbers)
    ways = {"right": summed(lesson, rows, batches, lambda _: sum(tokens))}
    ways["ranks"] = summed(lesson, rows, batches, lambda _: tokens[rank] * ranks)
    ways["microbatches"] = summed(
        lesson, rows, batches, lambda targets: targets.count_nonzero() * len(batches) * ranks
    )
    ways["Join"] = joined(lesson, rows, batches, max(microbatches))
    if rank == microbatches.index(max(microbatches)):  # which has seen all of Join's
        print(f"tokens of the ranks: {tokens}; microbatches: {microbatches}")
        right_loss, *right = ways["right"]
        for way, (loss, *grads) in ways.items():
            norm, right_norm = norm_of(grads), norm_of(right)
            off = norm_of([grad - other for grad, other in zip(grads, right)]) / right_norm
            percent = (
                f"loss {100 * (loss / right_loss - 1):+7.3f} % | norm {100 * (norm / right_norm - 1):+7.2f} %"
            )
            print(f"{way:<13}loss {loss:.4f} | norm {norm:.4f} | {percent} | off {100 * off:.1f} %")
        print(work(lesson, config, documents, ranks))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
