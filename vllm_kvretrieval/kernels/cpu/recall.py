"""The ops that move units between fast memory and a slow home, and encode them there."""

import torch

from vllm_kvretrieval import _cpu
from vllm_kvretrieval.kernels.cpu.binding import (
    CODINGS,
    DTYPES,
    check,
    chooser_handle,
    rows_handle,
    tokens,
)
from vllm_kvretrieval.kernels.rows import DecodeRows, TokenLists
from vllm_kvretrieval.kernels.types import Chooser
from vllm_kvretrieval.retrieval.codec import Codec


def encode_units(units: torch.Tensor, codec: Codec) -> torch.Tensor:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.encode_units`."""
    data = torch.empty(len(units), _unit_bytes(units, codec), dtype=torch.uint8)
    _code_units(units, codec, data, encodes=True)
    return data


def decode_units(data: torch.Tensor, codec: Codec, units: torch.Tensor) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.decode_units`."""
    _code_units(units, codec, data, encodes=False)


def _unit_bytes(units: torch.Tensor, codec: Codec) -> int:
    if units.dim() != 3 or units.shape[1] % 2 or units.dtype not in DTYPES:
        raise ValueError(
            f"units must be [n, 2 * page_size, head_size] in {tuple(DTYPES)}, got "
            f"{tuple(units.shape)} in {units.dtype}"
        )
    return codec.unit_bytes(units.shape[1] // 2, units.shape[2], units.dtype)


def _code_units(units: torch.Tensor, codec: Codec, data: torch.Tensor, encodes: bool) -> None:
    shape = (len(units), _unit_bytes(units, codec))
    check("data", data, torch.uint8)
    if data.shape != shape or not (data.is_contiguous() and units.is_contiguous()):
        raise ValueError(
            f"data must be {shape}, and contiguous as the units; got {tuple(data.shape)}"
        )
    _cpu.code_units(
        CODINGS[codec.name],
        DTYPES[units.dtype],
        units.shape[1] // 2,
        units.shape[2],
        units.data_ptr(),
        data.data_ptr(),
        len(units),
        encodes,
    )


class RecallCache:
    """See :class:`vllm_kvretrieval.kernels.recall.RecallCache`.

    Args:
        home: [units, 1, 2 * page_size, head_size]; the layer's part of the home file, mapped.
        slots: How many units fast memory holds.
        kv_heads: KV heads of the layer.
        counts: int64 [S, 3]; per request, units attended to, missed, and read from home; added to.
        file: Descriptor of the home file, and where in it the layer's part begins (bytes).
        codec: What the file holds units by; ``home`` is then where open pages lie, and home has
            nothing yet. None: as slots hold them.

    Raises:
        ValueError: The codec has no kernel, or does not take such units.
        OSError: The threads that read ahead cannot be started.
    """

    def __init__(
        self,
        home: torch.Tensor,
        slots: int,
        kv_heads: int,
        counts: torch.Tensor,
        file: tuple[int, int],
        codec: Codec | None = None,
    ) -> None:
        self.slots = torch.empty(slots, *home.shape[1:], dtype=home.dtype)
        check("counts", counts, torch.int64)
        self.kv_heads, self.codec = kv_heads, codec
        encoded = None if codec is None else _bind_encoded(home, kv_heads, file, codec)
        fd, offset = file
        self._cache = _cpu.RecallCache(
            units=home.shape[0],
            slots=slots,
            kv_heads=kv_heads,
            page_size=home.shape[2] // 2,
            requests=counts.shape[0],
            unit_bytes=home[0].numel() * home.element_size(),
            slot_memory=self.slots.data_ptr(),
            home=home.data_ptr(),
            fd=fd,
            offset=offset,
            counts=counts.data_ptr(),
            encoded=encoded,
            memory=(self.slots, home, counts),  # stays until the last read has ended
        )
        self.wait = self._cache.wait
        self.abandon = self._cache.abandon
        self.adopt = self._cache.adopt
        self.closed = self._cache.closed
        self.drop_pages = self._cache.drop_pages
        self.release = self._cache.release
        self.take_failed_pages = self._cache.take_failed_pages
        self.take_error = self._cache.take_error
        self.resident = self._cache.resident
        self.read_in_pieces = self._cache.read_in_pieces
        self.check = self._cache.check

    @property
    def used(self) -> int:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.used`."""
        return self._cache.used

    @property
    def pinned(self) -> int:
        """Slots that some request has pinned."""
        return self._cache.pinned

    @property
    def bytes_per_read(self) -> int:
        """Bytes of a unit in home."""
        slot = self.slots[0, 0]
        if self.codec is None:
            return slot.nbytes
        return self.codec.unit_bytes(slot.shape[0] // 2, slot.shape[1], slot.dtype)

    @property
    def seconds(self) -> tuple[float, float]:
        """Time that reading ahead took in its threads, and time that steps waited for reads."""
        return self._cache.read_ahead_ns / 1e9, self._cache.waited_ns / 1e9

    def write(self, slot_mapping: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.write`."""
        self._cache.write(*tokens(slot_mapping))

    def close(self, pages: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.close`."""
        check("pages", pages, torch.int64)
        self._cache.close(pages.data_ptr(), len(pages))

    def stage(self, pages: torch.Tensor, target: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.stage`."""
        check("pages", pages, torch.int64)
        page_size, size = self.slots.shape[2] // 2, self.slots.shape[3]
        parts = target.shape[2] // page_size
        shape = (self.kv_heads, parts * page_size, 2 * size)
        if (
            target.shape[1:] != shape
            or target.dtype != self.slots.dtype
            or not target.is_contiguous()
            or len(pages) > len(target) * parts
        ):
            raise ValueError(
                f"{len(pages)} pages are staged in blocks {shape} of {self.slots.dtype}, "
                f"contiguous; got {tuple(target.shape)} of {target.dtype}"
            )
        self._cache.stage(pages.data_ptr(), len(pages), target.data_ptr(), parts)

    def resolve(self, rows: DecodeRows) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.resolve`."""
        self._cache.resolve(rows_handle(rows))

    def stream(self, rows: DecodeRows, late: TokenLists) -> bool:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.stream`."""
        check("late entries", late.entries, torch.int32)
        check("late lengths", late.lengths, torch.int32)
        size, width = late.entries.shape
        return self._cache.stream(
            rows_handle(rows),
            late.entries.data_ptr(),
            min(size, len(late.lengths)),
            width,
            late.entries.stride(0),
            late.lengths.data_ptr(),
        )

    def prefetch(self, rows: DecodeRows, chooser: Chooser) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.prefetch`."""
        self._cache.prefetch(rows_handle(rows), chooser_handle(chooser))


class TokenRecall:
    """See :class:`vllm_kvretrieval.kernels.tokens.TokenRecall`.

    Args:
        homes: Each layer's KV cache, of rows: [pages, kv_heads, page_size, 2 * head_size].
        memories: Each layer's memory, [S, kv_heads, capacity, 2 * head_size]; written.
        counts: int64 [S, 3]; per request, tokens (times KV heads and layers) attended to, missed,
            and read from home; added to. A step's own new tokens are no misses.
        shared: Whether one list is for all heads.

    Raises:
        ValueError: Homes or memories differ in shape, or there are more tokens than 31 bits number.
        OSError: The threads that read ahead cannot be started.
    """

    def __init__(
        self,
        homes: list[torch.Tensor],
        memories: list[torch.Tensor],
        counts: torch.Tensor,
        shared: bool,
    ) -> None:
        home, memory = homes[0], memories[0]
        pages, kv_heads, page_size, width = home.shape
        seats, _, capacity, _ = memory.shape
        for like, others in ((home, homes), (memory, memories)):
            for other in others:
                if other.shape != like.shape or other.dtype != home.dtype:
                    raise ValueError("the layers' homes and memories must be alike")
                if not other.is_contiguous():
                    raise ValueError(f"a layer must be contiguous, strides are {other.stride()}")
        check("counts", counts, torch.int64)
        if memory.shape[1::2] != (kv_heads, width) or counts.shape != (seats, 3):
            raise ValueError(
                f"memory {tuple(memory.shape)} and counts {tuple(counts.shape)} do not fit a home "
                f"of {kv_heads} KV heads and {width} elements per token"
            )
        self.layers, self.bytes_per_read = len(homes), width * home.element_size()
        self._recall = _cpu.TokenRecall(
            requests=seats,
            kv_heads=kv_heads,
            page_size=page_size,
            capacity=capacity,
            lists=1 if shared else kv_heads,
            pages=pages,
            token_bytes=self.bytes_per_read,
            counts=counts.data_ptr(),
            memory=[memory.data_ptr() for memory in memories],
            homes=[home.data_ptr() for home in homes],
            tensors=(homes, memories, counts),  # stay until the last read has ended
        )
        self.wait = self._recall.wait
        self.release = self._recall.release
        self.check = self._recall.check

    @property
    def used(self) -> int:
        """See :meth:`vllm_kvretrieval.kernels.tokens.TokenRecall.used`."""
        return self._recall.used

    @property
    def seconds(self) -> tuple[float, float]:
        """See :class:`RecallCache`."""
        return self._recall.read_ahead_ns / 1e9, self._recall.waited_ns / 1e9

    def recall(self, rows: DecodeRows) -> None:
        """See :meth:`vllm_kvretrieval.kernels.tokens.TokenRecall.recall`."""
        self._recall.recall(rows_handle(rows))


def _bind_encoded(
    home: torch.Tensor, kv_heads: int, file: tuple[int, int], codec: Codec
) -> "_cpu.EncodedHome":
    if codec.name not in CODINGS or home.dtype not in DTYPES or len(home) % kv_heads:
        raise ValueError(
            f"{len(home)} units of {kv_heads} KV heads in {home.dtype} cannot be encoded by "
            f"{codec.name}: codecs are {', '.join(CODINGS)}"
        )
    fd, offset = file
    return _cpu.EncodedHome(
        codec=CODINGS[codec.name],
        dtype=DTYPES[home.dtype],
        pages=len(home) // kv_heads,
        kv_heads=kv_heads,
        page_size=home.shape[2] // 2,
        head_size=home.shape[3],
        raw=home.data_ptr(),
        fd=fd,
        offset=offset,
    )


class MappingGuard:
    """Keeps the process alive where part of a mapped file cannot be read.

    Whoever touches such a part finds zeros there, and may write to them, until :meth:`take` tells
    of it and maps the file there again; where that fails, the next call tells of it again. The
    first guard handles the process's ``SIGBUS``; ``faulthandler.enable()`` later takes that away.

    Args:
        memory: int8 [n]; a shared mapping of the whole file.
        fd: Descriptor of the file.
        scattered: Whether the system was told that it is read in scattered pieces
            (``MADV_RANDOM``).

    Raises:
        OSError: The signal cannot be handled.
    """

    def __init__(self, memory: torch.Tensor, fd: int, scattered: bool = False) -> None:
        self._memory = memory  # the mapping has to outlive the guard
        self._guard = _cpu.MappingGuard(memory.data_ptr(), memory.numel(), fd, scattered)
        self.take = self._guard.take
