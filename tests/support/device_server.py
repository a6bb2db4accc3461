"""Processes of support/device_engine.py that start in a second, as those of support/workers.py do.

They are forked by a server of their own, which has made vLLM take the CPU for a device, and has
imported all that an engine imports then.
"""

import os
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any
from unittest import mock

_server: Any = forkserver.ForkServer()
_server.set_forkserver_preload(["tests.support.device_preloaded"])


class _Popen(popen_forkserver.Popen):
    """A process that this server forks; Python knows of one server only."""

    def _launch(self, process: Any) -> None:
        ask = "connect_to_new_process"
        with mock.patch.object(forkserver, ask, getattr(_server, ask)):
            super()._launch(process)  # type: ignore[misc]


class _Process(ForkServerProcess):
    """Has what the server has in its environment, and what the process has that asks for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._environment)
        super().run()

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802 (multiprocessing's name)
        return _Popen(process)


class Context(ForkServerContext):
    """The context in which that server forks processes."""

    Process = _Process


def pid() -> int | None:
    """The server; None: it was not needed yet."""
    number: int | None = _server._forkserver_pid
    return number
