"""The form of the house: each file beside its budget. `./run.sh lint` runs it; ends with 1 if one is over.

lines; tokens (Python's, without comments and docstrings, of a lesson without the toy block), so that packing
lines buys nothing; and of a lesson what FORM lists, each with the reason for its limit.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

# A lesson is read in ten minutes, a third of it the toy model: lines, and tokens outside of that.
LESSONS = {
    "single.py": (270, 650),
    "collectives.py": (360, 1700),
    "dp_threads.py": (350, 1600),
    "dp_async.py": (380, 1900),
    "ddp.py": (360, 1400),
    "zero1.py": (390, 1700),
    "zero2.py": (390, 1700),
    "zero3.py": (450, 2150),
    "hsdp.py": (480, 2350),
    "muon.py": (430, 2000),
    "diloco.py": (400, 1900),
    "offload.py": (400, 2100),
    "tensor_parallel.py": (380, 1900),
    "sequence_parallel.py": (410, 2150),
    "context_parallel.py": (430, 2300),
    "expert_parallel.py": (430, 2150),
    "pipeline.py": (430, 2450),
    "zero_bubble.py": (440, 2600),
    "pipeline_v.py": (480, 2800),
    "parallel_3d.py": (515, 3000),  # three techniques
    "checkpointing.py": (360, 1600),
    "zero_r.py": (380, 1900),
    "fusion.py": (380, 1900),
    "resume.py": (380, 1900),
    "survive.py": (430, 2100),
}
# Whoever adds a feature to these takes one away, or makes its case here.
OTHERS = {
    "learn.py": (400, 3400),
    "tools/promises.py": (285, 2600),
    "plan.py": (480, 3900),
    "tools/formulas.py": (210, 1300),
    "test_all.py": (600, 5500),
    "README.md": (190, 9999),
    "tools/ledger.py": (340, 2900),
    "bench/bench.py": (400, 3800),
    "bench/peers.py": (400, 3600),
    "site/figures.py": (260, 2400),
}
FORM = {
    "tokens per line": (11.2, "a line says one thing: nanoGPT has 7 to 11"),
    "a, b = x, y in 100 lines": (2.5, "only pairs that belong together stand in one line"),
    "comprehensions in 100 lines": (6, "what needs a second reading is a loop"),
    "first definition at line": (75, "the technique stands on the first screen after the docstring"),
    "longest function": (32, "a function is seen at once"),
}
DIFFS = {  # changed lines between neighbours, whose difference is the technique and almost nothing else
    "ddp zero1": 225,
    "zero1 zero2": 70,
    "zero2 zero3": 150,
    "zero3 hsdp": 110,
    "tensor_parallel sequence_parallel": 150,
    "pipeline zero_bubble": 150,
    "zero_bubble pipeline_v": 160,
    "checkpointing zero_r": 150,
}
TEST_FILE_LINES = 350
TEST_LINES = 1900 + 165 * len(LESSONS)  # of all tests
TOY = re.compile(r"^# ==== toy model.*?^# ==== end of the toy model ====$", re.S | re.M)
NO_CODE = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")


def tokens_of(source):
    """The tokens of code, without docstrings."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [t for t in tokens if tokenize.tok_name[t.type] not in NO_CODE and t.start[0] not in docstrings]


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

    print(f"{'':<22}{'lines':>10}{'tokens':>13}   {' | '.join(FORM)}")
    for name, (most_lines, most_tokens) in (LESSONS | OTHERS).items():
        source = Path(name).read_text()
        lines = source.count("\n")
        tokens = len(tokens_of(TOY.sub("", source))) if name.endswith(".py") else 0
        form = form_of(source) if name in LESSONS else ()
        numbers = " | ".join(f"{number:.4g}" for number in form)
        print(f"{name:<22}{lines:>5} /{most_lines:>3}{tokens:>7} /{most_tokens:>4}   {numbers}")
        check(f"{name}: lines", lines, most_lines)
        check(f"{name}: tokens", tokens, most_tokens)
        for (what, (most, why)), number in zip(FORM.items(), form):
            check(f"{name}: {what}", number, most, why)
    for pair, most in DIFFS.items():
        diff = subprocess.run(
            ["diff", *(f"{name}.py" for name in pair.split())], stdout=subprocess.PIPE, text=True
        )
        check(f"diff {pair}: changed lines", len(re.findall("^[<>]", diff.stdout, re.M)), most)
    lessons = {path.name for path in Path().glob("*.py") if TOY.search(path.read_text())}
    over += [f"over: {name}: no budget; add its row here" for name in sorted(lessons - LESSONS.keys())]
    tests = [path.read_text().count("\n") for path in Path("tests").glob("*.py")]
    check("longest file in tests/: lines", max(tests), TEST_FILE_LINES)
    check("all tests: lines", sum(tests) + Path("test_all.py").read_text().count("\n"), TEST_LINES)
    print("\n".join(["", *over]) if over else "\nAll within their budgets.")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
