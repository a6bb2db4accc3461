"""Arguments that the compiled ops refuse."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.kernel_checks import (
    KERNELS,
    MIN_MAX,
    PAGE,
    OutsideMean,
    copy_of,
    make_chooser,
    make_rows,
)
from vllm_kvretrieval.kernels import Mode, cpu
from vllm_kvretrieval.retrieval.index import make_index

pytestmark = pytest.mark.threads


def test_wrong_tensors_are_refused():
    chooser = make_chooser(20, 1, 1, 1, 64, torch.bfloat16)
    query = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    rows = make_rows([20 * PAGE], chooser, (1, 1, 2))
    rows.numbers = {**rows.numbers, "threshold": rows.numbers["threshold"].double()}
    with pytest.raises(ValueError, match="threshold must be torch"):
        cpu.plan_decode(query, rows, chooser)
    rows = make_rows([20 * PAGE], chooser, (1, 1, 2))
    rows.window = rows.window[:0]
    with pytest.raises(ValueError, match="window has 0 rows, seq_lens 1"):
        cpu.plan_decode(query, rows, chooser)
    rows = make_rows([20 * PAGE], chooser, (1, 1, 2))
    for name in ("query", "chosen"):
        for change in (
            lambda tensor: torch.cat([tensor] * 2, dim=-1)[..., ::2],
            lambda tensor: tensor.double(),
            lambda tensor: tensor.repeat(2 if name == "chosen" else 1, 1, 1)[..., None],  # noqa: B023
        ):
            wrong = copy_of(chooser)
            setattr(wrong.selection, name, change(getattr(wrong.selection, name)))
            with pytest.raises(
                ValueError, match=f"the selection's {name} must be torch.* and contiguous"
            ):
                cpu.plan_decode(query, rows, wrong)
    wrong = copy_of(chooser)
    wrong.selection.chosen = wrong.selection.chosen.repeat(2, 1, 1)
    with pytest.raises(ValueError, match=r"chosen must be torch.int32 \(1, 1, 64\)"):
        cpu.plan_decode(query, rows, wrong)
    wrong = copy_of(chooser)
    wrong.selection.query = wrong.selection.query[..., :48].contiguous()
    with pytest.raises(ValueError, match=r"query must be torch.bfloat16 \(1, 1, 64\)"):
        cpu.plan_decode(query, rows, wrong)
    without = replace(chooser, store=replace(chooser.store, cache=None, handle=None), rerank=2)
    with pytest.raises(ValueError, match="scored by the keys in the cache, and there is none"):
        cpu.plan_decode(query, rows, replace(without, handle=None))


STORES: dict[str, tuple[Any, str]] = {
    "entries": ({"entry_tokens": 12}, "12 tokens are no power of two in a page of 32"),
    "thirds": (
        {"page_size": 48, "entry_tokens": 16},
        "16 tokens are no power of two in a page of 48",
    ),
    "head size": ({"head_size": 72}, "head size 72 is no multiple of 16"),
    "layout": ({"layout": "neon"}, r"'neon' lays out keys is not known, only \['vec', 'vec16'"),
    "no cache": ({"cache": None}, "mean_std reads the keys in the cache, and has none"),
    "dtype of the cache": (
        lambda store: {"cache": store.cache.half()},
        r"cache must be torch.bfloat16 \(20, 2, 32, 128\) and contiguous, got torch.float16",
    ),
    "pages of the cache": (
        lambda store: {"cache": store.cache[1:]},
        r"\(20, 2, 32, 128\) and contiguous, got torch.bfloat16 \(19, 2, 32, 128\)",
    ),
    "order of the cache": (
        lambda store: {"cache": store.cache.transpose(0, 1).contiguous().transpose(0, 1)},
        "and contiguous, got",
    ),
    "dtype of the records": (
        lambda store: {"records": store.records.char()},
        r"records must be torch.uint8 \(20, 2, 256\), got torch.int8",
    ),
    "size of the records": (
        lambda store: {"records": store.records[..., :-2].contiguous()},
        r"records must be torch.uint8 \(20, 2, 256\), got torch.uint8 \(20, 2, 254\)",
    ),
    "order of the records": (
        lambda store: {"records": store.records.transpose(0, 1).contiguous().transpose(0, 1)},
        r"records must be contiguous, their strides are",
    ),
    "another index": ({"index": MIN_MAX, "dtype": torch.float32, "cache": None}, "records must be"),
}


@pytest.mark.parametrize("name", STORES)
def test_wrong_stores_are_refused(name):
    """Every op refuses them, since each may be the first to see one."""
    index = make_index("mean_std")
    chooser = make_chooser(20, 1, 2, 1, 64, torch.bfloat16, index=index)
    change, message = STORES[name]
    changed = change(chooser.store) if callable(change) else change
    wrong = replace(chooser.store, handle=None, **changed)
    rows = make_rows([20 * PAGE], chooser, (1, 1, 2), fresh=1)
    one, full = torch.tensor([0]), torch.tensor([PAGE]).int()
    before = chooser.store.records.clone()
    calls = [
        lambda: cpu.update_index(torch.randn(1, 2, 64).bfloat16(), one, wrong),
        lambda: cpu.plan_decode(
            torch.randn(1, 2, 64).bfloat16(), rows, replace(chooser, store=wrong, handle=None)
        ),
    ]
    if wrong.cache is not None and "entry_tokens" not in changed:
        calls += [
            lambda: cpu.index_pages(one.int(), full, wrong),
            lambda: cpu.read_keys(one, wrong),
        ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert torch.equal(chooser.store.records, before)


def fields(**values):
    return lambda rows, chooser: {
        name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()
    }


MISFITS = {
    "select": (
        fields(select=[7, 10]),
        "row 1: select is 10, 1 more than the 9 that the selection holds",
    ),
    "negative select": (fields(select=[7, -1]), "row 1: -1 pages to select"),
    "no mode": (
        lambda rows, chooser: {"mode": torch.tensor([0, 3]).to(torch.uint8)},
        "row 1: mode 3 is none",
    ),
    "given without counts": (
        lambda rows, chooser: {"mode": torch.tensor([0, Mode.GIVEN]).to(torch.uint8)},
        "row 1: a selection is given without counts",
    ),
    "sink of a whole context": (
        lambda rows, chooser: {"mode": torch.tensor([0, Mode.WHOLE]).to(torch.uint8)},
        "row 1: attends to the whole context, which has no sink or window",
    ),
    "seat": (fields(seats=[0, 4]), "row 1: seat 4 is outside the state's 4"),
    "negative seat": (fields(seats=[-1, 0]), "row 0: seat -1 is outside the state's 4"),
    "corrected": (
        lambda rows, chooser: {
            "seats": torch.tensor([1, 3]).int(),
            "corrected": rows.corrected[:3],
        },
        "row 1: seat 3 is outside the 3 of corrected",
    ),
    "negative sink": (fields(sink=[-1, 1]), "row 0: .* -1 pages of sink and 2 of window"),
    "negative window": (fields(window=[2, -2]), "row 1: .* 1 pages of sink and -2 of window"),
    "no window": (
        fields(window=[2, 0]),
        "row 1: 7 pages are to be selected beside a window that lacks the tail page",
    ),
    "no context": (fields(seq_lens=[0, 500]), "row 0: a context of 0 tokens"),
    "context": (
        fields(seq_lens=[640, 11 * PAGE], sink=[1, 3]),
        "row 1: sink, window and selection are 12, 1 more than the 11 pages of the context",
    ),
    "block_table": (
        lambda rows, chooser: {"block_table": rows.block_table[:, :18]},
        "row 0: the context's pages are 20, 2 more than the 18 of block_table",
    ),
    "lists": (
        lambda rows, chooser: {"lists": rows.lists[:, :9]},
        "row 0: the pages to attend to are 10, 1 more than the 9 of lists",
    ),
    "exact in lists": (
        lambda rows, chooser: {
            "mode": torch.tensor([Mode.SELECT, Mode.WHOLE]).to(torch.uint8),
            "sink": torch.tensor([1, 0]).int(),
            "window": torch.tensor([2, 0]).int(),
            "seq_lens": torch.tensor([640, 449]).int(),
            "lists": rows.lists[:, :14],
        },
        "row 1: the pages to attend to are 15, 1 more than the 14 of lists",
    ),
    "rows of lists": (
        lambda rows, chooser: {"lists": rows.lists[:5]},
        "lists has 5 rows, 2 requests of 3 KV heads need 6",
    ),
}


@pytest.mark.parametrize("index", [MIN_MAX, make_index("exact"), OutsideMean()], ids=str)
@pytest.mark.parametrize("name", MISFITS)
def test_rows_that_do_not_fit_are_refused(name, index):
    """Before anything is written."""
    torch.manual_seed(5)
    chooser = make_chooser(40, 4, 3, 2, 64, torch.bfloat16, most_selected=9, index=index)
    query = torch.randn(2, 6, 64).to(torch.bfloat16)
    fit = make_rows([20 * PAGE, 20 * PAGE - 40], chooser, (1, 2, 7), fresh=1)
    change, message = MISFITS[name]
    rows, before = replace(fit, **change(fit, chooser)), copy_of(chooser)
    with pytest.raises(ValueError, match=message):
        cpu.plan_decode(query, rows, chooser)
    assert rows.lists.eq(-1).all()
    assert not rows.corrected.any()
    assert chooser.selection.query.equal(before.selection.query)
    assert chooser.selection.chosen.equal(before.selection.chosen)
    cpu.plan_decode(query, fit, chooser)


def test_selecting_by_no_index_is_refused():
    chooser = make_chooser(40, 4, 3, 2, 64, torch.bfloat16, index=None)
    query = torch.randn(2, 6, 64).to(torch.bfloat16)
    rows = make_rows([20 * PAGE] * 2, chooser, (1, 2, 7), fresh=1)
    rows.select[0] = 0
    with pytest.raises(ValueError, match="row 1: 7 pages are to be selected by no index"):
        cpu.plan_decode(query, rows, chooser)
    assert rows.lists.eq(-1).all()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda query: query.to(torch.float16),
        lambda query: query[:1],
        lambda query: query[:, :3],
        lambda query: query[..., :48],
        lambda query: query.flatten(1),
        lambda query: query.transpose(0, 1).contiguous().transpose(0, 1),
        lambda query: torch.cat([query, query], dim=-1)[..., ::2],
    ],
)
@pytest.mark.parametrize("index", [MIN_MAX, make_index("mean"), OutsideMean()], ids=str)
def test_queries_and_keys_that_do_not_fit_are_refused(index, wrong):
    chooser = make_chooser(40, 2, 4, 1, 64, torch.bfloat16, index=index)
    store = chooser.store
    rows = make_rows([20 * PAGE, 20 * PAGE], chooser, (1, 1, 2), fresh=1)
    vectors = torch.randn(2, 4, 64).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"query must be \[>= 2, 4, 64\] in torch.bfloat16"):
        cpu.plan_decode(wrong(vectors), rows, chooser)
    with pytest.raises(ValueError, match=r"key must be \[>= 2, 4, 64\] in torch.bfloat16"):
        cpu.update_index(wrong(vectors), torch.tensor([0, 1]), store)
    cpu.plan_decode(vectors, rows, chooser)
    cpu.update_index(vectors, torch.tensor([0, 1]), store)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("index", [*KERNELS, "outside"])
def test_slots_outside_the_index_are_refused(isa, index, parts):
    kind = OutsideMean() if index == "outside" else make_index(index)
    store = make_chooser(40, 1, 2, 1, 64, torch.float32, parts=parts, index=kind).store
    before = store.records.clone()
    key = torch.randn(4, 2, 64)
    slot_mapping = torch.tensor([-1, 40 * PAGE - 2, 40 * PAGE - 1, 40 * PAGE])
    with pytest.raises(ValueError, match=r"slot_mapping\[3\] is 1280, the cache has 1280 tokens"):
        cpu.update_index(key, slot_mapping, store)
    assert store.records.equal(before)
    cpu.update_index(key, slot_mapping[:3], store)
    for wrong in (slot_mapping.int(), torch.arange(8)[::2]):
        with pytest.raises(ValueError, match=r"slot_mapping must be torch\.int64 and contiguous"):
            cpu.update_index(key, wrong, store)
