"""`vllm serve` with the KV cache on disk: options, answers, metrics, and a clean end."""

import json
import re
import urllib.error
import urllib.request

import pytest

from tests.support.engine import DTYPE
from tests.support.server import BUDGET, KEY, MODEL, PROMPT, serving
from vllm_kvretrieval.command import main

PAGE = 16

pytestmark = [pytest.mark.engine, pytest.mark.model]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def server(tmp_path_factory, disk):
    options = ("--kv-retrieval.home", "disk", "--kv-retrieval.home_path", str(disk))
    size = "96MiB" if DTYPE == "auto" else "192MiB"  # of float32
    slots = ("--kv-retrieval.recall_cache_bytes", size, "--kv-retrieval.page_size", str(PAGE))
    clients = ("--kv-retrieval.client_options+", "budget")
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with serving(log, *options, *slots, *clients, "--enforce-eager", forked=True) as server:
        yield server


def metrics(server):
    """vLLM's Prometheus endpoint: what is there of ours."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    found = re.findall(r"^vllm:kv_retrieval_(\w+)\{.*\} (\S+)$", text, re.MULTILINE)
    return {name.removesuffix("_total"): float(value) for name, value in found}


def test_capacity_is_that_of_the_home(server):
    """The home has room for the longest requests that may run at once, and its file has no name."""
    assert "home=disk in" in server.text()
    (tokens,) = re.findall(r"CPU KV cache size: ([\d,]+) tokens", server.text())
    assert int(tokens.replace(",", "")) >= 8 * 4096


def test_no_name_on_disk(server, disk):
    assert list(disk.iterdir()) == []


def test_the_same_answer_from_a_prefix_hit(server):
    """Found far outside the window; the second time on pages that only the home may hold."""
    before = metrics(server)
    answers = [server.complete(PROMPT, 8) for _ in range(2)]
    texts = [answer.choices[0].text for answer in answers]
    assert KEY in texts[0]
    assert texts[1] == texts[0]
    noted = [server.usage(answer.id) for answer in answers]
    assert noted[0]["pages_attended"] == BUDGET / PAGE
    after = metrics(server)
    change = {name: after[name] - before[name] for name in after}
    heads_and_layers = 3 * 29
    assert change["units_attended"] == 2 * 7 * heads_and_layers * BUDGET / PAGE
    assert 0 < change["units_missed"] < change["units_attended"]
    number = 2 if DTYPE == "auto" else 4  # bytes
    assert change["bytes_recalled"] >= change["units_missed"] * 2 * PAGE * 64 * number
    assert 0 < after["slots_used"] <= after["slots"]


SAID = [{"role": "user", "content": "Hello"}]
ROUTES = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/completions as a stream": {"prompt": "Hello", "max_tokens": 2, "stream": True},
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 2},
    "/v1/chat/completions as a stream": {"messages": SAID, "max_tokens": 2, "stream": True},
    "/v1/chat/completions/batch": {"messages": [SAID, SAID], "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/messages": {"model": MODEL, "messages": SAID, "max_tokens": 2},
}


def ask(server, number, route, **xargs):
    """Status and text of an answer to a named request, and the lines of the log that name it."""
    given = {f"kv_retrieval_{key}": value for key, value in xargs.items()}
    body = json.dumps(ROUTES[route] | {"vllm_xargs": given}).encode()
    name = f"request-{number}-of-a-client"
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    request = urllib.request.Request(f"{server.url}{route.split()[0]}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    return status, text, [line for line in server.text().splitlines() if f"'{name}'" in line]


def test_clients_may_set_one_option(server):
    """On every route, of one request as of a batch; each that is refused has a line in the log."""
    for number, route in enumerate(ROUTES):
        status, text, lines = ask(server, number, route, budget=128)
        assert (status, lines) == (200, []), (route, text)
        for place, other in enumerate(({"exact": 1}, {"budget": 128, "exact_prefix": 1})):
            status, text, lines = ask(server, f"{number}-{place}", route, **other)
            assert status == 400, (route, text)
            assert "cannot be set by a request to this server" in text
            assert len(lines) == 1
            assert f"Refused a request for {route.split()[0]} " in lines[0]


def test_the_doctor_reads_the_counters(server, capsys):
    assert main(["doctor", server.url]) == 0
    text = capsys.readouterr().out
    assert "contexts of up to 4096 tokens" in text
    assert "a bad option of a request gets a 400" in text
    assert re.search(r"block size +128 tokens", text)
    counted = metrics(server)
    read = counted["units_attended"] / counted["units_in_context"]
    assert f"decode steps read {read:.0%} of the KV cache" in text
