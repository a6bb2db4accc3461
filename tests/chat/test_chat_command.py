"""``vllm-kvretrieval chat`` as far as it can be tried without an engine."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

import openai
import pytest

from tests.support.documents import write_pdf
from tests.support.local_http import listening, name_dead_proxy
from vllm_kvretrieval.chat import command, conversation
from vllm_kvretrieval.chat.command import Loop, described, own_log
from vllm_kvretrieval.chat.conversation import Passage, prominence, stretches
from vllm_kvretrieval.chat.documents import Document
from vllm_kvretrieval.chat.server import Server
from vllm_kvretrieval.command import main
from vllm_kvretrieval.command_inputs import printable
from vllm_kvretrieval.errors import RetrievalConfigError


class Models(BaseHTTPRequestHandler):
    """A server that says which models it has, counts tokens, and notes keys."""

    keys: ClassVar[list[str | None]] = []
    longest: ClassVar[int] = 4096

    def do_GET(self):
        self.keys.append(self.headers["Authorization"])
        model = {"id": "m", "object": "model", "created": 0, "owned_by": "me"}
        known = self.path == "/v1/models"
        self.answer(200 if known else 404, {"object": "list", "data": [model]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/v1/kv_retrieval"):
            self.answer(404, {"detail": "Not Found"})
            return
        last = asked["messages"][-1]["content"][-1] if "messages" in asked else ""
        tokens = [*range(5000), ord(last or "a")]
        self.answer(200, {"count": 5001, "tokens": tokens, "max_model_len": self.longest})

    def answer(self, status, told):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def said(tmp_path, capsys):
    """What the command says about a document, and its exit status."""

    def run(*options, name="text.txt", content="text"):
        path = tmp_path / name
        if not path.exists():
            path.write_text(content)
        status = main(["chat", str(path), *options])
        return status, capsys.readouterr().err

    return run


def test_no_proxy_is_asked_for_this_machine(monkeypatch):
    """The proxy is dead, so an answer has come without it."""
    name_dead_proxy(monkeypatch)
    with listening(Models) as port:
        for host in ("127.0.0.1", "localhost"):
            client = conversation.connect(f"http://{host}:{port}/v1", "none")
            assert client.models.list().data[0].id == "m"
    elsewhere = conversation.connect("http://example.invalid/v1", "none")
    with pytest.raises(openai.APIConnectionError) as error:
        elsewhere.models.list()
    assert "Connection refused" in str(error.value.__cause__), "others are asked by the proxy"


@pytest.mark.parametrize("given", [[], ["--api-key", "other"]])
@pytest.mark.parametrize("named", [None, "", "secret"])
def test_the_key_of_a_server(monkeypatch, said, given, named):
    """As ``doctor`` takes it, and ``vllm serve``."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if named is not None:
        monkeypatch.setenv("VLLM_API_KEY", named)
    Models.keys.clear()
    with listening(Models) as port:
        said("--url", f"http://127.0.0.1:{port}", *given)
    assert {*Models.keys} == {f"Bearer {'other' if given else named or 'none'}"}


def test_a_server_that_reads_less(said):
    with listening(Models) as port:
        status, error = said("--url", f"http://127.0.0.1:{port}/v1")
    assert status == 1
    assert "the documents have 5,000 tokens, and the server reads 4,096, less 200 for" in error
    assert "start the server with a larger --max-model-len" in error


def test_commands_that_are_wrong(said, monkeypatch):
    """Each is told what is wrong with it; nothing of it goes to the answers."""
    monkeypatch.setattr(Models, "longest", 8192)
    asked = "/budget a", "/budget 0", "/full", "/none such", "/sources", "/quit", "not asked"
    with listening(Models) as port:
        url = f"http://127.0.0.1:{port}"
        status, error = said("--url", url, *(f"--question={line}" for line in asked))
    assert status == 0
    number = "is not a whole number from 1 to 2147483647."
    assert [
        line for line in error.splitlines() if line.startswith(("/budget w", "/full w", "There"))
    ] == [
        f"/budget wants a number of tokens: 'a' {number}",
        f"/budget wants a number of tokens: '0' {number}",
        "/full wants a question behind it.",
        "There is no /none.",
        "There is no answer yet.",
    ]


@pytest.mark.parametrize("url", ["127.0.0.1:9", "http://a:b", "ftp://a"])
def test_no_address(said, url):
    status, error = said("--url", url)
    assert status == 1
    assert f"{url!r} is no address of a server, such as http://127.0.0.1:8000" in error


def test_a_server_without_a_page(said):
    with listening(Models) as port:
        status, error = said("--url", f"http://127.0.0.1:{port}", "--page")
    assert status == 1
    assert "VLLM_PLUGINS=kvretrieval in its environment and --kv-retrieval.sources true" in error


def test_no_server(said):
    status, error = said("--url", "http://127.0.0.1:9")
    assert status == 1
    assert "no server answers at http://127.0.0.1:9/v1; wait until it is ready, name" in error
    assert "leave --url out: then one is started" in error


