"""Checks of the options of a server that is to start: what they are refused for, what they take."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from vllm_kvretrieval.command_line import serve_arguments
from vllm_kvretrieval.compat import configured_block_size
from vllm_kvretrieval.doctor.caches import check_refused
from vllm_kvretrieval.doctor.findings import Finding, Severity, advice, error
from vllm_kvretrieval.doctor.logs import errors_of, quiet
from vllm_kvretrieval.options.choices import HOMES
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.model_files import check_model
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.store import store_names
from vllm_kvretrieval.system_limits import explained

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
SLOW = {"disk": ("on disk", "in memory"), "host": ("in host memory", "on the GPU")}
"""Where a slow home is, and where dense layers and index are then."""
REGISTRY = "vllm.model_executor.models.registry"
"""The logger that is told why a model's code cannot be loaded."""
MEND = "mend the installation first: a wheel for this machine, or pip install . in a checkout"
EXAMPLE = "add --attention-backend kvretrieval, or another method"


def read_options(arguments: Sequence[str]) -> Any:
    """vLLM's configuration by the arguments of ``vllm serve``, checked as at a start.

    Raises:
        ValueError: vLLM, or this package, refuses them; says why, and the remedy.
        SystemExit: An argument is unknown or has no value.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    given = serve_arguments(arguments)
    check_model(given.model)
    with quiet(), errors_of(REGISTRY) as raised:
        try:
            arguments_of_engine = AsyncEngineArgs.from_cli_args(given)
            return arguments_of_engine.create_engine_config(UsageContext.OPENAI_API_SERVER)
        except ValueError:
            if raised:
                raise ValueError(_of_its_code(raised[-1])) from None
            raise


def _of_its_code(error: BaseException) -> str:
    """Why vLLM cannot load the code of a model, and the remedy.

    Args:
        error: What it raised; its last line is that of the process that tried.
    """
    *_, cause = (str(error).strip() or repr(error)).splitlines()
    why = f"vLLM cannot load its code for this model ({cause.strip()})"
    if "torchvision" not in cause.lower():
        return why
    return (
        f"{why}, which needs torchvision, for text alone, too; install the build of torchvision "
        f"that belongs to torch {version('torch')} (docs/installation.md, torchvision)"
    )


def check_options(arguments: Sequence[str], users: int) -> tuple[list[Finding], Any]:
    """Findings about the arguments of ``vllm serve``, and vLLM's configuration.

    The configuration is None where they are refused.

    Args:
        arguments: The arguments behind ``vllm serve``.
        users: How many users to say the sizes of.
    """
    try:
        vllm_config = read_options(arguments)
        config = RetrievalConfig.from_vllm(vllm_config)
    except ImportError as e:
        why = refusal(e).partition(". ")[0]
        return [error("options", f"they cannot be checked ({why})", MEND)], None
    except (ValueError, OSError) as e:
        refused = check_refused("options", e) if isinstance(e, OSError) else None
        return [refused or Finding("options", refusal(e), Severity.ERROR)], None
    if config is None:
        found = advice("options", "no retrieval method is named, so vLLM serves", EXAMPLE)
        return [found], vllm_config
    return [*_sizes(vllm_config, config, users)], vllm_config


def refusal(error: Exception) -> str:
    """The message of an error, without what pydantic puts around it."""
    text = str(error)
    if said := text.partition("Value error, ")[2]:
        text = said.partition(" [type=")[0]
    return " ".join(text.rstrip(".").split())


class TokenBytes(NamedTuple):
    """What a token of a model whose layers are all alike takes, per worker.

    Attributes:
        kv: Bytes of its keys and values, in all layers.
        indexed: Its bytes in the page indexes.
        retrieving: The share of layers that retrieve.
    """

    kv: float
    indexed: float
    retrieving: float


def token_bytes(vllm_config: Any, config: RetrievalConfig) -> TokenBytes | None:
    """What a token takes; None where layers differ, so that only a start shows it.

    Args:
        vllm_config: vLLM's configuration.
        config: The engine's.
    """
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_kvretrieval.engine.memory import bytes_per_block
    from vllm_kvretrieval.retrieval.layers import full_attention_layers, retrieving_layers

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    numbers = full_attention_layers(model)
    layers = model.get_total_num_hidden_layers()
    if numbers is None or len(numbers) < layers or parallel.pipeline_parallel_size > 1:
        return None
    spec = FullAttentionSpec(
        block_size=configured_block_size(vllm_config),
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    names = {f"layers.{number}": number for number in numbers}
    found = {*retrieving_layers(numbers, config.roles(model, numbers), config.dense_layers)}

    def retrieving(given: Iterable[str]) -> list[str]:
        return [name for name in given if names[name] in found]

    kv, index = bytes_per_block(
        vllm_config,
        dict.fromkeys(names, spec),
        config,
        retrieving,
        current_platform.record_alignment,
    )
    return TokenBytes(kv / spec.block_size, index / spec.block_size, len(found) / layers)


def _sizes(vllm_config: Any, config: RetrievalConfig, users: int) -> Iterator[Finding]:
    """What a model takes of memory and home."""
    from vllm_kvretrieval.retrieval.layers import full_attention_layers

    model, parallel, cache = (
        vllm_config.model_config,
        vllm_config.parallel_config,
        vllm_config.cache_config,
    )
    block_size, longest = configured_block_size(vllm_config), model.max_model_len
    yield Finding("options", f"{config.method} with a budget of {config.budget} tokens")
    yield Finding("block size", f"{block_size} tokens; routers that hash prefixes are told this")
    token = token_bytes(vllm_config, config)
    if token is None:
        yield _sizes_by_layer(model, parallel, full_attention_layers(model), config.home)
        return
    each = " per worker" if parallel.world_size > 1 else ""
    context = -(-longest // block_size) * block_size * (token.kv + token.indexed)
    yield Finding(
        "sizes",
        f"a token takes {token.kv / KIB:.1f} KiB of KV cache and {token.indexed:.0f} bytes of page "
        f"index{each}; a context of {longest} tokens {context / GIB:.2f} GiB",
    )
    yield _many_users(vllm_config, config, users, *token)
    if not config.slow_home and (memory := cache.kv_cache_memory_bytes) is not None:
        tokens = int(memory // (token.kv * block_size)) * block_size
        yield Finding(
            "cache",
            f"{memory / GIB:.2f} GiB hold {tokens} tokens, {tokens / longest:.1f} contexts of "
            f"{longest}",
        )


def _sizes_by_layer(model: Any, parallel: Any, numbers: list[int] | None, home: str) -> Finding:
    """What the layers with full attention take, where layers differ.

    Args:
        model: vLLM's configuration of the model.
        parallel: That of its workers.
        numbers: Of layers with full attention; None: not known.
        home: Where they lie.
    """
    if numbers is None or parallel.pipeline_parallel_size > 1:
        return Finding("sizes", "not known before the start, since the layers of this model differ")
    sizes = dict[tuple[int, int], int]()
    # The last ones may read the keys and values of earlier ones (Gemma 4 E2B).
    shared = getattr(model.hf_text_config, "num_kv_shared_layers", None) or 0
    own = model.get_total_num_hidden_layers() - shared
    for number in (number for number in numbers if number < own):
        layer = model.model_arch_config[number]  # heads may differ from layer to layer
        shape = model.get_num_kv_heads(parallel, layer), layer.head_size
        sizes[shape] = sizes.get(shape, 0) + 1
    kv = sum(2 * heads * size * n for (heads, size), n in sizes.items()) * model.dtype.itemsize
    shapes = ", ".join(f"{n} with {heads} KV heads of {size}" for (heads, size), n in sizes.items())
    return Finding(
        "sizes",
        f"a token takes {kv / KIB:.1f} KiB of KV cache in the layers with full attention "
        f"({shapes}); "
        f"a context of {model.max_model_len} tokens {kv * model.max_model_len / GIB:.2f} GiB"
        f"{f' {SLOW[home][0]}' if home in SLOW else ''}, and windows and states of the other "
        f"layers {SLOW[home][1] if home in SLOW else 'beside it'}, which do not grow with it",
    )


def _many_users(
    vllm_config: Any,
    config: RetrievalConfig,
    users: int,
    kv: float,
    index: float,
    retrieving: float,
) -> Finding:
    """What users take whose contexts are as long as the model's longest, per worker.

    Args:
        vllm_config: vLLM's configuration.
        config: The engine's.
        users: How many they are.
        kv: Bytes of a token's keys and values, in all layers.
        index: Bytes of a token in the page index, which lies in fast memory.
        retrieving: The share of layers that retrieve; the others read the whole context, and a slow
            home holds none of them where fast memory has room.
    """
    model = vllm_config.model_config
    longest = model.max_model_len
    found, dense = retrieving * kv, (1 - retrieving) * kv
    if config.encoding is not None:
        size, page = model.get_head_size(), config.page_size
        raw = 2 * size * model.dtype.itemsize
        found *= config.encoding.bytes_per_token(page, size, model.dtype) / raw
    each = " per worker" if vllm_config.parallel_config.world_size > 1 else ""
    stored, at_home, densely, indexed = (
        _in_gib(users * longest * size) for size in (kv, found, dense, index)
    )
    budget, whole, scored = (
        f"{size / MIB:.0f} MiB"
        for size in (min(config.budget, longest) * found, longest * dense, longest * index)
    )
    places, fast = f"{stored} of KV cache", "in memory"
    if config.home in SLOW:
        home, fast = SLOW[config.home]
        places = f"{at_home} of KV cache {home}; {densely} of KV cache (dense layers)"
    return Finding(
        f"{users:,} users",
        f"of {longest} tokens each: {places} and {indexed} of index {fast}; a token generated "
        f"reads {budget} for its budget, {whole} of dense layers and up to {scored} of index{each}",
    )


def _in_gib(size: float) -> str:
    return f"{size / GIB:.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.1f} GiB"


def home_of(vllm_config: Any) -> tuple[str | None, int | None] | None:
    """Directory and bytes of the home on disk, or of the store; None: the options name none.

    A store's directory may have yet to be made. If it has stores, no room for another is asked for.

    Raises:
        RetrievalConfigError: It cannot be used; says why, and the remedy.
    """
    config = RetrievalConfig.from_vllm(vllm_config)
    if config is None:
        return None
    if config.store is None:
        may_be = config.home == "auto" or HOMES[config.home].on_disk
        return (config.home_path, config.home_bytes) if may_be else None
    size = config.home_bytes
    if not config.slow_home:  # of which the store is a copy
        size = vllm_config.cache_config.kv_cache_memory_bytes
    with explained(f"kv_retrieval.store={config.store!r} cannot be used"):
        directory = Path(config.store).absolute()
        if not directory.exists():
            return str(directory.parent), size
        with contextlib.closing(Folder.at(str(directory))) as root:
            return str(directory), None if store_names(root) else size
