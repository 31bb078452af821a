"""What is special to resume.py."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import run

from tests.checks import refused
from tests.harness import (
    FORK,
    NO_NAMESPACES,
    ROOT,
    TINY,
    Lesson,
    apart,
    error_of,
    holds,
    load,
    mutants,
    on_ranks,
    said,
    train,
    world,
)
from tools.watch import noted

RUN = "torchrun LESSON --checkpoint runs/begun"
BEFORE = "python LESSON --checkpoint runs/begun --every 1 --steps 1"
FILM = "--checkpoint runs/films/begun"
NO_INT = "0 -1 1.5 x 1000000000000 99999999999999999999999"
LESSON = Lesson(
    own={"--every": ("1 2", NO_INT), "--keep": ("1 2", "0"), "--checkpoint": ("{tmp}/c", "/dev/null")},
    races=("",),
    gpu=("--checkpoint FOLDER/RANK --every 1",),
    waits={"--checkpoint": {("copy", "train()"): 1}},
)


FLAGS = f"{TINY} --batch 24 --clip 0.5 --lr 0.01 --dtype fp64"
SIZES = (1, 2, 3, 4, 8)
PIPES = {"capture_output": True, "text": True, "timeout": 200}
QUIET = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
TORCHRUN = ["--nproc_per_node=2", "--max-restarts=1", "--local-addr=127.0.0.1", "--rdzv-id=1"]
TORCHRUN += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]  # these three are --standalone


def check_kept(folder, *steps, beside=()):
    found = sorted(path.name for path in Path(folder).iterdir())
    assert found == sorted([*beside, *(f"step-{step:08}" for step in steps)]), f"kept {found}"


def save(folder, size, name="resume", flags=""):
    """Train to step 3 with a checkpoint of each step. Returns the weights."""
    _, weights = train(name, size, f"{FLAGS} --steps 3 --every 1 --checkpoint {folder} {flags}")
    return weights


def check_goes_on(name, folder, size=2, flags="", oracle=("single", 1), most=1e-12):
    """From step 4 on all is as in the run that never stopped."""
    plain, weights = train(*oracle, f"{FLAGS} --steps 5 {flags}")
    result, own = train(name, size, f"{FLAGS} --steps 5 --checkpoint {folder} {flags}")
    assert apart(result["losses"], plain["losses"][3:]) <= most, "losses differ"
    assert apart(result["grad_norms"], plain["grad_norms"][3:]) <= most, "gradient norms differ"
    assert apart(own, weights) <= most, "weights differ"


def check_resume(name, saved_on=3, sizes=(2,), flags="", **how):
    with TemporaryDirectory() as folder:
        save(folder, saved_on, name, flags)
        Path(f"{folder}/draft-00000009").mkdir()  # of a killed run
        for size in sizes:
            check_goes_on(name, folder, size, flags, **how)
            check_kept(folder, 2, 3)


def check_bits(name):
    """In bf16, of which the weights are not all that is saved, on as many ranks: the same bits."""
    check_resume(name, sizes=(3,), flags="--dtype bf16", oracle=(name, 3), most=0)


OTHERS = "draft-thesis", "draft-000000001", "step-x", "step-00000001.good", "step-000000001"


def check_others(name):
    """What has another name blocks no start and stays. A run that is refused removes nothing."""
    with TemporaryDirectory() as folder:
        for other in OTHERS:
            Path(folder, other).mkdir()
        job = f"{FLAGS} --steps 3 --every 1 --keep 1 --checkpoint {folder}"
        ends = world(2).run(refused, name, job)
        assert [code for code, _ in ends] == [0, 0], f"does not start: {ends}"
        check_kept(folder, 3, beside=OTHERS)
        Path(folder, "draft-00000009").mkdir()
        (_, lines), _ = world(2).run(refused, name, f"{job} --seed 7")
        assert "seed 0" in "".join(lines), f"not refused: {lines}"
        check_kept(folder, 3, beside=(*OTHERS, "draft-00000009"))
        for steps in 3, 2:  # all are saved, as after a late restart
            (code, lines), _ = world(2).run(refused, name, f"{job} --steps {steps}")
            assert code == 0 and "has step 3 already" in "".join(lines), f"ends without a word: {lines}"
        check_kept(folder, 3, beside=OTHERS)


@on_ranks(1)
def check_removal(name):
    """If an old checkpoint cannot be removed, the save has succeeded, and a line says what failed."""
    lesson, answers = load(name), []

    def rmtree(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(13, "denied")

    with TemporaryDirectory() as folder:
        save = partial(lesson.save, Path(folder), [], 1, None, state=np.zeros((3, 4)))
        answers.append(save(step=1))
        with mock.patch.object(lesson.shutil, "rmtree", rmtree):
            _, lines, _ = said(lambda: answers.append(save(step=2)))
        assert answers == [True, True], "a save is said to have failed"
        assert lines == ["resume.py: --checkpoint: step 2: [Errno 13] denied"], f"says: {lines}"


@on_ranks(1)
def check_optimizers(name):
    """An optimizer whose state no checkpoint would have is an error."""
    lesson, weight = load(name), torch.nn.Parameter(torch.ones(3))
    sharded = lesson.ShardedOptimizer([weight], torch.optim.SGD, lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    end = error_of(lambda: sharded.step(1.0))
    assert "take AdamW, or SGD without momentum" in end, f"momentum is lost: {end}"


def newest_of(folder):
    """The newest step. All that is published must be whole, and its numbers are its step."""
    steps = [0]
    for path in sorted(Path(folder).glob("step-*")):
        files = {"manifest.txt", "rank-0.bin", "rank-1.bin"}
        assert {file.name for file in path.iterdir()} == files, f"{path.name} is half there"
        steps.append(int((path / "manifest.txt").read_text().split("\n")[0].removeprefix("step-")))
        numbers = np.concatenate([np.fromfile(file) for file in path.glob("*.bin")])
        assert numbers.tolist() == [steps[-1]] * 600, f"{path.name} is half-written"
    return steps[-1]


CHANGES = ("mkdir", "open", "rename", "write_bytes", "write_text")  # what pathlib does to a disk


def killed_at_each_line(name, folder):
    """On two ranks: save steps 1 to 4; look before each line of rank 0. Returns what reached the disk."""
    lesson, newest, events = load(name), [], []
    store = dist.distributed_c10d._get_default_store()

    def trace(frame, event, argument):
        code = frame.f_code
        if code.co_filename.endswith(("resume.py", "shutil.py")) or code.co_name in CHANGES:
            newest.append(newest_of(folder))
        return trace

    def on_disk(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def renamed(old, new, rename=Path.rename):
        events.append(Path(new).name)
        rename(old, new)
        store.set(folder, "")
        return Path(new)

    note = lambda *_, **__: (events.append("confirm"), store.set(folder, ""))  # noqa: E731
    confirm = mock.patch.object(dist, "all_gather_object", noted(dist.all_gather_object, note))
    with confirm, mock.patch.object(Path, "rename", renamed), mock.patch.object(os, "fsync", on_disk):
        for step, keep in (1, 2), (2, 2), (3, 2), (4, 1):
            if dist.get_rank():  # it is late: rank 0 waits for it, or has published
                store.wait([folder])
            sys.settrace(None if dist.get_rank() else trace)
            lesson.save(Path(folder), [], keep, None, step, np.full((3, 100), float(step)))
            sys.settrace(None)
            assert dist.get_rank() or newest_of(folder) == step, f"step {step} is not there"
            dist.get_rank() or check_kept(folder, *range(max(1, step + 1 - keep), step + 1))
            dist.barrier()
    assert newest == sorted(newest), "the newest was lost"
    return events[:6]


def check_kills(name):
    if sys.platform != "linux":
        pytest.skip("only Linux tells in /proc what file is written to the disk")
    with TemporaryDirectory() as folder:
        events, others = world(2).run(killed_at_each_line, name, folder)
        assert others == ["rank-1.bin", "confirm"] * 3, f"on the disk: {others}"
        published = ["manifest.txt", "draft-00000001", "step-00000001", Path(folder).name]
        assert events == ["rank-0.bin", "confirm", *published], f"on the disk: {events}"


def mortal(flags):
    """On a rank: train; rank 1 is killed after step 7, and after step 8 if it has been restarted."""
    lesson = load("resume")

    def print_step(config, step, *args):
        if dist.get_rank() == 0:
            with open(config.checkpoint.with_name("steps"), "a") as steps:
                print(step, file=steps)
        elif step == 7 + int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
            (config.checkpoint / f"draft-{step:08}").mkdir()  # as if during a save
            os.kill(os.getpid(), 9)

    lesson.print_step = print_step
    try:
        lesson.train(lesson.parse(flags.split()))
    except RuntimeError:
        time.sleep(100)  # rank 0, which has lost its connection, until the agent ends it because of rank 1


def end_of_job(flags):
    """What torchrun says at the end of a job whose ranks are mortal(): its own agent, which forks them."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config, _, _ = run.config_from_args(run.parse_args([*TORCHRUN, "more/resume.py"]))
    config.start_method = "forkserver"
    return error_of(lambda: run.elastic_launch(config, mortal)(flags))


