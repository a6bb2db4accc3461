"""What a step does to tensors; see :class:`vllm_kvretrieval.kernels.ops.Ops`."""

import math

import torch

from vllm_kvretrieval import _cpu
from vllm_kvretrieval.kernels.cpu.binding import (
    DTYPES,
    KINDS,
    LAYOUTS,
    ROWS,
    check,
    chooser_handle,
    rows_handle,
    selector_handle,
    store_handle,
    tokens,
    vectors,
)
from vllm_kvretrieval.kernels.kept import KeptTokens
from vllm_kvretrieval.kernels.rows import DecodeRows, Mode, PromptLists, TokenLists
from vllm_kvretrieval.kernels.types import (
    Chooser,
    ContextSelector,
    IndexStore,
    Merge,
)
from vllm_kvretrieval.retrieval.index import Index, pack, unpack
from vllm_kvretrieval.retrieval.keeping import RATINGS, STAMPED, Keeping

MOST_TOKENS_OF_PAGE = 128
"""What a prompt's attention takes at once (kTile in csrc/cpu/prompt/product.h)."""


def isa() -> str:
    """Instruction set in use: ``avx512_bf16``, ``avx512``, ``avx2`` or ``portable``."""
    return _cpu.isa()


def isas() -> list[str]:
    """Instruction sets that are compiled in, fastest first, whether they run here or not."""
    return _cpu.isas()


def scratch_bytes(scores: int, rows: int) -> int:
    """Bytes that ``plan_decode`` or ``select_context`` keeps for scores in the calling thread.

    Args:
        scores: Of a row: entries or tokens, times query heads.
        rows: Of a step.
    """
    return 4 * max(scores, min(scores * rows, _cpu.MOST_SCORES))


def use_isa(name: str) -> None:
    """Choose another instruction set, for tests and benchmarks.

    Raises:
        ValueError: It is not compiled in, or this machine lacks it.
    """
    _cpu.use_isa(name)


def update_index(key: torch.Tensor, slot_mapping: torch.Tensor, store: IndexStore) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.update_index`."""
    _cpu.update_index(
        key.data_ptr(),
        key.shape,
        key.stride(),
        key.dtype,
        *tokens(slot_mapping),
        store_handle(store),
    )
    if store.index is not None and store.index.name not in KINDS:
        slots = slot_mapping[slot_mapping % store.entry_tokens == store.entry_tokens - 1]
        _build(store, slots[slots >= 0] // store.entry_tokens)


def plan_decode(query: torch.Tensor, rows: DecodeRows, chooser: Chooser) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.plan_decode`."""
    index, scores = chooser.store.index, None
    arguments = (
        query.data_ptr(),
        query.shape,
        query.stride(),
        query.dtype,
        rows_handle(rows),
        chooser_handle(chooser),
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
    query: torch.Tensor,
    weights: torch.Tensor,
    rows: DecodeRows,
    selector: ContextSelector,
    merge: Merge | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.select_context`."""
    if merge is None:
        _select_context(query, weights, rows, selector, None)
        return
    ratings = torch.full((*weights.shape, int(rows.seq_lens.max())), float("-inf"))
    _select_context(query, weights, rows, selector, ratings)
    merge(ratings)
    _select_context(query, weights, rows, selector, ratings, rated=True)


def _select_context(
    query: torch.Tensor,
    weights: torch.Tensor,
    rows: DecodeRows,
    selector: ContextSelector,
    ratings: torch.Tensor | None,
    rated: bool = False,
) -> None:
    check("weights", weights, torch.float32)
    if weights.dim() != 2 or len(weights) != len(rows) or not weights.is_contiguous():
        raise ValueError(
            f"weights must be contiguous, a row for each of {len(rows)}, got {tuple(weights.shape)}"
        )
    _cpu.select_context(
        *vectors(query),
        weights.data_ptr(),
        weights.shape[1],
        rows_handle(rows),
        selector_handle(selector),
        0 if ratings is None else ratings.data_ptr(),
        0 if ratings is None else ratings.shape[2],
        rated,
    )


