"""Refusals at start-up of what retrieval cannot serve on any device, with remedies."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.layers import full_attention_layers, retrieving_layers
from vllm_kvretrieval.retrieval.needs import PIPELINE, UNKNOWN_STAGES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KV_CACHE_DTYPES = ("auto", "bfloat16", "float16")
"""Names of ``--kv-cache-dtype`` that may be the model's own."""

CONNECTOR = "RetrievalConnector"
"""Our own, which a slow home brings (``engine/connector.py``)."""

OF_ONE_INSTANCE = (CONNECTOR, "OffloadingConnector", "DecodeBenchConnector")
"""Connectors whose blocks are this instance's own, or random numbers."""

LAYOUT_KEY = "kv_retrieval_layout"
"""The key by which the configuration of another connector states a token-major layout."""

DUAL_CHUNK = "dual_chunk_attention_config"
"""Field of a model's configuration (Qwen2.5-1M)."""

WITHOUT = "Serve it without --attention-backend."


def page_size() -> int:
    """Tokens per page of the engine that is being set up, or those of engines by default."""
    from vllm.config import get_current_vllm_config_or_none  # which asks for the platform

    vllm_config = get_current_vllm_config_or_none()
    config = RetrievalConfig.from_vllm(vllm_config) if vllm_config else None
    return (config or RetrievalConfig()).page_size


