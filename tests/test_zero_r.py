"""What is special to zero_r.py; what it shares with checkpointing.py is in tests/test_checkpointing.py."""

from functools import partial

import torch

from tests.gpu import on_gpu, together
from tests.harness import Lesson, holds, mutants

SLACK = "1.05"
LESSON = Lesson(variants=("--policy offload",), own={"--policy": ("partitioned offload", "full")})


def drop_and_change(lesson, config):
    """A checkpoint is dropped, and its input changed in place, while it is on its way to the host."""
    device, _ = lesson.set_up(config)
    x, store = torch.ones(96, device=device), lesson.Partitioned(device, offload=True)
    for _ in range(2):
        y = lesson.checkpoint(torch.sin, x, store=store)
        x += y


check_offload = partial(together, on_gpu, rows=[(2, 1, 3, "--policy offload")])
check_dropped = partial(together, on_gpu, rows=[(2, 1, 3, "--dtype bf16", drop_and_change)])
test_a_checkpoint_may_be_dropped_and_its_input_changed = holds("zero_r", check_dropped)
GPU_MUTANTS = [
    (
        "zero_r",
        "part.record_stream(self.stream)",
        "pass",
        check_offload,
        "takes memory that another stream still uses",
    ),
    (
        "zero_r",
        "part.record_stream(self.stream)",
        "pass",
        check_dropped,
        "takes memory that another stream still uses",
    ),
    (
        "zero_r",
        "F.pad(own, (0, size - len(own)))",
        "own",
        check_dropped,
        "uses what another stream has not finished",
    ),
    (
        "zero_r",
        "self.stream.wait_stream(torch.cuda.current_stream(self.device))",
        "pass",
        check_offload,
        "uses what another stream has not finished",
    ),
    (
        "zero_r",
        "            work = all_gather(flat",
        "        work = all_gather(flat",
        check_offload,
        "launches a collective on what another stream has not finished",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
