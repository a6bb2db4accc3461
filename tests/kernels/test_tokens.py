"""Selection of single tokens: the kernels against plain torch, per instruction set."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.support.covering import covering
from tests.support.kernel_checks import DTYPES, assert_same_plan, copy_of, make_chooser, make_rows
from vllm_kvretrieval.kernels import Selection, cpu
from vllm_kvretrieval.retrieval.index import make_index
from vllm_kvretrieval.retrieval.index.one_bit import OneBit
from vllm_kvretrieval.retrieval.pooling import Pooling

pytestmark = pytest.mark.threads

BUDGET = (5, 33, 60)


class Outside(OneBit):
    """Serves by its own methods."""

    name: ClassVar[str] = "outside"


def chooser_of(index="one_bit", shape=(3, 3, 64), dtype=torch.float32, pages=60, **options):
    index = make_index(index) if isinstance(index, str) else index
    heads, group, size = shape
    return make_chooser(
        pages, 4, heads, group, size, dtype, most_selected=700, index=index, **options
    )


def plans(chooser, lens, budget=BUDGET, **options):
    """Three steps by the kernels and by their specification; the rows of the last."""
    twin = copy_of(chooser)
    for step in range(3):
        rows = make_rows(
            [n + step for n in lens], chooser, budget, tau=0.2, per_token=True, **options
        )
        width = chooser.store.kv_heads * chooser.group
        query = torch.randn(len(lens), width, chooser.store.head_size).to(chooser.store.dtype)
        last = assert_same_plan(chooser, twin, query, rows)
    return last


@covering(
    index=["one_bit", "exact"],
    shape__page_size__parts=[
        ((3, 3, 64), 32, 1),
        ((1, 7, 80), 32, 2),
        ((2, 11, 64), 32, 4),
        ((2, 1, 128), 64, 1),
        ((1, 4, 256), 128, 1),
        ((2, 2, 96), 128, 16),
        ((2, 5, 64), 16, 1),
        ((1, 3, 64), 256, 1),
    ],
    dtype=DTYPES,
)
def test_equals_reference(index, shape, page_size, parts, dtype):
    torch.manual_seed(0)
    chooser = chooser_of(index, shape, dtype, 2000 // page_size, page_size=page_size, parts=parts)
    window = max(33, page_size // parts)
    plans(chooser, (1700, 640, 801), (5, window, 60))


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("index", ["one_bit", "exact", Outside()], ids=str)
def test_every_pooling(index, pooling):
    torch.manual_seed(1)
    plans(chooser_of(index, pooling=pooling), (1700, 640, 801))


def test_lists_name_each_token_once(isa):
    torch.manual_seed(2)
    chooser = chooser_of()
    lens = (1700, 98, 801)
    rows = make_rows(lens, chooser, BUDGET, fresh=1, per_token=True)
    cpu.plan_decode(torch.randn(3, 9, 64), rows, chooser)
    for r, length in enumerate(lens):
        for head in range(3):
            numbers = rows.lists[r * 3 + head, : sum(BUDGET)]
            unit, offset = numbers // 32, numbers % 32
            assert (unit % 3 == head).all()
            pages = rows.block_table[r].tolist()
            where = [pages.index(page) for page in (unit // 3).tolist()]
            positions = torch.tensor(where) * 32 + offset
            assert (positions.diff() > 0).all(), "in the order of the context"
            assert positions[:5].tolist() == [*range(5)]
            assert positions[-33:].tolist() == [*range(length - 33, length)]


@pytest.mark.parametrize("kind", ["ordinary", "equal", "sharp", "few", "striped"])
@pytest.mark.parametrize("tokens", [2048, 32000])
def test_the_best_of_many(isa, tokens, kind):
    """There are so many values that a sample shows where the best begin, or misleads."""
    torch.manual_seed(3)
    pages = tokens // 32
    chooser = chooser_of("exact", (1, 1, 64), pages=pages)
    chooser.scale = 1.0
    keys = torch.randn(tokens) * (0 if kind == "equal" else 60 if kind == "sharp" else 1)
    if kind == "few":
        keys = torch.where(torch.rand(tokens) < 0.01, keys, -20.0)
    if kind == "striped":  # just what the sample has is low
        keys[::16] = -20
    cached = chooser.store.cache.view(pages, 1, 2, 64, 32)
    rows = make_rows([tokens], chooser, (32, 32, 600), fresh=1, per_token=True)
    cached.zero_()
    cached[rows.block_table[0].long(), 0, 0, 0] = keys.view(pages, 32)
    query = torch.zeros(1, 1, 64)
    query[:, :, 0] = 1
    cpu.plan_decode(query, rows, chooser)
    order = keys[32:-32].sort(descending=True, stable=True).indices[:600].sort().values + 32
    chosen = chooser.selection.chosen[int(rows.seats[0]), 0, :600]
    if kind == "few":  # the rest are equal
        high = keys[chosen.long()] > -20
        assert high.sum() == (keys[32:-32] > -20).sum()
    assert torch.equal(chosen, order.int())


def test_records_are_those_of_pages(isa):
    """A method of pages and one of tokens share an index."""
    torch.manual_seed(4)
    chooser = chooser_of()
    before = chooser.store.records.clone()
    plans(chooser, (1700, 640, 801))
    pages = make_rows((1700,), chooser, (1, 2, 3))
    cpu.plan_decode(torch.randn(1, 9, 64), pages, chooser)
    assert torch.equal(before, chooser.store.records)


def test_what_does_not_fit_is_refused():
    chooser = chooser_of()
    query = torch.randn(1, 9, 64)

    def plan(length=700, budget=BUDGET, by=chooser, **changed):
        rows = make_rows((length,), by, budget, per_token=True)
        vars(rows).update(changed)
        cpu.plan_decode(query, rows, by)

    plan()
    plan(98)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"length": 97}, "are 98, 1 more than the 97 tokens of the context"),
        (
            {"budget": (5, 31, 60)},
            "60 tokens are to be selected beside a window of less than the 32",
        ),
        ({"budget": (-1, 32, 60)}, "-1 tokens of sink"),
        ({"budget": (5, 33, 701), "length": 900}, "select is 701, 1 more than the 700"),
        ({"lists": torch.zeros(3, 97).int()}, "tokens to attend to are 98, 1 more than the 97"),
        ({"by": chooser_of("min_max")}, "scores entries, not tokens"),
        ({"by": chooser_of(rerank=2)}, "are not scored again"),
    ]
    for arguments, why in refused:
        with pytest.raises(ValueError, match=why):
            plan(**arguments)


def resident():
    """Bytes of memory of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(x for x in status.splitlines() if x.startswith("VmRSS")).split()[1])


@pytest.mark.cores
def test_scores_of_a_large_batch_take_bounded_memory():
    """There are 64 threads, 32 requests and 64K tokens. The memory that the calling thread keeps is
    measured."""
    torch.manual_seed(9)
    chooser = chooser_of(shape=(8, 4, 32), pages=2048)
    chooser = replace(chooser, selection=Selection.empty(
        seats=32, kv_heads=8, group=4, head_size=32, most_selected=60, dtype=torch.float32
    ))  # fmt: skip
    rows = make_rows([1 << 16] * 32, chooser, BUDGET, tau=1.0, fresh=1, per_token=True)
    rows.lists = rows.lists[:, :128].contiguous()
    query = torch.randn(32, 32, 32)
    grown: list[int] = []

    def plan():
        torch.set_num_threads(64)
        before = resident()
        cpu.plan_decode(query, rows, chooser)
        grown.append(resident() - before)

    thread = threading.Thread(target=plan)  # scratch belongs to a thread
    thread.start()
    thread.join()
    counted = cpu.scratch_bytes(32 << 16, 32)
    assert counted == 128 << 20
    assert counted // 2 < grown[0] < counted + (48 << 20)
