"""The ops on the CPU: bindings of the compiled kernels in csrc/cpu.

The extension takes addresses, not tensors, so a call costs about a microsecond. Shapes and dtypes
of rows and layers are checked once, when they are bound; the extension checks at every call that
they fit one another.
"""

import torch

try:
    from vllm_kvretrieval import _cpu
except ImportError as error:
    raise ImportError(
        "vllm-kvretrieval was installed without its CPU kernels, as it is where torch is a CUDA "
        "build. To have them compiled: pip install -C wheel.cmake=true . in a checkout"
    ) from error
from vllm_kvretrieval.kernels.types import DecodeRows, LayerState

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_INT64 = torch.int64
LAYOUTS = {"vec": 0, "vec16": 0, "amx": 1}
"""How vLLM's attention lays out keys (KeyLayout in csrc/cpu/kernels.h), by its own ``isa``."""


def isa() -> str:
    """Instruction set in use: ``avx512_bf16``, ``avx512``, ``avx2`` or ``portable``."""
    return _cpu.isa()


def isas() -> list[str]:
    """Instruction sets that are compiled in, fastest first, whether they run here or not."""
    return _cpu.isas()


def use_isa(name: str) -> None:
    """Choose another instruction set, for tests and benchmarks.

    Raises:
        ValueError: It is not compiled in, or this machine lacks it.
    """
    _cpu.use_isa(name)


def update_index(key: torch.Tensor, slot_mapping: torch.Tensor, state: LayerState) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.update_index`."""
    if state.handle is None:
        state.handle = _bind_layer(state)
    _cpu.update_index(
        key.data_ptr(),
        key.shape,
        key.stride(),
        key.dtype,
        *_tokens(slot_mapping),
        state.handle,
    )


def plan_decode(query: torch.Tensor, rows: DecodeRows, state: LayerState) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.plan_decode`."""
    if rows.handle is None:
        rows.handle = _bind_rows(rows)
    if state.handle is None:
        state.handle = _bind_layer(state)
    _cpu.plan_decode(
        query.data_ptr(), query.shape, query.stride(), query.dtype, rows.handle, state.handle
    )


def index_pages(
    kv_cache: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    state: LayerState,
    layout: str,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.index_pages`."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"how vLLM's attention {layout!r} lays out keys is not known, only {[*LAYOUTS]} are"
        )
    expected = (state.pages, state.kv_heads, state.page_size, 2 * state.head_size)
    if (
        kv_cache.dtype != state.index.dtype
        or kv_cache.shape != expected
        or not kv_cache.is_contiguous()
    ):
        raise ValueError(
            f"kv_cache must be {state.index.dtype} {expected} and contiguous, got "
            f"{kv_cache.dtype} {tuple(kv_cache.shape)} with strides {kv_cache.stride()}"
        )
    if not 8 <= state.summary_size <= 128 or state.page_size % 16:
        raise ValueError(
            f"summaries of {state.summary_size} tokens in pages of {state.page_size} are not "
            "supported, only 8 to 128 in multiples of 16"
        )
    _check("pages", pages, torch.int32)
    _check("lengths", lengths, torch.int32)
    if pages.shape != lengths.shape or pages.dim() != 1:
        raise ValueError(f"{tuple(lengths.shape)} lengths for {tuple(pages.shape)} pages")
    if state.handle is None:
        state.handle = _bind_layer(state)
    _cpu.index_pages(
        kv_cache.data_ptr(),
        LAYOUTS[layout],
        pages.data_ptr(),
        lengths.data_ptr(),
        len(pages),
        state.handle,
    )


def stage_pages(source: torch.Tensor, pages: torch.Tensor, target: torch.Tensor) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.stage_pages`."""
    _, kv_heads, page_size, width = source.shape
    _check("pages", pages, torch.int32)
    if not (source.is_contiguous() and target.is_contiguous()) or source.dtype != target.dtype:
        raise ValueError("source and target must be contiguous and of one dtype")
    _cpu.stage_pages(
        source.data_ptr(),
        pages.data_ptr(),
        len(pages),
        target.data_ptr(),
        target.shape[2] // page_size,
        kv_heads,
        page_size,
        width // 2,
        source.element_size(),
    )


