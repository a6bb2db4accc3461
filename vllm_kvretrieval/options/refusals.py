"""Options of an engine that are valid one by one, and cannot be combined."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.limits import check_directory
from vllm_kvretrieval.options.choices import DEFAULT_CHUNK, DEFAULT_QUERIES, MOST_QUERIES
from vllm_kvretrieval.options.option import refuse_without_effect
from vllm_kvretrieval.options.table import OPTIONS
from vllm_kvretrieval.retrieval.codec import RAW
from vllm_kvretrieval.retrieval.family import family_with
from vllm_kvretrieval.retrieval.files import as_written
from vllm_kvretrieval.retrieval.method import Method
from vllm_kvretrieval.retrieval.roles import WINDOW
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
    refuse_without_effect(given, family_with(config.own.schedule), config.method, OPTIONS)
    for key, value in given.items():
        needs = OPTIONS[key].needs
        if needs and needs not in given:
            raise RetrievalConfigError(
                f"{key}={shortened(as_written(value))} has no effect without {needs}; leave it out."
            )
        if OPTIONS[key].slow_home and config.home == "device":
            raise RetrievalConfigError(
                f"{key}={shortened(value)} has no effect with home=device; leave it out, or use a "
                "home that is larger: disk, on a GPU host."
            )
    _check_budgets(config)
    _check_prefill(config)
    _check_home(config)
    _check_codec(config)
    _check_streaming(config)
    _check_store(config)
    if config.home_path is not None:
        check_directory(config.home_path)


def _named(config: "RetrievalConfig", has: Callable[[Method], bool]) -> str:
    """Names of the engine's methods that have a property; empty: none has it."""
    return ", ".join(method.name for method in config.methods.values() if has(method))


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
    by_head = _named(config, lambda method: method.heads is not None)
    if config.memory_fraction is not None and by_head:
        raise RetrievalConfigError(
            f"memory_fraction={config.memory_fraction} makes budgets of what a request may read, "
            f"and with {by_head} some heads read everything; leave one out."
        )


def _check_prefill(config: "RetrievalConfig") -> None:
    budget, chunk, queries = config.prefill_budget, config.prefill_chunk, config.prefill_queries
    if budget is None or chunk is None:
        return
    if not config.prefills_sparsely(config.own):
        raise RetrievalConfigError(
            f"prefill_budget={budget} cannot be used with {config.method}, which selects no pages "
            "by an index: its prefill is exact. Leave it out."
        )
    if config.own.shares and config.home != "device":
        raise RetrievalConfigError(
            f"prefill_budget={budget} needs home=device with {config.method}: chunks of prompts "
            f"read single tokens, which home={config.home!r} does not serve. Leave one out."
        )
    for method in config.methods.values():
        if config.prefills_sparsely(method):
            config.page_budget(budget, method.name, key="prefill_budget")
    if config.own.shares:
        if chunk < WINDOW:
            raise RetrievalConfigError(
                f"prefill_chunk={chunk} must be {WINDOW} or more: filters select by so many "
                f"queries of a chunk. Try {DEFAULT_CHUNK}, or leave it out."
            )
        return
    _ = config.prompt_shares  # refuses values that are no shares
    if chunk < config.page_size or chunk % config.page_size:
        raise RetrievalConfigError(
            f"prefill_chunk={chunk} must be a positive multiple of page_size={config.page_size}; "
            f"try {config.budgets.nearest(chunk)}, or leave it out."
        )
    most = min(MOST_QUERIES, chunk)
    if queries is not None and not 1 <= queries <= most:
        raise RetrievalConfigError(
            f"prefill_queries={queries} must be from 1 to {most}; try "
            f"{min(DEFAULT_QUERIES, most)}, or leave it out."
        )


def _check_home(config: "RetrievalConfig") -> None:
    if config.home == "device":
        return
    # Filters read keys, too, but of layers that stay in memory as long as they fit there.
    if reading := _named(config, lambda method: method.reads_keys and not method.shares):
        raise RetrievalConfigError(
            f"home={config.home!r} keeps keys where they are slow to read, and {reading} selects "
            "by them (index exact, or rerank); leave it out, or use home=device."
        )
    if config.rows and (uneven := _named(config, _keeps_unevenly)):
        raise RetrievalConfigError(
            f"home={config.home!r} gives all KV heads as many slots for single tokens, and "
            f"{uneven} divides the budget unevenly (budget_shares); leave it out, or use "
            "home=device."
        )
    by_head = _named(config, lambda method: method.heads is not None)
    if by_head or (config.own.whole and config.encoding is None):
        who, what = (by_head, "some heads") if by_head else (config.method, "steps")
        raise RetrievalConfigError(
            f"home={config.home!r} is for contexts of which little is read at a step, and with "
            f"{who} {what} read everything; leave it out, or use home=device."
        )


def _keeps_unevenly(method: Method) -> bool:
    """Whether KV heads of a layer differ in how many tokens they attend to.

    Shares by entropy are those of layers; as heads drop tokens step by step, they come to differ.
    """
    shares = method.budget_shares
    return not shares.uniform and (shares.entropy is None or method.drops)


def _check_codec(config: "RetrievalConfig") -> None:
    if config.codec == RAW:
        return
    if config.home == "device":
        raise RetrievalConfigError(
            f"codec={config.codec!r} is for pages in a file, and with home=device the KV cache is "
            "read where it lies; use home=disk (whose home_path may be in memory, such as "
            "/dev/shm), or codec=raw."
        )
    if tokens := _named(config, lambda method: method.per_token):
        raise RetrievalConfigError(
            f"codec={config.codec!r} encodes whole pages, and {tokens} selects single tokens (unit "
            "token); use codec=raw."
        )
    if uneven := _named(config, lambda method: not method.budget_shares.uniform):
        raise RetrievalConfigError(
            f"codec={config.codec!r} reads contexts within the budget from slots, of which every "
            f"layer needs as many, and {uneven} divides the budget unevenly (budget_shares); use "
            "codec=raw, or leave the shares out."
        )


def _check_streaming(config: "RetrievalConfig") -> None:
    if not config.streaming_attention:
        return
    if tokens := _named(config, lambda method: method.per_token):
        raise RetrievalConfigError(
            f"streaming_attention=True is for pages, and {tokens} recalls single tokens; leave it "
            "out."
        )


def _check_store(config: "RetrievalConfig") -> None:
    if config.store is None:
        return
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
