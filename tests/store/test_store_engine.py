"""An engine with a store, ended and started anew: what it finds, and what it answers."""

import dataclasses

import pytest

from tests.support import engine as engines
from tests.support.engine import Request, drive, engine, model_of, random_llama
from vllm_kvretrieval.command import main
from vllm_kvretrieval.retrieval.codec import CODECS
from vllm_kvretrieval.store.disk.contexts import contexts, paths, reachable
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.store import PAGES, SIDE, open_store, store_names
from vllm_kvretrieval.store.listing import listed

LENGTH, BLOCK, PAGE = 1200, 128, 32
WHOLE = LENGTH // BLOCK * BLOCK
GENERATED = 84  # as many as fill a block, and more
OPTIONS = {
    "attention_backend": "kvretrieval",
    "dtype": "bfloat16",  # whose rounding hides how a prompt was cut into chunks
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
}

pytestmark = [pytest.mark.engine]

model = model_of(random_llama, 4, 2)


def start(model, directory, **options):
    """An engine with a store; keyword arguments are options of KV retrieval."""
    retrieval = {"home": "disk", "store": str(directory), "budget": 512, "page_size": PAGE}
    return engine(model, **OPTIONS, additional_config={"kv_retrieval": retrieval | options})


def ask(llm, tokens, count=12, **options):
    """An answer without the steps in which it came."""
    (answer,) = drive(llm, [Request(tokens, count, options or None, cache=True)])
    return dataclasses.replace(answer, steps=[])


def prompt(seed, length=LENGTH):
    return engines.prompt(length, seed)


def opened(directory):
    (name,) = store_names(Folder.at(str(directory)))
    return open_store(str(directory), name, write=True)


def damage(directory, block, store=None):
    """Flip a bit of a block, in the last layer of home, or in memory's part."""
    store = store or opened(directory)
    sizes = store.geometry
    name, place = SIDE, sizes.beside(block)[0] + 7
    if sizes.layers and block < sizes.blocks:
        last = (sizes.layers - 1) * sizes.blocks + block
        name, place = PAGES, last * sizes.layer_block_bytes + 7
    with (store.folder.path / name).open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    store.close()


def records_of(directory):
    store = opened(directory)
    records = store.records()
    store.close()
    return records


def follow_up(llm, answer, **options):
    return ask(llm, [*prompt(1), *answer.tokens, 7, 8, 9], **options)


@pytest.fixture(
    scope="module", params=["raw", pytest.param("k8v4", marks=pytest.mark.slow), "ttkv", "device"]
)
def lives(request, model, tmp_path_factory):
    """Answers of an engine, and of one that was started when it had ended; whether they are alike
    where a prefix is found and where it is computed.

    With ttkv they are not: the request that computes a block has it raw in its window, and others
    read it decoded.
    """
    directory = tmp_path_factory.mktemp("lives") / "store"
    options = {"codec": request.param} if request.param in CODECS else {}
    method = {"attention_backend": "ttkv"} if request.param == "ttkv" else {}
    home = "device" if request.param == "device" else "disk"
    retrieval = {"home": home, "store": str(directory), "budget": 512, "page_size": PAGE}

    def life():
        more = {"kv_retrieval": retrieval | options}
        return engine(model, **OPTIONS | method, additional_config=more)

    with life() as llm:
        first = {"new": ask(llm, prompt(1), GENERATED), "damaged": ask(llm, prompt(2))}
        first["found"] = ask(llm, prompt(1), GENERATED)
        first["damaged, found"] = ask(llm, prompt(2))
        first["follow-up"] = follow_up(llm, first["found"])
    store = opened(directory)
    last = {record.number: block for block, record in store.records().items() if record.level == 0}
    of_second = [b for b, r in store.records().items() if r.number == 4][1]
    store.close()
    assert len(last) == WHOLE // BLOCK
    damage(directory, of_second)
    with life() as llm:
        second = {"found": ask(llm, prompt(1), GENERATED), "damaged": ask(llm, prompt(2))}
        second["follow-up"] = follow_up(llm, first["found"])
        second["exact"] = follow_up(llm, first["found"], exact=True)
        second["exact, found"] = follow_up(llm, first["found"], exact=True)
        second["new"] = ask(llm, prompt(3))
    return first, second, request.param != "ttkv"


