"""What test_all.py must know of zero3.py. Its own tests are those of zero1.py, in test_zero1.py."""

from tests.harness import Lesson

NAIVE = "--prefetch 0"
LESSON = Lesson(
    variants=("--prefetch 0", "--prefetch 2"),
    own={"--prefetch": ("0 1 2", "x")},
    slack=lambda root, block, size, flags: (2 * root + block, 0),
    races=("",),
)
