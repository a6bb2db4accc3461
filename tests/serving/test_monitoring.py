"""The Grafana board and the rules of Prometheus, without a server; see also ``test_serving``."""

import re
import shutil
import subprocess

import pytest

from benchmarks.common import ROOT
from tests.support.monitoring import MONITORING, board, expressions, names_in, rules
from vllm_kvretrieval.engine.metrics import COUNTERS, GAUGES, OF_FRONT_END, metric_name

OURS = {f"{metric_name(name)}_total" for name in COUNTERS}
OURS |= {*map(metric_name, (*GAUGES, *OF_FRONT_END))}
VLLMS = {
    *("vllm:generation_tokens_total", "vllm:num_preemptions_total"),
    *("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
}
"""vLLM's own that rules ask for; ``test_serving`` looks for them at a server."""


def test_all_metrics_are_on_the_board():
    """Of a store, how much is written, found, restored, hit and damaged."""
    shown = {name for text in expressions(board()) for name in names_in(text)}
    store = {name for name in OURS if name.startswith(metric_name("store_"))}
    assert shown >= OURS - store
    of_store = "blocks_written", "blocks_found", "tokens_restored", "tokens_hit", "blocks_damaged"
    assert shown & store == {metric_name(f"store_{name}_total") for name in of_store}
    named = {name for name in shown if name.startswith(metric_name(""))}
    assert named == shown & OURS | {metric_name("info")}


def test_replicas_are_apart():
    """Neither the board nor the rules add replicas up, and a line names its replica."""
    groups = re.findall(r"\bby \((.*?)\)", "\n".join(expressions([board(), rules()])))
    assert groups
    assert all({"model_name", "instance"} <= set(group.split(", ")) for group in groups)
    graphs = [panel for panel in board()["panels"] if panel["type"] == "timeseries"]
    for target in (target for panel in graphs for target in panel["targets"]):
        assert "{{instance}}" in target["legendFormat"]
        assert target["expr"].count("vllm:") == target["expr"].count('instance=~"$instance"')
    variables = [variable["name"] for variable in board()["templating"]["list"]]
    assert variables == ["datasource", "model", "instance"]


def test_the_panels_do_not_overlap():
    places = [tuple(panel["gridPos"].values()) for panel in board()["panels"]]
    cells = [(x + i, y + j) for h, w, x, y in places for i in range(w) for j in range(h)]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in board()["panels"]}) == len(places)


def test_rules_use_what_there_is():
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {name for rule in rules() for name in names_in(rule["expr"])}
    assert used <= OURS | VLLMS | recorded
    assert all(rule["annotations"]["description"] for rule in rules() if "alert" in rule)


def test_alerts_are_tried_and_documented():
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    tried = (MONITORING / "rules-test.yaml").read_text()
    page = (ROOT / "docs/monitoring.md").read_text()
    for alert in alerts:
        assert f"alertname: {alert}" in tried
        assert f"`{alert}`" in page


@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yaml"), ("test", "rules", "rules-test.yaml")],
    ids=lambda arguments: arguments[-1],
)
def test_promtool(arguments):
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(
        [promtool, *arguments], cwd=MONITORING, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
