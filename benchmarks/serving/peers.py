"""Other engines on this machine beside vLLM and ours, by one protocol: times, memory, a pass key.

    python -m benchmarks.serving peers --quick                        # does everything work?
    python -m benchmarks.serving peers                                # the complete table
    python -m benchmarks.serving peers --engines ours vllm llama-q8_0 --figures steps
    python -m benchmarks.serving peers --figures passkey --passkey 20
    python -m benchmarks.serving peers --avx2                         # as without AVX-512

Peers are installed from pinned packages into `build/peers`, and the checkpoint is converted to
their formats there. Each engine is a process behind a small driver; the others are ended, or frozen
while one is measured.

`start`: from the start of a process, imports included, to the first token of a prompt of 32, with
caches of compiled code empty and the weights out of the page cache (cold), then once more (warm).
`first`: to the first token of a new document. Memory is the most PSS of all its processes while
that at `--memory-context` was measured. `steps`: time of a token behind a document, in turns:
medians of the medians of turns. llama.cpp gets contexts beyond 8K from a saved one that is repeated
over and over: as many bytes, which it would compute for minutes. `restart`: from the start of a
process to the first token about a document that an earlier one has saved. `passkey`: how often a
number between sentences is found.

A cell that stands in the result file is not measured again: a run goes on where it was interrupted,
and a second one adds engines, figures or contexts. A cell that cannot be says why.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]
from transformers import AutoTokenizer

from benchmarks.cli import SMOLLM2, SMOLLM2_32K, add_model, add_output, add_tokens
from benchmarks.common import Stopwatch, machine, read_json, result_header, write_json
from benchmarks.engines import EngineError
from benchmarks.models import Documents
from benchmarks.peers import catalogue, environment
from benchmarks.peers.catalogue import KINDS, Kind, Sizes, Starting
from benchmarks.peers.process import Peer
from benchmarks.quality.tasks.base import novel_text
from benchmarks.quality.tasks.needles import passkey_in_sentences

FIGURES = ("start", "first", "steps", "restart", "passkey")
SHORT = 32
"""Tokens of the prompt that follows a start."""
QUESTION = 30
"""Tokens behind a document that was saved: how it begins, once more. (llama.cpp shows no token that
ends in the middle of a character, as those of a question without sense may.)"""
WARM = 4
"""Tokens that are decoded before a turn is measured."""
KEY_TOKENS = 8
LIMIT_S = 1200.0
"""Seconds in which a driver has to answer."""
FREE = 1 << 30
"""Bytes of memory that are left free."""
GROWTH = 1.8
"""Time of a prompt grows by this power of its length, at least."""

Cell = dict[str, Any]


class Table:
    """Cells of a result file by lane, figure and context, each written as soon as it is there."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        stored: dict[str, Any] = read_json(path) or {}
        if stored and stored["settings"] != settings:
            raise ValueError(f"{path} was made with other settings: name another --output")
        self._path = path
        self._store = result_header("benchmarks.serving") | {"settings": settings}
        self._store["versions"] |= stored.get("versions", {})
        self._cells: list[Cell] = stored.get("cells", [])
        for cell in self._cells:
            cell.setdefault("build", stored["build"])

    def value(self, lane: str, figure: str, context: int | None = None) -> Any:
        """A cell's value, or None where it is not measured."""
        for cell in self._cells:
            if (cell["lane"], cell["figure"], cell["context"]) == (lane, figure, context):
                return cell.get("value")
        return None

    def put(self, lane: str, figure: str, context: int | None, **of: Any) -> None:
        """Add a cell, of a ``value`` or a ``reason`` why it has none, and write the file."""
        key = lane, figure, context
        kept = [c for c in self._cells if (c["lane"], c["figure"], c["context"]) != key]
        cell = {"lane": lane, "figure": figure, "context": context} | of
        self._cells = [*kept, cell | {"build": self._store["build"]}]
        write_json(self._path, self._store | {"cells": self._cells})
        where = "" if context is None else f" at {context:,}"
        print(f"{lane}: {figure}{where}: {of.get('reason', of.get('value'))}", flush=True)

    def versions(self, found: dict[str, str]) -> None:
        """Note versions of packages."""
        self._store["versions"] |= found


