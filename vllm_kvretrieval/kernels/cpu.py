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
from vllm_kvretrieval.kernels.types import (
    Chooser,
    ContextSelector,
    DecodeRows,
    IndexStore,
    TokenLists,
)
from vllm_kvretrieval.retrieval.codec import Codec
from vllm_kvretrieval.retrieval.index import Index, pack, unpack
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.index.mean_std import MeanStd

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_INT64 = torch.int64
KINDS = {
    name: kind
    for kind, name in enumerate(
        "min_max mean mean_std bounding representative one_bit low_rank exact".split()
    )
}
"""Indexes with kernels (IndexKind in csrc/cpu/kernels.h); others serve by their own methods."""
OUTSIDE, NONE = len(KINDS), len(KINDS) + 1
ROWS = "rows"
"""The layout of a cache of rows, each token's key before its value."""
LAYOUTS = {"vec": 0, "vec16": 0, "amx": 1, ROWS: 2}
"""How a cache lays out keys (KeyLayout in csrc/cpu/kernels.h): vLLM's by its own ``isa``."""
CODINGS = {name: kind for kind, name in enumerate("raw k8v4 k4v4 k2v2".split())}
"""Codecs by name (Codec in csrc/cpu/codec.h)."""


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


def update_index(key: torch.Tensor, slot_mapping: torch.Tensor, store: IndexStore) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.update_index`."""
    if store.handle is None:
        store.handle = _bind_index(store)
    _cpu.update_index(
        key.data_ptr(),
        key.shape,
        key.stride(),
        key.dtype,
        *_tokens(slot_mapping),
        store.handle,
    )
    if store.index is not None and store.index.name not in KINDS:
        slots = slot_mapping[slot_mapping % store.entry_tokens == store.entry_tokens - 1]
        _build(store, slots[slots >= 0] // store.entry_tokens)


def plan_decode(query: torch.Tensor, rows: DecodeRows, chooser: Chooser) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.plan_decode`."""
    if rows.handle is None:
        rows.handle = _bind_rows(rows)
    if chooser.handle is None:
        chooser.handle = _bind_chooser(chooser)
    index, scores = chooser.store.index, None
    arguments = (
        query.data_ptr(),
        query.shape,
        query.stride(),
        query.dtype,
        rows.handle,
        chooser.handle,
    )
    if index is not None and index.name not in KINDS:
        _cpu.check_plan(*arguments)
        scores = _scores(index, query, rows, chooser)
    _cpu.plan_decode(
        *arguments,
        0 if scores is None else scores.data_ptr(),
        0 if scores is None else scores.shape[-1],
    )


def select_context(
    query: torch.Tensor, weights: torch.Tensor, rows: DecodeRows, selector: ContextSelector
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.select_context`."""
    if rows.handle is None:
        rows.handle = _bind_rows(rows)
    _check("weights", weights, torch.float32)
    if weights.dim() != 2 or len(weights) != len(rows) or not weights.is_contiguous():
        raise ValueError(
            f"weights must be contiguous, a row for each of {len(rows)}, got {tuple(weights.shape)}"
        )
    _cpu.select_context(
        *_vectors(query),
        weights.data_ptr(),
        weights.shape[1],
        rows.handle,
        _selector_handle(selector),
    )


