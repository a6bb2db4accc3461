"""Freed memory goes back to the system while a server runs.

The C library keeps it: a prompt's tensors, of another size for each length, leave holes between
small objects that live on. In a server that read prompts of many lengths for an hour more than half
of its heap was such holes, and they grew.
"""

import ctypes
import time

EVERY_S = 60.0
"""Seconds between two times, at least: it may take a tenth of a second, and pages that are used
again are cleared by the system."""


class Heap:
    """The heap of this process, of which unused pages are given back now and then."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None: not glibc
        self._next = 0.0

    def give_back(self) -> None:
        """Give back all unused pages, unless that was done a short time ago."""
        now = time.monotonic()
        if self._trim is None or now < self._next:
            return
        self._trim(0)
        self._next = now + EVERY_S
