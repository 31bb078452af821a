"""plan.py and tools/formulas.py beside published figures, the toy GPT and the lessons' own formulas."""

import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import ROOT, holds, load, mutants, said
from tests.test_ledger import simulate

SEVENTY = "--layers 80 --hidden 8192 --heads 64 --vocab 128256 --seq 4096"
TABLES = load("bench/tables")


def planner(name):
    """plan.py or a mutant of it, or plan.py with the functions of a mutant of tools/formulas.py."""
    if not name.endswith("formulas.py"):
        return load(name)
    plan = load("plan")
    vars(plan).update({key: value for key, value in vars(load(name)).items() if key[0] != "_"})
    return plan


def sum_of(found):
    """Bytes that are sent, of what bytes_of() finds."""
    return sum(size for name, size in found.items() if name not in ("parameters", "gradients", "optimizer"))


def printed(flags):
    plan = load("plan")
    return said(lambda: plan.plan(plan.parse(flags.split())))[0]


def check_counts(name):
    """The closed form counts the toy GPT's parameters, and those of a tensor-parallel rank or a stage."""
    plan, single = planner(name), load("single")
    assert plan.SIZES == single.SIZES, "other sizes than the lessons'"
    for size in single.SIZES:
        job = plan.parse(["--size", size])
        shape = job.shape
        with torch.device("meta"):
            named = dict(single.GPT(single.parse(["--size", size])).named_parameters())
        count = sum(param.numel() for param in named.values())
        assert plan.whole_model(shape) == count, "another number of parameters"
        pattern = "norm|position|(proj|down).bias"
        whole = sum(param.numel() for name, param in named.items() if re.search(pattern, name))
        for t in (t for t in (1, 2, 4) if shape.heads % t == 0):
            split = (count - whole - shape.vocab * shape.hidden) // t + -(-shape.vocab // t) * shape.hidden
            own = plan.parameters(shape.layers, shape.hidden, shape.vocab, shape.seq, t)
            assert own == split + whole, "another split of tensors"
        for p in (2, 3, shape.layers):
            stages = sum(plan.replica(job, 1, p, i).params for i in range(p))
            assert stages - shape.vocab * shape.hidden == count, "stages lack parameters"  # tied: twice


def check_layer(name):
    """Table 2 of arXiv 2205.05198, in 16 bits, and what it says of GPT-3."""
    formulas = load(name if name.endswith("formulas.py") else "tools/formulas")
    shape, b, t = formulas.Shape(96, 96, 12288, 2048, 51200), 3, 8  # GPT-3
    sbh, scores = shape.seq * b * shape.hidden, 5 * shape.heads * shape.seq / shape.hidden
    table = {
        ("none", 1, False): sbh * (34 + scores), ("none", t, False): sbh * (10 + 24 / t + scores / t),
        ("none", t, True): sbh / t * (34 + scores), ("selective", t, False): sbh * (10 + 24 / t),
        ("selective", t, True): 34 * sbh / t, ("full", t, False): 2 * sbh, ("full", t, True): 2 * sbh / t,
    }  # fmt: skip
    for how, size in table.items():
        assert formulas.layer_activations(shape, b, *how) == size, f"not table 2: {how}"
        recompute, _, sequence = how
        kept = sbh * (8 / (how[1] if sequence else 1) + 24 / how[1])  # without scores, and without dropout
        found = formulas.layer_activations(shape, b, *how, flash=True)
        assert found == (size if recompute == "full" else kept), f"with flash: {how}"
    whole = 96 * sbh / t * (34 + scores) + sbh / t + 4 * sbh / t * (1 + shape.vocab / shape.hidden)
    assert formulas.activations(shape, b, "none", t, True) == whole, "not section 4.3"
    again = formulas.activations(shape, b, "full", t, True) - 96 * 2 * sbh / t - sbh / t
    assert again == sbh / t * (34 + scores) - 2 * sbh / t, "a recomputed layer is whole for a moment"


def check_wire(name):
    """P(N-1)/N times 2, 2, 1 + k and 3k; 8bsh of tensor parallelism; bsh each way over each boundary."""
    plan = planner(name)
    for k, precision in itertools.product((1, 4), plan.WIDTHS):
        letters, w = load("tools/formulas").plain_letters(640, 64, precision, k), plan.WIDTHS[precision]
        sent = [sum_of(plan.bytes_of(lesson, letters)) for lesson in list(plan.LESSONS.values())[:4]]
        assert sent == [w * x * 640 * 63 / 64 for x in (2, 2, 1 + k, 3 * k)], "other bytes of a ZeRO stage"
    job = plan.parse(["--size", "gpt2", "--micro-batch", "2", "--accum", "3", "--gpus", "16"])
    bsh = 2 * job.shape.seq * job.shape.hidden
    for recompute, sequence, times in ("none", False, 8), ("selective", True, 10), ("full", False, 12):
        moved = plan.tensor_wire(job.shape, 2, recompute, 4, sequence, 2, 3)
        assert moved == 2 * times * 3 * job.shape.layers * bsh * 3 / 4, "other bytes of tensor parallelism"
    tied = job.shape.vocab / 2 / job.shape.seq
    sent = [plan.replica(job, 1, 4, stage).sent / bsh for stage in range(4)]  # 12 microbatches
    assert sent == [24 + 2 * tied, 48, 48, 24 + 2 * tied], "other bytes of a pipeline"
    ranks = [plan.replica(plan.changed(job, schedule="zb-v"), 1, 4, rank) for rank in range(4)]
    assert [rank.sent / bsh for rank in ranks] == [48, 96, 96, 48], "the tie needs no message"
    assert ranks[1].activations == ranks[3].activations, "a rank of a V has as much in flight as any other"
    alone, shared = (plan.replica(plan.changed(job, cp=cp), 1, 1, 0) for cp in (1, 4))
    assert shared.activations * 4 == alone.activations, "other activations of a part of the tokens"
    assert shared.sent == 2 * 12 * job.shape.layers * bsh * 2 * (3 * 4 - 2) / 4, "other bytes of a ring"


