"""The page in a browser, as far as it can be tried without an engine: what it says and shows."""

import json
import re
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.browser import Tab, tab
from vllm_kvretrieval.page.endpoints import HEADERS, STATIC

TEXT = "One word. " * 60
PAGE_SIZE, PAGES = 16, 7
KEY = {"Enter": 13, "Tab": 9}
CONTRAST = """(() => {
    const dot = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
    const draw = dot.getContext("2d", { willReadFrequently: true });
    const light = (...colors) => {
        for (const color of colors) {
            draw.fillStyle = color;
            draw.fillRect(0, 0, 1, 1);
        }
        const [r, g, b] = [...draw.getImageData(0, 0, 1, 1).data].map((byte) => {
            const part = byte / 255;
            return part > 0.04045 ? ((part + 0.055) / 1.055) ** 2.4 : part / 12.92;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const below = matchMedia("(prefers-color-scheme: dark)").matches ? "#121212" : "#fff";
    return (selector) => {
        const style = getComputedStyle(document.querySelector(selector));
        const [a, b] = [light(below, style.backgroundColor), light(style.color)];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    };
})()"""
"""A function: the contrast of an element's words with what is behind them, by WCAG 2."""


class Stub(BaseHTTPRequestHandler):
    """Answers as a server with the page does, of tokens of one word each.

    Attributes:
        longest: Tokens of its longest context.
        documents: Texts by ids.
        answering: Unset: answers break off after a word.
    """

    longest: ClassVar[int] = 1000
    documents: ClassVar[dict[str, dict[str, object]]] = {}
    answering: ClassVar[threading.Event] = threading.Event()

    def do_GET(self):
        path = self.path.removeprefix("/kvretrieval")
        if path in STATIC:
            name, kind = STATIC[path]
            content = files("vllm_kvretrieval.page").joinpath("static", name).read_bytes()
            self.reply(content, {**HEADERS, "Content-Type": kind})
        elif path.endswith("/options"):
            may = ["budget", "sources"]
            told = {"budget": 512, "most": 2048, "may": may, "exact": True, "stored": False}
            self.reply(told)
        elif path.endswith("/models"):
            self.reply({"data": [{"id": "a-model"}]})
        elif path.endswith("/documents"):
            rows = [{"id": id, "name": text["name"]} for id, text in self.documents.items()]
            self.reply(rows)
        elif "/documents/" in path:
            self.reply(self.documents[path.rpartition("/")[2]])
        elif "/sources/" in path:
            peaks = [[0.0] * PAGES, [0.0] * PAGES]
            peaks[0][2], peaks[1][2], peaks[1][5] = 0.5, 0.5, 0.25
            told = {"page_size": PAGE_SIZE, "steps": 2, "groups": [[1, 2], [3, 4]], "peaks": peaks}
            self.reply({**told, "weights": [[0.0] * PAGES] * 2})
        else:
            self.reply({"detail": "none"}, status=404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/kv_retrieval/documents":
            self.documents["a" * 32] = {"pages": [], **body}
            self.reply({"id": "a" * 32})
        elif self.path == "/tokenize":
            text = " ".join(message["content"] for message in body["messages"])
            words = re.findall(r"\s*\S+\s*?", text)
            tokens = [sum(map(ord, word)) % 1000 for word in words]
            self.reply({"count": len(words), "tokens": tokens, "max_model_len": self.longest})
        elif self.path == "/detokenize":
            self.reply({"prompt": "word. One word."})
        elif self.path == "/v1/completions":
            self.reply({"usage": {}})
        else:
            piece = {"id": "chat-1", "choices": [{"delta": {"content": "An answer."}}]}
            content = f"data: {json.dumps(piece)}\n\n".encode()
            end = b"" if self.answering.is_set() else b"more to come"
            length = {
                "Content-Length": str(len(content + end)),
                "Content-Type": "text/event-stream",
            }
            self.reply(content, length)

    def reply(self, told, headers=None, status=200):
        self.send_response(status)
        for name, value in (headers or {"Content-Type": "application/json"}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(told if isinstance(told, bytes) else json.dumps(told).encode())

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


@pytest.fixture
def page(browser, monkeypatch) -> Iterator[Tab]:
    """The page, and a document."""
    monkeypatch.setattr(Stub, "documents", {"d" * 32: {"name": "a.txt", "text": TEXT, "pages": []}})
    Stub.answering.set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/kvretrieval#%C3%28-key")
        browser.wait("typeof at == 'function' && at('documents').childElementCount == 1")
        yield browser
        browser.open("about:blank")
        server.shutdown()


def choose(page: Tab) -> None:
    page.run("document.querySelector('#documents button').click()")
    page.wait("state.document && !state.read && at('far').textContent != 'counting tokens'")


def ask(page: Tab, beside: bool = False) -> None:
    page.run(f"at('beside').checked = {json.dumps(beside)}")
    page.run("at('question').value = 'What?'; at('ask').requestSubmit()")
    page.wait("!state.answer && at('answers').childElementCount > 0")


def give(page: Tab, name: str, content: Iterable[int]) -> None:
    page.run(
        f"""(() => {{
            const files = new DataTransfer();
            files.items.add(new File([new Uint8Array({[*content]})], {json.dumps(name)}));
            at("file").files = files.files;
            at("file").dispatchEvent(new Event("change"));
        }})()"""
    )
    page.wait("!at('error').hidden || state.document")


def press(page: Tab, key: str) -> None:
    text = {"text": "\r"} if key == "Enter" else {}
    code = {"key": key, "code": key, "windowsVirtualKeyCode": KEY[key]}
    page.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
    page.call("Input.dispatchKeyEvent", type="keyUp", **code)


def test_a_document_that_is_too_long(page, monkeypatch):
    """Nothing looks as if it were still being read."""
    monkeypatch.setattr(Stub, "longest", 250)
    choose(page)
    assert "and the server reads 250, less 200 for an answer" in page.run("at('error').innerText")
    assert page.run("at('far').textContent") == "not read"
    assert page.run("at('bar').hasAttribute('value')")


def test_a_key_that_is_no_address(page):
    """What stands behind the # may be anything."""
    assert page.run("state.key") == "%C3%28-key"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([84, 0xEF], "a.bin is not text in UTF-8 or UTF-16. Save it as text in UTF-8; of a PDF"),
        ([84, 0], "a.bin is not text in UTF-8"),
        ([], "a.bin has no text"),
        ([0xFF, 0xFE, 84, 0], ""),
        ([0xFE, 0xFF, 0, 84], ""),
    ],
)
def test_files(page, content, said):
    give(page, "a.bin", content)
    assert page.run("at('error').textContent").startswith(said)
    assert page.run("state.document?.text ?? ''") == ("" if said else "T")
    assert page.run("at('file').files.length") == 0, "the same file can be named again"


