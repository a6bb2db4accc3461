"""How memory is divided between a slow home, its recall cache, and the rest."""

import itertools
import mmap
from dataclasses import replace

import pytest
import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.tier_sizes import Cache, Tiers

MIB = 1 << 20


# A cache of 9 + 1 layers, 4 KV heads, 64 KiB per page of 32 tokens and layer.
CACHE = Cache(
    retrieval_layers=9,
    dense_layers=1,
    kv_heads=4,
    block_size=128,
    block_bytes=4 * 65536,
    head_size=64,
    dtype=torch.float32,
    max_num_seqs=2,
    max_model_len=12_800,
    step_tokens=512,
)
BUDGET = 640  # 20 pages
LEAST = 2 * 4 * 20  # slots per layer
ONE = replace(CACHE, max_num_seqs=1)
SLOT = 9 * (16384 + 24)


STAGING = 2 * MIB


def tiers(fast, cache=CACHE, blocks=None, **options):
    options = {"home": "disk", "budget": BUDGET} | options
    config = RetrievalConfig.from_options("freekv", options)
    return Tiers.plan(config, cache, fast, STAGING, blocks)


def test_everything_has_its_place():
    got = tiers(500 * MIB)
    assert got.blocks == 2 * 100 + 1
    assert got.home == 201 * 9 * CACHE.block_bytes
    assert got.dense == 201 * CACHE.block_bytes
    units = 201 * 4 * 4
    assert got.index == got.home // 32
    assert got.books == 9 * units * 4 + got.home // mmap.PAGESIZE
    assert got.staging == STAGING
    assert not got.streams_dense
    fixed = got.dense + got.index + got.books + STAGING
    assert got.slots == 9 * ((500 * MIB - fixed) // SLOT,)
    assert got.recall_cache == got.slots[0] * SLOT
    assert 500 * MIB - SLOT < got.fast == fixed + got.recall_cache <= 500 * MIB
    finer = tiers(500 * MIB, summary_size=8)
    assert finer.index == got.index + got.home // 8 - got.home // 32


def test_an_encoded_home():
    """Pages are smaller in the file, and raw in fast memory until they are full."""
    raw, got = tiers(500 * MIB), tiers(500 * MIB, codec="k4v4")
    unit = 2 * (2 * 64 + 32) + 32 * 64
    assert got.home == raw.blocks * 9 * 4 * 4 * unit
    assert (got.blocks, got.index, got.dense, got.staging) == (
        raw.blocks, raw.index, raw.dense, raw.staging,
    )  # fmt: skip
    assert got.books == raw.books - raw.home // mmap.PAGESIZE + 9 * 201 * 4
    assert got.open_pages == 9 * 2 * (65536 + mmap.PAGESIZE) + 512 * 4 * 512
    assert raw.open_pages == 0
    fixed = got.dense + got.index + got.books + STAGING + got.open_pages
    assert got.slots == 9 * ((500 * MIB - fixed) // SLOT,)
    assert got.fast == fixed + got.recall_cache
    # As much disk holds more, and a block is a block.
    larger = tiers(900 * MIB, codec="k4v4", home_bytes=raw.home)
    assert larger.blocks == raw.home // (9 * 4 * 4 * unit) > 6 * raw.blocks
    # Nothing can be done without.
    one = tiers(500 * MIB, ONE, codec="k4v4")
    least = one.fast - one.recall_cache + LEAST // 2 * SLOT
    assert tiers(least, ONE, codec="k4v4").slots == 9 * (LEAST // 2,)
    with pytest.raises(RetrievalConfigError, match=r"one request need .*open pages"):
        tiers(least - 1, ONE, codec="k4v4")


def test_no_more_slots_than_units():
    assert tiers(1 << 40).slots == 9 * (201 * 4 * 4,)


def test_given_sizes():
    got = tiers(500 * MIB, home_bytes=101 * 9 * CACHE.block_bytes + 5, recall_cache_bytes=50 * MIB)
    assert got.blocks == 101
    assert got.slots == 9 * (50 * MIB // SLOT,)
    assert tiers(500 * MIB, home_bytes="1TiB", blocks=150).blocks == 150


def test_the_least_that_is_accepted():
    plenty = tiers(500 * MIB)
    least = plenty.index + plenty.books + plenty.dense + STAGING + LEAST * SLOT
    given = {"blocks": plenty.blocks}
    assert tiers(least, **given) == replace(plenty, slots=9 * (LEAST,), recall_cache=LEAST * SLOT)
    # A home of the user's keeps its requests as long as something else can give way.
    assert tiers(least - 1, **given).seats == 2
    assert tiers(least - 1, **given).staging == 0
    frugal = plenty.index + plenty.books + LEAST * SLOT
    assert tiers(frugal, **given).streams_dense
    assert tiers(frugal - 1, **given).seats == 1
    # A home that nobody has asked for leaves room for slots to read ahead into.
    roomy = tiers(least)
    assert roomy.seats == 2
    assert roomy.blocks < plenty.blocks
    assert LEAST * 3 // 2 <= roomy.slots[0] < LEAST * 3 // 2 + 4
    assert tiers(500 * MIB, recall_cache_bytes=LEAST * SLOT).slots == 9 * (LEAST,)
    assert tiers(500 * MIB, recall_cache_bytes=LEAST * SLOT).seats == 2
    assert tiers(500 * MIB, recall_cache_bytes=LEAST * SLOT - 1).seats == 1
    with pytest.raises(RetrievalConfigError, match="one request need"):
        tiers(500 * MIB, recall_cache_bytes=9)


def test_what_can_be_done_without_goes_first():
    """Staging, then dense layers in fast memory; the rest is needed by a single request."""

    def tiers_of_one(fast):
        return tiers(fast, ONE)

    plenty = tiers_of_one(500 * MIB)
    least = plenty.index + plenty.books + plenty.dense + LEAST // 2 * SLOT
    for fast in (least, least + STAGING - 1):
        got = tiers_of_one(fast)
        assert (got.staging, got.streams_dense, got.dense) == (0, False, plenty.dense)
    streamed = tiers_of_one(least - 1)
    assert streamed.streams_dense
    assert (streamed.dense, streamed.staging) == (0, STAGING)
    assert streamed.home == plenty.home // 9 * 10
    assert streamed.blocks == plenty.blocks
    least = streamed.index + streamed.books + LEAST // 2 * SLOT
    assert tiers_of_one(least).slots == 9 * (LEAST // 2,)
    assert tiers_of_one(least).staging == 0
    with pytest.raises(RetrievalConfigError, match="one request need"):
        tiers_of_one(least - 1)
    least = tiers(500 * MIB, cache=replace(ONE, dense_layers=0), dense_layers=0)
    with pytest.raises(RetrievalConfigError, match="one request need"):
        tiers(least.fast - least.recall_cache, cache=replace(ONE, dense_layers=0))


@pytest.mark.parametrize("method", ["fier", "omnikv"])
def test_slots_of_single_tokens(method):
    """Every request has as many as it attends to, and four times as many where there is room."""
    least, slot = LEAST // 2 * 32, 9 * (2 * 64 * 4 + 16)

    def tiers_of(fast, **options):
        config = RetrievalConfig.from_options(method, {"home": "disk", "budget": BUDGET} | options)
        return Tiers.plan(config, ONE, fast, STAGING)

    plenty = tiers_of(1 << 40)
    assert plenty.slots == 9 * (4 * least,)
    assert tiers_of(1 << 40, budget=3200, max_budget=6400).slots == 9 * (4 * 12_800,)
    assert plenty.books == 2 * plenty.home // mmap.PAGESIZE
    assert plenty.index == (plenty.home * 3 // 64 if method == "fier" else 0)
    fixed = plenty.dense + plenty.index + plenty.books + STAGING
    got = tiers_of(fixed + least * slot)
    assert got == replace(plenty, slots=9 * (least,), recall_cache=least * slot)
    assert tiers_of(fixed + 2 * least * slot - 1).slots == 9 * (2 * least - 4 * 32,)
    # Without staging there is no prefill.
    streamed = tiers_of(fixed + least * slot - 1)
    assert (streamed.streams_dense, streamed.staging) == (True, STAGING)
    with pytest.raises(RetrievalConfigError, match="one request need"):
        tiers_of(streamed.index + streamed.books + least * slot)


def test_slots_for_the_largest_budget_that_a_request_may_have():
    cache = 2 * LEAST * SLOT
    assert tiers(500 * MIB, max_budget=2 * BUDGET, recall_cache_bytes=cache).slots == 9 * (
        2 * LEAST,
    )
    assert tiers(500 * MIB, max_budget=2 * BUDGET, recall_cache_bytes=cache - 1).seats == 1


def test_slots_follow_what_layers_attend_to():
    """Twice as many where twice as much is attended to; fewer requests where they do not fit."""
    cache = replace(CACHE, attended=(40,) + 8 * (80,))  # units
    room = 2 * (40 + 8 * 80) * SLOT // 9
    got = tiers(500 * MIB, cache=cache, recall_cache_bytes=3 * room)
    assert got.slots == (3 * 80,) + 8 * (3 * 160,)
    assert got.recall_cache == 3 * room
    assert tiers(500 * MIB, cache=cache, recall_cache_bytes=room).slots == (80,) + 8 * (160,)
    assert tiers(500 * MIB, cache=cache, recall_cache_bytes=room).seats == 2
    assert tiers(500 * MIB, cache=cache, recall_cache_bytes=room - 1).seats == 1
    even = replace(CACHE, attended=9 * (LEAST // 2,))
    assert tiers(500 * MIB, cache=even) == tiers(500 * MIB)


def test_what_does_not_fit():
    with pytest.raises(RetrievalConfigError, match="home_bytes=100: one request of max_model_len"):
        tiers(500 * MIB, home_bytes=100)
    with pytest.raises(
        RetrievalConfigError, match=r"blocks-override 9: .*override to 101 at least"
    ):
        tiers(500 * MIB, blocks=9)
    with pytest.raises(RetrievalConfigError, match=r"of slots; .*page index 0\.01, books"):
        tiers(10 * MIB)
    with pytest.raises(RetrievalConfigError, match="recall_cache_bytes=524288000 is more than"):
        tiers(500 * MIB, recall_cache_bytes="500MiB")


# SmolLM2-135M, and Llama-3.1-8B, in 16 bits.
SMALL = Cache(
    retrieval_layers=29,
    dense_layers=1,
    kv_heads=3,
    block_size=128,
    block_bytes=128 * 3 * 256,
    head_size=64,
    dtype=torch.bfloat16,
    max_num_seqs=128,
    max_model_len=8192,
    step_tokens=2048,
)
LARGE = replace(
    SMALL,
    retrieval_layers=31,
    kv_heads=8,
    block_bytes=128 * 8 * 512,
    head_size=128,
    max_model_len=131_072,
)
DISK = 75 << 30


@pytest.mark.parametrize("method", ["kvretrieval", "freekv", "ttkv", "fier", "snapkv", "infllm"])
@pytest.mark.parametrize("cache", [SMALL, LARGE], ids=["small", "large"])
def test_every_method_starts_at_vllms_defaults(cache, method):
    """The more memory, the more requests at once, up to all; what they attend to has slots."""
    config = RetrievalConfig.from_options(method, {"home": "disk"})
    seats = []
    staging = 2 * cache.kv_heads * cache.head_size * cache.max_model_len * 2
    for most, gib in itertools.product((128, 256), (1, 2, 4, 5, 16, 64)):
        if gib < 4 and cache is LARGE:
            continue
        wanted = replace(cache, max_num_seqs=most)
        got = Tiers.plan(config, wanted, gib << 30, staging, disk=DISK)
        assert got.fast <= gib << 30
        assert 1 <= got.seats <= most
        assert cache.blocks_per_request < got.blocks <= cache.blocks_for(got.seats)
        assert got.home <= DISK * 3 // 4
        assert got.staging == staging
        assert not got.streams_dense
        each = 1 if config.token_major else config.page_size
        need = got.seats * cache.kv_heads * config.budget_limit // each
        home = got.blocks * 128 // each * cache.kv_heads  # no more can be wanted
        assert min(got.slots) >= min(need, home)
        if got.seats < most:
            assert min(got.slots) >= min(need * 3 // 2, home)
            more = replace(wanted, max_num_seqs=2 * got.seats + 2)
            assert Tiers.plan(config, more, gib << 30, staging, disk=DISK).seats == got.seats
        seats.append(got.seats)
    few, many = seats[: len(seats) // 2], seats[len(seats) // 2 :]
    assert few == sorted(few)
    assert many == sorted(many)
    assert [min(count, 128) for count in many] == few
    assert few[-1] == 128


def test_a_home_of_the_users_leaves_room_for_more_requests():
    config = RetrievalConfig.from_options("kvretrieval", {"home": "disk"})
    small = replace(config, home_bytes=20 << 30)
    default, less = (Tiers.plan(c, LARGE, 8 << 30, 512 * MIB) for c in (config, small))
    assert less.home <= 20 << 30 < default.home
    assert less.seats > default.seats > 1


def test_a_home_of_fewer_blocks():
    """Another worker has fewer blocks. All sizes that grow with blocks shrink."""
    whole = tiers(500 * MIB)
    assert whole.of(201) == whole
    fewer, given = whole.of(150), tiers(500 * MIB, blocks=150)
    assert fewer == replace(given, slots=whole.slots, recall_cache=whole.recall_cache)


def test_when_memory_is_enough():
    needed = 201 * (10 * CACHE.block_bytes + 9 * CACHE.block_bytes // 32)
    config = RetrievalConfig("freekv")
    assert CACHE.fits_in(needed, config)
    assert not CACHE.fits_in(needed - 1, config)
    assert not replace(CACHE, max_num_seqs=3).fits_in(needed, config)
    without_index = replace(config, method="streamingllm")
    assert CACHE.fits_in(201 * 10 * CACHE.block_bytes, without_index)
