"""Tensors as the extension takes them: addresses and sizes, checked when they are bound."""

import math

import torch

from vllm_kvretrieval import _cpu
from vllm_kvretrieval.kernels.rows import DecodeRows, Mode, Remainder
from vllm_kvretrieval.kernels.types import Chooser, ContextSelector, IndexRecords
from vllm_kvretrieval.retrieval.index.base import mean_bytes
from vllm_kvretrieval.retrieval.keeping import RATINGS
from vllm_kvretrieval.retrieval.pooling import POOLINGS, Pooling

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
INT64 = torch.int64
INDEXES: dict[str, tuple[int, list[str]]] = _cpu.INDEXES
"""Indexes with kernels (KVR_INDEXES in csrc/cpu/index/table.h): their kinds, and the names of their
parameters. Others serve by their own methods."""
TOKEN_MAJOR = "token_major"
"""The layout of a cache of rows, each token's key before its value."""
LAYOUTS = _cpu.LAYOUTS
"""The layouts of keys in a cache (KeyLayout in csrc/cpu/kernels.h); those of vLLM have the names of
its ``isa``."""
CODINGS = _cpu.CODECS
"""Codecs by name (Codec in csrc/cpu/codec.h)."""
MOST_TOKENS = 256
"""Tokens of the largest pages and entries (kTokens in csrc/cpu/filter.cpp, bounds_fn in
csrc/cpu/build.cpp)."""
MOST_SPANS = 2
"""Pages of an entry (kMostSpans in csrc/cpu/index/low_rank_score.h)."""
assert {name.upper(): number for name, number in _cpu.MODES.items()} == Mode.__members__
assert {name: Pooling[name.upper()] for name in POOLINGS} == _cpu.POOLINGS
assert _cpu.RATINGS.keys() == set(RATINGS)


PER_ROW = {
    "block_table": torch.int32,
    "seq_lens": torch.int32,
    "seats": torch.int32,
    "sink": torch.int32,
    "window": torch.int32,
    "mode": torch.uint8,
    "select": torch.int32,
    "fresh": torch.uint8,
}


def rows_handle(rows: DecodeRows) -> "_cpu.DecodeRows":
    """The rows, bound at the first call; raises ValueError where that cannot be."""
    if rows.handle is None:
        rows.handle = _bind_rows(rows)
    return rows.handle


def _bind_rows(rows: DecodeRows) -> "_cpu.DecodeRows":
    count = len(rows)
    per_row = [(name, getattr(rows, name), dtype) for name, dtype in PER_ROW.items()]
    per_row += [(name, tensor, torch.float32) for name, tensor in rows.numbers.items()]
    for name, tensor, dtype in per_row:
        check(name, tensor, dtype)
        if tensor.shape[0] < count:
            raise ValueError(f"{name} has {tensor.shape[0]} rows, seq_lens {count}")
    check_starts(rows.starts, count)
    check("corrected", rows.corrected, torch.int64)
    check("spared", rows.spared, torch.int64)
    check("lists", rows.lists, torch.int32)
    check("lengths", rows.lengths, torch.int32)
    if rows.lengths.dim() != 1:
        raise ValueError(f"lengths must have one dimension, got {tuple(rows.lengths.shape)}")
    return _cpu.DecodeRows(
        rows=count,
        block_table=rows.block_table.data_ptr(),
        block_table_width=rows.block_table.shape[1],
        block_table_stride=rows.block_table.stride(0),
        seq_lens=rows.seq_lens.data_ptr(),
        starts=0 if rows.starts is None else rows.starts.data_ptr(),
        seats=rows.seats.data_ptr(),
        sink=rows.sink.data_ptr(),
        window=rows.window.data_ptr(),
        mode=rows.mode.data_ptr(),
        select=rows.select.data_ptr(),
        fresh=rows.fresh.data_ptr(),
        corrected=rows.corrected.data_ptr(),
        corrected_seats=rows.corrected.shape[0],
        **{name: tensor.data_ptr() for name, tensor in rows.numbers.items()},
        spared=rows.spared.data_ptr(),
        spared_seats=rows.spared.shape[0],
        lists=rows.lists.data_ptr(),
        lists_rows=rows.lists.shape[0],
        lists_width=rows.lists.shape[1],
        lists_stride=rows.lists.stride(0),
        lengths=rows.lengths.data_ptr(),
        lengths_size=len(rows.lengths),
        per_token=rows.per_token,
    )


