"""Files that people ask about, for tests."""

from collections.abc import Sequence
from pathlib import Path


def pdf(texts: Sequence[str]) -> bytes:
    """A PDF with a page for each text, a line each; of an empty text: a picture alone."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", ""]
    kids = []
    for text in texts:
        escaped = text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
        drawn = f"BT /F1 12 Tf 72 720 Td ({escaped}) Tj ET" if text else "0 0 100 100 re f"
        kids.append(f"{len(objects) + 1} 0 R")
        font = "<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources {font} "
            f"/Contents {len(objects) + 2} 0 R >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    count, begin = len(objects) + 1, len(out)
    trailer = f"<< /Size {count} /Root 1 0 R >>"
    tail = f"xref\n0 {count}\n0000000000 65535 f \n{table}trailer\n{trailer}\n"
    return out + f"{tail}startxref\n{begin}\n%%EOF\n".encode()


def write_pdf(path: Path, texts: Sequence[str], password: str | None = None) -> Path:
    """The same as a file, with a password or without."""
    path.write_bytes(pdf(texts))
    if password is not None:
        import pypdf

        writer = pypdf.PdfWriter(clone_from=path)
        writer.encrypt(password, algorithm="RC4-128")
        writer.write(path)
    return path
