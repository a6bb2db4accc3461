"""The rows of docs/surprises.md: each is a test, which says what is expected and what happens."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm

from vllm_kvretrieval import compat

HERE = Path(__file__).parent
LATEST = ".".join(vllm.__version__.split(".")[:2]) != compat.TESTED[0]
"""Whether vLLM is newer than the older one of the releases that are tested."""
KEY = "surprise"
"""The attribute of a test that has its row."""


@dataclass(frozen=True)
class Surprise:
    """A row of the page.

    Attributes:
        expected: What one would guess.
        happens: What is so instead, in the older of the releases of vLLM that are tested.
        source: Files that do it, below the folder of installed packages.
        remedy: What helps, or what this package does about it.
        newer: What happens since a release, by this release, where that differs.
        package: Whose behaviour it is.
        test: Names of the file and the function.
    """

    expected: str
    happens: str
    source: tuple[str, ...]
    remedy: str
    newer: Mapping[str, str] = field(default_factory=dict)
    package: str = "vllm"
    test: str = ""


def surprise(source: str, **words: Any) -> Callable[[Any], Any]:
    """Make a test a row.

    Args:
        source: Files that do it, with spaces between them; below the folder of vLLM, or with the
            name of another package in front.
        words: Further attributes of :class:`Surprise`.
    """

    def keep(test: Any) -> Any:
        package = words.get("package", "vllm")
        files = tuple(f"{package}/{name}" for name in source.split())
        place = f"{test.__module__.rpartition('.')[2]}.py::{test.__name__}"
        setattr(test, KEY, Surprise(source=files, test=place, **words))
        return test

    return keep


def modules() -> Iterator[Any]:
    """The modules with rows, as the page has them."""
    for path in sorted(HERE.glob("test_*.py")):
        if path.stem != "test_page":
            yield importlib.import_module(f"tests.surprises.{path.stem}")


def rows(module: Any) -> list[Surprise]:
    """The rows of a module, in its order."""
    return [getattr(test, KEY) for test in vars(module).values() if hasattr(test, KEY)]