def test_a_killed_rank_ends_the_job_is_named_and_costs_the_steps_since_the_newest_checkpoint(tmp_path):
    flags = f"{FLAGS} --steps 9 --every 3 --checkpoint {tmp_path}/c"
    with ProcessPoolExecutor(1, FORK) as pool:
        end = pool.submit(end_of_job, flags).result()
    assert "rank      : 1" in end and "Signal 9 (SIGKILL)" in end, end
    steps = (tmp_path / "steps").read_text().split()
    assert steps.count("1") == 1 and not (tmp_path / "c/draft-00000007").exists(), "did not go on"
    assert (tmp_path / "c/draft-00000008").exists(), "was not killed again"
    _, own = train("resume", 2, flags)
    check_kept(tmp_path / "c", 6, 9)
    assert apart(own, train("single", 1, f"{FLAGS} --steps 9")[1]) < 1e-9


@pytest.mark.skipif(NO_NAMESPACES, reason="needs Linux, root, ip and tc")
def test_two_hosts_print_single_pys_losses():
    """As docs/cluster.md starts them by hand, in network namespaces."""
    command, flags = ["bench/hosts.sh", "2", "1gbit", "--", "zero3.py"], f"{FLAGS} --steps 3".split()
    job = subprocess.run([*command, *flags], cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, **PIPES)
    losses = [float(loss) for loss in re.findall(r"^step .*? loss ([\d.]+)", job.stdout, re.M)]
    alone, _ = train("single", 1, " ".join(flags))
    assert len(losses) == 3 and apart(losses, alone["losses"]) < 6e-5, job.stdout + job.stderr


