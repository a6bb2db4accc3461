"""Tokens of context in the same fast memory: with vLLM alone, and with the KV cache on disk.

    python -m benchmarks.serving capacity --fast-memory 64 --samples 1
    python -m benchmarks.serving capacity --arithmetic --method freekv --codec k8v4

Everything that the plug-in keeps in fast memory for its KV cache counts: slots of the recall caches
and their books, dense layers, page index and its books, prefill staging, the map that guards the
file's mapping, and where pages are encoded, those that are not yet. How much context fits is found
by the plug-in's own arithmetic, and then served: stock vLLM is started with that much KV memory and
that context, and retrieval from disk with the same; pass keys in a novel have to be found.

Two things do not count and are shown apart: the file's pages in the system's page cache, which is
memory that the system lends and takes back, and the state of requests, which grows with them.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from benchmarks.cli import QWEN, add_model, add_output
from benchmarks.common import result_header, settings, write_json
from benchmarks.engines import LONG_STEPS, EngineError, EngineProcess, EngineSpec
from benchmarks.models import dense_layers, head_size, kv_bytes_per_token
from benchmarks.quality.tasks.base import novel_text
from benchmarks.quality.tasks.engine import open_engine, run_samples
from benchmarks.serving import slow_worker
from vllm_kvretrieval.calibration.divergence import answer_found
from vllm_kvretrieval.calibration.needles import passkey_in_text
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.table import DEFAULT_METHOD
from vllm_kvretrieval.retrieval.codec import CODECS
from vllm_kvretrieval.retrieval.presets import preset_names
from vllm_kvretrieval.storage.tier_sizes import Cache, Tiers

MIB = 1 << 20
BLOCK = 128
"""Tokens per block of vLLM's on the CPU."""

GOALS = {64 * MIB: 8.0}
"""Goals by fast memory: how many times as many tokens as stock vLLM's have to fit."""

STEP_TOKENS = 4096
"""Most that a step of ``LLM()`` computes on the CPU, by vLLM's default."""

PARTS = ("dense", "index", "books", "staging", "open_pages", "recall_cache")
"""Parts of fast memory, as `Tiers` names them."""


@dataclass(frozen=True)
class Capacity:
    """The most context that fits: a number of requests, and tokens of each."""

    requests: int
    context: int
    tiers: Tiers

    @property
    def tokens(self) -> int:
        """Tokens of context held for all running requests."""
        return self.requests * self.context


@dataclass(frozen=True)
class Served:
    """A model, and the options with which it is served.

    Attributes:
        config: the plug-in's.
        model: the model's Hugging Face configuration; all layers have full attention.
        dense: layers that attend to whole contexts.
    """

    config: RetrievalConfig
    model: Any
    dense: int

    @classmethod
    def of(cls, config: RetrievalConfig, model: Path) -> Served:
        """Read a checkpoint's configuration."""
        read = AutoConfig.from_pretrained(model)
        return cls(config, read, dense_layers(config, model, range(read.num_hidden_layers)))


def plan(served: Served, memory: int, requests: int, context: int) -> Tiers:
    """Divide fast memory for a number of requests of one length.

    Args:
        served: the model and its options.
        memory: bytes of fast memory, as in ``--kv-cache-memory-bytes``.
        requests, context: most requests at once, and tokens of each.

    Raises:
        RetrievalConfigError: it does not fit.
    """
    config, model = served.config, served.model
    layers = model.num_hidden_layers
    per_layer = kv_bytes_per_token(model) // layers
    cache = Cache(
        retrieval_layers=layers - served.dense,
        dense_layers=served.dense,
        kv_heads=model.num_key_value_heads,
        block_size=BLOCK,
        block_bytes=per_layer * BLOCK,
        head_size=head_size(model),
        dtype=torch.bfloat16,
        max_num_seqs=requests,
        max_model_len=context,
        step_tokens=STEP_TOKENS,
    )
    blocks = cache.blocks_for(requests)
    tiers = Tiers.plan(config, cache, memory, context * per_layer, blocks)
    if tiers.seats < requests:
        raise RetrievalConfigError(f"{tiers.seats} of {requests} requests have room")
    return tiers


