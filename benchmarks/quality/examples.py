"""Examples of tasks: an input, what its answer should have, and how that is scored.

A file of one's own has a line of JSON per example, in the form that RULER's generator writes::

    {"input": "... What is the code of Ann?", "outputs": ["4711"]}

Further fields are ``task`` (else the file's name), ``tokens`` (of the answer at most), ``match``
(a name in `METRICS`) and ``answer`` (the text that `accuracy` forces; else the first output).
RULER's own fields, such as ``index`` and ``length``, are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.ruler_tasks.scoring import METRICS

MOST_BYTES = 1 << 24
"""Of a line; a prompt of a million tokens has less."""

MOST_TOKENS = 1 << 16
"""Of an answer."""

TOKENS = 128
"""Of an answer, where a line does not say."""

_WANTED = '{"input": "...", "outputs": ["..."]}'


@dataclass(frozen=True)
class Example:
    """One question of a task."""

    task: str
    """The name of the task, as tables show it."""

    input: str
    """The prompt, as it is sent."""

    outputs: tuple[str, ...]
    """What the answer should have; see ``match``."""

    tokens: int = TOKENS
    """Tokens that the answer may have."""

    match: str = "all"
    """The name in `METRICS` of what scores an answer."""

    answer: str = ""
    """The whole right answer, for tasks that force it."""

    values: tuple[str, ...] = ()
    """Parts of the answer, in order, that are right or wrong on their own; none: the whole is."""


def read_examples(path: Path) -> dict[str, list[Example]]:
    """Return the examples of a file by task, in order.

    Raises:
        ValueError: a line is none; the message names file and line, and says what is wrong.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--data {path}: there is no such file")
    found: dict[str, list[Example]] = {}
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_BYTES + 1):
            number += 1
            try:
                if example := _parse(line, path.stem):
                    found.setdefault(example.task, []).append(example)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path} has no examples; a line of it is such as {_WANTED}")
    for task, examples in found.items():
        if len(ways := {example.match for example in examples}) > 1:
            raise ValueError(
                f"{path}: the examples of task {task!r} are scored in several ways "
                f"({', '.join(sorted(ways))}); give each way a task of its own"
            )
    return found


def _parse(line: bytes, task: str) -> Example | None:
    """The example of a line; None: the line is blank."""
    if len(line) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start + 1})") from None
    if not text.strip():
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error}); a line is such as {_WANTED}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"it is no object such as {_WANTED}")
    outputs = fields.get("outputs")
    if not isinstance(outputs, list) or not outputs:
        raise ValueError(f'"outputs" must be a list of one text or more, as in {_WANTED}')
    texts = tuple(_text({"outputs": each}, "outputs") for each in outputs)
    match = _text(fields, "match", "all")
    if match not in METRICS:
        raise ValueError(f'"match" is {match[:40]!r}; there are: {", ".join(METRICS)}')
    if match == "json" and not all(map(_is_object, texts)):
        raise ValueError('with "match": "json" each output is the JSON of an object')
    tokens = fields.get("tokens", TOKENS)
    if type(tokens) is not int or not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f'"tokens" must be a whole number from 1 to {MOST_TOKENS:,}')
    name = _text(fields, "task", task)
    if not name.isprintable() or "/" in name or "|" in name or len(name) > 64:
        raise ValueError('"task" must be a name of up to 64 characters, without / and |')
    answer = _text(fields, "answer", texts[0])
    return Example(name, _text(fields, "input"), texts, tokens, match, answer)


def _text(fields: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = fields.get(name, default)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'"{name}" must be a text that is not empty, as in {_WANTED}')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f'"{name}" has half a character (a lone surrogate)') from None
    return value


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
