"""`vllm serve` as a user starts it: torch.compile, HTTP, clients that come and go."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil  # type: ignore[import-untyped]
import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.engine import checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.model]

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

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", checkpoint(MODEL)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL),
            *("--attention-backend", "freekv", "--kv-retrieval.budget", str(BUDGET)),
            *("--max-model-len", "4096", "--max-num-seqs", "8", "--async-scheduling"),
            *("--kv-cache-memory-bytes", "1G"),
        ]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_NO_USAGE_STATS": "1"},
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
        """What retrieval did for a request, as logged when it was over."""
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


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server") / "log.txt")
    children = []
    try:
        server.wait_until_ready()
        children = psutil.Process(server.process.pid).children(recursive=True)
        yield server
        # vLLM itself may log an EngineDeadError once it is told to stop.
        assert "Traceback" not in server.text()
        # A clean end is part of what is tested.
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=60) == 0, server.text()[-5000:]
        _, left = psutil.wait_procs(children, timeout=10)
        assert not left, f"still running after shutdown: {left}"
    finally:
        server.process.kill()
        for child in children:
            if child.is_running():
                child.kill()


def test_the_model_is_compiled(server):
    assert "DYNAMO_TRACE_ONCE" in server.text()
    assert f"freekv: decode attends to at most {BUDGET} tokens per KV head" in server.text()


def test_streamed_completion(server):
    stream = server.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert len(pieces) >= 12
    assert KEY in "".join(pieces)
    context = chunks[-1].usage.prompt_tokens + 11
    assert context > 3 * BUDGET
    noted = server.usage(chunks[0].id)
    assert noted["context"] == context
    assert noted["decode_steps"] == noted["sparse_steps"] == 11
    assert noted["pages_attended"] == BUDGET / 32
    assert noted["kv_read_share"] == pytest.approx(BUDGET / context, rel=0.05)


def test_chat(server):
    reply = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
    )
    assert reply.choices[0].message.content
    assert server.usage(reply.id)["sparse_steps"] == 0, "a context within the budget"


def test_request_options(server):
    exact = server.complete(PROMPT, kv_retrieval_exact=True)
    assert KEY in exact.choices[0].text
    assert server.usage(exact.id)["sparse_steps"] == 0
    little = server.complete(PROMPT, kv_retrieval_budget=256, kv_retrieval_correction_threshold=1)
    noted = server.usage(little.id)
    assert noted["pages_attended"] == 256 / 32
    assert noted["corrected_share"] == 1
    blind = server.complete(PROMPT, kv_retrieval_method="streamingllm")
    assert KEY not in blind.choices[0].text
    assert server.usage(blind.id)["corrected_share"] == 0


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"kv_retrieval_budget": 1024}, "kv_retrieval.budget=1024 exceeds the server's budget"),
        ({"kv_retrieval_budget": 500}, "kv_retrieval.budget=500 must be a positive multiple"),
        ({"kv_retrieval_budget": "much"}, "kv_retrieval.budget='much' must be a whole number"),
        ({"kv_retrieval_bugdet": 512}, "kv_retrieval of a request has no option 'bugdet'"),
        ({"kv_retrieval_method": "quest"}, "kv_retrieval.method='quest' cannot be served"),
        ({"kv_retrieval_method": ["freekv"]}, "kv_retrieval.method=['freekv'] cannot be served"),
    ],
    ids=str,
)
def test_a_bad_option_gets_a_400(server, xargs, message):
    with pytest.raises(openai.BadRequestError) as error:
        server.complete("Hello", **xargs)
    assert message in error.value.message


def test_a_bad_option_hurts_nobody_else(server):
    with ThreadPoolExecutor() as pool:
        good = pool.submit(server.complete, PROMPT, 60)
        time.sleep(0.5)
        with pytest.raises(openai.BadRequestError):
            server.complete(PROMPT, kv_retrieval_budget=1024)
        assert KEY in good.result().choices[0].text
    assert KEY in server.complete(PROMPT).choices[0].text


def test_a_lost_client_frees_its_slot(server):
    stream = server.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=1000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    first = next(iter(stream))
    stream.close()
    noted = server.usage(first.id)
    assert 0 < noted["decode_steps"] < 500


def test_many_clients(server):
    """More than run at once; everybody gets the answer."""
    options: list[dict[str, object]] = [{}, {"kv_retrieval_exact": True}, {}, {}]
    with ThreadPoolExecutor(max_workers=12) as pool:
        waiting = [pool.submit(server.complete, PROMPT, 8 + i, **options[i % 4]) for i in range(12)]
    assert all(KEY in answer.result().choices[0].text for answer in waiting)


def test_vllm_schedules_synchronously_on_a_cpu():
    """So ``--async-scheduling`` is accepted here and does nothing; once it does, test it."""
    config = EngineArgs(
        model=checkpoint(MODEL), attention_backend="freekv", async_scheduling=True
    ).create_engine_config()
    assert config.scheduler_config.async_scheduling is False
