"""What is special to context_parallel.py: attention over all ranks' tokens, who computes what, and when."""

from collections import Counter
from functools import cache, partial
from itertools import chain, product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.checks import EXACT, check_ledger, check_parity
from tests.gpu import in_order, together
from tests.harness import TINY, Lesson, apart, error_of, holds, load, mutants, on_ranks, path_of, train

FILM = "--layers 2"
LEARN = "torchrun LESSON --documents --kind ring --lr 10 --steps 2"
LESSON = Lesson(
    flags="--context 24",
    own={"--kind": ("gather ring ulysses", "all")},
    bad=("--context 15", "--heads 9 --kind ulysses"),
    races=("",),
    gpu=("--kind ring", "--kind ulysses", "--documents"),
    waits={"--documents": {("copy", "__init__()"): "k"}},
)


KINDS = ("gather", "ring", "ulysses")
LONG = "--context 48 --heads 8 --width 24"  # for 8 ranks too
JOB = f"--accum 3 --batch 6 --steps 2 {LONG}"
NEWLINE = ord("\n")


def documents_of(rows, n_tokens, seed=0):
    """Whether a document begins at each token: about every sixth."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, n_tokens, generator=generator) < 1 / 6


def mask_of(begins):
    """Whether each query (b, 1, s, 1) sees each key (b, 1, 1, s), one by one."""
    masks = []
    for row in begins.tolist():
        masks.append([])
        for query in range(len(row)):
            first = query
            while first and not row[first]:
                first -= 1
            masks[-1].append([first <= key <= query for key in range(len(row))])
    return torch.tensor(masks)[:, None]


@on_ranks(3)
def check_attention(
    name,
    kind="gather",
    begins=None,
    heads=(6, 2, 2),
    scale=1,
    dtype=torch.float64,
    limit=1e-12,
    ranks=None,
    tokens=12,
    zigzag=True,
):
    """Output and gradients of q, k, v are those on one device; ranks: of a group of so many."""
    lesson = load(name)
    group, _ = dist.new_subgroups(ranks) if ranks else (None, None)
    size = dist.get_world_size(group)
    n_tokens = tokens * size
    generator = torch.Generator().manual_seed(dist.get_rank() // size)
    whole = [scale * torch.randn(2, number, n_tokens, 5, generator=generator) for number in heads]
    whole = [x.to(dtype).double().requires_grad_() for x in whole]
    begins = documents_of(2, n_tokens) if begins else torch.zeros(1, n_tokens, dtype=torch.bool)
    out = F.scaled_dot_product_attention(*whole, mask_of(begins), enable_gqa=True)
    given = torch.randn(out.shape, generator=generator).to(dtype).double()
    expected = [out, *torch.autograd.grad(out, whole, given)]
    layout = lesson.Layout(begins, group, zigzag)
    own = [layout.shard(x.detach().to(dtype), 2).requires_grad_() for x in whole]
    attention = lesson.KINDS[kind]
    out = attention(*own, layout)
    grads = torch.autograd.grad(out, own, layout.shard(given.to(dtype), 2))
    assert all(x.dtype == dtype for x in (out, *grads)), "another dtype"
    for what, x, y in zip(("output", "dQ", "dK", "dV"), (out, *grads), expected):
        y = layout.shard(y.detach(), 2)
        difference = apart(x.detach(), y) / y.abs().max().item()
        assert difference < limit, f"{what} differs by {difference:.1e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("begins", [False, True])
def test_attention_is_that_of_one_device(size, begins, kind):
    flags = {"size": size, "kind": kind, "begins": begins, "tokens": 24}
    if kind == "ulysses":
        flags |= {"heads": (4 * size, 2 * size, 2 * size), "zigzag": False}
    check_attention("context_parallel", **flags)


@on_ranks(2)
def check_errors(name):
    """What would be wrong, and not noticed, is an error."""
    lesson = load(name)
    error = error_of(lambda: lesson.Layout(documents_of(1, 15)))
    assert "sizes [4, -1] don't multiply up to the size of dim 1 (15)" in error, error
    layout, x = lesson.Layout(documents_of(1, 16)), torch.zeros(1, 3, 16, 4)
    for kind in KINDS[:2]:
        error = error_of(lambda kind=kind: lesson.KINDS[kind](x, x, x, layout))
        assert error.startswith("ValueError: 16 tokens are not this rank's"), error
        error = error_of(lambda kind=kind: lesson.KINDS[kind](x, x, x, layout, is_causal=False))
        assert error.startswith("TypeError"), error
    error = error_of(lambda: lesson.ulysses_attention(x, x, x, layout))
    assert error.startswith("RuntimeError: stack expects each tensor to be equal size"), error  # 3 heads


@cache
def plain(flags):
    """({losses, grad_norms}, weights) of one process with the whole mask, of --documents."""
    lesson = load("single")
    config = lesson.parse(flags.split())
    torch.manual_seed(config.seed)
    model = lesson.GPT(config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    attention, found = F.scaled_dot_product_attention, {"losses": [], "grad_norms": []}
    for step in range(1, config.steps + 1):
        total = 0
        for inputs, targets in lesson.microbatches(config, step, "cpu"):
            mask = mask_of(inputs == NEWLINE)
            masked = lambda q, k, v, is_causal, mask=mask: attention(q, k, v, mask)  # noqa: E731
            with mock.patch.object(F, "scaled_dot_product_attention", masked):
                loss = lesson.mean_loss(model(inputs), targets) / config.accum
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        model.zero_grad()
        found["losses"].append(total)
        found["grad_norms"].append(norm.item())
    return found, model.state_dict()


def check_documents(name, size=2, kind="gather", watched=False):
    """With --documents losses, norms and weights are those of one process with the whole mask."""
    expected, weights = plain(f"{EXACT} {JOB}")
    result, own = train(name, size, f"{EXACT} {JOB} --kind {kind} --documents", watched)
    assert apart(result["losses"], expected["losses"]) < 1e-10, "losses differ"
    assert apart(result["grad_norms"], expected["grad_norms"]) < 1e-10, "gradient norms differ"
    assert apart(own, weights) < 1e-9, "weights differ"


@pytest.mark.long_table
@pytest.mark.parametrize("size, kind", [*product((1, 2, 4), KINDS), (8, "ring")])
def test_training_is_single_pys_and_bytes_are_the_formulas(size, kind):
    job = f"{JOB} --accum 1" if size == 8 else JOB  # 8 ranks take long
    check_parity("context_parallel", size, job, f"--kind {kind}", watched=True)
    check_ledger("context_parallel", size, f"{job} --kind {kind}", EXACT)


@pytest.mark.long_table
@pytest.mark.parametrize("size, kind", [*product((1, 2, 4), KINDS), (3, "gather"), (3, "ring")])
def test_with_documents_training_is_that_with_the_whole_mask_and_bytes_are_the_same(size, kind):
    check_documents("context_parallel", size, kind, watched=True)
    check_ledger("context_parallel", size, f"{JOB} --kind {kind} --documents", EXACT)


@on_ranks(2)
def check_probe(name, kind="gather"):
    """A token of a document changes the logits of this document from there on, and no others in its row."""
    lesson = load(name)
    config = lesson.parse(f"{TINY} {LONG} --layers 2 --dtype fp64 --documents --kind {kind}".split())
    torch.manual_seed(0)
    model = lesson.GPT(config).double()
    lesson.mean_loss = lambda logits, targets: logits  # of this rank's tokens
    inputs = torch.randint(97, 123, (1, config.context))
    inputs[0, [9, 11, 16, 30, 31]] = NEWLINE
    mask = mask_of(inputs == NEWLINE)[0, 0]

    def logits_of(inputs):
        shards = [None] * dist.get_world_size()
        logits = lesson.loss_of(model, dict(model.named_parameters()), inputs, inputs, config)
        dist.all_gather_object(shards, logits)
        chunks = torch.cat(shards, 1)[0].chunk(2 * len(shards))
        order = list(chain(*lesson.Layout(inputs == NEWLINE, zigzag=kind != "ulysses").chunks))
        return torch.cat([chunks[order.index(i)] for i in range(len(order))])

    leaks = 0
    with torch.no_grad():
        logits = logits_of(inputs)
        for i in range(config.context):
            if inputs[0, i] != NEWLINE:
                changed = inputs.clone()
                changed[0, i] += 1
                differ = (logits_of(changed) - logits).abs().amax(1) > 0
                leaks += (differ != mask[:, i]).sum().item()
    assert leaks == 0, f"{leaks} logits of other documents change"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_token_changes_no_other_document(size, kind):
    check_probe("context_parallel", size=size, kind=kind)


def check_rounding(name):
    """Exponentials of large scores do not overflow; bf16 is summed in fp32. Measured: a fifth and a third
    of these limits, for seeds 0 to 19."""
    rounding = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16)}
    largest = 3400  # score, so its error is 3400 roundings, and so is the relative error of its exponential
    for kind in KINDS[:2]:
        fp32 = {"scale": 20, "dtype": torch.float32, "limit": 8 * largest * rounding[torch.float32]}
        check_attention(name, kind, size=4, **fp32)
        bf16 = {"dtype": torch.bfloat16, "limit": 8 * rounding[torch.bfloat16]}
        check_attention(name, kind, size=8, **bf16)


def layouts_of(lesson, begins, size):
    """Every rank's."""
    layouts = []
    for rank in range(size):
        with mock.patch.multiple(dist, get_rank=lambda *_, r=rank: r, get_world_size=lambda *_: size):
            layouts.append(lesson.Layout(begins))
    return layouts


