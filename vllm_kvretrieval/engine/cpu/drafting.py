"""What lets an engine on a CPU draft, and what stands in the way."""

from typing import TYPE_CHECKING, Any

from vllm.config import SpeculativeConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from vllm_kvretrieval.attention.refusals import has_foreign_connector
from vllm_kvretrieval.engine.cpu.model_drafts import CpuModelDrafts
from vllm_kvretrieval.engine.cpu.step_costs import CpuStepCosts
from vllm_kvretrieval.engine.drafter import PATH, Drafter
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.codec import RAW

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvretrieval.engine.requests import RequestTable
    from vllm_kvretrieval.storage.base import Storage

METHOD = "custom_class"
"""The method of vLLM's ``speculative_config`` that takes a class of others."""


def add_drafter(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Let vLLM's V1 model runner ask our drafter for tokens.

    Raises:
        RetrievalConfigError: There is another drafter, or something that ours cannot serve with.
    """
    given = vllm_config.speculative_config
    option = f"kv_retrieval.drafts={config.drafts}"
    if given is not None and given.model != PATH:
        raise RetrievalConfigError(
            f"{option} and --speculative-config (method {given.method}) both draft tokens; leave "
            "one out."
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise RetrievalConfigError(
            f"{option} cannot be served with --pipeline-parallel-size "
            f"{vllm_config.parallel_config.pipeline_parallel_size}: vLLM's drafters of this kind "
            "are for a single stage. Leave one out."
        )
    vllm_config.speculative_config = SpeculativeConfig(
        method=METHOD,
        model=PATH,
        num_speculative_tokens=config.drafts,
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
    )
    if config.lossless and (obstacle := _obstacle(vllm_config, config)) is not None:
        raise RetrievalConfigError(
            f"kv_retrieval.lossless=True cannot be served with {obstacle}; leave it out, or use "
            "--attention-backend full."
        )


def _obstacle(vllm_config: "VllmConfig", config: RetrievalConfig) -> str | None:
    """What keeps the model from drafting itself, as far as the configuration tells."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    obstacles = {
        f"codec={config.codec!r}, which closes pages for good": config.codec != RAW,
        "a KV connector, which may save what is drafted": has_foreign_connector(vllm_config),
        "LoRA adapters": vllm_config.lora_config is not None,
        "data parallelism": parallel.data_parallel_size > 1,
        f"the positions of {model.model}, of several dimensions": model.uses_mrope,
        f"{model.model}, which takes images or sound": model.is_multimodal_model,
        f"the states of {model.model}, which a draft would change": model.is_hybrid,
    }
    return next((what for what, present in obstacles.items() if present), None)


def connect_drafter(
    runner: Any, requests: "RequestTable", storage: "Storage", own: bool
) -> Drafter | None:
    """Connect the drafter of a model runner to the running requests; None: it has none of ours.

    Args:
        runner: vLLM's V1 model runner.
        requests: The table of running requests.
        storage: Where the KV of the retrieval layers is.
        own: Whether our own kernel attends to whole contexts.
    """
    drafter = getattr(runner, "drafter", None)
    if not isinstance(drafter, Drafter):
        return None
    kinds = {type(group.kv_cache_spec) for group in runner.kv_cache_config.kv_cache_groups}
    plain = kinds <= {FullAttentionSpec, SlidingWindowSpec}
    itself = plain and _obstacle(runner.vllm_config, requests.config) is None
    drafter.attach(
        requests.notes,
        lambda: runner.input_batch.req_ids,
        CpuStepCosts(runner, bool(storage.slow_layers), own),
        CpuModelDrafts(runner, requests, storage) if itself else None,
    )
    return drafter
