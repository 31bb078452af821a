"""What fits on N GPUs of G GB? The bytes that a rank holds and sends with each strategy, from formulas alone.

Idea
    Parameters, gradients, optimizer states and activations take as many bytes as the lessons' docstrings say
    (tools/formulas.py reads them). What a row shows of a t x p x d mesh (t tensor-parallel ranks, p pipeline
    stages, d replicas) is parallel_3d.py's; of other rows, the lesson of that name.
    The letters in the docstrings follow from the shape: L layers of width h, v tokens in the vocabulary and s
    in a sequence make P = L(12h^2 + 13h) + hv + sh + 2h parameters. The head is the embedding.

Memory
    Each column shows the most that a rank holds at any moment, peak the most at one moment. That is either
    when the last backward begins, with all activations and those gradients that are there already, or when it
    ends, with all gradients and no activation.
    Activations are those of checkpointing.py, tensor_parallel.py and sequence_parallel.py, and 8 bytes more
    for each logit while the loss's backward runs. With --attention fused they have fusion.py's loss, with
    1/8 of the logits at a time. With --attention math, scores are stored and dropout keeps masks: a layer
    takes what arXiv 2205.05198 says. In a mesh --recompute selective drops these scores, and nothing else.
    Layer j is on stage jp/L of p, rounded down. In 1F1B stage i has min(m, p-i) of m microbatches in flight.

Communication
    sent/step is what a rank sends to other GPUs in a step. --recompute full runs a layer's forward again, and
    with it half of its tensor-parallel sums. Ranks that share a sequence (--cp) send keys and values in a
    ring (context_parallel.py). Idle is a pipeline's bubble, (p-1)/(m+p-1) of the step.
    All rows have the same batch: --accum counts the microbatches of a GPU that is a replica of its own, so a
    replica of t x p x C GPUs (--cp C) takes tpC times as many. --accum may be 0.5, too.

Advice
    The simplest that fits: rows from top to bottom, as asked; then the same batch in smaller microbatches;
    then with more recomputation; at last offload.py, whose optimizer is on the host. Which row is the fastest
    depends on the links, and nothing here says so. If another row that fits sends less, the advice names it.

Run
    python tools/plan.py --size 7.5b --gpus 64 --gpu-gb 32
    python tools/plan.py --size gpt2-xl --gpus 4 --gpu-gb 24 --micro-batch 8

Left out
    What CUDA, NCCL and a fragmented allocator take: a few GB. Grouped queries; experts' activations; ZeRO
    in meshes; schedules other than 1F1B. --experts replace MLPs of the model that the shape describes.
    --params corrects the count of a shape whose layers are a little different.
"""

import argparse
import functools
import itertools
import json
import math
import operator
import re
import sys

import formulas
from formulas import Shape, bytes_of, letters_of_job, parameters, whole_model