def check_starts(starts: torch.Tensor | None, rows: int) -> None:
    """Raise ValueError unless they are those of so many rows."""
    if starts is None:
        return
    check("starts", starts, torch.int32)
    if len(starts) != rows + 1:
        raise ValueError(f"starts has {len(starts)} entries, {rows} rows need {rows + 1}")


def store_handle(store: IndexRecords) -> "_cpu.Index":
    """The store, bound at the first call; raises ValueError where that cannot be."""
    if store.handle is None:
        store.handle = _bind_index(store)
    return store.handle


def _bind_index(store: IndexRecords) -> "_cpu.Index":
    size, parts, spans = store.head_size, store.parts, store.spans
    if size % 16:
        raise ValueError(f"head size {size} is no multiple of 16")
    even = parts * store.entry_tokens == spans * store.page_size
    if not even or parts & (parts - 1) or spans & (spans - 1):
        raise ValueError(
            f"entries of {store.entry_tokens} tokens are no power of two in a page of "
            f"{store.page_size}, or of such pages"
        )
    index, cache = store.index, store.cache
    if spans > 1 and (index is None or not index.spans or store.cache is None):
        raise ValueError(f"entries of {spans} pages take an index that scores each of them")
    if spans > MOST_SPANS:
        raise ValueError(f"entries have {MOST_SPANS} pages at most, not {spans}")
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
    if store.means:
        if cache is None or index is None or index.name not in INDEXES:
            raise ValueError("means of values take an index with kernels, and a cache to read")
        width += spans * mean_bytes(size)
    records = (len(store.records), store.kv_heads, width)
    if store.records.dtype != torch.uint8 or store.records.shape != records:
        raise ValueError(
            f"records must be torch.uint8 {records}, got {store.records.dtype} "
            f"{tuple(store.records.shape)}"
        )
    if not store.records.is_contiguous():
        raise ValueError(f"records must be contiguous, their strides are {store.records.stride()}")
    kind, parameters = _cpu.NO_INDEX, list[float]()
    if index is not None:
        kind, names = INDEXES.get(index.name, (_cpu.OUTSIDE, []))
        numbers = index.parameters(size, store.entry_tokens)
        parameters = [numbers[name] for name in names]
    return _cpu.Index(
        kind=kind,
        dtype=DTYPES[store.dtype],
        torch_dtype=store.dtype,
        kv_heads=store.kv_heads,
        head_size=size,
        page_size=store.page_size,
        entry_tokens=store.entry_tokens,
        parameters=parameters,
        grows=index is not None and index.name in INDEXES and index.grows,
        per_token=index is not None and index.per_token,
        records=store.records.data_ptr(),
        entries=len(store.records),
        record_bytes=width,
        cache=0 if cache is None else cache.data_ptr(),
        layout=LAYOUTS.get(store.layout, 0),
        means=store.means,
    )


def chooser_handle(chooser: Chooser) -> "_cpu.Chooser":
    """The chooser, bound at the first call; raises ValueError where that cannot be."""
    if chooser.handle is None:
        chooser.handle = _bind_chooser(chooser)
    return chooser.handle


def _bind_chooser(chooser: Chooser) -> "_cpu.Chooser":
    store, selection = chooser.store, chooser.selection
    index = store_handle(store)
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
        check("the selection's counts", counts, torch.int32)
        if counts.shape != (seats, heads):
            raise ValueError(
                f"the selection's counts must be {(seats, heads)}, got {tuple(counts.shape)}"
            )
    if chooser.rerank and store.spans > 1:
        raise ValueError(f"candidates are scored by keys, and entries have {store.spans} pages")
    if chooser.rerank and store.cache is None:
        raise ValueError("candidates are scored by the keys in the cache, and there is none")
    if chooser.remainder:
        shares = chooser.pooling is Pooling.MEAN_SOFTMAX and not chooser.rerank
        if not (store.means and store.index and store.index.estimates and shares):
            raise ValueError("a remainder takes means of values, and estimates of the attention")
    if chooser.outliers:
        tells = store.index is not None and store.index.tells_outliers
        if not (0 < chooser.outliers < 1 and tells) or chooser.rerank:
            raise ValueError(
                f"outliers={chooser.outliers} must be a share below 1, of an index that tells "
                "them, and without candidates"
            )
    return _cpu.Chooser(
        index=index,
        pooling=int(chooser.pooling),
        group=chooser.group,
        scale=chooser.scale,
        rerank=chooser.rerank,
        prev_query=selection.query.data_ptr(),
        selected=selection.chosen.data_ptr(),
        seats=seats,
        max_selected=selection.chosen.shape[2],
        counts=0 if counts is None else counts.data_ptr(),
        count_stride=0 if counts is None else counts.stride(0),
        remainder=chooser.remainder,
        outliers=chooser.outliers,
    )


