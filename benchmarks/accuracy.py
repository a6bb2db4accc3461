"""The accuracy of decoding with KV retrieval, compared with full attention, on real models.

    python -m benchmarks.accuracy [--task NAME ...] [--also NAME|GROUP ...] [--quick]

Everything passes through the real engine's decode path. Per model, stock vLLM answers every task
once (the reference, kept in benchmarks/results/.reference), then one retrieval engine, which serves
the methods of all variants to be run, answers it under each of them and every budget; its prefix
cache holds a task's prompts, so each is prefilled once. Every figure is stored when it is ready, so
an interrupted run picks up where it was. Exits with 1 when a criterion fails, with 2 when it could
not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks import build
from benchmarks.common import RESULTS, Stopwatch, read_json, result_header, versions
from benchmarks.tasks import catalogue, criteria, report, scoring, thresholds
from benchmarks.tasks.base import Sample, Task, TokenText
from benchmarks.tasks.catalogue import FULL, Cell, Variant
from benchmarks.tasks.engine import (
    BATCH,
    DTYPE,
    open_engine,
    prefix_cache_bytes,
    retrieval_counts,
    run_samples,
)
from benchmarks.tasks.metrics import TOP_LOGPROBS, Generated
from benchmarks.tasks.store import (
    References,
    Results,
    fingerprint,
    model_fingerprint,
    reference_key,
)
from benchmarks.worker_counts import corrected_share

MODULE = "benchmarks.accuracy"


@dataclass
class Job:
    """One task made ready: its samples, its reference (once known) and the cells still to do."""

    task: Task
    samples: list[Sample]
    key: str
    """Key of the reference; part of every cell's key."""

    reference: list[Generated] = field(default_factory=list)
    todo: list[Cell] = field(default_factory=list)


