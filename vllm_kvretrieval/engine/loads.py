"""Blocks that a KV connector fills: the scheduler reports them, and workers index them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.request import Request

FIELD = "kv_retrieval_loaded_blocks"
"""Name of the attribute of vLLM's ``SchedulerOutput`` that holds the ids of the blocks that a
connector fills, list[int]."""


class LoadReports:
    """Tells workers at each step which blocks a KV connector is to fill.

    Args:
        managers: vLLM's managers of blocks, one per group of layers.
    """

    def __init__(self, managers: Sequence[Any]) -> None:
        self._managers = managers
        self._hits: list[tuple[Request, int]] = []

    def note_hit(self, request: Request, tokens: int) -> None:
        """Note how many tokens of a request the prefix cache holds."""
        self._hits.append((request, tokens))

    def attach(self, scheduler_output: Any) -> None:
        """Add the blocks that a connector fills to the output of the scheduler.

        vLLM counts tokens that a connector loads as computed before any step computes them. So the
        connector fills the blocks behind a hit of the prefix cache, up to the last token that
        counts as computed. It does so in this step or later; no other request gets these blocks
        before.

        Args:
            scheduler_output: vLLM's description of the step. vLLM must not have counted the tokens
                of the step as computed yet.
        """
        loaded = list[int]()
        for request, hit in self._hits:
            for manager in self._managers:
                first = hit // manager.block_size
                end = -(-request.num_computed_tokens // manager.block_size)
                blocks = manager.req_to_blocks.get(request.request_id, ())[first:end]
                loaded += [block.block_id for block in blocks]
        self._hits.clear()
        setattr(scheduler_output, FIELD, loaded)


class LoadedPages:
    """The pages of a worker that a KV connector fills and that are not indexed yet.

    A page is indexed when a request that holds it arrives: in the step that reports the page, or
    some steps later. If the request is aborted, the page may never be indexed.

    Args:
        pages: Pages of the KV cache. With a connector, one of vLLM's blocks is one page.
    """

    def __init__(self, pages: int) -> None:
        self._unindexed = np.zeros(pages, dtype=bool)
        self._taken: list[np.ndarray] = []

    def begin_step(self, loaded: Sequence[int]) -> None:
        """Note the pages that the report of the step names.

        The pages that :meth:`among` returned for the last step are indexed by now.
        """
        for pages in self._taken:
            self._unindexed[pages] = False
        self._taken.clear()
        self._unindexed[loaded] = True

    def among(self, pages: np.ndarray) -> np.ndarray:
        """Find the pages that this step has to index.

        Args:
            pages: int [n]; pages of the requests that arrive in this step.

        Returns:
            bool [n]; whether each page has to be indexed.
        """
        unindexed: np.ndarray = self._unindexed[pages]
        self._taken.append(pages[unindexed])
        return unindexed
