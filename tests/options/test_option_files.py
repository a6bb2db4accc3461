"""Files that options name are read once, when an engine is set up. No engine is started."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.v1.engine.input_processor import InputProcessor

from tests.support.engine import checkpoint
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval import filters, heads

pytestmark = pytest.mark.model

MODEL = "SmolLM2-135M-Instruct"
FILTERS, HEADS = (folder / f"{MODEL}.json" for folder in (filters.SHIPPED, heads.SHIPPED))
LAYERS = [1 + layer % 3 for layer in range(29)]
CASES = {
    "filters": ("omnikv", FILTERS, lambda path: {"filters": path}),
    "heads": ("razor", HEADS, lambda path: {"heads": path}),
    "a share of heads": ("razor", HEADS, lambda path: {"heads": {"file": path, "share": 0.5}}),
    "shares": ("kvretrieval", LAYERS, lambda path: {"budget_shares": path}),
    "of another method": (
        "freekv",
        LAYERS,
        lambda path: {"also": {"mine": {"budget_shares": path}, "razor": {}}},
    ),
    "heads of another": (
        "freekv",
        HEADS,
        lambda path: {"also": {"mine": {"preset": "razor", "heads": {"file": path}}}},
    ),
}


def engine_config(method, options):
    return EngineArgs(
        model=checkpoint(MODEL),
        dtype="float32",
        attention_backend=method,
        additional_config={"kv_retrieval": options, "another": 1},
    ).create_engine_config()


@pytest.mark.parametrize("end", [Path.unlink, lambda path: path.write_text("[]")])
@pytest.mark.parametrize(("method", "holds", "options_of"), CASES.values(), ids=CASES.keys())
def test_what_becomes_of_a_file_later_changes_nothing(tmp_path, method, holds, options_of, end):
    """This holds in processes that get the configuration, and in the front end at the first
    request."""
    file = tmp_path / "file.json"
    if isinstance(holds, Path):
        shutil.copy(holds, file)
    else:
        file.write_text(json.dumps(holds))
    options = options_of(str(file))
    written = json.dumps(options)
    config = engine_config(method, options)
    assert json.dumps(options) == written, "the caller's own"
    assert config.additional_config["another"] == 1
    json.dumps(config.additional_config)  # vLLM hashes it so
    before = facts(config)
    assert before == facts(engine_config(method, options))
    end(file)
    for received in (config, pickle.loads(pickle.dumps(config))):
        assert facts(received) == before
        prompt = tokens_input([1])
        processor = InputProcessor(received)
        processor.process_inputs("0", prompt, SamplingParams(max_tokens=1), ("generate",))


def facts(config):
    """The options of an engine, and what their files say about its model."""
    options = RetrievalConfig.from_vllm(config)
    assert options is not None
    model, layers = config.model_config, range(options.dense_layers, 30)
    counts = [m.fixed_counts(model, layers) for m in options.methods.values()]
    whole = [heads.tolist() for heads in counts if heads is not None]
    shares = [m.budget_shares.numbers for m in options.methods.values()]
    roles = options.roles(model, range(30))
    assert roles or whole or any(shares)
    return options, whole, shares, roles


BAD = {
    "absent": lambda path: None,
    "a directory": Path.mkdir,
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "no JSON": lambda path: path.write_text("{"),
    "half of it": lambda path: path.write_text(HEADS.read_text()[:999]),
    "too deep": lambda path: path.write_text("[" * 99_999 + "]" * 99_999),
    "too long a number": lambda path: path.write_text("9" * 5000),
    "something else": lambda path: path.write_text('"text"'),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("key", ["filters", "heads", "budget_shares"])
def test_bad_files_are_refused_at_the_start(tmp_path, monkeypatch, key, make):
    monkeypatch.chdir(tmp_path)  # messages cut long paths
    make(Path("bad.json"))
    method = {"filters": "omnikv", "heads": "razor"}.get(key, "kvretrieval")
    with pytest.raises(ValueError, match=rf"kv_retrieval\.{key}='bad.json' .*(cannot|is no|must)"):
        engine_config(method, {key: "bad.json"})


def test_a_path_that_no_system_has():
    with pytest.raises(ValueError, match=r"kv_retrieval\.also: mine: heads='.*' is not valid JSON"):
        engine_config("freekv", {"also": {"mine": {"preset": "razor", "heads": "\0"}}})
