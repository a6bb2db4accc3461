"""What a running server drops stays dropped, and what it pins stays pinned."""

import pytest

from benchmarks.stepper import BLOCK
from tests.store_life import Life, prompt, stepper
from vllm_kvretrieval.store.contexts import read_pins
from vllm_kvretrieval.store.inbox import DROP, INBOX, PIN

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


def settle(life):
    """Wait until the worker has written what it has been told to write."""
    life.home._writer._thread.submit(int).result()


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
    settle(life)
    assert not on_disk(life) & {*keys}
    assert life.stepper.ask(prompt(1), 2)[1] == 0
    life.end()


@pytest.mark.parametrize("again", [False, True])
def test_what_a_running_request_adds_to_what_is_dropped(life, again):
    """It does not come back when the document is read again; unless all of it is."""
    name = life.stepper.add(prompt(1), 3 * BLOCK)
    keys = keys_of(life, name)
    while len(life.stepper.outputs[name]) < 2:
        life.stepper.step()
    life.change(DROP, keys[-1])
    read(life, prompt(2))
    tokens = life.stepper.outputs[name]
    assert len(tokens) == 3 * BLOCK
    turn = [*prompt(1), *tokens, 1, 2, 3]
    settle(life)
    assert len(on_disk(life)) == DOCUMENT, "of the other document"
    if again:
        keys = read(life, turn)
        settle(life)
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
    life.scheduler._store._inbox._retry = 0
    assert life.stepper.ask(prompt(2), 2)[1] == DOCUMENT * BLOCK
    assert read_pins(life.store.folder) == {pinned[-1]}
    assert not [*inbox.iterdir()]
    life.end()


@pytest.mark.parametrize("why", ["damaged", "missing"])
def test_pins_are_renewed(life, directory, why):
    """If a pinned block has to be computed anew, by an earlier damage or a new one."""
    keys = read(life, prompt(1))
    life.change(PIN, keys[-1])
    read(life, prompt(2))
    (third,) = [block for block, r in life.store.records().items() if r.key == keys[2]]
    settle(life)
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
