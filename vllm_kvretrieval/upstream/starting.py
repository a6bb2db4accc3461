"""Starts of engines for the subcommands, which Ctrl-C ends."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.upstream.defaults import all_cores

if TYPE_CHECKING:
    from vllm import LLM, EngineArgs

INTERRUPTED = 130
"""The exit status of a program that Ctrl-C has ended."""


def start_engine(arguments: "EngineArgs") -> "LLM":
    """An engine on all cores, but for those of its settings that the environment names.

    Args:
        arguments: Those of the engine.

    Raises:
        SystemExit: Ctrl-C has ended the start.
    """
    from vllm import LLM

    for name, value in all_cores(arguments.tensor_parallel_size).items():
        os.environ.setdefault(name, value)
    with interruptible():
        return LLM.from_engine_args(arguments)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end what vLLM does within: it forgets a KeyboardInterrupt, but no SystemExit.

    In programs that do something else at Ctrl-C nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: Any) -> None:
    sys.exit(INTERRUPTED)
