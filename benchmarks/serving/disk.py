"""Decode steps with the KV cache on disk, beside one in memory, and what each part of it saves.

    python -m benchmarks.serving disk --contexts 8192 --batches 1 4
    python -m benchmarks.serving disk --codecs k8v4 k4v4 k2v2
    python -m benchmarks.serving disk --against arkvale shadowkv

The file is in the operating system's page cache. Like FreeKV's ablation the program takes one part
away at a time: the layout (a page of a KV head is then read as the `2 * page_size` pieces in which
a cache ordered by tokens would keep it), reading ahead (every recall is waited for), speculation
(selection at every step, so that every change of pages is waited for), and all three. It also
decodes with lower correction thresholds, down to none. From methods that select single tokens
(`--method`) it takes reading ahead (with `omnikv` the next layer waits for the tokens that a filter
selects), and the tokens that earlier steps have read. The variants take turns, each from an empty
recall cache. Figures are medians over repeats.

Every run decodes prompts that have been prefilled, but of which no page is in a recall cache, and
counts from the first decode step, which has to recall all that it attends to. That step is also
reported by itself; "ms/step" is the mean of the others.

With `--codecs` the same documents are decoded from homes that are encoded, instead of the ablation;
once with the file in the page cache, and once "cold": it is dropped from there before every step.
With `--against` freekv at several thresholds is compared with other methods, all over raw pages on
disk, warm and cold. `--method ttkv` compares that preset, warm and cold, with freekv and with full
attention, both over raw pages on disk; with "streaming" a step attends to the pages in memory while
it reads the others.

The waiting is what steps wait for reads into recall caches. It leaves out what the kernel does for
the mapped file when new tokens are written to it: such page faults are counted, not timed. Nothing
else reads the file in place while requests decode beyond their budgets.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import AutoConfig

from benchmarks.cli import SMOLLM2, add_model, add_output, add_tokens
from benchmarks.common import result_header, settings, write_json
from benchmarks.engines import LONG_STEPS, EngineError, EngineProcess, EngineSpec
from benchmarks.models import Documents, kv_bytes_per_token, yarn_overrides
from benchmarks.serving import slow_worker
from benchmarks.serving.status import Status
from benchmarks.worker_counts import corrected_share
from vllm_kvretrieval.retrieval.codec import CODECS, RAW
from vllm_kvretrieval.retrieval.families.scored import DEFAULT_THRESHOLD

MIB = 1 << 20
SLACK = 8 * 128  # tokens beside the documents
WARM_PROMPT, WARM_TOKENS = 64, 16


@dataclass(frozen=True)
class Variant:
    """One way to decode the same documents."""

    name: str
    engine: str
    layout: bool = True
    read_ahead: bool = True
    keep: bool = True
    streams: bool = False
    cold: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def recall(self) -> tuple[bool, bool, bool, bool]:
        """The arguments of `SlowHomeExtension.prepare_recall`."""
        return self.read_ahead, self.layout, self.keep, self.streams

    @property
    def threshold(self) -> float | None:
        """The correction threshold of decoding from disk with nothing taken away; else None."""
        aided = self.layout and self.read_ahead and self.keep and not self.cold
        if self.engine != "disk" or not aided:
            return None
        return self.options.get("correction_threshold", DEFAULT_THRESHOLD)


def _corrects_below(threshold: float) -> dict[str, float]:
    return {"correction_threshold": threshold}


EVERY_STEP = _corrects_below(1.0)
DEVICE, DISK, UNAIDED = "device", "disk", "disk, no reading ahead"
VARIANTS = (
    Variant(DEVICE, "device"),
    Variant(DISK, "disk"),
    Variant(UNAIDED, "disk", read_ahead=False),
    Variant("disk, no layout", "disk", layout=False),
    Variant("disk, no speculation", "disk", options=EVERY_STEP),
    Variant("disk, none of these", "disk", layout=False, read_ahead=False, options=EVERY_STEP),
    Variant("disk, threshold 0.8", "disk", options=_corrects_below(0.8)),
    Variant("disk, threshold 0.7", "disk", options=_corrects_below(0.7)),
    Variant("disk, no correction", "disk", options=_corrects_below(-1.0)),
    Variant("device, no speculation", "device", options=EVERY_STEP),
)

TOKEN_VARIANTS = (
    Variant(DEVICE, "device"),
    Variant(DISK, "disk"),
    Variant(UNAIDED, "disk", read_ahead=False),
    Variant("disk, nothing kept", "disk", keep=False),
)
"""Variants of methods that select single tokens."""
VARIANTS_OF = {
    "freekv": VARIANTS,
    "fier": tuple(v for v in TOKEN_VARIANTS if v.read_ahead),  # selects and attends at once
    "omnikv": TOKEN_VARIANTS,
}
COMPARED = (
    Variant("freekv, on disk", DISK),
    Variant("freekv, threshold 0.8", DISK, options=_corrects_below(0.8)),
    Variant("freekv, no correction", DISK, options=_corrects_below(-1.0)),
    Variant("freekv, no speculation", DISK, options=EVERY_STEP),
)
"""Variants of freekv beside other methods."""
AGAINST = ("arkvale", "shadowkv", "quest", "kvretrieval")
TIERED, SPECULATIVE = "ttkv", "ttkv_speculative"
TIERED_VARIANTS = (
    Variant("freekv, raw on disk", DISK),
    Variant("freekv, streaming", DISK, streams=True),
    Variant("full attention, on disk", DISK, options={"exact": True}),
    Variant("ttkv", TIERED),
    Variant("ttkv, streaming", TIERED, streams=True),
    Variant("ttkv, speculative", TIERED, options={"method": SPECULATIVE}),
    Variant("ttkv, spec., no ahead", TIERED, read_ahead=False, options={"method": SPECULATIVE}),
)


def variants(args: argparse.Namespace) -> tuple[Variant, ...]:
    """The method's ablation, or the variants that the options compare.

    The first is what the others' step times are set against.
    """
    method, codecs = args.method, args.codecs
    first: list[Variant] = []
    if method == TIERED:
        warm = list(TIERED_VARIANTS)
    elif args.against:
        warm = [*COMPARED, *(Variant(f"{name}, on disk", name) for name in args.against)]
    elif codecs:
        first = [Variant(DEVICE, DEVICE)]
        warm = [Variant(DISK, DISK), *(Variant(f"disk, {codec}", codec) for codec in codecs)]
    else:
        return VARIANTS_OF[method]
    cold = [replace(v, name=f"{v.name}, cold", cold=True) for v in warm if v.read_ahead]
    return *first, *warm, *cold


def engine_specs(args: argparse.Namespace, overrides: dict[str, Any]) -> list[EngineSpec]:
    """An engine for each place that variants decode from: memory, disk, and there by each codec."""
    longest, batch = max(args.contexts), max(args.batches)
    config = AutoConfig.from_pretrained(args.model)
    size = (batch * longest + SLACK) * kv_bytes_per_token(config)
    retrieval = {"budget": args.budget}
    cache = 2 * batch * args.budget * kv_bytes_per_token(config)
    slow = retrieval | {"home": "disk", "home_bytes": size, "recall_cache_bytes": cache}
    tiered = slow | {"also": {SPECULATIVE: {"preset": TIERED, "schedule": "speculative"}}}
    untiered = "freekv" if args.method == TIERED else args.method
    engines = {
        DEVICE: (untiered, size, retrieval),
        DISK: (untiered, size + cache, slow),
        TIERED: (TIERED, size + cache, tiered),
        **{name: (untiered, size + cache, slow | {"codec": name}) for name in args.codecs},
        **{name: (name, size + cache, slow) for name in args.against},
    }
    used = {variant.engine for variant in variants(args)}
    return [
        EngineSpec(
            name,
            {
                "model": str(args.model),
                "hf_overrides": overrides,
                "max_model_len": longest,
                "max_num_seqs": batch,
                "attention_backend": method.upper(),
                "enforce_eager": args.enforce_eager,
                "worker_extension_cls": slow_worker.EXTENSION,
                "kv_cache_memory_bytes": fast,
                "additional_config": {"kv_retrieval": options},
            },
            LONG_STEPS,
        )
        for name, (method, fast, options) in engines.items()
        if name in used
    ]


def summarise(steps_s: Sequence[float], noted: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One run's figures.

    Args:
        steps_s: lengths of all its decode steps.
        noted: the worker's `recall` before each of the run's last steps, and at the end.

    Returns:
        ``first_*``: of the first decode step; ``rest_*`` and ``step_ms``: means of the others;
        ``tail_ms``: what 95 % of these do not exceed; means of all, the first included, without a
        prefix.
    """
    before, after_first, end = noted[-len(steps_s) - 1], noted[-len(steps_s)], noted[-1]
    steps = len(steps_s)
    return {
        "first_ms": 1e3 * steps_s[0],
        "first_units": after_first["recalled"] - before["recalled"],
        **{f"first_{key}": value for key, value in _means(before, after_first, 1).items()},
        "step_ms": 1e3 * statistics.mean(steps_s[1:]),
        "tail_ms": 1e3 * float(np.percentile(steps_s[1:], 95)),
        **{f"rest_{key}": value for key, value in _means(after_first, end, steps - 1).items()},
        **_means(before, end, steps),
        "corrected_share": corrected_share(before, end) or 0.0,
    }


