"""How busy a node's link is during a step of a lesson: a line with averages, and a bar that is one step long.

    PYTHON=python3 bench/hosts.sh 2 1gbit -- bench/link.py ddp.py --size small --batch 8 --steps 8

Trains the unmodified lesson, while a thread on rank 0 reads every millisecond what the node has sent. The
first two steps do not count; each later one is cut into 40 equal parts. A part's busy share is its bytes
divided by what the link can carry in that time. The bar shows its mean over the steps: "#" above 3/4, "-"
from 1/4, "." below. Under it stands what rank 0 does: "f" forward, "b" backward and the messages that it
waits for, "u" clipping and the update. `python site/figures.py link` draws what --json writes.
"""

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bench import bytes_per_second, bytes_sent

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import ledger

PARTS = 40  # of a step
WARM_UP = 2  # steps


def busy_shares(samples, edges, rate):
    """The link's busy share between neighboring edges. samples: [(time, bytes)]; rate: bytes a second."""
    return np.diff(np.interp(edges, *zip(*samples))) / (rate * np.diff(edges))


def summary(samples, ends, backwards, rate):
    """What main() prints and writes. ends: when steps ended; backwards: [(begin, end)]."""
    steps = list(zip(ends[WARM_UP - 1 :], ends[WARM_UP:]))
    parts = [busy_shares(samples, np.linspace(*step, PARTS + 1), rate) for step in steps]
    seconds = np.diff(ends[WARM_UP - 1 :])
    moments = np.array(backwards).flatten()
    inside = [moments[(begin < moments) & (moments < end)] for begin, end in steps]
    turns = [np.interp(span[[0, -1]], step, [0, 1]) for span, step in zip(inside, steps)]
    return {
        "ms": 1e3 * float(np.median(seconds)),
        "MB": float(np.median(rate * seconds * np.mean(parts, axis=1))) / 1e6,
        "busy": float(np.mean(parts)),
        "shares": np.mean(parts, axis=0).tolist(),
        "backward": np.mean(turns, axis=0).tolist(),  # from where to where of a step
    }


def line_of(result):
    bar = "".join("#" if share > 0.75 else "-" if share >= 0.25 else "." for share in result["shares"])
    begin, end = (round(PARTS * share) for share in result["backward"])
    head = "{lesson}: {ms:.0f} ms a step, {MB:.1f} MB sent, link busy {busy:.0%}: ".format(**result)
    phases = f"{'f' * begin}{'b' * (end - begin)}{'u' * (PARTS - end)}"
    return f"{head}|{bar}|\n{'':<{len(head)}} {phases}"


def watch(lesson, config):
    """Run lesson.train(config) in silence: samples, the steps' ends and backwards, for summary()."""
    samples, ends, backwards = [], [], []
    backward = torch.Tensor.backward

    def sample():
        while True:
            samples.append((time.perf_counter(), bytes_sent()))
            time.sleep(1e-3)

    def timed_backward(loss, *args, **kwargs):
        begin = time.perf_counter()
        backward(loss, *args, **kwargs)
        backwards.append((begin, time.perf_counter()))

    torch.Tensor.backward = timed_backward
    lesson.print_step = lambda *_: ends.append(time.perf_counter())
    threading.Thread(target=sample, daemon=True).start()
    with contextlib.redirect_stdout(None):
        lesson.train(config)
    return list(samples), ends, backwards


def main():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--rate", default="1gbit", help="of the link, as bench/hosts.sh was told")
    parser.add_argument("--json", help="file for what is printed")
    parser.add_argument("lesson")
    given, flags = parser.parse_known_args()
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        parser.error("run it by bench/hosts.sh, which names the link to watch")
    lesson = ledger.load(given.lesson)
    config = lesson.parse(flags)
    if config.steps <= WARM_UP:
        parser.error(f"--steps {config.steps}: must be more than {WARM_UP}")
    watched = watch(lesson, config)
    if dist.get_rank() == 0:
        result = {"lesson": given.lesson, "rate": given.rate}
        result |= summary(*watched, bytes_per_second(given.rate))
        print(line_of(result), flush=True)
        if given.json:
            Path(given.json).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
