"""``vllm-kvretrieval store``: what it shows and what it changes."""

import errno
import itertools
import os
import random
import shutil
import signal
import socket
import time
from contextlib import contextmanager, suppress

import pytest

from tests.support.store_model import GEOMETRY, Model, again, block_bytes, new_store, write
from vllm_kvretrieval.command import main
from vllm_kvretrieval.store.disk.contexts import NO_PARENT
from vllm_kvretrieval.store.disk.files import Folder, Lock
from vllm_kvretrieval.store.disk.inbox import (
    ACTIONS,
    DROP,
    INBOX,
    PIN,
    RETRY_S,
    UNPIN,
    Change,
    Inbox,
    put,
)
from vllm_kvretrieval.store.disk.names import read_names, read_pins, write_names, write_pins
from vllm_kvretrieval.store.disk.records import Record
from vllm_kvretrieval.store.disk.store import LOCK, PAGES, UNFINISHED, WORKER_LOCK

IDENTITY = {
    "model": "LlamaForCausalLM",
    "dtype": "torch.bfloat16",
    "codec": "raw",
    "vllm": "0.32.0",
    "block_size": 128,
}


@pytest.fixture
def store(tmp_path):
    """A store with the contexts abc and abd, and abd once more in another place."""
    store = new_store(tmp_path / "store", identity=IDENTITY)
    for block, text in enumerate(("a", "ab", "abc", "abd", "abd")):
        write(store, block, random.Random(block).randbytes(block_bytes(GEOMETRY)))
        parent = key(text[:-1]) if text[:-1] else NO_PARENT
        store.commit(block, Record(key(text), parent, len(text) - 1, 0, 1000 + block))
    return store


def key(text):
    return text.encode().ljust(32, b"\x07")


def run(store, action, *arguments):
    return main(["store", action, str(store.folder.path.parent), *arguments])


ABC, ABD = key("abc").hex()[:12], key("abd").hex()[:12]


def test_ls(store, capsys):
    assert run(store, "ls") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "LlamaForCausalLM" in lines[0]
    assert "512 of 2048 tokens, 2 contexts" in lines[0]
    assert [line.split()[:3] for line in lines[2:]] == [
        [ABD, "384", "exact"],
        [ABC, "384", "exact"],
    ]
    assert run(store, "ls", "--contexts", "1") == 0
    assert "and 1 more" in capsys.readouterr().out


def test_pin_and_unpin(store, capsys):
    assert run(store, "pin", ABC) == 0
    assert read_pins(store.folder) == {key("abc")}
    run(store, "ls")
    assert [line.endswith("yes") for line in capsys.readouterr().out.splitlines()[-2:]] == [
        False,
        True,
    ]
    assert run(store, "unpin", ABC) == 0
    assert read_pins(store.folder) == set()


def test_pins_of_what_is_missing_stay(store):
    """It may be computed anew."""
    assert run(store, "pin", ABC) == 0
    store.void([2])
    assert run(store, "pin", ABD) == 0
    assert read_pins(store.folder) == {key("abc"), key("abd")}


def test_drop(store):
    """What others share stays; copies of what is dropped go, too."""
    assert run(store, "pin", ABD) == 0
    assert run(store, "drop", ABD) == 0
    assert store.records().keys() == {0, 1, 2}
    assert read_pins(store.folder) == set()


@pytest.mark.parametrize("lost", [(2,), (0, 1, 2)])
@pytest.mark.parametrize("name", ["book", ABC])
@pytest.mark.parametrize("action", [UNPIN, DROP])
def test_what_is_lost_can_be_withdrawn(store, capsys, lost, name, action):
    """Its blocks are damaged or evicted; a pin and a name would come back with them."""
    write_names(store.folder, {"book": key("abc"), "end": key("abd")})
    write_pins(store.folder, {key("abc"), key("abd")})
    store.void(lost)
    left = store.records()
    assert run(store, PIN, name) == 1
    assert "names no context" in capsys.readouterr().err
    assert run(store, action, name) == 0
    assert read_pins(store.folder) == {key("abd")}
    names = {"end": key("abd")} | ({"book": key("abc")} if action == UNPIN else {})
    assert read_names(store.folder) == names
    assert store.records() == left, "of others"


def test_what_is_left_behind_a_gap_is_dropped(store):
    """It would be found again when the gap is filled."""
    write_names(store.folder, {"book": key("abc")})
    store.void([1])
    assert run(store, DROP, "book") == 0
    assert store.records().keys() == {0, 3, 4}


def test_stores_that_are_all_left_out(store, capsys):
    """There are some."""
    store.folder.path.chmod(0o755)
    assert run(store, "ls") == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "is left out" in shown.err


def test_unclear_names(store, capsys):
    for name, why in (
        (f"id:{ABC[:3]}", "names 3 contexts"),
        (ABC[:7], "names no context"),
        ("00000000", "names no context"),
    ):
        assert run(store, "drop", name) == 1
        assert why in capsys.readouterr().err
    assert len(store.records()) == 5


