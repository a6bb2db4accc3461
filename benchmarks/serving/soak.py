"""A server over hours: clients that come, go, abort and fail. Is memory flat, are answers right?

    python -m benchmarks.serving soak --minutes 120

Each client makes one visit after another, of a kind that is drawn by chance: it asks a known
question, whose answer is compared with the one that it got alone; asks about a new document; stops
to read after some tokens; leaves before the first one; or sends a request that has to be refused.
Memory is the server's, its engine's and its workers' proportional set size (PSS): *own* is what no
file holds, and has to be flat; of files, pages come and go with the cache on disk.

The exit status is 1 if an answer was wrong or missing, or if own memory has grown by more than
`--growth`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

from benchmarks.cli import SMOLLM2, add_model, add_output
from benchmarks.common import result_header, settings, write_json
from benchmarks.models import Documents
from vllm_kvretrieval.chat.server import Server
from vllm_kvretrieval.upstream.defaults import all_cores

KINDS = {"known": 4, "new": 3, "abort": 3, "leave": 2, "refused": 2}
"""Kinds of visits, and how often one is drawn beside the others."""
ROUTE = "/v1/completions"
TIMEOUT_S = 3600
"""Of a visit: on a machine that does other work, too, an answer may take long and still come."""
NEAR = 1.0
"""By how many nats a token may be less likely than another that is taken in its place: answers to
the same question differ by rounding where they are computed beside others."""
TOP = 5
SETTLE_S = 60
PARTS = {"Pss_Anon": "own", "Pss_Shmem": "own", "Pss_File": "files"}
"""Parts of a process's memory, in KiB, as the system names them and as we do."""


@dataclass(frozen=True)
class Question:
    """A prompt, and the answer that it got when no other request ran.

    Attributes:
        prompt: Token ids.
        answer: Token ids; empty: it has not been asked yet.
    """

    prompt: Sequence[int]
    answer: Sequence[int] = ()


