"""The ops of a cache whose pages are encoded in host memory, once they are full.

Pages that a request is filling, and the last full ones of its own, are **open**: they lie on the
device as the model made them, in a ring of ``O`` pages for each seat. Page ``p`` of a context is at
place ``p % O`` of the ring. A page is encoded in the step that fills it, and its request reads it
from the ring as long as it is open. All others, requests that share the page among them, read it
decoded.

The units of the home are what a codec of ``retrieval/codec`` makes of keys and values, byte by
byte. At each step the ops of a layer run in this order::

    update_index                        records that grow, from keys as they are
    write_open, index_open              before attention; other records, likewise
    plan_decode, resolve
    recall_encoded, stage_encoded       in place of recall_units and stage_context
    keep_open                           after attention, where rows have several tokens
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_kvretrieval.kernels.device import DeviceRows
from vllm_kvretrieval.kernels.slots import Recalls, Residency
from vllm_kvretrieval.kernels.types import IndexRecords
from vllm_kvretrieval.retrieval.codec import Codec


@dataclass
class EncodedUnits:
    """The cache of one layer, for ``S`` seats.

    Attributes:
        codec: What full pages are encoded by.
        units: uint8 [pages, kv_heads, bytes]; the home, in host memory as the device sees it.
        open: [S, O, kv_heads, page, 2 * head_size]; the open pages, on the device.
        first: int32 [S]; the position in the context of the first page that a request reads from
            its ring in this step. Layers share it.
    """

    codec: Codec
    units: torch.Tensor
    open: torch.Tensor
    first: torch.Tensor

    @property
    def kept(self) -> int:
        """Full pages of a request that stay open."""
        return self.open.shape[1] - 1


class EncodedOps(Protocol):
    """One implementation of the ops."""

    def update_index(
        self, key: torch.Tensor, slot_mapping: torch.Tensor, store: IndexRecords
    ) -> None:
        """Take new keys into an index that grows, as ``write_kv`` does, without drafts.

        Bytes moved: ``kv_heads * head_size`` elements per token, and records.

        Args:
            key: [>= T, kv_heads, head_size]; tokens may be strided.
            slot_mapping: int64 [T]; see ``DeviceOps.write_kv``.
            store: The index; its ``records`` are written, and its cache is not read.

        Raises:
            ValueError: See ``DeviceOps.write_kv``; or the index does not grow.
        """
        ...

    def write_open(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: DeviceRows,
        store: EncodedUnits,
        residency: Residency,
    ) -> None:
        """Encode the pages that a step fills, and write the tokens of rows that have one.

        These go to the rings. Where such a token begins a page, the page that is no longer open is
        taken out of its slots, which hold it as it was. Tokens of other rows are in ``key`` and
        ``value`` alone until :meth:`keep_open`. Rows without a seat, or a place in the cache, are
        left alone. Bytes moved: ``2 * kv_heads * head_size`` elements per token, and units that
        become full, written over the bus.

        Args:
            key, value: [tokens, kv_heads, head_size]; tokens may be strided.
            rows: The rows, without drafts. No two have the same seat.
            store: ``units`` and ``open`` are written.
            residency: The contents of the layer's slots; written.
        """
        ...

    def index_open(
        self, key: torch.Tensor, rows: DeviceRows, store: EncodedUnits, index: IndexRecords
    ) -> None:
        """Build the records of entries that a step completes, before :meth:`keep_open`.

        Bytes moved: the keys of these entries, and records.

        Args:
            key, rows: See :meth:`write_open`.
            store: Its rings have the tokens from before the step of pages that are not full.
            index: An index without a cache, whose entries are no longer than a page; its
                ``records`` are written.

        Raises:
            ValueError: See ``DeviceOps.write_kv``.
        """
        ...

    def keep_open(
        self, key: torch.Tensor, value: torch.Tensor, rows: DeviceRows, store: EncodedUnits
    ) -> None:
        """Write the tokens of rows that have several to their rings, as far as pages stay open.

        Args:
            key, value, rows: See :meth:`write_open`.
            store: ``open`` is written.
        """
        ...

    def recall_encoded(
        self,
        store: EncodedUnits,
        slots: torch.Tensor,
        residency: Residency,
        recalls: Recalls,
        *,
        programs: int = 16,
    ) -> None:
        """Decode units into slots; those of open pages are copied from the rings.

        Bytes moved: the encoded units, read over the bus, and units written to device memory.

        Args:
            store: It.
            slots: [S * kv_heads * C, page, 2 * head_size]; the slots in ``recalls`` are written.
            residency: Says which page of whose context a slot is for.
            recalls: The units, and their slots.
            programs: The largest number of thread blocks. It does not change the result.
        """
        ...

    def stage_encoded(
        self,
        store: EncodedUnits,
        buffer: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        seats: torch.Tensor,
        *,
        programs: int = 16,
    ) -> None:
        """Decode the pages of contexts into one buffer, in context order; open ones are copied.

        Bytes moved: the encoded pages, read over the bus, and pages written to device memory.

        Args:
            store: It.
            buffer, block_table, lengths, starts: See ``SlotOps.stage_context``.
            seats: int32 [R]; whose contexts these are.
            programs: See :meth:`recall_encoded`.
        """
        ...
