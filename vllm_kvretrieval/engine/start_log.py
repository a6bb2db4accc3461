"""The log of a worker about its method at start-up; the same on every device."""

from collections.abc import Iterable

from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib

from vllm_kvretrieval.kernels.types import IndexRecords
from vllm_kvretrieval.options.engine import RetrievalConfig

logger = init_logger("vllm.kvretrieval.worker")


def log_method(
    config: RetrievalConfig,
    retrieval_layers: int,
    layers: int,
    indexes: Iterable[IndexRecords],
    kernels: str,
    shares: str = "",
) -> None:
    """Log what decode steps attend to, and what the page indexes take.

    Args:
        config: Options of the engine.
        retrieval_layers: How many layers retrieve.
        layers: Layers with attention, of which these are some.
        indexes: The page indexes of all layers.
        kernels: Which ones run.
        shares: How far KV heads differ in what they attend to.
    """
    if config.own.whole:
        logger.info("%s: all %d layers attend to whole contexts.", config.method, layers)
    else:
        _log_parts(config, retrieval_layers, layers, indexes, kernels, shares)
    if others := [name for name in config.methods if name != config.method]:
        logger.info("Requests may also name these methods: %s.", ", ".join(others))


def _log_parts(
    config: RetrievalConfig,
    retrieval_layers: int,
    layers: int,
    indexes: Iterable[IndexRecords],
    kernels: str,
    shares: str,
) -> None:
    """Log which parts of long contexts decode steps attend to; see :func:`log_method`."""
    budget = config.page_budget()
    size: dict[str, int] = {}
    for store in indexes:
        assert store.index is not None
        name = f"{store.index.name} per {store.entry_tokens} tokens"
        size[name] = size.get(name, 0) + store.records.numel()
    logger.info(
        "%s: decode attends to at most %d tokens per KV head%s (sink %d, window %d, selected "
        "%d, in %s) in %d of %d layers; page index %s; %s kernels.",
        config.method,
        budget.total * config.page_size,
        shares,
        budget.sink * config.page_size,
        budget.window * config.page_size,
        budget.select * config.page_size,
        "single tokens" if config.own.per_token else f"pages of {config.page_size}",
        retrieval_layers,
        layers,
        ", ".join(f"{format_gib(b)} GiB ({name})" for name, b in size.items()) or "none",
        kernels,
    )
