"""Freed memory goes back to the system."""

import psutil  # type: ignore[import-untyped]
import pytest

from vllm_kvretrieval.engine.cpu import heap

MIB = 1 << 20
BLOCK = 60_000
"""Bytes of a block that the C library takes from its heap, and not from the system itself."""


def resident():
    return psutil.Process().memory_info().rss / MIB


def leave_holes():
    """Free a heap but for a block in fifty, and return these."""
    blocks = [bytes(BLOCK) + b"1" for _ in range(5000)]  # 286 MiB, each written
    return blocks[::50]


def test_pages_between_blocks_that_live_on_are_given_back(monkeypatch):
    own = heap.Heap()
    if own._trim is None:
        pytest.skip("not glibc")
    own.give_back()
    before = resident()
    kept = leave_holes()
    with_holes = resident()
    assert with_holes - before > 150, "the library has given them back by itself: a weak test"

    own.give_back()  # too early
    assert resident() > with_holes - 50
    monkeypatch.setattr("time.monotonic", lambda: own._next)
    own.give_back()
    assert resident() < before + 50
    assert all(len(block) == BLOCK + 1 for block in kept)
