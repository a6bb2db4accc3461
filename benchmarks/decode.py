"""How fast: stock vLLM and KV-cache retrieval side by side, through the whole engine.

    python -m benchmarks.decode --quick      # a few minutes: does everything work?
    python -m benchmarks.decode              # the complete table

For every context length and batch size both engines get the same documents, different ones
for each request of a batch. Prefill is timed on documents that the engine has not seen;
decoding is timed on documents that the prefix cache holds. Measurements alternate between
the engines, and the order within a pair alternates too, so a machine that slows down for a
while does not favour one of them. While one engine is measured, the other is frozen. Of two
engines on one machine the one started last can be slower by more than 10 %, whichever it is;
so shorter contexts, where that matters, are measured a second time with the engines started
in the other order.

Reported are medians over repeats, of the mean step of a repeat (its middle 80 %); ratios are
medians of the ratios of neighbouring measurements, and the geometric mean over both orders.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from transformers import AutoConfig, AutoTokenizer

from benchmarks import decode_report, texts
from benchmarks.common import MODELS, RESULTS, Stopwatch, read_json, result_header, write_json
from benchmarks.decode_report import Cell
from benchmarks.engines import EngineError, EngineProcess, EngineSpec, Timing
from benchmarks.status import Status

MODULE = "benchmarks.decode"
WARM_STEPS = 8
WITHIN_BUDGET_FACTOR = 4
ENGINE_GIB = 2.0
BLOCK = 128
STOCK = "stock"
# A chunk of a long prompt may exceed vLLM's five minutes on a small machine.
LONG_STEPS = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600"}


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
    temperature: float
    enforce_eager: bool


class Documents:
    """Endless distinct documents: the novel's tokens, each time from another starting point."""

    def __init__(self, model: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokens: list[int] = tokenizer("\n\n".join(texts.paragraphs()), verbose=False)["input_ids"]
        self._tokens = tokens
        self._serial = 0

    def take(self, count: int, length: int) -> list[list[int]]:
        """`count` documents of `length` tokens, none of which shares its beginning."""
        golden = (math.sqrt(5) - 1) / 2
        documents = []
        for _ in range(count):
            self._serial += 1
            start = int(self._serial * golden % 1 * len(self._tokens))
            text = itertools.islice(itertools.cycle(self._tokens), start, start + length)
            documents.append(list(text))
        return documents


@dataclass(frozen=True)
class Prefill:
    """Documents handed in at once, and what each engine made of them."""

    prompts: list[list[int]]
    timings: list[Timing]


class Bench:
    """Measures both engines, one context length after another."""

    def __init__(
        self,
        engines: Sequence[EngineProcess],
        settings: Settings,
        documents: Documents,
        status: Status,
    ) -> None:
        self._engines = engines
        self._status = status
        self._settings = settings
        self._documents = documents
        self._tokens = settings.steps + WARM_STEPS + 1
        self._seen: dict[int, list[list[int]]] = {}  # context -> a document, prefilled last

    def context(self, context: int, batches: Sequence[int], profile: bool) -> Iterator[Cell]:
        """The cells of one context length, in rising batch size; contexts end at `context`.

        Where prefilling a whole batch several times would take too long, its documents are
        handed in one after another instead, each once and on both engines in turn. That is
        how vLLM prefills a batch anyway, and every document is a sample for batch 1.
        """
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
        """Prefill `batch` documents that neither engine has seen."""
        prompts = self._documents.take(batch, context - self._tokens)
        return Prefill(prompts, self._pair(turn, f"prefill {turn} of {batch}", prompts, 1))

    def _cell(self, context: int, prefills: Sequence[Prefill], profile: bool) -> Cell:
        """Decode times on the documents prefilled last, beside the prefill times."""
        prompts = prefills[-1].prompts
        self._seen[context] = prompts[-1:]
        decodes = [
            self._pair(turn, f"decode {turn} of {len(prompts)}", prompts, self._tokens)
            for turn in range(1, 1 + decode_repeats(context, self._settings))
        ]
        cell: Cell = {"context": context, "batch": len(prompts), "engines": {}}
        for k, engine in enumerate(self._engines):
            first = [run.timings[k].first_token for run in prefills]
            cell["engines"][engine.name] = {
                "prefill_s": [round(max(times), 4) for times in first],
                "first_token_s": [round(statistics.median(times), 4) for times in first],
                "step_ms": [decode_report.spread(self._steps(pair[k])) for pair in decodes],
            }
            if profile:
                cell["engines"][engine.name] |= self._profile(engine, prompts)
        return cell

    def flatness(self, short: int, long: int, profile: bool) -> dict[str, Any]:
        """The counterpart's own step at two context lengths in turn, batch 1.

        Neighbouring measurements are compared: the cells of two contexts lie an hour apart.
        """
        engine = self._engines[1]
        prompts = {
            context: self._seen.get(context) or self._documents.take(1, context - self._tokens)
            for context in (short, long)
        }
        engine.resume()
        for context, prompt in prompts.items():
            self._status.set(f"flatness: prefill of {context:,}")
            engine.generate(prompt, 1)
        runs: dict[int, list[float]] = {short: [], long: []}
        for turn in range(2 * self._settings.repeats):
            for context in (short, long) if turn % 2 else (long, short):
                self._status.set(f"flatness: {context:,}, {turn + 1}")
                timing = engine.generate(prompts[context], self._tokens, self._settings.temperature)
                runs[context].append(decode_report.spread(self._steps(timing))["mean"])
        engine.pause()
        measured: dict[str, Any] = {"contexts": [short, long], "step_ms": [runs[short], runs[long]]}
        if profile:
            profiles = [self._profile(engine, prompts[context]) for context in (short, long)]
            measured["profile_ms"] = [parts["profile_ms"] for parts in profiles]
        return measured

    def warm_up(self, context: int) -> None:
        """Let both engines meet every kind of work once; contexts end at `context` tokens."""
        for batch in (1, 2):
            prompts = self._documents.take(batch, context - self._tokens)
            self._pair(0, "warm-up", prompts, self._tokens)

    def _pair(
        self, turn: int, label: str, prompts: list[list[int]], max_tokens: int
    ) -> list[Timing]:
        """The same batch on both engines; `turn` decides which one goes first."""
        timings: dict[str, Timing] = {}
        order = self._engines if turn % 2 == 0 else tuple(reversed(self._engines))
        for engine in order:
            self._status.set(f"{label}, {engine.name}")
            engine.resume()
            timings[engine.name] = engine.generate(prompts, max_tokens, self._settings.temperature)
            engine.pause()
        return [timings[engine.name] for engine in self._engines]

    def _steps(self, timing: Timing) -> list[float]:
        """Milliseconds of the measured steps of one repeat."""
        return [1e3 * step for step in timing.steps[WARM_STEPS:]]

    def _profile(self, engine: EngineProcess, prompts: list[list[int]]) -> dict[str, Any]:
        """One more decode repeat, with timers in the worker: where a step's time goes."""
        self._status.set(f"profile, {engine.name}")
        engine.resume()
        engine.collective_rpc("start_timing")
        timing = engine.generate(prompts, self._tokens, self._settings.temperature)
        parts, requests = engine.collective_rpc("stop_timing")
        engine.pause()
        return {
            "profile_ms": decode_report.profile(self._steps(timing), parts),
            "retrieval": decode_report.retrieval(requests),
        }


def _seconds(prefills: Sequence[Prefill]) -> float:
    """What these prefills took on all engines together."""
    return sum(max(timing.first_token) for run in prefills for timing in run.timings)


def _one_by_one(singles: Sequence[Prefill]) -> Prefill:
    """Single documents as a batch, in which each waits for those before it."""
    timings = []
    for runs in zip(*(single.timings for single in singles), strict=True):
        times = itertools.accumulate(max(run.first_token) for run in runs)
        timings.append(Timing(list(times), []))
    return Prefill([prompt for single in singles for prompt in single.prompts], timings)


def decode_repeats(context: int, settings: Settings) -> int:
    """How often a cell's decoding is timed: more often where 3 % must be told apart."""
    return settings.repeats * (WITHIN_BUDGET_FACTOR if context <= settings.budget else 1)


def kv_bytes_per_token(config: Any) -> int:
    """Bytes of keys and values that one token takes in all layers, in 16-bit precision."""
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim


def yarn_overrides(config: Any, longest: int) -> dict[str, Any]:
    """Overrides of a model's config that stretch it to `longest` tokens, if it needs any."""
    limit = config.max_position_embeddings
    if longest <= limit:
        return {}
    factor = math.ceil(longest / limit)
    rope = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": limit,
        "rope_theta": config.rope_parameters["rope_theta"],
    }
    return {"max_position_embeddings": limit * factor, "rope_parameters": rope}


