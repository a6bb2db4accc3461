"""Keeps results: each cell as soon as it is computed, and the full-attention reference for good."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import build
from benchmarks.build import files_fingerprint
from benchmarks.common import machine, read_json, versions, write_json
from vllm_kvretrieval.calibration.divergence import TOP_LOGPROBS, Generated, Scored
from vllm_kvretrieval.calibration.samples import Sample


def fingerprint(data: Any) -> str:
    """Return a short hash of anything that JSON can express."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


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


def reference_key(
    model: str, samples: Sequence[Sample], dtype: str, engine: Sequence[Any] = ()
) -> str:
    """Return the key of a full-attention reference: whatever can change it is in here.

    Args:
        model: the checkpoint's `model_fingerprint`.
        samples: the task's samples, in tokens.
        dtype: what they are computed with.
        engine: what else they are computed by, where it is not stock vLLM.
    """
    content = [asdict(sample) for sample in samples]
    computed = [versions().get("vllm", "unknown"), machine()["isa"], dtype, *engine]
    return fingerprint([model, content, computed, TOP_LOGPROBS])


class Results:
    """The result file: a header and the cells by name, written after every cell.

    Every cell carries its build, unless that is the header's. A cell of another one is never handed
    out, since the build is part of its key, but stays in the file until it is computed anew: see
    `print_builds`.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self._header = header
        stored = read_json(path) or {}
        self.cells: dict[str, dict[str, Any]] = {
            name: {"build": stored["build"], **cell}
            for name, cell in stored.get("cells", {}).items()
        }
        """All cells, by name."""

    def get(self, name: str, key: str) -> dict[str, Any] | None:
        """Return the stored cell, or None where there is none or `key` says it is another's."""
        cell = self.cells.get(name)
        return cell if cell is not None and cell["key"] == key else None

    def put(self, name: str, key: str, cell: dict[str, Any]) -> None:
        """Store a cell under its name, in place of an older one, and write the file."""
        mine = self._header["build"]
        self.cells[name] = {"key": key, **cell, "build": mine}
        cells = {
            name: {key: value for key, value in cell.items() if (key, value) != ("build", mine)}
            for name, cell in self.cells.items()
        }
        write_json(self.path, {**self._header, "cells": cells})

    def print_builds(self) -> None:
        """Print the build in use, and the names of the file's cells that are of another one."""
        mine = self._header["build"]
        print(f"build:   {build.label(mine)}\n")
        outdated = [
            name for name, cell in self.cells.items() if not build.same(cell.get("build"), mine)
        ]
        if outdated:
            print(f"{len(outdated)} cells of {self.path} are of another build; run them again:")
            print(*(f"  {name}" for name in outdated), "", sep="\n")


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
        write_json(self._path(task, key), packed)


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
