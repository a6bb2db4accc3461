"""The programs in ``examples`` and the notebook, over one engine; see also ``test_serving``."""

import json
import math
from typing import Any

import batch
import compare
import pytest

from benchmarks.common import ROOT
from tests.support.engine import checkpoint, engine
from tests.support.server import KEY, PROMPT

pytestmark = [pytest.mark.engine, pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
METHODS = ["kvretrieval", "freekv", "quest", "streamingllm"]
BUDGET = 256


@pytest.fixture(scope="module")
def llm():
    with engine(
        checkpoint(MODEL),
        attention_backend="kvretrieval",
        additional_config={"kv_retrieval": {"budget": BUDGET, "also": ["freekv", "quest"]}},
        max_model_len=4096,
        enforce_eager=True,
    ) as llm:
        yield llm


@pytest.fixture
def as_example(monkeypatch, llm):
    """The engine in place of one that an example would start."""
    asked = dict[str, Any]()

    def opened(model, methods, budget, **options):
        asked.update(model=model, methods=methods, budget=budget)
        return llm

    monkeypatch.setattr(compare, "open_engine", opened)
    return asked


def test_the_engine_of_a_comparison(monkeypatch):
    asked = dict[str, Any]()
    monkeypatch.setattr(compare, "LLM", lambda model, **options: asked.update(options))
    compare.open_engine("model", METHODS, BUDGET)
    assert asked["attention_backend"] == METHODS[0]
    options = {"budget": BUDGET, "also": ["freekv", "quest"]}
    assert asked["additional_config"] == {"kv_retrieval": options}


def test_compare(as_example, monkeypatch, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(PROMPT)
    arguments = ["--budget", str(BUDGET), "--tokens", "8", "--plot", str(tmp_path / "plot.png")]
    program = ["compare.py", "MODEL", str(tmp_path / "text.txt"), *arguments]
    monkeypatch.setattr("sys.argv", program)
    assert compare.main() == 0
    assert as_example["methods"] == tuple(METHODS)
    _, full, *rows = capsys.readouterr().out.splitlines()
    assert full.split()[2:4] == ["8", "0.0000"]
    found = {row.split()[0]: row.split()[1:] for row in rows}
    assert list(found) == METHODS
    assert int(found["kvretrieval"][0]) >= 5, "it finds the key"
    assert int(found["streamingllm"][0]) < 8, "it does not"
    assert all(float(ms) > 0 for *_, ms in found.values())
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_notebook(as_example, tmp_path, monkeypatch, capsys):
    """Its cells, one after the other; of a shorter text, continued by fewer tokens."""
    whole, asked = compare.compare, list[int]()

    def continued(llm, text, methods, tokens):
        asked.append(tokens)
        return whole(llm, text, methods, tokens=8)

    monkeypatch.setattr(compare, "compare", continued)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    text = (ROOT / "docs" / "architecture.md").read_text()[:4000]
    (tmp_path / "docs" / "architecture.md").write_text(text)
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    cells = json.loads((ROOT / "examples" / "compare.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(codes, 1):
        assert cell["execution_count"] == number, "run make notebook"
        exec("".join(cell["source"]), names)
    assert asked == [32]
    rows = names["rows"]
    assert [row.method for row in rows] == [compare.FULL, *METHODS]
    assert all(row.same == 0 or math.isfinite(row.gap) for row in rows)
    assert "streamingllm" in capsys.readouterr().out
    drawn = (tmp_path / "examples" / "methods.png").read_bytes()
    assert eval("".join(codes[-1]["source"]), names)._repr_png_() == drawn
    kept = [kind for cell in codes for output in cell["outputs"] for kind in output.get("data", ())]
    assert "image/png" in kept


def test_batch(llm, tmp_path):
    """Answers come in the order of the questions, whichever is asked first."""
    documents = {"b.txt": PROMPT, "a.txt": PROMPT.replace(KEY, "90417")}
    for name, text in documents.items():
        (tmp_path / name).write_text(text.partition("\nWhat is")[0])
    question = "What is the pass key?"
    lines = [{"document": name, "question": question} for name in (*documents, "b.txt")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = batch.read_tasks(tmp_path / "in.jsonl")
    texts = batch.read_documents(tasks, tmp_path)
    answers = batch.answer(llm, tasks, texts, max_tokens=24)
    assert [KEY in one["answer"] for one in answers] == [True, False, True]
    assert "90417" in answers[1]["answer"]


def test_a_bad_line_is_named(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"document": "a", "question": "b"}\n["c"]\n')
    said = "in.jsonl, line 2: has no texts as document and question"
    with pytest.raises(ValueError, match=said):
        batch.read_tasks(tmp_path / "in.jsonl")
