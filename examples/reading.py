"""How far a server is with reading a prompt, and a line of the terminal that says so."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import httpx
import openai

POLL_S = 0.5
TIMEOUT_S = 5.0
EVERY_S = 10.0
"""How often a stream that is no terminal gets a line."""


class Progress:
    """One line of the terminal that says how long something has been running, and how far it is.

    Args:
        what: It.
        stream: Where to print; by default what is printed anyway.
    """

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._next = 0.0

    def __call__(self, seconds: float, far: str = "") -> None:
        text = f"{self._what} {seconds:.0f} s{far and ', '}{far}"
        if self._live:
            print(f"\r\033[K{text}", end="", file=self._stream, flush=True)
        elif seconds >= self._next:
            self._next += EVERY_S
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Take the line off a terminal."""
        if self._live:
            print("\r\033[K", end="", file=self._stream, flush=True)

    def done(self, result: str) -> None:
        """Put the result in its place."""
        self.clear()
        print(result, file=self._stream, flush=True)

    @contextlib.contextmanager
    def running(self, far: Callable[[], str] = str) -> Iterator[Callable[[], None]]:
        """Keep the line up to date until the block ends, or the yielded function is called.

        Args:
            far: Says how far it is.
        """
        start, over = time.monotonic(), threading.Event()

        def tick() -> None:
            while not over.wait(POLL_S):
                self(time.monotonic() - start, far())

        def stop() -> None:
            over.set()
            thread.join()

        thread = threading.Thread(target=tick)
        thread.start()
        try:
            yield stop
        finally:
            stop()


class Reading:
    """How much of a prompt a vLLM server has read.

    vLLM counts a prompt when it has been read. Until then the KV cache says how far it is, while
    the server has no other request.

    Args:
        client: A client of the server.
        request: Model and messages.
    """

    def __init__(self, client: openai.OpenAI, **request: Any) -> None:
        self._client = client.with_options(timeout=TIMEOUT_S, max_retries=0)
        self._root = str(client.base_url).rstrip("/").removesuffix("/v1")
        self._request = request
        self._tokens: int | None = None

    def __call__(self) -> str:
        """Such as ``4,096 of 7,912 tokens``; empty where the server does not tell."""
        try:
            if self._tokens is None:
                url = f"{self._root}/tokenize"
                counted = self._client.post(url, cast_to=httpx.Response, body=self._request)
                self._tokens = int(counted.json()["count"])
            metrics = self._client.get(f"{self._root}/metrics", cast_to=httpx.Response).text
        except (openai.OpenAIError, ValueError, LookupError):
            return ""
        read = tokens_in_use(metrics)
        total = f"{self._tokens:,} tokens"
        return total if read is None else f"{min(read, self._tokens):,} of {total}"


def tokens_in_use(metrics: str) -> int | None:
    """Tokens in the KV cache that the one request of a server holds.

    Args:
        metrics: The server's, as Prometheus gets them.

    Returns:
        None if it has none or several, or does not tell.
    """

    def values(name: str) -> list[float]:
        found = re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
        return [float(value) for value in found]

    sizes = {int(size) for size in re.findall(r'\bkv_cache_size_tokens="(\d+)"', metrics)}
    used = values("kv_cache_usage_perc")
    if sum(values("num_requests_running")) != 1 or len(sizes) != 1 or not used:
        return None
    return round(sum(used) * sizes.pop())
