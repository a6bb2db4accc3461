"""What the ops take: the rows of a decode step, the state of a layer, and the ops' signatures."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass
class DecodeRows:
    """The requests of a step that decode one token each, in batch order; the same for all layers.

    ``R`` rows, ``S`` state slots. All tensors are contiguous in their last dimension.

    Attributes:
        block_table: int32 [R, >= pages]; page ids in context order.
        seq_lens: int32 [R]; tokens in the context, the new one included.
        slots: int32 [R]; each request's entry in the per-request state.
        sink_pages, window_pages: int32 [R]; pages always attended to. The window's last page is the
            tail page, which may be partly filled.
        select_pages: int32 [R]; pages chosen by score. 0: none, sink and window only. Negative:
            attend to the whole context. Where it is not negative, the context has at least as many
            pages as sink, window and selection together.
        threshold: float32 [R]; correction threshold tau.
        fresh: uint8 [R]; 1 where the previous step was no sparse decode step of this request.
        corrected: int64 [S]; incremented for every KV head corrected.
        page_table: int32 [R * kv_heads, width], written: per (row, KV head) the pages to attend to
            in context order, as ``page_id * kv_heads + kv_head``.
        handle: The implementation's own view of these tensors, made on first use.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    sink_pages: torch.Tensor
    window_pages: torch.Tensor
    select_pages: torch.Tensor
    threshold: torch.Tensor
    fresh: torch.Tensor
    corrected: torch.Tensor
    page_table: torch.Tensor
    handle: Any = None

    def __len__(self) -> int:
        return self.seq_lens.shape[0]


