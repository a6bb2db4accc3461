"""Two engines behind one server, on this machine: their homes, metrics and KV events."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from tests.support.engine import shortened
from tests.support.server import MODEL, PROMPT, Server, free_ports, serving
from vllm_kvretrieval.doctor.server import CACHE, INFO, PREFIX, Client, samples

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.slow]

ENGINES = 2
QUIET_S = 3


class Router:
    """What a router learns of the engines' prefix caches by their events.

    Attributes:
        stored: For each engine, hashes and tokens of the blocks that are in its prefix cache.
        sizes: Sizes of blocks that were named.
        resets: How often each engine has emptied its cache.
    """

    def __init__(self, port: int) -> None:
        self.stored: list[dict[object, list[int]]] = [{} for _ in range(ENGINES)]
        self.sizes: set[int] = set()
        self.resets = [0] * ENGINES
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self._sockets: list[zmq.Socket[bytes]] = []
        for engine in range(ENGINES):
            subscriber: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
            subscriber.connect(f"tcp://127.0.0.1:{port + engine}")
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            self._sockets.append(subscriber)

    def close(self) -> None:
        for subscriber in self._sockets:
            subscriber.close(linger=0)

    def listen(self) -> None:
        """Take up events until none has come for some seconds."""
        end = time.monotonic() + QUIET_S
        while time.monotonic() < end:
            for engine, subscriber in enumerate(self._sockets):
                while subscriber.poll(50):
                    *_, payload = subscriber.recv_multipart()
                    self._take(engine, payload)
                    end = time.monotonic() + QUIET_S

    def _take(self, engine: int, payload: bytes) -> None:
        known = self.stored[engine]
        for event in self._decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                self.sizes.add(event.block_size)
                for number, key in enumerate(event.block_hashes):
                    first = number * event.block_size
                    known[key] = event.token_ids[first : first + event.block_size]
            elif isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    del known[key]
            elif isinstance(event, AllBlocksCleared):
                known.clear()
                self.resets[engine] += 1


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(ENGINES)


@pytest.fixture(scope="module")
def server(tmp_path_factory, port) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("scale")
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    options = (
        *("--data-parallel-size", str(ENGINES), "--enforce-eager", "--no-async-scheduling"),
        *("--kv-retrieval.home", "disk", "--kv-retrieval.home_path", str(directory)),
        *("--kv-retrieval.home_bytes", "256MiB", "--kv-events-config", json.dumps(events)),
    )
    model = shortened(directory / "model", MODEL, 4)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_SERVER_DEV_MODE", "1")  # there caches can be reset
        with serving(directory / "log.txt", *options, model=model, engines=ENGINES) as server:
            yield server


@pytest.fixture(scope="module")
def router(server, port) -> Iterator[Router]:
    router = Router(port)
    router.listen()
    yield router
    router.close()


def by_engine(server: Server, name: str) -> dict[str, float]:
    """A metric of every engine."""
    _, text = Client(server.url).ask("/metrics")
    return {dict(labels)["engine"]: value for labels, value in samples(text)[name].items()}


def test_both_engines_serve_and_say_what_they_have_cached(server, router):
    """Each has a home, metrics and events of its own; the routers' block size is the doctor's."""
    texts = [f"{number} {PROMPT}" for number in range(6)]
    with ThreadPoolExecutor() as pool:
        assert all(answer.choices for answer in pool.map(server.complete, texts))
    assert by_engine(server, INFO).keys() == {"0", "1"}
    decoded = by_engine(server, f"{PREFIX}heads_decoded_total")
    assert decoded.keys() == {"0", "1"}
    assert all(decoded.values()), "both have answered, and retrieved"
    router.listen()
    _, text = Client(server.url).ask("/metrics")
    told = {int(dict(labels)["block_size"]) for labels in samples(text)[CACHE]}
    assert router.sizes == told
    (size,) = told
    assert all(router.stored)
    _, answer = Client(server.url).ask("/tokenize", {"model": MODEL, "prompt": texts[0]})
    tokens = json.loads(answer)["tokens"]
    blocks = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
    assert any(all(block in known.values() for block in blocks) for known in router.stored)


def test_a_reset_is_seen(server, router):
    """And what is asked again is stored again."""
    resets, before = list(router.resets), [list(known) for known in router.stored]
    status, _ = Client(server.url).ask("/reset_prefix_cache", {})
    assert status == 200
    texts = [f"{PROMPT} {number}" for number in range(6)]
    with ThreadPoolExecutor() as pool:  # events are published with an engine's next step
        assert all(answer.choices for answer in pool.map(server.complete, texts))
    router.listen()
    assert router.resets == [count + 1 for count in resets]
    assert all(router.stored)
    assert not any(
        key in known for known, keys in zip(router.stored, before, strict=True) for key in keys
    )