def test_a_restart_changes_nothing(lives):
    """The prefix is found, and the answer is that of the engine that had computed it."""
    first, second, _ = lives
    assert first["new"].cached == 0
    assert first["found"].cached == WHOLE
    assert second["found"] == first["found"]
    assert second["new"].cached == 0


def test_levels_are_kept(lives):
    """Blocks of generated tokens are found, but not by a request for exact answers."""
    first, second, alike = lives
    assert first["follow-up"].cached == WHOLE + BLOCK
    assert second["follow-up"] == first["follow-up"]
    assert second["exact"].cached == WHOLE
    assert second["exact, found"].cached == WHOLE + BLOCK
    assert not alike or second["exact, found"].tokens == second["exact"].tokens


def test_a_damaged_block_is_computed_anew(lives):
    """What lies before it is found, what lies behind it is not; the answer is right."""
    first, second, alike = lives
    assert first["damaged, found"].cached == WHOLE
    assert second["damaged"].cached == 4 * BLOCK
    assert not alike or second["damaged"].tokens == first["damaged"].tokens


def test_the_latest_contexts_stay(model, tmp_path):
    """A full store forgets what was used longest ago, over restarts, too; no pinned context."""
    directory, size = tmp_path / "store", 700
    whole = size // BLOCK * BLOCK
    pinned, old, used = (prompt(seed, size) for seed in (11, 12, 13))
    room = 25 * 3 * 2 * 2 * BLOCK * 64 * 2  # of 25 blocks
    with start(model, directory, home_bytes=room) as llm:
        for tokens in (pinned, used, old):
            assert ask(llm, tokens, 2).cached == 0
    records = reachable(records_of(directory))
    found = contexts(records)
    (context,) = [c for c, path in zip(found, paths(found, records), strict=True) if path[0] == 1]
    assert main(["store", "pin", str(directory), context.id]) == 0
    with start(model, directory) as llm:
        assert ask(llm, used, 2).cached == whole
    with start(model, directory) as llm:
        assert ask(llm, prompt(14, 1700), 2).cached == 0
        assert ask(llm, used, 2).cached == whole
        assert ask(llm, pinned, 2).cached == whole
        assert ask(llm, old, 2).cached < whole
        assert llm.reset_prefix_cache()
        assert ask(llm, pinned, 2).cached == 0
    assert len(records_of(directory)) == whole // BLOCK, "what was there before the reset is gone"


def test_a_session_is_pinned_and_read_ahead(model, tmp_path):
    """Into memory, while another request is served: then nothing is left to be read for it."""
    directory, tokens = tmp_path / "store", prompt(21, 700)
    options = OPTIONS | {"kv_cache_memory_bytes": 8 << 20}  # of two contexts

    def life():
        retrieval = {"store": str(directory), "budget": 512, "page_size": PAGE, "sessions": True}
        return engine(model, **options, additional_config={"kv_retrieval": retrieval})

    with life() as llm:
        ask(llm, tokens, 2, session="a", pin=True)
        first = ask(llm, tokens, 12)
        for seed in range(22, 28):
            ask(llm, prompt(seed, 1700), 2)
    with life() as llm:
        assert ask(llm, prompt(28, 700), 200, prefetch="a").cached == 0
        assert ask(llm, tokens, 12) == first
        assert first.cached == len(tokens) // BLOCK * BLOCK


def test_every_worker_has_its_part(model, tmp_path):
    """Of two workers; a block is found if both have theirs, and users see one store."""
    directory, tokens = tmp_path / "store", prompt(1, 700)
    whole = len(tokens) // BLOCK * BLOCK
    options = OPTIONS | {"tensor_parallel_size": 2}
    retrieval = {"home": "disk", "store": str(directory), "budget": 512}

    def life():
        return engine(model, **options, additional_config={"kv_retrieval": retrieval})

    with life() as llm:
        ask(llm, tokens, 2)
        first = ask(llm, tokens, 2)
    names = store_names(Folder.at(str(directory)))
    assert [name.partition(".")[2] for name in names] == ["0", "1"]
    (listed_store,), _ = listed(str(directory), 5)
    assert [context.tokens for context in listed_store.contexts] == [whole]
    with life() as llm:
        assert ask(llm, tokens, 2) == first
        assert first.cached == whole
    store = open_store(str(directory), names[1])
    (third,) = (block for block, record in store.records().items() if record.number == 2)
    damage(directory, third, store)
    with life() as llm:
        answer = ask(llm, tokens, 2)
        assert answer.cached == 2 * BLOCK
        assert answer.tokens == first.tokens
