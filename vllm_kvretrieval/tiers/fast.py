"""The open pages of an encoded home: those that requests are filling, and the latest ones."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class _Written:
    """The open pages that a request has written, in the order of its context."""

    first: int  # position in the context of the first page
    pages: list[int] = field(default_factory=list)
    tokens: int = 0  # in the context


class FastTier:
    """Follows running requests and says which pages are to be encoded, and when.

    A page is open for the request that writes it. Other requests that share the page read it as it
    is: raw while it is among that request's latest pages, decoded afterwards.

    Args:
        page_size: Tokens per page.
        keeps: Full pages at the end of a context that stay open, beside the one being filled.
    """

    def __init__(self, page_size: int, keeps: int) -> None:
        self._page_size, self._keeps = page_size, keeps
        self._of: dict[str, _Written] = {}

    def advance(
        self, requests: Iterable[str], before: np.ndarray, after: np.ndarray, pages: np.ndarray
    ) -> list[int]:
        """Follow a step.

        Args:
            requests: The requests in the batch, by id.
            before: int [R]; tokens of each context before the step.
            after: int [R]; tokens of each context after the step.
            pages: int [R, >= pages of a context]; ids in context order.

        Returns:
            Pages to be encoded at the end of the step.
        """
        closing = []
        size = self._page_size
        rows = zip(requests, before.tolist(), after.tolist(), pages, strict=False)
        for request, start, end, table in rows:
            if (own := self._of.get(request)) is None:
                own = self._of[request] = _Written(start // size)
            have = own.first + len(own.pages)
            own.pages += table[have : -(-end // size)].tolist()
            own.tokens = end
            leaving = max(0, end // size - self._keeps - own.first)
            closing += own.pages[:leaving]
            del own.pages[:leaving]
            own.first += leaving
        return closing

    def end(self, requests: Iterable[str]) -> tuple[list[int], list[int]]:
        """Forget requests that no longer run.

        Args:
            requests: The requests' ids; unknown ones are ignored.

        Returns:
            Pages to be encoded now, and partly filled pages, which will never be read.
        """
        full, unfinished = list[int](), list[int]()
        for request in requests:
            own = self._of.pop(request, None)
            if own is None:
                continue
            count = own.tokens // self._page_size - own.first
            full += own.pages[:count]
            unfinished += own.pages[count:]
        return full, unfinished
