"""Other packages that bring indexes and presets, without pip: what an installed one looks like."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvretrieval import plugin
from vllm_kvretrieval.retrieval import index, outside, presets

MEDIAN = '''
from dataclasses import dataclass
from typing import ClassVar

from vllm_kvretrieval.extend import Field, Index, Preset, Rule


@dataclass(frozen=True)
class Median(Index):
    """The score is q.median, drawn out by a factor."""

    factor: float = 1.0
    name: ClassVar[str] = "median"

    def fields(self, head_size, entry_tokens):
        return (Field("median", None, (head_size,)),)

    def build(self, keys):
        return {"median": keys.median(1).values}

    def score(self, query, record, scale):
        return query @ record["median"].float().T * (scale * self.factor)


@dataclass(frozen=True)
class Peak(Index):
    """The score is the highest q.k, of the keys in the cache."""

    name: ClassVar[str] = "peak"
    reads_keys: ClassVar[bool] = True

    def fields(self, head_size, entry_tokens):
        return ()

    def build(self, keys):
        return {}

    def score(self, query, record, scale):
        return (record["keys"] @ query.T * scale).amax(1).T


@dataclass(frozen=True)
class Highest(Rule):
    """The pages that Peak selects if scores are pooled by the highest."""

    name: ClassVar[str] = "highest"

    def select(self, query, record, state):
        assert len(record["keys"]) >= state.last - 1 > state.first - 1
        assert (state.query is None) == (state.pages is None) == (not state.memory)
        if state.pages is not None:
            assert state.memory.pop("chosen").equal(state.pages)
        scores = (record["keys"] @ query.T * state.scale).amax((1, 2))
        best = scores[state.first : state.last].topk(state.count).indices + state.first
        state.memory["chosen"] = best.sort().values
        return best


TOY = Preset("the median of the keys", index="median")
RULED = Preset("pages with the highest q.k", index="highest")
'''
POINTS = {
    "indexes": {
        "median": "toy_index:Median",
        "peak": "toy_index:Peak",
        "highest": "toy_index:Highest",
    },
    "presets": {"toy": "toy_index:TOY", "ruled": "toy_index:RULED"},
}


def install(
    path: Path,
    code: str,
    points: dict[str, dict[str, str]],
    name: str = "toy",
    module: str | None = None,
) -> str:
    """Lay a package out under ``path``; gives what it adds to Python's path.

    Args:
        path: A directory of its own.
        code: Of its one module.
        points: Its entry points, by what ours follow the dot with: ``indexes`` or ``presets``.
        name: Of the package.
        module: Name of the module; by default ``NAME_index``.
    """
    info = path / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (path / f"{module or f'{name}_index'}.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, entries in points.items():
        lines += [f"[vllm_kvretrieval.{group}]", *(f"{n} = {v}" for n, v in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return str(path)


def _look_again() -> None:
    importlib.invalidate_caches()
    for cached in (outside.names, index.indexes, presets.presets):
        cached.cache_clear()


@contextmanager
def installed(*paths: str) -> Iterator[None]:
    """Put these on Python's path for this process, and for processes that are started meanwhile."""
    known = set(AttentionBackendEnum.__members__)
    modules = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))
        for path in paths:
            patch.syspath_prepend(path)
        _look_again()
        plugin.register()
        try:
            yield
        finally:
            for name in set(sys.modules) - modules:
                file = getattr(sys.modules[name], "__file__", None) or ""
                if str(Path(file).parent) in paths:
                    del sys.modules[name]
    _look_again()
    assert known <= set(AttentionBackendEnum.__members__)
