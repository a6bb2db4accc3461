"""The text of files, and what is said of files without."""

import importlib.util
import os
import re
import time
from pathlib import Path

import pytest

from tests.support.documents import write_pdf
from vllm_kvretrieval.chat.documents import DocumentError, read_document
from vllm_kvretrieval.chat.html_text import text_of_html

HTML = """<!DOCTYPE html><html><head><title>Report</title><style>p {color: red}</style></head>
<body><h1>Ships</h1><script>alert("no")</script><p>The <b>Kestrel</b> sank &amp; rose.</p>
<p>Second &lt;b&gt;</p></body></html>"""


@pytest.fixture
def file(tmp_path):
    """Writes a file, and gives its path."""

    def write(name, content):
        path = Path(tmp_path / name)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a", "a.py"])
def test_text_is_read_as_it_is(file, name):
    found = read_document(file(name, "# Tïtle\r\n\r\ntext\n"))
    assert (found.name, found.text, found.pages) == (name, "# Tïtle\r\n\r\ntext\n", ())
    assert found.page(3) is None


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_mark_says_how_text_is_encoded(file, encoding):
    assert read_document(file("a.txt", "Tïtle".encode(encoding))).text == "Tïtle"


@pytest.mark.parametrize("name", ["a.html", "a.htm", "a.txt"])
def test_html_without_markup(file, name):
    """A page that is saved under another name is found by its beginning."""
    text = read_document(file(name, HTML)).text
    assert text == "Report\n\nShips\n\nThe Kestrel sank & rose.\n\nSecond <b>\n"


