"""Work beside the model: recall ahead, and contexts staged for the next layer."""

from collections.abc import Callable
from typing import Protocol

import torch


class SideWork(Protocol):
    """Runs work beside the main work, in the order in which it is submitted."""

    def submit(self, work: Callable[[], object]) -> None:
        """Launch ``work`` so that it may run beside the main work's later launches.

        ``work`` sees the results of the main work's launches so far. The main work sees those of
        ``work`` after :meth:`wait`; until then it neither touches what ``work`` writes nor writes
        what ``work`` reads.
        """
        ...

    def wait(self) -> None:
        """Let the main work continue after all submitted work; the host does not wait."""
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
