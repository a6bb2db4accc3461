"""What the figures have to show for the benchmark to pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.tasks.base import Task

COVERED_KL = 0.003
"""With a budget that covers the context, KL to full attention stays below this (bf16 noise)."""

PASSKEY_LOSS = 0.05
"""At the largest budget a passkey task loses no more than this against full attention ..."""

PASSKEY_USABLE = 0.80
"""... where full attention itself reaches this, ..."""

CONTROL_LOSS = 0.50
"""... while the control loses at least this; else the task would prove nothing."""

CONTROL_KL_SHARE = 1 / 3
"""At the largest budget, KL is at most this share of the control's."""

SPECULATION_KL = 1.05
"""KL with speculation is at most this multiple of KL with selection at every step."""

_ROUNDING = 1e-9

Figures = Mapping[str, Mapping[str, Any]]
"""Cells by name, as `benchmarks.tasks.catalogue.Cell.name` forms it."""


@dataclass(frozen=True)
class Criterion:
    """One requirement: what it says, the figures, and whether they meet it."""

    text: str
    figures: str
    passed: bool | None
    """None where the task cannot tell (full attention itself fails at it)."""


def check(tasks: Sequence[Task], budgets: Sequence[int], cells: Figures) -> list[Criterion]:
    """Return the criteria of the given tasks, in order."""
    top = max(budgets)
    found: list[Criterion] = []
    for task in tasks:
        if "passkey" in task.checks:
            found += _passkey(task, top, cells)
        if "covering" in task.checks:
            found.append(_covering(task, cells))
        if "control" in task.checks:
            found.append(_control(task, top, cells))
        if "speculation" in task.checks:
            found += [_speculation(task, budget, cells) for budget in sorted(budgets)]
    return found


def _corrected(cell: Mapping[str, Any]) -> str:
    """How much of a figure is not speculation."""
    share = cell.get("corrected_share")
    return "" if share is None else f" ({share:.0%} of KV heads corrected)"


def _passkey(task: Task, budget: int, cells: Figures) -> list[Criterion]:
    full = cells[f"{task.name}/full/all"]["accuracy"]
    freekv = cells[f"{task.name}/freekv/{budget}"]
    ours = freekv["accuracy"]
    control = cells[f"{task.name}/sink_window/{budget}"]["accuracy"]
    usable = full >= PASSKEY_USABLE
    kept = ours >= full - PASSKEY_LOSS - _ROUNDING
    lost = control <= full - CONTROL_LOSS + _ROUNDING
    return [
        Criterion(
            f"{task.name}: budget {budget} within {PASSKEY_LOSS:.0%} points of full attention",
            f"freekv {ours:.0%}{_corrected(freekv)}, full {full:.0%}",
            kept if usable else None,
        ),
        Criterion(
            f"{task.name}: budget {budget}, control {CONTROL_LOSS:.0%} points or more below full",
            f"sink_window {control:.0%}, full {full:.0%}",
            lost if usable else None,
        ),
    ]


def _covering(task: Task, cells: Figures) -> Criterion:
    kl = cells[f"{task.name}/freekv/all"]["kl"]
    return Criterion(
        f"{task.name}: budget covering the context, KL to full below {COVERED_KL}",
        f"KL {kl:.4f}",
        kl < COVERED_KL,
    )


def _control(task: Task, budget: int, cells: Figures) -> Criterion:
    freekv = cells[f"{task.name}/freekv/{budget}"]
    ours = freekv["kl"]
    control = cells[f"{task.name}/sink_window/{budget}"]["kl"]
    return Criterion(
        f"{task.name}: budget {budget}, KL at most a third of the control's",
        f"freekv {ours:.4f}{_corrected(freekv)}, sink_window {control:.4f}, "
        f"ratio {ours / control:.2f}",
        ours <= CONTROL_KL_SHARE * control,
    )


def _speculation(task: Task, budget: int, cells: Figures) -> Criterion:
    freekv = cells[f"{task.name}/freekv/{budget}"]
    ours = freekv["kl"]
    every = cells[f"{task.name}/every_step/{budget}"]["kl"]
    return Criterion(
        f"{task.name}: budget {budget}, KL within {SPECULATION_KL - 1:.0%} of every step's",
        f"freekv {ours:.4f}{_corrected(freekv)}, every_step {every:.4f}, {ours / every - 1:+.1%}",
        ours <= SPECULATION_KL * every,
    )
