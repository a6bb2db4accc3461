"""What no CPU can show of a GPU, in one process: tests of hardware, then ops beside predictions.

    python -m benchmarks.gpu.smoke

First come versions, and mapped host memory with the speed of the bus. Then the tests run that an
interpreter cannot replace (`TESTS`): FreeKV's whole step of a layer in a CUDA graph, replayed
against its specification, and FlashAttention over rows that are empty. Last come the ops of a
layer's step at 128K, as `benchmarks.gpu.decode_layer` measures them and `benchmarks.gpu.predict`
predicts them, largest worth first.

A part that fails does not keep the others from running. Parts that would begin after ``--seconds``
are left out, and named.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common import ROOT, Stopwatch
from benchmarks.gpu.common import GIB, Report, gpu_header, parser
from benchmarks.gpu.decode_layer import Home, case_name

MODULE = "benchmarks.gpu.smoke"
TESTS = ("tests/gpu/test_hardware.py", "tests/gpu/test_dense_half.py")
CONTEXT = 131072
POOL_BYTES = 4 * GIB
BATCHES = (8, 1, 32)
SECONDS = 75


class Outcomes:
    """A pytest plug-in that notes how each test ended."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            noted: dict[str, Any] = {"outcome": report.outcome, "seconds": report.duration}
            if report.failed:
                noted["error"] = first_error(str(report.longrepr))
            self.found[report.nodeid.rpartition("/")[2]] = noted


def first_error(text: str) -> str:
    """The line of a pytest report that says what went wrong."""
    lines = [line for line in text.splitlines() if line.startswith("E  ")]
    return (lines or text.splitlines() or [""])[0].removeprefix("E").strip()


def tests() -> dict[str, dict[str, Any]]:
    """How the tests of the hardware ended, each by itself.

    Raises:
        RuntimeError: A test failed, or none ran; names the failed ones with their errors.
    """
    import pytest

    outcomes = Outcomes()
    # Without pytest's handler of faults: it would take this process's own away.
    options = ["-v", "--tb=short", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    options += ["--rootdir", str(ROOT)]
    pytest.main([*options, *(str(ROOT / path) for path in TESTS)], plugins=[outcomes])
    failed = [
        f"{name}: {noted['error']}"
        for name, noted in outcomes.found.items()
        if noted["outcome"] == "failed"
    ]
    passed = sum(noted["outcome"] == "passed" for noted in outcomes.found.values())
    if failed or not passed:
        raise RuntimeError("; ".join(failed) or "no test ran")
    return outcomes.found


def predicted(home: str, batch: int) -> dict[str, float]:
    """Microseconds that each op should take; needs vLLM."""
    from benchmarks.gpu import predict

    return predict.op_us(home, batch, CONTEXT)


class Smoke:
    """The parts, and the time that is left for them.

    Args:
        report: Where results go.
        seconds: After which no part is begun.
    """

    def __init__(self, report: Report, seconds: float) -> None:
        self._report, self._seconds, self._watch = report, seconds, Stopwatch()
        self.left_out: list[str] = []

    def part(self, name: str, run: Callable[[], Any]) -> Any:
        """Run a part if there is time for it; None where there is not, or where it fails."""
        if self._watch.seconds > self._seconds:
            self.left_out.append(name)
            return None
        return self._report.measure(name, run)

    def homes(self) -> dict[str, Home]:
        """Pools of pages on the device and in mapped host memory, those that can be had."""
        found = {}

        def make(name: str) -> dict[str, float]:
            found[name] = Home(name, POOL_BYTES)
            return found[name].describe()

        for name in ("host", "device"):
            self.part(f"{name}, pool", partial(make, name))
        return found

    def ops(self, homes: dict[str, Home]) -> list[list[object]]:
        """Ops of a layer's step; rows of their table."""
        rows: list[list[object]] = []
        for batch, (name, home) in itertools.product(BATCHES, homes.items()):
            case = case_name(name, CONTEXT, batch)
            found = self.part(case, partial(home.case, batch, CONTEXT))
            if not found:
                continue
            expected = self.part(f"{case}, predicted", partial(predicted, name, batch)) or {}
            for op, timed in found["ops"].items():
                rows.append([name, batch, op, timed["us"], expected.get(op), timed["floor_us"]])
        return rows


def main() -> None:
    """Run the parts; the table last."""
    options = parser(MODULE, __doc__)
    options.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"no part begins later; default: {SECONDS}"
    )
    given = options.parse_args()
    report = Report(given.output, gpu_header(MODULE))
    smoke = Smoke(report, given.seconds)
    homes = smoke.homes()
    smoke.part("tests", tests)
    torch.cuda.empty_cache()
    rows = smoke.ops(homes)
    columns = ["home", "batch", "op", "us", "predicted us", "floor us"]
    report.table(f"One layer at {CONTEXT} tokens", columns, rows)
    if smoke.left_out:
        print(f"left out for lack of time: {', '.join(smoke.left_out)}")
    report.finish()


if __name__ == "__main__":
    main()
