"""How the kernel has quantised weights in memory (QuantisedLayer in csrc/cpu/kernels.h)."""

from typing import NamedTuple

import torch
from torch.nn import functional

from vllm_kvretrieval import _cpu

PANEL: int = _cpu.PANEL
"""Outputs that lie side by side."""
BLOCK: int = _cpu.BLOCK
"""Inputs that a token has a scale for; groups of weights are multiples of it."""
QUAD = 4
"""Inputs of an output that lie side by side."""
BITS = (8, 4)


class Packed(NamedTuple):
    """Weights of a linear layer: ``scales * (group scale * number + group offset)``.

    Attributes:
        weights: uint8 [panels, inputs / 4, PANEL, 4] of 8 bits (two's complement), or
            [panels, inputs / 8, PANEL, 4] of 4 (from 0 to 15; inputs i and i + 4 share a byte).
        scales: float32 [panels * PANEL]; of an output.
        groups: float16 [panels, groups, 2, PANEL]; a scale and an offset for each group of inputs.
            None: 1 and 0.
        outputs: How many there are; panels are padded.
        inputs: How many there are; the last block is padded.
        bits: 8 or 4.
        group: Inputs of a group.
    """

    weights: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor | None
    outputs: int
    inputs: int
    bits: int
    group: int


def pack(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bits: int,
    group: int,
) -> Packed:
    """Lay out weights for the kernel.

    Args:
        numbers: [outputs, inputs], whole; from -128 to 127 of 8 bits, from 0 to 15 of 4.
        scales: [outputs, groups]; a weight is its number by the scale of its group.
        offsets: [outputs, groups], added to each weight of a group; None: 0.
        bits: 8 or 4.
        group: Inputs of a group, a multiple of :data:`BLOCK`; with one group for all of them any
            number from ``inputs`` on.

    Returns:
        The weights; group scales and offsets are rounded to 11 bits.

    Raises:
        ValueError: Shapes do not fit each other, or groups do not fit blocks.
    """
    outputs, inputs = numbers.shape
    group = -(-min(group, inputs) // BLOCK) * BLOCK if group >= inputs else group
    groups = -(-inputs // group)
    if bits not in BITS or group % BLOCK:
        raise ValueError(f"{bits} bits, groups of {group}; there are {BITS}, multiples of {BLOCK}")
    if any(t is not None and t.shape != (outputs, groups) for t in (scales, offsets)):
        raise ValueError(f"{groups} groups of {outputs} outputs, and scales {tuple(scales.shape)}")
    rows, blocks = -(-outputs // PANEL) * PANEL, -(-inputs // BLOCK)
    padding = (0, blocks * BLOCK - inputs, 0, rows - outputs)
    # The conversion of a negative number to uint8 is two's complement in 16 bits alone.
    padded = functional.pad((numbers.to(torch.int16) & 0xFF).to(torch.uint8), padding)
    if bits == 8:
        weights = padded.view(rows // PANEL, PANEL, -1, QUAD).permute(0, 2, 1, 3).contiguous()
    else:
        pairs = padded.view(rows // PANEL, PANEL, -1, 2, QUAD).permute(3, 0, 2, 1, 4)
        weights = (pairs[0] | pairs[1] << 4).contiguous()
    above = functional.pad(scales.float(), (0, 0, 0, rows - outputs))
    if groups == 1 and offsets is None:
        return Packed(weights, above[:, 0].contiguous(), None, outputs, inputs, bits, group)
    added = torch.zeros_like(above)
    if offsets is not None:
        added[:outputs] = offsets
    # A power of two for each output, so that float16 keeps the digits of 16-bit scales.
    most = torch.maximum(above.abs(), added.abs() / 128).amax(1)
    unit = torch.exp2(torch.where(most > 0, most, 1).log2().ceil())
    both = torch.stack((above, added), 1) / unit[:, None, None]  # [rows, 2, groups]
    laid = both.view(rows // PANEL, PANEL, 2, groups).permute(0, 3, 2, 1).half().contiguous()
    return Packed(weights, unit, laid, outputs, inputs, bits, group)


def unpack(packed: Packed) -> torch.Tensor:
    """The weights, float32 [outputs, inputs]."""
    weights, scales, groups, outputs, inputs, bits, group = packed
    if bits == 8:
        numbers = weights.view(torch.int8)
    else:
        numbers = torch.stack((weights & 15, weights >> 4), 2).flatten(1, 2)
    values = numbers.permute(0, 2, 1, 3).flatten(2).float()  # [panels, PANEL, padded inputs]
    if groups is not None:
        wide = groups.float().repeat_interleave(group, 1)[:, : values.shape[2]]
        values = values * wide[:, :, 0].transpose(1, 2) + wide[:, :, 1].transpose(1, 2)
    return (values.flatten(0, 1) * scales[:, None])[:outputs, :inputs]
