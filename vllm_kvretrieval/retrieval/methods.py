"""The methods as presets over the axes of choice (see docs/architecture.md)."""

from dataclasses import dataclass
from typing import Literal

Index = Literal["min_max", "none"]
Schedule = Literal["speculative", "never"]


@dataclass(frozen=True)
class Method:
    """One retrieval method.

    Attributes:
        index: Summary of a page's keys that queries are scored against: ``min_max`` (channel-wise
            minimum and maximum) or ``none``.
        schedule: When pages are selected: ``speculative`` (with the previous step's query,
            corrected per KV head where the query turned too far; FreeKV, sections 3.2 and 3.3) or
            ``never``.
        summary: One line for ``vllm serve --help``.
    """

    index: Index
    schedule: Schedule
    summary: str

    @property
    def selects(self) -> bool:
        """Whether pages beyond sink and window are ever attended to."""
        return self.schedule != "never"

    def serves(self, other: "Method") -> bool:
        """Whether a server of this method can run a single request under ``other``."""
        return other == self or other.index == "none"


METHODS: dict[str, Method] = {
    "freekv": Method("min_max", "speculative", "speculative page retrieval with correction"),
    "streamingllm": Method("none", "never", "sink and window only, a baseline"),
}
