"""Refusals of speculative decoding where drafts cannot be made, or verified."""

from typing import TYPE_CHECKING

from vllm_kvretrieval.attention.refusals import has_foreign_connector
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.layers import has_windows
from vllm_kvretrieval.retrieval.needs import FAR_SPECULATION, SPECULATION

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DRAFTERS = ("ngram", "suffix", "custom_class")
"""Methods of vLLM's ``--speculative-config`` that draft without a model of their own."""

DRAFT_MODELS = ("draft_model", "eagle", "mtp")
"""Methods whose model, or layer, has keys and values of its own."""

MOST_DRAFTS = 128
"""Draft tokens of a request in a step that vLLM's rejection sampler takes at most."""


def has_draft_model(vllm_config: "VllmConfig") -> bool:
    """Whether the drafter has layers of its own, beside those of the model."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in DRAFT_MODELS


def check_speculation(vllm_config: "VllmConfig", config: RetrievalConfig, layout: str) -> None:
    """Refuse drafters, and rows that verify drafts, which cannot work here.

    Args:
        vllm_config: vLLM's configuration.
        config: Options of the engine.
        layout: How vLLM's attention lays out keys.

    Raises:
        RetrievalConfigError: Says what stands in the way and what to change.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    drafter, drafts = speculative.method, vllm_config.num_speculative_tokens
    by = f"kv_retrieval.drafts={config.drafts}" if config.drafts else "--speculative-config"
    if drafter not in (*DRAFTERS, *DRAFT_MODELS):
        raise RetrievalConfigError(
            f"{config.method} does not verify the drafts of {drafter!r}; use one of "
            f"{', '.join((*DRAFTERS, *DRAFT_MODELS))} as the method of --speculative-config, or "
            "leave that out."
        )
    if vllm_config.use_v2_model_runner:
        raise RetrievalConfigError(
            f"{config.method} verifies drafts on a CPU with vLLM's V1 model runner, not with V2; "
            f"set VLLM_USE_V2_MODEL_RUNNER=0, or leave {by} out."
        )
    if (model := vllm_config.model_config).is_hybrid:
        raise RetrievalConfigError(
            f"{config.method} verifies drafts, of which some are rejected, and on a CPU the states "
            f"of {model.model} would keep what these have changed; leave {by} out."
        )
    if config.sources:
        raise RetrievalConfigError(
            "kv_retrieval.sources=True notes what steps of single tokens attend to, and those of "
            f"{by} verify several; leave one out."
        )
    if drafts > MOST_DRAFTS:
        raise RetrievalConfigError(
            f"num_speculative_tokens={drafts} of --speculative-config are more drafts than vLLM "
            f"verifies in a step; use {MOST_DRAFTS} or less."
        )
    if layout not in cpu.LAYOUTS:
        raise RetrievalConfigError(
            f"{config.method} verifies drafts by its own kernel, which cannot read keys as vLLM "
            f"lays them out here ({layout}); leave {by} out."
        )
    SPECULATION.check(config.methods.values(), by)
    if config.slow_home:
        FAR_SPECULATION.check(config.methods.values(), f"{by} with home={config.home}")
    if has_draft_model(vllm_config):
        check_draft_model(vllm_config, config)


def check_draft_model(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse what a draft model cannot be served with.

    Its keys and values lie in the same blocks as the model's, and attention is vLLM's there.

    Args:
        vllm_config: vLLM's configuration, with a draft model.
        config: Options of the engine.

    Raises:
        RetrievalConfigError: Says what stands in the way and what to change.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    obstacles = {
        f"kv_retrieval.home={config.home}, which holds layers of one model; use home=device": (
            config.slow_home
        ),
        "kv_retrieval.store, which knows one model's weights; leave the store out": (
            config.store is not None
        ),
        f"kv_retrieval.page_size={config.page_size}, since vLLM's attention reads multiples of 32; "
        "use page_size=32": config.page_size % 32 != 0,
        f"the sliding windows of {model.model}, which are in groups of their own; leave it out": (
            has_windows(model)
        ),
        "a KV connector, which does not know of a second model; leave --kv-transfer-config and "
        "--kv-offloading-size out": has_foreign_connector(vllm_config),
        "LoRA adapters, which are those of the model alone; leave --enable-lora out": (
            vllm_config.lora_config is not None
        ),
        "--pipeline-parallel-size; use --tensor-parallel-size": (
            parallel.pipeline_parallel_size > 1
        ),
    }
    for obstacle, present in obstacles.items():
        if present:
            raise RetrievalConfigError(
                f"{config.method} cannot serve the draft model of --speculative-config beside "
                f"{obstacle}. Or draft without a model: kv_retrieval.drafts=5, in place of "
                "--speculative-config."
            )