def test_words_of_html_stay_apart(page):
    """A page need not have a line for each paragraph."""
    html = "<p>One.</p><p>Two<b>fold</b><br>three<ul><li>a</li><li>b</li></ul>"
    give(page, "a.html", html.encode())
    assert page.run("state.document.text") == "One.\nTwofold\nthree\na\nb"


def test_a_server_that_goes_away(page):
    """It says so in words; what is open stays, and can be asked about again."""
    choose(page)
    Stub.answering.clear()
    page.run("window.fetched = fetch; fetch = () => Promise.reject(new TypeError('gone'))")
    ask(page)
    assert page.run("at('error').textContent") == "The server does not answer (gone)."
    page.run("fetch = fetched")
    ask(page)
    assert "The server does not answer (" in page.run("at('error').textContent")
    Stub.answering.set()
    ask(page)
    assert page.run("at('error').hidden")
    assert page.run("document.querySelector('.answer .text').textContent") == "An answer."
    assert page.run("state.turns.length") == 1


def test_another_document_meanwhile(page):
    """An answer about the one before does not come between."""
    choose(page)
    page.run("at('question').value = 'What?'; at('ask').requestSubmit()")
    page.run("document.querySelector('#documents button').click()")
    page.wait("!state.answer && !state.read && at('far').textContent.includes(' tokens read')")
    assert page.run("[state.turns.length, at('send').disabled]") == [0, False]


def test_by_keyboard_alone(page):
    focused = "(document.activeElement.id || document.activeElement.textContent)"
    page.run("document.querySelector('#documents button').focus()")
    press(page, "Enter")
    page.wait("state.document && !state.read && at('far').textContent.includes(' tokens read')")
    page.run("at('question').focus(); at('question').value = 'What?'")
    met = list[str]()
    while "send" not in met:
        assert len(met) < 5, met
        press(page, "Tab")
        met.append(page.run(focused))
    assert met == ["budget", "beside", "send"]
    press(page, "Enter")
    page.wait("state.turns.length")
    page.run("at('send').focus()")
    press(page, "Tab")
    assert "word. One word." in page.run(focused), "a passage"
    press(page, "Enter")
    assert page.run("document.querySelectorAll('mark.here').length") == 1


@pytest.mark.parametrize("width", [360, 800, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(page, tmp_path, width, scheme):
    """Nothing is wider than the window; words stand out, on what highlights them, too."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    page.call("Emulation.setDeviceMetricsOverride", **size)
    page.call(
        "Emulation.setEmulatedMedia",
        features=[{"name": "prefers-color-scheme", "value": scheme}],
    )
    choose(page)
    page.run("at('question').scrollIntoView()")
    ask(page, beside=True)
    assert 0 <= page.run("at('question').getBoundingClientRect().top") < 800, "it stays there"
    page.picture(Path(tmp_path / f"{width}-{scheme}.png"))
    assert page.run("document.documentElement.scrollWidth") <= width
    assert (
        page.run("Math.min(...[...document.querySelectorAll('.answer')].map((a) => a.offsetWidth))")
        > 150
    )
    for selector in ("mark.w5", ".answer li button"):
        assert page.run(f"({CONTRAST})('{selector}')") > 4.5, selector
