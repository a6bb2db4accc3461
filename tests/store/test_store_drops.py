"""What a running server drops stays dropped, and what it pins stays pinned."""

import errno
import os
import time

import pytest

from benchmarks.stepper import BLOCK
from tests.support.store_life import Life, prompt, stepper
from vllm_kvretrieval.store.disk.inbox import DROP, INBOX, PIN, RETRY_S
from vllm_kvretrieval.store.disk.names import read_names, read_pins, write_names
from vllm_kvretrieval.store.serving import scheduler as store_scheduler

pytestmark = [pytest.mark.model]

DOCUMENT = 8
"""Blocks of a prompt."""


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def life(directory):
    return Life(directory, stepper(directory))


def keys_of(life, name):
    return [*life.scheduler.requests[name].block_hashes]


def read(life, tokens, count=2):
    """Serve a request; the keys of its prompt's blocks."""
    name = life.stepper.add(tokens, count)
    keys = keys_of(life, name)
    life.stepper.run()
    return keys


def on_disk(life):
    return {record.key for record in life.store.records().values()}


def test_blocks_that_are_being_written_are_dropped(life):
    """They have no record yet when the server is asked."""
    write, late, compute = life.home._writer.write, [], life.stepper.look
    life.home._writer.write = lambda *block: late.append(block)
    keys = read(life, prompt(1))
    assert len(late) == DOCUMENT
    life.change(DROP, keys[-1])

    def go_on(output):
        while late:
            write(*late.pop())
        compute(output)

    life.stepper.look = go_on
    read(life, prompt(2))
    life.settle()
    assert not on_disk(life) & {*keys}
    assert life.stepper.ask(prompt(1), 2)[1] == 0
    life.end()


def running(life, tokens, count=3 * BLOCK):
    """A request that has begun to answer, and the keys of its prompt's blocks."""
    name = life.stepper.add(tokens, count)
    keys = keys_of(life, name)
    while len(life.stepper.outputs[name]) < 2:
        life.stepper.step()
    return name, keys


def preempt(life, name):
    """Take its blocks from a running request, which begins anew."""
    scheduler = life.scheduler
    request = scheduler.requests[name]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())


def turn_after(life, name):
    """The second turn of a chat about a document."""
    tokens = life.stepper.outputs[name]
    assert len(tokens) == 3 * BLOCK
    return [*prompt(1), *tokens, 1, 2, 3]


@pytest.mark.parametrize("how", ["while it goes on", "before it begins anew", "not"])
def test_what_a_running_request_adds_is_not_found_after_a_later_reader(life, how):
    """The document is read anew meanwhile, or by the running request itself."""
    name, keys = running(life, prompt(1))
    life.change(DROP, keys[-1])
    if how == "not":
        life.stepper.add(prompt(2), 2)
        life.stepper.step()
    else:
        read = life.stepper.add(prompt(1), 2)
        while not life.stepper.outputs[read]:
            life.stepper.step()
    if how != "while it goes on":
        preempt(life, name)
    life.stepper.run()
    life.settle()
    assert (on_disk(life) >= {*keys}) == (how != "not")
    assert len(on_disk(life)) == DOCUMENT, "of the reader alone"
    turn, found = turn_after(life, name), 0 if how == "not" else DOCUMENT
    assert life.stepper.ask(turn, 2)[1] == found * BLOCK
    assert life.stepper.ask(turn, 2)[1] == (DOCUMENT + 3) * BLOCK, "a later request has read it"
    life.end()


def test_the_next_input_of_a_session_that_was_running(life, monkeypatch):
    """Its context is from before the drop, though the input is not."""
    name = life.stepper.add(prompt(1), 2, resumable=True)
    keys = keys_of(life, name)
    life.stepper.run()
    life.change(DROP, keys[-1])
    read(life, prompt(1))
    monkeypatch.setattr(life, "check", lambda block: None)  # its own blocks were not looked up
    life.stepper.add([5] * 2 * BLOCK, 2, name=name, resumable=True)
    life.stepper.run()
    assert len(keys_of(life, name)) == DOCUMENT + 2
    life.settle()
    assert on_disk(life) == {*keys}
    life.end()


def test_a_request_that_waits_is_from_before_a_drop(life):
    """It has arrived before, though it is looked up after; what arrives next is stored."""
    keys = read(life, prompt(1))
    life.stepper.add(prompt(1), 2)
    life.change(DROP, keys[-1])
    life.stepper.run()
    life.settle()
    assert not on_disk(life) & {*keys}
    assert life.stepper.ask(prompt(1), 2)[1] == 0
    life.settle()
    assert on_disk(life) >= {*keys}
    life.end()


def test_drops_are_remembered_as_long_as_requests_need_it(life):
    """Not those before the oldest request that runs."""
    store, documents = life.scheduler._store, [read(life, prompt(n)) for n in (1, 2, 3)]
    running(life, prompt(4))
    for keys in documents[:2]:
        life.change(DROP, keys[-1])
        running(life, prompt(5, 1), 2)
    assert store._dropped.keys() == {*documents[0], *documents[1]}
    life.stepper.run()
    life.change(DROP, documents[2][-1])
    read(life, prompt(5, 1))
    assert store._dropped.keys() == {*documents[2]}
    life.end()


