"""A retrieval method: one point on the axes, made of a preset and what a user says otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.values import (
    reject_unknown,
    require_int,
    require_name,
    require_number,
)
from vllm_kvretrieval.retrieval.heads import RetrievalHeads, make_heads
from vllm_kvretrieval.retrieval.index import Index, indexes, make_index
from vllm_kvretrieval.retrieval.keeping import Keeping, observation_of
from vllm_kvretrieval.retrieval.pooling import Pooling
from vllm_kvretrieval.retrieval.presets import Preset, presets
from vllm_kvretrieval.retrieval.roles import OBSERVATIONS
from vllm_kvretrieval.retrieval.schedule import SCHEDULES, Schedule
from vllm_kvretrieval.retrieval.shares import UNIFORM, Shares, make_shares

ENTRY_TOKENS = (8, 16, 32, 64, 128)
MOST_RERANKED = 64
DEFAULT_THRESHOLD = 0.9
UNITS = ("page", "token")
"""What is selected: pages, or single tokens."""
POOLINGS = tuple(pooling.name.lower() for pooling in Pooling)


@dataclass(frozen=True)
class Method:
    """What selects pages or tokens, and when.

    Attributes:
        name: What requests call it.
        index: None: nothing is selected.
        entry_tokens: Tokens per entry of the index.
        pooling: Over the query heads of a KV head.
        schedule: When pages are selected.
        rerank: Candidates per page selected, scored again by their keys; 0: none.
        per_token: Whether single tokens are selected; else pages are.
        sink_pages, window_pages: Pages always attended to, where the user names none; None: a share
            of the budget each.
        correction_threshold: A KV head whose query has a lower cosine similarity to the previous
            step's selects before attention. 1 where each step attends to its own selection.
        budget_shares: How layers and KV heads share what is selected.
        keeping: Which tokens of a prompt are kept, where the others are dropped; None: none is.
        heads: Which KV heads attend to whole contexts; None: all attend alike.
    """

    name: str
    index: Index | None
    entry_tokens: int
    pooling: Pooling
    schedule: Schedule
    rerank: int
    per_token: bool
    sink_pages: int | None
    window_pages: int | None
    correction_threshold: float
    budget_shares: Shares = UNIFORM
    keeping: Keeping | None = None
    heads: RetrievalHeads | None = None

    @property
    def selects(self) -> bool:
        """Whether queries select anything beyond sink and window."""
        return self.schedule.selects

    @property
    def shares(self) -> bool:
        """Whether filter layers select, tokens for all the layers after them."""
        return self.schedule.shares

    @property
    def selects_for_blocks(self) -> bool:
        """Whether blocks of a prompt can select pages by the method's index."""
        return self.index is not None and not self.per_token

    @property
    def needs_prompts(self) -> bool:
        """Whether the attention of a whole prompt decides what is attended to after it."""
        return self.keeping is not None

    @property
    def rates_attention(self) -> bool:
        """Whether tokens are rated by attention as the model computes it."""
        return self.needs_prompts or self.shares

    @property
    def together(self) -> bool:
        """Whether all KV heads of a layer keep the same tokens, unless their shares differ."""
        by_head = self.budget_shares.by_head
        return self.keeping is not None and self.keeping.per_layer and not by_head

    @property
    def reads_keys(self) -> bool:
        """Whether selection reads keys in the cache."""
        by_keys = self.index is not None and self.index.reads_keys
        return self.rerank > 0 or by_keys or self.shares


OPTIONS = (
    "index",
    "pooling",
    "schedule",
    "rerank",
    "unit",
    "summary_size",
    "correction_threshold",
    "budget_shares",
    "observation",
    "heads",
)
"""Those of a method; what else there is belongs to the engine."""


