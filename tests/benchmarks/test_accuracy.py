"""The quick tier of the accuracy benchmark: a real model answers as well by a part of its cache."""

import os
from unittest import mock

import pytest

from benchmarks.quality import __main__ as driver
from benchmarks.quality import accuracy
from tests.support import workers

pytestmark = [pytest.mark.engine, pytest.mark.model]


ALL = pytest.param((), 3, marks=pytest.mark.slow)
FEW = ("--task", "sentences-smollm2-2k", "--samples", "1")


@pytest.mark.parametrize(("tasks", "criteria"), [(FEW, 2), ALL], ids=["sentences", "all tasks"])
def test_the_quick_tier(tasks, criteria, tmp_path, monkeypatch, capsys):
    """Its program ends with 0 where every criterion of it is met; engines are eager."""
    monkeypatch.setattr(accuracy, "RESULTS", tmp_path)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    with mock.patch.dict(os.environ, environment), workers.forked():
        status = driver.main(["accuracy", "--quick", *tasks, "--out", str(tmp_path / "quick.json")])
    said = capsys.readouterr().out
    assert status == 0, said
    assert said.count("PASS") == criteria, said
