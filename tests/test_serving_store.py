"""`vllm serve` with a store: killed, started again, and asked what it was asked before."""

import re
import signal
import urllib.request

import psutil  # type: ignore[import-untyped]
import pytest

from tests.server import KEY, MODEL, PROMPT, Server, serving
from vllm_kvretrieval.engine.cpu.advice import preferred_dtype

pytestmark = [pytest.mark.engine, pytest.mark.model]

SLOTS = "96MiB" if preferred_dtype() == "auto" else "192MiB"  # of float32


def options(directory):
    store = ("--kv-retrieval.home", "disk", "--kv-retrieval.store", str(directory))
    more = ("--enforce-eager", "--enable-prompt-tokens-details")
    return *store, "--kv-retrieval.recall_cache_bytes", SLOTS, *more


def ask(server, salt=None):
    """The text of an answer, and how many tokens of the prompt the server had computed before."""
    extra = {"ignore_eos": True} | ({"cache_salt": salt} if salt else {})
    answer = server.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, extra_body=extra
    )
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, (details and details.cached_tokens) or 0


def counter(server, name):
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    values = re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


def test_kill_and_start(tmp_path):
    """All processes at once, by SIGKILL. A tenant finds what it computed, others find nothing."""
    server = Server(tmp_path / "first.txt", *options(tmp_path / "store"))
    processes = []
    try:
        server.wait_until_ready()
        main = psutil.Process(server.process.pid)
        processes = [main, *main.children(recursive=True)]
        text, cached = ask(server, "a tenant")
        assert KEY in text
        assert cached == 0
        again, found = ask(server, "a tenant")
        assert found > 1000
    finally:
        for process in processes or [psutil.Process(server.process.pid)]:
            process.send_signal(signal.SIGKILL)
        server.process.wait()
    psutil.wait_procs(processes, timeout=30)
    with serving(tmp_path / "second.txt", *options(tmp_path / "store")) as server:
        assert "tokens of earlier runs are in the prefix cache" in server.text()
        assert ask(server) == (text, 0)
        assert ask(server, "another") == (text, 0)
        assert ask(server, "a tenant") == (again, found)
        server.nudge()
        assert counter(server, "kv_retrieval_store_blocks_found") == found // 128
        assert counter(server, "prefix_cache_hits") == found
