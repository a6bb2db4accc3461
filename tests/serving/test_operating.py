"""What operators meet: clients that leave or read slowly, a full disk, a killed engine."""

import http.client
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.engine import shortened
from tests.support.mounts import ext4
from tests.support.server import MODEL, PROMPT, Server, ask, lives, serving, tokens_of, until

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.slow]

MIB = 1 << 20
LAYERS = 4
CLIENTS = 8
LEAVE = 1000
"""Streams that clients leave."""
LONG = 768
"""Tokens of an answer whose client reads slowly."""
OPTIONS = (
    *("--enforce-eager", "--enable-prompt-tokens-details", "--kv-retrieval.sessions", "true"),
    *("--kv-retrieval.home", "disk", "--kv-retrieval.home_bytes", "96MiB"),
)
ROUTE = "/v1/completions"


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A file system of its own, or, where a test cannot have one, a directory."""
    directory = tmp_path_factory.mktemp("disk")
    if os.geteuid():
        yield directory
        return
    with ext4(directory / "mounted", 256 * MIB, directory / "image") as place:
        yield place


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return shortened(tmp_path_factory.mktemp("model"), MODEL, LAYERS)


def options(disk):
    return *OPTIONS, "--kv-retrieval.store", str(disk / "store")


@pytest.fixture(scope="module")
def server(tmp_path_factory, disk, model):
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with serving(log, *options(disk), model=model, forked=True) as server:
        yield server


def body(prompt, tokens, **more):
    """A request for a stream."""
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return json.dumps(asked | {"ignore_eos": True, "stream": True} | more)


def connection(server):
    return http.client.HTTPConnection(urllib.parse.urlsplit(server.url).netloc, timeout=60)


def running(server):
    return sum(server.total(f"num_requests_{state}") for state in ("running", "waiting"))


def await_idle(server):
    until(lambda: running(server) == 0, server.log)


def held(server):
    """Open files and threads of all processes."""
    processes = [psutil.Process(server.process.pid), *server.children]
    return sum(p.num_fds() for p in processes), sum(p.num_threads() for p in processes)


def leave(server, number, prompt):
    """Begin to read an answer, or not, and go."""
    line = connection(server)
    line.request("POST", ROUTE, body([*prompt, number], 400), {"Content-Type": "application/json"})
    if number % 3:
        reply = line.getresponse()
        assert reply.status == 200
        if number % 3 == 2:
            reply.readline()
    line.close()


def test_clients_that_leave(server):
    """Many streams; nothing is left of them, and metrics are there all the time."""
    prompt = tokens_of(server, "A question that nobody waits for the answer of.")
    known = ask(server.url, tokens_of(server, PROMPT), 8).answer
    leave(server, 0, prompt)
    await_idle(server)
    before, counted = held(server), list[float]()
    with ThreadPoolExecutor(CLIENTS) as pool:
        gone = [pool.submit(leave, server, number, prompt) for number in range(LEAVE)]
        while not all(one.done() for one in gone):
            counted.append(server.total("prompt_tokens_total"))
            time.sleep(0.2)
    for one in gone:
        one.result()
    await_idle(server)
    assert counted == sorted(counted)
    assert server.total("kv_cache_usage_perc") == 0
    assert held(server)[0] <= before[0] + CLIENTS
    assert held(server)[1] <= before[1] + CLIENTS
    again = ask(server.url, tokens_of(server, PROMPT), 8).answer
    assert again.tokens == known.tokens


def test_a_client_that_reads_slowly(server):
    """Its answer is made all the same, and others do not wait; then it has all of it."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.settimeout(60)
    line.connect(("127.0.0.1", server.port))
    text = body("Tell me all.", LONG, logprobs=20)
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    line.sendall(f"{head}Connection: close\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
    until(lambda: running(server) == 1, server.log)
    ask(server.url, [1, 2, 3], 4)
    await_idle(server)
    ask(server.url, [1, 2, 3], 4)
    received = bytearray()
    while chunk := line.recv(65536):
        received += chunk
    line.close()
    events = [each for each in received.decode().split("data: ") if each.startswith("{")]
    choices = [json.loads(each.partition("\n")[0])["choices"][0] for each in events]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == LONG
    assert choices[-1]["finish_reason"] == "length"
    assert b"[DONE]" in received


def fill(path):
    """Make a file that takes all space that a file system has left."""
    with path.open("wb", buffering=0) as file:
        for size in (MIB, 1024, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def test_a_full_disk(server, disk):
    """Answers stay as they are: the store's space is reserved. What has none is said in the log,
    and done when there is some again.
    """
    if not disk.is_mount():
        pytest.skip("mounting takes root")
    prompt = tokens_of(server, PROMPT)
    known = ask(server.url, prompt, 8).answer
    pins = {"kv_retrieval_session": "full", "kv_retrieval_pin": 1}
    filler = disk / "filler"
    fill(filler)
    for number in range(4):
        new = tokens_of(server, f"{number}. {PROMPT}")
        first, second = (ask(server.url, new, 8, vllm_xargs=pins).answer for _ in range(2))
        assert first.tokens == second.tokens
        assert second.cached > first.cached
    assert ask(server.url, prompt, 8).answer.tokens == known.tokens
    assert "No space left on device" in server.text()
    filler.unlink()
    ask(server.url, prompt, 8, vllm_xargs=pins)
    ask(server.url, [1, 2, 3], 2)
    assert server.total("kv_retrieval_store_blocks_damaged_total") == 0


def test_an_engine_that_is_killed(server, disk, model, tmp_path):
    """A stream ends without a word that it is whole, and the server ends; nothing is left of it.

    The next one finds what was stored.
    """
    prompt = tokens_of(server, PROMPT)
    _, known = (ask(server.url, prompt, 8).answer for _ in range(2))
    server.nudge()
    (engine,) = {*re.findall(r"\(EngineCore pid=(\d+)\)", server.text())}
    line = connection(server)
    line.request("POST", ROUTE, body("Tell me all.", 3000), {"Content-Type": "application/json"})
    reply = line.getresponse()
    reply.readline()
    server.ended = True
    os.kill(int(engine), signal.SIGKILL)
    rest = list[bytes]()
    reading = threading.Thread(target=lambda: rest.extend(iter_lines(reply)))
    reading.start()
    server.process.wait(timeout=60)
    reading.join(60)
    assert not any(b'"finish_reason":"length"' in each for each in rest)
    _, left = psutil.wait_procs(server.children, timeout=10)
    assert not [child for child in left if lives(child)]
    with ExitStack() as stack:
        again: Server = stack.enter_context(
            serving(tmp_path / "log.txt", *options(disk), model=model, forked=True)
        )
        answer = ask(again.url, prompt, 8).answer
        assert answer.tokens == known.tokens
        assert answer.cached >= known.cached > 500


def iter_lines(reply):
    try:
        yield from reply
    except (http.client.IncompleteRead, ConnectionError):
        return
