"""Scores of predictions: RULER's own, and one of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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


def match_json(text: str, references: Sequence[str]) -> float:
    """Return the share of the references, each the JSON of an object, that the text has exactly.

    The order of objects, and of their fields, and white space do not matter; every value does. An
    object of the text stands for one reference.
    """
    found, hits = [_canonical(each) for each in _objects(text)], 0
    for wanted in map(_canonical, map(json.loads, references)):
        if wanted in found:
            found.remove(wanted)
            hits += 1
    return hits / len(references)


def _canonical(value: Any) -> str:
    """One text for equal values; a number and a truth value are never equal."""
    return json.dumps(value, sort_keys=True)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The complete JSON objects of a text, those within others included."""
    decoder, place = json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            whole, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            whole, end = None, place + 1
        left = [whole]
        while left:
            value = left.pop()
            if isinstance(value, dict):
                yield value
                left += value.values()
            elif isinstance(value, list):
                left += value
        place = text.find("{", end)


METRICS: dict[str, Metric] = {"all": match_all, "part": match_part, "json": match_json}
"""Scores by name: all references have to be found, or any of them, or objects in JSON."""
