"""A driver of a peer in a process group of its own, as its caller sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.common import ROOT
from benchmarks.engines import EngineError

SETTLE_S = 0.05
SHUTDOWN_S = 15.0
SAMPLE_S = 2.0
TAIL_LINES = 12


class Peer:
    """A running driver; use it as a context manager.

    Args:
        name: For messages.
        command: That starts the driver, without its argument.
        arguments: Of the driver's class.
        env: Variables that are set for it.
        log: File that its output is added to.
        limit_s: Seconds that a start, or a call, may take.

    Raises:
        EngineError: The driver could not load its model, with the end of its log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        arguments: Mapping[str, Any],
        env: Mapping[str, str],
        log: Path,
        limit_s: float,
    ) -> None:
        self.name, self._log, self._limit = name, log, limit_s
        reading, writing = os.pipe()
        path = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(ROOT))))
        log.parent.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        with log.open("a") as output:
            self._process = subprocess.Popen(
                [*command, json.dumps({"handle": writing} | dict(arguments))],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=os.environ | env | {"PYTHONPATH": path},
                pass_fds=[writing],
                process_group=0,
                text=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading)
        try:
            self.versions: dict[str, str] = self._receive()
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - begin

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pause(self) -> None:
        """Freeze all of it."""
        self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run meanwhile."""
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        try:
            yield
        finally:
            self.pause()

    def call(self, method: str, /, **arguments: Any) -> Any:
        """Call a method of the driver's class."""
        assert self._process.stdin is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):  # a dead driver is reported below
            self._process.stdin.write(json.dumps([method, arguments]) + "\n")
            self._process.stdin.flush()
        return self._receive()

    def pss(self) -> int:
        """Bytes of memory of all its processes, shared ones by their shares."""
        total = 0
        for process in self._family():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) << 10
        return total

    @contextlib.contextmanager
    def peak(self) -> Iterator[list[int]]:
        """Watch its memory meanwhile; the list holds the most of it in the end."""
        found, done = [0], threading.Event()

        def watch() -> None:
            while not done.wait(SAMPLE_S):
                found[0] = max(found[0], self.pss())

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield found
        finally:
            done.set()
            watching.join()
            found[0] = max(found[0], self.pss())

    def close(self) -> None:
        """End it, frozen or not, and every process that it started."""
        family = self._family()
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None, "it is a pipe"
            self._process.stdin.close()
        _, left = psutil.wait_procs(family, SHUTDOWN_S)
        self._signal(signal.SIGKILL)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._answers.close()

    def _family(self) -> list[Any]:
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _receive(self) -> Any:
        if not select.select([self._answers], [], [], self._limit)[0]:
            raise EngineError(f"{self.name}: no answer within {self._limit:.0f} s")
        line = self._answers.readline()
        ok, value = json.loads(line) if line else (False, "its process ended unexpectedly")
        if not ok:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise EngineError(f"{self.name}: {value}\nThe end of {self._log}:\n{tail}")
        return value
