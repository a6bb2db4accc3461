"""Criteria and tables of the accuracy benchmark."""

import pytest

from benchmarks.quality.tasks import catalogue, criteria, report
from tests.support.accuracy_figures import COPY, LOOKUP, NOVEL, PASSKEY, SENTENCES, figures


@pytest.mark.parametrize(
    ("task", "changes", "expected"),
    [
        (PASSKEY, {}, [True, True]),
        (PASSKEY, {"kvretrieval_1024": 0.9}, [False, True]),
        (PASSKEY, {"kvretrieval_1024": 0.9, "oracle_1024": 0.9}, [None, True]),
        (PASSKEY, {"sink_window_1024": 0.6}, [True, False]),
        (PASSKEY, {"full_all": 0.75}, [None, None]),
        (SENTENCES, {}, [True, True]),
        (SENTENCES, {"kvretrieval_1024": 0.9, "oracle_1024": 0.9}, [False, True]),
        (SENTENCES, {"sink_window_1024": 0.6}, [True, False]),
        (SENTENCES, {"full_all": 0.75}, [None, None]),
        (LOOKUP, {}, [True]),
        (LOOKUP, {"kvretrieval_1024": 0.35}, [False]),
        (COPY, {}, [True, True]),
        (COPY, {"oracle_1024": 0.0059}, [False, True]),
        (COPY, {"sink_window_1024": 0.03}, [True, False]),
        (NOVEL, {}, [True, True, True, True]),
        (NOVEL, {"kvretrieval_all": 0.0031}, [False, True, True, True]),
        (NOVEL, {"kvretrieval_1024": 0.0106}, [True, False, True, True]),
        (NOVEL, {"kvretrieval_1024": 0.0, "oracle_1024": 0.0}, [True, True, True, True]),
        (NOVEL, {"sink_window_1024": 0.03}, [True, True, False, True]),
        (NOVEL, {"every_step_1024": 0.0095}, [True, True, True, False]),
    ],
)
def test_criteria(task, changes, expected):
    found = criteria.check([task], [1024], figures(task, **changes))
    assert [criterion.passed for criterion in found] == expected
    words = {True: "PASS", False: "FAIL", None: "SKIP"}
    lines = report.verdicts(found).splitlines()
    assert [line[:4] for line in lines] == [words[passed] for passed in expected]


def test_every_budget_is_set_against_the_oracle():
    changes = {"kvretrieval_512": 0.5, "oracle_512": 0.9, "sink_window_512": 0.1}
    found = criteria.check([PASSKEY], [1024, 512], figures(PASSKEY, **changes))
    assert [criterion.passed for criterion in found] == [None, True, True]
    found = criteria.check([PASSKEY], [1024, 512], figures(PASSKEY, **changes | {"oracle_512": 1}))
    assert [criterion.passed for criterion in found] == [False, True, True]
    found = criteria.check([LOOKUP], [1024, 512], figures(LOOKUP, **changes))
    assert [criterion.passed for criterion in found] == [False, True]
    changes = {f"{name}_512": 0.1 for name in ("oracle", "freekv", "every_step", "sink_window")}
    for ours, passed in ((0.128, True), (0.1281, False)):
        cells = figures(NOVEL, kvretrieval_512=ours, **changes)
        found = criteria.check([NOVEL], [512, 1024], cells)
        assert [criterion.passed for criterion in found] == [True, passed, *[True] * 4]


def test_every_task_but_a_quick_one_is_held_to_what_the_oracle_reaches():
    assert all({"passkey", "oracle"}.intersection(task.checks) for task in catalogue.TASKS)
    checks = {task.what: task.checks for task in catalogue.TASKS}
    assert {"oracle", "control"} <= set(checks["copy"])
    assert {"oracle", "control", "covering", "speculation"} == set(checks["novel"])
    assert [task.checks for task in catalogue.QUICK_TASKS] == [("found",), ("covering",)]


def test_report_shows_every_cell():
    cells = figures(PASSKEY) | figures(NOVEL)
    shown = report.table([PASSKEY, NOVEL], [1024], cells)
    assert "sink_window" in shown
    assert "95%" in shown
    assert "KL 0.0104" in shown
    assert "ppl 20.00 corr 72%" in shown
    assert "90% corr 72%" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["kvretrieval", "19.1", "7.5%", "95%"] in lines
    assert ["oracle", "-", "-", "95%"] in lines
