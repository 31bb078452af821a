"""What tests/test_nccl.py rejects by NCCL's rules, over NCCL itself, on four ranks, which may share one GPU.

    python bench/nccl_orders.py                  (about ten minutes)
    python bench/nccl_orders.py --device cpu     (a rehearsal: gloo forgives more)

Each row of ORDER changes a line of a lesson. Such a lesson should hang (then it is stopped), fail, or print
another loss than the lesson as it is, which must end: else the exit code is 1. NCCL may let a changed one end
rightly: it holds small messages until they are received, but does not promise it. Four run at a time.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu import ROOT, stop

OWN_FLAGS = {"expert_parallel": ["--dtype", "fp64"], "pipeline": ["--accum", "8"]}
OWN_FLAGS |= {"context_parallel": ["--kind", "ring"]}
OWN_FLAGS |= {"zero_bubble": ["--accum", "8"], "pipeline_v": ["--accum", "8"]}
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=4"]


def run(name, old, new, config):
    """(what happened, the last line of a step) of a lesson with `new` in the place of `old`."""
    source = (ROOT / f"{name}.py").read_text()
    assert not old or source.count(old) == 1, f"{name}.py has {source.count(old)} times: {old}"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        Path(folder, f"{name}.py").write_text(source.replace(old, new) if old else source)
        command = [sys.executable, *LAUNCH, f"{folder}/{name}.py", "--steps", "3", "--batch", "32"]
        command += ["--device", config.device, *OWN_FLAGS.get(name, [])]
        env = os.environ | {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "OMP_NUM_THREADS": "1"}
        options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True, "env": env}
        process = subprocess.Popen(command, **options)
        try:
            code = process.wait(config.seconds)
            what = f"fails, exit code {code}" if code else "ends"
        except subprocess.TimeoutExpired:
            what = "hangs"
        finally:
            stop(process)
        log.seek(0)
        steps = re.findall(r"^(step .*?) \|.* (loss \S+) \|", log.read(), re.M)
        return what, " ".join(steps[-1]) if steps else "no step"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=60, help="after which a run counts as hanging")
    config = parser.parse_args()
    sys.path += [str(ROOT), str(ROOT / "tools")]
    from tests.test_nccl import ORDER  # which takes pytest

    changed = [(name, *row[1:3]) for row in ORDER for name in row[0].split()]
    names = list(dict.fromkeys(name for name, *_ in changed))
    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        as_they_are = dict(zip(names, pool.map(lambda name: run(name, "", "", config), names)))
        for name, (what, step) in as_they_are.items():
            print(f"{name:<18}as it is: {what}, {step}", flush=True)
        for row, seen in zip(changed, pool.map(lambda row: run(*row, config), changed)):
            rightly = " | as if it were right" if seen == as_they_are[row[0]] else ""
            print(f"{row[0]:<18}{', '.join(seen)}{rightly} | {row[2]!r}", flush=True)
    print(f"{time.monotonic() - started:.0f} s")
    return int(any(what != "ends" for what, _ in as_they_are.values()))


if __name__ == "__main__":
    sys.exit(main())