def check_engine(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse engines that retrieval cannot serve.

    Raises:
        RetrievalConfigError: Says which feature stands in the way and what to change.
    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    method = config.method
    if model.runner_type == "pooling":
        raise RetrievalConfigError(
            f"{method} serves text generation; {model.model} runs as a pooling model. {WITHOUT}"
        )
    if model.is_encoder_decoder:
        raise RetrievalConfigError(
            f"{method} serves decoder-only models; {model.model} is an encoder-decoder. {WITHOUT}"
        )
    if model.use_mla:
        raise RetrievalConfigError(
            f"{method} does not support multi-head latent attention (MLA), which {model.model} "
            f"uses. {WITHOUT}"
        )
    if model.is_mm_prefix_lm:
        raise RetrievalConfigError(
            f"{method} does not support bidirectional multimodal prefixes, in which {model.model} "
            "attends to the whole of a picture. Serve its text alone with --language-model-only, "
            "or serve it without --attention-backend."
        )
    if getattr(model.hf_text_config, DUAL_CHUNK, None):
        raise RetrievalConfigError(
            f"{method} does not support dual chunk attention, which {model.model} uses for "
            "contexts beyond those it was trained on, and this vLLM has none for it either. For "
            f"shorter ones remove {DUAL_CHUNK} from its config.json, and sparse_attention_config."
            "json from beside it, and set --max-model-len to its original_max_position_embeddings."
        )
    check_windows(model, method)
    check_values(model, method)
    contexts = (
        parallel.decode_context_parallel_size,
        parallel.prefill_context_parallel_size,
    )
    if max(contexts) > 1:
        raise RetrievalConfigError(
            f"{method} does not support context parallelism; set "
            "--decode-context-parallel-size and --prefill-context-parallel-size to 1 and use "
            "--tensor-parallel-size instead."
        )
    if cache.kv_sharing_fast_prefill:
        raise RetrievalConfigError(
            f"{method} does not support --kv-sharing-fast-prefill, by which layers that read the "
            "keys and values of others skip most tokens of a prompt; leave it out."
        )
    if not _is_own(cache.cache_dtype, model.dtype):
        raise RetrievalConfigError(
            f"{method} does not support a KV cache in {cache.cache_dtype} with a model in "
            f"{model.dtype}; {own_cache(model.dtype)}. On CPUs kv_retrieval.home=disk with "
            "kv_retrieval.codec=k8v4 has fewer bits: 8 for keys, and 4 for values."
        )
    if cache.user_specified_block_size and cache.block_size % config.page_size:
        raise RetrievalConfigError(
            f"--block-size {cache.block_size} must be a multiple of kv_retrieval.page_size="
            f"{config.page_size}; use {max(128, config.page_size)}."
        )
    if config.dense_layers >= (layers := model.get_total_num_hidden_layers()):
        raise RetrievalConfigError(
            f"kv_retrieval.dense_layers={config.dense_layers} leaves {method} none of the {layers} "
            f"layers of {model.model}. Use less than {layers}."
        )
    check_layers(vllm_config, config)
    if config.home_bytes is not None and cache.num_gpu_blocks_override is not None:
        raise RetrievalConfigError(
            f"kv_retrieval.home_bytes={config.home_bytes} and --num-gpu-blocks-override "
            f"{cache.num_gpu_blocks_override} both fix the size of the home; leave one out."
        )
    check_connector(vllm_config, config)


def check_windows(model: Any, method: str) -> None:
    """Refuse a gpt-oss whose windows are not in the layers where vLLM puts them."""
    config = model.hf_text_config
    kinds = getattr(config, "layer_types", None)
    if config.model_type != "gpt_oss" or kinds is None:
        return
    made = [("sliding_attention", "full_attention")[number % 2] for number in range(len(kinds))]
    if kinds != made:
        raise RetrievalConfigError(
            f"{method} cannot serve {model.model}: its config.json lists layers with sliding "
            "windows and with full attention (layer_types) in another order than window first, in "
            "turn, and vLLM gives gpt-oss this order, whatever is listed; its answers are wrong "
            "without retrieval, too. Serve it by another engine, such as transformers."
        )


def check_values(model: Any, method: str) -> None:
    """Refuse a MiMo-V2 whose values have other sizes than its keys.

    vLLM makes their attention itself, by backends for GPUs, whichever is asked for.
    """
    config = model.hf_text_config
    values = getattr(config, "v_head_dim", None)
    if not config.model_type.startswith("mimo_v2") or values in (None, config.head_dim):
        return
    raise RetrievalConfigError(
        f"{method} does not support values of {values} channels beside keys of {config.head_dim}, "
        f"as {model.model} has them: vLLM reads these by kernels of its own, for GPUs. {WITHOUT}"
    )


def check_layers(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse methods and options that go by the model's layers, where these are others or unknown.

    If the configuration does not say which layers have full attention, the worker finds it out.
    """
    model, stages = vllm_config.model_config, vllm_config.parallel_config.pipeline_parallel_size
    full = full_attention_layers(model)
    shares = config.prompt_shares
    if stages > 1:
        methods, option = config.methods.values(), f"--pipeline-parallel-size {stages}"
        PIPELINE.check(methods, option)
        if full is None:
            UNKNOWN_STAGES.check(methods, option, f" for {model.model}")
        _check_average(model, config, full, stages)
        if shares is not None and shares.listed:
            raise RetrievalConfigError(
                "kv_retrieval.prefill_budget_shares is a list of all layers, of which a worker "
                f"with {option} has a part; name a file, or leave it out."
            )
    if (layers := _retrieving(model, config)) is None:
        return
    for method in config.methods.values():
        method.check_model(model, layers)
    if shares is not None:
        shares.of(model, layers)


def _check_average(
    model: Any, config: RetrievalConfig, full: list[int] | None, stages: int
) -> None:
    """Refuse a share of the cache that is an average over layers that no worker has all of.

    Where all layers retrieve, it is the same in every stage of a pipeline.
    """
    if config.memory_fraction is None or (full is not None and full == _retrieving(model, config)):
        return
    dense = full is not None and config.dense_layers
    remedy = ", or use kv_retrieval.dense_layers=0" if dense else ""
    raise RetrievalConfigError(
        f"kv_retrieval.memory_fraction={config.memory_fraction} is an average over all layers, and "
        f"cannot be served with --pipeline-parallel-size {stages}, where no worker has them all; "
        f"leave one out{remedy}."
    )


def _retrieving(model: Any, config: RetrievalConfig) -> list[int] | None:
    """Numbers of the layers that attend to parts of long contexts.

    Returns:
        None: the model's configuration does not say it, and the worker finds it out.

    Raises:
        RetrievalConfigError: No layer does.
    """
    layers = full_attention_layers(model)
    if layers is None:
        return None
    found = retrieving_layers(layers, config.roles(model, layers), config.dense_layers)
    if not found:
        raise nothing_retrieves(model, config)
    return found


def nothing_retrieves(model: Any, config: RetrievalConfig) -> RetrievalConfigError:
    """The error of a model that would be served as if there were no retrieval."""
    return RetrievalConfigError(
        f"{config.method} would not retrieve in any layer of {model.model}: behind dense_layers="
        f"{config.dense_layers} none has plain full attention. Lower kv_retrieval.dense_layers, or "
        "serve it without --attention-backend."
    )


def _is_own(cache_dtype: str | None, dtype: torch.dtype) -> bool:
    """Whether a KV cache of the type that vLLM names so holds what the model computes."""
    return cache_dtype in (None, "auto", str(dtype).removeprefix("torch."))


def own_cache(dtype: torch.dtype) -> str:
    """How to get a KV cache of the model's type, also where a checkpoint asks for another.

    With ``auto``, vLLM takes what the checkpoint's ``kv_cache_scheme`` says, be it quantised.
    """
    name = str(dtype).removeprefix("torch.")
    if name in KV_CACHE_DTYPES:
        return f"use --kv-cache-dtype {name}, which overrides the checkpoint's kv_cache_scheme"
    return (
        "use --kv-cache-dtype auto, or if the checkpoint has a kv_cache_scheme --dtype bfloat16 "
        "and --kv-cache-dtype bfloat16"
    )


def has_foreign_connector(vllm_config: "VllmConfig") -> bool:
    """Whether a KV connector other than our own may load into the cache."""
    transfer = vllm_config.kv_transfer_config
    if vllm_config.cache_config.kv_offloading_size is not None:
        return True  # vLLM makes a connector of it, later than it asks us
    return transfer is not None and transfer.kv_connector not in (None, CONNECTOR)


def check_connector(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse KV connectors that would take blocks, or what is in them, for others."""
    if not has_foreign_connector(vllm_config):
        return
    cache = vllm_config.cache_config
    if config.prefill_budget is not None:
        raise RetrievalConfigError(
            f"kv_retrieval.prefill_budget={config.prefill_budget} cannot be combined with a KV "
            "connector: keys and values that sparse prefill computes are approximate, and others "
            "would take them for exact. Leave one out."
        )
    if config.reuse == "exact":
        raise RetrievalConfigError(
            "kv_retrieval.reuse='exact' cannot be combined with a KV connector, which does not say "
            "how the keys and values that it loads were computed. Leave one out."
        )
    if config.token_major:
        check_layout_is_said(vllm_config, config)
    if cache.user_specified_block_size and cache.block_size != config.page_size:
        raise RetrievalConfigError(
            f"--block-size {cache.block_size} cannot be combined with a KV connector, which moves "
            "whole blocks: they have to be pages. Leave it out, or use --block-size "
            f"{config.page_size}."
        )


def check_layout_is_said(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse a KV connector that may bring keys and values in another layout, unless told not."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector in OF_ONE_INSTANCE:
        return
    said = transfer.get_from_extra_config(LAYOUT_KEY, None)
    if said != "rows":
        raise RetrievalConfigError(
            f"{config.method} keeps keys and values of its retrieval layers token by token, "
            f"and the KV connector {transfer.kv_connector} may bring them from instances that "
            "do not, which would go unnoticed. If all instances run with the same "
            "--attention-backend and --kv-retrieval options, say so: "
            f'"kv_connector_extra_config": {{"{LAYOUT_KEY}": "rows"}}; got {said!r}.'
        )


def check_layer(selector: Any) -> None:
    """Refuse a layer that retrieval cannot run (vLLM's ``AttentionSelectorConfig``)."""
    unsupported = {
        "multi-head latent attention (MLA)": selector.use_mla,
        "a model-native sparse attention": selector.use_sparse,
        "bidirectional multimodal prefixes": selector.use_mm_prefix,
        "non-causal attention": selector.use_non_causal,
        "reference sliding windows": selector.use_rswa,
        "context parallelism": selector.use_dcp or selector.use_pcp,
        f"{selector.attn_type} layers": selector.attn_type != "decoder",
    }
    for what, present in unsupported.items():
        if present:
            raise RetrievalConfigError(f"KV retrieval does not support {what}. {WITHOUT}")
    if not _is_own(selector.kv_cache_dtype, selector.dtype):
        raise RetrievalConfigError(
            f"KV retrieval does not support a KV cache in {selector.kv_cache_dtype} with a model "
            f"in {selector.dtype}; {own_cache(selector.dtype)}."
        )


def check_impl(impl: Any) -> None:
    """Refuse what a layer turns out to need (vLLM's implementation of its attention)."""
    refuse_of_model({"ALiBi": impl.alibi_slopes is not None})


def refuse_of_model(unsupported: Mapping[str, bool]) -> None:
    """Refuse what a model uses.

    Args:
        unsupported: The names of features, and whether the model uses them.
    """
    for what, present in unsupported.items():
        if present:
            raise RetrievalConfigError(
                f"KV retrieval does not support {what}, which this model uses. {WITHOUT}"
            )
