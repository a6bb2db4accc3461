"""The page of ``vllm-kvretrieval explain``: what is in it, and that a browser runs it."""

import html
import json
import re
import shutil
import subprocess

import pytest

from tests.tools.test_explain import (  # noqa: F401
    BUDGET,
    KV_HEADS,
    LAYERS,
    TOKENS,
    _explained,
    model,
)
from vllm_kvretrieval.command import main
from vllm_kvretrieval.doctor.server import Client
from vllm_kvretrieval.explain.live import explain_request
from vllm_kvretrieval.explain.page import PASSAGES, STEPS, Passages, Row, Step, write_page

HOSTILE = "</script><script>document.title='no'</script><b>&amp;"


def data_of(page):
    """What a page has to show."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


@pytest.mark.parametrize("method", ["kvretrieval", "entropykv"])
def test_every_head_and_step_is_there(model, method):  # noqa: F811
    file = model.folder / f"{method}.html"
    options = f"--method={method}", f"--html={file}", f"--budget={BUDGET}", "--layer=2", "--head=1"
    result = _explained(model.folder, model.text, *options)
    page = file.read_text()
    assert not re.search(r"(?:src|href)=|https?:|url\(|@import", page), "it loads nothing"
    data = data_of(page)
    assert len(data["rows"]) == LAYERS * KV_HEADS
    steps = 1 if method == "entropykv" else STEPS
    assert {len(row["steps"]) for row in data["rows"]} == {len(data["steps"])} == {steps}
    assert (len(data["texts"]), data["tokens"]) == (PASSAGES, TOKENS)
    assert "".join(data["texts"]).split() != []
    assert data["rows"][data["first"]]["name"] == "layer 2, KV head 1"
    for row, layer in zip(data["shares"], result["layers"], strict=True):
        assert row == {"layer": layer["layer"], "heads": layer["attention"]}
    for number, row in enumerate(data["rows"]):
        last = row["steps"][-1]
        layer, head = divmod(number, KV_HEADS)
        assert last["share"] == pytest.approx(result["layers"][layer]["attention"][head], abs=1e-4)
        assert sum(last["kept"]) == result["layers"][layer]["attended"][head]
        for step in row["steps"]:
            assert sum(step["weights"]) == pytest.approx(1, abs=0.01)
    if method == "kvretrieval":
        selected = [row["steps"][0]["kept"] for row in data["rows"]]
        assert selected != [row["steps"][-1]["kept"] for row in data["rows"]]


def test_text_stays_text(tmp_path):
    """In a browser, too: the script of the page runs, and that of the text does not."""
    file = tmp_path / "new" / "page.html"
    texts = [HOSTILE, "the second\u2028passage"]
    row = Row(HOSTILE, [Step([0.25, 0.75], [1, 3], 0.9), Step([0.5, 0.5])])
    shown = Passages([0, 4], 7, texts)
    write_page(file, HOSTILE, HOSTILE, shown, [row], [HOSTILE, "last"], "selected")
    page = file.read_text()
    assert page.count("<script") == 2
    assert f"<title>{html.escape(HOSTILE)}</title>" in page
    assert data_of(page)["texts"] == texts
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("there is no chromium here")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"file://{file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (title,) = re.findall("<title>(.*?)</title>", done.stdout)
    assert html.unescape(title) == HOSTILE
    shown_text = done.stdout[done.stdout.index('id="text"') :]
    assert html.escape(HOSTILE, quote=False) in shown_text.replace("&amp;amp;", "&amp;amp;")
    assert "tokens 4 to 6: 50.0 %" in done.stdout


def test_passages_are_those_between_borders():
    passages = Passages.of([0, 2, 5], lambda begin, end: f"{begin}-{end}")
    assert passages == Passages([0, 2], 5, ["0-2", "2-5"])


class Told(Client):
    """Answers as a server with sources does, by path; a word is a token, a page has four."""

    def __init__(self, **changed):
        super().__init__("http://server")
        self.asked = []
        self.changed = changed

    def ask(self, path, body=None, timeout=0):
        self.asked.append((path, body))
        name = path.split("/")[-1]
        if name in self.changed:
            return self.changed[name]
        words = [f"w{n}" for n in range(10)]
        found = {
            "options": {"budget": 512},
            "tokenize": {"tokens": list(range(10))},
            "completions": {"id": "cmpl-1", "choices": [{"text": HOSTILE}]},
            "cmpl-1-0": {
                "page_size": 4,
                "tokens": 12,
                "steps": 3,
                "groups": [[1, 2], [3, 5]],
                "weights": [[0.5, 0, 0.25], [0.1]],
                "peaks": [[0.5, 0.1, 0.75], [0.4]],
            },
            "detokenize": {"prompt": " ".join(words[n] for n in (body or {}).get("tokens", ()))},
        }[name]
        return 200, json.dumps(found)


def test_an_answer_of_a_server(tmp_path):
    server, file = Told(), tmp_path / "page.html"
    assert explain_request(server, "M", "t.txt", "text", 8, file) == HOSTILE
    (completion,) = (body for path, body in server.asked if path.endswith("completions"))
    assert completion["vllm_xargs"] == {"kv_retrieval_sources": True}
    assert (completion["max_tokens"], completion["prompt"]) == (8, list(range(10)))
    data = data_of(file.read_text())
    assert data["texts"] == ["w0 w1 w2 w3", "w4 w5 w6 w7", "w8 w9"]
    assert [row["name"] for row in data["rows"]] == ["layers 1 to 2", "layers 3 to 5"]
    assert [row["steps"][0]["weights"] for row in data["rows"]] == [[0.5, 0, 0.25], [0.1, 0, 0]]
    assert data["rows"][0]["steps"][1]["weights"] == [0.5, 0.1, 0.75]
    assert data["facts"] == f"The answer: {HOSTILE}"
    assert data["steps"] == ["the mean of 3 steps", "the highest step of each page"]


NOTHING = json.dumps(
    {"page_size": 4, "steps": 0, "tokens": 9, "groups": [], "weights": [], "peaks": []}
)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"options": (404, "no")},
            "does not tell what answers attend to; one that is started with",
        ),
        ({"options": (401, "no")}, "wants an API key; name it with --api-key"),
        ({"completions": (400, "too long")}, "/v1/completions answers 400: too long"),
        ({"tokenize": (200, "[")}, "/tokenize answers 200"),
        ({"cmpl-1-0": (404, "it is too long ago")}, "it is too long ago"),
        ({"cmpl-1-0": (200, NOTHING)}, "the server has noted nothing"),
    ],
)
def test_servers_that_do_not_tell(tmp_path, changed, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        explain_request(Told(**changed), "M", "t.txt", "text", 8, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_options_of_a_request(model, capfd, tmp_path):  # noqa: F811
    command = ["explain", "M", str(model.text), "--url=http://127.0.0.1:1"]
    assert main(command) == 1
    assert "name its file by --html" in capfd.readouterr().err
    assert main([*command, f"--html={tmp_path / 'page.html'}"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capfd.readouterr().err


def test_a_page_that_cannot_be_written(model, capfd, monkeypatch):  # noqa: F811
    """The server is not blamed."""
    server = Told()
    monkeypatch.setattr("vllm_kvretrieval.doctor.server.Client", lambda *_: server)
    page = "--html=/dev/null/page.html"
    assert main(["explain", "M", str(model.text), "--url=http://127.0.0.1:1", page]) == 1
    said = capfd.readouterr().err
    assert "/dev/null" in said
    assert "no server" not in said
