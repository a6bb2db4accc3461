"""vLLM's scheduler with a store, and a worker that writes bytes which say whose they are.

Servers end and start, in order or killed at random moments; whatever a request shares has to hold
the bytes of its key and its level.
"""

import contextlib
import gc
import os
import random
import signal
import time
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from benchmarks.serving import store_start
from benchmarks.stepper import BLOCK, Stepper
from tests.support.store_life import BLOCKS, GEOMETRY, OPTIONS, Life, prompt, stepper, written
from tests.support.store_model import contents
from vllm_kvretrieval.store.disk.contexts import NO_PARENT
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.inbox import DROP, INBOX, PIN, UNPIN
from vllm_kvretrieval.store.disk.records import Record
from vllm_kvretrieval.store.disk.store import open_store, store_names
from vllm_kvretrieval.store.serving import scheduler
from vllm_kvretrieval.store.serving.halves import FIELD

ABORTED = RequestStatus.FINISHED_ABORTED
KILLS = 25
MANY = 20000
LONGEST_S = 0.06

pytestmark = [pytest.mark.model]


def test_a_prefix_is_found_after_a_restart(tmp_path):
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    assert life.stepper.ask(prompt(1), 4)[1] == 0
    life.end()
    life = Life(directory, stepper(directory))
    assert life.stepper.ask(prompt(2), 4)[1] == 0
    assert life.stepper.ask(prompt(1), 4)[1] == 8 * BLOCK
    assert life.checked == 8
    life.end()


def test_a_start_with_many_blocks_looks_for_no_garbage(tmp_path):
    """That would take several times as long as all else; afterwards it is looked for again."""
    store_start.fill(tmp_path / "store", MANY)
    pool, looks = store_start.pool_for(MANY), []
    gc.callbacks.append(look := lambda phase, _: looks.append(phase))
    try:
        store_start.restore(tmp_path / "store", pool)
    finally:
        gc.callbacks.remove(look)
    assert looks.count("start") <= 2
    assert gc.isenabled()


def test_a_request_that_shares_nothing_does_not_wait(tmp_path):
    """One with log-probabilities of its prompt, for instance: vLLM schedules it at once."""
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    life.stepper.ask(prompt(1), 4)
    life.end()
    life = Life(directory, stepper(directory))
    name = life.stepper.add(prompt(1), 4)
    life.scheduler.requests[name].skip_reading_prefix_cache = True
    life.stepper.run()
    assert life.stepper.shared[name] == [0]
    assert len(life.stepper.outputs[name]) == 4
    life.end()


def test_levels_survive(tmp_path):
    """Blocks of generated tokens beyond the budget are shared, but not by exact requests."""
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    tokens, _ = life.stepper.ask(prompt(1), 2 * BLOCK)
    turn = [*prompt(1), *tokens, 1, 2, 3]
    life.end()
    life = Life(directory, stepper(directory))
    assert life.stepper.ask(turn, 2, {"exact": True})[1] == 8 * BLOCK
    assert life.stepper.ask(turn, 2)[1] == 10 * BLOCK
    life.end()


@pytest.mark.parametrize(
    ("budget", "known", "shared"),
    [(320, True, 8), (256, True, 10), (192, True, 10), (192, False, 8)],
)
def test_measures_of_levels_survive(tmp_path, budget, known, shared):
    """A larger budget of the next run shares no answers of this one, a smaller one does.

    If the file of levels is lost, and of stores of earlier versions, nobody does.
    """
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    tokens, _ = life.stepper.ask(prompt(1), 2 * BLOCK)
    turn = [*prompt(1), *tokens, 1, 2, 3]
    life.end()
    if not known:
        next(directory.glob("*/levels.json")).unlink()
    life = Life(directory, stepper(directory, max_budget=512))
    assert life.stepper.ask(turn, 2, {"budget": budget})[1] == shared * BLOCK
    assert life.stepper.ask(turn, 2, {"budget": budget})[1] == 10 * BLOCK
    life.end()


