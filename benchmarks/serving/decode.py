"""How fast: stock vLLM and KV-cache retrieval side by side, through the whole engine.

    python -m benchmarks.serving decode --quick      # a few minutes: does everything work?
    python -m benchmarks.serving decode              # the complete table
    python -m benchmarks.serving decode --fill       # long contexts without prefill, minutes
    python -m benchmarks.serving decode --model benchmarks/configs/Qwen2.5-3B-Instruct \
        --load-format dummy --tokenizer models/Qwen2.5-Coder-1.5B-Instruct  # random weights

For every context length and batch size both engines get the same documents, different ones
for each request of a batch. Prefill is timed on documents that the engine has not seen;
decoding is timed on documents that the prefix cache holds. Measurements alternate between
the engines, and the order within a pair alternates too, so a machine that slows down for a
while does not favour one of them. While one engine is measured, the other is frozen. Of two
engines on one machine the one started last can be slower by more than 10 %, whichever it is;
so shorter contexts, where that matters, are measured a second time with the engines started
in the other order.

With --fill no prompt is prefilled: vLLM's DecodeBenchConnector fills the cache of both engines with
random keys and values, so that long contexts take minutes. What is selected is then random, too,
and so is how often KV heads select anew: it is for timing decode steps and nothing else. The same
holds of random weights, with which the `config.json` of a model tells its times and its memory.

Reported are medians over repeats, of the mean step of a repeat (its middle 80 %); ratios are
medians of the ratios of neighbouring measurements, and the geometric mean over both orders. Of each
engine's worker the memory at the end is stored, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from transformers import AutoConfig

from benchmarks.cli import SMOLLM2, add_model, add_output, add_tokens
from benchmarks.common import Stopwatch, read_json, result_header, write_json
from benchmarks.engines import AVX2, LONG_STEPS, EngineProcess, EngineSpec
from benchmarks.models import Documents, kv_bytes_per_token, yarn_overrides
from benchmarks.serving import report, worker_timing
from benchmarks.serving.bench import WARM_STEPS, Bench, Lane, Settings
from benchmarks.serving.report import Cell
from benchmarks.serving.status import Status

ENGINE_GIB = 2.0
BLOCK = 128
STOCK = "stock"
FILL = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 1.0},
}


def engine_specs(
    args: argparse.Namespace, settings: Settings, config: Any, longest: int, batch: int
) -> list[EngineSpec]:
    """Stock vLLM and its counterpart, alike but for the attention backend, and quantisation.

    Raises `SystemExit` where the two KV caches do not fit into memory.
    """
    tokens = batch * longest + longest // 2 + 8 * BLOCK
    cache = tokens * kv_bytes_per_token(config) * (2 if settings.dtype == "float32" else 1)
    need, free = 2 * (cache / 2**30 + ENGINE_GIB), psutil.virtual_memory().available / 2**30
    if need > free:
        sys.exit(
            f"two engines with {batch} x {longest} tokens each need about {need:.0f} GiB of "
            f"memory, {free:.0f} GiB are free: ask for shorter --contexts or smaller --batches"
        )
    common: dict[str, Any] = {
        "model": str(args.model),
        "tokenizer": str(args.tokenizer or args.model),
        "dtype": settings.dtype,
        "hf_overrides": settings.hf_overrides,
        "max_model_len": longest,
        "kv_cache_memory_bytes": cache,
        "enforce_eager": settings.enforce_eager,
        "load_format": settings.load_format,
        "worker_extension_cls": worker_timing.EXTENSION,
    }
    if settings.fill:
        common["kv_transfer_config"] = FILL
    quantised = {"quantization": settings.quantization} if settings.quantization else {}
    options = {"budget": settings.budget} | settings.options
    if settings.beside:
        options["also"] = list(settings.beside)
    env = LONG_STEPS | (AVX2 if settings.avx2 else {})
    stock = EngineSpec(STOCK, common, {"VLLM_PLUGINS": ""} | env)
    if settings.against == "stock":
        return [stock, EngineSpec("stock again", common, stock.env)]
    retrieval = quantised | {
        "attention_backend": settings.against.upper(),
        "additional_config": {"kv_retrieval": options},
    }
    return [stock, EngineSpec(settings.against, common | retrieval, env)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; `--quick` and `--fill` change the defaults of the sizes."""
    quick, fill = "--quick" in sys.argv, "--fill" in sys.argv
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes: a check that everything works")
    add("--fill", action="store_true", help="random keys and values instead of a prefill, for "
        "timing decode steps alone")  # fmt: skip
    add_model(parser, SMOLLM2)
    add("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights, "
        "where a model's directory has none")  # fmt: skip
    add("--tokenizer", type=Path, metavar="PATH", help="directory of the tokenizer (default: that "
        "of the model)")  # fmt: skip
    add("--against", default="freekv", help="attention backend set against stock; "
        "'stock' compares vLLM with itself: the error of the method")  # fmt: skip
    add("--beside", nargs="+", default=(), metavar="METHOD", help="further methods, such as full, "
        "that requests to the same engine name")  # fmt: skip
    add("--budget", type=int, default=1024, help="tokens attended to per decode step")
    add("--options", type=json.loads, default={}, help="JSON of further kv_retrieval options")
    contexts = [512, 2048] if quick else [512, 896, 2048, 8192, 16384, 32768]
    if fill and not quick:
        contexts = [16384, 32768, 65536]
    add_tokens(parser, "--contexts", contexts, "tokens at the last step")
    add_tokens(parser, "--batches", [1] if quick else [1, 4], "requests that decode together")
    add("--steps", type=int, default=16 if quick else 48, help="measured steps per repeat")
    add("--repeats", type=int, default=2 if quick else 5, help="decode repeats")
    add("--prefill-repeats", type=int, default=1 if quick else 10, help="at most")
    add("--prefill-seconds", type=float, default=120.0, help="fewer prefill repeats where they "
        "would take longer than this, both engines together")  # fmt: skip
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto",
        help="of weights and KV cache; auto: the checkpoint's")  # fmt: skip
    add("--quantization", help="of the counterpart's weights, as kvr_int8; stock keeps those of "
        "the checkpoint")  # fmt: skip
    add("--avx2", action="store_true", help="both engines as on a machine without AVX-512")
    add("--enforce-eager", action="store_true", help="without torch.compile")
    add("--both-orders", type=int, default=0 if quick or fill else 8192, metavar="CONTEXT",
        help="measure contexts up to this one in both orders of starting the engines")  # fmt: skip
    add("--no-profile", dest="profile", action="store_false", help="skip the share of the parts")
    add("--resume", action="store_true", help="keep the cells that the output file holds already")
    name = f"decode{'-fill' if fill else ''}{'-quick' if quick else ''}.json"
    add_output(parser, name)


