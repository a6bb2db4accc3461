"""Prefill where contexts are in host memory: they come to the device one layer at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils import torch_utils
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvretrieval.attention.cuda.homes import Home
from vllm_kvretrieval.attention.cuda.side import SideWork

ALIGNED = 4
"""Numbers of 4 bytes in 16 bytes."""


@dataclass(frozen=True)
class Wave:
    """Rows whose contexts fit in a buffer together, adjacent in the batch.

    Attributes:
        tokens: Which tokens of the batch are theirs.
        metadata: The dense half's, of these rows and a buffer.
        block_table: int32 [rows, >= pages]; where the contexts are at home.
        lengths: int32 [rows]; tokens of each context before this step.
        starts: int32 [rows]; the page of the buffer where each begins.
        seats: int32 [rows]; whose they are.
        slot_mapping: int64 [tokens]; where the step's tokens belong in the buffer.
    """

    tokens: slice
    metadata: Any
    block_table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    seats: torch.Tensor
    slot_mapping: torch.Tensor


class Staging:
    """Two buffers: while a layer attends to one, the next layer's contexts come to the other.

    Args:
        side: Runs beside the model what brings contexts.
        buffers: [2, pages, kv_heads, page_size, 2 * head_size]; one takes the longest context.
        make_builder: Makes a builder of the dense half's metadata.
    """

    def __init__(
        self, side: SideWork, buffers: torch.Tensor, make_builder: Callable[[], Any]
    ) -> None:
        self._side, self._buffers = side, buffers
        self._make_builder = make_builder
        self._builders: list[Any] = []  # some keep what they have planned in a buffer of their own
        self._homes: list[Home] = []
        self._waves: list[Wave] = []
        self._ahead: tuple[int, int] | None = None
        self._place = 0
        self._reads_written = False

    @property
    def page_size(self) -> int:
        return self._buffers.shape[3]

    def add(self, home: Home) -> int:
        """Number the next layer of the model whose contexts are staged."""
        self._homes.append(home)
        return len(self._homes) - 1

    def begin_step(
        self,
        common: CommonAttentionMetadata,
        staged: np.ndarray,
        seats: np.ndarray,
        *,
        reads_written: bool,
    ) -> int:
        """Divide a step's rows.

        Args:
            common: vLLM's metadata of the step.
            staged: bool [rows]; whose contexts are staged.
            seats: int [rows]; whose rows these are; negative: nobody's.
            reads_written: Whether a row may read what another row writes in this step. Then no
                context comes to the device before its layer has written the step's tokens.

        Returns:
            How many rows lead: those before the staged ones, but all where others follow these.

        Raises:
            ValueError: A context is longer than a buffer.
        """
        self._waves, self._ahead, self._reads_written = [], None, reads_written
        starts = common.query_start_loc_cpu.numpy()[: common.num_reqs + 1].astype(np.int64)
        if not staged.any():
            return common.num_reqs
        first = int(staged.argmax())
        assert common.seq_lens_cpu_upper_bound is not None
        lens = common.seq_lens_cpu_upper_bound.numpy()[: common.num_reqs].astype(np.int64)
        pages, room = -(-lens // self.page_size), self._buffers.shape[1]
        if pages[staged].max() > room:
            raise ValueError(f"a context of {pages.max()} pages, and buffers of {room}")
        begin, taken = first, 0
        for row in range(first, common.num_reqs + 1):
            ends = row == common.num_reqs or not staged[row]
            if begin < row and (ends or taken + pages[row] > room):
                self._waves.append(self._wave(common, begin, row, starts, lens, pages, seats))
                begin, taken = row, 0
            if ends:
                begin = row + 1
            else:
                taken += int(pages[row])
        return first if staged[first:].all() else common.num_reqs

    def _wave(
        self,
        common: CommonAttentionMetadata,
        begin: int,
        end: int,
        query_start: np.ndarray,
        lens: np.ndarray,
        pages: np.ndarray,
        seats: np.ndarray,
    ) -> Wave:
        rows, count, width = slice(begin, end), end - begin, int(pages[begin:end].max())
        own = query_start[begin : end + 1] - query_start[begin]
        before = lens[rows] - np.diff(own)
        starts = np.cumsum(pages[rows]) - pages[rows]
        table = starts[:, None] + np.arange(width)
        whose = seats[rows].clip(0)
        parts = before, lens[rows], starts, whose, own, table.ravel()
        lengths, whole, where, of, queries, tables = _on_device(parts, self._buffers.device)
        positions = np.arange(own[-1]) + np.repeat(before - own[:-1], np.diff(own))
        slots = positions + np.repeat(starts * self.page_size, np.diff(own))
        slot_mapping = torch_utils.async_tensor_h2d(slots, device=self._buffers.device)
        tokens = slice(int(query_start[begin]), int(query_start[end]))
        staged = common.replace(
            query_start_loc=queries,
            query_start_loc_cpu=torch.from_numpy(own.astype(np.int32)),
            seq_lens=whole,
            seq_lens_cpu_upper_bound=torch.from_numpy(lens[rows].astype(np.int32)),
            num_reqs=count,
            num_actual_tokens=int(own[-1]),
            max_query_len=int(np.diff(own).max()),
            max_seq_len=int(lens[rows].max()),
            block_table_tensor=tables.view(count, width),
            slot_mapping=slot_mapping,
            positions=None if common.positions is None else common.positions[tokens],
            is_prefilling=None if common.is_prefilling is None else common.is_prefilling[rows],
            req_idx=None if common.req_idx is None else common.req_idx[rows],
        )
        builder = self._builder(len(self._waves))
        metadata = builder.build(common_prefix_len=0, common_attn_metadata=staged)
        # A copy is aligned wherever the rows begin; see _on_device.
        table_of_rows = common.block_table_tensor[rows].clone()
        return Wave(tokens, metadata, table_of_rows, lengths, where, of, slot_mapping)

    def _builder(self, number: int) -> Any:
        while len(self._builders) <= number:
            self._builders.append(self._make_builder())
        return self._builders[number]

    @property
    def waves(self) -> Sequence[Wave]:
        """The waves of the step, in the order of the batch."""
        return self._waves

    def take(self, layer: int, wave: int) -> torch.Tensor:
        """The contexts of a wave in a layer; those of the next are on their way from now on.

        Layers and their waves come in order, a layer's after it has written the step's tokens. What
        was taken before may be overwritten.

        Returns:
            The buffer, [pages, kv_heads, page_size, 2 * head_size], without the step's tokens.
        """
        buffer = self._buffers[self._place]
        if self._ahead == (layer, wave):
            self._side.wait()
        else:
            self._stage(layer, wave, buffer)
        self._place = 1 - self._place
        self._ahead = self._following(layer, wave)
        if self._ahead is not None:
            following, other = self._ahead, self._buffers[self._place]
            self._side.submit(lambda: self._stage(*following, other))
        return buffer

    def _following(self, layer: int, wave: int) -> tuple[int, int] | None:
        """The layer and wave that may be staged while a layer attends to a wave."""
        if wave + 1 < len(self._waves):
            return layer, wave + 1
        if self._reads_written or layer + 1 == len(self._homes):
            return None  # the next layer has not written yet
        return layer + 1, 0

    def _stage(self, layer: int, wave: int, buffer: torch.Tensor) -> None:
        of = self._waves[wave]
        self._homes[layer].stage(buffer, of.block_table, of.lengths, of.starts, of.seats)


def _on_device(parts: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """One-dimensional arrays as int32 on a device, by one copy.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew where an address is none.
    """
    padded = [np.pad(part, (0, -len(part) % ALIGNED)) for part in parts]
    packed = np.concatenate(padded).astype(np.int32)
    on_device = torch_utils.async_tensor_h2d(packed, device=device).split(list(map(len, padded)))
    return [held[: len(part)] for held, part in zip(on_device, parts, strict=True)]
