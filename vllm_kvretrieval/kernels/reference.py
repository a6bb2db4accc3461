"""The ops in plain torch: their specification. Slow, and meant to be read."""

import torch

from vllm_kvretrieval.kernels.types import DecodeRows, LayerState


def update_index(key: torch.Tensor, slot_mapping: torch.Tensor, state: LayerState) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.update_index`."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, state.page_size)
        minimum, maximum = state.index[page].unbind(1)
        if offset == 0:
            minimum.copy_(key[token])
            maximum.copy_(key[token])
        else:
            torch.minimum(minimum, key[token], out=minimum)
            torch.maximum(maximum, key[token], out=maximum)


def plan_decode(query: torch.Tensor, rows: DecodeRows, state: LayerState) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.plan_decode`."""
    for r in range(len(rows)):
        slot = int(rows.slots[r])
        num_pages = -(-int(rows.seq_lens[r]) // state.page_size)
        pages = rows.block_table[r, :num_pages].long()
        sink, window, select = (
            int(t[r]) for t in (rows.sink_pages, rows.window_pages, rows.select_pages)
        )
        grouped = query[r].view(state.kv_heads, state.group, state.head_size)
        previous = state.prev_query[slot].view_as(grouped)
        for head in range(state.kv_heads):
            if select < 0:
                attended = torch.arange(num_pages)
            else:
                chosen = torch.empty(0, dtype=torch.int64)
                if select > 0:
                    best = sink + top_pages(
                        page_scores(grouped[head], state.index[pages, head], state.scale)[
                            sink : num_pages - window
                        ],
                        select,
                    )
                    corrected = bool(rows.fresh[r]) or _turned(
                        grouped[head], previous[head], float(rows.threshold[r])
                    )
                    kept = state.prev_selection[slot, head, :select]
                    chosen = best if corrected else kept.long()
                    rows.corrected[slot] += corrected
                    kept.copy_(best)
                attended = torch.cat(
                    [torch.arange(sink), chosen, torch.arange(num_pages - window, num_pages)]
                )
            entry = rows.page_table[r * state.kv_heads + head]
            entry[: len(attended)] = pages[attended] * state.kv_heads + head
        if select > 0:
            previous.copy_(grouped)


def stage_pages(source: torch.Tensor, pages: torch.Tensor, target: torch.Tensor) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.stage_pages`."""
    _, kv_heads, page_size, width = source.shape
    block_size, size = target.shape[2], width // 2
    blocks = target[: len(pages) * page_size // block_size]
    parts = block_size // page_size
    # [blocks, parts, kv_heads, keys or values, elements of a page]
    chosen = source[pages.long()].view(len(blocks), parts, kv_heads, 2, page_size * size)
    keys = chosen[..., 0, :].view(len(blocks), parts, kv_heads, size, page_size)
    values = chosen[..., 1, :].view(len(blocks), parts, kv_heads, page_size, size)
    halves = blocks.view(len(blocks), kv_heads, 2, block_size * size)
    halves[:, :, 0] = keys.permute(0, 2, 3, 1, 4).flatten(2)
    halves[:, :, 1] = values.transpose(1, 2).flatten(2)


def page_scores(query: torch.Tensor, index: torch.Tensor, scale: float) -> torch.Tensor:
    """Pooled score of every page for one KV head (FreeKV, section 3.2).

    Args:
        query: [group, head_size].
        index: [pages, 2, head_size]; minimum and maximum of each page's keys.
        scale: Softmax scale.

    Returns:
        float32 [pages]: the mean over the group of the softmax over pages of the upper bound
        ``sum_c max(q_c * min_c, q_c * max_c) * scale``.
    """
    products = query.float()[:, None, None, :] * index.float()
    bounds = products.amax(dim=2).sum(dim=-1) * scale
    return bounds.softmax(dim=-1).mean(dim=0)


def top_pages(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the ``count`` highest scores, rising; of equal scores the earlier wins."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


def _turned(query: torch.Tensor, previous: torch.Tensor, threshold: float) -> bool:
    """Whether a KV head must be corrected (FreeKV, section 3.3)."""
    if threshold >= 1 or threshold <= -1:
        return threshold >= 1
    similarity = torch.cosine_similarity(query.float(), previous.float(), dim=-1)
    return similarity.mean().item() < threshold
