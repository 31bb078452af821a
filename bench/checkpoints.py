"""resume.py's checkpoints beside torch.distributed.checkpoint's of FSDP2, in turn, on the ranks of one host.

    torchrun --nproc_per_node=2 bench/checkpoints.py [--rounds 5] [--size small --batch 8 ...]

Both save weights and AdamW's moments, and sync no file. Both then load them, up to the weights in the model,
which must be those that were saved.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peer import new_model
from peers_data import fsdp2
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from bench import batches_of, finish, load


def jobs_of(lesson, config, device, batches):
    """({"save" or "load": (our job, torch's)}, each a function of a folder; (our, torch's) weights)."""
    unit = lesson.Unit(list(new_model(lesson, config, device).parameters()))
    adam = lesson.make_state(torch.optim.AdamW([unit.shard]), unit.shard)
    rows = [unit.shard.detach(), adam["exp_avg"], adam["exp_avg_sq"]]
    checkpoint = lesson.Checkpoint(config)
    peer = fsdp2(False, lesson, config, device)
    peer.step(batches)  # which makes its optimizer's state
    names = "model", "optimizer"
    state = dict(zip(names, get_state_dict(peer.model, peer.optimizer)))

    def save_ours(folder):
        folder.mkdir(exist_ok=True)
        checkpoint.folder = folder
        checkpoint.start_save(1, rows)
        checkpoint.finish_save()

    def save_theirs(folder):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=False))

    def load_ours(folder):
        checkpoint.folder = folder
        checkpoint.load(rows)
        unit.gather()

    def load_theirs(folder):
        state = dict(zip(names, get_state_dict(peer.model, peer.optimizer)))
        dcp.load(state, checkpoint_id=folder)
        options = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(peer.model, peer.optimizer, **options)

    weights = [unit.flat], [param.detach().to_local() for param in peer.model.parameters()]
    return {"save": (save_ours, save_theirs), "load": (load_ours, load_theirs)}, weights


def seconds(device, job):
    finish(device)
    started = time.perf_counter()
    job()
    finish(device)
    return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options, flags = parser.parse_known_args()
    flags = ["--size", "small", "--batch", "8", *flags]
    lesson = load("resume")
    device, batches = batches_of("resume", flags)
    jobs, weights = jobs_of(lesson, lesson.parse(flags), device, batches)
    saved = [[weight.clone() for weight in each] for each in weights]
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)  # rank 0's
        for what, pair in jobs.items():
            times = []
            for turn in range(options.rounds):
                took = [0, 0]
                for i in (turn % 2, 1 - turn % 2):
                    for weight in weights[i] if what == "load" else ():
                        weight.zero_()
                    took[i] = 1e3 * seconds(device, partial(pair[i], Path(folders[0], f"{i}-{turn}")))
                    assert all(map(torch.equal, weights[i], saved[i])), "loaded is not what was saved"
                times.append(took)
            ours, theirs = map(statistics.median, zip(*times))
            ratios = sorted(one / other for one, other in times)
            if dist.get_rank() == 0:
                print(
                    f"{what}: resume.py {ours:.1f} ms, torch.distributed.checkpoint {theirs:.1f} ms,", end=" "
                )
                print(f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
