"""The sizes of a slow home as a worker finds them, and what it refuses."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from tests.storage.test_tier_sizes import BUDGET, CACHE, LEAST, ONE, SLOT, STAGING, tiers
from tests.support.engine import checkpoint
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.engine.connector import connector_config
from vllm_kvretrieval.engine.cpu.planner import Planner
from vllm_kvretrieval.engine.cpu.refusals import check_reading
from vllm_kvretrieval.engine.memory import bytes_per_block
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig

pytestmark = pytest.mark.threads

MIB = 1 << 20


def planner(specs, workers=1, engines=1, **options):
    """What plans the tiers of a worker."""
    scheduler_config = SimpleNamespace(
        max_num_seqs=CACHE.max_num_seqs,
        max_num_active_seqs=None,
        max_num_batched_tokens=CACHE.step_tokens,
        disable_hybrid_kv_cache_manager=False,
    )
    model_config = SimpleNamespace(
        max_model_len=CACHE.max_model_len,
        model="somebody/model",
        hf_text_config=SimpleNamespace(),
        get_total_num_hidden_layers=lambda: 0,
        get_total_num_kv_heads=lambda: 4 * workers,
        is_hybrid=True,  # only the worker's layers show which of them attend
    )
    vllm_config = SimpleNamespace(
        scheduler_config=scheduler_config,
        model_config=model_config,
        parallel_config=SimpleNamespace(
            local_world_size=workers, tensor_parallel_size=workers, pipeline_parallel_size=1
        ),
        cache_config=SimpleNamespace(num_gpu_blocks_override=None, kv_offloading_size=None),
        kv_transfer_config=connector_config(engines),
        compilation_config=SimpleNamespace(static_forward_context={}),
        attention_config=SimpleNamespace(hisparse_config=None),
        num_speculative_tokens=0,
    )
    config = RetrievalConfig.from_options("freekv", {"budget": BUDGET} | options)
    named = {f"model.layers.{i}": spec for i, spec in enumerate(specs)}
    return Planner(config, vllm_config, lambda: named, workers - 1)


def plan(specs, fast=500 * MIB, workers=1, engines=1, **options):
    return planner(specs, workers, engines, **options).plan_tiers(fast, STAGING)


FULL = FullAttentionSpec(block_size=128, num_kv_heads=4, head_size=64, dtype=torch.float32)
LOCAL = SlidingWindowSpec(
    block_size=128, num_kv_heads=4, head_size=64, dtype=torch.float32, sliding_window=256
)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=128, num_kv_heads=4, head_size=64, dtype=torch.float32, attention_chunk_size=256
)


def test_the_worker_plans_its_layers():
    assert FULL.page_size_bytes == CACHE.block_bytes
    assert plan([FULL] * 10, home="disk") == tiers(500 * MIB)
    assert plan([FULL] * 10) is None
    dense = plan([FULL] * 10, home="disk", dense_layers=3)
    assert dense.dense == 3 * tiers(500 * MIB).dense


def test_the_home_leaves_room_on_the_disk(tmp_path, monkeypatch):
    """The default size leaves room. A single request, or the user, may take it."""
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
    own = planner([FULL] * 10, home="disk", recall_cache_bytes=LEAST * SLOT - 1)
    assert own.plan_tiers(500 * MIB, STAGING).seats == 1
    own.vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector="DecodeBenchConnector", kv_role="kv_both"
    )
    with pytest.raises(RetrievalConfigError, match="Set --max-num-seqs to 1 at most"):
        own.plan_tiers(500 * MIB, STAGING)
    own.scheduler_config.max_num_active_seqs = 1
    assert own.plan_tiers(500 * MIB, STAGING).seats == 1


def test_auto_takes_the_disk_only_where_it_must():
    assert plan([FULL] * 10, home="auto") == tiers(500 * MIB)
    assert plan([FULL] * 10, 600 * MIB, home="auto") is None


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


def of_memory(specs, **engine):
    """What page indexes take of memory, in shares of the KV cache."""
    own = planner(specs)
    own.vllm_config = EngineArgs(
        model=checkpoint("SmolLM2-135M-Instruct"), attention_backend="freekv", **engine
    ).create_engine_config()
    own.vllm_config.cache_config.kv_cache_layout = "LBHNC"  # as the engine core finds out first
    specs_by_name, config = own.get_kv_cache_spec(), own.retrieval_config
    block, index = bytes_per_block(own.vllm_config, specs_by_name, config, own.retrieving)
    return index / block


@pytest.mark.parametrize(
    ("sliding", "full", "share"), [(15, 3, 1), (3, 15, 5), (0, 10, 9 / 10)], ids=str
)
def test_what_page_indexes_take_of_memory(sliding, full, share):
    """Groups of layers share vLLM's memory, but every retrieval layer has an index of its own."""
    assert of_memory([LOCAL] * sliding + [FULL] * full) == pytest.approx(share / 32)


