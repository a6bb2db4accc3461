"""Teacher-forced tasks: the text is given, the model's distributions over it are scored.

The forced tokens pass through the decode path one by one. Prompt log-probs would be cheaper and
would measure the prefill, which is exact under every method.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from benchmarks.quality.examples import Example
from benchmarks.quality.intensive import Maker
from benchmarks.quality.tasks.base import Builder
from vllm_kvretrieval.calibration.samples import (
    Sample,
    TokenText,
    blind_positions,
    continued,
    prompt_length,
)

COPY_TOKENS = 80
"""Length of the passage that is forced a second time."""

COPY_CUE = 16
"""First tokens of the passage, which only tell the model which passage it is and are not scored."""

COPIES = 4
"""Passages taken from one document, which is prefilled once for all of them."""

NOVEL_TOKENS = 256
"""Tokens of the novel forced after the prompt."""

GENERATED = 4096
"""Tokens that are scored of a long generation after a short prompt; one more is forced."""

STRETCHES = 8
"""Parts of a long generation that are scored apart."""

TURNS = 5
"""Requests for a passage, one after the other, over one document."""

TURN_TOKENS = 48
"""Length of such a passage."""

ALIKE = 8
"""Passages of a document whose headings are alike."""

ANSWER_TOKENS = 512
"""Tokens of an example's right answer that are forced, at most."""


def second_copy(text: TokenText, context: int, count: int) -> list[Sample]:
    """Force a passage that occurred earlier in the prompt: easy for a method that looks it up."""
    samples = []
    length = prompt_length(context)
    documents = -(-count // COPIES)
    separator = text.encode("\n\n")
    for index in range(documents):
        novel, _ = text.passage(length - len(text.prefix), index, documents)
        prompt = (*text.prefix, *novel)
        for place in blind_positions(length, COPY_TOKENS, COPIES):
            passage = prompt[place : place + COPY_TOKENS]
            copied = (*separator, *passage)
            samples.append(
                Sample(prompt, copied, turns=((len(separator) + COPY_CUE, len(copied)),))
            )
    return samples[:count]


def turns(text: TokenText, context: int, count: int) -> list[Sample]:
    """Ask for a passage of one document five times, in the manner of SCBench (arXiv 2412.10319).

    A request is the first tokens of a passage, the answer the rest of it. The prompt ends with the
    first request; answers and further requests are forced, so that all of them are decode steps of
    one generation.
    """
    samples = []
    separator = tuple(text.encode("\n\n"))
    length = prompt_length(context)
    size = length - len(text.prefix) - len(separator) - COPY_CUE
    for index in range(count):
        novel, _ = text.passage(size, index, count)
        document = (*text.prefix, *novel)
        places = blind_positions(len(document), TURN_TOKENS, TURNS)
        random.Random(f"turns {context} {index}").shuffle(places)
        passages = [document[place : place + TURN_TOKENS] for place in places]
        samples.append(
            _asked(document, separator, [(p[:COPY_CUE], p[COPY_CUE:]) for p in passages])
        )
    return samples


def alike(text: TokenText, context: int, count: int) -> list[Sample]:
    """The same where requests name one of eight headings that differ in a number, as in MRCR.

    The passages stand below their headings in the document (see arXiv 2409.12640).
    """
    samples = []
    separator = tuple(text.encode("\n\n"))
    headings = [
        tuple(text.encode(f"Passage number {n} of {ALIKE}:\n")) for n in range(1, 1 + ALIKE)
    ]
    size = prompt_length(context) - len(text.prefix) - len(separator) - max(map(len, headings))
    size -= sum(len(heading) + 2 * len(separator) for heading in headings)
    for index in range(count):
        novel, _ = text.passage(size, index, count)
        places = blind_positions(len(novel), TURN_TOKENS, ALIKE)
        document, passages, done = [*text.prefix], [], 0
        for heading, place in zip(headings, places, strict=True):
            passage = tuple(novel[place : place + TURN_TOKENS - COPY_CUE])
            document += [*novel[done:place], *separator, *heading, *passage, *separator]
            passages.append((heading, passage))
            done = place + len(passage)
        chosen = random.Random(f"alike {context} {index}").sample(passages, TURNS)
        samples.append(_asked((*document, *novel[done:]), separator, chosen))
    return samples


def _asked(
    document: tuple[int, ...],
    separator: tuple[int, ...],
    turns: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> Sample:
    """A document with requests and their answers after it; all answers are scored."""
    (first, forced), *others = turns
    stretches = [(1, len(forced))]
    for request, answer in others:
        forced = (*forced, *separator, *request)
        stretches.append((len(forced) + 1, len(forced) + len(answer)))
        forced += answer
    return Sample((*document, *separator, *first), forced, turns=tuple(stretches))


def novel(text: TokenText, context: int, count: int) -> list[Sample]:
    """Force the novel's own continuation: what a method costs where no needle is sought."""
    return [Sample(*parts) for parts in continued(text, context, NOVEL_TOKENS, count)]


def generation(text: TokenText, context: int, count: int) -> list[Sample]:
    """Force a long continuation of a short prompt: what is dropped early is missing ever after."""
    size = GENERATED // STRETCHES
    stretches = tuple((1 + size * n, 1 + size * (n + 1)) for n in range(STRETCHES))
    parts = continued(text, context - GENERATED, 1 + GENERATED, count)
    return [Sample(prompt, forced, turns=stretches) for prompt, forced in parts]


def answers(make: Maker) -> Builder:
    """Force the right answers of examples that a function makes."""

    def build(text: TokenText, context: int, count: int) -> list[Sample]:
        made = make(lambda part: [*text.prefix, *text.encode(part)], context, count)
        return [answer(text, example) for example in made]

    return build


def answer(text: TokenText, example: Example) -> Sample:
    """Force the right answer of an example.

    Raises:
        ValueError: it has a single token, which the prompt's own reading decides.
    """
    encoded = text.tokenizer(example.answer, add_special_tokens=False, return_offsets_mapping=True)
    forced = tuple(encoded.input_ids[:ANSWER_TOKENS])
    if len(forced) < 2:
        raise ValueError(
            f"task {example.task}: the answer {example.answer[:40]!r} has a single token, which is "
            "not decoded; longer ones can be forced"
        )
    parts = list(_stretches(example, encoded.offset_mapping[: len(forced)]))
    return Sample((*text.prefix, *text.encode(example.input)), forced, parts=tuple(parts))


def _stretches(example: Example, offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The tokens of the answer's values that are forced whole; the first token is no part of any.

    Args:
        example: The example.
        offsets: Per forced token its first character, and the one after its last.
    """
    place = 0
    for value in example.values or (example.answer,):
        begin = example.answer.index(value, place)
        place = begin + len(value)
        inside = [n for n, (first, end) in enumerate(offsets) if end > begin and first < place]
        if inside and (offsets[-1][1] >= place or not example.values):
            yield max(inside[0], 1), inside[-1] + 1
