"""Two replicas behind vLLM's router: a session has its own, and another while that one is away."""

import time
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.support.engine import shortened
from tests.support.routing import routing
from tests.support.server import MODEL, PROMPT, WAIT_S, Server, running, until

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.slow]

pytest.importorskip("vllm_router", reason="needs vLLM's router: pip install vllm-router")

SESSIONS = [f"session-{number}" for number in range(12)]
OPTIONS = (
    *("--enforce-eager", "--enable-prompt-tokens-details"),
    *("--kv-retrieval.home", "disk", "--kv-retrieval.home_bytes", "256MiB"),
)
POLICY = ("--policy", "consistent_hash", "--worker-urls")


class Fleet:
    """Replicas, a router before them, and the sessions that ask it."""

    def __init__(self, replicas: list[Server], url: str) -> None:
        self.replicas = replicas
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, session: str, prompt: str) -> tuple[int, Any]:
        """The place of the replica that has answered, and its answer."""
        before = self._served()
        answer = self._client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            extra_headers={"X-Session-ID": session},
            extra_body={"ignore_eos": True},
        )
        end = time.monotonic() + WAIT_S
        while (after := self._served()) == before:
            assert time.monotonic() < end, "no replica has counted the request"
        (place,) = (place for place, served in after.items() if served != before[place])
        return place, answer

    def _served(self) -> dict[int, float]:
        return {
            place: replica.total("request_success_total")
            for place, replica in enumerate(self.replicas)
            if not replica.ended
        }


def turn(number: int, session: str) -> str:
    """The prompt of a turn: all before it, and one more question."""
    return f"{session}\n{PROMPT}" + " And once more? The pass key is" * number


def test_sessions_stay_and_move_with_their_replicas(tmp_path):
    """Each finds its blocks again; one whose replica dies is served by the other, until that one
    is back."""
    model = shortened(tmp_path / "model", MODEL, 4)
    router = tmp_path / "router.txt"

    def start(name: str, port: int | None = None) -> Server:
        server = Server(tmp_path / name, *OPTIONS, model=model, port=port)
        return stack.enter_context(running(server))

    with ExitStack() as stack:
        replicas = [start("first.txt"), start("second.txt")]
        for replica in replicas:
            replica.wait_until_ready()
        urls = [replica.url for replica in replicas]
        fleet = Fleet(replicas, stack.enter_context(routing(router, *POLICY, *urls)))

        homes = [fleet.ask(session, turn(0, session))[0] for session in SESSIONS]
        assert {*homes} == {0, 1}
        again = [fleet.ask(session, turn(1, session)) for session in SESSIONS]
        assert [place for place, _ in again] == homes
        assert all(answer.usage.prompt_tokens_details.cached_tokens > 1000 for _, answer in again)
        assert all(replica.total("kv_retrieval_heads_decoded_total") for replica in replicas)

        replicas[0].kill()
        moved = [fleet.ask(session, turn(2, session))[0] for session in SESSIONS]
        assert {*moved} == {1}

        replicas[0] = start("third.txt", replicas[0].port)
        replicas[0].wait_until_ready()
        until(lambda: fleet.ask(SESSIONS[homes.index(0)], "Hello")[0] == 0, router)
        back = [fleet.ask(session, turn(3, session))[0] for session in SESSIONS]
        assert back == homes
