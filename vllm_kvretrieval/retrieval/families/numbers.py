"""Numbers of methods that requests may set, too."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.retrieval.needs import Need

if TYPE_CHECKING:
    from vllm_kvretrieval.retrieval.families.base import Method


@dataclass(frozen=True)
class SeatField:
    """A number of a family's methods that a request may set for itself, in float32.

    An option of the server with the same name says which values it takes. The greater the number,
    the closer a step is to full attention. From this follow the option of a request, the column in
    the record of its seat (:data:`~vllm_kvretrieval.retrieval.seats.SEAT`), and that in
    :attr:`DecodeRows.numbers`, which ops read.

    Attributes:
        name: The option, and the attribute of methods.
        column: The name of the columns.
        plain: The value that changes nothing; methods without the number have it.
        methods: The methods with which requests may set it; follows "methods that".
        check: Refuses a value that a method of the family cannot have, with a RetrievalConfigError
            that says why, and what to do.
        need: The need of a method whose value is not plain; None: every setting serves it. Where
            one does not, the number of a request has no effect.
        uneven: Whether KV heads may attend to different numbers of units by it.
    """

    name: str
    column: str
    plain: float
    methods: str
    check: Callable[[float, Any], None]
    need: Need | None = None
    uneven: bool = False

    def of(self, method: "Method") -> float:
        """The value of requests of a method that name none."""
        return float(getattr(method, self.name, self.plain))
