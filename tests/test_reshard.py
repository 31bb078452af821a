"""What is special to reshard.py: after each update servers have, bit by bit, their parts of the weights."""

from functools import partial
from itertools import product
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn

from tests.checks import check_ledger, check_masters, check_parity
from tests.gpu import check_gpu, check_order
from tests.harness import TEXT, Lesson, apart, holds, load, mutants, on_ranks, train, world

NAIVE = "--naive"
LEARN = "torchrun LESSON --dtype bf16; torchrun LESSON --naive"


def slack(root, block, size, flags):
    """Gradients: gloo's reduce-scatter copies what it is given, when a rank also has what it receives."""
    return 0, (root + 3 * block) / (size - size // 2)


RACE = "4 alone --steps 9"
LESSON = Lesson(
    flags="--vocab 257",
    variants=("--naive", "--servers 1"),
    own={"--servers": ("1 2", "-1 5 x")},
    bad=("--servers 4", "--heads 9 --servers 2"),
    slack=slack,
    uncounted=("send",),  # see check_served
    gpu=("--naive",),
    waits={"": {("item", "train()"): 1}, "--dtype bf16": {("item", "train()"): 0}},  # on rank 0 of several
)
# Sizes that no number of ranks divides, but for the heads.
ODD = f"--layers 2 --heads 4 --width 20 --context 13 --vocab 257 --batch 12 --steps 3 --lr 0.01 --data {TEXT}"
COLUMNS = ("proj.weight", "down.weight")
ROWS = ("qkv.weight", "qkv.bias", "up.weight", "up.bias")


def by_hand(name, whole, server, n_servers):
    """A server's part: with numbers of rows and columns, as somebody would cut it who knows no lesson."""
    size = len(whole) // (3 if "qkv" in name else 1) // n_servers
    if name.endswith(COLUMNS):
        size = whole.shape[1] // n_servers
        return whole[:, server * size :][:, :size]
    if not name.endswith(ROWS):
        return whole
    rows = [i for i in range(len(whole)) if i // size % n_servers == server]
    return whole[rows]


@on_ranks(1)
def check_intersections(name):
    """By brute force: each weight's place. Messages, one after the other, are a server's parts in a row."""
    lesson = load(name)
    shapes = {"tokens.weight": (5, 4), "blocks.0.qkv.weight": (24, 5), "blocks.0.qkv.bias": (24,)}
    shapes |= {"blocks.0.proj.weight": (5, 8), "blocks.0.norm1.bias": (5,), "blocks.0.up.weight": (80, 5)}
    shapes = {key: torch.Size(shape) for key, shape in shapes.items()}
    sizes = [shape.numel() for shape in shapes.values()]
    places = torch.arange(sum(sizes))
    whole = {key: part.view(shapes[key]) for key, part in zip(shapes, places.split(sizes))}
    for n_servers, n_trainers in product((1, 2, 4), (1, 2, 3, 4, 7)):
        config = SimpleNamespace(servers=n_servers, trainers=n_trainers)
        size = -(-sum(sizes) // n_trainers)
        for server in range(n_servers):
            parts = [by_hand(key, whole[key], server, n_servers).flatten() for key in shapes]
            expected = torch.cat(parts).tolist()
            messages = []
            for trainer in range(n_trainers):
                message = lesson.intersection(trainer, server, shapes, config) + trainer * size
                there = {*range(trainer * size, (trainer + 1) * size)} & {*expected}
                assert message.tolist() == sorted(there), "an intersection has other places than both"
                messages += message.tolist()
            assert messages == expected, "the messages in a row are not the parts"


def served(name, flags):
    """On a rank: the servers' losses; in the last update, how many bytes it sent, and what it then has."""
    lesson, losses, sent, held = load(name), [], [], []
    config = lesson.parse(flags.split())

    def noted(transfer, holder, *more):
        sent.clear()
        held.append(getattr(holder, "flat", None))
        transfer(holder, *more)

    for way in "naive", "direct":
        setattr(lesson, way, partial(noted, getattr(lesson, way)))
    # What print_step() gets is a view of what all ranks have added up.
    lesson.print_step = lambda config, step, loss, *_: losses.append(loss._base[1].item() / config.servers)
    p2p_op, send = dist.P2POp, dist.send

    def counted(call, is_sent, tensor, *more):
        sent.append(is_sent * tensor.nbytes)
        return call(tensor, *more)

    op = lambda way, *more: counted(partial(p2p_op, way), way is dist.isend, *more)  # noqa: E731
    with mock.patch.multiple(dist, send=partial(counted, send, True), P2POp=op):
        lesson.train(config)
    return losses, sum(sent), held[-1]


def check_served(name, n_trainers=2, n_servers=2, flags="--dtype fp64"):
    """Servers end with what trainers save, bit by bit, each weight of which is sent to each of them once; and
    their loss of each batch is single.py's."""
    plain, _ = train("single", 1, f"{ODD} --dtype fp64")
    with TemporaryDirectory() as folder:
        flags = f"{ODD} --servers {n_servers} {flags} --save {folder}/weights"
        losses, sent, held = zip(*world(n_trainers + n_servers).run(served, name, flags))
        weights = torch.load(f"{folder}/weights")
    for server, flat in enumerate(held[n_trainers:]):
        for key, whole in weights.items():
            part = by_hand(key, whole, server, n_servers).flatten()
            own, flat = flat.tensor_split([len(part)])
            assert torch.equal(own, part), f"{key} is not the trainers'"
        assert not len(flat), "a server has more than its parts"
    needed = sum(flat.nbytes for flat in held[n_trainers:])
    assert sum(sent) == (sent[0] if "naive" in flags else needed) == needed, f"{sent} bytes are sent"
    for step, (one, other) in enumerate(zip(losses[0], plain["losses"], strict=True), 1):
        assert abs(one - other) < (0.02 if "bf16" in flags else 1e-10), f"servers' loss of step {step}"


class Tied(nn.Module):
    """A head that is the embedding, under another name; and a matrix that begins with a whole shard."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(5, 200)
        self.tokens = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.double()

    def forward(self, tokens):
        return self.head(self.up(self.tokens(tokens)).tanh() @ self.up.weight)


@on_ranks(5)
def check_tied(name):
    """3 trainers give a tied weight the gradient of both its uses; 2 servers get it, for both."""
    lesson, rank, plain, model = load(name), dist.get_rank(), Tied(), Tied()
    config = SimpleNamespace(trainers=3, servers=2)
    group = dist.new_group(range(3))
    shapes = {key: param.shape for key, param in model.named_parameters()}
    tokens = torch.arange(18).view(3, 6) % 7
    lesson.mean_loss(plain(tokens[:, :-1]), tokens[:, 1:]).backward()
    if rank < 3:
        holder = lesson.Trainer(list(model.parameters()), group)
        plan = [lesson.intersection(rank, server, shapes, config) for server in range(2)]
        assert rank or not len(plan[1]), "trainer 0 has something for server 1"
        holder.gather()
        (lesson.mean_loss(model(tokens[[rank], :-1]), tokens[[rank], 1:]) / 3).backward()
        holder.reduce_scatter()
        assert model.up.weight.isnan().all(), "weights stay"
        holder.shard.data -= holder.shard.grad
    else:
        holder = lesson.Server(model.requires_grad_(False), rank - 3, config)
        plan = [len(lesson.intersection(trainer, rank - 3, shapes, config)) for trainer in range(3)]
    for way, how in (lesson.direct, plan), (lesson.naive, shapes):
        way(holder, how, config)
        for key, param in model.named_parameters(remove_duplicate=False) if rank >= 3 else ():
            of_plain = plain.get_parameter(key)
            part = by_hand(key, (of_plain - of_plain.grad).detach(), rank - 3, 2)
            assert apart(param, part) < 1e-12, f"{key} is not the plain loop's"
        if rank >= 3:
            holder.flat.fill_(torch.nan)


SIZES = [partial(check_served, n_trainers=n, n_servers=t) for n, t in product((1, 2, 3, 4), (1, 2, 4))]
check_naive = partial(check_served, n_trainers=3, flags="--naive --dtype fp64")
BF16 = [partial(check_served, n_trainers=3, flags=f"--dtype bf16 {more}".strip()) for more in ("", "--naive")]
test_each_promise_is_kept = holds("reshard", check_intersections, *SIZES, check_naive, *BF16, check_tied)
check_bytes = partial(check_ledger, size=4, flags="--accum 3")
check_four = partial(check_parity, size=4)
UPDATE = """        if is_trainer:
            nn.utils.clip_grads_with_norm_([holder.shard], config.clip, norm)
            optimizer.step()
            holder.shard.grad.zero_()
"""
TRANSFER = """        if config.naive:
            naive(holder, shapes, config)
        else:
            direct(holder, plan, config)
"""
MUTANTS = [
    (UPDATE + TRANSFER, TRANSFER + UPDATE, check_served, "tokens.weight is not"),
    ("holder.flat.split(plan)", "holder.flat.clone().split(plan)", check_served, "tokens.weight is not"),
    ('"qkv.weight": (0, 3)', '"qkv.weight": (0, 1)', check_served, "blocks.0.qkv.weight is not"),
    ('"proj.weight": (1, 1)', '"proj.weight": (0, 1)', check_intersections, "an intersection has other"),
    ("(needed >= held[0])", "(needed > held[0])", check_intersections, "an intersection has other places"),
    (" - held[0]\n", "\n", check_intersections, "an intersection has other places"),
    ("    holder.gather()\n    if dist", "    if dist", check_naive, "tokens.weight is not"),
    ("nn.utils.vector_to_parameters(self.flat, model.parameters())", "pass", check_served,
     "servers' loss of step 2"),
    ("self.heads //= config.servers", "self.heads = 1", check_served, "servers' loss of step 1"),
    ("        dist.all_reduce(y, group=self.group)\n", "", check_served, "servers' loss of step 1"),
    ("F.linear(x, layer.weight)", "F.linear(x, layer.weight, layer.bias)", check_served,
     "servers' loss of step 1"),
    ("param.new_full((), torch.nan).expand(param.shape)", "param.data", check_tied, "weights stay"),
    ("param.new_full((), torch.nan).expand(param.shape)", "param.data", check_bytes, "parameters: +"),
    ("            param.grad = None\n", "", check_parity, "losses differ"),
    ("self.shard.grad += received", "self.shard.grad = received", check_parity, "losses differ"),
    ("            holder.shard.grad.zero_()\n", "", check_parity, "losses differ"),
    ("targets) / (config.accum * config.trainers)\n                loss", "targets) / config.accum\n"
     "                loss", check_four, "losses differ"),
    ("        dist.all_reduce(numbers)", "        pass", check_four, "losses differ"),
    ("own.to(wide(self.dtype), copy=True)", "own.clone()", check_masters, "bf16 weights moved"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "reshard")
check_trainer = partial(check_gpu, rows=[(4, 0, 3, "")])
GPU_MUTANTS = [
    ("        work.wait()\n", "        pass\n", check_gpu, "uses what a collective still"),
    ("[places].to(", "[places.cpu()].to(", check_trainer, "the host waits"),
    ("if len(piece)]", "if len(piece) and peer != 2]", check_order, "ranks wait for one another"),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS, "reshard")