def check_balance(name):
    """Without documents all ranks compute half of all products, equally many in each hop of a ring."""
    lesson = load(name)
    for size in (2, 4, 8):
        layouts = layouts_of(lesson, torch.zeros(1, 4 * size, dtype=torch.bool), size)
        q, total = torch.zeros(1, 1, 4, 1), 0
        for hops in range(size):
            work = []
            for rank, layout in enumerate(layouts):
                work.append(0)
                for queries, keys, mask, is_causal in layout.blocks((rank - hops) % size, q):
                    assert mask is None, "a mask that hides nothing"
                    work[-1] += len(range(4)[queries]) * len(range(4)[keys]) / (1 + is_causal)
            assert len(set(work)) == 1, f"ranks have different work: {work}"
            total += sum(work)
        assert total == (4 * size) ** 2 / 2, "not half of all products"


def check_skipped(name):
    """A block is computed if it shows something in any row, else not; with a mask if it hides something."""
    lesson, size, length = load(name), 4, 6
    seen = Counter()
    for seed, rows in product(range(12), (1, 2)):
        begins = documents_of(rows, 2 * size * length, seed) & (torch.rand(rows, 1) < 0.8)
        begins &= torch.rand(begins.shape) < seed / 11  # from one document in a row to many
        mask = mask_of(begins)
        layouts = layouts_of(lesson, begins, size)
        for mine, theirs in product(range(size), repeat=2):
            expected = layouts[theirs].shard(layouts[mine].shard(mask, 2), 3)
            shown = torch.zeros_like(expected)
            for queries, keys, block_mask, is_causal in layouts[mine].blocks(theirs, expected):
                part = shown[:, :, queries, keys]
                assert not part.any(), "a block twice"
                part |= True if block_mask is None else block_mask == 0
                assert block_mask is None or not part.all(), "a mask that hides nothing"
                if is_causal:
                    part.tril_()
                assert part.any(), "a block that shows nothing"
                seen[block_mask is None, is_causal] += 1
            assert torch.equal(shown, expected), "another mask"
    assert len(seen) == 4 and min(seen.values()) > 20, f"not tested: {seen}"


