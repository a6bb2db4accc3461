"""``vllm-kvretrieval store add``: what documents it reads, and that requests find them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import renderer_from_config
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer

from benchmarks.texts import excerpt
from tests.support import workers
from tests.support.engine import DTYPE, Request, checkpoint, drive, engine, shortened
from vllm_kvretrieval.command import main
from vllm_kvretrieval.command_line import serve_arguments
from vllm_kvretrieval.doctor.options import read_options
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.store import add
from vllm_kvretrieval.store.add import ServedChat
from vllm_kvretrieval.upstream.defaults import all_cores

SMOL = "SmolLM2-135M-Instruct"
BLOCK, MEMORY = 128, 256 << 20
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
        text = " ".join(whole[1000 * number :][:count])
        paths[-1].write_bytes(text.replace(". ", ".\r\n" if number == 1 else "\n").encode())
    return paths


@pytest.mark.engine
@pytest.mark.model
@pytest.mark.parametrize("home", ["disk", pytest.param("device", marks=pytest.mark.slow)])
def test_documents_are_found_by_requests(tmp_path, monkeypatch, capsys, home):
    """Of all that is read a whole number of blocks; salts apart; names stay for `drop`.

    In memory, of a model with windows.
    """
    directory = str(tmp_path / "store")
    model = checkpoint("gemma-3-270m")
    if home == "disk":
        model = shortened(tmp_path / "model", SMOL, 3)
    files = texts(tmp_path, (1100, 400, 20))
    monkeypatch.setattr(add, "PIECE", 700)
    for name, value in all_cores().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    given = ["store", "add", model, *map(str, files), "--store", directory]
    given += [part for name in ("emma", "other", "note") for part in ("--name", name)]
    options = ["--dtype", DTYPE, "--kv-retrieval.attention", "vllm", "--kv-retrieval.home", home]
    options += ["--kv-retrieval.budget", "512", "--enforce-eager"]
    for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"):
        options += [f"--{name.replace('_', '-')}", str(OPTIONS[name])]
    options += ["--kv-cache-memory-bytes", str(MEMORY)]
    with workers.forked():
        assert main([*given, "--pin", "--", *options]) == 0
    said = capsys.readouterr().out
    assert "emma is in kv-" in said
    assert "note is shorter than a block" in said
    assert "other has carriage returns (CR)" in said
    assert said.count("CR") == 1
    assert main(["store", "ls", directory]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[-2:] for row in rows[2:]] == [["yes", "other"], ["yes", "emma"]]

    tokenizer = AutoTokenizer.from_pretrained(model)
    documents = [tokenizer.encode(path.read_bytes().decode()) for path in files]
    prompts = [[*document, 7, 8, 9] for document in documents]
    retrieval = {"home": home, "store": directory, "budget": 512}
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
    arguments = [model, *options, "--kv-retrieval.store", store, "--port", "8123"]
    add._engine(serve_arguments(arguments))
    served = read_options(arguments)
    configs = map(RetrievalConfig.from_vllm, (made[0].create_engine_config(), served))
    assert [config and config.home for config in configs] == [home or "device"] * 2


def llm_of(most: int) -> Any:
    """As much of an engine as tells the tokens of a document."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(SMOL))
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=most))
    return SimpleNamespace(get_tokenizer=lambda: tokenizer, llm_engine=config)


TEMPLATE = "{{ greeting }}: {% for m in messages %}{{ m['content'] }}{% endfor %}!"


@pytest.mark.model
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_documents_that_begin_a_chat(template):
    """Their tokens are the first ones of a message that goes on with any question.

    The server writes it, by its own template where it has one.
    """
    text, most = "Emma Woodhouse,\r\nhandsome, clever, and rich", ["--max-model-len", "100"]
    own = ["--chat-template", template] if template else []
    own += ["--default-chat-template-kwargs", '{"greeting": "Read this"}']
    served = serve_arguments([checkpoint(SMOL), *most, *own, "--api-key", "secret"])
    config = EngineArgs.from_cli_args(served).create_engine_config()
    llm, renderer = llm_of(100), renderer_from_config(config)
    llm.renderer, llm.model_config = renderer, config.model_config
    (tokens,) = add._documents(llm, [text], ["emma"], ServedChat(served)).values()
    online = OnlineRenderer(
        config.model_config,
        renderer,
        request_logger=None,
        chat_template=load_chat_template(served.chat_template),
        chat_template_content_format=served.chat_template_content_format,
        default_chat_template_kwargs=served.default_chat_template_kwargs,
    )
    for question in ("\n\nWho is she?", " 1816.", "\nIs she rich?"):
        chat = ChatCompletionRequest(messages=[{"role": "user", "content": text + question}])
        _, (asked,) = asyncio.run(online.render_chat(chat))
        assert asked["prompt_token_ids"][: len(tokens)] == tokens
    written = llm.get_tokenizer().decode(tokens)
    assert written.endswith(text)
    assert written.startswith("Read this: Emma" if template else "<|im_start|>system")


def test_chats_that_begin_with_the_date():
    """Nothing would be found tomorrow."""
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type="gpt_oss"))
    with pytest.raises(RetrievalConfigError, match="date at the start of every chat of gpt-oss"):
        ServedChat(serve_arguments([])).tokens(None, model, "Emma")


def test_a_template_that_is_none(tmp_path, capsys):
    """It is said before the engine starts."""
    given = ["store", "add", "none", *map(str, texts(tmp_path, (9,))), "--store", str(tmp_path)]
    assert main([*given, "--chat", "--", "--chat-template", str(tmp_path / "none.jinja")]) == 1
    assert "chat template" in capsys.readouterr().err


@pytest.mark.model
def test_documents_that_are_too_long():
    with pytest.raises(RetrievalConfigError, match=r"emma has \d+ tokens, and a request 10 at"):
        add._documents(llm_of(10), ["so much to read " * 10], ["emma"])


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
    assert "for `chat`, `certify` and `store add` alone" in capsys.readouterr().err
