"""The state that a layer keeps for the ops, beside the rows of a step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_kvretrieval.retrieval.index import Index
from vllm_kvretrieval.retrieval.index.base import mean_bytes
from vllm_kvretrieval.retrieval.pooling import Pooling


@dataclass
class IndexRecords:
    """The records of an index over the pages of one layer.

    Attributes:
        index: The index; None: there are no records, and nothing is selected.
        entry_tokens: Tokens per entry; ``page_size`` over a power of two, or times one. In that
            case an entry has the tokens of several pages in a row, and the id of the first one is
            a multiple of their number.
        records: uint8 [pages * page_size / entry_tokens, kv_heads, record bytes]. A page, by vLLM's
            page id, has ``page_size / entry_tokens`` entries in a row.
        page_size: Tokens per page.
        head_size, dtype: Head size and dtype of the KV cache.
        cache: [pages, kv_heads, page_size, 2 * head_size] in ``dtype``, contiguous; vLLM's KV cache
            of the layer. None: the cache is never read.
        layout: The layout of keys in the cache: the name of vLLM's attention ``isa``.
        means: Whether each record ends with the mean of the entry's values, or those of its pages
            (:func:`vllm_kvretrieval.retrieval.index.base.pack_means`).
        alignment: Bytes of which the fields of records begin at multiples.
        handle: The view of an implementation of all this, made on first use.
    """

    index: Index | None
    entry_tokens: int
    records: torch.Tensor
    page_size: int
    head_size: int
    dtype: torch.dtype
    cache: torch.Tensor | None = None
    layout: str = "vec"
    means: bool = False
    alignment: int = 1
    handle: Any = field(default=None, repr=False)

    @classmethod
    def empty(
        cls,
        index: Index | None,
        *,
        pages: int,
        kv_heads: int,
        head_size: int,
        page_size: int,
        dtype: torch.dtype,
        entry_tokens: int | None = None,
        cache: torch.Tensor | None = None,
        layout: str = "vec",
        means: bool = False,
        alignment: int = 1,
    ) -> "IndexRecords":
        """Records for ``pages`` pages; their contents are undefined."""
        tokens = entry_tokens or page_size
        width = 0 if index is None else index.record_bytes(head_size, tokens, dtype, alignment)
        width += max(1, tokens // page_size) * mean_bytes(head_size) if means else 0
        entries = pages * page_size // tokens
        records = torch.empty(entries, kv_heads, width, dtype=torch.uint8)
        shape = index, tokens, records, page_size, head_size, dtype
        return cls(*shape, cache, layout, means, alignment)

    @property
    def parts(self) -> int:
        """Entries per page, if there are several; otherwise 1."""
        return max(1, self.page_size // self.entry_tokens)

    @property
    def spans(self) -> int:
        """Pages per entry, if there are several; otherwise 1."""
        return max(1, self.entry_tokens // self.page_size)

    @property
    def pages(self) -> int:
        return len(self.records) // self.parts * self.spans

    @property
    def kv_heads(self) -> int:
        return self.records.shape[1]


@dataclass
class Selection:
    """What a layer remembers of the last decode step of each request; ``S`` seats.

    Attributes:
        query: [S, kv_heads * group, head_size]; the query of the step.
        chosen: int32 [S, kv_heads, most selected]; positions in the context of the pages or tokens
            that this query selected, in rising order.
        counts: int32 [S, kv_heads], contiguous in its last dimension; how many units each KV head
            selects for the request of a seat, if the context has as many. The table of requests
            writes them when a seat is taken, or when a prompt has been read; on devices the steps
            do that drop tokens. None: each head selects as many as the row says.
        memory: What a rule remembers (:class:`RuleState`), by seat and KV head.
        corrected: int32 [S, kv_heads]; nonzero: the KV head selected before attention in its last
            step, and need not select beside it: 1, since its query had turned; 2, since it selects
            all that lies between sink and window; 3, for both. Only the ops of a device have it.
        ends: int32 [S]; tokens of the prompts, of which ``chosen`` has those that are kept. Only
            the ops of a device have it; None: nothing is kept.
    """

    query: torch.Tensor
    chosen: torch.Tensor
    counts: torch.Tensor | None = None
    memory: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    corrected: torch.Tensor | None = None
    ends: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        *,
        seats: int,
        kv_heads: int,
        group: int,
        head_size: int,
        most_selected: int,
        dtype: torch.dtype,
        counts: torch.Tensor | None = None,
    ) -> "Selection":
        """A selection for ``seats`` seats; its contents are undefined."""
        return cls(
            torch.empty(seats, kv_heads * group, head_size, dtype=dtype),
            torch.zeros(seats, kv_heads, most_selected, dtype=torch.int32),
            counts,
            corrected=torch.zeros(seats, kv_heads, dtype=torch.int32),
        )


@dataclass
class Chooser:
    """How a layer selects pages by one method.

    Attributes:
        store: The index of the method.
        selection: The selection of the layer. All its choosers share it, since a request has one
            method.
        pooling: The pooling over the query heads of a KV head.
        scale: Softmax scale of the layer.
        rerank: Candidates per selected unit that are scored again by their keys; 0: none.
        remainder: The share of the attention below which the mean of an entry's values stands for
            the entry, if it is not selected; 0: none does. It takes a store with means and an
            index that estimates the attention, shares (``Pooling.MEAN_SOFTMAX``) and no reranking.
        outliers: The share of the selected pages that are outliers: those with the lowest cosine of
            a key with the mean of its entry, whatever their scores are. It takes an index that
            tells them, no reranking, and rows whose ``uneven`` numbers are plain.
        mass: Whether rows may name a mass below 1 (``DecodeRows.numbers``). Devices ask.
        handle: The view of an implementation of all this, made on first use.
    """

    store: IndexRecords
    selection: Selection
    pooling: Pooling
    scale: float
    rerank: int = 0
    remainder: float = 0.0
    outliers: float = 0.0
    mass: bool = False
    handle: Any = field(default=None, repr=False)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.selection.query.shape[1] // self.store.kv_heads

    def outlier_units(self, select: int) -> int:
        """How many of so many selected pages are outliers.

        It is their share, rounded down, but one page at least of two or more.
        """
        return max(int(self.outliers * select), int(self.outliers > 0 and select > 1))


@dataclass
class DecodeLayer:
    """A layer whose decode steps are one op.

    Attributes:
        cache: [pages, kv_heads, page_size, 2 * head_size], contiguous.
        layout: Of the cache.
        group: Query heads per KV head.
        indexes: Those that take keys in as they are written.
        scale: Softmax scale.
        softcap: Logits become ``softcap * tanh(logit / softcap)``; 0: they stay.
        sinks: float32 [kv_heads * group]; a further logit of every head; None: there is none.
        handle: The view of an implementation of all this, made on first use.
    """

    cache: torch.Tensor
    layout: str
    group: int
    indexes: list[IndexRecords]
    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    handle: Any = field(default=None, repr=False)


@dataclass
class ContextSelector:
    """How a filter layer selects tokens for the layers after it (OmniKV, section 4.2).

    Attributes:
        store: The index ``exact`` over the keys of the layer.
        chosen: int32 [S, most selected]; for each seat the positions in the context of the tokens
            that its last decode step selected, in rising order. All heads of all layers that follow
            attend to these.
        group: Query heads per KV head.
        scale: Softmax scale of the layer.
        softcap: Logits become ``softcap * tanh(logit / softcap)``; 0: they stay.
        sinks: float32 [kv_heads * group], contiguous; logits that take a part of each head's
            attention; None: there are none.
        handle: The view of an implementation of all this, made on first use.
    """

    store: IndexRecords
    chosen: torch.Tensor
    group: int
    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    handle: Any = field(default=None, repr=False)


Merge = Callable[[torch.Tensor], object]
"""Replaces every number of a tensor by the highest that any worker has, in place."""


@dataclass
class KeptTokens:
    """The tokens that one layer keeps of the request of each seat; ``S`` seats.

    Attributes:
        chosen: int32 [S, kv_heads, most]; positions of kept tokens in the context, rising.
        ratings: float32 [S, kv_heads, most]; ratings of these tokens.
        counts: int32 [S, kv_heads], contiguous in its last dimension; how many tokens are kept.
        budgets: int32 [S, kv_heads]; how many tokens a head may attend to, including a new one.
    """

    chosen: torch.Tensor
    ratings: torch.Tensor
    counts: torch.Tensor
    budgets: torch.Tensor
