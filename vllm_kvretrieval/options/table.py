"""The table of an engine's options, of which help, documentation, checks and refusals are made."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_kvretrieval.options import choices, of_drafts, of_prompts, of_sessions
from vllm_kvretrieval.options.option import Option, of_method, option
from vllm_kvretrieval.retrieval.budget import DEFAULT_BUDGET
from vllm_kvretrieval.retrieval.codec import CODECS, RAW
from vllm_kvretrieval.retrieval.families import SCHEDULES, scored
from vllm_kvretrieval.retrieval.filters import check_filters
from vllm_kvretrieval.retrieval.heads import SHARE as SHARE_OF_HEADS
from vllm_kvretrieval.retrieval.index import OWN as OWN_INDEXES
from vllm_kvretrieval.retrieval.keeping import ALL
from vllm_kvretrieval.retrieval.pooling import POOLINGS
from vllm_kvretrieval.retrieval.presets import OWN
from vllm_kvretrieval.retrieval.roles import OBSERVATIONS, WINDOW
from vllm_kvretrieval.values import (
    PART,
    SHARE,
    SIMILARITY,
    SIZE,
    SWITCH,
    TOKENS,
    Kind,
    checked_later,
    one_described,
    one_number_of,
    one_of,
    require_days,
    require_int,
    require_layers,
    require_path,
)

CONFIG_KEY = "kv_retrieval"
"""Key in vLLM's ``additional_config``, and in ``SamplingParams.extra_args``."""
DEFAULT_METHOD = next(iter(OWN))


