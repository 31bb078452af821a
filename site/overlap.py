"""When device, link and host of offload.py were at work in the third step of a run on one rank, as SVG.

python site/overlap.py docs/overlap-offload.svg --params --link-gbps 1 --size small --device cpu
"""

import itertools
import sys
import threading
import time
from pathlib import Path

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from figures import COLORS, STYLE, lanes

import offload

rows = {"device": [], "down": [], "up": [], "host": []}  # {what: [(started, ended, color)]}
turns = []  # (started, ended, its arguments): the device waits for weights, and then computes till the next


def timed(function, note):
    """The method, which then calls note(started, ended, its arguments)."""

    def call(self, *args):
        started = time.perf_counter()
        function(self, *args)
        note(started, time.perf_counter(), args)

    return call


def note_copy(started, ended, _):
    way = {"host_0": "down", "upload_0": "up"}[threading.current_thread().name]
    rows[way].append((started, ended, COLORS["network"]))


def note_update(started, ended, _):
    rows["host"].append((started, ended, COLORS["step"]))


def note_turn(*turn):
    turns.append(turn)


def begin(config, text, step, *more):
    now = time.perf_counter()
    turns.append((now, now, (step,)))
    return microbatches(config, text, step, *more)


def end(self, max_norm):
    note_turn(time.perf_counter(), 0, (None, "end"))
    return step(self, max_norm)


step, offload.Offload.step = offload.Offload.step, end
microbatches, offload.microbatches = offload.microbatches, begin
offload.Worker.copy = timed(offload.Worker.copy, note_copy)
offload.Unit.update = timed(offload.Unit.update, note_update)
offload.Offload._unshard = timed(offload.Offload._unshard, note_turn)
target, *flags = sys.argv[1:]
offload.train(offload.parse([*flags, "--steps", "4"]))

third, fourth = (i for i, (_, _, args) in enumerate(turns) if args in ((3,), (4,)))
for (_, started, args), (ended, _, _) in itertools.pairwise(turns[third + 1 : fourth]):
    phase = "forward" if args[1] == 1 else "backward"
    rows["device"].append((started, ended, COLORS[phase]))
first, end = turns[third][0], turns[fourth][0]
bars = {}
for name, spans in rows.items():
    inside = [span for span in spans if first <= span[0] < end]
    bars[name] = [(1e3 * (a - first), 1e3 * (b - a), color, "") for a, b, color in inside]
plt.rcParams |= STYLE
lanes(bars, f"offload.py {' '.join(flags)}: a step of {1e3 * (end - first):.0f} ms", Path(target), COLORS)
