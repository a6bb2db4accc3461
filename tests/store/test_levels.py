"""The order of levels, and their numbers in a store."""

import itertools
import json
import random
from types import SimpleNamespace

import pytest

from vllm_kvretrieval.engine.exactness import ExactnessRules
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.retrieval.exactness_levels import (
    ANYHOW,
    EXACT,
    NEVER,
    UNKNOWN,
    BlockLevels,
    Kind,
    Level,
    Reading,
    Taint,
)
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.serving import levels as stored_levels
from vllm_kvretrieval.store.serving.levels import FILE, StoredLevels

READINGS = [
    None,
    ANYHOW,
    *(Reading("a", pair) for pair in itertools.product((128.0, 256.0), (0.0, 0.25))),
    *(Reading("b", (tokens,)) for tokens in (128.0, 256.0)),
]
LEVELS = [Level(*pair) for pair in itertools.product(READINGS, repeat=2)]


def test_levels_are_a_partial_order():
    serve = {pair for pair in itertools.product(LEVELS, repeat=2) if pair[0].serves(pair[1])}
    for one, other in itertools.product(LEVELS, repeat=2):
        assert ((one, other) in serve and (other, one) in serve) == (one == other)
        for third in LEVELS if (one, other) in serve else ():
            assert (other, third) not in serve or (one, third) in serve
    assert all((EXACT, level) in serve and (level, UNKNOWN) in serve for level in LEVELS)
    apart = Level(Reading("a", (128.0, 0.25))), Level(Reading("a", (256.0, 0.0)))
    assert serve.isdisjoint([apart, apart[::-1]])


def test_a_context_is_no_more_exact_than_any_of_its_parts():
    """Nor less than it has to be: its level is the most exact one that all parts serve."""
    for one, other in itertools.product(LEVELS, repeat=2):
        both = one.plus(other)
        assert both == other.plus(one)
        for third in LEVELS:
            assert both.serves(third) == (one.serves(third) and other.serves(third))


def test_nothing_is_shared_that_is_less_exact_than_asked_for():
    draw, levels = random.Random(0), BlockLevels()
    blocks = [SimpleNamespace(block_id=n, block_hash=b"%d" % n, is_null=False) for n in range(12)]
    shorter = 0
    for _ in range(3000):
        some = draw.sample(LEVELS, 3)
        for block in blocks:
            levels.note(block, draw.choice([EXACT] * 9 + some))
        known, asked = [levels.of(block) for block in blocks], draw.choice(some)
        groups = [(blocks[:8], 32), (blocks[8:], 64)]
        tokens, taint = levels.look(groups, asked)
        first = [n * 32 for n in range(8) if not known[n].serves(asked)]
        first += [n * 64 for n in range(4) if not known[8 + n].serves(asked)]
        assert tokens == min(first, default=NEVER)
        shorter += tokens < NEVER
        for n, level in enumerate(known):
            begin, size = (n * 32, 32) if n < 8 else ((n - 8) * 64, 64)
            if begin < tokens:
                assert level.serves(taint.level_of(begin + size))
    assert 300 < shorter < 2700


def asked(method, options, request=None):
    config = RetrievalConfig.from_options(method, options)
    return ExactnessRules(config).of(RequestOptions.parse({"kv_retrieval": request or {}}, config))


SPARSE = {"budget": 512, "prefill_budget": 1024, "prefill_share": 0.25}


@pytest.mark.parametrize(
    ("less", "more", "comparable"),
    [
        ({"prefill_budget": 512}, {}, True),
        ({"prefill_share": 0.125}, {}, True),
        ({"budget": 256}, {}, True),
        ({"mass": 0.9}, {}, True),
        ({"method": "freekv", "correction_threshold": 0.5}, {"method": "freekv"}, True),
        ({}, {"prefill_budget": 0}, True),
        ({"prefill_budget": 512}, {"prefill_share": 0}, False),
        ({"budget": 256}, {"mass": 0.9}, False),
        ({"method": "freekv"}, {}, False),
        ({"method": "streamingllm"}, {"prefill_budget": 0}, False),
        ({"prefill_budget": 0, "budget": 256}, {}, False),
    ],
)
def test_requests_of_one_engine(less, more, comparable):
    options = SPARSE | {"also": ["freekv"], "remainder": 0, "page_size": 32}
    low, high = (asked("kvretrieval", options, request).own for request in (less, more))
    assert high.serves(low) is comparable
    assert not low.serves(high)