def largest(served: Served, memory: int) -> Capacity | None:
    """The longest context that fits and, where the model ends before the memory does, as many
    requests of that length as fit; None where not even one of a block does."""
    best: Capacity | None = None
    limit = served.model.max_position_embeddings // BLOCK
    for requests in itertools.count(1):
        fits, too_long = 0, limit + 1
        while too_long - fits > 1:
            blocks = (fits + too_long) // 2
            try:
                found = Capacity(
                    requests,
                    blocks * BLOCK,
                    plan(served, memory, requests, blocks * BLOCK),
                )
            except RetrievalConfigError:
                too_long = blocks
            else:
                fits = blocks
                if best is None or found.tokens > best.tokens:
                    best = found
        if fits < limit:
            break
    return best


def codec_of(args: argparse.Namespace) -> dict[str, Any]:
    """The option that names the codec, where it is not the method's own."""
    return {} if args.codec is None else {"codec": args.codec}


def stock_room(args: argparse.Namespace, memory: int, context: int) -> tuple[str, int]:
    """Start stock vLLM with this KV memory, for this context, then for one that fits.

    Returns:
        What vLLM says about the context (empty: it takes it), and the tokens of all its blocks.
    """
    log = args.output.with_suffix(".log")
    fitting = memory // kv_bytes_per_token(AutoConfig.from_pretrained(args.model)) // 2
    refusal = ""
    try:
        with EngineProcess(_stock(str(args.model), memory, context), log):
            pass
    except EngineError:
        reasons = re.findall(r"ValueError: (.*)", log.read_text(errors="replace"))
        if not reasons:
            raise
        refusal = reasons[-1]
    with EngineProcess(_stock(str(args.model), memory, fitting), log) as engine:
        return refusal, engine.info["num_blocks"] * engine.info["block_size"]


def _stock(model: str, memory: int, context: int) -> EngineSpec:
    options = {
        "model": model,
        "dtype": "bfloat16",
        "max_model_len": context,
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": memory,
        "enforce_eager": True,
    }
    return EngineSpec("stock", options, {"VLLM_PLUGINS": ""} | LONG_STEPS)


