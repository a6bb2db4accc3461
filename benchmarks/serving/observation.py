"""The time for watching a prompt's attention, beside the rest of its prefill.

    python -m benchmarks.serving observation --contexts 2048 8192 --repeats 2

One engine. Each method reads the same prompts in turns, the prefix cache emptied in between, and
generates two tokens: what it keeps is chosen before the second one. Its worker times what is done
for watching and choosing within its steps. Reported are medians of these times, and of their ratios
to the rest of the same steps: what else is busy on the machine then slows both.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from benchmarks.cli import SMOLLM2_32K, add_model, add_output, add_tokens
from benchmarks.common import Stopwatch, result_header, write_json
from benchmarks.models import kv_bytes_per_token, read_config
from benchmarks.quality.tasks.base import novel_text
from benchmarks.quality.tasks.engine import DTYPE, open_engine
from benchmarks.quality.tasks.forced import novel
from benchmarks.serving.worker_timing import EXTENSION, OBSERVATION, RUNNER
from benchmarks.tables import prompts

CONTEXTS = (2048, 8192, 16384)
BUDGET = 1024
METHODS: dict[str, dict[str, Any]] = {
    "snapkv": {},
    "tova": {},
    "raas": {},
    "entropykv_32": {"preset": "entropykv", "observation": 32},
    "entropykv": {},
}
"""The methods that watch, with their options in ``also``."""
ENGINE = "snapkv"
SLOW = ("entropykv",)
"""Methods that watch every query: they are measured once per context."""


class Times(NamedTuple):
    """Times of a prompt and two tokens, in seconds.

    Attributes:
        watching: Time for watching, and for choosing the kept tokens.
        rest: The rest of the model runner's time, of both steps.
    """

    watching: float
    rest: float


def times(llm: LLM, prompt: Sequence[int], method: str) -> Times:
    """The times of a prompt that the prefix cache does not hold."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=2,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_retrieval": {"method": method}},
    )
    llm.reset_prefix_cache()
    llm.collective_rpc("start_timing")
    llm.generate([TokensPrompt(prompt_token_ids=list(prompt))], params, use_tqdm=False)
    ((steps, _),) = llm.collective_rpc("stop_timing")
    watching, runner = (sum(step.get(k, 0.0) for step in steps) for k in (OBSERVATION, RUNNER))
    return Times(watching, runner - watching)


def measure(llm: LLM, prompt: Sequence[int], repeats: int) -> dict[str, Any]:
    """The time for watching at one context, by method."""
    found: dict[str, list[Times]] = {name: [] for name in METHODS}
    for turn in range(repeats):
        for name in METHODS:
            if turn == 0 or name not in SLOW:
                found[name].append(times(llm, prompt, name))
    return {
        name: {
            "watching_seconds": [round(each.watching, 4) for each in of_method],
            "rest_seconds": [round(each.rest, 4) for each in of_method],
            "ratio": statistics.median(each.watching / each.rest for each in of_method),
        }
        for name, of_method in found.items()
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(parser, SMOLLM2_32K)
    add_tokens(parser, "--contexts", CONTEXTS, "tokens of the prompts")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each method")
    add_output(parser, "observation.json")


def run(options: argparse.Namespace) -> int:
    """Measure, print and store."""
    clock = Stopwatch()
    text = novel_text(AutoTokenizer.from_pretrained(options.model))
    longest = max(options.contexts)
    words = novel(text, longest, 1)[0].prompt
    cells: dict[int, dict[str, Any]] = {}
    result = {**result_header("benchmarks.serving"), "settings": {"dtype": DTYPE, "budget": BUDGET}}
    width = kv_bytes_per_token(read_config(options.model)) * (2 if DTYPE == "float32" else 1)
    sizes = longest + 128, BUDGET, 2 * (longest + 256) * width
    also = {name: served for name, served in METHODS.items() if name != ENGINE}
    with open_engine(options.model, *sizes, extension=EXTENSION, method=ENGINE, also=also) as llm:
        times(llm, words[:2048], ENGINE)  # warm up
        for context in sorted(options.contexts):
            cells[context] = measure(llm, words[:context], options.repeats)
            print(f"[{clock}] {context}: {cells[context]}", flush=True)
            result["cells"] = {str(c): cell for c, cell in cells.items()}
            write_json(options.output, result)
    print(f"\n{prompts.observation({'': result}, {})}\nresults: {options.output}\ntime:    {clock}")
    return 0