def tweaked(tweak, name, flags):
    """On a rank: train with a lesson of which tweak() has replaced parts. Returns its notes."""
    lesson, notes = load(name), []
    tweak(lesson, notes.append)
    said(lambda: lesson.train(lesson.parse(f"{FLAGS} {flags}".split())))
    return notes


def count_reads(lesson, note):
    lesson.checksum = noted(lesson.checksum, lambda part, first: note(part.nbytes))


def check_bytes(name):
    """12 a parameter, and of padding; each but of padding is read once, by a rank that needs it."""
    with TemporaryDirectory() as folder:
        numel = sum(tensor.numel() for tensor in save(folder, 3, name, "--dtype bf16").values())
        padded = [-(-numel // size) * size for size in (3, 4)]
        on_disk = sum(path.stat().st_size for path in Path(folder).glob("step-00000003/*.bin"))
        assert on_disk == 12 * padded[0], f"{on_disk} bytes on disk"
        read = list(map(sum, world(4).run(tweaked, count_reads, name, f"--checkpoint {folder} --dtype bf16")))
        assert sum(read) == 12 * min(padded), f"read {sum(read)} of {on_disk} bytes"
        assert max(read) <= 3 * padded[1], "a rank read more than its shard"


def when_waited_for(lesson, call):
    """Call when the lesson waits for a save."""

    class Pool(lesson.ThreadPoolExecutor):
        def submit(self, function, *args):
            future = super().submit(function, *args)
            if function is lesson.save:
                future.result = lambda result=future.result: call() or result()
            return future

    lesson.ThreadPoolExecutor = Pool


def late(lesson, note):
    """Step 3 is written when step 4 is over, or somebody waits for it: note which is first."""
    overlaps = SimpleQueue()
    lesson.print_step = lambda config, step, *_: overlaps.put(True) if step == 4 else None
    when_waited_for(lesson, partial(overlaps.put, False))
    lesson.checksum = noted(lesson.checksum, lambda *_: note(overlaps.get()))


def check_overlap(name):
    for flags, overlaps in ("", True), ("--no-overlap", False):
        with TemporaryDirectory() as folder:
            flags = f"--every 3 --steps 5 --checkpoint {folder} {flags}"
            answers = world(2).run(tweaked, late, name, flags)
            assert answers == [[overlaps]] * 2, f"{flags}: training went on: {answers}"
            check_goes_on(name, folder)


def bad_disk(folder, is_slow, lesson, note):
    """Rank 1 cannot write step 4, nor rank 0 step 5; or not before rank 0 waits. Notes what is said."""
    sync, store = lesson.sync, dist.distributed_c10d._get_default_store()
    when_waited_for(lesson, lambda: dist.get_rank() or store.set(folder, ""))
    act = partial(store.wait, [folder]) if is_slow else partial(os.stat, "/no")
    lesson.print = lambda text, **_: note(text) if "--checkpoint:" in text else None
    bad = "4/rank-1.bin", "5/rank-0.bin"
    lesson.sync = lambda path: act() if str(path).endswith(bad) else sync(path)


def check_disk(name):
    """One that fails, and one that is slow."""
    failing = False, ["step 4: [Errno 2] ", "step 5: [Errno 2] "], (2, 3, 6)
    slow = True, ["step 5 waits for the save before it; raise"], (4, 5, 6)
    for is_slow, reasons, kept in failing, slow:
        with TemporaryDirectory() as folder:
            save(folder, 2, name)
            flags = f"--every 1 --keep 3 --steps 6 --checkpoint {folder}"
            one, other = world(2).run(tweaked, partial(bad_disk, folder, is_slow), name, flags)
            for reason in reasons:
                texts = [text for text in one if f"resume.py: --checkpoint: {reason}" in text]
                assert len(texts) == 1 and not other, f"said of {reason}: {one}, {other}"
            check_kept(folder, *kept)
            numbers = {path.read_bytes() for path in Path(folder).glob("*/rank-0.bin")}
            assert len(numbers) == 3, "a checkpoint has another step's numbers"


SAME = {"--width 24": "width 36", "--heads 6": "heads 12", "--optim sgd": "optim adamw"}
SAME |= {"--dtype fp32": "dtype fp64", "--batch 12": "batch 24", "--seed 7": "seed 0"}
SAME |= {"--layers 4": "layers 3", "--context 8": "context 16", "--vocab 300": "vocab 256"}
CUT = [lambda data, n=n: b"\n".join(data.split(b"\n")[:n]) for n in (5, -2, -1)]
OTHER = [lambda _, text=text: text for text in (b"", b"null", b"\xff\n" * 99)]
OTHER += [lambda data: data.replace(b"step-00000003", b"step-00000002"), lambda data: data[:9]]
SHARD = "rank-1.bin is not as manifest.txt says; remove"


def flipped(*bits):
    """What flips these bits of a file."""

    def flip(data):
        data = bytearray(data)
        for bit in bits:
            data[bit // 8] ^= 1 << bit % 8
        return bytes(data)

    return flip


def transposed(dtype, data):
    """With two numbers, or halves of numbers, in each other's place: row 0, column 1, and row 1, column 0."""
    numbers = np.frombuffer(data, dtype).reshape(3, -1).copy()
    numbers[[0, 1], [1, 0]] = numbers[[1, 0], [0, 1]]
    return numbers.tobytes()


REFUSED = [
    ("rank-1.bin", flipped(-1), "", SHARD),
    ("rank-1.bin", flipped(0), "", SHARD),
    ("rank-1.bin", flipped(63, 127), "", SHARD),  # two signs
    ("rank-0.bin", partial(transposed, "f8"), "", "rank-0.bin is not as manifest.txt says"),
    ("rank-0.bin", partial(transposed, "i4"), "", "rank-0.bin is not as manifest.txt says"),
    ("rank-1.bin", lambda data: data[8:16] + data[:8] + data[16:], "", SHARD),
    ("rank-1.bin", lambda data: data[len(data) // 3 :] + data[: len(data) // 3], "", "as manifest.txt says"),
    ("rank-1.bin", lambda data: data[:-8], "", SHARD),
    ("rank-1.bin", None, "", SHARD),
    ("manifest.txt", None, "", "manifest.txt'; remove"),
    *(("manifest.txt", other, "", "manifest.txt has '") for other in OTHER),
    *(("manifest.txt", cut, "", "rank-0.bin is not as manifest.txt says; remove") for cut in CUT),
    ("manifest.txt", lambda data: data.replace(b"format 4", b"format 1"), "", "'format 1', not 'format 4'"),
    *(("manifest.txt", bytes, flags, f"'{said}', not '{flags[2:]}'") for flags, said in SAME.items()),
]


def check_refused(name):
    """In one line: a changed file of the newest checkpoint, and other flags."""
    with TemporaryDirectory() as folder:
        save(folder, 2, name)
        Path(folder, "draft-1").touch()  # a stray file is none of ours
        for file, change, flags, reason in REFUSED:
            path = Path(folder) / "step-00000003" / file
            data = path.read_bytes()
            path.write_bytes(change(data)) if change else path.unlink()
            answers = world(2).run(refused, name, f"{FLAGS} --checkpoint {folder} {flags}")
            path.write_bytes(data)
            (code, lines), other = answers
            assert (code, len(lines), other) == (2, 1, (2, [])), f"not refused: {reason}: {answers}"
            assert lines[0].startswith("resume.py: --checkpoint") and reason in lines[0], lines[0]
        Path(folder, "draft-00000004").touch()  # there can be no such folder
        (code, lines), _ = world(2).run(refused, name, f"{FLAGS} --steps 4 --every 1 --checkpoint {folder}")
        assert code == 2 and "last save failed" in lines[-1], f"not refused: the last save failed: {lines}"


CHECKS = [partial(check_resume, saved_on=size, sizes=SIZES) for size in SIZES]
CHECKS += [check_bits, check_kills, check_bytes, check_overlap, check_disk, check_refused]
CHECKS += [check_others, check_removal, check_optimizers]
test_each_promise_is_kept = holds("resume", *CHECKS)
PUBLISHED = """        draft.rename(target)
        sync(folder)
        for old in listed(folder, "step")[:-keep]:
            shutil.rmtree(old.rename(draft))"""
TOO_EARLY = """        for old in listed(folder, "step")[::-1][keep - 1 :]:
            shutil.rmtree(old.rename(f"{draft}-old"))
        draft.rename(target)
        sync(folder)
        for _ in ():
            pass"""
MUTANTS = [
    ("        sync(path)\n    except", "        pass\n    except", check_kills, "on the disk"),
    ("        sync(path)\n        sync(draft)", "        sync(draft)", check_kills, "on the disk"),
    ("        sync(path)\n        sync(draft)", "        sync(path)", check_kills, "on the disk"),
    ("        sync(folder)\n", "", check_kills, "on the disk"),
    ("    os.fsync(descriptor)\n", "", check_kills, "on the disk"),
    ('draft = folder / f"draft-{step:08}"', 'draft = folder / f"step-{step:08}"', check_kills, "half"),
    ("dist.all_gather_object(answers, answer, group=group)", "answers = [answer] * 2", check_kills, "half"),
    ("shutil.rmtree(old.rename(draft))", "shutil.rmtree(old)", check_kills, "half"),
    ("[:-keep]", "[:-1]", check_kills, "kept"),
    ("flags, config.keep, group)", "flags, 2, group)", check_disk, "kept"),
    ("copy_(sharded.state)", "copy_(sharded.state.bfloat16())", check_bits, "differ"),
    ("        shutil.rmtree(draft, ignore_errors=True)\n    return", "    return", check_disk, "kept"),
    ("    return target.is_dir()", "        return False\n    return True", check_removal, "to have failed"),
    ("[self.shard]) > 3", "[self.shard]) > 4", check_optimizers, "momentum is lost: nothing"),
    ("if not saving.result()", "if saving.result() is None", check_refused, "not refused: the last save"),
    ("min(start + n_columns, own", "min(start + n_columns - 1, own", check_bytes, "of"),
    ("max(start, own_start)", "max(start + 1, own_start)", check_bytes, "of"),
    ("default_rng((config.seed, step))", "default_rng((config.seed, replicas))", check_resume, "losses"),
    ('listed(config.checkpoint, "draft")', "()", partial(check_resume, sizes=(1,)), "kept"),
    ('"step": self.steps,', '"step": self.steps.clone(),', check_resume, "losses differ"),
    ("snapshot.copy_(sharded.state)", "sharded.state", check_overlap, "losses differ"),
    ("raise --every\")\n            saving.result()", "raise --every\")", check_disk, "another step's"),
    ("if config.no_overlap:", "if False:", check_overlap, "--no-overlap: training went on"),
    ('if f"{total}" !=', "if False and total !=", check_refused, "not refused: rank-1.bin"),
    ("-(-numel // len(checksums))", "state.shape[1]", check_refused, "not refused: rank-0"),
    ("3 ** (25 * np.arange(len(words)))", "2 * np.arange(len(words)) + 1", check_refused,
     "not refused: rank-0"),
    ("3 ** (25 * np.arange(len(words)))", "np.ones(len(words), int)", check_refused, "not refused: as"),
    ("2 * column + 1", "0 * column + 1", check_refused, "not refused: rank-1"),
    ('view("i4")', 'view("i8")', check_refused, "not refused: rank-1"),
    ("of_row, words,", "of_row, words & -2,", check_refused, "not refused: rank-1"),
    ('8 * \'[0-9]\'', "'*'", check_others, "does not start"),
    ('8 * \'[0-9]\'', "8 * '[0-9]' + '*'", check_others, "does not start"),
    ('8 * \'[0-9]\'', "'*' + 8 * '[0-9]'", check_others, "does not start"),
    ("if steps >= config.steps", "if False", check_others, "ends without a word"),
    ("if steps >= config.steps", "if steps == config.steps", check_others, "ends without a word"),
    ("for answer in answers:", "for answer in answers[-1:]:", check_disk, "said of step 5"),
    (PUBLISHED, TOO_EARLY, check_kills, "the newest was lost"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "resume")
