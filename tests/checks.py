"""What tests of several lessons check: functions of a lesson's name, or a mutant's path, that assert."""

from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import torch

from tests.harness import TINY, apart, crew, load, on_ranks, plain_of, run_of, said, spec, train, world

EXACT = f"{TINY} --batch 36 --clip 0.5 --lr 0.01 --dtype fp64"


def oracle(name, flags):
    """The run with these flags that this lesson's is to equal: single.py's, or the one that PLAIN names."""
    plain, own = plain_of(name)
    return train(plain, 1, f"{own} {flags}".strip())


def check_parity(name, size=2, flags="--accum 3", own_flags=""):
    """Losses, gradient norms and weights are single.py's."""
    flags = f"{EXACT} {flags}"
    plain, weights = oracle(name, flags)
    result, own = train(name, size, f"{flags} {own_flags}".strip())
    assert apart(result["losses"], plain["losses"]) < 1e-10, "losses differ"
    if spec(name).norms:
        assert apart(result["grad_norms"], plain["grad_norms"]) < 1e-10, "gradient norms differ"
    assert apart(own, weights) < 1e-9, "weights differ"


def check_masters(name, size=2):
    """In bf16, steps too small for a bf16 weight add up in an fp32 copy of it."""
    flags = f"{TINY} --steps 8 --lr 2e-5 --clip inf --batch 24 --accum 2"
    _, start = oracle(name, f"{flags} --steps 1 --lr 0")
    _, plain = oracle(name, flags)
    _, weights = train(name, size, f"{flags} --dtype bf16")
    keys = [key for key in plain if "qkv.weight" in key]
    moved = sum(((weights[key].float() - start[key]) * (plain[key] - start[key])).sum() for key in keys)
    expected = sum((plain[key] - start[key]).square().sum() for key in keys)
    assert moved > 0.5 * expected, f"bf16 weights moved by {moved / expected:.2f} of fp32 weights' way"
    assert all(weights[key].dtype != start[key].dtype for key in keys), "not bf16"


def optimizers_made(name, flags):
    """On a rank: the options of every AdamW that a lesson makes."""
    made, adamw = [], torch.optim.AdamW

    def make(params, lr, **options):
        made.append({"lr": lr, **options})
        return adamw(params, lr, **options)

    with mock.patch("torch.optim.AdamW", make):
        lesson = load(name)
        lesson.train(lesson.parse(flags.split()))
    return made


@on_ranks(2)
def check_peers(run):
    """Weights are those of PyTorch's own modules, which bench/bench.py races (DeepSpeed has no fp64)."""
    name, *own = run.split()
    flags = f"{TINY} --dtype fp64 --accum 3 --clip 0.5 --lr 0.01".split()
    bench = SimpleNamespace(also=[])
    race = load("bench/bench").Race(name, bench, [*flags, *own])
    titles = [*race.ours, *(title for title in race.peers if "DeepSpeed" not in title)]
    assert len(titles) > 1, "no peer"
    tokens = sum(inputs.numel() for inputs, *_ in race.part)
    half = race.config.batch * race.config.context // 2
    assert tokens == half or race.part is race.batches, "compute alone has other tokens"
    with TemporaryDirectory() as folder:
        assert race.compare(titles, folder) < 1e-12, f"not the weights of {titles}"


def slack(name, weights, size, flags):
    """{what is held: (elements that may be missing, elements that may be too many)}, and of all else.

    Padding; optimizers count steps; a parameter's gradient is on its way from autograd; the two numbers that
    a norm keeps of a token have the width of bf16 on a CPU; and gloo may still hold what it sent last."""
    padding = 8 * len(weights) * size
    largest = max(tensor.numel() for tensor in weights.values())
    block = sum(tensor.numel() for key, tensor in weights.items() if key.startswith("blocks.0."))
    root = sum(tensor.numel() for key, tensor in weights.items() if not key.startswith("blocks."))
    own = spec(name).slack
    flying, added = own(root, block, size, flags) if own else (0, 0)
    of_norms = 36 * 16 * sum("norm" in key for key in weights)
    slack_of = {"gradients": (flying + padding, largest + added + padding)}
    slack_of["activations"] = of_norms, padding + of_norms
    return slack_of, (padding, padding)


def check_ledger(name, size=4, flags="--accum 3", job=f"{TINY} --steps 2 --batch 36"):
    """Bytes held and sent are the formulas of the docstring."""
    result, weights = train(name, size, f"--dtype fp32 {job} {flags}", watched=True)
    slack_of, otherwise = slack(name, weights, size, flags)
    for part, row in result["held"].items():
        more = row["measured"] - row["formula"]
        least, most = slack_of.get(part, otherwise)
        assert -4 * least <= more <= 4 * most, f"{part}: {more:+.0f} bytes from the formula"
    assert "foreign read" not in result["sent"], "a storage of another thread is read"
    for part, row in result["sent"].items():
        if part in spec(name).uncounted:
            continue
        more = row["wire"] - row["formula"]
        most = 0 if run_of(name)[0] else 12 * otherwise[0]  # threads pad nothing
        assert abs(more) <= most, f"{part}: sent {more:+.0f} bytes from the formula"


def end_of(name, flags):
    """On a rank: (exit code, lines on stderr, losses and norms)."""
    lesson, steps = load(name), []
    lesson.print_step = lambda config, step, loss, norm, started: steps.append((loss.item(), norm.item()))
    _, lines, code = said(lambda: lesson.train(lesson.parse(flags.split())))
    if isinstance(code, str):  # sys.exit("what is wrong") says it on stderr, and ends with 1
        lines, code = [*lines, code], 1
    return code, lines, steps


def refused(name, flags):
    return end_of(name, flags)[:2]


def check_refusal(name, flags, size=2):
    """All ranks end with a code that is not 0, before a step; the last line of rank 0 names the flag."""
    ranks, all_flags = crew(name, size, f"{TINY} {flags}")
    ends = world(ranks).run(end_of, name, all_flags)
    assert all(code and not steps for code, _, steps in ends), f"{flags}: not refused by all: {ends}"
    last = ends[0][1][-1]
    assert flags.split()[0] in last, f"{flags}: its last line does not name the flag: {last}"


def steps_of(name, size, flags):
    """Losses and norms of a run, or [] if it was refused."""
    ranks, flags = crew(name, size, flags)
    ends = world(ranks).run(end_of, name, flags)
    assert len({code for code, *_ in ends}) == 1, f"ranks end in different ways: {ends}"
    code, lines, steps = ends[0]
    assert bool(code) != bool(steps), f"exit code {code} after {len(steps)} steps: {lines}"
    return steps
