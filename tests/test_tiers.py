"""Sizes of a slow home and its recall cache, and the home's file."""

import itertools
import mmap
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.engine import checkpoint
from vllm_kvretrieval.attention.cpu.support import check_home
from vllm_kvretrieval.engine.connector import connector_config
from vllm_kvretrieval.engine.cpu.refusals import check_reading
from vllm_kvretrieval.engine.cpu.worker import RetrievalCPUWorker
from vllm_kvretrieval.engine.memory import bytes_per_block
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels.cpu import MappingGuard
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.tiers import home as home_module
from vllm_kvretrieval.tiers.home import DiskHome, page_runs
from vllm_kvretrieval.tiers.sizes import Cache, Tiers

pytestmark = pytest.mark.cores

MIB = 1 << 20

# ------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("64GiB", 64 << 30),
        ("1.5 MiB", 3 << 19),
        ("2gib", 2 << 30),
        ("2TiB", 2 << 40),
        ("4096", 4096),
        (4096, 4096),
        ("16KiB", 1 << 14),
        ("100B", 100),
    ],
)
def test_sizes_are_read(given, size):
    options = {"home": "disk", "home_bytes": given, "recall_cache_bytes": given}
    config = RetrievalConfig.from_options("freekv", options)
    assert config.home_bytes == config.recall_cache_bytes == size


@pytest.mark.parametrize("size", ["64GB", "many", "-1", 0, "", True, None, 1.5, [1], "GiB"])
def test_sizes_that_are_none(size):
    options = {"home": "disk", "home_bytes": size}
    if size is None:
        assert RetrievalConfig.from_options("freekv", options).home_bytes is None
        return
    message = f"kv_retrieval.home_bytes={size!r} must be a size such as 64GiB"
    with pytest.raises(RetrievalConfigError, match=re.escape(message)):
        RetrievalConfig.from_options("freekv", options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"home": "tape"}, "kv_retrieval.home='tape' is unknown; use one of auto, device, host"),
        ({"home_bytes": "1GiB"}, "home_bytes='1GiB' has no effect with home=device; leave it"),
        ({"codec": "zip"}, "codec='zip'"),
        ({"codec": "k8v4"}, "codec='k8v4' is for pages in a file, *use home=disk *, or codec=raw"),
        ({"home_path": "/"}, "home_path='/' has no effect with home=device"),
        ({"recall_cache_bytes": 5}, "recall_cache_bytes=5 has no effect with home=device"),
        (
            {"home": "disk", "home_path": "/not/there"},
            "home_path='/not/there': no file can be made there (No such",
        ),
        ({"home": "disk", "home_path": 3}, "home_path=3 is no directory"),
    ],
)
def test_impossible_homes(options, message):
    with pytest.raises(RetrievalConfigError, match=re.escape(message).replace(r"\*", ".*")):
        RetrievalConfig.from_options("freekv", options)


def test_host_memory_is_no_home_on_the_cpu():
    config = RetrievalConfig.from_options("freekv", {"home": "host", "home_bytes": "1GiB"})
    with pytest.raises(RetrievalConfigError, match=r"home='host' is for GPUs; .* or home=disk"):
        check_home(VllmConfig(), config)


def test_ttkv_needs_no_option_but_its_name():
    config = RetrievalConfig.from_options("ttkv", {})
    assert (config.home, config.codec, config.open_pages) == ("disk", "k8v4", 4)
    assert config.page_budget() == (1, 4, 11)
    assert RetrievalConfig.from_options("ttkv", {"window": 1024}).open_pages == 8
    assert RetrievalConfig.from_options("freekv", {"home": "disk", "codec": "k2v2"}).open_pages == 0
    with pytest.raises(RetrievalConfigError, match=r"codec='k8v4' is for pages in a file"):
        RetrievalConfig.from_options("ttkv", {"home": "device"})
    in_memory = RetrievalConfig.from_options("ttkv", {"home": "device", "codec": "raw"})
    assert in_memory.encoding is None


