"""Units in few bits beside their outliers, which stay as they are.

These are KVQuant's dense and sparse parts (section 3.4). Of the rows of a unit's keys, and apart
from them of its values, :func:`outlier_count` numbers are outliers. Each row offers its lowest
element and its highest, and each is worth the length by which the row's range shrinks without it.
Those of most worth are the outliers, of equal ones the earlier. A row is fitted to the elements
that are left.

A row that cannot be encoded offers NaN, which is worth nothing, at its first element.
"""

from typing import NamedTuple

import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.codec.quantised import K2V2, K4V4, Quantised
from vllm_kvretrieval.retrieval.codec.rows import encodable, from_bytes, to_bytes

MOST_ELEMENTS = 1 << 16
"""Elements of the keys of a unit that a position can tell apart."""


class Outliers(NamedTuple):
    """Outliers of units, in the order of their rows.

    Attributes:
        positions: int64 [n, count]; in the unit's rows, one behind the other.
        elements: float32 [n, count]; NaN in a row that cannot be encoded.
        rest: float32 [n, rows, elements]; the rows, with an element that is left in place of each
            outlier.
    """

    positions: torch.Tensor
    elements: torch.Tensor
    rest: torch.Tensor


def outlier_count(rows: int, elements: int) -> int:
    """Outliers in so many rows: one in 64 elements, and no more than rows."""
    return min(rows * elements // 64, rows)


def find_outliers(rows: torch.Tensor) -> Outliers:
    """Outliers of units of rows, float32 [n, rows, elements]."""
    _, count, length = rows.shape
    known = encodable(rows)[..., None]
    ordered = rows.sort(-1).values
    ends, left = (
        torch.where(known, ordered[..., places], torch.nan) for places in ([0, -1], [1, -2])
    )
    worth = torch.where(known, (ends - left).abs(), 0.0).flatten(1)
    best = worth.sort(dim=-1, descending=True, stable=True).indices
    taken = best[:, : outlier_count(count, length)].sort(-1).values
    places = torch.stack([rows.argmin(-1), rows.argmax(-1)], -1) * known
    places += torch.arange(count)[:, None] * length
    positions, elements, instead = (x.flatten(1).gather(1, taken) for x in (places, ends, left))
    rest = lay_over(rows, positions, instead)
    return Outliers(positions, elements + 0.0, rest)  # zero has no sign


def lay_over(rows: torch.Tensor, positions: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """Rows with other elements at some positions; positions beyond the rows count for nothing."""
    flat = rows.flatten(1)
    beyond = flat.shape[1]
    flat = torch.cat([flat, flat[:, :1]], 1)
    return flat.scatter(1, positions.clamp(max=beyond), elements)[:, :beyond].view(rows.shape)


class Sparse(Quantised):
    """A codec of rows whose outliers are kept apart.

    An encoded unit is that of the dense codec, then the positions of the outliers of its keys in
    16 bits and these outliers in the KV cache's dtype, then those of its values.
    """

    def _lists(self, page_size: int, head_size: int, dtype: torch.dtype) -> list[int]:
        sizes = (head_size, page_size), (page_size, head_size)
        return [bits * outlier_count(*size) for size in sizes for bits in (2, dtype.itemsize)]

    def unit_bytes(self, page_size: int, head_size: int, dtype: torch.dtype) -> int:
        if page_size * head_size > MOST_ELEMENTS:
            raise RetrievalConfigError(
                f"kv_retrieval.codec={self.name} takes units of up to {MOST_ELEMENTS} elements, "
                f"not of {page_size} tokens of {head_size} channels; use smaller pages "
                "(page_size), or a codec without outliers."
            )
        lists = self._lists(page_size, head_size, dtype)
        return super().unit_bytes(page_size, head_size, dtype) + sum(lists)

    def _fitted(self, rows: torch.Tensor) -> torch.Tensor:
        return find_outliers(rows).rest

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        parts = [super().encode(keys, values)]
        for rows in self._rows(keys, values):
            found = find_outliers(rows)
            elements = found.elements.to(keys.dtype).view(torch.uint8)
            parts += [to_bytes(found.positions), elements]
        return torch.cat(parts, 1)

    def decode(
        self, data: torch.Tensor, page_size: int, head_size: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dense = super().unit_bytes(page_size, head_size, dtype)
        sizes = [dense, *self._lists(page_size, head_size, dtype)]
        first, *lists = data.split(sizes, 1)
        keys, values = super().decode(first, page_size, head_size, dtype)
        rows = keys.transpose(1, 2), values
        keys, values = (
            lay_over(dense, from_bytes(positions).long(), elements.contiguous().view(dtype))
            for dense, positions, elements in zip(rows, lists[::2], lists[1::2], strict=True)
        )
        return keys.transpose(1, 2), values

    def error_bounds(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bounds = super().error_bounds(keys, values)
        rows = bounds[0].transpose(1, 2), bounds[1]
        by_channel, by_token = (
            lay_over(bound, found.positions, 0 * found.elements)
            for bound, found in zip(rows, map(find_outliers, self._rows(keys, values)), strict=True)
        )
        return by_channel.transpose(1, 2), by_token


class K4V4Sparse(Sparse, K4V4):
    """``k4v4`` beside outliers."""

    name = "k4v4_sparse"
    meaning = "4-bit keys and values, outliers as they are"


class K2V2Sparse(Sparse, K2V2):
    """``k2v2`` beside outliers."""

    name = "k2v2_sparse"
    meaning = "2-bit keys and values, outliers as they are"
