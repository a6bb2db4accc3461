"""Refusals of a worker once it knows its layers."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.method import Method

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.cpu.planner import Planner

ALIKE = "vLLM's own attention reads lists of one length"


def check_layers(planner: "Planner", retrieving: set[str]) -> None:
    """Refuse methods that need all layers with full attention, where some are left as they are.

    Args:
        planner: What the worker serves.
        retrieving: Names of the layers that attend to parts of long contexts.
    """
    config = planner.retrieval_config
    prompts = any(method.needs_prompts for method in config.methods.values())
    uneven = planner.room.allotments or planner.fixed_counts
    if (uneven or prompts) and retrieving != {*planner.retrieval_heads}:
        shares = planner.room.allotments and not prompts
        what = "kv_retrieval.budget_shares:" if shares else f"{config.method} cannot serve"
        raise RetrievalConfigError(
            f"{what} {planner.model_config.model}, not all of whose layers with full attention "
            "take pages of their own choice; use a method of pages, without shares."
        )


def check_logits(planner: "Planner", impls: Sequence[Any], isas: set[str]) -> tuple[bool, bool]:
    """Refuse what goes by other logits than those of the model, with soft-capping or sinks.

    Args:
        planner: What the worker serves.
        impls: The attention of its retrieval layers.
        isas: Variants of vLLM's attention that lay out the keys.

    Returns:
        Whether any of the layers caps logits, so that indexes misjudge shares of the attention; and
        whether any has sinks, which vLLM's kernel cannot give to a KV head alone.
    """
    config = planner.retrieval_config
    capped = any(impl.logits_soft_cap for impl in impls)
    sinks = any(impl.sinks is not None for impl in impls)
    model = planner.model_config.model
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
    by_mass = [m.name for m in config.methods.values() if m.mass < 1]
    if capped and by_mass:
        raise RetrievalConfigError(
            f"{', '.join(by_mass)} selects up to a mass of the attention, which indexes estimate "
            f"without the soft-capping of logits of {model}. Use kv_retrieval.mass=1."
        )
    others = isas - cpu.LAYOUTS.keys()
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
    if by_mass := names(lambda m: m.mass < 1):
        yield KeyNeed(by_mass, "be served with", f"{ALIKE}; use methods without mass")
    if config.prefill_queries is not None:
        option = f"kv_retrieval.prefill_budget={config.prefill_budget}"
        yield KeyNeed(option, "be had with", "leave it out")
    if config.rows:
        yield KeyNeed(config.method, "select single tokens of", "use methods that select pages")
    if reading := names(lambda m: m.reads_keys or (m.index is not None and not m.index.grows)):
        remedy = "use a method with index=min_max, which reads keys as they are written"
        yield KeyNeed(reading, "select pages of", remedy)


def check_reading(planner: "Planner", isas: set[str], foreign: bool) -> None:
    """Refuse what reads keys in the cache where that cannot be done.

    Args:
        planner: What the worker serves.
        isas: Variants of vLLM's attention that lay out the keys.
        foreign: Whether a KV connector may load pages.
    """
    config, why = planner.retrieval_config, ""
    if foreign and planner.cache_config.block_size != config.page_size:
        why = f"whose blocks of {planner.cache_config.block_size} tokens are not pages of "
        why += str(config.page_size)
    others = ", ".join(isas - cpu.LAYOUTS.keys())
    if others:
        why = f"whose keys vLLM lays out in a way that is not known ({others})"
    if foreign and why:
        raise RetrievalConfigError(
            f"{config.method} cannot be combined with a KV connector for "
            f"{planner.model_config.model}, {why}. Leave --kv-transfer-config and "
            "--kv-offloading-size out."
        )
    if others and (need := next(needing_keys(config), None)):
        raise RetrievalConfigError(
            f"{need.name} cannot {need.refused} {planner.model_config.model}, {why}: {need.remedy}."
        )