@pytest.mark.parametrize("others", [LOCAL, CHUNKED], ids=["sliding", "chunked"])
def test_page_indexes_where_all_layers_are_one_group(others):
    """Llama 4 turns the hybrid manager off, and its first layers attend to chunks."""
    share = of_memory([others] * 3 + [FULL], disable_hybrid_kv_cache_manager=True)
    assert share == pytest.approx(1 / 4 / 32)


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
def test_memory_for_scores_is_set_aside(method, scratch):
    """The memory is for 9 query heads, contexts of up to 8192 tokens, and 64 requests."""
    vllm_config = EngineArgs(
        model=checkpoint("SmolLM2-135M-Instruct"), attention_backend=method, max_num_seqs=64
    ).create_engine_config()
    vllm_config.cache_config.kv_cache_layout = "LBHNC"  # as the engine core finds out first
    config = RetrievalConfig.from_vllm(vllm_config)
    assert config is not None
    specs = {f"model.layers.{i}": FULL for i in range(30)}
    own = Planner(config, vllm_config, lambda: specs, 0)
    block, index = bytes_per_block(vllm_config, specs, config, own.retrieving)
    left = (1 << 30) - own.staging_bytes() - scratch
    assert own.divide(1 << 30) == left * block // (block + index)


@pytest.mark.parametrize(("page_size", "longest"), [(16, 1000), (32, 1024), (256, 1000)])
def test_memory_for_staging_is_that_of_its_buffer(page_size, longest):
    """The buffer has whole blocks, of 128 tokens or of a page."""
    own = planner([FULL], page_size=page_size, budget=2048, attention="vllm")
    model = own.model_config
    model.max_model_len, model.dtype = longest, torch.bfloat16
    model.get_num_kv_heads, model.get_head_size = lambda _: 4, lambda: 64
    staging = PrefillStaging(page_size, 4, 64, torch.bfloat16, longest)
    assert own.staging_bytes() == staging.buffer.nbytes > 0


def test_memory_that_does_not_suffice_is_found_out_at_once():
    own = planner([FULL] * 10)
    own.check_memory(MIB, MIB, MIB)
    message = "freekv needs a page index of 4096.0 GiB and 1.0 GiB for prefill and scores"
    with pytest.raises(RetrievalConfigError, match=message):
        own.check_memory(1 << 30, 1 << 42, 1 << 30)


WIDE = FullAttentionSpec(block_size=128, num_kv_heads=8, head_size=64, dtype=torch.float32)


def settings(alone=False):
    """Of an engine."""
    made = EngineArgs(
        model=checkpoint("SmolLM2-135M-Instruct"),
        attention_backend="freekv",
        max_num_seqs=2,
        max_num_batched_tokens=512,
        max_model_len=6400,
        disable_hybrid_kv_cache_manager=alone,
    ).create_engine_config()
    made.cache_config.kv_cache_layout = "LBHNC"  # as the engine core finds out first
    return made


def mixed(specs, fast=2000 * MIB, alone=False, **options):
    """The tiers of a worker with real settings of an engine, of layers of several kinds."""
    own = planner(specs, **options)
    own.vllm_config = settings(alone)
    return own.plan_tiers(fast, STAGING)


