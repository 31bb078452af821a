"""What is special to resume.py: any ranks load what others have saved, whoever was killed, and when."""

import json
import os
import random
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch.distributed as dist

from tests.checks import check_masters, check_parity, refused
from tests.gpu import check_gpu, check_order
from tests.harness import FORK, TINY, Lesson, apart, holds, load, mutants, on_ranks, path_of, train, world
from tools.run import be_rank, free_port

RUN = "torchrun LESSON --checkpoint runs/begun"
BEFORE = "python LESSON --checkpoint runs/begun --every 1 --steps 1"
NAIVE = "--naive"
FILM = "--checkpoint runs/films/begun"
LEARN = "torchrun LESSON --checkpoint c --every 1 --steps 1 && torchrun LESSON --checkpoint c"
SAVING = "--checkpoint FOLDER/RANK --every 1"
RACE = "2 alone --steps 9 --every 1 --checkpoint runs/page"
LESSON = Lesson(
    own={"--every": ("1 2", "0 -1 1.5 x"), "--checkpoint": ("{tmp}/c", "LICENSE")},
    slack=lambda root, block, *_: (0, root + 3 * block),  # gloo's reduce-scatter copies what it is given
    races=("",),
    gpu=(SAVING, f"{SAVING} --naive"),
    waits={f"--checkpoint{more}": {("copy", "start_save()"): n} for more, n in (("", 1), (" --naive", 3))},
)
FLAGS = f"{TINY} --batch 24 --clip 0.5 --lr 0.01 --dtype fp64"


def check_goes_on(name, flags, size=2, plain=("single", 1, ""), most=1e-12):
    """From step 4 on all is as in the run that never stopped."""
    expected, weights = train(*plain[:2], f"{FLAGS} --steps 5 {plain[2]}")
    result, own = train(name, size, f"{FLAGS} --steps 5 {flags}")
    assert len(result["losses"]) == 2, "goes on after another step"
    assert apart(result["losses"], expected["losses"][3:]) <= most, "losses differ"
    assert apart(result["grad_norms"], expected["grad_norms"][3:]) <= most, "gradient norms differ"
    assert apart(own, weights) <= most, "weights differ"


def check_resume(name, saved_on=3, sizes=(2,), flags="", **more):
    """Any ranks load, to the last bit, what these have saved, and go on."""
    with TemporaryDirectory() as folder:
        flags += f" --checkpoint {folder}"
        draft = Path(folder, "draft-00000009")  # as of a run that was killed
        draft.mkdir()
        _, saved = train(name, saved_on, f"{FLAGS} --steps 3 --every 1 {flags}")
        for size in sizes:
            _, loaded = train(name, size, f"{FLAGS} --steps 3 {flags}")
            assert apart(loaded, saved) == 0, "columns are others"
            check_goes_on(name, flags, size, **more)
        assert "--naive" in flags or not draft.exists(), "a draft is left"


def check_bits(name):
    """In bf16, of which the weights are not all that is saved, on as many ranks: the same bits."""
    bf16 = "--dtype bf16"
    check_resume(name, sizes=(3,), flags=bf16, plain=(name, 3, bf16), most=0)


def newest_of(folder):
    """The newest step that counts. All that count must be complete."""
    paths = sorted(Path(folder).glob("step-*"))
    for path in paths:
        manifest = path / "manifest.json"
        checksums = json.loads(manifest.read_text())["checksums"] if manifest.exists() else [0]
        found = [zlib.crc32(np.load(file)) for file in sorted(path.glob("rank-*"))]
        assert found == checksums, f"half of {path.name}"
    return int(paths[-1].name.removeprefix("step-")) if paths else 0


