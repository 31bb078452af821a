"""What resume.py promises, measured: no kill costs a checkpoint; what a save costs; its peer.

    python bench/checkpoints.py kills --times 200    (a rank or the whole job, at random or during a save)
    python bench/checkpoints.py pause                (the step that saves, the one after it, and others)
    python bench/checkpoints.py peer --rounds 5      (torch.distributed.checkpoint of FSDP2; saved on 2 ranks,
                                                      loaded on 3)

More flags are resume.py's (--size, --batch, --dtype ...).

kills: jobs of 1 to 3 ranks train the same model from where the one before was killed, with a checkpoint of
every 3rd step; when step 39 is saved, another folder is begun. A job must go on after the newest checkpoint
that its predecessor had published when it was killed, with the losses of a run that never stopped.
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import peers_torch
from peer import new_model

import resume

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.nn", "resume", "peers_torch"])
TOY = "--layers 3 --width 32 --context 16 --batch 12 --dtype fp64 --lr 0.01 --steps 40 --every 3"


class Job:
    """`size` processes, each a rank that calls function(note, *arguments); what they note comes by a pipe."""

    def __init__(self, size, function, *arguments):
        self.store = tempfile.TemporaryDirectory()
        self.notes, theirs = FORK.Pipe(duplex=False)
        self.ranks = []
        for rank in range(size):
            given = (rank, size, f"{self.store.name}/store", theirs, function, arguments)
            self.ranks.append(FORK.Process(target=begin, args=given))
            self.ranks[-1].start()
        theirs.close()

    def end(self, seconds=None):
        """Whether all ranks end by themselves; the others are killed."""
        deadline = time.monotonic() + (seconds or 600)
        for rank in self.ranks:
            rank.join(max(0, deadline - time.monotonic()))
        alive = [rank for rank in self.ranks if rank.is_alive()]
        for rank in alive:
            rank.kill()
            rank.join()
        return not alive

    def noted(self):
        """All notes of a job that has ended."""
        notes = []
        with contextlib.suppress(EOFError):
            while True:
                notes.append(self.notes.recv())
        return notes


def begin(rank, size, store, notes, function, arguments):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        function(notes.send if rank == 0 else lambda _: None, *arguments)
    dist.destroy_process_group()


def train(note, flags):
    """resume.py, which notes (step, loss, seconds)."""

    def print_step(config, step, loss, grad_norm, started):
        note((step, loss.item(), time.perf_counter() - started))

    resume.print_step = print_step
    resume.train(resume.parse(flags))


# ---- kills ----


def mortal(note, flags):
    """train() on a rank whose peers may be killed."""
    with contextlib.suppress(RuntimeError):
        train(note, flags)


def newest(folder):
    return max((int(path.name[5:]) for path in Path(folder).glob("step-*")), default=0)


def kill(job, how, folder, dice):
    """Kill a rank or all, at a random moment or during a save. Returns whether a save was under way."""
    job.notes.poll(60)  # for the first step
    if how.endswith("save"):
        while not any(Path(folder).glob("draft-*")) and job.ranks[0].is_alive():
            pass
        time.sleep(dice.uniform(0, 0.004))
    else:
        time.sleep(dice.uniform(0, 0.4))
    half = any(Path(folder).glob("draft-*"))
    for rank in job.ranks if how.startswith("job") else [dice.choice(job.ranks)]:
        rank.kill()
    return half


def kills(flags, options):
    flags = [*TOY.split(), *flags]
    alone = Job(1, train, flags)
    alone.end()
    losses = {step: loss for step, loss, _ in alone.noted()}
    dice = random.Random(options.seed)
    ways = ("a rank", "job", "a rank, during a save", "job, during a save")
    counts = dict.fromkeys(ways, 0)
    half, finished, lost, worst = 0, 0, [], 0
    folder = tempfile.TemporaryDirectory()
    while sum(counts.values()) < options.times:
        before = newest(folder.name)
        size = dice.choice((1, 2, 3))
        job = Job(size, mortal, [*flags, "--checkpoint", folder.name])
        how = ways[sum(counts.values()) % 4]
        half += kill(job, how, folder.name, dice)
        after = newest(folder.name)
        assert job.end(30), "ranks outlived the one that was killed"
        counts[how] += 1
        notes = job.noted()
        if notes:
            assert notes[0][0] == before + 1, f"went on with step {notes[0][0]} after {before}"
            worst = max(worst, *(abs(loss - losses[step]) for step, loss, _ in notes))
            lost.append(notes[-1][0] - newest(folder.name))
        assert newest(folder.name) >= max(before, after), "the newest checkpoint was lost"
        if newest(folder.name) >= 39:
            finished += 1
            folder = tempfile.TemporaryDirectory()
    print(f"kills: {', '.join(f'{count} of {how}' for how, count in counts.items())}")
    print(
        f"{half} while a save was under way; no checkpoint was lost; {finished} times the last step was saved"
    )
    print(f"steps to be repeated: {statistics.mean(lost):.1f} in the mean, {max(lost)} at most")
    print(f"all losses are those of a run that never stopped, to {worst:.1e}")


# ---- what a save costs ----


def pause(flags, options):
    flags = ["--size", "small", "--batch", "8", "--steps", "31", *flags]
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(options.rounds):
            for how in "without", "with", "--no-overlap":
                more = (
                    []
                    if how == "without"
                    else ["--every", "10", "--checkpoint", f"{folder}/{how}{round_number}"]
                )
                more += ["--no-overlap"] if how == "--no-overlap" else []
                job = Job(options.ranks, train, [*flags, *more])
                job.end()
                for step, _, seconds in job.noted()[5:]:
                    kind = {0: "saves", 1: "after"}.get(step % 10, "other")
                    table.setdefault((how, kind), []).append(1e3 * seconds)
    plain = statistics.median(table["without", "other"])
    print(f"pause | {options.ranks} ranks | {' '.join(flags)} | a step without checkpoints {plain:.1f} ms")
    for how in "with", "--no-overlap":
        saves, after, other = (statistics.median(table[how, kind]) for kind in ("saves", "after", "other"))
        print(
            f"{how:<14}the step that saves {saves:.1f} ms, the next one {after:.1f}, others {other:.1f};",
            end=" ",
        )
        print(f"a save stops training for {(saves - other) / other:.2f} of a step")


# ---- the peer ----


def states(config):
    """Ours and FSDP2's model and optimizer, after a step on the same batch."""
    device, text = resume.set_up(config)
    model = new_model(resume, config, device)
    own = resume.ShardedOptimizer(list(model.parameters()), torch.optim.AdamW, lr=config.lr, fused=True)
    peer = peers_torch.fsdp2(True, False, resume, config, device)
    rank, size = dist.get_rank(), dist.get_world_size()
    ((inputs, targets),) = resume.microbatches(config, text, 1, device, rank, size)
    (resume.mean_loss(model(inputs), targets) / size).backward()
    own.step(math.inf)
    peer.config.clip = 0
    peer.step([(inputs, targets)])
    return own, peer


