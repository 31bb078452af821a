"""Will it fit, and how long does a step take? Bytes and milliseconds of each strategy, from formulas alone.

Idea
    Parameters, gradients and optimizer states, units in flight among them, take as many bytes as the
    lessons' docstrings say; the ZeRO stages divide them by N ranks (arXiv 1910.02054). Activations follow
    from the shape (arXiv 2205.05198). A step takes as long as its computation; what is sent beside it takes
    time only where it takes longer.

Memory, Communication
    Of the rank with most, by tools/formulas.py and these docstrings: each kind at its most, and as peak the
    most at once. That is when the last backward begins: activations with the loss's, and the gradients that
    are there already. Or it is when backward has ended, with all gradients and no activation.
    In t x p x d meshes the d replicas use ZeRO-1. All rows have the same batch: a replica of t x p x C ranks
    (--cp C) takes tpC times --accum microbatches (0.5, too).

Time
    F, the forward of a microbatch: 2 FLOPs a parameter and token and 4sh a token for a layer's attention, at
    --tflops; and what layers and the loss read and write (tools/formulas.py), the operands of products among
    it, at --hbm-gbps. A backward B takes 2F, with --recompute full 3F. Then at --hbm-gbps what the lesson
    itself passes over gradients and weights ("touched", TIME in tools/formulas.py), and AdamW's 28 bytes a
    parameter; muon takes 280hhh FLOPs a block, shared by owners. MFU counts 6P + 12Lsh FLOPs a token (PaLM,
    arXiv 2204.02311, B), over --peak-tflops.
    What computation does not hide, with c for an all-gather or a reduce-scatter of P, and k microbatches:
    DP      max(0, 2c - B)                          ZeRO-2  max(0, c - F) + k max(0, c - B)
    ZeRO-1  max(0, c - F) + max(0, c - B)           ZeRO-3  k max(0, c - F) + k max(0, 2c - B)
    HSDP adds the shards' all-reduce, less what is left of B. Rings of --cp hide behind attention, messages of
    pipelines behind microbatches; what tensor parallelism, experts and DiLoCo send hides behind nothing.
    In a node a rank sends at --gbps. A ring that leaves it has the cards (--gbps-nodes each) of all its ranks
    in the node; an all-to-all has its sender's. GPUs are numbered by tensor, context, pipeline, data.

Advice
    The fastest of all that is tried and fits: what is asked for, and the same batch with fewer sequences at a
    time, split over --cp ranks, with --sequence-parallel and with each --recompute, up to MOST rows.

Run
    python plan.py --size 7.5b --gpus 64 --gpu-gb 32
    python plan.py --size gpt2-xl --gpus 4 --gpu-gb 24 --micro-batch 8 --recompute all

Left out
    Launches of kernels; compiled models. gpt2 took an H200 a sixth longer (docs/results/plan.md). What CUDA
    and NCCL take. What tensor parallelism sends for embedding, head and loss. Latency, interleaved 1F1B,
    grouped queries, causal masks (half of attention, whose kernels are half as fast as other products),
    experts' activations. ZeRO-2 and 3 on meshes; offload as a row. --experts replace MLPs of the model that
    the other rows are of: MLPs, too, of --expert-params. --params corrects the count of a shape whose layers
    are a little different.
"""

import argparse
import functools
import itertools
import json
import math
import operator
import os
import re
import sys
from pathlib import Path

from tools.formulas import (
    TIME,
    WIDTHS,
    Shape,
    activations,
    context_wire,
    exposed,
    idle,
    letters_of_experts,
    letters_of_job,
    link,
    most_ranks,
    near,
    parameters,
    passed,
    tensor_wire,
    whole_model,
)
from tools.letters import bytes_of, spelled

