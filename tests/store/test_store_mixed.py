"""A store for models that mix kinds of layers: what is found, and what is not.

A document is found only as far as all of its parts are there: blocks of full attention, the last
blocks of windows, and the states of recurrent layers at the ends of blocks.
"""

import contextlib
import math
import random
import shutil

import pytest
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from benchmarks.stepper import BLOCK, full_attention
from tests.store.test_store_scheduler import KILLS, end_of, kill_at_random
from tests.support.store_life import Life, chunks, prompt, state, stepper, window
from tests.support.store_model import contents
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.disk.contexts import NO_PARENT, beside, forgotten, reachable
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.groups import Group, Parts, pinned
from vllm_kvretrieval.store.disk.inbox import DROP, PIN, UNPIN
from vllm_kvretrieval.store.disk.records import Record, unpack
from vllm_kvretrieval.store.disk.store import open_store, store_names
from vllm_kvretrieval.store.listing import listed
from vllm_kvretrieval.store.serving import groups

MODELS = {
    "window": [full_attention(), window(BLOCK, 70)],
    "windows first": [window(BLOCK, 70), window(BLOCK, 70), full_attention()],
    "larger blocks of windows": [window(2 * BLOCK, 70), full_attention()],
    "smaller blocks of windows": [full_attention(2 * BLOCK), window(BLOCK, 70)],
    "chunks": [chunks(BLOCK, 5 * BLOCK), full_attention()],
    "state": [state(BLOCK), state(BLOCK), full_attention()],
    "all": [window(BLOCK, 40), full_attention(), state(BLOCK), full_attention()],
    "parts of blocks": [full_attention(), state(3 * BLOCK)],
}
WITHOUT_PARTS = [name for name in MODELS if name != "parts of blocks"]
HOMES = [
    *((name, False) for name in WITHOUT_PARTS),
    *((name, True) for name in ("windows first", "smaller blocks of windows", "chunks", "state")),
]
"""Also with groups of full attention in a slow home, and blocks of the others behind theirs."""

pytestmark = [pytest.mark.model]


@pytest.fixture(params=MODELS)
def specs(request):
    return MODELS[request.param]


@pytest.fixture
def lives(tmp_path):
    """Starts servers of one store, each when the last one has ended; without specs, none."""
    with contextlib.ExitStack() as ends:
        running: list[Life] = []

        def start(specs=None, seed=0, divided=False):
            if running:
                running.pop().end()
            if specs is None:
                return None
            directory = tmp_path / "store"
            running.append(Life(directory, stepper(directory, specs, 3 * BLOCK), seed, divided))
            return running[0]

        ends.callback(lambda: running and running.pop().end())
        yield start


def opened(directory):
    (name,) = store_names(Folder.at(str(directory)))
    return open_store(str(directory), name, write=True)


