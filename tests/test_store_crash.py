"""An engine with a store is killed at random moments: nothing wrong is found, ever."""

import random
import signal
import time
from multiprocessing import Pipe

import psutil  # type: ignore[import-untyped]
import pytest

from tests import workers
from tests.engine import random_llama
from tests.store_crash import BLOCK, SEEDS, ask, serve, start
from tests.store_model import contents
from vllm_kvretrieval.store.files import Folder
from vllm_kvretrieval.store.store import open_store, store_names

ROUNDS, MANY, PIECES = 4, 25, 8
LONGEST_S = 4.0
LATE_S = 1.5
READY_S = 200

pytestmark = [pytest.mark.engine]


def parts(front):
    """Front end, engine core and worker of the server that runs, as far as there are any."""
    server = workers.server()
    assert server is not None
    others = [p for p in psutil.Process(server).children() if p.pid != front.pid]
    return [psutil.Process(front.pid), *others]


def kill(front, chance):
    """Kill one part of the server, or all of it; and after a while all but the worker.

    Returns:
        What has to end by itself.
    """
    found = parts(front)
    for victim in chance.choice([*([part] for part in found), found]):
        victim.send_signal(signal.SIGKILL)
    time.sleep(chance.random() * LATE_S)
    found = [*{*found, *parts(front)}]
    own = [part for part in found if "Worker" not in part.name()]
    for part in own:
        part.kill()
    psutil.wait_procs(own)
    return [part for part in found if part not in own]


def one_life(model, directory, chance, start_s):
    """Run a server, and kill it at some moment: in its start, its work, or its orderly end.

    Returns:
        The seconds of its start, as far as known, and what has to end by itself.
    """
    ready, told = Pipe()
    front = workers.context().Process(target=serve, args=(model, directory, told))
    begin = time.monotonic()
    front.start()
    told.close()
    if start_s and chance.random() < 0.2:
        time.sleep(chance.random() * start_s)
    else:
        assert ready.poll(READY_S), "the server does not start"
        assert ready.recv()
        start_s = time.monotonic() - begin
        time.sleep(chance.random() * LONGEST_S)
        if chance.random() < 0.2:
            front.terminate()
            time.sleep(chance.random())
    left = kill(front, chance)
    front.join()
    return start_s, left


def blocks(directory):
    """Contents of every intact block, by key and level."""
    (name,) = store_names(Folder.at(directory))
    store = open_store(directory, name)
    found = {
        (record.key, record.level): contents(store, block)
        for block, record in store.records().items()
        if store.intact(block, record)
    }
    damaged = len(store.records()) - len(found)
    store.close()
    return found, damaged


@pytest.mark.parametrize(
    "rounds",
    [ROUNDS, *(pytest.param(MANY, marks=pytest.mark.slow, id=f"{i}") for i in range(PIECES))],
)
def test_kills(tmp_path, rounds):
    """Of any part, or all: at the start, in prefill, in decode, in eviction, at the end."""
    seed = time.time_ns()
    print("seed", seed)
    chance, start_s, left = random.Random(seed), 0.0, []
    model, directory = random_llama(tmp_path / "model", 4, 2), str(tmp_path / "store")
    for _ in range(rounds):
        start_s, alone = one_life(model, directory, chance, start_s)
        left += alone
    found, _ = blocks(directory)
    answers = {}
    with start(model, directory) as llm:
        answers = {seed: ask(llm, seed) for seed in SEEDS}
    psutil.wait_procs(left, timeout=60)
    assert not [p for p in left if p.is_running()], "a worker has outlived its server"
    with start(model, str(tmp_path / "fresh")) as llm:
        fresh: dict[tuple[bytes, int], bytes] = {}
        for seed in SEEDS:
            answer = ask(llm, seed)
            assert answer.cached == 0
            assert (answer.tokens, answer.logprobs) == (
                answers[seed].tokens,
                answers[seed].logprobs,
            )
            fresh |= blocks(str(tmp_path / "fresh"))[0]
    assert found
    assert sum(answer.cached for answer in answers.values()) >= BLOCK
    wrong = [key for key, data in found.items() if fresh[key] != data]
    assert not wrong, f"{len(wrong)} of {len(found)} blocks are wrong"
