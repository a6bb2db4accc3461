"""How much of what lies before them chunks of prompts attend to, as a word of a command line."""

from __future__ import annotations

import re
from typing import NamedTuple


class PrefillBudget(NamedTuple):
    """The tokens that a chunk attends to before it, or a share of all of them if that is more."""

    tokens: int
    share: float = 0.0

    def __str__(self) -> str:
        return f"{self.tokens}+{100 * self.share:.10g}%" if self.share else str(self.tokens)


EXACTLY = PrefillBudget(0)
"""Full attention."""


def prefill_budget(text: str) -> PrefillBudget:
    """Parse ``2048``, or ``2048+25%``; a share is above 0 and below 100 %."""
    match = re.fullmatch(r"(-?\d+)(?:\+(\d+(?:\.\d+)?)%)?", text)
    if match is None:
        raise ValueError
    if match[2] is None:
        return PrefillBudget(int(match[1]))
    if not 0 < (percent := float(match[2])) < 100:
        raise ValueError
    return PrefillBudget(int(match[1]), percent / 100)
