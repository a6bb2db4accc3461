"""vLLM's router as a user starts it, for tests."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.server import free_ports, until
from vllm_kvretrieval.doctor.server import Client

PROGRAM = shutil.which(
    "vllm-router", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
)
"""The router, which may have an environment of its own; None: there is none."""
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
    assert PROGRAM is not None
    first = free_ports(2)
    command = [
        *(PROGRAM, *options),
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


def manage(url: str, action: str, replica: str) -> None:
    """Take a replica out of the rotation (``remove_worker``), or back in (``add_worker``)."""
    status, text = Client(url).ask(f"/{action}?url={replica}", {})
    assert status == 200, text


def _ready(url: str) -> bool:
    try:
        return Client(url).ask("/readiness")[0] == 200
    except OSError:
        return False
