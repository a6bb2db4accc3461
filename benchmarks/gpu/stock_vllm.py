"""Stock vLLM with the shapes of Llama-3.1-8B: what retrieval on a GPU is held against.

    python -m benchmarks.gpu.stock_vllm

Weights are random (`load_format="dummy"`), prompts random token ids: neither changes the time of
a step. Compilation and CUDA graphs are on, as vLLM has them by default. Prefill is timed on a
prompt that the engine has not seen, decoding on prompts that the prefix cache holds; a context is
the length that a request reaches at its last step. Where a batch's KV cache does not fit into the
device's memory, that is the result.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.engines import EngineProcess, EngineSpec
from benchmarks.gpu.common import GIB, Report, gpu_header, parser
from benchmarks.gpu.decoding import MODEL, REPEATS, STOCK, Decoding, cell

MODULE = "benchmarks.gpu.stock_vllm"
CONTEXTS = (2048, 8192, 32768, 131072)
BATCHES = (1, 4, 8)


class Baseline(Decoding):
    """Stock vLLM."""

    def prefill(self, context: int) -> dict[str, float]:
        """Seconds to the first token of a new prompt, alone."""
        times = [
            self.engine.generate(self.prompts(1, context - 1), 1).first_token[0]
            for _ in range(1 + REPEATS)
        ][1:]
        seconds = statistics.median(times)
        return {"seconds": seconds, "tokens_per_second": context / seconds}

    def memory(self) -> dict[str, Any]:
        """The division of the device's memory, and the requests of a context that it holds."""
        free, total = torch.cuda.mem_get_info()
        return {
            "used_gib": round((total - free) / GIB, 1),
            "kv_pool_gib": self.gib(self.capacity),
            "kv_bytes_per_token": self.bytes_per_token,
            "gib_per_request": {str(c): self.gib(c) for c in CONTEXTS},
            "requests_that_fit": {str(c): self.capacity // c for c in CONTEXTS},
        }


def main() -> None:
    """Start the engine once and measure everything; tables last."""
    output = parser(MODULE, __doc__).parse_args().output
    report = Report(output, gpu_header(MODULE))
    spec = EngineSpec(
        name="stock vLLM",
        llm={
            "model": str(MODEL),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": max(CONTEXTS),
            "max_num_seqs": 16,
            "gpu_memory_utilization": 0.9,
        },
        env=STOCK,
    )
    with EngineProcess(spec, output.with_suffix(".log")) as engine:
        report.measure("engine", lambda: engine.info)
        baseline = Baseline(engine, MODEL, CONTEXTS, BATCHES)
        memory = report.measure("memory", baseline.memory)
        rows = []
        for context in CONTEXTS:
            prefill = report.measure(f"prefill {context}", partial(baseline.prefill, context))
            cells = [
                cell(
                    report.measure(
                        f"decode {context}, batch {batch}",
                        partial(baseline.decode, context, batch),
                    )
                )
                for batch in BATCHES
            ]
            request = memory["gib_per_request"][str(context)] if memory else None
            rows.append([context, prefill and prefill["seconds"], *cells, request])
    columns = ["context", "prefill, s", *[f"ms/step, batch {b}" for b in BATCHES], "GiB/request"]
    report.table("Stock vLLM, Llama-3.1-8B's shapes", columns, rows)
    report.finish()


if __name__ == "__main__":
    main()