@pytest.mark.parametrize("options", [["--model", "m"], ["--no-keep"], ["--", "--dtype", "float32"]])
def test_options_of_a_server_that_runs(said, options):
    status, error = said("--url", "http://127.0.0.1:9", *options)
    assert status == 1
    assert "leave --model, --no-keep and what follows -- out, or --url" in error


def test_files_are_read_before_anything_starts(said, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_server", None)
    for name, content, expected in (
        ("a.txt", "", "a.txt is empty"),
        ("b.txt", "a\0b", "b.txt is binary data"),
    ):
        status, error = said(name=name, content=content)
        assert (status, expected in error) == (1, True)
    write_pdf(tmp_path / "c.pdf", ["", ""])
    assert "2 pages and no text: it is scanned" in said(name="c.pdf")[1]
    assert main(["chat", str(tmp_path / "none.txt")]) == 1


def test_pages_without_text_are_counted(said, tmp_path):
    write_pdf(tmp_path / "a.pdf", ["Some text.", "", ""])
    assert (
        "a.pdf: 2 of 3 pages have no text" in said("--url", "http://127.0.0.1:9", name="a.pdf")[1]
    )


def test_no_model_is_named(said, tmp_path, monkeypatch):
    """There is a default in a checkout, where the demo has its model."""
    monkeypatch.chdir(tmp_path)
    status, error = said()
    assert status == 1
    assert "name a model, by a directory or by its name on the Hugging Face Hub: --model" in error
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, error = said("--model", "none/such")
    assert status == 1
    assert "there is no directory none/such, and the Hugging Face Hub does not have it" in error


def test_a_directory_where_nothing_can_be_kept(said, monkeypatch):
    status, error = said("--directory", "/dev/null/chat")
    assert status == 1
    assert "no file can be made in /dev/null/chat (Not a directory); name another" in error
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 3)
    status, error = said()
    assert status == 1
    assert "this user has no home; name a directory: --directory" in error


def test_chats_at_once(tmp_path):
    """A store, and a log, belong to one of them."""
    store, other = tmp_path / "device-16384", tmp_path / "model"
    with own_log(store, other) as log:
        assert log == tmp_path / "device-16384.log"
        with (
            pytest.raises(RetrievalConfigError, match=f"another chat keeps .* in {store}, which"),
            own_log(store, other),
        ):
            pass
        with own_log(None, other) as first, own_log(None, other) as second:
            assert (first, second) == (tmp_path / "model.log", tmp_path / "model-2.log")
    with own_log(store, other) as again:
        assert again == log


def test_a_server_is_ended_at_once(tmp_path, monkeypatch):
    """Ctrl-C while it ends does not leave it behind."""
    server = Server("m", [], {}, tmp_path / "log")
    slow = "import signal, time; signal.signal(2, signal.SIG_IGN)"
    slow += "; print(1, flush=True); time.sleep(99)"
    monkeypatch.setattr(server, "_command", [sys.executable, "-S", "-c", slow])
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        server.__enter__()
        while not server.log.read_text():
            time.sleep(0.01)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            server.__exit__()
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_a_terminal_is_not_commanded(said, tmp_path):
    """By an answer, a passage, or the name of a file."""
    assert "\x1b" not in said(name="\x1b[31m.txt", content="")[1]
    assert printable("a\x1b[2J\rb\x07\x9b\n\tä") == "a\ufffd[2J\ufffdb\ufffd\ufffd\n\tä"


def test_a_passage_names_its_page():
    document = Document("a.pdf", "0123456789" * 10, (0, 40, 80))
    assert described(Passage(document, 45, "5  6\n7", 0.25)) == "a.pdf, page 2, 25.0%: 5 6 7"
    plain = Document("a.txt", "0123456789" * 10)
    assert described(Passage(plain, 45, "5", 0.25)) == "a.txt, 45% of the text, 25.0%: 5"


def test_what_is_prominent():
    """Attended to at some step, not at each; of a single step the attention itself counts."""
    told = {
        "groups": [[1, 2], [3, 4]],
        "steps": 4,
        "weights": [[0.75, 0.25, 0], [0.75, 0, 0]],
        "peaks": [[0.75, 0.75, 0], [0.75, 0, 0]],
    }
    assert prominence(told) == [0, 0.25, 0]
    assert prominence({**told, "steps": 1}) == [0.75, 0.375, 0]


def test_passages_of_neighbours():
    """The first page is everybody's."""
    assert stretches([9, 0.1, 0.5, 0.4, 0, 0.3, 0.2], 3) == [(2, 4), (5, 6)]
    assert stretches([9], 3) == []


def test_ctrl_c_at_the_prompt_does_not_end_the_chat(monkeypatch, capsys):
    """It may be meant for an answer that has just ended."""
    typed: Iterator[str | BaseException] = iter([KeyboardInterrupt(), "/help", EOFError()])

    def read(prompt=""):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    nobody: Any = None
    assert [*Loop(nobody).typed()] == ["/help"]
    assert "/quit or Ctrl-D ends the chat." in capsys.readouterr().err