def _means(before: Mapping[str, float], after: Mapping[str, float], steps: int) -> dict[str, float]:
    """Per step; ``hit_rate`` is of the units that had to be in recall caches."""
    new = {key: after[key] - before[key] for key in after}
    return {
        "hit_rate": 1 - new["missed"] / max(new["looked_up"], 1),
        "recalled_mib": new["recalled_bytes"] / MIB / steps,
        "waited_ms": 1e3 * new["waited_s"] / steps,
        "minor_faults": new["minor_faults"] / steps,
        "major_faults": new["major_faults"] / steps,
    }


HEADER = (
    f"{'':>40} |{'first decode step':^22} | {'the others':>24} | all steps\n"
    f"{'context':>8} {'batch':>5}  {'variant':<24} |{'ms':>7} {'MiB':>6} {'waited':>7} |"
    f" {'ms/step':>8} {'ratio':>7} {'95 %':>7} | {'corr':>5} {'hits':>6} {'MiB/step':>8}"
    f" {'ms waited':>9} {'hidden':>6} {'faults':>6}"
)
LEGEND = (
    "corr: KV heads that selected anew; hits: what was in slots when a step needed it; hidden: of "
    "the waiting, what reading ahead saves; faults: page faults per step, not in 'waited'"
)


def line(row: Mapping[str, Any], by_name: Mapping[str, Mapping[str, Any]]) -> str:
    """One line of the table under `HEADER`; by_name: the variants' rows of the same size."""
    hidden = ""
    if row["variant"] == DISK and by_name.get(UNAIDED, {}).get("waited_ms"):
        hidden = f"{1 - row['waited_ms'] / by_name[UNAIDED]['waited_ms']:.0%}"
    ratio = row["step_ms"] / next(iter(by_name.values()))["step_ms"]
    faults = row["minor_faults"] + row["major_faults"]
    return (
        f"{row['context']:>8,} {row['batch']:>5}  {row['variant']:<24} |{row['first_ms']:>7.1f} "
        f"{row['first_recalled_mib']:>6.1f} {row['first_waited_ms']:>7.2f} | "
        f"{row['step_ms']:>8.2f} {ratio:>6.2f}x {row['tail_ms']:>7.2f} | "
        f"{row['corrected_share']:>5.0%} "
        f"{row['hit_rate']:>6.1%} {row['recalled_mib']:>8.2f} {row['waited_ms']:>9.2f} "
        f"{hidden:>6} {faults:>6.1f}"
    )


