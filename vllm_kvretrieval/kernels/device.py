"""The ops of a decode step whose rows are known on the device only: arguments and contracts.

On a GPU the host may be two steps ahead, and a step may be the replay of a CUDA graph. So these ops
find out on the device which rows attend to a selection. Shapes are fixed, tensors keep their
addresses, and no op waits for the host. The ops select the same pages as :meth:`Ops.plan_decode
<vllm_kvretrieval.kernels.ops.Ops.plan_decode>`.

The KV cache of a layer is ``[pages, kv_heads, page_size, 2 * head_size]``. The key of each token is
followed by its value: vLLM's layout ``LBHNC``, which the reference calls ``token_major``.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import torch

from vllm_kvretrieval.kernels.types import Chooser, IndexRecords, KeptTokens, Selection
from vllm_kvretrieval.retrieval.keeping import Keeping


class Column(IntEnum):
    """The columns of the table of running requests.

    ``SINK``, ``WINDOW``, ``SELECT``: pages. ``CHOOSER``: the number of one of a layer's choosers.
    ``EXACT``: nonzero if the request attends to its whole context. ``THRESHOLD``: the correction
    threshold, as the bits of a float32. ``MASS``: likewise, the share of the attention that is
    enough. ``LAST_LEN``: tokens of the context, without drafts, at the request's last step, if a
    row with a chooser was its; 0: it was not, or the request takes its seat.
    """

    SINK = 0
    WINDOW = 1
    SELECT = 2
    CHOOSER = 3
    EXACT = 4
    THRESHOLD = 5
    LAST_LEN = 6
    MASS = 7


COLUMNS = 8
"""The number of columns of the table, a power of two."""
RECORD_ALIGNMENT = 16
"""Bytes of which the fields of an index's records begin at multiples, and records as a whole: a
GPU's widest loads."""


@dataclass
class DeviceRequests:
    """The running requests by seat; there are ``S`` seats.

    Attributes:
        table: int32 [S, COLUMNS]; see :class:`Column`. A row is written, in the order of the
            stream, when a request takes its seat. Ops write only ``LAST_LEN``.
        corrected: int64 [S]; incremented for every KV head that selects anew.
        spared: int64 [S]; increased by the selected pages that KV heads do not need for a mass.
    """

    table: torch.Tensor
    corrected: torch.Tensor
    spared: torch.Tensor

    @classmethod
    def empty(cls, seats: int, device: torch.device | str) -> "DeviceRequests":
        """The table of ``seats`` seats, all of which are free."""
        return cls(
            torch.zeros(seats, COLUMNS, dtype=torch.int32, device=device),
            *torch.zeros(2, seats, dtype=torch.int64, device=device),
        )


@dataclass
class DeviceRows:
    """The requests of a step in batch order, and what ``prepare_rows`` finds out; ``R`` rows.

    A request that decodes may have draft tokens behind its new one, the *certain* one, by whose
    query it selects; see :class:`DecodeRows <vllm_kvretrieval.kernels.rows.DecodeRows>`.
    Tensors are contiguous in their last dimension and keep their addresses.

    Attributes:
        seats: int32 [R]; the seat of each request; negative: the row is padding.
        prefilling: int32 [R]; nonzero if the tokens belong to a prompt.
        query_start: int32 [R + 1]; the place in the batch where the tokens of each row begin.
        seq_lens: int32 [R]; tokens in the context, including those of the step and drafts.
        slot_mapping: int64 [>= tokens]; ``page_id * page_size + offset``, negative for padding.
        block_table: int32 [R, >= pages]; page ids in context order.
        choosers: int32 [R], written: the number of the layer's chooser by which a row attends to a
            part of its context; negative: it attends to all of it, or is of a prompt or padding.
        fresh: int32 [R], written: 0 if the request selected in its previous step; 2 if that listed
            its whole context; 1 if it attended to that in another way, or there was none.
        dense_lens: int32 [R], written: ``seq_lens``, but 0 if ``choosers`` is not negative, or if
            the cache is slow to read and the row has several tokens of a prompt (1 in the first
            row, since FlashAttention 3 divides by the tokens of all rows).
        certain: int32 [R], written: tokens in the context up to the certain one; of rows with a
            chooser. In others it is ``seq_lens``.
        drafts: The most draft tokens of a row.
    """

    seats: torch.Tensor
    prefilling: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    choosers: torch.Tensor
    fresh: torch.Tensor
    dense_lens: torch.Tensor
    certain: torch.Tensor
    drafts: int = 0

    def __len__(self) -> int:
        return self.seq_lens.shape[0]


