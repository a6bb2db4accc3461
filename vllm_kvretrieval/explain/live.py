"""The page of a request that a running server answers: which passages its answer attended to."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_kvretrieval.doctor.server import Client
from vllm_kvretrieval.explain.output import borders
from vllm_kvretrieval.explain.page import PASSAGES, Passages, Row, Step, write_page

LONGEST_S = 3600.0
"""A server may read a long text for minutes."""

NO_SOURCES = (
    "does not tell what answers attend to; one that is started with VLLM_PLUGINS=kvretrieval in "
    "its environment and --kv-retrieval.sources true does"
)


def explain_request(
    client: Client, model: str, name: str, text: str, answer_tokens: int, page: Path
) -> str:
    """Let a server continue a text, and write a page of what the continuation attended to.

    Args:
        client: The server.
        model: What it calls its model.
        name: Of the text.
        text: The prompt.
        answer_tokens: Tokens of the answer.
        page: The file.

    Returns:
        The answer.

    Raises:
        OSError: No server answers (URLError), or the page cannot be written.
        ValueError: It refuses, or does not tell.
    """
    status, _ = client.ask("/v1/kv_retrieval/options")
    if status == 401:
        raise ValueError(f"{client.url} wants an API key; name it with --api-key")
    if status != 200:
        raise ValueError(f"{client.url} {NO_SOURCES}")
    tokens = _asked(client, "/tokenize", {"model": model, "prompt": text})["tokens"]
    answer = _asked(
        client,
        "/v1/completions",
        {
            "model": model,
            "prompt": tokens,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "vllm_xargs": {"kv_retrieval_sources": True},
        },
    )
    told = _asked(client, f"/v1/kv_retrieval/sources/{answer['id']}-0", None)
    size, said = int(told["page_size"]), str(answer["choices"][0]["text"])
    pages = -(-len(tokens) // size)
    starts = borders(pages, PASSAGES)
    ends = [min(start * size, len(tokens)) for start in starts]

    def text_of(begin: int, end: int) -> str:
        part = {"model": model, "tokens": tokens[begin:end]}
        return str(_asked(client, "/detokenize", part)["prompt"])

    rows = [
        Row(f"layers {first} to {last}", [Step(_of_passages(each, starts)) for each in of_group])
        for (first, last), *of_group in zip(
            told["groups"], told["weights"], told["peaks"], strict=True
        )
    ]
    if not rows:
        raise ValueError(
            "the server has noted nothing: the text fits in the budget, or the answer is one token"
        )
    write_page(
        page,
        f"{model}, {name}: {len(tokens)} tokens",
        f"The answer: {said}",
        Passages.of(ends, text_of),
        rows,
        [f"the mean of {int(told['steps'])} steps", "the highest step of each page"],
        "attended to",
    )
    return said


def _of_passages(weights: Sequence[float], starts: Sequence[int]) -> list[float]:
    """The weight of each passage: that of its most attended page; unknown pages have none."""
    padded = [*map(float, weights), *[0.0] * starts[-1]]
    return [max(padded[begin:end]) for begin, end in pairwise(starts)]


def _asked(client: Client, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    status, text = client.ask(path, body, LONGEST_S)
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if status != 200 or not isinstance(found, dict):
        raise ValueError(f"{client.url}{path} answers {status}: {text.strip()[:300]}")
    return found