def test_verify(store, capsys):
    os.pwrite(store.pages_fd, b"?", GEOMETRY.layer_block_bytes)  # in the block ab
    assert run(store, "verify") == 0
    assert "4 blocks are intact, 1 damaged" in capsys.readouterr().out
    assert store.records().keys() == {0, 2, 3, 4}


@pytest.mark.parametrize("bad", ["file", "open", "damaged", "names", "copy"])
def test_an_entry_that_is_no_good_store(store, capsys, bad):
    """Others are served, and what is wrong is said."""
    root = store.folder.path.parent
    entry = root / "kv-0123456789abcdef"
    if bad == "file":
        entry.write_text("")
    elif bad == "copy":
        entry = root / f"{store.folder.path.name}.old"
        shutil.copytree(store.folder.path, entry)
    else:
        other = new_store(root, identity=IDENTITY | {"model": "another"})
        entry = other.folder.path
        other.close()
        if bad == "open":
            entry.chmod(0o755)
        else:
            file = entry / {"damaged": "identity.json", "names": "names.json"}[bad]
            file.write_text("[")
            file.chmod(0o600)
    said = bad != "copy"
    assert run(store, "ls") == said
    shown = capsys.readouterr()
    assert "512 of 2048 tokens, 2 contexts" in shown.out
    assert (entry.name in shown.err) == said
    assert run(store, "verify") == (said and bad != "names")
    shown = capsys.readouterr()
    assert "5 blocks are intact" in shown.out
    for action in (PIN, UNPIN, DROP):
        assert run(store, action, ABC) == said, "it may be there, too"
        assert (entry.name in capsys.readouterr().err) == said
    assert len(store.records()) == 4
    assert run(store, "drop", "none") == 1
    assert (entry.name in capsys.readouterr().err) == said
    assert run(store, "gc") == (bad in ("file", "open"))
    assert f"{store.folder.path.name} stays." in capsys.readouterr().out
    assert run(store, "ls") == said


def test_gc_that_is_interrupted(store, monkeypatch, capsys):
    """Either the store is whole, or it is none; nobody opens it meanwhile."""
    root, removed = store.folder.path.parent, []

    def end(folder, name):
        removed.append((name, in_use(store.folder, LOCK), in_use(store.folder, WORKER_LOCK)))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "remove", end)
        assert run(store, "gc", "--all") == 130
    ((name, *locks),) = removed
    assert locks == [True, True]
    assert name.startswith(UNFINISHED)
    assert {path.name for path in root.iterdir()} == {name, "lock"}
    assert run(store, "gc") == 0
    assert {path.name for path in root.iterdir()} == {"lock"}


def in_use(folder, name):
    """Whether a lock is taken, as another process sees it."""
    child = os.fork()
    if not child:
        os._exit(not Lock(folder, name).take())
    return bool(os.waitpid(child, 0)[1])


def test_gc_of_an_empty_directory(store, capsys):
    (store.folder.path.parent / "kv-0").mkdir(0o700)
    assert run(store, "gc") == 0
    assert "kv-0 is removed." in capsys.readouterr().out


def test_gc(store, capsys):
    root = store.folder.path.parent
    (root / (UNFINISHED + "1")).mkdir()
    assert run(store, "gc") == 0
    assert {path.name for path in root.iterdir()} == {store.folder.path.name, "lock"}
    for file in store.folder.path.iterdir():
        os.utime(file, (1e9, 1e9))
    assert run(store, "gc", "--days", "1") == 0
    assert f"{store.folder.path.name} is removed." in capsys.readouterr().out
    assert {path.name for path in root.iterdir()} == {"lock"}


@contextmanager
def used_by_another(store, name):
    """A process that holds a lock of the store; its number."""
    child = os.fork()
    if not child:
        lock = Lock(store.folder, name)
        lock.take()
        os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("name", [LOCK, WORKER_LOCK])
@pytest.mark.parametrize("action", [("verify",), ("gc", "--all")])
def test_a_store_in_use_is_left_alone(store, capsys, name, action):
    """By another process, whose number is told; not so other stores."""
    other = new_store(store.folder.path.parent, identity=IDENTITY | {"model": "another"})
    path = other.folder.path
    other.close()
    with used_by_another(store, name) as process:
        assert run(store, *action) == 0
    said = capsys.readouterr().out
    assert f"in use by process {process}" in said
    assert f"{path.name} is removed" in said or f"{path.name}: 0 blocks are intact" in said
    assert len(store.records()) == 5
    assert run(store, "ls") == 0


@pytest.mark.parametrize("days", ["nan", "inf", "-1", "old"])
def test_an_age_that_is_none_removes_nothing(store, days, capsys):
    with pytest.raises(SystemExit):
        run(store, "gc", "--days", days)
    assert f"must be a number of days, got {days}" in capsys.readouterr().err
    assert len(store.records()) == 5