@dataclass
class ScoreRoom:
    """Room to score the entries of contexts.

    Layers of one shape share it; launches that share it must run one after another. ``N`` is the
    number of rows times KV heads.

    Attributes:
        scores: float32 [>= N, group, >= entries]; scores of the entries of a context; or where
            tokens are dropped, those of the listed tokens, which attention writes.
        stats: float32 [>= N, programs, 2, group]; the highest score that a program has seen, and
            the sum of the exponentials to base 2 of the differences from it.
        arrivals: int32 [>= N]; 0 between launches. How many programs of a list have ended.
        cosines: float32 [>= N, 2, entries], as many entries as ``scores`` have; the lowest cosine
            of a key of each entry with its mean, and room to rank these. None: no chooser has
            outliers.
    """

    scores: torch.Tensor
    stats: torch.Tensor
    arrivals: torch.Tensor
    cosines: torch.Tensor | None = field(default=None, kw_only=True)

    def another(self) -> "ScoreRoom":
        """As much room again."""
        like = torch.empty_like(self.scores), torch.empty_like(self.stats)
        cosines = None if self.cosines is None else torch.empty_like(self.cosines)
        return ScoreRoom(*like, torch.zeros_like(self.arrivals), cosines=cosines)


@dataclass
class DevicePlan(ScoreRoom):
    """The pages, or tokens, that rows of a layer attend to, and room to select before attention.

    Attributes:
        lists: int32 [>= N, W], written: the pages of each (row, KV head) in context order, either
            as positions in the context or as units, ``page_id * kv_heads + kv_head``. With tokens,
            the tokens, likewise: as positions, or ``unit * page_size + place in the page``; entries
            are then tokens, too.
        lengths: int32 [>= N], written: tokens of these pages; -1: the row attends to its whole
            context, and its list is not written.
        positions: Whether ``lists`` holds positions. Otherwise it holds units.
    """

    lists: torch.Tensor
    lengths: torch.Tensor
    positions: bool = False

    @classmethod
    def empty(
        cls,
        *,
        rows: int,
        kv_heads: int,
        group: int,
        entries: int,
        width: int,
        programs: int,
        device: torch.device | str,
        positions: bool = False,
        outliers: bool = False,
    ) -> "DevicePlan":
        """A plan for ``rows`` rows, contexts of up to ``entries`` entries, and lists of ``width``
        pages; with room for ``outliers``, if choosers have any."""
        lists = rows * kv_heads
        return cls(
            torch.empty(lists, group, entries, device=device),
            torch.empty(lists, programs, 2, group, device=device),
            torch.zeros(lists, dtype=torch.int32, device=device),
            torch.zeros(lists, width, dtype=torch.int32, device=device),
            torch.full((lists,), -1, dtype=torch.int32, device=device),
            positions,
            cosines=torch.empty(lists, 2, entries, device=device) if outliers else None,
        )


