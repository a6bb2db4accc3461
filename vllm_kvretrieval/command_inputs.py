"""Inputs and outputs of the subcommands that run a model over a text."""

import argparse
import importlib.util
import json
import platform
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_kvretrieval import __version__
from vllm_kvretrieval.values import MOST, MOST_TOKENS

DTYPES = ("float32", "bfloat16", "float16")


def add_inputs(parser: argparse.ArgumentParser, text: bool = True) -> None:
    """Add the arguments for the model, perhaps a text, and the dtype."""
    parser.add_argument("model", metavar="MODEL", help="path, or name on a hub")
    if text:
        parser.add_argument("text", metavar="TEXT", type=Path, help="a plain text file (UTF-8)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="to compute in (default: %(default)s)"
    )


def number(text: str, least: int = 0, most: int = MOST_TOKENS) -> int:
    """Parse an argument that is a whole number."""
    if not text.isdecimal() or len(text) > len(str(MOST)) or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def count(text: str) -> int:
    """Parse an argument that is a positive number."""
    return number(text, 1)


def seed(text: str) -> int:
    """Parse an argument that is a seed of random numbers."""
    return number(text, most=MOST)


def share(text: str) -> float:
    """Parse an argument that is a share of a whole."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1, such as 0.25")
    return number


def require_plot(without: str = "leave the plot out by --no-plot") -> None:
    """Check, before anything takes time, that a plot can be drawn.

    Args:
        without: How to leave it out.

    Raises:
        ValueError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "drawing the plot needs matplotlib, which the extra [plot] brings: pip install "
            f"matplotlib (in a checkout: pip install '.[plot]'), or {without}"
        )


def read_text(path: Path) -> str:
    """The text of a file, with its ends of lines as they are: clients send the same bytes.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no text.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def printable(text: str) -> str:
    """A text without the characters by which it could command a terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def versions() -> dict[str, str]:
    """Versions of the packages that decide the result."""
    return {
        "python": platform.python_version(),
        "vllm-kvretrieval": __version__,
        **{package: metadata.version(package) for package in ("torch", "transformers")},
    }


def write(path: Path, result: dict[str, Any], long: Collection[str]) -> None:
    """Write a result as a file, in a directory that is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(result, long), encoding="utf-8")


def as_json(result: dict[str, Any], long: Collection[str]) -> str:
    """JSON with a line per field, and per item of fields that are long lists."""
    fields = []
    for key, value in result.items():
        text = json.dumps(value)
        if key in long:
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        fields.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"
