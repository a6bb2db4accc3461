"""Rows that verify drafts, by the query that selects for them.

    python -m benchmarks.quality drafts --context 8000 --budget 1024

Full attention continues a novel; its tokens are the drafts of a method, which verifies them. Rows
share the selection of the first row's query (what the engine does; with its remainder, or without
one in other rows), or that of the mean of all rows' queries, or decode one by one, and each selects
for itself. For each draft: how often the method accepts it, and the KL divergence of its
distribution from full attention's, over the latter's 20 likeliest tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.cli import SMOLLM2_32K, add_model
from benchmarks.texts import excerpt

LIKELIEST = 20
PARAGRAPHS = 60
"""Between the beginnings of texts."""


class Told:
    """A drafter that drafts what it is told; see vLLM's ``custom_class``."""

    text: tuple[int, ...] = ()

    def __init__(self, vllm_config: Any) -> None:
        self._most = vllm_config.num_speculative_tokens

    def load_model(self, *_: Any) -> None:
        """Do nothing."""

    def propose(
        self, sampled: list[list[int]], counts: np.ndarray, ids: np.ndarray, **_: Any
    ) -> list[list[int]]:
        """The rest of the text behind each context that it begins with."""
        return [self._after(tuple(ids[row, : counts[row]])) for row in range(len(sampled))]

    def _after(self, context: tuple[int, ...]) -> list[int]:
        count = len(context)
        return list(self.text[count : count + self._most]) if self.text[:count] == context else []


def mean_query(plan: Any, queries: torch.Tensor) -> torch.Tensor:
    """In place of :meth:`DecodePlan.asking`: all rows' queries select."""
    starts = plan.rows.starts
    if starts is None:
        return queries
    sums = torch.zeros(len(starts) - 1, *queries.shape[1:])
    counts = starts.diff()
    sums.index_add_(0, torch.arange(len(counts)).repeat_interleave(counts), queries.float())
    return (sums / counts[:, None, None]).to(queries.dtype)


def first_alone(remainder: Any, starts: torch.Tensor) -> Any:
    """In place of :meth:`Remainder.shared`: only the first row has a remainder."""
    count = starts.diff()
    values, lse = (part.repeat_interleave(count, 0) for part in remainder)
    others = torch.ones(len(lse), dtype=torch.bool)
    others[starts[:-1].long()] = False
    lse[others] = -math.inf
    return type(remainder)(values, lse)


def divergence(full: dict[int, float], ours: dict[int, float]) -> float:
    """KL divergence over the tokens that both name; the rest of either is one more token."""
    both = full.keys() & ours.keys()
    rest = [max(1 - sum(math.exp(d[t]) for t in both), 1e-6) for d in (full, ours)]
    kl = rest[0] * math.log(rest[0] / rest[1])
    return kl + sum(math.exp(full[t]) * (full[t] - ours[t]) for t in both)


class Measured:
    """An engine, and what a method makes of the drafts that full attention is."""

    def __init__(self, options: argparse.Namespace) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        self.options = options
        self.llm = LLM(
            model=str(options.model),
            max_model_len=options.context + options.tokens + 64,
            kv_cache_memory_bytes=1 << 30,
            max_num_seqs=2,
            enforce_eager=True,
            attention_backend=options.method,
            additional_config={"kv_retrieval": {"budget": options.budget}},
            speculative_config={
                "method": "custom_class",
                "model": f"{__name__}.Told",
                "num_speculative_tokens": options.drafts,
            },
        )

    def answer(self, prompt: Sequence[int], tokens: int, **asked: Any) -> list[dict[int, float]]:
        """Log-probs of the likeliest tokens at each place of an answer; the first is its own."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=LIKELIEST,
            extra_args={"kv_retrieval": asked},
        )  # fmt: skip
        (output,) = self.llm.generate(
            TokensPrompt(prompt_token_ids=list(prompt)), params, use_tqdm=False
        )
        answer = output.outputs[0]
        assert answer.logprobs is not None
        return [
            {token: place[token].logprob} | {t: one.logprob for t, one in place.items()}
            for token, place in zip(answer.token_ids, answer.logprobs, strict=True)
        ]

    def measure(self, prompt: list[int]) -> dict[str, dict[int, list[tuple[float, bool]]]]:
        """By who selects, and by draft: KL, and whether it is full attention's token."""
        from vllm_kvretrieval.kernels import Remainder
        from vllm_kvretrieval.methods import DecodePlan

        options = self.options
        full = self.answer(prompt, options.tokens, exact=True)
        text = prompt + [next(iter(place)) for place in full]
        found: dict[str, dict[int, list[tuple[float, bool]]]] = {}
        first, shared = DecodePlan.asking, Remainder.shared
        for name in ("one by one", "first", "first alone", "mean"):
            rows = found[name] = defaultdict(list)
            Told.text = () if name == "one by one" else tuple(text)
            changed: Any = mean_query if name == "mean" else first
            DecodePlan.asking = changed  # type: ignore[method-assign]
            changed = first_alone if name == "first alone" else shared
            Remainder.shared = changed  # type: ignore[method-assign]
            # A prompt's last token is decoded exactly, and then come a step's new token and drafts.
            for begin in range(0, options.tokens - options.drafts - 2, options.drafts + 1):
                ours = self.answer(text[: len(prompt) + begin], options.drafts + 2)
                for row, place in enumerate(ours[1:]):
                    theirs = full[begin + 1 + row]
                    same = next(iter(place)) == next(iter(theirs))
                    rows[row].append((divergence(theirs, place), same))
                    if not same:
                        break
        DecodePlan.asking, Remainder.shared = first, shared  # type: ignore[method-assign]
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, SMOLLM2_32K)
    parser.add_argument("--method", default="kvretrieval", help="that selects")
    parser.add_argument("--context", type=int, default=8000, help="tokens of a prompt")
    parser.add_argument("--budget", type=int, default=1024, help="in tokens")
    parser.add_argument("--drafts", type=int, default=4, help="of a step")
    parser.add_argument("--tokens", type=int, default=80, help="that full attention continues")
    parser.add_argument("--texts", type=int, default=4, help="how many prompts")
    parser.add_argument("--output", type=Path, help="a JSON file")


def run(options: argparse.Namespace) -> int:
    """Measure; see the module's description."""
    engine = Measured(options)
    tokenizer = engine.llm.get_tokenizer()
    all_rows: dict[str, dict[int, list[tuple[float, bool]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for number in range(options.texts):
        text = tokenizer.encode(excerpt(6 * options.context, number * PARAGRAPHS))
        for name, rows in engine.measure(text[: options.context]).items():
            for row, values in rows.items():
                all_rows[name][row] += values
    results = {
        name: [
            {
                "row": row,
                "kl": mean(kl for kl, _ in of),
                "same": mean(s for _, s in of),
                "n": len(of),
            }
            for row, of in sorted(rows.items())
        ]
        for name, rows in all_rows.items()
    }
    for name, shown in results.items():
        print(name, *(f"{r['kl']:.4f} {r['same']:.3f} ({r['n']})" for r in shown), sep="\t")
    if options.output:
        asked = {name: str(value) for name, value in vars(options).items()}
        options.output.write_text(json.dumps({"options": asked, "rows": results}, indent=1) + "\n")
    return 0
