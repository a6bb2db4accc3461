"""The choosers of a layer, by the number of the method; the same on every device."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_kvretrieval.kernels import Chooser, IndexRecords, Selection
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.index import Index


def layer_choosers(
    config: RetrievalConfig,
    selection: Selection,
    cache: torch.Tensor,
    layout: str,
    scale: float,
    *,
    readable: bool = True,
    alignment: int = 1,
    owner: Sequence[Chooser] = (),
) -> list[Chooser]:
    """Make the choosers of a layer; methods with equal indexes share the records.

    Args:
        config: Options of the engine.
        selection: The selections of the layer's methods.
        cache: [pages, kv_heads, page_size, 2 * head_size]; the layer's.
        layout: How that lays out keys.
        scale: Softmax scale.
        readable: Whether kernels read keys in that layout.
        alignment: Records' fields begin at multiples of so many bytes.
        owner: Those of the layer whose cache and records this layer reads; empty: it has its own.
    """
    if owner:
        return [replace(c, selection=selection, scale=scale, handle=None) for c in owner]
    pages, kv_heads, page_size, row = cache.shape
    methods = config.methods.values()
    kinds: list[tuple[Index | None, int, bool]]
    kinds = [(kind.index, kind.entry_tokens, kind.means > 0) for kind in config.index_kinds]
    kinds += [(None, method.entry_tokens, False) for method in methods if method.index is None]
    records = {
        (index, tokens): IndexRecords.empty(
            index,
            pages=pages,
            kv_heads=kv_heads,
            head_size=row // 2,
            page_size=page_size,
            dtype=cache.dtype,
            entry_tokens=tokens,
            cache=cache if readable else None,
            layout=layout,
            means=means,
            alignment=alignment,
        )
        for index, tokens, means in kinds
    }
    return [
        Chooser(
            records[method.index, method.entry_tokens],
            selection,
            method.pooling,
            scale,
            method.rerank,
            method.remainder,
            method.outliers,
            any(known.uneven and known.of(method) != known.plain for known in method.numbers),
        )
        for method in methods
    ]
