"""How much of what lies before them chunks of prompts attend to, as a word of a command line."""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class PrefillBudget(NamedTuple):
    """The tokens that a chunk attends to before it, or a share of all of them if that is more.

    Attributes:
        heads: The share of the KV heads that read all of them; None: that of the engine by default.
        depth: In which share of the layers; see the option ``prefill_depth``.
    """

    tokens: int
    share: float = 0.0
    heads: float | None = None
    depth: float = 1.0

    def __str__(self) -> str:
        share = f"+{100 * self.share:.10g}%" if self.share else ""
        heads = "" if self.heads is None else f"^{100 * self.heads:.10g}%"
        depth = f"@{100 * self.depth:.10g}%" if self.depth < 1 else ""
        return f"{self.tokens}{share}{heads}{depth}"

    @property
    def of_engine(self) -> dict[str, Any]:
        """Options that are an engine's alone."""
        options: dict[str, Any] = {}
        if self.heads is not None:
            options["prefill_heads"] = {"share": self.heads}
        if self.depth < 1:
            options["prefill_depth"] = self.depth
        return options


EXACTLY = PrefillBudget(0)
"""Full attention."""


def prefill_budget(text: str) -> PrefillBudget:
    """Parse ``2048``, ``2048+25%`` or ``2048+25%^20%@70%``, where 20 % of the KV heads read all.

    A share, and a depth, is above 0 and below 100 %; a share of heads may be 0.
    """
    percent = r"(\d+(?:\.\d+)?)%"
    match = re.fullmatch(rf"(-?\d+)(?:\+{percent})?(?:\^{percent})?(?:@{percent})?", text)
    if match is None:
        raise ValueError
    parts = [None if part is None else float(part) / 100 for part in match.groups()[1:]]
    share, heads, depth = parts
    if not all(part is None or 0 < part < 1 for part in (share, depth)) or (heads or 0) > 1:
        raise ValueError
    return PrefillBudget(int(match[1]), share or 0.0, heads, depth or 1.0)
