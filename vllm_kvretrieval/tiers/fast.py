"""Which pages of an encoded home are open: those that requests are filling, and the latest."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class _Written:
    """What a request has written and is open, in the order of its context."""

    first: int  # position in the context of the first page
    pages: list[int] = field(default_factory=list)
    tokens: int = 0  # in the context


class FastTier:
    """Follows running requests; says which pages are to be encoded, and when.

    A page is open for the request that writes it. Whoever shares it reads it as it is: raw as long
    as that request has it among its latest, then as it was encoded.

    Args:
        page_size: Tokens per page.
        keeps: Full pages at the end of a context that stay open, the one being filled aside.
    """

    def __init__(self, page_size: int, keeps: int) -> None:
        self._page_size, self._keeps = page_size, keeps
        self._of: dict[str, _Written] = {}

    def advance(
        self, requests: Iterable[str], before: np.ndarray, after: np.ndarray, pages: np.ndarray
    ) -> list[int]:
        """Follow a step.

        Args:
            requests: Those in the batch, by id.
            before: int [R]; tokens of each one's context that were there before the step.
            after: int [R]; and that are there after it.
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
        """Requests run no more.

        Args:
            requests: By id; unknown ones are fine.

        Returns:
            Pages to be encoded now, and pages that nobody will read, which they have not filled.
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
