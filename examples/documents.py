"""Text files, and a word on what is none."""

from __future__ import annotations

from pathlib import Path


def read_document(path: Path) -> str:
    """The text of a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no text; says what to do.
    """
    content = path.read_bytes()
    if content.startswith(b"%PDF-"):
        raise ValueError(
            f"{path} is a PDF. Take its text: pdftotext {path.name} {path.stem}.txt "
            "(Debian: apt install poppler-utils), and name that file"
        )
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
