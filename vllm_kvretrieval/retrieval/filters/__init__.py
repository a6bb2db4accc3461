"""Which layers of a model are its filters (OmniKV): files that ``calibrate`` writes, and ours."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError

SHIPPED = Path(__file__).parent
FORMAT = "vllm-kvretrieval filters 1"
SHAPE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Fields of a model's configuration, by which its fine-tunes are the same model."""

CALIBRATE = "vllm-kvretrieval calibrate MODEL TEXT"


@dataclass(frozen=True)
class FilterFile:
    """The filters of one model.

    Attributes:
        model: Its name, the last part of a path.
        shape: Of its configuration, the fields of ``SHAPE``.
        filters: Numbers of layers, rising.
        path: Where this was read.
    """

    model: str
    shape: Mapping[str, Any]
    filters: tuple[int, ...]
    path: Path


def shape_of(config: Any) -> dict[str, Any]:
    """The fields of ``SHAPE`` of a model's (text) configuration."""
    return {key: getattr(config, key, None) for key in SHAPE}


def name_of(model: str) -> str:
    """A model's name of its path or of its place on a hub."""
    return Path(model).name


def read_filters(path: str | Path) -> FilterFile:
    """Read what ``calibrate`` wrote.

    Raises:
        RetrievalConfigError: There is no such file, or it is none of these.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise RetrievalConfigError(
            f"filters={str(path)!r} cannot be read ({error}); name a file that {CALIBRATE} wrote, "
            "or a list of layers."
        ) from None
    except json.JSONDecodeError as error:
        raise RetrievalConfigError(
            f"filters={str(path)!r} is not valid JSON ({error}); write it anew by {CALIBRATE}."
        ) from None
    if why := _why_not(data):
        raise RetrievalConfigError(f"filters={str(path)!r} {why}; write it anew by {CALIBRATE}.")
    return FilterFile(data["model"], data["shape"], tuple(data["filters"]), path)


def _why_not(data: Any) -> str | None:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return f"is no file of filters (format {FORMAT!r})"
    if not isinstance(data.get("model"), str):
        return "names no model"
    shape = data.get("shape")
    if not isinstance(shape, dict) or set(shape) != set(SHAPE):
        return f"has no shape of a model ({', '.join(SHAPE)})"
    filters = data.get("filters")
    if not isinstance(filters, list) or not all(type(layer) is int for layer in filters):
        return "has no list of layers as its filters"
    return None


@functools.cache
def shipped() -> tuple[FilterFile, ...]:
    """Those that come with the package, by the names of their files."""
    return tuple(read_filters(path) for path in sorted(SHIPPED.glob("*.json")))


def filters_for(model: str, config: Any) -> FilterFile:
    """What comes with the package for a model.

    Where several are of its shape, the one of its name, or else the first.

    Raises:
        RetrievalConfigError: There is none.
    """
    shape = shape_of(config)
    alike = [file for file in shipped() if file.shape == shape]
    if not alike:
        known = ", ".join(file.model for file in shipped())
        raise RetrievalConfigError(
            f"the filter layers of {model} are not known (known: {known}). Measure them by "
            f"'{CALIBRATE}', and name the file that it writes as kv_retrieval.filters; or name "
            "layers, such as [2, 8, 18]."
        )
    named = [file for file in alike if file.model.lower() == name_of(model).lower()]
    return (named or alike)[0]


def check_model(file: FilterFile, model: str, config: Any) -> None:
    """Refuse a file of another model.

    Raises:
        RetrievalConfigError: Says in what they differ.
    """
    shape = shape_of(config)
    differing = [key for key in SHAPE if file.shape[key] != shape[key]]
    if differing:
        parts = (f"{key} {file.shape[key]}, not {shape[key]}" for key in differing)
        raise RetrievalConfigError(
            f"filters={str(file.path)!r} was made for {file.model}, which is another model than "
            f"{model} ({'; '.join(parts)}); write one for it by {CALIBRATE}."
        )
