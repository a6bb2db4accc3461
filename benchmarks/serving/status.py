"""One line on the terminal that says what a long program is doing and for how long already."""

from __future__ import annotations

import sys

QUIET_S = 60


class Status:
    """A line on standard error that is rewritten in place; off a terminal, one per minute."""

    def __init__(self) -> None:
        self._text = ""
        self._prefix = ""
        self._shown = 0.0
        self._live = sys.stderr.isatty()

    def prefix(self, text: str) -> None:
        """Set what every following line starts with, such as the number of the part."""
        self._prefix = text

    def set(self, text: str) -> None:
        """Name what happens from now on."""
        self._text = text
        self._shown = 0.0
        if self._live:
            self.tick(0.0)

    def tick(self, seconds: float) -> None:
        """Show that what was named goes on, `seconds` after its beginning."""
        line = f"{self._prefix}{self._text} {seconds:.0f} s"
        if self._live:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif seconds - self._shown >= QUIET_S:
            self._shown = seconds
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Make room for ordinary output."""
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
