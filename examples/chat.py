"""Chat about a long document with a running server.

    vllm serve MODEL --attention-backend kvretrieval
    python examples/chat.py REPORT.txt

The document goes along with every question, and is read once: the server finds it in its prefix
cache, with the index of its pages. After each answer stands how long the first token took. An empty
line ends the chat. A server with an API key gets that of VLLM_API_KEY, or of --api-key.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai

MAX_TOKENS = 200
THIS_MACHINE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
"""Hosts that are asked without the proxy of the environment, which would ask itself."""


class Chat:
    """A chat that begins with a document.

    Args:
        client: The server.
        document: Text of the document.
        budget: Tokens that decode steps attend to; None: the server's default.
        max_tokens: Most tokens of an answer.
    """

    def __init__(
        self,
        client: openai.OpenAI,
        document: str,
        budget: int | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._client, self._max_tokens = client, max_tokens
        self._model = client.models.list().data[0].id
        self._options = {} if budget is None else {"vllm_xargs": {"kv_retrieval_budget": budget}}
        self._messages: list[Any] = []
        self._document = f"Answer by this document.\n\n{document}\n\n"

    def ask(self, question: str) -> tuple[str, float]:
        """The answer, printed as it comes, and the seconds until its first token."""
        text = question if self._messages else self._document + question
        self._messages.append({"role": "user", "content": text})
        began, first, pieces = time.perf_counter(), 0.0, []
        for chunk in self._client.chat.completions.create(
            model=self._model,
            messages=self._messages,
            max_tokens=self._max_tokens,
            temperature=0,
            stream=True,
            extra_body=self._options,
        ):
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                first = first or time.perf_counter() - began
                pieces.append(piece)
                print(piece, end="", flush=True)
        print()
        answer = "".join(pieces)
        self._messages.append({"role": "assistant", "content": answer})
        return answer, first


def connect(url: str, key: str) -> openai.OpenAI:
    """A client of the server at this address, which asks for this API key, or for none."""
    by_proxy = urlsplit(url).hostname not in THIS_MACHINE
    http = openai.DefaultHttpxClient(trust_env=by_proxy)
    return openai.OpenAI(base_url=url, api_key=key, http_client=http)


def main() -> int:
    """Ask what is typed; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("document", type=Path, help="a text file")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the server")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VLLM_API_KEY") or "none",
        help="of the server (default: VLLM_API_KEY of the environment)",
    )
    parser.add_argument("--budget", type=int, help="tokens that a decode step attends to")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of an answer")
    given = parser.parse_args()
    try:
        client = connect(given.url, given.api_key)
        document = given.document.read_bytes().decode("utf-8")  # ends of lines as they are
        chat = Chat(client, document, given.budget, given.max_tokens)
        while True:
            print("> ", end="", flush=True)
            if not (question := sys.stdin.readline().strip()):
                return 0
            _, first = chat.ask(question)
            print(f"[first token after {first:.2f} s]")
    except (openai.OpenAIError, OSError, UnicodeDecodeError) as error:
        print(f"chat: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