def engine_specs(
    model: str, settings: Settings, config: Any, longest: int, batch: int
) -> list[EngineSpec]:
    """Stock vLLM and its counterpart, alike but for the attention backend.

    Raises `SystemExit` where the two KV caches do not fit into memory.
    """
    tokens = batch * longest + longest // 2 + 8 * BLOCK
    cache = tokens * kv_bytes_per_token(config)
    need, free = 2 * (cache / 2**30 + ENGINE_GIB), psutil.virtual_memory().available / 2**30
    if need > free:
        sys.exit(
            f"two engines with {batch} x {longest} tokens each need about {need:.0f} GiB of "
            f"memory, {free:.0f} GiB are free: ask for shorter --contexts or smaller --batches"
        )
    common: dict[str, Any] = {
        "model": model,
        "hf_overrides": settings.hf_overrides,
        "max_model_len": longest,
        "kv_cache_memory_bytes": cache,
        "enforce_eager": settings.enforce_eager,
        "worker_extension_cls": "benchmarks.worker_timing.TimingExtension",
    }
    stock = EngineSpec(STOCK, common, {"VLLM_PLUGINS": ""} | LONG_STEPS)
    if settings.against == "stock":
        return [stock, EngineSpec("stock again", common, {"VLLM_PLUGINS": ""} | LONG_STEPS)]
    options = {
        "attention_backend": settings.against.upper(),
        "additional_config": {"kv_retrieval": {"budget": settings.budget} | settings.options},
    }
    return [stock, EngineSpec(settings.against, common | options, LONG_STEPS)]


