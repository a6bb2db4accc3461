"""Refusals of a worker once it knows its layers."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.method import Method
from vllm_kvretrieval.retrieval.seats import SEAT_FIELDS

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.cpu.memory import PlanningWorker
    from vllm_kvretrieval.engine.cpu.worker import Group

ALIKE = "vLLM's own attention reads lists of one length"


def check_layers(worker: "PlanningWorker", retrieving: set[str]) -> None:
    """Refuse methods that need all layers with full attention, where some are left as they are.

    Args:
        worker: The worker.
        retrieving: Names of the layers that attend to parts of long contexts.
    """
    config = worker.retrieval_config
    prompts = any(method.needs_prompts for method in config.methods.values())
    uneven = worker.room.allotments or worker.fixed_counts
    if (uneven or prompts) and retrieving != {*worker.retrieval_heads}:
        shares = worker.room.allotments and not prompts
        what = "kv_retrieval.budget_shares:" if shares else f"{config.method} cannot serve"
        raise RetrievalConfigError(
            f"{what} {worker.model_config.model}, not all of whose layers with full attention "
            "take pages of their own choice; use a method of pages, without shares."
        )


def check_logits(
    worker: "PlanningWorker", groups: Sequence["Group"], layers: dict[str, Any]
) -> tuple[bool, bool]:
    """Refuse what goes by other logits than those of the model, with soft-capping or sinks.

    Args:
        worker: The worker.
        groups: Its layers.
        layers: All layers by name.

    Returns:
        Whether any of the layers caps logits, so that indexes misjudge shares of the attention; and
        whether any has sinks, which vLLM's kernel cannot give to a KV head alone.
    """
    config = worker.retrieval_config
    impls = [layers[name].impl for group in groups for name in group.names]
    capped = any(impl.logits_soft_cap for impl in impls)
    sinks = any(impl.sinks is not None for impl in impls)
    model = worker.model_config.model
    rating = [m.name for m in config.methods.values() if m.rates_attention]
    if (capped or sinks) and rating:
        what = "soft-capping of logits" if capped else "learned attention sinks"
        raise RetrievalConfigError(
            f"{', '.join(rating)} rates tokens by attention without the {what} of {model}. Use "
            "methods that select pages, such as kvretrieval."
        )
    adding = [m.name for m in config.methods.values() if m.remainder]
    if capped and adding:
        raise RetrievalConfigError(
            f"{', '.join(adding)} estimates the attention of what is not selected without the "
            f"soft-capping of logits of {model}. Use kv_retrieval.remainder=0."
        )
    for known in SEAT_FIELDS:
        by = [method.name for method in config.methods.values() if known.changes(method)]
        if capped and by and known.estimates:
            raise RetrievalConfigError(
                f"{', '.join(by)} {known.estimates}, which indexes estimate without the "
                f"soft-capping of logits of {model}. Use kv_retrieval.{known.name}={known.plain:g}."
            )
    others = {group.builder.isa for group in groups} - cpu.LAYOUTS.keys()
    if sinks and others:
        raise RetrievalConfigError(
            f"{config.method} does not support the learned attention sinks of {model}, whose "
            f"keys vLLM lays out in a way that is not known ({', '.join(others)}). Serve it "
            "without --attention-backend."
        )
    return capped, sinks


class KeyNeed(NamedTuple):
    """What our kernels have to read keys in the cache for.

    Attributes:
        name: Of the methods or the option.
        refused: What it cannot do to a model otherwise.
        remedy: A clause.
    """

    name: str
    refused: str
    remedy: str


def needing_keys(config: RetrievalConfig) -> Iterator[KeyNeed]:
    """What cannot be served where our kernels do not read keys as vLLM lays them out."""
    methods = config.methods.values()

    def names(chosen: Callable[[Method], bool]) -> str:
        return ", ".join(method.name for method in methods if chosen(method))

    if uneven := names(lambda m: not m.budget_shares.uniform or m.heads is not None):
        remedy = "use methods without budget_shares by which all KV heads attend alike"
        yield KeyNeed(uneven, "be served with", f"{ALIKE}; {remedy}")
    for known in SEAT_FIELDS:
        if known.uneven and (by := names(known.changes)):
            yield KeyNeed(by, "be served with", f"{ALIKE}; use methods without {known.name}")
    if config.prefill_queries is not None:
        option = f"kv_retrieval.prefill_budget={config.prefill_budget}"
        yield KeyNeed(option, "be had with", "leave it out")
    if config.rows:
        yield KeyNeed(config.method, "select single tokens of", "use methods that select pages")
    if reading := names(lambda m: m.reads_keys or (m.index is not None and not m.index.grows)):
        remedy = "use a method with index=min_max, which reads keys as they are written"
        yield KeyNeed(reading, "select pages of", remedy)


def check_reading(worker: "PlanningWorker", isas: set[str], foreign: bool) -> None:
    """Refuse what reads keys in the cache where that cannot be done.

    Args:
        worker: The worker.
        isas: Variants of vLLM's attention that lay out the keys.
        foreign: Whether a KV connector may load pages.
    """
    config, why = worker.retrieval_config, ""
    if foreign and worker.cache_config.block_size != config.page_size:
        why = f"whose blocks of {worker.cache_config.block_size} tokens are not pages of "
        why += str(config.page_size)
    others = ", ".join(isas - cpu.LAYOUTS.keys())
    if others:
        why = f"whose keys vLLM lays out in a way that is not known ({others})"
    if foreign and why:
        raise RetrievalConfigError(
            f"{config.method} cannot be combined with a KV connector for "
            f"{worker.model_config.model}, {why}. Leave --kv-transfer-config and "
            "--kv-offloading-size out."
        )
    if others and (need := next(needing_keys(config), None)):
        raise RetrievalConfigError(
            f"{need.name} cannot {need.refused} {worker.model_config.model}, {why}: {need.remedy}."
        )