SIZES = {
    "toy": "8 8 64 64 256",
    "small": "6 8 256 128 256",
    "gpt2": "12 12 768 1024 50304",
    "gpt2-xl": "48 25 1600 1024 50304",
    "7.5b": "32 34 4352 2048 50304",
}
GPUS = {"h100": 80, "h200": 141, "a100": 80, "b200": 180}  # GB
LESSONS = {"DP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "HSDP": "hsdp", "ZeRO-3": "zero3"}
LESSONS |= {"mesh": "parallel_3d", "Offload": "offload", "DiLoCo": "diloco", "Muon": "muon"}
LESSONS |= {"EP": "expert_parallel", "ZeRO-3 + EP": "expert_zero"}
KEEP_GRADIENTS = "ddp", "zero1", "muon", "parallel_3d"  # in 16 bits, from step to step
HELD = "parameters", "gradients", "optimizer"
NOT_SENT = {*HELD, "activations", "host", "down", "up"}  # to other GPUs
RECOMPUTE = "none", "selective", "full"
peak, sent = operator.itemgetter("peak"), operator.itemgetter("sent")


def changed(job, **values):
    return argparse.Namespace(**vars(job) | values)


@functools.cache
def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


def sent_of(found):
    return sum(size for name, size in found.items() if name not in NOT_SENT)


def stage_of(job, kind, tensor, pipeline, stage):
    """{kind of bytes: how many} of a rank of this stage; without tensor and pipeline parallelism, of any."""
    microbatches = round(job.accum * tensor * pipeline * job.cp)
    layers, data = formulas.blocks_of(stage, pipeline, job.shape.layers), job.gpus // (tensor * pipeline)
    ends = stage == 0, stage == pipeline - 1
    params = parameters(layers, job.shape.hidden, job.shape.vocab, job.shape.seq, tensor, *ends)
    params = -(-params * job.params // whole_model(job.shape))  # --params may differ from the closed form
    letters = letters_of_job(job, data, params, microbatches)
    letters |= {"L": layers, "s": job.shape.seq // job.cp}
    kept = formulas.activations(job, letters, tensor, min(microbatches, pipeline - stage), *ends)
    ring = bytes_of("context_parallel", letters | {"N": job.cp, "s": job.shape.seq})["send"] // tensor
    if kind == "mesh":
        letters |= {"R": params, "t": tensor, "p": pipeline, "d": data}
    if "EP" in kind:
        letters = formulas.letters_of_experts(job, data, microbatches) | {"s": letters["s"]}
    lesson = LESSONS[kind]
    found = {"optimizer": 0, "host": 0} | bytes_of(lesson, letters, pp=pipeline)
    if tensor > 1 and job.sequence_parallel:
        replicated = (6 * layers + 2) * job.shape.hidden
        found["tensor"] = sent_of(bytes_of("sequence_parallel", letters | {"N": tensor, "r": replicated}))
    if tensor > 1 and job.recompute == "full":  # forward runs again, but for embedding and head
        alone = bytes_of("parallel_3d", letters | {"L": 0})["tensor"]
        found["tensor"] += (bytes_of("parallel_3d", letters)["tensor"] - alone) // 2
    size = {name: found[name] for name in HELD} | {"activations": kept}
    begin = letters["w"] * params if lesson in KEEP_GRADIENTS else size["gradients"] * (microbatches > 1)
    most = max(kept + begin, size["gradients"])
    size |= {"peak": size["parameters"] + size["optimizer"] + most, "host": found["host"]}
    return size | {"sent": sent_of(found) // job.inner_steps + ring}


def row(job, kind, tensor=1, pipeline=1):
    """A strategy, as in --json: the bytes of the rank that holds most, and of the one that sends most."""
    microbatches = round(job.accum * tensor * pipeline * job.cp)
    # No stage has more layers than the first, or more in flight. The last has the head.
    stages = [stage_of(job, kind, tensor, pipeline, stage) for stage in sorted({0, pipeline - 1})]
    size = max(stages, key=peak) | {"sent": max(map(sent, stages))}
    name = kind if kind != "mesh" else f"t{tensor} x p{pipeline} x d{job.gpus // (tensor * pipeline)}"
    idle = (pipeline - 1) / (microbatches + pipeline - 1)
    return {"strategy": name, "fits": size["peak"] <= job.gpu_gb * 1e9, "idle": idle, "bytes": size}


def kinds_of(job):
    """The strategies that train what is asked for, and no others, from the simplest on."""
    if job.experts > 1:
        return ["EP", "ZeRO-3 + EP"]
    if job.optimizer == "muon":
        return ["Muon"]
    if job.inner_steps > 1:
        return ["DiLoCo"]
    return ["DP", "ZeRO-1", "ZeRO-2", *["HSDP"] * bool(job.shard), "ZeRO-3", "mesh", "Offload"]


def meshes(job):
    """(t, p) of t tensor-parallel ranks in a node and p stages of at least a layer."""
    ranks, tokens = job.gpus // job.cp, job.shape.seq // job.cp * job.sequence_parallel
    for t in divisors(math.gcd(ranks, min(job.gpus, job.gpus_per_node), job.shape.heads, tokens)):
        for p in divisors(ranks // t):
            if t * p > 1 and p <= job.shape.layers and job.accum * t * p * job.cp % 1 == 0:
                yield t, p


def table(job):
    """Rows, the simplest first: of meshes that with the smallest bubble, then that which sends least."""
    rows = []
    for kind in kinds_of(job):
        if kind == "mesh":
            found = [row(job, kind, t, p) for t, p in meshes(job)]
            rows += sorted(found, key=lambda row: (row["idle"], row["bytes"]["sent"]))
        elif job.accum * job.cp % 1 == 0:  # whole microbatches
            rows.append(row(job, kind))
    return rows


def tried(asked):
    """Yield (job, row), the simplest first: as asked, in smaller microbatches, recomputed, offloaded."""
    policies = RECOMPUTE[RECOMPUTE.index(asked.recompute) :]
    splits = dict.fromkeys((asked.sequence_parallel, True))
    jobs = []
    for policy, times, split in itertools.product(policies, divisors(asked.micro_batch), splits):
        size = {"micro_batch": asked.micro_batch // times, "accum": asked.accum * times}
        jobs.append(changed(asked, recompute=policy, sequence_parallel=split, **size))
    offloaded = []
    for job in jobs:
        for row in table(job):
            if row["strategy"] == "Offload":
                offloaded.append((job, row))
            else:
                yield job, row
    yield from offloaded


def named(asked, job, row):
    """A strategy, the flags that differ from those asked for, and its peak."""
    text = row["strategy"]
    for name, value in vars(job).items():
        if value != getattr(asked, name):
            value = f"{value:g}" if type(value) is float else value
            text += f" --{name.replace('_', '-')} {value}".removesuffix(" True")
    return f"{text}: {giga(row['bytes']['peak'])} GB"


def advise(asked):
    """(the row to take, or None; why): the first that fits of all that are tried."""
    least = None
    for job, row in tried(asked):
        if row["fits"]:
            break
        least = min(least or (job, row), (job, row), key=lambda pair: peak(pair[1]["bytes"]))
    else:
        return None, f"Nothing fits. The least of what was tried is {named(asked, *least)}."
    size, why = row["bytes"], f"Take {named(asked, job, row)}"
    if size["host"]:
        why += f", and {giga(size['host'])} GB on the host for each GPU"
    fit = next((other["strategy"] for other in table(asked) if other["fits"]), "nothing")
    as_asked = vars(job) == vars(asked)
    why += ". It is the simplest that fits." if as_asked else f". It is not as asked: as asked {fit} fits."
    other = min((other for other in table(job) if other["fits"]), key=lambda row: sent(row["bytes"]))
    if sent(other["bytes"]) < size["sent"]:
        less = f"{giga(sent(other['bytes']))} GB in place of {giga(size['sent'])}"
        why += f" {other['strategy']} sends least, {less}, and is idle for {other['idle']:.0%} of a step."
    return row, why


def giga(size):
    return f"{size / 1e9:.0f}" if size >= 999.5e9 else f"{size / 1e9:#.3g}".rstrip(".")


NOTE = "GB: 10^9 bytes. t x p x d: tensor x pipeline x data, the first 4 that fit. *: not as asked"
TITLES = "parameters", "gradients", "optimizer", "activations", "peak", "host", "sent/step", "idle", "fits"


def cells(row):
    """What the table shows of a row, below TITLES."""
    sizes = [giga(row["bytes"][name]) for name in (*HELD, "activations", "peak", "host", "sent")]
    return [*sizes, f"{row['idle']:.0%}", "yes" if row["fits"] else "no"]


def show(job, rows, why):
    every, active = formulas.counted(job)
    model = f"{giga(every)} G parameters" + f", {giga(active)} G for a token" * (every > active)
    gpus = f"{job.gpus} GPU{'s'[: job.gpus - 1]} of {giga(job.gpu_gb * 1e9)} GB"
    batch = f"batch {job.micro_batch * job.accum * job.gpus:.0f}"
    print(f"plan | {model}, {job.precision} | {gpus} | {batch} | checkpoint {giga(12 * every)} GB")
    meshes = [row for row in rows if " x d" in row["strategy"]]
    fit = [row for row in meshes if row["fits"]]
    lines = [(row["strategy"], *cells(row)) for row in rows if row not in meshes or row in fit[:4]]
    for name, *line in ("GB", *TITLES), *lines:
        print(f"{name:<17}" + "".join(f"  {x:>{max(6, len(title))}}" for title, x in zip(TITLES, line)))
    print(NOTE)
    print(why)


def number(text):
    """7.5b, 125m, 1e9 or 7500000000 as an int."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)([kmbt]?)", text.lower())
    return round(min(1e18, float(match[1]) * 1000 ** " kmbt".index(match[2] or " ")))


KINDS = {"number": number, "float": float}
FLAGS = """
params           number  parameters: 7.5b, 125m, 1e9 (none: as many as the shape has)
size             |toy|small|gpt2|gpt2-xl|7.5b  layers, heads, hidden, seq and vocab of a lesson's model
gpus             8       of all nodes
gpus-per-node    8       tensor parallelism stays within a node
gpu              h100|h200|a100|b200  has the memory of the next flag, if that is not given
gpu-gb           float   10^9 bytes that are free on it, less than it has
shard            int     GPUs that share a copy of the model, for a row of HSDP (hsdp.py)
micro-batch      1       sequences that go through the model at once
accum            float   microbatches that each rank accumulates per step
precision        mixed|fp32  mixed: 16 bits, with an fp32 optimizer
attention        flash|math|fused  math stores scores, and dropout's masks; fused few logits (fusion.py)
optimizer        adamw|muon  muon, of the matrices, has one row (muon.py)
inner-steps      1       from an exchange to the next: more than 1 has one row (diloco.py)
recompute        none|selective|full  activations, in backward (checkpointing.py)
cp               1       ranks that share each sequence (context_parallel.py)
experts          1       more than 1 has two rows (expert_parallel.py, expert_zero.py)
top-k            2       experts of a token
mixtures         int     layers with experts (none: all)
expert-params    number  parameters of an expert (none: as many as an MLP of the shape has)
"""
OF_EXPERTS = "top_k", "mixtures", "expert_params"
MOST = {"gpus": 10**6, "gpus_per_node": 1024, "micro_batch": 1024}  # each of their divisors is tried


def parse(arguments=None):
    """The job that the flags describe, from the command line if no arguments are given."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__.splitlines()[0])
    for line in FLAGS.strip().splitlines():
        name, kind, text = line.split(maxsplit=2)
        how = {"type": KINDS.get(kind, int), "default": int(kind) if kind.isdigit() else None}
        if "|" in kind:
            how = {"choices": kind.split("|"), "default": kind.partition("|")[0]}
        parser.add_argument(f"--{name}", help=text, **how)
    for name in Shape._fields:
        parser.add_argument(f"--{name}", type=int, help="of the shape, in place of the size's")
    parser.add_argument("--sequence-parallel", action="store_true", help="beside tensor parallelism")
    parser.add_argument("--json", action="store_true", help="print the rows in bytes, in place of the table")
    asked = parser.parse_args(arguments)
    parser.set_defaults(**dict(zip(Shape._fields, SIZES.get(asked.size, "").split())))
    parser.set_defaults(accum=1.0, gpu_gb=float(GPUS[asked.gpu]))
    job = parser.parse_args(arguments)
    given = [name for name, value in vars(job).items() if value != parser.get_default(name)]
    job.shape = Shape(*(vars(job).pop(name) for name in Shape._fields))
    for problem in find_problems(job, given):
        parser.error(problem)
    job.params = job.params or whole_model(job.shape)
    job.mixtures = job.mixtures or job.shape.layers
    return job


def find_problems(job, given):
    """Yield what is wrong with the flags, each in one line. given: those that are not the default."""
    shape = job.shape
    for name, value in (vars(job) | shape._asdict()).items():
        flag, most = f"--{name.replace('_', '-')} {value}", MOST.get(name, 10**15)
        if type(value) is int and not 1 <= value <= most:
            yield f"{flag}: must be from 1 to {most}"
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
    if (job.experts > 1) + (job.optimizer == "muon") + (job.inner_steps > 1) > 1:
        yield "--experts, --optimizer muon, --inner-steps: no lesson has two of them"
    if job.accum * job.cp % 1 and ("mesh" not in kinds_of(job) or not list(meshes(job))):
        yield f"--accum {job.accum}: no strategy has whole microbatches"


def plan(job):
    """Print the plan of what parse() returns. Returns the row to take, or None."""
    rows = table(job)
    take, why = advise(job)
    if take and take not in rows:
        rows.append(take | {"strategy": take["strategy"] + "*"})
    if job.json:
        print(json.dumps(vars(job) | {"shape": job.shape._asdict(), "take": take, "why": why, "rows": rows}))
    else:
        show(job, rows, why)
    return take


if __name__ == "__main__":
    sys.exit(plan(parse()) is None)
