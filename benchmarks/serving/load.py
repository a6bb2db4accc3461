"""A server under load: requests about long documents, some at once, by two load generators.

    python -m benchmarks.serving load --lanes stock full kvretrieval freekv kvretrieval@disk
    python -m benchmarks.serving load --generators vllm guidellm

One `vllm serve` for each lane; all but the one that is measured are frozen. A generator sends
requests to `/v1/completions`, so many at once as the cell says; each answer has `--tokens` tokens.
*Shared* requests ask about one document, which the server has read; *new* ones have a document
each. `generators.py` says which generators there are, and what their figures mean.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from benchmarks.cli import SMOLLM2_32K, add_model, add_output, add_tokens
from benchmarks.common import Stopwatch, result_header, settings, write_json
from benchmarks.models import Documents, kv_bytes_per_token
from benchmarks.serving.generators import GENERATORS
from vllm_kvretrieval.chat.server import Server
from vllm_kvretrieval.upstream.defaults import all_cores

STOCK = "stock"
SHARED, NEW = "shared", "new"
QUESTION = 64
"""Tokens of a shared request behind its document."""
LOW_MEMORY = 2**29
"""Bytes of fast memory of a lane whose cache is on disk."""


@dataclass(frozen=True)
class Lane:
    """A server that is compared: ``stock``, or a method, with its home behind ``@``."""

    name: str

    def options(self, args: argparse.Namespace) -> list[str]:
        """Options of ``vllm serve``."""
        method, _, home = self.name.partition("@")
        most = max(*args.shared, *args.new, 1)
        kv = kv_bytes_per_token(AutoConfig.from_pretrained(args.model))
        memory = LOW_MEMORY if home else int(1.25 * kv * args.context * (max(args.new) + 1))
        given = [
            *("--served-model-name", args.model.name),
            *("--max-model-len", str(args.context), "--max-num-seqs", str(most)),
            *("--kv-cache-memory-bytes", str(memory)),
            "--async-scheduling",
        ]
        if method == STOCK:
            return given
        given += ["--attention-backend", method]
        if method not in ("full", "auto"):
            given += ["--kv-retrieval.budget", str(args.budget)]
        if home:
            given += ["--kv-retrieval.home", home]
        return given

    @property
    def environment(self) -> dict[str, str]:
        """What is set for the server, beside what is set for this program."""
        return all_cores() | ({"VLLM_PLUGINS": ""} if self.name == STOCK else {})


class Sleeper(Server):
    """A server that is frozen but where it is to be awake."""

    def freeze(self) -> None:
        """Take all processor time from it."""
        self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run meanwhile."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.freeze()

    def __exit__(self, *error: object) -> None:
        self._signal(signal.SIGCONT)
        super().__exit__(*error)

    def _signal(self, sign: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, sign)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(parser, SMOLLM2_32K)
    lanes = [STOCK, "full", "kvretrieval", "freekv", "kvretrieval@disk"]
    parser.add_argument("--lanes", nargs="+", default=lanes, help="servers, such as quest@disk")
    known = list(GENERATORS)
    parser.add_argument("--generators", nargs="+", choices=known, default=known[:1], help="of load")
    parser.add_argument("--context", type=int, default=8192, help="tokens of a request in all")
    parser.add_argument("--budget", type=int, default=1024, help="of the methods that have one")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    add_tokens(parser, "--shared", [1, 4, 8, 16], "requests at once about one document")
    add_tokens(parser, "--new", [1, 4], "requests at once about a document each")
    parser.add_argument("--repeats", type=int, default=2, help="requests per client and cell")
    add_output(parser, "load.json")


def run(args: argparse.Namespace) -> int:
    """Start the servers, measure them in turn, print and store."""
    watch = Stopwatch()
    documents, cells = Documents(args.model), []
    with contextlib.ExitStack() as stack:
        servers = {}
        for name in args.lanes:
            lane, log = Lane(name), args.output.with_suffix(f".{name}.log")
            server = Sleeper(str(args.model), lane.options(args), lane.environment, log)
            stack.enter_context(server)
            server.wait_ready(lambda _: None)
            server.freeze()
            servers[name] = server
            print(f"{name} is ready after {watch}", flush=True)
        for kind, counts in ((SHARED, args.shared), (NEW, args.new)):
            made = requests(documents, kind, args)
            for server in servers.values():
                if kind == SHARED:
                    with server.awake():
                        GENERATORS["vllm"](server.url, args.model, made[:1], 1, 1)
            for count, generator in itertools.product(counts, args.generators):
                measure, taken = GENERATORS[generator], args.repeats * count
                if kind == NEW:
                    made = requests(documents, kind, args)
                for name, server in servers.items():
                    with server.awake():
                        figures = measure(server.url, args.model, made[:taken], count, args.tokens)
                    place = {"lane": name, "kind": kind, "at_once": count, "generator": generator}
                    cells.append(place | figures)
                    print(_line(cells[-1]), flush=True)
                    header = result_header("benchmarks.serving")
                    write_json(args.output, header | {"settings": settings(args), "cells": cells})
    print(f"results: {args.output}")
    return 0


def requests(documents: Documents, kind: str, args: argparse.Namespace) -> list[str]:
    """Texts of requests; with their answers they are a context long, or some tokens less."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    room = args.context - args.tokens - 16  # a text that is cut may have more tokens in the end
    if kind == NEW:
        prompts = documents.take(args.repeats * max(args.new), room)
    else:
        (document,) = documents.take(1, room - QUESTION)
        ends = documents.take(args.repeats * max(args.shared), QUESTION)
        prompts = [document + end for end in ends]
    return [tokenizer.decode(prompt) for prompt in prompts]


def _line(cell: dict[str, Any]) -> str:
    first, token = cell["first_token_ms"], cell["token_ms"]
    return (
        f"{cell['lane']:>18} {cell['kind']:>6} {cell['at_once']:>3} at once, by "
        f"{cell['generator']}: first token "
        f"{first['50']:,.0f} (p99 {first['99']:,.0f}) ms, then {token['50']:.1f} "
        f"(p99 {token['99']:.1f}) ms, {cell['tokens_per_s']:.1f} tokens/s"
    )
