"""What the subcommands that measure a model share."""

import argparse
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_kvretrieval import __version__

DTYPES = ("float32", "bfloat16", "float16")


def versions() -> dict[str, str]:
    """Of what decides the result."""
    return {
        "python": platform.python_version(),
        "vllm-kvretrieval": __version__,
        **{package: metadata.version(package) for package in ("torch", "transformers")},
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Write JSON, a line per field and per row of a matrix."""
    fields = []
    for key, value in result.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], list):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        fields.append(f" {json.dumps(key)}: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n")


def count(text: str) -> int:
    """An argument that is a number of something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def share(text: str) -> float:
    """An argument that is a part of a whole."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1, such as 0.25")
    return number
