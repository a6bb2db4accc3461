"""The kernels of a decode step on a GPU, interpreted, against their specification."""

from dataclasses import replace

import pytest
import torch

from tests.support import device_checks
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import DeviceRequests, DeviceRows
from vllm_kvretrieval.retrieval.index.bounding import Bounding
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.index.landmark import Landmark
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.index.mean import Mean
from vllm_kvretrieval.retrieval.index.mean_std import MeanStd
from vllm_kvretrieval.retrieval.index.min_max import MinMax
from vllm_kvretrieval.retrieval.index.representative import Representative
from vllm_kvretrieval.retrieval.pooling import Pooling

NOTHING = (None, 8, Pooling.SUM)


@pytest.mark.parametrize(
    "case",
    [
        {
            "methods": [(MinMax(), 8, Pooling.MEAN_SOFTMAX), NOTHING],
            "head_size": 128,
            "least": [0, 0, 0, 0, 80, 0],
            "steps": 6,
        },
        {
            "methods": [(MinMax(), 4, Pooling.MAX), (Mean(), 8, Pooling.SUM), NOTHING],
            "far": True,
            "positions": True,
            "dtype": torch.float16,
            "threshold": -1.0,
            "seed": 1,
        },
        {
            "methods": [(MeanStd(0.5), 8, Pooling.RELATIVE), (MinMax(), 8, Pooling.SUM)],
            "group": 1,
            "head_size": 96,
            "threshold": 1.0,
            "steps": 3,
            "seed": 2,
        },
        {
            "methods": [
                (Bounding(), 8, Pooling.SUM),
                (Representative(), 4, Pooling.MEAN_SOFTMAX),
                (Exact(), 8, Pooling.MAX),
            ],
            "group": 8,
            "kv_heads": 1,
            "drafts": 3,
            "steps": 4,
            "seed": 4,
        },
        {
            "methods": [(MinMax(), 8, Pooling.MEAN_SOFTMAX), (Mean(), 8, Pooling.MAX), NOTHING],
            "counted": True,
            "threshold": 0.9,
            "seed": 5,
        },
        {
            "methods": [(Mean(), 4, Pooling.MEAN_SOFTMAX), (MinMax(), 8, Pooling.MAX)],
            "masses": (0.3, 0.7, 0.95, 1.0, 1e-6),
            "threshold": 1.0,
            "far": True,
            "positions": True,
            "steps": 3,
            "seed": 6,
        },
        {
            "methods": [(MinMax(), 8, Pooling.MEAN_SOFTMAX)],
            "masses": (0.5, 0.9),
            "counted": True,
            "threshold": 1.0,
            "group": 1,
            "steps": 3,
            "seed": 7,
        },
        {
            "methods": [(MinMax(), 8, Pooling.MEAN_SOFTMAX), (Mean(), 4, Pooling.SUM), NOTHING],
            "drafts": 4,
            "steps": 6,
            "seed": 8,
        },
        {
            "methods": [(MinMax(), 4, Pooling.MAX), (Exact(), 8, Pooling.MAX)],
            "drafts": 9,
            "far": True,
            "positions": True,
            "threshold": -1.0,
            "steps": 6,
            "seed": 9,
        },
        {
            "methods": [(MinMax(), 8, Pooling.MEAN_SOFTMAX), (Mean(), 8, Pooling.MAX), NOTHING],
            "masses": (0.5, 0.9),
            "counted": True,
            "threshold": 1.0,
            "drafts": 5,
            "seed": 10,
        },
        {
            "methods": [
                (Landmark(), 4, Pooling.MAX_SOFTMAX),
                (Mean(), 4, Pooling.MAX_SOFTMAX),
                NOTHING,
            ],
            "outliers": 0.4,
            "drafts": 4,
            "steps": 5,
            "seed": 11,
        },
        {
            "methods": [
                (Landmark(), 8, Pooling.MEAN_SOFTMAX),
                (Landmark(), 4, Pooling.MAX_SOFTMAX),
            ],
            "outliers": 0.7,
            "counted": True,
            "far": True,
            "positions": True,
            "group": 4,
            "head_size": 96,
            "dtype": torch.float16,
            "seed": 12,
        },
        {
            "methods": [(LowRank(3), 16, Pooling.MEAN_SOFTMAX)],
            "group": 7,
            "kv_heads": 1,
            "head_size": 32,
            "page": 16,
            "exact_records": False,
            "steps": 1,
            "seed": 3,
        },
    ],
)
def test_decode_steps(interpreted, case):
    interpreted(device_checks.decode_steps, **case)


