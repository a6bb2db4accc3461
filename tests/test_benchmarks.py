"""The speed and memory benchmarks' own arithmetic: what they make of measurements."""

import pytest

from benchmarks import slow_steady
from benchmarks.tasks import thresholds


def noted(recalled: int, missed: int, corrected: int, waited_s: float) -> dict[str, float]:
    """What the worker has counted when a step begins; every step attends to 1,000 units."""
    return {
        "attended": 0,
        "missed": missed,
        "corrected": corrected,
        "recalled": recalled,
        "recalled_bytes": recalled << 20,
        "waited_s": waited_s,
        "minor_faults": 0,
        "major_faults": 0,
    }


def test_steady_counts_from_the_first_decode_step():
    prompt, first, second, end = (
        noted(7, 7, 7, 7.0),
        noted(7, 7, 7, 7.0),
        noted(1007, 1007, 57, 7.010),
        noted(1010, 1009, 67, 7.012),
    )
    for step, note in enumerate((first, second, end)):
        note["attended"] = 1000 * step
    figures = slow_steady.summarise([0.030, 0.020], [prompt, first, second, end], budget_pages=20)
    assert figures["first_ms"] == pytest.approx(30)
    assert figures["first_units"] == 1000
    assert figures["first_waited_ms"] == pytest.approx(10)
    assert figures["first_hit_rate"] == 0
    assert figures["step_ms"] == pytest.approx(20)
    assert figures["rest_recalled_mib"] == pytest.approx(3)
    assert figures["rest_hit_rate"] == pytest.approx(0.998)
    assert figures["recalled_mib"] == pytest.approx(1003 / 2)
    assert figures["hit_rate"] == pytest.approx(1 - 1002 / 2000)
    assert figures["waited_ms"] == pytest.approx(6)
    assert figures["corrected_share"] == pytest.approx(60 / 100)


def test_steady_has_every_threshold_of_the_accuracy_benchmark():
    found = [v.threshold for v in slow_steady.VARIANTS if v.threshold is not None]
    assert sorted(found, reverse=True) == thresholds.THRESHOLDS


def test_steady_rows_show_what_reading_ahead_hides():
    figures = slow_steady.summarise([0.03, 0.02], [noted(0, 0, 0, t) for t in (0, 0.01, 0.02)], 1)
    by_name = {
        name: {"context": 16384, "batch": 4, "variant": name, **figures, "waited_ms": waited}
        for name, waited in ((slow_steady.DEVICE, 0), (slow_steady.DISK, 3), ("other", 3))
    }
    by_name[slow_steady.UNAIDED] = by_name["other"] | {"waited_ms": 4.0}
    assert "25%" in slow_steady.line(by_name[slow_steady.DISK], by_name)
    assert "25%" not in slow_steady.line(by_name["other"], by_name)