def remainder_addresses(
    remainder: Remainder | None, rows: int, heads: int, head_size: int
) -> tuple[int, int]:
    """Addresses of a remainder's values and ``lse``; raises ValueError unless it has these rows."""
    if remainder is None:
        return 0, 0
    shapes = {"values": (rows, heads, head_size), "lse": (rows, heads)}
    for name, shape in shapes.items():
        tensor = getattr(remainder, name)
        if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"the remainder's {name} must be float32 {shape} and contiguous, got "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
    return remainder.values.data_ptr(), remainder.lse.data_ptr()


def selector_handle(selector: ContextSelector) -> "_cpu.ContextSelector":
    """The selector, bound at the first call; raises ValueError where it cannot be."""
    if selector.handle is not None:
        return selector.handle
    store, chosen = selector.store, selector.chosen
    if store.cache is None or store.layout not in LAYOUTS or not is_page(store.page_size):
        raise ValueError(
            f"a filter reads keys in pages of 16 to {MOST_TOKENS}, powers of two, in the layouts "
            f"{tuple(LAYOUTS)}; there are pages of {store.page_size} in {store.layout}"
        )
    if chosen.dtype != torch.int32 or chosen.dim() != 2 or not chosen.is_contiguous():
        raise ValueError(f"chosen must be int32 [seats, tokens], contiguous; got {chosen.dtype}")
    sinks, heads = selector.sinks, store.kv_heads * selector.group
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (heads,)):
        raise ValueError(f"sinks must be float32 [{heads}], got {sinks.dtype} {tuple(sinks.shape)}")
    seats, most = chosen.shape
    selector.handle = _cpu.ContextSelector(
        index=store_handle(store),
        group=selector.group,
        scale=selector.scale,
        softcap=selector.softcap,
        sinks=0 if sinks is None else sinks.data_ptr(),
        selected=chosen.data_ptr(),
        seats=seats,
        max_selected=most,
    )
    return selector.handle


def is_page(tokens: int) -> bool:
    """Whether kernels take pages of so many tokens: a power of two, from 16 on."""
    return 16 <= tokens <= MOST_TOKENS and tokens & (tokens - 1) == 0


def vectors(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    """Of queries, keys, values: what the extension checks itself."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def tokens(slot_mapping: torch.Tensor) -> tuple[int, int]:
    """Address and number of the slots that new tokens go to."""
    if slot_mapping.dtype is not INT64 or not slot_mapping.is_contiguous():
        check("slot_mapping", slot_mapping, INT64)
    return slot_mapping.data_ptr(), slot_mapping.shape[0]


def check(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless the tensor is of this dtype, and dense in its last dimension."""
    if tensor.dtype != dtype or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be {dtype} and contiguous in its last dimension, got {tensor.dtype} with "
            f"strides {tensor.stride()}"
        )


def check_rule(scale: float, softcap: float, sinks: torch.Tensor | None, heads: int) -> None:
    """Raise ValueError for what no logits can be made with."""
    if not (scale > 0 and math.isfinite(scale) and 0 <= softcap < math.inf):
        raise ValueError(f"scale={scale}, softcap={softcap} cannot be")
    if sinks is not None:
        check("sinks", sinks, torch.float32)
        if sinks.shape != (heads,):
            raise ValueError(f"sinks must be {(heads,)}, got {tuple(sinks.shape)}")


def check_cache(cache: torch.Tensor, layout: str) -> None:
    """Raise ValueError unless attention can read the cache."""
    known = layout in LAYOUTS and (layout != "amx" or cache.element_size() == 2)
    if not known or cache.shape[-1] % 32 or not cache.is_contiguous():
        raise ValueError(
            f"a contiguous cache of heads in multiples of 16 can be attended to, in the layouts "
            f"{[*LAYOUTS]} (amx: of 16 bits); got {tuple(cache.shape)} in {cache.dtype} with "
            f"strides {cache.stride()} in {layout}"
        )
