"""A lesson beside PyTorch's own modules and DeepSpeed: same weights, batches and threads, turn by turn.

    python tools/bench.py ddp --ranks 2 --size small
    python tools/bench.py zero3 --hosts 2 --rate 1gbit --size small     (Linux and root: see tools/hosts.sh)
    python tools/bench.py zero3 --also="--prefetch 0" --also=--keep     (what each idea buys)
    python tools/bench.py ddp --ranks 1 --size small                    (its own cost, beside the plain loop)
    python tools/bench.py pipeline --ranks 2 --size small --accum 8     (each schedule beside torch's)
    python tools/bench.py dp_threads --ranks 2 --size small             (threads beside processes)
    python tools/bench.py dp_async --ranks 4 --also="--mode asp" --slow 0=4

First a few steps of each, which must end in equal weights. Then rounds: in each, every contender runs --steps
steps, and each round starts with another one. A line shows the median time of a step, and the ratio of the
lesson's time to it: its median, least and greatest over the rounds. DeepSpeed takes part if it is installed.

dp_threads and dp_async are one process, so they and their contenders are run as commands, each once a
round, for --steps (20) steps. A run's time is the median of its steps, so its start is left out. Fresh loss
is that of the saved weights on batches that no run has seen.

Other flags are the lessons': --size, --batch, --accum, --dtype, --device, --clip, --prefetch ...
"""

import argparse
import importlib
import json
import logging
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ddp  # noqa: E402  (found through the line above)

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 1e-2}  # of weights after 3 steps


class Contender:
    """A model of its own, one way to train it, and its times."""

    def __init__(self, name, model, wrapped, optimizer, weights=None, clip=None):
        self.name, self.model, self.wrapped, self.optimizer, self.times = name, model, wrapped, optimizer, []
        self.weights = weights or model.state_dict
        self.clip = clip or (
            lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf"))
        )

    def step(self, batches, config):
        for i, batch in enumerate(batches, start=1):
            wait = i == len(batches) or not hasattr(self.wrapped, "no_sync")
            with nullcontext() if wait else self.wrapped.no_sync():
                (self.wrapped(*batch) / len(batches)).backward()
        self.clip(config.clip)
        self.optimizer.step()
        self.model.zero_grad()

    def time(self, batches, config):
        """ms of a step on the slowest rank, over --steps steps."""
        finish()
        start = time.perf_counter()
        for _ in range(config.steps):
            self.step(batches, config)
        finish()
        self.times.append(1e3 * (time.perf_counter() - start) / config.steps)


class DeepSpeed(Contender):
    """Its engine clips and steps by itself."""

    def __init__(self, stage, model, config, optimizer):
        self.name, self.model, self.times = f"DeepSpeed stage {stage}", model, []
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        import deepspeed

        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": config.batch // dist.get_world_size() // config.accum,
                "gradient_accumulation_steps": config.accum,
                "gradient_clipping": config.clip,
                "bf16": {"enabled": config.dtype == "bf16"},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
            },
        )
        self.gathered = lambda: deepspeed.zero.GatheredParameters(list(model.parameters()))

    def step(self, batches, config):
        for batch in batches:
            self.engine.backward(self.engine(*batch))
            self.engine.step()

    def weights(self):
        with self.gathered() if "3" in self.name else nullcontext():
            return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


