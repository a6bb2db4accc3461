"""Attention and the worker know no family of methods and no kind of storage.

Both have rooms of their own, ``vllm_kvretrieval/methods`` and ``vllm_kvretrieval/storage``, and a
new one of either is a new file there.
"""

import re
from pathlib import Path

import pytest

from vllm_kvretrieval.retrieval.presets import preset_names

PACKAGE = Path(__file__).parents[2] / "vllm_kvretrieval"
FAMILIES = re.compile(
    r"\b("
    r"filters?|followers?|observ\w*|kept|keeper|keeping|drops?|dropp\w+|razor|retrieval head"
    r"|by_head|whole_contexts|roles_of|speculat\w*"
    r")\b"
)
STORAGES = re.compile(r"\b(disk|encod\w*|codec|slow|recall\w*|mmap|in_home|home|fast)\b")
ROOMS = {
    "attention/cpu/staging.py",  # what vLLM's kernel reads
    "attention/cpu/support.py",  # refusals of options
    "attention/cpu/backend.py",
}
PLAIN = ("full", "kvretrieval")
"""Presets whose names are words of their own, or the package's."""
WORKER = [f"engine/cpu/{name}.py" for name in ("worker", "choosers", "memory", "refusals")]
"""These allocate, and so know kinds of storage, but no methods."""


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


@pytest.mark.parametrize("name", [*known("attention/cpu"), "engine/cpu/choosers.py"])
def test_no_kind_of_storage_is_known(name):
    assert words(name, STORAGES) == []
