"""The kernels of a decode step on a GPU, interpreted, against their specification."""

import pytest
import torch

from tests import device_checks, interpreter
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.index.mean import Mean
from vllm_kvretrieval.retrieval.index.mean_std import MeanStd
from vllm_kvretrieval.retrieval.index.min_max import MinMax
from vllm_kvretrieval.retrieval.pooling import Pooling

NOTHING = (None, 16, Pooling.SUM)


@pytest.fixture(scope="module")
def interpreted():
    """Runs a check in the interpreter's process."""
    with interpreter.start() as pool:
        yield lambda check, **kwargs: pool.submit(check, "cpu", **kwargs).result()


@pytest.mark.parametrize(
    "case",
    [
        {"methods": [(MinMax(), 16, Pooling.MEAN_SOFTMAX), NOTHING]},
        {
            "methods": [(MinMax(), 8, Pooling.MAX), (Mean(), 16, Pooling.SUM), NOTHING],
            "far": True,
            "positions": True,
            "dtype": torch.float16,
            "threshold": -1.0,
            "seed": 1,
        },
        {
            "methods": [(MeanStd(0.5), 16, Pooling.RELATIVE), (MinMax(), 16, Pooling.SUM)],
            "group": 1,
            "head_size": 96,
            "threshold": 1.0,
            "seed": 2,
        },
        {
            "methods": [(LowRank(3), 16, Pooling.MEAN_SOFTMAX)],
            "group": 7,
            "kv_heads": 1,
            "head_size": 32,
            "exact_records": False,
            "steps": 2,
            "seed": 3,
        },
    ],
)
def test_decode_steps(interpreted, case):
    interpreted(device_checks.decode_steps, **case)


@pytest.mark.parametrize(("head_size", "entry", "rank"), [(64, 32, 0), (96, 16, 7)])
def test_low_rank_records(interpreted, head_size, entry, rank):
    interpreted(device_checks.low_rank_records, head_size=head_size, entry=entry, rank=rank)
