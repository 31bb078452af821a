"""The formulas of plan.py: what each strategy holds and sends, and what computation hides.

Memory
    Parameters, gradients and optimizer states, units in flight among them, by the lessons' own docstrings:
    ddp.py, zero1.py, zero2.py, zero3.py, hsdp.py, diloco.py, muon.py, expert_parallel.py, expert_zero.py,
    offload.py. P = L(12h^2 + 13h) + hv + sh + 2h parameters: L layers of width h, v tokens in the vocabulary,
    s in a sequence; the head is the embedding.
    Activations of a layer in 16 bits (table 2) on each of t tensor-parallel ranks, for b sequences, a heads,
    with dropout's masks:
    none          sbh(10 + 24/t + 5as/(ht))     with --sequence-parallel   sbh(34 + 5as/h)/t
    selective     sbh(10 + 24/t)                                           34sbh/t
    full          2sbh                                                     2sbh/t (as blocks enter split)
    Flash attention keeps no scores, and the lessons have no dropout: none and selective are sbh(8 + 24/t)
    then. Beside that sbh of the embedding, and the larger of what a layer computes again and of the head:
    4sbh, and 12 bytes a logit, of sv/t: its fp32 copy, the loss's gradient, the logit's (the paper counts the
    first alone: 4sbv/t). With --attention fused, of at most 1024 tokens at once (fusion.py).
    Stage i of p has (L + i)/p layers, rounded down; in 1F1B min(m, p-i) of m microbatches are in flight, in
    --schedule zb-v (2401.10241, 6) up to p on each rank; its first rank has both ends. Idle between
    a rank's first action and its last (2401.10241, 5.3), if F = B = W and m microbatches:
    1f1b          (p-1)/(m + p-1)
    zb-v          n/(6m + n) with n the most of 4p-1-3m, 2p-1-m and 0: nothing from 2p-1 microbatches on

Passes over memory (bytes that a forward reads and writes; a backward twice as many)
    What a layer keeps, written and read once, and 6 numbers of each hidden one, for two residual sums: 76sbh
    in 16 bits. The toy GPT's operators read and write 76sbh forward and 158sbh backward, as tests count them;
    the operands of matrix products are in it. A logit has 16 - w, of 42 in a step: products 6, a cast 12,
    log-softmax 8, and back 16 (in fp32 36, without a cast).

Communication (bytes of a rank per step, w = 2 or 4 a number)
    By the same docstrings what data parallelism, experts and offload send; beside that
    tensor        8wbsh(t-1)/t     a layer and microbatch; 4 more with full, which runs forward again, 2 more
                                   with --sequence-parallel, which in backward gathers again what it split
    pipeline      wbsh             forward, and backward, over each boundary for each microbatch; zb-v twice
    context       2wbsh(3C-2)/C    a layer and microbatch of ring attention on --cp C ranks
"""

import math
from collections import namedtuple