def killed_at_each_line(name, folder):
    """On two ranks: look before each line of rank 0, while rank 1 is as late as it can be."""
    lesson, newest, step = load(name), [], 0
    checkpoint = lesson.Checkpoint(lesson.parse(f"--checkpoint {folder}".split()))
    store = dist.distributed_c10d._get_default_store()

    def trace(frame, event, argument):
        if frame.f_code.co_name == "all_gather_object":
            store.set(f"{folder}/{step}", "")
        if frame.f_code.co_filename.endswith(("resume.py", "shutil.py")):
            newest.append(newest_of(folder))
        return trace

    for step in range(1, 5):
        if dist.get_rank():
            store.wait([f"{folder}/{step}"])
        sys.settrace(None if dist.get_rank() else trace)
        checkpoint.write(step, np.full((3, 100), float(step)))
        sys.settrace(None)
        kept = sorted(os.listdir(folder))
        assert dist.get_rank() or kept == [f"step-{n:08}" for n in (step - 1, step) if n], f"kept {kept}"
    assert newest == sorted(newest), "the newest was lost"


def check_kills(name):
    with TemporaryDirectory() as folder:
        world(2).run(killed_at_each_line, name, folder)


def late(name, folder):
    """On a rank: whether training went on before a save had begun, in a thread that is as slow as it may."""
    lesson, seen, went_on = load(name), [], threading.Event()

    class Late(ThreadPoolExecutor):
        def submit(self, function, *args):
            return super().submit(lambda: (seen.append(went_on.wait(3)), function(*args)))

    lesson.ThreadPoolExecutor = Late
    lesson.print_step = lambda config, step, *_: went_on.set() if step == 4 else None
    lesson.train(lesson.parse(f"{FLAGS} --every 3 --steps 5 --checkpoint {folder}".split()))
    return seen


def check_overlap(name):
    with TemporaryDirectory() as folder:
        assert world(2).run(late, name, folder) == [[True]] * 2, "training has waited for a save"
        check_goes_on(name, f"--checkpoint {folder}")


@on_ranks(1)
def check_bad_disk(name):
    """A save that fails ends the run, also the last one."""
    for bad in 2, 3:
        lesson = load(name)
        lesson.Checkpoint.write = lambda _, step, table, bad=bad: 1 / (step - bad)
        with TemporaryDirectory() as folder, suppress(ZeroDivisionError):
            lesson.train(lesson.parse(f"{FLAGS} --every 1 --steps 3 --checkpoint {folder}".split()))
            raise AssertionError(f"step {bad} is not saved, and nothing said")


def check_refusals(name):
    """A file with one bit changed, and what was saved with other flags."""
    with TemporaryDirectory() as folder:
        train(name, 2, f"{FLAGS} --steps 3 --every 3 --checkpoint {folder}")
        for file, place in ("rank-1.npy", -1), ("rank-1.npy", 900), ("manifest.json", -3):
            path = Path(folder, "step-00000003", file)
            data = path.read_bytes()
            path.write_bytes(bytes(byte ^ (i == place % len(data)) for i, byte in enumerate(data)))
            ((_, lines),) = world(1).run(refused, name, f"{FLAGS} --checkpoint {folder}")
            path.write_bytes(data)
            assert "rank-1.npy: is damaged" in "".join(lines), f"{file} is taken: {lines}"
        for flags in "--width 24", "--vocab 300", "--dtype fp32", "--batch 12", "--seed 7":
            one, other = world(2).run(refused, name, f"{FLAGS} --checkpoint {folder} {flags}")
            assert one == other and "with other flags" in "".join(one[1]), f"{flags}: {one}"


