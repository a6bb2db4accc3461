"""Page indexes, selection, and tokens that are dropped; see
:class:`vllm_kvretrieval.kernels.ops.Ops`."""

import torch

from vllm_kvretrieval import _cpu
from vllm_kvretrieval.kernels.cpu.binding import (
    INDEXES,
    MOST_TOKENS,
    check,
    chooser_handle,
    remainder_addresses,
    rows_handle,
    selector_handle,
    store_handle,
    tokens,
    vectors,
)
from vllm_kvretrieval.kernels.outside_rules import choose_pages
from vllm_kvretrieval.kernels.rows import DecodeRows, Mode, Remainder
from vllm_kvretrieval.kernels.types import (
    Chooser,
    ContextSelector,
    IndexRecords,
    KeptTokens,
    Merge,
)
from vllm_kvretrieval.retrieval.index import Index, pack, unpack
from vllm_kvretrieval.retrieval.index.rule import Rule
from vllm_kvretrieval.retrieval.keeping import STAMPED, Keeping


def isa() -> str:
    """Instruction set in use: ``avx512_bf16``, ``avx512``, ``avx2`` or ``portable``."""
    return _cpu.isa()


def isas() -> list[str]:
    """Instruction sets that are compiled in, fastest first, whether they run here or not."""
    return _cpu.isas()


def scratch_bytes(scores: int, rows: int) -> int:
    """Bytes that ``plan_decode`` or ``select_context`` keeps for scores in the calling thread.

    Args:
        scores: Scores of a row: entries or tokens, times query heads.
        rows: Rows of a step.
    """
    return 4 * max(scores, min(scores * rows, _cpu.MOST_SCORES))


def use_isa(name: str) -> None:
    """Choose another instruction set, for tests and benchmarks.

    Raises:
        ValueError: It is not compiled in, or this machine lacks it.
    """
    _cpu.use_isa(name)


def update_index(key: torch.Tensor, slot_mapping: torch.Tensor, store: IndexRecords) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.update_index`."""
    _cpu.update_index(
        key.data_ptr(),
        key.shape,
        key.stride(),
        key.dtype,
        *tokens(slot_mapping),
        store_handle(store),
    )
    if store.index is not None and store.index.name not in INDEXES:
        slots = slot_mapping[slot_mapping % store.entry_tokens == store.entry_tokens - 1]
        _build(store, slots[slots >= 0] // store.entry_tokens)


def plan_decode(
    query: torch.Tensor, rows: DecodeRows, chooser: Chooser, remainder: Remainder | None = None
) -> None:
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
    if index is not None and index.name not in INDEXES:
        _cpu.check_plan(*arguments)
        scores = _scores(index, query, rows, chooser)
    _cpu.plan_decode(
        *arguments,
        0 if scores is None else scores.data_ptr(),
        0 if scores is None else scores.shape[-1],
        *remainder_addresses(
            remainder, len(rows), chooser.store.kv_heads * chooser.group, chooser.store.head_size
        ),
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


def index_pages(pages: torch.Tensor, lengths: torch.Tensor, store: IndexRecords) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.index_pages`."""
    if store.cache is None:
        raise ValueError("the store has no cache to read keys from")
    if not 8 <= store.entry_tokens <= MOST_TOKENS or store.page_size % 16:
        raise ValueError(
            f"entries of {store.entry_tokens} tokens in pages of {store.page_size} are not "
            f"supported, only 8 to {MOST_TOKENS} in multiples of 16"
        )
    check("pages", pages, torch.int32)
    check("lengths", lengths, torch.int32)
    if pages.shape != lengths.shape or pages.dim() != 1:
        raise ValueError(f"{tuple(lengths.shape)} lengths for {tuple(pages.shape)} pages")
    _cpu.index_pages(pages.data_ptr(), lengths.data_ptr(), len(pages), store_handle(store))
    if store.index is not None and store.index.name not in INDEXES:
        part = torch.arange(store.parts)
        entries = pages[:, None].long() * store.parts + part
        _build(store, entries[part < lengths[:, None] // store.entry_tokens])


def read_keys(entries: torch.Tensor, store: IndexRecords) -> torch.Tensor:
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


def _build(store: IndexRecords, entries: torch.Tensor) -> None:
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
            if isinstance(index, Rule):  # by any pooling, the pages with these scores are the best
                chosen = choose_pages(index, grouped[head], record, rows, r, head, chooser)
                scores[r, head, :, chosen] = 1
                continue
            score = index.score_tokens if rows.per_token else index.score
            found = score(grouped[head], record, chooser.scale)
            scores[r, head, :, : count * each] = found.flatten(1)
    return scores


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
        rating=_cpu.RATINGS[rule.rating],
        stamped=STAMPED,
    )
