"""Criteria that the figures have to meet for the benchmark to pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.tasks.base import Task
from benchmarks.quality.tasks.variant import FREEKV, OWN

COVERED_KL = 0.003
"""With a budget that covers the context, KL to full attention stays below this (rounding)."""

POINTS_LOST = 0.05
"""Largest loss of found answers, as a share: against full attention ..."""

PASSKEY_USABLE = 0.80
"""... in a passkey task where full attention itself reaches this, ..."""

CONTROL_LOSS = 0.50
"""... while the control loses at least this; else the task would prove nothing."""

ORACLE_KL = 1.25
"""KL is at most this multiple of the oracle's plus `COVERED_KL`."""

CONTROL_KL_SHARE = 1 / 3
"""At the largest budget, KL is at most this share of the control's."""

SPECULATION_KL = 1.05
"""freekv's KL is at most this multiple of that with selection at every step."""

_ROUNDING = 1e-9

Figures = Mapping[str, Mapping[str, Any]]
"""Cells by name, as `benchmarks.quality.tasks.catalogue.Cell.name` forms it."""


@dataclass(frozen=True)
class Criterion:
    """One requirement: what it says, the figures, and whether they meet it."""

    text: str
    figures: str
    passed: bool | None
    """None where the task cannot tell (full attention itself, or the oracle, fails at it)."""


def check(tasks: Sequence[Task], budgets: Sequence[int], cells: Figures) -> list[Criterion]:
    """Return the criteria of the given tasks, in order."""
    budgets = sorted(budgets)
    top = budgets[-1]
    found: list[Criterion] = []
    for task in tasks:
        if "passkey" in task.checks:
            found += [_passkey(task, budget, cells) for budget in budgets]
        if "found" in task.checks:
            found.append(_found(task, top, cells))
        if "passkey" in task.checks or "found" in task.checks:
            found.append(_blind(task, top, cells))
        if "covering" in task.checks:
            found.append(_covering(task, cells))
        if "oracle" in task.checks:
            found += [_oracle(task, budget, cells) for budget in budgets]
        if "control" in task.checks:
            found.append(_control(task, top, cells))
        if "speculation" in task.checks:
            found += [_speculation(task, budget, cells) for budget in budgets]
    return found


def _corrected(cell: Mapping[str, Any]) -> str:
    """The share of KV heads that corrected, as text; empty if it is not known."""
    share = cell.get("corrected_share")
    return "" if share is None else f" ({share:.0%} of KV heads corrected)"


def _accuracy(task: Task, variant: str, budget: int | str, cells: Figures) -> float:
    return float(cells[f"{task.name}/{variant}/{budget}"]["accuracy"])


def _kl(task: Task, variant: str, budget: int | str, cells: Figures) -> float:
    return float(cells[f"{task.name}/{variant}/{budget}"]["kl"])


def _reaches(ours: float, theirs: float) -> bool:
    return ours >= theirs - POINTS_LOST - _ROUNDING


def _passkey(task: Task, budget: int, cells: Figures) -> Criterion:
    full = _accuracy(task, "full", "all", cells)
    ours, oracle = (_accuracy(task, name, budget, cells) for name in (OWN, "oracle"))
    telling = full >= PASSKEY_USABLE and _reaches(oracle, full)
    return Criterion(
        f"{task.name}: budget {budget} within {POINTS_LOST:.0%} points of full attention, as the "
        "oracle is",
        f"{OWN} {ours:.0%}, oracle {oracle:.0%}, full {full:.0%}",
        _reaches(ours, full) if telling else None,
    )


def _found(task: Task, budget: int, cells: Figures) -> Criterion:
    full, ours = _accuracy(task, "full", "all", cells), _accuracy(task, OWN, budget, cells)
    return Criterion(
        f"{task.name}: budget {budget} within {POINTS_LOST:.0%} points of full attention",
        f"{OWN} {ours:.0%}, full {full:.0%}",
        _reaches(ours, full) if full >= PASSKEY_USABLE else None,
    )


def _blind(task: Task, budget: int, cells: Figures) -> Criterion:
    full = _accuracy(task, "full", "all", cells)
    control = _accuracy(task, "sink_window", budget, cells)
    lost = control <= full - CONTROL_LOSS + _ROUNDING
    return Criterion(
        f"{task.name}: budget {budget}, control {CONTROL_LOSS:.0%} points or more below full",
        f"sink_window {control:.0%}, full {full:.0%}",
        lost if full >= PASSKEY_USABLE else None,
    )


def _covering(task: Task, cells: Figures) -> Criterion:
    kl = _kl(task, OWN, "all", cells)
    return Criterion(
        f"{task.name}: budget covering the context, KL to full below {COVERED_KL}",
        f"{OWN} {kl:.4f}",
        kl < COVERED_KL,
    )


def _oracle(task: Task, budget: int, cells: Figures) -> Criterion:
    if "accuracy" in cells[f"{task.name}/{OWN}/{budget}"]:
        ours, oracle = (_accuracy(task, name, budget, cells) for name in (OWN, "oracle"))
        return Criterion(
            f"{task.name}: budget {budget} within {POINTS_LOST:.0%} points of the oracle",
            f"{OWN} {ours:.0%}, oracle {oracle:.0%}",
            _reaches(ours, oracle),
        )
    ours, oracle = (_kl(task, name, budget, cells) for name in (OWN, "oracle"))
    return Criterion(
        f"{task.name}: budget {budget}, KL at most {ORACLE_KL} x the oracle's + {COVERED_KL}",
        f"{OWN} {ours:.4f}, oracle {oracle:.4f}, ratio {_ratio(ours, oracle)}",
        ours <= ORACLE_KL * oracle + COVERED_KL,
    )


def _control(task: Task, budget: int, cells: Figures) -> Criterion:
    ours, control = (_kl(task, name, budget, cells) for name in (OWN, "sink_window"))
    return Criterion(
        f"{task.name}: budget {budget}, KL at most a third of the control's",
        f"{OWN} {ours:.4f}, sink_window {control:.4f}, ratio {_ratio(ours, control)}",
        ours <= CONTROL_KL_SHARE * control,
    )


def _speculation(task: Task, budget: int, cells: Figures) -> Criterion:
    corrected = _corrected(cells[f"{task.name}/{FREEKV}/{budget}"])
    ours, every = (_kl(task, name, budget, cells) for name in (FREEKV, "every_step"))
    return Criterion(
        f"{task.name}: budget {budget}, KL within {SPECULATION_KL - 1:.0%} of every step's",
        f"{FREEKV} {ours:.4f}{corrected}, every_step {every:.4f}, ratio {_ratio(ours, every)}",
        ours <= SPECULATION_KL * every,
    )


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if theirs > 0 else "-"
