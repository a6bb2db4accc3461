"""Contexts in a store: which are whole, which is meant, and what pins and drops concern."""

import pytest

from tests.store_model import new_store
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.contexts import (
    NO_PARENT,
    contexts,
    forgotten,
    meant,
    pinned_blocks,
    reachable,
    read_pins,
    write_pins,
)
from vllm_kvretrieval.store.records import Record


def key(name):
    return name.encode().ljust(32, b".")


def record(name, number, level=0, created=0, parent=None):
    """The record of a block named by its text, such as ``abc`` behind ``ab``."""
    parent = name[:-1] if parent is None else parent
    return Record(key(name), key(parent) if parent else NO_PARENT, number, level, created)


RECORDS = {
    5: record("a", 0),
    3: record("ab", 1, created=4),
    1: record("abc", 2, level=1, created=2),
    7: record("abd", 2, created=9),
    2: record("x", 0, created=3),
}


def test_contexts_end_where_nothing_follows():
    found = contexts(reachable(RECORDS))
    assert [(c.blocks, c.level, c.created) for c in found] == [
        ((5, 3, 7), 0, 9),
        ((5, 3, 1), 1, 4),
        ((2,), 0, 3),
    ]


def test_blocks_without_those_before_them_are_left_out():
    gap = {block: r for block, r in RECORDS.items() if block != 3}
    assert reachable(gap) == {5: RECORDS[5], 2: RECORDS[2]}
    misplaced = {**RECORDS, 3: record("ab", 2)}
    assert 3 not in reachable(misplaced)


def test_of_equal_blocks_the_most_exact_then_the_latest_counts():
    equal = {8: record("a", 0, level=1, created=9), 9: record("a", 0, created=1), 10: RECORDS[5]}
    assert reachable(equal) == {9: equal[9]}


def test_contexts_are_named_by_first_digits():
    records = reachable(RECORDS)
    assert meant(records, key("x").hex()[:4], {}) == [key("x")]
    assert meant(records, contexts(records)[0].id.upper(), {}) == [key("abd")]
    for name, count in (("", 0), ("ff", 0), (key("ab").hex()[:4], 2)):
        assert len(meant(records, name, {})) == count


def test_names_stay_with_what_goes_on():
    records = reachable(RECORDS)
    assert meant(records, "book", {"book": key("ab")}) == [key("ab")]
    assert meant(records, "book", {"book": key("gone")}) == []


def test_what_is_dropped():
    """A context and what goes on behind it, but for what others share of it, and its copies."""
    assert forgotten(key("abd"), RECORDS) == {7}
    assert forgotten(key("ab"), RECORDS) == {5, 3, 1, 7}
    assert forgotten(key("x"), RECORDS) == {2}
    assert forgotten(key("gone"), RECORDS) == set()
    assert forgotten(key("abd"), RECORDS | {9: RECORDS[7]._replace(level=2)}) == {7, 9}


def test_pins(tmp_path):
    store = new_store(tmp_path / "store")
    assert read_pins(store.folder) == set()
    write_pins(store.folder, {key("abc"), key("gone")})
    pins = read_pins(store.folder)
    assert pins == {key("abc"), key("gone")}
    assert pinned_blocks(pins, reachable(RECORDS)) == [5, 3, 1]
    (store.folder.path / "pins.json").write_text("[1]")
    with pytest.raises(RetrievalConfigError, match="pin anew"):
        read_pins(store.folder)