class Visitor:
    """Makes visits to a server, and notes what was wrong with them.

    Args:
        url: The server's, without a trailing slash.
        model: What it calls the model.
        tokens: Of each answer.
        context: The most tokens that it takes.
    """

    def __init__(self, url: str, model: str, tokens: int, context: int) -> None:
        self._model, self._tokens, self._context = model, tokens, context
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)
        self.visits, self.wrong = Counter[str](), list[str]()

    def ask(self, prompt: Sequence[int]) -> tuple[list[int], list[Mapping[str, float]]]:
        """The tokens of a whole answer, and for each the most likely ones by their ids.

        Raises:
            ValueError: The server has refused the question, or the answer is not whole.
        """
        body = self._body(prompt) | {"logprobs": TOP, "return_tokens_as_token_ids": True}
        reply = self._client.post(ROUTE, json=body)
        if reply.status_code != 200:
            raise ValueError(f"status {reply.status_code}: {reply.text[:200]}")
        (choice,) = reply.json()["choices"]
        tokens: list[int] = choice["token_ids"]
        if len(tokens) != self._tokens:
            raise ValueError(f"{len(tokens)} tokens in place of {self._tokens}")
        return tokens, choice["logprobs"]["top_logprobs"]

    def known(self, question: Question) -> None:
        """Ask a question whose answer is known.

        Raises:
            ValueError: The answer is another one, by more than rounding.
        """
        tokens, likely = self.ask(question.prompt)
        for place, (found, expected) in enumerate(zip(tokens, question.answer, strict=True)):
            if found == expected:
                continue
            of = {name: likely[place].get(f"token_id:{name}") for name in (found, expected)}
            behind = None if None in of.values() else of[found] - of[expected]  # type: ignore[operator]
            if behind is None or behind > NEAR:
                raise ValueError(f"token {place} is {found} and was {expected}: {likely[place]}")
            return  # from here on another text goes on

    def abort(self, prompt: Sequence[int], chunks: int) -> None:
        """Read so many chunks of an answer, and close the connection."""
        with self._stream(prompt) as lines:
            for _ in range(chunks):
                next(lines, None)

    def refused(self, change: Mapping[str, Any]) -> None:
        """Send a request that is wrong.

        Raises:
            ValueError: It was not refused as a client's error.
        """
        body = self._body([1, 2, 3]) | {"stream": True, **change}
        reply = self._client.post(ROUTE, json=body)
        if not 400 <= reply.status_code < 500:
            raise ValueError(f"{change} has got status {reply.status_code}")

    def visit(
        self, kind: str, chance: random.Random, known: Sequence[Question], new: Sequence[int]
    ) -> None:
        """Make a visit, and note what was wrong.

        Args:
            kind: One of ``KINDS``.
            chance: Draws what is left open.
            known: Questions with their answers.
            new: The prompt of another one.
        """
        try:
            if kind == "known":
                self.known(chance.choice(known))
            elif kind == "new":
                self.ask(new)
            elif kind == "refused":
                self.refused(chance.choice(self.wrong_requests()))
            else:
                self.abort(new, 0 if kind == "leave" else chance.randrange(1, self._tokens))
        except (ValueError, KeyError, httpx.HTTPError) as error:
            self.wrong.append(f"{kind}: {error!r}")
        self.visits[kind] += 1

    def await_idle(self) -> None:
        """Wait until the server has let go of what clients have left.

        Raises:
            ValueError: It still runs requests after a minute.
        """
        end, running = time.monotonic() + SETTLE_S, 1.0
        while running and time.monotonic() < end:
            text = self._client.get("/metrics").text
            lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_")]
            running = sum(float(line.split()[-1]) for line in lines)
            time.sleep(0.5)
        if running:
            raise ValueError(f"{running:.0f} requests run after all clients have left")

    def wrong_requests(self) -> list[dict[str, Any]]:
        """What is wrong with requests that have to be refused."""
        options = ({"budget": -1}, {"budget": "many"}, {"retain": 10**9}, {"session": "../x"})
        ours = [
            {"vllm_xargs": {f"kv_retrieval_{key}": value}}
            for given in options
            for key, value in given.items()
        ]
        return [
            *ours,
            {"prompt": [1] * (self._context + 1)},
            {"max_tokens": -1},
            {"temperature": "hot"},
            {"prompt": {}},
        ]

    def _body(self, prompt: Sequence[int]) -> dict[str, Any]:
        asked = {"model": self._model, "prompt": [*prompt], "max_tokens": self._tokens}
        return asked | {"temperature": 0, "ignore_eos": True, "return_token_ids": True}

    @contextlib.contextmanager
    def _stream(self, prompt: Sequence[int]) -> Iterator[Iterator[str]]:
        body = self._body(prompt) | {"stream": True}
        with self._client.stream("POST", ROUTE, json=body) as reply:
            if reply.status_code != 200:
                raise ValueError(f"a stream has got status {reply.status_code}")
            yield reply.iter_lines()


