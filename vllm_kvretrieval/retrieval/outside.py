"""Indexes and presets of other packages, found by entry points (see docs/extending.md)."""

import functools
from importlib import metadata
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError


@functools.cache
def names(group: str) -> tuple[str, ...]:
    """Names of a group's entry points; nothing is imported."""
    return tuple(sorted({point.name for point in metadata.entry_points(group=group)}))


def entry_points(group: str) -> dict[str, Any]:
    """The loaded objects that a group's entry points name.

    Raises:
        RetrievalConfigError: One cannot be loaded, or two have one name.
    """
    found: dict[str, Any] = {}
    for point in metadata.entry_points(group=group):
        if point.name in found:
            raise RetrievalConfigError(
                f"two packages bring an entry point {point.name} of {group}. Uninstall one of them."
            )
        try:
            found[point.name] = point.load()
        except Exception as error:
            raise RetrievalConfigError(
                f"entry point {point.name} = {point.value} of {group} cannot be loaded ({error}). "
                "Mend or uninstall the package that brings it."
            ) from error
    return found
