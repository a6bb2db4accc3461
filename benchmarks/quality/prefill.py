"""Savings and costs of sparse prefill (``prefill_budget``), beside exact prefill.

    python -m benchmarks.quality prefill --contexts 8192 --settings 2048:512
    python -m benchmarks.quality prefill --method kvretrieval --settings 2048+25%@70%:128:8

Per setting one engine. At each context a document is prefilled, timed by its first token, and then
the model is forced through continuations of it, whose distributions are compared with those after
exact prefill: the novel's own next tokens, and four passages from earlier in the document once
more. Decoding is exact in all of them, so any difference comes from prefill. Exact prefill is timed
and asked once per context, by the first engine that needs it, right before its own. Every cell is
stored when it is ready, so an interrupted run picks up where it was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from benchmarks import build
from benchmarks.cli import SMOLLM2_32K, add_model, add_output, add_tokens
from benchmarks.common import RESULTS, Stopwatch, result_header
from benchmarks.quality.tasks.base import novel_text
from benchmarks.quality.tasks.engine import (
    DTYPE,
    open_engine,
    prefix_cache_bytes,
    retrieval_counts,
    run_samples,
)
from benchmarks.quality.tasks.forced import COPIES, novel, second_copy
from benchmarks.quality.tasks.prefill_budget import prefill_budget
from benchmarks.quality.tasks.store import (
    References,
    Results,
    fingerprint,
    model_fingerprint,
    reference_key,
)
from benchmarks.tables import prompts
from vllm_kvretrieval.calibration.divergence import Generated, Scored, forced_scores
from vllm_kvretrieval.calibration.samples import Sample, TokenText

CONTEXTS = (8192, 16384, 32512)  # answers beyond the last still fit in the model's 32K
SETTINGS = ("1024:512", "2048:512", "4096:512")
PAGE = 32
PREFILL_OPTIONS = (
    "prefill_budget",
    "prefill_chunk",
    "prefill_queries",
    "prefill_sampling",
    "prefill_pooling",
)
EXACT = {"exact": True}


@dataclass(frozen=True)
class Setting:
    """A setting of an engine: the values of ``PREFILL_OPTIONS``, the last ones may be left out.

    The budget may name a ``prefill_share`` and a ``prefill_depth``, and equal shares of KV heads.
    """

    text: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Setting:
        first, *others = text.split(":")
        budget = prefill_budget(first)
        values = [budget.tokens, *(int(part) if part.isdecimal() else part for part in others)]
        if not 2 <= len(values) <= len(PREFILL_OPTIONS):
            raise ValueError
        options: dict[str, Any] = dict(zip(PREFILL_OPTIONS, values, strict=False))
        if budget.share:
            options["prefill_share"] = budget.share
        return cls(text, options | budget.of_engine)

    def __str__(self) -> str:
        return self.text

    @property
    def chunk(self) -> int:
        """Tokens that share one selection."""
        return int(self.options["prefill_chunk"])


@dataclass(frozen=True)
class Document:
    """A prompt and the tokens that are forced after it."""

    context: int
    novel: tuple[Sample, ...]
    copies: tuple[Sample, ...]

    @classmethod
    def build(cls, text: TokenText, context: int) -> Document:
        copies = second_copy(text, context, COPIES)
        document = cls(context, tuple(novel(text, context, 1)), tuple(copies))
        assert {sample.prompt for sample in document.samples} == {document.prompt}
        return document

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.novel[0].prompt

    @property
    def samples(self) -> list[Sample]:
        return [*self.novel, *self.copies]


class Benchmark:
    """Runs settings engine by engine and keeps their figures."""

    def __init__(
        self,
        model: Path,
        method: str,
        contexts: Sequence[int],
        results: Results,
        repeats: int,
        dtype: str,
        further: dict[str, Any],
    ) -> None:
        self._model, self._results, self._repeats = model, results, repeats
        self._method, self._dtype, self._further = method, dtype, further
        self._references = References(RESULTS / ".reference")
        self._code = build.code_fingerprint()
        self._clock = Stopwatch()
        text = novel_text(AutoTokenizer.from_pretrained(model))
        self._weights = model_fingerprint(model)
        self._documents = [Document.build(text, context) for context in sorted(contexts)]

    def run(self, setting: Setting) -> None:
        """Measure one setting at every context that is not stored yet."""
        todo = [d for d in self._documents if not self._stored(d, str(setting))]
        if not todo:
            return
        longest = todo[-1]
        context = -(-max(sample.total for sample in longest.samples) // PAGE) * PAGE
        size = 3 * prefix_cache_bytes(self._model, longest.novel, self._dtype)
        self._say(f"{setting}: starting the engine for {len(todo)} context(s)")
        options = setting.options | self._further
        with open_engine(
            self._model, context, context, size, dtype=self._dtype, method=self._method, **options
        ) as llm:
            self._prefill(llm, longest.prompt[: 4 * setting.chunk], EXACT)  # warm up
            self._prefill(llm, longest.prompt[: 4 * setting.chunk], {})
            for document in todo:
                self._measure(llm, document, setting)

    def _measure(self, llm: LLM, document: Document, setting: Setting) -> None:
        reference = self._references.get("prefill", self._reference_key(document))
        if reference is None or not self._stored(document, "exact"):
            times, reference = self._ask(llm, document, EXACT, "exact")
            self._references.put("prefill", self._reference_key(document), reference)
            self._keep(document, "exact", {**times, "read_share": 1.0})
        before = retrieval_counts(llm)
        times, answers = self._ask(llm, document, {}, str(setting))
        after = retrieval_counts(llm)
        pairs = after["prompt"] - before["prompt"]
        cell: dict[str, Any] = {
            **times,
            "read_share": round((after["prompt_attended"] - before["prompt_attended"]) / pairs, 4),
        }
        for what, part in (("novel", slice(0, 1)), ("copy", slice(1, None))):
            cell[what] = forced_scores(_scored(reference[part]), _scored(answers[part]))
        self._keep(document, str(setting), cell)

    def _ask(
        self, llm: LLM, document: Document, options: dict[str, Any], name: str
    ) -> tuple[dict[str, list[float]], list[Generated]]:
        """Times of prefill, and the result of the last one."""
        label = f"{document.context} {name}"
        times: dict[str, list[float]] = {"prefill_s": [], "cpu_s": []}
        for repeat in range(self._repeats):
            self._say(f"{label}: prefill {repeat + 1} of {self._repeats}")
            llm.reset_prefix_cache()
            seconds, of_cpu = self._prefill(llm, document.prompt, options)
            times["prefill_s"].append(round(seconds, 3))
            times["cpu_s"].append(round(of_cpu, 3))
            self._say(f"{label}: {seconds:.1f} s, {of_cpu:.1f} s of processor time")
        return times, run_samples(llm, document.samples, options, label)

    def _prefill(
        self, llm: LLM, prompt: Sequence[int], options: dict[str, Any]
    ) -> tuple[float, float]:
        """Seconds until the first token, and of processor time in all of the engine's threads."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_retrieval": options},
        )
        start, used = time.perf_counter(), _processor_time()
        llm.generate([TokensPrompt(prompt_token_ids=list(prompt))], params, use_tqdm=False)
        return time.perf_counter() - start, _processor_time() - used

    def _reference_key(self, document: Document) -> str:
        engine = [self._method, self._further, self._code]
        return reference_key(self._weights, document.samples, self._dtype, engine)

    def _cell_key(self, document: Document, name: str) -> str:
        return fingerprint([self._reference_key(document), name, self._repeats])

    def _stored(self, document: Document, name: str) -> bool:
        label = f"{document.context}/{name}"
        return self._results.get(label, self._cell_key(document, name)) is not None

    def _keep(self, document: Document, name: str, cell: dict[str, Any]) -> None:
        self._results.put(f"{document.context}/{name}", self._cell_key(document, name), cell)

    def _say(self, message: str) -> None:
        print(f"[{self._clock}] {message}", flush=True)


