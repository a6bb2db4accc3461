"""The specification of products with quantised weights, in plain torch."""

import torch
from torch.nn import functional

from vllm_kvretrieval.quantization.packing import BLOCK, Packed, unpack

FEWEST_BY_TILES = 16
"""Tokens of a call from which on AMX multiplies in bfloat16."""


def by_tiles(isa, tokens):
    """Whether a product of so many tokens is one in bfloat16."""
    return isa == "avx512_amx" and tokens >= FEWEST_BY_TILES


def rounded_tokens(x):
    """Tokens in 8 bits: whole numbers in each block, by its largest input."""
    inputs = x.shape[-1]
    blocks = functional.pad(x.float(), (0, -inputs % BLOCK)).unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True)
    largest = torch.full_like(most, 127)  # of a number torch would multiply the reciprocal
    inverse = torch.where(most > 0, largest / most, 0)
    return ((blocks * inverse).round() * (most / 127)).flatten(-2)[..., :inputs]


def rounded_weights(packed: Packed):
    """Weights with the scale and the offset of their group in bfloat16; halves away from zero."""
    scales = packed.scales[: packed.outputs, None]
    within = unpack(packed._replace(scales=torch.ones_like(packed.scales)))
    nearest = (within.view(torch.int32) + 0x8000) & -0x10000
    return nearest.view(torch.float32) * scales


def factors(x, packed: Packed, tiles=False):
    """Tokens and weights as they are multiplied, in float64; by AMX or in 8 bits."""
    if tiles:
        return x.bfloat16().double(), rounded_weights(packed).double()
    return rounded_tokens(x).double(), unpack(packed).double()


def quantised_linear(x, packed: Packed, bias=None, tiles=False):
    """``x @ weights.T + bias`` in float64, of :func:`factors`."""
    tokens, weights = factors(x, packed, tiles)
    product = tokens @ weights.T
    return product if bias is None else product + bias.double()
