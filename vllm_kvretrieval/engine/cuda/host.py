"""A KV cache whose retrieval layers are in host memory that the GPU has mapped."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_kvretrieval.attention.cuda.far import FarTier
from vllm_kvretrieval.attention.cuda.homes import EncodedHome, Home, RawHome
from vllm_kvretrieval.attention.cuda.side import SideWork
from vllm_kvretrieval.attention.cuda.staging import Staging
from vllm_kvretrieval.compat import limit_requests
from vllm_kvretrieval.engine.cuda.tiers import HostTiers
from vllm_kvretrieval.engine.memory import (
    Retrieving,
    cache_with_slow_home,
    check_scheduler_knows,
    workers_here,
)
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels.device import RECORD_ALIGNMENT
from vllm_kvretrieval.kernels.encoded import EncodedUnits
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.allocation import layers_at_home, move_kv_cache
from vllm_kvretrieval.storage.tier_sizes import Cache
from vllm_kvretrieval.system_limits import available_memory

logger = init_logger("vllm.kvretrieval.host")

SPARE = 4 << 30
"""Bytes of host memory that are left to other programs."""

MapHome = Callable[[int, torch.device], torch.Tensor]
"""Makes uint8 [n], in host memory, that the device reads and writes."""


def plan_tiers(
    vllm_config: Any,
    config: RetrievalConfig,
    specs: Mapping[str, Any],
    retrieving: Retrieving,
    device: int,
) -> HostTiers | None:
    """Sizes of a cache whose home is host memory; None if its home is the device.

    With ``home=auto`` the home is the device if everything fits there, and if host memory cannot
    serve.

    Args:
        vllm_config: vLLM's configuration.
        config: Options of the engine.
        specs: vLLM's KV cache specs of this worker's layers; not empty.
        retrieving: Says which layers retrieve.
        device: Bytes of the device for the KV cache and the state beside it.

    Raises:
        RetrievalConfigError: Layers differ, or something does not fit.
    """
    if not config.slow_home:
        return None
    if not retrieving(specs) and vllm_config.parallel_config.pipeline_parallel_size > 1:
        return None  # a stage of dense layers
    cache = cache_with_slow_home(vllm_config, specs, config, retrieving, RECORD_ALIGNMENT)
    if cache is not None and cache.other_blocks:
        if config.home != "auto":
            raise RetrievalConfigError(
                f"kv_retrieval.home={config.home} does not serve models with sliding windows or "
                f"recurrent states yet, such as {vllm_config.model_config.model}. Use home=device."
            )
        cache = None
    if cache is None or (config.home == "auto" and cache.fits_in(device, config)):
        return None
    try:
        return _plan_home(vllm_config, config, cache, device)
    except RetrievalConfigError as error:
        if config.home != "auto":
            raise
        logger.warning("home=auto: the KV cache stays on the device. In host memory: %s", error)
        return None


def _plan_home(vllm_config: Any, config: RetrievalConfig, cache: Cache, device: int) -> HostTiers:
    """Sizes of a home in host memory; raises RetrievalConfigError as ``HostTiers.plan``."""
    host = max(available_memory() - SPARE, 0) // workers_here(vllm_config)
    blocks = vllm_config.cache_config.num_gpu_blocks_override
    drafts = vllm_config.num_speculative_tokens
    tiers = HostTiers.plan(config, cache, device=device, host=host, blocks=blocks, drafts=drafts)
    check_scheduler_knows(vllm_config, tiers.seats)
    return tiers


def log_tiers(config: RetrievalConfig, tiers: HostTiers, block_size: int) -> None:
    """Log how memory was divided."""
    logger.info(
        "home=host: %s GiB of host memory for %d tokens. On the device, dense layers take %s GiB, "
        "page index %s GiB, staging for prefill %s GiB, and %s GiB hold %d slots of %d tokens per "
        "KV head and layer (%.2f budgets) of %d requests.",
        format_gib(tiers.home),
        (tiers.blocks - 1) * block_size,
        format_gib(tiers.dense),
        format_gib(tiers.index),
        format_gib(tiers.staging),
        format_gib(tiers.slots),
        tiers.capacity,
        config.slot_tokens,
        tiers.capacity * config.slot_tokens / config.budget_limit,
        tiers.seats,
    )
    if tiers.open_pages:
        logger.info(
            "Pages are encoded (%s) when they are full; %s GiB of the device hold the last %d of "
            "each request, as the model made them.",
            config.codec,
            format_gib(tiers.open_pages),
            1 + config.open_pages,
        )


def move_home(
    runner: Any,
    kv_cache_config: KVCacheConfig,
    at_home: Sequence[str],
    nbytes: int,
    map_home: MapHome,
) -> torch.Tensor:
    """Put some layers of a model runner's KV cache in host memory.

    Args:
        runner: vLLM's V2 model runner, with a cache of one block, which is released.
        kv_cache_config: The cache that it gets; a single group of layers that are all alike.
        at_home: Names of the layers in host memory, in the order of the model.
        nbytes: Bytes of these layers there. If that is not their size, they are encoded, and vLLM
            gets a cache of theirs that has a shape, and no memory.
        map_home: Makes the host memory.

    Returns:
        uint8 [layers, bytes of each]; the host memory, as the device sees it.
    """
    blocks = kv_cache_config.num_blocks
    names, block_bytes = layers_at_home(kv_cache_config, (0,))
    dense = [name for name in names if name not in at_home]
    began, raw = time.monotonic(), len(at_home) * blocks * block_bytes
    home = map_home(nbytes, runner.device)
    seconds = time.monotonic() - began
    logger.info(
        "KV retrieval has locked %.1f GiB of host memory in %.1f s (%.1f GiB/s).",
        nbytes / 2**30,
        seconds,
        nbytes / 2**30 / max(seconds, 1e-9),
    )
    memory = torch.zeros(len(dense) * blocks * block_bytes, dtype=torch.int8, device=runner.device)
    cache = home.view(torch.int8)
    if nbytes != raw:
        cache = torch.empty(raw, dtype=torch.int8, device="meta")
    places = (dense, memory), (at_home, cache)
    kv_caches = move_kv_cache(runner, kv_cache_config, (0,), blocks, places)
    if has_kv_transfer_group():  # the connector knows only the small cache
        get_kv_transfer_group().register_kv_caches(kv_caches)
    return home.view(len(at_home), -1)


def limit_seats(runner: Any, seats: int) -> None:
    """Let a model runner number as many requests as there are slots for.

    Its buffers keep the number of rows that vLLM has planned.

    Args:
        runner: vLLM's V2 model runner, before it has any requests.
        seats: Most requests.
    """
    states = runner.req_states
    states.free_indices = [number for number in states.free_indices if number < seats]
    limit_requests(runner, seats)


def make_tier(
    ops: Any,
    side: SideWork,
    config: RetrievalConfig,
    tiers: HostTiers,
    builder: Any,
    caches: Sequence[torch.Tensor],
    encoded: Sequence[torch.Tensor],
    rows: int,
    width: int,
    *,
    one_layers_slots: bool,
) -> FarTier:
    """The state that layers in host memory share.

    Args:
        ops: Implementation of the ops.
        side: Runs work beside the model.
        config: Options of the engine.
        tiers: Sizes.
        builder: Builder of the layers' metadata.
        caches: The layers' caches as vLLM sees them, in the order of the model.
        encoded: The memory of each, uint8, if pages are encoded; empty: none has been mapped, and
            some of the device stands in for it.
        rows: Most rows of a step, those of captured graphs included.
        width: Most pages, or tokens, that a KV head attends to.
        one_layers_slots: Whether all layers share the slots of one, since nobody reads the answers.
    """
    _, kv_heads, page_size, row = caches[0].shape
    shape, device = (2, tiers.staged, kv_heads, page_size, row), builder.device
    buffers = torch.empty(shape, dtype=caches[0].dtype, device=device)
    opened, homes = None, list[Home](RawHome(ops, cache) for cache in caches)
    if config.encoding is not None:
        opened = torch.zeros(tiers.seats, dtype=torch.int32, device=device)
        homes = _encoded(ops, config, caches, encoded, opened, alike=one_layers_slots)
    tier = FarTier(
        ops,
        side,
        Staging(side, buffers, builder.make_dense),
        layers=len(homes),
        seats=tiers.seats,
        rows=rows,
        kv_heads=kv_heads,
        capacity=tiers.capacity,
        width=width,
        slot_tokens=config.slot_tokens,
        looks_ahead=config.looks_ahead,
        device=device,
        opened=opened,
    )
    for home in homes:
        tier.add(home, tier.far[0].slots if one_layers_slots and tier.far else None)
    return tier


def _encoded(
    ops: Any,
    config: RetrievalConfig,
    caches: Sequence[torch.Tensor],
    encoded: Sequence[torch.Tensor],
    opened: torch.Tensor,
    *,
    alike: bool,
) -> list[Home]:
    """Homes of layers whose pages are encoded; see :func:`make_tier`.

    Args:
        ops, config, caches, encoded: See there.
        opened: See ``EncodedUnits.first``.
        alike: Whether all layers share the open pages of one.
    """
    codec, homes = config.encoding, list[Home]()
    assert codec is not None
    pages, kv_heads, page_size, row = caches[0].shape
    size = pages, kv_heads, codec.unit_bytes(page_size, row // 2, caches[0].dtype)
    shape = len(opened), 1 + config.open_pages, kv_heads, page_size, row
    for number, cache in enumerate(caches):
        if not homes or not alike:
            open_pages = torch.zeros(shape, dtype=cache.dtype, device=opened.device)
        if encoded:
            units = encoded[number].view(size)
        else:
            units = torch.empty(size, dtype=torch.uint8, device=opened.device)
        homes.append(EncodedHome(ops, EncodedUnits(codec, units, open_pages, opened)))
    return homes
