"""Smaller pages by default, where this CPU and the engine serve them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.attention.cpu.refusals import choose_attention
from vllm_kvretrieval.attention.cpu.speculation import has_draft_model
from vllm_kvretrieval.attention.refusals import has_foreign_connector
from vllm_kvretrieval.compat import CPU_BLOCK, configured_block_size
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.source import options_of
from vllm_kvretrieval.retrieval.presets import presets
from vllm_kvretrieval.storage.layouts import layout_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

SHAPING = frozenset(
    "page_size summary_size index pooling schedule rerank unit remainder prefill_budget".split()
)
"""Options with which the preset's own pages stay: they shape pages, or read many of them."""

SOFT_CAPPING = "attn_logit_softcapping"
"""Field of a model's configuration."""


def finer_options(vllm_config: "VllmConfig", method: str) -> Mapping[str, Any]:
    """Options that a method has here in place of its preset's; empty: there are none.

    The pages of an engine have one size, so blocks that entries of two pages do not fit in, and
    layers with sliding windows or of a draft model in the same blocks, leave the preset's pages,
    too.

    Args:
        vllm_config: The configuration of the engine.
        method: The engine's own method.

    Raises:
        RetrievalConfigError: Neither these pages nor the preset's fit in blocks of the user's size.
    """
    options = options_of(vllm_config)
    if not isinstance(options, Mapping):
        return {}
    finer = finer_for_model(vllm_config.model_config, method, options)
    one_size = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    shared = one_size or has_foreign_connector(vllm_config) or has_draft_model(vllm_config)
    if not finer or shared:
        return {}
    config = RetrievalConfig.from_options(method, {**options, **finer})
    entry, block_size = config.own.entry_tokens, configured_block_size(vllm_config)
    if block_size % entry and block_size % presets()[method].page_size:
        raise RetrievalConfigError(
            f"--block-size {block_size} must be a multiple of kv_retrieval.summary_size={entry}: "
            f"an entry of the index is of {entry // config.page_size} pages of {config.page_size} "
            f"tokens here; use {CPU_BLOCK}."
        )
    return {} if block_size % entry else finer


def finer_for_model(
    model: "ModelConfig", method: str, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The same, as far as the model, the options of retrieval and this CPU decide.

    Other methods that keep an index leave the preset's pages, and so does whatever our own kernel
    does not attend to.

    Args:
        model: vLLM's configuration of the model.
        method: The engine's own method.
        options: The engine's options, as the user wrote them.
    """
    preset = presets()[method]
    finer = preset.finer
    if not finer or SHAPING.intersection(options) or options.get("home", "device") != "device":
        return {}
    try:
        config = RetrievalConfig.from_options(method, {**options, **finer})
    except RetrievalConfigError:
        return {}  # the message will be about the options as they are
    indexed = [m for m in config.methods.values() if m.index is not None and m is not config.own]
    if indexed or model.is_hybrid or getattr(model.hf_text_config, SOFT_CAPPING, None):
        return {}
    shape = model.dtype, model.get_head_size()
    plain = layout_of(config, *shape, preset.page_size) == "vec"  # no AMX
    return finer if plain and choose_attention(config, *shape).own else {}
