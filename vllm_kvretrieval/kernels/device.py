"""The decode step where its rows are known on the device alone: what its ops take, and promise.

On a GPU the host may be two steps ahead, and a step may be the replay of a CUDA graph. So these ops
find out on the device which rows attend to a selection; shapes are fixed, tensors stay where they
are, and nothing waits for the host. What is selected is what :meth:`Ops.plan_decode
<vllm_kvretrieval.kernels.types.Ops.plan_decode>` selects.

The KV cache of a layer is ``[pages, kv_heads, page_size, 2 * head_size]``, a token's key and then
its value: vLLM's layout ``LBHNC``, which the reference calls ``rows``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from vllm_kvretrieval.kernels.types import Chooser, IndexStore


class Column(IntEnum):
    """Of the table of running requests; lengths of ``SINK``, ``WINDOW``, ``SELECT`` are in pages.

    ``CHOOSER`` numbers the choosers of a layer. ``EXACT``: nonzero where the request attends to its
    whole context. ``THRESHOLD``: the correction threshold, as the bits of a float32. ``LAST_LEN``:
    tokens of the context at the request's last sparse step; 0 when it takes its seat.
    """

    SINK = 0
    WINDOW = 1
    SELECT = 2
    CHOOSER = 3
    EXACT = 4
    THRESHOLD = 5
    LAST_LEN = 6


COLUMNS = 8
"""Of the table; a power of two."""


@dataclass
class DeviceRequests:
    """The running requests, by seat; ``S`` seats.

    Attributes:
        table: int32 [S, COLUMNS]; see :class:`Column`. Written in the order of the stream when a
            request takes its seat; ops write ``LAST_LEN`` alone.
        corrected: int64 [S]; incremented for every KV head that selects anew.
    """

    table: torch.Tensor
    corrected: torch.Tensor

    @classmethod
    def empty(cls, seats: int, device: torch.device | str) -> "DeviceRequests":
        """For ``seats`` requests, of which none runs."""
        return cls(
            torch.zeros(seats, COLUMNS, dtype=torch.int32, device=device),
            torch.zeros(seats, dtype=torch.int64, device=device),
        )


@dataclass
class DeviceRows:
    """The requests of a step in batch order, and what ``prepare_rows`` makes of them; ``R`` rows.

    Tensors are contiguous in their last dimension and stay at their addresses.

    Attributes:
        seats: int32 [R]; each request's entry in the table; negative: no request, padding.
        prefilling: int32 [R]; nonzero where the tokens belong to a prompt.
        query_start: int32 [R + 1]; where each row's tokens begin in the batch.
        seq_lens: int32 [R]; tokens in the context, those of the step included.
        slot_mapping: int64 [>= tokens]; ``page_id * page_size + offset``, negative for padding.
        block_table: int32 [R, >= pages]; page ids in context order.
        choosers: int32 [R], written: by which of a layer's choosers a row attends to a part of its
            context; negative: it does not (whole contexts, prompts, padding).
        fresh: int32 [R], written: nonzero where the request's previous step was no such one.
        dense_lens: int32 [R], written: ``seq_lens``, but 0 where ``choosers`` is not negative (in
            the first row 1, since FlashAttention 3 divides by the tokens of all rows).
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

    def __len__(self) -> int:
        return self.seq_lens.shape[0]


@dataclass
class DevicePlan:
    """What the rows of one layer attend to, and room to find out; layers of one shape share it.

    Launches that share a plan must run one after another. ``N`` is rows times KV heads.

    Attributes:
        scores: float32 [>= N, group, >= entries]; of the entries of the longest context.
        stats: float32 [>= N, programs, 2, group]; the highest score that a program has seen, and
            the sum of the exponentials to base 2 of the differences from it.
        lists: int32 [>= N, W], written: per (row, KV head) pages in context order, by their
            positions in the context, or as units, ``page_id * kv_heads + kv_head``.
        lengths: int32 [>= N], written: tokens of these; -1: the row attends to its whole context,
            and its list is not written.
        positions: Which of the two ``lists`` holds.
    """

    scores: torch.Tensor
    stats: torch.Tensor
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
    ) -> "DevicePlan":
        """For ``rows`` rows of contexts of up to ``entries`` entries, lists of ``width`` pages."""
        lists = rows * kv_heads
        return cls(
            torch.empty(lists, group, entries, device=device),
            torch.empty(lists, programs, 2, group, device=device),
            torch.zeros(lists, width, dtype=torch.int32, device=device),
            torch.full((lists,), -1, dtype=torch.int32, device=device),
            positions,
        )


class DeviceOps(Protocol):
    """One implementation of the ops."""

    def prepare_rows(
        self, rows: DeviceRows, requests: DeviceRequests, page_size: int, *, far: bool = False
    ) -> None:
        """Find out which rows of a step attend to a selection; once per step.

        A row does where it has a seat and one token, which has a place in the cache and is none of
        a prompt; its request is not exact; and its context has more pages than sink, window and
        selection together. ``LAST_LEN`` of its request becomes the length of its context.

        Args:
            rows: The last three attributes are written.
            requests: ``table`` is written.
            page_size: Tokens per page.
            far: Whether the cache is slow to read: then contexts that are within their budget are
                listed too, whole.
        """
        ...

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache: torch.Tensor,
        stores: Sequence[IndexStore],
    ) -> None:
        """Write new keys and values to the cache, and take them into the layer's page indexes.

        Indexes as :meth:`Ops.update_index <vllm_kvretrieval.kernels.types.Ops.update_index>` has
        it, which may build other records than the reference where the index says so. Bytes moved:
        ``2 * kv_heads * head_size`` elements per token read and written; per index that does not
        grow, the keys of complete entries; records.

        Args:
            key, value: [>= T, kv_heads, head_size]; tokens may be strided.
            slot_mapping: int64 [T]; ``page_id * page_size + offset``, negative for padding. Tokens
                of one page are adjacent, in their order.
            cache: [pages, kv_heads, page_size, 2 * head_size], written.
            stores: Over ``cache``; their ``records`` are written.

        Raises:
            ValueError: A tensor's dtype, shape or strides are not those of the signature, or there
                is no kernel for an index.
        """
        ...

    def index_pages(self, pages: torch.Tensor, store: IndexStore) -> None:
        """Take whole pages that lie in the cache into an index.

        Args:
            pages: int32 [n]; page ids.
            store: With its cache; ``records`` are written.

        Raises:
            ValueError: As :meth:`write_kv`.
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
        """Decide what each (row, KV head) attends to, and remember the step.

        Of a row that ``prepare_rows`` gave a chooser, exactly as :meth:`Ops.plan_decode
        <vllm_kvretrieval.kernels.types.Ops.plan_decode>` decides it, up to the rounding of scores:
        scores, pooling, selection, similarity and correction, lists. Contexts within their budget,
        where they are listed, are listed whole. Bytes moved: the records of the contexts, and
        scores.

        Args:
            query: [>= R, kv_heads * group, head_size]; rows may be strided. Row ``i`` holds the
                only token of row ``i``.
            rows: As ``prepare_rows`` left them.
            requests: ``corrected`` is written.
            choosers: The layer's; of those whose index is None nothing is selected. They share one
                selection, which is written at the rows' seats.
            plan: Written.

        Raises:
            ValueError: A tensor's dtype, shape or strides are not those of the signature, or there
                is no kernel for an index.
        """
        ...
