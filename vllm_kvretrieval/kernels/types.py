"""What the ops take beside rows: what a layer keeps; and the ops' signatures."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from vllm_kvretrieval.kernels.kept import KeptTokens
from vllm_kvretrieval.kernels.rows import DecodeRows, PromptLists, TokenLists
from vllm_kvretrieval.retrieval.codec import Codec
from vllm_kvretrieval.retrieval.index import Index
from vllm_kvretrieval.retrieval.keeping import Keeping
from vllm_kvretrieval.retrieval.pooling import Pooling


@dataclass
class IndexStore:
    """The records of an index over the pages of one layer.

    Attributes:
        index: What it is; None: there are no records, and nothing is selected.
        entry_tokens: Tokens per entry; ``page_size`` over a power of two.
        records: uint8 [pages * page_size / entry_tokens, kv_heads, record bytes]. A page, by vLLM's
            page id, has ``page_size / entry_tokens`` entries in a row.
        page_size: Tokens per page.
        head_size, dtype: Of the KV cache.
        cache: [pages, kv_heads, page_size, 2 * head_size] in ``dtype``, contiguous; vLLM's KV cache
            of the layer. None where nobody reads it.
        layout: How the cache holds keys: the name of vLLM's attention ``isa``.
        handle: The implementation's own view of these, made on first use.
    """

    index: Index | None
    entry_tokens: int
    records: torch.Tensor
    page_size: int
    head_size: int
    dtype: torch.dtype
    cache: torch.Tensor | None = None
    layout: str = "vec"
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
    ) -> "IndexStore":
        """Records for ``pages`` pages; their contents are undefined."""
        tokens = entry_tokens or page_size
        width = 0 if index is None else index.record_bytes(head_size, tokens, dtype)
        entries = pages * page_size // tokens
        records = torch.empty(entries, kv_heads, width, dtype=torch.uint8)
        return cls(index, tokens, records, page_size, head_size, dtype, cache, layout)

    @property
    def parts(self) -> int:
        """Entries per page."""
        return self.page_size // self.entry_tokens

    @property
    def pages(self) -> int:
        return len(self.records) // self.parts

    @property
    def kv_heads(self) -> int:
        return self.records.shape[1]


@dataclass
class Selection:
    """What one layer keeps of each request's last decode step, whatever index chose.

    Attributes:
        query: [S, kv_heads * group, head_size]; the step's query.
        chosen: int32 [S, kv_heads, most selected]; positions in the context of the pages or tokens
            that this query selected, in rising order.
        counts: int32 [S, kv_heads], contiguous in its last dimension; how many units each KV head
            selects for the request of a seat, as far as the context has them. Whoever gives a
            request its budget writes them, when the seat is taken or once the prompt has been read.
            None: each as many as the row says.
    """

    query: torch.Tensor
    chosen: torch.Tensor
    counts: torch.Tensor | None = None

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
        """For ``seats`` requests; its contents are undefined."""
        return cls(
            torch.empty(seats, kv_heads * group, head_size, dtype=dtype),
            torch.zeros(seats, kv_heads, most_selected, dtype=torch.int32),
            counts,
        )


@dataclass
class Chooser:
    """How a layer selects pages by one method.

    Attributes:
        store: The method's index.
        selection: The layer's; all its choosers share it, since a request has one method.
        pooling: Over the query heads of a KV head.
        scale: Softmax scale of the layer.
        rerank: Candidates per unit selected, scored again by their keys; 0: none.
        handle: The implementation's own view of these, made on first use.
    """

    store: IndexStore
    selection: Selection
    pooling: Pooling
    scale: float
    rerank: int = 0
    handle: Any = field(default=None, repr=False)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.selection.query.shape[1] // self.store.kv_heads


@dataclass
class ContextSelector:
    """How a filter layer selects tokens for the layers after it (OmniKV, section 4.2).

    Attributes:
        store: With the index ``exact``: where the layer's keys are.
        chosen: int32 [S, most selected]; per seat the positions in the context of the tokens that
            its last decode step selected, in rising order. One set for all heads of all layers that
            follow.
        group: Query heads per KV head.
        scale: Softmax scale of the layer.
        handle: The implementation's own view of these, made on first use.
    """

    store: IndexStore
    chosen: torch.Tensor
    group: int
    scale: float
    handle: Any = field(default=None, repr=False)


Merge = Callable[[torch.Tensor], object]
"""Makes every number of a tensor the highest of all workers', in place."""


