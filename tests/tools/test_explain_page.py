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