class RecallCache:
    """See :class:`vllm_kvretrieval.kernels.types.RecallCache`.

    Args:
        home: [units, 1, 2 * page_size, head_size]; the layer's part of the home file, mapped.
        slots: How many units fast memory holds.
        kv_heads: KV heads of the layer.
        counts: int64 [S, 3]; per request, units attended to, missed, and read from home; added to.
        file: Descriptor of the home file, and where in it the layer's part begins (bytes).

    Raises:
        RuntimeError: The threads that read ahead cannot be started.
    """

    def __init__(
        self,
        home: torch.Tensor,
        slots: int,
        kv_heads: int,
        counts: torch.Tensor,
        file: tuple[int, int],
    ) -> None:
        self.slots = torch.empty(slots, *home.shape[1:], dtype=home.dtype)
        self._tensors = home, counts  # the addresses below stay valid as long as these
        _check("counts", counts, torch.int64)
        self._cache = _cpu.RecallCache(
            home.shape[0],
            slots,
            kv_heads,
            home.shape[2] // 2,
            counts.shape[0],
            home[0].numel() * home.element_size(),
            self.slots.data_ptr(),
            home.data_ptr(),
            *file,
            counts.data_ptr(),
        )
        self.drop_pages = self._cache.drop_pages
        self.release = self._cache.release
        self.take_failed_pages = self._cache.take_failed_pages
        self.resident = self._cache.resident
        self.read_in_pieces = self._cache.read_in_pieces
        self.check = self._cache.check

    @property
    def used(self) -> int:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.used`."""
        return self._cache.used

    @property
    def pinned(self) -> int:
        """Slots that some request has pinned."""
        return self._cache.pinned

    @property
    def seconds(self) -> tuple[float, float]:
        """Time that reading ahead took in its threads, and time that steps waited for reads."""
        return self._cache.read_ahead_ns / 1e9, self._cache.waited_ns / 1e9

    def write(self, slot_mapping: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.write`."""
        self._cache.write(*_tokens(slot_mapping))

    def resolve(self, rows: DecodeRows) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.resolve`."""
        if rows.handle is None:
            rows.handle = _bind_rows(rows)
        self._cache.resolve(rows.handle)

    def prefetch(self, rows: DecodeRows, state: LayerState) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.prefetch`."""
        if rows.handle is None:
            rows.handle = _bind_rows(rows)
        if state.handle is None:
            state.handle = _bind_layer(state)
        self._cache.prefetch(rows.handle, state.handle)


class MappingGuard:
    """Keeps the process alive where part of a mapped file cannot be read.

    Whoever touches such a part finds zeros there, and may write to them, until :meth:`take` tells
    of it and maps the file there again; where that fails, the next call tells of it again. The
    first guard handles the process's ``SIGBUS``; ``faulthandler.enable()`` later takes that away.

    Args:
        memory: int8 [n]; a shared mapping of the whole file.
        fd: Descriptor of the file.
    """

    def __init__(self, memory: torch.Tensor, fd: int) -> None:
        self._memory = memory  # the mapping has to outlive the guard
        self._guard = _cpu.MappingGuard(memory.data_ptr(), memory.numel(), fd)
        self.take = self._guard.take


_PER_ROW = {
    "block_table": torch.int32,
    "seq_lens": torch.int32,
    "slots": torch.int32,
    "sink_pages": torch.int32,
    "window_pages": torch.int32,
    "select_pages": torch.int32,
    "threshold": torch.float32,
    "fresh": torch.uint8,
}


def _bind_rows(rows: DecodeRows) -> "_cpu.DecodeRows":
    count = len(rows)
    for name, dtype in _PER_ROW.items():
        tensor = getattr(rows, name)
        _check(name, tensor, dtype)
        if tensor.shape[0] < count:
            raise ValueError(f"{name} has {tensor.shape[0]} rows, seq_lens {count}")
    _check("corrected", rows.corrected, torch.int64)
    _check("page_table", rows.page_table, torch.int32)
    return _cpu.DecodeRows(
        count,
        rows.block_table.data_ptr(),
        rows.block_table.shape[1],
        rows.block_table.stride(0),
        rows.seq_lens.data_ptr(),
        rows.slots.data_ptr(),
        rows.sink_pages.data_ptr(),
        rows.window_pages.data_ptr(),
        rows.select_pages.data_ptr(),
        rows.threshold.data_ptr(),
        rows.fresh.data_ptr(),
        rows.corrected.data_ptr(),
        rows.corrected.shape[0],
        rows.page_table.data_ptr(),
        *rows.page_table.shape,
        rows.page_table.stride(0),
    )


def _bind_layer(state: LayerState) -> "_cpu.LayerState":
    if state.head_size % 16:
        raise ValueError(f"head size {state.head_size} is no multiple of 16")
    dtype, slots, parts = (
        state.index.dtype,
        state.prev_query.shape[0],
        state.page_size // state.summary_size,
    )
    if parts * state.summary_size != state.page_size or parts & (parts - 1):
        raise ValueError(
            f"summaries of {state.summary_size} tokens are no power of two in a page of "
            f"{state.page_size}"
        )
    expected = {
        "index": (dtype, (state.index.shape[0], state.kv_heads, 2, state.head_size)),
        "prev_query": (dtype, (slots, state.kv_heads * state.group, state.head_size)),
        "prev_selection": (torch.int32, (slots, state.kv_heads, state.prev_selection.shape[-1])),
    }
    for name, (dtype, shape) in expected.items():
        tensor = getattr(state, name)
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be {dtype} {shape} and contiguous, got {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    return _cpu.LayerState(
        _DTYPES[state.index.dtype],
        state.index.dtype,
        state.kv_heads,
        state.group,
        state.head_size,
        state.page_size,
        state.summary_size,
        state.scale,
        state.index.data_ptr(),
        state.index.shape[0],
        state.prev_query.data_ptr(),
        state.prev_selection.data_ptr(),
        slots,
        state.prev_selection.shape[2],
    )


def _tokens(slot_mapping: torch.Tensor) -> tuple[int, int]:
    if slot_mapping.dtype is not _INT64 or not slot_mapping.is_contiguous():
        _check("slot_mapping", slot_mapping, _INT64)
    return slot_mapping.data_ptr(), slot_mapping.shape[0]


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be {dtype} and contiguous in its last dimension, got {tensor.dtype} with "
            f"strides {tensor.stride()}"
        )
