"""Refusals at start-up of what retrieval cannot serve on the CPU, with remedies."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_kvretrieval.attention import refusals
from vllm_kvretrieval.attention.cpu.nixl import check_exchange
from vllm_kvretrieval.attention.cpu.speculation import check_speculation
from vllm_kvretrieval.attention.refusals import WITHOUT
from vllm_kvretrieval.compat import configured_block_size
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.quantization.refusals import check_weights
from vllm_kvretrieval.retrieval.index.check import check_outside
from vllm_kvretrieval.retrieval.layers import has_windows
from vllm_kvretrieval.storage.layouts import layout_of

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig, VllmConfig

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

RATIOS = {
    "avx512_amx": {"bfloat16": 1.02},
    "avx512_bf16": {"float32": 0.98, "bfloat16": 2.0, "float16": 1.1},
    "avx512": {"float32": 0.98, "bfloat16": 1.16, "float16": 1.09},
    "avx2": {"float32": 1.99, "bfloat16": 2.04, "float16": 1.94},
}
"""How many times as fast as vLLM's our own kernel reads prompts, by instruction set and element.

The least of what `python -m benchmarks.ops prompt-attention` found; its results are
``benchmarks/results/prompt-attention-*.json``. With AMX vLLM's reads the same pages.
"""

NO_SLOWER = {"avx512_amx": "avx512_bf16"}
"""Instruction sets whose kernels are no slower than those of another one, which were measured, in
layouts that are not for AMX."""

FASTER = 1.0
"""The ratio from which on our own kernel is the default."""

VALUE_EXPERTS = "mova_num_experts"
"""Field of a model's configuration (K2-Horizon)."""

STABLE_HASH = "sha256_cbor"
"""vLLM's algorithm for the hashes of a store's blocks."""


class Choice(NamedTuple):
    """Whose kernel attends to whole contexts.

    Attributes:
        own: Whether ours does; else vLLM's.
        why: Why, for the log.
    """

    own: bool
    why: str


def choose_attention(config: RetrievalConfig, dtype: torch.dtype, head_size: int) -> Choice:
    """Whose kernel attends to whole contexts.

    The option says so. Without it, ours does where it is faster.
    """
    if config.attention is not None:
        return Choice(config.attention == "own", f"attention={config.attention}")
    layout = layout_of(config, dtype, head_size)
    kernels, name = cpu.isa(), str(dtype).removeprefix("torch.")
    if layout == "amx":
        measured = kernels if kernels in NO_SLOWER else ""  # other kernels are slow there
    else:
        measured = NO_SLOWER.get(kernels, kernels)
    ratio = RATIOS.get(measured, {}).get(name)
    if layout not in cpu.LAYOUTS or ratio is None:
        return Choice(False, f"ours is not measured here ({layout}, {kernels}, {name})")
    why = f"ours is measured at {ratio} times the speed of vLLM's ({kernels}, {name})"
    return Choice(ratio >= FASTER, why)


def check_attention(config: RetrievalConfig, dtype: torch.dtype, head_size: int) -> None:
    """Refuse what our own kernels have to do where they cannot read the KV cache, or do not."""
    layout = layout_of(config, dtype, head_size)
    if config.attention == "own" and layout not in cpu.LAYOUTS:
        raise RetrievalConfigError(
            f"kv_retrieval.attention=own cannot read keys as vLLM lays them out here ({layout}); "
            "leave it out."
        )
    if config.streaming_attention and layout not in cpu.LAYOUTS:
        raise RetrievalConfigError(
            "kv_retrieval.streaming_attention=True puts parts together that our own kernel attends "
            f"to, and here vLLM's kernel attends ({layout}); leave it out."
        )


