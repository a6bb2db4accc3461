"""Refusals at start-up of what retrieval cannot serve on a GPU, with remedies."""

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvretrieval.attention import refusals
from vllm_kvretrieval.attention.refusals import WITHOUT, has_foreign_connector
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels.triton.index import KINDS
from vllm_kvretrieval.kernels.triton.resolve import MOST_SLOTS
from vllm_kvretrieval.kernels.triton.select import MOST_PAGES, TILE_PAGES
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.methods import make_method
from vllm_kvretrieval.options.table import OF_METHOD, OPTIONS
from vllm_kvretrieval.retrieval.codec import CODECS, RAW
from vllm_kvretrieval.retrieval.families import Method
from vllm_kvretrieval.retrieval.index.one_bit import OneBit
from vllm_kvretrieval.retrieval.needs import (
    FILTERS_ALONE,
    GPU,
    GPU_HOST,
    SPECULATION,
    Need,
)
from vllm_kvretrieval.retrieval.presets import Preset, presets

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = tuple(range(16, 257, 16))
MOST_IN_GROUP = 16
"""Query heads of a KV head: rows of the smallest tile of the tensor cores."""
CAPABILITY = 8, 0
"""The oldest GPUs that the kernels are compiled for."""
MOST_TOKENS = 128
"""Tokens of the largest pages that the kernels are tested with."""
DRAFTERS = "ngram", "ngram_gpu"
"""Methods of vLLM's ``--speculative-config`` that its V2 runner drafts by without a model; they are
the same there, but that only with the second a step is scheduled while another one runs."""
BENCH = "DecodeBenchConnector"


