"""Stock vLLM with the shapes of Llama-3.1-8B: what retrieval on a GPU is held against.

    python -m benchmarks.gpu.stock_vllm

Weights are random (`load_format="dummy"`), prompts random token ids: neither changes the time of
a step. Compilation and CUDA graphs are on, as vLLM has them by default. Prefill is timed on a
prompt that the engine has not seen, decoding on prompts that the prefix cache holds; a context is
the length that a request reaches at its last step. Where a batch's KV cache does not fit into the
device's memory, that is the result.
"""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import EngineProcess, EngineSpec
from benchmarks.gpu.common import GIB, Report, gpu_header, parser

MODULE = "benchmarks.gpu.stock_vllm"
MODEL = Path(__file__).parent / "llama-3.1-8b"
CONTEXTS = (2048, 8192, 32768, 131072)
BATCHES = (1, 4, 8)
STEPS = 128
WARM_STEPS = 8
REPEATS = 2
ENVIRONMENT = {
    "VLLM_PLUGINS": "",  # stock: without us
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class Baseline:
    """One engine, and the prompts that it is measured with."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._generator = torch.Generator().manual_seed(0)
        self._batch = self._prompts(max(BATCHES), max(CONTEXTS))
        config = json.loads((MODEL / "config.json").read_text())
        layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
        self.bytes_per_token = 2 * layers * heads * config["head_dim"] * torch.bfloat16.itemsize
        self.capacity = engine.info["num_blocks"] * engine.info["block_size"]

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        # Ids of every vocabulary, none of them special.
        return torch.randint(1000, 30000, (count, length), generator=self._generator).tolist()

    def prefill(self, context: int) -> dict[str, float]:
        """Seconds to the first token of a new prompt, alone."""
        times = [
            self._engine.generate(self._prompts(1, context - 1), 1).first_token[0]
            for _ in range(1 + REPEATS)
        ][1:]
        seconds = statistics.median(times)
        return {"seconds": seconds, "tokens_per_second": context / seconds}

    def decode(self, context: int, batch: int) -> dict[str, Any]:
        """Milliseconds per step in which every request of the batch decodes one token."""
        needed = batch * context
        if needed > self.capacity:
            return {"fits": False, "needs_gib": self._gib(needed)}
        tokens = STEPS + WARM_STEPS
        prompts = [prompt[: context - tokens] for prompt in self._batch[:batch]]
        self._engine.generate(prompts, 1)
        medians = []
        for _ in range(REPEATS):
            steps = self._engine.generate(prompts, tokens).steps[WARM_STEPS:]
            medians.append(statistics.median(steps) * 1e3)
        return {"fits": True, "ms": min(medians), "repeats": medians, "kv_gib": self._gib(needed)}

    def memory(self) -> dict[str, Any]:
        """Where the device's memory goes, and how many requests of a context it holds."""
        free, total = torch.cuda.mem_get_info()
        return {
            "used_gib": round((total - free) / GIB, 1),
            "kv_pool_gib": self._gib(self.capacity),
            "kv_bytes_per_token": self.bytes_per_token,
            "gib_per_request": {str(c): self._gib(c) for c in CONTEXTS},
            "requests_that_fit": {str(c): self.capacity // c for c in CONTEXTS},
        }

    def _gib(self, tokens: int) -> float:
        return round(tokens * self.bytes_per_token / GIB, 2)


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
        env=ENVIRONMENT,
    )
    with EngineProcess(spec, output.with_suffix(".log")) as engine:
        report.measure("engine", lambda: engine.info)
        baseline = Baseline(engine)
        memory = report.measure("memory", baseline.memory)
        rows = []
        for context in CONTEXTS:
            prefill = report.measure(f"prefill {context}", partial(baseline.prefill, context))
            cells = [
                _cell(
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


def _cell(decoded: dict[str, Any] | None) -> object:
    if decoded is None:
        return "failed"
    return decoded["ms"] if decoded["fits"] else "does not fit"


if __name__ == "__main__":
    main()
