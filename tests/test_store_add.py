"""``vllm-kvretrieval store add``: what documents it reads, and that requests find them."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.texts import excerpt
from tests import workers
from tests.engine import DTYPE, Request, checkpoint, drive, engine, shortened
from vllm_kvretrieval.command import main
from vllm_kvretrieval.doctor.options import read_options
from vllm_kvretrieval.engine.cpu.advice import all_cores
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.store import add

SMOL = "SmolLM2-135M-Instruct"
BLOCK, MEMORY = 128, 64 << 20
OPTIONS = {
    "attention_backend": "kvretrieval",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 2,
    "kv_cache_memory_bytes": MEMORY,
}


def texts(folder, words):
    """Files with texts of so many words, none of which begins as another does."""
    whole = excerpt(20_000).split()
    paths = []
    for number, count in enumerate(words):
        paths.append(folder / f"{number}.txt")
        paths[-1].write_text(" ".join(whole[1000 * number :][:count]))
    return paths


@pytest.mark.engine
@pytest.mark.model
def test_documents_are_found_by_requests(tmp_path, monkeypatch, capsys):
    """Of all that is read a whole number of blocks; salts apart; names stay for `drop`."""
    model, directory = shortened(tmp_path / "model", SMOL, 3), str(tmp_path / "store")
    files = texts(tmp_path, (1100, 400, 20))
    monkeypatch.setattr(add, "PIECE", 700)
    for name, value in all_cores().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    given = ["store", "add", model, *map(str, files), "--store", directory]
    given += [part for name in ("emma", "other", "note") for part in ("--name", name)]
    options = ["--dtype", DTYPE, "--kv-retrieval.attention", "vllm", "--kv-retrieval.home", "disk"]
    options += ["--kv-retrieval.budget", "512", "--enforce-eager"]
    for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"):
        options += [f"--{name.replace('_', '-')}", str(OPTIONS[name])]
    options += ["--kv-cache-memory-bytes", str(MEMORY)]
    with workers.forked():
        assert main([*given, "--pin", "--", *options]) == 0
    said = capsys.readouterr().out
    assert "emma is in kv-" in said
    assert "note is shorter than a block" in said
    assert main(["store", "ls", directory]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[-2:] for row in rows[2:]] == [["yes", "other"], ["yes", "emma"]]

    tokenizer = AutoTokenizer.from_pretrained(model)
    documents = [tokenizer.encode(path.read_text()) for path in files]
    prompts = [[*document, 7, 8, 9] for document in documents]
    retrieval = {"home": "disk", "store": directory, "budget": 512}
    with engine(model, **OPTIONS, additional_config={"kv_retrieval": retrieval}) as llm:
        answers = drive(llm, [Request(prompt, 2, cache=True) for prompt in prompts])
    whole = [len(document) // BLOCK * BLOCK for document in documents]
    assert [answer.cached for answer in answers] == whole
    assert whole[0] > 700 > whole[2] == 0
    assert main(["store", "drop", directory, "emma"]) == 0
    capsys.readouterr()
    main(["store", "ls", directory])
    assert "emma" not in (said := capsys.readouterr().out)
    assert "other" in said


@pytest.mark.model
@pytest.mark.parametrize("home", [None, "device", "disk"])
def test_the_home_is_that_of_a_server(tmp_path, monkeypatch, home):
    """A store is of one home."""
    options = ["--attention-backend", "kvretrieval", "--max-model-len", "2048"]
    options += ["--kv-retrieval.home", home] if home else []
    made = list[Any]()
    monkeypatch.setattr("vllm.LLM.from_engine_args", made.append)
    for name, value in all_cores().items():
        monkeypatch.setenv(name, value)
    model, store = checkpoint(SMOL), str(tmp_path / "store")
    add._engine(Namespace(model=model, engine=options, store=store))
    served = read_options([model, *options, "--kv-retrieval.store", store])
    configs = map(RetrievalConfig.from_vllm, (made[0].create_engine_config(), served))
    assert [config and config.home for config in configs] == [home or "device"] * 2


def llm_of(most: int) -> Any:
    """As much of an engine as tells the tokens of a document."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(SMOL))
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=most))
    return SimpleNamespace(get_tokenizer=lambda: tokenizer, llm_engine=config)


@pytest.mark.model
def test_documents_that_begin_a_chat():
    """Their tokens are the first ones of a message that goes on with any question."""
    llm, text = llm_of(100), "Emma Woodhouse, handsome, clever, and rich"
    (tokens,) = add._documents(llm, [text], ["emma"], chat=True).values()
    tokenizer = llm.get_tokenizer()
    for question in ("\n\nWho is she?", " 1816.", "\nIs she rich?"):
        message = [{"role": "user", "content": text + question}]
        written = tokenizer.apply_chat_template(message, tokenize=False)
        asked = tokenizer.encode(written, add_special_tokens=False)
        assert asked[: len(tokens)] == tokens
    assert tokenizer.decode(tokens).endswith(text)


@pytest.mark.model
def test_documents_that_are_too_long():
    with pytest.raises(RetrievalConfigError, match=r"emma has \d+ tokens, and a request 10 at"):
        add._documents(llm_of(10), ["so much to read " * 10], ["emma"], chat=False)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("a",), "2 documents need as many names"),
        (("a", "a"), "each another one"),
        (("a", "../b"), "cannot be a context's name"),
        (("a", "--pin"), "cannot be a context's name"),
    ],
)
def test_names_that_are_refused(tmp_path, capsys, names, why):
    """Before anything is read."""
    given = ["store", "add", "none", *map(str, texts(tmp_path, (9, 9))), "--store", str(tmp_path)]
    assert main(given + [f"--name={name}" for name in names]) == 1
    assert why in capsys.readouterr().err


def test_options_of_an_engine_are_for_add_alone(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["store", "ls", str(tmp_path), "--", "--dtype", "float32"])
    assert "for `store add` alone" in capsys.readouterr().err