def parse_arguments() -> argparse.Namespace:
    """The command line; `--quick` changes the defaults of the sizes."""
    quick = "--quick" in sys.argv
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes: a check that everything works")
    add("--model", default=str(MODELS / "SmolLM2-135M-Instruct"), help="any model vLLM serves")
    add("--against", default="freekv", help="attention backend set against stock; "
        "'stock' compares vLLM with itself: the error of the method")  # fmt: skip
    add("--budget", type=int, default=1024, help="tokens attended to per decode step")
    add("--options", type=json.loads, default={}, help="JSON of further kv_retrieval options")
    contexts = [512, 2048] if quick else [512, 896, 2048, 8192, 16384, 32768]
    add("--contexts", type=int, nargs="+", default=contexts, help="tokens at the last step")
    add("--batches", type=int, nargs="+", default=[1] if quick else [1, 4])
    add("--steps", type=int, default=16 if quick else 48, help="measured steps per repeat")
    add("--repeats", type=int, default=2 if quick else 5, help="decode repeats")
    add("--prefill-repeats", type=int, default=1 if quick else 10, help="at most")
    add("--prefill-seconds", type=float, default=120.0, help="fewer prefill repeats where they "
        "would take longer than this, both engines together")  # fmt: skip
    add("--temperature", type=float, default=0.0, help="of sampling; 0 is greedy")
    add("--enforce-eager", action="store_true", help="without torch.compile")
    add("--hf-overrides", type=json.loads, default=None, help="JSON for the model's config "
        "(default: YaRN where a context exceeds the model's own limit)")  # fmt: skip
    add("--both-orders", type=int, default=0 if quick else 8192, metavar="CONTEXT",
        help="measure contexts up to this one in both orders of starting the engines")  # fmt: skip
    add("--no-profile", dest="profile", action="store_false", help="skip the share of the parts")
    add("--resume", action="store_true", help="keep the cells that the output file holds already")
    name = "decode-quick.json" if quick else "decode.json"
    add("--output", type=Path, default=RESULTS / name, help="JSON; the plot goes beside it")
    return parser.parse_args()


def earlier(path: Path, settings: Settings) -> dict[str, Any]:
    """What an interrupted run with the same settings has measured.

    Raises `SystemExit` where the file comes from other settings.
    """
    stored = read_json(path)
    if stored is None:
        return {}
    if stored["settings"] != asdict(settings):
        sys.exit(f"{path} was made with other settings: drop --resume or name another --output")
    return {key: stored[key] for key in ("cells", "flatness") if key in stored}


