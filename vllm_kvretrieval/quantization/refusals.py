"""Quantised weights that nothing serves on this CPU are refused before they are read."""

import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.quantization.packing import BITS, BLOCK

if TYPE_CHECKING:
    from vllm.config import VllmConfig

INSTEAD = "take the model's 16-bit checkpoint, with --quantization kvr_int8 or kvr_int4"


def check_weights(vllm_config: "VllmConfig") -> None:
    """Refuse checkpoints that vLLM accepts here, and fails to load or to multiply later.

    Raises:
        RetrievalConfigError: Says what of the weights is not served, and what to take instead.
    """
    named = vllm_config.model_config.quantization  # by a plug-in that reads GGUF
    if vllm_config.load_config.load_format == "gguf" and named is None:
        raise RetrievalConfigError(f"this vLLM reads no GGUF files; {INSTEAD}.")
    for bits, group in _formats(vllm_config.quant_config):
        by_vllm = bits == 4 and group % 2 == 0 and _multiplies_4_bits()
        if bits not in BITS or (group != -1 and group % BLOCK and not by_vllm):
            groups = "" if group == -1 else f" in groups of {group} inputs"
            raise RetrievalConfigError(
                f"weights of {bits} bits{groups} are not served on this CPU, but those of "
                f"{BITS[1]} and {BITS[0]} bits, in groups of multiples of {BLOCK}; {INSTEAD}."
            )


def _formats(config: Any) -> Iterator[tuple[int, int]]:
    """Bits and groups of weights whose tokens have 16 bits; -1: one group for all inputs."""
    if hasattr(config, "weight_bits"):
        yield config.weight_bits, config.group_size
    for scheme in (getattr(config, "target_scheme_map", None) or {}).values():
        weights = scheme["weights"]
        if weights.type == "int" and scheme["input_activations"] is None:
            yield weights.num_bits, weights.group_size or -1


def _multiplies_4_bits() -> bool:
    """Whether vLLM's library has the product: its build for AVX2 lacks it."""
    return platform.machine() != "x86_64" or torch.cpu._is_avx512_supported()
