"""Presets of other packages: the code that a stored figure depends on."""

from __future__ import annotations

import inspect
from importlib import import_module, metadata
from pathlib import Path

from benchmarks.build import files_fingerprint
from vllm_kvretrieval.retrieval.presets import ENTRY_POINTS, OWN, presets


def code_of(preset: str) -> str:
    """Return a short hash of a preset and of the code behind it; empty for presets of ours.

    The code is that of the packages, or modules, that bring the preset and its index.
    """
    if preset in OWN or preset not in presets():
        return ""
    modules = {point.module for point in metadata.entry_points(group=ENTRY_POINTS, name=preset)}
    index = presets()[preset].index
    names = [index] if isinstance(index, str) else [*index] if isinstance(index, dict) else []
    for name in names:
        points = metadata.entry_points(group="vllm_kvretrieval.indexes", name=name)
        modules |= {point.module for point in points}
    files: set[Path] = set()
    for name in modules:
        module = import_module(name.partition(".")[0])
        source = Path(inspect.getfile(module))
        files |= {source} if source.name != "__init__.py" else {*source.parent.rglob("*.py")}
    return files_fingerprint([*files])
