"""How much of what lies before them chunks of prompts attend to, as a word of a command line."""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class PrefillBudget(NamedTuple):
    """The tokens that a chunk attends to before it, or a share of all of them if that is more.

    Attributes:
        uniform: Whether all KV heads attend to as many. Otherwise they have their shares.
        depth: In which share of the layers; see the option ``prefill_depth``.
    """

    tokens: int
    share: float = 0.0
    uniform: bool = False
    depth: float = 1.0

    def __str__(self) -> str:
        share = f"+{100 * self.share:.10g}%" if self.share else ""
        uniform = "=" if self.uniform else ""
        depth = f"@{100 * self.depth:.10g}%" if self.depth < 1 else ""
        return f"{self.tokens}{share}{uniform}{depth}"

    @property
    def of_engine(self) -> dict[str, Any]:
        """Options that are an engine's alone."""
        options: dict[str, Any] = {}
        if self.uniform:
            options["prefill_budget_shares"] = "uniform"
        if self.depth < 1:
            options["prefill_depth"] = self.depth
        return options


EXACTLY = PrefillBudget(0)
"""Full attention."""


def prefill_budget(text: str) -> PrefillBudget:
    """Parse ``2048``, ``2048+25%`` or ``2048+25%=@70%``, where all KV heads attend to as many.

    A share, and a depth, is above 0 and below 100 %.
    """
    percent = r"(\d+(?:\.\d+)?)%"
    match = re.fullmatch(rf"(-?\d+)(?:\+{percent})?(=)?(?:@{percent})?", text)
    if match is None:
        raise ValueError
    share, depth = (None if part is None else float(part) / 100 for part in match.group(2, 4))
    if not all(part is None or 0 < part < 1 for part in (share, depth)):
        raise ValueError
    return PrefillBudget(int(match[1]), share or 0.0, match[3] is not None, depth or 1.0)
