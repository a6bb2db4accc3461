"""Load generators: they send requests to a server, and say what clients see of it.

Generators call different things by one name. Here, in ms and per request:

- ``first_token_ms``: from sending the request until the first chunk of its answer. Requests go to
  ``/v1/completions``, where this is the first token: on the route for chats vLLM's generator takes
  the first chunk, too, and that one only says who speaks.
- ``token_ms``: from the first token to the last, divided by the tokens behind the first: vLLM's
  TPOT, and what guidellm calls inter-token latency.
- ``token_ms_with_first``: from sending the request until the last token, divided by all tokens:
  guidellm's TPOT. Behind a long prompt most of it is the wait for the first token.
- ``answer_ms``: from sending the request to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from transformers import AutoTokenizer
from vllm.benchmarks.datasets import SampleRequest
from vllm.benchmarks.serve import TaskType, benchmark

from benchmarks.common import ROOT
from benchmarks.environments import interpreter, run

PERCENTILES = (50.0, 90.0, 99.0)
OF_VLLM = {"first_token_ms": "ttft", "token_ms": "tpot", "answer_ms": "e2el"}
OF_GUIDELLM = {
    "first_token_ms": "time_to_first_token_ms",
    "token_ms": "inter_token_latency_ms",
    "token_ms_with_first": "time_per_output_token_ms",
}
LOCK = ROOT / "requirements" / "load.txt"


def by_vllm(
    url: str, model: Path, prompts: Sequence[str], at_once: int, tokens: int
) -> dict[str, Any]:
    """What clients see of a server, by the generator of ``vllm bench serve``.

    Args:
        url: The server's, without a trailing slash.
        model: The checkpoint, whose tokenizer counts; it is served by the name of its directory.
        prompts: A text per request; each is sent once.
        at_once: How many requests run at the same time.
        tokens: Of each answer.

    Returns:
        ``first_token_ms``, ``token_ms`` and ``answer_ms``, each by percentile, and
        ``tokens_per_s`` of all answers together.

    Raises:
        ValueError: The server has refused a request, or failed.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [
        SampleRequest(prompt, len(tokenizer(prompt).input_ids), tokens, request_id=str(number))
        for number, prompt in enumerate(prompts)
    ]
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        found = asyncio.run(
            benchmark(
                task_type=TaskType.GENERATION,
                endpoint_type="vllm",
                api_url=f"{url}/v1/completions",
                base_url=url,
                model_id=str(model),
                model_name=model.name,
                tokenizer=tokenizer,
                input_requests=asked,
                logprobs=None,
                request_rate=math.inf,
                burstiness=1.0,
                disable_tqdm=True,
                num_warmups=0,
                profile=False,
                selected_percentile_metrics=list(OF_VLLM.values()),
                selected_percentiles=list(PERCENTILES),
                ignore_eos=True,
                goodput_config_dict={},
                max_concurrency=at_once,
                lora_modules=None,
                extra_headers=None,
                extra_body={"temperature": 0},
                ready_check_timeout_sec=0,
            )
        )
    _check(url, found["completed"], len(prompts))
    figures: dict[str, Any] = {
        ours: {f"{p:.0f}": round(found[f"p{p:.0f}_{theirs}_ms"], 2) for p in PERCENTILES}
        for ours, theirs in OF_VLLM.items()
    }
    return figures | {"tokens_per_s": round(found["output_throughput"], 2)}


def by_guidellm(
    url: str, model: Path, prompts: Sequence[str], at_once: int, tokens: int
) -> dict[str, Any]:
    """What clients see of a server, by guidellm, in an environment of its own.

    Args:
        url, model, prompts, at_once, tokens: See :func:`by_vllm`.

    Returns:
        The same figures, and ``token_ms_with_first``.

    Raises:
        ValueError: The server has refused a request, or failed.
        EngineError: guidellm has failed, or cannot be installed.
    """
    program = interpreter(LOCK, beside=True).with_name("guidellm")
    with tempfile.TemporaryDirectory() as scratch:
        data, asked, said = (Path(scratch, name) for name in ("d.jsonl", "asked.json", "said.json"))
        rows = ({"prompt": prompt, "output_tokens_count": tokens} for prompt in prompts)
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        spec = {
            "backend": {
                "kind": "openai_http",
                "target": url,
                "model": model.name,
                "request_format": "/v1/completions",
                "extras": {"body": {"temperature": 0}},
            },
            "profile": {"kind": "concurrent", "streams": [at_once]},
            "constraints": [{"kind": "max_requests", "count": len(prompts)}],
            "tokenizer": {"kind": "huggingface_auto", "model": str(model)},
            "data": [{"kind": "json_file", "path": str(data)}],
            "outputs": [{"kind": "json", "path": str(said)}],
        }
        asked.write_text(json.dumps({"spec": spec}))
        command = [str(program), "run", "--config", str(asked), "--disable-console"]
        run(command, "guidellm has failed")
        (found,) = json.loads(said.read_text())["benchmarks"]
    answered = found["requests"]["successful"]
    _check(url, len(answered), len(prompts))
    return _of_requests(answered)


def _of_requests(answered: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of guidellm's requests."""
    figures: dict[str, Any] = {
        ours: _percentiles([one[theirs] for one in answered])
        for ours, theirs in OF_GUIDELLM.items()
    }
    figures["answer_ms"] = _percentiles([1000 * one["request_latency"] for one in answered])
    begin = min(one["request_start_time"] for one in answered)
    end = max(one["request_end_time"] for one in answered)
    tokens = sum(one["output_tokens"] for one in answered)
    return figures | {"tokens_per_s": round(tokens / (end - begin), 2)}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    found = np.percentile(values, PERCENTILES)
    return {f"{p:.0f}": round(float(v), 2) for p, v in zip(PERCENTILES, found, strict=True)}


def _check(url: str, answered: int, asked: int) -> None:
    if answered != asked:
        raise ValueError(f"{url} has answered {answered} of {asked} requests.")


class Generator(Protocol):
    """Sends requests; see :func:`by_vllm`."""

    def __call__(
        self, url: str, model: Path, prompts: Sequence[str], at_once: int, tokens: int
    ) -> dict[str, Any]: ...


GENERATORS: Mapping[str, Generator] = {
    "vllm": by_vllm,
    "guidellm": by_guidellm,
}
"""The generators by name."""
