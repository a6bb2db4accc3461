"""The Triton kernels without a GPU, interpreted against their specification."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.common import ROOT
from tests.support import triton_checks
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.slots import DecodeWorkspace

RAGGED = [0, 1, 32, 33, 200, 512, 1, 0, 65, 64, 127, 300]


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize("page", [16, 32, 128])
def test_recall(interpreted, head_size, page):
    interpreted(
        triton_checks.recall,
        head_size=head_size,
        page=page,
        kv_heads=3,
        counts=(0, 1, 13, 21),
        programs=5,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("group", "head_size", "splits"), [(1, 64, 1), (4, 128, 4), (7, 96, 2), (16, 256, 8)]
)
def test_sparse_decode(interpreted, group, head_size, splits, dtype):
    interpreted(
        triton_checks.decode,
        lengths=RAGGED,
        kv_heads=3,
        group=group,
        head_size=head_size,
        splits=splits,
        dtype=dtype,
        launches=2,
    )


@pytest.mark.parametrize(
    ("sinks", "softcap", "magnitude"), [(True, 0.0, 1.0), (False, 2.0, 1.0), (True, 50.0, 8.0)]
)
@pytest.mark.parametrize("splits", [1, 8])
def test_sinks_and_soft_caps(interpreted, sinks, softcap, magnitude, splits):
    """Beside caps that hardly matter, that bend scores, and that most scores reach."""
    interpreted(
        triton_checks.decode,
        lengths=RAGGED,
        kv_heads=3,
        group=4,
        head_size=64,
        splits=splits,
        magnitude=magnitude,
        sinks=sinks,
        softcap=softcap,
    )


@pytest.mark.parametrize("seed", range(6))
def test_sparse_decode_of_random_shapes(interpreted, seed):
    draw = random.Random(seed)
    kv_heads = draw.randint(1, 4)
    interpreted(
        triton_checks.decode,
        lengths=[draw.randint(0, 400) for _ in range(kv_heads * draw.randint(1, 3))],
        kv_heads=kv_heads,
        group=draw.randint(1, 16),
        head_size=16 * draw.randint(1, 16),
        splits=draw.choice([1, 2, 4, 16]),
        page=draw.choice([8, 16, 32, 64, 128]),
        dtype=draw.choice(triton_checks.DTYPES),
        sinks=draw.random() < 0.5,
        softcap=draw.choice([0.0, 30.0]),
    )


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(("group", "splits", "scored"), [(1, 1, 400), (3, 4, 90), (16, 2, 1)])
def test_scores_of_listed_tokens(interpreted, group, splits, scored, softcap):
    """Of whole lists, of their first tokens, and none behind a list."""
    interpreted(
        triton_checks.decode,
        lengths=RAGGED,
        kv_heads=3,
        group=group,
        head_size=64,
        splits=splits,
        page=1,
        sinks=softcap > 0,
        softcap=softcap,
        scored=scored,
    )


@pytest.mark.parametrize("seed", range(4))
def test_sparse_decode_of_drafts(interpreted, seed):
    """Requests of one to all queries, in lists whose last parts are drafts alone."""
    draw = random.Random(seed)
    kv_heads, queries = draw.randint(1, 3), draw.choice([2, 3, 4, 7])
    counts = [draw.randint(1, queries) for _ in range(3)] + [queries]
    page, head_size = draw.choice([8, 16, 32]), 16 * draw.randint(1, 16)
    tile = 8192 // 2 ** (head_size - 1).bit_length()  # tokens that a program takes at a time
    lengths = [draw.choice([count, draw.randint(count, 400), tile + draw.randint(1, count)])
               for count in counts for _ in range(kv_heads)]  # fmt: skip
    interpreted(
        triton_checks.decode,
        lengths=lengths,
        kv_heads=kv_heads,
        group=draw.randint(1, 16 // queries),
        head_size=head_size,
        splits=draw.choice([1, 2, 4]),
        page=page,
        dtype=draw.choice(triton_checks.DTYPES),
        sinks=draw.random() < 0.5,
        softcap=draw.choice([0.0, 30.0]),
        queries=queries,
        counts=counts,
    )


@pytest.mark.parametrize("dtype", triton_checks.DTYPES)
@pytest.mark.parametrize("magnitude", [0.0, 1e-4, 60.0])
def test_extreme_values(interpreted, dtype, magnitude):
    """Scores that all tie, vanish, or leave one token all the weight."""
    interpreted(
        triton_checks.decode,
        lengths=RAGGED,
        kv_heads=3,
        group=2,
        head_size=64,
        splits=4,
        dtype=dtype,
        magnitude=magnitude,
    )


def decode_arguments(*, dtype=torch.bfloat16, group=2, head_size=64, page=32):
    """Arguments of `sparse_decode` for one request with two KV heads."""
    query = torch.zeros(1, 2 * group, head_size, dtype=dtype)
    return {
        "query": query,
        "slots": torch.zeros(4, page, 2 * head_size, dtype=dtype),
        "slot_lists": torch.zeros(2, 3, dtype=torch.int32),
        "lengths": torch.zeros(2, dtype=torch.int32),
        "scale": 1.0,
        "out": torch.zeros_like(query),
        "lse": torch.zeros(2, group),
        "workspace": DecodeWorkspace.empty(
            rows=2, splits=2, group=group, head_size=head_size, device="cpu"
        ),
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (decode_arguments(dtype=torch.float32), "bfloat16 or float16"),
        (decode_arguments(group=17), "1 to 16"),
        (decode_arguments(head_size=72), "multiple of 16"),
        (decode_arguments(head_size=272), "up to 256"),
        (decode_arguments(page=24), "power of two"),
        ({"slots": torch.zeros(4, 32, 256, dtype=torch.bfloat16)[..., :128]}, "contiguous"),
        ({"slot_lists": torch.zeros(2, 3, dtype=torch.int64)}, "slot_lists must be"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths must be"),
        ({"out": torch.zeros(1, 4, 64)}, "out must be"),
        ({"workspace": decode_arguments(group=3)["workspace"]}, "workspace"),
        ({"sinks": torch.zeros(2)}, r"sinks must be \[4\]"),
        ({"queries": 2}, "need to know where these start"),
        ({"queries": 2, "starts": torch.zeros(2)}, "starts must be"),
        ({"scores": torch.zeros(2, 3, 9)}, "scores must be"),
        (
            {"queries": 2, "starts": torch.zeros(1, dtype=torch.int32)}
            | {"scores": torch.zeros(2, 2, 9)},
            "scores are of rows of one query, and these have 2",
        ),
    ],
)
def test_wrong_tensors_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        kernels.sparse_decode(**decode_arguments() | changed)


def test_units_that_do_not_fit_are_refused():
    home = torch.zeros(2, 3, 32, 128, dtype=torch.bfloat16)
    listed, count = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.recall_units(home, torch.zeros(5, 16, 128).bfloat16(), listed, listed, count)
    with pytest.raises(ValueError, match="targets must be"):
        kernels.recall_units(home, home[0].clone(), listed, listed[:2], count)


def test_splits_fill_the_gpu():
    """About two programs per multiprocessor, a power of two of parts, and never none. Parts of
    short lists have four tiles at least, which are of 64 tokens here."""
    of_rows = [kernels.count_splits(rows, 132, 8192, 128) for rows in (8, 64, 264, 1000)]
    assert of_rows == [32, 4, 1, 1]
    of_tokens = [kernels.count_splits(8, 132, tokens, 128) for tokens in (64, 511, 512, 2048)]
    assert of_tokens == [1, 2, 2, 8]


def test_no_vllm_in_the_kernels():
    """The kernels can be run and timed where vLLM is not installed."""
    code = (
        "import sys, vllm_kvretrieval.kernels.triton.mapped; "
        "assert not any(name.split('.')[0] == 'vllm' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(ROOT), check=True)