def test_a_number_of_contexts_that_is_none(store, capsys):
    with pytest.raises(SystemExit):
        run(store, "ls", "--contexts", "-1")
    assert "'-1' is not a whole number from 0" in capsys.readouterr().err


@pytest.mark.parametrize("action", ACTIONS)
def test_a_server_in_use_is_asked(store, capsys, action):
    """It is the server that changes its store."""
    inbox = Inbox(store.folder)
    assert changes(inbox) == []
    with used_by_another(store, LOCK):
        assert run(store, action, ABC) == 0
    assert "as soon as the server gets a request" in capsys.readouterr().out
    assert len(store.records()) == 5
    assert read_pins(store.folder) == set()
    assert changes(inbox) == [(action, key("abc"))]
    assert changes(inbox) == []
    put(store.folder, again := Change(PIN, key("abd")))
    assert changes(inbox) == [again]


def changes(inbox):
    """What a server is asked for, which it does."""
    made: list[Change] = []
    inbox.follow(made.append)
    return made


def test_changes_are_made_in_the_order_in_which_they_were_asked_for(store, monkeypatch):
    """Though the clock is set back."""
    monkeypatch.setattr(time, "time_ns", itertools.count(10**18, -(10**9)).__next__)
    asked = [Change(chosen, key("abc")) for chosen in (PIN, UNPIN) * 8]
    for change in asked:
        put(store.folder, change)
    assert changes(Inbox(store.folder)) == asked


def test_what_cannot_be_a_change_is_out_of_the_way(store, tmp_path, caplog):
    """Nobody waits for a pipe, and a directory is not tried for ever."""
    put(store.folder, asked := Change(PIN, key("abc")))
    box, inbox = store.folder.path / INBOX, Inbox(store.folder)
    os.mkfifo(box / "1", 0o600)
    (box / "2" / "inside").mkdir(parents=True)
    (box / "3").symlink_to(tmp_path)
    socket.socket(socket.AF_UNIX).bind(str(box / "4"))
    assert changes(inbox) == [asked]
    (aside,) = box.iterdir()
    assert aside.name.startswith(".refused-")
    said = [record.getMessage() for record in caplog.records]
    assert [f"{box / name} is no change" in line for name, line in zip("1234", said, strict=True)]
    assert f"and is now {aside.name} (store: {box / '2'} is no regular file)" in said[1]
    put(store.folder, asked)
    assert changes(inbox) == [asked]
    assert len(caplog.records) == 4


def test_a_change_that_fails_is_tried_again_later(store, monkeypatch):
    """Neither is it lost, nor is it tried before every request."""
    asked = [Change(PIN, key(text)) for text in ("abc", "abd")]
    inbox, tried = Inbox(store.folder), []
    for change in asked:
        put(store.folder, change)

    def fail(change):
        tried.append(change)
        if change == asked[0]:
            raise OSError(errno.ENOSPC, "full")

    for _ in range(5):
        with suppress(OSError):
            inbox.follow(fail)
    assert tried == asked
    later = time.monotonic() + RETRY_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert changes(inbox) == asked[:1]


def test_an_inbox_that_cannot_be_opened_is_tried_again_later(store, tmp_path, monkeypatch):
    box, inbox = store.folder.path / INBOX, Inbox(store.folder)
    box.symlink_to(tmp_path)
    with pytest.raises(OSError, match="inbox"):
        changes(inbox)
    box.unlink()
    put(store.folder, asked := Change(PIN, key("abc")))
    assert changes(inbox) == []
    later = time.monotonic() + RETRY_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert changes(inbox) == [asked]


def test_names(store, capsys):
    """They stay with a context that goes on, and go with what is dropped."""
    write_names(store.folder, {"book": key("ab"), "end": key("abd")})
    assert run(store, "pin", "book") == 0
    run(store, "ls")
    rows = [row.split()[5:] for row in capsys.readouterr().out.splitlines()[-3:]]
    assert [" ".join(row) for row in rows] == [
        "256 end (behind book)",
        "256 (behind book)",
        "yes book",
    ]
    assert run(store, "unpin", "end") == 0
    assert "Others keep its first 256 tokens pinned: book." in capsys.readouterr().out
    assert read_pins(store.folder) == {key("ab")}
    assert run(store, "drop", "end") == 0
    assert read_names(store.folder) == {"book": key("ab")}
    assert store.records().keys() == {0, 1, 2}
    assert run(store, "drop", "book") == 0
    assert store.records() == {}


def test_no_directory(tmp_path, capsys):
    assert main(["store", "ls", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_closed_store_opens_again(store):
    model = Model(random.Random(1))
    model.fill(store, 9)
    assert (store.folder.path / PAGES).exists()
    assert again(store).records().keys() == {0, 1, 2, 3, 4, 9}
