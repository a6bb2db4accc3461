"""Driver of ONNX Runtime GenAI."""

from __future__ import annotations

import json
import time
from importlib import metadata
from typing import Any

import numpy as np
import onnxruntime_genai

from benchmarks.peers import protocol

SLACK = 8
"""Tokens beside the context: a prompt of exactly ``max_length`` ends in an exception."""


class Ort:
    """One generator, which goes back to where a prompt parts from the last one.

    Args:
        model: Folder of a model that its builder has made.
        context: Tokens of a sequence.
        threads: Of an operator.
    """

    def __init__(self, model: str, context: int, threads: int) -> None:
        config = onnxruntime_genai.Config(model)
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = onnxruntime_genai.Model(config)
        params = onnxruntime_genai.GeneratorParams(self._model)
        longest = context + SLACK
        params.set_search_options(max_length=longest, min_length=longest - 1, do_sample=False)
        self._generator = onnxruntime_genai.Generator(self._model, params)
        self._done: list[int] = []
        self.versions = {"onnxruntime-genai": metadata.version("onnxruntime-genai")}

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """See `protocol.Engine`."""
        begin, times, found = time.perf_counter(), list[float](), list[int]()
        pairs = zip(self._done, tokens[:-1], strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if same is None:
            same = min(len(self._done), len(tokens) - 1)
        if self._done:
            self._generator.rewind_to(same)
        self._generator.append_tokens(np.array([tokens[same:]], dtype=np.int32))
        for _ in range(count):
            self._generator.generate_next_token()
            found.append(int(self._generator.get_next_tokens()[0]))
            times.append(time.perf_counter())
        self._done = [*tokens, *found]
        return {
            "first_token_s": times[0] - begin,
            "steps_s": protocol.steps(times),
            "tokens": found,
        }


if __name__ == "__main__":
    protocol.serve(Ort)