class Measuring:
    """What the parts of a run share."""

    def __init__(self, args: argparse.Namespace, table: Table, scratch: Path) -> None:
        self.args, self.table, self.scratch = args, table, scratch
        self._documents = Documents(args.model)
        self._known: dict[int, list[int]] = {}
        self.chosen = {name: KINDS[name] for name in args.engines}

    def document(self, context: int) -> list[int]:
        """The document of that length; those of two lengths begin otherwise."""
        if context not in self._known:
            (self._known[context],) = self._documents.take(1, context)
        return self._known[context]

    def sizes(self, context: int) -> Sizes:
        """For engines with room for such contexts."""
        args = self.args
        return Sizes(args.model, args.short_model, context, self.scratch, args.avx2)

    @contextmanager
    def running(self, name: str, starting: Starting, env: dict[str, str]) -> Iterator[Peer]:
        """A driver that has loaded its model."""
        log = self.args.output.with_name(f"{self.args.output.stem}-{name}.log")
        env = {"VLLM_CACHE_ROOT": str(environment.FOLDER / "cache")} | starting.env | env
        with Peer(name, starting.command, starting.arguments, env, log, LIMIT_S) as peer:
            self.table.versions(peer.versions)
            yield peer

    def too_long(self, lane: str, context: int, limit: float) -> str | None:
        """Why an engine does not read a prompt: it would take longer than so many seconds."""
        for shorter in sorted((c for c in self.args.first if c < context), reverse=True):
            if (known := self.table.value(lane, "first", shorter)) is not None:
                needed = known * (context / shorter) ** GROWTH
                return f"> {limit:.0f} s" if needed > limit else None
        return None

    def start(self, name: str, kind: Kind) -> None:
        """From the start of a process to its first token, and first tokens of documents."""
        lane = next(iter(kind.lanes))
        contexts = [c for c in self.args.first if c <= self.args.memory_context]
        figures = {"start": "start_warm", "first": "first"}
        wanted = [
            figure
            for figure, cell in figures.items()
            if figure in self.args.figures
            and any(
                self.table.value(lane, cell, c) is None
                for c in (contexts if figure == "first" else [None])
            )
        ]
        if not wanted:
            return
        starting = kind.make(self.sizes(self.args.memory_context), True)
        short = self.document(SHORT)
        with tempfile.TemporaryDirectory(dir=self.scratch) as cache:
            env = {"VLLM_CACHE_ROOT": cache} if "start" in wanted else {}
            if "start" in wanted:
                forget(Path(str(starting.arguments.get("model", self.args.model))))
                with self.running(name, starting, env) as peer:
                    first = peer.call("generate", tokens=short, count=1)["first_token_s"]
                    self.table.put(lane, "start_cold", None, value=round(peer.start_s + first, 3))
            with self.running(name, starting, env) as peer:
                first = peer.call("generate", tokens=short, count=1)["first_token_s"]
                if "start" in wanted:
                    self.table.put(lane, "start_warm", None, value=round(peer.start_s + first, 3))
                if "first" in wanted:
                    self.first(name, kind, peer, contexts)

    def first(self, name: str, kind: Kind, peer: Peer, contexts: list[int]) -> None:
        """First tokens of new documents, the short ones first, and the memory that they take."""
        lane = next(iter(kind.lanes))
        for context in contexts:
            if self.table.value(lane, "first", context) is not None:
                continue
            if reason := self.too_long(lane, context, self.args.longest):
                self.table.put(lane, "first", context, reason=reason)
                continue
            with peer.peak() as most:
                found = peer.call("generate", tokens=self.document(context), count=1 + WARM)
            if kind.saves:
                peer.call("save", name=_slot(name, context))
            self.table.put(lane, "first", context, value=round(found["first_token_s"], 3))
            if context == self.args.memory_context:
                self.table.put(lane, "memory", context, value=most[0])

    def steps(self) -> None:
        """Times of tokens, by all engines in turns, and first tokens of long documents."""
        args = self.args
        todo = {name: self.missing(kind) for name, kind in self.chosen.items()}
        contexts = sorted({context for wanted in todo.values() for context in wanted})
        with ExitStack() as stack:
            peers = dict[str, Peer]()
            for name, wanted in todo.items():
                if not wanted:
                    continue
                kind = self.chosen[name]
                starting = kind.make(self.sizes(max(*args.contexts, *args.first)), False)
                with self.guarded(kind, "steps", args.contexts):
                    peers[name] = stack.enter_context(self.running(name, starting, {}))
                    peers[name].pause()
                if psutil.virtual_memory().available < FREE:
                    raise EngineError(
                        f"memory runs out with {name}: name fewer --engines at a time"
                    )
            for context in contexts:
                self.turns({n: peer for n, peer in peers.items() if context in todo[n]}, context)

    def missing(self, kind: Kind) -> list[int]:
        """Contexts at which an engine that runs beside the others has something to measure."""
        args, value = self.args, self.table.value
        timed = {
            context
            for context in args.contexts
            if "steps" in args.figures and kind.decodes
            for lane in kind.lanes
            if value(lane, "steps", context) is None
        }
        late = {
            context
            for context in args.first
            if "first" in args.figures and context > args.memory_context
            if value(next(iter(kind.lanes)), "first", context) is None
        }
        return sorted(timed | late)

    def turns(self, peers: dict[str, Peer], context: int) -> None:
        """All engines at one context.

        Args:
            peers: Those that have something to measure at it, frozen.
            context: Tokens of the document.
        """
        args, document = self.args, self.document(context)
        lanes = list[tuple[str, str, str | None]]()
        for name, peer in peers.items():
            kind = KINDS[name]
            with self.guarded(kind, "steps", [context] if context in args.contexts else []):
                with peer.awake():
                    ready = self.read(name, kind, peer, context)
                    if not ready or context not in args.contexts or not kind.decodes:
                        continue
                    for method in kind.lanes.values():
                        peer.call("generate", tokens=document, count=WARM, **_named(method))
                lanes += [(name, each, method) for each, method in kind.lanes.items()]
        if "steps" not in args.figures:
            return
        found = {lane: list[float]() for _, lane, _ in lanes}
        for turn in range(args.repeats):
            for name, lane, method in lanes if turn % 2 == 0 else reversed(lanes):
                with self.guarded(KINDS[name], "steps", [context]), peers[name].awake():
                    answer = peers[name].call(
                        "generate", tokens=document, count=args.steps + 1, **_named(method)
                    )
                    found[lane].append(1000 * median(answer["steps_s"]))
        for lane, times in found.items():
            if len(times) == args.repeats:
                each = [round(one, 2) for one in times]
                self.table.put(lane, "steps", context, value=round(median(times), 2), turns=each)

    def read(self, name: str, kind: Kind, peer: Peer, context: int) -> bool:
        """Let an engine have the document in its cache; returns whether it does.

        It reads it, where its time to the first token is wanted or where that takes not too long;
        otherwise it restores what it has saved, or a shorter context that is made longer.
        """
        args, lane, document = self.args, next(iter(kind.lanes)), self.document(context)
        timed = context in args.contexts and "steps" in args.figures and kind.decodes
        wants_first = "first" in args.figures and context in args.first
        wants_first &= context > args.memory_context
        wants_first &= self.table.value(lane, "first", context) is None
        reason = kind.limit if kind.longest is not None and context > kind.longest else None
        late = reason or self.too_long(lane, context, args.longest)
        if wants_first and late:
            self.table.put(lane, "first", context, reason=late)
        elif wants_first:
            found = peer.call("generate", tokens=document, count=1)
            self.table.put(lane, "first", context, value=round(found["first_token_s"], 3))
            return True
        if not timed:
            return False
        own, shorter = (
            _slot(name, each) for each in (context, min(context, self.args.memory_context))
        )
        if kind.saves and (self.scratch / own).exists():
            peer.call("restore", name=own)
        elif late and kind.widens and (self.scratch / shorter).exists():
            peer.call("widen", name=shorter, tokens=document, to=own)
            peer.call("restore", name=own)
        elif reason := reason or self.too_long(lane, context, args.reading):
            for each in kind.lanes:
                self.table.put(each, "steps", context, reason=reason)
            return False
        else:
            peer.call("generate", tokens=document, count=1)
            if kind.saves and context <= args.memory_context:
                peer.call("save", name=own)
        return True

    def restart(self, name: str, kind: Kind, context: int) -> None:
        """Save a document, end the engine, and ask about it after a new start."""
        lane = next(iter(kind.lanes))
        if self.table.value(lane, "restart", context) is not None:
            return
        if kind.saves is False:
            self.table.put(lane, "restart", context, reason="no such option")
            return
        document, sizes = self.document(context), self.sizes(context)
        asked = document + document[:QUESTION]
        if kind.saves:
            starting, slot = kind.make(sizes, True), _slot(name, context)
            if not (self.scratch / slot).exists():
                begun = min(context, self.args.memory_context)
                with self.running(name, starting, {}) as peer:
                    peer.call("generate", tokens=self.document(begun), count=1)
                    peer.call("save", name=_slot(name, begun))
                    if begun < context:
                        shorter = _slot(name, begun)
                        peer.call("widen", name=shorter, tokens=document, to=slot)
            with self.running(name, starting, {}) as peer:
                watch = Stopwatch()
                peer.call("restore", name=slot)
                peer.call("generate", tokens=asked, count=1)
                value = peer.start_s + watch.seconds
        else:
            with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="store-") as store:
                starting = catalogue.stored(kind.make(sizes, True), Path(store))
                with self.running(name, starting, {}) as peer:
                    peer.call("generate", tokens=document, count=1)
                    peer.call("close")
                with self.running(name, starting, {}) as peer:
                    found = peer.call("generate", tokens=asked, count=1)
                    value = peer.start_s + found["first_token_s"]
        self.table.put(lane, "restart", context, value=round(value, 3))

    def passkey(self, name: str, kind: Kind) -> None:
        """How many of the keys are found, by every lane of an engine."""
        args, context = self.args, self.args.passkey_context
        todo = {
            lane: method
            for lane, method in kind.lanes.items()
            if self.table.value(lane, "passkey", context) is None
        }
        if not todo:
            return
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        samples = passkey_in_sentences(novel_text(tokenizer), context, args.passkey)
        found = dict.fromkeys(todo, 0)
        starting = kind.make(self.sizes(context), False)
        with self.running(name, starting, {}) as peer:
            for sample in samples:
                prompt = [*sample.prompt, *sample.forced]
                for lane, method in todo.items():
                    answer = peer.call(
                        "generate", tokens=prompt, count=KEY_TOKENS, **_named(method)
                    )
                    text = answer.get("text") or tokenizer.decode(answer["tokens"])
                    found[lane] += sample.answer in text
        for lane, count in found.items():
            self.table.put(lane, "passkey", context, value=count, of=len(samples))

    @contextmanager
    def guarded(self, kind: Kind, figure: str, contexts: list[int]) -> Iterator[None]:
        """Let an engine that fails keep none of the others from being measured."""
        try:
            yield
        except EngineError as error:
            self.failed(kind, figure, contexts, error)

    def failed(self, kind: Kind, figure: str, contexts: list[int], error: EngineError) -> None:
        """Say why an engine has no figures; the others go on."""
        print(error, file=sys.stderr, flush=True)
        reason = str(error).splitlines()[0]
        for lane in kind.lanes:
            for context in contexts:
                if self.table.value(lane, figure, context) is None:
                    self.table.put(lane, figure, context, reason=reason)


