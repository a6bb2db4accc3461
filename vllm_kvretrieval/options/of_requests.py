"""The table of a request's options, of which help, documentation, checks and refusals are made."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options import of_sessions
from vllm_kvretrieval.options.choices import NO_PAGES
from vllm_kvretrieval.options.option import Option
from vllm_kvretrieval.options.table import OPTIONS
from vllm_kvretrieval.retrieval.families.numbers import SeatField
from vllm_kvretrieval.retrieval.seats import SEAT_FIELDS
from vllm_kvretrieval.values import (
    PART,
    SWITCH,
    TOKENS,
    checked_later,
    require_name,
    shortened,
)


def _number(known: SeatField) -> Option:
    """The option by which a request sets a number of its method's."""
    meaning = f"as the server's option, with methods that {known.methods}"
    return replace(OPTIONS[known.name], meaning=meaning, default="the method's", of_method=False)


_OTHERS: Mapping[str, Option] = {
    "budget": Option(
        TOKENS,
        "the number of tokens that a KV head attends to in a decode step, up to the server's "
        "`max_budget`",
        "the server's",
    ),
    "drafts": Option(
        OPTIONS["drafts"].kind,
        "the most draft tokens at a step, up to the server's `drafts`",
        "the server's",
        more="speculative-decoding.md",
    ),
    "lossless": Option(
        SWITCH,
        "as the server's option, on a server with `drafts`",
        "the server's",
        why=OPTIONS["lossless"].why,
        verdict=OPTIONS["lossless"].verdict,
        neutral=False,
        more="speculative-decoding.md#lossless-mode",
    ),
    "exact": Option(
        SWITCH,
        "full attention at every step, from the file if the cache is on disk; the server may "
        "forbid it (`allow_exact`)",
        "false",
    ),
    "exact_prefix": Option(
        SWITCH,
        "share with other requests only keys and values that full attention has computed",
        "false, unless the server's `reuse` is `exact`",
        more="#what-requests-share",
    ),
    "sources": Option(
        SWITCH,
        "note which pages of the context the answer attends to, for `/v1/kv_retrieval/sources`; "
        "with the server's option `sources`",
        "false",
        more="chat.md",
    ),
    "method": Option(
        checked_later("the server's method, one of its `also`, or `streamingllm`"),
        "how the request selects",
        "the server's",
    ),
    "prefill_budget": Option(
        TOKENS,
        "how many tokens before a chunk of the prompt the chunk attends to, up to the server's "
        "`prefill_budget`; 0: all, and prefill is exact",
        "the server's",
        more="methods.md#sparse-prefill",
    ),
    "prefill_share": Option(
        PART,
        "the share of the tokens before a chunk of the prompt that the chunk attends to, where "
        "that is more than `prefill_budget`; up to the server's `prefill_share`",
        "the server's",
        why=NO_PAGES,
        neutral=0,
        more="methods.md#sparse-prefill",
    ),
    **of_sessions.OF_REQUEST,
}
REQUEST: Mapping[str, Option] = dict(
    sorted({**_OTHERS, **{known.name: _number(known) for known in SEAT_FIELDS}}.items())
)
"""The options of a request by name."""


def check_client_options(key: str, value: Any) -> tuple[str, ...]:
    """Check the names of the options that an engine lets its requests set.

    Raises:
        RetrievalConfigError: It is no list, or a name in it is unknown.
    """
    if not isinstance(value, list | tuple):
        raise RetrievalConfigError(
            f"{key}={shortened(value)} must be a list of options of a request, such as [budget], "
            f"or [] for none; on the command line --kv-retrieval.{key}+ budget,exact."
        )
    return tuple(require_name(key, name, REQUEST) for name in value)