def test_html_says_how_it_is_encoded(file):
    page = '<html><meta charset="iso-8859-1"><p>Tïtle</p>'.encode("latin-1")
    assert read_document(file("a.html", page)).text == "Tïtle\n"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<a title='a > b'>one</a> <p class=it's>two</p>", "one\ntwo"),
        ('<p title="a > b>one', "b>one"),
        ("1 < 2 <3 </4 a<b", "1 < 2 <3 </4 a<b"),
        ("<script>if (a <!-- b) </scripts> {'</script >one<style>a</style/>two", "onetwo"),
        ("one<script>two", "one"),
        ("one<!-- two > -->three<!-- four", "onethree"),
        ("one<![if !vml]>two<![<!a>three<?php four ?>five", "onetwothreefive"),
        (
            "one<svg><g>two</g></svg><svg/><template>a<template>b</template></template>three",
            "onethree",
        ),
        ("&lt;p&gt; &amp;amp; &#x41;&#66;&#xD800;&#99999999;", "<p> &amp; AB\ufffd\ufffd"),
        ("<LI>one<BR/>two<lis>three", "one\ntwothree"),
    ],
)
def test_html_of_any_kind(page, text):
    assert text_of_html(page) == text + "\n"


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "<",
            "<!--",
            "<a ",
            "</",
            "</a ",
            "<?",
            "<!",
            "<![",
            "<div>",
            "<script>",
            "<svg>",
            "&",
            "&#",
        ),
        *('<a x="', "<a x='", '="', '<a x="">', "<p>\n\n\n", "&#9", "9", "<style>a</style", "</p"),
    ],
)
def test_hostile_html_takes_no_longer(piece):
    """Than its length; a megabyte of such a piece took Python's own parser minutes, or broke it."""
    began = time.process_time()
    text_of_html("<html>text &#" + piece * (1_000_000 // len(piece)))
    assert time.process_time() - began < 5


def test_html_that_cannot_be_as_it_says(file):
    """It says so in single bytes, so it is not in UTF-16; browsers take UTF-8, too."""
    page = '<html><meta charset="utf-16"><p>Tïtle</p>'
    assert read_document(file("a.html", page)).text == "Tïtle\n"


def test_a_name_that_no_request_can_hold(tmp_path):
    """Linux lets names have any bytes."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/n\xe4me.txt"))
    path.write_text("text")
    assert read_document(path).name == "n?me.txt"


@pytest.mark.parametrize("pdf", [False, True])
def test_a_pipe(tmp_path, pdf):
    """``chat <(curl ...)``: it can be read once."""
    content = write_pdf(tmp_path / "a.pdf", ["text"]).read_bytes() if pdf else b"text"
    end, begin = os.pipe()
    try:
        os.write(begin, content)
        os.close(begin)
        assert read_document(Path(f"/dev/fd/{end}")).text.strip() == "text"
    finally:
        os.close(end)


def test_pages_of_a_pdf(tmp_path):
    path = write_pdf(tmp_path / "a.pdf", ["The first (page).", "", "The third page."])
    found = read_document(path)
    assert found.blank == 1
    places = [found.text.index(word) for word in ("first", "third")]
    assert [found.page(place) for place in places] == [1, 3]
    assert [found.page(place) for place in found.pages] == [1, 2, 3]


def test_a_pdf_that_anybody_may_read(tmp_path):
    """Protected against changes alone, with an empty password."""
    path = write_pdf(tmp_path / "a.pdf", ["Some text."], password="")
    assert "Some text." in read_document(path).text


def test_a_pdf_with_a_password(tmp_path):
    path = write_pdf(tmp_path / "my report.pdf", ["Some text."], password="secret")
    with pytest.raises(DocumentError) as error:
        read_document(path)
    assert "is protected by a password; take it off" in str(error.value)
    assert f"qpdf --password=PASSWORD --decrypt '{path}' 'my report'-open.pdf" in str(error.value)


@pytest.mark.parametrize(("pages", "said"), [([""], "1 page and"), (["", ""], "2 pages and")])
def test_a_scanned_pdf(tmp_path, pages, said):
    path = write_pdf(tmp_path / "a.pdf", pages)
    with pytest.raises(DocumentError, match=rf"{said} no text: it is scanned.*ocrmypdf {path} a-"):
        read_document(path)


def test_a_damaged_pdf(file):
    path = file("a.pdf", b"%PDF-1.7\n\xe2\xe3 no more")
    with pytest.raises(DocumentError, match=r"is damaged, or no PDF after all \(.*\); open it in"):
        read_document(path)


def test_a_pdf_without_pypdf(tmp_path, monkeypatch):
    path = write_pdf(tmp_path / "a.pdf", ["Some text."])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DocumentError) as error:
        read_document(path)
    assert "pip install pypdf (in a checkout: pip install '.[chat]')" in str(error.value)
    assert f"pdftotext {path} a.txt" in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; name a file with text"),
        (b" \n\t\n", "is empty; name a file with text"),
        (b"\xef\xbb\xbf", "is empty; name a file with text"),
        (b"<html><script>let a</script></html>", "has no text, only markup"),
        (b"text\0more", "is binary data; name a PDF, or a file of text, Markdown or HTML"),
        (b"\x7fELF\x02\x01\x01\0\0", "is binary data"),
        (b"PK\x03\x04\x14\0", "is an archive or an office document; export it as PDF or text"),
        (rb"{\rtf1\ansi Hello}", "is an office document; export it as PDF or text"),
        (b"%!PS-Adobe-3.0\n/Times", "is PostScript; make a PDF of it"),
        (b"BZh91AY&SY\xff", "is compressed; unpack it"),
        (b"\x89PNG\r\n\x1a\n\0", "is a picture; recognise its text first"),
        (b"GIF89a\xff", "is a picture; recognise its text first"),
        (b"\xff\xfe\x00", "is not utf-16 text"),
        ("Tïtle".encode("latin-1"), "is not UTF-8 text; if you know its encoding, convert it"),
        (b'<html><meta charset="none-such"><p>a', "is not none-such text"),
        (b'<html><meta charset="undefined"><p>a', "is not undefined text"),
    ],
)
def test_files_without_text(file, content, said):
    path = file("a.txt", content)
    with pytest.raises(DocumentError, match=re.escape(f"{path} {said}")):
        read_document(path)


def test_what_is_no_file(tmp_path):
    with pytest.raises(DocumentError, match="is a directory; name the files in it"):
        read_document(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_document(tmp_path / "none.txt")
    (tmp_path / "large.txt").open("wb").truncate(300 << 20)
    with pytest.raises(DocumentError, match="has more than 256 MiB; name a part of it"):
        read_document(tmp_path / "large.txt")
