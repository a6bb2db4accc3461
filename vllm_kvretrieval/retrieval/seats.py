"""Numbers that requests may set for themselves, and the record of a request's seat.

A *seat* is the place of a running request in all state that is kept per request. A number is
declared here once. From its declaration follow the request's option, its column in the record, its
column in the rows that ops take, and what is refused where ops lack it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_kvretrieval.errors import RetrievalConfigError

if TYPE_CHECKING:
    from vllm_kvretrieval.retrieval.method import Method


@dataclass(frozen=True)
class SeatField:
    """A number that a method sets, and a request may set otherwise; float32 in a seat's record.

    The option of the server with the same name says which values it takes, and with which families
    of methods. The greater the number, the closer a step is to full attention.

    Attributes:
        name: The option, and the attribute of :class:`Method`.
        column: Its name in :data:`SEAT`, and in :attr:`DecodeRows.numbers`.
        plain: The value that changes nothing; methods without the number have it.
        methods: The methods with which requests may set it; follows "methods that".
        unfit: Says why a method cannot have a value, as a predicate after the value and with a
            remedy; None: it can.
        estimates: What a method does by the attention that its index estimates, as a predicate;
            empty: nothing. Indexes estimate without the soft-capping of logits.
        uneven: Whether KV heads may attend to different numbers of units by it.
    """

    name: str
    column: str
    plain: float
    methods: str
    unfit: "Callable[[float, Method], str | None]"
    estimates: str = ""
    uneven: bool = False

    def of(self, method: "Method") -> float:
        """The value of requests of a method that name none."""
        return float(getattr(method, self.name, self.plain))

    def changes(self, method: "Method") -> bool:
        """Whether it changes something for these requests."""
        return self.of(method) != self.plain

    def check(self, value: float, method: "Method") -> None:
        """Refuse a value that a method cannot have.

        Raises:
            RetrievalConfigError: Says why, and what to do.
        """
        if why := self.unfit(value, method):
            raise RetrievalConfigError(f"{self.name}={value} {why}")


def _unreachable(mass: float, method: "Method") -> str | None:
    if mass == 1 or method.estimates_shares:
        return None
    return (
        f"cannot be reached with {method.name}: it takes scores that are shares of the attention, "
        "of each step (pooling mean_softmax, schedule every_step, no rerank, no outliers). Leave "
        "it out, or use kvretrieval."
    )


def _corrects_always(_: float, method: "Method") -> str | None:
    if method.speculates:
        return None
    return f"has no effect with {method.name}, which does so at every step; leave it out."


MASS = SeatField(
    name="mass",
    column="mass",
    plain=1.0,
    methods="select by shares of the attention at each step",
    unfit=_unreachable,
    estimates="selects up to a mass of the attention",
    uneven=True,
)
"""The share of the scores of all units that is enough for a KV head, which attends to the fewest
selected units that reach it together with sink and window, but to at least one. Less than 1 needs
scores pooled as shares (``Pooling.MEAN_SOFTMAX``), no reranking, no outliers, and a threshold of
1."""

CORRECTION_THRESHOLD = SeatField(
    name="correction_threshold",
    column="threshold",
    plain=1.0,
    methods="speculate",
    unfit=_corrects_always,
)
"""A KV head whose query has a lower cosine similarity to the previous step's selects before
attention; at 1 it always does."""

SEAT_FIELDS = MASS, CORRECTION_THRESHOLD
"""All of them."""

SEAT = np.dtype(
    [
        *((name, np.int32) for name in ("sink", "window", "select", "total", "method")),
        ("exact", np.bool_),
        *((known.column, np.float32) for known in SEAT_FIELDS),
        ("prefill", np.int32, 3),
        ("prefill_share", np.float64),
    ],
    align=True,
)
"""The record of a seat, the same on every device.

``sink``, ``window``, ``select``, ``total``: pages of the request's budget. ``method``: its place in
:attr:`RetrievalConfig.methods`. ``exact``: whether the request attends to its whole context at each
step. ``prefill``: pages of sink, window and selection of a chunk of its prompt; zeros: chunks
attend to all before them. ``prefill_share``: the least share of the tokens before a chunk that the
chunk attends to. The others are the :data:`SEAT_FIELDS`.
"""


def even(records: np.ndarray) -> bool:
    """Whether no number of requests makes their KV heads attend to different numbers of units.

    Args:
        records: :data:`SEAT` [n].
    """
    uneven = (known for known in SEAT_FIELDS if known.uneven)
    return all((records[known.column] == known.plain).all() for known in uneven)
