"""The options of prompts that retrieve: fields of the table, defaults, and refusals."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options import choices
from vllm_kvretrieval.options.option import option
from vllm_kvretrieval.retrieval.pooling import POOLINGS
from vllm_kvretrieval.retrieval.roles import WINDOW
from vllm_kvretrieval.values import (
    PART,
    SHARE,
    TOKENS,
    Kind,
    checked_later,
    one_of,
    require_int,
)

if TYPE_CHECKING:
    from vllm_kvretrieval.options.engine import RetrievalConfig

OF_CHUNKS: Mapping[str, Any] = {
    "why": "which selects no pages by an index: its prefill is exact",
    "verdict": "cannot be used with",
}
"""Facts about options of chunks of prompts that select."""

OF_READ: Mapping[str, Any] = {
    "why": choices.NO_PAGES,
    "needs": "prefill_budget",
    "more": "methods.md#sparse-prefill",
}
"""Facts about options of how much such a chunk reads."""

OF_QUERIES: Mapping[str, Any] = {
    "why": f"by which no queries, or the last {WINDOW} of a chunk, select for a prompt",
    "needs": "prefill_budget",
}
"""Facts about options of the queries that select for such a chunk."""

BUDGET: Any = option(
    None,
    TOKENS,
    "how many tokens before a chunk of a prompt the chunk attends to; longer prompts are "
    "approximate then; for methods that select pages by an index, and methods with filters",
    "all: prefill is exact",
    **OF_CHUNKS,
    on_gpu="prefill exactly",
    more="methods.md#sparse-prefill",
)

SHARE_OF_CONTEXT: Any = option(
    None,
    PART,
    "the share of the tokens before a chunk of a prompt that the chunk attends to, where that "
    "is more than `prefill_budget`",
    "0",
    **OF_READ,
    neutral=0,
)

BUDGET_SHARES: Any = option(
    None,
    checked_later(
        "`uniform`, a file that `vllm-kvretrieval prompt-shares` wrote, or a list with a number "
        "per layer that retrieves, or a list of them per KV head"
    ),
    "how KV heads share `prefill_budget`, which is their mean",
    "what is known of the model; equal shares if nothing is known",
    **OF_READ,
)

DEPTH: Any = option(
    None,
    SHARE,
    "the share of the model's layers, from the first one on, in which chunks of a prompt "
    "select; in later layers they attend to sink and window alone, but for the last chunk",
    "1",
    **OF_READ,
    neutral=1,
)

CHUNK: Any = option(
    None,
    TOKENS,
    "the number of prompt tokens that share one selection",
    f"{choices.DEFAULT_PAGE_CHUNK}, or a page if that is larger; "
    f"`omnikv`: {choices.DEFAULT_TOKEN_CHUNK}",
    **OF_CHUNKS,
    needs="prefill_budget",
)

QUERIES: Any = option(
    None,
    Kind(f"1 to {choices.MOST_QUERIES}", require_int),
    "how many queries of a chunk of a prompt select pages for it",
    str(choices.DEFAULT_QUERIES),
    **OF_QUERIES,
)

SAMPLING: Any = option(
    None,
    one_of(choices.SAMPLINGS),
    "which queries of a chunk of a prompt select pages for it",
    "`spread`",
    **OF_QUERIES,
)

POOLING: Any = option(
    None,
    one_of(POOLINGS),
    "how the scores of the queries that select for a chunk, of all query heads that share a "
    "KV head, become one",
    "`pooling`",
    **OF_QUERIES,
)


def defaults(config: "RetrievalConfig") -> dict[str, float]:
    """Options of chunks of prompts that the user leaves out."""
    if config.own.prompts_select == "tokens":
        return {"prefill_chunk": choices.DEFAULT_TOKEN_CHUNK, "prefill_share": 0.0}
    chunk = config.prefill_chunk or max(choices.DEFAULT_PAGE_CHUNK, config.page_size)
    return {
        "prefill_chunk": chunk,
        "prefill_share": 0.0,
        "prefill_depth": 1.0,
        "prefill_queries": min(choices.DEFAULT_QUERIES, chunk),
    }


def check(config: "RetrievalConfig") -> None:
    """Refuse options of prompts that cannot be combined with each other, or with the method.

    Raises:
        RetrievalConfigError: Names the option, and says why and what to do.
    """
    budget, chunk, queries = config.prefill_budget, config.prefill_chunk, config.prefill_queries
    if budget is None or chunk is None:
        return
    by_token = config.own.prompts_select == "tokens"
    if not config.prefills_sparsely(config.own):
        raise RetrievalConfigError(
            f"prefill_budget={budget} cannot be used with {config.method}, which selects no pages "
            "by an index: its prefill is exact. Leave it out."
        )
    if by_token and config.home != "device":
        raise RetrievalConfigError(
            f"prefill_budget={budget} needs home=device with {config.method}: chunks of prompts "
            f"read single tokens, which home={config.home!r} does not serve. Leave one out."
        )
    for method in config.methods.values():
        if config.prefills_sparsely(method):
            config.page_budget(budget, method.name, key="prefill_budget")
    if by_token:
        if chunk < WINDOW:
            raise RetrievalConfigError(
                f"prefill_chunk={chunk} must be {WINDOW} or more: filters select by so many "
                f"queries of a chunk. Try {choices.DEFAULT_TOKEN_CHUNK}, or leave it out."
            )
        return
    _ = config.prompt_shares  # refuses values that are no shares
    if chunk < config.page_size or chunk % config.page_size:
        raise RetrievalConfigError(
            f"prefill_chunk={chunk} must be a positive multiple of page_size={config.page_size}; "
            f"try {config.budgets.nearest(chunk)}, or leave it out."
        )
    most = min(choices.MOST_QUERIES, chunk)
    if queries is not None and not 1 <= queries <= most:
        raise RetrievalConfigError(
            f"prefill_queries={queries} must be from 1 to {most}; try "
            f"{min(choices.DEFAULT_QUERIES, most)}, or leave it out."
        )