class Benchmark:
    """Runs tasks model by model and keeps their figures."""

    def __init__(
        self,
        results: Results,
        references: References,
        budgets: tuple[int, ...],
        variants: Sequence[Variant],
    ) -> None:
        self._variants = variants
        self._results = results
        self._references = references
        self._budgets = budgets
        self._code = build.code_fingerprint()
        self._clock = Stopwatch()
        self.figures: dict[str, dict[str, Any]] = {}
        """The figures of this run's cells, by name."""

    def run(self, model: Path, tasks: Sequence[Task], count: int | None) -> None:
        """Run the tasks of one model; `count` replaces their numbers of samples."""
        tokenizer = AutoTokenizer.from_pretrained(model)
        text = TokenText(tokenizer)
        weights = model_fingerprint(model)
        jobs = []
        for task in tasks:
            samples = task.build(text, task.context, count or task.samples)
            key = reference_key(weights, samples, versions().get("vllm", "unknown"), DTYPE)
            jobs.append(Job(task, samples, key))
        self._run_references(model, jobs, tokenizer)
        self._run_cells(model, jobs, tokenizer)

    def _run_references(
        self, model: Path, jobs: list[Job], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        missing = []
        for job in jobs:
            stored = self._references.get(job.task.name, job.key)
            if stored is None:
                missing.append(job)
            else:
                job.reference = stored
        if missing:
            self._say(f"{model.name}: starting stock vLLM for {len(missing)} reference(s)")
            with open_engine(model, *_sizes(model, missing, None)) as llm:
                for job in missing:
                    self._say(f"{job.task.name}: full attention, {len(job.samples)} samples")
                    job.reference = run_samples(llm, job.samples, None, f"{job.task.name} full")
                    self._references.put(job.task.name, job.key, job.reference)
        for job in jobs:
            scores = scoring.score(job.samples, job.reference, job.reference, tokenizer)
            cell = {**_label(job, FULL.name, None), "share": 1.0, **scores}
            self._keep(f"{job.task.name}/{FULL.name}/all", job.key, cell)

    def _run_cells(self, model: Path, jobs: list[Job], tokenizer: PreTrainedTokenizerBase) -> None:
        for job in jobs:
            covering = scoring.covering_budget(job.samples)
            for cell in catalogue.cells_of(job.task, self._budgets, covering, self._variants):
                stored = self._results.get(cell.name, self._cell_key(job, cell))
                if stored is None:
                    job.todo.append(cell)
                else:
                    self.figures[cell.name] = stored
        todo = [(job, cell) for job in jobs for cell in job.todo]
        while todo:  # one engine after the other
            engine = todo[0][1].variant.engine
            chosen = [(job, cell) for job, cell in todo if cell.variant.engine == engine]
            todo = [(job, cell) for job, cell in todo if cell.variant.engine != engine]
            self._run_on(engine, chosen, model, tokenizer)

    def _run_on(
        self,
        engine: dict[str, Any],
        todo: list[tuple[Job, Cell]],
        model: Path,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Run cells, all of one task after the other, on a retrieval engine with these options."""
        options = f" {engine}" if engine else ""
        self._say(f"{model.name}: starting the retrieval engine{options} for {len(todo)} cell(s)")
        also = catalogue.also_of(cell for _, cell in todo)
        sizes = _sizes(model, [job for job, _ in todo], max(cell.budget for _, cell in todo))
        with open_engine(model, *sizes, also=also, **engine) as llm:
            for number, (job, cell) in enumerate(todo, 1):
                watch = Stopwatch()
                label = f"{job.task.name} {cell.variant.name} {cell.budget}"
                self._say(f"{label}: {len(job.samples)} samples (cell {number} of {len(todo)})")
                before = retrieval_counts(llm)
                results = run_samples(llm, job.samples, cell.options, label, cell.variant.watches)
                share = corrected_share(before, retrieval_counts(llm))
                figures = {
                    **_label(job, cell.variant.name, cell.budget),
                    "share": scoring.mean_share(job.samples, cell.budget, cell.variant, model),
                    **scoring.index_bytes(cell.variant, model),
                    "corrected_share": share if cell.variant.speculates else None,
                    **scoring.score(job.samples, job.reference, results, tokenizer),
                    "seconds": round(watch.seconds, 1),
                }
                self._keep(cell.name, self._cell_key(job, cell), figures)

    def _cell_key(self, job: Job, cell: Cell) -> str:
        variant = cell.variant
        return fingerprint([job.key, cell.options, variant.also, variant.engine, self._code])

    def _keep(self, name: str, key: str, cell: dict[str, Any]) -> None:
        self.figures[name] = cell
        self._results.put(name, key, cell)

    def _say(self, message: str) -> None:
        print(f"[{self._clock}] {message}", flush=True)


def _sizes(model: Path, jobs: Sequence[Job], budget: int | None) -> tuple[int, int | None, int]:
    """Longest context, budget and KV cache of an engine that runs one of these jobs at a time."""
    context = max(sample.total for job in jobs for sample in job.samples)
    return context, budget, max(prefix_cache_bytes(model, job.samples) for job in jobs)


def _label(job: Job, variant: str, budget: int | None) -> dict[str, Any]:
    return {
        "task": job.task.name,
        "model": job.task.model.name,
        "context": job.task.context,
        "variant": variant,
        "budget": budget,
        "samples": len(job.samples),
    }


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [*catalogue.GROUPS, *(variant.name for variant in catalogue.VARIANTS)]
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Accuracy of decoding with KV retrieval against full attention.",
    )
    parser.add_argument("--list", action="store_true", help="show the tasks and leave")
    parser.add_argument("--quick", action="store_true", help="the quick tier, a few minutes")
    parser.add_argument(
        "--task", nargs="+", metavar="NAME", help="run these tasks alone (default: all)"
    )
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="put the tasks to this checkpoint instead"
    )
    parser.add_argument(
        "--budgets", nargs="+", type=int, metavar="TOKENS", help="default: 256 512 1024; quick: 512"
    )
    parser.add_argument(
        "--also",
        nargs="+",
        default=[],
        metavar="NAME|GROUP",
        choices=names,
        help=f"further variants (see --list), or groups of them: {', '.join(catalogue.GROUPS)}",
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="samples per task (default: see --list)"
    )
    parser.add_argument(
        "--steady",
        type=Path,
        metavar="FILE",
        default=RESULTS / "slow-home-steady.json",
        help="results of `benchmarks.slow_home steady`: what each threshold waits for",
    )
    parser.add_argument(
        "--planning",
        type=Path,
        metavar="FILE",
        default=RESULTS / "planning.json",
        help="results of `benchmarks.planning`: what selecting by each index takes",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON results; the plot lies beside them as .png"
    )
    options = parser.parse_args(arguments)
    if options.samples is not None and options.samples < 1:
        parser.error(f"--samples {options.samples}: at least 1 is needed")
    if options.budgets and min(options.budgets) < 1:
        parser.error(f"--budgets {min(options.budgets)}: budgets are positive numbers of tokens")
    options.tasks = catalogue.QUICK_TASKS if options.quick else catalogue.TASKS
    if options.model is not None:
        options.tasks = catalogue.with_model(options.tasks, options.model)
    if options.task:
        known = {task.name: task for task in options.tasks}
        unknown = [name for name in options.task if name not in known]
        if unknown:
            parser.error(f"no task {', '.join(unknown)}; there are: {', '.join(known)}")
        options.tasks = tuple(known[name] for name in options.task)
    if options.budgets is None:
        options.budgets = catalogue.QUICK_BUDGETS if options.quick else catalogue.BUDGETS
    options.budgets = tuple(sorted(set(options.budgets)))
    if options.out is None:
        options.out = RESULTS / ("accuracy-quick.json" if options.quick else "accuracy.json")
    return options


def _list_tasks(tasks: Sequence[Task]) -> None:
    for task in tasks:
        print(
            f"{task.name:22}{task.samples:4} samples  context {task.context:6}  "
            f"{task.model.name:30}{', '.join(task.checks)}"
        )
    for variant in (FULL, *catalogue.VARIANTS):
        print(f"{variant.name:22}{variant.meaning} [{', '.join(variant.groups) or 'always'}]")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    options = _arguments(arguments)
    if options.list:
        _list_tasks(options.tasks)
        return 0
    clock = Stopwatch()
    header = {
        **result_header(MODULE),
        "settings": {"batch": BATCH, "top_logprobs": TOP_LOGPROBS, "dtype": DTYPE},
    }
    try:
        results = Results(options.out, header)
        references = References(RESULTS / ".reference")
        variants = catalogue.chosen(options.quick, options.also)
        benchmark = Benchmark(results, references, options.budgets, variants)
        for model in dict.fromkeys(task.model for task in options.tasks):
            chosen = [task for task in options.tasks if task.model == model]
            benchmark.run(model, chosen, options.samples)
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        print(f"{MODULE}: {error}", file=sys.stderr)
        return 2
    verdict = criteria.check(options.tasks, options.budgets, benchmark.figures)
    picture = options.out.with_suffix(".png")
    report.plot(picture, options.tasks, options.budgets, benchmark.figures)
    kept = picture.with_stem(f"{picture.stem}-indexes")
    if report.plot_indexes(kept, options.tasks, options.budgets, benchmark.figures):
        print(f"plot of indexes: {kept}")
    print(f"\n{report.table(options.tasks, options.budgets, benchmark.figures)}")
    waits = thresholds.waits(read_json(options.steady), header["build"])
    if compared := thresholds.table(options.tasks, options.budgets, benchmark.figures, waits):
        print(compared)
    planned = report.planning(read_json(options.planning), header["build"])
    print(report.indexes(options.tasks, options.budgets, benchmark.figures, planned))
    print(f"results: {options.out}\nplot:    {picture}\ntime:    {clock}")
    print(f"build:   {build.label(header['build'])}\n")
    if outdated := results.outdated():
        print(
            f"{len(outdated)} cells of {options.out} are of another build; run their tasks again:"
        )
        print(*(f"  {name}" for name in outdated), "", sep="\n")
    print(report.verdicts(verdict))
    return 1 if any(criterion.passed is False for criterion in verdict) else 0


if __name__ == "__main__":
    sys.exit(main())
