"""Serve a model with KV-cache retrieval and ask it about a long document.

Starts `vllm serve` as a user would and sends it a part of a novel with a fact hidden in it. Then it

1. asks for the fact: the server reads the document and answers;
2. asks a second question: the server answers without reading the document again;
3. lets retrieval and full attention decode in turn, and compares their times and what they read.

    python examples/demo.py                  (or: make demo)

With `--store DIR` the server's KV cache outlives it: in a second run the document has been read.

Ends with 1 if the server fails or the first answer is wrong.
"""

from __future__ import annotations

import argparse
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
from demo_server import Progress, Server, ServerError

from vllm_kvretrieval.engine.cpu.advice import all_cores
from vllm_kvretrieval.retrieval.presets import presets
from vllm_kvretrieval.retrieval.schedule import SCHEDULES

ROOT = Path(__file__).resolve().parent.parent
NOVEL = ROOT / "benchmarks" / "data" / "emma.txt.xz"
LOG = ROOT / "build" / "demo-server.log"

PARAGRAPHS = 60
FACT = "The robot Zebulon was built in the city of Reykjavik by Professor Tanaka in 1987."
QUESTION = "Who built the robot Zebulon, and where?"
ANSWER = ("Tanaka", "Reykjavik")
SECOND_QUESTION = "In which year was the robot Zebulon built?"
MAX_TOKENS = 48
ROUNDS = 3
FULL_ATTENTION: dict[str, Any] = {"vllm_xargs": {"kv_retrieval_exact": True}}
"""What a request sends along to get full attention."""

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

    def ask(
        self,
        question: str,
        extra: Mapping[str, Any],
        say: Callable[[str], None] = lambda piece: None,
    ) -> Reply:
        """Put one question and stream the answer.

        Args:
            question: About the document, which comes first in the prompt: prompts that begin alike
                share what the server has read.
            extra: Further parameters of the request.
            say: Gets each piece of the answer as it arrives.

        Raises:
            openai.OpenAIError: The server does not answer.
        """
        start = time.perf_counter()
        text, request_id, first, last, usage = "", "", 0.0, 0.0, None
        stream = self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": f"Read this text.\n\n{self.text}\n\n{question}"}],
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

        def say(piece: str) -> None:
            nonlocal begun
            if not begun:
                begun = True
                stop()
                progress.done(f"Answer, after {time.perf_counter() - start:.1f} s:")
                print("  ", end="")
            print(piece, end="", flush=True)

        with progress.running() as stop:
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


def compare(reader: Reader, log: Path) -> list[tuple[list[Reply], dict[str, str]]]:
    """Let retrieval and full attention decode as many tokens, in turn.

    Returns:
        Of retrieval, then of full attention: the replies, and what the server noted about the last.
    """
    replies: tuple[list[Reply], list[Reply]] = ([], [])
    for _ in range(ROUNDS):
        for kind, extra in zip(replies, (dict[str, Any](), FULL_ATTENTION), strict=True):
            kind.append(reader.ask(SECOND_QUESTION, {"ignore_eos": True} | extra))
    return [(kind, statistics(log, kind[-1].request_id)) for kind in replies]


def report(
    backend: str, budget: int, compared: Sequence[tuple[list[Reply], dict[str, str]]]
) -> str:
    """The table that sets retrieval beside full attention.

    Args:
        backend: The method of retrieval.
        budget: Tokens.
        compared: See :func:`compare`.
    """
    (fast, noted), (full, noted_full) = compared
    times = [median(reply.token_ms for reply in replies) for replies in (fast, full)]
    rows = [
        ("", backend, "full attention"),
        ("budget, tokens", f"{budget:,}", f"all {int(noted_full['context']):,}"),
        (
            "share of the KV cache read",
            *(f"{float(figures['kv_read_share']):.0%}" for figures in (noted, noted_full)),
        ),
        ("time per token", *(f"{time:.1f} ms" for time in times)),
    ]
    if SCHEDULES[presets()[backend].schedule].speculates:
        rows.append(("heads corrected", f"{float(noted['corrected_share']):.0%}", ""))
    lines = [f"  {name:<30}{left:>14}{right:>18}".rstrip() for name, left, right in rows]
    lines.append(
        f"  ({MAX_TOKENS} tokens each, in turn, medians of {ROUNDS}; full attention takes "
        f"{times[1] / times[0]:.2f} times as long)"
    )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> bool:
    """Serve, ask, compare; returns whether the first answer holds the fact."""
    options = ["--attention-backend", args.backend, "--kv-retrieval.budget", str(args.budget)]
    options += ["--max-model-len", "8192", "--kv-cache-memory-bytes", "1G", "--enforce-eager"]
    options += ["--enable-prompt-tokens-details"]
    if args.store is not None:
        options += ["--kv-retrieval.home", "disk", "--kv-retrieval.store", args.store]
    settings = all_cores()
    print("The server computes on all cores; by default vLLM would keep one for its front end.")
    with Server(args.model, options, settings, args.log) as server:
        print(f"$ {server.command}\n  log: {args.log}")
        progress = Progress("starting the server")
        ready = server.wait_ready(progress)
        progress.done(f"the server is ready after {ready:.0f} s")
        client = openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )
        text = document()
        print(
            f"\nThe document: the beginning of Jane Austen's Emma, {len(text.split()):,} words. "
            f"In its middle we hid:\n  {FACT}"
        )
        reader = Reader(client, args.model, text)
        try:
            reply = reader.show(QUESTION)
            reader.show(SECOND_QUESTION)
            print("\nThe second question once more, by retrieval and by full attention ...")
            compared = compare(reader, args.log)
        except openai.OpenAIError as error:
            raise server.error(str(error)) from error
        if not all(noted for _, noted in compared):
            raise server.error("its log holds no statistics of a request")
        print(f"{report(args.backend, args.budget, compared)}\n")
    return all(word in reply.text for word in ANSWER)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = os.path.relpath(ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--model", default=default, help="default: %(default)s")
    parser.add_argument("--backend", default="kvretrieval", help="default: %(default)s")
    parser.add_argument("--budget", type=int, default=1024, help="tokens; default: %(default)s")
    parser.add_argument("--store", metavar="DIR", help="keep the KV cache there, for further runs")
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
