"""plan.py beside published figures, the toy GPT and the lessons' own formulas."""

import itertools
import json
import re
import subprocess
import sys
import types

import pytest
import torch

from tests.harness import ROOT, holds, load, mutants, said

SEVENTY = "--layers 80 --hidden 8192 --heads 64 --vocab 128256 --seq 4096"


def printed(flags):
    """What plan.py prints for a command line."""
    plan = load("plan")
    return said(lambda: plan.plan(plan.parse(flags.split())))[0]


def check_figure_1(name):
    """ZeRO (arXiv 1910.02054), Figure 1; the table of it is in README."""
    plan = load(name)
    sums = [sum(plan.states(stage, 7_500_000_000, 64).values()) for stage in range(4)]
    assert [f"{size / 1e9:.3g}" for size in sums] == ["120", "31.4", "16.6", "1.88"], f"not Figure 1: {sums}"


def check_counts(name):
    """The closed form counts the toy GPT's parameters, and those of a tensor-parallel rank or a stage."""
    plan, single = load(name), load("single")
    millions = dict(zip(single.SIZES, ("0.42", "4.84", "124.44", "1557.61", "7502.37")))
    for size, text in single.SIZES.items():
        shape = plan.Shape(*plan.SIZES[size])
        assert shape == tuple(map(int, text.split())), "other sizes than the lessons'"
        config = types.SimpleNamespace(**dict(zip(single.SHAPE, shape)), seed=0)
        with torch.device("meta"):
            named = dict(single.GPT(config).named_parameters())
        count = sum(param.numel() for param in named.values())
        assert plan.whole_model(shape) == count, "another number of parameters"
        assert f"{count / 1e6:.2f}" == millions[size], "not the published number"
        pattern = "norm|position|(proj|down).bias"
        whole = sum(param.numel() for name, param in named.items() if re.search(pattern, name))
        for t in (t for t in (1, 2, 4) if shape.heads % t == 0):
            split = (count - whole - shape.vocab * shape.hidden) // t + -(-shape.vocab // t) * shape.hidden
            own = plan.parameters(shape.layers, shape.hidden, shape.vocab, shape.seq, t)
            assert own == split + whole, "another split of tensors"
        job = plan.parse(f"--size {size}".split())
        for p in (2, 3, shape.layers):
            stages = sum(plan.replica(job, 1, p, i)[0] for i in range(p))
            twice = shape.vocab * shape.hidden  # the tied one
            assert stages == count + twice, "stages lack parameters"


def check_whole_model(name):
    """Published figures of whole models: billions of parameters (2104.04473, table 1), bytes in GiB."""
    plan = load(name)
    for hidden, layers, billions in (
        (2304, 24, 1.7), (3072, 30, 3.6), (4096, 36, 7.5), (6144, 40, 18.4), (8192, 48, 39.1),
        (10240, 60, 76.1), (12288, 80, 145.6), (16384, 96, 310.1), (20480, 105, 529.6), (25600, 128, 1008.0),
    ):  # fmt: skip
        count = plan.whole_model(plan.Shape(layers, 128, hidden, 2048, 51200))
        assert round(count / 1e9, 1) == billions, f"{hidden}: {count / 1e9:.2f} G parameters"
    kept = plan.activations(plan.Shape(32, 32, 4096, 2048, 128256), 1, ends=(True, False))
    assert kept / 2**30 == 28.5078125, "other bytes of activations"


def check_layer(name):
    """Table 2 of arXiv 2205.05198, in 16 bits, and what it says of GPT-3."""
    plan = load(name)
    shape, b, t = plan.Shape(96, 96, 12288, 2048, 51200), 3, 8  # GPT-3
    sbh, scores = shape.seq * b * shape.hidden, 5 * shape.heads * shape.seq / shape.hidden
    table = {
        ("none", 1, False): sbh * (34 + scores),
        ("none", t, False): sbh * (10 + 24 / t + scores / t),
        ("none", t, True): sbh / t * (34 + scores),
        ("selective", t, False): sbh * (10 + 24 / t),
        ("selective", t, True): 34 * sbh / t,
        ("full", t, False): 2 * sbh,
        ("full", t, True): 2 * sbh / t,
    }
    for how, size in table.items():
        assert plan.layer_activations(shape, b, *how) == size, f"not table 2: {how}"
        flash = ("selective" if how[0] == "none" else how[0], *how[1:])
        flash_size = table.get(flash, 34 * sbh)
        assert plan.layer_activations(shape, b, *how, flash=True) == flash_size, f"with flash: {how}"
    fp32 = plan.layer_activations(shape, b, "none", t, True, 4)
    assert fp32 == sbh / t * (2 * 34 - 2 + scores * 9 / 5), "masks are a byte in fp32, too"
    saved = 1 - plan.layer_activations(shape, b, "selective") / plan.layer_activations(shape, b)
    assert f"{saved:.0%}" == "70%", "selective recomputation saves another share"
    whole = 96 * sbh / t * (34 + scores) + sbh / t + 4 * sbh / t * (1 + shape.vocab / shape.hidden)
    assert plan.activations(shape, b, "none", t, True) == whole, "not section 4.3"
    again = plan.activations(shape, b, "full", t, True) - 96 * 2 * sbh / t - sbh / t
    assert again == sbh / t * (34 + scores) - 2 * sbh / t, "a recomputed layer is whole for a moment"


