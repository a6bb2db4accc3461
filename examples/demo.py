"""Serve a model with KV-cache retrieval and ask it about a long document.

Starts `vllm serve` as a user would, sends it a part of a novel with a fact hidden in it,
streams the answer, and shows what retrieval read to find it:

    python examples/demo.py                  (or: make demo)

Ends with 1 where the server fails or the answer is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import lzma
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai

from vllm_kvretrieval.engine.cpu.advice import all_cores, preferred_dtype

ROOT = Path(__file__).resolve().parent.parent
NOVEL = ROOT / "benchmarks" / "data" / "emma.txt.xz"
LOG = ROOT / "build" / "demo-server.log"

PARAGRAPHS = 40
FACT = "The robot Zebulon was built in the city of Reykjavik by Professor Tanaka in 1987."
QUESTION = "Who built the robot Zebulon, and where?"
ANSWER = ("Tanaka", "Reykjavik")
MAX_TOKENS = 48

HOST = "127.0.0.1"
READY_S = 600
STOP_S = 20
POLL_S = 0.5
STATISTICS_S = 10.0


class ServerError(RuntimeError):
    """The server did not start or stopped answering; the message ends with its log."""


class Server:
    """A vLLM server on this machine only; a context manager that always stops it.

    Args:
        model: path or name of the model.
        options: further command-line options of `vllm serve`.
        settings: of its environment.
        log: file that receives the server's output, from vLLM's debug level up.
    """

    def __init__(self, model: str, options: list[str], settings: dict[str, str], log: Path) -> None:
        self.log = log
        self._settings = settings
        self.port = _free_port()
        executable = Path(sys.executable).with_name("vllm")
        address = ["--host", HOST, "--port", str(self.port)]
        self._command = [str(executable), "serve", model, *address, *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the server answers, without a trailing slash."""
        return f"http://{HOST}:{self.port}"

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        settings = [f"{name}={value}" for name, value in self._settings.items()]
        return shlex.join([*settings, "vllm", *self._command[1:]])

    def __enter__(self) -> Server:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        logging = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | self._settings | logging,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Ask the server to stop, then end whatever is left of its processes."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_ready(self, progress: Callable[[float], None]) -> float:
        """Return the seconds it took; `progress` gets the seconds waited so far.

        Raises:
            ServerError: the server ended, or was not ready after ten minutes.
        """
        assert self._process is not None
        start = time.monotonic()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while (waited := time.monotonic() - start) < READY_S:
            if self._process.poll() is not None:
                raise self.error(f"it ended with exit status {self._process.returncode}")
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
                opener.open(f"{self.url}/health", timeout=POLL_S),
            ):
                return waited
            progress(waited)
            time.sleep(POLL_S)
        raise self.error(f"it did not answer within {READY_S} s")

    def error(self, what: str, lines: int = 30) -> ServerError:
        """A `ServerError` that says `what` happened and shows the end of the log."""
        text = self.log.read_text(errors="replace").splitlines()
        # Debug lines would push the cause out of sight.
        tail = "\n".join([line for line in text if " DEBUG " not in line][-lines:])
        return ServerError(f"the server failed: {what}\nthe end of {self.log}:\n{tail}")


