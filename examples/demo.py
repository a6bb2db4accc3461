"""Serve a model with KV-cache retrieval and ask it about a long document.

Starts `vllm serve` as a user would and sends it a part of a novel with a fact hidden in it. Then it

1. asks for the fact: the server reads the document and answers;
2. asks a second question: the server answers without reading the document again;
3. starts vLLM alone beside it, lets it read the document, too, and lets retrieval, full attention
   by this package's kernel, and vLLM alone decode in turn; compares times, and what a step reads.

    python examples/demo.py                  (or: make demo)

With `--store DIR` the server's KV cache outlives it: in a second run the document has been read.
`--no-stock` leaves vLLM alone out, which takes a minute less.

Ends with 1 if the server fails or the first answer is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import lzma
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import openai
from reading import Progress, Reading

from vllm_kvretrieval.chat.server import Server, ServerError
from vllm_kvretrieval.upstream.defaults import all_cores, forked_on_all_cores

ROOT = Path(__file__).resolve().parent.parent
NOVEL = ROOT / "benchmarks" / "data" / "emma.txt.xz"
LOG = ROOT / "build" / "demo-server.log"

PARAGRAPHS = 60
"""Of the novel: as much as the context of the demo's model holds, for the gain grows with it."""
FACT = "The robot Zebulon was built in the city of Reykjavik by Professor Tanaka in 1987."
QUESTION = "Who built the robot Zebulon, and where?"
ANSWER = ("Tanaka", "Reykjavik")
SECOND_QUESTION = "In which year was the robot Zebulon built?"
MAX_TOKENS = 48
ROUNDS = 5
GAIN = 1.1
"""A ratio of times that needs no explanation."""
FULL_ATTENTION: dict[str, Any] = {"vllm_xargs": {"kv_retrieval_exact": True}}
"""What a request sends along to get full attention."""
OPTIONS = ("--max-model-len", "8192", "--kv-cache-memory-bytes", "512M", "--enforce-eager")
"""Of both servers."""
LOGGING = {"VLLM_LOGGING_LEVEL": "DEBUG"}
"""Environment of servers, whose logs then have figures of each request."""
STOCK: dict[str, str] = {"VLLM_PLUGINS": ""}
"""Environment of a server that loads no plug-in."""

STATISTICS_S = 10.0


@dataclass(frozen=True)
class Reply:
    """A streamed answer: its text, its lengths in tokens, and times in seconds.

    Attributes:
        request_id: The server's name of the request.
        text: The answer.
        tokens: Tokens of the answer.
        prompt: Tokens of the prompt.
        cached: Tokens of the prompt that the server had read before.
        first_token_s: Time until the first token.
        decode_s: Time from the first token to the last one.
    """

    request_id: str
    text: str
    tokens: int
    prompt: int
    cached: int
    first_token_s: float
    decode_s: float

    @property
    def token_ms(self) -> float:
        """Milliseconds from one token to the next."""
        return 1000 * self.decode_s / max(self.tokens - 1, 1)


def document() -> str:
    """The beginning of the novel, with the fact as a paragraph of its own in the middle."""
    novel = lzma.decompress(NOVEL.read_bytes()).decode()
    blocks = (" ".join(block.split()) for block in re.split(r"\n\s*\n", novel))
    paragraphs = [block for block in blocks if not block.isupper()][1 : 1 + PARAGRAPHS]
    middle = PARAGRAPHS // 2
    return "\n\n".join([*paragraphs[:middle], FACT, *paragraphs[middle:]])