def check_engine(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse engines that retrieval cannot serve here.

    Raises:
        RetrievalConfigError: Says which feature stands in the way and what to change.
    """
    check_home(vllm_config, config)
    check_store(vllm_config, config)
    fit_blocks(vllm_config, config)
    refusals.check_engine(vllm_config, config)
    check_weights(vllm_config)
    check_value_experts(vllm_config.model_config, config.method)
    if vllm_config.kv_transfer_config is not None:
        check_exchange(vllm_config.kv_transfer_config, config.method)
    model, method = vllm_config.model_config, config.method
    head_size = model.get_head_size()
    if config.page_size % 32 and layout_of(config, model.dtype, head_size) != "vec16":
        raise RetrievalConfigError(
            f"kv_retrieval.page_size={config.page_size} is not supported on this CPU, where vLLM's "
            "attention takes multiples of 32; use 32."
        )
    check_windows(vllm_config, config)
    if vllm_config.scheduler_config.async_scheduling:
        raise RetrievalConfigError(
            f"{method} on the CPU follows one step after the other; set --no-async-scheduling."
        )
    check_entries(vllm_config, config)
    check_steps(vllm_config.scheduler_config, config, vllm_config.num_speculative_tokens)
    check_shape(model.dtype, head_size, method)
    check_attention(config, model.dtype, head_size)
    check_outside(config.index_kinds, head_size, model.dtype)
    layout = layout_of(config, model.dtype, head_size)
    check_speculation(vllm_config, config, layout)


def check_value_experts(model: Any, method: str) -> None:
    """Refuse a K2-Horizon whose values are mixtures of experts: vLLM computes these by Triton."""
    if experts := getattr(model.hf_text_config, VALUE_EXPERTS, 0):
        raise RetrievalConfigError(
            f"{method} cannot serve {model.model} on a CPU: its values are mixtures of {experts} "
            f"experts ({VALUE_EXPERTS}), which vLLM computes by Triton, with retrieval or without. "
            "Serve it on a GPU."
        )


def fit_blocks(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Have blocks of a page, or of an entry of pages, where vLLM's are smaller and not named."""
    cache = vllm_config.cache_config
    needed = max([config.page_size, *(kind.entry_tokens for kind in config.index_kinds)])
    if not cache.user_specified_block_size and configured_block_size(vllm_config) < needed:
        cache.block_size, cache.user_specified_block_size = needed, True


def check_windows(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse pages that layers with sliding windows would have, too, and vLLM does not serve."""
    model, remedy = vllm_config.model_config, ""
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        remedy = "leave --disable-hybrid-kv-cache-manager out"
    elif refusals.has_foreign_connector(vllm_config):
        remedy = "leave the KV connector out"
    if config.page_size % 32 == 0 or not remedy or not has_windows(model):
        return
    raise RetrievalConfigError(
        f"kv_retrieval.page_size={config.page_size} cannot be served here with {model.model}: its "
        "layers with sliding windows would have the same pages, and vLLM's attention takes "
        f"multiples of 32. Use page_size=32, or {remedy}."
    )


def check_entries(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse entries of pages that may lie apart in the KV cache, in several blocks."""
    block_size = configured_block_size(vllm_config)
    if refusals.has_foreign_connector(vllm_config):
        block_size = config.page_size
    for kind in config.index_kinds:
        if kind.entry_tokens > config.page_size and block_size % kind.entry_tokens:
            raise RetrievalConfigError(
                f"kv_retrieval.summary_size={kind.entry_tokens} cannot be used with blocks of "
                f"{block_size} tokens, whose pages lie apart; use {config.page_size}, or "
                f"--block-size {kind.entry_tokens}."
            )


def check_steps(scheduler: "SchedulerConfig", config: RetrievalConfig, drafts: int) -> None:
    """Refuse steps with less room than a chunk of a prompt and the requests that decode need.

    Chunks are not cut, so a prompt that gets less than one in every step would wait forever.

    Args:
        scheduler: vLLM's options of steps.
        config: Options of the engine.
        drafts: The most draft tokens of a request in a step.
    """
    if config.prefill_budget is None:
        return
    assert config.prefill_chunk is not None
    needed = config.prefill_chunk + scheduler.max_num_seqs * (1 + drafts)
    chunks = (
        f"kv_retrieval.prefill_budget={config.prefill_budget} computes prompts in chunks of "
        f"{config.prefill_chunk} tokens"
    )
    room = min(
        scheduler.max_num_batched_tokens,
        scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
    )
    if room < needed:
        raise RetrievalConfigError(
            f"{chunks}, and steps have {room}. Raise --max-num-batched-tokens (and "
            f"max_num_scheduled_tokens) to {needed} or more, or lower kv_retrieval.prefill_chunk "
            "or --max-num-seqs."
        )
    if 0 < scheduler.long_prefill_token_threshold < config.prefill_chunk:
        raise RetrievalConfigError(
            f"{chunks}, and --long-prefill-token-threshold {scheduler.long_prefill_token_threshold}"
            f" gives a prompt fewer of them in a step. Raise it to {config.prefill_chunk} or more, "
            "or lower kv_retrieval.prefill_chunk."
        )


def check_home(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse what only GPUs have, and KV connectors beside a slow home."""
    if config.slow_home and config.exact_below:
        raise RetrievalConfigError(
            f"kv_retrieval.exact_below={config.exact_below} has no effect with home={config.home}, "
            "where a whole context would have to be read from the file at each step; leave it out."
        )
    if config.home == "host":
        raise RetrievalConfigError(
            "kv_retrieval.home='host' is for GPUs; on the CPU platform host memory is what device "
            "names. Use home=device, or home=disk for a cache larger than memory."
        )
    if not config.slow_home or not refusals.has_foreign_connector(vllm_config):
        return
    option, what = "--kv-transfer-config", "another KV connector"
    if vllm_config.cache_config.kv_offloading_size is not None:
        option, what = "--kv-offloading-size", "vLLM's offloading"
    elif transfer := vllm_config.kv_transfer_config:
        what = f"the KV connector {transfer.kv_connector}"
    raise RetrievalConfigError(
        f"kv_retrieval.home={config.home} cannot be combined with {what}; leave {option} out, or "
        "use home=device."
    )


def check_store(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse what a store cannot be combined with; blocks are found by vLLM's hashes of tokens.

    Hashes have to mean the same in every run, so the default algorithm, whose values depend on how
    Python holds a text, is replaced.
    """
    if config.store is None:
        return
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    named = f"kv_retrieval.store={config.store!r}"
    if refusals.has_foreign_connector(vllm_config):
        raise RetrievalConfigError(
            f"{named} needs the place of a KV connector, of which vLLM has one; leave out "
            "--kv-transfer-config, or the store."
        )
    if not cache.enable_prefix_caching:
        raise RetrievalConfigError(
            f"{named} is found through the prefix cache; leave --no-enable-prefix-caching out."
        )
    if cache.prefix_caching_hash_algo == "sha256":
        cache.prefix_caching_hash_algo = STABLE_HASH
    if cache.prefix_caching_hash_algo != STABLE_HASH:
        raise RetrievalConfigError(
            f"{named} needs hashes that mean the same in every run; use "
            f"--prefix-caching-hash-algo {STABLE_HASH}, or leave the option out."
        )
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        raise RetrievalConfigError(
            f"{named} is the store of one engine, whose workers have all layers; leave out "
            "--pipeline-parallel-size and --data-parallel-size, or the store."
        )


def check_shape(dtype: torch.dtype, head_size: int, method: str) -> None:
    """Refuse element types and head sizes that the kernels lack."""
    if dtype not in DTYPES:
        raise RetrievalConfigError(f"{method} does not support dtype {dtype}; use bfloat16.")
    if head_size not in HEAD_SIZES:
        raise RetrievalConfigError(
            f"{method} does not support head size {head_size}, only {HEAD_SIZES}. {WITHOUT}"
        )


def check_layer(selector: Any) -> None:
    """Refuse a layer that retrieval cannot run (vLLM's ``AttentionSelectorConfig``)."""
    refusals.check_layer(selector)
    check_shape(selector.dtype, selector.head_size, "KV retrieval")