def todo(args: argparse.Namespace, done: list[Cell], first: str) -> dict[int, list[int]]:
    """The contexts still to be measured, the short ones first, and their batch sizes.

    first: the engine that is started first.
    """
    have = {(cell["context"], cell["batch"]) for cell in done if cell["started_first"] == first}
    missing = {
        context: [batch for batch in sorted(set(args.batches)) if (context, batch) not in have]
        for context in sorted(set(args.contexts))
        if first == STOCK or context <= args.both_orders
    }
    return {context: batches for context, batches in missing.items() if batches}


def measure(
    args: argparse.Namespace, settings: Settings, specs: list[EngineSpec], store: dict[str, Any]
) -> None:
    """Add every missing cell to `store` and write it to the output file after each."""
    status, watch = Status(), Stopwatch()
    documents = Documents(args.model)
    for start_order in (specs, specs[::-1]):
        first = start_order[0].name
        missing = todo(args, store["cells"], first)
        beyond = [context for context in args.contexts if context >= 2 * settings.budget]
        flat = first == STOCK and len(beyond) > 1 and 1 in args.batches and "flatness" not in store
        if not missing and not flat:
            continue
        with ExitStack() as stack:
            engines = {}
            for spec in start_order:
                status.set(f"starting {spec.name}")
                log = args.output.with_name(f"{args.output.stem}-{spec.name.replace(' ', '-')}.log")
                engine = stack.enter_context(EngineProcess(spec, log, status.tick))
                engine.pause()
                engines[spec.name] = engine
            store["engines"] = {spec.name: engines[spec.name].info for spec in specs}
            bench = Bench([engines[spec.name] for spec in specs], settings, documents, status)
            bench.warm_up(min(max(args.contexts), 2 * settings.budget))
            status.clear()
            print(f"{first} started first\n{decode_report.HEADER}")
            for number, (context, batches) in enumerate(missing.items(), 1):
                status.prefix(f"[{number}/{len(missing)}, {watch}] {context:,}: ")
                for cell in bench.context(context, batches, args.profile):
                    store["cells"].append(cell | {"started_first": first})
                    write_json(args.output, store)
                    status.clear()
                    (of_this_order,) = decode_report.pooled([cell])
                    print(decode_report.row(of_this_order), flush=True)
            if flat:
                store["flatness"] = bench.flatness(min(beyond), max(beyond), args.profile)
                write_json(args.output, store)
                status.clear()


def _matters(variable: str) -> bool:
    """Whether an environment variable steers the engines (threads, above all)."""
    return variable.startswith(("VLLM_", "OMP_", "MKL_"))


def main() -> None:
    """Measure, print, store; exits with 1 where an engine fails."""
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    longest, batch = max(args.contexts), max(args.batches)
    if min(args.contexts) <= args.steps + WARM_STEPS + 1:
        sys.exit(f"--contexts: {min(args.contexts)} leaves no room for {args.steps} steps")
    config = AutoConfig.from_pretrained(args.model)
    overrides = args.hf_overrides
    settings = Settings(
        model=Path(args.model).name,
        hf_overrides=yarn_overrides(config, longest) if overrides is None else overrides,
        against=args.against,
        budget=args.budget,
        options=args.options,
        steps=args.steps,
        repeats=args.repeats,
        prefill_repeats=args.prefill_repeats,
        prefill_seconds=args.prefill_seconds,
        temperature=args.temperature,
        enforce_eager=args.enforce_eager,
    )
    specs = engine_specs(args.model, settings, config, longest, batch)
    done = earlier(args.output, settings) if args.resume else {}
    store = result_header(MODULE) | {
        "environment": {name: os.environ[name] for name in sorted(os.environ) if _matters(name)},
        "settings": asdict(settings),
        "cells": [],
    }
    store |= done
    try:
        measure(args, settings, specs, store)
    except EngineError as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; --resume continues after the last complete cell")
    store["acceptance"] = decode_report.acceptance(store)
    write_json(args.output, store)
    plot = args.output.with_suffix(".png")
    decode_report.plot(store, plot)
    print(decode_report.summary(store))
    print(f"written: {args.output} and {plot}")


if __name__ == "__main__":
    main()
