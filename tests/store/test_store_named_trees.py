"""Names, pins and drops in random trees of contexts, by files and by a running server."""

import random

import pytest

from benchmarks.stepper import BLOCK
from tests.support.store_life import Life, stepper
from tests.support.store_model import new_store
from vllm_kvretrieval.store.disk.changes import change
from vllm_kvretrieval.store.disk.contexts import NO_PARENT
from vllm_kvretrieval.store.disk.inbox import DROP, PIN, UNPIN
from vllm_kvretrieval.store.disk.names import read_names, read_pins, write_names
from vllm_kvretrieval.store.disk.records import Record
from vllm_kvretrieval.store.disk.store import Geometry

OPERATIONS = 30


class Model:
    """What there should be: contexts are words, whose letters are blocks.

    Attributes:
        words: All beginnings that are stored.
        names: Words by name.
        pins: Words.
    """

    def __init__(self):
        self.words, self.names, self.pins = set[str](), dict[str, str](), set[str]()

    def add(self, word):
        self.words |= {word[:end] for end in range(1, len(word) + 1)}

    def change(self, action, word):
        if action == PIN:
            self.pins.add(word)
        elif action == UNPIN:
            self.pins.discard(word)
        else:
            leaves = {w for w in self.words if not any(o[:-1] == w for o in self.words)}
            ends = {
                w for w in leaves | self.pins | {*self.names.values()} if w[: len(word)] != word
            }
            self.words = {w for w in self.words if any(end.startswith(w) for end in ends)}
            self.pins &= self.words
            self.names = {name: w for name, w in self.names.items() if w in self.words}


class Files:
    """A store that no server uses."""

    def __init__(self, directory):
        geometry = Geometry(blocks=100, layers=1, layer_block_bytes=8, side_bytes=0)
        self.directory = str(directory)
        self.store = new_store(directory, geometry, {"block_size": BLOCK})
        self.keys = dict[str, bytes]()

    def add(self, word):
        known = {record.key for record in self.store.records().values()}
        for end in range(1, len(word) + 1):
            key = self.keys.setdefault(word[:end], word[:end].encode().ljust(32))
            parent = self.keys.get(word[: end - 1], NO_PARENT)
            if key not in known:
                free = min({*range(100)} - self.store.records().keys())
                self.store.commit(free, Record(key, parent, end - 1, 0, 0))

    def change(self, action, word):
        change(self.directory, self.keys[word].hex(), action)

    def end(self):
        self.store.close()


class Server:
    """One that makes the changes before its next request."""

    def __init__(self, directory):
        self.life = Life(directory, stepper(directory))
        self.store = self.life.store
        self.keys = dict[str, bytes]()

    def add(self, word):
        tokens = [ord(letter) for letter in word for _ in range(BLOCK)]
        name = self.life.stepper.add([*tokens, 7], 2)
        hashes = [*self.life.scheduler.requests[name].block_hashes]
        self.keys |= {word[: end + 1]: key for end, key in enumerate(hashes)}
        self.life.stepper.run()
        self.life.settle()

    def change(self, action, word):
        self.life.change(action, self.keys[word])
        self.life.stepper.ask([7], 1)

    def end(self):
        held = {
            self.life.scheduler._store._stored[b].key for b in self.life.scheduler._store._pinned
        }
        pins = {word for word, key in self.keys.items() if key in read_pins(self.store.folder)}
        assert held == {self.keys[pin[:end]] for pin in pins for end in range(1, len(pin) + 1)}
        assert not self.life.counts["store_blocks_evicted"]
        self.life.end()


@pytest.mark.model
@pytest.mark.parametrize(("kind", "seeds"), [(Files, 4), (Server, 2)])
def test_random_trees(tmp_path, kind, seeds):
    for seed in range(seeds):
        chance, model, real = random.Random(seed), Model(), kind(tmp_path / str(seed))
        for _ in range(OPERATIONS):
            words = sorted(model.words)
            what = chance.choice(["add", "name", PIN, UNPIN, DROP]) if words else "add"
            word = chance.choice(words) if what != "add" else ""
            if what == "add":
                begin = chance.choice(["", *words])
                word = (begin + "".join(chance.choices("ab", k=3)))[:5]
                model.add(word)
                real.add(word)
            elif what == "name":
                model.names |= {chance.choice("xyz"): word}
                write_names(real.store.folder, {n: real.keys[w] for n, w in model.names.items()})
            else:
                model.change(what, word)
                real.change(what, word)
            by_key = {key: word for word, key in real.keys.items()}
            assert {by_key[r.key] for r in real.store.records().values()} == model.words
            assert {n: by_key[k] for n, k in read_names(real.store.folder).items()} == model.names
            assert {by_key[key] for key in read_pins(real.store.folder)} == model.pins
        real.end()