def _slot(name: str, context: int) -> str:
    """The name of a saved context."""
    return f"{name}-{context}.slot"


def _named(method: str | None) -> dict[str, str]:
    return {"method": method} if method else {}


def forget(path: Path) -> None:
    """Take files of weights out of the system's page cache."""
    for file in [path] if path.is_file() else filter(Path.is_file, path.iterdir()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def default_output(avx2: bool) -> str:
    """A result file per instruction set."""
    isa = [each for each in machine()["isa"] if each.startswith(("avx", "amx"))]
    return f"peers-{'avx2' if avx2 or not isa else isa[-1]}.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; `--quick` changes the defaults of the sizes."""
    quick, avx2 = "--quick" in sys.argv, "--avx2" in sys.argv
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes: a check that everything works")
    add("--avx2", action="store_true", help="engines as on a machine without AVX-512, as far as "
        "they can be held to it")  # fmt: skip
    add_model(parser, SMOLLM2_32K)
    add("--short-model", type=Path, default=SMOLLM2, metavar="PATH", help="the same weights "
        "without YaRN, for engines that refuse it")  # fmt: skip
    add("--engines", nargs="+", choices=KINDS, metavar="NAME",
        default=list(catalogue.DEFAULT), help=f"of {', '.join(KINDS)}")  # fmt: skip
    add("--figures", nargs="+", choices=FIGURES, metavar="FIGURE",
        default=list(FIGURES[:-1]), help=f"of {', '.join(FIGURES)}")  # fmt: skip
    add_tokens(parser, "--contexts", [512, 1024] if quick else [2048, 8192, 32768],
               "tokens in front of those that are timed")  # fmt: skip
    add_tokens(parser, "--first", [512, 1024] if quick else [2048, 8192, 16384],
               "tokens of new documents")  # fmt: skip
    add_tokens(parser, "--restarts", [1024] if quick else [8192], "tokens of saved documents")
    add("--memory-context", type=int, default=1024 if quick else 8192, metavar="N",
        help="tokens of the document that memory is measured at")  # fmt: skip
    add("--steps", type=int, default=8 if quick else 24, help="tokens of a turn")
    add("--repeats", type=int, default=1 if quick else 3, help="turns of each engine")
    add("--longest", type=float, default=120.0, metavar="S", help="first tokens that would take "
        "longer than so many seconds are left out")  # fmt: skip
    add("--reading", type=float, default=300.0, metavar="S", help="the same of documents that "
        "are read for the tokens behind them")  # fmt: skip
    add("--passkey", type=int, default=4 if quick else 20, metavar="N", help="pass keys")
    add("--passkey-context", type=int, default=1536 if quick else 4096, metavar="N",
        help="tokens around a pass key")  # fmt: skip
    add_output(parser, "peers-quick.json" if quick else default_output(avx2))


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    watch = Stopwatch()
    settings = {
        "model": args.model.name,
        "avx2": args.avx2,
        "budget": catalogue.BUDGET,
        "memory_context": args.memory_context,
        "steps": args.steps,
        "repeats": args.repeats,
    }
    table = Table(args.output, settings)
    scratch = environment.FOLDER / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        run = Measuring(args, table, scratch)
        if args.avx2:
            for name in [name for name, kind in run.chosen.items() if not kind.holds]:
                for lane in run.chosen.pop(name).lanes:
                    for context in args.contexts:
                        table.put(lane, "steps", context, reason="chooses by the CPU")
        for name, kind in run.chosen.items():
            if {"start", "first"} & {*args.figures}:
                with run.guarded(kind, "first", args.first):
                    run.start(name, kind)
        if {"steps", "first"} & {*args.figures}:
            run.steps()
        for name, kind in run.chosen.items():
            for context in args.restarts if "restart" in args.figures else []:
                with run.guarded(kind, "restart", [context]):
                    run.restart(name, kind, context)
            if "passkey" in args.figures:
                with run.guarded(kind, "passkey", [args.passkey_context]):
                    run.passkey(name, kind)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"results: {args.output}\ntime:    {watch}")
    return 0
