"""The base class of indexes. An index makes records of keys, and scores them for queries."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

MEAN_STEPS, LEAST_SCALE = 127, 1e-8


class Field(NamedTuple):
    """One field of a record.

    Attributes:
        name: The key in the mappings of :meth:`Index.build` and :meth:`Index.score`.
        dtype: The dtype of its elements; None: the KV cache's.
        shape: The shape of one record's field.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the field in one record, with a KV cache in ``dtype``."""
        return (self.dtype or dtype).itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class IndexKind:
    """What is kept of the entries of each layer.

    Attributes:
        index: The index.
        entry_tokens: Tokens per entry.
        means: How many means of its values are kept of an entry: one, or one of each of its pages.
    """

    index: "Index"
    entry_tokens: int
    means: int = 0

    def record_bytes(self, head_size: int, dtype: torch.dtype, alignment: int = 1) -> int:
        """Bytes of the record of an entry of one KV head."""
        own = self.index.record_bytes(head_size, self.entry_tokens, dtype, alignment)
        return own + self.means * mean_bytes(head_size)


class Index(ABC):
    """An index over entries. An entry is ``entry_tokens`` adjacent tokens of a page, in a KV head.

    A subclass is a frozen dataclass of its parameters; equal indexes share their records. Its
    methods are the specification in plain torch, which kernels have to agree with. Indexes of other
    packages have no kernels and are served by these methods.

    Attributes:
        name: The name in the option ``index``.
        grows: Whether an unfinished entry has a record of the tokens that it has so far. Otherwise
            an entry has a record when it is complete. False in indexes of other packages.
        per_token: Whether the index also scores single tokens; see :meth:`score_tokens`.
        reads_keys: Whether scoring reads keys from the KV cache. Records then have a field ``keys``
            that is not stored, float32 [entry_tokens, head_size].
        spans: Whether an entry may be all tokens of several pages, each of which has a score of its
            own; see :meth:`score_pages`. False in indexes of other packages.
        estimates: Whether a score estimates the attention that an entry gets: the log-sum-exp of
            ``q.k * scale`` over its tokens. Others bound it, or rate entries otherwise.
        tells_outliers: Whether records have a field ``least_cosine``, float32 [1], the lowest
            cosine of a key of the entry with their mean. False in indexes of other packages.
    """

    name: ClassVar[str]
    grows: ClassVar[bool] = False
    per_token: ClassVar[bool] = False
    reads_keys: ClassVar[bool] = False
    estimates: ClassVar[bool] = False
    spans: ClassVar[bool] = False
    tells_outliers: ClassVar[bool] = False

    def check(self, entry_tokens: int) -> str:
        """The reason why entries of this size are impossible; empty if they are possible."""
        return ""

    def parameters(self, head_size: int, entry_tokens: int) -> dict[str, float]:
        """The numbers of the index for entries of this size, by name, as kernels take them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @abstractmethod
    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """The fields of a record, in the order in which they are stored, without gaps."""

    @abstractmethod
    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """Make records.

        Args:
            keys: float32 [n, entry_tokens, head_size]; keys of the KV cache, with its precision.

        Returns:
            The fields, [n, *shape] each; they are rounded to their dtypes when they are stored.
        """

    @abstractmethod
    def score(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """Score records for the query heads of their KV head.

        Args:
            query: float32 [group, head_size].
            record: The fields, [n, *shape] each, in their dtypes.
            scale: Softmax scale.

        Returns:
            float32 [group, n]. The unit is that of ``q.k * scale`` or of its log-sum-exp over the
            entry's tokens; pooling takes exponentials of it.
        """

    def score_tokens(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """Score the single tokens of entries; only for indexes with ``per_token``.

        Args:
            query, record, scale: See :meth:`score`.

        Returns:
            float32 [group, n, entry_tokens]; in units of ``q.k * scale``.
        """
        raise NotImplementedError(f"an index of {self.name} scores entries, not tokens")

    def score_pages(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float, pages: int
    ) -> torch.Tensor:
        """Score the pages of entries; only for indexes with ``spans``.

        Args:
            query, record, scale: See :meth:`score`.
            pages: Pages of an entry.

        Returns:
            float32 [group, n, pages]; in the unit of :meth:`score`.
        """
        raise NotImplementedError(f"an index of {self.name} scores whole entries")

    def record_bytes(
        self, head_size: int, entry_tokens: int, dtype: torch.dtype, alignment: int = 1
    ) -> int:
        """Bytes of the record of an entry of one KV head; see :func:`pack` for ``alignment``."""
        return _places(self.fields(head_size, entry_tokens), dtype, alignment)[-1]


def mean_bytes(head_size: int) -> int:
    """Bytes that the mean of an entry's values takes in its record; see :func:`pack_means`."""
    return 2 + head_size