# What a step of each lesson takes; docs/results/time.md explains it, tools/clock.py computes it. Of a rank:
# `compute` FLOPs; `exposed` bytes, those that no computation hides (without such a row: all that are sent);
# `idle`, as a part of the time that `compute` takes; `touched` bytes that the technique reads and writes.
# With the letters of tools/letters.py, and
# Q FLOPs of a token, 6P+12Lhs, a third of them in forward (PaLM, arXiv 2204.02311, appendix B); n (N-1)/N;
# A bytes that travel in a message's latency; Y those in the whole model's forward of a microbatch; B bytes of
# ddp.py's last bucket; M FLOPs of a rank's documents in the mean, D those of the rank that has most.
TIME = """
single             compute  Qkbs
single             touched  3wP+4cP                 norm w, clip 2w; MasterWeights 4c
collectives        compute  Qkbs
dp_threads         compute  Qkbs                    of a replica, beside the others
dp_async           compute  Qkbs                    of a worker, beside the others
ddp                compute  Qkbs
ddp                touched  (3+2min(k,2))wP+4cP     move and divide 2w each, norm w, clip 2w; MasterWeights 4c
ddp                exposed  4(N-1)A+max(2nB,2nwP-2Y)    the last bucket, or what backward is too short to hide
uneven             compute  M                       without padding, and half of attention's scores
uneven             exposed  4(N-1)A+max(2nB,2nwP-2Y)    as in ddp.py, if the microbatches are full
uneven             idle     (D-M)/M                 slowest over mean, minus 1
zero1              compute  Qkbs
zero1              exposed  6(N-1)A+max(nw(E+U),nwP-Y)+max(nw(E+U),nwP-2Y)    first gather, last reduction
zero1              touched  3kwP+(5min(k,2)-1)mP/N+3cP/N/2    move 2w or add 3w, sum; norm, clip; cast
zero2              compute  Qkbs
zero2              exposed  6(N-1)A+max(nw(E+U),nwP-Y)+kmax(nw(E+U),nwP-2Y)
zero2              touched  3kwP+4kmP/N+3cP/N/2     move 2w and sum w+m/N, or add to m/N; norm, clip; cast
zero3              compute  Qkbs
zero3              exposed  6(N-1)A+kmax(nw(E+U),nwP-min(1,f)Y)+kmax(nw(E+U),nw(2P-E-(1+f)U)-2Y)
zero3              touched  3kwP+4kmP/N+k(m+w)(2P-E-(1+f)U)/N    as in zero2.py; copy before each gather
hsdp               compute  Qkbs
hsdp               exposed  8(N-1)A+2kw(E+U)(F-1)/F+max(2w(U/F)(N-F)/N,2w(P/F)(N-F)/N-2Y)
hsdp               touched  3kwP+4kmP/F+k(m+w)(2P-E-(1+f)U)/F+(m+w)P/F(1+c/4)    and the nodes' average
muon               compute  Qkbs+280Lhhh/N          5 x 2pp(2q+p) for a p x q matrix, p <= q
muon               exposed  6(N-1)A+max(nw(E+U),nwP-Y)+max(nw(E+U),nwP-2Y)
muon               touched  wP+(5m+c(w+m)/2)((P-H)/N+X)     zero w; of own: cast, divide, norm, clip, cast
diloco             compute  HQkbs
diloco             exposed  2n(mP+NA)               without --delay; with it nothing, if H steps take longer
offload            compute  Qkbs
offload            exposed  6(N-1)A+max(nw(E+U),nwP-Y)+kmax(nw(E+U),nwP-2Y)    between ranks, without --params
tensor_parallel    compute  Qkbs/N
tensor_parallel    exposed  2k(N-1)(4L+5)A+2knbs((2L+1)wh+3m)+max(0,2knbs(2L+1)wh-kY/N/2)    in forward all
sequence_parallel  compute  Qkbs/N
sequence_parallel  exposed  (N-1)(k(10L+9)+12L+4)A+knbs((4L+2)wh+4m)+max(0,knbs(6L+3)wh-kY/N)   in forward all
context_parallel   compute  Qkbs/N                  without --documents; a long row hides a ring's messages
context_parallel   compute  kM                      with --documents: of the blocks that the mask shows
context_parallel   idle     (D-M)/M                 with --documents: all wait for the rank with most
expert_parallel    compute  (6(D+MtU)+12Lhs)kbs/N   if tokens are spread evenly; nothing hides messages
expert_zero        compute  (6(D+MtU)+12Lhs)kbs/N   as in expert_parallel.py
pipeline           compute  (6R+12Lhs/N)kbs         of the largest stage; nothing hides messages
pipeline           idle     (N-1)/C/k               without --schedule naive; of the whole step (N-1)/(Ck+N-1)
pipeline           idle     N-1                     with --schedule naive
zero_bubble        compute  (6R+12Lhs/N)kbs         of the largest stage; nothing hides messages
zero_bubble        idle     (N-1)/(3k)              if F = B = W and k >= 2N-1: all wait for the norm
pipeline_v         compute  (6R+12Lhs/N)kbs         of the largest pair of stages; nothing hides messages
pipeline_v         idle     (N-1)/(6k)              if F = B = W and k >= 2N: all wait for the norm
parallel_3d        compute  (6R+12Lhs/t)kbs         of the largest stage
parallel_3d        idle     (p-1)/k
checkpointing      compute  Qkbs                    without --policy full: no matrix product again
checkpointing      compute  11Qkbs/9      with --policy full: a second forward, less one product a block
zero_r             compute  11Qkbs/9                a second forward
zero_r             exposed  4(N-1)A+max(knwbsh,knwbshL-3kY)
fusion             compute  Qkbs
resume             compute  Qkbs
resume             touched  3wP+(3m+w)P/N+c(m+w)P/N/4    flatten 2w, norm w; of own: cast, clip, copy
reshard            compute  Qkbs                    of a trainer; servers only run forward
survive            compute  Qkbs/N                  k microbatches of all members
"""