def check_engine(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse engines that retrieval cannot serve here.

    Raises:
        RetrievalConfigError: Says which feature stands in the way and what to change.
    """
    check_options(config)
    refusals.check_engine(vllm_config, config)
    model, parallel, method = vllm_config.model_config, vllm_config.parallel_config, config.method
    check_speculation(vllm_config, config)
    if not vllm_config.use_v2_model_runner:
        raise RetrievalConfigError(
            f"{method} on a GPU needs vLLM's V2 model runner; unset VLLM_USE_V2_MODEL_RUNNER, and "
            "leave out what vLLM's log names as not supported by it."
        )
    if parallel.use_ubatching:
        raise RetrievalConfigError(
            f"{method} does not support microbatches; leave --enable-dbo and --ubatch-size out."
        )
    drafts = vllm_config.num_speculative_tokens
    check_home(config, sleeps=model.enable_sleep_mode, drafts=drafts)
    check_methods(config)
    if parallel.tensor_parallel_size > 1:
        by = f"--tensor-parallel-size {parallel.tensor_parallel_size}"
        if config.filter_heads != "own":
            FILTERS_ALONE.check(config.methods.values(), by)
    group = query_heads(vllm_config)
    if group > MOST_IN_GROUP:
        raise RetrievalConfigError(
            f"{method} does not support {group} query heads per KV head, as {model.model} has, but "
            f"up to {MOST_IN_GROUP}. {WITHOUT}"
        )
    check_shape(model.dtype, model.get_head_size(), method)
    if model.max_model_len > MOST_PAGES * config.page_size:
        raise RetrievalConfigError(
            f"{method} does not support contexts of more than {MOST_PAGES} pages on a GPU, and "
            f"--max-model-len {model.max_model_len} has more of kv_retrieval.page_size="
            f"{config.page_size}; use {MOST_PAGES * config.page_size}, or larger pages."
        )
    most = TILE_PAGES * config.page_size
    for served, need in itertools.product(config.methods.values(), (Need.MASS, Need.HEADS)):
        if need in served.needs and model.max_model_len > most:
            raise RetrievalConfigError(
                f"{served.name} {need.value}, which a GPU serves in contexts of up to {TILE_PAGES} "
                f"pages, and --max-model-len {model.max_model_len} has more of "
                f"kv_retrieval.page_size={config.page_size}; use {most}, or larger pages."
            )
    check_connector(vllm_config, config)


def query_heads(vllm_config: "VllmConfig") -> int:
    """Query heads of a KV head."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)


def check_speculation(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse drafters, and engines with drafts, that are not served here.

    Raises:
        RetrievalConfigError: Says what stands in the way and what to change.
    """
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    if speculative is None:
        return
    if speculative.method not in DRAFTERS:
        raise RetrievalConfigError(
            f"{config.method} does not verify the drafts of {speculative.method!r} on a GPU yet; "
            f"use {' or '.join(DRAFTERS)} as the method of --speculative-config, or leave that out."
        )
    obstacles = {
        f"the states of {model.model}": model.is_hybrid,
        "--pipeline-parallel-size": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "a KV connector": has_foreign_connector(vllm_config),
    }
    for obstacle, present in obstacles.items():
        if present:
            raise RetrievalConfigError(
                f"{config.method} does not verify drafts beside {obstacle} on a GPU yet; leave one "
                "out."
            )
    group, drafts = query_heads(vllm_config), vllm_config.num_speculative_tokens
    told = f"kv_retrieval.drafts={drafts}" if config.drafts else "--speculative-config"
    SPECULATION.check(config.methods.values(), told)
    by = told if config.drafts else f"num_speculative_tokens={drafts} of {told}"
    most = MOST_IN_GROUP // group - 1
    if drafts > most:
        use = f"use {most} at most" if most > 0 else "leave it out"
        raise RetrievalConfigError(
            f"{by}: {config.method} verifies drafts by {MOST_IN_GROUP} queries per KV head on a "
            f"GPU, and {model.model} has {group} for each token; {use}."
        )


def check_preset(name: str, options: Any) -> None:
    """Refuse a method that there are no kernels for, before anything else about it.

    A method whose pages are encoded stands for its codec, so no option is named by which it would
    be another method. If the user names a codec, or options that are wrong, later checks judge. A
    codec in the GPU's own memory is refused here, since later the CPU's remedy would be named.

    Args:
        name: The preset's name.
        options: The ``kv_retrieval`` options as the user wrote them.
    """
    preset, given = presets()[name], options if isinstance(options, Mapping) else {}
    codec = given.get("codec", preset.codec)
    if codec == RAW or not isinstance(codec, str) or codec not in CODECS:
        own = {key: given[key] for key in OF_METHOD if key in given}
        try:
            method = make_method(name, name, own, given.get("page_size", preset.page_size))
        except RetrievalConfigError:
            return
        check_method(method)
        return
    if given.get("home", preset.home) == "device":
        raise RetrievalConfigError(
            f"kv_retrieval.home='device': {name} has its pages encoded (codec={codec}), which a "
            f"GPU does in host memory; use home=host{_or_raw(preset)}."
        )


def _or_raw(preset: Preset) -> str:
    """A remedy, unless a method is one by its codec."""
    return f", or codec={RAW}" if preset.codec == RAW else ""


def check_options(config: RetrievalConfig) -> None:
    """Refuse options of an engine, or values of them, that are served on the CPU only."""
    if config.page_size > MOST_TOKENS:
        raise RetrievalConfigError(
            f"kv_retrieval.page_size={config.page_size} is not served on a GPU yet; use "
            f"{MOST_TOKENS} or less."
        )
    for key, known in OPTIONS.items():
        given = getattr(config, key)
        if known.on_gpu and given not in (None, known.neutral):
            instead = f"{key} left out" if known.neutral is None else f"{key}={known.neutral}"
            raise RetrievalConfigError(
                f"kv_retrieval.{key}={given!r} is not served on a GPU yet: {known.on_gpu}, with "
                f"{instead}."
            )


def check_home(config: RetrievalConfig, *, sleeps: bool, drafts: int = 0) -> None:
    """Refuse a home that is none of a GPU's, and what one in host memory cannot do.

    Args:
        config: Options of the engine.
        sleeps: Whether vLLM's sleep mode is on.
        drafts: The most draft tokens of a request in a step.
    """
    if config.home == "disk":
        raise RetrievalConfigError(
            "kv_retrieval.home='disk' is not served on a GPU yet; use home=host, which keeps the "
            "KV cache in host memory."
        )
    if config.home_path is not None:
        raise RetrievalConfigError(
            f"kv_retrieval.home_path={config.home_path!r} is for home=disk, which is not served on "
            "a GPU; leave it out."
        )
    if config.home == "host" and config.exact_below:
        raise RetrievalConfigError(
            f"kv_retrieval.exact_below={config.exact_below} has no effect with home=host, where a "
            "whole context would have to come to the device at each step; leave it out."
        )
    if config.slow_home and sleeps:
        raise RetrievalConfigError(
            f"kv_retrieval.home={config.home} cannot be combined with --enable-sleep-mode, which "
            "does not know of host memory; leave one out."
        )
    if config.slow_home:
        GPU_HOST.check(config.methods.values(), f"kv_retrieval.home={config.home}")
    _check_codec(config, drafts)
    most = MOST_SLOTS * config.slot_tokens
    if config.slow_home and config.budget_limit + drafts > most:
        larger = "" if config.token_major else ", or use larger pages"
        raise RetrievalConfigError(
            f"kv_retrieval.home={config.home} serves budgets of up to {most} tokens, {MOST_SLOTS} "
            f"slots of {config.slot_tokens}, and a step may have {config.budget_limit + drafts}; "
            f"lower budget (or max_budget){larger}."
        )


def _check_codec(config: RetrievalConfig, drafts: int) -> None:
    """Refuse what encoded pages do not go with."""
    codec = config.encoding
    if codec is None:
        return
    told, or_raw = f"kv_retrieval.codec={codec.name!r}", _or_raw(presets()[config.method])
    if config.home != "host":
        raise RetrievalConfigError(
            f"{told} encodes pages in host memory on a GPU, and home={config.home} may be the "
            f"GPU's own; use home=host{or_raw}."
        )
    if drafts:
        raise RetrievalConfigError(
            f"{told} encodes pages for good, and {drafts} drafts of a step may be taken back; "
            f"leave --speculative-config (or drafts) out{or_raw}."
        )


def check_methods(config: RetrievalConfig) -> None:
    """Refuse an engine's methods that there are no kernels for, or none that serve all of them."""
    by_kind: dict[tuple[bool, bool, bool], str] = {}
    for method in config.methods.values():
        check_method(method)
        if method.selects and not method.whole:
            kind = method.per_token, method.selects_for_others, method.observes
            by_kind.setdefault(kind, method.name)
    if len(by_kind) > 1:
        names = " and ".join(by_kind.values())
        raise RetrievalConfigError(
            f"a GPU does not serve {names} together yet: pages, single tokens, tokens that "
            "filters select, and tokens that are kept of prompts go apart. Leave one out of "
            "kv_retrieval.also."
        )
    kept = [method.name for method in config.methods.values() if method.observes]
    if kept and config.exact_below:
        raise RetrievalConfigError(
            f"kv_retrieval.exact_below={config.exact_below} cannot be used with {kept[0]} on a "
            "GPU, whose steps attend to kept tokens whatever the length; leave one out."
        )


def check_method(method: Method) -> None:
    """Refuse a method that there are no kernels for."""
    GPU.check([method])
    if method.per_token and isinstance(method.index, OneBit):
        return
    if method.per_token and method.index is not None:
        raise RetrievalConfigError(
            f"{method.name} is not served on a GPU yet, where single tokens are selected by "
            f"index=one_bit, and not by {method.index.name}; use it, or unit=page."
        )
    if method.index is not None and type(method.index) not in KINDS:
        raise RetrievalConfigError(
            f"{method.name} is not served on a GPU yet, where index {method.index.name} is not; "
            f"use {', '.join(kind.name for kind in KINDS)}."
        )


def check_shape(dtype: torch.dtype, head_size: int, method: str) -> None:
    """Refuse element types and head sizes that the kernels lack."""
    if dtype not in DTYPES:
        raise RetrievalConfigError(
            f"{method} does not support dtype {dtype} on a GPU; use --dtype bfloat16 or float16."
        )
    if head_size not in HEAD_SIZES:
        raise RetrievalConfigError(
            f"{method} does not support head size {head_size} on a GPU, but multiples of 16 up to "
            f"{HEAD_SIZES[-1]}. {WITHOUT}"
        )


def check_connector(vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
    """Refuse what KV connectors do not go with, and vLLM's offloading."""
    if not has_foreign_connector(vllm_config):
        return
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    if config.encoding is not None:
        raise RetrievalConfigError(
            f"kv_retrieval.codec={config.codec!r} does not go with another KV connector on a GPU "
            "yet: nobody would encode the blocks that it fills. Leave --kv-transfer-config (or "
            f"--kv-offloading-size) out{_or_raw(presets()[config.method])}."
        )
    if transfer is None or cache.kv_offloading_size is not None:
        raise RetrievalConfigError(
            f"{config.method} does not support vLLM's offloading on a GPU yet: it has not been "
            "tried beside retrieval. Leave --kv-offloading-size out."
        )
    if config.slow_home and transfer.kv_connector != BENCH:
        raise RetrievalConfigError(
            f"kv_retrieval.home={config.home} cannot be combined with the KV connector "
            f"{transfer.kv_connector}, which would write to host memory as to the device's; leave "
            "--kv-transfer-config out, or use home=device."
        )
    if config.slow_home and not fills_at_start(vllm_config):
        raise RetrievalConfigError(
            f"with kv_retrieval.home={config.home} {BENCH} has to fill the cache at the start: add "
            '"kv_connector_extra_config": {"startup_fill": true}.'
        )
    refusals.check_layout_is_said(vllm_config, config)


def fills_at_start(vllm_config: "VllmConfig") -> bool:
    """Whether vLLM's benchmark fills the cache before the first step."""
    transfer = vllm_config.kv_transfer_config
    bench = transfer is not None and transfer.kv_connector == BENCH
    return bench and bool(transfer.get_from_extra_config("startup_fill", False))


def check_layer(selector: Any) -> None:
    """Refuse a layer that retrieval cannot run (vLLM's ``AttentionSelectorConfig``)."""
    refusals.check_layer(selector)
    check_shape(selector.dtype, selector.head_size, "KV retrieval")
