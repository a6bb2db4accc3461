"""A real browser without a window, by the protocol of its developer tools."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.support.local_http import direct

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--no-proxy-server", "--remote-debugging-port=0", "--window-size=1400,900", "about:blank"),
)
START_S, WAIT_S, POLL_S = 60, 120, 0.1


class Tab:
    """A page in a browser.

    Args:
        socket: A connection to it.

    Attributes:
        requested: Addresses that the page has asked for.
        complaints: Errors that its scripts have not caught, and refusals of its policy.
    """

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0
        self.requested: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            told = json.loads(self._socket.recv(WAIT_S))
            self._note(told)
            if told.get("id") == self._number:
                assert "error" not in told, told["error"]
                return told["result"]

    def _note(self, told: dict[str, Any]) -> None:
        params = told.get("params", {})
        if told.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif told.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif told.get("method") == "Log.entryAdded" and params["entry"]["source"] == "security":
            self.complaints.append(params["entry"]["text"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + WAIT_S
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"{script}\n{self.run('document.body.innerText')}"
            time.sleep(POLL_S)
        return found

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def tab(directory: Path) -> Iterator[Tab]:
    """A page, in a browser with a profile of its own; skipped where there is no browser."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("no browser here (Debian: apt install chromium)")
    process = subprocess.Popen(
        [program, f"--user-data-dir={directory}", *FLAGS],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ports, end = directory / "DevToolsActivePort", time.monotonic() + START_S
        while not (ports.exists() and ports.read_text().count("\n")):
            assert process.poll() is None, f"{program} has ended: {process.returncode}"
            assert time.monotonic() < end, f"{program} does not start"
            time.sleep(POLL_S)
        port = ports.read_text().splitlines()[0]
        (found,) = [
            each for each in direct(f"http://127.0.0.1:{port}/json") if each["type"] == "page"
        ]
        with connect(found["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
