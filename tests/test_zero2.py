"""What test_all.py must know of zero2.py. Its own tests are those of zero1.py, in test_zero1.py."""

from tests.harness import Lesson

NAIVE = "--naive"


def slack(root, block, size, flags):
    """Gradients: not yet here when most is there, and for --naive the shards' of earlier microbatches."""
    return 2 * root + block, (root + 3 * block) / size * ("--naive" in flags)


LESSON = Lesson(
    variants=("--naive",),
    slack=slack,
    races=("",),
)
