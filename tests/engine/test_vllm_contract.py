"""What we use of vLLM that is no public interface: names, parameters, and the order of calls.

A new release that changes any of it fails here, in seconds and by name.
"""

import inspect
from dataclasses import fields
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, StreamingUpdate

from benchmarks.stepper import Stepper
from vllm_kvretrieval.engine.chunk_scheduler import ChunkScheduler
from vllm_kvretrieval.engine.scheduler import RetrievalAsyncScheduler, RetrievalScheduler

COORDINATORS = (
    UnitaryKVCacheCoordinator,
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
)


PASSED_THROUGH = {
    Scheduler._get_local_prefix_cache_hit: ["max_cache_hit_length"],
    KVCacheManager.get_computed_blocks: ["max_cache_hit_length"],
}
"""Parameters that vLLM 0.33 has added to one of them, and that ours hands on to the other."""


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        # Those that our scheduler overrides.
        (Scheduler._get_local_prefix_cache_hit, ["request"]),
        (Scheduler._update_after_schedule, ["scheduler_output"]),
        (
            Scheduler._reserve_prefill_lookahead,
            ["request", "num_computed_tokens", "num_new_tokens"],
        ),
        (
            Scheduler._try_schedule_encoder_inputs,
            [
                "request",
                "num_computed_tokens",
                "num_new_tokens",
                "encoder_compute_budget",
                "shift_computed_tokens",
            ],
        ),
        (Scheduler.reset_prefix_cache, ["reset_running_requests", "reset_connector"]),
        (Scheduler._free_request, ["request", "delay_free_blocks"]),
        (Scheduler._update_request_as_session, ["session", "update"]),
        (
            AsyncScheduler._update_request_with_output,
            ["request", "new_token_ids", "is_stale"],
        ),
        # Those that it calls.
        (
            Scheduler._mamba_block_aligned_split,
            [
                "request",
                "num_new_tokens",
                "num_new_local_computed_tokens",
                "num_external_computed_tokens",
            ],
        ),
        *(
            (coordinator.find_longest_cache_hit, ["block_hashes", "max_cache_hit_length"])
            for coordinator in COORDINATORS
        ),
        (KVCacheManager.get_computed_blocks, ["request"]),
        (KVCacheManager.create_kv_cache_blocks, ["blocks"]),
        (BlockPool.evict_blocks, ["block_ids"]),
        (BlockHashToBlockMap.get_one_block, ["key"]),
        (BlockHashToBlockMap.insert, ["key", "block"]),
        (BlockPool.touch, ["blocks"]),
        (BlockPool.free_blocks, ["ordered_blocks"]),
        (Scheduler._free_request_blocks, ["request"]),
        (Scheduler._enqueue_waiting_request, ["request"]),
        (RequestQueue.remove_requests, ["requests"]),
        (KVCacheBlock.set_block_hash, ["block_hash", "num_tokens"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_parameters(function, parameters):
    found = list(inspect.signature(function).parameters)[1:]
    assert [name for name in found if name not in PASSED_THROUGH.get(function, ())] == parameters


def test_weights_are_seen_before_they_are_packed():
    """By the name under which the base class of all loaders finds what packs them."""
    source = inspect.getsource(base_loader.BaseModelLoader.load_model)
    load, pack = source.index("self.load_weights("), source.index("process_weights_after_loading(")
    assert load < pack
    assert base_loader.process_weights_after_loading.__name__ == "process_weights_after_loading"


def test_overrides_stand_before_vllms():
    ours = RetrievalAsyncScheduler, RetrievalScheduler, ChunkScheduler
    assert RetrievalAsyncScheduler.__mro__[:5] == (*ours, AsyncScheduler, Scheduler)


def test_fields():
    assert KVCacheBlockCopy._fields == ("src_block_id", "dst_block_id")
    block: Any = KVCacheBlock(3)
    assert (block.block_id, block.block_hash, block.is_null) == (3, None, False)
    assert block.block_hash_num_tokens is None
    used = {
        "num_scheduled_tokens",
        "finished_req_ids",
        "preempted_req_ids",
        "kv_cache_block_copies",
        "scheduled_new_reqs",
    }
    assert used <= {field.name for field in fields(SchedulerOutput)}
    assert "sampling_params" in {field.name for field in fields(StreamingUpdate)}
    assert [field.name for field in fields(KVCacheBlocks)][:1] == ["blocks"]


@pytest.mark.model
def test_what_a_scheduler_has():
    stepper = Stepper({}, blocks=100)
    scheduler, manager = stepper.scheduler, stepper.scheduler.kv_cache_manager
    stepper.add(list(range(70)), 2, name="a")
    request: Request = scheduler.requests["a"]
    assert (request.resumable, request.skip_reading_prefix_cache) == (False, False)
    blocks, tokens, boundary, diverged = Scheduler._get_local_prefix_cache_hit(scheduler, request)
    assert (blocks.blocks, tokens, boundary, diverged) == (((),), 0, 0, False)
    output = scheduler.schedule()
    assert output.kv_cache_block_copies is None
    assert (request.num_prompt_tokens, request.num_computed_tokens) == (70, 70)
    assert manager.empty_kv_cache_blocks.blocks == ((),)
    pool = manager.block_pool
    assert (pool.null_block.block_id, pool.blocks[7].block_id, pool.hash_block_size) == (0, 7, 32)
    (group,) = manager.coordinator.single_type_managers
    assert group.num_cached_block == {"a": 2}, "hashed before the step computes"
    assert group.block_size == scheduler.hash_block_size == 32
    assert group.block_pool is manager.block_pool
    first, second, third = group.req_to_blocks["a"]
    assert (first.block_hash_num_tokens, second.block_hash_num_tokens) == (32, 64)
    assert third.block_hash is None
    found = manager.block_pool.cached_block_hash_to_block.get_one_block(first.block_hash)
    assert found is first
    manager.evict_blocks({first.block_id})
    assert first.block_hash is None
    assert first.ref_cnt == 1, "it keeps its owners"
    for name in ("kv_holding_waiting", "waiting", "running", "current_step", "requests"):
        assert hasattr(scheduler, name)
    assert scheduler.max_num_encoder_input_tokens == 0
    assert scheduler._try_schedule_encoder_inputs(request, 0, 70, 0)[:3] == ([], 70, 0)
    assert scheduler.reset_preempted_req_ids == set()


def in_order(function, *lines):
    """Every line is in the source, once, and after the one before."""
    source, at = inspect.getsource(function), -1
    for line in lines:
        assert source.count(line) == 1, line
        assert source.index(line) > at, line
        at = source.index(line)


def test_order_of_calls():
    """Blocks get hashes when slots are allotted; steps are counted last of all."""
    in_order(
        Scheduler.schedule,
        "self.current_step += 1",
        "# First, schedule the RUNNING requests.",
        ") = self._get_local_prefix_cache_hit(request",
        "if hit_diverged and num_external_computed_tokens == 0:",
        "self.running.append(request)",
        "self.kv_cache_manager.take_kv_cache_block_copies()",
        "self._update_after_schedule(scheduler_output)",
    )
    in_order(
        KVCacheManager.allocate_slots,
        "new_blocks = self.coordinator.allocate_new_blocks(",
        "self.coordinator.cache_blocks(request, num_tokens_to_cache)",
    )
    late = Scheduler.update_from_output, " = self._update_request_with_output("
    if "_update_request_with_output" in vars(AsyncScheduler):  # until vLLM 0.32
        late = AsyncScheduler._update_request_with_output, "super()._update_request_with_output("
    in_order(*late, "self.kv_cache_manager.cache_blocks(")
    in_order(
        VllmConfig.__post_init__,
        "self.scheduler_config.async_scheduling = True",
        "current_platform.check_and_update_config(self)",
        "and self.scheduler_config.scheduler_cls is None",
    )
    in_order(
        Scheduler._free_request,
        "assert request.is_finished()",
        "self._connector_finished(request)",
        "self._free_blocks(request)",
    )
    in_order(
        EngineCore.__init__,
        "Scheduler = vllm_config.scheduler_config.get_scheduler_cls()",
    )
    assert current_platform.check_and_update_config
