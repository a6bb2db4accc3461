"""Attention over lists of units by other libraries' kernels, where these are installed.

A unit is a page of one KV head, and every (request, KV head) a sequence of its own, whose pages
have a single KV head: so kernels for paged caches read slots, or the cache in place. They plan or
mask by lengths that the host knows, which the lists of a decode step are not: good for comparison.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of queries [rows, group, head_size] over slots [slots, page, 2 * head_size]."""

WORKSPACE_BYTES = 128 * 2**20


def flashinfer_decode(
    lists: torch.Tensor, lengths: list[int], page: int, group: int, head_size: int, scale: float
) -> Attend:
    """FlashInfer's batch decode over a paged cache, planned for these lists.

    Args:
        lists: int32 [rows, width], on the device; slots.
        lengths: Tokens of each row, at least one.
        page: Tokens of a slot.
        group: Query heads of a KV head.
        head_size: Channels.
        scale: Softmax scale.
    """
    import flashinfer

    pages = [-(-length // page) for length in lengths]
    starts = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = torch.tensor([(length - 1) % page + 1 for length in lengths], dtype=torch.int32)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=lists.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    listed = torch.cat([row[:count] for row, count in zip(lists, pages, strict=True)])
    wrapper.plan(
        starts,
        listed,
        last,
        group,
        1,
        head_size,
        page,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        sm_scale=scale,
    )

    def attend(query: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        keys, values = slots[:, :, None].chunk(2, dim=-1)
        return wrapper.run(query, (keys, values))

    return attend


def xformers_decode(
    lists: torch.Tensor, lengths: list[int], page: int, group: int, head_size: int, scale: float
) -> Attend:
    """xFormers' split-k decode over a paged cache, in blocks of a page; as the other."""
    from xformers.ops import fmha
    from xformers.ops.fmha import triton_splitk
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalPaddedKeysMask

    op = type("SplitKByPages", (triton_splitk.FwOp,), {"BLOCK_N": min(page, 64)})
    mask = PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        [1] * len(lengths), lengths, lists, page, device=lists.device
    )

    def attend(query: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        tokens = slots.flatten(0, 1)[None, :, None, None].expand(-1, -1, -1, group, -1)
        keys, values = tokens.chunk(2, dim=-1)
        own = query[None, :, None]
        out = fmha.memory_efficient_attention_forward(
            own, keys, values, attn_bias=mask, scale=scale, op=op
        )
        return out[0, :, 0]

    return attend


PEERS = {"flashinfer": flashinfer_decode, "xformers": xformers_decode}


def installed() -> list[str]:
    """The peers whose libraries are installed."""
    return [name for name in PEERS if importlib.util.find_spec(name) is not None]