class DeviceOps(Protocol):
    """One implementation of the ops."""

    def prepare_rows(
        self,
        rows: DeviceRows,
        requests: DeviceRequests,
        page_size: int,
        *,
        least: int = 0,
        far: bool = False,
    ) -> None:
        """Find out which rows of a step attend to a selection. Runs once per step.

        A row does if it has a seat and a token, this has a place in the cache and does not belong
        to a prompt, the request is not exact, and the context has ``least`` tokens and more pages
        than sink, window and selection together, drafts not counted. ``LAST_LEN`` of a row with a
        seat is written.

        Args:
            rows: ``choosers``, ``fresh``, ``dense_lens`` and ``certain`` are written.
            requests: ``table`` is written.
            page_size: Tokens per page.
            least: Tokens of the shortest contexts that are selected from, whatever their budgets.
            far: Whether the cache is slow to read. If so, contexts within their budget get a
                chooser, too, and are listed as a whole; ``least`` is 0 then.
        """
        ...

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache: torch.Tensor,
        indexes: Sequence[IndexRecords],
        *,
        drafted: bool = False,
    ) -> None:
        """Write new keys and values to the cache, and take them into the page indexes of the layer.

        Indexes are updated as in :meth:`Ops.update_index
        <vllm_kvretrieval.kernels.ops.Ops.update_index>`; records may differ from those of the
        reference if the index allows it. Bytes moved: ``2 * kv_heads * head_size`` elements per
        token, read and written; for each index that does not grow, the keys of complete entries;
        and records.

        Args:
            key, value: [>= T, kv_heads, head_size]; tokens may be strided.
            slot_mapping: int64 [T]; ``page_id * page_size + offset``, negative for padding. Tokens
                of one page are adjacent, in their order.
            cache: [pages, kv_heads, page_size, 2 * head_size], written.
            indexes: The indexes of ``cache``, with records aligned to ``RECORD_ALIGNMENT`` bytes;
                their ``records`` are written.
            drafted: Whether tokens may take the places of rejected drafts, which have entered the
                records of an index that grows. If so these are built anew, from the keys of their
                entries up to the last token.

        Raises:
            ValueError: The dtype, shape or strides of a tensor differ from the signature, or there
                is no kernel for an index.
        """
        ...

    def index_pages(self, pages: torch.Tensor, store: IndexRecords) -> None:
        """Take full pages of the cache into an index.

        Args:
            pages: int32 [n]; page ids.
            store: The index, with its cache; ``records`` are written.

        Raises:
            ValueError: See :meth:`write_kv`.
        """
        ...

    def plan_decode(
        self,
        query: torch.Tensor,
        rows: DeviceRows,
        requests: DeviceRequests,
        choosers: Sequence[Chooser],
        plan: DevicePlan,
    ) -> None:
        """List the pages that each (row, KV head) attends to, and remember its query.

        Lists of rows with a chooser are those of :meth:`Ops.plan_decode
        <vllm_kvretrieval.kernels.ops.Ops.plan_decode>`, up to the rounding of scores. KV heads
        select here if that has them attend to their own selection; others take that of their last
        step, and have to select in :meth:`select_ahead`. A context within its budget that has a
        chooser is listed as a whole. Drafts of a row change nothing but that they end its list:
        also an index that grows is scored without them. Bytes moved: the records of the contexts of
        heads that select, and scores.

        Args:
            query: [tokens, kv_heads * group, head_size]; tokens may be strided.
            rows: The rows, as ``prepare_rows`` has written them.
            requests: ``corrected`` is written.
            choosers: The choosers of the layer. Those without an index select nothing. They share
                one selection, which is written at the seats of the rows.
            plan: Written.

        Raises:
            ValueError: The dtype, shape or strides of a tensor differ from the signature, or there
                is no kernel for an index.
        """
        ...

    def select_ahead(
        self,
        rows: DeviceRows,
        requests: DeviceRequests,
        number: int,
        chooser: Chooser,
        room: ScoreRoom,
    ) -> None:
        """Select for the next step, after :meth:`plan_decode`: beside attention, and layers after.

        Then the selection is what :meth:`Ops.plan_decode
        <vllm_kvretrieval.kernels.ops.Ops.plan_decode>` leaves. KV heads select by the query that
        the layer remembers; those that have selected in this step are left alone. Bytes moved: the
        records of the contexts of the others, and scores.

        Args:
            rows, requests: As ``plan_decode`` has left them.
            number: The number of the chooser. Rows with other numbers are left alone.
            chooser: It has an index; its selection is written at the seats of the rows.
            room: Not that of :meth:`plan_decode` if the next layer's may run beside this; written.

        Raises:
            ValueError: See :meth:`plan_decode`.
        """
        ...

    def plan_tokens(
        self,
        query: torch.Tensor,
        rows: DeviceRows,
        requests: DeviceRequests,
        choosers: Mapping[int, Chooser],
        plan: DevicePlan,
    ) -> None:
        """List the single tokens that each (row, KV head) attends to.

        Lists are those of :meth:`Ops.plan_decode
        <vllm_kvretrieval.kernels.ops.Ops.plan_decode>` for rows that select tokens anew at each
        step, up to the rounding of scores; drafts end them. Nothing is remembered but
        ``corrected``. Rows with other choosers, or none, get the length -1. Bytes moved: the
        records of the contexts, and scores.

        Args:
            query, rows, requests: See :meth:`plan_decode`. A context within its budget that has a
                chooser is listed as a whole.
            choosers: By their numbers. Those without an index select nothing.
            plan: A plan for tokens, written.

        Raises:
            ValueError: See :meth:`plan_decode`.
        """
        ...

    def filter_tokens(
        self,
        query: torch.Tensor,
        rows: DeviceRows,
        requests: DeviceRequests,
        number: int,
        others: Collection[int],
        store: IndexRecords,
        scale: float,
        plan: DevicePlan,
    ) -> None:
        """List the tokens that all KV heads of the layers after a filter layer attend to.

        They are those of :meth:`Ops.select_context
        <vllm_kvretrieval.kernels.ops.Ops.select_context>` by the rows' own queries and
        ``list_context``, up to the rounding of scores. Rows with other choosers, or none, get the
        length -1. Bytes moved: the keys of the contexts, and scores.

        Args:
            query, rows, requests: See :meth:`plan_tokens`; the queries are the filter layer's.
            number: The chooser of the rows that the filter selects for.
            others: Choosers of rows that select nothing, whose sink and window are listed.
            store: The index ``exact`` over the keys of the filter layer, with entries of a token.
            scale: Softmax scale of the layer.
            plan: A plan for tokens, written.

        Raises:
            ValueError: See :meth:`plan_decode`.
        """
        ...

    def list_kept(
        self,
        rows: DeviceRows,
        requests: DeviceRequests,
        numbers: Collection[int],
        others: Collection[int],
        selection: Selection,
        page_size: int,
        plan: DevicePlan,
        *,
        dropping: Collection[int] = (),
    ) -> None:
        """List the tokens that are kept of prompts, for each (row, KV head), and all after them.

        Rows with other choosers, or none, get the length -1. Drafts end the lists. Bytes moved: 12
        per listed token.

        Args:
            rows, requests: See :meth:`plan_decode`.
            numbers: Choosers of the rows whose prompts' tokens are kept.
            others: See :meth:`filter_tokens`.
            selection: The layer's, with ``counts`` and ``ends``: the first ``counts`` tokens of
                ``chosen`` are listed, and those from ``ends`` on.
            page_size: Tokens per page.
            plan: A plan for tokens, written; nothing is scored.
            dropping: Choosers of the rows whose steps drop tokens, too. The first ``counts`` tokens
                of ``chosen`` are listed, and the new one.

        Raises:
            ValueError: See :meth:`plan_decode`.
        """
        ...

    def receive_tokens(
        self,
        scores: torch.Tensor,
        lse: torch.Tensor,
        rows: DeviceRows,
        number: int,
        kept: KeptTokens,
        received: torch.Tensor,
    ) -> None:
        """Add up what listed tokens get of the attention of all KV heads of a layer.

        Where other workers have heads of the layer, too, :meth:`drop_tokens` goes by the sums over
        them all. Bytes moved: scores, and four per token.

        Args:
            scores, lse, rows, number, kept: See :meth:`drop_tokens`, of a rule of whole layers, by
                which all KV heads of a row have one list.
            received: float32 [R, tokens of a list]; written for the rows of the method.

        Raises:
            ValueError: The dtype, shape or strides of a tensor differ from the signature.
        """
        ...

    def drop_tokens(
        self,
        scores: torch.Tensor,
        lse: torch.Tensor,
        rows: DeviceRows,
        number: int,
        kept: KeptTokens,
        rule: Keeping,
        *,
        received: torch.Tensor | None = None,
    ) -> None:
        """Keep the new token of each row, and drop tokens of heads that have no room for the next.

        Tokens, ratings and counts are then those of :meth:`Ops.drop_tokens
        <vllm_kvretrieval.kernels.ops.Ops.drop_tokens>`, up to the rounding of ratings, by the
        weights of each KV head; or, if the rule is of whole layers, by those of all of them added
        up. Rows with other choosers, or none, are left alone. Bytes moved: scores, positions and
        ratings.

        Args:
            scores: float32 [R * kv_heads, group, >= tokens of a list], contiguous, as
                ``sparse_decode`` has written them of the lists of :meth:`list_kept`.
            lse: float32 [R * kv_heads, group]; likewise.
            rows: The rows, without drafts. No two have the same seat.
            number: The number of the method.
            kept: The layer's; ``chosen``, ``ratings`` and ``counts`` are written at the seats of
                the rows.
            rule: How tokens are rated, and which are spared.
            received: What tokens have received of a layer, where not by these scores alone; see
                :meth:`receive_tokens`.

        Raises:
            ValueError: The dtype, shape or strides of a tensor differ from the signature.
        """
        ...
