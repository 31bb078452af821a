"""What is special to zero3.py; what it shares with zero1.py and zero2.py is in tests/test_zero1.py."""

from tests.gpu import check_gpu, check_order, check_shared
from tests.harness import Lesson, mutants

LESSON = Lesson(
    variants=("--prefetch 0", "--prefetch 7", "--no-reshard"),
    own={"--prefetch": ("0 1 7", "-1 8 x")},
    slack=lambda root, block, size, flags: ((root + 2 * block) / size, 0),
    races=("",),
)
GPU_MUTANTS = [
    ("zero3", "[-self.n_shards :].zero_()", ".any().item()", check_gpu, "the host waits"),
    (
        "zero3",
        "broadcast(self.flat_param, 0",
        "broadcast(self.flat_param, dist.get_rank()",
        check_order,
        "ranks do not meet",
    ),
    (
        "zero3",
        'os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])',
        "pass",
        check_shared,
        "another host",
    ),
    (
        "zero3",
        '.setdefault("NCCL_HOSTID", os.environ["RANK"])',
        '["NCCL_HOSTID"] = os.environ["RANK"]',
        check_shared,
        "another host",
    ),
    ("zero3", "if 0 < gpus < int", "if gpus < int", check_shared, "0 GPUs, 4 ranks: another host"),
    ("zero3", "if 0 < gpus < int", "if 0 < gpus <= int", check_shared, "1 GPUs, 1 ranks: another host"),
    ("zero3", '"nccl" if gpus else "gloo"', '"gloo"', check_shared, "another backend"),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
