"""Criteria and tables of the accuracy benchmark."""

import pytest

from benchmarks.tasks import catalogue, criteria, report, thresholds
from tests.accuracy_figures import COPY, LOOKUP, NEW, NOVEL, OLD, PASSKEY, SENTENCES, figures


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


def test_report_shows_every_cell(tmp_path):
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
    report.plot(tmp_path / "plot.png", [PASSKEY, NOVEL], [1024], cells)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_indexes_are_drawn_where_some_were_compared(tmp_path):
    path, cells = tmp_path / "indexes.png", figures(PASSKEY) | figures(NOVEL)
    assert not report.plot_indexes(path, [PASSKEY, NOVEL], [1024], cells)
    assert not path.exists()
    cells |= figures(PASSKEY, mean_1024=0.7) | figures(NOVEL, mean_1024=0.008)
    for cell in cells.values():
        cell.setdefault("index_share", 0.01)
    assert report.plot_indexes(path, [PASSKEY, NOVEL], [1024], cells)
    assert path.stat().st_size > 10_000


def test_indexes_stand_between_the_control_and_the_oracle():
    extra = {"mean_std_1024": 0.8, "mean_1024": 0.7}
    cells = figures(PASSKEY, **extra) | figures(NOVEL, mean_std_1024=0.008)
    cells[f"{PASSKEY.name}/kvretrieval/1024"]["index_share"] = 0.048
    stored = {
        "build": OLD,
        "rows": [
            {"index": "min_max", "context": 32768, "batch": 1, "planning_us": 812.4},
            {"index": "min_max", "context": 32768, "batch": 4, "planning_us": 3000.0},
            {"index": "mean", "context": 8192, "batch": 1, "planning_us": 3.0},
        ],
    }
    planned = report.planning(stored, OLD)
    lines = report.indexes([PASSKEY, NOVEL], [1024], cells, planned).splitlines()
    assert not any("another build" in line for line in lines)
    rows = [line.split() for line in lines[2:] if line]
    assert rows == [
        ["of", "us", "at", PASSKEY.name, NOVEL.name],
        ["index", "KV", "32K", "1024", "1024"],
        ["none", "(sink_window)", "-", "-", "10%", "0.0400"],
        ["low_rank", "(kvretrieval)", "4.8-7.5%", "-", "95%", "0.0104"],
        ["min_max", "(every_step)", "-", "812", "95%", "0.0100"],
        ["mean", "-", "-", "70%", "-"],
        ["mean_std", "-", "-", "80%", "0.0080"],
        ["exact", "(oracle)", "-", "-", "95%", "0.0060"],
        ["mean_std", "to", "min_max", "-15", "0.80x"],
    ]
    assert "another build" in report.planning(stored, NEW).note
    nothing = report.planning(None, OLD)
    assert "benchmarks.planning" in nothing.note
    shown = report.indexes([PASSKEY], [1024], figures(PASSKEY), nothing)
    assert nothing.note in shown
    assert "mean_std" not in shown


def test_threshold_table_sets_cost_against_waiting():
    cells = figures(PASSKEY) | figures(NOVEL)
    rows = [
        {"context": 16384, "batch": 1, "threshold": 0.9, "waited_ms": 0.25},
        {"context": 16384, "batch": 1, "threshold": None, "waited_ms": 9.0},
    ]
    waited = thresholds.waits({"build": OLD, "rows": rows}, OLD)
    lines = thresholds.table([PASSKEY, NOVEL], [1024], cells, waited).splitlines()
    found = {line[: line.index("  ", 3)].strip(): line.split()[-5:] for line in lines[2:] if line}
    assert found["KV heads corrected"] == ["-", "72.0%", "-", "-", "-"]
    assert found[f"KL above that of every step, {NOVEL.name}"] == ["+0.0%", "+4.0%", "-", "-", "-"]
    needle = found[f"points found less than of every step, {PASSKEY.name}"]
    assert needle == ["+0.0", "+5.0", "-", "-", "-"]
    assert found["ms waited per step on disk, 16,384 x 1"] == ["-", "0.25", "-", "-", "-"]
    assert "slow_home steady" in thresholds.waits(None, OLD).note
    assert "another build" in thresholds.waits({"build": NEW, "rows": rows}, OLD).note


def test_threshold_table_is_empty_where_none_was_run():
    cells = figures(LOOKUP)  # freekv alone, without every step
    assert thresholds.table([LOOKUP], [1024], cells, thresholds.waits(None, OLD)) == ""
