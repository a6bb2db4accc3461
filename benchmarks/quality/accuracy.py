"""The accuracy of decoding with KV retrieval, compared with full attention, on real models.

    python -m benchmarks.quality accuracy --quick
    python -m benchmarks.quality accuracy --task copy-qwen-4k --also indexes --budgets 256 1024
    python -m benchmarks.quality accuracy --variants quest mine --apart --table table.tex
    python -m benchmarks.quality accuracy --data mine.jsonl --model MODEL --variants quest

Tasks of your own come by ``--data`` (see `examples`): their right answers are forced.
``--variants`` names presets, another package's, too, in place of those that are always run; with
``--apart`` each has its own pages and dense layers, in an engine of its own.

Everything passes through the real engine's decode path. Per model, stock vLLM answers every task
once (the reference, kept in benchmarks/results/.reference), then one retrieval engine, which serves
the methods of all variants to be run, answers it under each of them and every budget; its prefix
cache holds a task's prompts, so each is prefilled once. Every figure is stored when it is ready, so
an interrupted run picks up where it was. Exits with 1 when a criterion fails, with 2 when it could
not run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks import build
from benchmarks.cli import SMOLLM2, add_tokens
from benchmarks.common import RESULTS, Stopwatch, result_header
from benchmarks.quality.examples import read_examples
from benchmarks.quality.outside import code_of
from benchmarks.quality.table import add_tables, write_tables
from benchmarks.quality.tasks import catalogue, criteria, forced, report, scoring, variants
from benchmarks.quality.tasks.base import Task, novel_text
from benchmarks.quality.tasks.catalogue import Cell
from benchmarks.quality.tasks.engine import (
    BATCH,
    DTYPE,
    open_engine,
    prefix_cache_bytes,
    retrieval_counts,
    run_samples,
)
from benchmarks.quality.tasks.store import (
    References,
    Results,
    fingerprint,
    model_fingerprint,
    reference_key,
)
from benchmarks.quality.tasks.variant import Variant
from benchmarks.quality.tasks.variants import FULL
from benchmarks.worker_counts import corrected_share
from vllm_kvretrieval.calibration.asking import Questions, run_together
from vllm_kvretrieval.calibration.divergence import TOP_LOGPROBS, Generated
from vllm_kvretrieval.calibration.samples import Sample


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
        text = novel_text(tokenizer)
        weights = model_fingerprint(model)
        jobs = []
        for task in tasks:
            samples = task.build(text, task.context, count or task.samples)
            key = reference_key(weights, samples, DTYPE)
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
                if cell.variant.refusal(cell.budget):
                    continue
                stored = self._results.get(cell.name, self._cell_key(job, cell))
                if stored is None:
                    job.todo.append(cell)
                else:
                    self.figures[cell.name] = stored
        todo = [(job, cell) for job in jobs for cell in job.todo]
        while todo:  # one engine after the other
            engine = todo[0][1].variant.started
            chosen = [(job, cell) for job, cell in todo if cell.variant.started == engine]
            todo = [(job, cell) for job, cell in todo if cell.variant.started != engine]
            self._run_on(engine, chosen, model, tokenizer)

    def _run_on(
        self,
        engine: dict[str, Any],
        todo: list[tuple[Job, Cell]],
        model: Path,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Run cells, all of one task after the other, on a retrieval engine with these options."""
        self._say(f"{model.name}: starting the retrieval engine {engine} for {len(todo)} cell(s)")
        also = catalogue.also_of(cell for _, cell in todo)
        sizes = _sizes(model, [job for job, _ in todo], max(cell.budget for _, cell in todo))
        with open_engine(model, *sizes, also=also, **engine) as llm:
            done = 0
            for job, cells in _rounds(todo):
                watch = Stopwatch()
                label = f"{job.task.name} {' '.join(_short(cell) for cell in cells)}"
                done += len(cells)
                self._say(f"{label}: {len(job.samples)} samples ({done} of {len(todo)} cells)")
                before = retrieval_counts(llm)
                asked = [Questions(job.samples, c.options, c.variant.watches) for c in cells]
                answered = run_together(llm, asked, label)
                share = corrected_share(before, retrieval_counts(llm))
                for cell, results in zip(cells, answered, strict=True):
                    figures = {
                        **_label(job, cell.variant.name, cell.budget),
                        "apart": "method" in cell.variant.engine,
                        "share": scoring.mean_share(job.samples, cell.budget, cell.variant, model),
                        **scoring.index_bytes(cell.variant, model),
                        "corrected_share": share if cell.variant.speculates else None,
                        **scoring.score(job.samples, job.reference, results, tokenizer),
                        "seconds": round(watch.seconds, 1),
                    }
                    self._keep(cell.name, self._cell_key(job, cell), figures)

    def _cell_key(self, job: Job, cell: Cell) -> str:
        variant = cell.variant
        served = [variant.also, variant.started, code_of(variant.config.method)]
        return fingerprint([job.key, cell.options, *served, self._code])

    def _keep(self, name: str, key: str, cell: dict[str, Any]) -> None:
        self.figures[name] = cell
        self._results.put(name, key, cell)

    def _say(self, message: str) -> None:
        print(f"[{self._clock}] {message}", flush=True)


