"""The KV cache on disk: what it costs per step, and how much more context it holds.

    python -m benchmarks.slow_home steady      # step times beside home=device, and the ablation
    python -m benchmarks.slow_home capacity    # contexts that vLLM refuses for want of memory
    python -m benchmarks.slow_home soak        # memory over thousands of steps

`steady` decodes the same documents with the cache in memory and on disk, the file being in the
operating system's page cache, and takes from the latter one thing at a time, as FreeKV's ablation
does: the layout (a page of a KV head is then read as the `2 * page_size` pieces in which a cache
that is ordered by tokens would keep it), reading ahead (every recall is waited for), speculation
(selection at every step, so that every change of pages is waited for), and all three; and decodes
with lower correction thresholds, down to none. The variants take turns, each from an empty recall
cache, and reported are medians over repeats; see `benchmarks.slow_steady`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from benchmarks.common import MODELS, RESULTS, result_header, write_json
from benchmarks.engines import EngineError, EngineProcess
from benchmarks.models import Documents, kv_bytes_per_token, yarn_overrides
from benchmarks.slow_steady import engine_specs, steady
from benchmarks.tasks.base import TokenText
from benchmarks.tasks.needles import passkey_in_novel

MODULE = "benchmarks.slow_home"
GIB, MIB = 1 << 30, 1 << 20

SETTINGS = ("contexts", "batches", "budget", "steps", "repeats", "recall_cache", "enforce_eager")


def capacity(args: argparse.Namespace) -> dict[str, Any]:
    """A pass key in a context that vLLM refuses, given as much memory as the recall cache."""
    from benchmarks.tasks.engine import open_engine, run_samples

    model, context, slots = Path(args.model), args.contexts[0], args.recall_cache
    config = AutoConfig.from_pretrained(model)
    stock = slots // kv_bytes_per_token(config)
    print(f"{slots / MIB:.1f} MiB of KV cache hold {stock:,} tokens; {context:,} are wanted.")
    refusal = ""
    try:
        with open_engine(model, context, None, slots, 1):
            pass
    except (ValueError, RuntimeError) as error:
        refusal = str(error)
    print(f"vLLM: {refusal or 'starts'}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = passkey_in_novel(TokenText(tokenizer), context, args.samples)
    home = {"home": "disk", "recall_cache_bytes": slots}
    with open_engine(model, context, args.budget, GIB, 1, **home) as llm:
        results = run_samples(llm, samples, {}, f"{context:,} tokens on disk")
    found = [
        sample.answer in tokenizer.decode(result.tokens[len(sample.forced) :])
        for sample, result in zip(samples, results, strict=True)
    ]
    longer = context / stock
    print(f"{sum(found)} of {len(found)} pass keys found, {longer:.1f}x as long")
    return {
        "model": model.name,
        "context": context,
        "recall_cache_bytes": slots,
        "stock_tokens": stock,
        "refused": bool(refusal),
        "found": sum(found),
        "samples": len(found),
    }


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Resident memory and threads of the worker while it decodes one request after another."""
    context = max(args.contexts)
    spec = engine_specs(args, yarn_overrides(AutoConfig.from_pretrained(args.model), context))[1]
    documents = Documents(args.model)
    notes = []
    with EngineProcess(spec, args.output.with_name("slow-home-soak.log")) as engine:
        done = 0
        while done < args.steps:
            (prompt,) = documents.take(1, context // 2)
            engine.generate([prompt], context // 2 - 1)
            done += context // 2 - 1
            memory = engine.collective_rpc("memory")
            notes.append({"steps": done} | memory)
            own, mapped = memory["own"] / MIB, memory["mapped"] / MIB
            line = f"{done:>8,} steps: {own:,.0f} MiB own, {mapped:,.0f} MiB mapped, "
            print(line + f"{memory['threads']} threads", flush=True)
    return {"model": Path(args.model).name, "context": context, "notes": notes}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=(__doc__ or "").partition("\n\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    smollm, qwen = (
        str(MODELS / n) for n in ("SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct")
    )
    for run, model, contexts, budget, steps, cache in (
        (steady, smollm, [16384, 32768], 1024, 48, None),
        (capacity, qwen, [8192], 512, 0, 8 * MIB),
        (soak, smollm, [8192], 1024, 10_000, None),
    ):
        command = commands.add_parser(run.__name__, help=run.__doc__)
        add = command.add_argument
        add("--model", default=model)
        add("--contexts", type=int, nargs="+", default=contexts)
        add("--batches", type=int, nargs="+", default=[1, 4] if run is steady else [1])
        add("--budget", type=int, default=budget)
        add("--steps", type=int, default=steps)
        add("--repeats", type=int, default=3)
        add("--samples", type=int, default=8)
        add("--recall-cache", type=int, default=cache, help="bytes of slots (default: twice what "
            "a batch attends to)")  # fmt: skip
        add("--enforce-eager", action="store_true", help="without torch.compile")
        add("--output", type=Path, default=RESULTS / f"slow-home-{run.__name__}.json")
        command.set_defaults(run=run)
    args = parser.parse_args()
    store = result_header(MODULE)
    try:
        named = {key: value for key, value in vars(args).items() if key in SETTINGS}
        store |= {"settings": named}
        store |= args.run(args)
    except EngineError as error:
        sys.exit(f"\n{error}")
    write_json(args.output, store)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
