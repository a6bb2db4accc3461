"""How much of what lies before them chunks of prompts attend to, as a word of a command line."""

from __future__ import annotations

import re
from typing import NamedTuple


class PrefillBudget(NamedTuple):
    """The tokens that a chunk attends to before it, or a share of all of them if that is more.

    Attributes:
        depth: In which share of the layers; see the option ``prefill_depth``.
    """

    tokens: int
    share: float = 0.0
    depth: float = 1.0

    def __str__(self) -> str:
        share = f"+{100 * self.share:.10g}%" if self.share else ""
        return f"{self.tokens}{share}" + (f"@{100 * self.depth:.10g}%" if self.depth < 1 else "")


EXACTLY = PrefillBudget(0)
"""Full attention."""


def prefill_budget(text: str) -> PrefillBudget:
    """Parse ``2048``, ``2048+25%`` or ``2048+25%@70%``; a share, and a depth, is above 0 and below
    100 %."""
    percent = r"(\d+(?:\.\d+)?)%"
    match = re.fullmatch(rf"(-?\d+)(?:\+{percent})?(?:@{percent})?", text)
    if match is None:
        raise ValueError
    parts = [None if part is None else float(part) / 100 for part in match.groups()[1:]]
    if not all(part is None or 0 < part < 1 for part in parts):
        raise ValueError
    share, depth = parts
    return PrefillBudget(int(match[1]), share or 0.0, depth or 1.0)
