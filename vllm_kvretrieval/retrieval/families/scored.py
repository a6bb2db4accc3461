"""Methods whose layers each score an index over the context (kvretrieval, freekv, quest, ...)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.families.base import Method
from vllm_kvretrieval.retrieval.families.numbers import SeatField
from vllm_kvretrieval.retrieval.index import Index, indexes, make_index
from vllm_kvretrieval.retrieval.index.rule import Rule, check_rule
from vllm_kvretrieval.retrieval.needs import Need
from vllm_kvretrieval.retrieval.pooling import Pooling
from vllm_kvretrieval.retrieval.presets import Preset
from vllm_kvretrieval.retrieval.shares import Shares, make_shares
from vllm_kvretrieval.values import shortened

SPECULATIVE, EVERY_STEP = "speculative", "every_step"
DEFAULT_THRESHOLD = 0.9
ENTRY_TOKENS = (8, 16, 32, 64, 128, 256)
MOST_SPANNED = 2
"""Pages of an entry at most; a window holds them all while the last one is filled."""
MOST_RERANKED = 64


def _check_mass(mass: float, method: "ScoredMethod") -> None:
    if mass < 1 and not method.estimates_shares:
        raise RetrievalConfigError(
            f"mass={mass} cannot be reached with {method.name}: it takes scores that are shares of "
            "the attention, of each step (pooling mean_softmax, schedule every_step, no rerank, no "
            "outliers). Leave it out, or use kvretrieval."
        )


def _check_threshold(threshold: float, method: "ScoredMethod") -> None:
    if not method.speculates:
        raise RetrievalConfigError(
            f"correction_threshold={threshold} has no effect with {method.name}, which selects "
            "anew at every step; leave it out."
        )


MASS = SeatField(
    name="mass",
    column="mass",
    plain=1.0,
    methods="select by shares of the attention at each step",
    check=_check_mass,
    need=Need.MASS,
    uneven=True,
)
"""The share of the scores of all units that is enough for a KV head, which attends to the fewest
selected units that reach it together with sink and window, but to at least one. Less than 1 needs
scores pooled as shares (``Pooling.MEAN_SOFTMAX``), no reranking, no outliers, a threshold of 1."""

CORRECTION_THRESHOLD = SeatField(
    name="correction_threshold",
    column="threshold",
    plain=1.0,
    methods="speculate",
    check=_check_threshold,
)
"""A KV head whose query has a lower cosine similarity to the previous step's selects before
attention. 1: each step attends to its own selection."""


@dataclass(frozen=True, kw_only=True)
class ScoredMethod(Method):
    """One method of this family; see :class:`Method`."""

    methods: ClassVar = "methods with an index"
    trait: ClassVar = "which selects by an index"
    schedules: ClassVar = {
        SPECULATIVE: "the previous step's selection, corrected per KV head",
        EVERY_STEP: "each step's own selection",
    }
    options: ClassVar = frozenset(
        "sink window dense_layers summary_size index pooling rerank mass remainder outliers unit "
        "correction_threshold budget_shares prefill_budget prefill_share prefill_budget_shares "
        "prefill_depth prefill_chunk prefill_queries prefill_sampling prefill_pooling "
        "streaming_attention exact_below lossless".split()
    )
    numbers: ClassVar = (MASS, CORRECTION_THRESHOLD)
    of_requests: ClassVar = frozenset(
        {"budget", "lossless", "prefill_share", *(known.name for known in numbers)}
    )

    index: Index
    mass: float = 1.0
    correction_threshold: float

    @classmethod
    def make(
        cls, name: str, preset: Preset, schedule: str, given: Mapping[str, Any], page_size: int
    ) -> Self:
        """See :meth:`Method.make`."""
        written = given.get("index", preset.index)
        index = make_index(written)
        if index is None:
            raise RetrievalConfigError(
                f"schedule={schedule!r} selects pages by an index, and {name} has none; add one, "
                "such as index=min_max."
            )
        of_preset = {"rerank": preset.rerank, "summary_size": preset.summary_size}
        check_rule(index, page_size, given if "index" in given else {**of_preset, **given})
        own_entries = preset.summary_size if index == make_index(preset.index) else None
        tokens = _entry_tokens(
            given.get("summary_size", own_entries or page_size), page_size, index
        )
        if why := index.check(tokens):
            raise RetrievalConfigError(f"index={shortened(written)}: {why}.")
        rerank = given.get("rerank", preset.rerank if "index" not in given else 0)
        made = cls(
            name=name,
            page_size=page_size,
            schedule=schedule,
            sink_pages=preset.sink_pages,
            window_pages=preset.window_pages,
            budget_shares=_shares(name, given.get("budget_shares", preset.budget_shares)),
            index=index,
            summary_size=tokens,
            entry_pages=max(1, tokens // page_size),
            per_token=given.get("unit", preset.unit) == "token",
            pooling=Pooling[given.get("pooling", preset.pooling).upper()],
            rerank=rerank,
            outliers=_outliers(given, preset, index, rerank),
            correction_threshold=_threshold(given, schedule),
        )
        _check_rerank(made)
        _check_unit(made)
        mass = given.get("mass", preset.mass if made.estimates_shares else 1.0)
        rest = given.get("remainder", preset.remainder if made.estimates_rest else 0.0)
        MASS.check(mass, made)
        if rest and not made.estimates_rest:
            raise RetrievalConfigError(
                f"remainder={rest} cannot be added up with {name}: it takes an index that "
                "estimates the attention of pages (low_rank, one_bit, exact) in each step (pooling "
                "mean_softmax, schedule every_step, no rerank). Leave it out, or use kvretrieval."
            )
        return replace(made, mass=mass, remainder=rest)

    @property
    def speculates(self) -> bool:
        """See :attr:`Method.speculates`: FreeKV, sections 3.2 and 3.3."""
        return self.schedule == SPECULATIVE

    @property
    def prompts_select(self) -> str:
        """See :attr:`Method.prompts_select`."""
        return "" if self.per_token else "pages"

    @property
    def estimates_shares(self) -> bool:
        """Whether each step's scores are shares of the attention, so that a mass can be reached."""
        pooled = self.pooling is Pooling.MEAN_SOFTMAX and not (self.rerank or self.outliers)
        return pooled and not self.speculates and not isinstance(self.index, Rule)

    @property
    def estimates_rest(self) -> bool:
        """Whether the attention of pages that are not selected is known, and can be added up."""
        return self.estimates_shares and not self.per_token and self.index.estimates

    @property
    def needs(self) -> frozenset[Need]:
        """See :attr:`Method.needs`."""
        uneven = self.per_token and not self.budget_shares.uniform
        present = {
            Need.KEYS: self.rerank > 0 or self.index.reads_keys,
            Need.READS: self.rerank > 0 or self.index.reads_keys or not self.index.grows,
            Need.UNEVEN_TOKENS: uneven,
            Need.TOKEN_MASS: self.per_token and self.mass < 1,
            Need.STALE_TOKENS: self.per_token and self.speculates,
            Need.REMAINDER: self.remainder > 0,
            Need.RERANK: self.rerank > 0,
            Need.LONG_ENTRIES: self.entry_pages > 1,
        }
        return super().needs | {need for need, there in present.items() if there}


