"""The driver's side of a peer: JSON lines in, JSON lines out.

A driver is a module that `python -m` runs in its engine's own environment, so it imports its engine
and Python's library alone. Its one argument is a JSON object: ``handle``, the file descriptor of
answers, and the arguments of its engine's class. The first line that it writes says that the model
is loaded. Then it answers calls, one line each, until its standard input ends.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol


class Engine(Protocol):
    """What a driver makes of its engine; further methods can be called by their names."""

    versions: dict[str, str]
    """Of the packages that decide its speed."""

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """Decode so many tokens behind a prompt, greedily, whatever ends a text.

        Returns:
            ``first_token_s``; ``steps_s`` of the tokens behind the first one; and ``tokens``, or
            ``text`` where the engine gives no ids.
        """
        ...


def serve(make: Callable[..., Engine]) -> None:
    """Load the engine and answer calls; an error ends the process, and is its last answer."""
    arguments = json.loads(sys.argv[1])
    with os.fdopen(arguments.pop("handle"), "w", buffering=1) as answers:

        def say(ok: bool, value: Any) -> None:
            answers.write(json.dumps([ok, value]) + "\n")

        try:
            engine = make(**arguments)
            say(True, engine.versions)
            for line in sys.stdin:
                method, given = json.loads(line)
                say(True, getattr(engine, method)(**given))
        except Exception as error:
            traceback.print_exc()
            say(False, f"{type(error).__name__}: {error}")
    sys.stderr.flush()
    os._exit(0)  # threads of engines do not always end


def steps(times: list[float]) -> list[float]:
    """Seconds between points in time."""
    return [later - sooner for sooner, later in itertools.pairwise(times)]
