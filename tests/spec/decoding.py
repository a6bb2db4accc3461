"""A layer's part in a step that decodes, op by op."""

import torch

from tests.spec.attend import attend, write_cache
from vllm_kvretrieval.kernels.reference import plan_decode, update_index
from vllm_kvretrieval.kernels.rows import DecodeRows, Remainder, TokenLists
from vllm_kvretrieval.kernels.types import Chooser, DecodeLayer


def decode_layer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    output: torch.Tensor,
    rows: DecodeRows,
    chooser: Chooser,
    layer: DecodeLayer,
) -> int:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.decode_layer`."""
    write_cache(key, value, slot_mapping, layer.cache, layer.layout)
    for store in layer.indexes:
        update_index(key, slot_mapping, store)
    asking = query[: len(rows)]
    remainder = Remainder.empty(asking) if chooser.remainder else None
    plan_decode(asking, rows, chooser, remainder)
    page_size, kv_heads = layer.cache.shape[2], layer.cache.shape[1]
    run = 1 if rows.per_token else page_size
    units = len(rows) * kv_heads
    attend(
        asking,
        TokenLists(rows.lists[:units], rows.lengths[:units], run, kv_heads),
        layer.cache,
        output,
        layer.layout,
        layer.scale,
        softcap=layer.softcap,
        sinks=layer.sinks,
        remainder=remainder,
    )
    return 0