def list_context(rows: DecodeRows, selector: ContextSelector, kv_heads: int) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.list_context`."""
    _cpu.list_context(rows_handle(rows), selector_handle(selector), kv_heads)


def index_pages(pages: torch.Tensor, lengths: torch.Tensor, store: IndexStore) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.index_pages`."""
    if store.cache is None:
        raise ValueError("the store has no cache to read keys from")
    if not 8 <= store.entry_tokens <= 128 or store.page_size % 16:
        raise ValueError(
            f"entries of {store.entry_tokens} tokens in pages of {store.page_size} are not "
            "supported, only 8 to 128 in multiples of 16"
        )
    check("pages", pages, torch.int32)
    check("lengths", lengths, torch.int32)
    if pages.shape != lengths.shape or pages.dim() != 1:
        raise ValueError(f"{tuple(lengths.shape)} lengths for {tuple(pages.shape)} pages")
    _cpu.index_pages(pages.data_ptr(), lengths.data_ptr(), len(pages), store_handle(store))
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
    check("entries", entries, torch.int64)
    keys = torch.empty(len(entries), store.entry_tokens, store.kv_heads, store.head_size)
    _cpu.read_keys(entries.data_ptr(), len(entries), store_handle(store), keys.data_ptr())
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
    selecting = ((rows.mode == Mode.SELECT) & (rows.select > 0)).tolist()
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
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.stage_pages`."""
    _, kv_heads, page_size, width = source.shape
    check("pages", pages, torch.int32)
    _check_staging(source, target, layout, rows)
    _cpu.stage_pages(
        source=source.data_ptr(),
        pages=pages.data_ptr(),
        num_pages=len(pages),
        target=target.data_ptr(),
        pages_per_block=target.shape[2] // page_size,
        kv_heads=kv_heads,
        page_size=page_size,
        head_size=width // 2,
        element_size=source.element_size(),
        source_layout=LAYOUTS[ROWS if rows else layout],
        target_layout=LAYOUTS[layout],
    )


