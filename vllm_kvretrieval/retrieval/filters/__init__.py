"""Filter layers of models (OmniKV): files that ``calibrate`` writes, and those of this package."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.files import has_file, path_of
from vllm_kvretrieval.retrieval.model_files import Kind, ModelFile
from vllm_kvretrieval.values import shortened

SHIPPED = Path(__file__).parent
FORMAT = "vllm-kvretrieval filters 1"
CALIBRATE = "vllm-kvretrieval calibrate MODEL TEXT"
KIND = Kind("filters", "a list of layers", FORMAT, CALIBRATE)


@dataclass(frozen=True)
class FilterFile(ModelFile):
    """The filters of one model.

    Attributes:
        filters: Numbers of layers, rising.
    """

    filters: tuple[int, ...]


def read_filters(given: Any) -> FilterFile:
    """Read a file that ``calibrate`` wrote.

    Args:
        given: Path of the file, or the option whose file has been read.

    Raises:
        RetrievalConfigError: There is no such file, or it is of another kind.
    """
    path, data = path_of(given), KIND.read(given)
    filters = data.get("filters")
    if not isinstance(filters, list) or not all(type(layer) is int for layer in filters):
        raise KIND.refuse(path, "has no list of layers as its filters")
    return FilterFile(data["model"], data["shape"], path, tuple(filters))


@functools.cache
def shipped() -> tuple[FilterFile, ...]:
    """The files of this package, by their names."""
    return tuple(read_filters(path) for path in sorted(SHIPPED.glob("*.json")))


def filters_for(model: str, config: Any) -> FilterFile:
    """The file of this package for a model; see :meth:`Kind.of_model`."""
    or_else = "; or name layers, such as [2, 8, 18]"
    return KIND.of_model(shipped(), model, config, "filter layers", or_else)


def check_filters(key: str, value: Any) -> Any:
    """Check the option ``filters``.

    Returns:
        A tuple of layers, or the file as it is named.

    Raises:
        RetrievalConfigError: It is neither, or the file cannot be read.
    """
    if isinstance(value, list | tuple) and all(type(layer) is int for layer in value):
        return tuple(value)
    if not isinstance(value, str) and not has_file(value):
        raise RetrievalConfigError(
            f"{key}={shortened(value)} must be a list of layers, such as [2, 8, 18], or the path "
            f"of a file that {CALIBRATE} wrote."
        )
    read_filters(value)
    return value
