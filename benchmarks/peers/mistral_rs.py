"""Driver of mistral.rs. Its prompts are texts, and its answers, too."""

from __future__ import annotations

import time
from importlib import metadata
from pathlib import Path
from typing import Any

import mistralrs

from benchmarks.peers import protocol


class Mistral:
    """A runner with its prefix cache.

    Args:
        model: A GGUF file.
        context: It has no such option without paging, which CPUs lack.
        threads: They are in the environment.
    """

    def __init__(self, model: str, context: int, threads: int) -> None:
        path = Path(model)
        self._runner = mistralrs.Runner(
            mistralrs.Which.GGUF(str(path.parent), path.name), max_seqs=1
        )
        self.versions = {"mistralrs": metadata.version("mistralrs")}

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """See `protocol.Engine`; ``tokens`` are the ids of the prompt's text."""
        request = mistralrs.ChatCompletionRequest(
            messages=self._runner.detokenize_text(tokens, skip_special_tokens=False),
            model="default",
            max_tokens=count,
            temperature=0.0,
            ignore_eos=True,
            stream=True,
        )
        begin, times, text = time.perf_counter(), list[float](), ""
        for chunk in self._runner.send_chat_completion_request(request):
            times.append(time.perf_counter())
            text += chunk.choices[0].delta.content or ""
        return {"first_token_s": times[0] - begin, "steps_s": protocol.steps(times), "text": text}


if __name__ == "__main__":
    protocol.serve(Mistral)