class Pipelined(Contender):
    """pipeline.py's own, or a schedule of torch.distributed.pipelining on the same stages."""

    def __init__(self, name, lesson, config, device, peer=None):
        self.name, self.times, self.peer = name, [], peer
        self.model = new_model(lesson, config, device)
        layers = [lesson.Embed(self.model), *self.model.blocks, lesson.Head(self.model)]
        n_stages, rank = dist.get_world_size() * config.chunks, dist.get_rank()
        ends = lesson.split_layers(lesson.layer_costs(layers, None, "params"), n_stages)
        schedule = lesson.build_schedule(config.schedule, dist.get_world_size(), config.accum, config.chunks)
        self.pipe = lesson.Pipeline(layers, ends, lesson.mean_loss, schedule)
        self.pipe.device = device
        params, options = self.pipe.parameters(), {"lr": config.lr, "fused": True}
        self.optimizer = lesson.Optimizer(params, lesson.OPTIMIZERS[config.optim], **options)
        self.weights = lambda: self.pipe.gather(self.optimizer.state_dict_of(self.model)) or {}
        if peer:
            stages = [
                pipelining.PipelineStage(stage, int(number), n_stages, device)
                for number, stage in self.pipe.stages.items()
            ]
            stages = stages if config.chunks > 1 else stages[0]
            self.runner = getattr(pipelining, peer)(stages, config.accum, loss_fn=lesson.mean_loss)
            self.first, self.last = rank == 0, rank == dist.get_world_size() - 1

    def step(self, batches, config):
        inputs, targets = zip(*batches)
        if self.peer:
            whole = (torch.cat(inputs),) if self.first else ()
            self.runner.step(*whole, **({"target": torch.cat(targets), "losses": []} if self.last else {}))
            for param, tie in self.pipe.tied:
                dist.all_reduce(param.grad, group=tie)
        else:
            self.pipe.step(inputs, targets)
        self.pipe.clip_grad_norm_(config.clip)
        self.optimizer.step()
        self.model.zero_grad()


# {schedule of pipeline.py: that of torch.distributed.pipelining}
SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}


def finish():
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # between timed stretches, never within a step
    dist.barrier()


def ours(lesson, name, config, device):
    """The lesson, put together as in its own train()."""
    model = new_model(lesson, config, device)
    is_unit = lambda submodule: isinstance(submodule, lesson.UNITS[config.unit])  # noqa: E731
    wrap = {
        "ddp": lambda: lesson.DDP(model, config.bucket_mb, config.overlap),
        "zero1": lambda: lesson.ZeRO1(model, is_unit, config.overlap),
        "zero2": lambda: lesson.ZeRO2(model, is_unit, config.overlap),
        "zero3": lambda: lesson.ZeRO3(model, is_unit, config.prefetch, config.keep),
    }
    wrapped = wrap[lesson.__name__]()
    over = model.parameters() if lesson.__name__ == "ddp" else wrapped
    optimizer = lesson.Optimizer(over, lesson.OPTIMIZERS[config.optim], lr=config.lr, fused=True)
    weights = lambda: optimizer.state_dict_of(model)  # noqa: E731
    return Contender(name, model, wrapped, optimizer, weights, wrapped.clip_grad_norm_)


def new_model(lesson, config, device):
    torch.manual_seed(config.seed)
    return lesson.GPT(config).to(device, lesson.DTYPES[config.dtype])


def peers(lesson, first, config, device):
    """Yield the contenders, their models all with the same weights as the first's, the lesson's."""
    name, options = lesson.__name__, {"lr": config.lr, "fused": True}
    optimizer_class = lesson.OPTIMIZERS[config.optim]

    def plain(title, wrap, make=None):
        model = new_model(lesson, config, device)
        if make:
            return Contender(title, model, wrap(model), make(model.parameters(), optimizer_class, **options))
        wrapped = wrap(model)
        optimizer = ddp.Optimizer(model.parameters(), optimizer_class, **options)
        return Contender(title, model, wrapped, optimizer, lambda: optimizer.state_dict_of(model))

    yield plain("compute alone", lambda model: model)
    if name in ("ddp", "zero1"):
        yield plain("torch DDP, defaults", DistributedDataParallel)
    if name == "ddp":
        largest = max(bucket.flat.nbytes for bucket in first.wrapped.buckets) / 2**20
        title, same = f"torch DDP, {largest:.1f} MB buckets", {"bucket_cap_mb": largest}
        yield plain(title, lambda model: DistributedDataParallel(model, **same))
        views = same | {"gradient_as_bucket_view": True}
        yield plain(title + ", views", lambda model: DistributedDataParallel(model, **views))
    if name == "zero1":
        yield plain("DDP + ZeroRedundancyOptimizer", DistributedDataParallel, ZeroRedundancyOptimizer)
    if name == "zero3":
        yield fsdp2(lesson, config, device, optimizer_class, options)
    if name.startswith("zero") and importlib.util.find_spec("deepspeed"):
        model = new_model(lesson, config, device)
        yield DeepSpeed(int(name[-1]), model, config, optimizer_class(model.parameters(), **options))


