"""`vllm serve` with a store: killed, started again, and asked what it was asked before."""

import json
import signal
import threading
import urllib.error
import urllib.request

import pytest

from tests.support.engine import DTYPE, shortened
from tests.support.server import MODEL, PROMPT, Server, ask, serving, tokens_of
from vllm_kvretrieval.doctor.server import Client
from vllm_kvretrieval.store.listing import listed

pytestmark = [pytest.mark.engine, pytest.mark.model]

LAYERS = 4
LAST = 256
"""Tokens of the answer that runs when the server is told to end."""
SLOTS = "10MiB" if DTYPE == "auto" else "20MiB"  # of float32


def options(directory):
    store = ("--kv-retrieval.home", "disk", "--kv-retrieval.store", str(directory))
    more = ("--enforce-eager", "--enable-prompt-tokens-details")
    return *store, "--kv-retrieval.recall_cache_bytes", SLOTS, *more


def told(server, salt=None):
    """Tokens, their log-probs, and how many tokens of the prompt the server had computed before."""
    salted = {"cache_salt": salt} if salt else {}
    return ask(server.url, tokens_of(server, PROMPT), 12, **salted).answer


def call(server, path, asked=None):
    """What an endpoint answers; asks by POST if there is something to ask for."""
    data = None if asked is None else json.dumps(asked).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def meanwhile(server, ended):
    """What others get of a server that is told to end: statuses of its health and of answers, and
    tokens of these.
    """
    client, found = Client(server.url), []
    while not ended.is_set():
        try:
            health, _ = client.ask("/health")
            status, text = client.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 1})
        except OSError:
            break
        told = json.loads(text)
        found.append((health, status, told.get("usage", {}).get("completion_tokens", 0)))
    return found


def drain(server):
    """Tell a server to end, by SIGTERM, when an answer has begun.

    Returns:
        The tokens that still come, and what others get that ask meanwhile.
    """
    stream = server.client.completions.create(
        model=MODEL,
        prompt=tokens_of(server, f"A last question. {PROMPT}"),
        max_tokens=LAST,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    come = list(next(stream).choices[0].token_ids)
    rest = (token for chunk in stream for token in chunk.choices[0].token_ids)
    ended, others = threading.Event(), list[tuple[int, int, int]]()
    asking = threading.Thread(target=lambda: others.extend(meanwhile(server, ended)))
    asking.start()
    server.end(signal.SIGTERM, lambda: come.extend(rest))
    ended.set()
    asking.join()
    return come, others


def try_sessions(server):
    """Wrong options of sessions get a 400 before a stream begins; what is pinned has a name."""
    for options, said in (
        ({"pin": True}, "needs the name of a session"),
        ({"session": "../x", "pin": True}, "cannot be a session's name"),
        ({"retain": 1e9}, "must be a number of seconds from 0 to 86400"),
        ({"retain": "NaN"}, "must be a number of seconds"),
        ({"prefetch": "a b"}, "cannot be a session's name"),
    ):
        xargs = {f"kv_retrieval_{key}": value for key, value in options.items()}
        asked = {"model": MODEL, "prompt": "Hello", "stream": True, "vllm_xargs": xargs}
        status, answer = call(server, "/v1/completions", asked)
        assert (status, said in answer["error"]["message"]) == (400, True)
    pins = {"kv_retrieval_session": "chat", "kv_retrieval_pin": 1, "kv_retrieval_prefetch": "chat"}
    assert ask(server.url, tokens_of(server, PROMPT), 2, vllm_xargs=pins).answer.cached > 500
    _, answer = call(server, "/v1/kv_store?contexts=5")
    (named,) = (one for one in answer["stores"][0]["contexts"] if one["names"])
    assert named["names"] == ["session.chat"]
    assert named["pinned_tokens"] == named["tokens"] > 500
    unpins = {"kv_retrieval_session": "chat", "kv_retrieval_pin": 0}
    ask(server.url, tokens_of(server, "Bye."), 2, vllm_xargs=unpins)
    _, answer = call(server, "/v1/kv_store?contexts=5")
    assert not any(one["names"] for one in answer["stores"][0]["contexts"])


def test_kill_and_start(tmp_path, monkeypatch):
    """All processes at once, by SIGKILL. A tenant finds what it computed, others find nothing.

    Endpoints are there if they are asked for. What is dropped by them is found no more. At the end
    the server is told to end, with a timeout: an answer that has begun comes whole, and is stored;
    others are sent away.
    """
    model = shortened(tmp_path / "model", MODEL, LAYERS)
    store = options(tmp_path / "store")
    server = Server(tmp_path / "first.txt", *store, model=model, forked=True)
    try:
        server.wait_until_ready()
        new = told(server, "a tenant")
        assert new.cached == 0
        assert call(server, "/v1/kv_store")[0] == 404
        again = told(server, "a tenant")
        assert (found := again.cached) > 500
    finally:
        server.kill()
    monkeypatch.setenv("VLLM_PLUGINS", "kvretrieval")
    drains = ("--shutdown-timeout", "60", "--kv-retrieval.sessions", "true")
    with serving(tmp_path / "second.txt", *store, *drains, model=model) as server:
        status, answer = call(server, "/v1/kv_store?contexts=5")
        assert status == 200
        ((context,),) = (store["contexts"] for store in answer["stores"])
        assert context["tokens"] >= found
        assert "tokens of earlier runs are in the prefix cache" in server.text()
        assert told(server) == new
        assert told(server, "another") == new
        assert told(server, "a tenant") == again
        server.nudge()
        assert server.total("kv_retrieval_store_blocks_found_total") == found // 128
        assert server.total("prefix_cache_hits_total") == found
        assert server.total("kv_retrieval_store_tokens_hit_total") == found
        assert server.total("kv_retrieval_store_tokens_restored_total") == context["tokens"]
        for action, meant, expected in (
            ("erase", context["id"], 400),
            ("drop", "", 400),
            ("drop", "../../etc/passwd", 404),
            ("drop", context["id"][:7], 404),
            ("drop", context["id"], 200),
            ("drop", context["id"], 200),
        ):
            status, _ = call(server, f"/v1/kv_store/{action}", {"context": meant})
            assert status == expected
        assert told(server, "a tenant") == new
        status, answer = call(server, "/v1/kv_store/drop", {"context": context["id"]})
        assert status == 200
        assert [one["asked"] for one in answer["stores"]] == [True], "it has been read again"
        assert told(server) == again
        try_sessions(server)
        (before,), _ = listed(str(tmp_path / "store"), 10)
        tokens, others = drain(server)
        assert len(tokens) == LAST
        assert {*others} <= {(200, 200, 1), (200, 503, 0), (503, 503, 0)}
        assert others[-1] == (503, 503, 0)
        assert others == sorted(others)
        (after,), _ = listed(str(tmp_path / "store"), 10)
        assert after.tokens > before.tokens + 500
