"""Names and ids of contexts: which one is meant, in which stores, and what becomes of names."""

import errno

import pytest

from tests.support.store_model import new_store
from vllm_kvretrieval.command import main
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.add import _note
from vllm_kvretrieval.store.disk.changes import change, note_reset
from vllm_kvretrieval.store.disk.contexts import NO_PARENT, id_of
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.inbox import DROP, PIN, UNPIN
from vllm_kvretrieval.store.disk.names import (
    MOST_KEYS,
    NAMES,
    Forgotten,
    check_name,
    read_forgotten,
    read_names,
    read_pins,
    write_forgotten,
    write_names,
    write_pins,
)
from vllm_kvretrieval.store.disk.records import Record
from vllm_kvretrieval.store.listing import listed


def key(text):
    return text.encode().ljust(32, b"\x07")


def ident(text):
    return id_of(key(text))


def fill(store, *contexts):
    """Put contexts into a store, each of which has a block a letter."""
    free = iter({*range(store.geometry.blocks)} - store.records().keys())
    for text in {whole[:end] for whole in contexts for end in range(1, len(whole) + 1)}:
        parent = key(text[:-1]) if text[:-1] else NO_PARENT
        if key(text) not in keys(store):
            store.commit(next(free), Record(key(text), parent, len(text) - 1, 0, 1000))


def keys(store):
    return {record.key for record in store.records().values()}


def texts(store):
    return sorted(found.rstrip(b"\x07").decode() for found in keys(store))


@pytest.fixture
def make(tmp_path):
    """Makes stores of one directory."""
    made = []

    def make(model="a", *texts):
        identity = {"model": model, "dtype": "x", "codec": "raw", "vllm": "0", "block_size": 128}
        made.append(new_store(tmp_path / "store", identity=identity))
        fill(made[-1], *texts)
        return made[-1]

    yield make
    for store in made:
        store.close()


def alter(store, context, action):
    """Change a context; the stores in which that was done."""
    return {one.store for one in change(str(store.folder.path.parent), context, action)[0]}


def name_of(store):
    return store.folder.path.name


def rows(store):
    (found,), _ = listed(str(store.folder.path.parent), 100)
    return {row.id: row for row in found.contexts}


def test_a_chat_is_dropped_and_the_document_before_it_stays(make):
    """It has a name, or a pin, or both."""
    for number, (names, pins) in enumerate(
        (({"manual": key("abc")}, ()), ({}, {key("abc")}), ({"manual": key("abc")}, {key("abc")}))
    ):
        store = make(str(number), "abcde")
        write_names(store.folder, names)
        write_pins(store.folder, pins)
        alter(store, ident("abcde"), DROP)
        assert texts(store) == ["a", "ab", "abc"]
        assert read_names(store.folder) == names
        assert read_pins(store.folder) == {*pins}
        store.void(store.records())


def test_what_goes_on_behind_a_dropped_document_is_forgotten_with_it(make, capsys):
    """It contains the document; its names are told."""
    store = make("a", "abcd")
    write_names(store.folder, {"log-1": key("ab"), "log-2": key("abcd")})
    assert main(["store", "drop", str(store.folder.path.parent), "log-1"]) == 0
    assert "Forgotten with it: log-2." in capsys.readouterr().out
    assert texts(store) == []
    assert read_forgotten(store.folder).names == {"log-1", "log-2"}


def test_a_pin_is_withdrawn_alone(make, capsys):
    """What other pins hold of the context is told."""
    store = make("a", "abcd", "abef", "x")
    directory = str(store.folder.path.parent)
    write_names(store.folder, {"manual": key("ab"), "other": key("x")})
    everything = {key(text) for text in ("ab", "abcd", "abef", "x")}
    for meant, gone, remark in (
        ("manual", "ab", f"Others keep all of it pinned: {ident('abcd')} and {ident('abef')}."),
        (ident("abef"), "abef", f"Others keep its first 256 tokens pinned: {ident('abcd')}."),
        ("other", "x", ""),
    ):
        everything.discard(key(gone))
        write_pins(store.folder, everything | {key(gone)})
        assert main(["store", "unpin", directory, meant]) == 0
        assert capsys.readouterr().out.rstrip().endswith(f"in {name_of(store)}. {remark}".rstrip())
        assert read_pins(store.folder) == everything


