"""The KV cache on disk: its cost per step, and how much more context it holds.

    python -m benchmarks.slow_home steady      # step times beside home=device, and the ablation
    python -m benchmarks.slow_home steady --codecs k8v4 k4v4 k2v2
    python -m benchmarks.slow_home capacity    # tokens held in the same fast memory
    python -m benchmarks.slow_home soak        # memory over thousands of steps

`steady` decodes the same documents with the cache in memory and on disk, while the file is in the
operating system's page cache. Like FreeKV's ablation it then takes one part away at a time: the
layout (a page of a KV head is then read as the `2 * page_size` pieces in which a cache ordered by
tokens would keep it), reading ahead (every recall is waited for), speculation (selection at every
step, so that every change of pages is waited for), and all three. It also decodes with lower
correction thresholds, down to none. From methods that select single tokens (`--method`) it takes
reading ahead (with `omnikv` the next layer waits for the tokens that a filter selects), and the
tokens that earlier steps have read. The variants take turns, each from an empty recall cache.
Medians over repeats are reported; see `benchmarks.slow_steady`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.common import MODELS, RESULTS, result_header, write_json
from benchmarks.engines import EngineError, EngineProcess
from benchmarks.models import Documents, yarn_overrides
from benchmarks.slow_capacity import capacity
from benchmarks.slow_steady import TIERED, VARIANTS_OF, engine_specs, steady
from vllm_kvretrieval.options.table import DEFAULT_METHOD
from vllm_kvretrieval.retrieval.codec import CODECS, RAW
from vllm_kvretrieval.retrieval.presets import preset_names

MODULE = "benchmarks.slow_home"
MIB = 1 << 20

NO_SETTINGS = ("command", "run", "model", "output")


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
    for run, model, budget in (
        (steady, smollm, 1024),
        (capacity, qwen, 512),
        (soak, smollm, 1024),
    ):
        command = commands.add_parser(
            run.__name__, help=run.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        add = command.add_argument
        add("--model", default=model, help="directory of the checkpoint")
        add("--budget", type=int, default=budget, help="tokens attended to per decode step")
        add("--output", type=Path, help="JSON results; logs go beside it (default: "
            f"{RESULTS.name}/slow-home-{run.__name__}.json, or ...-METHOD.json)")  # fmt: skip
        command.set_defaults(run=run)
        if run is capacity:
            add("--method", default=DEFAULT_METHOD, choices=preset_names(), help="retrieval method")
            add("--codec", choices=CODECS, help="how home holds pages (default: the method's)")
            add("--fast-memory", type=int, nargs="+", default=[8, 64, 256], metavar="MIB",
                help="fast memory for the KV cache and all that belongs to it")  # fmt: skip
            add("--samples", type=int, default=2, help="contexts to serve; prefilling one of 32K "
                "takes minutes")  # fmt: skip
            add("--arithmetic", action="store_true", help="what would fit, without any engine")
            continue
        long = run is soak
        contexts = [8192] if long else [16384, 32768]
        add("--contexts", type=int, nargs="+", default=contexts, help="tokens at the last step")
        batches, steps = ([1], 10_000) if long else ([1, 4], 48)
        add("--batches", type=int, nargs="+", default=batches, help="requests at once")
        add("--steps", type=int, default=steps, help="decode steps"
            + (" in all" if long else " per run, beside the first"))  # fmt: skip
        add("--recall-cache", type=int, help="bytes of slots (default: twice what a batch attends "
            "to)")  # fmt: skip
        add("--enforce-eager", action="store_true", help="without torch.compile")
        command.set_defaults(method="freekv", codecs=[])
        if not long:
            add("--method", choices=[*VARIANTS_OF, TIERED], help="retrieval method")
            add("--codecs", nargs="+", default=[], choices=[c for c in CODECS if c != RAW],
                help="compare these, with freekv, instead of the ablation")  # fmt: skip
            add("--repeats", type=int, default=3, help="runs of each variant")
    args = parser.parse_args()
    if args.output is None:
        of = "-codecs" if args.codecs else f"-{args.method}" if args.method != "freekv" else ""
        args.output = RESULTS / f"slow-home-{args.command}{of if args.run is steady else ''}.json"
    store = result_header(MODULE)
    try:
        store["settings"] = {k: v for k, v in vars(args).items() if k not in NO_SETTINGS}
        store |= args.run(args)
    except (EngineError, ValueError) as error:
        sys.exit(f"\n{error}")
    write_json(args.output, store)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
