"""What is in ``monitoring``, for tests."""

import json
import re
from typing import Any

import yaml

from benchmarks.common import ROOT

MONITORING = ROOT / "monitoring"


def board() -> Any:
    """The Grafana board."""
    return json.loads((MONITORING / "grafana-board.json").read_text())


def rules() -> Any:
    """The rules of Prometheus: those that are recorded, and alerts."""
    return yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"][0]["rules"]


def expressions(part: Any) -> list[str]:
    """All expressions of PromQL in the board, the rules, or a part of them."""
    if isinstance(part, dict):
        own = [part["expr"]] if "expr" in part else []
        return own + [text for value in part.values() for text in expressions(value)]
    return [text for value in part for text in expressions(value)] if isinstance(part, list) else []


def names_in(expression: str) -> set[str]:
    """The metrics, or recorded rules, that an expression asks for."""
    return set(re.findall(r"\b\w+:\w[\w:]*", expression))
