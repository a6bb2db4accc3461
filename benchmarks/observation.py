"""What it takes to watch a prompt's attention: time to its second token, beside exact prefill.

    python -m benchmarks.observation [--contexts N ...] [--repeats N]

One engine. Each method, and full attention, reads the same prompts in turns, the prefix cache
emptied in between; what it keeps is chosen before the second token. Reported are medians of the
times of generating two tokens, and of ratios within a turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from benchmarks.common import MODELS, RESULTS, Stopwatch, result_header, write_json
from benchmarks.models import kv_bytes_per_token, read_config
from benchmarks.tasks.base import TokenText
from benchmarks.tasks.engine import DTYPE, open_engine
from benchmarks.tasks.forced import novel

MODULE = "benchmarks.observation"
CONTEXTS = (2048, 8192, 16384)
BUDGET = 1024
METHODS: dict[str, dict[str, Any]] = {
    "exact": {"method": "snapkv", "exact": True},
    "snapkv": {"method": "snapkv"},
    "entropykv_32": {"method": "entropykv_32"},
    "entropykv": {"method": "entropykv"},
    "tova": {"method": "tova"},
}
"""Options of a request; ``exact`` is what the others are compared with."""
ENGINE = "snapkv"
ALSO: dict[str, dict[str, Any]] = {
    "tova": {},
    "entropykv": {},
    "entropykv_32": {"preset": "entropykv", "observation": 32},
}
SLOW = ("entropykv",)
"""Those that watch every query: once per context is enough."""


def seconds(llm: LLM, prompt: Sequence[int], options: dict[str, Any]) -> float:
    """Time of a prompt and two tokens."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=2,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_retrieval": options},
    )
    llm.reset_prefix_cache()
    start = time.perf_counter()
    llm.generate([TokensPrompt(prompt_token_ids=list(prompt))], params, use_tqdm=False)
    return time.perf_counter() - start


def measure(llm: LLM, prompt: Sequence[int], repeats: int) -> dict[str, Any]:
    """Times of one context, by method; and ratios to those of full attention beside them."""
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for turn in range(repeats):
        order = [*METHODS] if turn % 2 == 0 else [*METHODS][::-1]
        for name in order:
            if turn == 0 or name not in SLOW:
                times[name].append(round(seconds(llm, prompt, METHODS[name]), 3))
    return {
        name: {
            "seconds": found,
            "ratio": statistics.median(
                s / e for s, e in zip(found, times["exact"][: len(found)], strict=True)
            ),
        }
        for name, found in times.items()
    }


def table(cells: dict[int, dict[str, Any]]) -> str:
    """The figures as a table in Markdown."""
    lines = [f"| context | {' | '.join(METHODS)} |", "| --- |" + " --- |" * len(METHODS)]
    for context, methods in cells.items():
        row = []
        for name, cell in methods.items():
            text = f"{statistics.median(cell['seconds']):.2f} s"
            row.append(text if name == "exact" else f"{text}, {100 * (cell['ratio'] - 1):+.1f} %")
        lines.append(f"| {context} | {' | '.join(row)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODELS / "SmolLM2-135M-Instruct-32K")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--out", type=Path, default=RESULTS / "observation.json", metavar="FILE")
    options = parser.parse_args(arguments)
    clock = Stopwatch()
    text = TokenText(AutoTokenizer.from_pretrained(options.model))
    longest = max(options.contexts)
    words = novel(text, longest, 1)[0].prompt
    cells: dict[int, dict[str, Any]] = {}
    width = kv_bytes_per_token(read_config(options.model)) * (2 if DTYPE == "float32" else 1)
    sizes = longest + 128, BUDGET, 2 * (longest + 256) * width
    with open_engine(options.model, *sizes, method=ENGINE, also=ALSO) as llm:
        seconds(llm, words[:2048], METHODS["snapkv"])  # warm up
        for context in sorted(options.contexts):
            cells[context] = measure(llm, words[:context], options.repeats)
            print(f"[{clock}] {context}: {cells[context]}", flush=True)
    result = {**result_header(MODULE), "settings": {"dtype": DTYPE, "budget": BUDGET}}
    write_json(options.out, {**result, "cells": {str(c): cell for c, cell in cells.items()}})
    print(f"\n{table(cells)}\nresults: {options.out}\ntime:    {clock}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
