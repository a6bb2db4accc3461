"""Rotary embedding of queries with a dimension of heads, which vLLM's CPU kernel mistakes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


def flatten_heads(model: nn.Module) -> int:
    """Hand queries and keys to vLLM's kernel as [tokens, heads * size], as it takes them.

    It takes each head of [tokens, heads, size] for a token (LFM2's, with ``--enforce-eager``): it
    would rotate by wrong positions, and by memory behind them.

    Returns:
        The number of rotary embeddings whose calls are changed.
    """
    layers = [module for module in model.modules() if _calls_kernel(module)]
    for layer in layers:
        layer._forward_method = _flattened(layer._forward_method)
    return len(layers)


def _calls_kernel(module: nn.Module) -> bool:
    method = getattr(module, "_forward_method", None)
    return getattr(method, "__func__", None) is RotaryEmbedding.forward_cpu


def _flattened(rotate: Callable[..., Any]) -> Callable[..., Any]:
    def rotate_flat(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = positions.dim()
        if query.dim() < tokens + 2:
            return rotate(positions, query, key)
        flat = None if key is None else key.flatten(tokens)
        rotated, keys = rotate(positions, query.flatten(tokens), flat)
        return rotated.view_as(query), None if key is None else keys.view_as(key)

    return rotate_flat
