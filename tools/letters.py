"""The formulas in the lessons' docstrings, and their letters.

A formula is a line `name formula`. P parameters, R on the rank with most, T in the largest tensor, U in a
block, E in no block; L layers, a heads, h width, s context, v vocabulary; N ranks of C stages, k microbatches
of b sequences each; w bytes of a weight, m of a shard (fp32 at least), c of an fp32 copy (bf16: 4, else 0), K
of a parameter's optimizer state; G so stepped at a time; f units gathered ahead; F ranks share a copy; g 1
over gloo; r parameters that tensor-parallel ranks all have. With M mixtures of X experts on e ranks, of
which a token takes t: U parameters in an expert, D outside them; an all-to-all depends on tokens, the formula
is its mean; V of D in a block with experts, W in one without. H parameters in Muon's matrices, X of them on
the rank with most; o bytes of an outer momentum. Documents of the rank that has most take D FLOPs, a rank's M
in the mean; in context_parallel.py those of a microbatch. Of N trainers one sends to up to q of t servers,
which hold D numbers each. H are diloco.py's steps from exchange to exchange; letters of time alone stand in
tools/formulas.py, at TIME.
"""

import functools
import re
import statistics
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent


def read_formulas(lesson, config, of_time=False):
    """{what is held or sent: formula} of a lesson's docstring; of_time: {what takes time: formula} of TIME.

    A line may be `with --policy full`, or `without`."""
    text = lesson.__doc__ or ""
    if of_time:
        from formulas import TIME  # from tools/, where whoever asks for it is

        text = "".join(re.findall(rf"^{lesson.__name__} +(.*\n)", TIME, re.M))
    formulas = {}
    for name, formula, more in re.findall(r"^(?:    )?([a-z-]+)  +(\S+(?: \S+)*)(.*)", text, re.M):
        choice = re.search(r"(with|without) --(\w+) ?(\w*)", more)
        if not choice or (getattr(config, choice[2]) in (True, choice[3])) == (choice[1] == "with"):
            formulas[name] = formula
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
def documented(name):
    """The formulas of a lesson's docstring, in Python, of offload.py those with --params. No lesson runs."""
    lesson = SimpleNamespace(__doc__=(ROOT / f"{name}.py").read_text().split('"""')[1])
    formulas = read_formulas(lesson, SimpleNamespace(params=True))
    return {key: compile(spelled(formula), name, "eval") for key, formula in formulas.items()}


def bytes_of(name, letters):
    """{what a rank holds or sends: bytes}, by a lesson's docstring."""
    known = letters | {"max": max, "min": min}
    return {key: round(eval(formula, known)) for key, formula in documented(name).items()}


def letters_of(lesson, config, ranks, backend):
    """{letter: its value}."""
    import torch  # plan.py, which needs only bytes_of, starts without it

    with torch.device("meta"):
        model = lesson.GPT(config)
    sizes = [param.numel() for param in model.parameters()]
    block = sum(param.numel() for param in model.blocks[0].parameters())
    letters = {"P": sum(sizes), "T": max(sizes), "U": block, "E": sum(sizes) - config.layers * block}
    letters |= zip("Lahsv", (getattr(config, name) for name in lesson.SHAPE))
    letters["Q"] = 6 * letters["P"] + 12 * config.layers * config.width * config.context
    letters |= {"N": ranks, "k": config.accum, "b": config.batch / config.shares / config.accum}
    width = lesson.DTYPES[config.dtype].itemsize
    letters |= {"w": width, "m": max(width, 4), "c": 4 * (width == 2), "g": int(backend == "gloo")}
    letters["K"] = 2 * letters["m"] * (config.optim == "adamw")
    ahead = config.layers if getattr(config, "no_reshard", False) else getattr(config, "prefetch", 0)
    letters["C"] = 2 if getattr(config, "schedule", "") == "interleaved" and ranks > 1 else 1
    letters["f"] = min(ahead, config.layers - 1)
    letters["G"] = min(letters["P"], max(letters["T"], 2**24))
    letters["F"] = getattr(config, "shard", 1)
    positions = config.context * hasattr(lesson, "TensorParallel")  # sequence_parallel.py splits these
    letters["r"] = (6 * config.layers + 2 + positions) * config.width
    if hasattr(config, "tp"):
        letters |= {"t": config.tp, "p": config.pp, "d": config.dp, "L": -(-config.layers // config.pp)}
    if hasattr(config, "experts"):
        letters |= {"X": config.experts, "e": config.ep, "t": config.top_k, "M": (config.layers + 1) // 2}
        letters["U"] = 8 * config.width**2 + 5 * config.width
        letters["D"] = letters["P"] + letters["M"] * (config.experts * config.width - letters["U"])
        letters["V"] = block - letters["U"] + config.experts * config.width
        letters["W"] = block * (config.layers > 1)
    if hasattr(config, "costs"):
        letters["D"] = statistics.mean(map(max, config.costs))
        letters["M"] = statistics.mean(map(statistics.mean, config.costs))
    if getattr(config, "blocks", None):  # of microbatches with documents; a rank has 1/N of the tokens
        of_tokens = 6 * letters["P"] * config.context / ranks
        of_block = 12 * config.layers * config.width * (config.context / ranks / 2) ** 2
        costs = []
        for blocks in config.blocks:
            blocks = [statistics.mean(blocks)] * ranks if config.kind == "ulysses" else blocks
            costs.append([of_tokens + of_block * each for each in blocks])
        letters["D"] = letters["b"] * statistics.mean(map(max, costs))
        letters["M"] = letters["b"] * statistics.mean(map(statistics.mean, costs))
    if hasattr(config, "outer_lr"):
        letters |= {"o": letters["m"] * (config.outer_momentum > 0), "H": config.inner_steps}
    if hasattr(config, "servers"):  # of reshard.py; without any, nothing is sent to one
        trainers, servers = ranks - config.servers, max(config.servers, 1)
        letters["r"] += (config.vocab + config.context) * config.width  # the embeddings
        slices = letters["r"] + (letters["P"] - letters["r"]) / servers
        letters |= {"N": trainers, "t": servers, "q": -(-servers // trainers)}
        letters["D"] = slices * (config.servers > 0)
    if hasattr(lesson, "assign_owners"):
        matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
        owned = Counter()
        for matrix, owner in lesson.assign_owners(matrices, ranks).items():
            owned[owner] += matrix.numel()
        letters["H"] = sum(owned.values())
        letters["X"] = max(owned.values())
    return letters


def parameters_of_stage(config, letters, stage):
    """Of a stage's rank with most, of a mesh: positions, norms and row-parallel biases are whole."""
    h, blocks = config.width, (config.layers + stage) // config.pp
    first, last = stage == 0, stage == config.pp - 1
    ends = first * config.context * h + (first or last) * -(-config.vocab // config.tp) * h + last * 2 * h
    return blocks * ((12 * h * h + 7 * h) // config.tp + 6 * h) + ends
