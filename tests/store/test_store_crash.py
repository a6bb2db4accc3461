"""An engine with a store is killed at random moments: nothing wrong is found, ever."""

import contextlib
import random
import time
from multiprocessing import Pipe

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support import workers
from tests.support.engine import random_llama
from tests.support.store_crash import BLOCK, GENERATED, LENGTH, SEEDS, ask, serve, start
from tests.support.store_model import contents
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.store import open_store, store_names

BLOCKS = (LENGTH + GENERATED - 1) // BLOCK
MANY, PIECES = 25, 8
LONGEST_S = 4.0
LATE_S = 1.5
READY_S = 200

pytestmark = [pytest.mark.engine]


def parts():
    """Front end, engine core and worker of the server that runs, as far as there are any."""
    server = workers.server()
    assert server is not None
    return psutil.Process(server).children()


def is_worker(part):
    with contextlib.suppress(psutil.NoSuchProcess):
        return "Worker" in part.name()
    return False


def kill(chance):
    """Kill one part of the server, or all of it; and after a while all but the worker.

    Returns:
        What has to end by itself.
    """
    found = parts()
    for victim in chance.choice([*([part] for part in found), found]):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    time.sleep(chance.random() * LATE_S)
    left = parts()
    own = [part for part in left if not is_worker(part)]
    for part in own:
        with contextlib.suppress(psutil.NoSuchProcess):
            part.kill()
    psutil.wait_procs(own)
    return [part for part in left if part not in own]


def one_life(model, directory, prompts, chance, start_s):
    """Run a server, and kill it at some moment: in its start, its work, or its orderly end.

    The first one, whose ``start_s`` is 0, stores a block before.

    Returns:
        The seconds of its start, as far as known, and what has to end by itself.
    """
    ready, told = Pipe()
    arguments = model, directory, told, prompts, chance.getrandbits(32)
    front = workers.context().Process(target=serve, args=arguments)
    begin = time.monotonic()
    front.start()
    told.close()
    if start_s and chance.random() < 0.2:
        time.sleep(chance.random() * start_s)
    else:
        assert ready.poll(READY_S), "the server does not start"
        assert ready.recv()
        first, start_s = not start_s, time.monotonic() - begin
        if first:
            some_block(directory)
        time.sleep(chance.random() * LONGEST_S)
        if chance.random() < 0.2:
            front.terminate()
            time.sleep(chance.random())
    left = kill(chance)
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


def some_block(directory):
    """Wait until a block is stored."""
    end = time.monotonic() + 60
    while not blocks(directory)[0]:
        assert time.monotonic() < end, "nothing has been stored"
        time.sleep(0.05)


def new_blocks(directory, before):
    """Contents of the blocks of the latest answer, when all of them are stored."""
    known = set().union(*before)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        new = {key: data for key, data in blocks(directory)[0].items() if key not in known}
        if len(new) == BLOCKS:
            return new
        time.sleep(0.1)
    pytest.fail(f"{len(new)} of {BLOCKS} blocks have been stored")


@pytest.mark.parametrize(
    ("rounds", "prompts"),
    [
        pytest.param(1, SEEDS[:3], id="once"),
        *(pytest.param(MANY, SEEDS, marks=pytest.mark.slow, id=f"{i}") for i in range(PIECES)),
    ],
)
def test_kills(tmp_path, rounds, prompts):
    """Of any part, or all: at the start, in prefill, in decode, in eviction, at the end."""
    seed = time.time_ns()
    print("seed", seed)
    chance, start_s, left = random.Random(seed), 0.0, []
    model, directory = random_llama(tmp_path / "model", 4, 2), str(tmp_path / "store")
    for _ in range(rounds):
        start_s, alone = one_life(model, directory, prompts, chance, start_s)
        left += alone
    psutil.wait_procs(left, timeout=60)
    assert not [p for p in left if p.is_running()], "a worker has outlived its server"
    found, _ = blocks(directory)
    answers, fresh = {}, dict[int, dict[tuple[bytes, int], bytes]]()
    with start(model, str(tmp_path / "fresh")) as llm:
        for seed in prompts:
            answers[seed] = ask(llm, seed)
            assert answers[seed].cached == 0
            fresh[seed] = new_blocks(str(tmp_path / "fresh"), fresh.values())
    assert found
    right = {key: data for own in fresh.values() for key, data in own.items()}
    wrong = [key for key, data in found.items() if right[key] != data]
    assert not wrong, f"{len(wrong)} of {len(found)} blocks are wrong"
    most_found_first = sorted(prompts, key=lambda seed: -len(fresh[seed].keys() & found.keys()))
    with start(model, directory) as llm:
        for number, seed in enumerate(most_found_first):
            answer = ask(llm, seed)
            assert (answer.tokens, answer.logprobs) == (
                answers[seed].tokens,
                answers[seed].logprobs,
            )
            assert number or answer.cached >= BLOCK