@pytest.mark.parametrize(
    ("index", "entry", "pooling", "lengths", "outliers"),
    [
        (Mean(), 8, Pooling.MEAN_SOFTMAX, [8 * 60, 8 * 64, 8 * 65 - 3, 8 * 66, 8 * 150 + 1], 0),
        (MinMax(), 4, Pooling.MAX, [8 * 140, 8 * 65], 0),
        (Landmark(), 4, Pooling.MAX_SOFTMAX, [8 * 60, 8 * 65 - 3, 8 * 66, 8 * 150 + 1], 0.4),
    ],
)
def test_long_contexts(interpreted, index, entry, pooling, lengths, outliers):
    """Contexts of tiles of 64 pages: within a tile, to its end, with a window within the next, and
    of several."""
    interpreted(
        device_checks.long_contexts,
        lengths=lengths,
        tile_pages=64,
        index=index,
        entry=entry,
        pooling=pooling,
        outliers=outliers,
    )


def test_outliers_are_as_many_as_on_a_cpu(interpreted):
    """Where their share of what is selected is nearly a whole number, too."""
    assert [int(share * 100) for share in (0.29, 0.57, 0.7)] == [28, 56, 70]
    for share in (0.158, 0.29, 0.57, 0.7, 0.999):
        interpreted(device_checks.outlier_counts, share=share)


class Other(Mean):
    """Of another package."""

    name = "other"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({}, marks=pytest.mark.slow),  # what follows has all of it
        {"pooling": Pooling.MAX, "head_size": 80, "entry": 8, "dtype": torch.float16, "seed": 1},
        {"counted": True, "seed": 4},
        pytest.param({"filters": True, "seed": 2}, marks=pytest.mark.slow),
        {"drafts": 3, "seed": 5},
        {"filters": True, "drafts": 5, "seed": 6},
        {"filters": True, "group": 1, "head_size": 16, "dtype": torch.float16, "seed": 3},
        {"positions": True, "drafts": 3, "seed": 7},
        {"positions": True, "filters": True, "seed": 8},
    ],
)
def test_tokens(interpreted, case):
    interpreted(device_checks.token_steps, **case)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"drafts": 3, "seed": 1},
        {"kv_heads": 3, "most": 64},
        {"positions": True, "seed": 2},
        {"positions": True, "drafts": 2, "seed": 3},
    ],
)
def test_kept_tokens(interpreted, case):
    interpreted(device_checks.kept_lists, **case)


@pytest.mark.parametrize("rule", device_checks.RULES)
def test_dropped_tokens(interpreted, rule):
    interpreted(device_checks.dropped_tokens, rule=rule)


@pytest.mark.parametrize("rule", ["latest", "stamps of layers"])
def test_dropped_tokens_of_several_workers(interpreted, rule):
    interpreted(device_checks.dropped_tokens, rule=rule, workers=2, seed=2)


def test_dropped_tokens_of_one_head(interpreted):
    shape = {"kv_heads": 1, "group": 5, "most": 33, "tile": 64}
    interpreted(device_checks.dropped_tokens, rule="sum", seed=1, **shape)


@pytest.mark.parametrize(("head_size", "entry", "rank"), [(64, 32, 0), (96, 16, 7)])
def test_low_rank_records(interpreted, head_size, entry, rank):
    interpreted(device_checks.low_rank_records, head_size=head_size, entry=entry, rank=rank)


@pytest.mark.parametrize("far", [False, True])
def test_no_step_is_empty_to_the_dense_half(interpreted, far):
    """FlashAttention 3 divides by the tokens of all rows when it plans their work."""
    assert interpreted(device_checks.dense_lens, far=far) == [1, 0, 0]


def a_layer(index=None, **changed):
    """A layer of the kernels, and rows for it; attributes of its only store may be others."""
    shape = (2, 3, 64, 16, torch.bfloat16)
    size = {"pages": 4, "seats": 2, "rows": 1, "positions": False}
    method = (index or MinMax(), 16, Pooling.SUM)
    layer = device_checks.Layer(kernels, "cpu", [method], shape, **size)
    for name, value in changed.items():
        setattr(layer.choosers[0].store, name, value)
    return layer


