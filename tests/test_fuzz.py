"""Runs with random flags end in single.py's numbers, or in one line and exit code 2."""

import os
import random
from unittest import mock

import pytest

from test_all import LESSONS
from tests.harness import ROOT, apart, crew, load, said, world

# Flag: good values; odd ones, which must be refused.
NO_INT = "0 -1 1.5 x 1000000000000 99999999999999999999999"
FLAGS = {
    "--layers": ("1 2 3 5", NO_INT),
    "--heads": ("1 2 4 12", NO_INT),
    "--width": ("12 24 48", NO_INT),
    "--context": ("4 12 24", NO_INT),
    "--vocab": ("126 128 256", f"{NO_INT} 64"),
    "--steps": ("1 2", NO_INT),
    "--batch": ("4 8 12 24", NO_INT),
    "--accum": ("1 2 3 4", NO_INT),
    "--optim": ("adamw sgd", "adam"),
    "--lr": ("0 0.001 0.01", "nan inf -1 x"),
    "--clip": ("0.1 1 inf", "nan 0 -1 x"),
    "--seed": ("0 7", "-1 1.5 x 99999999999999999999"),
    "--dtype": ("fp64 fp64 fp32", "fp16"),
    "--device": ("cpu auto", "cuda gpu"),
    "--data": (f"{ROOT}/LICENSE {ROOT}/docs/results", "nowhere /proc/self /dev/null"),
    "--save": ("{tmp}/x.pt", "/ {tmp} /no/such/x.pt /dev/null/x.pt"),
}
OWN = {
    "collectives": {"--megabytes": ("0.1 1", "-1 nan x")},
    "dp_async": {"--staleness": ("0 3", "-1 17 x"), "--slow": ("0=1 0=2.5", "9=4 1 0=0.5 0=x x=2 0=nan")},
    "ddp": {"--bucket-cap-mb": ("0 0.02 1", "-1 nan x")},
    "zero3": {"--prefetch": ("0 1 7", "-1 8 x")},
    "offload": {"--link-gbps": ("1 inf", "0 -1 nan"), "--device-mb": ("50 inf", "-1 nan")},
    "context_parallel": {
        "--cp": ("1 2", "0 -1 5 x"),
        "--kind": ("ring ulysses", "all"),
        "--order": ("zigzag contiguous", "x"),
    },
    "expert_parallel": {
        "--experts": ("4 8", "0 -1 x"),
        "--top-k": ("1 2", "0 -1 99"),
        "--ep": ("1 2", "0 -1 5"),
        "--capacity-factor": ("1.25 inf", "nan -1"),
        "--balance": ("0 0.1 bias", "nan -1 x"),
    },
    "pipeline": {"--schedule": ("naive gpipe 1f1b interleaved", "zb-h1")},
    "zero_bubble": {"--schedule": ("1f1b zb-h1 zb-h2", "gpipe")},
    "parallel_3d": {"--tp": ("1 2", "0 -1 5 x"), "--pp": ("1 2", "0 -1 5 x"), "--zero": ("0 1", "-1 2")},
    "fusion": {"--plain": ("attention loss optimizer", "all")},
    "checkpointing": {"--policy": ("none full selective", "offload"), "--every": ("1 2", "0 -1 9 x")},
    "zero_r": {"--policy": ("partitioned offload", "full")},
    "resume": {"--every": ("1 2", NO_INT), "--keep": ("1 2", "0"), "--checkpoint": ("{tmp}/c", "/dev/null")},
}  # fmt: skip


def end_of(name, flags):
    """On a rank: (exit code, lines on stderr, [(loss, gradient norm) of each step])."""
    lesson, steps = load(name), []
    lesson.print_step = lambda config, step, loss, norm, started: steps.append((loss.item(), norm.item()))
    with mock.patch("time.sleep"):
        _, lines, code = said(lambda: lesson.train(lesson.parse(flags.split())))
    return code, lines, steps


def check(name, size, flags, odd):
    """The steps of a run, or nothing if it was refused, which odd flags must be."""
    ranks, flags = crew(name, size, flags)
    (code, lines, steps), *others = world(ranks).run(end_of, name, flags)
    if code:
        assert (code, len(lines), steps) == (2, 1, []) and lines[0].startswith(f"{name}.py: "), lines
        assert all(answer == (2, [], []) for answer in others), others
    else:
        told = [line for line in lines if "raise --every" not in line]  # a slow disk
        assert not odd and steps and not told, f"taken: {told}"
    return steps


def draw(chance, folder):
    """A lesson, a number of ranks, its flags, those of single.py, and whether there is an odd value."""
    lesson = chance.choice(LESSONS)
    own = OWN.get(lesson.name, {})
    flags = {name: chance.choice(good.split()) for name, (good, _) in FLAGS.items() if chance.random() < 0.6}
    flags |= {"--layers": chance.choice("123"), "--width": "24", "--steps": "2"} | flags
    theirs = {name: chance.choice(good.split()) for name, (good, _) in own.items() if chance.random() < 0.5}
    odd = chance.random() < 0.5
    if odd:
        name, (_, bad) = chance.choice([*FLAGS.items(), *own.items(), *own.items()])
        (theirs if name in own else flags)[name] = chance.choice(bad.split())
    both = [" ".join(f"{k} {v}" for k, v in each.items()).format(tmp=folder) for each in (flags, theirs)]
    return lesson.name, chance.choice(lesson.worlds), *both, odd


def test_random_flags_end_in_single_pys_numbers_or_in_one_line(tmp_path):
    seed, runs = os.environ.get("FUZZ", "0 200").split()
    chance, trained = random.Random(seed), 0
    for i in range(int(runs)):
        folder = tmp_path / str(i)
        folder.mkdir()
        name, size, flags, own, odd = draw(chance, folder)
        more = "--train" if name == "collectives" else ""
        try:
            steps = check(name, size, f"{more} {flags} {own}", odd)
            if steps:
                alone, more = (name, own) if name == "expert_parallel" else ("single", "")
                expected = check(alone, 1, f"{flags} {more} --ep 1" if more else flags, False)
                assert apart(steps, expected) < (1e-9 if "fp64" in flags else 1e-2)
                trained += 1
        except Exception as error:
            pytest.fail(f"seed {seed}, run {i}: {name}.py on {size} ranks: {flags} {own}: {error}")
    print(f"seed {seed}: {runs} runs, {trained} trained as single.py, the others were refused in a line")
