"""Ten words, and the five questions of the site's ten minutes, in the terminal: python learn.py start."""

import importlib
import json
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = """
rank            a process that takes part in training, usually one for each GPU; also its number, 0 to N - 1
world           all ranks; its size is N. A process group is some of them, such as those of one machine
torchrun        starts N ranks of a script, and tells each its rank: torchrun --nproc_per_node=4 ddp.py
collective      what all ranks of a group do together, in the same order: if one does not come, others wait
all-reduce      each rank has a tensor, and all get the sum of them
reduce-scatter  the same sum, cut into N parts, one for each rank. With an all-gather it is an all-reduce
all-gather      each rank has a part, and all get all parts. A broadcast sends one rank's tensor to all
async_op=True   starts a collective, and work.wait() ends it. What is computed meanwhile hides it
gloo            carries collectives between CPUs, on any laptop; all of these exercises run over gloo
NCCL            carries them between NVIDIA's GPUs; its wait() makes the GPU's queue wait, not the process
"""
QUESTION = r'{% call screen\("(\w+)", "\w+", "([^"]+)", ([\d.]+),\s*"([^"]+)"\) %}\n(.*?)\n{% endcall %}'
LETTERS = """In answers P is the number of parameters, N that of ranks, w and m are 4 bytes of a number, K is
8 bytes of AdamW's two moments. Answer with a number of MB, 10^6 bytes each; 'skip' shows it.
"""


def questions():
    """[(lesson, formula, how near is right, question, text)] of site/pages/ten.html."""
    found = re.findall(QUESTION, (ROOT / "site/pages/ten.html").read_text(), re.S)
    return [(name, formula, float(within), question, text) for name, formula, within, question, text in found]


def letters_of_film(name):
    """The letters of a lesson's formulas, with the flags and ranks of its film."""
    from letters import letters_of

    sys.path.insert(0, str(ROOT))
    lesson = importlib.import_module(name)
    film = json.loads((ROOT / f"docs/films/{name}.json").read_text())
    config = lesson.parse(film["flags"].split())
    config.shares = film["ranks"]
    return letters_of(lesson, config, film["ranks"], "gloo")


def megabytes_in(answer):
    """The number in an answer such as '2.5 MB', or None."""
    number = re.fullmatch(r"(\d+([.,]\d+)?) *(MB)?", answer.strip(), re.I)
    return float(number[1].replace(",", ".")) if number else None


def ask(question, right, within, formula):
    """Ask until the answer is right, or given up."""
    while True:
        answer = input(f"{question}\n> ")
        given = megabytes_in(answer)
        if given is not None and abs(given / right - 1) <= within:
            print(f"Right: {formula} is {right:.3g} MB.\n")
            return
        if answer.strip() == "skip":
            print(f"{formula} is {right:.3g} MB.\n")
            return
        if given is None:
            print("A number of MB, please, or skip.")
        else:
            print(f"Too {'little' if given < right else 'much'}. The docstring's formula: {formula}.")


def ask_all():
    from letters import evaluate

    print(WORDS)
    print(LETTERS)
    for name, formula, within, question, text in questions():
        letters = letters_of_film(name)
        print(textwrap.fill(f"{name}.py. {' '.join(text.split())}", 110))
        parameters = f"{letters['P'] / 1e6:.2f} million"
        ask(question.replace("{P}", parameters), evaluate(formula, letters) / 1e6, within, formula)
    print("Now do it: python learn.py")
