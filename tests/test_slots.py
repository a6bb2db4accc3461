"""The kernels that keep slots, interpreted, against their specification."""

import pytest

from tests import interpreter, slot_checks


@pytest.fixture(scope="module")
def interpreted():
    """Runs a check in the interpreter's process."""
    with interpreter.start() as pool:
        yield lambda check, **kwargs: pool.submit(check, "cpu", **kwargs).result()


@pytest.mark.parametrize(
    ("capacity", "select", "uneven"), [(18, 6, False), (20, 7, True), (64, 12, False)]
)
def test_resolve(interpreted, capacity, select, uneven):
    interpreted(slot_checks.resolve, capacity=capacity, select=select, uneven=uneven)


def test_no_more_slots_than_a_step_needs(interpreted):
    """Then nothing can be recalled ahead, and what is attended to is there all the same."""
    interpreted(slot_checks.resolve, capacity=9, select=6, rows=2, least_hits=0.4)


@pytest.mark.parametrize(("kv_heads", "head_size", "capacity"), [(2, 64, 7), (1, 96, 16)])
def test_write_tail(interpreted, kv_heads, head_size, capacity):
    interpreted(slot_checks.tail, kv_heads=kv_heads, head_size=head_size, capacity=capacity)


@pytest.mark.parametrize(("kv_heads", "head_size", "page"), [(3, 96, 16), (2, 128, 32)])
def test_stage_context(interpreted, kv_heads, head_size, page):
    interpreted(slot_checks.stage, kv_heads=kv_heads, head_size=head_size, page=page, programs=5)


def test_far_units(interpreted):
    interpreted(slot_checks.far_units)