def serve(args: argparse.Namespace, memory: int, capacity: Capacity) -> dict[str, Any]:
    """Serve such contexts from disk, ask for pass keys, and read off what is allocated."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    samples = passkey_in_text(novel_text(tokenizer), capacity.context, args.samples)
    with open_engine(
        args.model,
        capacity.context,
        args.budget,
        memory,
        capacity.requests,
        slow_worker.EXTENSION,
        dtype="bfloat16",
        method=args.method,
        home="disk",
        home_bytes=capacity.tiers.home,
        **codec_of(args),
    ) as llm:
        label = f"{capacity.context:,} tokens on disk"
        results = run_samples(llm, samples, {}, label)
        read = ("planned", "allocated", "home_memory", "memory")
        found = {name: llm.collective_rpc(name)[0] for name in read}
    hits = sum(
        answer_found(tokenizer.decode(result.tokens[len(sample.forced) :]), sample.answer)
        for sample, result in zip(samples, results, strict=True)
    )
    served = {"samples": len(samples), "at_once": min(len(samples), capacity.requests)}
    return found | served | {"found": hits}


def verdict(row: Mapping[str, Any]) -> bool | None:
    """Whether the goal for this memory is met; None if there is no goal, or no engine ran.

    The goal covers tokens, the pass keys, and that no more is allocated than was given.
    """
    goal = GOALS.get(row["fast_memory"])
    if goal is None or "allocated" not in row:
        return None
    within = sum(row["allocated"].values()) <= row["fast_memory"]
    return row["ratio"] >= goal and row["found"] == row["samples"] and within


def report(row: Mapping[str, Any]) -> str:
    """One fast memory's result as text."""
    memory = row["fast_memory"]
    head = f"{memory / MIB:g} MiB: stock vLLM holds {row['stock_tokens']:,} tokens"
    if not row["tokens"]:
        return f"{head}; from disk nothing fits: {row['refused']}"
    lines = [
        f"{head}, from disk {row['tokens']:,} ({row['requests']} x {row['context']:,}): "
        f"{row['ratio']:.1f}x"
    ]
    planned, allocated = {name: row["planned"][name] for name in PARTS}, row.get("allocated", {})
    lines.append(f"  {'part':<14} {'planned, MiB':>13} {'share':>6} {'allocated, MiB':>15}")
    lines += [_part(name, planned[name], allocated.get(name), memory) for name in PARTS]
    home = row["planned"]["home"]
    lines.append(f"  home: {home / MIB:,.0f} MiB, {home / row['tokens']:,.0f} bytes per token")
    if row["planned"]["streams_dense"]:
        lines.append("  dense layers are read from the file at every step")
    total = sum(allocated.values()) if allocated else None
    lines.append(_part("total", sum(planned.values()), total, memory))
    if allocated:
        home, worker = row["home_memory"], row["memory"]
        lines += [
            f"  stock vLLM with this context: {shorten(row['stock_says'], 90) or 'starts'}",
            f"  its blocks hold {row['stock_blocks_tokens']:,} tokens, its own one included",
            f"  found: {row['found']} of {row['samples']} pass keys, {row['at_once']} contexts at "
            f"once of the {row['requests']} that there is room for",
            f"  lent by the system: {home['page_cache'] / MIB:,.0f} MiB of page cache for the file "
            f"of {home['file'] / MIB:,.0f}, {home['mapped'] / MIB:,.1f} of them mapped",
            f"  not in proportion to the cache: {home['request_state'] / MIB:.2f} MiB of requests' "
            f"state; the worker has {worker['own'] / MIB:,.0f} MiB of its own in all",
        ]
    passed = verdict(row)
    if passed is not None:
        lines.append(f"  {'PASS' if passed else 'FAIL'}  goal: {GOALS[memory]:g}x or more, all "
            "found, no more allocated than given")  # fmt: skip
    return "\n".join(lines)


def _part(name: str, planned: int, allocated: int | None, memory: int) -> str:
    actual = "-" if allocated is None else f"{allocated / MIB:.2f}"
    return f"  {name:<14} {planned / MIB:>13.2f} {planned / memory:>6.1%} {actual:>15}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add_model(parser, QWEN)
    add("--budget", type=int, default=512, help="tokens attended to per decode step")
    add("--method", default=DEFAULT_METHOD, choices=preset_names(), help="retrieval method")
    add("--codec", choices=CODECS, help="how pages are encoded on disk; by default the method's")
    add("--fast-memory", type=int, nargs="+", default=[8, 64, 256], metavar="MIB",
        help="fast memory for the KV cache and all that belongs to it")  # fmt: skip
    add("--samples", type=int, default=2, help="contexts to serve; prefilling one of 32K tokens "
        "takes minutes")  # fmt: skip
    add("--arithmetic", action="store_true", help="what would fit, without any engine")
    add_output(parser, "capacity.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    options = RetrievalConfig(args.method, budget=args.budget, home="disk", **codec_of(args))
    served = Served.of(options, args.model)
    rows = []
    for mib in args.fast_memory:
        memory = mib * MIB
        stock = memory // kv_bytes_per_token(served.model)
        row: dict[str, Any] = {"fast_memory": memory, "stock_tokens": stock, "tokens": 0}
        most = largest(served, memory)
        if most is None:
            row["refused"] = f"not even {BLOCK} tokens at budget {args.budget}"
        else:
            row |= {
                "tokens": most.tokens,
                "requests": most.requests,
                "context": most.context,
                "ratio": most.tokens / stock,
                "planned": asdict(most.tiers),
            }
            if not args.arithmetic:
                says, held = stock_room(args, memory, most.context)
                row |= {"stock_says": says, "stock_blocks_tokens": held}
                row |= serve(args, memory, most)
        print(report(row), flush=True)
        rows.append(row)
    passed = [verdict(row) for row in rows]
    found = {"settings": settings(args), "rows": rows, "passed": passed}
    write_json(args.output, result_header("benchmarks.serving") | found)
    print(f"results: {args.output}")
    return 0