def test_each_context_with_a_name_or_a_pin_is_listed(make):
    store = make("a", "abcd", "xy")
    write_names(store.folder, {"manual": key("ab"), "part": key("abc")})
    write_pins(store.folder, {key("abc"), key("x")})
    found = rows(store)
    assert found.keys() == {ident(text) for text in ("abcd", "abc", "ab", "xy", "x")}
    told = {
        id: (row.pinned, row.pinned_tokens, row.names, row.begins_with) for id, row in found.items()
    }
    assert told[ident("abcd")] == (False, 384, [], ["manual", "part"])
    assert told[ident("abc")] == (True, 384, ["part"], ["manual"])
    assert told[ident("ab")] == (False, 256, ["manual"], [])
    assert told[ident("xy")] == (False, 128, [], [])
    assert told[ident("x")] == (True, 128, [], [])


def test_ids_and_no_other_words(make):
    """At least 8 digits, or fewer with the prefix; also of contexts that go on, or lack blocks."""
    store = make("a", "abc", "axx", "z")
    for context in (ident("z"), ident("z")[:8].upper(), f"id:{ident('z')[:2]}", key("z").hex()):
        alter(store, context, PIN)
        assert read_pins(store.folder) == {key("z")}
        write_pins(store.folder, ())
    for context, why in (
        (ident("z")[:7], "no context"),
        ("a", "no context"),
        ("", "no context"),
        ("id:", "no context"),
        ("id:zz", "no context"),
        (f"id:{ident('z')[:2]}/", "no context"),
        (f"id:{ident('a')[:2]}", "5 contexts"),
        (key("z").hex() + "00", "no context"),
    ):
        with pytest.raises(RetrievalConfigError, match=f"names {why}"):
            alter(store, context, DROP)
    alter(store, ident("ab"), DROP)
    assert texts(store) == ["a", "ax", "axx", "z"]
    store.void(block for block, record in store.records().items() if record.key == key("ax"))
    with pytest.raises(RetrievalConfigError, match="names no context that is whole"):
        alter(store, ident("axx"), PIN)
    alter(store, ident("axx"), DROP)
    assert texts(store) == ["a", "z"]


@pytest.mark.parametrize("name", ["deadbeef", "20261128", "DEADBEEF00" * 9, "id:1", "id:report"])
def test_names_that_could_be_ids(name):
    with pytest.raises(RetrievalConfigError, match="cannot be a context's name"):
        check_name(name)


@pytest.mark.parametrize("name", ["1", "add", "cafe", "1234567", "deadbeef.txt", "id"])
def test_names_that_could_not(name):
    check_name(name)


def test_what_is_forgotten_is_never_another_context(make):
    """Its name and its id, for as long as they are not given anew."""
    store = make("a", "abc", "axx", "z")
    legacy = ident("axx")[:8]  # of an earlier release
    write_names(store.folder, {legacy: key("abc"), "a": key("z")})
    for context, left in ((legacy, ["a", "ax", "axx", "z"]), ("a", ["a", "ax", "axx"])):
        assert alter(store, context, DROP) == {name_of(store)}
        for _ in range(2):
            assert texts(store) == left
            assert alter(store, context, DROP) == set()
        for action in (PIN, UNPIN):
            with pytest.raises(RetrievalConfigError, match="is forgotten"):
                alter(store, context, action)
    assert alter(store, ident("axx"), DROP) == {name_of(store)}
    with pytest.raises(RetrievalConfigError, match="is forgotten"):
        alter(store, ident("axx"), UNPIN)
    for again in (ident("axx"), key("axx").hex()):
        assert alter(store, again, DROP) == {name_of(store)}
    assert texts(store) == []
    fill(store, "axxy")
    short = f"id:{ident('axx')[:4]}"
    with pytest.raises(RetrievalConfigError, match="contexts"):
        alter(store, short, DROP)
    assert alter(store, ident("axx"), PIN) == {name_of(store)}, "it has been read again"
    assert read_pins(store.folder) == {key("axx")}


def path(text):
    """Keys of a context's blocks."""
    return [key(text[:end]) for end in range(1, len(text) + 1)]


def test_a_name_that_is_given_anew(make):
    store = make("a", "abc", "z")
    directory = str(store.folder.path.parent)
    _note(directory, name_of(store), {"book": path("abc")}, pin=False)
    alter(store, "book", DROP)
    assert read_forgotten(store.folder) == Forgotten(frozenset({"book"}), (key("abc"),))
    _note(directory, name_of(store), {"book": path("z")}, pin=False)
    assert read_forgotten(store.folder).names == frozenset()
    assert alter(store, "book", DROP) == {name_of(store)}
    assert texts(store) == []


