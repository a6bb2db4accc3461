"""Options that name files, and the reading of these files; see ``retrieval/files.py``."""

from collections.abc import Mapping
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval import filters, heads, prompt_shares, shares
from vllm_kvretrieval.retrieval.files import FILE, HOLDS, has_file

LOADERS = {
    "filters": filters.KIND.load,
    "heads": heads.KIND.load,
    prompt_shares.NAME: prompt_shares.KIND.load,
    "budget_shares": shares.load,
}
"""Functions that load the file of an option, by the option's name."""

BESIDE_FILE = ("heads",)
"""Options that may name more beside the file."""


def read_files(options: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's options, with the contents of files in place of their names.

    Raises:
        RetrievalConfigError: A file cannot be read, or is no JSON.
    """
    read = {key: _read(key, value) for key, value in options.items()}
    if isinstance(also := options.get("also"), Mapping):
        read["also"] = {name: _read_of_method(name, given) for name, given in also.items()}
    return read


def _read_of_method(name: Any, options: Any) -> Any:
    if not isinstance(options, Mapping):
        return options
    try:
        return {key: _read(key, value) for key, value in options.items()}
    except RetrievalConfigError as error:
        raise RetrievalConfigError(f"also: {name}: {error}") from None


def _read(key: Any, value: Any) -> Any:
    """An option."""
    named = value if isinstance(value, Mapping) and key in BESIDE_FILE else {FILE: value}
    path = named.get(FILE)
    if key not in LOADERS or not isinstance(path, str) or has_file(value) or path in shares.RULES:
        return value
    if not path:
        raise RetrievalConfigError(f"{key}='' names no file; name one, or leave the option out.")
    return {**named, HOLDS: LOADERS[key](path)}
