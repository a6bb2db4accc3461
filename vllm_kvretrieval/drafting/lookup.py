"""Prompt lookup: what followed the end of a context where it stood last before."""

from typing import NamedTuple

import numpy as np

LONGEST = 32
"""Tokens that are compared at most. Where as many agree, the last such place is taken."""


class Match(NamedTuple):
    """A place whose tokens are the last ones of the context.

    Attributes:
        end: The position behind them, where a continuation begins; below the context's length.
        length: How many tokens agree, up to :data:`LONGEST`; 0: the last token is a new one.
    """

    end: int
    length: int


def find(tokens: np.ndarray) -> Match:
    """The place that agrees with most of the last tokens of a context; of several the last one.

    vLLM's ``ngram`` takes the first one: in a long context the oldest of several versions. It takes
    about as long as one pass over the tokens.

    Args:
        tokens: int32 [n]; the context, n >= 1.
    """
    last = len(tokens) - 1
    places = np.flatnonzero(tokens[:last] == tokens[last])
    if not len(places):
        return Match(last, 0)
    length, found = 1, int(places[-1])
    while length < LONGEST:
        places = places[places >= length]
        places = places[tokens[places - length] == tokens[last - length]]
        if not len(places):
            break
        length, found = length + 1, int(places[-1])
    return Match(found + 1, length)
