"""Teacher-forced tasks: the text is given, the model's distributions over it are scored.

The forced tokens pass through the decode path one by one. Prompt log-probs would be cheaper and
would measure the prefill, which is exact under every method.
"""

from __future__ import annotations

from benchmarks.quality.tasks.base import Sample, TokenText, blind_positions, prompt_length

COPY_TOKENS = 80
"""Length of the passage that is forced a second time."""

COPY_CUE = 16
"""First tokens of the passage, which only tell the model which passage it is and are not scored."""

COPIES = 4
"""Passages taken from one document, which is prefilled once for all of them."""

NOVEL_TOKENS = 256
"""Tokens of the novel forced after the prompt."""


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
            samples.append(
                Sample(prompt, (*separator, *passage), scored_from=len(separator) + COPY_CUE)
            )
    return samples[:count]


def novel(text: TokenText, context: int, count: int) -> list[Sample]:
    """Force the novel's own continuation: what a method costs where no needle is sought."""
    samples = []
    length = prompt_length(context)
    for index in range(count):
        size = length - len(text.prefix)
        tokens, _ = text.passage(size + NOVEL_TOKENS, index, count)
        prompt = (*text.prefix, *tokens[:size])
        samples.append(Sample(prompt, tuple(tokens[size:])))
    return samples
