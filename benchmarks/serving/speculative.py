"""How fast answers are with drafts that steps verify, beside the same answers without.

    python -m benchmarks.serving speculative --quick   # some minutes: does everything work?
    python -m benchmarks.serving speculative           # the complete table
    python -m benchmarks.serving speculative --home disk --cold --contexts 32768 --batches 1

Three kinds of real prompts: `copy` (a passage of the novel, asked for once more, whose beginning is
there), `code` (a module of Python's own library, asked for with another name of what it uses most,
whose beginning is there) and `novel` (the novel goes on, sampled at temperature 1 with a seed,
since greedy answers of small models repeat themselves). All of a context comes before.

One engine drafts, and one does not. A third one with vLLM's own `ngram` may be beside them
(`--ngram`); while one is measured, the others are frozen. An engine serves several ways, as its
requests ask for, which find the same documents in its prefix cache. Reported are the medians over
repeats, in which the ways alternate, of tokens per second behind the first token of the last
request, and of their ratios in the same repeat. Of greedy answers is counted how many are
full attention's, token by token, and how many tokens agree before the first other one.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from benchmarks.cli import SMOLLM2, add_model, add_output, add_tokens
from benchmarks.common import Stopwatch, result_header, write_json
from benchmarks.engines import LONG_STEPS, Answers, EngineProcess, EngineSpec
from benchmarks.models import Documents, kv_bytes_per_token, yarn_overrides
from benchmarks.serving import slow_worker
from benchmarks.serving.decode import BLOCK
from benchmarks.serving.status import Status
from benchmarks.tables import speculative as tables

BEGINNING = 48
"""Tokens of an answer that the prompt ends with."""
ASK = "\n\nThe same passage once more, word by word:\n\n"
ASK_CODE = "\n\n\n# The same module once more, with {new} in place of {old}:\n\n"

WAYS: dict[str, dict[str, dict[str, Any]]] = {
    tables.ALONE: {tables.ALONE: {}, tables.FULL: {"exact": True}},
    tables.DRAFTS: {tables.DRAFTS: {}, tables.LOSSLESS: {"lossless": True}},
    tables.NGRAM: {tables.NGRAM: {}},
}
"""The ways by engine, and the options of a request of each."""


@dataclass(frozen=True)
class Lane:
    """One of the ways that are compared: an engine, and what its requests ask for."""

    name: str
    engine: EngineProcess
    options: dict[str, Any]

    def answer(self, prompts: list[list[int]], tokens: int, temperature: float) -> Answers:
        """Answers with the engine awake meanwhile."""
        self.engine.resume()
        extra_args = {"kv_retrieval": self.options}
        answers = self.engine.answer(prompts, tokens, extra_args, temperature)
        self.engine.pause()
        return answers


class Prompts:
    """Prompts of each kind; those of a batch have documents of their own."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._novel = Documents(model)
        library = Path(random.__file__).parent
        self._modules = sorted(library.glob("*.py"), key=lambda path: path.name)

    def of(self, kind: str, count: int, length: int) -> list[list[int]]:
        """So many prompts of `length` tokens."""
        make = {"copy": self._copy, "code": self._code, "novel": self._continued}[kind]
        return [make(number, length) for number in range(count)]

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return tokens

    def _continued(self, number: int, length: int) -> list[int]:
        return self._novel.take(1, length)[0]

    def _copy(self, number: int, length: int) -> list[int]:
        ask = self._encode(ASK)
        document = self._novel.take(1, length - len(ask) - BEGINNING)[0]
        passage = len(document) // 3
        return [*document, *ask, *document[passage : passage + BEGINNING]]

    def _code(self, number: int, length: int) -> list[int]:
        """Modules before it fill the context."""
        module = self._modules[(7 * number + 11) % len(self._modules)]
        while len(text := module.read_text()) < 12000:
            module = self._modules[(self._modules.index(module) + 1) % len(self._modules)]
        old = _usual_name(module)
        new = f"{old}_of_caller"
        text = text[:20000]
        changed = re.sub(rf"\b{old}\b", new, text)
        ask = self._encode(ASK_CODE.format(old=old, new=new))
        own, begun = self._encode(text), self._encode(changed)
        start = len(own) // 4  # behind comments and imports
        tail = [*own, *ask, *begun[start : start + BEGINNING]]
        before = list[int]()
        for other in self._modules:
            if other != module and len(before) + len(tail) < length:
                before += self._encode(other.read_text())
        return [*before[: max(0, length - len(tail))], *tail][-length:]


def _usual_name(module: Path) -> str:
    """The name of six letters or more that a module uses most."""
    with module.open("rb") as file:
        names = Counter(
            token.string
            for token in tokenize.tokenize(file.readline)
            if token.type == tokenize.NAME and len(token.string) > 5
        )
    return names.most_common(1)[0][0]


