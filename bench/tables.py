"""Tables of docs/results that formulas make, without a measurement: in seconds, on any machine the same.

    python bench/tables.py idle       pipelines' idle time by tools/bubble.py, beside the published
    python bench/tables.py flight     what pipelines' ranks hold
    python bench/tables.py zb-v       pipeline_v.py's order beside torch's
    python bench/tables.py owners     how evenly muon.py spreads Newton-Schulz over the ranks
    python bench/tables.py h200       plan.py beside docs/results/gpu.json
    python bench/tables.py gpts       plan.py beside table 1 of arXiv 2104.04473
    python bench/tables.py llama      plan.py beside table 4 of arXiv 2407.21783
    python bench/tables.py experts    plan.py with experts, with and without ZeRO-3

Tests take the published figures from here.
"""

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.pipelining import schedules

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import muon  # noqa: E402
import pipeline  # noqa: E402
import pipeline_v  # noqa: E402
import plan  # noqa: E402
import zero_bubble  # noqa: E402
from tools.bubble import bubble_rate  # noqa: E402

LESSON_OF = dict.fromkeys(["naive", "gpipe", "1f1b", "interleaved"], pipeline)
LESSON_OF |= {"zb-h1": zero_bubble, "zb-h2": zero_bubble, "zb-v": pipeline_v}
PUBLISHED = [  # arXiv 2401.10241, 8 stages: microbatches, T_F, T_B, T_W, T_comm of table 9, rates of table 5
    (24, 18.522, 18.086, 9.337, 0.601, {"1f1b": "0.2431", "zb-h1": "0.1585", "zb-h2": "0.1083"}),
    (32, 18.513, 18.086, 9.331, 0.626, {"1f1b": "0.1985", "zb-h1": "0.1242", "zb-h2": "0.0837"}),
    (64, 18.546, 18.097, 9.321, 0.762, {"1f1b": "0.1240", "zb-h1": "0.0674", "zb-h2": "0.0444"}),
]
# Table 1 of arXiv 2104.04473: G parameters, heads, width, layers, t, p, GPUs, batch, TFLOP/s a GPU, and
GPTS = [  # sequences at a time, from Megatron-LM's examples/sc21/run_table_1.sh
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 16), (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 16),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 16), (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 8),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 4), (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 2),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 2), (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 1),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 1), (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 1),
]  # fmt: skip
LLAMA = [(8192, 1, 8192, 430), (16384, 1, 8192, 400), (16384, 16, 131072, 380)]  # GPUs, C, s, TFLOP/s a GPU
MIXTRAL = "--params 7241732096 --layers 32 --heads 32 --hidden 4096 --seq 4096 --vocab 32000"
MIXTRAL += " --experts 8 --top-k 2 --mixtures 32 --expert-params 176160768"
DEEPSEEK = "--params 19.5b --layers 61 --heads 128 --hidden 7168 --seq 4096 --vocab 129280"
DEEPSEEK += " --experts 256 --top-k 8 --mixtures 58 --expert-params 44040192 --recompute full"
STRATEGY = {"zero1.py": "ZeRO-1", "zero3.py": "ZeRO-3", "FSDP2": "ZeRO-3"}  # of gpu.json's rows; others: DP


def show(head, rows):
    head, *lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    print(head, "|" + "---|" * head.count(" | ") + "---|", *lines, sep="\n")


def idle():
    """Part of the time between a rank's first action and its last. F = B = W, and messages take no time."""
    names = [*LESSON_OF]
    rows = []
    for m in (4, 8, 16):
        schedules_of = {name: LESSON_OF[name].build_schedule(name, 4, m) for name in names}
        rates = [f"{bubble_rate(schedule, 1, 1, 1):.4f}" for schedule in schedules_of.values()]
        rows.append([f"4 ranks, {m} microbatches", *rates])
    for m, *times, published in PUBLISHED:
        rates = []
        for name in names:
            schedule = LESSON_OF[name].build_schedule(name, 8, m)
            share = 2 if name in ("interleaved", "zb-v") else 1  # two stages a rank, of half the length
            rate = bubble_rate(schedule, *(t / share for t in times[:3]), times[3])
            rates.append(f"{rate:.4f}" + (f", published {published[name]}" if name in published else ""))
        rows.append([f"8 ranks, {m} microbatches, table 9's times", *rates])
    show(["", *names], rows)


def in_flight(actions):
    """The most forwards whose backward, W if there is one, has not been."""
    end = "W" if any(action.op == "W" for action in actions) else "B"
    return max(itertools.accumulate((action.op == "F") - (action.op == end) for action in actions))


def flight():
    """Of 8 microbatches, or of twice as many halves."""
    rows = []
    for name, lesson in LESSON_OF.items():
        unit = "half stages" if name in ("interleaved", "zb-v") else "stages"
        held = [map(in_flight, lesson.build_schedule(name, p, 8)) for p in (2, 4)]
        rows.append([name, unit, *(", ".join(map(str, numbers)) for numbers in held)])
    show(["", "of", "2 ranks", "4 ranks"], rows)


def torchs_order(p, m):
    """What ScheduleZBVZeroBubble lets each rank do, as the lesson's Actions."""
    ops = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    order = []
    for rank in range(p):
        own = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m, rank=rank)
        actions = filter(None, schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(own, rank))
        order.append([pipeline_v.Action(ops[kind.name], stage, j) for stage, kind, j, _ in actions])
    return order


