"""Decoding in whole engines with models of random weights: what is measured, and how."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import EngineProcess
from benchmarks.gpu.common import GIB

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


class Decoding:
    """An engine, and the prompts that it is measured with.

    Args:
        engine: Running.
        model: Its folder, with ``config.json``.
        contexts, batches: The largest ones are those of the longest prompts.
    """

    def __init__(
        self, engine: EngineProcess, model: Path, contexts: Sequence[int], batches: Sequence[int]
    ) -> None:
        self.engine = engine
        self._generator = torch.Generator().manual_seed(0)
        self._batch = self.prompts(max(batches), max(contexts))
        config = json.loads((model / "config.json").read_text())
        layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
        size = config["hidden_size"] // config["num_attention_heads"]
        head_size = config.get("head_dim", size)
        self.bytes_per_token = 2 * layers * heads * head_size * torch.bfloat16.itemsize
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

    def decode(self, context: int, batch: int) -> dict[str, Any]:
        """Milliseconds per step in which every request of the batch decodes one token."""
        if not self.fits(context, batch):
            return {"fits": False, "needs_gib": self.gib(batch * context)}
        tokens = STEPS + WARM_STEPS
        prompts = [prompt[: context - tokens] for prompt in self._batch[:batch]]
        self.engine.generate(prompts, 1)
        medians = []
        for _ in range(REPEATS):
            steps = self.engine.generate(prompts, tokens).steps[WARM_STEPS:]
            medians.append(statistics.median(steps) * 1e3)
        return {
            "fits": True,
            "ms": min(medians),
            "repeats": medians,
            "tokens_per_second": batch / min(medians) * 1e3,
            "steps": REPEATS * (tokens - 1),  # the first token is the prompt's
            "kv_gib": self.gib(batch * context),
        }

    def gib(self, tokens: int) -> float:
        """Bytes of a token's keys and values."""
        return round(tokens * self.bytes_per_token / GIB, 2)


def cell(decoded: dict[str, Any] | None) -> object:
    """A cell of a table: milliseconds per step."""
    if decoded is None:
        return "failed"
    return decoded["ms"] if decoded["fits"] else "does not fit"
