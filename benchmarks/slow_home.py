"""The KV cache on disk: what it costs per step, and how much more context it holds.

    python -m benchmarks.slow_home steady      # step times beside home=device, and the ablation
    python -m benchmarks.slow_home capacity    # contexts that vLLM refuses for want of memory
    python -m benchmarks.slow_home soak        # memory over thousands of steps

`steady` decodes the same documents with the cache in memory and on disk, the file being in the
operating system's page cache, and takes from the latter one thing at a time, as FreeKV's ablation
does: the layout (a page of a KV head is then read as the `2 * page_size` pieces in which a cache
that is ordered by tokens would keep it), reading ahead (every recall is waited for), speculation
(selection at every step, so that every change of pages is waited for), and all three. The variants
take turns, each from an empty recall cache, and reported are medians over repeats.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from benchmarks.common import MODELS, RESULTS, result_header, write_json
from benchmarks.decode_bench import WARM_STEPS
from benchmarks.engines import LONG_STEPS, EngineError, EngineProcess, EngineSpec
from benchmarks.models import Documents, kv_bytes_per_token, yarn_overrides
from benchmarks.status import Status
from benchmarks.tasks.base import TokenText
from benchmarks.tasks.needles import passkey_in_novel

MODULE = "benchmarks.slow_home"
GIB, MIB = 1 << 30, 1 << 20
SLACK = 8 * 128  # tokens beside the documents


SETTINGS = ("contexts", "batches", "budget", "steps", "repeats", "recall_cache", "enforce_eager")
EVERY_STEP = {"correction_threshold": 1.0}


@dataclass(frozen=True)
class Variant:
    """One way to decode the same documents."""

    name: str
    engine: str
    layout: bool = True
    read_ahead: bool = True
    options: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("device", "device"),
    Variant("disk", "disk"),
    Variant("disk, no reading ahead", "disk", read_ahead=False),
    Variant("disk, no layout", "disk", layout=False),
    Variant("disk, no speculation", "disk", options=EVERY_STEP),
    Variant("disk, none of these", "disk", layout=False, read_ahead=False, options=EVERY_STEP),
    Variant("device, no speculation", "device", options=EVERY_STEP),
)


def engine_specs(args: argparse.Namespace, overrides: dict[str, Any]) -> list[EngineSpec]:
    """The same engine with its cache in memory and on disk."""
    longest, batch = max(args.contexts), max(args.batches)
    config = AutoConfig.from_pretrained(args.model)
    size = (batch * longest + SLACK) * kv_bytes_per_token(config)
    common: dict[str, Any] = {
        "model": args.model,
        "hf_overrides": overrides,
        "max_model_len": longest,
        "max_num_seqs": batch,
        "attention_backend": "FREEKV",
        "enforce_eager": args.enforce_eager,
        "worker_extension_cls": "benchmarks.slow_worker.SlowHomeExtension",
    }
    retrieval = {"budget": args.budget}
    cache = args.recall_cache or 2 * batch * args.budget * kv_bytes_per_token(config)
    slow = retrieval | {"home": "disk", "home_bytes": size, "recall_cache_bytes": cache}
    return [
        EngineSpec(
            name,
            common | {"kv_cache_memory_bytes": size, "additional_config": {"kv_retrieval": option}},
            LONG_STEPS,
        )
        for name, option in (("device", retrieval), ("disk", slow))
    ]


class Steady:
    """Measures all variants, one context after another."""

    def __init__(self, args: argparse.Namespace, engines: Sequence[EngineProcess]) -> None:
        self._args = args
        self._engines = {engine.name: engine for engine in engines}
        self._tokens = args.steps + WARM_STEPS + 1
        longest = max(args.contexts) - self._tokens
        # Shorter contexts are their beginnings, and small batches the first of them: vLLM's prefix
        # cache then knows what has been read already.
        self._documents = Documents(args.model).take(max(args.batches), longest)
        self._status = Status()

    def cell(self, context: int, batch: int) -> list[dict[str, Any]]:
        """One row per variant."""
        prompts = [text[: context - self._tokens] for text in self._documents[:batch]]
        for engine in self._engines.values():
            self._status.set(f"{context:,} x {batch}: prefill, {engine.name}")
            engine.resume()
            engine.generate(prompts, 1)
            engine.pause()
        runs: dict[str, list[dict[str, float]]] = {variant.name: [] for variant in VARIANTS}
        for turn in range(self._args.repeats):
            for variant in VARIANTS if turn % 2 == 0 else VARIANTS[::-1]:
                self._status.set(f"{context:,} x {batch}: {variant.name}, {turn + 1}")
                runs[variant.name].append(self._run(variant, prompts))
        self._status.clear()
        rows = [
            {"context": context, "batch": batch, "variant": name}
            | {key: statistics.median(run[key] for run in found) for key in found[0]}
            for name, found in runs.items()
        ]
        for row in rows:
            print(self.line(row, rows[0], rows[2]), flush=True)
        return rows

    def _run(self, variant: Variant, prompts: list[list[int]]) -> dict[str, float]:
        engine = self._engines[variant.engine]
        engine.resume()
        engine.collective_rpc("prepare_recall", variant.read_ahead, variant.layout)
        engine.generate(prompts, WARM_STEPS, extra_args={"kv_retrieval": variant.options})
        before = engine.collective_rpc("recall")
        timing = engine.generate(
            prompts, self._tokens, extra_args={"kv_retrieval": variant.options}
        )
        after = engine.collective_rpc("recall")
        engine.pause()
        recall = {key: after[key] - before[key] for key in after}
        steps = self._tokens - 1
        return {
            "step_ms": 1e3 * statistics.mean(timing.steps[WARM_STEPS:]),
            "hit_rate": 1 - recall["missed"] / max(recall["attended"], 1),
            "recalled_mib": recall["recalled_bytes"] / MIB / steps,
            "waited_ms": 1e3 * recall["waited_s"] / steps,
        }

    HEADER = (
        f"{'context':>8} {'batch':>5}  {'variant':<24} {'ms/step':>8} {'ratio':>6} {'hits':>7} "
        f"{'MiB/step':>9} {'ms waited':>9} {'hidden':>7}"
    )

    @staticmethod
    def line(row: dict[str, Any], device: dict[str, Any], unaided: dict[str, Any]) -> str:
        """One line of the table; hidden: the waiting that reading ahead saves."""
        hidden = 1 - row["waited_ms"] / unaided["waited_ms"] if row["variant"] == "disk" else None
        return (
            f"{row['context']:>8,} {row['batch']:>5}  {row['variant']:<24} {row['step_ms']:>8.2f} "
            f"{row['step_ms'] / device['step_ms']:>5.2f}x {row['hit_rate']:>7.1%} "
            f"{row['recalled_mib']:>9.2f} {row['waited_ms']:>9.2f} "
            + (f"{hidden:>7.0%}" if hidden is not None else f"{'':>7}")
        )


def steady(args: argparse.Namespace) -> dict[str, Any]:
    """Step times with the cache in memory and on disk."""
    overrides = yarn_overrides(AutoConfig.from_pretrained(args.model), max(args.contexts))
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = []
        for spec in engine_specs(args, overrides):
            log = args.output.with_name(f"slow-home-{spec.name}.log")
            engines.append(stack.enter_context(EngineProcess(spec, log)))
            engines[-1].pause()
        bench = Steady(args, engines)
        print(Steady.HEADER)
        for context in sorted(args.contexts):
            for batch in sorted(args.batches):
                rows += bench.cell(context, batch)
    return {"model": Path(args.model).name, "hf_overrides": overrides, "rows": rows}


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
