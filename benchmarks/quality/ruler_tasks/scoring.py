"""RULER's own scores: which share of the references a prediction contains."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Metric = Callable[[str, Sequence[str]], float]
"""Score of a prediction against its references, 0 to 1.

It never falls when text is appended: a reference that was found stays found.
"""

_CONTROL = re.compile(r"[\x00-\x1f]")


def prediction(text: str) -> str:
    """Return what RULER scores of a generated text: control characters are line ends to it."""
    return _CONTROL.sub("\n", text.strip()).strip()


def match_all(text: str, references: Sequence[str]) -> float:
    """Return the share of the references that the text contains, whatever the case.

    RULER's ``string_match_all``, of one sample.
    """
    found = [reference.lower() in prediction(text).lower() for reference in references]
    return sum(found) / len(found)


def match_part(text: str, references: Sequence[str]) -> float:
    """Return 1 where the text contains any of the references, whatever the case, else 0.

    RULER's ``string_match_part``, of one sample: the references are spellings of one answer.
    """
    return float(match_all(text, references) > 0)
