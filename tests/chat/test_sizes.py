"""Whether a model holds documents on a machine, and the server that is started for them."""

import shutil
from types import SimpleNamespace

import pytest

from tests.support.engine import checkpoint
from vllm_kvretrieval.chat import sizes
from vllm_kvretrieval.chat.sizes import GIB, TooLongError, plan
from vllm_kvretrieval.errors import RetrievalConfigError

pytestmark = pytest.mark.model

MODEL, KV = "SmolLM2-135M-Instruct", 30 * 2 * 3 * 64 * 2
TEXT = "The grass is green. " * 100


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """The options of the server for a text, by name, and the rest, with so much memory and disk."""

    def run(text=TEXT, memory=8, disk=100, model=MODEL, engine=(), keep=True, answer=0):
        monkeypatch.setattr(sizes, "_free_memory", lambda: int(memory * GIB))
        usage = SimpleNamespace(free=disk * GIB)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        engine = ["--dtype", "bfloat16", *engine]
        found = plan(checkpoint(model), [text], engine, tmp_path / "chat", keep, answer)
        named = dict(zip(found.options, [*found.options[1:], ""], strict=True))
        return named, found

    return run


def test_a_small_model_has_room_in_memory(planned, tmp_path):
    options, found = planned()
    assert found.tokens == 501
    assert found.length == 8192
    assert options["--max-model-len"] == "8192"
    assert options["--kv-retrieval.home"] == "device"
    assert int(options["--kv-cache-memory-bytes"]) == 2 * 8192 * KV
    assert options["--kv-retrieval.store"] == str(found.store)
    assert found.store.name == "device-16384"
    assert found.store.parent.parent == tmp_path / "chat"
    assert found.store.parent.stat().st_mode & 0o777 == 0o700
    assert found.remarks == []


def test_little_memory(planned):
    """The cache moves to a file; contexts are no longer than this document needs."""
    options, found = planned(memory=0.4)
    assert options["--kv-retrieval.home"] == "disk"
    assert found.length == 2048 >= found.tokens + sizes.ROOM
    assert int(options["--kv-retrieval.home_bytes"]) == 2 * 2048 * KV
    assert int(options["--kv-cache-memory-bytes"]) < 0.1 * GIB


def test_a_store_that_is_there_is_taken(planned):
    """It keeps its size, or the server would refuse it; one that is too small stays."""
    _, found = planned(memory=0.4)
    found.store.mkdir()
    (found.store.parent / "other").mkdir()
    assert planned(memory=0.4)[1].store == found.store
    assert planned(memory=0.4, text=TEXT * 8)[1].store != found.store
    again = planned(memory=8)[1]
    assert again.length == 8192, "which the store does not hold"
    assert again.store.name == "device-16384"


def test_little_disk(planned):
    options, found = planned(disk=0.1)
    assert found.store is None
    assert "--kv-retrieval.store" not in options
    assert "0.1 GiB of disk are free" in found.remarks[0]
    assert planned(keep=False)[1].remarks == []


def test_a_document_that_is_too_long(planned):
    """Names both numbers, and models that read it and fit."""
    with pytest.raises(TooLongError) as error:
        planned(text=TEXT * 14, memory=16)
    said = str(error.value)
    assert "have 7,001 tokens of this model" in said
    assert "reads 8,192, less 1,536 for questions and answers" in said
    assert "Qwen/Qwen2.5-1.5B-Instruct (32,768; 2.9 GiB)" in said
    assert "7B" not in said, "it takes more than there is"
    planned(text=TEXT * 13, memory=16)
    with pytest.raises(TooLongError, match="reads 4,096"):
        planned(text=TEXT * 6, engine=["--max-model-len", "4096"])


def test_a_document_that_is_far_too_long(planned, monkeypatch):
    """It is not counted to its end, which would take minutes, and all of the memory."""
    monkeypatch.setattr(sizes, "PIECE", 2 * len(TEXT))
    assert planned(text=TEXT * 5)[1].tokens == 1001 + 1001 + 501
    encoded = list[str]()

    def encode(text):
        encoded.append(text)
        return range(1001)

    tokenizer = SimpleNamespace(encode=encode)
    monkeypatch.setattr("vllm.tokenizers.cached_tokenizer_from_config", lambda _: tokenizer)
    with pytest.raises(TooLongError, match="have 500,500 tokens of this model"):
        planned(text=TEXT * 1000)
    assert len(encoded) == 9


def test_room_for_long_answers(planned):
    """Before a server starts that could not give them."""
    assert planned(answer=7000)[1].length == 8192
    with pytest.raises(TooLongError, match="reads 8,192, less 8,012 for questions and answers"):
        planned(answer=7500)


def test_a_model_that_is_too_large(planned):
    with pytest.raises(RetrievalConfigError) as error:
        planned(memory=0.2)
    assert "needs 0.3 GiB for its weights, and 0.2 GiB of memory are available" in str(error.value)
    assert "No model that this command knows of" in str(error.value)
    with pytest.raises(RetrievalConfigError, match=r"GiB for its longest context, and 0\.3 GiB"):
        planned(memory=0.3, disk=0)


def test_layers_of_several_kinds(planned):
    """A token has no size of its own there, so the cache has one that is found again."""
    options, found = planned(model="gemma-3-270m")
    assert found.store.name == "memory-2048"
    assert options["--kv-retrieval.store"] == str(found.store)
    assert options["--kv-retrieval.home"] == "device"
    assert int(options["--kv-cache-memory-bytes"]) == 2 * GIB
    found.store.mkdir()
    assert planned(model="gemma-3-270m", memory=100)[1].store == found.store
    assert planned(model="gemma-3-270m", memory=3)[1].store.name == "memory-1024"
    without, found = planned(model="gemma-3-270m", memory=3, disk=0.1)
    assert found.store is None
    assert "0.1 GiB of disk are free" in found.remarks[0]
    assert "--kv-retrieval.store" not in without
    assert planned(model="gemma-3-270m", keep=False)[1].remarks == []


def test_options_that_are_refused(planned):
    with pytest.raises(RetrievalConfigError, match="budget=3 "):
        planned(engine=["--kv-retrieval.budget", "3"])
    with pytest.raises(SystemExit):
        planned(engine=["--no-such-option"])


def test_each_model_has_a_folder_of_its_own(tmp_path):
    (tmp_path / "a").mkdir()
    names = [str(tmp_path / "a"), f"{tmp_path}/./a", "owner/a", "other/a", "../../etc", "x" * 200]
    found = [sizes.folder_name(name) for name in names]
    assert found[0] == found[1]
    assert len({*found}) == 5
    assert all("/" not in name and not name.startswith(".") and len(name) < 60 for name in found)
