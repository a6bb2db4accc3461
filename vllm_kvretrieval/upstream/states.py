"""States of Mamba-2 layers at the ends of blocks, as vLLM's kernels for CPUs can give them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.kv_cache_interface import MambaSpec


def end_chunks_at_blocks(model: nn.Module) -> int:
    """Let chunks of prompts end where the prefix cache keeps a state.

    By default vLLM takes such a state out of the middle of a chunk. Its kernel for CPUs gives the
    state at the chunk's end alone, and the step fails.

    Args:
        model: The model as vLLM has loaded it, before it is asked for its KV cache.

    Returns:
        How many layers there are.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, MambaMixer2)]
    for layer in layers:
        layer.get_kv_cache_spec = _at_ends(layer.get_kv_cache_spec)
    return len(layers)


def _at_ends(get_spec: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get(vllm_config: Any) -> Any:
        spec = get_spec(vllm_config)
        if isinstance(spec, MambaSpec):
            spec = replace(spec, num_prefill_checkpoint_blocks=0)
        return spec

    return get