def test_a_reset_forgets_all_names(make):
    store = make("a", "abc")
    for _ in range(2):
        write_names(store.folder, {"book": key("abc")})
        note_reset(store.folder)
        assert read_names(store.folder) == {}
        assert read_forgotten(store.folder).names == {"book"}
        store.folder.replace(NAMES, b"[")
    note_reset(store.folder)
    assert read_names(store.folder) == {}


def test_ids_are_not_remembered_for_ever(make):
    store = make()
    known = [number.to_bytes(32, "big") for number in range(MOST_KEYS + 9)]
    write_forgotten(store.folder, Forgotten(frozenset({"book"}), (*known,)))
    assert read_forgotten(store.folder) == Forgotten(frozenset({"book"}), (*known[9:],))


def test_a_context_in_several_stores(make, capsys):
    """Whichever has it is changed, also if only another one has the name; where is told."""
    first, second, lost = make("a", "abc", "abd"), make("b", "abc"), make("c")
    for store in (first, lost):
        write_names(store.folder, {"book": key("abc")})
    for context in ("book", ident("abc")):
        assert alter(first, context, PIN) == {name_of(first), name_of(second)}
        for store in (first, second):
            assert read_pins(store.folder) == {key("abc")}
        assert read_pins(lost.folder) == set()
        assert alter(first, context, UNPIN) == {name_of(store) for store in (first, second, lost)}
        assert not read_pins(first.folder) | read_pins(second.folder)
    assert main(["store", "drop", str(first.folder.path.parent), "book"]) == 0
    said = capsys.readouterr().out
    for store in (first, second, lost):
        assert f"book is forgotten in {name_of(store)}." in said
        assert read_names(store.folder) == {}
    assert (texts(first), texts(second)) == (["a", "ab", "abd"], [])


def test_versions_of_a_document_in_several_stores(make):
    """Each pins its own; all are dropped."""
    old, new = make("a", "abc"), make("b", "abc", "xyz")
    write_names(old.folder, {"book": key("abc")})
    write_names(new.folder, {"book": key("xyz")})
    alter(old, "book", PIN)
    assert (read_pins(old.folder), read_pins(new.folder)) == ({key("abc")}, {key("xyz")})
    alter(old, "book", DROP)
    assert texts(old) == texts(new) == []


def test_a_store_that_cannot_be_changed(make, monkeypatch):
    """The others are, and both is told."""
    first, second = make("a", "abc"), make("b", "abc")
    replace = Folder.replace

    def fail(folder, name, contents):
        if folder.path == second.folder.path:
            raise OSError(errno.ENOSPC, "full")
        replace(folder, name, contents)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "replace", fail)
        why = rf"{name_of(second)}: drop has failed \(.*It is done in {name_of(first)}\."
        with pytest.raises(RetrievalConfigError, match=why):
            alter(first, ident("abc"), DROP)
    assert texts(first) == texts(second) == []


@pytest.mark.parametrize("pin", [False, True])
def test_a_name_that_moves_takes_its_pin_along(make, capsys, pin):
    """And the older version is told of, unless it is a part of the new one, or has a name."""
    store = make("a", "abc", "axyz")
    directory = str(store.folder.path.parent)
    _note(directory, name_of(store), {"book": path("abc"), "same": path("axy")}, pin=True)
    assert "older" not in capsys.readouterr().out
    for text, older in (("axy", "abc"), ("axyz", None), ("abc", "axyz")):
        _note(directory, name_of(store), {"book": path(text)}, pin=pin)
        said = capsys.readouterr().out
        assert ("An older version of book is there" in said) == (older is not None)
        assert not older or f"store drop {directory} {ident(older)}" in said
        assert read_names(store.folder) == {"book": key(text), "same": key("axy")}
        assert read_pins(store.folder) == {key(text), key("axy")}
    assert main(["store", "drop", directory, ident("axyz")]) == 0
    assert texts(store) == ["a", "ab", "abc", "ax", "axy"]


def test_more_pins_than_a_server_keeps(make, capsys):
    directory = str(make("a", "abcdefgh", "xy").folder.path.parent)
    assert main(["store", "pin", directory, key("abcdefgh").hex()]) == 0
    assert "blocks are to be pinned" not in capsys.readouterr().out
    assert main(["store", "pin", directory, ident("xy")]) == 0
    assert "10 of 16 blocks are to be pinned" in capsys.readouterr().out