def check_stages(name, flags="--layers 14 --hidden 24 --heads 12 --vocab 16 --seq 64 --gpus 96"):
    """Every legal t x p x d, by the stages that hold most, send most and take longest."""
    plan = planner(name)
    job = plan.parse(flags.split())
    inside, legal = min(job.gpus, job.gpus_per_node), set()
    for t, p in itertools.product(range(1, inside + 1), range(1, job.shape.layers + 1)):
        fits = job.shape.heads % t == inside % t == job.gpus % (t * p) == 0 and t * p > 1
        if fits and not (job.sequence_parallel and job.shape.seq % t):
            legal.add((t, p, job.gpus // (t * p)))
    meshes = [row for row in plan.table(job) if row["tensor"] * row["pipeline"] > 1]
    assert {(row["tensor"], row["pipeline"], row["data"]) for row in meshes} == legal, "other meshes"
    for row in meshes:
        ranks = [plan.replica(job, row["tensor"], row["pipeline"], stage) for stage in range(row["pipeline"])]
        for rank in ranks:
            plan.divide(job, "ZeRO-1", rank, row["data"], plan.near(job, row["tensor"] * row["pipeline"]))
        most = max(x.held["peak"] for x in ranks), max(x.sent for x in ranks)
        assert (row["bytes"]["peak"], row["bytes"]["sent_per_step"]) == most, "not the fullest stage"
        assert row["ms"]["sum"] == max(sum(x.ms.values()) for x in ranks), "not the slowest stage"


def check_advice(name):
    """The fastest of all that fits, as asked or not, and which; a step is the sum of its parts."""
    plan = planner(name)
    job = plan.parse(["--size=7.5b", "--gpus=64", "--gpu-gb=32"])
    take, why = plan.advise(job)
    fit = [row for row in plan.table(job) if row["fits"]]
    assert take == min(fit, key=lambda row: row["ms"]["sum"]), "another one is faster"
    flops = 2048 * (6 * job.params + 12 * 32 * 4352 * 2048)
    for *parts, total, mfu in [(*row["ms"].values(), row["mfu"]) for row in fit]:
        assert total == pytest.approx(sum(parts)), "another sum"
        assert mfu == pytest.approx(flops / total / 989e9), "another MFU"
    small, large = (f"--size gpt2-xl --gpus 64 --micro-batch 8 --gpu-gb {size}" for size in (12, 13))
    advice = {
        small: (
            "Take ZeRO-2 --micro-batch 2 --accum 4: 10.1 GB, 174 ms,",
            "It is not as asked: as asked nothing fits.",
        ),
        large: (
            "Take ZeRO-1 --micro-batch 2 --accum 4: 12.8 GB, 173 ms,",
            "It is not as asked: as asked nothing fits.",
        ),
        "--size 7.5b --gpus 64 --gpu-gb 32": ("Take ZeRO-2: 26.8 GB, 165 ms,", "and fit, as asked."),
        large.replace("13", "16"): (
            "Take ZeRO-3 --mic",
            ": as asked t1 x p32 x d2: 15.0 GB, 1084 ms is the fastest.",
        ),
        "--size gpt2 --gpus 1": ("Take DP: 2.92 GB", ", as asked."),
        f"{SEVENTY} --gpus 8 --gpu-gb 7.6": ("Nothing fits of ", " ms."),
    }
    for flags, (begin, end) in advice.items():
        _, why = plan.advise(plan.parse(flags.split()))
        assert why.startswith(begin) and why.endswith(end), f"{flags}: {why}"
    huge = "--layers 5040 --heads 5040 --hidden 5040 --seq 720720 --vocab 2 --gpus 720720 --gpu-gb 0.001"
    plan.MOST = 300
    _, why = plan.advise(plan.parse(f"{huge} --gpus-per-node 5040 --micro-batch 720720".split()))
    assert why.startswith("Nothing fits of 300 tried: "), "tries without end"


def random_flags(draw):
    """(flags, without those of --gpus; GPUs)."""
    layers, heads, seq = draw.randint(1, 6), draw.choice((1, 2, 3, 4, 6)), draw.choice((16, 96, 512))
    flags = f"--layers {layers} --heads {heads} --hidden {heads * draw.choice((8, 64, 320))} --seq {seq}"
    flags += f" --vocab {draw.choice((16, 50304))} --gpus-per-node {draw.choice((1, 2, 4, 8))}"
    gpus = draw.choice((1, 2, 4, 8, 16, 24))
    odd = [f"--micro-batch {draw.randint(2, 6)}", f"--accum {draw.choice((0.5, 2, 3))}", "--precision fp32"]
    odd += ["--attention math", "--schedule zb-v", "--sequence-parallel", "--gpu a100", "--optimizer muon"]
    odd += [f"--recompute {draw.choice(('selective', 'full', 'all'))}", "--cp 2" if gpus > 1 else "--accum 1"]
    odd += [
        f"--shard {2 if gpus > 1 else 1}",
        "--inner-steps 9",
        f"--experts {draw.choice((2, 8))} --expert-params 512",
    ]
    odd += ["--attention fused", f"--gbps-nodes {draw.choice((1, 360))}", f"--gbps {draw.choice((1, 9))}"]
    return " ".join([flags, *draw.sample(odd, draw.randint(0, 5))]), gpus


def check_random_jobs(name, jobs=30):
    """Parts sum up, nothing is negative, more memory and faster GPUs are never slower, more GPUs never hold
    more, and what is advised is a row of its own flags' table."""
    plan, draw = planner(name), random.Random(0)

    def parse(flags):
        return plan.parse(flags.split())

    for _ in range(jobs):
        flags, gpus = random_flags(draw)
        job = parse(f"{flags} --gpus {gpus}")
        rows = list(plan.table(job))
        if not rows:  # --accum 0.5 without any mesh: refused
            continue
        for row in rows:
            *parts, whole, sent = row["bytes"].values()
            assert min(*parts, sent) >= 0 and sum(parts[:3]) <= whole <= sum(parts), f"{flags}: {row}"
            *parts, whole = row["ms"].values()
            assert whole == pytest.approx(sum(parts)) and min(parts) >= 0, f"{flags}: {row}"
            assert 0 <= row["idle"] < 1 and 0 < row["mfu"] < 1, f"{flags}: {row}"
            assert len(plan.cells(row)) == 1 + len(plan.TITLES.split()), "other cells than titles"
        for faster in "tflops", "hbm_gbps", "gbps", "gbps_nodes":
            quick = plan.table(plan.changed(job, **{faster: 2 * getattr(job, faster)}))
            for row, other in zip(rows, quick, strict=True):
                slower = other["ms"]["sum"] > row["ms"]["sum"] * (1 + 1e-9)
                assert not slower, f"{flags}: twice the {faster} makes {row['strategy']} slower"
        before = None
        for share in 0.6, 1.01, 1.5:  # of what a row takes
            size = share * draw.choice(rows)["bytes"]["peak"] / 1e9
            take, why = plan.advise(plan.changed(job, gpu_gb=max(size, before[1] if before else 0)))
            size = max(size, before[1] if before else 0)
            ms = take["ms"]["sum"] if take else float("inf")
            assert not before or ms <= before[0] * (1 + 1e-5), f"{flags}: slower with {size} GB"
            before = ms, size
            if take:
                more = re.match(r"Take [^-:]*(?:ZeRO-\d(?: \+ EP)?)?( --[^:]*)?: ", why)[1] or ""
                own = plan.table(parse(f"{flags} --gpus {gpus} --gpu-gb {size}{more}"))
                assert take in own, f"{flags}{more}: not a row of its own table"
                assert (take in rows_as_asked(plan, job, size)) == why.endswith(", as asked."), why
        if gpus % job.gpus_per_node == 0 or 2 * gpus <= job.gpus_per_node:
            held = {(row["strategy"].partition(" x d")[0], row["recompute"]): row["bytes"] for row in rows}
            for row in plan.table(parse(f"{flags} --gpus {2 * gpus}")):
                key = row["strategy"].partition(" x d")[0], row["recompute"]
                assert key not in held or row["bytes"]["peak"] <= held[key]["peak"], (
                    f"{flags}: {key} holds more"
                )


def rows_as_asked(plan, job, size):
    return list(plan.table(plan.changed(job, gpu_gb=size)))


def test_random_jobs():
    check_random_jobs("plan", 300 if os.environ.get("FUZZ") else 80)


def check_neighbours(name):
    """Ranks that share gradients are where the numbering puts them: those of a sequence, then others."""
    plan = planner(name)
    job = plan.parse("--size 7.5b --gpus 64 --cp 8 --gbps-nodes 2".split())
    between = plan.row(job, "ZeRO-1", 1, 8)["ms"]["links between"]
    tie = 2 * 50304 * 4352 / 2e6  # ms from the first stage's node to the last one's
    assert between == pytest.approx(tie), "gradients of a node's ranks travel elsewhere"
    assert [plan.near_data(job, 1, p) for p in (1, 2, 8)] == [8, 8, 8], "gradients have other cards"
    assert [plan.near_data(plan.changed(job, cp=2), t, p) for t, p in ((1, 1), (1, 2), (8, 1))] == [8, 4, 1]


def check_idle(name):
    """Idle as simulated, if F = B = W, for all microbatches."""
    plan, lessons = planner(name), {"1f1b": "pipeline", "zb-v": "pipeline_v"}
    for schedule, p, k in itertools.product(lessons, (1, 2, 3, 4, 8), range(1, 20)):
        lesson = load(lessons[schedule])
        bubble = load("tools/bubble").bubble_rate(lesson.build_schedule(schedule, p, k), 1, 1, 1)
        assert abs(plan.idle(schedule, p, k) - bubble) < 1e-12, f"another bubble: {schedule} {p} {k}"


def check_exposed(name):
    """All if nothing hides, nothing if an all-gather c takes as long as F."""
    plan, c = planner(name), 9600
    for stage, k in itertools.product(range(4), (4, 7)):
        sent = (2, 2, 1 + k, 3 * k)[stage] * c
        late = [plan.exposed(stage, sent, c, k, f, 2 * f) for f in (0, c / 4, c / 2, c)]
        quarter = (3 * c / 2, 5 * c / 4, 3 * c / 4 + k * c / 2, 9 * k * c / 4)[stage]
        half = (c, c / 2, c / 2, 3 * k * c / 2)[stage]
        assert late == [sent, quarter, half, 0], f"other exposed bytes: {stage}"


def check_compute_bound(name):
    """scaling-book: its chapter on training, for a TPU v5p, and its chapter on GPUs."""
    plan, flops, speed = planner(name), 4.59e14, 1.8e11
    ranks = [plan.most_ranks(tokens * 99, flops, speed) for tokens in (2549, 2550)]
    assert ranks == [98, 99], "not 2550"
    chips, t = plan.most_ranks(16e6, flops, 3 * speed), plan.most_ranks(28672, flops, speed)
    assert (chips, t) == (18823, 11), "not those of LLaMA 3-70B, with three axes and with one"
    job = plan.parse(["--size=gpt2", "--tflops=990", "--peak-tflops=990", "--gbps=450", "--gbps-nodes=50"])
    assert [job.tflops * 1e9 / plan.link(job, gpus, 8)[1] for gpus in (8, 99)] == [2200, 2475], (
        "not an H100's"
    )
    for stage, tokens in itertools.product((0, 3), (2549, 2550)):
        hidden = 2 * 10**9 * tokens / flops * speed
        late = plan.exposed(stage, (2 + (stage == 3)) * 2 * 10**9, 2 * 10**9, 1, hidden, 2 * hidden)
        assert (late == 0) == (tokens == 2550), "exposed at other sizes of a batch"


def check_published(name):
    """ZeRO's Figure 1 (arXiv 1910.02054); bytes in GiB; table 1, its TFLOP/s within 16%, and those of Llama 3
    405B (2407.21783, table 4), whose 1F1B is interleaved, and whose ring has fewer keys."""
    plan = planner(name)
    letters = load("tools/formulas").plain_letters(7_500_000_000, 64)
    found = [plan.bytes_of(lesson, letters) for lesson in ("ddp", "zero1", "zero2", "zero3")]
    sums = [(sum(each.values()) - sum_of(each)) / 1e9 for each in found]  # zero1 and 2 average in fp32
    assert sums == pytest.approx([120, 31.4, 16.6, 1.88], rel=0.02), f"not Figure 1: {sums}"
    kept = plan.activations(plan.Shape(32, 32, 4096, 2048, 128256), 1, ends=(True, False))
    assert kept / 2**30 == 28.5078125, "other bytes of activations"
    for billions, a, h, L, t, p, gpus, batch, published, size in TABLES.GPTS:
        flags = f"--layers {L} --heads {a} --hidden {h} --seq 2048 --vocab 51200 --gpus {gpus} --gpu a100"
        flags += f" --micro-batch {size} --accum {batch / gpus / size} --attention math --recompute full"
        job = plan.parse(flags.split())
        assert round(job.params / 1e9, 1) == billions, f"{h}: {job.params} parameters"
        ms = plan.row(job, "DP", t, p)["ms"]["sum"]
        speed = 96 * batch * 2048 * L * h**2 * (1 + 2048 / 6 / h + 51200 / 16 / L / h) / gpus / ms / 1e9
        assert 0.84 < speed / published < 1.16, f"{h}: {speed} TFLOP/s"
    for gpus, cp, seq, published in TABLES.LLAMA:
        flags = "--params 405b --layers 126 --heads 128 --hidden 16384 --vocab 128256 --sequence-parallel"
        flags += f" --seq {seq} --gpus {gpus} --cp {cp} --accum {2**24 / seq / gpus} --schedule"
        jobs = [plan.parse(f"{flags} {schedule}".split()) for schedule in ("1f1b", "zb-v")]
        slow, fast = (plan.row(job, "ZeRO-1", 8, 16)["mfu"] * 989 for job in jobs)
        assert slow / 1.25 < published < fast * 1.25, f"{gpus}: {slow} to {fast} TFLOP/s"
        assert gpus > 8192 or slow > 0.75 * published, f"{slow} TFLOP/s in 1F1B"
        assert gpus > 8192 or ": as asked t8 x p16 x d64: " in plan.advise(jobs[0])[1], "another plan"


def check_measured(name):
    """Within 25% of the ms and 3% of the GB of gpu.json's steps on an H200; the GB of four ranks."""
    plan = planner(name)
    made = json.loads((ROOT / "docs/results/gpu.json").read_text())
    for size, sequences in made["sequences"].items():
        job = plan.parse(f"--size {size} --micro-batch {sequences} --gpu h200 --gpus 1".split())
        for measured in made["models"][size]:
            found = plan.row(job, TABLES.STRATEGY.get(measured["title"], "DP"))
            gb, ms = found["bytes"]["peak"] / 1e9, found["ms"]["sum"]
            assert gb == pytest.approx(measured["peak GB"], rel=0.03), f"{size}, {measured['title']}: {gb} GB"
            assert ms == pytest.approx(measured["ms"], rel=0.25), f"{size}, {measured['title']}: {ms} ms"
    page = (ROOT / "docs/results/one_gpu.md").read_text()
    shared = map(float, re.search(r"\| measured \|(.*?)\|\n", page)[1].split("|"))
    job = plan.parse("--size gpt2 --micro-batch 2 --gpus 4".split())
    for kind, measured in zip(["DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"], shared):  # hsdp.py was mended since
        gb = plan.row(job, kind)["bytes"]["peak"] / 1e9
        assert gb == pytest.approx(measured, rel=0.03), f"{kind} on four ranks: {gb} GB"
    aligned, odd = (
        plan.parse(f"--size gpt2 --gpu h200 --micro-batch 8 --vocab {v}".split()) for v in (50304, 50257)
    )
    slower = plan.replica(odd, 1, 1, 0).ms["computation"] - plan.replica(aligned, 1, 1, 0).ms["computation"]
    assert 20 < slower < 24, f"of 24 ms that a trace has for the logits' products: {slower}"  # 2026-11-26


def check_products(name):
    """A product takes its FLOPs and the bytes of its operands: measured by K for two of 8192 x K on H800s
    (tilelang, benchmark/matmul), and on an A100 (Azure/AI-benchmarking-guide). Smaller ones take longer."""
    plan = planner(name)
    of_depth = {256: 386, 512: 520, 1024: 628, 2048: 705, 4096: 736, 8192: 758, 16384: 766}
    rows = [("h100", 8192, 8192, k, speed, 0.06) for k, speed in of_depth.items()]
    rows += [
        ("a100", n, n, n, speed, 0.07)
        for n, speed in {2048: 221.8, 4096: 228, 8192: 253.7, 16384: 256.5}.items()
    ]
    rows += [("a100", 6144, 12288, 12288, 250.8, 0.07), ("a100", 802816, 192, 768, 157.8, 0.16)]
    for gpu, m, n, k, speed, most in rows:
        rank = plan.Rank(plan.parse(["--size", "toy", "--gpu", gpu]), 0, 1)
        found = 2e-9 * m * n * k / rank.compute(2 * m * n * k, 2 * (m * n + m * k + k * n))
        assert found == pytest.approx(speed, rel=most), f"{m} x {k} x {n}: {found} TFLOP/s"


class Passes(TorchDispatchMode):
    """Counts the bytes that operators read and write."""

    def __init__(self):
        super().__init__()
        self.bytes, self.touched_by = 0, load("tools/watch").touched_by

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        touched = self.touched_by(function, args, kwargs or {}, made)
        # Of the log-softmax the loss reads a number a token, and its backward none: it writes zeros.
        touched *= {"aten::nll_loss_forward": 0, "aten::nll_loss_backward": 0.5}.get(function.name(), 1)
        # A schema says that AdamW writes gradients; without a scaler it reads them.
        if "_fused_adamw_" in function.name():
            touched -= sum(grad.nbytes for grad in args[1])
        self.bytes += touched
        return made


def measured_bytes(layers, vocab, precision):
    """That forward and backward of the toy GPT read and write for a token, without the weights'."""
    single, found = load("single"), []
    shape = f"--layers {layers} --heads 2 --width 64 --context 32 --vocab {vocab}"
    for batch in 2, 4:
        model = single.GPT(single.parse(shape.split()))
        model.to(torch.bfloat16 if precision == "mixed" else torch.float32)
        tokens = torch.zeros(batch, 32, dtype=torch.int64)
        with Passes() as passes:
            single.mean_loss(model(tokens), tokens).backward()
        found.append(passes.bytes)
    return (found[1] - found[0]) / (2 * 32)


def predicted_bytes(plan, layers, vocab, precision):
    """(that plan.py counts for a token in forward and backward, for a parameter in the update)."""
    flags = f"--layers {layers} --heads 2 --hidden 64 --seq 32 --vocab {vocab} --precision {precision}"
    job = plan.parse(f"{flags} --gpus 1 --peak-tflops 1e15 --tflops 1e15".split())  # products take no time
    speed = job.hbm_gbps * 1e6
    both = speed * plan.replica(job, 1, 1, 0).ms["computation"]
    return both / 32, (speed * plan.row(job, "DP")["ms"]["computation"] - both) / job.params


def check_passes(name):
    """Layers' bytes within 4% of those that the toy GPT's operators read and write; logits' and AdamW's."""
    plan, sizes = planner(name), ((1, 256), (2, 256), (1, 512))
    param = torch.nn.Parameter(torch.ones(1000))
    param.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()
    with Passes() as passes:
        optimizer.step()
    for precision, moved in ("mixed", 10 + 16), ("fp32", 20):  # ddp.py's, by tools/formulas.py
        (one, update), (deeper, _), (wider, _) = (predicted_bytes(plan, *size, precision) for size in sizes)
        counted = [measured_bytes(*size, precision) for size in sizes]
        assert deeper - one == pytest.approx(counted[1] - counted[0], rel=0.04), "other passes of a layer"
        assert wider - one == pytest.approx(counted[2] - counted[0], rel=1e-3), "other passes over logits"
        assert update == pytest.approx(passes.bytes / 1000 + moved, rel=1e-3), "another update"


def check_lessons(name):
    """The lessons' formulas are the table's, at the letters that the lessons themselves have."""
    plan, ledger = planner(name), load("tools/ledger")
    for precision, (kind, lesson_name) in itertools.product(plan.WIDTHS, KINDS.items()):
        job, letters, values = job_and_docstring(plan, kind, 8, precision)
        found = plan.row(job, kind)["bytes"]
        for part in "parameters", "gradients", "optimizer":
            assert found[part] == pytest.approx(values[part], abs=1), f"{kind} holds another number: {part}"
        sent = sum_of(values)
        assert found["sent_per_step"] == pytest.approx(sent, abs=3), f"{kind} sends another number of bytes"
        P, N, k, w = (letters[letter] for letter in "PNkw")
        plain = dict.fromkeys("UEGfg", 0)
        for Y in (0, P // 2, P, 9 * P) if kind != "HSDP" else ():  # bytes that travel during a forward
            late = ledger.read_formulas(load(lesson_name), None, True)["exposed"]
            late = ledger.evaluate(late, letters | plain | {"n": (N - 1) / N, "A": 0, "B": 0, "Y": Y, "f": 1})
            stage, gathered = plan.ZERO[kind], w * P * (N - 1) / N
            sent = (2, 2, 1 + k, 3 * k)[stage] * gathered
            assert late == pytest.approx(plan.exposed(stage, sent, gathered, k, Y, 2 * Y)), f"{kind}: waits"


KINDS = {"DP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "zero3", "HSDP": "hsdp"}
SMALL = "--layers 4 --heads 4 --hidden 256 --seq 16 --vocab 256"


def job_and_docstring(plan, kind, ranks, precision):
    """(plan.py's job, letters, the formulas' values) of a small model."""
    flags = f"{SMALL} --gpus {ranks} --micro-batch 1 --accum 2 --precision {precision} --shard 2"
    ledger, lesson = load("tools/ledger"), load(KINDS[kind])
    config = lesson.parse(flags_of_lesson(kind, ranks, precision).split())
    config.shares = ranks
    letters = ledger.letters_of(lesson, config, ranks, "nccl")
    formulas = ledger.read_formulas(lesson, config).items()
    return (
        plan.parse(flags.split()),
        letters,
        {part: ledger.evaluate(text, letters) for part, text in formulas},
    )


def flags_of_lesson(kind, ranks, precision="mixed"):
    shape = SMALL.replace("--hidden", "--width").replace("--seq", "--context")
    flags = (
        f"{shape} --batch {2 * ranks} --accum 2 --steps 2 --dtype {'fp32' if precision == 'fp32' else 'bf16'}"
    )
    return f"{flags} --device cpu --data LICENSE" + " --shard 2" * (kind == "HSDP")


@pytest.mark.long_table
@pytest.mark.parametrize("ranks", [2, 8, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_what_the_ledger_measures(kind, ranks):
    """Of a lesson's simulated rank. A parameter's gradient and its shard of a unit's average may be there at
    the peak, which the formulas leave out; of zero1.py two units' received shards, and one's fp32 sum."""
    plan = load("plan")
    result = simulate(KINDS[kind], ranks, ranks // 2, flags_of_lesson(kind, ranks), "nccl")
    job, _, _ = job_and_docstring(plan, kind, ranks, "mixed")
    found = plan.row(job, kind)["bytes"]
    shards = 2 + 2 if kind == "ZeRO-1" else 1  # of a unit, in bf16
    others = 2 * 4 * job.shape.hidden**2 * 1.01 + shards * 2 * 12.1 * job.shape.hidden**2 / ranks
    for part in "parameters", "gradients", "optimizer":
        measured = result["held"][part]["measured"]
        assert (
            -0.03 * measured <= measured - found[part] <= 0.01 * measured + (part == "gradients") * others
        ), part
    sent = sum(row["wire"] for row in result["sent"].values())
    assert found["sent_per_step"] == pytest.approx(sent, rel=1e-3), "sends another number of bytes"


def docstring_of(lesson_name, flags):
    """(letters, {line: value}) of a lesson's docstring, of gpt2 on four ranks."""
    ledger, lesson = load("tools/ledger"), load(lesson_name)
    config = lesson.parse(f"--size gpt2 {flags}".split())
    config.shares = 1
    letters = ledger.letters_of(lesson, config, 4, "nccl")
    formulas = ledger.read_formulas(lesson, config).items()
    return letters, {key: ledger.evaluate(formula, letters) for key, formula in formulas}


MIXTRAL = """--params 7241732096 --layers 32 --heads 32 --hidden 4096 --seq 4096 --vocab 32000
    --experts 8 --top-k 2 --mixtures 32 --expert-params 176160768"""
DEEPSEEK = """--params 19.5b --layers 61 --heads 128 --hidden 7168 --seq 4096 --vocab 129280
    --experts 256 --top-k 8 --mixtures 58 --expert-params 44040192 --recompute full"""


def check_mixtures(name):
    """Mixtral 8x7B from Mistral 7B, and DeepSeek-V3 (2412.19437: 671 G, 37 of them for a token)."""
    plan = planner(name)
    page, giga = (ROOT / "docs/results/plan.md").read_text(), {}
    for flags, gpus in itertools.product((MIXTRAL, DEEPSEEK), (64, 2048)):
        job = plan.parse(f"{flags} --gpus {gpus}".split())
        rows = {row["strategy"]: row for row in plan.table(job)}
        giga[flags, gpus] = [round(rows[kind]["bytes"]["peak"] / 1e9, 1) for kind in ("EP", "ZeRO-3 + EP")]
        assert not rows["EP"]["fits"], "EP alone fits"
        assert rows["ZeRO-3 + EP"]["fits"] == (flags == MIXTRAL or gpus == 2048), "fits elsewhere"
        letters = plan.letters_of_experts(job, gpus, 1)
        sizes = [(letters["D"] + letters["M"] * letters["U"] * letters[many]) / 1e9 for many in "Xt"]
        expected = (46.7, 12.9) if flags == MIXTRAL else (671, 37)
        assert sizes == pytest.approx(expected, rel=0.02), f"another model: {sizes}"
    for flags, title in (MIXTRAL, "Mixtral 8x7B"), (DEEPSEEK, "DeepSeek-V3"):
        for gpus in (64, 2048):
            alone, both = giga[flags, gpus]
            assert f"| {title} | {gpus} | {alone}, no | {both}, " in page, f"{title}, {gpus}: {alone}, {both}"


def check_other_lessons(name):
    """Mixtral 8x7B from Mistral 7B; all lines of the docstrings of expert_parallel, expert_zero, diloco, muon
    and offload."""
    plan = planner(name)
    letters = plan.letters_of_experts(plan.parse(MIXTRAL.split()), 8, 1)
    sizes = [letters["D"] + 32 * letters["U"] * experts for experts in (8, 2)]
    assert sizes == [46_702_792_704, 12_879_925_248], "not Mixtral's parameters"
    flags = "--size gpt2 --gpus 4 --inner-steps 100 --micro-batch 2 --accum 3 --optimizer muon --experts"
    rows = {
        "EP": ("expert_parallel", "--batch 24 --accum 3 --ep 4", 8),
        "ZeRO-3 + EP": ("expert_zero", "--batch 24 --accum 3 --ep 2 --experts 2", 2),
        "DiLoCo": ("diloco", "--batch 24 --accum 3", 2),
        "Muon": ("muon", "--batch 24 --accum 3", 2),
    }
    for (precision, dtype), kind in itertools.product((("fp32", "fp32"), ("mixed", "bf16")), rows):
        lesson, own, experts = rows[kind]
        _, values = docstring_of(lesson, f"{own} --dtype {dtype}")
        job = plan.parse(f"{flags} {experts} --precision {precision}".split())
        found = plan.row(job, kind)["bytes"]
        for part in "parameters", "gradients", "optimizer":
            assert found[part] == pytest.approx(values[part], abs=2), f"{kind} holds another number: {part}"
        sent = sum_of(values) / (100 if kind == "DiLoCo" else 1)
        assert found["sent_per_step"] == pytest.approx(sent, abs=5), f"{kind} sends other bytes"
    _, values = docstring_of("offload", "--dtype bf16 --params")
    values = [plan.giga(size) for size in (values["parameters"] + values["gradients"], values["host"])]
    shown = printed("--size gpt2 --gpus 4")
    assert f"offload.py --params: {values[0]} GB and activations, {values[1]} GB on the host" in shown, values


def small_files():
    """Of a process: no file of more than 1000 bytes can be written, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def run(flags, **options):
    command = f"{sys.executable} {ROOT}/plan.py {flags}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, **options)


@pytest.mark.parametrize("gpu_gb, advised", [(2.5, "ZeRO-3"), (2, "ZeRO-3*")])
def test_json_is_the_table_in_bytes(tmp_path, gpu_gb, advised):
    flags = f"--size gpt2 --gpus 4 --gpu-gb {gpu_gb} --recompute all"
    done = run(f"{flags} --json {tmp_path}/json", cwd=tmp_path)
    written = json.loads((tmp_path / "json").read_text())
    assert json.loads(printed(f"{flags} --json -")) == written
    assert written["why"] == done.stdout.splitlines()[-1] and written["take"] in written["rows"]
    shown = [
        line.replace(", ", ",").split() for line in done.stdout.splitlines() if re.match("DP|ZeRO", line)
    ]
    rows = [row for row in written["rows"] if row["tensor"] * row["pipeline"] == 1]
    for (strategy, *words), row in zip(shown, rows, strict=True):
        assert strategy.partition(",")[0] == row["strategy"]
        sizes = [float(word) * 1e9 for word in words[:6]]
        assert sizes == pytest.approx([*row["bytes"].values()], rel=6e-3)
        assert float(words[8]) == pytest.approx(row["ms"]["sum"], rel=6e-3) and words[10] == row["bound_by"]


def test_nothing_is_lost_and_errors_are_one_line(tmp_path):
    """What --json names is what it was, or a new one that is whole."""
    kept, link = tmp_path / "a b.json", tmp_path / "link"
    kept.write_text("precious")
    link.symlink_to(kept)
    refused = "--gpus 0", "--size toy --nope", "--size toy --accum .3", "--params 1b", "--size toy --cp 3"
    for flags in refused:
        done = run(f"{flags} --json link", cwd=tmp_path)
        assert kept.read_text() == "precious" and sorted(tmp_path.iterdir()) == [kept, link], flags
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), f"{flags}: {done}"
    broken = {"--json /dev/full": 2, f"--json {tmp_path}": 2, "--json - | head -c 10": 0, ">/dev/full": 1}
    for more, code in broken.items():
        done = run(f"--size 7.5b {more}", cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n") < 2) == (code, True), f"{more}: {done}"
        assert code == 0 or done.stderr.startswith("plan.py: "), f"{more}: {done}"
    assert run("--size toy --json link", cwd=tmp_path).returncode == 0
    assert link.is_symlink() and json.loads(kept.read_text())["take"]
    assert sorted(tmp_path.iterdir()) == [kept, link], "something is left"
    assert "File too large" in run("--size 7.5b --json link", cwd=tmp_path, preexec_fn=small_files).stderr
    assert json.loads(kept.read_text())["take"] and sorted(tmp_path.iterdir()) == [kept, link]
    assert run("--size toy --json /dev/stdout").stdout.startswith('{"params": ')
    assert run("--size 7.5b --gpus 1 --gpu-gb 1").returncode == 1, "nothing fits, and no script sees it"


def test_the_docs_show_what_plan_prints():
    sample = load("bench/pages").read()["plan-sample"]
    assert printed(sample["command"].removeprefix("python plan.py ")).strip() == sample["text"]


CHECKS = [
    check_measured,
    check_products,
    check_passes,
    check_published,
    check_counts,
    check_layer,
    check_wire,
    check_advice,
    check_idle,
    check_exposed,
]
CHECKS += [
    check_compute_bound,
    check_lessons,
    check_mixtures,
    check_other_lessons,
    check_random_jobs,
    check_neighbours,
]
WAYS = "--recompute full", "--sequence-parallel --recompute selective --precision fp32 --attention math"
JOB = "--layers 37 --heads 6 --hidden 30 --vocab 9999 --seq 64 --micro-batch 3 --accum 2"
GPUS = "1", "7", "36 --gpus-per-node 6", "64"
JOBS = [f"{JOB} --gpus {gpus} {way}" for gpus, way in itertools.product(GPUS, WAYS)]
CHECKS += [partial(check_stages, flags=flags) for flags in JOBS]
test_each_promise_is_kept = holds("plan", *CHECKS)
FORMULAS = [
    ("2 * kept + 6 * hidden", "2 * kept", check_passes, "other passes of a layer"),
    ("2 * (not flash)", "2", check_layer, "with flash"),
    ('"E": job.params - layers * block', '"E": 0', check_lessons, "ZeRO-2 holds another number"),
    ("min(1, layers - 1)", "0", check_lessons, "ZeRO-3 holds another number"),
    ("max(3 * layers * matrix / ranks, matrix)", "matrix", check_other_lessons, "Muon holds another number"),
    ("block * (job.shape.layers > 1)", "0", check_other_lessons, "ZeRO-3 + EP holds another number"),
    ('"b": job.micro_batch * ranks', '"b": job.micro_batch', check_other_lessons, "EP sends other bytes"),
    ("+ 7 * hidden) // tensor + 6 * hidden", "+ 9 * hidden) // tensor + 4 * hidden", check_counts, "split"),
    ("ends[0] * numbers", "ends[0] * width * numbers", check_published, "other bytes of activations"),
    ('4 * (recompute == "full")', "0", check_wire, "tensor parallelism"),
    ("- 1 - 3 * microbatches", "- 1 - 4 * microbatches", check_idle, "another bubble"),
    ("2 * pipeline - 1 - micro", "pipeline - 1 - micro", check_idle, "another bubble"),
    ("(0, 1, 1, microbatches)[stage]", "(0, 1, 1, 1)[stage]", check_exposed, "exposed bytes: 3"),
    ("- backwards * backward", "- backward", check_exposed, "exposed bytes: 2"),
    ("speed / flops", "speed / flops / 2", check_compute_bound, "not 2550"),
    ("job.gbps_nodes * (near if ring else 1)", "job.gbps_nodes", check_compute_bound, "not an H100's"),
]
PLAN = [
    ("(shape.layers + stage) // pipeline", "shape.layers // pipeline", check_counts, "stages lack"),
    ("seq=shape.seq // job.cp", "seq=shape.seq", check_wire, "a part of the tokens"),
    ("len({0, pipeline - 1} - {stage})", "2", check_wire, "a pipeline"),
    ("-shape.layers % pipeline, ", "", check_stages, "the fullest stage"),
    ("f\"{row['ms']['sum']:.6g}\"", '"1"', check_advice, "another one is faster"),
    ("(tried(job), MOST)", "(((job, row) for row in table(job)), MOST)", check_advice, "12: Nothing fits of"),
    ("MOST))", "10**4))", check_advice, "tries without end"),
    (
        "fastest(pair[1]))\n    if not fit",
        "pair[0] is not job)\n    if not fit",
        check_random_jobs,
        "slower with",
    ),
    (
        "!= getattr(asked, name)",
        "!= getattr(asked, name) != 1",
        check_random_jobs,
        "not a row of its own table",
    ),
    ("f\"{row['mfu']:.0%}\", ", "", check_random_jobs, "other cells than titles"),
    ("passed(own, batch, *split, flash))", "0)", check_published, "2304"),
    ("(16 - split[-1]) * logits", "14 * logits", check_passes, "other passes over logits"),
    ("(2 + 3 * letters", "(3 * letters", check_passes, "another update"),
    ("moved += eval", "eval", check_passes, "another update"),
    ("chunk, 12)", "chunk)", check_measured, "gpt2, zero3.py: 17.9"),
    ("if lesson in BUCKETS", "if zero > 3", check_measured, "DP on four ranks: 3.59"),
    ("elif rank.microbatches > 1", "elif rank.microbatches", check_measured, "gpt2-xl, zero3.py: 75"),
    ('max(begin, held["gradients"])', "begin", check_random_jobs, "{'strategy': 'DP'"),
    ("(vocab % 8 > 0)", "0", check_measured, "the logits' products: -0.0"),
    ("/ 1e9 + moved / self.job.hbm_gbps / 1e6", "/ 1e9", check_products, "8192 x 256 x 8192"),
    ("80 2970 360", "80 4150 360", check_products, "8192 x 256 x 8192"),
    ("min(job.cp, near(job, tensor)) * ", "", check_neighbours, "gradients of a node's ranks"),
    ("max(0, rank.backward - 2 * gathered / speed)", "rank.backward", check_random_jobs, "makes HSDP slower"),
    ("self.backward *= rest", "pass", check_random_jobs, "slower"),
    ("sum(sent.values()) - others", "sum(sent.values())", check_other_lessons, "EP sends other bytes"),
]
test_a_mutant_is_rejected = mutants(PLAN, "plan")
test_a_mutant_of_the_formulas_is_rejected = mutants(FORMULAS, "tools/formulas")
