"""Two replicas behind vLLM's router: a session has its own, and another while that one is away."""

import itertools
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.engine import shortened
from tests.support.routing import PROGRAM, manage, routing
from tests.support.server import MODEL, PROMPT, WAIT_S, Server, running, until

pytestmark = [
    *(pytest.mark.engine, pytest.mark.model, pytest.mark.slow),
    pytest.mark.skipif(PROGRAM is None, reason="needs vLLM's router: pip install vllm-router"),
]

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
        answer: Any = self._client.completions.create(
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


class Client:
    """Asks turn after turn of a session from a thread of its own, and keeps what goes wrong.

    Args:
        url: The router's.
        session: The session's name.

    Attributes:
        turns: How many it has asked.
        wrong: What went wrong.
    """

    TOKENS = 24

    def __init__(self, url: str, session: str) -> None:
        self.session = session
        self.turns, self.wrong = 0, list[str]()
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """End, with the turn that runs."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        for number in itertools.count():
            if self._ends.is_set():
                return
            try:
                self._ask(number % 4, stream=number % 2 == 0)
            except Exception as error:
                self.wrong.append(f"{self.session}, turn {number}: {error!r}")
            self.turns += 1

    def _ask(self, number: int, stream: bool) -> None:
        answer: Any = self._client.completions.create(
            model=MODEL,
            prompt=turn(number, self.session),
            max_tokens=self.TOKENS,
            temperature=0,
            stream=stream,
            extra_headers={"X-Session-ID": self.session},
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        chunks = list(answer) if stream else [answer]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        tokens = sum(len(choice.token_ids) for choice in choices)
        assert tokens == self.TOKENS, f"{tokens} tokens"
        assert choices[-1].finish_reason == "length"


def await_turns(clients: list[Client], log: Path) -> None:
    """Wait until every client has asked twice more."""
    before = [client.turns for client in clients]
    until(lambda: all(c.turns > b + 2 for c, b in zip(clients, before, strict=True)), log)


def await_idle(replica: Server) -> None:
    """Wait until nothing has run there for a moment: a request may be on its way.

    One that arrives when the server drains would get an empty answer.
    """
    idle = 0
    while idle < 2:
        running = sum(replica.total(f"num_requests_{state}") for state in ("running", "waiting"))
        idle = 0 if running else idle + 1
        time.sleep(1)


def test_a_rolling_restart(tmp_path):
    """Each replica is taken out, told to end, started anew, and put back, while clients ask.

    Nobody gets an error, or an answer that is cut off. Then sessions are where they were, and find
    what they had read: each replica has a store of its own.
    """
    model = shortened(tmp_path / "model", MODEL, 4)
    asking = SESSIONS[:3]

    def start(place: int, name: str, port: int | None = None) -> Server:
        store = ("--kv-retrieval.store", str(tmp_path / f"store-{place}"))
        log = tmp_path / f"{name}-{place}.txt"
        server = Server(log, *OPTIONS, *store, model=model, port=port, forked=True)
        return stack.enter_context(running(server))

    with ExitStack() as stack:
        replicas = [start(place, "first") for place in (0, 1)]
        for replica in replicas:
            replica.wait_until_ready()
        urls = [replica.url for replica in replicas]
        router = stack.enter_context(routing(tmp_path / "router.txt", *POLICY, *urls))
        fleet = Fleet(replicas, router)
        homes = [fleet.ask(session, turn(4, session))[0] for session in SESSIONS]
        assert {*homes} == {0, 1}

        clients = [Client(router, session) for session in asking]
        for client in clients:
            stack.callback(client.stop)
        for place, replica in enumerate(replicas):
            await_turns(clients, tmp_path / "router.txt")
            manage(router, "remove_worker", replica.url)
            await_idle(replica)
            replica.end(signal.SIGTERM)
            replicas[place] = start(place, "second", replica.port)
            replicas[place].wait_until_ready()
            manage(router, "add_worker", replica.url)
        await_turns(clients, tmp_path / "router.txt")
        for client in clients:
            client.stop()
        assert not [wrong for client in clients for wrong in client.wrong]

        back = [fleet.ask(session, turn(4, session)) for session in SESSIONS]
        assert [place for place, _ in back] == homes
        assert all(answer.usage.prompt_tokens_details.cached_tokens > 1000 for _, answer in back)
        assert all(replica.total("kv_retrieval_store_tokens_hit_total") for replica in replicas)
