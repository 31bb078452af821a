"""Lessons end in the weights of their peers: PyTorch's own modules, as tools/bench.py races them."""

from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from tests.harness import TINY, load, on_ranks

RACES = ["collectives", "ddp", "zero1", "zero3", "offload", "tensor_parallel", "sequence_parallel", "fusion"]
RACES += ["parallel_3d", "resume", "checkpointing --every 2", "checkpointing --policy selective"]
RACES += [f"pipeline --schedule {schedule}" for schedule in ("gpipe", "1f1b", "interleaved --accum 4")]


@on_ranks(2)
def check_peers(name, own):
    flags = f"{TINY} --dtype fp64 --accum 3 --clip 0.5 --lr 0.01".split()
    beside = ["zero2"] if name == "zero1" else []
    race = load("tools/bench").Race(name, SimpleNamespace(also=[], beside=beside), [*flags, *own])
    titles = [*race.ours, *(title for title, build in race.peers.items() if build)]
    assert len(titles) > 2, "no peer but the lesson on a part of the batch"
    with TemporaryDirectory() as folder:
        assert race.compare(titles, folder) < 1e-12, f"not the weights of {titles}"


@pytest.mark.parametrize("flags", RACES)
def test_training_ends_in_the_weights_of_its_peers(flags):
    name, *own = flags.split()
    check_peers(name, own)
