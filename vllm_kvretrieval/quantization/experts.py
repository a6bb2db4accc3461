"""Mixtures of experts, which no quantisation method of ours serves."""

import torch

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Fields of configurations of mixtures of experts."""
NO_EXPERTS = (
    "is not served for mixtures of experts; serve the model in 16 bits, or a checkpoint of "
    "compressed-tensors or AWQ, which vLLM reads"
)


def refuse_experts(layer: torch.nn.Module, prefix: str, what: str) -> None:
    """Raise `ValueError` for a layer of experts, which ``what`` has no products for."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    if isinstance(layer, RoutedExperts):
        raise ValueError(f"{what} {NO_EXPERTS} ({prefix})")
