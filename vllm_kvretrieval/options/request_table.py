"""The table of the options of a request."""

from collections.abc import Mapping

from vllm_kvretrieval.options.choices import NO_PAGES
from vllm_kvretrieval.options.option import Option
from vllm_kvretrieval.values import PART, SHARE, SIMILARITY, SWITCH, TOKENS, checked_later

REQUEST: Mapping[str, Option] = {
    "budget": Option(
        TOKENS,
        "the number of tokens that a KV head attends to in a decode step, up to the server's "
        "`max_budget`",
        "the server's",
    ),
    "correction_threshold": Option(
        SIMILARITY,
        "as the server's option, with methods that speculate",
        "the method's",
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
    "mass": Option(
        SHARE,
        "as the server's option, with methods that select by shares of the attention at each step",
        "the method's",
        neutral=1,
        more="methods.md#mass",
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
}
"""The options of a request by name."""
