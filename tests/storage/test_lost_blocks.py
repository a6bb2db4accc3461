"""Blocks of a home that could not be written or read are reported, and computed anew."""

import errno
from types import SimpleNamespace

import pytest

from vllm_kvretrieval.storage import lost as lost_module
from vllm_kvretrieval.storage.lost import LostBlocks


class Home:
    """A home of eight blocks of two pages, of which a test says which are lost."""

    layer_bytes = 8 * 2 * 100

    def __init__(self):
        self.failed = 0
        self.pages: set[int] = set()

    def take_write_error(self):
        failed, self.failed = self.failed, 0
        return failed

    def take_lost(self, page_bytes):
        assert page_bytes == 100
        lost, self.pages = self.pages, set()
        return lost


def step(*new, cached=(), copies=None):
    """A step of vLLM's scheduler; requests are (blocks, tokens that are there already)."""
    names = [f"r{i}" for i in range(len(cached))]
    return SimpleNamespace(
        kv_cache_block_copies=copies,
        scheduled_new_reqs=[
            SimpleNamespace(block_ids=(blocks,), num_computed_tokens=tokens)
            for blocks, tokens in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names,
            resumed_req_ids={n for n, (_, _, r) in zip(names, cached, strict=True) if r},
            new_block_ids=[None if b is None else (b,) for b, _, _ in cached],
            num_computed_tokens=[tokens for _, tokens, _ in cached],
        ),
    )


@pytest.fixture
def logged(monkeypatch):
    lines: list[str] = []
    log = SimpleNamespace(error=lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(lost_module, "logger", log)
    return lines


def test_lost_blocks(logged):
    """Lost blocks are reported in two steps; after a failure to write, also to requests that come
    later."""
    home = Home()
    lost = LostBlocks(home, [], "/there", blocks=8, block_size=32, pages=2)  # type: ignore[arg-type]
    lost.begin_step(step(([0, 1], 0)))
    assert lost.take() == set()
    home.pages = {5}
    lost.begin_step(step(copies=[(2, 6), (3, 7)]))
    assert lost.take() == {2, 6}
    lost.begin_step(step())
    assert lost.take() == {2, 6}
    assert lost.take() == set()
    assert logged == [
        "The KV cache's home (/there) has lost 2 blocks (2, 6); requests that hold them fail. "
        "A part of its file cannot be read any more."
    ]
    everything = set(range(8))
    home.failed = errno.ENOSPC
    lost.begin_step(step())
    assert lost.take() == everything
    assert "has lost 8 blocks" in logged[-1]
    assert "No space left on device. The disk has no space" in logged[-1]
    lost.begin_step(step(([0, 1, 2], 0)))
    assert lost.take() == everything, "requests whose blocks were new when it happened"
    lost.begin_step(step(([0, 3, 4], 33), cached=[([5], 64, False), (None, 9, False)]))
    assert lost.take() == {3}, "found in the prefix cache; 0 has been written anew"
    lost.begin_step(step(cached=[([0, 6, 7], 64, True)]))
    assert lost.take() == {3, 6}, "3 for the second time; what was preempted finds 6"
    lost.begin_step(step(([4, 5, 7], 96)))
    assert lost.take() == {6}
    assert lost.take() == set()