@on_ranks(3)
def check_overlap(name):
    """A shard of keys comes while another is computed with, and so do its gradients."""
    lesson, log = load(name), []
    send, attend, attend_backward = lesson.send_to_next, lesson.attend, lesson.attend_backward

    def note(what):
        if log[-1:] != ["blocks"] or what != "blocks":
            log.append(what)

    def send_to_next(tensor, layout):
        note("send")
        receive = send(tensor, layout)
        return lambda: note("wait") or receive()

    lesson.send_to_next = send_to_next
    lesson.attend = lambda *args: note("blocks") or attend(*args)
    lesson.attend_backward = lambda *args: note("blocks") or attend_backward(*args)
    q = torch.ones(1, 1, 4, 2, requires_grad=True)
    out = lesson.ring_attention(q, q, q, lesson.Layout(torch.zeros(1, 12, dtype=torch.bool)))
    note("|")
    out.sum().backward()
    expected = "send blocks wait send blocks wait blocks | "
    expected += "send blocks send wait send blocks wait send wait blocks wait send wait"  # kv, gradients
    assert " ".join(log) == expected, f"another order: {' '.join(log)}"


def check_messages(name, size=4):
    """Keys and values of a layer travel in one message, and so do their gradients."""
    result, _ = train(name, size, f"{TINY} {LONG} --layers 3 --accum 3", watched=True)
    calls = {part: row["calls"] for part, row in result["sent"].items() if part != "all-reduce"}
    assert calls == {"all-gather": 2 * 3 * 3, "reduce-scatter": 3 * 3}, f"other messages: {calls}"


