"""The signatures of the ops."""

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_kvretrieval.kernels.rows import DecodeRows, PromptLists, Remainder, TokenLists
from vllm_kvretrieval.kernels.types import (
    Chooser,
    ContextSelector,
    DecodeLayer,
    IndexRecords,
    KeptTokens,
    Merge,
)
from vllm_kvretrieval.retrieval.codec import Codec
from vllm_kvretrieval.retrieval.keeping import Keeping


class Ops(Protocol):
    """One implementation of the ops."""

    def update_index(
        self, key: torch.Tensor, slot_mapping: torch.Tensor, store: IndexRecords
    ) -> None:
        """Take newly written keys into the page index.

        If records grow (:attr:`Index.grows`), the first token of an entry voids its record, so
        recycled pages start afresh. If not, the record of an entry is built from the keys in the
        cache when its last token is written; so keys have to be written to the cache first. Bytes
        moved: the keys once, and the records.

        Args:
            key: [>= T, kv_heads, head_size]; tokens may be strided.
            slot_mapping: int64 [T]; ``page * page_size + offset``, negative for padding. Tokens of
                one page are adjacent.
            store: ``records`` is updated.

        Raises:
            ValueError: ``key`` does not have the store's shape and dtype, or a token lies outside
                the index. Nothing is written then.
        """
        ...

    def index_pages(self, pages: torch.Tensor, lengths: torch.Tensor, store: IndexRecords) -> None:
        """Take keys of the KV cache into the page index.

        This is for pages that were not written token by token, but loaded by a KV connector, for
        instance. The records of their entries are replaced, bit by bit by those of
        :meth:`update_index` for the same keys, unless keys are NaN. Entries behind the last token
        of a page stay as they are. Bytes moved: half of the pages, and records.

        Args:
            pages: int32 [n]; page ids, each at most once.
            lengths: int32 [n]; tokens that each page holds, 1 to ``page_size``.
            store: ``records`` is updated; entries have 8 to 256 tokens.

        Raises:
            ValueError: The store has no cache, a page or length is out of range, or the layout is
                not known (``neon``, ``rvv``, ...). Nothing is written then.
        """
        ...

    def plan_decode(
        self,
        query: torch.Tensor,
        rows: DecodeRows,
        chooser: Chooser,
        remainder: Remainder | None = None,
    ) -> None:
        """List the units (pages or tokens) that each (row, KV head) attends to; remember the step.

        For each row and KV head (FreeKV, sections 3.2 and 3.3): compare the query with that of the
        previous step (cosine, mean over the group). Score every entry of the index, pool the scores
        over the group and the entries of each page, and select the best ``select`` pages between
        sink and window; or score the tokens of complete entries, and select the best tokens. If the
        similarity is below the threshold, or the row is fresh, the head attends to this new
        selection, otherwise to that of the previous step. The new selection is remembered. A head
        that selects as many units as lie between sink and window attends to all of them. With
        ``rerank``, ``rerank * select`` candidates are scored again by their keys, and the best of
        these are selected. With ``outliers``, that share of the selected pages, rounded down, but
        one at least of two or more, are the ones of all between sink and window that have the
        lowest cosine of a key with the mean of its entry, and the best of the others are the rest.
        Of equal scores or cosines the earlier unit wins. Scores that underflow are not equal: they
        keep the order of their logarithms.
        Of rows of other modes nothing is scored, compared or remembered. Where a selection is
        given, each head attends to what it holds, or to everything where its count leaves nothing
        out.

        With a remainder, the entries of the index that a row does not attend to, and whose share of
        the estimated attention (the mean over the query heads) is below ``Chooser.remainder``, are
        added up by the means of their values, but for those whose values are not finite. Where they
        have less than a hundred-thousandth of the attention, there is no remainder. They have at
        most 0.4 times the attention of the entries attended to. Bytes moved: the records of the
        context.

        Args:
            query: [>= R, kv_heads * group, head_size]; rows may be strided.
            rows: ``lists``, ``lengths`` and ``corrected`` are written.
            chooser: How the layer selects; its selection is written at the rows' seats.
            remainder: Written; None: nothing is added up.

        Raises:
            ValueError: A row does not fit: more units to select (or less than none) than the
                selection holds, or given ones that the context has not; a given selection without
                counts; more to attend to than the context or ``lists`` has, or pages in the context
                than in ``block_table``; a seat outside the selection or ``corrected``; a negative
                sink or window; units to select by no index, tokens by one that scores entries only
                or with ``rerank``, or beside a window without the tail page or all of an unfinished
                entry; outliers by an index that tells none, or with ``rerank`` or an ``uneven``
                number; or tokens that 31 bits do not number. Or ``query`` is not of the layer's
                shape and dtype. Nothing is written then.
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

        The score of a token (OmniKV, section 4.2) is the highest attention that any head of the
        layer gives it, added up over a window of the latest queries with their weights. With a
        single query, tokens are ordered by logarithms, which do not underflow. Of equal scores the
        earlier token wins. Bytes moved: the keys of the context, once per query.

        Args:
            query: [>= R * n, kv_heads * group, head_size]; the n latest queries of each row. The
                query of the last token comes last. Queries may be strided.
            weights: float32 [R, n]; zero: the row has no such query.
            rows: Sink, window and selection are counted in tokens.
            selector: ``chosen`` is written at the seats of the rows.
            merge: If the heads of the layer are divided among workers: it is called once in each
                worker, with the logarithms of the highest attention that its heads give, float32
                [R, n, longest context]. So all workers select the same tokens.

        Raises:
            ValueError: A row does not fit: it selects more tokens than there is room for, attends
                to more than the context has, or has more context than ``block_table``; a seat is
                outside the state; a count is negative; the latest query has no weight. Or ``query``
                does not have the layer's shape and dtype. Nothing is written then.
        """
        ...

    def list_context(self, rows: DecodeRows, selector: ContextSelector, kv_heads: int) -> None:
        """Make the lists of tokens of layers that follow a filter.

        Args:
            rows: The rows of :meth:`select_context`. ``lists`` and ``lengths`` are written: sink,
                selection and window, numbered as in :class:`TokenLists`.
            selector: The selector of the filter.
            kv_heads: KV heads of the layers that follow.

        Raises:
            ValueError: A row does not fit; see :meth:`select_context`. Or the lists are too short.
        """
        ...

    def stage_pages(
        self,
        source: torch.Tensor,
        pages: torch.Tensor,
        target: torch.Tensor,
        layout: str = "vec",
        token_major: bool = False,
    ) -> None:
        """Lay out pages of one layer as larger blocks, for vLLM's prefill kernel.

        The result is as vLLM's CPU cache update writes it. A (page, KV head) holds its keys
        transposed, ``[head_size, tokens]``, and then its values, ``[tokens, head_size]``. With the
        layout ``amx`` keys are words of two channels, ``[tokens / 16, head_size / 2, 16 tokens]``,
        and values words of two tokens, ``[head_size / 16, tokens / 2, 16 channels]``. Bytes moved:
        the pages once, read and written.

        Args:
            source: [P, kv_heads, page_size, 2 * head_size]; vLLM's KV cache of the layer.
            pages: int32 [n]; page ids in the order of the result; n is a multiple of the pages per
                block.
            target: [>= n * page_size / block_size, kv_heads, block_size, 2 * head_size], written.
            layout: The layout of ``target``: the name of vLLM's attention ``isa``.
            token_major: Whether ``source`` is. Otherwise it has the layout of ``target``.

        Raises:
            ValueError: The layout is not known; or it is ``amx`` and ``source`` is not token-major
                with 16 bits per element. Or shapes do not fit each other, or ``source`` lacks a
                page. Nothing is written then.
        """
        ...

    def stage_tokens(
        self, source: torch.Tensor, lists: TokenLists, target: torch.Tensor, layout: str = "vec"
    ) -> None:
        """Lay out tokens of a token-major cache as blocks, for vLLM's prefill kernel.

        The tokens of each row, in the order of its lists, become a sequence. A sequence begins with
        a new block, after the blocks of the row before, and zeros fill its last block. Bytes moved:
        keys and values of the tokens, read and written.

        Args:
            source: [P, kv_heads, page_size, 2 * head_size]; token-major.
            lists: Lists of single tokens (``run`` 1). All KV heads of a row have equally many.
            target: [>= blocks, kv_heads, block_size, 2 * head_size], written.
            layout: See :meth:`stage_pages`.

        Raises:
            ValueError: See :meth:`stage_pages`. Or a list is empty, is too long, differs in length
                from those of other heads, or names a token that ``source`` does not have; or
                ``target`` is too small. Nothing is written then.
        """
        ...

    def write_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache: torch.Tensor,
        layout: str,
    ) -> None:
        """Write new tokens to a cache.

        Bytes moved: keys and values once, read and written.

        Args:
            key, value: [>= T, kv_heads, head_size]; tokens may be strided.
            slot_mapping: int64 [T]; ``page * page_size + offset``, negative for padding.
            cache: [P, kv_heads, page_size, 2 * head_size], contiguous; written.
            layout: Of the cache; see :meth:`attend`.

        Raises:
            ValueError: ``key`` or ``value`` does not have the cache's shape and dtype, a token lies
                outside the cache, or the layout is not known. Nothing is written then.
        """
        ...

    def encode_units(self, units: torch.Tensor, codec: Codec) -> torch.Tensor:
        """Encode units, the (page, KV head) slices of vLLM's cache.

        Bytes moved: the units, and the result.

        Args:
            units: [n, 2 * page_size, head_size] in vLLM's layout ``vec``: keys transposed, then
                values; contiguous. Both sizes are multiples of 16, up to 512.
            codec: A codec of this package.

        Returns:
            uint8 [n, unit_bytes].

        Raises:
            ValueError: The units have another shape, layout or dtype, or more elements than the
                codec takes.
        """
        ...

    def decode_units(self, data: torch.Tensor, codec: Codec, units: torch.Tensor) -> None:
        """Decode the result of :meth:`encode_units`.

        Args:
            data: uint8 [n, unit_bytes], contiguous.
            codec: The codec that has encoded it.
            units: See :meth:`encode_units`; written.

        Raises:
            ValueError: ``data`` or ``units`` has another shape, layout or dtype.
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
        remainder: Remainder | None = None,
    ) -> None:
        """Softmax attention of rows that decode to lists of tokens or pages.

        Bytes moved: keys and values of the tokens once, whatever the size of the group, and however
        many queries a row has. A query's result is that of a row of its own, to rounding; to the
        last bit if its list is no longer than 8192 tokens.

        Args:
            query: [>= Q, kv_heads * group, head_size]; queries may be strided.
            lists: The lists of R rows of Q queries. They may be empty if there is ``lse`` or
                ``remainder``: of nothing at all come zeros, and minus infinity as ``lse``.
            cache: [units, page_size, 2 * head_size], contiguous; there may be more leading
                dimensions.
            output: [>= Q, kv_heads * group, head_size], written; queries may be strided. In the
                cache's dtype, or in float32.
            layout: ``token_major``, or the name of vLLM's layout of keys, with ``run`` of 16 or
                more. With ``amx`` (see :meth:`stage_pages`) elements have 16 bits.
            scale: Softmax scale.
            lse: float32 [Q, kv_heads * group], written: the logarithm of the sum of exponentials.
            weights: float32 [R, kv_heads * group, >= tokens of the longest list], written: the
                weight of each token of a list; only of rows of one query each. Numbers behind a
                list stay as they are.
            softcap: Logits become ``softcap * tanh(logit / softcap)``; 0: they stay.
            sinks: float32 [kv_heads * group]; a further logit of every head, with a value of zero.
            remainder: A further part of the softmax; None: there is none.

        Raises:
            ValueError: ``query`` or ``output`` does not have the cache's shape and dtype; a list is
                empty or too long, or names a token that the cache does not have; or the layout is
                not known, or is not in stretches of ``run``. Nothing is written then.
        """
        ...

    def decode_layer(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        output: torch.Tensor,
        rows: DecodeRows,
        chooser: Chooser,
        layer: DecodeLayer,
    ) -> int:
        """Write a step's keys and values, take them into indexes, select, and attend.

        These are :meth:`write_cache`, :meth:`update_index` for each index of the layer,
        :meth:`plan_decode` and :meth:`attend` over its lists, with the chooser's remainder. In
        between there is no Python, whose code and data the weights of every layer displace from
        near caches. Bytes moved: those of the four.

        Args:
            query: [>= R, kv_heads * group, head_size]; of the rows.
            key, value, slot_mapping: See :meth:`write_cache`; of all tokens of the step.
            output: [>= R, kv_heads * group, head_size], written, in the cache's dtype.
            rows: Each has one query.
            chooser: Selects in the layer's cache.
            layer: The layer.

        Returns:
            Nanoseconds of :meth:`plan_decode`.

        Raises:
            ValueError: See the four ops. Nothing is written then, unless a page of a row is not in
                the cache.
        """
        ...

    def decodes(self, choosers: Sequence[Chooser], layer: DecodeLayer) -> bool:
        """Whether :meth:`decode_layer` takes a layer with these choosers."""
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
        """Causal softmax attention of prompts to lists of pages.

        The result is exact to rounding. It does not depend on other sequences, on the chunks in
        which a prompt is computed, or on the number of threads.

        Args:
            query: [T, kv_heads * group, head_size]; tokens may be strided.
            lists: The lists of the sequences of these queries.
            cache: [pages, kv_heads, page_size, 2 * head_size], contiguous.
            output: [T, kv_heads * group, head_size], written for the queries of ``lists``.
            layout: ``token_major``, or the name of vLLM's layout of keys.
            scale: Softmax scale.
            lse: float32 [T, kv_heads * group], written: the logarithm of the sum of exponentials.
            window: A query attends to the last ``window`` of the tokens that it sees; 0: to all.
            softcap: Logits become ``softcap * tanh(logit / softcap)``; 0: they stay.
            sinks: float32 [kv_heads * group]; a further logit of every head, with a value of zero.

        Raises:
            ValueError: A tensor does not have the cache's shape and dtype; or a list is shorter
                than what its queries see, or names a page that the cache does not have. Nothing is
                written then.
        """
        ...

    def drop_tokens(
        self, weights: torch.Tensor, rows: DecodeRows, kept: KeptTokens, rule: Keeping
    ) -> None:
        """Keep the new token of each row, and drop tokens of heads that have no room for the next.

        The weights of the step change the ratings of the kept tokens. If a head then keeps as many
        tokens as its budget, it drops the page of tokens with the lowest rating; of equal pages the
        earliest, and none that ``rule`` spares. If all are spared, it drops the earliest page
        behind the sink, or else the last one. Bytes moved: weights, positions and ratings.

        Args:
            weights: float32 [R, sets, heads, > tokens kept], contiguous; attention to the kept
                tokens of a row, in their order, and then to its new token, the last of the context.
                There is a set of query heads for each KV head, or one set for all of them.
            rows: ``seats`` and ``seq_lens`` are read.
            kept: ``chosen`` and ``ratings`` are written at the seats of the rows.
            rule: How tokens are rated, and which are spared.

        Raises:
            ValueError: A tensor has another shape or dtype; or a row does not fit: its seat is out
                of range, or it has more tokens than there is room for. Nothing is written then.
        """
        ...