# --------------------------------------------------------------------------------------- sizes

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
    """Of smaller pages, which are raw in fast memory until they are full."""
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
        each = 1 if config.rows else config.page_size
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
    """As another worker has: what grows with them shrinks."""
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


# -------------------------------------------------------------------------------------- worker


def worker(specs, workers=1, engines=1, **options):
    """As much of a worker as plans the tiers."""
    worker: Any = object.__new__(RetrievalCPUWorker)
    worker.retrieval_config = RetrievalConfig.from_options("freekv", {"budget": BUDGET} | options)
    worker.get_kv_cache_spec = lambda: {f"model.layers.{i}": s for i, s in enumerate(specs)}
    worker.scheduler_config = SimpleNamespace(
        max_num_seqs=CACHE.max_num_seqs,
        max_num_active_seqs=None,
        max_num_batched_tokens=CACHE.step_tokens,
    )
    worker.model_config = SimpleNamespace(
        max_model_len=CACHE.max_model_len,
        model="somebody/model",
        hf_text_config=SimpleNamespace(),
        get_total_num_hidden_layers=lambda: 0,
        is_hybrid=True,  # only the worker's layers show which of them attend
    )
    worker.cache_config = SimpleNamespace(num_gpu_blocks_override=None, kv_offloading_size=None)
    worker.parallel_config = SimpleNamespace(local_world_size=workers, tensor_parallel_size=workers)
    worker.model_config.get_total_num_kv_heads = lambda: 4 * workers
    worker.rank = workers - 1
    worker.vllm_config = SimpleNamespace(
        scheduler_config=worker.scheduler_config,
        model_config=worker.model_config,
        parallel_config=worker.parallel_config,
        cache_config=worker.cache_config,
        kv_transfer_config=connector_config(engines),
    )
    return worker


def plan(specs, fast=500 * MIB, workers=1, engines=1, **options):
    return worker(specs, workers, engines, **options)._plan_tiers(fast, STAGING)


FULL = FullAttentionSpec(block_size=128, num_kv_heads=4, head_size=64, dtype=torch.float32)
LOCAL = SlidingWindowSpec(
    block_size=128, num_kv_heads=4, head_size=64, dtype=torch.float32, sliding_window=256
)


def test_the_worker_plans_its_layers():
    assert FULL.page_size_bytes == CACHE.block_bytes
    assert plan([FULL] * 10, home="disk") == tiers(500 * MIB)
    assert plan([FULL] * 10) is None
    dense = plan([FULL] * 10, home="disk", dense_layers=3)
    assert dense.dense == 3 * tiers(500 * MIB).dense


def test_the_home_leaves_room_on_the_disk(tmp_path, monkeypatch):
    """By default; what a single request needs it takes, and what the user has asked for."""
    on_disk = {"home": "disk", "home_path": str(tmp_path)}
    size = tiers(500 * MIB).home
    one = tiers(500 * MIB, ONE).home

    def blocks(free, **options):
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))
        return plan([FULL] * 10, **on_disk | options).blocks

    assert blocks(2 * size) == 201
    assert blocks(size) == 201 * 3 // 4
    assert blocks(one) == 101
    assert blocks(size, home_bytes=size) == 201
    with pytest.raises(RetrievalConfigError, match=r"home may take .*max_model_len=12800 needs"):
        blocks(one - 1)
    assert blocks(2 * size, home="auto") == 201
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=one - 1, f_frsize=1))
    assert plan([FULL] * 10, **on_disk | {"home": "auto"}) is None, "it stays in memory"


def test_the_scheduler_has_to_know():
    """Fewer requests than it would run cannot be served where another connector takes its place."""
    own = worker([FULL] * 10, home="disk", recall_cache_bytes=LEAST * SLOT - 1)
    assert own._plan_tiers(500 * MIB, STAGING).seats == 1
    own.vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector="DecodeBenchConnector", kv_role="kv_both"
    )
    with pytest.raises(RetrievalConfigError, match="Set --max-num-seqs to 1 at most"):
        own._plan_tiers(500 * MIB, STAGING)
    own.scheduler_config.max_num_active_seqs = 1
    assert own._plan_tiers(500 * MIB, STAGING).seats == 1