Shape = namedtuple("Shape", "layers heads hidden seq vocab")
WIDTHS = {"mixed": 2, "fp32": 4}  # bytes of a parameter


def parameters(layers, hidden, vocab, seq, tensor=1, first=True, last=True):
    """Parameters of a GPT whose head is its embedding, on one of `tensor` ranks, which must divide hidden.

    Norms, row-parallel biases and positions are whole (arXiv 1909.08053). first, last: of the model.
    """
    layer = (12 * hidden**2 + 7 * hidden) // tensor + 6 * hidden
    embedding = hidden * -(-vocab // tensor) * (first or last)
    return layers * layer + embedding + first * seq * hidden + last * 2 * hidden


def whole_model(shape):
    return parameters(shape.layers, shape.hidden, shape.vocab, shape.seq)


def layer_activations(
    shape, batch, recompute="none", tensor=1, sequence_parallel=False, width=2, flash=False
):
    """Bytes that a layer keeps for backward on a rank (arXiv 2205.05198, table 2), `width` bytes a number.

    `tensor` must divide the heads, with sequence_parallel also the sequence. flash: no scores, no dropout.
    """
    numbers = batch * shape.seq * shape.hidden
    if recompute == "full":
        return width * numbers // (tensor if sequence_parallel else 1)
    # 16 tensors and 2 masks; whole are the masks and the inputs of norms and of column-parallel matrices.
    whole = (4 * width + 2 * (not flash)) * numbers // (tensor if sequence_parallel else 1)
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
    logit=4,
):
    """Bytes of activations at their peak on a rank whose stage has shape.layers layers (section 4.3).

    in_flight: microbatches after their forward. ends: is the embedding, is the head, with logits of a chunk,
    each of so many bytes.
    """
    how = tensor, sequence_parallel, width, flash
    kept, whole = (layer_activations(shape, batch, policy, *how) for policy in (recompute, "none"))
    numbers = batch * shape.seq * shape.hidden // (tensor if sequence_parallel else 1)
    head = 2 * width * numbers + logit * min(batch * shape.seq, chunk) * -(-shape.vocab // tensor)
    # What is there for a moment: a layer that is recomputed, or the loss.
    return in_flight * (shape.layers * kept + ends[0] * numbers) + max(whole - kept, ends[1] * head)


def passed(shape, batch, *how):
    """Bytes that the forward of shape.layers layers reads and writes on a rank, half of what a backward does.

    how: the last four arguments of layer_activations()."""
    kept, hidden = (layer_activations(shape, batch, policy, *how) for policy in ("none", "full"))
    return shape.layers * (2 * kept + 6 * hidden)


def exposed(stage, sent, gathered, microbatches, forward, backward):
    """Bytes that computation does not hide of those sent in ZeRO's stage 0 to 3.

    A forward hides so many, a backward so many. gathered: bytes of an all-gather of all parameters."""
    gathers = (0, 1, 1, microbatches)[stage]
    backwards = (1, 1, microbatches, microbatches)[stage]
    late = max(0, sent - gathers * gathered - backwards * backward)
    return gathers * max(0, gathered - forward) + late


def most_ranks(size, flops, speed):
    """How many ranks can share a batch of `size` tokens in DP or FSDP, or an MLP of that width by tensors.

    More would wait for messages of 16 bits, with FLOP/s and bytes/s of a rank (scaling-book, training).
    """
    return int(size * speed / flops)


def tensor_wire(shape, batch, recompute="none", tensor=1, sequence_parallel=False, width=2, microbatches=1):
    """Bytes that a rank of a ring sends per step in shape.layers layers (arXiv 1910.02054, section 8)."""
    times = 8 + 2 * sequence_parallel + 4 * (recompute == "full")
    numbers = microbatches * shape.layers * batch * shape.seq * shape.hidden
    return times * width * numbers * (tensor - 1) // tensor


def context_wire(shape, batch, ranks, width=2, microbatches=1):
    """Bytes that a rank sends per step in shape.layers layers (arXiv 2310.01889, 2309.14509)."""
    numbers = microbatches * shape.layers * batch * shape.seq * shape.hidden // ranks
    return 2 * width * numbers * (3 * ranks - 2) * (ranks > 1)


def idle(schedule, pipeline, microbatches):
    """Share of the time from its first action to its last that the rank for which it is longest is idle.
    With zb-v each waits p-1 turns more if the update waits for all ranks."""
    turns = 6 * (pipeline - 1)  # of F, B or W in half of a rank's layers
    if schedule == "zb-v" and pipeline > 1:
        turns = max(4 * pipeline - 1 - 3 * microbatches, 2 * pipeline - 1 - microbatches, 0)
    return turns / (6 * microbatches + turns)


def near(job, apart=1):
    """How many ranks that are so many GPUs apart share a node."""
    return max(1, job.gpus_per_node // apart)


def link(job, ranks, near, ring=True):
    """("links inside" a node or "links between" nodes, bytes/ms) of a rank; so many of the ranks share it."""
    if ranks <= near:
        return "links inside", job.gbps * 1e6
    return "links between", min(job.gbps, job.gbps_nodes * (near if ring else 1)) * 1e6


def plain_letters(params, ranks, precision="mixed", microbatches=1):
    """Values of the lessons' letters (tools/letters.py), with AdamW over NCCL, without units in flight."""
    width = WIDTHS[precision]
    letters = {"P": params, "N": ranks, "k": microbatches, "w": width, "m": 4, "c": 4 * (width == 2), "K": 8}
    return letters | dict.fromkeys("UEfg", 0) | {"o": 4, "G": min(params, 2**24)}


def letters_of_job(job, ranks, params, microbatches):
    """plain_letters() and those of the units that are in flight, for plan.py's job."""
    layers, _, hidden, _, vocab = job.shape
    scale = job.params / whole_model(job.shape)
    block, matrix = (scale * size for size in (parameters(1, hidden, 0, 0, 1, False, False), 4 * hidden**2))
    letters = plain_letters(params, ranks, job.precision, microbatches)
    letters |= {"G": min(params, max(hidden * vocab, matrix, 2**24)), "f": min(1, layers - 1)}
    letters |= {"U": block, "E": job.params - layers * block, "F": job.shard}
    return letters | {"H": 3 * layers * matrix, "X": max(3 * layers * matrix / ranks, matrix)}  # muon.py's


def letters_of_experts(job, ranks, microbatches):
    """Those of expert_parallel.py and expert_zero.py, and of experts that replace MLPs of plan.py's job."""
    letters = letters_of_job(job, ranks, job.params, microbatches)
    hidden = job.shape.hidden
    mlp, block = job.expert_params or 8 * hidden**2 + 5 * hidden, letters["U"]
    letters |= {"M": job.mixtures, "X": job.experts, "t": job.top_k, "e": math.gcd(job.experts, job.gpus)}
    letters |= {"D": job.params + job.mixtures * (job.experts * hidden - mlp), "U": mlp}
    letters |= {"V": block - mlp + job.experts * hidden, "W": block * (job.shape.layers > 1)}
    letters["P"] = letters["D"] + letters["M"] * letters["t"] * mlp  # that a token meets
    return letters | {"h": hidden, "b": job.micro_batch * ranks, "s": job.shape.seq}
