"""Families of methods: the family of a method decides which options have an effect with it.

The files of :mod:`vllm_kvretrieval.methods` say how each family works.
"""

from dataclasses import dataclass

from vllm_kvretrieval.retrieval.schedule import Schedule


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        methods: What its methods are called in messages and documentation.
        trait: Why options of other families have no effect. It follows a method's name.
    """

    methods: str
    trait: str


DROPPING = Family(
    "methods that drop tokens", "which keeps tokens by the attention that they receive"
)
HEADS = Family("methods by which some heads attend to everything", "which selects nothing")
WHOLE = Family("full attention and retrieval", "which attends to everything")
FILTERS = Family(
    "layers that share a selection",
    "which selects by all keys, in layers of its own, one set for all heads and layers after",
)
SCORED = Family("methods with an index", "which selects by an index")
NOTHING = Family("methods that select nothing", "which selects nothing")
FAMILIES = (DROPPING, HEADS, WHOLE, FILTERS, SCORED, NOTHING)


def family_with(schedule: Schedule) -> Family:
    """The family of the methods with a schedule."""
    if schedule.keeps:
        return DROPPING
    if schedule.by_head:
        return HEADS
    if schedule.whole:
        return WHOLE
    if schedule.shares:
        return FILTERS
    return SCORED if schedule.selects else NOTHING


def what_parts(one: Family, other: Family) -> str | None:
    """The reason why a method of one family cannot have a schedule of the other; None: it can.

    A method with an index may have a schedule that never selects, and then does not use its index.
    """
    pair = {one, other}
    if len(pair) == 1 or pair == {SCORED, NOTHING}:
        return None
    return next(family.methods for family in FAMILIES if family in pair)
