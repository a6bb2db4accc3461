"""Attention and the worker know no family of methods and no kind of storage.

Both have rooms of their own, ``vllm_kvretrieval/methods`` and ``vllm_kvretrieval/storage``, and a
new one of either is a new file there.
"""

import ast
import re
from pathlib import Path

import pytest

from vllm_kvretrieval.retrieval.presets import preset_names

PACKAGE = Path(__file__).parents[2] / "vllm_kvretrieval"
ROOT = "vllm_kvretrieval."
FAMILIES = re.compile(
    r"\b("
    r"filters?|followers?|observ\w*|kept|keeper|keeping|drops?|dropp\w+|razor|retrieval head"
    r"|by_head|whole_contexts|roles_of|speculat\w*"
    r")\b"
)
KINDS = {f"storage.{name}" for name in ("encoded", "file", "file_pages", "file_tokens", "mapped")}
"""Kinds of storage, which only their registry knows."""
BELOW = {"disk_space", "errors", "kernels", "limits", "options", "retrieval", "storage"}
"""What storage may import."""
ROOMS = {
    "attention/cpu/staging.py",  # what vLLM's kernel reads
    "attention/cpu/support.py",  # refusals of options
    "attention/cpu/backend.py",
}
PLAIN = ("full", "kvretrieval")
"""Presets whose names are words of their own, or the package's."""
WORKER = [f"engine/cpu/{name}.py" for name in ("worker", "choosers", "planner", "refusals")]


def known(*folders):
    for folder in folders:
        for path in sorted((PACKAGE / folder).glob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            if name not in ROOMS:
                yield name


def words(name, pattern):
    """Lines of a file in which such words stand."""
    lines = (PACKAGE / name).read_text().splitlines()
    return [
        f"{name}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if pattern.search(line)
    ]


@pytest.mark.parametrize("name", [*known("attention/cpu"), *WORKER])
def test_no_family_is_known(name):
    presets = re.compile(rf"\b({'|'.join(n for n in preset_names() if n not in PLAIN)})\b")
    assert words(name, FAMILIES) == []
    assert words(name, presets) == []


def imported(path):
    """The modules of the package that a file imports, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(ROOT):
            yield node.module.removeprefix(ROOT)


def test_kinds_of_storage_are_known_to_their_registry_alone():
    files = {path for path in PACKAGE.rglob("*.py") if path.parent.name != "storage"}
    assert len(files) > 100
    known = [(path, module) for path in files for module in imported(path) if module in KINDS]
    assert known == []


def test_storage_lies_below_what_uses_it():
    modules = {m for path in (PACKAGE / "storage").glob("*.py") for m in imported(path)}
    assert modules > KINDS
    assert {module.split(".")[0] for module in modules} <= BELOW