@dataclass(frozen=True)
class Options:
    """The options of an engine. None: the user names no value.

    Lengths are in tokens, sizes in bytes per worker.
    """

    method: str = DEFAULT_METHOD
    budget: int = option(
        DEFAULT_BUDGET,
        TOKENS,
        "the number of tokens that a KV head attends to in a decode step; a context of no more "
        "tokens is attended to in full",
    )
    sink: int | None = option(
        None,
        TOKENS,
        "the first tokens of the context, always attended to; 0: none are",
        "a page, or budget / 16, as the method has it",
    )
    window: int | None = option(
        None,
        Kind("tokens; with `ttkv` also a size per request, such as `8MiB`", require_int),
        "the most recent tokens, always attended to",
        "two pages, or budget / 16, as the method has it",
    )
    page_size: int = option(
        None,
        one_number_of(choices.PAGE_SIZES),
        "tokens per page, the unit of retrieval; smaller ones hold fewer unwanted tokens, and "
        "there are more to choose from; 256 only on a CPU",
        "the method's, 32 for most; `kvretrieval`: 16 on most CPUs",
        more="methods.md#small-pages",
    )
    summary_size: int | None = of_method(
        Kind(
            f"{', '.join(map(str, scored.ENTRY_TOKENS))}, up to `page_size`; with `low_rank` up "
            "to twice as many",
            require_int,
        ),
        "tokens per entry of the page index; smaller ones tell pages apart better, and cost memory "
        "and time in proportion",
        "`page_size`; `kvretrieval`: 32 with its own pages of 16; `shadowkv`: 8",
    )
    index: Any = of_method(
        checked_later(
            f"{', '.join(f'`{index.name}`' for index in OWN_INDEXES)}, or `{{name: parameters}}`"
        ),
        "what is kept of a page's keys to select pages by",
        "the method's",
        neutral="none",
        more="methods.md#indexes",
    )
    pooling: str | None = of_method(
        one_of(POOLINGS),
        "how the scores of the query heads that share a KV head become one",
        "the method's",
    )
    schedule: str | None = of_method(
        one_of(SCHEDULES),
        "when pages are selected",
        "the method's",
    )
    rerank: int | None = of_method(
        Kind(f"0, or 2 to {scored.MOST_RERANKED}", require_int),
        "candidates per selected page that are scored again by their keys; 0: none",
        "the method's",
        rests_on=("index",),
    )
    mass: float | None = of_method(
        SHARE,
        "the share of the estimated attention that is enough: a KV head attends to the fewest "
        "selected pages (or tokens) that reach it, up to the budget; 1: to all of them",
        "1; `twilight`: 0.95",
        neutral=1,
        more="methods.md#mass",
        rests_on=("pooling", "schedule", "rerank", "outliers"),
    )
    remainder: float | None = of_method(
        PART,
        "the share of the estimated attention below which the mean value of a page stands for the "
        "page if it is not selected; 0: what is not selected is left out",
        "0; `kvretrieval`: 0.003 with its own pages of 16",
        neutral=0,
        more="methods.md#remainder",
        rests_on=("index", "pooling", "schedule", "rerank"),
    )
    outliers: float | None = of_method(
        PART,
        "the share of the selected pages that every query gets: those whose keys are least like "
        "their mean, one at least if two or more are selected; with `index: landmark`",
        "0; `shadowkv`: 0.158",
        neutral=0,
        more="methods.md#shadowkv",
        rests_on=("index", "rerank"),
    )
    unit: str | None = of_method(
        one_of(choices.UNITS),
        "what is selected; with `token` the KV cache of retrieval layers is laid out token by "
        "token",
        "the method's, `page` for most",
        more="methods.md#unit",
    )
    correction_threshold: float | None = of_method(
        SIMILARITY,
        "for schedule `speculative`: a KV head whose query has a lower cosine similarity to the "
        "previous step's selects anew before attention; 1 selects at every step, -1 never corrects",
        str(scored.DEFAULT_THRESHOLD),
        rests_on=("schedule",),
    )
    budget_shares: Any = of_method(
        checked_later(
            "`uniform`, `pyramid` (less with depth), `entropy` (with methods that drop tokens), "
            "a list of numbers per layer that retrieves, or of lists, one number per KV head; or a "
            "JSON file of these"
        ),
        "how layers and KV heads divide what is selected",
        "the method's, `uniform` for most",
        more="methods.md#budget",
    )
    also: Any = option(
        (),
        checked_later("a list of methods, or a mapping of names to options of a method"),
        "further methods that requests may name; a name of your own may have `preset`, the method "
        "whose options it changes; each index takes memory",
        "none",
    )
    filters: Any = option(
        None,
        Kind("a list, or a file that `vllm-kvretrieval calibrate` wrote", check_filters),
        "the layers that select tokens for the layers after them",
        "what is known of the model",
        why="whose layers select for themselves",
        more="methods.md#omnikv",
    )
    filter_heads: str | None = option(
        None,
        one_of(choices.FILTER_HEADS),
        "with tensor parallelism, the KV heads by whose attention a filter selects",
        "`all`",
        why="whose layers select for themselves",
        more="methods.md#omnikv",
    )
    observation: Any = of_method(
        checked_later(
            f"{', '.join(f'`{name}`' for name in OBSERVATIONS)} (all but `last` take {WINDOW} "
            f"queries); with methods that drop tokens a number, or `{ALL}`"
        ),
        "the queries by whose attention filters select; with methods that drop tokens, how many of "
        "a prompt's last queries count",
        "`last`, or the method's",
        why="whose layers select for themselves",
    )
    heads: Any = of_method(
        checked_later(
            "a file that `vllm-kvretrieval heads` wrote, `{file: path, share: of the KV heads}`, "
            "or a list per layer that retrieves of 1 or 0 per KV head"
        ),
        "the KV heads that attend to whole contexts",
        f"what is known of the model, a share of {SHARE_OF_HEADS}",
        why="by which all KV heads attend alike",
        more="methods.md#razorattention",
    )
    prefill_budget: int | None = of_prompts.BUDGET
    prefill_share: float | None = of_prompts.SHARE_OF_CONTEXT
    prefill_budget_shares: Any = of_prompts.BUDGET_SHARES
    prefill_depth: float | None = of_prompts.DEPTH
    prefill_chunk: int | None = of_prompts.CHUNK
    prefill_queries: int | None = of_prompts.QUERIES
    prefill_sampling: str | None = of_prompts.SAMPLING
    prefill_pooling: str | None = of_prompts.POOLING
    dense_layers: int = option(
        None,
        Kind("a number of layers", require_layers),
        "how many of the model's first layers keep full attention, or whatever attention they have",
        "the method's, 1 for most",
        why="whose filters say which layers are dense",
        neutral=0,
    )
    max_budget: int | None = option(
        None,
        TOKENS,
        "the largest budget that a request may ask for; by default requests may only lower theirs",
        "`budget`",
    )
    memory_fraction: float | None = option(
        None,
        SHARE,
        "the share of the KV cache that a request reads, dense layers included, in place of a "
        "fixed budget: the budget then follows from the prompt's length, up to `max_budget`",
        "none",
    )
    exact_below: int | None = option(
        None,
        TOKENS,
        "contexts of fewer tokens are attended to in full though they are beyond the budget; 0: "
        "none are; only with `home=device`",
        "on a CPU 0; on a GPU as long as that takes no longer than to select, by budget and batch",
        neutral=0,
        more="#short-contexts",
    )
    drafts: int = of_drafts.DRAFTS
    lossless: bool = of_drafts.LOSSLESS_SWITCH
    allow_exact: bool = option(True, SWITCH, "whether requests may ask for full attention")
    sources: bool = option(
        False,
        SWITCH,
        "whether requests may ask which pages of their contexts their answers attend to, and "
        "whether browsers find a page at `/kvretrieval`; both where `VLLM_PLUGINS` names "
        "`kvretrieval`",
        neutral=False,
        on_gpu="leave it out",
        more="chat.md",
    )
    sessions: bool = of_sessions.SESSIONS
    client_options: Any = option(
        None,
        checked_later("a list of options of a request; `[]`: none"),
        "the options that requests may set; a request with another one is refused",
        "all of them",
        more="#what-a-request-may-choose",
    )
    reuse: str = option(
        "all",
        one_of(choices.REUSES),
        "which keys and values requests share by the prefix cache",
        "`all`",
        more="#what-requests-share",
    )
    attention: str | None = option(
        None,
        one_of(choices.ATTENTION),
        "whose kernel attends to whole contexts (prompts, contexts within the budget, dense "
        "layers, `full`)",
        "the faster one",
        neutral="vllm",
        on_gpu="attend to whole contexts by vLLM's kernel",
        more="#whole-contexts",
    )
    home: str = option(
        None,
        one_described(choices.HOMES),
        "where the whole KV cache of the retrieval layers lives",
        "the method's, `device` for most",
        more="#a-cache-larger-than-memory",
    )
    home_bytes: int | None = option(
        None,
        SIZE,
        "the size of the home, per worker",
        "room for the requests of `max_model_len` that run at once, as far as fast memory and the "
        "disk, or the host, allow",
        slow_home=True,
        more="#how-many-requests-at-once",
    )
    home_path: str | None = option(
        None,
        Kind("a directory", require_path),
        "where the file of `home=disk` is; the file has no name, and is gone when the server ends; "
        "a directory in memory (tmpfs) is taken only if it is named here",
        "`/var/tmp`, or the directory for temporary files where that is missing or not writable",
        slow_home=True,
    )
    store: str | None = option(
        None,
        Kind("a directory", require_path),
        "a directory in which the KV cache outlives the server: its next start finds every block "
        "that was computed before; with `home=disk` it takes the place of `home_path`",
        "none",
        on_gpu="blocks are saved and fetched between steps, and those of a GPU are not waited for; "
        "keep no file of the KV cache",
        more="store.md",
    )
    store_days: float | None = option(
        None,
        Kind("days", require_days),
        "the store forgets blocks that were computed so long ago, but for pinned ones",
        "never",
        needs="store",
        on_gpu="keep no file of the KV cache",
        more="store.md",
    )
    codec: str = option(
        None,
        one_described(CODECS),
        "how `home=disk`, and on a GPU `home=host`, hold pages that are full",
        "the method's, `raw` for most",
        neutral=RAW,
    )
    streaming_attention: bool | None = option(
        None,
        SWITCH,
        "whether a step of `home=disk` attends to the pages in fast memory while it reads the "
        "others (TTKV)",
        "false",
        slow_home=True,
        on_gpu="leave it out",
        more="methods.md#ttkv",
    )
    recall_cache_bytes: int | None = option(
        None,
        SIZE,
        "fast memory for recalled pages or tokens, per worker",
        "what vLLM would give to the KV cache, less dense layers and page index",
        slow_home=True,
    )


OPTIONS: Mapping[str, Option] = {
    f.name: f.metadata["option"] for f in fields(Options) if f.metadata
}
"""The options of an engine by name."""

OF_METHOD = tuple(name for name, known in OPTIONS.items() if known.of_method)
"""Names of the options that each method has for itself."""


def checked(key: str, value: Any) -> Any:
    """The value of an option of an engine, as the engine keeps it.

    Raises:
        RetrievalConfigError: It is of another kind than the table says.
    """
    return OPTIONS[key].kind.check(key, value)
