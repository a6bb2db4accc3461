"""LMCache keeps an instance's blocks in a process of its own; what comes back is retrieved from."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.engine import ROUNDING, assert_same, shortened
from tests.support.server import (
    BUDGET,
    MODEL,
    PROMPT,
    Server,
    ask,
    free_ports,
    serving,
    tokens_of,
    until,
)
from vllm_kvretrieval.doctor.server import Client

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.slow]

pytest.importorskip("lmcache", reason="needs LMCache: pip install --no-deps lmcache")

LENGTH, CHUNK = 1505, 256
TOKENS = 48


@contextmanager
def keeping(log: Path) -> Iterator[int]:
    """The port of LMCache's server, which keeps blocks in memory."""
    first = free_ports(2)
    command = [
        *(str(Path(sys.executable).with_name("lmcache")), "server", "--host", "127.0.0.1"),
        *("--port", str(first), "--http-port", str(first + 1), "--chunk-size", str(CHUNK)),
        *("--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "engine_driven", "--disable-observability"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        until(lambda: "cache server is running" in log.read_text(errors="replace"), log)
        yield first
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def log(tmp_path) -> Path:
    """What LMCache's server logs."""
    return tmp_path / "lmcache.txt"


@pytest.fixture
def server(tmp_path, log, monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # there caches can be reset
    model = shortened(tmp_path / "model", MODEL, 4)
    with keeping(log) as port:
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
        options = (
            *("--enforce-eager", "--enable-prompt-tokens-details", "--kv-transfer-config"),
            json.dumps(transfer | {"kv_connector_extra_config": extra}),
        )
        with serving(tmp_path / "log.txt", *options, model=model) as server:
            yield server


def test_what_lmcache_brings_back_is_retrieved_from(server, log):
    """All whole chunks; answers are as before."""
    prompt = tokens_of(server, 2 * PROMPT)[:LENGTH]
    whole = LENGTH // CHUNK * CHUNK
    expected = ask(server.url, prompt, TOKENS).answer
    assert expected.cached == 0
    until(lambda: f"Stored {whole} tokens" in log.read_text(errors="replace"), log)
    status, _ = Client(server.url).ask("/reset_prefix_cache", {})
    assert status == 200
    again = ask(server.url, prompt, TOKENS)
    assert again.answer.cached == whole
    assert server.total("external_prefix_cache_hits_total") == whole
    usage = server.usage(again.id)
    assert usage["sparse_steps"] == TOKENS - 1
    assert usage["pages_attended"] == BUDGET / 32
    assert_same(again.answer, expected, ROUNDING)
