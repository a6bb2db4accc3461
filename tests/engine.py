"""Checkpoints and engines for tests."""

from pathlib import Path

import pytest

MODELS = Path(__file__).resolve().parents[1] / "models"


def checkpoint(name: str) -> str:
    """Path of a checkpoint; fails the test where ``make models`` has not been run."""
    path = MODELS / name
    if not (path / "config.json").exists():
        pytest.fail(f"{path} is missing: run make models")
    return str(path)
