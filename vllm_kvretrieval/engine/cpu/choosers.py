"""How the layers of a worker select, and the state that they keep for it."""

from typing import TYPE_CHECKING, Any

import torch

from vllm_kvretrieval.engine.requests import RequestTable
from vllm_kvretrieval.kernels import Chooser, IndexRecords, Selection, cpu
from vllm_kvretrieval.retrieval.index.check import check_outside

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.cpu.memory import PlanningWorker


class Choosers:
    """Makes what layers select with.

    Args:
        worker: The worker.
        requests: Table of its running requests.
    """

    def __init__(self, worker: "PlanningWorker", requests: RequestTable) -> None:
        self._worker, self._requests = worker, requests
        self._for_blocks: dict[Any, Selection] = {}  # by the shape of layers, which share it

    def of(self, name: str, impl: Any, kv_cache: torch.Tensor, layout: str) -> list[Chooser]:
        """How a layer selects, by the number of the method.

        Args:
            name: The layer's name.
            impl: The layer's attention.
            kv_cache: [pages, kv_heads, page_size, 2 * head_size].
            layout: How that lays out keys.
        """
        config, requests = self._worker.retrieval_config, self._requests
        heads = self._worker.retrieval_heads[name]
        shape = {"kv_heads": impl.num_kv_heads, "head_size": impl.head_size}
        check_outside(config.index_kinds, impl.head_size, kv_cache.dtype)
        selection = Selection.empty(
            seats=self._worker.seats,
            group=impl.num_queries_per_kv,
            most_selected=self._worker.room.most_chosen(heads),
            dtype=kv_cache.dtype,
            counts=None if requests.selected is None else requests.selected[:, heads],
            **shape,
        )
        indexes = {
            (index, tokens): IndexRecords.empty(
                index,
                pages=kv_cache.shape[0],
                page_size=config.page_size,
                entry_tokens=tokens,
                dtype=kv_cache.dtype,
                cache=kv_cache if layout in cpu.LAYOUTS else None,
                layout=layout,
                means=means,
                **shape,
            )
            for index, tokens, means in [
                *((kind.index, kind.entry_tokens, kind.means > 0) for kind in config.index_kinds),
                *((None, m.entry_tokens, False) for m in config.methods.values() if not m.index),
            ]
        }
        return [
            Chooser(
                indexes[m.index, m.entry_tokens],
                selection,
                m.pooling,
                impl.scale,
                m.rerank,
                m.remainder,
                m.outliers,
            )
            for m in config.methods.values()
        ]

    def for_blocks(
        self, impl: Any, kv_cache: torch.Tensor, choosers: list[Chooser]
    ) -> dict[int, Chooser]:
        """How a layer selects for blocks of prompts, by the number of the method.

        Args:
            impl: The layer's attention.
            kv_cache: See :meth:`of`.
            choosers: What that returned.
        """
        config = self._worker.retrieval_config
        if config.prefill_queries is None:
            return {}
        shape = impl.num_kv_heads, impl.num_queries_per_kv, impl.head_size
        if shape not in self._for_blocks:
            kv_heads, group, head_size = shape
            counts = None
            if self._worker.prompt_shares:  # each layer writes its own
                counts = torch.zeros(self._worker.most_pieces, kv_heads, dtype=torch.int32)
            self._for_blocks[shape] = Selection.empty(
                seats=self._worker.most_pieces,
                kv_heads=kv_heads,
                group=group * config.prefill_queries,
                head_size=head_size,
                most_selected=self._worker.most_piece_pages,
                dtype=kv_cache.dtype,
                counts=counts,
            )
        selection = self._for_blocks[shape]
        return {
            number: Chooser(
                chooser.store,
                selection,
                config.pools_blocks_by(method),
                chooser.scale,
                outliers=chooser.outliers,
            )
            for number, (method, chooser) in enumerate(
                zip(config.methods.values(), choosers, strict=True)
            )
            if method.prompts_select == "pages"
        }
