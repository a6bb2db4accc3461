"""Texts in a model's tokens, and what is asked about them: prompts, and tokens that follow."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

CACHE_BLOCK = 128
"""Tokens per block of vLLM's prefix cache on the CPU."""

BLIND_HEAD = 320
"""What a task asks for lies behind this many tokens, outside every setting's sinks, ..."""

BLIND_TAIL = 1024
"""... and ends before the last this many of the prompt, outside every window up to budget 1024. So
a control that keeps sinks and window alone cannot see it at any of the default budgets."""


@dataclass(frozen=True)
class Sample:
    """One request: a prompt, tokens forced upon the model, then tokens of its own choice.

    The prompt is prefilled, which is exact under every method; all that follows is decoded. The
    first generated token's distribution still comes from the prefill, so it is never scored.
    """

    prompt: tuple[int, ...]
    """Token ids of the prompt."""

    forced: tuple[int, ...]
    """Token ids that generation starts with, whatever the model would have said."""

    answer: str = ""
    """What the model should say next; empty where the forced tokens themselves are scored."""

    answer_tokens: int = 0
    """Number of tokens the model generates freely."""

    turns: tuple[tuple[int, int], ...] = ()
    """Stretches of the forced tokens whose distributions are scored, [begin, end) each, of equal
    lengths; empty: all but the first."""

    parts: tuple[tuple[int, int], ...] = ()
    """Stretches of the forced tokens, [begin, end) each, that are right where the model finds each
    token of them the most likely one; where there are none, nothing is."""

    @property
    def scored(self) -> list[int]:
        """Indices of the forced tokens whose distributions are scored."""
        stretches = self.turns or ((1, len(self.forced)),)
        return [index for begin, end in stretches for index in range(begin, end)]

    @property
    def generated(self) -> int:
        """Number of tokens generated in all."""
        return len(self.forced) + self.answer_tokens

    @property
    def total(self) -> int:
        """Length of the context when the last token has been generated."""
        return len(self.prompt) + self.generated


class TokenText:
    """A text in one model's tokens, cut at its paragraphs.

    Args:
        tokenizer: The model's.
        paragraphs: Those of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, paragraphs: Sequence[str]) -> None:
        self.tokenizer, self._paragraphs = tokenizer, paragraphs
        self.prefix: list[int] = list(tokenizer("").input_ids)
        """Tokens that the tokenizer puts before every text (Gemma's ``<bos>``)."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` alone, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    @cached_property
    def paragraphs(self) -> list[list[int]]:
        """Token ids of each paragraph, with the blank line that ends it."""
        return [self.encode(f"{paragraph}\n\n") for paragraph in self._paragraphs]

    def passage(self, length: int, index: int, count: int) -> tuple[list[int], list[int]]:
        """Return `length` tokens of running text, the `index`-th of `count` spread over the text.

        Returns:
            The token ids, and the positions in them where a paragraph starts.

        Raises:
            ValueError: the text is shorter than `length`.
        """
        lengths = [len(paragraph) for paragraph in self.paragraphs]
        spare = sum(lengths) - length
        if spare < 0:
            raise ValueError(f"the text has {sum(lengths)} tokens, {length} were asked for")
        target = spare * index // max(count - 1, 1) if count > 1 else 0
        first, skipped = 0, 0
        while skipped + lengths[first] <= target:
            skipped += lengths[first]
            first += 1
        tokens: list[int] = []
        starts: list[int] = []
        for paragraph in self.paragraphs[first:]:
            starts.append(len(tokens))
            tokens += paragraph
            if len(tokens) >= length:
                break
        return tokens[:length], starts


def prompt_length(context: int) -> int:
    """Return the length of a prompt that leaves a block's room in a context of `context` tokens.

    It ends 8 tokens into a block of the prefix cache, so running a cached prompt again (under
    another method or budget) recomputes 8 tokens only.
    """
    return context // CACHE_BLOCK * CACHE_BLOCK - CACHE_BLOCK + 8


def blind_positions(length: int, size: int, count: int) -> list[int]:
    """Return `count` positions, evenly spread, for `size` tokens that no control may see.

    Args:
        length: tokens in the prompt.
        size: tokens to hide.
        count: how many positions are wanted.

    Raises:
        ValueError: the prompt is too short to hide them.
    """
    room = length - BLIND_TAIL - size - BLIND_HEAD
    if room <= 0:
        raise ValueError(
            f"a prompt of {length} tokens has no place for {size} tokens behind the first "
            f"{BLIND_HEAD} and before the last {BLIND_TAIL}: take a longer context"
        )
    return [BLIND_HEAD + room * (2 * i + 1) // (2 * count) for i in range(count)]


def continued(
    text: TokenText, context: int, tokens: int, count: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts that fit into a context, and so many tokens of the text that follow each.

    Args:
        text: The text.
        context, tokens: Tokens of the context, and of those that follow.
        count: How many.
    """
    size = prompt_length(context) - len(text.prefix)
    for index in range(count):
        part, _ = text.passage(size + tokens, index, count)
        yield (*text.prefix, *part[:size]), tuple(part[size:])