class Steady:
    """Measures all variants, one context after another."""

    def __init__(self, args: argparse.Namespace, engines: Sequence[EngineProcess]) -> None:
        self._args = args
        self._variants = variants(args)
        self._engines = {engine.name: engine for engine in engines}
        self._tokens = args.steps + 2  # the prompt gives the first, a cold step the second
        longest = max(args.contexts) - self._tokens
        self._bytes_per_token = kv_bytes_per_token(AutoConfig.from_pretrained(args.model))
        documents = Documents(args.model)
        (self._short,) = documents.take(1, WARM_PROMPT)
        # Shorter contexts are their beginnings, and small batches the first of them: vLLM's prefix
        # cache then knows what has been read already.
        self._documents = documents.take(max(args.batches), longest)
        self._status = Status()

    def cell(self, context: int, batch: int) -> list[dict[str, Any]]:
        """One row per variant."""
        prompts = [text[: context - self._tokens] for text in self._documents[:batch]]
        for engine in self._engines.values():
            self._status.set(f"{context:,} x {batch}: prefill, {engine.name}")
            engine.resume()
            engine.generate(prompts, 1)
            engine.pause()
        runs: dict[str, list[dict[str, float]]] = {v.name: [] for v in self._variants}
        for turn in range(self._args.repeats):
            for variant in self._variants if turn % 2 == 0 else self._variants[::-1]:
                self._status.set(f"{context:,} x {batch}: {variant.name}, {turn + 1}")
                runs[variant.name].append(self._run(variant, prompts))
        self._status.clear()
        rows: dict[str, dict[str, Any]] = {}
        for variant in self._variants:
            found = runs[variant.name]
            medians = {key: statistics.median(run[key] for run in found) for key in found[0]}
            size = {"context": context, "batch": batch}
            named = {"variant": variant.name, "threshold": variant.threshold}
            rows[variant.name] = size | named | medians
        for row in rows.values():
            print(line(row, rows), flush=True)
        return list(rows.values())

    def _run(self, variant: Variant, prompts: list[list[int]]) -> dict[str, float]:
        engine = self._engines[variant.engine]
        engine.resume()
        engine.generate([self._short], WARM_TOKENS)  # wakes the threads, and takes no slot
        engine.collective_rpc("prepare_recall", *variant.recall)
        engine.collective_rpc("start_steps", variant.cold)
        options = {"kv_retrieval": variant.options}
        timing = engine.generate(prompts, self._tokens, extra_args=options)
        noted = engine.collective_rpc("stop_steps")
        engine.pause()
        if len(timing.steps) != self._tokens - 1:
            raise EngineError(
                f"of {self._tokens - 1} decode steps only {len(timing.steps)} had all of "
                f"{len(prompts)} requests: the prefix cache no longer holds the documents. Ask for "
                "fewer --contexts or --batches at once."
            )
        found = summarise(timing.steps, noted)
        if variant.options.get("exact"):  # which reads all that there is, in place
            whole = sum(len(prompt) + self._tokens for prompt in prompts) * self._bytes_per_token
            found |= {"recalled_mib": whole / MIB, "rest_recalled_mib": whole / MIB}
        return found


