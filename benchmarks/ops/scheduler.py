"""The cost of levels of blocks in vLLM's scheduler: decode steps, and hits of long prefixes.

    python -m benchmarks.ops scheduler --rounds 3

vLLM's own scheduler and ours in turn, without a model: the time of a step's scheduling and of what
follows its tokens, for requests that decode beyond their budgets; and of a prompt's look-up in the
prefix cache. Blocks have 128 tokens. A line per case, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.cli import add_output
from benchmarks.ops.setup import keep
from benchmarks.stepper import Stepper, full_attention

BLOCK = 128
BATCHES = (1, 8, 64)
STEPS = 4 * BLOCK
LONG = 32_512
EXACT = {"exact": True}


def stepper(stock: bool, ahead: int) -> Stepper:
    """A scheduler with room for everything here."""
    vllms = AsyncScheduler if ahead else Scheduler
    return Stepper(
        {"budget": 1024},
        blocks=8192,
        groups=[full_attention(BLOCK)],
        ahead=ahead,
        scheduler=vllms if stock else None,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=LONG,
        max_model_len=LONG + 256,
        hf_overrides={"max_position_embeddings": LONG + 256},
    )


def decode(batch: int, ahead: int, stock: bool) -> float:
    """Microseconds of a decode step of so many requests, the mean of some blocks' lengths."""
    made = stepper(stock, ahead)
    for number in range(batch):
        made.add([number + 1] * 1500, STEPS + 100)
    while any(r.is_prefill_chunk or not r.num_computed_tokens for r in made.requests()):
        made.step()
    begin = time.process_time()
    for _ in range(STEPS):
        made.step()
    return (time.process_time() - begin) / STEPS * 1e6


def hit(options: dict[str, Any], generated: int, stock: bool) -> float:
    """Microseconds of looking up a prompt whose last tokens were generated, the best of many."""
    made = stepper(stock, 0)
    prompt = [7 * i % 499 for i in range(LONG - generated)]
    made.ask(prompt, generated + 1, EXACT if stock else {})
    name = made.add(prompt + made.outputs["1"][:generated], 1, options)
    request = made.scheduler.requests[name]
    times = []
    for _ in range(200):
        begin = time.process_time()
        made.scheduler._get_local_prefix_cache_hit(request)
        times.append(time.process_time() - begin)
    return min(times) * 1e6


def compare(name: str, rounds: int, measure: Callable[[bool], float]) -> dict[str, Any]:
    """Print and return a case: vLLM's time, ours, and the median of the differences, in us."""
    pairs = [(measure(True), measure(False)) for _ in range(rounds)]
    vllms, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
    more = statistics.median(b - a for a, b in pairs)
    print(f"{name:42} {vllms:9.1f} {ours:9.1f} {more:+8.1f}", flush=True)
    return {
        "case": name,
        "vllm_us": round(vllms, 1),
        "ours_us": round(ours, 1),
        "more_us": round(more, 1),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--rounds", type=int, default=7, metavar="N", help="runs, of which medians are shown")
    add_output(parser, "scheduler.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    rounds, rows = args.rounds, []
    print(f"{'':42} {'vLLM':>9} {'ours':>9} {'more':>8}")
    for ahead, kind in ((0, ""), (1, ", async")):
        for batch in BATCHES:
            name = f"decode step, batch {batch}{kind}"
            rows.append(compare(name, rounds, partial(decode, batch, ahead)))
    for options, generated, name in (
        ({}, 0, "exact prefix"),
        ({}, 4 * BLOCK, "decoded blocks at the end"),
        (EXACT, 4 * BLOCK, "exact request, decoded blocks at the end"),
    ):
        rows.append(compare(f"32K hit, {name}", rounds, partial(hit, options, generated)))
    keep(args, rows)
    return 0