@dataclass(frozen=True)
class Reply:
    """A streamed answer: its text, its length in tokens, and times in seconds."""

    request_id: str
    text: str
    tokens: int
    first_token_s: float
    decode_s: float


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Progress:
    """Says on one line of the terminal how long something has been going on."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._live = sys.stdout.isatty()
        self._next = 0.0

    def __call__(self, seconds: float) -> None:
        if self._live:
            print(f"\r{self._what} {seconds:.0f} s", end="", flush=True)
        elif seconds >= self._next:
            self._next += 10.0
            print(f"{self._what} {seconds:.0f} s", flush=True)

    def done(self, result: str) -> None:
        """Close the line."""
        print(f"\r\033[K{result}" if self._live else result, flush=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[Callable[[], None]]:
        """Keep the line up to date until what it gives is called, or the block is left."""
        start, over = time.monotonic(), threading.Event()

        def tick() -> None:
            while not over.wait(POLL_S):
                self(time.monotonic() - start)

        def stop() -> None:
            over.set()
            thread.join()

        thread = threading.Thread(target=tick)
        thread.start()
        try:
            yield stop
        finally:
            stop()


def document() -> str:
    """The beginning of the novel, with the fact as a paragraph of its own in the middle."""
    novel = lzma.decompress(NOVEL.read_bytes()).decode()
    blocks = (" ".join(block.split()) for block in re.split(r"\n\s*\n", novel))
    paragraphs = [block for block in blocks if not block.isupper()][1 : 1 + PARAGRAPHS]
    middle = PARAGRAPHS // 2
    return "\n\n".join([*paragraphs[:middle], FACT, *paragraphs[middle:]])


def ask(client: openai.OpenAI, model: str, prompt: str) -> Reply:
    """Put one question to the server and stream the answer to the terminal."""
    start = time.perf_counter()
    text, request_id, first, last, tokens = "", "", 0.0, 0.0, 0
    progress = Progress("the server reads the document:")
    with progress.running() as stop:
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            request_id = chunk.id
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if piece := choice.delta.content:
                    last = time.perf_counter() - start
                    if not text:
                        stop()
                        first = last
                        progress.done(f"The answer, after {first:.1f} s:")
                        print("  ", end="")
                    text += piece
                    print(piece, end="", flush=True)
    print()
    return Reply(request_id, text, tokens, first, last - first)


def statistics(log: Path, request_id: str) -> dict[str, str]:
    """What the server noted about a finished request, by name; empty where it did not."""
    line = re.compile(rf"kv_retrieval request_id=\S*{re.escape(request_id)}\S* (.*)")
    deadline = time.monotonic() + STATISTICS_S
    while time.monotonic() < deadline:
        if match := line.search(log.read_text(errors="replace")):
            return dict(pair.split("=") for pair in match[1].split())
        time.sleep(0.2)
    return {}


def report(reply: Reply, noted: dict[str, str], budget: int) -> str:
    """The figures below the answer."""
    speed = (reply.tokens - 1) / reply.decode_s
    rows = {
        "context": f"{int(noted['context']):,} tokens",
        "budget": f"{budget:,} tokens",
        "pages attended": f"{noted['pages_attended']} of {noted['pages_total']} per KV head",
        "share of the KV cache read": f"{float(noted['kv_read_share']):.1%}",
        "heads corrected": f"{float(noted['corrected_share']):.1%} of their selections, "
        f"in {noted['sparse_steps']} steps",
        "time to first token": f"{reply.first_token_s:.1f} s (prefill is exact)",
        "decode": f"{speed:.1f} tokens/s",
    }
    return "\n".join(f"  {name:<28}{value}" for name, value in rows.items())


def run(args: argparse.Namespace) -> bool:
    """Serve, ask, report; returns whether the answer holds the fact."""
    options = ["--attention-backend", args.backend, "--kv-retrieval.budget", str(args.budget)]
    options += ["--max-model-len", "8192", "--kv-cache-memory-bytes", "1G", "--enforce-eager"]
    if (dtype := preferred_dtype()) != "auto":
        print(f"Without AVX-512 BF16 and AMX, bfloat16 is slow on this CPU: {dtype} it is.")
        options += ["--dtype", dtype]
    settings = all_cores()
    print("The server computes on all cores; by itself vLLM would keep one to its front end.")
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
        words = f"{len(text.split()):,} words"
        print(f"\nThe document: the beginning of Jane Austen's Emma, {words}; in its middle:")
        print(f"  {FACT}\nThe question:\n  {QUESTION}")
        try:
            reply = ask(client, args.model, f"Read this text.\n\n{text}\n\n{QUESTION}")
        except openai.OpenAIError as error:
            raise server.error(str(error)) from error
        noted = statistics(args.log, reply.request_id)
        if not noted:
            raise server.error("its log holds no statistics of the request")
        print(f"\nWhat retrieval did:\n{report(reply, noted, args.budget)}\n")
    return all(word in reply.text for word in ANSWER)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = str((ROOT / "models" / "SmolLM2-135M-Instruct").relative_to(Path.cwd()))
    parser.add_argument("--model", default=default, help="default: %(default)s")
    parser.add_argument("--backend", default="kvretrieval", help="default: %(default)s")
    parser.add_argument("--budget", type=int, default=1024, help="tokens; default: %(default)s")
    parser.add_argument("--log", type=Path, default=LOG, help="of the server")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        found = run(parser.parse_args())
    except ServerError as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
    if not found:
        sys.exit(f"The answer is wrong: it should name {' and '.join(ANSWER)}.")
    print("The answer is right. The server has stopped.")


if __name__ == "__main__":
    main()