def pack_means(values: torch.Tensor) -> torch.Tensor:
    """The means of tokens' values as records end with them.

    A scale in bfloat16 is followed by a whole number of it per channel, in 8 bits. The scale is
    infinite if a mean is not finite; then it says nothing.

    Args:
        values: float32 [n, means, tokens, head_size].

    Returns:
        uint8 [n, means * (2 + head_size)].
    """
    mean = values.mean(2)
    finite = mean.isfinite().all(2, keepdim=True)
    scale = (mean.abs().amax(2, keepdim=True) / MEAN_STEPS).clamp(min=LEAST_SCALE).bfloat16()
    whole = (mean / scale.float()).round().clamp(-MEAN_STEPS, MEAN_STEPS)
    whole = whole.where(finite, torch.zeros(())).to(torch.int8)
    scale = scale.where(finite, torch.tensor(math.inf, dtype=torch.bfloat16))
    return torch.cat([scale.contiguous().view(torch.uint8), whole.view(torch.uint8)], 2).flatten(1)


def unpack_means(records: torch.Tensor, means: int, head_size: int) -> torch.Tensor:
    """The means that records end with, float32 [n, means, head_size]; NaN: there is none."""
    ends = records[:, -means * mean_bytes(head_size) :].unflatten(1, (means, -1))
    scale = ends[..., :2].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
    return ends[..., 2:].view(torch.int8).float() * scale.where(scale.isfinite(), scale * 0)


def _places(fields: tuple[Field, ...], dtype: torch.dtype, alignment: int) -> list[int]:
    """The bytes of a record where its fields begin, and the one where it ends."""
    starts = [0]
    for field in fields:
        end = starts[-1] + field.bytes(dtype)
        starts.append(-(-end // alignment) * alignment)
    return starts


def pack(
    fields: tuple[Field, ...],
    record: dict[str, torch.Tensor],
    dtype: torch.dtype,
    alignment: int = 1,
) -> torch.Tensor:
    """Pack fields, [n, *shape] each, into records, uint8 [n, record_bytes].

    Fields begin, and records end, at multiples of ``alignment`` bytes, with zeros in between.
    """
    stored = [
        record[field.name].to(field.dtype or dtype).contiguous().flatten(1).view(torch.uint8)
        for field in fields
    ]
    padded = [F.pad(part, (0, -part.shape[1] % alignment)) for part in stored]
    return torch.cat(padded, dim=1)


def unpack(
    fields: tuple[Field, ...], records: torch.Tensor, dtype: torch.dtype, alignment: int = 1
) -> dict[str, torch.Tensor]:
    """Reverse :func:`pack`."""
    record = {}
    for field, start in zip(fields, _places(fields, dtype, alignment), strict=False):
        part = records[:, start : start + field.bytes(dtype)]
        part = part.clone(memory_format=torch.contiguous_format)  # aligned, a single one too
        record[field.name] = part.view(field.dtype or dtype).view(len(records), *field.shape)
    return record