@pytest.mark.parametrize("clock", [0, -7200, 7200])
@pytest.mark.parametrize("again", [False, True])
def test_what_a_running_request_adds_to_what_is_dropped(life, again, clock, monkeypatch):
    """It does not come back when the document is read again; unless all of it is.

    Whatever the clock says, which is set to another time after the drop.
    """
    name, keys = running(life, prompt(1))
    life.change(DROP, keys[-1])
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + clock)
    read(life, prompt(2))
    turn = turn_after(life, name)
    life.settle()
    assert len(on_disk(life)) == DOCUMENT, "of the other document"
    if again:
        keys = read(life, turn)
        life.settle()
        assert {*keys} <= on_disk(life)
    else:
        assert life.stepper.ask(prompt(1), 2)[1] == 0
        keys = keys[:DOCUMENT]
    assert life.stepper.ask(turn, 2)[1] == len(keys) * BLOCK
    life.end()


def test_a_change_that_fails_keeps_no_other_from_being_made(life):
    """It is tried again, and made when that is possible."""
    pinned, dropped = read(life, prompt(1)), read(life, prompt(2))
    pins = life.store.folder.path / "pins.json"
    pins.write_text("[")
    pins.chmod(0o600)
    life.change(PIN, pinned[-1])
    life.change(DROP, dropped[-1])
    assert life.stepper.ask(prompt(2), 2)[1] == 0
    inbox = life.store.folder.path / INBOX
    assert len([*inbox.iterdir()]) == 1, "what is dropped is not dropped again"
    pins.unlink()
    life.scheduler._store._inbox._failed.clear()
    assert life.stepper.ask(prompt(2), 2)[1] == DOCUMENT * BLOCK
    assert read_pins(life.store.folder) == {pinned[-1]}
    assert not [*inbox.iterdir()]
    life.end()


def test_a_context_that_is_lost_before_it_is_dropped(life):
    """Its pin and its name are not there for those who compute it anew."""
    keys = read(life, prompt(1))
    life.change(PIN, keys[-1])
    write_names(life.store.folder, {"book": keys[-1]})
    read(life, prompt(2))
    store = life.scheduler._store
    store._drop([block for block, r in store._stored.items() if r.key == keys[-1]])
    life.change(DROP, keys[-1])
    read(life, prompt(1))
    assert read_pins(life.store.folder) == set()
    assert read_names(life.store.folder) == {}
    assert not store._pinned
    life.end()


def test_a_name_of_what_is_read_anew_survives_another_drop(life):
    """What was dropped once may be named again."""
    first, second = read(life, prompt(1)), read(life, prompt(2))
    life.change(DROP, first[-1])
    assert read(life, prompt(1)) == first
    write_names(life.store.folder, {"book": first[-1]})
    life.change(PIN, first[-1])
    life.change(DROP, second[-1])
    read(life, prompt(3))
    assert read_names(life.store.folder) == {"book": first[-1]}
    assert read_pins(life.store.folder) == {first[-1]}
    life.end()


def test_pins_that_cannot_be_read_are_read_again_later(life, monkeypatch):
    """A lost block of a pinned context is held again then; the file is not read before."""
    keys = read(life, prompt(1))
    life.change(PIN, keys[-1])
    read(life, prompt(2))
    store, tried = life.scheduler._store, []
    store._drop([block for block, r in store._stored.items() if r.key == keys[-1]])
    assert len(store._pinned) == DOCUMENT - 1

    def fail(folder):
        tried.append(folder)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(store_scheduler, "read_pins", fail)
        for document in (1, 2, 3):
            read(life, prompt(document))
    assert len(tried) == 1
    read(life, prompt(3))
    assert len(store._pinned) == DOCUMENT - 1
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + RETRY_S)
    read(life, prompt(3))
    assert len(store._pinned) == DOCUMENT
    life.end()


@pytest.mark.parametrize("why", ["damaged", "missing"])
def test_pins_are_renewed(life, directory, why):
    """If a pinned block has to be computed anew, by an earlier damage or a new one."""
    keys = read(life, prompt(1))
    life.change(PIN, keys[-1])
    read(life, prompt(2))
    (third,) = [block for block, r in life.store.records().items() if r.key == keys[2]]
    life.settle()
    if why == "damaged":
        life.damage(third)
    else:
        life.store.void([third])
    life.end()
    life = Life(directory, stepper(directory))
    assert life.stepper.ask(prompt(1), 2)[1] == 2 * BLOCK
    for document in range(2, 16):
        read(life, prompt(document))
    assert life.stepper.ask(prompt(1), 2)[1] == DOCUMENT * BLOCK
    life.end()


def test_a_reset_forgets_pins(life):
    keys = read(life, prompt(1))
    life.change(PIN, keys[-1])
    read(life, prompt(2))
    assert life.scheduler.reset_prefix_cache()
    assert read_pins(life.store.folder) == set()
    life.end()


def test_a_reset_brings_nothing_back_that_was_dropped(life):
    """The request that runs over it is preempted, and reads it anew."""
    _, keys = running(life, prompt(1))
    life.change(DROP, keys[-1])
    life.stepper.add(prompt(2), 2)
    life.stepper.step()
    assert life.scheduler.reset_prefix_cache(reset_running_requests=True)
    life.stepper.run()
    life.settle()
    assert on_disk(life)
    assert not on_disk(life) & {*keys}
    life.end()
