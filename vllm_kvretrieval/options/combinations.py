"""Options of an engine that are valid one by one, and cannot be combined."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options import of_drafts, of_prompts
from vllm_kvretrieval.options.option import refuse_without_effect
from vllm_kvretrieval.options.table import OPTIONS
from vllm_kvretrieval.retrieval import needs
from vllm_kvretrieval.retrieval.codec import RAW
from vllm_kvretrieval.retrieval.files import as_written
from vllm_kvretrieval.system_limits import check_directory
from vllm_kvretrieval.values import shortened

if TYPE_CHECKING:
    from vllm_kvretrieval.options.engine import RetrievalConfig


def check_combinations(config: "RetrievalConfig", given: Mapping[str, Any]) -> None:
    """Refuse options that have no effect, or contradict each other.

    Args:
        config: The options, each of which is valid.
        given: Options of the engine as the user wrote them, by name.

    Raises:
        RetrievalConfigError: Names the option, and says why and what to do.
    """
    refuse_without_effect(given, type(config.own), config.method, OPTIONS)
    for key, value in given.items():
        other = OPTIONS[key].needs
        if other and other not in given:
            raise RetrievalConfigError(
                f"{key}={shortened(as_written(value))} has no effect without {other}; leave it out."
            )
        if OPTIONS[key].slow_home and not config.slow_home:
            raise RetrievalConfigError(
                f"{key}={shortened(value)} has no effect with home=device; leave it out, or use a "
                "home that is larger: disk on a CPU, host on a GPU."
            )
    _check_budgets(config)
    of_prompts.check(config)
    of_drafts.check(config)
    _check_settings(config)
    _check_store(config)
    if config.home_path is not None:
        check_directory(config.home_path)


def _check_budgets(config: "RetrievalConfig") -> None:
    for key in ("sink", "window"):
        value = getattr(config, key)
        least = 0 if key == "sink" else config.page_size
        if value is not None and (value < least or value % config.page_size):
            what = "0 or a positive multiple" if key == "sink" else "a positive multiple"
            raise RetrievalConfigError(
                f"{key}={value} must be {what} of page_size={config.page_size}; "
                f"try {config.budgets.nearest(value)}, or leave it out."
            )
    for name, method in config.methods.items():
        window = config.page_budget(method=name).window
        if method.entry_pages > max(1, window):
            raise RetrievalConfigError(
                f"window={config.window} has no room for an unfinished entry of "
                f"{method.entry_tokens} tokens; use {method.entry_tokens} or more, or "
                f"summary_size={config.page_size}."
            )
    if config.max_budget is not None:
        if config.max_budget < config.budget:
            raise RetrievalConfigError(
                f"max_budget={config.max_budget} must be budget={config.budget} or more: requests "
                "may raise theirs up to it. Raise it, or leave it out."
            )
        config.page_budget(config.max_budget, key="max_budget")


def _check_settings(config: "RetrievalConfig") -> None:
    """Refuse methods that need what home, codec or another setting lacks."""
    methods = config.methods.values()
    if config.slow_home:
        raw = config.encoding is None
        read = [m for m in methods if not m.whole or (m is config.own and raw)]
        needs.SLOW_HOME.check(read, f"home={config.home!r}")
    if config.codec != RAW:
        if not config.slow_home:
            raise RetrievalConfigError(
                f"codec={config.codec!r} is for pages in a file, and with home=device the KV cache "
                "is read where it lies; use home=disk (whose home_path may be in memory, such as "
                "/dev/shm), or codec=raw."
            )
        needs.CODEC.check(methods, f"codec={config.codec!r}")
    if config.streaming_attention:
        needs.STREAMING.check(methods)
    if config.memory_fraction is not None:
        needs.MEMORY_FRACTION.check(methods, f"memory_fraction={config.memory_fraction}")


def _check_store(config: "RetrievalConfig") -> None:
    if config.store is None:
        return
    if config.home == "host":
        raise RetrievalConfigError(
            f"store={shortened(config.store)} cannot be used with home=host, which is a GPU's: a "
            "store saves and fetches blocks between steps, and those of a GPU are not waited for. "
            "Leave store out."
        )
    if config.home not in ("disk", "device"):
        raise RetrievalConfigError(
            f"store={shortened(config.store)} is another one for each home, and "
            f"home={config.home} may be either; use home=disk or home=device, or leave it out."
        )
    if config.home_path is not None:
        raise RetrievalConfigError(
            f"home_path={shortened(config.home_path)} has no effect with "
            f"store={shortened(config.store)}, where the "
            "file of the home is; leave it out."
        )
    if not Path(config.store).absolute().parent.is_dir():
        raise RetrievalConfigError(
            f"store={shortened(config.store)} cannot be made: there is no directory above it."
        )
