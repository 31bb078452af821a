"""From symptom to cause: what shows of each of the tests' mutants, and docs/trouble.md's tables of it.

    python tools/trouble.py         runs mutants that docs/trouble.json lacks, and writes the tables anew
    python tools/trouble.py --proof runs tools/diverge.py on those that show a wrong number and that
                                    docs/diverge.json lacks, and says how often it is right of all of them

A mutant runs on 1 to 4 ranks, with 3 microbatches and in bf16, beside the lesson as it is. What differs
first is kept of each run: an error, a hang, the step from which losses or norms differ, bytes held or sent.
"""

import argparse
import ast
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import diverge
import promises
from promises import ROOT, SIZES, find_mutants, observe_new, run

SEEN = ROOT / "docs" / "trouble.json"
PAGE = ROOT / "docs" / "trouble.md"
SAID = ROOT / "docs" / "diverge.json"  # {mutant: [phase, function] that tools/diverge.py says}
RUNS = {"1 rank": (1, ""), "2 ranks": (2, ""), "3 ranks": (3, ""), "4 ranks": (4, "")}
RUNS |= {"3 microbatches": (2, "--accum 3"), "bf16": (2, "--dtype bf16")}
ONLY = {"1 rank": "on", "3 ranks": "on", "4 ranks": "on", "3 microbatches": "with", "bf16": "in"}
BEGIN, END = "<!-- made by tools/trouble.py -->\n", "<!-- end -->\n"
SYMPTOMS = {  # in the order in which a person meets them
    "hang": "It hangs",
    "error": "It ends with an error",
    "loss 1": "The first loss is wrong",
    "norm 1": "The first loss is right, the first gradient norm is wrong",
    "loss 2": "All is right at step 1, and wrong from step 2 on",
    "weights": "Losses and norms are right, the weights are not",
    "held": "The numbers are right; it holds too much",
    "sent": "The numbers are right; it sends too much, or too little",
    "hidden": "The numbers and bytes are right; it is slow",
}
HINTS = {
    "hang": "One rank waits for what another does not do.",
    "error": "Look at the rank that failed first: the others' errors follow from its.",
    "loss 1": "Forward: the tokens, the part of a matrix that a rank takes, who adds up the parts.",
    "norm 1": "Backward or clipping. A norm of N times or 1/N of the right one: divided too seldom or often; "
    "of 1/√N: of one rank's part. The losses may stay right: Adam and clipping hide a factor.",
    "loss 2": "The update. Step 2's norm alone is wrong: old gradients are still there. Its loss is wrong: "
    "not all weights were stepped, or their new values are not everywhere.",
    "weights": "What is gathered for `--save`.",
    "held": "What should be freed is not, or too late.",
    "sent": "In every microbatch instead of the last, or not at all.",
    "hidden": "Communication no longer hides behind computation.",
}
CAUSES = {  # what a mutant's old or new text has, the first that fits
    "a sum or a copy is in too few bits": r"float32|float64|bfloat16|double|_foreach_copy_|part\.dtype",
    "counted on several ranks, or on one alone": r"rank\(\) == 0|counted|inside",
    "a collective is missing, one too many, or over the wrong ranks": r"all_reduce\(|dist\.broadcast|"
    r"group(?!\[)|average|tp_sum|get_world_size\(\), shard|get_rank\(|syncing|is_last_backward|total\.add_",
    "a wait is missing, too early or too late": r"\bwait\b|finish|reduce_job|submit|prefetch\(|previous",
    "divided by the wrong number, or not at all": r"^/ | / |/=|div|world_size",
    "what is old is still there: not zeroed or freed": r"zero_|None|resh|resize_|clear\(|popleft|weakr|slice",
    "not copied: shared, or not sent": r"copy(?!_\(torch)|(rows|weight)\.detach| = self\.shard$|= view",
    "the wrong part, or another order": r"\[|split|flip|roll|dict\(|stages|seed|for r in|dp_rank|below",
    "a case is left out, or a condition is wrong": r"\bif |\band |\bor |\belse | < ",
}
OTHER = "a slip in the formula itself"
PHASES = {  # of a mutant's function and line, the first that fits: what --proof takes to be right
    "save": r"unsplit|\.average\(\)",
    "clip": r"clip_grad_norm_|Offload\.step|self\.max_norm =",
    "optimizer": r"newton_schulz|Muon\.step|broadcast|accumulating|DiLoCo(?!\.\w+_all_reduce)|MasterWeights|"
    r"Unit\.update|make_shard|pull",
    "forward": r"^train.*(microbatches\(|GPT\(config\)|weight|shard\()",
    "loss": r"shard\(targets|cross_entropy|CrossEntropy|sum_of_losses|^train|forward_backward",
    "reduction": r"reduce|collect|finish|gather_chunks|sum_gradients|average_gradients|Pipeline\.step|Bucket|"
    r"Server|HSDP|gradient_ready|inner_step|Unit",
    "backward": r"backward:|_weight_gradients|deferred_linear|replicate",
}
promises.SECONDS = 15  # until a run counts as hanging


def differs(found, right):
    """What shows first of a run beside the run of the lesson as it is; "" if nothing does."""
    if "error" in found:
        return "hang" if found["error"].startswith("it hangs") else f"error {error_of(found['error'])}"
    first = []  # (step, what): 2 stands for all from 2 on
    for what, key in ("loss", "losses"), ("norm", "grad_norms"):
        for step, (own, other) in enumerate(zip(found[key], right[key]), 1):
            if not abs(own - other) < 1e-6:
                first.append((min(step, 2), what))
    if first:
        step, what = min(first)
        return "loss 2" if step == 2 else f"{what} 1"
    if promises.differ_in(found["weights"], right["weights"], 1e-6):
        return "weights"
    for part, column in (("held", "measured"), ("sent", "wire")):
        for name, row in right[part].items():
            own = found[part].get(name, {}).get(column, 0)
            if abs(own - row[column]) > 0.1 * row[column]:
                return f"{part} {name}"
    own, other = (sum(result["hidden"].values()) for result in (found, right))
    return "hidden" if own < other / 2 else ""


