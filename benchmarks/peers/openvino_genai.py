"""Driver of OpenVINO GenAI, by its continuous batching."""

from __future__ import annotations

import time
from importlib import metadata
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers import protocol

BLOCK = 32
"""Tokens of a block of its KV cache on CPUs."""


class OpenVino:
    """A pipeline with its prefix cache.

    Args:
        model: A GGUF file.
        context: Tokens that the KV cache has room for.
        threads: Of the model.
        sparse: Whether prompts are read by XAttention.
    """

    def __init__(self, model: str, context: int, threads: int, sparse: bool) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = context // BLOCK + 8
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = 1
        if sparse:
            scheduler.use_sparse_attention = True
            scheduler.sparse_attention_config.mode = openvino_genai.SparseAttentionMode.XATTENTION
        options = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
        self._serial = 0
        self.versions = {"openvino-genai": metadata.version("openvino-genai")}

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """See `protocol.Engine`."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = count
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        self._serial += 1
        begin, times, found = time.perf_counter(), list[float](), list[int]()
        prompt = openvino.Tensor(np.array([tokens], dtype=np.int64))
        answer = self._pipeline.add_request(self._serial, prompt, config)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while answer.can_read():
                for output in answer.read().values():
                    times.append(time.perf_counter())
                    found += output.generated_ids
        if len(found) != count:
            raise RuntimeError(f"{len(found)} tokens came of {count}: {answer.get_status()}")
        return {
            "first_token_s": times[0] - begin,
            "steps_s": protocol.steps(times),
            "tokens": [int(token) for token in found],
        }


if __name__ == "__main__":
    protocol.serve(OpenVino)
