"""The Grafana board and the rules of Prometheus, without a server; see also ``test_serving``."""

import shutil
import subprocess

import pytest

from benchmarks.common import ROOT
from tests.monitoring import MONITORING, board, expressions, names_in, rules
from vllm_kvretrieval.engine.metrics import COUNTERS, GAUGES, metric_name

OURS = {f"{metric_name(name)}_total" for name in COUNTERS} | {*map(metric_name, GAUGES)}
VLLMS = {"vllm:generation_tokens_total"}
"""vLLM's own that rules ask for; ``test_serving`` looks for them at a server."""


def test_all_metrics_are_on_the_board():
    """Of a store, only how much is written and found."""
    shown = {name for text in expressions(board()) for name in names_in(text)}
    assert shown >= {name for name in OURS if not name.startswith(metric_name("store_"))}
    named = {name for name in shown if name.startswith(metric_name(""))}
    assert named == shown & OURS | {metric_name("info")}


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
