"""Attention, and the KV cache that it reads; see :class:`vllm_kvretrieval.kernels.ops.Ops`."""

import torch

from vllm_kvretrieval import _cpu
from vllm_kvretrieval.kernels.cpu.binding import (
    DTYPES,
    LAYOUTS,
    MOST_TOKENS,
    TOKEN_MAJOR,
    check,
    check_cache,
    check_rule,
    check_starts,
    is_page,
    remainder_addresses,
    tokens,
    vectors,
)
from vllm_kvretrieval.kernels.rows import PromptLists, Remainder, TokenLists


def stage_pages(
    source: torch.Tensor,
    pages: torch.Tensor,
    target: torch.Tensor,
    layout: str = "vec",
    token_major: bool = False,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.stage_pages`."""
    source_pages, kv_heads, page_size, width = source.shape
    blocks, _, block_size, _ = target.shape
    check("pages", pages, torch.int32)
    _check_staging(source, target, layout, token_major)
    if target.shape[1::2] != (kv_heads, width) or block_size % page_size or width % 32:
        raise ValueError(
            f"{tuple(source.shape)} cannot be laid out as {tuple(target.shape)}: heads have to be "
            "the same, in multiples of 16, and blocks hold whole pages"
        )
    _cpu.stage_pages(
        source=source.data_ptr(),
        source_pages=source_pages,
        pages=pages.data_ptr(),
        num_pages=len(pages),
        target=target.data_ptr(),
        blocks=blocks,
        pages_per_block=block_size // page_size,
        kv_heads=kv_heads,
        page_size=page_size,
        head_size=width // 2,
        element_size=source.element_size(),
        source_layout=LAYOUTS[TOKEN_MAJOR if token_major else layout],
        target_layout=LAYOUTS[layout],
    )


def stage_tokens(
    source: torch.Tensor, lists: TokenLists, target: torch.Tensor, layout: str = "vec"
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.stage_tokens`."""
    blocks, kv_heads, block_size, width = target.shape
    _check_staging(source, target, layout, token_major=True)
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


def _check_staging(
    source: torch.Tensor, target: torch.Tensor, layout: str, token_major: bool
) -> None:
    if not (source.is_contiguous() and target.is_contiguous()) or source.dtype != target.dtype:
        raise ValueError("source and target must be contiguous and of one dtype")
    if layout not in LAYOUTS or layout == TOKEN_MAJOR or (layout == "amx" and not token_major):
        raise ValueError(
            f"pages cannot be staged in the layout {layout!r}, token_major={token_major}"
        )
    if layout == "amx" and source.element_size() != 2:
        raise ValueError(f"AMX has no layout for keys in {source.dtype}")


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    layout: str,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.write_cache`."""
    pages, kv_heads, page_size, width = cache.shape
    check_cache(cache, layout)
    _cpu.write_cache(
        *vectors(key),
        *vectors(value),
        *tokens(slot_mapping),
        cache=cache.data_ptr(),
        pages=pages,
        kv_heads=kv_heads,
        page_size=page_size,
        head_size=width // 2,
        element_size=cache.element_size(),
        layout=LAYOUTS[layout],
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
    remainder: Remainder | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.attend`."""
    page_size, width = cache.shape[-2:]
    check("entries", lists.entries, torch.int32)
    check("lengths", lists.lengths, torch.int32)
    units, heads = len(lists.lengths), query.shape[1]
    rows = units // lists.kv_heads
    check_starts(lists.starts, rows)
    queries = rows if lists.starts is None else int(lists.starts[-1])
    needed = units if lists.per_head else rows
    if units % lists.kv_heads or len(lists.entries) < needed or heads % lists.kv_heads:
        raise ValueError(
            f"{units} lengths and {len(lists.entries)} lists of entries for {heads} query heads do "
            f"not belong to {lists.kv_heads} KV heads"
        )
    check_cache(cache, layout)
    least = 1 if layout == TOKEN_MAJOR else 16
    if lists.run < least or lists.run & (lists.run - 1) or page_size % lists.run:
        raise ValueError(
            f"run={lists.run} is no power of two from {least} on in pages of {page_size}"
        )
    if not lists.per_head and lists.run != page_size:
        raise ValueError(f"KV heads share lists of pages of {page_size}, not of {lists.run} tokens")
    if lse is not None:
        check("lse", lse, torch.float32)
        if lse.shape != (queries, heads) or not lse.is_contiguous():
            raise ValueError(
                f"lse must be {(queries, heads)} and contiguous, got {tuple(lse.shape)}"
            )
    if weights is not None:
        check("weights", weights, torch.float32)
        if weights.shape[:-1] != (rows, heads) or not weights.is_contiguous():
            raise ValueError(
                f"weights must be {(rows, heads)} by tokens and contiguous, got "
                f"{tuple(weights.shape)}"
            )
    check_rule(scale, softcap, sinks, heads)
    rest_values, rest_lse = remainder_addresses(remainder, queries, heads, width // 2)
    _cpu.attend(
        *vectors(query),
        *vectors(output),
        output_floats=output.dtype == torch.float32,
        lse=0 if lse is None else lse.data_ptr(),
        weights=0 if weights is None else weights.data_ptr(),
        weight_stride=0 if weights is None else weights.shape[2],
        entries=lists.entries.data_ptr(),
        entries_width=lists.entries.shape[1],
        entries_stride=lists.entries.stride(0),
        per_head=lists.per_head,
        lengths=lists.lengths.data_ptr(),
        rows=rows,
        starts=0 if lists.starts is None else lists.starts.data_ptr(),
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
        rest_values=rest_values,
        rest_lse=rest_lse,
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
    sequences, heads, kv_heads = len(lists.starts) - 1, query.shape[1], lists.kv_heads
    for name in ("entries", "starts", "seen"):
        check(name, getattr(lists, name), torch.int32)
    needed = sequences * kv_heads if lists.per_head else sequences
    if len(lists.entries) < needed or len(lists.seen) != needed or heads % kv_heads:
        raise ValueError(
            f"{sequences} sequences of {kv_heads} KV heads need {needed} lists, and their numbers "
            f"of seen tokens; got {len(lists.entries)} and {len(lists.seen)}, and {heads} query "
            "heads"
        )
    check_cache(cache, layout)
    if not is_page(page_size):
        raise ValueError(
            f"pages of {page_size} tokens: powers of two from 16 to {MOST_TOKENS} can be attended "
            "to"
        )
    check_rule(scale, softcap, sinks, heads)
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
