"""What is special to resume.py."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from test_all import refused
from tests.harness import ROOT, TINY, apart, load, mutants, train, world

FLAGS = f"{TINY} --batch 24 --clip 0.5 --lr 0.01 --dtype fp64"
SIZES = (1, 2, 3, 4, 8)


def check_kept(folder, *steps):
    found = sorted(path.name for path in Path(folder).iterdir())
    assert found == [f"step-{step:08}" for step in steps], f"kept {found}"


def save(folder, size, name="resume", flags="", tweak=lambda lesson: None):
    """Train to step 3 with a checkpoint of each step."""
    train(name, size, f"{FLAGS} --steps 3 --every 1 --checkpoint {folder} {flags}")
    check_kept(folder, 2, 3)


def check_goes_on(name, folder, size=2, flags=""):
    """From step 4 on all is as in the run that never stopped."""
    plain, weights = train("single", 1, f"{FLAGS} --steps 6 {flags}")
    result, own = train(name, size, f"{FLAGS} --steps 6 --checkpoint {folder} {flags}")
    assert apart(result["losses"], plain["losses"][3:]) < 1e-12, "losses differ"
    assert apart(result["grad_norms"], plain["grad_norms"][3:]) < 1e-12, "gradient norms differ"
    assert apart(own, weights) < 1e-12, "weights differ"


def check_resume(name, saved_on=3, size=2, flags=""):
    with TemporaryDirectory() as folder:
        save(folder, saved_on, name, flags)
        check_goes_on(name, folder, size, flags)


@pytest.mark.parametrize("saved_on", SIZES)
def test_what_n_ranks_saved_goes_on_on_any_number(saved_on, tmp_path):
    save(tmp_path, saved_on)
    for size in SIZES:
        check_goes_on("resume", tmp_path, size)


def test_on_as_many_ranks_it_goes_on_to_the_last_bit(tmp_path):
    whole, weights = train("resume", 3, f"{FLAGS} --steps 6")
    save(tmp_path, 3, flags="--no-overlap")
    result, own = train("resume", 3, f"{FLAGS} --steps 6 --checkpoint {tmp_path}")
    assert result["losses"] == whole["losses"][3:] and apart(own, weights) == 0


def tweaked(tweak, name, folder, flags=""):
    """On a rank: train to step 6 with a lesson of which tweak() has replaced parts. Returns its notes."""
    lesson = load(name)
    lesson.print = lambda *_, **__: None
    notes = tweak(lesson)
    lesson.train(lesson.parse(f"{FLAGS} --steps 6 --checkpoint {folder} {flags}".split()))
    return notes


def count_reads(lesson):
    notes = []
    checksum = lesson.checksum
    lesson.checksum = lambda part, first: notes.append(part.nbytes) or checksum(part, first)
    return notes


def check_bytes(name, saved_on=3, size=4):
    numel = sum(map(torch.numel, train("single", 1, FLAGS)[1].values()))
    with TemporaryDirectory() as folder:
        save(folder, saved_on, name)
        on_disk = sum(path.stat().st_size for path in Path(folder).glob("step-00000003/*.bin"))
        assert 0 <= on_disk - 24 * numel < 24 * saved_on, f"{on_disk} bytes on disk"
        read = [sum(sizes) for sizes in world(size).run(tweaked, count_reads, name, folder)]
        assert abs(sum(read) - on_disk) < 24 * 8, f"read {sum(read)} of {on_disk} bytes"
        assert max(read) <= 24 * -(-numel // size), "a rank read more than its shard"


def test_on_disk_are_3_numbers_a_parameter_and_each_is_read_once(tmp_path):
    check_bytes("resume")
    _, weights = train("resume", 2, f"{TINY} --dtype bf16 --every 3 --checkpoint {tmp_path}")
    size = sum(path.stat().st_size for path in tmp_path.glob("*/*.bin"))
    assert 0 <= size - 12 * sum(map(torch.numel, weights.values())) < 24


# ---- killed at any moment ----


def newest_of(folder):
    """The newest step. All that is published must be whole; in it, all numbers are the step."""
    steps = [0]
    for path in sorted(Path(folder).glob("step-*")):
        assert (path / "manifest.json").exists(), f"{path.name} has no manifest"
        manifest = json.loads((path / "manifest.json").read_text())
        steps.append(manifest["step"])
        for shard in manifest["shards"]:
            assert (path / shard["file"]).exists(), f"{path.name} has no {shard['file']}"
            rows = np.fromfile(path / shard["file"])
            assert len(rows) == 3000 and (rows == steps[-1]).all(), f"{shard['file']} is half-written"
    return steps[-1]


def killed_at_each_line(name, folder):
    """On two ranks: save steps 1 to 4; look before each line of rank 0. Returns what reached the disk."""
    lesson = load(name)
    newest = []
    events = []

    def trace(frame, event, argument):
        if frame.f_code.co_filename.endswith(("resume.py", "pathlib.py", "shutil.py")):
            newest.append(newest_of(folder))
            return trace

    real = Path.rename
    rename = mock.patch.object(Path, "rename", lambda old, new: events.append(Path(new).name) or real(old, new))
    name_of = partial("/proc/self/fd/{}".format)
    fsync = mock.patch.object(os, "fsync", lambda file: events.append(Path(os.readlink(name_of(file))).name))
    with rename, fsync:
        for step in 1, 2, 3, 4:
            time.sleep(0.1 * dist.get_rank())  # rank 1 is late
            sys.settrace(trace if dist.get_rank() == 0 else None)
            lesson.save(Path(folder), {}, 2, None, step, np.full((3, 1000), float(step)))
            sys.settrace(None)
            dist.barrier()
            assert newest_of(folder) == step, f"step {step} is not there"
    assert newest == sorted(newest), "the newest was lost"
    return events[:5]


def check_kills(name):
    with TemporaryDirectory() as folder:
        events, others = world(2).run(killed_at_each_line, name, folder)
        assert others == ["rank-1.bin"] * 4, f"on the disk: {others}"
        published = ["rank-0.bin", "manifest.json", "draft-00000001", "step-00000001", Path(folder).name]
        assert events == published, f"on the disk: {events}"
        check_kept(folder, 3, 4)


def test_killed_at_any_line_a_save_leaves_whole_checkpoints_alone():
    check_kills("resume")


def test_a_killed_rank_costs_the_steps_since_the_newest_checkpoint(tmp_path):
    flags = f"{FLAGS} --steps 40 --every 5 --checkpoint {tmp_path}/c --save {tmp_path}/weights.pt".split()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=3"]
    job = subprocess.Popen([*command, str(ROOT / "resume.py"), *flags], stderr=subprocess.DEVNULL)
    while not (tmp_path / "c" / "step-00000010").exists():
        assert job.poll() is None, "the job ended too early"
        time.sleep(0.01)
    (tmp_path / "c" / "draft-00000999").mkdir()  # as if it were killed during a save
    children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert job.wait(timeout=60) == 0
    check_kept(tmp_path / "c", 35, 40)
    _, weights = train("single", 1, f"{FLAGS} --steps 40")
    assert apart(torch.load(tmp_path / "weights.pt"), weights) < 1e-9


# ---- while training goes on ----


def late(lesson):
    """Step 3 is written when step 4 has been, or not before 2 s."""
    begun = threading.Event()
    notes = []
    microbatches, checksum = lesson.microbatches, lesson.checksum

    def begin(config, text, step, *more):
        if step == 5:
            begun.set()
        return microbatches(config, text, step, *more)

    def wait(*args):
        notes.append(begun.wait(2))
        return checksum(*args)

    lesson.microbatches, lesson.checksum = begin, wait
    return notes


def check_overlap(name, flags="", overlaps=True):
    with TemporaryDirectory() as folder:
        for notes in world(2).run(tweaked, late, name, folder, f"--every 3 --steps 5 {flags}"):
            assert notes == [overlaps], f"training went on: {notes}"
        check_goes_on(name, folder)


def test_training_goes_on_while_a_checkpoint_is_written():
    check_overlap("resume")
    check_overlap("resume", "--no-overlap", overlaps=False)


def bad_disk(lesson, step, rank, act):
    """When this rank writes its file of this step. Notes what is said."""
    notes = []
    sync = lesson.sync

    def bad(path):
        if str(path).endswith(f"draft-{step:08}/rank-{rank}.bin"):
            act()
        sync(path)

    lesson.print = lambda text, **_: notes.append(text) if "--checkpoint" in text else None
    lesson.sync = bad
    return notes


def full():
    raise OSError(28, "No space left on device")


def check_disk(name, act, said):
    with TemporaryDirectory() as folder:
        save(folder, 2, name)
        tweak = partial(bad_disk, step=4, rank=1, act=act)
        one, other = world(2).run(tweaked, tweak, name, folder, "--every 1")
        assert other == [] and len(one) == 1 and said in one[0], f"said {one} and {other}"
        check_kept(folder, 5, 6)


def test_a_bad_disk_costs_a_line_and_no_checkpoint():
    check_disk("resume", full, "step 4 is not saved: [Errno 28] No space left on device")
    check_disk("resume", partial(time.sleep, 1), "step 5 waits for the save before it")


# ---- refusals ----


def check_refusal(name, path, change, flags="", said=""):
    """After change(bytes) of a file of the newest checkpoint."""
    with TemporaryDirectory() as folder:
        save(folder, 2, name)
        file = Path(folder) / "step-00000003" / path
        file.write_bytes(change(file.read_bytes()))
        flags = f"{FLAGS} --checkpoint {folder} --steps 6 {flags}"
        (code, lines), other = world(2).run(refused, name, flags)
        assert (code, len(lines)) == (2, 1) and other == (2, []), f"{code}, {lines}, {other}"
        assert "--checkpoint" in lines[0] and said in lines[0], f"says {lines[0]}"


def flip(data, at=-9):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def swap(data):
    return data[-24:-16] + data[8:-24] + data[-16:] + data[:8] if False else data[8:16] + data[:8] + data[16:]


REFUSED = [
    ("rank-1.bin", flip, "", "rank-1.bin is missing or damaged"),
    ("rank-0.bin", partial(flip, at=3), "", "rank-0.bin is missing or damaged"),
    ("rank-1.bin", swap, "", "rank-1.bin is missing or damaged"),
    ("rank-0.bin", lambda data: data[:-8], "", "rank-0.bin is missing or damaged"),
    ("manifest.json", lambda data: data.replace(b'"format": 1', b'"format": 0'), "", "format 0, not 1"),
    ("manifest.json", bytes, "--width 24", "width 36, not 24"),
    ("manifest.json", bytes, "--heads 6", "heads 12, not 6"),
    ("manifest.json", bytes, "--optim sgd", "optim adamw, not sgd"),
    ("manifest.json", bytes, "--dtype fp32", "dtype fp64, not fp32"),
    ("manifest.json", bytes, "--seed 7", "seed 0, not 7"),
    ("manifest.json", bytes, "--batch 12", "batch 24, not 12"),
]


@pytest.mark.parametrize("path, change, flags, said", REFUSED)
def test_another_checkpoint_is_refused_in_a_line(path, change, flags, said):
    check_refusal("resume", path, change, flags, said)
