"""The text of an HTML page, as its reader sees it: a line for each block.

The time that it takes grows with the length of the page, whatever the page holds. Python's own
parser, before 3.11.14, reads a megabyte of unfinished tags for minutes, and fails at others.
"""

import html
import re
from collections.abc import Iterator

BLOCKS = frozenset(
    "address article aside blockquote br caption dd div dl dt figcaption footer form h1 h2 h3 h4 "
    "h5 h6 header hr li main nav ol option p pre section table td th title tr ul".split()
)
"""Elements that begin a line."""
RAW = ("script", "style")
"""Elements that a reader does not see, and that have no elements in them."""
UNSEEN = frozenset((*RAW, "template", "noscript", "svg"))
"""All elements that a reader does not see."""
TAG = re.compile(
    r"""<(/?)([a-z][^\s/>]*)(?>=\s*"[^"]*"|=\s*'[^']*'|[^>])*+>""", re.IGNORECASE | re.DOTALL
)
"""A tag. A value in quotes may have a ">"; no part is looked at twice."""
BEGINS = re.compile(r"</?[a-z]", re.IGNORECASE)
ENDS = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in RAW}
HUGE = re.compile(r"&#(?:[0-9]{8,}|x[0-9a-f]{8,});?", re.IGNORECASE)
"""A number of a character that there is not."""


def text_of_html(page: str) -> str:
    """The text of a page, without empty lines but one between blocks."""
    pieces, unseen = list[str](), 0
    for text, tag in _parts(page):
        if not unseen:
            pieces.append(html.unescape(HUGE.sub("\N{REPLACEMENT CHARACTER}", text)))
        if tag is None:
            continue
        end, name = tag[1], tag[2].lower()
        if name in BLOCKS:
            pieces.append("\n")
        if name in UNSEEN and (end or not tag[0].endswith("/>")):
            unseen = max(0, unseen + (-1 if end else 1))
    lines = "".join(pieces).split("\n")
    text = "\n".join(" ".join(line.split()) for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _parts(page: str) -> Iterator[tuple[str, re.Match[str] | None]]:
    """The text between tags, each with the tag behind it; None: there is none.

    What begins as a tag, and has no end, is text, and so is all behind it.
    """
    at = 0
    while (begin := page.find("<", at)) >= 0:
        tag = None
        if page.startswith("<!--", begin):
            end = _behind(page, "-->", begin)
        elif page.startswith(("<!", "<?"), begin):
            end = _behind(page, ">", begin)
        elif not BEGINS.match(page, begin):
            yield page[at : begin + 1], None
            at = begin + 1
            continue
        elif tag := TAG.match(page, begin):
            end = tag.end()
        else:
            break
        yield page[at:begin], tag
        at = end
        if tag and not tag[1] and (raw := ENDS.get(tag[2].lower())):
            found = raw.search(page, at)
            at = found.start() if found else len(page)
    yield page[at:], None


def _behind(page: str, end: str, begin: int) -> int:
    """The place behind the next ``end``; that of the page, if there is none."""
    found = page.find(end, begin)
    return len(page) if found < 0 else found + len(end)