def list_context(rows: DecodeRows, selector: ContextSelector, kv_heads: int) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.list_context`."""
    if rows.handle is None:
        rows.handle = _bind_rows(rows)
    _cpu.list_context(rows.handle, _selector_handle(selector), kv_heads)


def index_pages(pages: torch.Tensor, lengths: torch.Tensor, store: IndexStore) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.index_pages`."""
    if store.cache is None:
        raise ValueError("the store has no cache to read keys from")
    if not 8 <= store.entry_tokens <= 128 or store.page_size % 16:
        raise ValueError(
            f"entries of {store.entry_tokens} tokens in pages of {store.page_size} are not "
            "supported, only 8 to 128 in multiples of 16"
        )
    _check("pages", pages, torch.int32)
    _check("lengths", lengths, torch.int32)
    if pages.shape != lengths.shape or pages.dim() != 1:
        raise ValueError(f"{tuple(lengths.shape)} lengths for {tuple(pages.shape)} pages")
    if store.handle is None:
        store.handle = _bind_index(store)
    _cpu.index_pages(pages.data_ptr(), lengths.data_ptr(), len(pages), store.handle)
    if store.index is not None and store.index.name not in KINDS:
        part = torch.arange(store.parts)
        entries = pages[:, None].long() * store.parts + part
        _build(store, entries[part < lengths[:, None] // store.entry_tokens])


def read_keys(entries: torch.Tensor, store: IndexStore) -> torch.Tensor:
    """Keys of some entries as the cache has them.

    Args:
        entries: int64 [n].
        store: Over a cache whose layout is known.

    Returns:
        float32 [n, entry_tokens, kv_heads, head_size].

    Raises:
        ValueError: There is no such entry, or no cache.
    """
    if store.cache is None:
        raise ValueError("the store has no cache to read keys from")
    _check("entries", entries, torch.int64)
    if store.handle is None:
        store.handle = _bind_index(store)
    keys = torch.empty(len(entries), store.entry_tokens, store.kv_heads, store.head_size)
    _cpu.read_keys(entries.data_ptr(), len(entries), store.handle, keys.data_ptr())
    return keys


def _build(store: IndexStore, entries: torch.Tensor) -> None:
    """Records of an index without kernels."""
    if not len(entries) or not store.records.shape[-1]:
        return
    assert store.index is not None
    keys = read_keys(entries, store).transpose(1, 2).flatten(0, 1)
    fields = store.index.fields(store.head_size, store.entry_tokens)
    records = pack(fields, store.index.build(keys), store.dtype)
    store.records[entries] = records.view(len(entries), store.kv_heads, -1)


def _scores(index: Index, query: torch.Tensor, rows: DecodeRows, chooser: Chooser) -> torch.Tensor:
    """float32 [R, kv_heads, group, entries or tokens]; by an index without kernels."""
    store = chooser.store
    counts = (rows.seq_lens // store.entry_tokens).tolist()
    each = store.entry_tokens if rows.per_token else 1
    scores = torch.zeros(len(rows), store.kv_heads, chooser.group, max(counts) * each)
    fields = index.fields(store.head_size, store.entry_tokens)
    selecting = (rows.select > 0).tolist()
    for r in range(len(rows)):
        if not selecting[r]:
            continue
        count = counts[r]
        pages = rows.block_table[r, : -(-count // store.parts)].long()
        entries = (pages[:, None] * store.parts + torch.arange(store.parts)).flatten()[:count]
        grouped = query[r].float().view(store.kv_heads, chooser.group, store.head_size)
        keys = read_keys(entries, store) if index.reads_keys else None
        for head in range(store.kv_heads):
            record = unpack(fields, store.records[entries, head], store.dtype)
            if keys is not None:
                record["keys"] = keys[:, :, head]
            score = index.score_tokens if rows.per_token else index.score
            found = score(grouped[head], record, chooser.scale)
            scores[r, head, :, : count * each] = found.flatten(1)
    return scores


def stage_pages(
    source: torch.Tensor,
    pages: torch.Tensor,
    target: torch.Tensor,
    layout: str = "vec",
    rows: bool = False,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.stage_pages`."""
    _, kv_heads, page_size, width = source.shape
    _check("pages", pages, torch.int32)
    _check_staging(source, target, layout, rows)
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
        LAYOUTS[ROWS if rows else layout],
        LAYOUTS[layout],
    )


