"""Decoding in whole engines: FreeKV, its KV cache on the device or in host memory, and stock vLLM.

    python -m benchmarks.gpu.engine_decode
    python -m benchmarks.gpu.engine_decode --engine stock --engine host --cache-gib 17
    python -m benchmarks.gpu.engine_decode --engine stock --prefill
    python -m benchmarks.gpu.engine_decode --engine device --defaults --output gpu_day.json
    python -m benchmarks.gpu.engine_decode --engine stock --defaults --output gpu_day.json --add

Llama-3.1-8B's shapes with random weights, bf16, compiled and with CUDA graphs, as vLLM has them by
default; engines in turn, each in processes of its own. vLLM's DecodeBenchConnector fills the KV
cache with random numbers when an engine starts and takes prompts for computed, so that long
contexts cost no prefill. Retrieval indexes what it has filled. Keys and queries are noise: what is
selected changes from step to step more than a model's would, so hit rates and corrections say what
these steps did, and no more.

With --defaults engines start as a user starts them: with the seats, the compilation, the sizes of
graphs and the memory profile that vLLM chooses. --add keeps what the result file has of other
engines.

With --prefill nothing is filled in: prompts are random tokens, and the prefill of one is timed that
the engine has not seen. Decoding is then timed on prompts that the prefix cache holds.

Times are medians of steps in which all requests decode, as the caller of the engine sees them; of
two repeats the better one. A context is the length that a request reaches at its last step. Of a
batch that does not fit, that is the result. Where stock vLLM is measured, the others get the
largest batch that it fits, too.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Stopwatch
from benchmarks.engines import EngineProcess, EngineSpec
from benchmarks.gpu.common import GIB, Report, gpu_header, parser
from benchmarks.gpu.engine_worker import EXTENSION
from benchmarks.models import kv_bytes_per_token, read_config

MODULE = "benchmarks.gpu.engine_decode"
MODEL = Path(__file__).parent / "llama-3.1-8b"
STEPS = 128
WARM_STEPS = 8
REPEATS = 2
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
STOCK = OFFLINE | {"VLLM_PLUGINS": ""}
"""Environment of an engine without us."""
ENGINES = ("stock", "device", "host")
"""Stock vLLM; and FreeKV, by where its KV cache is."""
CONTEXTS = (2048, 32768, 131072)
BATCHES = (1, 8)
MOST_REQUESTS = 32
"""Most requests at once, except in host memory, where it is the largest batch."""
FILLED = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"startup_fill": True, "fill_mean": 0.0, "fill_std": 1.0},
}


def engine_spec(engine: str, given: argparse.Namespace) -> EngineSpec:
    """The arguments with which an engine is started.

    Args:
        engine: One of `ENGINES`.
        given: The program's options.
    """
    llm: dict[str, Any] = {
        "model": str(given.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": max(given.context),
        "enable_prefix_caching": given.prefill,
        "kernel_config": {"enable_flashinfer_autotune": False},
        "worker_extension_cls": EXTENSION,
    }
    if not given.defaults:
        llm |= small(most_requests(engine, given), given.uncompiled)
    if not given.prefill:
        llm["kv_transfer_config"] = FILLED
    if given.cache_gib is not None:
        llm["kv_cache_memory_bytes"] = int(given.cache_gib * GIB)
    if engine == "stock":
        return EngineSpec("stock vLLM", llm, STOCK)
    options: dict[str, Any] = {"budget": given.budget, "home": engine}
    if engine == "host" and given.home_gib is not None:
        options["home_bytes"] = int(given.home_gib * GIB)
    llm |= {"attention_backend": "FREEKV", "additional_config": {"kv_retrieval": options}}
    return EngineSpec(f"freekv, home={engine}", llm, OFFLINE)


def most_requests(engine: str, given: argparse.Namespace) -> int:
    """How many requests at once are measured at most, and unless ``--defaults`` served."""
    return max(given.batch) if engine == "host" else max(*given.batch, MOST_REQUESTS)


def small(most: int, uncompiled: bool) -> dict[str, Any]:
    """Arguments of an engine that starts sooner, for few requests."""
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": [*sizes, most]}
    if uncompiled:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return {
        "max_num_seqs": most,
        "compilation_config": compilation,
        "gpu_memory_utilization": 0.9,
    }


class Measured:
    """An engine, and the prompts that it is measured with.

    Args:
        engine: Running.
        model: Its folder, with ``config.json``.
        longest: The largest context.
        requests: Most at once.
    """

    def __init__(self, engine: EngineProcess, model: Path, longest: int, requests: int) -> None:
        self.engine, self.requests = engine, requests
        self._generator = torch.Generator().manual_seed(0)
        self._batch = self.prompts(requests, longest)
        self.bytes_per_token = kv_bytes_per_token(read_config(model))
        self.block_size = engine.info["block_size"]
        self.capacity = engine.info["num_blocks"] * self.block_size

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """New prompts."""
        # Ids of every vocabulary, none of them special.
        return torch.randint(1000, 30000, (count, length), generator=self._generator).tolist()

    def fits(self, context: int, batch: int) -> bool:
        """Whether the KV cache holds the batch; vLLM keeps a block for itself."""
        blocks = -(-context // self.block_size) * batch
        return (blocks + 1) * self.block_size <= self.capacity

    def gib(self, tokens: int) -> float:
        """Bytes of the keys and values of tokens."""
        return round(tokens * self.bytes_per_token / GIB, 2)

    def prefill(self, context: int) -> dict[str, float]:
        """Seconds to the first token of a new prompt, alone."""
        times = [
            self.engine.generate(self.prompts(1, context - 1), 1).first_token[0]
            for _ in range(1 + REPEATS)
        ][1:]
        seconds = statistics.median(times)
        return {"seconds": seconds, "tokens_per_second": context / seconds}

    def decode(self, context: int, batch: int) -> dict[str, Any]:
        """Milliseconds per step in which every request of the batch decodes one token.

        Returns:
            With the hits of the recall cache, and the KV heads that corrected, meanwhile.
        """
        if not self.fits(context, batch):
            return {"fits": False, "needs_gib": self.gib(batch * context)}
        before = self.figures()
        tokens = STEPS + WARM_STEPS
        prompts = [prompt[: context - tokens] for prompt in self._batch[:batch]]
        self.engine.generate(prompts, 1)
        medians = []
        for _ in range(REPEATS):
            steps = self.engine.generate(prompts, tokens).steps[WARM_STEPS:]
            medians.append(statistics.median(steps) * 1e3)
        steps_done = REPEATS * (tokens - 1)  # the first token is the prompt's
        return {
            "fits": True,
            "ms": min(medians),
            "repeats": medians,
            "tokens_per_second": batch / min(medians) * 1e3,
            "steps": steps_done,
            "kv_gib": self.gib(batch * context),
            **shares(before, self.figures(), steps_done * batch),
        }

    def figures(self) -> dict[str, Any]:
        """Figures that the worker of the engine reports."""
        return self.engine.collective_rpc("device_figures")

    def memory(self, contexts: Sequence[int]) -> dict[str, Any]:
        """Bytes on the device, and those that a request of each context takes."""
        figures = self.figures()
        needed = {str(c): self.device_bytes(c, figures) for c in contexts}
        return {
            **figures,
            "capacity": self.capacity,
            "device_bytes_per_request": needed,
            "requests_that_fit": {
                str(c): (self.capacity // self.block_size - 1) // -(-c // self.block_size)
                for c in contexts
            },
        }

    def device_bytes(self, context: int, figures: Mapping[str, Any]) -> int:
        """Bytes of the KV cache, its index and slots, for one request of a context."""
        blocks = -(-context // self.block_size)
        if tiers := figures.get("tiers"):
            beside = (tiers["dense"] + tiers["index"]) * blocks // tiers["blocks"]
            return beside + tiers["slots"] // self.requests
        kv = blocks * self.block_size * self.bytes_per_token
        return kv + figures.get("index", 0) * blocks // (self.capacity // self.block_size)


def shares(
    before: Mapping[str, int], after: Mapping[str, int], rows: int
) -> dict[str, float | None]:
    """The share of units found in slots, and of heads that corrected, between two readings.

    Args:
        before, after: Of `DeviceExtension.device_figures`.
        rows: How many requests' steps there were between them.
    """
    found: dict[str, float | None] = {}
    if heads := rows * after.get("retrieval_heads", 0):
        found["corrected"] = (after["heads_corrected"] - before["heads_corrected"]) / heads
    if looked_up := after.get("looked_up", 0) - before.get("looked_up", 0):
        found["hit_rate"] = 1 - (after["missed"] - before["missed"]) / looked_up
        found["ahead_share"] = (after["ahead"] - before["ahead"]) / looked_up
    return found


def measure(
    report: Report,
    engine: str,
    given: argparse.Namespace,
    largest: dict[int, int],
    log: Path,
) -> list[list[Any]]:
    """Everything about one engine.

    Args:
        report: Where results go.
        engine: One of `ENGINES`.
        given: The program's options.
        largest: Batch that stock vLLM fits, by context; written where this is stock vLLM.
        log: To which the engine's output is appended.

    Returns:
        Rows of the table.
    """
    spec, watch, rows = engine_spec(engine, given), Stopwatch(), []
    with EngineProcess(spec, log) as process:
        started = {"start_s": round(watch.seconds, 1), **process.info}
        report.measure(f"{engine}, engine", lambda: started)
        most = most_requests(engine, given)
        measured = Measured(process, given.model, max(given.context), most)
        report.measure(f"{engine}, memory", partial(measured.memory, given.context))
        for context in given.context:
            fitting = max((n for n in range(1, most + 1) if measured.fits(context, n)), default=0)
            if engine == "stock":
                largest[context] = fitting
            prefill = None
            if given.prefill:
                name = f"{engine}, prefill {context}"
                prefill = report.measure(name, partial(measured.prefill, context))
            seconds = prefill and prefill["seconds"]
            others = () if given.defaults else (fitting, largest.get(context, 0))
            batches = {*given.batch, *others}
            for batch in sorted(n for n in batches if 1 <= n <= most):
                name = f"{engine}, decode {context}, batch {batch}"
                found = report.measure(name, partial(measured.decode, context, batch))
                rows.append([engine, context, batch, *_cells(found), seconds])
    return rows


def _cells(found: Mapping[str, Any] | None) -> list[object]:
    if found is None or not found["fits"]:
        return ["failed" if found is None else "does not fit", None, None, None]
    return [
        found["ms"],
        found["tokens_per_second"],
        found.get("hit_rate"),
        found.get("corrected"),
    ]


def options() -> argparse.ArgumentParser:
    """The program's."""
    result = parser(MODULE, __doc__)
    add = result.add_argument
    add("--engine", choices=ENGINES, action="append", help="default: stock, device")
    add("--context", type=int, action="append", help=f"tokens; default: {CONTEXTS}")
    add("--batch", type=int, action="append", help=f"requests; default: {BATCHES}")
    add("--budget", type=int, default=2048, help="tokens")
    add("--model", type=Path, default=MODEL, help="folder with config.json")
    add("--cache-gib", type=float, help="device memory of the KV cache, the same for all engines")
    add("--defaults", action="store_true", help="vLLM's defaults, as a user starts it")
    add("--add", action="store_true", help="keep what the result file has of other engines")
    add("--uncompiled", action="store_true", help="CUDA graphs alone: engines start sooner")
    add("--prefill", action="store_true", help="compute prompts, and time that")
    add("--home-gib", type=float, help="host memory of the KV cache; default: the engine's")
    return result


def main() -> None:
    """Measure one engine after another; tables last."""
    given = options().parse_args()
    given.engine = sorted(given.engine or ENGINES[:2], key=ENGINES.index)  # stock comes first
    given.context, given.batch = given.context or CONTEXTS, given.batch or BATCHES
    report = Report(given.output, gpu_header(MODULE), add=given.add)
    rows: list[list[Any]] = []
    largest: dict[int, int] = {}
    # Of all engines: few files come back from a GPU machine.
    log = given.output.with_name(f"{given.output.stem}_engines.log")
    if not given.add:
        log.unlink(missing_ok=True)
    for engine in given.engine:
        part = partial(measure, report, engine, given, largest, log)
        rows += report.measure(f"{engine}", part) or []
    columns = "engine, context, batch, ms/step, tokens/s, hit rate, corrected, prefill s".split(
        ", "
    )
    report.table(f"Decoding, {given.model.name}'s shapes", columns, rows)
    report.finish()


if __name__ == "__main__":
    main()
