"""Questions about documents, put to a server."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import takewhile
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.parse import urlsplit

import openai

from vllm_kvretrieval.chat.documents import Document
from vllm_kvretrieval.doctor.server import THIS_MACHINE, Client

LEAST, MOST = 512, 4096
"""Tokens that are read at once, which is as often as progress shows."""
BLOCK = 128
"""Tokens at the end of a prompt that a server computes in any case, by vLLM's usual blocks."""
SOON_S = 2.0
"""Pieces that take less grow."""
UNREACHABLE = openai.APIConnectionError, URLError
"""Errors of requests that no server answers."""
TAILS = "What", "1?"
"""Two questions; what chats with them have in common is the documents."""


class ModelTooShortError(ValueError):
    """The documents are longer than the contexts of the server."""


class Passage(NamedTuple):
    """A part of a document that an answer attended to.

    Attributes:
        document: The document.
        place: Where it begins in the document's text.
        text: The passage.
        weight: The :func:`prominence` of its most prominent page.
    """

    document: Document
    place: int
    text: str
    weight: float


class SourcesUnknownError(ValueError):
    """The server does not tell what an answer attended to; says why, and what to do."""

    def __init__(self, said: str) -> None:
        super().__init__(
            f"The server does not tell what answers attend to ({said.strip()[:300]}). One that is "
            "started with VLLM_PLUGINS=kvretrieval in its environment and --kv-retrieval.sources "
            "true does"
        )


class Reply(NamedTuple):
    """An answer.

    Attributes:
        id: The server's name of the request; empty if nothing of the answer was let come.
        text: The answer, as far as it was let come.
        tokens: Tokens of it.
        first_s: Seconds until the first of them.
        decode_s: Seconds from there to the last.
    """

    id: str
    text: str
    tokens: int
    first_s: float
    decode_s: float


def connect(url: str, key: str) -> openai.OpenAI:
    """A client of the server at this address, which asks for this API key, or for none."""
    by_proxy = urlsplit(url).hostname not in THIS_MACHINE
    http = openai.DefaultHttpxClient(trust_env=by_proxy)
    return openai.OpenAI(base_url=url, api_key=key, http_client=http, max_retries=0, timeout=None)


def remedy(error: Exception, url: str) -> str:
    """The message of an error, and what to do."""
    if isinstance(error, UNREACHABLE):
        return (
            f"no server answers at {url}; wait until it is ready, name the address of another with "
            "--url, or leave --url out: then one is started"
        )
    if isinstance(error, openai.AuthenticationError):
        return f"{error}. Name the server's API key with --api-key, or in VLLM_API_KEY"
    return str(error)


