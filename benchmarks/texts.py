"""Real prose that comes with the repository: Jane Austen's *Emma* (see ``data/README.md``)."""

from __future__ import annotations

import hashlib
import lzma
import re
from functools import cache
from pathlib import Path

EMMA = Path(__file__).resolve().parent / "data" / "emma.txt.xz"
EMMA_SHA256 = "7c67b5985c6d0de1efaeb5d342d52cb82c38083c40e2295129e30e87ee690ebe"
"""SHA-256 of the unpacked text (UTF-8)."""


@cache
def emma() -> str:
    """Return the whole novel as published: 883,028 characters, lines broken at about 70.

    Raises:
        ValueError: the file's content is not what was committed.
    """
    data = lzma.decompress(EMMA.read_bytes())
    digest = hashlib.sha256(data).hexdigest()
    if digest != EMMA_SHA256:
        raise ValueError(f"{EMMA} has SHA-256 {digest}, not {EMMA_SHA256}: restore it from git")
    return data.decode()


@cache
def paragraphs() -> tuple[str, ...]:
    """Return the novel's paragraphs in order, line breaks and headings taken out."""
    blocks = (" ".join(block.split()) for block in re.split(r"\n\s*\n", emma()))
    heading = re.compile(r"(VOLUME|CHAPTER) [IVXL]+|EMMA|By Jane Austen|FINIS")
    return tuple(block for block in blocks if block and not heading.fullmatch(block))


def excerpt(characters: int, start: int = 0) -> str:
    """Return whole paragraphs, joined by blank lines, of at least `characters` in total.

    Args:
        characters: how much text is wanted at least.
        start: number of the first paragraph.

    Raises:
        ValueError: the novel has less text than that after `start`.
    """
    chosen: list[str] = []
    length = 0
    for paragraph in paragraphs()[start:]:
        chosen.append(paragraph)
        length += len(paragraph) + 2
        if length >= characters:
            return "\n\n".join(chosen)
    raise ValueError(
        f"{characters} characters were asked for, the novel has {length} from paragraph {start} on"
    )