def agreeing(answer: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same before the first that is not."""
    same = (a == b for a, b in zip(answer, other, strict=True))
    return next((n for n, equal in enumerate(same) if not equal), len(answer))


def measure(
    lanes: Sequence[Lane], prompts: list[list[int]], kind: str, args: argparse.Namespace
) -> dict[str, Any]:
    """All ways over the same prompts, in turns."""
    temperature = 1.0 if kind == "novel" else 0.0
    answers: dict[str, list[Answers]] = {lane.name: [] for lane in lanes}
    for turn in range(args.repeats):
        for lane in lanes if turn % 2 == 0 else reversed(lanes):
            answers[lane.name].append(lane.answer(prompts, args.tokens, temperature))
    cell: dict[str, Any] = {"kind": kind, "context": args.context, "batch": len(prompts)}
    full = answers[tables.FULL][0].tokens
    cell["ways"] = {
        name: {
            "tokens_per_second": [round(a.counted / a.seconds, 3) for a in of_way],
            "tokens_per_step": round(of_way[0].counted / of_way[0].steps / len(prompts), 3),
            "like_full": [
                [agreeing(own, other) for own, other in zip(a.tokens, full, strict=True)]
                for a in of_way[:1]
            ]
            if temperature == 0
            else [],
        }
        for name, of_way in answers.items()
    }
    return cell


def specs(args: argparse.Namespace) -> Iterator[EngineSpec]:
    """The engines: without and with drafts, and with vLLM's drafter if it is asked for."""
    config = AutoConfig.from_pretrained(args.model)
    longest, batch = max(args.contexts) + args.tokens + BLOCK, max(args.batches)
    tokens = 3 * batch * (sum(args.contexts) + 4 * BLOCK)
    common: dict[str, Any] = {
        "model": str(args.model),
        "hf_overrides": yarn_overrides(config, longest),
        "max_model_len": longest,
        "max_num_seqs": batch,
        "kv_cache_memory_bytes": args.memory or tokens * kv_bytes_per_token(config),
        "attention_backend": args.method.upper(),
    }
    options: dict[str, Any] = {"budget": args.budget, "home": args.home}
    if args.home == "disk":
        options["home_bytes"] = tokens * kv_bytes_per_token(config)
        options["home_path"] = args.home_path
        common["worker_extension_cls"] = slow_worker.EXTENSION
    drafting = options | {"drafts": args.drafts}
    for name, given in {tables.ALONE: options, tables.DRAFTS: drafting}.items():
        own = {"additional_config": {"kv_retrieval": given}}
        yield EngineSpec(name, common | own, LONG_STEPS)
    if args.ngram:
        ngram = {
            "method": "ngram",
            "num_speculative_tokens": args.drafts,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 5,
        }
        own = {"additional_config": {"kv_retrieval": options}, "speculative_config": ngram}
        yield EngineSpec(tables.NGRAM, common | own, LONG_STEPS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; `--quick` changes the defaults of the sizes."""
    quick = "--quick" in sys.argv
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes: a check that everything works")
    add_model(parser, SMOLLM2)
    add("--method", default="kvretrieval", help="attention backend")
    add("--budget", type=int, default=256 if quick else 1024, help="tokens attended to")
    add_tokens(parser, "--contexts", [2048] if quick else [8192, 32768], "tokens of the prompts")
    add_tokens(parser, "--batches", [1] if quick else [1, 4], "requests at once")
    add("--kinds", nargs="+", default=tables.KINDS, choices=tables.KINDS, help="prompts")
    add("--tokens", type=int, default=48 if quick else 128, help="of an answer")
    add("--drafts", type=int, default=5, help="draft tokens at a step, at most")
    add("--repeats", type=int, default=1 if quick else 3, help="of each measurement")
    add("--home", choices=("device", "disk"), default="device", help="where the KV cache is")
    add("--home-path", metavar="DIRECTORY", help="where the file of a home on disk is")
    add("--cold", action="store_true", help="before each step drop the file from the page cache")
    add(
        "--memory", type=int, metavar="BYTES", help="fast memory; by default room for all documents"
    )
    add("--ngram", action="store_true", help="vLLM's ngram beside it, on an engine of its own")
    add_output(parser, f"speculative{'-quick' if quick else ''}.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    if args.cold and args.home != "disk":
        raise SystemExit("--cold needs --home disk: a cache in memory has no file")
    status, watch, prompts = Status(), Stopwatch(), Prompts(args.model)
    settings = {
        name: getattr(args, name)
        for name in ("method", "budget", "tokens", "drafts", "repeats", "home", "cold", "memory")
    }
    store = result_header("benchmarks.serving") | {
        "settings": settings | {"model": args.model.name},
        "cells": [],
    }
    with ExitStack() as stack:
        lanes = list[Lane]()
        for spec in specs(args):
            status.set(f"starting {spec.name}")
            log = args.output.with_name(f"{args.output.stem}-{spec.name.replace(' ', '-')}.log")
            engine = stack.enter_context(EngineProcess(spec, log, status.tick))
            if args.cold:
                engine.collective_rpc("start_steps", True)
            engine.pause()
            lanes += [Lane(name, engine, options) for name, options in WAYS[spec.name].items()]
        for lane in lanes:
            status.set(f"warm-up, {lane.name}")
            lane.answer(prompts.of("copy", 2, 1024), 24, 0.0)
        for context in sorted(args.contexts):
            args.context = context
            for kind in args.kinds:
                documents = prompts.of(kind, max(args.batches), context - args.tokens)
                for lane in {id(lane.engine): lane for lane in lanes}.values():
                    status.set(f"{context:,} {kind}: prefill, {lane.name}")
                    lane.answer(documents, 1, 0.0)
                for batch in sorted(args.batches):
                    status.set(f"{context:,} {kind} of {batch} [{watch}]")
                    cell = measure(lanes, documents[:batch], kind, args)
                    store["cells"].append(cell)
                    write_json(args.output, store)
                    status.clear()
                    print(tables.row(cell), flush=True)
    print(f"\n{tables.table({'': store}, {})}\nresults: {args.output}\ntime:    {watch}")
    return 0
