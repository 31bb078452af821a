"""The form of the house: each file beside its budget. `./run.sh lint` runs it; ends with 1 if one is over.

A budget counts Python's tokens, without comments and docstrings, and without a lesson's toy block: neither
packed lines nor missing explanations buy anything. Lessons also keep what FORM lists, each with its reason.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

LESSONS = {  # tokens of the technique
    "single.py": 620,
    "collectives.py": 1440,
    "dp_threads.py": 1500,
    "dp_async.py": 1490,
    "ddp.py": 1360,
    "uneven.py": 2235,  # all of ddp.py, and four ideas
    "zero1.py": 1738,  # two reduce-scatters in flight, and no pass over memory that can be spared
    "zero2.py": 1750,
    "zero3.py": 2280,
    "hsdp.py": 2610,
    "muon.py": 1700,
    "diloco.py": 1210,
    "offload.py": 2060,
    "tensor_parallel.py": 1890,
    "sequence_parallel.py": 2110,
    "context_parallel.py": 2535,  # three ways, and documents in each; gradients in one message
    "expert_parallel.py": 2010,
    "expert_zero.py": 2900,  # zero3.py and expert_parallel.py in one
    "pipeline.py": 2510,  # four schedules, and a guard for each way to hang
    "zero_bubble.py": 2480,
    "pipeline_v.py": 2560,
    "parallel_3d.py": 2770,  # three techniques
    "checkpointing.py": 1555,
    "zero_r.py": 1640,
    "fusion.py": 1770,
    "reshard.py": 2547,  # a trainer, a server, and what goes between them
    "resume.py": 1863,  # the norm of all gradients, one tensor, in pieces
    "survive.py": 2210,  # what may go wrong while something else does: slow steps and newcomers
}
LESSON_LINES = 520  # read in ten minutes, a third of it the toy model
# Whoever adds a feature to these takes one away, or makes the case for it here.
OTHERS = {
    "learn.py": 3545,
    "tools/promises.py": 3150,  # counts what hides by kind, and lets go of what only a Work holds
    "plan.py": 4085,  # the loss, passes over gradients, what is held at once
    "tools/formulas.py": 1300,
    "test_all.py": 5500,
    "tools/ledger.py": 2955,  # bytes touched; load() looks at a folder once, not for each of 1950 modules
    "tools/diverge.py": 4025,
    "bench/bench.py": 4275,  # each table once more, slowed, with the fastest peers; a wrong --peer is refused
    "bench/peers.py": 3600,
    "bench/pages.py": 1850,
    "site/figures.py": 2400,
}
README_LINES = 152  # two of them comments; more goes to docs/use.md, docs/formulas.md or docs/cluster.md
FORM = {
    "tokens per line": (10.5, "a line says one thing: nanoGPT has 7 to 11"),
    "a, b = x, y in 100 lines": (4, "only pairs that belong together stand in one line"),
    "comprehensions in 100 lines": (7, "what needs a second reading is a loop"),
    "first definition at line": (75, "the technique stands on the first screen after the docstring"),
    "longest function": (32, "a function is seen at once"),
}
DIFFS = {  # changed lines between neighbours, whose difference is the technique and almost nothing else
    "ddp uneven": 208,  # ddp.py divides in the pass that moves a gradient, uneven.py nowhere
    "ddp zero1": 341,
    "zero1 zero2": 82,
    "zero2 zero3": 204,
    "zero3 hsdp": 168,
    "tensor_parallel sequence_parallel": 166,
    "pipeline zero_bubble": 172,
    "zero_bubble pipeline_v": 210,
    "checkpointing zero_r": 155,
}
TOY = re.compile(r"^# ==== toy model.*?^# ==== end of the toy model ====$", re.S | re.M)
NO_CODE = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")


def tokens_of(source):
    """The tokens of code, without docstrings."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    inside = 0  # of f-strings: since Python 3.12 they are several tokens, here they are one
    found = []
    for token in tokens:
        kind = tokenize.tok_name[token.type]
        if not inside and kind not in NO_CODE and token.start[0] not in docstrings:
            found.append(token)
        inside += kind.endswith("STRING_START") - kind.endswith("STRING_END")
    return found


def form_of(source):
    """What FORM lists, in its order."""
    tree = ast.parse(source)
    tokens = tokens_of(source)
    lines = len({token.start[0] for token in tokens})
    nodes = list(ast.walk(tree))
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    packed = [a for a in assigned if isinstance(a.targets[0], ast.Tuple) and isinstance(a.value, ast.Tuple)]
    comprehensions = [
        n for n in nodes if isinstance(n, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp))
    ]
    first = min(node.lineno for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)))
    longest = max(node.end_lineno - node.lineno + 1 for node in nodes if isinstance(node, ast.FunctionDef))
    per_100 = 100 / lines
    return len(tokens) / lines, len(packed) * per_100, len(comprehensions) * per_100, first, longest


def main():
    over = []

    def check(what, value, most, why=""):
        if value > most:
            over.append(f"over: {what}: {value:.4g}, at most {most}{why and f': {why}'}")

    print(f"{'':<22}{'tokens':>13}   {' | '.join(FORM)}")
    for name, most in (LESSONS | OTHERS).items():
        source = TOY.sub("", Path(name).read_text())
        tokens = len(tokens_of(source))
        form = form_of(source) if name in LESSONS else ()
        print(f"{name:<22}{tokens:>7} /{most:>4}   {' | '.join(f'{number:.4g}' for number in form)}".rstrip())
        check(f"{name}: tokens", tokens, most)
        for (what, (limit, why)), number in zip(FORM.items(), form):
            check(f"{name}: {what}", number, limit, why)
    for name in (*LESSONS, "README.md"):
        most = LESSON_LINES if name in LESSONS else README_LINES
        check(f"{name}: lines", Path(name).read_text().count("\n"), most)
    for pair, most in DIFFS.items():
        diff = subprocess.run(
            ["diff", *(f"{name}.py" for name in pair.split())], stdout=subprocess.PIPE, text=True
        )
        check(f"diff {pair}: changed lines", len(re.findall("^[<>]", diff.stdout, re.M)), most)
    lessons = {path.name for path in Path().glob("*.py") if TOY.search(path.read_text())}
    over += [f"over: {name}: no budget; add its row here" for name in sorted(lessons - LESSONS.keys())]
    print("\n".join(["", *over]) if over else "\nAll within their budgets.")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
