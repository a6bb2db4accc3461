"""vLLM's router as a user starts it, for tests."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.server import free_ports
from vllm_kvretrieval.doctor.server import Client

WAIT_S = 120
QUICK = (
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
    *("--retry-initial-backoff-ms", "1000"),
)
"""Options by which a router takes a replica for dead before it has given up a request to it."""


@contextmanager
def routing(log: Path, *options: str) -> Iterator[str]:
    """The address of a router that is ready.

    Args:
        log: A file for what it logs.
        options: Options of ``vllm-router``.
    """
    first = free_ports(2)
    command = [
        *(str(Path(sys.executable).with_name("vllm-router")), *options),
        *("--host", "127.0.0.1", "--port", str(first), "--prometheus-port", str(first + 1)),
        *("--worker-startup-check-interval", "1", *QUICK),
    ]
    url = f"http://127.0.0.1:{first}"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        until(lambda: _ready(url), log)
        yield url
    finally:
        process.kill()
        process.wait()


def until(true: Callable[[], bool], log: Path) -> None:
    """Wait until something is true.

    Args:
        true: Says whether it is.
        log: A file whose end is shown if it never is.
    """
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, log.read_text(errors="replace")[-5000:]
        time.sleep(0.5)


def _ready(url: str) -> bool:
    try:
        return Client(url).ask("/readiness")[0] == 200
    except OSError:
        return False
