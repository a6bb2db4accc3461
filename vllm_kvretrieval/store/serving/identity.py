"""The facts that a stored block's bytes depend on beside tokens: model, weights, layout."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from vllm.model_executor.model_loader import base_loader
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from vllm_kvretrieval.compat import configured_block_size
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.layouts import layout_of

LAYOUT = 1
"""To be raised when the same bytes in a store come to mean something else."""
OF_LENGTH = ("longrope", "dynamic")
"""Kinds of rotary embeddings that depend on ``max_model_len``."""
PATHS = ("_name_or_path", "transformers_version")
"""Entries of a model's configuration on which nothing depends that it computes."""


def identity_of(
    vllm_config: Any, config: RetrievalConfig, layers: Sequence[str], weights: Sequence[str]
) -> dict[str, Any]:
    """The identity of a store on this machine.

    Not in it are methods and budgets, on which keys and values depend as their levels say.

    Args:
        vllm_config: vLLM's configuration.
        config: Options of the engine.
        layers: Names of the retrieval layers.
        weights: The hashes of the workers' weights, in order of their ranks.

    Returns:
        What JSON can hold.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    described = {k: v for k, v in model.hf_text_config.to_dict().items() if k not in PATHS}
    text = json.dumps(described, sort_keys=True, default=str)
    length = model.max_model_len if any(kind in text for kind in OF_LENGTH) else None
    seed = resolve_none_hash_seed(get_hash_fn_by_name(cache.prefix_caching_hash_algo))
    return {
        "vllm": vllm.__version__,
        "layout": LAYOUT,
        "model": model.architecture,
        "config": _hash(text),
        "weights": [*weights],
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "max_model_len": length,
        "kernels": cpu.isa(),
        "keys": layout_of(config, model.dtype, model.get_head_size()),
        "block_size": configured_block_size(vllm_config),
        "page_size": config.page_size,
        "rows": config.token_major,  # by the name that stores have
        "home": config.home,
        "codec": config.codec,
        "index": [repr(kind) for kind in config.index_kinds],
        "layers": list(layers),
        "hash": cache.prefix_caching_hash_algo,
        "seed": _hash(seed),
    }


@contextmanager
def hashing_weights() -> Iterator[list[str]]:
    """Hash the weights of the models that vLLM loads meanwhile, each before it packs them.

    Packed weights cannot be seen: vLLM hands them to oneDNN and drops its own copy.

    Yields:
        A hash for each model, in hexadecimal; to be read at the end.
    """
    hashes: list[str] = []
    process = base_loader.process_weights_after_loading

    def hash_and_process(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        hashes.append(weights_hash(model))
        return process(model, *args, **kwargs)

    base_loader.process_weights_after_loading = hash_and_process
    try:
        yield hashes
    finally:
        base_loader.process_weights_after_loading = process


def weights_hash(model: torch.nn.Module) -> str:
    """A hash of all that a checkpoint has of a model: names, types, shapes, and values."""
    tensors = sorted(model.state_dict().items())
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # hashing lets others run
        hashes = threads.map(lambda item: _tensor_hash(item[1]), tensors)
        total = hashlib.sha256()
        for (name, tensor), own in zip(tensors, hashes, strict=True):
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode() + own)
    return total.hexdigest()


def _tensor_hash(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy()).digest()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