@dataclass(frozen=True)
class Reader:
    """Puts questions about one document to the server.

    Attributes:
        client: The server's.
        model: Its name there.
        text: The document.
    """

    client: openai.OpenAI
    model: str
    text: str

    def messages(self, question: str) -> list[Any]:
        """The chat that puts a question: prompts that begin alike share what has been read."""
        return [{"role": "user", "content": f"Read this text.\n\n{self.text}\n\n{question}"}]

    def ask(
        self,
        question: str,
        extra: Mapping[str, Any],
        say: Callable[[str], None] = lambda piece: None,
    ) -> Reply:
        """Put one question and stream the answer.

        Args:
            question: About the document.
            extra: Further parameters of the request.
            say: Gets each piece of the answer as it arrives.

        Raises:
            openai.OpenAIError: The server does not answer.
        """
        start = time.perf_counter()
        text, request_id, first, last, usage = "", "", 0.0, 0.0, None
        stream = self.client.chat.completions.create(
            model=self.model,
            messages=self.messages(question),
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=dict(extra),
        )
        for chunk in stream:
            request_id, usage = chunk.id, chunk.usage or usage
            for choice in chunk.choices:
                if piece := choice.delta.content:
                    last = time.perf_counter() - start
                    first = first or last
                    text += piece
                    say(piece)
        assert usage is not None
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        return Reply(
            request_id,
            text,
            usage.completion_tokens,
            usage.prompt_tokens,
            cached,
            first,
            last - first,
        )

    def show(self, question: str) -> Reply:
        """Put one question, print how the server reads, and the answer as it arrives."""
        print(f"\nQuestion: {question}")
        progress, begun, start = Progress("the server reads:"), False, time.perf_counter()
        far = Reading(self.client, model=self.model, messages=self.messages(question))

        def say(piece: str) -> None:
            nonlocal begun
            if not begun:
                begun = True
                stop()
                progress.done(f"Answer, after {time.perf_counter() - start:.1f} s:")
                print("  ", end="")
            print(piece, end="", flush=True)

        with progress.running(far) as stop:
            reply = self.ask(question, {}, say)
        print(f"\n  (a prompt of {reply.prompt:,} tokens; {reply.cached:,} had been read before)")
        return reply


def statistics(log: Path, request_id: str) -> dict[str, str]:
    """What the server noted about a finished request, by name; empty where it did not."""
    line = re.compile(rf"kv_retrieval request_id=\S*{re.escape(request_id)}\S* (.*)")
    deadline = time.monotonic() + STATISTICS_S
    while time.monotonic() < deadline:
        if match := line.search(log.read_text(errors="replace")):
            return dict(pair.split("=") for pair in match[1].split())
        time.sleep(0.2)
    return {}


def in_turn(askers: Sequence[Callable[[], Reply]]) -> list[list[Reply]]:
    """Let each ask in each round, so that other work on the machine meets all of them alike."""
    rounds = [[ask() for ask in askers] for _ in range(ROUNDS)]
    return [list(replies) for replies in zip(*rounds, strict=True)]


@dataclass(frozen=True)
class Column:
    """A column of the demo's table.

    Attributes:
        name: Who decodes.
        attended: Tokens that a step attends to.
        share: Of the KV cache that it reads.
        times: Milliseconds per token, a figure of each round.
        first_s: Seconds until the first token of the first answer; None if another had been given.
    """

    name: str
    attended: str
    share: str
    times: Sequence[float]
    first_s: float | None = None

    @property
    def token_ms(self) -> float:
        """The median of the rounds."""
        return median(self.times)


def column(
    name: str,
    replies: Sequence[Reply],
    noted: Mapping[str, str],
    budget: int | None = None,
    first_s: float | None = None,
) -> Column:
    """The column of some replies.

    Args:
        name: Who decoded.
        replies: Of each round.
        noted: What the server noted about the last; vLLM alone notes nothing.
        budget: Tokens that a step attends to; None: all.
        first_s: See :class:`Column`.
    """
    last = replies[-1]
    attended = f"all {last.prompt + last.tokens:,}" if budget is None else f"{budget:,}"
    share = float(noted.get("kv_read_share", 1))
    times = [reply.token_ms for reply in replies]
    return Column(name, attended, f"{share:.0%}", times, first_s)


def report(columns: Sequence[Column]) -> str:
    """The table that sets retrieval, the first column, beside the others."""
    rows = [
        ("", *(each.name for each in columns)),
        ("tokens that a step attends to", *(each.attended for each in columns)),
        ("share of the KV cache read", *(each.share for each in columns)),
        ("time per token", *(f"{each.token_ms:.1f} ms" for each in columns)),
        ("of the rounds", *(f"{min(each.times):.1f} to {max(each.times):.1f}" for each in columns)),
        (
            "first token, first answer",
            *("" if each.first_s is None else f"{each.first_s:.1f} s" for each in columns),
        ),
    ]
    lines = [f"  {name:<30}{''.join(f'{cell:>19}' for cell in cells)}" for name, *cells in rows]
    lines.append(f"  ({MAX_TOKENS} tokens in each of {ROUNDS} rounds, in turn; medians)")
    ours, *others = columns
    lines += [f"Per token, {verdict(ours, other)}." for other in others]
    return "\n".join(line.rstrip() for line in lines)