def check_wire(name):
    """P(N-1)/N times 2, 2, 1 + k and 3k; 8bsh of tensor parallelism; bsh each way over each boundary."""
    plan = load(name)
    for k in (1, 4):
        sent = [plan.wire(stage, 640, 64, k, width) / width for stage in range(4) for width in (2, 4)]
        expected = [times * 640 * 63 / 64 for times in (2, 2, 2, 2, 1 + k, 1 + k, 3 * k, 3 * k)]
        assert sent == expected, "other bytes of a ZeRO stage"
    job = plan.parse(["--size", "gpt2", "--micro-batch", "2", "--accum", "3", "--gpus", "16"])
    bsh = 2 * job.shape.seq * job.shape.hidden
    for recompute, sequence, times in ("none", False, 8), ("selective", True, 10), ("full", False, 12):
        moved = plan.tensor_wire(job.shape, 2, recompute, 4, sequence, 2, 3)
        assert moved == 2 * times * 3 * job.shape.layers * bsh * 3 / 4, "other bytes of tensor parallelism"
    moved = plan.context_wire(job.shape, 2, 4, 2, 3)
    assert moved == 2 * 3 * job.shape.layers * bsh * 2 * (3 * 4 - 2) / 4, "other bytes of context parallelism"
    tied = 2 * job.shape.vocab * job.shape.hidden
    sent = [plan.replica(job, 1, 4, stage)[2] for stage in range(4)]  # 12 microbatches
    assert sent == [24 * bsh + tied, 48 * bsh, 48 * bsh, 24 * bsh + tied], "other bytes of a pipeline"
    ranks = [plan.replica(plan.changed(job, schedule="zb-v"), 1, 4, rank) for rank in range(4)]
    assert [rank[2] for rank in ranks] == [48 * bsh, 96 * bsh, 96 * bsh, 48 * bsh], "the tie needs no message"
    assert ranks[1][1] == ranks[3][1], "a rank of a V has as much in flight as any other"
    found = plan.row(job, 1, 2, 4)
    assert found["data"] == 2 and found["idle"] == 3 / (24 + 3), "another bubble"
    params, _, within = plan.replica(job, 2, 4, 0)
    assert found["bytes"]["sent_per_step"] == within + plan.wire(1, params, 2, 24), "not their sum"
    alone, shared = (plan.replica(plan.changed(job, cp=cp), 1, 1, 0) for cp in (1, 4))
    assert shared[1] * 4 == alone[1], "other activations of a part of the tokens"
    assert shared[2] == 2 * 12 * job.shape.layers * bsh * 2 * (3 * 4 - 2) / 4, "other bytes of a ring"


def check_idle(name):
    """A step is idle as simulated, if F = B = W; 1f1b's B is then as long as F."""
    plan, lessons = load(name), {"1f1b": "pipeline", "zb-v": "pipeline_v"}
    for schedule, p, k in itertools.product(lessons, (1, 2, 4), (4, 5, 6, 7, 8, 12)):
        lesson = load(lessons[schedule])
        bubble = lesson.bubble_rate(lesson.build_schedule(schedule, p, k), 1, 1, 1)
        assert abs(plan.idle(schedule, p, k) - bubble) < 1e-12, "another bubble"