def _entry_tokens(size: int, page_size: int, index: Index) -> int:
    most = MOST_SPANNED * page_size if index.spans else page_size
    if size not in ENTRY_TOKENS or size > most:
        raise RetrievalConfigError(
            f"summary_size={size} is not supported with page_size={page_size} and an index of "
            f"{index.name}; use one of {tuple(s for s in ENTRY_TOKENS if s <= most)}."
        )
    return size


def _check_rerank(method: ScoredMethod) -> None:
    rerank, index = method.rerank, method.index
    if rerank and index.reads_keys:
        raise RetrievalConfigError(
            f"rerank={rerank} has no effect with index={index.name}, which scores by all keys; "
            "leave it out."
        )
    if rerank and not 2 <= rerank <= MOST_RERANKED:
        raise RetrievalConfigError(f"rerank={rerank} must be 0 or from 2 to {MOST_RERANKED}.")
    if rerank and method.entry_pages > 1:
        raise RetrievalConfigError(
            f"rerank={rerank} scores pages by their keys, and an entry has {method.entry_pages} "
            f"pages (summary_size={method.entry_tokens}); leave one out."
        )


def _check_unit(method: ScoredMethod) -> None:
    if not method.per_token:
        return
    if not method.index.per_token:
        scoring = ", ".join(name for name, kind in indexes().items() if kind.per_token)
        raise RetrievalConfigError(
            f"unit='token' selects single tokens, and index={method.index.name} scores several at "
            f"once; use one of {scoring}, or unit=page."
        )
    if method.rerank:
        raise RetrievalConfigError(
            f"rerank={method.rerank} is for pages, and unit='token' selects single tokens; leave "
            "one out."
        )


def _threshold(given: Mapping[str, Any], schedule: str) -> float:
    """The threshold of steps that speculate; refused with other schedules."""
    if schedule == SPECULATIVE:
        return float(given.get("correction_threshold", DEFAULT_THRESHOLD))
    if "correction_threshold" in given:
        raise RetrievalConfigError(
            f"correction_threshold={shortened(given['correction_threshold'])} has no effect with "
            f"schedule={schedule!r}; leave it out, or use schedule=speculative."
        )
    return 1.0


def _outliers(given: Mapping[str, Any], preset: Preset, index: Index, rerank: int) -> float:
    """The share of the selected pages that are outliers; refused where nothing tells them."""
    told = index.tells_outliers and not rerank
    outliers = given.get("outliers", preset.outliers if told else 0)
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
