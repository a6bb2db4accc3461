"""How long decode steps plan, and wait for what they have chosen."""

from time import perf_counter_ns


class Durations:
    """Sums over the layers of a worker.

    Attributes:
        planning: Nanoseconds in which layers chose what to attend to.
        waiting: Nanoseconds in which they brought what they had chosen to where it is read.
    """

    def __init__(self) -> None:
        self.planning = self.waiting = 0

    def note(self, began: int, planned: int) -> None:
        """Note a layer's step that ends now.

        Args:
            began: When it began to choose, by ``perf_counter_ns``.
            planned: When it had chosen.
        """
        self.planning += planned - began
        self.waiting += perf_counter_ns() - planned

    def take(self) -> dict[str, int]:
        """Microseconds since the last call, by the names of their metrics."""
        taken = {"planning_us": self.planning // 1000, "waiting_us": self.waiting // 1000}
        self.planning %= 1000
        self.waiting %= 1000
        return taken