def make_method(name: str, preset: str, options: Mapping[str, Any], page_size: int) -> Method:
    """The method that results from a preset and some of ``OPTIONS``; None counts as not given.

    Raises:
        RetrievalConfigError: An option is not known, or they cannot go together; says why.
    """
    base = presets()[require_name("preset", preset, presets())]
    reject_unknown(options, OPTIONS, name)
    given = {key: value for key, value in options.items() if value is not None}
    schedule_name = require_name("schedule", given.get("schedule", base.schedule), SCHEDULES)
    schedule = SCHEDULES[schedule_name]
    own = SCHEDULES[base.schedule]
    kinds = [(s.shares, s.keeps, s.by_head, s.whole) for s in (schedule, own)]
    if kinds[0] != kinds[1]:
        why = "layers that share a selection"
        if schedule.keeps or own.keeps:
            why = "methods that drop tokens"
        elif schedule.by_head or own.by_head:
            why = "methods by which some heads attend to everything"
        elif schedule.whole or own.whole:
            why = "full attention and retrieval"
        raise RetrievalConfigError(
            f"schedule={schedule_name!r} cannot be combined with {preset}: {why} take other "
            "options. Leave it out, or use --attention-backend with a method that has it."
        )
    if "heads" in given and not schedule.by_head:
        raise RetrievalConfigError(
            f"heads={given['heads']!r} has no effect with {name}, by which all KV heads attend "
            "alike; leave it out."
        )
    if schedule.keeps:
        return _keeping_method(name, base, schedule, given, page_size)
    if "observation" in given and not schedule.shares:
        raise RetrievalConfigError(
            f"observation={given['observation']!r} has no effect with {name}, whose layers select "
            "for themselves; leave it out."
        )
    if not schedule.selects or schedule.shares:
        return _without_index(name, base, schedule, given, page_size)
    index = make_index(given.get("index", base.index))
    if index is None:
        raise RetrievalConfigError(
            f"schedule={schedule_name!r} selects pages by an index, and {name} has none; add one, "
            "such as index=min_max."
        )
    entry_tokens = _entry_tokens(given.get("summary_size"), page_size)
    if why := index.check(entry_tokens):
        raise RetrievalConfigError(f"index={given.get('index', base.index)!r}: {why}.")
    pooling = Pooling[require_name("pooling", given.get("pooling", base.pooling), POOLINGS).upper()]
    rerank = require_int("rerank", given.get("rerank", base.rerank if "index" not in given else 0))
    if rerank and (not 2 <= rerank <= MOST_RERANKED or index.reads_keys):
        why = f"must be 0 or from 2 to {MOST_RERANKED}"
        if index.reads_keys:
            why = f"has no effect with index={index.name}, which scores by all keys; leave it out"
        raise RetrievalConfigError(f"rerank={rerank} {why}.")
    unit = require_name("unit", given.get("unit", base.unit), UNITS)
    if unit == "token" and not index.per_token:
        scoring = ", ".join(name for name, kind in indexes().items() if kind.per_token)
        raise RetrievalConfigError(
            f"unit={unit!r} selects single tokens, and index={index.name} scores several at once; "
            f"use one of {scoring}, or unit=page."
        )
    if unit == "token" and rerank:
        raise RetrievalConfigError(
            f"rerank={rerank} is for pages, and unit={unit!r} selects single tokens; leave one out."
        )
    threshold = 1.0
    if schedule.speculates:
        value = given.get("correction_threshold", DEFAULT_THRESHOLD)
        threshold = require_number("correction_threshold", value)
    elif "correction_threshold" in given:
        raise RetrievalConfigError(
            f"correction_threshold={given['correction_threshold']!r} has no effect with "
            f"schedule={schedule_name!r}; leave it out, or use schedule=speculative."
        )
    return Method(
        name,
        index,
        entry_tokens,
        pooling,
        schedule,
        rerank,
        unit == "token",
        base.sink_pages,
        base.window_pages,
        threshold,
        _shares(name, given.get("budget_shares", base.budget_shares)),
    )


def _shares(name: str, value: Any) -> Shares:
    """The shares of a method that observes no prompts."""
    shares = make_shares(value)
    if shares.entropy is not None:
        raise RetrievalConfigError(
            f"budget_shares={shares.given} follows the attention of a prompt's queries, which "
            f"{name} does not look at; use another, or a method that keeps by it, such as "
            "entropykv."
        )
    return shares


def _without_index(
    name: str, base: Preset, schedule: Schedule, given: Mapping[str, Any], page_size: int
) -> Method:
    """A method that selects nothing, or whose filters select for other layers."""
    why = "attends to everything" if schedule.whole else "selects nothing"
    if schedule.shares:
        why = "selects by all keys, in layers of its own, one set for all heads and layers after"
    for key in given:
        own = key in ("schedule", "heads") or (key == "observation" and schedule.shares)
        if not own and (key, given[key]) != ("index", "none"):
            raise RetrievalConfigError(
                f"{key}={given[key]!r} has no effect with {name}, which {why}; leave it out."
            )
    if "observation" in given:
        require_name("observation", given["observation"], OBSERVATIONS)
    pooling = Pooling.MEAN_SOFTMAX
    threshold = 1.0 if schedule.selects else DEFAULT_THRESHOLD
    made = Method(
        name, None, page_size, pooling, schedule, 0, schedule.shares, None, None, threshold
    )
    if not schedule.by_head:
        return made
    return replace(made, sink_pages=base.sink_pages, heads=make_heads(given.get("heads")))


def _keeping_method(
    name: str, base: Preset, schedule: Schedule, given: Mapping[str, Any], page_size: int
) -> Method:
    """A method that drops tokens."""
    for key in given:
        if key not in ("schedule", "observation", "budget_shares"):
            raise RetrievalConfigError(
                f"{key}={given[key]!r} has no effect with {name}, which keeps tokens by the "
                "attention that they receive; leave it out."
            )
    assert base.keeping is not None
    keeping = base.keeping
    keeping = replace(
        keeping, observation=observation_of(given.get("observation"), keeping.observation)
    )
    shares = make_shares(given.get("budget_shares", base.budget_shares))
    if keeping.page > 1 and not shares.uniform:
        raise RetrievalConfigError(
            f"budget_shares={shares.given} cannot be used with {name}, which keeps pages of "
            f"{keeping.page} tokens; leave it out."
        )
    if keeping.per_layer and schedule.drops and shares.by_head:
        raise RetrievalConfigError(
            f"budget_shares={shares.given} gives KV heads of a layer different shares, and with "
            f"{name} they keep the same tokens as they drop others step by step; give one number "
            "per layer, or use schedule=once."
        )
    return Method(
        name,
        None,
        page_size,
        Pooling.SUM,
        schedule,
        0,
        True,
        base.sink_pages,
        base.window_pages,
        1.0,
        shares,
        keeping,
    )


def _entry_tokens(value: Any, page_size: int) -> int:
    if value is None:
        return page_size
    size = require_int("summary_size", value)
    if size not in ENTRY_TOKENS or size > page_size:
        raise RetrievalConfigError(
            f"summary_size={size} is not supported with page_size={page_size}; use one of "
            f"{tuple(s for s in ENTRY_TOKENS if s <= page_size)}."
        )
    return size
