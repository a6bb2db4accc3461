"""How the number of rows decides on the kernels of a step on a GPU."""

import pytest

from vllm_kvretrieval.attention.cuda.workspace import Workspace


@pytest.mark.parametrize("units", [20, 58, 108, 132, 148])
@pytest.mark.parametrize("kv_heads", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("most", [1, 3, 4, 100, 257, 1024])
@pytest.mark.parametrize("page_size", [32, 128])
def test_warm_up_has_rows_of_every_kind(units, kv_heads, most, page_size):
    """Programs and parts per row, which kernels are compiled for, of all numbers of rows."""
    shape = {"kv_heads": kv_heads, "group": 4, "head_size": 64, "entries": 100}
    shape |= {"queries": 1, "width": 64, "usual": 64}
    size = {"rows": most, "units": units, "page_size": page_size}
    workspace = Workspace(
        positions=False, ahead=True, outliers=True, device="meta", **size, **shape
    )

    def kinds(numbers):
        for rows in numbers:
            plan, partial, _ = workspace.of(rows)
            yield "programs", plan.stats.shape[1]
            yield "parts", partial.splits

    warm = Workspace.rows_that_differ(most)
    assert len(warm) <= most.bit_length() + 1
    assert set(kinds(warm)) == set(kinds(range(1, most + 1)))
