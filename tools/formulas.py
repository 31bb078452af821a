"""The formulas in the lessons' docstrings, and what tools/plan.py adds to them.

A formula is a line such as `all-reduce    2wP(N-1)/N    in a ring`: a name, a formula in which neighbours are
multiplied, a remark. tools/ledger.py takes the letters' values from a lesson, tools/plan.py from flags."""

import functools
import math
import re
from collections import namedtuple
from types import SimpleNamespace

from lessons import path_of

LINE = re.compile(r"^(?:    )?([a-z-]+)  +(\S+(?: \S+)*)(.*)", re.M)
# What tools/plan.py chooses where a docstring has several formulas, such as `with --policy full`.
CHOSEN = {"policy": "none", "kind": "ring"}


def read_formulas(lesson, config):
    """{what is held or sent: formula} of a docstring. A line whose remark begins `with --policy full`,
    or `without`, counts only if config says so. A formula such as +4P is added to the one above it."""
    formulas = {}
    for name, formula, remark in LINE.findall(lesson.__doc__ or ""):
        choice = re.search(r"(with|without) --([a-z-]+) ?(\w*)", remark)
        value = choice and str(getattr(config, choice[2].replace("-", "_"), None))
        if not choice or (value in ("True", choice[3])) == (choice[1] == "with"):
            formulas[name] = formulas.get(name, "") * formula.startswith("+") + formula
    return formulas


def spelled(formula):
    """A formula such as 2wP(N-1)/N, in which neighbours are multiplied, as Python: 2*w*P*(N-1)/N."""
    words = re.findall(r"max|min|[A-Za-z]|\d+|\S", formula)
    text = ""
    for word, after in zip(words, [*words[1:], ""]):
        is_factor = word not in ("max", "min") and (word.isalnum() or word == ")")
        text += word + "*" * (is_factor and (after.isalnum() or after == "("))
    return text


def evaluate(formula, letters):
    return eval(spelled(formula), {"max": max, "min": min}, letters)


@functools.cache
def documented(name, **chosen):
    """The formulas of a lesson's docstring, as code to evaluate. The lesson does not run."""
    lesson = SimpleNamespace(__doc__=path_of(name).read_text().split('"""')[1])
    formulas = read_formulas(lesson, SimpleNamespace(**CHOSEN | chosen))
    return {key: compile(spelled(formula), name, "eval") for key, formula in formulas.items()}


def bytes_of(name, letters, **chosen):
    """{what a rank holds or sends: bytes}, by a lesson's docstring."""
    known = letters | {"max": max, "min": min}
    formulas = documented(name, dtype="bf16" if letters["w"] == 2 else "fp32", **chosen)
    return {key: round(eval(formula, known)) for key, formula in formulas.items()}


Shape = namedtuple("Shape", "layers heads hidden seq vocab")
WIDTHS = {"mixed": 2, "fp32": 4}  # bytes of a parameter


