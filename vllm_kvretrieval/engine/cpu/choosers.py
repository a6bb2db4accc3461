"""How the layers of a worker select, and the state that they keep for it."""

from typing import Any

import torch

from vllm_kvretrieval.engine.cpu.planner import Planner
from vllm_kvretrieval.engine.requests import RequestTable
from vllm_kvretrieval.kernels import Chooser, Selection, cpu
from vllm_kvretrieval.methods.choosers import layer_choosers
from vllm_kvretrieval.methods.page_chunks import ChunkSelection
from vllm_kvretrieval.retrieval.index.check import check_outside


class Choosers:
    """Makes what layers select with.

    Args:
        planner: What the worker serves.
        requests: Table of its running requests.
    """

    def __init__(self, planner: Planner, requests: RequestTable) -> None:
        self._planner, self._requests = planner, requests
        self._for_chunks: dict[Any, Selection] = {}  # by the shape of layers, which share it

    def of(
        self, name: str, impl: Any, kv_cache: torch.Tensor, layout: str, owner: Any = None
    ) -> list[Chooser]:
        """How a layer selects, by the number of the method.

        Args:
            name: The layer's name.
            impl: The layer's attention.
            kv_cache: [pages, kv_heads, page_size, 2 * head_size].
            layout: How that lays out keys.
            owner: The attention of the layer whose cache this one reads; None: it has its own.
        """
        config, requests = self._planner.retrieval_config, self._requests
        heads = self._planner.retrieval_heads[name]
        check_outside(config.index_kinds, impl.head_size, kv_cache.dtype)
        selection = Selection.empty(
            seats=self._planner.seats,
            kv_heads=impl.num_kv_heads,
            group=impl.num_queries_per_kv,
            head_size=impl.head_size,
            most_selected=self._planner.room.most_chosen(heads),
            dtype=kv_cache.dtype,
            counts=None if requests.selected is None else requests.selected[:, heads],
        )
        readable = layout in cpu.LAYOUTS
        of_owner = () if owner is None else owner.choosers
        return layer_choosers(
            config, selection, kv_cache, layout, impl.scale, readable=readable, owner=of_owner
        )

    def for_chunks(self, name: str, impl: Any, dtype: torch.dtype) -> ChunkSelection | None:
        """What a layer selects with for chunks of prompts; None: these select no pages.

        Args:
            name, impl: As for :meth:`of`.
            dtype: Of the KV cache.
        """
        planner, queries = self._planner, self._planner.retrieval_config.prefill_queries
        if queries is None:
            return None
        shape = impl.num_kv_heads, impl.num_queries_per_kv, impl.head_size
        if shape not in self._for_chunks:
            (kv_heads, group, head_size), counts = shape, None
            if planner.prompt_shares:  # each layer writes its own
                counts = torch.zeros(planner.most_chunks, kv_heads, dtype=torch.int32)
            self._for_chunks[shape] = Selection.empty(
                seats=planner.most_chunks,
                kv_heads=kv_heads,
                group=group * queries,
                head_size=head_size,
                most_selected=planner.most_chunk_pages,
                dtype=dtype,
                counts=counts,
            )
        late, shares = name in planner.late_layers, planner.prompt_shares.get(name)
        return ChunkSelection(self._for_chunks[shape], late, shares)
