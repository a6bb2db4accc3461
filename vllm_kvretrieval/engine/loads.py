"""Which blocks a KV connector fills: the scheduler knows, and workers index them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.request import Request

FIELD = "kv_retrieval_loaded_blocks"
"""Attribute of vLLM's ``SchedulerOutput``: ids of blocks that a connector fills, list[int]."""


class LoadReports:
    """Tells workers, step by step, which blocks a KV connector was given to fill.

    Args:
        managers: vLLM's, of the blocks of each group of layers.
    """

    def __init__(self, managers: Sequence[Any]) -> None:
        self._managers = managers
        self._hits: list[tuple[Request, int]] = []

    def note_hit(self, request: Request, tokens: int) -> None:
        """Note how many tokens of a request the prefix cache has, when it is looked up there."""
        self._hits.append((request, tokens))

    def attach(self, scheduler_output: Any) -> None:
        """Add to a step the blocks that were set aside for a connector when it was scheduled.

        Tokens behind a hit that count as computed before any step has computed them come from the
        connector: in this step, or in a later one, before which no other request gets their blocks.

        Args:
            scheduler_output: Of a step whose tokens vLLM has not yet counted as computed.
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
    """The pages of a worker that a KV connector has filled, or will, and that nothing has indexed.

    A page is one of them until a request comes that has it: in the step that reports it, some steps
    later or, if its request is aborted, perhaps never.

    Args:
        pages: How many the KV cache has; beside a connector vLLM's blocks are pages.
    """

    def __init__(self, pages: int) -> None:
        self._unindexed = np.zeros(pages, dtype=bool)
        self._taken: list[np.ndarray] = []

    def begin_step(self, loaded: Sequence[int]) -> None:
        """Note the pages that the step's report names; those of the last step are indexed now."""
        for pages in self._taken:
            self._unindexed[pages] = False
        self._taken.clear()
        self._unindexed[loaded] = True

    def among(self, pages: np.ndarray) -> np.ndarray:
        """Which of some pages this step has to index.

        Args:
            pages: int [n]; of requests that have come in this step.

        Returns:
            bool [n].
        """
        unindexed: np.ndarray = self._unindexed[pages]
        self._taken.append(pages[unindexed])
        return unindexed