def kernels_of(path, rank, size):
    """Counts calls of attention's kernels, and holds what CUDA's ask for but meta tensors do not show."""
    from tests.streams import Streams  # which gives this process a device that others must not have

    class Kernels(Streams):
        def load_lesson(self):
            """With masks everywhere: what documents there are, the simulated host does not know."""
            lesson = super().load_lesson()
            make = lesson.Layout.__init__

            def make_masked(layout, *args, **zigzag):
                make(layout, *args, **zigzag)
                if self.config.documents:
                    layout.sees = torch.ones(len(layout.sees), len(layout.sees)).int().tril().tolist()

            lesson.Layout.__init__ = make_masked
            return lesson

        def on_gpu(self, function, args, kwargs):
            name = function._schema.name.removeprefix("aten::_scaled_dot_product_")
            if "attention" in name:
                given = dict(zip((argument.name for argument in function._schema.arguments), args)) | kwargs
                self.calls[name, given.get("is_causal", False)] += 1
                q, k, lse = given["query"], given["key"], given.get("logsumexp")
                length, width = q.shape[2:]
                assert q.stride(3) == k.stride(3) == 1 and width % 8 == 0 and q.shape[1] == k.shape[1]
                assert length == k.shape[2] or not given.get("is_causal"), "a causal mask that is not square"
                if (bias := given["attn_bias"]) is not None:
                    assert bias.shape == (*q.shape[:2], length, length) and bias.dtype == q.dtype, (
                        "another mask"
                    )
                    assert bias.stride(3) == 1 and bias.stride(2) % 8 == 0, "a mask that is not aligned"
                assert (bias is not None) == self.config.documents, "a mask for nothing, or none"
                if lse is not None:
                    asked = -(-length // 32) * 32
                    assert lse.shape[2] == asked, f"a log-sum-exp of {lse.shape[2]} rows, not {asked}"
                    assert lse.is_contiguous() and lse.dtype == torch.float32, "a log-sum-exp of another form"
                    assert given["out"].dtype == given["grad_out_"].dtype == q.dtype
            return super().on_gpu(function, args, kwargs)

    return Kernels(path, rank, size)


def check_gpu(name):
    """Blocks go through CUDA's kernel for each dtype; no message is read, or overwritten, too early."""
    kernel = "efficient_attention"
    ways = [*product(("fp32", "bf16"), KINDS[:2], ("--context 16",), ((1, 4),))]
    ways += [*product(("fp32", "bf16"), KINDS, ("--context 64 --documents",), ((1, 2),))]
    for dtype, kind, flags, (rank, size) in [*ways, ("bf16", "gather", "--context 16", (0, 1))]:
        gpu = kernels_of(path_of(name.removesuffix(".py")), rank, size)
        gpu.calls = Counter()
        gpu.run(f"{TINY} {flags} --steps 1 --layers 1 --width 96 --dtype {dtype} --kind {kind}")
        causal, others = (1, 2 * (size - 1))  # blocks: own chunks in one
        if "--documents" in flags:
            causal, others = (2 * size, size * (2 * size - 1)) if kind == "ulysses" else (2, 2 * size - 1)
        expected = Counter()
        for each in kernel, f"{kernel}_backward":
            expected[each, True] = causal
            expected[each, False] = others
        assert gpu.calls == expected, f"other kernels in {dtype}: {gpu.calls}"


check_packed = partial(check_attention, begins=True)
check_group = partial(check_packed, size=4, ranks=2)
check_ring = partial(check_packed, kind="ring")
check_ulysses = partial(check_packed, size=2, kind="ulysses", heads=(8, 4, 4))
check_zigzag = partial(check_ulysses, begins=False)
check_in_order = partial(check_packed, zigzag=False)
check_long = partial(check_parity, size=4, flags=f"--accum 3 {LONG}")
GROUPS = [check_group, partial(check_group, kind="ring"), partial(check_ulysses, size=4, ranks=2)]
CHECKS = [
    check_zigzag,
    check_in_order,
    check_errors,
    check_rounding,
    check_balance,
    check_skipped,
    check_overlap,
    check_messages,
    check_gpu,
]
test_each_promise_is_kept = holds("context_parallel", *CHECKS, *GROUPS)
SEND = "        receive = send_to_next(kv, layout)\n"
USE = "        yield layout.rank - hops, kv"
GATHER = "    all_gather(shards, kv[None], group=layout.group)\n"
MUTANTS = [
    ("out.lerp_(block.to(out.dtype), block_share)", "out.add_(block)", check_attention, "output differs"),
    ("torch.sigmoid(block_lse - lse)", "1 / (1 + lse.exp() / block_lse.exp())", check_rounding, "differs"),
    ("lse.copy_(torch.logaddexp(lse, block_lse))", "lse.copy_(block_lse)", check_attention, "output differs"),
    ("received.sum(0)", "received[layout.rank]", check_attention, "dK differs"),
    ("            grad_kv += receive()\n", "            receive()\n", check_ring, "dK differs"),
    ("yield queries, keys, self.mask(i, j, q), i == j", "yield queries, keys, self.mask(i, j, q), False",
     check_packed, "output differs"),
    ("slice(None), None, True", "slice(None), None, False", check_attention, "output differs"),
    (" and mine == sorted(mine)", "", check_zigzag, "output differs"),
    ("mine = self.chunks[self.rank]", "mine = self.chunks[self.rank - 1]", check_packed, "output differs"),
    ("if self.sees[i][j]:", "if i >= j:", check_skipped, "a block that shows nothing"),
    ("self.documents[:, i, :, None]", "self.documents[:, i - 2, :, None]", check_packed, "output differs"),
    ("self.documents[:, i, :, None] ==", "self.documents[:, i, :, None] >=", check_probe, "logits of other"),
    ("(is_same, 0.0, -1e30)", "(is_same, 0.0, -math.inf)", check_packed, "output differs"),
    ("0.0, -1e30).to(q.dtype)", "0.0, -1e30)", partial(check_packed, tokens=96), "output differs"),
    ("first <= last.mT", "first < last.mT", check_packed, "output differs"),
    ("first <= last.mT", "first < last.mT", check_skipped, "a mask that hides nothing"),
    ("(first <= last.mT).any(0)", "(first <= last.mT).all(0)", check_skipped, "another mask"),
    ("(last == first.mT).all(0)", "(last == first.mT).any(0)", check_skipped, "another mask"),
    (".tril().cpu()", ".cpu()", check_balance, "not half of all products"),
    ("[i, n_chunks - 1 - i]", "[2 * i, 2 * i + 1]", check_balance, "ranks have different work"),
    ("if self.sees[i][j] == 2:", "if False:", check_balance, "a mask that hides nothing"),
    (SEND + USE, f"{USE}\n{SEND.rstrip()}", check_overlap, "another order"),
    (GATHER, 2 * GATHER, check_messages, "other messages"),
    ("received.unbind(), join", "received.unbind()[::-1], join", check_ulysses, "output differs"),
    ("[[*np.ravel(layout.chunks)]]", "[[*range(2 * layout.world_size)]]",
     check_ulysses, "output differs"),
    ("layout.length * len(layout.chunks[layout.rank])", "q.shape[2]", check_errors, "nothing"),
    ('layout.shard(weights["positions.weight"], 0)', 'weights["positions.weight"]',
     check_long, "losses differ"),
    ("layout.shard(targets, 1)", "layout.shard(targets, 1).roll(1, 1)", check_long, "losses differ"),
    ("        flat_grad /= world_size\n", "", check_long, "losses differ"),
    ("        dist.all_reduce(flat_grad)\n", "", check_long, "losses differ"),
    ('inputs == ord("\\n")', "inputs == 0", check_documents, "losses differ"),
    ("q, k, v, mask, True, 0.0, is_causal", "q, k, v, mask, True, 0.0", check_gpu, "other kernels"),
    ("(0, -q.shape[2] % 32)", "(0, 0)", check_gpu, "rows, not 32"),
    (".expand(*q.shape[:2], -1, -1)", "", check_gpu, "another mask"),
    ("            work.wait()\n", "            pass\n", check_gpu, "what a collective still writes"),
]  # fmt: skip
test_a_mutant_is_rejected = mutants(MUTANTS, "context_parallel")
check_ring = partial(together, in_order, rows=[(4, "--kind ring")])
GPU_MUTANTS = [
    (
        "context_parallel",
        "after = (layout.rank + 1)",
        "after = (layout.rank + 1 - 2 * (layout.rank == 0))",
        check_ring,
        "ranks wait for one another",
    ),
]
test_a_mutant_is_rejected_by_nccls_rules = mutants(GPU_MUTANTS)
