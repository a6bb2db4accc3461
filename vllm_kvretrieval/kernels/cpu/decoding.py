"""A layer's decode step; see :meth:`vllm_kvretrieval.kernels.ops.Ops.decode_layer`."""

from collections.abc import Sequence

import torch

from vllm_kvretrieval import _cpu
from vllm_kvretrieval.kernels.cpu.binding import (
    DTYPES,
    INDEXES,
    LAYOUTS,
    check_cache,
    check_rule,
    chooser_handle,
    rows_handle,
    store_handle,
    tokens,
)
from vllm_kvretrieval.kernels.rows import DecodeRows
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
    nanoseconds: int = _cpu.decode_layer(
        query.data_ptr(),
        query.shape,
        query.stride(),
        query.dtype,
        key.data_ptr(),
        key.shape,
        key.stride(),
        key.dtype,
        value.data_ptr(),
        value.shape,
        value.stride(),
        value.dtype,
        output.data_ptr(),
        output.shape,
        output.stride(),
        output.dtype,
        *tokens(slot_mapping),
        rows_handle(rows),
        chooser_handle(chooser),
        layer_handle(layer),
    )
    return nanoseconds


def decodes(choosers: Sequence[Chooser], layer: DecodeLayer) -> bool:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.decodes`."""
    indexes = [store.index for store in (*layer.indexes, *(c.store for c in choosers))]
    return layer.layout in LAYOUTS and all(i is None or i.name in INDEXES for i in indexes)


def layer_handle(layer: DecodeLayer) -> "_cpu.DecodeLayer":
    """The layer, bound at the first call; raises ValueError where that cannot be."""
    if layer.handle is None:
        layer.handle = _bind_layer(layer)
    return layer.handle


def _bind_layer(layer: DecodeLayer) -> "_cpu.DecodeLayer":
    cache, heads = layer.cache, layer.cache.shape[1] * layer.group
    check_cache(cache, layer.layout)
    check_rule(layer.scale, layer.softcap, layer.sinks, heads)
    return _cpu.DecodeLayer(
        dtype=DTYPES[cache.dtype],
        torch_dtype=cache.dtype,
        layout=LAYOUTS[layer.layout],
        element_size=cache.element_size(),
        group=layer.group,
        pages=len(cache),
        cache=cache.data_ptr(),
        indexes=[store_handle(store) for store in layer.indexes],
        scale=layer.scale,
        softcap=layer.softcap,
        sinks=0 if layer.sinks is None else layer.sinks.data_ptr(),
    )
