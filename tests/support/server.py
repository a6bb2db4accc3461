"""`vllm serve` as a user starts it, for tests."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import openai
import psutil  # type: ignore[import-untyped]
import pytest

from tests.support import forked_server
from tests.support.engine import DTYPE, Answer, checkpoint
from vllm_kvretrieval.doctor.server import Client, samples
from vllm_kvretrieval.upstream.defaults import all_cores

MODEL = "SmolLM2-135M-Instruct"
BUDGET = 256
READY_S = 600
SETTLE_S = 20
WAIT_S = 120
KEY = "48213"
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
NEEDLE = f"The pass key is {KEY}. Remember it. {KEY} is the pass key.\n"
PROMPT = (
    "There is a pass key hidden in the following text. Find it and remember it.\n\n"
    + 22 * FILLER
    + NEEDLE
    + 22 * FILLER
    + "\nWhat is the pass key? The pass key is"
)
RETRIEVAL = (
    *("--attention-backend", "freekv", "--kv-retrieval.budget", str(BUDGET)),
    *("--kv-retrieval.attention", "vllm"),  # answers are compared bit by bit
)


def free_ports(count: int = 1) -> int:
    """The first of so many ports in a row that are free."""
    while True:
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            sockets[0].bind(("127.0.0.1", 0))
            first: int = sockets[0].getsockname()[1]
            try:
                for place, following in enumerate(sockets[1:], start=1):
                    following.bind(("127.0.0.1", first + place))
            except OSError:
                continue
            return first


def _spawned(
    command: list[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    program = str(Path(sys.executable).with_name("vllm"))
    with log.open("wb") as output:
        return subprocess.Popen(
            [program, *command], stdout=output, stderr=subprocess.STDOUT, env=environment
        )


class Server:
    """A running server and what it logs.

    Args:
        log: A file for what it logs.
        options: Options of ``vllm serve``.
        model: The path of its model; that of ``MODEL`` unless given.
        engines: How many engines share the cores.
        environment: What is set for it, beside and in place of what all have.
        port: Where it listens; somewhere unless given.
        retrieves: Whether it has a retrieval method, or is stock vLLM.
        forked: Whether it is there sooner, and not as a user starts it: support/forked_server.py.
    """

    def __init__(
        self,
        log: Path,
        *options: str,
        model: str | None = None,
        engines: int = 1,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
        retrieves: bool = True,
        forked: bool = False,
    ):
        self.port = port or free_ports()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.ended = False
        self.children: list[psutil.Process] = []
        command = [
            *("serve", model or checkpoint(MODEL)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL),
            *(RETRIEVAL if retrieves else ()),
            *("--max-model-len", "4096", "--max-num-seqs", "8", "--async-scheduling"),
            *("--kv-cache-memory-bytes", "1G", "--dtype", DTYPE),
            *options,
        ]
        settings = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_NO_USAGE_STATS": "1"}
        settings = os.environ | all_cores(engines) | settings | dict(environment or {})
        log.touch()
        self.process = (forked_server.Process if forked else _spawned)(command, log, settings)
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
                self.children = psutil.Process(self.process.pid).children(recursive=True)
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

    def total(self, name: str) -> float:
        """A metric of vLLM's, summed over engines and labels."""
        _, text = Client(self.url).ask("/metrics")
        return sum(samples(text)[f"vllm:{name}"].values())

    def end(self, sign: signal.Signals, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Tell it to end, which it must do cleanly, with nothing left behind.

        Args:
            sign: The signal that tells it.
            meanwhile: What is done before it has ended.
        """
        # vLLM itself may log an EngineDeadError once it is told to stop.
        text = self.text()
        assert "Traceback" not in text, text[text.index("Traceback") - 500 :][:5000]
        self.ended = True
        self.process.send_signal(sign)
        meanwhile()
        assert self.process.wait(timeout=60) == 0, self.text()[-5000:]
        _, left = psutil.wait_procs(self.children, timeout=10)
        left = [child for child in left if lives(child)]
        assert not left, f"still running after shutdown: {left}"

    def kill(self) -> None:
        """End all its processes at once, by SIGKILL, as a machine that fails does."""
        self.ended = True
        children = self.children
        if self.process.poll() is None:
            children = children + psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait()
        psutil.wait_procs(children, timeout=SETTLE_S)

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


class Reply(NamedTuple):
    """What a server has answered to a request.

    Attributes:
        id: The request's.
        answer: Its tokens, as of an engine that is asked without a server.
        transfer: Where another instance finds its blocks, if one is to have them.
    """

    id: str
    answer: Answer
    transfer: dict[str, Any]


def ask(url: str, prompt: list[int], tokens: int, **more: Any) -> Reply:
    """Ask for so many tokens, greedily, of a server with ``--enable-prompt-tokens-details``.

    Args:
        url: The server's.
        prompt: Token ids.
        tokens: How many.
        more: Further fields of the request.
    """
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    asked |= {"logprobs": 0, "ignore_eos": True, "return_token_ids": True, **more}
    status, text = Client(url).ask("/v1/completions", asked)
    assert status == 200, text
    told = json.loads(text)
    (choice,) = told["choices"]
    details = told["usage"]["prompt_tokens_details"] or {}
    answer = Answer(
        choice["token_ids"],
        choice["logprobs"]["token_logprobs"],
        details.get("cached_tokens") or 0,
    )
    return Reply(told["id"], answer, told.get("kv_transfer_params") or {})


def tokens_of(server: Server, text: str) -> list[int]:
    """Token ids of a text."""
    _, told = Client(server.url).ask("/tokenize", {"model": MODEL, "prompt": text})
    ids: list[int] = json.loads(told)["tokens"]
    return ids


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


def lives(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that has may be there until its parent looks."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """A server that starts, and is told to end, unless it was ended meanwhile."""
    try:
        yield server
        if not server.ended:
            server.end(signal.SIGINT)
    finally:
        server.kill()


@contextmanager
def serving(log: Path, *options: str, **more: Any) -> Iterator[Server]:
    """One that is :func:`running`, and ready; arguments are those of :class:`Server`."""
    with running(Server(log, *options, **more)) as server:
        server.wait_until_ready()
        yield server