def a_step(layer):
    """A step of one row. Nothing has to be launched to refuse it."""
    one = torch.zeros(1, dtype=torch.int32)
    rows = DeviceRows(
        seats=one,
        prefilling=one,
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=one + 20,
        slot_mapping=torch.zeros(1, dtype=torch.int64),
        block_table=torch.zeros(1, 2, dtype=torch.int32),
        choosers=one,
        fresh=one,
        dense_lens=one,
        certain=one + 20,
    )
    query = torch.zeros(1, 6, 64, dtype=torch.bfloat16)
    return query, rows, layer.requests, layer.choosers, layer.plan


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"index": Other()}, "there is no kernel for index=other; use one of min_max, mean"),
        ({"index": Exact(), "cache": None}, "the index is not over the cache that is written"),
        ({"layout": "vec"}, "the index is for pages of 16 tokens, laid out as rows"),
        ({"records": torch.zeros(1, 2, 8, dtype=torch.uint8)}, "the index's records must be"),
    ],
    ids=str,
)
def test_indexes_that_kernels_do_not_take(changed, message):
    layer = a_layer(**changed)
    with pytest.raises(ValueError, match=message):
        kernels.plan_decode(*a_step(layer))
    with pytest.raises(ValueError, match=message):
        kernels.index_pages(torch.zeros(1, dtype=torch.int32), layer.choosers[0].store)
    tokens = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        kernels.write_kv(tokens, tokens, torch.zeros(1, dtype=torch.int64), layer.cache,
                         [layer.choosers[0].store])  # fmt: skip


def test_an_index_without_a_cache_takes_keys_one_by_one_alone():
    """As one of encoded pages does."""
    layer = a_layer(cache=None)
    with pytest.raises(ValueError, match="the index has no cache with the keys of pages"):
        kernels.index_pages(torch.zeros(1, dtype=torch.int32), layer.choosers[0].store)
    tokens = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="the index is not over the cache that is written"):
        kernels.write_kv(tokens, tokens, torch.zeros(1, dtype=torch.int64), layer.cache,
                         [layer.choosers[0].store])  # fmt: skip


def test_steps_that_kernels_do_not_take():
    layer = a_layer()
    query, rows, requests, choosers, plan = a_step(layer)
    with pytest.raises(ValueError, match=r"query must be torch.bfloat16 \[tokens, heads, 64\]"):
        kernels.plan_decode(query.float(), rows, requests, choosers, plan)
    with pytest.raises(ValueError, match="must be of the requests' seats"):
        kernels.plan_decode(query, rows, DeviceRequests.empty(3, "cpu"), choosers, plan)
    with pytest.raises(ValueError, match="no kernel that scores candidates again"):
        kernels.plan_decode(query, rows, requests, [replace(choosers[0], rerank=2)], plan)
    with pytest.raises(ValueError, match="no kernel that adds up what is not selected"):
        kernels.plan_decode(query, rows, requests, [replace(choosers[0], remainder=0.1)], plan)
    with pytest.raises(ValueError, match="outliers take an index that tells them"):
        kernels.plan_decode(query, rows, requests, [replace(choosers[0], outliers=0.1)], plan)
    marks = a_layer(Landmark())
    of_marks = [replace(marks.choosers[0], outliers=0.1)]
    with pytest.raises(ValueError, match="the plan has no room for outliers"):
        kernels.plan_decode(query, rows, marks.requests, of_marks, marks.plan)
    short = replace(marks.plan, cosines=marks.plan.scores[:, :1].contiguous())
    with pytest.raises(ValueError, match=r"plan\.cosines must have two rows of as many entries"):
        kernels.plan_decode(query, rows, marks.requests, of_marks, short)
    with pytest.raises(ValueError, match=r"rows\.seats must be torch\.int32"):
        kernels.prepare_rows(replace(rows, seats=rows.seats.long()), requests, 16)
    narrow = replace(plan, lengths=plan.lengths[:1])
    with pytest.raises(ValueError, match=r"plan\.lengths has room for 1 of 2 lists"):
        kernels.plan_decode(query, rows, requests, choosers, narrow)
