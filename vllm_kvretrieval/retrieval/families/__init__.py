"""The families of methods; a new one is a file here, one of ``methods``, and a name below."""

from collections.abc import Mapping, Set

from vllm_kvretrieval.retrieval.families.base import Method
from vllm_kvretrieval.retrieval.families.dropping import DroppingMethod
from vllm_kvretrieval.retrieval.families.filters import FilterMethod
from vllm_kvretrieval.retrieval.families.fixed import FixedMethod
from vllm_kvretrieval.retrieval.families.heads import HeadMethod
from vllm_kvretrieval.retrieval.families.scored import ScoredMethod
from vllm_kvretrieval.retrieval.families.whole import WholeMethod

__all__ = [
    "FAMILIES",
    "SCHEDULES",
    "DroppingMethod",
    "FilterMethod",
    "FixedMethod",
    "HeadMethod",
    "Method",
    "ScoredMethod",
    "WholeMethod",
    "apart",
    "family_with",
    "having",
]

FAMILIES: tuple[type[Method], ...] = (
    ScoredMethod,
    FixedMethod,
    FilterMethod,
    WholeMethod,
    HeadMethod,
    DroppingMethod,
)
SCHEDULES: Mapping[str, str] = {
    name: meaning for family in FAMILIES for name, meaning in family.schedules.items()
}
"""All values of the option ``schedule``, with a line for ``vllm serve --help``."""
MIXED: Set[type[Method]] = {ScoredMethod, FixedMethod}
"""Families that may have each other's schedules: an index may go unused."""


def family_with(schedule: str) -> type[Method]:
    """The family of the methods with a schedule."""
    return next(family for family in FAMILIES if schedule in family.schedules)


def apart(one: type[Method], other: type[Method]) -> str | None:
    """Why a method of one family cannot have a schedule of the other; None: it can."""
    if one is other or {one, other} == MIXED:
        return None
    return next(family.methods for family in reversed(FAMILIES) if family in (one, other))


def having(option: str, of_request: bool = False) -> tuple[type[Method], ...]:
    """The families that an option has an effect with: the ones that name it, or all."""
    named = [f for f in FAMILIES if option in (f.of_requests if of_request else f.options)]
    return tuple(named) or FAMILIES
