"""Contexts that requests pin, retain, and have read ahead, by vLLM's scheduler.

The worker writes bytes which say whose they are; every block that a request shares is looked at.
"""

import contextlib
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from benchmarks.stepper import BLOCK, Stepper
from tests.support.store_life import BLOCKS, OPTIONS, Life, prompt, stepper
from vllm_kvretrieval.engine import retained
from vllm_kvretrieval.store.disk.inbox import DROP
from vllm_kvretrieval.store.disk.names import read_names, read_pins
from vllm_kvretrieval.store.serving import scheduler
from vllm_kvretrieval.store.serving.halves import FIELD

pytestmark = [pytest.mark.model]

PIN = {"session": "a", "pin": True}
WHOLE = 8 * BLOCK


@contextlib.contextmanager
def life(directory, **options):
    """A server; at its end nothing is held but what is pinned."""
    served = Life(directory, stepper(directory, sessions=True, **options))
    yield served
    served.end()


def flood(served):
    """Ask for other documents, so that what nobody holds is evicted."""
    for document in range(20, 34):
        served.stepper.ask(prompt(document), 2)


def free_blocks(served):
    return served.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def watch(served):
    """What steps are told of the store, from now on."""
    told, compute = [], served.stepper.look

    def look(output):
        told.append(getattr(output, FIELD))
        compute(output)

    served.stepper.look = look
    return told


def shared(served, tokens=None, **options):
    return served.stepper.ask(prompt(1) if tokens is None else tokens, 2, options)[1]


def test_a_session_is_pinned_over_a_restart(tmp_path):
    """With its answer. Its next turn takes the place of the one before, and it can be let go."""
    directory = tmp_path / "store"
    with life(directory) as served:
        answer, _ = served.stepper.ask(prompt(1), 2 * BLOCK, PIN)
        shared(served, prompt(2))
        flood(served)
        turn = [*prompt(1), *answer, *range(BLOCK)]
        assert shared(served, turn) == WHOLE + 2 * BLOCK
        assert shared(served, prompt(2)) == 0
    with life(directory) as served:
        flood(served)
        assert shared(served, turn, **PIN) == WHOLE + 2 * BLOCK
        flood(served)
        assert shared(served, turn) == WHOLE + 3 * BLOCK
        assert len(read_pins(served.store.folder)) == 1
        assert shared(served, [7, 8, 9], session="a", pin=False) == 0
        flood(served)
        assert shared(served, turn) == 0
        assert not read_pins(served.store.folder)
        assert not read_names(served.store.folder)
        assert served.scheduler.reset_prefix_cache(), "nothing is held any more"


def test_a_session_that_begins_anew(tmp_path):
    """Its earlier context is evicted, though it is no part of the new one."""
    with life(tmp_path / "store") as served:
        shared(served, **PIN)
        shared(served, prompt(2), **PIN)
        flood(served)
        assert shared(served, prompt(2)) == WHOLE
        assert shared(served) == 0


def test_tenants_have_sessions_of_their_own(tmp_path):
    """A request cannot let go of what one with another salt has pinned."""
    with life(tmp_path / "store") as served:
        for salt in ("s", None):
            served.stepper.add(prompt(1), 2, PIN, cache_salt=salt)
            served.stepper.run()
        assert len(read_pins(served.store.folder)) == 2
        served.stepper.add([1, 2, 3], 2, PIN | {"pin": False})
        served.stepper.run()
        (name,) = read_names(served.store.folder)
        assert name.startswith("session-")
        flood(served)
        assert shared(served) == 0
        name = served.stepper.add(prompt(1), 2, cache_salt="s")
        served.stepper.run()
        assert served.stepper.shared[name] == [WHOLE]


def test_what_is_aborted_or_too_short(tmp_path):
    """As much is pinned as has been computed and fills blocks, be it nothing."""
    with life(tmp_path / "store", tokens=4 * BLOCK) as served:
        shared(served, [1, 2, 3], **PIN)
        name = served.stepper.add(prompt(1), 2, PIN)
        served.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        served.stepper.run()
        assert not read_names(served.store.folder)
        name = served.stepper.add(prompt(1), 2, PIN)
        served.stepper.step()
        served.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        served.stepper.run()
        flood(served)
        assert shared(served) == 4 * BLOCK