def verdict(ours: Column, other: Column) -> str:
    """How many times as long another takes, and why, if that is hardly longer."""
    ratio = other.token_ms / ours.token_ms
    text = f"{other.name} takes {ratio:.2f} times as long as {ours.name}"
    if ratio >= GAIN:
        return f"{text}, and the gain grows with the text (README.md, Results)"
    if max(map(min, (ours.times, other.times))) <= min(map(max, (ours.times, other.times))):
        return (
            f"{text}: the times of the rounds overlap, so this says little. Other programs keep "
            "the machine busy, or this text is too short for a difference"
        )
    return (
        f"{text}: this text is too short. A step also computes the model, and retrieval chooses "
        "pages; that pays where there is more to read (README.md, Results, at 32,768 tokens)"
    )


def client_of(server: Server) -> openai.OpenAI:
    """A client, past any proxy."""
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http)


def started(server: Server) -> None:
    """Wait until a server answers, and say so."""
    print(f"$ {server.command}\n  log: {server.log}")
    progress = Progress("starting the server")
    ready = server.wait_ready(progress)
    progress.done(f"the server is ready after {ready:.0f} s")


def run(args: argparse.Namespace) -> bool:
    """Serve, ask, compare; returns whether the first answer holds the fact."""
    options = ["--attention-backend", args.backend, "--kv-retrieval.budget", str(args.budget)]
    options += [*OPTIONS, "--enable-prompt-tokens-details"]
    if args.store is not None:
        options += ["--kv-retrieval.home", "disk", "--kv-retrieval.store", args.store]
    settings = forked_on_all_cores() | LOGGING
    print("The server computes on all cores; by default vLLM would keep one for its front end.")
    with Server(args.model, options, settings, args.log) as server:
        started(server)
        text = document()
        print(
            f"\nThe document: the beginning of Jane Austen's Emma, {len(text.split()):,} words. "
            f"In its middle we hid:\n  {FACT}"
        )
        reader = Reader(client_of(server), args.model, text)
        try:
            reply = reader.show(QUESTION)
            reader.show(SECOND_QUESTION)
            compared = compare(args, server, reader, reply.first_token_s)
        except openai.OpenAIError as error:
            raise server.error(str(error)) from error
        print(f"{report(compared)}\n")
    return all(word in reply.text for word in ANSWER)


def compare(
    args: argparse.Namespace, server: Server, reader: Reader, first_s: float
) -> list[Column]:
    """Let retrieval, full attention by our kernel, and vLLM alone decode as many tokens, in turn.

    Args:
        args: Those of the program.
        server: That of retrieval.
        reader: Its reader.
        first_s: Seconds until the first token that it answered.
    """

    def asker(reader: Reader, extra: Mapping[str, Any]) -> Callable[[], Reply]:
        return lambda: reader.ask(SECOND_QUESTION, {"ignore_eos": True, **extra})

    def noted(replies: Sequence[Reply]) -> dict[str, str]:
        found = statistics(args.log, replies[-1].request_id)
        if not found:
            raise server.error("its log holds no statistics of a request")
        return found

    askers = [asker(reader, {}), asker(reader, FULL_ATTENTION)]
    with contextlib.ExitStack() as servers:
        stock_s = None
        if not args.no_stock:
            print("\nThe same by vLLM alone, on a second server:")
            log = args.log.with_stem(f"{args.log.stem}-stock")
            stock = Server(args.model, list(OPTIONS), all_cores() | LOGGING | STOCK, log)
            servers.enter_context(stock)
            started(stock)
            alone = Reader(client_of(stock), args.model, reader.text)
            stock_s = alone.show(SECOND_QUESTION).first_token_s
            askers.append(asker(alone, {}))
        print("\nThe second question once more, by each in turn ...")
        ours, exact, *rest = in_turn(askers)
        columns = [
            column(args.backend, ours, noted(ours), args.budget, first_s),
            column("our exact kernel", exact, noted(exact)),
        ]
        columns += [column("vLLM alone", replies, {}, first_s=stock_s) for replies in rest]
        return columns


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = os.path.relpath(ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--model", default=default, help="default: %(default)s")
    parser.add_argument("--backend", default="kvretrieval", help="default: %(default)s")
    parser.add_argument("--budget", type=int, default=1024, help="tokens; default: %(default)s")
    parser.add_argument("--store", metavar="DIR", help="keep the KV cache there, for further runs")
    parser.add_argument("--no-stock", action="store_true", help="leave vLLM alone out")
    parser.add_argument("--log", type=Path, default=LOG, help="file for the server's log")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        found = run(parser.parse_args())
    except ServerError as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
    if not found:
        sys.exit(
            f"The answer is wrong: it should name {' and '.join(ANSWER)}. Try a larger --budget."
        )
    print("The answer is right. The server has stopped.")


if __name__ == "__main__":
    main()
