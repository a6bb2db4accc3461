"""Work beside the model: recall ahead, and contexts staged for the next layer."""

from collections.abc import Callable
from typing import Protocol

import torch


class SideWork(Protocol):
    """What runs beside the main work, in the order in which it was submitted."""

    def submit(self, work: Callable[[], object]) -> None:
        """Launch ``work`` so that it may run beside what the main work launches from now on.

        It sees what the main work has launched so far; the main work sees what it does after
        :meth:`wait`, and until then touches nothing that it writes, and writes nothing that it
        reads.
        """
        ...

    def wait(self) -> None:
        """Let the main work go on after all that was submitted; the host does not wait."""
        ...


class SideStream:
    """A CUDA stream of its own. Can be captured: every ``submit`` needs a ``wait`` before the end.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._stream = torch.cuda.Stream(device)
        self._submitted = False

    def submit(self, work: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        self._submitted = True

    def wait(self) -> None:
        if self._submitted:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._submitted = False
