"""Tables with confidence intervals, of result files of `ruler` and `accuracy`."""

import csv
import json
import math

import pytest

from benchmarks.quality import __main__ as driver
from benchmarks.quality import table
from benchmarks.quality.intervals import interval, quantile


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (99, 1.984)],
)
def test_quantiles_are_those_of_tables(freedom, expected):
    assert quantile(freedom) == pytest.approx(expected, rel=2e-3)


def test_an_interval_is_students():
    found = interval([[1.0, 2.0, 3.0, 4.0]], (-math.inf, math.inf))
    assert found is not None
    half = 3.1824 * math.sqrt(5 / 3 / 4)
    assert found.mean == 2.5
    assert found.high - 2.5 == pytest.approx(half, rel=2e-3)
    assert 2.5 - found.low == pytest.approx(half, rel=2e-3)
    assert interval([[1.0]], (0, 100)) is None
    cut = interval([[90.0, 100.0, 100.0]], (0, 100))
    assert cut is not None
    assert cut.high == 100


def test_tasks_count_alike_and_do_not_vary():
    apart = interval([[0.0, 1.0] * 5, [99.0, 100.0] * 5], (0, 100))
    assert apart is not None
    assert apart.mean == 50
    assert apart.high - apart.low < 2


def test_samples_that_agree_leave_something_open():
    found = interval([[100.0] * 10], (0, 100))
    assert found is not None
    assert found.low == pytest.approx(100 * 0.05**0.1)
    assert found.high == 100
    assert interval([[0.5, 0.5]], (0, math.inf)) is None


def cell(variant, budget, scores, task="vt", key="samples", **other):
    place = {"task": task, "model": "M", "context": 4096, "variant": variant, "budget": budget}
    return {**place, "samples": len(scores), "scores": scores, "of_samples": key, **other}


CELLS = [
    cell("full", None, [90.0, 50.0, 100.0]),
    cell("full", None, [20.0, 30.0, 40.0], "fwe"),
    cell("my_rule", 512, [80.0, 40.0, 91.0]),
    cell("my_rule", 512, [10.0, 21.0, 30.0], "fwe"),
    cell("my_rule", 128, [0.0, 0.0, 0.0]),
    cell("other", 512, [90.0, 50.0, 100.0], key="others"),
    cell("other", 512, [20.0, 30.0, 40.0], "fwe", key="others"),
]


def rows(text):
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines()]
    return {(line[0], line[1]): line[2:] for line in lines if len(line) > 2}


def test_differences_are_of_the_same_samples():
    found = rows(table.as_markdown(table.tables(CELLS)))
    assert found["variant", "budget"] == ["vt", "fwe", "mean", "minus full"]
    assert found["full", "all"][-1] == "-"
    assert found["my_rule", "512"][:2] == ["70.3", "20.3"]
    # Each sample is 9 or 10 points below full attention, though samples differ by 60.
    assert found["my_rule", "512"][-1] == "-9.7 [-10.3, -9.0]"
    assert found["my_rule", "128"] == ["0.0", "-", "-", "-"]
    assert found["other", "512"][2:] == [found["full", "all"][2], "-"]

    found = rows(table.as_markdown(table.tables(CELLS, "my_rule:512")))
    assert found["full", "all"][-1] == "+9.7 [9.0, 10.3]"
    with pytest.raises(
        ValueError, match="--against nothing: no row of M is of it; there are: full"
    ):
        table.tables(CELLS, "nothing")


def test_forms(tmp_path, capsys):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps({"cells": {str(n): each for n, each in enumerate(CELLS)}}))
    again = [CELLS[0], cell("my_rule", 512, [1.0, 2.0, 3.0])]
    second.write_text(json.dumps({"cells": {str(n): each for n, each in enumerate(again)}}))
    files = [tmp_path / f"t.{end}" for end in ("md", "csv", "tex")]
    command = ["table", str(first), str(second), "--output", *map(str, files)]
    assert driver.main(command) == 0
    assert rows(capsys.readouterr().out)["my_rule (b)", "512"][0] == "2.0"
    of_file = list(csv.DictReader(files[1].open()))
    mean = next(r for r in of_file if (r["task"], r["variant"]) == ("mean", "my_rule"))
    assert (float(mean["by"]), float(mean["by_high"])) == pytest.approx(
        (-9.6667, -9.0124), abs=1e-3
    )
    tex = files[2].read_text()
    assert r"my\_rule & 512 & 70.3 & 20.3" in tex
    assert r"95\% confidence; pages and dense layers shared by several" in tex
    apart = [{**each, "apart": each["variant"] != "full"} for each in CELLS]
    assert "an engine for each" in table.as_markdown(table.tables(apart))
    assert tex.count(r"\begin{tabular}{llrrrr}") == 1

    first.write_text("[]")
    assert driver.main(["table", str(first)]) == 2
    assert "a.json is no result file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        driver.main([*command, "t.doc"])
    assert "ends in none of .md, .csv, .tex" in capsys.readouterr().err


def test_measures_have_tables_of_their_own():
    forced = [
        {**cell(name, budget, []), "kl_samples": kl, "nll_samples": [1.0, 2.0], "samples": 2}
        for name, budget, kl in (("full", None, [0.0, 0.0]), ("quest", 256, [0.01, 0.02]))
    ]
    for each in forced:
        del each["scores"]
    found = table.tables(forced)
    assert [each.measure.name for each in found] == ["kl", "nll"]
    assert rows(table.as_markdown(found[:1]))["quest", "256"][0] == "0.0150"
    with pytest.raises(ValueError, match="no cells with figures of samples"):
        table.tables([{"model": "M"}])