def stage_tokens(
    source: torch.Tensor, lists: TokenLists, target: torch.Tensor, layout: str = "vec"
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.stage_tokens`."""
    blocks, kv_heads, block_size, width = target.shape
    _check_staging(source, target, layout, rows=True)
    _check("entries", lists.entries, torch.int32)
    _check("lengths", lists.lengths, torch.int32)
    units = len(lists.lengths)
    if lists.run != 1 or lists.kv_heads != kv_heads or units % kv_heads:
        raise ValueError(
            f"{units} lists for {lists.kv_heads} KV heads with run={lists.run} are not the single "
            f"tokens of {kv_heads}"
        )
    if len(lists.entries) < units:
        raise ValueError(f"{units} lengths for {len(lists.entries)} lists of entries")
    if source.shape[1] != kv_heads or source.shape[3] != width or block_size % 32 or width % 32:
        raise ValueError(
            f"{tuple(source.shape)} cannot be laid out as {tuple(target.shape)}: heads have to be "
            "the same, in multiples of 16, and blocks in multiples of 32 tokens"
        )
    _cpu.stage_tokens(
        source.data_ptr(),
        source.numel() // width,
        lists.entries.data_ptr(),
        lists.entries.shape[1],
        lists.entries.stride(0),
        lists.lengths.data_ptr(),
        target.data_ptr(),
        blocks,
        units // kv_heads,
        block_size,
        kv_heads,
        width // 2,
        source.element_size(),
        LAYOUTS[layout],
    )


def _check_staging(source: torch.Tensor, target: torch.Tensor, layout: str, rows: bool) -> None:
    if not (source.is_contiguous() and target.is_contiguous()) or source.dtype != target.dtype:
        raise ValueError("source and target must be contiguous and of one dtype")
    if layout not in LAYOUTS or layout == ROWS or (layout == "amx" and not rows):
        raise ValueError(f"pages cannot be staged in the layout {layout!r}, rows={rows}")
    if layout == "amx" and source.element_size() != 2:
        raise ValueError(f"AMX has no layout for keys in {source.dtype}")


def write_rows(
    key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.write_rows`."""
    pages, kv_heads, page_size, width = cache.shape
    if not cache.is_contiguous():
        raise ValueError(f"cache must be contiguous, its strides are {cache.stride()}")
    _cpu.write_rows(
        *_vectors(key),
        *_vectors(value),
        *_tokens(slot_mapping),
        cache.data_ptr(),
        pages,
        kv_heads,
        page_size,
        width // 2,
        cache.element_size(),
        cache.dtype,
    )


def attend(
    query: torch.Tensor,
    lists: TokenLists,
    cache: torch.Tensor,
    output: torch.Tensor,
    layout: str,
    scale: float,
    lse: torch.Tensor | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.attend`."""
    page_size, width = cache.shape[-2:]
    _check("entries", lists.entries, torch.int32)
    _check("lengths", lists.lengths, torch.int32)
    units, heads = len(lists.lengths), query.shape[1]
    rows = units // lists.kv_heads
    if units % lists.kv_heads or len(lists.entries) < units or heads % lists.kv_heads:
        raise ValueError(
            f"{units} lengths and {len(lists.entries)} lists of entries for {heads} query heads do "
            f"not belong to {lists.kv_heads} KV heads"
        )
    known = layout in LAYOUTS and (layout != "amx" or cache.element_size() == 2)
    if not known or width % 32 or not cache.is_contiguous():
        raise ValueError(
            f"a contiguous cache of heads in multiples of 16 can be attended to, in the layouts "
            f"{[*LAYOUTS]} (amx: of 16 bits); got {tuple(cache.shape)} in {cache.dtype} with "
            f"strides {cache.stride()} in {layout}"
        )
    least = 1 if layout == ROWS else 16
    if lists.run < least or lists.run & (lists.run - 1) or page_size % lists.run:
        raise ValueError(
            f"run={lists.run} is no power of two from {least} on in pages of {page_size}"
        )
    if lse is not None:
        _check("lse", lse, torch.float32)
        if lse.shape != (rows, heads) or not lse.is_contiguous():
            raise ValueError(f"lse must be {(rows, heads)} and contiguous, got {tuple(lse.shape)}")
    _cpu.attend(
        *_vectors(query),
        *_vectors(output),
        0 if lse is None else lse.data_ptr(),
        lists.entries.data_ptr(),
        lists.entries.shape[1],
        lists.entries.stride(0),
        lists.lengths.data_ptr(),
        rows,
        lists.run,
        cache.data_ptr(),
        cache.numel() // width,
        LAYOUTS[layout],
        lists.kv_heads,
        heads // lists.kv_heads,
        width // 2,
        page_size,
        _DTYPES[cache.dtype],
        cache.dtype,
        scale,
    )


def encode_units(units: torch.Tensor, codec: Codec) -> torch.Tensor:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.encode_units`."""
    data = torch.empty(len(units), _unit_bytes(units, codec), dtype=torch.uint8)
    _code_units(units, codec, data, encodes=True)
    return data


def decode_units(data: torch.Tensor, codec: Codec, units: torch.Tensor) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.decode_units`."""
    _code_units(units, codec, data, encodes=False)


def _unit_bytes(units: torch.Tensor, codec: Codec) -> int:
    if units.dim() != 3 or units.shape[1] % 2 or units.dtype not in _DTYPES:
        raise ValueError(
            f"units must be [n, 2 * page_size, head_size] in {tuple(_DTYPES)}, got "
            f"{tuple(units.shape)} in {units.dtype}"
        )
    return codec.unit_bytes(units.shape[1] // 2, units.shape[2], units.dtype)


def _code_units(units: torch.Tensor, codec: Codec, data: torch.Tensor, encodes: bool) -> None:
    shape = (len(units), _unit_bytes(units, codec))
    _check("data", data, torch.uint8)
    if data.shape != shape or not (data.is_contiguous() and units.is_contiguous()):
        raise ValueError(
            f"data must be {shape}, and contiguous as the units; got {tuple(data.shape)}"
        )
    _cpu.code_units(
        CODINGS[codec.name],
        _DTYPES[units.dtype],
        units.shape[1] // 2,
        units.shape[2],
        units.data_ptr(),
        data.data_ptr(),
        len(units),
        encodes,
    )


class RecallCache:
    """See :class:`vllm_kvretrieval.kernels.types.RecallCache`.

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
        RuntimeError: The threads that read ahead cannot be started.
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
        _check("counts", counts, torch.int64)
        self.kv_heads, self.codec = kv_heads, codec
        encoded = None if codec is None else _bind_encoded(home, kv_heads, file, codec)
        self._kept = home, counts, encoded  # the addresses below stay valid as long as these
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
            encoded,
        )
        self.abandon = self._cache.abandon
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
    def bytes_per_read(self) -> int:
        """Of a unit in home."""
        slot = self.slots[0, 0]
        if self.codec is None:
            return slot.nbytes
        return self.codec.unit_bytes(slot.shape[0] // 2, slot.shape[1], slot.dtype)

    @property
    def seconds(self) -> tuple[float, float]:
        """Time that reading ahead took in its threads, and time that steps waited for reads."""
        return self._cache.read_ahead_ns / 1e9, self._cache.waited_ns / 1e9

    def write(self, slot_mapping: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.write`."""
        self._cache.write(*_tokens(slot_mapping))

    def close(self, pages: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.close`."""
        _check("pages", pages, torch.int64)
        self._cache.close(pages.data_ptr(), len(pages))

    def stage(self, pages: torch.Tensor, target: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.stage`."""
        _check("pages", pages, torch.int64)
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
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.resolve`."""
        if rows.handle is None:
            rows.handle = _bind_rows(rows)
        self._cache.resolve(rows.handle)

    def prefetch(self, rows: DecodeRows, chooser: Chooser) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.prefetch`."""
        if rows.handle is None:
            rows.handle = _bind_rows(rows)
        if chooser.handle is None:
            chooser.handle = _bind_chooser(chooser)
        self._cache.prefetch(rows.handle, chooser.handle)


class TokenRecall:
    """See :class:`vllm_kvretrieval.kernels.tokens.TokenRecall`.

    Args:
        homes: Of each layer, [pages, kv_heads, page_size, 2 * head_size]; its KV cache, of rows.
        memories: Of each layer, [S, kv_heads, capacity, 2 * head_size]; written.
        counts: int64 [S, 3]; per request, tokens (times KV heads and layers) attended to, missed,
            and read from home; added to. A step's own new tokens are no misses.
        shared: Whether one list is for all heads.

    Raises:
        ValueError: Homes or memories differ in shape, or there are more tokens than 31 bits number.
        RuntimeError: The threads that read ahead cannot be started.
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
        _check("counts", counts, torch.int64)
        if memory.shape[1::2] != (kv_heads, width) or counts.shape != (seats, 3):
            raise ValueError(
                f"memory {tuple(memory.shape)} and counts {tuple(counts.shape)} do not fit a home "
                f"of {kv_heads} KV heads and {width} elements per token"
            )
        self.layers, self.bytes_per_read = len(homes), width * home.element_size()
        self._tensors = homes, memories, counts  # the addresses below stay valid as long as these
        self._recall = _cpu.TokenRecall(
            seats,
            kv_heads,
            page_size,
            capacity,
            1 if shared else kv_heads,
            pages,
            self.bytes_per_read,
            counts.data_ptr(),
            [memory.data_ptr() for memory in memories],
            [home.data_ptr() for home in homes],
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
        """As of :class:`RecallCache`."""
        return self._recall.read_ahead_ns / 1e9, self._recall.waited_ns / 1e9

    def recall(self, rows: DecodeRows) -> None:
        """See :meth:`vllm_kvretrieval.kernels.tokens.TokenRecall.recall`."""
        if rows.handle is None:
            rows.handle = _bind_rows(rows)
        self._recall.recall(rows.handle)


def _bind_encoded(
    home: torch.Tensor, kv_heads: int, file: tuple[int, int], codec: Codec
) -> "_cpu.EncodedHome":
    if codec.name not in CODINGS or home.dtype not in _DTYPES or len(home) % kv_heads:
        raise ValueError(
            f"{len(home)} units of {kv_heads} KV heads in {home.dtype} cannot be encoded by "
            f"{codec.name}: codecs are {', '.join(CODINGS)}"
        )
    return _cpu.EncodedHome(
        CODINGS[codec.name],
        _DTYPES[home.dtype],
        len(home) // kv_heads,
        kv_heads,
        home.shape[2] // 2,
        home.shape[3],
        home.data_ptr(),
        *file,
    )


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
    "seats": torch.int32,
    "sink": torch.int32,
    "window": torch.int32,
    "select": torch.int32,
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
    _check("lists", rows.lists, torch.int32)
    _check("lengths", rows.lengths, torch.int32)
    if rows.lengths.dim() != 1:
        raise ValueError(f"lengths must have one dimension, got {tuple(rows.lengths.shape)}")
    return _cpu.DecodeRows(
        count,
        rows.block_table.data_ptr(),
        rows.block_table.shape[1],
        rows.block_table.stride(0),
        rows.seq_lens.data_ptr(),
        rows.seats.data_ptr(),
        rows.sink.data_ptr(),
        rows.window.data_ptr(),
        rows.select.data_ptr(),
        rows.threshold.data_ptr(),
        rows.fresh.data_ptr(),
        rows.corrected.data_ptr(),
        rows.corrected.shape[0],
        rows.lists.data_ptr(),
        *rows.lists.shape,
        rows.lists.stride(0),
        rows.lengths.data_ptr(),
        len(rows.lengths),
        rows.per_token,
    )


def _bind_index(store: IndexStore) -> "_cpu.Index":
    size, parts = store.head_size, store.page_size // store.entry_tokens
    if size % 16:
        raise ValueError(f"head size {size} is no multiple of 16")
    if parts * store.entry_tokens != store.page_size or parts & (parts - 1):
        raise ValueError(
            f"entries of {store.entry_tokens} tokens are no power of two in a page of "
            f"{store.page_size}"
        )
    index, cache = store.index, store.cache
    if index is not None and (why := index.check(store.entry_tokens)):
        raise ValueError(f"index {index.name}: {why}")
    if cache is not None:
        if store.layout not in LAYOUTS:
            raise ValueError(
                f"how vLLM's attention {store.layout!r} lays out keys is not known, only "
                f"{[*LAYOUTS]} are"
            )
        shape = (store.pages, store.kv_heads, store.page_size, 2 * size)
        if cache.dtype != store.dtype or cache.shape != shape or not cache.is_contiguous():
            raise ValueError(
                f"cache must be {store.dtype} {shape} and contiguous, got {cache.dtype} "
                f"{tuple(cache.shape)} with strides {cache.stride()}"
            )
    elif index is not None and not index.grows:
        raise ValueError(f"an index of {index.name} reads the keys in the cache, and has none")
    width = 0 if index is None else index.record_bytes(size, store.entry_tokens, store.dtype)
    records = (len(store.records), store.kv_heads, width)
    if store.records.dtype != torch.uint8 or store.records.shape != records:
        raise ValueError(
            f"records must be torch.uint8 {records}, got {store.records.dtype} "
            f"{tuple(store.records.shape)}"
        )
    if not store.records.is_contiguous():
        raise ValueError(f"records must be contiguous, their strides are {store.records.stride()}")
    return _cpu.Index(
        NONE if index is None else KINDS.get(index.name, OUTSIDE),
        _DTYPES[store.dtype],
        store.dtype,
        store.kv_heads,
        size,
        store.page_size,
        store.entry_tokens,
        index.directions(size) if isinstance(index, LowRank) else 0,
        index.spread if isinstance(index, MeanStd) else 0.0,
        store.records.data_ptr(),
        len(store.records),
        width,
        0 if cache is None else cache.data_ptr(),
        LAYOUTS.get(store.layout, 0),
    )


def _bind_chooser(chooser: Chooser) -> "_cpu.Chooser":
    store, selection = chooser.store, chooser.selection
    if store.handle is None:
        store.handle = _bind_index(store)
    seats, heads = len(selection.query), store.kv_heads
    expected = {
        "query": (store.dtype, (seats, heads * chooser.group, store.head_size)),
        "chosen": (torch.int32, (seats, heads, selection.chosen.shape[-1])),
    }
    for name, (dtype, shape) in expected.items():
        tensor = getattr(selection, name)
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"the selection's {name} must be {dtype} {shape} and contiguous, got "
                f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    counts = selection.counts
    if counts is not None:
        _check("the selection's counts", counts, torch.int32)
        if counts.shape != (seats, heads):
            raise ValueError(
                f"the selection's counts must be {(seats, heads)}, got {tuple(counts.shape)}"
            )
    if chooser.rerank and store.cache is None:
        raise ValueError("candidates are scored by the keys in the cache, and there is none")
    return _cpu.Chooser(
        store.handle,
        int(chooser.pooling),
        chooser.group,
        chooser.scale,
        chooser.rerank,
        selection.query.data_ptr(),
        selection.chosen.data_ptr(),
        seats,
        selection.chosen.shape[2],
        0 if counts is None else counts.data_ptr(),
        0 if counts is None else counts.stride(0),
    )


def _selector_handle(selector: ContextSelector) -> "_cpu.ContextSelector":
    if selector.handle is not None:
        return selector.handle
    store, chosen = selector.store, selector.chosen
    if store.cache is None or store.layout not in LAYOUTS or store.page_size % 16:
        raise ValueError(
            f"a filter reads keys in pages of multiples of 16, in the layouts {tuple(LAYOUTS)}; "
            f"there are pages of {store.page_size} in {store.layout}"
        )
    if chosen.dtype != torch.int32 or chosen.dim() != 2 or not chosen.is_contiguous():
        raise ValueError(f"chosen must be int32 [seats, tokens], contiguous; got {chosen.dtype}")
    if store.handle is None:
        store.handle = _bind_index(store)
    selector.handle = _cpu.ContextSelector(
        store.handle, selector.group, selector.scale, chosen.data_ptr(), *chosen.shape
    )
    return selector.handle


def _vectors(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


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
