"""Products of ours for quantised checkpoints that vLLM reads: compressed-tensors, AWQ and GPTQ."""

from collections.abc import Sequence

import torch
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_INT8_KERNELS,
    _POSSIBLE_KERNELS,
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    unpack_quantized_values_into_int32,
)
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from vllm_kvretrieval.quantization.layers import keep, kept
from vllm_kvretrieval.quantization.packing import BLOCK, Packed, pack
from vllm_kvretrieval.quantization.product import multiply

BITS_OF = {
    scalar_types.uint4: 4,
    scalar_types.uint8: 8,
    scalar_types.uint4b8: 4,
    scalar_types.uint8b128: 8,
}
"""Bits of the types of weights that are served, with zeros and without."""


def pack_unsigned(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, group: int
) -> Packed:
    """Weights of a checkpoint, which are ``scale * (number - zero)``.

    Args:
        numbers: [outputs, inputs], from 0 on.
        scales: [outputs, groups].
        zeros: [outputs, groups], whole; None: half of the numbers' range.
        bits: 8 or 4.
        group: Inputs of a group; -1: all.
    """
    middle, inputs = 1 << (bits - 1), numbers.shape[1]
    signed = 0 if bits == 4 else middle  # what the kernel's numbers are less than the checkpoint's
    wide = scales.float()
    if zeros is not None:
        offsets = wide * (signed - zeros)
    else:
        offsets = None if bits == 8 else wide * -middle
    return pack(numbers - signed, wide, offsets, bits, inputs if group == -1 else group)


class KvrWNA16LinearKernel(MPLinearKernel):
    """Weights of 4 or 8 bits, with groups or without, of the three formats."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.weight_type not in BITS_OF:
            return False, f"weights of type {c.weight_type}; 4 and 8 bits are served"
        inputs = c.partition_weight_shape[0]
        if c.group_size != -1 and (c.group_size % BLOCK or inputs % c.group_size):
            return False, (
                f"groups of {c.group_size} of {inputs} inputs; they must be multiples of {BLOCK}, "
                "and divide the inputs"
            )
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        config = self.config
        kind, bits = config.weight_type, BITS_OF[config.weight_type]
        packed, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        numbers = unpack_quantized_values_into_int32(packed.data, kind, packed.packed_dim)
        if packed.input_dim == 0:
            numbers = numbers.t()
        inputs = config.partition_weight_shape[0]
        scale = scales.data if scales.output_dim == 0 else scales.data.t()
        zeros = None
        if config.zero_points:
            assert self.w_zp_name is not None
            given = getattr(layer, self.w_zp_name)
            zeros = unpack_quantized_values_into_int32(given.data, kind, given.packed_dim)
            if given.output_dim == 1:
                zeros = zeros.t()
            zeros = zeros[: scale.shape[0]]
        numbers = numbers[: scale.shape[0], :inputs]
        keep(layer, pack_unsigned(numbers, scale, zeros, bits, config.group_size), self.w_q_name)
        for name in (self.w_s_name, self.w_zp_name):
            if name is not None and hasattr(layer, name):
                delattr(layer, name)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return multiply(x, kept(layer), bias)


class KvrInt8ScaledMMLinearKernel(Int8ScaledMMLinearKernel):
    """Weights of 8 bits whose checkpoint has tokens in 8 bits, too.

    The kernel finds scales of tokens itself, for blocks of inputs, and so more finely.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight_name, scale_name, *others = self.layer_param_names
        weight, scales = getattr(layer, weight_name).data, getattr(layer, scale_name).data
        if not self.config.is_channelwise:
            scales = convert_to_channelwise(scales, layer.logical_widths)
        outputs, inputs = weight.shape
        scales = scales.float().reshape(-1, 1).expand(outputs, 1)
        keep(layer, pack(weight, scales, None, 8, inputs), weight_name)
        for name in (scale_name, *others):
            if hasattr(layer, name):
                delattr(layer, name)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return multiply(x, kept(layer), bias)


def offer_kernels(first: bool) -> None:
    """Let vLLM choose our products for checkpoints that it reads. Idempotent.

    Args:
        first: Whether ours come before its own; else they serve what its own refuse.
    """
    first_4_bits = first or not hasattr(torch.ops._C, "cpu_gemm_wna16")  # as built for AVX2
    tables: Sequence[tuple[list[type], type, bool]] = (
        (_POSSIBLE_KERNELS[PlatformEnum.CPU], KvrWNA16LinearKernel, first_4_bits),
        (_POSSIBLE_INT8_KERNELS[PlatformEnum.CPU], KvrInt8ScaledMMLinearKernel, first),
    )
    for kernels, ours, leads in tables:
        if ours in kernels:
            kernels.remove(ours)
        kernels.insert(0 if leads else len(kernels), ours)