SIZES = {
    "toy": "8 8 64 64 256",
    "small": "6 8 256 128 256",
    "gpt2": "12 12 768 1024 50304",
    "gpt2-xl": "48 25 1600 1024 50304",
    "7.5b": "32 34 4352 2048 50304",
}
# Bekman, ML Engineering (github.com/stas00/ml-engineering): data sheets, but of --tflops what the best matrix
# product reaches, and 80% of the GB/s one way of NVLink and of a network card, as it says of all-reduces.
# Of --hbm-gbps what STREAM's triad reaches (github.com/Azure/AI-benchmarking-guide), but for the B200.
FIGURES = "peak_tflops tflops gpu_gb hbm_gbps gbps gbps_nodes".split()
GPUS = {
    "h100": "989 794.5 80 2970 360 40",
    "h200": "989 794.5 141 4150 360 40",
    "a100": "312 271.2 80 1700 240 20",
    "b200": "2250 1745 180 8000 720 40",
}
RECOMPUTE = ("none", "selective", "full")
STAGES_OF_A_RANK = {"1f1b": 1, "zb-v": 2}
peak = operator.itemgetter("peak")
HELD = "parameters", "gradients", "optimizer"
MOST = 20_000  # rows that are tried
ZERO = {"DP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3, "HSDP": 3, "DiLoCo": 0, "EP": 0, "ZeRO-3 + EP": 3}
ZERO["Muon"] = 1
LESSONS = "ddp zero1 zero2 zero3 hsdp diloco expert_parallel expert_zero muon".split()
LESSONS = dict(zip(ZERO, LESSONS))
BUCKETS = "ddp", "zero1", "muon"  # keep 16-bit gradients from step to step
TOUCHED = re.findall(r"^(\w+) +touched +(\S+)", TIME, re.M)
TOUCHED = {lesson: compile(spelled(formula), lesson, "eval") for lesson, formula in TOUCHED}
UNALIGNED = 10  # times as long take products of rows that are no multiple of 16 bytes (docs/results/plan.md)


class Rank:
    """What a rank holds (bytes), sends (bytes per step) and takes (ms per step)."""

    def __init__(self, job, params, microbatches):
        self.job = job
        self.params = params
        self.microbatches = microbatches
        self.activations = None
        self.forward = self.backward = 0  # ms of a microbatch that hide messages
        self.sent = 0
        self.ms = {"computation": 0, "links inside": 0, "links between": 0, "idle": 0}

    def send(self, sent, ranks, near, beside=0, ring=True):
        """Bytes to `ranks` ranks, so many of them in a node, beside so many ms of computation: the part of it
        that hides them hides nothing else."""
        where, speed = link(self.job, ranks, near, ring)
        left = self.microbatches * (self.forward + self.backward)
        hidden = min(beside, left, sent / speed)
        self.sent += sent
        self.ms[where] += sent / speed - hidden
        rest = 1 - hidden / (left or 1)
        self.forward *= rest
        self.backward *= rest

    def compute(self, flops, moved):
        return flops / self.job.tflops / 1e9 + moved / self.job.hbm_gbps / 1e6


def replica(job, tensor, pipeline, stage):
    """The Rank of a stage, without what divide() adds."""
    shape, batch, stages = job.shape, job.micro_batch, STAGES_OF_A_RANK[job.schedule]
    microbatches = round(job.accum * tensor * pipeline * job.cp)
    ends = stage == 0, stage == (pipeline - 1 if stages == 1 else 0)
    own = shape._replace(layers=(shape.layers + stage) // pipeline, seq=shape.seq // job.cp)
    params = parameters(own.layers, shape.hidden, shape.vocab, shape.seq, tensor, *ends)
    params = -(-params * job.params // whole_model(shape))  # --params may differ from the closed form
    rank = Rank(job, params, microbatches)
    split = tensor, job.sequence_parallel, WIDTHS[job.precision]
    flash = job.attention != "math"
    in_flight = min(microbatches, pipeline - stage * (stages == 1))  # arXiv 2104.04473, section 2.2
    chunk = 1024 if job.attention == "fused" else math.inf
    rank.activations = activations(own, batch, job.recompute, *split, flash, in_flight, ends, chunk, 12)
    tokens = batch * own.seq
    vocab = -(-shape.vocab // tensor)
    logits = ends[1] * tokens * vocab
    attention = rank.compute(4 * tokens * own.layers * shape.seq * shape.hidden / tensor, 0)
    layers = attention + rank.compute(2 * tokens * rank.params, passed(own, batch, *split, flash))
    again = {"none": 0, "selective": attention * (not flash), "full": layers}
    slower = (UNALIGNED - 1) * 2 * logits * shape.hidden * (vocab % 8 > 0)
    rank.forward = layers + rank.compute(slower, (16 - split[-1]) * logits)
    rank.backward = 2 * rank.forward + again[job.recompute]
    rank.ms["computation"] = microbatches * (rank.forward + rank.backward)
    travel(rank, own, split, pipeline, len({0, pipeline - 1} - {stage}) * stages, 3 * attention)
    if ends[0] != ends[1]:  # the first and the last stage add up the embedding's gradients
        rank.send(split[-1] * shape.hidden * vocab, pipeline, near(job, tensor * job.cp))
    return rank


def travel(rank, own, split, pipeline, boundaries, attention):
    """Add what microbatches send, over so many boundaries and beside so many ms of attention, and bubbles."""
    job = rank.job
    tensor, sequence_parallel, width = split
    sent = tensor_wire(own, job.micro_batch, job.recompute, *split, rank.microbatches)
    rank.send(sent, tensor, near(job))
    whole = own._replace(seq=job.shape.seq)
    sent = context_wire(whole, job.micro_batch, job.cp, width, rank.microbatches)
    rank.send(sent // tensor, job.cp, near(job, tensor), rank.microbatches * attention)
    message = width * job.micro_batch * own.seq * own.hidden // (tensor if sequence_parallel else 1)
    sent = rank.microbatches * boundaries * message
    rank.send(sent, pipeline, near(job, tensor * job.cp), rank.ms["computation"])
    share = idle(job.schedule, pipeline, rank.microbatches)
    rank.ms["idle"] = sum(rank.ms.values()) * share / (1 - share)


def near_data(job, tensor, pipeline):
    """How many ranks that share gradients share a node: those of a sequence (--cp), and their replicas."""
    return min(job.cp, near(job, tensor)) * near(job, tensor * job.cp * pipeline)


def divide(job, kind, rank, data, neighbours):
    """Add what a rank holds, sends and steps in a strategy of `data` ranks, so many of them in a node."""
    zero, lesson = ZERO[kind], LESSONS[kind]
    letters = letters_of_job(job, data, rank.params, rank.microbatches)
    if "EP" in kind:
        letters = letters_of_experts(job, data, rank.microbatches)
    sent = bytes_of(lesson, letters)
    held = {name: sent.pop(name) for name in HELD}
    if kind == "DiLoCo":
        rank.send(sent["all-reduce"] // job.inner_steps, data, neighbours)
    elif "EP" in kind:
        ranks = letters["e"]
        rank.send(sent.pop("all-to-all"), ranks, near(job), ring=False)
        without = bytes_of(lesson, letters | {"U": 0})
        others = sum(without[name] for name in sent)
        rank.send(others, data, near(job), zero and rank.ms["computation"])
        rank.send(sum(sent.values()) - others, data // ranks, near(job, ranks))
    else:
        group = job.shard if kind == "HSDP" else data
        across = sent.pop("all-reduce") if kind == "HSDP" else 0
        where, speed = link(job, group, neighbours)
        gathered = letters["w"] * rank.params * (group - 1) / group
        hidden = rank.forward * speed, rank.backward * speed
        late = exposed(zero, sum(sent.values()), gathered, rank.microbatches, *hidden)
        rank.sent += sum(sent.values())
        rank.ms[where] += late / speed
        rank.send(across, data // group, near(job, group), max(0, rank.backward - 2 * gathered / speed))
    newton_schulz = letters["H"] * 70 / 3 * job.shape.hidden / data if kind == "Muon" else 0
    # AdamW reads gradients, and reads and writes its states and fp32 weights.
    moved = held["optimizer"] * (2 + 3 * letters["m"] / letters["K"])
    if lesson not in TOUCHED:  # as single.py's, for the parameters that the rank updates
        letters["P"] = held["optimizer"] / letters["K"]
    moved += eval(TOUCHED.get(lesson, TOUCHED["single"]), {"max": max, "min": min}, letters)
    rank.ms["computation"] += rank.compute(newton_schulz, moved)
    rank.held = held | {"activations": rank.activations}
    # When the last backward begins, buckets are there, or what earlier ones left. No activation outlives it.
    begin = rank.activations
    if lesson in BUCKETS:
        begin += letters["w"] * rank.params
    elif rank.microbatches > 1:
        begin += held["gradients"]
    rank.held["peak"] = held["parameters"] + held["optimizer"] + max(begin, held["gradients"])


def row(job, kind, tensor=1, pipeline=1):
    """A strategy, as in --json: the most that a rank holds, that one sends, and that one takes."""
    shape, data = job.shape, job.gpus // (tensor * pipeline)
    active = letters_of_experts(job, 1, 1)["P"] if "EP" in kind else job.params
    size, sent, ms = {"peak": 0}, 0, {"sum": 0}
    # Of stages with as many layers an earlier one has more in flight, so these show the most.
    for stage in {0, 1, -shape.layers % pipeline, pipeline - 1} - {pipeline}:
        rank = replica(changed(job, params=active), tensor, pipeline, stage)
        divide(job, kind, rank, data, near_data(job, tensor, pipeline))
        rank.ms["sum"] = sum(rank.ms.values())
        size = max(size, rank.held, key=peak)
        ms = max(ms, rank.ms, key=operator.itemgetter("sum"))
        sent = max(sent, rank.sent)
    name = f"t{tensor} x p{pipeline} x d{data}" if tensor * pipeline > 1 else kind
    flops = 6 * active + 12 * shape.layers * shape.hidden * shape.seq  # of a token, of which a GPU has:
    flops *= shape.seq * job.micro_batch * job.accum
    return {
        "strategy": name,
        "zero": ZERO[kind],
        "tensor": tensor,
        "pipeline": pipeline,
        "data": data,
        "recompute": job.recompute,
        "idle": idle(job.schedule, pipeline, rank.microbatches),
        "bytes": size | {"sent_per_step": sent},
        "fits": size["peak"] <= job.gpu_gb * 1e9,
        "ms": ms,
        "mfu": flops / ms["sum"] / job.peak_tflops / 1e9,
        "bound_by": max(ms.keys() - {"sum"}, key=ms.get),
    }


def strategies(job):
    """Yield (strategy, t, p): each rank a replica, or t x p ranks, t within a node and p <= L."""
    asked = {"HSDP": job.shard, "DiLoCo": job.inner_steps > 1, "Muon": job.optimizer == "muon"}
    asked |= dict.fromkeys(("EP", "ZeRO-3 + EP"), job.experts > 1)
    for kind in ZERO:
        if asked.get(kind, True):
            yield kind, 1, 1
    tokens = job.shape.seq if job.sequence_parallel else 0
    ranks = job.gpus // job.cp
    deepest = job.shape.layers // STAGES_OF_A_RANK[job.schedule]
    for t in divisors(math.gcd(ranks, min(job.gpus, job.gpus_per_node), job.shape.heads, tokens)):
        for p in divisors(ranks // t):
            if t * p > 1 and p <= deepest:
                yield "ZeRO-1", t, p


def table(job):
    for policy in RECOMPUTE if job.recompute == "all" else [job.recompute]:
        for kind, t, p in strategies(job):
            if job.accum * t * p * job.cp % 1 == 0:  # whole microbatches
                yield row(changed(job, recompute=policy), kind, t, p)


@functools.cache
def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


def changed(job, **values):
    return argparse.Namespace(**vars(job) | values)


def fastest(row):
    """Of rows as fast what sends least comes first, then what holds least."""
    size = row["bytes"]
    return float(f"{row['ms']['sum']:.6g}"), size["sent_per_step"], size["peak"]


def tried(asked):
    """Yield (job, row): as asked, then with fewer sequences at a time, split over ranks, and recomputed."""
    parts = divisors(asked.micro_batch)
    contexts = divisors(math.gcd(asked.gpus, asked.shape.seq))
    jobs = [asked]
    for times, split, cp in itertools.product(parts, (asked.sequence_parallel, True), contexts):
        size = {"micro_batch": asked.micro_batch // times, "accum": asked.accum * times}
        jobs.append(changed(asked, recompute="all", sequence_parallel=split, cp=cp, **size))
    for job in jobs:
        for row in table(job):
            yield job, row


def named(asked, job, row):
    """A strategy, the flags that differ from those asked for, and its figures."""
    text = row["strategy"]
    for name, value in (vars(job) | {"recompute": row["recompute"]}).items():
        if value != getattr(asked, name):
            text += f" --{name.replace('_', '-')} {value}".removesuffix(" True")
    return f"{text}: {giga(peak(row['bytes']))} GB, {giga(row['ms']['sum'] * 1e9)} ms"


def advise(job):
    """(the row to take or None, why): the fastest that fits of all that are tried, as asked or not."""
    found = list(itertools.islice(tried(job), MOST))
    fit = sorted((pair for pair in found if pair[1]["fits"]), key=lambda pair: fastest(pair[1]))
    if not fit:
        least = min(found, key=lambda pair: peak(pair[1]["bytes"]))
        return None, f"Nothing fits of {len(found)} tried: least is {named(job, *least)}."
    first = next((pair for pair in fit if pair[0] is job), None)
    why = f"Take {named(job, *fit[0])}, the fastest of {len(fit)} rows that were tried and fit"
    if first == fit[0]:
        why += ", as asked."
    elif first:
        why += f". It is not as asked: as asked {named(job, *first)} is the fastest."
    else:
        why += ". It is not as asked: as asked nothing fits."
    return fit[0][1], why


def giga(size):
    return f"{size / 1e9:.0f}" if size >= 999.5e9 else f"{size / 1e9:#.3g}".rstrip(".")


TITLES = "parameters gradients optimizer activations peak sent/step fits idle ms/step MFU bound_by"
NOTE = "GB: 10^9 bytes. t x p x d: tensor x pipeline x data (ZeRO-1), the 4 fastest that fit. *: not as asked"


def cells(row):
    """What the table shows of a row."""
    name = row["strategy"] + f", {row['recompute']}" * (row["recompute"] != "none")
    line = [name, *map(giga, row["bytes"].values()), "yes" if row["fits"] else "no", f"{row['idle']:.0%}"]
    return [*line, giga(row["ms"]["sum"] * 1e9), f"{row['mfu']:.0%}", row["bound_by"]]


def show(job, rows, advice):
    gpus = f"{job.gpus} GPU{'s'[: job.gpus - 1]} of {giga(job.gpu_gb * 1e9)} GB, {job.tflops:g} TFLOP/s"
    batch = f"batch {job.micro_batch * job.accum * job.gpus:.0f} | checkpoint {giga(12 * job.params)} GB"
    links = f"{job.gbps:g} and {job.gbps_nodes:g} GB/s"
    print(f"plan | {giga(job.params)} G parameters, {job.precision} | {gpus}, {links} | {batch}")
    meshes = [row for row in rows if row["tensor"] * row["pipeline"] > 1]
    fit = sorted((row for row in meshes if row["fits"]), key=fastest)
    shown = [row for row in rows if row not in meshes or row in fit[:4]]
    titles = TITLES.split()
    for name, *line in ("GB", *titles), *map(cells, shown):
        print(f"{name:<22}" + "".join(f"  {x:>{max(7, len(title))}}" for title, x in zip(titles, line)))
    flops = job.tflops * 1e12
    tokens = job.micro_batch * min(job.accum, 1) * job.gpus * job.shape.seq
    ranks = most_ranks(tokens, flops, link(job, job.gpus, near(job))[1] * 1e3)
    tensor = most_ranks(4 * job.shape.hidden, flops, job.gbps * 1e9)
    bounds = f"Compute-bound up to N = {ranks} in DP and FSDP, {tokens:.0f} tokens at once, t = {tensor}"
    offload = bytes_of("offload", letters_of_job(job, job.gpus, job.params, 1))
    device, host = map(giga, (offload["parameters"] + offload["gradients"], offload["host"]))
    print(f"{bounds}. offload.py --params: {device} GB and activations, {host} GB on the host.")
    print(f"{NOTE}\n{advice}")


def number(text):
    """7.5b, 125m, 1e9 or 7500000000 as an int."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)([kmbt]?)", text.lower())
    return round(min(1e18, float(match[1]) * 1000 ** " kmbt".index(match[2] or " ")))


def refuse(problem):
    """End with exit code 2 and a line that says what to change."""
    print(f"plan.py: {problem}", file=sys.stderr)
    sys.exit(2)


KINDS = {"number": number, "float": float, "str": str}
FLAGS = """
params           number  parameters: 7.5b, 125m, 1e9 (none: as many as the shape has)
size             |toy|small|gpt2|gpt2-xl|7.5b  layers, heads, hidden, seq and vocab of a lesson's model
gpus             8       of all nodes
gpus-per-node    8       tensor parallelism stays within a node
gpu              h100|h200|a100|b200  has the figures of the next six flags, where they are not given
peak-tflops      float   of the data sheet, for the MFU
tflops           float   TFLOP/s that matrix products reach
gpu-gb           float   10^9 bytes that are free on it, less than it has
hbm-gbps         float   GB/s that passes over its memory reach
gbps             float   GB/s that it sends inside a node
gbps-nodes       float   GB/s that it sends between nodes
shard            int     GPUs that share a copy of the model, for a row of HSDP (hsdp.py)
micro-batch      1       sequences that go through the model at once
accum            float   microbatches that each rank accumulates per step
precision        mixed|fp32  mixed: 16 bits, with an fp32 optimizer
attention        flash|math|fused  math stores scores, and dropout's masks; fused few logits (fusion.py)
optimizer        adamw|muon  muon: of the matrices, for a row of Muon (muon.py)
schedule         1f1b|zb-v  of pipelines (pipeline_v.py)
inner-steps      1       from an exchange to the next, for a row of DiLoCo (diloco.py)
recompute        none|selective|full|all  activations, in backward
cp               1       ranks that share each sequence (context_parallel.py)
experts          1       in every other layer, for rows of EP (expert_parallel.py, expert_zero.py)
top-k            2       experts of a token
mixtures         int     layers with experts (none: every other one)
expert-params    number  parameters of an expert (none: as many as an MLP of the shape has)
json             str     file for it, in bytes ('-': stdout, without the table)
layers           int     of the shape, in place of the size's
heads            int     of the shape, in place of the size's
hidden           int     of the shape, in place of the size's
seq              int     of the shape, in place of the size's
vocab            int     of the shape, in place of the size's
"""
OF_EXPERTS = "top_k mixtures expert_params".split()


def parse(arguments=None):
    """The job that the flags describe, from the command line if no arguments are given."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = refuse
    for line in FLAGS.strip().splitlines():
        name, kind, text = line.split(maxsplit=2)
        how = {"type": KINDS.get(kind, int), "default": int(kind) if kind.isdigit() else None}
        if "|" in kind:
            how = {"choices": kind.split("|"), "default": kind.partition("|")[0]}
        parser.add_argument(f"--{name}", help=text, **how)
    parser.add_argument("--sequence-parallel", action="store_true", help="beside tensor parallelism")
    asked = parser.parse_args(arguments)
    parser.set_defaults(**dict(zip(Shape._fields, SIZES.get(asked.size, "").split())))
    parser.set_defaults(accum=1, **dict(zip(FIGURES, GPUS[asked.gpu].split())))
    job = parser.parse_args(arguments)
    given = [name for name, value in vars(job).items() if value != parser.get_default(name)]
    job.shape = Shape(*(vars(job).pop(name) for name in Shape._fields))
    for problem in find_problems(job, given):
        refuse(problem)
    job.params = job.params or whole_model(job.shape)
    job.mixtures = job.mixtures or (job.shape.layers + 1) // 2
    return job


def find_problems(job, given):
    """Yield what is wrong with the flags, each in one line. given: those that are not the default."""
    shape = job.shape
    for name, value in (vars(job) | shape._asdict()).items():
        flag = f"--{name.replace('_', '-')} {value}"
        power = 6 if name in ("gpus", "micro_batch") else 15  # each divisor of these two is tried
        if type(value) is int and not 1 <= value <= 10**power:
            yield f"{flag}: must be 1 or more, and at most 10^{power}"
        if type(value) is float and not 1e-9 <= value <= 1e15:
            yield f"{flag}: must be from 1e-9 to 1e15"
        if name in given and name in OF_EXPERTS and job.experts == 1:
            yield f"{flag}: needs --experts"
    missing = " ".join(f"--{name}" for name, value in shape._asdict().items() if value is None)
    if missing:
        yield f"{missing}: missing; or take a --size"
        return
    whole = whole_model(shape)
    params = job.params or whole
    layer = parameters(1, shape.hidden, 0, 0, 1, False, False) * params // whole
    if not whole <= 2 * params <= 4 * whole:
        yield f"--params {params}: must be from half to twice the {whole} that the shape has"
    if (job.expert_params or 0) > layer:
        yield f"--expert-params {job.expert_params}: must be at most a layer's {layer}"
    if job.gpus % min(job.gpus, job.gpus_per_node):
        yield f"--gpus-per-node {job.gpus_per_node}: must divide --gpus {job.gpus}"
    if job.gpus % (job.shard or 1):
        yield f"--shard {job.shard}: must divide --gpus {job.gpus}"
    if 1 < job.experts < job.top_k:
        yield f"--top-k {job.top_k}: must be at most --experts {job.experts}"
    if (job.mixtures or 0) > shape.layers:
        yield f"--mixtures {job.mixtures}: must be at most --layers {shape.layers}"
    if job.gpus % job.cp or shape.seq % job.cp:
        yield f"--cp {job.cp}: must divide --gpus {job.gpus} and --seq {shape.seq}"
    if shape.hidden % shape.heads:
        yield f"--hidden {shape.hidden}: must be a multiple of --heads {shape.heads}"
    if job.peak_tflops < job.tflops:
        yield f"--peak-tflops {job.peak_tflops}: must be at least --tflops {job.tflops}"


def write(name, text):
    """Write a file whole or not at all; what is no file, such as a pipe, is written to."""
    path = beside = Path(name)
    try:
        if path.is_file() or not path.exists():
            path = path.resolve()
            beside = Path(f"{path}.new")
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        if beside != path and beside.exists():
            beside.unlink()
        refuse(f"--json {name}: {error.strerror}")


def plan(job):
    """Print the plan of what parse() returns, and write it if asked. Returns what --json writes."""
    rows = list(table(job))
    if not rows:
        refuse(f"--accum {job.accum}: no strategy has whole microbatches")
    best, why = advise(job)
    if best and best not in rows:
        best["strategy"] += "*"
        rows.append(best)
    result = vars(job) | {"json": None, "shape": job.shape._asdict(), "take": best, "why": why, "rows": rows}
    if job.json == "-":
        print(json.dumps(result))
        return result
    if job.json is not None:
        write(job.json, json.dumps(result))
    show(job, rows, why)
    return result


if __name__ == "__main__":
    try:
        found = plan(parse())
        sys.stdout.flush()
    except OSError as error:  # nobody reads on, or the disk is full
        print(f"plan.py: {error.strerror}", file=sys.stderr)
        os._exit(1)
    sys.exit(not found["take"])