@pytest.mark.parametrize(
    ("method", "changed", "serves"),
    [
        ("kvretrieval", {"prefill_depth": 0.5}, True),
        ("kvretrieval", {"max_budget": 2048, "store_days": 3, "store": "/tmp/s"}, True),
        ("kvretrieval", {"prefill_chunk": 256}, False),
        ("kvretrieval", {"prefill_queries": 4}, False),
        ("kvretrieval", {"prefill_sampling": "dissimilar"}, False),
        ("kvretrieval", {"prefill_pooling": "max"}, False),
        ("kvretrieval", {"prefill_budget_shares": [1, 2]}, False),
        ("kvretrieval", {"sink": 64}, False),
        ("kvretrieval", {"index": "min_max"}, False),
        ("kvretrieval", {"budget_shares": "pyramid"}, False),
        ("omnikv", {"prefill_chunk": 256}, False),
        ("omnikv", {"filters": [2, 7]}, False),
        ("omnikv", {"observation": "uniform"}, False),
    ],
)
def test_engines_with_other_options(method, changed, serves):
    """Of runs that share a store: what is not known to be as exact is not shared."""
    options = {"budget": 512, "prefill_budget": 1024}
    high, low = asked(method, options).own, asked(method, options | changed).own
    assert high.serves(low) is serves
    assert low.serves(high) is (serves and "prefill_depth" not in changed)


def test_a_share_of_the_prompt_is_a_measure():
    """Turns of a chat ask for the same, though the budget grows with the chat."""
    options = {"memory_fraction": 0.5, "max_budget": 4096}
    half = asked("kvretrieval", options)
    assert half.own.serves(asked("kvretrieval", options).own)
    assert half.own.serves(asked("kvretrieval", options | {"memory_fraction": 0.25}).own)
    fewer = asked("kvretrieval", options | {"max_budget": 3072}).own
    assert half.own.serves(fewer)
    assert not fewer.serves(half.own)
    fixed = asked("kvretrieval", options, {"budget": 2048}).own
    assert not half.own.serves(fixed)
    assert not fixed.serves(half.own)


def test_exact_requests_ask_for_exact_blocks():
    for request in ({"exact": True}, {"exact_prefix": True}, {"method": "snapkv"}):
        options = SPARSE | {"also": ["snapkv"]}
        assert asked("kvretrieval", options, request).tolerance == EXACT


# ------------------------------------------------------------------------------------ in a store


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    found = Folder.at(str(tmp_path))
    yield found
    found.close()


def test_numbers_of_levels(folder):
    """They mean the same in the next run; those without a meaning mean the worst of their kind."""
    stored = StoredLevels(folder, set)
    numbers = {level: stored.number(level) for level in LEVELS}
    assert len({*numbers.values()}) == len(LEVELS)
    assert [stored.level(kind) for kind in Kind] == [EXACT, Level(ANYHOW), UNKNOWN]
    assert numbers[EXACT] == Kind.EXACT
    for again in (stored, StoredLevels(folder, set)):
        assert all(again.level(number) == level for level, number in numbers.items())
    for damaged in (b"", b"{", b"[]", b'{"5": 7, "6": [["a", ["b"]], null], "7": [null]}'):
        folder.replace(FILE, damaged)
        lost = StoredLevels(folder, set)
        for level, number in numbers.items():
            assert level.serves(lost.level(number))
            assert number % 4 == level.kind
        assert lost.level(3) == lost.level(4) == UNKNOWN


def test_a_changed_file_names_no_wrong_level(folder):
    stored, level = StoredLevels(folder, set), Level(Reading("a", (128.0,)))
    number = stored.number(level)
    text = folder.read(FILE)
    folder.replace(FILE, text.replace(b"128.0", b"2048.0"))
    assert StoredLevels(folder, set).level(number) == Level(ANYHOW)


def test_clients_cannot_fill_the_file(folder, monkeypatch):
    """Levels that no record has make room; if all are in use, others are not told apart."""
    monkeypatch.setattr(stored_levels, "MOST", 5)
    used: set[int] = set()
    stored = StoredLevels(folder, lambda: used)
    levels = [Level(Reading("a", (float(n),))) for n in range(20)]
    for level in levels:
        used = {stored.number(level)}
    assert stored.level(stored.number(levels[-1])) == levels[-1]
    used = set()
    for level in levels[:5]:
        used.add(stored.number(level))
    assert stored.number(levels[9]) == Kind.DECODED
    assert len(json.loads(folder.read(FILE))) == len(used) == 5
    assert {stored.level(number) for number in used} == {*levels[:5]}


def test_a_file_that_cannot_be_written(folder, monkeypatch):
    stored, level = StoredLevels(folder, set), Level(Reading("a", (128.0,)))

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "replace", fail)
        assert stored.number(level) == Kind.DECODED
    assert stored.level(stored.number(level)) == level


def test_a_taint_covers_what_lies_behind_it():
    decoded, prefilled = Level(READINGS[2]), Level(None, READINGS[3])
    taint = Taint(100, prefilled).plus(Taint(200, decoded))
    assert taint == (100, Level(READINGS[2], READINGS[3]))
    assert [taint.level_of(end) for end in (100, 101)] == [EXACT, taint.level]
