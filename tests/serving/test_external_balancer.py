"""Engines of a mixture of experts behind a balancer of one's own: each is a server, and takes part
in the others' steps.

vLLM 0.32 fails at the first step of such engines on CPUs, in code of its own, for want of
two functions; `tests/support/gathering.py` brings them.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from benchmarks.common import ROOT
from tests.support.engine import ROUNDING, assert_same, random_mixture
from tests.support.server import PROMPT, Server, ask, free_ports, running, tokens_of
from vllm_kvretrieval.upstream.defaults import all_cores

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.slow]

BIND = "VLLM_CPU_OMP_THREADS_BIND"
RANKS = 2
TOKENS = 16
OPTIONS = (
    *("--enforce-eager", "--no-async-scheduling", "--enable-prompt-tokens-details"),
    *("--kv-retrieval.home", "disk", "--kv-retrieval.home_bytes", "256MiB"),
    *("--data-parallel-external-lb", "--data-parallel-size", str(RANKS)),
    *("--data-parallel-address", "127.0.0.1"),
    *("--worker-extension-cls", "tests.support.gathering.GatheringWorker"),
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[list[Server]]:
    directory = tmp_path_factory.mktemp("balanced")
    model = random_mixture(directory / "model")
    cores = all_cores(RANKS)[BIND].split("|")
    shared = ("--data-parallel-rpc-port", str(free_ports()))
    with ExitStack() as stack:
        servers = []
        for rank in range(RANKS):
            options = (*OPTIONS, *shared, "--data-parallel-rank", str(rank))
            environment = {BIND: cores[rank], "PYTHONPATH": str(ROOT)}
            log = directory / f"{rank}.txt"
            server = Server(log, *options, model=model, environment=environment)
            servers.append(stack.enter_context(running(server)))
        for server in servers:
            server.wait_until_ready()
        yield servers
        for server in servers:  # where one leaves, the steps of the others fail
            server.kill()


def test_each_answers_alone_and_beside_the_other(servers):
    """What an idle engine does in the other's steps changes no answer; each has its own home."""
    prompts = [tokens_of(servers[0], f"{number} {PROMPT}") for number in range(2)]
    alone = [ask(server.url, prompts[0], TOKENS).answer for server in servers]
    assert_same(alone[1], alone[0], ROUNDING)
    with ThreadPoolExecutor() as pool:
        beside = [
            pool.submit(ask, server.url, prompt, TOKENS, cache_salt=f"{count}")
            for count in range(2)
            for server, prompt in zip(servers, prompts, strict=True)
        ]
    assert all(future.result().answer.cached == 0 for future in beside)
    for future in beside[::2]:
        assert_same(future.result().answer, alone[0], ROUNDING)
    again = [ask(server.url, prompts[0], TOKENS).answer for server in servers]
    assert all(answer.cached > 1000 for answer in again)
    for answer in again:
        assert_same(answer, alone[0], ROUNDING)
    assert all(server.total("kv_retrieval_heads_decoded_total") for server in servers)
    assert all("home=disk" in server.text() for server in servers)