def add_engine_arguments(
    parser: argparse.ArgumentParser, contexts: Sequence[int], batches: Sequence[int]
) -> None:
    """Add the options of an engine whose KV cache is on disk."""
    add = parser.add_argument
    add_model(parser, SMOLLM2)
    add("--budget", type=int, default=1024, help="tokens attended to per decode step")
    add_tokens(parser, "--contexts", contexts, "tokens at the last step")
    add_tokens(parser, "--batches", batches, "requests that decode together")
    add("--enforce-eager", action="store_true", help="without torch.compile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add_engine_arguments(parser, [16384, 32768], [1, 4])
    add("--steps", type=int, default=48, help="decode steps per run, beside the first")
    add("--method", default="freekv", choices=[*VARIANTS_OF, TIERED], help="retrieval method")
    add("--codecs", nargs="+", default=[], choices=[c for c in CODECS if c != RAW],
        help="compare these, with freekv, instead of the ablation")  # fmt: skip
    add("--against", nargs="+", default=[], choices=AGAINST,
        help="compare freekv with these, instead of the ablation")  # fmt: skip
    add("--repeats", type=int, default=3, help="runs of each variant")
    add_output(parser, "disk.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    if args.against and (args.codecs or args.method != "freekv"):
        args.usage_error(
            "--against compares freekv over raw pages: leave --codecs and --method out"
        )
    overrides = yarn_overrides(AutoConfig.from_pretrained(args.model), max(args.contexts))
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = []
        for spec in engine_specs(args, overrides):
            log = args.output.with_name(f"{args.output.stem}-{spec.name}.log")
            engines.append(stack.enter_context(EngineProcess(spec, log)))
            engines[-1].pause()
        bench = Steady(args, engines)
        print(HEADER)
        for context in sorted(args.contexts):
            for batch in sorted(args.batches):
                rows += bench.cell(context, batch)
        print(LEGEND)
    found = {"settings": settings(args), "hf_overrides": overrides, "rows": rows}
    write_json(args.output, result_header("benchmarks.serving") | found)
    print(f"results: {args.output}")
    return 0