def check_stages(name, flags="--layers 14 --hidden 24 --heads 12 --vocab 16 --seq 64 --gpus 96"):
    """Every legal t x p x d, by the stage that holds most and the one that sends most."""
    plan = load(name)
    job = plan.parse(flags.split())
    inside = min(job.gpus, job.gpus_per_node)
    legal = set()
    for t in range(1, inside + 1):
        for p in range(1, job.shape.layers + 1):
            fits = job.shape.heads % t == inside % t == job.gpus % (t * p) == 0 and t * p > 1
            if fits and not (job.sequence_parallel and job.shape.seq % t):
                legal.add((t, p, job.gpus // (t * p)))
    meshes = plan.meshes(job)
    assert {(row["tensor"], row["pipeline"], row["data"]) for row in meshes} == legal, "other meshes"
    for row in meshes:
        held, sent = [], []
        for stage in range(row["pipeline"]):
            params, kept, within = plan.replica(job, row["tensor"], row["pipeline"], stage)
            held.append(sum(plan.states(1, params, row["data"], job.precision).values()) + kept)
            sent.append(within + plan.wire(1, params, row["data"], width=plan.BYTES[job.precision][0]))
        most = row["bytes"]
        assert (most["sum"], most["sent_per_step"]) == (max(held), max(sent)), "not the fullest stage"


SHAPE = "--layers 37 --heads 6 --hidden 30 --vocab 9999 --seq 64 --micro-batch 3 --accum 2"


@pytest.mark.parametrize("flags", ["--recompute full", "--sequence-parallel --recompute selective"])
@pytest.mark.parametrize("gpus", [1, 7, 36, 64])
def test_rows_are_of_the_legal_meshes_and_their_fullest_stages(gpus, flags):
    check_stages("plan", f"{SHAPE} --gpus {gpus} {flags}")
    check_stages("plan", f"{SHAPE} --gpus {gpus} {flags} --precision fp32 --attention math")


ADVICE = {
    "--params 7.5b --gpus 64 --gpu-gb 120": "Take DP: 120 GB fit",
    "--params 7.5b --gpus 64 --gpu-gb 119": "Take ZeRO-2: 16.6 GB fit",
    "--params 7.5b --gpus 64 --gpu-gb 32 --accum 2": "Take ZeRO-1: 31.4 GB fit",
    "--params 7.5b --gpus 64 --gpu-gb 16": "Take ZeRO-3: 1.88 GB fit",
    f"{SEVENTY} --gpus 640 --gpu-gb 9": "Take t4 x p20 x d8 --recompute full --sequence-parallel: 7.84 GB",
    "--size gpt2 --seq 1048576 --gpu-gb 40": "Take ZeRO-1 --recompute full --cp 8:",
    f"{SEVENTY} --gpus 8": "Nothing fits: ZeRO-3 needs 139 GB, of it 7.64 for",
    f"{SEVENTY} --gpus 8 --gpu-gb 7.6": "Nothing fits: ZeRO-3 needs",
}


def check_advice(name):
    plan = load(name)
    for flags, expected in ADVICE.items():
        _, why = plan.advise([plan.parse(flags.split())])
        assert why.startswith(expected), f"{flags}: {why}"


def check_lessons(name):
    """Without what is in flight (U, E, G), the docstrings' formulas are plan.py's."""
    plan, ledger = load(name), load("tools/ledger")
    P, N, k = 6400, 4, 3
    for precision, w, c, K in ("fp32", 4, 0, 8), ("mixed", 2, 4, 8):
        letters = {"P": P, "N": N, "k": k, "w": w, "m": 4, "c": c, "K": K} | dict.fromkeys("TUEGfg", 0)
        for stage, lesson in enumerate(("ddp", "zero1", "zero2", "zero3")):
            formulas = ledger.read_formulas(load(lesson), None)
            values = {key: ledger.evaluate(text, letters) for key, text in formulas.items()}
            states = plan.states(stage, P, N, precision)
            # In bf16 fp32 copies are parameters in the lessons, and an optimizer's in ZeRO's paper.
            own = values["parameters"] + values["optimizer"]
            copy = 2 * P // N if precision == "mixed" and stage == 3 else 0  # the paper's bf16 shard
            assert own + copy == states["parameters"] + states["optimizer"], f"{lesson} holds another number"
            wide = max(states["gradients"] + (stage == 1) * c * P // N, 4 * P // N)  # zero1.py has both
            assert values["gradients"] == wide, f"{lesson}'s gradients"
            sent = sum(values.get(key, 0) for key in ("all-reduce", "reduce-scatter", "all-gather"))
            assert sent == plan.wire(stage, P, N, k, w), f"{lesson} sends another number of bytes"


def check_hybrid(name):
    """A copy of HSDP is ZeRO-3's on its ranks, and its bytes are hsdp.py's; with F = N it is ZeRO-3."""
    plan, ledger = load(name), load("tools/ledger")
    formulas = ledger.read_formulas(load("hsdp"), None)
    P, N, F, k = 6400, 8, 2, 3
    letters = {"P": P, "N": N, "F": F, "k": k, "w": 4, "m": 4, "c": 0, "K": 8} | dict.fromkeys("UEfg", 0)
    values = {key: ledger.evaluate(text, letters) for key, text in formulas.items()}
    job = plan.parse(f"--params {P} --gpus {N} --shard {F} --accum {k} --precision fp32".split())
    found = plan.row(job, 3, shard=F)["bytes"]
    assert all(found[key] == values[key] for key in plan.states(3, P, F)), "other bytes are held"
    sent = values["reduce-scatter"] + values["all-gather"], values["all-reduce"]
    assert plan.hybrid_wire(P, N, F, k, 4) == sent, "other bytes than hsdp.py sends"
    assert found["sent_per_step"] == sum(sent), "not their sum"
    assert plan.row(job, 3, shard=N)["bytes"] == plan.row(job, 3)["bytes"], "one copy is not ZeRO-3"
    lines, _, _ = said(lambda: plan.plan(plan.parse(["--params=7.5b", "--gpus=64", "--shard=8"])))
    assert re.search(r"^HSDP 8 +1.88 +1.88 +11.2 ", lines, re.M), "another row"
    assert "HSDP 8: 39.4 GB sent/step among its GPUs, 3.28 GB to others" in lines, "another line"


def docstring_of(lesson_name, flags):
    """(letters, {line: value}) of a lesson's docstring, of gpt2 on four ranks."""
    ledger, lesson = load("tools/ledger"), load(lesson_name)
    shape = "--layers 12 --heads 12 --width 768 --context 1024 --vocab 50257"
    config = lesson.parse(f"{shape} {flags}".split())
    config.shares = 1
    letters = ledger.letters_of(lesson, config, 4, "gloo")
    formulas = ledger.read_formulas(lesson, config)
    return letters, {key: ledger.evaluate(formula, letters) for key, formula in formulas.items()}


def check_experts(name):
    """Mixtral 8x7B from Mistral 7B; expert_parallel.py's parameters and bytes."""
    plan = load(name)
    sizes = plan.mixture(7_241_732_096, 32, 3 * 4096 * 14336, 4096, 8, 2)
    assert sizes == [46_702_792_704, 12_879_925_248], "not Mixtral's parameters"
    letters, values = docstring_of("expert_parallel", "--batch 24 --accum 3 --ep 4")
    flags = "--size gpt2 --experts 8 --gpus 4 --micro-batch 2 --accum 3 --precision fp32"
    job = plan.parse(flags.split())
    total, _ = plan.mixture(job.params, 6, 8 * 768**2 + 5 * 768, 768, 8, 2)
    assert letters["D"] + letters["M"] * 8 * letters["U"] == total, "other parameters than the lesson's"
    assert plan.dispatch_wire(job.shape, 2, 4, 2, 4, 3) == values["all-to-all"], "other bytes"
    line, _, _ = said(lambda: plan.plan(job))
    assert "0.323 G parameters, 0.153 G for a token, 0.679 GB more sent/step" in line, "another line"


def check_offload(name):
    """The docstring's formulas of offload.py, and of diloco.py, are plan.py's."""
    plan = load(name)
    for precision, dtype in ("fp32", "fp32"), ("mixed", "bf16"):
        letters, values = docstring_of("diloco", f"--dtype {dtype}")
        sent = values.pop("all-reduce") // 100
        assert plan.local_steps(letters["P"], 4, 100, precision) == (sum(values.values()), sent), "diloco.py"
    for more in "", "--params":
        _, values = docstring_of("offload", f"--dtype bf16 {more}")
        device = values["parameters"] + values["gradients"]
        found = plan.offloaded(plan.Shape(*plan.SIZES["gpt2"]), 4, bool(more))
        assert found == (device, values["host"]), "other bytes"


def check_muon(name):
    """The docstring's formulas of muon.py are plan.py's; its gradients are in shards, too."""
    plan = load(name)
    for precision, dtype in ("fp32", "fp32"), ("mixed", "bf16"):
        letters, values = docstring_of("muon", f"--dtype {dtype} --gather")
        _, owned = docstring_of("muon", f"--dtype {dtype}")
        job = plan.parse(f"--size gpt2 --gpus 4 --precision {precision} --optimizer muon".split())
        held = plan.replicas(job)[1]["bytes"]
        lesson = values["parameters"] + values["optimizer"], values["gradients"] - letters["P"]
        assert lesson == (held["parameters"] + held["optimizer"], held["gradients"]), "holds another number"
        assert owned["reduce"] + owned["broadcast"] == held["sent_per_step"], "other bytes"
        ratio = (values["reduce"] + values["broadcast"]) / held["sent_per_step"]
        assert 1 < ratio <= (1.25 if dtype == "fp32" else 1.5), "not (1, 1.25] of AdamW's (2502.16982)"


def test_json_is_the_table_in_bytes(tmp_path):
    flags = "--size gpt2 --gpus 4 --recompute all --json"
    command = [sys.executable, "plan.py", *flags.split(), tmp_path / "plan"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    written = json.loads((tmp_path / "plan").read_text())
    assert json.loads(printed(f"{flags} -")) == written
    assert written["why"] == out.splitlines()[-1] and written["take"] in written["rows"]
    shown = [line.split() for line in out.splitlines() if line.startswith(("DP", "ZeRO"))]
    rows = [row for row in written["rows"] if row["tensor"] * row["pipeline"] == 1]
    for (strategy, *words), row in zip(shown, rows):
        sizes = [size / 1e9 for size in row["bytes"].values()]
        assert strategy == row["strategy"]
        assert list(map(float, words[:6])) == pytest.approx(sizes, rel=6e-3)


def test_the_readme_shows_what_plan_prints():
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(r"^\$ python plan.py (.*)\n\.\.\.\n((?:.+\n)+?)```$", readme, re.M)
    assert shown
    for flags, lines in shown:
        assert printed(flags).endswith(f"\n{lines}")


CHECKS = [check_figure_1, check_counts, check_whole_model, check_layer, check_wire, check_idle, check_advice]
CHECKS += [check_lessons, check_hybrid, check_experts, check_offload, check_muon]
test_each_promise_is_kept = holds("plan", *CHECKS)
MUTANTS = [
    ("4 * (matrices //", "2 * (matrices //", check_muon, "holds another number"),
    ("rest + 2 * block if", "rest + block if", check_offload, "other bytes"),
    ("(2, 2, 12)", "(2, 2, 8)", check_figure_1, "not Figure 1"),
    ("params * (ranks - 1) // ranks", "params", check_wire, "other bytes of a ZeRO stage"),
    ("gradients\", \"parameters\")[:stage]", "gradients\")[stage:]", check_figure_1, "not Figure 1"),
    ("+ 7 * hidden) // tensor + 6 * hidden", "+ 9 * hidden) // tensor + 4 * hidden", check_counts, "split"),
    ("(first or last)", "first", check_counts, "stages lack parameters"),
    ("(shape.layers + stage) // pipeline", "shape.layers // pipeline", check_counts, "stages lack"),
    ("ends[0] * numbers", "ends[0] * width * numbers", check_whole_model, "other bytes of activations"),
    ("and not flash", "", check_layer, "with flash"),
    ("max(whole - kept, ends[1] * head)", "ends[1] * head", check_layer, "whole for a moment"),
    ("1 + microbatches, 3 * microbatches", "2 * microbatches, 3 * microbatches", check_wire, "a ZeRO stage"),
    ('4 * (recompute == "full")', "0", check_wire, "tensor parallelism"),
    ("changed(tried[-1], cp=ranks)", "tried[-1]", check_advice, "Nothing fits"),
    ("own._replace(seq=own.seq // job.cp)", "own", check_wire, "a part of the tokens"),
    ("len({0, pipeline - 1} - {stage})", "2", check_wire, "a pipeline"),
    ("* stages\n", "\n", check_wire, "the tie"),
    ("stage * (stages == 1)", "stage", check_wire, "in flight"),
    ("2 * pipeline - 1 - micro", "pipeline - 1 - micro", check_idle, "another bubble"),
    ("if stages == 1 else 0)", "if stages else 0)", check_wire, "the tie"),
    ("{0, 1, -layers % pipeline, pipeline - 1}", "{0, 1, pipeline - 1}", check_stages, "the fullest stage"),
    ("min(job.gpus, job.gpus_per_node)", "job.gpus", check_stages, "other meshes"),
    ("*(number // d for d in small)", "", check_stages, "other meshes"),
    ('row["zero"] > 0, ', "", check_advice, "Take"),
    ("routers + mixtures * mlp", "mixtures * mlp", check_experts, "not Mixtral's"),
    ("-(-params // ranks)", "params", check_lessons, "holds another number"),
    ("wire(3, params, shard,", "wire(3, params, ranks,", check_hybrid, "other bytes than hsdp.py"),
    ("wire(0, params // shard, ranks", "wire(0, params, ranks", check_hybrid, "other bytes than hsdp.py"),
    ("params, shard or data,", "params, data,", check_hybrid, "other bytes are held"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "plan")