def fsdp2(lesson, config, device, optimizer_class, options):
    """Units as in zero3.py; in bf16 with fp32 masters, as FSDP2 does it."""
    torch.manual_seed(config.seed)
    model = lesson.GPT(config).to(device, lesson.DTYPES["fp32" if config.dtype == "bf16" else config.dtype])
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if config.dtype == "bf16" else None
    policy = {"mp_policy": mixed} if mixed else {}
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    optimizer = optimizer_class(model.parameters(), **options)

    def whole(tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    weights = lambda: {name: whole(tensor) for name, tensor in model.state_dict().items()}  # noqa: E731
    clip = lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf"))  # noqa: E731
    return Contender("torch FSDP2", model, model, optimizer, weights, clip)


def main(lesson, bench, flags):
    config = lesson.parse(flags)
    device, text = lesson.set_up(config)
    torch.set_num_threads(1)
    say = print if dist.get_rank() == 0 else lambda *line, **how: None
    share = (0, 1) if bench.lesson == "pipeline" else (dist.get_rank(), dist.get_world_size())
    batches = list(lesson.microbatches(config, text, 1, device, *share))
    if bench.lesson == "pipeline":
        first = Pipelined(f"pipeline.py {config.schedule}", lesson, config, device)
        peer = SCHEDULES.get(config.schedule)
        entries = [first]
        if peer:
            entries.append(Pipelined(f"torch {peer}", lesson, config, device, peer))
    else:
        first = ours(lesson, f"{bench.lesson}.py", config, device)
        entries = [first, *peers(lesson, first, config, device)]
    for more in bench.also:
        other = lesson.parse([*flags, *shlex.split(more)])
        lesson.set_up(other)
        name = f"{bench.lesson}.py {more}"
        make = Pipelined if bench.lesson == "pipeline" else lambda name, *rest: ours(rest[0], name, *rest[1:])
        entries.append(make(name, lesson, other, device))
    for entry in entries:
        for _ in range(3):
            entry.step(batches, config)
    expected = {key: tensor.clone() for key, tensor in first.weights().items()}
    for entry in entries[1:]:
        weights = entry.weights()  # with the help of all ranks
        pairs = ((expected[key].double(), weights[key].double()) for key in expected)
        apart = max(((a - b.to(a.device)).abs().max().item() for a, b in pairs), default=0)
        alone = entry.name == "compute alone" and dist.get_world_size() > 1
        if not alone and not apart < TOLERANCE[config.dtype]:
            sys.exit(f"{entry.name} ended {apart:.1e} from {first.name}: its time would mean nothing")
    say("after 3 steps all weights are equal (but for compute alone, which hears of one share of the batch)")
    for turn in range(bench.rounds):
        for i in range(len(entries)):
            entries[(turn + i) % len(entries)].time(batches, config)
    ratio = f"{bench.lesson}.py / this"
    say(f"{'torch ' + torch.__version__:<40}{'ms/step':>10}{ratio:>20}{'least':>8}{'most':>7}")
    table = {}
    for entry in entries:
        ratios = [a / b for a, b in zip(first.times, entry.times)]
        table[entry.name] = {"ms": statistics.median(entry.times), "ratio": statistics.median(ratios)}
        numbers = f"{statistics.median(entry.times):>10.1f}{statistics.median(ratios):>20.3f}"
        say(f"  {entry.name:<38}{numbers}{min(ratios):>8.3f}{max(ratios):>7.3f}")
    if config.json and dist.get_rank() == 0:
        Path(config.json).write_text(json.dumps(table))
    dist.destroy_process_group()


THREADS = {"dp_threads": "--replicas", "dp_async": "--workers"}
FRESH = range(10**6, 10**6 + 8)  # steps whose batches no run has seen


def launcher(ranks):
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]


