"""The ops of a decode step on a GPU: compiled, against their specification."""

import pytest
import torch

from tests import device_checks
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.index.mean import Mean
from vllm_kvretrieval.retrieval.index.mean_std import MeanStd
from vllm_kvretrieval.retrieval.index.min_max import MinMax
from vllm_kvretrieval.retrieval.pooling import Pooling

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("far", [False, True])
def test_decode_steps(pooling, far, seed):
    """All indexes with exact records in one batch."""
    indexes = (MinMax(), 16), (Mean(), 32), (MeanStd(), 32), (None, 32)
    methods = [(index, entry, pooling) for index, entry in indexes]
    shape = {"kv_heads": 2 + seed, "group": (1, 4, 5, 8)[seed], "head_size": (64, 128)[seed % 2]}
    device_checks.decode_steps(
        "cuda", methods=methods, page=32, steps=20, far=far, positions=far, seed=seed, **shape
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("head_size", "rank"), [(64, 0), (128, 0), (96, 7), (128, 16)])
def test_decode_steps_of_low_rank(head_size, rank, seed):
    methods = [(LowRank(rank), 32, Pooling.MEAN_SOFTMAX), (MinMax(), 32, Pooling.MAX)]
    device_checks.decode_steps(
        "cuda", methods=methods, page=32, head_size=head_size, steps=10, seed=seed,
        exact_records=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("head_size", "entry", "rank"), [(64, 32, 0), (128, 32, 0), (96, 16, 7), (256, 64, 16)]
)
def test_low_rank_records(head_size, entry, rank):
    device_checks.low_rank_records("cuda", head_size=head_size, entry=entry, rank=rank, kv_heads=8)
