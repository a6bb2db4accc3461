"""Budgets: how many pages of which kind a (layer, KV head) attends to."""

from typing import NamedTuple

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


def default_parts(budget: int, page_size: int) -> tuple[int, int]:
    """Tokens of sink and window, if the user names none.

    The window has at least two pages: the tail page may hold a single token, and the tokens just
    before it matter most.
    """
    part = budget // DEFAULT_SHARE // page_size * page_size
    return max(part, page_size), max(part, 2 * page_size)
