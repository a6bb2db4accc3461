"""How a layer's cache lies in host memory: as the model made it, or encoded."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vllm_kvretrieval.kernels.device import DeviceRows
from vllm_kvretrieval.kernels.encoded import EncodedUnits
from vllm_kvretrieval.kernels.slots import Recalls, Residency
from vllm_kvretrieval.kernels.types import IndexRecords


class Home(Protocol):
    """The cache of one layer.

    Attributes:
        unit: Tokens of a page, and elements of a token's key and value in a KV head.
        dtype: Of the elements.
        unit_bytes: Bytes of a page of a KV head that are read over the bus.
        in_place: [pages, kv_heads, page_size, 2 * head_size], where attention can read units that
            no slot holds; None: :meth:`recall` has to bring them before.
    """

    unit: tuple[int, int]
    dtype: torch.dtype
    unit_bytes: int
    in_place: torch.Tensor | None

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        indexes: Sequence[IndexRecords],
        *,
        drafted: bool,
    ) -> None:
        """Take a step's tokens in, as far as that needs no rows; see ``DeviceOps.write_kv``."""
        ...

    def begin(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: DeviceRows,
        residency: Residency,
        indexes: Sequence[IndexRecords],
    ) -> None:
        """Take them in, before attention; see ``EncodedOps.write_open`` and ``index_open``."""
        ...

    def end(self, key: torch.Tensor, value: torch.Tensor, rows: DeviceRows) -> None:
        """Take in those of rows with several, after attention; see ``EncodedOps.keep_open``."""
        ...

    def recall(
        self, slots: torch.Tensor, residency: Residency, recalls: Recalls, programs: int
    ) -> None:
        """Bring units into slots; see ``SlotOps.recall_units``."""
        ...

    def stage(
        self,
        buffer: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        seats: torch.Tensor,
    ) -> None:
        """Bring contexts into a buffer; see ``SlotOps.stage_context``.

        Args:
            buffer, block_table, lengths, starts: See there.
            seats: int32 [rows]; whose contexts these are.
        """
        ...


class RawHome:
    """Pages as the model made them; see :class:`Home`.

    Args:
        ops: Implementation of ``DeviceOps`` and ``SlotOps``.
        pages: [pages, kv_heads, page_size, 2 * head_size], in host memory as the device sees it.
    """

    def __init__(self, ops: Any, pages: torch.Tensor) -> None:
        self._ops, self._pages = ops, pages
        self.in_place: torch.Tensor | None = pages
        self.unit = pages.shape[2], pages.shape[3]
        self.dtype, self.unit_bytes = pages.dtype, pages[0, 0].nbytes

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        indexes: Sequence[IndexRecords],
        *,
        drafted: bool,
    ) -> None:
        """See :meth:`Home.write`; everything is."""
        self._ops.write_kv(key, value, slot_mapping, self._pages, indexes, drafted=drafted)

    def begin(self, *args: Any) -> None:
        """Do nothing: all tokens are at home."""

    def end(self, *args: Any) -> None:
        """Do nothing: all tokens are at home."""

    def recall(
        self, slots: torch.Tensor, residency: Residency, recalls: Recalls, programs: int
    ) -> None:
        """See :meth:`Home.recall`."""
        units = recalls.sources, recalls.targets, recalls.count
        self._ops.recall_units(self._pages, slots, *units, programs=programs)

    def stage(
        self,
        buffer: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        seats: torch.Tensor,
    ) -> None:
        """See :meth:`Home.stage`."""
        self._ops.stage_context(self._pages, buffer, block_table, lengths, starts)


class EncodedHome:
    """Full pages encoded, and open ones on the device; see :class:`Home`.

    Args:
        ops: Implementation of ``EncodedOps``.
        store: The cache.
    """

    in_place: torch.Tensor | None = None

    def __init__(self, ops: Any, store: EncodedUnits) -> None:
        self._ops, self.store = ops, store
        self.unit = store.open.shape[3], store.open.shape[4]
        self.dtype, self.unit_bytes = store.open.dtype, store.units.shape[2]

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        indexes: Sequence[IndexRecords],
        *,
        drafted: bool,
    ) -> None:
        """See :meth:`Home.write`; into indexes that grow, and nowhere else."""
        for index in indexes:
            if index.index is not None and index.index.grows:
                self._ops.update_index(key, slot_mapping, index)

    def begin(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: DeviceRows,
        residency: Residency,
        indexes: Sequence[IndexRecords],
    ) -> None:
        """See :meth:`Home.begin`."""
        self._ops.write_open(key, value, rows, self.store, residency)
        for index in indexes:
            if index.index is not None and not index.index.grows:
                self._ops.index_open(key, rows, self.store, index)

    def end(self, key: torch.Tensor, value: torch.Tensor, rows: DeviceRows) -> None:
        """See :meth:`Home.end`."""
        self._ops.keep_open(key, value, rows, self.store)

    def recall(
        self, slots: torch.Tensor, residency: Residency, recalls: Recalls, programs: int
    ) -> None:
        """See :meth:`Home.recall`."""
        self._ops.recall_encoded(self.store, slots, residency, recalls, programs=programs)

    def stage(
        self,
        buffer: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        seats: torch.Tensor,
    ) -> None:
        """See :meth:`Home.stage`."""
        self._ops.stage_encoded(self.store, buffer, block_table, lengths, starts, seats)