def test_what_is_dropped_is_not_pinned_again(tmp_path):
    """By a request that was running when it was dropped."""
    with life(tmp_path / "store") as served:
        shared(served, **PIN)
        key = read_names(served.store.folder)["session.a"]
        name = served.stepper.add(prompt(1), BLOCK, PIN)
        served.stepper.step()
        assert served.stepper.shared[name] == [WHOLE]
        served.change(DROP, key)
        served.stepper.ask(prompt(2), 2)
        served.stepper.run()
        assert not read_names(served.store.folder)
        assert not read_pins(served.store.folder)
        assert shared(served, **PIN) == 0
        assert "session.a" in read_names(served.store.folder), "it was given anew"
        assert shared(served) == WHOLE


def test_nor_is_what_it_went_on_behind(tmp_path):
    """A document that others have stays in the store, and is not pinned for the session."""
    turn = [*prompt(1), *range(2 * BLOCK)]
    with life(tmp_path / "store") as served:
        shared(served, session="document", pin=True)
        shared(served, turn, **PIN)
        key = read_names(served.store.folder)["session.a"]
        served.stepper.add(turn, BLOCK, PIN)
        served.stepper.step()
        served.change(DROP, key)
        served.stepper.ask(prompt(2), 2)
        served.stepper.run()
        assert [*read_names(served.store.folder)] == ["session.document"]


def test_more_is_pinned_than_there_is_room_for(tmp_path):
    """The latest sessions stay; what operators have pinned does before them."""
    directory = tmp_path / "store"
    with life(directory) as served:
        shared(served, prompt(1), session="first", pin=True)
        names = read_names(served.store.folder)
        (served.store.folder.path / "names.json").write_text(
            json.dumps({"emma": names["session.first"].hex()})
        )
        for document in range(2, 10):
            shared(served, prompt(document), session=f"s{document}", pin=True)
        flood(served)
        held = [n for n in range(1, 10) if shared(served, prompt(n)) == WHOLE]
        assert held == [1, 6, 7, 8, 9], "half of the blocks, and a part of another one"


def test_so_many_sessions_have_names(tmp_path, monkeypatch):
    """The one that pinned longest ago is forgotten, with its pin."""
    monkeypatch.setattr("vllm_kvretrieval.store.disk.changes.MOST_SESSIONS", 3)
    with life(tmp_path / "store") as served:
        for session in "abacd":
            shared(served, prompt(ord(session)), session=session, pin=True)
        assert [*read_names(served.store.folder)] == ["session.a", "session.c", "session.d"]
        assert len(read_pins(served.store.folder)) == 3


def test_a_disk_that_cannot_be_written(tmp_path, monkeypatch):
    """The answer comes, and the server goes on."""

    def fail(*_):
        raise OSError(28, "No space left on device")

    with life(tmp_path / "store") as served:
        with monkeypatch.context() as broken:
            broken.setattr(scheduler, "note_session", fail)
            tokens, _ = served.stepper.ask(prompt(1), 2, PIN)
        assert len(tokens) == 2
        assert shared(served) == WHOLE


@pytest.mark.parametrize("store", [True, False])
def test_a_context_is_retained(tmp_path, monkeypatch, store):
    """For a time, without a store, too; a session retains its latest context alone."""
    now = time.monotonic()
    monkeypatch.setattr(retained, "time", SimpleNamespace(monotonic=lambda: now))
    served: Any
    if store:
        served = Life(tmp_path / "store", stepper(tmp_path / "store", sessions=True))
    else:
        engine: Any = {"max_model_len": 1024, "enable_prefix_caching": True}
        steps = Stepper({"budget": 256, "sessions": True}, blocks=BLOCKS, **engine)
        served = SimpleNamespace(stepper=steps, scheduler=steps.scheduler, end=lambda: None)
    blocks = 5
    first, second, third, fourth = (prompt(document, blocks) for document in (1, 2, 3, 4))
    shared(served, first, retain=60)
    shared(served, second, retain=30, session="a")
    flood(served)
    assert shared(served, first) == shared(served, second) == blocks * BLOCK
    now += 31
    flood(served)
    assert shared(served, first) == blocks * BLOCK
    assert shared(served, second) == 0
    now += 30
    flood(served)
    assert shared(served, first) == 0
    shared(served, third, retain=60, session="a")
    shared(served, fourth, retain=60, session="a")
    flood(served)
    assert shared(served, third) == 0
    assert shared(served, fourth) == blocks * BLOCK
    shared(served, [1, 2], retain=0, session="a")
    flood(served)
    assert shared(served, fourth) == 0
    shared(served, first, retain=60)
    assert free_blocks(served) == BLOCKS - 1 - blocks
    assert served.scheduler.reset_prefix_cache(), "nothing is held any more"
    served.end()


