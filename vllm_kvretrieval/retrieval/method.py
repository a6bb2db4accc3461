"""A retrieval method: one point on the axes, made of a preset and what a user says otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.choices import (
    DEFAULT_THRESHOLD,
    ENTRY_TOKENS,
    MOST_RERANKED,
    MOST_SPANNED,
)
from vllm_kvretrieval.options.option import refuse_without_effect
from vllm_kvretrieval.options.table import OF_METHOD, OPTIONS, checked
from vllm_kvretrieval.retrieval.family import (
    DROPPING,
    SCORED,
    family_with,
    what_parts,
)
from vllm_kvretrieval.retrieval.head_sets import HeadSet
from vllm_kvretrieval.retrieval.heads import OPTION as RETRIEVAL_HEADS
from vllm_kvretrieval.retrieval.index import Index, indexes, make_index
from vllm_kvretrieval.retrieval.keeping import Keeping, observation_of
from vllm_kvretrieval.retrieval.pooling import Pooling
from vllm_kvretrieval.retrieval.presets import Preset, presets
from vllm_kvretrieval.retrieval.roles import OBSERVATIONS
from vllm_kvretrieval.retrieval.schedule import SCHEDULES, Schedule
from vllm_kvretrieval.retrieval.seats import MASS
from vllm_kvretrieval.retrieval.shares import UNIFORM, Shares, make_shares
from vllm_kvretrieval.values import reject_unknown, require_name, shortened


@dataclass(frozen=True)
class Method:
    """What selects pages or tokens, and when.

    Attributes:
        name: What requests call it.
        index: None: nothing is selected.
        entry_tokens: Tokens per entry of the index.
        entry_pages: Pages per entry if there are several; otherwise 1.
        pooling: Over the query heads of a KV head.
        schedule: When pages are selected.
        rerank: Candidates per page selected, scored again by their keys; 0: none.
        per_token: Whether single tokens are selected; else pages are.
        sink_pages, window_pages: Pages always attended to, where the user names none; None: a share
            of the budget each.
        correction_threshold: A KV head whose query has a lower cosine similarity to the previous
            step's selects before attention. 1 where each step attends to its own selection.
        budget_shares: How layers and KV heads share what is selected.
        mass: The share of the estimated attention that is enough for a KV head, which attends to
            the fewest selected units that reach it; 1: to all of them.
        remainder: The share of the estimated attention below which the mean value of an entry
            stands for it, if it is not selected; 0: what is not selected is left out.
        outliers: The share of the selected pages that are outliers (:class:`Chooser`).
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
    entry_pages: int = 1
    mass: float = 1.0
    remainder: float = 0.0
    outliers: float = 0.0
    keeping: Keeping | None = None
    heads: HeadSet | None = None

    @property
    def selects(self) -> bool:
        """Whether queries select anything beyond sink and window."""
        return self.schedule.selects

    @property
    def shares(self) -> bool:
        """Whether filter layers select, tokens for all the layers after them."""
        return self.schedule.shares

    @property
    def speculates(self) -> bool:
        """Whether a step may attend to what an earlier one selected."""
        return self.schedule.speculates

    @property
    def drops(self) -> bool:
        """Whether each step drops a token for the one that it adds."""
        return self.schedule.drops

    @property
    def whole(self) -> bool:
        """Whether each step attends to the whole context."""
        return self.schedule.whole

    @property
    def selects_for_blocks(self) -> bool:
        """Whether blocks of a prompt can select pages by the method's index."""
        return self.index is not None and not self.per_token

    @property
    def estimates_shares(self) -> bool:
        """Whether each step's scores are shares of the attention, so that a mass can be reached."""
        by_step = self.selects and not self.speculates
        pooled = self.pooling is Pooling.MEAN_SOFTMAX and not (self.rerank or self.outliers)
        return self.index is not None and by_step and pooled

    @property
    def estimates_rest(self) -> bool:
        """Whether the attention of what is not selected is known, so that it can be added up."""
        by_page = self.estimates_shares and not self.per_token
        return by_page and self.index is not None and self.index.estimates

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


