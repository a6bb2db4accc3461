"""Layers of vLLM's models with quantised weights."""

import functools

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import (
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_kvretrieval.quantization.packing import Packed
from vllm_kvretrieval.quantization.product import multiply, rows_of
from vllm_kvretrieval.quantization.rounding import rounded

VOCABULARY_BITS = 8


@functools.cache
def permit_tiles() -> None:
    """Ask the system for AMX, which vLLM's attention uses in this process without asking.

    Otherwise oneDNN asks, as it makes products of 16 bits; with ours in place of all of them a step
    of --enforce-eager would end in an illegal instruction. On other CPUs nothing happens.
    """
    torch.cpu._init_amx()


def keep(layer: torch.nn.Module, packed: Packed, name: str = "weight") -> None:
    """Let a layer have packed weights.

    Args:
        layer: The layer.
        packed: Its weights.
        name: The parameter in whose place they are.
    """
    permit_tiles()
    layer.register_parameter(name, Parameter(packed.weights, requires_grad=False))
    layer.register_buffer("packed_scales", packed.scales, persistent=False)
    layer.register_buffer("packed_groups", packed.groups, persistent=False)
    layer.packed_name = name
    layer.packed_numbers = packed[3:]


def kept(layer: torch.nn.Module) -> Packed:
    """What :func:`keep` has given a layer."""
    weights = getattr(layer, layer.packed_name)
    return Packed(weights, layer.packed_scales, layer.packed_groups, *layer.packed_numbers)


@register_weight_loader_v2_supported_method
class RoundedLinear(UnquantizedLinearMethod):
    """A linear layer whose weights are loaded in 16 bits, and then rounded."""

    supports_pre_processed_weights = False

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        of_mla = getattr(layer, "_cpu_skip_gemm_dispatch", False)
        if of_mla or layer.weight.dim() != 2 or layer.weight.is_meta:  # convolutions, missing ones
            super().process_weights_after_loading(layer)
        else:
            keep(layer, rounded(layer.weight, self.bits))

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not hasattr(layer, "packed_name"):
            return super().apply(layer, x, bias)
        return multiply(x, kept(layer), bias)


class RoundedVocabulary(UnquantizedEmbeddingMethod):
    """An output layer whose weights are loaded in 16 bits, and then rounded.

    Its rows may serve as embeddings, too.
    """

    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if layer.weight.is_meta:  # missing, and never used (--mm-encoder-only)
            super().process_weights_after_loading(layer)
        else:
            keep(layer, rounded(layer.weight, VOCABULARY_BITS, by_outputs=True))

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return multiply(x, kept(layer), bias)

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        return rows_of(kept(layer), input_, layer.params_dtype)

    def tie_weights(
        self, layer: torch.nn.Module, embed_tokens: VocabParallelEmbedding
    ) -> torch.nn.Module:
        """The embeddings are the output layer: their weights are rounded once."""
        if isinstance(embed_tokens.quant_method, RoundedVocabulary) and layer.bias is None:
            return embed_tokens
        return super().tie_weights(layer, embed_tokens)
