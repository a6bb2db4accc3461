"""Few cases in place of a full product: any two values of two parameters meet in one of them."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(axes: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
    """Cases that cover all pairs, each as the places of its values; the same in every run."""
    cases = list(product(*(range(len(values)) for values in axes)))
    places = list(combinations(range(len(axes)), 2))
    pairs_of = {case: {(a, b, case[a], case[b]) for a, b in places} for case in cases}
    left, chosen = set().union(*pairs_of.values()), []
    while left:
        best = max(cases, key=lambda case: len(pairs_of[case] & left))
        chosen.append(best)
        left -= pairs_of[best]
    return chosen


def covering(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by a product, of which ``make test`` runs the cases of :func:`pairwise`.

    The others are left to ``make test-all``.

    Args:
        axes: Values of each parameter. Of parameters that belong together, a name such as
            ``head_size__parts`` has tuples.
    """
    values = [list(axis) for axis in axes.values()]
    quick, params = set(pairwise(values)), []
    for case in product(*(range(len(axis)) for axis in values)):
        marks = () if case in quick else pytest.mark.slow
        given: list[Any] = []
        for name, axis, place in zip(axes, values, case, strict=True):
            given += axis[place] if "__" in name else (axis[place],)
        params.append(pytest.param(*given, marks=marks))
    names = [name for together in axes for name in together.split("__")]
    return pytest.mark.parametrize(names, params)