def test_a_damaged_block_leaves_the_cache(tmp_path):
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    life.stepper.ask(prompt(1), 4)
    life.damage(3)
    life.end()
    life = Life(directory, stepper(directory))
    assert life.stepper.ask(prompt(1), 4)[1] == 2 * BLOCK
    assert life.stepper.ask(prompt(1), 4)[1] == 8 * BLOCK
    life.end()


def test_the_order_of_use_survives(tmp_path):
    """What was used longest ago is overwritten first, whenever it was computed."""
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    for document in (1, 2, 3):
        life.stepper.ask(prompt(document, 20), 2)
    life.stepper.ask(prompt(1, 20), 2)
    life.end()
    life = Life(directory, stepper(directory))
    life.stepper.ask(prompt(4, 30), 2)
    assert life.stepper.ask(prompt(1, 20), 2)[1] == 20 * BLOCK
    assert life.stepper.ask(prompt(3, 20), 2)[1] == 20 * BLOCK
    assert life.stepper.ask(prompt(2, 20), 2)[1] < 20 * BLOCK
    life.end()


def test_a_reset_empties_the_store(tmp_path):
    """Also of what the worker has been told of and has not written, or has yet to be told of."""
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    life.stepper.ask(prompt(1), 4)
    late = [(1, Record(b"k" * 32, NO_PARENT, 0, 0, 0))]
    life.home._pending.update(late)
    life.scheduler._store._step.commit += late
    assert life.scheduler.reset_prefix_cache()
    life.stepper.step()
    life.end()
    assert check_all(directory) == (0, 0)
    life = Life(directory, stepper(directory))
    assert life.stepper.ask(prompt(1), 4)[1] == 0
    life.end()


def test_a_reset_counts_if_the_server_stops_at_once(tmp_path):
    """The worker may store a block after the reset, and no step tells it of the reset."""
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    life.stepper.ask(prompt(1), 4)
    records = life.store.records()
    assert life.scheduler.reset_prefix_cache()
    for block, record in records.items():
        life.store.commit(block, record)
    life.end()
    assert check_all(directory) == (0, 0)


def end_of(directory, tokens, size=BLOCK):
    """The key of the block that ends a prompt of as many tokens, of any document."""
    (name,) = store_names(Folder.at(str(directory)))
    with contextlib.closing(open_store(str(directory), name)) as store:
        first = [record for record in store.records().values() if not record.group]
    return [record.key for record in first if (record.number + 1) * size == tokens]