def error_of(text):
    """The kind and the beginning of an error's message, without numbers."""
    text = re.sub(r"^rank \d+, (line \S+: )?", "", text)
    return re.sub(r"\d+", "N", text)[:60].strip()


def observe(path, lesson):
    """{run: what differs in it}."""
    seen = {}
    for name, (size, flags) in RUNS.items():
        if name == "4 ranks" and (seen.get("1 rank") or seen.get("2 ranks")):
            continue  # what shows on fewer is not to be found on 4 first
        if size in SIZES.get(lesson, range(1, 5)):
            right = run(f"{ROOT}/{lesson}.py", lesson, size, flags)
            seen[name] = differs(run(path, lesson, size, flags), right)
            if seen[name] == "hang":
                break  # each takes its time
    return seen


def where(seen):
    """The runs in which it shows, in words."""
    shows = [name for name, what in seen.items() if what]
    if len(shows) == 1 < len(seen) and shows[0] in ONLY:
        return f"only {ONLY[shows[0]]} {shows[0]}"
    if shows[0] == "1 rank":
        return "on 1 rank already"
    if shows[0] == "2 ranks":
        return "from 2 ranks on" if seen.get("3 ranks", True) else "on 2 ranks, not on 3"
    if shows[0] in ("3 ranks", "4 ranks"):
        return f"from {shows[0]} on"
    return "with several microbatches, and in bf16"


def cause_of(old, new):
    return next((cause for cause, pattern in CAUSES.items() if re.search(pattern, f"{old} {new}")), OTHER)


def function_at(source, line):
    """The qualified name of the function around a line."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.lineno <= line <= node.end_lineno:
            names.append(node.name)
    return ".".join(names)


def phase_of(where, symptom):
    """The phase in which a mutant of a function and line shows first: not forward, if the loss is right."""
    phase = next((phase for phase, pattern in PHASES.items() if re.search(pattern, where)), "forward")
    return "backward" if phase in ("forward", "loss") and symptom == "norm 1" else phase


def tables(known):
    """The tables of docs/trouble.md: for each symptom the lessons, in reading order."""
    rows = defaultdict(lambda: defaultdict(list))
    mutants = {key: value for key, value in find_mutants().items() if key in known}
    for key, (lesson, old, new) in mutants.items():
        shown = [what for what in known[key].values() if what]
        if shown:
            source = (ROOT / f"{lesson}.py").read_text()
            function = function_at(source, source.partition(old)[0].count("\n") + 1) or "the toy model"
            symptom = next(name for name in SYMPTOMS if shown[0].startswith(name))
            rows[symptom][lesson, where(known[key]), cause_of(old, new)].append(f"`{function}`")
    count = sum(len(links) for section in rows.values() for links in section.values())
    yield f"Of {len(mutants)} mutants that ran {count} show in these runs, the others in a test of their own."
    lessons = re.search(r"LESSONS=\((.*?)\)", (ROOT / "run.sh").read_text(), re.S)[1].split()
    for symptom in filter(rows.get, SYMPTOMS):
        yield f"\n### {SYMPTOMS[symptom]}\n\n{HINTS[symptom]}\n"
        yield "| lesson | where | what it was | in |\n|---|---|---|---|"
        for (lesson, place, cause), links in sorted(
            rows[symptom].items(), key=lambda row: lessons.index(row[0][0])
        ):
            yield f"| {lesson} | {place} | {cause} | {', '.join(dict.fromkeys(links))} |"


def page(known):
    """docs/trouble.md with these tables."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + "\n".join(tables(known)) + "\n" + END + rest.partition(END)[2]


def wrong_number(seen):
    """(run, what) of the first run in which a number is wrong; or None."""
    return next((run for run in seen.items() if re.match("loss|norm|weights", run[1])), None)


def say(path, lesson):
    """[phase, function] that tools/diverge.py says of a mutant; [] if it shows no wrong number."""
    shown = wrong_number(json.loads(SEEN.read_text()).get(Path(path).stem.replace("-", " "), {}))
    if not shown:
        return []
    if run.cache_info().currsize > 8:  # what is recorded of a run is large
        run.cache_clear()
    first, _ = diverge.diverge(path, lesson, *RUNS[shown[0]])
    return [first["phase"], diverge.function_of(first)] if first else ["nothing", ""]


def proof():
    """Of the mutants that show a wrong number: is the phase right, is the function?"""
    known, said = json.loads(SEEN.read_text()), observe_new(SAID, say, find_mutants())
    right = Counter()
    for key, (lesson, old, new) in find_mutants().items():
        if said.get(key):
            source = (ROOT / f"{lesson}.py").read_text()
            line = source.partition(old)[0].count("\n") + 1
            function = function_at(source, line)
            where, what = wrong_number(known[key])
            phase = phase_of(f"{function}: {source.splitlines()[line - 1]} {new}", what)
            found = said[key][0] == phase, said[key][1] == function
            right.update(mutants=1, phases=found[0], functions=found[1])
            if not all(found):
                print(key, where, what, "|", phase, function, "| said", *said[key])
    print(
        f"of {right['mutants']} mutants: the phase of {right['phases']}, the function of {right['functions']}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--proof", action="store_true")
    if parser.parse_args().proof:
        proof()
    else:
        PAGE.write_text(page(observe_new(SEEN, observe, find_mutants())))
