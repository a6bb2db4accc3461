"""Files that options name: read once, when an engine is set up.

An option that names a file becomes a mapping with the file's path and contents. Every process of
the engine gets this mapping, so all of them agree, even if the file changes later.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError

FILE, HOLDS = "file", "holds"
"""Keys of such a mapping."""


def has_file(value: Any) -> bool:
    """Whether an option holds a file that has been read."""
    return isinstance(value, Mapping) and HOLDS in value and isinstance(value.get(FILE), str)


def as_written(value: Any) -> Any:
    """An option for messages: the path of a file, in place of its contents."""
    return value[FILE] if has_file(value) else value


def contents(given: Any, refuse: Callable[[Exception], RetrievalConfigError]) -> Any:
    """The contents of a JSON file.

    Args:
        given: The file's path, or an option whose file has been read.
        refuse: Makes the error for a file that cannot be read, or is no JSON, from Python's error.

    Raises:
        RetrievalConfigError: As ``refuse`` makes it.
    """
    if has_file(given):
        return given[HOLDS]
    try:
        return json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # too long a number, too deep a list
        raise refuse(error) from None


def reason(error: Exception) -> str:
    """Why a file cannot be read, in the words of the system, which has no need of its name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def path_of(given: Any) -> Path:
    """The path of a file, given as :func:`contents` takes it."""
    return Path(given[FILE] if has_file(given) else given)