def parameters(layers, hidden, vocab, seq, tensor=1, first=True, last=True):
    """Parameters of a GPT whose head is its embedding, on one of `tensor` ranks, which must divide hidden.
    Norms, row-parallel biases and positions are replicated. The first stage has the positions, the last the
    head."""
    layer = (12 * hidden**2 + 7 * hidden) // tensor + 6 * hidden
    embedding = hidden * -(-vocab // tensor) * (first or last)
    return layers * layer + embedding + first * seq * hidden + last * 2 * hidden


def blocks_of(stage, stages, layers):
    """How many blocks pipeline.py puts on a stage: block i is on stage i * stages // layers."""
    return -(-(stage + 1) * layers // stages) + -stage * layers // stages


def whole_model(shape):
    return parameters(shape.layers, shape.hidden, shape.vocab, shape.seq)


def layer_activations(shape, batch, recompute="none", tensor=1, sequence_parallel=False, width=2):
    """Bytes that a layer keeps with dropout and stored scores: table 2 of arXiv 2205.05198."""
    numbers = batch * shape.seq * shape.hidden
    whole = tensor if sequence_parallel else 1
    if recompute == "full":
        return width * numbers // whole
    # Only sequence_parallel splits 2 masks, and the inputs of norms and of column-parallel matrices.
    scores = (2 * width + 1) * batch * shape.heads * shape.seq**2 * (recompute == "none")
    return (4 * width + 2) * numbers // whole + (12 * width * numbers + scores) // tensor


def activations(job, letters, tensor=1, in_flight=1, first=True, last=True):
    """Bytes of activations at their peak, on a rank whose stage has letters["L"] layers."""
    vocab, own = -(-job.shape.vocab // tensor), job.shape._replace(seq=letters["s"])
    whole = tensor if job.sequence_parallel else 1

    def kept(policy, layers):
        """Bytes of one microbatch in so many layers, the last norm and the loss, by a docstring."""
        if tensor == 1 or policy == "full":
            known = letters | {"L": layers, "v": vocab}
            return bytes_of("checkpointing", known, policy=policy)["activations"]
        lesson = "sequence_parallel" if job.sequence_parallel else "tensor_parallel"
        return bytes_of(lesson, letters | {"N": tensor, "L": layers})["activations"]

    def layer(policy):
        if job.attention == "math":
            return layer_activations(own, job.micro_batch, policy, tensor, whole > 1, letters["w"])
        return (kept(policy, 1) - kept(policy, 0)) // (whole if policy == "full" else 1)

    tokens = job.micro_batch * own.seq
    head = kept("none", 0) + 8 * tokens * vocab
    if job.attention == "fused":
        head = bytes_of("fusion", letters | {"L": 0, "v": vocab, "C": 8})["activations"] + tokens * vocab
    masks = tokens * own.hidden * (job.attention == "math") // whole
    # There for a moment: what a layer computes again, or the loss.
    moment = max(layer("none") - layer(job.recompute), last * head)
    return in_flight * (letters["L"] * layer(job.recompute) + first * masks) + moment


def plain_letters(params, ranks, precision="mixed", microbatches=1):
    """Values of the docstrings' letters for AdamW over NCCL, without units that travel."""
    letters = {"P": params, "N": ranks, "k": microbatches, "w": WIDTHS[precision]}
    return letters | dict.fromkeys("UEfr", 0) | {"B": 5}


def letters_of_job(job, ranks, params, microbatches):
    """Those of a rank with so many parameters in tools/plan.py's job, with units that travel."""
    layers, heads, hidden, seq, vocab = job.shape
    scale = job.params / whole_model(job.shape)
    block, matrix = (scale * size for size in (parameters(1, hidden, 0, 0, 1, False, False), 4 * hidden**2))
    letters = plain_letters(params, ranks, job.precision, microbatches)
    letters |= {"L": layers, "a": heads, "h": hidden, "s": seq, "v": vocab, "b": job.micro_batch}
    letters |= {"U": block, "E": job.params - layers * block, "f": min(1, layers - 1), "F": job.shard}
    # muon.py's: of some rank that owns 1/N, or more if an embedding is more.
    embedding, matrices = hidden * vocab, 3 * layers * matrix
    owned = max(params / ranks, embedding)
    return letters | {"X": owned, "Y": owned + max(embedding, (params - matrices) / ranks)}


def letters_of_experts(job, ranks, microbatches):
    """Those of expert_parallel.py and expert_zero.py, and of experts that replace MLPs of the job's model."""
    letters = letters_of_job(job, ranks, job.params, microbatches)
    hidden, block = job.shape.hidden, letters["U"]
    mlp = job.expert_params or 8 * hidden**2 + 5 * hidden
    letters |= {"M": job.mixtures, "X": job.experts, "t": job.top_k, "e": math.gcd(job.experts, job.gpus)}
    letters |= {"D": job.params + job.mixtures * (job.experts * hidden - mlp), "U": mlp}
    letters |= {"V": block - mlp + job.experts * hidden}
    return letters | {"b": job.micro_batch * ranks}


def counted(job):
    """(all parameters, those that a token meets), with experts."""
    if job.experts == 1:
        return job.params, job.params
    letters = letters_of_experts(job, 1, 1)
    return tuple(round(letters["D"] + letters["M"] * letters["U"] * letters[many]) for many in "Xt")
