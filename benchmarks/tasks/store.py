"""Keeps results: each cell as soon as it is computed, and the full-attention reference for good."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import read_json, write_json
from benchmarks.tasks.base import Sample
from benchmarks.tasks.metrics import TOP_LOGPROBS, Generated, Scored


def fingerprint(data: Any) -> str:
    """Return a short hash of anything that JSON can express."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def files_fingerprint(paths: Sequence[Path]) -> str:
    """Return a short hash of the files' names and contents."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def model_fingerprint(model: Path) -> str:
    """Return a short hash of a checkpoint: its configuration, tokenizer and weights.

    Raises:
        FileNotFoundError: there is no checkpoint; the message says how to get one.
    """
    if not (model / "config.json").exists():
        raise FileNotFoundError(
            f"{model} holds no checkpoint (no config.json): build the benchmark's models with "
            "`make models`, or name your own with --model"
        )
    files = [path for path in model.iterdir() if path.suffix in (".json", ".safetensors")]
    return files_fingerprint(files)


def build_fingerprint() -> str:
    """Return a short hash of the installed plug-in: its Python and its compiled code.

    Raises:
        ModuleNotFoundError: the plug-in is not installed.
    """
    spec = importlib.util.find_spec("vllm_kvretrieval")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("vllm_kvretrieval is not installed: run `pip install .` first")
    roots = [Path(location) for location in spec.submodule_search_locations]
    return files_fingerprint(
        [path for root in roots for path in root.rglob("*") if path.suffix in (".py", ".so")]
    )


def reference_key(model: str, samples: Sequence[Sample], vllm_version: str) -> str:
    """Return the key of a full-attention reference: whatever can change it is in here.

    Args:
        model: the checkpoint's `model_fingerprint`.
        samples: the task's samples, in tokens.
        vllm_version: version of the engine that computes it.
    """
    content = [asdict(sample) for sample in samples]
    return fingerprint([model, content, vllm_version, TOP_LOGPROBS])


class Results:
    """The result file: a header and the cells by name, written after every cell."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self._header = header
        stored = read_json(path) or {}
        self._cells: dict[str, dict[str, Any]] = stored.get("cells", {})

    def get(self, name: str, key: str) -> dict[str, Any] | None:
        """Return the stored cell, or None where there is none or `key` says it is another's."""
        cell = self._cells.get(name)
        return cell if cell is not None and cell["key"] == key else None

    def put(self, name: str, key: str, cell: dict[str, Any]) -> None:
        """Store a cell under its name, in place of an older one, and write the file."""
        self._cells[name] = {"key": key, **cell}
        write_json(self.path, {**self._header, "cells": self._cells})


class References:
    """Full-attention results of whole tasks, one compact JSON file each, never computed twice."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, task: str, key: str) -> Path:
        return self._directory / f"{task}-{key}.json"

    def get(self, task: str, key: str) -> list[Generated] | None:
        """Return the stored reference of a task, or None."""
        stored = read_json(self._path(task, key))
        if stored is None:
            return None
        return [_unpack(sample) for sample in stored["samples"]]

    def put(self, task: str, key: str, samples: Sequence[Generated]) -> None:
        """Store a task's reference. The directory ignores itself in git."""
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / ".gitignore").write_text("*\n")
        packed = {"task": task, "samples": [_pack(sample) for sample in samples]}
        write_json(self._path(task, key), packed, indent=None)


def _pack(sample: Generated) -> dict[str, Any]:
    packed: dict[str, Any] = {"tokens": sample.tokens}
    if sample.scored is not None:
        packed["target"] = sample.scored.target.round(5).tolist()
        packed["top_ids"] = sample.scored.top_ids.tolist()
        packed["top_logprobs"] = sample.scored.top_logprobs.round(5).tolist()
    return packed


def _unpack(packed: dict[str, Any]) -> Generated:
    scored = None
    if "target" in packed:
        scored = Scored(
            np.array(packed["target"]),
            np.array(packed["top_ids"]),
            np.array(packed["top_logprobs"]),
        )
    return Generated(tuple(packed["tokens"]), scored)
