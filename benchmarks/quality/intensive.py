"""Tasks whose answers need much of their prompts, not one place of them.

A needle's answer is in one place, and so is that of most of RULER's tasks; a method that finds
places passes them. Here each line of the answer needs another place, hundreds of steps long, and
one wrong place is a wrong line. Methods that read keys by low rank, or pages by landmarks, have
failed at such tasks (arXiv 2604.08426, whose Text2JSON has long documents for large models). These
are made from random words and numbers in any length, so none of them is in a model's memory.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks import texts
from benchmarks.quality.examples import Example
from benchmarks.quality.tasks.needles import COLOURS, PLACES

SHOWN = 2
"""Objects of the answer that the prompt ends with, so that small models know its form."""

_CITIES = "Berlin Cairo Dublin Geneva Havana Lagos Lima Lisbon Madrid Oslo Paris Quito Rome".split()
ANSWERED = 32
"""Objects of an answer that is forced: from everywhere, in random order, since hundreds take long.
Their names are given then, and their values are asked for."""

_SHORT = 240
"""Characters of a paragraph between two facts, at most."""

_ROOM = 8
"""Tokens to spare, for an answer that is written another way."""

Tokens = Callable[[str], Sequence[int]]
"""The tokens of a text."""

Item = tuple[str, str, int]
"""A name, a city and a code."""


def _items(rng: random.Random) -> list[Item]:
    """More of them than fit into any prompt, each with a name of its own."""
    names = ["-".join(pair) for pair in product(COLOURS, PLACES)]
    rng.shuffle(names)
    return [(name, rng.choice(_CITIES), rng.randrange(1000, 10_000)) for name in names]


def _example(
    task: str,
    tokens: Tokens,
    context: int,
    write: Callable[[int], tuple[str, Sequence[Mapping[str, Any]]]],
) -> Example:
    """The longest example that fits.

    Args:
        task: Its name.
        tokens: The tokens of a text.
        context: Tokens of input and answer.
        write: Gives, for a number of items, what comes before the answer, and the answer's objects.

    Raises:
        ValueError: Not even a few items fit.
    """
    found, count = None, SHOWN + 2
    while True:
        before, objects = write(count)
        lines = list(map(json.dumps, objects))
        lead, rest = (",\n".join(part) for part in (lines[:SHOWN], lines[SHOWN:]))
        places = range(SHOWN, count)
        mixed = random.Random(f"{task} {count}").sample(places, min(ANSWERED, len(places)))
        example = Example(
            task,
            f"{before}[\n{lead},\n",
            tuple(lines[SHOWN:]),
            len(tokens(rest)) + _ROOM,
            "json",
            ",\n".join(lines[place] for place in mixed),
            tuple(_values([objects[place] for place in mixed])),
        )
        if len(tokens(example.input)) + example.tokens > context:
            break
        found, count = example, count + 1
    if found is None:
        raise ValueError(f"{task}: a context of {context} tokens has no room for its items")
    return found


def _values(objects: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The values of objects as their JSON has them."""
    for value in (value for each in objects for value in each.values()):
        yield from map(json.dumps, value if isinstance(value, list) else [value])


def table_to_json(tokens: Tokens, context: int, count: int) -> list[Example]:
    """A table, and the same as JSON: the answer needs every row, in order."""
    examples = []
    for index in range(count):
        items = _items(random.Random(f"table {index}"))

        def write(size: int, items: list[Item] = items) -> tuple[str, list[Any]]:
            table = "\n".join(f"{name}: {code}" for name, _, code in items[:size])
            found = [{name: code} for name, _, code in items[:size]]
            return f"{table}\n\nThe same table in JSON:\n\n", found

        examples.append(_example("table_to_json", tokens, context, write))
    return examples


def text_to_json(tokens: Tokens, context: int, count: int) -> list[Example]:
    """Facts between the paragraphs of a novel, and each of them as JSON."""
    examples = []
    paragraphs = [text for text in texts.paragraphs() if len(text) < _SHORT]
    for index in range(count):
        rng = random.Random(f"text {index}")
        items, prose = _items(rng), rng.sample(paragraphs, len(paragraphs))

        def write(
            size: int, items: list[Item] = items, prose: list[str] = prose
        ) -> tuple[str, list[Any]]:
            told = [
                f"{between}\n\nThe code of {name} is {code}.\n\n"
                for (name, _, code), between in zip(items[:size], prose, strict=False)
            ]
            found = [{name: code} for name, _, code in items[:size]]
            return f"{''.join(told)}Every code in this text, in JSON:\n\n", found

        examples.append(_example("text_to_json", tokens, context, write))
    return examples


def join_to_json(tokens: Tokens, context: int, count: int) -> list[Example]:
    """Two tables in different orders, joined: each line of the answer needs two places."""
    examples = []
    for index in range(count):
        rng = random.Random(f"join {index}")
        items = _items(rng)
        order = rng.sample(range(len(items)), len(items))

        def write(
            size: int, items: list[Item] = items, order: list[int] = order
        ) -> tuple[str, list[Any]]:
            cities = [f"{name}: {city}" for name, city, _ in items[:size]]
            mixed = [items[place] for place in order if place < size]
            codes = [f"{name}: {code}" for name, _, code in mixed]
            tables = "\n".join([*cities, "", *codes])
            found = [{name: [city, code]} for name, city, code in items[:size]]
            return f"{tables}\n\nBoth tables in one, in JSON:\n\n", found

        examples.append(_example("join_to_json", tokens, context, write))
    return examples


Maker = Callable[[Tokens, int, int], list[Example]]
"""Makes a task's examples from the tokens of a text, the tokens that input and answer may have, and
the number of examples."""

MAKERS: dict[str, Maker] = {
    "table_to_json": table_to_json,
    "text_to_json": text_to_json,
    "join_to_json": join_to_json,
}