def _at_once(job: Job) -> int:
    """Cells of a task that fill a batch: the weights are read once a step for all of them."""
    return max(1, BATCH // max(1, len(job.samples)))


def _rounds(todo: Sequence[tuple[Job, Cell]]) -> Iterator[tuple[Job, list[Cell]]]:
    """Yield the cells that are run at once.

    A cell that speculates is run alone: the engine counts corrections of all requests together.
    """
    for job in {id(job): job for job, _ in todo}.values():
        cells = [cell for other, cell in todo if other is job]
        alone = [cell for cell in cells if cell.variant.speculates]
        others = [cell for cell in cells if not cell.variant.speculates]
        for size, group in ((_at_once(job), others), (1, alone)):
            yield from ((job, group[at : at + size]) for at in range(0, len(group), size))


def _short(cell: Cell) -> str:
    return f"{cell.variant.name} {cell.budget}"


def _sizes(model: Path, jobs: Sequence[Job], budget: int | None) -> tuple[int, int | None, int]:
    """Longest context, budget and KV cache of an engine that runs one of these jobs at a time."""
    context = max(sample.total for job in jobs for sample in job.samples)
    memory = (_at_once(job) * prefix_cache_bytes(model, job.samples) for job in jobs)
    return context, budget, max(memory)


def _label(job: Job, variant: str, budget: int | None) -> dict[str, Any]:
    return {
        "task": job.task.name,
        "model": job.task.model.name,
        "context": job.task.context,
        "variant": variant,
        "budget": budget,
        "samples": len(job.samples),
        "of_samples": job.key,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    names = [*variants.GROUPS, *(variant.name for variant in variants.VARIANTS)]
    add = parser.add_argument
    add("--list", action="store_true", help="show the tasks and the variants, and leave")
    add("--quick", action="store_true", help="the quick tier, a few minutes")
    add("--task", nargs="+", metavar="NAME", help="run these alone; by default all but the longest")
    add("--model", type=Path, metavar="PATH", help="put the tasks to this checkpoint instead")
    usual, quick = (" ".join(map(str, b)) for b in (catalogue.BUDGETS, catalogue.QUICK_BUDGETS))
    add_tokens(parser, "--budgets", None, "tokens attended to per decode step "
        f"(default: {usual}; of the quick tier: {quick})")  # fmt: skip
    groups = ", ".join(variants.GROUPS)
    add("--also", nargs="+", default=[], metavar="NAME|GROUP", choices=names,
        help=f"further variants (see --list), or groups of them: {groups}")  # fmt: skip
    add("--alone", action="store_true", help="run the variants of --also alone: without the core, "
        "with which they are compared, and without criteria")  # fmt: skip
    add("--variants", nargs="+", metavar="NAME", help="run these alone: variants, groups of them, "
        "or presets, another package's, too, in an engine of their own")  # fmt: skip
    add("--apart", action="store_true", help="each preset of --variants with its own pages and "
        "dense layers, as its paper has it, in an engine of its own")  # fmt: skip
    add("--data", type=Path, nargs="+", default=[], metavar="FILE", help="tasks of your own: a "
        'line of JSON per sample, such as {"input": "...", "outputs": ["..."]}')  # fmt: skip
    add("--samples", type=int, metavar="N", help="samples per task; by default as --list shows")
    add_tables(parser)
    add("--output", type=Path, metavar="FILE", help="result file (JSON); by default accuracy.json, "
        "accuracy-quick.json or accuracy-apart.json, in benchmarks/results")  # fmt: skip


def _tasks(options: argparse.Namespace) -> Sequence[Task]:
    """The tasks of the options; ends the program where these are wrong."""
    if options.samples is not None and options.samples < 1:
        options.usage_error(f"--samples {options.samples}: at least 1 is needed")
    if options.budgets is None:
        options.budgets = catalogue.QUICK_BUDGETS if options.quick else catalogue.BUDGETS
    if min(options.budgets) < 1:
        options.usage_error(f"--budgets {min(options.budgets)}: budgets are positive numbers")
    tasks: Sequence[Task] = catalogue.QUICK_TASKS if options.quick else catalogue.TASKS
    if options.task or options.list:
        tasks = (*tasks, *catalogue.MORE_TASKS)
    if options.model is not None:
        tasks = catalogue.with_model(tasks, options.model)
    known = {task.name: task for task in tasks}
    unknown = [name for name in options.task or () if name not in known]
    if unknown:
        options.usage_error(f"no task {', '.join(unknown)}; there are: {', '.join(known)}")
    asked = options.task or (() if options.data else known)
    return [*(known[name] for name in asked), *_own_tasks(options)]


def _own_tasks(options: argparse.Namespace) -> Iterator[Task]:
    """The tasks of the files of ``--data``.

    Raises:
        ValueError: a line of a file is no example.
    """
    if options.data:
        model = options.model or SMOLLM2
        model_fingerprint(model)  # which says what to do if there is none
        text = novel_text(AutoTokenizer.from_pretrained(model))
        for path in options.data:
            for name, examples in read_examples(path).items():
                longest = max(forced.answer(text, example).total for example in examples)
                yield catalogue.of_examples(name, examples, model, longest)


def _check_budgets(
    options: argparse.Namespace, compared: Sequence[Variant], budgets: Sequence[int]
) -> None:
    """End the program where a variant has no use for a budget; engines start one after another.

    With ``--variants`` it is left out at this budget, if it has a use for another one.
    """
    for variant in compared:
        refused = {budget: why for budget in budgets if (why := variant.refusal(budget))}
        if refused and (options.variants is None or len(refused) == len(budgets)):
            options.usage_error(next(iter(refused.values())))
        for budget, why in refused.items():
            print(f"{variant.name} is left out at {budget}: {why}")


def _list_tasks(tasks: Sequence[Task]) -> None:
    for task in tasks:
        print(
            f"{task.name:22}{task.samples:4} samples  context {task.context:6}  "
            f"{task.model.name:30}{', '.join(task.checks)}"
        )
    for variant in (FULL, *variants.VARIANTS):
        print(f"{variant.name:22}{variant.meaning} [{', '.join(variant.groups) or 'always'}]")


def run(options: argparse.Namespace) -> int:
    """Measure, print and store; returns 1 where a criterion fails."""
    tasks, budgets = _tasks(options), tuple(sorted(set(options.budgets)))
    if options.alone and not options.also:
        options.usage_error("--alone runs the variants of --also alone; name some")
    if options.variants is not None and (options.also or options.alone):
        options.usage_error("--variants are run alone; leave --also and --alone out")
    if options.apart and options.variants is None:
        options.usage_error("--apart: name the presets by --variants")
    if options.alone or options.variants is not None:
        tasks = [replace(task, checks=()) for task in tasks]
    if options.list:
        _list_tasks(tasks)
        return 0
    clock = Stopwatch()
    kind = "-quick" if options.quick else "-apart" if options.apart else ""
    output = options.output or RESULTS / f"accuracy{kind}.json"
    header = {
        **result_header("benchmarks.quality"),
        "settings": {"batch": BATCH, "top_logprobs": TOP_LOGPROBS, "dtype": DTYPE},
    }
    results = Results(output, header)
    references = References(RESULTS / ".reference")
    if options.variants is None:
        compared = variants.chosen(options.quick, options.also, options.alone)
    else:
        try:
            compared = variants.named(options.variants, options.apart)
        except ValueError as error:
            options.usage_error(str(error))
    _check_budgets(options, compared, budgets)
    benchmark = Benchmark(results, references, budgets, compared)
    for model in dict.fromkeys(task.model for task in tasks):
        benchmark.run(model, [task for task in tasks if task.model == model], options.samples)
    verdict = criteria.check(tasks, budgets, benchmark.figures)
    print(f"\n{report.table(tasks, budgets, benchmark.figures)}")
    print(f"results: {output}\ntime:    {clock}")
    write_tables(options.table, benchmark.figures.values())
    results.print_builds()
    print(report.verdicts(verdict))
    return 1 if any(criterion.passed is False for criterion in verdict) else 0
