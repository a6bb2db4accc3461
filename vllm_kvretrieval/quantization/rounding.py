"""The numbers of weights that come in 16 bits."""

import torch

from vllm_kvretrieval.quantization.packing import Packed, pack

GROUP = 32
"""Inputs with a scale and an offset of their own in 4 bits."""
SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that are tried; weights outside are cut off."""
AT_ONCE = 1 << 18
"""Weights that are rounded at a time, so that what is computed stays in a near cache."""


def rounded(weight: torch.Tensor, bits: int) -> Packed:
    """The weights of a linear layer in 8 or 4 bits.

    8 bits: a scale for each output. 4 bits: a scale and an offset for each output and each
    :data:`GROUP` inputs.

    Args:
        weight: [outputs, inputs].
        bits: 8 or 4.

    Raises:
        ValueError: A weight is not finite.
    """
    outputs, inputs = weight.shape
    if not torch.isfinite(weight).all():
        raise ValueError("weights that are infinite, or no numbers, cannot be rounded to few bits")
    numbers = torch.empty(outputs, inputs, dtype=torch.int8)
    groups = 1 if bits == 8 else -(-inputs // GROUP)
    scales = torch.empty(outputs, groups)
    offsets = None if bits == 8 else torch.empty(outputs, groups)
    step = max(AT_ONCE // inputs, 1)
    for first in range(0, outputs, step):
        part = slice(first, first + step)
        if offsets is None:
            numbers[part], scales[part] = _in_8_bits(weight[part].float())
        else:
            numbers[part], scales[part], offsets[part] = _in_4_bits(weight[part].float())
    return pack(numbers, scales, offsets, bits, inputs if bits == 8 else GROUP)


def _in_8_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = weight / torch.where(scales > 0, scales, 1)
    return numbers.round().to(torch.int8), scales


def _in_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs, inputs = weight.shape
    missing = -inputs % GROUP
    last = weight[:, -1:].expand(-1, missing)  # which widens no range
    groups = torch.cat((weight, last), 1).view(outputs, -1, GROUP)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    best = torch.full_like(low, torch.inf)
    scales, offsets = torch.zeros_like(low), torch.zeros_like(low)
    for share in SHRUNK:
        middle, half = (low + high) / 2, (high - low) / 2 * share
        scale, offset = half / 7.5, middle - half
        near = _nearest(groups, scale, offset)
        loss = (near * scale + offset - groups).square().sum(2, keepdim=True)
        better = loss < best
        best = torch.where(better, loss, best)
        scales, offsets = torch.where(better, scale, scales), torch.where(better, offset, offsets)
    numbers = _nearest(groups, scales, offsets).flatten(1)[:, :inputs]
    return numbers.to(torch.int8), scales.squeeze(2), offsets.squeeze(2)


def _nearest(weights: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return ((weights - offset) / torch.where(scale > 0, scale, 1)).round().clamp(0, 15)