def stage_tokens(
    source: torch.Tensor, lists: TokenLists, target: torch.Tensor, layout: str = "vec"
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.stage_tokens`."""
    blocks, kv_heads, block_size, width = target.shape
    _check_staging(source, target, layout, rows=True)
    check("entries", lists.entries, torch.int32)
    check("lengths", lists.lengths, torch.int32)
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
        source=source.data_ptr(),
        cache_tokens=source.numel() // width,
        entries=lists.entries.data_ptr(),
        entries_width=lists.entries.shape[1],
        entries_stride=lists.entries.stride(0),
        lengths=lists.lengths.data_ptr(),
        target=target.data_ptr(),
        blocks=blocks,
        rows=units // kv_heads,
        block_tokens=block_size,
        kv_heads=kv_heads,
        head_size=width // 2,
        element_size=source.element_size(),
        target_layout=LAYOUTS[layout],
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
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.write_rows`."""
    pages, kv_heads, page_size, width = cache.shape
    if not cache.is_contiguous():
        raise ValueError(f"cache must be contiguous, its strides are {cache.stride()}")
    _cpu.write_rows(
        *vectors(key),
        *vectors(value),
        *tokens(slot_mapping),
        cache=cache.data_ptr(),
        pages=pages,
        kv_heads=kv_heads,
        page_size=page_size,
        head_size=width // 2,
        element_size=cache.element_size(),
        torch_dtype=cache.dtype,
    )


def attend(
    query: torch.Tensor,
    lists: TokenLists,
    cache: torch.Tensor,
    output: torch.Tensor,
    layout: str,
    scale: float,
    lse: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.attend`."""
    page_size, width = cache.shape[-2:]
    check("entries", lists.entries, torch.int32)
    check("lengths", lists.lengths, torch.int32)
    units, heads = len(lists.lengths), query.shape[1]
    rows = units // lists.kv_heads
    needed = units if lists.per_head else rows
    if units % lists.kv_heads or len(lists.entries) < needed or heads % lists.kv_heads:
        raise ValueError(
            f"{units} lengths and {len(lists.entries)} lists of entries for {heads} query heads do "
            f"not belong to {lists.kv_heads} KV heads"
        )
    _check_cache(cache, layout)
    least = 1 if layout == ROWS else 16
    if lists.run < least or lists.run & (lists.run - 1) or page_size % lists.run:
        raise ValueError(
            f"run={lists.run} is no power of two from {least} on in pages of {page_size}"
        )
    if not lists.per_head and lists.run != page_size:
        raise ValueError(f"KV heads share lists of pages of {page_size}, not of {lists.run} tokens")
    if lse is not None:
        check("lse", lse, torch.float32)
        if lse.shape != (rows, heads) or not lse.is_contiguous():
            raise ValueError(f"lse must be {(rows, heads)} and contiguous, got {tuple(lse.shape)}")
    if weights is not None:
        check("weights", weights, torch.float32)
        if weights.shape[:-1] != (rows, heads) or not weights.is_contiguous():
            raise ValueError(
                f"weights must be {(rows, heads)} by tokens and contiguous, got "
                f"{tuple(weights.shape)}"
            )
    _check_rule(scale, softcap, sinks, heads)
    _cpu.attend(
        *vectors(query),
        *vectors(output),
        lse=0 if lse is None else lse.data_ptr(),
        weights=0 if weights is None else weights.data_ptr(),
        weight_stride=0 if weights is None else weights.shape[2],
        entries=lists.entries.data_ptr(),
        entries_width=lists.entries.shape[1],
        entries_stride=lists.entries.stride(0),
        per_head=lists.per_head,
        lengths=lists.lengths.data_ptr(),
        rows=rows,
        run=lists.run,
        cache=cache.data_ptr(),
        cache_tokens=cache.numel() // width,
        layout=LAYOUTS[layout],
        kv_heads=lists.kv_heads,
        group=heads // lists.kv_heads,
        head_size=width // 2,
        page_size=page_size,
        dtype=DTYPES[cache.dtype],
        torch_dtype=cache.dtype,
        scale=scale,
        softcap=softcap,
        sinks=0 if sinks is None else sinks.data_ptr(),
    )


def attend_prompt(
    query: torch.Tensor,
    lists: PromptLists,
    cache: torch.Tensor,
    output: torch.Tensor,
    layout: str,
    scale: float,
    *,
    lse: torch.Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.attend_prompt`."""
    page_size, width = cache.shape[-2:]
    sequences, heads, kv_heads = len(lists.seen), query.shape[1], lists.kv_heads
    for name in ("entries", "starts", "seen"):
        check(name, getattr(lists, name), torch.int32)
    needed = sequences * kv_heads if lists.per_head else sequences
    if len(lists.entries) < needed or len(lists.starts) != sequences + 1 or heads % kv_heads:
        raise ValueError(
            f"{sequences} sequences of {kv_heads} KV heads need {needed} lists and "
            f"{sequences + 1} starts; got {len(lists.entries)} and {len(lists.starts)}, and "
            f"{heads} query heads"
        )
    _check_cache(cache, layout)
    if page_size > MOST_TOKENS_OF_PAGE or page_size % 16 or page_size & (page_size - 1):
        raise ValueError(f"pages of {page_size} tokens: 16, 32, 64 and 128 can be attended to")
    _check_rule(scale, softcap, sinks, heads)
    if window < 0:
        raise ValueError(f"window={window} cannot be")
    if lse is not None:
        check("lse", lse, torch.float32)
        if lse.shape != query.shape[:2] or not lse.is_contiguous():
            raise ValueError(f"lse must be {tuple(query.shape[:2])}, got {tuple(lse.shape)}")
    _cpu.attend_prompt(
        *vectors(query),
        *vectors(output),
        lse=0 if lse is None else lse.data_ptr(),
        tokens=len(query),
        starts=lists.starts.data_ptr(),
        seen=lists.seen.data_ptr(),
        sequences=sequences,
        entries=lists.entries.data_ptr(),
        entries_width=lists.entries.shape[1],
        entries_stride=lists.entries.stride(0),
        per_head=lists.per_head,
        cache=cache.data_ptr(),
        units=cache.numel() // (page_size * width),
        layout=LAYOUTS[layout],
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_size=width // 2,
        page_size=page_size,
        dtype=DTYPES[cache.dtype],
        torch_dtype=cache.dtype,
        window=window,
        scale=scale,
        softcap=softcap,
        sinks=0 if sinks is None else sinks.data_ptr(),
    )


def _check_rule(scale: float, softcap: float, sinks: torch.Tensor | None, heads: int) -> None:
    """Raise ValueError for what no logits can be made with."""
    if not (scale > 0 and math.isfinite(scale) and 0 <= softcap < math.inf):
        raise ValueError(f"scale={scale}, softcap={softcap} cannot be")
    if sinks is not None:
        check("sinks", sinks, torch.float32)
        if sinks.shape != (heads,):
            raise ValueError(f"sinks must be {(heads,)}, got {tuple(sinks.shape)}")


def _check_cache(cache: torch.Tensor, layout: str) -> None:
    known = layout in LAYOUTS and (layout != "amx" or cache.element_size() == 2)
    if not known or cache.shape[-1] % 32 or not cache.is_contiguous():
        raise ValueError(
            f"a contiguous cache of heads in multiples of 16 can be attended to, in the layouts "
            f"{[*LAYOUTS]} (amx: of 16 bits); got {tuple(cache.shape)} in {cache.dtype} with "
            f"strides {cache.stride()} in {layout}"
        )


def drop_tokens(weights: torch.Tensor, rows: DecodeRows, kept: KeptTokens, rule: Keeping) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.drop_tokens`."""
    seats, kv_heads, most = kept.chosen.shape
    check("weights", weights, torch.float32)
    expected = {"chosen": torch.int32, "ratings": torch.float32}
    for name, dtype in expected.items():
        tensor = getattr(kept, name)
        if tensor.dtype != dtype or tensor.shape != kept.chosen.shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be {dtype} {tuple(kept.chosen.shape)} and contiguous, got "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
    for name in ("counts", "budgets"):
        tensor = getattr(kept, name)
        check(name, tensor, torch.int32)
        if tensor.shape != (seats, kv_heads):
            raise ValueError(f"{name} must be {(seats, kv_heads)}, got {tuple(tensor.shape)}")
    if weights.dim() != 4 or len(weights) != len(rows) or not weights.is_contiguous():
        raise ValueError(
            f"weights must be contiguous, sets of heads for each of {len(rows)} rows, got "
            f"{tuple(weights.shape)}"
        )
    _, sets, heads_per_set, weight_stride = weights.shape
    _cpu.drop_tokens(
        rows=rows_handle(rows),
        kv_heads=kv_heads,
        weights=weights.data_ptr(),
        sets=sets,
        heads_per_set=heads_per_set,
        weight_stride=weight_stride,
        chosen=kept.chosen.data_ptr(),
        ratings=kept.ratings.data_ptr(),
        seats=seats,
        most=most,
        counts=kept.counts.data_ptr(),
        count_stride=kept.counts.stride(0),
        budgets=kept.budgets.data_ptr(),
        budget_stride=kept.budgets.stride(0),
        sink=rule.sink,
        recent=rule.recent,
        recent_share=rule.recent_share,
        page=rule.page,
        rating=RATINGS.index(rule.rating),
        stamped=STAMPED,
    )
