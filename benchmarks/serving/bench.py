"""What `benchmarks.serving decode` measures: prefill and decode steps of two engines in turn."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engines import EngineProcess, Timing
from benchmarks.models import Documents
from benchmarks.serving import report
from benchmarks.serving.report import Cell
from benchmarks.serving.status import Status

WARM_STEPS = 8
WITHIN_BUDGET_FACTOR = 4


@dataclass(frozen=True)
class Settings:
    """What a stored result depends on, apart from the context and the batch."""

    model: str
    hf_overrides: dict[str, Any]
    against: str
    budget: int
    options: dict[str, Any]
    steps: int
    repeats: int
    prefill_repeats: int
    prefill_seconds: float
    enforce_eager: bool
    fill: bool = False
    dtype: str = "auto"
    beside: tuple[str, ...] = ()
    avx2: bool = False
    quantization: str | None = None
    load_format: str = "auto"
    temperature: float = 0.0  # of sampling: all results are greedy


@dataclass(frozen=True)
class Prefill:
    """Documents handed in at once, and what each engine made of them; no timings where their
    keys and values were filled in without a prefill."""

    prompts: list[list[int]]
    timings: list[Timing]


@dataclass(frozen=True)
class Lane:
    """One of the compared: an engine, and what its requests ask for."""

    name: str
    engine: EngineProcess
    extra_args: dict[str, Any] | None = None

    def generate(self, prompts: list[list[int]], max_tokens: int, fresh: bool = False) -> Timing:
        """Decode with the engine awake meanwhile; see `EngineProcess.generate`."""
        self.engine.resume()
        timing = self.engine.generate(prompts, max_tokens, self.extra_args, fresh)
        self.engine.pause()
        return timing


class Bench:
    """Measures all lanes in turn, one context length after another."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        settings: Settings,
        documents: Documents,
        status: Status,
    ) -> None:
        self._lanes = lanes
        self._status = status
        self._settings = settings
        self._documents = documents
        self._tokens = settings.steps + WARM_STEPS + 1

    def context(self, context: int, batches: Sequence[int], profile: bool) -> Iterator[Cell]:
        """The cells of one context length, in rising batch size; contexts end at `context`.

        Where prefilling a whole batch several times would take too long, its documents are
        handed in one after another instead, each once and on both engines in turn. That is
        how vLLM prefills a batch anyway, and every document is a sample for batch 1.
        """
        if self._settings.fill:
            prompts = self._documents.take(max(batches), context - self._tokens)
            for batch in sorted(batches):
                self._pair(1, f"fill of {batch}", prompts[:batch], 1)
                cell = self._cell(context, [Prefill(prompts[:batch], [])], profile)
                yield cell | {"one_by_one": False}
            return
        singles = [self._fresh(context, 1, 1)]
        one = _seconds(singles)
        dear = one * max(batches) > self._settings.prefill_seconds
        while len(singles) < (max(batches) if dear else self._repeats(one, 1 in batches)):
            singles.append(self._fresh(context, 1, len(singles) + 1))
        for batch in sorted(batches):
            if batch == 1:
                runs = singles
            elif dear:
                runs = [_one_by_one(singles[:batch])]
            else:
                runs = [self._fresh(context, batch, 1)]
                while len(runs) < self._repeats(_seconds(runs[:1]), True):
                    runs.append(self._fresh(context, batch, len(runs) + 1))
            yield self._cell(context, runs, profile) | {"one_by_one": dear and batch > 1}

    def _repeats(self, seconds: float, wanted: bool) -> int:
        """How often to time a prefill that takes `seconds` on both engines together."""
        affordable = int(self._settings.prefill_seconds / seconds)
        return max(1, min(affordable, self._settings.prefill_repeats)) if wanted else 1

    def _fresh(self, context: int, batch: int, turn: int) -> Prefill:
        """Prefill `batch` documents, all of them in each lane; two lanes may be one engine's."""
        prompts = self._documents.take(batch, context - self._tokens)
        timings = self._pair(turn, f"prefill {turn} of {batch}", prompts, 1, fresh=True)
        return Prefill(prompts, timings)

    def _cell(self, context: int, prefills: Sequence[Prefill], profile: bool) -> Cell:
        """Decode times on the documents prefilled last, beside the prefill times."""
        prompts = prefills[-1].prompts
        decodes = [
            self._pair(turn, f"decode {turn} of {len(prompts)}", prompts, self._tokens)
            for turn in range(1, 1 + decode_repeats(context, self._settings))
        ]
        cell: Cell = {"context": context, "batch": len(prompts), "engines": {}}
        for k, lane in enumerate(self._lanes):
            first = [run.timings[k].first_token for run in prefills if run.timings]
            cell["engines"][lane.name] = {
                "prefill_s": [round(max(times), 4) for times in first],
                "first_token_s": [round(statistics.median(times), 4) for times in first],
                "step_ms": [report.spread(self._steps(pair[k])) for pair in decodes],
            }
            if profile:
                cell["engines"][lane.name] |= self._profile(lane, prompts)
        return cell

    def warm_up(self, context: int) -> None:
        """Let all lanes meet every kind of work once; contexts end at `context` tokens."""
        for batch in (1, 2):
            prompts = self._documents.take(batch, context - self._tokens)
            self._pair(0, "warm-up", prompts, self._tokens)

    def _pair(
        self, turn: int, label: str, prompts: list[list[int]], max_tokens: int, fresh: bool = False
    ) -> list[Timing]:
        """The same batch in all lanes; `turn` decides which one goes first."""
        timings: dict[str, Timing] = {}
        order = self._lanes if turn % 2 == 0 else tuple(reversed(self._lanes))
        for lane in order:
            self._status.set(f"{label}, {lane.name}")
            timings[lane.name] = lane.generate(prompts, max_tokens, fresh)
        return [timings[lane.name] for lane in self._lanes]

    def _steps(self, timing: Timing) -> list[float]:
        """Milliseconds of the measured steps of one repeat."""
        return [1e3 * step for step in timing.steps[WARM_STEPS:]]

    def _profile(self, lane: Lane, prompts: list[list[int]]) -> dict[str, Any]:
        """One more decode repeat, with timers in the worker: where a step's time goes."""
        self._status.set(f"profile, {lane.name}")
        lane.engine.resume()
        lane.engine.collective_rpc("start_timing")
        timing = lane.generate(prompts, self._tokens)
        lane.engine.resume()
        parts, requests = lane.engine.collective_rpc("stop_timing")
        lane.engine.pause()
        return {
            "profile_ms": report.profile(self._steps(timing), parts),
            "retrieval": report.retrieval(requests),
        }


def _seconds(prefills: Sequence[Prefill]) -> float:
    """What these prefills took on all engines together."""
    return sum(max(timing.first_token) for run in prefills for timing in run.timings)


def _one_by_one(singles: Sequence[Prefill]) -> Prefill:
    """Single documents as a batch, in which each waits for those before it."""
    timings = []
    for runs in zip(*(single.timings for single in singles), strict=True):
        times = itertools.accumulate(max(run.first_token) for run in runs)
        timings.append(Timing(list(times), [], []))
    return Prefill([prompt for single in singles for prompt in single.prompts], timings)


def decode_repeats(context: int, settings: Settings) -> int:
    """How often a cell's decoding is timed: more often where 3 % must be told apart."""
    return settings.repeats * (WITHIN_BUDGET_FACTOR if context <= settings.budget else 1)
