"""What figures of an engine depend on, beside its model's name and its options."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from vllm_kvretrieval import __version__
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.certificates import WEIGHTS
from vllm_kvretrieval.storage.layouts import layout_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KINDS = (".safetensors", ".bin", ".pt")
"""Ends of the names of files with weights."""
STRETCHES, STRETCH = 64, 1 << 16
"""How many parts of such a file are hashed, and bytes of each."""
DIGITS = 16
"""Digits of the hash that are kept."""


def facts_of(vllm_config: "VllmConfig", config: RetrievalConfig) -> dict[str, Any]:
    """The facts by name, as JSON holds them.

    Args:
        vllm_config: The configuration of the engine.
        config: Its options, with those that follow from the machine.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    layout = layout_of(config, model.dtype, model.get_head_size())
    kept = ", ".join(repr(kind) for kind in config.index_kinds)
    return {
        WEIGHTS: weights_of(model.model, model.revision),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "cache": str(cache.cache_dtype),
        "rotations": _rotations(model.hf_text_config),
        "overrides": _json(model.hf_overrides) if model.hf_overrides else None,
        "ranks": vllm_config.parallel_config.world_size,
        "kernels": f"{cpu.isa()} ({layout})",
        "pages": f"{config.page_size} tokens, {kept}, remainder {config.own.remainder:g}",
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "vllm-kvretrieval": __version__,
    }


def weights_of(model: str, revision: str | None = None) -> str | None:
    """A hash of names, sizes and parts of the files of a model's weights.

    Args:
        model: The model's directory, or its place on a hub.
        revision: Of the hub's.

    Returns:
        In hexadecimal; None: no files are here.
    """
    files = sorted(p for p in _folder(model, revision).glob("*") if p.suffix in KINDS)
    total = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        total.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for part in range(STRETCHES):
                file.seek(max(0, size - STRETCH) * part // (STRETCHES - 1))
                total.update(file.read(STRETCH))
    return total.hexdigest()[:DIGITS] if files else None


def _folder(model: str, revision: str | None) -> Path:
    if (folder := Path(model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return folder  # which is not there, and has no files


def _rotations(config: Any) -> str:
    """The parameters of rotary embeddings, those of ``--hf-overrides`` included."""
    return _json(getattr(config, "rope_parameters", None))


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
