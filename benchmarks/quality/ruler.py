"""RULER, the field's benchmark: how well the presets of KV retrieval answer its 13 tasks.

    python -m benchmarks.quality ruler --task vt cwe --budgets 128 512
    python -m benchmarks.quality ruler --variants kvretrieval --prefill-budgets 2048 --budgets 1024
    python -m benchmarks.quality ruler --variants kvretrieval --prefill-budgets 2048 2048+25%
    python -m benchmarks.quality ruler --variants razor snapkv h2o --budgets 512
    python -m benchmarks.quality ruler --variants quest fier mine --apart --table table.tex
    python -m benchmarks.quality ruler --task table_to_json --data mine.jsonl --variants quest

The samples come from RULER's published generator (see `ruler_tasks.generator`), in its own prompt
template and with its own scores. One engine answers most of them: full attention first, as
requests that ask for it (``exact``, by our own kernel or vLLM's), which prefills the prompts of a
task; every preset at every budget then takes them from the prefix cache. There all presets share
pages and dense layers. Presets that need an engine of their own get one afterwards; with
``--apart`` all do, and full attention, too, so that each has pages and dense layers of its paper.
With ``--prefill-budgets`` prompts that retrieve are compared with these: each budget reads the
prompts once more, for steps with full attention and for steps at every budget.

``--task`` takes tasks that need much of their prompts, too (see `intensive`), and ``--data`` tasks
of your own (see `examples`). Variants are put only to tasks that full attention scores above 30 in,
or above 0 in these. Every figure is stored when it is ready, so an interrupted run picks up where
it was. Exits with 1 when the criterion fails, with 2 when the program could not run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from vllm import LLM

from benchmarks import build
from benchmarks.cli import QWEN, add_model, add_tokens
from benchmarks.common import RESULTS, Stopwatch, machine, result_header, versions
from benchmarks.models import kv_bytes_per_token
from benchmarks.quality.examples import read_examples
from benchmarks.quality.outside import code_of
from benchmarks.quality.ruler_tasks import catalogue, report
from benchmarks.quality.ruler_tasks.catalogue import (
    ENGINE_METHOD,
    FULL,
    Group,
    RulerTask,
    Variant,
    of_examples,
)
from benchmarks.quality.ruler_tasks.decoding import answer, cache_tokens
from benchmarks.quality.ruler_tasks.generator import (
    PACKAGE,
    TEMPLATE,
    Generator,
    RulerSample,
)
from benchmarks.quality.table import add_tables, write_tables
from benchmarks.quality.tasks.engine import DTYPE, open_engine
from benchmarks.quality.tasks.prefill_budget import EXACTLY, PrefillBudget, prefill_budget
from benchmarks.quality.tasks.report import verdicts
from benchmarks.quality.tasks.store import Results, fingerprint, model_fingerprint
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.presets import presets

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
    groups: tuple[Group, ...]
    """The variants, by the engines that answer them; the first one answers with full attention."""

    show: bool
    """Print every answer beside what it should contain."""

    further: dict[str, Any]
    """Further options of the engines."""

    @property
    def variants(self) -> list[Variant]:
        """Those of all engines, beside full attention."""
        return [variant for group in self.groups for variant in group.variants]

    def asked(self, group: Group) -> list[tuple[Variant, int | None]]:
        """Variants and budgets of an engine; None: steps attend to everything. Those after the same
        prompts are adjacent."""
        return [
            (variant, budget)
            for variant in group.variants
            for budget in ((None,) if variant.prefill.tokens else ()) + self.budgets_of(variant)
        ]

    def budgets_of(self, variant: Variant) -> tuple[int | None, ...]:
        """The budgets that a variant has a use for: sink, window and a page have to fit in."""
        if variant.whole:
            return (None,)
        return tuple(budget for budget in self.budgets if not self.refusal(variant, budget))

    def refusal(self, variant: Variant, budget: int) -> str:
        """Why a variant has no use for a budget; empty: it has."""
        (options,) = (group.options for group in self.groups if variant in group.variants)
        options = options | self.further
        method = options.pop("method", ENGINE_METHOD)
        try:
            config = RetrievalConfig.from_options(method, options | {"budget": budget})
            config.page_budget(budget, variant.method)
        except RetrievalConfigError as error:
            return str(error)
        return ""


class Benchmark:
    """Puts the tasks to the engines, one after the other, and keeps their scores."""

    def __init__(self, results: Results, setup: Setup) -> None:
        self._results = results
        self._setup = setup
        self._code = build.code_fingerprint()
        self._clock = Stopwatch()
        self._group = setup.groups[0]
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
            for group in self._setup.groups:
                full = [(FULL, None)] if group is self._setup.groups[0] else []
                for variant, budget in [*full, *self._setup.asked(group)]:
                    name = self._name(job, variant, budget)
                    stored = self._results.get(name, self._key(job, group, variant, budget))
                    if stored is not None:
                        self.cells[job.task.name, variant.name, budget] = stored
        for group in self._setup.groups:
            self._group, self._llm, self._prompts = group, None, None
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
            if task.make is not None:
                task = self._made(task, tokenizer)
            if task.examples:
                samples = [
                    RulerSample(tuple(tokenizer(each.input).input_ids), each.outputs)
                    for each in task.examples
                ]
            else:
                if not generator.has(task.name, setup.samples):
                    self._say(f"{task.name}: RULER makes samples (task {number} of {len(tasks)})")
                    generator.make(task.name, setup.samples)
                samples = generator.read(task.name, setup.samples, tokenizer)
            content = [asdict(sample) for sample in samples]
            engine = [DTYPE, versions().get("vllm", "unknown"), machine()["isa"]]
            scored = [task.metric.__name__] if task.examples else []
            key = [weights, engine, task.tokens, content, *scored]
            jobs.append(Job(task, samples, fingerprint(key)))
        return jobs

    def _made(self, task: RulerTask, tokenizer: Any) -> RulerTask:
        """A task with the examples that it makes for this model."""

        def tokens(text: str) -> Any:
            return tokenizer(text).input_ids

        assert task.make is not None
        examples = task.make(tokens, self._setup.context, self._setup.samples)
        most = max(example.tokens for example in examples)
        return replace(task, tokens=most, examples=tuple(examples))

    def _run_task(self, job: Job, stack: ExitStack) -> None:
        """Run what is missing of a task; `stack` closes the engine that this may start."""
        task = job.task
        full = self.cells.get((task.name, FULL.name, None))
        if full is None:
            full = self._run_cell(job, FULL, None, stack)
        if not report.counts(task, full):
            self._say(f"{task.name}: full attention scores {full['score']:.1f}, it does not count")
            return
        for variant, budget in self._setup.asked(self._group):
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
            "of_samples": job.key,
            "apart": "method" in self._group.options,
            "tokens": answers.tokens,
            "prefilled": answers.prefilled,
            "seconds": round(watch.seconds, 1),
        }
        self.cells[task.name, variant.name, budget] = cell
        key = self._key(job, self._group, variant, budget)
        self._results.put(self._name(job, variant, budget), key, cell)
        return cell

    def _engine(self, stack: ExitStack) -> LLM:
        """The engine of the group, started when it is first needed."""
        if self._llm is None:
            setup, options = self._setup, self._group.options | self._setup.further
            said = "" if options.get("method") is None else f" with {options['method']}"
            self._say(f"{setup.model.name}: starting the engine{said}")
            room = max(cache_tokens(job.samples, job.task.tokens) for job in self._jobs)
            numbers = kv_bytes_per_token(AutoConfig.from_pretrained(setup.model))
            width = 2 if DTYPE == "float32" else 1  # the former counts 16 bits each
            longest, sparsely = self._longest, "prefill_budget" in options
            self._llm = stack.enter_context(
                open_engine(
                    setup.model,
                    longest,
                    max([*setup.budgets, *([self._whole] if sparsely else [])]),
                    kv_cache_bytes=int(_ROOM * room * numbers * width),
                    batch=min(BATCH, max(len(job.samples) for job in self._jobs)),
                    **options,
                )
            )
        return self._llm

    def _options(self, variant: Variant, budget: int | None) -> dict[str, Any]:
        """A request's options."""
        if variant is FULL:
            return variant.options
        if variant.whole:
            return variant.options
        prefill: dict[str, float] = {"prefill_budget": variant.prefill.tokens}
        if any(each.prefill.share for each in self._group.variants):
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
            if full is not None and not report.counts(job.task, full):
                continue
            missing = [
                (number, variant.prefill)
                for number, group in enumerate(self._setup.groups)
                for variant, budget in self._setup.asked(group)
                if (job.task.name, variant.name, budget) not in self.cells
            ]
            cells += len(missing)
            read = {*missing, (0, EXACTLY)} if full is None else {*missing}
            now = self._setup.groups.index(self._group)
            held = self._prompts and self._prompts[0] == job.task.name and (now, self._prompts[1])
            readings += len(read - {held})
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

    def _key(self, job: Job, group: Group, variant: Variant, budget: int | None) -> str:
        """Also full attention depends on the plug-in's code: our own kernel may compute it."""
        setup = self._setup
        alone = group.options == {"also": {}}  # its pages are smaller then
        options = [
            variant.options,
            variant.prefill,
            budget,
            group.options.get("method"),
            variant.engine,
            code_of(variant.method),
        ]
        return fingerprint([job.key, *options, alone, setup.further, self._code])

    def _say(self, message: str) -> None:
        print(f"[{self._clock}] {message}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    tasks = [task.name for task in (*catalogue.TASKS, *catalogue.INTENSIVE)]
    variants = [variant.name for variant in catalogue.VARIANTS]
    add = parser.add_argument
    add("--list", action="store_true", help="show tasks and presets, and leave")
    add("--task", nargs="+", metavar="NAME", choices=tasks,
        help="tasks (default: RULER's 13, unless there is --data)")  # fmt: skip
    add("--data", type=Path, nargs="+", default=[], metavar="FILE", help="tasks of your own: a "
        'line of JSON per sample, such as {"input": "...", "outputs": ["..."]}')  # fmt: skip
    add(
        "--variants",
        nargs="*",
        metavar="NAME",
        default=variants,
        help="presets beside full attention (see --list), another package's, too",
    )
    add("--apart", action="store_true", help="an engine for each preset, where it has its own "
        "pages and dense layers: as its paper has it")  # fmt: skip
    add_tokens(parser, "--budgets", catalogue.BUDGETS, "tokens attended to per decode step")
    add("--prefill-budgets", nargs="+", type=prefill_budget, default=(),
        metavar="N[+SHARE%][=][@DEPTH%]", help="values of prefill_budget that prompts are "
        "read with, too, for kvretrieval; 2048+25%%=@70%% has a prefill_share of 0.25, uniform "
        "prefill_budget_shares and a prefill_depth of 0.7")  # fmt: skip
    add("--options", type=json.loads, default={}, metavar="JSON", help="further options of the "
        "engine")  # fmt: skip
    add("--context", type=int, metavar="TOKENS", default=catalogue.CONTEXT,
        help="length of a prompt and its answer, RULER's max_seq_length")  # fmt: skip
    add("--samples", type=int, metavar="N", default=catalogue.SAMPLES, help="samples per task; a "
        "file has its own")  # fmt: skip
    add("--show", action="store_true", help="print every answer beside what it should contain")
    add_tables(parser)
    add_model(parser, QWEN)
    add("--output", type=Path, metavar="FILE", help="result file (JSON); by default ruler.json, or "
        "ruler-apart.json, in benchmarks/results")  # fmt: skip


def _list() -> None:
    for task in (*catalogue.TASKS, *catalogue.INTENSIVE):
        tokens = f"{task.tokens:4} tokens" if task.tokens else "as long as its answer"
        print(f"{task.name:18}{task.short:5}{tokens}  {task.metric.__name__}")
    for variant in (FULL, *catalogue.KNOWN):
        print(f"{variant.name:18}{variant.meaning}")
    known = {variant.name for variant in catalogue.KNOWN}
    for name, preset in presets().items():
        if name not in known:
            print(f"{name:18}{preset.summary}, in an engine of its own")


def _tasks(options: argparse.Namespace) -> list[RulerTask]:
    """The tasks of the options, those of files last.

    Raises:
        ValueError: A file is not well formed, or two tasks have one name.
    """
    names = options.task if options.task or options.data else [t.name for t in catalogue.TASKS]
    known = (*catalogue.TASKS, *catalogue.INTENSIVE)
    found = [task for task in known if task.name in (names or ())]
    for path in options.data:
        found += [of_examples(name, each) for name, each in read_examples(path).items()]
    for task in found:
        if sum(other.name == task.name for other in found) > 1:
            raise ValueError(f'two tasks are called {task.name}; a line may name its "task"')
    return found


def run(options: argparse.Namespace) -> int:
    """Measure, print and store; returns 1 where the criterion fails."""
    if options.list:
        _list()
        return 0
    tasks = _tasks(options)
    of_ruler = any(task.make is None and not task.examples for task in tasks)
    least_context = catalogue.CONTEXT if of_ruler else 1
    for name, least in (("samples", 1), ("context", least_context)):
        if getattr(options, name) < least:
            options.usage_error(f"--{name} {getattr(options, name)}: at least {least} is needed")
    for flag, budgets in (
        ("budgets", options.budgets),
        ("prefill-budgets", [budget.tokens for budget in options.prefill_budgets]),
    ):
        if (least := min(budgets, default=1)) < 1:
            options.usage_error(f"--{flag} {least}: budgets are positive numbers")
    clock = Stopwatch()
    try:
        variants = (
            *catalogue.named(options.variants, options.apart),
            *map(catalogue.prefilling, sorted(set(options.prefill_budgets), key=lambda of: of[:2])),
        )
        groups = catalogue.grouped(variants, options.apart)
    except ValueError as error:
        options.usage_error(str(error))
    setup = Setup(
        options.model,
        options.context,
        options.samples,
        tuple(sorted(set(options.budgets))),
        tuple(groups),
        options.show,
        options.options,
    )
    _check_budgets(options, setup)
    settings = {"ruler": PACKAGE, "template": TEMPLATE, "batch": BATCH, "dtype": DTYPE}
    header = {**result_header("benchmarks.quality"), "settings": settings}
    output = options.output or RESULTS / f"ruler{'-apart' if options.apart else ''}.json"
    results = Results(output, header)
    benchmark = Benchmark(results, setup)
    benchmark.run(tasks)
    budgets, cells = setup.budgets, benchmark.cells
    source = f"{PACKAGE}, template {TEMPLATE}, " if of_ruler else ""
    print(f"\n{setup.model.name}, {source}{setup.context:,} tokens\n")
    print(report.table(tasks, budgets, cells), *report.notes(tasks, cells), sep="\n")
    if of_ruler:
        print(f"\n{report.published(budgets)}")
    print(f"\nresults: {output}\ntime:    {clock}")
    write_tables(options.table, cells.values())
    results.print_builds()
    verdict = report.criteria(tasks, budgets, cells)
    print(verdicts(verdict))
    return 1 if any(criterion.passed is False for criterion in verdict) else 0


def _check_budgets(options: argparse.Namespace, setup: Setup) -> None:
    """Say which budgets a variant is left out at; end the program where it has a use for none."""
    for variant in setup.variants:
        if variant.whole:
            continue
        refused = [budget for budget in setup.budgets if budget not in setup.budgets_of(variant)]
        if refused:
            why = f"--budgets for {variant.name}: {setup.refusal(variant, refused[-1])}"
            if len(refused) == len(setup.budgets):
                options.usage_error(why)
            print(f"{variant.name} is left out at {', '.join(map(str, refused))}: {why}")
