"""Every name that is imported from vLLM is there, as its source says; nothing of it is run.

It is the first thing to know of a new vLLM (``make test-next``): what has moved, all at once.
"""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("vllm_kvretrieval", "benchmarks", "examples", "tests")
EITHER = "vllm_kvretrieval/compat.py"
"""Imports what one version has or another."""


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Modules of vLLM that a file imports, each with a name from it or None."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    yield alias.name, None
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield str(node.module), alias.name


def source(module: str) -> Path | None:
    """The file of a module; None: there is none."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    path = Path(Path(spec.origin).parent, *module.split(".")[1:])
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.exists():
            return file
    return None


@cache
def names(module: str) -> frozenset[str]:
    """Names that a module defines or imports, or makes when they are asked for."""
    path = source(module)
    assert path is not None
    found, tree = set[str](), ast.parse(path.read_text())
    lazy = any(isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            found |= names(f"{module}.{node.module}" if node.level else str(node.module))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif lazy and isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return frozenset(found)


def is_there(module: str, name: str | None) -> bool:
    """Whether a module is, and has a name or a module of that name."""
    if source(module) is None:
        return False
    return name is None or name in names(module) or source(f"{module}.{name}") is not None


@pytest.mark.parametrize("folder", FOLDERS)
def test_names(folder):
    missing = [
        f"{path.relative_to(ROOT)}: {module} has no {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if str(path.relative_to(ROOT)) != EITHER
        for module, name in imports(path)
        if not is_there(module, name)
    ]
    assert missing == []


def test_what_is_missing_is_found():
    assert is_there("vllm", "LLM")
    assert is_there("vllm.v1.worker", "gpu_worker")
    assert not is_there("vllm", "LLMs")
    assert not is_there("vllm.nowhere", None)
