"""A cache that outlives the server: how soon a document is there again, and what that costs.

    python -m benchmarks.serving store                       # documents of 2K, 8K and 32K tokens
    python -m benchmarks.serving store --contexts 8192
    python -m benchmarks.serving store --contexts --output price.json    # what a store costs, alone
    python -m benchmarks.serving store --contexts --pairs 0 --output start.json    # a start, alone

Each document is read and answered by an engine with a store, which is then ended (in order, or by
SIGKILL) and started anew, with its files in the operating system's page cache, or out of it. The
shortest document is also read by an engine without a store. Starts are from the engine's process
on, imports included; first tokens from handing in the document and a question on.

What a store costs is measured by two engines, with a store and without, that read new documents in
turn; of every pair of turns the ratio is taken, and of all pairs the median.

What a full store adds to a start is measured without a model: records of so many blocks are read,
and put into vLLM's prefix cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil  # type: ignore[import-untyped]
from transformers import AutoConfig

from benchmarks.cli import SMOLLM2_32K, add_model, add_output
from benchmarks.common import result_header, settings, write_json
from benchmarks.engines import LONG_STEPS, EngineProcess, EngineSpec
from benchmarks.models import Documents, kv_bytes_per_token
from benchmarks.serving.store_start import restores

QUESTION = list(range(100, 130))
"""Tokens behind the document."""
SLACK = 1024
PRICE_CONTEXT = 2048
"""Tokens of the documents that tell what a store costs."""
STARTS = 5
"""How often a full store is opened."""
ENDS = ("stopped", "killed", "cold")
"""How an engine ended: in order, by SIGKILL, or by that, its files leaving the page cache, too."""


def spec(args: argparse.Namespace, context: int, store: Path | None) -> EngineSpec:
    """An engine for one document, with a store or without."""
    size = (context + SLACK) * kv_bytes_per_token(AutoConfig.from_pretrained(args.model))
    options: dict[str, Any] = {"home": "disk", "budget": args.budget}
    options |= {"home_path": "/var/tmp"} if store is None else {"store": str(store)}
    llm = {
        "model": str(args.model),
        "max_model_len": context + SLACK,
        "max_num_seqs": 1,
        "attention_backend": args.method,
        "enforce_eager": True,
        "kv_cache_memory_bytes": size + (256 << 20),
        "additional_config": {"kv_retrieval": options},
    }
    return EngineSpec("store" if store else "none", llm, LONG_STEPS)


@contextmanager
def started(engine: EngineSpec, log: Path) -> Iterator[tuple[EngineProcess, float]]:
    """An engine, and the seconds that its start took."""
    begin = time.perf_counter()
    with EngineProcess(engine, log) as running:
        yield running, time.perf_counter() - begin


def drop_from_page_cache(directory: Path) -> None:
    """Write the files to the disk, and let the system forget its copies of them."""
    for file in directory.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def kill() -> None:
    """End all processes of the engine that runs by SIGKILL."""
    (own,) = (p for p in psutil.Process().children() if os.getpgid(p.pid) == p.pid)
    left = own.children(recursive=True)
    os.killpg(own.pid, signal.SIGKILL)
    psutil.wait_procs(left)


def restart(
    args: argparse.Namespace, context: int, document: list[int], beside: bool
) -> dict[str, Any]:
    """Read a document, end the engine in each way, and ask again.

    Args:
        args: Of the command line.
        context: Tokens of the document.
        document: These.
        beside: Whether an engine without a store reads it, too.
    """
    logs = args.output.with_suffix("")
    store = Path(tempfile.mkdtemp(prefix="store-", dir=args.directory))
    prompt, figures = document + QUESTION, dict[str, Any]()
    try:
        if beside:
            log = logs.with_suffix(".none.log")
            with started(spec(args, context, None), log) as (engine, seconds):
                figures["none"] = {"start_s": seconds} | ask(engine, prompt, args.steps)
        with started(spec(args, context, store), logs.with_suffix(".store.log")) as (engine, s):
            figures["empty"] = {"start_s": s} | ask(engine, prompt, args.steps)
        for end in ENDS:  # of the engine before
            if end == "cold":
                drop_from_page_cache(store)
            log = logs.with_suffix(f".{end}.log")
            with started(spec(args, context, store), log) as (engine, seconds):
                figures[end] = {"start_s": seconds} | ask(engine, prompt, args.steps)
                kill()
    finally:
        shutil.rmtree(store)
    return figures


def ask(engine: EngineProcess, prompt: list[int], steps: int) -> dict[str, float]:
    """Seconds to the first token, and milliseconds of a decode step."""
    timing = engine.generate([prompt], steps)
    return {"first_token_s": timing.first_token[0], "step_ms": 1000 * median(timing.steps)}


def price(args: argparse.Namespace, documents: list[list[int]]) -> dict[str, Any]:
    """Read documents, and decode answers, with a store and without.

    Args:
        args: Of the command line.
        documents: One per pair of turns, and one more to begin with.

    Returns:
        Seconds of prompts and of decode steps, by engine, in the order of the documents.
    """
    context, logs = len(documents[0]), args.output.with_suffix("")
    store = Path(tempfile.mkdtemp(prefix="store-", dir=args.directory))
    turns = dict[str, list[dict[str, float]]](none=[], store=[])
    try:
        with (
            EngineProcess(spec(args, context, None), logs.with_suffix(".none.log")) as none,
            EngineProcess(spec(args, context, store), logs.with_suffix(".store.log")) as storing,
        ):
            for engine in (none, storing):
                engine.pause()
            for number, document in enumerate(documents):
                pair = (none, storing) if number % 2 else (storing, none)
                for engine in pair:
                    engine.resume()
                    timing = engine.generate([document + QUESTION], args.price_steps)
                    engine.pause()
                    if number:
                        turns[engine.name].append(
                            {"prompt_s": timing.first_token[0], "step_s": mean(timing.steps)}
                        )
    finally:
        shutil.rmtree(store)
    return turns


def dearer(turns: dict[str, list[dict[str, float]]], what: str) -> float:
    """How much longer something takes with a store, as a share."""
    pairs = zip(turns["store"], turns["none"], strict=True)
    return median(one[what] / other[what] for one, other in pairs) - 1


def show(context: int, figures: dict[str, Any]) -> None:
    """Print the figures of a document."""
    print(f"{context} tokens")
    for name, row in figures.items():
        start, first, step = row["start_s"], row["first_token_s"], row["step_ms"]
        print(f"  {name:8} start {start:6.1f} s, first token {first:7.2f} s, step {step:6.2f} ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add_model(parser, SMOLLM2_32K)
    add("--method", default="kvretrieval", help="retrieval method")
    add("--budget", type=int, default=1024, help="tokens attended to per decode step")
    lengths = [2048, 8192, 31744]
    add("--contexts", type=int, nargs="*", default=lengths, help="tokens of the documents")
    add("--steps", type=int, default=100, help="tokens to decode")
    add("--pairs", type=int, default=12, help="of turns that tell what a store costs")
    add("--price-steps", type=int, default=384, help="tokens to decode behind each of these")
    add("--stored", type=int, default=23000, help="blocks of a full store (64 GiB of SmolLM2-135M)")
    add("--directory", default="/var/tmp", help="where the store is made")
    add_output(parser, "store.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    documents = Documents(args.model)
    found = {}
    for context in args.contexts:
        (document,) = documents.take(1, context)
        found[context] = restart(args, context, document, context == min(args.contexts))
        show(context, found[context])
    starts = restores(args.stored, STARTS)
    print(
        f"{args.stored} blocks are restored in {median(start['cpu_s'] for start in starts):.3f} s"
    )
    results = {"settings": settings(args), "contexts": found, "starts": starts}
    if args.pairs:
        turns = price(args, documents.take(args.pairs + 1, PRICE_CONTEXT))
        for what in ("prompt_s", "step_s"):
            print(f"{what} with a store: {100 * dearer(turns, what):+.2f} %")
        results["price"] = turns
    write_json(args.output, result_header("benchmarks.serving") | results)
    print(f"results: {args.output}")
    return 0