class Ops(Protocol):
    """One implementation of the ops."""

    def update_index(
        self, key: torch.Tensor, slot_mapping: torch.Tensor, store: IndexStore
    ) -> None:
        """Take newly written keys into the page index.

        Where records grow (:attr:`Index.grows`), the first token of an entry voids what it held, so
        recycled pages start afresh. Elsewhere the record of every entry whose last token was
        written is built from the keys in the cache, which therefore come first.
        Bytes moved: the keys once, and the records touched.

        Args:
            key: [>= T, kv_heads, head_size]; tokens may be strided.
            slot_mapping: int64 [T]; ``page * page_size + offset``, negative for padding. Tokens of
                one page are adjacent.
            store: Its ``records`` are updated.

        Raises:
            ValueError: ``key`` is not of the store's shape and dtype, or a token lies outside the
                index. Nothing is written then.
        """
        ...

    def index_pages(self, pages: torch.Tensor, lengths: torch.Tensor, store: IndexStore) -> None:
        """Take keys that lie in the KV cache into the page index.

        For pages that arrived by other means than a write of tokens, such as a KV connector's
        loading. What the pages' entries held is void; they get, bit by bit, what
        :meth:`update_index` gives them for the same keys, as long as none is NaN. Entries behind
        the last token of a page stay as they are. Bytes moved: half of the pages, and records.

        Args:
            pages: int32 [n]; page ids, each at most once.
            lengths: int32 [n]; tokens that each page holds, 1 to ``page_size``.
            store: Its ``records`` are updated; entries of 8 to 128 tokens.

        Raises:
            ValueError: The store has no cache, a page or length does not exist, or the layout is
                not known (``neon``, ``rvv``, ...). Nothing is written then.
        """
        ...

    def plan_decode(self, query: torch.Tensor, rows: DecodeRows, chooser: Chooser) -> None:
        """Decide which pages each (row, KV head) attends to, and remember the step.

        Per row and KV head, as FreeKV's sections 3.2 and 3.3 state it: compare the query with the
        previous step's (cosine, mean over the group); score every entry of the index, pool the
        scores over the group and each page's entries, and select the best ``select`` pages between
        sink and window; or score the tokens of complete entries, and select the best tokens. A head
        below the threshold, or fresh, attends to this new selection, any other to that of the
        previous step; the new one is kept for the next. A head whose share is as large as what lies
        between sink and window attends to all of that. With ``rerank``, so many times
        ``select`` are scored again by their keys, and the best of these selected. Ties go to the
        earlier unit; scores that underflow do not tie, but keep the order of their logarithms.
        Of rows of other modes nothing is scored, compared or remembered. Where a selection is
        given, each head attends to what it holds, or to everything where its count leaves nothing
        out. Bytes moved: the records of the context.

        Args:
            query: [>= R, kv_heads * group, head_size]; rows may be strided.
            rows: ``lists``, ``lengths`` and ``corrected`` are written.
            chooser: Its selection is written, at the rows' seats.

        Raises:
            ValueError: A row does not fit: more units to select (or less than none) than the
                selection holds, or given ones that the context has not; a given selection without
                counts; more to attend to than the context or ``lists`` has, or pages in the context
                than in ``block_table``; a seat outside the selection or ``corrected``; a negative
                sink or window; units to select by no index, tokens by one that scores entries only
                or with
                ``rerank``, or beside a window without the tail page or all of an unfinished entry;
                or tokens that 31 bits do not number. Or ``query`` is not
                of the layer's shape and dtype. Nothing is written then.
        """
        ...

    def select_context(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        rows: DecodeRows,
        selector: ContextSelector,
        merge: Merge | None = None,
    ) -> None:
        """Select the tokens that the layers after a filter attend to.

        As OmniKV's section 4.2 states it: a token's score is the highest attention that any head
        of the layer gives it, added up over a window of the latest queries, by their weights. Of a
        single query only the order counts, and it is that of the logarithms, which do not
        underflow. Ties go to the earlier token. Bytes moved: the keys of the context, once per
        query.

        Args:
            query: [>= R * n, kv_heads * group, head_size]; per row its n latest queries, the
                latest, of the last token, at the end. Queries may be strided.
            weights: float32 [R, n]; zero: the row has no such query.
            rows: Sink, window and selection are counted in tokens.
            selector: ``chosen`` is written, at the rows' seats.
            merge: Where workers have the layer's heads between them: is called once, in all of
                them, with float32 [R, n, longest context], the logarithms of the highest attention
                that heads here give. All then select the same.

        Raises:
            ValueError: A row does not fit: more to select than there is room for, or to attend to
                than the context has, or in the context than ``block_table``; a seat outside the
                state; negative counts; a latest query of no weight. Or ``query`` is not of the
                layer's shape and dtype. Nothing is written then.
        """
        ...

    def list_context(self, rows: DecodeRows, selector: ContextSelector, kv_heads: int) -> None:
        """Make the lists of tokens of layers that follow a filter.

        Args:
            rows: Those of :meth:`select_context`. Their lists and lengths are written: sink,
                selection and window, numbered as in :class:`TokenLists`.
            selector: The filter's.
            kv_heads: Of these layers.

        Raises:
            ValueError: A row does not fit, as there, or the lists have no room.
        """
        ...

    def stage_pages(
        self,
        source: torch.Tensor,
        pages: torch.Tensor,
        target: torch.Tensor,
        layout: str = "vec",
        rows: bool = False,
    ) -> None:
        """Lay out pages of one layer as larger blocks, for vLLM's prefill kernel.

        There a (page, KV head) holds what vLLM's CPU cache update writes: its keys transposed,
        ``[head_size, tokens]``, and then its values, ``[tokens, head_size]``; or, where its layout
        is ``amx``, keys as words of two channels, ``[tokens / 16, head_size / 2, 16 tokens]``, and
        values as words of two tokens, ``[head_size / 16, tokens / 2, 16 channels]``. Bytes moved:
        the pages once, read and written.

        Args:
            source: [P, kv_heads, page_size, 2 * head_size]; vLLM's KV cache of the layer.
            pages: int32 [n]; page ids in the order wanted, n a multiple of pages per block.
            target: [>= n * page_size / block_size, kv_heads, block_size, 2 * head_size], written.
            layout: How ``target`` is to be laid out: the name of vLLM's attention ``isa``.
            rows: Whether ``source`` is a cache of rows; else it is laid out as ``target``.

        Raises:
            ValueError: The layout is not known, or is ``amx`` but ``source`` not rows of 16 bits.
        """
        ...

    def stage_tokens(
        self, source: torch.Tensor, lists: TokenLists, target: torch.Tensor, layout: str = "vec"
    ) -> None:
        """Lay out tokens of a cache of rows as blocks, for vLLM's prefill kernel.

        Each row's tokens, in the order of its lists, become a sequence of their own: it begins a
        block, after those of the row before, and zeros fill its last one. Bytes moved: keys and
        values of the tokens, read and written.

        Args:
            source: [P, kv_heads, page_size, 2 * head_size]; rows.
            lists: Of single tokens (``run`` 1); as long for each KV head of a row.
            target: [>= blocks, kv_heads, block_size, 2 * head_size], written.
            layout: As in :meth:`stage_pages`.

        Raises:
            ValueError: As there; or a list is empty, longer than there is room for or than the
                other heads', or names what ``source`` has not; or ``target`` is too small. Nothing
                is written then.
        """
        ...

    def write_rows(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache: torch.Tensor,
    ) -> None:
        """Write new tokens into a cache of rows, which has each token's key before its value.

        Bytes moved: keys and values once, read and written.

        Args:
            key, value: [>= T, kv_heads, head_size]; tokens may be strided.
            slot_mapping: int64 [T]; ``page * page_size + offset``, negative for padding.
            cache: [P, kv_heads, page_size, 2 * head_size], contiguous; written.

        Raises:
            ValueError: ``key`` or ``value`` is not of the cache's shape and dtype, or a token lies
                outside of it. Nothing is written then.
        """
        ...

    def encode_units(self, units: torch.Tensor, codec: Codec) -> torch.Tensor:
        """Encode (page, KV head) slices of vLLM's cache.

        Bytes moved: the units, and what they become.

        Args:
            units: [n, 2 * page_size, head_size] in vLLM's layout ``vec``: keys transposed, then
                values; contiguous. Both sizes are multiples of 16, up to 512.
            codec: One of ours.

        Returns:
            uint8 [n, unit_bytes].

        Raises:
            ValueError: The units are not of such a shape, layout or dtype.
        """
        ...

    def decode_units(self, data: torch.Tensor, codec: Codec, units: torch.Tensor) -> None:
        """Decode what :meth:`encode_units` returned.

        Args:
            data: uint8 [n, unit_bytes], contiguous.
            codec: The one that encoded it.
            units: As there; written.

        Raises:
            ValueError: ``data`` or ``units`` is not of such a shape, layout or dtype.
        """
        ...

    def attend(
        self,
        query: torch.Tensor,
        lists: TokenLists,
        cache: torch.Tensor,
        output: torch.Tensor,
        layout: str,
        scale: float,
        lse: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Softmax attention of single tokens over lists of tokens or pages.

        Bytes moved: keys and values of the tokens once, whatever the group.

        Args:
            query: [>= R, kv_heads * group, head_size]; rows may be strided.
            lists: Of R rows.
            cache: [units, page_size, 2 * head_size], contiguous; leading dimensions may be more.
            output: [>= R, kv_heads * group, head_size], written; rows may be strided.
            layout: ``rows``, or how vLLM's attention lays out keys; ``run`` is 16 or more then.
                With ``amx`` (:meth:`stage_pages` describes it) elements have 16 bits.
            scale: Softmax scale.
            lse: float32 [R, kv_heads * group], written: the logarithm of the sum of exponentials.
            weights: float32 [R, kv_heads * group, >= the longest list's tokens], written: what each
                token of a list weighs; what lies behind is left as it is.
            softcap: Logits become ``softcap * tanh(logit / softcap)``; 0: they stay.
            sinks: float32 [kv_heads * group]; a logit of every head besides, whose value is zero.

        Raises:
            ValueError: ``query`` or ``output`` is not of the cache's shape and dtype, a list is
                empty or longer than there is room for, or names what the cache has not; or the
                layout is not known, or not in stretches of ``run``. Nothing is written then.
        """
        ...

    def attend_prompt(
        self,
        query: torch.Tensor,
        lists: PromptLists,
        cache: torch.Tensor,
        output: torch.Tensor,
        layout: str,
        scale: float,
        *,
        lse: torch.Tensor | None = None,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Causal softmax attention of prompts over lists of pages.

        A result is exact to rounding. It does not depend on other sequences, on the chunks that a
        prompt is computed in, nor on the number of threads.

        Args:
            query: [T, kv_heads * group, head_size]; tokens may be strided.
            lists: Of sequences of these queries.
            cache: [pages, kv_heads, page_size, 2 * head_size], contiguous.
            output: [T, kv_heads * group, head_size], written for the queries of ``lists``.
            layout: ``rows``, or how vLLM's attention lays out keys.
            scale: Softmax scale.
            lse: float32 [T, kv_heads * group], written: the logarithm of the sum of exponentials.
            window: A query attends to the last ``window`` of the tokens that it sees; 0: to all.
            softcap: Logits become ``softcap * tanh(logit / softcap)``; 0: they stay.
            sinks: float32 [kv_heads * group]; a logit of every head besides, whose value is zero.

        Raises:
            ValueError: A tensor is not of the cache's shape and dtype, a list is too short for what
                its queries see, or names a page that the cache has not. Nothing is written then.
        """
        ...

    def drop_tokens(
        self, weights: torch.Tensor, rows: DecodeRows, kept: KeptTokens, rule: Keeping
    ) -> None:
        """Take each row's new token into what is kept, and drop what there is no more room for.

        What attention has given to tokens changes their ratings. Where a head then keeps as many as
        its budget, so that a next one would be too many, the lowest rated page of tokens goes; of
        equal ones the earliest, and none of those that ``rule`` spares. Where all are spared, it is
        the earliest behind the sink, or else the last one. Bytes moved: weights, positions and
        ratings.

        Args:
            weights: float32 [R, sets, heads, > tokens kept], contiguous; what the kept tokens of a
                row weigh, in their order, and then its new token, the last one of the context. Of
                as many sets of query heads as there are KV heads, or of one for all of these.
            rows: Their ``seats`` and ``seq_lens`` count.
            kept: ``chosen`` and ``ratings`` are written, at the rows' seats.
            rule: How tokens are rated, and which are spared.

        Raises:
            ValueError: A tensor is of another shape or dtype, or a row does not fit: a seat outside
                of what is kept, or more tokens than there is room for. Nothing is written then.
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

    Home may be *encoded*: then a page is raw in memory, where vLLM writes it, as long as it is
    *open*, from its first token until :meth:`close` encodes it. What home holds of a closed page is
    what decoding gives back, and so do its slots.
    """

    slots: torch.Tensor
    """[slots, 1, 2 * page_size, head_size]: the slots as single-head pages."""

    @property
    def used(self) -> int:
        """Slots that hold a unit."""
        ...

    @property
    def bytes_per_read(self) -> int:
        """Of a unit in home."""
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
            rows: ``lists`` holds units, as ``plan_decode`` wrote it, and gets their slots;
                ``lengths`` says how many. Negative entries do not occur. A slot that could not be
                read holds zeros.

        Raises:
            ValueError: A row does not fit, as in ``plan_decode``, or a list is shorter than sink
                and window or longer than there is room for; nothing has happened then.
            RuntimeError: There are fewer slots than the rows attend to.
        """
        ...

    def prefetch(self, rows: DecodeRows, chooser: Chooser) -> None:
        """Fetch the pages selected for the rows' next step, beside the model.

        To be called after ``resolve``. Takes no slot of the current step; where slots run short it
        fetches less. The next call waits for what is still on its way.

        Args:
            rows: Those of ``resolve``; ``lists`` is not read.
            chooser: Its selection names the pages.

        Raises:
            ValueError: A row does not fit, as in ``plan_decode``; nothing has happened then.
        """
        ...

    def close(self, pages: torch.Tensor) -> None:
        """Encode pages that are full.

        Bytes moved: the pages, and what they become. A page that cannot be written is lost, and
        reported as one that cannot be read.

        Args:
            pages: int64 [n]; each open, and named once.

        Raises:
            ValueError: The home is not encoded, or has no such page.
            RuntimeError: A page is not open.
        """
        ...

    def abandon(self, pages: list[int]) -> None:
        """Forget what is open of these pages of an encoded home: nobody will read it.

        Raises:
            ValueError: The home is not encoded, or has no such page.
            RuntimeError: A running request has one of them pinned.
        """
        ...

    def stage(self, pages: torch.Tensor, target: torch.Tensor) -> None:
        """Lay out pages of an encoded home as larger blocks, as :meth:`Ops.stage_pages` does.

        Args:
            pages: int64 [n]; in the order wanted, n a multiple of pages per block. Negative: zeros.
            target: [>= n * page_size / block_size, kv_heads, block_size, 2 * head_size], written;
                pages that cannot be read are zeros, too.

        Raises:
            ValueError: The home is not encoded, or has no such page, or ``target`` is of another
                shape or dtype. Nothing is written then.
        """
        ...

    def drop_pages(self, pages: list[int]) -> None:
        """Forget pages whose home has changed by other means than a write of tokens.

        Raises:
            RuntimeError: A running request has one of them pinned.
        """
        ...

    def release(self, seat: int) -> None:
        """Unpin what the request with this seat has pinned."""
        ...

    def take_failed_pages(self) -> list[int]:
        """Pages of which a unit was found unreadable since the last call; their slots are freed.

        What is still on its way is not waited for: a failure there is known before the page is
        attended to.
        """
        ...

    def take_error(self) -> int:
        """Number of the latest error by which a page could not be read or written; 0 if none.

        Since the last call, that is.
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
