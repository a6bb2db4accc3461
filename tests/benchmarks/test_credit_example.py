"""The rule in ``examples/credit``: what it chooses, and that programs take it. No engine runs."""

import json
from typing import Any

import pytest
import tomllib
import torch

from benchmarks.common import ROOT
from benchmarks.quality import __main__ as driver
from benchmarks.quality.outside import code_of
from tests.benchmarks.test_ruler_runs import engine  # noqa: F401
from tests.support.outside import install, installed
from tests.tools.test_explain import BUDGET, _explained, model, positions  # noqa: F401
from vllm_kvretrieval.extend import Rule, RuleState
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.presets import preset_names

FOLDER = ROOT / "examples" / "credit"
CODE = (FOLDER / "credit.py").read_text()
POINTS = {
    group.removeprefix("vllm_kvretrieval."): points
    for group, points in tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"][
        "entry-points"
    ].items()
}


@pytest.fixture(autouse=True)
def package(tmp_path):
    """What ``pip install examples/credit`` leaves."""
    with installed(install(tmp_path / "credit", CODE, POINTS, "credit_rule", "credit")):
        yield tmp_path / "credit"


def test_it_is_a_paper_in_60_lines():
    assert len(CODE.splitlines()) <= 60
    assert {"credit", "credit_off"} <= set(preset_names())


def test_a_page_that_was_needed_stays_for_a_while():
    own = RetrievalConfig.from_options("credit", {}).own
    off = RetrievalConfig.from_options("credit_off", {}).own
    keys = torch.zeros(8, 4, 2)
    keys[2, 0] = torch.tensor([1.0, 0.0])
    keys[5, 0] = torch.tensor([0.0, 1.0])
    first, other = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.9, 1.0]])
    for method, kept in ((own, [2, 2, 2, 5]), (off, [2, 5, 5, 5])):
        assert isinstance(method.index, Rule)
        memory: dict[str, Any] = {}
        found: list[int] = []
        for query in (first, other, other, other * 30):
            state = RuleState(1, 7, 1, 1.0, None, None, memory)
            found += method.index.choose(query, {"keys": keys}, state).tolist()
        assert found == kept


def test_explain_shows_it(model):  # noqa: F811
    """At a single step there is no credit: both choose the pages with the highest q.k."""
    options = f"--budget={BUDGET}", "--layer=3", "--head=0"
    of_both = [
        _explained(model.folder, model.text, f"--method={name}", *options)["heads"][0]["attended"]
        for name in ("credit", "credit_off")
    ]
    assert of_both[0] == of_both[1]
    chosen = positions(of_both[0])
    assert len(chosen) <= BUDGET
    query = model.queries[3][:2].double()
    scores = (model.keys[3][0].double() @ query.T).amax(1)
    pages = scores[: len(scores) // 32 * 32].unflatten(0, (-1, 32)).amax(1)
    config = RetrievalConfig.from_options("credit", {"budget": BUDGET})
    budget = config.page_budget()
    last = -(-len(scores) // 32) - budget.window
    best = pages[budget.sink : last].topk(budget.select).indices + budget.sink
    assert {page * 32 for page in best.tolist()} <= set(chosen)


def test_benchmarks_measure_it_apart(engine, package, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "ruler.json"
    command = ["ruler", "--task", "vt", "--samples", "2", "--budgets", "128", "512", "--apart"]
    command += ["--variants", "credit", "credit_off", "quest", "ttkv", "--output", str(out)]
    tables = [str(tmp_path / f"t.{end}") for end in ("md", "csv", "tex")]
    engine.breaks_at = "vt credit_off 512"
    with pytest.raises(SystemExit):
        driver.main(command)  # ttkv has a use for neither budget
    assert "--budgets for ttkv: kv_retrieval.budget=512 is too small" in capsys.readouterr().err
    command.remove("ttkv")
    assert driver.main([*command, "--table", *tables]) == 130
    assert [started.get("method") for started in engine.started] == [
        *("full", "quest", "credit", "credit_off")
    ]
    assert all(started["also"] == {} for started in engine.started)
    engine.breaks_at = ""
    assert driver.main([*command, "--table", *tables]) == 0
    assert [started["method"] for started in engine.started[4:]] == ["credit_off"]
    ran = [label for label, _ in engine.ran]
    assert ran[-2:] == ["vt prompts", "vt credit_off 512"]
    lines = (tmp_path / "t.tex").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith(r"credit\_off & 512"))
    assert row.startswith(r"credit\_off & 512 & 100.0 & 100.0 [")
    assert r"& +0.0 [" in row or r"& 0.0 [" in row
    cells = json.loads(out.read_text())["cells"].values()
    assert len({cell["of_samples"] for cell in cells}) == 1

    before = code_of("credit")
    (package / "credit.py").write_text(CODE + "\n# another thought\n")
    assert code_of("credit") != before
    assert code_of("quest") == ""
    started = len(engine.started)
    assert driver.main(command) == 0
    assert [s["method"] for s in engine.started[started:]] == ["credit", "credit_off"]
