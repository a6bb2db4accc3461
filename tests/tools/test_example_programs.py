"""The programs in ``examples``, as far as they can be tried without an engine."""

import importlib.util
import json
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import ClassVar

import batch
import compare
import demo
import openai
import pytest
import reading
from tokenizers import Tokenizer
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from tests.support.engine import checkpoint
from tests.support.local_http import listening

MODEL = "SmolLM2-135M-Instruct"


class Metrics(BaseHTTPRequestHandler):
    """A server that counts the tokens of a prompt, and has its metrics while it reads one."""

    metrics: ClassVar[str] = ""

    def do_GET(self):
        self.answer(self.metrics)

    def do_POST(self):
        self.answer(json.dumps({"count": 8000}) if self.path == "/tokenize" else "{}")

    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


METRICS = """\
vllm:num_requests_running{engine="0",model_name="m"} %d
vllm:num_requests_running_created{engine="0",model_name="m"} 1.7e+09
vllm:kv_cache_usage_perc{engine="0",model_name="m"} %s
vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="16384"} 1.0
"""


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (METRICS % (1, 0.25), "4,096 of 8,000 tokens"),
        (METRICS % (1, 0.5), "8,000 of 8,000 tokens"),
        (METRICS % (2, 0.25), "8,000 tokens"),
        (METRICS % (0, 0.0), "8,000 tokens"),
        ("", "8,000 tokens"),
        ("<html>", "8,000 tokens"),
    ],
)
def test_how_far_a_server_has_read(monkeypatch, metrics, said):
    """Told of its only request; of several the share of each is not known."""
    monkeypatch.setattr(Metrics, "metrics", metrics)
    with listening(Metrics) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        far = reading.Reading(client, model="m", messages=[{"role": "user", "content": "long"}])
        assert far() == said
    assert far() == "", "the server has gone"


def test_progress_of_a_reading(capsys):
    progress = reading.Progress("reading:")
    for seconds in (0.5, 1.0, 9.9, 10.2):
        progress(seconds, f"{seconds} of 12")
    progress.done("read")
    assert capsys.readouterr().out.splitlines() == [
        "reading: 0 s, 0.5 of 12",
        "reading: 10 s, 10.2 of 12",
        "read",
    ]


COLUMNS = {"slow": (30.0, 31.0, 33.0), "alike": (16.0, 18.0, 16.5), "faster": (14.0, 14.1, 14.2)}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("slow", "takes 1.82 times as long as kvretrieval, and the gain grows"),
        ("alike", "takes 0.97 times as long as kvretrieval: the times of the rounds overlap"),
        ("faster", "takes 0.83 times as long as kvretrieval: this text is too short"),
    ],
)
def test_the_demo_says_why_nothing_is_gained(other, said):
    ours = demo.Column("kvretrieval", "1,024", "13%", (16.0, 17.0, 17.5), 5.0)
    text = demo.report([ours, demo.Column(other, "all 8,000", "100%", COLUMNS[other])])
    *table, verdict = text.splitlines()
    assert f"{other} {said}" in verdict
    assert [line.split()[-2:] for line in table if "time per token" in line]


@pytest.mark.model
def test_the_document_of_the_demo_fits_its_model():
    """Nearly all of the context that both servers are started with."""
    tokenizer = Tokenizer.from_file(f"{checkpoint(MODEL)}/tokenizer.json")
    longest = int(demo.OPTIONS[demo.OPTIONS.index("--max-model-len") + 1])
    tokens = len(tokenizer.encode(demo.document()).ids)
    assert 0.75 * longest < tokens < longest - demo.MAX_TOKENS - 100
    assert demo.FACT in demo.document()


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


@pytest.mark.parametrize("line", ["3", '{"document": 5, "question": "b"}', '{"document": "a"}'])
def test_batch_names_the_line_that_asks_nothing(tmp_path, line):
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"document": "a", "question": "b"}}\n{line}')
    with pytest.raises(ValueError, match="line 2: has no texts as document and question"):
        batch.read_tasks(file)


def test_lines_of_batch_end_as_those_of_json(tmp_path):
    task = {"document": "a", "question": "b\u2028c\x85d"}
    (tmp_path / "in.jsonl").write_text(2 * (json.dumps(task, ensure_ascii=False) + "\r\n"))
    assert batch.read_tasks(tmp_path / "in.jsonl") == [task, task]


@pytest.mark.parametrize("error", [ValueError, VLLMValidationError])
def test_what_an_engine_refuses_is_said_by_batch(monkeypatch, tmp_path, capsys, error):
    """Also that answers cannot be written, before there is one."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "in.jsonl").write_text('{"document": "a.txt", "question": "?"}')
    monkeypatch.setattr(batch, "check_model", lambda model: None)

    def refuse(*args, **options):
        raise error("the prompt is too long")

    monkeypatch.setattr(batch, "LLM", refuse)
    for answers, said in (("out.jsonl", "the prompt is too long"), ("no/out.jsonl", "No such")):
        files = [str(tmp_path / name) for name in ("in.jsonl", answers)]
        monkeypatch.setattr("sys.argv", ["batch.py", "MODEL", *files])
        assert batch.main() == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("batch: ")
        assert said in line


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
