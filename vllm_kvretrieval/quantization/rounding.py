"""The numbers of weights that come in 16 bits."""

import torch

from vllm_kvretrieval.quantization.packing import Packed, pack

GROUP = 32
"""Inputs with a scale and an offset of their own in 4 bits."""
GROUP_OF_8 = 128
"""Inputs with a scale of their own in 8 bits."""
SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that are tried; weights outside are cut off."""
AT_ONCE = 1 << 18
"""Weights that are rounded at a time, so that what is computed stays in a near cache."""


def rounded(weight: torch.Tensor, bits: int, by_outputs: bool = False) -> Packed:
    """The weights of a linear layer in 8 or 4 bits.

    8 bits: a scale for each output and each :data:`GROUP_OF_8` inputs. 4 bits: a scale and an
    offset for each output and each :data:`GROUP` inputs.

    Args:
        weight: [outputs, inputs].
        bits: 8 or 4.
        by_outputs: Whether each output has a single scale, of 8 bits.

    Raises:
        ValueError: A weight is not finite.
    """
    outputs, inputs = weight.shape
    if not torch.isfinite(weight).all():
        raise ValueError("weights that are infinite, or no numbers, cannot be rounded to few bits")
    numbers = torch.empty(outputs, inputs, dtype=torch.int8)
    size = GROUP if bits == 4 else inputs if by_outputs else min(GROUP_OF_8, inputs)
    groups = -(-inputs // size)
    scales = torch.empty(outputs, groups)
    offsets = None if bits == 8 else torch.empty(outputs, groups)
    step = max(AT_ONCE // inputs, 1)
    for first in range(0, outputs, step):
        part = slice(first, first + step)
        if offsets is None:
            numbers[part], scales[part] = _in_8_bits(weight[part].float(), size)
        else:
            numbers[part], scales[part], offsets[part] = _in_4_bits(weight[part].float())
    return pack(numbers, scales, offsets, bits, size)


def _in_groups(weight: torch.Tensor, size: int) -> torch.Tensor:
    """[outputs, groups, size]; the last input is repeated, which widens no range."""
    last = weight[:, -1:].expand(-1, -weight.shape[1] % size)
    return torch.cat((weight, last), 1).unflatten(1, (-1, size))


def _in_8_bits(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = _in_groups(weight, size)
    # Scales of groups keep 11 bits (float16), so they are rounded first, and up.
    mantissas, exponents = torch.frexp(groups.abs().amax(2, keepdim=True) / 127)
    scales = torch.ldexp((mantissas * 2048).ceil() / 2048, exponents)
    numbers = (groups / torch.where(scales > 0, scales, 1)).round().clamp(-127, 127)
    return numbers.flatten(1)[:, : weight.shape[1]].to(torch.int8), scales.squeeze(2)


def _in_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = weight.shape[1]
    groups = _in_groups(weight, GROUP)
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