class Conversation:
    """A chat that begins with documents.

    Args:
        client: The server.
        documents: The documents.
        options: Further fields of each request.
        max_tokens: Most tokens of an answer.
    """

    def __init__(
        self,
        client: openai.OpenAI,
        documents: Sequence[Document],
        options: Mapping[str, Any],
        max_tokens: int,
    ) -> None:
        self._client, self._max_tokens = client, max_tokens
        self._documents = documents
        self._server = Client(str(client.base_url), client.api_key)
        models = client.models.list().data
        if not models:
            raise ValueError(f"the server at {client.base_url} has no model")
        self._model = models[0].id
        self.options = dict(options)
        self._messages = list[dict[str, str]]()
        self._introduction = introduction(documents)
        self._longest = 0
        self._end = 0

    @property
    def tells_sources(self) -> bool:
        """Whether the server notes what answers attend to, for requests that ask."""
        status, text = self._server.ask("/v1/kv_retrieval/options")
        return status == 200 and "sources" in json.loads(text)["may"]

    def _tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a chat; notes the longest context that the server has."""
        body = {"model": self._model, "messages": messages}
        status, text = self._server.ask("/tokenize", body)
        if status != 200:
            raise ValueError(f"the server does not count the tokens of a chat ({status}: {text})")
        told = json.loads(text)
        self._longest = int(told["max_model_len"])
        return list(told["tokens"])

    def read(self, report: Callable[[int, int, int], None]) -> int:
        """Let the server read the documents, piece by piece.

        What was read stays in the server's cache, and in its store, however this ends.

        Args:
            report: Gets how many tokens have been read of how many, and how many of them had been
                read before; all, if they are :data:`BLOCK` fewer at most.

        Returns:
            Tokens of the documents.

        Raises:
            ModelTooShortError: They are longer than the server's contexts.
            openai.OpenAIError, URLError: The server does not answer.
        """
        one, other = (self._tokens([self._message(tail)]) for tail in TAILS)
        pairs = zip(one, other, strict=False)
        tokens = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if len(one) + self._max_tokens > self._longest:
            raise ModelTooShortError(
                f"the documents have {len(tokens):,} tokens, and the server reads "
                f"{self._longest:,}, less {self._max_tokens:,} for an answer. Name fewer or "
                "shorter documents, or start the server with a larger --max-model-len, if its "
                "model has one"
            )
        self._end = len(tokens)
        for done, known in self._pieces(tokens):
            report(done, len(tokens), known)
        return len(tokens)

    def _pieces(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        done, size = 0, LEAST
        while done < len(tokens):
            end, began = min(done + size, len(tokens)), time.monotonic()
            told = self._client.completions.create(
                model=self._model, prompt=list(tokens[:end]), max_tokens=1, temperature=0
            )
            details = told.usage and told.usage.prompt_tokens_details
            known, done = (details and details.cached_tokens) or 0, end
            yield done, known
            if done - known <= BLOCK:
                size *= 4
            elif time.monotonic() - began < SOON_S:
                size = min(2 * size, MOST)
            else:
                size = max(LEAST, min(size, MOST) // 2)

    def sources(self, reply: Reply, most: int) -> list[Passage]:
        """The passages of the documents that an answer attended to most, the first one first.

        Args:
            reply: The latest answer.
            most: How many.

        Raises:
            SourcesUnknownError: The server does not tell.
        """
        status, text = self._server.ask(f"/v1/kv_retrieval/sources/{reply.id}")
        if status != 200:
            raise SourcesUnknownError(text)
        told = json.loads(text)
        tokens, size = self._tokens(self._messages[:-1])[: self._end], int(told["page_size"])
        weights = prominence(told)
        found = list[Passage]()
        for begin, end in stretches(weights[: self._end // size], most):
            passage = self._detokenized(tokens[begin * size : end * size])
            near = begin * size / max(len(tokens), 1)
            if (place := self._place(passage, near)) is not None:
                found.append(Passage(*place, passage, max(weights[begin:end])))
        return sorted(found, key=lambda passage: -passage.weight)

    def lend(self, document: Document) -> None:
        """Give the server the text of a document, for those who ask by a browser.

        Raises:
            SourcesUnknownError: The server has no page for browsers.
            ValueError: It does not take the document; says why.
        """
        body = {"name": document.name[:200], "text": document.text, "pages": document.pages}
        status, text = self._server.ask("/v1/kv_retrieval/documents", body)
        if status == 404:
            raise SourcesUnknownError(text)
        if status != 200:
            raise ValueError(f"the server does not take {document.name} for its page: {text}")

    def _detokenized(self, tokens: Sequence[int]) -> str:
        status, text = self._server.ask("/detokenize", {"model": self._model, "tokens": tokens})
        if status != 200:
            raise SourcesUnknownError(text)
        # Characters of several tokens may be cut at the borders of pages.
        return str(json.loads(text)["prompt"]).strip("\N{REPLACEMENT CHARACTER}")

    def _place(self, passage: str, near: float) -> tuple[Document, int] | None:
        """The document with a passage, and where; the nearest to a part of the introduction.

        A passage that is not of a document, but of what stands around it, has none.
        """
        best, whole = None, len(self._introduction)
        for document in self._documents:
            begin = self._introduction.index(document.text)
            place = document.text.find(passage)
            while place >= 0:
                distance = abs(begin + place - near * whole)
                if best is None or distance < best[0]:
                    best = distance, document, place
                place = document.text.find(passage, place + 1)
        return best and best[1:]

    def _message(self, question: str) -> dict[str, str]:
        text = question if self._messages else self._introduction + question
        return {"role": "user", "content": text}

    def ask(self, question: str, say: Callable[[str], None]) -> Reply:
        """Put a question, and stream the answer; Ctrl-C ends the answer.

        Where a chat becomes too long, its first questions and answers are left out.

        Args:
            question: About the documents.
            say: Gets each piece of the answer as it arrives.

        Raises:
            openai.OpenAIError: The server does not answer, or refuses.
        """
        self._messages.append(self._message(question))
        while (
            len(self._messages) > 2
            and len(self._tokens(self._messages)) + self._max_tokens > self._longest
        ):
            _, _, following, *rest = self._messages
            self._messages = []
            self._messages = [self._message(following["content"]), *rest]
        try:
            reply = self._stream(say)
        except openai.OpenAIError:
            self._messages.pop()
            raise
        if reply.id:
            self._messages.append({"role": "assistant", "content": reply.text})
        else:
            self._messages.pop()
        return reply

    def _stream(self, say: Callable[[str], None]) -> Reply:
        began = time.perf_counter()
        pieces, first, last, tokens, name = list[str](), 0.0, 0.0, 0, ""
        request: Any = {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": self._max_tokens,
            "temperature": 0,
        }
        try:
            stream = self._client.chat.completions.create(
                **request,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=self.options,
            )
            with closing(stream):
                for chunk in stream:
                    name = chunk.id
                    tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                    if piece := chunk.choices and chunk.choices[0].delta.content:
                        last = time.perf_counter() - began
                        first = first or last
                        pieces.append(piece)
                        say(piece)
        except KeyboardInterrupt:
            tokens = tokens or len(pieces)
        return Reply(name, "".join(pieces), tokens, first, last - first)


def prominence(told: Mapping[str, Any]) -> list[float]:
    """For each page, how much more attention it got at some step than at all steps on average.

    What a model attends to at each step, whatever it writes, is not prominent. An answer of one
    token has no other steps, so the attention itself counts.

    Args:
        told: What the server tells of an answer.
    """
    groups = len(told["groups"])
    peaks, weights = (
        [sum(page) / groups for page in zip(*told[field], strict=True)]
        for field in ("peaks", "weights")
    )
    if told["steps"] == 1:
        return peaks
    return [peak - weight for peak, weight in zip(peaks, weights, strict=True)]


def stretches(weights: Sequence[float], most: int) -> list[tuple[int, int]]:
    """The pages with the largest weights, neighbours together: first page, and the one after last.

    The first page is left out, which every model attends to, whatever it holds.
    """
    best = sorted(range(1, len(weights)), key=lambda page: -weights[page])[:most]
    found = list[tuple[int, int]]()
    for page in sorted(best):
        if found and found[-1][1] == page:
            found[-1] = found[-1][0], page + 1
        else:
            found.append((page, page + 1))
    return found


def introduction(documents: Sequence[Document]) -> str:
    """What a chat begins with, before the first question."""
    if len(documents) == 1:
        return f"Answer by this document.\n\n{documents[0].text}\n\n"
    texts = "".join(f"{document.name}:\n\n{document.text}\n\n" for document in documents)
    return f"Answer by these documents.\n\n{texts}"
