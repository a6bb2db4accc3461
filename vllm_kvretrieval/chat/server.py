"""A vLLM server that a program starts for itself."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HOST = "127.0.0.1"
READY_S = 600
DRAIN_S = 10
"""How long a server that is stopped may store what it has read; else vLLM kills it at once."""
STOP_S = 20
POLL_S = 0.5


class ServerError(RuntimeError):
    """The server did not start or stopped answering; the message ends with its log."""


class Server:
    """A vLLM server that only this machine can reach; a context manager that always stops it.

    Args:
        model: path or name of the model.
        options: further command-line options of `vllm serve`.
        settings: variables to set in its environment.
        log: file that receives the server's output.
        secrets: variables of its environment that nobody is shown.
    """

    def __init__(
        self,
        model: str,
        options: Sequence[str],
        settings: Mapping[str, str],
        log: Path,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self._settings, self._secrets = settings, secrets or {}
        self.port = _free_port()
        executable = Path(sys.executable).with_name("vllm")
        own = ["--host", HOST, "--port", str(self.port), "--shutdown-timeout", str(DRAIN_S)]
        self._command = [str(executable), "serve", model, *own, *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the server answers, without a trailing slash."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The number of its first process, whose descendants are the others."""
        assert self._process is not None, "it has been started"
        return self._process.pid

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        settings = [f"{name}={value}" for name, value in self._settings.items()]
        return shlex.join([*settings, "vllm", *self._command[1:]])

    def __enter__(self) -> Server:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "VLLM_NO_USAGE_STATS": "1", **self._settings, **self._secrets},
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Ask the server to stop, then end the processes that are left of it."""
        assert self._process is not None
        try:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        finally:  # at once, if Ctrl-C is pressed again
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def wait_ready(self, progress: Callable[[float], None]) -> float:
        """Wait until the server answers.

        Args:
            progress: Gets the seconds waited so far.

        Returns:
            The seconds it took.

        Raises:
            ServerError: the server ended, or was not ready after ten minutes.
        """
        assert self._process is not None
        start = time.monotonic()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while (waited := time.monotonic() - start) < READY_S:
            if self._process.poll() is not None:
                raise self.error(f"it ended with exit status {self._process.returncode}")
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
                opener.open(f"{self.url}/health", timeout=POLL_S),
            ):
                return waited
            progress(waited)
            time.sleep(POLL_S)
        raise self.error(f"it did not answer within {READY_S} s")

    def error(self, what: str, lines: int = 30) -> ServerError:
        """Make an error that says `what` happened and shows the last lines of the log."""
        text = self.log.read_text(errors="replace").splitlines()
        # Debug lines would push the cause out of sight.
        tail = "\n".join([line for line in text if " DEBUG " not in line][-lines:])
        return ServerError(f"the server failed: {what}\nthe end of {self.log}:\n{tail}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
