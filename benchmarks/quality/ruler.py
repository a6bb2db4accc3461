"""RULER, the field's benchmark: how well the presets of KV retrieval answer its 13 tasks.

    python -m benchmarks.quality ruler --task vt cwe --budgets 128 512
    python -m benchmarks.quality ruler --variants kvretrieval --prefill-budgets 2048 --budgets 1024
    python -m benchmarks.quality ruler --variants kvretrieval --prefill-budgets 2048 2048+25%
    python -m benchmarks.quality ruler --variants razor snapkv h2o --budgets 512

The samples come from RULER's published generator (see `ruler_tasks.generator`), in its own prompt
template and with its own scores. One engine answers them all: full attention first, as
requests that ask for it (``exact``, by our own kernel or vLLM's), which prefills the prompts of a
task; every preset at every budget then takes them from the prefix cache. With
``--prefill-budgets`` prompts that retrieve are compared with these: each budget reads the prompts
once more, for steps with full attention and for steps at every budget. Variants are
put only to tasks that full attention scores above 30 in. Every figure is stored when it is ready,
so an interrupted run picks up where it was. Exits with 1 when the criterion fails, with 2 when the
program could not run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from vllm import LLM

from benchmarks import build
from benchmarks.cli import QWEN, add_model, add_output, add_tokens
from benchmarks.common import Stopwatch, machine, result_header, versions
from benchmarks.models import kv_bytes_per_token
from benchmarks.quality.ruler_tasks import catalogue, report
from benchmarks.quality.ruler_tasks.catalogue import FULL, RulerTask, Variant
from benchmarks.quality.ruler_tasks.decoding import answer, cache_tokens
from benchmarks.quality.ruler_tasks.generator import (
    PACKAGE,
    TEMPLATE,
    Generator,
    RulerSample,
)
from benchmarks.quality.tasks.engine import DTYPE, open_engine
from benchmarks.quality.tasks.prefill_budget import EXACTLY, PrefillBudget, prefill_budget
from benchmarks.quality.tasks.report import verdicts
from benchmarks.quality.tasks.store import Results, fingerprint, model_fingerprint

BATCH = 10
"""Requests at once."""

PAGE = 32
"""Tokens of a page, or a multiple of them."""

_ROOM = 1.1
"""Blocks of the KV cache per block that the largest task fills."""


@dataclass(frozen=True)
class Job:
    """One task made ready."""

    task: RulerTask
    samples: list[RulerSample]
    key: str
    """A digest of model, engine, samples and the CPU's instruction set; part of a cell's key."""


@dataclass(frozen=True)
class Setup:
    """The tasks of a run, and the model that answers them."""

    model: Path
    context: int
    samples: int
    budgets: tuple[int, ...]
    variants: tuple[Variant, ...]
    show: bool
    """Print every answer beside what it should contain."""

    further: dict[str, Any]
    """Further options of the engine."""

    @property
    def asked(self) -> list[tuple[Variant, int | None]]:
        """Variants and budgets beside full attention; None: steps attend to everything. Those after
        the same prompts are adjacent."""
        return [
            (variant, budget)
            for variant in self.variants
            for budget in ((None,) if variant.prefill.tokens else ()) + self.budgets
        ]

    @property
    def engine(self) -> dict[str, Any]:
        """Options of the engine, beside its budget."""
        return catalogue.engine_options(self.variants) | self.further


class Benchmark:
    """Puts the tasks to the engine, one after the other, and keeps their scores."""

    def __init__(self, results: Results, setup: Setup) -> None:
        self._results = results
        self._setup = setup
        self._code = build.code_fingerprint()
        self._clock = Stopwatch()
        self._llm: LLM | None = None
        self._jobs: list[Job] = []
        self._prompts: tuple[str, PrefillBudget] | None = None
        """The task whose prompts the prefix cache holds, and their prefill budget."""

        self.cells: dict[tuple[str, str, int | None], dict[str, Any]] = {}
        """This setup's cells by task, variant and budget."""

    def run(self, tasks: Sequence[RulerTask]) -> None:
        """Run the tasks; what is stored already is taken from there."""
        self._jobs = self._prepare(tasks)
        for job in self._jobs:
            for variant, budget in [(FULL, None), *self._setup.asked]:
                name, key = self._name(job, variant, budget), self._key(job, variant, budget)
                if (stored := self._results.get(name, key)) is not None:
                    self.cells[job.task.name, variant.name, budget] = stored
        with ExitStack() as stack:
            for job in self._jobs:
                self._run_task(job, stack)

    def _prepare(self, tasks: Sequence[RulerTask]) -> list[Job]:
        setup = self._setup
        weights = model_fingerprint(setup.model)
        tokenizer = AutoTokenizer.from_pretrained(setup.model)
        generator = Generator(setup.model, setup.context)
        jobs = []
        for number, task in enumerate(tasks, 1):
            if not generator.has(task.name, setup.samples):
                self._say(f"{task.name}: RULER makes samples (task {number} of {len(tasks)})")
                generator.make(task.name, setup.samples)
            samples = generator.read(task.name, setup.samples, tokenizer)
            content = [asdict(sample) for sample in samples]
            engine = [DTYPE, versions().get("vllm", "unknown"), machine()["isa"]]
            key = [weights, engine, task.tokens, content]
            jobs.append(Job(task, samples, fingerprint(key)))
        return jobs

    def _run_task(self, job: Job, stack: ExitStack) -> None:
        """Run what is missing of a task; `stack` closes the engine that this may start."""
        task = job.task
        full = self.cells.get((task.name, FULL.name, None))
        if full is None:
            full = self._run_cell(job, FULL, None, stack)
        if not report.counts(full):
            self._say(f"{task.name}: full attention scores {full['score']:.1f}, it does not count")
            return
        for variant, budget in self._setup.asked:
            if (task.name, variant.name, budget) in self.cells:
                continue
            if self._prompts != (task.name, variant.prefill) and not variant.watches:
                self._say(f"{task.name}: prompts ({self._left()})")
                llm, label = self._engine(stack), f"{task.name} prompts"
                # Prompts that retrieve would begin with blocks that others have read.
                llm.reset_prefix_cache()
                options = self._options(variant, None) if variant.prefill.tokens else FULL.options
                answer(llm, job.samples, options, task.metric, 1, label)
                self._prompts = task.name, variant.prefill
            self._run_cell(job, variant, budget, stack)

    def _run_cell(
        self, job: Job, variant: Variant, budget: int | None, stack: ExitStack
    ) -> dict[str, Any]:
        llm, task = self._engine(stack), job.task
        label = " ".join([task.name, variant.name, *([] if budget is None else [str(budget)])])
        self._say(f"{label}: {len(job.samples)} samples ({self._left()})")
        watch = Stopwatch()
        options = self._options(variant, budget)
        anew = variant.watches
        answers = answer(llm, job.samples, options, task.metric, task.tokens, label, anew)
        self._prompts = task.name, variant.prefill
        if self._setup.show:
            for sample, text in zip(job.samples, answers.texts, strict=True):
                print(f"  {' | '.join(sample.references)}: {text!r}", flush=True)
        cell = {
            "task": task.name,
            "model": self._setup.model.name,
            "context": self._setup.context,
            "variant": variant.name,
            "budget": budget,
            "samples": len(job.samples),
            "score": 100 * statistics.fmean(answers.scores),
            "scores": [round(100 * score, 2) for score in answers.scores],
            "tokens": answers.tokens,
            "prefilled": answers.prefilled,
            "seconds": round(watch.seconds, 1),
        }
        self.cells[task.name, variant.name, budget] = cell
        self._results.put(self._name(job, variant, budget), self._key(job, variant, budget), cell)
        return cell

    def _engine(self, stack: ExitStack) -> LLM:
        """The engine, started when it is first needed."""
        if self._llm is None:
            setup = self._setup
            self._say(f"{setup.model.name}: starting the engine")
            room = max(cache_tokens(job.samples, job.task.tokens) for job in self._jobs)
            numbers = kv_bytes_per_token(AutoConfig.from_pretrained(setup.model))
            width = 2 if DTYPE == "float32" else 1  # the former counts 16 bits each
            longest, sparsely = self._longest, "prefill_budget" in setup.engine
            self._llm = stack.enter_context(
                open_engine(
                    setup.model,
                    longest,
                    max([*setup.budgets, *([self._whole] if sparsely else [])]),
                    kv_cache_bytes=int(_ROOM * room * numbers * width),
                    batch=min(BATCH, setup.samples),
                    **setup.engine,
                )
            )
        return self._llm

    def _options(self, variant: Variant, budget: int | None) -> dict[str, Any]:
        """A request's options."""
        if variant is FULL:
            return variant.options
        prefill: dict[str, float] = {"prefill_budget": variant.prefill.tokens}
        if any(each.prefill.share for each in self._setup.variants):
            prefill["prefill_share"] = variant.prefill.share
        return variant.options | prefill | {"budget": budget or self._whole}

    @property
    def _longest(self) -> int:
        """Tokens of the longest context."""
        return max(len(s.prompt) + job.task.tokens for job in self._jobs for s in job.samples)

    @property
    def _whole(self) -> int:
        """The budget of steps with full attention, in whole pages."""
        return -(-self._longest // PAGE) * PAGE

    def _left(self) -> str:
        """The number of cells to run, and an estimate of the time, from the stored ones."""
        readings = cells = 0
        for job in self._jobs:
            full = self.cells.get((job.task.name, FULL.name, None))
            if full is not None and not report.counts(full):
                continue
            missing = [
                variant.prefill
                for variant, budget in self._setup.asked
                if (job.task.name, variant.name, budget) not in self.cells
            ]
            cells += len(missing)
            read = {*missing, EXACTLY} if full is None else {*missing}
            readings += len({(job.task.name, prefill) for prefill in read} - {self._prompts})
        text = f"{cells} cells and {readings} readings of prompts to go"
        known = [(cell["variant"] == FULL.name, cell["seconds"]) for cell in self.cells.values()]
        of_prompts = [seconds for full, seconds in known if full]
        of_cells = [seconds for full, seconds in known if not full]
        if of_prompts and of_cells:
            seconds = readings * statistics.fmean(of_prompts) + cells * statistics.fmean(of_cells)
            text += f", about {seconds / 60:.0f} min"
        return text

    def _name(self, job: Job, variant: Variant, budget: int | None) -> str:
        parts = [self._setup.model.name, self._setup.context, job.task.name, variant.name]
        return "/".join(str(part) for part in [*parts, "all" if budget is None else budget])

    def _key(self, job: Job, variant: Variant, budget: int | None) -> str:
        """Also full attention depends on the plug-in's code: our own kernel may compute it."""
        setup = self._setup
        alone = setup.engine == {"also": {}}  # its pages are smaller then
        options = [
            variant.options,
            variant.prefill,
            budget,
            setup.engine.get("method"),
            variant.engine,
        ]
        return fingerprint([job.key, *options, alone, setup.further, self._code])

    def _say(self, message: str) -> None:
        print(f"[{self._clock}] {message}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    tasks = [task.name for task in catalogue.TASKS]
    variants = [variant.name for variant in catalogue.VARIANTS]
    known = [variant.name for variant in catalogue.KNOWN]
    add = parser.add_argument
    add("--list", action="store_true", help="show tasks and presets, and leave")
    add("--task", nargs="+", metavar="NAME", choices=tasks, default=tasks, help="tasks")
    add("--variants", nargs="*", metavar="NAME", choices=known, default=variants,
        help="presets beside full attention")  # fmt: skip
    add_tokens(parser, "--budgets", catalogue.BUDGETS, "tokens attended to per decode step")
    add("--prefill-budgets", nargs="+", type=prefill_budget, default=(),
        metavar="N[+SHARE%][=][@DEPTH%]", help="values of prefill_budget that prompts are "
        "read with, too, for kvretrieval; 2048+25%%=@70%% has a prefill_share of 0.25, uniform "
        "prefill_budget_shares and a prefill_depth of 0.7")  # fmt: skip
    add("--options", type=json.loads, default={}, metavar="JSON", help="further options of the "
        "engine")  # fmt: skip
    add("--context", type=int, metavar="TOKENS", default=catalogue.CONTEXT,
        help="length of a prompt and its answer, RULER's max_seq_length")  # fmt: skip
    add("--samples", type=int, metavar="N", default=catalogue.SAMPLES, help="samples per task")
    add("--show", action="store_true", help="print every answer beside what it should contain")
    add_model(parser, QWEN)
    add_output(parser, "ruler.json")


def _list() -> None:
    for task in catalogue.TASKS:
        print(f"{task.name:18}{task.short:5}{task.tokens:4} tokens  {task.metric.__name__}")
    for variant in (FULL, *catalogue.KNOWN):
        print(f"{variant.name:18}{variant.meaning}")


def run(options: argparse.Namespace) -> int:
    """Measure, print and store; returns 1 where the criterion fails."""
    if options.list:
        _list()
        return 0
    for name, least in (("samples", 1), ("context", catalogue.CONTEXT)):
        if getattr(options, name) < least:
            options.usage_error(f"--{name} {getattr(options, name)}: at least {least} is needed")
    for flag, budgets in (
        ("budgets", options.budgets),
        ("prefill-budgets", [budget.tokens for budget in options.prefill_budgets]),
    ):
        if (least := min(budgets, default=1)) < 1:
            options.usage_error(f"--{flag} {least}: budgets are positive numbers")
    clock = Stopwatch()
    variants = (
        *(variant for variant in catalogue.KNOWN if variant.name in options.variants),
        *map(catalogue.prefilling, sorted(set(options.prefill_budgets), key=lambda of: of[:2])),
    )
    try:
        catalogue.engine_options(variants)
    except ValueError as error:
        options.usage_error(str(error))
    setup = Setup(
        options.model,
        options.context,
        options.samples,
        tuple(sorted(set(options.budgets))),
        variants,
        options.show,
        options.options,
    )
    tasks = [task for task in catalogue.TASKS if task.name in options.task]
    settings = {"ruler": PACKAGE, "template": TEMPLATE, "batch": BATCH, "dtype": DTYPE}
    header = {**result_header("benchmarks.quality"), "settings": settings}
    results = Results(options.output, header)
    benchmark = Benchmark(results, setup)
    benchmark.run(tasks)
    budgets, cells = setup.budgets, benchmark.cells
    print(f"\n{setup.model.name}, {PACKAGE}, template {TEMPLATE}, {setup.context:,} tokens\n")
    print(report.table(tasks, budgets, cells), *report.notes(tasks, cells), sep="\n")
    print(f"\n{report.published(budgets)}\n")
    print(f"results: {options.output}\ntime:    {clock}")
    results.print_builds()
    verdict = report.criteria(tasks, budgets, cells)
    print(verdicts(verdict))
    return 1 if any(criterion.passed is False for criterion in verdict) else 0
