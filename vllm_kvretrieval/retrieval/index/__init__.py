"""The indexes by name, those of other packages included."""

import functools
from dataclasses import fields, is_dataclass
from inspect import isabstract
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.index.base import (
    Field,
    Index,
    IndexKind,
    pack,
    unpack,
)
from vllm_kvretrieval.retrieval.index.bounding import Bounding
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.index.landmark import Landmark
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.index.mean import Mean
from vllm_kvretrieval.retrieval.index.mean_std import MeanStd
from vllm_kvretrieval.retrieval.index.min_max import MinMax
from vllm_kvretrieval.retrieval.index.one_bit import OneBit
from vllm_kvretrieval.retrieval.index.representative import Representative
from vllm_kvretrieval.retrieval.outside import entry_points
from vllm_kvretrieval.values import MOST, meant, shortened

__all__ = ["Field", "Index", "IndexKind", "indexes", "make_index", "pack", "unpack"]

OWN: tuple[type[Index], ...] = (
    MinMax,
    Mean,
    MeanStd,
    Bounding,
    Representative,
    OneBit,
    LowRank,
    Landmark,
    Exact,
)

ENTRY_POINTS = "vllm_kvretrieval.indexes"
"""Group of entry points by which other packages add theirs: name -> subclass of Index."""


@functools.cache
def indexes() -> dict[str, type[Index]]:
    """All indexes by name, those of other packages included.

    Raises:
        RetrievalConfigError: An entry point names no index, or one whose name is taken.
    """
    known = {index.name: index for index in OWN}
    for name, index in entry_points(ENTRY_POINTS).items():
        if not _is_index(index) or getattr(index, "name", None) != name:
            raise RetrievalConfigError(
                f"entry point {name} of {ENTRY_POINTS} must be a frozen dataclass of this "
                "name, a subclass of vllm_kvretrieval.extend.Index that has all its "
                f"methods; got {index!r}."
            )
        if name in known:
            raise RetrievalConfigError(
                f"entry point {name} of {ENTRY_POINTS}: there is an index of this name; rename it."
            )
        known[name] = index
    return known


def _is_index(value: Any) -> bool:
    if not (isinstance(value, type) and issubclass(value, Index)) or isabstract(value):
        return False
    return is_dataclass(value) and value.__dataclass_params__.frozen


def make_index(value: Any) -> Index | None:
    """The index that an option describes.

    Args:
        value: The index's name, or ``{name: parameters}``; ``none``: no index.

    Raises:
        RetrievalConfigError: There is no such index, or it has no such parameters.
    """
    if value == "none":
        return None
    if isinstance(value, dict) and len(value) == 1:
        ((name, parameters),) = value.items()
    else:
        name, parameters = value, {}
    kind = indexes().get(name) if isinstance(name, str) else None
    if kind is None or not isinstance(parameters, dict):
        raise RetrievalConfigError(
            f"index={shortened(value)} is unknown; use one of {', '.join(indexes())}, or one with "
            'its parameters such as {"mean_std": {"spread": 0.5}}.' + meant(name, indexes())
        )
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for parameter, given in parameters.items():
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if parameter not in known or not number or not abs(given) <= MOST:
            raise RetrievalConfigError(
                f"index={shortened(value)}: {name} has {', '.join(known) or 'no parameters'}, all "
                "numbers."
            )
    return kind(**parameters)
