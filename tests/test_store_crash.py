"""An engine with a store is killed at random moments: nothing wrong is found, ever."""

import random
import signal
import subprocess
import sys
import time

import psutil  # type: ignore[import-untyped]
import pytest

from tests.engine import random_llama
from tests.store_crash import BLOCK, SEEDS, ask, start
from tests.store_model import contents
from vllm_kvretrieval.store.files import Folder
from vllm_kvretrieval.store.store import open_store, store_names

ROUNDS, MANY = 1, 40
LONGEST_S = 4.0
READY_S = 200

pytestmark = [pytest.mark.engine]


def kill(child, chance):
    """Kill scheduler, worker, or both with everything else; what is left has to end by itself."""
    processes = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    workers = [p for p in processes if "Worker" in p.name()]
    victims = chance.choice([processes[:1], workers or processes, processes])
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    return processes


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


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(MANY, marks=pytest.mark.slow)])
def test_kills(tmp_path, rounds):
    """Of the scheduler, the worker, or all: at the start, in prefill, in decode, in eviction."""
    chance = random.Random(time.time_ns())
    model, directory = random_llama(tmp_path / "model", 4, 2), str(tmp_path / "store")
    left = []
    for _ in range(rounds):
        command = [sys.executable, "-m", "tests.store_crash", model, directory]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
            assert child.stdout is not None
            lines = []
            for line in child.stdout:
                lines.append(line)
                if line == b"ready\n":
                    break
            else:
                pytest.fail(b"".join(lines).decode()[-5000:])
            time.sleep(chance.random() * LONGEST_S)
            left += kill(child, chance)
            child.kill()
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
