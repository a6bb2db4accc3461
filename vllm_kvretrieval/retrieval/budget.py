"""Budgets: how many pages of which kind a (layer, KV head) attends to."""

from typing import NamedTuple

DEFAULT_BUDGET = 2048
LARGEST_DEFAULT_PART = 512
"""FreeKV's sink and window at a budget of 2048 tokens (section 5.1)."""


class PageBudget(NamedTuple):
    """A budget in pages. ``select`` is 0 for methods that never select."""

    sink: int
    window: int
    select: int

    @property
    def total(self) -> int:
        """Pages attended to per KV head; a context that fits is attended to whole."""
        return self.sink + self.window + self.select


def default_part(budget: int, page_size: int) -> int:
    """Tokens of sink, and of window, where the user names none: a quarter of the budget each.

    At most 512, FreeKV's own choice at its budget of 2048; at least one page.
    """
    quarter = min(LARGEST_DEFAULT_PART, budget // 4)
    return max(page_size, quarter // page_size * page_size)
