"""The text of PDF, HTML, Markdown and plain text files, and what is wrong with others."""

import codecs
import importlib.util
import io
import re
import shlex
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from vllm_kvretrieval.chat.html_text import text_of_html

MOST_BYTES = 256 << 20
"""The largest file that is read."""
HTML = (".html", ".htm", ".xhtml")
LOOKED_AT = 1024
"""Bytes at the start of a file by which its kind is found."""
OFFICE = "an office document; export it as PDF or text"
PACKED = "compressed; unpack it"
PICTURE = "a picture; recognise its text first (tesseract), and name that file"
KNOWN = {
    b"PK\x03\x04": f"an archive or {OFFICE}",
    b"\xd0\xcf\x11\xe0": OFFICE,
    b"{\\rtf": OFFICE,
    b"%!PS": "PostScript; make a PDF of it (ps2pdf)",
    **dict.fromkeys((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"\x28\xb5\x2f\xfd"), PACKED),
    **dict.fromkeys((b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*"), PICTURE),
}
"""Beginnings of files that have no text to read, and what to do."""
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # begins as that of UTF-16 does
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Beginnings of text files that say how they are encoded."""
CHARSET = re.compile(rb"""<meta[^>]+charset=["']?([\w-]+)""", re.IGNORECASE)


class DocumentError(ValueError):
    """A file has no text to read; says why, and what to do."""


@dataclass(frozen=True)
class Document:
    """The text of a file.

    Attributes:
        name: The file's name.
        text: Its text.
        pages: Where each page begins in the text; empty if the file has no pages.
        blank: How many pages have no text.
    """

    name: str
    text: str
    pages: tuple[int, ...] = ()
    blank: int = 0

    def page(self, place: int) -> int | None:
        """The number of the page, from 1, with this character; None: there are no pages."""
        return bisect_right(self.pages, place) or None


def read_document(path: Path) -> Document:
    """The text of a file.

    Raises:
        OSError: It cannot be read.
        DocumentError: There is no text in it.
    """
    if path.is_dir():
        raise DocumentError(f"{path} is a directory; name the files in it")
    with path.open("rb") as file:  # perhaps a pipe, which can be read once, and has no size
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise DocumentError(f"{path} has more than {MOST_BYTES >> 20} MiB; name a part of it")
    if not content.strip():
        raise DocumentError(f"{path} is empty; name a file with text")
    if content[:LOOKED_AT].lstrip().startswith(b"%PDF-"):
        return _read_pdf(path, content)
    for beginning, what in KNOWN.items():
        if content.startswith(beginning):
            raise DocumentError(f"{path} is {what}")
    html = path.suffix.lower() in HTML or re.match(
        rb"\s*(<!doctype html|<html)", content[:LOOKED_AT], re.IGNORECASE
    )
    text = _decoded(path, content, bool(html))
    if html:
        text = text_of_html(text)
    if not text.strip():
        what = "has no text, only markup" if html else "is empty"
        raise DocumentError(f"{path} {what}; name a file with text")
    return Document(_sendable(path.name), text)


def _sendable(text: str) -> str:
    """A text with a question mark for each half of a character, which no request can hold.

    Names of files, and texts of PDF files, may have some.
    """
    return text.encode(errors="replace").decode()


def _decoded(path: Path, content: bytes, html: bool) -> str:
    """The characters of a file of text."""
    encoding = next((name for mark, name in MARKS.items() if content.startswith(mark)), None)
    if encoding is None and b"\0" in content:
        raise DocumentError(
            f"{path} is binary data; name a PDF, or a file of text, Markdown or HTML"
        )
    if encoding is None and html and (found := CHARSET.search(content[:LOOKED_AT])):
        encoding = found[1].decode()
        if encoding.lower().startswith("utf-16"):
            encoding = "utf-8"  # as browsers do: a page in UTF-16 could not be read so far
    try:
        return content.decode(encoding or "utf-8")
    except (UnicodeError, LookupError):
        file = shlex.quote(str(path))
        raise DocumentError(
            f"{path} is not {encoding or 'UTF-8'} text; if you know its encoding, convert it, for "
            f"instance: iconv -f ISO-8859-1 -t UTF-8 {file} > {shlex.quote(path.stem)}-utf8.txt"
        ) from None


def _read_pdf(path: Path, content: bytes) -> Document:
    if importlib.util.find_spec("pypdf") is None:
        text = f"{shlex.quote(str(path))} {shlex.quote(path.stem)}.txt"
        raise DocumentError(
            f"{path} is a PDF, which pypdf reads; the extra [chat] brings it: pip install pypdf "
            f"(in a checkout: pip install '.[chat]'). Or take its text: pdftotext {text}, and name "
            "that file"
        )
    import pypdf
    from pypdf.errors import DependencyError, FileNotDecryptedError

    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise FileNotDecryptedError
        texts = [_sendable(page.extract_text().strip()) for page in reader.pages]
    except (FileNotDecryptedError, DependencyError):
        file = shlex.quote(str(path))
        raise DocumentError(
            f"{path} is protected by a password; take it off, and name the new file: "
            f"qpdf --password=PASSWORD --decrypt {file} {shlex.quote(path.stem)}-open.pdf"
        ) from None
    except Exception as error:  # a damaged file makes pypdf raise anything
        raise DocumentError(
            f"{path} is damaged, or no PDF after all ({error or type(error).__name__}); open it in "
            "a viewer, and print it to a new PDF"
        ) from None
    if not any(texts):
        count = f"{len(texts)} page{'s'[: len(texts) != 1]}"
        raise DocumentError(
            f"{path} has {count} and no text: it is scanned, or has pictures alone. Recognise its "
            f"text first, and name the new file: ocrmypdf {shlex.quote(str(path))} "
            f"{shlex.quote(path.stem)}-text.pdf"
        )
    places, text = list[int](), ""
    for page in texts:
        places.append(len(text))
        text += page + "\n\n"
    return Document(_sendable(path.name), text, tuple(places), sum(not page for page in texts))