def _processor_time() -> float:
    """Processor time of the processes below this one, in seconds."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(spent.user + spent.system for spent in times)


def _scored(answers: Sequence[Generated]) -> list[Scored]:
    return [answer.scored for answer in answers if answer.scored is not None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--method", default="omnikv", help="attention backend")
    add("--dtype", default=DTYPE, help="elements of model and cache")
    add("--options", type=json.loads, default={}, metavar="JSON", help="further options of the "
        "engine")  # fmt: skip
    add_model(parser, SMOLLM2_32K)
    add_tokens(parser, "--contexts", CONTEXTS, "tokens of the documents")
    add("--settings", nargs="+", type=Setting.parse, default=[*map(Setting.parse, SETTINGS)],
        metavar="BUDGET[+SHARE%][=][@DEPTH%]:CHUNK[:QUERIES[:SAMPLING[:POOLING]]]",
        help="values of " + ", ".join(PREFILL_OPTIONS) + "; 2048+25%%=@70%% has a "
        "prefill_share of 0.25, uniform prefill_budget_shares and a prefill_depth of 0.7, too",
    )  # fmt: skip
    add("--repeats", type=int, default=1, metavar="N", help="runs of each prefill")
    add_output(parser, "prefill.json")


def run(options: argparse.Namespace) -> int:
    """Measure, print and store."""
    header = {
        **result_header("benchmarks.quality"),
        "settings": {"dtype": options.dtype, "model": options.model.name},
    }
    results = Results(options.output, header)
    benchmark = Benchmark(
        options.model,
        options.method,
        options.contexts,
        results,
        options.repeats,
        options.dtype,
        options.options,
    )
    for setting in options.settings:
        benchmark.run(setting)
    print(f"\n{prompts.sparse({'': {'cells': results.cells}}, {})}\nresults: {options.output}")
    return 0
