"""Tokens per step with drafts that come from a request's own context, by several drafters.

    python -m benchmarks.ops drafters

Without a model: the answer is a real text, and a draft is accepted as far as it agrees with it, as
with a model that is sure of the text. vLLM's `ngram` (shortest and longest n-gram 2 and 5), the
last of the longest matches with as many tokens as there may be, ours (as long as pays), and the
suffix tree of `arctic-inference`, which is vLLM's method `suffix`, if it is installed. The speed-up
is what comes out if a draft takes what the drafter reckons with, however short a context is.

Texts: a copy of a passage of the novel; a copy of a second version, of whose words one in twenty is
another; modules of Python's library; and the novel, which goes on.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.cli import SMOLLM2, add_model, add_output, add_tokens
from benchmarks.common import Stopwatch, result_header, write_json
from benchmarks.tables import speculative as tables
from benchmarks.texts import excerpt
from vllm_kvretrieval.drafting.lookup import find
from vllm_kvretrieval.drafting.pace import VERIFY, Pace

COST = VERIFY.among(1)
ANSWER = 600
BEGINNING = 32
CHARACTERS = 6
"""Of a token, more than there are on average."""
TREE_DEPTH, LEAST_SHARE = 24, 0.1
"""vLLM's defaults for `suffix`."""

Draft = Callable[[np.ndarray, int], np.ndarray]
Note = Callable[[int, int], None]


def texts(model: Path, length: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """Name, context and answer of each text."""
    tokenizer, rng = AutoTokenizer.from_pretrained(model), random.Random(1)

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return tokens

    novel = encode(excerpt(CHARACTERS * (length + ANSWER)))
    ask, document = encode("\n\nOnce more, word by word:\n\n"), novel[:length]
    at = length // 3
    yield "copy", [*document, *ask, *document[at - BEGINNING : at]], document[at : at + ANSWER]
    first = document[: length // 2]
    second = [rng.choice(first) if rng.random() < 0.05 else token for token in first]
    both = [*first, *encode("\n\nSecond version:\n\n"), *second, *ask]
    yield "edited copy", [*both, *second[200 - BEGINNING : 200]], second[200 : 200 + ANSWER]
    code = list[int]()
    for module in sorted(Path(random.__file__).parent.glob("*.py")):
        if len(code) < length + ANSWER:
            code += encode(module.read_text())
    yield "code", code[:length], code[length : length + ANSWER]
    yield "novel", document, novel[length : length + ANSWER]


def _ngram(context: list[int], most: int) -> tuple[Draft, Note]:
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    propose = _find_longest_matched_ngram_and_propose_tokens
    return lambda tokens, left: propose(tokens, 2, 5, 1 << 30, min(most, left)), lambda *_: None


def _latest(context: list[int], most: int) -> tuple[Draft, Note]:
    def draft(tokens: np.ndarray, left: int) -> np.ndarray:
        match = find(tokens)
        return tokens[match.end : match.end + min(most, left)] if match.length else tokens[:0]

    return draft, lambda *_: None


def _ours(context: list[int], most: int) -> tuple[Draft, Note]:
    own, kind = Pace(), -1

    def draft(tokens: np.ndarray, left: int) -> np.ndarray:
        nonlocal kind
        match = find(tokens)
        kind = own.kind(match.length)
        there = min(most, left, len(tokens) - match.end)
        count = own.plan(kind, there, COST).tokens
        if count == 0 and own.probe(kind, there, COST):
            count = 1
        return tokens[match.end : match.end + count]

    return draft, lambda drafted, accepted: own.note(kind, drafted, accepted)


def _suffix(context: list[int], most: int) -> tuple[Draft, Note]:
    from arctic_inference.suffix_decoding import (  # type: ignore[import-not-found]
        SuffixDecodingCache,
    )

    tree = SuffixDecodingCache(max_tree_depth=TREE_DEPTH, max_cached_requests=0)
    tree.start_request("", np.array(context, dtype=np.int32))
    seen = len(context)

    def draft(tokens: np.ndarray, left: int) -> np.ndarray:
        nonlocal seen
        if len(tokens) > seen:
            tree.add_active_response("", tokens[seen:].tolist())
            seen = len(tokens)
        found = tree.speculate(
            "",
            tokens[-TREE_DEPTH:],
            max_spec_tokens=min(most, left),
            max_spec_factor=1.0,
            min_token_prob=LEAST_SHARE,
        )
        return np.array(found.token_ids, dtype=np.int32)

    return draft, lambda *_: None


DRAFTERS = {
    "vLLM's `ngram`": _ngram,
    "last match": _latest,
    "ours": _ours,
    "suffix tree": _suffix,
}


def answer(
    context: list[int], text: list[int], drafter: tuple[Draft, Note]
) -> tuple[int, int, int, int]:
    """Steps, those with drafts, drafted tokens and accepted ones, of an answer that is the text."""
    draft, note = drafter
    tokens, length = np.array([*context, *text], dtype=np.int32), len(context)
    steps = verifying = drafted = accepted = 0
    while length < len(tokens):
        found = draft(tokens[:length], len(tokens) - length)
        right = 0
        while right < len(found) and found[right] == tokens[length + right]:
            right += 1
        if len(found):
            note(len(found), right)
        length += min(right + 1, len(tokens) - length)
        steps, verifying = steps + 1, verifying + (len(found) > 0)
        drafted, accepted = drafted + len(found), accepted + right
    return steps, verifying, drafted, accepted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(parser, SMOLLM2)
    add_tokens(parser, "--contexts", [8192, 32768], "tokens of the contexts")
    parser.add_argument("--drafts", type=int, default=5, help="draft tokens at a step, at most")
    add_output(parser, "drafters.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    watch, cells = Stopwatch(), list[dict[str, Any]]()
    for context in sorted(args.contexts):
        for name, before, text in texts(args.model, context):
            found = dict[str, dict[str, float]]()
            for drafter, make in DRAFTERS.items():
                try:
                    made = make(before, args.drafts)
                except ModuleNotFoundError:
                    continue
                steps, verifying, drafted, accepted = answer(before, text, made)
                time = steps + verifying * COST.once + drafted * COST.token
                found[drafter] = {
                    "tokens_per_step": len(text) / steps,
                    "drafted": drafted,
                    "accepted": accepted,
                    "speed_up": len(text) / time,
                }
            cells.append({"context": context, "text": name, "drafters": found})
    settings = {"once": COST.once, "token": COST.token} | {"drafts": args.drafts, "answer": ANSWER}
    settings["model"] = args.model.name
    store = result_header("benchmarks.ops") | {"settings": settings, "cells": cells}
    write_json(args.output, store)
    print(f"{tables.drafters({'': store}, {})}\nresults: {args.output}\ntime:    {watch}")
    return 0