def test_retained_blocks_leave_room(tmp_path):
    """For the longest request, and for what may be pinned; what does not fit is not retained."""
    longest = 40
    engine: Any = {
        "max_model_len": longest * BLOCK,
        "enable_prefix_caching": True,
        "max_num_seqs": 2,
    }
    for store, most in ((True, 90 - 1 - 40 - 45), (False, 22)):
        options = {"store": str(tmp_path / "store"), **OPTIONS} if store else {"budget": 256}
        steps = Stepper(options | {"sessions": True}, blocks=BLOCKS, **engine)
        served = Life(tmp_path / "store", steps) if store else None
        for document in (1, 2, 3):
            steps.ask(prompt(document, 15), 2, {"retain": 60})
        pool = steps.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == BLOCKS - 1 - most
        assert len(steps.ask(prompt(4, longest - 1), 2)[0]) == 2
        if served is not None:
            served.end()


def test_what_is_dropped_is_not_retained(tmp_path):
    """It is erased with the next step, as if nobody had asked for it."""
    with life(tmp_path / "store") as served:
        shared(served, retain=600, **PIN)
        key = read_names(served.store.folder)["session.a"]
        served.change(DROP, key)
        told = watch(served)
        shared(served, [1, 2, 3])
        assert sum(len(step.erase) for step in told) >= 7, "one is in use again"
        assert free_blocks(served) == BLOCKS - 1


def loads(told):
    return sum(len(step.load) for step in told)


def test_a_session_is_read_ahead(tmp_path):
    """While others are served: it is checked, and in memory, before it asks."""
    directory = tmp_path / "store"
    with life(directory) as served:
        shared(served, **PIN)
        shared(served, prompt(2))
        served.damage(3)
    with life(directory) as served:
        store, may = served.scheduler._store._store, threading.Event()
        intact = store.intact
        store.intact = lambda *block: may.wait(60) and intact(*block)
        told = watch(served)
        served.stepper.add(prompt(3), 600, {"prefetch": "a"})
        for _ in range(20):
            served.stepper.step()
        assert loads(told) == 0, "none before it has been checked"
        may.set()
        served.stepper.run()
        assert loads(told) == 7, "the damaged one is not read"
        assert served.counts["store_blocks_read_ahead"] == 7
        assert served.counts["store_blocks_damaged"] == 1
        told.clear()
        assert shared(served) == 2 * BLOCK
        assert loads(told) == 0, "all of it had been read"
        assert shared(served, prompt(2)) == WHOLE
        assert loads(told) == 8


def test_a_step_reads_so_much_ahead(tmp_path, monkeypatch):
    directory = tmp_path / "store"
    monkeypatch.setattr(scheduler, "AHEAD_BYTES", 1)
    with life(directory) as served:
        shared(served, **PIN)
    with life(directory) as served:
        told = watch(served)
        served.stepper.ask(prompt(3), 400, {"prefetch": "a"})
        assert max(len(step.load) for step in told) == 1
        assert loads(told) == 8
        assert shared(served) == WHOLE
        served.stepper.ask(prompt(3), 2, {"prefetch": "nobody"})


@pytest.mark.parametrize("ahead", [0, 1])
def test_random_sessions(tmp_path, ahead):
    """Requests pin, retain and prefetch, are aborted and preempted; servers end and start."""
    directory, checked = tmp_path / "store", 0
    for seed in range(4):
        steps = Stepper(
            OPTIONS | {"store": str(directory), "sessions": True},
            blocks=BLOCKS,
            max_model_len=1024,
            ahead=ahead,
        )
        served = Life(directory, steps, seed)
        chance = served.random
        for _ in range(300):
            if chance.random() < 0.2 and len(steps.requests()) < 6:
                options: dict[str, Any] = {"session": chance.choice("abcd")}
                if chance.random() < 0.5:
                    options["pin"] = chance.random() < 0.8
                if chance.random() < 0.5:
                    options["retain"] = chance.choice([0, 0.01, 60])
                if chance.random() < 0.3:
                    options["prefetch"] = chance.choice("abcd")
                if chance.random() < 0.3:
                    options["exact"] = True
                tokens = prompt(chance.randrange(6), chance.randrange(1, 20))
                salt = chance.choice([None, "s"])
                steps.add(tokens, chance.randrange(1, 3 * BLOCK), options, cache_salt=salt)
            if chance.random() < 0.02 and (running := steps.requests()):
                name = running[0].request_id
                served.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            if chance.random() < 0.01 and (names := read_names(served.store.folder)):
                served.change(DROP, chance.choice([*names.values()]))
            steps.step()
        steps.run()
        checked += served.checked
        assert served.scheduler.reset_prefix_cache() or True
        served.end()
    assert checked > 100