@dataclass
class LayerState:
    """What one layer keeps for retrieval.

    Attributes:
        index: [pages * page_size / summary_size, kv_heads, 2, head_size] in the KV cache's dtype;
            channel-wise minimum and maximum of ``summary_size`` keys. A page, by vLLM's page id,
            has ``page_size / summary_size`` entries in a row.
        prev_query: [S, kv_heads * group, head_size]; each request's query of its last decode step.
        prev_selection: int32 [S, kv_heads, max selected pages]; positions in the context of the
            pages that this query selected, in rising order.
        page_size: Tokens per page.
        summary_size: Tokens per entry of the index; ``page_size`` over a power of two.
        scale: Softmax scale of the layer.
        handle: The implementation's own view of these tensors, made on first use.
    """

    index: torch.Tensor
    prev_query: torch.Tensor
    prev_selection: torch.Tensor
    page_size: int
    summary_size: int
    scale: float
    handle: Any = None

    @classmethod
    def empty(
        cls,
        *,
        pages: int,
        slots: int,
        kv_heads: int,
        group: int,
        head_size: int,
        max_selected: int,
        page_size: int,
        summary_size: int,
        scale: float,
        dtype: torch.dtype,
    ) -> "LayerState":
        """State for ``slots`` requests over ``pages`` pages; its contents are undefined."""
        return cls(
            torch.empty(pages * page_size // summary_size, kv_heads, 2, head_size, dtype=dtype),
            torch.empty(slots, kv_heads * group, head_size, dtype=dtype),
            torch.zeros(slots, kv_heads, max_selected, dtype=torch.int32),
            page_size,
            summary_size,
            scale,
        )

    @property
    def pages(self) -> int:
        return self.index.shape[0] * self.summary_size // self.page_size

    @property
    def kv_heads(self) -> int:
        return self.index.shape[1]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.prev_query.shape[1] // self.kv_heads

    @property
    def head_size(self) -> int:
        return self.index.shape[3]


class Ops(Protocol):
    """One implementation of the ops."""

    def update_index(
        self, key: torch.Tensor, slot_mapping: torch.Tensor, state: LayerState
    ) -> None:
        """Take newly written keys into the page index (FreeKV, section 3.2).

        The first token of an entry voids what it held, so recycled pages start afresh. Bytes
        moved: the keys once, and ``4 * head_size`` elements per (entry touched, KV head).

        Args:
            key: [>= T, kv_heads, head_size]; tokens may be strided.
            slot_mapping: int64 [T]; ``page * page_size + offset``, negative for padding. Tokens of
                one page are adjacent.
            state: Its ``index`` is updated.

        Raises:
            ValueError: ``key`` is not of the state's shape and dtype, or a token lies outside the
                index. Nothing is written then.
        """
        ...

    def index_pages(
        self,
        kv_cache: torch.Tensor,
        pages: torch.Tensor,
        lengths: torch.Tensor,
        state: LayerState,
        layout: str,
    ) -> None:
        """Take keys that lie in vLLM's CPU KV cache into the page index (FreeKV, section 3.2).

        For pages that arrived by other means than a write of tokens, such as a KV connector's
        loading. What the pages' entries held is void; they get, bit by bit, what
        :meth:`update_index` gives them for the same keys, as long as none is NaN. Entries behind
        the last token of a page stay as they are. Bytes moved: half of the pages, and
        ``2 * head_size`` elements per (entry, KV head).

        Args:
            kv_cache: [P, kv_heads, page_size, 2 * head_size] in the state's dtype, contiguous;
                vLLM's KV cache of the layer.
            pages: int32 [n]; page ids, each at most once.
            lengths: int32 [n]; tokens that each page holds, 1 to ``page_size``.
            state: Its ``index`` is updated; summaries of 8 to 128 tokens.
            layout: How the cache holds keys: the name of vLLM's attention ``isa``, ``vec``,
                ``vec16`` or ``amx``.

        Raises:
            ValueError: ``kv_cache`` is not the state's, a page or length does not exist, or the
                layout is another one (``neon``, ``rvv``, ...). Nothing is written then.
        """
        ...

    def plan_decode(self, query: torch.Tensor, rows: DecodeRows, state: LayerState) -> None:
        """Decide which pages each (row, KV head) attends to, and remember the step.

        Per row and KV head, as FreeKV's sections 3.2 and 3.3 state it: compare the query with the
        previous step's (cosine, mean over the group); score every entry of the index with an upper
        bound of its attention scores, pool them over the group as the mean of their softmax over
        all entries, add up each page's, and select the best ``select_pages`` between sink and
        window. A head below the threshold, or fresh, attends to this new selection, any other to
        that of the previous step; the new one is kept for the next. Ties go to the earlier page;
        scores that underflow do not tie, but keep the order of their logarithms.
        Bytes moved: ``2 * head_size`` elements of index per (``summary_size`` tokens of context,
        KV head).

        Args:
            query: [>= R, kv_heads * group, head_size]; rows may be strided.
            rows: ``page_table`` and ``corrected`` are written.
            state: ``prev_query`` and ``prev_selection`` of the rows' slots are written.

        Raises:
            ValueError: A row does not fit: more pages to select than ``prev_selection`` holds, to
                attend to than the context or ``page_table`` has, or in the context than
                ``block_table``; a slot outside the state or ``corrected``; a negative sink or
                window. Or ``query`` is not of the state's shape and dtype. Nothing is written then.
        """
        ...

    def stage_pages(self, source: torch.Tensor, pages: torch.Tensor, target: torch.Tensor) -> None:
        """Lay out pages of one layer as larger blocks, for vLLM's prefill kernel.

        In both, a (page, KV head) holds its keys transposed, ``[head_size, tokens]``, and then its
        values, ``[tokens, head_size]``: what vLLM's CPU cache update writes without AMX. Bytes
        moved: the pages once, read and written.

        Args:
            source: [P, kv_heads, page_size, 2 * head_size]; vLLM's KV cache of the layer.
            pages: int32 [n]; page ids in the order wanted, n a multiple of pages per block.
            target: [>= n * page_size / block_size, kv_heads, block_size, 2 * head_size], written.
        """
        ...


class RecallCache(Protocol):
    """Fast memory for one layer whose KV cache, its home, lies in a slow tier.

    A *unit* is one (page, KV head) slice of the KV cache, ``2 * page_size * head_size`` contiguous
    elements, numbered ``page * kv_heads + kv_head``; a *slot* holds a copy of one. Slots are shared
    by all requests. A slot always holds what home holds, so giving one up needs no write.

    Life of a slot: free -> holds a unit -> free, when its page is written anew; or -> holds another
    unit, when it is the least recently used one that is neither pinned nor of the current step. The
    sink and window pages of a request stay pinned from one of its sparse decode steps to the next.
    """

    slots: torch.Tensor
    """[slots, 1, 2 * page_size, head_size]: the slots as single-head pages."""

    @property
    def used(self) -> int:
        """Slots that hold a unit."""
        ...

    def write(self, slot_mapping: torch.Tensor) -> None:
        """Follow a write to home.

        Args:
            slot_mapping: int64 [T]; the tokens just written, as ``page * page_size + offset``,
                negative for padding. Tokens of one page are adjacent. The first token of a page
                voids its slots, any other is copied into them.

        Raises:
            ValueError: A token lies outside home.
        """
        ...

    def resolve(self, rows: DecodeRows) -> None:
        """Begin a step: bring all that the rows attend to into slots, and pin sink and window.

        Bytes moved: one unit per miss.

        Args:
            rows: ``page_table`` holds units, as ``plan_decode`` wrote it, and gets their slots.
                Negative entries do not occur. A slot that could not be read holds zeros.

        Raises:
            ValueError: A row does not fit, as in ``plan_decode``; nothing has happened then.
            RuntimeError: There are fewer slots than the rows attend to.
        """
        ...

    def prefetch(self, rows: DecodeRows, state: LayerState) -> None:
        """Fetch the pages selected for the rows' next step, beside the model.

        To be called after ``resolve``. Takes no slot of the current step; where slots run short it
        fetches less. The next call waits for what is still on its way.

        Args:
            rows: Those of ``resolve``; ``page_table`` is not read.
            state: ``prev_selection`` names the pages.

        Raises:
            ValueError: A row does not fit, as in ``plan_decode``; nothing has happened then.
        """
        ...

    def drop_pages(self, pages: list[int]) -> None:
        """Forget pages whose home has changed by other means than a write of tokens.

        Raises:
            RuntimeError: A running request has one of them pinned.
        """
        ...

    def release(self, request: int) -> None:
        """Unpin what the request in this entry of the per-request state has pinned."""
        ...

    def take_failed_pages(self) -> list[int]:
        """Pages of which a unit was found unreadable since the last call; their slots are freed.

        What is still on its way is not waited for: a failure there is known before the page is
        attended to.
        """
        ...

    def resident(self) -> list[int]:
        """The units in slots, least recently used first, then the pinned ones in slot order."""
        ...

    def check(self) -> str:
        """What is wrong: with the books (each slot owned once, nothing pinned by nobody, free and
        used slots are all slots), or with a slot that differs from home. Empty if nothing is.
        """
        ...
