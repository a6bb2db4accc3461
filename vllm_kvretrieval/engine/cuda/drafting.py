"""The drafter of an engine on a GPU: vLLM's, which looks drafts up there."""

from typing import TYPE_CHECKING, Any

from vllm.config import SpeculativeConfig

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LOOKUP: dict[str, Any] = {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 8}
"""It drafts what followed the last of the longest matches of so many tokens. The longer matches may
be, the longer its kernel takes to compile: it has a loop over all lengths."""


def add_drafter(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Let vLLM's V2 model runner draft.

    Raises:
        RetrievalConfigError: There is another drafter.
    """
    given = vllm_config.speculative_config
    wanted = LOOKUP | {"num_speculative_tokens": config.drafts}
    if given is not None and any(getattr(given, key) != wanted[key] for key in wanted):
        raise RetrievalConfigError(
            f"kv_retrieval.drafts={config.drafts} and --speculative-config (method {given.method}) "
            "both draft tokens; leave one out."
        )
    vllm_config.speculative_config = SpeculativeConfig(
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
        **wanted,
    )
