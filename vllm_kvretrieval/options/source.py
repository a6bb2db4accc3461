"""Where an engine's options stand in vLLM's configuration, and how they get there."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.files import read_files
from vllm_kvretrieval.options.table import CONFIG_KEY
from vllm_kvretrieval.retrieval.presets import preset_names, presets
from vllm_kvretrieval.values import parse_size, reject_misspelt, shortened

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def options_of(vllm_config: "VllmConfig") -> Any:
    """The raw ``kv_retrieval`` options of an engine.

    Raises:
        RetrievalConfigError: They stand under another name, and would be ignored.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, Mapping):
        return {}
    right = f'{{"{CONFIG_KEY}": {{"budget": 1024}}}}'
    reject_misspelt(additional, CONFIG_KEY, "additional_config", right)
    return additional.get(CONFIG_KEY, {})


def selected_method(vllm_config: "VllmConfig") -> str | None:
    """The retrieval method that an engine's attention backend names, or None.

    Raises:
        RetrievalConfigError: Two different methods are named for two kinds of layers.
    """
    attention = vllm_config.attention_config
    backends = {attention.backend, *attention.backend_per_kind.values()}
    names = {b.name.lower() for b in backends if b is not None} & set(preset_names())
    if len(names) > 1:
        raise RetrievalConfigError(
            f"attention backends {', '.join(sorted(names))} cannot run in one engine; choose one."
        )
    return names.pop() if names else None


def read_option_files(vllm_config: "VllmConfig") -> None:
    """Put what files hold in place of their names in the options of an engine.

    The configuration is what other processes of the engine get.

    Raises:
        RetrievalConfigError: A file cannot be read, or is no JSON.
    """
    options, additional = options_of(vllm_config), vllm_config.additional_config
    if not isinstance(options, Mapping) or not isinstance(additional, Mapping):
        return
    try:
        read = read_files(options)
    except RetrievalConfigError as e:
        raise RetrievalConfigError(f"{CONFIG_KEY}.{e}") from None
    vllm_config.additional_config = {**additional, CONFIG_KEY: read}


def add_options(vllm_config: "VllmConfig", added: Mapping[str, Any]) -> None:
    """Put further options into those of an engine, for all of its processes."""
    if added:
        options, additional = options_of(vllm_config), vllm_config.additional_config
        assert isinstance(options, Mapping)
        kept = additional if isinstance(additional, Mapping) else {}
        vllm_config.additional_config = {**kept, CONFIG_KEY: {**options, **added}}


def window_tokens(
    size: str, vllm_config: "VllmConfig", method: str, page_size: int, dense_layers: int
) -> int:
    """The tokens of a window that is given as a size: those of as many whole pages as fit.

    Args:
        size: The size as the user wrote it, such as ``8MiB``.
        vllm_config: The configuration of the engine.
        method, page_size, dense_layers: Options of the engine.

    Raises:
        RetrievalConfigError: No page fits, or the method's window takes no memory of its own.
    """
    given = f"{CONFIG_KEY}.window={shortened(size)}"
    if not presets()[method].raw_window:
        raise RetrievalConfigError(
            f"{given} must be a number of tokens: with {method} the window takes no memory of its "
            "own."
        )
    model = vllm_config.model_config
    layers = max(1, model.get_total_num_hidden_layers() - dense_layers)
    width = 2 * model.get_head_size() * model.dtype.itemsize
    page = layers * model.get_num_kv_heads(vllm_config.parallel_config) * width * page_size
    pages = parse_size(f"{CONFIG_KEY}.window", size) // page
    if not pages:
        raise RetrievalConfigError(
            f"{given} has no room for a page of {page_size} tokens, which takes {page} bytes in "
            f"{layers} layers. Raise it."
        )
    return pages * page_size
