"""The options of prompts that retrieve; fields of the table of options."""

from collections.abc import Mapping
from typing import Any

from vllm_kvretrieval.options import choices
from vllm_kvretrieval.options.option import option
from vllm_kvretrieval.retrieval.family import FILTERS, SCORED
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

OF_CHUNKS: Mapping[str, Any] = {
    "families": (SCORED, FILTERS),
    "why": "which selects no pages by an index: its prefill is exact",
    "verdict": "cannot be used with",
}
"""Facts about options of chunks of prompts that select."""

OF_READ: Mapping[str, Any] = {
    "families": (SCORED,),
    "why": choices.NO_PAGES,
    "needs": "prefill_budget",
    "more": "methods.md#sparse-prefill",
}
"""Facts about options of how much such a chunk reads."""

OF_QUERIES: Mapping[str, Any] = {
    "families": (SCORED,),
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
    f"{choices.DEFAULT_BLOCK}, or a page if that is larger; `omnikv`: {choices.DEFAULT_CHUNK}",
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
