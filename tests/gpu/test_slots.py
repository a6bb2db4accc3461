"""The ops over slots on a GPU: compiled, against their specification."""

import pytest
import torch

from tests.support import encoded_checks, slot_checks, triton_checks

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("programs", [1, 16, 200])
def test_recall(head_size, page, programs):
    triton_checks.recall(
        "cuda",
        head_size=head_size,
        page=page,
        kv_heads=8,
        counts=(0, 1, 17, 56),
        programs=programs,
    )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("capacity", "select"), [(9, 6), (128, 60), (130, 64), (512, 250), (2048, 900)]
)
def test_resolve(capacity, select, in_place):
    sizes = {"capacity": capacity, "select": select, "rows": 3 + (capacity > 9)}
    hits = 0.4 if capacity < 10 else 0.6
    slot_checks.resolve("cuda", **sizes, least_hits=hits, in_place=in_place)


@pytest.mark.parametrize(("capacity", "select", "run"), [(2048, 900, 16), (600, 900, 32)])
def test_resolve_parts_of_pages(capacity, select, run):
    """As single tokens are, and lists that are longer than there are slots."""
    sizes = {"capacity": capacity, "select": select, "run": run, "rows": 4}
    slot_checks.resolve("cuda", **sizes, least_hits=0.4, in_place=True)


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize(("splits", "queries"), [(1, 1), (4, 1), (32, 1), (4, 3)])
def test_missing_pages_are_read_at_home(head_size, page, splits, queries):
    sizes = {"page": page, "head_size": head_size, "splits": splits, "queries": queries}
    slot_checks.read_in_place("cuda", lengths=[0, 1, 33, 2048, 5000, 700], kv_heads=3, **sizes)


@pytest.mark.parametrize("head_size", [64, 128])
def test_missing_tokens_are_read_at_home(head_size):
    sizes = {"page": 1, "run": 32, "head_size": head_size, "splits": 4}
    slot_checks.read_in_place("cuda", lengths=[0, 1, 33, 2048, 700, 90], kv_heads=3, **sizes)


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("programs", [1, 16, 200])
def test_stage_context(head_size, page, programs):
    slot_checks.stage("cuda", kv_heads=8, head_size=head_size, page=page, programs=programs)


def test_far_units():
    slot_checks.far_units("cuda")


@pytest.mark.parametrize("codec", ["k8v4", "k4v4", "k2v2", "k4v4_sparse", "k2v2_sparse"])
@pytest.mark.parametrize("dtype", triton_checks.DTYPES)
@pytest.mark.parametrize(("head_size", "page", "kept"), [(64, 16, 1), (96, 32, 0), (128, 128, 4)])
def test_encoded_pages(codec, dtype, head_size, page, kept):
    shape = {"page": page, "kv_heads": 3, "head_size": head_size, "dtype": dtype}
    encoded_checks.life("cuda", codec=codec, kept=kept, **shape)


@pytest.mark.parametrize("dtype", triton_checks.DTYPES)
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize(("group", "splits"), [(1, 1), (4, 4), (7, 32), (16, 4)])
def test_sparse_decode(head_size, group, splits, dtype):
    triton_checks.decode(
        "cuda",
        lengths=[0, 1, 31, 32, 33, 1000, 2048, 0, 64, 5000, 127, 700],
        kv_heads=3,
        group=group,
        head_size=head_size,
        splits=splits,
        dtype=dtype,
        launches=3,
    )


@pytest.mark.parametrize("dtype", triton_checks.DTYPES)
@pytest.mark.parametrize("magnitude", [0.0, 1e-4, 60.0])
def test_extreme_values(dtype, magnitude):
    triton_checks.decode(
        "cuda",
        lengths=[0, 1, 33, 2048, 500, 64],
        kv_heads=2,
        group=4,
        head_size=128,
        splits=4,
        dtype=dtype,
        magnitude=magnitude,
    )
