"""Will it fit, and what will it send? The bytes of each strategy on each GPU, from formulas alone.

Idea
    Parameters, gradients and optimizer states take a known number of bytes, which the ZeRO stages divide by
    N ranks (arXiv 1910.02054, sections 3 and 5). Activations follow from the shape (arXiv 2205.05198).

Memory
    P = L(12h^2 + 13h) + hv + sh + 2h parameters: L layers of width h, v tokens in the vocabulary, s in a
    sequence; the head is the embedding.
    bytes         mixed   fp32    ZeRO-1   ZeRO-2   ZeRO-3
    parameters    2P      4P                        / N
    gradients     2P      4P               / N      / N
    optimizer     12P     8P      / N      / N      / N       two moments; in mixed also fp32 weights
    With --shard F each F ranks share a copy, by ZeRO-3: / F (hsdp.py).
    With --inner-steps, DiLoCo's ranks hold 26P, in fp32 24P: outer weights and momentum, gradients in fp32.
    With --optimizer muon (muon.py: DP, ZeRO-1) 4 less for each of 12Lh^2 parameters in matrices: one moment.
    Activations of a layer in 16 bits (table 2) on each of t tensor-parallel ranks, for b sequences, a heads,
    with dropout's masks; with flash attention none keeps what selective does:
    none          sbh(10 + 24/t + 5as/(ht))     with --sequence-parallel   sbh(34 + 5as/h)/t
    selective     sbh(10 + 24/t)                                           34sbh/t
    full          2sbh                                                     2sbh/t (as blocks enter split)
    and sbh of the embedding, and the larger of 4sbh + 4sbv/t in the head (with --attention fused, at most
    1024 tokens in place of sb in the second term: fusion.py) and what a layer computes again.
    Stage i of p has (L + i)/p layers, rounded down; in 1F1B min(m, p-i) of m microbatches are in flight, in
    --schedule zb-v (2401.10241, 6) up to p on each rank; its first rank has both ends. Idle, if F = B = W:
    1f1b          (p-1)/(m + p-1)
    zb-v          0 for 2p microbatches and more, else n/(6m + n) with n = 2p-1-m

Communication
    A rank's bytes per step on a ring, with w = 2 or 4 bytes a number and k microbatches (--accum):
    DP, ZeRO-1    2wP(N-1)/N       an all-reduce, or its halves (arXiv 1910.02054, section 7)
    ZeRO-2        (1+k)wP(N-1)/N   a reduce-scatter for each microbatch, an all-gather
    ZeRO-3        3kwP(N-1)/N      two all-gathers and a reduce-scatter for each (FSDP, arXiv 2304.11277)
    DiLoCo        8P(N-1)/(NH)     in the mean: fp32 weights, once in --inner-steps H (2311.08105)
    HSDP          3kwP(F-1)/F      those within --shard F ranks (2304.11277, 3.2.2), and once in a step
                  + 2w(P/F)(N-F)/N an all-reduce of shards, across hosts if F are the GPUs of one
    tensor        8wbsh(t-1)/t     a layer and microbatch; 4 more with full, which runs forward again, 2 more
                                   with --sequence-parallel, which in backward gathers again what it split
    pipeline      wbsh             forward, and backward, over each boundary for each microbatch; zb-v twice
    context       2wbsh(3C-2)/C    a layer and microbatch of ring attention on --cp C ranks
    experts       4wkbsh(N-1)/N    a layer with --experts on N ranks, --top-k k, and microbatch, in the mean
    offload       2wP/N            between a GPU and its host; with --params wP/N down, (2P - two units)w/N up
    All strategies take the same batch in a step: a replica of t x p x C ranks has tpCk microbatches.

Run
    python plan.py --params 7.5b --gpus 64 --gpu-gb 32
    python plan.py --size gpt2-xl --gpus 4 --gpu-gb 24 --micro-batch 8 --recompute all

Left out
    What is whole for a moment, two units and the embedding (at --size 7.5b 1.4 GB in zero2.py). What CUDA and
    NCCL take. What tensor parallelism sends for embedding, head and loss. Time. ZeRO-2 and 3 with tensor and
    pipeline parallelism, other schedules (zero_bubble.py), experts and offload in the table.
"""

import argparse
import json
import math
import sys
from collections import namedtuple

