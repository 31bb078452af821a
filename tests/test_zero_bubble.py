"""What is special to zero_bubble.py; what it shares with pipeline.py is in tests/test_pipeline.py."""

from tests.gpu import check_order
from tests.harness import Lesson, mutants
from tests.test_pipeline import orders

LESSON = Lesson(
    own={"--schedule": ("zb-h1 zb-h2", "1f1b")}, gpu=("--schedule zb-h2",), orders=orders(("zb-h1", "zb-h2"))
)
GPU_MUTANTS = [
    (
        "zero_bubble",
        '{op: dist.new_group() for op in "FB"}',
        'dict.fromkeys("FB", dist.new_group())',
        check_order,
        "ranks wait for one another",
    ),
    (
        "zero_bubble",
        "self.world_size, self.groups[op]",
        "self.world_size, self.groups['FB'.replace(op, '')]",
        check_order,
        "ranks wait for one another",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