def timed(function):
    dist.barrier()
    started = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - started


def race(note, flags, folder, rounds, what):
    own, peer = states(resume.parse(flags))
    group = dist.new_group()

    def save_ours(path):
        resume.save(path, [], 2, group, 1, own.state.numpy().copy())

    def load_theirs(path):
        model, optimizer = get_state_dict(peer.model, peer.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(peer.model, peer.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def load_ours(path):
        own.steps.fill_(resume.load(path, [], group, own.state, own.numel))
        own.unshard()

    model, optimizer = get_state_dict(peer.model, peer.optimizer)
    state = {"model": model, "optimizer": optimizer}
    if what == "load":  # from nothing
        own.state.zero_()
        for param in peer.model.parameters():
            param.data.zero_()
    for i in range(rounds):
        ours, theirs = Path(f"{folder}/ours-{i}"), f"{folder}/theirs-{i}"
        ours.mkdir(exist_ok=True)
        if what == "save":
            jobs = {
                "ours": partial(save_ours, ours),
                "theirs": partial(dcp.save, state, checkpoint_id=theirs),
            }
        else:
            jobs = {"ours": partial(load_ours, ours), "theirs": partial(load_theirs, theirs)}
        order = list(jobs) if i % 2 else list(jobs)[::-1]
        seconds = {who: timed(jobs[who]) for who in order}
        note((what, seconds["ours"], seconds["theirs"]))
    weights = {**peer.weights(), "flat": own.flat_param[: sum(map(torch.numel, own.params))]}
    if what == "save" and dist.get_rank() == 0:
        torch.save(weights, f"{folder}/weights.pt")
    for name, weight in torch.load(f"{folder}/weights.pt").items() if what == "load" else ():
        assert torch.equal(weights[name], weight), f"{name} is another one"
    size = sum(path.stat().st_size for path in Path(folder).glob("ours-0/*/*.bin"))
    note(("bytes", size, sum(path.stat().st_size for path in Path(folder).glob("theirs-0/*"))))


def peer(flags, options):
    flags = ["--size", "small", "--batch", "12", *flags]
    with tempfile.TemporaryDirectory() as folder:
        seconds = {}
        for size, what in (2, "save"), (3, "load"):
            job = Job(size, race, flags, folder, options.rounds, what)
            assert job.end(), "ranks hang"
            assert all(rank.exitcode == 0 for rank in job.ranks), f"{what}: a rank failed"
            for what_of_it, ours, theirs in job.noted():
                seconds.setdefault(what_of_it, []).append((ours, theirs))
    ours, theirs = seconds.pop("bytes")[0]
    print(f"peer: {' '.join(flags)}; {ours / 1e6:.1f} MB on disk, torch's {theirs / 1e6:.1f}")
    seconds["both"] = [(a + c, b + d) for (a, b), (c, d) in zip(seconds["save"], seconds["load"])]
    for what, rows in seconds.items():
        ours, theirs = (statistics.median(column) for column in zip(*rows))
        ratios = sorted(ours / theirs for ours, theirs in rows)
        print(f"{what:<5}{1e3 * ours:8.1f} ms, torch's {1e3 * theirs:8.1f} ms,", end=" ")
        print(f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def main():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("what", choices=("kills", "pause", "peer"))
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dice", dest="seed", type=int, default=0)
    options, flags = parser.parse_known_args()
    {"kills": kills, "pause": pause, "peer": peer}[options.what](flags, options)


if __name__ == "__main__":
    main()
