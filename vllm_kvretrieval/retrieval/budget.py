"""Budgets: how many pages of which kind a (layer, KV head) attends to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvretrieval.errors import RetrievalConfigError

if TYPE_CHECKING:
    from vllm_kvretrieval.retrieval.families import Method

DEFAULT_BUDGET = 2048
DEFAULT_SHARE = 16
"""Sink and window are each the budget divided by this: 128 tokens of 2048, FreeKV's setting for
long inputs (section 5.2)."""


class PageBudget(NamedTuple):
    """A budget in pages. ``select`` is 0 for methods that never select."""

    sink: int
    window: int
    select: int

    @property
    def total(self) -> int:
        """Pages attended to per KV head; a context that fits is attended to whole."""
        return self.sink + self.window + self.select


@dataclass(frozen=True)
class Budgets:
    """The budgets that requests of an engine may have, and what they divide into.

    Attributes:
        page_size: Tokens per page.
        limit: Tokens; the largest budget that a request may have.
        sink, window: Tokens that the user names; None: the method's.
        own: The name of the engine's own method, which messages leave out.
    """

    page_size: int
    limit: int
    sink: int | None
    window: int | None
    own: str

    def pages(self, budget: int, method: "Method", key: str = "budget") -> PageBudget:
        """A budget in pages.

        Args:
            budget: Tokens.
            method: The method of the request.
            key: The option that errors name.

        Raises:
            RetrievalConfigError: The budget is no multiple of the page, or too small for sink,
                window and (where the method selects) one page.
        """
        if budget <= 0 or budget % self.page_size:
            nearest = max(self.nearest(budget), self.least(method))
            raise RetrievalConfigError(
                f"{key}={budget} must be a positive multiple of page_size={self.page_size}; "
                f"try {nearest}."
            )
        if not self.fits(budget, method):
            needed = self.least(method)
            sink, window = self._parts(needed, method)
            parts = f"sink={sink}" + (f" + window={window}" if method.selects else "")
            whose = "" if method.name == self.own else f" for {method.name}"
            raise RetrievalConfigError(
                f"{key}={budget} is too small{whose}: {parts} + one page of {self.page_size} need "
                f"at least {needed} tokens. {self._more_room(key, method)}."
            )
        sink, window = self._parts(budget, method)
        if not method.selects:
            window = budget - sink  # nothing is selected: the window takes all the rest
        select = budget - sink - window
        return PageBudget(*(tokens // self.page_size for tokens in (sink, window, select)))

    def fits(self, budget: int, method: "Method") -> bool:
        """Whether a budget has room for sink, window (where pages are selected) and one page."""
        return budget >= self._needed(budget, method)

    def least(self, method: "Method") -> int:
        """Tokens of the smallest budget that fits."""
        budget = self.page_size
        while budget < (needed := self._needed(budget, method)):  # which grows with the budget
            budget = needed
        return budget

    def largest(self, method: "Method") -> tuple[PageBudget, ...]:
        """Budgets of requests that no other budget exceeds in every part.

        Sink and window are rounded to pages, so a smaller budget may select more than a larger one.
        In ``DEFAULT_SHARE`` pages each of them grows by one page at most; budgets that are smaller
        by more than this select less.
        """
        pages = self.limit // self.page_size
        least = max(pages - DEFAULT_SHARE, 1) if method.selects else pages
        by_parts: dict[tuple[int, int], PageBudget] = {}  # rising, so the last is the largest
        for tokens in range(least * self.page_size, self.limit + 1, self.page_size):
            if self.fits(tokens, method):
                budget = self.pages(tokens, method)
                by_parts[budget.sink, budget.window] = budget
        return tuple(by_parts.values())

    def most_selected(self, method: "Method") -> int:
        """Most pages or tokens that a request selects per KV head on average."""
        most = max((budget.select for budget in self.largest(method)), default=0)
        return most * (self.page_size if method.per_token else 1)

    def of_share(self, share: float, prompt: int, method: "Method") -> int:
        """Tokens of a share of a prompt, rounded to a budget that the request may have."""
        least = self.least(method)
        most = max(self.limit // self.page_size * self.page_size, least)
        return min(max(round(prompt * share / self.page_size) * self.page_size, least), most)

    def nearest(self, tokens: int) -> int:
        """Tokens of the nearest whole number of pages, at least of one."""
        return max(1, round(tokens / self.page_size)) * self.page_size

    def _needed(self, budget: int, method: "Method") -> int:
        """Tokens of sink, window (where pages are selected) and one page."""
        sink, window = self._parts(budget, method)
        return sink + (window if method.selects else 0) + self.page_size

    def _parts(self, budget: int, method: "Method") -> tuple[int, int]:
        """Tokens of sink and window: the user's, the method's, or a share of the budget.

        By default the window has at least two pages: the tail page may hold a single token, and the
        tokens just before it matter most.
        """
        part = budget // DEFAULT_SHARE // self.page_size * self.page_size
        sink, window = max(part, self.page_size), max(part, 2 * self.page_size)
        if method.sink_pages is not None:
            sink = method.sink_pages * self.page_size
        if method.window_pages is not None:
            window = method.window_pages * self.page_size
        return (
            sink if self.sink is None else self.sink,
            window if self.window is None else self.window,
        )

    def _more_room(self, key: str, method: "Method") -> str:
        """The remedies where a budget is too small for a method."""
        parts = {"sink": self.sink, "window": self.window if method.selects else None}
        given = " and ".join(name for name, tokens in parts.items() if tokens is not None)
        remedies = [f"Raise {key}"]
        if given:
            remedies.append(f"lower {given}")
        if method.name != self.own:
            remedies.append(f"leave {method.name} out")
        return ", or ".join(remedies)