def make_method(name: str, preset: str, options: Mapping[str, Any], page_size: int) -> Method:
    """The method that results from a preset and options of a method; None counts as not given.

    Raises:
        RetrievalConfigError: An option is not known, or they cannot go together; says why.
    """
    base = presets()[require_name("preset", preset, presets())]
    reject_unknown(options, OF_METHOD, name)
    given = {key: value for key, value in options.items() if value is not None}
    schedule_name = checked("schedule", given.get("schedule", base.schedule))
    schedule = SCHEDULES[schedule_name]
    family = family_with(schedule)
    if why := what_parts(family, family_with(SCHEDULES[base.schedule])):
        raise RetrievalConfigError(
            f"schedule={schedule_name!r} cannot be combined with {preset}: {why} take other "
            "options. Leave it out, or use --attention-backend with a method that has it."
        )
    refuse_without_effect(given, family, name, OPTIONS)
    if family is DROPPING:
        return _keeping_method(name, base, schedule, given, page_size)
    if family is not SCORED:
        return _without_index(name, base, schedule, given, page_size)
    index = make_index(given.get("index", base.index))
    if index is None:
        raise RetrievalConfigError(
            f"schedule={schedule_name!r} selects pages by an index, and {name} has none; add one, "
            "such as index=min_max."
        )
    own_entries = base.summary_size if index == make_index(base.index) else None
    entry_tokens = _entry_tokens(
        given.get("summary_size", own_entries or page_size), page_size, index
    )
    if why := index.check(entry_tokens):
        raise RetrievalConfigError(f"index={shortened(given.get('index', base.index))}: {why}.")
    pooling = Pooling[checked("pooling", given.get("pooling", base.pooling)).upper()]
    rerank = checked("rerank", given.get("rerank", base.rerank if "index" not in given else 0))
    if rerank and (not 2 <= rerank <= MOST_RERANKED or index.reads_keys):
        why = f"must be 0 or from 2 to {MOST_RERANKED}"
        if index.reads_keys:
            why = f"has no effect with index={index.name}, which scores by all keys; leave it out"
        raise RetrievalConfigError(f"rerank={rerank} {why}.")
    unit = checked("unit", given.get("unit", base.unit))
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
        threshold = checked("correction_threshold", value)
    elif "correction_threshold" in given:
        raise RetrievalConfigError(
            f"correction_threshold={shortened(given['correction_threshold'])} has no effect with "
            f"schedule={schedule_name!r}; leave it out, or use schedule=speculative."
        )
    made = Method(
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
        entry_pages=max(1, entry_tokens // page_size),
        outliers=_outliers(given, base, index, rerank),
    )
    if rerank and made.entry_pages > 1:
        raise RetrievalConfigError(
            f"rerank={rerank} scores pages by their keys, and an entry has {made.entry_pages} "
            f"pages (summary_size={entry_tokens}); leave one out."
        )
    mass = checked("mass", given.get("mass", base.mass if made.estimates_shares else 1.0))
    MASS.check(mass, made)
    rest = checked(
        "remainder", given.get("remainder", base.remainder if made.estimates_rest else 0)
    )
    if rest and not made.estimates_rest:
        raise RetrievalConfigError(
            f"remainder={rest} cannot be added up with {name}: it takes an index that estimates "
            "the attention of pages (low_rank, one_bit, exact) in each step (pooling mean_softmax, "
            "schedule every_step, no rerank). Leave it out, or use kvretrieval."
        )
    return replace(made, mass=mass, remainder=rest)


def _outliers(given: Mapping[str, Any], base: Preset, index: Index, rerank: int) -> float:
    """The share of the selected pages that are outliers; refused where nothing tells them."""
    told = index.tells_outliers and not rerank
    outliers = checked("outliers", given.get("outliers", base.outliers if told else 0))
    if outliers and not told:
        why = (
            f"have no place among candidates (rerank={rerank}); leave one out"
            if index.tells_outliers
            else f"cannot be told by index={index.name}; use index=landmark, or leave it out"
        )
        raise RetrievalConfigError(f"outliers={outliers} {why}.")
    return float(outliers)


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
    if "observation" in given:
        require_name("observation", given["observation"], OBSERVATIONS)
    pooling = Pooling.MEAN_SOFTMAX
    threshold = 1.0 if schedule.selects else DEFAULT_THRESHOLD
    made = Method(
        name, None, page_size, pooling, schedule, 0, schedule.shares, None, None, threshold
    )
    if schedule.whole:
        return replace(made, window_pages=base.window_pages)
    if not schedule.by_head:
        return made
    heads = RETRIEVAL_HEADS.make(given.get("heads"))
    return replace(made, sink_pages=base.sink_pages, heads=heads)


def _keeping_method(
    name: str, base: Preset, schedule: Schedule, given: Mapping[str, Any], page_size: int
) -> Method:
    """A method that drops tokens."""
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
    if schedule.slides and not keeping.slides:
        sliding = ", ".join(n for n, p in presets().items() if p.keeping and p.keeping.slides)
        raise RetrievalConfigError(
            f"schedule='sliding' cannot be used with {name}, which keeps no window of recent "
            f"tokens; use a method that does: {sliding}."
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
        keeping=keeping,
    )


def _entry_tokens(value: Any, page_size: int, index: Index) -> int:
    size = checked("summary_size", value)
    most = MOST_SPANNED * page_size if index.spans else page_size
    if size not in ENTRY_TOKENS or size > most:
        raise RetrievalConfigError(
            f"summary_size={size} is not supported with page_size={page_size} and an index of "
            f"{index.name}; use one of {tuple(s for s in ENTRY_TOKENS if s <= most)}."
        )
    return size