def test_a_running_server_drops_what_it_is_asked_to(tmp_path):
    """Before the request that would find it; what others share stays, and so does the rest."""
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    longer = [*prompt(1), *range(3 * BLOCK)]
    for tokens in (prompt(1), longer, prompt(2)):
        life.stepper.ask(tokens, 2)
    life.settle()
    (key,) = end_of(directory, len(longer) // BLOCK * BLOCK)
    life.change(DROP, key)
    assert life.stepper.ask(longer, 2)[1] == 0, "of one context, no part of which others have"
    assert life.stepper.ask(prompt(2), 2)[1] == 8 * BLOCK
    life.end()


@pytest.mark.parametrize("reset", [False, True])
def test_copies_of_an_earlier_run_are_forgotten_too(tmp_path, reset):
    """A document may be in a store twice; a server shares one of the copies."""
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    for _ in range(2):
        name = life.stepper.add(prompt(1), 2)
        life.scheduler.requests[name].skip_reading_prefix_cache = True
        life.stepper.run()
    life.end()
    (key, again) = end_of(directory, 8 * BLOCK)
    assert key == again
    life = Life(directory, stepper(directory))
    if reset:
        assert life.scheduler.reset_prefix_cache()
    else:
        life.change(DROP, key)
    life.stepper.ask(prompt(2, 1), 2)
    life.end()
    assert sum(check_all(directory)) == 1, "the new one"


def test_what_is_dropped_while_a_request_begins_is_still_there_for_it(tmp_path):
    """Its blocks have not been read into memory then."""
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    life.stepper.ask(prompt(1), 2)
    life.settle()
    (key,) = end_of(directory, 8 * BLOCK)
    life.end()
    life = Life(directory, stepper(directory))
    store, steps = life.scheduler._store, list[Any]()
    first = life.scheduler.requests[life.stepper.add(prompt(1), 2)]

    def waits():
        found, *_ = life.scheduler.kv_cache_manager.get_computed_blocks(first)
        store.note_hit(first, found.blocks)
        return store.waits(first)

    while waits():
        store.tend()
    second, tend = life.stepper.add(prompt(2), 2), store.tend
    looks = iter((first.request_id, second))

    def drop_before():
        if next(looks) == second:
            life.change(DROP, key)
        tend()

    store.tend, life.stepper.look = drop_before, steps.append
    life.stepper.step()
    assert life.stepper.shared == {first.request_id: [8 * BLOCK], second: [0]}
    assert len(getattr(steps[0], FIELD).load) == 8
    life.end()


def test_pins_leave_room_for_the_longest_request(tmp_path):
    directory = tmp_path / "store"
    store = OPTIONS | {"store": str(directory)}
    life = Life(directory, Stepper(store, blocks=BLOCKS, max_model_len=64 * BLOCK, max_num_seqs=2))
    life.stepper.ask(prompt(1, 30), 2)
    life.settle()
    (key,) = end_of(directory, 30 * BLOCK)
    life.change(PIN, key)
    assert life.stepper.ask(prompt(2, 62), 2)[1] == 0
    assert life.stepper.ask(prompt(1, 30), 2)[1] >= (BLOCKS - 1 - 64) * BLOCK
    life.end()


def test_a_running_server_pins_what_it_is_asked_to(tmp_path):
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    life.stepper.ask(prompt(1), 2)
    life.settle()
    (key,) = end_of(directory, 8 * BLOCK)
    life.change(PIN, key)
    for document in range(2, 16):
        life.stepper.ask(prompt(document), 2)
    assert life.stepper.ask(prompt(1), 2)[1] == 8 * BLOCK
    life.change(UNPIN, key)
    for document in range(2, 16):
        life.stepper.ask(prompt(document), 2)
    assert life.stepper.ask(prompt(1), 2)[1] == 0
    assert life.scheduler.reset_prefix_cache(), "nothing is held any more"
    life.end()


def test_what_is_put_into_the_inbox_by_strangers(tmp_path):
    """It is removed, and changes nothing."""
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    life.stepper.ask(prompt(1), 2)
    life.change(PIN, b"?" * 32)
    inbox = life.store.folder.path / INBOX
    for number, text in enumerate(("", "[]", '{"action": "gc", "key": "00"}', '{"action": 1}')):
        file = inbox / f"{number}.json"
        file.write_text(text)
        file.chmod(0o600)
    assert life.stepper.ask(prompt(1), 2)[1] == 8 * BLOCK
    assert not [*inbox.iterdir()]
    life.end()


def test_old_blocks_are_forgotten(tmp_path, monkeypatch):
    """But for pinned ones; a clock that was set back keeps all, and one set forward keeps none."""
    directory, now = tmp_path / "store", time.time()
    monkeypatch.setattr(scheduler, "PERIOD_S", 0)
    monkeypatch.setattr(time, "time", lambda: now)
    life = Life(directory, stepper(directory, store_days=2))
    life.stepper.ask(prompt(1), 2)
    life.stepper.ask(prompt(2), 2)
    life.settle()
    (key, _) = end_of(directory, 8 * BLOCK)
    life.change(PIN, key)
    now += 1.9 * 86400
    assert life.stepper.ask(prompt(1), 2)[1] == 8 * BLOCK
    life.end()
    life = Life(directory, stepper(directory, store_days=2))
    now -= 40 * 86400
    assert life.stepper.ask(prompt(1), 2)[1] == 8 * BLOCK
    now += 40.2 * 86400
    found = [life.stepper.ask(prompt(document), 2)[1] for document in (1, 2)]
    assert sorted(found) == [0, 8 * BLOCK]
    now += 400 * 86400
    assert life.stepper.ask(prompt(3), 2)[1] == 0
    life.settle()
    assert len(end_of(directory, 8 * BLOCK)) == 2, "the pinned one, and the new one"
    assert life.counts["store_blocks_expired"] == 16
    life.end()


def test_counts(tmp_path):
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    for document in (1, 2):
        life.stepper.ask(prompt(document), 2)
    life.damage(3)
    life.end()
    life = Life(directory, stepper(directory))
    for document in (1, 1, 2, 2, 3):
        life.stepper.ask(prompt(document), 2)
    for document in range(4, 16):
        life.stepper.ask(prompt(document), 2)
    assert life.counts.pop("store_blocks_evicted") > 16
    assert life.counts == {
        "store_tokens_restored": 16 * BLOCK,
        "store_tokens_hit": (2 + 7 + 8 + 8) * BLOCK,  # the damaged one was computed anew
        "store_bytes_checked": 16 * GEOMETRY.block_bytes,
        "store_blocks_damaged": 1,
    }
    life.end()


@pytest.mark.parametrize("ahead", [0, 1])
def test_random_lives(tmp_path, ahead):
    """Requests come, share, are aborted and preempted; servers end and start."""
    directory, checked = tmp_path / "store", 0
    for seed in range(8):
        steps = Stepper(
            OPTIONS | {"store": str(directory)}, blocks=BLOCKS, max_model_len=1024, ahead=ahead
        )
        life = Life(directory, steps, seed)
        for _ in range(300):
            if life.random.random() < 0.2 and len(life.stepper.requests()) < 6:
                life.ask_at_random()
            if life.random.random() < 0.02 and (running := life.stepper.requests()):
                life.scheduler.finish_requests(running[0].request_id, ABORTED)
            life.stepper.step()
        checked += life.checked
        life.end()
        check_all(directory)
    assert checked > 100


def check_all(directory):
    """Every intact block has the bytes of its record; how many there are, and how many are not."""
    (name,) = store_names(Folder.at(str(directory)))
    store = open_store(str(directory), name)
    records = store.records()
    intact = [block for block, record in records.items() if store.intact(block, record)]
    for block in intact:
        record = records[block]
        found = contents(store, block)
        assert found == written(record.key, record.level, record.group)[-len(found) :]
    store.close()
    return len(intact), len(records) - len(intact)


@pytest.mark.parametrize("kills", [KILLS, pytest.param(100 * KILLS, marks=pytest.mark.slow)])
def test_kills(tmp_path, kills):
    """The process ends at random moments: at its start, and in its steps."""
    directory = tmp_path / "store"
    kill_at_random(directory, stepper(directory), kills)


def kill_at_random(directory, steps, kills):
    """Start servers of a store, which are killed; what they leave is intact, or found out."""
    chance, found = random.Random(time.time_ns()), 0
    gc.collect()
    for _ in range(kills):
        ready, told = os.pipe()
        child = os.fork()
        if not child:
            status = 1
            try:
                life = Life(directory, steps, time.time_ns())
                os.write(told, b"!")
                while True:
                    if len(life.stepper.requests()) < 4:
                        life.ask_at_random()
                    life.stepper.step()
            finally:
                os._exit(status)
        os.close(told)
        if chance.random() < 0.8:
            os.read(ready, 1)
        time.sleep(chance.random() * LONGEST_S)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it ended by itself"
        os.close(ready)
        if (directory).exists() and store_names(Folder.at(str(directory))):
            found += check_all(directory)[0]
    assert found > kills