def earlier(path: Path, settings: Settings) -> list[Cell]:
    """The cells that an interrupted run with the same settings has measured.

    Raises `SystemExit` where the file comes from other settings.
    """
    stored = read_json(path)
    if stored is None:
        return []
    defaults: dict[str, Any] = {"fill": False, "dtype": "auto", "beside": [], "avx2": False}
    defaults |= {"quantization": None, "load_format": "auto"}
    if defaults | stored["settings"] != asdict(settings) | {"beside": [*settings.beside]}:
        sys.exit(f"{path} was made with other settings: drop --resume or name another --output")
    cells: list[Cell] = stored["cells"]
    return cells


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
    documents = Documents(args.tokenizer or args.model)
    for start_order in (specs, specs[::-1]):
        first = start_order[0].name
        missing = todo(args, store["cells"], first)
        if not missing:
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
            lanes = [Lane(spec.name, engines[spec.name]) for spec in specs]
            for name in settings.beside:
                by_name = {"kv_retrieval": {"method": name}}
                lanes.append(Lane(name, engines[settings.against], by_name))
            bench = Bench(lanes, settings, documents, status)
            bench.warm_up(min(max(args.contexts), 2 * settings.budget))
            status.clear()
            print(f"{first} started first\n{report.HEADER}")
            for number, (context, batches) in enumerate(missing.items(), 1):
                status.prefix(f"[{number}/{len(missing)}, {watch}] {context:,}: ")
                for cell in bench.context(context, batches, args.profile):
                    cell |= {"started_first": first, "build": store["build"]}
                    store["cells"].append(cell)
                    write_json(args.output, store)
                    status.clear()
                    (of_this_order,) = report.pooled([cell])
                    print(report.row(of_this_order, store["build"]), flush=True)
            for name, engine in engines.items():
                engine.resume()
                store["engines"][name]["memory"] = engine.collective_rpc("memory")
                engine.pause()


def _matters(variable: str) -> bool:
    """Whether an environment variable steers the engines (threads, above all)."""
    return variable.startswith(("VLLM_", "OMP_", "MKL_"))


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    longest, batch = max(args.contexts), max(args.batches)
    if min(args.contexts) <= args.steps + WARM_STEPS + 1:
        sys.exit(f"--contexts: {min(args.contexts)} leaves no room for {args.steps} steps")
    config = AutoConfig.from_pretrained(args.model)
    settings = Settings(
        model=args.model.name,
        hf_overrides=yarn_overrides(config, longest),
        against=args.against,
        budget=args.budget,
        options=args.options,
        steps=args.steps,
        repeats=args.repeats,
        prefill_repeats=args.prefill_repeats,
        prefill_seconds=args.prefill_seconds,
        enforce_eager=args.enforce_eager,
        fill=args.fill,
        dtype=args.dtype,
        beside=tuple(args.beside),
        avx2=args.avx2,
        quantization=args.quantization,
        load_format=args.load_format,
    )
    specs = engine_specs(args, settings, config, longest, batch)
    store = result_header("benchmarks.serving") | {
        "environment": {name: os.environ[name] for name in sorted(os.environ) if _matters(name)},
        "settings": asdict(settings),
        "cells": earlier(args.output, settings) if args.resume else [],
    }
    measure(args, settings, specs, store)
    store["acceptance"] = report.acceptance(store)
    write_json(args.output, store)
    print(report.summary(store))
    print(f"results: {args.output}")
    return 0
