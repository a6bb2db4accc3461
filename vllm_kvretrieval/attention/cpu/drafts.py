"""Pages whose records draft tokens have entered, where records grow with each key."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.attention.cpu.plans import Pages

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.requests import RequestTable


class DraftedPages(NamedTuple):
    """Pages whose records are to be built from their keys.

    Attributes:
        selecting: Before layers select, from tokens that are certain; a rejected draft of an
            earlier step, or a draft of this one, has entered their records.
        written: After they have selected, from these and the drafts: all of them may be accepted.
    """

    selecting: Pages
    written: Pages | None


class DraftedRecords:
    """Follows the drafts of requests for indexes whose records grow.

    Args:
        requests: Table of the running requests.
        page_size: Tokens per page.
    """

    def __init__(self, requests: "RequestTable", page_size: int) -> None:
        self._requests, self._page_size = requests, page_size
        # Position of the first draft of a seat's last step; 0: it had none.
        self._first = requests.per_seat()

    def note(self, seats: np.ndarray, positions: np.ndarray) -> None:
        """Note tokens from certain positions on that were written between two steps.

        Args:
            seats: The seats of their requests.
            positions: int [n]; above 0.
        """
        self._first[seats] = positions

    def plan(
        self, lens: np.ndarray, before: np.ndarray, block_table: torch.Tensor
    ) -> DraftedPages | None:
        """Find the pages of a step whose records are to be built; None: there are none.

        Args:
            lens: int32 [R]; tokens of each context with the step and its drafts.
            before: int32 [R]; tokens of each context before it.
            block_table: int32 [R, >= pages]; page ids in context order.
        """
        requests, size = self._requests, self._page_size
        seats = requests.seats[: len(lens)]
        certain = requests.certain(seats, before, lens)
        drafted, former = lens > certain, self._first[seats]
        self._first[seats] = np.where(drafted, certain, 0)
        rows = np.flatnonzero(drafted | (former > 0))
        if not len(rows):
            return None
        last = (certain[rows] - 1) // size
        first = np.where(former[rows] > 0, np.minimum(former[rows] // size, last), last)
        table = block_table.numpy()

        def pages(row: np.ndarray, place: np.ndarray, ends: np.ndarray) -> Pages:
            lengths = np.minimum(ends - place * size, size).astype(np.int32)
            return Pages(torch.from_numpy(table[row, place]), torch.from_numpy(lengths))

        count = last - first + 1
        ahead = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        of, place = np.repeat(rows, count), np.repeat(first, count) + ahead
        selecting = pages(of, place, certain[of])
        cut = np.flatnonzero(drafted & (certain % size != 0))
        written = pages(cut, certain[cut] // size, lens[cut]) if len(cut) else None
        return DraftedPages(selecting, written)
