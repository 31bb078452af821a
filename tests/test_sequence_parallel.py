"""What is special to sequence_parallel.py; what it shares with tensor_parallel.py is tested there."""

from tests.gpu import check_gpu
from tests.harness import Lesson, mutants

FILM = "--layers 2"
LESSON = Lesson(
    flags="--vocab 257 --context 12 --batch 9",
    bad=("--heads 9", "--context 15"),
    races=("",),
)
GPU_MUTANTS = [
    ("sequence_parallel", "= x.new_empty(n_ranks", "= torch.empty(n_ranks", check_gpu, "of the host"),
    ("sequence_parallel", "x.new_empty(parts[0].shape)", "torch.empty_like(x)", check_gpu, "numbers"),
    (
        "sequence_parallel",
        "work.wait()\n        return torch.cat",
        "return torch.cat",
        check_gpu,
        "uses what a collective still",
    ),
    (
        "sequence_parallel",
        "work.wait()\n        return received",
        "return received",
        check_gpu,
        "uses what a collective still",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
