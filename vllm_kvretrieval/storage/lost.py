"""Blocks that a slow home cannot give back: requests that need them fail, others go on."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_kvretrieval.kernels import RecallCache
from vllm_kvretrieval.storage.home_file import HomeFile
from vllm_kvretrieval.system_limits import remedy

logger = init_logger("vllm.kvretrieval.home")

TOLD = 20
"""Numbers of lost blocks that a line of the log has at most."""


class Lost:
    """vLLM's blocks that a step relies on, and that could not be read.

    Attributes:
        some: Whether there were any in the last step; then what it computed may be wrong.
    """

    def __init__(self) -> None:
        self._found: set[int] = set()
        self.some = False

    def add(self, blocks: set[int]) -> None:
        """Blocks that this step relies on and that are lost."""
        self._found |= blocks

    def take(self) -> set[int]:
        """Blocks that were lost in this step."""
        taken, self._found = self._found, set()
        self.some = bool(taken)
        return taken


class LostBlocks(Lost):
    """vLLM's blocks that have lost a page, on the way to the disk or on the way back.

    Args:
        home: Where the pages are.
        caches: Recall caches, which read and write them by calls.
        directory: The directory of the home's file, for messages.
        blocks: How many there are.
        block_size: Tokens of each.
        pages: Pages of each.
        groups: Numbers of vLLM's groups of layers that the home has.
    """

    def __init__(
        self,
        home: HomeFile,
        caches: Sequence[RecallCache],
        directory: str,
        blocks: int,
        block_size: int,
        pages: int,
        groups: tuple[int, ...] = (0,),
    ) -> None:
        super().__init__()
        self._home, self._caches, self._directory = home, caches, directory
        self._blocks, self._block_size, self._pages = blocks, block_size, pages
        self._groups = groups
        self._last: set[int] = set()
        # Blocks that have not been written anew since the system failed to write something.
        self._doubtful: set[int] = set()
        self._copied: Sequence[tuple[int, int]] = ()

    def begin_step(self, step: Any) -> None:
        """Follow a step: it writes allotted blocks anew, and relies on shared ones.

        Args:
            step: vLLM's scheduler output.
        """
        self._copied = step.kv_cache_block_copies or ()
        self._found.clear()
        if not self._doubtful:
            return
        for shared, new in allotted_blocks(step, dict.fromkeys(self._groups, self._block_size)):
            self.add(self._doubtful.intersection(shared))
            self._doubtful.difference_update(new)

    def take(self) -> set[int]:
        """Blocks that were lost in this step or the one before.

        Twice, since vLLM fails requests for blocks that were computed before the step, and a block
        may be lost in the step that first writes to it.
        """
        pages = set[int]().union(*(cache.take_failed_pages() for cache in self._caches))
        pages |= self._home.take_lost(self._home.layer_bytes // (self._blocks * self._pages))
        lost = {page // self._pages for page in pages}
        errors = {cache.take_error() for cache in self._caches}
        if failed := self._home.take_write_error():
            errors.add(failed)
            self._doubtful = set(range(self._blocks))
            lost |= self._doubtful
        lost |= self._found
        lost.update(target for source, target in self._copied if source in lost)
        if lost:
            self._log(sorted(lost), errors - {0})
        taken, self._last, self.some = lost | self._last, lost, bool(lost)
        return taken

    def _log(self, lost: list[int], errors: set[int]) -> None:
        reasons = [f"{os.strerror(code)}. {remedy(code)}" for code in sorted(errors)]
        if self._found:
            reasons.append("What was there before the disk failed may not have got to it")
        logger.error(
            "The KV cache's home (%s) has lost %d blocks (%s%s); requests that hold them fail. %s.",
            self._directory,
            len(lost),
            ", ".join(map(str, lost[:TOLD])),
            ", ..." if lost[TOLD:] else "",
            "; ".join(reasons) or "A part of its file cannot be read any more",
        )


def allotted_blocks(step: Any, sizes: Mapping[int, int]) -> list[tuple[list[int], list[int]]]:
    """The blocks that requests get in a step.

    Args:
        step: vLLM's scheduler output.
        sizes: Tokens of a block, by the number of the group of layers.

    Returns:
        For each group, numbers of the blocks that were computed before, and of those that are
        written anew.
    """
    cached = step.scheduled_cached_reqs
    allotted = [(new.block_ids, new.num_computed_tokens) for new in step.scheduled_new_reqs]
    for name, blocks, tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if blocks is not None:
            allotted.append((blocks, tokens if name in cached.resumed_req_ids else 0))
    found: list[tuple[list[int], list[int]]] = [([], []) for _ in sizes]
    for by_group, tokens in allotted:
        for (group, size), (shared, new) in zip(sizes.items(), found, strict=True):
            count = -(-tokens // size)
            shared += by_group[group][:count]
            new += by_group[group][count:]
    return found
