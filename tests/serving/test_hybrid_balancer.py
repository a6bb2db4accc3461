"""vLLM's hybrid balancer: a server on each machine deals requests out to the engines there, and a
balancer of one's own deals them out to the servers. Both "machines" are this one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.support.engine import ROUNDING, assert_same, shortened
from tests.support.server import MODEL, PROMPT, Server, ask, free_ports, running, tokens_of
from vllm_kvretrieval.doctor.server import INFO, PREFIX, Client, samples

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.slow]

MACHINES, ENGINES = 2, 2
TOKENS = 6


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[list[Server]]:
    directory = tmp_path_factory.mktemp("hybrid")
    model = shortened(directory / "model", MODEL, 4)
    options = (
        *("--enforce-eager", "--no-async-scheduling", "--enable-prompt-tokens-details"),
        *("--kv-retrieval.home", "disk", "--kv-retrieval.home_bytes", "256MiB"),
        *("--data-parallel-hybrid-lb", "--data-parallel-size", str(MACHINES * ENGINES)),
        *("--data-parallel-size-local", str(ENGINES), "--api-server-count", "1"),
        *("--data-parallel-address", "127.0.0.1"),
        *("--data-parallel-rpc-port", str(free_ports())),
    )
    with ExitStack() as stack:
        servers = []
        for machine in range(MACHINES):
            first = ("--data-parallel-start-rank", str(machine * ENGINES))
            log = directory / f"{machine}.txt"
            server = Server(log, *options, *first, model=model, engines=ENGINES)
            servers.append(stack.enter_context(running(server)))
        for server in servers:
            server.wait_until_ready()
        yield servers


def test_every_engine_of_every_machine_answers(servers):
    """Answers do not depend on the engine; each has its own home and its own metrics."""
    prompt = tokens_of(servers[0], PROMPT)
    expected = ask(servers[0].url, prompt, TOKENS).answer
    with ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(ask, server.url, prompt, TOKENS, cache_salt=f"{count}")
            for count in range(ENGINES)
            for server in servers
        ]
    for future in asked:
        assert_same(future.result().answer, expected, ROUNDING)
    for machine, server in enumerate(servers):
        _, text = Client(server.url).ask("/metrics")
        found = samples(text)
        names = {str(machine * ENGINES + engine) for engine in range(ENGINES)}
        assert {dict(labels)["engine"] for labels in found[INFO]} == names
        decoded = found[f"{PREFIX}heads_decoded_total"]
        assert {dict(labels)["engine"] for labels in decoded} == names
        assert all(decoded.values()), "all have answered, and retrieved"