class Clients:
    """Threads that make visits until they are told to stop.

    Args:
        visitor: Makes the visits.
        known: Questions with their answers.
        new: Gives the prompt of another question; called by one thread at a time.
        count: How many threads.
        seed: Of chance.
    """

    def __init__(
        self,
        visitor: Visitor,
        known: Sequence[Question],
        new: Callable[[random.Random], Sequence[int]],
        count: int,
        seed: int = 0,
    ) -> None:
        self._visitor, self._known, self._new = visitor, known, new
        self._ends, self._lock = threading.Event(), threading.Lock()
        chances = [random.Random(f"{seed}/{number}") for number in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in chances]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Wait until all of them have made their last visit."""
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self, chance: random.Random) -> None:
        while not self._ends.is_set():
            (kind,) = chance.choices([*KINDS], [*KINDS.values()])
            with self._lock:
                new = self._new(chance)
            self._visitor.visit(kind, chance, self._known, new)


def memory(pid: int) -> dict[str, float]:
    """What a process and its descendants have in memory, in MiB, and their threads.

    Returns:
        ``own``, which no file holds, ``files``, and ``threads``.
    """
    found = Counter[str]()
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            text = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
            found["threads"] += each.num_threads()
            for line in text.splitlines():
                name, _, size = line.partition(":")
                if name in PARTS:
                    found[PARTS[name]] += int(size.removesuffix("kB"))
    return {
        "own": round(found["own"] / 1024, 1),
        "files": round(found["files"] / 1024, 1),
        "threads": found["threads"],
    }


def growth(samples: Sequence[Mapping[str, float]]) -> float:
    """By how many MiB own memory has grown from the second quarter of the samples to the last.

    In the first one caches fill.
    """
    own = [sample["own"] for sample in samples]
    part = max(len(own) // 4, 1)
    return statistics.median(own[-part:]) - statistics.median(own[part : 2 * part] or own)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(parser, SMOLLM2)
    add = parser.add_argument
    add("--minutes", type=float, default=120, help="how long clients come")
    add("--clients", type=int, default=6, help="at once; the server runs four requests at once")
    add("--method", default="kvretrieval", help="of retrieval")
    add("--home", default="disk", choices=("disk", "device"), help="of the KV cache")
    add("--home-bytes", default="256MiB", help="its size, if it is on disk")
    add("--memory", default="192M", help="of the KV cache; small, so that it fills early")
    add("--budget", type=int, default=512, help="tokens")
    add("--context", type=int, default=2048, help="the most tokens of a request")
    add("--tokens", type=int, default=24, help="of each answer")
    add("--every", type=float, default=10, help="seconds from one look at memory to the next")
    add("--growth", type=float, default=64, help="MiB that own memory may grow by")
    add("--seed", type=int, default=0, help="of chance")
    add_output(parser, "soak.json")


def run(args: argparse.Namespace) -> int:
    """Start the server, let clients come and go, print and store; 1 if something was wrong."""
    documents = Documents(args.model)
    longest = args.context - args.tokens

    def new(chance: random.Random) -> list[int]:
        (prompt,) = documents.take(1, chance.randrange(8, longest))
        return prompt

    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as scratch,
        Server(
            str(args.model), _options(args, scratch), all_cores(), args.output.with_suffix(".log")
        ) as server,
    ):
        server.wait_ready(lambda _: None)
        visitor = Visitor(server.url, args.model.name, args.tokens, args.context)
        chance = random.Random(args.seed)
        prompts = [new(chance) for _ in range(6)]
        known = [Question(prompt, visitor.ask(prompt)[0]) for prompt in prompts]
        samples, begin = list[dict[str, float]](), time.monotonic()
        with Clients(visitor, known, new, args.clients, args.seed):
            while (passed := time.monotonic() - begin) < 60 * args.minutes:
                visits, wrong = visitor.visits.total(), len(visitor.wrong)
                counted = {"s": round(passed), "visits": visits, "wrong": wrong}
                samples.append(sample := counted | memory(server.pid))
                line = f"{passed:>7,.0f} s: {sample['own']:,.0f} MiB own, {sample['files']:,.0f} of"
                print(f"{line} files, {visits} visits, {wrong} wrong", flush=True)
                time.sleep(args.every)
        visitor.await_idle()
        for question in known:  # alone again
            visitor.visit("known", chance, [question], ())
    grown = growth(samples)
    found = {
        "visits": dict(visitor.visits),
        "wrong": visitor.wrong[:100],
        "growth_mib": round(grown, 1),
        "samples": samples,
    }
    header = result_header("benchmarks.serving")
    write_json(args.output, header | {"settings": settings(args)} | found)
    print(f"visits: {json.dumps(found['visits'])}, {len(visitor.wrong)} wrong")
    print(f"own memory: {grown:+.1f} MiB")
    for what in visitor.wrong[:10]:
        print(what)
    print(f"results: {args.output}")
    return int(bool(visitor.wrong) or grown > args.growth)


def _options(args: argparse.Namespace, scratch: str) -> list[str]:
    """Options of `vllm serve`."""
    home = ["--kv-retrieval.home", args.home, "--kv-retrieval.store", f"{scratch}/store"]
    if args.home == "disk":
        home += ["--kv-retrieval.home_bytes", args.home_bytes]
    return [
        *("--served-model-name", args.model.name, "--attention-backend", args.method),
        *("--kv-retrieval.budget", str(args.budget), *home),
        *("--max-model-len", str(args.context), "--max-num-seqs", "4", "--async-scheduling"),
        *("--kv-cache-memory-bytes", args.memory),
    ]
