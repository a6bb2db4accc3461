"""Contexts in a store: which are whole, which is meant, and what pins and drops concern."""

import random

import pytest

from tests.support.store_model import new_store
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.disk.contexts import (
    NO_PARENT,
    contexts,
    forgotten,
    held,
    paths,
    pinned_blocks,
    reachable,
)
from vllm_kvretrieval.store.disk.names import read_pins, write_pins
from vllm_kvretrieval.store.disk.records import Record


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
    found = contexts(known := reachable(RECORDS))
    assert [(c.length, c.level, c.created) for c in found] == [(3, 0, 9), (3, 1, 4), (1, 0, 3)]
    assert paths(found, known) == [[5, 3, 7], [5, 3, 1], [2]]


def test_blocks_without_those_before_them_are_left_out():
    gap = {block: r for block, r in RECORDS.items() if block != 3}
    assert reachable(gap) == {5: RECORDS[5], 2: RECORDS[2]}
    misplaced = {**RECORDS, 3: record("ab", 2)}
    assert 3 not in reachable(misplaced)


def test_of_equal_blocks_the_most_exact_then_the_latest_counts():
    equal = {8: record("a", 0, level=1, created=9), 9: record("a", 0, created=1), 10: RECORDS[5]}
    assert reachable(equal) == {9: equal[9]}


def test_what_is_dropped():
    """A context and what goes on behind it, but for what others share of it, and its copies."""
    assert forgotten(key("abd"), RECORDS, ()) == {7}
    assert forgotten(key("ab"), RECORDS, ()) == {5, 3, 1, 7}
    assert forgotten(key("x"), RECORDS, ()) == {2}
    assert forgotten(key("gone"), RECORDS, ()) == set()
    gap = {block: r for block, r in RECORDS.items() if block != 3}
    assert forgotten(key("abd"), gap, ()) == {7}, "it is not found again when the gap is filled"
    assert forgotten(key("ab"), gap, ()) == {1, 7}
    assert forgotten(key("ab"), RECORDS, {key("a")}) == {3, 1, 7}, "but for what has a name or pin"
    assert forgotten(key("a"), RECORDS, {key("ab")}) == {5, 3, 1, 7}, "before it"
    assert forgotten(key("abd"), RECORDS | {9: RECORDS[7]._replace(level=2)}, ()) == {7, 9}


def tree(chance, blocks):
    """Records of contexts that share beginnings; some are missing, or there twice."""
    made: list[tuple[int, bytes, bytes]] = []
    records: dict[int, Record] = {}
    for block in chance.sample(range(blocks), blocks):
        before = chance.choice([None, *made[-20:]])
        if made and chance.random() < 0.1:
            number, key, parent = chance.choice(made)
        else:
            number, parent = (0, NO_PARENT) if before is None else (before[0] + 1, before[1])
            key = chance.randbytes(32)
        made.append((number, key, parent))
        if chance.random() < 0.97:
            records[block] = Record(key, parent, number, chance.randrange(3), chance.randrange(99))
    return records


def slow_path(key, blocks, records):
    """The blocks that end with a key, back to the first one, or to a gap."""
    path = [blocks[key]]
    while (parent := records[path[-1]].parent) in blocks:
        path.append(blocks[parent])
    return path[::-1]


def slow_contexts(records, kept=()):
    """By the definition: key, blocks, level and time of each, latest first."""
    blocks = {record.key: block for block, record in records.items()}
    inner = {record.parent for record in records.values()} - {*kept}
    found = []
    for key in [record.key for record in records.values() if record.key not in inner]:
        own = [records[block] for block in slow_path(key, blocks, records)]
        level, created = max(r.level for r in own), max(r.created for r in own)
        found.append((key, slow_path(key, blocks, records), level, created))
    return sorted(found, key=lambda context: -context[3])


def slow_forgotten(key, records, ends):
    """By the definition: what no context has that does not go through the key's block."""
    every = {record.key: block for block, record in records.items()}
    with_it, without = set[int](), set[int]()
    for _, path, *_ in ends:
        (with_it if every[key] in path else without).update(path)
    gone = {records[block].key for block in with_it - without}
    return {block for block, record in records.items() if record.key in gone}


def test_random_trees():
    """Contexts, pins and drops are what a walk along each context finds.

    Names and pins are anywhere, also in the middle of what others have.
    """
    stopped = 0
    for seed in range(100):
        chance = random.Random(seed)
        records = tree(chance, 150)
        known = reachable(records)
        blocks = {record.key: block for block, record in known.items()}
        every = [*{record.key: None for record in records.values()}]
        pins = chance.sample(every, 5)
        kept = {*pins, *chance.sample(every, 5), b"lost".ljust(32)}
        walked, found = slow_contexts(known, kept), contexts(known, kept)
        assert [(c.key, c.level, c.created) for c in found] == [(k, s, t) for k, _, s, t in walked]
        assert paths(found, known) == [path for _, path, *_ in walked]
        assert [c.length for c in found] == [len(path) for _, path, *_ in walked]
        one_each = {record.key: block for block, record in records.items()}
        ends = slow_contexts({block: records[block] for block in one_each.values()}, kept)
        for key in chance.sample(every, 20):
            assert forgotten(key, records, kept) == slow_forgotten(key, records, ends)
            stopped += forgotten(key, records, kept) != forgotten(key, records, ())
            own = slow_path(key, blocks, known) if key in blocks else []
            shared = {
                pin: len({*own}.intersection(slow_path(pin, blocks, known)))
                for pin in pins
                if pin in blocks and pin != key
            }
            most = max(shared.values(), default=0)
            by = sorted(pin for pin in shared if most and shared[pin] == most)
            assert held(key, pins, known) == (most, by)
        pinned = dict.fromkeys(
            block
            for key in sorted(pins)
            if key in blocks
            for block in slow_path(key, blocks, known)
        )
        assert pinned_blocks(sorted(pins), known) == [*pinned]
    assert stopped > 50


class Counting(dict[int, Record]):
    """Counts how often a record is looked up, or gone through."""

    steps = 0

    def __getitem__(self, block):
        self.steps += 1
        return super().__getitem__(block)

    def values(self):
        self.steps += len(self)
        return super().values()

    def items(self):
        self.steps += len(self)
        return super().items()


def test_many_contexts_take_a_few_steps_a_block():
    """A walk along each of them would take as many as it has blocks."""
    trunk, leaves = 500, 500
    keys = [i.to_bytes(32, "big") for i in range(1, trunk + leaves + 1)]
    records = Counting()
    for i, key in enumerate(keys):
        number = min(i, trunk)
        records[i] = Record(key, keys[number - 1] if number else NO_PARENT, number, 0, 0)
    known = Counting(reachable(records))
    assert len(contexts(known)) == leaves
    assert len(forgotten(keys[-1], records, ())) == 1
    assert len(pinned_blocks(keys[trunk:], known)) == len(keys)
    assert records.steps + known.steps < 20 * len(keys)


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