def test_windows_stay_in_memory():
    """Twice the blocks that requests may hold: 7 for a window of 256 tokens and a step of 512, in
    each of five groups of the size of that of full attention."""
    got = mixed([*[LOCAL] * 5, FULL] * 2, home="disk", dense_layers=0)
    assert got.other_blocks == 2 * 2 * 5 * (-(-(255 + 512) // 128) + 1)
    assert got.others == got.other_blocks * 2 * FULL.page_size_bytes
    assert got.blocks == 2 * 50 + 1
    assert got.home == got.blocks * 2 * FULL.page_size_bytes
    assert got.all_blocks == got.blocks + got.other_blocks
    assert got.of(got.all_blocks - 9).blocks == got.blocks - 9
    assert len(got.slots) == 2
    assert mixed([*[LOCAL] * 5, FULL] * 2, home="auto", dense_layers=0) is None, "all fits"
    assert mixed([*[LOCAL] * 5, FULL] * 2, 110 * MIB, home="auto", dense_layers=0).home


STATE = MambaSpec(
    block_size=128,
    shapes=((4, 64),),
    dtypes=(torch.float32,),
    page_size_padded=FULL.page_size_bytes,
)


@pytest.mark.parametrize(("spec", "blocks"), [(CHUNKED, -(-(256 + 512) // 128)), (STATE, 1)])
def test_chunks_and_states_stay_in_memory(spec, blocks):
    got = mixed([spec, FULL] * 2, home="disk", dense_layers=0)
    assert got.other_blocks == 2 * 2 * blocks
    assert got.others == got.other_blocks * 2 * FULL.page_size_bytes
    assert got.blocks == 2 * 50 + 1
    assert len(got.slots) == 2


def sharing(**options):
    """The planner of a worker whose last layer reads the keys and values of the second."""
    own = planner([LOCAL, FULL, LOCAL, FULL], dense_layers=0, **options)
    reader = SimpleNamespace(kv_sharing_target_layer_name="model.layers.1")
    own.vllm_config = settings()
    own.vllm_config.compilation_config.static_forward_context["model.layers.4"] = reader
    return own


def test_layers_that_read_the_keys_of_others_share_their_slots():
    """They have none of their own, and no part of home."""
    own = sharing(home="disk")
    assert [*own.retrieval_heads] == [f"model.layers.{i}" for i in (1, 3, 4)]
    assert own.own_layers == ["model.layers.1", "model.layers.3"]
    got = own.plan_tiers(55 * MIB, STAGING)
    alone = mixed([LOCAL, FULL] * 2, 55 * MIB, home="disk", dense_layers=0)
    assert (got.home, got.index) == (alone.home, alone.index)
    assert got.slots[0] == 2 * got.slots[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"also": ["fier"]}, "of layers whose keys others read gives these layers the same slots"),
        ({"codec": "k8v4"}, "codec=k8v4 encodes pages once .* Use codec=raw, or home=device"),
    ],
)
def test_keys_that_others_read_and_what_a_file_cannot_do_with_them(options, message):
    with pytest.raises(RetrievalConfigError, match=message):
        sharing(home="disk", **options).plan_tiers(55 * MIB, STAGING)
    assert sharing(home="auto", **options).plan_tiers(55 * MIB, STAGING) is None


def test_layers_with_full_attention_in_several_groups():
    """VLLM makes groups of as many layers as there are windows, each with blocks of its own."""
    got = mixed([FULL, FULL, LOCAL, FULL], home="disk", dense_layers=0)
    assert got.blocks == 2 * 3 * 50 + 1
    assert len(got.slots) == 3
    assert got.home == got.blocks * 3 * FULL.page_size_bytes


def test_blocks_of_a_group_are_as_long_as_vllm_makes_them():
    """A layer with half the KV heads has blocks of twice the tokens."""
    wide = replace(LOCAL, num_kv_heads=8)
    got = mixed([wide, FULL] * 2, home="disk", dense_layers=0)
    assert got.blocks == 2 * 25 + 1
    assert got.home == got.blocks * 2 * wide.page_size_bytes


@pytest.mark.parametrize(
    ("specs", "options"),
    [
        ([FULL, WIDE] * 2, {"dense_layers": 0}),
        ([FULL] * 4, {"dense_layers": 4}),
        ([FULL, LOCAL] * 2, {"dense_layers": 0, "alone": True}),
        ([FULL, FULL, LOCAL], {"dense_layers": 0, "codec": "k8v4"}),
    ],
)
def test_models_that_cannot_be_on_disk(specs, options):
    message = "home=disk serves models whose layers with .* or use home=device"
    with pytest.raises(RetrievalConfigError, match=message):
        mixed(specs, home="disk", **options)
    if "codec" not in options:
        assert mixed(specs, home="auto", **options) is None


@pytest.mark.parametrize("others", [[], [1, 1, 1, 1]])
def test_workers_know_what_their_layers_attend_to(others):
    """A head with twice the share of others has room for it; those with less, for whatever method.

    With two workers this is the second one, whose KV heads come last.
    """
    first, last = [*others, 2, 1, 1, 1], [*others, 0, 1, 1, 1]
    shares = [first, *[1] * 7, last]
    own = planner([FULL] * 10, 1 + bool(others), home="disk", budget_shares=shares)
    most = own.retrieval_config.most_selected["freekv"]
    assert (BUDGET // 32, most) == (20, 17)
    assert own._attended(4) == (4 * 20 + most, *[4 * 20] * 8)
    assert [*own.retrieval_heads.values()][1] == slice(4, 8)
    tiers = plan([FULL] * 10, home="disk", budget_shares=[[2, 1, 1, 1], *[1] * 7, [0, 1, 1, 1]])
    assert tiers.slots[0] > tiers.slots[1] == tiers.slots[8]


def test_lists_of_lengths_of_their_own_need_our_attention():
    own = planner([FULL] * 10, budget_shares=[1] * 9)
    check_reading(own, {"vec", "vec16", "amx"}, foreign=False)
    with pytest.raises(
        RetrievalConfigError,
        match=r"\(neon\) .*one length, and freekv .*without budget_shares",
    ):
        check_reading(own, {"neon"}, foreign=False)
    check_reading(planner([FULL] * 10), {"neon"}, foreign=False)


@pytest.mark.parametrize(
    ("block", "isa", "why"),
    [
        (128, "vec", "whose blocks of 128 tokens are not pages of 32"),
        (32, "neon", r"whose keys vLLM lays out in a way that is not known \(neon\)"),
    ],
)
def test_what_a_connector_loads_can_be_indexed(block, isa, why):
    """If not, it is refused: hybrid models choose their own blocks."""
    own = planner([FULL] * 10)
    own.cache_config.block_size = block
    with pytest.raises(RetrievalConfigError, match=f"KV connector for somebody/model, {why}"):
        check_reading(own, {"vec", isa}, foreign=True)
    own.cache_config.block_size = 32
    check_reading(own, {"vec", "vec16", "amx"}, foreign=True)