def test_random_kills_leave_a_complete_checkpoint_from_which_any_ranks_go_on(tmp_path):
    """Three kills, in ./run.sh fuzz sixty."""
    fuzz = os.environ.get("FUZZ", "").split()
    seed, folder, flags = (fuzz or [time.time_ns()])[0], tmp_path / "c", f"{FLAGS} --lr 0.001"
    draw = random.Random(str(seed))
    for kill in range(60 if fuzz else 3):
        before, size = newest_of(folder), draw.choice((1, 2, 3))
        command = str(path_of("resume")), f"{flags} --steps 9999 --every 1 --checkpoint {folder}".split()
        env = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        jobs = [(*command, f"{tmp_path}/log", env | {"RANK": str(rank)}) for rank in range(size)]
        ranks = [FORK.Process(target=be_rank, args=job) for job in jobs]
        for rank in ranks:
            rank.start()
        while max(folder.glob("step-*"), default=folder).name <= f"step-{before:08}":
            assert all(rank.is_alive() for rank in ranks), (tmp_path / "log").read_text()
            time.sleep(0.001)
        for rank in draw.sample(ranks, size):
            time.sleep(draw.uniform(0, 0.04))
            rank.kill()
            rank.join()
        assert newest_of(folder) > before, f"seed {seed}, kill {kill}: the newest was lost"
    flags += f" --steps {newest_of(folder) + 2}"
    result, own = train("resume", 2, f"{flags} --checkpoint {folder}")
    assert len(result["losses"]) == 2 and apart(own, train("single", 1, flags)[1]) < 1e-9, f"seed {seed}"


naive = partial(check_resume, sizes=(2, 4, 8), flags="--naive")
CHECKS = [partial(check_resume, saved_on=size, sizes=(1, 2, 3, 4, 8)) for size in (1, 2, 3, 4, 8)]
CHECKS += [naive, check_bits, check_kills, check_overlap, check_bad_disk, check_refusals]
test_each_promise_is_kept = holds("resume", *CHECKS)
FILL = '        adam["step"].fill_(saved_step)\n'
GATHER = "dist.all_gather_object(checksums, zlib.crc32(table), self.group)"
SUBMIT = "self.thread.submit(self.write, step, copied)"
PART = "saved[start - file_start : end - file_start]"
COPY = "torch.stack(rows).cpu().numpy()"
MUTANTS = [
    ('self.folder / f"draft-{step:08}"', 'self.folder / f"step-{step:08}"', check_kills, "half of"),
    (GATHER, "checksums = [zlib.crc32(table)] * 2", check_kills, "half of"),
    ("shutil.rmtree(old.rename(draft))", "shutil.rmtree(old)", check_kills, "half of"),
    ("[:-2]", "[:-1]", check_kills, "kept"),
    ('glob("draft-*")', 'glob("old-*")', check_resume, "a draft is left"),
    ("i * in_file", "i * in_rank", check_resume, "columns are others"),
    (PART, "saved[: end - start]", check_resume, "columns are others"),
    ("min(file_start + in_file,", "min(file_start + in_file - 1,", check_resume, "columns are others"),
    ("full[dist.get_rank() * len(row) :]", "full", naive, "columns are others"),
    ("found = [max(", "found = [min(", check_resume, "columns are others"),
    (FILL, "", check_resume, "losses differ"),
    (f"{FILL}        unit.gather()\n", FILL, check_resume, "columns are others"),
    (COPY, COPY.replace(".cpu()", ".bfloat16().float()"), check_bits, "differ"),
    (SUBMIT, f"{SUBMIT}\n        self.finish_save()", check_overlap, "has waited"),
    (SUBMIT, f"self.thread.submit(lambda: self.write(step, {COPY}))", check_overlap, "losses differ"),
    ("        self.finish_save()", "        pass", check_bad_disk, "and nothing said"),
    ("        checkpoint.finish_save()", "        pass", check_bad_disk, "and nothing said"),
    ("zlib.crc32(table) != checksum", "False", check_refusals, "is taken"),
    ('if manifest["flags"] != self.flags', "if False", check_refusals, "--width 24"),
    ("[*SHAPE, ", "[*SHAPE[:-1], ", check_refusals, "--vocab 300"),
    ("        dist.all_reduce(squares)", "        pass", check_parity, "differ"),
    ("self.own.copy_(self.shard.detach())", "pass", check_masters, "moved by"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "resume")
SUM, NORM = "        dist.all_reduce(squares)", "norm = squares.sqrt()"
GPU_MUTANTS = [
    (NORM, f"{NORM}.cpu().to(device)", check_gpu, "the host waits"),
    (SUM, SUM.replace("dist", "rank == 0 and dist"), check_order, "ranks do not meet"),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "resume")
