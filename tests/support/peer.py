"""A driver of an engine that computes nothing: the next token is the one before plus one."""

import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import protocol

STEP_S = 0.002


class Counting:
    """It says that it reads a thousand tokens in a second."""

    def __init__(
        self, context: int, threads: int, fails_from: int = 1 << 30, saved: str = ""
    ) -> None:
        if threads < 0:
            raise ValueError("no threads")
        self.versions = {"counting": "1"}
        self._context, self._fails_from, self._saved = context, fails_from, Path(saved)
        print("loaded", file=sys.stderr)

    def generate(self, tokens: list[int], count: int, method: str = "") -> dict[str, Any]:
        if len(tokens) >= self._fails_from:
            raise RuntimeError("so long a prompt is too much")
        assert len(tokens) + count <= self._context
        steps = [STEP_S * (1 + len(method))] * (count - 1)
        found = [(tokens[-1] + n) % 1000 for n in range(1, count + 1)]
        return {"first_token_s": len(tokens) / 1000, "steps_s": steps, "tokens": found}

    def save(self, name: str) -> None:
        (self._saved / name).write_text("saved")

    def restore(self, name: str) -> None:
        assert (self._saved / name).read_text() in ("saved", "wide")

    def widen(self, name: str, tokens: list[int], to: str) -> None:
        assert (self._saved / name).read_text() == "saved"
        (self._saved / to).write_text("wide")

    def die(self) -> None:
        raise SystemExit


if __name__ == "__main__":
    protocol.serve(Counting)
