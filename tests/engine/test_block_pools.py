"""Blocks of groups of layers in a slow home, and of others behind them, without a model."""

import pytest

from tests.surprises.cache import BLOCK, CHUNK, FULL, WINDOW, Cache, request, tokens
from vllm_kvretrieval.engine.block_pools import Split, divide

DOCUMENT, QUESTION = tokens(64 * BLOCK, 0), 3 * BLOCK
NEEDED = 2 * (4 + CHUNK // BLOCK + 1)
"""Blocks of two windows of 64 tokens while a chunk is read."""


class Divided(Cache):
    """The prefix cache of an engine with a file for full attention, the second of three groups."""

    def __init__(self, blocks, others, **options):
        super().__init__(WINDOW, FULL, WINDOW, interval=None, **options)
        self.coordinator = self.manager.coordinator
        divide(self.coordinator, Split((1,), blocks, others))
        self.first, self.home, self.last = self.coordinator.single_type_managers

    def free(self):
        return (
            self.home.block_pool.get_num_free_blocks(),
            self.first.block_pool.get_num_free_blocks(),
        )

    def hold(self, count, name, first=10_000):
        """Read a prompt of another request, which goes on."""
        asked, done = request(tokens(count, first), name, max_tokens=9), 0
        while done < count:
            step = min(CHUNK, count - done)
            if self.manager.allocate_slots(asked, step, full_sequence_must_fit=not done) is None:
                return None
            done += step
            asked.num_computed_tokens = done
        return asked


def numbers(manager, asked):
    blocks = manager.req_to_blocks[asked.request_id]
    return {block.block_id for block in blocks if not block.is_null}


def test_a_number_says_where_a_block_lies():
    cache = Divided(101, 2 * NEEDED)
    assert cache.free() == (100, 2 * NEEDED)
    asked = cache.hold(20 * BLOCK, "a")
    assert numbers(cache.home, asked) <= {*range(1, 101)}
    windows = numbers(cache.first, asked), numbers(cache.last, asked)
    assert windows[0].isdisjoint(windows[1])
    assert windows[0] | windows[1] <= {*range(101, 101 + 2 * NEEDED)}
    cache.manager.free(asked)
    assert cache.free() == (100, 2 * NEEDED)


def test_every_question_finds_the_document():
    """The windows at its end are there as long as little else has been read."""
    cache = Divided(301, 2 * NEEDED)
    asked = [DOCUMENT + tokens(QUESTION, 5000 * n) for n in (1, 2, 3)]
    assert [cache.ask(prompt) for prompt in asked] == [0, len(DOCUMENT), len(DOCUMENT)]
    answer = tokens(2 * BLOCK, 7000)
    assert cache.ask([*asked[0], 1, 2, *tokens(20, 99)], answer) == len(asked[0])


def test_a_document_whose_windows_are_gone_is_read_again():
    """Never a part of it: full attention alone is no hit."""
    cache = Divided(301, 2 * NEEDED)
    cache.ask(DOCUMENT)
    cache.ask(tokens(2 * len(DOCUMENT), 20_000))
    assert cache.ask(DOCUMENT) == 0
    few = Divided(301, 2 * NEEDED)
    few.coordinator.retention_interval = 0  # blocks at the end of a prompt only
    few.ask(DOCUMENT)
    few.ask(tokens(2 * len(DOCUMENT), 20_000))
    assert few.ask([*DOCUMENT, 1]) > 0


@pytest.mark.parametrize(("blocks", "others"), [(21, 2 * NEEDED), (101, NEEDED + 1)])
def test_a_request_waits_for_blocks_of_either_kind(blocks, others):
    cache = Divided(blocks, others, enable_caching=False)
    first = cache.hold(16 * BLOCK, "a")
    before = cache.free()
    assert cache.hold(16 * BLOCK, "b") is None
    assert cache.free() == before
    cache.manager.free(first)
    assert cache.hold(16 * BLOCK, "b") is not None


def test_blocks_are_taken_out_and_forgotten_by_number():
    cache = Divided(301, 2 * NEEDED)
    cache.ask(DOCUMENT)
    asked = cache.hold(len(DOCUMENT), "a", first=0)
    cache.first.block_pool.evict_blocks(numbers(cache.first, asked) | numbers(cache.last, asked))
    cache.manager.free(asked)
    assert 0 < cache.ask([*DOCUMENT, 1]) < len(DOCUMENT), "by windows of an earlier place"
    asked = cache.hold(BLOCK, "b")
    assert not cache.manager.reset_prefix_cache()
    cache.manager.free(asked)
    assert cache.manager.reset_prefix_cache()
    assert cache.ask([*DOCUMENT, 1]) == 0
    assert cache.free() == (300, 2 * NEEDED)
