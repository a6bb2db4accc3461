"""The programs in ``examples``, as far as they can be tried without an engine."""

import importlib.util
import json
from http.server import BaseHTTPRequestHandler
from io import StringIO
from types import SimpleNamespace
from typing import ClassVar

import batch
import chat
import compare
import openai
import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.engine import checkpoint
from tests.local_http import listening, name_dead_proxy

MODEL = "SmolLM2-135M-Instruct"


class Models(BaseHTTPRequestHandler):
    """A server that says which models it has, and notes the keys that it is given."""

    keys: ClassVar[list[str | None]] = []

    def do_GET(self):
        self.keys.append(self.headers["Authorization"])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        model = {"id": "m", "object": "model", "created": 0, "owned_by": "me"}
        self.wfile.write(json.dumps({"object": "list", "data": [model]}).encode())

    def log_message(self, *args):
        pass


def test_chat_asks_no_proxy_for_this_machine(monkeypatch):
    """The proxy is dead, so an answer has come without it."""
    name_dead_proxy(monkeypatch)
    with listening(Models) as port:
        for host in ("127.0.0.1", "localhost"):
            client = chat.connect(f"http://{host}:{port}/v1", "none")
            assert client.models.list().data[0].id == "m"
    elsewhere = chat.connect("http://example.invalid/v1", "none").with_options(max_retries=0)
    with pytest.raises(openai.APIConnectionError) as error:
        elsewhere.models.list()
    assert "Connection refused" in str(error.value.__cause__), "others are asked by the proxy"


@pytest.mark.parametrize("given", [[], ["--api-key", "other"]])
@pytest.mark.parametrize("named", [None, "", "secret"])
def test_the_key_of_a_chat(monkeypatch, tmp_path, given, named):
    """As ``doctor`` takes it, and ``vllm serve``."""
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if named is not None:
        monkeypatch.setenv("VLLM_API_KEY", named)
    monkeypatch.setattr("sys.stdin", StringIO("\n"))
    Models.keys.clear()
    with listening(Models) as port:
        url = f"http://127.0.0.1:{port}/v1"
        monkeypatch.setattr(
            "sys.argv", ["chat.py", str(tmp_path / "text.txt"), "--url", url, *given]
        )
        assert chat.main() == 0
    assert Models.keys == [f"Bearer {'other' if given else named or 'none'}"]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("none.txt", "No such file or directory: '{folder}/none.txt'"),
        ("bad.txt", "{folder}/bad.txt is not UTF-8 text"),
    ],
)
def test_batch_reads_documents_before_the_engine_starts(
    monkeypatch, tmp_path, capsys, document, said
):
    """They lie beside the questions."""
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    lines = [{"document": name, "question": "?"} for name in ("good.txt", document)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(batch, "LLM", None)
    files = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    monkeypatch.setattr("sys.argv", ["batch.py", "MODEL", *files])
    assert batch.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("batch: ")
    assert said.format(folder=tmp_path) in line


def test_batch_names_the_line_that_is_no_json(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"document": "a", "question": "b"}\n\n')
    with pytest.raises(ValueError, match=rf"{file}, line 2: is no JSON \(Expecting value"):
        batch.read_tasks(file)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs ``compare.py`` as far as an engine checks its options; gives status and message."""

    def opened(model, max_model_len, **options):
        config = EngineArgs(model, max_model_len=4096, **options).create_engine_config()
        tokenizer = SimpleNamespace(encode=str.split)
        engine = SimpleNamespace(vllm_config=config)
        return SimpleNamespace(llm_engine=engine, get_tokenizer=lambda: tokenizer)

    def run(*arguments, words=100):
        (tmp_path / "text.txt").write_text("word " * words)
        program = ["compare.py", checkpoint(MODEL), str(tmp_path / "text.txt"), *arguments]
        monkeypatch.setattr("sys.argv", program)
        try:
            status: object = compare.main()
        except SystemExit as end:
            status = end.code
        return status, capsys.readouterr().err.splitlines()[-1]

    monkeypatch.setattr(compare, "LLM", opened)
    return run


@pytest.mark.model
@pytest.mark.parametrize(
    ("methods", "budget", "said"),
    [
        ("infllm", 256, "budget=256 is too small: sink=128 + window=256 + one page of 128 need at"),
        ("ttkv", 512, "budget=512 is too small: sink=128 + window=512 + one page of 128 need at"),
        ("freekv ttkv", 160, "budget=160 is too small for ttkv: sink=32 + window=128 + one page"),
        ("quest", 100, "budget=100 must be a positive multiple of page_size=16"),
        ("freekv omnikv", 512, "Use --attention-backend omnikv"),
    ],
)
def test_compare_refuses_what_cannot_be_served(run, methods, budget, said):
    status, error = run("--budget", str(budget), "--methods", *methods.split())
    assert status == 1
    assert error.startswith("compare: ")
    assert said in error


@pytest.mark.model
def test_compare_refuses_a_text_within_the_budget(run):
    """The table would say that all methods are as good as full attention."""
    status, error = run("--budget", "256", words=256)
    assert status == 1
    assert "the text has 256 tokens and the budget is 256, so all methods would attend to" in error
    with pytest.raises(AttributeError, match="generate"):
        run("--budget", "256", words=257)


def test_compare_says_early_that_it_cannot_draw(run, monkeypatch):
    """Neither a model nor an engine is looked for before."""
    monkeypatch.setattr(compare, "LLM", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, error = run("--plot", "plot.png")
    assert status == 1
    assert "needs matplotlib, which the extra [plot] brings: pip install matplotlib" in error
    assert error.endswith("or leave --plot out")


@pytest.mark.model
def test_options_of_compare(run):
    status, error = run("--options", '{"sink": 512}', "--budget", "256", "--methods", "freekv")
    assert status == 1
    assert "kv_retrieval.budget=256 is too small: sink=512" in error
    named = {"also": {"fine": {"preset": "quest", "summary_size": 8}}, "budget": 32_768}
    options = ("--options", json.dumps(named), "--methods", "quest", "fine")
    status, error = run(*options)
    assert "the text has 100 tokens and the budget is 32768" in error, "options win"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("sink=1", "'sink=1' is no JSON (Expecting value: line 1 column 1"),
        ("[1]", "'[1]' is no JSON object such as"),
    ],
)
def test_options_that_are_no_json(run, options, said):
    status, error = run("--options", options)
    assert status == 2
    assert said in error


def test_one_token_has_no_time(run):
    status, error = run("--tokens", "1")
    assert status == 2
    assert "a time per token needs 2 tokens or more" in error
