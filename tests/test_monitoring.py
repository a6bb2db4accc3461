"""The Grafana board and the rules of Prometheus, without a server; see also ``test_serving``."""

import shutil
import subprocess

import pytest
import yaml

from tests.monitoring import MONITORING, board, expressions, names_in
from vllm_kvretrieval.engine.metrics import COUNTERS, GAUGES, metric_name

OURS = {f"{metric_name(name)}_total" for name in COUNTERS} | {*map(metric_name, GAUGES)}


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
    rules = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"][0]["rules"]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    used = {name for rule in rules for name in names_in(rule["expr"])}
    assert used <= OURS | recorded
    assert all(rule["annotations"]["description"] for rule in rules if "alert" in rule)


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
