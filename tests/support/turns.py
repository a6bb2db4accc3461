"""Chats of several turns over one prefix cache, of which some are to be exact."""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm import LLM

from tests.support.engine import Answer, Request, alone, drive


def chat(llm: LLM, document: list[int], turns: Iterable[dict[str, Any]], tokens: int) -> list[int]:
    """A prompt after some turns, whose blocks are in the prefix cache."""
    prompt = document
    for options in turns:
        (answer,) = drive(llm, [Request(prompt, tokens, options, cache=True)])
        prompt = prompt + answer.tokens + document[:20]
    return prompt


def with_and_without_cache(
    llm: LLM, prompt: Sequence[int], options: dict[str, Any], tokens: int = 8
) -> tuple[Answer, Answer]:
    """A request that may share what is in the prefix cache, and the same that shares nothing."""
    request = Request(list(prompt), tokens, options, cache=True)
    return drive(llm, [request])[0], alone(llm, request)


def record_sparse(worker: Any) -> None:
    """Let a worker note the positions that attend to a part of their contexts, by request."""
    sparse: dict[str, set[int]] = {}
    table = worker.requests
    count_steps = table.count_steps

    def record(seats: Any, lens: Any, pages: Any, rows: Any, *more: Any) -> None:
        names = table.batch
        for row in rows.nonzero()[0].tolist():
            sparse.setdefault(names[row], set()).add(int(lens[row]) - 1)
        count_steps(seats, lens, pages, rows, *more)

    table.count_steps, table.sparse = record, sparse


def recorded_sparse(worker: Any) -> dict[str, set[int]]:
    """The notes so far; no more are taken."""
    del worker.requests.count_steps
    return dict(worker.requests.__dict__.pop("sparse"))
