"""The log of a worker at start-up."""

from collections.abc import Sequence

from vllm.utils.mem_utils import format_gib

from vllm_kvretrieval.attention.cpu.impl import RetrievalAttentionImpl
from vllm_kvretrieval.attention.cpu.nixl import uses_nixl
from vllm_kvretrieval.engine.cpu.planner import Planner
from vllm_kvretrieval.engine.start_log import log_method, logger
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.storage.home_file import directory_for
from vllm_kvretrieval.upstream.defaults import startup_advice


def log_start(
    planner: Planner, retrieving: Sequence[RetrievalAttentionImpl], num_layers: int
) -> None:
    """Log options and sizes once the worker has its KV cache.

    Args:
        planner: What the worker serves.
        retrieving: Layers that attend to parts of long contexts.
        num_layers: Layers of its model with attention.
    """
    config = planner.retrieval_config
    advice = startup_advice(
        planner.model_config.dtype,
        planner.parallel_config.local_world_size,
        widened=planner.attention.own,
        nixl=uses_nixl(planner.vllm_config.kv_transfer_config),
    )
    if advice is not None and planner.rank == 0:
        logger.warning(advice)
    log_method(
        config,
        len(retrieving),
        num_layers,
        [store for impl in retrieving for store in impl.indexes],
        cpu.isa(),
        _described_shares(planner),
    )
    logger.info(
        "Whole contexts are attended to by %s: %s.",
        "our own kernels, exact to rounding" if planner.attention.own else "vLLM's kernel",
        planner.attention.why,
    )
    if config.prefill_budget is not None:
        parts = config.page_budget(config.prefill_budget)
        logger.info(
            "Prefill is sparse in these layers: chunks of %d tokens attend to %d before them "
            "(sink %d, window %d, selected %d%s)%s.",
            config.prefill_chunk,
            config.prefill_budget,
            *(pages * config.page_size for pages in (parts.sink, parts.window, parts.select)),
            f" by {config.prefill_queries} queries" if config.prefill_queries else "",
            f", or to {config.prefill_share:g} of all before them where that selects more"
            if config.prefill_share
            else "",
        )
        if planner.prompt_shares:
            logger.info(
                "Their KV heads select %.2f to %.2f times as much (prefill_budget_shares).",
                planner.prompt_reads.shares.min(),
                planner.prompt_reads.highest,
            )
        if late := len(planner.late_layers):
            logger.info(
                "In the last %d of these layers they select nothing, but for the last chunk of a "
                "prompt (prefill_depth=%g).",
                late,
                config.prefill_depth,
            )
    if planner.tiers is not None:
        tiers = planner.tiers
        logger.info(
            "home=disk in %s: %s GiB (%s) for %d tokens. Of fast memory, page index and books "
            "take %s GiB, dense layers %s, staging for prefill %s, and the recall cache's %s "
            "GiB hold %d %s per layer for what %d requests attend to.",
            directory_for(config.home_directory),
            format_gib(tiers.home),
            config.codec,
            (tiers.blocks - 1) // len(planner.homes) * planner.block_size,
            format_gib(tiers.index + tiers.books),
            "none (they are read from home at every step)"
            if tiers.streams_dense
            else f"{format_gib(tiers.dense)} GiB",
            f"{format_gib(tiers.staging)} GiB"
            if tiers.staging
            else "none (there is no room for it)"
            if planner.stages
            else "none",
            format_gib(tiers.recall_cache),
            sum(tiers.slots) // len(tiers.slots),
            "tokens of KV heads" if config.token_major else "slots",
            tiers.seats,
        )
        if tiers.other_blocks:
            logger.info(
                "Layers with windows, chunks or recurrent states stay in fast memory: %s GiB for "
                "%d blocks, half of them for contexts that the prefix cache keeps.",
                format_gib(tiers.others),
                tiers.other_blocks,
            )
    elif config.home == "auto":
        given = [k for k in ("home_bytes", "home_path", "recall_cache_bytes") if getattr(config, k)]
        given += [] if config.encoding is None else ["codec"]
        logger.info(
            "home=auto: the KV cache fits in memory%s.",
            f"; {', '.join(given)} are not used" if given else "",
        )


def _described_shares(planner: Planner) -> str:
    """How far KV heads differ in what they select, by the engine's own method."""
    method = planner.retrieval_config.method
    if (fixed := planner.fixed_counts.get(method)) is not None:
        return f", {int(fixed.count_nonzero())} of {len(fixed)} KV heads to everything"
    allotment = planner.room.allotments.get(method)
    if allotment is None:
        return ""
    own = allotment.shares[allotment.own]
    return f" on average, {own.min():.2f} to {own.max():.2f} times what is selected"
