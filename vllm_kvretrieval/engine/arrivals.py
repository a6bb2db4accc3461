"""The order in which requests arrive, by numbers: a clock may be set back."""


class Arrivals:
    """Numbers of the requests that have not ended, from 1 on.

    Attributes:
        last: The number of the request that has arrived last; 0: none has.
    """

    def __init__(self) -> None:
        self.last = 0
        self._numbers: dict[str, int] = {}

    @property
    def first(self) -> int:
        """The number of the first request that has not ended, or of the next one."""
        return min(self._numbers.values(), default=self.last + 1)

    def note(self, request_id: str) -> None:
        """Number a request that has just arrived."""
        self.last += 1
        self._numbers[request_id] = self.last

    def of(self, request_id: str) -> int:
        """The number of a request; of a session, that of its first input."""
        return self._numbers[request_id]

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._numbers.pop(request_id, None)
