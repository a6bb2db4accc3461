"""The ops of a decode step on a GPU: compiled, against their specification."""

import pytest
import torch

from tests.support import device_checks
from vllm_kvretrieval.retrieval.index.bounding import Bounding
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.index.landmark import Landmark
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.index.mean import Mean
from vllm_kvretrieval.retrieval.index.mean_std import MeanStd
from vllm_kvretrieval.retrieval.index.min_max import MinMax
from vllm_kvretrieval.retrieval.index.representative import Representative
from vllm_kvretrieval.retrieval.pooling import Pooling

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)

SMALL = (MinMax(), 16), (Mean(), 32), (MeanStd(), 32), (None, 32)
LARGE = (Bounding(), 32), (Representative(), 16), (Exact(), 32), (None, 32)
"""Indexes with exact records, and the tokens of an entry."""
CASES = {
    "freekv": (SMALL, Pooling.MEAN_SOFTMAX, False, 0),
    "freekv_far": (SMALL, Pooling.MEAN_SOFTMAX, True, 3),
    "relative": (SMALL, Pooling.RELATIVE, False, 1),
    "max": (SMALL, Pooling.MAX, True, 2),
    "sum": (LARGE, Pooling.SUM, False, 3),
}
"""Indexes, pooling, whether the KV cache is in host memory, and the seed: few cases, since each
compiles a kernel of selection for each of its indexes."""


@pytest.mark.parametrize(("indexes", "pooling", "far", "seed"), CASES.values(), ids=CASES)
def test_decode_steps(indexes, pooling, far, seed):
    """Several methods in one batch."""
    methods = [(index, entry, pooling) for index, entry in indexes]
    shape = {"kv_heads": 2 + seed, "group": (1, 4, 5, 8)[seed], "head_size": (64, 128)[seed % 2]}
    device_checks.decode_steps(
        "cuda", methods=methods, page=32, steps=20, far=far, positions=far, seed=seed, **shape
    )


@pytest.mark.parametrize(
    "case", [{"counted": True}, {"masses": (0.3, 0.7, 0.95), "threshold": 1.0}]
)
def test_different_numbers_of_pages(case):
    methods = [(MinMax(), 32, Pooling.MEAN_SOFTMAX), (None, 32, Pooling.SUM)]
    device_checks.decode_steps("cuda", methods=methods, page=32, steps=10, **case)


@pytest.mark.parametrize("counted", [False, True])
def test_outliers(counted):
    """By entries of half a page, in contexts that are ranked at once, and in tiles."""
    marks = {"page": 16, "head_size": 128, "outliers": 0.4}
    methods = [(Landmark(), 8, Pooling.MAX_SOFTMAX), (None, 16, Pooling.SUM)]
    device_checks.decode_steps("cuda", methods=methods, steps=10, counted=counted, **marks)
    in_tiles = {"index": Landmark(), "entry": 8, "pooling": Pooling.MAX_SOFTMAX, "tile_pages": 64}
    device_checks.long_contexts("cuda", lengths=[16 * 60, 16 * 150 + 1], **in_tiles, **marks)
    device_checks.outlier_counts("cuda", share=0.29)


@pytest.mark.parametrize(("filters", "counted"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("head_size", [64, 128])
def test_tokens(head_size, filters, counted):
    shape = {"kv_heads": 4, "group": 4, "head_size": head_size, "page": 32, "entry": 32}
    device_checks.token_steps("cuda", filters=filters, counted=counted, **shape)
    device_checks.token_steps("cuda", filters=filters, positions=True, **shape)


@pytest.mark.parametrize(("drafts", "positions"), [(0, False), (3, False), (2, True)])
def test_kept_tokens(drafts, positions):
    sizes = {"kv_heads": 4, "page": 32, "drafts": drafts}
    device_checks.kept_lists("cuda", positions=positions, **sizes)


@pytest.mark.parametrize("rule", device_checks.RULES)
def test_dropped_tokens(rule):
    shape = {"kv_heads": 4, "group": 4, "most": 900, "tile": 512, "steps": 6}
    device_checks.dropped_tokens("cuda", rule, **shape)


def test_dropped_tokens_of_several_workers():
    shape = {"kv_heads": 4, "group": 4, "most": 900, "tile": 512, "steps": 3}
    device_checks.dropped_tokens("cuda", "latest", workers=2, **shape)


@pytest.mark.parametrize(("head_size", "rank"), [(64, 0), (128, 0), (96, 7), (128, 16)])
def test_decode_steps_of_low_rank(head_size, rank):
    methods = [(LowRank(rank), 32, Pooling.MEAN_SOFTMAX), (MinMax(), 32, Pooling.MAX)]
    device_checks.decode_steps(
        "cuda", methods=methods, page=32, head_size=head_size, steps=10, exact_records=False
    )


@pytest.mark.parametrize(
    ("head_size", "entry", "rank"), [(64, 32, 0), (128, 32, 0), (96, 16, 7), (256, 64, 16)]
)
def test_low_rank_records(head_size, entry, rank):
    device_checks.low_rank_records("cuda", head_size=head_size, entry=entry, rank=rank, kv_heads=8)