def findable(specs, present, longest):
    """The longest prefix whose parts are all there, by the definition.

    Args:
        specs: vLLM's, of the groups.
        present: For each group the numbers of the blocks of a context that are there.
        longest: Tokens that a request shares at most.
    """
    unit = math.lcm(*(spec.block_size for spec in specs))
    for end in range(longest // unit * unit, 0, -unit):
        for spec, there in zip(specs, present, strict=True):
            first, last = 0, end // spec.block_size
            if isinstance(spec, SlidingWindowSpec):
                first = max(end - spec.sliding_window + 1, 0) // spec.block_size
            elif isinstance(spec, ChunkedLocalAttentionSpec):
                first = end // spec.attention_chunk_size * spec.attention_chunk_size
                first //= spec.block_size
            elif isinstance(spec, MambaSpec):
                first = last - 1
            if not {*range(first, last)} <= there:
                break
        else:
            return end
    return 0


def test_a_prefix_is_found_after_a_restart(lives, specs):
    life = lives(specs)
    assert life.stepper.ask(prompt(1), 4)[1] == 0
    found = life.stepper.ask(prompt(1), 4)[1]
    assert found >= 6 * BLOCK
    life = lives(specs)
    assert life.stepper.ask(prompt(2), 4)[1] == 0
    if life.shares_parts:  # which are not stored
        found = found // (3 * BLOCK) * 3 * BLOCK
    assert life.stepper.ask(prompt(1), 4)[1] == found
    assert life.checked


@pytest.mark.parametrize(("name", "divided"), HOMES)
def test_only_what_is_whole_is_found(lives, tmp_path, name, divided):
    """Whichever blocks are damaged, of whichever group."""
    specs, shorter = MODELS[name], set()
    lives(specs, divided=divided).stepper.ask(prompt(1, 16), 4)
    numbers = lives(specs, divided=divided).scheduler._order
    intact = shutil.copytree(tmp_path / "store", tmp_path / "intact")
    for seed in range(30):
        chance = random.Random(seed)
        lives()
        shutil.rmtree(tmp_path / "store")
        shutil.copytree(intact, tmp_path / "store")
        life = lives(specs, divided=divided)
        records = life.store.records()
        present = [set[int]() for _ in specs]
        lost = chance.sample([*records], chance.choice([1, 1, 2, 5]))
        for block, record in records.items():
            if block in lost:
                life.damage(block)
            else:
                present[numbers[record.group]].add(record.number)
        shorter.add(expected := findable(specs, present, 16 * BLOCK))
        assert life.stepper.ask(prompt(1, 16), 4)[1] == expected
    assert len(shorter) > 3


@pytest.mark.parametrize("name", WITHOUT_PARTS)
def test_users_see_what_would_be_found(lives, tmp_path, name):
    """Of blocks that have been lost; their records are void."""
    specs, seen = MODELS[name], set()
    life = lives(specs)
    life.stepper.ask(prompt(1, 16), 4)
    life.settle()
    records, numbers = life.store.records(), life.scheduler._order
    for seed in range(20):
        lost = random.Random(seed).sample([*records], 2)
        life.store.void(lost)
        present = [set[int]() for _ in specs]
        for block, record in records.items():
            if block not in lost:
                present[numbers[record.group]].add(record.number)
        (store,), _ = listed(str(tmp_path / "store"), 5)
        seen.add(expected := findable(specs, present, 16 * BLOCK))
        assert max((context.tokens for context in store.contexts), default=0) == expected
        for block in lost:
            life.store.commit(block, records[block])
    assert len(seen) > 3


def test_levels_survive(lives, specs):
    """Blocks of generated tokens beyond the budget are shared, but not by exact requests."""
    life = lives(specs)
    tokens, _ = life.stepper.ask(prompt(1, 9), 4 * BLOCK)
    turn = [*prompt(1, 9), *tokens, *range(2 * BLOCK)]
    life = lives(specs)
    exact = life.stepper.ask(turn, 2, {"exact": True})[1]
    assert 0 < exact <= 9 * BLOCK
    life = lives(specs)
    assert life.stepper.ask(turn, 2, {"exact": True})[1] > 9 * BLOCK, "it has been computed anew"


def test_a_drop_takes_all_parts(lives, specs, tmp_path):
    """And erases them; other documents stay."""
    life = lives(specs)
    for document in (1, 2):
        life.stepper.ask(prompt(document, 12), 2)
    other = life.stepper.ask(prompt(2, 12), 2)[1]
    life.settle()
    records = life.store.records()
    (key,) = {
        record.key
        for record in records.values()
        if not record.group
        and record.number == 12 * BLOCK // specs_size(specs) - 1
        and record.key in keys_of(life, prompt(1, 12))
    }
    gone = forgotten(key, records, ())
    assert {records[block].group for block in gone} == {*range(len(specs))}
    life.change(DROP, key)
    assert life.stepper.ask(prompt(2, 12), 2)[1] == other
    assert life.stepper.ask(prompt(1, 12), 2)[1] == 0
    life.change(DROP, key)
    life.stepper.ask(prompt(2, 12), 2)
    life.stepper.step()
    life.settle()
    left = life.store.records()
    own = {*keys_of(life, prompt(1, 12))}
    assert own.isdisjoint(record.owner for record in left.values())
    assert not any(any(contents(life.store, block)) for block in gone if block not in left)


def specs_size(specs):
    """Tokens of a block of the store's first group."""
    return next(spec.block_size for spec in specs if isinstance(spec, FullAttentionSpec))


def keys_of(life, tokens):
    """vLLM's hashes of a prompt."""
    name = life.stepper.add(tokens, 1)
    keys = [*life.scheduler.requests[name].block_hashes]
    life.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    life.stepper.run()
    return keys


@pytest.mark.parametrize(("name", "divided"), HOMES)
def test_a_pinned_document_stays_with_all_its_parts(lives, tmp_path, name, divided):
    specs = MODELS[name]
    life = lives(specs, divided=divided)
    life.stepper.ask(prompt(1, 4), 2)
    found = life.stepper.ask(prompt(1, 4), 2)[1]
    assert found == 4 * BLOCK
    life.settle()
    (key,) = end_of(tmp_path / "store", found, specs_size(specs))
    life.change(PIN, key)
    for restart in (False, True):
        life = lives(specs, divided=divided) if restart else life
        for document in range(2, 16):
            life.stepper.ask(prompt(document), 2)
        assert life.stepper.ask(prompt(1, 4), 2)[1] == found
    life.change(UNPIN, key)
    for document in range(2, 26):
        life.stepper.ask(prompt(document), 2)
    assert life.stepper.ask(prompt(1, 4), 2)[1] < found
    assert life.scheduler.reset_prefix_cache(), "nothing is held any more"


@pytest.mark.parametrize(("name", "divided"), [*HOMES, ("parts of blocks", False)])
def test_random_lives(lives, name, divided):
    """Requests come, share, are aborted and preempted; servers end and start."""
    checked = 0
    for seed in range(6):
        life = lives(MODELS[name], seed, divided)
        for _ in range(200):
            if life.random.random() < 0.2 and len(life.stepper.requests()) < 6:
                life.ask_at_random()
            if life.random.random() < 0.02 and (running := life.stepper.requests()):
                life.scheduler.finish_requests(
                    running[0].request_id, RequestStatus.FINISHED_ABORTED
                )
            life.stepper.step()
        checked += life.checked
    assert checked > 50


@pytest.mark.parametrize("kills", [KILLS, pytest.param(100 * KILLS, marks=pytest.mark.slow)])
def test_kills(tmp_path, kills):
    directory = tmp_path / "store"
    kill_at_random(directory, stepper(directory, MODELS["all"], 3 * BLOCK), kills)


def test_a_lost_block_fails_the_requests_that_have_it(lives):
    """Of whichever group; vLLM's own scheduler would end the engine."""
    specs = MODELS["windows first"]
    life = lives(specs)
    life.stepper.ask(prompt(1), 4)
    life = lives(specs)
    scheduler = life.scheduler
    for document in (1, 2):
        life.stepper.add(prompt(document), 40, name=str(document))
    while "1" not in {request.request_id for request in scheduler.running}:
        life.stepper.step()
    life.stepper.step()
    by_group = scheduler.kv_cache_manager.get_block_ids("1")
    lost = next(block for block in by_group[1] if block)
    assert scheduler._handle_invalid_blocks({lost}, {}) == {"1"}
    pool = scheduler.kv_cache_manager.block_pool
    assert not any(pool.blocks[n].block_hash for blocks in by_group for n in blocks if n)


def key(name):
    return name.encode().ljust(32, b".")


def test_records_have_their_group():
    first = Record(key("a"), NO_PARENT, 0, 0, 7)
    other = Record(key("a"), key("a"), 0, 0, 7, group=3)
    assert first.pack()[4:16] == bytes(12), "as earlier versions have written it"
    assert unpack(first.pack() + other.pack()) == {0: first, 1: other}
    assert first.seed() != first._replace(group=1).seed()
    damaged = bytearray(other.pack())
    damaged[4] ^= 1
    assert unpack(bytes(damaged)) == {}


def test_parts_of_contexts():
    """Two blocks of the first group for one of a state; a window needs two of its own."""
    kinds = [Group(32), Group(64, 1), Group(32, 2)]
    names = ["a", "ab", "abc", "abcd"]
    records = {
        number: Record(key(name), key(name[:-1]) if number else NO_PARENT, number, 0, 0)
        for number, name in enumerate(names)
    }
    records |= {10: Record(key("ab"), key("ab"), 0, 0, 0, group=1)}
    records |= {11: Record(key("abcd"), key("abcd"), 1, 0, 0, group=1)}
    records |= {
        20 + number: Record(key(name), key(name), number, 0, 0, group=2)
        for number, name in enumerate(names)
    }
    keys = [key(name) for name in names]

    def whole(*lost):
        left = {block: record for block, record in records.items() if block not in lost}
        return Parts(kinds, beside(left, reachable(left))).whole(keys)

    assert whole() == 4
    assert whole(11) == whole(22) == whole(23) == 2
    assert whole(20) == whole(10) == 4, "what lies before is not needed"
    assert whole(11, 20) == whole(11, 10) == 0
    held, missing = pinned({key("abcd")}, records, kinds)
    assert {*held} == {0, 1, 2, 3, 11, 22, 23}
    assert not missing
    del records[22]
    held, missing = pinned({key("abcd")}, records, kinds)
    assert {*held} == {0, 1, 2, 3, 10, 20, 21}, "as far as a request would find it"
    assert missing == {key("abc")}
    del records[1]
    assert beside(records, reachable(records)) == {20: records[20]}


def test_a_store_of_other_groups_is_refused(lives, monkeypatch):
    """They are a part of its identity, so its name would have to be wrong."""
    said = groups.described(
        stepper("unused", MODELS["window"]).scheduler.kv_cache_config.kv_cache_groups, "a model"
    )
    monkeypatch.setattr(groups, "described", lambda *_: [one | {"needs": 1} for one in said])
    with pytest.raises(RetrievalConfigError, match="made for other groups of layers"):
        lives(MODELS["window"])


def test_other_kinds_of_layers_are_refused():
    spec = full_attention()
    other = SinkFullAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=64, dtype=spec.dtype, sink_len=32
    )
    with pytest.raises(RetrievalConfigError, match="layers of another kind"):
        groups.described([KVCacheGroupSpec(["0"], spec), KVCacheGroupSpec(["1"], other)], "a model")