def test_auto_takes_the_disk_only_where_it_must():
    assert plan([FULL] * 10, home="auto") == tiers(500 * MIB)
    assert plan([FULL] * 10, 600 * MIB, home="auto") is None
    assert plan([FULL, LOCAL] * 5, home="auto") is None


def test_the_files_of_all_workers_have_to_fit(tmp_path, monkeypatch):
    size = tiers(500 * MIB).home
    options = {"home": "disk", "home_path": str(tmp_path), "home_bytes": size}
    free = SimpleNamespace(f_bavail=2 * size + 9, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    assert plan([FULL] * 10, workers=2, **options).home == size
    message = r"GiB for each of 3 workers, but .* free\. Lower home_bytes .* or name another disk"
    with pytest.raises(RetrievalConfigError, match=message):
        plan([FULL] * 10, workers=3, **options)
    with pytest.raises(RetrievalConfigError, match=message):
        plan([FULL] * 10, workers=1, engines=3, **options)


@pytest.mark.parametrize(
    ("sliding", "full", "share"), [(15, 3, 1), (3, 15, 5), (0, 10, 9 / 10)], ids=str
)
def test_what_page_indexes_take_of_memory(sliding, full, share):
    """Groups of layers share vLLM's memory, but every retrieval layer has an index of its own."""
    specs = [LOCAL] * sliding + [FULL] * full
    own = worker(specs)
    own.vllm_config = EngineArgs(
        model=checkpoint("SmolLM2-135M-Instruct"), attention_backend="freekv"
    ).create_engine_config()
    own.vllm_config.cache_config.kv_cache_layout = "LBHNC"  # as the engine core finds out first
    specs_by_name, config = own.get_kv_cache_spec(), own.retrieval_config
    block, index = bytes_per_block(own.vllm_config, specs_by_name, config, own.retrieving)
    assert index / block == pytest.approx(share / 32)


KEYS = 8192 * 64 * (2 + 4)
"""Bytes of one KV head's keys of the longest context, as they are in the cache and in float32."""


@pytest.mark.parametrize(
    ("method", "scratch"),
    [
        ("freekv", 64 * 8192 // 32 * 9 * 4),
        ("fier", 64 * 8192 * 9 * 4),
        ("omnikv", 64 * 8192 * 9 * 4),
        ("snapkv", KEYS + 3 * (4 << 20)),
        ("streamingllm", 0),
    ],
)
def test_memory_for_scores_is_set_aside(monkeypatch, method, scratch):
    """Of 9 query heads, contexts of up to 8192 tokens and 64 requests."""
    own = worker([FULL] * 30)
    own.vllm_config = EngineArgs(
        model=checkpoint("SmolLM2-135M-Instruct"), attention_backend=method, max_num_seqs=64
    ).create_engine_config()
    for part in ("model", "cache", "parallel", "scheduler"):
        setattr(own, f"{part}_config", getattr(own.vllm_config, f"{part}_config"))
    own.cache_config.kv_cache_layout = "LBHNC"  # as the engine core finds out first
    own.retrieval_config = RetrievalConfig.from_vllm(own.vllm_config)
    monkeypatch.setattr(CPUWorker, "determine_available_memory", lambda _: 1 << 30)
    specs, config = own.get_kv_cache_spec(), own.retrieval_config
    block, index = bytes_per_block(own.vllm_config, specs, config, own.retrieving)
    left = (1 << 30) - own._staging_bytes() - scratch
    assert own.determine_available_memory() == left * block // (block + index)


def test_memory_that_does_not_suffice_is_found_out_at_once():
    own = worker([FULL] * 10)
    own._check_memory(MIB, MIB, MIB)
    message = "freekv needs a page index of 4096.0 GiB and 1.0 GiB for prefill and scores"
    with pytest.raises(RetrievalConfigError, match=message):
        own._check_memory(1 << 30, 1 << 42, 1 << 30)


@pytest.mark.parametrize(
    ("specs", "options"), [([FULL, LOCAL] * 5, {}), ([FULL] * 4, {"dense_layers": 4})]
)
def test_models_that_cannot_be_on_disk(specs, options):
    message = "home=disk serves models whose layers all .* somebody/model is none. Use home=device"
    with pytest.raises(RetrievalConfigError, match=message):
        plan(specs, home="disk", **options)


@pytest.mark.parametrize("others", [[], [1, 1, 1, 1]])
def test_workers_know_what_their_layers_attend_to(others):
    """A head with twice the share of others has room for it; those with less, for whatever method.

    With two workers this is the second one, whose KV heads come last.
    """
    first, last = [*others, 2, 1, 1, 1], [*others, 0, 1, 1, 1]
    shares = [first, *[1] * 7, last]
    own = worker([FULL] * 10, 1 + bool(others), home="disk", budget_shares=shares)
    most = own.retrieval_config.most_selected["freekv"]
    assert (BUDGET // 32, most) == (20, 17)
    assert own._attended(4) == (4 * 20 + most, *[4 * 20] * 8)
    assert [*own.retrieval_heads.values()][1] == slice(4, 8)
    tiers = plan([FULL] * 10, home="disk", budget_shares=[[2, 1, 1, 1], *[1] * 7, [0, 1, 1, 1]])
    assert tiers.slots[0] > tiers.slots[1] == tiers.slots[8]


def test_lists_of_lengths_of_their_own_need_our_attention():
    own = worker([FULL] * 10, budget_shares=[1] * 9)
    check_reading(own, {"vec", "vec16", "amx"}, foreign=False)
    with pytest.raises(
        RetrievalConfigError,
        match=r"freekv cannot be served .*\(neon\).*one length.*without budget_shares",
    ):
        check_reading(own, {"neon"}, foreign=False)
    check_reading(worker([FULL] * 10), {"neon"}, foreign=False)


@pytest.mark.parametrize(
    ("block", "isa", "why"),
    [
        (128, "vec", "whose blocks of 128 tokens are not pages of 32"),
        (32, "neon", r"whose keys vLLM lays out in a way that is not known \(neon\)"),
    ],
)
def test_what_a_connector_loads_can_be_indexed(block, isa, why):
    """Else it is refused: hybrid models choose their own blocks."""
    own = worker([FULL] * 10)
    own.cache_config.block_size = block
    with pytest.raises(RetrievalConfigError, match=f"KV connector for somebody/model, {why}"):
        check_reading(own, {"vec", isa}, foreign=True)
    own.cache_config.block_size = 32
    check_reading(own, {"vec", "vec16", "amx"}, foreign=True)


# ---------------------------------------------------------------------------------------- file


def test_what_is_written_is_in_the_file(tmp_path):
    home = DiskHome(str(tmp_path), 3, MIB, MappingGuard)
    assert home.memory.numel() == 3 * MIB
    assert not home.memory.any()
    home.memory.copy_(torch.arange(3 * MIB) % 100)
    assert os.pread(home.fd, 3 * MIB, 0) == home.memory.numpy().tobytes()
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_resident_memory_is_let_go_of(tmp_path, monkeypatch):
    monkeypatch.setattr(home_module, "TRIM_BYTES", 16 * MIB)
    home = DiskHome(str(tmp_path), 2, 32 * MIB, MappingGuard)

    def resident():
        maps = psutil.Process().memory_maps(grouped=False)
        return sum(part.rss for part in maps if str(tmp_path) in part.path) / MIB

    for part in home.memory.split(MIB):
        part.fill_(7)
        home.note_written(MIB)
        assert resident() < 18
    assert home.memory.eq(7).all()
    assert resident() > 60
    home.unmap(0)
    assert 31 < resident() < 33
    home.unmap(1)
    assert resident() == 0
    home.stage(0, page_runs(np.arange(4, 12), MIB), None)
    assert resident() == 8


def test_runs_of_pages():
    runs = page_runs(np.array([7, 3, 4, 5, 9, 8, 4], dtype=np.int32), 1000)
    assert runs.tolist() == [[3000, 3000], [7000, 3000]]


def test_what_cannot_be_read_is_zero_and_reported(tmp_path):
    """Touched by whomever: the kernel's SIGBUS does not end the process."""
    layer, page = 256 * mmap.PAGESIZE, 2 * mmap.PAGESIZE
    home = DiskHome(str(tmp_path), 2, layer, MappingGuard)
    home.memory.fill_(1)
    os.ftruncate(home.fd, layer + 8 * page)
    home.stage(1, page_runs(np.array([3, 100]), page), None)
    assert home.take_lost(page) == set()
    lost = home.memory[layer + 8 * page :]
    assert not lost[3 * page : 3 * page + 10].any()
    lost[50 * page : 52 * page].fill_(5)
    assert lost[50 * page : 52 * page].eq(5).all()
    assert home.take_lost(page) == {11, 58, 59}
    assert home.take_lost(page) == set()
    os.ftruncate(home.fd, 2 * layer)
    assert home.memory.sum() == layer + 8 * page, "the file is mapped again"
    assert home.take_lost(page) == set()
    small = page // 4  # smaller than the system's
    os.ftruncate(home.fd, layer)
    assert home.memory[-1] == 0
    assert home.take_lost(small) == {510, 511}


def test_single_tokens_are_read_by_a_mapping_of_their_own(tmp_path):
    """The same bytes; what is lost there is zero and reported, too, and back when the file is."""
    layer, page = 16 * mmap.PAGESIZE, 2 * mmap.PAGESIZE
    home = DiskHome(str(tmp_path), 2, layer, MappingGuard)
    first, second = home.scattered(0), home.scattered(1)
    home.memory[layer + 5] = 7
    assert (len(first), len(second), second[5]) == (layer, layer, 7)
    home.note_written(1 << 40)
    assert second[5] == 7
    os.ftruncate(home.fd, layer)
    assert second[3 * page] == 0
    assert home.take_lost(page) == {3}
    os.ftruncate(home.fd, 2 * layer)
    home.memory[layer + 3 * page] = 8
    assert second[3 * page] == 8
    assert home.take_lost(page) == set()


def test_other_bus_errors_end_the_process():
    program = """
import mmap, tempfile
from vllm_kvretrieval.kernels.cpu import MappingGuard
from vllm_kvretrieval.tiers.home import DiskHome
home = DiskHome(tempfile.gettempdir(), 1, 1 << 20, MappingGuard)
file = tempfile.TemporaryFile()
file.truncate(8192)
other = mmap.mmap(file.fileno(), 8192)
file.truncate(0)
print(other[0])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert ended.returncode == -signal.SIGBUS


def test_too_small_a_disk(tmp_path):
    with pytest.raises(RetrievalConfigError, match=r"the home needs 2048.0 GiB, but .* free"):
        DiskHome(str(tmp_path), 2, 1 << 40, MappingGuard)


def test_nothing_is_left_of_a_killed_process(tmp_path):
    """Nor does its space stay taken."""
    program = f"""
import os, signal
from vllm_kvretrieval.kernels.cpu import MappingGuard
from vllm_kvretrieval.tiers.home import DiskHome
home = DiskHome({str(tmp_path)!r}, 2, 100 << 20, MappingGuard)
home.memory.fill_(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    free = lambda: os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize  # noqa: E731
    before = free()
    killed = subprocess.run([sys.executable, "-c", program])
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    assert before - free() < 100 * MIB
    assert DiskHome(str(tmp_path), 2, MIB, MappingGuard).memory.numel() == 2 * MIB
