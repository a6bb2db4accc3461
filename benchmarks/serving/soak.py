"""Resident memory and threads of a worker that decodes one request after another from disk.

    python -m benchmarks.serving soak --steps 10000

Requests are of half the context each, and decode the other half. A line is printed after each.
"""

from __future__ import annotations

import argparse

from transformers import AutoConfig

from benchmarks.cli import add_output
from benchmarks.common import result_header, settings, write_json
from benchmarks.engines import EngineProcess
from benchmarks.models import Documents, yarn_overrides
from benchmarks.serving.disk import MIB, add_engine_arguments, engine_specs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_engine_arguments(parser, [8192], [1])
    parser.add_argument("--steps", type=int, default=10_000, help="decode steps in all")
    parser.set_defaults(method="freekv", codecs=[])
    add_output(parser, "soak.json")


def run(args: argparse.Namespace) -> int:
    """Decode, print and store."""
    context = max(args.contexts)
    spec = engine_specs(args, yarn_overrides(AutoConfig.from_pretrained(args.model), context))[1]
    documents = Documents(args.model)
    notes, done = [], 0
    with EngineProcess(spec, args.output.with_suffix(".log")) as engine:
        while done < args.steps:
            (prompt,) = documents.take(1, context // 2)
            engine.generate([prompt], context // 2 - 1)
            done += context // 2 - 1
            memory = engine.collective_rpc("memory")
            notes.append({"steps": done} | memory)
            own, mapped = memory["own"] / MIB, memory["mapped"] / MIB
            line = f"{done:>8,} steps: {own:,.0f} MiB own, {mapped:,.0f} MiB mapped, "
            print(line + f"{memory['threads']} threads", flush=True)
    header = result_header("benchmarks.serving")
    write_json(args.output, header | {"settings": settings(args), "notes": notes})
    print(f"results: {args.output}")
    return 0
