"""How long a step takes that verifies drafts, beside one that does not.

    python -m benchmarks.serving verifying --contexts 2048 --tokens 40    # a minute
    python -m benchmarks.serving verifying

One engine, and prompts that repeat a sentence, so that as many tokens are drafted at each step as a
request allows, and are right. Requests of the same prompt with 0, 1, 2 ... drafts at most take
turns, over the budget's pages and over whole contexts. Reported are medians over repeats of the
time per step, and of its ratio to that without drafts in the same repeat; and what follows for a
draft (`vllm_kvretrieval/drafting/pace.py`): the time that it takes however long it is, and that of
each token, by the line of least squares.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import cycle, islice
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from benchmarks.cli import SMOLLM2, add_model, add_output, add_tokens
from benchmarks.common import Stopwatch, result_header, write_json
from benchmarks.engines import LONG_STEPS, EngineProcess, EngineSpec
from benchmarks.models import kv_bytes_per_token, yarn_overrides
from benchmarks.serving.decode import BLOCK
from benchmarks.serving.status import Status
from benchmarks.tables import speculative as tables

SENTENCE = " The hall, the parlour and the garden were, as before, empty and cold, and nobody came."
OPTIONS: dict[str, dict[str, Any]] = {tables.BUDGET: {}, tables.WHOLE: {"exact": True}}


def line(ratios: list[float]) -> tuple[float, float]:
    """What a draft takes once and per token, in steps without drafts, by ratios for 1, 2 ...
    tokens."""
    token, once = np.polyfit(np.arange(1, len(ratios) + 1), np.array(ratios) - 1, 1)
    return round(float(once), 3), round(float(token), 3)


def measure(
    engine: EngineProcess, prompt: list[int], options: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """All numbers of drafts over the same prompt, in turns."""
    seconds: list[list[float]] = [[] for _ in range(args.drafts + 1)]
    yielded = [0.0] * len(seconds)
    for turn in range(args.repeats):
        counts = range(len(seconds))
        for most in counts if turn % 2 == 0 else reversed(counts):
            asked = {"kv_retrieval": options | {"drafts": most}}
            # As many steps for each number of drafts.
            prompts, tokens = [prompt] * args.batch, args.tokens * (most + 1)
            answer = engine.answer(prompts, tokens, asked, args.temperature)
            seconds[most].append(answer.seconds / answer.steps)
            yielded[most] = answer.counted / answer.steps
    ratios = [
        statistics.median(own / other for own, other in zip(of, seconds[0], strict=True))
        for of in seconds
    ]
    once, token = line(ratios[1:])
    return {
        "milliseconds": [round(1e3 * statistics.median(of), 3) for of in seconds],
        "ratios": [round(ratio, 3) for ratio in ratios],
        "tokens_per_step": [round(tokens, 2) for tokens in yielded],
        "once": once,
        "token": token,
    }


def spec(args: argparse.Namespace) -> EngineSpec:
    """The engine."""
    config = AutoConfig.from_pretrained(args.model)
    longest = max(args.contexts) + args.tokens * (args.drafts + 1) + BLOCK
    tokens = 2 * sum(args.contexts) + args.batch * longest
    return EngineSpec(
        "drafts",
        {
            "model": str(args.model),
            "hf_overrides": yarn_overrides(config, longest),
            "max_model_len": longest,
            "max_num_seqs": args.batch,
            "kv_cache_memory_bytes": tokens * kv_bytes_per_token(config),
            "attention_backend": args.method.upper(),
            "quantization": args.quantization,
            "additional_config": {"kv_retrieval": {"budget": args.budget, "drafts": args.drafts}},
        },
        LONG_STEPS,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add_model(parser, SMOLLM2)
    add("--quantization", help="of the weights, as vLLM's; by default the checkpoint's")
    add("--method", default="kvretrieval", help="attention backend")
    add("--budget", type=int, default=1024, help="tokens attended to")
    add_tokens(parser, "--contexts", [2048, 8192], "tokens of the prompts")
    add("--batch", type=int, default=1, help="requests at once, with the same prompt")
    add("--tokens", type=int, default=24, help="steps of an answer")
    add("--drafts", type=int, default=5, help="draft tokens at a step, at most")
    add("--repeats", type=int, default=5, help="of each measurement")
    add("--temperature", type=float, default=0.0, help="at which tokens are sampled")
    add_output(parser, "verifying.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    status, watch = Status(), Stopwatch()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sentence = tokenizer.encode(SENTENCE, add_special_tokens=False)
    names = ("method", "budget", "batch", "tokens", "drafts", "repeats", "temperature")
    settings = {name: getattr(args, name) for name in names} | {"model": args.model.name}
    store = result_header("benchmarks.serving") | {"settings": settings, "cells": []}
    status.set("starting the engine")
    log = args.output.with_suffix(".log")
    with EngineProcess(spec(args), log, status.tick) as engine:
        settings["weights"] = args.quantization or engine.info["dtype"].removeprefix("torch.")
        for context in sorted(args.contexts):
            prompt = list(islice(cycle(sentence), context))
            for name, options in OPTIONS.items():
                status.set(f"{context:,} {name} [{watch}]")
                engine.answer([prompt], 8, {"kv_retrieval": options})
                cell = {"context": context, "reads": name}
                cell |= measure(engine, prompt, options, args)
                store["cells"].append(cell)
                write_json(args.output, store)
                status.clear()
                print(cell, flush=True)
    print(f"\n{tables.verifying({'': store}, {})}\nresults: {args.output}\ntime:    {watch}")
    return 0