def commands(bench, flags):
    """{name: command} of what is run in turn: the lesson, other flags of it, other lessons."""
    script = lambda name: [sys.executable, str(ROOT / f"{name}.py")]  # noqa: E731
    alone = [*script(bench.lesson), THREADS[bench.lesson], str(bench.ranks), *flags]
    entries = {f"{bench.lesson}.py": alone}
    entries |= {f"{bench.lesson}.py {more}": [*alone, *shlex.split(more)] for more in bench.also}
    if bench.lesson == "dp_threads":
        entries["dp_threads.py --no-threads"] = [*alone, "--no-threads"]
        entries["ddp.py"] = [*launcher(bench.ranks), str(ROOT / "ddp.py"), *flags]
        entries["single.py"] = [*script("single"), *flags]
    else:  # as many updates as asp makes, each from as many sequences, and none of them stale
        config, known = importlib.import_module("single").flags().parse_known_args(flags)
        plain = [flag for flag in flags if flag not in known]
        fewer = ["--batch", str(config.batch // bench.ranks), "--steps", str(config.steps * bench.ranks)]
        entries["single.py " + " ".join(fewer)] = [*script("single"), *plain, *fewer]
    return entries


def fresh_loss(weights, flags):
    """Mean loss of saved weights on batches of steps that were not trained on."""
    lesson = importlib.import_module("single")
    parser = lesson.flags()
    config, _ = parser.parse_known_args(flags)
    device, text = lesson.set_up(config)
    model = lesson.GPT(config).to(device)
    model.load_state_dict(weights)
    with torch.no_grad():
        batches = [next(lesson.microbatches(config, text, step, device)) for step in FRESH]
        return statistics.mean(model(*batch).item() for batch in batches)


def main_of_commands(bench, flags):
    """The table of a lesson that is one process. The weights are compared first, but for asp and ssp."""
    entries, runs, first = commands(bench, flags), {}, None
    for turn in range(bench.rounds):
        for i in range(len(entries)):
            name = list(entries)[(turn + i) % len(entries)]
            with tempfile.TemporaryDirectory() as folder:
                files = ["--json", f"{folder}/out.json", "--save", f"{folder}/out.pt"]
                subprocess.run([*entries[name], *files], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
                result = json.loads(Path(f"{folder}/out.json").read_text())
                weights = torch.load(f"{folder}/out.pt")
            first = first or weights
            apart = max((weights[key].double() - first[key].double()).abs().max().item() for key in weights)
            if bench.lesson == "dp_threads" and not apart < 10 * TOLERANCE[result["dtype"]]:
                sys.exit(f"{name} ended {apart:.1e} from the first: its time would mean nothing")
            ms = statistics.median(result["step_ms"])
            speed = result.get("sequences_per_s", math.nan)
            runs.setdefault(name, []).append((ms, speed, fresh_loss(weights, flags)))
    if bench.lesson == "dp_threads":
        print("in all runs all weights were equal at the end")
    ratio = f"{bench.lesson}.py / this"
    heading = f"{'ms/step':>10}{ratio:>22}{'least':>8}{'most':>7}{'sequences/s':>13}{'fresh loss':>12}"
    print(f"{'torch ' + torch.__version__:<40}{heading}")
    for name in entries:
        ratios = [a[0] / b[0] for a, b in zip(runs[f"{bench.lesson}.py"], runs[name])]
        ms, speed, loss = map(statistics.median, zip(*runs[name]))
        numbers = f"{ms:>10.1f}{statistics.median(ratios):>22.3f}{min(ratios):>8.3f}{max(ratios):>7.3f}"
        print(f"  {name:<38}{numbers}{speed:>13.1f}{loss:>12.4f}".replace("nan", "   "))


def parse():
    """(what is for this tool, what is for the lesson)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("lesson", choices=[*THREADS, "ddp", "zero1", "zero2", "zero3", "pipeline"])
    parser.add_argument("--ranks", type=int, default=2, help="processes (on one host)")
    parser.add_argument("--hosts", type=int, default=1, help="hosts of one rank each, in network namespaces")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, in tc's words")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--also", action="append", default=[], help="the lesson once more, with these flags")
    bench, flags = parser.parse_known_args()
    steps = "20" if bench.lesson in THREADS else "3"
    return bench, flags if "--steps" in flags else [*flags, "--steps", steps]


if __name__ == "__main__":
    bench, flags = parse()
    if bench.lesson in THREADS:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        main_of_commands(bench, flags)
    elif "RANK" in os.environ:
        main(importlib.import_module(bench.lesson), bench, flags)
    else:  # start again, on all ranks
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        start = launcher(bench.ranks)
        if bench.hosts > 1:
            start = [str(ROOT / "tools" / "hosts.sh"), str(bench.hosts), bench.rate, "--"]
            os.environ["PYTHON"] = sys.executable
        os.execv(start[0], [*start, os.path.abspath(__file__), *sys.argv[1:]])
