"""`vllm serve` as a user starts it, for tests."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import psutil  # type: ignore[import-untyped]
import pytest

from tests.engine import DTYPE, checkpoint
from vllm_kvretrieval.engine.cpu.advice import all_cores

MODEL = "SmolLM2-135M-Instruct"
BUDGET = 512
READY_S = 300
SETTLE_S = 20
KEY = "48213"
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
NEEDLE = f"The pass key is {KEY}. Remember it. {KEY} is the pass key.\n"
PROMPT = (
    "There is a pass key hidden in the following text. Find it and remember it.\n\n"
    + 40 * FILLER
    + NEEDLE
    + 40 * FILLER
    + "\nWhat is the pass key? The pass key is"
)


class Server:
    """A running server and what it logs."""

    def __init__(self, log: Path, *options: str, model: str | None = None, engines: int = 1):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", model or checkpoint(MODEL)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL),
            *("--attention-backend", "freekv", "--kv-retrieval.budget", str(BUDGET)),
            *("--kv-retrieval.attention", "vllm"),  # answers are compared bit by bit
            *("--max-model-len", "4096", "--max-num-seqs", "8", "--async-scheduling"),
            *("--kv-cache-memory-bytes", "1G", "--dtype", DTYPE),
            *options,
        ]
        settings = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_NO_USAGE_STATS": "1"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | all_cores(engines) | settings,
            )
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def wait_until_ready(self) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the server ended:\n{self.text()[-5000:]}"
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:
                time.sleep(0.5)
            else:
                return
        pytest.fail(f"not ready after {READY_S} s:\n{self.text()[-5000:]}")

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def usage(self, request_id: str) -> dict[str, float]:
        """The figures of a request that are logged when it ends."""
        line = rf"kv_retrieval request_id=\S*{re.escape(request_id)}\S* (.*)"
        end = time.monotonic() + SETTLE_S
        while not (found := re.search(line, self.text())):
            assert time.monotonic() < end, f"nothing logged about {request_id}"
            self.nudge()
        return {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", found[1])}

    def nudge(self) -> None:
        """Make the engine step: the worker learns with its next step who is done."""
        self.complete("Hello", max_tokens=1)

    def complete(self, prompt: str, max_tokens: int = 8, **xargs: object):
        """A greedy completion with the given ``vllm_xargs``."""
        return self.client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"vllm_xargs": xargs, "ignore_eos": True},
        )


@contextmanager
def serving(
    log: Path, *options: str, model: str | None = None, engines: int = 1
) -> Iterator[Server]:
    """A server that is ready; at the end it must leave cleanly, and nothing behind.

    Args:
        log: A file for what it logs.
        options: Options of ``vllm serve``.
        model: The path of its model; that of ``MODEL`` unless given.
        engines: How many engines share the cores.
    """
    server = Server(log, *options, model=model, engines=engines)
    children = []
    try:
        server.wait_until_ready()
        children = psutil.Process(server.process.pid).children(recursive=True)
        yield server
        # vLLM itself may log an EngineDeadError once it is told to stop.
        text = server.text()
        assert "Traceback" not in text, text[text.index("Traceback") - 500 :][:5000]
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=60) == 0, server.text()[-5000:]
        _, left = psutil.wait_procs(children, timeout=10)
        assert not left, f"still running after shutdown: {left}"
    finally:
        server.process.kill()
        for child in children:
            if child.is_running():
                child.kill()
