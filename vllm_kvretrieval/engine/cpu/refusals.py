"""Refusals of a worker once it knows its layers."""

from collections.abc import Sequence

from vllm_kvretrieval.attention.cpu.impl import RetrievalAttentionImpl
from vllm_kvretrieval.engine.cpu.planner import Planner
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.needs import CAPPED_LOGITS, PARTIAL_MODELS, UNKNOWN_KEYS


def check_layers(planner: Planner, retrieving: set[str]) -> None:
    """Refuse methods that need all layers with full attention, where some are left as they are.

    Args:
        planner: What the worker serves.
        retrieving: Names of the layers that attend to parts of long contexts.
    """
    model = planner.model_config.model
    if retrieving != {*planner.retrieval_heads}:
        PARTIAL_MODELS.check(planner.retrieval_config.methods.values(), where=f" in {model}")


def check_logits(
    planner: Planner, impls: Sequence[RetrievalAttentionImpl], isas: set[str]
) -> tuple[bool, bool]:
    """Refuse what goes by other logits than those of the model, with soft-capping or sinks.

    Args:
        planner: What the worker serves.
        impls: The worker's layers that attend to parts of long contexts.
        isas: Variants of vLLM's attention that lay out the keys.

    Returns:
        Whether any of them caps logits, so that indexes misjudge shares of the attention; and
        whether any has sinks, which vLLM's kernel cannot give to a KV head alone.
    """
    config = planner.retrieval_config
    capped = any(impl.logits_soft_cap for impl in impls)
    sinks = any(impl.sinks is not None for impl in impls)
    model = planner.model_config.model
    methods = config.methods.values()
    if capped:
        CAPPED_LOGITS.check(methods, where=f" of {model}")
    others = isas - cpu.LAYOUTS.keys()
    if sinks and others:
        raise RetrievalConfigError(
            f"{config.method} does not support the learned attention sinks of {model}, whose "
            f"keys vLLM lays out in a way that is not known ({', '.join(others)}). Serve it "
            "without --attention-backend."
        )
    return capped, sinks


def check_reading(planner: Planner, isas: set[str], foreign: bool) -> None:
    """Refuse what reads keys in the cache where that cannot be done.

    Args:
        planner: What the worker serves.
        isas: Variants of vLLM's attention that lay out the keys.
        foreign: Whether a KV connector may load pages.
    """
    config, why = planner.retrieval_config, ""
    if foreign and planner.cache_config.block_size != config.page_size:
        why = f"whose blocks of {planner.cache_config.block_size} tokens are not pages of "
        why += str(config.page_size)
    others = ", ".join(isas - cpu.LAYOUTS.keys())
    if others:
        why = f"whose keys vLLM lays out in a way that is not known ({others})"
    if foreign and why:
        raise RetrievalConfigError(
            f"{config.method} cannot be combined with a KV connector for "
            f"{planner.model_config.model}, {why}. Leave --kv-transfer-config and "
            "--kv-offloading-size out."
        )
    if others:
        check_keys(config, f" ({others}) of {planner.model_config.model}")


def check_keys(config: RetrievalConfig, where: str) -> None:
    """Refuse what reads keys in the cache where vLLM lays them out in a way that is not known.

    Args:
        config: Options of the engine.
        where: The layout, and perhaps the model, for the message.
    """
    UNKNOWN_KEYS.check(config.methods.values(), where=where)
    if config.prefill_queries is not None:
        raise RetrievalConfigError(
            f"{UNKNOWN_KEYS.name}{where} cannot be read by our kernels, and chunks of prompts "
            f"select by them (kv_retrieval.prefill_budget={config.prefill_budget}); leave it out."
        )
