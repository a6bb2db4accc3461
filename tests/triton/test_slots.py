"""The kernels that keep slots, interpreted, against their specification."""

import pytest

from tests.support import device_chain, memory_checks, slot_checks
from vllm_kvretrieval.kernels.triton.mapped import map_host
from vllm_kvretrieval.system_limits import available_memory


@pytest.mark.parametrize(
    ("capacity", "select", "drafts", "in_place", "run"),
    [
        (18, 6, 0, False, 1),
        (18, 6, 0, True, 1),
        (20, 7, 0, False, 1),
        (64, 12, 0, True, 1),
        (24, 6, 7, False, 1),
        (24, 6, 7, True, 4),
        (7, 6, 0, True, 1),
        (13, 12, 7, True, 2),
    ],
)
def test_resolve(interpreted, capacity, select, drafts, in_place, run):
    """Lists that are longer than there are slots, and pages of the home that have several of those
    of slots among them."""
    sizes = {"capacity": capacity, "select": select, "drafts": drafts, "run": run}
    hits = 0.4 if capacity < select + 3 else 0.6
    interpreted(slot_checks.resolve, **sizes, in_place=in_place, least_hits=hits)


def test_no_more_slots_than_a_step_needs(interpreted):
    """Then few units can be recalled ahead, and yet all attended units are there."""
    interpreted(slot_checks.resolve, capacity=9, select=6, rows=2, least_hits=0.4)


@pytest.mark.parametrize(("kv_heads", "head_size", "page"), [(3, 96, 16), (2, 128, 32)])
def test_stage_context(interpreted, kv_heads, head_size, page):
    interpreted(slot_checks.stage, kv_heads=kv_heads, head_size=head_size, page=page, programs=5)


@pytest.mark.parametrize(
    ("lengths", "page", "splits", "drafts", "run"),
    [
        ([200, 33, 0, 130], 32, 4, False, 1),
        ([1, 400], 128, 1, False, 1),
        ([300, 257], 16, 2, True, 2),
        ([90, 33], 1, 2, True, 16),
    ],
)
def test_missing_pages_are_read_at_home(interpreted, lengths, page, splits, drafts, run):
    """Attention is that over full slots, to the last bit, and leaves them full."""
    options = {"lengths": lengths, "page": page, "splits": splits, "run": run}
    interpreted(slot_checks.read_in_place, **options, queries=3 if drafts else 1)


def test_far_units(interpreted):
    interpreted(memory_checks.without_filling, of=slot_checks.far_units)


@pytest.mark.parametrize("far", [False, True])
def test_a_whole_step(interpreted, far):
    """From writing to selection and recall ahead, whose launches come between those that they are
    beside."""
    interpreted(device_chain.interpreted, far=far)


def test_host_memory_that_is_not_there():
    """Refused with the numbers before any of it is taken."""
    assert available_memory() > 2**20
    with pytest.raises(MemoryError, match=r"1048576.0 GiB .* GiB are available: ask for less"):
        map_host(2**50)
