"""What is special to zero2.py; what it shares with zero1.py and zero3.py is in tests/test_zero1.py."""

from tests.gpu import check_gpu
from tests.harness import Lesson, mutants

LESSON = Lesson(slack=lambda root, block, size, flags: ((root + 2 * block) / size, 0))
GPU_MUTANTS = [
    (
        "zero2",
        "mul(param.grad.to_dense(), 1",
        "mul(param.grad, param.grad.sum().item()",
        check_gpu,
        "the host waits",
    ),
    ("zero2 zero3", "self.reduce_work.wait()", "pass", check_gpu, "empties what a collective still uses"),
    (
        "zero2 zero3",
        "self.reduce_work.wait()",
        "self.flat_grad.untyped_storage().resize_(0)\n        self.reduce_work.wait()",
        check_gpu,
        "empties what a collective still uses",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