SIZES = {"toy": (8, 8, 64, 64, 256), "small": (6, 8, 256, 128, 256), "gpt2": (12, 12, 768, 1024, 50257)}
SIZES |= {"gpt2-xl": (48, 25, 1600, 1024, 50257), "7.5b": (32, 34, 4352, 2048, 50257)}
Shape = namedtuple("Shape", ("layers", "heads", "hidden", "seq", "vocab"))
BYTES = {"mixed": (2, 2, 12), "fp32": (4, 4, 8)}  # of a parameter, of its gradient, in the optimizer
RECOMPUTE = ("none", "selective", "full")
NEED_NO_SHAPE = {"recompute": "none", "attention": "flash", "sequence_parallel": False, "cp": 1, "experts": 1}
NEED_NO_SHAPE |= {"optimizer": "adamw", "schedule": "1f1b"}
STAGES_OF_A_RANK = {"1f1b": 1, "zb-v": 2}
STAGES = ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def parameters(layers, hidden, vocab, seq, tensor=1, first=True, last=True):
    """Parameters of a GPT whose head is its embedding, on one of `tensor` ranks, which must divide hidden.

    Norms, row-parallel biases and positions are whole (arXiv 1909.08053). first, last: of the model.
    """
    layer = (12 * hidden**2 + 7 * hidden) // tensor + 6 * hidden
    embedding = hidden * -(-vocab // tensor) * (first or last)
    return layers * layer + embedding + first * seq * hidden + last * 2 * hidden


def states(stage, params, ranks, precision="mixed", matrices=0):
    """{name: bytes} of parameters, gradients and optimizer on a rank in ZeRO's stage 1 to 3 (0: DP).

    matrices: how many of the parameters are Muon's (2502.16982), which has one moment of each.
    """
    sharded = ("optimizer", "gradients", "parameters")[:stage]
    sizes = zip(("parameters", "gradients", "optimizer"), BYTES[precision])
    held = {name: size * (-(-params // ranks) if name in sharded else params) for name, size in sizes}
    held["optimizer"] -= 4 * (matrices // ranks if stage else matrices)
    return held


def layer_activations(
    shape, batch, recompute="none", tensor=1, sequence_parallel=False, width=2, flash=False
):
    """Bytes that a layer keeps for backward on a rank (arXiv 2205.05198, table 2), `width` bytes a number.

    `tensor` must divide the heads, with sequence_parallel also the sequence. flash: scores are never stored.
    """
    numbers = batch * shape.seq * shape.hidden
    if recompute == "full":
        return width * numbers // (tensor if sequence_parallel else 1)
    # 16 tensors and 2 masks; whole are the masks and the inputs of norms and of column-parallel matrices.
    whole = (4 * width + 2) * numbers // (tensor if sequence_parallel else 1)
    stored = recompute == "none" and not flash
    scores = (2 * width + 1) * batch * shape.heads * shape.seq**2 * stored
    return whole + (12 * width * numbers + scores) // tensor


def activations(
    shape,
    batch,
    recompute="none",
    tensor=1,
    sequence_parallel=False,
    width=2,
    flash=False,
    in_flight=1,
    ends=(True, True),
    chunk=math.inf,
):
    """Bytes of activations at their peak on a rank whose stage has shape.layers layers (section 4.3).

    in_flight: microbatches after their forward. ends: is the embedding, is the head, with logits of a chunk.
    """
    how = tensor, sequence_parallel, width, flash
    kept, whole = (layer_activations(shape, batch, policy, *how) for policy in (recompute, "none"))
    numbers = batch * shape.seq * shape.hidden // (tensor if sequence_parallel else 1)
    head = 2 * width * numbers + 4 * min(batch * shape.seq, chunk) * -(-shape.vocab // tensor)
    # What is there for a moment: a layer that is recomputed, or the loss.
    return in_flight * (shape.layers * kept + ends[0] * numbers) + max(whole - kept, ends[1] * head)


def wire(stage, params, ranks, microbatches=1, width=2):
    """Bytes that a rank of a ring sends per step in ZeRO's stage 0 to 3 (arXiv 1910.02054, section 7)."""
    times = (2, 2, 1 + microbatches, 3 * microbatches)[stage]
    return times * width * params * (ranks - 1) // ranks


def hybrid_wire(params, ranks, shard, microbatches=1, width=2):
    """(bytes within the `shard` ranks that share a copy, bytes across copies) of a rank of HSDP per step."""
    within = wire(3, params, shard, microbatches, width)
    return within, wire(0, params // shard, ranks // shard, 1, width)  # an all-reduce of the shard


def tensor_wire(shape, batch, recompute="none", tensor=1, sequence_parallel=False, width=2, microbatches=1):
    """Bytes that a rank of a ring sends per step in shape.layers layers (arXiv 1910.02054, section 8)."""
    times = 8 + 2 * sequence_parallel + 4 * (recompute == "full")
    numbers = microbatches * shape.layers * batch * shape.seq * shape.hidden
    return times * width * numbers * (tensor - 1) // tensor


def context_wire(shape, batch, ranks, width=2, microbatches=1):
    """Bytes that a rank sends per step in shape.layers layers (arXiv 2310.01889, 2309.14509)."""
    numbers = microbatches * shape.layers * batch * shape.seq * shape.hidden // ranks
    return 2 * width * numbers * (3 * ranks - 2) * (ranks > 1)


def mixture(dense, mixtures, mlp, width, experts, top_k):
    """(all parameters, a token's) when experts replace some of a dense model's MLPs, of `mlp` parameters."""
    routers = mixtures * experts * width
    return [dense + routers + mixtures * mlp * (number - 1) for number in (experts, top_k)]


def dispatch_wire(shape, batch, ranks, top_k, width=2, microbatches=1):
    """Bytes that a rank sends per step in the mean, to experts in every other layer, and back."""
    rows = (shape.layers + 1) // 2 * microbatches * batch * shape.seq * top_k
    return 4 * width * rows * shape.hidden * (ranks - 1) // ranks


def offloaded(shape, ranks, with_params=False):
    """Bytes of offload.py in bf16: weights and gradients on a device, all else on its host."""
    model, block = whole_model(shape), parameters(1, shape.hidden, 0, 0, 1, False, False)
    rest = model - shape.layers * block
    on_device = rest + 2 * block if with_params else model
    gradients = max(2 * rest, rest + 2 * block, 3 * block)
    return 2 * (on_device + gradients), 20 * model // ranks


def local_steps(params, ranks, inner_steps, precision="mixed"):
    """(bytes held, bytes sent per step in the mean) on a rank of diloco.py, which exchanges fp32 numbers."""
    held = 24 + 2 * (precision == "mixed")  # weights, outer ones, gradients, two moments, an outer one
    return held * params, wire(0, params, ranks, 1, 4) // inner_steps


def whole_model(shape):
    return parameters(shape.layers, shape.hidden, shape.vocab, shape.seq)


def replica(job, tensor, pipeline, stage):
    """(parameters, bytes of activations, bytes sent per step within the replica) of a rank in a stage."""
    shape, batch, stages = job.shape, job.micro_batch, STAGES_OF_A_RANK[job.schedule]
    ends = stage == 0, stage == (pipeline - 1 if stages == 1 else 0)
    if not shape:
        return job.params, None, 0
    own = shape._replace(layers=(shape.layers + stage) // pipeline)
    params = parameters(own.layers, shape.hidden, shape.vocab, shape.seq, tensor, *ends)
    params = -(-params * job.params // whole_model(shape))  # --params may differ from the closed form
    width, microbatches = BYTES[job.precision][0], job.accum * tensor * pipeline * job.cp
    around = context_wire(own, batch, job.cp, width, microbatches) // tensor
    own = own._replace(seq=own.seq // job.cp)
    how = job.recompute, tensor, job.sequence_parallel, width
    in_flight = min(microbatches, pipeline - stage * (stages == 1))  # arXiv 2104.04473, section 2.2
    chunk = 1024 if job.attention == "fused" else math.inf
    kept = activations(own, batch, *how, job.attention != "math", in_flight, ends, chunk)
    message = width * batch * own.seq * own.hidden // (tensor if job.sequence_parallel else 1)
    message *= len({0, pipeline - 1} - {stage}) * stages
    sent = tensor_wire(own, batch, *how, microbatches) + microbatches * message
    tied = width * shape.hidden * -(-shape.vocab // tensor)  # first and last stage add up its gradients
    return params, kept, sent + around + tied * (ends[0] != ends[1])


def idle(schedule, pipeline, microbatches):
    """Share of a step that the rank that works longest is idle, with `pipeline` microbatches or more."""
    turns = 6 * (pipeline - 1)  # of F, B or W in half of a rank's layers
    if schedule == "zb-v":
        turns = max(2 * pipeline - 1 - microbatches, 0)
    return turns / (6 * microbatches + turns)


def row(job, zero, tensor=1, pipeline=1, shard=None):
    """A strategy, as in --json: the bytes of the rank that holds most, and of the one that sends most."""
    layers, ranks = job.shape.layers if job.shape else 1, []
    data, microbatches = job.gpus // (tensor * pipeline), job.accum * tensor * pipeline * job.cp
    # Of stages with as many layers an earlier one has more in flight, so these show the most.
    for stage in {0, 1, -layers % pipeline, pipeline - 1} - {pipeline}:
        params, kept, sent = replica(job, tensor, pipeline, stage)
        matrices = 12 * layers * job.shape.hidden**2 if job.optimizer == "muon" else 0
        held = states(zero, params, shard or data, job.precision, matrices) | {"activations": kept}
        width = BYTES[job.precision][0]
        hybrid = shard and sum(hybrid_wire(params, data, shard, microbatches, width))
        sent += hybrid or wire(zero, params, data, microbatches, width)
        ranks.append(held | {"sum": sum(filter(None, held.values())), "sent_per_step": sent})
    size = max(ranks, key=lambda rank: rank["sum"])
    size |= {"sent_per_step": max(rank["sent_per_step"] for rank in ranks)}
    name = STAGES[zero] if tensor * pipeline == 1 else f"t{tensor} x p{pipeline} x d{data}"
    name = f"HSDP {shard}" if shard else name
    found = {"strategy": name, "zero": zero, "tensor": tensor, "pipeline": pipeline, "data": data}
    found |= {"recompute": job.recompute, "idle": idle(job.schedule, pipeline, microbatches), "bytes": size}
    return found | {"fits": size["sum"] <= job.gpu_gb * 1e9}


def replicas(job):
    """The rows in which each rank has a share of the batch: DP, the ZeRO stages, with --shard HSDP."""
    if job.optimizer == "muon":
        return [row(job, zero) for zero in range(2)]
    hybrid = [row(job, 3, shard=job.shard)] if job.shard else []
    return [row(job, zero) for zero in range(4)] + hybrid


def divisors(number):
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def meshes(job):
    """The rows in which t x p ranks are a replica, t within a node and p <= L; ZeRO-1 over the replicas."""
    if not job.shape or job.optimizer == "muon":
        return []
    tokens = job.shape.seq if job.sequence_parallel else 0
    tensors = divisors(
        math.gcd(job.gpus // job.cp, min(job.gpus, job.gpus_per_node), job.shape.heads, tokens)
    )
    pairs = ((t, p) for t in tensors for p in divisors(job.gpus // job.cp // t) if t * p > 1)
    deepest = job.shape.layers // STAGES_OF_A_RANK[job.schedule]
    return [row(job, 1, t, p) for t, p in pairs if p <= deepest]


def cheapest(rows):
    """Those that fit; first what sends least, of these DP as the simplest, then what holds least."""
    fit = [row for row in rows if row["fits"]]
    return sorted(fit, key=lambda row: (row["bytes"]["sent_per_step"], row["zero"] > 0, row["bytes"]["sum"]))


def changed(job, **values):
    return argparse.Namespace(**vars(job) | values)


def advise(jobs):
    """(the row to take or None, why) for jobs that differ in what they recompute: the cheapest that fits.

    As asked, fewer sequences at a time, more recomputed, more axes, then sequences split over ranks.
    """
    asked, tried = jobs[0], list(jobs)
    for policy in RECOMPUTE[RECOMPUTE.index(asked.recompute) :]:
        for times in divisors(asked.micro_batch):  # of the same batch
            size = asked.micro_batch // times
            tried.append(changed(asked, recompute=policy, micro_batch=size, accum=asked.accum * times))
    split = [changed(job, sequence_parallel=way) for job in tried for way in (job.sequence_parallel, True)]
    shared = divisors(math.gcd(asked.gpus, asked.shape.seq if asked.shape else 1))
    ways = [(replicas, job) for job in tried] + [(meshes, job) for job in split]
    ways += [(replicas, changed(tried[-1], cp=ranks)) for ranks in shared]
    for rows_of, job in ways:
        flags = [f" --{k.replace('_', '-')} {v}" for k, v in vars(job).items() if v != getattr(asked, k)]
        flags = "".join(flags).replace(" True", "")
        for best in cheapest(rows_of(job)):  # if any
            size = f"{giga(best['bytes']['sum'])} GB fit, and nothing that fits sends less"
            return best, f"Take {best['strategy']}{flags}: {size}."
    last = replicas(tried[-1])[-1]
    needs = f"{last['strategy']} needs {giga(last['bytes']['sum'])} GB"
    kept = f"{giga(last['bytes']['activations'])} for activations"
    return None, f"Nothing fits: {needs}, of it {kept} with --recompute {tried[-1].recompute}."


def giga(size):
    """Three significant digits, in 10^9."""
    if size is None:
        return "-"
    return f"{size / 1e9:.0f}" if size >= 999.5e9 else f"{size / 1e9:#.3g}".rstrip(".")


def cells(row):
    """What the table shows of a row."""
    sizes = map(giga, row["bytes"].values())
    return row["strategy"], *sizes, "yes" if row["fits"] else "no", f"{row['idle']:.0%}"


TITLES = ("parameters", "gradients", "optimizer", "activations", "     sum", "sent/step", "fits", "idle")
MESHES = "t x p x d: tensor x pipeline x data (ZeRO-1), the four that fit and send least"
NO_SHAPE = "-: activations need a shape (--size, or --layers --heads --hidden --seq --vocab)"


def show(jobs, tables, advice):
    """Print a table for each job, what its words mean, and the advice."""
    job, sizes = jobs[0], " + ".join(map(str, BYTES[jobs[0].precision]))
    print(
        f"plan | {giga(job.params)} G parameters | {job.precision}: {sizes} bytes each"
        f" | {job.gpus} GPU{'s'[: job.gpus - 1]} of {giga(job.gpu_gb * 1e9)} GB"
        f" | batch {job.micro_batch * job.accum * job.gpus} = {job.micro_batch} x {job.accum} x"
        f" {job.gpus} GPUs | checkpoint {giga(12 * job.params)} GB"
    )
    for job, rows in zip(jobs, tables):
        how = f", recompute {job.recompute}" if job.shape else ""
        for name, *line in [f"GB{how}", *TITLES], *map(cells, rows):
            print(f"{name:<24}" + "".join(f"  {x:>{len(title)}}" for title, x in zip(TITLES, line)))
    if job.shard:
        sent = hybrid_wire(job.params, job.gpus, job.shard, job.accum, BYTES[job.precision][0])
        within, across = map(giga, sent)
        print(f"HSDP {job.shard}: {within} GB sent/step among its GPUs, {across} GB to others")
    if job.inner_steps > 1:
        held, sent = map(giga, local_steps(job.params, job.gpus, job.inner_steps, job.precision))
        print(f"diloco.py: {held} GB and activations on a GPU, {sent} GB sent/step in the mean")
    if job.experts > 1:
        print(with_experts(job))
    if job.shape:
        device, host = map(giga, offloaded(job.shape, job.gpus, True))
        print(f"offload.py --params, in 16 bits: {device} GB and activations on a GPU, {host} GB on its host")
    print("GB: 10^9 bytes. " + (f"{job.attention} attention. {MESHES}" if job.shape else NO_SHAPE))
    print(advice)


def with_experts(job):
    """What --experts changes."""
    shape = job.shape
    mlp = 8 * shape.hidden**2 + 5 * shape.hidden
    total, active = mixture(job.params, (shape.layers + 1) // 2, mlp, shape.hidden, job.experts, job.top_k)
    sent = dispatch_wire(shape, job.micro_batch, job.gpus, job.top_k, BYTES[job.precision][0], job.accum)
    sizes = f"{giga(total)} G parameters, {giga(active)} G for a token"
    return f"With {job.experts} experts in every other layer: {sizes}, {giga(sent)} GB more sent/step"


def number(text):
    """7.5b, 125m, 1e9 or 7500000000 as an int."""
    unit = {"m": 1e6, "b": 1e9}.get(text[-1:].lower(), 1)
    return round(min(1e18, float(text.rstrip("mMbB")) * unit))


def refuse(problem):
    """End with exit code 2 and a line that says what to change."""
    print(f"plan.py: {problem}", file=sys.stderr)
    sys.exit(2)


def parse(arguments=None):
    """The job that the flags describe, from the command line if no arguments are given."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error, add = refuse, parser.add_argument
    add("--params", type=number, help="parameters: 7.5b, 125m, 1e9 (none: as many as the shape has)")
    add("--size", choices=SIZES, help="layers, heads, hidden, seq and vocab of a lesson's model")
    for name in Shape._fields:
        add("--" + name, type=int, help="of the shape, in place of the size's")
    add("--gpus", type=int, default=8, help="of all nodes")
    add("--gpus-per-node", type=int, default=8, help="tensor parallelism stays within a node")
    add("--gpu-gb", type=float, default=80, help="10^9 bytes that are free on it, less than it has")
    add("--shard", type=int, help="GPUs that share a copy of the model, for a row of HSDP (hsdp.py)")
    add("--micro-batch", type=int, default=1, help="sequences that go through the model at once")
    add("--accum", type=int, default=1, help="microbatches that each rank accumulates per step")
    add("--precision", default="mixed", choices=BYTES, help="mixed: 16 bits, with an fp32 optimizer")
    add(
        "--attention",
        default="flash",
        choices=("flash", "math", "fused"),
        help="math stores scores; fused few logits (fusion.py)",
    )
    add("--optimizer", default="adamw", choices=("adamw", "muon"), help="muon: of the matrices (muon.py)")
    add("--schedule", default="1f1b", choices=STAGES_OF_A_RANK, help="of pipelines (pipeline_v.py)")
    add("--inner-steps", type=int, default=1, help="from an exchange to the next (diloco.py)")
    add("--recompute", default="none", choices=(*RECOMPUTE, "all"), help="activations, in backward")
    add("--sequence-parallel", action="store_true", help="beside tensor parallelism")
    add("--cp", type=int, default=1, help="ranks that share each sequence (context_parallel.py)")
    add("--experts", type=int, default=1, help="in every other layer (expert_parallel.py)")
    add("--top-k", type=int, default=2, help="experts of a token")
    add("--json", type=argparse.FileType("w"), help="file for it, in bytes ('-': stdout, without the table)")
    size = SIZES.get(parser.parse_args(arguments).size, ())
    parser.set_defaults(**dict(zip(Shape._fields, size)))
    job = parser.parse_args(arguments)
    job.shape = Shape(*(vars(job).pop(name) for name in Shape._fields))
    for problem in find_problems(job):
        refuse(problem)
    job.shape = job.shape if all(job.shape) else None
    job.params = job.params or whole_model(job.shape)
    return job


def find_problems(job):
    """Yield what is wrong with the flags, each in one line."""
    shape = job.shape
    names = " ".join(f"--{name}" for name, value in shape._asdict().items() if value is None)
    for name, value in (vars(job) | shape._asdict()).items():
        power = 6 if name in ("gpus", "micro_batch") else 15  # each divisor of these two is tried
        if type(value) is int and not 1 <= value <= 10**power:
            yield f"--{name.replace('_', '-')} {value}: must be 1 or more, and at most 10^{power}"
    if not 0 < job.gpu_gb < math.inf:
        yield f"--gpu-gb {job.gpu_gb}: must be more than 0, and finite"
    if job.shard and job.gpus % job.shard:
        yield f"--shard {job.shard}: must divide --gpus {job.gpus}"
    if job.experts > 1 and job.top_k > job.experts:
        yield f"--top-k {job.top_k}: must be at most --experts {job.experts}"
    if any(shape) and names:
        yield f"{names}: missing beside the rest of the shape; or take a --size"
    elif names and not NEED_NO_SHAPE.items() <= vars(job).items():
        yield f"{names}: missing; --{', --'.join(NEED_NO_SHAPE).replace('_', '-')} need it"
    elif names and not job.params:
        yield f"--params: missing; say how many, or take a --size, or give all of {names}"
    elif not names and (job.gpus % job.cp or shape.seq % job.cp):
        yield f"--cp {job.cp}: must divide --gpus {job.gpus} and --seq {shape.seq}"
    elif not names and shape.hidden % shape.heads:
        yield f"--hidden {shape.hidden}: must be a multiple of --heads {shape.heads}"


def plan(job):
    """Print the plan of what parse() returns, and write it if asked. Returns what --json writes."""
    policies = RECOMPUTE if job.recompute == "all" else [job.recompute]
    jobs = [changed(job, recompute=policy) for policy in policies[: None if job.shape else 1]]
    rows = [replicas(each) + meshes(each) for each in jobs]
    first = len(replicas(job))
    shown = [all[:first] + cheapest(all[first:])[:4] for all in rows]
    best, why = advise(jobs)
    result = vars(job) | {"shape": job.shape and job.shape._asdict(), "json": None, "take": best, "why": why}
    result["rows"] = [row for table in rows for row in table]
    if job.json:
        print(json.dumps(result), file=job.json)
    if job.json is not sys.stdout:
        show(jobs, shown, why)
    return result


if __name__ == "__main__":
    plan(parse())
