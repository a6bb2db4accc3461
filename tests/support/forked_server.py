"""`vllm serve` in a process that has imported everything: it is there in seconds, not in forty.

Spawned, three processes one after the other import vLLM: a server, its engine core and a worker.
Here the server is forked by that of tests/support/workers.py, and forks the others itself.
"""

import logging
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from unittest import mock

from tests.support import workers


class Process:
    """The server's process, with the methods of one of ``subprocess.Popen``.

    Args:
        command: The arguments of ``vllm``.
        log: A file for what it says.
        environment: All of its environment.
    """

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str]):
        with mock.patch.dict(os.environ, environment, clear=True):
            self._process = workers.context().Process(target=_serve, args=(command, log))
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit status, for which this waits so many seconds at most."""
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)


class _Process(ForkProcess):
    """An engine core or a worker, which finds its cores in the environment."""

    def run(self) -> None:
        workers.take_cores()
        super().run()


class _Context(ForkContext):
    Process = _Process


def _serve(command: list[str], log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    sys.argv = ["vllm", *command]
    from vllm.entrypoints.cli.main import main

    with workers.forked(_Context):
        main()
