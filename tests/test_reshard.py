"""What is special to reshard.py: after each update each server has its slices of the trainers' weights."""

import math
from functools import partial
from itertools import product
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn

from tests.checks import check_ledger, check_parity
from tests.gpu import check_order
from tests.harness import TEXT, Lesson, apart, error_of, holds, load, mutants, on_ranks, train, world

FILM = "--how direct"
LEARN = "torchrun LESSON --how direct; torchrun LESSON --how rank0"
LESSON = Lesson(
    flags="--vocab 257",
    variants=("--how rank0", "--how direct"),
    own={"--servers": ("1 2", "0 -1 5 x"), "--how": ("rank0 units direct", "all")},
    bad=("--servers 4", "--heads 9 --servers 2"),
    slack=lambda root, block, size, flags: (
        (root + block) / (size - size // 2),
        0,
    ),
    waits={"": {("item", "print_served()"): 1}},
)


# Sizes that no number of ranks divides, but for the heads.
ODD = f"--layers 2 --heads 4 --width 20 --context 13 --vocab 257 --batch 12 --steps 3 --lr 0.01 --data {TEXT}"
HOWS = ("rank0", "units", "direct")
ROWS, THREE, COLUMNS = (0, 1), (0, 3), (1, 1)
SPLIT = {"qkv.weight": THREE, "qkv.bias": THREE, "proj.weight": COLUMNS}
SPLIT |= {"up.weight": ROWS, "up.bias": ROWS, "down.weight": COLUMNS}


def slice_by_hand(tensor, split, server, n_servers):
    """A server's slice of a tensor; without a split all of it."""
    if not split:
        return tensor
    dim, stacked = split
    slices = []
    for part in tensor.chunk(stacked, dim):
        first, end = (i * part.shape[dim] // n_servers for i in (server, server + 1))
        slices.append(part.narrow(dim, first, end - first))
    return torch.cat(slices, dim)


def check_intersections(name):
    """By brute force: each number's place. Messages, one after the other, are the slices in a row."""
    lesson = load(name)
    names = ("rows.weight", ROWS, (11, 5)), ("rows.bias", ROWS, (11,)), ("columns.weight", COLUMNS, (5, 11))
    names += ("columns.bias", None, (5,)), ("qkv.weight", THREE, (21, 5)), ("norm.weight", None, (5,))
    places = torch.arange(sum(math.prod(shape) for *_, shape in names))
    parts = places.split([math.prod(shape) for *_, shape in names])
    params = {name: part.view(shape) for (name, _, shape), part in zip(names, parts)}
    split = {name: how for name, how, _ in names if how}
    for n_servers, n_trainers in product((1, 2, 4), (1, 2, 3, 4)):
        size = -(-len(places) // n_trainers)
        for server in range(n_servers):
            by_hand = [slice_by_hand(params[key], how, server, n_servers) for key, how, _ in names]
            shapes, runs = lesson.layout_of(params, split, server, n_servers)
            assert [tuple(shape) for shape in shapes.values()] == [tuple(x.shape) for x in by_hand], "shapes"
            expected = torch.cat([x.flatten() for x in by_hand])
            assert torch.equal(lesson.take(places, runs), expected), "the runs are not the slices"
            messages = []
            for start in range(0, size * n_trainers, size):
                both = lesson.intersections(start, start + size, runs)
                message = torch.cat([start + torch.arange(*run) for run in both] or [places[:0]]).tolist()
                there = sorted({*range(start, start + size)} & {*expected.tolist()})
                assert message == there, "an intersection has other numbers than both"
                messages += message
            assert messages == expected.tolist(), "the messages in a row are not the slices"


def expected_slices(ranks, lesson, config, shards):
    """{name: what this server must have}, of all trainers' shards, unit by unit."""
    with torch.device("meta"):
        shapes = {name: param.shape for name, param in lesson.GPT(config).named_parameters()}
    server, found = ranks.rank - ranks.n_trainers, {}
    for i, unit in enumerate(ranks.units):
        flat = torch.cat([each[i] for each in shards[: ranks.n_trainers]])
        for name in unit.names:
            number = math.prod(shapes[name])
            split = SPLIT.get(name.split(".", 2)[-1] if name.startswith("blocks") else name)
            weight = flat[:number].view(shapes[name]).to(lesson.DTYPES[config.dtype])
            found[name] = slice_by_hand(weight, split, server, ranks.n_servers)
            flat = flat[number:]
        assert len(flat) < ranks.n_trainers, "more than padding is left of a unit"
    return found


def served(name, flags):
    """On a rank: the servers' losses, of a run in which each update begins with NaN on the servers."""
    lesson, losses = load(name), []
    config = lesson.parse(flags.split())
    update = lesson.Resharding.update_servers

    def update_and_compare(ranks):
        for unit in () if ranks.is_trainer else ranks.units:
            unit.held.data.fill_(torch.nan)
        update(ranks)
        shards = [None] * dist.get_world_size()
        dist.all_gather_object(shards, [unit.held.detach() for unit in ranks.units])
        if not ranks.is_trainer:
            expected = expected_slices(ranks, lesson, config, shards)
            for unit in ranks.units:
                for key, own in zip(unit.names, unit.views(unit.held.data).values()):
                    same = torch.equal(own, expected[key]) and own.dtype == expected[key].dtype
                    assert same, f"{config.how}: {key} is not the trainers'"

    lesson.Resharding.update_servers = update_and_compare
    lesson.print_served = lambda config, total: losses.append(total.item() / config.servers)
    lesson.train(config)
    return losses


def check_served(name, n_trainers=2, n_servers=2, hows=("direct",), dtype="fp64"):
    """Bitwise, each server's slices are the trainers' weights; its loss is single.py's of the next batch."""
    flags = f"{ODD} --dtype {dtype}"
    plain, _ = train("single", 1, flags)
    for how in hows:
        own = f"{flags} --servers {n_servers} --how {how}"
        losses, *_ = world(n_trainers + n_servers).run(served, name, own)
        for step, (one, other) in enumerate(zip(losses, plain["losses"], strict=True), 1):
            assert abs(one - other) < (1e-10 if dtype == "fp64" else 0.02), f"servers' loss of step {step}"


class Tied(nn.Module):
    """A block that is frozen, one that is not, and a head that is the embedding, under another name."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@on_ranks(3)
def check_tied(name, how="direct"):
    """A tied weight and a frozen one, of rank 0, are trained as in the plain model, and served."""
    lesson = load(name)
    torch.manual_seed(0)
    plain = Tied().double()
    torch.manual_seed(dist.get_rank())
    model = Tied().double()
    split = {"tokens.weight": ROWS, "head.weight": ROWS}
    ranks = lesson.Resharding(model, split, 1, how)
    tokens = torch.arange(12).view(2, 6) % 7
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(2):
        lesson.mean_loss(plain(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if ranks.is_trainer:
        optimizer = torch.optim.AdamW(ranks.shards, lr=0.1)
    for _ in range(2):
        if ranks.is_trainer:
            own = tokens[ranks.rank :][:1]
            lesson.mean_loss(ranks.model(own[:, :-1]), own[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            for unit in ranks.units:
                unit.held.data.fill_(torch.nan)
        ranks.update_servers()
    expected = dict(plain.named_parameters())
    state_dict = ranks.full_state_dict()
    ranks.update_servers()  # which frees weights that are unsharded, but must leave those to the caller
    if not ranks.is_trainer:
        for unit in ranks.units:
            state_dict |= zip(unit.names, unit.views(unit.held.data).values())
    if state_dict:
        for key, value in state_dict.items():
            here = "server" if not ranks.is_trainer else "trainer"
            assert value.untyped_storage().nbytes(), f"{key} was freed"
            assert apart([*value.flatten()], [*expected[key].flatten()]) < 1e-12, f"{key} on a {here}"
        assert state_dict.keys() == expected.keys(), f"other weights: {[*state_dict]}"
    model = Tied()
    model.blocks[1].bias.requires_grad_(False)
    failed = error_of(lambda: lesson.Resharding(model, split, 1, how))
    assert "freeze all parameters of a unit, or none" in failed, f"half a frozen unit: {failed}"


@on_ranks(4)
def check_walk(name):
    """All ranks come to the same messages in the same order."""
    lesson, walk = load(name), []
    note = lambda ranks, unit, *_: walk.append((unit.names, ranks.messages[unit]))  # noqa: E731
    with mock.patch.object(lesson.Resharding, "deliver", note):
        ranks = lesson.Resharding(lesson.GPT(lesson.parse(ODD.split())), lesson.SPLIT, 2, "direct")
        ranks.update_servers()
    walks = [None] * 4
    dist.all_gather_object(walks, walk)
    for rank, other in enumerate(walks):
        assert other == walks[0], f"rank {rank} walks otherwise than rank 0"


SIZES = [partial(check_served, n_trainers=n, n_servers=t) for n, t in product((1, 2, 3, 4), (1, 2, 4))]
WAYS = [partial(check_served, n_trainers=n, n_servers=t, hows=HOWS[:2]) for n, t in ((1, 2), (3, 2), (2, 4))]
check_bf16 = partial(check_served, n_trainers=3, hows=HOWS, dtype="bf16")
TIES = [partial(check_tied, how=how) for how in HOWS]
test_each_promise_is_kept = holds(
    "reshard", check_intersections, *SIZES, *WAYS, check_bf16, *TIES, check_walk
)
four = partial(check_ledger, size=4, flags="--accum 3")
parity = partial(check_parity, size=3)
TRAINERS = "range(self.n_trainers):"
WALK = "range(self.n_trainers)[:: 1 if self.is_trainer else -1]:"
ALL = "[self.model, *model.blocks]"
NAMES = "in model.named_parameters() if"
MUTANTS = [
    ("        resharding.update_servers()\n", "", check_served, "servers' loss of step 2"),
    ("        if resharding.is_trainer:\n            grad_norm += resharding.clip_grad_norm_(config.clip)\n"
     "            optimizer.step()\n            optimizer.zero_grad()\n        resharding.update_servers()\n",
     "        resharding.update_servers()\n        if resharding.is_trainer:\n"
     "            grad_norm += resharding.clip_grad_norm_(config.clip)\n"
     "            optimizer.step()\n            optimizer.zero_grad()\n",
     check_served, "servers' loss of step 2"),
    ("for unit in self.units:\n            if self.how",
     "for unit in self.units[: len(self.units) - (self.rank == 0)]:\n            if self.how",
     check_walk, "rank 1 walks"),
    (ALL, f"[unit for unit in {ALL} if next(unit.module.parameters()).requires_grad]", check_tied,
     "other weights"),
    ("is_trainer and trained.pop()", "is_trainer", check_tied, "weight on a"),
    (NAMES, NAMES.replace("()", "(remove_duplicate=self.is_trainer)"), check_tied, "on a server"),
    ("stride = param.shape[dim + 1 :]", "stride = param.shape[:dim]", check_intersections,
     "the runs are not the slices"),
    ('"qkv.weight": (0, 3)', '"qkv.weight": (0, 1)', check_served, "blocks.0.qkv.weight is not"),
    ("(max(low, first), min(high, end))", "(low, min(high, end))", check_intersections,
     "an intersection has other numbers"),
    (TRAINERS, WALK, check_served, "is not the trainers'"),
    (TRAINERS, WALK, check_walk, "rank 2 walks"),
    ("numbers, rest = rest.tensor", "numbers, _ = rest.tensor", check_served, "is not the trainers'"),
    (".div_(unit.resharding.n_trainers)", "", parity, "norms differ"),
    ("dist.all_reduce(squares, group=self.trainers)", "pass", parity, "losses differ"),
    ("        dist.broadcast(flat, 0)\n", "", check_tied, "tokens.weight on a"),
    ("        unit = ctx.unit\n        unit.reshard()\n", "        unit = ctx.unit\n", four, "parameters: +"),
    ("server % self.n_trainers", "0", four, "bytes from the formula"),
    (".values())\n            unit.flat = None", ".values())", check_tied, "was freed"),
    ('assert len(trained) == 1, "freeze', 'assert trained, "freeze', check_tied, "unit: nothing"),
    ("+ layer.bias", "+ layer.bias * resharding.n_servers", check_served, "servers' loss of step 1"),
    ("        dist.all_reduce(y, group=resharding.servers)\n", "", check_served, "servers' loss of step 1"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "reshard")


GPU_MUTANTS = [
    (
        "reshard",
        "self.units:\n            if self.how",
        "self.units[self.rank == 0 :]:\n            if self.how",
        check_order,
        "ranks do not meet",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
