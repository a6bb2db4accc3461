"""Refusals of speculative decoding where drafts cannot be made, or verified."""

from typing import TYPE_CHECKING

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.needs import SPECULATION

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DRAFTERS = ("ngram", "suffix", "custom_class")
"""Methods of vLLM's ``--speculative-config`` whose drafts are verified here."""

MOST_DRAFTS = 128
"""Draft tokens of a request in a step that vLLM's rejection sampler takes at most."""


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
    if drafter not in DRAFTERS:
        raise RetrievalConfigError(
            f"{config.method} does not verify the drafts of {drafter!r}; use one of "
            f"{', '.join(DRAFTERS)} as the method of --speculative-config, or leave that out."
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