def zb_v():
    numbers = (2, 3, 4, 6, 8, 12, 14)
    rows = []
    for p in (4, 8):
        both = [(pipeline_v.build_schedule("zb-v", p, m), torchs_order(p, m)) for m in numbers]
        rates = [[abs(bubble_rate(order, 1, 1, 1)) for order in pair] for pair in both]
        rows.append([f"{p} ranks", *(f"{own:.3f} / {theirs:.3f}" for own, theirs in rates)])
    show(["microbatches", *numbers], rows)


def owners():
    """Newton-Schulz's FLOPs of the most loaded rank, over the mean."""
    worlds = (2, 3, 4, 8, 16, 32, 64, 128)
    rows = []
    for size in ("toy", "small", "gpt2-xl"):
        with torch.device("meta"):
            model = muon.GPT(muon.parse(["--size", size]))
        blocks = [module for module in model.modules() if isinstance(module, muon.Block)]
        matrices = [param for block in blocks for param in block.parameters() if param.ndim == 2]
        ratios = []
        for n in worlds:
            loads = [0.0] * n
            for matrix, rank in muon.assign_owners(matrices, n).items():
                short, long = sorted(matrix.shape)
                loads[rank] += 2 * short**2 * long + short**3
            ratios.append(f"{max(loads) * n / sum(loads):.2f}")
        rows.append([size, *ratios])
    show(["ranks", *worlds], rows)


def h200():
    made = json.loads((ROOT / "docs/results/gpu.json").read_text())
    rows = []
    for size, sequences in made["sequences"].items():
        job = plan.parse(f"--size {size} --micro-batch {sequences} --gpu h200 --gpus 1".split())
        for measured in made["models"][size]:
            found = plan.row(job, STRATEGY.get(measured["title"], "DP"))
            ms, mfu = found["ms"]["sum"], f"{measured['MFU %']:.0f} %"
            row = [f"{size}, {sequences} sequences", measured["title"], f"{ms:.1f} ms, {found['mfu']:.0%}"]
            row += [f"{measured['ms']:.1f} ms, {mfu}", f"{ms / measured['ms'] - 1:+.0%}"]
            rows.append([*row, f"{found['bytes']['peak'] / 1e9:.1f}", f"{measured['peak GB']:.1f}"])
    show(["", "", "plan.py, MFU", "measured", "", "plan.py, GB", "measured"], rows)


def parts(ms):
    """What a step waits for, in parts of it."""
    names = ("computation", "links inside", "links between", "idle")
    return [f"{ms.get(name, 0) / ms['sum']:.0%}" for name in names]


def gpts():
    rows = []
    for billions, heads, width, layers, t, p, gpus, batch, published, at_a_time in GPTS:
        flags = f"--layers {layers} --heads {heads} --hidden {width} --seq 2048 --vocab 51200 --gpus {gpus}"
        flags += f" --micro-batch {at_a_time} --accum {batch / gpus / at_a_time} --gpu a100 --attention math"
        job = plan.parse(f"{flags} --recompute full".split())
        ms = plan.row(job, "DP", t, p)["ms"]
        flops = 96 * batch * 2048 * layers * width**2  # by the paper's (3), with recomputation
        flops *= 1 + 2048 / 6 / width + 51200 / 16 / layers / width
        speed = flops / gpus / ms["sum"] / 1e9
        row = [billions, f"{t}, {p}, {gpus // t // p}", at_a_time, published, f"{speed:.0f}"]
        rows.append([*row, f"{speed / published - 1:+.0%}", *parts(ms)])
    head = ["G parameters", "t, p, d", "at a time", "published", "plan.py", ""]
    show([*head, "computation", "links inside", "between", "idle"], rows)


def llama():
    rows = []
    for gpus, cp, seq, published in LLAMA:
        row = [gpus, f"8, {cp}, 16, {gpus // 128 // cp}", published]
        for schedule in ("1f1b", "zb-v"):
            flags = "--params 405b --layers 126 --heads 128 --hidden 16384 --vocab 128256 --sequence-parallel"
            flags += f" --seq {seq} --gpus {gpus} --cp {cp} --accum {2**24 / seq / gpus}"
            job = plan.parse(f"{flags} --schedule {schedule}".split())
            found = plan.row(job, "ZeRO-1", 8, 16)
            speed = found["mfu"] * job.peak_tflops
            row += [f"{speed:.0f}", f"{speed / published - 1:+.0%}", *parts(found["ms"])[2:]]
        rows.append(row)
    head = ["GPUs", "t, C, p, d", "published"]
    show([*head, "1f1b", "", "between", "idle", "zb-v", "", "between", "idle"], rows)


def experts():
    rows = []
    for name, flags in {"Mixtral 8x7B": MIXTRAL, "DeepSeek-V3": DEEPSEEK}.items():
        for gpus in (64, 2048):
            job = plan.parse(f"{flags} --gpus {gpus}".split())
            found = [plan.row(job, kind) for kind in ("EP", "ZeRO-3 + EP")]
            cells = [f"{x['bytes']['peak'] / 1e9:.1f}, {'yes' if x['fits'] else 'no'}" for x in found]
            rows.append([name, gpus, *cells])
    show(["", "GPUs", "EP: GB of a GPU, does it fit?", "ZeRO-3 + EP"], rows)


TABLES = {"idle": idle, "flight": flight, "zb-v": zb_v, "owners": owners, "h200": h200, "gpts": gpts}
TABLES |= {"llama": llama, "experts": experts}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in TABLES:
        print(f"tables.py: must be one of {', '.join(TABLES)}", file=sys.stderr)
        sys.exit(2)
    TABLES[sys.argv[1]]()
